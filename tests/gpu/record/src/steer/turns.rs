//! Two programs on the GPU in turn: the channels of one are disabled, then those of the other enabled.

use std::time::{Duration, Instant};

use serde::Serialize;

use crate::control::{Control, Outcome, Who, ask};
use crate::desk::{A, B, Desk};
use crate::schedule::now_ns;

/// How calls went that put programs on the GPU and took them off.
#[derive(Debug, Serialize)]
pub(crate) struct ReportedTurns {
    phase: &'static str,
    edges: usize,
    refused: usize,
    /// Microseconds of a call: median, 99th of a hundred, longest.
    off_us: [f64; 3],
    on_us: [f64; 3],
    /// How late an edge began, in microseconds.
    late_us: [f64; 3],
    /// When each slot of a program began and ended, in nanoseconds of CLOCK_MONOTONIC: after the call
    /// that enabled its channels, and after the one that disabled them.
    slots: Vec<(char, u64, u64)>,
}

impl Desk {
    /// Puts `a` and `b` on the GPU in turn, each for its time, until the end; whether all calls
    /// went well. At the end both are on.
    pub(crate) fn turns(
        &mut self,
        on: [Duration; 2],
        length: Duration,
        has_ended: &dyn Fn() -> bool,
    ) -> bool {
        let (begun, mut edge) = (Instant::now(), Instant::now());
        let (mut offs, mut ons, mut late) = (Vec::new(), Vec::new(), Vec::new());
        let (mut slots, mut refused, mut count) = (Vec::new(), 0, 0);
        let mut since = [now_ns(); 2];
        let mut turn = 0;
        while begun.elapsed() < length && !has_ended() {
            let now = Instant::now();
            if edge > now {
                std::thread::sleep(edge - now);
            }
            late.push(edge.elapsed());
            let (coming, going) = (turn % 2, 1 - turn % 2);
            for (side, disable) in [(going, true), (coming, false)] {
                let name = [A, B][side];
                let (took, well) = self.switch(name, disable);
                refused += usize::from(!well);
                if disable {
                    offs.push(took)
                } else {
                    ons.push(took)
                }
                let now_ns = now_ns();
                if disable {
                    slots.push((name, since[side], now_ns));
                } else {
                    since[side] = now_ns;
                }
            }
            count += 1;
            edge += on[coming];
            turn += 1;
        }
        for name in [A, B] {
            refused += usize::from(!self.switch(name, false).1);
        }
        let reported = ReportedTurns {
            phase: self.phase,
            edges: count,
            refused,
            off_us: spread(offs),
            on_us: spread(ons),
            late_us: spread(late),
            slots,
        };
        self.turns.push(reported);
        refused == 0
    }

    /// Disables or enables what computes of all programs of a name; how long the calls took.
    fn switch(&mut self, name: char, disable: bool) -> (Duration, bool) {
        let (mut took, mut well) = (Duration::ZERO, true);
        for tenant in self.named(name) {
            if disable {
                self.disabled.insert(tenant);
            } else {
                self.disabled.remove(&tenant);
            }
            for held in self.computing(tenant) {
                let control = Control::disable(disable, held.group.client, &held.group.channels);
                let Some(subdevice) = held.group.subdevice else { return (took, false) };
                let client = held.group.client;
                let answer = ask(&held.file, client, subdevice, &control, Who::Root, self.patient);
                self.patient &= answer.outcome != Outcome::Hung(true);
                took += answer.took;
                if !answer.is_ok() {
                    well = false;
                    self.note(tenant, subdevice, &control, Who::Root, &answer);
                }
            }
        }
        (took, well)
    }
}

/// Median, 99th of a hundred, and longest, in microseconds.
fn spread(mut all: Vec<Duration>) -> [f64; 3] {
    all.sort_unstable();
    let at = |hundredth: usize| {
        let at = (all.len() * hundredth / 100).min(all.len().saturating_sub(1));
        all.get(at).map_or(0.0, |took| took.as_secs_f64() * 1e6)
    };
    [at(50), at(99), at(100)]
}
