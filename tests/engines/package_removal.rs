//! What `packaging/scripts/prerm` refuses: to take the programs away from engines that need them to
//! stop and delete containers, those without a GPU too.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use crate::support::{
    Docker, IMAGE, Outcome, Podman, Scratch, eventually, run_with_timeout, timeout,
};

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
    run_with_timeout(&mut command, timeout())
}

/// That it is refused because of the container `id`; other tests may have containers too.
#[track_caller]
fn refused_for(refused: &Outcome, id: &str) {
    assert!(refused.stderr.contains("cgpu: not removed: these containers were made"), "{refused}");
    assert!(refused.stderr.contains(&id[..12]), "{id} is not in {refused}");
    assert!(refused.stderr.contains("CGPU_FORCE_REMOVE=1"), "{refused}");
}

/// A removal of the package is refused while docker has a container by our runtime.
#[test]
fn removal_is_refused_while_docker_uses_our_runtime() {
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
        let reported = prerm(docker.scratch(), &state);
        assert!(!reported.stderr.contains(&ours[..12]), "{reported}");
    }
}

/// A removal of the package is refused while podman has a container by our runtime.
#[test]
fn removal_is_refused_while_podman_uses_our_runtime() {
    let podman = Podman::builder().runtime(RUNTIME).start();
    let state = podman.scratch().directory("none");
    let ours = podman.run(&["-d", IMAGE, "sleep", "1000"]).ok().text().to_owned();
    refused_for(&prerm(podman.scratch(), &state), &ours);
    podman.remove(&ours).ok();
    // conmon outlives its container, and podman's command, by a moment.
    let is_named = || prerm(podman.scratch(), &state).stderr.contains(&ours[..12]);
    assert!(eventually(|| !is_named()), "{}", prerm(podman.scratch(), &state));
}

/// Anybody can call a process conmon, with arguments of his own choice.
#[test]
fn removal_trusts_only_the_host_conmon_of_root() {
    let scratch = Scratch::new();
    let state = scratch.directory("none");
    let lure = scratch.file("lure", "/cgpu-runtime\n");
    let pipe = scratch.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let source =
        scratch.file("conmon.c", "#include <unistd.h>\nint main(void) { return pause(); }\n");
    let conmon = scratch.directory("root").join("conmon");
    let mut compiler = scratch.command("gcc");
    compiler.arg("-static").arg("-o").arg(&conmon).arg(&source);
    run_with_timeout(&mut compiler, timeout()).ok();
    let other = scratch.path().join("other");
    fs::copy(&conmon, &other).unwrap();
    let root = conmon.parent().unwrap();
    fs::set_permissions(scratch.path(), Permissions::from_mode(0o755)).unwrap();

    let start = |command: &mut Command, id: &str, runtime: &Path| {
        command.args(["-c", id, "-r"]).arg(runtime).spawn().unwrap()
    };
    let mut started = vec![
        start(&mut Command::new(&conmon), "roots-own----", &lure),
        start(&mut Command::new(&conmon), "es\u{1b}[31mcapes--", &lure),
        // It would have us wait.
        start(&mut Command::new(&conmon), "pipe---------", &pipe),
        start(Command::new(&conmon).uid(65534), "anybodys-----", &lure),
        start(Command::new(&other).arg0("conmon"), "another------", &lure),
        start(Command::new("chroot").arg(root).arg("/conmon"), "in-a-root----", &lure),
    ];
    let is_jailed = || {
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let lines = processes.filter_map(|one| fs::read_to_string(one.path().join("cmdline")).ok());
        { lines }.any(|line| line.starts_with("/conmon\0-c\0in-a-root"))
    };
    assert!(eventually(is_jailed), "chroot has become it");
    let reported = prerm(&scratch, &state);
    for mut one in started.drain(..) {
        one.kill().unwrap();
        one.wait().unwrap();
    }
    assert!(reported.stderr.contains("roots-own---"), "{reported}");
    assert!(reported.stderr.contains("es31mcapes"), "{reported}");
    for id in ["pipe---", "anybodys", "another", "in-a-root", "\u{1b}"] {
        assert!(!reported.stderr.contains(id), "{id:?} in {reported}");
    }
}
