//! dockerd, with roots, socket and containerd of its own.
//!
//! containerd is started here and not by dockerd, which would take the machine's where one runs.
//!
//! It knows the runtimes `runc`, `crun` and `cgpu`; the last is whatever the test names. No bridge
//! and no iptables: test containers have no network. Cgroups are made by dockerd itself
//! (`cgroupfs`), below the scratch's, on every machine.
//!
//! What it can't be talked out of, harmless: the empty directory `/run/docker/plugins`.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use super::command::last_lines;
use super::{
    IMAGE, Image, Outcome, Scratch, prerequisites, program, run_with_timeout, timeout, wait_until,
};

/// Choices made before dockerd starts.
#[derive(Debug)]
pub struct Builder {
    runtime: PathBuf,
    runtime_args: Vec<String>,
    environment: Vec<(String, String)>,
    live_restore: bool,
    default_runtime: &'static str,
    daemon_json: Option<Option<String>>,
    resources: Vec<String>,
}

impl Builder {
    /// The program behind `--runtime=cgpu`; bare runc unless said.
    #[must_use]
    pub fn runtime(mut self, path: impl Into<PathBuf>) -> Self {
        self.runtime = path.into();
        self
    }

    /// Adds an argument that dockerd puts before all others when it calls `cgpu`.
    #[must_use]
    pub fn runtime_arg(mut self, arg: impl Into<String>) -> Self {
        self.runtime_args.push(arg.into());
        self
    }

    /// Sets a variable of dockerd's, which every runtime inherits.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.environment.push((name.to_owned(), value.into()));
        self
    }

    /// Lets containers run on while dockerd is away.
    #[must_use]
    pub fn live_restore(mut self) -> Self {
        self.live_restore = true;
        self
    }

    /// Containers that name no runtime get the one that is known as `cgpu`.
    #[must_use]
    pub fn default_runtime(mut self) -> Self {
        self.default_runtime = "cgpu";
        self
    }

    /// Has dockerd's file say this and nothing more, or be gone once dockerd has started: what the
    /// harness needs is said by flags. Then `runc` is the one runtime that dockerd knows by itself.
    #[must_use]
    pub fn daemon_json(mut self, text: Option<&str>) -> Self {
        self.daemon_json = Some(text.map(str::to_owned));
        self
    }

    /// Has Swarm know a resource of this node's, as `NVIDIA-GPU=GPU-…`.
    #[must_use]
    pub fn resource(mut self, resource: String) -> Self {
        self.resources.push(resource);
        self
    }

    /// Starts dockerd, waits until it answers, and loads [`IMAGE`].
    pub fn start(self) -> Docker {
        let scratch = Scratch::new();
        let mut config = json!({
            "hosts": [format!("unix://{}", scratch.path().join("docker.sock").display())],
            "data-root": scratch.path().join("data"),
            "exec-root": scratch.path().join("exec"),
            "pidfile": scratch.path().join("docker.pid"),
            "deprecated-key-path": scratch.path().join("key.json"),
            "containerd": containerd_socket(&scratch),
            "exec-opts": ["native.cgroupdriver=cgroupfs"],
            "cgroup-parent": scratch.cgroup(),
            "iptables": false,
            "bridge": "none",
            "live-restore": self.live_restore,
        });
        let mut flags = Vec::new();
        let text = match &self.daemon_json {
            Some(text) => {
                flags = as_flags(&config);
                text.clone().unwrap_or_else(|| "{}".to_owned())
            }
            None => {
                config["node-generic-resources"] = json!(self.resources);
                config["default-runtime"] = json!(self.default_runtime);
                config["runtimes"] = json!({
                    "crun": {"path": scratch.crun_program()},
                    "cgpu": {"path": self.runtime, "runtimeArgs": self.runtime_args},
                });
                config.to_string()
            }
        };
        let file = scratch.file("daemon.json", text);
        let containerd = spawn_containerd(&scratch, &self.environment);
        let daemon = spawn(&scratch, &self.environment, &flags);
        let docker = Docker { daemon, containerd, scratch, environment: self.environment, flags };
        docker.wait_until_it_answers();
        if self.daemon_json == Some(None) {
            fs::remove_file(file).expect("a file of a scratch can be removed");
        }
        docker.load(&Image::new(IMAGE));
        docker
    }
}

/// How dockerd is to end before it is started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Restart {
    /// By SIGTERM, as an upgrade would.
    Graceful,
    /// By SIGKILL, as the OOM killer would.
    Killed,
}

/// A running dockerd.
#[derive(Debug)]
pub struct Docker {
    daemon: Child,
    containerd: Child,
    scratch: Scratch,
    environment: Vec<(String, String)>,
    flags: Vec<String>,
}

impl Docker {
    /// Begins with bare runc as `cgpu`, and without live restore.
    pub fn builder() -> Builder {
        prerequisites();
        Builder {
            runtime: program("runc"),
            runtime_args: Vec::new(),
            environment: Vec::new(),
            live_restore: false,
            default_runtime: "runc",
            daemon_json: None,
            resources: Vec::new(),
        }
    }

    /// The directory that holds everything of this dockerd.
    pub fn scratch(&self) -> &Scratch {
        &self.scratch
    }

    /// The client, ready to talk to this dockerd.
    pub fn command(&self) -> Command {
        let mut command = self.scratch.command("docker");
        command.env(
            "DOCKER_HOST",
            format!("unix://{}", self.scratch.path().join("docker.sock").display()),
        );
        command
            .env("DOCKER_CONFIG", self.scratch.path().join("client"))
            .env_remove("DOCKER_CONTEXT");
        command
    }

    /// Any client command: `docker ARGS`.
    #[must_use]
    #[track_caller]
    pub fn call(&self, args: &[&str]) -> Outcome {
        run_with_timeout(self.command().args(args), timeout())
    }

    /// `docker run --network none --pull never ARGS`.
    #[must_use]
    #[track_caller]
    pub fn run(&self, args: &[&str]) -> Outcome {
        let mut command = self.command();
        command.args(["run", "--network", "none", "--pull", "never"]);
        run_with_timeout(command.args(args), timeout())
    }

    /// `docker exec CONTAINER ARGS`.
    #[must_use]
    #[track_caller]
    pub fn exec(&self, container: &str, args: &[&str]) -> Outcome {
        run_with_timeout(self.command().args(["exec", container]).args(args), timeout())
    }

    /// `docker logs CONTAINER`.
    #[must_use]
    #[track_caller]
    pub fn logs(&self, container: &str) -> Outcome {
        self.call(&["logs", container])
    }

    /// `docker rm -f CONTAINER`.
    #[must_use]
    #[track_caller]
    pub fn remove(&self, container: &str) -> Outcome {
        self.call(&["rm", "-f", container])
    }

    /// One thing of `docker inspect`, by a template such as `{{.State.Pid}}`.
    #[track_caller]
    pub fn inspect(&self, container: &str, template: &str) -> String {
        self.call(&["inspect", "--format", template, container]).ok().text().to_owned()
    }

    /// Makes an image known to this dockerd.
    #[track_caller]
    pub fn load(&self, image: &Image) {
        let archive = image.archive(&self.scratch);
        run_with_timeout(self.command().arg("load").arg("-i").arg(archive), timeout()).ok();
    }

    /// Ends dockerd and starts it again; without live restore its containers end too.
    pub fn restart(&mut self, how: Restart) {
        match how {
            Restart::Graceful => self.terminate(),
            Restart::Killed => self.daemon.kill().expect("dockerd is our child and not reaped yet"),
        }
        self.daemon.wait().expect("dockerd is our child");
        self.daemon = spawn(&self.scratch, &self.environment, &self.flags);
        self.wait_until_it_answers();
    }

    /// What dockerd and its containerd have logged since the first start.
    pub fn log(&self) -> String {
        fs::read_to_string(log_path(&self.scratch)).unwrap_or_default()
    }

    fn end_of_log(&self) -> String {
        last_lines(&self.log(), 30)
    }

    fn terminate(&mut self) {
        let pid = Pid::from_raw(self.daemon.id().cast_signed());
        kill(pid, Signal::SIGTERM).expect("dockerd is our child and not reaped yet");
        let ended = wait_until(timeout(), || matches!(self.daemon.try_wait(), Ok(Some(_))));
        assert!(
            ended,
            "dockerd ignored SIGTERM for {:?}; the end of its log:\n{}",
            timeout(),
            self.end_of_log()
        );
    }

    fn wait_until_it_answers(&self) {
        let socket = self.scratch.path().join("docker.sock");
        let up =
            wait_until(timeout(), || socket.exists() && self.call(&["version"]).status.success());
        assert!(
            up,
            "dockerd did not answer within {:?}; the end of its log:\n{}",
            timeout(),
            self.end_of_log()
        );
    }
}

impl Drop for Docker {
    /// Ends the daemons the hard way; the scratch takes shims, containers and mounts with it.
    fn drop(&mut self) {
        for daemon in [&mut self.daemon, &mut self.containerd] {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

fn containerd_socket(scratch: &Scratch) -> PathBuf {
    scratch.path().join("containerd.sock")
}

/// dockerd tries for a while to reach it, so this doesn't wait.
fn spawn_containerd(scratch: &Scratch, environment: &[(String, String)]) -> Child {
    let (path, socket) = (scratch.path().display(), containerd_socket(scratch));
    let configuration = format!(
        "version = 2\nroot = \"{path}/containerd\"\nstate = \"{path}/containerd-state\"\n\
         disabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n\
         [grpc]\naddress = \"{}\"\n\
         [plugins.\"io.containerd.internal.v1.opt\"]\npath = \"{path}/opt\"\n",
        socket.display()
    );
    let file = scratch.file("containerd.toml", configuration);
    spawn_logged(scratch, environment, scratch.command("containerd").arg("--config").arg(file))
}

fn spawn(scratch: &Scratch, environment: &[(String, String)], flags: &[String]) -> Child {
    let file = scratch.path().join("daemon.json");
    let mut command = scratch.command("dockerd");
    spawn_logged(scratch, environment, command.arg("--config-file").arg(file).args(flags))
}

/// The keys of a configuration as dockerd's flags, which are lists by their singular.
fn as_flags(config: &serde_json::Value) -> Vec<String> {
    let plural = |key: &str| matches!(key, "hosts" | "exec-opts");
    let keys = config.as_object().expect("a configuration is an object").iter();
    // It has no flag, and its file is harmless.
    let keys = keys.filter(|(key, _)| *key != "deprecated-key-path");
    let flag = |(key, value): (&String, &serde_json::Value)| match (value, plural(key)) {
        (value, true) => {
            let name = key.trim_end_matches('s');
            format!("--{name}={}", value[0].as_str().expect("it is a list of texts"))
        }
        (serde_json::Value::String(text), false) => format!("--{key}={text}"),
        (value, false) => format!("--{key}={value}"),
    };
    keys.map(flag).collect()
}

fn spawn_logged(
    scratch: &Scratch,
    environment: &[(String, String)],
    command: &mut Command,
) -> Child {
    let log = File::options()
        .create(true)
        .append(true)
        .open(log_path(scratch))
        .expect("a log can be opened in a scratch");
    let also = log.try_clone().expect("a descriptor can be duplicated");
    command.envs(environment.iter().map(|(name, value)| (name, value)));
    // An interrupt that is typed at the terminal is for the test, which ends them.
    command.process_group(0);
    let daemon = command.stdin(Stdio::null()).stdout(log).stderr(also).spawn();
    daemon.expect("an installed daemon can be started")
}

fn log_path(scratch: &Scratch) -> impl AsRef<Path> + use<> {
    scratch.path().join("dockerd.log")
}
