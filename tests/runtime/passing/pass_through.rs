//! What is not ours stays the real runtime's: its words, its exit code, and the process
//! that it finds itself in.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::host::{ENGINES, Engine, Host, assert_same, config_bytes, said};
use crate::support::{Outcome, eventually, program, run_with_timeout, timeout};

#[test]
fn commands_without_container_match_the_real_runtime() {
    for engine in ENGINES {
        let host = Host::new(engine);
        for line in [
            "",
            "--version",
            "-v",
            "features",
            "list",
            "list --format json",
            "spec --help",
            "--help",
            "help",
            "create --help",
            "run -h",
            "unknown",
            "--unknown",
            "state nowhere",
            "kill nowhere",
            "delete nowhere",
            "delete --force nowhere",
            "exec nowhere true",
            "ps nowhere",
            "start nowhere",
            "events --stats nowhere",
            "pause nowhere",
            "state",
            "create",
            "run",
            "create one two",
            "restore nowhere",
            "checkpoint nowhere",
            "init",
        ] {
            let args: Vec<&str> = line.split_whitespace().collect();
            assert_same(&host.bare(&args), &host.wrapped(&args));
            // Without --root, too: the command may be the first word.
            let run = |program| run_with_timeout(host.command(program).args(&args), timeout());
            assert_same(&run(host.real()), &run(host.ours()));
        }
        assert!(!host.has_state());
    }
}

/// Commands on a live container say and do the same as with the real runtime alone.
#[test]
fn commands_on_live_container_match_real_runtime() {
    for engine in ENGINES {
        let host = Host::new(engine);
        let bundle = host.bundle("live", &["X=1"], "exec sleep 1000");
        let dir = bundle.directory.to_string_lossy().into_owned();
        host.wrapped(&["create", "--bundle", &dir, "live"]).ok();
        host.wrapped(&["start", "live"]).ok();
        for args in [
            &["state", "live"][..],
            &["list"],
            &["list", "--format", "json"],
            &["ps", "live", "-o", "pid,args"],
            &["ps", "--format", "json", "live"],
            &["exec", "live", "sh", "-c", "echo out; echo err >&2; exit 7"],
            &["exec", "--env", "A=b", "live", "env"],
            &["exec", "live", "create"],
            &["exec", "live", "nowhere", "--cgpu-config", "x"],
            &["kill", "live", "0"],
            &["kill", "live", "NOSUCHSIGNAL"],
            &["delete", "live"],
            &["start", "live"],
            &["update", "--pids-limit", "100", "live"],
        ] {
            assert_same(&host.bare(args), &host.wrapped(args));
        }
        let both = |call: &dyn Fn(&[&str]) -> Outcome| {
            let (pause, resume) = (call(&["pause", "live"]), call(&["resume", "live"]));
            (said(&pause), said(&resume))
        };
        assert_eq!(both(&|args| host.bare(args)), both(&|args| host.wrapped(args)));
        if engine == Engine::Runc {
            let keys = |outcome: Outcome| {
                let value = outcome.ok().json();
                let data = value["data"].as_object().expect("statistics are an object").clone();
                data.keys().cloned().collect::<Vec<_>>()
            };
            let args = ["events", "--stats", "live"];
            assert_eq!(keys(host.bare(&args)), keys(host.wrapped(&args)));
        }
        assert_eq!(host.wrapped(&["kill", "live", "KILL"]).ok().stdout, "");
        let stopped = || host.bare(&["state", "live"]).ok().json()["status"] == "stopped";
        assert!(eventually(stopped));
        assert_eq!(host.wrapped(&["delete", "live"]).ok().stdout, "");
        assert_same(&host.bare(&["delete", "live"]), &host.wrapped(&["delete", "live"]));
        assert!(!host.has_state());
    }
}

#[test]
fn container_without_request_is_not_touched() {
    for engine in ENGINES {
        let host = Host::new(engine);
        for (id, env) in [
            ("plain", &["A=b"][..]),
            ("off", &["ALIYUN_COM_GPU_MEM_CONTAINER=0", "NVIDIA_VISIBLE_DEVICES=void"]),
            ("disabled", &["ALIYUN_COM_GPU_MEM_CONTAINER=3", "CGPU_DISABLE=true"]),
        ] {
            let bundle = host.bundle(id, env, "env; ls /dev; echo err >&2; exit 3");
            let file = bundle.directory.join("config.json");
            let check = || {
                let meta = fs::metadata(&file).expect("a bundle has a config.json");
                (meta.ino(), meta.mtime(), meta.mtime_nsec(), config_bytes(&bundle))
            };
            let before = check();
            let args = ["run", "--bundle", id, id];
            let (bare, wrapped) = (host.bare(&args).exits(3), host.wrapped(&args));
            assert_same(&bare, &wrapped);
            assert!(wrapped.has_line(env[0]));
            assert_eq!(check(), before);
        }
        assert!(!host.has_state());
    }
}

/// What the kernel says of a process that the real runtime is to find unchanged.
#[derive(Debug, PartialEq, Eq)]
struct Observed {
    arguments: String,
    environment: Vec<String>,
    directory: String,
    descriptors: BTreeMap<String, String>,
    /// Signals blocked, ignored and caught; umask, privileges, name.
    status: Vec<String>,
    limits: String,
}

/// Inspects a process that stopped itself, and kills it.
fn seen(mut child: Child) -> Observed {
    let proc = Path::new("/proc").join(child.id().to_string());
    let text = |name: &str| {
        let bytes = fs::read(proc.join(name)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    let stopped = || text("status").contains("State:\tT");
    let has_stopped = eventually(stopped);
    let link = |path: &Path| {
        fs::read_link(path).map(|to| to.to_string_lossy().into_owned()).unwrap_or_default()
    };
    let descriptors = fs::read_dir(proc.join("fd")).into_iter().flatten().flatten();
    let fields = ["Name:", "Umask:", "Sig", "Shd", "Cap", "NoNewPrivs:", "Seccomp:", "Groups:"];
    let status = text("status");
    let status = status.lines().filter(|line| fields.iter().any(|name| line.starts_with(name)));
    let seen = Observed {
        arguments: text("cmdline"),
        // Some shells tell each program its own path, in `_`.
        environment: text("environ")
            .split_inclusive('\0')
            .filter(|item| !item.starts_with("_="))
            .map(str::to_owned)
            .collect(),
        directory: link(&proc.join("cwd")),
        descriptors: descriptors
            .map(|fd| (fd.file_name().to_string_lossy().into_owned(), link(&fd.path())))
            .collect(),
        status: status.filter(|line| !line.starts_with("SigQ")).map(str::to_owned).collect(),
        limits: text("limits"),
    };
    child.kill().and_then(|()| child.wait()).expect("a child of ours can be killed");
    assert!(has_stopped, "it did not stop: {seen:#?}");
    seen
}

/// Starts `words` as an engine might: with a file on descriptor 7, perhaps without
/// standard input, with signals ignored.
fn start(host: &Host, launcher: &[&str], shell: &str, words: &[&str]) -> Child {
    let mut command: Command = host.command(&program("env"));
    command.args(launcher).args(["sh", "-c", &format!("{shell}; exec \"$@\""), "sh"]).args(words);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // Nothing of ours: a failed comparison shows it all.
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    command.env("CGPU_TEST_SCRATCH", host.scratch.path());
    command.env("CGPU_CONFIG", host.path("cgpu.toml"));
    command.env("ODD", "a\u{301}=\n ").env("EMPTY", "");
    command.spawn().expect("env can be started")
}

#[test]
fn real_runtime_finds_process_as_engine_made_it() {
    let host = Host::new(Engine::Runc);
    let shell = program("sh");
    host.configure("cgpu.toml", &shell, "state");
    let odd = std::ffi::OsStr::new("--root=\u{e4} \n");
    let odd = odd.to_str().expect("this is text");
    for launcher in
        [&["--default-signal=PIPE"][..], &["--ignore-signal=PIPE", "--ignore-signal=HUP"]]
    {
        for setup in ["exec 7<cgpu.toml", "exec 7<cgpu.toml 0<&-", "exec 7<cgpu.toml 2>&- 1>&-"] {
            let run = |program: &Path| {
                let program = program.to_string_lossy();
                let words = [&*program, "-c", "kill -STOP $$", "name", odd, "", "--", "create"];
                seen(start(&host, launcher, setup, &words))
            };
            let (bare, wrapped) = (run(&shell), run(host.ours()));
            assert_eq!(bare, wrapped, "{launcher:?} {setup}");
            assert!(bare.descriptors.contains_key("7"));
            assert!(wrapped.arguments.starts_with(&*format!("{}\0-c\0", shell.display())));
        }
    }
}

/// Shells begin by unblocking everything, so this takes another program.
#[test]
fn blocked_signals_stay_blocked() {
    let host = Host::new(Engine::Runc);
    let sleep = program("sleep");
    host.configure("cgpu.toml", &sleep, "state");
    let blocked = |runtime: &Path| {
        let mut command = host.command(&program("env"));
        command.arg("--block-signal=USR1,TERM").arg(runtime).arg("1000");
        let mut child = command.spawn().expect("env can be started");
        let proc = Path::new("/proc").join(child.id().to_string());
        let sleeps = || fs::read_link(proc.join("exe")).is_ok_and(|exe| exe.ends_with("sleep"));
        let has_come = eventually(sleeps);
        let status = fs::read_to_string(proc.join("status")).unwrap_or_default();
        child.kill().and_then(|()| child.wait()).expect("a child of ours can be killed");
        assert!(has_come, "{status}");
        status.lines().find(|line| line.starts_with("SigBlk:")).unwrap_or_default().to_owned()
    };
    assert_eq!(blocked(&sleep), "SigBlk:\t0000000000004200");
    assert_eq!(blocked(host.ours()), "SigBlk:\t0000000000004200");
}

#[test]
fn creation_with_quota_leaks_nothing_into_real_runtime() {
    let host = Host::new(Engine::Runc);
    let script = host.scratch.script("runc", "#!/bin/sh\nkill -STOP $$\n");
    let config = host.configure("cgpu.toml", &script, "state");
    let text = fs::read_to_string(&config).expect("we wrote it");
    let log = format!("log = {:?}", host.path("cgpu.log").display().to_string());
    fs::write(&config, text.replace("log = \"\"", &log)).expect("we wrote it");
    host.bundle("b", &["ALIYUN_COM_GPU_MEM_CONTAINER=3"], "env");
    let run = |program: &Path| {
        let program = program.to_string_lossy();
        let launcher = ["--ignore-signal=PIPE"];
        let words = [&*program, "--root", "r", "create", "--bundle", "b", "id"];
        seen(start(&host, &launcher, "exec 7<cgpu.toml 0<&-", &words))
    };
    assert_eq!(run(&script), run(host.ours()));
    let log = fs::read_to_string(host.path("cgpu.log")).expect("the log is where it was wanted");
    assert!(log.contains("registered"), "{log}");
    assert!(host.registered().is_empty(), "its process is gone");
}

#[test]
fn the_engines_death_still_ends_the_real_runtime() {
    let host = Host::new(Engine::Runc);
    host.configure("cgpu.toml", &program("sh"), "state");
    let mut engine = host.command(&program("sh"));
    engine.args(["-c", "setpriv --pdeathsig KILL \"$@\" & wait", "engine"]);
    engine.arg(host.ours()).args(["-c", "echo $$ >pid; while :; do sleep 1; done"]);
    let mut engine = engine.spawn().expect("a shell can be started");
    let pid = || fs::read_to_string(host.path("pid")).unwrap_or_default().trim().to_owned();
    assert!(eventually(|| !pid().is_empty()));
    let proc = Path::new("/proc").join(pid());
    assert!(proc.exists());
    engine.kill().and_then(|()| engine.wait()).expect("a child of ours can be killed");
    let dead = || !fs::read(proc.join("cmdline")).is_ok_and(|line| !line.is_empty());
    assert!(eventually(dead), "it outlived its engine");
}
