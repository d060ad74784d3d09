//! The configuration: `/etc/cgpu/config.toml`, or the file that `CGPU_CONFIG` or
//! `--cgpu-config` names; and what [`DROP_INS`] next to it has, file after file by name, where a key of a
//! later one counts.
//!
//! An absent default file means the defaults; a file that was named must be there. An
//! unknown key is an error that names the nearest known one. Commands that pass through
//! to the real runtime read nothing but `runtime.candidates`, leniently
//! ([`candidates`]), so that a broken file never stops a `kill` or a `delete`.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::log::Sink;
use cgpu_core::plan::{POLICY_NATIVE, POLICY_PREEMPTIVE, Placement};
use cgpu_core::request::amount::size_mib;
use cgpu_core::request::{DefaultMemory, Profile, Rules, Trust, Ungranted};
use cgpu_core::sched::Idle;

/// The default of the most channel groups of a container on a GPU: 64 processes, each with a CUDA context of four.
pub const MOST_CHANNEL_GROUPS: u32 = 256;

/// Where the configuration is unless another path is given.
pub const DEFAULT_PATH: &str = "/etc/cgpu/config.toml";

/// The directory of files that add to the configuration, next to it: those whose names end in `.toml`.
pub const DROP_INS: &str = "conf.d";

/// The environment variable that names another file.
pub const PATH_VARIABLE: &str = "CGPU_CONFIG";

/// Everything that can be configured, each key with its default.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Where the registry and the inventory's cache are kept; root's, 0700.
    pub state_dir: PathBuf,
    /// The program's own log: a file, `journald`, `stderr`; empty for none.
    pub log: String,
    /// The real runtime.
    pub runtime: Runtime,
    /// Where GPUs are learnt of.
    pub inventory: Inventory,
    /// How quotas are enforced.
    pub isolation: Isolation,
    /// What is given out, and to whom.
    pub admission: Admission,
    /// The driver's files.
    pub driver: Driver,
    /// How computing time is shared.
    pub compute: Compute,
    /// Which users may read the status.
    pub view: View,
    /// What Kubernetes gives.
    pub kubernetes: Kubernetes,
}

/// `[runtime]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Runtime {
    /// Names in `PATH` or absolute paths; the first that is there is the real runtime.
    pub candidates: Vec<String>,
}

impl Runtime {
    /// Whether the real runtime is NVIDIA's, which brings GPUs by what a bundle says.
    #[must_use]
    pub fn is_nvidias(&self) -> bool {
        let first = self.candidates.iter().find(|candidate| !candidate.is_empty());
        let name = first.and_then(|candidate| candidate.rsplit('/').next());
        name.is_some_and(|name| name.starts_with("nvidia-container-runtime"))
    }
}

/// `[inventory]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Inventory {
    /// `auto`: the driver on this host; `file`: `path`.
    pub source: InventorySource,
    /// The inventory file, where `source` is `file`.
    pub path: PathBuf,
    /// How long `cgpu gpus --refresh` may take, in seconds, when a container creation waits for it.
    pub refresh_timeout_s: u64,
}

/// Where GPUs are learnt of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InventorySource {
    /// `/proc/driver/nvidia` and NVML.
    Auto,
    File,
}

/// `[isolation]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Isolation {
    /// The backend that enforces quotas.
    pub backend: Backend,
    /// What becomes of managed memory under the gate.
    pub managed_memory: ManagedMemory,
    /// Channel groups that a container has at most on each of its GPUs under the gate; 1 ..= 4096.
    pub channel_groups: u32,
    /// What the gate does under a driver that is newer than all that it knows, and doesn't answer what
    /// a monitor has to ask it.
    pub unknown_driver: UnknownDriver,
    /// The gate's filter on containers without a GPU too: refused where it is asked for, as this
    /// version can't.
    pub filter_all: bool,
    /// The procfs tree of the vendor's module.
    pub km_root: PathBuf,
}

/// The configured backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// `km` where the vendor's module is loaded, else `gate`.
    Auto,
    /// The driver's ioctl boundary.
    Gate,
    /// The vendor's module.
    Km,
    /// Visibility and environment only.
    None,
}

/// What the gate does with managed memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ManagedMemory {
    /// It fails, as under the original product.
    Refuse,
    /// The whole reservation counts against the quota.
    Charge,
}

/// What the gate does under a driver that it doesn't know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UnknownDriver {
    /// No container gets a quota, as it could not be enforced.
    Refuse,
    /// Containers get quotas, and the log says what can't be observed.
    Serve,
}

/// `[admission]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Admission {
    /// Reserved memory over physical memory, per GPU.
    pub overcommit: f64,
    /// Most containers with a quota on a GPU, and the largest weight; 1 ..= 25. Under policy 3 and the backend `km` also
    /// the most that weights add up to.
    pub max_inst: u32,
    /// Register containers with unlimited GPUs; they exclude shared ones.
    pub exclusive: bool,
    /// Refuse GPUs without a quota.
    pub require_quota: bool,
    /// Requests by `process.env` count.
    pub trust_env: bool,
    /// Requests by annotations count.
    pub trust_annotations: bool,
    /// Variables and annotations of an unprivileged container may ask for whole GPUs; NVIDIA's toolkit
    /// has a setting of that name.
    pub accept_nvidia_visible_devices_envvar_when_unprivileged: bool,
    /// Whether settings that an image can carry may lift or widen a quota.
    pub profile: Profile,
    /// What becomes of containers that name no GPU and reach past the enforcement.
    pub privileged: Privileged,
    /// Variables that choose GPUs by UUID; a name that ends in `*` is the beginning of names.
    pub resource_variables: Vec<String>,
    /// Which GPU a container gets that says how many and not which.
    pub placement: Placement,
    /// What a container gets of each GPU that names GPUs and asks for no quota, as `4GiB`; `0` is the GPU
    /// without a limit. What is set of the host (`cgpu set host`) goes before it.
    pub default_memory: String,
    /// What isn't reserved for containers of a GPU's memory at least, as `512MiB`: NVML may say that the driver
    /// keeps more.
    pub reserve: String,
}

impl Admission {
    /// `default_memory` in MiB.
    #[must_use]
    pub fn default_memory_mib(&self) -> u64 {
        size_mib(&self.default_memory).unwrap_or_default()
    }

    /// `reserve` in MiB.
    #[must_use]
    pub fn reserve_mib(&self) -> u64 {
        size_mib(&self.reserve).unwrap_or_default()
    }
}

/// What becomes of containers that name no GPU and reach past the enforcement of others' quotas.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Privileged {
    /// They are started.
    Allow,
    /// They are refused.
    Refuse,
}

/// `[compute]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Compute {
    /// How computing time of a GPU is shared of which nothing else is set; 0 ..= 5.
    pub policy: u32,
    /// What becomes of the time of a container that rests, under policies 1 and 2.
    pub idle: Idle,
    /// Per cent that containers of high priority may take; 20 ..= 99.
    pub prio_ratio: u32,
}

/// `[view]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct View {
    /// The group whose members may read the status without being root; empty for none.
    pub group: String,
    /// The socket by which they do.
    pub socket: PathBuf,
}

/// `[kubernetes]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Kubernetes {
    /// Where the device plugin writes what it has given to which container; root's.
    pub grants: PathBuf,
    /// What a pod's container gets that names GPUs and was given none.
    pub ungranted: Ungranted,
    /// Namespaces whose pods get what they ask for all the same.
    pub exempt: Vec<String>,
}

/// `[driver]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Driver {
    /// Where the driver's files are; `/` but for driver containers.
    pub root: PathBuf,
    /// `/dev` below it has the driver's device nodes; empty for `root` if nodes are there, else `/`.
    pub dev_root: PathBuf,
    /// The host's procfs.
    pub proc_root: PathBuf,
    /// How the driver's files come into a container with a quota.
    pub inject: Inject,
    /// How they, and the GPUs, come into one whose GPUs are unlimited.
    pub whole: Whole,
    /// NVIDIA's runtime, a name in `PATH` or an absolute path.
    pub nvidia_runtime: String,
    /// Where CDI specifications are, those that take precedence last.
    pub cdi_dirs: Vec<PathBuf>,
}

/// How the driver's files come into a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Inject {
    /// The best that this host has.
    Auto,
    /// A CDI specification.
    Cdi,
    /// The driver's files, found by us.
    Native,
    /// NVIDIA's runtime as the real runtime.
    NvidiaRuntime,
    /// Device nodes only.
    Off,
}

/// How GPUs come into a container that has them without a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Whole {
    /// By NVIDIA's runtime where it is installed, else as under `inject = "auto"`.
    Auto,
    /// A CDI specification.
    Cdi,
    /// The driver's files, found by us.
    Native,
    /// NVIDIA's runtime as the real runtime.
    NvidiaRuntime,
    /// Not by us: such a container isn't touched.
    Off,
}

impl Whole {
    /// What that is for a container that is about to be made, where `inject` is what others get and
    /// `has_nvidia` says whether NVIDIA's runtime can make it.
    #[must_use]
    pub fn inject(self, inject: Inject, has_nvidia: impl FnOnce() -> bool) -> Inject {
        match self {
            Whole::Auto if has_nvidia() => Inject::NvidiaRuntime,
            Whole::Auto => Inject::Auto,
            Whole::Cdi => Inject::Cdi,
            Whole::Native => Inject::Native,
            Whole::NvidiaRuntime => Inject::NvidiaRuntime,
            // One that is made all the same, since GPUs without a quota matter here.
            Whole::Off => inject,
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Config {
            state_dir: "/run/cgpu".into(),
            log: "/var/log/cgpu.log".into(),
            runtime: Runtime::default(),
            inventory: Inventory::default(),
            isolation: Isolation::default(),
            admission: Admission::default(),
            driver: Driver::default(),
            view: View::default(),
            kubernetes: Kubernetes::default(),
            compute: Compute::default(),
        }
    }
}

impl Default for Runtime {
    fn default() -> Self {
        Runtime { candidates: vec!["runc".into(), "crun".into()] }
    }
}

impl Default for Inventory {
    fn default() -> Self {
        Inventory { source: InventorySource::Auto, path: PathBuf::new(), refresh_timeout_s: 10 }
    }
}

impl Default for Isolation {
    fn default() -> Self {
        Isolation {
            backend: Backend::Auto,
            managed_memory: ManagedMemory::Refuse,
            channel_groups: MOST_CHANNEL_GROUPS,
            unknown_driver: UnknownDriver::Refuse,
            filter_all: false,
            km_root: "/proc/cgpu_km".into(),
        }
    }
}

impl Default for Admission {
    fn default() -> Self {
        Admission {
            overcommit: 1.0,
            max_inst: 20,
            exclusive: false,
            require_quota: false,
            trust_env: true,
            trust_annotations: true,
            accept_nvidia_visible_devices_envvar_when_unprivileged: true,
            profile: Profile::Open,
            privileged: Privileged::Allow,
            resource_variables: vec!["DOCKER_RESOURCE_*".to_owned()],
            placement: Placement::Binpack,
            default_memory: "0".to_owned(),
            reserve: "0".to_owned(),
        }
    }
}

impl Default for Compute {
    fn default() -> Self {
        Compute { policy: POLICY_PREEMPTIVE, idle: Idle::Yield, prio_ratio: 80 }
    }
}

impl Default for View {
    fn default() -> Self {
        View { group: String::new(), socket: "/run/cgpu-view.sock".into() }
    }
}

impl Default for Kubernetes {
    fn default() -> Self {
        Kubernetes {
            grants: "/var/lib/cgpu/grants".into(),
            ungranted: Ungranted::AsAsked,
            exempt: Vec::new(),
        }
    }
}

impl Default for Driver {
    fn default() -> Self {
        Driver {
            root: "/".into(),
            dev_root: PathBuf::new(),
            proc_root: "/proc".into(),
            inject: Inject::Auto,
            whole: Whole::Auto,
            nvidia_runtime: "nvidia-container-runtime".into(),
            cdi_dirs: vec!["/etc/cdi".into(), "/var/run/cdi".into()],
        }
    }
}

/// Why a configuration can't be used.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file can't be read.
    #[error("configuration {}: {source}; correct the path, or remove it to use the defaults", path.display())]
    Unreadable {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// It is no TOML, or a value has the wrong type.
    #[error("configuration {}: {}", path.display(), toml_text(problem))]
    Malformed {
        path: PathBuf,
        /// Where and why; all of it is in the message.
        problem: Box<toml::de::Error>,
    },
    /// A key that means nothing.
    #[error("configuration {}: unknown key {key}; did you mean {nearest}?", path.display())]
    UnknownKey {
        path: PathBuf,
        /// The key with its tables, as `admission.max_insts`.
        key: String,
        /// The known key that looks most like it.
        nearest: String,
    },
    /// A value that can't be meant.
    #[error("configuration {}: {key} = {value}: {expected}", path.display())]
    BadValue {
        path: PathBuf,
        /// The key with its tables.
        key: &'static str,
        /// What stands there.
        value: String,
        /// What may.
        expected: &'static str,
    },
}

/// A TOML error on one line, as it ends in docker's output.
fn toml_text(error: &toml::de::Error) -> String {
    error.to_string().trim().replace('\n', " ")
}

/// A configuration and where it came from.
#[derive(Debug, Clone, PartialEq)]
pub struct Loaded {
    pub config: Config,
    /// The file, where one was read.
    pub path: Option<PathBuf>,
}

/// The file to read, and whether somebody named it.
fn located(explicit: Option<&OsStr>, variable: Option<&OsStr>) -> (PathBuf, bool) {
    match explicit.or(variable.filter(|path| !path.is_empty())) {
        Some(path) => (path.into(), true),
        None => (DEFAULT_PATH.into(), false),
    }
}

/// The configuration that `explicit` (a flag), else `variable` (`CGPU_CONFIG`) names,
/// else the default one.
///
/// # Errors
///
/// Where a named file can't be read, or any file holds what can't be meant.
pub fn load(explicit: Option<&OsStr>, variable: Option<&OsStr>) -> Result<Loaded, ConfigError> {
    let (path, named) = located(explicit, variable);
    let main = match fs::read_to_string(&path) {
        Ok(text) => Some(text),
        Err(source) if source.kind() == io::ErrorKind::NotFound && !named => None,
        Err(source) => return Err(ConfigError::Unreadable { path, source }),
    };
    let more = drop_ins(&path)?;
    let config = match (&main, more.is_empty()) {
        (None, true) => Config::default(),
        (Some(text), true) => parse(text, &path)?,
        (main, false) => {
            let main = main.clone().map(|text| (path.clone(), text));
            parse_all(&main.into_iter().chain(more).collect::<Vec<_>>())?
        }
    };
    Ok(Loaded { config, path: main.map(|_| absolute(&path)) })
}

/// What these files say together, each with its path; a key of a later one counts.
fn parse_all(files: &[(PathBuf, String)]) -> Result<Config, ConfigError> {
    let mut all = toml::Table::new();
    for (path, text) in files {
        merge(&mut all, text.parse().map_err(malformed(path))?);
    }
    let (last, _) = files.last().cloned().unwrap_or_default();
    let config: Config = match all.try_into() {
        Ok(config) => config,
        Err(problem) => {
            // Each file is parsed alone, so that the error names the file that is wrong.
            files.iter().try_for_each(|(path, text)| read(text, path).map(drop))?;
            return Err(malformed(&last)(problem));
        }
    };
    match config.validate(&last) {
        Err(ConfigError::BadValue { key, value, expected, .. }) => {
            let says = |(_, text): &&(PathBuf, String)| {
                text.parse().is_ok_and(|table| dotted(&table, "").iter().any(|said| said == key))
            };
            let path = files.iter().rfind(says).map_or(last, |(path, _)| path.clone());
            Err(ConfigError::BadValue { path, key, value, expected })
        }
        other => other.map(|()| config),
    }
}

fn malformed(path: &Path) -> impl FnOnce(toml::de::Error) -> ConfigError {
    let path = path.to_owned();
    move |problem| ConfigError::Malformed { path, problem: Box::new(problem) }
}

/// The files that add to the configuration at `path`, in order, with what they say.
fn drop_ins(path: &Path) -> Result<Vec<(PathBuf, String)>, ConfigError> {
    let directory = path.with_file_name(DROP_INS);
    let unreadable = |path: &Path| {
        let path = path.to_owned();
        move |source| ConfigError::Unreadable { path, source }
    };
    let entries = match fs::read_dir(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(unreadable(&directory))?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.map_err(unreadable(&directory))?.path();
        let is_hidden =
            path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
        if !is_hidden && path.extension().is_some_and(|end| end == "toml") {
            paths.push(path);
        }
    }
    paths.sort();
    let read = |path: PathBuf| match fs::read_to_string(&path) {
        Ok(text) => Ok((path, text)),
        Err(source) => Err(ConfigError::Unreadable { path, source }),
    };
    paths.into_iter().map(read).collect()
}

/// Takes over each key of `from`, table by table.
fn merge(into: &mut toml::Table, from: toml::Table) {
    for (key, value) in from {
        match (into.get_mut(&key), value) {
            (Some(toml::Value::Table(into)), toml::Value::Table(from)) => merge(into, from),
            (_, value) => {
                into.insert(key, value);
            }
        }
    }
}

/// The path as a hook, which has another working directory, can use it.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// The directory of the state, whatever else is wrong with the file.
///
/// # Errors
///
/// Where the file names one, and can't be read.
pub fn state_dir(
    explicit: Option<&OsStr>,
    variable: Option<&OsStr>,
) -> Result<PathBuf, ConfigError> {
    #[derive(Deserialize)]
    struct Only {
        state_dir: Option<PathBuf>,
    }
    let (path, _) = located(explicit, variable);
    let mut state_dir = None;
    for (path, text) in leniently(&path) {
        match toml::from_str::<Only>(&text) {
            Ok(only) => state_dir = only.state_dir.or(state_dir),
            // A host with the default directory alone loses nothing by a broken file.
            Err(problem) if text.contains("state_dir") => {
                return Err(ConfigError::Malformed { path, problem: Box::new(problem) });
            }
            Err(_) => {}
        }
    }
    Ok(state_dir.unwrap_or_else(|| Config::default().state_dir))
}

/// Those of the files that can be read, in order, with what they say.
fn leniently(path: &Path) -> Vec<(PathBuf, String)> {
    let main = fs::read_to_string(path).map(|text| (path.to_owned(), text));
    main.into_iter().chain(drop_ins(path).unwrap_or_default()).collect()
}

/// The candidates for the real runtime, whatever else is wrong with the file.
#[must_use]
pub fn candidates(explicit: Option<&OsStr>, variable: Option<&OsStr>) -> Vec<String> {
    #[derive(Deserialize)]
    struct Only {
        runtime: Option<OnlyRuntime>,
    }
    #[derive(Deserialize)]
    struct OnlyRuntime {
        candidates: Option<Vec<String>>,
    }
    let (path, _) = located(explicit, variable);
    let said = leniently(&path).into_iter().rev();
    said.filter_map(|(_, text)| toml::from_str::<Only>(&text).ok()?.runtime?.candidates)
        .find(|candidates| !candidates.is_empty())
        .unwrap_or_else(|| Runtime::default().candidates)
}

/// The configuration that `text` of `path` says.
///
/// # Errors
///
/// Where it is no TOML, has unknown keys, or holds what can't be meant.
pub fn parse(text: &str, path: &Path) -> Result<Config, ConfigError> {
    let config = read(text, path)?;
    config.validate(path).map(|()| config)
}

/// The same where values may still be another file's to complete.
fn read(text: &str, path: &Path) -> Result<Config, ConfigError> {
    let problem = match toml::from_str::<Config>(text) {
        Ok(config) => return Ok(config),
        Err(problem) => problem,
    };
    let table: toml::Table = text.parse().map_err(malformed(path))?;
    let known = toml::Table::try_from(Config::default())
        .expect("the defaults are plain strings, numbers and tables");
    Err(match unknown_key(&table, &known) {
        Some((key, nearest)) => ConfigError::UnknownKey { path: path.to_owned(), key, nearest },
        None => malformed(path)(problem),
    })
}

/// The first key of `table` that `known` lacks, with the known key nearest to it.
fn unknown_key(table: &toml::Table, known: &toml::Table) -> Option<(String, String)> {
    let all = dotted(known, "");
    let is_known = |key: &String| match key.strip_suffix('.') {
        Some(_) => all.iter().any(|known| known.starts_with(key.as_str())),
        None => all.contains(key),
    };
    dotted(table, "").into_iter().find(|key| !is_known(key)).map(|key| {
        let key = key.trim_end_matches('.').to_owned();
        let nearest = all
            .iter()
            .min_by_key(|candidate| strsim::damerau_levenshtein(candidate, &key))
            .cloned()
            .unwrap_or_default();
        (key, nearest)
    })
}

/// Every key of a table of tables, as `table.key`; an empty table as `table.`.
fn dotted(table: &toml::Table, prefix: &str) -> Vec<String> {
    let mut keys = Vec::new();
    for (key, value) in table {
        let name = format!("{prefix}{key}");
        match value {
            toml::Value::Table(inner) if inner.is_empty() => keys.push(format!("{name}.")),
            toml::Value::Table(inner) => keys.extend(dotted(inner, &format!("{name}."))),
            _ => keys.push(name),
        }
    }
    keys
}

impl Config {
    /// The part that `request` decides by; the backend isn't known here.
    #[must_use]
    pub fn rules(&self) -> Rules<'_> {
        let admission = &self.admission;
        Rules {
            trust: Trust { env: admission.trust_env, annotations: admission.trust_annotations },
            profile: admission.profile,
            whole: self.driver.whole != Whole::Off,
            whole_beside_quota: admission.accept_nvidia_visible_devices_envvar_when_unprivileged,
            exclusive: admission.exclusive,
            require_quota: admission.require_quota,
            refuses_privileged: admission.privileged == Privileged::Refuse,
            resource_variables: &admission.resource_variables,
            default_memory: DefaultMemory::of_mib(admission.default_memory_mib()),
            is_gate: true,
            ungranted: self.kubernetes.ungranted,
        }
    }

    fn validate(&self, path: &Path) -> Result<(), ConfigError> {
        for (key, value) in [
            ("admission.default_memory", &self.admission.default_memory),
            ("admission.reserve", &self.admission.reserve),
        ] {
            if size_mib(value).is_none() {
                let (path, value) = (path.to_owned(), format!("{value:?}"));
                let expected = "must be a size as \"4GiB\" or \"512MiB\", or \"0\"";
                return Err(ConfigError::BadValue { path, key, value, expected });
            }
        }
        let bad = |key, value: String, expected| {
            Err(ConfigError::BadValue { path: path.to_owned(), key, value, expected })
        };
        let admission = &self.admission;
        if !(1..=25).contains(&admission.max_inst) {
            let value = admission.max_inst.to_string();
            return bad("admission.max_inst", value, "must be 1 to 25");
        }
        if self.compute.policy > POLICY_NATIVE {
            let value = self.compute.policy.to_string();
            return bad("compute.policy", value, "must be 0 to 5");
        }
        if !(20..=99).contains(&self.compute.prio_ratio) {
            let value = self.compute.prio_ratio.to_string();
            return bad("compute.prio_ratio", value, "must be 20 to 99");
        }
        if !(admission.overcommit > 0.0 && admission.overcommit <= 100.0) {
            let value = admission.overcommit.to_string();
            return bad("admission.overcommit", value, "must be above 0 and at most 100");
        }
        if self.runtime.candidates.iter().all(String::is_empty) {
            return bad("runtime.candidates", "[]".into(), "must name a runtime, as \"runc\"");
        }
        if !(1..=600).contains(&self.inventory.refresh_timeout_s) {
            let value = self.inventory.refresh_timeout_s.to_string();
            return bad("inventory.refresh_timeout_s", value, "must be 1 to 600 seconds");
        }
        if let Sink::File(log) = Sink::of(&self.log)
            && !log.is_absolute()
        {
            let expected = "must be an absolute path, journald, stderr, or empty";
            return bad("log", format!("{:?}", self.log), expected);
        }
        for (key, value) in [
            ("state_dir", &self.state_dir),
            ("isolation.km_root", &self.isolation.km_root),
            ("driver.root", &self.driver.root),
            ("driver.proc_root", &self.driver.proc_root),
            ("view.socket", &self.view.socket),
        ] {
            if !value.is_absolute() {
                return bad(key, format!("{value:?}"), "must be an absolute path");
            }
        }
        let dev_root = &self.driver.dev_root;
        if !dev_root.as_os_str().is_empty() && !dev_root.is_absolute() {
            let expected = "must be an absolute path, or empty";
            return bad("driver.dev_root", format!("{dev_root:?}"), expected);
        }
        if let Some(dir) = self.driver.cdi_dirs.iter().find(|dir| !dir.is_absolute()) {
            return bad("driver.cdi_dirs", format!("{dir:?}"), "must be absolute paths");
        }
        if self.driver.nvidia_runtime.is_empty() {
            let expected = "must name NVIDIA's runtime, as \"nvidia-container-runtime\"";
            return bad("driver.nvidia_runtime", "\"\"".into(), expected);
        }
        if !(1..=4096).contains(&self.isolation.channel_groups) {
            let value = self.isolation.channel_groups.to_string();
            return bad("isolation.channel_groups", value, "must be 1 to 4096");
        }
        if let Some(name) = admission.resource_variables.iter().find(|name| name.len() < 2) {
            let expected = "must be names of variables, or their beginnings with a *";
            return bad("admission.resource_variables", format!("{name:?}"), expected);
        }
        if self.isolation.filter_all {
            return bad("isolation.filter_all", "true".into(), "must be false in this version");
        }
        if self.inventory.source == InventorySource::File && !self.inventory.path.is_absolute() {
            let value = format!("{:?}", self.inventory.path);
            return bad("inventory.path", value, "must be the absolute path of an inventory file");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Config, String> {
        parse(text, Path::new("/c.toml")).map_err(|error| error.to_string())
    }

    #[test]
    fn an_empty_file_means_the_defaults() {
        assert_eq!(parsed("").unwrap(), Config::default());
    }

    #[test]
    fn shipped_file_shows_every_key_with_its_default() {
        let shipped = include_str!("../../../config/config.toml");
        assert_eq!(parsed(shipped).unwrap(), Config::default());
        let table: toml::Table = toml::from_str(shipped).unwrap();
        let known = toml::Table::try_from(Config::default()).unwrap();
        assert_eq!(dotted(&table, "").len(), dotted(&known, "").len());
    }

    #[test]
    fn unknown_key_is_refused_with_nearest_known_key() {
        assert_eq!(
            parsed("[admission]\nmax_insts = 3\n").unwrap_err(),
            "configuration /c.toml: unknown key admission.max_insts; \
             did you mean admission.max_inst?"
        );
        assert_eq!(
            parsed("statedir = \"/x\"\n").unwrap_err(),
            "configuration /c.toml: unknown key statedir; did you mean state_dir?"
        );
        assert_eq!(parsed("[admission]\n").unwrap(), Config::default());
        assert!(parsed("[admision]\n").unwrap_err().contains("unknown key admision;"));
    }

    /// Files next to the configuration add to it, and the last one counts.
    #[test]
    fn drop_in_files_add_and_the_last_counts() {
        let dir = tempfile::tempdir().unwrap();
        let main = dir.path().join("config.toml");
        let more = dir.path().join(DROP_INS);
        let loaded = || {
            let loaded = load(Some(main.as_os_str()), None).map(|loaded| loaded.config);
            loaded.map_err(|error| error.to_string().replace(dir.path().to_str().unwrap(), ""))
        };
        fs::create_dir(&more).unwrap();
        fs::write(&main, "log = \"\"\n[inventory]\nsource = \"file\"\n").unwrap();
        let write = |name: &str, text: &str| fs::write(more.join(name), text).unwrap();
        write("10-site.toml", "[inventory]\npath = \"/gpus\"\n[kubernetes]\nexempt = [\"a\"]\n");
        write("kubernetes.toml", "[kubernetes]\nungranted = \"none\"\n");
        for ignored in [".new.toml", "kubernetes.toml.bak"] {
            write(ignored, "no = configuration");
        }
        let config = loaded().unwrap();
        assert_eq!((config.log.as_str(), config.inventory.path.to_str()), ("", Some("/gpus")));
        assert_eq!(config.kubernetes.ungranted, Ungranted::None);
        assert_eq!(config.kubernetes.exempt, ["a"]);
        write(
            "20-site.toml",
            "state_dir = \"/b\"\n[kubernetes]\nexempt = []\n[runtime]\ncandidates = [\"crun\"]\n",
        );
        assert_eq!(loaded().unwrap().kubernetes.exempt, [""; 0]);
        // Those that read no more than they need.
        let named = Some(main.as_os_str());
        assert_eq!(candidates(named, None), ["crun"]);
        assert_eq!(state_dir(named, None).unwrap(), Path::new("/b"));
        write("30-site.toml", "state_dir = 1");
        assert!(state_dir(named, None).unwrap_err().to_string().contains("/conf.d/30-site.toml"));
        fs::remove_file(more.join("30-site.toml")).unwrap();
        for (text, error) in [
            ("[kubernetes]\nungrantet = 1", "unknown key kubernetes.ungrantet"),
            ("[admission]\nmax_inst = 26", "admission.max_inst = 26: must be 1 to 25"),
            ("[admission", "configuration /conf.d/kubernetes.toml: "),
        ] {
            write("kubernetes.toml", text);
            let reported = loaded().unwrap_err();
            assert!(
                reported.contains("/conf.d/kubernetes.toml: ") && reported.contains(error),
                "{reported}"
            );
        }
        fs::remove_file(more.join("kubernetes.toml")).unwrap();
        fs::create_dir(more.join("kubernetes.toml")).unwrap();
        assert!(loaded().unwrap_err().contains("/conf.d/kubernetes.toml: "));
        // Without the main file, too.
        fs::remove_dir(more.join("kubernetes.toml")).unwrap();
        fs::remove_file(&main).unwrap();
        assert!(loaded().unwrap_err().contains("config.toml"), "it was named");
    }

    #[test]
    fn values_that_cannot_be_meant_are_refused() {
        for (text, error) in [
            ("[admission]\nmax_inst = 0", "admission.max_inst = 0: must be 1 to 25"),
            ("[admission]\nmax_inst = 26", "admission.max_inst = 26: must be 1 to 25"),
            ("[compute]\npolicy = 6", "compute.policy = 6: must be 0 to 5"),
            ("[compute]\nprio_ratio = 19", "compute.prio_ratio = 19: must be 20 to 99"),
            (
                "[admission]\novercommit = 0.0",
                "admission.overcommit = 0: must be above 0 and at most 100",
            ),
            (
                "[admission]\novercommit = nan",
                "admission.overcommit = NaN: must be above 0 and at most 100",
            ),
            (
                "[driver]\ndev_root = \"x\"",
                "driver.dev_root = \"x\": must be an absolute path, or empty",
            ),
            ("state_dir = \"x\"", "state_dir = \"x\": must be an absolute path"),
            (
                "[inventory]\nsource = \"file\"",
                "inventory.path = \"\": must be the absolute path of an inventory file",
            ),
            (
                "[runtime]\ncandidates = []",
                "runtime.candidates = []: must name a runtime, as \"runc\"",
            ),
            ("[isolation]\nchannel_groups = 0", "isolation.channel_groups = 0: must be 1 to 4096"),
            (
                "[isolation]\nfilter_all = true",
                "isolation.filter_all = true: must be false in this version",
            ),
        ] {
            assert_eq!(parsed(text).unwrap_err(), format!("configuration /c.toml: {error}"));
        }
    }

    #[test]
    fn a_wrong_type_is_refused_on_one_line() {
        let error = parsed("[admission]\nmax_inst = \"many\"").unwrap_err();
        assert!(error.starts_with("configuration /c.toml: TOML parse error at line 2"), "{error}");
        assert!(!error.contains('\n'));
    }

    #[test]
    fn candidates_survive_a_broken_rest() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("c.toml");
        fs::write(&file, "nonsense = 1\n[runtime]\ncandidates = [\"crun\"]\n").unwrap();
        assert_eq!(candidates(Some(file.as_os_str()), None), ["crun"]);
        fs::write(&file, "[[[").unwrap();
        assert_eq!(candidates(Some(file.as_os_str()), None), ["runc", "crun"]);
        assert_eq!(candidates(Some(OsStr::new("/nowhere/c.toml")), None), ["runc", "crun"]);
    }

    /// A configuration file that is named must exist, and the flag wins over the variable.
    #[test]
    fn named_file_must_exist_and_the_flag_wins() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("c.toml");
        fs::write(&file, "log = \"\"\n").unwrap();
        let loaded = load(Some(file.as_os_str()), Some(OsStr::new("/nowhere"))).unwrap();
        assert_eq!(loaded.config.log, "");
        assert_eq!(loaded.path.as_deref(), Some(file.as_path()));
        let missing = load(None, Some(OsStr::new("/nowhere/c.toml"))).unwrap_err().to_string();
        assert!(missing.starts_with("configuration /nowhere/c.toml: No such file"), "{missing}");
    }
}
