//! The ways to isolate a container, each behind the trait [`Isolation`].
//!
//! Knows how a plan becomes isolation. Backends must not know each other. [`choose`] says which one
//! new containers get: a host asks once, and carries the answer.

pub mod gate;

pub mod km;

pub mod none;

use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use thiserror::Error;

use cgpu_core::calls::{Calls, Durations};
use cgpu_core::gpu::Gpu;
use cgpu_core::plan::{Change, GpuChange, GpuRules, Kind, Plan};
use cgpu_core::processor::ProcessorShares;
use cgpu_host::config;
use cgpu_host::events::Event;
use cgpu_host::process::ProcessId;
use cgpu_inject::bundle::Edits;

/// A container as a backend sees it.
#[derive(Debug, Clone, Copy)]
pub struct Tenant<'a> {
    /// The container's id, as its engine calls it.
    pub id: &'a str,
    /// 12 ASCII characters, unique among the registered containers.
    pub short_id: &'a str,
    /// What is reserved for it.
    pub plan: &'a Plan,
}

/// How a container is about to be made.
#[derive(Debug)]
pub struct Launch<'a> {
    /// Whether it gets a mount namespace of its own, new with it.
    pub own_mounts: bool,
    /// How much of a processor it may take, in thousandths; `None` without a limit.
    pub processor_limit: Option<u64>,
    /// Its weight of the processor; `None` for the default one.
    pub processor_shares: Option<ProcessorShares>,
    pub bundle: &'a Path,
    /// Its runtime's root.
    pub root: &'a str,
    /// What its engine calls it, where that is known.
    pub name: Option<&'a str>,
    /// The process that becomes its runtime.
    pub launcher: ProcessId,
    /// The runtime's own state of it, where that is known to come.
    pub state_file: Option<&'a Path>,
    /// The configuration; `None` for the default one.
    pub config: Option<&'a Path>,
}

/// Starts what has to be there before the runtime makes a container, as its [`Launch`] says.
///
/// # Errors
///
/// Where it can't be started. What was is ended by [`deactivate`](Isolation::deactivate).
pub type Launcher = Box<dyn FnOnce(Tenant<'_>, Launch<'_>) -> Result<(), BackendError>>;

/// What a backend sees of one container.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Observed {
    /// The 12-character id.
    pub short_id: String,
    /// What it has on each GPU under a quota; `None` where its monitor doesn't answer.
    pub instances: Option<Vec<Instance>>,
    /// Its calls of the driver, by what became of them; `None` if they aren't counted.
    pub calls: Option<Calls>,
    /// How long these took; `None` if that isn't measured.
    pub durations: Option<Durations>,
    /// How often its monitor was updated; `None` where it has no monitor, or that isn't known.
    pub monitor_updates: Option<u64>,
    /// How many processes of it hold the driver open; `None` where that isn't known.
    pub process_count: Option<usize>,
    /// Programs of the host that have a way to the memory of a container which has ended: pid and name.
    pub leaked_to: Vec<(i32, String)>,
}

/// What is left of a container whose processes have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leftover {
    /// Nothing that its isolation has to wait for.
    Nothing,
    /// A program of the host has a way to its memory, or that isn't known yet. This monitor of it stays as long as that
    /// is so.
    WatchedBy(ProcessId),
    /// Its monitor doesn't answer.
    Unknown,
}

/// What a backend knows of one container on one GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct Instance {
    pub gpu_index: u32,
    /// The quota in bytes.
    pub memory_limit_bytes: u64,
    /// Memory in use in bytes; `None` where unknown.
    pub memory_used_bytes: Option<u64>,
    /// Each process and its memory there in bytes, as far as the backend reports it. Their sum can be
    /// less than what is in use.
    pub processes: Vec<(i32, u64)>,
    /// The part of the GPU's computing time that it had lately, from 0 to 1; `None` where that isn't known,
    /// or wasn't asked for.
    pub compute_held: Option<f64>,
    /// Why the driver doesn't hold its share of the GPU's computing time, where that is known.
    pub share_refused: Option<String>,
}

/// One way of isolating containers on a GPU.
pub trait Isolation: std::fmt::Debug {
    /// Whether it works on this host.
    ///
    /// # Errors
    ///
    /// Why not, and what to do.
    fn usable(&self) -> Result<(), BackendError>;

    /// Adds to the edits of a bundle, whose seccomp profile is `profile`, what isolation needs there.
    ///
    /// # Errors
    ///
    /// If isolation can't hold next to the profile.
    fn edit(&self, profile: Option<&Value>, edits: &mut Edits) -> Result<(), BackendError>;

    /// Begins to start what has to be there before the runtime makes a container: it takes its time, and
    /// the container need not be known yet. The [`Launcher`] does the rest. Where it is dropped, what
    /// was begun ends. What can't be begun now the launcher tries again, and fails where that fails.
    fn begin_launch(&self) -> Launcher {
        Box::new(|_, _| Ok(()))
    }

    /// Brings this process, and all that comes of it, behind the isolation of a container
    /// that it is about to make, or to start another process in.
    ///
    /// # Errors
    ///
    /// Where it can't: then this process must not become a runtime.
    fn enter(&self, _tenant: Tenant<'_>) -> Result<(), BackendError> {
        Ok(())
    }

    /// Turns isolation on for a container whose processes have not started yet.
    ///
    /// # Errors
    ///
    /// Where any part did not take; then nothing of it is left behind.
    fn activate(&self, tenant: Tenant<'_>) -> Result<(), BackendError>;

    /// Ends a container whose isolation is lost, and whose first process lives, where memory is taken by what it gave to
    /// others. The event of that, if it was ended.
    ///
    /// # Errors
    ///
    /// If it can't be found out.
    fn end_if_taken(
        &self,
        _tenant: Tenant<'_>,
        _first: ProcessId,
    ) -> Result<Option<Event>, BackendError> {
        Ok(None)
    }

    /// What is left of a container whose processes have ended or are about to; waits so long for an answer.
    fn leftover(&self, _short_id: &str, _timeout: Duration) -> Leftover {
        Leftover::Nothing
    }

    /// Ends isolation of a container that is gone; succeeds where nothing is left.
    ///
    /// # Errors
    ///
    /// What could not be removed; the rest is.
    fn deactivate(&self, short_id: &str) -> Result<(), BackendError>;

    /// The containers that it holds now, of those with these short ids, or of all; one whose monitor
    /// doesn't answer at once comes without usage.
    ///
    /// # Errors
    ///
    /// Where it can't be seen which there are.
    fn list(&self, short_ids: Option<&[&str]>) -> Result<Vec<Observed>, BackendError>;

    /// Changes a running container.
    ///
    /// # Errors
    ///
    /// Where the change did not take, or this backend has no such thing.
    fn set(&self, tenant: Tenant<'_>, change: Change) -> Result<(), BackendError>;
}

/// The backend that the configuration means on this host, and why in a sentence for
/// the log.
#[must_use]
pub fn choose(isolation: &config::Isolation) -> (Kind, &'static str) {
    chosen(isolation.backend, isolation.km_root.join("inst_ctl").exists())
}

/// The backend by what was configured and whether the vendor's module is loaded:
/// that was installed on purpose. Pure.
fn chosen(configured: config::Backend, km_loaded: bool) -> (Kind, &'static str) {
    match (configured, km_loaded) {
        (config::Backend::Km, _) => (Kind::Km, "configured"),
        (config::Backend::Gate, _) => (Kind::Gate, "configured"),
        (config::Backend::None, _) => {
            (Kind::None, "configured: quotas are reported but not enforced")
        }
        (config::Backend::Auto, true) => (Kind::Km, "auto: the vendor's module is loaded"),
        (config::Backend::Auto, false) => (Kind::Gate, "auto: the vendor's module isn't loaded"),
    }
}

/// The backend of that kind.
#[must_use]
pub fn isolation(kind: Kind, config: &config::Config) -> Box<dyn Isolation> {
    match kind {
        Kind::Km => Box::new(km::Km::new(config.isolation.km_root.clone())),
        Kind::None => Box::new(none::Unisolated),
        Kind::Gate => Box::new(gate::Gate::new(config)),
    }
}

/// Variables, and their values, by which programs do without what the isolation of `plan` doesn't
/// serve; for processes that have none of the name.
#[must_use]
pub fn variables(plan: &Plan) -> &'static [(&'static str, &'static str)] {
    match plan.backend {
        Kind::Gate => gate::variables(plan),
        Kind::Km | Kind::None => &[],
    }
}

/// The rules of the GPU `index`, if the backend of that kind keeps them itself.
#[must_use]
pub fn gpu_rules(kind: Kind, config: &config::Config, index: u32) -> Option<GpuRules> {
    match kind {
        Kind::Km => km::Km::new(config.isolation.km_root.clone()).gpu_rules(index),
        Kind::Gate | Kind::None => None,
    }
}

/// Changes the rules of a GPU, which was found possible. If the backend of that kind doesn't keep them
/// itself, checks only that the driver can enforce the change.
///
/// # Errors
///
/// If the change was not applied, or the driver can't enforce it.
pub fn set_gpu(
    kind: Kind,
    config: &config::Config,
    gpu: &Gpu,
    change: GpuChange,
) -> Result<(), BackendError> {
    match kind {
        Kind::Km => Ok(km::Km::new(config.isolation.km_root.clone()).set_gpu(gpu.index, change)?),
        Kind::Gate => Ok(gate::Gate::new(config).see_that_it_holds(gpu, change)?),
        Kind::None => Ok(()),
    }
}

/// Why a backend could not do its part.
#[derive(Debug, Error)]
pub enum BackendError {
    /// The gate.
    #[error(transparent)]
    Gate(#[from] gate::GateError),
    /// The vendor's module.
    #[error(transparent)]
    Km(#[from] km::KmError),
    /// No isolation.
    #[error(transparent)]
    None(#[from] none::NoneError),
}

/// What stands against a change, for callers that report it in a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// More is in use than would be allowed.
    InUse,
    /// The backend doesn't hold such a thing.
    NotHeld,
    /// Something fails that should not.
    Failure,
}

impl BackendError {
    /// What stands against a change that failed so.
    #[must_use]
    pub fn obstacle(&self) -> Obstacle {
        match self {
            BackendError::Gate(gate::GateError::InUse { .. })
            | BackendError::Km(km::KmError::InUse { .. }) => Obstacle::InUse,
            BackendError::Gate(gate::GateError::Unenforced { .. })
            | BackendError::Km(km::KmError::NoQuota { .. })
            | BackendError::None(_) => Obstacle::NotHeld,
            BackendError::Gate(_) | BackendError::Km(_) => Obstacle::Failure,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The auto backend is the kernel module if that is loaded, and never none.
    #[test]
    fn auto_backend_takes_the_loaded_module_never_none() {
        use config::Backend::{Auto, Gate, Km, None};
        for (configured, km_loaded, kind) in [
            (Auto, true, Kind::Km),
            (Auto, false, Kind::Gate),
            (Km, false, Kind::Km),
            (Gate, true, Kind::Gate),
            (None, true, Kind::None),
        ] {
            assert_eq!(chosen(configured, km_loaded).0, kind, "{configured:?} {km_loaded}");
        }
    }
}
