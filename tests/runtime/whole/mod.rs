//! Unlimited GPUs: containers that name GPUs and have no quota, side by side with those that have one.
//!
//! What arrives is asked of the containers themselves: device nodes, the variable, and what
//! `cgpu ps` says meanwhile. Needs root, runc, crun and docker.

#![allow(clippy::unwrap_used, reason = "clippy.toml allows it in tests, not in their helpers")]

mod claimed;
mod granted;
mod mig;
mod recorded;

use std::fs;

use serde_json::{Value, json};

use crate::host::Host;
use crate::support::{Bundle, Containerd, Docker, IMAGE, Image};

/// What a container sees: its nodes of NVIDIA's, and the variable.
const INSPECT: &str = "cd /dev; echo nvidia*; echo \"[$NVIDIA_VISIBLE_DEVICES]\"";

const RUNTIME: &str = env!("CARGO_BIN_EXE_cgpu-runtime");

/// A host with two GPUs; by backend `none` nothing needs a driver.
fn host() -> Host {
    let gpu = |index: u32, uuid: &str| json!({"index": index, "uuid": uuid, "memory_mib": 16_000});
    let mut host = Host::with_gpus(&json!([gpu(0, "GPU-a"), gpu(1, "GPU-b")]));
    for node in ["nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"] {
        host.scratch.file(&format!("driver/dev/{node}"), "");
    }
    // The machine may have NVIDIA's toolkit.
    host.set("driver.nvidia_runtime", "/nowhere/nvidia-container-runtime");
    host.keep_log();
    host
}

/// A bundle that asks so and prints what it sees.
fn bundle(host: &Host, id: &str, env: &[&str], annotations: &[(&str, &str)]) -> Bundle {
    host.bundle(id, |config| {
        let variables = config["process"]["env"].as_array_mut().unwrap();
        variables.extend(env.iter().map(|variable| json!(variable)));
        for (name, value) in annotations {
            config["annotations"][name] = json!(value);
        }
        config["process"]["args"] = json!(["sh", "-c", INSPECT]);
    })
}

/// A row of the table: what is asked for, and what arrives.
struct Row {
    env: &'static [&'static str],
    annotations: &'static [(&'static str, &'static str)],
    /// The nodes of GPUs; `None` where the bundle isn't touched.
    gpus: Option<&'static str>,
    /// NVIDIA_VISIBLE_DEVICES in the container.
    reported: &'static str,
    /// As `cgpu ps` calls it.
    mode: &'static str,
}

const fn row(
    env: &'static [&'static str],
    gpus: Option<&'static str>,
    reported: &'static str,
    mode: &'static str,
) -> Row {
    Row { env, annotations: &[], gpus, reported, mode }
}

const QUOTA: &str = "ALIYUN_COM_GPU_MEM_CONTAINER=3";
const TOTAL: &str = "ALIYUN_COM_GPU_MEM_DEV=15";

const TABLE: &[Row] = &[
    row(&[], None, "", ""),
    row(&["NVIDIA_VISIBLE_DEVICES="], None, "", ""),
    row(&["NVIDIA_VISIBLE_DEVICES=void"], None, "void", ""),
    row(&[QUOTA, TOTAL, "CGPU_DISABLE=true"], None, "", ""),
    row(&["ALIYUN_COM_GPU_MEM_CONTAINER=0"], None, "", ""),
    row(&["NVIDIA_VISIBLE_DEVICES=none"], Some(""), "none", "whole"),
    row(&["NVIDIA_VISIBLE_DEVICES=0"], Some("nvidia0 "), "GPU-a", "whole"),
    row(&["NVIDIA_VISIBLE_DEVICES=GPU-b"], Some("nvidia1 "), "GPU-b", "whole"),
    row(&["NVIDIA_VISIBLE_DEVICES=1,0"], Some("nvidia0 nvidia1 "), "GPU-b,GPU-a", "whole"),
    row(&["NVIDIA_VISIBLE_DEVICES=all"], Some("nvidia0 nvidia1 "), "GPU-a,GPU-b", "whole"),
    row(&["ALIYUN_COM_GPU_VISIBLE_DEVICES=1"], Some("nvidia1 "), "GPU-b", "whole"),
    row(
        &["ALIYUN_COM_GPU_MEM_CONTAINER=0", TOTAL, "NVIDIA_VISIBLE_DEVICES=1"],
        Some("nvidia1 "),
        "GPU-b",
        "unenforced",
    ),
    row(
        &[QUOTA, TOTAL, "CGPU_DISABLE=true", "NVIDIA_VISIBLE_DEVICES=1"],
        Some("nvidia1 "),
        "1",
        "unenforced",
    ),
    row(&[QUOTA, TOTAL, "NVIDIA_VISIBLE_DEVICES=1"], Some("nvidia1 "), "GPU-b", "unenforced"),
    Row {
        annotations: &[("aliyun.com/gpu-visible-devices", "1")],
        ..row(&[], Some("nvidia1 "), "GPU-b", "whole")
    },
    Row {
        annotations: &[("aliyun.com/gpu-visible-devices", "1")],
        ..row(&["NVIDIA_VISIBLE_DEVICES=all"], Some("nvidia1 "), "GPU-b", "whole")
    },
    Row {
        annotations: &[("aliyun.com/gpu-visible-devices", "1")],
        ..row(&["NVIDIA_VISIBLE_DEVICES=void"], None, "void", "")
    },
    // The container's variable reports the GPUs that ALIYUN_COM_GPU_VISIBLE_DEVICES names.
    row(
        &[
            QUOTA,
            "CGPU_DISABLE=true",
            "ALIYUN_COM_GPU_VISIBLE_DEVICES=0",
            "NVIDIA_VISIBLE_DEVICES=all",
        ],
        Some("nvidia0 "),
        "GPU-a",
        "unenforced",
    ),
    // An image says all, its user none.
    row(&["NVIDIA_VISIBLE_DEVICES=all", "ALIYUN_COM_GPU_VISIBLE_DEVICES=none"], None, "all", ""),
    // By CDI's name.
    row(&["NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=0"], Some("nvidia0 "), "GPU-a", "whole"),
    // For NVIDIA's toolkit, which alone knows what is meant.
    row(&["NVIDIA_VISIBLE_DEVICES=nvidia.com/gds=all"], None, "nvidia.com/gds=all", ""),
];

#[test]
fn what_is_asked_for_arrives() {
    let mut host = host();
    for real in [crate::support::program("runc"), host.scratch.crun_program()] {
        host.wrap(&real);
        let runtime = host.runtime();
        for (at, of) in TABLE.iter().enumerate() {
            let bundle = bundle(&host, &format!("row-{at}"), of.env, of.annotations);
            let file = bundle.directory.join("config.json");
            let before = fs::read(&file).unwrap();
            let seen = runtime.run(&bundle).ok().stdout;
            let what = format!("{:?} {:?} over {}", of.env, of.annotations, real.display());
            match of.gpus {
                Some(gpus) => {
                    let wanted = format!("nvidia-uvm {gpus}nvidiactl\n[{}]\n", of.reported);
                    assert_eq!(seen, wanted, "{what}");
                }
                None => {
                    assert_eq!(seen, format!("nvidia*\n[{}]\n", of.reported), "{what}");
                    assert_eq!(fs::read(&file).unwrap(), before, "{what}: it isn't touched");
                }
            }
            host.soon_releases_all();
            // While it's there.
            runtime.create(&bundle).ok();
            let listed = host.ps();
            assert_eq!(listed.len(), usize::from(of.gpus.is_some()), "{what}");
            assert!(listed.iter().all(|one| one["mode"] == of.mode), "{what}: {listed:?}");
            runtime.delete(&bundle).ok();
            host.soon_releases_all();
        }
    }
}

/// An unlimited GPU takes nothing of what is reserved, and the log says so.
#[test]
fn unlimited_gpu_reserves_nothing_and_is_logged() {
    let mut host = host();
    let runtime = host.runtime();
    let words = ["NVIDIA_VISIBLE_DEVICES=0"];
    let sleeping = |id: &str, env: &[&str]| bundle(&host, id, env, &[]);
    let whole = sleeping("whole", &words);
    let shared = sleeping("shared", &[QUOTA, TOTAL, words[0]]);
    let all = sleeping("rest", &["ALIYUN_COM_GPU_MEM_CONTAINER=12", TOTAL, words[0]]);
    runtime.create(&shared).ok();
    assert!(!host.log().contains("as a whole"), "{}", host.log());
    runtime.create(&whole).ok();
    let reported = host.log();
    assert!(
        reported.contains("this GPU is one container's as a whole, and others have quotas on it"),
        "{reported}"
    );
    runtime.create(&all).ok();
    let refused = runtime.create(&sleeping("more", &[QUOTA, TOTAL, words[0]])).exits(1);
    assert!(refused.stderr.contains("has 0 MiB of 16000 MiB left"), "{refused}");
    for bundle in [&whole, &shared, &all] {
        runtime.delete(bundle).ok();
    }
    host.soon_releases_all();
    // One of them at a time.
    host.set("admission.exclusive", true);
    let runtime = host.runtime();
    for (first, second, holder) in
        [(&whole, &shared, "whole: the whole GPU"), (&shared, &whole, "shared: 3200 MiB")]
    {
        runtime.create(first).ok();
        let refused = runtime.create(second).exits(1);
        assert!(refused.stderr.contains(holder), "{refused}");
        runtime.delete(first).ok();
        host.soon_releases_all();
    }
}

#[test]
fn unavailable_unlimited_gpu_is_refused_with_reason() {
    let mut host = host();
    for (id, env, parts) in [
        ("unknown", "NVIDIA_VISIBLE_DEVICES=7", ["no GPU 7", "GPU 0 (GPU-a)"]),
        ("uuid", "NVIDIA_VISIBLE_DEVICES=GPU-c", ["GPU-c", "GPU 1 (GPU-b)"]),
        ("word", "NVIDIA_VISIBLE_DEVICES=first", ["first", "NVIDIA_VISIBLE_DEVICES"]),
    ] {
        let bundle = bundle(&host, id, &[env], &[]);
        let before = fs::read(bundle.directory.join("config.json")).unwrap();
        let refused = host.runtime().create(&bundle);
        host.was_reported(refused, &bundle, &parts);
        assert_eq!(fs::read(bundle.directory.join("config.json")).unwrap(), before);
    }
    host.set("admission.require_quota", true);
    let by_variable = bundle(&host, "strict", &["NVIDIA_VISIBLE_DEVICES=0"], &[]);
    let name = "aliyun.com/gpu-visible-devices";
    let by_annotation = bundle(&host, "annotated", &[], &[(name, "0")]);
    for bundle in [by_variable, by_annotation] {
        let refused = host.runtime().create(&bundle);
        host.was_reported(refused, &bundle, &["(require_quota)"]);
    }
    assert_eq!(host.records(), [].into());
}

/// Who isn't the host's root gives out whole GPUs (`runtime rootless::`), and none where they are counted.
#[test]
fn unprivileged_engine_gives_unlimited_but_no_exclusive_gpus() {
    let mut host = host();
    let script = host.scratch.script("real", "#!/bin/sh\necho \"made by $0\"\n");
    host.wrap(&script);
    let whole = bundle(&host, "whole", &["NVIDIA_VISIBLE_DEVICES=all"], &[]);
    let made = host.runtime().run_by(&["unshare", "--user", "--map-root-user"], &whole).ok();
    assert!(made.stdout.starts_with("made by "), "{made}");
    host.set("admission.exclusive", true);
    let refused = host.runtime().run_by(&["unshare", "--user", "--map-root-user"], &whole).exits(1);
    assert!(refused.stderr.contains("exclusive = true; run the engine as root"), "{refused}");
}

/// Nothing is enforced on it, so nothing is lost with its record.
#[test]
fn unlimited_container_accepts_exec_without_its_record() {
    let host = host();
    let runtime = host.runtime();
    let whole = bundle(&host, "whole", &["NVIDIA_VISIBLE_DEVICES=0"], &[]);
    let mut config = whole.config();
    config["process"]["args"] = json!(["sleep", "1000"]);
    whole.write_config(&config);
    runtime.create(&whole).ok();
    runtime.start(&whole).ok();
    for record in host.records() {
        fs::remove_file(host.state_dir().join("containers").join(record)).unwrap();
    }
    assert_eq!(runtime.exec(&whole, &["ls", "/dev/nvidia0"]).ok().text(), "/dev/nvidia0");
    runtime.delete(&whole).ok();
}

/// What its engine or user gives a container in addition is theirs to give, and counts as the container's.
#[test]
fn node_added_by_user_counts_as_containers_gpu() {
    let mut host = host();
    let whole = |host: &Host, id: &str| {
        let bundle = bundle(host, id, &["NVIDIA_VISIBLE_DEVICES=0"], &[]);
        let mut config = bundle.config();
        let source = host.scratch.path().join("driver/dev/nvidia1");
        config["mounts"].as_array_mut().unwrap().push(json!({
            "destination": "/dev/nvidia1", "type": "bind", "source": source, "options": ["bind"],
        }));
        bundle.write_config(&config);
        let seen = host.runtime().run(&bundle).ok().stdout;
        host.runtime().create(&bundle).ok();
        let gpus = host.container(id)["gpus"].as_array().unwrap().len();
        host.runtime().delete(&bundle).ok();
        (seen, gpus)
    };
    let both = || ("nvidia-uvm nvidia0 nvidia1 nvidiactl\n[GPU-a,GPU-b]\n".to_owned(), 2);
    assert_eq!(whole(&host, "free"), both());
    host.set("admission.exclusive", true);
    assert_eq!(whole(&host, "held"), both());
}

/// The configuration decides which containers may ask for unlimited GPUs.
#[test]
fn configuration_decides_which_containers_get_unlimited_gpus() {
    let mut host = host();
    let plan = |host: &Host, env: &[&str], edit: &dyn Fn(&mut Value)| {
        let id = format!("asks-{}", crate::host::names(host.scratch.path()).len());
        let bundle = bundle(host, &id, env, &[]);
        let mut config = bundle.config();
        edit(&mut config);
        bundle.write_config(&config);
        let words = ["inspect", "--bundle", &id, "--format", "json"];
        host.cgpu(&words).ok().json()["plan"].clone()
    };
    let all = ["NVIDIA_VISIBLE_DEVICES=all"];
    let annotated = |config: &mut Value| {
        config["annotations"]["aliyun.com/gpu-visible-devices"] = json!("1");
    };
    let privileged = |config: &mut Value| {
        config["process"]["capabilities"]["bounding"] = json!(["CAP_SYS_ADMIN"]);
    };
    assert_eq!(plan(&host, &all, &|_| {})["gpus"].as_array().unwrap().len(), 2);
    host.set("admission.accept_nvidia_visible_devices_envvar_when_unprivileged", false);
    assert_eq!(plan(&host, &all, &|_| {}), Value::Null);
    assert_eq!(plan(&host, &all, &annotated), Value::Null, "an image may have set it, too");
    assert_eq!(plan(&host, &all, &privileged)["gpus"].as_array().unwrap().len(), 2);
    // A quota is another matter, but not what is unlimited next to it; and a word against GPUs counts.
    let quota = [QUOTA, TOTAL, "NVIDIA_VISIBLE_DEVICES=1"];
    assert_eq!(plan(&host, &quota, &|_| {})["gpus"][0]["index"], 1);
    let void = ["NVIDIA_VISIBLE_DEVICES=void"];
    assert_eq!(plan(&host, &void, &annotated), Value::Null);
    let mixed = [QUOTA, TOTAL, "ALIYUN_COM_GPU_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=0,1"];
    let bundle = bundle(&host, "mixed", &mixed, &[]);
    let refused = host.runtime().create(&bundle);
    host.was_reported(refused, &bundle, &["asks for GPU 1 (GPU-b) without a quota"]);
    // NVIDIA's own hook, as docker's --gpus has it, brings them whatever is accepted.
    let hooked = |config: &mut Value| {
        let hook = json!([{"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["x"]}]);
        config["hooks"] = json!({"prestart": hook});
    };
    assert_eq!(plan(&host, &all, &hooked)["gpus"].as_array().unwrap().len(), 2);
    host.set("admission.accept_nvidia_visible_devices_envvar_when_unprivileged", true);
    host.set("driver.whole", "off");
    assert_eq!(plan(&host, &all, &|_| {}), Value::Null);
    assert_eq!(plan(&host, &[], &annotated), Value::Null);
}

/// A specification's own files are for every device of it, and for none of them.
#[test]
fn cdi_specification_gives_driver_files_without_a_gpu() {
    let mut host = host();
    let directory = host.scratch.directory("cdi");
    host.set("driver.cdi_dirs", vec![directory.display().to_string()]);
    let file = host.scratch.file("driver/libnvidia-ml.so.1", "the driver's\n");
    let node = host.scratch.path().join("driver/dev/nvidia0");
    let specification = json!({
        "cdiVersion": "0.5.0", "kind": "nvidia.com/gpu",
        "containerEdits": {"mounts": [{"hostPath": file, "containerPath": "/driver/file"}]},
        "devices": [{"name": "0", "containerEdits": {
            "deviceNodes": [{"path": "/dev/nvidia0", "hostPath": node}],
            "mounts": [{"hostPath": file, "containerPath": "/driver/of-gpu-0"}],
        }}],
    });
    host.scratch.file("cdi/nvidia.json", specification.to_string());
    let seen = |host: &Host, env: &str| {
        let bundle = bundle(host, &env.replace('=', "-"), &[env], &[]);
        let mut config = bundle.config();
        // Where mounts were is an empty file in the image afterwards.
        let files = "cd /driver; for file in *; do test ! -s $file || echo $file; done";
        config["process"]["args"] = json!(["sh", "-c", format!("{INSPECT}; {files}")]);
        bundle.write_config(&config);
        host.runtime().run(&bundle)
    };
    for whole in ["auto", "cdi"] {
        host.set("driver.whole", whole);
        let none = seen(&host, "NVIDIA_VISIBLE_DEVICES=none").ok().stdout;
        assert_eq!(none, "nvidia-uvm nvidiactl\n[none]\nfile\n", "{whole}");
        let first = seen(&host, "NVIDIA_VISIBLE_DEVICES=0").ok().stdout;
        assert_eq!(first, "nvidia-uvm nvidia0 nvidiactl\n[GPU-a]\nfile\nof-gpu-0\n", "{whole}");
    }
    fs::remove_file(directory.join("nvidia.json")).unwrap();
    let refused = seen(&host, "NVIDIA_VISIBLE_DEVICES=none").exits(1);
    assert!(refused.stderr.contains("no CDI specification of nvidia.com/gpu in"), "{refused}");
    host.soon_releases_all();
}

/// As with NVIDIA's runtime: an image that wants GPUs starts nowhere else, but where its user says
/// that it does without.
#[test]
fn image_wanting_all_gpus_is_refused_without_driver() {
    let mut host = host();
    host.set("inventory.source", "auto");
    host.set("driver.proc_root", host.scratch.directory("proc").display().to_string());
    for env in ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=none"] {
        let asks = bundle(&host, &env.replace('=', "-"), &[env], &[]);
        let before = fs::read(asks.directory.join("config.json")).unwrap();
        let refused = host.runtime().create(&asks);
        let parts = [env, "no NVIDIA driver on this host", "NVIDIA_VISIBLE_DEVICES=void"];
        host.was_reported(refused, &asks, &parts);
        assert_eq!(fs::read(asks.directory.join("config.json")).unwrap(), before);
    }
    assert_eq!(host.records(), [].into());
    for env in [&["NVIDIA_VISIBLE_DEVICES=void"][..], &[]] {
        host.runtime().run(&bundle(&host, &format!("starts-{}", env.len()), env, &[])).ok();
    }
    host.set("driver.whole", "off");
    host.runtime().run(&bundle(&host, "off", &["NVIDIA_VISIBLE_DEVICES=all"], &[])).ok();
}

/// It makes the container where it's installed, and gets the words as they were given.
#[test]
fn installed_nvidia_runtime_creates_unlimited_containers() {
    let mut host = host();
    let seen = host.scratch.path().join("seen");
    let runc = crate::support::program("runc");
    let script =
        format!("#!/bin/sh\necho \"$@\" >> {}\nexec {} \"$@\"\n", seen.display(), runc.display());
    let nvidia = host.scratch.script("nvidia-container-runtime", &script);
    host.set("driver.nvidia_runtime", nvidia.display().to_string());
    let runtime = host.runtime();
    let env = ["NVIDIA_VISIBLE_DEVICES=1", "NVIDIA_IMEX_CHANNELS=all"];
    let whole = bundle(&host, "whole", &env, &[]);
    runtime.create(&whole).ok();
    assert!(fs::read_to_string(&seen).unwrap().contains(" create "), "it was called");
    let given = whole.config()["process"]["env"].to_string();
    assert!(given.contains("NVIDIA_IMEX_CHANNELS=all"), "{given}");
    assert_eq!(host.ps()[0]["mode"], "whole");
    runtime.delete(&whole).ok();
    host.soon_releases_all();
    fs::remove_file(&seen).unwrap();
    let create = |host: &Host, id: &str, env: &[&str]| {
        let other = bundle(host, id, env, &[]);
        let runtime = host.runtime();
        runtime.create(&other).ok();
        assert_eq!(runtime.status(&other), "created", "{id}");
        runtime.delete(&other).ok();
        assert!(!seen.exists(), "{id}");
    };
    create(&host, "plain", &[]);
    create(&host, "shared", &[QUOTA, TOTAL, env[0]]);
    // It checks no `run`, and becomes the runtime of its own configuration.
    let run = runtime.run(&bundle(&host, "run", &env, &[])).ok();
    assert_eq!(run.stdout, "nvidia-uvm nvidia1 nvidiactl\n[GPU-b]\n");
    assert!(!seen.exists(), "run");
    let crun = host.scratch.crun_program();
    host.wrap(crun);
    create(&host, "by-crun", &env);
    host.wrap(&runc);
    host.set("driver.whole", "off");
    host.runtime().run(&bundle(&host, "off", &env, &[])).ok();
    assert!(!seen.exists(), "off");
}

/// As docker's default runtime, cgpu serves every kind of container side by side.
#[test]
fn docker_default_runtime_serves_every_container_kind() {
    let host = host();
    let docker = Docker::builder()
        .runtime(RUNTIME)
        .runtime_arg(format!("--cgpu-config={}", host.config().display()))
        .default_runtime()
        .start();
    docker.load(&Image::new("localhost/cuda:1").env("NVIDIA_VISIBLE_DEVICES", "all"));
    let nodes = |env: &[&str], image: &str| {
        let env: Vec<&str> = env.iter().flat_map(|variable| ["-e", variable]).collect();
        let all = [&["--rm"], &env[..], &[image, "sh", "-c", INSPECT]].concat();
        docker.run(&all).ok().stdout
    };
    docker
        .run(&["-d", "--name", "stays", "-e", "NVIDIA_VISIBLE_DEVICES=0", IMAGE, "sleep", "1000"])
        .ok();
    assert_eq!(nodes(&[], IMAGE), "nvidia*\n[]\n");
    let both = "nvidia-uvm nvidia0 nvidia1 nvidiactl\n[GPU-a,GPU-b]\n";
    assert_eq!(nodes(&[], "localhost/cuda:1"), both);
    let void = ["NVIDIA_VISIBLE_DEVICES=void"];
    assert_eq!(nodes(&void, "localhost/cuda:1"), "nvidia*\n[void]\n");
    let quota = [QUOTA, TOTAL, "NVIDIA_VISIBLE_DEVICES=1"];
    assert_eq!(nodes(&quota, IMAGE), "nvidia-uvm nvidia1 nvidiactl\n[GPU-b]\n");
    let disabled = [&quota[..], &["CGPU_DISABLE=true"]].concat();
    assert_eq!(nodes(&disabled, IMAGE), "nvidia-uvm nvidia1 nvidiactl\n[1]\n");
    assert_eq!(host.ps().len(), 1, "{:?}", host.ps());
    assert_eq!(docker.exec("stays", &["sh", "-c", "ls /dev/nvidia0"]).ok().text(), "/dev/nvidia0");
    docker.remove("stays").ok();
    host.soon_releases_all();
}

/// As Kubernetes uses it where no pod names a RuntimeClass: sandboxes are made by it, too.
#[test]
fn containerd_default_handler_serves_every_container_kind() {
    const CUDA: &str = "localhost/cuda:1";
    let host = host();
    let config = host.config().display().to_string();
    let containerd =
        Containerd::builder().runtime(RUNTIME).default_runtime().env("CGPU_CONFIG", config).start();
    containerd.load(&Image::new(CUDA).env("NVIDIA_VISIBLE_DEVICES", "all"));
    let cri = containerd.cri();
    let pod = cri.pod_config("any");
    let pod_id = cri.run_pod("", &pod);
    let mut annotated = cri.pod_config("annotated");
    annotated["annotations"] = json!({"aliyun.com/gpu-visible-devices": "1"});
    let annotated_id = cri.run_pod("", &annotated);
    assert_eq!(host.ps(), Vec::<Value>::new(), "sandboxes hold nothing");

    let quota = [QUOTA, TOTAL, "NVIDIA_VISIBLE_DEVICES=1"];
    let disabled = [&quota[..], &["CGPU_DISABLE=true"]].concat();
    let all = "nvidia-uvm nvidia0 nvidia1 nvidiactl\n[GPU-a,GPU-b]\n";
    let kinds: [(&str, &str, &[&str], &str, &str); 7] = [
        ("plain", IMAGE, &[], "nvidia*\n[]\n", ""),
        ("void", CUDA, &["NVIDIA_VISIBLE_DEVICES=void"], "nvidia*\n[void]\n", ""),
        (
            "none",
            IMAGE,
            &["NVIDIA_VISIBLE_DEVICES=none"],
            "nvidia-uvm nvidiactl\n[none]\n",
            "whole",
        ),
        ("baked", CUDA, &[], all, "whole"),
        ("shared", CUDA, &quota, "nvidia-uvm nvidia1 nvidiactl\n[GPU-b]\n", "unenforced"),
        ("disabled", CUDA, &disabled, "nvidia-uvm nvidia1 nvidiactl\n[1]\n", "unenforced"),
        ("annotated", IMAGE, &[], "nvidia-uvm nvidia1 nvidiactl\n[GPU-b]\n", "whole"),
    ];
    let mut running = Vec::new();
    for (name, image, env, seen, mode) in kinds {
        let (in_pod, of) = match name {
            "annotated" => (&annotated_id, &annotated),
            _ => (&pod_id, &pod),
        };
        let mut container = cri.container_config(name);
        container["image"]["image"] = json!(image);
        let pairs = env.iter().map(|variable| variable.split_once('=').unwrap());
        container["envs"] = pairs.map(|(key, value)| json!({"key": key, "value": value})).collect();
        container["command"] = json!(["sh", "-c", format!("{INSPECT}; exec sleep 1000")]);
        let id = cri.create(in_pod, &container, of);
        cri.start(&id).ok();
        // A line of a log is time, stream, tag and what the container wrote.
        let line = |line: &str| line.splitn(4, ' ').nth(3).map(|text| format!("{text}\n"));
        let said = || cri.logs(of, &container).lines().filter_map(line).collect::<String>();
        crate::support::wait_until(crate::support::timeout(), || said().lines().count() == 2);
        assert_eq!(said(), seen, "{name}");
        running.push((id, mode));
    }
    // All of them are there at once.
    let mut listed: Vec<_> = host.ps();
    listed.sort_by_key(|one| one["id"].to_string());
    let mut held: Vec<_> = running.iter().filter(|(_, mode)| !mode.is_empty()).collect();
    held.sort_unstable();
    let reported = |one: &Value| (one["id"].clone(), one["mode"].clone());
    let wanted: Vec<_> = held.iter().map(|(id, mode)| (json!(id), json!(mode))).collect();
    assert_eq!(listed.iter().map(reported).collect::<Vec<_>>(), wanted);
    for (id, _) in &running {
        cri.stop(id).ok();
        cri.remove(id).ok();
    }
    host.soon_releases_all();
    for id in [&pod_id, &annotated_id] {
        cri.remove_pod(id).ok();
    }
}

/// The GPU of a stopped container is replaced: it has another UUID after the boot.
#[test]
fn container_with_replaced_gpu_is_refused_with_remedy() {
    let (old, new) =
        ("GPU-c09d11f5-0000-4000-8000-000000000001", "GPU-c09d11f5-0000-4000-8000-000000000002");
    let host = host();
    let has = |uuid: &str| {
        let gpus = json!([{"index": 0, "uuid": uuid, "memory_mib": 16_000}]);
        host.scratch.file("gpus.json", gpus.to_string());
    };
    has(old);
    let asks = format!("NVIDIA_VISIBLE_DEVICES={old}");
    let bundles = ["first", "other"].map(|id| bundle(&host, id, &[&asks], &[]));
    host.runtime().run(&bundles[0]).ok();

    let config = format!("--cgpu-config={}", host.config().display());
    let docker = Docker::builder().runtime(RUNTIME).runtime_arg(config).start();
    let words = ["-d", "--name", "one", "--runtime=cgpu", "-e", &asks, IMAGE, "sleep", "1000"];
    docker.run(&words).ok();
    docker.call(&["stop", "-t", "0", "one"]).ok();

    has(new);
    let had = format!(
        "{asks}: this container had GPU {old} before, which this host no longer has: it was \
         replaced or removed; it has GPU 0 ({new}) (cgpu gpus shows them); create the container \
         again with the UUID or the index of one of them"
    );
    let never = format!("{asks}: this host has no GPU {old}: it was replaced or removed, or is");
    for (bundle, expected) in bundles.iter().zip([&had, &never]) {
        // As its engine writes it again.
        let anew = self::bundle(&host, &bundle.id, &[&asks], &[]);
        let _ = fs::remove_file(anew.directory.join("log.json"));
        host.was_reported(host.runtime().create(&anew), &anew, &[expected]);
    }
    let started = docker.call(&["start", "one"]);
    assert!(!started.status.success() && started.stderr.contains(&had), "{started}");
    docker.remove("one").ok();
    docker.run(&["--rm", "--runtime=cgpu", "-e", "NVIDIA_VISIBLE_DEVICES=0", IMAGE, "true"]).ok();
}
