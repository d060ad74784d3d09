//! What NVIDIA's runtime 1.20 gives for the same requests, as it was recorded
//! (`tests/fixtures/whole`), next to what we give.

use super::mig::split_host;
use super::*;

/// The host of the recording of NVIDIA's runtime.
fn recorded_host() -> Host {
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};
    let mut host = split_host();
    let uuid = |kind: &str, digit: char| {
        format!("{kind}-{}-0000-4000-8000-000000000000", digit.to_string().repeat(8))
    };
    let mig = |index: u32, digit: char, gpu_instance: u32| {
        json!({"index": index, "uuid": uuid("MIG", digit), "memory_mib": 4864,
            "gpu_instance": gpu_instance, "compute_instance": 0})
    };
    let gpus = json!([
        {"index": 0, "uuid": uuid("GPU", 'a'), "memory_mib": 16_000},
        {"index": 1, "uuid": uuid("GPU", 'b'), "memory_mib": 40_000, "minor": 4, "mig_enabled": true,
         "mig_devices": [mig(0, 'c', 1), mig(3, 'd', 7)]},
    ]);
    host.scratch.file("gpus.json", gpus.to_string());
    for (name, major, minor) in [
        ("nvidiactl", 195, 255),
        ("nvidia-modeset", 195, 254),
        ("nvidia-uvm", 511, 0),
        ("nvidia-uvm-tools", 511, 1),
        ("nvidia0", 195, 0),
        ("nvidia4", 195, 4),
    ] {
        let path = host.scratch.path().join("driver/dev").join(name);
        let _ = fs::remove_file(&path);
        mknod(&path, SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(major, minor))
            .unwrap();
    }
    host.set("driver.cdi_dirs", vec![host.scratch.directory("cdi").display().to_string()]);
    host
}

/// What a container creation gave a bundle: nodes, and rules without their access.
fn given(before: &Value, after: &Value) -> (Vec<String>, Vec<String>) {
    let added = |pointer: &str, text: &dyn Fn(&Value) -> String| {
        let list = |config: &Value| config.pointer(pointer).and_then(Value::as_array).cloned();
        let before = list(before).unwrap_or_default();
        let new = list(after).unwrap_or_default().into_iter().filter(|item| !before.contains(item));
        let texts: std::collections::BTreeSet<_> = new.map(|item| text(&item)).collect();
        texts.into_iter().collect::<Vec<_>>()
    };
    let nodes = added("/linux/devices", &|node| node["path"].as_str().unwrap().to_owned());
    let rules = added("/linux/resources/devices", &|rule| {
        format!("{} {}:{}", rule["type"].as_str().unwrap(), rule["major"], rule["minor"])
    });
    (nodes, rules)
}

/// Where ours does something else, the fixture says what and why.
#[test]
fn nvidia_runtime_gives_same_except_explained_differences() {
    let text = include_str!("../../fixtures/whole/nvidia-runtime-1.20.0.json");
    let recorded: Value = serde_json::from_str(text).unwrap();
    let strings = |list: &Value| -> Vec<String> {
        list.as_array().unwrap().iter().map(|item| item.as_str().unwrap().to_owned()).collect()
    };
    for (at, row) in recorded["requests"].as_array().unwrap().iter().enumerate() {
        let mut host = recorded_host();
        if row["accept"] == false {
            host.set("admission.accept_nvidia_visible_devices_envvar_when_unprivileged", false);
        }
        if row["driver"] == false {
            host.set("inventory.source", "auto");
            host.set("driver.proc_root", host.scratch.directory("no-proc").display().to_string());
        }
        let env = strings(&row["ask"]);
        let env: Vec<&str> = env.iter().map(String::as_str).collect();
        let bundle = bundle(&host, &format!("row-{at}"), &env, &[]);
        let mut config = bundle.config();
        config["process"]["args"] = json!(["true"]);
        if row["privileged"] == true {
            config["process"]["capabilities"]["bounding"] = json!(["CAP_SYS_ADMIN"]);
        }
        bundle.write_config(&config);
        let outcome = host.runtime().run(&bundle);
        let after = bundle.config();
        let (nodes, rules) = given(&config, &after);
        let expected = if row["ours"].is_null() { row } else { &row["ours"] };
        if !expected["refused"].is_null() {
            assert_eq!(outcome.exits(1).stdout, "", "{row}");
            assert_eq!(after, config, "{row}");
            continue;
        }
        outcome.ok();
        if expected["untouched"] == true {
            assert_eq!(after, config, "{row}");
            continue;
        }
        assert_eq!(nodes, strings(&expected["nodes"]), "{row}");
        if row["ours"].is_null() {
            let rule = |rule: &String| rule.rsplit_once(' ').unwrap().0.to_owned();
            assert_eq!(rules, strings(&row["rules"]).iter().map(rule).collect::<Vec<_>>(), "{row}");
        }
        host.soon_releases_all();
    }
}
