//! How a create learns of the GPUs when no cache tells it: `cgpu-runtime` runs the real
//! `cgpu gpus --refresh`, which loads a stand-in for NVML. And that nothing else of ours
//! could. Needs root, runc and a C compiler.

#![allow(clippy::unwrap_used, reason = "clippy.toml allows it in tests, not in their helpers")]

mod host;
#[path = "standin/nvml.rs"]
mod nvml_standin;
mod support;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use host::Host;
use serde_json::json;
use support::{Bundle, eventually};

const V100: &str = "gpu GPU-v100 0 00000000:00:07.0 16914055168 ok - Tesla V100-SXM2-16GB\n";

/// A host whose GPU the driver knows, and no file.
struct Driven {
    host: Host,
    libraries: PathBuf,
}

impl Driven {
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
        fs::copy(nvml_standin::compiled(), libraries.join(nvml_standin::LIBRARY)).unwrap();
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

    fn asking(&self, id: &str) -> Bundle {
        self.host.asking(id, 4000)
    }
}

#[test]
fn a_create_without_a_cache_asks_the_driver_once() {
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

#[test]
fn a_driver_that_hangs_is_given_up_in_time_and_nothing_stays() {
    let mut driven = Driven::new();
    driven.host.set("inventory.refresh_timeout_s", 1);
    driven.says("init_ms 600000\n");
    let (host, bundle) = (&driven.host, driven.asking("late"));
    let old = fs::read(bundle.directory.join("config.json")).unwrap();
    let created = host.runtime().create(&bundle);
    assert!(created.took < Duration::from_secs(120), "{created}");
    let sentence = "cgpu gpus --refresh did not list the GPUs within 1s and was killed; run `cgpu \
                    gpus --refresh` by hand to see";
    host.was_told(created, &bundle, &[sentence]);
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
    driven.host.was_told(created, &bundle, &parts);
}

#[test]
fn looking_asks_the_driver_and_keeps_nothing() {
    let driven = Driven::new();
    driven.asking("seen");
    let seen = driven.host.cgpu(&["inspect", "--bundle", "seen", "--format", "json"]).ok().json();
    assert_eq!(seen["plan"]["gpus"][0]["uuid"], "GPU-v100");
    assert!(!driven.host.state_dir().exists());
}

#[test]
fn who_asks_for_nothing_never_waits_for_the_driver() {
    let driven = Driven::new();
    driven.says("init_ms 600000\n");
    let runtime = driven.host.runtime();
    let plain = driven.host.bundle("plain", |_| {});
    runtime.create(&plain).ok();
    runtime.delete(&plain).ok();
    assert!(!driven.host.state_dir().exists());
}

#[test]
fn runtime_and_hook_can_not_load_nvml() {
    let count = |program: &str, word: &[u8]| {
        let bytes = fs::read(program).unwrap();
        bytes.windows(word.len()).filter(|window| *window == word).count()
    };
    // The library's name alone is no sign: its file is mounted in containers.
    for word in [&b"nvmlInit"[..], b"\0dlopen\0"] {
        for program in [env!("CARGO_BIN_EXE_cgpu-runtime"), env!("CARGO_BIN_EXE_cgpu-hook")] {
            assert_eq!(count(program, word), 0, "{program}: {}", String::from_utf8_lossy(word));
        }
        assert_ne!(count(env!("CARGO_BIN_EXE_cgpu"), word), 0, "then this test proves nothing");
    }
}
