//! `make bench`: what policies come to, in virtual time: a table beside the untouched driver's, and what the
//! plots of `docs/compute.md` are drawn from.
//!
//! Not timed: the numbers are the same on each machine. `tests/gate/compute` holds them to their bounds.

#[path = "../tests/gate/compute/world.rs"]
mod world;

use cgpu_core::sched::Idle;
use serde_json::{Value, json};

use self::world::{Container, Gpu, Had, Work, share};

const ALL_MS: u64 = 10_000;

fn had(gpu: Gpu, containers: &[Container]) -> Had {
    share(gpu, containers, ALL_MS, ALL_MS)
}

fn line(what: &str, gpu: Gpu, containers: &[Container]) {
    let words = |had: Had| {
        let sum = had.sum();
        let parts = had.parts.into_iter().map(|part| format!("{part:.3}"));
        let parts: Vec<String> = parts.take(4).collect();
        (parts.join(" "), format!("{sum:.3}"))
    };
    let (parts, sum) = words(had(gpu, containers));
    let (parts_5, sum_5) = words(had(Gpu::of(5), containers));
    println!("{what:<54} {parts:<24} {sum:<8} {parts_5:<24} {sum_5}");
}

/// A container alone for a third of the time, then together with another that begins and, in the last
/// third, is idle half of the time: one piece after another.
fn plot(gpu: Gpu, weights: (u32, u32)) -> Value {
    // As long as some of each policy's frames.
    const PIECE_MS: u64 = 576;
    let one = Container::busy(weights.0, 1);
    let other = |work| Container::does(weights.1, work);
    let phases = [Work::Never, Work::Always, Work::Bursts(5000, 5000)];
    let pieces: Vec<Vec<f64>> = phases
        .into_iter()
        .flat_map(|work| share(gpu, &[one.clone(), other(work)], 7 * PIECE_MS, PIECE_MS).pieces)
        .collect();
    json!({
        "policy": gpu.policy,
        "keeps": gpu.idle == Idle::Keep,
        "max_inst": gpu.max_inst,
        "weights": [weights.0, weights.1],
        "piece_ms": PIECE_MS,
        "pieces": pieces,
    })
}

fn plots() -> Value {
    let of = |policy| Gpu { max_inst: 4, ..Gpu::of(policy) };
    let keep = |policy| Gpu { idle: Idle::Keep, ..of(policy) };
    json!([
        plot(of(5), (1, 2)),
        plot(of(4), (1, 2)),
        plot(of(1), (1, 2)),
        plot(keep(1), (1, 2)),
        plot(of(2), (1, 2)),
        plot(keep(2), (1, 2)),
        plot(of(0), (1, 2)),
        plot(of(3), (1, 2)),
    ])
}

fn main() {
    let words: Vec<String> = std::env::args().collect();
    if let [_, word, path, ..] = words.as_slice()
        && word == "--plots"
    {
        std::fs::write(path, plots().to_string()).expect("the file can be written");
        return;
    }
    let busy = |weights: &[u32]| -> Vec<Container> {
        weights.iter().map(|weight| Container::busy(*weight, 1)).collect()
    };
    let head = ["parts of the GPU, simulated", "policy", "sum", "untouched (5)", "sum"];
    println!("{:<54} {:<24} {:<8} {:<24} {}", head[0], head[1], head[2], head[3], head[4]);
    for weight in [1, 2, 3, 6] {
        line(&format!("2: weights 1 and {weight}"), Gpu::of(2), &busy(&[1, weight]));
    }
    line("1: four containers", Gpu::of(1), &busy(&[1; 4]));
    for programs in [2, 4, 8, 16] {
        let two = [Container::busy(1, 1), Container::busy(1, programs)];
        line(&format!("1: one program beside {programs} of another container"), Gpu::of(1), &two);
    }
    let high = |weight| Container { high_priority: true, ..Container::busy(weight, 1) };
    line(
        "1: high priority of 80 per cent beside two",
        Gpu::of(1),
        &[high(1), Container::busy(1, 1), Container::busy(1, 1)],
    );
    for (work_us, rest_us) in [(2000, 8000), (5000, 1000), (3000, 1000), (500, 100)] {
        let two = [Container::busy(1, 1), Container::does(1, Work::Bursts(work_us, rest_us))];
        let what = format!(
            "always, beside {} ms work and {} ms rest",
            work_us as f64 / 1e3,
            rest_us as f64 / 1e3
        );
        line(&format!("1: {what}"), Gpu::of(1), &two);
        line(&format!("0, max_inst 2: {what}"), Gpu { max_inst: 2, ..Gpu::of(0) }, &two);
    }
    for (work_us, rest_us) in [(51_000, 1000), (21_000, 1000), (5600, 290), (1700, 1000)] {
        let work = Work::Bursts(work_us, rest_us);
        let two = [Container::does(1, work), Container::does(2, work)];
        let what =
            format!("1:2, {} ms work and {} ms rest", work_us as f64 / 1e3, rest_us as f64 / 1e3);
        line(&format!("2: {what}"), Gpu::of(2), &two);
        line(&format!("2, keep: {what}"), Gpu { idle: Idle::Keep, ..Gpu::of(2) }, &two);
    }
    line("3: weights 1, 2 and 5 of 20", Gpu::of(3), &busy(&[1, 2, 5]));
    line("0: twenty of 20 containers", Gpu::of(0), &busy(&[1; 20]));
}
