//! Runs a program with a time limit and bounded output.
//!
//! Owns a child's life: its environment, its process group, its time, how much of its output is
//! retained, its end. Must not know what the program is for. Invariants: [`run`] returns within the
//! limit and `REAP_LIMIT`, whatever the child does and whichever process inherited its pipes; a
//! child that reaches the limit is killed with its process group; a full pipe blocks no child.
//!
//! It polls. A thread per pipe would last as long as any process holds the pipe, and the runtime
//! must have a single thread when it clones the monitor.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::io::ioctl_fionbio;
use rustix::process::{Pid, Signal, kill_process_group};
use thiserror::Error;

/// Most bytes retained of standard error: the last ones.
pub const STDERR_BYTES_MAX: usize = 4 << 10;

/// How long a killed child may take to exit. One that is stuck inside a driver never does, and must
/// not block us.
const REAP_LIMIT: Duration = Duration::from_millis(500);

/// Longest pause between two polls.
const PAUSE_MAX: Duration = Duration::from_millis(5);

/// Most reads of a pipe in one poll, with [`STDERR_BYTES_MAX`] bytes each: what a pipe holds. A
/// child that never stops printing must not keep us from the clock.
const READS_MAX: usize = 16;

/// What a child gets, and how long it may take.
#[derive(Debug)]
pub struct Bounds<'a> {
    /// All that it gets of our environment: an engine's, or a caller's, may have `LD_PRELOAD`,
    /// `LD_LIBRARY_PATH`, `LD_AUDIT` and more of that kind.
    pub variables: &'a [&'a str],
    pub stdin: Stdio,
    /// Its standard output, and with it what ends the run.
    pub stdout: Stdout,
    pub limit: Duration,
}

/// Where a child's standard output goes.
#[derive(Debug)]
pub enum Stdout {
    /// Elsewhere. The run ends when the child exits; what it started may go on.
    To(Stdio),
    /// To us: these first bytes. The run ends with the last of them or with the output, whichever
    /// is first. The child is killed then, with its process group.
    First(usize),
}

/// What a child printed, and how it ended.
#[derive(Debug)]
pub struct Ended {
    /// How it ended; `None` if that is lost: this process ignores SIGCHLD and the kernel has reaped
    /// the child, or the child doesn't exit.
    pub status: Option<ExitStatus>,
    /// The bytes of [`Stdout::First`].
    pub stdout: Vec<u8>,
    /// The last [`STDERR_BYTES_MAX`] bytes of standard error.
    pub stderr: Vec<u8>,
}

/// Why a child did not end by itself.
#[derive(Debug, Error)]
pub enum RunError {
    /// It can't be started.
    #[error(transparent)]
    Start(io::Error),
    /// It can't be waited for, and was killed.
    #[error(transparent)]
    Wait(io::Error),
    /// It reached the limit, and was killed.
    #[error("it takes too long")]
    TooSlow {
        /// Whether it has exited.
        reaped: bool,
        /// The last [`STDERR_BYTES_MAX`] bytes of standard error.
        stderr: Vec<u8>,
    },
}

/// Runs `command` within `bounds`, which replace its environment and its standard streams.
///
/// # Errors
///
/// If it can't be started or waited for, or takes too long.
pub fn run(mut command: Command, bounds: Bounds<'_>) -> Result<Ended, RunError> {
    let Bounds { variables, stdin, stdout, limit } = bounds;
    let (stdout, awaited) = match stdout {
        Stdout::To(elsewhere) => (elsewhere, None),
        Stdout::First(bytes_max) => (Stdio::piped(), Some(Retained::First(bytes_max))),
    };
    let inherited = variables.iter().filter_map(|name| Some((*name, std::env::var_os(name)?)));
    command.env_clear().envs(inherited);
    command.stdin(stdin).stdout(stdout).stderr(Stdio::piped()).process_group(0);
    let begun = Instant::now();
    let mut child = command.spawn().map_err(RunError::Start)?;
    let mut stderr = Pipe::new(child.stderr.take(), Retained::Last(STDERR_BYTES_MAX));
    let mut stdout = awaited.map(|retained| Pipe::new(child.stdout.take(), retained));
    let mut pause = Duration::from_millis(1);
    loop {
        stderr.read();
        let ended = match &mut stdout {
            Some(stdout) => {
                stdout.read();
                stdout.has_ended().then(|| kill(&mut child).unwrap_or(Exit(None)))
            }
            None => exit(&mut child).map_err(|error| {
                kill(&mut child);
                RunError::Wait(error)
            })?,
        };
        if let Some(Exit(status)) = ended {
            // What it printed last.
            stderr.read();
            let stdout = stdout.map(|pipe| pipe.bytes).unwrap_or_default();
            return Ok(Ended { status, stdout, stderr: stderr.bytes });
        }
        let Some(left) = limit.checked_sub(begun.elapsed()).filter(|left| !left.is_zero()) else {
            let reaped = kill(&mut child).is_some();
            stderr.read();
            return Err(RunError::TooSlow { reaped, stderr: stderr.bytes });
        };
        sleep(pause.min(left));
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// That a child has exited; `None` if this process ignores SIGCHLD, so that the kernel has reaped
/// the child and its status is lost.
struct Exit(Option<ExitStatus>);

/// Whether the child has exited. It is reaped then.
fn exit(child: &mut Child) -> io::Result<Option<Exit>> {
    match child.try_wait() {
        Ok(status) => Ok(status.map(|status| Exit(Some(status)))),
        Err(error) if error.raw_os_error() == Some(Errno::CHILD.raw_os_error()) => {
            Ok(Some(Exit(None)))
        }
        Err(error) => Err(error),
    }
}

/// Kills the child with its process group; `None` if it doesn't exit.
fn kill(child: &mut Child) -> Option<Exit> {
    // It isn't reaped yet, so the id is still the child's, and its group's as long as any process
    // of the group lives.
    if kill_process_group(Pid::from_child(child), Signal::KILL).is_err() {
        // If this fails, too, there is nothing left but to wait.
        let _ = child.kill();
    }
    let killed = Instant::now();
    loop {
        match exit(child) {
            Ok(None) if killed.elapsed() < REAP_LIMIT => sleep(Duration::from_millis(1)),
            Ok(exit) => return exit,
            Err(_) => return None,
        }
    }
}

/// Which bytes of an output are retained.
#[derive(Debug)]
enum Retained {
    First(usize),
    Last(usize),
}

/// The end of a pipe from which an output is read without waiting.
#[derive(Debug)]
struct Pipe {
    /// `None` at the end of the output.
    file: Option<File>,
    retained: Retained,
    bytes: Vec<u8>,
}

impl Pipe {
    /// An output that can't be read without waiting isn't read.
    fn new(pipe: Option<impl Into<OwnedFd>>, retained: Retained) -> Self {
        let file = pipe.map(|pipe| File::from(pipe.into()));
        let file = file.filter(|file| ioctl_fionbio(file, true).is_ok());
        Pipe { file, retained, bytes: Vec::new() }
    }

    /// Reads what is there, and at most as much as a pipe holds.
    fn read(&mut self) {
        let mut buffer = [0; STDERR_BYTES_MAX];
        for _ in 0..READS_MAX {
            let Some(file) = &mut self.file else { return };
            match file.read(&mut buffer) {
                Ok(0) => self.file = None,
                Ok(length) => self.retain(&buffer[..length]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    fn retain(&mut self, read: &[u8]) {
        match self.retained {
            Retained::First(bytes_max) => {
                let missing = bytes_max.saturating_sub(self.bytes.len());
                self.bytes.extend_from_slice(&read[..missing.min(read.len())]);
            }
            Retained::Last(bytes_max) => {
                self.bytes.extend_from_slice(read);
                let surplus = self.bytes.len().saturating_sub(bytes_max);
                self.bytes.drain(..surplus);
            }
        }
    }

    /// Whether all that is retained of it is here.
    fn has_ended(&self) -> bool {
        let is_full = match self.retained {
            Retained::First(bytes_max) => self.bytes.len() >= bytes_max,
            Retained::Last(_) => false,
        };
        self.file.is_none() || is_full
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsRawFd;
    use std::os::unix::process::ExitStatusExt;
    use std::path::Path;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// A shell that runs `script`, whose `$0` is `dir`.
    fn shell(script: &str, dir: &Path, stdout: Stdout, limit: Duration) -> Result<Ended, RunError> {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]).arg(dir);
        let bounds = Bounds { variables: &["PATH"], stdin: Stdio::null(), stdout, limit };
        run(command, bounds)
    }

    fn printed(script: &str, dir: &Path) -> String {
        let ended = shell(script, dir, Stdout::First(1 << 20), LONG).unwrap();
        String::from_utf8(ended.stdout).unwrap()
    }

    fn ignored() -> Stdout {
        Stdout::To(Stdio::null())
    }

    /// The process ids that a script wrote into files of these names.
    fn ids<const N: usize>(dir: &Path, names: [&str; N]) -> [i32; N] {
        names.map(|name| fs::read_to_string(dir.join(name)).unwrap().trim().parse().unwrap())
    }

    /// Waits until a killed process has exited; its new parent reaps it at any time.
    fn await_exit(pid: i32) {
        let begun = Instant::now();
        let state = || {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next())
        };
        while !matches!(state(), None | Some('Z' | 'X')) {
            assert!(begun.elapsed() < LONG, "{pid} runs");
            sleep(Duration::from_millis(5));
        }
    }

    fn is_reaped(pid: i32) -> bool {
        !Path::new(&format!("/proc/{pid}")).exists()
    }

    /// A child gets the variables of its bounds, no other of ours, and none of its command.
    #[test]
    fn only_stated_variables_are_inherited() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("/usr/bin/env");
        command.env("LD_PRELOAD", dir.path());
        let bounds = Bounds {
            variables: &["PATH", "CGPU_NOT_SET"],
            stdin: Stdio::null(),
            stdout: Stdout::First(1 << 20),
            limit: LONG,
        };
        let ended = run(command, bounds).unwrap();
        let path = std::env::var("PATH").unwrap();
        assert_eq!(String::from_utf8(ended.stdout).unwrap(), format!("PATH={path}\n"));
    }

    /// A child has its standard streams alone, and leads its process group.
    #[test]
    fn descriptors_and_group_are_not_inherited() {
        let dir = tempfile::tempdir().unwrap();
        let open = fs::File::create(dir.path().join("open")).unwrap();
        let seen = printed("ls -l /proc/$$/fd; cut -d ' ' -f 5 /proc/$$/stat; echo $$", dir.path());
        assert!(open.as_raw_fd() > 2 && !seen.contains("/open"), "{seen}");
        let ids: Vec<_> = seen.lines().rev().take(2).collect();
        assert_eq!(ids[0], ids[1], "{seen}");
    }

    /// At the limit the child is killed and reaped, its own children are killed, and what it printed
    /// is there.
    #[test]
    fn limit_kills_the_process_group() {
        for stdout in [ignored(), Stdout::First(1)] {
            let dir = tempfile::tempdir().unwrap();
            let script = r#"echo waiting >&2; sleep 600 & echo $! > "$0/grandchild"
                            echo $$ > "$0/child"; wait"#;
            // The limit is the time that the shell has for these files.
            let error = shell(script, dir.path(), stdout, Duration::from_secs(2)).unwrap_err();
            let RunError::TooSlow { reaped: true, stderr } = error else { panic!("{error:?}") };
            assert_eq!(stderr, b"waiting\n");
            let [child, grandchild] = ids(dir.path(), ["child", "grandchild"]);
            assert!(is_reaped(child));
            await_exit(grandchild);
        }
    }

    /// A child whose output is awaited ends with it, and so does its process group: at the last byte
    /// that is retained, or when the output is closed.
    #[test]
    fn awaited_output_ends_the_child() {
        for (script, expected) in
            [("yes", &b"y\ny\ny"[..]), ("echo a; exec >&-; sleep 600", b"a\n"), ("exit 0", b"")]
        {
            let dir = tempfile::tempdir().unwrap();
            let script = format!("echo $$ > \"$0/child\"; {script}");
            let ended = shell(&script, dir.path(), Stdout::First(5), LONG).unwrap();
            assert_eq!(ended.stdout, expected, "{script}");
            let [child] = ids(dir.path(), ["child"]);
            assert!(is_reaped(child), "{script}");
        }
    }

    /// More than a pipe holds on standard error blocks no child; the last bytes are retained.
    #[test]
    fn surplus_of_standard_error_is_dropped() {
        let script = "head -c 300000 /dev/zero | tr '\\0' x >&2; echo end >&2; echo done";
        for (stdout, printed) in [(ignored(), &b""[..]), (Stdout::First(100), b"done\n")] {
            let ended = shell(script, Path::new("/"), stdout, LONG).unwrap();
            assert_eq!(ended.stdout, printed);
            assert_eq!(ended.stderr.len(), STDERR_BYTES_MAX);
            assert!(ended.stderr.ends_with(b"xxend\n"));
        }
    }

    /// A child that never stops printing reaches its limit.
    #[test]
    fn endless_standard_error_reaches_the_limit() {
        let limit = Duration::from_millis(200);
        for stdout in [ignored(), Stdout::First(1)] {
            let error = shell("yes >&2; :", Path::new("/"), stdout, limit).unwrap_err();
            assert!(matches!(error, RunError::TooSlow { reaped: true, .. }), "{error:?}");
        }
    }

    /// A process that left the group has the child's pipes: the child's exit ends the wait for the
    /// exit, and the limit ends the wait for the output.
    #[test]
    fn inherited_pipes_do_not_block() {
        let script = r#"setsid sleep 600 & echo $! > "$0/grandchild""#;
        let begun = Instant::now();
        for stdout in [ignored(), Stdout::First(1)] {
            let is_awaited = matches!(stdout, Stdout::First(_));
            let dir = tempfile::tempdir().unwrap();
            let result = shell(script, dir.path(), stdout, Duration::from_secs(2));
            match result {
                Ok(ended) => assert!(!is_awaited && ended.status.unwrap().success()),
                Err(error) => assert!(
                    is_awaited && matches!(error, RunError::TooSlow { reaped: true, .. }),
                    "{error:?}"
                ),
            }
            assert!(begun.elapsed() < LONG);
            let [grandchild] = ids(dir.path(), ["grandchild"]);
            let _ = rustix::process::kill_process(Pid::from_raw(grandchild).unwrap(), Signal::KILL);
        }
    }

    /// The status is the child's: an exit code or a signal. Without a program there is no child.
    #[test]
    fn status_is_the_childs_own() {
        let status =
            |script| shell(script, Path::new("/"), ignored(), LONG).unwrap().status.unwrap();
        assert_eq!(status("exit 3").code(), Some(3));
        assert_eq!(status("kill -SEGV $$").signal(), Some(11));
        let bounds =
            Bounds { variables: &[], stdin: Stdio::null(), stdout: ignored(), limit: LONG };
        let error = run(Command::new("/nowhere/program"), bounds).unwrap_err();
        assert!(
            matches!(&error, RunError::Start(source) if source.kind() == io::ErrorKind::NotFound)
        );
        assert_eq!(error.to_string(), "No such file or directory (os error 2)");
    }

    /// If this process ignores SIGCHLD, the status is lost, and nothing else. The test runs itself
    /// in such a process.
    #[test]
    fn ignored_sigchld_loses_the_status_alone() {
        if std::env::var_os("CGPU_TEST_SIGCHLD").is_some() {
            for (stdout, printed) in [(ignored(), &b""[..]), (Stdout::First(100), b"a\n")] {
                let script = "echo a; echo b >&2; exit 3";
                let ended = shell(script, Path::new("/"), stdout, LONG).unwrap();
                assert_eq!(ended.status, None);
                assert_eq!((&*ended.stdout, &*ended.stderr), (printed, &b"b\n"[..]));
            }
            return;
        }
        let mut command = Command::new("env");
        command.arg("--ignore-signal=CHLD").arg(std::env::current_exe().unwrap());
        command.args(["child::tests::ignored_sigchld_loses_the_status_alone", "--exact"]);
        let output = command.env("CGPU_TEST_SIGCHLD", "1").output().unwrap();
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && printed.contains("1 passed"), "{printed}");
    }
}
