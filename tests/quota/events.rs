//! What is reported of containers: `cgpu events`, `cgpu logs`, and the log.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use serde_json::{Value, json};

use crate::activation::end_monitor;
use crate::gated::{ASK, FIRST_MIB, Gated, MIB, NO_MEMORY, RMTOOL, RUNTIME, rmtool};
use crate::host::ask;
use crate::support::{Docker, IMAGE, eventually, run_with_timeout, timeout};
use crate::table::{QUOTA_MIB, words_of};

/// When a file of events is full, in bytes.
const FULL_BYTES: u64 = 4 << 20;

/// What `cgpu events` has, of one container or of all.
#[track_caller]
fn events(gated: &Gated, word: Option<&str>) -> Vec<Value> {
    let words: Vec<&str> = ["events", "--json"].into_iter().chain(word).collect();
    let reported = gated.host.cgpu(&words);
    if !reported.status.success() && reported.stderr.contains("no event of a container") {
        return Vec::new();
    }
    reported.ok().stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// Their kinds, in order.
fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["kind"].as_str().expect("it has a kind")).collect()
}

/// Waits until there is one of that kind of that container; it.
#[track_caller]
fn soon(gated: &Gated, word: &str, kind: &str) -> Value {
    let find = || events(gated, Some(word)).into_iter().find(|event| event["kind"] == kind);
    eventually(|| find().is_some());
    find().unwrap_or_else(|| panic!("no {kind}: {:?}", events(gated, None)))
}

/// Follows the events; lines come as they are printed.
fn follow(gated: &Gated, more: &[&str]) -> (Child, Receiver<String>) {
    let mut command = gated
        .host
        .scratch
        .command(crate::support::sibling(env!("CARGO_BIN_EXE_cgpu-runtime"), "cgpu"));
    command.arg("--config").arg(gated.host.config()).args(["events", "--follow"]).args(more);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("cgpu can be started");
    let lines = BufReader::new(child.stdout.take().expect("it is a pipe")).lines();
    let (sender, receiver) = channel();
    std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line)));
    (child, receiver)
}

/// Waits for a line with that in it.
#[track_caller]
fn comes(lines: &Receiver<String>, part: &str) -> String {
    loop {
        let line = lines.recv_timeout(timeout()).unwrap_or_else(|_| panic!("{part} didn't come"));
        if line.contains(part) {
            return line;
        }
    }
}

/// A container's events report its lifecycle, and why its memory ran out.
#[test]
fn events_report_lifecycle_and_refused_allocations() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    let begin = ["run", "open", "client", "device 0", "alloc 300MiB as a"];
    let reported = gated.exec(&bundle, &[&begin[..], &["alloc 701MiB as b"]].concat());
    assert!(reported.stdout.contains(&format!("alloc b {NO_MEMORY}")), "{reported}");
    gated.host.cgpu(&["set", "app", "--memory", "1200"]).ok();
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
    let all = events(&gated, Some("app"));
    assert_eq!(kinds(&all), ["created", "allocation_refused", "resized", "removed"], "{all:#?}");
    let [created, refused, resized, removed] = all.try_into().unwrap();
    let root = gated.host.runtime().root().display().to_string();
    assert_eq!((&created["id"], &created["root"]), (&json!("app"), &json!(root)));
    assert_eq!(created["gpus"][0]["quota_bytes"], 1000 * MIB);
    assert_eq!(created["backend"], "gate");
    let figures = ["asked_bytes", "used_bytes", "quota_bytes"].map(|name| &refused[name]);
    assert_eq!(figures, [&json!(701 * MIB), &json!(300 * MIB), &json!(1000 * MIB)]);
    assert_eq!((&refused["gpu"], &refused["program"]), (&json!(0), &json!("rmtool")));
    assert_eq!(refused["gpu_uuid"], created["gpus"][0]["uuid"]);
    let pid = |name: &str| refused[name].as_u64().expect("it is a number");
    assert!(pid("pid") > pid("container_pid"), "{refused}");
    let quotas = ["former_quota_bytes", "quota_bytes"].map(|name| &resized[name]);
    assert_eq!(quotas, [&json!(1000 * MIB), &json!(1200 * MIB)]);
    let times = [created, refused, resized, removed].map(|event| event["at_us"].as_u64().unwrap());
    assert!(times.is_sorted() && times[0] > 1_700_000_000_000_000, "{times:?}");
    // For people, and in the log, the same.
    let said = "asked for 701 MiB of GPU 0; 300 MiB of the quota of 1000 MiB are in use";
    for verb in ["events", "logs"] {
        let shown = gated.host.cgpu(&[verb, "app"]).ok();
        assert_eq!(shown.stdout.matches(said).count(), 1, "{shown}");
        assert_eq!(shown.stdout.lines().count(), 4, "{shown}");
    }
    let log = gated.host.log();
    assert!(log.contains(said) && log.lines().count() == 4, "{log}");
    let error = gated.host.cgpu(&["logs", "absent"]).exits(1);
    assert!(error.stderr.contains("no line about a container"), "{error}");
}

/// A flood of refused allocations yields few events, and each refusal is counted in one of them.
#[test]
fn refusal_flood_yields_few_events_with_full_count() {
    let mut gated = Gated::new();
    gated.host.set("isolation.managed_memory", "charge");
    let bundle = gated.sleeping("app", 1000);
    let begin = ["run", "open", "client", "device 0"];
    let begun = Instant::now();
    let flood = gated.exec(&bundle, &[&begin[..], &["refused 100000 1001MiB"]].concat()).ok();
    assert!(flood.stdout.contains("refused ok times=100000"), "{flood}");
    let refusals = |all: &[Value]| -> u64 {
        let refused = all.iter().filter(|event| event["kind"] == "allocation_refused");
        let count = |event: &Value| {
            u64::from(event["asked_bytes"].is_u64()) + event["left_out"].as_u64().unwrap_or(0)
        };
        refused.map(count).sum()
    };
    // Before the refusals that were left out are reported.
    gated.update();
    gated.fills(&bundle, 1000);
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
    let all = events(&gated, Some("app"));
    // `fill` ends with refusals of its own.
    assert!(refusals(&all) > 100_000, "{all:#?}");
    assert!(refusals(&all) < 100_100, "{all:#?}");
    // Of each program ten at once, and one each ten seconds; and what else there is to report.
    let most = 2 * (10 + begun.elapsed().as_secs() / 10 + 1) + 5;
    assert!(all.len() as u64 <= most, "{} of {most}", all.len());
    assert!(gated.host.log().lines().count() as u64 <= most);
}

#[test]
fn omitted_refusals_are_reported_when_the_container_ends() {
    let gated = Gated::new();
    let words = ["run", "open", "client", "device 0", "refused 1000 1001MiB"];
    gated.run("app", 1000, &[&[RMTOOL], &words[..]].concat()).ok();
    gated.soon_is_empty();
    let all = events(&gated, Some("app"));
    let refused = all.iter().filter(|event| event["kind"] == "allocation_refused");
    let sum: u64 = refused.map(|event| 1 + event["left_out"].as_u64().unwrap_or(0)).sum();
    assert_eq!(sum, 1000, "{all:#?}");
    // Ten at once, and then one each ten seconds; and the last, which knows of the rest.
    assert!(all.len() >= 12 && kinds(&all).contains(&"removed"), "{all:#?}");
}

#[test]
fn managed_memory_over_quota_is_an_event_too() {
    let mut gated = Gated::new();
    gated.host.set("isolation.managed_memory", "charge");
    gated.run("app", 1000, &[RMTOOL, "run", "start", "uvm-init", "managed 1001MiB"]);
    let refused = soon(&gated, "app", "allocation_refused");
    assert_eq!(refused["asked_bytes"], 1001 * MIB);
    gated.soon_is_empty();
}

/// An event of a refused container creation has its reason, and its text moves no terminal's
/// cursor.
#[test]
fn refused_creation_has_reason_and_moves_no_cursor() {
    let gated = Gated::new();
    let first = gated.sleeping("first", FIRST_MIB - 1000);
    let bundle = gated.bundle("greedy", 1001, &["true"]);
    let outcome = gated.host.runtime().create(&bundle).exits(1);
    let refused = soon(&gated, "greedy", "refused");
    assert_eq!(refused["cause"], "memory");
    let reason = refused["reason"].as_str().unwrap().to_owned();
    assert_eq!(outcome.stderr.trim(), format!("cgpu: {reason}"));
    let evil = "a\u{1b}[2J\u{9b}1m\u{202e}";
    let bundle = gated.bundle_with("evil", |config| {
        ask(config, 1001);
        config["annotations"] = json!({"nerdctl/name": evil});
    });
    gated.host.runtime().create(&bundle).exits(1);
    for words in [&["events"][..], &["events", "--json"], &["logs", "evil"]] {
        let shown = gated.host.cgpu(words).ok();
        assert!(shown.stdout.contains("evil"), "{shown}");
        let is_plain = |c: char| c == '\n' || !c.is_control() && c != '\u{202e}';
        assert!(shown.stdout.chars().all(is_plain), "{shown}");
    }
    gated.host.runtime().delete(&first).ok();
    gated.soon_is_empty();
}

/// That a process is killed for untracked memory is an event.
#[test]
fn kill_for_untracked_memory_is_an_event() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", QUOTA_MIB);
    let killed = || {
        let _ = gated.exec(&bundle, &words_of(&["hide-slack"]));
        let all = events(&gated, Some("app"));
        all.into_iter().find(|event| event["kind"] == "killed")
    };
    let mut event = None;
    // It is a race, which the attacker may lose.
    assert!(eventually(|| {
        event = killed();
        event.is_some()
    }));
    let event = event.unwrap();
    assert_eq!(event["reason"], "killed: it used memory past the quota's monitor");
    assert_eq!(event["program"], "rmtool");
    assert_eq!(event["gpu"], 0);
    assert_eq!(event["gpu_uuid"], gated.sim.state().gpus[0].uuid);
    assert!(event["excess_bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{event}");
    let is_line =
        |line: &str| line.contains(" WARN killed: it used memory") && line.contains(" id=\"app\"");
    let is_reported = || gated.host.log().lines().any(is_line);
    assert!(eventually(is_reported), "{}", gated.host.log());
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

#[test]
fn a_monitor_that_is_updated_is_an_event() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    gated.fills(&bundle, 1000);
    gated.update();
    let event = soon(&gated, "app", "monitor_replaced");
    assert_eq!(event["reason"], "a newer program goes on in the monitor");
    gated.fills(&bundle, 1000);
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

/// The first check reports it, and no later one does again.
#[test]
fn a_monitor_that_is_killed_is_one_event() {
    let checks: [fn(&Gated); 2] = [
        |gated| drop(gated.host.gc()),
        |gated| {
            let next = gated.sleeping("next", 500);
            gated.host.runtime().delete(&next).ok();
        },
    ];
    for check in checks {
        let gated = Gated::new();
        let bundle = gated.sleeping("app", 1000);
        gated.fills(&bundle, 1000);
        end_monitor(&gated);
        check(&gated);
        let event = soon(&gated, "app", "monitor_lost");
        let reason = event["reason"].as_str().unwrap();
        for part in ["driver calls fail from now on", "it was killed", "create the container again"]
        {
            assert!(reason.contains(part), "{event}");
        }
        (0..3).for_each(|_| check(&gated));
        assert_eq!(gated.host.gc(), "");
        let all = events(&gated, Some("app"));
        let lost = all.iter().filter(|event| event["kind"] == "monitor_lost").count();
        assert_eq!(lost, 1, "{all:#?}");
        assert_eq!(gated.host.container("app")["state"], "closed");
        gated.host.runtime().delete(&bundle).ok();
        gated.soon_is_empty();
    }
}

/// A reader that follows sees a container created later, even if the file is renamed meanwhile.
#[test]
fn follower_sees_later_containers_across_file_rotation() {
    let gated = Gated::new();
    // Of the state directory, too, nothing is there yet.
    let (mut child, lines) = follow(&gated, &["app"]);
    let (mut all, all_lines) = follow(&gated, &["--json"]);
    let bundle = gated.sleeping("app", 1000);
    comes(&lines, " app: created: GPU 0 1000 MiB, backend gate");
    comes(&all_lines, "\"kind\":\"created\"");
    let file = gated.host.state_dir().join("events");
    let before = fs::read_to_string(&file).unwrap();
    let full = fs::OpenOptions::new().append(true).open(&file).unwrap();
    full.set_len(FULL_BYTES).unwrap();
    gated.host.cgpu(&["set", "app", "--memory", "700"]).ok();
    comes(&lines, " app: changed: the quota on GPU 0 is 700 MiB instead of 1000 MiB");
    assert!(file.with_file_name("events.1").exists());
    assert!(!before.is_empty() && fs::metadata(&file).unwrap().len() < FULL_BYTES / 2);
    let other = gated.sleeping("other", 1000);
    comes(&all_lines, "\"id\":\"other\"");
    for bundle in [&bundle, &other] {
        gated.host.runtime().delete(bundle).ok();
    }
    comes(&lines, " app: removed");
    let early: Vec<String> = lines.try_iter().collect();
    assert!(early.iter().all(|line| !line.contains("other")), "{early:?}");
    for child in [&mut child, &mut all] {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    // What was before is there still.
    assert_eq!(kinds(&events(&gated, Some("app"))), ["created", "resized", "removed"]);
    gated.soon_is_empty();
}

/// A reader that has read enough closes the pipe, and the events command exits quietly.
#[test]
fn events_command_exits_quietly_when_its_reader_closes() {
    let gated = Gated::new();
    gated.run("app", 1000, &["true"]).ok();
    for follow in ["", "--follow"] {
        let script = format!(
            "{} --config {} events {follow} 2>{dir}/said | head -n 1; cat {dir}/said",
            crate::support::sibling(env!("CARGO_BIN_EXE_cgpu-runtime"), "cgpu"),
            gated.host.config().display(),
            dir = gated.host.scratch.path().display(),
        );
        let mut command = Command::new("sh");
        let said = run_with_timeout(command.args(["-c", &script]), timeout()).ok();
        assert!(
            said.stdout.contains(" app: created") && said.stdout.lines().count() == 1,
            "{said}"
        );
    }
    gated.soon_is_empty();
}

#[test]
fn caller_without_root_is_refused_with_the_reason() {
    let gated = Gated::new();
    gated.run("app", 1000, &["true"]).ok();
    fs::set_permissions(gated.host.scratch.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let script = format!(
        "exec setpriv --reuid 65534 --clear-groups {} --config {} events",
        crate::support::sibling(env!("CARGO_BIN_EXE_cgpu-runtime"), "cgpu"),
        gated.host.config().display()
    );
    let mut command = Command::new("sh");
    let said = run_with_timeout(command.args(["-c", &script]), timeout());
    assert!(!said.status.success() && said.stderr.contains("root"), "{said}");
    gated.soon_is_empty();
}

/// No other socket can be put in the place of journald's, except in a mount namespace.
#[test]
fn log_can_be_journald_or_standard_error() {
    let mut gated = Gated::new();
    gated.host.set("log", "journald");
    let socket = gated.host.scratch.directory("journal");
    let journald = std::os::unix::net::UnixDatagram::bind(socket.join("socket")).unwrap();
    journald.set_read_timeout(Some(timeout())).unwrap();
    let script =
        "mkdir -p /run/systemd/journal && mount --bind \"$0\" /run/systemd/journal && exec \"$@\"";
    let cgpu = crate::support::sibling(env!("CARGO_BIN_EXE_cgpu-runtime"), "cgpu");
    let bundle = gated.sleeping("app", 1000);
    let config = gated.host.config();
    let set = |how: &[&str]| {
        let mut command = Command::new(how[0]);
        command.args(&how[1..]).arg(cgpu).arg("--config").arg(&config);
        // Changes of a quota are reported by the monitor.
        run_with_timeout(command.args(["set", "app", "--weight", "2"]), timeout()).ok()
    };
    set(&["unshare", "-m", "sh", "-c", script, socket.to_str().unwrap()]);
    let mut bytes = [0; 4096];
    let count = journald.recv(&mut bytes).unwrap();
    let text = String::from_utf8_lossy(&bytes[..count]).into_owned();
    assert!(text.starts_with("MESSAGE=changed: the weight is 2"), "{text}");
    assert!(text.contains("\nPRIORITY=6\n") && text.contains("\nCGPU_ID=app\n"), "{text}");
    gated.host.set("log", "stderr");
    let said = set(&["env"]);
    assert!(said.stderr.contains(" INFO changed: the weight is 2"), "{said}");
    let shown = gated.host.cgpu(&["logs", "app"]).ok();
    assert_eq!(shown.stdout.matches("changed: the weight").count(), 2, "{shown}");
    gated.host.set("log", "journal");
    let refused = gated.host.cgpu(&["ps"]).exits(1);
    let sentence = "log = \"journal\": must be an absolute path, journald, stderr, or empty";
    assert!(refused.stderr.contains(sentence), "{refused}");
    gated.host.set("log", "");
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

#[test]
fn removed_docker_container_is_found_by_former_name() {
    let gated = Gated::new();
    let config = format!("--cgpu-config={}", gated.host.config().display());
    let docker = Docker::builder().runtime(RUNTIME).runtime_arg(config).start();
    let volume = format!("{}:{RMTOOL}:ro", rmtool().display());
    let mut options: Vec<&str> = ASK.iter().flat_map(|variable| ["-e", variable]).collect();
    options.extend(["-v", &volume, "--name", "trainer", "--rm", "--network", "none"]);
    let run = ["run", "--pull", "never", "--runtime=cgpu"];
    let app = [IMAGE, RMTOOL, "run", "open", "client", "device 0", "alloc 1001MiB as a"];
    let said = docker.call(&[&run[..], &options, &app].concat());
    assert!(said.stdout.contains(NO_MEMORY), "{said}");
    gated.soon_is_empty();
    let all = events(&gated, Some("trainer"));
    assert_eq!(kinds(&all), ["created", "allocation_refused", "removed"], "{all:#?}");
    assert_eq!((&all[1]["name"], &all[1]["asked_bytes"]), (&json!("trainer"), &json!(1001 * MIB)));
    let id = all[0]["id"].as_str().unwrap();
    assert_eq!(events(&gated, Some(&id[..9])), all);
    for verb in ["events", "logs"] {
        let shown = gated.host.cgpu(&[verb, "trainer"]).ok();
        assert!(shown.stdout.contains("asked for 1001 MiB of GPU 0"), "{shown}");
    }
}
