//! The most memory that a container had, which nobody misses by looking at the wrong time.
//!
//! The driver knows processes and no containers; here a cgroup stands for one, as its client's
//! process was in when it made the client. What a container has is what its clients' objects
//! refer to, each memory once.

use std::collections::{BTreeSet, HashMap};

use crate::driver::Driver;

impl Driver {
    /// The most bytes of each GPU that clients of a cgroup's processes named at once, since this
    /// was asked last; of those that named more memory since then.
    pub(crate) fn take_cgroup_peaks(&mut self) -> HashMap<(String, usize), u64> {
        std::mem::take(&mut self.cgroup_peaks)
    }

    /// A client names more memory than before.
    pub(crate) fn note_cgroup_peak(&mut self, client: u32, memory: u64) {
        let gpu = self.memories.get(&memory).map(|memory| memory.gpu);
        let (Some(client), Some(gpu)) = (self.clients.get(&client), gpu) else { return };
        let alike = self.clients.values().filter(|other| other.cgroup == client.cgroup);
        // Each counts once, whatever number of objects refers to it.
        let named: BTreeSet<u64> =
            alike.flat_map(|client| client.objects.values().filter_map(|of| of.memory)).collect();
        let on = named.iter().filter_map(|id| self.memories.get(id)).filter(|of| of.gpu == gpu);
        let bytes: u64 = on.map(|memory| memory.bytes).sum();
        let peak = self.cgroup_peaks.entry((client.cgroup.clone(), gpu)).or_default();
        *peak = bytes.max(*peak);
    }
}
