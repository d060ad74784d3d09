//! Stakes: duplicates of the monitor's own, in front of what no figure shows.
//!
//! Memory has one owner among the objects that name it, in whose process's figure it counts as
//! made. When that is freed, the next one has it: a duplicate is put right behind what it's of
//! (`dupListItem`, `mem.c` of 515.43.04 and 595.45.04). That of an export or of a mapping is the
//! kernel's, and in no figure: memory that it owns would leave room, in all sums of what was made,
//! for as much that nobody asked for. And one that hangs below another GPU's device is in that one's
//! figures. So before each of them stands one of the monitor's, in whose figure the memory is from
//! then on. It goes when they have, and counts until then.
//!
//! No journal has them: they end with the worker.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry::{Occupied, Vacant};

use super::veils::Stake;
use super::{ChargeId, Client, Handle, Hold, Ledger, Shown};

/// What a stake stands before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Before {
    /// All mappings of its memory.
    Mappings,
    /// A place in a file that it was exported to.
    Export(Hold),
    /// A name of it that shows elsewhere: which of all objects that is.
    Name(u32),
    /// The same of one that shows nowhere, and the driver's own duplicate for it, which others may
    /// keep when it's gone: those made of it.
    First(u32),
}

#[derive(Debug, Default)]
pub(super) struct Stakes {
    /// By memory.
    all: BTreeMap<(ChargeId, Before), u64>,
    /// Before nothing any more; and whether somebody is about to free it.
    loose: BTreeMap<u64, (ChargeId, bool)>,
    /// How many references on memory are stakes'.
    counts: BTreeMap<ChargeId, u32>,
}

impl Stakes {
    /// How many references on memory are stakes'.
    pub(super) fn count(&self, id: ChargeId) -> u32 {
        self.counts.get(&id).copied().unwrap_or(0)
    }

    /// Whether there is one.
    pub(super) fn stands(&self, id: ChargeId, before: Before) -> bool {
        self.all.contains_key(&(id, before))
    }

    /// What that one stood before is no more: whether there was one.
    fn lost(&mut self, id: ChargeId, before: Before) -> bool {
        let own = if self.all.is_empty() { None } else { self.all.remove(&(id, before)) };
        self.loosen(id, own)
    }

    fn loosen(&mut self, id: ChargeId, own: impl IntoIterator<Item = u64>) -> bool {
        let before = self.loose.len();
        self.loose.extend(own.into_iter().map(|own| (own, (id, false))));
        self.loose.len() > before
    }
}

impl Ledger {
    /// `own`, by whatever the monitor knows it, stands before an export or the mappings of memory.
    /// Whether there wasn't one: else, or where what it's to stand before is gone, it's of no use.
    #[must_use]
    pub fn stake(&mut self, charge: u64, before: Before, own: u64) -> bool {
        let id = ChargeId::new(charge);
        let is_there = match before {
            Before::Mappings => self.charges.contains_key(&id),
            Before::Export(hold) => self.holds.get(&hold) == Some(&id),
            Before::Name(_) | Before::First(_) => false,
        };
        is_there && self.put_before(id, before, own)
    }

    /// The same before an object that shows elsewhere than its memory is; `is_first` where it isn't
    /// made of such a one.
    #[must_use]
    pub fn stake_name(&mut self, client: Client, handle: Handle, own: u64, is_first: bool) -> bool {
        let shown = self.objects.shown(client, handle);
        let charge = self.objects.charge(client, handle).filter(|_| shown != Shown::Here);
        let named = charge.zip(self.objects.serial(client, handle));
        named.is_some_and(|(id, serial)| {
            let is_first = is_first && shown == Shown::Nowhere;
            let before = if is_first { Before::First(serial) } else { Before::Name(serial) };
            self.put_before(id, before, own)
        })
    }

    /// What a stake may have stood before is no more.
    pub(super) fn lost(&mut self, id: ChargeId, before: Before) {
        self.stakes.lost(id, before);
        self.veils.lost(id, before);
        self.lift(id);
    }

    /// The same of an object that named memory.
    pub(super) fn lost_name(&mut self, id: ChargeId, serial: u32, shown: Shown) {
        let is_loose = self.stakes.lost(id, Before::Name(serial));
        if shown != Shown::Nowhere {
            return;
        }
        let stake = match self.stakes.all.remove(&(id, Before::First(serial))) {
            Some(own) => Stake::Kept(own),
            None if is_loose => Stake::Loose,
            None => Stake::None,
        };
        self.veils.unnamed(id, stake);
        self.lift(id);
    }

    fn lift(&mut self, id: ChargeId) {
        let kept = self.veils.lift(id);
        self.stakes.loosen(id, kept);
    }

    fn put_before(&mut self, id: ChargeId, before: Before, own: u64) -> bool {
        match self.stakes.all.entry((id, before)) {
            Occupied(_) => false,
            Vacant(place) => {
                place.insert(own);
                *self.stakes.counts.entry(id).or_default() += 1;
                self.reference(id, false);
                true
            }
        }
    }

    /// The one that stands there.
    #[must_use]
    pub fn stake_of(&self, charge: u64, before: Before) -> Option<u64> {
        self.stakes.all.get(&(ChargeId::new(charge), before)).copied()
    }

    /// Those that stand before nothing any more. Whoever is told of one frees it, and says so:
    /// [`unstake`](Self::unstake).
    #[must_use]
    pub fn loose_stakes(&mut self) -> Vec<u64> {
        let loose = self.stakes.loose.iter_mut().filter(|(_, (_, taken))| !*taken);
        let take = |(own, (_, taken)): (&u64, &mut (ChargeId, bool))| {
            *taken = true;
            *own
        };
        loose.map(take).collect()
    }

    /// Whether any of those is nobody's yet.
    #[must_use]
    pub fn has_loose_stakes(&self) -> bool {
        self.stakes.loose.values().any(|(_, taken)| !taken)
    }

    /// Whether somebody is about to free any of those.
    #[must_use]
    pub fn is_freeing_stakes(&self) -> bool {
        self.stakes.loose.values().any(|(_, taken)| *taken)
    }

    /// One of them couldn't be freed: whoever asks next is told of it again.
    pub fn still_loose(&mut self, own: u64) {
        if let Some((_, taken)) = self.stakes.loose.get_mut(&own) {
            *taken = false;
        }
    }

    /// Whether anything keeps memory of a GPU before which there should be one, and isn't: a worker
    /// before had put it there, or it couldn't be.
    #[must_use]
    pub fn lacks_stakes(&self) -> bool {
        let weighs = |id: &ChargeId| self.charges.get(id).is_some_and(|charge| charge.bytes > 0);
        let lacks = |id: ChargeId, before| weighs(&id) && !self.stakes.stands(id, before);
        let is_export = |hold: &Hold| matches!(hold, Hold::Export { .. });
        let mut exports = self.holds.iter().filter(|(hold, _)| is_export(hold));
        exports.any(|(hold, id)| lacks(*id, Before::Export(*hold)))
            || self.pieces.iter().any(|(.., id)| lacks(id, Before::Mappings))
            || self.has_names_elsewhere()
                && self.objects.names().any(|(id, (client, handle, serial))| {
                    let is_elsewhere = self.objects.shown(client, handle) != Shown::Here;
                    is_elsewhere
                        && lacks(id, Before::Name(serial))
                        && lacks(id, Before::First(serial))
                })
            || self.veils.open().any(|id| weighs(&id))
    }

    /// Whether there are any.
    #[must_use]
    pub fn has_stakes(&self) -> bool {
        !self.stakes.counts.is_empty()
    }

    /// One of them is freed.
    pub fn unstake(&mut self, own: u64) {
        let Some((id, _)) = self.stakes.loose.remove(&own) else { return };
        if let Occupied(mut count) = self.stakes.counts.entry(id) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        self.dereference(id, false);
    }
}
