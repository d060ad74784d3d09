//! The inventory against a driver that behaves as NVIDIA's does: a stand-in library
//! (`standin/nvml.c`, compiled here) under a driver root, and a `/proc` of files.

#![allow(clippy::unwrap_used, reason = "in helpers too: clippy.toml allows it in tests alone")]

use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::nvml_standin::LIBRARY;
use cgpu_cli::nvml::{probe, refresh};
use cgpu_core::gpu::{GpuState, Inventory, MigDevice};
use cgpu_host::inventory::{ChildError, Settings, Source, cached, refreshed};
use tempfile::TempDir;

const V100: &str = "gpu GPU-a 1 00000000:00:07.0 16914055168 ok - Tesla V100-SXM2-16GB\n"; // 16130.5 MiB
const A10: &str = "gpu GPU-b 0 00000000:AF:00.0 23835181056 ok off NVIDIA A10\n"; // 22731 MiB
const A100: &str = "gpu GPU-c 2 00010000:01:00.0 42949672960 ok on NVIDIA A100-PCIE-40GB\n\
                    mig MIG-1 20937965568 7 0\nmig - 0\nmig MIG-3 5100273664\n";

const PLENTY: Duration = Duration::from_secs(60);

/// A host of its own for a test.
struct Host {
    directory: TempDir,
    settings: Settings,
}

impl Host {
    /// A host whose NVML says `nvml`, without a kernel module.
    fn new(nvml: &str) -> Self {
        let directory = TempDir::new().unwrap();
        let settings = settings_at(directory.path());
        let host = Host { directory, settings };
        host.write("proc/sys/kernel/random/boot_id", "5d1f0a5e-0000-4000-8000-000000000001\n");
        // A copy each: the loader would take one library under two names for one.
        let library = host.libraries().join(LIBRARY);
        fs::create_dir_all(host.libraries()).unwrap();
        fs::copy(crate::nvml_standin::compiled(), library).unwrap();
        host.nvml(nvml);
        host
    }

    /// A V100, an A10 and an A100 with MIG devices.
    fn mixed() -> Self {
        let host = Host::new(&[V100, A10, A100].concat());
        host.driver("535.129.03");
        host.gpu("0000:00:07.0", "GPU-a", 1);
        host.gpu("0000:af:00.0", "GPU-b", 0);
        host.gpu("10000:01:00.0", "GPU-c", 2);
        host.mig("gpu2/mig/gi1/ci0");
        host.mig("gpu2/mig/gi7/ci0");
        host
    }

    fn libraries(&self) -> PathBuf {
        let directory = format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH);
        self.settings.driver_root.join(directory)
    }

    fn nvml(&self, text: &str) {
        fs::write(self.libraries().join("nvml.txt"), text).unwrap();
    }

    fn path(&self, path: &str) -> PathBuf {
        self.directory.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        fs::create_dir_all(self.path(path).parent().unwrap()).unwrap();
        fs::write(self.path(path), text).unwrap();
    }

    fn driver(&self, version: &str) {
        self.write(
            "proc/driver/nvidia/version",
            &format!("NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Thu Oct 19\n"),
        );
    }

    fn gpu(&self, bus_id: &str, uuid: &str, minor: u32) {
        self.write(
            &format!("proc/driver/nvidia/gpus/{bus_id}/information"),
            &format!(
                "Model: \t\t NVIDIA\nGPU UUID: \t {uuid}\nBus Location: \t {bus_id}\n\
                 Device Minor: \t {minor}\nGPU Excluded:\t No\n"
            ),
        );
    }

    fn mig(&self, path: &str) {
        fs::create_dir_all(self.path("proc/driver/nvidia/capabilities").join(path)).unwrap();
    }

    fn remove(&self, path: &str) {
        fs::remove_dir_all(self.path(path)).unwrap();
    }

    /// What the cache holds, as UUIDs.
    fn cached(&self) -> Option<Vec<String>> {
        let inventory = cached(&self.settings).unwrap()?;
        Some(inventory.gpus().iter().map(|gpu| gpu.uuid.clone()).collect())
    }

    /// A program that stands for `cgpu gpus --refresh`: this test program, running
    /// [`refresh_as_a_child`] alone. A shell writes it, so that no fork in a test next to
    /// this one inherits it open for writing (ETXTBSY).
    fn cgpu(&self) -> PathBuf {
        let program = self.path("cgpu");
        let script = format!(
            "#!/bin/sh\nCGPU_TEST_HOST='{}' exec '{}' inventory::refresh_as_a_child --exact --nocapture\n",
            self.directory.path().display(),
            std::env::current_exe().unwrap().display()
        );
        let written = Command::new("/bin/sh")
            .args(["-c", r#"printf %s "$2" > "$1" && chmod 755 "$1""#, "sh"])
            .args([program.as_os_str(), script.as_ref()])
            .status();
        assert!(written.unwrap().success());
        program
    }

    fn refreshed(&self, limit: Duration) -> Result<Inventory, ChildError> {
        refreshed(&self.settings, &self.cgpu(), &[] as &[OsString], limit)
    }
}

/// The settings of a [`Host`] in `directory`.
fn settings_at(directory: &Path) -> Settings {
    Settings {
        source: Source::Auto,
        driver_root: directory.join("driver"),
        state_dir: directory.join("run/cgpu"),
        proc_root: directory.join("proc"),
        reserve_mib: 0,
    }
}

/// `error` and its causes, as a program prints them.
fn sentence(error: &dyn Error) -> String {
    let mut sentence = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        sentence.push_str(&format!(": {error}"));
        cause = error.source();
    }
    sentence
}

/// Not a test: what [`Host::cgpu`] runs.
#[test]
fn refresh_as_a_child() {
    let Some(host) = std::env::var_os("CGPU_TEST_HOST").map(PathBuf::from) else { return };
    if let Err(error) = refresh(&settings_at(&host)) {
        panic!("cgpu: {}", sentence(&error));
    }
}

/// Not a test: the runtime under an engine that ignores SIGCHLD.
#[test]
fn refreshed_as_a_careless_parent() {
    let Some(host) = std::env::var_os("CGPU_TEST_CARELESS").map(PathBuf::from) else { return };
    let inventory = refreshed(&settings_at(&host), &host.join("cgpu"), &[], PLENTY);
    assert_eq!(inventory.unwrap().gpus().len(), 3);
}

/// The memory that the driver reserves of a GPU is known in full MiB, rounded up.
#[test]
fn driver_reserved_memory_is_rounded_up_to_mib() {
    let host = Host::new(&[A10, "reserved 536870913\n", V100].concat());
    host.driver("535.129.03");
    host.gpu("0000:af:00.0", "GPU-b", 0);
    host.gpu("0000:00:07.0", "GPU-a", 1);
    let retained = |inventory: &Inventory| -> Vec<u64> {
        let mut gpus = inventory.gpus().to_vec();
        gpus.sort_by(|one, other| one.uuid.cmp(&other.uuid));
        gpus.iter().map(|gpu| gpu.reserved_bytes >> 20).collect()
    };
    assert_eq!(retained(&refresh(&host.settings).unwrap()), [0, 513]);
    // By the cache, too, where the configuration keeps more of the one.
    let settings = Settings { reserve_mib: 100, ..host.settings.clone() };
    assert_eq!(retained(&cached(&settings).unwrap().unwrap()), [100, 513]);
}

/// A driver before 510 reports a GPU's memory by the first form of the query.
#[test]
fn driver_before_510_reports_memory_by_older_query() {
    let host = Host::new(A10);
    host.driver("470.256.02");
    host.gpu("0000:af:00.0", "GPU-b", 0);
    fs::copy(crate::nvml_standin::compiled_before_510(), host.libraries().join(LIBRARY)).unwrap();
    let inventory = probe(&host.settings).unwrap();
    let [a10] = inventory.gpus() else { panic!("{inventory:?}") };
    // What such a driver reserves for itself isn't reported.
    assert_eq!((a10.memory_bytes, a10.reserved_bytes), (22731 << 20, 0));
    assert_eq!(a10.state, GpuState::Ok);
}

/// The inventory lists GPUs of mixed sizes with their MIG devices.
#[test]
fn inventory_lists_mixed_gpus_with_mig_devices() {
    let inventory = probe(&Host::mixed().settings).unwrap();
    let [v100, a10, a100] = inventory.gpus() else { panic!("{inventory:?}") };
    assert_eq!((v100.index, &*v100.uuid, v100.minor), (0, "GPU-a", 1));
    assert_eq!((&*v100.bus_id, &*v100.name), ("0000:00:07.0", "Tesla V100-SXM2-16GB"));
    assert_eq!(v100.memory_bytes, 16130 << 20, "half a MiB is dropped");
    assert_eq!((&*a10.bus_id, a10.memory_bytes), ("0000:af:00.0", 22731 << 20));
    assert!(!v100.mig_enabled && !a10.mig_enabled);
    assert_eq!((&*a100.bus_id, a100.mig_enabled), ("10000:01:00.0", true));
    let mig = |index, uuid: &str, memory_mib, gpu_instance, compute_instance| MigDevice {
        index,
        uuid: uuid.into(),
        memory_mib,
        gpu_instance,
        compute_instance,
    };
    let known = mig(0, "MIG-1", 19968, Some(7), Some(0));
    assert_eq!(a100.mig_devices, [known, mig(2, "MIG-3", 4864, None, None)]);
    assert!(inventory.gpus().iter().all(|gpu| gpu.state == GpuState::Ok));
}

/// A lost GPU retains its place in the list and what the kernel knows of it.
#[test]
fn lost_gpu_retains_its_index_and_kernel_data() {
    for health in ["lost", "gone"] {
        let host = Host::mixed();
        host.nvml(&[V100, A10, A100].concat().replace("ok off", &format!("{health} off")));
        let inventory = probe(&host.settings).unwrap();
        let lost = inventory.by_index(1).unwrap();
        assert_eq!((lost.state, &*lost.uuid, lost.minor), (GpuState::Lost, "GPU-b", 0), "{health}");
        assert_eq!((&*lost.bus_id, lost.memory_bytes), ("0000:af:00.0", 0), "{health}");
        assert_eq!(inventory.by_index(2).unwrap().state, GpuState::Ok, "{health}");
        refresh(&host.settings).unwrap();
        assert_eq!(cached(&host.settings).unwrap(), Some(inventory), "{health}");
    }
}

/// A lost GPU without a UUID is named after its bus id.
#[test]
fn lost_gpu_without_uuid_gets_bus_id_name() {
    let host = Host::mixed();
    host.nvml(&V100.replace("ok", "lost"));
    host.gpu("0000:00:07.0", "GPU-????????-????-????-????-????????????", 1);
    let inventory = probe(&host.settings).unwrap();
    assert_eq!(inventory.gpus()[0].uuid, "GPU-unknown-0000:00:07.0");
    assert_eq!(inventory.gpus()[0].minor, 1);
}

#[test]
fn cache_is_used_while_driver_is_unchanged() {
    let host = Host::mixed();
    assert_eq!(host.cached(), None);
    let inventory = refresh(&host.settings).unwrap();
    host.nvml("init_error 999\n");
    assert_eq!(cached(&host.settings).unwrap(), Some(inventory));
}

#[test]
fn the_cache_is_refused_after_a_boot() {
    let host = Host::mixed();
    refresh(&host.settings).unwrap();
    host.write("proc/sys/kernel/random/boot_id", "5d1f0a5e-0000-4000-8000-000000000002\n");
    assert_eq!(host.cached(), None);
}

#[test]
fn the_cache_is_refused_under_another_driver() {
    let host = Host::mixed();
    refresh(&host.settings).unwrap();
    host.driver("550.54.14");
    assert_eq!(host.cached(), None);
}

/// The cache is refused if a GPU comes or goes.
#[test]
fn cache_is_refused_if_the_gpus_change() {
    let host = Host::mixed();
    refresh(&host.settings).unwrap();
    host.gpu("10000:02:00.0", "GPU-d", 3);
    assert_eq!(host.cached(), None);
    host.remove("proc/driver/nvidia/gpus/10000:02:00.0");
    assert!(host.cached().is_some());
    host.remove("proc/driver/nvidia/gpus/0000:af:00.0");
    assert_eq!(host.cached(), None);
}

/// The cache is refused if MIG instances come or go.
#[test]
fn cache_is_refused_if_mig_instances_change() {
    let host = Host::mixed();
    refresh(&host.settings).unwrap();
    host.mig("gpu2/mig/gi9");
    assert_eq!(host.cached(), None);
    host.remove("proc/driver/nvidia/capabilities/gpu2/mig/gi9");
    assert!(host.cached().is_some());
    host.remove("proc/driver/nvidia/capabilities/gpu2/mig/gi7/ci0");
    assert_eq!(host.cached(), None);
}

#[test]
fn a_damaged_cache_is_replaced_by_a_refresh() {
    let host = Host::mixed();
    let inventory = refresh(&host.settings).unwrap();
    host.write("run/cgpu/inventory.json", "{\"version\": 1, \"fing");
    assert_eq!(host.cached(), None);
    refresh(&host.settings).unwrap();
    assert_eq!(cached(&host.settings).unwrap(), Some(inventory));
}

/// Without a kernel module there is nothing to refresh, and the error names the missing driver.
#[test]
fn refresh_without_kernel_module_reports_missing_driver() {
    let host = Host::new(V100);
    let expected = format!(
        "no NVIDIA driver on this host: {} does not exist; load the nvidia kernel module, or list \
         the GPUs in a file with source = \"file\" under [inventory]",
        host.path("proc/driver/nvidia/version").display()
    );
    assert_eq!(sentence(&cached(&host.settings).unwrap_err()), expected);
    assert_eq!(sentence(&probe(&host.settings).unwrap_err()), expected);
    assert_eq!(sentence(&refresh(&host.settings).unwrap_err()), expected);
    assert_eq!(sentence(&host.refreshed(PLENTY).unwrap_err()), expected);
}

#[test]
fn missing_library_is_reported_with_expected_path() {
    let host = Host::mixed();
    host.remove("driver");
    assert_eq!(
        sentence(&probe(&host.settings).unwrap_err()),
        format!(
            "can't load libnvidia-ml.so.1 under {}; install the NVIDIA driver's libraries there, \
             or correct root under [driver]",
            host.path("driver").display()
        )
    );
}

/// A library that doesn't load is reported with the loader's own words.
#[test]
fn unloadable_library_is_reported_with_loader_error() {
    let host = Host::mixed();
    fs::write(host.libraries().join(LIBRARY), "no library").unwrap();
    let error = sentence(&probe(&host.settings).unwrap_err());
    assert!(error.contains("correct root under [driver]: a libloading error"), "{error}");
    assert!(error.contains("file too short"), "{error}");
}

/// A library of another release than the kernel module's is reported with what to do.
#[test]
fn library_release_mismatch_is_reported_with_a_remedy() {
    let host = Host::mixed();
    host.nvml("init_error 18\n");
    assert_eq!(
        sentence(&probe(&host.settings).unwrap_err()),
        format!(
            "{} is not of the release of the loaded nvidia kernel module; reload the module, or \
             reboot: RM detects a driver/library version mismatch",
            host.libraries().join(LIBRARY).display()
        )
    );
}

#[test]
fn a_failure_leaves_the_cache_as_it_was() {
    let host = Host::mixed();
    let inventory = refresh(&host.settings).unwrap();
    host.nvml("init_error 9\n");
    let error = sentence(&refresh(&host.settings).unwrap_err());
    assert!(error.ends_with("the kernel's log: NVIDIA driver is not loaded"), "{error}");
    assert_eq!(cached(&host.settings).unwrap(), Some(inventory));
}

#[test]
fn a_child_fills_the_cache() {
    let host = Host::mixed();
    let inventory = host.refreshed(PLENTY).unwrap();
    assert_eq!(inventory, probe(&host.settings).unwrap());
    assert_eq!(cached(&host.settings).unwrap(), Some(inventory));
}

#[test]
fn child_with_hanging_nvml_is_killed_in_time() {
    let host = Host::mixed();
    host.nvml("init_ms 600000\n");
    let begun = Instant::now();
    let error = host.refreshed(Duration::from_millis(500)).unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(120));
    assert!(matches!(error, ChildError::TooSlow { reaped: true, .. }));
    assert_eq!(
        sentence(&error).replace(&host.path("cgpu").display().to_string(), "cgpu"),
        "cgpu gpus --refresh did not list the GPUs within 500ms and was killed; run `cgpu gpus \
         --refresh` manually to see"
    );
}

#[test]
fn a_child_whose_nvml_fails_is_quoted() {
    let host = Host::mixed();
    host.nvml("init_error 9\n");
    let error = sentence(&host.refreshed(PLENTY).unwrap_err());
    assert!(error.contains("gpus --refresh failed (exit status: 101), saying \""), "{error}");
    assert!(error.contains("the kernel's log: NVIDIA driver is not loaded"), "{error}");
}

/// A caller that ignores its children (SIGCHLD) gets the GPUs too.
#[test]
fn caller_ignoring_sigchld_still_gets_the_gpus() {
    let host = Host::mixed();
    host.cgpu();
    // A shell can't: dash takes no notice of `trap '' CHLD`.
    let careless = Command::new("env")
        .arg("--ignore-signal=CHLD")
        .arg(std::env::current_exe().unwrap())
        .args(["inventory::refreshed_as_a_careless_parent", "--exact"])
        .env("CGPU_TEST_CARELESS", host.directory.path())
        .output()
        .unwrap();
    assert!(careless.status.success(), "{careless:?}");
    assert!(host.cached().is_some(), "the child did its work");
}
