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
pub enum StakePlace {
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
    Loose {
        /// [`Ledger::charge_of`].
        charge: ChargeId,
    },
}

/// The same of a memory that is known: names by which of all objects they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ChargePlace {
    Mappings,
    Export(Hold),
    Name(u32),
}

#[derive(Debug, Default)]
pub(super) struct Stakes {
    /// By memory. Each stake is in here or among the loose ones.
    all: BTreeMap<(ChargeId, ChargePlace), u64>,
    /// Before nothing any more, and to be freed.
    loose: BTreeMap<u64, ChargeId>,
}

impl Stakes {
    pub(super) fn len(&self) -> usize {
        self.all.len() + self.loose.len()
    }

    /// Whether there is one.
    pub(super) fn contains(&self, id: ChargeId, before: ChargePlace) -> bool {
        self.all.contains_key(&(id, before))
    }
}

impl Ledger {
    /// Whether a stake can be put there: there is what it's to stand before, none before that, and
    /// room for one more.
    #[must_use]
    pub fn may_stake(&self, before: StakePlace) -> bool {
        let is_free = |place| !self.stakes.all.contains_key(&place);
        self.stakes.len() < self.bounds.stakes && self.charge_place(before).is_some_and(is_free)
    }

    /// `number`, by whatever the monitor knows it, stands there from now on, in the place of any other, of
    /// which nothing is known any more; where there is nothing to stand before, nothing changes.
    pub fn stake(&mut self, before: StakePlace, number: u64) {
        let id = match before {
            StakePlace::Loose { charge } => {
                if !self.charges.contains_key(&charge) || self.stakes.loose.contains_key(&number) {
                    return;
                }
                self.stakes.loose.insert(number, charge);
                charge
            }
            _ => {
                let Some(place) = self.charge_place(before) else { return };
                if self.stakes.all.insert(place, number).is_some() {
                    return;
                }
                place.0
            }
        };
        self.reference(id, false);
        if let Some(charge) = self.charges.get_mut(&id) {
            charge.stakes += 1;
        }
    }

    fn charge_place(&self, before: StakePlace) -> Option<(ChargeId, ChargePlace)> {
        match before {
            StakePlace::Mappings { charge } => {
                self.is_held(charge).then_some((charge, ChargePlace::Mappings))
            }
            StakePlace::Export { hold } => {
                self.holds.get(&hold).map(|id| (*id, ChargePlace::Export(hold)))
            }
            StakePlace::Name { client, handle } => {
                let shown = self.objects.shown(client, handle);
                let id = self.objects.charge(client, handle).filter(|_| shown != Shown::Here)?;
                Some((id, ChargePlace::Name(self.objects.serial(client, handle)?)))
            }
            StakePlace::Loose { .. } => None,
        }
    }

    /// Whether anything but names and stakes keeps that memory: else what is before its mappings would
    /// never be lost.
    pub(super) fn is_held(&self, id: ChargeId) -> bool {
        self.charges.get(&id).is_some_and(|charge| charge.references - charge.names > charge.stakes)
    }

    /// All of them, where they stand, and on which GPU their memory is.
    pub fn stakes(&self) -> impl Iterator<Item = (StakePlace, usize, u64)> {
        let gpu = |id: &ChargeId| self.charges.get(id).map_or(0, |charge| charge.gpu);
        let standing = self.stakes.all.iter().filter_map(move |((id, place), number)| {
            let before = match *place {
                ChargePlace::Mappings => StakePlace::Mappings { charge: *id },
                ChargePlace::Export(hold) => StakePlace::Export { hold },
                ChargePlace::Name(_) => return None,
            };
            Some((before, gpu(id), *number))
        });
        let names = self.objects.names().filter(|_| self.has_names_elsewhere());
        let named = names.filter_map(move |(id, (client, handle, serial))| {
            let number = self.stakes.all.get(&(id, ChargePlace::Name(serial)))?;
            Some((StakePlace::Name { client, handle }, gpu(&id), *number))
        });
        let loose = self
            .stakes
            .loose
            .iter()
            .map(move |(number, id)| (StakePlace::Loose { charge: *id }, gpu(id), *number));
        standing.chain(named).chain(loose)
    }

    /// All stakes whose numbers are within the range are gone, as their client is.
    pub fn remove_stakes(&mut self, first: u64, last: u64) {
        let numbers = first..=last;
        let standing = self.stakes.all.extract_if(.., |_, number| numbers.contains(number));
        let mut gone: Vec<ChargeId> = standing.map(|((id, _), _)| id).collect();
        gone.extend(self.stakes.loose.extract_if(first..=last, |_, _| true).map(|(_, id)| id));
        gone.into_iter().for_each(|id| self.dereference_stake(id));
    }

    /// What a stake may have stood before is no more.
    pub(super) fn loosen_stake(&mut self, id: ChargeId, before: ChargePlace) {
        if let Some(number) = self.stakes.all.remove(&(id, before)) {
            self.stakes.loose.insert(number, id);
        }
    }

    /// The one that stands there.
    #[must_use]
    pub fn stake_at(&self, before: StakePlace) -> Option<u64> {
        self.charge_place(before).and_then(|place| self.stakes.all.get(&place)).copied()
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
    pub fn unstake(&mut self, number: u64) {
        if let Some(id) = self.stakes.loose.remove(&number) {
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
