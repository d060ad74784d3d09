//! Our client of the driver outlives its worker: the keeper has its files, too.
//!
//! Else its objects would go at the worker's end, and with them the stakes, before whose memory
//! nothing would stand any more. The driver has a client in the figures of the process that made it,
//! though, whose pid may be anybody's by then: so the next worker makes a client of its own, puts a
//! duplicate of each stake in its place, and ends the one before. That is done before anybody is
//! answered. Where the driver hangs, the rest is given up: what those stakes stood before is bare, so
//! names are compared, and they count until their client is gone.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::gate::wire::Notice;
use crate::ledger::{Before, Entry};
use crate::monitor::audit::shadow_dups::{handle_of, known, of_client};
use crate::monitor::driver::device::{Device, Rm};
use crate::monitor::driver::monitor_client::MonitorClient;
use crate::monitor::state::books::Books;
use crate::monitor::worker::Shared;

/// The bit that tells their numbers from those of other files that the keeper has.
const KIND: u64 = 1 << 62;

/// Bits of a number that say which of a client's files it is.
const PLACE_BITS: u32 = 8;

/// Stakes whose heirs are entered at once: who gives the rest up loses no more than are on their way.
const AT_ONCE: usize = 64;

/// Whether a file that the keeper has is one of these.
pub(crate) fn is_number(number: u64) -> bool {
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

/// What workers before had.
#[derive(Debug, Default)]
pub(crate) struct Heritage {
    /// Files of their clients: the first of each is the client's.
    files: Mutex<BTreeMap<u32, BTreeMap<u64, OwnedFd>>>,
    /// What isn't taken over yet won't be. Changes while the books are locked.
    is_given_up: AtomicBool,
}

impl Heritage {
    fn all(&self) -> MutexGuard<'_, BTreeMap<u32, BTreeMap<u64, OwnedFd>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether they had no client.
    pub(crate) fn is_empty(&self) -> bool {
        self.all().is_empty()
    }

    fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::Acquire)
    }

    /// Whether that stake is of one of them.
    pub(crate) fn has(&self, stake: u64) -> bool {
        self.all().contains_key(&((stake >> 32) as u32))
    }
}

/// One that is in the books.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stake {
    before: Before,
    gpu: usize,
    own: u64,
}

impl Stake {
    fn client(&self) -> u32 {
        (self.own >> 32) as u32
    }
}

impl Books {
    fn stakes(&self) -> Vec<Stake> {
        let stakes = self.ledger.stakes();
        stakes.map(|(before, gpu, own)| Stake { before, gpu, own }).collect()
    }

    /// Nothing of a client stands before anything any more. What it keeps counts until it's gone.
    fn loosen(&mut self, client: u32) {
        for stake in self.stakes().iter().filter(|of| of.client() == client) {
            // Before the others none is put later.
            if let Before::Mappings { charge } = stake.before {
                self.enter(Entry::Bare { charge });
            }
        }
        let (first, last) = of_client(client);
        self.enter(Entry::LoosenStakes { first, last });
    }
}

impl Shared {
    /// Those that workers before had: what the books have before anybody is answered.
    pub(crate) fn stakes_of_old(&self) -> Vec<Stake> {
        self.books().stakes()
    }

    /// A worker before had it.
    pub(crate) fn was_own(&self, number: u64, file: OwnedFd) {
        self.heritage.all().entry(client_of(number)).or_default().insert(number, file);
    }

    /// The keeper gets the files of our client, before anything is made by it.
    pub(crate) fn bequeath(&self, own: &MonitorClient) {
        for (place, file) in own.files().enumerate() {
            let notice = Notice::Exported { number: number(own.client, place) };
            // Else it is told that the worker is gone in a moment.
            let _ = self.keeper.tell_with(notice, Some(file));
        }
    }

    /// We close it, and the keeper shall.
    pub(crate) fn disown(&self, own: &MonitorClient) {
        (0..own.files().count()).for_each(|place| {
            let _ = self.keeper.tell(Notice::TakenBack { number: number(own.client, place) });
        });
    }

    /// Puts stakes of ours in the places of those that workers before had, and ends their clients. Tells
    /// after each that it goes on.
    pub(crate) fn inherit(&self, stakes: &[Stake], goes_on: impl Fn()) {
        // Of some nobody kept the files: a worker that couldn't tell the keeper, say.
        let mut clients: BTreeSet<u32> = stakes.iter().map(Stake::client).collect();
        clients.extend(self.heritage.all().keys());
        for client in clients {
            let stakes: Vec<Stake> =
                stakes.iter().filter(|of| of.client() == client).copied().collect();
            self.inherit_from(client, &stakes, &goes_on);
        }
    }

    /// The driver hangs: what it hasn't come to is given up.
    pub(crate) fn give_up_heritage(&self, stakes: &[Stake]) {
        let mut books = self.books();
        self.heritage.is_given_up.store(true, Ordering::Release);
        let clients: BTreeSet<u32> = stakes.iter().map(Stake::client).collect();
        clients.into_iter().for_each(|client| books.loosen(client));
    }

    fn inherit_from(&self, client: u32, stakes: &[Stake], goes_on: &impl Fn()) {
        let files = self.heritage.all();
        let control = files.get(&client).and_then(|files| files.values().next());
        let control = control.and_then(|control| control.try_clone().ok());
        drop(files);
        let control = control.and_then(|control| Device::of(&self.settings.nodes, control).ok());
        let former = control.map(|control| MonitorClient::former(control, client));
        if let Some(former) = &former {
            stakes.chunks(AT_ONCE).for_each(|stakes| self.hand_over(former, stakes, goes_on));
        }
        self.books().loosen(client);
        if let Some(former) = former {
            former.end(&self.release);
        }
        let (first, last) = of_client(client);
        self.books().enter(Entry::LoseStakes { first, last });
        let files = self.heritage.all().remove(&client).unwrap_or_default();
        for number in files.into_keys() {
            let _ = self.keeper.tell(Notice::TakenBack { number });
        }
    }

    /// Makes heirs, and puts them in the places of those that they are of.
    fn hand_over(&self, former: &MonitorClient, stakes: &[Stake], goes_on: impl Fn()) {
        let heir = |stake| {
            let heir = self.heir(former, stake);
            goes_on();
            heir
        };
        let heirs: Vec<_> = stakes.iter().map(heir).collect();
        let mut books = self.books();
        let is_given_up = self.heritage.is_given_up();
        let mut needless = Vec::new();
        for (stake, (own, heir)) in
            stakes.iter().zip(heirs).filter_map(|(stake, heir)| Some((stake, heir?)))
        {
            if is_given_up {
                needless.push((own, heir));
                continue;
            }
            books.enter(Entry::Stake { before: stake.before, own: known(&own, heir) });
        }
        drop(books);
        for (own, heir) in needless {
            own.give_back(&self.release, heir);
        }
    }

    /// A duplicate of ours of one that a worker before had, and still needs to be.
    fn heir(&self, former: &MonitorClient, stake: &Stake) -> Option<(Arc<MonitorClient>, u32)> {
        let handle = handle_of(former, stake.own)?;
        if matches!(stake.before, Before::Nothing { .. }) || self.heritage.is_given_up() {
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
    use crate::monitor::uvm::files;

    #[test]
    fn a_file_is_known_by_its_number() {
        for client in [1, 0xc1d0_0001, u32::MAX] {
            let numbers = [number(client, 0), number(client, 32)];
            assert!(numbers[0] < numbers[1], "the client's own file is the first");
            for number in numbers {
                assert!(is_number(number) && !files::is_number(number));
                assert_eq!(client_of(number), client);
            }
        }
        assert!(!is_number(7));
    }
}
