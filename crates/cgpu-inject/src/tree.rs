//! The driver's libraries and programs as one directory of the host, mounted file by file.
//!
//! A container then gets all of them by a single mount, and under all their names, links among
//! them; a mount for each file and name would cost a container creation some 0.1 ms each, and
//! leave an empty file for each in the container's own layer. `STATE_DIR/driver` is a file system of its own
//! that passes no mounts on; in it `NAMESPACE/IDENTITY/CAPABILITIES/nvidia/{bin,lib64,lib32}` has a
//! file mounted read-only for each of the driver's, whose copies in containers outlive the directory
//! and the driver's update; what has a place of its own is mounted below `CAPABILITIES/data`.
//!
//! `CAPABILITIES` is mounted on itself, and made read-only last of all: then it's complete. So what a
//! container gets of it can't be written to here already, and a bind mount has the flags of what
//! it is made of: no runtime has to take that right away by a second call, which costs runc as much as
//! the first. Nothing in it is ever removed: a mount point that is gone here is gone in containers.

use std::ffi::CStr;
use std::fs::{self, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, CWD, StatVfsMountFlags, StatxAttributes, StatxFlags, statvfs, statx};
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change, mount_remount,
};
use thiserror::Error;

use super::driver::{Capability, DriverFile, Use, Width};
use super::driver_cache::CachedDriver;

/// Where the directory goes in a container: where images of NVIDIA's and of Google's look; else below no
/// directory over which something can be mounted.
pub const PLACES: [&str; 2] = ["/usr/local/nvidia", "/nvidia-driver"];
pub const LIBRARIES: &str = "lib64";
pub const LIBRARIES_32: &str = "lib32";
pub const PROGRAMS: &str = "bin";
/// What the host's directory is called in the state directory.
const NAME: &str = "driver";

/// What of the directory containers get as [`PLACES`].
const OWN: &str = "nvidia";
/// What of it has places of its own.
const DATA: &str = "data";

/// Most directories of one driver: what people ask for is few of the combinations that there are.
const DIRECTORIES_MAX: usize = 6;

/// For mount points and links: a driver has some hundred of both.
const OPTIONS: &CStr = c"mode=0700,size=4m";
/// [`OPTIONS`] under SELinux: containers may read what has this type (container-selinux), and not what a tmpfs has by
/// default; the driver's files keep their own.
const LABELLED: &CStr = c"mode=0700,size=4m,context=system_u:object_r:container_ro_file_t:s0";

/// Another driver's directory is retained that long: a container creation may be about to mount it.
const RETAINED_S: u64 = 600;

/// Why the directory can't be made.
#[derive(Debug, Error)]
#[error("cannot {what} {}: {source}; cgpu needs root and a state_dir of its own to mount the driver's files", path.display())]
pub struct TreeError {
    what: String,
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Where the directories of all drivers are.
#[must_use]
pub fn home(state_dir: &Path) -> PathBuf {
    state_dir.join(NAME)
}

/// A library or a program in the directory.
struct Leaf<'a> {
    source: &'a str,
    /// Where, below [`OWN`].
    path: PathBuf,
    links: Vec<PathBuf>,
}

/// What is mounted at [`PLACES`].
#[must_use]
pub fn shared(dir: &Path) -> PathBuf {
    dir.join(OWN)
}

/// Where a directory has the libraries of that width.
#[must_use]
pub fn shelf(dir: &Path, width: Width) -> PathBuf {
    shared(dir).join(libraries(width))
}

/// Where a directory has a file that containers get by a mount of its own; `None` where it doesn't.
#[must_use]
pub fn place_of(dir: &Path, file: &DriverFile) -> Option<PathBuf> {
    match file.used_as {
        Use::Program => Some(shared(dir).join(PROGRAMS).join(Path::new(&file.path).file_name()?)),
        Use::Data => Some(dir.join(DATA).join(file.path.trim_start_matches('/'))),
        Use::Library { .. } | Use::Socket => None,
    }
}

fn leaves<'a>(files: impl Iterator<Item = &'a DriverFile>) -> Vec<Leaf<'a>> {
    let mut leaves: Vec<Leaf<'a>> = Vec::new();
    for file in files {
        let Some(name) = Path::new(&file.path).file_name() else { continue };
        let (dir, names) = match &file.used_as {
            Use::Library { names, width } => (libraries(*width), names.as_slice()),
            Use::Program => (PROGRAMS, &[][..]),
            Use::Data | Use::Socket => continue,
        };
        let path = Path::new(dir).join(name);
        if leaves.iter().all(|other| other.path != path) {
            let links = names.iter().map(|name| Path::new(dir).join(name)).collect();
            leaves.push(Leaf { source: &file.source, path, links });
        }
    }
    leaves
}

/// The directory of libraries of that width.
fn libraries(width: Width) -> &'static str {
    match width {
        Width::Native => LIBRARIES,
        Width::Compat32 => LIBRARIES_32,
    }
}

/// The directory of `known` for containers with these capabilities, made where it isn't there;
/// `None` where such containers get no library and no program, or there are too many already: what
/// a container may ask for is its author's choice, every file of every directory is a mount of the
/// host, and all of them are copied for each new container.
///
/// # Errors
///
/// If it can't be made; then nothing of it is taken for complete.
pub fn prepare(
    state_dir: &Path,
    known: &CachedDriver,
    capabilities: &[Capability],
) -> Result<Option<PathBuf>, TreeError> {
    let is_leaf = |file: &DriverFile| matches!(file.used_as, Use::Library { .. } | Use::Program);
    if !known.driver.files_for(capabilities).any(is_leaf) {
        return Ok(None);
    }
    let bits = capabilities.iter().fold(0u32, |bits, capability| bits | 1 << *capability as u32);
    let home = home(state_dir);
    let own = home.join(mount_namespace());
    let dir = own.join(&known.identity).join(format!("{bits:02x}"));
    if is_whole(&dir) {
        return Ok(Some(dir));
    }
    let lock = state_dir.join("driver.lock");
    make_dir(state_dir, 0o700)?;
    let _lock = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&lock)
        .and_then(|file| file.lock().map(|()| file))
        .map_err(failed("lock", &lock))?;
    if is_whole(&dir) {
        return Ok(Some(dir));
    }
    if !is_mounted(&home) {
        make_dir(&home, 0o700)?;
        own_file_system(&home)?;
    }
    // Also if the process that mounted it was killed before this.
    private(&home)?;
    forget(&own, &known.identity);
    if wholes(&own.join(&known.identity)) >= DIRECTORIES_MAX {
        return Ok(None);
    }
    make_dir(&dir, 0o755)?;
    if !is_mounted(&dir) {
        bind(&dir, &dir)?;
    }
    let files = || known.driver.files_for(capabilities);
    make(&shared(&dir), &leaves(files()))?;
    let data = files().filter(|file| file.used_as == Use::Data);
    for (file, point) in data.filter_map(|file| Some((file, place_of(&dir, file)?))) {
        mount_datum(Path::new(&file.source), &point)?;
    }
    read_only(&dir, MountFlags::empty())?;
    Ok(Some(dir))
}

fn failed<E: Into<io::Error>>(what: &str, path: &Path) -> impl FnOnce(E) -> TreeError {
    let (what, path) = (what.to_owned(), path.to_owned());
    move |source| TreeError { what, path, source: source.into() }
}

fn make_dir(path: &Path, mode: u32) -> Result<(), TreeError> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true).mode(mode).create(path).map_err(failed("make the directory", path))
}

/// A name for this mount namespace. Two engines may have one each, and the same state directory:
/// neither sees the other's mounts, and a mount point that one removes is gone for both.
fn mount_namespace() -> String {
    let inode = fs::metadata("/proc/self/ns/mnt").map(|meta| meta.ino());
    format!("{:x}", inode.unwrap_or_default())
}

/// Whether something is mounted at `path` in this mount namespace.
fn is_mounted(path: &Path) -> bool {
    statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::empty())
        .is_ok_and(|stat| stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

/// Whether a directory is all there, in this mount namespace, and can't be written to.
fn is_whole(dir: &Path) -> bool {
    // The file system that it lies on can be.
    statvfs(dir).is_ok_and(|stat| stat.f_flag.contains(StatVfsMountFlags::RDONLY))
}

/// A file system for mount points, whose mounts no other namespace gets.
fn own_file_system(home: &Path) -> Result<(), TreeError> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    let tmpfs = |options: &CStr| mount("cgpu", home, "tmpfs", flags, options);
    let labelled = Path::new("/sys/fs/selinux/enforce").exists() && tmpfs(LABELLED).is_ok();
    match labelled {
        true => Ok(()),
        false => tmpfs(OPTIONS).map_err(failed("mount", home)),
    }
}

/// Makes what is missing of a directory. What is there may be in use: containers have the same
/// mount points, and one that is removed here is gone there as well.
fn make(dir: &Path, leaves: &[Leaf<'_>]) -> Result<(), TreeError> {
    for name in [LIBRARIES, LIBRARIES_32, PROGRAMS] {
        make_dir(&dir.join(name), 0o755)?;
    }
    // Whatever the engine's umask is, any user of a container may look here.
    for path in [dir, &dir.join(LIBRARIES), &dir.join(LIBRARIES_32), &dir.join(PROGRAMS)] {
        fs::set_permissions(path, Permissions::from_mode(0o755)).map_err(failed("open", path))?;
    }
    let is_leaf = |path: &Path| leaves.iter().any(|leaf| leaf.path == path);
    for leaf in leaves {
        let target = leaf.path.file_name().unwrap_or_default();
        // A link that has another library's own name gives way to that.
        for link in leaf.links.iter().filter(|link| !is_leaf(link)) {
            let link = dir.join(link);
            match symlink(target, &link) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(failed("make the link", &link)(error));
                }
                _ => {}
            }
        }
    }
    for leaf in leaves {
        let point = dir.join(&leaf.path);
        if !is_mounted(&point) {
            make_file(&point)?;
            bind(Path::new(leaf.source), &point)?;
        }
        // Also of one that is there: the process that mounted it may have been killed before this.
        read_only(&point, MountFlags::empty())?;
    }
    Ok(())
}

/// Mounts a file or a directory that is nothing to execute.
fn mount_datum(source: &Path, point: &Path) -> Result<(), TreeError> {
    if !is_mounted(point) {
        match source.is_dir() {
            true => make_dir(point, 0o755)?,
            false => {
                make_dir(point.parent().unwrap_or(Path::new("/")), 0o755)?;
                make_file(point)?;
            }
        }
        bind(source, point)?;
    }
    read_only(point, MountFlags::NOEXEC)
}

fn make_file(path: &Path) -> Result<(), TreeError> {
    let opened = OpenOptions::new().write(true).create(true).truncate(false).open(path);
    opened.map(drop).map_err(failed("make", path))
}

fn bind(source: &Path, point: &Path) -> Result<(), TreeError> {
    let what = format!("mount {} at", source.display());
    mount_bind(source, point).map_err(failed(&what, point))?;
    private(point)
}

/// A mount belongs to the peer group of what it is made of, and systemd's are all shared.
fn private(point: &Path) -> Result<(), TreeError> {
    mount_change(point, MountPropagationFlags::PRIVATE).map_err(failed("make private", point))
}

fn read_only(point: &Path, more: MountFlags) -> Result<(), TreeError> {
    let flags =
        more | MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
    mount_remount(point, flags, c"").map_err(failed("make read-only", point))
}

/// Unmounts the directories of drivers that were there before. Their mount points stay, empty:
/// running containers have them, and would lose what is mounted there with them.
fn forget(own: &Path, current: &str) {
    for entry in fs::read_dir(own).into_iter().flatten().flatten() {
        let age = entry.metadata().and_then(|meta| meta.modified()).ok();
        let age = age.and_then(|made| SystemTime::now().duration_since(made).ok());
        if entry.file_name() != current && age > Some(Duration::from_secs(RETAINED_S)) {
            unmount(&entry.path());
        }
    }
}

/// How many directories below are complete.
fn wholes(drivers: &Path) -> usize {
    let entries = fs::read_dir(drivers).into_iter().flatten().flatten();
    entries.filter(|entry| is_whole(&entry.path())).count()
}

/// Unmounts all that is mounted below a directory.
fn unmount(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        let Ok(kind) = entry.file_type() else { continue };
        if !kind.is_symlink() && is_mounted(&path) {
            // With what is mounted below it; what is busy is unmounted when it no longer is.
            let _ = rustix::mount::unmount(&path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        }
        if kind.is_dir() && !is_mounted(&path) {
            unmount(&path);
        }
    }
}
