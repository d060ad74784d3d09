//! What people see: `cgpu-smi` and `cgpu ps` while containers allocate, and while parts of the host
//! don't answer.

#![allow(clippy::unwrap_used, reason = "a test that can't go on may panic")]

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::activation::end_monitor;
use crate::gated::{FIRST_MIB, Gated, MIB, NO_MEMORY, RUNTIME, SECOND_MIB, stop};
use crate::nvml_standin;
use crate::support::{Outcome, eventually, run_with_timeout, timeout};

fn smi_command(gated: &Gated, words: &[&str]) -> Command {
    let mut command = gated.host.scratch.command(Path::new(RUNTIME).with_file_name("cgpu-smi"));
    // NVML is no part of the simulated driver.
    command.arg("--config").arg(gated.host.config()).arg("--no-nvml").args(words);
    command.env("LANG", "C.UTF-8").env_remove("LC_ALL");
    command
}

fn smi(gated: &Gated, words: &[&str]) -> Outcome {
    run_with_timeout(&mut smi_command(gated, words), timeout())
}

fn snapshot(gated: &Gated) -> Value {
    smi(gated, &["--format=json"]).ok().json()
}

/// One in which all monitors have answered but those that are meant to be silent: on a busy machine
/// they may not in time.
fn answered(silent: &[&str], check: impl Fn() -> Value) -> Value {
    let mut shown = Value::Null;
    eventually(|| {
        shown = check();
        let all = shown["containers"].as_array().unwrap();
        all.iter().all(|one| {
            one["state"] != "silent" || silent.contains(&one["id"].as_str().unwrap_or_default())
        })
    });
    shown
}

#[test]
fn status_shows_usage_per_container_and_process() {
    let gated = Gated::new();
    let one = gated.sleeping("one", 1000);
    let other = gated.sleeping("other", 2000);
    let mut holding: Vec<_> = [(&one, "300MiB"), (&one, "200MiB"), (&other, "700MiB")]
        .into_iter()
        .map(|(bundle, size)| gated.start(bundle, &["hold", size]))
        .collect();
    gated.soon_accounts("one", 500);
    gated.soon_accounts("other", 700);
    let shown = answered(&[], || snapshot(&gated));
    assert_eq!(shown["driver_version"], "535.161.08");
    let gpu = &shown["gpus"][0];
    assert_eq!(gpu["memory_total_bytes"], json!(FIRST_MIB * MIB));
    assert_eq!(gpu["memory_promised_bytes"], json!(3000 * MIB));
    assert_eq!(gpu["memory_used_bytes"], json!(1200 * MIB));
    assert_eq!((&gpu["shared_containers"], &gpu["free_weight"]), (&json!(2), &json!(18)));
    assert_eq!(gpu["utilization_percent"], Value::Null, "it is not known");
    assert_eq!(shown["gpus"][1]["memory_promised_bytes"], 0);
    let container = &shown["containers"][0];
    assert_eq!((&container["id"], &container["state"]), (&json!("one"), &json!("active")));
    assert_eq!(container["enforced"], true);
    assert_eq!(container["shares"][0]["memory_used_bytes"], json!(500 * MIB));
    assert_eq!(container["process_count"], 2);
    let processes = container["processes"].as_array().unwrap();
    let used: Vec<_> = processes.iter().map(|process| process["memory"][0][1].clone()).collect();
    assert_eq!(used, [json!(300 * MIB), json!(200 * MIB)], "those with most first");
    for process in processes {
        assert_eq!(process["name"], "rmtool");
        let pid = process["pid"].as_i64().unwrap();
        let words = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap();
        assert!(words.starts_with("/rmtool\0hold\0"), "{words}");
    }
    // What is refused is counted.
    let refused = gated.exec(&one, &["run", "start", "alloc 600MiB as a"]).fails();
    assert!(refused.stdout.contains(NO_MEMORY), "{refused}");
    let counted = || snapshot(&gated)["containers"][0]["calls"]["over_quota"].clone();
    assert!(eventually(|| counted() == 1), "{}", counted());
    // The same as people read it, once the process that was refused is gone and both monitors answer in time.
    let csv = "--query-container=id,gpu.index,memory.used,memory.quota,processes";
    let rows = || smi(&gated, &[csv, "--format=csv,noheader,nounits"]).ok().stdout;
    let expected = "one, 0, 500, 1000, 2\nother, 0, 700, 2000, 1\n";
    assert!(eventually(|| rows() == expected), "{}", rows());
    let mut page = String::new();
    let parts = ["1200 of 16000 MiB in use", "promised 3000 MiB", "containers 2 / 20", "rmtool"];
    let is_shown = || {
        page = smi(&gated, &["--processes"]).ok().stdout;
        parts.iter().all(|part| page.contains(part))
    };
    assert!(eventually(is_shown), "{parts:?}: {page}");
    let second = smi(&gated, &["-i", "1", "--query-gpu=memory.total,memory.used"]).ok().stdout;
    assert_eq!(second, format!("memory.total [MiB], memory.used [MiB]\n{SECOND_MIB} MiB, 0 MiB\n"));
    assert_eq!(smi(&gated, &["-L"]).ok().stdout.lines().count(), 2);
    assert!(smi(&gated, &["-q"]).ok().stdout.contains("memory.promised"));
    let refused = smi(&gated, &["-i", "7"]).exits(1);
    assert!(refused.stderr.contains("this host has no GPU 7"), "{refused}");
    // What a process had goes with it.
    for child in &mut holding {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    for pid in processes.iter().map(|process| process["pid"].as_i64().unwrap()) {
        let _ = kill(nix::unistd::Pid::from_raw(pid.try_into().unwrap()), Signal::SIGKILL);
    }
    assert!(eventually(|| snapshot(&gated)["containers"][0]["process_count"] == 0));
    for bundle in [&one, &other] {
        gated.host.runtime().delete(bundle).ok();
    }
    gated.soon_is_empty();
    let page = smi(&gated, &[]).ok().stdout;
    assert!(page.contains("no container uses a GPU by cgpu"), "{page}");
}

/// A monitor that does not answer leaves its row unknown, and the other rows as they are.
#[test]
fn silent_monitor_leaves_only_its_row_unknown() {
    let gated = Gated::new();
    let silent = gated.sleeping("silent", 1000);
    let other = gated.sleeping("other", 2000);
    let monitor = gated.monitor("silent______");
    stop(monitor);
    let shown = answered(&["silent"], || snapshot(&gated));
    let of = |id: &str| {
        let all = shown["containers"].as_array().unwrap();
        all.iter().find(|container| container["id"] == id).unwrap().clone()
    };
    assert_eq!(
        (&of("silent")["state"], &of("silent")["enforced"]),
        (&json!("silent"), &json!(false))
    );
    assert_eq!(of("silent")["shares"][0]["memory_used_bytes"], Value::Null);
    assert_eq!(shown["gpus"][0]["memory_used_bytes"], Value::Null, "no sum of what isn't known");
    assert_eq!((&of("other")["state"], &of("other")["enforced"]), (&json!("active"), &json!(true)));
    assert_eq!(of("other")["shares"][0]["memory_used_bytes"], 0);
    assert!(smi(&gated, &[]).ok().stdout.contains("silent: its monitor does not answer"));
    let listed = gated.host.cgpu(&["ps"]).ok().stdout;
    assert!(listed.contains("silent: its monitor does not answer"), "{listed}");
    kill(monitor, Signal::SIGCONT).unwrap();
    assert!(eventually(|| snapshot(&gated)["containers"][1]["state"] == "active"));
    for bundle in [&silent, &other] {
        gated.host.runtime().delete(bundle).ok();
    }
    gated.soon_is_empty();
}

/// What is shown is in the status files.
#[test]
fn reading_the_status_wakes_no_monitor() {
    let gated = Gated::new();
    let quiet = gated.sleeping("quiet", 1000);
    let busy = gated.sleeping("busy", 2000);
    let mut holding = gated.start(&busy, &["hold", "300MiB"]);
    gated.soon_accounts("busy", 300);
    let shown = |id: &str| {
        let all = snapshot(&gated)["containers"].as_array().unwrap().clone();
        all.into_iter().find(|container| container["id"] == id).unwrap()
    };
    let used = |id: &str| shown(id)["shares"][0]["memory_used_bytes"].clone();
    let program = || shown("busy")["processes"][0]["pid"].as_i64();
    assert!(eventually(|| program().is_some()));
    let program = program().unwrap();
    let are = |busy_mib: u64| used("busy") == json!(busy_mib * MIB) && used("quiet") == json!(0);
    assert!(eventually(|| are(300)));
    // The first thread takes questions.
    let monitor = gated.monitor("quiet_______");
    let waits = || {
        let status = std::fs::read_to_string(format!("/proc/{monitor}/status")).unwrap();
        let waits = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        waits.unwrap().trim().parse::<u64>().unwrap()
    };
    let is_left_alone = || {
        let before = waits();
        (0..20).for_each(|_| drop(gated.host.cgpu(&["ps"]).ok()));
        waits() < before + 10
    };
    assert!(eventually(is_left_alone));
    // A change is shown, too.
    kill(Pid::from_raw(program.try_into().unwrap()), Signal::SIGKILL).unwrap();
    holding.wait().unwrap();
    assert!(eventually(|| are(0)));
    for bundle in [&quiet, &busy] {
        gated.host.runtime().delete(bundle).ok();
    }
    gated.soon_is_empty();
}

#[test]
fn broken_state_is_reported_and_the_rest_shown() {
    let gated = Gated::new();
    let closed = gated.sleeping("closed", 1000);
    end_monitor(&gated);
    let other = gated.sleeping("other", 2000);
    let broken = gated.host.state_dir().join("containers/%2Fx,broken.json");
    fs::write(&broken, "{").unwrap();
    let shown = answered(&[], || snapshot(&gated));
    let states = shown["containers"].as_array().unwrap().iter().map(|one| one["state"].clone());
    assert_eq!(states.collect::<Vec<_>>(), ["closed", "active"]);
    let gaps = shown["gaps"].to_string();
    assert!(gaps.contains("broken.json"), "{gaps}");
    let page = smi(&gated, &[]).ok().stdout;
    assert!(page.contains("broken.json") && page.contains("closed: its monitor has ended"));
    // The exit status and the error say that the list is incomplete.
    let listed = gated.host.cgpu(&["ps"]).exits(1);
    assert!(listed.stdout.contains("other") && listed.stderr.contains("broken.json"), "{listed}");
    fs::remove_file(&broken).unwrap();
    for bundle in [&closed, &other] {
        gated.host.runtime().delete(bundle).ok();
    }
    gated.soon_is_empty();
}

/// What the driver reports is shown, and a driver that hangs keeps no reader waiting.
#[test]
fn driver_usage_is_shown_without_waiting_for_hangs() {
    let mut gated = Gated::new();
    let bundle = gated.sleeping("busy", 1000);
    let whole = gated.bundle_with("whole", |config| {
        let env = config["process"]["env"].as_array_mut().unwrap();
        env.push(json!("NVIDIA_VISIBLE_DEVICES=1"));
        config["process"]["args"] = json!(["sleep", "1000"]);
    });
    gated.host.runtime().create(&whole).ok();
    gated.host.runtime().start(&whole).ok();
    let mut holding = gated.start(&bundle, &["hold", "300MiB"]);
    gated.soon_accounts("busy", 300);
    let all = answered(&[], || snapshot(&gated))["containers"].clone();
    let pid = all[0]["processes"][0]["pid"].clone();
    let in_whole = all[1]["pid"].clone();
    // The library comes when the containers are there, or it would be given to them.
    let libraries = format!("nvml/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let libraries = gated.host.scratch.directory(&libraries);
    let root = gated.host.scratch.path().join("nvml");
    gated.host.set("driver.root", root.display().to_string());
    fs::copy(nvml_standin::compiled(), libraries.join(nvml_standin::LIBRARY)).unwrap();
    let uuids = gated.sim.state().gpus.iter().map(|gpu| gpu.uuid.clone()).collect::<Vec<_>>();
    let lines = format!(
        "gpu {} 0 00000000:07:00.0 {} ok - Simulated\nfigures {} 80 41 211500 300000\n\
         process {pid} {} 37\nprocess 1 5 9\n\
         gpu {} 1 00000000:08:00.0 {} ok - Simulated\nfigures {} 5 30 90000 300000\n\
         process {in_whole} {} -\n",
        uuids[0],
        FIRST_MIB * MIB,
        900 * MIB,
        310 * MIB,
        uuids[1],
        SECOND_MIB * MIB,
        500 * MIB,
        400 * MIB,
    );
    fs::write(libraries.join("nvml.txt"), &lines).unwrap();
    let by_driver = || {
        let mut command = gated.host.scratch.command(Path::new(RUNTIME).with_file_name("cgpu-smi"));
        command.arg("--config").arg(gated.host.config()).arg("--format=json");
        run_with_timeout(&mut command, timeout()).ok().json()
    };
    let mut shown = Value::Null;
    eventually(|| {
        shown = answered(&[], by_driver);
        shown["gaps"] == json!([])
    });
    assert_eq!(shown["gaps"], json!([]));
    let gpu = &shown["gpus"][0];
    let figures =
        ["utilization_percent", "temperature_celsius", "power_watts", "power_limit_watts"];
    assert_eq!(
        figures.map(|name| gpu[name].clone()),
        [json!(80), json!(41), json!(211.5), json!(300.0)]
    );
    assert_eq!(gpu["memory_used_bytes"], json!(900 * MIB), "the driver's own included");
    let of = |id: &str| {
        let all = shown["containers"].as_array().unwrap();
        all.iter().find(|container| container["id"] == id).unwrap().clone()
    };
    let share = &of("busy")["shares"][0];
    assert_eq!(share["utilization_percent"], 37);
    assert_eq!(share["memory_used_bytes"], json!(300 * MIB), "what counts against its quota");
    // A whole container's process is found by its cgroup.
    let whole_now = of("whole");
    assert_eq!((&whole_now["mode"], &whole_now["process_count"]), (&json!("whole"), &json!(1)));
    assert_eq!(whole_now["processes"][0]["name"], "sleep");
    assert_eq!(whole_now["shares"][0]["memory_used_bytes"], json!(400 * MIB));
    assert_eq!(whole_now["shares"][0]["utilization_percent"], 0, "it did nothing lately");
    // Longer than anybody waits.
    fs::write(libraries.join("nvml.txt"), format!("init_ms 600000\n{lines}")).unwrap();
    let shown = by_driver();
    assert!(shown["gaps"][0].as_str().unwrap().contains("NVIDIA's driver does not answer"));
    assert_eq!(shown["gpus"][0]["utilization_percent"], Value::Null);
    assert_eq!(shown["containers"].as_array().unwrap().len(), 2, "the rest is shown");
    holding.kill().unwrap();
    holding.wait().unwrap();
    for bundle in [&bundle, &whole] {
        gated.host.runtime().delete(bundle).ok();
    }
    gated.soon_is_empty();
}

/// A member of the group reads the status through the socket, and other callers get the reason why
/// not.
#[test]
fn group_member_reads_status_through_the_socket() {
    let mut gated = Gated::new();
    let socket = gated.host.scratch.path().join("view.sock");
    gated.host.set("view.socket", socket.display().to_string());
    let bundle = gated.sleeping("seen", 1000);
    let program = gated.programs(&["cgpu-smi"]).join("cgpu-smi");
    // As user 65534, in the group of that id.
    let check = |gated: &Gated, group: &str| {
        let mut command = gated.host.scratch.command("setpriv");
        command.args(["--reuid", "65534", "--regid", group, "--clear-groups"]);
        command.arg(&program).arg("--config").arg(gated.host.config());
        run_with_timeout(command.args(["--no-nvml", "--format=json"]), timeout())
    };
    let refused = check(&gated, "65534").exits(1);
    assert!(refused.stderr.contains("looking needs root (sudo), or membership"), "{refused}");
    let serve =
        |gated: &Gated| smi_command(gated, &["--serve"]).stderr(Stdio::piped()).spawn().unwrap();
    let unserved = |gated: &Gated, part: &str| {
        let said = smi(gated, &["--serve"]).exits(1);
        assert!(said.stderr.contains(part), "{said}");
    };
    unserved(&gated, "no group may look: set group under [view]");
    gated.host.set("view.group", "no-such-group");
    unserved(&gated, "there is no group no-such-group");
    gated.host.set("view.group", "daemon");
    fs::write(&socket, "").unwrap();
    unserved(&gated, "is there, and is no socket");
    fs::remove_file(&socket).unwrap();
    let daemon = nix::unistd::Group::from_name("daemon").unwrap().unwrap().gid.to_string();
    let mut server = serve(&gated);
    assert!(eventually(|| check(&gated, &daemon).status.success()));
    unserved(&gated, "is served already");
    let shown = answered(&[], || check(&gated, &daemon).ok().json());
    assert_eq!(
        (&shown["containers"][0]["id"], &shown["containers"][0]["enforced"]),
        (&json!("seen"), &json!(true))
    );
    let refused = check(&gated, "65534").exits(1);
    assert!(refused.stderr.contains("Permission denied"), "{refused}");
    // One that was killed leaves its socket, and the next takes its place.
    server.kill().unwrap();
    server.wait().unwrap();
    let refused = check(&gated, &daemon).exits(1);
    assert!(refused.stderr.contains("Connection refused"), "{refused}");
    let mut server = serve(&gated);
    assert!(eventually(|| check(&gated, &daemon).status.success()));
    server.kill().unwrap();
    server.wait().unwrap();
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

/// A page on a terminal of so many columns, and what is shown full screen until `keys` end it.
fn watched(gated: &Gated, columns: u32, until: &str, keys: &str) -> String {
    let words: Vec<String> = std::iter::once(smi_command(gated, &["--watch"]))
        .flat_map(|command| {
            let program = command.get_program().to_owned();
            let words = command.get_args().map(ToOwned::to_owned).collect::<Vec<_>>();
            std::iter::once(program).chain(words)
        })
        .map(|word| format!("'{}'", word.to_str().unwrap()))
        .collect();
    let line = format!("stty cols {columns} rows 30; exec {}", words.join(" "));
    let mut command = gated.host.scratch.command("script");
    command.args(["-q", "-f", "-e", "-c", &line, "/dev/null"]);
    command.env("LANG", "C.UTF-8").env("TERM", "xterm").env("SHELL", "/bin/sh");
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let (send, seen) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(read @ 1..) = stdout.read(&mut bytes) {
            if send.send(bytes[..read].to_vec()).is_err() {
                return;
            }
        }
    });
    let mut shown = Vec::new();
    let has = |shown: &[u8], part: &str| String::from_utf8_lossy(shown).contains(part);
    while !has(&shown, until) {
        let more = seen.recv_timeout(timeout());
        shown.extend(more.unwrap_or_else(|error| {
            panic!("{error}: {until} is not in {:?}", String::from_utf8_lossy(&shown))
        }));
    }
    child.stdin.as_mut().unwrap().write_all(keys.as_bytes()).unwrap();
    // It ends with the program.
    while let Ok(more) = seen.recv_timeout(timeout()) {
        shown.extend(more);
    }
    assert!(child.wait().unwrap().success(), "{}", String::from_utf8_lossy(&shown));
    String::from_utf8_lossy(&shown).into_owned()
}

#[test]
fn full_screen_shows_containers_and_restores_terminal() {
    let gated = Gated::new();
    let bundle = gated.sleeping("watched", 1000);
    let mut holding = gated.start(&bundle, &["hold", "300MiB"]);
    gated.soon_accounts("watched", 300);
    for columns in [20, 80, 200] {
        // Marks the container, opens its processes, filters, helps, and ends.
        let shown = watched(&gated, columns, "watched", "j\r?xfwat\rq");
        assert!(shown.contains("\u{1b}[?1049h"), "the other screen is used");
        assert!(shown.ends_with("\u{1b}[?25h") || shown.contains("\u{1b}[?1049l"), "{shown:?}");
        // Blanks are moves of the cursor, and only what changes is written again.
        for part in ["watched", "rmtool", "300", "16000"] {
            assert!(columns < 80 || shown.contains(part), "{part} at {columns}: {shown:?}");
        }
    }
    let refused = smi(&gated, &["--watch"]).exits(1);
    assert!(refused.stderr.contains("--watch needs a terminal"), "{refused}");
    holding.kill().unwrap();
    holding.wait().unwrap();
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}
