//! The worker without a kernel: calls are handed to it, and it asks a driver in memory.
//!
//! A call comes from a process that waits for nothing but its end, with a page of memory that the test has,
//! too. What the worker does for it is the product's own way from [`Case`] on: it reads and writes the caller's
//! memory, takes its descriptors, asks the driver and writes the journal. A worker that is killed is a thread
//! that ends in the middle of a driver call, with nothing undone; the next one has the journal. Needs no root,
//! no file system and no engine.

mod driver;
mod program;

#[cfg(test)]
mod tests;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;

use nix::libc::seccomp_notif;
use tempfile::TempDir;

pub(crate) use self::driver::{DRIVER, Death, ModelDriver, set_death};
pub(crate) use self::program::Program;
use crate::gate::settings::{Gpu, Managed, Settings};
use crate::monitor::audit::occasion::Occasion;
use crate::monitor::caller::listener::Listener;
use crate::monitor::caller::scratch::Scratch;
use crate::monitor::caller::test_callers::{Caller, Callers};
use crate::monitor::calls::serve::Case;
use crate::monitor::worker::Shared;
use crate::monitor::worker::keeper_socket::{Heard, KeeperSocket};
use crate::process::ProcessId;

/// Bytes of the GPU, and of the container's quota.
pub(crate) const TOTAL: u64 = 1 << 30;
pub(crate) const QUOTA: u64 = 100 << 20;

/// The slot of the test's own thread, and of those that die.
const OWN_SLOT: usize = 0;
const DYING_SLOT: usize = 1;

/// The only listener's number.
const LISTENER: u64 = 1;

/// What becomes of a call and of its caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is answered.
    Answered,
    /// It is answered and a signal takes its caller away before that looks: the kernel makes it again.
    AnswerIsLost,
    /// Its caller stops waiting before it is looked at.
    Interrupted,
    /// Its caller stops waiting before it gets the reply.
    ReplyIsLost,
    /// The worker dies in its `nth` call of the driver, counted from 0, before the driver has heard of that or
    /// after it has done it; the caller waits for the next worker, or not.
    WorkerDies { nth: u32, death: Death, waits: bool },
}

/// What a caller was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallerGets {
    /// The call is the caller's to make.
    Continue,
    /// It failed with this error number.
    Errno(i32),
    /// It was made.
    Done,
    /// It wasn't answered.
    Nothing,
}

impl Shared {
    /// Deals with a call in that slot, by this thread.
    fn serve_in(&self, slot: usize, notice: seccomp_notif) {
        let slot = self.journal.slot(slot);
        if slot.number() == DYING_SLOT {
            Self::move_in(slot);
        }
        slot.receive_of_model(LISTENER, notice);
        let listener = self.listener(LISTENER).expect("it was handed over");
        Case::new(self, &mut Scratch::default(), slot, &listener, notice, false).serve();
    }
}

/// A container with its monitor, on a GPU in memory.
pub(crate) struct World {
    pub(crate) driver: Arc<ModelDriver>,
    pub(crate) shared: &'static Shared,
    settings: Settings,
    journal: File,
    callers: Arc<Callers>,
    listener: Arc<OwnedFd>,
    /// The other end of the keeper's socket.
    _keeper: UnixStream,
    _place: TempDir,
    next_id: u64,
    pub(crate) workers: u32,
}

impl World {
    pub(crate) fn new() -> Self {
        let driver = ModelDriver::new(TOTAL);
        let place = tempfile::tempdir().expect("a directory");
        let settings = settings(&driver, place.path());
        let journal = crate::monitor::state::books::tests::journal();
        let callers = Arc::new(Callers::default());
        let listener = Arc::new(OwnedFd::from(File::open("/dev/null").expect("it is there")));
        let (shared, keeper) = worker(&settings, &journal);
        let world = World {
            driver,
            shared,
            settings,
            journal,
            callers,
            listener,
            _keeper: keeper,
            _place: place,
            next_id: 0,
            workers: 1,
        };
        world.begin();
        world
    }

    /// Hands the worker its listener, and lets it finish what the one before has left.
    fn begin(&self) {
        let file = self.listener.try_clone().expect("a descriptor");
        let listener = Listener::of_model(LISTENER, file, Arc::clone(&self.callers));
        self.shared.take(Heard::Listener(listener));
        self.shared.queue_what_is_left();
        let shared = self.shared;
        // The other one's calls are all over: its thread lives.
        let slot = shared.journal.slot(DYING_SLOT);
        Shared::move_in(slot);
        shared.recover(slot, &mut Scratch::default());
        // The next thread that dies has it.
        slot.occupy(ProcessId { pid: 0, start_ticks: 0 });
    }

    /// Another worker in the place of this one, of which nothing is left but the journal.
    pub(crate) fn restart(&mut self) {
        self.driver.close_all_of(std::process::id());
        (self.shared, self._keeper) = worker(&self.settings, &self.journal);
        self.workers += 1;
        self.begin();
    }

    /// A program calls the driver: an ioctl of that number on one of its files, whose struct and parameters
    /// are in its memory. What it is answered; a call that it is to make itself is made.
    pub(crate) fn ioctl(&mut self, program: &Program, call: &Call, fate: Fate) -> CallerGets {
        self.next_id += 1;
        let mut id = self.next_id;
        let notice = program.notice(id, call);
        match fate {
            Fate::Interrupted => {}
            Fate::ReplyIsLost => self.callers.add(id, Caller::GoesThen),
            Fate::Answered | Fate::AnswerIsLost | Fate::WorkerDies { .. } => {
                self.callers.add(id, Caller::Waits)
            }
        }
        match fate {
            Fate::WorkerDies { nth, death, waits } => {
                if self.serve_and_die(notice, nth, death) {
                    if !waits {
                        self.callers.remove(id);
                    }
                    self.restart();
                }
            }
            Fate::AnswerIsLost => {
                self.shared.serve_in(OWN_SLOT, notice);
                self.next_id += 1;
                let again = seccomp_notif { id: self.next_id, ..notice };
                if !matches!(self.callers.remove(id), Some(Caller::Answered(_, 0, 0))) {
                    return CallerGets::Nothing;
                }
                self.callers.add(again.id, Caller::Waits);
                self.shared.serve_in(OWN_SLOT, again);
                id = again.id;
            }
            _ => self.shared.serve_in(OWN_SLOT, notice),
        }
        let answer = match self.callers.remove(id) {
            Some(Caller::Answered(_, 0, 0)) => CallerGets::Done,
            Some(Caller::Answered(_, 0, _)) => CallerGets::Continue,
            Some(Caller::Answered(_, error, _)) => CallerGets::Errno(-error),
            _ => CallerGets::Nothing,
        };
        if answer == CallerGets::Continue {
            program.makes(&self.driver, call);
        }
        answer
    }

    /// Has the worker deal with a call by a thread that dies of it; whether it came to that.
    fn serve_and_die(&self, notice: seccomp_notif, nth: u32, death: Death) -> bool {
        let shared = self.shared;
        let (says, died) = channel();
        std::thread::spawn(move || {
            set_death(nth, death, says);
            shared.serve_in(DYING_SLOT, notice);
            driver::forget_death();
        });
        // It can't be joined: the kernel ends it, and nobody else is told.
        died.recv().is_ok()
    }

    /// The driver and the kernel are asked what there really is.
    pub(crate) fn audit(&self) {
        self.shared.audit(Occasion::Death);
    }

    /// Bytes of the GPU that are in use.
    pub(crate) fn used(&self) -> u64 {
        self.driver.sim.state().gpus[0].used_bytes
    }

    /// Bytes that count against the quota.
    pub(crate) fn charged(&self) -> u64 {
        self.shared.books().ledger.usage(0).map_or(0, |usage| usage.used_bytes)
    }
}

/// A call as a program makes it.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    /// The escape's number (`nv_escape.h`).
    pub(crate) number: u32,
    /// Its struct, and what that points at, with the place of the pointer.
    pub(crate) bytes: Vec<u8>,
    pub(crate) params: Option<(usize, Vec<u8>)>,
}

fn settings(driver: &ModelDriver, place: &Path) -> Settings {
    Settings {
        id: "model".into(),
        short_id: "model_______".into(),
        name: None,
        root: String::new(),
        state_dir: PathBuf::new(),
        bundle: "/nowhere".into(),
        place: place.to_owned(),
        driver: DRIVER.into(),
        managed: Managed::Refuse,
        channel_groups: 256,
        gpus: vec![Gpu {
            index: 0,
            uuid: driver.sim.state().gpus[0].uuid.clone(),
            minor: 0,
            total_bytes: TOTAL,
            limit_bytes: QUOTA,
        }],
        nodes: driver.nodes(),
        monitor: "/nowhere".into(),
        farewell: Vec::new(),
        launcher: None,
        state_file: None,
        spares_host: false,
        interruptible: true,
        log: String::new(),
    }
}

fn worker(settings: &Settings, journal: &File) -> (&'static Shared, UnixStream) {
    let (ours, keeper) = UnixStream::pair().expect("a pair of sockets");
    let socket = KeeperSocket::new(ours.into());
    let shared = Shared::new(settings.clone(), socket, journal).expect("it begins");
    // As in the product: threads of it may outlive any scope.
    (Box::leak(Box::new(shared)), keeper)
}
