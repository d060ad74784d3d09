//! The driver's files in containers of `cgpu-runtime`: a real driver, real userlands, real
//! runtimes. What the same do without us is in `tests/driver/driver_files.rs`.
//!
//! No GPU and no kernel driver is needed: GPUs are an inventory file's, and their nodes have
//! NVIDIA's usual numbers, which no driver answers here.

#![allow(clippy::unwrap_used, reason = "clippy.toml allows it in tests, not in their helpers")]

mod engines;
mod found;
mod hostile;
mod modes;
mod obstacles;
mod updates;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::{Value, json};

use crate::host::{Host, ask};
use crate::support::driver::{self, Layout};
use crate::support::userland::{Rootfs, Search, Userland};
use crate::support::{Bundle, Outcome};

/// `CUDA_ERROR_NO_DEVICE` of cuda.h: what `cuInit` returns without a kernel driver.
const NO_DEVICE: &str = "100";

/// What nvidia-smi exits with without one: `NVML_ERROR_DRIVER_NOT_LOADED` of nvml.h.
const DRIVER_NOT_LOADED: i32 = 9;

/// The probe's, where the library was not found or not loaded.
const NOT_LOADED: i32 = 3;

const UUID_0: &str = "GPU-c09d11f5-0000-4000-8000-000000000000";
const UUID_1: &str = "GPU-c09d11f5-0000-4000-8000-000000000001";

/// A host with two GPUs and the driver of a distribution.
struct DriverHost {
    host: Host,
    root: PathBuf,
}

impl DriverHost {
    fn new() -> Self {
        Self::with(&Layout::Debian.root())
    }

    fn with(root: &Path) -> Self {
        let gpu = |index: u32, uuid| {
            json!({"index": index, "uuid": uuid, "minor": index, "memory_mib": 16000,
                   "bus_id": format!("0000:0{index}:00.0"), "name": "Tesla V100"})
        };
        let mut host = Host::with_gpus(&json!([gpu(0, UUID_0), gpu(1, UUID_1)]));
        host.set("driver.root", root.display().to_string());
        let proc_root = host.scratch.directory("proc").display().to_string();
        host.set("driver.proc_root", proc_root);
        host.set("driver.inject", "native");
        let host = DriverHost { host, root: root.to_owned() };
        host.load_module(&driver::version());
        host
    }

    /// Has the kernel say that a module of that version is loaded, with both GPUs.
    fn load_module(&self, version: &str) {
        for gpu in 0..2 {
            self.host.scratch.directory(&format!("proc/driver/nvidia/gpus/0000:0{gpu}:00.0"));
        }
        let banner = format!("NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Thu\n");
        self.host.scratch.file("proc/driver/nvidia/version", banner);
    }

    fn image(&self, userland: Userland, search: Search) -> Rootfs {
        userland.rootfs(&self.host.scratch, &format!("image-{}", next()), search)
    }

    /// A container of that image that asks for a part of GPU 0.
    fn bundle(&self, image: &Rootfs, args: &[&str]) -> Bundle {
        self.bundle_with(image, args, |_| {})
    }

    fn bundle_with(&self, image: &Rootfs, args: &[&str], edit: impl FnOnce(&mut Value)) -> Bundle {
        self.host.bundle(&format!("container-{}", next()), |config| {
            image.use_in(config);
            ask(config, 100);
            config["process"]["args"] = json!(args);
            edit(config);
        })
    }

    /// A container with an unlimited GPU.
    fn whole(&self, image: &Rootfs, args: &[&str], edit: impl FnOnce(&mut Value)) -> Bundle {
        self.host.bundle(&format!("container-{}", next()), |config| {
            image.use_in(config);
            set_env(config, "NVIDIA_VISIBLE_DEVICES", "0");
            config["process"]["args"] = json!(args);
            edit(config);
        })
    }

    fn run(&self, image: &Rootfs, args: &[&str]) -> Outcome {
        self.host.runtime().run(&self.bundle(image, args))
    }

    /// Runs a container by a program that starts `cgpu-runtime` in circumstances of its own.
    #[track_caller]
    fn run_by(&self, words: &[&str], bundle: &Bundle) -> Outcome {
        self.host.runtime().run_by(words, bundle)
    }

    /// A container that runs until it is deleted.
    #[track_caller]
    fn sleeping(&self, image: &Rootfs) -> Bundle {
        let bundle = self.bundle(image, &["sleep", "1000"]);
        let runtime = self.host.runtime();
        runtime.create(&bundle).ok();
        runtime.start(&bundle).ok();
        bundle
    }

    /// Starts a process in a container as engines do, by a file that describes it.
    #[track_caller]
    fn exec_by(&self, bundle: &Bundle, file: &Path) -> Outcome {
        let runtime = self.host.runtime();
        let mut command = runtime.command();
        command.args(["exec", "--process"]).arg(file).arg(&bundle.id);
        crate::support::run_with_timeout(&mut command, crate::support::timeout())
    }

    /// That programs find what they need of the driver, and want no more than a kernel driver.
    #[track_caller]
    fn lacks_only_the_kernel(&self, image: &Rootfs) {
        let outcome = self.run(image, &["/probe", "libcuda.so.1", "cuInit"]).ok();
        assert_eq!(outcome.stdout.lines().nth(1), Some(NO_DEVICE), "{outcome}");
        let outcome = self.run(image, &["/usr/bin/nvidia-smi"]).exits(DRIVER_NOT_LOADED);
        assert!(outcome.stdout.contains("couldn't communicate with the NVIDIA driver"));
    }
}

impl Drop for DriverHost {
    fn drop(&mut self) {
        // The driver's files are mounted there, for all containers of the host.
        let _ = nix::mount::umount2(
            &self.host.state_dir().join("driver"),
            nix::mount::MntFlags::MNT_DETACH,
        );
    }
}

/// What a bundle mounts: where, and from where.
fn mounts(bundle: &Bundle) -> Vec<(String, String)> {
    let config = bundle.config();
    let mounts = config["mounts"].as_array().expect("mounts are a list").clone();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    mounts.iter().map(|mount| (text(&mount["destination"]), text(&mount["source"]))).collect()
}

/// Replaces a variable of the container.
fn set_env(config: &mut Value, name: &str, value: &str) {
    let env = config["process"]["env"].as_array_mut().expect("the environment is a list");
    env.retain(|item| !item.as_str().unwrap_or_default().starts_with(&format!("{name}=")));
    env.push(json!(format!("{name}={value}")));
}

/// A number that none has had in this binary.
fn next() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
