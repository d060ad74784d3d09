//! `cgpu setup`, the real program, on real engines: each starts with what was written for it,
//! runs plain containers and ones with a quota, and forgets the runtime again.
//!
//! Engines are private to their test, and so are their configurations. Needs root, docker,
//! containerd and podman. `CGPU_TEST_CONTAINERDS` may name more containerd programs, separated
//! by colons: each is asked what it makes of its own default configuration once that was edited.

#![allow(clippy::unwrap_used, reason = "clippy.toml allows it in tests, not in their helpers")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::host::Host;
use crate::support::{
    Containerd, Docker, IMAGE, Outcome, Podman, Restart, Scratch, program, run_with_timeout,
    timeout,
};
use serde_json::{Value, json};

const RUNTIME: &str = env!("CARGO_BIN_EXE_cgpu-runtime");

fn cgpu() -> &'static str {
    crate::support::sibling(RUNTIME, "cgpu")
}

/// The variables for 6000 of the GPU's 16000 MiB.
const QUOTA: [&str; 3] = [
    "ALIYUN_COM_GPU_MEM_CONTAINER=6000",
    "ALIYUN_COM_GPU_MEM_UNIT=MiB",
    "NVIDIA_VISIBLE_DEVICES=0",
];

/// What [`INSPECT`] prints in a container with the GPU.
const NODES: &str = "nvidia-uvm nvidia0 nvidiactl";

/// What a container sees of GPUs.
const INSPECT: &str = "ls /dev | grep nvidia | tr '\\n' ' '";

/// `cgpu setup WORDS`.
fn setup(words: &[&str]) -> Outcome {
    run_with_timeout(Command::new(cgpu()).arg("setup").args(words), timeout())
}

/// `cgpu setup ENGINE --file FILE WORDS`.
fn setup_file(engine: &str, file: &Path, words: &[&str]) -> Outcome {
    setup(&[&[engine, "--file", file.to_str().unwrap()], words].concat())
}

/// What `cgpu doctor` says of an engine whose file in /etc, by its path there, is `file`: how serious it is, and what.
fn doctor(scratch: &Scratch, engine: &str, path: &str, file: &Path) -> Vec<(String, String)> {
    let etc = scratch.directory("etc-for-doctor");
    let place = etc.join(path);
    fs::create_dir_all(place.parent().unwrap()).unwrap();
    fs::copy(file, place).unwrap();
    let mut command = scratch.command_over_etc(&etc, &[cgpu(), "doctor", "--format", "json"]);
    let json = run_with_timeout(&mut command, timeout()).json();
    let findings = json["findings"].as_array().unwrap().iter();
    let of_it = findings.filter(|found| found["name"] == engine);
    let text = |found: &Value, key: &str| found[key].as_str().unwrap().to_owned();
    of_it.map(|found| (text(found, "severity"), text(found, "what"))).collect()
}

fn config(host: &Host) -> String {
    host.config().display().to_string()
}

/// One file of the harness, whose runtime `cgpu` was another's and is gone now.
fn without_foreign_runtime(file: &Path, engine: &str, edit: impl FnOnce(&str) -> String) -> String {
    let text = fs::read_to_string(file).unwrap();
    let refused = setup_file(engine, file, &[]).exits(1);
    let words = format!("has a runtime `cgpu` that runs {}", program("runc").display());
    assert!(refused.stderr.contains(&words), "{refused}");
    assert_eq!(fs::read_to_string(file).unwrap(), text, "it is left as it was");
    let text = edit(&text);
    fs::write(file, &text).unwrap();
    text
}

/// With our runtime as its default, docker runs plain containers and quotas; after --remove it
/// forgets us.
#[test]
fn docker_setup_serves_by_default_and_is_reversible() {
    let host = Host::new();
    let mut docker = Docker::builder().env("CGPU_CONFIG", config(&host)).start();
    let file = docker.scratch().path().join("daemon.json");
    let text = without_foreign_runtime(&file, "docker", |text| {
        let mut json: Value = serde_json::from_str(text).unwrap();
        json["runtimes"].as_object_mut().unwrap().remove("cgpu");
        serde_json::to_string_pretty(&json).unwrap() + "\n"
    });

    let shown = setup_file("docker", &file, &["--default", "--dry-run"]).ok();
    assert!(shown.has_line("-  \"default-runtime\": \"runc\","), "{shown}");
    assert!(shown.has_line("+  \"default-runtime\": \"cgpu\","), "{shown}");
    assert_eq!(fs::read_to_string(&file).unwrap(), text, "a dry run writes nothing");
    let checked = setup_file("docker", &file, &["--default", "--check"]).exits(1);
    assert_eq!(checked.stdout, shown.stdout);
    assert_eq!(
        checked.stderr,
        "cgpu: the configuration of docker isn't what setup would make of it\n"
    );
    assert_eq!(fs::read_to_string(&file).unwrap(), text, "a check writes nothing");
    let done = setup_file("docker", &file, &["--default"]).ok();
    assert!(done.stdout.starts_with(&shown.stdout), "{done}");
    let step = match has_systemd() {
        true => "`systemctl reload docker`, so that docker reads it; containers run on",
        false => {
            "`kill -HUP $(cat /var/run/docker.pid)`, so that docker reads it; containers run on"
        }
    };
    assert!(done.has_line(&format!("next: {step}")), "{done}");
    setup_file("docker", &file, &["--default", "--check"]).ok();
    let again = setup_file("docker", &file, &["--default"]).ok();
    assert_eq!(
        again.stdout,
        format!(
            "nothing to do: the configuration of docker knows cgpu\n\
             if that isn't in force yet: {step}\n"
        )
    );
    let backup = file.with_file_name("daemon.json.cgpu-backup");
    assert_eq!(fs::read_to_string(&backup).unwrap(), text);

    docker.restart(Restart::Graceful);
    assert_eq!(docker.call(&["info", "--format", "{{.DefaultRuntime}}"]).ok().text(), "cgpu");
    let reported = || doctor(docker.scratch(), "docker", "docker/daemon.json", &file);
    let runs = format!("runtime cgpu is {RUNTIME} (/etc/docker/daemon.json)");
    assert_eq!(reported(), [("ok".to_owned(), runs)], "as docker itself says");
    let plain = docker.run(&["--rm", IMAGE, "sh", "-c", INSPECT]).ok();
    assert_eq!(plain.text(), "");
    let variables: Vec<&str> = QUOTA.iter().flat_map(|variable| ["-e", variable]).collect();
    let sleep = [IMAGE, "sleep", "1000"];
    let id = docker.run(&[&["-d", "--name", "one"], &variables[..], &sleep].concat()).ok();
    assert_eq!(host.limits_mib(id.text()), [6000]);
    assert_eq!(docker.exec("one", &["sh", "-c", INSPECT]).ok().text(), NODES);
    docker.remove("one").ok();
    host.soon_releases_all();

    let removed = setup_file("docker", &file, &["--remove", "--restart"]).ok();
    assert!(removed.has_line("done: docker has read it; containers run on"), "{removed}");
    assert_eq!(fs::read_to_string(&file).unwrap(), text, "it is what it was, to the byte");
    assert!(!backup.exists(), "{removed}");
    assert_eq!(runtimes(&docker), "runc crun runc");
    let unknown = "installed, and knows no runtime cgpu-runtime".to_owned();
    assert_eq!(reported(), [("note".to_owned(), unknown)]);
    docker.run(&["--rm", IMAGE, "true"]).ok();
    docker.run(&["--rm", "--runtime=cgpu", IMAGE, "true"]).fails();
}

fn has_systemd() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// dockerd's default runtime and those that are configured, and runc.
fn runtimes(docker: &Docker) -> String {
    let template = "{{.DefaultRuntime}}{{range $name, $_ := .Runtimes}} {{$name}}{{end}}";
    let said = docker.call(&["info", "--format", template]).ok();
    let words = said.text().split(' ').filter(|name| !name.starts_with("io.containerd."));
    words.collect::<Vec<_>>().join(" ")
}

/// `cgpu setup docker WORDS` for a dockerd whose file doesn't say where it listens.
fn setup_docker(docker: &Docker, words: &[&str]) -> Outcome {
    let scratch = docker.scratch().path();
    let mut command = Command::new(cgpu());
    command.args(["setup", "docker", "--file"]).arg(scratch.join("daemon.json")).args(words);
    let socket = format!("unix://{}", scratch.join("docker.sock").display());
    run_with_timeout(command.env("DOCKER_HOST", socket), timeout())
}

/// dockerd 20.10 panics at a reload where its default runtime is gone from its file, and keeps
/// what the file doesn't name: the containers of a host must not pay for that.
#[test]
fn docker_setup_removal_needs_no_restart() {
    let host = Host::new();
    let runc = program("runc");
    let nvidia = format!("{{\"runtimes\":{{\"nvidia\":{{\"path\":\"{}\"}}}}}}", runc.display());
    for (text, known) in [
        (Some(nvidia.as_str()), "runc nvidia runc"),
        (Some("{\"runtimes\":{}}\n"), "runc runc"),
        (Some("{}\n"), "runc runc"),
        (None, "runc runc"),
    ] {
        let docker = Docker::builder().env("CGPU_CONFIG", config(&host)).daemon_json(text).start();
        let file = docker.scratch().path().join("daemon.json");
        let setup_file = |words: &[&str]| setup_docker(&docker, words);
        let shown = setup_file(&["--default", "--restart", "--dry-run"]).ok();
        assert!(shown.has_line("would have docker read it; containers run on"), "{shown}");
        assert_eq!(runtimes(&docker), known, "a dry run changes nothing");
        let done = setup_file(&["--default", "--restart"]).ok();
        assert!(done.has_line("done: docker has read it; containers run on"), "{done}");
        assert!(runtimes(&docker).starts_with("cgpu cgpu "), "{}", runtimes(&docker));

        let variables = QUOTA.iter().flat_map(|variable| ["-e", variable]);
        let words: Vec<_> = ["-d", "--name", "one"].into_iter().chain(variables).collect();
        docker.run(&[&words[..], &[IMAGE, "sleep", "1000"]].concat()).ok();
        let pid = docker.inspect("one", "{{.State.Pid}}");
        // The file is cleaned first, as by somebody who forgets --restart, and then docker.
        let removed = setup_file(&["--remove"]).ok();
        let warning = "containers stop with it unless live-restore is on";
        assert!(removed.stdout.contains(warning), "{removed}");
        for again in 0..2 {
            let removed = setup_file(&["--remove", "--restart"]).ok();
            assert!(removed.has_line("done: docker has read it; containers run on"), "{removed}");
            assert_eq!(runtimes(&docker), known, "{text:?}, {again}");
        }
        setup_file(&["--default", "--restart"]).ok();
        assert!(runtimes(&docker).starts_with("cgpu cgpu "), "{}", runtimes(&docker));
        setup_file(&["--remove", "--restart"]).ok();
        assert_eq!(runtimes(&docker), known, "{text:?}");
        assert_eq!(fs::read_to_string(&file).ok().as_deref(), text, "it is what it was");
        assert!(!file.with_file_name("daemon.json.cgpu-backup").exists());
        assert!(!docker.log().contains("panic"), "{}", docker.log());
        assert_eq!(docker.inspect("one", "{{.State.Pid}}"), pid, "its containers run on");
        assert_eq!(docker.exec("one", &["sh", "-c", INSPECT]).ok().text(), NODES);
        docker.run(&["--rm", IMAGE, "true"]).ok();
        docker.remove("one").ok();
        host.soon_releases_all();
    }
}

/// If docker refuses its file, docker retains our runtime, and so does the file.
#[test]
fn refused_docker_reload_leaves_runtime_and_file_unchanged() {
    let docker = Docker::builder().daemon_json(Some("{}")).start();
    let file = docker.scratch().path().join("daemon.json");
    let setup_file = |words: &[&str]| setup_docker(&docker, words);
    setup_file(&["--default", "--restart"]).ok();
    // dockerd has this by a flag, and refuses a file that says it again.
    let mut json: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    json["iptables"] = json!(false);
    fs::write(&file, json.to_string()).unwrap();
    let refused = setup_file(&["--remove", "--restart"]).exits(1);
    let said = format!(
        "cgpu: docker reported no reload of {} within 10 s, and it is as it was; see what docker's \
         log says of it\n",
        file.display()
    );
    assert_eq!(refused.stderr, said);
    assert_eq!(fs::read_to_string(&file).unwrap(), json.to_string());
    assert_eq!(runtimes(&docker), "cgpu cgpu runc", "what it had is still in force");
}

/// A docker that doesn't run, or doesn't take its file, is reported.
#[test]
fn docker_not_running_or_not_reloading_is_reported() {
    let scratch = Scratch::new();
    let socket = scratch.path().join("docker.sock");
    let text = json!({"hosts": [format!("unix://{}", socket.display())]}).to_string();
    let file = scratch.file("daemon.json", &text);
    let done = setup_file("docker", &file, &["--restart"]).ok();
    assert!(
        done.stdout.ends_with(&format!(
            "docker doesn't answer at {}: No such file or directory (os error 2); where it runs, \
             restart it\n",
            socket.display()
        )),
        "{done}"
    );
    assert!(fs::read_to_string(&file).unwrap().contains(RUNTIME), "it is written all the same");
    // Who answers but isn't docker is no reason to change anything.
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let other = std::thread::spawn(move || {
        use std::io::{BufRead, BufReader, Write};
        let (mut stream, _) = listener.accept().unwrap();
        let request = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
        let lines: Vec<String> = request.take_while(|line| !line.is_empty()).collect();
        assert_eq!(lines, ["GET /info HTTP/1.0"]);
        stream.write_all(b"HTTP/1.0 404 Not Found\r\n\r\n").unwrap();
    });
    let written = fs::read_to_string(&file).unwrap();
    let refused = setup_file("docker", &file, &["--remove", "--restart"]).exits(1);
    other.join().unwrap();
    let said = "isn't understood: HTTP/1.0 404 Not Found; restart docker";
    assert!(refused.stderr.contains(said), "{refused}");
    assert_eq!(fs::read_to_string(&file).unwrap(), written);
}

/// With our runtime as its default, containerd makes every pod by it; after --remove it forgets us.
#[test]
fn containerd_setup_runs_every_pod_and_is_reversible() {
    let host = Host::new();
    let mut containerd = Containerd::builder().env("CGPU_CONFIG", config(&host)).start();
    let file = containerd.scratch().path().join("containerd.toml");
    let text = without_foreign_runtime(&file, "containerd", |text| {
        let end = text.find("\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.cgpu]");
        text[..end.unwrap()].to_owned()
    });
    setup_file("containerd", &file, &["--default"]).ok();
    // The state of this test's containers is the test's own, as runc's options have it.
    let written: toml::Table = fs::read_to_string(&file).unwrap().parse().unwrap();
    let ours = &written["plugins"]["io.containerd.grpc.v1.cri"]["containerd"]["runtimes"]["cgpu"];
    let root = containerd.runtime_root();
    assert_eq!(ours["options"]["Root"].as_str(), Some(root.to_str().unwrap()));
    let again = setup_file("containerd", &file, &["--default"]).ok();
    let known =
        "nothing to do: the configuration of containerd knows cgpu\nif that isn't in force yet";
    assert!(again.stdout.starts_with(known), "{again}");
    containerd.restart(Restart::Graceful);

    let cri = containerd.cri();
    let mut pod = cri.pod_config("one");
    pod["annotations"] = json!({"aliyun.com/gpu-visible-devices": "0"});
    // No handler: the default.
    let pod_id = cri.run_pod("", &pod);
    let mut container = cri.container_config("quota");
    container["envs"] = QUOTA[..2]
        .iter()
        .map(|variable| variable.split_once('=').unwrap())
        .map(|(key, value)| json!({"key": key, "value": value}))
        .collect();
    let id = cri.create(&pod_id, &container, &pod);
    cri.start(&id).ok();
    // The quota is the container's, the GPU the pod's: annotations reach the runtime.
    assert_eq!(host.limits_mib(&id), [6000]);
    assert_eq!(cri.exec_sync(&id, &["sh", "-c", INSPECT]).stdout.trim(), NODES);
    let plain_pod = cri.pod_config("plain");
    let plain_pod_id = cri.run_pod("", &plain_pod);
    let plain = cri.create(&plain_pod_id, &cri.container_config("plain"), &plain_pod);
    cri.start(&plain).ok();
    assert_eq!(cri.exec_sync(&plain, &["sh", "-c", INSPECT]).stdout.trim(), "");
    for container in [&id, &plain] {
        cri.stop(container).ok();
        cri.remove(container).ok();
    }
    for pod in [&pod_id, &plain_pod_id] {
        cri.remove_pod(pod).ok();
    }
    host.soon_releases_all();

    setup_file("containerd", &file, &["--remove"]).ok();
    assert_eq!(fs::read_to_string(&file).unwrap(), text, "it is what it was, to the byte");
    containerd.restart(Restart::Graceful);
    let cri = containerd.cri();
    let refused = cri.call("run-pod", &json!({"config": plain_pod, "runtime_handler": "cgpu"}));
    refused.fails();
}

/// What containerd says its configuration comes to.
fn dump(containerd: &Path, file: &Path) -> toml::Table {
    let mut command = Command::new(containerd);
    let dumped =
        run_with_timeout(command.arg("--config").arg(file).args(["config", "dump"]), timeout());
    dumped.ok().stdout.parse().unwrap()
}

/// runc's section as a cluster has it.
fn runc_of_a_cluster(plugin: &str) -> String {
    format!(
        "[plugins.\"{plugin}\".containerd.runtimes.runc]\n\
         runtime_type = \"io.containerd.runc.v2\"\n\
         privileged_without_host_devices = true\n\
         container_annotations = [\"a.io/*\"]\n\
         pod_annotations = [\"b.io/*\"]\n\
         cni_max_conf_num = 3\n\
         [plugins.\"{plugin}\".containerd.runtimes.runc.options]\n\
         SystemdCgroup = true\n\
         NoPivotRoot = true\n"
    )
}

/// What a runtime has in common with runc: all but what makes it itself.
fn like_runc(runtime: &toml::Value) -> toml::Value {
    let mut runtime = runtime.clone();
    runtime["options"].as_table_mut().unwrap().remove("BinaryName");
    let passed = runtime["pod_annotations"].as_array_mut().unwrap();
    passed.retain(|pattern| ![Some("aliyun.com/*"), Some("cgpu/*")].contains(&pattern.as_str()));
    // A value that is the default one says nothing, and is not copied.
    let options = runtime["options"].as_table_mut().unwrap();
    options.retain(|_, value| {
        let says = [value.as_str() != Some(""), value.as_bool() != Some(false)];
        says == [true; 2] && value.as_integer() != Some(0)
    });
    runtime.as_table_mut().unwrap().retain(|key, value| {
        key != "sandboxer" || ![Some(""), Some("podsandbox")].contains(&value.as_str())
    });
    runtime
}

/// What setup writes for each version of the configuration is read by containerd itself.
#[test]
fn containerd_reads_the_file_written_for_its_version() {
    let scratch = Scratch::new();
    let more = std::env::var("CGPU_TEST_CONTAINERDS").unwrap_or_default();
    let more = more.split(':').filter(|path| !path.is_empty()).map(PathBuf::from);
    for containerd in std::iter::once(program("containerd")).chain(more) {
        let default =
            run_with_timeout(Command::new(&containerd).args(["config", "default"]), timeout());
        let default = default.ok().stdout;
        let newest = default.parse::<toml::Table>().unwrap()["version"].as_integer().unwrap();
        let (old, new) = ("io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime");
        let plugin = if newest == 3 { new } else { old };
        let imports = format!("imports = [\"{}/*.toml\"]\n", scratch.path().join("d").display());
        let imported = format!("version = {newest}\n{}", runc_of_a_cluster(plugin));
        scratch.directory("e");
        let imported_file = scratch.file("e/50-cri.toml", &imported);
        // containerd 2 reads nothing of version 1.
        let first = "[plugins.cri.cni]\n  bin_dir = \"/x\"\n".to_owned();
        for text in (newest < 3).then_some(first).into_iter().chain([
            default.clone(),
            format!("# mine\nversion = {newest}\n"),
            "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/x\"\n".into(),
            format!("version = 2\n{imports}"),
            format!("version = {newest}\n{imports}{}", runc_of_a_cluster(plugin)),
            format!("version = {newest}\n{}", imports.replace("/d/", "/e/")),
        ]) {
            let file = scratch.file("containerd.toml", &text);
            let before = dump(&containerd, &file);
            setup_file("containerd", &file, &["--default"]).ok();
            let after = dump(&containerd, &file);
            let part = &after["plugins"][plugin];
            let runtime = &part["containerd"]["runtimes"]["cgpu"];
            assert_eq!(part["containerd"]["default_runtime_name"].as_str(), Some("cgpu"), "{text}");
            assert_eq!(runtime["options"]["BinaryName"].as_str(), Some(RUNTIME), "{text}");
            assert_eq!(runtime["runtime_type"].as_str(), Some("io.containerd.runc.v2"));
            let passed = runtime["pod_annotations"].as_array().unwrap();
            assert!(passed.contains(&"aliyun.com/*".into()), "{text}");
            assert!(passed.contains(&"cgpu/*".into()), "{text}");
            let runc = &part["containerd"]["runtimes"]["runc"];
            assert_eq!(like_runc(runtime), like_runc(runc), "{text}");
            let cluster = text.contains("/e/") || text.contains("NoPivotRoot = true");
            let systemd = runtime["options"].get("SystemdCgroup").and_then(toml::Value::as_bool);
            assert_eq!(systemd.unwrap_or_default(), cluster, "{text}");
            let default = "runc"; // which containerd 1 forgets once another is named
            assert!(part["containerd"]["runtimes"].get(default).is_some(), "{text}");
            let bin_dir = |dumped: &toml::Table| dumped["plugins"][plugin].get("cni").cloned();
            assert_eq!(bin_dir(&after), bin_dir(&before), "nothing else changes: {text}");
            setup_file("containerd", &file, &["--remove"]).ok();
            assert_eq!(fs::read_to_string(&file).unwrap(), text);
            assert_eq!(fs::read_to_string(&imported_file).unwrap(), imported);
        }
    }
}

/// A containerd without its CRI plugin, as docker ships it, is reported.
#[test]
fn disabled_cri_plugin_of_containerd_is_reported() {
    let scratch = Scratch::new();
    let file = scratch.file("config.toml", "disabled_plugins = [\"cri\"]\n");
    let done = setup_file("containerd", &file, &[]).ok();
    let words = format!(
        "{} names cri in disabled_plugins: Kubernetes can't use this containerd until that is \
         gone; ctr and nerdctl can",
        file.display()
    );
    assert!(done.has_line(&words), "{done}");
    assert!(setup_file("containerd", &file, &[]).ok().has_line(&words), "it is no news");
    let removed = setup_file("containerd", &file, &["--remove"]).ok();
    assert!(!removed.stdout.contains("Kubernetes"), "{removed}");
}

#[test]
fn podman_knows_us_by_name_and_by_default() {
    let host = Host::new();
    let podman = Podman::builder().start();
    let file = podman.scratch().path().join("containers.conf");
    let text = fs::read_to_string(&file).unwrap();
    // conmon hands no variable on, so the runtime's own flags stand in a program of that name.
    podman.scratch().directory("bin");
    let root = podman.scratch().path().join("runtime");
    let line = format!(
        "#!/bin/sh\nexec '{RUNTIME}' --root '{}' '--cgpu-config={}' \"$@\"\n",
        root.display(),
        config(&host)
    );
    let runtime = podman.scratch().script("bin/cgpu-runtime", &line);
    let options = ["--runtime", runtime.to_str().unwrap()];
    setup_file("podman", &file, &options).ok();

    let run = |global: &[&str], variables: &[&str], command: &[&str]| {
        let harness = podman.command();
        let mut words: Vec<_> = harness.get_args().map(|word| word.to_owned()).collect();
        let at = words.iter().position(|word| word == "--runtime").unwrap();
        words.drain(at..at + 2);
        let mut command_line = podman.scratch().command("podman");
        command_line.env("CONTAINERS_CONF", &file).args(words).args(global);
        command_line.args(["run", "--rm", "--network", "none", "--pull", "never"]);
        command_line.args(["--cgroup-parent", &podman.scratch().cgroup()]);
        command_line.args(variables.iter().flat_map(|variable| ["-e", variable]));
        run_with_timeout(command_line.arg(IMAGE).args(command), timeout())
    };
    let check = ["sh", "-c", INSPECT];
    assert_eq!(run(&["--runtime", "cgpu"], &QUOTA, &check).ok().text(), NODES);
    let reported = || doctor(podman.scratch(), "podman", "containers/containers.conf", &file);
    // podman's own choice is crun, which stays below ours.
    let link = podman.scratch().path().join("libexec/cgpu/over-crun/cgpu-runtime");
    let (link, crun) = (link.display(), program("crun"));
    let crun = crun.display();
    let runs = format!("runtime cgpu is {link}, over {crun} (/etc/containers/containers.conf)");
    assert_eq!(reported(), [("ok".to_owned(), runs)], "as podman itself has it");
    // podman knows how ours reports errors.
    let failed = run(&["--runtime", "cgpu"], &[], &["nosuch"]).fails();
    assert!(failed.stderr.contains("\"nosuch\": executable file not found"), "{failed}");
    assert!(!failed.stderr.contains("level=error"), "{failed}");
    host.soon_releases_all();
    // podman itself names the runtime before what it says.
    let is_named_once = |refused: &Outcome| {
        assert!(refused.stderr.contains(": cgpu: CGPU_MEMORY=x: "), "{refused}");
        assert_eq!(refused.stderr.matches("cgpu: ").count(), 1, "{refused}");
    };
    is_named_once(&run(&["--runtime", "cgpu"], &["CGPU_MEMORY=x"], &check).fails());
    setup_file("podman", &file, &[&options[..], &["--default"]].concat()).ok();
    assert_eq!(run(&[], &QUOTA, &check).ok().text(), NODES);
    is_named_once(&run(&[], &["CGPU_MEMORY=x"], &check).fails());
    assert_eq!(run(&[], &[], &check).ok().text(), "");
    host.soon_releases_all();
    let again = setup_file("podman", &file, &[&options[..], &["--restart"]].concat()).ok();
    assert_eq!(
        again.stdout,
        "nothing to do: the configuration of podman knows cgpu\n\
         podman reads it at its next command: nothing to restart\n"
    );
    setup_file("podman", &file, &["--remove"]).ok();
    assert_eq!(fs::read_to_string(&file).unwrap(), text, "it is what it was, to the byte");
    let unknown = "installed, and knows no runtime cgpu-runtime".to_owned();
    assert_eq!(reported(), [("note".to_owned(), unknown)]);
    run(&["--runtime", "cgpu"], &QUOTA, &check).fails();
}

/// In a mount namespace of its own, so that the paths are the real ones; what packages have is
/// read-only there, and no lists of ours could be taken out of it.
#[test]
fn podman_reads_the_drop_in_configuration_file() {
    let scratch = Scratch::new();
    scratch.directory("bin");
    let runtime = scratch.path().join("bin/cgpu-runtime");
    std::os::unix::fs::symlink(RUNTIME, &runtime).unwrap();
    let runtime = runtime.display();
    let script = format!(
        "set -e\n\
         cp -a /etc/containers '{scratch}/etc'\n\
         mount --bind '{scratch}/etc' /etc/containers\n\
         mount --bind /usr /usr\n\
         mount -o remount,bind,ro /usr\n\
         runtime() {{ podman --root '{scratch}/root' --runroot '{scratch}/run' \
         --tmpdir '{scratch}/tmp' --cgroup-manager cgroupfs info --format \
         '{{{{.Host.OCIRuntime.Name}}}} {{{{.Host.OCIRuntime.Path}}}}'; }}\n\
         '{cgpu}' setup podman --default --runtime '{runtime}' >/dev/null\n\
         runtime\n\
         '{cgpu}' setup podman --remove >/dev/null\n\
         runtime\n\
         ls /etc/containers/containers.conf.d '{scratch}/libexec'\n",
        scratch = scratch.path().display(),
        cgpu = cgpu(),
    );
    let mut command = scratch.command("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", &script]);
    let outcome = run_with_timeout(command.env_remove("CONTAINERS_CONF"), timeout()).ok();
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    // podman's own choice is crun, which stays below ours.
    let over = scratch.path().join("libexec/cgpu/over-crun/cgpu-runtime");
    assert_eq!(lines[0], format!("cgpu {}", over.display()), "{outcome}");
    assert!(lines[1].starts_with("crun "), "{outcome}");
    assert_eq!(lines.len(), 5, "nothing is left: {outcome}");
}

/// An invalid command line is refused, and CRI-O gets its file.
#[test]
fn invalid_command_line_is_refused_and_crio_configured() {
    setup(&["lxc"]).exits(2);
    setup(&["docker", "--remove", "--default"]).exits(2);
    let scratch = Scratch::new();
    let root = scratch.path().to_str().unwrap();
    let words = ["crio", "--root", root];
    let refused = setup(&words).exits(1);
    assert_eq!(
        refused.stderr,
        "cgpu: /usr/bin/cgpu-runtime isn't there or can't be executed; install cgpu, or name it \
         with --runtime\n"
    );
    scratch.directory("usr/bin");
    let runtime = scratch.file("usr/bin/cgpu-runtime", "");
    fs::set_permissions(runtime, fs::Permissions::from_mode(0o755)).unwrap();
    let done = setup(&[&words[..], &["--default"]].concat()).ok();
    assert!(done.has_line("wrote /etc/crio/crio.conf.d/99-cgpu.conf"), "{done}");
    let file = scratch.path().join("etc/crio/crio.conf.d/99-cgpu.conf");
    let table: toml::Table = fs::read_to_string(&file).unwrap().parse().unwrap();
    let runtime = &table["crio"]["runtime"];
    assert_eq!(runtime["default_runtime"].as_str(), Some("cgpu"));
    let program = runtime["runtimes"]["cgpu"]["runtime_path"].as_str();
    assert_eq!(program, Some("/usr/bin/cgpu-runtime"));
    setup(&[&words[..], &["--remove"]].concat()).ok();
    assert!(!file.exists());
}

/// In a mount namespace of its own, with systemd's word that it runs and a systemctl that does what a file says.
#[test]
fn failed_restart_is_retried_until_success() {
    let scratch = Scratch::new();
    let (etc, bin) = (scratch.directory("etc"), scratch.directory("bin"));
    fs::write(etc.join("config.toml"), "version = 2\n").unwrap();
    let (status, log) = (scratch.path().join("status"), scratch.path().join("log"));
    let script = format!("#!/bin/sh\necho \"$@\" >> {log:?}\nexit $(cat {status:?})\n");
    // A shell writes it: no fork in another test has it open for writing.
    let written = Command::new("/bin/sh")
        .args(["-c", r#"printf %s "$1" > "$0" && chmod 755 "$0""#])
        .arg(bin.join("systemctl"))
        .arg(script)
        .status();
    assert!(written.unwrap().success());
    let steps = r#"
        mount --bind "$0" /etc/containerd && mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system || exit 9
        PATH=$1:$PATH
        for outcome in 1 1 0 0; do
            echo $outcome > "$2"
            "$3" setup containerd --runtime "$4" --restart --if-changed && echo ended well || echo ended badly
            "$3" setup containerd --runtime "$4" --check && echo checked well || echo checked badly
        done
    "#;
    let mut command = scratch.command("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", steps]);
    command.args([&etc, &bin, &status]).args([cgpu(), RUNTIME]);
    let reported = run_with_timeout(&mut command, timeout()).ok();
    let ends: Vec<&str> =
        reported.stdout.lines().filter(|line| line.starts_with("ended")).collect();
    assert_eq!(ends, ["ended badly", "ended badly", "ended well", "ended well"], "{reported}");
    let checks: Vec<&str> =
        reported.stdout.lines().filter(|line| line.starts_with("checked")).collect();
    assert_eq!(checks, ["checked badly", "checked badly", "checked well", "checked well"]);
    let owed = "containerd has not been restarted since its configuration changed";
    assert_eq!(reported.stdout.matches(owed).count(), 2, "{reported}");
    let restarts = fs::read_to_string(log).unwrap();
    assert_eq!(restarts.matches("restart containerd").count(), 3, "{restarts}");
}
