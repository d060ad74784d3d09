//! Asks a monitor questions over its control socket.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use thiserror::Error;

use super::wire::{Answer, Question};

/// How long a monitor may take to answer one question.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The longest answer that [`ask_all`] reads, in bytes: [`super::wire::MOST_PROCESSES_REPORTED`] processes on ten GPUs.
const MOST_BYTES: u64 = 1 << 16;

/// Why a monitor gave no answer.
#[derive(Debug, Error)]
pub enum AskError {
    /// The monitor has ended, or does not answer.
    #[error(
        "the monitor at {socket} does not answer: {source}; the container can't use its GPUs any more: create it again"
    )]
    Silent {
        /// The monitor's control socket.
        socket: String,
        #[source]
        source: io::Error,
    },
    /// The answer is not one that this version knows.
    #[error("the monitor at {socket} is of another version: {source}; run `cgpu upgrade-monitors`")]
    OtherVersion {
        /// The monitor's control socket.
        socket: String,
        /// The part of the answer that can't be parsed.
        #[source]
        source: serde_json::Error,
    },
}

/// Asks the monitor at `socket` the `question`, and returns its answer.
///
/// # Errors
///
/// Where no answer comes within two seconds, or the answer can't be parsed.
pub fn ask(socket: &Path, question: &Question) -> Result<Answer, AskError> {
    let name = || socket.display().to_string();
    let other_version = |source| AskError::OtherVersion { socket: name(), source };
    let line = line(question).map_err(other_version)?;
    let answer =
        exchange(socket, &line).map_err(|source| AskError::Silent { socket: name(), source })?;
    serde_json::from_str(&answer).map_err(other_version)
}

/// Asks several monitors at once; all answers together may take `timeout`. `None` for a monitor that does not answer.
pub fn ask_all(questions: &[(&Path, &Question)], timeout: Duration) -> Vec<Option<Answer>> {
    let until = Instant::now() + timeout;
    let asked = questions.iter().map(|(socket, question)| {
        let mut stream = connect_at_once(socket).ok()?;
        // The question is short, and the socket's buffer is empty: the write never waits.
        stream.write_all(line(question).ok()?.as_bytes()).ok()?;
        stream.set_nonblocking(false).ok()?;
        Some(stream)
    });
    // `collect` sends every question before the first answer is waited for.
    let asked: Vec<Option<UnixStream>> = asked.collect();
    let answered = asked.into_iter().map(|stream| {
        let stream = stream?;
        let left = until.saturating_duration_since(Instant::now());
        // The time may be over while slower monitors were read. This monitor had the same time, so its answer is still
        // taken where it is there already: a read timeout can't be zero.
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1)))).ok()?;
        let mut answer = String::new();
        BufReader::new(stream.take(MOST_BYTES)).read_line(&mut answer).ok()?;
        serde_json::from_str(&answer).ok()
    });
    answered.collect()
}

/// Whether a monitor listens at a socket, however busy it is.
pub fn is_listening(socket: &Path) -> bool {
    connect_at_once(socket).map_or_else(|error| error.kind() == io::ErrorKind::WouldBlock, |_| true)
}

/// Connects without waiting: fails where the socket's backlog is full.
fn connect_at_once(socket: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let stream = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&stream, &SocketAddrUnix::new(socket)?)?;
    Ok(stream.into())
}

fn line(question: &Question) -> serde_json::Result<String> {
    Ok(serde_json::to_string(question)? + "\n")
}

fn exchange(socket: &Path, line: &str) -> io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    stream.write_all(line.as_bytes())?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    if answer.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(answer)
}
