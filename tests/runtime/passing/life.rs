//! Containers with a quota, from create to delete.

use std::fs;

use serde_json::{Value, json};

use super::host::{
    ENGINES, Engine, GPU_MIB, Host, asking, assert_same, borrowed, config_bytes, said, uuid,
};
use crate::support::{Bundle, cgroups_are_unified, eventually};

/// What the container shows of its GPUs.
const SHOW: &str = "echo $NVIDIA_VISIBLE_DEVICES; cd /dev; echo nvidia*";

/// Gives the bundle what engines and users leave in one: nodes of all GPUs by every means.
fn with_foreign_nodes(config: &mut Value) {
    let device = |minor: u32| json!({"path": format!("/dev/nvidia{minor}"), "type": "c", "major": 195, "minor": minor});
    let rule = |minor: u32| json!({"allow": true, "type": "c", "major": 195, "minor": minor, "access": "rwm"});
    config["linux"]["devices"] = json!([device(0), device(2)]);
    config["linux"]["resources"]["devices"] =
        json!([{"allow": true, "access": "rwm"}, rule(0), rule(2)]);
    let mounts = config["mounts"].as_array_mut().expect("runc wrote a list");
    mounts.push(json!({
        "destination": "/dev/nvidia2", "source": "/dev/null", "type": "bind", "options": ["bind"],
    }));
}

#[test]
fn a_container_sees_its_gpus_and_no_others() {
    for engine in ENGINES {
        let host = Host::new(engine);
        for (id, gpus, nodes) in [
            ("one", "1", "nvidia1 nvidiactl"),
            ("two", "2,0", "nvidia0 nvidia2 nvidiactl"),
            ("all", "all", "nvidia0 nvidia1 nvidia2 nvidiactl"),
        ] {
            let bundle = host.bundle(id, &borrowed(&asking("3", gpus)), SHOW);
            if id == "one" {
                let mut config = bundle.config();
                with_foreign_nodes(&mut config);
                bundle.write_config(&config);
            }
            let wanted: Vec<usize> = match gpus {
                "all" => (0..3).collect(),
                list => list.split(',').map(|n| n.parse().expect("an index")).collect(),
            };
            let uuids: Vec<String> = wanted.into_iter().map(uuid).collect();
            let outcome = host.wrapped(&["run", "-b", id, id]);
            let expected = format!("{}\n{nodes}\n", uuids.join(","));
            assert_eq!(said(&outcome), (Some(0), expected, String::new()), "{id} {engine:?}");
        }
        assert!(host.registered().is_empty());
    }
}

/// Nodes that an engine declares one by one are its user's choice, and no others may be named next to them.
#[test]
fn single_nodes_differing_from_named_gpus_are_refused() {
    let host = Host::new(Engine::Runc);
    let bundle = host.bundle("id", &borrowed(&asking("3", "1")), "true");
    let mut config = bundle.config();
    with_foreign_nodes(&mut config);
    config["linux"]["resources"]["devices"] = json!([{"allow": false, "access": "rwm"}]);
    bundle.write_config(&config);
    let refused = host.wrapped(&["run", "-b", "id", "id"]).exits(1).stderr;
    let [own, brought] = [1, 0].map(|index| format!("GPU {index} ({})", uuid(index)));
    let expected =
        format!("NVIDIA_VISIBLE_DEVICES=1 means {own}, and the engine brought {brought}, ");
    assert!(refused.contains(&expected), "{refused}");
    assert!(host.registered().is_empty());
}

#[test]
fn device_cgroup_allows_only_the_containers_own_gpus() {
    // Without a cgroup manager, as on hybrid machines, crun sets no device rules.
    let engines = if cgroups_are_unified() { &ENGINES[..] } else { &[Engine::Runc] };
    for engine in engines {
        opens_its_gpus_and_no_others(*engine);
    }
}

/// The kernel has no such device, or has one of another driver: either way the answer
/// isn't EPERM, which is the cgroup's. Nodes are made in `/dev`, because the root file system may
/// lie on a `nodev` mount, as `/tmp` often is.
fn opens_its_gpus_and_no_others(engine: Engine) {
    let host = Host::new(engine);
    let line = "cd /dev; cat nvidia1; mknod own c 195 1; cat own; mknod other c 195 0; cat other; \
                mknod third c 195 2; cat third";
    let bundle = host.bundle("id", &borrowed(&asking("3", "1")), line);
    let mut config = bundle.config();
    with_foreign_nodes(&mut config);
    // Rules are no choice of GPUs, unlike the nodes that engines declare with them.
    config["linux"]["devices"] = json!([]);
    config["linux"]["resources"]["devices"][0]["allow"] = json!(false);
    for set in ["bounding", "effective", "permitted"] {
        let set = &mut config["process"]["capabilities"][set];
        set.as_array_mut().expect("runc wrote a list").push("CAP_MKNOD".into());
    }
    // So that mknod is answered by the cgroup only when the node is opened.
    let rules = config["linux"]["resources"]["devices"].as_array_mut().expect("we wrote a list");
    rules.push(json!({"allow": true, "type": "c", "access": "m"}));
    bundle.write_config(&config);

    let outcome = host.wrapped(&["run", "-b", "id", "id"]).exits(1);
    let (enxio, eperm) = ("No such device or address", "Operation not permitted");
    let expected = [
        format!("cat: can't open 'nvidia1': {enxio}\n"),
        format!("cat: can't open 'own': {enxio}\n"),
        format!("cat: can't open 'other': {eperm}\n"),
        format!("cat: can't open 'third': {eperm}\n"),
    ];
    assert_eq!(outcome.stderr, expected.concat(), "{engine:?}");
}

/// As `kubectl debug --target` makes one: in the other container's process namespace, with the capability to
/// inspect its processes.
#[test]
fn debug_container_cannot_open_its_targets_gpus() {
    let engines = if cgroups_are_unified() { &ENGINES[..] } else { &[Engine::Runc] };
    for engine in engines {
        let host = Host::new(*engine);
        let inspected = host.bundle("held", &borrowed(&asking("3", "1")), "exec sleep 1000");
        let dir = inspected.directory.to_string_lossy().into_owned();
        let (pid_file, log) = (format!("{dir}/init.pid"), format!("{dir}/log"));
        host.wrapped(&["--log", &log, "create", "-b", &dir, "--pid-file", &pid_file, "held"]).ok();
        host.wrapped(&["start", "held"]).ok();
        let pid = fs::read_to_string(&pid_file).expect("runc wrote it");
        let line = "cd /proc/1/root/dev; cat null; cat nvidia1";
        let debug = host.bundle("debug", &[], line);
        let mut config = debug.config();
        for set in ["bounding", "effective", "permitted"] {
            let set = &mut config["process"]["capabilities"][set];
            set.as_array_mut().expect("runc wrote a list").push("CAP_SYS_PTRACE".into());
        }
        let namespaces = config["linux"]["namespaces"].as_array_mut().expect("runc wrote a list");
        let of_pids = namespaces.iter_mut().find(|namespace| namespace["type"] == "pid");
        of_pids.expect("it has one")["path"] = format!("/proc/{}/ns/pid", pid.trim()).into();
        debug.write_config(&config);
        let outcome = host.wrapped(&["run", "-b", "debug", "debug"]).exits(1);
        // It got there: the node is seen, and its opening is what the cgroup refuses.
        assert_eq!(
            outcome.stderr, "cat: can't open 'nvidia1': Operation not permitted\n",
            "{engine:?}"
        );
        host.wrapped(&["delete", "--force", "held"]).ok();
    }
}

/// `docker run --device-cgroup-rule 'c 195:* rmw'`: cgroup v1 takes no device out of it.
#[test]
fn rule_for_all_nvidia_nodes_blocks_no_start() {
    for engine in ENGINES {
        let host = Host::new(engine);
        let bundle = host.bundle("wide", &borrowed(&asking("3", "1")), "true");
        let mut config = bundle.config();
        config["linux"]["resources"]["devices"] = json!([
            {"allow": false, "access": "rwm"},
            {"allow": true, "type": "c", "access": "m"},
            {"allow": true, "type": "c", "major": 195, "access": "rwm"},
        ]);
        bundle.write_config(&config);
        runs(&host, &bundle);
    }
}

/// An engine's calls print nothing, and ps shows the container from create to delete.
#[test]
fn engine_calls_are_silent_and_visible_to_ps() {
    for engine in ENGINES {
        let host = Host::new(engine);
        let bundle = host.bundle("held", &borrowed(&asking("4", "1")), "exec sleep 1000");
        let quiet = |args: &[&str]| {
            let outcome = host.wrapped(args);
            assert_eq!(said(&outcome), (Some(0), String::new(), String::new()), "{outcome}");
        };
        let dir = bundle.directory.to_string_lossy().into_owned();
        let (log, pid_file) = (format!("{dir}/log.json"), format!("{dir}/init.pid"));
        quiet(&[
            "--log",
            &log,
            "--log-format",
            "json",
            "create",
            "--bundle",
            &dir,
            "--pid-file",
            &pid_file,
            "held",
        ]);
        let shown = || host.registered();
        let pid: i64 =
            fs::read_to_string(&pid_file).expect("runc wrote it").parse().expect("a pid");
        assert_eq!(shown().len(), 1);
        assert_eq!(shown()[0]["id"], "held");
        assert_eq!(shown()[0]["state"], "created");
        assert_eq!(shown()[0]["pid"], pid);
        assert_eq!(shown()[0]["gpus"][0]["uuid"], uuid(1));
        let limit = GPU_MIB * 4 / 15;
        assert_eq!(shown()[0]["gpus"][0]["memory_limit_bytes"], limit << 20);
        quiet(&["start", "held"]);
        assert_eq!(shown().len(), 1);
        quiet(&["kill", "held", "KILL"]);
        let stopped = || host.bare(&["state", "held"]).ok().json()["status"] == "stopped";
        assert!(eventually(stopped));
        quiet(&["delete", "held"]);
        assert!(shown().is_empty(), "{:?}", shown());
        assert_eq!(fs::read_dir(host.path("state/containers")).expect("it is there").count(), 0);
        assert_eq!(fs::read_to_string(&log).unwrap_or_default(), "");
    }
}

/// Of a variable given twice, the last counts for the process and for cgpu.
#[test]
fn last_of_duplicate_variables_counts_for_cgpu_too() {
    for engine in ENGINES {
        let host = Host::new(engine);
        let env = [
            "ALIYUN_COM_GPU_MEM_CONTAINER=99",
            "NVIDIA_VISIBLE_DEVICES=0",
            "ALIYUN_COM_GPU_MEM_DEV=15",
            "ALIYUN_COM_GPU_MEM_CONTAINER=3",
            "NVIDIA_VISIBLE_DEVICES=2",
        ];
        let bundle = host.bundle("twice", &env, "");
        let mut config = bundle.config();
        config["process"]["args"] = json!(["env"]);
        bundle.write_config(&config);
        let lines = |outcome: &crate::support::Outcome, name: &str| -> Vec<String> {
            let lines = outcome.stdout.lines().filter(|line| line.starts_with(name));
            lines.map(str::to_owned).collect()
        };
        let bare = host.bare(&["run", "-b", "twice", "twice"]).ok();
        assert_eq!(lines(&bare, "ALIYUN_COM_GPU_MEM_C"), ["ALIYUN_COM_GPU_MEM_CONTAINER=3"]);
        assert_eq!(lines(&bare, "NVIDIA"), ["NVIDIA_VISIBLE_DEVICES=2"]);
        let wrapped = host.wrapped(&["run", "-b", "twice", "twice"]).ok();
        assert_eq!(lines(&wrapped, "ALIYUN_COM_GPU_MEM_C"), ["ALIYUN_COM_GPU_MEM_CONTAINER=3"]);
        let expected = format!("NVIDIA_VISIBLE_DEVICES={}", uuid(2));
        assert_eq!(lines(&wrapped, "NVIDIA"), [expected]);
    }
}

#[test]
fn bundle_hooks_stay_and_run_next_to_ours() {
    for engine in ENGINES {
        let host = Host::new(engine);
        let bundle = host.bundle("hooked", &borrowed(&asking("3", "0")), SHOW);
        // It reads its standard input: crun takes a broken pipe for a failure.
        let hook = |stage: &str| {
            let file = host.path(&format!("{stage}-ran"));
            let line = format!("cat >/dev/null; echo x >>{}", file.display());
            json!([{"path": "/bin/sh", "args": ["sh", "-c", line], "env": ["PATH=/bin"]}])
        };
        let stages = ["prestart", "createRuntime", "poststart", "poststop"];
        let mut config = bundle.config();
        config["hooks"] = stages.iter().map(|stage| ((*stage).to_owned(), hook(stage))).collect();
        let before = config["hooks"].clone();
        bundle.write_config(&config);
        host.wrapped(&["run", "-b", "hooked", "hooked"]).ok();
        for stage in stages {
            let ran = fs::read_to_string(host.path(&format!("{stage}-ran"))).unwrap_or_default();
            assert_eq!(ran, "x\n", "{stage} {engine:?}");
            assert_eq!(bundle.config()["hooks"][stage][0], before[stage][0], "the first is theirs");
        }
        assert!(host.registered().is_empty());
    }
}

#[test]
fn second_run_leaves_an_edited_bundle_unchanged() {
    for engine in ENGINES {
        let host = Host::new(engine);
        let bundle = host.bundle("again", &borrowed(&asking("3", "1")), SHOW);
        let original = config_bytes(&bundle);
        let first = host.wrapped(&["run", "-b", "again", "again"]).ok();
        let edited = config_bytes(&bundle);
        assert_ne!(edited, original);
        let second = host.wrapped(&["run", "-b", "again", "again"]).ok();
        assert_eq!(second.stdout, first.stdout);
        assert_eq!(
            String::from_utf8_lossy(&config_bytes(&bundle)),
            String::from_utf8_lossy(&edited)
        );
    }
}

#[test]
fn a_restore_that_fails_leaves_nothing_behind() {
    for engine in ENGINES {
        let host = Host::new(engine);
        let bundle = host.bundle("id", &borrowed(&asking("3", "1")), SHOW);
        host.scratch.directory("image");
        let args = ["restore", "--image-path", "image", "--bundle", "id", "id"];
        let bare = host.bare(&args).fails();
        // crun 1.21 leaves a directory of its own, and refuses the same id from then on.
        let forget = || drop(host.bare(&["delete", "--force", "id"]));
        forget();
        let wrapped = host.wrapped(&args);
        assert_same(&bare, &wrapped);
        assert!(host.registered().is_empty());
        forget();
        // What it left, the next create takes over.
        assert_same(&bare, &host.wrapped(&args));
        forget();
        runs(&host, &bundle);
    }
}

#[track_caller]
fn runs(host: &Host, bundle: &Bundle) {
    host.wrapped(&["run", "-b", &bundle.id, &bundle.id]).ok();
    assert!(host.registered().is_empty());
}
