//! Pins: the monitor's own duplicates of memory that no driver usage would show otherwise.
//!
//! The driver counts memory once: in the usage of the process that owns the oldest object that names it. When that
//! object is freed, the next object owns the memory; a duplicate comes right behind the object that it was made of
//! (`dupListItem`, `mem.c` of 515.43.04 and 595.45.04). The object of an export or a mapping is the kernel's. If such
//! an object is the oldest, no process's driver usage has the memory, and the container could take as much again
//! unseen. (An object below another GPU's device is in that GPU's driver usage.) So the monitor first makes a duplicate
//! of its own, the *pin*: from then on the memory is in the monitor's driver usage. A pin is freed when the exports and
//! mappings behind it have ended, and counts against the quota until then.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use super::{Attribution, ChargeId, Client, Handle, Hold, Ledger};

/// What a pin stands before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PinPlace {
    /// All mappings of the charge's memory.
    Mappings {
        /// The memory's charge ([`Ledger::charge_of`]).
        charge: ChargeId,
    },
    /// The memory that was exported to a place in a file.
    Export {
        /// The place in the file.
        hold: Hold,
    },
    /// A handle of memory that is counted on another GPU than the one that has the memory.
    Name {
        /// The object's client.
        client: Client,
        /// The object.
        handle: Handle,
    },
    /// Nothing any more: the pin is to be freed.
    Loose {
        /// The charge of the pin's memory ([`Ledger::charge_of`]).
        charge: ChargeId,
    },
}

/// A pin's place among those of one charge. A handle is known by its object's serial.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ChargePlace {
    Mappings,
    Export(Hold),
    Name(u32),
}

#[derive(Debug, Default)]
pub(super) struct Pins {
    /// The numbers of the pins that stand before something. Each other pin is in `loose`.
    all: BTreeMap<(ChargeId, ChargePlace), u64>,
    /// The pins that stand before nothing any more and are to be freed, by their number.
    loose: BTreeMap<u64, ChargeId>,
}

impl Pins {
    pub(super) fn len(&self) -> usize {
        self.all.len() + self.loose.len()
    }

    /// Whether a pin stands at this place.
    pub(super) fn contains(&self, id: ChargeId, before: ChargePlace) -> bool {
        self.all.contains_key(&(id, before))
    }
}

impl Ledger {
    /// Whether a pin can be put at this place: what it is to stand before exists, no pin stands there, and [`Bounds`](super::Bounds)
    /// allows one more.
    #[must_use]
    pub fn may_pin(&self, before: PinPlace) -> bool {
        let is_free = |place| !self.pins.all.contains_key(&place);
        self.pins.len() < self.bounds.pins && self.charge_place(before).is_some_and(is_free)
    }

    /// Puts the pin `number` at this place; the monitor chooses the number. A pin that stood there is forgotten. Does
    /// nothing if there is nothing to stand before.
    pub fn pin(&mut self, before: PinPlace, number: u64) {
        let id = match before {
            PinPlace::Loose { charge } => {
                if !self.charges.contains_key(&charge) || self.pins.loose.contains_key(&number) {
                    return;
                }
                self.pins.loose.insert(number, charge);
                charge
            }
            _ => {
                let Some(place) = self.charge_place(before) else { return };
                if self.pins.all.insert(place, number).is_some() {
                    return;
                }
                place.0
            }
        };
        self.reference(id, false);
        if let Some(charge) = self.charges.get_mut(&id) {
            charge.pins += 1;
        }
    }

    fn charge_place(&self, before: PinPlace) -> Option<(ChargeId, ChargePlace)> {
        match before {
            PinPlace::Mappings { charge } => {
                self.is_held(charge).then_some((charge, ChargePlace::Mappings))
            }
            PinPlace::Export { hold } => {
                self.holds.get(&hold).map(|id| (*id, ChargePlace::Export(hold)))
            }
            PinPlace::Name { client, handle } => {
                let shown = self.objects.shown(client, handle);
                let id =
                    self.objects.charge(client, handle).filter(|_| shown != Attribution::Here)?;
                Some((id, ChargePlace::Name(self.objects.serial(client, handle)?)))
            }
            PinPlace::Loose { .. } => None,
        }
    }

    /// Whether anything but handles and pins keeps the memory alive. Without this check, a pin before mappings would
    /// never become loose.
    pub(super) fn is_held(&self, id: ChargeId) -> bool {
        self.charges.get(&id).is_some_and(|charge| charge.references - charge.names > charge.pins)
    }

    /// All pins: what each stands before, the GPU that has its memory, and its number.
    pub fn pins(&self) -> impl Iterator<Item = (PinPlace, usize, u64)> {
        let gpu = |id: &ChargeId| self.charges.get(id).map_or(0, |charge| charge.gpu);
        let standing = self.pins.all.iter().filter_map(move |((id, place), number)| {
            let before = match *place {
                ChargePlace::Mappings => PinPlace::Mappings { charge: *id },
                ChargePlace::Export(hold) => PinPlace::Export { hold },
                ChargePlace::Name(_) => return None,
            };
            Some((before, gpu(id), *number))
        });
        let names = self.objects.names().filter(|_| self.has_names_elsewhere());
        let named = names.filter_map(move |(id, (client, handle, serial))| {
            let number = self.pins.all.get(&(id, ChargePlace::Name(serial)))?;
            Some((PinPlace::Name { client, handle }, gpu(&id), *number))
        });
        let loose = self
            .pins
            .loose
            .iter()
            .map(move |(number, id)| (PinPlace::Loose { charge: *id }, gpu(id), *number));
        standing.chain(named).chain(loose)
    }

    /// Makes the pin at this place loose, if one stands there: what it stood before has ended.
    pub(super) fn loosen_pin(&mut self, id: ChargeId, before: ChargePlace) {
        if let Some(number) = self.pins.all.remove(&(id, before)) {
            self.pins.loose.insert(number, id);
        }
    }

    /// The number of the pin at this place; `None` if no pin stands there.
    #[must_use]
    pub fn pin_at(&self, before: PinPlace) -> Option<u64> {
        self.charge_place(before).and_then(|place| self.pins.all.get(&place)).copied()
    }

    /// The pins that stand before nothing any more. They are to be freed, and then removed by
    /// [`unpin`](Self::unpin).
    #[must_use]
    pub fn loose_pins(&self) -> Vec<u64> {
        self.pins.loose.keys().copied().collect()
    }

    /// Whether there are any pins.
    #[must_use]
    pub fn has_pins(&self) -> bool {
        self.pins.len() > 0
    }

    /// Removes a loose pin: it was freed.
    pub fn unpin(&mut self, number: u64) {
        if let Some(id) = self.pins.loose.remove(&number) {
            self.dereference_pin(id);
        }
    }

    fn dereference_pin(&mut self, id: ChargeId) {
        if let Some(charge) = self.charges.get_mut(&id) {
            charge.pins = charge.pins.saturating_sub(1);
        }
        self.dereference(id, false);
    }
}
