//! Reading the status without being root: [`serve`] answers each user that may connect with what root sees.
//!
//! Owns the socket, which is root's and the group's that the configuration names. Nothing is read from
//! the peer: a connection gets one snapshot as JSON, and is closed. A peer that asks often gets the same
//! one for a moment, so that a group's members can't keep the monitors busy.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cgpu::host::require_root;
use cgpu_cli::view::Snapshot;
use cgpu_host::config::View;
use nix::unistd::Group;
use rustix::fs::Mode;
use rustix::process::umask;
use thiserror::Error;

/// How long a snapshot is good for.
const FRESH: Duration = Duration::from_millis(100);

/// How long a peer may take to read an answer, or to give one.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Connections at once.
const MOST: usize = 32;

/// The longest answer that is read, in bytes.
const MOST_BYTES: u64 = 64 << 20;

/// Why the status can't be read by the socket.
#[derive(Debug, Error)]
pub(crate) enum SocketError {
    /// No group is named.
    #[error("no group may look: set group under [view] in the configuration")]
    NoGroup,
    /// There is no such group.
    #[error("there is no group {group}, which [view] names; make it with `groupadd {group}`")]
    UnknownGroup {
        /// Its name.
        group: String,
    },
    /// Another process serves already.
    #[error("{} is served already; stop that first (`fuser {}`)", path.display(), path.display())]
    Served {
        /// The socket.
        path: PathBuf,
    },
    /// Something else is there.
    #[error("{} is there, and is no socket; remove it, or name another socket under [view]", path.display())]
    Other {
        /// The path.
        path: PathBuf,
    },
    /// The socket can't be made.
    #[error("cannot serve {}: {source}", path.display())]
    Unserved {
        /// The socket.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The reader has no permission, or no process serves.
    #[error(
        "looking needs root (sudo), or membership in the group that [view] group names and the \
         service cgpu-view: {}: {source}",
        path.display()
    )]
    Unanswered {
        /// The socket.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Another version serves.
    #[error(
        "{} answers in words of another version: {source}; restart the service cgpu-view",
        path.display()
    )]
    Strange {
        /// The socket.
        path: PathBuf,
        /// What isn't understood.
        #[source]
        source: serde_json::Error,
    },
}

/// What root's program at `path` sees.
///
/// # Errors
///
/// Where it doesn't say.
pub(crate) fn ask(path: &Path) -> Result<Snapshot, SocketError> {
    let unanswered = |source| SocketError::Unanswered { path: path.to_owned(), source };
    let mut stream = UnixStream::connect(path).map_err(unanswered)?;
    stream.set_read_timeout(Some(TIMEOUT)).map_err(unanswered)?;
    let mut text = Vec::new();
    Read::by_ref(&mut stream).take(MOST_BYTES).read_to_end(&mut text).map_err(unanswered)?;
    if text.is_empty() {
        return Err(unanswered(io::Error::other("there are too many who look; try again")));
    }
    serde_json::from_slice(&text)
        .map_err(|source| SocketError::Strange { path: path.to_owned(), source })
}

/// Answers each user that may connect with what `poll` finds, until this process exits.
///
/// # Errors
///
/// Where the socket can't be made.
pub(crate) fn serve(
    view: &View,
    poll: impl FnMut() -> anyhow::Result<Snapshot> + Send + 'static,
) -> anyhow::Result<()> {
    require_root()?;
    let listener = listen(view)?;
    let server = Arc::new(Server { poll: Mutex::new(Last { poll, reported: None }) });
    let served = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming() {
        let Ok(stream) = stream else {
            // No descriptor is left: one will be when a peer has been answered.
            thread::sleep(FRESH);
            continue;
        };
        let Some(place) = Place::take(&served) else { continue };
        let server = Arc::clone(&server);
        // Where there is no thread for it, the place is free again, too.
        let _ = thread::Builder::new().spawn(move || {
            let _place = place;
            server.report(stream);
        });
    }
    Ok(())
}

/// One of [`MOST`] connections that are answered, until it is dropped: however its thread ends.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(served: &Arc<AtomicUsize>) -> Option<Self> {
        let place = Place(Arc::clone(served));
        (served.fetch_add(1, Ordering::Relaxed) < MOST).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn listen(view: &View) -> Result<UnixListener, SocketError> {
    let path = &view.socket;
    let unserved = |source| SocketError::Unserved { path: path.clone(), source };
    if view.group.is_empty() {
        return Err(SocketError::NoGroup);
    }
    let found = Group::from_name(&view.group).map_err(|errno| unserved(errno.into()))?;
    let group = found.ok_or_else(|| SocketError::UnknownGroup { group: view.group.clone() })?;
    match fs::symlink_metadata(path) {
        Ok(meta) if !meta.file_type().is_socket() => {
            return Err(SocketError::Other { path: path.clone() });
        }
        Ok(_) if UnixStream::connect(path).is_ok() => {
            return Err(SocketError::Served { path: path.clone() });
        }
        // Of one that has ended.
        Ok(_) => fs::remove_file(path).map_err(unserved)?,
        Err(_) => {}
    }
    // No other user can connect before the group is set.
    let before = umask(Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path);
    umask(before);
    let listener = listener.map_err(unserved)?;
    chown(path, None, Some(group.gid.as_raw())).map_err(unserved)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o660)).map_err(unserved)?;
    Ok(listener)
}

/// What is reported, and when that was found.
struct Last<L> {
    poll: L,
    reported: Option<(Instant, Arc<Vec<u8>>)>,
}

struct Server<L> {
    poll: Mutex<Last<L>>,
}

impl<L: FnMut() -> anyhow::Result<Snapshot>> Server<L> {
    /// A reader gets a snapshot; nothing if there is none: what is wrong is root's to know.
    fn report(&self, mut stream: UnixStream) {
        let text = {
            let mut last = self.poll.lock().unwrap_or_else(PoisonError::into_inner);
            match &last.reported {
                Some((found, text)) if found.elapsed() < FRESH => Arc::clone(text),
                _ => {
                    let found = (last.poll)().and_then(|found| Ok(serde_json::to_vec(&found)?));
                    let Ok(text) = found.map(Arc::new) else { return };
                    last.reported = Some((Instant::now(), Arc::clone(&text)));
                    text
                }
            }
        };
        if stream.set_write_timeout(Some(TIMEOUT)).is_ok() {
            // A peer that doesn't read has gone.
            let _ = stream.write_all(&text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A poll that panics retains no place, and blocks no later poll.
    #[test]
    fn panicking_poll_blocks_no_later_poll() {
        let mut is_broken = true;
        let poll = move || {
            assert!(!std::mem::take(&mut is_broken), "a figure that cannot be");
            anyhow::bail!("there is nothing")
        };
        let server = Arc::new(Server { poll: Mutex::new(Last { poll, reported: None }) });
        let served = Arc::new(AtomicUsize::new(0));
        for panics in [true, false] {
            let (place, server) = (Place::take(&served).unwrap(), Arc::clone(&server));
            assert_eq!(served.load(Ordering::Relaxed), 1);
            let thread = thread::spawn(move || {
                let _place = place;
                server.report(UnixStream::pair().unwrap().0);
            });
            assert_eq!(thread.join().is_err(), panics);
            assert_eq!(served.load(Ordering::Relaxed), 0);
        }
    }

    #[test]
    fn as_many_as_there_are_places_are_answered() {
        let served = Arc::new(AtomicUsize::new(0));
        let mut places: Vec<_> = (0..MOST).map(|_| Place::take(&served).unwrap()).collect();
        assert!(Place::take(&served).is_none());
        assert_eq!(served.load(Ordering::Relaxed), MOST, "who is refused takes none");
        places.pop();
        assert!(Place::take(&served).is_some());
    }
}
