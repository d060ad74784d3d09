//! `cgpu-hook`: the OCI hook.
//!
//! Called by the real runtime because `cgpu-runtime` or the `precreate` stage put it
//! into the bundle ([`Caller::Wrapper`], [`Caller::Precreate`]: the key comes as an
//! argument), or alone, by a hooks directory or a CI system: then the bundle that the
//! state names says what the container asks for. `prestart` and `createRuntime` turn
//! isolation on, or the create fails; `poststop` ends it, is idempotent, and never fails.

pub mod command_line;

use std::error::Error;
use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use rustix::process::{Pid, getppid};
use serde::Deserialize;
use thiserror::Error;
use tracing::warn;

use crate::admission::Admission;
use crate::admission::bundle_marks::{PROGRAM, WHOLE};
use crate::admission::{self, AdmissionError};
use crate::container_names;
use crate::host;
use crate::host::Host;
use cgpu_core::request::{EntryPoint, Request};
use cgpu_host::config::{ConfigError, Whole};
use cgpu_host::events::Cause;
use cgpu_host::process::{ProcessId, boot_time_s};
use cgpu_host::registry::{Holder, Key};
use cgpu_inject::bundle::{Bundle, BundleError, HookCall, HookStage};

/// The largest state or configuration that we read from standard input, in bytes.
const MAX_INPUT_BYTES: u64 = 64 << 20;

/// How long a reservation of `precreate` waits for its container at most, in seconds.
const ANNOUNCED_S: u64 = 120;

/// The root under which `precreate` registers what has no id yet.
const PRECREATE_ROOT: &str = "precreate";

/// After this many seconds the runtime kills the hook, and the create has failed.
const TIMEOUT_S: i64 = 30;

/// Who put the hook into the bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Caller {
    /// The wrapper, which knows the container's key.
    Wrapper { key: Key },
    /// The `precreate` stage, which knows no id and made up a token.
    Precreate { token: String },
    /// None of ours: it was called from outside.
    Alone,
}

/// When the hook is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Stage {
    /// As createRuntime, for engines of old.
    #[value(name = "prestart")]
    Prestart,
    /// The container exists; its process has not started.
    #[value(name = "createRuntime")]
    CreateRuntime,
    /// The container is gone.
    #[value(name = "poststop")]
    Poststop,
    /// podman's: the configuration comes and goes through pipes.
    #[value(name = "precreate")]
    Precreate,
    /// As createRuntime, of a claim's CDI file (Kubernetes): the container must be cgpu-runtime's.
    #[value(name = "claim")]
    Claim,
}

/// What the runtime reports to a hook (OCI runtime specification, "State").
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct State {
    pub id: String,
    /// Its first process; absent or 0 where there is none.
    #[serde(default)]
    pub pid: i32,
    pub bundle: PathBuf,
}

/// Why a hook failed.
#[derive(Debug, Error)]
pub enum HookError {
    /// Standard input can't be read.
    #[error("cannot read standard input: {source}")]
    Input {
        #[source]
        source: io::Error,
    },
    /// Standard output can't be written.
    #[error("cannot write the configuration to standard output: {source}")]
    Output {
        #[source]
        source: io::Error,
    },
    /// It is no state.
    #[error(
        "standard input is not the container's OCI state: {source}; a runtime calls this hook with it"
    )]
    State {
        #[source]
        source: serde_json::Error,
    },
    /// The process in the state isn't there.
    #[error("container {id}: its process {pid} is gone; create it again")]
    Gone {
        id: String,
        /// The pid in the state.
        pid: i32,
    },
    /// A quota that only cgpu's runtime can enforce.
    #[error(
        "a hook can't enforce this container's memory quota, because it doesn't start the container; \
         make cgpu-runtime the engine's runtime, or set [isolation] backend = \"none\" in the \
         configuration to share GPUs without isolation"
    )]
    RuntimeNeeded,
    /// A claim whose container another runtime makes.
    #[error(
        "container {id} uses a claim of GPU memory, and the runtime that makes it isn't cgpu's, so that it would have no GPU: \
         set runtimeClassName: cgpu in the pod's spec, or make cgpu the engine's default runtime (`cgpu setup`)"
    )]
    OtherRuntime { id: String },
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The container can't have what it asks for.
    #[error(transparent)]
    Admission(#[from] AdmissionError),
}

impl HookError {
    /// What kept the container from being made.
    #[must_use]
    pub fn why(&self) -> Cause {
        match self {
            HookError::Admission(error) => error.why(),
            HookError::RuntimeNeeded | HookError::OtherRuntime { .. } => Cause::Isolation,
            HookError::Input { .. }
            | HookError::Output { .. }
            | HookError::State { .. }
            | HookError::Gone { .. }
            | HookError::Config(_) => Cause::Host,
        }
    }
}

impl From<BundleError> for HookError {
    fn from(error: BundleError) -> Self {
        HookError::Admission(error.into())
    }
}

/// The hooks that a bundle gets whose container has `plan`: one of each of `stages`.
///
/// # Errors
///
/// Where `cgpu-hook` isn't there.
pub fn calls(
    host: &Host,
    caller: &Caller,
    is_whole: bool,
    stages: &[HookStage],
) -> Result<Vec<HookCall>, AdmissionError> {
    let path = host::own_program(PROGRAM)?;
    let call = |stage: &HookStage| {
        let mut args = vec![PROGRAM.to_owned(), stage.name().to_owned()];
        let mut flag = |name: &str, value: &str| args.extend([name.to_owned(), value.to_owned()]);
        match caller {
            Caller::Wrapper { key } => {
                flag("--root", &key.root);
                flag("--id", &key.id);
            }
            Caller::Precreate { token } => flag("--reservation", token),
            Caller::Alone => {}
        }
        if is_whole {
            args.push(WHOLE.to_owned());
        }
        let mut flag = |name: &str, value: &str| args.extend([name.to_owned(), value.to_owned()]);
        if let Some(config) = &host.config_path {
            flag("--config", &config.to_string_lossy());
        }
        // Without one the hook would inherit what the container's author wrote.
        let env = vec!["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".into()];
        HookCall { stage: *stage, path: path.clone(), args, env, timeout_s: Some(TIMEOUT_S) }
    };
    Ok(stages.iter().map(call).collect())
}

/// Deregisters the container under `key`, which its own monitor has seen end. Never fails: what can't be ended is collected
/// by the next create.
pub fn deregister(config: Option<&Path>, key: &Key) {
    let released = Host::load(config.map(AsRef::as_ref))
        .map_err(|error| Box::new(error) as Box<dyn Error>)
        .and_then(|host| Ok(Admission::of(&host).release_ended(key, Pid::as_raw(getppid()))?));
    if let Err(error) = released {
        warn!(id = key.id, error, "{}", admission::UNDONE);
    }
}

/// Calls the hook of `stage`.
///
/// # Errors
///
/// Where the container must not start. `poststop` never fails: what it can't end is
/// collected by the next create.
pub fn run(
    host: &Host,
    stage: Stage,
    caller: &Caller,
    input: &mut dyn Read,
    output: &mut dyn Write,
) -> Result<(), HookError> {
    cgpu_host::log::init(&host.config.log);
    call(host, stage, caller, input, output)
}

/// Calls the hook of `stage` where the configuration can't be read, as `error` says: a container starts
/// that asks for nothing, since an engine calls its hooks for each.
///
/// # Errors
///
/// `error`, if the container asks for something or that can't be known.
pub fn run_unconfigured(
    (stage, caller): (Stage, &Caller),
    error: ConfigError,
    input: &mut dyn Read,
    output: &mut dyn Write,
) -> Result<(), HookError> {
    if *caller != Caller::Alone {
        return Err(error.into());
    }
    let bytes = read(input)?;
    if stage == Stage::Precreate {
        let bundle = Bundle::from_bytes(&bytes, PathBuf::new(), "config.json".into())?;
        return match host::names_nothing(&bundle, None) {
            true => write(&bytes, output),
            false => Err(error.into()),
        };
    }
    let state: State =
        serde_json::from_slice(&bytes).map_err(|source| HookError::State { source })?;
    let bundle = Bundle::load(&bundle_dir(&state), Path::new("config.json"))?;
    match host::names_nothing(&bundle, Some(&state.id)) {
        true => Ok(()),
        false => Err(error.into()),
    }
}

fn read(input: &mut dyn Read) -> Result<Vec<u8>, HookError> {
    let mut bytes = Vec::new();
    let read = input.take(MAX_INPUT_BYTES).read_to_end(&mut bytes);
    read.map_err(|source| HookError::Input { source })?;
    Ok(bytes)
}

fn write(bytes: &[u8], output: &mut dyn Write) -> Result<(), HookError> {
    let written = output.write_all(bytes).and_then(|()| output.flush());
    written.map_err(|source| HookError::Output { source })
}

/// Reports to the log and the events why no container is created: podman discards what a precreate
/// hook prints, and crun what any hook prints.
fn report_refusal(host: &Host, key: &Key, bundle: Result<Bundle, BundleError>, error: &HookError) {
    let name = bundle.ok().and_then(|bundle| container_names::of_bundle(&key.id, &bundle));
    Admission::of(host).report_refusal(key, name.as_deref(), (error, error.why()));
}

fn call(
    host: &Host,
    stage: Stage,
    caller: &Caller,
    input: &mut dyn Read,
    output: &mut dyn Write,
) -> Result<(), HookError> {
    let bytes = read(input)?;
    if stage == Stage::Precreate {
        return precreate(host, &bytes, output).inspect_err(|error| {
            let bundle = Bundle::from_bytes(&bytes, PathBuf::new(), "config.json".into());
            report_refusal(host, &announced(&token()), bundle, error);
        });
    }
    let state: State =
        serde_json::from_slice(&bytes).map_err(|source| HookError::State { source })?;
    match stage {
        Stage::Poststop => poststop(host, caller, &state),
        Stage::Claim => require_registered(host, &state).inspect_err(|error| {
            let bundle = Bundle::load(&state.bundle, Path::new("config.json"));
            report_refusal(host, &bundle_key(&bundle_dir(&state), &state.id), bundle, error);
        })?,
        _ => activate(host, caller, &state).inspect_err(|error| {
            let key = match caller {
                Caller::Wrapper { key } => key.clone(),
                Caller::Precreate { .. } | Caller::Alone => {
                    bundle_key(&bundle_dir(&state), &state.id)
                }
            };
            let bundle = Bundle::load(&state.bundle, Path::new("config.json"));
            report_refusal(host, &key, bundle, error);
        })?,
    }
    Ok(())
}

/// Sees that a container with a claim is cgpu-runtime's, which has registered it before it calls hooks.
fn require_registered(host: &Host, state: &State) -> Result<(), HookError> {
    match Admission::of(host).find_by_bundle(&bundle_dir(state), &state.id)? {
        Some(_) => Ok(()),
        None => Err(HookError::OtherRuntime { id: state.id.clone() }),
    }
}

/// The bundle without links; as it is where it is gone.
fn bundle_dir(state: &State) -> PathBuf {
    state.bundle.canonicalize().unwrap_or_else(|_| state.bundle.clone())
}

/// The key of a container whose runtime's root is not known.
fn bundle_key(bundle: &Path, id: &str) -> Key {
    Key { root: bundle.to_string_lossy().into_owned(), id: id.to_owned() }
}

pub(crate) fn announced(token: &str) -> Key {
    Key { root: PRECREATE_ROOT.into(), id: token.to_owned() }
}

fn activate(host: &Host, caller: &Caller, state: &State) -> Result<(), HookError> {
    let bundle = bundle_dir(state);
    // A hooks directory calls us for every container, and one that asks for nothing must
    // start whatever the state of ours is. The others asked when they got their hook.
    let mut request = None;
    if *caller == Caller::Alone {
        request = asked(host, &bundle, &state.id)?;
        if request.is_none() {
            return Ok(());
        }
    }
    let gone = || HookError::Gone { id: state.id.clone(), pid: state.pid };
    let init = match state.pid {
        ..=0 => None,
        pid => Some(ProcessId::of(pid).ok_or_else(gone)?),
    };
    let key = match caller {
        Caller::Wrapper { key } => key.clone(),
        Caller::Precreate { token } => {
            let key = bundle_key(&bundle, &state.id);
            Admission::of(host).rename(&announced(token), &key, &bundle)?;
            key
        }
        // The wrapper's own hook is in the bundle, too: one of the two comes first.
        Caller::Alone => match Admission::of(host).find_by_bundle(&bundle, &state.id)? {
            Some(record) => record.key,
            None => bundle_key(&bundle, &state.id),
        },
    };
    if host.may_get_more() {
        let record = Admission::of(host).registered(&key)?;
        let bundle = Bundle::load(&bundle, Path::new("config.json"))?;
        record.map_or(Ok(()), |record| host.refuse_more(&record, &bundle))?;
    }
    if Admission::of(host).activate(&key, &bundle, init)? {
        return Ok(());
    }
    if request.is_none() {
        request = asked(host, &bundle, &state.id)?;
    }
    match request {
        Some(request) => register(host, caller, key, &bundle, &request, init),
        None => Ok(()),
    }
}

/// What the container `id` asks for; `None` if that is nothing that a hook alone sees to.
fn asked(host: &Host, dir: &Path, id: &str) -> Result<Option<Request>, HookError> {
    let bundle = Bundle::load(dir, Path::new("config.json"))?;
    // A hook can give nothing to a container: one that only names GPUs gets none by us.
    let mut host = host.clone();
    host.config.driver.whole = Whole::Off;
    let decision = host.decide(&bundle, Some(id), EntryPoint::LateHook)?;
    Admission::of(&host).report_near_misses(&bundle_key(dir, id), &bundle, &decision);
    Ok(decision.request().cloned())
}

/// Registers a container that wasn't registered before it was created.
fn register(
    host: &Host,
    caller: &Caller,
    key: Key,
    dir: &Path,
    request: &Request,
    init: Option<ProcessId>,
) -> Result<(), HookError> {
    host::require_root()?;
    if *caller == Caller::Alone && request.has_quota() && host.backend.needs_runtime() {
        return Err(HookError::RuntimeNeeded);
    }
    let inventory = host.inventory(request)?;
    let proposal = host.plan(request, &inventory)?;
    // Reserved by the container's process: if we end here, its end ends the record.
    let holder = match init {
        Some(by) => Holder::Reserved { by },
        None => Holder::Announced { until_boot_s: boot_time_s() + ANNOUNCED_S, by: None },
    };
    let bundle = Bundle::load(dir, Path::new("config.json"));
    let name = bundle.ok().and_then(|bundle| container_names::of_bundle(&key.id, &bundle));
    let record = Admission::of(host).reserve(key.clone(), dir, &proposal, holder)?;
    Admission::of(host).report_creation(&record, name.as_deref(), None);
    Admission::of(host).activate(&key, dir, init)?;
    Ok(())
}

fn poststop(host: &Host, caller: &Caller, state: &State) {
    // If no container was ever registered, no state directory is made for asking.
    if fs::symlink_metadata(&host.config.state_dir)
        .is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    {
        return;
    }
    let bundle = bundle_dir(state);
    let mut keys = Vec::new();
    match caller {
        Caller::Wrapper { key } => keys.push(key.clone()),
        Caller::Precreate { token } => {
            keys.extend([announced(token), bundle_key(&bundle, &state.id)]);
        }
        Caller::Alone => {
            let found = Admission::of(host).find_by_bundle(&bundle, &state.id).ok().flatten();
            keys.extend(found.map(|record| record.key));
            keys.push(bundle_key(&bundle, &state.id));
        }
    }
    for key in keys {
        let released = match caller {
            // A job may call us itself, as its last word.
            Caller::Alone => Admission::of(host).release(&key),
            _ => Admission::of(host).release_ended(&key, Pid::as_raw(getppid())),
        };
        if let Err(error) = released {
            let error: &dyn Error = &error;
            warn!(id = key.id, error, "{}", admission::UNDONE);
        }
    }
}

/// Does what the wrapper does, to a configuration that goes through pipes.
fn precreate(host: &Host, bytes: &[u8], output: &mut dyn Write) -> Result<(), HookError> {
    let mut write = |bytes: &[u8]| write(bytes, output);
    let mut bundle = Bundle::from_bytes(bytes, PathBuf::new(), "config.json".into())?;
    let decision = host.decide(&bundle, None, EntryPoint::PrecreateHook)?;
    Admission::of(host).report_near_misses(&announced(&token()), &bundle, &decision);
    let Some(request) = decision.request() else { return write(bytes) };
    if host.serves_unregistered(request) {
        return match host.equip_unregistered(request, &mut bundle)? {
            true => write(bundle.to_text().as_bytes()),
            false => write(bytes),
        };
    }
    host::require_root()?;
    if request.has_quota() && host.backend.needs_runtime() {
        return Err(HookError::RuntimeNeeded);
    }
    let inventory = host.inventory(request)?;
    let proposal = host.plan(request, &inventory)?;
    let mut host = host.clone();
    // Another runtime than the engine's can't be had from here.
    if host.config.driver.whole == Whole::NvidiaRuntime {
        host.config.driver.whole = Whole::Auto;
    }
    host.decide_injection(proposal.is_whole(), |_| false);
    let host = &host;
    let hook = host::own_program(PROGRAM)?;
    let token = match bundle.hook_argument(&hook, "--reservation") {
        Some(token) => token.to_owned(),
        None => token(),
    };
    let caller = Caller::Precreate { token: token.clone() };
    let calls = calls(host, &caller, proposal.is_whole(), HookStage::OURS)?;
    // podman, or its service, which lives on after a failed container creation.
    let by = ProcessId::of(Pid::as_raw(getppid()));
    let holder = Holder::Announced { until_boot_s: boot_time_s() + ANNOUNCED_S, by };
    // It has no id that an engine's file could be found by; a pod's has its name all the same.
    let name = container_names::of_bundle(&token, &bundle);
    let record =
        Admission::of(host).reserve(announced(&token), Path::new(""), &proposal, holder)?;
    let driver = host.driver_of(&record.plan, &inventory, &bundle, request.is_as_brought());
    let (nodes, driver) = match driver {
        Ok(driver) => driver,
        Err(error) => {
            if let Err(error) = Admission::of(host).withdraw(&announced(&token)) {
                not_taken_back(&error);
            }
            return Err(error.into());
        }
    };
    Admission::of(host).report_creation(&record, name.as_deref(), Some(driver.mode));
    let equip = || -> Result<(), HookError> {
        bundle.apply(&host.edits((&record, request), &bundle, nodes, driver.edits, calls)?)?;
        write(bundle.to_text().as_bytes())
    };
    equip().inspect_err(|_| {
        // No container will claim it.
        if let Err(error) = Admission::of(host).release_unmade(&announced(&token)) {
            not_taken_back(&error);
        }
    })
}

fn not_taken_back(error: &AdmissionError) {
    let error: &dyn Error = error;
    warn!(
        error,
        "a failed create's reservation can't be taken back: it is held until podman has ended, and \
         for {ANNOUNCED_S} s at most"
    );
}

/// A name that no other reservation has: our pid, and when we started.
fn token() -> String {
    match ProcessId::own() {
        Some(own) => format!("{}-{}", own.pid, own.start_ticks),
        None => format!("{}-{}", std::process::id(), boot_time_s()),
    }
}

/// The words of `cgpu-hook`'s command line as a caller.
#[must_use]
pub fn caller(root: Option<String>, id: Option<String>, reservation: Option<String>) -> Caller {
    match (root, id, reservation) {
        (Some(root), Some(id), _) => Caller::Wrapper { key: Key { root, id } },
        (_, _, Some(token)) => Caller::Precreate { token },
        _ => Caller::Alone,
    }
}
