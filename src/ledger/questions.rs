//! What others ask of a ledger. Nothing changes by it.

use std::collections::{BTreeMap, BTreeSet};

use super::{ChargeId, Client, Handle, Hold, Ledger, Object, Process, Span, Tree};

impl Ledger {
    /// The processes that were seen to hold any client.
    pub fn holders(&self) -> impl Iterator<Item = (Client, Process)> {
        let all = self.holders.iter();
        all.flat_map(|(client, holders)| holders.iter().map(|holder| (*client, *holder)))
    }

    /// Whether `process` was seen to hold `client`.
    #[must_use]
    pub fn holds_client(&self, client: Client, process: Process) -> bool {
        self.holders.get(&client).is_some_and(|holders| holders.contains(&process))
    }

    /// How many clients were seen.
    #[must_use]
    pub fn client_count(&self) -> usize {
        self.holders.len()
    }

    /// How often a process was seen to use a client.
    #[must_use]
    pub fn holder_count(&self) -> usize {
        self.holders.values().map(Vec::len).sum()
    }

    /// Clients that nobody who lives was seen to hold.
    #[must_use]
    pub fn orphans(&self) -> Vec<Client> {
        let orphans = self.holders.iter().filter(|(_, holders)| holders.is_empty());
        orphans.map(|(client, _)| *client).collect()
    }

    /// Clients that nobody who lives was seen to hold, and whose memory counts nowhere.
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

    /// Whether the object is remembered.
    #[must_use]
    pub fn contains(&self, client: Client, handle: Handle) -> bool {
        self.objects.contains(client, handle)
    }

    /// Which of all objects that were ever entered has that handle now: one that is made anew, of the
    /// same memory even, is another.
    #[must_use]
    pub fn serial_of(&self, client: Client, handle: Handle) -> Option<u32> {
        self.objects.serial(client, handle)
    }

    /// What the memory of an object is, so that it can be told from what has the same
    /// handle later; `None` of objects without memory.
    #[must_use]
    pub fn charge_of(&self, client: Client, handle: Handle) -> Option<ChargeId> {
        self.objects.charge(client, handle)
    }

    /// Bytes of an object's memory that count, on whatever GPU; `None` of what isn't known to
    /// be memory. Memory of the host counts 0.
    #[must_use]
    pub fn bytes_of(&self, client: Client, handle: Handle) -> Option<u64> {
        self.memory_of(client, handle).map(|(_, bytes)| bytes)
    }

    /// The mappings of a space from `base` on, `length` bytes or that one alone: where, and
    /// what they keep.
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

    /// The pieces of a file of UVM's: which GPU maps, where, and which memory.
    pub fn pieces(&self, file: u32) -> impl Iterator<Item = (Tree, Span, ChargeId)> {
        self.pieces.of_file(file)
    }

    /// Whether a piece lies within the span, or reaches into it.
    #[must_use]
    pub fn has_pieces_in(&self, tree: Tree, span: Span) -> bool {
        self.pieces.overlapping(tree, span).next().is_some()
    }

    /// The files of UVM's that have pieces.
    #[must_use]
    pub fn files(&self) -> BTreeSet<u32> {
        self.pieces.iter().map(|(tree, ..)| tree.file).collect()
    }

    /// Whether a piece of that memory begins there.
    #[must_use]
    pub fn is_mapped(&self, tree: Tree, first: u64, charge: ChargeId) -> bool {
        self.pieces.contains(tree, first, charge)
    }

    /// Bytes that show on a GPU by client. A duplicate counts for each.
    #[must_use]
    pub fn charged_by_client(&self, gpu: usize) -> BTreeMap<Client, u64> {
        let mut sums = BTreeMap::new();
        for (client, bytes) in self.shown_on(gpu) {
            let sum: &mut u64 = sums.entry(client).or_default();
            *sum = sum.saturating_add(bytes);
        }
        sums
    }

    /// The objects that name memory of a GPU, and which they are, as [`serial_of`](Self::serial_of)
    /// has it.
    #[must_use]
    pub fn names(&self, gpu: usize) -> Vec<(Client, Handle, u32)> {
        let of_gpu = |id: &ChargeId| self.charges.get(id).is_some_and(|charge| charge.gpu == gpu);
        let names = self.objects.names().filter(|(id, _)| of_gpu(id));
        names.map(|(_, name)| name).collect()
    }

    /// The same of all GPUs.
    #[must_use]
    pub fn names_of_all(&self) -> Vec<(Client, Handle, u32)> {
        self.objects.names().map(|(_, name)| name).collect()
    }
}
