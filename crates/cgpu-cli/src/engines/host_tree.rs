//! A host's files: read in a bounded part, and never waiting.
//!
//! Owns the ways to read a file, a directory, a program's path. Must not know their use. Only
//! regular files are opened: a named pipe would block for ever.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::Observed;
use cgpu::runtime::real::{self, USUAL_DIRS};

/// Most bytes read of one file; a daemon's configuration has some thousands.
const READ_BYTES_MAX: u64 = 1 << 20;

/// Most entries read of one directory.
const ENTRIES_MAX: usize = 4096;

/// A host's file system.
#[derive(Debug, Clone)]
pub(crate) struct Tree {
    root: PathBuf,
    search: Option<std::ffi::OsString>,
}

impl Tree {
    /// That under `root`; programs are searched in `search`, as `PATH` has it.
    pub(crate) fn new(root: &Path, search: Option<&OsStr>) -> Self {
        Tree { root: root.to_owned(), search: search.map(OsStr::to_owned) }
    }

    /// Whether it is this process's own.
    pub(crate) fn is_own(&self) -> bool {
        self.root == Path::new("/")
    }

    /// `path` of the host, as this process reaches it.
    pub(crate) fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The host's name of what this process reaches at `path`.
    pub(crate) fn named(&self, path: &Path) -> PathBuf {
        match path.strip_prefix(&self.root) {
            Ok(below) if !self.is_own() => Path::new("/").join(below),
            _ => path.to_owned(),
        }
    }

    /// A file's text, invalid UTF-8 replaced.
    pub(crate) fn read(&self, path: impl AsRef<Path>) -> Observed<String> {
        read(&self.at(path))
    }

    /// A directory's entries, sorted; none if it can't be read.
    pub(crate) fn list(&self, path: impl AsRef<Path>) -> Vec<PathBuf> {
        let Ok(entries) = fs::read_dir(self.at(path)) else { return Vec::new() };
        let entries = entries.take(ENTRIES_MAX).filter_map(Result::ok);
        let mut paths: Vec<PathBuf> = entries.map(|entry| self.named(&entry.path())).collect();
        paths.sort();
        paths
    }

    /// Whether a program is there and executable.
    pub(crate) fn is_executable(&self, path: impl AsRef<Path>) -> bool {
        fs::metadata(self.at(path))
            .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    }

    /// The path of a program by its name, searched for as ours are.
    pub(crate) fn program(&self, name: &str) -> Option<PathBuf> {
        if self.is_own() {
            let found = real::find(&[name.to_owned()], self.search.as_deref());
            return found.ok().map(|real| real.file);
        }
        if name.contains('/') {
            return Some(PathBuf::from(name)).filter(|path| self.is_executable(path));
        }
        let given = self.search.iter().flat_map(std::env::split_paths);
        let dirs = given.chain(std::env::split_paths(USUAL_DIRS)).filter(|dir| dir.is_absolute());
        dirs.map(|dir| dir.join(name)).find(|path| self.is_executable(path))
    }
}

/// The text of the file at `path`.
pub(crate) fn read(path: &Path) -> Observed<String> {
    let text = || -> io::Result<Option<String>> {
        if !fs::metadata(path)?.is_file() {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        File::open(path)?.take(READ_BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
    };
    match text() {
        Ok(Some(text)) => Observed::Present(text),
        Ok(None) => Observed::Unreadable("it is no regular file".to_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Observed::Absent,
        Err(error) => Observed::Unreadable(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    // A file is read up to a limit; what is no regular file is not opened.
    #[test]
    fn only_regular_files_are_read_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let tree = Tree::new(dir.path(), None);
        fs::write(dir.path().join("plain"), b"a\xff\n").unwrap();
        fs::write(dir.path().join("large"), vec![b'x'; 3 << 20]).unwrap();
        mkfifo(&dir.path().join("pipe"), Mode::S_IRWXU).unwrap();
        std::os::unix::fs::symlink("/dev/zero", dir.path().join("endless")).unwrap();
        assert_eq!(tree.read("/plain"), Observed::Present("a\u{fffd}\n".to_owned()));
        assert!(matches!(tree.read("/large"), Observed::Present(text) if text.len() == 1 << 20));
        for odd in ["/pipe", "/endless", "/"] {
            assert_eq!(tree.read(odd), Observed::Unreadable("it is no regular file".to_owned()));
        }
        assert_eq!(tree.read("/nothing"), Observed::Absent);
        assert!(matches!(tree.read("/plain/below"), Observed::Unreadable(_)));
    }

    // Paths are the host's, wherever its file system is mounted.
    #[test]
    fn paths_are_those_of_the_host() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("opt/bin")).unwrap();
        let program = dir.path().join("opt/bin/runc");
        fs::write(&program, "x").unwrap();
        let tree = Tree::new(dir.path(), Some("relative:/opt/bin".as_ref()));
        assert_eq!(tree.program("runc"), None);
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(tree.program("runc"), Some("/opt/bin/runc".into()));
        assert_eq!(tree.program("/opt/bin/runc"), Some("/opt/bin/runc".into()));
        assert_eq!(tree.program("crun"), None);
        assert_eq!(tree.list("/opt"), [PathBuf::from("/opt/bin")]);
        assert_eq!(Tree::new(Path::new("/"), None).at("/etc"), Path::new("/etc"));
    }
}
