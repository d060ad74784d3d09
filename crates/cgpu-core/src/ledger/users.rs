//! How much of a GPU's memory each process has, for people; and what becomes of the holders when a process ends.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec;
use alloc::vec::Vec;
use core::hash::{Hash, Hasher};

use siphasher::sip::SipHasher13;

use super::{Account, ChargeId, Ledger, Process, Usage};

impl Ledger {
    /// Removes a process from all clients' holders: it has ended. The memory of its clients stays charged: a process
    /// that was never seen may hold them.
    pub fn remove_process(&mut self, process: Process) {
        for holders in self.holders.values_mut() {
            let before = holders.len();
            holders.retain(|holder| *holder != process);
            self.holders_changes += u64::from(holders.len() < before);
        }
    }

    /// The bytes that each process holds on each GPU, in the container's order of GPUs. A process that holds a client
    /// without memory has zeros.
    ///
    /// Memory that several clients name counts once, for the client with the lowest number. A client that several
    /// processes hold counts for the process that was seen with it first. What the driver takes unasked (contexts), and
    /// what only mappings and exports keep, belongs to no process: the sum is then less than [`usage`](Self::usage).
    #[must_use]
    pub fn used_by_process(&self) -> BTreeMap<Process, Vec<u64>> {
        let first = |holders: &Vec<Process>| holders.first().copied();
        let nothing = || vec![0; self.accounts.len()];
        let mut used: BTreeMap<Process, Vec<u64>> =
            self.holders.values().filter_map(first).map(|process| (process, nothing())).collect();
        let mut counted: BTreeSet<ChargeId> = BTreeSet::new();
        for (id, (client, ..)) in self.objects.names() {
            let Some(charge) = self.charges.get(&id) else { continue };
            let Some(process) = self.holders.get(&client).and_then(first) else { continue };
            if counted.insert(id)
                && let Some(bytes) = used.entry(process).or_insert_with(nothing).get_mut(charge.gpu)
            {
                *bytes += charge.bytes;
            }
        }
        used
    }

    /// A hash of quotas, uses, counts and the changes of holders, so that a reader sees cheaply whether the answers of
    /// [`usage`](Self::usage) or [`used_by_process`](Self::used_by_process) changed. It does not show that one process
    /// freed as many objects and bytes as another has taken since. Other states have the same hash in one of 2⁶⁴ cases.
    #[must_use]
    pub fn mark(&self) -> u64 {
        let mut mark = SipHasher13::new();
        for Usage { limit_bytes, used_bytes } in self.accounts.iter().map(Account::usage) {
            (limit_bytes, used_bytes).hash(&mut mark);
        }
        let counts = [self.objects.len(), self.charges.len(), self.holds.len(), self.ranges.len()];
        (counts, self.holders_changes).hash(&mut mark);
        mark.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Attribution, Bounds, Client, Entry, Handle};
    use super::*;

    const BOUNDS: Bounds = Bounds { objects: 64, holds: 64, pins: 64 };

    fn allocate(ledger: &mut Ledger, gpu: usize, client: u32, handle: u32, bytes: u64) {
        let reservation = ledger.reserve(gpu, bytes).unwrap();
        let parent = Handle(client);
        ledger.cancel(reservation);
        let (client, handle) = (Client(client), Handle(handle));
        ledger.replay(Entry::Commit { gpu, bytes, client, parent, handle });
    }

    /// Memory is attributed to its client's first process, and counts once.
    #[test]
    fn memory_is_attributed_to_the_clients_first_process() {
        let mut ledger = Ledger::new(&[1000, 1000], BOUNDS);
        let (one, other) = (Process(11), Process(12));
        ledger.add_holder(Client(1), one);
        ledger.add_holder(Client(1), other);
        ledger.add_holder(Client(2), other);
        allocate(&mut ledger, 0, 1, 101, 300);
        allocate(&mut ledger, 0, 2, 102, 40);
        allocate(&mut ledger, 1, 2, 103, 5);
        let source = (Client(1), Handle(101));
        ledger.duplicate(source, Client(2), Handle(2), Handle(104), Attribution::Here);
        let both = [(one, vec![300, 0]), (other, vec![40, 5])];
        assert_eq!(ledger.used_by_process(), both.into());
        // The second process now has what the first had.
        ledger.remove_process(one);
        assert_eq!(ledger.used_by_process(), [(other, vec![340, 5])].into());
        ledger.remove_process(other);
        assert_eq!(ledger.used_by_process(), BTreeMap::new());
    }

    /// Memory of a client that no process was observed with is attributed to no process.
    #[test]
    fn memory_of_unobserved_client_has_no_process() {
        let mut ledger = Ledger::new(&[1000], BOUNDS);
        allocate(&mut ledger, 0, 1, 101, 300);
        assert_eq!(ledger.used_by_process(), BTreeMap::new());
        assert_eq!(ledger.usage(0).unwrap().used_bytes, 300);
    }

    #[test]
    fn usage_mark_changes_with_what_readers_see() {
        let mut ledger = Ledger::new(&[1000, 1000], BOUNDS);
        let (one, other) = (Process(11), Process(12));
        let mut marks = BTreeSet::from([ledger.mark()]);
        let mut is_new = |ledger: &Ledger, what: &str| {
            assert!(marks.insert(ledger.mark()), "{what}");
            assert_eq!(ledger.mark(), ledger.mark());
        };
        ledger.add_holder(Client(1), one);
        is_new(&ledger, "a client");
        let before = ledger.mark();
        ledger.add_holder(Client(1), one);
        assert_eq!(ledger.mark(), before, "the same once more");
        ledger.add_holder(Client(1), other);
        is_new(&ledger, "its second holder");
        allocate(&mut ledger, 0, 1, 101, 300);
        is_new(&ledger, "memory");
        let source = (Client(1), Handle(101));
        ledger.duplicate(source, Client(2), Handle(2), Handle(104), Attribution::Here);
        is_new(&ledger, "another name");
        ledger.replay(Entry::Limit { gpu: 1, limit_bytes: 500 });
        is_new(&ledger, "a quota");
        ledger.reconcile(0, 300);
        let asked = ledger.mark();
        ledger.reconcile(0, 300);
        assert_eq!(ledger.mark(), asked, "the driver said the same again");
        ledger.reconcile(0, 340);
        is_new(&ledger, "memory that the driver reported");
        ledger.remove_process(one);
        is_new(&ledger, "one holder less");
        ledger.remove_process(other);
        is_new(&ledger, "no holder left");
    }
}
