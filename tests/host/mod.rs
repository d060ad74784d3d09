//! A host for cgpu: its configuration, its GPUs, and bundles that ask for them.
//!
//! Everything lies in a scratch of its own: the state directory, the inventory file, the
//! driver's nodes (plain files, which are bind-mounted and need no driver). It must not
//! know how cgpu works inside; of the state directory it knows the documented layout,
//! which [`Host::check_registry`] holds it to.

// Every test program that includes this directory uses another part of it.
#![allow(dead_code, unreachable_pub, reason = "private to each test program")]

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use serde_json::{Value, json};

use crate::support::{
    Bundle, Outcome, Runtime, Scratch, eventually, run_with_input, run_with_timeout, timeout,
};

/// Memory of the one GPU.
pub const TOTAL_MIB: u64 = 16_000;

/// Its UUID.
pub const UUID: &str = "GPU-a";

/// What a state directory may hold. `next` and what ends in `-tmp` is what a crash leaves,
/// and is used again.
const STATE_NAMES: &[&str] = &[
    ".cdi.json.cgpu-tmp",
    ".driver.cache.cgpu-tmp",
    ".inventory.json.cgpu-tmp",
    "cdi.json",
    "containers",
    "driver",
    "driver-answered",
    "slices-tried",
    "driver.cache",
    "driver.lock",
    "events",
    "events.1",
    "gate",
    "index",
    "inventory.json",
    "lock",
    "next",
    "shares",
    "runtime.json",
];

/// A host with one GPU of [`TOTAL_MIB`] and backend `none`.
#[derive(Debug)]
pub struct Host {
    pub scratch: Scratch,
    settings: toml::Table,
}

impl Host {
    pub fn new() -> Self {
        let gpu = json!([{"index": 0, "uuid": UUID, "memory_mib": TOTAL_MIB}]);
        let host = Self::with_gpus(&gpu);
        for node in ["nvidiactl", "nvidia-uvm", "nvidia0"] {
            host.scratch.file(&format!("driver/dev/{node}"), "");
        }
        host
    }

    /// A host with the GPUs of that inventory and no node of the driver: by backend `none`
    /// the usual numbers are declared.
    pub fn with_gpus(gpus: &Value) -> Self {
        let scratch = Scratch::new();
        let inventory = scratch.file("gpus.json", gpus.to_string());
        scratch.directory("driver/dev");
        let mut host = Host { scratch, settings: toml::Table::new() };
        let path = |name: &str| host.scratch.path().join(name).display().to_string();
        let (state, driver) = (path("state"), path("driver"));
        let inventory = inventory.display().to_string();
        host.set("state_dir", state);
        host.set("log", "");
        host.set("inventory.source", "file");
        host.set("inventory.path", inventory);
        host.set("isolation.backend", "none");
        host.set("driver.root", driver);
        host
    }

    /// Lets cgpu write its own log.
    pub fn keep_log(&mut self) {
        self.set("log", self.log_path().display().to_string());
    }

    fn log_path(&self) -> PathBuf {
        self.scratch.path().join("cgpu.log")
    }

    /// What it wrote there.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Begins a new one.
    pub fn forget_log(&self) {
        fs::remove_file(self.log_path()).expect("there is a log");
    }

    /// Configures `key`, as `table.key`.
    pub fn set(&mut self, key: &str, value: impl Into<toml::Value>) {
        match key.split_once('.') {
            None => drop(self.settings.insert(key.to_owned(), value.into())),
            Some((table, key)) => {
                let table = self.settings.entry(table).or_insert(toml::Table::new().into());
                let table = table.as_table_mut().expect("tables are not nested");
                table.insert(key.to_owned(), value.into());
            }
        }
        self.scratch.file("config.toml", self.settings.to_string());
    }

    /// Enforces quotas by the module whose tree is at `tree`.
    pub fn use_km(&mut self, tree: &Path) {
        self.set("isolation.backend", "km");
        self.set("isolation.km_root", tree.display().to_string());
    }

    /// Wraps another program than the distribution's runc.
    pub fn wrap(&mut self, program: impl AsRef<Path>) {
        self.set("runtime.candidates", vec![program.as_ref().display().to_string()]);
    }

    pub fn config(&self) -> PathBuf {
        self.scratch.path().join("config.toml")
    }

    pub fn state_dir(&self) -> PathBuf {
        self.settings["state_dir"].as_str().expect("it is always set").into()
    }

    /// `cgpu-runtime` with this host's configuration.
    pub fn runtime(&self) -> Runtime<'_> {
        let config = self.config().display().to_string();
        self.scratch.runtime(env!("CARGO_BIN_EXE_cgpu-runtime")).env("CGPU_CONFIG", config)
    }

    /// `cgpu-runtime` that is killed at `place`.
    pub fn dying_runtime(&self, place: &str) -> Runtime<'_> {
        self.runtime().env(cgpu_host::failpoint::VARIABLE, place)
    }

    /// A bundle that `edit` has the last word on. All share one root file system.
    pub fn bundle(&self, id: &str, edit: impl FnOnce(&mut Value)) -> Bundle {
        let rootfs = self.scratch.path().join("template/rootfs");
        let template = match rootfs.exists() {
            true => {
                Bundle { directory: self.scratch.path().join("template"), id: "template".into() }
            }
            false => self.scratch.bundle("template", |_| {}),
        };
        let bundle = Bundle { directory: self.scratch.directory(id), id: id.to_owned() };
        let mut config = template.config();
        config["root"]["path"] = json!(rootfs);
        config["linux"]["cgroupsPath"] = json!(format!("{}/{id}", self.scratch.cgroup()));
        edit(&mut config);
        bundle.write_config(&config);
        bundle
    }

    /// A bundle that asks for `mib` of the GPU.
    pub fn asking(&self, id: &str, mib: u64) -> Bundle {
        self.bundle(id, |config| ask(config, mib))
    }

    /// `cgpu`, by its words.
    #[track_caller]
    pub fn cgpu(&self, words: &[&str]) -> Outcome {
        let mut command = self
            .scratch
            .command(crate::support::sibling(env!("CARGO_BIN_EXE_cgpu-runtime"), "cgpu"));
        run_with_timeout(command.arg("--config").arg(self.config()).args(words), timeout())
    }

    /// The registered containers, by `cgpu ps`.
    #[track_caller]
    pub fn ps(&self) -> Vec<Value> {
        let listed = self.cgpu(&["ps", "--format", "json"]).ok().json();
        listed.as_array().expect("`cgpu ps` prints a list").clone()
    }

    /// Their ids.
    #[track_caller]
    pub fn registered(&self) -> BTreeSet<String> {
        let id = |container: &Value| container["id"].as_str().expect("an id is text").to_owned();
        self.ps().iter().map(id).collect()
    }

    /// The one whose id begins with `id`.
    #[track_caller]
    pub fn container(&self, id: &str) -> Value {
        let mut found = self.ps();
        found.retain(|container| container["id"].as_str().is_some_and(|full| full.starts_with(id)));
        assert_eq!(found.len(), 1, "registered under {id}: {found:?}\n{}", self.log());
        found.remove(0)
    }

    /// Its quotas in MiB, by GPU in its order.
    #[track_caller]
    pub fn limits_mib(&self, id: &str) -> Vec<u64> {
        let container = self.container(id);
        let gpus = container["gpus"].as_array().expect("its GPUs are a list");
        let bytes = |gpu: &Value| gpu["memory_limit_bytes"].as_u64().expect("a quota in bytes");
        gpus.iter().map(|gpu| bytes(gpu) >> 20).collect()
    }

    /// Fails unless soon every record was released: one whose container is gone is not
    /// listed any more, but still there to be collected.
    #[track_caller]
    pub fn soon_releases_all(&self) {
        eventually(|| self.records().is_empty());
        assert_eq!(self.records(), BTreeSet::new(), "registered: {:?}", self.ps());
    }

    /// What is reserved for them of the GPU.
    #[track_caller]
    pub fn promised_mib(&self) -> u64 {
        let of_one = |container: &Value| {
            let gpus = container["gpus"].as_array().expect("its GPUs are a list");
            gpus.iter().map(|gpu| gpu["memory_limit_bytes"].as_u64().unwrap_or(0)).sum::<u64>()
        };
        self.ps().iter().map(of_one).sum::<u64>() >> 20
    }

    /// What `cgpu gc` collects.
    #[track_caller]
    pub fn gc(&self) -> String {
        self.cgpu(&["gc"]).ok().stdout
    }

    /// `cgpu-hook`, by its words and its standard input.
    #[track_caller]
    pub fn hook(&self, words: &[&str], input: impl AsRef<[u8]>) -> Outcome {
        self.hook_dying(words, input, "")
    }

    /// `cgpu-hook` that is killed at `place`.
    #[track_caller]
    pub fn hook_dying(&self, words: &[&str], input: impl AsRef<[u8]>, place: &str) -> Outcome {
        let mut command = self.scratch.command(env!("CARGO_BIN_EXE_cgpu-hook"));
        command.args(words).arg("--config").arg(self.config());
        command.env(cgpu_host::failpoint::VARIABLE, place);
        run_with_input(&mut command, input.as_ref(), timeout())
    }

    /// The words that tell `cgpu-hook` a container of [`runtime`](Self::runtime).
    pub fn key_words(&self, id: &str) -> [String; 4] {
        let root = self.runtime().root().display().to_string();
        ["--root".into(), root, "--id".into(), id.into()]
    }

    /// A process that lives until it is dropped.
    pub fn sleeper(&self) -> Sleeper {
        let mut command = self.scratch.command("sleep");
        let child = command.arg("1000").stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        Sleeper(child.expect("sleep can be run"))
    }

    /// The files of the records, by name.
    pub fn records(&self) -> BTreeSet<String> {
        names(&self.state_dir().join("containers"))
    }

    /// Changes the record of `id` behind cgpu's back.
    pub fn edit_record(&self, id: &str, edit: impl FnOnce(&mut Value)) {
        let name = self.records().into_iter().find(|name| name.contains(id));
        let path = self.state_dir().join("containers").join(name.expect("it is registered"));
        let text = fs::read(&path).expect("a record can be read");
        let mut record = serde_json::from_slice(&text).expect("a record is JSON");
        edit(&mut record);
        fs::write(path, record.to_string()).expect("a record can be written");
    }

    /// That the state directory holds what it should, and that an index, if there is one,
    /// agrees with the records.
    #[track_caller]
    pub fn check_registry(&self) {
        let state = self.state_dir();
        let found = names(&state);
        let known = STATE_NAMES.iter().map(|name| (*name).to_owned()).collect();
        let more: Vec<_> = found.difference(&known).collect();
        assert!(more.is_empty(), "the state directory also holds {more:?}");
        for name in self.records() {
            let text = fs::read(state.join("containers").join(&name)).expect("it is there");
            let record: Result<Value, _> = serde_json::from_slice(&text);
            assert!(record.is_ok(), "record {name}: {record:?}");
        }
        let Ok(index) = fs::read_to_string(state.join("index")) else { return };
        let mut lines = index.lines();
        let header = lines.next().expect("an index has a header");
        let changed = fs::metadata(state.join("containers")).expect("it is there");
        let changed_ns = changed.mtime() * 1_000_000_000 + changed.mtime_nsec();
        assert!(header.contains(&format!(" {changed_ns} ")), "outdated: {header}");
        let file = |line: &str| line.split('\t').next().unwrap_or_default().to_owned();
        assert_eq!(lines.map(file).collect::<BTreeSet<_>>(), self.records());
    }

    /// That the whole GPU can be had, and given back: no container holds any of it.
    #[track_caller]
    pub fn whole_gpu_can_be_had(&self, id: &str) {
        let bundle = self.asking(id, TOTAL_MIB);
        let runtime = self.runtime();
        runtime.create(&bundle).ok();
        assert_eq!(self.registered(), [id.to_owned()].into());
        runtime.delete(&bundle).ok();
        assert_eq!(self.registered(), BTreeSet::new());
        self.check_registry();
        assert_eq!(self.gc(), "");
    }

    /// That `create` of `bundle` was refused in the way engines understand, in a sentence
    /// with `parts`: once on standard error, once in the log of the call, exit status 1.
    #[track_caller]
    pub fn was_reported(&self, outcome: Outcome, bundle: &Bundle, parts: &[&str]) {
        let outcome = outcome.exits(1);
        let log = fs::read_to_string(bundle.directory.join("log.json")).unwrap_or_default();
        let logged: Vec<Value> =
            log.lines().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect();
        let [line] = logged.as_slice() else {
            panic!("one line is logged, not {log:?}: {outcome}")
        };
        assert_eq!(line["level"], "error");
        let sentence = line["msg"].as_str().expect("a message is text");
        assert_eq!(outcome.stderr, format!("{sentence}\n"));
        assert_eq!(outcome.stdout, "");
        assert!(sentence.starts_with("cgpu: "), "{sentence}");
        for part in parts {
            assert!(sentence.contains(part), "no {part:?} in: {sentence}");
        }
    }
}

/// A process that sleeps; killed when dropped.
#[derive(Debug)]
pub struct Sleeper(Child);

impl Sleeper {
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        // It may have ended; it is reaped in any case.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Has `config` ask for `mib` of the GPU.
pub fn ask(config: &mut Value, mib: u64) {
    let env = config["process"]["env"].as_array_mut().expect("the environment is a list");
    env.push(json!(format!("ALIYUN_COM_GPU_MEM_CONTAINER={mib}")));
    env.push(json!("ALIYUN_COM_GPU_MEM_UNIT=MiB"));
    env.push(json!("NVIDIA_VISIBLE_DEVICES=0"));
}

/// The state that a runtime reports to a hook.
pub fn state(id: &str, pid: u32, bundle: &Path) -> String {
    json!({"ociVersion": "1.0.2", "id": id, "status": "created", "pid": pid, "bundle": bundle})
        .to_string()
}

/// The names in a directory; none where it isn't there.
pub fn names(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}
