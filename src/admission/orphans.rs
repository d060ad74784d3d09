//! What a loss leaves behind: containers that no monitor serves or no engine starts, monitors
//! without a record.

use std::fs;
use std::path::Path;

use super::AdmissionError;
use crate::admission::Admission;
use crate::container_names;
use crate::host::tenant;
use cgpu_core::plan::{Holding, Kind};
use cgpu_host::events::Event;
use cgpu_host::process::{ProcessId, age_s};
use cgpu_host::registry::{Holder, Key, Locked, Record, RegistryError};
use cgpu_monitor::gate::launch::MonitorDir;

/// How long after its creation a container that isn't started has been forgotten, in seconds:
/// engines start it at once.
pub const UNSTARTED_S: u64 = 60;

/// What the log says where it can't be seen what a lost monitor left.
const UNSEEN: &str = "it can't be seen whether the memory of a container whose monitor is lost is taken from outside: the \
    next create looks again";

/// A monitor's directory whose container has no record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Orphan {
    pub short_id: String,
    /// The monitor, if it lives: then the container may, too, and holds memory that isn't counted.
    pub monitor: Option<ProcessId>,
}

/// What was taken back.
#[derive(Debug)]
pub struct Collected {
    /// Records of containers that are gone.
    pub records: Vec<Record>,
    /// Monitors without a record; those whose monitor lives stay.
    pub orphans: Vec<Orphan>,
}

/// The state of a registered container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    /// Its runtime is making it.
    Reserved,
    /// It was made and never started, for so many seconds.
    Created {
        /// Since its first process began.
        age_s: u64,
    },
    /// It runs.
    Active,
    /// Its monitor has ended: its driver calls fail.
    Closed,
    /// It has ended, and its quota stays reserved: a program of the host has a way to its memory.
    Leaked,
}

impl Condition {
    /// What `cgpu ps` calls it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Condition::Reserved => "reserved",
            Condition::Created { .. } => "created",
            Condition::Active => "active",
            Condition::Closed => "closed",
            Condition::Leaked => "leaked",
        }
    }
}

impl Admission<'_> {
    /// How the container of `record` stands.
    #[must_use]
    pub fn condition(&self, record: &Record) -> Condition {
        self.condition_where(record, || {
            let place = MonitorDir::of(&self.host.config.state_dir, &record.short_id);
            !matches!(place.process(), Ok(None))
        })
    }

    /// The same, where `lives` says whether its monitor, if it has one, is there.
    pub fn condition_where(&self, record: &Record, lives: impl FnOnce() -> bool) -> Condition {
        if record.is_leaked() {
            return Condition::Leaked;
        }
        let Holder::Active { init } = &record.holder else { return Condition::Reserved };
        if record.plan.backend == Kind::Gate && !lives() {
            return Condition::Closed;
        }
        match init.filter(|_| waits_to_be_started(&record.key)) {
            Some(init) => Condition::Created { age_s: age_s(init) },
            None => Condition::Active,
        }
    }

    /// The containers that `is_meant` says by what they hold, and whose monitor has exited before them, if what
    /// it left has not been checked.
    pub(super) fn closed(
        &self,
        locked: &Locked<'_>,
        is_meant: impl Fn(&Holding) -> bool,
    ) -> Result<Vec<Record>, RegistryError> {
        let place = |short_id: &str| MonitorDir::of(&self.host.config.state_dir, short_id);
        locked.records_where(|short_id, holding| {
            is_meant(holding) && place(short_id).is_lost_and_not_seen()
        })
    }

    /// Reports once of each of these containers that its monitor is lost, and ends it if its memory is taken from
    /// outside. Asks the driver, which may hang: the registry isn't locked meanwhile.
    pub(super) fn handle_closed(&self, closed: Vec<Record>) {
        for record in closed {
            // A container that has ended ends its monitor.
            let Some(first) = record.holder.init().filter(|first| first.alive()) else { continue };
            let place = MonitorDir::of(&self.host.config.state_dir, &record.short_id);
            let name = container_names::of(&record);
            let report = |event: Event| {
                let (id, root) = (record.container_id(), &record.key.root);
                self.sink().report(event.of(id, name.as_deref(), root));
            };
            let check = || self.host.isolation(Kind::Gate).end_if_taken(tenant(&record), first);
            if let Err(error) = place.handle_closed(report, check) {
                let (id, error): (_, &dyn std::error::Error) = (&record.key.id, &error);
                tracing::warn!(id, error, "{UNSEEN}");
            }
        }
    }

    /// The monitors without a record, for readers without the lock.
    ///
    /// # Errors
    ///
    /// Where the registry or the monitors' directory can't be read.
    pub fn orphans(&self) -> Result<Vec<Orphan>, AdmissionError> {
        let state_dir = &self.host.config.state_dir;
        // A record is there before its monitor's directory is, and after it.
        let before = orphans(state_dir, |_| false)?;
        let records = self.host.check_registry()?.records()?;
        let is_registered = |name: &str| records.iter().any(|record| record.short_id == name);
        let mut now = orphans(state_dir, is_registered)?;
        now.retain(|orphan| before.iter().any(|other| other.short_id == orphan.short_id));
        Ok(now)
    }
}

/// The monitors' directories of containers that aren't registered.
pub(super) fn orphans(
    state_dir: &Path,
    is_registered: impl Fn(&str) -> bool,
) -> Result<Vec<Orphan>, AdmissionError> {
    let unlisted = |source| {
        let path = MonitorDir::all(state_dir);
        AdmissionError::Monitors { path, source }
    };
    let all = MonitorDir::list(state_dir).map_err(unlisted)?;
    let of = |place: &MonitorDir| {
        let short_id = place.short_id();
        // One whose monitor can't be read must not be cleared away.
        let monitor = (!is_registered(&short_id)).then(|| place.process().ok()).flatten()?;
        Some(Orphan { short_id, monitor })
    };
    Ok(all.iter().filter_map(of).collect())
}

/// The command that removes a container whose engine has forgotten it.
#[must_use]
pub fn deletion(key: &Key) -> String {
    format!("cgpu-runtime --root {} delete --force {}", key.root, key.id)
}

/// Whether the runtime has created the container and it isn't started: runc and crun keep a FIFO
/// next to its state until then (`libcontainer/container_linux.go`, `handleFifoResult`;
/// `libcrun/status.c`, `libcrun_status_write_exec_fifo`).
fn waits_to_be_started(key: &Key) -> bool {
    // An id that is no name names no file of theirs.
    !key.id.contains('/')
        && fs::symlink_metadata(Path::new(&key.root).join(&key.id).join("exec.fifo")).is_ok()
}
