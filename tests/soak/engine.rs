//! Engines: `cgpu-runtime` called as one would, and docker.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use serde_json::json;

use crate::gated::{Gated, RMTOOL, RUNTIME, rmtool};
use crate::support::{Bundle, Docker, IMAGE, Outcome, run_with_timeout, timeout};
use crate::{GPUS_MIB, Soak};

/// What a container asks for: MiB by index of the GPU.
#[derive(Debug, Clone)]
pub(crate) struct Ask(pub(crate) BTreeMap<usize, u64>);

impl Ask {
    /// One GPU mostly, or several; a little of each mostly, or more than is left.
    pub(crate) fn choose(choices: &mut fastrand::Rng) -> Self {
        let count = if choices.u8(..3) == 0 { choices.usize(2..=GPUS_MIB.len()) } else { 1 };
        let gpus = choices.choose_multiple(0..GPUS_MIB.len(), count);
        let mut of = |gpu: usize| {
            let all = GPUS_MIB[gpu];
            let most = if choices.u8(..8) == 0 { all } else { all / 5 };
            (gpu, choices.u64(100..=most))
        };
        Ask(gpus.into_iter().map(&mut of).collect())
    }

    pub(crate) fn bytes(&self) -> BTreeMap<usize, u64> {
        self.0.iter().map(|(gpu, mib)| (*gpu, mib << 20)).collect()
    }

    fn variables(&self) -> [String; 3] {
        let list = |of: Vec<String>| of.join(",");
        let mib = list(self.0.values().map(u64::to_string).collect());
        let gpus = list(self.0.keys().map(usize::to_string).collect());
        [
            format!("ALIYUN_COM_GPU_MEM_CONTAINER={mib}"),
            "ALIYUN_COM_GPU_MEM_UNIT=MiB".to_owned(),
            format!("NVIDIA_VISIBLE_DEVICES={gpus}"),
        ]
    }
}

/// The engines that have something to be started.
#[derive(Debug)]
pub(crate) struct Engines {
    docker: RwLock<Docker>,
    /// How often dockerd was ended.
    deaths: AtomicU64,
}

impl Engines {
    pub(crate) fn start(gated: &Gated) -> Self {
        // The template of all bundles, before several want to make it.
        gated.host.bundle("first", |_| {});
        let config = gated.host.config().display().to_string();
        let docker = Docker::builder()
            .runtime(RUNTIME)
            .runtime_arg(format!("--cgpu-config={config}"))
            .live_restore();
        Engines { docker: RwLock::new(docker.start()), deaths: AtomicU64::new(0) }
    }

    /// To make commands of; release it then, or dockerd can't be restarted.
    pub(crate) fn docker(&self) -> RwLockReadGuard<'_, Docker> {
        self.docker.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// How often dockerd was ended: a caller meanwhile may have got no answer.
    pub(crate) fn deaths(&self) -> u64 {
        self.deaths.load(Ordering::Acquire)
    }

    /// It is ended now.
    pub(crate) fn note_death(&self) {
        self.deaths.fetch_add(1, Ordering::AcqRel);
    }

    /// To restart it.
    pub(crate) fn docker_mut(&self) -> RwLockWriteGuard<'_, Docker> {
        self.docker.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What an engine knows a container by.
#[derive(Debug)]
pub(crate) enum Handle {
    Runc(Bundle),
    Docker(String),
}

/// How a command went, as far as it says that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Went {
    Well,
    /// There isn't so much left.
    Refused,
    /// The engine is away, by a kill of the soak's.
    Away,
    Wrong,
}

/// What runtimes say of a container that they don't know.
const UNKNOWN: [&str; 3] = ["does not exist", "No such container", "no such container"];

pub(crate) fn went(outcome: &Outcome) -> Went {
    let said = |words: &[&str]| words.iter().any(|word| outcome.stderr.contains(word));
    match outcome {
        _ if outcome.status.success() => Went::Well,
        _ if said(&["this container asks for", "the most is"]) => Went::Refused,
        _ if said(&["Cannot connect to the Docker daemon", "error during connect", "EOF"]) => {
            Went::Away
        }
        _ => Went::Wrong,
    }
}

impl Handle {
    /// Prepares a container, and makes none yet: its handle, and the id that its cgroup and its
    /// record will have. Where docker is away there is none.
    pub(crate) fn prepare(
        soak: &Soak,
        by_docker: bool,
        name: &str,
        ask: &Ask,
        words: &[String],
    ) -> Option<(Self, String)> {
        if !by_docker {
            let bundle = soak.gated.bundle_with(name, |config| {
                let env = config["process"]["env"].as_array_mut().expect("it is a list");
                env.extend(ask.variables().map(|variable| json!(variable)));
                config["process"]["args"] = json!(words);
            });
            return Some((Handle::Runc(bundle), name.to_owned()));
        }
        let mut command = soak.engines.docker().command();
        command.args(["create", "--network", "none", "--pull", "never", "--runtime=cgpu"]);
        for variable in ask.variables() {
            command.args(["-e", &variable]);
        }
        command.args(["-v", &format!("{}:{RMTOOL}:ro", rmtool().display()), "--name", name, IMAGE]);
        let made = run_with_timeout(command.args(words), timeout());
        if !made.status.success() {
            if went(&made) == Went::Wrong {
                soak.tally.wonder(format!("docker create: {made}"));
            }
            return None;
        }
        Some((Handle::Docker(made.text().to_owned()), made.text().to_owned()))
    }

    /// Has the runtime make it; docker's starts, too.
    pub(crate) fn create(&self, soak: &Soak) -> Command {
        match self {
            Handle::Runc(bundle) => soak.gated.host.runtime().create_command(bundle),
            Handle::Docker(id) => self.docker(soak, &["start", id]),
        }
    }

    /// Starts what is made.
    pub(crate) fn start(&self, soak: &Soak) -> Command {
        match self {
            Handle::Runc(bundle) => self.runc(soak, &["start", &bundle.id]),
            Handle::Docker(id) => self.docker(soak, &["start", id]),
        }
    }

    pub(crate) fn exec(&self, soak: &Soak, words: &[String]) -> Command {
        let mut command = match self {
            Handle::Runc(bundle) => self.runc(soak, &["exec", &bundle.id]),
            Handle::Docker(id) => self.docker(soak, &["exec", id]),
        };
        command.args(words);
        command
    }

    /// Removes it, whatever it is doing.
    pub(crate) fn remove(&self, soak: &Soak) -> Command {
        match self {
            Handle::Runc(bundle) => self.runc(soak, &["delete", "--force", &bundle.id]),
            Handle::Docker(id) => self.docker(soak, &["rm", "-f", id]),
        }
    }

    /// Whether the engine knows it no more; none where it can't say.
    pub(crate) fn is_gone(&self, soak: &Soak) -> Option<bool> {
        let mut ask = match self {
            Handle::Runc(bundle) => self.runc(soak, &["state", &bundle.id]),
            Handle::Docker(id) => self.docker(soak, &["inspect", "--type", "container", id]),
        };
        let asked = run_with_timeout(&mut ask, timeout());
        let unknown = UNKNOWN.iter().any(|words| asked.stderr.contains(words));
        match asked.status.success() {
            true => Some(false),
            false => unknown.then_some(true),
        }
    }

    /// The number of its first process, where the engine has said that it made it.
    pub(crate) fn first(&self, soak: &Soak) -> Option<i32> {
        match self {
            Handle::Runc(bundle) => {
                std::fs::read_to_string(bundle.directory.join("init.pid")).ok()?.trim().parse().ok()
            }
            Handle::Docker(id) => {
                let mut ask = self.docker(soak, &["inspect", "--format", "{{.State.Pid}}", id]);
                let reported = run_with_timeout(&mut ask, timeout());
                reported.text().parse().ok().filter(|pid| *pid > 0)
            }
        }
    }

    /// The name of its cgroup in each hierarchy.
    pub(crate) fn cgroup(&self, soak: &Soak) -> String {
        let (scratch, id) = match self {
            Handle::Runc(bundle) => (soak.gated.host.scratch.cgroup(), &bundle.id),
            Handle::Docker(id) => (soak.engines.docker().scratch().cgroup(), id),
        };
        format!("{}/{id}", scratch.trim_start_matches('/'))
    }

    fn runc(&self, soak: &Soak, words: &[&str]) -> Command {
        let mut command = soak.gated.host.runtime().command();
        command.args(words);
        command
    }

    fn docker(&self, soak: &Soak, words: &[&str]) -> Command {
        let mut command = soak.engines.docker().command();
        command.args(words);
        command
    }
}
