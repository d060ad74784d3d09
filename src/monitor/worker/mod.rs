//! The worker: answers the driver calls of one container.
//!
//! Started by the keeper, which holds what must outlive it: the listeners, and the
//! [`journal`](crate::monitor::state::journal). It can be killed at any instruction: the next worker
//! reads the journal, finishes the calls that this one had received, and goes on.
//!
//! What a call means is decided in [`policy`](crate::monitor::calls::policy). The threads:
//!
//! | name | does |
//! |---|---|
//! | (the first) | listens to the keeper until the end, and for the container's first call |
//! | `audit` | asks driver and kernel ([`rounds`](crate::monitor::audit::rounds)) |
//! | `heritage`, `end`, `control` | for a while: the client of a worker before, the container's end, a question |
//!
//! From the container's first call on ([`threads`](crate::monitor::calls::threads)):
//!
//! | name | does |
//! |---|---|
//! | `calls`, several | one leads and deals with a call, the others follow ([`leader`](crate::monitor::caller::leader)) |
//! | `mappings` | looks at what is mapped of UVM's ([`vma_audit`](crate::monitor::audit::vma_audit)) |
//! | `shares`, `shares heard` | set slices, and hear of changes ([`slices`](crate::monitor::compute::slices)) |
//! | `turns` | takes the container off its GPUs and back, where it has turns |

pub(crate) mod call_threads;
pub(crate) mod control_socket;
pub(crate) mod facts;
pub(crate) mod keeper_socket;
pub(crate) mod log_limit;
pub(crate) mod privilege;
pub(crate) mod see_out;
pub(crate) mod shutdown;
pub(crate) mod tell;

pub use crate::monitor::audit::unanswered::{Amount, Reason, Unanswered};
pub use crate::monitor::caller::listener::check_sizes;
pub use crate::monitor::driver::monitor_client::{SliceTried, examine, try_slice};

use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::gate::figures::Figures;
use crate::gate::inherited;
use crate::gate::launch::Place;
use crate::gate::settings::Settings;
use crate::gate::wire::Notice;
use crate::monitor::audit::auditor::Auditor;
use crate::monitor::caller::leader::Leader;
use crate::monitor::caller::listener::Listener;
use crate::monitor::caller::pid_ns::PidMaps;
use crate::monitor::caller::recv_wait::RecvWait;
use crate::monitor::caller::target::Targets;
use crate::monitor::caller::thread_order::ThreadOrder;
use crate::monitor::caller::unclaimed::Unclaimed;
use crate::monitor::calls::lane::Lane;
use crate::monitor::compute::off_channels::OffChannels;
use crate::monitor::compute::orphans::Orphans;
use crate::monitor::compute::shares::Shares;
use crate::monitor::driver::client_handover;
use crate::monitor::driver::client_handover::Heritage;
use crate::monitor::driver::self_ranges;
use crate::monitor::resident;
use crate::monitor::state::books::Books;
use crate::monitor::state::export_files::Exports;
use crate::monitor::state::journal::{SLOTS, Stage};
use crate::monitor::state::journal_map;
use crate::monitor::state::journal_map::{Count, JournalMap};
use crate::monitor::uvm::address_spaces::AddressSpaces;
use crate::monitor::uvm::files;
use crate::monitor::uvm::files::UvmFiles;
use crate::monitor::uvm::init_turn::Initializing;
use crate::monitor::worker::call_threads::CallThreads;
use crate::monitor::worker::facts::Facts;
use crate::monitor::worker::keeper_socket::{Heard, KeeperSocket};
use crate::monitor::worker::log_limit::Calm;
use crate::rm::release::Standing;
use crate::rm::{Release, about};

/// Bytes of a thread's stack.
const STACK_BYTES: usize = 128 << 10;

/// How long calls may take to finish once it's over.
const DRAIN: Duration = Duration::from_secs(2);

/// How long the driver may be at one of the former worker's stakes, while calls and audits wait for ours
/// in their places.
const HERITAGE: Duration = Duration::from_secs(1);

/// How soon it is looked whether calls have their threads, where the first call hangs or one can't be
/// started, in milliseconds.
const THREADS_MS: u16 = 20;

/// Connections that are answered at once.
const CONNECTIONS: usize = 8;

/// What all threads have in common.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) settings: Settings,
    pub(crate) release: Release,
    /// UUIDs of the container's GPUs, in its order.
    pub(crate) uuids: Vec<about::Uuid>,
    /// Where our own memory is.
    pub(crate) own_ranges: Vec<(u64, u64)>,
    pub(crate) journal: &'static JournalMap,
    books: Mutex<Books>,
    pub(crate) lane: Lane,
    /// What others read of the books, and of the calls that were counted.
    pub(crate) figures: Figures,
    pub(crate) targets: Targets,
    pub(crate) exports: Exports,
    pub(crate) heritage: Heritage,
    pub(crate) uvm_files: UvmFiles,
    pub(crate) initializing: Initializing,
    pub(crate) address_spaces: AddressSpaces,
    pub(crate) unclaimed: Unclaimed,
    pub(crate) thread_order: ThreadOrder,
    pub(crate) pid_maps: crate::monitor::caller::pid_ns::PidMaps,
    pub(crate) log_limit: Calm,
    facts: Facts,
    pub(crate) auditor: Auditor,
    pub(crate) shares: Shares,
    pub(crate) off_channels: OffChannels,
    /// By GPU: other containers, whose turns this monitor takes. Held while it does.
    pub(crate) orphans: Mutex<Vec<Orphans>>,
    pub(crate) leader: Leader,
    pub(crate) call_threads: Mutex<CallThreads>,
    /// Done once those of them are there that look after what calls make.
    pub(crate) are_looked_after: Once,
    pub(crate) keeper: KeeperSocket,
    listeners: Mutex<Vec<Arc<Listener>>>,
    /// The listener that is looked at first, but for how many there are.
    pub(crate) first: AtomicUsize,
    /// For calls; a change is one of the listeners, or of `draining`.
    pub(crate) waiting: RecvWait,
    connections: Arc<()>,
    pub(crate) draining: AtomicBool,
    end: Mutex<Option<io::Result<()>>>,
}

/// The [`Books`], open. Who has changed what others see of them tells so, before somebody else has
/// them.
#[derive(Debug)]
pub(crate) struct OpenBooks<'a> {
    books: MutexGuard<'a, Books>,
    figures: &'a Figures,
    changed: bool,
}

impl Deref for OpenBooks<'_> {
    type Target = Books;

    fn deref(&self) -> &Books {
        &self.books
    }
}

impl DerefMut for OpenBooks<'_> {
    fn deref_mut(&mut self) -> &mut Books {
        self.changed = true;
        &mut self.books
    }
}

impl Drop for OpenBooks<'_> {
    fn drop(&mut self) {
        if self.changed {
            self.figures.seen(self.books.ledger.mark());
        }
    }
}

/// Answers calls until the keeper says that it is enough.
///
/// # Errors
///
/// Where it can't begin, or can't go on.
pub fn main() -> io::Result<()> {
    journal_map::share_heap();
    let [keeper, settings, journal] = inherited::three()?;
    inherited::close_the_rest();
    let settings = Settings::read(&File::from(settings)).map_err(io::Error::other)?;
    let (keeper, journal) = (KeeperSocket::new(keeper), File::from(journal));
    crate::log::init_of(&settings.log, &settings.id);
    crate::monitor::caller::listener::check_sizes()?;
    privilege::drop_all()?;
    // For the process's life: threads that hang in the driver outlive any scope.
    let shared: &'static Shared = Box::leak(Box::new(Shared::new(settings, keeper, &journal)?));
    drop(journal);
    if shared.take_over()? {
        return Ok(());
    }
    shared.forget_what_was_never_exported();
    shared.was_initializing();
    shared.take_over_stakes()?;
    shared.spawn("audit", || {
        if let Err(error) = shared.audit_forever() {
            shared.finish(Err(error.into()));
        }
    })?;
    shared.queue_what_is_left();
    shared.journal.count_worker();
    control_socket::note_status(shared);
    shared.keeper.tell(Notice::Ready)?;
    resident::give_back_the_start();
    resident::give_back_the_heap();
    let ended = shared.listen_until_the_end();
    shared.end_turns();
    ended
}

impl Shared {
    pub(crate) fn new(
        settings: Settings,
        keeper: KeeperSocket,
        journal: &File,
    ) -> io::Result<Self> {
        let version = settings.driver.parse().map_err(io::Error::other)?;
        let release = Release::of(version).map_err(io::Error::other)?;
        if release.standing() != Standing::Checked {
            // `cgpu doctor` says so, once for the host.
            tracing::debug!(driver = %version, "the driver's structs: {}", release.standing());
        }
        let gpu_count = settings.gpus.len();
        let uuids = settings.gpus.iter().map(|gpu| {
            about::uuid(&gpu.uuid).ok_or_else(|| io::Error::other("a GPU's UUID is none"))
        });
        let uuids = uuids.collect::<io::Result<_>>()?;
        let memory: &'static JournalMap = Box::leak(Box::new(JournalMap::map(journal)?));
        let books = Books::open(memory, &settings.gpus, &settings.nodes);
        let targets = Targets::new(settings.spares_host)?;
        let figures = Figures::create(&Place::at(&settings.place).figures());
        let figures = figures.or_else(|error| {
            tracing::warn!(%error, "those who look at this container have to wake its monitor");
            Figures::unread()
        })?;
        Ok(Shared {
            books: Mutex::new(books),
            lane: Lane::open(memory, Self::is_left),
            figures,
            facts: Facts::new(&settings),
            settings,
            release,
            uuids,
            own_ranges: self_ranges::ranges(&std::fs::read_to_string("/proc/self/maps")?),
            journal: memory,
            targets,
            exports: Exports::default(),
            heritage: Heritage::default(),
            uvm_files: UvmFiles::default(),
            initializing: Initializing::default(),
            address_spaces: AddressSpaces::default(),
            unclaimed: Unclaimed::open(memory),
            thread_order: ThreadOrder::default(),
            pid_maps: PidMaps::default(),
            log_limit: Calm::new(),
            auditor: Auditor::new(),
            shares: Shares::new(gpu_count),
            off_channels: OffChannels::new(gpu_count),
            orphans: Mutex::new((0..gpu_count).map(|_| Orphans::default()).collect()),
            leader: Leader::default(),
            call_threads: Mutex::default(),
            are_looked_after: Once::new(),
            keeper,
            listeners: Mutex::new(Vec::new()),
            first: AtomicUsize::new(0),
            waiting: RecvWait::new()?,
            connections: Arc::new(()),
            draining: AtomicBool::new(false),
            end: Mutex::new(None),
        })
    }

    /// What is known of the container, while nobody else changes it.
    pub(crate) fn books(&self) -> OpenBooks<'_> {
        let books = self.books.lock().unwrap_or_else(PoisonError::into_inner);
        OpenBooks { books, figures: &self.figures, changed: false }
    }

    /// One more call, of which that became, and which took so long.
    pub(crate) fn count(&self, became: Count, took: Duration) {
        self.journal.took(took);
        self.journal.count(became);
        self.figures.change();
    }

    /// One more process was ended.
    pub(crate) fn count_killed(&self) {
        self.journal.count(Count::Killed);
        self.figures.change();
    }

    pub(crate) fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(STACK_BYTES);
        thread.spawn(work).map(drop)
    }

    /// Sees to the stakes of workers before, while nobody calls and nobody is audited: they are in the
    /// figures of nobody who is asked for. By a thread that the driver may keep.
    fn take_over_stakes(&'static self) -> io::Result<()> {
        let stakes = Arc::new(self.stakes_of_old());
        if stakes.is_empty() && self.heritage.is_empty() {
            return Ok(());
        }
        let (heir, inherits) = std::sync::mpsc::channel::<()>();
        let all = Arc::clone(&stakes);
        self.spawn("heritage", move || self.inherit(&all, || _ = heir.send(())))?;
        loop {
            match inherits.recv_timeout(HERITAGE) {
                Ok(()) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {
                    tracing::warn!("the driver hangs over what a worker before had");
                    self.give_up_heritage(&stakes);
                    return Ok(());
                }
            }
        }
    }

    /// Takes what the keeper hands over, until it says begin. Whether it said to end.
    fn take_over(&'static self) -> io::Result<bool> {
        loop {
            match self.keeper.hear()? {
                Heard::Begin => return Ok(false),
                Heard::Drain | Heard::Gone => return Ok(true),
                heard => self.take(heard),
            }
        }
    }

    pub(crate) fn take(&'static self, heard: Heard) {
        match heard {
            Heard::Listener(listener) => {
                let mut listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
                listeners.push(Arc::new(listener));
                drop(listeners);
                self.waiting.change();
            }
            Heard::Connection(connection) => {
                let open = Arc::clone(&self.connections);
                if Arc::strong_count(&open) > CONNECTIONS {
                    return;
                }
                let _ = self.spawn("control", move || {
                    control_socket::converse(self, connection);
                    drop(open);
                });
            }
            Heard::Export(number, file) if files::is_number(number) => {
                self.was_mapped(number, file);
            }
            Heard::Export(number, file) if client_handover::is_number(number) => {
                self.was_own(number, file);
            }
            Heard::Export(number, file) => self.was_exported(number, file),
            Heard::Begin | Heard::Nothing => {}
            Heard::Drain => self.drain(),
            Heard::Gone => self.finish(Ok(())),
        }
    }

    pub(crate) fn listeners(&self) -> Vec<Arc<Listener>> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Nothing more is received; ends when all calls are answered.
    fn drain(&self) {
        self.draining.store(true, Ordering::Release);
        self.waiting.change();
        self.finish(Ok(()));
    }

    fn finish(&self, result: io::Result<()>) {
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        end.get_or_insert(result);
        self.keeper.hear_no_more();
    }

    fn listen_until_the_end(&'static self) -> io::Result<()> {
        if self.was_called() {
            self.start_lacking();
        }
        let result = loop {
            let end = self.end.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(result) = end {
                break result;
            }
            self.listen();
        };
        // Calls that hang are the next worker's.
        let patience = Instant::now() + DRAIN;
        while self.draining.load(Ordering::Acquire) && Instant::now() < patience && self.has_calls()
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        result
    }

    /// Hears what the keeper says, or that all who had a listener are gone; or that the container calls for
    /// the first time.
    fn listen(&'static self) {
        let listeners = self.listeners();
        // A hang-up is always told, and calls are others' business once there are these.
        let (calls, patience) = match self.call_threads() {
            CallThreads::Unneeded => (PollFlags::POLLIN, PollTimeout::NONE),
            CallThreads::Lacking(_) => (PollFlags::empty(), THREADS_MS.into()),
            CallThreads::Started => (PollFlags::empty(), PollTimeout::NONE),
        };
        let mut asked = vec![PollFd::new(self.keeper.as_fd(), PollFlags::POLLIN)];
        asked.extend(listeners.iter().map(|of| PollFd::new(of.descriptor(), calls)));
        match poll(&mut asked, patience) {
            Ok(0) => return self.start_lacking(),
            Ok(_) => {}
            Err(_) => return,
        }
        let said = |of: &PollFd<'_>| of.revents().unwrap_or(PollFlags::empty());
        if asked.first().is_some_and(|keeper| !said(keeper).is_empty()) {
            match self.keeper.hear() {
                Ok(heard) => self.take(heard),
                Err(error) => self.finish(Err(error)),
            }
        }
        let said: Vec<PollFlags> = asked.iter().skip(1).map(said).collect();
        for (listener, said) in listeners.iter().zip(&said) {
            if !said.difference(PollFlags::POLLIN).is_empty() {
                self.has_nobody(listener.number());
            }
        }
        if said.contains(&PollFlags::POLLIN) {
            self.start_the_first();
        }
    }

    /// All who had a listener are gone.
    fn has_nobody(&'static self, number: u64) {
        let mut listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.retain(|listener| listener.number() != number);
        drop(listeners);
        self.waiting.change();
        if let Err(error) = self.deserted(number) {
            self.finish(Err(error));
        }
    }

    fn has_calls(&self) -> bool {
        (0..SLOTS).map(|slot| self.journal.slot(slot)).any(|slot| {
            let open = slot.notice().id != 0 && slot.stage() != Stage::Decided;
            open && self.listener(slot.listener()).is_some_and(|of| of.is_valid(slot.notice().id))
        })
    }

    pub(crate) fn listener(&self, number: u64) -> Option<Arc<Listener>> {
        let listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.iter().find(|listener| listener.number() == number).cloned()
    }
}
