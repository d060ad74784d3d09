//! A container on GPUs in memory: its worker, the keeper's files, and the calls of its programs.
#![allow(unsafe_code, reason = "a thread that dies has borrowed the worker")]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use cgpu_sim::Node;
use nix::libc::seccomp_notif;
use tempfile::TempDir;

use super::driver::forget_death;
use super::start::{settings, worker};
use super::{
    Call, CallerGets, DYING_SLOT, Death, Fate, LISTENER, ModelDriver, ModelFile, OWN_SLOT, Program,
    QUOTA, TOTAL, serve_in, set_death,
};
use crate::gate::passing::{self, Wait};
use crate::gate::settings::Settings;
use crate::gate::wire::Notice;
use crate::monitor::caller::{Caller, Listener, Scratch, TestCallers};
use crate::monitor::calls::{Parts, count_crash, queue_left_calls, recover, take_over_slot};
use crate::monitor::journal::KeptFile;
use crate::monitor::keeper_socket::KeeperMessage;
use crate::monitor::state::Occasion;
use crate::monitor::uvm::SweepTimes;
use crate::monitor::worker::Worker;
use crate::process::ProcessId;

/// How many files there are to export memory to.
const BOXES: usize = 3;

/// How long [`World::sweep`] looks for files that no program has any more.
const PATIENCE: Duration = Duration::from_secs(60);

/// A container with its monitor, on GPUs in memory.
pub(crate) struct World {
    pub(crate) driver: Arc<ModelDriver>,
    /// The worker; `None` only while the world changes it or ends.
    worker: RefCell<Option<Arc<Worker>>>,
    settings: Settings,
    journal: File,
    callers: Arc<TestCallers>,
    listener: Arc<OwnedFd>,
    /// The keeper's end of the socket, and the files that the keeper holds.
    keeper: RefCell<OwnedFd>,
    kept: RefCell<BTreeMap<u64, ModelFile>>,
    /// Whether the keeper has no descriptor left: it takes no file then.
    pub(crate) keeper_is_full: Cell<bool>,
    /// Files of `nvidiactl` to export memory to. All programs have them.
    pub(crate) boxes: Vec<ModelFile>,
    _place: TempDir,
    next_id: Cell<u64>,
    workers: Cell<u32>,
}

impl World {
    /// A world with one GPU of [`TOTAL`] bytes, of which the container has [`QUOTA`].
    pub(crate) fn new() -> Self {
        Self::with(&[(TOTAL, QUOTA)])
    }

    /// A world with GPUs of these bytes and quotas.
    pub(crate) fn with(gpus: &[(u64, u64)]) -> Self {
        let driver = ModelDriver::new(&gpus.iter().map(|(total, _)| *total).collect::<Vec<_>>());
        let place = tempfile::tempdir().expect("a directory");
        let settings = settings(&driver, gpus, place.path());
        let journal = crate::monitor::journal::new_journal();
        let callers = Arc::new(TestCallers::default());
        let listener = Arc::new(OwnedFd::from(File::open("/dev/null").expect("it is there")));
        let (worker, keeper) = worker(&settings, &journal);
        let boxes = (0..BOXES).map(|_| driver.open(Node::Control)).collect::<Vec<_>>();
        let process = std::process::id();
        boxes.iter().for_each(|file| _ = driver.number_for(file, Node::Control, process));
        let world = World {
            driver,
            worker: RefCell::new(Some(Arc::new(worker))),
            settings,
            journal,
            callers,
            listener,
            keeper: RefCell::new(keeper),
            kept: RefCell::default(),
            keeper_is_full: Cell::new(false),
            boxes,
            _place: place,
            next_id: Cell::new(0),
            workers: Cell::new(1),
        };
        world.begin();
        world.finish_left_call();
        world
    }

    /// The present worker.
    pub(crate) fn worker(&self) -> Arc<Worker> {
        Arc::clone(self.worker.borrow().as_ref().expect("it is there"))
    }

    /// How many workers there have been.
    pub(crate) fn workers(&self) -> u32 {
        self.workers.get()
    }

    /// Starts a program of the container, with a client and a device of each GPU.
    pub(crate) fn program(&self) -> Program<'_> {
        Program::start(self)
    }

    /// Hands the worker what the keeper holds.
    fn begin(&self) {
        let worker = self.worker();
        let file = self.listener.try_clone().expect("a descriptor");
        let listener = Listener::of_model(LISTENER, file, Arc::clone(&self.callers));
        worker.handle(KeeperMessage::Listener(listener));
        for (number, file) in self.kept.borrow().iter() {
            worker.handle(KeeperMessage::Kept(KeptFile::of(*number), file.try_clone()));
        }
        let Parts { driver, exports, .. } = &*worker.parts;
        exports.forget_never_exported();
        worker.former_clients.take_over(driver);
        queue_left_calls(&worker.parts);
    }

    /// Lets the worker finish what the former worker has left.
    fn finish_left_call(&self) {
        finish_left_call(&self.worker());
        self.hear();
    }

    /// Lets the keeper take the worker's notices: which files to keep and which to close.
    fn hear(&self) {
        let mut bytes = [0; 4096];
        let receive =
            |bytes: &mut [u8]| passing::receive(&*self.keeper.borrow(), bytes, Wait::Never);
        while let Ok((length @ 1.., file)) = receive(&mut bytes) {
            match (serde_json::from_slice(&bytes[..length]).expect("it is a notice"), file) {
                (Notice::Keep { .. }, Some(_)) if self.keeper_is_full.get() => {}
                (Notice::Keep { number }, Some(file)) => {
                    self.kept.borrow_mut().insert(number, self.driver.keep(file));
                }
                (Notice::LetGo { number }, _) => drop(self.kept.borrow_mut().remove(&number)),
                (notice, _) => panic!("{notice:?}"),
            }
        }
    }

    /// Replaces the worker. Only the journal and what the keeper holds are left of the old one.
    pub(crate) fn restart(&self) {
        self.restart_worker();
        self.finish_left_call();
    }

    /// Replaces a worker that crashed.
    fn restart_after_crash(&self) {
        self.restart_worker();
        count_crash(&self.worker().parts);
    }

    fn restart_worker(&self) {
        self.hear();
        let (worker, keeper) = worker(&self.settings, &self.journal);
        self.end_worker();
        self.worker.replace(Some(Arc::new(worker)));
        self.keeper.replace(keeper);
        self.workers.set(self.workers.get() + 1);
        self.begin();
    }

    fn new_id(&self) -> u64 {
        self.next_id.set(self.next_id.get() + 1);
        self.next_id.get()
    }

    /// Closes what the worker had open, also by threads that died.
    fn end_worker(&self) {
        drop(self.worker.take().and_then(Arc::into_inner).expect("nobody else has it"));
        self.driver.close_the_workers();
    }

    /// Lets a program make an ioctl on one of its files, with struct and parameters in the shared memory. Returns what
    /// the program gets. Makes a continued call.
    pub(crate) fn ioctl(&self, program: &Program<'_>, call: &Call, fate: Fate) -> CallerGets {
        let mut id = self.new_id();
        let notice = program.notice(id, call);
        self.time_passes();
        match fate {
            Fate::Interrupted => {}
            Fate::ReplyIsLost => self.callers.add(id, Caller::GoesThen),
            Fate::Answered
            | Fate::AnswerIsLost
            | Fate::WorkerDies { .. }
            | Fate::EndsWorkers(_) => self.callers.add(id, Caller::Waits),
        }
        match fate {
            Fate::WorkerDies { nth, death, waits } => {
                if self.serve_and_die(notice, nth, death) {
                    if !waits {
                        self.callers.remove(id);
                    }
                    program.outlives_worker();
                    self.restart();
                }
            }
            Fate::EndsWorkers(workers) => {
                let died = (0..workers).all(|nth| match nth {
                    0 => self.serve_and_die(notice, 0, Death::Before),
                    _ => {
                        self.restart_after_crash();
                        self.dies(0, Death::Before, finish_left_call)
                    }
                });
                assert!(died, "the call asks the driver");
                self.restart_after_crash();
                self.finish_left_call();
            }
            Fate::AnswerIsLost => {
                serve_in(&self.worker(), OWN_SLOT, notice);
                if !matches!(self.callers.remove(id), Some(Caller::Answered(0, 0))) {
                    return CallerGets::Nothing;
                }
                id = self.new_id();
                self.callers.add(id, Caller::Waits);
                serve_in(&self.worker(), OWN_SLOT, seccomp_notif { id, ..notice });
            }
            _ => serve_in(&self.worker(), OWN_SLOT, notice),
        }
        self.hear();
        let answer = match self.callers.remove(id) {
            Some(Caller::Answered(0, 0)) => CallerGets::Done,
            Some(Caller::Answered(0, _)) => CallerGets::Continue,
            Some(Caller::Answered(error, _)) => CallerGets::Errno(-error),
            _ => CallerGets::Nothing,
        };
        if answer == CallerGets::Continue {
            program.makes(call);
        }
        answer
    }

    /// Serves a call by a thread that dies in it. Returns whether the thread died.
    fn serve_and_die(&self, notice: seccomp_notif, nth: u32, death: Death) -> bool {
        self.dies(nth, death, move |worker| serve_in(worker, DYING_SLOT, notice))
    }

    /// Has a thread of the worker do `work` and die in it. Returns whether the thread died.
    fn dies(
        &self,
        nth: u32,
        death: Death,
        work: impl FnOnce(&'static Worker) + Send + 'static,
    ) -> bool {
        // SAFETY: the world holds the worker until this thread is gone. The thread owns nothing of the worker: it dies
        // and drops nothing.
        let worker: &'static Worker = unsafe { &*Arc::as_ptr(&self.worker()) };
        let (says, died) = channel();
        std::thread::spawn(move || {
            set_death(nth, death, says);
            work(worker);
            forget_death();
        });
        // The thread can't be joined: the kernel ends it, and tells nobody else.
        died.recv().is_ok()
    }

    /// Lets the worker ask the driver and the kernel what there really is.
    pub(crate) fn audit(&self) {
        self.driver.close_unused();
        self.worker().parts.audit.audit(Occasion::Death);
        self.hear();
    }

    /// Lets the worker do what it does while time passes: undo calls whose answers nobody took, and audit.
    pub(crate) fn rest(&self) {
        self.worker().parts.callers.undo_unclaimed();
        self.audit();
        self.driver.close_unused();
    }

    /// Lets time pass: the worker may look for files again at once.
    fn time_passes(&self) {
        let parts = &self.worker().parts;
        *parts.exports.all.swept.lock() = None;
        *parts.uvm.files.sweep_times.lock() = SweepTimes::default();
    }

    /// Lets time pass until the worker has found all files that no program has any more.
    pub(crate) fn sweep(&self) {
        let begun = Instant::now();
        while self.kept_files() > 0 && begun.elapsed() < PATIENCE {
            self.rest();
            self.time_passes();
            self.worker().parts.exports.sweep_exports();
            self.worker().parts.uvm.sweep(Occasion::Refusal);
            self.worker().parts.stakes.free_stakes_soon();
            self.hear();
            self.driver.close_unused();
        }
    }

    /// How many files with memory the keeper holds, without those of the monitor's client.
    pub(crate) fn kept_files(&self) -> usize {
        let kept = self.kept.borrow();
        kept.keys()
            .filter(|number| !matches!(KeptFile::of(**number), KeptFile::Client { .. }))
            .count()
    }

    /// The bytes of a GPU that are in use.
    pub(crate) fn used_of(&self, gpu: usize) -> u64 {
        self.driver.sim.state().gpus[gpu].used_bytes
    }

    /// The bytes that count against the quota on a GPU.
    pub(crate) fn charged_of(&self, gpu: usize) -> u64 {
        self.worker().parts.state.books().ledger.usage(gpu).map_or(0, |usage| usage.used_bytes)
    }

    /// The bytes of the first GPU that are in use.
    pub(crate) fn used(&self) -> u64 {
        self.used_of(0)
    }

    pub(crate) fn charged(&self) -> u64 {
        self.charged_of(0)
    }

    pub(crate) fn gpus(&self) -> usize {
        self.settings.gpus.len()
    }

    pub(crate) fn quota_of(&self, gpu: usize) -> u64 {
        self.settings.gpus[gpu].limit_bytes
    }

    pub(crate) fn uuid_of(&self, gpu: usize) -> [u8; 16] {
        self.worker().parts.state.uuids[gpu]
    }
}

/// Has the worker finish the call that the former worker has left in the slot of threads that die. The calls of the
/// other slot are all over, because its thread lives.
fn finish_left_call(worker: &Worker) {
    let slot = worker.parts.state.journal.slot(DYING_SLOT);
    take_over_slot(slot);
    recover(&worker.parts, &worker.listeners, slot, &mut Scratch::default());
    // The next thread that dies uses this slot.
    slot.set_worker_thread(ProcessId { pid: 0, start_ticks: 0 });
}

impl Drop for World {
    fn drop(&mut self) {
        self.end_worker();
    }
}
