//! What is known of the container: its ledger, processes, ranges and devices.
//!
//! One at a time has them, and never while a call is in the driver or in the caller's
//! memory. What must outlive this worker is changed by [`Books::write`] alone, which
//! puts it into the journal too.

use std::collections::BTreeSet;

use crate::gate::settings::{Gpu, Identity, Node, NodeKind};
use crate::ledger::{
    Bounds, Client, Entry, Handle, Hold, Ledger, Process, Reservation, Span, Tree,
};
use crate::monitor::journal::call_id::CallObject;
use crate::monitor::journal::layout::{HALF_BYTES, RECORD_BYTES, Record, Stage};
use crate::monitor::journal::map::{JournalMap, Log, SetAside, Slot};
use crate::monitor::state::channels::{self, Channels};
use crate::monitor::state::devices::Devices;
use crate::monitor::state::due::Due;
use crate::monitor::state::groups::{self, Groups};
use crate::monitor::state::makers::{MOST_FILES, Makers};
use crate::monitor::state::space::Space;
use crate::monitor::state::space_ranges::{MOST_RANGES, SpaceRanges};

/// How much the container may make us remember.
pub(crate) const BOUNDS: Bounds = Bounds { objects: 32768, holds: 16384, stakes: 16384 };

/// Clients that are known by their users, and users of clients; of more, all is known but who uses
/// them.
const MOST_CLIENTS: usize = 16384;
const MOST_HOLDERS: usize = 32768;

/// Processes.
const MOST_PROCESSES: usize = 4096;

/// Nodes of UVM's.
const MOST_NODES: usize = 64;

/// No client has this handle; who is seen with it was seen at all.
pub(crate) const NO_CLIENT: Client = Client(0);

/// The books.
#[derive(Debug)]
pub(crate) struct Books {
    pub(crate) ledger: Ledger,
    log: Log,
    /// Seen, and not known to be gone.
    pub(crate) processes: BTreeSet<Process>,
    /// By [`Space`](crate::monitor::state::space::Space) and first address: bytes.
    pub(crate) ranges: SpaceRanges,
    /// Nodes of UVM's, by `st_dev` and `st_ino`.
    nodes: BTreeSet<(u64, u64)>,
    /// Who initialized which file of UVM's.
    pub(crate) makers: Makers,
    /// Channel groups.
    pub(crate) groups: Groups,
    pub(crate) channels: Channels,
    pub(crate) devices: Devices,
    /// What the call has set aside that the worker before had on the lane: until it is made again, or
    /// undone, the driver may have given it, and no charge tells so.
    former_reservation: Option<Reservation>,
    /// When the driver is to be asked, though nobody waits for it.
    pub(crate) due: Due,
}

impl Books {
    /// The books as the journal has them.
    pub(crate) fn open(memory: &'static JournalMap, gpus: &[Gpu], nodes: &[Node]) -> Self {
        let limits: Vec<u64> = gpus.iter().map(|gpu| gpu.limit_bytes).collect();
        let log = Log::open(memory);
        let records: Vec<Record> = log.records().collect();
        let mut books = Books {
            ledger: Ledger::new(&limits, BOUNDS),
            log,
            processes: BTreeSet::new(),
            ranges: SpaceRanges::default(),
            nodes: BTreeSet::new(),
            makers: Makers::default(),
            groups: Groups::default(),
            channels: Channels::default(),
            devices: Devices::default(),
            former_reservation: None,
            due: Due::default(),
        };
        for node in nodes.iter().filter(|node| node.kind == NodeKind::Uvm) {
            if let Identity::File { device, inode } = node.identity {
                books.nodes.insert((device, inode));
            }
        }
        records.into_iter().for_each(|record| books.replay(record));
        books.rewrite();
        books.former_reservation =
            memory.lane().and_then(|slot| books.reserve_again(memory.slot(slot)));
        books
    }

    /// Sets aside what the call in a slot had, where it isn't entered already.
    fn reserve_again(&mut self, slot: Slot<'_>) -> Option<Reservation> {
        let SetAside { gpu, bytes, client } = slot.was_set_aside()?;
        let CallObject { handle, was_there, .. } = slot.call_object();
        let is_known = self.ledger.contains(Client(client), Handle(handle));
        let is_charged = slot.stage() == Stage::Executing && !was_there && is_known;
        let is_left = slot.notice().id != 0 && !is_charged;
        if is_left { self.ledger.reserve_again(gpu, bytes).ok() } else { None }
    }

    /// The call of the worker before that was on the lane is made again, or is over.
    pub(crate) fn cancel_former_reservation(&mut self) {
        if let Some(reservation) = self.former_reservation.take() {
            self.ledger.cancel(reservation);
        }
    }

    fn replay(&mut self, record: Record) {
        match record {
            Record::Ledger(entry) => {
                match entry {
                    Entry::AddHolder { client: NO_CLIENT, process } => {
                        self.processes.insert(process);
                    }
                    Entry::RemoveProcess { process } => {
                        self.processes.remove(&process);
                        self.channels.forget(process);
                    }
                    Entry::CloseFile { file } => self.makers.close(file),
                    _ => {}
                }
                self.ledger.replay(entry);
            }
            Record::AddRange { .. } | Record::RemoveRange { .. } => self.ranges.replay(record),
            Record::Node { device, inode } => {
                self.nodes.insert((device, inode));
            }
            Record::Initialize { .. } | Record::Initialized { .. } | Record::Bound { .. } => {
                self.makers.replay(record);
            }
            Record::Group { .. } => self.groups.replay(record),
            Record::Channel { .. } => self.channels.replay(record),
            Record::Ungroup { .. } => {
                self.groups.replay(record);
                self.channels.replay(record);
            }
        }
    }

    /// Changes what must outlive this worker.
    pub(crate) fn write(&mut self, record: Record) {
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
        let ranges = self.ranges.records();
        let others = self.makers.records().chain(self.groups.records());
        let others = others.chain(self.channels.records());
        self.log.rewrite(ledger.chain(ranges).chain(nodes).chain(others));
    }

    pub(crate) fn enter(&mut self, entry: Entry) {
        self.write(Record::Ledger(entry));
    }

    /// Nothing is mapped there any more.
    pub(crate) fn unmap(&mut self, tree: Tree, span: Span) {
        if self.ledger.has_pieces_in(tree, span) {
            self.enter(Entry::Unmap { tree, span });
        }
    }

    /// A process called. `false` where there are more than can be known.
    pub(crate) fn note_process(&mut self, process: Process) -> bool {
        if self.processes.contains(&process) {
            return true;
        }
        if self.processes.len() >= MOST_PROCESSES {
            return false;
        }
        self.enter(Entry::AddHolder { client: NO_CLIENT, process });
        true
    }

    /// A process used a client.
    pub(crate) fn note_user(&mut self, client: u32, process: Process) {
        let client = Client(client);
        if client == NO_CLIENT || self.ledger.holds_client(client, process) {
            return;
        }
        if self.ledger.client_count() < MOST_CLIENTS && self.ledger.holder_count() < MOST_HOLDERS {
            self.enter(Entry::AddHolder { client, process });
        }
    }

    /// An object without memory is there, below what is known to be.
    pub(crate) fn note(&mut self, client: u32, parent: u32, handle: u32) {
        let (client, parent, handle) = (Client(client), Handle(parent), Handle(handle));
        if self.ledger.size().objects < BOUNDS.objects {
            self.enter(Entry::Note { client, parent, handle });
        }
    }

    /// Forgets which GPUs devices of a client were of that are freed.
    pub(crate) fn forget_freed_devices(&mut self, client: u32) {
        self.devices.forget_freed(&self.ledger, client);
    }

    /// A node of UVM's was seen. `false` where there are more than can be known.
    pub(crate) fn note_node(&mut self, (device, inode): (u64, u64)) -> bool {
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
    pub(crate) fn is_node(&self, place: (u64, u64)) -> bool {
        self.nodes.contains(&place)
    }

    /// The container's channels on a GPU that compute outside the channel groups that are known.
    pub(crate) fn outside_groups(&self, gpu: usize) -> Vec<(u32, u32)> {
        self.channels.outside_groups(gpu, &self.processes, &self.groups)
    }

    /// Whether a channel was seen to be made. Of channels that don't compute, only those outside groups are entered.
    pub(crate) fn knows_channel(&self, name: (u32, u32)) -> bool {
        self.channels.contains(name) || self.groups.contains(name.0, name.1)
    }

    /// Whether nothing is charged, and nothing known that could be.
    pub(crate) fn has_nothing(&self) -> bool {
        let usages = (0..).map_while(|gpu| self.ledger.usage(gpu));
        let size = self.ledger.size();
        size.objects + size.holds == 0 && usages.into_iter().all(|usage| usage.used_bytes == 0)
    }

    /// Processes that live on in no process's list are gone, and nobody is left: nothing is but
    /// what files keep that it was exported to, and those that can't be ended.
    pub(crate) fn close_all(&mut self, kept: &BTreeSet<u32>) {
        let clients: BTreeSet<Client> = self
            .ledger
            .entries()
            .filter_map(|entry| match entry {
                Entry::Object { client, .. } | Entry::AddHolder { client, .. } => Some(client),
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

    /// Remembers a range. `false` where it can't be.
    pub(crate) fn add_range(&mut self, space: Space, base: u64, length: u64) -> bool {
        let room = self.ranges.has_room_for(space, base, length);
        if room {
            self.write(Record::AddRange { space: space.number(), base, length });
        }
        room
    }

    /// Forgets a range.
    pub(crate) fn remove_range(&mut self, space: Space, base: u64) {
        if self.ranges.has(space, base) {
            self.write(Record::RemoveRange { space: space.number(), base });
        }
    }

    /// A file of UVM's is closed, or is as good as closed: it maps nothing, and has no ranges.
    pub(crate) fn close_file(&mut self, file: u32) {
        self.enter(Entry::CloseFile { file });
        for (base, _) in self.ranges.of(Space::File(file)) {
            self.remove_range(Space::File(file), base);
        }
    }
}

/// The most records that make what is kept from nothing leave an eighth of a half for what changes until
/// it's written anew: objects and holds with their charges, stakes, what is mapped bare, users, ranges,
/// nodes, and makers of files.
const _: () = {
    let ledger = 2 * BOUNDS.objects + 3 * BOUNDS.holds + BOUNDS.stakes;
    let users = MOST_HOLDERS + MOST_PROCESSES + MOST_RANGES + MOST_NODES + 3 * MOST_FILES;
    let compute = groups::MOST + channels::MOST as usize;
    assert!((ledger + users + compute) * RECORD_BYTES <= HALF_BYTES / 8 * 7);
};

#[cfg(test)]
pub(crate) mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::monitor::journal::layout::HEAD_BYTES;
    use crate::monitor::journal::map::tests::journal;

    pub(crate) fn open(journal: &File) -> (Books, &'static JournalMap) {
        let gpu = Gpu { index: 0, uuid: String::new(), minor: 0, total_bytes: 9, limit_bytes: 9 };
        let memory: &'static JournalMap = Box::leak(Box::new(JournalMap::map(journal).unwrap()));
        (Books::open(memory, std::slice::from_ref(&gpu), &[]), memory)
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

        /// A journal is ours, and may be damaged: no record that can be read stops a worker from its start.
        #[test]
        fn no_record_is_too_much(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..4096)) {
            let (mut books, _) = open(&journal());
            crate::monitor::journal::layout::read(&bytes).for_each(|record| books.write(record));
        }
    }

    #[test]
    fn who_uses_what_is_known_of_so_many_and_of_the_next_worker_too() {
        let journal = journal();
        let (mut books, _) = open(&journal);
        for client in 1..=20 {
            (0..2000).for_each(|process| books.note_user(client, Process(process)));
        }
        assert_eq!(books.ledger.holder_count(), MOST_HOLDERS);
        books.enter(Entry::Limit { gpu: 0, limit_bytes: 7 });
        let (books, _) = open(&journal);
        assert_eq!(books.ledger.holder_count(), MOST_HOLDERS);
        assert_eq!(books.ledger.usage(0).unwrap().limit_bytes, 7);
    }

    #[test]
    fn what_the_call_on_the_lane_had_set_aside_counts_until_it_is_made_again() {
        let journal = journal();
        let used = |books: &Books| books.ledger.usage(0).unwrap().used_bytes;
        let (mut books, memory) = open(&journal);
        memory.set_lane(Some(0));
        // A notification begins with its id.
        journal.write_all_at(&1_u64.to_ne_bytes(), HEAD_BYTES as u64).unwrap();
        memory.slot(0).set_aside(Some(SetAside { gpu: 0, bytes: 5, client: 1 }));
        memory.slot(0).set_executing(CallObject::one(1, 3, false));

        let (mut next, _) = open(&journal);
        assert_eq!(used(&next), 5);
        next.cancel_former_reservation();
        assert_eq!(used(&next), 0);
        let (client, handle) = (Client(1), Handle(3));
        books.enter(Entry::Commit { gpu: 0, bytes: 6, client, parent: Handle(1), handle });
        assert_eq!(used(&open(&journal).0), 6, "it was entered, and the slot doesn't say so yet");
    }
}
