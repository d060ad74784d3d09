//! Names of memory, and which of them the driver shows.
//!
//! A process's figure on a GPU has each of its objects in it that is memory of the class that
//! programs have, made or duplicated, below that GPU's device (`_gpuCollectMemInfo`,
//! `gpu_rmapi.c`). So memory with three names is shown three times, of which once as made at
//! most: where an export or a mapping is the oldest that is left, all three are duplicates.

use std::collections::BTreeSet;

use postcard::experimental::max_size::MaxSize;
use serde::{Deserialize, Serialize};

use super::stakes::ChargePlace;
use super::{ChargeId, Client, Handle, Hold, Ledger};

/// Which figure has an object in it that names memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, MaxSize)]
pub enum Shown {
    /// The one of the GPU that has the memory.
    #[default]
    Here,
    /// The one of another GPU of the container's, whose device it hangs below.
    On(u16),
}

impl Ledger {
    /// Bytes of other GPUs' memory that a GPU's figures may have as made there: what has a name there
    /// before which no stake stands.
    pub(super) fn foreign_bytes(&self, gpu: usize) -> u64 {
        if !self.has_names_elsewhere() {
            return 0;
        }
        let names = self.objects.names().filter_map(|(id, (client, handle, serial))| {
            let is_there = match self.objects.shown(client, handle) {
                Shown::On(other) => usize::from(other) == gpu,
                Shown::Here => false,
            };
            (is_there && !self.stakes.contains(id, ChargePlace::Name(serial))).then_some(id)
        });
        let names: BTreeSet<ChargeId> = names.collect();
        let bytes = names.iter().filter_map(|id| Some(self.charges.get(id)?.bytes));
        bytes.fold(0, u64::saturating_add)
    }

    /// The names that show on a GPU: their client, and what they name, in bytes.
    pub(super) fn shown_on(&self, gpu: usize) -> impl Iterator<Item = (Client, u64)> {
        self.objects.iter().filter_map(move |(client, _, object)| {
            let charge = self.charges.get(&object.charge?)?;
            let shown = match object.shown {
                Shown::Here => charge.gpu,
                Shown::On(other) => usize::from(other),
            };
            (shown == gpu).then_some((client, charge.bytes))
        })
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
