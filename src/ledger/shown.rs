//! Names of memory, and which of them the driver shows.
//!
//! A process's figure on a GPU has each of its objects in it that is memory of the class that
//! programs have, made or duplicated, below that GPU's device (`_gpuCollectMemInfo`,
//! `gpu_rmapi.c`). So memory with three names is shown three times, of which once as made at
//! most: where an export or a mapping is the oldest that is left, all three are duplicates.

use super::{ChargeId, Client, Handle, Hold, Ledger};

/// Which figure has an object in it that names memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Shown {
    /// The one of the GPU that has the memory.
    #[default]
    Here,
    /// The one of another GPU of the container's, whose device it hangs below.
    On(u16),
    /// None.
    Nowhere,
}

impl Ledger {
    /// Bytes that the driver shows of a GPU at most, by all names: what has several counts for
    /// each. Memory that a call is about to name anew is among them.
    #[must_use]
    pub fn named_bytes(&self, gpu: usize) -> u64 {
        let objects = self.objects.iter().filter_map(|(_, _, object)| {
            let charge = self.charges.get(&object.charge?)?;
            let shown = match object.shown {
                Shown::Here => charge.gpu,
                Shown::On(other) => usize::from(other),
                Shown::Nowhere => return None,
            };
            (shown == gpu).then_some(charge.bytes)
        });
        let underway = self.holds.range(Hold::Underway(0)..=Hold::Underway(u64::MAX));
        let underway = underway.filter_map(|(_, id)| Some(self.charges.get(id)?.bytes));
        objects.chain(underway).fold(0, u64::saturating_add)
    }

    /// The objects that name memory which has other names, too, and what it is, as
    /// [`charge_of`](Self::charge_of) has it.
    #[must_use]
    pub fn names_of_several(&self) -> Vec<(Client, Handle, u64)> {
        let has_several = |id| self.charges.get(&id).is_some_and(|charge| charge.names > 1);
        let several = self.named().filter(|(.., id)| has_several(*id));
        several.map(|(client, handle, id)| (client, handle, id.0)).collect()
    }

    /// Where an object shows; what isn't known would where its memory is.
    #[must_use]
    pub fn shown(&self, client: Client, handle: Handle) -> Shown {
        self.objects.shown(client, handle)
    }

    /// Whether any object shows elsewhere than where its memory is.
    #[must_use]
    pub fn has_names_elsewhere(&self) -> bool {
        self.objects.has_elsewhere()
    }

    /// Which GPU has an object's memory, and how many bytes of it count there.
    #[must_use]
    pub fn memory_of(&self, client: Client, handle: Handle) -> Option<(usize, u64)> {
        self.memory(self.objects.charge(client, handle)?)
    }

    /// The same of what a hold keeps.
    #[must_use]
    pub fn memory_held_by(&self, hold: Hold) -> Option<(usize, u64)> {
        self.memory(*self.holds.get(&hold)?)
    }

    fn memory(&self, id: ChargeId) -> Option<(usize, u64)> {
        self.charges.get(&id).map(|charge| (charge.gpu, charge.bytes))
    }
}
