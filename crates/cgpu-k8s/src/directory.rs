//! Waits until something in a directory is new or gone: [`Directory`].

use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use tokio::sync::Notify;
use tokio::time::timeout;

/// How long a directory that can't be watched is left alone.
const BETWEEN_TRIES: Duration = Duration::from_secs(1);

/// A directory that is watched by a thread, for as long as the program lives.
pub(crate) struct Directory(Arc<Notify>);

impl Directory {
    pub(crate) fn watch(path: &Path) -> Self {
        let changed = Arc::new(Notify::new());
        let (path, reported) = (path.to_owned(), Arc::clone(&changed));
        thread::spawn(move || {
            loop {
                // It ends with the directory; another may come in its place.
                let _ = notify_of_changes(&path, &reported);
                thread::sleep(BETWEEN_TRIES);
            }
        });
        Directory(changed)
    }

    /// Returns once something is new or gone in it since it was asked last, and after `at_most` in any case.
    pub(crate) async fn changed(&self, at_most: Duration) {
        // Nothing happened in time, which is fine.
        let _ = timeout(at_most, self.0.notified()).await;
    }
}

fn notify_of_changes(path: &PathBuf, reported: &Notify) -> rustix::io::Result<()> {
    let inotify = inotify::init(CreateFlags::CLOEXEC)?;
    let what = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::MOVED_TO;
    inotify::add_watch(&inotify, path, what | WatchFlags::ONLYDIR)?;
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut events = Reader::new(&inotify, &mut buffer);
    loop {
        // What happened before it was watched counts, too.
        if events.is_buffer_empty() {
            reported.notify_one();
        }
        if events.next()?.events().contains(ReadFlags::IGNORED) {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Longer than any test may take.
    const NEVER: Duration = Duration::from_secs(100_000);

    /// A waiting task wakes if a file is created or removed, and if the directory itself is
    /// created.
    #[test]
    fn waiter_wakes_on_file_and_directory_changes() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("plugins");
            let watched = Directory::watch(&path);
            watched.changed(Duration::from_millis(1)).await;
            fs::create_dir(&path).unwrap();
            watched.changed(NEVER).await;
            for _ in 0..3 {
                fs::write(path.join("kubelet.sock"), "").unwrap();
                watched.changed(NEVER).await;
                fs::remove_file(path.join("kubelet.sock")).unwrap();
                watched.changed(NEVER).await;
            }
            fs::remove_dir(&path).unwrap();
            fs::create_dir(&path).unwrap();
            watched.changed(NEVER).await;
        });
    }
}
