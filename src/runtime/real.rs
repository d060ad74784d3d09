//! The real runtime: found among the candidates, and become.

use std::convert::Infallible;
use std::ffi::{CString, OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::unistd::execv;
use thiserror::Error;

/// Where to look when `PATH` says nothing, or not where runtimes are.
pub const USUAL_DIRS: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What the name of a directory begins with from which ours is called to stand over another
/// runtime than it would choose: `cgpu setup` makes it.
pub const OVER: &str = "over-";

/// The link in such a directory to the runtime that is meant.
pub const LOWER: &str = "runtime";

/// The runtime that is meant where ours was called by the path `called`; `None` where ours is
/// to choose.
#[must_use]
pub fn below(called: &OsStr) -> Option<String> {
    let directory = Path::new(called).parent()?;
    if !directory.file_name()?.as_bytes().starts_with(OVER.as_bytes()) {
        return None;
    }
    let link = directory.join(LOWER);
    // One that can't be read is named by itself: another runtime would be a surprise.
    let lower = fs::read_link(&link).unwrap_or(link);
    Some(lower.to_string_lossy().into_owned())
}

/// Why there is no real runtime.
#[derive(Debug, Error)]
pub enum RealRuntimeError {
    /// None of the candidates is there.
    #[error(
        "no real runtime: none of {} is an executable file in PATH or the usual directories; \
         install runc or crun, or set [runtime] candidates in the configuration",
        candidates.join(", ")
    )]
    NotFound { candidates: Vec<String> },
    /// It could not be executed.
    #[error("cannot run the real runtime {}: {source}; install it again", path.display())]
    Exec {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// The real runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Real {
    pub file: PathBuf,
    /// What it is called by: the candidate as it is configured. An engine that was given
    /// the same words would call it so, and crun says this name in its messages.
    pub name: String,
}

/// The first of `candidates` that is an executable file and not we ourselves.
///
/// # Errors
///
/// Where there is none.
pub fn find(candidates: &[String], path: Option<&OsStr>) -> Result<Real, RealRuntimeError> {
    let own = fs::metadata("/proc/self/exe").map(|meta| (meta.dev(), meta.ino())).ok();
    let usable = |file: &Path| {
        fs::metadata(file).is_ok_and(|meta| {
            // An empty one, as an installation on a full disk leaves it, would be a shell
            // script that succeeds: execvp falls back to sh.
            meta.is_file()
                && meta.len() > 0
                && meta.permissions().mode() & 0o111 != 0
                && Some((meta.dev(), meta.ino())) != own
        })
    };
    let dirs = || {
        let given = path.into_iter().flat_map(std::env::split_paths);
        // A relative directory would mean the bundle, which is the working directory.
        given.chain(std::env::split_paths(USUAL_DIRS)).filter(|dir| dir.is_absolute())
    };
    candidates
        .iter()
        .filter(|candidate| !candidate.is_empty())
        .find_map(|candidate| {
            let file = match candidate.contains('/') {
                true => Some(PathBuf::from(candidate)).filter(|file| usable(file)),
                false => dirs().map(|dir| dir.join(candidate)).find(|file| usable(file)),
            };
            Some(Real { file: file?, name: candidate.clone() })
        })
        .ok_or_else(|| RealRuntimeError::NotFound { candidates: candidates.to_vec() })
}

/// Becomes the real runtime: same arguments, environment, descriptors and signals. Returns
/// only where that failed.
///
/// Not by `std::process::Command`, which would give SIGPIPE its default action, whatever
/// the engine chose: dockerd ignores it, and so do the containers it starts.
#[must_use]
pub fn exec(real: &Real, args: &[OsString]) -> RealRuntimeError {
    let become_it = || -> io::Result<Infallible> {
        let file = CString::new(real.file.as_os_str().as_bytes())?;
        let name = CString::new(real.name.as_bytes());
        let words = args.iter().map(|word| CString::new(word.as_bytes()));
        let argv = std::iter::once(name).chain(words).collect::<Result<Vec<_>, _>>()?;
        Ok(execv(&file, &argv)?)
    };
    match become_it() {
        Err(source) => RealRuntimeError::Exec { path: real.file.clone(), source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(dir: &Path, name: &str, mode: u32) -> PathBuf {
        let path = dir.join(name);
        fs::write(&path, "#!/bin/sh\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_first_candidate_that_is_executable_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        program(dir.path(), "first-runtime", 0o644);
        let second = program(dir.path(), "second-runtime", 0o755);
        let candidates = names(&["", "first-runtime", "second-runtime"]);
        let found = find(&candidates, Some(dir.path().as_os_str())).unwrap();
        assert_eq!(found, Real { file: second.clone(), name: "second-runtime".into() });
        let absolute = names(&["/nowhere/runc", second.to_str().unwrap()]);
        let name = second.to_str().unwrap().to_owned();
        assert_eq!(find(&absolute, None).unwrap(), Real { file: second, name });
    }

    /// The path by which our runtime is called may name the runtime below it.
    #[test]
    fn calling_path_may_name_the_runtime_below() {
        let dir = tempfile::tempdir().unwrap();
        let over = dir.path().join("over-crun");
        fs::create_dir(&over).unwrap();
        let below = |path: &Path| below(path.as_os_str());
        let link = over.join(LOWER);
        assert_eq!(below(&over.join("cgpu-runtime")), Some(link.display().to_string()));
        std::os::unix::fs::symlink("/opt/crun", &link).unwrap();
        assert_eq!(below(&over.join("cgpu-runtime")).as_deref(), Some("/opt/crun"));
        for usual in ["cgpu-runtime", "/usr/bin/cgpu-runtime", "", "/"] {
            assert_eq!(below(Path::new(usual)), None, "{usual}");
        }
    }

    #[test]
    fn we_never_run_ourselves() {
        let own = std::env::current_exe().unwrap();
        let candidates = names(&[own.to_str().unwrap()]);
        let error = find(&candidates, None).unwrap_err().to_string();
        assert!(error.starts_with("no real runtime: none of /"), "{error}");
        assert!(error.ends_with("set [runtime] candidates in the configuration"), "{error}");
    }
}
