//! A host with three GPUs from a file, one real runtime, and cgpu before it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::support::{Bundle, Outcome, Scratch, program, run_with_timeout, timeout};

/// Total memory of each GPU, in MiB.
pub(crate) const GPU_MIB: u64 = 16130;

/// The runtime under cgpu's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engine {
    Runc,
    Crun,
}

/// Both.
pub(crate) const ENGINES: [Engine; 2] = [Engine::Runc, Engine::Crun];

/// A scratch with a configuration.
pub(crate) struct Host {
    pub(crate) scratch: Scratch,
    real: PathBuf,
}

/// The UUID of the GPU with that index.
pub(crate) fn uuid(index: usize) -> String {
    format!("GPU-{index}0000000-0000-4000-8000-000000000000")
}

impl Host {
    pub(crate) fn new(engine: Engine) -> Self {
        let scratch = Scratch::new();
        let real = match engine {
            Engine::Runc => program("runc"),
            Engine::Crun => scratch.crun_program(),
        };
        let gpus = (0..3).map(|n| json!({"index": n, "uuid": uuid(n), "memory_mib": GPU_MIB}));
        scratch.file("gpus.json", Value::from_iter(gpus).to_string());
        scratch.directory("driver");
        let host = Host { scratch, real };
        host.configure("cgpu.toml", &host.real, "state");
        host
    }

    /// Writes a configuration whose real runtime is `candidate` and whose state is in the
    /// scratch's directory `state`.
    pub(crate) fn configure(&self, name: &str, candidate: &Path, state: &str) -> PathBuf {
        let at = |name: &str| self.path(name).display().to_string();
        self.scratch.file(
            name,
            format!(
                "state_dir = {:?}\nlog = \"\"\n[runtime]\ncandidates = [{candidate:?}]\n\
                 [inventory]\nsource = \"file\"\npath = {:?}\n\
                 [isolation]\nbackend = \"none\"\n[driver]\nroot = {:?}\n",
                at(state),
                at("gpus.json"),
                at("driver")
            ),
        )
    }

    /// The real runtime.
    pub(crate) fn real(&self) -> &Path {
        &self.real
    }

    /// cgpu's.
    pub(crate) fn ours(&self) -> &'static Path {
        Path::new(env!("CARGO_BIN_EXE_cgpu-runtime"))
    }

    /// A path below the scratch.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// Any program, with our configuration in its environment.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = self.scratch.command(program);
        command.env("CGPU_CONFIG", self.path("cgpu.toml"));
        command
    }

    /// `PROGRAM --root ROOT ARGS`, to its end.
    #[track_caller]
    fn call(&self, program: &Path, args: &[&str]) -> Outcome {
        let mut command = self.command(program);
        run_with_timeout(command.arg("--root").arg(self.path("root")).args(args), timeout())
    }

    /// The real runtime alone.
    #[track_caller]
    pub(crate) fn bare(&self, args: &[&str]) -> Outcome {
        self.call(&self.real, args)
    }

    /// The real runtime through cgpu's.
    #[track_caller]
    pub(crate) fn wrapped(&self, args: &[&str]) -> Outcome {
        self.call(self.ours(), args)
    }

    /// What `cgpu ps` shows.
    #[track_caller]
    pub(crate) fn registered(&self) -> Vec<Value> {
        let mut cgpu = self.command(Path::new(crate::support::sibling(
            env!("CARGO_BIN_EXE_cgpu-runtime"),
            "cgpu",
        )));
        let listed = run_with_timeout(cgpu.args(["ps", "--format", "json"]), timeout()).ok();
        listed.json().as_array().expect("`cgpu ps` prints a list").clone()
    }

    /// Whether anything was ever registered.
    pub(crate) fn has_state(&self) -> bool {
        self.path("state").exists()
    }

    /// The ids that the real runtime has: none without its root, which runc 1.3 doesn't list.
    #[track_caller]
    pub(crate) fn listed(&self) -> Vec<String> {
        if !self.path("root").exists() {
            return Vec::new();
        }
        self.bare(&["list", "-q"]).ok().stdout.lines().map(str::to_owned).collect()
    }

    /// A bundle whose process runs a line of shell, with these variables.
    pub(crate) fn bundle(&self, id: &str, env: &[&str], line: &str) -> Bundle {
        self.scratch.bundle(id, |config| {
            config["process"]["args"] = json!(["sh", "-c", line]);
            config["process"]["env"] = json!([&["PATH=/bin"], env].concat());
        })
    }
}

/// The bytes of `config.json`.
pub(crate) fn config_bytes(bundle: &Bundle) -> Vec<u8> {
    fs::read(bundle.directory.join("config.json")).expect("a bundle has a config.json")
}

/// Variables that ask for `parts` of 15 of the GPUs.
pub(crate) fn asking(parts: &str, gpus: &str) -> [String; 3] {
    [
        format!("ALIYUN_COM_GPU_MEM_CONTAINER={parts}"),
        "ALIYUN_COM_GPU_MEM_DEV=15".to_owned(),
        format!("NVIDIA_VISIBLE_DEVICES={gpus}"),
    ]
}

/// Borrowed, as [`Host::bundle`] takes them.
pub(crate) fn borrowed(env: &[String]) -> Vec<&str> {
    env.iter().map(String::as_str).collect()
}

/// What a command said, without the time of day that logrus writes into it.
pub(crate) fn said(outcome: &Outcome) -> (Option<i32>, String, String) {
    let timeless = |text: &str| match text.split_once("time=\"") {
        Some((before, rest)) => {
            let after = rest.split_once('"').map_or("", |(_, after)| after);
            format!("{before}time=\"\"{after}")
        }
        None => text.to_owned(),
    };
    let lines = |text: &str| text.split_inclusive('\n').map(timeless).collect();
    (outcome.status.code(), lines(&outcome.stdout), lines(&outcome.stderr))
}

/// Panics unless both said the same and ended alike.
#[track_caller]
pub(crate) fn assert_same(bare: &Outcome, wrapped: &Outcome) {
    assert_eq!(said(bare), said(wrapped), "\nbare {bare}\nthrough cgpu {wrapped}");
}
