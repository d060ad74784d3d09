//! Which GPUs are shared, and which are exclusive to a container: a GPU is never both. Pure.
//!
//! The kubelet knows which container has what, and reports it a moment after it has been given out: what was
//! given since is remembered until then. Times are since the plugin began.

use core::time::Duration;
use std::collections::BTreeMap;

use cgpu_kubelet::api::ListPodResourcesResponse;

use crate::units::{SharedGpu, gpu_of};

/// How long something that was given out is remembered that the kubelet doesn't report: a pod that it refused
/// for another reason has nothing.
const UNREPORTED: Duration = Duration::from_secs(30);

/// How long the kubelet's word is too old for what was given out: it was asked before, or hadn't heard our answer.
const MOMENT: Duration = Duration::from_secs(5);

/// What a GPU is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Containers have units of its memory.
    Shared,
    /// A container has all of it.
    Whole,
}

impl Use {
    #[must_use]
    pub fn other(self) -> Use {
        match self {
            Use::Shared => Use::Whole,
            Use::Whole => Use::Shared,
        }
    }
}

/// What the GPUs of a node are used for, by what the kubelet reports of both resources.
#[must_use]
pub fn modes(
    held: &ListPodResourcesResponse,
    gpus: &[SharedGpu],
    shared: &str,
    whole: &str,
) -> BTreeMap<u32, Use> {
    let mut modes = BTreeMap::new();
    let containers = held.pod_resources.iter().flat_map(|pod| &pod.containers);
    for some in containers.flat_map(|container| &container.devices) {
        for id in &some.device_ids {
            if some.resource_name == shared {
                // A container that has all of a GPU has it, whatever else is reported.
                gpu_of(gpus, id).map(|gpu| modes.entry(gpu.index).or_insert(Use::Shared));
            } else if some.resource_name == whole {
                let gpu = gpus.iter().find(|gpu| gpu.uuid == *id);
                gpu.map(|gpu| modes.insert(gpu.index, Use::Whole));
            }
        }
    }
    modes
}

/// What the GPUs of a node are used for.
#[derive(Debug, Clone, Default)]
pub struct Uses {
    reported: BTreeMap<u32, Use>,
    given: BTreeMap<u32, Given>,
}

/// What was given out.
#[derive(Debug, Clone, Copy)]
struct Given {
    what: Use,
    since: Duration,
    /// Whether the kubelet has reported it.
    is_reported: bool,
}

impl Uses {
    /// Takes over what the kubelet reports, which was asked then.
    pub fn set(&mut self, reported: BTreeMap<u32, Use>, asked: Duration) {
        self.given.retain(|index, given| {
            given.is_reported |= reported.get(index) == Some(&given.what);
            let timeout = if given.is_reported { MOMENT } else { UNREPORTED };
            asked.saturating_sub(given.since) < timeout
        });
        self.reported = reported;
    }

    /// What a GPU is used for; `None` if no container has anything of it.
    #[must_use]
    pub fn of(&self, index: u32) -> Option<Use> {
        self.reported
            .get(&index)
            .copied()
            .or_else(|| self.given.get(&index).map(|given| given.what))
    }

    /// Whether a GPU can be given out so.
    #[must_use]
    pub fn can_be(&self, index: u32, wanted: Use) -> bool {
        self.of(index) != Some(wanted.other())
    }

    /// Gives GPUs out so.
    ///
    /// # Errors
    ///
    /// The first that is used the other way; then nothing is given out.
    pub fn give(&mut self, indices: &[u32], wanted: Use, now: Duration) -> Result<(), u32> {
        if let Some(taken) = indices.iter().find(|index| !self.can_be(**index, wanted)) {
            return Err(*taken);
        }
        for index in indices {
            self.given.insert(*index, Given { what: wanted, since: now, is_reported: false });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_never_shared_and_whole() {
        let now = Duration::from_secs(100);
        let mut uses = Uses::default();
        assert_eq!(uses.give(&[0, 1], Use::Shared, now), Ok(()));
        assert_eq!(uses.give(&[2, 1], Use::Whole, now), Err(1));
        assert_eq!(uses.of(2), None, "all or nothing");
        assert_eq!(uses.give(&[2], Use::Whole, now), Ok(()));
        assert_eq!(uses.give(&[0], Use::Shared, now), Ok(()), "by as many as fit");
        assert_eq!(uses.give(&[2], Use::Shared, now), Err(2));
        assert!(
            uses.can_be(3, Use::Whole)
                && uses.can_be(0, Use::Shared)
                && !uses.can_be(0, Use::Whole)
        );
    }

    /// A GPU that was given out counts as used until the kubelet reports it, or has not reported it
    /// for too long.
    #[test]
    fn given_out_gpu_counts_until_the_kubelets_report() {
        let now = Duration::from_secs(100);
        let later = |seconds| now + Duration::from_secs(seconds);
        let mut uses = Uses::default();
        uses.give(&[0, 1], Use::Whole, now).unwrap();
        uses.set(BTreeMap::new(), later(29));
        assert_eq!(uses.of(0), Some(Use::Whole), "it reports it in a moment");
        uses.set([(0, Use::Whole)].into(), later(31));
        assert_eq!(
            (uses.of(0), uses.of(1)),
            (Some(Use::Whole), None),
            "the kubelet refused the pod"
        );
        uses.set(BTreeMap::new(), later(32));
        assert_eq!(uses.of(0), None, "its pod is gone");
        assert_eq!(uses.give(&[0], Use::Shared, later(32)), Ok(()));
        // It reports one that has gone since, and doesn't know of the next yet.
        uses.set([(0, Use::Shared)].into(), later(33));
        uses.set(BTreeMap::new(), later(34));
        assert_eq!(uses.of(0), Some(Use::Shared));
        uses.set(BTreeMap::new(), later(37));
        assert_eq!(uses.of(0), None, "what it has reported and reports no more is gone");
    }
}
