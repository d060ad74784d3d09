//! The numbers that policies are to come to, in virtual time: no privilege, no GPU, no luck.

mod world;

use cgpu::sched::Idle;

use self::world::{Container, Gpu, Had, Work, share};

/// Ten seconds, as the numbers are said for.
const ALL_MS: u64 = 10_000;

fn had(gpu: Gpu, containers: &[Container]) -> Had {
    share(gpu, containers, ALL_MS, ALL_MS)
}

fn alone(work: Work) -> f64 {
    had(Gpu::of(5), &[Container::does(1, work)]).parts[0]
}

#[track_caller]
fn within(what: &str, value: f64, least: f64, most: f64) {
    assert!((least..=most).contains(&value), "{what}: {value:.4}, not {least} to {most}");
}

#[test]
fn weights_are_held_within_three_per_cent_and_less_is_lost_than_without() {
    let untouched = had(Gpu::of(5), &[Container::busy(1, 1), Container::busy(1, 1)]);
    within("the driver alone loses a tenth", untouched.sum(), 0.89, 0.905);
    for weight in 1..=6 {
        let two = [Container::busy(1, 1), Container::busy(weight, 1)];
        let had = had(Gpu::of(2), &two);
        let ratio = had.parts[1] / had.parts[0] / f64::from(weight);
        within(&format!("1:{weight}"), ratio, 0.97, 1.03);
        within(&format!("1:{weight}, sum"), had.sum(), 0.93, 1.0);
    }
    for policy in [1, 4] {
        let four = had(Gpu::of(policy), &vec![Container::busy(1, 1); 4]);
        within(&format!("policy {policy}, four containers"), four.sum(), 0.93, 1.0);
    }
}

#[test]
fn who_is_alone_loses_nothing() {
    for policy in [1, 2, 4] {
        within("always", had(Gpu::of(policy), &[Container::busy(1, 1)]).parts[0], 0.995, 1.0);
        let work = Work::Bursts(3000, 1000);
        let part = had(Gpu::of(policy), &[Container::does(1, work)]).parts[0] / alone(work);
        within("in bursts", part, 0.995, 1.005);
    }
}

#[test]
fn who_forks_takes_little_of_a_neighbour() {
    // A fair share is what two that don't fork have.
    let fair = had(Gpu::of(1), &[Container::busy(1, 1), Container::busy(1, 1)]).parts[0];
    let beside = |programs: Vec<Work>| {
        let forks = Container { weight: 1, high_priority: false, programs };
        had(Gpu::of(1), &[Container::busy(1, 1), forks]).parts[0] / fair
    };
    within("four", beside(vec![Work::Always; 4]), 0.95, 1.1);
    within(
        "one busy of four",
        beside(vec![Work::Always, Work::Never, Work::Never, Work::Never]),
        0.95,
        1.05,
    );
    within("four that wake and rest", beside(vec![Work::Bursts(5000, 5000); 4]), 0.85, 1.2);
    // In cohorts of eight.
    within("sixteen", beside(vec![Work::Always; 16]), 0.90, 1.1);
    within("sixty-four", beside(vec![Work::Always; 64]), 0.90, 1.1);
}

#[test]
fn fixed_parts_are_what_was_promised() {
    for (policy, max_inst, weights) in [
        (0, 20, vec![1; 3]),
        (0, 20, vec![1; 20]),
        (0, 2, vec![1; 2]),
        (3, 20, vec![1, 2, 5]),
        (3, 3, vec![1, 2]),
    ] {
        let containers: Vec<Container> =
            weights.iter().map(|weight| Container::busy(*weight, 1)).collect();
        let had = had(Gpu { max_inst, ..Gpu::of(policy) }, &containers);
        for (part, weight) in had.parts.iter().zip(&weights) {
            let promised = f64::from(*weight) / f64::from(max_inst);
            let what =
                format!("policy {policy}, {weight} of {max_inst}, {} containers", weights.len());
            within(&what, part / promised, 0.95, 1.02);
        }
    }
}

#[test]
fn a_small_demand_is_met_beside_one_that_never_rests() {
    let fair = had(Gpu::of(1), &[Container::busy(1, 1), Container::busy(1, 1)]).parts[0];
    for (work_us, rest_us) in [(2000, 8000), (3000, 8000), (1000, 9000)] {
        let work = Work::Bursts(work_us, rest_us);
        let demand = alone(work);
        assert!(demand < fair / 1.5, "{demand}");
        let part = had(Gpu::of(1), &[Container::busy(1, 1), Container::does(1, work)]).parts[1];
        within(&format!("{work_us} in {}", work_us + rest_us), part / demand, 0.9, 1.0);
    }
}

/// A table of Alibaba's: ResNet50 in two containers at 1:2, at several batch sizes, of which the smaller rest
/// more. Where rests are given away, a ratio holds for those that hardly rest.
#[test]
fn one_to_two_is_held_at_every_batch_where_rests_are_kept() {
    let ratio = |idle, (work_us, rest_us)| {
        let work = Work::Bursts(work_us, rest_us);
        let two = [Container::does(1, work), Container::does(2, work)];
        let had = had(Gpu { idle, ..Gpu::of(2) }, &two);
        had.parts[1] / had.parts[0]
    };
    for batch in [(20_000, 1000), (5000, 1000), (3000, 1000), (1000, 300), (500, 100)] {
        within(&format!("{batch:?}"), ratio(Idle::Keep, batch), 1.9, 2.1);
    }
    for batch in [(60_000, 500), (5000, 50)] {
        within(&format!("{batch:?}, given away"), ratio(Idle::Yield, batch), 1.9, 2.1);
    }
    // The end of a burst that outlasts two slices and not three gives the rest of the third away.
    within("20 ms in 20.2", ratio(Idle::Yield, (20_000, 200)), 1.8, 1.9);
    within("20 ms in 21", ratio(Idle::Yield, (20_000, 1000)), 1.8, 1.9);
    within("3 ms in 4", ratio(Idle::Yield, (3000, 1000)), 0.95, 1.05);
}

/// What is told apart by pieces adds up to the whole.
#[test]
fn pieces_are_parts_of_the_whole() {
    let two = [Container::busy(1, 1), Container::does(2, Work::Bursts(5000, 5000))];
    let had = share(Gpu { max_inst: 4, ..Gpu::of(3) }, &two, 1000, 10);
    assert_eq!(had.pieces.len(), 100);
    for (container, part) in had.parts.iter().enumerate() {
        let sum: f64 = had.pieces.iter().map(|piece| piece[container]).sum();
        assert!((sum / 100.0 - part).abs() < 1e-9);
    }
}
