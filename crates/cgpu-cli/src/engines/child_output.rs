//! What a program of the host prints, within bounds: a runtime's version, containerd's dump.
//!
//! Owns the child's life; must not know what versions mean. It leads a process group, so
//! that its own children end with it, and gets none of our environment but `PATH`. A program
//! that prints nothing is described by the end of its standard error and its exit status.

use std::io::{self, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// How long it may take; runc takes some milliseconds.
const LIMIT: Duration = Duration::from_secs(2);

/// Most bytes read of what it prints.
const OUTPUT_BYTES_MAX: u64 = 4096;

/// Most bytes read of its standard error.
const STDERR_BYTES_MAX: u64 = 16384;

/// How long the end of its standard error may take after its own end.
const STDERR_LIMIT: Duration = Duration::from_secs(1);

/// What `program --version` prints, which begins with a line that isn't empty; why there is none.
pub(crate) fn version_of(program: &Path) -> Result<String, String> {
    let bytes = output_of(program, &["--version"], OUTPUT_BYTES_MAX, LIMIT)?;
    let output = String::from_utf8_lossy(&bytes);
    match output.lines().next() {
        Some(line) if !line.trim().is_empty() => Ok(output.trim().to_owned()),
        _ => Err("it prints no version".to_owned()),
    }
}

/// The first `bytes_max` bytes that `program ARGUMENTS` prints within `limit`, at least one; why
/// there are none.
pub(super) fn output_of(
    program: &Path,
    arguments: &[&str],
    bytes_max: u64,
    limit: Duration,
) -> Result<Vec<u8>, String> {
    let mut command = Command::new(program);
    // The directory of services.
    command.args(arguments).env_clear().current_dir("/");
    command.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn().map_err(|error| error.to_string())?;
    let output = read_in_thread(child.stdout.take(), bytes_max);
    let errors = read_in_thread(child.stderr.take(), STDERR_BYTES_MAX);
    let first = output.recv_timeout(limit);
    // Not reaped yet, so the id is still the child's. It may have exited.
    if let Ok(leader) = i32::try_from(child.id()) {
        let _ = killpg(Pid::from_raw(leader), Signal::SIGKILL);
    }
    let ended = child.wait();
    match first {
        Ok(Ok(bytes)) if bytes.is_empty() => {
            let stderr = errors.recv_timeout(STDERR_LIMIT).ok().and_then(Result::ok);
            Err(no_output(ended.ok(), &stderr.unwrap_or_default()))
        }
        Ok(read) => read.map_err(|error| error.to_string()),
        Err(_) => Err(format!("it takes longer than {} s", limit.as_secs())),
    }
}

/// The first `bytes_max` bytes of `pipe`; the rest is read too, and dropped. In a thread of its own:
/// a process that holds the pipe open beyond the group's end blocks that thread alone.
fn read_in_thread(
    pipe: Option<impl Read + Send + 'static>,
    bytes_max: u64,
) -> mpsc::Receiver<io::Result<Vec<u8>>> {
    let (sender, receiver) = mpsc::channel();
    if let Some(mut pipe) = pipe {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            let read = pipe.by_ref().take(bytes_max).read_to_end(&mut bytes);
            // The receiver may have timed out.
            let _ = sender.send(read.map(|_| bytes));
            let _ = io::copy(&mut pipe, &mut io::sink());
        });
    }
    receiver
}

/// Why a program that ended as `ended` printed nothing, by the last line of its `stderr`.
fn no_output(ended: Option<ExitStatus>, stderr: &[u8]) -> String {
    let stderr = String::from_utf8_lossy(stderr);
    let last = stderr.lines().map(str::trim).rfind(|line| !line.is_empty());
    // A signal may be our own, after it closed its output.
    let signal = ended.and_then(|ended| ended.signal()).filter(|signal| *signal != 9);
    match (last, signal, ended.and_then(|ended| ended.code())) {
        (Some(last), ..) => last.to_owned(),
        (None, Some(signal), _) => format!("signal {signal} ended it"),
        (None, None, Some(code)) if code != 0 => format!("it exited with {code} and no word"),
        _ => "it printed nothing".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// A program; a shell writes it, so that no fork in a test that runs at the same time inherits it
    /// open for writing (ETXTBSY).
    fn program(dir: &Path, script: &str) -> PathBuf {
        let path = dir.join("program");
        let written = Command::new("/bin/sh")
            .args(["-c", r#"printf '#!/bin/sh\n%s\n' "$2" > "$1" && chmod 755 "$1""#, "sh"])
            .args([path.as_os_str(), script.as_ref()])
            .status();
        assert!(written.unwrap().success());
        path
    }

    #[test]
    fn version_or_the_reason_for_none() {
        for (script, expected) in [
            ("echo \"runc $*\"; echo more; exit 1", Ok("runc --version\nmore")),
            ("exit 0", Err("it printed nothing")),
            ("exit 3", Err("it exited with 3 and no word")),
            ("kill -ABRT $$", Err("signal 6 ended it")),
            ("echo first >&2; echo 'runc: bad' >&2; echo >&2; exit 1", Err("runc: bad")),
            ("echo; echo 1.1", Err("it prints no version")),
            ("while :; do echo y; done", Ok("y")),
            ("sleep 600", Err("it takes longer than 2 s")),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let found = version_of(&program(dir.path(), script));
            let found =
                found.as_ref().map(|text| text.trim_end_matches("\ny")).map_err(String::as_str);
            assert_eq!(found, expected, "{script}");
        }
        assert!(version_of(Path::new("/nowhere/runc")).unwrap_err().contains("No such file"));
    }
}
