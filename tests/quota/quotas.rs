//! What honest programs get.

use std::path::Path;
use std::time::Duration;

use serde_json::json;

use crate::gated::{FIRST_MIB, Gated, MIB, NO_MEMORY, RMTOOL, got_bytes};
use crate::host::ask;
use crate::support::{Bundle, Outcome, eventually, run_with_timeout, timeout, wait_until};

/// The container's bytes by a run of `words` with a quota of `mib`.
fn run(gated: &Gated, mib: u64, words: &[&str]) -> Outcome {
    gated.run("app", mib, &[&[RMTOOL], words].concat())
}

#[test]
fn container_gets_its_quota_and_nothing_more() {
    for crun in [false, true] {
        let mut gated = Gated::new();
        if crun {
            gated.over_crun();
        }
        let filled = run(&gated, 1000, &["fill"]).ok();
        assert_eq!(got_bytes(&filled), 1000 * MIB, "crun {crun}: {filled}");
        let over = run(&gated, 1000, &["run", "open", "client", "device 0", "alloc 1001MiB as a"]);
        assert!(over.stdout.contains(&format!("alloc a {NO_MEMORY}")), "crun {crun}: {over}");
        gated.soon_is_empty();
    }
}

#[test]
fn the_quota_is_shown_as_the_gpus_memory() {
    for driver in ["470.256.02", "535.161.08", "550.54.14", "580.65.06", "900.10.01"] {
        let gated = Gated::with_driver(driver);
        let words = ["run", "open", "client", "device 0", "subdevice", "info", "alloc 300MiB as a"];
        let rest = ["info", "alloc27", "free a", "info"];
        let shown = run(&gated, 1000, &[&words[..], &rest].concat()).ok();
        assert!(shown.has_line(&format!("alloc27 ok total={}", 1000 * MIB)), "{driver}: {shown}");
        let lines: Vec<&str> =
            shown.stdout.lines().filter(|line| line.contains("total_")).collect();
        assert!(!lines.is_empty(), "{driver}: {shown}");
        for line in &lines {
            assert!(line.contains("total_mib=1000"), "{driver}: {line}");
        }
        let free = |line: &&str| {
            line.split("free_mib=")
                .nth(1)
                .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
        };
        let mut seen: Vec<u64> = lines.iter().filter_map(free).collect();
        seen.dedup();
        assert_eq!(seen, [1000, 700, 1000], "{driver}: {shown}");
    }
}

#[test]
fn every_way_to_take_memory_is_counted() {
    let gated = Gated::new();
    let begin = ["run", "open", "client", "device 0", "subdevice"];
    for way in ["alloc", "heap"] {
        let first = format!("{way} 600MiB as a");
        let second = format!("{way} 600MiB as b");
        let reported = run(&gated, 1000, &[&begin[..], &[&first, &second]].concat());
        assert!(reported.stdout.contains(&format!("{way} a ok")), "{reported}");
        assert!(reported.stdout.contains(&format!("{way} b {NO_MEMORY}")), "{reported}");
    }
    // The third call number that allocates memory allocates none of a GPU: it reports how much there is.
    let words = [&begin[..], &["alloc27", "alloc27", "alloc 1000MiB as a", "alloc 1MiB as b"]];
    let reported = run(&gated, 1000, &words.concat());
    assert_eq!(reported.stdout.matches("alloc27 ok").count(), 2, "{reported}");
    assert!(reported.stdout.contains("alloc a ok"), "{reported}");
    assert!(reported.stdout.contains(&format!("alloc b {NO_MEMORY}")), "{reported}");
}

#[test]
fn freed_memory_is_available_again_however_freed() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    let begin = ["run", "open", "client", "device 0"];
    for freed in
        [&["free a"][..], &["free-device", "device 0"], &["free-client", "client", "device 0"]]
    {
        let words = [&begin[..], &["alloc 900MiB as a"], freed, &["alloc 900MiB as b"]].concat();
        let reported = gated.exec(&bundle, &words);
        assert!(reported.stdout.contains("alloc b ok"), "{freed:?}: {reported}");
    }
    // By the end of the process, and by SIGKILL.
    for _ in 0..2 {
        assert_eq!(got_bytes(&gated.exec(&bundle, &["fill"])), 1000 * MIB);
        let mut holder = gated.start(&bundle, &["hold", "800MiB"]);
        let pid = holding(&gated, 800 * MIB);
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL)
            .unwrap();
        holder.wait().unwrap();
    }
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

/// Waits until so much is in use; the process that uses it. One before may have ended, and its files not yet
/// be closed.
#[track_caller]
fn holding(gated: &Gated, bytes: u64) -> i32 {
    let holds = || {
        let state = gated.sim.state();
        let mut processes = state.gpus[0].processes.iter();
        let lives = |pid: u32| Path::new("/proc").join(pid.to_string()).exists();
        processes.find(|(pid, used)| **used >= bytes && lives(**pid)).map(|(pid, _)| *pid)
    };
    wait_until(timeout(), || holds().is_some());
    let pid =
        holds().unwrap_or_else(|| panic!("no process holds {bytes}: {:?}", gated.sim.state()));
    i32::try_from(pid).expect("a pid fits")
}

#[test]
fn all_processes_of_a_container_share_its_quota() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    let mut holder = gated.start(&bundle, &["hold", "600MiB"]);
    holding(&gated, 600 * MIB);
    gated.soon_accounts("app", 600);
    assert_eq!(got_bytes(&gated.exec(&bundle, &["fill"]).ok()), 400 * MIB);
    assert_eq!(got_bytes(&gated.exec(&bundle, &["storm", "16"]).ok()), 400 * MIB);
    gated.host.runtime().delete(&bundle).ok();
    holder.wait().unwrap();
    gated.soon_is_empty();
}

/// Containers have quotas of their own, and one disturbs no other.
#[test]
fn container_quotas_are_separate_and_undisturbed_by_others() {
    let gated = Gated::new();
    let (one, two) = (gated.sleeping("one", 1000), gated.sleeping("two", 2000));
    let mut holder = gated.start(&two, &["hold", "1500MiB"]);
    holding(&gated, 1500 * MIB);
    let filled = gated.exec(&one, &["fill"]);
    assert_eq!(got_bytes(&filled), 1000 * MIB, "{filled}");
    gated.soon_accounts("two", 1500);
    assert_eq!(got_bytes(&gated.exec(&two, &["fill"])), 500 * MIB);
    for bundle in [&one, &two] {
        gated.host.runtime().delete(bundle).ok();
    }
    holder.wait().unwrap();
    gated.soon_is_empty();
}

/// What sets displays retains memory that no driver usage shows (`nvkms-surface.c` of NVIDIA's kernel modules).
#[test]
fn container_under_quota_gets_no_modeset_node() {
    let gated = Gated::new();
    let with = |id: &str| {
        gated.bundle_with(id, |config| {
            ask(config, 1000);
            for path in ["/dev/nvidia-modeset", "/dev/by-another-name"] {
                let devices = config["linux"].as_object_mut().unwrap().entry("devices");
                devices.or_insert(json!([])).as_array_mut().unwrap().push(json!({
                    "path": path, "type": "c", "major": 195, "minor": 254, "fileMode": 438,
                }));
            }
            config["process"]["args"] = json!(["ls", "/dev"]);
        })
    };
    let listed = |id: &str, bare: bool| {
        let bundle = with(id);
        let (runc, ours) = (gated.host.scratch.runc(), gated.host.runtime());
        if bare { runc.run(&bundle) } else { ours.run(&bundle) }.ok().stdout
    };
    let (bare, under_quota) = (listed("bare", true), listed("app", false));
    for name in ["nvidia-modeset", "by-another-name"] {
        assert!(bare.contains(name) && !under_quota.contains(name), "{name}: {under_quota}");
    }
    assert!(under_quota.contains("nvidiactl"));
}

/// Each GPU has its own quota, and a container cannot reach other GPUs.
#[test]
fn gpu_quotas_are_separate_and_other_gpus_unreachable() {
    let gated = Gated::new();
    let bundle = gated.bundle_with("both", |config| {
        ask(config, 1000);
        let variables = config["process"]["env"].as_array_mut().unwrap();
        variables.retain(|variable| !variable.as_str().unwrap().contains("GPU"));
        for variable in [
            "NVIDIA_VISIBLE_DEVICES=0,1",
            "ALIYUN_COM_GPU_MEM_CONTAINER=1000,500",
            "ALIYUN_COM_GPU_MEM_UNIT=MiB",
        ] {
            variables.push(json!(variable));
        }
        config["process"]["args"] = json!(["sleep", "1000"]);
    });
    let runtime = gated.host.runtime();
    let created = runtime.create(&bundle);
    if created.status.success() {
        runtime.start(&bundle).ok();
        let limits = gated.host.limits_mib("both");
        for (gpu, limit) in ["0", "1"].iter().zip(limits) {
            let filled = gated.exec(&bundle, &["--gpu", gpu, "fill"]);
            assert_eq!(got_bytes(&filled), limit * MIB, "GPU {gpu}: {filled}");
        }
        runtime.delete(&bundle).ok();
    } else {
        panic!("{created}");
    }
    let one = gated.sleeping("one", 1000);
    let other = gated.exec(&one, &["--gpu", "1", "fill"]);
    assert!(!other.status.success(), "{other}");
    assert_eq!(gated.used_bytes(1), 0);
    runtime.delete(&one).ok();
}

#[test]
fn a_quota_changes_while_the_container_runs() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    let mut holder = gated.start(&bundle, &["hold", "600MiB"]);
    holding(&gated, 600 * MIB);
    gated.host.cgpu(&["set", "app", "--memory", "2000"]).ok();
    assert_eq!(got_bytes(&gated.exec(&bundle, &["fill"])), 1400 * MIB);
    assert_eq!(gated.host.limits_mib("app"), [2000]);
    // What the program had that has ended counts until the driver has freed it.
    gated.soon_accounts("app", 600);
    let refused = gated.host.cgpu(&["set", "app", "--memory", "500"]).fails();
    assert!(refused.stderr.contains("629145600 bytes are in use"), "{refused}");
    assert_eq!(gated.host.limits_mib("app"), [2000], "it has what it had");
    gated.host.cgpu(&["set", "app", "--memory", "700"]).ok();
    assert_eq!(got_bytes(&gated.exec(&bundle, &["fill"])), 100 * MIB);
    gated.host.runtime().delete(&bundle).ok();
    holder.wait().unwrap();
    gated.soon_is_empty();
}

/// If the bundle refuses what a quota needs, the message says so.
#[test]
fn bundle_conflicting_with_quota_is_refused_with_reason() {
    let gated = Gated::new();
    let runtime = gated.host.runtime();
    let reported = |edit: &dyn Fn(&mut serde_json::Value), parts: &[&str]| {
        let bundle: Bundle = gated.bundle_with("odd", |config| {
            ask(config, 100);
            edit(config);
        });
        gated.host.was_reported(runtime.create(&bundle), &bundle, parts);
        gated.soon_is_empty();
        std::fs::remove_dir_all(&bundle.directory).unwrap();
    };
    reported(
        &|config| {
            config["linux"]["seccomp"] = json!({
                "defaultAction": "SCMP_ACT_ALLOW", "listenerPath": "/run/other.sock",
                "syscalls": [{"names": ["mkdir"], "action": "SCMP_ACT_NOTIFY"}],
            });
        },
        &["linux.seccomp.listenerPath is /run/other.sock", "choose a seccomp profile without"],
    );
    reported(
        &|config| config["linux"]["seccomp"] = json!("strict"),
        &["linux.seccomp is not an object"],
    );
}

#[test]
fn unknown_driver_is_refused_with_the_reason() {
    let gated = Gated::new();
    let mut host = crate::host::Host::new();
    host.set("isolation.backend", "gate");
    host.set("driver.proc_root", gated.host.scratch.directory("noproc").display().to_string());
    let bundle = host.asking("lost", 100);
    let outcome = host.runtime().create(&bundle);
    host.was_reported(outcome, &bundle, &["the gate needs to know the driver's version"]);
    gated.host.scratch.directory("noproc/driver/nvidia");
    let version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  418.87.01  Thu Sep\n";
    gated.host.scratch.file("noproc/driver/nvidia/version", version);
    let bundle = host.asking("old", 100);
    let outcome = host.runtime().create(&bundle);
    host.was_reported(outcome, &bundle, &["418.87.01", "470"]);
    assert!(FIRST_MIB > 0 && host.records().is_empty());
}

#[test]
fn managed_memory_is_refused_or_fully_charged() {
    let mut gated = Gated::new();
    let words = ["run", "start", "uvm-init", "managed 600MiB", "alloc 600MiB as a"];
    let reported = run(&gated, 1000, &words);
    assert!(!reported.stdout.contains("managed ok"), "{reported}");
    assert!(reported.stdout.contains("alloc a ok"), "it takes nothing: {reported}");
    gated.soon_is_empty();
    gated.host.set("isolation.managed_memory", "charge");
    let reported = run(&gated, 1000, &words);
    assert!(reported.stdout.contains("managed ok"), "{reported}");
    assert!(reported.stdout.contains(&format!("alloc a {NO_MEMORY}")), "{reported}");
    let reported = run(&gated, 1000, &["run", "start", "uvm-init", "managed 1001MiB"]);
    assert!(!reported.stdout.contains("managed ok"), "{reported}");
    gated.soon_is_empty();
}

/// By a process that never called, and has the memory of one that is gone.
#[test]
fn managed_memory_is_charged_while_mapped_anywhere() {
    let mut gated = Gated::new();
    gated.host.set("isolation.managed_memory", "charge");
    let bundle = gated.sleeping("left", 100);
    let lines = ["run", "start", "uvm-init", "uvm-register", "managed 8MiB", "leave-memory /gone"];
    let left = gated.exec(&bundle, &lines).ok();
    assert!(left.stdout.contains("managed ok"), "{left}");
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(200));
        gated.soon_accounts(&bundle.id, 8);
    }
    gated.fills(&bundle, 92);
    gated.host.runtime().exec(&bundle, &["touch", "/gone"]).ok();
    let freed = || gated.accounted_bytes(&bundle.id) == 0;
    assert!(eventually(freed), "{}", gated.host.log());
    gated.fills(&bundle, 100);
    gated.host.runtime().kill(&bundle, "KILL").ok();
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

#[test]
fn a_bundle_serves_one_container_after_another() {
    let gated = Gated::new();
    let docker = include_str!("../fixtures/seccomp/docker.json");
    for section in [json!(null), serde_json::from_str(docker).unwrap()] {
        let bundle = gated.bundle_with("first", |config| {
            ask(config, 1000);
            config["linux"]["seccomp"] = section;
            config["process"]["args"] = json!([RMTOOL, "fill"]);
        });
        for id in ["first", "first", "second"] {
            let again = Bundle { id: id.to_owned(), directory: bundle.directory.clone() };
            let filled = gated.host.runtime().run(&again).ok();
            assert_eq!(got_bytes(&filled), 1000 * MIB, "{id}: {filled}");
            gated.soon_is_empty();
        }
    }
}

/// As drivers from 590 on are asked to: whether a mapped range was of it, only the driver can determine.
#[test]
fn uvm_free_without_length_releases_only_its_ranges() {
    let gated = Gated::with_driver("590.48.01");
    let lines = [
        "start",
        "uvm-init",
        "uvm-range 0x1000000000 600MiB",
        "uvm-range 0x1025800000 300MiB",
        "alloc 200MiB as a",
        "alloc 400MiB as b",
        "alloc 300MiB as c",
        "uvm-map a at 0x1000000000",
        "uvm-map b at 0x100c800000",
        "uvm-map c at 0x1025800000",
        "free a",
        "free b",
        "free c",
        "uvm-free 0x1000000000 600MiB",
        "alloc 700MiB as d",
        "alloc 100MiB as e",
        "uvm-free 0x1025800000 300MiB",
        "alloc 300MiB as f",
        // Closed while the monitor has its copy.
        "free d",
        "uvm-init",
        "uvm-range 0x1000000000 700MiB",
        "alloc 700MiB as g",
        "uvm-map g at 0x1000000000",
        "free g",
        "close-uvm",
        "alloc 700MiB as h",
    ];
    let outcome = gated.run("range", 1000, &[&[RMTOOL, "run"], &lines[..]].concat());
    let said = format!("{outcome}");
    assert!(said.contains("alloc e status=0x51"), "{said}");
    assert_eq!(said.matches("status=").count(), 1, "{said}");
    assert_eq!(said.matches("errno=").count(), 0, "{said}");
    gated.soon_is_empty();
}

/// Of several GPUs NCCL makes nothing at all if it gets no multicast objects, which the gate
/// doesn't serve, unless a setting keeps it from asking.
#[test]
fn nccl_learns_unserved_features_unless_overridden() {
    let gated = Gated::new();
    let runtime = gated.host.runtime();
    let printed = ["sh", "-c", "echo nvls=$NCCL_NVLS_ENABLE"];
    let sleeping = |id: &str, gpus: &str, own: Option<&str>| {
        let bundle = gated.bundle_with(id, |config| {
            let env = config["process"]["env"].as_array_mut().expect("the environment is a list");
            env.push("ALIYUN_COM_GPU_MEM_CONTAINER=100".into());
            env.push("ALIYUN_COM_GPU_MEM_UNIT=MiB".into());
            env.push(format!("NVIDIA_VISIBLE_DEVICES={gpus}").into());
            env.extend(own.map(Into::into));
            config["process"]["args"] = json!(["sleep", "1000"]);
        });
        runtime.create(&bundle).ok();
        runtime.start(&bundle).ok();
        bundle
    };
    for (gpus, own, wanted) in
        [("0,1", None, "0"), ("0,1", Some("NCCL_NVLS_ENABLE=2"), "2"), ("0", None, "")]
    {
        let bundle = sleeping("app", gpus, own);
        let reported = runtime.exec(&bundle, &printed).ok();
        assert!(reported.has_line(&format!("nvls={wanted}")), "{gpus} {own:?}: {reported}");
        // As engines write it: the image's variables, and none of ours.
        let mut process = json!({
            "cwd": "/", "args": printed, "user": {"uid": 0, "gid": 0}, "env": ["PATH=/bin"],
        });
        process["env"].as_array_mut().expect("it is one").extend(own.map(Into::into));
        let file = gated.host.scratch.file("process.json", process.to_string());
        let mut exec = runtime.command();
        exec.args(["exec", "--process"]).arg(file).arg(&bundle.id);
        let reported = run_with_timeout(&mut exec, timeout()).ok();
        assert!(reported.has_line(&format!("nvls={wanted}")), "{gpus} {own:?}: {reported}");
        runtime.delete(&bundle).ok();
    }
}
