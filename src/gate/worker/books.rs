//! What is known of the container: its ledger, processes, ranges and devices.
//!
//! One at a time has them, and never while a call is in the driver or in the caller's
//! memory. What must outlive this worker is changed by [`Books::write`] alone, which
//! puts it into the journal too.

mod changes;
mod ranges;

pub(super) use self::ranges::Space;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use self::changes::{Change, Naming};
use super::groups::Groups;
use super::makers::Makers;
use super::mapped;
use super::memories::Mapped;
use super::memory::{Log, Memory, SetAside, Slot};
use super::trace::Object;
use crate::gate::audit::Named;
use crate::gate::journal::{HALF_BYTES, RECORD_BYTES, Record, SLOTS, Stage};
use crate::gate::settings::{Gpu, Identity, Node, NodeKind};
use crate::ledger::{
    Bounds, Client, Entry, Handle, Hold, Ledger, Process, Reservation, Span, Tree,
};

/// How much the container may make us remember.
pub(super) const BOUNDS: Bounds = Bounds { objects: 32768, holds: 16384, stakes: 16384 };

/// Clients that are known by their users, and users of clients; of more, all is known but who uses
/// them.
const MOST_CLIENTS: usize = 16384;
const MOST_SHARES: usize = 32768;

/// Processes.
const MOST_PROCESSES: usize = 4096;

/// Ranges that are no managed memory, and nodes of UVM's.
const MOST_RANGES: usize = 16384;
const MOST_NODES: usize = 64;

/// Devices and subdevices whose GPU is known; of more, it's asked for again.
const MOST_DEVICES: usize = 4096;

/// No client has this handle; who is seen with it was seen at all.
pub(super) const ANYBODY: Client = Client(0);

/// A call of a worker before.
#[derive(Debug)]
struct Inherited {
    /// What it has set aside: until it is made again, or undone, the driver may have given it,
    /// and no charge tells so.
    reservation: Option<Reservation>,
    /// What it makes, or frees, and the driver may still be at.
    object: (Client, Handle),
}

/// The books.
#[derive(Debug)]
pub(super) struct Books {
    pub(super) ledger: Ledger,
    log: Log,
    /// Seen, and not known to be gone.
    pub(super) processes: BTreeSet<Process>,
    /// By [`Space`] and first address: bytes.
    ranges: BTreeMap<(u64, u64), u64>,
    /// Ranges that were withdrawn lately, or announced anew: when, space, first address and bytes.
    withdrawn: VecDeque<(Instant, u64, Mapped)>,
    /// Nodes of UVM's, by `st_dev` and `st_ino`.
    nodes: BTreeSet<(u64, u64)>,
    /// Who initialized which file of UVM's.
    pub(super) makers: Makers,
    /// Channel groups.
    pub(super) groups: Groups,
    /// By client and handle: the container's GPU.
    devices: HashMap<(u32, u32), usize>,
    /// Calls of workers before, by their slots.
    inherited: HashMap<usize, Inherited>,
    /// What they hold while they are underway, until all of them are over.
    orphaned: Vec<Hold>,
    /// Calls in the driver that change what is charged.
    pub(super) underway: usize,
    /// Of those, as many as an audit waited for in vain.
    stuck: usize,
    /// How often such calls began or ended.
    pub(super) generation: u64,
    /// Objects that the driver frees now, or makes where a call chose its handle.
    changing: Vec<Change>,
    /// How many frees have begun.
    frees: u64,
    /// Calls whose objects must stay what they are, or that wait until they do.
    naming: Vec<Naming>,
    /// Audits that wait for calls that change what is charged: none may begin, before.
    pub(super) pauses: usize,
    /// Until when they wait, which may have to be given up.
    pub(super) paused_until: Option<Instant>,
    /// When the driver is to be asked, though nobody waits for it.
    pub(super) due: [Option<Instant>; 2],
    /// What imports are about to name anew, in bytes.
    importing_bytes: u64,
}

impl Books {
    /// The books as the journal has them.
    pub(super) fn open(memory: &'static Memory, gpus: &[Gpu], nodes: &[Node]) -> Self {
        let limits: Vec<u64> = gpus.iter().map(|gpu| gpu.limit_bytes).collect();
        let log = Log::open(memory);
        let records: Vec<Record> = log.records().collect();
        let mut books = Books {
            ledger: Ledger::new(&limits, BOUNDS),
            log,
            processes: BTreeSet::new(),
            ranges: BTreeMap::new(),
            withdrawn: VecDeque::new(),
            nodes: BTreeSet::new(),
            makers: Makers::default(),
            groups: Groups::default(),
            devices: HashMap::new(),
            inherited: HashMap::new(),
            orphaned: Vec::new(),
            underway: 0,
            stuck: 0,
            generation: 0,
            changing: Vec::new(),
            frees: 0,
            naming: Vec::new(),
            pauses: 0,
            paused_until: None,
            due: [None; 2],
            importing_bytes: 0,
        };
        for node in nodes.iter().filter(|node| node.kind == NodeKind::Uvm) {
            if let Identity::File { device, inode } = node.identity {
                books.nodes.insert((device, inode));
            }
        }
        records.into_iter().for_each(|record| books.replay(record));
        books.rewrite();
        books.orphaned = books.underway();
        (0..SLOTS).for_each(|slot| books.inherit(memory.slot(slot)));
        books.forget_underway();
        books
    }

    /// Takes over a call of the worker before, and what it has set aside.
    fn inherit(&mut self, slot: Slot<'_>) {
        if slot.notice().id == 0 || slot.stage() == Stage::Decided {
            return;
        }
        let Object { client, handle, was_there, .. } = slot.executed();
        // It was entered already, and only the caller doesn't know.
        let is_charged = |client| {
            let known = self.ledger.contains(Client(client), Handle(handle));
            slot.stage() == Stage::Executing && !was_there && known
        };
        let memory = slot.was_set_aside().filter(|memory| !is_charged(memory.client));
        let reservation = memory.and_then(|SetAside { gpu, bytes, .. }| {
            self.ledger.reserve_again(gpu, bytes).ok() // no such GPU, then
        });
        let object = (Client(client), Handle(handle));
        self.inherited.insert(slot.number(), Inherited { reservation, object });
        self.begin_free(object.0, object.1);
        self.begin();
    }

    /// Whether the slot's call is one of the worker before, with what that had set aside.
    pub(super) fn goes_on(&self, slot: Slot<'_>) -> bool {
        self.inherited.contains_key(&slot.number())
    }

    /// The call of the worker before that had this slot is made again, or is over.
    pub(super) fn disinherit(&mut self, slot: Slot<'_>) {
        if let Some(Inherited { reservation, object }) = self.inherited.remove(&slot.number()) {
            if let Some(reservation) = reservation {
                self.ledger.cancel(reservation);
            }
            self.end_free(object.0, object.1);
            self.end();
            self.forget_underway();
        }
    }

    /// What calls on their way through the driver hold.
    fn underway(&self) -> Vec<Hold> {
        let holds = self.ledger.entries().filter_map(|entry| match entry {
            Entry::Held { hold: hold @ Hold::Underway(_), .. } => Some(hold),
            _ => None,
        });
        holds.collect()
    }

    /// Calls of the worker before are no more underway, once all of them are over.
    fn forget_underway(&mut self) {
        if self.inherited.is_empty() {
            for hold in std::mem::take(&mut self.orphaned) {
                self.enter(Entry::Release { hold });
            }
        }
    }

    fn replay(&mut self, record: Record) {
        match record {
            Record::Ledger(entry) => {
                match entry {
                    Entry::Share { client: ANYBODY, process } => {
                        self.processes.insert(process);
                    }
                    Entry::Left { process } => {
                        self.processes.remove(&process);
                    }
                    Entry::CloseFile { file } => self.makers.close(file),
                    _ => {}
                }
                self.ledger.replay(entry);
            }
            Record::Announce { space, base, length } => {
                let before = self.ranges.insert((space, base), length);
                self.withdrew(space, base, before);
            }
            Record::Withdraw { space, base } => {
                let before = self.ranges.remove(&(space, base));
                self.withdrew(space, base, before);
            }
            Record::Node { device, inode } => {
                self.nodes.insert((device, inode));
            }
            Record::Initialize { .. } | Record::Initialized { .. } | Record::Bound { .. } => {
                self.makers.replay(record);
            }
            Record::Group { .. } | Record::Ungroup { .. } => self.groups.replay(record),
        }
    }

    /// Changes what must outlive this worker.
    pub(super) fn write(&mut self, record: Record) {
        self.log.append(record);
        self.replay(record);
        if self.log.is_due() {
            self.rewrite();
        }
    }

    /// Puts what is known now in the place of how it came about.
    fn rewrite(&mut self) {
        let nodes = self.nodes.iter();
        let nodes = nodes.map(|(device, inode)| Record::Node { device: *device, inode: *inode });
        let ledger = self.ledger.entries().map(Record::Ledger);
        let ranges = ranges::records(&self.ranges);
        let others = self.makers.records().chain(self.groups.records());
        self.log.rewrite(ledger.chain(ranges).chain(nodes).chain(others));
    }

    pub(super) fn enter(&mut self, entry: Entry) {
        self.write(Record::Ledger(entry));
    }

    /// Nothing is mapped there any more.
    pub(super) fn unmapped(&mut self, tree: Tree, span: Span) {
        if self.ledger.is_touched(tree, span) {
            self.enter(Entry::Unmap { tree, span });
        }
    }

    /// A process called. `false` where there are more than can be known.
    pub(super) fn saw(&mut self, process: Process) -> bool {
        if self.processes.contains(&process) {
            return true;
        }
        if self.processes.len() >= MOST_PROCESSES {
            return false;
        }
        self.enter(Entry::Share { client: ANYBODY, process });
        true
    }

    /// A process used a client.
    pub(super) fn shares(&mut self, client: u32, process: Process) {
        let client = Client(client);
        if client == ANYBODY || self.ledger.holds_client(client, process) {
            return;
        }
        if self.ledger.clients() < MOST_CLIENTS && self.ledger.shares() < MOST_SHARES {
            self.enter(Entry::Share { client, process });
        }
    }

    /// An object without memory is there, below what is known to be.
    pub(super) fn note(&mut self, client: u32, parent: u32, handle: u32) {
        let (client, parent, handle) = (Client(client), Handle(parent), Handle(handle));
        if self.ledger.size().objects < BOUNDS.objects {
            self.enter(Entry::Note { client, parent, handle });
        }
    }

    /// The GPU of a device or subdevice, where it is known.
    pub(super) fn gpu(&self, client: u32, handle: u32) -> Option<usize> {
        self.devices.get(&(client, handle)).copied()
    }

    /// A device or subdevice is of that GPU.
    pub(super) fn learn(&mut self, client: u32, handle: u32, gpu: usize) {
        if self.devices.len() >= MOST_DEVICES {
            self.devices.clear();
        }
        self.devices.insert((client, handle), gpu);
    }

    /// Nothing is known of what has that handle.
    pub(super) fn unlearn(&mut self, client: u32, handle: u32) {
        self.devices.remove(&(client, handle));
    }

    /// A client begins or is over: none of its devices is known.
    pub(super) fn unlearn_all(&mut self, client: u32) {
        self.devices.retain(|(of, _), _| *of != client);
    }

    /// Something of a client was freed, and the ledger knows it: devices that it doesn't have any
    /// more are to be asked for again.
    pub(super) fn unlearn_freed(&mut self, client: u32) {
        let ledger = &self.ledger;
        let stays = |handle| ledger.contains(Client(client), Handle(handle));
        self.devices.retain(|(of, handle), _| *of != client || stays(*handle));
    }

    /// A node of UVM's was seen. `false` where there are more than can be known.
    pub(super) fn saw_node(&mut self, (device, inode): (u64, u64)) -> bool {
        if self.nodes.contains(&(device, inode)) {
            return true;
        }
        if self.nodes.len() >= MOST_NODES {
            return false;
        }
        self.write(Record::Node { device, inode });
        true
    }

    /// Whether that is a node of UVM's.
    pub(super) fn is_node(&self, place: (u64, u64)) -> bool {
        self.nodes.contains(&place)
    }

    /// A call that changes what is charged goes into the driver, or comes back.
    pub(super) fn begin(&mut self) {
        self.underway += 1;
        self.generation += 1;
    }

    pub(super) fn end(&mut self) {
        self.underway = self.underway.saturating_sub(1);
        self.stuck = self.stuck.min(self.underway);
        self.generation += 1;
    }

    /// Whether there are such calls that may soon be back.
    pub(super) fn is_moving(&self) -> bool {
        self.underway > self.stuck
    }

    /// Those that are in the driver now hang there.
    pub(super) fn wait_no_more(&mut self) {
        self.stuck = self.underway;
    }

    /// The driver is to be asked soon, and once more later.
    pub(super) fn schedule(&mut self, now: Instant) -> bool {
        let [soon, later] = self.due;
        let first = soon.is_none();
        self.due = [
            soon.or(Some(now + Duration::from_millis(5))),
            later.max(Some(now + Duration::from_millis(200))),
        ];
        first
    }

    /// An import of so many bytes goes into the driver.
    pub(super) fn begin_import(&mut self, bytes: u64) {
        self.importing_bytes = self.importing_bytes.saturating_add(bytes);
    }

    /// It is back, and entered.
    pub(super) fn end_import(&mut self, bytes: u64) {
        self.importing_bytes = self.importing_bytes.saturating_sub(bytes);
    }

    /// The names that a GPU's figures may show from now on, until a call begins. Those that a worker
    /// before was about to make aren't known.
    pub(super) fn named(&self, gpu: usize) -> Named {
        let known_bytes = self.ledger.named_bytes(gpu);
        let pending = self.ledger.expected(gpu).map_or(0, |expected| expected.pending_bytes);
        let underway = [self.ledger.underway_bytes(), self.importing_bytes, pending];
        let most_bytes = underway.into_iter().fold(known_bytes, u64::saturating_add);
        let (is_still, are_needed) = (self.inherited.is_empty(), self.ledger.lacks_stakes());
        Named { known_bytes, most_bytes, is_still, are_needed }
    }

    /// Whether nobody may begin a call that changes what is charged.
    pub(super) fn is_paused(&self) -> bool {
        self.pauses > 0 && self.paused_until.is_some_and(|until| until > Instant::now())
    }

    /// The driver is to be asked by then.
    pub(super) fn schedule_by(&mut self, at: Instant) {
        let [soon, _] = &mut self.due;
        *soon = Some(soon.map_or(at, |soon| soon.min(at)));
    }

    /// Whether nothing is charged, and nothing known that could be.
    pub(super) fn has_nothing(&self) -> bool {
        let usages = (0..).map_while(|gpu| self.ledger.usage(gpu));
        let size = self.ledger.size();
        size.objects + size.holds == 0 && usages.into_iter().all(|usage| usage.used_bytes == 0)
    }

    /// Processes that live on in no process's list are gone, and nobody is left: nothing is but
    /// what files keep that it was exported to, and those that can't be ended.
    pub(super) fn close_all(&mut self, kept: &BTreeSet<u32>) {
        let clients: BTreeSet<Client> = self
            .ledger
            .entries()
            .filter_map(|entry| match entry {
                Entry::Object { client, .. } | Entry::Share { client, .. } => Some(client),
                _ => None,
            })
            .collect();
        for client in clients {
            self.enter(Entry::Free { client, handle: Handle(client.0) });
        }
        let holds: Vec<Hold> = self
            .ledger
            .entries()
            .filter_map(|entry| match entry {
                Entry::Held { hold: Hold::Export { .. }, .. } => None,
                Entry::Held { hold, .. } => Some(hold),
                _ => None,
            })
            .collect();
        for hold in holds {
            self.enter(Entry::Release { hold });
        }
        for file in self.ledger.files() {
            if !kept.contains(&file) {
                self.close_file(file);
            }
        }
        // What the driver had showed of theirs, and nobody is asked for again.
        let gpus = (0..).map_while(|gpu| Some((gpu, self.ledger.expected(gpu)?.hidden_bytes)));
        for (gpu, driver_bytes) in gpus.collect::<Vec<_>>() {
            self.enter(Entry::Reconcile { gpu, driver_bytes });
        }
        self.devices.clear();
    }
}

/// The most records that make what is kept from nothing leave an eighth of a half for what changes until
/// it's written anew: objects and holds with their charges, stakes, what is mapped bare, users, ranges,
/// nodes, and makers of files.
const _: () = {
    let ledger = 2 * BOUNDS.objects + 3 * BOUNDS.holds + BOUNDS.stakes;
    let users = MOST_SHARES + MOST_PROCESSES + MOST_RANGES + MOST_NODES + 3 * mapped::MOST;
    assert!((ledger + users) * RECORD_BYTES <= HALF_BYTES / 8 * 7);
};

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;
    use crate::gate::journal::{HEAD_BYTES, JOURNAL_BYTES};

    pub(super) fn journal() -> File {
        let journal = File::from(memfd_create("journal", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&journal, JOURNAL_BYTES as u64).unwrap();
        journal
    }

    pub(super) fn open(journal: &File) -> (Books, &'static Memory) {
        let gpu = Gpu { index: 0, uuid: String::new(), minor: 0, total_bytes: 9, limit_bytes: 9 };
        let memory: &'static Memory = Box::leak(Box::new(Memory::map(journal).unwrap()));
        (Books::open(memory, std::slice::from_ref(&gpu), &[]), memory)
    }

    #[test]
    fn who_uses_what_is_known_of_so_many_and_of_the_next_worker_too() {
        let journal = journal();
        let (mut books, _) = open(&journal);
        for client in 1..=20 {
            (0..2000).for_each(|process| books.shares(client, Process(process)));
        }
        assert_eq!(books.ledger.shares(), MOST_SHARES);
        books.enter(Entry::Limit { gpu: 0, limit_bytes: 7 });
        let (books, _) = open(&journal);
        assert_eq!(books.ledger.shares(), MOST_SHARES);
        assert_eq!(books.ledger.usage(0).unwrap().limit_bytes, 7);
    }

    #[test]
    fn what_a_call_of_a_worker_before_names_counts_until_all_such_calls_are_over() {
        let journal = journal();
        let open = || open(&journal);
        let used = |books: &Books| books.ledger.usage(0).unwrap().used_bytes;
        let (client, handle) = (Client(1), Handle(2));

        let (mut books, memory) = open();
        let parent = Handle(client.0);
        books.enter(Entry::Commit { gpu: 0, bytes: 5, client, parent, handle });
        books.enter(Entry::Hold { hold: Hold::Underway(7), client, handle });
        // A notification begins with its id.
        journal.write_all_at(&1_u64.to_ne_bytes(), HEAD_BYTES as u64).unwrap();
        memory.slot(0).executing(Object::one(1, 3, false));

        let (mut books, _) = open();
        books.enter(Entry::Free { client, handle });
        assert_eq!(used(&books), 5);
        let (mut books, memory) = open();
        assert_eq!((used(&books), books.underway), (5, 1));
        books.disinherit(memory.slot(0));
        assert_eq!((used(&books), books.underway), (0, 0));
        assert_eq!(used(&open().0), 0);
    }
}
