//! `cgpu doctor`, the real program: on hosts that are made up of files, and on this one.

#![allow(clippy::unwrap_used, reason = "in helpers too: clippy.toml allows it in tests alone")]

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::Command;

use crate::support::{Outcome, run_with_timeout, timeout};
use cgpu_core::plan::{Kind, Plan};
use cgpu_host::registry::{Holder, Key, Record};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::mkfifo;
use serde_json::Value;
use tempfile::TempDir;

const VERSION: &str = "535.161.08";

fn cgpu() -> &'static str {
    crate::support::sibling(env!("CARGO_BIN_EXE_cgpu-runtime"), "cgpu")
}

/// What every screen has.
const SECTIONS: [&str; 6] = ["driver", "isolation", "runtimes", "engines", "toolkit", "cgpu"];

/// `cgpu doctor` with `args`, and nothing of this session's configuration.
fn doctor(args: &[&str]) -> Outcome {
    let mut command = Command::new(cgpu());
    command.arg("doctor").args(args).env_remove("CGPU_CONFIG").env("PATH", "/usr/sbin:/usr/bin");
    run_with_timeout(&mut command, timeout())
}

/// A host of files.
struct Host {
    directory: TempDir,
}

impl Host {
    /// One without a GPU, but with a kernel that can do everything, and runc.
    fn bare() -> Self {
        let host = Host { directory: TempDir::new().unwrap() };
        host.write("proc/sys/kernel/osrelease", "6.8.0-45-generic\n");
        host.write("proc/sys/kernel/seccomp/actions_avail", "errno user_notif allow\n");
        host.write("proc/sys/kernel/random/boot_id", "5d1f0a5e-0000-4000-8000-000000000001\n");
        host.write("sys/fs/cgroup/cgroup.controllers", "cpu memory\n");
        host.path("var/log/cgpu.log");
        host.program("usr/sbin/runc");
        host
    }

    /// One with a GPU, on which nothing is wrong.
    fn well() -> Self {
        let host = Self::bare();
        host.write(
            "proc/driver/nvidia/version",
            &format!("NVRM version: NVIDIA UNIX x86_64 Kernel Module  {VERSION}  Thu Oct 19\n"),
        );
        host.write(
            "proc/driver/nvidia/gpus/0000:00:07.0/information",
            "GPU UUID: \t GPU-a\nDevice Minor: \t 0\n",
        );
        host.write(
            "proc/devices",
            "Character devices:\n195 nvidia\n511 nvidia-uvm\n\nBlock devices:\n",
        );
        for module in ["nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm"] {
            host.write(&format!("sys/module/{module}/refcnt"), "0\n");
        }
        let gpu = "sys/bus/pci/devices/0000:00:07.0";
        host.write(&format!("{gpu}/vendor"), "0x10de\n");
        host.write(&format!("{gpu}/class"), "0x030200\n");
        symlink("../../../../bus/pci/drivers/nvidia", host.path(&format!("{gpu}/driver"))).unwrap();
        for (name, major, minor) in
            [("nvidiactl", 195, 255), ("nvidia-uvm", 511, 0), ("nvidia0", 195, 0)]
        {
            host.node(name, major, minor);
        }
        host.write(&format!("usr/lib64/libcuda.so.{VERSION}"), "");
        host.program("usr/bin/cgpu-runtime");
        host.write("etc/docker/daemon.json", include_str!("../../packaging/daemon.json"));
        host
    }

    fn path(&self, path: &str) -> PathBuf {
        let path = self.directory.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        path
    }

    fn write(&self, path: &str, text: &str) {
        fs::write(self.path(path), text).unwrap();
    }

    fn program(&self, path: &str) {
        self.write(path, "#!/bin/sh\n");
        fs::set_permissions(self.path(path), fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn node(&self, name: &str, major: u64, minor: u64) {
        let path = self.path(&format!("dev/{name}"));
        let _ = fs::remove_file(&path); // it may not be there yet
        mknod(&path, SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(major, minor))
            .unwrap();
    }

    fn doctor(&self, args: &[&str]) -> Outcome {
        let root = self.directory.path().to_str().unwrap();
        doctor(&[&["--root", root], args].concat())
    }

    fn findings(&self, exit: i32) -> Value {
        self.doctor(&["--format", "json"]).exits(exit).json()
    }
}

/// The findings of that name and severity, each as `what -> remedy`.
#[track_caller]
fn said(json: &Value, name: &str, severity: &str) -> Vec<String> {
    let findings = json["findings"].as_array().unwrap().iter();
    findings
        .filter(|found| found["name"] == name && found["severity"] == severity)
        .map(|found| {
            let what = found["what"].as_str().unwrap();
            match found["remedy"].as_str() {
                Some(remedy) => format!("{what} -> {remedy}"),
                None => what.to_owned(),
            }
        })
        .collect()
}

/// A screen has every section in its first column, and stays within it.
#[track_caller]
fn is_a_screen(text: &str) {
    let first = |line: &str| line.split("  ").next().unwrap_or_default().to_owned();
    for section in SECTIONS {
        let has = |line: &str| first(line).split(' ').next() == Some(section);
        assert!(text.lines().any(has), "no {section} in\n{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    assert!(!text.contains('\u{1b}'), "{text}");
}

#[test]
fn a_host_on_which_nothing_is_wrong() {
    let host = Host::well();
    let json = host.findings(0);
    assert_eq!(json["worst"], "note", "{json:#}"); // runc is a file here, and isn't asked
    assert_eq!(said(&json, "version", "ok"), ["535.161.08, proprietary modules, CUDA 12.2"]);
    assert_eq!(said(&json, "gpus", "ok").len(), 1);
    assert_eq!(
        said(&json, "nodes", "ok"),
        ["/dev/nvidiactl, /dev/nvidia-uvm and /dev/nvidia0"],
        "{json:#}"
    );
    assert_eq!(said(&json, "libraries", "ok"), ["535.161.08 (/usr/lib64/libcuda.so.535.161.08)"]);
    assert_eq!(
        said(&json, "docker", "ok"),
        ["runtime cgpu is /usr/bin/cgpu-runtime (/etc/docker/daemon.json)"]
    );
    assert_eq!(said(&json, "state", "ok"), ["/run/cgpu is made by the first create"]);
    let backend = said(&json, "backend", "ok");
    assert!(backend[0].starts_with("gate (auto: the vendor's module isn't loaded): holds memory"));
    let text = host.doctor(&[]).ok().stdout;
    is_a_screen(&text);
    assert!(text.ends_with("nothing is wrong; 1 note\n"), "{text}");
    for key in ["section", "name", "severity", "what", "subject", "remedy"] {
        assert!(json["findings"][0].get(key).is_some(), "{key}");
    }
}

/// An updated driver and a node of another boot are errors, each with its remedy.
#[test]
fn stale_driver_and_node_are_errors_with_remedies() {
    let host = Host::well();
    host.write("usr/lib64/libnvidia-ml.so.550.54.14", "");
    fs::remove_file(host.path("usr/lib64/libcuda.so.535.161.08")).unwrap();
    host.node("nvidia-uvm", 510, 0);
    fs::remove_file(host.path("dev/nvidia0")).unwrap();
    let json = host.findings(1);
    let libraries = said(&json, "libraries", "error");
    assert!(libraries[0].starts_with(
        "550.54.14 (/usr/lib64/libnvidia-ml.so.550.54.14), and the loaded module is 535.161.08: \
         NVML says \"Driver/library version mismatch\" -> the driver was updated while loaded"
    ));
    assert_eq!(
        said(&json, "nodes", "error"),
        ["/dev/nvidia-uvm is device 510:0, and the kernel's is 511:0 -> `rm /dev/nvidia-uvm; \
             cgpu nodes`",]
    );
    assert_eq!(
        said(&json, "nodes", "note"),
        [
            "/dev/nvidia0 is missing; the next container with a GPU makes it -> `cgpu nodes`, and for \
          every boot `systemctl enable cgpu-nodes`"
        ]
    );
    is_a_screen(&host.doctor(&[]).exits(1).stdout);
}

/// On a host without a GPU, doctor reports what the host can do, by notes.
#[test]
fn host_without_gpu_gets_notes_not_errors() {
    let json = Host::bare().findings(0);
    assert_eq!(json["worst"], "note");
    assert!(said(&json, "version", "note")[0].starts_with("this host has no NVIDIA GPU and no"));
    assert!(said(&json, "none", "note")[0].starts_with("none of docker, containerd, CRI-O and"));
    assert_eq!(said(&json, "nodes", "error"), [""; 0]);
}

#[test]
fn gpu_without_loaded_driver_is_an_error() {
    let host = Host::well();
    fs::remove_dir_all(host.path("proc/driver/nvidia")).unwrap();
    let json = host.findings(1);
    let version = said(&json, "version", "error");
    assert!(version[0].starts_with(
        "NVIDIA's driver isn't loaded, and there are GPUs: 0000:00:07.0 (held by nvidia) -> "
    ));
    assert!(said(&json, "backend", "error").is_empty(), "one error is enough: {json:#}");
}

#[test]
fn each_engine_is_read_as_it_is_written() {
    let host = Host::well();
    let containerd = include_str!("../../packaging/containerd.toml");
    host.write(
        "etc/containerd/config.toml",
        &format!("version = 3\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n{containerd}"),
    );
    host.write(
        "etc/containerd/conf.d/cgpu.toml",
        &containerd.replace("io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"),
    );
    host.write(
        "etc/crio/crio.conf.d/cgpu.conf",
        "[crio.runtime.runtimes.cgpu]\nruntime_path = \"/usr/bin/cgpu-runtime\"\n",
    );
    host.write(
        "etc/containers/containers.conf.d/cgpu.conf",
        "[engine.runtimes]\ncgpu = [\"/opt/cgpu-runtime\"]\n",
    );
    host.write(
        "usr/share/containers/oci/hooks.d/cgpu-poststop.json",
        include_str!("../../hooks/cgpu-poststop.json"),
    );
    host.write("etc/cdi/nvidia.yaml", "cdiVersion: 0.5.0\n");
    host.program("usr/bin/nvidia-ctk");
    let json = host.findings(1);
    assert!(said(&json, "containerd", "warning")[0].starts_with(
        "runtime cgpu stands in a section of version 2, and /etc/containerd/config.toml is of \
         version 3: containerd doesn't see it -> `cgpu setup containerd`, or put it under plugins."
    ));
    assert_eq!(
        said(&json, "containerd", "ok"),
        ["runtime cgpu is /usr/bin/cgpu-runtime (/etc/containerd/conf.d/cgpu.toml)"]
    );
    assert_eq!(said(&json, "cri-o", "ok").len(), 1);
    assert!(
        said(&json, "podman", "error")[0].contains("/opt/cgpu-runtime, which can't be executed")
    );
    assert!(said(&json, "hooks", "error")[0].contains("calls /usr/bin/cgpu-hook, which can't"));
    assert_eq!(said(&json, "nvidia", "ok"), ["nvidia-ctk; CDI: /etc/cdi/nvidia.yaml"]);
}

/// A specification of mounts alone, as people write them for drivers whose nodes are no devices.
#[test]
fn doctor_judges_cdi_files_as_creation_would() {
    let host = Host::well();
    let spec = |edits: &str| {
        format!(
            "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: \"0\"\n  containerEdits: \
             {edits}\n- name: GPU-a\n  containerEdits: {edits}\n"
        )
    };
    host.write("etc/cdi/nvidia.yaml", &spec("{deviceNodes: [{path: /dev/nvidia0}]}"));
    let json = host.findings(0);
    assert_eq!(
        said(&json, "files", "ok"),
        ["cdi (auto): 2 devices; `cgpu cdi list` shows them"],
        "{json:#}"
    );
    let mounts = "{mounts: [{hostPath: /etc/docker, containerPath: /etc/docker}]}";
    host.write("etc/cdi/nvidia.yaml", &spec(mounts));
    let json = host.findings(3);
    let [warning] = &said(&json, "files", "warning")[..] else { panic!("{json:#}") };
    assert!(
        warning.starts_with(
            "native (auto: CDI is of no use): 535.161.08; CDI device nvidia.com/gpu=GPU-a of "
        ) && warning
            .contains("/etc/cdi/nvidia.yaml has no node, and GPU 0 (GPU-a) is /dev/nvidia0"),
        "{warning}"
    );
    host.write("etc/cgpu/config.toml", "[driver]\ninject = \"cdi\"\n");
    let json = host.findings(1);
    let error = &said(&json, "files", "error")[0];
    assert!(error.starts_with("inject is cdi, and CDI device nvidia.com/gpu=GPU-a of "), "{error}");
}

/// A containerd handler unlike that of runc and a plugin that is off are reported.
#[test]
fn deviating_handler_and_disabled_plugin_are_reported() {
    let host = Host::well();
    let runc = "[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n\
                runtime_type = \"io.containerd.runc.v2\"\noptions = {SystemdCgroup = true}\n";
    host.write(
        "etc/containerd/config.toml",
        &format!(
            "version = 2\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n\
             disabled_plugins = [\"io.containerd.grpc.v1.cri\"]\n{runc}"
        ),
    );
    let shipped = include_str!("../../packaging/containerd.toml");
    let ours = shipped.find("[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.cgpu]");
    host.write("etc/containerd/conf.d/cgpu.toml", &shipped[ours.unwrap()..]);
    let said = said(&host.findings(3), "containerd", "warning");
    assert!(
        said[0].starts_with(
            "runtime cgpu of /etc/containerd/conf.d/cgpu.toml has SystemdCgroup = false, and the \
             runtime of other pods has true"
        ),
        "{said:?}"
    );
    assert!(
        said[1].starts_with("/etc/containerd/config.toml names cri in disabled_plugins"),
        "{said:?}"
    );
}

/// Odd files (pipes, devices, loops) are findings, and nothing waits for them.
#[test]
fn odd_files_are_findings_without_any_waiting() {
    let host = Host::well();
    for path in ["etc/docker/daemon.json", "proc/driver/nvidia/version", "proc/devices"] {
        fs::remove_file(host.path(path)).unwrap();
    }
    mkfifo(&host.path("etc/docker/daemon.json"), Mode::S_IRWXU).unwrap();
    symlink("/dev/zero", host.path("proc/devices")).unwrap();
    host.write("proc/driver/nvidia/version/below", "");
    fs::write(host.path("etc/containerd/config.toml"), b"\xff\xfe\x00[[").unwrap();
    let deep = "[".repeat(100_000);
    host.write("etc/containers/containers.conf", &format!("a = {deep}"));
    host.write("usr/share/containers/oci/hooks.d/deep.json", &deep);
    host.write("etc/crio/crio.conf", "[crio]\nruntime = 7\n");
    fs::create_dir_all(host.path("usr/share/containers/oci/hooks.d/a.json/b")).unwrap();
    symlink("loop", host.path("run/cgpu")).unwrap();
    symlink("/etc/cdi", host.path("etc/cdi")).unwrap();
    let json = host.findings(1);
    let odd = "/etc/docker/daemon.json can't be read: it is no regular file -> correct it; docker";
    assert!(said(&json, "docker", "warning")[0].starts_with(odd), "{json:#}");
    assert!(said(&json, "version", "error")[0].contains("can't be read: it is no regular file"));
    for name in ["containerd", "podman", "hooks"] {
        assert!(said(&json, name, "warning")[0].contains("can't be read"), "{name}: {json:#}");
    }
    assert!(
        said(&json, "records", "error")[0].contains("it is no directory; set state_dir"),
        "{json:#}"
    );
    is_a_screen(&host.doctor(&[]).exits(1).stdout);
}

#[test]
fn what_is_cgpus_own_is_looked_at_too() {
    let host = Host::well();
    host.write("etc/cgpu/config.toml", "state_dir = \"/var/cgpu\"\n");
    let record = Record {
        key: Key { root: "/run/runc".into(), id: "gone".into() },
        bundle: "/nowhere".into(),
        short_id: "gone________".into(),
        boot_id: "another".into(),
        holder: Holder::Active { init: None },
        plan: Plan {
            backend: Kind::None,
            gpus: Vec::new(),
            weight: 1,
            high_priority: false,
            caveats: cgpu_core::plan::Caveats::default(),
        },
    };
    let path = format!("var/cgpu/containers/{}", record.key.file_name());
    host.write(&path, &serde_json::to_string(&record).unwrap());
    fs::set_permissions(host.path("var/cgpu"), fs::Permissions::from_mode(0o755)).unwrap();
    let json = host.findings(3);
    assert_eq!(json["worst"], "warning");
    assert_eq!(said(&json, "config", "ok"), ["/etc/cgpu/config.toml"]);
    assert_eq!(
        said(&json, "state", "warning"),
        ["/var/cgpu has mode 0755: others may enter it -> `chmod 0700 /var/cgpu`"]
    );
    assert_eq!(
        said(&json, "records", "note"),
        [
            "1 registered container, 1 of them gone; the next create collects -> `cgpu gc` does it now"
        ]
    );
    host.write(&path, "{");
    host.write("etc/cgpu/config.toml", "state_dir = \"/var/cgpu\"\nstate_dirr = 1\n");
    let json = host.findings(1);
    assert!(
        said(&json, "config", "error")[0].contains("unknown key state_dirr; did you mean state")
    );
    assert!(said(&json, "records", "error")[0].contains("remove it if its container is gone"));
    let named = host.path("other.toml");
    fs::write(&named, "[isolation]\nbackend = \"none\"\n").unwrap();
    let said_of_it = host.doctor(&["--config", named.to_str().unwrap(), "--format", "json"]).ok();
    let backend = said(&said_of_it.json(), "backend", "note");
    assert_eq!(backend, ["none (configured: quotas are reported but not enforced)"]);
}

/// As `tests/demo` has it: the kernel is this one, whichever files report the driver.
#[test]
fn simulated_driver_is_judged_by_its_own_files() {
    let host = Host::bare();
    host.write(
        "sim/proc/driver/nvidia/version",
        &format!("NVRM version: NVIDIA UNIX x86_64 Kernel Module  {VERSION}  Thu Jan  1\n"),
    );
    host.write("sim/gpus.json", r#"[{"index": 0, "uuid": "GPU-a", "memory_mib": 16000}]"#);
    for node in ["nvidiactl", "nvidia-uvm", "nvidia0"] {
        host.write(&format!("sim/dev/{node}"), "");
    }
    let config = "[inventory]\nsource = \"file\"\npath = \"/sim/gpus.json\"\n\
                  [driver]\nroot = \"/sim\"\nproc_root = \"/sim/proc\"\n";
    host.write("etc/cgpu/config.toml", config);
    let json = host.findings(0);
    assert_eq!(json["worst"], "note", "{json:#}");
    assert_eq!(said(&json, "gpus", "ok"), ["1 in the inventory file; `cgpu gpus` lists them"]);
    let kernel = said(&json, "kernel", "ok");
    assert!(kernel[0].starts_with("Linux 6.8.0-45-generic: "), "{json:#}");
    assert_eq!(said(&json, "log", "ok"), ["/var/log/cgpu.log"]);
    // A log where none can be.
    host.write("etc/cgpu/config.toml", &format!("log = \"/etc/hosts/cgpu.log\"\n{config}"));
    host.write("etc/hosts", "");
    let json = host.findings(3);
    let log = said(&json, "log", "warning");
    assert!(
        log[0].starts_with("/etc/hosts/cgpu.log can't be written: Not a directory"),
        "{json:#}"
    );
    nix::unistd::mkfifo(&host.path("sim/pipe"), Mode::S_IRWXU).unwrap();
    host.write("etc/cgpu/config.toml", &config.replace("gpus.json", "pipe"));
    let json = host.findings(1);
    assert!(said(&json, "gpus", "error")[0].ends_with("/sim/pipe is no regular file"), "{json:#}");
}

#[test]
fn this_host_is_looked_at_and_not_changed() {
    let json = doctor(&["--format", "json"]);
    let code = json.status.code();
    let worst = json.json()["worst"].as_str().unwrap().to_owned();
    let expected = match worst.as_str() {
        "ok" | "note" => 0,
        "warning" => 3,
        _ => 1,
    };
    assert_eq!(code, Some(expected), "{json}");
    // Whether its runc has the fixes of its distribution isn't known here.
    let of = |severity: &&str| said(&json.json(), "real", severity);
    let runc: Vec<String> = ["ok", "note", "warning"].iter().flat_map(of).collect();
    assert!(matches!(runc.as_slice(), [one] if one.starts_with("runc version ")), "{json}");
    let text = doctor(&[]).exits(expected);
    is_a_screen(&text.stdout);
    assert_eq!(text.stderr, "");
}

#[test]
fn a_wrong_command_line_is_no_finding() {
    doctor(&["--colour", "never"]).exits(2);
    let missing = doctor(&["--config", "/nowhere.toml", "--format", "json"]).exits(1);
    assert!(
        said(&missing.json(), "config", "error")[0].starts_with("configuration /nowhere.toml:")
    );
}
