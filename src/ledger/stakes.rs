//! Stakes: duplicates of the monitor's own, in front of what no figure shows.
//!
//! Memory has one owner among the objects that name it, in whose process's figure it counts as
//! made. When that is freed, the next one has it: a duplicate is put right behind what it's of
//! (`dupListItem`, `mem.c` of 515.43.04 and 595.45.04). That of an export or of a mapping is the
//! kernel's, and in no figure: memory that it owns would leave room, in all sums of what was made,
//! for as much that nobody asked for. So before each of them stands one of the monitor's, in whose
//! figure the memory is from then on. It goes when they have, and counts until then.
//!
//! No journal has them: they end with the worker.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry::{Occupied, Vacant};

use super::{ChargeId, Hold, Ledger};

#[derive(Debug, Default)]
pub(super) struct Stakes {
    /// By memory, and the export that it stands before; those before mappings have one.
    all: BTreeMap<(ChargeId, Option<Hold>), u32>,
    /// Before nothing any more, by handle; and whether somebody is about to free it.
    loose: BTreeMap<u32, (ChargeId, bool)>,
    /// How many references on memory are stakes'.
    counts: BTreeMap<ChargeId, u32>,
}

impl Stakes {
    /// How many references on memory are stakes'.
    pub(super) fn count(&self, id: ChargeId) -> u32 {
        self.counts.get(&id).copied().unwrap_or(0)
    }

    fn take(&mut self, id: ChargeId, before: Option<Hold>) {
        if let Some(own) = self.all.remove(&(id, before)) {
            self.loose.insert(own, (id, false));
        }
    }

    /// That export is no more.
    pub(super) fn lost(&mut self, id: ChargeId, hold: Hold) {
        if !self.all.is_empty() {
            self.take(id, Some(hold));
        }
    }

    /// Neither is any, nor a mapping.
    pub(super) fn lost_all(&mut self, id: ChargeId) {
        let held = self.all.range((id, None)..).take_while(|((of, _), _)| *of == id);
        let held: Vec<Option<Hold>> = held.map(|((_, before), _)| *before).collect();
        held.into_iter().for_each(|before| self.take(id, before));
    }
}

impl Ledger {
    /// `own`, a duplicate of the monitor's, stands before an export of memory or, without one, before
    /// its mappings. Whether there wasn't one: else, or where the memory is gone, it's of no use.
    #[must_use]
    pub fn stake(&mut self, charge: u64, before: Option<Hold>, own: u32) -> bool {
        let id = ChargeId::new(charge);
        let is_there = before.is_none_or(|hold| self.holds.get(&hold) == Some(&id));
        if !is_there || !self.charges.contains_key(&id) {
            return false;
        }
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

    /// The one that stands before a memory's mappings.
    #[must_use]
    pub fn stake_of(&self, charge: u64) -> Option<u32> {
        self.stakes.all.get(&(ChargeId::new(charge), None)).copied()
    }

    /// Those that stand before nothing any more. Whoever is told of one frees it, and says so:
    /// [`unstake`](Self::unstake).
    #[must_use]
    pub fn loose_stakes(&mut self) -> Vec<u32> {
        let loose = self.stakes.loose.iter_mut().filter(|(_, (_, taken))| !*taken);
        let take = |(own, (_, taken)): (&u32, &mut (ChargeId, bool))| {
            *taken = true;
            *own
        };
        loose.map(take).collect()
    }

    /// Whether there are any.
    #[must_use]
    pub fn has_stakes(&self) -> bool {
        !self.stakes.counts.is_empty()
    }

    /// One of them is freed.
    pub fn unstake(&mut self, own: u32) {
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
