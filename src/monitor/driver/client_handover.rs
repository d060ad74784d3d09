//! Our client of the driver outlives its worker, once it has made something that shall: the keeper has its files,
//! too.
//!
//! Else its objects would go at the worker's end, and with them the stakes, before whose memory
//! nothing would stand any more. The driver has a client in the figures of the process that made it,
//! though, whose pid may be anybody's by then: so the next worker makes a client of its own, puts a
//! duplicate of each stake in its place, and ends the one before. That is done before anybody is
//! answered. Where the driver hangs, the rest is given up: what those stakes stood before is bare, so
//! names are compared, and they count until their client is gone.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::ledger::{Before, Entry};
use crate::monitor::driver::monitor_client::of_client;
use crate::monitor::state::books::Books;

/// The bit that tells their numbers from those of other files that the keeper has.
const KIND: u64 = 1 << 62;

/// Bits of a number that say which of a client's files it is.
const PLACE_BITS: u32 = 8;

/// Whether a file that the keeper has is one of these.
pub(crate) fn is_number(number: u64) -> bool {
    number & KIND != 0
}

pub(crate) fn number(client: u32, place: usize) -> u64 {
    KIND | u64::from(client) << PLACE_BITS | place as u64
}

/// What workers before had.
#[derive(Debug, Default)]
pub(crate) struct Heritage {
    /// Files of their clients: the first of each is the client's.
    files: Mutex<BTreeMap<u32, BTreeMap<u64, OwnedFd>>>,
    /// What isn't taken over yet won't be. Changes while the books are locked.
    pub(crate) is_given_up: AtomicBool,
}

impl Heritage {
    pub(crate) fn all(&self) -> MutexGuard<'_, BTreeMap<u32, BTreeMap<u64, OwnedFd>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether they had no client.
    pub(crate) fn is_empty(&self) -> bool {
        self.all().is_empty()
    }

    pub(crate) fn is_given_up(&self) -> bool {
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
    pub(crate) before: Before,
    pub(crate) gpu: usize,
    pub(crate) own: u64,
}

impl Stake {
    pub(crate) fn client(&self) -> u32 {
        (self.own >> 32) as u32
    }
}

impl Books {
    pub(crate) fn stakes(&self) -> Vec<Stake> {
        let stakes = self.ledger.stakes();
        stakes.map(|(before, gpu, own)| Stake { before, gpu, own }).collect()
    }

    /// Nothing of a client stands before anything any more. What it keeps counts until it's gone.
    pub(crate) fn loosen(&mut self, client: u32) {
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

/// Whose it is.
pub(crate) fn client_of(number: u64) -> u32 {
    // Above is the kind.
    u32::try_from((number >> PLACE_BITS) & u64::from(u32::MAX)).unwrap_or_default()
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
