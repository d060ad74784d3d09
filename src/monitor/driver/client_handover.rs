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

use crate::ledger::{Before, Entry};
use crate::monitor::driver::monitor_client::of_client;
use crate::monitor::lock::Lock;
use crate::monitor::state::books::Books;

/// What workers before had.
#[derive(Debug, Default)]
pub(crate) struct FormerClients {
    /// Files of their clients, by place: the first of each is the client's.
    pub(crate) files: Lock<BTreeMap<u32, BTreeMap<u8, OwnedFd>>>,
    /// What isn't taken over yet won't be. Changes while the books are locked.
    pub(crate) is_given_up: AtomicBool,
}

impl FormerClients {
    /// Whether they had no client.
    pub(crate) fn is_empty(&self) -> bool {
        self.files.lock().is_empty()
    }

    pub(crate) fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::Acquire)
    }

    /// Whether that stake is of one of them.
    pub(crate) fn has(&self, stake: u64) -> bool {
        self.files.lock().contains_key(&((stake >> 32) as u32))
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
