//! The worker: answers the driver calls of one container.
//!
//! The keeper starts the worker, and holds what must outlive it: the listeners, and the
//! [`journal`](crate::monitor::journal). The worker can be killed at any instruction: the next worker reads
//! the journal, finishes the calls that the killed one had received
//! ([`calls`](crate::monitor::calls::queue_left_calls)), and goes on.
//!
//! [`decide`](crate::monitor::decide) decides what becomes of a call. The threads:
//!
//! | name | does |
//! |---|---|
//! | (the first) | listens to the keeper until the end, and for the container's first call |
//! | `audit` | asks driver and kernel what the container has ([`audit_thread`]) |
//! | `end`, `control` | for a while: limit the container's end, answer a question |
//!
//! From the container's first call on ([`threads`](crate::monitor::calls::CallService)):
//!
//! | name | does |
//! |---|---|
//! | `calls`, several | one leads and serves a call, others follow ([`leader`](crate::monitor::caller::Leader)) |
//! | `mappings` | looks at what processes have mapped of nvidia-uvm ([`mappings`](crate::monitor::audit::Mappings)) |
//! | `shares`, `shares heard` | set slices, and wait for changes ([`slices`](crate::monitor::compute::Slices)) |
//! | `turns` | takes the container off its GPUs and back, where it has turns |

mod audit_thread;
mod container_end;
mod control_socket;
mod deny_list;
mod privilege;
mod status;
mod status_writer;
mod worker_end;

pub use crate::monitor::caller::check_sizes;
pub use crate::monitor::driver::{Amount, Unanswered, examine, try_slice};
pub use crate::monitor::node::Failure;

use std::fs::File;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

use crate::gate::inherited;
use crate::gate::settings::Settings;
use crate::gate::wire::Notice;
use crate::monitor::caller::Listeners;
use crate::monitor::calls::{CallService, CallThreads, Parts, count_crash, queue_left_calls};
use crate::monitor::driver::FormerClients;
use crate::monitor::journal::{KeptFile, share_heap};
use crate::monitor::keeper_socket::{KeeperMessage, KeeperSocket};
use crate::monitor::resident;
use crate::monitor::state::ContainerState;
use crate::monitor::thread::spawn;
use audit_thread::AuditThread;
use container_end::ContainerEnd;
use status_writer::StatusWriter;
use worker_end::WorkerEnd;

/// How long calls may take to finish when the worker ends.
const DRAIN: Duration = Duration::from_secs(2);

/// How soon it is checked again whether calls have their threads, where the first call hangs or a thread can't be
/// started, in milliseconds.
const THREADS_MS: u16 = 20;

/// A poll ends up to a millisecond early.
const MILLISECOND: Duration = Duration::from_millis(1);

/// Connections that are answered at the same time.
const CONNECTIONS: usize = 8;

/// The worker.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) parts: Arc<Parts>,
    pub(crate) calls: Arc<CallService>,
    pub(crate) listeners: Arc<Listeners>,
    keeper: Arc<KeeperSocket>,
    pub(crate) former_clients: FormerClients,
    connections: Arc<()>,
    end: Arc<WorkerEnd>,
    container_end: Arc<ContainerEnd>,
    status_writer: Arc<StatusWriter>,
}

/// How the former worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Former {
    /// There was none, it was ordered to end, or it was killed from outside.
    Ended,
    /// By a fault of its own.
    Crashed,
}

impl Former {
    /// The worker's argument that says it.
    pub(crate) const AFTER_CRASH: &str = "after-crash";

    /// What the worker's argument says.
    #[must_use]
    pub fn of(argument: Option<&str>) -> Self {
        match argument {
            Some(Former::AFTER_CRASH) => Former::Crashed,
            _ => Former::Ended,
        }
    }

    /// What the status of an ended worker says, to which no order to end was given. SIGKILL comes from outside: from
    /// root, or from the kernel for want of memory.
    #[must_use]
    pub(crate) fn of_status(status: ExitStatus) -> Self {
        let is_killed = status.signal() == Some(Signal::SIGKILL as i32);
        if status.success() || is_killed { Former::Ended } else { Former::Crashed }
    }
}

/// Answers calls until the keeper ends the worker.
///
/// # Errors
///
/// Where the worker can't begin, or can't go on.
pub fn main(former: Former) -> io::Result<()> {
    share_heap();
    let [keeper, settings, journal] = inherited::take_descriptors()?;
    inherited::close_other_descriptors();
    let settings = Settings::read(&File::from(settings)).map_err(io::Error::other)?;
    let (keeper, journal) = (KeeperSocket::new(keeper), File::from(journal));
    crate::log::init_of(&settings.log, &settings.id);
    crate::monitor::caller::check_sizes()?;
    privilege::drop_privileges()?;
    let worker = Worker::new(settings, keeper, &journal)?;
    drop(journal);
    if worker.take_over()? {
        return Ok(());
    }
    let parts = &worker.parts;
    parts.exports.forget_never_exported();
    worker.former_clients.take_over(&parts.driver);
    AuditThread::start(Arc::clone(parts), Arc::clone(&worker.container_end))?;
    if former == Former::Crashed {
        count_crash(parts);
    }
    queue_left_calls(parts);
    parts.state.journal.count_worker();
    worker.status_writer.write_now();
    worker.keeper.tell(Notice::Ready)?;
    resident::give_back_startup_code();
    resident::give_back_heap();
    let ended = worker.listen_until_the_end();
    parts.turns.end_turns();
    ended
}

impl Worker {
    pub(crate) fn new(
        settings: Settings,
        keeper: KeeperSocket,
        journal: &File,
    ) -> io::Result<Self> {
        let keeper = Arc::new(keeper);
        let state = ContainerState::open(settings, journal)?;
        let parts = Arc::new(Parts::new(state, &keeper)?);
        let listeners = Arc::new(Listeners::new()?);
        let end = Arc::new(WorkerEnd::new(Arc::clone(&keeper)));
        let calls = Arc::new(CallService::new(Arc::clone(&parts), Arc::clone(&listeners)));
        let status_writer = Arc::new(StatusWriter::new(Arc::clone(&parts), Arc::clone(&calls)));
        let container_end = Arc::new(ContainerEnd::new(
            Arc::clone(&parts),
            Arc::clone(&listeners),
            Arc::clone(&keeper),
            Arc::clone(&end),
            Arc::clone(&status_writer),
        ));
        Ok(Worker {
            calls,
            parts,
            listeners,
            keeper,
            former_clients: FormerClients::default(),
            connections: Arc::new(()),
            end,
            container_end,
            status_writer,
        })
    }

    /// Takes what the keeper hands over, until the keeper says begin. `true` where the keeper ends the worker
    /// instead.
    fn take_over(&self) -> io::Result<bool> {
        loop {
            match self.keeper.receive()? {
                KeeperMessage::Begin => return Ok(false),
                KeeperMessage::Drain | KeeperMessage::Gone => return Ok(true),
                message => self.handle(message),
            }
        }
    }

    pub(crate) fn handle(&self, message: KeeperMessage) {
        match message {
            KeeperMessage::Listener(listener) => self.listeners.add(listener),
            KeeperMessage::Connection(connection) => {
                let open = Arc::clone(&self.connections);
                if Arc::strong_count(&open) > CONNECTIONS {
                    return;
                }
                let (parts, writer) = (Arc::clone(&self.parts), Arc::clone(&self.status_writer));
                let _ = spawn("control", move || {
                    control_socket::answer_questions(&parts, &writer, connection);
                    drop(open);
                });
            }
            KeeperMessage::Kept(KeptFile::Uvm(number), file) => {
                self.parts.uvm.take_over_file(number, file);
            }
            KeeperMessage::Kept(KeptFile::Client { client, place }, file) => {
                self.former_clients.keep(client, place, file);
            }
            KeeperMessage::Kept(KeptFile::Export(number), file) => {
                self.parts.exports.take_over_export(number, file);
            }
            KeeperMessage::Begin | KeeperMessage::Nothing => {}
            KeeperMessage::Drain => self.drain(),
            KeeperMessage::Gone => self.end.finish(Ok(())),
        }
    }

    /// Receives no more calls, and ends the worker when all calls are answered.
    fn drain(&self) {
        self.calls.drain();
        self.end.finish(Ok(()));
    }

    fn listen_until_the_end(&self) -> io::Result<()> {
        if self.calls.was_called() {
            self.tell_called();
            self.calls.start_missing_threads();
        }
        let result = loop {
            if let Some(result) = self.end.take_result() {
                break result;
            }
            self.listen();
        };
        // Calls that still hang are left to the next worker.
        let patience = Instant::now() + DRAIN;
        while Instant::now() < patience && self.calls.is_draining() {
            std::thread::sleep(Duration::from_millis(1));
        }
        result
    }

    /// Waits for a message of the keeper's, the end of a listener's last process, the container's first call, or a change
    /// of the status, which is written then.
    fn listen(&self) {
        let listeners = self.listeners.all();
        // Poll always tells of a hang-up. Once the call threads are there, they receive the calls.
        let (calls, patience) = match self.calls.call_threads() {
            CallThreads::Unneeded => (PollFlags::POLLIN, PollTimeout::NONE),
            CallThreads::Starting(_) => (PollFlags::empty(), THREADS_MS.into()),
            CallThreads::Started => (PollFlags::empty(), PollTimeout::NONE),
        };
        let status_due = self.status_writer.due_in();
        let patience = match status_due.map(|due| PollTimeout::try_from(due + MILLISECOND)) {
            Some(Ok(due)) if patience.is_none() || due < patience => due,
            _ => patience,
        };
        let mut asked = vec![PollFd::new(self.keeper.as_fd(), PollFlags::POLLIN)];
        asked.extend(listeners.iter().map(|of| PollFd::new(of.descriptor(), calls)));
        if status_due.is_none() {
            asked.push(PollFd::new(self.status_writer.changed(), PollFlags::POLLIN));
        }
        match poll(&mut asked, patience) {
            Ok(_) => {}
            Err(_) => return,
        }
        self.status_writer.write_if_due();
        if matches!(self.calls.call_threads(), CallThreads::Starting(_)) {
            self.calls.start_missing_threads();
        }
        let said = |of: &PollFd<'_>| of.revents().unwrap_or(PollFlags::empty());
        if asked.first().is_some_and(|keeper| !said(keeper).is_empty()) {
            match self.keeper.receive() {
                Ok(message) => self.handle(message),
                Err(error) => self.end.finish(Err(error)),
            }
        }
        let said: Vec<PollFlags> = asked.iter().skip(1).take(listeners.len()).map(said).collect();
        for (listener, said) in listeners.iter().zip(&said) {
            if !said.difference(PollFlags::POLLIN).is_empty() {
                self.end_listener(listener.number());
            }
        }
        if said.contains(&PollFlags::POLLIN) {
            self.calls.start_first_thread();
            self.tell_called();
        }
    }

    /// Tells the keeper that the container has called: otherwise calls would wake the keeper, too.
    fn tell_called(&self) {
        // Where that fails, the keeper is told in a moment that the worker is gone.
        let _ = self.keeper.tell(Notice::Called);
    }

    /// Removes a listener whose last process has ended.
    fn end_listener(&self, number: u64) {
        if let Err(error) = self.container_end.end_listener(number) {
            self.end.finish(Err(error));
        }
    }
}
