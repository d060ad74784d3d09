//! Running a program to its end, but not for ever.
//!
//! Every command of the harness goes through here. Output is collected in unnamed files, never in
//! pipes: a detached container inherits the standard streams of its `runc create`, and would hold a
//! pipe open long after runc is gone. A command that outlives its time is killed with its whole
//! process group, and the panic shows what it had said.

use std::fmt;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// The path of the program `name` next to the program at `program`: one that another package builds.
pub fn sibling(program: &str, name: &str) -> &'static str {
    let path = Path::new(program).with_file_name(name);
    assert!(path.exists(), "{} isn't built; run cargo build --workspace --bins", path.display());
    path.into_os_string().into_string().expect("its path is text").leak()
}

/// What a program left behind: its status and what it wrote.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The command line, for messages.
    pub command: String,
    /// How it ended.
    pub status: ExitStatus,
    /// All of standard output, invalid UTF-8 replaced.
    pub stdout: String,
    /// All of standard error, invalid UTF-8 replaced.
    pub stderr: String,
    /// Wall time from start to end.
    pub took: Duration,
}

impl Outcome {
    /// Panics with everything the command said unless it succeeded.
    #[track_caller]
    pub fn ok(self) -> Self {
        self.exits(0)
    }

    /// Panics with everything the command said unless it ended with exit status `code`.
    #[track_caller]
    pub fn exits(self, code: i32) -> Self {
        assert!(self.status.code() == Some(code), "expected exit status {code} of {self}");
        self
    }

    /// Panics unless the command ended by itself with an exit status other than 0.
    #[track_caller]
    pub fn fails(self) -> Self {
        assert!(self.status.code().is_some_and(|code| code != 0), "expected a failure of {self}");
        self
    }

    /// Standard output without the white space around it: an id, a word, a number.
    pub fn text(&self) -> &str {
        self.stdout.trim()
    }

    /// Whether standard output has exactly this line.
    pub fn has_line(&self, line: &str) -> bool {
        self.stdout.lines().any(|candidate| candidate == line)
    }

    /// Standard output as JSON.
    ///
    /// # Panics
    ///
    /// Where it isn't.
    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        match serde_json::from_str(&self.stdout) {
            Ok(value) => value,
            Err(error) => panic!("expected JSON ({error}) of {self}"),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "`{}`: {} after {:?}", self.command, self.status, self.took)?;
        writeln!(f, "--- standard output\n{}", self.stdout.trim_end())?;
        write!(f, "--- standard error\n{}", self.stderr.trim_end())
    }
}

/// Runs `command` with empty standard input and waits for its end; kills its process group and
/// panics after `limit`.
///
/// What it left running in the background is not waited for.
#[must_use]
#[track_caller]
pub fn run_with_timeout(command: &mut Command, limit: Duration) -> Outcome {
    command.stdin(Stdio::null());
    finish(command, limit)
}

/// Like [`run_with_timeout`], with `input` on standard input.
#[must_use]
#[track_caller]
pub fn run_with_input(command: &mut Command, input: &[u8], limit: Duration) -> Outcome {
    let mut file = unnamed_file();
    file.write_all(input)
        .and_then(|()| file.seek(SeekFrom::Start(0)))
        .expect("a temporary file can be written");
    command.stdin(file);
    finish(command, limit)
}

/// A program that runs while its caller goes on; see [`start`].
#[derive(Debug)]
pub struct Running {
    line: String,
    child: Child,
    stdout: File,
    stderr: File,
    begun: Instant,
}

/// Starts `command` with empty standard input, in a process group of its own.
#[track_caller]
pub fn start(command: &mut Command) -> Running {
    command.stdin(Stdio::null());
    Running::new(command)
}

impl Running {
    #[track_caller]
    fn new(command: &mut Command) -> Self {
        let line = command_line(command);
        let (stdout, stderr) = (unnamed_file(), unnamed_file());
        command.stdout(duplicate(&stdout)).stderr(duplicate(&stderr)).process_group(0);
        let begun = Instant::now();
        let child = command.spawn();
        let child = child.unwrap_or_else(|error| panic!("`{line}` can't be started: {error}"));
        Running { line, child, stdout, stderr, begun }
    }

    /// The process that was started.
    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("a child of ours can be waited for").is_some()
    }

    /// Kills it, and none of its children.
    pub fn kill(&mut self) {
        let _ = self.child.kill(); // it has ended, then
    }

    /// Waits for its end; kills its process group and panics `limit` after its start.
    #[must_use]
    #[track_caller]
    pub fn end(mut self, limit: Duration) -> Outcome {
        let mut nap = Duration::from_millis(1);
        let in_time = loop {
            if self.has_ended() {
                break true;
            }
            if self.begun.elapsed() > limit {
                break false;
            }
            std::thread::sleep(nap);
            nap = (nap * 2).min(Duration::from_millis(20));
        };
        if !in_time {
            // The child isn't reaped yet, so its number can't have gone to another group.
            let _ = killpg(self.pid(), Signal::SIGKILL);
        }
        let status = self.child.wait().unwrap_or(ExitStatus::from_raw(Signal::SIGKILL as i32));
        let outcome = Outcome {
            command: self.line,
            status,
            stdout: contents(self.stdout),
            stderr: contents(self.stderr),
            took: self.begun.elapsed(),
        };
        assert!(in_time, "killed for running longer than {limit:?}: {outcome}");
        outcome
    }
}

#[track_caller]
fn finish(command: &mut Command, limit: Duration) -> Outcome {
    Running::new(command).end(limit)
}

/// The command as one would type it, without its environment.
fn command_line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

fn unnamed_file() -> File {
    tempfile::tempfile().expect("a temporary file can be made")
}

fn duplicate(file: &File) -> File {
    file.try_clone().expect("a descriptor can be duplicated")
}

fn contents(mut file: File) -> String {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0))
        .and_then(|_| file.read_to_end(&mut bytes))
        .expect("a temporary file can be read");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The end of a log, which is where an engine says why it gave up.
pub(super) fn last_lines(log: &str, count: usize) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}
