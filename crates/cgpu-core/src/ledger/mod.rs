//! What a container has allocated on its GPUs, and whether it may have more.
//!
//! The ledger knows charges, what keeps charges alive (objects, their duplicates, mappings, exports), quotas and
//! reconciliation. It must not know file descriptors, processes of the host or the driver's structs: clients, handles
//! and processes are numbers here. Pure: the caller locks the ledger, every call decides at once, and the ledger
//! knows no time.
//!
//! An allocation begins with [`Ledger::reserve`] before the driver is asked, so that of two calls that race only one
//! gets the last byte. After the driver's answer comes [`Ledger::cancel`], and if the driver gave the memory,
//! [`Entry::Commit`] with its handle; nothing may come between these two. A charge ends when the last thing that keeps
//! it alive ends. [`Ledger::reconcile`] learns from the driver usage what the ledger missed.
//!
//! Invariants: `used` of a GPU is never below the charged and reserved bytes, less what the driver said is gone. A
//! reservation never makes `used` pass the quota. Every map is limited, because a container can make the maps grow:
//! [`Bounds`] limits objects, holds and pins, if the caller checks it before [`Ledger::duplicate`], [`Ledger::import`],
//! [`Ledger::hold`] and [`Ledger::map`]. The caller limits the holders of clients, too.

mod account;
mod entry;
mod mapped_ranges;
mod objects;
mod pins;
mod process;
mod queries;
mod users;

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use account::Account;
use mapped_ranges::MappedRanges;
use objects::{Object, Objects, RemovedName};
use pins::{ChargePlace, Pins};

pub use account::Expected;
pub use entry::Entry;
pub use mapped_ranges::{Span, Tree};
pub use objects::Attribution;
pub use pins::PinPlace;
pub use process::Process;

/// The driver's name of a client (`hClient`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Client(pub u32);

/// The driver's name of an object within its client (`hObject`). The handle of a client is the client's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Handle(pub u32);

/// The id of a charge. No id is used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ChargeId(pub u64);

/// What keeps a charge alive besides the objects that name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Hold {
    /// Managed memory in the address space `space`. Other memory that UVM has mapped is kept alive by its mapped ranges
    /// ([`Ledger::map`]).
    Mapping {
        /// The address space. All holds of a space end together.
        space: u64,
        /// The address of the mapping, a page's, with the number of the GPU in its lowest bits.
        base: u64,
    },
    /// A place in a file that memory was exported to.
    Export {
        /// The number of the file.
        file: u64,
        /// The place within the file; the first is 0.
        index: u32,
    },
}

/// How much a container can make the ledger remember.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Objects of all clients together.
    pub objects: usize,
    /// Mappings (counted by the mapped ranges that they were cut into) and exports together.
    pub holds: usize,
    /// Pins.
    pub pins: usize,
}

/// Memory that was asked for and is not given yet. Must end in [`Ledger::cancel`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a reservation that is forgotten is never given back"]
pub struct Reservation {
    gpu: usize,
    bytes: u64,
}

/// The quota on one GPU, and how much of it is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// The quota in bytes.
    pub limit_bytes: u64,
    /// What counts against the quota, in bytes. It is more than the quota only after the quota was lowered, where the
    /// driver gave more than was asked for (until that is undone), or where the driver showed memory that no call asked
    /// the monitor for.
    pub used_bytes: u64,
}

impl Usage {
    /// What is left of the quota, in bytes.
    #[must_use]
    pub fn free_bytes(self) -> u64 {
        self.limit_bytes.saturating_sub(self.used_bytes)
    }
}

/// Why the ledger doesn't enter something.
#[derive(Debug, Clone, Copy, Error, PartialEq, Eq)]
pub enum LedgerError {
    /// The call asks for more than is left of the quota.
    #[error("{asked_bytes} bytes asked for, {} of {} left", usage.free_bytes(), usage.limit_bytes)]
    OverQuota {
        /// The bytes that were asked for.
        asked_bytes: u64,
        /// Quota and use when the call asked.
        usage: Usage,
    },
    /// The container has no such GPU.
    #[error("the container has no GPU number {gpu}")]
    NoSuchGpu {
        /// The GPU's number in the container's order.
        gpu: usize,
    },
    /// The ledger is as large as [`Bounds`] allows.
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
    /// The quota would be below the use.
    #[error("{} bytes are in use, more than the new quota of {limit_bytes}", usage.used_bytes)]
    InUse {
        /// The quota that was asked for.
        limit_bytes: u64,
        /// Quota and use now.
        usage: Usage,
    },
}

/// All charges and objects of one container.
#[derive(Debug)]
pub struct Ledger {
    accounts: Vec<Account>,
    objects: Objects,
    /// The processes that may hold a client's file open. The client lives as long as any of them holds the file.
    holders: BTreeMap<Client, Vec<Process>>,
    /// How often `holders` has changed.
    holders_changes: u64,
    holds: BTreeMap<Hold, ChargeId>,
    ranges: MappedRanges,
    pins: Pins,
    charges: BTreeMap<ChargeId, Charge>,
    next_charge: ChargeId,
    bounds: Bounds,
}

#[derive(Debug)]
struct Charge {
    gpu: usize,
    bytes: u64,
    /// The value of [`Account::epoch`] when the charge was made.
    epoch: u64,
    /// Objects, holds, mapped ranges and pins that keep the charge alive.
    references: u32,
    /// How many of `references` the driver attributes to a process of the container: all but mappings, exports and
    /// pins.
    names: u32,
    /// How many of `references` are pins.
    pins: u32,
}

impl Ledger {
    /// An empty ledger with these quotas in bytes, in the container's order of GPUs.
    #[must_use]
    pub fn new(limits_bytes: &[u64], bounds: Bounds) -> Self {
        let account = |limit: &u64| Account { limit: *limit, ..Account::default() };
        Ledger {
            accounts: limits_bytes.iter().map(account).collect(),
            objects: Objects::default(),
            holders: BTreeMap::new(),
            holders_changes: 0,
            holds: BTreeMap::new(),
            ranges: MappedRanges::default(),
            pins: Pins::default(),
            charges: BTreeMap::new(),
            next_charge: ChargeId(0),
            bounds,
        }
    }

    /// Quota and use of the GPU with this number; `None` where the container has no such GPU.
    #[must_use]
    pub fn usage(&self, gpu: usize) -> Option<Usage> {
        self.accounts.get(gpu).map(Account::usage)
    }

    /// How much the ledger remembers now.
    #[must_use]
    pub fn size(&self) -> Bounds {
        Bounds {
            objects: self.objects.len(),
            holds: self.holds.len() + self.ranges.len(),
            pins: self.pins.len(),
        }
    }

    fn account(&mut self, gpu: usize) -> Result<&mut Account, LedgerError> {
        self.accounts.get_mut(gpu).ok_or(LedgerError::NoSuchGpu { gpu })
    }

    /// Reserves memory for an allocation, before the driver is asked.
    ///
    /// # Errors
    ///
    /// Where less is left, or the ledger can't remember one more object. The driver must not be asked then.
    pub fn reserve(&mut self, gpu: usize, bytes: u64) -> Result<Reservation, LedgerError> {
        if self.objects.len() >= self.bounds.objects {
            return Err(LedgerError::Full);
        }
        self.account(gpu)?.reserve(bytes)?;
        Ok(Reservation { gpu, bytes })
    }

    /// Ends a reservation: the driver gave no memory, or [`Entry::Commit`] comes next.
    pub fn cancel(&mut self, reservation: Reservation) {
        let Reservation { gpu, bytes } = reservation;
        if let Some(account) = self.accounts.get_mut(gpu) {
            account.cancel(bytes);
        }
    }

    /// Charges memory that the driver gave as `handle` below `parent`, whatever the quota is. An object that had the
    /// same handle was freed: the driver gives no handle to two objects.
    fn charge(&mut self, gpu: usize, bytes: u64, client: Client, parent: Handle, handle: Handle) {
        self.replace(client, handle);
        let Some(account) = self.accounts.get_mut(gpu) else { return };
        account.charge(bytes);
        let id = self.next_charge;
        self.next_charge.0 += 1;
        let epoch = account.epoch;
        self.charges.insert(id, Charge { gpu, bytes, epoch, references: 1, names: 1, pins: 0 });
        // `reserve` has checked that the quota suffices. One object too many does no harm.
        self.objects.insert(
            client,
            handle,
            Object { parent, charge: Some(id), shown: Attribution::Here },
        );
    }

    /// Enters an object without memory, below which other objects may hang. Where the ledger has as many objects as it
    /// can remember, the object isn't entered: what is freed with it then stays charged until its client ends or the
    /// driver is asked.
    pub fn note(&mut self, client: Client, parent: Handle, handle: Handle) {
        self.replace(client, handle);
        if self.objects.len() < self.bounds.objects {
            let object = Object { parent, charge: None, shown: Attribution::Here };
            self.objects.insert(client, handle, object);
        }
    }

    /// Enters `handle` of `client` as another handle for the memory of `source`; `shown` says to whose driver usage the
    /// driver attributes it. The caller must not duplicate if there are as many objects as [`Bounds`] allows: the
    /// memory could outlive its charge.
    pub fn duplicate(
        &mut self,
        source: (Client, Handle),
        client: Client,
        parent: Handle,
        handle: Handle,
        shown: Attribution,
    ) {
        let charge = self.objects.charge(source.0, source.1);
        self.insert_name(client, handle, Object { parent, charge, shown });
    }

    /// Enters `handle` of `client` as another handle for the memory that `hold` keeps alive; the hold stays. If no such
    /// hold exists, the object has no memory. The caller must not import if there are as many objects as [`Bounds`]
    /// allows.
    pub fn import(
        &mut self,
        hold: Hold,
        client: Client,
        parent: Handle,
        handle: Handle,
        shown: Attribution,
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

    /// Frees the object that has `handle`, with all objects below it: the driver gave the handle again. An object that
    /// was never entered may have existed all the time, so what is below it stays.
    fn replace(&mut self, client: Client, handle: Handle) {
        if self.objects.contains(client, handle) {
            self.free(client, handle);
        }
    }

    /// Makes `hold` keep an object's memory alive, also after the object is freed. Does nothing where the object has no
    /// memory. The caller must not hold where there are as many holds as [`Bounds`] allows.
    pub fn hold(&mut self, hold: Hold, client: Client, handle: Handle) {
        let Some(id) = self.objects.charge(client, handle) else { return };
        self.reference(id, false);
        if let Some(before) = self.holds.insert(hold, id) {
            self.loosen_pin(before, ChargePlace::Export(hold));
            self.dereference(before, false);
        }
    }

    /// Ends `hold`.
    pub fn release(&mut self, hold: Hold) {
        if let Some(id) = self.holds.remove(&hold) {
            self.loosen_pin(id, ChargePlace::Export(hold));
            self.dereference(id, false);
        }
    }

    /// Whether `hold` keeps memory alive that has no handle: no object refers to it any more.
    #[must_use]
    pub fn is_unnamed(&self, hold: Hold) -> bool {
        let charge = self.holds.get(&hold).and_then(|id| self.charges.get(id));
        charge.is_some_and(|charge| charge.names == 0)
    }

    /// The places of a file that keep memory, in ascending order.
    pub fn exported(&self, file: u64) -> impl Iterator<Item = u32> {
        let first = Hold::Export { file, index: 0 };
        let last = Hold::Export { file, index: u32::MAX };
        self.holds.range(first..=last).filter_map(|(hold, _)| match hold {
            Hold::Export { index, .. } => Some(*index),
            Hold::Mapping { .. } => None,
        })
    }

    /// Ends all holds of an address space: the space no longer exists.
    pub fn release_space(&mut self, space: u64) {
        let first = Hold::Mapping { space, base: 0 };
        let last = Hold::Mapping { space, base: u64::MAX };
        let gone: Vec<Hold> = self.holds.range(first..=last).map(|(hold, _)| *hold).collect();
        gone.into_iter().for_each(|hold| self.release(hold));
    }

    /// Frees an object and all objects below it. The handle of a client frees the client.
    pub fn free(&mut self, client: Client, handle: Handle) {
        if handle.0 == client.0 {
            return self.close(client);
        }
        for name in self.objects.remove_tree(client, handle) {
            self.remove_name(name);
        }
    }

    /// Removes a client with all its objects.
    pub fn close(&mut self, client: Client) {
        self.holders_changes += u64::from(self.holders.remove(&client).is_some());
        for name in self.objects.remove_client(client) {
            self.remove_name(name);
        }
    }

    fn remove_name(&mut self, RemovedName { id, serial }: RemovedName) {
        self.loosen_pin(id, ChargePlace::Name(serial));
        self.dereference(id, true);
    }

    /// Notes that `process` may hold the client's file open: it made the client, was forked from a process that holds
    /// the file, or was seen to use the client.
    pub fn add_holder(&mut self, client: Client, process: Process) {
        let holders = self.holders.entry(client).or_default();
        if !holders.contains(&process) {
            holders.push(process);
            self.holders_changes += 1;
        }
    }

    /// Takes the driver usage: the bytes that the container's processes hold on a GPU together.
    ///
    /// From then on this driver usage counts, and the reserved bytes on top. It may contain some reserved bytes
    /// already: too much counts for a while then, never too little. Ask the driver before a refusal and after a death.
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
        let Charge { bytes, epoch, references, names, pins, .. } = *charge;
        if let Some(account) = account {
            if name && names == 0 {
                account.hide(bytes);
            }
            if references == 0 {
                // The charge is hidden by now: this call has hidden it, or an earlier one.
                account.end(bytes, epoch);
                account.show(bytes);
            }
        }
        if references == 0 {
            self.charges.remove(&id);
        }
        if !name && references - names == pins {
            self.loosen_pin(id, ChargePlace::Mappings);
        }
    }
}

#[cfg(test)]
mod tests;
