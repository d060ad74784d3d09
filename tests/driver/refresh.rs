//! How a container creation learns of the GPUs if no cache lists them: `cgpu-runtime` runs the real
//! `cgpu gpus --refresh`, which loads a stand-in for NVML. And that nothing else of ours
//! could. What a container creation does about device nodes that no program has made since the boot.
//! Needs root, runc, docker and a C compiler.

#![allow(clippy::unwrap_used, reason = "clippy.toml allows it in tests, not in their helpers")]

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

use crate::host::Host;
use crate::support::{Bundle, Docker, IMAGE, eventually};
use serde_json::json;

const V100: &str = "gpu GPU-v100 0 00000000:00:07.0 16914055168 ok - Tesla V100-SXM2-16GB\n";

/// Prints nodes of NVIDIA's with their numbers in hexadecimal.
const INSPECT: &str = "stat -c '%n %t:%T' /dev/nvidia*";

const LOADED: &str = "195 nvidia\n511 nvidia-uvm";

const MADE: &str = "/dev/nvidia-uvm 1ff:0\n/dev/nvidia-uvm-tools 1ff:1\n/dev/nvidia0 c3:0\n\
                    /dev/nvidiactl c3:ff\n";

/// A host whose GPU the driver knows, and no file.
struct Driven {
    host: Host,
    libraries: PathBuf,
}

impl Driven {
    /// Has the kernel name a program that loads nvidia-uvm; the file lists what it was called with.
    fn modprobe(&self) -> PathBuf {
        let at = |name: &str| self.host.scratch.path().join(name).display().to_string();
        let (devices, probed) = (at("proc/devices"), at("modprobe.log"));
        let script = format!(
            "#!/bin/sh\necho \"$@\" >> {probed}\n\
             printf 'Character devices:\\n195 nvidia\\n511 %s\\n' \"$1\" > {devices}\n"
        );
        let program = self.host.scratch.script("modprobe", &script).display().to_string();
        self.host.scratch.directory("proc/sys/kernel");
        self.host.scratch.file("proc/sys/kernel/modprobe", program + "\n");
        probed.into()
    }

    fn new() -> Self {
        let mut host = Host::new();
        host.scratch.directory("proc/sys/kernel/random");
        host.scratch.directory("proc/driver/nvidia/gpus/0000:00:07.0");
        for (file, text) in [
            ("sys/kernel/random/boot_id", "5d1f0a5e-0000-4000-8000-000000000001\n"),
            (
                "driver/nvidia/version",
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19\n",
            ),
            (
                "driver/nvidia/gpus/0000:00:07.0/information",
                "GPU UUID: \t GPU-v100\nBus Location: \t 0000:00:07.0\nDevice Minor: \t 0\n",
            ),
        ] {
            host.scratch.file(&format!("proc/{file}"), text);
        }
        let libraries = format!("driver/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
        let libraries = host.scratch.directory(&libraries);
        fs::copy(crate::nvml_standin::compiled(), libraries.join(crate::nvml_standin::LIBRARY))
            .unwrap();
        let proc_root = host.scratch.path().join("proc").display().to_string();
        host.set("driver.proc_root", proc_root);
        host.set("inventory.source", "auto");
        let driven = Driven { host, libraries };
        driven.says(V100);
        driven
    }

    /// What NVML says from now on.
    fn says(&self, text: &str) {
        fs::write(self.libraries.join("nvml.txt"), text).unwrap();
    }

    /// As after a boot: no program of NVIDIA's ran yet. `modules` are those that are loaded.
    fn boots(&self, modules: &str) {
        for node in crate::host::names(&self.dev()) {
            fs::remove_file(self.dev().join(node)).unwrap();
        }
        let devices =
            format!("Character devices:\n  1 mem\n{modules}\n\nBlock devices:\n  7 loop\n");
        self.host.scratch.file("proc/devices", devices);
    }

    fn dev(&self) -> PathBuf {
        self.host.scratch.path().join("driver/dev")
    }

    /// A bundle that shows its nodes.
    fn looking(&self, id: &str) -> Bundle {
        self.host.bundle(id, |config| {
            crate::host::ask(config, 1000);
            config["process"]["args"] = json!(["sh", "-c", INSPECT]);
        })
    }

    fn asking(&self, id: &str) -> Bundle {
        self.host.asking(id, 4000)
    }
}

#[test]
fn creation_without_cache_queries_the_driver_once() {
    let driven = Driven::new();
    let host = &driven.host;
    let (first, second) = (driven.asking("first"), driven.asking("second"));
    host.runtime().create(&first).ok();
    let gpu = host.ps()[0]["gpus"][0].clone();
    assert_eq!((&gpu["uuid"], &gpu["minor"]), (&json!("GPU-v100"), &json!(0)));
    assert_eq!(gpu["memory_total_bytes"], 16130u64 << 20);
    // From now on the cache does: NVML could not answer any more.
    driven.says("init_error 999\n");
    host.runtime().create(&second).ok();
    assert_eq!(host.registered().len(), 2);
    host.check_registry();
}

/// If the driver hangs, container creation gives up in time and leaves nothing.
#[test]
fn hanging_driver_fails_creation_in_time_leaving_nothing() {
    let mut driven = Driven::new();
    driven.host.set("inventory.refresh_timeout_s", 1);
    driven.says("init_ms 600000\n");
    let (host, bundle) = (&driven.host, driven.asking("late"));
    let old = fs::read(bundle.directory.join("config.json")).unwrap();
    let created = host.runtime().create(&bundle);
    assert!(created.took < Duration::from_secs(120), "{created}");
    let sentence = "cgpu gpus --refresh did not list the GPUs within 1s and was killed; run `cgpu \
                    gpus --refresh` manually to see";
    host.was_reported(created, &bundle, &[sentence]);
    assert_eq!(fs::read(bundle.directory.join("config.json")).unwrap(), old);
    assert!(eventually(|| host.scratch.traces().processes.is_empty()), "{}", host.scratch.traces());
    assert!(host.records().is_empty() && !host.state_dir().join("driver").exists());
}

#[test]
fn a_driver_that_fails_is_quoted() {
    let driven = Driven::new();
    driven.says("init_error 9\n");
    let bundle = driven.asking("failing");
    let created = driven.host.runtime().create(&bundle);
    let parts = ["gpus --refresh failed (exit status: 1), saying \"cgpu: ", "NVIDIA driver is not"];
    driven.host.was_reported(created, &bundle, &parts);
}

#[test]
fn looking_asks_the_driver_and_keeps_nothing() {
    let driven = Driven::new();
    driven.asking("seen");
    let seen = driven.host.cgpu(&["inspect", "--bundle", "seen", "--format", "json"]).ok().json();
    assert_eq!(seen["plan"]["gpus"][0]["uuid"], "GPU-v100");
    assert!(!driven.host.state_dir().exists());
}

/// A container that asks for nothing never waits for the driver.
#[test]
fn plain_container_never_waits_for_the_driver() {
    let driven = Driven::new();
    driven.says("init_ms 600000\n");
    let runtime = driven.host.runtime();
    let plain = driven.host.bundle("plain", |_| {});
    runtime.create(&plain).ok();
    runtime.delete(&plain).ok();
    assert!(!driven.host.state_dir().exists());
}

/// Container creation makes the device nodes that a boot left out.
#[test]
fn creation_makes_nodes_missing_since_boot() {
    let driven = Driven::new();
    driven.boots(LOADED);
    let bundle = driven.looking("first");
    let directory = bundle.directory.display().to_string();
    driven.host.cgpu(&["inspect", "--bundle", &directory]).ok();
    assert_eq!(crate::host::names(&driven.dev()), [].into(), "inspect changes nothing");
    assert_eq!(driven.host.runtime().run(&bundle).ok().stdout, MADE);
    let made = ["nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidiactl"].map(str::to_owned);
    assert_eq!(crate::host::names(&driven.dev()), made.into());

    driven.boots(LOADED);
    driven
        .host
        .scratch
        .file("proc/driver/nvidia/params", "DeviceFileMode: 432\nDeviceFileGID: 44\n");
    driven.host.runtime().run(&driven.looking("second")).ok();
    let meta = fs::symlink_metadata(driven.dev().join("nvidia-uvm")).unwrap();
    assert_eq!((meta.mode() & 0o777, meta.gid()), (0o660, 44));
}

#[test]
fn concurrent_creations_share_the_nodes_they_make() {
    let driven = Driven::new();
    driven.boots(LOADED);
    let bundles: Vec<_> = (0..8).map(|at| driven.looking(&format!("at-once-{at}"))).collect();
    std::thread::scope(|scope| {
        let runs: Vec<_> = bundles
            .iter()
            .map(|bundle| scope.spawn(|| driven.host.runtime().run(bundle).ok().stdout))
            .collect();
        for run in runs {
            assert_eq!(run.join().unwrap(), MADE);
        }
    });
    assert_eq!(crate::host::names(&driven.dev()).len(), 4);
}

#[test]
fn creation_neither_loads_modules_nor_makes_forbidden_nodes() {
    let driven = Driven::new();
    let bundle = driven.looking("refused");
    let refused = |parts: &[&str]| {
        let _ = fs::remove_file(bundle.directory.join("log.json"));
        driven.host.was_reported(driven.host.runtime().create(&bundle), &bundle, parts);
        assert!(driven.host.records().is_empty());
    };
    let probed = driven.modprobe();
    driven.boots("195 nvidia");
    refused(&[
        "nvidia-uvm is missing: the kernel module nvidia-uvm isn't loaded; load it and make the \
         node with `cgpu nodes`, and at every boot with `systemctl enable cgpu-nodes`",
    ]);
    assert!(!probed.exists(), "modprobe was run");
    driven.boots(LOADED);
    driven.host.scratch.file("proc/driver/nvidia/params", "ModifyDeviceFiles: 0\n");
    refused(&["NVreg_ModifyDeviceFiles=0 leaves nodes to the administrator", "c 195 255`"]);
    assert_eq!(crate::host::names(&driven.dev()), [].into());
}

/// The unit's command, `cgpu nodes`, loads nvidia-uvm and makes all nodes.
#[test]
fn unit_command_loads_nvidia_uvm_and_makes_nodes() {
    let mut driven = Driven::new();
    let probed = driven.modprobe();
    driven.boots("195 nvidia");
    driven.host.set("driver.root", "/");
    let dev_root = driven.host.scratch.path().join("driver").display().to_string();
    driven.host.set("driver.dev_root", dev_root);
    let shown = driven.host.cgpu(&["nodes"]).ok().stdout;
    assert_eq!(shown.lines().count(), 4, "{shown}");
    assert!(shown.contains("driver/dev/nvidia-uvm made: c 511:0\n"), "{shown}");
    assert_eq!(fs::read_to_string(&probed).unwrap(), "nvidia-uvm\n");
    let nodes = crate::host::names(&driven.dev());
    assert_eq!(nodes.len(), 4, "{nodes:?}");
    assert_eq!(driven.host.cgpu(&["nodes"]).ok().stdout, "", "all are there");
    // A host without a driver has nothing to be made, and is no failure of its boot.
    driven.boots("");
    let shown = driven.host.cgpu(&["nodes"]).ok().stdout;
    assert!(shown.starts_with("no node to make: NVIDIA's driver isn't loaded"), "{shown}");
    assert_eq!(crate::host::names(&driven.dev()), [].into());
}

#[test]
fn docker_starts_a_container_again_after_a_boot() {
    let driven = Driven::new();
    driven.boots(LOADED);
    let config = format!("--cgpu-config={}", driven.host.config().display());
    let docker =
        Docker::builder().runtime(env!("CARGO_BIN_EXE_cgpu-runtime")).runtime_arg(config).start();
    let program = format!("{INSPECT}; exec sleep 1000");
    let words = ["-d", "--name", "one", "--restart", "always", "--runtime=cgpu"];
    let asks = ["-e", "CGPU_MEMORY=1GiB", "-e", "CGPU_GPUS=1", IMAGE, "sh", "-c", &program];
    docker.run(&[&words[..], &asks].concat()).ok();
    eventually(|| docker.logs("one").ok().stdout == MADE);
    docker.call(&["stop", "-t", "0", "one"]).ok();
    driven.boots(LOADED);
    docker.call(&["start", "one"]).ok();
    eventually(|| docker.logs("one").ok().stdout == [MADE, MADE].concat());
    assert_eq!(crate::host::names(&driven.dev()).len(), 4);
    docker.remove("one").ok();
}
