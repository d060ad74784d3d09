//! The same under docker, containerd and podman, with unchanged images.

use std::path::Path;

use serde_json::json;

use crate::gated::{ASK, Gated, MIB, NO_MEMORY, RMTOOL, RUNTIME, got_bytes, monitors, rmtool};
use crate::host::ask;
use crate::orphaned::{UNREGISTERED, lose_records};
use crate::support::{
    Containerd, Docker, IMAGE, Outcome, Podman, Restart, Scratch, run_with_timeout, timeout,
    wait_until,
};

pub(crate) const HOOK: &str = env!("CARGO_BIN_EXE_cgpu-hook");

/// Asks for too much, and then for what can be had.
pub(crate) const APP: [&str; 8] = [
    RMTOOL,
    "run",
    "open",
    "client",
    "device 0",
    "subdevice",
    "alloc 1001MiB as a",
    "alloc 1000MiB as b",
];

pub(crate) fn config(gated: &Gated) -> String {
    gated.host.config().display().to_string()
}

/// `-e` and each variable, then rmtool as a volume.
pub(crate) fn options(volume: &str) -> Vec<&str> {
    let mut options: Vec<&str> = ASK.iter().flat_map(|variable| ["-e", variable]).collect();
    options.extend(["-v", volume]);
    options
}

pub(crate) fn volume() -> String {
    format!("{}:{RMTOOL}:ro", rmtool().display())
}

#[track_caller]
pub(crate) fn was_held(reported: &Outcome) {
    assert!(reported.stdout.contains(&format!("alloc a {NO_MEMORY}")), "{reported}");
    assert!(reported.stdout.contains("alloc b ok"), "{reported}");
}

/// As `cgpu setup` links it for an engine whose containers are crun's: the configuration's
/// candidates, runc first, don't count.
#[test]
fn wrapper_in_over_crun_directory_runs_crun() {
    let gated = Gated::new();
    let crun = gated.host.scratch.crun_program();
    let over = gated.host.scratch.directory("libexec/cgpu/over-crun");
    let link = |name: &str, to: &Path| std::os::unix::fs::symlink(to, over.join(name)).unwrap();
    link("cgpu-runtime", Path::new(RUNTIME));
    link("runtime", &crun);
    let config = config(&gated);
    let runtime = gated.host.scratch.runtime(over.join("cgpu-runtime")).env("CGPU_CONFIG", config);
    assert!(runtime.call(&["--version"]).ok().stdout.starts_with("crun version"));
    let bundle = gated.bundle("over", 1000, &["sleep", "1000"]);
    runtime.create(&bundle).ok();
    runtime.start(&bundle).ok();
    let filled = runtime.exec(&bundle, &[RMTOOL, "fill"]).ok();
    assert_eq!(got_bytes(&filled), 1000 * MIB, "{filled}");
    assert_eq!(runtime.status(&bundle), "running");
    runtime.delete(&bundle).ok();
    gated.soon_is_empty();
    // If its runtime is gone, the wrapper reports that, and runs nothing else.
    std::fs::remove_file(over.join("runtime")).unwrap();
    let refused = runtime.call(&["--version"]).fails();
    let words = format!("none of {} is an executable file", over.join("runtime").display());
    assert!(refused.stderr.contains(&words), "{refused}");
}

#[test]
fn docker_quota_holds_for_container_and_every_exec() {
    let gated = Gated::new();
    let mut docker = Docker::builder()
        .runtime(RUNTIME)
        .runtime_arg(format!("--cgpu-config={}", config(&gated)))
        .live_restore()
        .start();
    let volume = volume();
    let run = |docker: &Docker, more: &[&str], command: &[&str]| {
        docker.run(&[&["--runtime=cgpu"], more, &options(&volume), &[IMAGE], command].concat())
    };
    was_held(&run(&docker, &["--rm"], &APP));
    gated.soon_is_empty();

    // The other kinds of profile: none, and docker's own for a container with more rights.
    for more in [&["--security-opt", "seccomp=unconfined"][..], &["--cap-add", "SYS_PTRACE"]] {
        was_held(&run(&docker, &[&["--rm"], more].concat(), &APP));
    }
    run(&docker, &["-d", "--name", "one"], &["sleep", "1000"]).ok();
    run(&docker, &["-d", "--name", "two"], &["sleep", "1000"]).ok();
    for name in ["one", "two"] {
        let filled = docker.exec(name, &[RMTOOL, "fill"]).ok();
        assert_eq!(got_bytes(&filled), 1000 * MIB, "{filled}");
    }
    docker.call(&["update", "--memory", "512m", "--memory-swap", "512m", "one"]).ok();
    docker.call(&["pause", "one"]).ok();
    gated.soon_accounts(docker.inspect("one", "{{.Id}}").trim(), 0);
    docker.call(&["unpause", "one"]).ok();
    // The engine goes and comes; the monitors don't notice.
    for how in [Restart::Graceful, Restart::Killed] {
        docker.restart(how);
        let filled = docker.exec("one", &[RMTOOL, "fill"]).ok();
        assert_eq!(got_bytes(&filled), 1000 * MIB, "{how:?}: {filled}");
    }
    // A container whose record is lost takes no more processes, and says why; it goes on itself.
    let containers = gated.host.state_dir().join("containers");
    let aside = gated.host.scratch.path().join("aside");
    std::fs::rename(&containers, &aside).unwrap();
    let refused = docker.exec("one", &[RMTOOL, "fill"]).fails();
    for part in UNREGISTERED {
        assert!(refused.stdout.contains(part) || refused.stderr.contains(part), "{refused}");
    }
    std::fs::rename(&aside, &containers).unwrap();
    docker.call(&["stop", "--time", "1", "one"]).ok();
    docker.call(&["kill", "two"]).ok();
    gated.soon_is_empty();
    docker.call(&["start", "one"]).ok();
    assert_eq!(got_bytes(&docker.exec("one", &[RMTOOL, "fill"]).ok()), 1000 * MIB);
    for name in ["one", "two"] {
        docker.remove(name).ok();
    }
    gated.soon_is_empty();
}

#[test]
fn under_containerd_the_quota_holds() {
    let gated = Gated::new();
    let containerd =
        Containerd::builder().runtime(RUNTIME).env("CGPU_CONFIG", config(&gated)).start();
    let mount = format!("type=bind,src={},dst={RMTOOL},options=rbind:ro", rmtool().display());
    let mut options: Vec<&str> = ASK.iter().flat_map(|variable| ["--env", variable]).collect();
    options.extend(["--mount", &mount]);
    was_held(&containerd.run_and_read(&[&options[..], &["--rm"]].concat(), "app", &APP));
    containerd.run(&[&options[..], &["-d"]].concat(), "demo", &["sleep", "1000"]).ok();
    let filled = containerd.exec("demo", &[RMTOOL, "fill"]).ok();
    assert_eq!(got_bytes(&filled), 1000 * MIB, "{filled}");
    containerd.remove("demo").ok();
    gated.soon_is_empty();
}

#[test]
fn under_podman_the_quota_holds() {
    let gated = Gated::new();
    let podman = Podman::builder()
        .runtime(RUNTIME)
        .runtime_flag(format!("cgpu-config={}", config(&gated)))
        .start();
    let volume = volume();
    let run = |more: &[&str], command: &[&str]| {
        podman.run(&[more, &options(&volume), &[IMAGE], command].concat())
    };
    was_held(&run(&["--rm"], &APP));
    run(&["-d", "--name", "demo"], &["sleep", "1000"]).ok();
    let filled = podman.exec("demo", &[RMTOOL, "fill"]).ok();
    assert_eq!(got_bytes(&filled), 1000 * MIB, "{filled}");
    lose_records(&gated);
    let refused = podman.exec("demo", &[RMTOOL, "fill"]).fails();
    assert!(refused.stderr.contains(UNREGISTERED[0]), "{refused}");
    podman.remove("demo").ok();
    assert!(wait_until(timeout(), || monitors(&gated.host).is_empty()));
    gated.host.gc();
    gated.soon_is_empty();
}

/// What the hook puts into a bundle, crun ignores if an annotation says so, and an image can carry that.
#[test]
fn podman_precreate_hook_refuses_quota_with_remedy() {
    let gated = Gated::new();
    let hooks = gated.host.scratch.directory("hooks.d");
    let hook = json!({
        "version": "1.0.0",
        "hook": {"path": HOOK, "args": ["cgpu-hook", "precreate", "--config", config(&gated)]},
        "when": {"always": true},
        "stages": ["precreate"],
    });
    std::fs::write(hooks.join("cgpu-precreate.json"), hook.to_string()).unwrap();
    let podman = Podman::builder().hooks_dir(&hooks).start();
    let volume = volume();
    let run = |more: &[&str], command: &[&str]| {
        podman.run(&[more, &options(&volume), &[IMAGE], command].concat())
    };
    run(&["--rm"], &APP).fails();
    // podman does not show what a hook says.
    let way_out = "make cgpu-runtime the runtime (podman --runtime cgpu, or runtime = \"cgpu\" under \
                   [engine] in containers.conf; `cgpu setup podman` registers it)";
    assert!(gated.host.log().contains(way_out), "{}", gated.host.log());
    let reported = gated.host.cgpu(&["events"]).ok();
    assert!(reported.stdout.contains("podman's precreate hook can't enforce it"), "{reported}");
    assert!(monitors(&gated.host).is_empty());
    // A container that asks for nothing is started.
    let plain = podman.run(&["--rm", IMAGE, "echo", "plain"]).ok();
    assert_eq!(plain.text(), "plain");
    gated.soon_is_empty();
}

/// As a Kubernetes RuntimeClass has it: the handler is `cgpu`.
#[test]
fn pod_quota_holds_under_every_seccomp_profile_kind() {
    let gated = Gated::new();
    let containerd =
        Containerd::builder().runtime(RUNTIME).env("CGPU_CONFIG", config(&gated)).start();
    let cri = containerd.cri();
    let pod = cri.pod_config("gated");
    let pod_id = cri.run_pod("cgpu", &pod);
    let mut main = cri.container_config("main");
    main["mounts"] = json!([{"container_path": RMTOOL, "host_path": rmtool(), "readonly": true}]);
    let variables = ASK.iter().filter_map(|variable| variable.split_once('='));
    main["envs"] = variables.map(|(key, value)| json!({"key": key, "value": value})).collect();
    // `SecurityProfile`: none is named; RuntimeDefault; Unconfined.
    let profiles = [json!(null), json!({"profile_type": 0}), json!({"profile_type": 1})];
    let mut filters = Vec::new();
    for (at, profile) in profiles.into_iter().enumerate() {
        main["metadata"]["name"] = json!(format!("main-{at}"));
        main["linux"] = json!({"security_context": {"seccomp": profile}});
        let id = cri.create(&pod_id, &main, &pod);
        cri.start(&id).ok();
        let reported = cri.exec_sync(&id, &APP);
        assert!(
            reported.stdout.contains(&format!("alloc a {NO_MEMORY}")),
            "{profile}: {reported:?}"
        );
        assert!(reported.stdout.contains("alloc b ok"), "{profile}: {reported:?}");
        let status = cri.exec_sync(&id, &["grep", "Seccomp_filters", "/proc/self/status"]).stdout;
        let count = status.split_whitespace().next_back().map(str::parse::<u32>);
        filters.push(count.expect("a kernel since 5.9").expect("a number"));
        lose_records(&gated);
        let refused = cri.exec_refused(&id, &APP);
        assert!(refused.stderr.contains(UNREGISTERED[0]), "{refused}");
        cri.stop(&id).ok();
        cri.remove(&id).ok();
        assert!(wait_until(timeout(), || monitors(&gated.host).is_empty()));
        gated.host.gc();
        gated.soon_is_empty();
    }
    assert_eq!(filters[1], filters[2] + 1, "beside ours there was the profile's: {filters:?}");
    cri.remove_pod(&pod_id).ok();
}

/// The container that `cgpu ps WORD` shows: its id and its name.
#[track_caller]
fn named(gated: &Gated, word: &str) -> (String, String) {
    let listed = gated.host.cgpu(&["ps", word, "--format", "json"]).ok().json();
    let text = |name: &str| listed[0][name].as_str().unwrap_or_default().to_owned();
    (text("id"), text("name"))
}

/// A container is known by the name that docker has for it now, after a rename too.
#[test]
fn container_has_its_current_docker_name() {
    let gated = Gated::new();
    let docker = Docker::builder()
        .runtime(RUNTIME)
        .runtime_arg(format!("--cgpu-config={}", config(&gated)))
        .start();
    let volume = volume();
    let run = |network: &str, more: &[&str]| {
        let run = ["run", "--pull", "never", "-d", "--runtime=cgpu", "--network", network];
        let command = [IMAGE, "sleep", "1000"];
        let said = docker.call(&[&run[..], more, &options(&volume), &command].concat()).ok();
        said.text().to_owned()
    };
    let web = run("none", &["--name", "web"]);
    // It has the other's files of its network, and says that it is the other.
    let shares = ["--name", "db", "--annotation", "io.kubernetes.cri.container-name=web"];
    let help = docker.call(&["run", "--help"]).ok();
    let knows_annotations = help.stdout.contains("--annotation");
    let db = run("container:web", if knows_annotations { &shares } else { &shares[..2] });
    assert_eq!(named(&gated, "web"), (web.clone(), "web".into()));
    assert_eq!(named(&gated, "db"), (db.clone(), "db".into()));
    assert_eq!(named(&gated, &db[..9]), (db.clone(), "db".into()));
    let table = gated.host.cgpu(&["ps"]).ok();
    let row = format!("{}  web ", &web[..12]);
    assert!(table.stdout.lines().any(|line| line.starts_with(&row)), "{table}");
    let set = gated.host.cgpu(&["set", "web", "--memory", "700"]).ok();
    assert_eq!(set.text(), "web: GPU 0 700 MiB, weight 1, priority normal");
    assert_eq!(got_bytes(&docker.exec("web", &[RMTOOL, "fill"]).ok()), 700 * MIB);
    assert_eq!(got_bytes(&docker.exec("db", &[RMTOOL, "fill"]).ok()), 1000 * MIB);
    docker.call(&["rename", "web", "www"]).ok();
    assert_eq!(named(&gated, "www"), (web, "www".into()));
    let unknown = gated.host.cgpu(&["set", "web", "--memory", "600"]).exits(1);
    assert!(unknown.stderr.contains("no registered container is \"web\""), "{unknown}");
    for name in ["db", "www"] {
        docker.remove(name).ok();
    }
    gated.soon_is_empty();
}

/// A container is known by the name that podman has for it, and a pod's container by all its names.
#[test]
fn podman_and_pod_containers_resolve_by_name() {
    let gated = Gated::new();
    let podman = Podman::builder()
        .runtime(RUNTIME)
        .runtime_flag(format!("cgpu-config={}", config(&gated)))
        .start();
    let volume = volume();
    let more = ["-d", "--name", "web"];
    let sleep = ["sleep", "1000"];
    let id = podman.run(&[&more, &options(&volume)[..], &[IMAGE], &sleep].concat()).ok();
    let id = id.text().to_owned();
    assert_eq!(named(&gated, "web"), (id.clone(), "web".into()));
    podman.call(&["rename", "web", "www"]).ok();
    assert_eq!(named(&gated, "www"), (id, "www".into()));
    gated.host.cgpu(&["set", "www", "--memory", "700"]).ok();
    assert_eq!(got_bytes(&podman.exec("www", &[RMTOOL, "fill"]).ok()), 700 * MIB);
    podman.remove("www").ok();
    gated.soon_is_empty();

    let containerd =
        Containerd::builder().runtime(RUNTIME).env("CGPU_CONFIG", config(&gated)).start();
    let cri = containerd.cri();
    let pod = cri.pod_config("named");
    let pod_id = cri.run_pod("cgpu", &pod);
    let mut main = cri.container_config("main");
    let variables = ASK.iter().filter_map(|variable| variable.split_once('='));
    main["envs"] = variables.map(|(key, value)| json!({"key": key, "value": value})).collect();
    let id = cri.create(&pod_id, &main, &pod);
    cri.start(&id).ok();
    let of = |part: &str| pod["metadata"][part].as_str().expect("it is text").to_owned();
    let name = format!("{}/{}/main", of("namespace"), of("name"));
    for word in ["main", &name] {
        assert_eq!(named(&gated, word), (id.clone(), name.clone()));
    }
    cri.stop(&id).ok();
    cri.remove(&id).ok();
    cri.remove_pod(&pod_id).ok();
    gated.soon_is_empty();
}

/// A name can be anything if it isn't checked: an annotation of a bundle.
#[test]
fn hostile_name_neither_moves_cursor_nor_impersonates() {
    let gated = Gated::new();
    let runtime = gated.host.runtime();
    let hostile = format!("\u{1b}[2J\n{}victim", "x".repeat(100_000));
    let named = |id: &str, name: &str| {
        gated.bundle_with(id, |config| {
            ask(config, 1000);
            config["process"]["args"] = json!(["sleep", "1000"]);
            config["annotations"] = json!({"nerdctl/name": name});
        })
    };
    let both = [named("victim", "own"), named("attacker", &hostile), named("twin", "victim")];
    for bundle in &both {
        runtime.create(bundle).ok();
    }
    let table = gated.host.cgpu(&["ps"]).ok();
    assert!(table.stdout.is_ascii() || table.stdout.contains('…'), "{table}");
    assert_eq!(table.stdout.lines().count(), 4, "{table}");
    assert!(table.stdout.lines().all(|line| line.chars().count() < 250), "{table}");
    assert!(!table.stdout.contains('\u{1b}'), "{table}");
    // The id itself goes before another's name.
    gated.host.cgpu(&["set", "victim", "--memory", "500"]).ok();
    let limits = |id: &str| gated.host.limits_mib(id);
    let all = ["victim", "attacker", "twin"].map(limits);
    assert_eq!(all, [[500], [1000], [1000]].map(Vec::from));
    for bundle in &both {
        runtime.delete(bundle).ok();
    }
    gated.soon_is_empty();
}

/// Rows that a text takes on a terminal of 80 columns.
fn rows(text: &str) -> usize {
    text.lines().map(|line| line.chars().count().div_ceil(80).max(1)).sum()
}

/// What `make demo` shows with the programs of a release, under each engine.
#[test]
fn the_demo_shows_its_results_on_one_screen() {
    let scratch = Scratch::new();
    let rmtool = rmtool();
    let programs = rmtool.parent().expect("it is in a directory");
    assert!(programs.join("cgpu-sim").exists(), "cargo build --workspace --bins");
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/demo");
    let mut demo = scratch.command(demo);
    let reported = run_with_timeout(demo.arg(programs).env("DEMO_ALL", "1"), timeout()).ok();
    assert!(!reported.stdout.contains("skipped"), "{reported}");
    assert_eq!(reported.stderr, "", "{reported}");
    for line in [
        "GPU 0: 6452 MiB total, 6452 MiB free",
        "GPU 0: 8000 MiB total, 3904 MiB free",
        "GPU 0: 1075 MiB total, 1075 MiB free",
        "refused: status=0x51",
        "   one: 6144 of 6452 MiB   two: 4096 of 5376 MiB   unreserved: 4302 MiB",
        "   three: 0 of 6452 MiB   two: 4096 of 8000 MiB   unreserved: 1678 MiB",
    ] {
        assert!(reported.has_line(line), "no {line:?} in {reported}");
    }
    // Computing time at 1:2, and what it comes to: kernels of half a millisecond.
    let share = |name: &str, share: &str| {
        let mut rows = reported.stdout.lines().map(|line| line.split_whitespace());
        rows.any(|mut row| row.nth(1) == Some(name) && row.nth(3) == Some(share))
    };
    assert!(share("one", "33%") && share("two", "67%"), "{reported}");
    let kernels = reported.stdout.lines().find(|line| line.contains("kernels a second"));
    let kernels: Vec<f64> = kernels
        .into_iter()
        .flat_map(str::split_whitespace)
        .filter_map(|word| word.parse().ok())
        .collect();
    assert!(matches!(kernels[..], [one, two] if one > 0.0 && two > 1.3 * one), "{reported}");
    let bars = reported.stdout.lines().filter(|line| line.starts_with("  │") && line.contains('░'));
    assert_eq!(bars.filter(|bar| bar.contains("█") && bar.ends_with("│")).count(), 2, "{reported}");
    let (rows, last) = (rows(&reported.stdout), reported.stdout.lines().rev().nth(2));
    assert!(rows < 60, "{rows} rows: {reported}");
    assert!(last.is_some_and(|line| line.starts_with("You saw ")), "{reported}");
    assert!(
        !reported.stdout.contains(" INFO ") && !reported.stdout.contains(" WARN "),
        "{reported}"
    );
}
