//! The directory that the tree is mounted on: [`MountPoint`].
//!
//! What is mounted is read from the kernel's list: a process that reads a tree that no process serves
//! waits for ever, or gets an error.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use procfs::process::Process;
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

/// What is mounted, by the kernel's list (its "mount source").
pub(crate) const SOURCE: &str = "cgpu-tree";

/// How long a tree may take to say that a process serves it.
const TIMEOUT: Duration = Duration::from_secs(2);

/// How long the process that served a tree may take to exit once it is unmounted.
const LEAVING: Duration = Duration::from_secs(10);

/// A directory on which nothing is mounted, and on which no other process mounts a tree.
#[derive(Debug)]
pub(crate) struct MountPoint {
    /// Absolute, without links.
    pub(crate) dir: PathBuf,
    /// The directory, open and locked.
    pub(crate) lock: File,
}

impl MountPoint {
    /// Sees that the tree can be mounted on `dir`, which is made where it isn't there. What a killed
    /// one has left there is taken down.
    ///
    /// # Errors
    ///
    /// Where it can't: because something is mounted there, or it is no empty directory.
    pub(crate) fn take(dir: &Path) -> Result<Self> {
        let dir = resolved(dir)?;
        let shown = dir.display();
        match mounted_on(&dir)? {
            Some(Mounted::Tree) => {
                if is_served(&dir) {
                    bail!(
                        "the tree is mounted on {shown} already; `cgpu unmount {shown}` takes it down"
                    );
                }
                unmount(&dir).with_context(|| {
                    format!("no process serves the tree on {shown}; umount -l {shown}")
                })?;
            }
            Some(Mounted::Other(what)) => bail!(
                "something is mounted on {shown} already ({what}); name another directory, or \
                 umount {shown}"
            ),
            None => {}
        }
        match fs::create_dir(&dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(error).with_context(|| format!("cannot make {shown}"));
            }
            _ => {}
        }
        if !fs::symlink_metadata(&dir)?.is_dir() {
            bail!("{shown} is no directory; name another");
        }
        let lock = File::open(&dir).with_context(|| format!("cannot open {shown}"))?;
        if lock.try_lock().is_err() || mounted_on(&dir)?.is_some() {
            bail!(
                "another `cgpu mount` is about to mount the tree on {shown}, or has just done so"
            );
        }
        if fs::read_dir(&dir)?.next().is_some() {
            bail!("{shown} is not empty, and the tree would hide what is in it; name another");
        }
        Ok(MountPoint { dir, lock })
    }
}

/// Takes the tree down that is mounted on `dir`, served or not, and waits for the process that served it.
///
/// # Errors
///
/// Where there is none.
pub(crate) fn clear(dir: &Path) -> Result<()> {
    let dir = resolved(dir)?;
    match mounted_on(&dir)? {
        Some(Mounted::Tree) => {
            unmount(&dir).with_context(|| format!("cannot unmount {}", dir.display()))?;
            let until = Instant::now() + LEAVING;
            while !is_free(&dir) {
                if Instant::now() > until {
                    bail!(
                        "the tree is unmounted, and the cgpu-tree that served {} does not exit; end it \
                         manually",
                        dir.display()
                    );
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            Ok(())
        }
        Some(Mounted::Other(what)) => {
            bail!("what is mounted on {} is no tree of cgpu's: {what}", dir.display())
        }
        None => bail!("no tree is mounted on {}", dir.display()),
    }
}

/// Unmounts what is mounted on `dir`, in use or not.
///
/// # Errors
///
/// If the kernel refuses.
pub(crate) fn unmount(dir: &Path) -> rustix::io::Result<()> {
    rustix::mount::unmount(dir, UnmountFlags::DETACH)
}

/// Whether no process has the directory for a tree.
fn is_free(dir: &Path) -> bool {
    File::open(dir).is_ok_and(|dir| dir.try_lock().is_ok())
}

/// `dir` without links before its last part, which isn't inspected.
fn resolved(dir: &Path) -> Result<PathBuf> {
    let name = dir.file_name();
    let name =
        name.with_context(|| format!("{} can't be the tree's; name a directory", dir.display()))?;
    let parent = dir.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    let found = fs::create_dir_all(parent).and_then(|()| parent.canonicalize());
    let found = found.with_context(|| format!("cannot make {}", parent.display()))?;
    Ok(found.join(name))
}

/// What is mounted on a directory.
#[derive(Debug)]
enum Mounted {
    Tree,
    /// Something else: the type of its file system.
    Other(String),
}

/// What is mounted on `dir`; of several the last.
fn mounted_on(dir: &Path) -> Result<Option<Mounted>> {
    let mounts = Process::myself().and_then(|own| own.mountinfo());
    let mounts = mounts.context("cannot read /proc/self/mountinfo; mount /proc")?;
    let mut here = mounts.into_iter().filter(|mount| mount.mount_point == dir);
    Ok(here.next_back().map(|mount| match mount.mount_source.as_deref() {
        Some(SOURCE) if mount.fs_type.starts_with("fuse") => Mounted::Tree,
        _ => Mounted::Other(mount.fs_type),
    }))
}

/// Whether a process serves the tree on `dir`. One that doesn't answer is there, and may yet.
fn is_served(dir: &Path) -> bool {
    let file = dir.join("version");
    let (reports, reported) = mpsc::channel();
    // Left behind where it never comes back.
    std::thread::spawn(move || reports.send(fs::read(file)));
    let gone = [Errno::NOTCONN, Errno::CONNABORTED];
    let is_gone =
        |error: &io::Error| Errno::from_io_error(error).is_some_and(|is| gone.contains(&is));
    !matches!(reported.recv_timeout(TIMEOUT), Ok(Err(error)) if is_gone(&error))
}
