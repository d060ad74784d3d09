//! The container runtime interface, as Kubernetes would call it.
//!
//! gRPC is left to the program `cri` of the workspace (`tests/cri`), which is built when first
//! needed; this file knows the messages a test needs. Messages are JSON, with the names of
//! `runtime.v1`'s fields; a test edits them as it likes.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use serde_json::{Value, json};

use super::{IMAGE, Outcome, Scratch, run_with_input, run_with_timeout, timeout};

/// How long the first build of the client may take.
const BUILDING: Duration = Duration::from_secs(600);

/// `NamespaceMode::NODE`: the host's own namespace.
const NODE: i64 = 2;

/// Calls to one containerd.
#[derive(Debug)]
pub struct Cri<'engine> {
    scratch: &'engine Scratch,
    socket: PathBuf,
}

/// What a program run by [`Cri::exec_sync`] left behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Executed {
    /// Its exit status.
    pub code: i64,
    /// All of standard output, invalid UTF-8 replaced.
    pub stdout: String,
    /// All of standard error, invalid UTF-8 replaced.
    pub stderr: String,
}

impl<'engine> Cri<'engine> {
    pub(super) fn new(scratch: &'engine Scratch, socket: PathBuf) -> Self {
        Self { scratch, socket }
    }

    /// One call: a verb of the `cri` program, its request, its outcome with the response on
    /// standard output.
    #[must_use]
    #[track_caller]
    pub fn call(&self, verb: &str, request: &Value) -> Outcome {
        let mut command = self.scratch.command(client());
        run_with_input(
            command.arg("--socket").arg(&self.socket).arg(verb),
            request.to_string().as_bytes(),
            timeout(),
        )
    }

    /// A pod on the host's network, with its logs and cgroups in the scratch. Annotations go to
    /// `["annotations"]`.
    pub fn pod_config(&self, name: &str) -> Value {
        json!({
            "metadata": {"name": name, "uid": name, "namespace": "default", "attempt": 0},
            "log_directory": self.scratch.directory("pod-logs").join(name),
            "annotations": {},
            "linux": {
                "cgroup_parent": self.scratch.cgroup(),
                "security_context": {"namespace_options": {"network": NODE}},
            },
        })
    }

    /// A container of [`IMAGE`] that sleeps. Variables go to `["envs"]`, as `{"key": …, "value":
    /// …}`.
    pub fn container_config(&self, name: &str) -> Value {
        json!({
            "metadata": {"name": name, "attempt": 0},
            "image": {"image": IMAGE},
            "command": ["sleep", "1000"],
            "envs": [],
            "annotations": {},
            "log_path": format!("{name}.log"),
        })
    }

    /// Starts a pod's sandbox and returns the pod's id.
    #[track_caller]
    pub fn run_pod(&self, handler: &str, pod: &Value) -> String {
        let response =
            self.call("run-pod", &json!({"config": pod, "runtime_handler": handler})).ok().json();
        text(&response, "pod_sandbox_id")
    }

    /// Creates a container in a pod and returns the container's id.
    #[track_caller]
    pub fn create(&self, pod_id: &str, container: &Value, pod: &Value) -> String {
        let request = json!({"pod_sandbox_id": pod_id, "config": container, "sandbox_config": pod});
        text(&self.call("create", &request).ok().json(), "container_id")
    }

    /// Starts a created container.
    #[must_use]
    #[track_caller]
    pub fn start(&self, container_id: &str) -> Outcome {
        self.call("start", &json!({"container_id": container_id}))
    }

    /// Runs a program in a container and waits for its end.
    #[track_caller]
    pub fn exec_sync(&self, container_id: &str, args: &[&str]) -> Executed {
        let request =
            json!({"container_id": container_id, "cmd": args, "timeout": timeout().as_secs()});
        let response = self.call("exec-sync", &request).ok().json();
        let code = response["exit_code"].as_i64().unwrap_or_default();
        Executed { code, stdout: text(&response, "stdout"), stderr: text(&response, "stderr") }
    }

    /// The same, of a command that the runtime doesn't start.
    #[track_caller]
    pub fn exec_refused(&self, container_id: &str, args: &[&str]) -> Outcome {
        let request =
            json!({"container_id": container_id, "cmd": args, "timeout": timeout().as_secs()});
        self.call("exec-sync", &request).fails()
    }

    /// The container's status, such as `["state"]` (0 created, 1 running, 2 exited) and
    /// `["exit_code"]`.
    #[track_caller]
    pub fn status(&self, container_id: &str) -> Value {
        let request = json!({"container_id": container_id, "verbose": false});
        self.call("status", &request).ok().json()["status"].take()
    }

    /// Stops a container at once, without a period of grace.
    #[must_use]
    #[track_caller]
    pub fn stop(&self, container_id: &str) -> Outcome {
        self.call("stop", &json!({"container_id": container_id, "timeout": 0}))
    }

    #[must_use]
    #[track_caller]
    pub fn remove(&self, container_id: &str) -> Outcome {
        self.call("remove", &json!({"container_id": container_id}))
    }

    /// Stops a pod and removes it.
    #[must_use]
    #[track_caller]
    pub fn remove_pod(&self, pod_id: &str) -> Outcome {
        self.call("stop-pod", &json!({"pod_sandbox_id": pod_id})).ok();
        self.call("remove-pod", &json!({"pod_sandbox_id": pod_id}))
    }

    /// What a container has written so far, each line with the CRI's time, stream and tag before
    /// it.
    pub fn logs(&self, pod: &Value, container: &Value) -> String {
        let directory = PathBuf::from(text(pod, "log_directory"));
        fs::read_to_string(directory.join(text(container, "log_path"))).unwrap_or_default()
    }
}

fn text(value: &Value, field: &str) -> String {
    value[field].as_str().unwrap_or_default().to_owned()
}

/// Builds the `cri` program, once per test binary, and returns where cargo put it; or the one that
/// `CGPU_TEST_CRI` names, where there is no cargo.
fn client() -> &'static PathBuf {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        if let Some(built) = std::env::var_os("CGPU_TEST_CRI") {
            return built.into();
        }
        let mut cargo =
            Command::new(std::env::var_os("CARGO").unwrap_or_else(|| env!("CARGO").into()));
        cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
        cargo.args([
            "build",
            "--locked",
            "--package",
            "cri",
            "--message-format",
            "json-render-diagnostics",
        ]);
        let built = run_with_timeout(&mut cargo, BUILDING);
        assert!(built.status.success(), "the package cri can't be built:\n{}", built.stderr);
        let executable = |line: &str| {
            let message: Value = serde_json::from_str(line).ok()?;
            message["executable"].as_str().map(PathBuf::from)
        };
        built.stdout.lines().find_map(executable).expect("cargo names the program it has built")
    })
}
