//! What the real runtime keeps of a container that exists, and where a process goes that is
//! started in it: [`find`] and [`joins`].
//!
//! The runtime's state says which bundle the container was made from, and that bundle, or the
//! state itself, has our hook if we gave the container GPUs. So a container without its record
//! is distinguished from one that never had a quota. Must not know how isolation works.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;
use serde_json::Value;
use thiserror::Error;

use super::argv;
use super::real::Real;
use crate::admission::bundle_marks;
use cgpu_host::process::{first_of, is_absence};
use cgpu_host::registry::Record;

/// A container, as its runtime knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RuntimeState {
    /// Its bundle, without links; `None` if the runtime doesn't say.
    pub(super) bundle: Option<PathBuf>,
    /// Whether our container creation gave it GPUs with an enforced quota.
    pub(super) has_quota: bool,
}

/// Where a process goes that an `exec` starts.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Joins<'a> {
    /// Into a container without a quota.
    Outside,
    /// Behind the isolation of the container of that record.
    Behind(&'a Record),
    /// The container has a quota, and nothing would enforce it.
    Nowhere,
}

/// Why it can't be determined what a container is.
#[derive(Debug, Error)]
#[error(
    "cannot read what the runtime keeps of container {id} in {}: {source}; whether it has a GPU \
     quota isn't known, so nothing is started in it: repair the file, or remove the container",
    path.display()
)]
pub struct RuntimeStateError {
    id: String,
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// What is needed of a runtime's state: runc's has the bundle as a label, and the hooks
/// (`libcontainer/configs/config.go`); crun's has the bundle; what any runtime prints has it, too
/// (OCI runtime specification, "State").
#[derive(Debug, Default, Deserialize)]
struct State {
    bundle: Option<PathBuf>,
    config: Option<Config>,
}

#[derive(Debug, Default, Deserialize)]
struct Config {
    labels: Option<Vec<String>>,
    #[serde(rename = "Hooks")]
    hooks: Option<Value>,
}

/// Where a process goes that is started in `retained`, the container of an id that `record` has.
pub(super) fn joins<'a>(record: Option<&'a Record>, retained: Option<&RuntimeState>) -> Joins<'a> {
    match (record, retained) {
        // The runtime will say that there is no such container; if one comes by then, it's this.
        (Some(record), None) => Joins::Behind(record),
        (Some(record), Some(retained)) => match retained.bundle.as_ref() {
            // One that ended without a word had that id before.
            Some(bundle) if !retained.has_quota && *bundle != record.bundle => Joins::Outside,
            _ => Joins::Behind(record),
        },
        (None, Some(retained)) if retained.has_quota => Joins::Nowhere,
        (None, _) => Joins::Outside,
    }
}

/// What the runtime `real` keeps of the container `id` below `root`, which was `given` to it or is
/// its own; `None` if there is no such container.
///
/// # Errors
///
/// If there may be one, and it can't be determined what it is.
pub(super) fn find(
    real: &Real,
    given: Option<&Path>,
    root: &Path,
    id: &str,
) -> Result<Option<RuntimeState>, RuntimeStateError> {
    let failed = |path: &Path, source| RuntimeStateError {
        id: id.to_owned(),
        path: path.to_owned(),
        source,
    };
    for path in argv::state_files(&real.file, root, id) {
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if is_absence(&error) => continue,
            Err(error) => return Err(failed(&path, error)),
        };
        let state = serde_json::from_slice(&bytes).map_err(|error| failed(&path, error.into()))?;
        return Ok(Some(retained(state, path.parent())));
    }
    if argv::state_file(&real.file, root, id).is_some() {
        return Ok(None);
    }
    let reported = reported(real, given, id).map_err(|source| failed(&real.file, source))?;
    Ok(reported.map(|state| retained(state, None)))
}

/// Whether the first process of the container `id` below `root` is known to have ended: the runtime
/// starts nothing in it, and says so.
pub(super) fn has_ended(real: &Real, root: &Path, id: &str) -> bool {
    let files = argv::state_files(&real.file, root, id);
    files.iter().any(|file| file.exists() && matches!(first_of(file), Ok(None)))
}

/// What a runtime says of a container whose files we don't know; `None` where it knows none, and
/// starts nothing there either.
fn reported(real: &Real, root: Option<&Path>, id: &str) -> io::Result<Option<State>> {
    let mut state = Command::new(&real.file);
    if let Some(root) = root {
        state.arg("--root").arg(root);
    }
    let said = state.args(["state", id]).stdin(Stdio::null()).stderr(Stdio::null()).output()?;
    if !said.status.success() {
        return Ok(None);
    }
    Ok(Some(serde_json::from_slice(&said.stdout)?))
}

/// The container of `state`, whose runtime keeps more of it in `dir`.
fn retained(state: State, dir: Option<&Path>) -> RuntimeState {
    let config = state.config.unwrap_or_default();
    let labels = config.labels.unwrap_or_default();
    let label = labels.iter().find_map(|label| label.strip_prefix("bundle=")).map(PathBuf::from);
    let bundle = state.bundle.or(label).map(|path| path.canonicalize().unwrap_or(path));
    // crun keeps a copy of the bundle's configuration; the bundle itself may be gone.
    let has_quota = config.hooks.as_ref().is_some_and(bundle_marks::hold)
        || [dir, bundle.as_deref()]
            .iter()
            .flatten()
            .any(|copy| is_edited(&copy.join("config.json")));
    RuntimeState { bundle, has_quota }
}

/// Whether that configuration of a bundle has our hook.
fn is_edited(file: &Path) -> bool {
    #[derive(Deserialize)]
    struct Hooked {
        hooks: Option<Value>,
    }
    // Most are decided by a search of the bytes.
    let Ok(bytes) = fs::read(file) else { return false };
    let name = OsStr::new(bundle_marks::PROGRAM).as_encoded_bytes();
    bytes.windows(name.len()).any(|part| part == name)
        && serde_json::from_slice::<Hooked>(&bytes)
            .is_ok_and(|config| config.hooks.as_ref().is_some_and(bundle_marks::hold))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use cgpu_core::plan::{Kind, Plan};
    use cgpu_host::process::ProcessId;
    use cgpu_host::registry::{Holder, Key};

    fn record(bundle: &str) -> Record {
        Record {
            key: Key { root: "/r".into(), id: "a".into() },
            bundle: bundle.into(),
            short_id: "a___________".into(),
            boot_id: "boot".into(),
            holder: Holder::Active { init: Some(ProcessId { pid: 1, start_ticks: 1 }) },
            plan: Plan {
                backend: Kind::Gate,
                gpus: vec![],
                weight: 1,
                high_priority: false,
                caveats: cgpu_core::plan::Caveats::default(),
            },
        }
    }

    fn retained(bundle: &str, has_quota: bool) -> RuntimeState {
        RuntimeState { bundle: Some(bundle.into()), has_quota }
    }

    /// A process that joins a container with a quota never runs outside of that quota.
    #[test]
    fn exec_never_joins_quota_container_outside_its_isolation() {
        let of = record("/b");
        for (record, retained, joins) in [
            (Some(&of), Some(retained("/b", true)), Joins::Behind(&of)),
            (None, Some(retained("/b", true)), Joins::Nowhere),
            // Its bundle was moved, or its hook removed manually.
            (Some(&of), Some(retained("/c", true)), Joins::Behind(&of)),
            (Some(&of), Some(retained("/b", false)), Joins::Behind(&of)),
            (Some(&of), Some(RuntimeState { bundle: None, has_quota: false }), Joins::Behind(&of)),
            // One of another bundle that has none, by the id of one that is gone.
            (Some(&of), Some(retained("/c", false)), Joins::Outside),
            (None, Some(retained("/b", false)), Joins::Outside),
            (Some(&of), None, Joins::Behind(&of)),
            (None, None, Joins::Outside),
        ] {
            assert_eq!(super::joins(record, retained.as_ref()), joins, "{record:?} {retained:?}");
        }
    }

    /// What happens to a container of an id, and to its record.
    #[derive(Debug, Clone, Copy)]
    enum Step {
        /// One with a quota is made: first the record, then the container.
        Creates,
        /// One of another bundle and without a quota is made, if there is none.
        CreatesPlain,
        /// The record is lost, or collected.
        Forgets,
        /// The container ends, and its record stays for a while.
        Ends,
    }

    #[derive(Debug, Clone, Default)]
    struct World {
        record: bool,
        container: Option<bool>,
    }

    impl World {
        fn take(&mut self, step: Step) {
            match step {
                Step::Creates if self.container.is_none() => {
                    (self.record, self.container) = (true, Some(true));
                }
                Step::CreatesPlain if self.container.is_none() => self.container = Some(false),
                Step::Forgets => self.record = false,
                Step::Ends => self.container = None,
                _ => {}
            }
        }
    }

    proptest! {
        /// An exec checks the container first and then its record, and others go on
        /// meanwhile. Whatever they do, a process that gets into a container with a quota is
        /// behind its isolation or isn't started, unless that container came after the check: then
        /// the engine asks for an exec in what it hasn't made yet.
        #[test]
        fn an_exec_never_passes_a_quota(
            before in proptest::collection::vec(step(), 0..6),
            between in proptest::collection::vec(step(), 0..4),
        ) {
            let mut world = World::default();
            before.iter().for_each(|step| world.take(*step));
            let seen = world.container.map(|has_quota| retained(if has_quota { "/b" } else { "/c" }, has_quota));
            between.iter().for_each(|step| world.take(*step));
            let of = record("/b");
            let record = world.record.then_some(&of);
            let joins = super::joins(record, seen.as_ref());
            if seen.is_some_and(|seen| seen.has_quota) {
                prop_assert_ne!(joins, Joins::Outside);
            }
        }
    }

    fn step() -> impl Strategy<Value = Step> {
        prop::sample::select(vec![Step::Creates, Step::CreatesPlain, Step::Forgets, Step::Ends])
    }

    /// A bundle's configuration with that hook.
    fn config(path: &str, args: &[&str]) -> String {
        let hooks = serde_json::json!({"poststop": [{"path": path, "args": args}]});
        serde_json::json!({"process": {}, "hooks": hooks}).to_string()
    }

    /// A container of ours is identified by its hook, wherever that is retained: in a state or a
    /// bundle.
    #[test]
    fn hook_identifies_our_container_wherever_retained() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        let ours = config("/usr/bin/cgpu-hook", &["cgpu-hook", "poststop", "--id", "a"]);
        let by_hooks_dir = config("/usr/bin/cgpu-hook", &["cgpu-hook", "poststop"]);
        let of_others = config("/usr/bin/other", &["cgpu-hook", "--id", "a"]);
        let hooks = |text: &str| serde_json::from_str::<Value>(text).unwrap()["hooks"].clone();
        let bundle = dir.join("bundle");
        fs::create_dir(&bundle).unwrap();
        let place = bundle.to_str().unwrap();
        let label = format!("bundle={place}");
        let mut at = 0;
        let mut is_ours = |program: &str, state: Value, copy: Option<&str>, text: Option<&str>| {
            at += 1;
            let id = format!("c{at}");
            let real = Real { file: Path::new("/usr/bin").join(program), name: program.into() };
            let home = dir.join(&id);
            fs::create_dir(&home).unwrap();
            let file = argv::state_file(&real.file, &dir, &id).unwrap();
            fs::write(file, state.to_string()).unwrap();
            for (at, text) in [(home, copy), (bundle.clone(), text)] {
                let _ = fs::remove_file(at.join("config.json"));
                if let Some(text) = text {
                    fs::write(at.join("config.json"), text).unwrap();
                }
            }
            let found = find(&real, None, &dir, &id).unwrap().unwrap();
            assert_eq!(found.bundle.as_ref(), Some(&bundle));
            found.has_quota
        };
        let runc =
            |text: &str| serde_json::json!({"config": {"labels": [label], "Hooks": hooks(text)}});
        let crun = || serde_json::json!({"bundle": place, "pid": 1});
        assert!(is_ours("runc", runc(&ours), None, None));
        assert!(is_ours("runc", runc(&of_others), None, Some(&ours)));
        assert!(is_ours("crun", crun(), Some(&ours), None));
        assert!(is_ours("crun", crun(), None, Some(&ours)));
        assert!(!is_ours("runc", runc(&of_others), None, Some(&by_hooks_dir)));
        assert!(!is_ours("crun", crun(), None, Some("cgpu-hook --id")));
    }

    /// A state that can't be read is an error, and isn't taken for a container without a quota.
    #[test]
    fn unreadable_state_does_not_mean_no_quota() {
        let dir = tempfile::tempdir().unwrap();
        let real = Real { file: "/usr/bin/runc".into(), name: "runc".into() };
        assert_eq!(find(&real, None, dir.path(), "none").unwrap(), None);
        assert_eq!(find(&real, None, dir.path(), "a/../../b").unwrap(), None);
        fs::create_dir(dir.path().join("torn")).unwrap();
        fs::write(dir.path().join("torn/state.json"), "{").unwrap();
        let error = find(&real, None, dir.path(), "torn").unwrap_err().to_string();
        assert!(error.contains("of container torn in ") && error.contains("torn/state.json: EOF"));
        assert!(error.ends_with("repair the file, or remove the container"), "{error}");
    }
}
