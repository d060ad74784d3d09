//! The directories of specifications, and what is in their files.
//!
//! Owns which files count (`.yaml` and `.json` of NVIDIA's kind, in the order of their names;
//! what a later directory defines takes the place of what an earlier one does) and how much of
//! them is read. A file that can't be used is kept with the reason: it is an error only where
//! something that nothing else gives is wanted. A file that others than root may write is not
//! used, since its hooks run as root; nor is any in a directory that others may write.

use std::fs::{self, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

use super::parser::{self, Form};
use super::spec::Specification;

/// Where specifications are, the last having the last word (`pkg/cdi/spec-dirs.go`). The first is
/// an administrator's, the second a program's.
pub const DIRECTORIES: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// The kind of NVIDIA's GPUs and MIG devices. Its device plugins use others, whose devices aren't
/// named as GPUs are and come and go with their pods.
pub const KIND: &str = "nvidia.com/gpu";

/// Most bytes read of a file; that of eight GPUs has 30 KiB.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// What is wrong with a directory that others may write.
const ANYBODYS_DIRECTORY: &str = "others than root may write this directory, and hooks of its files would run \
                                  as root; `chown root` and `chmod 755` it";

/// Most files read in a directory.
const FILES_MAX: usize = 256;

/// A directory as it is listed, without reading its files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Listing {
    pub(super) directory: PathBuf,
    /// Its files that could be specifications, by name.
    pub(super) files: Vec<Listed>,
    /// Why it can't be listed.
    pub(super) problem: Option<String>,
}

/// A file as it is listed: whatever changes it, changes this.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Listed {
    pub(super) name: PathBuf,
    size_bytes: u64,
    inode: u64,
    modified_ns: i128,
    changed_ns: i128,
}

/// A file that counts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Source {
    pub(super) file: PathBuf,
    /// The place of its directory: a greater one has precedence.
    pub(super) precedence: usize,
    /// What is in it.
    pub(super) content: Content,
}

/// What is in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Content {
    /// A specification of [`KIND`].
    Specification(Box<Specification>),
    /// What can't be used, and why.
    Unusable(String),
}

/// The form of a file by its name.
fn form(name: &Path) -> Option<Form> {
    match name.extension()?.to_str()? {
        "yaml" => Some(Form::Yaml),
        "json" => Some(Form::Json),
        _ => None,
    }
}

/// The files in `directories`.
pub(super) fn list(directories: &[PathBuf]) -> Vec<Listing> {
    let is_anybodys = |directory: &Path| fs::metadata(directory).is_ok_and(|meta| !is_roots(&meta));
    let listed = |directory: &PathBuf| {
        let (files, problem) = match files_in(directory) {
            // A user who may write it puts a file of root's in another's place.
            Ok(_) if is_anybodys(directory) => (Vec::new(), Some(ANYBODYS_DIRECTORY.to_owned())),
            Ok((files, 0)) => (files, None),
            Ok((files, more)) => (files, Some(format!("{more} files after the first {FILES_MAX}"))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => (Vec::new(), None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        Listing { directory: directory.clone(), files, problem }
    };
    directories.iter().map(listed).collect()
}

/// The first files, and how many there are besides.
fn files_in(directory: &Path) -> io::Result<(Vec<Listed>, usize)> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        let name = PathBuf::from(entry?.file_name());
        if form(&name).is_some() {
            names.push(name);
        }
    }
    names.sort_unstable();
    let more = names.len().saturating_sub(FILES_MAX);
    names.truncate(FILES_MAX);
    // One that is gone by now, or a link to nowhere, is listed as nothing and then not read.
    let state = |name: PathBuf| match fs::metadata(directory.join(&name)) {
        Ok(meta) => Listed {
            name,
            size_bytes: meta.size(),
            inode: meta.ino(),
            modified_ns: ns(meta.mtime(), meta.mtime_nsec()),
            changed_ns: ns(meta.ctime(), meta.ctime_nsec()),
        },
        Err(_) => Listed { name, size_bytes: 0, inode: 0, modified_ns: 0, changed_ns: 0 },
    };
    Ok((names.into_iter().map(state).collect(), more))
}

fn ns(seconds: i64, nanoseconds: i64) -> i128 {
    i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds)
}

/// What is in the listed files, without those of other kinds.
pub(super) fn read(listings: &[Listing]) -> Vec<Source> {
    let mut sources = Vec::new();
    for (precedence, listing) in listings.iter().enumerate() {
        if let Some(problem) = &listing.problem {
            let content = Content::Unusable(problem.clone());
            sources.push(Source { file: listing.directory.clone(), precedence, content });
        }
        for listed in &listing.files {
            let file = listing.directory.join(&listed.name);
            let Some(form) = form(&listed.name) else { continue };
            if let Some(content) = content(&file, form) {
                sources.push(Source { file, precedence, content });
            }
        }
    }
    sources
}

/// What is in the file; `None` where that is another kind.
fn content(file: &Path, form: Form) -> Option<Content> {
    let bytes = match bytes(file) {
        Ok(Ok(bytes)) => bytes,
        Ok(Err(problem)) => return Some(Content::Unusable(problem.to_owned())),
        Err(error) => return Some(Content::Unusable(error.to_string())),
    };
    match parser::parse(&bytes, form) {
        Ok(spec) if spec.kind == KIND => Some(Content::Specification(Box::new(spec))),
        Ok(_) => None,
        // What another vendor does in a file of his, perhaps of a version to come, is no matter.
        Err(_) if parser::kind(&bytes, form).is_some_and(|kind| kind != KIND) => None,
        Err(error) => Some(Content::Unusable(error.to_string())),
    }
}

/// The bytes of the file, or why they don't count.
fn bytes(file: &Path) -> io::Result<Result<Vec<u8>, &'static str>> {
    // Judged is what was opened, and not what is there by then. A pipe would wait for a writer.
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(file)?;
    let meta = opened.metadata()?;
    if !meta.is_file() {
        return Ok(Err("it is no regular file"));
    }
    if !is_roots(&meta) {
        return Ok(Err("others than root may write it, and its hooks would run as root; \
                       `chown root` and `chmod 644` it"));
    }
    let mut bytes = Vec::new();
    opened.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Ok(Err("it has more than 16 MiB"));
    }
    Ok(Ok(bytes))
}

/// Whether only root, or the user that runs us, may write it.
fn is_roots(meta: &Metadata) -> bool {
    let others = meta.mode() & 0o002 != 0 || (meta.mode() & 0o020 != 0 && meta.gid() != 0);
    let owner = meta.uid();
    !others && (owner == 0 || owner == geteuid().as_raw() || Some(owner) == unmapped_root())
}

/// The owner that files of the host's root have in a user namespace which doesn't map it, as a rootless engine's:
/// hooks run as its user there, and other users' files in these directories are root's doing.
fn unmapped_root() -> Option<u32> {
    let map = fs::read_to_string("/proc/self/uid_map").ok()?;
    // Each line: first id inside, first outside, how many.
    match map.lines().any(|line| line.split_whitespace().nth(1) == Some("0")) {
        true => None,
        false => fs::read_to_string("/proc/sys/kernel/overflowuid").ok()?.trim().parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;
    use crate::cdi::fixture::{MINIMAL, text};

    fn directory() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    fn sources(directories: &[&Path]) -> Vec<Source> {
        let directories: Vec<PathBuf> = directories.iter().map(|path| path.into()).collect();
        read(&list(&directories))
    }

    fn names(sources: &[Source]) -> Vec<String> {
        let name =
            |source: &Source| source.file.file_name().unwrap().to_string_lossy().into_owned();
        sources.iter().map(name).collect()
    }

    fn why(source: &Source) -> &str {
        match &source.content {
            Content::Unusable(why) => why,
            Content::Specification(_) => "",
        }
    }

    /// Files of NVIDIA's kind are read in the order of directories, and of names within one.
    #[test]
    fn nvidia_files_are_read_by_name_and_directory() {
        let (etc, run) = (directory(), directory());
        for (at, name) in [(&etc, "b.yaml"), (&etc, "a.yaml"), (&run, "0.yaml"), (&etc, "c.yml")] {
            fs::write(at.path().join(name), MINIMAL).unwrap();
        }
        fs::write(etc.path().join("d.json"), text("one-gpu.json")).unwrap();
        fs::write(etc.path().join("e.yaml"), text("other-kind.yaml")).unwrap();
        fs::write(etc.path().join("f.yaml"), "cdiVersion: 9.0.0\nkind: intel.com/gpu\nx: y\n")
            .unwrap();
        let sources = sources(&[etc.path(), Path::new("/nowhere"), run.path()]);
        assert_eq!(names(&sources), ["a.yaml", "b.yaml", "d.json", "0.yaml"]);
        let precedences: Vec<_> = sources.iter().map(|source| source.precedence).collect();
        assert_eq!(precedences, [0, 0, 0, 2]);
        assert!(sources.iter().all(|source| why(source).is_empty()), "{sources:?}");
    }

    #[test]
    fn unusable_file_is_retained_with_the_reason() {
        let etc = directory();
        let path = |name: &str| etc.path().join(name);
        fs::write(path("a.yaml"), "kind: [").unwrap();
        fs::write(path("b.json"), text("unknown-field.yaml")).unwrap();
        fs::write(path("c.yaml"), MINIMAL).unwrap();
        fs::set_permissions(path("c.yaml"), fs::Permissions::from_mode(0o666)).unwrap();
        fs::create_dir(path("d.yaml")).unwrap();
        symlink("nowhere", path("e.yaml")).unwrap();
        let large = File::create(path("f.yaml")).unwrap();
        large.set_len(FILE_BYTES_MAX + 1).unwrap();
        nix::unistd::mkfifo(&path("g.yaml"), nix::sys::stat::Mode::S_IRUSR).unwrap();
        let sources = sources(&[etc.path()]);
        let reasons = [
            "at line 1, column",
            "expected value at line 1 column 1",
            "others than root may write it, and its hooks would run as root",
            "it is no regular file",
            "No such file or directory",
            "it has more than 16 MiB",
            "it is no regular file",
        ];
        assert_eq!(sources.len(), reasons.len(), "{:?}", names(&sources));
        for (source, reason) in sources.iter().zip(reasons) {
            assert!(why(source).contains(reason), "{source:?}");
        }
        for at in 0..FILES_MAX {
            fs::write(path(&format!("0{at}.yaml")), MINIMAL).unwrap();
        }
        let sources = read(&list(&[etc.path().to_owned()]));
        assert_eq!(sources.len(), FILES_MAX + 1);
        assert_eq!(why(&sources[0]), "7 files after the first 256");
        let file = path("a.yaml").join("x");
        assert!(why(&read(&list(&[file]))[0]).contains("Not a directory"));
    }

    /// A directory that others than root may write has no file that counts.
    #[test]
    fn files_in_a_writable_directory_are_ignored() {
        let etc = directory();
        fs::write(etc.path().join("a.yaml"), MINIMAL).unwrap();
        fs::set_permissions(etc.path(), fs::Permissions::from_mode(0o1777)).unwrap();
        let listings = list(&[etc.path().to_owned()]);
        assert!(listings[0].files.is_empty());
        assert!(why(&read(&listings)[0]).contains("others than root may write this directory"));
        fs::set_permissions(etc.path(), fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(list(&[etc.path().to_owned()])[0].files.len(), 1);
    }

    #[test]
    fn whatever_happens_to_a_file_changes_its_listing() {
        let etc = directory();
        let file = etc.path().join("a.yaml");
        let listed = || list(&[etc.path().to_owned()]);
        let nothing = listed();
        fs::write(&file, MINIMAL).unwrap();
        let first = listed();
        assert_ne!(nothing, first);
        assert_eq!(first, listed());
        // The same text with the same time, by another inode.
        let times = fs::metadata(&file).unwrap().modified().unwrap();
        fs::copy(&file, etc.path().join("b")).unwrap();
        File::options()
            .write(true)
            .open(etc.path().join("b"))
            .unwrap()
            .set_modified(times)
            .unwrap();
        fs::rename(etc.path().join("b"), &file).unwrap();
        let second = listed();
        assert_ne!(first, second);
        fs::write(&file, format!("{MINIMAL}# x\n")).unwrap();
        assert_ne!(second, listed());
    }
}
