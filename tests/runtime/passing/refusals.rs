//! What can't be had, and how the engine and its user learn of it.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::Value;

use super::host::{ENGINES, Engine, GPU_MIB, Host, asking, assert_same, borrowed, uuid};
use crate::support::{Outcome, program, run_with_timeout, timeout};

/// Variables, and what the message must name.
const REFUSED: &[(&[&str], &[&str])] = &[
    (&["ALIYUN_COM_GPU_MEM_CONTAINER=-1"], &["ALIYUN_COM_GPU_MEM_CONTAINER=-1"]),
    (&["ALIYUN_COM_GPU_MEM_CONTAINER=3.5"], &["ALIYUN_COM_GPU_MEM_CONTAINER=3.5"]),
    (&["ALIYUN_COM_GPU_MEM_CONTAINER=3,,4"], &["ALIYUN_COM_GPU_MEM_CONTAINER=3,,4"]),
    (
        &["ALIYUN_COM_GPU_MEM_CONTAINER=99999999999999999999"],
        &["ALIYUN_COM_GPU_MEM_CONTAINER=99999999999999999999"],
    ),
    (
        &["ALIYUN_COM_GPU_MEM_CONTAINER=1,2,3"],
        &["ALIYUN_COM_GPU_MEM_CONTAINER=1,2,3", "3 values for 2 GPUs"],
    ),
    (
        &["ALIYUN_COM_GPU_MEM_CONTAINER=16"],
        &["ALIYUN_COM_GPU_MEM_CONTAINER=16", "ALIYUN_COM_GPU_MEM_DEV=15"],
    ),
    (&["ALIYUN_COM_GPU_MEM_DEV=x"], &["ALIYUN_COM_GPU_MEM_DEV=x"]),
    (&["ALIYUN_COM_GPU_SCHD_WEIGHT=0"], &["ALIYUN_COM_GPU_SCHD_WEIGHT=0"]),
    (&["ALIYUN_COM_GPU_SCHD_WEIGHT=26"], &["ALIYUN_COM_GPU_SCHD_WEIGHT=26", "1 to 20"]),
    (&["ALIYUN_COM_GPU_HIGH_PRIO=2"], &["ALIYUN_COM_GPU_HIGH_PRIO=2"]),
    (&["CGPU_DISABLE=perhaps"], &["CGPU_DISABLE=perhaps"]),
    (&["NVIDIA_VISIBLE_DEVICES=7"], &["NVIDIA_VISIBLE_DEVICES=7", "no GPU 7"]),
    (
        &["ALIYUN_COM_GPU_VISIBLE_DEVICES=GPU-ffff"],
        &["ALIYUN_COM_GPU_VISIBLE_DEVICES=GPU-ffff", "no GPU GPU-ffff"],
    ),
    (
        &["NVIDIA_VISIBLE_DEVICES=no-gpu-has-6GiB-to-run"],
        &["NVIDIA_VISIBLE_DEVICES=no-gpu-has-6GiB-to-run", "the scheduler found no GPU"],
    ),
    (&["ALIYUN_COM_GPU_MEM_CONTAINER=3\u{1}"], &["ALIYUN_COM_GPU_MEM_CONTAINER=\"3\\u{1}\""]),
    (&["ALIYUN_COM_GPU_MEM_CONTAINER=RAW"], &["ALIYUN_COM_GPU_MEM_CONTAINER=\"3\\u{fffd}\""]),
];

/// The one line on standard error, after everything else about a refusal was seen to be
/// right too.
#[track_caller]
fn refusal(host: &Host, bundle: &Path, id: &str, log: &Path) -> String {
    let file = bundle.join("config.json");
    let check = || {
        let meta = fs::metadata(&file).expect("a bundle has a config.json");
        (meta.ino(), meta.mtime_nsec(), fs::read(&file).expect("it can be read"))
    };
    let before = check();
    let outcome = host.wrapped(&[
        "--log",
        &log.to_string_lossy(),
        "--log-format",
        "json",
        "create",
        "--bundle",
        &bundle.to_string_lossy(),
        "--pid-file",
        &bundle.join("pid").to_string_lossy(),
        id,
    ]);
    let line = one_line(&outcome.exits(1));
    let logged = fs::read_to_string(log).expect("the log was written");
    let last: Value = serde_json::from_str(logged.lines().last().unwrap_or_default())
        .expect("the last line is JSON");
    assert_eq!((&last["level"], &last["msg"]), (&"error".into(), &line.as_str().into()));
    let time = last["time"].as_str().expect("the time is a string");
    let time = humantime::parse_rfc3339(time).expect("the time is as RFC 3339 wants it");
    let age = SystemTime::now().duration_since(time).unwrap_or_default();
    assert!(age.as_secs() < 60, "{last}");
    assert_eq!(logged.lines().count(), 1, "{logged}");
    assert_eq!(check(), before, "the bundle was touched");
    assert!(!bundle.join("pid").exists());
    line
}

#[track_caller]
fn one_line(outcome: &Outcome) -> String {
    assert_eq!(outcome.stdout, "");
    let line = outcome.stderr.strip_suffix('\n').unwrap_or_default();
    assert!(line.starts_with("cgpu: ") && !line.contains('\n'), "{outcome}");
    line.to_owned()
}

#[test]
fn invalid_request_is_refused_with_name_and_value() {
    for engine in ENGINES {
        let host = Host::new(engine);
        let bundle = host.bundle("id", &[], "env");
        for (at, (env, named)) in REFUSED.iter().enumerate() {
            let mut config = bundle.config();
            let asked = asking("3", "0,1");
            let all = [&borrowed(&asked)[..], env].concat();
            config["process"]["env"] = all.into();
            bundle.write_config(&config);
            let file = bundle.directory.join("config.json");
            let text = fs::read(&file).expect("a bundle has a config.json");
            if let Some(at) = text.windows(4).position(|part| part == b"=RAW") {
                let text = [&text[..at], b"=3\xff", &text[at + 4..]].concat();
                fs::write(&file, text).expect("a bundle can be written to");
            }
            let log = host.path(&format!("log-{at}"));
            let line = refusal(&host, &bundle.directory, "id", &log);
            for name in *named {
                assert!(line.contains(name), "{line} doesn't say {name}");
            }
            // The raw bytes can't be read as JSON again.
            bundle.write_config(&config);
        }
        assert!(host.listed().is_empty());
        assert!(!host.path("state/containers").exists() || host.registered().is_empty());
    }
}

#[test]
fn message_without_log_is_only_on_standard_error() {
    let host = Host::new(Engine::Runc);
    host.bundle("id", &["ALIYUN_COM_GPU_MEM_CONTAINER=x"], "env");
    let outcome = host.wrapped(&["run", "-b", "id", "id"]).exits(1);
    assert!(one_line(&outcome).contains("ALIYUN_COM_GPU_MEM_CONTAINER=x"));
    // Text, where the engine wants no JSON; a log that can't be written hides nothing.
    let log = host.path("log").to_string_lossy().into_owned();
    host.wrapped(&["--log", &log, "run", "-b", "id", "id"]).exits(1);
    let text = fs::read_to_string(&log).expect("the log was written");
    assert!(text.starts_with("time=\"") && text.contains("\" level=error msg=\"cgpu: "), "{text}");
    let outcome = host.wrapped(&["--log", "/nowhere/log", "run", "-b", "id", "id"]).exits(1);
    one_line(&outcome);
}

/// The files below `directory`, by their names from there.
fn files(directory: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).expect("it can be listed").flatten() {
        match entry.path() {
            path if path.is_dir() => {
                let name = entry.file_name().to_string_lossy().into_owned();
                found.extend(files(&path).into_iter().map(|file| format!("{name}/{file}")));
            }
            _ => found.push(entry.file_name().to_string_lossy().into_owned()),
        }
    }
    found.sort();
    found
}

#[test]
fn refusal_is_logged_where_cruns_errors_would_be() {
    let host = Host::new(Engine::Crun);
    let bundle = host.bundle("id", &[], "env");
    let config = |asks: bool| {
        let mut config = bundle.config();
        let memory = if asks { "x" } else { "0" };
        config["process"]["env"] = [format!("ALIYUN_COM_GPU_MEM_CONTAINER={memory}")].into();
        // crun itself refuses this one.
        config["root"]["path"] = "nowhere".into();
        bundle.write_config(&config);
    };
    for (at, log) in ["file:ABSOLUTE", "ABSOLUTE", "file:log", "log", "journald:id", "syslog:id"]
        .into_iter()
        .enumerate()
    {
        let written = |asks: bool| {
            config(asks);
            let directory = host.scratch.directory(&format!("log-{at}-{asks}"));
            let copied = host.scratch.directory(&format!("log-{at}-{asks}/bundle"));
            fs::copy(bundle.directory.join("config.json"), copied.join("config.json"))
                .expect("a bundle can be copied");
            let absolute = directory.join("absolute").display().to_string();
            let mut command = host.command(if asks { host.ours() } else { host.real() });
            command.current_dir(&directory).arg("--root").arg(host.path("root"));
            command.args(["--log", &log.replace("ABSOLUTE", &absolute), "--log-format", "json"]);
            command.args(["create", "--bundle", "bundle", "id"]);
            let outcome = run_with_timeout(&mut command, timeout()).exits(1);
            let files: Vec<String> = files(&directory);
            let logged = files.iter().find(|file| *file != "bundle/config.json");
            let text = logged
                .map(|file| fs::read_to_string(directory.join(file)).expect("the log can be read"));
            (outcome, files, text)
        };
        let (bare, ours) = (written(false), written(true));
        assert_eq!(ours.1, bare.1, "{log}: {}\n{}", bare.0, ours.0);
        let line = one_line(&ours.0);
        if let Some(text) = ours.2 {
            let entry: Value = serde_json::from_str(&text).expect("it is one line of JSON");
            assert_eq!(entry["msg"], line, "{log}");
        }
    }
}

/// A full GPU is refused with its holders, until one of them is removed.
#[test]
fn full_gpu_is_refused_naming_its_current_holders() {
    for engine in ENGINES {
        let host = Host::new(engine);
        for (id, parts) in [("first", "8"), ("second", "7"), ("third", "1")] {
            host.bundle(id, &borrowed(&asking(parts, "0")), "exec sleep 1000");
        }
        let create = |id: &str| {
            let dir = host.path(id).to_string_lossy().into_owned();
            host.wrapped(&["create", "--bundle", &dir, id])
        };
        create("first").ok();
        create("second").ok();
        let (first, second, third) = (GPU_MIB * 8 / 15, GPU_MIB * 7 / 15, GPU_MIB / 15);
        let log = host.path("log");
        let line = refusal(&host, &host.path("third"), "third", &log);
        let [one, two] = [format!("first: {first} MiB"), format!("second: {second} MiB")];
        let sentence = |holders: String| {
            format!(
                "cgpu: GPU 0 ({}) has {} MiB of {GPU_MIB} MiB left, this container asks for \
                 {third} MiB; held by {holders}; ask for less (ALIYUN_COM_GPU_MEM_CONTAINER=1), or stop one \
                 of them",
                uuid(0),
                GPU_MIB - first - second
            )
        };
        let orders = [format!("{one}, {two}"), format!("{two}, {one}")].map(sentence);
        assert!(orders.contains(&line), "{line}");
        let mut ids = host.listed();
        ids.sort();
        assert_eq!(ids, ["first", "second"]);
        assert_eq!(host.registered().len(), 2);

        host.wrapped(&["delete", "--force", "first"]).ok();
        create("third").ok();
        assert_eq!(host.registered().len(), 2);
        host.wrapped(&["delete", "--force", "second"]).ok();
        host.wrapped(&["delete", "--force", "third"]).ok();
        assert!(host.registered().is_empty());
    }
}

/// A copy of cgpu's runtime where everybody may run it.
fn for_everybody(host: &Host) -> PathBuf {
    let copy = host.path("cgpu-runtime");
    let cp = |from: &Path| {
        run_with_timeout(host.command(&program("cp")).arg(from).arg(&copy), timeout()).ok()
    };
    cp(host.ours());
    let readable = |path: &Path| {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("it is ours")
    };
    readable(host.scratch.path());
    readable(&copy);
    copy
}

/// An engine that is not the host's root gets no quota, and otherwise the real runtime.
#[test]
fn unprivileged_engine_is_refused_quotas_and_otherwise_proxied() {
    let host = Host::new(Engine::Runc);
    let ours = for_everybody(&host);
    host.bundle("asks", &borrowed(&asking("3", "0")), "env");
    host.bundle("plain", &[], "echo plain");
    let unprivileged = &["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"][..];
    let namespace = &["unshare", "--user", "--map-root-user"][..];
    for launcher in [unprivileged, namespace] {
        let root = host.scratch.directory(&format!("root-{}", launcher[0]));
        fs::set_permissions(&root, fs::Permissions::from_mode(0o777)).expect("it is ours");
        let run = |runtime: &Path, id: &str| {
            let mut command = host.command(&program(launcher[0]));
            command.args(&launcher[1..]).arg(runtime).arg("--root").arg(&root);
            run_with_timeout(command.args(["run", "--bundle", id, id]), timeout())
        };
        let refused = run(&ours, "asks").exits(1);
        assert_eq!(
            one_line(&refused),
            "cgpu: the engine isn't run by the host's root, and only root's containers have quotas, \
             or GPUs of a host with exclusive = true; run the engine as root, or ask for whole GPUs: \
             drop the quota (CGPU_MEMORY, ALIYUN_COM_GPU_*, NVIDIA_GPU_MEMORY_LIMIT)"
        );
        assert_same(&run(host.real(), "plain"), &run(&ours, "plain"));
    }
    assert!(!host.has_state());
}
