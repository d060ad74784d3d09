//! A container on GPUs in memory: its monitor, and the calls of its programs.
#![allow(unsafe_code, reason = "descriptors are taken along by number")]

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cgpu_sim::Node;
use nix::libc::seccomp_notif;
use tempfile::TempDir;

use super::start::settings;
use super::{
    Call, CallerGets, Fate, LISTENER, ModelDriver, ModelFile, Program, QUOTA, TOTAL, serve_by,
};
use crate::audit::{audit, scan_exports};
use crate::caller::{Caller, Interrupted, Listener, Listeners, TestCallers};
use crate::case::undo_unclaimed;
use crate::daemon::{RetainedFiles, Service, retained_descriptors};
use crate::driver::free_pins_soon;
use crate::gate::settings::Settings;
use crate::shared::Monitor;
use crate::snapshot::{CounterValues, FileNumbers, Record, Snapshot};
use crate::state::Occasion;
use crate::sync::ChangeFlag;
use crate::uvm::{ScanTimes, scan_files};

/// How many files there are to export memory to.
const BOXES: usize = 3;

/// How long [`World::scan`] searches for files that no program has any more.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A container with its monitor, on GPUs in memory.
pub(crate) struct World {
    pub(crate) driver: Arc<ModelDriver>,
    /// `None` only while the world changes it or ends.
    service: RefCell<Option<Arc<Service>>>,
    settings: Settings,
    callers: Arc<TestCallers>,
    listeners: Arc<Listeners>,
    wake: Arc<ChangeFlag>,
    /// Files of `nvidiactl` to export memory to. All programs have them.
    pub(crate) boxes: Vec<ModelFile>,
    _place: TempDir,
    next_id: Cell<u64>,
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
        let boxes = (0..BOXES).map(|_| driver.open(Node::Control)).collect::<Vec<_>>();
        let process = std::process::id();
        boxes.iter().for_each(|file| _ = driver.number_for(file, Node::Control, process));
        let callers = Arc::new(TestCallers::default());
        let listeners = Arc::new(Listeners::new().expect("a signal's handler"));
        let file = File::open("/dev/null").expect("it is there").into();
        listeners.add(Listener::of_model(LISTENER, file, Arc::clone(&callers)));
        let world = World {
            driver,
            service: RefCell::new(None),
            settings,
            callers,
            listeners,
            wake: Arc::new(ChangeFlag::new().expect("a descriptor")),
            boxes,
            _place: place,
            next_id: Cell::new(0),
        };
        world.begin((Vec::new(), CounterValues::default(), 0), RetainedFiles::default());
        world
    }

    fn begin(&self, known: (Vec<Record>, CounterValues, u64), retained: RetainedFiles) {
        let service = Service::new(self.settings.clone(), known, &self.listeners, &self.wake);
        let service = service.expect("it begins");
        service.resume(retained).expect("the driver answers");
        self.service.replace(Some(Arc::new(service)));
    }

    /// What serves now.
    pub(crate) fn service(&self) -> Arc<Service> {
        Arc::clone(self.service.borrow().as_ref().expect("it is there"))
    }

    pub(crate) fn monitor(&self) -> Arc<Monitor> {
        Arc::clone(&self.service().monitor)
    }

    /// Starts a program of the container, with a client and a device of each GPU.
    pub(crate) fn program(&self) -> Program<'_> {
        Program::start(self)
    }

    /// Updates the monitor: another service goes on with what a snapshot has.
    pub(crate) fn update(&self) {
        let service = self.service();
        let monitor = &*service.monitor;
        let interrupted = monitor.interrupted.as_ref();
        let (replies, answered) = interrupted.map(Interrupted::records).unwrap_or_default();
        let known = (monitor.state().records(), monitor.counters.values(), monitor.updates + 1);
        let snapshot = Snapshot {
            version: String::new(),
            settings: self.settings.clone(),
            updates: known.2,
            records: known.0.clone(),
            counters: known.1,
            replies,
            answered,
            descriptors: retained_descriptors(&service.monitor, FileNumbers::default()),
            launcher: None,
            had_listener: true,
            next_listener: LISTENER + 1,
        };
        let snapshot = Snapshot::decode(&snapshot.encode().expect("it is data")).expect("the same");
        let take = |number: &i32| {
            // SAFETY: the service has it open until it is dropped below.
            unsafe { BorrowedFd::borrow_raw(*number) }.try_clone_to_owned()
        };
        let retained = RetainedFiles::take(&snapshot, take).expect("descriptors");
        self.begin((snapshot.records, snapshot.counters, snapshot.updates), retained);
        drop(service);
        self.driver.close_unused();
    }

    fn new_id(&self) -> u64 {
        self.next_id.set(self.next_id.get() + 1);
        self.next_id.get()
    }

    /// Lets a program make an ioctl on one of its files, with struct and parameters in the shared memory. Returns what
    /// the program gets. Makes a call that was passed through.
    pub(crate) fn ioctl(&self, program: &Program<'_>, call: &Call, fate: Fate) -> CallerGets {
        let mut id = self.new_id();
        let notice = program.notice(id, call);
        self.time_passes();
        match fate {
            Fate::Interrupted => {}
            Fate::ReplyIsLost => self.callers.add(id, Caller::GoesThen),
            Fate::Answered | Fate::AnswerIsLost => self.callers.add(id, Caller::Waits),
        }
        serve_by(&self.service(), &self.listeners, notice);
        if fate == Fate::AnswerIsLost {
            if !matches!(self.callers.remove(id), Some(Caller::Answered(0, 0))) {
                return CallerGets::Nothing;
            }
            id = self.new_id();
            self.callers.add(id, Caller::Waits);
            serve_by(&self.service(), &self.listeners, seccomp_notif { id, ..notice });
        }
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

    /// Lets the monitor ask the driver and the kernel what there really is.
    pub(crate) fn audit(&self) {
        self.driver.close_unused();
        audit(&self.monitor(), Occasion::Death);
    }

    /// Lets the monitor do what it does while time passes: undo calls whose answers no caller took, and audit.
    pub(crate) fn rest(&self) {
        undo_unclaimed(&self.monitor());
        self.audit();
        self.driver.close_unused();
    }

    /// Lets time pass: the monitor may search for files again at once.
    fn time_passes(&self) {
        let monitor = &self.service().monitor;
        *monitor.exports.scanned.lock() = None;
        *monitor.uvm_files.scan_times.lock() = ScanTimes::default();
    }

    /// Lets time pass until the monitor has found all files that no program has any more.
    pub(crate) fn scan(&self) {
        let begun = Instant::now();
        while self.retained_files() > 0 && begun.elapsed() < TIMEOUT {
            self.rest();
            self.time_passes();
            scan_exports(&self.monitor());
            scan_files(&self.monitor(), Occasion::Refusal);
            free_pins_soon(&self.monitor());
            self.driver.close_unused();
        }
    }

    /// How many files with memory the monitor retains.
    pub(crate) fn retained_files(&self) -> usize {
        let monitor = self.monitor();
        monitor.exports.files.lock().len() + monitor.uvm_files.all().len()
    }

    /// The bytes of a GPU that are in use.
    pub(crate) fn used_of(&self, gpu: usize) -> u64 {
        self.driver.sim.state().gpus[gpu].used_bytes
    }

    /// The bytes that count against the quota on a GPU.
    pub(crate) fn charged_of(&self, gpu: usize) -> u64 {
        self.monitor().state().ledger.usage(gpu).map_or(0, |usage| usage.used_bytes)
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
        self.monitor().uuids[gpu]
    }
}
