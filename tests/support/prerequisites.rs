//! What must be installed before an engine can be started, and how to say that it isn't.
//!
//! The packages themselves are listed in `tests/packages.txt`; this file knows programs. It looks
//! in the machine's own program directories before `PATH`, because a `docker` put in front of the
//! distribution's may be a script around it.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

/// Programs and the Debian packages they come in.
const PROGRAMS: &[(&str, &str)] = &[
    ("runc", "runc"),
    ("crun", "crun"),
    ("containerd", "containerd"),
    ("containerd-shim-runc-v2", "containerd"),
    ("ctr", "containerd"),
    ("dockerd", "docker.io"),
    ("docker", "docker.io, or docker-cli"),
    ("podman", "podman"),
    ("conmon", "podman"),
    ("busybox", "busybox-static"),
    ("unshare", "util-linux"),
    ("mount", "mount"),
    ("cp", "coreutils"),
    ("tar", "tar"),
    ("sha256sum", "coreutils"),
];

/// Directories searched before `PATH`.
const DIRECTORIES: &[&str] = &["/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// Panics unless everything the engines need is there, naming all that is missing; looks once per
/// test binary.
pub fn prerequisites() {
    static MISSING: OnceLock<Option<String>> = OnceLock::new();
    if let Some(complaint) = MISSING.get_or_init(complaint) {
        panic!("{complaint}");
    }
}

/// The absolute path of an installed program.
///
/// # Panics
///
/// Where the program isn't installed.
pub fn program(name: &str) -> PathBuf {
    find(name).unwrap_or_else(|| panic!("these tests need the program {name}; run `make deps`"))
}

fn complaint() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some(
            "these tests start container engines and must be run as root; `make check` needs no \
             privilege"
                .to_owned(),
        );
    }
    let mut missing: Vec<String> = PROGRAMS
        .iter()
        .filter(|(name, _)| find(name).is_none())
        .map(|(name, package)| format!("{name} (package {package})"))
        .collect();
    if let Some(busybox) = find("busybox")
        && !is_static(&busybox)
    {
        missing.push(format!(
            "a static busybox instead of {} (package busybox-static)",
            busybox.display()
        ));
    }
    if missing.is_empty() {
        None
    } else {
        Some(format!("these tests need {}; run `make deps`", missing.join(", ")))
    }
}

fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = DIRECTORIES.iter().map(PathBuf::from).chain(std::env::split_paths(&path));
    directories.map(|directory| directory.join(name)).find(|candidate| candidate.is_file())
}

/// A program is static when it asks for no interpreter; `ldd` then fails or says so.
fn is_static(program: &std::path::Path) -> bool {
    match Command::new("ldd").arg(program).output() {
        Ok(answer) => !String::from_utf8_lossy(&answer.stdout).contains("=>"),
        Err(_) => true,
    }
}
