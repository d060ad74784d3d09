//! What of a GPU's memory can be promised, and what a host gives to those who ask for nothing.

use serde_json::{Value, json};

use crate::engines::{config, volume};
use crate::gated::{Gated, MIB, RMTOOL, RUNTIME, got_bytes};
use crate::support::{Bundle, Docker, IMAGE, Outcome, eventually};

/// A sleeping container with these variables.
#[track_caller]
fn sleeping(gated: &Gated, id: &str, env: &[&str]) -> Bundle {
    let bundle = bundle(gated, id, env);
    gated.host.runtime().create(&bundle).ok();
    gated.host.runtime().start(&bundle).ok();
    bundle
}

fn bundle(gated: &Gated, id: &str, env: &[&str]) -> Bundle {
    gated.bundle_with(id, |config| {
        let all = config["process"]["env"].as_array_mut().expect("runc wrote a list");
        all.extend(env.iter().map(|variable| json!(variable)));
        config["process"]["args"] = json!(["sleep", "1000"]);
    })
}

#[test]
fn what_the_driver_keeps_is_promised_to_nobody() {
    let gated = Gated::with_specs("535.161.08", &["16000MiB-512MiB".to_owned()]);
    let shown = gated.host.cgpu(&["get", "gpu", "0"]).ok().stdout;
    assert!(shown.contains("memory_reserved=512MiB"), "{shown}");
    let shown = gated.host.cgpu(&["doctor"]).stdout;
    assert!(shown.contains("quotas share 15488 of 16000 MiB of GPU 0"), "{shown}");
    // All that can be had, and each gets it to the last MiB.
    let bundles = [
        sleeping(&gated, "one", &["CGPU_MEMORY=8000MiB"]),
        sleeping(&gated, "two", &["CGPU_MEMORY=7488MiB"]),
    ];
    for (bundle, mib) in bundles.iter().zip([8000, 7488]) {
        assert_eq!(got_bytes(&gated.exec(bundle, &["fill"]).ok()), mib * MIB);
    }
    let third = bundle(&gated, "third", &["CGPU_MEMORY=1MiB"]);
    let refused = gated.host.runtime().create(&third);
    let told = ["has 0 MiB of 15488 MiB left", "asks for 1 MiB", "(CGPU_MEMORY=1MiB)"];
    gated.host.was_told(refused, &third, &told);
    let told = gated.host.cgpu(&["events", "--json"]).ok().stdout;
    assert!(!told.contains("the driver no memory"), "every one was refused for its quota: {told}");
    for bundle in &bundles {
        gated.host.runtime().delete(bundle).ok();
    }
    gated.soon_is_empty();
}

#[test]
fn what_the_driver_refuses_below_the_quota_is_told_with_the_reason() {
    let gated = Gated::with_specs("535.161.08", &["16000MiB-512MiB".to_owned()]);
    // The documents' ratio, to a whole GPU.
    let all = ["ALIYUN_COM_GPU_MEM_CONTAINER=15", "ALIYUN_COM_GPU_MEM_DEV=15"];
    let bundle = sleeping(&gated, "all", &all);
    assert_eq!(gated.host.limits_mib("all"), [16_000]);
    assert_eq!(got_bytes(&gated.exec(&bundle, &["fill"]).ok()), 15_488 * MIB);
    let reason = "the quota has room and the driver no memory";
    assert!(eventually(|| gated.host.log().contains(reason)), "{}", gated.host.log());
    let told = gated.host.cgpu(&["events", "all"]).ok().stdout;
    assert!(told.contains(reason), "{told}");
    let doctor = gated.host.cgpu(&["doctor"]).stdout;
    assert!(doctor.contains(reason), "{doctor}");
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

#[test]
fn a_reserve_of_the_configuration_goes_where_the_driver_keeps_less() {
    let mut gated = Gated::new();
    gated.host.set("admission.reserve", "1GiB");
    let bundle = sleeping(&gated, "one", &["CGPU_MEMORY=50%", "CGPU_GPUS=device=0"]);
    // Half of what can be shared.
    assert_eq!(gated.host.limits_mib("one"), [7_488]);
    let second = self::bundle(&gated, "two", &["CGPU_MEMORY=8GiB", "CGPU_GPUS=device=0"]);
    let refused = gated.host.runtime().create(&second);
    gated.host.was_told(refused, &second, &["has 7488 MiB of 14976 MiB left"]);
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

#[test]
fn a_hosts_default_is_the_quota_of_those_who_name_gpus_and_ask_for_none() {
    let mut gated = Gated::new();
    gated.host.set("admission.default_memory", "2000MiB");
    let flag = format!("--cgpu-config={}", config(&gated));
    let docker = Docker::builder().runtime(RUNTIME).runtime_arg(flag).start();
    let volume = volume();
    let run = |env: &[&str]| -> Outcome {
        let options = ["-d", "--name", "demo", "--runtime=cgpu", "-v", &volume];
        docker.run(&[&options[..], env, &[IMAGE, "sleep", "1000"]].concat())
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
    let told = gated.host.cgpu(&["events", "--json"]).ok().stdout;
    assert!(told.contains("\"quota_by\":\"admission.default_memory=2000MiB\""), "{told}");

    // It holds, and can be changed at once.
    run(&FIRST).ok();
    assert_eq!(got_bytes(&docker.exec("demo", &[RMTOOL, "fill"]).ok()), 2000 * MIB);
    docker.remove("demo").ok();
    gated.host.cgpu(&["set", "host", "default_memory=1GiB"]).ok();
    assert_eq!(gated.host.cgpu(&["get", "host", "default_memory"]).ok().stdout, "1024MiB\n");
    assert_eq!(quotas(&gated, &FIRST), [Some(1024)]);
    let told = gated.host.cgpu(&["events", "--json"]).ok().stdout;
    assert!(told.contains("\"setting\":\"default_memory=1024MiB\""), "{told}");
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
