//! Hostile programs in real containers: none may hold more than the quota.
//!
//! `rmtool attack NAME` plays each, and says how often it got as far as what it is about.
//! While it does, the driver's own usage is polled every few milliseconds: what the monitor sees
//! may never exceed the quota, what only the driver usage shows must end soon, with its owner.
//! That an attack could win shows where the quota is not enforced.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::unistd::Pid;

use crate::gated::{Gated, MIB, RMTOOL, got_bytes, monitors};
use crate::support::{Bundle, Outcome, eventually, timeout};
use crate::table::{ATTACKS, Promise, QUOTA_MIB, Row, Unheld, words_of};

/// What a monitor may grow by in memory of its own, whatever an attacker does:
/// three times the most that was seen, 360 KiB in `dup2-range`.
const GROWTH_BYTES: u64 = MIB;

/// The same if fifty processes die in the middle of calls: of each the monitor remembers
/// something, and once, at some time, it takes a MiB more and retains it.
const GROWTH_OF_DEATHS_BYTES: u64 = 2 * MIB;

/// How long what only the driver usage shows may last. The promise is a second, which a busy
/// machine can make longer; `make bench` measures.
pub(crate) const MOST_TIME_OVER: Duration = Duration::from_secs(10);

/// Those that take two containers, or a container and a program of the host; they have tests of their own.
const OF_TWO: &[&str] = &["send-fd", "send-open", "recv-fd", "hold-fd", "send-bus", "inherited"];

/// Says that something has finished, when it's dropped.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What the driver said while `act` went on: the most in use, and for how long more than
/// `limit_bytes` was.
fn watched<T>(gated: &Gated, limit_bytes: u64, act: impl FnOnce() -> T) -> (T, u64, Duration) {
    let over = AtomicBool::new(false);
    gated.sim.forget_peaks();
    std::thread::scope(|scope| {
        // Also where `act` panics, or the watcher would be waited for for ever.
        let _over = Over(&over);
        let watcher = scope.spawn(|| {
            let (mut longest, mut since) = (Duration::ZERO, None);
            while !over.load(Ordering::Relaxed) {
                let used = gated.used_bytes(0);
                since = match since {
                    _ if used <= limit_bytes => None,
                    None => Some(Instant::now()),
                    since => since,
                };
                longest =
                    longest.max(since.map_or(Duration::ZERO, |since: Instant| since.elapsed()));
                std::thread::sleep(Duration::from_millis(3));
            }
            longest
        });
        let done = act();
        over.store(true, Ordering::Relaxed);
        let longest = watcher.join().expect("the watcher ends");
        (done, gated.sim.peak_bytes(0), longest)
    })
}

/// What of a process's memory is its own, in bytes: what it can be made to have more of. The rest
/// is its program, which comes into memory as it is used. 0 where it's gone.
fn anonymous_bytes(pid: Pid) -> u64 {
    let status = procfs::process::Process::new(pid.as_raw()).and_then(|process| process.status());
    status.ok().and_then(|status| status.rssanon).unwrap_or(0) << 10
}

/// The most that a monitor has while `act` goes on, more than before, in bytes.
fn grown<T>(monitor: Pid, act: impl FnOnce() -> T) -> (T, u64) {
    let before = anonymous_bytes(monitor);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _over = Over(&over);
        let sampler = scope.spawn(|| {
            let mut most = before;
            while !over.load(Ordering::Relaxed) {
                most = anonymous_bytes(monitor).max(most);
                std::thread::sleep(Duration::from_millis(20));
            }
            most - before
        });
        let done = act();
        over.store(true, Ordering::Relaxed);
        (done, sampler.join().expect("the sampler ends"))
    })
}

/// How often the attack says that it got as far as what it is about.
fn reached(outcome: &Outcome) -> u64 {
    let words = outcome.stdout.split_whitespace();
    let reported = words.filter_map(|word| word.strip_prefix("reached=")?.parse().ok());
    reported.max().unwrap_or(0)
}

/// What an attack says that this host leaves no way to its point, if it does so.
fn refused_by_host(words: &[&str]) -> Option<&'static str> {
    let setting = |name: &str| {
        let text = std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).unwrap_or_default();
        text.trim().parse::<u32>().unwrap_or(0)
    };
    match words[0] {
        "io-uring" if setting("io_uring_disabled") > 0 => Some("io_uring refused errno=1"),
        // No process may trace one that is not its child, or none may trace at all.
        "ptrace-sibling" if setting("yama/ptrace_scope") > 1 => Some("ptrace EPERM"),
        _ => None,
    }
}

/// Whether it was played to its end and got to its point as often as it has to.
#[track_caller]
fn got_to_its_point(&(words, _, least, _): &Row, outcome: &Outcome) -> bool {
    assert!(outcome.status.success(), "{words:?} couldn't be played: {outcome}");
    if let Some(refusal) = refused_by_host(words) {
        assert!(outcome.stdout.contains(refusal), "{words:?}: {outcome}");
        return true;
    }
    reached(outcome) >= least
}

/// How long an attack is played again that doesn't get to its point: most are races, which a busy
/// machine decides otherwise.
fn generous() -> Duration {
    2 * timeout()
}

/// Plays an attack until it got to its point; fails if it never does. Each round is judged.
#[track_caller]
fn play_to_the_point(words: &[&str], mut round: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !round() {
        assert!(begun.elapsed() < generous(), "not reached: attack {words:?} in {:?}", generous());
    }
}

/// Attacks that are played in one container, one after the other: to make one takes longer than
/// most of them do, and after each it has to be as it was.
const TOGETHER: usize = 7;

/// The rows of a part of the table.
fn rows_of(part: usize) -> &'static [Row] {
    ATTACKS.chunks(TOGETHER).nth(part).expect("each part has rows")
}

/// Plays a part of the table over runc or crun.
#[track_caller]
fn play_part(gated: &Gated, part: usize) {
    let bundle = gated.sleeping("attacker", QUOTA_MIB);
    gated.fills(&bundle, QUOTA_MIB);
    let monitor = gated.monitor("attacker____");
    for row in rows_of(part) {
        play_to_the_point(row.0, || play(gated, &bundle, monitor, row));
    }
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

/// Plays one attack in a container that has nothing. Afterwards, in the same container, everything
/// is as before: its monitor, what is charged, and what there is to be had. Whether it got to its
/// point.
#[track_caller]
fn play(gated: &Gated, bundle: &Bundle, monitor: Pid, row: &Row) -> bool {
    let &(words, promise, ..) = row;
    let quota = QUOTA_MIB * MIB;
    let killed_before = gated.killed("attacker____");
    let attack = || gated.exec(bundle, &words_of(words));
    let ((outcome, most, longest), grown) = grown(monitor, || watched(gated, quota, attack));
    match promise {
        Promise::Never => assert!(most <= quota, "{words:?} had {most} of {quota}: {outcome}"),
        Promise::Briefly | Promise::Killed => {
            assert!(longest <= MOST_TIME_OVER, "{words:?} had {most} for {longest:?}: {outcome}")
        }
    }
    // By the monitor, which counts after it has killed.
    let is_killed = outcome.status.code() == Some(128 + Signal::SIGKILL as i32)
        && eventually(|| gated.killed("attacker____") > killed_before);
    let got_there = match promise {
        // It is for getting there.
        Promise::Killed | Promise::Briefly if is_killed => true,
        Promise::Killed => {
            let got_there = got_to_its_point(row, &outcome);
            assert!(!got_there, "{words:?} wasn't killed: {outcome}");
            false
        }
        Promise::Never | Promise::Briefly => {
            let got = got_bytes(&outcome);
            assert!(got <= quota, "{words:?} says that it has {got} of {quota}: {outcome}");
            got_to_its_point(row, &outcome)
        }
    };
    let limit = if words[0] == "kill-during-alloc" { GROWTH_OF_DEATHS_BYTES } else { GROWTH_BYTES };
    assert!(grown <= limit, "{words:?} made it grow: {grown}");
    gated.soon_uses(0);
    assert_eq!(gated.monitor("attacker____"), monitor, "{words:?}: {}", gated.host.log());
    gated.soon_accounts("attacker", 0);
    gated.fills(bundle, QUOTA_MIB);
    gated.soon_uses(0);
    got_there
}

#[test]
fn every_attack_of_rmtool_is_in_the_table() {
    let listed = std::process::Command::new(crate::gated::rmtool()).arg("attack").output().unwrap();
    for name in String::from_utf8(listed.stdout).unwrap().lines() {
        let known = ATTACKS.iter().any(|(words, ..)| words[0] == name) || OF_TWO.contains(&name);
        assert!(known, "no test tries {name}");
    }
}

/// The table in parts, which run side by side.
macro_rules! parts {
    ($($name:ident = $part:literal),*) => {
        const PARTS: usize = [$($part),*].len();

        /// No attack holds more than the quota.
        mod over_runc {
            $(#[test]
            fn $name() {
                super::play_part(&super::Gated::new(), $part);
            })*
        }

        /// No attack holds more than the quota over crun.
        mod over_crun {
            $(#[test]
            fn $name() {
                let mut gated = super::Gated::new();
                gated.over_crun();
                super::play_part(&gated, $part);
            })*
        }

        /// Each attack has more than the quota if nothing enforces it, so it is an attack.
        mod unenforced {
            $(#[test]
            fn $name() {
                super::play_part_unenforced($part);
            })*
        }
    };
}

parts!(
    part_1 = 0,
    part_2 = 1,
    part_3 = 2,
    part_4 = 3,
    part_5 = 4,
    part_6 = 5,
    part_7 = 6,
    part_8 = 7,
    part_9 = 8
);

const _: () = assert!(PARTS == ATTACKS.len().div_ceil(TOGETHER), "every row is in a part");

/// Memory mapped by two GPUs at one address counts for each.
#[test]
fn memory_mapped_by_two_gpus_counts_for_each() {
    let gated = Gated::new();
    let bundle = gated.bundle_with("gpus", |config| {
        let env = config["process"]["env"].as_array_mut().expect("the environment is a list");
        env.push(format!("ALIYUN_COM_GPU_MEM_CONTAINER={QUOTA_MIB}").into());
        env.push("ALIYUN_COM_GPU_MEM_UNIT=MiB".into());
        env.push("NVIDIA_VISIBLE_DEVICES=0,1".into());
        config["process"]["args"] = serde_json::json!([RMTOOL, "attack", "map-hide", "gpu"]);
    });
    let runtime = gated.host.runtime();
    let quota = QUOTA_MIB * MIB;
    let (outcome, most, _) = watched(&gated, quota, || runtime.run(&bundle));
    assert!((400 * MIB..=quota).contains(&most), "had {most} of {quota}: {outcome}");
    outcome.ok();
    let _ = runtime.delete(&bundle); // `run` has done it, unless it failed
    gated.soon_is_empty();
}

#[track_caller]
fn play_part_unenforced(part: usize) {
    let mut gated = Gated::new();
    gated.host.set("isolation.backend", "none");
    let quota = QUOTA_MIB * MIB;
    for row @ (words, .., unheld) in rows_of(part) {
        let begun = Instant::now();
        let command = [&[RMTOOL, "--quota", "500MiB", "attack"], *words].concat();
        play_to_the_point(words, || {
            let run = || gated.run("free", QUOTA_MIB, &command);
            let (outcome, most, _) = watched(&gated, quota, run);
            gated.soon_uses(0);
            if !got_to_its_point(row, &outcome) {
                return false;
            }
            let got = got_bytes(&outcome);
            let is_so = match unheld {
                Unheld::Exceeds => most > quota,
                Unheld::Claims => got > quota,
                Unheld::Checks => most <= quota,
            };
            // A race that was lost is run again.
            let may_be_so = is_so || begun.elapsed() < timeout();
            assert!(may_be_so, "{words:?} had {most}, says {got} of {quota}: {outcome}");
            is_so
        });
    }
}

/// A profile that allows io_uring opens no way past the gate, and one that doesn't allow it returns
/// an error.
#[test]
fn io_uring_opens_no_way_past_the_gate() {
    let gated = Gated::new();
    let play = |refused: &[&str]| {
        let bundle = gated.bundle_with("ring", |config| {
            crate::host::ask(config, QUOTA_MIB);
            config["linux"]["seccomp"] = serde_json::json!({
                "defaultAction": "SCMP_ACT_ALLOW",
                "syscalls": [{"names": refused, "action": "SCMP_ACT_ERRNO"}],
            });
            config["process"]["args"] = serde_json::json!([RMTOOL, "attack", "io-uring"]);
        });
        let outcome = gated.host.runtime().run(&bundle).ok();
        gated.soon_is_empty();
        outcome
    };
    let allowed = play(&["keyctl"]);
    let row = ATTACKS.iter().find(|(words, ..)| words[0] == "io-uring").expect("it has a row");
    assert!(got_to_its_point(row, &allowed), "{allowed}");
    let refused = play(&["io_uring_setup", "io_uring_enter", "io_uring_register"]);
    assert!(refused.has_line("io_uring refused errno=1"), "{refused}");
}

/// A file that programs of its containers see below `/`.
fn in_root(gated: &Gated, name: &str) -> PathBuf {
    gated.host.scratch.path().join("template/rootfs").join(name)
}

/// Each waits when it has had its signals, and all that can be had.
#[test]
fn interrupted_stopped_or_killed_callers_are_charged_once() {
    let mut gated = Gated::new();
    for over_crun in [false, true] {
        if over_crun {
            gated.over_crun();
        }
        let bundle = gated.sleeping("app", QUOTA_MIB);
        let [ready, go] = ["ready", "go"].map(|name| in_root(&gated, name));
        for (name, count) in [
            ("interrupt", "500"),
            ("signal-storm", "500"),
            ("sigstop-self", "500"),
            ("kill-during-alloc", "50"),
        ] {
            let mut child = gated.start(&bundle, &["attack", name, count, "/ready", "/go"]);
            eventually(|| ready.exists() || !matches!(child.try_wait(), Ok(None)));
            let is_ready = ready.exists();
            let seen = (gated.used_bytes(0), gated.accounted_bytes("app"));
            let more = gated.exec(&bundle, &["fill"]);
            std::fs::write(&go, "").expect("a file can be made there");
            let output = child.wait_with_output().expect("it is a child of ours");
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(is_ready && output.status.success(), "{name}: {said}{}", gated.host.log());
            let all = QUOTA_MIB * MIB;
            assert_eq!(seen, (all, all), "the driver gave, and the monitor counts, {name}: {said}");
            assert_eq!(got_bytes(&more), 0, "{name}: {more}");
            gated.soon_uses(0);
            gated.soon_accounts("app", 0);
            gated.fills(&bundle, QUOTA_MIB);
            // The next one takes what is in use then for what was in use before.
            gated.soon_uses(0);
            gated.soon_accounts("app", 0);
            for file in [&ready, &go] {
                std::fs::remove_file(file).expect("it is there");
            }
        }
        gated.host.runtime().delete(&bundle).ok();
        gated.soon_is_empty();
    }
}

/// The process that was sent it isn't of the tree of who made it, and outlives it: by a client of its
/// own. By the client of who sent it, it's ended.
#[test]
fn memory_by_passed_descriptor_belongs_to_the_container() {
    let mut gated = Gated::new();
    // A multiple of what is taken at once.
    const MIB_OF_ALL: u64 = 512;
    const MIB_OF_HOLDER: u64 = 128;
    for over_crun in [false, true] {
        if over_crun {
            gated.over_crun();
        }
        for (by_init, how) in [(false, "lent"), (false, "own-client"), (true, "lent")] {
            let case = format!("crun {over_crun}, by init {by_init}, {how}");
            let first = match by_init {
                true => "/rmtool attack send-fd /socket; sleep 1000",
                false => "sleep 1000",
            };
            let bundle = gated.bundle("app", MIB_OF_ALL, &["sh", "-c", first]);
            let runtime = gated.host.runtime();
            runtime.create(&bundle).ok();
            runtime.start(&bundle).ok();
            let mut holder = gated.start(&bundle, &["hold", "128MiB"]);
            gated.soon_uses(MIB_OF_HOLDER);
            let done = in_root(&gated, "done");
            let all = MIB_OF_ALL * MIB;
            let (taker, most, _) = watched(&gated, all, || {
                let giver =
                    (!by_init).then(|| gated.start(&bundle, &["attack", "send-fd", "/socket"]));
                let taker = gated.start(&bundle, &["attack", "recv-fd", "/socket", "/done", how]);
                if let Some(mut giver) = giver {
                    let ended = giver.wait().expect("it is a child of ours");
                    assert!(ended.success(), "{case}: the giver ends when it has sent it");
                }
                if how == "own-client" {
                    gated.soon_uses(MIB_OF_ALL);
                    // Longer than an audit of who has died takes.
                    std::thread::sleep(Duration::from_millis(700));
                    assert_eq!(gated.used_bytes(0), all, "{case}: {}", gated.host.log());
                    assert_eq!(gated.accounted_bytes("app"), all, "{case}: {}", gated.host.log());
                    gated.fills(&bundle, 0);
                    std::fs::write(&done, "").expect("a file can be made there");
                }
                taker.wait_with_output().expect("it is a child of ours")
            });
            let _ = std::fs::remove_file(&done);
            let said = String::from_utf8_lossy(&taker.stdout);
            assert!(most <= all, "{case}: had {most}: {said}");
            if how == "own-client" {
                assert!(taker.status.success() && most == all, "{case}: had {most}: {said}");
                let got = format!("got_bytes={}", all - MIB_OF_HOLDER * MIB);
                assert!(said.lines().any(|line| line == got), "{case}: {said}");
            } else {
                let code = taker.status.code();
                assert_eq!(code, Some(128 + Signal::SIGKILL as i32), "{case}: {said}");
                // Who kills says so after.
                let is_reported =
                    || gated.host.log().contains("memory of a process that has ended");
                assert!(eventually(is_reported), "{case}");
            }
            gated.soon_uses(MIB_OF_HOLDER);
            gated.soon_accounts("app", MIB_OF_HOLDER);
            gated.fills(&bundle, MIB_OF_ALL - MIB_OF_HOLDER);
            runtime.delete(&bundle).ok();
            let _ = holder.wait();
            gated.soon_is_empty();
            let _ = std::fs::remove_file(in_root(&gated, "socket"));
        }
    }
}

/// Has a container run `giver`, and one without a GPU, which is under no monitor's filter, take
/// memory by the descriptors that it is sent there, in the shell's words `taker`. Its processes
/// must be killed within a second, and no others.
#[track_caller]
fn hand_out(giver: &[&str], taker: &str) {
    hand_out_by(&Gated::new(), giver, taker);
}

#[track_caller]
fn hand_out_by(gated: &Gated, giver: &[&str], taker: &str) {
    let shared = gated.host.scratch.directory("shared");
    let mount = |config: &mut serde_json::Value| {
        config["mounts"].as_array_mut().expect("mounts are a list").push(serde_json::json!({
            "destination": "/shared", "type": "bind", "source": shared, "options": ["bind", "rw"],
        }));
    };
    let giver = gated.bundle_with("giver", |config| {
        crate::host::ask(config, QUOTA_MIB);
        mount(config);
        config["process"]["args"] = serde_json::json!(giver);
    });
    let taker = gated.bundle_with("taker", |config| {
        mount(config);
        config["process"]["args"] = serde_json::json!(["sh", "-c", taker]);
    });
    let runtime = gated.host.runtime();
    let neighbour = gated.sleeping("neighbour", 100);
    let mut innocent = gated.start(&neighbour, &["hold", "100MiB"]);
    let node = gated.sim.dir().join("dev/nvidiactl");
    let words = format!("exec sleep 100 <{}", node.display());
    let mut host = std::process::Command::new("sh").args(["-c", &words]).spawn().expect("a shell");
    assert!(eventually(|| gated.used_bytes(0) == 100 * MIB));
    runtime.create(&giver).ok();
    runtime.start(&giver).ok();
    let limit = (QUOTA_MIB + 100) * MIB;
    let (outcome, most, longest) = watched(gated, limit, || {
        let outcome = runtime.run(&taker);
        eventually(|| gated.used_bytes(0) == 100 * MIB);
        outcome
    });
    // Who kills says so after.
    let reported = || gated.host.log().matches("opened in the container").count();
    eventually(|| reported() > 0);
    let log = gated.host.log();
    assert!(longest <= MOST_TIME_OVER, "had {most} for {longest:?}: {outcome}\n{log}");
    assert_eq!(gated.used_bytes(0), 100 * MIB, "{outcome}\n{log}");
    assert!(log.contains("opened in the container"), "{outcome}\n{log}");
    for one in [&mut innocent, &mut host] {
        let ended = one.try_wait().expect("a child can be waited for");
        assert_eq!(ended, None, "neighbour and host were not killed\n{log}");
    }
    let _ = host.kill();
    let _ = host.wait();
    let _ = runtime.delete(&taker);
    for bundle in [&giver, &neighbour] {
        runtime.delete(bundle).ok();
    }
    let _ = innocent.wait();
    gated.soon_is_empty();
}

const SEND: &[&str] = &[RMTOOL, "attack", "send-fd", "/shared/s"];
const SEND_AND_LIVE: &[&str] = &["sh", "-c", "/rmtool attack send-fd /shared/s; sleep 1000"];

/// Memory taken through a descriptor that was handed out of a container ends within a second.
#[test]
fn memory_by_handed_out_descriptor_ends_promptly() {
    hand_out(SEND, "exec /rmtool attack recv-fd /shared/s 60");
}

/// Memory by a handed-out descriptor ends within a second too while the container that handed it
/// out lives on.
#[test]
fn handed_out_memory_ends_while_giver_lives_on() {
    hand_out(SEND_AND_LIVE, "exec /rmtool attack recv-fd /shared/s 60");
}

/// Memory by a handed-out descriptor ends within a second too if the taker made the client itself.
#[test]
fn handed_out_memory_ends_for_takers_own_client() {
    hand_out(SEND, "exec /rmtool attack recv-fd /shared/s 60 own-client");
    hand_out(SEND_AND_LIVE, "exec /rmtool attack recv-fd /shared/s 60 own-client");
}

/// By what is free of it, which is asked by a struct that has grown before.
#[test]
fn handed_out_memory_ends_under_unknown_newer_driver() {
    let gated = Gated::with_driver("900.10.01");
    let taker = "exec /rmtool attack recv-fd /shared/s 60 own-client";
    hand_out_by(&gated, SEND_AND_LIVE, taker);
}

/// Memory by a handed-out descriptor ends within a second too if the container never used the
/// descriptor.
#[test]
fn handed_out_memory_ends_for_unused_descriptor() {
    const OPEN_AND_LIVE: &[&str] = &["sh", "-c", "/rmtool attack send-open /shared/s; sleep 1000"];
    hand_out(OPEN_AND_LIVE, "exec /rmtool attack recv-fd /shared/s 60 own-client");
}

/// The kernel reports less of such a process.
#[test]
fn handed_out_memory_ends_without_first_thread() {
    hand_out(SEND_AND_LIVE, "exec /rmtool --headless attack recv-fd /shared/s 60 own-client");
}

/// Memory by a handed-out descriptor ends within a second too if the creator of the client has
/// exited.
#[test]
fn handed_out_memory_ends_for_inherited_client() {
    // The container lives as long as the process with the inherited client, whose creator has exited.
    let while_it_lives = "while ls -l /proc/[0-9]*/exe | grep -q /rmtool; do sleep 0.1; done";
    let taker = format!("/rmtool attack recv-fd /shared/s 60 inherited; {while_it_lives}");
    hand_out(SEND_AND_LIVE, &taker);
}

#[test]
fn attack_costs_a_neighbour_only_time() {
    let gated = Gated::new();
    let neighbour = gated.sleeping("neighbour", 1000);
    let attacker = gated.sleeping("attacker", QUOTA_MIB);
    let mut attack = gated.start(&attacker, &["attack", "signal-storm"]);
    let filled = gated.exec(&neighbour, &["fill"]).ok();
    assert_eq!(got_bytes(&filled), 1000 * MIB, "{filled}");
    let _ = attack.kill();
    let _ = attack.wait();
    for bundle in [&attacker, &neighbour] {
        gated.host.runtime().delete(bundle).ok();
    }
    gated.soon_is_empty();
    assert!(eventually(|| monitors(&gated.host).is_empty()));
}
