//! `cgpu-runtime`: the OCI runtime that engines call.
//!
//! Owns the order of one call. `create`, `run` and `restore` of a container that asks
//! for GPUs get their bundle edited; an `exec` in one that has a quota goes behind its
//! isolation, or fails; a `checkpoint` that would end a container for good is refused; then, and for
//! everything else at once, this process becomes the real runtime.
//! Nothing is printed on success.

pub mod argv;
mod conmon;
pub mod nvidia;
pub mod real;
mod runtime_state;

use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

use argv::{Command, Create, Dialect};
use real::{Real, RealRuntimeError};
use runtime_state::{Joins, RuntimeState, RuntimeStateError};
use thiserror::Error;
use tracing::warn;

use crate::admission::Admission;
use crate::admission::{self, AdmissionError, bundle_marks};
use crate::backend::{Launch, Launcher};
use crate::container_names;
use crate::hook;
use crate::host;
use crate::host::Host;
use cgpu_core::gpu::Inventory;
use cgpu_core::plan::Kind;
use cgpu_core::request::{EntryPoint, Request, Verdict};
use cgpu_host::config::{self, ConfigError};
use cgpu_host::events::Cause;
use cgpu_host::failpoint::failpoint;
use cgpu_host::process::ProcessId;
use cgpu_host::registry::{Holder, Key, Record};
use cgpu_host::report::{ErrorLog, report};
use cgpu_inject::bundle::{Bundle, BundleError, Edits, HookCall, HookStage, ProcessFile};
use cgpu_inject::{self as inject, Mode, Nodes};

/// Why a call ended here.
#[derive(Debug, Error)]
pub enum RuntimeError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Real(#[from] RealRuntimeError),
    /// The container can't have what it asks for.
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    /// The id can't be distinguished from the other words.
    #[error(
        "cannot tell the container's id from the arguments, and it asks for GPUs; give the id as the last argument"
    )]
    NoId,
    /// A process in a container whose quota is no longer enforced: its record is missing.
    #[error(
        "container {id} was made with a GPU quota, and no record of it is in {}: a process that \
         is started in it now would be outside of the quota; remove the container and create it \
         again (its own processes stay as they are until then)",
        state_dir.display()
    )]
    Unregistered {
        id: String,
        /// Where its record should be.
        state_dir: PathBuf,
    },
    /// A bundle that has GPUs from us, and asks for none.
    #[error(
        "bundle {} has GPUs that cgpu gave it in an earlier create, and asks for nothing that it \
         gives now ({reason}): they would be outside of any quota; make the bundle anew, or ask as before",
        bundle.display()
    )]
    Leftover {
        bundle: PathBuf,
        /// Why nothing is asked for.
        reason: String,
    },
    /// A checkpoint of a container whose quota the gate would hold.
    #[error(
        "a container with a GPU quota can't be restored under backend gate: criu needs \
         prctl(PR_SET_MM), which the gate refuses; make the container anew from its bundle, by \
         create or run"
    )]
    Restore,
    /// A checkpoint that would end a container which can't be restored.
    #[error(
        "cannot checkpoint container {id}: it has a GPU quota under backend gate, which refuses the \
         prctl(PR_SET_MM) that criu needs for a restore, so the checkpoint would end it for good; add \
         --leave-running to save its state and keep it running (docker checkpoint create and podman \
         container checkpoint have the flag, too)"
    )]
    Checkpoint { id: String },
    /// What the runtime keeps of a container.
    #[error(transparent)]
    RuntimeState(#[from] RuntimeStateError),
    /// NVIDIA's runtime isn't there.
    #[error(
        "inject or whole = \"nvidia-runtime\", and {name} is no executable file in PATH or the \
         usual directories; install NVIDIA's container toolkit, set driver.nvidia_runtime to where \
         it is, or set inject and whole to \"auto\""
    )]
    NoNvidia {
        /// What it is called in the configuration.
        name: String,
    },
    /// We can't see when we were started.
    #[error("cannot read /proc/self/stat; mount /proc")]
    NoProc,
}

impl RuntimeError {
    /// What kept a container from being made.
    fn why(&self) -> Cause {
        match self {
            RuntimeError::Admission(error) => error.why(),
            RuntimeError::NoId | RuntimeError::Leftover { .. } => Cause::Request,
            RuntimeError::NoNvidia { .. } => Cause::Driver,
            RuntimeError::Unregistered { .. }
            | RuntimeError::Restore
            | RuntimeError::Checkpoint { .. } => Cause::Isolation,
            RuntimeError::Config(_)
            | RuntimeError::Real(_)
            | RuntimeError::RuntimeState(_)
            | RuntimeError::NoProc => Cause::Host,
        }
    }
}

impl From<BundleError> for RuntimeError {
    fn from(error: BundleError) -> Self {
        RuntimeError::Admission(error.into())
    }
}

/// Does what `args` say; `called` is the path by which we were called. Returns only if that
/// failed; the engine has the reason then.
pub fn main(called: &OsStr, args: Vec<OsString>) {
    let line = argv::take_own_flags(args);
    let variable = std::env::var_os(config::PATH_VARIABLE);
    let candidates = match real::below(called) {
        Some(lower) => vec![lower],
        None => config::candidates(line.config.as_deref(), variable.as_deref()),
    };
    let path = std::env::var_os("PATH");
    let mut log;
    let error = match real::find(&candidates, path.as_deref()) {
        Ok(real) => {
            let dialect = Dialect::of(&real.file);
            let command = argv::parse(&line.args, dialect);
            log = error_log(&command, dialect);
            call(&real, &line, command)
        }
        Err(error) => {
            // The engine's words are those of the runtime that it would have had.
            let dialect =
                candidates.first().map_or(Dialect::Runc, |name| Dialect::of(name.as_ref()));
            log = error_log(&argv::parse(&line.args, dialect), dialect);
            error.into()
        }
    };
    log.is_named = conmon::names_us();
    report(&error, &log);
}

/// Where the engine wants to read why `command` failed.
fn error_log(command: &Command, dialect: Dialect) -> ErrorLog {
    // crun goes into the bundle before it opens its log (`crun_command_create` in `src/create.c`).
    let (path, json, bundle) = match command {
        Command::Create(create) => (&create.log, create.log_json, create.bundle.as_deref()),
        Command::Exec(exec) => (&exec.log, exec.log_json, None),
        Command::Checkpoint(checkpoint) => (&checkpoint.log, checkpoint.log_json, None),
        Command::PassThrough => return ErrorLog::default(),
    };
    let directory = bundle.filter(|_| dialect == Dialect::Crun).unwrap_or(Path::new(""));
    let path = path.as_ref().and_then(|path| argv::log_file(dialect, path, directory));
    ErrorLog { path, json, is_named: false }
}

/// Makes the call; returns only where that failed.
fn call(real: &Real, line: &argv::CommandLine, command: Command) -> RuntimeError {
    let prepared = match command {
        Command::PassThrough => Ok(None),
        Command::Exec(exec) => join(real, line, &exec).map(|()| None),
        Command::Checkpoint(checkpoint) => keep(real, line, &checkpoint).map(|()| None),
        Command::Create(create) => prepare(real, line, &create)
            .inspect_err(|error| report_refusal(real, line, &create, error)),
    };
    match prepared {
        Err(error) => error,
        Ok(None) => real::exec(real, &line.args).into(),
        Ok(Some(reserved)) => {
            failpoint("before-exec");
            let error = real::exec(reserved.nvidia.as_ref().unwrap_or(real), &line.args);
            reserved.undo();
            let (host, name) = (&reserved.host, reserved.name.as_deref());
            let error = RuntimeError::from(error);
            Admission::of(host).report_refusal(&reserved.key, name, (&error, error.why()));
            error
        }
    }
}

/// Reports to the log and the events why a container creation is refused, if the container is known:
/// `main` reports to the engine.
fn report_refusal(real: &Real, line: &argv::CommandLine, create: &Create, error: &RuntimeError) {
    let Ok(host) = Host::load(line.config.as_deref()) else { return };
    let id = create.id.as_ref().map(|id| id.to_string_lossy().into_owned()).unwrap_or_default();
    let key = Key { root: key_root(real, create.root.as_deref()), id };
    let bundle = Bundle::load(&bundle_dir(create), &bundle_file(create));
    let name = bundle.ok().and_then(|bundle| container_names::of_bundle(&key.id, &bundle));
    cgpu_host::log::init(&host.config.log);
    Admission::of(&host).report_refusal(&key, name.as_deref(), (error, error.why()));
}

fn bundle_dir(create: &Create) -> PathBuf {
    create.bundle.clone().unwrap_or_else(|| ".".into())
}

/// The file in it.
fn bundle_file(create: &Create) -> PathBuf {
    create.config_file.as_deref().map_or_else(|| "config.json".into(), config_path)
}

/// This host for a command in one of the containers `ids`, which exist; `None` if none of them can have a quota.
///
/// # Errors
///
/// If the configuration can't be read, and one of them may have a quota.
fn host_of<'a>(
    line: &argv::CommandLine,
    mut ids: impl Iterator<Item = &'a str>,
    retained: impl Fn(&str) -> Result<Option<RuntimeState>, RuntimeStateError>,
) -> Result<Option<Host>, RuntimeError> {
    // Only root's containers are registered.
    if host::require_root().is_err() {
        return Ok(None);
    }
    let variable = std::env::var_os(config::PATH_VARIABLE);
    match config::state_dir(line.config.as_deref(), variable.as_deref()) {
        Ok(state_dir) => {
            let config = config::Config { state_dir, ..config::Config::default() };
            Ok(Some(Host::new(config, None)))
        }
        Err(error) => {
            let is_ours = |id| {
                retained(id).map(|retained| retained.is_some_and(|retained| retained.has_quota))
            };
            match ids.any(|id| is_ours(id).unwrap_or(true)) {
                true => Err(error.into()),
                false => Ok(None),
            }
        }
    }
}

/// Goes where the container is in which an `exec` starts a process.
fn join(real: &Real, line: &argv::CommandLine, exec: &argv::Exec) -> Result<(), RuntimeError> {
    let ids = || exec.ids.iter().filter_map(|id| id.to_str());
    let root = key_root(real, exec.root.as_deref());
    let retained = |id: &str| runtime_state::find(real, exec.root.as_deref(), Path::new(&root), id);
    let Some(host) = host_of(line, ids(), retained)? else { return Ok(()) };
    for id in ids() {
        let key = Key { root: root.clone(), id: id.to_owned() };
        // In this order: a record that is made later is of a container that is.
        let retained = retained(id)?;
        let record = Admission::of(&host).registered(&key)?;
        match runtime_state::joins(record.as_ref(), retained.as_ref()) {
            Joins::Outside => {}
            Joins::Nowhere if runtime_state::has_ended(real, Path::new(&root), id) => {}
            Joins::Nowhere => {
                let state_dir = host.config.state_dir;
                return Err(RuntimeError::Unregistered { id: key.id, state_dir });
            }
            Joins::Behind(record) => {
                if let Some(process) = &exec.process {
                    // Without, most images find the driver all the same; and a file that can't be
                    // read is the runtime's to refuse.
                    let _ = complete(&host, record, process);
                }
                return Ok(Admission::of(&host).enter(record)?);
            }
        }
    }
    Ok(())
}

/// Gives a process that an engine starts in a running container (`exec --process`) the variables
/// that the container's own process got: an engine makes them of what it knows.
fn complete(host: &Host, record: &Record, process: &Path) -> Result<(), BundleError> {
    let bundle = Bundle::load(&record.bundle, Path::new("config.json"))?;
    let process = ProcessFile::load(process)?;
    let env = process.env();
    let mut variables = inject::variables(&bundle, &env, &host.config.state_dir);
    variables.extend(host.variables(&record.plan, &env));
    process.set_env(&variables)
}

/// Sees that the container of a `checkpoint` runs on, or that nothing keeps it from being restored.
fn keep(
    real: &Real,
    line: &argv::CommandLine,
    checkpoint: &argv::Checkpoint,
) -> Result<(), RuntimeError> {
    if checkpoint.leaves_running {
        return Ok(());
    }
    let ids = || checkpoint.ids.iter().filter_map(|id| id.to_str());
    let root = key_root(real, checkpoint.root.as_deref());
    let retained =
        |id: &str| runtime_state::find(real, checkpoint.root.as_deref(), Path::new(&root), id);
    let Some(host) = host_of(line, ids(), retained)? else { return Ok(()) };
    for id in ids() {
        // What isn't there, or can't be read, is the runtime's to refuse.
        let Ok(Some(retained)) = retained(id) else { continue };
        let record =
            Admission::of(&host).registered(&Key { root: root.clone(), id: id.to_owned() })?;
        if let Joins::Behind(record) = runtime_state::joins(record.as_ref(), Some(&retained))
            && record.plan.backend == Kind::Gate
        {
            return Err(RuntimeError::Checkpoint { id: id.to_owned() });
        }
    }
    Ok(())
}

/// The runtime's `--root`, as keys have it.
fn key_root(real: &Real, given: Option<&Path>) -> String {
    let root = given.unwrap_or_else(|| Dialect::of(&real.file).default_root());
    resolved(root).to_string_lossy().into_owned()
}

/// A reservation that must not outlive a failure.
struct Reserved {
    host: Host,
    key: Key,
    /// What its engine calls the container.
    name: Option<String>,
    /// NVIDIA's runtime, where that makes the container, by the real one in its turn.
    nvidia: Option<Real>,
    /// Whether the container has an event.
    is_reported: bool,
}

impl Reserved {
    /// The driver's nodes and files for the container of `record`, which is reported now.
    fn driver(
        &mut self,
        record: &Record,
        inventory: &Inventory,
        bundle: &Bundle,
        as_brought: bool,
    ) -> Result<(Nodes, Edits), RuntimeError> {
        let (nodes, injection) =
            self.host.driver_of(&record.plan, inventory, bundle, as_brought)?;
        self.nvidia = match injection.mode {
            Mode::NvidiaRuntime => Some(nvidia::runtime(&self.host.config.driver)?),
            Mode::Cdi | Mode::Native | Mode::Off => None,
        };
        let files = Some(injection.mode).filter(|_| !as_brought);
        Admission::of(&self.host).report_creation(record, self.name.as_deref(), files);
        self.is_reported = true;
        Ok((nodes, injection.edits))
    }

    /// Gives the bundle what the container needs, and starts what has to be there first.
    fn equip(
        &self,
        (record, request): (&Record, &Request),
        bundle: &mut Bundle,
        (nodes, driver): (Nodes, Edits),
        calls: Vec<HookCall>,
        (by, begun): (ProcessId, Option<Launcher>),
    ) -> Result<(), AdmissionError> {
        let has_monitor = !calls.is_empty();
        let edits = self.host.edits((record, request), bundle, nodes, driver, calls)?;
        let changed = bundle.apply(&edits)?;
        if has_monitor {
            let how = Launch {
                own_mounts: bundle.has_own_mounts(),
                processor_limit: bundle.processor_limit(),
                processor_shares: bundle.processor_shares(),
                bundle: &record.bundle,
                root: &self.key.root,
                name: self.name.as_deref(),
                launcher: by,
                state_file: match &record.holder {
                    Holder::Launched { state_file, .. } => Some(state_file),
                    Holder::Reserved { .. }
                    | Holder::Announced { .. }
                    | Holder::Leaked { .. }
                    | Holder::Active { .. } => None,
                },
                config: self.host.config_path.as_deref(),
            };
            Admission::of(&self.host).launch(record, how, begun)?;
        }
        failpoint("launched");
        if changed {
            bundle.save()?;
        }
        failpoint("bundle-replaced");
        Admission::of(&self.host).enter(record)
    }

    fn undo(&self) {
        let undone = match self.is_reported {
            true => Admission::of(&self.host).release_unmade(&self.key).map(drop),
            false => Admission::of(&self.host).withdraw(&self.key),
        };
        if let Err(error) = undone {
            let error: &dyn Error = &error;
            warn!(id = self.key.id, error, "{}", admission::UNDONE);
        }
    }
}

/// Reserves what a container asks for and edits its bundle; `None` if it asks for nothing, and nothing
/// was touched.
fn prepare(
    real: &Real,
    line: &argv::CommandLine,
    create: &Create,
) -> Result<Option<Reserved>, RuntimeError> {
    let (dir, file) = (bundle_dir(create), bundle_file(create));
    let mut bundle = match Bundle::load(&dir, &file) {
        // The runtime, which looks in the same place, says so in its own words.
        Err(error) if error.is_absence() && create.certain => return Ok(None),
        loaded => loaded?,
    };
    let id = create.id.as_ref().and_then(|id| id.to_str());
    let host = match Host::load(line.config.as_deref()) {
        Ok(host) => host,
        Err(_) if host::names_nothing(&bundle, id) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    host.take_grant(&bundle)?;
    let decision = host.decide(&bundle, id, EntryPoint::Runtime)?;
    let root = key_root(real, create.root.as_deref());
    if !decision.near_misses.is_empty() {
        let key = Key { root: root.clone(), id: id.unwrap_or_default().to_owned() };
        Admission::of(&host).report_near_misses(&key, &bundle, &decision);
    }
    let request = match decision.verdict {
        Verdict::Ours(request) => request,
        Verdict::NotOurs(reason) => {
            return match bundle.hooks().is_some_and(bundle_marks::are_ours) {
                true => Err(RuntimeError::Leftover { bundle: bundle.dir().to_owned(), reason }),
                false => Ok(None),
            };
        }
    };
    if host.serves_unregistered(&request) {
        if host.equip_unregistered(&request, &mut bundle)? {
            bundle.save()?;
        }
        return Ok(None);
    }
    let may_be_unregistered = request.may_be_unregistered() && !host.config.admission.exclusive;
    let key = id.ok_or(RuntimeError::NoId).map(|id| Key { root, id: id.to_owned() });
    match key.and_then(|key| register((real, create), host, key, &request, bundle)) {
        // It was given nothing and nothing is reserved for it: that it isn't listed is no reason to stop it.
        Err(error) if may_be_unregistered => {
            let error: &dyn Error = &error;
            warn!(id, error, "a container with GPUs that its engine brought is not registered");
            Ok(None)
        }
        registered => registered,
    }
}

/// Reserves what `request` resolves to for the container of `key`, and edits its bundle.
fn register(
    (real, create): (&Real, &Create),
    mut host: Host,
    key: Key,
    request: &Request,
    mut bundle: Bundle,
) -> Result<Option<Reserved>, RuntimeError> {
    let gated = request.has_quota() && host.backend == Kind::Gate;
    if gated && create.verb == argv::Verb::Restore {
        return Err(RuntimeError::Restore);
    }
    host::require_root()?;
    // It starts while the rest is found out.
    let begun = request.has_quota().then(|| host.isolation(host.backend).begin_launch());
    failpoint("recruited");
    cgpu_host::log::init(&host.config.log);

    let inventory = host.inventory(request)?;
    let name = container_names::of_bundle(&key.id, &bundle);
    let proposal = host
        .plan(request, &inventory)
        .map_err(|error| Admission::of(&host).with_past(error, &key, name.as_deref()))?;
    let as_brought = request.is_as_brought();
    if as_brought && proposal.is_empty() {
        return Ok(None);
    }
    // NVIDIA's runtime looks at no other verb.
    host.decide_injection(proposal.is_whole(), |config| {
        create.verb == argv::Verb::Create && nvidia::makes(&config.driver, real)
    });
    let by = ProcessId::own().ok_or(RuntimeError::NoProc)?;
    // By a hook it is seen what NVIDIA's runtime has made of the bundle.
    let backend = proposal.backend();
    let is_held = backend != Kind::None;
    let holder = match backend.needs_hook() || (is_held && host.may_get_more()) {
        true => Holder::Reserved { by },
        false => launched(by, real, create, &key),
    };
    let stages: &[HookStage] = match holder {
        // The runtime's state says when it has ended, and nothing has to be taken down then.
        Holder::Launched { .. } if as_brought => &[],
        Holder::Launched { .. } => &[HookStage::Poststop],
        _ => HookStage::OURS,
    };
    let caller = hook::Caller::Wrapper { key: key.clone() };
    let calls = hook::calls(&host, &caller, proposal.is_whole(), stages)?;
    // What a precreate hook has reserved for this bundle is ours to give.
    let program = host::own_program(bundle_marks::PROGRAM)?;
    if let Some(token) = bundle.hook_argument(&program, "--reservation") {
        Admission::of(&host).release_unmade(&hook::announced(token))?;
    }
    let record = Admission::of(&host).reserve(key.clone(), bundle.dir(), &proposal, holder)?;
    let mut reserved = Reserved { host, key, name, nvidia: None, is_reported: false };
    let equipped = reserved.driver(&record, &inventory, &bundle, as_brought).and_then(|driver| {
        Ok(reserved.equip((&record, request), &mut bundle, driver, calls, (by, begun))?)
    });
    match equipped {
        Ok(()) => Ok(Some(reserved)),
        Err(error) => {
            reserved.undo();
            Err(error)
        }
    }
}

/// Who holds a container that needs no hook to be isolated: the runtime's state of it,
/// where that is sure to be of this container, else it has a hook all the same.
fn launched(by: ProcessId, real: &Real, create: &Create, key: &Key) -> Holder {
    // Without `--root` runtimes may look at this variable.
    let root_is_sure = create.root.is_some() || std::env::var_os("XDG_RUNTIME_DIR").is_none();
    let file = argv::state_file(&real.file, Path::new(&key.root), &key.id);
    match file.filter(|file| root_is_sure && fs::symlink_metadata(file).is_err()) {
        Some(state_file) => Holder::Launched { by, state_file },
        None => Holder::Reserved { by },
    }
}

/// crun's `--config` as crun reads it (`crun_command_run` in `src/run.c`): below the
/// working directory, not below the bundle, but for `config.json` itself.
fn config_path(given: &Path) -> PathBuf {
    match given == Path::new("config.json") {
        true => given.to_owned(),
        false => std::path::absolute(given).unwrap_or_else(|_| given.to_owned()),
    }
}

/// `root` without links, as far as it is there: the runtime may be about to make it.
fn resolved(root: &Path) -> PathBuf {
    let absolute = std::path::absolute(root).unwrap_or_else(|_| root.to_owned());
    let mut missing = Vec::new();
    let mut there = absolute.as_path();
    loop {
        if let Ok(found) = there.canonicalize() {
            return missing.iter().rev().fold(found, |path, name| path.join(name));
        }
        match (there.parent(), there.file_name()) {
            (Some(parent), Some(name)) => {
                missing.push(name.to_owned());
                there = parent;
            }
            _ => return absolute,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A root is identified by where its links lead, even if a part of the path doesn't exist yet.
    #[test]
    fn root_path_is_resolved_through_links() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        std::fs::create_dir(dir.join("real")).unwrap();
        std::os::unix::fs::symlink(dir.join("real"), dir.join("link")).unwrap();
        assert_eq!(resolved(&dir.join("link")), dir.join("real"));
        assert_eq!(resolved(&dir.join("link/not/yet")), dir.join("real/not/yet"));
        assert_eq!(resolved(Path::new("/")), Path::new("/"));
    }
}
