//! Our client of the driver outlives its worker: the keeper has its files, too.
//!
//! Else its objects would go at the worker's end, and with them the stakes, before whose memory
//! nothing would stand any more. The driver has a client in the figures of the process that made it,
//! though, whose pid may be anybody's by then: so the next worker makes a client of its own, puts a
//! duplicate of each stake in its place, and ends the one before.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Shared;
use super::device::{Device, Rm};
use super::own::Own;
use super::stakes::{handle_of, known, of_client};
use crate::gate::wire::Notice;
use crate::ledger::{Before, Entry};

/// The bit that tells their numbers from those of other files that the keeper has.
const KIND: u64 = 1 << 62;

/// Bits of a number that say which of a client's files it is.
const PLACE_BITS: u32 = 8;

/// Whether a file that the keeper has is one of these.
pub(super) fn is_number(number: u64) -> bool {
    number & KIND != 0
}

fn number(client: u32, place: usize) -> u64 {
    KIND | u64::from(client) << PLACE_BITS | place as u64
}

/// Whose it is.
fn client_of(number: u64) -> u32 {
    // Above is the kind.
    u32::try_from((number >> PLACE_BITS) & u64::from(u32::MAX)).unwrap_or_default()
}

/// Files of clients that workers before had: the first of each is the client's.
#[derive(Debug, Default)]
pub(super) struct Heritage(Mutex<BTreeMap<u32, BTreeMap<u64, OwnedFd>>>);

impl Heritage {
    fn all(&self) -> MutexGuard<'_, BTreeMap<u32, BTreeMap<u64, OwnedFd>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether that stake is of one of them.
    pub(super) fn has(&self, stake: u64) -> bool {
        self.all().contains_key(&((stake >> 32) as u32))
    }
}

/// One that is in the books.
#[derive(Debug)]
pub(super) struct Stake {
    before: Before,
    gpu: usize,
    own: u64,
}

impl Stake {
    fn client(&self) -> u32 {
        (self.own >> 32) as u32
    }
}

impl Shared {
    /// Those that workers before had: what the books have before anybody is answered.
    pub(super) fn stakes_of_old(&self) -> Vec<Stake> {
        let books = self.books();
        let stakes = books.ledger.stakes();
        stakes.map(|(before, gpu, own)| Stake { before, gpu, own }).collect()
    }

    /// A worker before had it.
    pub(super) fn was_own(&self, number: u64, file: OwnedFd) {
        self.heritage.all().entry(client_of(number)).or_default().insert(number, file);
    }

    /// The keeper gets the files of our client, before anything is made by it.
    pub(super) fn bequeath(&self, own: &Own) {
        for (place, file) in own.files().enumerate() {
            let notice = Notice::Exported { number: number(own.client, place) };
            // Else it is told that the worker is gone in a moment.
            let _ = self.keeper.tell_with(notice, Some(file));
        }
    }

    /// We close it, and the keeper shall.
    pub(super) fn disown(&self, own: &Own) {
        (0..own.files().count()).for_each(|place| {
            let _ = self.keeper.tell(Notice::TakenBack { number: number(own.client, place) });
        });
    }

    /// Puts stakes of ours in the places of those that workers before had, and ends their clients.
    pub(super) fn inherit(&self, stakes: &[Stake]) {
        // Of some nobody kept the files: a worker that couldn't tell the keeper, say.
        let mut clients: BTreeSet<u32> = stakes.iter().map(Stake::client).collect();
        clients.extend(self.heritage.all().keys());
        for client in clients {
            let stakes: Vec<&Stake> = stakes.iter().filter(|of| of.client() == client).collect();
            self.inherit_from(client, &stakes);
        }
    }

    fn inherit_from(&self, client: u32, stakes: &[&Stake]) {
        let files = self.heritage.all();
        let control = files.get(&client).and_then(|files| files.values().next());
        let control = control.and_then(|control| control.try_clone().ok());
        drop(files);
        let control = control.and_then(|control| Device::of(&self.settings.nodes, control).ok());
        let former = control.map(|control| Own::former(control, client));
        let heirs: Vec<_> = stakes
            .iter()
            .map(|stake| former.as_ref().and_then(|former| self.heir(former, stake)))
            .collect();
        let mut books = self.books();
        let mut needless = Vec::new();
        for (stake, heir) in stakes.iter().zip(heirs) {
            let (before, is_veil) = (stake.before, matches!(stake.before, Before::Veil { .. }));
            match heir {
                // Where a call hung while the worker began, others may have freed since what it stood
                // before.
                Some(heir) if !is_veil && books.ledger.stake_at(before) != Some(stake.own) => {
                    needless.push(heir);
                }
                Some((own, heir)) => {
                    books.enter(Entry::Stake { before, own: known(&own, heir) });
                }
                // Whoever looks finds that others have none.
                None if is_veil => books.enter(Entry::Veil { before }),
                None => {}
            }
        }
        let (first, last) = of_client(client);
        books.enter(Entry::LoseStakes { first, last });
        drop(books);
        for (own, heir) in needless {
            own.give_back(&self.release, heir);
        }
        if let Some(former) = former {
            former.end(&self.release);
        }
        let files = self.heritage.all().remove(&client).unwrap_or_default();
        for number in files.into_keys() {
            let _ = self.keeper.tell(Notice::TakenBack { number });
        }
    }

    /// A duplicate of ours of one that a worker before had, and still needs to be.
    fn heir(&self, former: &Own, stake: &Stake) -> Option<(Arc<Own>, u32)> {
        let handle = handle_of(former, stake.own)?;
        if matches!(stake.before, Before::Nothing { .. }) {
            return None;
        }
        let rm = Rm { release: &self.release, device: &former.control };
        let own = self.auditor.own(self)?;
        let heir = own.borrow(&rm, (former.client, handle), Some(stake.gpu)).ok()?;
        Some((own, heir))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::worker::mapped;

    #[test]
    fn a_file_is_known_by_its_number() {
        for client in [1, 0xc1d0_0001, u32::MAX] {
            let numbers = [number(client, 0), number(client, 32)];
            assert!(numbers[0] < numbers[1], "the client's own file is the first");
            for number in numbers {
                assert!(is_number(number) && !mapped::is_number(number));
                assert_eq!(client_of(number), client);
            }
        }
        assert!(!is_number(7));
    }
}
