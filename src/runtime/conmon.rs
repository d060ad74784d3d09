//! podman's conmon, which calls us for podman: what podman shows of an error begins with the runtime's name.
//!
//! conmon hands no variable on, so its command line identifies it. Must not know errors.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::process::{Pid, getppid};

/// What runtimes of ours are called.
const NAMES: [&[u8]; 2] = [b"cgpu", b"cgpu-runtime"];

/// Whether the engine shows our name before what we say.
pub(super) fn names_us() -> bool {
    let parent = format!("/proc/{}/cmdline", Pid::as_raw(getppid()));
    fs::read(parent).is_ok_and(|line| is_podmans(&line))
}

/// Whether `command_line`, as the kernel has it, is a conmon of podman's with a runtime of our name: conmon calls
/// podman when the container has ended, by a command that has podman's own flags.
fn is_podmans(command_line: &[u8]) -> bool {
    let words: Vec<&[u8]> = command_line.split(|byte| *byte == 0).collect();
    if words.first().copied().and_then(file_name) != Some(b"conmon") {
        return false;
    }
    let pairs = words.windows(2).filter(|pair| pair[0] == b"--exit-command-arg");
    let mut of_podman = pairs.map(|pair| pair[1]).skip_while(|word| *word != b"--runtime");
    of_podman.nth(1).and_then(file_name).is_some_and(|name| NAMES.contains(&name))
}

fn file_name(word: &[u8]) -> Option<&[u8]> {
    Path::new(OsStr::from_bytes(word)).file_name().map(OsStr::as_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(words: &[&str]) -> Vec<u8> {
        words.iter().flat_map(|word| [word.as_bytes(), b"\0"].concat()).collect()
    }

    /// The name that podman shows is the one that it knows the runtime by, as in the exit command
    /// of its conmon.
    #[test]
    fn podman_is_identified_by_conmons_runtime_name() {
        let conmon = |runtime: &[&str]| {
            let exit = ["--exit-command", "/usr/bin/podman", "--exit-command-arg", "--root"];
            let dir = ["--exit-command-arg", "/r"];
            let runtime: Vec<&str> =
                runtime.iter().flat_map(|word| ["--exit-command-arg", word]).collect();
            let head = ["/usr/bin/conmon", "--api-version", "1", "-r", "/usr/bin/cgpu-runtime"];
            let end = ["--exit-command-arg", "container", "--exit-command-arg", "cleanup"];
            line(&[&head[..], &exit, &dir, &runtime, &end].concat())
        };
        assert!(is_podmans(&conmon(&["--runtime", "cgpu"])));
        assert!(is_podmans(&conmon(&["--runtime", "/usr/bin/cgpu-runtime"])));
        // Whose name says nothing of us.
        assert!(!is_podmans(&conmon(&["--runtime", "gpu"])));
        assert!(!is_podmans(&conmon(&["--runtime"])));
        assert!(!is_podmans(&conmon(&["cgpu"])));
        assert!(!is_podmans(&conmon(&[])));
        // CRI-O's shows no name.
        let crio =
            ["/usr/bin/conmon", "-b", "/b", "-r", "/usr/bin/cgpu-runtime", "--runtime", "cgpu"];
        assert!(!is_podmans(&line(&crio)));
        let mut other = conmon(&["--runtime", "cgpu"]);
        other.splice(..15, b"/usr/bin/shim".iter().copied());
        assert!(!is_podmans(&other));
        assert!(!is_podmans(b""));
    }
}
