//! What `packaging/scripts/prerm` refuses: to take the programs away from engines that need them to
//! stop and delete containers, those without a GPU too.

mod support;

use std::path::Path;

use support::{Docker, IMAGE, Outcome, PATIENCE, Podman, Scratch, eventually, run_with_timeout};

const RUNTIME: &str = env!("CARGO_BIN_EXE_cgpu-runtime");

/// Calls the script as dpkg does, where `/run/containerd` is `state` and nothing else is in `/run`.
fn prerm(scratch: &Scratch, state: &Path) -> Outcome {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/scripts/prerm");
    let mut command = scratch.command("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-ec"]);
    command.arg(
        "mount -t tmpfs none /run && mkdir /run/containerd && mount --bind \"$2\" /run/containerd
         exec sh \"$1\" remove",
    );
    command.args(["sh", script]).arg(state);
    run_with_timeout(&mut command, PATIENCE)
}

/// That it is refused because of the container `id`; other tests may have containers too.
#[track_caller]
fn refused_for(refused: &Outcome, id: &str) {
    assert!(refused.stderr.contains("cgpu: not removed: these containers were made"), "{refused}");
    assert!(refused.stderr.contains(&id[..12]), "{id} is not in {refused}");
    assert!(refused.stderr.contains("CGPU_FORCE_REMOVE=1"), "{refused}");
}

#[test]
fn a_removal_is_refused_while_docker_has_a_container_by_us() {
    for argument in [None, Some("--cgpu-config=/dev/null")] {
        let mut docker = Docker::builder().runtime(RUNTIME);
        // With arguments docker calls us by a script of its own.
        if let Some(argument) = argument {
            docker = docker.runtime_arg(argument);
        }
        let docker = docker.start();
        let state = docker.scratch().path().join("containerd-state");
        let run = |options: &[&str]| {
            let all = [&["-d"], options, &[IMAGE, "sleep", "1000"]].concat();
            docker.run(&all).ok().text().to_owned()
        };
        let bare = run(&[]);
        let ours = run(&["--runtime=cgpu"]);
        let refused = prerm(docker.scratch(), &state);
        refused_for(&refused, &ours);
        assert!(!refused.stderr.contains(&bare[..12]), "runc made {bare}: {refused}");
        docker.remove(&ours).ok();
        let told = prerm(docker.scratch(), &state);
        assert!(!told.stderr.contains(&ours[..12]), "{told}");
    }
}

#[test]
fn a_removal_is_refused_while_podman_has_a_container_by_us() {
    let podman = Podman::builder().runtime(RUNTIME).start();
    let state = podman.scratch().directory("none");
    let ours = podman.run(&["-d", IMAGE, "sleep", "1000"]).ok().text().to_owned();
    refused_for(&prerm(podman.scratch(), &state), &ours);
    podman.remove(&ours).ok();
    // conmon outlives its container, and podman's command, by a moment.
    let is_named = || prerm(podman.scratch(), &state).stderr.contains(&ours[..12]);
    assert!(eventually(|| !is_named()), "{}", prerm(podman.scratch(), &state));
}
