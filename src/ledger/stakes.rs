//! Stakes: duplicates of the monitor's own, in front of what no figure shows.
//!
//! The driver counts memory once: in the figure of the process that owns the oldest object which names it. When
//! that object is freed, the next one owns the memory: a duplicate is put right behind what it is of
//! (`dupListItem`, `mem.c` of 515.43.04 and 595.45.04). The object of an export or of a mapping is the
//! kernel's. Where that is the oldest, no process's figure has the memory, and the container could take as much
//! again that nobody sees. (An object below another GPU's device is in that GPU's figures.) So the
//! monitor first makes a duplicate of its own, the *stake*: from then on the memory is in the monitor's figure. A
//! stake is freed when the exports and mappings behind it are gone, and counts against the quota until then.
//!
//! Our client of the driver outlives its worker, in the keeper's hands; the next one has the stakes from
//! the journal, and puts its own in their places.

use std::collections::BTreeMap;

use postcard::experimental::max_size::MaxSize;
use serde::{Deserialize, Serialize};

use super::{ChargeId, Client, Handle, Hold, Ledger, Shown};

/// What a stake stands before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, MaxSize)]
pub enum Before {
    /// All mappings of that memory.
    Mappings {
        /// [`Ledger::charge_of`].
        charge: ChargeId,
    },
    /// What was exported to a place in a file.
    Export {
        /// The place.
        hold: Hold,
    },
    /// A name of memory that shows elsewhere than that is.
    Name {
        /// The object's client.
        client: Client,
        /// The object.
        handle: Handle,
    },
    /// Nothing any more, and is to be freed.
    Nothing {
        /// [`Ledger::charge_of`].
        charge: ChargeId,
    },
}

/// The same of a memory that is known: names by which of all objects they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Spot {
    Mappings,
    Export(Hold),
    Name(u32),
}

#[derive(Debug, Default)]
pub(super) struct Stakes {
    /// By memory. Each stake is in here or among the loose ones.
    all: BTreeMap<(ChargeId, Spot), u64>,
    /// Before nothing any more, and to be freed.
    loose: BTreeMap<u64, ChargeId>,
}

impl Stakes {
    pub(super) fn len(&self) -> usize {
        self.all.len() + self.loose.len()
    }

    /// Whether there is one.
    pub(super) fn stands(&self, id: ChargeId, before: Spot) -> bool {
        self.all.contains_key(&(id, before))
    }
}

impl Ledger {
    /// Whether a stake can be put there: there is what it's to stand before, none before that, and
    /// room for one more.
    #[must_use]
    pub fn may_stake(&self, before: Before) -> bool {
        let is_free = |spot| !self.stakes.all.contains_key(&spot);
        self.stakes.len() < self.bounds.stakes && self.spot(before).is_some_and(is_free)
    }

    /// `own`, by whatever the monitor knows it, stands there from now on, in the place of any other, of
    /// which nothing is known any more; where there is nothing to stand before, nothing changes.
    pub fn stake(&mut self, before: Before, own: u64) {
        let id = match before {
            Before::Nothing { charge } => {
                if !self.charges.contains_key(&charge) || self.stakes.loose.contains_key(&own) {
                    return;
                }
                self.stakes.loose.insert(own, charge);
                charge
            }
            _ => {
                let Some(spot) = self.spot(before) else { return };
                if self.stakes.all.insert(spot, own).is_some() {
                    return;
                }
                spot.0
            }
        };
        self.reference(id, false);
        if let Some(charge) = self.charges.get_mut(&id) {
            charge.stakes += 1;
        }
    }

    fn spot(&self, before: Before) -> Option<(ChargeId, Spot)> {
        match before {
            Before::Mappings { charge } => self.is_held(charge).then_some((charge, Spot::Mappings)),
            Before::Export { hold } => self.holds.get(&hold).map(|id| (*id, Spot::Export(hold))),
            Before::Name { client, handle } => {
                let shown = self.objects.shown(client, handle);
                let id = self.objects.charge(client, handle).filter(|_| shown != Shown::Here)?;
                Some((id, Spot::Name(self.objects.serial(client, handle)?)))
            }
            Before::Nothing { .. } => None,
        }
    }

    /// Whether anything but names and stakes keeps that memory: else what is before its mappings would
    /// never be lost.
    pub(super) fn is_held(&self, id: ChargeId) -> bool {
        self.charges.get(&id).is_some_and(|of| of.references - of.names > of.stakes)
    }

    /// All of them, where they stand, and on which GPU their memory is.
    pub fn stakes(&self) -> impl Iterator<Item = (Before, usize, u64)> {
        let gpu = |id: &ChargeId| self.charges.get(id).map_or(0, |charge| charge.gpu);
        let standing = self.stakes.all.iter().filter_map(move |((id, spot), own)| {
            let before = match *spot {
                Spot::Mappings => Before::Mappings { charge: *id },
                Spot::Export(hold) => Before::Export { hold },
                Spot::Name(_) => return None,
            };
            Some((before, gpu(id), *own))
        });
        let names = self.objects.names().filter(|_| self.has_names_elsewhere());
        let named = names.filter_map(move |(id, (client, handle, serial))| {
            let own = self.stakes.all.get(&(id, Spot::Name(serial)))?;
            Some((Before::Name { client, handle }, gpu(&id), *own))
        });
        let loose = self
            .stakes
            .loose
            .iter()
            .map(move |(own, id)| (Before::Nothing { charge: *id }, gpu(id), *own));
        standing.chain(named).chain(loose)
    }

    /// All stakes whose numbers are within the range are gone, as their client is.
    pub fn lose_stakes(&mut self, first: u64, last: u64) {
        let numbers = first..=last;
        let standing = self.stakes.all.extract_if(.., |_, own| numbers.contains(own));
        let mut gone: Vec<ChargeId> = standing.map(|((id, _), _)| id).collect();
        gone.extend(self.stakes.loose.extract_if(first..=last, |_, _| true).map(|(_, id)| id));
        gone.into_iter().for_each(|id| self.dereference_stake(id));
    }

    /// What a stake may have stood before is no more.
    pub(super) fn lost(&mut self, id: ChargeId, before: Spot) {
        if let Some(own) = self.stakes.all.remove(&(id, before)) {
            self.stakes.loose.insert(own, id);
        }
    }

    /// The one that stands there.
    #[must_use]
    pub fn stake_at(&self, before: Before) -> Option<u64> {
        self.spot(before).and_then(|spot| self.stakes.all.get(&spot)).copied()
    }

    /// Those that stand before nothing any more: to be freed, and [`unstake`](Self::unstake)d then.
    #[must_use]
    pub fn loose_stakes(&self) -> Vec<u64> {
        self.stakes.loose.keys().copied().collect()
    }

    /// Whether there are any.
    #[must_use]
    pub fn has_stakes(&self) -> bool {
        self.stakes.len() > 0
    }

    /// A stake that stands before nothing is freed.
    pub fn unstake(&mut self, own: u64) {
        if let Some(id) = self.stakes.loose.remove(&own) {
            self.dereference_stake(id);
        }
    }

    fn dereference_stake(&mut self, id: ChargeId) {
        if let Some(charge) = self.charges.get_mut(&id) {
            charge.stakes = charge.stakes.saturating_sub(1);
        }
        self.dereference(id, false);
    }
}
