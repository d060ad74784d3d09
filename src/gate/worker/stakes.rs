//! Stakes, as the driver has them: [`crate::ledger`] tells what they are for.

use super::Shared;
use super::own::Own;
use crate::ledger::Hold;

/// What a mapping is made from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Source {
    /// An object of ours.
    pub(super) handle: u32,
    /// It's a stake, and stays.
    pub(super) stays: bool,
}

impl Shared {
    /// What memory is to be mapped from: a duplicate of ours that stands before all of its mappings,
    /// or for want of one, as the memory is gone, `fresh`, which was just made. That is given back
    /// where it isn't needed.
    pub(super) fn stake_mapping(&self, own: &Own, charge: u64, fresh: u32) -> Source {
        let mut books = self.books();
        if books.ledger.stake(charge, None, fresh) {
            return Source { handle: fresh, stays: true };
        }
        let known = books.ledger.stake_of(charge);
        drop(books);
        known.map_or(Source { handle: fresh, stays: false }, |handle| {
            own.give_back(&self.release, fresh);
            Source { handle, stays: true }
        })
    }

    /// A duplicate of ours that stands before an export. Whether it's needed there.
    pub(super) fn stake_export(&self, own: &Own, hold: Hold, fresh: u32) -> bool {
        let mut books = self.books();
        let charge = books.ledger.held_by(hold);
        let staked = charge.is_some_and(|charge| books.ledger.stake(charge, Some(hold), fresh));
        drop(books);
        if !staked {
            own.give_back(&self.release, fresh);
        }
        staked
    }

    /// Frees those that stand before nothing any more: what nothing else keeps is gone then.
    pub(super) fn free_stakes(&self) {
        let loose = self.books().ledger.loose_stakes();
        if loose.is_empty() {
            return;
        }
        let Some(own) = self.auditor.own_at_hand() else { return };
        for stake in loose {
            own.give_back(&self.release, stake);
            self.books().ledger.unstake(stake);
        }
    }
}
