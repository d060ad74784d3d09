//! The simulated driver. Its files are memory files: the inode says which node a file is, and the offset, which all
//! duplicates of a descriptor share, says which open file of the driver it is.
#![allow(
    unsafe_code,
    reason = "an ioctl hands a pointer over, and descriptors are asked by number"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use cgpu_sim::{GpuSpec, InMemory, Node};
use nix::errno::Errno;
use nix::sys::stat::fstat;
use nix::unistd::{Whence, gettid, lseek};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::gate::settings::{self, Identity, NodeKind};
use crate::node::IN_MEMORY;

/// The driver's version.
pub(crate) const DRIVER: &str = "535.161.08";

/// A driver whose nodes are memory files.
#[derive(Debug)]
pub(crate) struct ModelDriver {
    pub(crate) sim: InMemory,
    nodes: Vec<(Node, OwnedFd)>,
    /// The driver's numbers of files that were opened and not closed.
    opened: Mutex<BTreeSet<u64>>,
}

/// A file of the driver that a program has open.
#[derive(Debug)]
pub(crate) struct ModelFile {
    fd: OwnedFd,
}

impl ModelFile {
    pub(crate) fn number(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A memory file's device and inode.
type Inode = (u64, u64);

/// The driver and the node that each memory file belongs to.
static DRIVERS: Mutex<BTreeMap<Inode, (Weak<ModelDriver>, Node)>> = Mutex::new(BTreeMap::new());

fn place(file: BorrowedFd<'_>) -> Option<Inode> {
    let stat = fstat(file).ok()?;
    Some((stat.st_dev, stat.st_ino))
}

/// The driver and the node that a memory file belongs to; `None` where it is no model's.
fn owner(file: Inode) -> Option<(Arc<ModelDriver>, Node)> {
    let (driver, node) = lock(&DRIVERS).get(&file).cloned()?;
    Some((driver.upgrade()?, node))
}

/// An ioctl of the monitor; `None` where the file is no model's.
fn ioctl(file: BorrowedFd<'_>, request: u32, pointer: *mut u8) -> Option<Result<(), Errno>> {
    let (driver, node) = owner(place(file)?)?;
    let number = driver.number_of(file, node, std::process::id());
    let tid = gettid().as_raw().cast_unsigned();
    let done = if node == Node::Uvm {
        driver.sim.uvm(number, tid, request, pointer.expose_provenance() as u64)
    } else {
        // SAFETY: the request states how many bytes are behind the pointer, as `Device::call` checks.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(pointer, (request >> 16 & 0x3fff) as usize) };
        driver.sim.ioctl((node, number), tid, request, bytes)
    };
    Some(done.map_err(Errno::from_raw))
}

/// The driver's number of a thread's descriptor, from `/proc`; `None` where it is no file of the driver.
fn find_file(tid: u32, descriptor: u32) -> Option<u64> {
    let stat = std::fs::metadata(format!("/proc/{tid}/fd/{descriptor}")).ok()?;
    owner((stat.dev(), stat.ino()))?;
    let info = std::fs::read_to_string(format!("/proc/{tid}/fdinfo/{descriptor}")).ok()?;
    let offset = info.lines().find_map(|line| line.strip_prefix("pos:"))?;
    offset.trim().parse().ok().filter(|number| *number > 0)
}

impl ModelDriver {
    /// Makes a driver with a GPU for each size in bytes.
    pub(crate) fn new(gpus: &[u64]) -> Arc<Self> {
        IN_MEMORY.get_or_init(|| ioctl);
        let all = (0..).zip(gpus).map(|(minor, _)| Node::Gpu(minor));
        let all = [Node::Control, Node::Uvm].into_iter().chain(all);
        let nodes: Vec<(Node, OwnedFd)> = all
            .map(|node| (node, memfd_create("node", MemfdFlags::CLOEXEC).expect("a file")))
            .collect();
        let places: Vec<Inode> =
            nodes.iter().map(|(_, file)| place(file.as_fd()).expect("a file")).collect();
        let inodes = places[2..].iter().map(|place| place.1).collect();
        let specs =
            gpus.iter().map(|bytes| GpuSpec { memory_bytes: *bytes, reserved_bytes: 0 }).collect();
        let version = DRIVER.parse().expect("a version");
        let sim = InMemory::new(version, specs, (places[0].0, inodes), find_file);
        let driver = Arc::new(ModelDriver { sim, nodes, opened: Mutex::default() });
        let mut all = lock(&DRIVERS);
        all.retain(|_, (driver, _)| driver.strong_count() > 0);
        for (place, (node, _)) in places.into_iter().zip(&driver.nodes) {
            all.insert(place, (Arc::downgrade(&driver), *node));
        }
        drop(all);
        driver
    }

    /// The nodes as a monitor's settings have them.
    pub(crate) fn nodes(&self) -> Vec<settings::Node> {
        let node = |(node, file): &(Node, OwnedFd)| {
            let (device, inode) = place(file.as_fd()).expect("a file");
            let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
            let kind = match node {
                Node::Control => NodeKind::Control,
                Node::Gpu(minor) => NodeKind::Gpu(*minor as usize),
                Node::Uvm => NodeKind::Uvm,
            };
            settings::Node { kind, path, identity: Identity::File { device, inode } }
        };
        self.nodes.iter().map(node).collect()
    }

    /// Opens a node for a program.
    pub(crate) fn open(&self, node: Node) -> ModelFile {
        let of = self.nodes.iter().find(|(known, _)| *known == node).expect("there is one");
        let path = format!("/proc/self/fd/{}", of.1.as_raw_fd());
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path);
        ModelFile { fd: file.expect("it can be opened again").into() }
    }

    /// The driver's number of a file. Opens the file for the process where no process has called by it yet.
    pub(crate) fn number_for(&self, file: &ModelFile, node: Node, process: u32) -> u64 {
        self.number_of(file.fd.as_fd(), node, process)
    }

    fn number_of(&self, file: BorrowedFd<'_>, node: Node, process: u32) -> u64 {
        let at = lseek(file, 0, Whence::SeekCur).expect("it has an offset");
        if at > 0 {
            return at.cast_unsigned();
        }
        let number = self.sim.open(node, process);
        lseek(file, number.cast_signed(), Whence::SeekSet).expect("it has an offset");
        lock(&self.opened).insert(number);
        number
    }

    /// This process's descriptors of the driver's files. Other processes have some of these files, and no further ones.
    fn descriptors(&self) -> Vec<RawFd> {
        let own: Vec<Inode> =
            self.nodes.iter().filter_map(|(_, file)| place(file.as_fd())).collect();
        let all = std::fs::read_dir("/proc/self/fd").expect("procfs is there").flatten();
        let all = all.filter_map(|entry| entry.file_name().to_str()?.parse::<RawFd>().ok());
        all.filter(|fd| {
            // SAFETY: another thread may close the descriptor meanwhile; `fstat` takes any number.
            let file = unsafe { BorrowedFd::borrow_raw(*fd) };
            place(file).is_some_and(|place| own.contains(&place))
        })
        .collect()
    }

    /// Closes the files in the driver that no process has open any more, as the kernel would.
    pub(crate) fn close_unused(&self) {
        let number = |fd: &RawFd| {
            // SAFETY: it is one of this process's descriptors, which no other thread closes.
            let file = unsafe { BorrowedFd::borrow_raw(*fd) };
            lseek(file, 0, Whence::SeekCur).ok().map(i64::cast_unsigned)
        };
        let used: BTreeSet<u64> = self.descriptors().iter().filter_map(number).collect();
        let unused: Vec<u64> = lock(&self.opened).difference(&used).copied().collect();
        for file in unused {
            lock(&self.opened).remove(&file);
            self.sim.close(file);
        }
    }
}
