//! What changes a ledger, as data: [`Entry`], for a journal that outlives its owner.
//!
//! A ledger that replays all entries of another, in their order, is the same, but for
//! what was pending: reservations belong to calls, and who replays knows which of those
//! are left. [`Ledger::entries`] writes a ledger as the entries that make it from
//! an empty one. Where entries are stored is not known here.

use postcard::experimental::max_size::MaxSize;
use serde::{Deserialize, Serialize};

use super::{
    Account, Charge, ChargeId, Client, Handle, Hold, Ledger, Object, Process, Shown, Span,
    StakePlace, Tree,
};

/// A change of a ledger. A new kind goes to the end, and no kind's fields change: a journal has them by
/// their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, MaxSize)]
#[allow(missing_docs, reason = "fields are named as the arguments of the methods of `Ledger`")]
pub enum Entry {
    /// The driver gave memory, as `handle` below `parent`.
    Commit { gpu: usize, bytes: u64, client: Client, parent: Handle, handle: Handle },
    /// [`Ledger::note`].
    Note { client: Client, parent: Handle, handle: Handle },
    /// [`Ledger::import`].
    Import { hold: Hold, client: Client, parent: Handle, handle: Handle, shown: Shown },
    /// [`Ledger::hold`].
    Hold { hold: Hold, client: Client, handle: Handle },
    /// [`Ledger::duplicate`].
    Duplicate {
        source: (Client, Handle),
        client: Client,
        parent: Handle,
        handle: Handle,
        shown: Shown,
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
    /// The quota of a GPU is another. Where more is in use, nothing is given until enough was freed.
    Limit { gpu: usize, limit_bytes: u64 },
    /// [`Ledger::reconcile`].
    Reconcile { gpu: usize, driver_bytes: u64 },
    /// The sums of a GPU as they are, but for charges.
    Account { gpu: usize, missed: u64, gone: u64, epoch: u64 },
    /// No charge had this name yet, nor a higher one: the next one gets it.
    NextCharge { id: ChargeId },
    /// A charge that nothing keeps alive yet.
    Charge { id: ChargeId, gpu: usize, bytes: u64, epoch: u64 },
    /// An object, its charge, and where that shows.
    Object {
        client: Client,
        parent: Handle,
        handle: Handle,
        charge: Option<ChargeId>,
        shown: Shown,
    },
    /// A hold, and its charge.
    Held { hold: Hold, charge: ChargeId },
    /// [`Ledger::map`].
    Map { tree: Tree, span: Span, charge: ChargeId },
    /// [`Ledger::map_alone`].
    MapAlone { tree: Tree, span: Span, charge: ChargeId },
    /// [`Ledger::unmap_piece`].
    UnmapPiece { tree: Tree, first: u64, charge: ChargeId },
    /// [`Ledger::unmap`].
    Unmap { tree: Tree, span: Span },
    /// [`Ledger::close_file`].
    CloseFile { file: u32 },
    /// [`Ledger::stake`].
    Stake { before: StakePlace, number: u64 },
    /// [`Ledger::unstake`].
    Unstake { number: u64 },
    /// [`Ledger::remove_stakes`].
    RemoveStakes { first: u64, last: u64 },
}

impl Ledger {
    /// Makes a change that was made before, here or in another ledger.
    ///
    /// An entry that says nothing sensible changes nothing.
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
                    let charge = Charge { gpu, bytes, epoch, references: 0, names: 0, stakes: 0 };
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
            // Addresses that end before they begin are none.
            Entry::Map { span, .. } | Entry::MapAlone { span, .. } | Entry::Unmap { span, .. }
                if span.last < span.first => {}
            Entry::Map { tree, span, charge } => self.map(tree, span, charge),
            Entry::MapAlone { tree, span, charge } => self.map_alone(tree, span, charge),
            Entry::UnmapPiece { tree, first, charge } => self.unmap_piece(tree, first, charge),
            Entry::Unmap { tree, span } => self.unmap(tree, span),
            Entry::CloseFile { file } => self.close_file(file),
            Entry::Stake { before, number } => self.stake(before, number),
            Entry::Unstake { number } => self.unstake(number),
            Entry::RemoveStakes { first, last } => self.remove_stakes(first, last),
        }
    }

    /// The entries that make this ledger of an empty one.
    pub fn entries(&self) -> impl Iterator<Item = Entry> {
        let limits = self.accounts.iter().enumerate();
        let limits = limits.map(|(gpu, account)| Entry::Limit { gpu, limit_bytes: account.limit });
        // Later entries name charges: those with the highest names may have ended.
        let next = std::iter::once(Entry::NextCharge { id: self.next_charge });
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
        let pieces = self.pieces.iter();
        let pieces = pieces.map(|(tree, span, charge)| Entry::Map { tree, span, charge });
        let stakes = self.stakes().map(|(before, _, number)| Entry::Stake { before, number });
        let shares = self.holders.iter().flat_map(|(client, processes)| {
            processes.iter().map(|process| Entry::AddHolder { client: *client, process: *process })
        });
        // Last: charges that end while the rest is made must not change these.
        let accounts = self.accounts.iter().enumerate().map(|(gpu, account)| {
            let Account { missed, gone, epoch, .. } = *account;
            Entry::Account { gpu, missed, gone, epoch }
        });
        limits
            .chain(next)
            .chain(charges)
            .chain(objects)
            .chain(holds)
            .chain(pieces)
            .chain(stakes)
            .chain(shares)
            .chain(accounts)
    }
}
