//! Engines that aren't root's: whole GPUs by bind mounts, and nothing of root's is touched.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use serde_json::{Value, json};

use super::host::{Engine, Host, uuid};
use crate::support::{Bundle, Outcome, program, run_with_timeout, timeout};

/// Who calls the runtime.
const USER: u32 = 65534;

/// How an engine that isn't root's calls it: as the user, whose bundle has a user namespace, or as root of a user
/// namespace that the engine has made (podman, dockerd-rootless).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Engines {
    Plain,
    InNamespace,
}

/// Which devices the nodes are: the kernel's null and zero can be opened without a driver.
const OPENABLE: (u64, [u64; 3]) = (1, [3, 5, 3]);
const NVIDIAS: (u64, [u64; 3]) = (195, [0, 1, 2]);

/// A host with a driver's nodes and files.
struct Rootless {
    host: Host,
    ours: PathBuf,
}

impl Rootless {
    fn new((major, minors): (u64, [u64; 3])) -> Self {
        let host = Host::new(Engine::Runc);
        open(host.scratch.path());
        let dev = host.scratch.directory("driver/dev");
        let names = ["nvidia0", "nvidia1", "nvidia2"].into_iter().zip(minors);
        for (name, minor) in [("nvidiactl", 255), ("nvidia-uvm", 254)].into_iter().chain(names) {
            let path = dev.join(name);
            mknod(&path, SFlag::S_IFCHR, Mode::S_IRWXU, makedev(major, minor))
                .expect("we are root");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("it is ours");
        }
        // A driver's files, whose contents are never used here.
        let libraries = host.scratch.directory("driver/usr/lib64");
        let library = libraries.join("libcuda.so.535.161.08");
        fs::copy("/proc/self/exe", &library).expect("a file can be copied");
        symlink("libcuda.so.535.161.08", libraries.join("libcuda.so.1")).expect("it is ours");
        let programs = host.scratch.directory("driver/usr/bin");
        host.scratch.copy_program(&program("busybox"), &programs.join("nvidia-smi"));
        let ours = host.path("cgpu-runtime");
        host.scratch.copy_program(host.ours(), &ours);
        open(&ours);
        Rootless { host, ours }
    }

    /// A bundle of the user's, as rootless engines write them.
    fn bundle(&self, id: &str, engine: Engines, env: &[&str], line: &str) -> Bundle {
        let bundle = self.host.bundle(id, env, line);
        let mut config = bundle.config();
        let mounts = config["mounts"].as_array_mut().expect("mounts are a list");
        let is_roots = |kind: &str| ["sysfs", "cgroup", "devpts", "mqueue"].contains(&kind);
        mounts.retain(|mount| !is_roots(mount["type"].as_str().unwrap_or_default()));
        let linux = config["linux"].as_object_mut().expect("it is an object");
        linux.remove("cgroupsPath");
        linux.remove("resources");
        let namespaces = linux["namespaces"].as_array_mut().expect("they are a list");
        namespaces.retain(|one| one["type"] != "network" && one["type"] != "cgroup");
        if engine == Engines::Plain {
            namespaces.push(json!({"type": "user"}));
            let map = json!([{"containerID": 0, "hostID": USER, "size": 1}]);
            linux.insert("uidMappings".into(), map.clone());
            linux.insert("gidMappings".into(), map);
        }
        bundle.write_config(&config);
        let owner = format!("{USER}:{USER}");
        let mut chown = self.host.command(&program("chown"));
        run_with_timeout(chown.args(["-R", &owner]).arg(&bundle.directory), timeout()).ok();
        bundle
    }

    /// Runs `bundle` as the engine would.
    fn run(&self, runtime: &Path, engine: Engines, bundle: &Bundle) -> Outcome {
        let root = self.host.scratch.directory(&format!("root-{engine:?}"));
        chown(&root, Some(USER), Some(USER)).expect("we are root");
        let user = USER.to_string();
        let mut command = self.host.command(&program("setpriv"));
        command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]);
        if engine == Engines::InNamespace {
            command.arg(program("unshare")).args(["--user", "--map-root-user", "--mount"]);
        }
        command.arg(runtime).arg("--root").arg(&root).args(["run", "--bundle"]);
        run_with_timeout(command.arg(&bundle.directory).arg(&bundle.id), timeout())
    }
}

/// Lets everybody in.
fn open(path: &Path) {
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("it is ours");
}

const ENGINES: [Engines; 2] = [Engines::Plain, Engines::InNamespace];

#[test]
fn rootless_container_gets_unlimited_gpus_with_driver_files() {
    let world = Rootless::new(OPENABLE);
    // That zero is readable shows that it is a device, and which.
    let line = "ls /dev | grep nvidia; head -c 4 /dev/nvidia1 | wc -c; \
                head -c 4 /usr/bin/nvidia-smi | tail -c 3; echo; env";
    for engine in ENGINES {
        for (asks, second) in [("NVIDIA_VISIBLE_DEVICES=1", false), ("CGPU_GPUS=device=1", true)] {
            let id = format!("{engine:?}-{second}");
            let bundle = world.bundle(&id, engine, &[asks], line);
            // Its second start finds the bundle as the first has left it.
            for _ in 0..2 {
                let outcome = world.run(&world.ours, engine, &bundle).ok();
                let lines: Vec<&str> = outcome.stdout.lines().collect();
                let given = ["nvidia-uvm", "nvidia1", "nvidiactl", "4", "ELF"];
                assert_eq!(lines[..5], given, "{engine:?} {asks}: {outcome}");
                let visible = format!("NVIDIA_VISIBLE_DEVICES={}", uuid(1));
                assert!(outcome.has_line(&visible), "{outcome}");
                assert_eq!(outcome.stderr, "", "{engine:?} {asks}");
            }
        }
    }
    assert!(!world.host.has_state());
}

#[test]
fn unavailable_rootless_request_is_refused_with_reason() {
    let world = Rootless::new(OPENABLE);
    let refused = |engine, id: &str, env: &[&str]| {
        let bundle = world.bundle(id, engine, env, "true");
        let before = bundle.config();
        let outcome = world.run(&world.ours, engine, &bundle).exits(1);
        assert_eq!(bundle.config(), before, "the bundle is as it was");
        assert!(outcome.stderr.starts_with("cgpu: "), "{outcome}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{outcome}");
        outcome.stderr
    };
    for engine in ENGINES {
        let id = |name: &str| format!("{engine:?}-{name}");
        let quota = refused(engine, &id("quota"), &["CGPU_MEMORY=1GiB"]);
        assert!(quota.contains("run the engine as root, or ask for whole GPUs"), "{quota}");
        let absent = refused(engine, &id("absent"), &["NVIDIA_VISIBLE_DEVICES=7"]);
        assert!(
            absent.contains("NVIDIA_VISIBLE_DEVICES=7") && absent.contains("no GPU 7"),
            "{absent}"
        );
        // Nor does anything change for who asks for nothing.
        let plain = world.bundle(&id("plain"), engine, &[], "echo plain; ls /dev");
        let bare = world.run(world.host.real(), engine, &plain).ok();
        let ours = world.run(&world.ours, engine, &plain).ok();
        assert_eq!((&ours.stdout, &ours.stderr), (&bare.stdout, &bare.stderr));
    }
    // What is registered nowhere can't be kept apart.
    let config = world.host.path("cgpu.toml");
    let text = fs::read_to_string(&config).expect("it is there");
    fs::write(&config, format!("{text}[admission]\nexclusive = true\n")).expect("it is ours");
    let exclusive = refused(Engines::Plain, "exclusive", &["NVIDIA_VISIBLE_DEVICES=1"]);
    assert!(exclusive.contains("exclusive = true; run the engine as root"), "{exclusive}");
    fs::write(&config, text).expect("it is ours");
    fs::remove_file(world.host.path("driver/dev/nvidia1")).expect("it is there");
    let missing = refused(Engines::Plain, "missing", &["NVIDIA_VISIBLE_DEVICES=1"]);
    let words =
        "/driver/dev/nvidia1 is missing, and only root can make it: run `cgpu nodes` as root";
    assert!(missing.contains(words), "{missing}");
    assert!(!world.host.has_state());
}

/// A CDI specification gives what it says by mounts as well.
#[test]
fn rootless_container_gets_what_cdi_specification_lists() {
    let world = Rootless::new(NVIDIAS);
    let cdi = world.host.scratch.directory("cdi");
    let file = world.host.scratch.file("listed", "listed");
    let node = |path: PathBuf| path.display().to_string();
    let specification = json!({
        "cdiVersion": "0.5.0", "kind": "nvidia.com/gpu",
        "devices": [{"name": uuid(1), "containerEdits": {"deviceNodes": [
            {"path": "/dev/nvidia1", "hostPath": node(world.host.path("driver/dev/nvidia1"))},
        ]}}],
        "containerEdits": {"mounts": [{
            "hostPath": node(file), "containerPath": "/listed", "options": ["ro", "bind"],
        }]},
    });
    fs::write(cdi.join("nvidia.json"), specification.to_string()).expect("it is ours");
    let config = world.host.path("cgpu.toml");
    let text = fs::read_to_string(&config).expect("it is there");
    let dirs = format!("{text}inject = \"cdi\"\nwhole = \"cdi\"\ncdi_dirs = [{:?}]\n", node(cdi));
    fs::write(&config, dirs).expect("it is ours");
    for engine in ENGINES {
        let line = "cat /listed; ls /dev | grep nvidia; stat -c %t:%T /dev/nvidia1";
        let id = format!("{engine:?}");
        let bundle = world.bundle(&id, engine, &["NVIDIA_VISIBLE_DEVICES=1"], line);
        let outcome = world.run(&world.ours, engine, &bundle).ok();
        assert_eq!(outcome.text(), "listednvidia-uvm\nnvidia1\nnvidiactl\nc3:1", "{outcome}");
        let devices = bundle.config()["linux"].get("devices").cloned();
        assert!(devices.is_none_or(|devices| devices == Value::Null), "none is declared");
    }
}
