//! Questions to a monitor.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use thiserror::Error;

use super::wire::{Answer, Question};

/// How long a monitor may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

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
    Strange {
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
    ask_within(socket, question, PATIENCE)
}

/// The same, where so long may be waited at each step.
pub(super) fn ask_within(
    socket: &Path,
    question: &Question,
    patience: Duration,
) -> Result<Answer, AskError> {
    let name = || socket.display().to_string();
    let strange = |source| AskError::Strange { socket: name(), source };
    let mut text = serde_json::to_string(question).map_err(strange)?;
    text.push('\n');
    let answer = converse(socket, &text, patience)
        .map_err(|source| AskError::Silent { socket: name(), source })?;
    serde_json::from_str(&answer).map_err(strange)
}

fn converse(socket: &Path, text: &str, patience: Duration) -> io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    stream.write_all(text.as_bytes())?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    if answer.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(answer)
}
