//! Quotas by the neutral names and by NVIDIA's variable, and GPUs that cgpu chooses.

use std::sync::Mutex;

use serde_json::{Value, json};

use crate::brought_gpus::cdi;
use crate::engines::{APP, config, volume, was_held};
use crate::gated::{Gated, MIB, RMTOOL, RUNTIME, got_bytes};
use crate::support::{Docker, IMAGE, Podman};

pub(crate) fn docker(gated: &Gated) -> Docker {
    let flag = format!("--cgpu-config={}", config(gated));
    Docker::builder().runtime(RUNTIME).runtime_arg(flag).start()
}

pub(crate) fn podman(gated: &Gated) -> Podman {
    let flag = format!("cgpu-config={}", config(gated));
    Podman::builder().runtime(RUNTIME).runtime_flag(flag).start()
}

/// `docker run` with rmtool in the container.
pub(crate) fn run(docker: &Docker, options: &[&str], command: &[&str]) -> crate::support::Outcome {
    let volume = volume();
    docker.run(&[&["--runtime=cgpu", "-v", &volume], options, &[IMAGE], command].concat())
}

/// MiB that the container has of each of its GPUs, by index.
fn quotas(gated: &Gated, id: &str) -> Vec<(u64, u64)> {
    let container = gated.host.container(id);
    let gpus = container["gpus"].as_array().expect("a list");
    let quota = |gpu: &Value| {
        let bytes = gpu["memory_limit_bytes"].as_u64().unwrap_or_default();
        (gpu["index"].as_u64().expect("an index"), bytes / MIB)
    };
    gpus.iter().map(quota).collect()
}

#[test]
fn docker_users_ask_by_size_percentage_or_count() {
    let gated = Gated::new();
    let docker = docker(&gated);
    was_held(&run(
        &docker,
        &["--rm", "-e", "CGPU_MEMORY=1000MiB", "-e", "CGPU_GPUS=device=0"],
        &APP,
    ));
    for (options, expected) in [
        // The second GPU is the smaller one.
        (&["-e", "CGPU_MEMORY=1g"][..], &[(1, 1024)][..]),
        (&["-e", "CGPU_MEMORY=1g", "-e", "NVIDIA_VISIBLE_DEVICES=all"], &[(1, 1024)]),
        (&["-e", "CGPU_MEMORY=1.5GiB"], &[(1, 1536)]),
        (&["-e", "CGPU_MEMORY=25%", "-e", "CGPU_GPUS=all"], &[(0, 4000), (1, 2000)]),
        (&["-e", "CGPU_MEMORY=9GiB,1GiB", "-e", "CGPU_GPUS=2"], &[(0, 9216), (1, 1024)]),
        (&["-e", "CGPU_MEMORY=1GiB", "-e", "NVIDIA_VISIBLE_DEVICES=0"], &[(0, 1024)]),
        (
            &[
                "-e",
                "CGPU_MEMORY=1GiB",
                "-e",
                "ALIYUN_COM_GPU_MEM_CONTAINER=2",
                "-e",
                "CGPU_GPUS=1",
            ],
            &[(1, 1024)],
        ),
    ] {
        let options = [&["-d", "--name", "demo"], options].concat();
        run(&docker, &options, &["sleep", "1000"]).ok();
        let id = docker.inspect("demo", "{{.Id}}");
        assert_eq!(quotas(&gated, id.trim()), expected, "{options:?}");
        let (gpu, mib) = expected[0];
        let filled = docker.exec("demo", &[RMTOOL, "--gpu", &gpu.to_string(), "fill"]).ok();
        assert_eq!(got_bytes(&filled), mib * MIB, "{options:?}: {filled}");
        docker.remove("demo").ok();
    }
    // A device by CDI, as docker 28 brings it, is the choice.
    let bundle = gated.bundle_with("brought", |config| {
        cdi(&gated, 0, "void")(config);
        config["process"]["env"].as_array_mut().unwrap().push(json!("CGPU_MEMORY=1000MiB"));
        config["process"]["args"] = json!(["sleep", "1000"]);
    });
    gated.host.runtime().create(&bundle).ok();
    assert_eq!(quotas(&gated, "brought"), [(0, 1000)]);
    gated.host.runtime().delete(&bundle).ok();
    assert!(gated.host.log().contains("quota_by=\"CGPU_MEMORY=1.5GiB\""), "{}", gated.host.log());
    let created = gated.host.cgpu(&["events", "--json"]).ok().stdout;
    assert!(created.contains("\"quota_by\":\"CGPU_MEMORY=9GiB,1GiB\""), "{created}");
    for (options, part) in [
        (&["-e", "CGPU_MEMORY=4"][..], "CGPU_MEMORY=4: 4 has no unit; write 4GiB or 4MiB"),
        (
            &["-e", "CGPU_MEMORY=20GiB"],
            "no GPU with enough memory for CGPU_MEMORY=20GiB is left: GPU 0",
        ),
        (&["-e", "CGPU_MEMORY=1g", "-e", "CGPU_GPUS=3"], "3 GPUs are asked for (CGPU_GPUS=3)"),
        (
            &["-e", "CGPU_MEMORY=1g", "-e", "CGPU_GPUS=device=0", "-e", "NVIDIA_VISIBLE_DEVICES=1"],
            "NVIDIA_VISIBLE_DEVICES=1 and CGPU_GPUS=device=0 name different GPUs",
        ),
        (&["-e", "CGPU_MEMORY=1g", "-e", "CGPU_WEIGHT=25%"], "is divided by policy"),
        (
            &["-e", "CGPU_MEMORY=1g", "-e", "CGPU_GPUS=1", "-e", "NVIDIA_VISIBLE_DEVICES=0,1"],
            "CGPU_GPUS=1 asks for another number of GPUs than there are by NVIDIA_VISIBLE_DEVICES=0,1",
        ),
    ] {
        let refused = run(&docker, &[&["--rm"], options].concat(), &["true"]).fails();
        assert!(refused.stderr.contains(part), "{part}: {refused}");
    }
    // A part of the computing time is so many parts of a GPU that is divided so.
    gated.host.cgpu(&["set", "gpu", "0", "policy=3"]).ok();
    let part = ["-d", "--name", "demo", "-e", "CGPU_MEMORY=1g", "-e", "CGPU_WEIGHT=25%"];
    run(&docker, &part, &["sleep", "1000"]).ok();
    let id = docker.inspect("demo", "{{.Id}}");
    assert_eq!(quotas(&gated, id.trim()), [(0, 1024)], "the GPU that can hold it");
    assert_eq!(gated.host.cgpu(&["get", "container", "demo", "weight"]).ok().stdout, "5\n");
    docker.remove("demo").ok();
    gated.soon_is_empty();
}

#[test]
fn podmans_annotations_ask_by_the_neutral_names() {
    let gated = Gated::new();
    let podman = podman(&gated);
    let volume = volume();
    let run = |more: &[&str], command: &[&str]| {
        podman.run(&[more, &["-v", &volume, IMAGE], command].concat())
    };
    let asks = ["--annotation", "cgpu/memory=1000MiB", "--annotation", "cgpu/gpus=device=0"];
    was_held(&run(&[&["--rm"], &asks[..]].concat(), &APP));
    let priority = ["-e", "CGPU_MEMORY=1GiB", "-e", "CGPU_WEIGHT=2", "-e", "CGPU_PRIORITY=high"];
    let options = [&["-d", "--name", "demo"], &priority[..]].concat();
    let id = run(&options, &["sleep", "1000"]).ok().stdout;
    assert_eq!(quotas(&gated, id.trim()), [(1, 1024)]);
    assert_eq!(gated.host.container(id.trim())["quota_by"], "CGPU_MEMORY=1GiB");
    gated.host.edit_record(id.trim(), |record| {
        let plan = &record["plan"];
        assert_eq!((&plan["weight"], &plan["high_priority"]), (&json!(2), &json!(true)));
    });
    podman.remove("demo").ok();
    gated.soon_is_empty();
}

/// NVIDIA's toolkit acts on them from a driver on that limits memory itself.
#[test]
fn nvidia_limit_is_quota_hidden_from_other_hooks() {
    let mut gated = Gated::new();
    let engine = docker(&gated);
    let limit = ["-e", "NVIDIA_GPU_MEMORY_LIMIT=1000", "-e", "NVIDIA_VISIBLE_DEVICES=0"];
    was_held(&run(&engine, &[&["--rm"], &limit[..]].concat(), &APP));
    let variables = |more: &[&str]| {
        let all = [&["--rm", "-e", "NVIDIA_GPU_MEMORY_REQUEST=500"], &limit[..], more].concat();
        let mut of_nvidia: Vec<String> = run(&engine, &all, &["env"])
            .ok()
            .stdout
            .lines()
            .filter(|line| line.contains("NVIDIA_GPU_MEMORY"))
            .map(str::to_owned)
            .collect();
        of_nvidia.sort();
        of_nvidia
    };
    assert_eq!(
        variables(&[]),
        ["CGPU_NVIDIA_GPU_MEMORY_LIMIT=1000", "CGPU_NVIDIA_GPU_MEMORY_REQUEST=500"]
    );
    assert_eq!(
        variables(&["-e", "CGPU_DISABLE=true"]),
        ["NVIDIA_GPU_MEMORY_LIMIT=1000", "NVIDIA_GPU_MEMORY_REQUEST=500"]
    );
    // A reservation alone is none, and says so.
    let alone = ["--rm", "-e", "NVIDIA_GPU_MEMORY_REQUEST=500", "-e", "NVIDIA_VISIBLE_DEVICES=0"];
    run(&engine, &alone, &["true"]).ok();
    let warned = "NVIDIA_GPU_MEMORY_REQUEST=500 keeps memory free and limits nothing";
    assert!(gated.host.log().contains(warned), "{}", gated.host.log());
    gated.host.set("admission.require_quota", true);
    let refused = run(&engine, &alone, &["true"]).fails();
    assert!(refused.stderr.contains("without a quota"), "{refused}");
    // Where nothing of ours enforces it, it is left to NVIDIA's.
    gated.host.set("admission.require_quota", false);
    gated.host.set("isolation.backend", "none");
    assert_eq!(variables(&[]), ["NVIDIA_GPU_MEMORY_LIMIT=1000", "NVIDIA_GPU_MEMORY_REQUEST=500"]);
    gated.host.set("isolation.backend", "gate");
    // A bundle that is made into a container again has its quota still.
    let bundle = gated.bundle_with("again", |config| {
        let env = config["process"]["env"].as_array_mut().expect("a list");
        env.extend([json!("NVIDIA_GPU_MEMORY_LIMIT=1000"), json!("NVIDIA_VISIBLE_DEVICES=0")]);
        config["process"]["args"] = json!(APP);
    });
    for _ in 0..2 {
        was_held(&gated.host.runtime().run(&bundle));
    }
    gated.soon_is_empty();
}

/// MiB of four GPUs, and what each of twenty containers asks for: 19 fit.
const SIZES: [u64; 4] = [16_000, 8_000, 24_000, 12_000];
const EACH: u64 = 2_900;

/// How many of `count` containers with [`EACH`] get each GPU, placed one after the other on the GPU with the
/// least or the most memory left.
fn expected(count: usize, placement: &str) -> Vec<usize> {
    let mut left = SIZES;
    let mut on = vec![0; SIZES.len()];
    for _ in 0..count {
        let fitting = (0..SIZES.len()).filter(|&gpu| left[gpu] >= EACH);
        let chosen = match placement {
            "binpack" => fitting.min_by_key(|&gpu| left[gpu]),
            _ => fitting.min_by_key(|&gpu| u64::MAX - left[gpu]),
        };
        let Some(gpu) = chosen else { break };
        left[gpu] -= EACH;
        on[gpu] += 1;
    }
    on
}

/// All ask alike, so that the GPUs fill up in one way whichever container comes first.
#[test]
fn of_twenty_containers_only_those_that_fit_start() {
    let mut gated = Gated::with_gpus("535.161.08", &SIZES);
    let engine = docker(&gated);
    for placement in ["binpack", "spread"] {
        gated.host.set("admission.placement", placement);
        for count in [6, 20] {
            let refused: Mutex<Vec<String>> = Mutex::new(Vec::new());
            std::thread::scope(|scope| {
                for n in 0..count {
                    let (engine, refused) = (&engine, &refused);
                    scope.spawn(move || {
                        let (name, memory) = (format!("c{n}"), format!("CGPU_MEMORY={EACH}MiB"));
                        let asks = ["-e", &memory, "-e", "CGPU_GPUS=1"];
                        let options = [&["-d", "--name", &name], &asks[..]].concat();
                        let outcome = run(engine, &options, &["sleep", "1000"]);
                        if !outcome.status.success() {
                            refused.lock().unwrap().push(outcome.stderr);
                        }
                    });
                }
            });
            let refused = refused.into_inner().unwrap();
            let mut on = vec![0; SIZES.len()];
            for container in gated.host.ps() {
                let gpus = container["gpus"].as_array().unwrap().clone();
                assert_eq!(gpus.len(), 1, "{container}");
                assert_eq!(gpus[0]["memory_limit_bytes"], EACH * MIB, "{container}");
                let index = usize::try_from(gpus[0]["index"].as_u64().unwrap()).unwrap();
                on[index] += 1;
            }
            assert_eq!(on, expected(count, placement), "{placement} {count}: {refused:?}");
            // 5 + 2 + 8 + 4
            assert_eq!(refused.len(), count.saturating_sub(19), "{refused:?}");
            for text in refused {
                assert!(
                    text.contains("no GPU with enough memory for CGPU_MEMORY=2900MiB is left"),
                    "{text}"
                );
                assert!(
                    text.contains("GPU 1 (") && text.contains("2200 MiB of 8000 MiB left"),
                    "{text}"
                );
            }
            for n in 0..count {
                let _ = engine.remove(&format!("c{n}"));
            }
            gated.soon_is_empty();
        }
    }
}
