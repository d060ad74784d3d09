//! The changes of a ledger as data ([`Entry`]).
//!
//! A ledger that replays all entries of another one in their order is equal to that one, except for reservations: those
//! belong to calls. [`Ledger::entries`] writes a ledger as the
//! entries that make the same ledger from an empty one. This file doesn't know where entries are stored.

use serde::{Deserialize, Serialize};

use super::{
    Account, Attribution, Charge, ChargeId, Client, Handle, Hold, Ledger, Object, PinPlace,
    Process, Span, Tree,
};

/// A change of a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "fields are named as the arguments of the methods of `Ledger`")]
pub enum Entry {
    /// The driver gave memory as the object `handle` below `parent`.
    Commit { gpu: usize, bytes: u64, client: Client, parent: Handle, handle: Handle },
    /// [`Ledger::note`].
    Note { client: Client, parent: Handle, handle: Handle },
    /// [`Ledger::import`].
    Import { hold: Hold, client: Client, parent: Handle, handle: Handle, shown: Attribution },
    /// [`Ledger::hold`].
    Hold { hold: Hold, client: Client, handle: Handle },
    /// [`Ledger::duplicate`].
    Duplicate {
        source: (Client, Handle),
        client: Client,
        parent: Handle,
        handle: Handle,
        shown: Attribution,
    },
    /// [`Ledger::release`].
    Release { hold: Hold },
    /// [`Ledger::release_space`].
    ReleaseSpace { space: u64 },
    /// [`Ledger::free`].
    Free { client: Client, handle: Handle },
    /// [`Ledger::add_holder`].
    AddHolder { client: Client, process: Process },
    /// [`Ledger::remove_process`].
    RemoveProcess { process: Process },
    /// A GPU has another quota. Where more than the new quota is in use, the container gets nothing until it has freed
    /// enough.
    Limit { gpu: usize, limit_bytes: u64 },
    /// [`Ledger::reconcile`].
    Reconcile { gpu: usize, driver_bytes: u64 },
    /// The sums of a GPU that don't follow from the charges.
    Account { gpu: usize, missed: u64, gone: u64, epoch: u64 },
    /// The next charge gets this id. No charge has had this id or a higher one.
    NextCharge { id: ChargeId },
    /// A charge to which nothing refers yet.
    Charge { id: ChargeId, gpu: usize, bytes: u64, epoch: u64 },
    /// An object, its charge, and to whose driver usage the object is attributed.
    Object {
        client: Client,
        parent: Handle,
        handle: Handle,
        charge: Option<ChargeId>,
        shown: Attribution,
    },
    /// A hold and its charge.
    Held { hold: Hold, charge: ChargeId },
    /// [`Ledger::map`].
    Map { tree: Tree, span: Span, charge: ChargeId },
    /// [`Ledger::map_alone`].
    MapAlone { tree: Tree, span: Span, charge: ChargeId },
    /// [`Ledger::unmap_range`].
    UnmapRange { tree: Tree, first: u64, charge: ChargeId },
    /// [`Ledger::unmap`].
    Unmap { tree: Tree, span: Span },
    /// [`Ledger::close_file`].
    CloseFile { file: u32 },
    /// [`Ledger::pin`].
    Pin { before: PinPlace, number: u64 },
    /// [`Ledger::unpin`].
    RemovePin { number: u64 },
}

impl Ledger {
    /// Makes a change that was made before, in this ledger or in another one.
    ///
    /// An entry that makes no sense changes nothing.
    pub fn replay(&mut self, entry: Entry) {
        match entry {
            Entry::Commit { gpu, bytes, client, parent, handle } => {
                self.charge(gpu, bytes, client, parent, handle);
            }
            Entry::Note { client, parent, handle } => {
                self.note(client, parent, handle);
            }
            Entry::Import { hold, client, parent, handle, shown } => {
                self.import(hold, client, parent, handle, shown);
            }
            Entry::Hold { hold, client, handle } => {
                self.hold(hold, client, handle);
            }
            Entry::Duplicate { source, client, parent, handle, shown } => {
                self.duplicate(source, client, parent, handle, shown);
            }
            Entry::Release { hold } => self.release(hold),
            Entry::ReleaseSpace { space } => self.release_space(space),
            Entry::Free { client, handle } => self.free(client, handle),
            Entry::AddHolder { client, process } => self.add_holder(client, process),
            Entry::RemoveProcess { process } => self.remove_process(process),
            Entry::Limit { gpu, limit_bytes } => {
                if let Some(account) = self.accounts.get_mut(gpu) {
                    account.limit = limit_bytes;
                }
            }
            Entry::Reconcile { gpu, driver_bytes } => {
                self.reconcile(gpu, driver_bytes);
            }
            Entry::Account { gpu, missed, gone, epoch } => {
                if let Some(account) = self.accounts.get_mut(gpu) {
                    *account = Account { missed, gone, epoch, ..*account };
                }
            }
            Entry::NextCharge { id } => self.next_charge = self.next_charge.max(id),
            Entry::Charge { id, gpu, bytes, epoch } => {
                if let Some(account) = self.accounts.get_mut(gpu) {
                    account.charge(bytes);
                    account.hide(bytes);
                    let charge = Charge { gpu, bytes, epoch, references: 0, names: 0, pins: 0 };
                    self.charges.insert(id, charge);
                    self.next_charge = self.next_charge.max(ChargeId(id.0.saturating_add(1)));
                }
            }
            Entry::Object { client, parent, handle, charge, shown } => {
                self.insert_name(client, handle, Object { parent, charge, shown });
            }
            Entry::Held { hold, charge } => {
                self.reference(charge, false);
                self.holds.insert(hold, charge);
            }
            // A span whose end lies before its beginning is no span.
            Entry::Map { span, .. } | Entry::MapAlone { span, .. } | Entry::Unmap { span, .. }
                if span.last < span.first => {}
            Entry::Map { tree, span, charge } => self.map(tree, span, charge),
            Entry::MapAlone { tree, span, charge } => self.map_alone(tree, span, charge),
            Entry::UnmapRange { tree, first, charge } => self.unmap_range(tree, first, charge),
            Entry::Unmap { tree, span } => self.unmap(tree, span),
            Entry::CloseFile { file } => self.close_file(file),
            Entry::Pin { before, number } => self.pin(before, number),
            Entry::RemovePin { number } => self.unpin(number),
        }
    }

    /// The entries that make this ledger from an empty one.
    pub fn entries(&self) -> impl Iterator<Item = Entry> {
        let limits = self.accounts.iter().enumerate();
        let limits = limits.map(|(gpu, account)| Entry::Limit { gpu, limit_bytes: account.limit });
        // The later entries name charges. The charges with the highest ids may have ended already.
        let next = core::iter::once(Entry::NextCharge { id: self.next_charge });
        let charges = self.charges.iter().map(|(id, charge)| Entry::Charge {
            id: *id,
            gpu: charge.gpu,
            bytes: charge.bytes,
            epoch: charge.epoch,
        });
        let objects = self.objects.iter().map(|(client, handle, object)| {
            let Object { parent, charge, shown } = *object;
            Entry::Object { client, parent, handle, charge, shown }
        });
        let holds = self.holds.iter();
        let holds = holds.map(|(hold, charge)| Entry::Held { hold: *hold, charge: *charge });
        let ranges = self.ranges.iter();
        let ranges = ranges.map(|(tree, span, charge)| Entry::Map { tree, span, charge });
        let pins = self.pins().map(|(before, _, number)| Entry::Pin { before, number });
        let shares = self.holders.iter().flat_map(|(client, processes)| {
            processes.iter().map(|process| Entry::AddHolder { client: *client, process: *process })
        });
        // These entries come last: a charge that ends during the replay of the others must not change these sums.
        let accounts = self.accounts.iter().enumerate().map(|(gpu, account)| {
            let Account { missed, gone, epoch, .. } = *account;
            Entry::Account { gpu, missed, gone, epoch }
        });
        limits
            .chain(next)
            .chain(charges)
            .chain(objects)
            .chain(holds)
            .chain(ranges)
            .chain(pins)
            .chain(shares)
            .chain(accounts)
    }
}
