//! GPUs that others brought into a bundle, and what an image says: no quota is lost in silence.

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::engines::{APP, config, options, volume, was_held};
use crate::gated::{Gated, MIB, RMTOOL, RUNTIME, got_bytes, rmtool};
use crate::support::{Bundle, Containerd, Docker, IMAGE, Podman, eventually, program};

const QUOTA: [&str; 2] = ["ALIYUN_COM_GPU_MEM_CONTAINER=1000", "ALIYUN_COM_GPU_MEM_UNIT=MiB"];

/// What an engine does to a bundle by a CDI specification of GPU `index`, as docker 28, podman 5 and
/// containerd 2.1 do it; the nodes are the simulated driver's, which are files.
pub(crate) fn cdi(gated: &Gated, index: u32, visible: &str) -> impl Fn(&mut Value) {
    let dev = gated.sim.dir().join("dev");
    let visible = format!("NVIDIA_VISIBLE_DEVICES={visible}");
    move |config: &mut Value| {
        let names = ["nvidiactl".to_owned(), "nvidia-uvm".to_owned(), format!("nvidia{index}")];
        let mounts = config["mounts"].as_array_mut().expect("runc wrote a list");
        mounts.extend(names.iter().map(|name| {
            let to = format!("/dev/{name}");
            json!({"destination": to, "type": "bind", "source": dev.join(name), "options": ["rbind", "rw"]})
        }));
        config["process"]["env"].as_array_mut().expect("runc wrote a list").push(json!(visible));
    }
}

fn with_env(config: &mut Value, variables: &[&str]) {
    let env = config["process"]["env"].as_array_mut().expect("runc wrote a list");
    env.extend(variables.iter().map(|variable| json!(variable)));
}

fn file(bundle: &Bundle) -> PathBuf {
    bundle.directory.join("config.json")
}

/// A quota next to a CDI device is enforced, whatever the device's specification says.
#[test]
fn quota_next_to_cdi_device_is_enforced() {
    let gated = Gated::new();
    for (at, visible) in ["void", "none", "", "0"].into_iter().enumerate() {
        for by_annotation in [false, true] {
            let bundle = gated.bundle_with(&format!("app-{at}-{by_annotation}"), |config| {
                cdi(&gated, 0, visible)(config);
                match by_annotation {
                    false => with_env(config, &QUOTA),
                    true => {
                        config["annotations"]["aliyun.com/gpu-mem-container"] = json!("1000");
                        config["annotations"]["aliyun.com/gpu-mem-unit"] = json!("MiB");
                    }
                }
                config["process"]["args"] = json!(APP);
            });
            was_held(&gated.host.runtime().run(&bundle));
        }
    }
    // The second GPU alone was brought, and an image says all.
    let bundle = gated.bundle_with("second", |config| {
        cdi(&gated, 1, "all")(config);
        with_env(config, &QUOTA);
        config["process"]["args"] = json!(["sleep", "1000"]);
    });
    gated.host.runtime().create(&bundle).ok();
    let container = gated.host.container("second");
    assert_eq!(container["gpus"].as_array().unwrap().len(), 1, "{container}");
    assert_eq!(container["gpus"][0]["index"], 1);
    gated.host.runtime().delete(&bundle).ok();
    // One was brought, and another is named.
    let bundle = gated.bundle_with("differ", |config| {
        cdi(&gated, 1, "0")(config);
        with_env(config, &QUOTA);
    });
    let refused = gated.host.runtime().create(&bundle);
    gated.host.was_reported(refused, &bundle, &["and the engine brought GPU 1", "name the same"]);
    gated.soon_is_empty();
}

/// A GPU that the engine brought without a quota is registered, and its bundle stays as it was.
#[test]
fn brought_gpu_without_quota_is_registered_unedited() {
    let mut gated = Gated::new();
    let bundle = |gated: &Gated, id: &str| {
        gated.bundle_with(id, |config| {
            cdi(gated, 0, "void")(config);
            config["process"]["args"] = json!(["sleep", "1000"]);
        })
    };
    let whole = bundle(&gated, "whole");
    let before = fs::read(file(&whole)).unwrap();
    let runtime = gated.host.runtime();
    runtime.create(&whole).ok();
    runtime.start(&whole).ok();
    assert_eq!(fs::read(file(&whole)).unwrap(), before, "to the byte, and without a hook");
    let container = gated.host.container("whole");
    assert_eq!((&container["mode"], &container["gpus"][0]["index"]), (&json!("whole"), &json!(0)));
    assert!(eventually(|| gated.host.container("whole")["state"] == "active"));
    let filled = gated.exec(&whole, &["fill"]).ok();
    assert!(got_bytes(&filled) > 15_000 * MIB, "{filled}");
    runtime.delete(&whole).ok();
    // Without a hook its record stays until the next creation, and isn't shown.
    assert!(eventually(|| gated.host.ps().is_empty()));
    gated.host.gc();
    gated.soon_is_empty();

    // The rules see it.
    gated.host.set("admission.exclusive", true);
    let shared = gated.sleeping("shared", 1000);
    let refused = gated.host.runtime().create(&whole);
    gated.host.was_reported(refused, &whole, &["it is shared", "admission.exclusive is on"]);
    gated.host.runtime().delete(&shared).ok();
    gated.host.set("admission.require_quota", true);
    let unasked = bundle(&gated, "unasked");
    let refused = gated.host.runtime().create(&unasked);
    gated.host.was_reported(
        refused,
        &unasked,
        &["this host refuses GPUs without a quota (require_quota)", "gets some by the mount of "],
    );
    gated.soon_is_empty();
}

/// `ctr run --gpus` puts a hook into the bundle that calls NVIDIA's program with the GPUs, whatever the
/// variables say.
#[test]
fn gpus_of_containerd_client_hook_are_chosen() {
    let gated = Gated::new();
    let called = gated.host.scratch.path().join("called");
    let programs = gated.host.scratch.directory("programs");
    let script = format!("#!/bin/sh\necho \"$@\" >> {}\n", called.display());
    let script = gated.host.scratch.script("nvidia-container-cli", &script);
    fs::rename(script, programs.join("nvidia-container-cli")).unwrap();
    let containerd = Containerd::builder()
        .runtime(RUNTIME)
        .env("CGPU_CONFIG", config(&gated))
        .client_programs(&programs)
        .start();
    let mount = format!("type=bind,src={},dst={RMTOOL},options=rbind:ro", rmtool().display());
    let quota: Vec<&str> = QUOTA.iter().flat_map(|variable| ["--env", variable]).collect();
    let with = |more: &[&'static str]| {
        [&["--gpus", "0", "--mount", &mount][..], more].concat().into_iter().map(String::from)
    };
    let run = |more: &[&'static str], quota: &[&str], id: &str, args: &[&str]| {
        let options: Vec<String> =
            with(more).chain(quota.iter().map(ToString::to_string)).collect();
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        containerd.run(&options, id, args)
    };
    run(&["-d"], &quota, "held", &["sleep", "1000"]).ok();
    let gpus = gated.host.container("held")["gpus"].take();
    assert_eq!((gpus.as_array().unwrap().len(), &gpus[0]["index"]), (1, &json!(0)), "{gpus}");
    let filled = containerd.exec("held", &[RMTOOL, "fill"]).ok();
    assert_eq!(got_bytes(&filled), 1000 * MIB, "{filled}");
    assert!(!called.exists(), "NVIDIA's program would bring the node of displays, too");
    containerd.remove("held").ok();

    let refused =
        run(&["--env", "NVIDIA_VISIBLE_DEVICES=1", "--rm"], &quota, "differ", &["true"]).fails();
    assert!(refused.stderr.contains("and the engine brought GPU 0"), "{refused}");
    gated.soon_is_empty();

    // Without a quota it has what the hook brings.
    run(&["-d"], &[], "whole", &["sleep", "1000"]).ok();
    let container = gated.host.container("whole");
    assert_eq!((&container["mode"], &container["gpus"][0]["index"]), (&json!("whole"), &json!(0)));
    assert!(fs::read_to_string(&called).unwrap().contains("--device=0"));
    containerd.remove("whole").ok();
}

/// In the mode `jit-cdi`, NVIDIA's runtime changes the bundle by a specification of its own before it becomes
/// runc, and that has the node of displays whatever is asked for.
#[test]
fn extra_nvidia_runtime_nodes_prevent_quota_container_start() {
    const ADD: &str = "import json, sys\n\
        config = json.load(open(sys.argv[1]))\n\
        node = {'path': sys.argv[2], 'type': 'c', 'major': 195, 'minor': int(sys.argv[3])}\n\
        config['linux'].setdefault('devices', []).append(node)\n\
        json.dump(config, open(sys.argv[1], 'w'))\n";
    let mut gated = Gated::new();
    let add = gated.host.scratch.file("add.py", ADD);
    let script = "#!/bin/sh\npython3 ADD \"$BUNDLE/config.json\" $NODE && exec RUNC \"$@\"\n"
        .replace("ADD", &add.display().to_string())
        .replace("RUNC", &program("runc").display().to_string());
    let nvidia = gated.host.scratch.script("nvidia-container-runtime", &script);
    gated.host.set("driver.inject", "nvidia-runtime");
    gated.host.set("driver.nvidia_runtime", nvidia.display().to_string());
    for (node, backend, is_refused) in [
        ("/dev/nvidia-modeset 254", "gate", true),
        ("/dev/nvidia7 7", "gate", true),
        ("/dev/control 255", "gate", false),
        // There nothing is enforced that more could get round.
        ("/dev/nvidia-modeset 254", "none", false),
    ] {
        gated.host.set("isolation.backend", backend);
        let (path, minor) = node.split_once(' ').unwrap();
        let bundle = gated.bundle_with(&format!("app-{minor}-{backend}"), |config| {
            with_env(config, &QUOTA);
            config["process"]["args"] = json!(["sleep", "1000"]);
        });
        let runtime = gated.host.runtime().env("NODE", node);
        let runtime = runtime.env("BUNDLE", bundle.directory.display().to_string());
        let made = runtime.create(&bundle);
        match is_refused {
            true => {
                let reported = made.fails();
                assert!(reported.stderr.contains("NVIDIA's runtime has brought"), "{reported}");
                assert!(reported.stderr.contains(&format!("node {path}")), "{reported}");
            }
            false => {
                made.ok();
                runtime.delete(&bundle).ok();
            }
        }
    }
    gated.host.gc();
    gated.soon_is_empty();
}

/// A quota on no GPU doesn't start with a node that takes memory of one.
#[test]
fn quota_without_gpu_refuses_gpu_memory_nodes() {
    let gated = Gated::new();
    let node = |path: &str, minor: u32| {
        let path = path.to_owned();
        move |config: &mut Value| {
            let node = json!({"path": path, "type": "c", "major": 195, "minor": minor});
            config["linux"]["devices"] = json!([node]);
            with_env(config, &QUOTA);
            with_env(config, &["NVIDIA_VISIBLE_DEVICES=void"]);
        }
    };
    let bundle = gated.bundle_with("displays", node("/dev/nvidia-modeset", 254));
    let refused = gated.host.runtime().create(&bundle);
    let reported = ["names no GPU", "node /dev/nvidia-modeset", "name its GPUs"];
    gated.host.was_reported(refused, &bundle, &reported);
    // The node of control alone opens no GPU.
    let bundle = gated.bundle_with("control", node("/dev/nvidiactl", 255));
    gated.host.runtime().create(&bundle).ok();
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

/// No failure of ours stops a container that names nothing.
#[test]
fn container_without_requests_runs_despite_our_failures() {
    let gated = Gated::new();
    let bundle = gated.bundle_with("brought", |config| {
        cdi(&gated, 0, "void")(config);
        config["process"]["args"] = json!(["echo", "runs"]);
    });
    let plain =
        gated.bundle_with("plain", |config| config["process"]["args"] = json!(["echo", "runs"]));
    let asks = gated.bundle_with("asks", |config| {
        cdi(&gated, 0, "void")(config);
        with_env(config, &QUOTA);
    });
    let text = fs::read(gated.host.config()).unwrap();
    fs::write(gated.host.config(), "nonsense = [[[").unwrap();
    for bundle in [&bundle, &plain] {
        assert_eq!(gated.host.runtime().run(bundle).ok().stdout, "runs\n");
    }
    let refused = gated.host.runtime().create(&asks).fails();
    assert!(refused.stderr.contains("cgpu: configuration"), "{refused}");
    fs::write(gated.host.config(), text).unwrap();
    // No record can be written: the directory is no directory.
    let state = gated.host.state_dir();
    let _ = fs::remove_dir_all(&state);
    fs::write(&state, "").unwrap();
    assert_eq!(gated.host.runtime().run(&bundle).ok().stdout, "runs\n");
    gated.host.runtime().create(&asks).fails();
    fs::remove_file(&state).unwrap();
    let warned = "a container with GPUs that its engine brought is not registered";
    assert!(gated.host.log().contains(warned), "{}", gated.host.log());
}

/// An image's variables can't be distinguished from its user's.
#[test]
fn quota_lifted_by_image_is_reported_or_refused() {
    let mut gated = Gated::new();
    let flag = format!("--cgpu-config={}", config(&gated));
    let docker = Docker::builder().runtime(RUNTIME).runtime_arg(flag).start();
    docker.run(&["--name", "base", IMAGE, "true"]).ok();
    docker.call(&["commit", "--change", "ENV CGPU_DISABLE=true", "base", "evil"]).ok();
    docker.remove("base").ok();
    let volume = volume();
    let run = |more: &[&str], image: &str, command: &[&str]| {
        docker.run(&[&["--runtime=cgpu"], more, &options(&volume), &[image], command].concat())
    };
    run(&["-d", "--name", "demo"], "evil", &["sleep", "1000"]).ok();
    let filled = docker.exec("demo", &[RMTOOL, "fill"]).ok();
    assert!(got_bytes(&filled) > 15_000 * MIB, "as the documents say: {filled}");
    let sentence = "no quota is enforced on this container: CGPU_DISABLE=true";
    assert!(gated.host.log().contains(&format!("WARN {sentence}")), "{}", gated.host.log());
    let reported = gated.host.cgpu(&["events", "demo"]).ok().stdout;
    assert!(reported.contains(&format!("warning: {sentence}")), "{reported}");
    let shown = gated.host.cgpu(&["ps"]).ok().stdout;
    assert!(shown.contains("no quota is enforced on it: CGPU_DISABLE=true"), "{shown}");
    assert_eq!(gated.host.ps()[0]["unenforced_by"], "CGPU_DISABLE=true");
    docker.remove("demo").ok();
    // Its user overrules it.
    was_held(&run(&["--rm", "-e", "CGPU_DISABLE=false"], "evil", &APP));

    gated.host.set("admission.profile", "strict");
    let run = |more: &[&str], image: &str, command: &[&str]| {
        docker.run(&[&["--runtime=cgpu"], more, &options(&volume), &[image], command].concat())
    };
    let refused = run(&["--rm"], "evil", &APP).fails();
    assert!(
        refused.stderr.contains("CGPU_DISABLE=true would let this container have its GPUs"),
        "{refused}"
    );
    was_held(&run(&["--rm"], IMAGE, &APP));
    for (more, part) in [
        (&["-e", "ALIYUN_COM_GPU_SCHD_WEIGHT=2"][..], "counts by an annotation only"),
        (&["-e", "ALIYUN_COM_GPU_HIGH_PRIO=1"], "counts by an annotation only"),
        (&["-e", "aliyun_com_gpu_mem_dev=15"], "did you mean ALIYUN_COM_GPU_MEM_DEV?"),
        (&["--cap-add", "SYS_ADMIN"], "can reach past its enforcement: CAP_SYS_ADMIN"),
        (&["-v", "/:/host"], "a mount of / (the host's root)"),
    ] {
        let refused = run(&[&["--rm"], more].concat(), IMAGE, &APP).fails();
        assert!(refused.stderr.contains(part), "{part}: {refused}");
    }
    // One that names no GPU is none of the profile's.
    docker
        .run(&["--rm", "--runtime=cgpu", "-v", "/:/host", "--cap-add", "SYS_ADMIN", IMAGE, "true"])
        .ok();
    gated.host.set("admission.privileged", "refuse");
    let refused = docker.run(&["--rm", "--runtime=cgpu", "-v", "/:/host", IMAGE, "true"]).fails();
    assert!(refused.stderr.contains("(privileged = \"refuse\")"), "{refused}");
    docker.run(&["--rm", "--runtime=cgpu", IMAGE, "true"]).ok();
    gated.soon_is_empty();
}

/// A quota in the host's pid namespace is refused in both profiles.
#[test]
fn quota_in_host_pid_namespace_is_always_refused() {
    let mut gated = Gated::new();
    for profile in ["open", "strict"] {
        gated.host.set("admission.profile", profile);
        let bundle = gated.bundle_with(profile, |config| {
            with_env(config, &[&QUOTA[..], &["NVIDIA_VISIBLE_DEVICES=0"]].concat());
            let namespaces = config["linux"]["namespaces"].as_array_mut().unwrap();
            namespaces.retain(|namespace| namespace["type"] != "pid");
        });
        let refused = gated.host.runtime().create(&bundle);
        gated.host.was_reported(refused, &bundle, &["in the host's pid namespace", "--pid=host"]);
    }
    gated.soon_is_empty();
}

#[test]
fn near_misses_are_events_and_shown_by_inspect() {
    let gated = Gated::new();
    let bundle = gated.bundle_with("near", |config| {
        with_env(config, &["ALIYUN_COM_GPU_MEM_CONTAINER =3", "CGPU_DISABLED=1", "CGPU_COUNT=1"]);
        config["process"]["args"] = json!(["true"]);
    });
    gated.host.runtime().run(&bundle).ok();
    let reported = gated.host.cgpu(&["events"]).ok().stdout;
    for part in ["did you mean ALIYUN_COM_GPU_MEM_CONTAINER?", "did you mean CGPU_DISABLE?"] {
        assert!(reported.contains(part), "{part}: {reported}");
    }
    assert!(!reported.contains("CGPU_COUNT"), "{reported}");
    let dir = bundle.directory.display().to_string();
    let shown = gated.host.cgpu(&["inspect", "--bundle", &dir, "--format", "json"]).ok().json();
    assert_eq!(shown["warnings"].as_array().unwrap().len(), 2, "{shown}");
    assert_eq!(shown["plan"], Value::Null);
}

/// podman copies annotations from an image's manifest.
#[test]
fn annotations_of_an_image_cancel_no_quota() {
    let gated = Gated::new();
    let scratch = &gated.host.scratch;
    let context = scratch.directory("context");
    fs::write(context.join("Containerfile"), format!("FROM {IMAGE}\n")).unwrap();
    let podman = Podman::builder()
        .runtime(RUNTIME)
        .runtime_flag(format!("cgpu-config={}", config(&gated)))
        .start();
    let context = context.display().to_string();
    let annotation = "io.kubernetes.cri.container-type=sandbox";
    podman.call(&["build", "--annotation", annotation, "-t", "sandboxed", &context]).ok();
    let volume = volume();
    let quota = [
        "--annotation",
        "aliyun.com/gpu-mem-container=1000",
        "--annotation",
        "aliyun.com/gpu-mem-unit=MiB",
        "-e",
        "NVIDIA_VISIBLE_DEVICES=0",
        "-v",
        &volume,
    ];
    was_held(&podman.run(&[&["--rm"][..], &quota, &["sandboxed"], &APP].concat()));
    drop(podman);
    gated.soon_is_empty();
}
