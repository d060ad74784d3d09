//! What of a GPU's memory can be reserved, and what a host gives to containers that ask for nothing.

use serde_json::{Value, json};

use crate::engines::volume;
use crate::gated::{Gated, MIB, RMTOOL, got_bytes};
use crate::neutral::{docker, podman, run};
use crate::support::{IMAGE, Outcome, eventually};

/// Two GPUs with the driver's reserve on the first.
fn with_a_reserve() -> Gated {
    Gated::with_specs("535.161.08", &["16000MiB-512MiB".to_owned()])
}

/// The memory that the driver reserves is granted to no container.
#[test]
fn memory_reserved_by_driver_is_never_granted() {
    let gated = with_a_reserve();
    let shown = gated.host.cgpu(&["get", "gpu", "0"]).ok().stdout;
    assert!(shown.contains("memory_reserved=512MiB"), "{shown}");
    let shown = gated.host.cgpu(&["doctor"]).stdout;
    assert!(shown.contains("quotas share 15488 of 16000 MiB of GPU 0"), "{shown}");
    // All that can be had, one part by each engine, and each gets it to the last MiB.
    let (docker, podman, volume) = (docker(&gated), podman(&gated), volume());
    let one = ["-d", "--name", "one", "-e", "CGPU_MEMORY=8000MiB"];
    run(&docker, &one, &["sleep", "1000"]).ok();
    let two = ["-d", "--name", "two", "-e", "CGPU_MEMORY=7488MiB", "-v", &volume];
    podman.run(&[&two[..], &[IMAGE, "sleep", "1000"]].concat()).ok();
    let fill = [RMTOOL, "fill"];
    assert_eq!(got_bytes(&docker.exec("one", &fill).ok()), 8000 * MIB);
    assert_eq!(got_bytes(&podman.exec("two", &fill).ok()), 7488 * MIB);
    let third = ["--rm", "-e", "CGPU_MEMORY=1MiB"];
    let by_podman = podman.run(&[&third[..], &[IMAGE, "true"]].concat());
    for refused in [run(&docker, &third, &["true"]), by_podman] {
        let refused = refused.fails();
        for reported in ["has 0 MiB of 15488 MiB left", "asks for 1 MiB", "(CGPU_MEMORY=1MiB)"] {
            assert!(refused.stderr.contains(reported), "{refused}");
        }
    }
    let reported = gated.host.cgpu(&["events", "--json"]).ok().stdout;
    assert!(
        !reported.contains("the driver no memory"),
        "every one was refused for its quota: {reported}"
    );
    docker.remove("one").ok();
    podman.remove("two").ok();
    gated.soon_is_empty();
}

#[test]
fn driver_refusal_below_quota_is_reported_with_reason() {
    // The documents' ratio, to a whole GPU.
    let all = ["-e", "ALIYUN_COM_GPU_MEM_CONTAINER=15", "-e", "ALIYUN_COM_GPU_MEM_DEV=15"];
    let options = [&["-d", "--name", "all", "-e", "NVIDIA_VISIBLE_DEVICES=0"], &all[..]].concat();
    let sleep = ["sleep", "1000"];
    let fill = [RMTOOL, "fill"];
    let is_reported = |gated: &Gated, filled: &Outcome| {
        assert_eq!(got_bytes(filled), 15_488 * MIB);
        let reason = "the quota has memory left and the driver has none";
        assert!(eventually(|| gated.host.log().contains(reason)), "{}", gated.host.log());
        let reported = gated.host.cgpu(&["events"]).ok().stdout;
        assert!(reported.contains(reason), "{reported}");
        // It breaks lines.
        let doctor = gated.host.cgpu(&["doctor"]).stdout;
        let words: Vec<_> = doctor.split_whitespace().collect();
        assert!(words.join(" ").contains(reason), "{doctor}");
    };
    let gated = with_a_reserve();
    let docker = docker(&gated);
    run(&docker, &options, &sleep).ok();
    assert_eq!(gated.host.limits_mib(docker.inspect("all", "{{.Id}}").trim()), [16_000]);
    is_reported(&gated, &docker.exec("all", &fill).ok());
    docker.remove("all").ok();
    gated.soon_is_empty();

    let gated = with_a_reserve();
    let (podman, volume) = (podman(&gated), volume());
    podman.run(&[&options[..], &["-v", &volume, IMAGE], &sleep].concat()).ok();
    is_reported(&gated, &podman.exec("all", &fill).ok());
    podman.remove("all").ok();
    gated.soon_is_empty();
}

#[test]
fn configured_reserve_applies_over_smaller_driver_reserve() {
    let mut gated = Gated::new();
    gated.host.set("admission.reserve", "1GiB");
    let docker = docker(&gated);
    let one = ["-d", "--name", "one", "-e", "CGPU_MEMORY=50%", "-e", "CGPU_GPUS=device=0"];
    run(&docker, &one, &["sleep", "1000"]).ok();
    // Half of what can be shared.
    assert_eq!(gated.host.limits_mib(docker.inspect("one", "{{.Id}}").trim()), [7_488]);
    let two = ["--rm", "-e", "CGPU_MEMORY=8GiB", "-e", "CGPU_GPUS=device=0"];
    let refused = run(&docker, &two, &["true"]).fails();
    assert!(refused.stderr.contains("has 7488 MiB of 14976 MiB left"), "{refused}");
    docker.remove("one").ok();
    gated.soon_is_empty();
}

/// A host's default is the quota of the containers that name GPUs and ask for no quota.
#[test]
fn host_default_quota_applies_without_a_requested_quota() {
    let mut gated = Gated::new();
    gated.host.set("admission.default_memory", "2000MiB");
    let docker = docker(&gated);
    let run = |env: &[&str]| -> Outcome {
        run(&docker, &[&["-d", "--name", "demo"], env].concat(), &["sleep", "1000"])
    };
    let quotas = |gated: &Gated, env: &[&str]| -> Vec<Option<u64>> {
        run(env).ok();
        let containers = gated.host.ps();
        let gpus = containers.first().map(|container| container["gpus"].clone());
        docker.remove("demo").ok();
        let gpus = gpus.unwrap_or(json!([]));
        let mib = |gpu: &Value| gpu["memory_limit_bytes"].as_u64().map(|bytes| bytes / MIB);
        gpus.as_array().unwrap().iter().map(mib).collect()
    };
    const FIRST: [&str; 2] = ["-e", "NVIDIA_VISIBLE_DEVICES=0"];
    let with = |more: &[&'static str]| [&FIRST[..], more].concat();
    assert_eq!(quotas(&gated, &FIRST), [Some(2000)]);
    assert_eq!(quotas(&gated, &["-e", "NVIDIA_VISIBLE_DEVICES=all"]), [Some(2000), Some(2000)]);
    assert_eq!(quotas(&gated, &["-e", "CGPU_GPUS=1"]), [Some(2000)]);
    assert_eq!(quotas(&gated, &with(&["-e", "ALIYUN_COM_GPU_MEM_CONTAINER="])), [Some(2000)]);
    assert_eq!(quotas(&gated, &with(&["-e", "CGPU_MEMORY=1000MiB"])), [Some(1000)]);
    assert_eq!(quotas(&gated, &with(&["-e", "CGPU_MEMORY=0"])), [None]);
    assert_eq!(quotas(&gated, &with(&["-e", "ALIYUN_COM_GPU_MEM_CONTAINER=0"])), [None]);
    assert_eq!(quotas(&gated, &with(&["-e", "CGPU_DISABLE=true"])), [None]);
    assert_eq!(quotas(&gated, &[]), [], "one that names nothing is none of ours");
    let reported = gated.host.cgpu(&["events", "--json"]).ok().stdout;
    assert!(reported.contains("\"quota_by\":\"admission.default_memory=2000MiB\""), "{reported}");

    // It holds, and can be changed at once.
    run(&FIRST).ok();
    assert_eq!(got_bytes(&docker.exec("demo", &[RMTOOL, "fill"]).ok()), 2000 * MIB);
    docker.remove("demo").ok();
    gated.host.cgpu(&["set", "host", "default_memory=1GiB"]).ok();
    assert_eq!(gated.host.cgpu(&["get", "host", "default_memory"]).ok().stdout, "1024MiB\n");
    assert_eq!(quotas(&gated, &FIRST), [Some(1024)]);
    let reported = gated.host.cgpu(&["events", "--json"]).ok().stdout;
    assert!(reported.contains("\"setting\":\"default_memory=1024MiB\""), "{reported}");
    // Under strict it is what keeps such a container from being refused.
    gated.host.set("admission.profile", "strict");
    assert_eq!(quotas(&gated, &FIRST), [Some(1024)]);
    let refused = run(&with(&["-e", "CGPU_MEMORY=0"])).fails();
    assert!(refused.stderr.contains("without a quota"), "{refused}");
    docker.remove("demo").ok();
    gated.host.cgpu(&["set", "host", "default_memory=0"]).ok();
    let refused = run(&FIRST).fails();
    assert!(refused.stderr.contains("without a quota"), "{refused}");
    docker.remove("demo").ok();
    // What can't be read is not taken for none.
    let file = gated.host.state_dir().join("host");
    std::fs::write(&file, "{").unwrap();
    let refused = run(&FIRST).fails();
    assert!(refused.stderr.contains("what this host gives it can't be read"), "{refused}");
    docker.remove("demo").ok();
    assert_eq!(quotas(&gated, &with(&["-e", "CGPU_MEMORY=1000MiB"])), [Some(1000)]);
    gated.host.cgpu(&["set", "host", "default_memory=0"]).ok();
    gated.soon_is_empty();
}
