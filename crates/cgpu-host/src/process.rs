//! Who a process is: its pid with the time it started, so that a pid used again is
//! never taken for the process that had it before.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;

use procfs::FromRead;
use procfs::process::Stat;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, test_kill_process};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use cgpu_core::ledger::Process;

/// More than a `/proc/PID/stat` has, in bytes: 52 numbers and a name of at most 64.
const STAT_BYTES: usize = 4096;

/// A process of this host, distinguished from later ones of the same pid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessId {
    /// The pid in our namespace.
    pub pid: i32,
    /// Clock ticks from boot to its start (`/proc/PID/stat`, field 22).
    pub start_ticks: u64,
}

/// A process's number has its start time and its pid.
impl From<ProcessId> for Process {
    fn from(process: ProcessId) -> Self {
        Process::of(process.pid.cast_unsigned(), process.start_ticks)
    }
}

/// The process with this number.
impl From<Process> for ProcessId {
    fn from(process: Process) -> Self {
        ProcessId { pid: process.pid().cast_signed(), start_ticks: process.start_ticks() }
    }
}

impl ProcessId {
    /// The process that has `pid` now; `None` where there is none, or only what its
    /// parent has not reaped yet.
    ///
    /// A process whose first thread alone has ended says `Z`, too, and lives on: any
    /// program can do that to itself (`pthread_exit` in `main`), and would be rid of its
    /// quota. What waits to be reaped has no other thread left.
    ///
    /// # Errors
    ///
    /// If that can't be determined: because there is no descriptor left to check with, say, and
    /// then the process may be as alive as any.
    pub fn find(pid: i32) -> io::Result<Option<Self>> {
        let Some(stat) = Self::stat(pid)? else { return Ok(None) };
        if stat.state == 'X' || (stat.state == 'Z' && stat.num_threads <= 1) {
            return Ok(None);
        }
        Ok(Some(ProcessId { pid, start_ticks: stat.starttime }))
    }

    /// What `/proc` reports of the process that has `pid` now.
    pub(crate) fn stat(pid: i32) -> io::Result<Option<Stat>> {
        // One file and no more: a host has thousands of processes, and a container creation checks some.
        let mut text = Vec::with_capacity(STAT_BYTES);
        let read = File::open(format!("/proc/{pid}/stat"))
            .and_then(|file| file.take(STAT_BYTES as u64).read_to_end(&mut text));
        match read {
            // If the process exits while it is read, ESRCH.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) if Errno::from_io_error(&error) == Some(Errno::SRCH) => return Ok(None),
            read => read?,
        };
        Stat::from_read(text.as_slice()).map(Some).map_err(io::Error::other)
    }

    /// The process that is known to have `pid` now; `None` proves nothing: see [`Self::find`].
    #[must_use]
    pub fn of(pid: i32) -> Option<Self> {
        Self::find(pid).ok().flatten()
    }

    /// Whether no process has `pid`, or only one that its parent has not reaped yet.
    #[must_use]
    pub fn is_absent(pid: i32) -> bool {
        matches!(Self::find(pid), Ok(None))
    }

    /// This process; the same after an exec.
    #[must_use]
    pub fn own() -> Option<Self> {
        Self::of(i32::try_from(std::process::id()).ok()?)
    }

    /// Whether this very process is there and isn't stopped, by a signal or by a debugger; one that
    /// can't be checked isn't known to be.
    #[must_use]
    pub fn runs(self) -> bool {
        let is_it = |stat: Stat| stat.starttime == self.start_ticks && !"TtXZ".contains(stat.state);
        self.pid > 0 && Self::stat(self.pid).is_ok_and(|stat| stat.is_some_and(is_it))
    }

    /// Whether any process has the pid; cheap, and wrong only where a pid was used again.
    #[must_use]
    pub fn pid_taken(self) -> bool {
        let pid = Pid::from_raw(self.pid.max(0));
        pid.is_some_and(|pid| test_kill_process(pid) != Err(Errno::SRCH))
    }

    /// Whether this very process is still there; one that can't be checked is.
    #[must_use]
    pub fn alive(self) -> bool {
        self.pid_taken() && Self::find(self.pid).map_or(true, |now| now == Some(self))
    }
}

/// `/proc/PID/status` of a process or of a thread.
#[derive(Debug)]
pub struct ProcStatus(String);

impl ProcStatus {
    /// Reads the file of the process or thread that has `tid` now.
    ///
    /// The kernel cuts a name after 15 bytes, within a character, too. So the text isn't always UTF-8.
    pub fn read(tid: i32) -> io::Result<Self> {
        let bytes = fs::read(format!("/proc/{tid}/status"))?;
        Ok(Self(String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// The value of a field such as `Tgid`, without the spaces around it.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.0.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim()))
    }

    /// The pid in the innermost pid namespace of the process.
    pub fn innermost_pid(&self) -> Option<i32> {
        self.field("NSpid")?.split_whitespace().last()?.parse().ok()
    }
}

/// A pidfd of the process that has `pid` now.
pub fn pidfd(pid: i32) -> rustix::io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).ok_or(Errno::SRCH)?;
    rustix::process::pidfd_open(pid, PidfdFlags::empty())
}

/// Whether the process of that pidfd has threads that run: all that was read of it until now was its own.
pub fn is_running(pidfd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(poll(&mut fds, Some(&now)), Ok(0))
}

/// The threads of a process, as far as they can be listed.
pub fn threads(pid: i32) -> impl Iterator<Item = i32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    tasks.filter_map(|task| task.file_name().to_str()?.parse().ok())
}

/// What a thread of a process reports: its first one, or if that has exited any other.
///
/// `/proc/PID` is of the first thread. If that has exited, it shows no memory, no descriptors
/// and no namespaces, though the process lives on.
pub fn of_any_thread<T>(pid: i32, ask: impl Fn(i32) -> Option<T>) -> Option<T> {
    ask(pid).or_else(|| threads(pid).filter(|tid| *tid != pid).find_map(ask))
}

/// The first process of a container, by the runtime's own state of it, as both runtimes write
/// it: runc in `state.json` (`libcontainer/container_linux.go`, `State`), crun in `status`
/// (`src/libcrun/status.c`). `None` where there is no state, or the process has ended.
///
/// # Errors
///
/// Where the file is there and can't be read, or is no state: then the container may live.
pub fn first_of(state_file: &Path) -> io::Result<Option<ProcessId>> {
    #[derive(Deserialize)]
    struct State {
        #[serde(alias = "init_process_pid")]
        pid: i32,
        #[serde(rename = "process-start-time", alias = "init_process_start")]
        start_ticks: u64,
    }
    let bytes = match fs::read(state_file) {
        Ok(bytes) => bytes,
        Err(error) if is_absence(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    let state: State = serde_json::from_slice(&bytes)?;
    let first = ProcessId { pid: state.pid, start_ticks: state.start_ticks };
    Ok(first.alive().then_some(first))
}

/// Whether an error says that no file is there, or that none can be: below a file, or by a name
/// that is too long or none.
#[must_use]
pub fn is_absence(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidFilename, InvalidInput, NotADirectory, NotFound};
    matches!(error.kind(), NotFound | NotADirectory | InvalidFilename | InvalidInput)
}

/// Seconds since boot, suspended time included.
#[must_use]
pub fn boot_time_s() -> u64 {
    u64::try_from(clock_gettime(ClockId::Boottime).tv_sec).unwrap_or(0)
}

/// Seconds since `process` began; 0 where the kernel doesn't tell.
#[must_use]
pub fn age_s(process: ProcessId) -> u64 {
    let began_s = process.start_ticks / procfs::ticks_per_second().max(1);
    boot_time_s().saturating_sub(began_s)
}

/// The id of this boot; empty if the kernel reports none.
#[must_use]
pub fn boot_id(proc_root: &Path) -> String {
    fs::read_to_string(proc_root.join("sys/kernel/random/boot_id"))
        .map(|text| text.trim().to_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pid_used_again_is_another_process() {
        let own = ProcessId::own().unwrap();
        assert!(own.alive());
        let before = ProcessId { start_ticks: own.start_ticks - 1, ..own };
        assert!(before.pid_taken());
        assert!(!before.alive());
    }

    /// The owner of a process that has exited and isn't waited for can't be determined: its cgroup may be the root's.
    #[test]
    fn exited_unreaped_process_is_not_running() {
        let mut child = std::process::Command::new("/bin/cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let pidfd = pidfd(child.id().cast_signed()).unwrap();
        assert!(is_running(&pidfd));
        drop(child.stdin.take());
        // Until its end shows, and without waiting for it.
        let mut ended = [PollFd::new(&pidfd, PollFlags::IN)];
        poll(&mut ended, None).unwrap();
        assert!(!is_running(&pidfd));
        child.wait().unwrap();
    }

    #[test]
    #[allow(unsafe_code, reason = "a child has a limit of its own")]
    fn uninspectable_process_does_not_count_as_exited() {
        use nix::sys::wait::{WaitStatus, waitpid};
        use nix::unistd::{ForkResult, fork};
        use rustix::process::{Resource, Rlimit, setrlimit};

        let own = ProcessId::own().unwrap();
        let other = ProcessId { start_ticks: own.start_ticks - 1, ..own };
        // SAFETY: the child has one thread, and ends without unwinding or its parent's clean-up.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let none = Rlimit { current: Some(0), maximum: Some(0) };
                let limited = setrlimit(Resource::Nofile, none).is_ok();
                let blind = ProcessId::find(own.pid).is_err() && own.alive() && other.alive();
                let is_unknown = ProcessId::of(own.pid).is_none() && !ProcessId::is_absent(own.pid);
                // SAFETY: ends this process at once.
                unsafe { nix::libc::_exit(i32::from(!(limited && blind && is_unknown))) }
            }
            ForkResult::Parent { child } => {
                assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 0)));
            }
        }
    }

    /// A state file that can't exist names no process, and a file that is no state is an error.
    #[test]
    fn missing_state_names_no_process_and_invalid_errs() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "{").unwrap();
        for nowhere in
            [dir.path().join("none"), file.join("below"), dir.path().join("x".repeat(300))]
        {
            assert_eq!(first_of(&nowhere).unwrap(), None, "{}", nowhere.display());
        }
        assert!(first_of(&file).is_err() && first_of(dir.path()).is_err());
    }

    /// A process's name that is cut within a character hides no field of its status.
    #[test]
    fn process_name_cut_mid_character_hides_no_field() {
        use nix::sys::prctl::{get_name, set_name};
        use nix::unistd::{getpid, gettid};

        let before = get_name().unwrap();
        set_name(c"nine:\nbytes:\xe8\xae").unwrap();
        let status = ProcStatus::read(gettid().as_raw());
        set_name(&before).unwrap();
        let status = status.unwrap();
        assert_eq!(status.field("Name"), Some("nine:\\nbytes:\u{fffd}"));
        assert_eq!(status.field("Tgid"), Some(getpid().to_string().as_str()));
        assert_eq!(status.innermost_pid(), Some(gettid().as_raw()));
        assert_eq!((status.field("Tg"), status.field("no such field")), (None, None));
    }

    #[test]
    fn a_process_that_ended_is_gone() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let id = ProcessId::of(i32::try_from(child.id()).unwrap());
        child.wait().unwrap();
        assert!(!id.is_some_and(ProcessId::alive));
    }
}
