//! The process behind a call: its memory, descriptors, privilege and numbers.
//!
//! A FUSE request names the calling thread. The driver would use `current`; we look the
//! same things up in `/proc`. Where a call's number says nothing of size or direction (all
//! of UVM's), FUSE copies nothing and `fuser` doesn't pass `arg` on: the thread is blocked
//! in its ioctl, so `/proc/TID/syscall` shows its arguments. Must be root to look.

#![allow(unsafe_code, reason = "ioctls and calls that nix lacks")]

use std::fs;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::Pid;

/// `_IOWR(0xee, 0xee, u64)`: asks a file of ours which open file it is. Answered to
/// ourselves alone.
pub(crate) const WHO_IS: u32 = 0xc008_eeee;

// linux/capability.h.
const CAP_SYS_ADMIN: u32 = 21;
const CAP_SYS_NICE: u32 = 23;

/// How long a caller may take to block after it sent its request.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The thread that makes a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caller {
    tid: u32,
}

/// A process as each pid namespace above it numbers it: inode of the namespace, number;
/// the outermost first.
pub(crate) type Numbers = Vec<(u64, u32)>;

impl Caller {
    /// The thread, as our own pid namespace numbers it; 0 is one that it doesn't show.
    pub(crate) fn new(tid: u32) -> Self {
        Caller { tid }
    }

    pub(crate) fn tid(self) -> u32 {
        self.tid
    }

    fn proc(self, name: &str) -> String {
        format!("/proc/{}/{name}", self.tid)
    }

    fn status(self, field: &str) -> Option<String> {
        let status = fs::read_to_string(self.proc("status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix(field))?;
        Some(line.trim_start_matches(':').trim().to_owned())
    }

    /// Its process.
    pub(crate) fn process(self) -> u32 {
        self.status("Tgid").and_then(|text| text.parse().ok()).unwrap_or(self.tid)
    }

    /// Whether it has CAP_SYS_ADMIN: `os_is_administrator` (os-interface.c).
    pub(crate) fn is_administrator(self) -> bool {
        self.has_capability(CAP_SYS_ADMIN)
    }

    /// Whether it has CAP_SYS_NICE or CAP_SYS_ADMIN: RS_ACCESS_NICE, which is asked at each
    /// call (`g_rsAccessMetadata`, rs_access_rights.c; `os_check_access`, os-interface.c).
    pub(crate) fn is_nice(self) -> bool {
        self.has_capability(CAP_SYS_NICE) || self.is_administrator()
    }

    /// Its effective user, by which the driver distinguishes users (`osGetCurrentProcessUserInfo`).
    pub(crate) fn user(self) -> u32 {
        let users = self.status("Uid").unwrap_or_default();
        users.split_whitespace().nth(1).and_then(|user| user.parse().ok()).unwrap_or(0)
    }

    fn has_capability(self, capability: u32) -> bool {
        let effective = self.status("CapEff").and_then(|text| u64::from_str_radix(&text, 16).ok());
        effective.is_some_and(|capabilities| capabilities >> capability & 1 != 0)
    }

    /// Its process's numbers, seen from the outermost namespace that `/proc` shows.
    pub(crate) fn numbers(self) -> Numbers {
        let process = self.process();
        let numbers: Vec<u32> = Caller::new(process)
            .status("NSpid")
            .map(|text| text.split_whitespace().filter_map(|n| n.parse().ok()).collect())
            .unwrap_or_else(|| vec![process]);
        let mut namespaces = Vec::new();
        let mut namespace =
            fs::File::open(format!("/proc/{process}/ns/pid")).ok().map(OwnedFd::from);
        for _ in &numbers {
            let Some(here) = namespace else { break };
            let here = fs::File::from(here);
            namespaces.push(here.metadata().map_or(0, |metadata| metadata.ino()));
            namespace = parent_namespace(&here);
        }
        namespaces.resize(numbers.len(), 0);
        namespaces.reverse();
        namespaces.into_iter().zip(numbers).collect()
    }

    /// The longest path of its cgroups: an engine puts a container in one of the same name in
    /// each hierarchy, unless a controller isn't delegated. The driver knows of none; it's for
    /// the question what a container has.
    pub(crate) fn cgroup(self) -> String {
        let text = fs::read_to_string(self.proc("cgroup")).unwrap_or_default();
        let paths = text.lines().filter_map(|line| line.splitn(3, ':').nth(2));
        paths.max_by_key(|path| path.len()).unwrap_or_default().to_owned()
    }

    /// The inode of its pid namespace.
    pub(crate) fn pid_namespace(self) -> u64 {
        fs::metadata(self.proc("ns/pid")).map_or(0, |metadata| metadata.ino())
    }

    /// Copies from its memory, as `copy_from_user` does: all or nothing.
    pub(crate) fn read(self, address: u64, bytes: &mut [u8]) -> Option<()> {
        let (base, len) = (usize::try_from(address).ok()?, bytes.len());
        if len == 0 {
            return Some(());
        }
        let remote = [RemoteIoVec { base, len }];
        let pid = Pid::from_raw(i32::try_from(self.tid).ok()?);
        let read = process_vm_readv(pid, &mut [IoSliceMut::new(bytes)], &remote).ok()?;
        (read == len).then_some(())
    }

    /// Copies into its memory, as `copy_to_user` does.
    pub(crate) fn write(self, address: u64, bytes: &[u8]) -> Option<()> {
        let (base, len) = (usize::try_from(address).ok()?, bytes.len());
        if len == 0 {
            return Some(());
        }
        let remote = [RemoteIoVec { base, len }];
        let pid = Pid::from_raw(i32::try_from(self.tid).ok()?);
        let written = process_vm_writev(pid, &[IoSlice::new(bytes)], &remote).ok()?;
        (written == len).then_some(())
    }

    /// Whether it has mapped that range: a byte of each page can be read.
    pub(crate) fn has_mapped(self, address: u64, len: u64) -> bool {
        let Some(end) = address.checked_add(len) else { return false };
        let mut page = address & !0xfff;
        while page < end {
            if self.read(page, &mut [0]).is_none() {
                return false;
            }
            page += 0x1000;
        }
        true
    }

    /// The argument of the ioctl that it is blocked in.
    pub(crate) fn ioctl_argument(self, cmd: u32) -> Option<u64> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let text = fs::read_to_string(self.proc("syscall")).ok()?;
            let words: Vec<u64> = text
                .split_whitespace()
                .filter_map(|word| match word.strip_prefix("0x") {
                    Some(hex) => u64::from_str_radix(hex, 16).ok(),
                    None => word.parse().ok(),
                })
                .collect();
            // ioctl is 16 on x86-64 and 54 by the 32-bit entry.
            if let [16 | 54, _, command, argument, ..] = words[..]
                && command & 0xffff_ffff == u64::from(cmd)
            {
                return Some(argument);
            }
            // Not blocked yet: it reads "running".
            if !text.starts_with("running") || Instant::now() > deadline {
                return None;
            }
            std::thread::yield_now();
        }
    }

    /// Whether its process holds that file of ours open: `nv_is_gpu_accessible` (nv.c).
    pub(crate) fn has_open(self, device: u64, inode: u64) -> bool {
        let Ok(entries) = fs::read_dir(self.proc("fd")) else { return false };
        entries.flatten().any(|entry| stat(&entry.path()) == Some((device, inode)))
    }

    /// Which open file of ours a descriptor of its is. Asks ourselves, so no lock may be
    /// held.
    pub(crate) fn open_file(self, device: u64, fd: RawFd) -> Option<u64> {
        let errand = Errand {
            tid: self.tid,
            process: self.process(),
            fd,
            device,
            question: *SECRET.get_or_init(secret),
            pidfd: -1,
            answer: None,
            is_back: false,
        };
        // A scan for the processes that have a container's descriptors kills it now and then.
        (0..TRIES).map(|_| errand.run()).find(|errand| errand.is_back)?.answer
    }
}

/// How often a process that is to check a descriptor is started.
const TRIES: u32 = 100;

/// What only we know: a process that asks with it is one of ours.
static SECRET: OnceLock<u64> = OnceLock::new();

fn secret() -> u64 {
    let mut bytes = [0; 8];
    // SAFETY: writes at most so many bytes there.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    assert_eq!(got, 8, "the kernel has random numbers");
    u64::from_ne_bytes(bytes)
}

/// Whether a [`WHO_IS`] is our own.
pub(crate) fn is_ours(question: &[u8]) -> bool {
    SECRET.get().is_some_and(|secret| question == secret.to_ne_bytes())
}

/// A process that takes one descriptor of another process, and asks which file that is.
///
/// Not we ourselves: the driver checks descriptors in the kernel, and has none. A process that
/// has one and isn't at home in the container may be killed for it by a monitor; in a thread of ours
/// that would end the simulated driver in the middle of a call to itself, for ever. And it has a pid
/// namespace of its own: for a program of the host that has a descriptor a monitor ends the container.
#[derive(Debug, Clone, Copy)]
struct Errand {
    tid: u32,
    process: u32,
    fd: RawFd,
    device: u64,
    question: u64,
    /// Of the other, by its number in our pid namespace.
    pidfd: RawFd,
    answer: Option<u64>,
    is_back: bool,
}

impl Errand {
    /// The errand as it was left.
    fn run(self) -> Self {
        let Some(pidfd) = self.open() else { return Errand { is_back: true, ..self } };
        let mut errand = Errand { pidfd: pidfd.as_raw_fd(), ..self };
        let mut stack = vec![0_u128; 4096];
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_NEWPID;
        // SAFETY: the child has a stack of its own and this memory to itself until it has ended,
        // which this thread waits for; it has its own copies of all descriptors.
        let pid = unsafe {
            let top = stack.as_mut_ptr().add(stack.len()).cast();
            libc::clone(on_errand, top, flags, (&raw mut errand).cast())
        };
        if pid > 0 {
            // SAFETY: takes numbers, and no pointer; `__WCLONE` since it gives no signal.
            while unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::__WCLONE) } == -1
                && Errno::last() == Errno::EINTR
            {}
        }
        errand
    }

    /// A pidfd of the other.
    fn open(&self) -> Option<OwnedFd> {
        const PIDFD_THREAD: i32 = libc::O_EXCL;
        // SAFETY: takes a number and flags; returns a new descriptor or -1.
        let open =
            |number: u32, flags: i32| unsafe { libc::syscall(libc::SYS_pidfd_open, number, flags) };
        // The thread's, since its process's first may have ended; before Linux 6.9 the process's.
        let pidfd = match open(self.tid, PIDFD_THREAD) {
            -1 => open(self.process, 0),
            pidfd => pidfd,
        };
        let pidfd = RawFd::try_from(pidfd).ok().filter(|fd| *fd >= 0)?;
        // SAFETY: the kernel has just made it, for us.
        Some(unsafe { OwnedFd::from_raw_fd(pidfd) })
    }

    /// Makes system calls alone: other threads of ours may have whatever lock there is.
    fn ask(&self) -> Option<u64> {
        // SAFETY: takes numbers; returns a new descriptor or -1.
        let copy = unsafe { libc::syscall(libc::SYS_pidfd_getfd, self.pidfd, self.fd, 0) };
        let copy = RawFd::try_from(copy).ok().filter(|fd| *fd >= 0)?;
        let mut stat = MaybeUninit::<libc::stat>::zeroed();
        // SAFETY: `stat` fits the struct, and all zeroes are a valid one.
        let device = unsafe {
            libc::fstat(copy, stat.as_mut_ptr());
            stat.assume_init().st_dev
        };
        if device != self.device {
            return None;
        }
        let mut words = self.question;
        // SAFETY: the request copies eight bytes in and eight out, of a u64.
        let rc = unsafe { libc::ioctl(copy, u64::from(WHO_IS), &raw mut words) };
        (rc == 0).then_some(words)
    }
}

extern "C" fn on_errand(errand: *mut libc::c_void) -> libc::c_int {
    // SAFETY: the thread that sent it waits, and doesn't touch this meanwhile.
    let errand = unsafe { &mut *errand.cast::<Errand>() };
    // If we were killed while it asks us, no other process would end it.
    // SAFETY: takes numbers, and no pointer.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    errand.answer = errand.ask();
    errand.is_back = true;
    // SAFETY: ends this process, with its descriptors, and nothing of the other's.
    unsafe { libc::_exit(0) }
}

/// Device and inode without asking the filesystem, which may be us.
fn stat(path: &std::path::Path) -> Option<(u64, u64)> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(path.as_os_str().as_bytes()).ok()?;
    let mut answer = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: `path` ends in a zero; `answer` fits the struct.
    let rc = unsafe {
        libc::statx(
            libc::AT_FDCWD,
            path.as_ptr(),
            libc::AT_STATX_DONT_SYNC,
            libc::STATX_INO,
            answer.as_mut_ptr(),
        )
    };
    if rc != 0 {
        return None;
    }
    // SAFETY: all zeroes are a valid statx, and the kernel filled it.
    let answer = unsafe { answer.assume_init() };
    Some((libc::makedev(answer.stx_dev_major, answer.stx_dev_minor), answer.stx_ino))
}

/// The pid namespace around one.
fn parent_namespace(namespace: &fs::File) -> Option<OwnedFd> {
    const NS_GET_PARENT: u64 = 0xb702;
    // SAFETY: takes no argument; returns a new descriptor or -1.
    let parent = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_PARENT) };
    // SAFETY: the kernel just returned it to us, and nothing else has it.
    (parent >= 0).then(|| unsafe { OwnedFd::from_raw_fd(parent) })
}
