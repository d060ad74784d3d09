//! Questions to a monitor.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use thiserror::Error;

use super::wire::{Answer, Question};

/// How long a monitor may take to answer.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The longest answer of one of several, in bytes: [`super::wire::MOST_PROCESSES_TOLD`] processes
/// on ten GPUs.
const MOST_BYTES: u64 = 1 << 16;

/// Why there is no answer.
#[derive(Debug, Error)]
pub enum AskError {
    /// It isn't there, or doesn't speak.
    #[error(
        "the monitor at {socket} does not answer: {source}; the container can't use its GPUs any more: create it again"
    )]
    Silent {
        /// Its control socket.
        socket: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It speaks otherwise.
    #[error("the monitor at {socket} is of another version: {source}; run `cgpu upgrade-monitors`")]
    OtherVersion {
        /// Its control socket.
        socket: String,
        /// What isn't understood.
        #[source]
        source: serde_json::Error,
    },
}

/// What the monitor at `socket` answers to `question`.
///
/// # Errors
///
/// Where there is no answer in time, or none that can be read.
pub fn ask(socket: &Path, question: &Question) -> Result<Answer, AskError> {
    let name = || socket.display().to_string();
    let other_version = |source| AskError::OtherVersion { socket: name(), source };
    let line = line(question).map_err(other_version)?;
    let answer =
        exchange(socket, &line).map_err(|source| AskError::Silent { socket: name(), source })?;
    serde_json::from_str(&answer).map_err(other_version)
}

/// What several answer, all together in so long; `None` of who doesn't.
pub(crate) fn ask_all(questions: &[(&Path, &Question)], timeout: Duration) -> Vec<Option<Answer>> {
    let until = Instant::now() + timeout;
    let asked = questions.iter().map(|(socket, question)| {
        let mut stream = connect_at_once(socket).ok()?;
        // It's short, and there's room.
        stream.write_all(line(question).ok()?.as_bytes()).ok()?;
        stream.set_nonblocking(false).ok()?;
        Some(stream)
    });
    // All are asked before the first is waited for.
    let asked: Vec<Option<UnixStream>> = asked.collect();
    let answered = asked.into_iter().map(|stream| {
        let stream = stream?;
        let left = until.saturating_duration_since(Instant::now());
        // Who was slower than others had as long.
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1)))).ok()?;
        let mut answer = String::new();
        BufReader::new(stream.take(MOST_BYTES)).read_line(&mut answer).ok()?;
        serde_json::from_str(&answer).ok()
    });
    answered.collect()
}

/// A connection, where there's room for one.
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
