//! A hundred container creations at once, real ones: nothing is lost, nothing is reserved twice.

use std::collections::BTreeSet;
use std::fs;
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::host::{Host, TOTAL_MIB};
use crate::km_standin::StandIn;
use crate::support::{Bundle, Outcome, timeout, wait_until};

const CROWD: usize = 100;

/// Does `act` to all at once, each in its own thread.
fn at_once<T: Send>(bundles: &[Bundle], act: impl Fn(&Bundle) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = bundles.iter().map(|bundle| scope.spawn(|| act(bundle))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A hundred that ask for `mib` each: `fitting` get it, the others are refused by a
/// sentence with `reason`, and all of them can go at once.
fn crowd(host: &Host, mib: u64, fitting: usize, reason: &str) {
    let bundles: Vec<Bundle> =
        (0..CROWD).map(|n| host.asking(&format!("c{mib}-{n}"), mib)).collect();
    // On a slow machine one that waits for the registry may be passed over until it gets the answer to retry.
    let created: Vec<Outcome> = at_once(&bundles, |bundle| {
        loop {
            let outcome = host.runtime().create(bundle);
            if !outcome.stderr.contains("is locked for more than") {
                return outcome;
            }
        }
    });
    let ids = |successful: bool| -> BTreeSet<String> {
        let both = bundles.iter().zip(&created);
        both.filter(|(_, outcome)| outcome.status.success() == successful)
            .map(|(bundle, _)| bundle.id.clone())
            .collect()
    };
    let failed: Vec<&Outcome> =
        created.iter().filter(|outcome| !outcome.status.success()).collect();
    for outcome in &failed {
        assert_eq!(outcome.status.code(), Some(1), "{outcome}");
        assert!(outcome.stderr.starts_with("cgpu: GPU 0 (GPU-a) has "), "{outcome}");
        assert!(outcome.stderr.contains(reason), "{outcome}");
    }
    assert_eq!(ids(true).len(), fitting, "of a crowd that asks for {mib} MiB each");
    assert_eq!(host.registered(), ids(true));
    assert!(host.ps().iter().all(|container| container["state"] == "created"));
    assert!(host.promised_mib() <= TOTAL_MIB);
    host.check_registry();

    for outcome in at_once(&bundles, |bundle| host.runtime().delete(bundle)) {
        // runc's force makes a success of what isn't there.
        outcome.ok();
    }
    assert_eq!(host.records(), [].into());
    assert_eq!(host.gc(), "");
    host.check_registry();
}

/// Of a hundred container creations at once, as many are admitted as may be and as fit.
#[test]
fn concurrent_creations_are_admitted_only_up_to_limits() {
    let standin = StandIn::mount(&[0]);
    let mut host = Host::new();
    host.use_km(standin.path());
    let full = "has 20 containers, as many as max_inst = 20 allows; held by c1";
    crowd(&host, 100, 20, full);
    assert_eq!(standin.instances(0), [""; 0]);
    host.set("isolation.backend", "none");
    crowd(&host, TOTAL_MIB / 7, 7, "MiB of 16000 MiB left, this container asks for 2285 MiB; held");
}

/// Pseudorandom numbers, the same in every run (Marsaglia's xorshift).
fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

#[test]
fn runtimes_killed_at_random_lose_and_leak_nothing() {
    let standin = StandIn::mount(&[0]);
    let mut host = Host::new();
    host.use_km(standin.path());
    let mut seed = 0x9e37_79b9_7f4a_7c15;
    let mib = TOTAL_MIB / 7;
    for round in 0..4 {
        let bundles: Vec<Bundle> =
            (0..24).map(|n| host.asking(&format!("r{round}-{n}"), mib)).collect();
        let delays: Vec<u64> = bundles.iter().map(|_| random(&mut seed) % 120).collect();
        let killed = |at: usize| at.is_multiple_of(2);
        let made: BTreeSet<String> = std::thread::scope(|scope| {
            let creates = bundles.iter().enumerate().map(|(at, bundle)| {
                let (host, delay) = (&host, Duration::from_millis(delays[at]));
                scope.spawn(move || {
                    let mut command = host.runtime().command();
                    command.args(["create", "--bundle"]).arg(&bundle.directory).arg(&bundle.id);
                    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
                    let mut child = command.spawn().unwrap();
                    if killed(at) {
                        std::thread::sleep(delay);
                        // It may have become runc, or have ended.
                        let _ = child.kill();
                    }
                    let ended = child.wait().unwrap();
                    ended.success().then(|| bundle.id.clone())
                })
            });
            let creates: Vec<_> = creates.collect();
            creates.into_iter().filter_map(|create| create.join().unwrap()).collect()
        });
        // The hook of a runc that was killed goes on.
        let hooks = || {
            let processes = host.scratch.traces().processes;
            processes.iter().any(|process| process.contains("cgpu-hook"))
        };
        assert!(wait_until(timeout(), || !hooks()), "a hook doesn't end");
        // A container whose creation was reported is registered; in all there are never more than
        // fit, and each has its isolation.
        assert!(made.is_subset(&host.registered()), "{made:?} of {:?}", host.ps());
        assert!(host.promised_mib() <= TOTAL_MIB, "{:?}", host.ps());
        host.check_registry();
        host.gc();
        let registered = host.ps();
        for container in &registered {
            let pid = i32::try_from(container["pid"].as_i64().unwrap()).unwrap();
            // The init of a runc that was killed ends a moment after it.
            let has_ended = || !host.ps().iter().any(|listed| listed["id"] == container["id"]);
            assert!(kill(Pid::from_raw(pid), None).is_ok() || has_ended(), "{container}");
        }
        assert!(standin.instances(0).len() <= registered.len(), "instances without an owner");
        // The containers that are still there end now, without any report.
        for container in &registered {
            let pid = i32::try_from(container["pid"].as_i64().unwrap()).unwrap();
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        assert!(wait_until(timeout(), || host.registered().is_empty()));
        host.gc();
        assert_eq!(standin.instances(0), [""; 0], "round {round}");
        assert_eq!(host.records(), [].into(), "round {round}");
        // What runc knew of them, half made or whole; its processes go with the scratch.
        let _ = fs::remove_dir_all(host.runtime().root());
    }
    host.whole_gpu_can_be_had("after");
}
