//! The most memory that a container had, which a check at the wrong time can't miss.
//!
//! The driver knows processes and no containers; here a cgroup stands for one, as its client's
//! process was in when it made the client. What a container has is what its clients' objects
//! refer to, each memory once. Each call that names memory, or ends a name, changes the sums by
//! that memory alone: a program may have 100,000 objects.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

/// Memory of a GPU that an object names.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Named {
    /// The memory's id.
    pub(crate) memory: u64,
    pub(crate) gpu: usize,
    pub(crate) bytes: u64,
}

/// What the clients of each cgroup's processes name.
#[derive(Debug, Default)]
pub(crate) struct CgroupPeaks {
    /// The cgroup of each client's creator.
    cgroups: HashMap<u32, Arc<str>>,
    /// How many objects of a cgroup name a memory.
    names: HashMap<(Arc<str>, u64), u64>,
    /// Bytes of a GPU that a cgroup names.
    bytes: HashMap<(Arc<str>, usize), u64>,
    /// The most of these since they were asked for last.
    most: HashMap<(Arc<str>, usize), u64>,
}

impl CgroupPeaks {
    /// A client was made by a process of that cgroup.
    pub(crate) fn add_client(&mut self, client: u32, cgroup: &str) {
        self.cgroups.insert(client, Arc::from(cgroup));
    }

    /// A client is gone, and so are all its objects.
    pub(crate) fn remove_client(&mut self, client: u32) {
        self.cgroups.remove(&client);
    }

    /// An object of a client names memory.
    pub(crate) fn add_name(&mut self, client: u32, Named { memory, gpu, bytes }: Named) {
        let Some(cgroup) = self.cgroups.get(&client) else { return };
        let names = self.names.entry((Arc::clone(cgroup), memory)).or_default();
        *names += 1;
        let sum = self.bytes.entry((Arc::clone(cgroup), gpu)).or_default();
        if *names == 1 {
            *sum += bytes;
        }
        let most = self.most.entry((Arc::clone(cgroup), gpu)).or_default();
        *most = (*most).max(*sum);
    }

    /// An object of a client names memory no more.
    pub(crate) fn remove_name(&mut self, client: u32, Named { memory, gpu, bytes }: Named) {
        let Some(cgroup) = self.cgroups.get(&client) else { return };
        let Entry::Occupied(mut names) = self.names.entry((Arc::clone(cgroup), memory)) else {
            return;
        };
        *names.get_mut() -= 1;
        if *names.get() > 0 {
            return;
        }
        names.remove();
        if let Entry::Occupied(mut sum) = self.bytes.entry((Arc::clone(cgroup), gpu)) {
            *sum.get_mut() -= bytes;
            if *sum.get() == 0 {
                sum.remove();
            }
        }
    }

    /// The most bytes of each GPU that clients of a cgroup's processes named at once, since this
    /// was asked last; of those that named more memory since then.
    pub(crate) fn take(&mut self) -> HashMap<(String, usize), u64> {
        let most = std::mem::take(&mut self.most);
        most.into_iter().map(|((cgroup, gpu), most)| ((cgroup.to_string(), gpu), most)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Named = Named { memory: 1, gpu: 0, bytes: 100 };
    const B: Named = Named { memory: 2, gpu: 0, bytes: 10 };

    fn most(peaks: &mut CgroupPeaks) -> Vec<(String, u64)> {
        let mut most: Vec<_> = peaks.take().into_iter().map(|((of, _), most)| (of, most)).collect();
        most.sort_unstable();
        most
    }

    /// Memory counts once for all clients of a cgroup, until its last handle ends.
    #[test]
    fn cgroup_memory_counts_once_until_last_handle_ends() {
        let mut peaks = CgroupPeaks::default();
        peaks.add_client(1, "x");
        peaks.add_client(2, "x");
        peaks.add_client(3, "y");
        peaks.add_name(1, A);
        peaks.add_name(2, A);
        peaks.add_name(3, A);
        assert_eq!(most(&mut peaks), [("x".to_owned(), 100), ("y".to_owned(), 100)]);
        peaks.remove_name(1, A);
        peaks.add_name(1, B);
        assert_eq!(most(&mut peaks), [("x".to_owned(), 110)]);
        peaks.remove_name(2, A);
        peaks.remove_name(1, B);
        peaks.remove_client(2);
        peaks.add_name(1, B);
        assert_eq!(most(&mut peaks), [("x".to_owned(), 10)]);
        assert_eq!(most(&mut peaks), []);
    }
}
