//! containerd, with roots and socket of its own, through its client `ctr` and through its CRI
//! plugin.
//!
//! The CRI plugin knows the runtime handlers `runc`, `crun` and `cgpu`; the last is whatever the
//! test names. Pods use the host's network, so no CNI plugin is needed; `restrict_oom_score_adj`
//! because a sandbox may not lower it; pod annotations `aliyun.com/*` reach the runtime. NRI is off: its socket is one for
//! all of a host's.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::command::last_lines;
use super::image::PAUSE;
use super::{
    Cri, IMAGE, Image, Outcome, Restart, Scratch, prerequisites, program, run_with_timeout,
    timeout, wait_until,
};

/// How often an exec that prints nothing is made once more.
const EXECS: u32 = 20;

/// The namespace that `ctr` uses by default, and that of Kubernetes.
const NAMESPACES: [&str; 2] = ["default", "k8s.io"];

/// Choices made before containerd starts.
#[derive(Debug)]
pub struct Builder {
    runtime: PathBuf,
    default_handler: &'static str,
    environment: Vec<(String, String)>,
    client_programs: Option<PathBuf>,
    reads_cdi: bool,
}

impl Builder {
    /// Has it read the CDI files in [`Containerd::cdi_dir`], if its release can.
    #[must_use]
    pub fn cdi(mut self) -> Self {
        self.reads_cdi = true;
        self
    }

    /// The program behind the handler `cgpu`; bare runc unless said.
    #[must_use]
    pub fn runtime(mut self, path: impl Into<PathBuf>) -> Self {
        self.runtime = path.into();
        self
    }

    /// Has `cgpu` make the pods that name no handler, in runc's place.
    #[must_use]
    pub fn default_runtime(mut self) -> Self {
        self.default_handler = "cgpu";
        self
    }

    /// Sets a variable of containerd's, which every runtime inherits.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.environment.push((name.to_owned(), value.into()));
        self
    }

    /// A directory in which `ctr` looks for programs first.
    #[must_use]
    pub fn client_programs(mut self, directory: &Path) -> Self {
        self.client_programs = Some(directory.to_owned());
        self
    }

    /// Starts containerd, waits until it answers, and loads [`IMAGE`] and the image of pod
    /// sandboxes.
    pub fn start(self) -> Containerd {
        let scratch = Scratch::new();
        let crun = scratch.crun_program();
        let handlers = [("runc", program("runc")), ("crun", crun), ("cgpu", self.runtime.clone())];
        let mut text = configuration(scratch.path(), self.default_handler, &handlers);
        // containerd 2 reads a configuration of version 2, too; 1.6 knows neither key.
        let cdi =
            format!("enable_cdi = {}\ncdi_spec_dirs = [{:?}]", self.reads_cdi, cdi(scratch.path()));
        text = text.replacen(
            "restrict_oom_score_adj = true",
            &format!("restrict_oom_score_adj = true\n{cdi}"),
            1,
        );
        scratch.file("containerd.toml", text);
        let Builder { runtime, environment, client_programs, .. } = self;
        let daemon = spawn(&scratch, &environment);
        let containerd = Containerd { daemon, scratch, runtime, environment, client_programs };
        containerd.wait_until_it_answers();
        containerd.load(&Image::new(IMAGE));
        containerd.load(&Image::new(PAUSE).command(&["sleep", "1000000"]));
        containerd
    }
}

/// A running containerd.
#[derive(Debug)]
pub struct Containerd {
    daemon: Child,
    scratch: Scratch,
    runtime: PathBuf,
    environment: Vec<(String, String)>,
    client_programs: Option<PathBuf>,
}

impl Containerd {
    /// Begins with bare runc as `cgpu`.
    pub fn builder() -> Builder {
        prerequisites();
        Builder {
            runtime: program("runc"),
            default_handler: "runc",
            environment: Vec::new(),
            client_programs: None,
            reads_cdi: false,
        }
    }

    /// Where CDI files lie that it reads.
    pub fn cdi_dir(&self) -> PathBuf {
        cdi(self.scratch.path())
    }

    /// Its socket, by which a kubelet asks it.
    pub fn socket(&self) -> PathBuf {
        socket(self.scratch.path())
    }

    /// The directory that holds everything of this containerd.
    pub fn scratch(&self) -> &Scratch {
        &self.scratch
    }

    /// The client, ready to talk to this containerd.
    pub fn command(&self) -> Command {
        let mut command = self.scratch.command("ctr");
        command.arg("--address").arg(socket(self.scratch.path()));
        if let Some(first) = &self.client_programs {
            let path = std::env::var("PATH").unwrap_or_default();
            command.env("PATH", format!("{}:{path}", first.display()));
        }
        command
    }

    /// Any client command: `ctr ARGS`.
    #[must_use]
    #[track_caller]
    pub fn call(&self, args: &[&str]) -> Outcome {
        run_with_timeout(self.command().args(args), timeout())
    }

    /// `ctr run --runc-binary … OPTIONS IMAGE ID ARGS` with the runtime of this containerd.
    #[must_use]
    #[track_caller]
    pub fn run(&self, options: &[&str], id: &str, args: &[&str]) -> Outcome {
        self.run_with(&self.runtime, options, id, args)
    }

    /// Like [`run`](Self::run), with another image.
    #[must_use]
    #[track_caller]
    pub fn run_image(&self, image: &str, options: &[&str], id: &str, args: &[&str]) -> Outcome {
        self.start_one(&self.runtime, image, options, id, args)
    }

    /// Like [`run`](Self::run), with any runtime.
    #[must_use]
    #[track_caller]
    pub fn run_with(&self, runtime: &Path, options: &[&str], id: &str, args: &[&str]) -> Outcome {
        self.start_one(runtime, IMAGE, options, id, args)
    }

    /// Like [`run`](Self::run), for a program that ends soon: what it says comes by a file. `ctr` may end before
    /// it has copied that.
    #[must_use]
    #[track_caller]
    pub fn run_and_read(&self, options: &[&str], id: &str, args: &[&str]) -> Outcome {
        const SAID: &str = "/said";
        const TO_FILE: &str = "\"$@\" > /said/stdout";
        let said = self.scratch.directory(id);
        let mount = format!("type=bind,src={},dst={SAID},options=rbind:rw", said.display());
        let options = [options, &["--mount", &mount]].concat();
        let outcome = self.run(&options, id, &[&["sh", "-c", TO_FILE, "sh"], args].concat());
        let stdout = fs::read_to_string(said.join("stdout")).unwrap_or_default();
        Outcome { stdout, ..outcome }
    }

    #[track_caller]
    fn start_one(
        &self,
        runtime: &Path,
        image: &str,
        options: &[&str],
        id: &str,
        args: &[&str],
    ) -> Outcome {
        let mut command = self.command();
        command
            .arg("run")
            .arg("--runc-binary")
            .arg(runtime)
            .arg("--runc-root")
            .arg(self.runtime_root());
        command.arg("--fifo-dir").arg(self.scratch.path().join("fifo"));
        command.arg("--cgroup").arg(format!("{}/{id}", self.scratch.cgroup()));
        run_with_timeout(command.args(options).arg(image).arg(id).args(args), timeout())
    }

    /// `ctr task exec` in a running container, of what prints something: on a busy machine ctr 1.6 may end
    /// before it has copied that, and is asked again.
    #[must_use]
    #[track_caller]
    pub fn exec(&self, id: &str, args: &[&str]) -> Outcome {
        let once = || {
            let mut command = self.command();
            command
                .args(["task", "exec", "--exec-id", "exec", "--fifo-dir"])
                .arg(self.scratch.path().join("fifo"));
            run_with_timeout(command.arg(id).args(args), timeout())
        };
        let mut outcome = once();
        for _ in 0..EXECS {
            if !outcome.status.success() || !outcome.stdout.is_empty() {
                break;
            }
            outcome = once();
        }
        outcome
    }

    /// Kills and deletes a container made by [`run`](Self::run) with `-d`.
    #[must_use]
    #[track_caller]
    pub fn remove(&self, id: &str) -> Outcome {
        self.call(&["task", "rm", "--force", id]).ok();
        self.call(&["container", "rm", id])
    }

    /// The CRI of this containerd.
    pub fn cri(&self) -> Cri<'_> {
        Cri::new(&self.scratch, socket(self.scratch.path()))
    }

    /// The directory of runc's state; containerd appends its namespace.
    pub fn runtime_root(&self) -> PathBuf {
        self.scratch.path().join("runtime")
    }

    /// Makes an image known to this containerd, for `ctr` and for the CRI.
    #[track_caller]
    pub fn load(&self, image: &Image) {
        let archive = image.archive(&self.scratch);
        for namespace in NAMESPACES {
            run_with_timeout(
                self.command().args(["--namespace", namespace, "image", "import"]).arg(&archive),
                timeout(),
            )
            .ok();
        }
    }

    /// Ends containerd and starts it again; its containers live on under their shims.
    pub fn restart(&mut self, how: Restart) {
        match how {
            Restart::Graceful => {
                let pid = Pid::from_raw(self.daemon.id().cast_signed());
                kill(pid, Signal::SIGTERM).expect("containerd is our child and not reaped yet");
                let ended = wait_until(timeout(), || matches!(self.daemon.try_wait(), Ok(Some(_))));
                assert!(ended, "containerd ignored SIGTERM: {}", last_lines(&self.log(), 30));
            }
            Restart::Killed => {
                self.daemon.kill().expect("containerd is our child and not reaped yet");
            }
        }
        self.daemon.wait().expect("containerd is our child");
        self.daemon = spawn(&self.scratch, &self.environment);
        self.wait_until_it_answers();
    }

    /// What containerd has logged since the first start.
    pub fn log(&self) -> String {
        fs::read_to_string(self.scratch.path().join("containerd.log")).unwrap_or_default()
    }

    fn wait_until_it_answers(&self) {
        let socket = socket(self.scratch.path());
        let up =
            wait_until(timeout(), || socket.exists() && self.call(&["version"]).status.success());
        assert!(
            up,
            "containerd did not answer within {:?}; the end of its log:\n{}",
            timeout(),
            last_lines(&self.log(), 30)
        );
    }
}

impl Drop for Containerd {
    /// Ends the daemon the hard way; the scratch takes shims, containers and mounts with it.
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

fn spawn(scratch: &Scratch, environment: &[(String, String)]) -> Child {
    let log = File::options()
        .create(true)
        .append(true)
        .open(scratch.path().join("containerd.log"))
        .expect("a log can be opened in a scratch");
    let also = log.try_clone().expect("a descriptor can be duplicated");
    let mut command = scratch.command("containerd");
    command.arg("--config").arg(scratch.path().join("containerd.toml"));
    command.envs(environment.iter().map(|(name, value)| (name, value)));
    let daemon = command.stdin(Stdio::null()).stdout(log).stderr(also).spawn();
    daemon.expect("containerd can be started")
}

fn socket(scratch: &Path) -> PathBuf {
    scratch.join("containerd.sock")
}

fn cdi(scratch: &Path) -> PathBuf {
    scratch.join("cdi")
}

fn configuration(scratch: &Path, default_handler: &str, handlers: &[(&str, PathBuf)]) -> String {
    let (root, socket) = (scratch.display(), socket(scratch));
    let socket = socket.display();
    let mut text = format!(
        r#"
version = 2
root = "{root}/root"
state = "{root}/state"

[grpc]
address = "{socket}"

[plugins."io.containerd.internal.v1.opt"]
path = "{root}/opt"

[plugins."io.containerd.nri.v1.nri"]
disable = true

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
restrict_oom_score_adj = true

[plugins."io.containerd.grpc.v1.cri".cni]
conf_dir = "{root}/cni/conf"
bin_dir = "{root}/cni/bin"

[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "{default_handler}"
"#
    );
    for (name, program) in handlers {
        let program = program.display();
        text.push_str(&format!(
            r#"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{name}]
runtime_type = "io.containerd.runc.v2"
pod_annotations = ["aliyun.com/*", "cgpu/*"]
options = {{ BinaryName = "{program}", Root = "{root}/runtime" }}
"#
        ));
    }
    text
}
