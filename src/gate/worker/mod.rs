//! The worker: answers the driver calls of one container.
//!
//! Started by the keeper, which holds what must outlive it: the listeners, and the
//! [`journal`](crate::gate::journal). It can be killed at any instruction: the next worker
//! reads the journal, finishes the calls that this one had received, and goes on.
//!
//! One thread leads and deals with calls ([`lead`]), one audits ([`auditor`]), the first
//! waits for the end. What a call means is decided in [`policy`](crate::gate::policy).

mod abroad;
mod auditor;
mod books;
mod calm;
mod control;
mod device;
mod execute;
mod keeper;
mod lead;
mod listener;
mod memory;
mod own;
mod privilege;
mod recover;
mod serve;
mod show;
mod stash;
mod target;
mod uvm;

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use self::auditor::Auditor;
use self::books::Books;
use self::calm::Calm;
use self::keeper::{Heard, Keeper};
use self::lead::{Lead, Turn};
use self::listener::Listener;
use self::memory::{Memory, Slot};
use self::serve::{Case, Desk};
use self::stash::Stash;
use self::target::Targets;
use super::journal::{SLOTS, Stage};
use super::settings::Settings;
use super::wire::Notice;
use crate::rm::release::Standing;
use crate::rm::{Release, about};

/// The keeper's socket.
pub const KEEPER_FD: i32 = 3;
/// The settings.
pub const SETTINGS_FD: i32 = 4;
/// The memory that outlives a worker.
pub const JOURNAL_FD: i32 = 5;

/// Bytes of a thread's stack.
const STACK_BYTES: usize = 128 << 10;

/// How long calls may take to finish once it's over.
const DRAIN: Duration = Duration::from_secs(2);

/// Connections that are answered at once.
const CONNECTIONS: usize = 8;

/// What all threads have in common.
#[derive(Debug)]
pub(in crate::gate) struct Shared {
    settings: Settings,
    release: Release,
    /// UUIDs of the container's GPUs, in its order.
    uuids: Vec<about::Uuid>,
    memory: &'static Memory,
    books: Mutex<Books>,
    targets: Targets,
    stash: Stash,
    calm: Calm,
    auditor: Auditor,
    lead: Lead,
    keeper: Keeper,
    listeners: Mutex<Vec<Arc<Listener>>>,
    connections: Arc<()>,
    draining: AtomicBool,
    end: Mutex<Option<io::Result<()>>>,
    ended: Condvar,
}

/// Answers calls until the keeper says that it is enough.
///
/// # Errors
///
/// Where it can't begin, or can't go on.
pub fn main() -> io::Result<()> {
    privilege::close_from(6);
    let keeper = Keeper::new(keeper::inherited(KEEPER_FD)?);
    let settings = Settings::read(&File::from(keeper::inherited(SETTINGS_FD)?));
    let settings = settings.map_err(io::Error::other)?;
    let journal = File::from(keeper::inherited(JOURNAL_FD)?);
    crate::log::init(&settings.log);
    listener::check_sizes()?;
    privilege::drop_all()?;
    // For the process's life: threads that hang in the driver outlive any scope.
    let shared: &'static Shared = Box::leak(Box::new(Shared::new(settings, keeper, &journal)?));
    if shared.take_over()? {
        return Ok(());
    }
    shared.spawn("audit", || {
        if let Err(error) = shared.audit_forever() {
            shared.finish(Err(error.into()));
        }
    })?;
    // Before anything else can be told.
    shared.keeper.tell(Notice::Ready)?;
    shared.start_threads()?;
    shared.wait_for_the_end()
}

impl Shared {
    fn new(settings: Settings, keeper: Keeper, journal: &File) -> io::Result<Self> {
        let version = settings.driver.parse().map_err(io::Error::other)?;
        let release = Release::of(version).map_err(io::Error::other)?;
        if release.standing() != Standing::Checked {
            tracing::warn!(driver = %version, "the driver's structs: {}", release.standing());
        }
        let uuids = settings.gpus.iter().map(|gpu| {
            about::uuid(&gpu.uuid).ok_or_else(|| io::Error::other("a GPU's UUID is none"))
        });
        let uuids = uuids.collect::<io::Result<_>>()?;
        let memory: &'static Memory = Box::leak(Box::new(Memory::map(journal)?));
        let books = Books::open(memory, &settings.gpus, &settings.nodes);
        Ok(Shared {
            books: Mutex::new(books),
            settings,
            release,
            uuids,
            memory,
            targets: Targets::default(),
            stash: Stash::default(),
            calm: Calm::new(),
            auditor: Auditor::new()?,
            lead: Lead::default(),
            keeper,
            listeners: Mutex::new(Vec::new()),
            connections: Arc::new(()),
            draining: AtomicBool::new(false),
            end: Mutex::new(None),
            ended: Condvar::new(),
        })
    }

    fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(STACK_BYTES);
        thread.spawn(work).map(drop)
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

    fn take(&'static self, heard: Heard) {
        match heard {
            Heard::Listener(listener) => {
                let mut listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
                listeners.push(Arc::new(listener));
            }
            Heard::Connection(connection) => {
                let open = Arc::clone(&self.connections);
                if Arc::strong_count(&open) > CONNECTIONS {
                    return;
                }
                let _ = self.spawn("control", move || {
                    control::converse(self, connection);
                    drop(open);
                });
            }
            Heard::Begin | Heard::Nothing => {}
            Heard::Drain => self.drain(),
            Heard::Gone => self.finish(Ok(())),
        }
    }

    /// A thread for each call that a worker before had received, and some more.
    fn start_threads(&'static self) -> io::Result<()> {
        for _ in 0..3 {
            self.start_thread()?;
        }
        // Slots are numbered as threads are.
        let left = (3..SLOTS).filter(|slot| self.memory.slot(*slot).notice().id != 0).max();
        for _ in 3..=left.unwrap_or(0) {
            self.start_thread()?;
        }
        Ok(())
    }

    fn start_thread(&'static self) -> io::Result<()> {
        let Some(number) = self.lead.enlist(SLOTS) else { return Ok(()) };
        self.spawn("calls", move || self.work(number))
    }

    fn work(&'static self, number: usize) {
        let slot = self.memory.slot(number);
        let mut desk = Desk::default();
        self.recover(slot, &mut desk);
        loop {
            if self.lead.follow() == Turn::Alone {
                // At the bound there is nobody to watch until a call ends.
                let _ = self.start_thread();
            }
            self.lead(slot, &mut desk);
        }
    }

    /// Waits for calls and answers them, as long as this thread leads.
    fn lead(&'static self, slot: Slot<'_>, desk: &mut Desk) {
        let mut gone: Vec<u64> = Vec::new();
        loop {
            if self.draining.load(Ordering::Acquire) {
                // Others may still be busy; nothing is received any more.
                std::thread::park();
                continue;
            }
            let Some((listener, notice)) = self.receive(slot, &mut gone) else { continue };
            let call = self.lead.begin();
            Case::new(self, desk, slot, &listener, notice, false).serve();
            if !self.lead.end(call) {
                return;
            }
        }
    }

    /// Waits for a call, or whatever else comes first.
    fn receive(
        &'static self,
        slot: Slot<'_>,
        gone: &mut Vec<u64>,
    ) -> Option<(Arc<Listener>, nix::libc::seccomp_notif)> {
        let listeners: Vec<Arc<Listener>> =
            self.listeners.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut asked = Vec::with_capacity(1 + listeners.len());
        asked.push(PollFd::new(self.keeper.as_fd(), PollFlags::POLLIN));
        asked.extend(listeners.iter().map(|of| PollFd::new(of.descriptor(), PollFlags::POLLIN)));
        if poll(&mut asked, PollTimeout::NONE).is_err() {
            return None;
        }
        let said =
            |at: usize| asked.get(at).and_then(PollFd::revents).unwrap_or(PollFlags::empty());
        if !said(0).is_empty() {
            match self.keeper.hear() {
                Ok(heard) => self.take(heard),
                Err(error) => self.finish(Err(error)),
            }
            return None;
        }
        gone.clear();
        for (at, listener) in listeners.iter().enumerate() {
            let said = said(at + 1);
            if said.contains(PollFlags::POLLIN)
                && let Some(notice) = listener.receive(slot)
            {
                return Some((Arc::clone(listener), notice));
            }
            if said.intersects(PollFlags::POLLHUP | PollFlags::POLLERR | PollFlags::POLLNVAL)
                && !said.contains(PollFlags::POLLIN)
            {
                gone.push(listener.number());
            }
        }
        for number in gone.iter() {
            let mut listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
            listeners.retain(|listener| listener.number() != *number);
            drop(listeners);
            if let Err(error) = self.deserted(*number) {
                self.finish(Err(error));
            }
        }
        None
    }

    /// Nothing more is received; ends when all calls are answered.
    fn drain(&self) {
        self.draining.store(true, Ordering::Release);
        self.finish(Ok(()));
    }

    fn finish(&self, result: io::Result<()>) {
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        end.get_or_insert(result);
        self.ended.notify_all();
    }

    fn wait_for_the_end(&self) -> io::Result<()> {
        let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        while end.is_none() {
            end = self.ended.wait(end).unwrap_or_else(PoisonError::into_inner);
        }
        let result = end.take().unwrap_or(Ok(()));
        drop(end);
        // Calls that hang are the next worker's.
        let patience = Instant::now() + DRAIN;
        while self.draining.load(Ordering::Acquire) && Instant::now() < patience && self.has_calls()
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        result
    }

    fn has_calls(&self) -> bool {
        (0..SLOTS).map(|slot| self.memory.slot(slot)).any(|slot| {
            let open = slot.notice().id != 0 && slot.stage() != Stage::Decided;
            open && self.listener(slot.listener()).is_some_and(|of| of.is_valid(slot.notice().id))
        })
    }

    fn listener(&self, number: u64) -> Option<Arc<Listener>> {
        let listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.iter().find(|listener| listener.number() == number).cloned()
    }
}
