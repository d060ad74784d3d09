//! podman, which has no daemon: a configuration of its own and private roots are enough.
//!
//! Its defaults reach outside in four places, each closed by `containers.conf`: locks in `/dev/shm`,
//! networks in `/etc/cni`, events in the journal, limits that a sandbox may not raise. Cgroups are
//! podman's own doing (`cgroupfs`), below the scratch's.
//!
//! What it can't be talked out of, harmless: `blob-info-cache-v1.boltdb` in `/var/lib/containers/cache`.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{IMAGE, Image, Outcome, Scratch, prerequisites, program, run_with_timeout, timeout};

/// Choices made before the first container.
#[derive(Debug)]
pub struct Builder {
    runtime: Option<PathBuf>,
    hooks_dir: Option<PathBuf>,
    runtime_flags: Vec<String>,
    environment: Vec<(String, String)>,
}

impl Builder {
    /// A global flag for the runtime, without its dashes: conmon hands no variables on.
    #[must_use]
    pub fn runtime_flag(mut self, flag: impl Into<String>) -> Self {
        self.runtime_flags.push(flag.into());
        self
    }

    /// What `--runtime` names; bare runc unless said.
    #[must_use]
    pub fn runtime(mut self, path: impl Into<PathBuf>) -> Self {
        self.runtime = Some(path.into());
        self
    }

    /// A directory of OCI hook files; an empty one unless said.
    #[must_use]
    pub fn hooks_dir(mut self, path: impl Into<PathBuf>) -> Self {
        self.hooks_dir = Some(path.into());
        self
    }

    /// Sets a variable of podman's.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.environment.push((name.to_owned(), value.into()));
        self
    }

    /// Writes the configuration and loads [`IMAGE`].
    pub fn start(self) -> Podman {
        let scratch = Scratch::new();
        let runtime = self.runtime.unwrap_or_else(|| program("runc"));
        let hooks_dir = self.hooks_dir.unwrap_or_else(|| scratch.directory("hooks"));
        scratch.file("containers.conf", configuration(scratch.path()));
        let Builder { runtime_flags, environment, .. } = self;
        let podman = Podman { scratch, runtime, hooks_dir, runtime_flags, environment };
        podman.load(&Image::new(IMAGE));
        podman
    }
}

/// A podman with private roots.
#[derive(Debug)]
pub struct Podman {
    scratch: Scratch,
    runtime: PathBuf,
    hooks_dir: PathBuf,
    runtime_flags: Vec<String>,
    environment: Vec<(String, String)>,
}

impl Podman {
    /// Begins with bare runc and no hooks.
    pub fn builder() -> Builder {
        prerequisites();
        Builder {
            runtime: None,
            hooks_dir: None,
            runtime_flags: Vec::new(),
            environment: Vec::new(),
        }
    }

    /// The directory that holds everything of this podman.
    pub fn scratch(&self) -> &Scratch {
        &self.scratch
    }

    /// From now on `--runtime` names another program: a podman is dear to make, since it loads an
    /// image.
    pub fn use_runtime(&mut self, path: impl Into<PathBuf>) {
        self.runtime = path.into();
    }

    /// podman with its global options: roots, runtime, hooks.
    pub fn command(&self) -> Command {
        let path = |name: &str| self.scratch.path().join(name);
        let mut command = self.scratch.command("podman");
        command.env("CONTAINERS_CONF", path("containers.conf"));
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
            .arg("--root")
            .arg(path("root"))
            .arg("--runroot")
            .arg(path("run"))
            .arg("--tmpdir")
            .arg(path("tmp"));
        command.arg("--cgroup-manager").arg("cgroupfs").arg("--hooks-dir").arg(&self.hooks_dir);
        command.arg("--runtime").arg(self.script());
        command
    }

    /// The runtime with its flags. `--runtime-flag` won't do: podman 4.3 forgets the flags
    /// when it calls `delete --force`, which then finds nothing to delete, succeeds, and
    /// calls no poststop hook.
    fn script(&self) -> PathBuf {
        let root = self.scratch.path().join("runtime");
        let mut line = format!("exec '{}' --root '{}'", self.runtime.display(), root.display());
        for flag in &self.runtime_flags {
            line.push_str(&format!(" '--{flag}'"));
        }
        self.scratch.script("runtime.sh", &format!("#!/bin/sh\n{line} \"$@\"\n"))
    }

    /// Any podman command: `podman ARGS`.
    #[must_use]
    #[track_caller]
    pub fn call(&self, args: &[&str]) -> Outcome {
        run_with_timeout(self.command().args(args), timeout())
    }

    /// `podman run OPTIONS ARGS` with the options that every container needs here; name [`IMAGE`],
    /// or `--rootfs` and a directory.
    #[must_use]
    #[track_caller]
    pub fn run(&self, args: &[&str]) -> Outcome {
        let mut command = self.command();
        command.args(["run", "--network", "none", "--pull", "never"]);
        command.args(["--cgroup-parent", &self.scratch.cgroup()]);
        command.args(["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]);
        run_with_timeout(command.args(args), timeout())
    }

    /// `podman exec CONTAINER ARGS`.
    #[must_use]
    #[track_caller]
    pub fn exec(&self, container: &str, args: &[&str]) -> Outcome {
        run_with_timeout(self.command().args(["exec", container]).args(args), timeout())
    }

    /// `podman rm -f -t 0 CONTAINER`.
    #[must_use]
    #[track_caller]
    pub fn remove(&self, container: &str) -> Outcome {
        self.call(&["rm", "-f", "-t", "0", container])
    }

    /// Makes an image known to this podman.
    #[track_caller]
    pub fn load(&self, image: &Image) {
        let archive = image.archive(&self.scratch);
        run_with_timeout(self.command().arg("load").arg("-i").arg(archive), timeout()).ok();
    }
}

fn configuration(scratch: &Path) -> String {
    let scratch = scratch.display();
    format!(
        r#"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
log_driver = "k8s-file"

[engine]
events_logger = "none"
lock_type = "file"
num_locks = 64
static_dir = "{scratch}/root/libpod"
volume_path = "{scratch}/volumes"

[network]
network_config_dir = "{scratch}/networks"
"#
    )
}
