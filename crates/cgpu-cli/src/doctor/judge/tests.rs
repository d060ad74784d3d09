use std::path::PathBuf;

use super::super::facts::{
    BusGpu, Cgroups, Divisible, Driver, Engine, EngineFile, EngineKind, Facts, Flaw, Handler, Hook,
    HookFile, Isolation, Node, NodeKind, Observed, Own, Records, Runtime, Toolkit, Unstarted,
};
use super::super::facts::{Cdi, Files, Library};
use super::super::worst;
use super::*;
use cgpu_core::plan::Kind;
use cgpu_host::config::Inject;

fn node(name: &str, major: u64, minor: u64, needed: bool, made_by: &str) -> Node {
    Node {
        path: PathBuf::from("/dev").join(name),
        major: Some(major),
        minor,
        needed,
        is_made_on_demand: false,
        made_by: made_by.into(),
        seen: Observed::Present(NodeKind::Device(major, minor)),
    }
}

/// A host with two GPUs on which nothing is wrong.
fn well() -> Facts {
    let gpu = |bus_id: &str| BusGpu { bus_id: bus_id.into(), driver: Some("nvidia".into()) };
    let engine = |kind| Engine {
        kind,
        program: None,
        files: Vec::new(),
        cri_disabled_by: None,
        gives_cdi_devices: None,
    };
    Facts {
        driver: Driver {
            version_path: "/proc/driver/nvidia/version".into(),
            banner: Observed::Present(
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Thu Oct 19".into(),
            ),
            on_bus: vec![gpu("0000:00:07.0"), gpu("0000:00:08.0")],
            gpus: Ok(vec![Some(0), Some(1)]),
            modules: ["nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm"]
                .map(|name| (name, true))
                .into(),
            nodes: vec![
                node("nvidiactl", 195, 255, true, "cgpu nodes"),
                node("nvidia-uvm", 511, 0, true, "cgpu nodes"),
                node("nvidia-uvm-tools", 511, 1, false, "cgpu nodes"),
                node("nvidia0", 195, 0, true, "cgpu nodes"),
            ],
            root: "/".into(),
            library: Some(Library {
                version: "535.161.08".parse().unwrap(),
                path: "/usr/lib64/libcuda.so.535.161.08".into(),
            }),
            files: Files { inject: Inject::Auto, cdi: Some(Cdi::default()), nvidia_runtime: None },
            gpus_from_file: false,
            made_up: false,
        },
        isolation: Isolation {
            kernel: "6.8.0-45-generic".into(),
            ability: Ok(()),
            listener: true,
            layout: Ok(()),
            killable_wait: true,
            cgroups: Cgroups::V2,
            backend: Kind::Gate,
            why: "auto: the vendor's module isn't loaded",
            usable: Ok(()),
        },
        runtimes: vec![runtime("runc", "runc version 1.3.6\ncommit: v1.3.6-0-g491b69ba")],
        engines: vec![
            docker(Ok(vec![handler()])),
            engine(EngineKind::Containerd),
            engine(EngineKind::Crio),
            engine(EngineKind::Podman),
        ],
        hooks: Vec::new(),
        toolkit: Toolkit::default(),
        claims: None,
        own: Own {
            root: true,
            directory: "/usr/bin".into(),
            missing: Vec::new(),
            config: Ok(None),
            state_dir: "/run/cgpu".into(),
            state: Observed::Present(0o700),
            log: "/var/log/cgpu.log".into(),
            log_open: Ok(()),
            records: Ok(Records::default()),
            warned: Ok(Vec::new()),
            short: Ok(Vec::new()),
            divisible: Vec::new(),
        },
    }
}

fn runtime(name: &str, version: &str) -> Runtime {
    let path = Some(PathBuf::from("/usr/sbin").join(name));
    Runtime { name: name.into(), path, version: Ok(version.into()) }
}

fn handler() -> Handler {
    Handler {
        name: "cgpu".into(),
        program: "/usr/bin/cgpu-runtime".into(),
        executable: true,
        lower: None,
        flaw: None,
    }
}

fn docker(handlers: Result<Vec<Handler>, String>) -> Engine {
    Engine {
        kind: EngineKind::Docker,
        program: Some("/usr/bin/dockerd".into()),
        files: vec![EngineFile { path: "/etc/docker/daemon.json".into(), handlers }],
        cri_disabled_by: None,
        gives_cdi_devices: None,
    }
}

fn hook(name: &str, stages: &[&str]) -> HookFile {
    let stages = stages.iter().map(ToString::to_string).collect();
    let hook = Hook { stages, program: "/usr/bin/cgpu-hook".into(), executable: true };
    HookFile { path: PathBuf::from("/etc/containers/oci/hooks.d").join(name), hook: Ok(hook) }
}

/// Takes `change` on the host where all is well: the finding `name`, its severity, and what it
/// and its remedy say, as `what -> remedy`.
#[track_caller]
fn finds(name: &str, severity: Severity, text: &str, change: impl FnOnce(&mut Facts)) {
    let mut facts = well();
    change(&mut facts);
    let findings = judge(&facts);
    let said = |found: &Finding| match &found.remedy {
        Some(remedy) => format!("{} -> {remedy}", found.what),
        None => found.what.clone(),
    };
    let there = findings.iter().any(|found| {
        found.name == name && found.severity == severity && said(found).contains(text)
    });
    let all: Vec<String> = findings
        .iter()
        .filter(|found| found.name == name)
        .map(|found| format!("{:?} {}", found.severity, said(found)))
        .collect();
    assert!(there, "no {severity:?} {name} {text:?} in {all:#?}");
}

/// A host without a problem is reported as such, with what was found of each part.
#[test]
fn healthy_host_has_no_finding_worse_than_ok() {
    let findings = judge(&well());
    assert_eq!(worst(&findings), Fine, "{findings:#?}");
    let what = |name: &str| findings.iter().find(|found| found.name == name).unwrap().what.clone();
    assert_eq!(what("version"), "535.161.08, proprietary modules, CUDA 12.2");
    assert_eq!(what("gpus"), "2 with the driver; `cgpu gpus` lists them");
    assert_eq!(what("modules"), "nvidia, nvidia_uvm, nvidia_modeset and nvidia_drm");
    assert_eq!(what("libraries"), "535.161.08 (/usr/lib64/libcuda.so.535.161.08)");
    assert_eq!(
        what("nodes"),
        "/dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia-uvm-tools and /dev/nvidia0"
    );
    assert_eq!(what("files"), "native (auto: no CDI specification): 535.161.08");
    assert_eq!(what("kernel"), "Linux 6.8.0-45-generic: seccomp notifies a listener");
    assert_eq!(
        what("backend"),
        "gate (auto: the vendor's module isn't loaded): holds memory and compute, changeable while \
         it runs"
    );
    assert_eq!(what("real"), "runc version 1.3.6 (/usr/sbin/runc)");
    assert_eq!(what("docker"), "runtime cgpu is /usr/bin/cgpu-runtime (/etc/docker/daemon.json)");
    assert_eq!(what("state"), "/run/cgpu, mode 0700");
    assert_eq!(what("log"), "/var/log/cgpu.log");
    assert_eq!(what("records"), "no container is registered");
}

/// A host without a GPU has no problem: its findings are notes at worst.
#[test]
fn host_without_a_gpu_has_no_warning() {
    let none = |facts: &mut Facts| {
        facts.driver.banner = Observed::Absent;
        facts.driver.on_bus.clear();
        facts.driver.gpus = Ok(Vec::new());
        facts.driver.library = None;
        facts.isolation.usable = Err("no version".into());
    };
    let mut facts = well();
    none(&mut facts);
    let findings = judge(&facts);
    assert_eq!(worst(&findings), Note, "{findings:#?}");
    let absent = ["gpus", "modules", "libraries", "nodes"];
    assert!(!findings.iter().any(|found| absent.contains(&found.name)));
    finds("version", Note, "no NVIDIA GPU and no driver: nothing to share yet -> to try", none);
    finds("backend", Note, "holds memory and compute, changeable while it runs, once there", none);
    finds("version", Note, "the GPUs are those of the inventory file", |facts| {
        none(facts);
        facts.driver.gpus_from_file = true;
    });
    finds("version", Note, "all NVIDIA GPUs of this host are given to virtual", |facts| {
        none(facts);
        facts.driver.on_bus =
            vec![BusGpu { bus_id: "0000:00:07.0".into(), driver: Some("vfio-pci".into()) }];
    });
}

/// A simulated driver is no problem either: its findings are notes at worst.
#[test]
fn simulated_driver_has_no_warning() {
    let simulated = |facts: &mut Facts| {
        facts.driver.made_up = true;
        facts.driver.gpus_from_file = true;
        facts.driver.library = None;
    };
    let mut facts = well();
    simulated(&mut facts);
    let findings = judge(&facts);
    assert_eq!(worst(&findings), Note, "{findings:#?}");
    finds("gpus", Fine, "2 in the inventory file; `cgpu gpus` lists them", simulated);
    finds("libraries", Note, "of a driver under /, as of a simulated one", simulated);
    finds("gpus", Error, "0 in the inventory file", |facts| {
        simulated(facts);
        facts.driver.gpus = Ok(Vec::new());
    });
}

/// A GPU without its driver is an error, which says what to load or to install.
#[test]
fn gpu_without_driver_error_names_what_to_load() {
    let held_by = |driver: Option<&str>| {
        let driver = driver.map(str::to_owned);
        move |facts: &mut Facts| {
            facts.driver.banner = Observed::Absent;
            facts.driver.on_bus = vec![BusGpu { bus_id: "0000:00:07.0".into(), driver }];
        }
    };
    finds(
        "version",
        Error,
        "there are GPUs: 0000:00:07.0 -> `modprobe nvidia`; where",
        held_by(None),
    );
    finds(
        "version",
        Error,
        "0000:00:07.0 (held by nouveau) -> install NVIDIA's driver, which keeps nouveau",
        held_by(Some("nouveau")),
    );
}

/// The driver is judged by what the kernel reports of it.
#[test]
fn driver_finding_follows_the_kernels_report() {
    let banner = |text: &str| {
        let text = format!("NVRM version: NVIDIA UNIX {text}");
        move |facts: &mut Facts| facts.driver.banner = Observed::Present(text)
    };
    finds(
        "version",
        Fine,
        "580.65.06, open modules, CUDA 13.0",
        banner("Open Kernel Module for x86_64  580.65.06  Release Build"),
    );
    finds(
        "version",
        Error,
        "-> driver 460.32.03 is older than 470",
        banner("x86_64 Kernel Module  460.32.03"),
    );
    finds(
        "version",
        Note,
        "700.10, proprietary modules; newer than",
        banner("x86_64 Kernel Module  700.10"),
    );
    finds("version", Error, "has no version in its first line", banner("x86_64 Kernel Module"));
    finds(
        "version",
        Error,
        "/proc/driver/nvidia/version can't be read: no -> run as root",
        |facts| {
            facts.driver.banner = Observed::Unreadable("no".into());
        },
    );
    finds("gpus", Error, "the driver has no GPU -> see `dmesg | grep NVRM`", |facts| {
        facts.driver.gpus = Ok(Vec::new());
    });
    finds("gpus", Error, "can't read", |facts| facts.driver.gpus = Err("can't read x".into()));
    finds("gpus", Warning, "1 with the driver; `cgpu gpus` lists them; 2 on the PCI", |facts| {
        facts.driver.gpus = Ok(vec![None]);
    });
}

/// A missing kernel module is an error if CUDA needs it, and none if only graphics do.
#[test]
fn missing_module_finding_depends_on_its_users() {
    let without = |missing: &'static [&'static str]| {
        move |facts: &mut Facts| {
            for (name, loaded) in &mut facts.driver.modules {
                *loaded = !missing.contains(name);
            }
        }
    };
    finds("modules", Error, "nvidia_uvm isn't loaded, which CUDA needs", without(&["nvidia_uvm"]));
    finds(
        "modules",
        Fine,
        "nvidia and nvidia_uvm; without nvidia_modeset and nvidia_drm (graphics only)",
        without(&["nvidia_modeset", "nvidia_drm"]),
    );
    let all = &["nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm"];
    finds("modules", Note, "none in /sys/module, though the driver answers", without(all));
}

#[test]
fn libraries_must_be_the_modules() {
    finds(
        "libraries",
        Error,
        "550.54.14 (/usr/lib64/libcuda.so.550.54.14), and the loaded module is 535.161.08: NVML \
         says \"Driver/library version mismatch\" -> the driver was updated while loaded: reboot",
        |facts| {
            facts.driver.library = Some(Library {
                version: "550.54.14".parse().unwrap(),
                path: "/usr/lib64/libcuda.so.550.54.14".into(),
            });
        },
    );
    finds(
        "libraries",
        Warning,
        "no libcuda.so or libnvidia-ml.so of a driver under /driver -> install",
        |facts| {
            facts.driver.library = None;
            facts.driver.root = "/driver".into();
        },
    );
}

/// A wrong or missing device node is reported with the command that creates it.
#[test]
fn wrong_node_finding_names_the_creating_command() {
    let uvm = |seen| move |facts: &mut Facts| facts.driver.nodes[1].seen = seen;
    finds(
        "nodes",
        Error,
        "/dev/nvidia-uvm is device 510:0, and the kernel's is 511:0 -> `rm /dev/nvidia-uvm; \
         cgpu nodes`",
        uvm(Observed::Present(NodeKind::Device(510, 0))),
    );
    finds(
        "nodes",
        Error,
        "/dev/nvidia-uvm is missing -> `cgpu nodes`, and for every boot `systemctl enable cgpu-nodes`",
        uvm(Observed::Absent),
    );
    finds(
        "nodes",
        Note,
        "/dev/nvidia-uvm is missing; the next container with a GPU makes it -> `cgpu nodes`, and",
        |facts| {
            facts.driver.nodes[1].seen = Observed::Absent;
            facts.driver.nodes[1].is_made_on_demand = true;
        },
    );
    finds(
        "nodes",
        Error,
        "can't be looked at: no -> run as root",
        uvm(Observed::Unreadable("no".into())),
    );
    finds(
        "nodes",
        Note,
        "bound into containers: /dev/nvidia-uvm",
        uvm(Observed::Present(NodeKind::File)),
    );
    // Without a major of the kernel's the minor is all there is to compare; and the tools
    // aren't needed.
    finds("nodes", Fine, "/dev/nvidiactl, /dev/nvidia-uvm and /dev/nvidia0", |facts| {
        facts.driver.nodes[1].major = None;
        facts.driver.nodes[2].seen = Observed::Absent;
    });
}

/// A kernel without what the gate needs is an error if the gate is the backend, and else a note.
#[test]
fn unfit_kernel_is_an_error_for_gate_alone() {
    let old = |facts: &mut Facts| facts.isolation.ability = Err("the gate needs Linux 5.9".into());
    finds("kernel", Error, "the gate needs Linux 5.9", old);
    finds("backend", Error, "can't be used, for what is said of the kernel", |facts| {
        old(facts);
        facts.isolation.usable = Err("the same".into());
    });
    finds("kernel", Note, "the gate needs Linux 5.9", |facts| {
        old(facts);
        facts.isolation.backend = Kind::Km;
    });
    finds("kernel", Error, "takes no seccomp filter with a listener -> look whether", |facts| {
        facts.isolation.listener = false;
    });
    finds("kernel", Error, "notifies in another form than ours: size -> install a cgpu", |facts| {
        facts.isolation.layout = Err("size".into());
    });
    finds("kernel", Note, "interrupted calls are made again (5.19 waits); calls to the", |facts| {
        facts.isolation.killable_wait = false;
        facts.isolation.kernel = "5.10.0-28-amd64".into();
    });
    finds(
        "backend",
        Error,
        "gate (auto: the vendor's module isn't loaded) can't be used: why",
        |facts| {
            facts.isolation.usable = Err("why".into());
        },
    );
    finds("backend", Note, "none (configured: quotas are reported but not enforced)", |facts| {
        facts.isolation.backend = Kind::None;
        facts.isolation.why = "configured: quotas are reported but not enforced";
    });
    finds("cgroups", Warning, "none at /sys/fs/cgroup", |facts| {
        facts.isolation.cgroups = Cgroups::Nowhere;
    });
    finds("cgroups", Fine, "v1", |facts| facts.isolation.cgroups = Cgroups::V1);
}

#[test]
fn real_runtimes_are_those_that_the_tests_know() {
    let are = |runtimes: Vec<Runtime>| move |facts: &mut Facts| facts.runtimes = runtimes;
    let absent = |name: &str| Runtime { path: None, ..runtime(name, "") };
    finds(
        "real",
        Error,
        "none of runc and crun is there -> install",
        are(vec![absent("runc"), absent("crun")]),
    );
    finds(
        "real",
        Warning,
        "runc version 1.0.3 (/usr/sbin/runc) is older than 1.1, the oldest that is tested -> update runc",
        are(vec![runtime("runc", "runc version 1.0.3")]),
    );
    finds(
        "other",
        Note,
        "crun version 1.5 (/usr/sbin/crun) is older than 1.8",
        are(vec![runtime("runc", "runc version 1.2.4"), runtime("crun", "crun version 1.5")]),
    );
    finds(
        "real",
        Note,
        "youki version 0.5 (/usr/sbin/youki) is neither runc nor crun",
        are(vec![absent("runc"), runtime("youki", "youki version 0.5")]),
    );
    let mute = Runtime { version: Err("it takes longer than 2 s".into()), ..runtime("runc", "") };
    finds("real", Note, "its version is unknown: it takes longer than 2 s", are(vec![mute]));
    finds("real", Warning, "refuses hybrid cgroups -> use runc here", |facts| {
        facts.isolation.cgroups = Cgroups::Hybrid;
        facts.runtimes = vec![runtime("crun", "crun version 1.14")];
    });
}

/// A runtime that containers can escape from is named with the update that fixes it.
#[test]
fn escapable_runtime_finding_names_cve_and_fix() {
    let severity_of = |version: &str| {
        let mut facts = well();
        facts.runtimes = vec![runtime("runc", &format!("runc version {version}\nspec: 1.2.1"))];
        let findings = judge(&facts);
        let found = findings.iter().find(|found| found.name == "real").unwrap();
        (found.severity, found.what.clone())
    };
    for (version, severity, closed) in [
        ("1.1.0", Warning, "1.2.8"),
        ("1.1.15", Warning, "1.2.8"),
        ("1.2.0-rc.3", Warning, "1.2.8"),
        ("1.2.7", Warning, "1.2.8"),
        ("1.2.7+dev", Warning, "1.2.8"),
        ("1.2.8", Fine, ""),
        ("1.2.9", Fine, ""),
        ("1.3.0", Warning, "1.3.3"),
        ("1.3.2", Warning, "1.3.3"),
        ("1.3.3", Fine, ""),
        ("1.3.10", Fine, ""),
        ("1.4.0-rc.2", Warning, "1.4.0-rc.3"),
        ("1.4.0-rc.3", Fine, ""),
        ("1.4.0", Fine, ""),
        ("1.5.0-rc.1", Fine, ""),
        ("2.0", Fine, ""),
        // A distribution's, which may have the fixes.
        ("1.1.5+ds1", Note, "1.2.8"),
        ("1.1.12-0ubuntu2~22.04.1", Note, "1.2.8"),
        ("1.3.0~rc1+ds1", Note, "1.3.3"),
        ("1.3.5+ds1", Fine, ""),
    ] {
        let (found, what) = severity_of(version);
        assert_eq!(found, severity, "{version}: {what}");
        let closed = format!(
            " (/usr/sbin/runc) is older than {closed}: a container can escape (CVE-2025-31133, "
        );
        assert_eq!(what.contains(&closed), severity != Fine, "{version}: {what}");
    }
    let are = |runtimes: Vec<Runtime>| move |facts: &mut Facts| facts.runtimes = runtimes;
    finds(
        "real",
        Warning,
        "CVE-2025-52565 and CVE-2025-52881), unless your distribution has brought the fixes back -> \
         update runc to 1.2.8, 1.3.3 or 1.4, or to your distribution's security update",
        are(vec![runtime("runc", "runc version 1.2.4")]),
    );
    // The second one is never used.
    finds(
        "other",
        Note,
        "is older than 1.2.8",
        are(vec![runtime("crun", "crun version 1.28"), runtime("runc", "runc version 1.2.4")]),
    );
    let krun = "crun version 1.19.1\ncommit: x\n+SYSTEMD +SELINUX +LIBKRUN +YAJL";
    finds(
        "real",
        Warning,
        "crun version 1.19.1 (/usr/sbin/crun) is older than 1.20: by its handler krun an image can \
         write files of the host (CVE-2025-24965), unless",
        are(vec![runtime("crun", krun)]),
    );
    for other in [krun.replace("1.19.1", "1.20"), krun.replace("+LIBKRUN ", "")] {
        let text = format!("{} (/usr/sbin/crun)", other.lines().next().unwrap());
        finds("real", Fine, &text, are(vec![runtime("crun", &other)]));
    }
}

/// Each engine's finding says how the engine is configured for cgpu, or what is wrong with its
/// configuration.
#[test]
fn engine_finding_says_how_to_configure_cgpu() {
    let is = |engine: Engine| move |facts: &mut Facts| facts.engines = vec![engine];
    let there = |kind| Engine {
        kind,
        program: Some("/usr/bin/x".into()),
        files: Vec::new(),
        cri_disabled_by: None,
        gives_cdi_devices: None,
    };
    let bare = |kind| is(there(kind));
    for (kind, name, words) in [
        (
            EngineKind::Docker,
            "docker",
            "-> `cgpu setup docker`, for `--runtime=cgpu`; with `--default`",
        ),
        (EngineKind::Containerd, "containerd", "-> `cgpu setup containerd`, for"),
        (EngineKind::Crio, "cri-o", "-> `cgpu setup crio`, for"),
        (
            EngineKind::Podman,
            "podman",
            "-> `cgpu setup podman`, for `--runtime=cgpu`; or nothing: `podman --runtime /usr/bin/",
        ),
    ] {
        finds(name, Note, "installed, and knows no runtime cgpu-runtime", bare(kind));
        finds(name, Note, words, bare(kind));
    }
    finds(
        "docker",
        Warning,
        "/etc/docker/daemon.json can't be read: line 1 -> correct it;",
        is(docker(Err("line 1".into()))),
    );
    let podman = || bare(EngineKind::Podman);
    finds("podman", Note, "--runtime /usr/bin/cgpu-runtime run", |facts| {
        podman()(facts);
        facts.own.directory = "/opt".into();
        facts.own.missing = vec!["cgpu-runtime"];
    });
    finds("podman", Note, "--runtime /opt/cgpu-runtime run", |facts| {
        podman()(facts);
        facts.own.directory = "/opt".into();
    });
    let gone = Handler { executable: false, ..handler() };
    finds(
        "docker",
        Error,
        "runtime cgpu of /etc/docker/daemon.json is /usr/bin/cgpu-runtime, which can't be executed -> install cgpu there, or `cgpu setup docker`",
        is(docker(Ok(vec![gone]))),
    );
    let flawed = |flaw| {
        let handler = Handler { flaw: Some(flaw), ..handler() };
        let path = "/etc/containerd/config.toml".into();
        let files = vec![EngineFile { path, handlers: Ok(vec![handler]) }];
        is(Engine { files, program: None, ..there(EngineKind::Containerd) })
    };
    let off = |engine: Engine| {
        is(Engine { cri_disabled_by: Some("/etc/containerd/config.toml".into()), ..engine })
    };
    let words = "/etc/containerd/config.toml names cri in disabled_plugins: Kubernetes can't use \
                 this containerd, ctr and nerdctl can -> take cri out";
    finds("containerd", Note, words, off(there(EngineKind::Containerd)));
    let docker = docker(Ok(vec![handler()]));
    finds("containerd", Warning, words, off(Engine { kind: EngineKind::Containerd, ..docker }));
    for (file, section, put) in
        [(3, 2, "cri.v1.runtime"), (2, 3, "grpc.v1.cri"), (1, 2, "begin the file")]
    {
        finds(
            "containerd",
            Warning,
            &format!(
                "section of version {section}, and /etc/containerd/config.toml is of version {file}: containerd doesn't see it"
            ),
            flawed(Flaw::OtherVersion { file, section }),
        );
        finds("containerd", Warning, put, flawed(Flaw::OtherVersion { file, section }));
    }
    finds(
        "containerd",
        Warning,
        "has SystemdCgroup = false, and the runtime of other pods has true: the kubelet looks for cgroups where they aren't -> `cgpu setup containerd --restart`",
        flawed(Flaw::OtherCgroups { systemd: true }),
    );
    for (name, others) in [(None, "the default one"), (Some("nydus".to_owned()), "\"nydus\"")] {
        finds(
            "containerd",
            Warning,
            &format!(
                "another snapshotter than the runtime of other pods, which has {others}: images may be unpacked for that one alone -> `cgpu setup containerd --restart`"
            ),
            flawed(Flaw::OtherSnapshotter { name }),
        );
    }
    let file =
        EngineFile { path: "/etc/containerd/config.toml".into(), handlers: Ok(vec![handler()]) };
    let deaf = |facts: &mut Facts| {
        let handlers = Ok(vec![handler()]);
        let file = EngineFile { path: "/etc/containerd/config.toml".into(), handlers };
        let gives_cdi_devices = Some(false);
        let engine = there(EngineKind::Containerd);
        facts.engines = vec![Engine { files: vec![file], gives_cdi_devices, ..engine }];
        facts.claims = Some("/var/lib/cgpu/grants/claims".into());
    };
    finds(
        "containerd",
        Warning,
        "and cgpu's DRA driver has run here (/var/lib/cgpu/grants/claims): it doesn't register",
        deaf,
    );
    finds(
        "containerd",
        Note,
        "gives pods no devices by CDI (enable_cdi), and there is /etc/cdi/nvidia.yaml: who names GPUs so, as DRA drivers do and NVIDIA's device plugin can, gives none -> enable_cdi = true under",
        |facts| {
            let deaf = Some(false);
            let engine = there(EngineKind::Containerd);
            let engine = Engine { files: vec![file], gives_cdi_devices: deaf, ..engine };
            facts.engines = vec![engine];
            facts.toolkit.cdi = vec!["/etc/cdi/nvidia.yaml".into()];
        },
    );
    finds(
        "containerd",
        Error,
        "isn't cgpu's: as the engine reads its files, it runs /usr/bin/runc -> `cgpu setup containerd --restart`",
        flawed(Flaw::Overruled { by: "/usr/bin/runc".into() }),
    );
    finds(
        "containerd",
        Error,
        "has binaryName in two spellings, of which releases of containerd take different ones -> `cgpu setup",
        flawed(Flaw::TwoSpellings { key: "binaryName".into() }),
    );
    let over = Handler { lower: Some("/usr/bin/crun".into()), ..handler() };
    let over = self::docker(Ok(vec![over]));
    finds("docker", Fine, "cgpu is /usr/bin/cgpu-runtime, over /usr/bin/crun (", |facts| {
        facts.engines = vec![over];
    });
    finds(
        "containerd",
        Note,
        "not all annotations of pods reach it -> pod_annotations",
        flawed(Flaw::NoAnnotations),
    );
    finds("none", Note, "none of docker, containerd, CRI-O and podman is installed", |facts| {
        facts.engines.clear();
    });
}

/// Hook files form one complete set: half a set and two sets at a time are warnings.
#[test]
fn hook_files_form_one_complete_set() {
    let are = |hooks: Vec<HookFile>| move |facts: &mut Facts| facts.hooks = hooks;
    let (ahead, create, stop) = (
        || hook("a.json", &["precreate"]),
        || hook("b.json", &["createRuntime"]),
        || hook("c.json", &["poststop"]),
    );
    finds(
        "hooks",
        Note,
        "/etc/containers/oci/hooks.d/a.json gives whole GPUs, and refuses quotas under the gate -> \
         `cgpu setup podman`",
        are(vec![ahead()]),
    );
    finds("hooks", Fine, "/etc/containers/oci/hooks.d/a.json", |facts| {
        facts.hooks = vec![ahead()];
        facts.isolation.backend = Kind::Km;
    });
    finds("hooks", Fine, "hooks.d/b.json and /etc", are(vec![create(), stop()]));
    finds("hooks", Warning, "half of a set of hooks", are(vec![create()]));
    finds("hooks", Warning, "half of a set of hooks", are(vec![stop()]));
    finds(
        "hooks",
        Warning,
        "two sets of hooks do the same work -> keep".split(" ->").next().unwrap(),
        are(vec![ahead(), create(), stop()]),
    );
    let unread = HookFile { hook: Err("line 3".into()), ..ahead() };
    finds("hooks", Warning, "a.json can't be read: line 3 -> correct it", are(vec![unread]));
    let mut gone = ahead();
    gone.hook.as_mut().unwrap().executable = false;
    finds("hooks", Error, "calls /usr/bin/cgpu-hook, which can't be executed", are(vec![gone]));
}

#[test]
fn nvidias_toolkit_is_well_there_or_not() {
    for (programs, cdi, text) in [
        (&[][..], &[][..], "not installed, and no CDI specification"),
        (&[], &["/etc/cdi/nvidia.yaml"], "not installed; CDI: /etc/cdi/nvidia.yaml"),
        (&["/usr/bin/nvidia-ctk"], &[], "nvidia-ctk; no CDI specification"),
        (&["/usr/bin/nvidia-ctk"], &["/run/cdi/a.json"], "nvidia-ctk; CDI: /run/cdi/a.json"),
    ] {
        let paths = |paths: &[&str]| paths.iter().map(PathBuf::from).collect();
        let toolkit = Toolkit { programs: paths(programs), cdi: paths(cdi) };
        finds("nvidia", Fine, text, |facts| facts.toolkit = toolkit);
    }
}

#[test]
fn we_are_judged_too() {
    finds(
        "programs",
        Error,
        "/usr/bin lacks cgpu-hook and cgpu-monitor -> `make install`",
        |facts| {
            facts.own.missing = vec!["cgpu-hook", "cgpu-monitor"];
        },
    );
    finds("config", Error, "unknown key -> correct it; until then the rest", |facts| {
        facts.own.config = Err("configuration /c.toml: unknown key".into());
    });
    finds("config", Fine, "/etc/cgpu/config.toml", |facts| {
        facts.own.config = Ok(Some("/etc/cgpu/config.toml".into()));
    });
    finds("state", Fine, "/run/cgpu is made by the first create", |facts| {
        facts.own.state = Observed::Absent;
    });
    finds(
        "state",
        Warning,
        "/run/cgpu has mode 0755: others may enter it -> `chmod 0700 /run",
        |facts| {
            facts.own.state = Observed::Present(0o755);
        },
    );
    finds("state", Error, "/run/cgpu can't be looked at: no", |facts| {
        facts.own.state = Observed::Unreadable("no".into());
    });
    let closed = |facts: &mut Facts| facts.own.log_open = Err("Read-only file system".into());
    finds(
        "log",
        Warning,
        "/var/log/cgpu.log can't be written: Read-only file system; nothing is logged -> make it",
        closed,
    );
    finds("log", Note, "standard error, which monitors don't have", |facts| {
        facts.own.log = "stderr".into();
    });
    finds("log", Fine, "none (configured)", |facts| {
        closed(facts);
        facts.own.log = PathBuf::new();
    });
    finds("log", Note, "Read-only file system", |facts| {
        closed(facts);
        facts.own.root = false;
    });
    finds(
        "records",
        Note,
        "3 registered containers, 2 of them gone; the next create collects -> `cgpu gc`",
        |facts| {
            facts.own.records = Ok(Records { total: 3, stale: 2, ..Records::default() });
        },
    );
    finds("records", Fine, "1 registered container", |facts| {
        facts.own.records = Ok(Records { total: 1, ..Records::default() });
    });
    finds(
        "warned",
        Note,
        "web: CGPU_DISABLED means nothing; did you mean CGPU_DISABLE? -> correct",
        |facts| {
            let warning = "web: CGPU_DISABLED means nothing; did you mean CGPU_DISABLE?";
            facts.own.warned = Ok(vec![warning.into()]);
        },
    );
    finds("memory", Fine, "quotas share 15618 of 16130 MiB of GPU 0", |facts| {
        facts.own.divisible = vec![Divisible { index: 0, total_mib: 16130, reserved_mib: 512 }];
    });
    finds(
        "short",
        Warning,
        "web: the quota has memory left and the driver has none -> lower",
        |facts| {
            facts.own.short =
                Ok(vec!["web: the quota has memory left and the driver has none".into()]);
        },
    );
    let lost = |facts: &mut Facts, records| facts.own.records = Ok(records);
    finds("lost", Error, "a monitor serves a1 and b2, of which there is no record", |facts| {
        let unregistered = vec!["a1".into(), "b2".into()];
        lost(facts, Records { unregistered, ..Records::default() });
    });
    finds("lost", Warning, "the monitor of a1 has ended: driver calls fail", |facts| {
        lost(facts, Records { closed: vec!["a1".into()], ..Records::default() });
    });
    finds(
        "lost",
        Note,
        "a1 was created 12 min ago and never started: it holds memory -> if its engine has \
         forgotten it: `x delete a1`",
        |facts| {
            let a1 = Unstarted { id: "a1".into(), age_s: 759, deletion: "x delete a1".into() };
            lost(facts, Records { unstarted: vec![a1], ..Records::default() });
        },
    );
    finds("lost", Note, "2 monitors without a record left their directory -> `cgpu gc`", |facts| {
        lost(facts, Records { leftovers: 2, ..Records::default() });
    });
    finds("records", Error, "record x: damaged", |facts| {
        facts.own.records = Err("record x: damaged".into());
    });
    finds("records", Note, "record x: no", |facts| {
        facts.own.root = false;
        facts.own.records = Err("record x: no".into());
    });
    finds("rights", Note, "not run as the host's root", |facts| facts.own.root = false);
}

/// How the driver's files are injected is reported with the reason and what to do.
#[test]
fn driver_files_finding_gives_reason_and_remedy() {
    let cdi = |usable, trouble: Option<&str>| {
        Some(Cdi { usable, trouble: trouble.map(str::to_owned), ..Cdi::default() })
    };
    let refused = |served, refused: &[&str]| {
        let refused = refused.iter().map(ToString::to_string).collect();
        Some(Cdi { usable: 5, trouble: None, served, refused })
    };
    let runtime = |file: Option<&str>| {
        Some(("nvidia-container-runtime".to_owned(), file.map(std::path::PathBuf::from)))
    };
    let none = "containers get device nodes only";
    for (inject, cdi, nvidia_runtime, library, severity, what) in [
        (Inject::Off, None, None, true, Severity::Ok, format!("off (configured): {none}")),
        (Inject::Native, None, None, true, Severity::Ok, "native (configured): 535.161.08".into()),
        (
            Inject::Native,
            None,
            None,
            false,
            Severity::Error,
            "inject is native, and there are no libraries of a driver".into(),
        ),
        (
            Inject::Auto,
            cdi(5, None),
            None,
            true,
            Severity::Ok,
            "cdi (auto): 5 devices; `cgpu cdi list` shows them".into(),
        ),
        (
            Inject::Auto,
            cdi(0, Some("it is old")),
            None,
            true,
            Severity::Warning,
            "native (auto: CDI is of no use): 535.161.08; it is old".into(),
        ),
        (
            Inject::Auto,
            refused(2, &[]),
            None,
            true,
            Severity::Ok,
            "cdi (auto): 5 devices; `cgpu cdi list` shows them".into(),
        ),
        // As each create would warn.
        (
            Inject::Auto,
            refused(0, &["GPU 0 has no node", "GPU 1 neither", "nor GPU 2"]),
            None,
            true,
            Severity::Warning,
            "native (auto: CDI is of no use): 535.161.08; GPU 0 has no node (and so for 2 more)"
                .into(),
        ),
        (
            Inject::Auto,
            refused(0, &["GPU 0 has no node"]),
            None,
            false,
            Severity::Warning,
            format!("neither CDI nor libraries; GPU 0 has no node: {none}"),
        ),
        (
            Inject::Auto,
            refused(1, &["GPU 1 has no node"]),
            None,
            true,
            Severity::Warning,
            "cdi (auto) for 1 of 2 GPUs, else native: GPU 1 has no node".into(),
        ),
        (
            Inject::Cdi,
            refused(1, &["GPU 1 has no node"]),
            None,
            true,
            Severity::Error,
            "inject is cdi, and GPU 1 has no node".into(),
        ),
        (
            Inject::Auto,
            cdi(0, None),
            None,
            false,
            Severity::Warning,
            format!("neither CDI nor libraries: {none}"),
        ),
        (
            Inject::Cdi,
            cdi(3, Some("one is old")),
            None,
            false,
            Severity::Warning,
            "cdi (configured): 3 devices; `cgpu cdi list` shows them; one is old".into(),
        ),
        (
            Inject::Cdi,
            cdi(0, None),
            None,
            true,
            Severity::Error,
            "inject is cdi, and there is no specification of NVIDIA's".into(),
        ),
        (
            Inject::NvidiaRuntime,
            None,
            runtime(None),
            true,
            Severity::Error,
            "inject is nvidia-runtime, and there is no program nvidia-container-runtime".into(),
        ),
        (
            Inject::NvidiaRuntime,
            None,
            runtime(Some("/usr/bin/nvidia-container-runtime")),
            true,
            Severity::Ok,
            "nvidia-runtime (configured): /usr/bin/nvidia-container-runtime".into(),
        ),
    ] {
        let mut facts = well();
        facts.driver.files = Files { inject, cdi, nvidia_runtime };
        if !library {
            facts.driver.library = None;
        }
        let found = judge(&facts).into_iter().find(|found| found.name == "files").unwrap();
        assert_eq!((found.severity, found.what.as_str()), (severity, what.as_str()), "{inject:?}");
        assert_eq!(found.remedy.is_some(), severity > Severity::Note, "{found:?}");
    }
}
