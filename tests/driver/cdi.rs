//! CDI: what `cgpu cdi` writes of made-up hosts, how it lists what is there, and whether an
//! engine that reads specifications takes ours.

#![allow(clippy::unwrap_used, reason = "in helpers too: clippy.toml allows it in tests alone")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::host::{Host, names};
use crate::support::{IMAGE, Outcome, Podman, program, run_with_timeout, timeout};
use cgpu_core::gpu::Inventory;
use cgpu_inject::Nodes;
use cgpu_inject::bundle::DeviceNode;
use cgpu_inject::cdi::generator::generate;
use cgpu_inject::cdi::{HostFacts, Specifications, Wanted, yaml};
use cgpu_inject::driver::{Capability, Driver, DriverFile, Use, Width};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use serde_json::{Value, json};

const GPU_0: &str = "GPU-c09d11f5-a565-1f83-903c-a65a7ba138af";
const GPU_1: &str = "GPU-959873c5-b57b-5d24-f3aa-e700c5d431cb";

/// The nodes of a host whose GPUs' minor numbers run against their indices.
const NODES: [(&str, u64, u64); 4] =
    [("nvidiactl", 195, 255), ("nvidia-uvm", 510, 0), ("nvidia0", 195, 0), ("nvidia1", 195, 1)];

fn gpus() -> Value {
    json!([
        {"index": 0, "uuid": GPU_0, "minor": 1, "memory_mib": 16130},
        {"index": 1, "uuid": GPU_1, "minor": 0, "memory_mib": 15109},
    ])
}

/// A host with two GPUs and their nodes, and with its own procfs.
fn host() -> Host {
    let mut host = Host::with_gpus(&gpus());
    for (name, major, minor) in NODES {
        node(&dev(&host).join(name), major, minor);
    }
    let proc = host.scratch.directory("proc").display().to_string();
    host.set("driver.proc_root", proc);
    library(&host);
    host
}

/// A driver as far as a specification names its files: any program for this machine is a library.
fn library(host: &Host) {
    let libraries = host.scratch.directory("driver/usr/lib64");
    fs::copy(crate::support::program("busybox"), libraries.join("libcuda.so.535.247.01")).unwrap();
}

fn dev(host: &Host) -> PathBuf {
    host.scratch.path().join("driver/dev")
}

fn node(path: &Path, major: u64, minor: u64) {
    let _ = fs::remove_file(path);
    let mode = Mode::from_bits_truncate(0o666);
    mknod(path, SFlag::S_IFCHR, mode, makedev(major, minor)).unwrap();
}

/// The directory of specifications of `host`, and a file in it.
fn specification(host: &Host) -> (String, String) {
    let directory = host.scratch.path().join("etc/cdi");
    (directory.display().to_string(), directory.join("nvidia.yaml").display().to_string())
}

fn listed(host: &Host, directory: &str) -> Value {
    host.cgpu(&["cdi", "list", "--spec-dir", directory, "--format", "json"]).ok().json()
}

/// A host is described the same each time, and the file is replaced completely.
#[test]
fn cdi_generate_is_deterministic_and_replaces_the_file() {
    let host = host();
    let (directory, file) = specification(&host);
    let printed = host.cgpu(&["cdi", "generate"]).ok();
    assert_eq!(printed.stderr, "");
    let written = host.cgpu(&["cdi", "generate", "--output", &file]).ok();
    assert_eq!((written.stdout.as_str(), written.stderr.as_str()), ("", ""));
    host.cgpu(&["cdi", "generate", "-o", &file]).ok();
    assert_eq!(fs::read_to_string(&file).unwrap(), printed.stdout);
    assert_eq!(names(Path::new(&directory)), ["nvidia.yaml".to_owned()].into());
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o644);
    let dev = dev(&host);
    let begin = format!(
        "---\ncdiVersion: \"0.5.0\"\nkind: nvidia.com/gpu\ndevices:\n  - name: \"0\"\n    \
         containerEdits:\n      deviceNodes:\n        - path: /dev/nvidia1\n          \
         hostPath: {}\n  - name: \"1\"\n",
        dev.join("nvidia1").display()
    );
    assert!(printed.stdout.starts_with(&begin), "{}", printed.stdout);

    let json = host.cgpu(&["cdi", "generate", "--format", "json"]).ok().json();
    let devices = json["devices"].as_array().unwrap();
    let names: Vec<_> = devices.iter().map(|device| device["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["0", "1", GPU_0, GPU_1, "all"]);
    let file = file.replace(".yaml", ".json");
    host.cgpu(&["cdi", "generate", "--output", &file, "--capabilities", "utility,compute"]).ok();
    assert_eq!(serde_json::from_slice::<Value>(&fs::read(&file).unwrap()).unwrap(), json);
}

/// If a host or an option can't be described, `cgpu cdi generate` fails and reports why.
#[test]
fn cdi_generate_reports_undescribable_hosts_and_options() {
    let host = host();
    for (words, expected) in [
        (
            &["--output", "/x/nvidia.yml"][..],
            "cgpu: /x/nvidia.yml: engines read files that end in .yaml or .json only; name it so\n",
        ),
        (
            &["--capabilities", "compute,sound"],
            "cgpu: --capabilities \"sound\": it must be all, or of compute, compat32, graphics, \
             utility, video, display, ngx\n",
        ),
    ] {
        let outcome = host.cgpu(&[&["cdi", "generate"], words].concat()).exits(1);
        assert_eq!((outcome.stdout.as_str(), outcome.stderr.as_str()), ("", expected));
    }
    fs::remove_file(dev(&host).join("nvidia-uvm")).unwrap();
    let outcome = host.cgpu(&["cdi", "generate"]).exits(1);
    let sentence = "/dev/nvidia-uvm is missing: the kernel module nvidia-uvm isn't loaded; load it";
    assert!(outcome.stderr.contains(sentence), "{outcome}");
    // A driver that is served as files is nothing for engines.
    fs::write(dev(&host).join("nvidia-uvm"), "").unwrap();
    let outcome = host.cgpu(&["cdi", "generate"]).exits(1);
    assert!(outcome.stderr.contains("is no character device, so no engine could"), "{outcome}");
}

#[test]
fn cdi_generate_omits_and_names_a_lost_gpu() {
    let host = Host::with_gpus(&json!([
        {"index": 0, "uuid": GPU_0, "memory_mib": 16130},
        {"index": 1, "uuid": GPU_1, "memory_mib": 0, "state": "lost"},
    ]));
    for (name, major, minor) in NODES {
        node(&dev(&host).join(name), major, minor);
    }
    let outcome = host.cgpu(&["cdi", "generate"]).ok();
    assert!(outcome.stderr.contains("left out: no driver libraries below /"), "{outcome}");
    library(&host);
    let outcome = host.cgpu(&["cdi", "generate"]).ok();
    assert_eq!(outcome.stderr, format!("cgpu: left out: GPU 1 ({GPU_1}) is lost\n"));
    assert!(!outcome.stdout.contains("nvidia1"), "{outcome}");
}

#[test]
fn devices_are_listed_with_what_they_are_worth() {
    let host = host();
    let (directory, file) = specification(&host);
    host.cgpu(&["cdi", "generate", "--output", &file]).ok();
    let all = listed(&host, &directory);
    let devices = all["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 5);
    assert!(devices.iter().all(|device| device["state"] == "ok"), "{all}");
    assert_eq!(devices[2]["name"], format!("nvidia.com/gpu={GPU_0}"));

    // What doesn't fit, and what can't be read.
    fs::remove_file(dev(&host).join("nvidia0")).unwrap();
    let broken = Path::new(&directory).join("z.json");
    fs::write(&broken, "{\"kind\": 7}").unwrap();
    let all = listed(&host, &directory);
    let states: Vec<_> = all["devices"].as_array().unwrap().iter().map(|it| &it["state"]).collect();
    assert_eq!(states, ["ok", "stale", "ok", "stale", "stale"]);
    let why = all["devices"][1]["why"].as_str().unwrap();
    let nowhere = dev(&host).join("nvidia0").display().to_string();
    assert!(why.starts_with(&format!("{file} names {nowhere}, and there is no such")), "{why}");
    assert!(why.ends_with(&format!("`nvidia-ctk cdi generate --output={file}`")), "{why}");
    assert_eq!(all["unusable"][0]["file"], broken.display().to_string());

    let text = host.cgpu(&["cdi", "list", "--spec-dir", &directory]).ok();
    let mut lines = text.stdout.lines();
    assert!(lines.next().is_some_and(|line| line.starts_with("DEVICE ")), "{text}");
    let stale = lines.clone().filter(|line| line.contains("  stale  ")).count();
    assert_eq!(stale, 3, "{text}");
    let last = lines.next_back().unwrap_or_default();
    assert!(last.starts_with(&format!("{} can't be used: ", broken.display())), "{text}");
    // Of another directory, with precedence.
    let later = host.scratch.directory("run/cdi").display().to_string();
    fs::copy(&file, Path::new(&later).join("nvidia.yaml")).unwrap();
    let words = ["cdi", "list", "--spec-dir", &directory, "--spec-dir", &later];
    let text = host.cgpu(&words).ok().stdout;
    assert_eq!(text.matches("overridden").count(), 5, "{text}");
    assert!(names(&host.state_dir()).is_empty(), "who looks leaves nothing behind");
}

/// Runs podman with a directory of specifications of its own: podman 4.3 reads /etc/cdi and
/// nothing else, so it gets an /etc whose changes go elsewhere.
fn with_specifications(podman: &Podman, file: &Path, run: &[&str]) -> Outcome {
    let scratch = podman.scratch();
    scratch.directory("etc-work");
    let cdi = scratch.directory("etc-upper/cdi");
    fs::copy(file, cdi.join("nvidia.yaml")).unwrap();
    let layers = "lowerdir=/etc,upperdir=etc-upper,workdir=etc-work";
    let script = format!("mount -t overlay -o {layers} overlay /etc && exec \"$@\"");
    let inner: Command = podman.command();
    let mut command = scratch.command(program("unshare"));
    command.args(["--mount", "--propagation", "private", "sh", "-c", &script, "sh"]);
    command.arg(inner.get_program()).args(inner.get_args());
    for (name, value) in inner.get_envs() {
        if let Some(value) = value {
            command.env(name, value);
        }
    }
    command.args(["run", "--network", "none", "--pull", "never", "--rm"]);
    command.args(["--cgroup-parent", &scratch.cgroup()]);
    command.args(["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]);
    run_with_timeout(command.args(run), timeout())
}

/// Prints what a container has of a GPU, sorted: nodes, a library by its name, mounts, a variable.
const INSPECT: &str = "{ stat -c '%n %t:%T' /dev/nvidia*; cat /usr/lib64/libcuda.so.1; echo; \
                    grep -o ' /usr/lib[^ ]*/libcuda[^ ]* [a-z,]*' /proc/self/mountinfo; \
                    env | grep NVIDIA; } | sort";

/// The specification of `host` with a library, as text.
fn with_a_library(host: &Host) -> String {
    let library = host.scratch.file("driver/libcuda.so.535.247.01", "a library");
    let names = ["libcuda.so.1", "libcuda.so"].map(String::from).to_vec();
    let driver = Driver {
        version: "535.247.01".to_owned(),
        files: vec![DriverFile {
            source: library.display().to_string(),
            path: "/usr/lib/nvidia/libcuda.so.535.247.01".to_owned(),
            used_as: Use::Library { names, width: Width::Native },
            capabilities: vec![Capability::Compute],
        }],
    };
    let inventory = Inventory::new(serde_json::from_value(gpus()).unwrap()).unwrap();
    let device = |(name, major, minor): (&str, u64, u64)| {
        let number = |part: u64| i64::try_from(part).unwrap();
        DeviceNode::new(format!("/dev/{name}"), number(major), number(minor))
    };
    let nodes = Nodes { devices: NODES.map(device).to_vec(), ..Nodes::default() };
    let root = host.scratch.path().join("driver");
    let made = generate(&inventory, &nodes, &root.join("dev"), &driver, Capability::ALL).unwrap();
    yaml::document(&made.spec).unwrap()
}

/// What [`INSPECT`] printed, but for how times of access are kept: a mount has that of the file system
/// it is from, and systemd mounts `/tmp` by `strictatime`.
#[track_caller]
fn shown(container: Outcome) -> String {
    container.ok().stdout.replace(",relatime", "").replace(",noatime", "")
}

/// What [`INSPECT`] prints with these nodes and these variables.
fn seen(nodes: &[&str], variables: &[&str]) -> String {
    let mount = |path| format!(" /usr/{path} ro,nosuid,nodev");
    let mounts = [
        "lib/x86_64-linux-gnu/libcuda.so",
        "lib/x86_64-linux-gnu/libcuda.so.1",
        "lib64/libcuda.so",
        "lib64/libcuda.so.1",
    ]
    .map(mount);
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let mut lines =
        [mounts.to_vec(), words(nodes), words(variables), vec!["a library".into()]].concat();
    lines.extend(["/dev/nvidia-uvm 1fe:0".to_owned(), "/dev/nvidiactl c3:ff".to_owned()]);
    lines.sort_unstable();
    lines.join("\n") + "\n"
}

#[test]
fn podman_takes_what_we_write() {
    let host = host();
    let file = host.scratch.file("made.yaml", with_a_library(&host));
    let podman = Podman::builder().start();
    let run = |device: &str| {
        with_specifications(&podman, &file, &["--device", device, IMAGE, "sh", "-c", INSPECT])
    };
    for (device, nodes) in [
        ("nvidia.com/gpu=0".to_owned(), &["/dev/nvidia1 c3:1"][..]),
        (format!("nvidia.com/gpu={GPU_1}"), &["/dev/nvidia0 c3:0"]),
        ("nvidia.com/gpu=all".to_owned(), &["/dev/nvidia0 c3:0", "/dev/nvidia1 c3:1"]),
    ] {
        let expected = seen(nodes, &["NVIDIA_VISIBLE_DEVICES=void"]);
        assert_eq!(shown(run(&device)), expected, "{device}");
    }
    let unknown = run("nvidia.com/gpu=7").fails();
    assert!(unknown.stderr.contains("nvidia.com/gpu=7"), "{unknown}");
}

/// A container made by our CDI edits has what podman's container has.
#[test]
fn our_cdi_edits_match_the_podman_result() {
    let host = host();
    let (directory, file) = specification(&host);
    fs::create_dir_all(&directory).unwrap();
    fs::write(file, with_a_library(&host)).unwrap();
    let cache = host.scratch.path().join("state/cdi.json");
    let facts = HostFacts::read(&host.scratch.path().join("proc"));
    let wanted = [Wanted { index: 0, uuid: GPU_0.to_owned(), minor: 1, mig: None }];
    for at in ["a", "b"] {
        let specifications = Specifications::load(&[directory.clone().into()], Some(&cache));
        let found = specifications.edits_for(&wanted, &facts).unwrap().unwrap();
        assert_eq!(found.devices, [format!("nvidia.com/gpu={GPU_0}")]);
        let bundle =
            host.bundle(at, |config| config["process"]["args"] = json!(["sh", "-c", INSPECT]));
        let mut edited =
            cgpu_inject::bundle::Bundle::load(&bundle.directory, Path::new("config.json")).unwrap();
        assert!(edited.apply(&found.edits).unwrap());
        edited.save().unwrap();
        let runtimes = [host.scratch.runc(), host.scratch.crun()];
        for runtime in &runtimes {
            assert_eq!(shown(runtime.run(&bundle)), seen(&["/dev/nvidia1 c3:1"], &[]));
        }
    }
    assert_eq!(fs::metadata(cache).unwrap().permissions().mode() & 0o777, 0o600);
}
