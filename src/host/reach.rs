//! How a container reaches past the enforcement: [`find`] checks its bundle and this host.
//!
//! Owns which parts of a host lead past it. Compares what is mounted by file, not by name, so that
//! parents, links and other mounts of the same directory count.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use cgpu_core::request::reach::{CAPABILITIES, HOST_PID_CAPABILITIES};
use cgpu_core::request::{Reach, Reaches};
use cgpu_host::config::{Config, DROP_INS};
use cgpu_inject::bundle::{Bundle, PidNamespace};
use cgpu_inject::tree;

/// Sockets of engines: a process that may speak with one is root of the host.
const ENGINE_SOCKETS: [&str; 8] = [
    "/run/docker.sock",
    "/run/containerd/containerd.sock",
    "/run/k3s/containerd/containerd.sock",
    "/run/crio/crio.sock",
    "/run/podman/podman.sock",
    "/run/cri-dockerd.sock",
    "/run/docker/containerd/containerd.sock",
    "/run/buildkit/buildkitd.sock",
];

/// Where the kubelet speaks with plugins.
const KUBELET_DIRS: [&str; 3] = [
    "/var/lib/kubelet/device-plugins",
    "/var/lib/kubelet/plugins",
    "/var/lib/kubelet/pod-resources",
];

/// How the container of `bundle` reaches past the enforcement on the host that `config` is of, which was read
/// from `config_path`.
pub(super) fn find(bundle: &Bundle, config: &Config, config_path: Option<&Path>) -> Reaches {
    let host_pids = is_in_host_pids(bundle.pid_namespace());
    let mut ways = Vec::new();
    if bundle.allows_every_device() {
        ways.push(Reach::EveryDevice);
    }
    let has = |name: &&&str| bundle.has_capability(name);
    ways.extend(CAPABILITIES.iter().filter(has).map(|name| Reach::Capability((*name).to_owned())));
    if host_pids {
        let in_host = HOST_PID_CAPABILITIES.iter().filter(has);
        ways.extend(in_host.map(|name| Reach::HostPid((*name).to_owned())));
    }
    let mut host = None;
    // What cgpu itself mounts of the driver's files.
    let own = tree::home(&config.state_dir);
    for source in bundle.bind_sources().filter(|source| !Path::new(source).starts_with(&own)) {
        let host = host.get_or_insert_with(|| Sensitive::of(config, config_path));
        if let Some(brings) = host.brought_by(Path::new(source)) {
            let way = Reach::Mount { source: source.to_owned(), brings: brings.to_owned() };
            if !ways.contains(&way) {
                ways.push(way);
            }
        }
    }
    Reaches { ways, host_pids }
}

/// Whether that is the host's pid namespace. The namespace of this process counts as the host's: its
/// monitors are in it.
fn is_in_host_pids(namespace: PidNamespace<'_>) -> bool {
    match namespace {
        PidNamespace::New => false,
        PidNamespace::Runtime => true,
        PidNamespace::At(path) => {
            let found = file_of(Path::new(path));
            let hosts = ["/proc/1/ns/pid", "/proc/self/ns/pid"];
            // One that can't be inspected may be the host's; the runtime will fail to enter it.
            found.is_none() || hosts.iter().any(|host| file_of(Path::new(host)) == found)
        }
    }
}

/// Device and inode of what is at a path, behind links.
type File = (u64, u64);

fn file_of(path: &Path) -> Option<File> {
    let meta = fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino()))
}

/// What of this host leads past the enforcement.
struct Sensitive {
    /// Each part, and each directory above it, by file.
    files: HashMap<File, &'static str>,
    /// Directories below which everything counts too.
    trees: Vec<(PathBuf, &'static str)>,
}

impl Sensitive {
    fn of(config: &Config, config_path: Option<&Path>) -> Self {
        let mut found = Sensitive { files: HashMap::new(), trees: Vec::new() };
        found.file(Path::new("/proc"), "the host's /proc");
        found.tree(Path::new("/sys/fs/cgroup"), "the host's cgroups");
        found.tree(&config.state_dir, "cgpu's state");
        // The first container may come before the directory does.
        found.above(&config.state_dir, "cgpu's state");
        found.tree(Path::new("/etc/cgpu"), "cgpu's configuration");
        if let Some(path) = config_path {
            found.file(path, "cgpu's configuration");
            found.tree(&path.with_file_name(DROP_INS), "cgpu's configuration");
        }
        found.tree(Path::new("/var/lib/cgpu"), "cgpu's state");
        found.tree(&config.kubernetes.grants, "cgpu's state");
        for dir in &config.driver.cdi_dirs {
            found.tree(dir, "CDI specifications");
        }
        for dir in KUBELET_DIRS {
            found.tree(Path::new(dir), "the kubelet's plugin sockets");
        }
        for socket in ENGINE_SOCKETS {
            found.file(Path::new(socket), "an engine's socket");
        }
        // Last, so that it is called by its own name.
        if let Some(root) = file_of(Path::new("/")) {
            found.files.insert(root, "the host's root");
        }
        found
    }

    /// Notes a part and the directories above it.
    fn file(&mut self, path: &Path, what: &'static str) {
        if path.exists() {
            self.above(path, what);
        }
    }

    /// Notes what there is of a path: itself, and the directories above it.
    fn above(&mut self, path: &Path, what: &'static str) {
        for part in path.ancestors() {
            if let Some(file) = file_of(part) {
                self.files.entry(file).or_insert(what);
            }
        }
    }

    fn tree(&mut self, path: &Path, what: &'static str) {
        self.file(path, what);
        if let Ok(path) = path.canonicalize() {
            self.trees.push((path, what));
        }
    }

    /// What a mount of `source` brings in, if it is anything of this.
    fn brought_by(&self, source: &Path) -> Option<&'static str> {
        let known = |path: &Path| self.files.get(&file_of(path)?).copied();
        if let Some(what) = known(source) {
            return Some(what);
        }
        // A link of /proc leads to another file than its text does.
        let source = source.canonicalize().ok()?;
        if let Some(what) = known(&source) {
            return Some(what);
        }
        // A process of the host.
        let of_process = source.strip_prefix("/proc").ok().and_then(|rest| rest.iter().next());
        let is_process = |name: &std::ffi::OsStr| name.as_encoded_bytes()[0].is_ascii_digit();
        if of_process.is_some_and(is_process) {
            return Some("the host's /proc");
        }
        // systemd's own hierarchy has no controller: podman mounts it for an init system.
        if source.starts_with("/sys/fs/cgroup/systemd") {
            return None;
        }
        self.trees.iter().find(|(tree, _)| source.starts_with(tree)).map(|(_, what)| *what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn bundle(value: &Value) -> Bundle {
        let text = value.to_string();
        Bundle::from_bytes(text.as_bytes(), PathBuf::new(), "config.json".into()).unwrap()
    }

    fn ways(value: &Value, config: &Config) -> Vec<String> {
        find(&bundle(value), config, None).ways.iter().map(Reach::to_string).collect()
    }

    fn namespaces(all: &Value) -> Value {
        json!({"linux": {"namespaces": all}, "process": {"capabilities": {
            "bounding": ["CAP_KILL", "CAP_CHOWN"], "permitted": ["CAP_SYS_PTRACE"],
        }}})
    }

    /// Capabilities and devices are ways past the enforcement wherever the container runs.
    #[test]
    fn capabilities_and_devices_are_reported_in_any_namespace() {
        let value = json!({
            "process": {"capabilities": {"bounding": ["CAP_BPF", "CAP_KILL"], "effective": ["CAP_SYS_ADMIN"]}},
            "linux": {
                "namespaces": [{"type": "pid"}],
                "resources": {"devices": [{"allow": true, "access": "rwm"}]},
            },
        });
        let expected = ["every device of the host", "CAP_SYS_ADMIN", "CAP_BPF"];
        assert_eq!(ways(&value, &Config::default()), expected);
        assert_eq!(
            ways(&json!({"linux": {"namespaces": [{"type": "pid"}]}}), &Config::default()),
            [""; 0]
        );
    }

    /// The host's pid namespace is identified by the file that it is, not by how the bundle names
    /// it.
    #[test]
    fn host_pid_namespace_is_identified_by_file() {
        let own = std::process::id();
        for (all, is_host) in [
            (json!([]), true),
            (json!([{"type": "mount"}]), true),
            (json!([{"type": "pid"}]), false),
            (json!([{"type": "pid", "path": ""}]), false),
            (json!([{"type": "pid", "path": "/proc/1/ns/pid"}]), true),
            (json!([{"type": "pid", "path": format!("/proc/{own}/ns/pid")}]), true),
            // No pid namespace, so not the host's either.
            (json!([{"type": "pid", "path": "/proc/self/ns/uts"}]), false),
            (json!([{"type": "pid", "path": "/nowhere"}]), true),
        ] {
            let found = find(&bundle(&namespaces(&all)), &Config::default(), None);
            assert_eq!(found.host_pids, is_host, "{all}");
            let expected = match is_host {
                true => vec![
                    "CAP_SYS_PTRACE in the host's pid namespace",
                    "CAP_KILL in the host's pid namespace",
                ],
                false => vec![],
            };
            let shown: Vec<_> = found.ways.iter().map(Reach::to_string).collect();
            assert_eq!(shown, expected, "{all}");
        }
    }

    /// Mounts are judged by what their source is: parents, children and links of a protected
    /// directory count too.
    #[test]
    fn mounts_are_judged_by_source_file_not_name() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path).display().to_string();
        for path in ["run/cgpu/gate/x", "run/cgpu/driver/b", "cdi", "data"] {
            fs::create_dir_all(dir.path().join(path)).unwrap();
        }
        std::os::unix::fs::symlink(dir.path().join("run"), dir.path().join("link")).unwrap();
        let mut config = Config { state_dir: at("run/cgpu").into(), ..Config::default() };
        config.driver.cdi_dirs = vec![at("cdi").into()];
        let brings = |source: &str| {
            let value = json!({"mounts": [
                {"type": "bind", "source": source, "destination": "/x", "options": ["rbind", "ro"]},
            ], "linux": {"namespaces": [{"type": "pid"}]}});
            let found = find(&bundle(&value), &config, None).ways;
            found
                .into_iter()
                .map(|way| match way {
                    Reach::Mount { brings, .. } => brings,
                    other => other.to_string(),
                })
                .next()
        };
        let is = |source: &str, what: &str| {
            assert_eq!(brings(source).as_deref(), Some(what), "{source}")
        };
        is("/", "the host's root");
        is("/..", "the host's root");
        is("/proc/self/root", "the host's root");
        is("/proc", "the host's /proc");
        is(&format!("/proc/{}", std::process::id()), "the host's /proc");
        is("/sys", "the host's cgroups");
        is("/sys/fs/cgroup", "the host's cgroups");
        is(&at("run/cgpu"), "cgpu's state");
        is(&at("run"), "cgpu's state");
        is(&at("link"), "cgpu's state");
        is(&at("link/cgpu/gate"), "cgpu's state");
        is(&at("run/../run/cgpu/gate/x"), "cgpu's state");
        is(&at("cdi"), "CDI specifications");
        for source in [
            at("data"),
            at("run/cgpu/driver/b"),
            at("missing"),
            "/usr".into(),
            "/dev/null".into(),
            String::new(),
        ] {
            assert_eq!(brings(&source), None, "{source}");
        }
        let tmpfs = json!({"mounts": [{"type": "cgroup", "source": "/", "destination": "/sys/fs/cgroup"}],
            "linux": {"namespaces": [{"type": "pid"}]}});
        assert_eq!(ways(&tmpfs, &config), [""; 0]);
    }
}
