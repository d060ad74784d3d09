//! Our own log: what was given, refused, taken back and noticed, for the host's administrator.
//!
//! It is a file, journald, standard error, or nothing. It is opened when the first program that has
//! something to do starts; a log that can't be opened stops nothing, and `cgpu doctor` names it. A
//! container has one line when it is made and one when it is gone; a warning is for what somebody has
//! to do. Lines about events are made of [`crate::events`]' values.

mod fields;
mod journald;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::Mutex;

use rustix::fs::{Access, OFlags, access};
use rustix::io::Errno;
use tracing::subscriber::set_global_default;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::SubscriberBuilder;
use tracing_subscriber::fmt::time::SystemTime;
use tracing_subscriber::prelude::*;

use self::fields::Fields;
use self::journald::Journald;

/// Where the log goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sink<'a> {
    None,
    /// journald's socket.
    Journald,
    /// Standard error, which monitors don't have.
    Stderr,
    File(&'a Path),
}

impl<'a> Sink<'a> {
    /// What the configuration's `log` says.
    #[must_use]
    pub fn of(log: &'a str) -> Self {
        match log {
            "" => Sink::None,
            "journald" => Sink::Journald,
            "stderr" => Sink::Stderr,
            path => Sink::File(path.as_ref()),
        }
    }
}

/// Sends lines to where `log` says, from now on.
pub fn init(log: &str) {
    init_with(Sink::of(log), Fields::of(None));
}

/// The same for a process that knows one container: each line has its id.
pub fn init_of(log: &str, id: &str) {
    init_with(Sink::of(log), Fields::of(Some(id).filter(|id| !id.is_empty())));
}

fn init_with(sink: Sink<'_>, fields: Fields) {
    // Only a second call could fail, and then the first one's log is as good.
    let _ = match sink {
        Sink::None => Ok(()),
        Sink::Journald => {
            let Ok(journald) = Journald::new(journald::SOCKET, fields) else { return };
            let subscriber = tracing_subscriber::registry().with(journald).with(LevelFilter::INFO);
            set_global_default(subscriber)
        }
        Sink::Stderr => set_global_default(lines(fields).with_writer(io::stderr).finish()),
        Sink::File(path) => {
            let Ok(file) = open(path, OpenOptions::new().create(true)) else { return };
            set_global_default(lines(fields).with_writer(Mutex::new(file)).finish())
        }
    };
}

fn lines(fields: Fields) -> SubscriberBuilder<Fields> {
    let lines = tracing_subscriber::fmt().fmt_fields(fields);
    lines.with_ansi(false).with_target(false).with_timer(SystemTime)
}

/// A text as it stands in a field of a line, without the quotes around it.
#[must_use]
pub fn escaped(text: &str) -> String {
    let quoted = format!("{text:?}");
    quoted.get(1..quoted.len() - 1).unwrap_or_default().to_owned()
}

/// Opens the log at its end, and waits for no process: a named pipe may have no reader. A link is refused: a
/// user who may write the directory, as syslog's group may `/var/log`, would choose the file that root writes.
fn open(path: &Path, how: &mut OpenOptions) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW;
    how.append(true).mode(0o640).custom_flags(flags.bits().cast_signed()).open(path)
}

/// Opens a log to read it: a regular file, and no link, for the same reason.
///
/// # Errors
///
/// Where it can't be opened, or is something else.
pub fn open_to_read(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is no regular file")),
    }
}

/// Connects to journald's socket, and says nothing there.
///
/// # Errors
///
/// Why journald can't be reached.
pub fn reach_journald() -> io::Result<()> {
    UnixDatagram::unbound()?.connect(journald::SOCKET)
}

/// Whether a log at `path` can be written; changes nothing.
///
/// # Errors
///
/// Why it can't.
pub fn is_writable(path: &Path) -> Result<(), String> {
    let absent = match fs::metadata(path) {
        Ok(_) => {
            let why = |error: io::Error| match Errno::from_io_error(&error) {
                Some(Errno::LOOP) => "it is a symbolic link; name the file itself".to_owned(),
                _ => error.to_string(),
            };
            return open(path, &mut OpenOptions::new()).map(drop).map_err(why);
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => error,
        Err(error) => return Err(error.to_string()),
    };
    // The first line makes it.
    let directory = path.parent().ok_or_else(|| absent.to_string())?;
    let may = access(directory, Access::WRITE_OK | Access::EXEC_OK);
    may.map_err(|errno| format!("{}: {}", directory.display(), io::Error::from(errno)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;
    use std::os::unix::fs::symlink;

    /// A log that can be written is distinguished from one that can't, and neither is touched.
    #[test]
    fn log_writability_check_touches_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        assert_eq!(is_writable(&at("new.log")), Ok(()));
        assert!(!at("new.log").exists());
        fs::write(at("old.log"), "line\n").unwrap();
        assert_eq!(is_writable(&at("old.log")), Ok(()));
        assert_eq!(fs::read(at("old.log")).unwrap(), b"line\n");
        // The directory isn't there, it is a directory, it is a pipe that no process reads.
        let missing = is_writable(&at("no/new.log")).unwrap_err();
        assert!(missing.contains("/no: No such file"), "{missing}");
        assert!(is_writable(dir.path()).unwrap_err().contains("Is a directory"));
        mkfifo(&at("pipe"), Mode::S_IRWXU).unwrap();
        assert!(is_writable(&at("pipe")).unwrap_err().contains("No such device"));
        init(at("pipe").to_str().unwrap());
        symlink(at("old.log"), at("link")).unwrap();
        assert!(is_writable(&at("link")).unwrap_err().contains("symbolic link"));
        assert!(open(&at("link"), OpenOptions::new().create(true)).is_err());
        // What is read is no link either, and nothing to wait for.
        for (name, problem) in [("link", "symbolic link"), ("pipe", "no regular file")] {
            assert!(open_to_read(&at(name)).unwrap_err().to_string().contains(problem), "{name}");
        }
        assert!(open_to_read(&at("old.log")).is_ok());
        fs::write(at("file"), "").unwrap();
        assert!(is_writable(&at("file/log")).unwrap_err().contains("Not a directory"));
    }
}
