//! What changes a ledger, as data: [`Entry`], for a journal that outlives its owner.
//!
//! A ledger that replays all entries of another, in their order, is the same, but for
//! what was pending: reservations belong to calls, and who replays knows which of those
//! are left. [`Ledger::entries`] writes a ledger as the entries that make it from
//! an empty one. Where entries are stored is not known here.

use std::collections::{BTreeMap, BTreeSet};

use postcard::experimental::max_size::MaxSize;
use serde::{Deserialize, Serialize};

use super::{
    Before, Charge, ChargeId, Client, Handle, Hold, Ledger, Object, Process, Shown, Span, Tree,
    Usage,
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
    /// [`Ledger::adopt`].
    Adopt { hold: Hold, client: Client, parent: Handle, handle: Handle, shown: Shown },
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
    /// [`Ledger::share`].
    Share { client: Client, process: Process },
    /// A process is gone; its clients stay.
    Left { process: Process },
    /// The quota of a GPU is another. Where more is in use, nothing is given until enough was freed.
    Limit { gpu: usize, limit_bytes: u64 },
    /// [`Ledger::reconcile`].
    Reconcile { gpu: usize, driver_bytes: u64 },
    /// The sums of a GPU as they are, but for charges.
    Account { gpu: usize, missed: u64, gone: u64, epoch: u64 },
    /// No charge had this name yet, nor a higher one: the next one gets it.
    NextCharge { id: u64 },
    /// A charge that nothing keeps alive yet.
    Charge { id: u64, gpu: usize, bytes: u64, epoch: u64 },
    /// An object, its charge, and where that shows.
    Object { client: Client, parent: Handle, handle: Handle, charge: Option<u64>, shown: Shown },
    /// A hold, and its charge.
    Held { hold: Hold, charge: u64 },
    /// [`Ledger::map`].
    Map { tree: Tree, span: Span, charge: u64 },
    /// [`Ledger::map_alone`].
    MapAlone { tree: Tree, span: Span, charge: u64 },
    /// [`Ledger::unmake`].
    Unmake { tree: Tree, first: u64, charge: u64 },
    /// [`Ledger::unmap`].
    Unmap { tree: Tree, span: Span },
    /// [`Ledger::close_file`].
    CloseFile { file: u32 },
    /// [`Ledger::stake`].
    Stake { before: Before, own: u64 },
    /// [`Ledger::unstake`].
    Unstake { own: u64 },
    /// [`Ledger::loosen_stakes`].
    LoosenStakes { first: u64, last: u64 },
    /// [`Ledger::lose_stakes`].
    LoseStakes { first: u64, last: u64 },
    /// [`Ledger::bare`].
    Bare { charge: u64 },
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
                // What couldn't be remembered was no change.
                let _ = self.note(client, parent, handle);
            }
            Entry::Adopt { hold, client, parent, handle, shown } => {
                self.adopt(hold, client, parent, handle, shown);
            }
            Entry::Hold { hold, client, handle } => {
                let _ = self.hold(hold, client, handle);
            }
            Entry::Duplicate { source, client, parent, handle, shown } => {
                let _ = self.duplicate(source, client, parent, handle, shown);
            }
            Entry::Release { hold } => self.release(hold),
            Entry::ReleaseSpace { space } => self.release_space(space),
            Entry::Free { client, handle } => self.free(client, handle),
            Entry::Share { client, process } => self.share(client, process),
            Entry::Left { process } => self.left(process),
            Entry::Limit { gpu, limit_bytes } => {
                if let Some(account) = self.accounts.get_mut(gpu) {
                    account.set_limit(limit_bytes);
                }
            }
            Entry::Reconcile { gpu, driver_bytes } => {
                let _ = self.reconcile(gpu, driver_bytes);
            }
            Entry::Account { gpu, missed, gone, epoch } => {
                if let Some(account) = self.accounts.get_mut(gpu) {
                    let [limit, ..] = account.books();
                    account.restore([limit, missed, gone, epoch]);
                }
            }
            Entry::NextCharge { id } => self.next_charge = self.next_charge.max(id),
            Entry::Charge { id, gpu, bytes, epoch } => {
                if let Some(account) = self.accounts.get_mut(gpu) {
                    account.charge(bytes);
                    account.hide(bytes);
                    let charge = Charge { gpu, bytes, epoch, references: 0, names: 0 };
                    self.charges.insert(ChargeId::new(id), charge);
                    self.next_charge = self.next_charge.max(id.saturating_add(1));
                }
            }
            Entry::Object { client, parent, handle, charge, shown } => {
                self.name(
                    client,
                    handle,
                    Object { parent, charge: charge.map(ChargeId::new), shown },
                );
            }
            Entry::Held { hold, charge } => {
                self.reference(ChargeId::new(charge), false);
                self.holds.insert(hold, ChargeId::new(charge));
            }
            Entry::Map { tree, span, charge } => self.map(tree, span, charge),
            Entry::MapAlone { tree, span, charge } => self.map_alone(tree, span, charge),
            Entry::Unmake { tree, first, charge } => self.unmake(tree, first, charge),
            Entry::Unmap { tree, span } => self.unmap(tree, span),
            Entry::CloseFile { file } => self.close_file(file),
            Entry::Stake { before, own } => self.stake(before, own),
            Entry::Unstake { own } => self.unstake(own),
            Entry::LoosenStakes { first, last } => self.loosen_stakes(first, last),
            Entry::LoseStakes { first, last } => self.lose_stakes(first, last),
            Entry::Bare { charge } => self.bare(charge),
        }
    }

    /// The entries that make this ledger of an empty one.
    pub fn entries(&self) -> impl Iterator<Item = Entry> {
        let limits = self.accounts.iter().enumerate().map(|(gpu, account)| {
            let [limit_bytes, ..] = account.books();
            Entry::Limit { gpu, limit_bytes }
        });
        // Later entries name charges: those with the highest names may have ended.
        let next = std::iter::once(Entry::NextCharge { id: self.next_charge });
        let charges = self.charges.iter().map(|(id, charge)| Entry::Charge {
            id: id.number(),
            gpu: charge.gpu,
            bytes: charge.bytes,
            epoch: charge.epoch,
        });
        let objects = self.objects.iter().map(|(client, handle, object)| {
            let Object { parent, charge, shown } = *object;
            Entry::Object { client, parent, handle, charge: charge.map(|id| id.number()), shown }
        });
        let holds =
            self.holds.iter().map(|(hold, id)| Entry::Held { hold: *hold, charge: id.number() });
        let pieces = self.pieces.iter();
        let pieces = pieces.map(|(tree, span, id)| Entry::Map { tree, span, charge: id.number() });
        let bare = self.bare_mappings().map(|charge| Entry::Bare { charge });
        let stakes = self.stakes().map(|(before, _, own)| Entry::Stake { before, own });
        let shares = self.holders.iter().flat_map(|(client, processes)| {
            processes.iter().map(|process| Entry::Share { client: *client, process: *process })
        });
        // Last: charges that end while the rest is made must not change these.
        let accounts = self.accounts.iter().enumerate().map(|(gpu, account)| {
            let [_, missed, gone, epoch] = account.books();
            Entry::Account { gpu, missed, gone, epoch }
        });
        limits
            .chain(next)
            .chain(charges)
            .chain(objects)
            .chain(holds)
            .chain(pieces)
            .chain(bare)
            .chain(stakes)
            .chain(shares)
            .chain(accounts)
    }

    /// A process is gone. What its clients hold stays charged: somebody who was never seen
    /// may have them.
    pub fn left(&mut self, process: Process) {
        for holders in self.holders.values_mut() {
            let before = holders.len();
            holders.retain(|holder| *holder != process);
            self.holders_changes += u64::from(holders.len() < before);
        }
    }

    /// The processes that were seen to hold any client.
    pub fn processes(&self) -> impl Iterator<Item = (Client, Process)> {
        let all = self.holders.iter();
        all.flat_map(|(client, holders)| holders.iter().map(|holder| (*client, *holder)))
    }

    /// Whether `process` was seen to hold `client`.
    #[must_use]
    pub fn holds_client(&self, client: Client, process: Process) -> bool {
        self.holders.get(&client).is_some_and(|holders| holders.contains(&process))
    }

    /// How many clients were seen.
    #[must_use]
    pub fn clients(&self) -> usize {
        self.holders.len()
    }

    /// How often a process was seen to use a client.
    #[must_use]
    pub fn shares(&self) -> usize {
        self.holders.values().map(Vec::len).sum()
    }

    /// Clients that nobody who lives was seen to hold.
    #[must_use]
    pub fn orphans(&self) -> Vec<Client> {
        let orphans = self.holders.iter().filter(|(_, holders)| holders.is_empty());
        orphans.map(|(client, _)| *client).collect()
    }

    /// Clients that nobody who lives was seen to hold, and whose memory counts nowhere.
    #[must_use]
    pub fn weightless_orphans(&self) -> Vec<Client> {
        let weighs = |(client, _, object): (Client, _, &Object)| {
            let charge = object.charge.and_then(|id| self.charges.get(&id));
            charge.is_some_and(|charge| charge.bytes > 0).then_some(client)
        };
        let mut orphans = self.orphans();
        if !orphans.is_empty() {
            let weigh: BTreeSet<Client> = self.objects.iter().filter_map(weighs).collect();
            orphans.retain(|orphan| !weigh.contains(orphan));
        }
        orphans
    }

    /// Whether the object is remembered.
    #[must_use]
    pub fn contains(&self, client: Client, handle: Handle) -> bool {
        self.objects.contains(client, handle)
    }

    /// Which of all objects that were ever entered has that handle now: one that is made anew, of the
    /// same memory even, is another.
    #[must_use]
    pub fn serial_of(&self, client: Client, handle: Handle) -> Option<u32> {
        self.objects.serial(client, handle)
    }

    /// What the memory of an object is, so that it can be told from what has the same
    /// handle later; `None` of objects without memory.
    #[must_use]
    pub fn charge_of(&self, client: Client, handle: Handle) -> Option<u64> {
        self.objects.charge(client, handle).map(|id| id.number())
    }

    /// Bytes of an object's memory that count, on whatever GPU; `None` of what isn't known to
    /// be memory. Memory of the host counts 0.
    #[must_use]
    pub fn bytes_of(&self, client: Client, handle: Handle) -> Option<u64> {
        let id = self.objects.charge(client, handle)?;
        self.charges.get(&id).map(|charge| charge.bytes)
    }

    /// What a hold keeps alive, so that it can be told from what it keeps later.
    #[must_use]
    pub fn held_by(&self, hold: Hold) -> Option<u64> {
        self.holds.get(&hold).map(|id| id.number())
    }

    /// The mappings of a space from `base` on, `length` bytes or that one alone: where, and
    /// what they keep.
    #[must_use]
    pub fn mappings(&self, space: u64, base: u64, length: u64) -> Vec<(u64, u64)> {
        let first = Hold::Mapping { space, base };
        let end = base.saturating_add(length.saturating_sub(1));
        let last = Hold::Mapping { space, base: end };
        let found = self.holds.range(first..=last).filter_map(|(hold, id)| match hold {
            Hold::Mapping { base, .. } => Some((*base, id.number())),
            Hold::Export { .. } => None,
        });
        found.collect()
    }

    /// The pieces of a file of UVM's: which GPU maps, where, and which memory.
    pub fn pieces(&self, file: u32) -> impl Iterator<Item = (Tree, Span, u64)> {
        self.pieces.of_file(file).map(|(tree, span, id)| (tree, span, id.number()))
    }

    /// Whether a piece lies within the span, or reaches into it.
    #[must_use]
    pub fn is_touched(&self, tree: Tree, span: Span) -> bool {
        self.pieces.touched(tree, span).next().is_some()
    }

    /// The files of UVM's that have pieces.
    #[must_use]
    pub fn files(&self) -> BTreeSet<u32> {
        self.pieces.iter().map(|(tree, ..)| tree.file).collect()
    }

    /// Whether a piece of that memory begins there.
    #[must_use]
    pub fn is_mapped(&self, tree: Tree, first: u64, charge: u64) -> bool {
        self.pieces.contains(tree, first, ChargeId::new(charge))
    }

    /// Bytes that show on a GPU by client. A duplicate counts for each.
    #[must_use]
    pub fn charged_by_client(&self, gpu: usize) -> BTreeMap<Client, u64> {
        let mut sums = BTreeMap::new();
        for (client, bytes) in self.shown_on(gpu) {
            let sum: &mut u64 = sums.entry(client).or_default();
            *sum = sum.saturating_add(bytes);
        }
        sums
    }

    /// The objects that name memory of a GPU, and which they are, as [`serial_of`](Self::serial_of)
    /// has it.
    #[must_use]
    pub fn names(&self, gpu: usize) -> Vec<(Client, Handle, u32)> {
        let of_gpu = |id: &ChargeId| self.charges.get(id).is_some_and(|charge| charge.gpu == gpu);
        let names = self.objects.names().filter(|(id, _)| of_gpu(id));
        names.map(|(_, name)| name).collect()
    }

    /// The same of all GPUs.
    #[must_use]
    pub fn names_of_all(&self) -> Vec<(Client, Handle, u32)> {
        self.objects.names().map(|(_, name)| name).collect()
    }

    /// Starts to watch for the most that the driver could show from now on.
    pub fn watch(&mut self) {
        self.accounts.iter_mut().for_each(super::Account::watch);
    }

    /// How a GPU's figures compare with the driver's.
    #[must_use]
    pub fn expected(&self, gpu: usize) -> Option<Expected> {
        let account = self.accounts.get(gpu)?;
        let stray = self.stray_bytes(gpu);
        Some(Expected {
            peak_bytes: account.peak().saturating_add(stray),
            most_bytes: account.most().saturating_add(stray),
            hidden_bytes: account.hidden(),
            pending_bytes: account.pending(),
            charged_bytes: account.charged(),
            usage: account.usage(),
        })
    }
}

/// What the driver is expected to show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// The most that it could have shown as made since [`Ledger::watch`], in bytes.
    pub peak_bytes: u64,
    /// The same with what it shows for no process, in bytes.
    pub most_bytes: u64,
    /// What is charged and the driver shows for no process, in bytes.
    pub hidden_bytes: u64,
    /// What is on its way, in bytes.
    pub pending_bytes: u64,
    /// What is charged, hidden or not, in bytes.
    pub charged_bytes: u64,
    /// What counts.
    pub usage: Usage,
}
