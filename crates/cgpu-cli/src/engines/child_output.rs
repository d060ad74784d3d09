//! What a program of the host prints, within bounds: a runtime's version, containerd's dump.
//!
//! Owns the sentences about a program that prints nothing: by the end of its standard error, and how
//! it ended. [`cgpu_host::child`] owns its life. Must not know what versions mean.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use cgpu_host::child::{Bounds, RunError, Stdout, run};

/// How long it may take; runc takes some milliseconds.
const LIMIT: Duration = Duration::from_secs(2);

/// Most bytes read of what it prints.
const OUTPUT_BYTES_MAX: u64 = 4096;

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
    // Where services are.
    command.args(arguments).current_dir("/");
    let bytes_max = usize::try_from(bytes_max).unwrap_or(usize::MAX);
    let bounds = Bounds {
        variables: &["PATH"],
        stdin: Stdio::null(),
        stdout: Stdout::First(bytes_max),
        limit,
    };
    match run(command, bounds) {
        Ok(ended) if ended.stdout.is_empty() => Err(no_output(ended.status, &ended.stderr)),
        Ok(ended) => Ok(ended.stdout),
        Err(RunError::TooSlow { .. }) => Err(format!("it takes longer than {} s", limit.as_secs())),
        Err(error) => Err(error.to_string()),
    }
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
