//! The gate: quotas held at the driver's ioctl boundary, by a monitor for each container.
//!
//! Knows what a plan becomes for a monitor: its settings, its place. What becomes of the calls is not known here.

mod compute_use;
mod kernel_support;
mod slices;
mod unknown_driver;

pub use compute_use::note_held;
pub use kernel_support::{AbilityError, check_kernel};

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use thiserror::Error;

use super::{BackendError, Instance, Isolation, Launch, Launcher, Leftover, Observed, Tenant};
use cgpu_core::plan::{Change, GpuChange, POLICY_NATIVE, Plan};
use cgpu_host::config;
use cgpu_host::events::Event;
use cgpu_host::process::ProcessId;
use cgpu_inject::bundle::Edits;
use cgpu_inject::node_creation::device_root;
use cgpu_monitor::daemon::{self, Unanswered};
use cgpu_monitor::gate::client::{AskError, ask, ask_all, is_listening};
use cgpu_monitor::gate::entry::{EnterError, abilities, enter};
use cgpu_monitor::gate::launch::{LaunchError, MonitorDir, StartedMonitor, start_monitor};
use cgpu_monitor::gate::profile::{ProfileError, check_no_listener};
use cgpu_monitor::gate::settings::{Gpu, Identity, Managed, Node, NodeKind, Settings};
use cgpu_monitor::gate::status_file;
use cgpu_monitor::gate::wire::{Answer, End, ProcessStatus, Question, Status};
use nvrm::{Release, ReleaseError, Version, about};

/// The program that answers calls.
pub const MONITOR: &str = "cgpu-monitor";

/// How long all monitors together may take to say how things stand.
const POLL_TIMEOUT: Duration = Duration::from_millis(200);

/// How long after an answer a monitor is asked again how far a container's end has come.
const END_PAUSE: Duration = Duration::from_millis(5);

/// The backend that needs no kernel module.
#[derive(Debug, Clone)]
pub struct Gate {
    state_dir: PathBuf,
    managed: Managed,
    unknown_driver: config::UnknownDriver,
    channel_groups: u32,
    dev: PathBuf,
    proc_root: PathBuf,
    log: String,
    monitor: PathBuf,
}

/// Why the gate could not do its part.
#[derive(Debug, Error)]
pub enum GateError {
    /// A GPU whose memory is the kernel's, too: what a program has of the kernel may lie there, in no
    /// call of the driver's and in none of its usage values.
    #[error(
        "the gate can't hold memory of a GPU that the kernel gives out as its own ({}); share it by \
         other means, or set [isolation] backend = \"none\" in the configuration to share GPUs \
         without isolation",
        path.display()
    )]
    Coherent {
        /// The file that shows it; other GPUs have no such file (`nv-procfs.c`).
        path: PathBuf,
    },
    /// There is no driver, or none that reports its version.
    #[error(
        "the gate needs to know the driver's version, and {} {problem}; load the driver: \
         `nvidia-modprobe`, or `nvidia-smi` as root",
        path.display()
    )]
    NoVersion {
        /// Where it should be.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A driver that the tables don't have.
    #[error(transparent)]
    Release(#[from] ReleaseError),
    /// A driver that no table has, and that can't be asked what containers hold.
    #[error(
        "driver {version} is newer than the last that this version knows ({checked}), and a monitor \
         could not see what containers hold: {unanswered}; install a newer cgpu or an older driver, \
         or set [isolation] unknown_driver = \"serve\" in the configuration to have quotas that \
         no audit checks"
    )]
    Unknown {
        version: Version,
        /// The last one before it that is known.
        checked: Version,
        /// What it doesn't answer.
        #[source]
        unanswered: Unanswered,
    },
    /// The driver sets no slices.
    #[error(
        "driver {version} can't share the computing time of GPU {index} ({why}); memory is held all the \
         same: ask for no weight and no priority, and leave the GPU at policy=5"
    )]
    Slices {
        index: u32,
        /// The call and its status.
        why: String,
        version: Version,
    },
    /// The driver doesn't answer.
    #[error("the driver can't be asked: {0}; see whether `nvidia-smi` works")]
    Unanswered(#[source] Unanswered),
    /// This host can't.
    #[error(transparent)]
    Ability(#[from] AbilityError),
    /// A program is missing.
    #[error("the gate's program {} is missing; install cgpu's programs in one directory", program.display())]
    NoMonitor { program: PathBuf },
    /// A GPU that the driver could not be asked about.
    #[error(
        "GPU {index} has UUID {uuid} in the inventory, which is none; correct it there, or have \
         `cgpu gpus --refresh` ask the driver"
    )]
    Uuid {
        index: u32,
        /// What it has.
        uuid: String,
    },
    /// A node is missing.
    #[error("cannot look at {}: {source}; load the driver: `cgpu nodes`", path.display())]
    Node {
        /// Its path on the host.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The bundle's seccomp profile.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// The monitor can't be started.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// It can't be given the container's calls.
    #[error(transparent)]
    Enter(#[from] EnterError),
    /// It doesn't answer.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// It doesn't do what it is asked.
    #[error("the monitor of {id} refuses: {reason}")]
    Refused {
        id: String,
        /// What the monitor says.
        reason: String,
    },
    /// A quota below what is in use.
    #[error("the monitor of {id} refuses: {reason}")]
    InUse {
        id: String,
        /// What the monitor says.
        reason: String,
    },
    /// Something that isn't the gate's.
    #[error(
        "the gate holds memory, so {what} of {id} can't be changed; set it when the container is created"
    )]
    Unenforced {
        id: String,
        /// What was to be changed.
        what: &'static str,
    },
    /// The monitors' directory.
    #[error("cannot list {}: {source}; run this as root", path.display())]
    Unlisted {
        /// The directory.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// What an earlier container left.
    #[error("cannot remove {}: {source}; remove it yourself", path.display())]
    Left {
        /// The directory.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl Gate {
    /// The gate as `config` has it.
    #[must_use]
    pub fn new(config: &config::Config) -> Self {
        let own = std::env::current_exe().unwrap_or_default();
        Gate {
            state_dir: config.state_dir.clone(),
            managed: match config.isolation.managed_memory {
                config::ManagedMemory::Refuse => Managed::Refuse,
                config::ManagedMemory::Charge => Managed::Charge,
            },
            unknown_driver: config.isolation.unknown_driver,
            channel_groups: config.isolation.channel_groups,
            dev: device_root(&config.driver.dev_root, &config.driver.root, Path::new("/"))
                .join("dev"),
            proc_root: config.driver.proc_root.clone(),
            log: config.log.clone(),
            monitor: own.with_file_name(MONITOR),
        }
    }

    fn place(&self, short_id: &str) -> MonitorDir {
        MonitorDir::of(&self.state_dir, short_id)
    }

    fn release(&self) -> Result<Release, GateError> {
        let path = self.proc_root.join("driver/nvidia/version");
        let missing = |problem| GateError::NoVersion { path: path.clone(), problem };
        let banner = fs::read_to_string(&path).map_err(|error| missing(error.to_string()))?;
        let version = Version::in_banner(&banner)
            .ok_or_else(|| missing("has no version in its first line".to_owned()))?;
        Ok(Release::of(version)?)
    }

    /// The file that shows that a GPU's memory is a node of the kernel's, as on GH200 and GB200.
    fn coherent(&self) -> Option<PathBuf> {
        let gpus = fs::read_dir(self.proc_root.join("driver/nvidia/gpus")).ok()?;
        let reported = gpus.flatten().map(|gpu| gpu.path().join("numa_status"));
        reported.into_iter().find(|path| path.exists())
    }

    /// The nodes of the driver, of these GPUs.
    fn nodes(&self, gpus: &[Gpu]) -> Result<Vec<Node>, GateError> {
        let dev = &self.dev;
        let mut nodes = vec![
            node(NodeKind::Control, dev.join("nvidiactl"))?,
            node(NodeKind::Uvm, dev.join("nvidia-uvm"))?,
        ];
        for (at, gpu) in gpus.iter().enumerate() {
            nodes.push(node(NodeKind::Gpu(at), dev.join(format!("nvidia{}", gpu.minor)))?);
        }
        Ok(nodes)
    }

    fn settings(
        &self,
        tenant: Tenant<'_>,
        how: &Launch<'_>,
        release: &Release,
    ) -> Result<Settings, GateError> {
        let mut all = tenant.plan.gpus.iter();
        if let Some(gpu) = all.find(|gpu| about::uuid(&gpu.uuid).is_none()) {
            return Err(GateError::Uuid { index: gpu.index, uuid: gpu.uuid.clone() });
        }
        let gpus = planned(tenant.plan);
        let nodes = self.nodes(&gpus)?;
        Ok(Settings {
            id: tenant.id.to_owned(),
            short_id: tenant.short_id.to_owned(),
            name: how.name.map(str::to_owned),
            root: how.root.to_owned(),
            state_dir: self.state_dir.clone(),
            bundle: how.bundle.to_owned(),
            place: self.place(tenant.short_id).dir().to_owned(),
            driver: release.version().to_string(),
            managed: self.managed,
            channel_groups: self.channel_groups,
            gpus,
            nodes,
            config: how.config.map(Path::to_owned),
            processor_limit: how.processor_limit,
            processor_shares: how.processor_shares,
            started_in: String::new(),
            launcher: how.launcher,
            state_file: how.state_file.map(Path::to_owned),
            spares_host: how.own_mounts,
            interruptible: !abilities().killable_wait,
            log: self.log.clone(),
        })
    }

    /// Starts the monitor of a container: gives the settings to a monitor that was started ahead, or to a new one.
    fn launch(
        &self,
        started: Option<StartedMonitor>,
        tenant: Tenant<'_>,
        how: &Launch<'_>,
    ) -> Result<(), GateError> {
        let release = self.release()?;
        let settings = self.settings(tenant, how, &release)?;
        self.see_that_it_answers(&release, &settings)?;
        if tenant.plan.asks_for_shares() {
            self.see_that_slices_are_set(&release, &settings.nodes, &settings.gpus)?;
        }
        let place = self.place(tenant.short_id);
        let mut monitor = started.map_or_else(|| start_monitor(&self.monitor), Ok)?;
        Ok(monitor.start_serving(&place, &settings)?)
    }

    /// Sees that the driver holds what a GPU is to be changed to.
    ///
    /// # Errors
    ///
    /// Where it doesn't: what it said.
    pub(super) fn see_that_it_holds(
        &self,
        gpu: &cgpu_core::gpu::Gpu,
        change: GpuChange,
    ) -> Result<(), GateError> {
        if matches!(change, GpuChange::Policy(policy) if policy != POLICY_NATIVE) {
            let gpus = [Gpu {
                index: gpu.index,
                uuid: gpu.uuid.clone(),
                minor: gpu.minor,
                limit_bytes: gpu.memory_bytes,
            }];
            self.see_that_slices_are_set(&self.release()?, &self.nodes(&gpus)?, &gpus)?;
        }
        Ok(())
    }

    fn status(&self, short_id: &str) -> Result<Status, GateError> {
        match ask(&self.place(short_id).control(), &Question::Status)? {
            Answer::Status(status) => Ok(*status),
            other => Err(refused(short_id, &other)),
        }
    }
}

/// NCCL asks for a multicast object between GPUs of an NVSwitch, and where CUDA refuses that
/// its communicators aren't made at all.
pub(super) fn variables(plan: &Plan) -> &'static [(&'static str, &'static str)] {
    if plan.gpus.len() > 1 { &[("NCCL_NVLS_ENABLE", "0")] } else { &[] }
}

/// What the monitor of a container says, as every backend has it.
fn observed(short_id: String, status: &Status) -> Observed {
    let instances = status.gpus.iter().enumerate().map(|(at, gpu)| {
        let process = |process: &ProcessStatus| Some((process.pid, *process.used_bytes.get(at)?));
        Instance {
            gpu_index: gpu.index,
            memory_limit_bytes: gpu.limit_bytes,
            memory_used_bytes: Some(gpu.used_bytes),
            processes: status.processes.iter().filter_map(process).collect(),
            compute_held: None,
            share_refused: gpu.share_refused.clone(),
        }
    });
    Observed {
        short_id,
        instances: Some(instances.collect()),
        calls: Some(status.calls),
        durations: Some(status.durations),
        monitor_updates: Some(status.updates),
        process_count: Some(status.process_count),
        leaked_to: match &status.end {
            Some(End::Over { holders }) => {
                holders.iter().map(|holder| (holder.pid, holder.program.clone())).collect()
            }
            Some(End::NotYet | End::Searching) | None => Vec::new(),
        },
    }
}

/// The GPUs of a plan, as monitors know them.
fn planned(plan: &Plan) -> Vec<Gpu> {
    let gpus = plan.gpus.iter().map(|gpu| Gpu {
        index: gpu.index,
        uuid: gpu.uuid.clone(),
        minor: gpu.minor,
        limit_bytes: gpu.memory_limit_bytes.unwrap_or(gpu.memory_total_bytes),
    });
    gpus.collect()
}

/// The status of each of these monitors, all asked at once; `None` for one that doesn't answer in time.
fn statuses(monitors: &[MonitorDir], timeout: Duration) -> Vec<Option<Status>> {
    let sockets: Vec<PathBuf> = monitors.iter().map(MonitorDir::control).collect();
    let questions: Vec<_> = sockets.iter().map(|socket| (&**socket, &Question::Status)).collect();
    let answers = ask_all(&questions, timeout).into_iter();
    let status = |answer: Option<Answer>| match answer {
        Some(Answer::Status(status)) => Some(*status),
        _ => None,
    };
    answers.map(status).collect()
}

fn refused(id: &str, answer: &Answer) -> GateError {
    if let Answer::InUse { reason } = answer {
        return GateError::InUse { id: id.to_owned(), reason: reason.clone() };
    }
    let reason = match answer {
        Answer::Refused { reason } => reason.clone(),
        other => format!("{other:?}"),
    };
    GateError::Refused { id: id.to_owned(), reason }
}

/// How the node at `path` is known when it is open.
fn node(kind: NodeKind, path: PathBuf) -> Result<Node, GateError> {
    let meta = match fs::metadata(&path) {
        Ok(meta) => meta,
        Err(source) => return Err(GateError::Node { path, source }),
    };
    let identity = match meta.file_type().is_char_device() {
        true => Identity::Device(meta.rdev()),
        false => Identity::File { device: meta.dev(), inode: meta.ino() },
    };
    Ok(Node { kind, path, identity })
}

impl Isolation for Gate {
    fn usable(&self) -> Result<(), BackendError> {
        kernel_support::of_host().map_err(GateError::from)?;
        if !self.monitor.is_file() {
            return Err(GateError::NoMonitor { program: self.monitor.clone() }.into());
        }
        self.release()?;
        match self.coherent() {
            Some(path) => Err(GateError::Coherent { path }.into()),
            None => Ok(()),
        }
    }

    fn edit(&self, profile: Option<&Value>, edits: &mut Edits) -> Result<(), BackendError> {
        edits.without_mps = true;
        Ok(check_no_listener(profile).map_err(GateError::from)?)
    }

    /// The filter is here before the runtime is.
    fn enter(&self, tenant: Tenant<'_>) -> Result<(), BackendError> {
        Ok(enter(&self.place(tenant.short_id).entry()).map_err(GateError::from)?)
    }

    fn begin_launch(&self) -> Launcher {
        let (gate, monitor) = (self.clone(), start_monitor(&self.monitor).ok());
        Box::new(move |tenant, how| Ok(gate.launch(monitor, tenant, &how)?))
    }

    /// The monitor is there since before the container was made; what is left is to see
    /// that it serves.
    fn activate(&self, tenant: Tenant<'_>) -> Result<(), BackendError> {
        self.status(tenant.short_id)?;
        Ok(())
    }

    fn leftover(&self, short_id: &str, timeout: Duration) -> Leftover {
        let place = self.place(short_id);
        let until = Instant::now() + timeout;
        let mut still = Leftover::Unknown;
        loop {
            // A monitor that ends by itself asks this in its own process.
            let others = |monitor: &ProcessId| monitor.pid.cast_unsigned() != std::process::id();
            let Some(monitor) = place.process().ok().flatten().filter(others) else {
                return Leftover::Nothing;
            };
            let left = until.saturating_duration_since(Instant::now());
            let status = status_file::read(&place.status()).or_else(|| match timeout.is_zero() {
                true => None,
                false => statuses(std::slice::from_ref(&place), left).pop()?,
            });
            match status {
                Some(status) => match status.end {
                    Some(End::Over { holders }) if holders.is_empty() => return Leftover::Nothing,
                    Some(End::Over { .. }) => return Leftover::WatchedBy(monitor),
                    // A monitor of an earlier version doesn't say so.
                    None => return Leftover::Unknown,
                    // It says when it has ended.
                    Some(End::NotYet | End::Searching) => still = Leftover::WatchedBy(monitor),
                },
                // It has closed its sockets, and is about to end.
                _ if !timeout.is_zero() && !is_listening(&place.control()) => {
                    return Leftover::Nothing;
                }
                _ => {}
            }
            if left.is_zero() {
                return if timeout.is_zero() { Leftover::Unknown } else { still };
            }
            std::thread::sleep(END_PAUSE.min(left));
        }
    }

    fn end_if_taken(
        &self,
        tenant: Tenant<'_>,
        first: ProcessId,
    ) -> Result<Option<Event>, BackendError> {
        let gpus = planned(tenant.plan);
        let (nodes, release) = (self.nodes(&gpus)?, self.release()?);
        let ended = daemon::end_if_taken(first, &nodes, &release, &gpus);
        Ok(ended.map_err(GateError::Unanswered)?)
    }

    fn deactivate(&self, short_id: &str) -> Result<(), BackendError> {
        let place = self.place(short_id);
        // A monitor that ends by itself calls this in its own process.
        let others = |monitor: &ProcessId| monitor.pid.cast_unsigned() != std::process::id();
        let monitor = place.process().ok().flatten().filter(others);
        if let Some(pid) = monitor.and_then(|monitor| Pid::from_raw(monitor.pid)) {
            // Gone in this moment, then.
            let _ = kill_process(pid, Signal::TERM);
        }
        let left = |source| GateError::Left { path: place.dir().to_owned(), source };
        Ok(place.remove().map_err(left)?)
    }

    fn list(&self, short_ids: Option<&[&str]>) -> Result<Vec<Observed>, BackendError> {
        let all = match short_ids {
            Some(short_ids) => short_ids.iter().map(|short_id| self.place(short_id)).collect(),
            None => MonitorDir::list(&self.state_dir).map_err(|source| {
                let path = MonitorDir::all(&self.state_dir);
                GateError::Unlisted { path, source }
            })?,
        };
        let written = all.into_iter().map(|place| (status_file::read(&place.status()), place));
        let there = written.filter(|(status, place)| status.is_some() || place.dir().exists());
        let (written, all): (Vec<Option<Status>>, Vec<MonitorDir>) = there.unzip();
        // Only monitors without a status file are asked, and woken.
        let unwritten = all.iter().zip(&written).filter(|(_, status)| status.is_none());
        let unwritten: Vec<_> = unwritten.map(|(place, _)| place.clone()).collect();
        let mut asked = statuses(&unwritten, POLL_TIMEOUT).into_iter();
        let observed = all.iter().zip(written).map(|(place, written)| {
            let short_id = place.short_id();
            match written.or_else(|| asked.next()?) {
                Some(status) => observed(short_id, &status),
                None => Observed { short_id, ..Observed::default() },
            }
        });
        Ok(observed.collect())
    }

    fn set(&self, tenant: Tenant<'_>, change: Change) -> Result<(), BackendError> {
        let unenforced =
            |what| Err(GateError::Unenforced { id: tenant.id.to_owned(), what }.into());
        let (gpu_index, limit_bytes) = match change {
            Change::MemoryLimit { gpu_index, bytes } => (gpu_index, bytes),
            // Monitors follow what the registry says of shares.
            Change::Weight(1) | Change::HighPriority(false) => return Ok(()),
            Change::Weight(_) | Change::HighPriority(_) => {
                let gpus = planned(tenant.plan);
                return Ok(self.see_that_slices_are_set(
                    &self.release()?,
                    &self.nodes(&gpus)?,
                    &gpus,
                )?);
            }
        };
        let gpus = &tenant.plan.gpus;
        let Some(gpu) = gpus.iter().find(|gpu| gpu.index == gpu_index) else {
            return unenforced("the quota of a GPU that it does not have");
        };
        let question = Question::Limit { uuid: gpu.uuid.clone(), limit_bytes };
        let socket = self.place(tenant.short_id).control();
        match ask(&socket, &question).map_err(GateError::from)? {
            Answer::Done => Ok(()),
            other => Err(refused(tenant.id, &other).into()),
        }
    }
}
