//! What a container has allocated on its GPUs, and whether it may have more.
//!
//! Knows charges, what keeps them alive (objects, their duplicates, mappings, exports),
//! quotas and reconciliation. Must not know file descriptors, processes of the host or the
//! driver's structs: clients, handles and processes are numbers to it. Pure: one thread
//! owns it, every call is a decision at once, time does not come into it.
//!
//! The life of an allocation: [`Ledger::reserve`] before the driver is asked (so that
//! two that race never both get the last byte), then [`Ledger::cancel`], and where the driver
//! gave it [`Entry::Commit`] under its handle, with nothing between the two. A charge ends when the
//! last thing that keeps it alive does. What the ledger missed, [`Ledger::reconcile`] learns from the driver's
//! own figure.
//!
//! Invariants: `used` of a GPU is never below what is charged and pending on it, less what
//! the driver said is gone; it never passes the quota by a reservation; every map is
//! bounded by [`Bounds`], because a container can make them grow.

mod account;
mod entry;
mod expected;
mod objects;
mod pieces;
mod questions;
mod shown;
mod stakes;
mod users;

use std::collections::BTreeMap;

use postcard::experimental::max_size::MaxSize;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use account::Account;
use objects::{Object, Objects, RemovedName};
use pieces::Pieces;
use stakes::{ChargePlace, Stakes};

pub use entry::Entry;
pub use expected::Expected;
pub use pieces::{Span, Tree};
pub use shown::Shown;
pub use stakes::StakePlace;

/// The driver's name of a client (`hClient`).
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, MaxSize,
)]
pub struct Client(pub u32);

/// The name of an object within its client (`hObject`); a client's own handle is its
/// number.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, MaxSize,
)]
pub struct Handle(pub u32);

/// A process, by a number that is never used again while the ledger lives.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, MaxSize,
)]
pub struct Process(pub u64);

/// The name of a charge; never used again.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, MaxSize,
)]
pub struct ChargeId(pub u64);

/// What keeps a charge alive besides the objects that name it.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, MaxSize,
)]
pub enum Hold {
    /// Managed memory of the address space `space`. What else UVM has mapped is known by its
    /// pieces, [`Ledger::map`].
    Mapping {
        /// Whose; all its holds end together.
        space: u64,
        /// Where.
        base: u64,
    },
    /// A place in a file that memory was exported to.
    Export {
        /// Which file.
        file: u64,
        /// Which of its places; the first is 0.
        index: u32,
    },
}

/// How much a container may make the ledger remember.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Objects of all clients together.
    pub objects: usize,
    /// Mappings, by the pieces that they were cut into, and exports together.
    pub holds: usize,
    /// Stakes.
    pub stakes: usize,
}

/// Memory asked for and not yet given. Must end in [`Ledger::cancel`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a reservation that is forgotten is never given back"]
pub struct Reservation {
    gpu: usize,
    bytes: u64,
}

/// What was promised on one GPU, and what of it is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// The quota in bytes.
    pub limit_bytes: u64,
    /// What counts against it, in bytes; more than the quota only after that was lowered,
    /// or where the driver told of memory that nobody had asked us for.
    pub used_bytes: u64,
}

impl Usage {
    /// What is left, in bytes.
    #[must_use]
    pub fn free_bytes(self) -> u64 {
        self.limit_bytes.saturating_sub(self.used_bytes)
    }
}

/// Why something is not entered.
#[derive(Debug, Clone, Copy, Error, PartialEq, Eq)]
pub enum LedgerError {
    /// More than is left.
    #[error("{asked_bytes} bytes asked for, {} of {} left", usage.free_bytes(), usage.limit_bytes)]
    OverQuota {
        /// What was asked for.
        asked_bytes: u64,
        /// What there was.
        usage: Usage,
    },
    /// The container has no such GPU.
    #[error("the container has no GPU number {gpu}")]
    NoSuchGpu {
        /// Its number in the container's order.
        gpu: usize,
    },
    /// The ledger is as large as it may become.
    #[error("the container has more objects or mappings than can be kept account of")]
    Full,
    /// There is no such object.
    #[error("client {:#x} has no object {:#x}", client.0, handle.0)]
    NoSuchObject {
        /// The client.
        client: Client,
        /// The handle.
        handle: Handle,
    },
    /// The quota would be below what is in use.
    #[error("{} bytes are in use, more than the new quota of {limit_bytes}", usage.used_bytes)]
    InUse {
        /// The quota asked for.
        limit_bytes: u64,
        /// What there is.
        usage: Usage,
    },
}

/// The account of one container.
#[derive(Debug)]
pub struct Ledger {
    accounts: Vec<Account>,
    objects: Objects,
    /// The processes that may hold a client's file open; it lives as long as any does.
    holders: BTreeMap<Client, Vec<Process>>,
    /// How often these have changed.
    holders_changes: u64,
    holds: BTreeMap<Hold, ChargeId>,
    pieces: Pieces,
    stakes: Stakes,
    charges: BTreeMap<ChargeId, Charge>,
    next_charge: ChargeId,
    bounds: Bounds,
}

#[derive(Debug)]
struct Charge {
    gpu: usize,
    bytes: u64,
    /// The reconciliation before which it was made.
    epoch: u64,
    /// Objects and holds that keep it alive.
    references: u32,
    /// Those of them that the driver shows in a process's figure: all but mappings and
    /// exports.
    names: u32,
    /// Those of them that are stakes.
    stakes: u32,
}

impl Ledger {
    /// An empty account with these quotas in bytes, in the container's order of GPUs.
    #[must_use]
    pub fn new(limits_bytes: &[u64], bounds: Bounds) -> Self {
        let account = |limit: &u64| Account { limit: *limit, ..Account::default() };
        Ledger {
            accounts: limits_bytes.iter().map(account).collect(),
            objects: Objects::default(),
            holders: BTreeMap::new(),
            holders_changes: 0,
            holds: BTreeMap::new(),
            pieces: Pieces::default(),
            stakes: Stakes::default(),
            charges: BTreeMap::new(),
            next_charge: ChargeId(0),
            bounds,
        }
    }

    /// Quota and use of the GPU with that number; `None` where the container has none.
    #[must_use]
    pub fn usage(&self, gpu: usize) -> Option<Usage> {
        self.accounts.get(gpu).map(Account::usage)
    }

    /// What is remembered now.
    #[must_use]
    pub fn size(&self) -> Bounds {
        Bounds {
            objects: self.objects.len(),
            holds: self.holds.len() + self.pieces.len(),
            stakes: self.stakes.len(),
        }
    }

    fn account(&mut self, gpu: usize) -> Result<&mut Account, LedgerError> {
        self.accounts.get_mut(gpu).ok_or(LedgerError::NoSuchGpu { gpu })
    }

    /// Sets memory aside for an allocation that the driver is about to be asked for.
    ///
    /// # Errors
    ///
    /// Where that is more than is left, or one more object could not be remembered: then
    /// the driver must not be asked.
    pub fn reserve(&mut self, gpu: usize, bytes: u64) -> Result<Reservation, LedgerError> {
        if self.objects.len() >= self.bounds.objects {
            return Err(LedgerError::Full);
        }
        self.account(gpu)?.reserve(bytes)?;
        Ok(Reservation { gpu, bytes })
    }

    /// What was reserved before this ledger was made anew, whatever the quota is now: the driver may
    /// have given it since.
    ///
    /// # Errors
    ///
    /// Where there is no such GPU.
    pub fn reserve_again(&mut self, gpu: usize, bytes: u64) -> Result<Reservation, LedgerError> {
        self.account(gpu)?.reserve_again(bytes);
        Ok(Reservation { gpu, bytes })
    }

    /// The driver did not give it, or [`Entry::Commit`] comes next.
    pub fn cancel(&mut self, reservation: Reservation) {
        let Reservation { gpu, bytes } = reservation;
        if let Some(account) = self.accounts.get_mut(gpu) {
            account.cancel(bytes);
        }
    }

    /// The driver gave so much as `handle` below `parent`, whatever the quota is. An object that had the
    /// handle before is gone: the driver gives none twice.
    fn charge(&mut self, gpu: usize, bytes: u64, client: Client, parent: Handle, handle: Handle) {
        self.replace(client, handle);
        let Some(account) = self.accounts.get_mut(gpu) else { return };
        account.charge(bytes);
        let id = self.next_charge;
        self.next_charge.0 += 1;
        let epoch = account.epoch;
        self.charges.insert(id, Charge { gpu, bytes, epoch, references: 1, names: 1, stakes: 0 });
        // Room for it was seen to when it was reserved; one more does no harm.
        self.objects.insert(
            client,
            handle,
            Object { parent, charge: Some(id), shown: Shown::Here },
        );
    }

    /// An object without memory of its own, that others may hang below. Where there are as many objects as can be
    /// remembered, it isn't: what is freed with it then stays charged until its client ends or the driver is asked.
    pub fn note(&mut self, client: Client, parent: Handle, handle: Handle) {
        self.replace(client, handle);
        if self.objects.len() < self.bounds.objects {
            let object = Object { parent, charge: None, shown: Shown::Here };
            self.objects.insert(client, handle, object);
        }
    }

    /// `handle` of `client` is another name for `source`, with its memory, which the driver shows there. Must not be made
    /// where there are as many objects as [`Bounds`] says, or its memory could outlive its charge.
    pub fn duplicate(
        &mut self,
        source: (Client, Handle),
        client: Client,
        parent: Handle,
        handle: Handle,
        shown: Shown,
    ) {
        let charge = self.objects.charge(source.0, source.1);
        self.insert_name(client, handle, Object { parent, charge, shown });
    }

    /// `handle` of `client` is another name for what `hold` keeps; the hold stays. Without
    /// such a hold it is an object without memory.
    pub fn import(
        &mut self,
        hold: Hold,
        client: Client,
        parent: Handle,
        handle: Handle,
        shown: Shown,
    ) {
        let charge = self.holds.get(&hold).copied();
        self.insert_name(client, handle, Object { parent, charge, shown });
    }

    fn insert_name(&mut self, client: Client, handle: Handle, object: Object) {
        if let Some(id) = object.charge {
            self.reference(id, true);
        }
        self.replace(client, handle);
        self.objects.insert(client, handle, object);
    }

    /// The driver gave `handle` anew: what had it is gone, with all below. What was never told of may
    /// have been there all the time, and what hangs below it stays.
    fn replace(&mut self, client: Client, handle: Handle) {
        if self.objects.contains(client, handle) {
            self.free(client, handle);
        }
    }

    /// `hold` keeps the memory of an object alive, also after that is freed; of an object without memory, nothing. Must not
    /// be made where there are as many holds as [`Bounds`] says.
    pub fn hold(&mut self, hold: Hold, client: Client, handle: Handle) {
        let Some(id) = self.objects.charge(client, handle) else { return };
        self.reference(id, false);
        if let Some(before) = self.holds.insert(hold, id) {
            self.loosen_stake(before, ChargePlace::Export(hold));
            self.dereference(before, false);
        }
    }

    /// `hold` is gone.
    pub fn release(&mut self, hold: Hold) {
        if let Some(id) = self.holds.remove(&hold) {
            self.loosen_stake(id, ChargePlace::Export(hold));
            self.dereference(id, false);
        }
    }

    /// Whether `hold` keeps memory that no object names any more.
    #[must_use]
    pub fn is_unnamed(&self, hold: Hold) -> bool {
        let charge = self.holds.get(&hold).and_then(|id| self.charges.get(id));
        charge.is_some_and(|charge| charge.names == 0)
    }

    /// The places of a file that keep memory, from the first one up.
    pub fn exported(&self, file: u64) -> impl Iterator<Item = u32> {
        let first = Hold::Export { file, index: 0 };
        let last = Hold::Export { file, index: u32::MAX };
        self.holds.range(first..=last).filter_map(|(hold, _)| match hold {
            Hold::Export { index, .. } => Some(*index),
            Hold::Mapping { .. } => None,
        })
    }

    /// An address space is gone, with all that was mapped into it.
    pub fn release_space(&mut self, space: u64) {
        let first = Hold::Mapping { space, base: 0 };
        let last = Hold::Mapping { space, base: u64::MAX };
        let gone: Vec<Hold> = self.holds.range(first..=last).map(|(hold, _)| *hold).collect();
        gone.into_iter().for_each(|hold| self.release(hold));
    }

    /// An object is freed, and all below it; the client's own handle frees the client.
    pub fn free(&mut self, client: Client, handle: Handle) {
        if handle.0 == client.0 {
            return self.close(client);
        }
        for name in self.objects.remove_tree(client, handle) {
            self.remove_name(name);
        }
    }

    /// A client is gone, with all its objects.
    pub fn close(&mut self, client: Client) {
        self.holders_changes += u64::from(self.holders.remove(&client).is_some());
        for name in self.objects.remove_client(client) {
            self.remove_name(name);
        }
    }

    fn remove_name(&mut self, RemovedName { id, serial }: RemovedName) {
        self.loosen_stake(id, ChargePlace::Name(serial));
        self.dereference(id, true);
    }

    /// `process` may hold the client's file open: it made it, was forked from one that did,
    /// or was seen to use it.
    pub fn add_holder(&mut self, client: Client, process: Process) {
        let holders = self.holders.entry(client).or_default();
        if !holders.contains(&process) {
            holders.push(process);
            self.holders_changes += 1;
        }
    }

    /// The driver's own figure: what the container's processes hold on a GPU in all.
    ///
    /// From then on that counts, with what is pending on top (the figure may have some of
    /// it in already: too much for a while, never too little). Ask before a refusal and after
    /// a death.
    pub fn reconcile(&mut self, gpu: usize, driver_bytes: u64) {
        if let Some(account) = self.accounts.get_mut(gpu) {
            account.reconcile(driver_bytes);
        }
    }

    fn reference(&mut self, id: ChargeId, name: bool) {
        let Some(charge) = self.charges.get_mut(&id) else { return };
        charge.references += 1;
        if name {
            charge.names += 1;
            if charge.names == 1
                && let Some(account) = self.accounts.get_mut(charge.gpu)
            {
                account.show(charge.bytes);
            }
        }
    }

    fn dereference(&mut self, id: ChargeId, name: bool) {
        let Some(charge) = self.charges.get_mut(&id) else { return };
        let account = self.accounts.get_mut(charge.gpu);
        charge.references = charge.references.saturating_sub(1);
        if name {
            charge.names = charge.names.saturating_sub(1);
        }
        let Charge { bytes, epoch, references, names, stakes, .. } = *charge;
        if let Some(account) = account {
            if name && names == 0 {
                account.hide(bytes);
            }
            if references == 0 {
                // It is hidden by now, if not by this then before.
                account.end(bytes, epoch);
                account.show(bytes);
            }
        }
        if references == 0 {
            self.charges.remove(&id);
        }
        if !name && references - names == stakes {
            self.loosen_stake(id, ChargePlace::Mappings);
        }
    }
}

#[cfg(test)]
mod tests;
