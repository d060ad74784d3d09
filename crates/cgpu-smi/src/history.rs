//! How much of each GPU was in use lately: [`History`]. Pure.

use std::collections::{HashMap, VecDeque};

use cgpu_cli::view::Snapshot;

/// The most moments that are kept of a GPU: as many as a wide terminal shows.
const MOST: usize = 512;

/// Figures of the moments before, by the GPU's UUID.
#[derive(Debug, Default)]
pub(crate) struct History {
    moments: HashMap<String, VecDeque<Option<u32>>>,
}

impl History {
    /// Adds what `snapshot` has: utilisation, or memory in use of the whole where the driver
    /// doesn't tell that. A GPU that isn't there any more is forgotten.
    pub(crate) fn add(&mut self, snapshot: &Snapshot) {
        self.moments.retain(|uuid, _| snapshot.gpus.iter().any(|gpu| gpu.uuid == *uuid));
        for gpu in &snapshot.gpus {
            let of_memory = || {
                let percent = u128::from(gpu.memory_used_bytes?) * 100;
                u32::try_from(percent / u128::from(gpu.memory_total_bytes.max(1))).ok()
            };
            let moments = self.moments.entry(gpu.uuid.clone()).or_default();
            if moments.len() == MOST {
                moments.pop_front();
            }
            moments.push_back(gpu.utilization_percent.or_else(of_memory));
        }
    }

    /// Those of a GPU, the last one last.
    pub(crate) fn of(&self, uuid: &str) -> Vec<Option<u32>> {
        self.moments.get(uuid).map(|moments| moments.iter().copied().collect()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sheet::fixture;

    /// The last moments are retained, and GPUs that are gone are not.
    #[test]
    fn recent_moments_are_retained_unlike_removed_gpus() {
        let mut history = History::default();
        let mut host = fixture::host(2, 0);
        history.add(&host);
        host.gpus[0].utilization_percent = None;
        history.add(&host);
        host.gpus[0].memory_used_bytes = None;
        history.add(&host);
        assert_eq!(history.of("GPU-0"), [Some(42), Some(50), None]);
        host.gpus.remove(1);
        (0..MOST).for_each(|_| history.add(&host));
        assert_eq!(history.of("GPU-0"), vec![None; MOST]);
        assert!(history.of("GPU-1").is_empty());
    }
}
