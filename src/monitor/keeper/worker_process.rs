//! The process of a worker, and the descriptors that it finds.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Instant;

use nix::poll::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::DupFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tracing::debug;

use crate::monitor::journal::JOURNAL_BYTES;
use crate::monitor::worker::Former;
use crate::process::{ProcessId, pidfd};

/// How long the status of a worker is waited for that has closed its socket, in milliseconds.
const EXIT_TIMEOUT_MS: u8 = 100;

/// The descriptors 3, 4 and 5 of every worker.
#[derive(Debug)]
pub(crate) struct WorkerDescriptors {
    /// The keeper's end of the worker's socket while a worker runs, the worker's end while it is started.
    pub(crate) socket: OwnedFd,
    _settings: OwnedFd,
    _journal: OwnedFd,
}

impl WorkerDescriptors {
    /// Makes the journal, and puts it and the settings in the places of `descriptors`, which are 3, 4 and 5.
    pub(crate) fn new(settings_file: &File, descriptors: [OwnedFd; 3]) -> io::Result<Self> {
        let journal = memfd_create("cgpu-journal", MemfdFlags::CLOEXEC)?;
        ftruncate(&journal, JOURNAL_BYTES as u64)?;
        let [mut socket, mut settings_copy, mut journal_copy] = descriptors;
        rustix::io::dup2(File::open("/dev/null")?, &mut socket)?;
        rustix::io::dup2(settings_file, &mut settings_copy)?;
        rustix::io::dup2(&journal, &mut journal_copy)?;
        Ok(WorkerDescriptors { socket, _settings: settings_copy, _journal: journal_copy })
    }

    /// Closes the keeper's end of the worker's socket; `/dev/null` keeps the number 3 occupied.
    pub(crate) fn close_socket(&mut self) {
        let closed =
            File::open("/dev/null").and_then(|null| Ok(rustix::io::dup2(null, &mut self.socket)?));
        if let Err(error) = closed {
            // The next worker's socket replaces it.
            debug!(%error, "a worker's socket stays open");
        }
    }
}

/// A worker.
#[derive(Debug)]
pub(crate) struct WorkerProcess {
    pub(crate) child: Child,
    pub(crate) is_ready: bool,
    /// The worker said that the container has called the driver.
    pub(crate) container_called: bool,
    /// Until when the worker may finish; `None` where it was not told to.
    pub(crate) drain_until: Option<Instant>,
    /// Until when the killed worker may take to end; `None` where it was not killed.
    pub(crate) gone_until: Option<Instant>,
}

impl WorkerProcess {
    /// How it has ended; `None` if it hasn't. One that is ending is waited for, but not for long: a thread in the driver
    /// may keep it.
    pub(crate) fn exit_status(&mut self) -> Option<ExitStatus> {
        let status = self.child.try_wait().ok()?;
        if status.is_some() {
            return status;
        }
        let exited = pidfd(self.child.id().cast_signed()).ok()?;
        let mut asked = [PollFd::new(exited.as_fd(), PollFlags::POLLIN)];
        poll(&mut asked, EXIT_TIMEOUT_MS).ok()?;
        self.child.try_wait().ok()?
    }

    /// Starts `program` as a worker, with a new socket in `descriptors`; `former` says how the one before ended.
    pub(crate) fn start(
        program: &Path,
        descriptors: &mut WorkerDescriptors,
        former: Former,
    ) -> io::Result<Self> {
        let (keeper_end, worker_end) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        rustix::io::dup2(worker_end, &mut descriptors.socket)?;
        let child = Command::new(program)
            .arg("work")
            .args((former == Former::Crashed).then_some(Former::AFTER_CRASH))
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        // Closes the worker's end in this process: where no worker has it, the socket is closed.
        rustix::io::dup3(keeper_end, &mut descriptors.socket, DupFlags::CLOEXEC)?;
        Ok(WorkerProcess {
            child: child?,
            is_ready: false,
            container_called: false,
            drain_until: None,
            gone_until: None,
        })
    }

    /// Kills the worker.
    pub(crate) fn kill(&mut self) {
        // Fails where the worker has ended.
        let _ = self.child.kill();
    }

    /// Reaps the worker where it has ended. `false` where it runs still.
    pub(crate) fn try_reap(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Whether the first thread of an unreaped worker has ended. All threads are ending then: the first one returns
    /// from `main`, or is killed with the others. The state in `/proc/PID/stat` tells, behind the name in parentheses
    /// (proc_pid_stat(5)).
    pub(crate) fn is_over(&self) -> bool {
        let stat = ProcessId::stat(self.child.id().cast_signed());
        matches!(stat, Ok(Some(stat)) if ['Z', 'X'].contains(&stat.state))
    }
}
