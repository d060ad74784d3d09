//! The threads and processes that call: their memory and their descriptors.
//!
//! A tid comes from a notification, and names the calling thread for sure only while the notification is valid. Code
//! that reads through a tid checks that afterwards. A remembered thread has a descriptor that names exactly this thread
//! and reports when it has ended, so a later thread with the same tid isn't taken for it. The descriptor is a pidfd of
//! the thread or, before Linux 6.9, which has pidfds of processes only, the thread's directory in `/proc`.
#![allow(unsafe_code, reason = "calls on pidfds have no safe interface in our crates")]

use std::cmp::Ordering;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use nix::errno::Errno;
use nix::libc;
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::Pid;
use rustix::process::{self, PidfdFlags};

use crate::node::Device;
use crate::sync::Lock;
use cgpu_core::ledger::Process;
use cgpu_host::process::{ProcStatus, ProcessId, pidfd, threads};

/// `PIDFD_THREAD`, since Linux 6.9.
pub(crate) const PIDFD_THREAD: PidfdFlags =
    PidfdFlags::from_bits_retain(libc::O_EXCL.cast_unsigned());

/// How many threads are remembered.
const MOST_THREADS: usize = 256;

/// A thread that called.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) tid: i32,
    /// The thread's tid, and when it started.
    pub(crate) thread: ProcessId,
    /// The pid of the thread's process.
    pub(crate) pid: i32,
    /// The thread's process, by a number that isn't used again.
    pub(crate) process: Process,
    /// Whether the thread is of the runtime or of one of its hooks: it is in the host's mount namespace.
    pub(crate) is_of_runtime: bool,
    /// The thread's pidfd or its directory: see [`is_there`].
    thread_fd: OwnedFd,
    /// The pidfd of the thread's process, if the thread has no pidfd. It duplicates descriptors of the process's first
    /// thread.
    process_pidfd: Option<OwnedFd>,
    /// Whether the state has the process: it stays there as long as it lives.
    pub(crate) is_noted: AtomicBool,
}

/// The threads that called lately.
#[derive(Debug)]
pub(crate) struct Targets {
    known: Lock<HashMap<i32, Arc<Target>>>,
    /// The host's mount namespace, if calls from there don't count as the container's.
    ignored: Option<MountNamespace>,
}

/// A mount namespace, by the device and inode of its file.
type MountNamespace = (u64, u64);

fn mount_namespace(process: &str) -> io::Result<MountNamespace> {
    let meta = fs::metadata(format!("/proc/{process}/ns/mnt"))?;
    Ok((meta.dev(), meta.ino()))
}

/// Whether two threads are known to share one table of descriptors.
fn share_files(one: u32, other: u32) -> bool {
    /// `KCMP_FILES` of `linux/kcmp.h`.
    const FILES: u32 = 2;
    // SAFETY: takes numbers only.
    let compared = unsafe { libc::syscall(libc::SYS_kcmp, one, other, FILES, 0, 0) };
    compared == 0
}

/// Threads of a process that between them have all its descriptors: one for each table, mostly one in all.
pub(crate) fn threads_by_fd_table(pid: u32) -> Vec<u32> {
    let mut found: Vec<u32> = Vec::new();
    for tid in threads(pid.cast_signed()).map(i32::cast_unsigned) {
        if !found.iter().any(|other| share_files(*other, tid)) {
            found.push(tid);
        }
    }
    found
}

impl Targets {
    /// No thread is known yet. `spares_host` is
    /// [`Settings::spares_host`](crate::gate::settings::Settings::spares_host).
    pub(crate) fn new(spares_host: bool) -> io::Result<Self> {
        let ignored = spares_host.then(|| mount_namespace("self")).transpose()?;
        Ok(Targets { known: Lock::default(), ignored })
    }

    /// The thread that has `tid` now.
    ///
    /// # Errors
    ///
    /// `ESRCH` if no thread has it, or why that can't be known.
    pub(crate) fn get(&self, tid: i32) -> Result<Arc<Target>, Errno> {
        let known = self.known(tid);
        match known.filter(|target| is_there(target.thread_fd.as_fd())) {
            Some(target) => Ok(target),
            None => self.open_and_remember(tid),
        }
    }

    /// The thread that has `tid`, or had it a moment ago. Memory that is read through it is that of the thread that
    /// has the tid now; [`Targets::duplicate`] and [`Targets::get`] say which thread that is.
    pub(crate) fn probable(&self, tid: i32) -> Result<Arc<Target>, Errno> {
        let known = self.known(tid);
        known.map_or_else(|| self.open_and_remember(tid), Ok)
    }

    fn known(&self, tid: i32) -> Option<Arc<Target>> {
        #[cfg(test)]
        crate::call_counters::count(|counted| counted.callers += 1);
        self.known.lock().get(&tid).cloned()
    }

    fn open_and_remember(&self, tid: i32) -> Result<Arc<Target>, Errno> {
        let opened = match Target::open(tid, self.ignored) {
            Err(Errno::EMFILE | Errno::ENFILE) => {
                // Remembered threads only save time, and each holds a descriptor.
                self.known.lock().clear();
                Target::open(tid, self.ignored)
            }
            opened => opened,
        };
        let target = Arc::new(opened?);
        // A thread of the runtime may become the container's in a moment, so it isn't remembered.
        if !target.is_of_runtime {
            let mut known = self.known.lock();
            if known.len() >= MOST_THREADS {
                known.clear();
            }
            known.insert(tid, Arc::clone(&target));
        }
        Ok(target)
    }

    /// A duplicate of `descriptor` of the thread that has `tid`, and that thread. `probable` is what
    /// [`Targets::probable`] has found for this call, if it was asked.
    pub(crate) fn duplicate(
        &self,
        tid: i32,
        descriptor: i32,
        probable: Option<Arc<Target>>,
    ) -> Result<(Arc<Target>, OwnedFd), Errno> {
        if let Some(target) = probable.or_else(|| self.known(tid)) {
            match target.duplicate(descriptor) {
                Err(Errno::ESRCH) => {}
                Err(Errno::EMFILE | Errno::ENFILE) => self.known.lock().clear(),
                duplicate => return Ok((target, duplicate?)),
            }
        }
        let target = self.open_and_remember(tid)?;
        let duplicate = target.duplicate(descriptor)?;
        Ok((target, duplicate))
    }
}

/// Whether the thread is still there whose pidfd or directory `thread_fd` is.
///
/// The first pidfds were directories of `/proc`, and [`pidfd_send_signal(2)`] still takes such directories
/// (`kernel/signal.c`, `tgid_pidfd_to_pid`), those of any thread: each thread has one, though `/proc` doesn't list
/// it. A thread that may not be sent a signal is there, too.
///
/// [`pidfd_send_signal(2)`]: https://man7.org/linux/man-pages/man2/pidfd_send_signal.2.html
fn is_there(thread_fd: BorrowedFd<'_>) -> bool {
    let nothing = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: takes numbers only; signal 0 reaches no process.
    let asked =
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, thread_fd.as_raw_fd(), 0, nothing, 0) };
    matches!(Errno::result(asked), Ok(_) | Err(Errno::EPERM))
}

impl Target {
    fn open(tid: i32, ignored: Option<MountNamespace>) -> Result<Self, Errno> {
        let errno = |error: io::Error| match Errno::from_raw(error.raw_os_error().unwrap_or(0)) {
            Errno::ENOENT | Errno::UnknownErrno => Errno::ESRCH,
            errno => errno,
        };
        let find = |pid| ProcessId::find(pid).map_err(errno)?.ok_or(Errno::ESRCH);
        let directory = OwnedFd::from(File::open(format!("/proc/{tid}")).map_err(errno)?);
        let status = ProcStatus::read(tid).map_err(errno)?;
        let pid = status.field("Tgid").and_then(|pid| pid.parse().ok()).ok_or(Errno::ESRCH)?;
        let thread = find(tid)?;
        let process = Process::from(if tid == pid { thread } else { find(pid)? });
        let is_of_runtime = ignored.is_some() && ignored == mount_namespace(&tid.to_string()).ok();
        let thread_fd = process::Pid::from_raw(tid).ok_or(Errno::ESRCH)?;
        let thread_fd = process::pidfd_open(thread_fd, PIDFD_THREAD);
        // The thread still has the tid, so everything above was found of this one thread.
        if !is_there(directory.as_fd()) {
            return Err(Errno::ESRCH);
        }
        let (thread_fd, process_pidfd) = match thread_fd {
            Err(rustix::io::Errno::INVAL) => (directory, Some(pidfd(pid).map_err(from_rustix)?)),
            thread => (thread.map_err(from_rustix)?, None),
        };
        let is_noted = AtomicBool::new(false);
        Ok(Target { tid, thread, pid, process, is_of_runtime, thread_fd, process_pidfd, is_noted })
    }

    /// A duplicate of one of the thread's descriptors. `ESRCH` if the thread has ended.
    pub(crate) fn duplicate(&self, descriptor: i32) -> Result<OwnedFd, Errno> {
        if self.process_pidfd.is_some() && !is_there(self.thread_fd.as_fd()) {
            return Err(Errno::ESRCH);
        }
        if descriptor < 0 {
            return Err(Errno::EBADF);
        }
        let pidfd = self.process_pidfd.as_ref().unwrap_or(&self.thread_fd);
        let flags = process::PidfdGetfdFlags::empty();
        process::pidfd_getfd(pidfd, descriptor, flags).map_err(from_rustix)
    }

    /// Fills `bytes` from `address` of the thread's memory: all of them, or it fails.
    pub(crate) fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), Errno> {
        if bytes.is_empty() {
            return Ok(());
        }
        let len = bytes.len();
        let remote = [RemoteIoVec { base: at(address)?, len }];
        let pid = Pid::from_raw(self.tid);
        match process_vm_readv(pid, &mut [IoSliceMut::new(bytes)], &remote) {
            Ok(read) if read == len => Ok(()),
            Ok(_) | Err(_) => Err(Errno::EFAULT),
        }
    }

    /// Writes bytes to addresses of the thread's memory, in order.
    pub(crate) fn write<const N: usize>(
        &self,
        writes: &[Option<(u64, &[u8])>; N],
    ) -> Result<(), Errno> {
        let mut local = [IoSlice::new(&[]); N];
        let mut remote = [RemoteIoVec { base: 0, len: 0 }; N];
        let mut wanted = 0;
        let mut count = 0;
        let places = local.iter_mut().zip(&mut remote);
        for ((local, remote), (address, bytes)) in places.zip(writes.iter().flatten()) {
            *local = IoSlice::new(bytes);
            *remote = RemoteIoVec { base: at(*address)?, len: bytes.len() };
            wanted += bytes.len();
            count += 1;
        }
        if wanted == 0 {
            return Ok(());
        }
        let pid = Pid::from_raw(self.tid);
        let (local, remote) = (local.get(..count), remote.get(..count));
        match process_vm_writev(pid, local.unwrap_or_default(), remote.unwrap_or_default()) {
            Ok(written) if written == wanted => Ok(()),
            Ok(_) | Err(_) => Err(Errno::EFAULT),
        }
    }
}

fn from_rustix(errno: rustix::io::Errno) -> Errno {
    Errno::from_raw(errno.raw_os_error())
}

fn at(address: u64) -> Result<usize, Errno> {
    usize::try_from(address).map_err(|_| Errno::EFAULT)
}

/// How two open files compare in the kernel's order. Each is named by a thread and its descriptor.
pub(crate) fn compare_files(one: (u32, i32), other: (u32, i32)) -> Result<Ordering, Errno> {
    /// `KCMP_FILE` of `linux/kcmp.h`.
    const FILE: u32 = 0;
    // SAFETY: takes numbers only.
    let compared = unsafe { libc::syscall(libc::SYS_kcmp, one.0, other.0, FILE, one.1, other.1) };
    match Errno::result(compared)? {
        0 => Ok(Ordering::Equal),
        1 => Ok(Ordering::Less),
        2 => Ok(Ordering::Greater),
        _ => Err(Errno::EINVAL),
    }
}

/// Whether the thread and descriptor of `place` name `file`. `None` if that can't be determined.
pub(crate) fn has_file(place: (u32, i32), file: &Device) -> Option<bool> {
    match compare_files((std::process::id(), file.descriptor()), place) {
        Ok(order) => Some(order.is_eq()),
        // The thread has ended, or its descriptor is closed.
        Err(Errno::ESRCH | Errno::EBADF) => Some(false),
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::prctl::set_name;
    use nix::unistd::{getpid, gettid};

    use super::*;

    /// A thread whose name is cut within a character is served.
    #[test]
    fn thread_name_cut_within_a_character_is_accepted() {
        let of_thread = || {
            set_name(c"nine bytes \xe8\xae").unwrap();
            let tid = gettid().as_raw();
            (tid, Targets::new(false).unwrap().get(tid))
        };
        let (tid, target) = std::thread::spawn(of_thread).join().unwrap();
        let target = target.unwrap();
        assert_eq!((target.tid, target.pid), (tid, getpid().as_raw()));
    }
}
