//! Drivers that never answer: how far that reaches.

use std::time::Duration;

use cgpu_sim::{Action, CallFault, Fault, Kind};
use nix::sys::signal::Signal;

use crate::gated::{Gated, got_bytes};
use crate::support::{Bundle, wait_until};

/// Calls that a monitor can have in the driver at once (`gate::journal::SLOTS`).
const MOST: u32 = 32;

/// Has so many processes of the container and `more` ask for a MiB each. The driver answers
/// so many never; anybody's next call it does.
#[track_caller]
fn hang(gated: &Gated, bundle: &Bundle, count: u32, more: u32) -> std::process::Child {
    gated.sim.fault(Fault::Call(CallFault {
        kind: Some(Kind::Alloc),
        what: Some(0x40),
        action: Action::Hang,
        times: Some(count),
    }));
    let one = ["fork {", "start", "alloc 1MiB as a", "}"];
    let words: Vec<&str> =
        std::iter::once("run").chain((0..count + more).flat_map(|_| one)).collect();
    let all = gated.start(bundle, &[&words[..], &["join"]].concat());
    let hanging = || gated.sim.state().hanging;
    wait_until(Duration::from_secs(10), || hanging() == u64::from(count));
    assert_eq!(hanging(), u64::from(count), "{}", gated.host.log());
    all
}

#[test]
fn all_calls_but_one_may_hang_and_the_container_goes_on() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    let mut all = hang(&gated, &bundle, MOST - 1, 0);
    // What hangs may yet be given, so that it counts.
    gated.fills(&bundle, 1001 - u64::from(MOST));
    gated.sim.fault(Fault::Clear);
    assert!(all.wait().unwrap().success(), "all of them got their MiB");
    gated.fills(&bundle, 1000);
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

/// The limit that is known: a container whose every place in the driver is taken waits.
/// Nobody else does.
#[test]
fn a_container_with_32_calls_that_hang_waits_alone_and_goes_on_when_they_are_answered() {
    let gated = Gated::new();
    let (bundle, neighbour) = (gated.sleeping("app", 1000), gated.sleeping("neighbour", 2000));
    let mut all = hang(&gated, &bundle, MOST, 0);
    let mut waiting = gated.start(&bundle, &["fill"]);
    gated.fills(&neighbour, 2000);
    assert_eq!(got_bytes(&gated.exec(&neighbour, &["storm", "4"])), 2000 << 20);
    // Its monitor still tells how things stand: what hangs counts.
    assert_eq!(gated.accounted_bytes("app"), u64::from(MOST) << 20);
    assert_eq!(gated.accounted_bytes("neighbour"), 0);
    assert!(
        waiting.try_wait().unwrap().is_none(),
        "it is answered, beyond the limit that is known"
    );
    gated.sim.fault(Fault::Clear);
    assert!(all.wait().unwrap().success(), "all of them got their MiB");
    assert!(waiting.wait().unwrap().success());
    gated.fills(&bundle, 1000);
    for bundle in [&bundle, &neighbour] {
        gated.host.runtime().delete(bundle).ok();
    }
    gated.soon_is_empty();
}

#[test]
fn a_container_with_32_calls_that_hang_can_be_killed_and_removed() {
    let gated = Gated::new();
    let (bundle, neighbour) = (gated.sleeping("app", 1000), gated.sleeping("neighbour", 2000));
    let mut all = hang(&gated, &bundle, MOST, 8);
    let runtime = gated.host.runtime();
    runtime.kill(&bundle, Signal::SIGKILL.as_str().trim_start_matches("SIG")).ok();
    assert!(!all.wait().unwrap().success(), "they were killed, not answered");
    runtime.delete(&bundle).ok();
    assert_eq!(gated.host.registered(), ["neighbour".to_owned()].into());
    gated.fills(&neighbour, 2000);
    // The id can be had again while the driver still has the calls of the one before.
    assert_eq!(gated.sim.state().hanging, u64::from(MOST));
    let again = gated.sleeping("app", 1000);
    gated.fills(&again, 1000);
    gated.sim.fault(Fault::Clear);
    for bundle in [&again, &neighbour] {
        runtime.delete(bundle).ok();
    }
    gated.soon_is_empty();
}
