//! What all threads of a monitor share: what is known of the container, each part with its lock.

use std::collections::BTreeSet;
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use crate::audit::{AuditHistory, EscapeFindings};
use crate::caller::{AuditWait, Interrupted, PidMaps, Targets};
use crate::compute::{Shares, TurnsThread, UnsupervisedContainers};
use crate::driver::{Exports, MonitorClient, WarningTimes};
use crate::gate::settings::Settings;
use crate::gate::wire::End;
use crate::log::ContainerLog;
use crate::own_ranges::own_ranges;
use crate::processes::ProvenanceIndex;
use crate::snapshot::{Count, CounterValues, Counters, Record};
use crate::state::{AuditInterval, ContainerState, Idleness, RmLock};
use crate::sync::{ChangeFlag, Lock, Work};
use crate::uvm::{AddressSpaces, UvmFiles};
use cgpu_core::ledger::Process;
use nvrm::release::Standing;
use nvrm::{Release, about};

/// The monitor of a container. The layers have functions that take it; a layer uses the functions and the fields of
/// those below it alone. The fields are in the order of the layers of their types, the lowest first.
#[derive(Debug)]
pub(crate) struct Monitor {
    // What is the same as long as the program runs.
    pub(crate) settings: Arc<Settings>,
    pub(crate) release: Release,
    /// UUIDs of the container's GPUs, in the container's order.
    pub(crate) uuids: Vec<about::Uuid>,
    /// The monitor's own memory and its surroundings, as first and last addresses.
    pub(crate) own_ranges: Vec<(u64, u64)>,
    /// How often the monitor's program was replaced.
    pub(crate) updates: u64,

    // `snapshot`, `log`, `sync`
    pub(crate) counters: Arc<Counters>,
    pub(crate) log: ContainerLog,
    /// Which threads are at work.
    pub(crate) work: Work,

    // `state`
    state: Lock<ContainerState>,
    /// The ledger's mark when the state was last closed.
    mark: AtomicU64,
    /// Whether the status has changed: the state, or the counted calls.
    is_status_changed: AtomicBool,
    /// Wakes the first thread.
    wake: Arc<ChangeFlag>,
    idleness: Lock<Idleness>,
    end: Lock<End>,
    /// Orders the calls that make, name or free objects one after another.
    pub(crate) rm_lock: RmLock,

    // `caller`
    /// Wakes the audit's thread.
    pub(crate) audit_wait: AuditWait,
    /// The threads that called.
    pub(crate) targets: Targets,
    pub(crate) pid_maps: PidMaps,
    /// Replies that callers didn't take. `None` where no signal interrupts a caller.
    pub(crate) interrupted: Option<Interrupted>,

    // `driver`
    /// The monitor's own client of the driver, while it is open.
    pub(crate) client: Lock<Option<Arc<MonitorClient>>>,
    /// When the log last reported what the driver does not answer.
    pub(crate) warned: WarningTimes,
    /// The files that memory was exported to, which the monitor has open.
    pub(crate) exports: Exports,

    // `processes`
    /// What distinguishes the container's files and processes from others.
    pub(crate) provenances: ProvenanceIndex,
    /// Processes that the monitor has ended and that may still be there.
    pub(crate) killed: Lock<BTreeSet<Process>>,

    // `compute`
    /// Shares of the GPUs' computing time.
    pub(crate) shares: Shares,
    pub(crate) turns_thread: TurnsThread,
    /// By GPU: the containers whose turns this monitor takes. Locked while it does.
    pub(crate) unsupervised: Lock<Vec<UnsupervisedContainers>>,

    // `case`
    /// The mount on which the file of the last call was opened.
    pub(crate) last_mount: AtomicU64,

    // `uvm`
    /// The files of `nvidia-uvm`, which the monitor has open.
    pub(crate) uvm_files: UvmFiles,
    /// The address spaces with mappings of these files.
    pub(crate) spaces: AddressSpaces,

    // `audit`
    pub(crate) history: AuditHistory,
    /// What the checks of outside processes found.
    pub(crate) escapes: Lock<EscapeFindings>,
}

/// The [`ContainerState`], locked. If their holder has changed what the status reports, dropping them sets the flag.
#[derive(Debug)]
pub(crate) struct OpenState<'a> {
    state: MutexGuard<'a, ContainerState>,
    monitor: &'a Monitor,
    changed: bool,
}

impl Deref for OpenState<'_> {
    type Target = ContainerState;

    fn deref(&self) -> &ContainerState {
        &self.state
    }
}

impl DerefMut for OpenState<'_> {
    fn deref_mut(&mut self) -> &mut ContainerState {
        self.changed = true;
        &mut self.state
    }
}

impl Drop for OpenState<'_> {
    fn drop(&mut self) {
        if self.changed {
            let mark = self.state.ledger.mark();
            if self.monitor.mark.swap(mark, Ordering::Relaxed) != mark {
                self.monitor.note_status_change();
            }
        }
    }
}

impl Monitor {
    /// Makes a monitor from the settings, and from the records and counters of a snapshot, of which a new container has
    /// none. Fails where the settings name an impossible driver or GPU, the host's mount namespace can't be found out
    /// ([`Targets::new`]), or the process can have no further descriptors.
    pub(crate) fn open(
        settings: Settings,
        records: Vec<Record>,
        counters: &CounterValues,
        updates: u64,
        wake: Arc<ChangeFlag>,
    ) -> io::Result<Self> {
        let version = settings.driver.parse().map_err(io::Error::other)?;
        let release = Release::of(version).map_err(io::Error::other)?;
        if release.standing() != Standing::Checked {
            // `cgpu doctor` reports this once for the host.
            tracing::debug!(driver = %version, "the driver's structs: {}", release.standing());
        }
        let uuids = settings.gpus.iter().map(|gpu| {
            about::uuid(&gpu.uuid).ok_or_else(|| io::Error::other("a GPU's UUID is none"))
        });
        let uuids: Vec<about::Uuid> = uuids.collect::<io::Result<_>>()?;
        let state = ContainerState::open(records, &settings.gpus, &settings.nodes);
        let counters = Arc::new(Counters::of(counters));
        let settings = Arc::new(settings);
        let targets = Targets::new(settings.spares_host)?;
        let interrupted = settings.interruptible.then(Interrupted::default);
        let uvm_files = UvmFiles::new(state.creators.in_progress().is_some());
        let shares = Shares::new(uuids.len());
        let unsupervised = uuids.iter().map(|_| UnsupervisedContainers::default()).collect();
        Ok(Monitor {
            log: ContainerLog::new(Arc::clone(&settings), Arc::clone(&counters)),
            settings,
            release,
            uuids,
            own_ranges: own_ranges(&std::fs::read_to_string("/proc/self/maps")?),
            updates,
            counters,
            work: Work::default(),
            state: Lock::new(state),
            mark: AtomicU64::new(0),
            is_status_changed: AtomicBool::new(false),
            wake,
            idleness: Lock::new(Idleness::new(0, Instant::now())),
            end: Lock::default(),
            rm_lock: RmLock::default(),
            audit_wait: AuditWait::new()?,
            targets,
            pid_maps: PidMaps::default(),
            interrupted,
            client: Lock::default(),
            warned: WarningTimes::default(),
            exports: Exports::default(),
            provenances: ProvenanceIndex::default(),
            killed: Lock::default(),
            shares,
            turns_thread: TurnsThread::default(),
            unsupervised: Lock::new(unsupervised),
            last_mount: AtomicU64::new(0),
            uvm_files,
            spaces: AddressSpaces::default(),
            history: AuditHistory::default(),
            escapes: Lock::default(),
        })
    }

    /// The place of the GPU with this UUID in the container's order; `None` where the container has no such GPU.
    pub(crate) fn gpu_of(&self, uuid: &about::Uuid) -> Option<usize> {
        self.uuids.iter().position(|of| of == uuid)
    }

    /// Opens the container's state. Other threads wait until the returned value is dropped.
    pub(crate) fn state(&self) -> OpenState<'_> {
        #[cfg(test)]
        crate::call_counters::count(|counted| counted.state += 1);
        let state = self.state.lock();
        OpenState { state, monitor: self, changed: false }
    }

    /// Notes a change of the status, and wakes the first thread if the last change was reported.
    pub(crate) fn note_status_change(&self) {
        if !self.is_status_changed.swap(true, Ordering::AcqRel) {
            self.wake.set();
        }
    }

    /// Whether the status has changed since it was last reported.
    pub(crate) fn has_status_change(&self) -> bool {
        self.is_status_changed.load(Ordering::Acquire)
    }

    /// Notes that the status is about to be reported.
    pub(crate) fn take_status_change(&self) {
        self.is_status_changed.store(false, Ordering::Release);
    }

    /// How far the container's end has come.
    pub(crate) fn end(&self) -> End {
        self.end.lock().clone()
    }

    /// Sets how far the container's end has come. `true` where that is something new.
    pub(crate) fn set_end(&self, end: End) -> bool {
        let mut now = self.end.lock();
        let is_new = *now != end;
        *now = end;
        drop(now);
        if is_new {
            self.note_status_change();
        }
        is_new
    }

    /// Counts a call: what became of it, and how long it took.
    pub(crate) fn count(&self, became: Count, took: Duration) {
        self.counters.add_duration(took);
        self.counters.count(became);
        self.note_status_change();
    }

    pub(crate) fn count_killed(&self) {
        self.counters.count(Count::Killed);
        self.note_status_change();
    }

    pub(crate) fn is_idle(&self, now: Instant) -> bool {
        self.idleness(now).is_idle(now)
    }

    /// How often the container is audited; `has_called`: whether any of its processes has ever called.
    pub(crate) fn audit_interval(&self, has_called: bool, now: Instant) -> AuditInterval {
        self.idleness(now).audit_interval(has_called, now)
    }

    fn idleness(&self, now: Instant) -> MutexGuard<'_, Idleness> {
        let mut idleness = self.idleness.lock();
        idleness.note(self.counters.calls().received(), now);
        idleness
    }
}
