//! What makes a GPU usable in a container: its device nodes, the driver's files, and the edits of its bundle.
//!
//! Knows the driver on this host and the edits it comes to. Must not know quotas. Nothing here
//! executes or writes anything of the image: the image is inspected, and what it is to have
//! comes by mounts that the real runtime makes.

pub mod bundle;
pub mod capabilities;
pub mod catalogue;
pub mod cdi;
mod container_nodes;
pub mod device_numbers;
pub mod driver;
pub mod driver_cache;
pub mod driver_search;
pub mod kernel_modules;
pub mod layers;
pub mod mounts;
pub mod native;
pub mod node_creation;
pub mod path_variables;
pub mod requirements;
pub mod root;
pub mod tree;
pub mod userland;

use std::path::Path;

use thiserror::Error;
use tracing::warn;

pub use container_nodes::{Missing, NodeError, Nodes, graphics, link_by_number, modeset, nodes};

use crate::bundle::{Bundle, BundleError, Edits, leads_to_daemon};
use cgpu_core::gpu::Inventory;
use cgpu_core::plan::Plan;
use cgpu_core::request::Brought;
use cgpu_host::config::{Config, Inject};
use driver::Capability;
use nvrm::Version;

use cdi::{CdiError, HostFacts, Specifications, Wanted};

/// How the driver's files come into a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// By a CDI specification.
    Cdi,
    /// Found by us.
    Native,
    /// By NVIDIA's runtime.
    NvidiaRuntime,
    /// Not by us.
    Off,
}

impl Mode {
    /// Its name in the configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Mode::Cdi => "cdi",
            Mode::Native => "native",
            Mode::NvidiaRuntime => "nvidia-runtime",
            Mode::Off => "off",
        }
    }
}

/// What it is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// To make a container.
    Create,
    /// To make a container of an engine that isn't root's: nothing is retained, and each file is mounted by itself.
    Unregistered,
    /// To report what a container creation would do: nothing is retained or mounted, and no edit can be used.
    Inspect,
}

/// How the driver's files come into one container.
#[derive(Debug, Clone)]
pub struct Injection {
    /// By which means.
    pub mode: Mode,
    /// Why that, as a sentence for people has it.
    pub why: String,
    /// What it takes in the bundle.
    pub edits: Edits,
}

/// Why the driver's files can't come into a container.
#[derive(Debug, Error)]
pub enum InjectError {
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// What of the driver the container wants.
    #[error(transparent)]
    Capability(#[from] catalogue::UnknownCapability),
    /// The driver is none for the image.
    #[error(transparent)]
    Require(#[from] requirements::RequireError),
    /// No CDI specification serves.
    #[error(transparent)]
    Cdi(#[from] CdiError),
    /// There is no driver.
    #[error("{0}; or set inject = \"off\" under [driver]")]
    Find(#[from] driver_search::FindError),
    /// Something is in their way in the container.
    #[error(transparent)]
    Place(#[from] mounts::PlaceError),
    /// Its files can't be mounted.
    #[error(transparent)]
    Tree(#[from] tree::TreeError),
}

/// How the files of the driver come into the container of `bundle`, into which others brought `brought`
/// and which gets `plan`.
///
/// # Errors
///
/// Where they can't, and the configuration says how they must.
pub fn injection(
    config: &Config,
    (plan, inventory): (&Plan, &Inventory),
    (bundle, brought): (&Bundle, &Brought),
    purpose: Purpose,
) -> Result<Injection, InjectError> {
    // Under a quota such a hook is taken out.
    let by_cli_hook = brought.cli_hook.as_ref().filter(|_| plan.is_whole());
    let already = brought.driver_files.as_ref().or(by_cli_hook);
    let is_ours = match config.driver.inject {
        Inject::Cdi | Inject::Native => true,
        Inject::Auto => already.is_none(),
        Inject::NvidiaRuntime | Inject::Off => false,
    };
    let kernel = is_ours.then(|| native::kernel_version(&config.driver.proc_root)).flatten();
    if let Some(version) = kernel {
        let env = bundle.env()?;
        let env = env.iter().filter_map(|item| item.split_once('='));
        requirements::check(env, &requirements::Facts::of_driver(version))?;
    }
    let configured = || "configured".to_owned();
    let native = || native::edits(config, plan, inventory, bundle, kernel, purpose);
    let mut injection = match config.driver.inject {
        Inject::Off => Injection::without(Mode::Off, configured()),
        Inject::NvidiaRuntime => Injection::without(Mode::NvidiaRuntime, configured()),
        Inject::Native => Injection { mode: Mode::Native, why: configured(), edits: native()? },
        Inject::Cdi => match by_cdi(config, plan, inventory, kernel, purpose)? {
            Some((edits, left_out)) => {
                Injection { mode: Mode::Cdi, why: configured() + &left_out, edits }
            }
            None => {
                let directories = config.driver.cdi_dirs.clone();
                return Err(CdiError::NoSpecification { directories }.into());
            }
        },
        Inject::Auto => match already {
            Some(by) => {
                Injection::without(Mode::Off, format!("auto: the bundle has them, by {by}"))
            }
            None => {
                // A host that is made up, or has no driver, needs no repair.
                let is_real = kernel.is_some() && config.driver.proc_root == Path::new("/proc");
                best(by_cdi(config, plan, inventory, kernel, purpose), native, is_real)?
            }
        },
    };
    // One without a quota gets all that it asks others for.
    if !plan.is_whole() {
        injection.edits.without_requests = true;
        injection.edits.mounts.retain(|mount| !leads_to_daemon(Path::new(&mount.destination)));
        let is_runtime = injection.mode == Mode::NvidiaRuntime || config.runtime.is_nvidias();
        if is_runtime || brought.nvidia_hook {
            let asked = |name: &str| {
                ASKS_FOR_MORE.contains(&name) || config.rules().is_resource_variable(name)
            };
            let env = steered(&bundle.env()?, asked, is_runtime);
            injection.edits.env.extend(env);
            injection.edits.masked.extend(MOUNTED_LATER.iter().map(ToString::to_string));
        }
    }
    Ok(injection)
}

impl Injection {
    /// Nothing: the container has what others brought.
    #[must_use]
    pub fn as_brought() -> Self {
        Injection::without(Mode::Off, "the container has what its engine brought".to_owned())
    }

    fn without(mode: Mode, why: String) -> Self {
        Injection { mode, why, edits: Edits::default() }
    }
}

/// What `auto` takes: a CDI specification that fits, else what we find, else nothing: somebody
/// else may bring the files by means that we don't know. Where the kernel has a driver
/// (`has_driver`), the log says so.
fn best(
    by_cdi: Result<Option<(Edits, String)>, CdiError>,
    native: impl FnOnce() -> Result<Edits, InjectError>,
    has_driver: bool,
) -> Result<Injection, InjectError> {
    let why = match by_cdi {
        Ok(Some((edits, left_out))) => {
            let why = format!("auto: a CDI specification fits{left_out}");
            return Ok(Injection { mode: Mode::Cdi, why, edits });
        }
        Ok(None) => "auto: there is no CDI specification".to_owned(),
        Err(error) => {
            warn!("CDI is of no use here: {error}");
            format!("auto: CDI is of no use here: {error}")
        }
    };
    match native() {
        Ok(edits) => Ok(Injection { mode: Mode::Native, why, edits }),
        Err(InjectError::Find(error @ driver_search::FindError::Nothing { .. })) => {
            if has_driver {
                warn!("this container gets device nodes only: {error}");
            }
            Ok(Injection::without(Mode::Off, format!("{why}, and {error}")))
        }
        Err(error) => Err(error),
    }
}

/// The edits by the specifications of this host, and what they leave out as a sentence ends;
/// `None` where none is about NVIDIA's GPUs.
fn by_cdi(
    config: &Config,
    plan: &Plan,
    inventory: &Inventory,
    kernel: Option<Version>,
    purpose: Purpose,
) -> Result<Option<(Edits, String)>, CdiError> {
    let driver = &config.driver;
    let cache = (purpose == Purpose::Create).then(|| config.state_dir.join("cdi.json"));
    let specifications = Specifications::load(&driver.cdi_dirs, cache.as_deref());
    let wanted: Vec<Wanted> = plan.gpus.iter().map(Wanted::from).collect();
    let found =
        specifications.edits_for(&wanted, &HostFacts { root: "/".into(), driver: kernel })?;
    Ok(found.map(|found| {
        let masked = native::others(&driver.proc_root, plan, inventory);
        let left_out = found.left_out.iter().map(|left_out| format!("; {left_out}")).collect();
        (Edits { masked, ..found.edits }, left_out)
    }))
}

/// What becomes of the variables `env` of a process that is started in the container of `bundle`:
/// those that change.
#[must_use]
pub fn variables(bundle: &Bundle, env: &[&str], state_dir: &Path) -> Vec<(String, String)> {
    let home = tree::home(state_dir);
    let mut mounted = bundle.mounted().filter(|(_, source)| Path::new(source).starts_with(&home));
    let place = mounted.find_map(|(path, _)| tree::PLACES.iter().find(|place| **place == path));
    place.map_or_else(Vec::new, |place| path_variables::variables(env, place))
}

/// What a bundle asks NVIDIA's runtime and hook for in addition to its GPUs; any of it may bring devices
/// whose use no quota sees, or GPUs that are others'.
const ASKS_FOR_MORE: &[&str] = &[
    "NVIDIA_IMEX_CHANNELS",
    "NVIDIA_GDS",
    "NVIDIA_GDRCOPY",
    "NVIDIA_MOFED",
    "NVIDIA_NVSWITCH",
    "NVIDIA_MIG_CONFIG_DEVICES",
    "NVIDIA_MIG_MONITOR_DEVICES",
];

/// What NVIDIA's hook mounts after us, and no container with a quota uses: the MPS server allocates for
/// its clients, and the daemons set any GPU.
const MOUNTED_LATER: &[&str] = &[
    "/tmp/nvidia-mps",
    "/run/nvidia-persistenced/socket",
    "/run/nvidia-fabricmanager/socket",
    // Where an image's /var/run is no link.
    "/var/run/nvidia-persistenced/socket",
    "/var/run/nvidia-fabricmanager/socket",
];

/// What of `env` changes for a container with a quota that NVIDIA's runtime or hook acts on: it gets the
/// GPUs that the one variable says, and nothing that it asks for by others (`is_asking`).
///
/// For `display` the hook brings the node that sets displays (libnvidia-container, `nvc_mount.c`), and for
/// it and `graphics` the runtime (`is_runtime`) brings the nodes of the kernel's graphics: memory that is
/// taken there passes no monitor.
fn steered(
    env: &[&str],
    is_asking: impl Fn(&str) -> bool,
    is_runtime: bool,
) -> Vec<(String, String)> {
    let items = || env.iter().filter_map(|item| item.split_once('='));
    let asked = items().filter(|(name, value)| is_asking(name) && !value.is_empty());
    let mut changed: Vec<_> = asked.map(|(name, _)| (name.to_owned(), String::new())).collect();
    changed.sort_unstable();
    changed.dedup();
    let named = items().rfind(|(name, _)| *name == catalogue::VARIABLE);
    let brings_nodes = |name: &str| name == "display" || (is_runtime && name == "graphics");
    let all = || Capability::ALL.iter().map(|capability| capability.name());
    let words = named.into_iter().flat_map(|(_, value)| value.split(',').map(str::trim));
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    if words.iter().any(|word| *word == "all" || brings_nodes(word)) {
        let each = words.iter().flat_map(|word| match *word {
            "all" => all().collect(),
            word => vec![word],
        });
        let mut retained: Vec<&str> = Vec::new();
        for word in each.filter(|word| !brings_nodes(word)) {
            if !retained.contains(&word) {
                retained.push(word);
            }
        }
        if retained.is_empty() {
            retained.extend(catalogue::DEFAULT.iter().map(|capability| capability.name()));
        }
        changed.push((catalogue::VARIABLE.to_owned(), retained.join(",")));
    }
    changed
}

#[cfg(test)]
mod tests {
    use super::*;

    /// NVIDIA's runtime and hook are asked for no more than the plan.
    #[test]
    fn nvidia_tools_get_no_more_than_the_plan() {
        let asking = |name: &str| name == "NVIDIA_GDS" || name.starts_with("DOCKER_RESOURCE_");
        let of = |env: &[&str], is_runtime| {
            let changed = steered(env, asking, is_runtime);
            changed.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>()
        };
        assert_eq!(of(&["A=b", "NVIDIA_DRIVER_CAPABILITIES=compute,graphics"], false), [""; 0]);
        assert_eq!(
            of(&["NVIDIA_GDS=1", "DOCKER_RESOURCE_GPU=GPU-a", "DOCKER_RESOURCE_GPU=GPU-b"], false),
            ["DOCKER_RESOURCE_GPU=", "NVIDIA_GDS="]
        );
        for (is_runtime, value, expected) in [
            (false, "all", "compute,compat32,graphics,utility,video,ngx"),
            (true, "all", "compute,compat32,utility,video,ngx"),
            (false, "display", "compute,utility"),
            (true, "graphics", "compute,utility"),
            (true, "compute, graphics,display,video", "compute,video"),
            (false, "graphics,display", "graphics"),
            (true, "all,cuda", "compute,compat32,utility,video,ngx,cuda"),
        ] {
            let env = format!("NVIDIA_DRIVER_CAPABILITIES={value}");
            let expected = format!("NVIDIA_DRIVER_CAPABILITIES={expected}");
            assert_eq!(of(&[&env], is_runtime), [expected], "{value}");
        }
    }
}
