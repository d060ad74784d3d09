//! A directory that is a root to all that is below: the host's driver, or an image.
//!
//! Every path is resolved by the kernel as if a process were chrooted there (`openat2`,
//! `RESOLVE_IN_ROOT`), so that no link leads out of it, whichever process made it; nothing is ever
//! written. What was watched can be reported afterwards, to be compared later.

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, openat2, statx};
use rustix::fs::{Statx, StatxFlags, readlink};
use serde::{Deserialize, Serialize};

/// How long it's tried to open what others keep the kernel from finding.
const TIMEOUT: Duration = Duration::from_secs(1);

/// What a file was when it was checked: enough to see that it is another or was written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Stamp {
    device: (u32, u32),
    inode: u64,
    modified_ns: i128,
    is_directory: bool,
}

impl Stamp {
    fn of(stat: &Statx) -> Self {
        Stamp {
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            modified_ns: i128::from(stat.stx_mtime.tv_sec) * 1_000_000_000
                + i128::from(stat.stx_mtime.tv_nsec),
            is_directory: FileType::from_raw_mode(stat.stx_mode.into()) == FileType::Directory,
        }
    }
}

/// Files and directories by their paths below the root, and the first part of paths where
/// nothing was.
type Stamps = BTreeMap<PathBuf, Option<Stamp>>;

/// What shows whether anything that was watched has changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watched {
    /// Paths below the root that lead over no links: one call reports what is there.
    plain: Vec<PathBuf>,
    /// Those over links that lead to the same without a root: one call as well.
    linked: Vec<PathBuf>,
    /// Those over other links: they have to be followed as from inside.
    rooted: Vec<PathBuf>,
    /// Of what was at all of them.
    print: u64,
}

/// Directories below a root in which others make files all the time: what is missing there is
/// asked for by its own name.
const RESTLESS: &[&str] = &["etc", "run", "var/run"];

/// Longer than any kernel's tick.
const TICK: Duration = Duration::from_millis(20);

const PATH_ONLY: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// A file in a root.
#[derive(Debug)]
pub struct RootFile {
    /// What it is.
    pub kind: FileType,
    /// Its device and inode: the same file by another name has them, too.
    pub identity: (u32, u32, u64),
    /// How large it is, in bytes.
    pub size: u64,
    file: OwnedFd,
}

/// A directory that is a root.
#[derive(Debug)]
pub struct Root {
    dir: OwnedFd,
    given: PathBuf,
    /// Where it is, without links, once that was asked.
    real: OnceCell<PathBuf>,
    watched: RefCell<Stamps>,
}

impl Root {
    /// The root at `path`.
    ///
    /// # Errors
    ///
    /// Where there is no directory.
    pub fn open(path: &Path) -> io::Result<Self> {
        let dir = rustix::fs::open(path, PATH_ONLY | OFlags::DIRECTORY, Mode::empty())?;
        let (given, real) = (path.to_owned(), OnceCell::new());
        Ok(Root { dir, given, real, watched: RefCell::default() })
    }

    /// Where the root is, without links.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.real.get_or_init(|| real_path(&self.dir).unwrap_or_else(|_| self.given.clone()))
    }

    /// As [`lookup`](Self::lookup), and remembered.
    pub fn watch(&self, path: impl AsRef<Path>) -> Option<RootFile> {
        let path = path.as_ref();
        let found = self.lookup(path);
        // What is there is identified by itself, wherever links lead: a directory by what it holds.
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
                || self.lookup(parent).is_some()
            {
                break;
            }
            missing = parent;
        }
        missing
    }

    /// Opens what is at `path`.
    ///
    /// On a way with `..` the kernel gives up, with `EAGAIN`, where anybody on the host mounted or
    /// renamed a directory meanwhile (`openat2(2)`): then nothing is wrong, and it's asked again.
    fn find(&self, path: &Path, flags: OFlags, how: ResolveFlags) -> rustix::io::Result<OwnedFd> {
        let mut since = None;
        loop {
            match openat2(&self.dir, path, flags, Mode::empty(), how) {
                Err(rustix::io::Errno::AGAIN)
                    if since.get_or_insert_with(Instant::now).elapsed() < TIMEOUT =>
                {
                    std::thread::yield_now();
                }
                opened => return opened,
            }
        }
    }

    /// The stamp of what is at `path` now; `None` where nothing is.
    fn stamp(&self, path: &Path) -> Option<Stamp> {
        let file = self.find(path, PATH_ONLY, ResolveFlags::IN_ROOT);
        let stat = statx(&file.ok()?, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS);
        stat.ok().as_ref().map(Stamp::of)
    }

    /// The same by one call, where no links are on the way, or none that need the root. Should there
    /// be one after all, it leads to something else, or to the same that is there without it.
    fn quick_stamp(&self, path: &Path, flags: AtFlags) -> Option<Stamp> {
        statx(&self.dir, path, flags, StatxFlags::BASIC_STATS).ok().as_ref().map(Stamp::of)
    }

    /// Whether no link is on the way to `path`, nor there.
    fn is_plain(&self, path: &Path) -> bool {
        self.is_reached(path, ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS)
    }

    /// Whether no link on the way to `path` is one that the root makes lead elsewhere.
    fn needs_no_root(&self, path: &Path) -> bool {
        self.path() == Path::new("/") || self.is_reached(path, ResolveFlags::BENEATH)
    }

    /// Whether that is the way to `path`, as far as it is there.
    fn is_reached(&self, path: &Path, how: ResolveFlags) -> bool {
        match self.find(path, PATH_ONLY, how) {
            Err(error) if error == rustix::io::Errno::NOENT => path
                .parent()
                .is_none_or(|parent| parent == Path::new("") || self.is_reached(parent, how)),
            result => result.is_ok(),
        }
    }

    /// What is at `path`, through links; `None` if nothing is there that can be inspected.
    #[must_use]
    pub fn lookup(&self, path: impl AsRef<Path>) -> Option<RootFile> {
        let path = path.as_ref();
        let file = self.find(path, PATH_ONLY, ResolveFlags::IN_ROOT).ok()?;
        let stat = statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS).ok()?;
        Some(RootFile {
            kind: FileType::from_raw_mode(stat.stx_mode.into()),
            identity: (stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino),
            size: stat.stx_size,
            file,
        })
    }

    /// What is at `path` itself, whose way has no links, and where it leads if it is one; `None` where
    /// nothing is that can be reached so.
    #[must_use]
    pub fn entry(&self, path: &Path) -> Option<(FileType, Option<PathBuf>)> {
        use std::os::unix::ffi::OsStringExt;
        let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let file = self.find(path, PATH_ONLY | OFlags::NOFOLLOW, how).ok()?;
        let stat = statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS).ok()?;
        let kind = FileType::from_raw_mode(stat.stx_mode.into());
        let target = match kind {
            FileType::Symlink => rustix::fs::readlinkat(&file, "", Vec::new()).ok(),
            _ => None,
        };
        let target = target.map(|target| OsString::from_vec(target.into_bytes()).into());
        Some((kind, target))
    }

    /// Where a file is below the root, without links; `None` where it no longer is.
    #[must_use]
    pub fn place_of(&self, found: &RootFile) -> Option<PathBuf> {
        let real = real_path(&found.file).ok()?;
        Some(Path::new("/").join(real.strip_prefix(self.path()).ok()?))
    }

    /// The regular file at `path`, at most `most_bytes` of it; `None` where there is none or it
    /// is larger.
    #[must_use]
    pub fn read(&self, path: impl AsRef<Path>, most_bytes: u64) -> Option<Vec<u8>> {
        let found = self.lookup(path)?;
        let mut bytes = Vec::with_capacity(usize::try_from(found.size.min(most_bytes) + 1).ok()?);
        found.open()?.take(most_bytes + 1).read_to_end(&mut bytes).ok()?;
        (bytes.len() as u64 <= most_bytes).then_some(bytes)
    }

    /// All that was watched so far; `None` if it may change without appearing different, watching
    /// having begun at `begun`.
    ///
    /// Before Linux 6.13 the time of a file is that of the last tick, and there are 100 to 1000 of
    /// them in a second: what changes twice within one has the same time after both.
    #[must_use]
    pub fn watched(&self, begun: SystemTime) -> Option<Watched> {
        let stamps = self.with_directories(self.watched.borrow().clone());
        let begun = begun.duration_since(UNIX_EPOCH).unwrap_or_default();
        let limit = i128::try_from(begun.saturating_sub(TICK).as_nanos()).unwrap_or(0);
        if stamps.values().flatten().any(|stamp| stamp.modified_ns >= limit) {
            return None;
        }
        let (plain, others): (Vec<_>, Vec<_>) =
            stamps.into_iter().partition(|(path, _)| self.is_plain(path));
        let (linked, rooted): (Vec<_>, Vec<_>) =
            others.into_iter().partition(|(path, _)| self.needs_no_root(path));
        let print =
            print([&plain, &linked, &rooted].into_iter().flatten().map(|(_, stamp)| *stamp));
        let paths = |stamps: Vec<(PathBuf, _)>| stamps.into_iter().map(|(path, _)| path).collect();
        let (plain, linked, rooted) = (paths(plain), paths(linked), paths(rooted));
        Some(Watched { plain, linked, rooted, print })
    }

    /// The same with fewer checks: what comes into a directory, goes or is replaced changes the
    /// directory's own time. Checks that are new are made after the search, which what has changed
    /// since then spoils.
    fn with_directories(&self, mut stamps: Stamps) -> Stamps {
        let mut paths: Vec<PathBuf> = stamps.keys().cloned().collect();
        // Those over links first: a check of them costs more.
        paths.sort_by_key(|path| self.is_plain(path));
        let mut together: BTreeMap<PathBuf, Vec<PathBuf>> = BTreeMap::new();
        for path in paths {
            let parent = match path.parent() {
                Some(parent) if parent != Path::new("") => parent.to_owned(),
                _ => PathBuf::from("."),
            };
            if path == parent || self.is_link(&path) {
                continue;
            }
            let stamp = stamps[&path];
            let is_directory = stamp.is_some_and(|stamp| stamp.is_directory);
            // What is in a directory changes its own time only: some path has to be checked.
            let is_reported = || stamps.iter().any(|(other, its)| *other != path && *its == stamp);
            if stamps.get(&parent).is_some_and(Option::is_some) {
                if !is_directory || is_reported() {
                    stamps.remove(&path);
                }
            } else if !is_directory
                && !RESTLESS.iter().any(|restless| parent == Path::new(restless))
            {
                together.entry(parent).or_default().push(path);
            }
        }
        for (parent, paths) in together.into_iter().filter(|(_, paths)| paths.len() > 1) {
            stamps.retain(|path, _| !paths.contains(path));
            let stamp = self.stamp(&parent);
            stamps.insert(parent, stamp);
        }
        stamps
    }

    /// Whether a link is at `path`, wherever it leads.
    fn is_link(&self, path: &Path) -> bool {
        let flags = PATH_ONLY | OFlags::NOFOLLOW;
        let file = self.find(path, flags, ResolveFlags::IN_ROOT);
        file.and_then(|file| statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS))
            .is_ok_and(|stat| FileType::from_raw_mode(stat.stx_mode.into()) == FileType::Symlink)
    }

    /// Whether all is as it was when it was watched.
    #[must_use]
    pub fn is_as(&self, then: &Watched) -> bool {
        let quick = |flags| move |path: &PathBuf| self.quick_stamp(path, flags);
        let plain = then.plain.iter().map(quick(AtFlags::SYMLINK_NOFOLLOW));
        let linked = then.linked.iter().map(quick(AtFlags::empty()));
        let rooted = then.rooted.iter().map(|path| self.stamp(path));
        print(plain.chain(linked).chain(rooted)) == then.print
    }
}

/// One number for all of these, in this order.
fn print(stamps: impl Iterator<Item = Option<Stamp>>) -> u64 {
    let mut hasher = DefaultHasher::new();
    stamps.for_each(|stamp| stamp.hash(&mut hasher));
    hasher.finish()
}

impl RootFile {
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
    fn what_others_rename_meanwhile_hides_nothing() {
        let dir = tree();
        symlink("../usr/lib/../lib", dir.path().join("usr/link")).unwrap();
        let root = Root::open(dir.path()).unwrap();
        let busy = tempfile::tempdir().unwrap();
        let (one, other) = (busy.path().join("one/x"), busy.path().join("other/x"));
        for parent in [&one, &other] {
            fs::create_dir(parent.parent().unwrap()).unwrap();
        }
        fs::create_dir(&one).unwrap();
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    fs::rename(&one, &other).unwrap();
                    fs::rename(&other, &one).unwrap();
                }
            });
            let found = (0..20_000).filter(|_| root.lookup("usr/link/a").is_some()).count();
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(found, 20_000);
        });
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
            let found = root.lookup(name).unwrap();
            assert_eq!(root.place_of(&found).unwrap(), Path::new("/usr/lib/a"), "{name}");
            assert_eq!(root.read(name, 100).unwrap(), b"inside");
        }
        for name in ["passwd", "magic", "../etc/passwd", "/etc/passwd"] {
            assert!(root.lookup(name).is_none(), "{name}");
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
    fn changes_since_the_last_check_are_detected() {
        let dir = tree();
        let fresh = || Root::open(dir.path()).unwrap();
        let root = fresh();
        assert!(root.watch("usr/lib").is_some() && root.watch("usr/lib64").is_none());
        let made = fs::metadata(dir.path().join("usr/lib")).unwrap().modified().unwrap();
        assert_eq!(root.watched(made + TICK / 2), None, "it may change within the same tick");
        let stamps = root.watched(made + TICK * 2).unwrap();
        std::thread::sleep(TICK * 2);
        assert!(fresh().is_as(&stamps));
        fs::create_dir(dir.path().join("usr/lib64")).unwrap();
        assert!(!fresh().is_as(&stamps), "what wasn't there is");
        fs::remove_dir(dir.path().join("usr/lib64")).unwrap();
        assert!(fresh().is_as(&stamps));
        fs::write(dir.path().join("usr/lib/b"), "").unwrap();
        assert!(!fresh().is_as(&stamps), "a directory has a file more");
    }

    /// The entries that a directory has or lacks are known by one check of the directory.
    #[test]
    fn one_check_of_a_directory_covers_its_entries() {
        let dir = tree();
        let at = |name: &str| dir.path().join(name);
        for name in ["etc", "usr/share"] {
            fs::create_dir(at(name)).unwrap();
        }
        symlink("usr/lib", at("lib")).unwrap();
        symlink("/nowhere", at("usr/share/link")).unwrap();
        symlink("/usr/lib", at("inside")).unwrap();
        let root = Root::open(dir.path()).unwrap();
        for name in ["usr/share/a", "usr/share/b", "usr/share/link", "etc/a", "etc/b", "usr/lib64"]
        {
            assert!(root.watch(name).is_none());
        }
        for name in ["usr/lib", "lib", "inside", "usr/lib/missing", "lib/a", "usr/share/c"] {
            root.watch(name);
        }
        let later = SystemTime::now() + TICK * 2;
        let watched = root.watched(later).unwrap();
        let paths = |names: &[&str]| names.iter().map(PathBuf::from).collect::<Vec<_>>();
        assert_eq!(watched.linked, paths(&["lib"]));
        assert_eq!(watched.rooted, paths(&["inside", "usr/share/link"]));
        assert_eq!(watched.plain, paths(&["etc/a", "etc/b", "usr/lib", "usr/lib64", "usr/share"]));

        std::thread::sleep(TICK * 2);
        let changes: [&dyn Fn(); 7] = [
            &|| fs::write(at("etc/a"), "").unwrap(),
            &|| fs::write(at("usr/share/b"), "").unwrap(),
            &|| fs::write(at("usr/lib/missing"), "").unwrap(),
            &|| fs::rename(at("usr/lib"), at("usr/lib64")).unwrap(),
            &|| symlink("usr/share", at("new")).and(fs::rename(at("new"), at("lib"))).unwrap(),
            &|| symlink("/usr/share", at("usr/lib")).unwrap(),
            &|| symlink("/usr", at("new")).and(fs::rename(at("new"), at("inside"))).unwrap(),
        ];
        let mut then = watched;
        for (turn, change) in changes.iter().enumerate() {
            let root = Root::open(dir.path()).unwrap();
            assert!(root.is_as(&then), "change {turn}: nothing has happened yet");
            change();
            assert!(!root.is_as(&then), "change {turn}");
            let paths = then.plain.iter().chain(&then.linked).chain(&then.rooted);
            paths.for_each(|path| drop(root.watch(path)));
            then = root.watched(later + Duration::from_secs(60)).unwrap();
        }
    }
}
