//! What the driver's files cost a container creation: `make bench`. The real driver of
//! `tests/driver-files`, an image with a glibc, runc and crun; `inject = "native"` in turn with `off`.
//! The kernel is set not to wait long for its processors (`rcu_expedited`), as it does for every cgroup
//! that a process enters: this takes milliseconds, now more and now less, and would hide the difference
//! that is measured.

mod measure;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use measure::{header, in_turn, row, timed};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

/// Pairs of container creations: the difference is a thirtieth of one, and some take twice as long.
const RUNS: usize = 500;
/// If the difference is a third.
const FEW_RUNS: usize = 100;

struct Bench {
    runtime: PathBuf,
    work: PathBuf,
    files: PathBuf,
}

fn main() {
    let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/driver-files");
    for item in ["driver", "distroless"] {
        let mut make = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/driver-files"));
        if !make.arg(&files).arg(item).status().is_ok_and(|status| status.success()) {
            println!("skipped: no driver to bring into containers");
            return;
        }
    }
    let runtime = match std::env::var_os("CGPU_BIN_DIR") {
        Some(dir) => Path::new(&dir).join("cgpu-runtime"),
        None => env!("CARGO_BIN_EXE_cgpu-runtime").into(),
    };
    let manager = unified();
    let _expedited = Expedited::new();
    // A tmpfs, as /run is on a host.
    let work = tempfile::tempdir_in("/dev/shm").expect("a directory can be made");
    let bench = Bench { runtime, work: work.path().to_owned(), files };
    bench.prepare(manager);
    header("off", "native");
    bench.compare("driver files, known", "runc", RUNS, |_| {}, "≤ 1 ms more");
    bench.compare("driver files, known, crun", "crun", RUNS, |_| {}, "≤ 1 ms more");
    let search = |state: &Path| drop(fs::remove_file(state.join("driver.cache")));
    bench.compare("driver files, searched for", "runc", FEW_RUNS, search, "≤ 50 ms more");
    let make = |state: &Path| {
        search(state);
        let _ = umount2(&state.join("driver"), MntFlags::MNT_DETACH);
    };
    let what = "driver files, searched for and mounted";
    bench.compare(what, "runc", FEW_RUNS, make, "≤ 50 ms more");
    for point in ["state/driver", "rootfs"] {
        umount2(&bench.work.join(point), MntFlags::MNT_DETACH).expect("it is mounted");
    }
}

/// `/sys/kernel/rcu_expedited`, set until this is dropped.
struct Expedited(Option<String>);

impl Expedited {
    const FILE: &str = "/sys/kernel/rcu_expedited";

    fn new() -> Self {
        let before = fs::read_to_string(Self::FILE).ok();
        if before.is_none() || fs::write(Self::FILE, "1").is_err() {
            println!("without rcu_expedited: these figures differ from run to run");
        }
        Expedited(before)
    }
}

impl Drop for Expedited {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = fs::write(Self::FILE, before);
        }
    }
}

/// Goes where cgroups are unified, since crun refuses hybrid ones; what it needs to do without their
/// controllers.
fn unified() -> &'static str {
    let cgroup = "/sys/fs/cgroup";
    if statfs(cgroup).is_ok_and(|there| there.filesystem_type() == CGROUP2_SUPER_MAGIC) {
        return "";
    }
    let none = None::<&str>;
    unshare(CloneFlags::CLONE_NEWNS).expect("root may");
    mount(none, "/", none, MsFlags::MS_PRIVATE | MsFlags::MS_REC, none).expect("root may");
    let cgroup2 = Some("cgroup2");
    mount(cgroup2, cgroup, cgroup2, MsFlags::empty(), none).expect("this kernel has it");
    "--cgroup-manager=disabled"
}

impl Bench {
    fn path(&self, name: &str) -> PathBuf {
        self.work.join(name)
    }

    /// Writes the configurations and the bundle.
    fn prepare(&self, manager: &str) {
        let version = fs::read_to_string(self.files.join("driver-version")).expect("it was made");
        for dir in ["state", "proc/driver/nvidia", "bundle", "rootfs", "upper", "overlay"] {
            fs::create_dir_all(self.path(dir)).expect("a directory can be made");
        }
        let banner = format!("NVRM version: NVIDIA UNIX Kernel Module  {version}\n");
        fs::write(self.path("proc/driver/nvidia/version"), banner).expect("it can be written");
        let gpus = r#"[{"index": 0, "uuid": "GPU-c09d11f5-a565-1f83-903c-a65a7ba138af", "minor": 0, "memory_mib": 16130}]"#;
        fs::write(self.path("gpus.json"), gpus).expect("a file can be written");
        let crun = self.path("crun");
        fs::write(&crun, format!("#!/bin/sh\nexec crun {manager} \"$@\"\n"))
            .expect("it can be written");
        fs::set_permissions(&crun, fs::Permissions::from_mode(0o755)).expect("it is ours");
        let runtimes = [("runc", Path::new("runc")), ("crun", &crun)];
        for (inject, (name, runtime)) in
            ["off", "native"].into_iter().flat_map(|inject| runtimes.map(|of| (inject, of)))
        {
            let config = format!(
                "state_dir = {:?}\nlog = \"\"\n[runtime]\ncandidates = [{runtime:?}]\n[inventory]\nsource = \"file\"\npath = {:?}\n\
                 [isolation]\nbackend = \"none\"\n[driver]\nroot = {:?}\nproc_root = {:?}\n\
                 inject = \"{inject}\"\n",
                self.path("state"),
                self.path("gpus.json"),
                self.files.join("driver"),
                self.path("proc"),
            );
            let file = self.path(&format!("{inject}-{name}.toml"));
            fs::write(file, config).expect("a file can be written");
        }
        let options = format!(
            "lowerdir={},upperdir={},workdir={}",
            self.files.join("distroless").display(),
            self.path("upper").display(),
            self.path("overlay").display()
        );
        let overlay = Some("overlay");
        mount(overlay, &self.path("rootfs"), overlay, MsFlags::empty(), Some(options.as_str()))
            .expect("images can be overlaid here");
        fs::copy("/bin/busybox", self.path("rootfs/sleep")).expect("busybox-static is installed");
        timed(Command::new("runc").arg("spec").current_dir(self.path("bundle")));
        let file = self.path("bundle/config.json");
        let text = fs::read_to_string(&file).expect("runc wrote it");
        let mut value: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
        value["root"]["path"] = self.path("rootfs").to_str().expect("a plain path").into();
        value["process"]["terminal"] = false.into();
        value["process"]["args"] = serde_json::json!(["/sleep", "1000"]);
        let env = value["process"]["env"].as_array_mut().expect("it has variables");
        env.push("ALIYUN_COM_GPU_MEM_CONTAINER=1".into());
        env.push("ALIYUN_COM_GPU_MEM_DEV=15".into());
        fs::write(file, value.to_string()).expect("a file can be written");
    }

    fn compare(
        &self,
        what: &str,
        runtime: &str,
        runs: usize,
        before: impl Fn(&Path),
        budget: &str,
    ) {
        let text = fs::read(self.path("bundle/config.json")).expect("it was prepared");
        let create = |inject: &str, turn: usize| -> Duration {
            // The engine writes a new config.json for each container.
            fs::write(self.path("bundle/config.json"), &text).expect("a file can be written");
            let id = format!("{inject}-{turn}");
            let command = || {
                let mut command = Command::new(&self.runtime);
                command.arg("--cgpu-config").arg(self.path(&format!("{inject}-{runtime}.toml")));
                command.arg("--root").arg(self.path("root"));
                command
            };
            let time =
                timed(command().args(["create", "--bundle"]).arg(self.path("bundle")).arg(&id));
            timed(command().args(["delete", "--force", &id]));
            time
        };
        create("native", usize::MAX);
        let (off, native) = in_turn(
            runs,
            |turn| create("off", turn),
            |turn| {
                before(&self.path("state"));
                create("native", turn)
            },
        );
        fs::write(self.path("bundle/config.json"), &text).expect("a file can be written");
        row(what, off, native, budget);
    }
}
