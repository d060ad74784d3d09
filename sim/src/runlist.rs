//! A runlist: which channel group a GPU's graphics engine runs, and for how long.
//!
//! The firmware does this, whose source isn't published. This is a round robin of discrete events in the
//! words of what an H100 was seen to do (`tests/gpu/results`): going to a group costs some time before
//! its slice and some within it; a slice has 8 bits and a shift; one that has ended yields as soon as
//! another group waits; a group without work is skipped. Pure: the caller passes the time.

use std::collections::{BTreeMap, VecDeque};

/// A group: its client, and its handle there.
pub type Name = (u32, u32);

/// What a visit costs before its slice, and within it.
const BEFORE_NS: u64 = 180_000;
const WITHIN_NS: u64 = 50_000;

/// How often the driver samples which group is there, and how many samples it retains.
pub(crate) const SAMPLE_NS: u64 = 200_000_000;
pub(crate) const SAMPLES: usize = 72;

/// What is set in the scheduler for a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// Its slice as it was asked for, in microseconds.
    pub slice_us: u64,
    /// Whether it may run: it is scheduled, and one of its channels isn't disabled.
    pub runs: bool,
    /// Whether its kernels are interrupted at any instruction, and not only between two.
    pub interrupts: bool,
}

/// Kernels of one length that wait.
#[derive(Debug, Clone, Copy)]
struct Batch {
    kernel_ns: u64,
    count: u64,
}

/// What the driver saw in a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sample {
    /// When, in nanoseconds.
    pub(crate) when_ns: u64,
    /// The group that was there last.
    pub(crate) of: Option<Name>,
    /// Whether it was at work.
    pub(crate) is_busy: bool,
}

#[derive(Debug, Clone)]
struct Group {
    rules: Rules,
    queue: VecDeque<Batch>,
    /// How far the first kernel is.
    done_ns: u64,
    ended: u64,
    busy_ns: u64,
}

impl Group {
    fn is_ready(&self) -> bool {
        self.rules.runs && !self.queue.is_empty()
    }

    fn slice_ns(&self) -> u64 {
        in_register_us(self.rules.slice_us) * 1000
    }

    /// Until the first kernel ends.
    fn left_ns(&self) -> u64 {
        self.queue.front().map_or(0, |first| first.kernel_ns.saturating_sub(self.done_ns))
    }

    fn run(&mut self, ns: u64) {
        self.done_ns += ns;
        self.busy_ns += ns;
        if let Some(first) = self.queue.front_mut().filter(|first| first.kernel_ns <= self.done_ns)
        {
            self.done_ns = 0;
            self.ended += 1;
            first.count -= 1;
            if first.count == 0 {
                self.queue.pop_front();
            }
        }
    }
}

/// A slice as a register holds it: 8 bits and a shift.
fn in_register_us(us: u64) -> u64 {
    let shift = (u64::BITS - us.leading_zeros()).saturating_sub(8);
    us >> shift << shift
}

/// One engine's. Its time is what it was brought up to, in nanoseconds.
#[derive(Debug, Clone, Default)]
pub struct Runlist {
    now_ns: u64,
    groups: BTreeMap<Name, Group>,
    /// The group that is there, or was last.
    current: Option<Name>,
    /// What is left of going to it.
    way_ns: u64,
    /// How much of its slice has passed.
    used_ns: u64,
    samples: VecDeque<Sample>,
}

impl Runlist {
    /// The time that it was brought up to.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Gives a group work: so many kernels of that length. `rules` apply to it if it's new.
    pub fn submit(&mut self, name: Name, rules: Rules, kernel_ns: u64, count: u64) {
        let new = || Group { rules, queue: VecDeque::new(), done_ns: 0, ended: 0, busy_ns: 0 };
        let group = self.groups.entry(name).or_insert_with(new);
        if kernel_ns > 0 && count > 0 {
            group.queue.push_back(Batch { kernel_ns, count });
        }
    }

    /// Other rules for each group, by its name; one without is gone.
    pub fn change(&mut self, rules: impl Fn(Name) -> Option<Rules>) {
        self.groups.retain(|name, group| match rules(*name) {
            Some(rules) => {
                group.rules = rules;
                true
            }
            None => false,
        });
        if self.current.is_some_and(|name| !self.groups.contains_key(&name)) {
            self.current = None;
        }
    }

    /// Whether no group has ever had work.
    pub(crate) fn is_unused(&self) -> bool {
        self.groups.is_empty()
    }

    /// How many kernels of a group have ended.
    #[must_use]
    pub fn ended(&self, name: Name) -> u64 {
        self.groups.get(&name).map_or(0, |group| group.ended)
    }

    /// For how long a group's kernels have run, in nanoseconds.
    #[must_use]
    pub fn busy_ns(&self, name: Name) -> u64 {
        self.groups.get(&name).map_or(0, |group| group.busy_ns)
    }

    /// By group: kernels that have ended, and for how many microseconds its kernels have run.
    pub(crate) fn works(&self) -> impl Iterator<Item = (Name, (u64, u64))> {
        self.groups.iter().map(|(name, group)| (*name, (group.ended, group.busy_ns / 1000)))
    }

    /// What the driver saw in each sample, the latest last.
    pub(crate) fn samples(&self) -> impl Iterator<Item = Sample> {
        self.samples.iter().copied()
    }

    /// Advances to that time; the driver takes samples meanwhile, also if no group is there.
    fn go_on(&mut self, to_ns: u64, is_busy: bool) {
        let checks = self.now_ns / SAMPLE_NS + 1..=to_ns / SAMPLE_NS;
        let retained = (to_ns / SAMPLE_NS).saturating_sub(SAMPLES as u64 - 1);
        for number in checks.skip_while(|number| *number < retained) {
            let of = self.current;
            self.samples.push_back(Sample { when_ns: number * SAMPLE_NS, of, is_busy });
        }
        while self.samples.len() > SAMPLES {
            self.samples.pop_front();
        }
        self.now_ns = to_ns;
    }

    /// In how many nanoseconds so many of a group's kernels will have ended, if nothing else changes;
    /// no more than `most_ns`.
    pub(crate) fn wait_ns(&self, name: Name, ended: u64, most_ns: u64) -> u64 {
        let (mut later, end) = (self.clone(), self.now_ns + most_ns);
        while later.ended(name) < ended && later.now_ns < end {
            later.step(end);
        }
        later.now_ns - self.now_ns
    }

    /// Goes on to that time.
    pub fn run_until(&mut self, to_ns: u64) {
        while self.now_ns < to_ns {
            self.step(to_ns);
        }
    }

    /// Goes on to the next thing that happens, no further than that time; the group whose last kernel
    /// ended just then.
    pub fn step(&mut self, to_ns: u64) -> Option<Name> {
        if self.now_ns >= to_ns {
            return None;
        }
        let Some((name, others_wait)) = self.choose() else {
            self.go_on(to_ns, false);
            return None;
        };
        if self.current != Some(name) {
            (self.current, self.way_ns, self.used_ns) = (Some(name), BEFORE_NS + WITHIN_NS, 0);
        }
        let most_ns = to_ns.min((self.now_ns / SAMPLE_NS + 1) * SAMPLE_NS) - self.now_ns;
        let group = self.groups.get_mut(&name)?;
        let mut step_ns = most_ns;
        let mut is_done = false;
        if self.way_ns > 0 {
            step_ns = step_ns.min(self.way_ns);
            self.way_ns -= step_ns;
            if self.way_ns == 0 {
                self.used_ns = WITHIN_NS;
            }
        } else {
            step_ns = step_ns.min(group.left_ns());
            let left_ns = group.slice_ns().saturating_sub(self.used_ns);
            if others_wait && group.rules.interrupts && left_ns > 0 {
                step_ns = step_ns.min(left_ns);
            }
            group.run(step_ns);
            self.used_ns += step_ns;
            is_done = group.queue.is_empty();
        }
        self.go_on(self.now_ns + step_ns, true);
        is_done.then_some(name)
    }

    /// The group that has the GPU now, and whether another waits.
    fn choose(&self) -> Option<(Name, bool)> {
        let after =
            self.current.map_or((0, 0), |(client, handle)| (client, handle.wrapping_add(1)));
        let others = self.groups.range(after..).chain(self.groups.range(..after));
        let is_ready =
            |(name, group): &(&Name, &Group)| group.is_ready() && Some(**name) != self.current;
        let next = others.into_iter().find(is_ready).map(|(name, _)| *name);
        let Some(current) = self.current else { return next.map(|next| (next, false)) };
        let here = self.groups.get(&current).filter(|group| group.is_ready());
        let stays = here.is_some_and(|group| {
            let has_ended = self.way_ns == 0 && self.used_ns >= group.slice_ns();
            let may_leave = group.rules.interrupts || group.done_ns == 0;
            next.is_none() || !has_ended || !may_leave
        });
        if stays { Some((current, next.is_some())) } else { next.map(|next| (next, false)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn rules(slice_us: u64) -> Rules {
        Rules { slice_us, runs: true, interrupts: true }
    }

    /// Kernels of a group that has work for ever.
    const NO_END: u64 = 1 << 40;

    /// What each of some groups has of a GPU, which they want to themselves all the time, in 60 s.
    fn saturated(slices_us: &[u64]) -> Vec<f64> {
        let mut runlist = Runlist::default();
        for (client, slice_us) in (0..).zip(slices_us) {
            runlist.submit((client, 1), rules(*slice_us), 500_000, NO_END);
        }
        let all_ns = 60_000 * MS;
        runlist.run_until(all_ns);
        let clients = (0..).take(slices_us.len());
        clients.map(|client| runlist.busy_ns((client, 1)) as f64 / all_ns as f64).collect()
    }

    /// Kernels a second, of 2001 alone: `tests/gpu/results/2026-11-22…/probe.md`, share-main and
    /// share-procs. Bounds are in points of the GPU.
    #[test]
    fn runlist_divides_time_like_an_observed_h100() {
        const ALONE: f64 = 2001.2;
        for (slices, a, b, points) in [
            ([2048, 2048], 898.7, 898.7, 0.5),
            ([8000, 2000], 1536.7, 376.9, 0.5),
            ([4000, 2000], 1243.2, 613.6, 0.5),
            ([6000, 2000], 1425.2, 467.9, 0.5),
            ([12000, 2000], 1666.1, 272.6, 0.5),
            ([16000, 1000], 1840.3, 111.7, 0.5),
            ([2000, 6000], 467.9, 1422.9, 0.5),
            ([30000, 10000], 1489.5, 490.4, 0.5),
            ([1000, 1000], 839.8, 840.5, 4.0),
            ([500, 500], 677.0, 677.0, 4.0),
        ] {
            let has = saturated(&slices);
            for (has, seen) in has.iter().zip([a / ALONE, b / ALONE]) {
                let off = 100.0 * (has - seen).abs();
                assert!(off <= points, "{slices:?}: {has:.4}, seen {seen:.4}");
            }
        }
        for (slices, a, b) in
            [([2048, 2048, 2048, 2048], 449.1, 1347.4), ([6000, 2000, 2000, 2000], 937.0, 922.8)]
        {
            let has = saturated(&slices);
            assert!((has[0] - a / ALONE).abs() < 0.005, "{slices:?}: {has:?}");
            assert!((has[1..].iter().sum::<f64>() - b / ALONE).abs() < 0.005, "{has:?}");
        }
    }

    /// `tests/gpu/results/2026-11-26…/compute.md`: windows of 1.5 s.
    #[test]
    fn runlist_divides_among_many_like_observed_h100() {
        for (a_us, b_us, others, a, b) in [
            (4096, 4096, 1, 0.473, 0.473),
            (8192, 4096, 1, 0.643, 0.322),
            (24576, 4096, 1, 0.846, 0.142),
            (836, 4096, 1, 0.150, 0.765),
            (16384, 16384, 1, 0.494, 0.494),
            (4096, 4096, 4, 0.191, 0.759),
            (4096, 836, 4, 0.486, 0.379),
            (4096, 1024, 4, 0.446, 0.432),
            (4096, 1923, 2, 0.479, 0.442),
            (16384, 3908, 4, 0.499, 0.475),
        ] {
            let slices = [vec![a_us], vec![b_us; others]].concat();
            let has = saturated(&slices);
            let rest: f64 = has[1..].iter().sum();
            assert!((has[0] - a).abs() < 0.007, "{slices:?}: {has:?}");
            assert!((rest - b).abs() < 0.007, "{slices:?}: {has:?}");
        }
    }

    /// Bursts of one, next to one that is never idle: the same table.
    #[test]
    fn partly_idle_group_gets_what_observed_h100_gave() {
        for (b_us, a_us, work_us, rest_us, seen) in [
            (2048, 2048, 3100, 8200, 0.79),
            (4096, 4096, 3100, 8200, 0.95),
            (4096, 4096, 4600, 1100, 0.41),
            (8192, 4096, 4600, 1100, 0.62),
            (4096, 8192, 4600, 1100, 0.26),
            (4096, 4096, 760, 170, 0.18),
            (16384, 16384, 3100, 8200, 0.56),
        ] {
            let mut runlist = Runlist::default();
            runlist.submit((1, 1), rules(a_us), 760_000, NO_END);
            let rests = (2, 1);
            let mut wakes_ns = 0;
            let all_ns = 60_000 * MS;
            while runlist.now_ns() < all_ns {
                runlist.run_until(wakes_ns);
                runlist.submit(rests, rules(b_us), work_us * 1000, 1);
                while runlist.step(all_ns) != Some(rests) && runlist.now_ns() < all_ns {}
                wakes_ns = runlist.now_ns() + rest_us * 1000;
            }
            let alone = work_us as f64 / (work_us + rest_us) as f64;
            let has = runlist.busy_ns(rests) as f64 / all_ns as f64 / alone;
            assert!((has - seen).abs() < 0.04, "{work_us} and {rest_us}: {has:.3}, seen {seen}");
        }
    }

    #[test]
    fn a_kernel_that_isnt_interrupted_outlasts_its_slice() {
        let mut runlist = Runlist::default();
        runlist.submit((1, 1), rules(4096), 760_000, NO_END);
        runlist.submit((2, 1), Rules { interrupts: false, ..rules(4096) }, 76 * MS, NO_END);
        runlist.run_until(60_000 * MS);
        let part = |client| runlist.busy_ns((client, 1)) as f64 / 60e9;
        // Seen: 0.052 and 0.947.
        assert!((part(1) - 0.052).abs() < 0.005, "{}", part(1));
        assert!((part(2) - 0.947).abs() < 0.005, "{}", part(2));
    }

    /// A group that is off or gone gets nothing, and work that is finished is counted.
    #[test]
    fn disabled_or_removed_group_gets_no_time() {
        let mut runlist = Runlist::default();
        let (one, other) = ((1, 1), (2, 1));
        runlist.submit(one, rules(4096), MS, 10);
        assert_eq!(runlist.wait_ns(one, 3, 100 * MS), 3 * MS + BEFORE_NS + WITHIN_NS);
        runlist.run_until(100 * MS);
        assert_eq!((runlist.ended(one), runlist.busy_ns(one)), (10, 10 * MS));
        runlist.submit(one, rules(4096), MS, NO_END);
        runlist.submit(other, rules(4096), MS, NO_END);
        runlist.run_until(200 * MS);
        let (of_one, before) = (runlist.busy_ns(one), runlist.busy_ns(other));
        assert!(before > 45 * MS);
        let off = |name| Some(Rules { runs: name != other, ..rules(4096) });
        runlist.change(off);
        runlist.run_until(1000 * MS);
        assert_eq!(runlist.busy_ns(other), before);
        // No other group: it goes on without a visit.
        assert!(runlist.busy_ns(one) > of_one + 799 * MS);
        let of: Vec<_> = runlist.samples().map(|check| (check.of, check.is_busy)).collect();
        assert_eq!(of[1..], [(Some(one), true); 4]);
        runlist.change(|name| off(name).filter(|_| name != one));
        assert_eq!(runlist.busy_ns(one), 0);
        runlist.run_until(30_000 * MS);
        assert_eq!(runlist.busy_ns(other), before);
        // No group was there, and the driver took samples all the same.
        let checks: Vec<_> =
            runlist.samples().map(|check| (check.when_ns, check.is_busy)).collect();
        assert_eq!((checks.len(), checks[0]), (SAMPLES, (15_800 * MS, false)));
        assert_eq!(checks.last(), Some(&(30_000 * MS, false)));
        runlist.change(|_| Some(rules(4096)));
        runlist.run_until(30_010 * MS);
        assert!(runlist.busy_ns(other) > before + 9 * MS);
    }

    #[test]
    fn a_register_has_eight_bits_and_a_shift() {
        let us = [0, 1, 255, 256, 257, 2000, 2048, 16_000, 65_535].map(in_register_us);
        assert_eq!(us, [0, 1, 255, 256, 256, 2000, 2048, 16_000, 65_280]);
    }
}
