//! Questions to the ledger. None of them changes the ledger.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use super::{ChargeId, Client, Handle, Hold, Ledger, Object, Process, Span, Tree};

impl Ledger {
    /// Each client with each process that was seen to hold it.
    pub fn holders(&self) -> impl Iterator<Item = (Client, Process)> {
        let all = self.holders.iter();
        all.flat_map(|(client, holders)| holders.iter().map(|holder| (*client, *holder)))
    }

    /// Whether `process` was seen to hold `client`.
    #[must_use]
    pub fn holds_client(&self, client: Client, process: Process) -> bool {
        self.holders.get(&client).is_some_and(|holders| holders.contains(&process))
    }

    /// How many clients were seen with a process.
    #[must_use]
    pub fn client_count(&self) -> usize {
        self.holders.len()
    }

    /// How many pairs of a client and a process that holds it are known.
    #[must_use]
    pub fn holder_count(&self) -> usize {
        self.holders.values().map(Vec::len).sum()
    }

    /// Clients of which no living holder is known.
    #[must_use]
    pub fn orphans(&self) -> Vec<Client> {
        let orphans = self.holders.iter().filter(|(_, holders)| holders.is_empty());
        orphans.map(|(client, _)| *client).collect()
    }

    /// Clients of which no living holder is known, and whose memory has no charged bytes.
    #[must_use]
    pub fn uncharged_orphans(&self) -> Vec<Client> {
        let weighs = |(client, _, object): (Client, _, &Object)| {
            let charge = object.charge.and_then(|id| self.charges.get(&id));
            charge.is_some_and(|charge| charge.bytes > 0).then_some(client)
        };
        let mut orphans = self.orphans();
        if !orphans.is_empty() {
            let weigh: BTreeSet<Client> = self.objects.iter().filter_map(weighs).collect();
            orphans.retain(|orphan| !weigh.contains(orphan));
        }
        orphans
    }

    /// Whether the ledger has the object.
    #[must_use]
    pub fn contains(&self, client: Client, handle: Handle) -> bool {
        self.objects.contains(client, handle)
    }

    /// The serial of the object that has the handle now. A new object under the same handle has another serial, even if
    /// it names the same memory.
    #[must_use]
    pub fn serial_of(&self, client: Client, handle: Handle) -> Option<u32> {
        self.objects.serial(client, handle)
    }

    /// The charge of an object's memory, which distinguishes the memory from what has the same handle later; `None` for
    /// objects without memory.
    #[must_use]
    pub fn charge_of(&self, client: Client, handle: Handle) -> Option<ChargeId> {
        self.objects.charge(client, handle)
    }

    /// The bytes that an object's memory counts, on whichever GPU; `None` where the object isn't known to be memory.
    /// Memory of the host counts 0 bytes.
    #[must_use]
    pub fn bytes_of(&self, client: Client, handle: Handle) -> Option<u64> {
        self.memory_of(client, handle).map(|(_, bytes)| bytes)
    }

    /// The mappings of a space that begin within `length` bytes from `base` on (with length 0: at `base`), as address
    /// and charge.
    #[must_use]
    pub fn mappings(&self, space: u64, base: u64, length: u64) -> Vec<(u64, ChargeId)> {
        let first = Hold::Mapping { space, base };
        let end = base.saturating_add(length.saturating_sub(1));
        let last = Hold::Mapping { space, base: end };
        let found = self.holds.range(first..=last).filter_map(|(hold, id)| match hold {
            Hold::Mapping { base, .. } => Some((*base, *id)),
            Hold::Export { .. } => None,
        });
        found.collect()
    }

    /// The mapped ranges of a UVM file: the tree, the span and the charge of each.
    pub fn ranges(&self, file: u32) -> impl Iterator<Item = (Tree, Span, ChargeId)> {
        self.ranges.of_file(file)
    }

    /// Whether any mapped range overlaps the span.
    #[must_use]
    pub fn has_ranges_in(&self, tree: Tree, span: Span) -> bool {
        self.ranges.overlapping(tree, span).next().is_some()
    }

    /// The UVM files that have mapped ranges.
    #[must_use]
    pub fn files(&self) -> BTreeSet<u32> {
        self.ranges.iter().map(|(tree, ..)| tree.file).collect()
    }

    /// Whether a mapped range of the charge begins at `first`.
    #[must_use]
    pub fn is_mapped(&self, tree: Tree, first: u64, charge: ChargeId) -> bool {
        self.ranges.contains(tree, first, charge)
    }

    /// The bytes that show on a GPU, by client. A duplicate counts for each client that has one.
    #[must_use]
    pub fn charged_by_client(&self, gpu: usize) -> BTreeMap<Client, u64> {
        let mut sums = BTreeMap::new();
        for (client, bytes) in self.shown_on(gpu) {
            let sum: &mut u64 = sums.entry(client).or_default();
            *sum = sum.saturating_add(bytes);
        }
        sums
    }

    /// The objects that name memory of a GPU: client, handle and serial ([`serial_of`](Self::serial_of)).
    #[must_use]
    pub fn names(&self, gpu: usize) -> Vec<(Client, Handle, u32)> {
        let of_gpu = |id: &ChargeId| self.charges.get(id).is_some_and(|charge| charge.gpu == gpu);
        let names = self.objects.names().filter(|(id, _)| of_gpu(id));
        names.map(|(_, name)| name).collect()
    }

    /// The objects that name memory of any GPU: client, handle and serial.
    #[must_use]
    pub fn names_of_all(&self) -> Vec<(Client, Handle, u32)> {
        self.objects.names().map(|(_, name)| name).collect()
    }
}
