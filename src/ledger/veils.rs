//! Veils: what keeps memory by an object that shows nowhere.
//!
//! An object of the fabric's (`NV_MEMORY_FABRIC`) has the driver duplicate the memory for itself,
//! right behind what it's made of, and keep that until the last name of the *object* is gone: its
//! duplicates, exports and mappings (`memoryfabricConstruct_IMPL`, `mem_fabric.c` of 515.43.04 and
//! 595.45.04). So the stake before it stays until then, and not only as long as its first name.
//! Which of them a mapping is of isn't known: all such stakes of a memory go together.

use std::collections::{BTreeMap, BTreeSet};

use super::stakes::Spot;
use super::{Before, ChargeId, Client, Handle, Hold, Ledger};

/// Memories that such objects may be made of. A program that shares memory over the fabric has a few
/// hundred.
pub const MOST_VEILED: usize = 1024;

/// Of one memory.
#[derive(Debug, Default)]
struct Veil {
    /// Objects.
    names: u32,
    /// Exports of such.
    exports: BTreeSet<Hold>,
    /// One of those was mapped, and something of the memory is still.
    is_mapped: bool,
    /// Stakes whose names are gone.
    kept: Vec<u64>,
    /// One was freed before which there was none.
    is_open: bool,
}

impl Veil {
    fn is_lifted(&self) -> bool {
        self.names == 0 && self.exports.is_empty() && !self.is_mapped
    }
}

#[derive(Debug, Default)]
pub(super) struct Veils(BTreeMap<ChargeId, Veil>);

impl Veils {
    /// An object of it that shows nowhere is entered.
    pub(super) fn named(&mut self, id: ChargeId) {
        self.0.entry(id).or_default().names += 1;
    }

    /// One is gone, and with it `stake`, if it had one.
    pub(super) fn unnamed(&mut self, id: ChargeId, stake: Stake) {
        let Some(veil) = self.0.get_mut(&id) else { return };
        veil.names = veil.names.saturating_sub(1);
        match stake {
            Stake::None => veil.is_open = true,
            Stake::Kept(own) => veil.kept.push(own),
            Stake::Loose => {}
        }
    }

    /// What it keeps is gone.
    pub(super) fn lost(&mut self, id: ChargeId, before: Spot) {
        if let Some(veil) = self.0.get_mut(&id) {
            match before {
                Spot::Export(hold) => drop(veil.exports.remove(&hold)),
                Spot::Mappings => veil.is_mapped = false,
                Spot::Name(_) | Spot::First(_) => {}
            }
        }
    }

    /// A stake waits for it to be lifted: whether it's there.
    pub(super) fn keep(&mut self, id: ChargeId, own: u64) -> bool {
        self.0.get_mut(&id).map(|veil| veil.kept.push(own)).is_some()
    }

    /// The stakes that wait.
    pub(super) fn kept(&self) -> impl Iterator<Item = (ChargeId, u64)> {
        self.0.iter().flat_map(|(id, veil)| veil.kept.iter().map(|own| (*id, *own)))
    }

    /// Some of those that wait do no longer: each with its memory.
    pub(super) fn take(&mut self, is_one: impl Fn(&u64) -> bool) -> Vec<(ChargeId, u64)> {
        let of = |(id, veil): (&ChargeId, &mut Veil)| {
            let id = *id;
            let taken = veil.kept.extract_if(.., |own| is_one(own));
            taken.map(|own| (id, own)).collect::<Vec<_>>()
        };
        self.0.iter_mut().flat_map(of).collect()
    }

    /// The stakes that nothing needs any more.
    pub(super) fn lift(&mut self, id: ChargeId) -> Vec<u64> {
        match self.0.get(&id) {
            Some(veil) if veil.is_lifted() => {
                self.0.remove(&id).map(|veil| veil.kept).unwrap_or_default()
            }
            _ => Vec::new(),
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Memory that may be kept by what no stake stands before.
    pub(super) fn open(&self) -> impl Iterator<Item = ChargeId> {
        self.0.iter().filter(|(_, veil)| veil.is_open).map(|(id, _)| *id)
    }
}

/// What becomes of the stake before an object that is gone.
#[derive(Debug, Clone, Copy)]
pub(super) enum Stake {
    /// There was none.
    None,
    /// It stands before more.
    Kept(u64),
    /// It's of no use.
    Loose,
}

impl Ledger {
    /// An export, or a mapping, is of an object that shows nowhere.
    pub fn veil(&mut self, before: Before) {
        match before {
            Before::Export { hold } => {
                if let Some(id) = self.holds.get(&hold) {
                    self.veils.0.entry(*id).or_default().exports.insert(hold);
                }
            }
            Before::Mappings { charge } => {
                let id = ChargeId::new(charge);
                if self.is_held(id) {
                    self.veils.0.entry(id).or_default().is_mapped = true;
                }
            }
            // Something of it has none.
            Before::Veil { charge } => {
                if let Some(veil) = self.veils.0.get_mut(&ChargeId::new(charge)) {
                    veil.is_open = true;
                }
            }
            Before::Name { .. } | Before::First { .. } | Before::Nothing { .. } => {}
        }
    }

    /// What was told to [`veil`](Self::veil), and lasts.
    pub(super) fn veiled(&self) -> impl Iterator<Item = Before> {
        self.veils.0.iter().flat_map(|(id, veil)| {
            let charge = id.number();
            let exports = veil.exports.iter().map(|hold| Before::Export { hold: *hold });
            exports
                .chain(veil.is_mapped.then_some(Before::Mappings { charge }))
                .chain(veil.is_open.then_some(Before::Veil { charge }))
        })
    }

    /// Whether what a hold keeps was exported by an object that shows nowhere: so does what is
    /// imported of it.
    #[must_use]
    pub fn is_veiled(&self, hold: Hold) -> bool {
        let veil = self.holds.get(&hold).and_then(|id| self.veils.0.get(id));
        veil.is_some_and(|veil| veil.exports.contains(&hold))
    }

    /// Whether an object that shows nowhere may be made of that one. Its stake may wait for others
    /// when it's gone: whoever makes and frees one after the other, while another is there, is refused
    /// more.
    #[must_use]
    pub fn may_be_veiled(&self, client: Client, handle: Handle) -> bool {
        let is_veiled = |id| self.veils.0.contains_key(&id);
        let is_known = self.objects.charge(client, handle).is_some_and(is_veiled);
        self.stakes.len() < self.bounds.stakes && (is_known || self.veils.0.len() < MOST_VEILED)
    }
}
