//! Names of memory (the objects that refer to it), and which of them the driver shows.
//!
//! A process's figure on a GPU counts each object of the process below that GPU's device that is memory of the class
//! that programs have, made or duplicated (`_gpuCollectMemInfo`, `gpu_rmapi.c`). So memory with three names is shown
//! three times, and at most once of these as made. Where an export or a mapping is the oldest object that is left, all
//! three are shown as duplicates.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::stakes::ChargePlace;
use super::{ChargeId, Client, Handle, Hold, Ledger};

/// On which GPU the driver shows an object that names memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Shown {
    /// The GPU that has the memory.
    #[default]
    Here,
    /// Another GPU of the container's: the object hangs below its device.
    On(u16),
}

impl Ledger {
    /// The bytes of other GPUs' memory that a GPU's figures may show as made: memory that has a name below this GPU's
    /// device without a stake before that name.
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

    /// The names that a GPU's figures show: the client, and the bytes of the memory.
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

    /// On which GPU the driver shows an object; [`Shown::Here`] where the object isn't known.
    #[must_use]
    pub fn shown(&self, client: Client, handle: Handle) -> Shown {
        self.objects.shown(client, handle)
    }

    /// Whether the driver shows any object on another GPU than the one that has the memory.
    #[must_use]
    pub fn has_names_elsewhere(&self) -> bool {
        self.objects.has_elsewhere()
    }

    /// The GPU that has an object's memory, and the bytes that count there.
    #[must_use]
    pub fn memory_of(&self, client: Client, handle: Handle) -> Option<(usize, u64)> {
        self.memory(self.objects.charge(client, handle)?)
    }

    /// The GPU that has the memory that `hold` keeps, and the bytes that count there.
    #[must_use]
    pub fn memory_held_by(&self, hold: Hold) -> Option<(usize, u64)> {
        self.memory(*self.holds.get(&hold)?)
    }

    fn memory(&self, id: ChargeId) -> Option<(usize, u64)> {
        self.charges.get(&id).map(|charge| (charge.gpu, charge.bytes))
    }
}
