//! The threads and processes that call: their memory, copies of it, and their descriptors.
//!
//! A tid comes from a notification, and names the calling thread for sure only while the notification is valid, which
//! whoever reads through a tid asks afterwards. A remembered thread has a descriptor that names exactly this thread
//! and tells when it has ended, so a later thread with the same tid isn't taken for it. The descriptor is a pidfd of
//! the thread or, before Linux 6.9, which has pidfds of processes only, the thread's directory in `/proc`.
//!
//! A call's struct and what it points at are copied to buffers that each thread of the monitor keeps for its next call
//! ([`Scratch`]). The whole page of the struct is copied: most programs have both the struct and its parameters on their
//! stack, and a second copy from another process costs a microsecond. This file doesn't know what a call does.
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

use crate::ledger::Process;
use crate::monitor::node::{Buffer, Device};
use crate::monitor::sync::Lock;
use crate::process::{ProcStatus, ProcessId, pidfd, threads};
use crate::rm::{Layout, Meaning, control};

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
    /// The pidfd of the thread's process, where the thread has no pidfd. It duplicates descriptors of the process's
    /// first thread.
    process_pidfd: Option<OwnedFd>,
    /// Whether the books have the process: it stays there as long as it lives.
    pub(crate) is_noted: AtomicBool,
}

/// The threads that called lately.
#[derive(Debug)]
pub(crate) struct Targets {
    known: Lock<HashMap<i32, Arc<Target>>>,
    /// The host's mount namespace, where calls from there don't count as the container's.
    spared: Option<MountNamespace>,
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
        let spared = spares_host.then(|| mount_namespace("self")).transpose()?;
        Ok(Targets { known: Lock::default(), spared })
    }

    /// The thread that has `tid` now.
    ///
    /// # Errors
    ///
    /// `ESRCH` where no thread has it, or why that can't be known.
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
        crate::monitor::counted::count(|counted| counted.callers += 1);
        self.known.lock().get(&tid).cloned()
    }

    fn open_and_remember(&self, tid: i32) -> Result<Arc<Target>, Errno> {
        let opened = match Target::open(tid, self.spared) {
            Err(Errno::EMFILE | Errno::ENFILE) => {
                // Remembered threads only save time, and each holds a descriptor.
                self.known.lock().clear();
                Target::open(tid, self.spared)
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

    /// A duplicate of `descriptor` of the thread that has `tid`, and that thread. `probable` is what [`Targets::probable`]
    /// has found for this call, if it was asked.
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
    // SAFETY: takes numbers only; signal 0 is sent to nobody.
    let asked =
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, thread_fd.as_raw_fd(), 0, nothing, 0) };
    matches!(Errno::result(asked), Ok(_) | Err(Errno::EPERM))
}

impl Target {
    fn open(tid: i32, spared: Option<MountNamespace>) -> Result<Self, Errno> {
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
        let is_of_runtime = spared.is_some() && spared == mount_namespace(&tid.to_string()).ok();
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

    /// A duplicate of one of the thread's descriptors. `ESRCH` where the thread has ended.
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

/// Whether the thread and descriptor of `place` name `file`. `None` where that can't be told.
pub(crate) fn has_file(place: (u32, i32), file: &Device) -> Option<bool> {
    match compare_files((std::process::id(), file.descriptor()), place) {
        Ok(order) => Some(order.is_eq()),
        // The thread has ended, or its descriptor is closed.
        Err(Errno::ESRCH | Errno::EBADF) => Some(false),
        Err(_) => None,
    }
}

/// Bytes that are copied at once: no machine has smaller pages.
const PAGE_BYTES: usize = 4096;

/// The largest buffer, in bytes, that a thread keeps for its next call.
const KEPT_BYTES: usize = 16 << 10;

/// One of the copies of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Copy {
    Struct,
    Params,
    /// A piece of what the parameters point at: its offset in the list, and its bytes.
    Piece(usize, usize),
}

/// The copies of a call, in buffers that a thread keeps for the next one.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// The call's struct.
    pub(crate) bytes: Buffer,
    /// The parameters: what the struct points at.
    pub(crate) params: Buffer,
    /// What the parameters point at, one piece after another.
    pub(crate) list: Buffer,
    /// The struct and its parameters as they were read; empty where they aren't remembered.
    pub(crate) input: Vec<u8>,
    page: Page,
}

/// A page of the caller's memory, as it was when the struct was read.
#[derive(Debug)]
struct Page {
    /// The page's address; `None` where no page is copied.
    begin: Option<u64>,
    bytes: Box<[u8; PAGE_BYTES]>,
}

impl Default for Page {
    fn default() -> Self {
        Page { begin: None, bytes: Box::new([0; PAGE_BYTES]) }
    }
}

impl Page {
    /// Copies the page of `address`, where it has all `size` bytes from there on.
    fn load(&mut self, target: &Target, address: u64, size: usize) {
        let begin = address & !(PAGE_BYTES as u64 - 1);
        let fits = size != 0 && size as u64 <= PAGE_BYTES as u64 - (address - begin);
        let loaded = fits && target.read(begin, &mut self.bytes[..]).is_ok();
        self.begin = loaded.then_some(begin);
    }

    fn get(&self, address: u64, size: usize) -> Option<&[u8]> {
        let from = usize::try_from(address.checked_sub(self.begin?)?).ok()?;
        self.bytes.get(from..from.checked_add(size)?)
    }

    /// Fills `bytes` from the caller's memory at `address`: all of them, or it fails.
    fn read(&self, target: &Target, address: u64, bytes: &mut [u8]) -> Result<(), Errno> {
        match self.get(address, bytes.len()) {
            Some(copy) => bytes.copy_from_slice(copy),
            None => target.read(address, bytes)?,
        }
        Ok(())
    }
}

impl Scratch {
    /// Forgets what was read for the last call.
    pub(crate) fn begin(&mut self) {
        self.input.clear();
        self.page.begin = None;
    }

    /// Frees buffers that a large call has made larger than [`KEPT_BYTES`].
    pub(crate) fn shrink(&mut self) {
        for copy in [&mut self.bytes, &mut self.params, &mut self.list] {
            if copy.capacity() > KEPT_BYTES {
                *copy = Buffer::default();
            }
        }
        if self.input.capacity() > KEPT_BYTES {
            self.input = Vec::new();
        }
    }

    /// Copies the call's struct.
    pub(crate) fn read_struct(
        &mut self,
        target: &Target,
        address: u64,
        size: usize,
    ) -> Result<(), Errno> {
        self.params.clear();
        self.bytes.reset(size);
        if self.page.get(address, size).is_none() {
            self.page.load(target, address, size);
        }
        self.page.read(target, address, &mut self.bytes)
    }

    /// Copies the parameters.
    pub(crate) fn read_params(
        &mut self,
        target: &Target,
        address: u64,
        size: usize,
    ) -> Result<(), Errno> {
        self.params.reset(size);
        self.page.read(target, address, &mut self.params)
    }

    /// Copies a piece of what the parameters point at to its place in the list, which has room for it.
    pub(crate) fn read_piece(
        &mut self,
        target: &Target,
        address: u64,
        (at, bytes): (usize, usize),
    ) -> Result<(), Errno> {
        let copy = self.list.get_mut(at..at + bytes).unwrap_or_default();
        self.page.read(target, address, copy)
    }

    /// Remembers the struct and the parameters as they were read. They are unchanged since then.
    pub(crate) fn remember(&mut self) {
        self.input.clear();
        self.input.extend_from_slice(&self.bytes);
        self.input.extend_from_slice(&self.params);
    }

    /// Changes a field of the struct, or of a part of it.
    pub(crate) fn patch(&mut self, part: &Layout, meaning: Meaning, value: u64) {
        if let Some(patch) = part.patch(meaning, value) {
            let _ = patch.apply(&mut self.bytes);
        }
    }

    /// A field of the struct, or of a part of it.
    pub(crate) fn field(&self, part: &'static Layout, meaning: Meaning) -> Option<u64> {
        part.view(&self.bytes)?.u64(meaning)
    }

    /// The struct as it was read; empty where it isn't remembered.
    pub(crate) fn bytes_read(&self) -> &[u8] {
        self.input.get(..self.bytes.len()).unwrap_or_default()
    }

    /// The parameters as they were read; empty where they aren't remembered.
    pub(crate) fn params_read(&self) -> &[u8] {
        self.input.get(self.bytes.len()..).unwrap_or_default()
    }

    pub(crate) fn copy(&self, copy: Copy) -> &[u8] {
        match copy {
            Copy::Struct => &self.bytes,
            Copy::Params => &self.params,
            Copy::Piece(at, bytes) => self.list.get(at..at + bytes).unwrap_or_default(),
        }
    }

    /// Whether the caller's memory has the same bytes already, so that nothing needs to be written.
    fn is_as_read(&self, copy: Copy) -> bool {
        let read = match copy {
            Copy::Struct => self.input.get(..self.bytes.len()),
            Copy::Params => self.input.get(self.bytes.len()..),
            Copy::Piece(..) => None,
        };
        read == Some(self.copy(copy))
    }
}

/// The most copies that go back: the struct, its parameters, and the pieces that the parameters point at.
const MOST_COPIES: usize = 2 + control::MAX_PIECES;

/// The copies that go back, each with its address, in the order in which they are written. The struct has the first
/// place.
#[derive(Debug, Default)]
pub(crate) struct WriteBack([Option<(u64, Copy)>; MOST_COPIES]);

impl WriteBack {
    pub(crate) fn set(&mut self, place: usize, address: u64, copy: Copy) {
        if let Some(write) = self.0.get_mut(place) {
            *write = Some((address, copy));
        }
    }

    /// Drops all copies but the struct.
    pub(crate) fn keep_struct_alone(&mut self) {
        self.0.iter_mut().skip(1).for_each(|write| *write = None);
    }

    /// Drops copies whose bytes the caller's memory has already.
    pub(crate) fn drop_unchanged(&mut self, scratch: &Scratch) {
        for write in &mut self.0 {
            write.take_if(|(_, copy)| scratch.is_as_read(*copy));
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    pub(crate) fn has(&self, copy: Copy) -> bool {
        self.0.iter().flatten().any(|(_, written)| *written == copy)
    }

    /// Writes all copies to the caller's memory. Fails where the memory can't be written.
    pub(crate) fn write(&self, target: &Target, scratch: &Scratch) -> Result<(), Errno> {
        let copies = |(address, copy)| (address, scratch.copy(copy));
        target.write(&self.0.map(|write| write.map(copies)))
    }

    /// The address and the bytes of each copy.
    pub(crate) fn output(&self, scratch: &Scratch) -> Vec<(u64, Vec<u8>)> {
        let bytes = |(address, copy): &(u64, Copy)| (*address, scratch.copy(*copy).to_vec());
        self.0.iter().flatten().map(bytes).collect()
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::prctl::set_name;
    use nix::unistd::{getpid, gettid};

    use super::*;
    use crate::monitor::caller::target::Targets;

    #[test]
    fn a_thread_whose_name_is_cut_within_a_character_is_served() {
        let of_thread = || {
            set_name(c"nine bytes \xe8\xae").unwrap();
            let tid = gettid().as_raw();
            (tid, Targets::new(false).unwrap().get(tid))
        };
        let (tid, target) = std::thread::spawn(of_thread).join().unwrap();
        let target = target.unwrap();
        assert_eq!((target.tid, target.pid), (tid, getpid().as_raw()));
    }

    #[test]
    fn what_lies_in_one_page_is_copied_at_once() {
        let memory = vec![7_u8; 3 * PAGE_BYTES];
        let first = memory.as_ptr().addr().next_multiple_of(PAGE_BYTES) as u64;
        let target = Targets::new(false).unwrap().get(std::process::id().cast_signed()).unwrap();
        let mut scratch = Scratch::default();
        scratch.begin();
        scratch.read_struct(&target, first + 64, 32).unwrap();
        assert_eq!(scratch.bytes[..], [7; 32]);
        assert!(scratch.page.get(first, PAGE_BYTES).is_some());
        assert!(scratch.page.get(first, PAGE_BYTES + 1).is_none());
        assert!(scratch.page.get(first - 1, 1).is_none());
        assert!(scratch.page.get(u64::MAX, 1).is_none());
        for (address, size) in [(first, 100), (first + 4000, 200), (first + 4096, 8)] {
            scratch.read_params(&target, address, size).unwrap();
            assert_eq!(scratch.params[..], vec![7; size]);
        }
        // A struct across two pages, and a call without a struct.
        scratch.begin();
        scratch.read_struct(&target, first + 4090, 16).unwrap();
        assert_eq!(scratch.bytes[..], [7; 16]);
        assert_eq!(scratch.page.begin, None);
        scratch.read_struct(&target, 0, 0).unwrap();
        scratch.read_struct(&target, 8, 8).unwrap_err();
        scratch.read_struct(&target, u64::MAX, 8).unwrap_err();
    }

    #[test]
    fn only_what_changed_is_different_from_what_was_read() {
        let (bytes, params) = (Buffer::of(&[1; 4]), Buffer::of(&[2; 4]));
        let mut scratch = Scratch { bytes, params, ..Scratch::default() };
        scratch.begin();
        assert!(!scratch.is_as_read(Copy::Struct) && !scratch.is_as_read(Copy::Params));
        scratch.remember();
        assert!(scratch.is_as_read(Copy::Struct) && scratch.is_as_read(Copy::Params));
        scratch.bytes = Buffer::of(&[1, 1, 1, 0]);
        assert!(!scratch.is_as_read(Copy::Struct) && scratch.is_as_read(Copy::Params));
        assert!(!scratch.is_as_read(Copy::Piece(0, 0)));
    }
}
