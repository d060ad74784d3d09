//! MIG devices as a whole: their nodes, their names, and what stands against them.

use super::*;

/// A host whose second GPU is split: two MIG devices, nodes of their capabilities, and those of MIG
/// itself.
pub(crate) fn split_host() -> Host {
    let mig = json!([
        {"index": 0, "uuid": "MIG-one", "memory_mib": 4864, "gpu_instance": 1, "compute_instance": 0},
        {"index": 3, "uuid": "MIG-GPU-b/7/0", "memory_mib": 9728},
    ]);
    let mut host = Host::with_gpus(&json!([
        {"index": 0, "uuid": "GPU-a", "memory_mib": 16_000},
        {"index": 1, "uuid": "GPU-b", "memory_mib": 40_000, "minor": 4, "mig_enabled": true,
         "mig_devices": mig},
    ]));
    for node in ["nvidiactl", "nvidia-uvm", "nvidia0", "nvidia4"] {
        host.scratch.file(&format!("driver/dev/{node}"), "");
    }
    for (capability, number) in [
        ("mig/config", 1),
        ("mig/monitor", 2),
        ("gpu4/mig/gi1/access", 30),
        ("gpu4/mig/gi1/ci0/access", 31),
        ("gpu4/mig/gi7/access", 84),
        ("gpu4/mig/gi7/ci0/access", 85),
        ("gpu4/mig/gi9/access", 102),
        ("gpu0/mig/gi1/access", 3),
    ] {
        let text = format!("DeviceFileMinor: {number}\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
        let file = format!("proc/driver/nvidia/capabilities/{capability}");
        let (directory, _) = file.rsplit_once('/').unwrap();
        host.scratch.directory(directory);
        host.scratch.file(&file, text);
        capability_node(&host, number, number);
    }
    host.set("driver.proc_root", host.scratch.path().join("proc").display().to_string());
    host.set("driver.nvidia_runtime", "/nowhere/nvidia-container-runtime");
    host
}

/// The node `nvidia-capNAME`, by a major number that no driver has here.
fn capability_node(host: &Host, name: u64, minor: u64) {
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};
    let directory = host.scratch.directory("driver/dev/nvidia-caps");
    let path = directory.join(format!("nvidia-cap{name}"));
    let _ = fs::remove_file(&path);
    mknod(&path, SFlag::S_IFCHR, Mode::from_bits_truncate(0o444), makedev(CAPS_MAJOR, minor))
        .unwrap();
}

const CAPS_MAJOR: u64 = 507;

/// What a container sees of MIG: nodes with their minor numbers, and the variable.
const INSPECT_MIG: &str = "cd /dev; echo nvidia[0-9]*; stat -c '%n %T' nvidia-caps/* 2>/dev/null; \
                           echo \"[$NVIDIA_VISIBLE_DEVICES]\"";

fn mig_bundle(host: &Host, id: &str, env: &[&str], annotations: &[(&str, &str)]) -> Bundle {
    let bundle = bundle(host, id, env, annotations);
    let mut config = bundle.config();
    config["process"]["args"] = json!(["sh", "-c", INSPECT_MIG]);
    bundle.write_config(&config);
    bundle
}

#[test]
fn mig_devices_arrive_with_only_their_nodes() {
    let mut host = split_host();
    let one = "nvidia-caps/nvidia-cap30 1e\nnvidia-caps/nvidia-cap31 1f\n";
    let other = "nvidia-caps/nvidia-cap84 54\nnvidia-caps/nvidia-cap85 55\n";
    let first = format!("nvidia4\n{one}[MIG-one]\n");
    let second = format!("nvidia4\n{other}[MIG-GPU-b/7/0]\n");
    let both = format!("nvidia4\n{one}{other}[MIG-one,MIG-GPU-b/7/0]\n");
    let all = format!("nvidia0 nvidia4\n{one}{other}[GPU-a,MIG-one,MIG-GPU-b/7/0]\n");
    let annotated = [("aliyun.com/gpu-visible-devices", "1:0")];
    /// What is asked for by a variable and annotations; what is seen, and listed by `cgpu ps`.
    type Row<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a str, &'a [&'a str]);
    let rows: &[Row<'_>] = &[
        ("NVIDIA_VISIBLE_DEVICES=MIG-one", &[], &first, &["1:0"]),
        ("NVIDIA_VISIBLE_DEVICES=1:0", &[], &first, &["1:0"]),
        ("NVIDIA_VISIBLE_DEVICES=MIG-GPU-b/7/0", &[], &second, &["1:3"]),
        ("ALIYUN_COM_GPU_VISIBLE_DEVICES=1:3", &[], &second, &["1:3"]),
        ("NVIDIA_VISIBLE_DEVICES=1:0,1:3", &[], &both, &["1:0", "1:3"]),
        ("NVIDIA_VISIBLE_DEVICES=mig-all", &[], &both, &["1:0", "1:3"]),
        ("NVIDIA_VISIBLE_DEVICES=all", &[], &all, &["0", "1:0", "1:3"]),
        ("NVIDIA_VISIBLE_DEVICES=all", &annotated, &first, &["1:0"]),
        ("NVIDIA_VISIBLE_DEVICES=0", &[], "nvidia0\n[GPU-a]\n", &["0"]),
    ];
    for real in [crate::support::program("runc"), host.scratch.crun_program()] {
        host.wrap(&real);
        let runtime = host.runtime();
        for (at, (env, annotations, seen, devices)) in rows.iter().enumerate() {
            let bundle = mig_bundle(&host, &format!("mig-{at}"), &[env], annotations);
            assert_eq!(runtime.run(&bundle).ok().stdout, *seen, "{env} over {}", real.display());
            host.soon_releases_all();
            // The cgroup allows these nodes of that number, and is asked for no other.
            let rules = bundle.config()["linux"]["resources"]["devices"].clone();
            let allowed = rules.as_array().into_iter().flatten().filter_map(|rule| {
                let is_ours = rule["major"] == CAPS_MAJOR && rule["allow"] == true;
                is_ours.then(|| (rule["minor"].as_u64(), rule["access"].as_str() == Some("rw")))
            });
            let allowed: Vec<_> = allowed.collect();
            let nodes = seen.lines().filter_map(|line| line.strip_prefix("nvidia-caps/nvidia-cap"));
            let number = |node: &str| node.split(' ').next()?.parse().ok();
            let wanted: Vec<_> = nodes.map(|node| (number(node), true)).collect();
            assert_eq!(allowed, wanted, "{env}");
            // While it's there.
            runtime.create(&bundle).ok();
            let listed = host.ps();
            assert_eq!((listed.len(), &listed[0]["mode"]), (1, &json!("whole")), "{env}");
            let table = host.cgpu(&["ps"]).ok().stdout;
            let mut lines = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
            let column =
                lines.next().and_then(|names| names.iter().position(|name| *name == "GPU"));
            let column = column.unwrap_or_else(|| panic!("no column GPU: {table}"));
            let shown: Vec<_> = lines.map(|cells| cells[column]).collect();
            assert_eq!(shown, *devices, "{env}: {table}");
            runtime.delete(&bundle).ok();
            host.soon_releases_all();
        }
    }
}

/// Each of them is somebody's alone, where GPUs are.
#[test]
fn mig_device_is_exclusive_next_to_its_neighbour() {
    let mut host = split_host();
    host.set("admission.exclusive", true);
    let runtime = host.runtime();
    let ask = |id: &str, device: &str| {
        mig_bundle(&host, id, &[&format!("NVIDIA_VISIBLE_DEVICES={device}")], &[])
    };
    let (first, second) = (ask("first", "1:0"), ask("second", "1:3"));
    runtime.create(&first).ok();
    runtime.create(&second).ok();
    let refused = runtime.create(&ask("again", "MIG-one")).exits(1);
    assert!(refused.stderr.contains("(MIG-one) can't be held as a whole"), "{refused}");
    assert!(refused.stderr.contains("first: the whole GPU"), "{refused}");
    runtime.delete(&first).ok();
    let again = ask("once-more", "MIG-one");
    runtime.create(&again).ok();
    for bundle in [&second, &again] {
        runtime.delete(bundle).ok();
    }
    host.soon_releases_all();
}

#[test]
fn unavailable_mig_device_is_refused_with_reason() {
    let mut host = split_host();
    let refused = |host: &Host, env: &[&str], parts: &[&str]| {
        let id = format!("asks-{}", crate::host::names(host.scratch.path()).len());
        let bundle = mig_bundle(host, &id, env, &[]);
        let before = fs::read(bundle.directory.join("config.json")).unwrap();
        let outcome = host.runtime().create(&bundle);
        host.was_reported(outcome, &bundle, parts);
        assert_eq!(fs::read(bundle.directory.join("config.json")).unwrap(), before, "{env:?}");
        assert_eq!(host.records(), [].into(), "{env:?}");
    };
    let first = ["NVIDIA_VISIBLE_DEVICES=1:0"];
    refused(&host, &["NVIDIA_VISIBLE_DEVICES=1:1"], &["no MIG device 1:1", "1:0 (MIG-one)"]);
    refused(
        &host,
        &["NVIDIA_VISIBLE_DEVICES=1"],
        &["GPU 1 (GPU-b) is in MIG mode", "1:0 (MIG-one)"],
    );
    // A quota on one is another matter, as ever.
    refused(&host, &[QUOTA, TOTAL, first[0]], &["MIG device 1:0 can't be under the quota"]);
    let monitor = "NVIDIA_MIG_MONITOR_DEVICES=all";
    refused(&host, &[first[0], monitor], &[monitor, "CAP_SYS_ADMIN"]);
    // Its node is another's, or not there; then its capability isn't.
    let node = host.scratch.path().join("driver/dev/nvidia-caps/nvidia-cap31");
    let path = node.display().to_string();
    capability_node(&host, 31, 32);
    refused(&host, &first, &[&path, "has number 32", "nvidia-modprobe -f"]);
    fs::remove_file(&node).unwrap();
    refused(&host, &first, &[&path, "is missing, the node of gpu4/mig/gi1/ci0/access"]);
    let file = "proc/driver/nvidia/capabilities/gpu4/mig/gi1/ci0/access";
    fs::remove_file(host.scratch.path().join(file)).unwrap();
    refused(&host, &first, &["no node for gpu4/mig/gi1/ci0/access", "nvidia-smi -L"]);
    let gpu = json!([{"index": 1, "uuid": "GPU-b", "memory_mib": 1, "minor": 4, "mig_enabled": true,
        "mig_devices": [{"index": 0, "uuid": "MIG-one", "memory_mib": 1}]}]);
    host.scratch.file("gpus.json", gpu.to_string());
    refused(&host, &first, &["MIG device 1:0 (MIG-one)", "gpu_instance and compute_instance"]);
    // Where NVIDIA's runtime makes the container, it is asked.
    let runc = crate::support::program("runc");
    let script =
        host.scratch.script("nvidia", &format!("#!/bin/sh\nexec {} \"$@\"\n", runc.display()));
    host.set("driver.nvidia_runtime", script.display().to_string());
    let asked = mig_bundle(&host, "asked", &first, &[]);
    host.runtime().create(&asked).ok();
    let reported = asked.config()["process"]["env"].to_string();
    assert!(reported.contains("\"NVIDIA_VISIBLE_DEVICES=MIG-one\""), "{reported}");
    host.runtime().delete(&asked).ok();
    host.soon_releases_all();
}

#[test]
fn privileged_container_may_configure_and_watch_mig() {
    let host = split_host();
    let asks = mig_bundle(
        &host,
        "manager",
        &[
            "NVIDIA_VISIBLE_DEVICES=0",
            "NVIDIA_MIG_CONFIG_DEVICES=all",
            "NVIDIA_MIG_MONITOR_DEVICES=all",
        ],
        &[],
    );
    let mut config = asks.config();
    config["process"]["capabilities"]["bounding"] = json!(["CAP_SYS_ADMIN"]);
    asks.write_config(&config);
    let seen = host.runtime().run(&asks).ok().stdout;
    let nodes = "nvidia-caps/nvidia-cap1 1\nnvidia-caps/nvidia-cap2 2\n";
    assert_eq!(seen, format!("nvidia0\n{nodes}[GPU-a]\n"));
    host.soon_releases_all();
}

/// As NVIDIA's generator writes it: the device has the nodes, and the file is for all.
#[test]
fn cdi_mig_device_brings_files_without_duplicate_nodes() {
    let mut host = split_host();
    let directory = host.scratch.directory("cdi");
    host.set("driver.cdi_dirs", vec![directory.display().to_string()]);
    host.set("driver.whole", "cdi");
    let file = host.scratch.file("driver/libnvidia-ml.so.1", "the driver's\n");
    let node = |name: &str| {
        let host_path = host.scratch.path().join("driver/dev").join(name);
        json!({"path": format!("/dev/{name}"), "hostPath": host_path})
    };
    let device = |name: &str, gpu_instance: &str, compute_instance: &str| {
        let nodes = [node("nvidia4"), node(gpu_instance), node(compute_instance)];
        json!({"name": name, "containerEdits": {"deviceNodes": nodes}})
    };
    let specification = json!({
        "cdiVersion": "0.5.0", "kind": "nvidia.com/gpu",
        "containerEdits": {"mounts": [{"hostPath": file, "containerPath": "/driver/file"}]},
        "devices": [
            device("1:0", "nvidia-caps/nvidia-cap30", "nvidia-caps/nvidia-cap31"),
            device("1:3", "nvidia-caps/nvidia-cap84", "nvidia-caps/nvidia-cap85"),
        ],
    });
    host.scratch.file("cdi/nvidia.json", specification.to_string());
    let asks = mig_bundle(&host, "asks", &["NVIDIA_VISIBLE_DEVICES=MIG-one"], &[]);
    let mut config = asks.config();
    config["process"]["args"] = json!(["sh", "-c", format!("{INSPECT_MIG}; cat /driver/file")]);
    asks.write_config(&config);
    let seen = host.runtime().run(&asks).ok().stdout;
    let nodes = "nvidia-caps/nvidia-cap30 1e\nnvidia-caps/nvidia-cap31 1f\n";
    assert_eq!(seen, format!("nvidia4\n{nodes}[MIG-one]\nthe driver's\n"));
    let devices = asks.config()["linux"]["devices"].clone();
    let paths = devices.as_array().unwrap().iter().map(|device| device["path"].to_string());
    let paths: Vec<_> = paths.collect();
    let once: std::collections::BTreeSet<_> = paths.iter().collect();
    assert_eq!(once.len(), paths.len(), "{paths:?}");
    host.soon_releases_all();
    // One that the file doesn't know.
    let known = serde_json::to_string(&specification).unwrap().replace("\"1:0\"", "\"1:9\"");
    host.scratch.file("cdi/nvidia.json", known);
    let again = mig_bundle(&host, "again", &["NVIDIA_VISIBLE_DEVICES=MIG-one"], &[]);
    let refused = host.runtime().create(&again);
    host.was_reported(refused, &again, &["no CDI device", "MIG device 1:0 (MIG-one)"]);
    assert_eq!(host.records(), [].into());
}
