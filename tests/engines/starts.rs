//! The main job on real engines: a container sees its GPUs and no other, its quota is
//! registered while it lives, and no longer, however it ends.

use std::fs;
use std::path::{Path, PathBuf};

use crate::host::Host;
use crate::support::{Containerd, Docker, IMAGE, Image, Podman, Restart, eventually};
use serde_json::{Value, json};

const RUNTIME: &str = env!("CARGO_BIN_EXE_cgpu-runtime");
const HOOK: &str = env!("CARGO_BIN_EXE_cgpu-hook");

const GPU_0: &str = "GPU-c09d11f5-a565-1f83-903c-a65a7ba138af";
const GPU_1: &str = "GPU-959873c5-b57b-5d24-f3aa-e700c5d431cb";

/// A host with two GPUs of different sizes, that keeps its log.
fn host() -> Host {
    let mut host = Host::with_gpus(&json!([
        {"index": 0, "uuid": GPU_0, "memory_mib": 16130},
        {"index": 1, "uuid": GPU_1, "memory_mib": 15109},
    ]));
    host.keep_log();
    host
}

/// Where a host's configuration is, as text.
fn config(host: &Host) -> String {
    host.config().display().to_string()
}

/// Prints what a container sees of GPUs: its first process's variable (an exec has those
/// that the engine gives it), and the device nodes.
const INSPECT: &str = "cat /proc/1/environ | grep -a -o 'NVIDIA_VISIBLE_DEVICES=[-0-9a-zA-Z,]*' | \
                    head -n 1; ls /dev | grep nvidia";

/// The variables for 6/15 of GPU 0.
const SIX_OF_FIFTEEN: [&str; 3] =
    ["ALIYUN_COM_GPU_MEM_CONTAINER=6", "ALIYUN_COM_GPU_MEM_DEV=15", "NVIDIA_VISIBLE_DEVICES=0"];

/// dockerd answers `--gpus` by NVIDIA's hook, if it finds that in its `PATH`: else no runtime is called. What the
/// documents name instead works, and what Swarm gives a service's containers is a choice.
#[test]
fn docker_without_nvidia_hook_refuses_gpus_flag() {
    let host = host();
    let docker = Docker::builder()
        .runtime(RUNTIME)
        .runtime_arg(format!("--cgpu-config={}", config(&host)))
        .default_runtime()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .start();
    let run = |options: &[&str]| {
        docker.run(&[&["--rm"], options, &[IMAGE, "sh", "-c", INSPECT]].concat())
    };
    if Path::new("/usr/bin/nvidia-container-runtime-hook").exists() {
        eprintln!("not looked at: NVIDIA's hook is installed, and docker takes it");
    } else {
        let refused = run(&["--gpus", "1"]).fails();
        let said = "could not select device driver \"\" with capabilities: [[gpu]]";
        assert!(refused.stderr.contains(said), "{refused}");
    }
    // One GPU: the container fits on the smaller, which has less left.
    let chosen = run(&["-e", "CGPU_GPUS=1"]).ok();
    assert!(chosen.text().ends_with("\nnvidia1\nnvidiactl"), "{chosen}");
    // `--generic-resource NVIDIA-GPU=1` of a service.
    let resource = format!("DOCKER_RESOURCE_NVIDIA-GPU={GPU_1}");
    let swarms = format!("NVIDIA_VISIBLE_DEVICES={GPU_1}\nnvidia1\nnvidiactl");
    for more in [&[][..], &["-e", "CGPU_MEMORY=1GiB"], &["-e", "NVIDIA_VISIBLE_DEVICES=all"]] {
        let given = run(&[&["-e", &resource], more].concat()).ok();
        assert_eq!(given.text(), swarms, "{more:?}");
    }
    host.soon_releases_all();
}

/// A service can't choose a runtime, so ours is the default one.
#[test]
fn swarm_service_gets_its_chosen_gpu_and_quota() {
    let host = host();
    let docker = Docker::builder()
        .runtime(RUNTIME)
        .runtime_arg(format!("--cgpu-config={}", config(&host)))
        .default_runtime()
        .resource(format!("NVIDIA-GPU={GPU_0}"))
        // No registry is asked for the image.
        .env("HTTPS_PROXY", "http://127.0.0.1:9")
        .start();
    let [.., high, low] = std::process::id().to_be_bytes();
    let address = format!("127.{high}.{low}.1");
    docker.call(&["swarm", "init", "--advertise-addr", &address, "--listen-addr", &address]).ok();
    let service = ["service", "create", "--detach", "--name", "web", "--no-resolve-image"];
    let options = ["--network", "host", "--generic-resource", "NVIDIA-GPU=1"];
    let check = format!("{INSPECT}; exec sleep 1000");
    let task = ["-e", "CGPU_MEMORY=1GiB", IMAGE, "sh", "-c", &check];
    docker.call(&[&service[..], &options, &task].concat()).ok();
    let running = || docker.call(&["ps", "--quiet", "--no-trunc"]).ok().text().to_owned();
    eventually(|| !running().is_empty());
    let id = running();
    eventually(|| docker.logs(&id).ok().text() == gpu_0_only());
    assert_eq!(host.limits_mib(&id), [1024]);
    docker.call(&["service", "rm", "web"]).ok();
    host.soon_releases_all();
    docker.call(&["swarm", "leave", "--force"]).ok();
}

/// What [`INSPECT`] prints with GPU 0.
fn gpu_0_only() -> String {
    format!("NVIDIA_VISIBLE_DEVICES={GPU_0}\nnvidia0\nnvidiactl")
}

/// `-e` and each variable.
fn with_env<'a>(variables: &[&'a str]) -> Vec<&'a str> {
    variables.iter().flat_map(|variable| ["-e", variable]).collect()
}

/// Containers under docker share a GPU, and are refused what isn't left of it.
#[test]
fn docker_containers_share_a_gpu_within_its_memory() {
    let host = host();
    let docker = Docker::builder()
        .runtime(RUNTIME)
        .runtime_arg(format!("--cgpu-config={}", config(&host)))
        .start();
    let run = |options: &[&str], variables: &[&str], command: &[&str]| {
        let args = [&["--runtime=cgpu"], options, &with_env(variables), &[IMAGE], command].concat();
        docker.run(&args)
    };
    let sleep = &["sleep", "1000"];

    // Two share GPU 0, and each sees it alone.
    let first = run(&["-d", "--name", "first"], &SIX_OF_FIFTEEN, sleep).ok();
    run(&["-d", "--name", "second"], &SIX_OF_FIFTEEN, sleep).ok();
    for name in ["first", "second"] {
        assert_eq!(docker.exec(name, &["sh", "-c", INSPECT]).ok().text(), gpu_0_only());
        assert!(docker.exec(name, &["env"]).ok().has_line("ALIYUN_COM_GPU_MEM_CONTAINER=6"));
    }
    let id = first.text();
    assert_eq!(host.limits_mib(id), [6452]);
    let registered = host.container(id);
    assert_eq!(registered["state"], "active");
    assert_eq!(registered["pid"].to_string(), docker.inspect("first", "{{.State.Pid}}"));
    assert!(registered["root"].as_str().is_some_and(|root| root.ends_with("/moby")));

    // The third learns why not from docker itself.
    let refused = run(&["--name", "third"], &SIX_OF_FIFTEEN, sleep).fails();
    let short = &id[..12];
    for part in [
        &format!("cgpu: GPU 0 ({GPU_0}) has 3226 MiB of 16130 MiB left"),
        "this container asks for 6452 MiB; held by ",
        &format!("first ({short}): 6452 MiB"),
    ] {
        assert!(refused.stderr.contains(part), "{part} is not in {}", refused.stderr);
    }
    assert_eq!(host.ps().len(), 2);

    // What one gives back, another gets: after rm -f, kill, stop, and an end of its own.
    docker.remove("first").ok();
    run(&["--rm"], &SIX_OF_FIFTEEN, &["true"]).ok();
    run(&["-d", "--name", "killed"], &SIX_OF_FIFTEEN, sleep).ok();
    docker.call(&["kill", "killed"]).ok();
    assert!(eventually(|| host.ps().len() == 1));
    run(&["-d", "--name", "stopped"], &SIX_OF_FIFTEEN, sleep).ok();
    docker.call(&["stop", "-t", "0", "stopped"]).ok();
    assert!(eventually(|| host.ps().len() == 1));

    // A command that can't be started is made, refused by runc, and leaks nothing.
    run(&["--rm"], &SIX_OF_FIFTEEN, &["/no/such/program"]).fails();
    let whole = ["ALIYUN_COM_GPU_MEM_CONTAINER=9", "ALIYUN_COM_GPU_MEM_DEV=15"];
    let both: Vec<&str> = [&whole[..], &["NVIDIA_VISIBLE_DEVICES=1,0"]].concat();
    let seen = run(&["--rm"], &both, &["sh", "-c", INSPECT]).ok();
    let expected = format!("NVIDIA_VISIBLE_DEVICES={GPU_1},{GPU_0}\nnvidia0\nnvidia1\nnvidiactl");
    assert_eq!(seen.text(), expected);

    // A privileged container is outside any enforcement, and the administrator gets a warning; it may
    // not start if the tests themselves lack a capability.
    assert!(!host.log().contains("can reach past"));
    drop(run(&["--rm", "--privileged"], &SIX_OF_FIFTEEN, &["true"]));
    let warning = "WARN this container can reach past the enforcement of its quota: every device \
                   of the host, CAP_SYS_ADMIN, ";
    assert!(host.log().contains(warning), "{}", host.log());

    // The same container again: docker keeps its id.
    docker.call(&["restart", "-t", "0", "second"]).ok();
    assert_eq!(docker.exec("second", &["sh", "-c", INSPECT]).ok().text(), gpu_0_only());
    assert_eq!(host.ps().len(), 1);
    docker.remove("second").ok();
    host.soon_releases_all();
}

#[test]
fn docker_containers_without_requests_are_left_alone() {
    let host = host();
    let docker = Docker::builder().runtime(RUNTIME).env("CGPU_CONFIG", config(&host)).start();
    // Many images bake the choice of all GPUs in.
    docker.load(&Image::new("localhost/greedy:1").env("NVIDIA_VISIBLE_DEVICES", "all"));
    for (variables, image) in [
        (&[][..], IMAGE),
        (&["NVIDIA_VISIBLE_DEVICES=void"], "localhost/greedy:1"),
        (&["ALIYUN_COM_GPU_MEM_CONTAINER=0", "ALIYUN_COM_GPU_MEM_DEV=15"], IMAGE),
        (&["ALIYUN_COM_GPU_MEM_CONTAINER=6", "CGPU_DISABLE=true"], IMAGE),
    ] {
        let args = |runtime| {
            let end = [image, "sh", "-c", "env | grep NVIDIA; ls /dev"];
            [&["--rm", runtime][..], &with_env(variables), &end].concat()
        };
        let ours = docker.run(&args("--runtime=cgpu")).ok();
        assert_eq!(ours.stdout, docker.run(&args("--runtime=runc")).ok().stdout, "{variables:?}");
        assert!(!ours.text().contains("nvidia0"));
    }
    assert!(!host.state_dir().exists(), "nothing was registered");
}

#[test]
fn docker_keeps_quotas_over_its_own_restart() {
    let host = host();
    let mut docker =
        Docker::builder().runtime(RUNTIME).env("CGPU_CONFIG", config(&host)).live_restore().start();
    let args = [
        &["-d", "--name", "one", "--runtime=cgpu"][..],
        &with_env(&SIX_OF_FIFTEEN),
        &[IMAGE, "sleep", "1000"],
    ];
    let id = docker.run(&args.concat()).ok();
    docker.restart(Restart::Killed);
    assert_eq!(host.limits_mib(id.text()), [6452]);
    assert_eq!(docker.exec("one", &["sh", "-c", INSPECT]).ok().text(), gpu_0_only());
    docker.remove("one").ok();
    host.soon_releases_all();
}

#[test]
fn containerd_runs_short_ids_under_its_own_root() {
    let host = host();
    let containerd =
        Containerd::builder().runtime(RUNTIME).env("CGPU_CONFIG", config(&host)).start();
    let options: Vec<&str> =
        SIX_OF_FIFTEEN.iter().flat_map(|variable| ["--env", variable]).collect();
    let once = [&["--rm"], &options[..]].concat();
    let seen = containerd.run_and_read(&once, "once", &["sh", "-c", INSPECT]);
    assert_eq!(seen.ok().text(), gpu_0_only());
    let detached = [&["-d"], &options[..]].concat();
    containerd.run(&detached, "demo", &["sleep", "1000"]).ok();
    assert_eq!(host.limits_mib("demo"), [6452]);
    assert_eq!(containerd.exec("demo", &["sh", "-c", INSPECT]).ok().text(), gpu_0_only());
    containerd.run(&detached, "other", &["sleep", "1000"]).ok();
    let refused = containerd.run(&detached, "third", &["sleep", "1000"]).fails();
    assert!(refused.stderr.contains("has 3226 MiB of 16130 MiB left"), "{}", refused.stderr);
    assert!(refused.stderr.contains("demo: 6452 MiB"), "{}", refused.stderr);
    for id in ["demo", "other"] {
        containerd.remove(id).ok();
    }
    host.soon_releases_all();
}

/// As a Kubernetes RuntimeClass has it: the handler is `cgpu`.
#[test]
fn pods_get_quotas_by_variables_and_annotations() {
    let host = host();
    let containerd =
        Containerd::builder().runtime(RUNTIME).env("CGPU_CONFIG", config(&host)).start();
    let cri = containerd.cri();

    // As the device plugin sets them.
    let pod = cri.pod_config("by-variables");
    let pod_id = cri.run_pod("cgpu", &pod);
    assert_eq!(host.ps(), Vec::<Value>::new(), "a sandbox holds nothing");
    let mut main = cri.container_config("main");
    let plugin = SIX_OF_FIFTEEN.iter().chain(&["ALIYUN_COM_GPU_MEM_IDX=0"]);
    // Its own processes only, so that its first one is number 1.
    main["linux"] = json!({"security_context": {"namespace_options": {"pid": 1}}});
    main["envs"] = plugin
        .map(|variable| variable.split_once('=').expect("a variable has a value"))
        .map(|(key, value)| json!({"key": key, "value": value}))
        .collect();
    let id = cri.create(&pod_id, &main, &pod);
    cri.start(&id).ok();
    let seen = cri.exec_sync(&id, &["sh", "-c", INSPECT]);
    assert_eq!(seen.stdout.trim(), gpu_0_only());
    assert_eq!(host.limits_mib(&id), [6452]);

    // By the pod's annotations, which its sandbox and its containers carry.
    let mut annotated = cri.pod_config("by-annotations");
    annotated["annotations"] = json!({
        "aliyun.com/gpu-mem-container": "4",
        "aliyun.com/gpu-mem-dev": "15",
        "aliyun.com/gpu-visible-devices": GPU_0,
    });
    let annotated_id = cri.run_pod("cgpu", &annotated);
    assert_eq!(host.ps().len(), 1, "a sandbox holds nothing, whatever its pod asks for");
    let mut plain = renamed(&main, "main");
    plain["envs"] = json!([]);
    let other = cri.create(&annotated_id, &plain, &annotated);
    cri.start(&other).ok();
    assert_eq!(host.limits_mib(&other), [4301]);
    let seen = cri.exec_sync(&other, &["sh", "-c", INSPECT]);
    assert_eq!(seen.stdout.trim(), gpu_0_only());

    // A third does not fit, and kubelet would see why: the shim creates it as it starts.
    let third = cri.create(&pod_id, &renamed(&main, "third"), &pod);
    let refused = cri.start(&third).fails();
    assert!(refused.stderr.contains("has 5377 MiB of 16130 MiB left"), "{}", refused.stderr);
    let holder = format!("default/by-annotations/main ({}): 4301 MiB", &other[..12]);
    assert!(refused.stderr.contains(&holder), "{}", refused.stderr);

    // By the neutral names.
    let mut neutral = cri.pod_config("by-neutral-names");
    neutral["annotations"] = json!({"cgpu/memory": "1GiB", "cgpu/gpus": "device=0"});
    let neutral_id = cri.run_pod("cgpu", &neutral);
    let small = cri.create(&neutral_id, &plain, &neutral);
    cri.start(&small).ok();
    assert_eq!(host.limits_mib(&small), [1024]);

    for id in [&id, &other, &small] {
        cri.stop(id).ok();
        cri.remove(id).ok();
    }
    for id in [&pod_id, &annotated_id, &neutral_id] {
        cri.remove_pod(id).ok();
    }
    host.soon_releases_all();
}

fn renamed(config: &Value, name: &str) -> Value {
    let mut config = config.clone();
    config["metadata"]["name"] = name.into();
    config["log_path"] = format!("{name}.log").into();
    config
}

#[test]
fn podman_runs_with_the_wrapper_as_its_runtime() {
    let host = host();
    let podman = Podman::builder()
        .runtime(RUNTIME)
        .runtime_flag(format!("cgpu-config={}", config(&host)))
        .start();
    shares_under_podman(&host, &podman);
}

/// podman keeps its own runtime; the hook does what the wrapper does.
#[test]
fn podman_shares_gpus_by_the_precreate_hook() {
    let host = host();
    let hooks = hooks_directory(&host, &["cgpu-precreate.json"]);
    let podman = Podman::builder().hooks_dir(hooks).start();
    shares_under_podman(&host, &podman);
}

/// It is never reported to the hook that the container it reserved for will never be.
#[test]
fn failed_podman_creation_frees_its_precreate_reservation() {
    let host = host();
    let hooks = hooks_directory(&host, &["cgpu-precreate.json"]);
    let mut podman = Podman::builder().hooks_dir(hooks).start();
    let run = |podman: &Podman| {
        podman.run(&[&["-d"][..], &with_env(&SIX_OF_FIFTEEN), &[IMAGE, "sleep", "1000"]].concat())
    };
    podman.use_runtime(crate::support::program("false"));
    for _ in 0..3 {
        run(&podman).fails();
    }
    podman.use_runtime(crate::support::program("runc"));
    for _ in 0..2 {
        let id = run(&podman).ok();
        assert_eq!(host.limits_mib(id.text()), [6452]);
    }
    podman.call(&["rm", "--all", "--force", "-t", "0"]).ok();
    host.soon_releases_all();
}

fn shares_under_podman(host: &Host, podman: &Podman) {
    let run = |options: &[&str], command: &[&str]| {
        podman.run(&[options, &with_env(&SIX_OF_FIFTEEN), &[IMAGE], command].concat())
    };
    assert_eq!(run(&["--rm"], &["sh", "-c", INSPECT]).ok().text(), gpu_0_only());
    host.soon_releases_all();
    let first = run(&["-d", "--name", "first"], &["sleep", "1000"]).ok();
    assert_eq!(host.limits_mib(first.text()), [6452]);
    assert_eq!(podman.exec("first", &["sh", "-c", INSPECT]).ok().text(), gpu_0_only());
    run(&["-d", "--name", "second"], &["sleep", "1000"]).ok();
    let refused = run(&["--name", "third"], &["sleep", "1000"]).fails();
    // podman shows what a runtime says, and not what a precreate hook says: our log has it.
    let reported = refused.stderr + &host.log();
    assert!(reported.contains("has 3226 MiB of 16130 MiB left"), "{reported}");
    podman.remove("first").ok();
    // The same container again, and what it had is free in between.
    podman.call(&["restart", "-t", "0", "second"]).ok();
    assert_eq!(podman.exec("second", &["sh", "-c", INSPECT]).ok().text(), gpu_0_only());
    assert_eq!(host.ps().len(), 1);
    podman.remove("second").ok();
    host.soon_releases_all();
    // Without a request the configuration goes through untouched.
    let plain = podman.run(&["--rm", IMAGE, "sh", "-c", "ls /dev | grep -c nvidia"]);
    assert_eq!(plain.exits(1).text(), "0");
}

/// A hooks directory alone: it registers and deregisters, and gives no device.
#[test]
fn podman_runs_with_the_other_hooks_alone() {
    let host = host();
    let hooks = hooks_directory(&host, &["cgpu-createRuntime.json", "cgpu-poststop.json"]);
    let podman = Podman::builder().hooks_dir(hooks).start();
    let args =
        [&["-d", "--name", "one"][..], &with_env(&SIX_OF_FIFTEEN), &[IMAGE, "sleep", "1000"]];
    let id = podman.run(&args.concat()).ok();
    assert_eq!(host.limits_mib(id.text()), [6452]);
    podman.remove("one").ok();
    host.soon_releases_all();
}

/// The files of `hooks/` as they are shipped, but for the paths of this build.
fn hooks_directory(host: &Host, names: &[&str]) -> PathBuf {
    let directory = host.scratch.directory("hooks.d");
    for name in names {
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("hooks").join(name);
        let text = fs::read_to_string(shipped).expect("the hook is shipped");
        let mut hook: Value = serde_json::from_str(&text).expect("it is JSON");
        assert_eq!(hook["hook"]["path"], "/usr/bin/cgpu-hook");
        hook["hook"]["path"] = HOOK.into();
        let args = hook["hook"]["args"].as_array_mut().expect("it has arguments");
        args.extend(["--config".into(), config(host).into()]);
        fs::write(directory.join(name), hook.to_string()).expect("a hook can be written");
    }
    directory
}
