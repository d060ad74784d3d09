//! Our own log: what was given, taken back and noticed, for the host's administrator.
//!
//! Errors of a create don't come here but to the engine; see `report`. The
//! file is opened when the first program that has something to do starts; a log that
//! can't be opened stops nothing, and `cgpu doctor` names it. A container has one line when it
//! is made and one when it is gone; a warning is for what somebody has to do.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Mutex;

use nix::fcntl::OFlag;
use nix::unistd::{AccessFlags, access};
use tracing_subscriber::fmt::time::SystemTime;

/// Sends events to the file `path` from now on; nowhere where `path` is empty.
pub fn init(path: &str) {
    if path.is_empty() {
        return;
    }
    let Ok(file) = open(path.as_ref(), OpenOptions::new().create(true)) else {
        return;
    };
    let subscriber = tracing_subscriber::fmt()
        .with_writer(Mutex::new(file))
        .with_ansi(false)
        .with_target(false)
        .with_timer(SystemTime)
        .finish();
    // Only a second call could fail, and then the first one's file is as good.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// Opens the log at its end, and waits for nobody: a named pipe may have no reader.
fn open(path: &Path, how: &mut OpenOptions) -> io::Result<File> {
    let flags = OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    how.append(true).mode(0o640).custom_flags(flags.bits()).open(path)
}

/// Whether a log at `path` can be written; changes nothing.
///
/// # Errors
///
/// Why it can't.
pub fn is_writable(path: &Path) -> Result<(), String> {
    let absent = match fs::metadata(path) {
        Ok(_) => return open(path, &mut OpenOptions::new()).map(drop).map_err(|e| e.to_string()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => error,
        Err(error) => return Err(error.to_string()),
    };
    // The first line makes it.
    let directory = path.parent().ok_or_else(|| absent.to_string())?;
    let may = access(directory, AccessFlags::W_OK | AccessFlags::X_OK);
    may.map_err(|errno| format!("{}: {}", directory.display(), io::Error::from(errno)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    #[test]
    fn a_log_that_can_be_written_is_told_from_one_that_can_not_and_neither_is_touched() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        assert_eq!(is_writable(&at("new.log")), Ok(()));
        assert!(!at("new.log").exists());
        fs::write(at("old.log"), "line\n").unwrap();
        assert_eq!(is_writable(&at("old.log")), Ok(()));
        assert_eq!(fs::read(at("old.log")).unwrap(), b"line\n");
        // The directory isn't there, it is a directory, it is a pipe that nobody reads.
        let missing = is_writable(&at("no/new.log")).unwrap_err();
        assert!(missing.contains("/no: No such file"), "{missing}");
        assert!(is_writable(dir.path()).unwrap_err().contains("Is a directory"));
        mkfifo(&at("pipe"), Mode::S_IRWXU).unwrap();
        assert!(is_writable(&at("pipe")).unwrap_err().contains("No such device"));
        init(at("pipe").to_str().unwrap());
        fs::write(at("file"), "").unwrap();
        assert!(is_writable(&at("file/log")).unwrap_err().contains("Not a directory"));
    }
}
