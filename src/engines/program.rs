//! What a program of the host prints, within bounds: a runtime's version, containerd's dump.
//!
//! Owns the child's life; must not know what versions mean. It leads a process group, so
//! that what it started ends with it, and gets none of our environment but `PATH`.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// How long it may take; runc takes some milliseconds.
const LIMIT: Duration = Duration::from_secs(2);

/// Most bytes read of what it prints.
const SAID_BYTES_MAX: u64 = 4096;

/// What `program --version` prints, which begins with a line that isn't empty; why there is none.
pub(crate) fn version_of(program: &Path) -> Result<String, String> {
    let bytes = said(program, &["--version"], SAID_BYTES_MAX, LIMIT)?;
    let said = String::from_utf8_lossy(&bytes);
    match said.lines().next() {
        Some(line) if !line.trim().is_empty() => Ok(said.trim().to_owned()),
        _ => Err("it prints no version".to_owned()),
    }
}

/// The first `bytes_max` bytes that `program ARGUMENTS` prints within `limit`; why there are none.
pub(super) fn said(
    program: &Path,
    arguments: &[&str],
    bytes_max: u64,
    limit: Duration,
) -> Result<Vec<u8>, String> {
    let mut command = Command::new(program);
    // Where services are.
    command.args(arguments).env_clear().current_dir("/");
    command.envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).process_group(0);
    let mut child = command.spawn().map_err(|error| error.to_string())?;
    let (said, heard) = mpsc::channel();
    if let Some(pipe) = child.stdout.take() {
        // What holds the pipe open beyond the group's end holds this thread, and not us.
        thread::spawn(move || {
            let mut bytes = Vec::new();
            let read = pipe.take(bytes_max).read_to_end(&mut bytes);
            // Nobody listens any more where it took too long.
            let _ = said.send(read.map(|_| bytes));
        });
    }
    let heard = heard.recv_timeout(limit);
    // Not reaped yet, so the number is still the child's. It may have ended by itself.
    if let Ok(leader) = i32::try_from(child.id()) {
        let _ = killpg(Pid::from_raw(leader), Signal::SIGKILL);
    }
    let _ = child.wait();
    match heard {
        Ok(heard) => heard.map_err(|error| error.to_string()),
        Err(_) => Err(format!("it takes longer than {} s", limit.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// A program; a shell writes it, so that no fork in a test beside this one inherits it open
    /// for writing (ETXTBSY).
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
    fn a_program_says_its_version_or_why_not() {
        for (script, said) in [
            ("echo \"runc $*\"; echo more; exit 1", Ok("runc --version\nmore")),
            ("exit 0", Err("it prints no version")),
            ("echo; echo 1.1", Err("it prints no version")),
            ("while :; do echo y; done", Ok("y")),
            ("sleep 600", Err("it takes longer than 2 s")),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let found = version_of(&program(dir.path(), script));
            let found =
                found.as_ref().map(|text| text.trim_end_matches("\ny")).map_err(String::as_str);
            assert_eq!(found, said, "{script}");
        }
        assert!(version_of(Path::new("/nowhere/runc")).unwrap_err().contains("No such file"));
    }
}
