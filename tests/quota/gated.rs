//! A host whose GPUs are simulated and whose quotas the gate holds.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use cgpu_sim::{Sim, SimOptions};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::host::{Host, ask};
use crate::support::{Bundle, Outcome, eventually, timeout};

pub(crate) const MIB: u64 = 1 << 20;

/// The runtime that engines call.
pub(crate) const RUNTIME: &str = env!("CARGO_BIN_EXE_cgpu-runtime");

/// The variables that ask for 1000 MiB of GPU 0.
pub(crate) const ASK: [&str; 3] = [
    "ALIYUN_COM_GPU_MEM_CONTAINER=1000",
    "ALIYUN_COM_GPU_MEM_UNIT=MiB",
    "NVIDIA_VISIBLE_DEVICES=0",
];

/// Memory of the first GPU in MiB; the second has [`SECOND_MIB`].
pub(crate) const FIRST_MIB: u64 = 16_000;
pub(crate) const SECOND_MIB: u64 = 8_000;

/// The driver's answer to more than there is.
pub(crate) const NO_MEMORY: &str = "status=0x51";

/// Where [`rmtool`] is in a container.
pub(crate) const RMTOOL: &str = "/rmtool";

/// A host with two simulated GPUs.
#[derive(Debug)]
pub(crate) struct Gated {
    // Unmounted before the scratch goes.
    pub(crate) sim: Sim,
    pub(crate) host: Host,
}

impl Gated {
    pub(crate) fn new() -> Self {
        Self::with_driver("535.161.08")
    }

    /// With that version of the driver.
    pub(crate) fn with_driver(version: &str) -> Self {
        Self::with_gpus(version, &[FIRST_MIB, SECOND_MIB])
    }

    /// With that version of the driver, and GPUs of so many MiB.
    pub(crate) fn with_gpus(version: &str, sizes: &[u64]) -> Self {
        let gpus: Vec<String> = sizes.iter().map(|mib| format!("{mib}MiB")).collect();
        Self::with_specs(version, &gpus)
    }

    /// With that version of the driver, and these GPUs, as `16000MiB-512MiB`, of which the driver keeps 512.
    pub(crate) fn with_specs(version: &str, gpus: &[String]) -> Self {
        let mut host = Host::with_gpus(&json!([]));
        let dir = host.scratch.directory("sim");
        let options = SimOptions {
            dir: dir.clone(),
            gpus: gpus.iter().map(|gpu| gpu.parse().expect("a size")).collect(),
            driver: version.parse().expect("a version"),
        };
        let sim = Sim::start(options).expect("the simulated driver starts: root and /dev/fuse");
        let path = |name: &str| dir.join(name).display().to_string();
        host.set("inventory.path", path("inventory.json"));
        host.set("driver.root", path(""));
        host.set("driver.proc_root", path("proc"));
        host.set("isolation.backend", "gate");
        host.keep_log();
        Gated { sim, host }
    }

    /// `cgpu-runtime` over crun, too.
    pub(crate) fn over_crun(&mut self) {
        let crun = self.host.scratch.crun_program();
        self.host.wrap(crun);
    }

    /// Some of cgpu's programs in a directory of their own.
    pub(crate) fn programs(&self, names: &[&str]) -> PathBuf {
        let programs = self.host.scratch.directory("programs");
        for name in names {
            let (from, to) = (Path::new(RUNTIME).with_file_name(name), programs.join(name));
            if std::fs::hard_link(&from, &to).is_err() {
                self.host.scratch.copy_program(&from, &to);
            }
        }
        programs
    }

    /// A bundle that has `mib` of the first GPU and runs `words`.
    pub(crate) fn bundle(&self, id: &str, mib: u64, words: &[&str]) -> Bundle {
        self.bundle_with(id, |config| {
            ask(config, mib);
            config["process"]["args"] = json!(words);
        })
    }

    /// A bundle with [`RMTOOL`] in it, that `edit` has the last word on.
    pub(crate) fn bundle_with(&self, id: &str, edit: impl FnOnce(&mut Value)) -> Bundle {
        self.host.bundle(id, |config| {
            let mounts = config["mounts"].as_array_mut().expect("mounts are a list");
            mounts.push(json!({
                "destination": RMTOOL, "type": "bind", "source": rmtool(),
                "options": ["bind", "ro"],
            }));
            edit(config);
        })
    }

    /// Runs `words` with `mib` of the first GPU, to their end.
    #[track_caller]
    pub(crate) fn run(&self, id: &str, mib: u64, words: &[&str]) -> Outcome {
        let runtime = self.host.runtime();
        let bundle = self.bundle(id, mib, words);
        let outcome = runtime.run(&bundle);
        let _ = runtime.delete(&bundle); // `run` has done it, unless it failed
        outcome
    }

    /// A container with `mib` of the first GPU that sleeps.
    #[track_caller]
    pub(crate) fn sleeping(&self, id: &str, mib: u64) -> Bundle {
        let bundle = self.bundle(id, mib, &["sleep", "1000"]);
        let runtime = self.host.runtime();
        runtime.create(&bundle).ok();
        runtime.start(&bundle).ok();
        bundle
    }

    /// Runs rmtool's `words` in a container that is there.
    #[track_caller]
    pub(crate) fn exec(&self, bundle: &Bundle, words: &[&str]) -> Outcome {
        let words = [&[RMTOOL], words].concat();
        self.host.runtime().exec(bundle, &words)
    }

    /// Starts rmtool's `words` in a container that is there, and goes on.
    pub(crate) fn start(&self, bundle: &Bundle, words: &[&str]) -> std::process::Child {
        let mut command = self.host.runtime().command();
        command.args(["exec", &bundle.id, RMTOOL]).args(words);
        command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::piped());
        command.spawn().expect("the runtime can be started")
    }

    /// Bytes in use of the GPU `index`, by the driver.
    pub(crate) fn used_bytes(&self, index: usize) -> u64 {
        self.sim.used_bytes(index)
    }

    /// Bytes in use of the container's only GPU, by its monitor, which is asked: `cgpu ps` may be a quarter of a second
    /// behind. On a busy machine it may not answer at once.
    #[track_caller]
    pub(crate) fn accounted_bytes(&self, id: &str) -> u64 {
        let mut used = None;
        eventually(|| {
            let status = self.short_id(id).and_then(|short_id| self.status(&short_id).ok());
            used = status.and_then(|status| status["gpus"][0]["used_bytes"].as_u64());
            used.is_some()
        });
        used.unwrap_or_else(|| panic!("{id} has no use: {:?}", self.host.ps()))
    }

    /// The short id of the container, by its record.
    fn short_id(&self, id: &str) -> Option<String> {
        let name = self
            .host
            .records()
            .into_iter()
            .find(|name| name.rsplit_once(',').is_some_and(|(_, file)| file.starts_with(id)))?;
        let text = std::fs::read(self.host.state_dir().join("containers").join(name)).ok()?;
        let record: Value = serde_json::from_slice(&text).ok()?;
        Some(record["short_id"].as_str()?.to_owned())
    }

    /// Bytes in use of the container's only GPU, as `cgpu ps` shows them; `None` if its monitor doesn't answer.
    fn shown_bytes(&self, id: &str) -> Option<u64> {
        self.host.container(id)["gpus"][0]["memory_used_bytes"].as_u64()
    }

    /// The monitor of the container whose short id that is.
    #[track_caller]
    pub(crate) fn monitor(&self, short_id: &str) -> Pid {
        let file = self.host.state_dir().join("gate").join(short_id).join("process");
        let named = || {
            let text = std::fs::read_to_string(&file).ok()?;
            let pid = text.split(' ').next()?.parse::<i32>().ok()?;
            monitors(&self.host).contains(&pid).then_some(pid)
        };
        let mut found = None;
        eventually(|| {
            found = named();
            found.is_some()
        });
        let found = found.unwrap_or_else(|| {
            panic!("{short_id} has no monitor: {:?}\n{}", monitors(&self.host), self.host.log())
        });
        Pid::from_raw(found)
    }

    #[track_caller]
    pub(crate) fn update(&self) {
        self.host.cgpu(&["upgrade-monitors"]).ok();
    }

    /// How many processes that monitor has killed; its log doesn't have each.
    #[track_caller]
    pub(crate) fn killed(&self, short_id: &str) -> u64 {
        self.counts(short_id)["killed"].as_u64().expect("it counts")
    }

    /// How many calls it has let continue or executed.
    #[track_caller]
    pub(crate) fn calls(&self, short_id: &str) -> u64 {
        let counts = self.counts(short_id);
        let count = |name: &str| counts[name].as_u64().expect("it counts");
        count("continued") + count("executed")
    }

    /// What that monitor counts.
    #[track_caller]
    fn counts(&self, short_id: &str) -> Value {
        let status = self.status(short_id).unwrap_or_else(|error| panic!("{short_id}: {error}"));
        status["calls"].clone()
    }

    /// That monitor's status, by its socket.
    fn status(&self, short_id: &str) -> std::io::Result<Value> {
        let socket = self.host.state_dir().join("gate").join(short_id).join("control");
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(timeout()))?;
        stream.write_all(b"\"status\"\n")?;
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer)?;
        let answer: Value = serde_json::from_str(&answer)?;
        Ok(answer["status"].clone())
    }

    /// That a program of the container can have so much of its GPU, and no more.
    #[track_caller]
    pub(crate) fn fills(&self, bundle: &Bundle, mib: u64) {
        let filled = self.exec(bundle, &["fill"]);
        assert_eq!(got_bytes(&filled), mib << 20, "{filled}\n{}", self.host.log());
    }

    /// Waits until `cgpu ps` shows so much of the container's only GPU, as its monitor counts: what goes with a process
    /// that learns a moment later.
    #[track_caller]
    pub(crate) fn soon_accounts(&self, id: &str, mib: u64) {
        let both = || (self.shown_bytes(id), self.accounted_bytes(id));
        let is_so = eventually(|| both() == (Some(mib << 20), mib << 20));
        assert!(is_so, "{id}: {:?}, {}", both(), self.host.log());
    }

    /// Waits until so much of the first GPU is in use, by the driver.
    #[track_caller]
    pub(crate) fn soon_uses(&self, mib: u64) {
        let soon = eventually(|| self.used_bytes(0) == mib << 20);
        assert!(soon, "{} of {mib} MiB: {}", self.used_bytes(0), self.host.log());
    }

    /// Fails unless soon nothing is in use, no container is registered, and no monitor is left.
    #[track_caller]
    pub(crate) fn soon_is_empty(&self) {
        self.host.soon_releases_all();
        let monitors = || monitors(&self.host);
        let empty = || self.used_bytes(0) == 0 && monitors().is_empty();
        eventually(empty);
        assert_eq!((self.used_bytes(0), monitors()), (0, vec![]), "{}", self.host.log());
    }
}

impl Drop for Gated {
    /// A simulation ends when no process has its files open; a test that failed may leave such.
    fn drop(&mut self) {
        for file in self.sim.state().files {
            if let Ok(pid) = i32::try_from(file.process) {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL); // gone already, then
            }
        }
        for pid in monitors(&self.host) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// Every process of a monitor of this host: they write its log, which no other host has.
pub(crate) fn monitors(host: &Host) -> Vec<i32> {
    let scratch = host.scratch.path();
    let all = procfs::process::all_processes().expect("/proc can be read");
    let ours = all.flatten().map(|process| process.pid).filter(|pid| {
        // One that was updated has another `comm`, and a program that was replaced is deleted.
        let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let mut targets = files.filter_map(|file| std::fs::read_link(file.path()).ok());
        name.starts_with("cgpu-monitor") && targets.any(|target| target.starts_with(scratch))
    });
    ours.collect()
}

/// Stops the process. The kernel stops threads one by one after `kill` has returned: this waits until the last has
/// stopped, so that none answers, nor takes a request, any more.
#[track_caller]
pub(crate) fn stop(pid: Pid) {
    kill(pid, Signal::SIGSTOP).expect("it is there");
    let has_stopped = |thread: std::fs::DirEntry| {
        // A thread that has ended meanwhile has no file.
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
    };
    let threads = || std::fs::read_dir(format!("/proc/{pid}/task")).expect("it is there").flatten();
    assert!(eventually(|| threads().all(has_stopped)), "{pid} doesn't stop");
}

/// Its resident memory in bytes; 0 where it's gone.
pub(crate) fn resident_bytes(pid: Pid) -> u64 {
    let status = procfs::process::Process::new(pid.as_raw()).and_then(|process| process.status());
    status.ok().and_then(|status| status.vmrss).unwrap_or(0) << 10
}

/// The application: a static program, built by `make test`.
pub(crate) fn rmtool() -> PathBuf {
    let path = Path::new(crate::support::sibling(env!("CARGO_BIN_EXE_cgpu-runtime"), "cgpu"))
        .with_file_name("rmtool");
    let program = std::fs::read(&path).unwrap_or_default();
    let interpreter = b"/lib64/ld-linux";
    assert!(
        !program.is_empty() && !program.windows(interpreter.len()).any(|part| part == interpreter),
        "{} is no static program; `make test` builds it, or: cargo rustc -p cgpu-sim --bin rmtool \
         -- -C target-feature=+crt-static",
        path.display()
    );
    path
}

/// What `rmtool` says it got.
#[track_caller]
pub(crate) fn got_bytes(outcome: &Outcome) -> u64 {
    let words = outcome.stdout.split_whitespace();
    let mut reported = words.rev().filter_map(|word| word.strip_prefix("got_bytes="));
    reported
        .next()
        .and_then(|text| text.parse().ok())
        .unwrap_or_else(|| panic!("no got_bytes: {outcome}"))
}
