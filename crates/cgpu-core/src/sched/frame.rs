//! Frames: parts of a GPU's time that belong to one container each, also while it rests.
//!
//! A frame comes again and again, at times that all monitors of a host know without speaking to each other:
//! it begins at multiples of its length on the host's clock. Within it each container has *spans*, in
//! which it may run; outside them its channels are off the GPU.

use alloc::vec;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use super::Tenant;
use crate::plan::GpuRules;

/// How long a frame is to be, in microseconds: no container waits longer.
const FRAME_US: u64 = 400_000;

/// The longest slot, in microseconds, and the shortest of up to [`MANY`]: to go off and on again costs some of
/// each.
const MOST_SLOT_US: u64 = 48_000;
const LEAST_SLOT_US: u64 = 16_000;

/// See [`LEAST_SLOT_US`]: as many as there can be containers on a GPU. More are weights added up.
const MANY: u64 = 25;

/// The shortest slot of all, in microseconds.
const LEAST_OF_MANY_US: u64 = 2000;

/// How long a batch of a container's programs runs until the next batch's time window, in microseconds.
const BATCH_US: u64 = 100_000;

/// What becomes of the time of a container that rests, under policies 1 and 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Idle {
    /// Who has work gets it.
    #[default]
    Yield,
    /// It stays empty.
    Keep,
}

/// A time within a frame, in microseconds from its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Its beginning.
    pub from_us: u64,
    /// Its end, which isn't in it.
    pub to_us: u64,
}

/// What containers may have of a frame, by their order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Frame {
    /// Its length, in microseconds.
    pub us: u64,
    /// Of each container.
    pub spans: Vec<Vec<Span>>,
}

/// When a container may run on one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// The frame's length, in microseconds.
    pub frame_us: u64,
    /// Its spans of that.
    pub spans: Vec<Span>,
}

/// Whether a container with these spans of a frame may run at a time, and when that changes next; both times
/// in microseconds of the host's clock. `None` where it never does.
#[must_use]
pub fn turn_at(frame_us: u64, spans: &[Span], now_us: u64) -> (bool, Option<u64>) {
    let frame_us = frame_us.max(1);
    let is_on = |at_us: u64| {
        let at_us = at_us % frame_us;
        spans.iter().any(|span| (span.from_us..span.to_us).contains(&at_us))
    };
    let on = is_on(now_us);
    let begin_us = now_us - now_us % frame_us;
    let edges = |frame: u64| {
        let all = spans.iter().flat_map(|span| [span.from_us, span.to_us]);
        let begin_us = begin_us.saturating_add(frame.saturating_mul(frame_us));
        all.map(move |edge_us| begin_us.saturating_add(edge_us))
    };
    let mut later: Vec<u64> = (0..2).flat_map(edges).filter(|edge_us| *edge_us > now_us).collect();
    later.sort_unstable();
    (on, later.into_iter().find(|edge_us| is_on(*edge_us) != on))
}

/// What part of a frame a container with these spans has, from 0 to 1.
#[must_use]
#[allow(clippy::cast_precision_loss, reason = "microseconds of a fraction of a second")]
pub fn part(frame_us: u64, spans: &[Span]) -> f64 {
    let lengths = spans.iter().map(|span| span.to_us.saturating_sub(span.from_us));
    let all = lengths.fold(0, u64::saturating_add);
    all as f64 / frame_us.max(1) as f64
}

/// When one of so many cohorts of a container may run: the frame's length in microseconds, and its span.
#[must_use]
pub fn batch_windows(batch: usize, batches: usize) -> (u64, Span) {
    let (batch, batches) = (batch as u64, batches.max(1) as u64);
    let span = Span { from_us: batch * BATCH_US, to_us: (batch + 1) * BATCH_US };
    (batches * BATCH_US, span)
}

/// The frame of a GPU with these containers, if its policy divides time so; `None` if all may run always. A container
/// that had spans of a `before` of the same length keeps them; a new one gets those that it has on another GPU, if
/// these are free: a program that waits for several GPUs has all of them at a time.
#[must_use]
pub fn frame(
    rules: GpuRules,
    idle: Idle,
    tenants: &[Tenant],
    before: &Frame,
    elsewhere: &[Option<Turn>],
) -> Option<Frame> {
    let (is_weighted, is_fixed) = match (rules.policy, idle) {
        (0, _) => (false, true),
        (3, _) => (true, true),
        (1, Idle::Keep) => (false, false),
        (2, Idle::Keep) => (true, false),
        _ => return None,
    };
    // Who has high priority is never off.
    let wants = |tenant: &Tenant| match (tenant.high_priority, is_weighted) {
        (true, _) => 0,
        (false, true) => u64::from(tenant.weight.max(1)),
        (false, false) => 1,
    };
    let wanted: u64 = tenants.iter().map(wants).sum();
    let slots = if is_fixed { wanted.max(rules.max_inst.into()) } else { wanted };
    if wanted == 0 || slots == 1 {
        return None;
    }
    let least_us = if slots > MANY { LEAST_OF_MANY_US } else { LEAST_SLOT_US };
    let slot_us = (FRAME_US / slots).clamp(least_us, MOST_SLOT_US);
    let us = slot_us * slots;
    let mut free: Vec<bool> = (0..slots).map(|_| true).collect();
    let mut have: Vec<Option<Vec<usize>>> = vec![None; tenants.len()];
    let here = |at: usize| before.spans.get(at).map(|spans| (before.us, spans));
    let there = |at: usize| elsewhere.get(at)?.as_ref().map(|turn| (turn.frame_us, &turn.spans));
    // First all containers that were here.
    let first = (0..tenants.len()).map(|at| (at, here(at)));
    let then = (0..tenants.len()).map(|at| (at, there(at)));
    for (at, requested) in first.chain(then) {
        let is_within = |spans: &&Vec<Span>| spans.iter().all(|span| span.to_us <= us);
        let requested = requested.filter(|(of_us, _)| *of_us == us && have[at].is_none());
        let Some(spans) = requested.map(|(_, spans)| spans).filter(is_within) else { continue };
        let slots = slots_of(spans, slot_us);
        let fits = slots.len() as u64 == wants(&tenants[at])
            && slots.iter().all(|slot| free.get(*slot).is_some_and(|free| *free));
        if fits {
            slots.iter().for_each(|slot| free[*slot] = false);
            have[at] = Some(slots);
        }
    }
    let spans = tenants.iter().zip(have).map(|(tenant, had)| {
        if tenant.high_priority {
            return vec![Span { from_us: 0, to_us: us }];
        }
        let count = usize::try_from(wants(tenant)).unwrap_or(usize::MAX);
        let slots = had.unwrap_or_else(|| take(&mut free, count));
        spans_of(&slots, slot_us)
    });
    Some(Frame { us, spans: spans.collect() })
}

/// Takes so many free slots: the lowest ones that lie together, or else the lowest.
fn take(free: &mut [bool], count: usize) -> Vec<usize> {
    let together = free.windows(count.max(1)).position(|run| run.iter().all(|free| *free));
    let slots: Vec<usize> = match together {
        Some(first) => (first..first + count).collect(),
        None => (0..free.len()).filter(|slot| free[*slot]).take(count).collect(),
    };
    for slot in &slots {
        free[*slot] = false;
    }
    slots
}

/// Slots that follow each other are one span.
fn spans_of(slots: &[usize], slot_us: u64) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    for slot in slots {
        let from_us = *slot as u64 * slot_us;
        match spans.last_mut().filter(|last| last.to_us == from_us) {
            Some(last) => last.to_us += slot_us,
            None => spans.push(Span { from_us, to_us: from_us + slot_us }),
        }
    }
    spans
}

fn slots_of(spans: &[Span], slot_us: u64) -> Vec<usize> {
    let slots = spans.iter().flat_map(|span| span.from_us / slot_us..span.to_us / slot_us);
    slots.filter_map(|slot| usize::try_from(slot).ok()).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rules(policy: u32, max_inst: u32) -> GpuRules {
        GpuRules { policy, max_inst, prio_ratio: 80 }
    }

    fn tenant(weight: u32) -> Tenant {
        Tenant { weight, high_priority: false }
    }

    fn parts(frame: &Frame) -> Vec<f64> {
        let parts = frame.spans.iter().map(|spans| part(frame.us, spans));
        parts.map(|part| (part * 1e4).round() / 1e4).collect()
    }

    fn framed(policy: u32, max_inst: u32, idle: Idle, weights: &[u32]) -> Option<Frame> {
        let tenants: Vec<Tenant> = weights.iter().map(|weight| tenant(*weight)).collect();
        frame(rules(policy, max_inst), idle, &tenants, &Frame::default(), &[])
    }

    /// Parts are fixed under the policies 0 and 3, and free parts stay empty.
    #[test]
    fn parts_are_fixed_under_policies_0_and_3() {
        let of = |policy, weights: &[u32]| framed(policy, 20, Idle::Yield, weights).unwrap();
        let fair = of(0, &[1, 5, 1]);
        assert_eq!((fair.us, parts(&fair)), (400_000, vec![0.05; 3]));
        assert_eq!(fair.spans[1], [Span { from_us: 20_000, to_us: 40_000 }]);
        let fixed = of(3, &[1, 5, 2]);
        assert_eq!(parts(&fixed), [0.05, 0.25, 0.1]);
        assert_eq!(fixed.spans[2], [Span { from_us: 120_000, to_us: 160_000 }]);
        // A GPU for two: long slots, but no longer than they need be.
        let two = framed(0, 2, Idle::Yield, &[1, 1]).unwrap();
        assert_eq!((two.us, parts(&two)), (96_000, vec![0.5; 2]));
        // More than fit, which a container creation and a setting refuse: less for all, and no container hangs.
        assert_eq!(parts(&framed(3, 4, Idle::Yield, &[4, 4]).unwrap()), [0.5, 0.5]);
    }

    /// An idle container retains its time under the policies 1 and 2 if that is configured.
    #[test]
    fn idle_container_retains_time_under_1_and_2() {
        assert_eq!(framed(1, 20, Idle::Yield, &[1, 1]), None);
        assert_eq!(framed(2, 20, Idle::Yield, &[1, 2]), None);
        assert_eq!(framed(1, 20, Idle::Keep, &[1]), None, "it has the GPU for itself");
        assert_eq!(parts(&framed(1, 20, Idle::Keep, &[1, 7]).unwrap()), [0.5, 0.5]);
        let weighted = framed(2, 20, Idle::Keep, &[1, 2]).unwrap();
        assert_eq!((weighted.us, parts(&weighted)), (144_000, vec![0.3333, 0.6667]));
        assert_eq!(framed(2, 20, Idle::Keep, &[25; 25]).unwrap().us, 1_250_000);
        for policy in [4, 5] {
            assert_eq!(framed(policy, 20, Idle::Keep, &[1, 2]), None, "{policy}");
        }
    }

    /// Existing containers retain their spans, and a new one gets the lowest free spans.
    #[test]
    fn existing_containers_retain_spans_and_new_get_lowest() {
        let before = framed(3, 20, Idle::Yield, &[2, 3, 1]).unwrap();
        // The one in the middle left, and two came.
        let known = Frame {
            us: before.us,
            spans: vec![before.spans[0].clone(), before.spans[2].clone(), vec![], vec![]],
        };
        let tenants = [tenant(2), tenant(1), tenant(4), tenant(2)];
        let now = frame(rules(3, 20), Idle::Yield, &tenants, &known, &[]).unwrap();
        assert_eq!(now.spans[..2], known.spans[..2]);
        assert_eq!(now.spans[2], [Span { from_us: 120_000, to_us: 200_000 }]);
        assert_eq!(now.spans[3], [Span { from_us: 40_000, to_us: 80_000 }]);
        // Nothing lies together: what is left.
        let tenants = [tenant(1), tenant(1), tenant(2)];
        let known = Frame {
            us: 4 * 48_000,
            spans: vec![
                vec![Span { from_us: 0, to_us: 48_000 }],
                vec![Span { from_us: 96_000, to_us: 144_000 }],
            ],
        };
        let now = frame(rules(3, 4), Idle::Yield, &tenants, &known, &[]).unwrap();
        assert_eq!(parts(&now), [0.25, 0.25, 0.5]);
        assert_eq!(now.spans[2].len(), 2);
    }

    /// A new container has the spans that it has on another GPU, if they are free.
    #[test]
    fn new_container_reuses_free_spans_of_another_gpu() {
        let slot = |at: u64| vec![Span { from_us: at * 20_000, to_us: (at + 1) * 20_000 }];
        let turn = |frame_us, at| Some(Turn { frame_us, spans: slot(at) });
        let known = Frame { us: 400_000, spans: vec![vec![], slot(3), vec![]] };
        let of = |elsewhere: &[Option<Turn>]| {
            let tenants = [tenant(1); 3];
            frame(rules(3, 20), Idle::Yield, &tenants, &known, elsewhere).unwrap().spans
        };
        assert_eq!(of(&[turn(400_000, 7), None, None]), [slot(7), slot(3), slot(0)]);
        assert_eq!(of(&[turn(400_000, 3), None, None]), [slot(0), slot(3), slot(1)], "not free");
        assert_eq!(of(&[turn(200_000, 7), turn(400_000, 9), None]), [slot(0), slot(3), slot(1)]);
        assert_eq!(of(&[None, None, turn(400_000, 40)]), [slot(0), slot(3), slot(1)], "beyond");
    }

    /// The previous file may have been written by any program of root.
    #[test]
    fn spans_beyond_a_frame_have_no_owner() {
        let beyond = vec![Span { from_us: 0, to_us: u64::MAX }];
        let known = Frame { us: 96_000, spans: vec![beyond.clone(), beyond.clone()] };
        let now = frame(rules(0, 2), Idle::Yield, &[tenant(1); 2], &known, &[]).unwrap();
        assert_eq!(parts(&now), [0.5, 0.5]);
        assert_eq!(turn_at(u64::MAX, &beyond, 5), (true, None));
    }

    #[test]
    fn high_priority_is_never_off() {
        let tenants = [tenant(1), Tenant { weight: 1, high_priority: true }];
        let frame = frame(rules(0, 4), Idle::Yield, &tenants, &Frame::default(), &[]).unwrap();
        assert_eq!(parts(&frame), [0.25, 1.0]);
        assert_eq!(turn_at(frame.us, &frame.spans[1], 7), (true, None));
    }

    /// A time window ends if the next span does not follow at once.
    #[test]
    fn time_window_ends_at_a_gap_between_spans() {
        let span = |from_us, to_us| Span { from_us, to_us };
        let spans = [span(10, 20), span(20, 30)];
        assert_eq!(turn_at(100, &spans, 500), (false, Some(510)));
        assert_eq!(turn_at(100, &spans, 510), (true, Some(530)));
        assert_eq!(turn_at(100, &spans, 529), (true, Some(530)));
        assert_eq!(turn_at(100, &spans, 530), (false, Some(610)));
        // From one frame into the next.
        let spans = [span(0, 10), span(90, 100)];
        assert_eq!(turn_at(100, &spans, 95), (true, Some(110)));
        assert_eq!(turn_at(100, &spans, 105), (true, Some(110)));
        assert_eq!(turn_at(100, &[], 105), (false, None));
        assert_eq!(turn_at(0, &spans, 5), (true, None));
    }

    #[test]
    fn cohorts_follow_each_other() {
        assert_eq!(batch_windows(1, 3), (300_000, Span { from_us: 100_000, to_us: 200_000 }));
        assert_eq!(batch_windows(0, 0), (100_000, Span { from_us: 0, to_us: 100_000 }));
    }

    fn any_tenants() -> impl Strategy<Value = Vec<Tenant>> {
        let any = (1_u32..=25, prop::bool::weighted(0.2));
        let any = any.prop_map(|(weight, high_priority)| Tenant { weight, high_priority });
        proptest::collection::vec(any, 1..25)
    }

    proptest! {
        /// No container runs in another's span, and each has what is reserved for it.
        #[test]
        fn spans_never_overlap_and_match_reserved_shares(
            tenants in any_tenants(),
            (policy, idle) in prop_oneof![
                Just((0, Idle::Yield)), Just((3, Idle::Yield)),
                Just((1, Idle::Keep)), Just((2, Idle::Keep)),
            ],
            max_inst in 1_u32..=25,
            later in any_tenants(),
        ) {
            let first = frame(rules(policy, max_inst), idle, &tenants, &Frame::default(), &[]);
            let mut all = vec![(tenants.clone(), first.clone())];
            // Some stay, some come.
            if let Some(first) = first {
                let next = [&tenants[..tenants.len() / 2], &later[..]].concat();
                let second = frame(rules(policy, max_inst), idle, &next, &first, &[]);
                all.push((next, second));
            }
            for (tenants, frame) in all {
                let Some(frame) = frame else { continue };
                let low = |tenant: &Tenant| !tenant.high_priority;
                let mut spans: Vec<Span> = tenants
                    .iter()
                    .zip(&frame.spans)
                    .filter(|(tenant, _)| low(tenant))
                    .flat_map(|(_, spans)| spans.clone())
                    .collect();
                spans.sort_by_key(|span| span.from_us);
                prop_assert!(spans.windows(2).all(|two| two[0].to_us <= two[1].from_us));
                prop_assert!(spans.iter().all(|span| span.to_us <= frame.us));
                let weight = |tenant: &Tenant| if policy < 2 { 1 } else { tenant.weight };
                let wanted: u32 = tenants.iter().filter(|tenant| low(tenant)).map(weight).sum();
                let slots = if policy == 0 || policy == 3 { wanted.max(max_inst) } else { wanted };
                for (tenant, spans) in tenants.iter().zip(&frame.spans) {
                    let reserved = if low(tenant) {
                        f64::from(weight(tenant)) / f64::from(slots)
                    } else {
                        1.0
                    };
                    prop_assert!((part(frame.us, spans) - reserved).abs() < 1e-9);
                }
            }
        }
    }
}
