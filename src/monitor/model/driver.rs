//! The simulated driver, whose files are memory files: the inode says which node one is, and the offset, which
//! all duplicates of a descriptor have in common, which open file of the driver's.
#![allow(unsafe_code, reason = "an ioctl hands a pointer over, and a thread ends at once")]

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cgpu_sim::{GpuSpec, InMemory, Node};
use nix::errno::Errno;
use nix::libc;
use nix::sys::stat::fstat;
use nix::unistd::{Whence, gettid, lseek};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::gate::settings::{self, Identity, NodeKind};
use crate::monitor::driver::device::IN_MEMORY;

/// The driver's version.
pub(crate) const DRIVER: &str = "535.161.08";

/// When a thread that asks the driver dies of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Death {
    /// The driver never hears of the call.
    Before,
    /// The driver has done what it was asked.
    After,
}

/// A driver with one GPU.
#[derive(Debug)]
pub(crate) struct ModelDriver {
    pub(crate) sim: InMemory,
    control: OwnedFd,
    gpu: OwnedFd,
    /// Files that processes have open, by number.
    opened: Mutex<BTreeMap<u32, BTreeSet<u64>>>,
}

/// A memory file's device and inode.
type Inode = (u64, u64);

/// Whose memory file is which node.
static DRIVERS: Mutex<BTreeMap<Inode, (Weak<ModelDriver>, Node)>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// Whether, and how, this thread dies of a call of the driver: so many are left.
    static DEATH: RefCell<Option<(u32, Death, Sender<()>)>> = const { RefCell::new(None) };
}

/// This thread dies of its `nth` call of the driver, counted from 0, and says so.
pub(crate) fn set_death(nth: u32, death: Death, says: Sender<()>) {
    DEATH.with_borrow_mut(|of| *of = Some((nth, death, says)));
}

/// It lives.
pub(crate) fn forget_death() {
    DEATH.with_borrow_mut(Option::take);
}

/// Ends this thread, if it is its time, as a signal that kills the process would: nothing is undone.
fn maybe_die(death: Death) {
    let is_now = DEATH
        .with_borrow(|of| of.as_ref().is_some_and(|(left, when, _)| *left == 0 && *when == death));
    if is_now {
        let says = DEATH.with_borrow_mut(Option::take).map(|(.., says)| says);
        if let Some(says) = says {
            let _ = says.send(());
            std::mem::forget(says);
        }
        // SAFETY: ends the calling thread alone. Its stack is never used again, and what it has locked
        // belongs to a worker that is given up with it.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
    if death == Death::After {
        DEATH.with_borrow_mut(|of| {
            if let Some((left, ..)) = of {
                *left = left.saturating_sub(1);
            }
        });
    }
}

fn place(file: BorrowedFd<'_>) -> Option<Inode> {
    let stat = fstat(file).ok()?;
    Some((stat.st_dev, stat.st_ino))
}

/// An ioctl of the worker's; `None` where the file is no model's.
fn ioctl(file: BorrowedFd<'_>, request: u32, pointer: *mut u8) -> Option<Result<(), Errno>> {
    let known = DRIVERS.lock().unwrap_or_else(PoisonError::into_inner).get(&place(file)?).cloned();
    let (driver, node) = known?;
    let driver = driver.upgrade()?;
    let number = driver.number_of(file, node, std::process::id());
    // SAFETY: the request states how many bytes are behind the pointer, as `Device::call` checks.
    let bytes =
        unsafe { std::slice::from_raw_parts_mut(pointer, (request >> 16 & 0x3fff) as usize) };
    maybe_die(Death::Before);
    let done = driver.sim.ioctl((node, number), gettid().as_raw().cast_unsigned(), request, bytes);
    maybe_die(Death::After);
    Some(done.map_err(Errno::from_raw))
}

impl ModelDriver {
    pub(crate) fn new(total_bytes: u64) -> Arc<Self> {
        IN_MEMORY.get_or_init(|| ioctl);
        let memory = |name| memfd_create(name, MemfdFlags::CLOEXEC).expect("a memory file");
        let (control, gpu) = (memory("nvidiactl"), memory("nvidia0"));
        let [of_control, of_gpu] =
            [&control, &gpu].map(|file| place(file.as_fd()).expect("a file"));
        let gpus = vec![GpuSpec { memory_bytes: total_bytes }];
        let version = DRIVER.parse().expect("a version");
        let sim = InMemory::new(version, gpus, (of_gpu.0, vec![of_gpu.1]));
        let driver = Arc::new(ModelDriver { sim, control, gpu, opened: Mutex::default() });
        let mut all = DRIVERS.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, (driver, _)| driver.strong_count() > 0);
        all.insert(of_control, (Arc::downgrade(&driver), Node::Control));
        all.insert(of_gpu, (Arc::downgrade(&driver), Node::Gpu(0)));
        driver
    }

    /// As a monitor's settings have them.
    pub(crate) fn nodes(&self) -> Vec<settings::Node> {
        let all = [(NodeKind::Control, &self.control), (NodeKind::Gpu(0), &self.gpu)];
        let node = |(kind, file): (NodeKind, &OwnedFd)| {
            let (device, inode) = place(file.as_fd()).expect("a file");
            let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
            settings::Node { kind, path, identity: Identity::File { device, inode } }
        };
        all.map(node).into()
    }

    /// Opens a node for a process.
    pub(crate) fn open(&self, node: Node) -> OwnedFd {
        let of = if node == Node::Control { &self.control } else { &self.gpu };
        let path = format!("/proc/self/fd/{}", of.as_raw_fd());
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path);
        file.expect("it can be opened again").into()
    }

    /// The driver's number of an open file, which a process has opened where it has none yet.
    pub(crate) fn number_of(&self, file: BorrowedFd<'_>, node: Node, process: u32) -> u64 {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        let at = lseek(file, 0, Whence::SeekCur).expect("it has an offset");
        if at > 0 {
            return at.cast_unsigned();
        }
        let number = self.sim.open(node, process);
        lseek(file, number.cast_signed(), Whence::SeekSet).expect("it has an offset");
        opened.entry(process).or_default().insert(number);
        number
    }

    /// A process has ended, or all that it had is closed.
    pub(crate) fn close_all_of(&self, process: u32) {
        let files = self.opened.lock().unwrap_or_else(PoisonError::into_inner).remove(&process);
        files.into_iter().flatten().for_each(|file| self.sim.close(file));
    }
}
