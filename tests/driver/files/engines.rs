//! The same under docker, containerd and podman, with an image that has a glibc and nothing else.

use std::path::Path;

use super::*;
use crate::support::{Containerd, Docker, Image, Podman, Scratch, eventually};

const RUNTIME: &str = env!("CARGO_BIN_EXE_cgpu-runtime");
const HOOK: &str = env!("CARGO_BIN_EXE_cgpu-hook");
const IMAGE: &str = "localhost/plain:1";
const CUDA: [&str; 3] = ["/probe", "libcuda.so.1", "cuInit"];
/// `pause` of the C library: no other program waits here.
const WAIT: [&str; 3] = ["/probe", "libc.so.6", "pause"];
const SMI: &str = "nvidia-smi";

fn image(scratch: &Scratch) -> Image {
    let rootfs = Userland::Distroless.rootfs(scratch, "plain", Search::Usual);
    Image::new(IMAGE).env("PATH", "/usr/bin").rootfs(rootfs.path)
}

/// `-e` and what asks for a part of GPU 0.
const ASK: [&str; 6] = [
    "-e",
    "ALIYUN_COM_GPU_MEM_CONTAINER=6",
    "-e",
    "ALIYUN_COM_GPU_MEM_DEV=15",
    "-e",
    "NVIDIA_VISIBLE_DEVICES=0",
];

fn config(host: &DriverHost) -> String {
    host.host.config().display().to_string()
}

#[track_caller]
fn has_cuda(outcome: Outcome) {
    let outcome = outcome.ok();
    assert_eq!(outcome.stdout.lines().nth(1), Some(NO_DEVICE), "{outcome}");
}

#[track_caller]
fn has_smi(outcome: &Outcome) {
    assert_eq!(outcome.status.code(), Some(DRIVER_NOT_LOADED), "{outcome}");
    assert!(outcome.stdout.contains("couldn't communicate with the NVIDIA driver"), "{outcome}");
}

#[test]
fn docker_and_what_it_executes_find_the_driver() {
    let host = DriverHost::new();
    let docker = Docker::builder()
        .runtime(RUNTIME)
        .runtime_arg(format!("--cgpu-config={}", config(&host)))
        .start();
    docker.load(&image(docker.scratch()));
    let run = |args: &[&str]| {
        docker.run(&[&["--rm", "--runtime=cgpu"][..], &ASK, &[IMAGE], args].concat())
    };
    has_cuda(run(&CUDA));
    has_smi(&run(&[SMI]));
    // Without asking it is any container.
    let plain = docker.run(&["--rm", "--runtime=cgpu", IMAGE, "/probe", "libcuda.so.1"]);
    assert_eq!(plain.status.code(), Some(NOT_LOADED), "{plain}");

    let sleeping = [&["-d", "--name", "one", "--runtime=cgpu"][..], &ASK, &[IMAGE]].concat();
    docker.run(&[&sleeping[..], &WAIT].concat()).ok();
    has_cuda(docker.exec("one", &CUDA));
    has_smi(&docker.exec("one", &[SMI]));
    let found = docker.exec("one", &["/probe", "libcuda.so.1"]).ok();
    assert!(found.stdout.starts_with("/usr/local/nvidia/lib64/"), "{found}");
    docker.remove("one").ok();
}

#[test]
fn containerd_and_what_it_executes_find_the_driver() {
    let host = DriverHost::new();
    let containerd =
        Containerd::builder().runtime(RUNTIME).env("CGPU_CONFIG", config(&host)).start();
    containerd.load(&image(containerd.scratch()));
    let options: Vec<&str> =
        ASK.iter().map(|word| if *word == "-e" { "--env" } else { word }).collect();
    let run = |id: &str, more: &[&str], args: &[&str]| {
        let options = [more, &options].concat();
        containerd.run_image(IMAGE, &options, id, args)
    };
    // `ctr` may end before it has copied what the program says: the program is run until its output is read.
    let heard = |id: &str, args: &[&str]| {
        let mut outcome = run(id, &["--rm"], args);
        eventually(|| {
            if outcome.stdout.is_empty() {
                outcome = run(id, &["--rm"], args);
            }
            !outcome.stdout.is_empty()
        });
        outcome
    };
    has_cuda(heard("cuda", &CUDA));
    has_smi(&heard("smi", &[SMI]));
    run("one", &["-d"], &WAIT).ok();
    has_cuda(containerd.exec("one", &CUDA));
    containerd.remove("one").ok();
}

/// Under podman a container finds the driver by our runtime, and by our hooks as well.
#[test]
fn podman_containers_find_driver_by_runtime_or_hooks() {
    let host = DriverHost::new();
    let podman = Podman::builder()
        .runtime(RUNTIME)
        .runtime_flag(format!("cgpu-config={}", config(&host)))
        .start();
    podman.load(&image(podman.scratch()));
    let run = |podman: &Podman, args: &[&str]| {
        podman.run(&[&["--rm"][..], &ASK, &[IMAGE], args].concat())
    };
    has_cuda(run(&podman, &CUDA));
    has_smi(&run(&podman, &[SMI]));
    drop(podman);

    let hooks = Scratch::new();
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("hooks/cgpu-precreate.json");
    let mut hook: Value = serde_json::from_slice(&std::fs::read(shipped).unwrap()).unwrap();
    hook["hook"]["path"] = json!(HOOK);
    let args = hook["hook"]["args"].as_array_mut().unwrap();
    args.extend([json!("--config"), json!(config(&host))]);
    let directory = hooks.directory("hooks.d");
    std::fs::write(directory.join("cgpu-precreate.json"), hook.to_string()).unwrap();
    let podman = Podman::builder().hooks_dir(directory).start();
    podman.load(&image(podman.scratch()));
    has_cuda(run(&podman, &CUDA));
    has_smi(&run(&podman, &[SMI]));
}
