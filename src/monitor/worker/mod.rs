//! The worker: answers the driver calls of one container.
//!
//! Started by the keeper, which holds what must outlive it: the listeners, and the
//! [`journal`](crate::monitor::journal::layout). It can be killed at any instruction: the next worker
//! reads the journal, finishes the calls that this one had received, and goes on.
//!
//! What a call means is decided in [`policy`](crate::monitor::calls::policy). The threads:
//!
//! | name | does |
//! |---|---|
//! | (the first) | listens to the keeper until the end, and for the container's first call |
//! | `audit` | asks driver and kernel ([`rounds`](crate::monitor::worker::rounds)) |
//! | `end`, `control` | for a while: the container's end, a question |
//!
//! From the container's first call on ([`threads`](crate::monitor::calls::threads)):
//!
//! | name | does |
//! |---|---|
//! | `calls`, several | one leads and deals with a call, the others follow ([`leader`](crate::monitor::caller::leader)) |
//! | `mappings` | looks at what is mapped of UVM's ([`mappings`](crate::monitor::audit::mappings)) |
//! | `shares`, `shares heard` | set slices, and hear of changes ([`slices`](crate::monitor::compute::slices)) |
//! | `turns` | takes the container off its GPUs and back, where it has turns |

pub(crate) mod control_socket;
pub(crate) mod privilege;
pub(crate) mod rounds;
pub(crate) mod see_out;

pub use crate::monitor::caller::listener::check_sizes;
pub use crate::monitor::driver::monitor_client::{examine, try_slice};
pub use crate::monitor::driver::unanswered::{Amount, Unanswered};
pub use crate::monitor::node::device::Failure;

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::gate::inherited;
use crate::gate::settings::Settings;
use crate::gate::wire::Notice;
use crate::monitor::caller::listeners::Listeners;
use crate::monitor::calls::call_threads::CallThreads;
use crate::monitor::calls::parts::Parts;
use crate::monitor::calls::threads::CallService;
use crate::monitor::journal::kept_file::KeptFile;
use crate::monitor::journal::map::share_heap;
use crate::monitor::keeper_socket::{KeeperMessage, KeeperSocket};
use crate::monitor::lock::Lock;
use crate::monitor::resident;
use crate::monitor::state::container_state::ContainerState;
use crate::monitor::thread::spawn;

/// How long calls may take to finish once it's over.
const DRAIN: Duration = Duration::from_secs(2);

/// How soon it is looked whether calls have their threads, where the first call hangs or one can't be
/// started, in milliseconds.
const THREADS_MS: u16 = 20;

/// Connections that are answered at once.
const CONNECTIONS: usize = 8;

/// The worker.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) parts: Arc<Parts>,
    pub(crate) calls: Arc<CallService>,
    pub(crate) listeners: Arc<Listeners>,
    keeper: Arc<KeeperSocket>,
    connections: Arc<()>,
    /// Why it ends, once it does.
    why: Lock<Option<io::Result<()>>>,
    /// Listeners of a container that is gone, of which the keeper isn't told yet.
    ending: Lock<Vec<u64>>,
    /// Since when nothing is found that such a container has.
    quiet: Lock<Option<Instant>>,
}

/// Answers calls until the keeper says that it is enough.
///
/// # Errors
///
/// Where it can't begin, or can't go on.
pub fn main() -> io::Result<()> {
    share_heap();
    let [keeper, settings, journal] = inherited::take_descriptors()?;
    inherited::close_other_descriptors();
    let settings = Settings::read(&File::from(settings)).map_err(io::Error::other)?;
    let (keeper, journal) = (KeeperSocket::new(keeper), File::from(journal));
    crate::log::init_of(&settings.log, &settings.id);
    crate::monitor::caller::listener::check_sizes()?;
    privilege::drop_all()?;
    let worker = Arc::new(Worker::new(settings, keeper, &journal)?);
    drop(journal);
    if worker.take_over()? {
        return Ok(());
    }
    let parts = &worker.parts;
    parts.exports.forget_what_was_never_exported();
    parts.uvm.take_over_initialization();
    parts.stakes.take_over();
    let auditing = Arc::clone(&worker);
    spawn("audit", move || {
        if let Err(error) = auditing.audit_forever() {
            auditing.finish(Err(error.into()));
        }
    })?;
    worker.calls.queue_what_is_left();
    parts.state.journal.count_worker();
    control_socket::note_status(parts, &worker.calls);
    worker.keeper.tell(Notice::Ready)?;
    resident::give_back_the_start();
    resident::give_back_the_heap();
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
        Ok(Worker {
            calls: Arc::new(CallService::new(Arc::clone(&parts), Arc::clone(&listeners))),
            parts,
            listeners,
            keeper,
            connections: Arc::new(()),
            why: Lock::new(None),
            ending: Lock::default(),
            quiet: Lock::default(),
        })
    }

    /// Ends the worker, whose first thread sees to that; the first reason is the one.
    pub(crate) fn finish(&self, why: io::Result<()>) {
        self.why.lock().get_or_insert(why);
        self.keeper.shut_down_reading();
    }

    /// Takes what the keeper hands over, until it says begin. Whether it said to end.
    fn take_over(&self) -> io::Result<bool> {
        loop {
            match self.keeper.receive()? {
                KeeperMessage::Begin => return Ok(false),
                KeeperMessage::Drain | KeeperMessage::Gone => return Ok(true),
                message => self.take(message),
            }
        }
    }

    pub(crate) fn take(&self, message: KeeperMessage) {
        match message {
            KeeperMessage::Listener(listener) => self.listeners.add(listener),
            KeeperMessage::Connection(connection) => {
                let open = Arc::clone(&self.connections);
                if Arc::strong_count(&open) > CONNECTIONS {
                    return;
                }
                let (parts, calls) = (Arc::clone(&self.parts), Arc::clone(&self.calls));
                let _ = spawn("control", move || {
                    control_socket::converse(&parts, &calls, connection);
                    drop(open);
                });
            }
            KeeperMessage::Kept(KeptFile::Uvm(number), file) => {
                self.parts.uvm.take_over_file(number, file);
            }
            KeeperMessage::Kept(KeptFile::Client { client, place }, file) => {
                self.parts.stakes.take_over_client_file(client, place, file);
            }
            KeeperMessage::Kept(KeptFile::Export(number), file) => {
                self.parts.exports.take_over_export(number, file);
            }
            KeeperMessage::Begin | KeeperMessage::Nothing => {}
            KeeperMessage::Drain => self.drain(),
            KeeperMessage::Gone => self.finish(Ok(())),
        }
    }

    /// Nothing more is received; ends when all calls are answered.
    fn drain(&self) {
        self.calls.drain();
        self.finish(Ok(()));
    }

    fn listen_until_the_end(self: &Arc<Self>) -> io::Result<()> {
        if self.calls.was_called() {
            self.tell_called();
            self.calls.start_lacking();
        }
        let result = loop {
            if let Some(result) = self.why.lock().take() {
                break result;
            }
            self.listen();
        };
        // Calls that hang are the next worker's.
        let patience = Instant::now() + DRAIN;
        while Instant::now() < patience && self.calls.is_draining() {
            std::thread::sleep(Duration::from_millis(1));
        }
        result
    }

    /// Hears what the keeper says, or that all who had a listener are gone; or that the container calls for
    /// the first time.
    fn listen(self: &Arc<Self>) {
        let listeners = self.listeners.all();
        // A hang-up is always told, and calls are others' business once there are these.
        let (calls, patience) = match self.calls.call_threads() {
            CallThreads::Unneeded => (PollFlags::POLLIN, PollTimeout::NONE),
            CallThreads::Lacking(_) => (PollFlags::empty(), THREADS_MS.into()),
            CallThreads::Started => (PollFlags::empty(), PollTimeout::NONE),
        };
        let mut asked = vec![PollFd::new(self.keeper.as_fd(), PollFlags::POLLIN)];
        asked.extend(listeners.iter().map(|of| PollFd::new(of.descriptor(), calls)));
        match poll(&mut asked, patience) {
            Ok(0) => return self.calls.start_lacking(),
            Ok(_) => {}
            Err(_) => return,
        }
        let said = |of: &PollFd<'_>| of.revents().unwrap_or(PollFlags::empty());
        if asked.first().is_some_and(|keeper| !said(keeper).is_empty()) {
            match self.keeper.receive() {
                Ok(message) => self.take(message),
                Err(error) => self.finish(Err(error)),
            }
        }
        let said: Vec<PollFlags> = asked.iter().skip(1).map(said).collect();
        for (listener, said) in listeners.iter().zip(&said) {
            if !said.difference(PollFlags::POLLIN).is_empty() {
                self.drop_listener(listener.number());
            }
        }
        if said.contains(&PollFlags::POLLIN) {
            self.calls.start_the_first();
            self.tell_called();
        }
    }

    /// Or calls would wake the keeper.
    fn tell_called(&self) {
        // Else it is told that the worker is gone in a moment.
        let _ = self.keeper.tell(Notice::Called);
    }

    /// All who had a listener are gone.
    fn drop_listener(self: &Arc<Self>, number: u64) {
        self.listeners.remove(number);
        if let Err(error) = self.deserted(number) {
            self.finish(Err(error));
        }
    }
}
