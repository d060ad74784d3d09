//! Rounds of containers, and slices of their groups.

use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::plan::GpuRules;

/// What a weight of one is worth while all weights together are at most [`MANY`], in microseconds; half as much if they
/// are more, so that no container waits longer.
const UNIT_US: u64 = 4096;

/// The same where weights differ. A program's last slice before a rest is used in part, so a longer slice is
/// used less well than a short one, and a weight of two gets less than twice as much. Shorter slices hold the
/// ratio better, and lose more of the GPU to going from one to the next: with these, bursts of 20 ms are
/// divided as 1.9 to 1 (1.85 with [`UNIT_US`]), and the loss is still less than where all weights are alike
/// (`tests/gate/compute`).
const UNEVEN_UNIT_US: u64 = 3200;

/// See [`UNIT_US`].
const MANY: u64 = 16;

/// What it costs to go to a group and to leave it, in microseconds: 180 before its slice and 50 within it on
/// an H100 (`tests/gpu/results`), rounded up. A container with several groups pays it for each.
const VISIT_US: u64 = 250;

/// The slice of a new channel group, in microseconds: `kfifoChannelGroupGetDefaultTimeslice_GV100`
/// (kernel_fifo_gv100.c). A channel outside a group keeps it.
pub const DEFAULT_SLICE_US: u64 = 1024;

/// The shortest slice that is set, in microseconds. The driver takes it, and it is what it says.
const LEAST_US: u64 = 256;

/// The longest slice that is set, in microseconds: seen on an H100, and within what the register holds.
pub const MOST_US: u64 = 65_536;

/// The least that a container without high priority keeps if others have it, in microseconds.
const LEAST_PERIOD_US: u64 = 512;

/// A container on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tenant {
    /// Its compute weight: 1 or more.
    pub weight: u32,
    /// Whether it has high priority.
    pub high_priority: bool,
}

/// What a container has of a GPU while all that are on it have had their turn once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Period {
    /// Microseconds.
    pub us: u64,
    /// Whether each of its groups has so much, and not all of them together.
    pub each: bool,
}

impl Period {
    /// What a container's groups have of its round together, where so many of its channels are outside groups.
    /// No slice can be set for these.
    #[must_use]
    pub fn beside_channels(self, channels: usize) -> Self {
        let channels_us = (DEFAULT_SLICE_US + VISIT_US) * u64::try_from(channels).unwrap_or(0);
        let us = if self.each { self.us } else { self.us.saturating_sub(channels_us) };
        Period { us, each: self.each }
    }
}

/// What each of the containers on a GPU has, in their order; `None` if the policy leaves computing time to the driver.
/// `framed` if all but those of high priority run one after another, in a [`Frame`](super::Frame): then a period is
/// against the container whose time window it is.
#[must_use]
pub fn periods(rules: GpuRules, framed: bool, tenants: &[Tenant]) -> Option<Vec<Period>> {
    let is_weighted = match rules.policy {
        0 | 1 | 3 | 4 => false,
        2 => !framed,
        _ => return None,
    };
    let weight = |tenant: &Tenant| if is_weighted { u64::from(tenant.weight.max(1)) } else { 1 };
    let weights: Vec<u64> = tenants.iter().map(weight).collect();
    let unit_us = if !framed && weights.iter().sum::<u64>() > MANY {
        UNIT_US / 2
    } else if weights.windows(2).any(|two| two[0] != two[1]) {
        UNEVEN_UNIT_US
    } else {
        UNIT_US
    };
    let sum = |high: bool| -> u64 {
        tenants.iter().filter(|tenant| tenant.high_priority == high).map(weight).sum()
    };
    let (high, mut low) = (sum(true), sum(false));
    if framed {
        low = low.min(1);
    }
    let (mut high_us, mut low_us) = (unit_us, unit_us);
    if high > 0 && low > 0 {
        // All of high priority together have `prio_ratio` per cent of what all have.
        let ratio = u64::from(rules.prio_ratio.clamp(1, 99));
        high_us = unit_us * low * ratio / ((100 - ratio) * high);
        // The heaviest has no more than a register holds; then the others have less.
        let heaviest = tenants.iter().filter(|tenant| tenant.high_priority).map(weight).max();
        let most_us = MOST_US / heaviest.unwrap_or(1);
        if high_us > most_us {
            low_us = unit_us * most_us / high_us;
            high_us = most_us;
        }
    }
    let round = |tenant: &Tenant| {
        let unit_us = if tenant.high_priority { high_us } else { low_us };
        let us = (unit_us * weight(tenant)).clamp(LEAST_PERIOD_US, MOST_US);
        Period { us, each: rules.policy == 4 }
    };
    Some(tenants.iter().map(round).collect())
}

/// Into how many batches a container's groups are divided, of which so many have work on one engine. The groups of one
/// batch alone run at a time: with more at once, slices would be shorter than the least, and together they would take
/// longer than one group would.
#[must_use]
pub fn batches(round: Period, groups: usize) -> usize {
    if round.each {
        return 1;
    }
    let most = (round.us + VISIT_US) / (LEAST_US + VISIT_US);
    groups.div_ceil(usize::try_from(most).unwrap_or(usize::MAX).max(1)).max(1)
}

/// The slice of each of a container's groups, of which so many have work on one engine. All of a
/// [batch](batches) together take as long as one would, with what it costs to go from one to the next.
#[must_use]
pub fn slice_us(round: Period, groups: usize) -> u64 {
    let groups = if round.each { 1 } else { groups.div_ceil(batches(round, groups)).max(1) };
    let share_us = (round.us + VISIT_US) / u64::try_from(groups).unwrap_or(u64::MAX);
    share_us.saturating_sub(VISIT_US).clamp(LEAST_US, MOST_US)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rules(policy: u32, prio_ratio: u32) -> GpuRules {
        GpuRules { policy, max_inst: 20, prio_ratio }
    }

    fn tenant(weight: u32, high_priority: bool) -> Tenant {
        Tenant { weight, high_priority }
    }

    fn us(rules: GpuRules, tenants: &[Tenant]) -> Vec<u64> {
        periods(rules, false, tenants).unwrap().iter().map(|round| round.us).collect()
    }

    #[test]
    fn weights_count_under_policy_2_alone() {
        let tenants = [tenant(1, false), tenant(2, false), tenant(6, false)];
        assert_eq!(us(rules(2, 80), &tenants), [3200, 6400, 19200]);
        assert_eq!(us(rules(1, 80), &tenants), [4096, 4096, 4096]);
        let each: Vec<_> = periods(rules(4, 80), false, &tenants).unwrap();
        assert!(each.iter().all(|round| *round == Period { us: 4096, each: true }));
        for policy in [5, 9] {
            assert_eq!(periods(rules(policy, 80), false, &tenants), None, "{policy}");
        }
    }

    /// A period of many containers is no longer than one of some.
    #[test]
    fn period_of_many_containers_is_not_longer() {
        let tenants = vec![tenant(1, false); 25];
        assert_eq!(us(rules(1, 80), &tenants), vec![2048; 25]);
        assert_eq!(us(rules(1, 80), &tenants[..16]), vec![4096; 16]);
    }

    #[test]
    fn high_priority_has_its_ratio_of_all() {
        let tenants = [tenant(1, true), tenant(1, false), tenant(1, false)];
        let all = us(rules(1, 80), &tenants);
        assert_eq!(all, [32768, 4096, 4096]);
        // More than a register holds: the others have less.
        let tenants = [vec![tenant(1, true)], vec![tenant(1, false); 4]].concat();
        assert_eq!(us(rules(1, 99), &tenants)[..2], [65536, 512]);
        // So it is where they have weights.
        let heavy = |high: bool| tenant(10, high);
        let all = us(rules(2, 80), &[heavy(true), heavy(false), heavy(false)]);
        let part = all[0] as f64 / all.iter().sum::<u64>() as f64;
        assert!((part - 0.8).abs() < 0.01, "{all:?}");
        // Alone among its like it is as any other.
        assert_eq!(us(rules(1, 80), &[tenant(1, true), tenant(1, true)]), [4096, 4096]);
    }

    /// If one container runs at a time, high priority has its ratio against that one.
    #[test]
    fn high_priority_ratio_is_against_the_running_container() {
        let tenants = [tenant(1, true), tenant(9, false), tenant(3, false), tenant(1, false)];
        for policy in [0, 3, 1, 2] {
            let all = periods(rules(policy, 80), true, &tenants).unwrap();
            assert_eq!(
                all.iter().map(|round| round.us).collect::<Vec<_>>(),
                [16384, 4096, 4096, 4096]
            );
        }
        let low = periods(rules(3, 80), true, &[tenant(1, false); 25]).unwrap();
        assert!(low.iter().all(|round| round.us == 4096));
    }

    /// `make gpu` has seen the slices of two and of four processes divide an H100 so
    /// (`tests/gpu/results/2026-11-26…/compute.md`).
    #[test]
    fn several_groups_have_one_round_together() {
        let round = Period { us: 4096, each: false };
        assert_eq!([0, 1, 2, 4].map(|groups| slice_us(round, groups)), [4096, 4096, 1923, 836]);
        assert_eq!([1, 8, 9, 16, 17, 64].map(|groups| batches(round, groups)), [1, 1, 2, 2, 3, 8]);
        assert_eq!([8, 16, 64].map(|groups| slice_us(round, groups)), [293; 3]);
        assert_eq!(batches(Period { us: 4096, each: true }, 64), 1);
        assert_eq!(batches(Period { us: 512, each: false }, 3), 3);
        assert_eq!(slice_us(Period { us: 4096, each: true }, 4), 4096);
        assert_eq!(slice_us(Period { us: u64::MAX / 2, each: false }, 1), MOST_US);
    }

    /// Channels outside groups take time from the groups of the same container.
    #[test]
    fn ungrouped_channels_take_from_the_same_containers_groups() {
        let round = Period { us: 4096, each: false };
        let left = |channels| round.beside_channels(channels).us;
        assert_eq!([0, 1, 3, 4, 64].map(left), [4096, 2822, 274, 0, 0]);
        assert_eq!(slice_us(round.beside_channels(4), 1), LEAST_US);
        assert_eq!(batches(round.beside_channels(4), 3), 3);
        let each = Period { us: 4096, each: true };
        assert_eq!(each.beside_channels(4), each);
    }

    fn any_tenants() -> impl Strategy<Value = Vec<Tenant>> {
        let any = (1_u32..=25, any::<bool>());
        proptest::collection::vec(any.prop_map(|(weight, high)| tenant(weight, high)), 1..25)
    }

    proptest! {
        #[test]
        fn rounds_are_within_their_bounds_and_monotone(
            tenants in any_tenants(),
            policy in prop_oneof![Just(1_u32), Just(2), Just(4)],
            prio_ratio in 20_u32..=99,
        ) {
            let all = periods(rules(policy, prio_ratio), false, &tenants).unwrap();
            prop_assert_eq!(all.len(), tenants.len());
            for (one, has) in tenants.iter().zip(&all) {
                prop_assert!((LEAST_PERIOD_US..=MOST_US).contains(&has.us));
                for (other, theirs) in tenants.iter().zip(&all) {
                    let alike = one.high_priority == other.high_priority;
                    if alike && one.weight <= other.weight {
                        prop_assert!(has.us <= theirs.us);
                    }
                }
            }
        }

        #[test]
        fn forking_gains_a_container_no_time(us in LEAST_PERIOD_US..=MOST_US, groups in 1_usize..64) {
            let round = Period { us, each: false };
            let slice = slice_us(round, groups);
            prop_assert!(slice >= LEAST_US && slice <= slice_us(round, 1));
            let batch = groups.div_ceil(batches(round, groups));
            let all = (slice + VISIT_US) * u64::try_from(batch).unwrap();
            prop_assert!(all <= us + VISIT_US);
        }
    }
}
