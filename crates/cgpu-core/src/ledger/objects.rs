//! The objects of all clients as trees: which object is below which, and which charge each object names; and which of
//! the handles the driver attributes to a process.
//!
//! A process's driver usage on a GPU counts each object of the process below that GPU's device that is memory of the
//! class that programs have, made or duplicated (`_gpuCollectMemInfo`, `gpu_rmapi.c`). So memory with three handles is
//! counted three times, and at most once of these as made. If an export or a mapping is the oldest object that is left,
//! all three are counted as duplicates.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use super::pins::ChargePlace;
use super::{ChargeId, Client, Handle, Hold, Ledger};

#[derive(Debug, Default)]
pub(super) struct Objects {
    all: BTreeMap<(Client, Handle), Entered>,
    /// The serial of the last object. A serial repeats after four thousand million other objects.
    serial: u32,
    /// Client, parent and child.
    children: BTreeSet<(Client, Handle, Handle)>,
    /// How many objects show on another GPU than the one that has their memory.
    elsewhere: usize,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Object {
    pub(super) parent: Handle,
    pub(super) charge: Option<ChargeId>,
    /// To whose driver usage the object is attributed.
    pub(super) shown: Attribution,
}

/// An object, and its serial among all objects that were entered.
#[derive(Debug, Clone, Copy)]
struct Entered {
    object: Object,
    serial: u32,
}

/// The charge that a removed object named, and the object's serial.
#[derive(Debug, Clone, Copy)]
pub(super) struct RemovedName {
    pub(super) id: ChargeId,
    pub(super) serial: u32,
}

const LOWEST: Handle = Handle(0);
const HIGHEST: Handle = Handle(u32::MAX);

impl Objects {
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn contains(&self, client: Client, handle: Handle) -> bool {
        self.all.contains_key(&(client, handle))
    }

    pub(super) fn charge(&self, client: Client, handle: Handle) -> Option<ChargeId> {
        self.all.get(&(client, handle)).and_then(|entered| entered.object.charge)
    }

    pub(super) fn shown(&self, client: Client, handle: Handle) -> Attribution {
        self.all.get(&(client, handle)).map_or(Attribution::Here, |entered| entered.object.shown)
    }

    pub(super) fn serial(&self, client: Client, handle: Handle) -> Option<u32> {
        self.all.get(&(client, handle)).map(|entered| entered.serial)
    }

    pub(super) fn has_elsewhere(&self) -> bool {
        self.elsewhere > 0
    }

    /// Client, handle and object of all entries.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Client, Handle, &Object)> {
        self.all.iter().map(|((client, handle), entered)| (*client, *handle, &entered.object))
    }

    /// The objects that name memory: the charge, and the object's client, handle and serial.
    pub(super) fn names(&self) -> impl Iterator<Item = (ChargeId, (Client, Handle, u32))> {
        let named = |entered: &Entered| Some((entered.object.charge?, entered.serial));
        self.all.iter().filter_map(move |((client, handle), entered)| {
            named(entered).map(|(charge, serial)| (charge, (*client, *handle, serial)))
        })
    }

    /// Enters an object. Its handle must be free.
    pub(super) fn insert(&mut self, client: Client, handle: Handle, object: Object) {
        self.serial = self.serial.wrapping_add(1);
        self.all.insert((client, handle), Entered { object, serial: self.serial });
        self.children.insert((client, object.parent, handle));
        self.elsewhere += usize::from(object.shown != Attribution::Here);
    }

    /// Removes an object and all objects below it. Returns what these objects named.
    pub(super) fn remove_tree(&mut self, client: Client, handle: Handle) -> Vec<RemovedName> {
        let mut names = Vec::new();
        let mut left = vec![handle];
        // Each object is removed before its children are looked up, so even a cycle ends. The driver never makes a
        // cycle.
        while let Some(handle) = left.pop() {
            // The object may never have been entered, while objects below it were.
            if let Some(Entered { object, serial }) = self.all.remove(&(client, handle)) {
                self.children.remove(&(client, object.parent, handle));
                self.elsewhere -= usize::from(object.shown != Attribution::Here);
                names.extend(object.charge.map(|id| RemovedName { id, serial }));
            }
            let below = self.children.range((client, handle, LOWEST)..=(client, handle, HIGHEST));
            left.extend(below.map(|(_, _, child)| *child));
        }
        names
    }

    /// Removes all objects of a client. Returns what these objects named.
    pub(super) fn remove_client(&mut self, client: Client) -> Vec<RemovedName> {
        let range = (client, LOWEST)..=(client, HIGHEST);
        let handles: Vec<Handle> = self.all.range(range).map(|((_, handle), _)| *handle).collect();
        handles.into_iter().flat_map(|handle| self.remove_tree(client, handle)).collect()
    }
}

/// On which GPU the driver shows an object that names memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Attribution {
    /// The GPU that has the memory.
    #[default]
    Here,
    /// Another of the container's GPUs: the object is below its device.
    On(u16),
}

impl Ledger {
    /// The bytes of other GPUs' memory that a GPU's driver usage may show as made: memory that has a handle below this
    /// GPU's device without a pin before that handle.
    pub(super) fn foreign_bytes(&self, gpu: usize) -> u64 {
        if !self.has_names_elsewhere() {
            return 0;
        }
        let names = self.objects.names().filter_map(|(id, (client, handle, serial))| {
            let is_there = match self.objects.shown(client, handle) {
                Attribution::On(other) => usize::from(other) == gpu,
                Attribution::Here => false,
            };
            (is_there && !self.pins.contains(id, ChargePlace::Name(serial))).then_some(id)
        });
        let names: BTreeSet<ChargeId> = names.collect();
        let bytes = names.iter().filter_map(|id| Some(self.charges.get(id)?.bytes));
        bytes.fold(0, u64::saturating_add)
    }

    /// The handles that a GPU's driver usage shows: the client, and the bytes of the memory.
    pub(super) fn shown_on(&self, gpu: usize) -> impl Iterator<Item = (Client, u64)> {
        self.objects.iter().filter_map(move |(client, _, object)| {
            let charge = self.charges.get(&object.charge?)?;
            let shown = match object.shown {
                Attribution::Here => charge.gpu,
                Attribution::On(other) => usize::from(other),
            };
            (shown == gpu).then_some((client, charge.bytes))
        })
    }

    /// On which GPU the driver shows an object; [`Attribution::Here`] where the object isn't known.
    #[must_use]
    pub fn shown(&self, client: Client, handle: Handle) -> Attribution {
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

    /// The GPU that has the memory that `hold` keeps alive, and the bytes that count there.
    #[must_use]
    pub fn memory_held_by(&self, hold: Hold) -> Option<(usize, u64)> {
        self.memory(*self.holds.get(&hold)?)
    }

    fn memory(&self, id: ChargeId) -> Option<(usize, u64)> {
        self.charges.get(&id).map(|charge| (charge.gpu, charge.bytes))
    }
}
