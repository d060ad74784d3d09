//! What is known of the container: its ledger, processes, ranges and devices.
//!
//! One at a time has them, and never while a call is in the driver or in the caller's
//! memory. What must outlive this worker is changed by [`Books::write`] alone, which
//! puts it into the journal too.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::makers::Makers;
use super::mapped;
use super::memories::Mapped;
use super::memory::{Log, Memory, SetAside, Slot};
use super::trace::Object;
use crate::gate::audit::Named;
use crate::gate::journal::{HALF_BYTES, RECORD_BYTES, Record, SLOTS, Stage};
use crate::gate::settings::{Gpu, Identity, Node, NodeKind};
use crate::ledger::{
    Bounds, Client, Entry, Handle, Hold, Ledger, MOST_VEILED, Process, Reservation, Span, Tree,
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

/// Ranges that were withdrawn while mappings are looked at; of more, the oldest are forgotten.
const MOST_WITHDRAWN: usize = 4096;

/// Devices and subdevices whose GPU is known; of more, it's asked for again.
const MOST_DEVICES: usize = 4096;

/// No client has this handle; who is seen with it was seen at all.
pub(super) const ANYBODY: Client = Client(0);

/// The bits that tell managed ranges of a process from those that a file of UVM's has: no process
/// has such a number, and no range such an address.
const MANAGED: u64 = 1 << 63;
const OF_FILE: u64 = 1 << 62;

/// What ranges are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Space {
    /// A process, which mapped managed memory there.
    Managed(Process),
    /// A file of UVM's that is kept, by its number: it had the driver make them, and what is
    /// mapped there by it is no managed memory.
    File(u32),
}

impl Space {
    /// Its number in the journal, and in [`Hold::Mapping`].
    pub(super) fn number(self) -> u64 {
        match self {
            Self::Managed(process) => process.0 | MANAGED,
            Self::File(number) => u64::from(number) | OF_FILE,
        }
    }
}

/// A call of a worker before.
#[derive(Debug)]
struct Inherited {
    /// What it has set aside: until it is made again, or undone, the driver may have given it,
    /// and no charge tells so.
    reservation: Option<Reservation>,
    /// What it makes, or frees, and the driver may still be at.
    object: (Client, Handle),
}

/// Objects that a call names, to the driver and in the books: they may not say the same while another
/// call changes what has that name.
#[derive(Debug)]
struct Naming {
    number: u64,
    client: Client,
    objects: Vec<Handle>,
    /// What a worker before was about to change, in the same call.
    spares: (Client, Handle),
    /// Whether it makes one of them: no other call makes that too, unless somebody frees it.
    is_making: bool,
    /// Frees wait for it a while.
    is_export: bool,
    /// One of them was made, or freed, since it was last looked at, or may have been freed with something
    /// that they hang below.
    is_moved: bool,
    /// One of them was itself, or with what they are known to hang below.
    is_touched: bool,
    /// Another call began to make what this one makes: it can, where that was freed.
    is_remade: bool,
}

/// A call that changes what has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Change {
    client: Client,
    handle: Handle,
    /// Who names it that makes it; `None` frees it and what hangs below.
    maker: Option<u64>,
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
        let ranges = ranges(&self.ranges);
        self.log.rewrite(ledger.chain(ranges).chain(nodes).chain(self.makers.records()));
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

    /// How many frees have begun; `None` where one of that client's is on its way.
    pub(super) fn frees(&self, client: Client) -> Option<u64> {
        let frees = |change: &Change| change.maker.is_none() && change.client == client;
        (!self.changing.iter().any(frees)).then_some(self.frees)
    }

    /// Remembers a range. `false` where it can't be.
    pub(super) fn announce(&mut self, space: Space, base: u64, length: u64) -> bool {
        let room = self.has_room_for(space, base, length);
        if room {
            self.write(Record::Announce { space: space.number(), base, length });
        }
        room
    }

    /// Whether a range can be remembered.
    pub(super) fn has_room_for(&self, space: Space, base: u64, length: u64) -> bool {
        let room = self.ranges.len() < MOST_RANGES;
        let fits = base & MANAGED == 0 && length > 0;
        fits && (room || self.ranges.contains_key(&(space.number(), base)))
    }

    /// Forgets a range.
    pub(super) fn withdraw(&mut self, space: Space, base: u64) {
        if self.ranges.contains_key(&(space.number(), base)) {
            self.write(Record::Withdraw { space: space.number(), base });
        }
    }

    /// The range that `base` lies in: its first address and bytes.
    pub(super) fn range(&self, space: Space, base: u64) -> Option<(u64, u64)> {
        let space = space.number();
        let (key, length) = self.ranges.range((space, 0)..=(space, base)).next_back()?;
        (base - key.1 < *length).then_some((key.1, *length))
    }

    fn withdrew(&mut self, space: u64, base: u64, length: Option<u64>) {
        let Some(length) = length else { return };
        while self.withdrawn.len() >= MOST_WITHDRAWN {
            self.withdrawn.pop_front();
        }
        self.withdrawn.push_back((Instant::now(), space, (base, base.saturating_add(length))));
    }

    /// Nobody asks any more for what was withdrawn before.
    pub(super) fn forget_withdrawn(&mut self, before: Instant) {
        let first = self.withdrawn.partition_point(|(at, ..)| *at < before);
        self.withdrawn.drain(..first);
    }

    /// Whether a mapping lies in a range, or in several that lie one after the other: the kernel lists
    /// neighbours as one, of files that don't mind.
    pub(super) fn covers(&self, space: Space, mapped: Mapped) -> bool {
        reaches(mapped, |at| self.end_at(space, at))
    }

    /// Where a range ends that has an address.
    fn end_at(&self, space: Space, at: u64) -> Option<u64> {
        self.range(space, at).map(|(base, length)| base.saturating_add(length))
    }

    /// Whether it does, or did at some time since then: a list of mappings is older than the books.
    pub(super) fn covered(&self, space: Space, mapped: Mapped, since: Instant) -> bool {
        reaches(mapped, |at| {
            let now = self.end_at(space, at);
            now.or_else(|| self.withdrawn_end(at, since, |of| of == space.number()))
        })
    }

    /// Whether it lay in one of whatever space, which was withdrawn since.
    pub(super) fn was_covered(&self, mapped: Mapped, since: Instant) -> bool {
        reaches(mapped, |at| self.withdrawn_end(at, since, |_| true))
    }

    /// Where a range of such a space ended that had an address, and was withdrawn since then.
    fn withdrawn_end(&self, at: u64, since: Instant, of: impl Fn(u64) -> bool) -> Option<u64> {
        let late = self.withdrawn.iter().rev().take_while(|(when, ..)| *when >= since);
        let had = late.filter(|(_, space, (from, to))| of(*space) && (*from..*to).contains(&at));
        had.map(|(.., (_, to))| *to).max()
    }

    /// The ranges of a space: first addresses and bytes.
    pub(super) fn ranges_of(&self, space: Space) -> Vec<(u64, u64)> {
        let space = space.number();
        let all = self.ranges.range((space, 0)..=(space, u64::MAX));
        all.map(|((_, base), length)| (*base, *length)).collect()
    }

    /// How many ranges files have.
    pub(super) fn ranges_of_files(&self) -> usize {
        self.ranges.range((OF_FILE, 0)..(MANAGED, 0)).count()
    }

    /// A file of UVM's is closed, or is as good as closed: it maps nothing, and has no ranges.
    pub(super) fn close_file(&mut self, file: u32) {
        self.enter(Entry::CloseFile { file });
        for (base, _) in self.ranges_of(Space::File(file)) {
            self.withdraw(Space::File(file), base);
        }
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

    /// A free goes into the driver.
    pub(super) fn begin_free(&mut self, client: Client, handle: Handle) {
        self.frees += 1;
        self.begin_change(Change { client, handle, maker: None });
    }

    /// It is back.
    pub(super) fn end_free(&mut self, client: Client, handle: Handle) {
        self.end_change(Change { client, handle, maker: None });
    }

    /// A call that makes an object of a handle goes into the driver.
    pub(super) fn begin_make(&mut self, number: u64, client: Client, handle: Handle) {
        self.begin_change(Change { client, handle, maker: Some(number) });
    }

    /// It is back, and entered.
    pub(super) fn end_make(&mut self, number: u64, client: Client, handle: Handle) {
        self.end_change(Change { client, handle, maker: Some(number) });
    }

    fn begin_change(&mut self, change: Change) {
        self.changing.push(change);
        let ledger = &self.ledger;
        for naming in &mut self.naming {
            naming.is_moved |= moves(ledger, naming, change);
            naming.is_touched |= touches(ledger, naming, change);
            naming.is_remade |= remakes(naming, change);
        }
    }

    fn end_change(&mut self, change: Change) {
        if let Some(at) = self.changing.iter().position(|of| *of == change) {
            self.changing.swap_remove(at);
        }
    }

    /// A call names objects from now on, by a number of its own.
    pub(super) fn begin_naming(
        &mut self,
        number: u64,
        client: Client,
        objects: Vec<Handle>,
        spares: (Client, Handle),
    ) {
        let [is_making, is_export, is_moved, is_touched, is_remade] = [false; 5];
        let mut naming = Naming {
            number,
            client,
            objects,
            spares,
            is_making,
            is_export,
            is_moved,
            is_touched,
            is_remade,
        };
        naming.is_moved = self.changing.iter().any(|change| moves(&self.ledger, &naming, *change));
        self.naming.push(naming);
    }

    /// The call makes one of them.
    pub(super) fn is_making(&mut self, number: u64) {
        let naming = self.naming.iter_mut().find(|naming| naming.number == number);
        naming.into_iter().for_each(|naming| naming.is_making = true);
    }

    /// And another one, of a handle that it chose late.
    pub(super) fn makes_also(&mut self, number: u64, client: Client, handle: Handle) {
        let (ledger, changing) = (&self.ledger, &self.changing);
        if let Some(naming) = self.naming.iter_mut().find(|naming| naming.number == number) {
            naming.objects.push(handle);
            naming.is_making = true;
            naming.is_moved |= changing.iter().any(|change| moves(ledger, naming, *change));
            naming.is_touched |= changing.iter().any(|change| touches(ledger, naming, *change));
        }
        self.begin_make(number, client, handle);
    }

    /// The same, of an export, which frees wait for.
    pub(super) fn begin_export(&mut self, number: u64, client: Client, objects: Vec<Handle>) {
        self.begin_naming(number, client, objects, (client, Handle(0)));
        if let Some(naming) = self.naming.last_mut() {
            naming.is_export = true;
        }
    }

    pub(super) fn end_naming(&mut self, number: u64) {
        self.naming.retain(|naming| naming.number != number);
    }

    /// Whether an object that is to be freed is one that's being exported, or one above it.
    pub(super) fn is_exporting(&self, client: Client, handle: Handle) -> bool {
        let free = Change { client, handle, maker: None };
        let mut exports = self.naming.iter().filter(|naming| naming.is_export);
        exports.any(|naming| moves(&self.ledger, naming, free))
    }

    /// Whether the names say what they do until [`Books::is_moved`] says otherwise; they may not
    /// while one of the objects is being made, or freed.
    pub(super) fn stays(&mut self, number: u64) -> bool {
        let (ledger, changing) = (&self.ledger, &self.changing);
        let Some(naming) = self.naming.iter_mut().find(|naming| naming.number == number) else {
            return false;
        };
        naming.is_moved = false;
        !changing.iter().any(|change| moves(ledger, naming, *change))
    }

    /// Whether nobody makes or frees one of the objects themselves; or else it was touched, where that
    /// is `waited` for no longer.
    pub(super) fn may_be_named(&mut self, number: u64, waited: bool) -> bool {
        let (ledger, changing) = (&self.ledger, &self.changing);
        let Some(naming) = self.naming.iter_mut().find(|naming| naming.number == number) else {
            return true;
        };
        let is_busy = changing.iter().any(|change| touches(ledger, naming, *change));
        naming.is_touched |= is_busy && waited;
        !is_busy || waited
    }

    /// Whether an object began to be made or freed since [`Books::stays`], or may have been freed.
    pub(super) fn is_moved(&self, number: u64) -> bool {
        let naming = self.naming.iter().find(|naming| naming.number == number);
        naming.is_none_or(|naming| naming.is_moved)
    }

    /// Whether one was itself made or freed since it was named.
    pub(super) fn is_touched(&self, number: u64) -> bool {
        let naming = self.naming.iter().find(|naming| naming.number == number);
        naming.is_none_or(|naming| naming.is_touched || naming.is_remade && naming.is_moved)
    }

    /// An object was made, and stays. Another that the same handle was given was freed, then.
    pub(super) fn was_made(&mut self, number: u64, client: Client, handle: Handle) {
        let others = self.naming.iter_mut().filter(|naming| naming.number != number);
        let same = others.filter(|naming| naming.client == client && naming.is_making);
        same.filter(|naming| naming.objects.contains(&handle))
            .for_each(|naming| naming.is_touched = true);
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

/// Whether one gets from a mapping's beginning to its end by steps of `end_at`.
fn reaches((from, to): Mapped, end_at: impl Fn(u64) -> Option<u64>) -> bool {
    let mut at = from;
    while at < to {
        match end_at(at).filter(|end| *end > at) {
            Some(end) => at = end,
            None => return false,
        }
    }
    true
}

/// Whether a name may say something else after a change.
fn moves(ledger: &Ledger, naming: &Naming, change: Change) -> bool {
    let goes = |object: &Handle| match change.maker {
        Some(_) => *object == change.handle,
        None => ledger.is_freed_by(change.client, *object, change.handle),
    };
    is_of_another(naming, change) && naming.objects.iter().any(goes)
}

/// Whether it does: of itself, or of what it's known to hang below.
fn touches(ledger: &Ledger, naming: &Naming, change: Change) -> bool {
    let Change { client, handle, maker } = change;
    let is_freed = |object: &Handle| {
        maker.is_none() && (handle.0 == client.0 || ledger.is_below(client, *object, handle))
    };
    let goes = |object: &Handle| *object == handle || is_freed(object);
    is_of_another(naming, change) && naming.objects.iter().any(goes)
}

/// Whether another call makes what this one makes.
fn remakes(naming: &Naming, Change { client, handle, maker }: Change) -> bool {
    let is_other = maker.is_some_and(|maker| maker != naming.number);
    is_other && naming.is_making && naming.client == client && naming.objects.contains(&handle)
}

/// Whether it isn't the call's own change, of a client that it names something of.
fn is_of_another(naming: &Naming, Change { client, handle, maker }: Change) -> bool {
    let is_own = maker == Some(naming.number)
        || maker.is_some() && naming.is_making
        || maker.is_none() && naming.spares == (client, handle);
    naming.client == client && !is_own
}

/// The most records that make what is kept from nothing leave an eighth of a half for what changes until
/// it's written anew: objects and holds with their charges, stakes, what shows nowhere (an export of such,
/// or two that say of what is mapped that it's bare), users, ranges, nodes, and makers of files.
const _: () = {
    let ledger = 2 * BOUNDS.objects + 2 * BOUNDS.holds + BOUNDS.stakes;
    let veils = 2 * BOUNDS.holds + 2 * MOST_VEILED;
    let users = MOST_SHARES + MOST_PROCESSES + MOST_RANGES + MOST_NODES + 3 * mapped::MOST;
    assert!((ledger + veils + users) * RECORD_BYTES <= HALF_BYTES / 8 * 7);
};

fn ranges(ranges: &BTreeMap<(u64, u64), u64>) -> impl Iterator<Item = Record> {
    ranges.iter().map(|((space, base), length)| Record::Announce {
        space: *space,
        base: *base,
        length: *length,
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;
    use crate::gate::journal::{HEAD_BYTES, JOURNAL_BYTES};

    fn journal() -> File {
        let journal = File::from(memfd_create("journal", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&journal, JOURNAL_BYTES as u64).unwrap();
        journal
    }

    fn open(journal: &File) -> (Books, &'static Memory) {
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
    fn neighbours_that_are_listed_as_one_are_covered() {
        let (mut books, _) = open(&journal());
        let space = Space::Managed(Process(1));
        for base in [0x1000, 0x2000, 0x5000] {
            assert!(books.announce(space, base, 0x1000));
        }
        assert!(books.covers(space, (0x1000, 0x3000)) && books.covers(space, (0x1800, 0x2800)));
        for no in [(0x1000, 0x3001), (0x800, 0x2000), (0x1000, 0x6000)] {
            assert!(!books.covers(space, no));
        }
        let since = Instant::now();
        books.withdraw(space, 0x2000);
        assert!(!books.covers(space, (0x1000, 0x3000)));
        // One was there still when the list began to be read.
        assert!(books.covered(space, (0x1000, 0x3000), since));
        assert!(!books.covered(space, (0x1000, 0x3000), Instant::now()));
        assert!(!books.covered(Space::Managed(Process(2)), (0x2000, 0x3000), since));
        assert!(books.was_covered((0x2000, 0x3000), since));
        assert!(!books.was_covered((0x1000, 0x3000), since));
    }

    #[test]
    fn names_are_moved_by_frees_and_by_makings_and_touched_by_those_of_their_own() {
        let (mut books, _) = open(&journal());
        let (client, root) = (Client(1), Handle(1));
        let [device, memory, other] = [2, 3, 4].map(Handle);
        books.note(client.0, root.0, device.0);
        for handle in [memory, other] {
            books.enter(Entry::Commit { gpu: 0, bytes: 1, client, parent: device, handle });
        }
        let none = (Client(0), Handle(0));
        let mut after = |begin: &dyn Fn(&mut Books), end: &dyn Fn(&mut Books)| {
            books.begin_naming(7, client, vec![memory], none);
            begin(&mut books);
            let found = (books.is_moved(7), books.is_touched(7));
            end(&mut books);
            books.end_naming(7);
            found
        };
        let mut freed = |of, handle| {
            after(&|books| books.begin_free(of, handle), &|books| books.end_free(of, handle))
        };
        assert_eq!(freed(client, other), (false, false));
        assert_eq!(freed(Client(2), memory), (false, false));
        assert_eq!(freed(client, memory), (true, true));
        assert_eq!(freed(client, device), (true, true));
        assert_eq!(freed(client, root), (true, true));
        // All that is above it is known, and this is none of it.
        assert_eq!(freed(client, Handle(9)), (false, false));
        let mut made = |by, handle| {
            after(&|books| books.begin_make(by, client, handle), &|books| {
                books.end_make(by, client, handle)
            })
        };
        assert_eq!(made(8, memory), (true, true));
        assert_eq!(made(8, other), (false, false));
        assert_eq!(made(7, memory), (false, false));
        // What is there already is waited for, where it's of the object itself.
        books.begin_make(8, client, memory);
        books.begin_naming(9, client, vec![memory], none);
        assert!(!books.may_be_named(9, false) && !books.is_touched(9));
        assert!(books.may_be_named(9, true) && books.is_touched(9));
        books.end_make(8, client, memory);
        books.begin_naming(10, client, vec![memory], none);
        assert!(books.may_be_named(10, false) && !books.is_touched(10) && !books.is_moved(10));
        // Who makes it, too, does so only where it was freed: by whom nobody may know.
        let unknown = [5, 6].map(Handle);
        books.begin_naming(11, client, unknown.to_vec(), none);
        books.is_making(11);
        books.begin_make(12, client, unknown[0]);
        assert!(!books.is_touched(11) && !books.is_moved(11));
        books.begin_free(client, Handle(9));
        assert!(books.is_moved(11) && books.is_touched(11));
        books.begin_naming(13, client, unknown.to_vec(), none);
        books.is_making(13);
        books.was_made(13, client, unknown[1]);
        books.was_made(12, Client(2), unknown[1]);
        assert!(!books.is_touched(13));
        books.was_made(12, client, unknown[1]);
        assert!(books.is_touched(13));
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
