//! Hostile programs in real containers: none may hold more than the quota.
//!
//! `rmtool attack NAME` plays each. While it does, the driver's own account is looked at
//! every few milliseconds: what the monitor sees may never pass the quota, what only the
//! driver's figures show must end within a second, with its owner.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::gated::{Gated, MIB, RMTOOL, got_bytes, monitors};
use crate::support::{Outcome, wait_until};

/// The attacker's quota.
const QUOTA_MIB: u64 = 500;

/// The most that keeper or worker may have resident, whatever an attacker does.
const MONITOR_BYTES: u64 = 12 * MIB;

/// What the gate promises of an attack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Promise {
    /// It never holds more than the quota.
    Never,
    /// It may for less than a second, and then is killed.
    Briefly,
}

/// Every attack with its arguments, and what is promised.
const ATTACKS: &[(&[&str], Promise)] = &[
    (&["race-size"], Promise::Never),
    (&["race-class"], Promise::Never),
    (&["race-pointer"], Promise::Never),
    (&["dup2-ioctl"], Promise::Never),
    (&["dup2-mmap"], Promise::Briefly),
    (&["dup2-range"], Promise::Briefly),
    (&["dup2-heir"], Promise::Briefly),
    (&["name-race"], Promise::Never),
    (&["dup2-maker"], Promise::Never),
    (&["remap"], Promise::Never),
    (&["class-in-client"], Promise::Briefly),
    (&["swap-control"], Promise::Never),
    (&["swap-control", "xfer"], Promise::Never),
    (&["parent-free"], Promise::Never),
    (&["managed"], Promise::Briefly),
    (&["managed-nofixed"], Promise::Briefly),
    (&["barrier16", "100MiB"], Promise::Never),
    (&["clients", "10000"], Promise::Never),
    (&["handle-reuse"], Promise::Never),
    (&["hostile-sizes", "500MiB"], Promise::Never),
    (&["bad-pointers"], Promise::Never),
    (&["control-params"], Promise::Never),
    (&["interrupt"], Promise::Never),
    (&["signal-storm"], Promise::Never),
    (&["sigstop-self"], Promise::Never),
    (&["kill-during-alloc"], Promise::Never),
    (&["ptrace-sibling"], Promise::Never),
    (&["xfer"], Promise::Never),
    (&["xfer-nested"], Promise::Never),
    (&["type-byte"], Promise::Never),
    (&["int80"], Promise::Never),
    (&["upper-garbage"], Promise::Never),
    (&["io-uring"], Promise::Never),
    (&["dup-free"], Promise::Never),
    (&["map-free"], Promise::Never),
    (&["map-hide", "file"], Promise::Never),
    (&["map-hide", "page"], Promise::Never),
    (&["map-hide", "over"], Promise::Never),
    (&["map-hide", "fork"], Promise::Never),
    (&["map-hide", "socket"], Promise::Never),
    (&["export-free"], Promise::Never),
    (&["export-free", "close"], Promise::Never),
    (&["export-free", "socket"], Promise::Never),
    (&["hide-dup"], Promise::Briefly),
    (&["hide-map"], Promise::Briefly),
    (&["hide-slack"], Promise::Briefly),
    (&["hide-slack", "export"], Promise::Briefly),
    (&["hide-slack", "busy"], Promise::Briefly),
    (&["hide-slack", "closed"], Promise::Briefly),
    (&["hide-slack", "mapped"], Promise::Briefly),
    (&["hide-slack", "closing"], Promise::Briefly),
    (&["hide-slack", "anew"], Promise::Briefly),
    (&["hide-under", "export"], Promise::Briefly),
    (&["hide-under", "map"], Promise::Briefly),
    (&["hide-heir"], Promise::Never),
    (&["hide-fabric"], Promise::Briefly),
    (&["hide-fabric", "import"], Promise::Briefly),
    (&["hide-behind"], Promise::Briefly),
    (&["hide-behind", "nothing"], Promise::Briefly),
    (&["export-reuse"], Promise::Never),
    (&["export-reuse", "list"], Promise::Never),
    (&["vfork-exec"], Promise::Never),
    (&["close-range"], Promise::Never),
];

/// Those that take two containers; they have tests of their own.
const OF_TWO: &[&str] = &["send-fd", "send-open", "recv-fd", "inherited"];

/// Says that something is over, when it's dropped.
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
        (done, gated.sim.state().gpus[0].peak_bytes, longest)
    })
}

/// The most resident memory that a process of a monitor had while `act` went on, in bytes.
fn sized<T>(gated: &Gated, act: impl FnOnce() -> T) -> (T, u64) {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _over = Over(&over);
        let sampler = scope.spawn(|| {
            let mut most = 0;
            while !over.load(Ordering::Relaxed) {
                let sizes = monitors(&gated.host).into_iter().map(resident_bytes);
                most = sizes.fold(most, u64::max);
                std::thread::sleep(Duration::from_millis(20));
            }
            most
        });
        let done = act();
        over.store(true, Ordering::Relaxed);
        (done, sampler.join().expect("the sampler ends"))
    })
}

/// Its resident memory; 0 where it's gone.
fn resident_bytes(pid: i32) -> u64 {
    let status = procfs::process::Process::new(pid).and_then(|process| process.status());
    status.ok().and_then(|status| status.vmrss).unwrap_or(0) << 10
}

/// Plays one attack in a container of its own, over runc or crun.
#[track_caller]
fn play(gated: &Gated, words: &[&str], promise: Promise) -> Outcome {
    let name = words[0];
    let before = gated.host.log().matches("worker is gone").count();
    let quota = QUOTA_MIB * MIB;
    let id = format!("a-{name}");
    let command = [&[RMTOOL, "attack"], words].concat();
    let ((outcome, most, longest), size) =
        sized(gated, || watched(gated, quota, || gated.run(&id, QUOTA_MIB, &command)));
    assert!(size > 0, "{name} had no monitor: {outcome}");
    assert!(size <= MONITOR_BYTES, "{name} made the monitor grow to {size}: {outcome}");
    match promise {
        Promise::Never => assert!(most <= quota, "{name} had {most} of {quota}: {outcome}"),
        Promise::Briefly => {
            assert!(
                longest <= Duration::from_secs(1),
                "{name} had {most} for {longest:?}: {outcome}"
            );
        }
    }
    let crashes = gated.host.log().matches("worker is gone").count() - before;
    assert_eq!(crashes, 0, "{name} ended the worker: {outcome}\n{}", gated.host.log());
    gated.soon_is_empty();
    outcome
}

#[test]
fn every_attack_of_rmtool_is_in_the_table() {
    let listed = std::process::Command::new(crate::gated::rmtool()).arg("attack").output().unwrap();
    for name in String::from_utf8(listed.stdout).unwrap().lines() {
        let known = ATTACKS.iter().any(|(words, _)| words[0] == name) || OF_TWO.contains(&name);
        assert!(known, "{name} is tried by nobody");
    }
}

#[test]
fn no_attack_holds_more_than_the_quota() {
    let gated = Gated::new();
    for (words, promise) in ATTACKS {
        let outcome = play(&gated, words, *promise);
        if *promise == Promise::Never && outcome.status.success() {
            assert!(got_bytes(&outcome) <= QUOTA_MIB * MIB, "{words:?}: {outcome}");
        }
    }
}

#[test]
fn memory_mapped_by_two_gpus_at_one_address_counts_for_each() {
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

#[test]
fn no_attack_holds_more_than_the_quota_over_crun() {
    let mut gated = Gated::new();
    gated.over_crun();
    for (words, promise) in ATTACKS {
        play(&gated, words, *promise);
    }
}

#[test]
fn the_table_would_notice_a_quota_that_does_not_hold() {
    let mut gated = Gated::new();
    gated.host.set("isolation.backend", "none");
    let quota = QUOTA_MIB * MIB;
    for words in [
        &["race-size"][..],
        &["barrier16", "100MiB"],
        &["dup-free"],
        &["swap-control"],
        &["map-hide", "file"],
        &["map-hide", "page"],
        &["map-hide", "over"],
        &["map-hide", "fork"],
        &["map-hide", "socket"],
    ] {
        let command = [&[RMTOOL, "attack"], words].concat();
        let (outcome, most, _) = watched(&gated, quota, || gated.run("free", QUOTA_MIB, &command));
        assert!(most > quota, "{words:?} had {most} of {quota}: {outcome}");
    }
}

/// Has a container run `giver`, and one without a GPU, which has a filter of nobody's, take
/// memory by the descriptors that it is sent there, in the shell's words `taker`. It must be
/// ended within a second, and nobody else.
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
    assert!(wait_until(Duration::from_secs(5), || gated.used_bytes(0) == 100 * MIB));
    runtime.create(&giver).ok();
    runtime.start(&giver).ok();
    let limit = (QUOTA_MIB + 100) * MIB;
    let (outcome, most, longest) = watched(gated, limit, || {
        let outcome = runtime.run(&taker);
        wait_until(Duration::from_secs(3), || gated.used_bytes(0) == 100 * MIB);
        outcome
    });
    // Who kills says so after.
    let told = || gated.host.log().matches("opened in the container").count();
    wait_until(Duration::from_secs(3), || told() > 0);
    let log = gated.host.log();
    assert!(longest <= Duration::from_secs(1), "had {most} for {longest:?}: {outcome}\n{log}");
    assert_eq!(gated.used_bytes(0), 100 * MIB, "{outcome}\n{log}");
    assert_eq!(log.matches("opened in the container").count(), 1, "{outcome}\n{log}");
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

#[test]
fn memory_taken_through_a_descriptor_that_was_handed_out_ends_within_a_second() {
    hand_out(SEND, "exec /rmtool attack recv-fd /shared/s 5");
}

#[test]
fn so_it_does_while_the_container_that_handed_it_out_lives_on() {
    hand_out(SEND_AND_LIVE, "exec /rmtool attack recv-fd /shared/s 5");
}

#[test]
fn so_does_memory_of_a_client_that_the_taker_made_itself() {
    hand_out(SEND, "exec /rmtool attack recv-fd /shared/s 5 own-client");
    hand_out(SEND_AND_LIVE, "exec /rmtool attack recv-fd /shared/s 5 own-client");
}

/// By what is free of it, which is asked by a struct that has grown before.
#[test]
fn so_does_memory_of_a_driver_that_is_newer_than_all_known() {
    let gated = Gated::with_driver("900.10.01");
    let taker = "exec /rmtool attack recv-fd /shared/s 5 own-client";
    hand_out_by(&gated, SEND_AND_LIVE, taker);
}

#[test]
fn so_does_memory_by_a_descriptor_that_the_container_never_used() {
    const OPEN_AND_LIVE: &[&str] = &["sh", "-c", "/rmtool attack send-open /shared/s; sleep 1000"];
    hand_out(OPEN_AND_LIVE, "exec /rmtool attack recv-fd /shared/s 5 own-client");
}

/// The kernel tells less of such a process.
#[test]
fn so_does_memory_of_a_taker_whose_first_thread_has_ended() {
    hand_out(SEND_AND_LIVE, "exec /rmtool --headless attack recv-fd /shared/s 5 own-client");
}

#[test]
fn so_does_memory_of_a_client_whose_maker_is_gone() {
    hand_out(SEND_AND_LIVE, "/rmtool attack recv-fd /shared/s 5 heir; sleep 3");
}

#[test]
fn an_attack_costs_a_neighbour_nothing_but_its_time() {
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
    assert!(wait_until(Duration::from_secs(5), || monitors(&gated.host).is_empty()));
}
