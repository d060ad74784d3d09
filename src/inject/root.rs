//! A directory that is a root to all that is below: the host's driver, or an image.
//!
//! Every path is resolved by the kernel as if a process were chrooted there (`openat2`,
//! `RESOLVE_IN_ROOT`), so that no link leads out of it, whoever made it; nothing is ever
//! written. What was watched can be told afterwards, to be compared later.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, openat2, statx};
use rustix::fs::{Statx, StatxFlags, readlink};
use serde::{Deserialize, Serialize};

/// What a file was when it was looked at: enough to tell that it is another or was written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    device: (u32, u32),
    inode: u64,
    modified_ns: i128,
}

impl Stamp {
    fn of(stat: &Statx) -> Self {
        Stamp {
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            modified_ns: i128::from(stat.stx_mtime.tv_sec) * 1_000_000_000
                + i128::from(stat.stx_mtime.tv_nsec),
        }
    }
}

/// What tells whether anything that was watched is another now, by its path below the root: files
/// and directories with their times, and the first part of paths where nothing was.
pub type Stamps = BTreeMap<PathBuf, Option<Stamp>>;

/// Longer than any kernel's tick.
const TICK: Duration = Duration::from_millis(20);

const LOOK: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// A file in a root.
#[derive(Debug)]
pub struct Found {
    /// Where it is below the root, without links.
    pub path: PathBuf,
    /// What it is.
    pub kind: FileType,
    /// Its device and inode: the same file by another name has them, too.
    pub identity: (u32, u32, u64),
    size: u64,
    file: OwnedFd,
}

/// A directory that is a root.
#[derive(Debug)]
pub struct Root {
    dir: OwnedFd,
    /// Where it is, without links.
    real: PathBuf,
    watched: RefCell<Stamps>,
}

impl Root {
    /// The root at `path`.
    ///
    /// # Errors
    ///
    /// Where there is no directory.
    pub fn open(path: &Path) -> io::Result<Self> {
        let dir = rustix::fs::open(path, LOOK | OFlags::DIRECTORY, Mode::empty())?;
        let real = real_path(&dir)?;
        Ok(Root { dir, real, watched: RefCell::default() })
    }

    /// Where the root is, without links.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.real
    }

    /// As [`look`](Self::look), and remembered.
    pub fn watch(&self, path: impl AsRef<Path>) -> Option<Found> {
        let path = path.as_ref();
        let found = self.look(path);
        // What is there is told by itself, wherever links lead: a directory by what it holds.
        let watched = match &found {
            Some(_) => path,
            None => self.first_missing(path),
        };
        self.remember(watched);
        found
    }

    fn remember(&self, path: &Path) {
        if !self.watched.borrow().contains_key(path) {
            let stamp = self.stamp(path);
            self.watched.borrow_mut().insert(path.to_owned(), stamp);
        }
    }

    /// The shortest beginning of `path` where nothing is.
    fn first_missing<'a>(&self, path: &'a Path) -> &'a Path {
        let mut missing = path;
        while let Some(parent) = missing.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            if self.watched.borrow().get(parent).is_some_and(Option::is_some)
                || self.look(parent).is_some()
            {
                break;
            }
            missing = parent;
        }
        missing
    }

    /// The stamp of what is at `path` now; `None` where nothing is.
    fn stamp(&self, path: &Path) -> Option<Stamp> {
        let mask = StatxFlags::BASIC_STATS;
        // Where the root is the process's own, one call does.
        let stat = match self.real == Path::new("/") {
            true => statx(&self.dir, path, AtFlags::empty(), mask),
            false => openat2(&self.dir, path, LOOK, Mode::empty(), ResolveFlags::IN_ROOT)
                .and_then(|file| statx(&file, "", AtFlags::EMPTY_PATH, mask)),
        };
        stat.ok().as_ref().map(Stamp::of)
    }

    /// What is at `path`, through links; `None` where nothing is that can be looked at.
    #[must_use]
    pub fn look(&self, path: impl AsRef<Path>) -> Option<Found> {
        let path = path.as_ref();
        let file = openat2(&self.dir, path, LOOK, Mode::empty(), ResolveFlags::IN_ROOT).ok()?;
        let stat = statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS).ok()?;
        let below = real_path(&file).ok()?;
        let below = below.strip_prefix(&self.real).ok()?;
        Some(Found {
            path: Path::new("/").join(below),
            kind: FileType::from_raw_mode(stat.stx_mode.into()),
            identity: (stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino),
            size: stat.stx_size,
            file,
        })
    }

    /// The regular file at `path`, at most `most_bytes` of it; `None` where there is none or it
    /// is larger.
    #[must_use]
    pub fn read(&self, path: impl AsRef<Path>, most_bytes: u64) -> Option<Vec<u8>> {
        let found = self.look(path)?;
        let mut bytes = Vec::with_capacity(usize::try_from(found.size.min(most_bytes) + 1).ok()?);
        found.open()?.take(most_bytes + 1).read_to_end(&mut bytes).ok()?;
        (bytes.len() as u64 <= most_bytes).then_some(bytes)
    }

    /// All that was watched so far.
    #[must_use]
    pub fn watched(&self) -> Stamps {
        self.watched.borrow().clone()
    }

    /// Whether all that was watched will look otherwise once it changes, where watching began at
    /// `begun`.
    ///
    /// Before Linux 6.13 the time of a file is that of the last tick, and there are 100 to 1000 of
    /// them in a second: what changes twice within one has the same time after both.
    #[must_use]
    pub fn is_settled(&self, begun: SystemTime) -> bool {
        let begun = begun.duration_since(UNIX_EPOCH).unwrap_or_default();
        let limit = i128::try_from(begun.saturating_sub(TICK).as_nanos()).unwrap_or(0);
        self.watched.borrow().values().flatten().all(|stamp| stamp.modified_ns < limit)
    }

    /// Whether all is as it was when it was watched.
    #[must_use]
    pub fn is_as(&self, stamps: &Stamps) -> bool {
        stamps.iter().all(|(path, then)| self.stamp(path) == *then)
    }
}

impl Found {
    /// The names in a directory; none where it is no directory.
    #[must_use]
    pub fn names(&self) -> Vec<OsString> {
        use std::os::unix::ffi::OsStrExt;
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let Ok(dir) = rustix::fs::openat(&self.file, ".", flags, Mode::empty()) else {
            return Vec::new();
        };
        let Ok(dir) = Dir::read_from(dir) else { return Vec::new() };
        dir.flatten()
            .map(|entry| std::ffi::OsStr::from_bytes(entry.file_name().to_bytes()).to_owned())
            .filter(|name| name != "." && name != "..")
            .collect()
    }

    /// The file itself, to be read; `None` for what is no regular file: opening a FIFO or a
    /// device would wait, or do something.
    #[must_use]
    pub fn open(&self) -> Option<File> {
        if self.kind != FileType::RegularFile {
            return None;
        }
        use std::os::fd::AsRawFd;
        File::open(format!("/proc/self/fd/{}", self.file.as_raw_fd())).ok()
    }
}

/// Where an open file is, as the kernel has it.
fn real_path(file: &OwnedFd) -> io::Result<PathBuf> {
    use std::os::fd::AsRawFd;
    use std::os::unix::ffi::OsStringExt;
    let path = readlink(format!("/proc/self/fd/{}", file.as_raw_fd()), Vec::new())?;
    Ok(OsString::from_vec(path.into_bytes()).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("usr/lib")).unwrap();
        fs::write(dir.path().join("usr/lib/a"), "inside").unwrap();
        dir
    }

    #[test]
    fn no_link_leads_out_of_a_root() {
        let dir = tree();
        let at = |name: &str| dir.path().join(name);
        symlink("/usr/lib/a", at("absolute")).unwrap();
        symlink("../../../../../../usr/lib/a", at("usr/lib/up")).unwrap();
        symlink("/etc/passwd", at("passwd")).unwrap();
        symlink("/proc/self/root/etc/passwd", at("magic")).unwrap();
        let root = Root::open(dir.path()).unwrap();
        for name in ["absolute", "usr/lib/up", "/usr/lib/../lib/a"] {
            assert_eq!(root.look(name).unwrap().path, Path::new("/usr/lib/a"), "{name}");
            assert_eq!(root.read(name, 100).unwrap(), b"inside");
        }
        for name in ["passwd", "magic", "../etc/passwd", "/etc/passwd"] {
            assert!(root.look(name).is_none(), "{name}");
        }
    }

    #[test]
    fn only_regular_files_within_bounds_are_read() {
        let dir = tree();
        nix::unistd::mkfifo(&dir.path().join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let root = Root::open(dir.path()).unwrap();
        assert_eq!(root.read("fifo", 100), None, "and it must not wait");
        assert_eq!(root.read("usr/lib", 100), None);
        assert_eq!(root.read("usr/lib/a", 5), None);
        assert_eq!(root.read("usr/lib/a", 6).unwrap(), b"inside");
    }

    #[test]
    fn what_changed_since_it_was_looked_at_is_seen() {
        let dir = tree();
        let fresh = || Root::open(dir.path()).unwrap();
        let root = fresh();
        assert!(root.watch("usr/lib").is_some() && root.watch("usr/lib64").is_none());
        let made = fs::metadata(dir.path().join("usr/lib")).unwrap().modified().unwrap();
        assert!(!root.is_settled(made + TICK / 2), "it may change within the same tick");
        assert!(root.is_settled(made + TICK * 2));
        std::thread::sleep(TICK * 2);
        let stamps = root.watched();
        assert!(fresh().is_as(&stamps));
        fs::create_dir(dir.path().join("usr/lib64")).unwrap();
        assert!(!fresh().is_as(&stamps), "what wasn't there is");
        fs::remove_dir(dir.path().join("usr/lib64")).unwrap();
        assert!(fresh().is_as(&stamps));
        fs::write(dir.path().join("usr/lib/b"), "").unwrap();
        assert!(!fresh().is_as(&stamps), "a directory has a file more");
    }
}
