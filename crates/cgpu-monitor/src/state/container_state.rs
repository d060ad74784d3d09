//! The container's state: what the monitor knows of the container, such as its ledger, processes, ranges and devices.
//!
//! One thread at a time has the state open, and never while it calls the driver, or reads or writes the caller's
//! memory. What a snapshot has of the state is changed by [`ContainerState::write`] alone.

use std::collections::{BTreeSet, HashMap};

use crate::gate::settings::{Gpu, Identity, Node, NodeKind};
use crate::snapshot::Record;
use crate::state::channels::Channels;
use crate::state::creators::Creators;
use crate::state::groups::Groups;
use crate::state::schedule::Schedule;
use crate::state::space_ranges::{Space, SpaceRanges};
use cgpu_core::ledger::{Bounds, Client, Entry, Handle, Hold, Ledger, Process, Span, Tree};

/// How much the container can make the ledger remember.
pub(crate) const BOUNDS: Bounds = Bounds { objects: 32768, holds: 16384, pins: 16384 };

/// The most clients, and the most pairs of a client and its user, whose users are known. Everything else is known of
/// further clients too.
const MOST_CLIENTS: usize = 16384;
const MOST_HOLDERS: usize = 32768;

/// The most processes that are known.
const MOST_PROCESSES: usize = 4096;

/// The most UVM nodes that are known.
const MOST_NODES: usize = 64;

/// The most devices and subdevices whose GPU is known. Above this number all are forgotten, and the driver is asked
/// again.
const MOST_DEVICES: usize = 4096;

/// No client has this handle. Its holders in the ledger are all processes that were seen.
pub(crate) const NO_CLIENT: Client = Client(0);

/// What the monitor knows of the container.
#[derive(Debug)]
pub(crate) struct ContainerState {
    pub(crate) ledger: Ledger,
    /// The processes that were seen and are not known to have ended.
    pub(crate) processes: BTreeSet<Process>,
    /// The address ranges of processes and of UVM files.
    pub(crate) ranges: SpaceRanges,
    /// UVM nodes, by `st_dev` and `st_ino`.
    nodes: BTreeSet<(u64, u64)>,
    /// Which process initialized which UVM file.
    pub(crate) creators: Creators,
    pub(crate) groups: Groups,
    pub(crate) channels: Channels,
    pub(crate) devices: Devices,
    /// When the driver is to be asked next, although no call waits for the answer.
    pub(crate) due: Schedule,
}

impl ContainerState {
    /// The state of a container with these GPUs and nodes, to which the records are applied.
    pub(crate) fn open(records: Vec<Record>, gpus: &[Gpu], nodes: &[Node]) -> Self {
        let limits: Vec<u64> = gpus.iter().map(|gpu| gpu.limit_bytes).collect();
        let mut state = ContainerState {
            ledger: Ledger::new(&limits, BOUNDS),
            processes: BTreeSet::new(),
            ranges: SpaceRanges::default(),
            nodes: BTreeSet::new(),
            creators: Creators::default(),
            groups: Groups::default(),
            channels: Channels::default(),
            devices: Devices::default(),
            due: Schedule::default(),
        };
        for node in nodes.iter().filter(|node| node.kind == NodeKind::Uvm) {
            if let Identity::File { device, inode } = node.identity {
                state.nodes.insert((device, inode));
            }
        }
        records.into_iter().for_each(|record| state.write(record));
        state
    }

    /// Applies a change.
    pub(crate) fn write(&mut self, record: Record) {
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
                    Entry::CloseFile { file } => self.creators.close(file),
                    _ => {}
                }
                self.ledger.replay(entry);
            }
            Record::AddRange { .. } | Record::RemoveRange { .. } => self.ranges.replay(record),
            Record::Node { device, inode } => {
                self.nodes.insert((device, inode));
            }
            Record::Initialize { .. } | Record::Initialized { .. } | Record::Bound { .. } => {
                self.creators.replay(record);
            }
            Record::Group { .. } => self.groups.replay(record),
            Record::Channel { .. } => self.channels.replay(record),
            Record::Ungroup { .. } => {
                self.groups.replay(record);
                self.channels.replay(record);
            }
        }
    }

    /// The records that recreate this state.
    pub(crate) fn records(&self) -> Vec<Record> {
        let nodes = self.nodes.iter();
        let nodes = nodes.map(|(device, inode)| Record::Node { device: *device, inode: *inode });
        let ledger = self.ledger.entries().map(Record::Ledger);
        let others = self.creators.records().chain(self.groups.records());
        let others = others.chain(self.channels.records());
        ledger.chain(self.ranges.records()).chain(nodes).chain(others).collect()
    }

    pub(crate) fn enter(&mut self, entry: Entry) {
        self.write(Record::Ledger(entry));
    }

    /// Notes that nothing is mapped in the span any more.
    pub(crate) fn unmap(&mut self, tree: Tree, span: Span) {
        if self.ledger.has_ranges_in(tree, span) {
            self.enter(Entry::Unmap { tree, span });
        }
    }

    /// Notes a process that called. `false` where no more processes can be known.
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

    /// Notes that a process used a client.
    pub(crate) fn note_user(&mut self, client: u32, process: Process) {
        let client = Client(client);
        if client == NO_CLIENT || self.ledger.holds_client(client, process) {
            return;
        }
        if self.ledger.client_count() < MOST_CLIENTS && self.ledger.holder_count() < MOST_HOLDERS {
            self.enter(Entry::AddHolder { client, process });
        }
    }

    /// Notes an object without memory below a known one.
    pub(crate) fn note(&mut self, client: u32, parent: u32, handle: u32) {
        let (client, parent, handle) = (Client(client), Handle(parent), Handle(handle));
        if self.ledger.size().objects < BOUNDS.objects {
            self.enter(Entry::Note { client, parent, handle });
        }
    }

    /// Forgets the GPUs of a client's devices that were freed.
    pub(crate) fn forget_freed_devices(&mut self, client: u32) {
        self.devices.forget_freed(&self.ledger, client);
    }

    /// Notes a UVM node. `false` if no more nodes can be known.
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

    /// Whether `place` (`st_dev` and `st_ino`) is a UVM node.
    pub(crate) fn is_node(&self, place: (u64, u64)) -> bool {
        self.nodes.contains(&place)
    }

    /// The container's channels on a GPU that compute and are in no known channel group.
    pub(crate) fn outside_groups(&self, gpu: usize) -> Vec<(u32, u32)> {
        self.channels.outside_groups(gpu, &self.processes, &self.groups)
    }

    /// Whether the channel was seen to be made. A channel that doesn't compute is known only where it is outside
    /// groups.
    pub(crate) fn knows_channel(&self, name: (u32, u32)) -> bool {
        self.channels.contains(name) || self.groups.contains(name.0, name.1)
    }

    /// Frees everything, because no process of the container is left. Only exports stay, whose files keep their memory,
    /// and the UVM files in `retained`, which can't be ended.
    pub(crate) fn close_all(&mut self, retained: &BTreeSet<u32>) {
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
            if !retained.contains(&file) {
                self.close_file(file);
            }
        }
        // What the driver showed of the dead processes is released. No later driver usage would show that.
        let gpus = (0..).map_while(|gpu| Some((gpu, self.ledger.expected(gpu)?.hidden_bytes)));
        for (gpu, driver_bytes) in gpus.collect::<Vec<_>>() {
            self.enter(Entry::Reconcile { gpu, driver_bytes });
        }
        self.devices.clear();
    }

    /// Remembers a range. `false` where it can't be remembered.
    pub(crate) fn add_range(&mut self, space: Space, base: u64, length: u64) -> bool {
        let capacity = self.ranges.has_capacity_for(space, base, length);
        if capacity {
            self.write(Record::AddRange { space: space.number(), base, length });
        }
        capacity
    }

    pub(crate) fn remove_range(&mut self, space: Space, base: u64) {
        if self.ranges.has(space, base) {
            self.write(Record::RemoveRange { space: space.number(), base });
        }
    }

    /// Notes that a UVM file is closed, or has lost all its mappings and ranges.
    pub(crate) fn close_file(&mut self, file: u32) {
        self.enter(Entry::CloseFile { file });
        for (base, _) in self.ranges.of(Space::File(file)) {
            self.remove_range(Space::File(file), base);
        }
    }
}

/// The container's GPU by client and handle.
#[derive(Debug, Default)]
pub(crate) struct Devices(HashMap<(u32, u32), usize>);

impl Devices {
    /// The GPU of a device or subdevice; `None` where it isn't known.
    pub(crate) fn gpu(&self, client: u32, handle: u32) -> Option<usize> {
        self.0.get(&(client, handle)).copied()
    }

    /// Remembers the GPU of a device or subdevice.
    pub(crate) fn set_gpu(&mut self, client: u32, handle: u32, gpu: usize) {
        if self.0.len() >= MOST_DEVICES {
            self.0.clear();
        }
        self.0.insert((client, handle), gpu);
    }

    /// Forgets the GPU of the object with this handle.
    pub(crate) fn forget(&mut self, client: u32, handle: u32) {
        self.0.remove(&(client, handle));
    }

    /// Forgets all devices of a client that begins or was freed.
    pub(crate) fn forget_client(&mut self, client: u32) {
        self.0.retain(|(of, _), _| *of != client);
    }

    /// Forgets those devices of a client that the ledger doesn't have any more. The caller has freed something of the
    /// client in the ledger.
    pub(crate) fn forget_freed(&mut self, ledger: &Ledger, client: u32) {
        let stays = |handle| ledger.contains(Client(client), Handle(handle));
        self.0.retain(|(of, handle), _| *of != client || stays(*handle));
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use cgpu_core::ledger::{Bounds, Entry};

    /// State to which these records were applied.
    pub(crate) fn state_of(records: Vec<Record>) -> ContainerState {
        let gpu = Gpu { index: 0, uuid: String::new(), minor: 0, limit_bytes: 9 };
        ContainerState::open(records, std::slice::from_ref(&gpu), &[])
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(64))]

        /// Only monitors write snapshots, but one may be damaged: no record that can be read stops a monitor.
        #[test]
        fn no_record_is_too_much(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..4096)) {
            let records = bytes.chunks(40).filter_map(|record| postcard::from_bytes(record).ok());
            state_of(records.collect());
        }
    }

    /// Which process uses which client is known of a bounded number of them, after an update, too.
    #[test]
    fn client_users_are_bounded_and_survive_updates() {
        let mut state = state_of(vec![]);
        for client in 1..=20 {
            (0..2000).for_each(|process| state.note_user(client, Process(process)));
        }
        assert_eq!(state.ledger.holder_count(), MOST_HOLDERS);
        state.enter(Entry::Limit { gpu: 0, limit_bytes: 7 });
        let state = state_of(state.records());
        assert_eq!(state.ledger.holder_count(), MOST_HOLDERS);
        assert_eq!(state.ledger.usage(0).unwrap().limit_bytes, 7);
    }

    /// A device is of its GPU until the device or its client is freed.
    #[test]
    fn device_maps_to_its_gpu_until_freed() {
        let mut devices = Devices::default();
        for (client, handle, gpu) in [(1, 10, 0), (1, 11, 1), (2, 10, 1)] {
            devices.set_gpu(client, handle, gpu);
        }
        let all =
            |devices: &Devices| [(1, 10), (1, 11), (2, 10)].map(|(of, at)| devices.gpu(of, at));
        assert_eq!(all(&devices), [Some(0), Some(1), Some(1)]);
        devices.set_gpu(1, 10, 1);
        devices.forget(2, 10);
        assert_eq!(all(&devices), [Some(1), Some(1), None]);
        // The device that the ledger has was not freed.
        let mut ledger = Ledger::new(&[1], Bounds { objects: 9, holds: 9, pins: 9 });
        let (client, parent, handle) = (Client(1), Handle(1), Handle(11));
        ledger.replay(Entry::Note { client, parent, handle });
        devices.forget_freed(&ledger, 1);
        assert_eq!(all(&devices), [None, Some(1), None]);
        devices.forget_client(1);
        assert_eq!(all(&devices), [None; 3]);
    }

    /// Devices beyond the number that can be known are queried again.
    #[test]
    fn devices_past_the_bound_are_queried_again() {
        let mut devices = Devices::default();
        let most = u32::try_from(MOST_DEVICES).unwrap();
        (0..most).for_each(|handle| devices.set_gpu(1, handle, 0));
        assert_eq!(devices.gpu(1, 0), Some(0));
        devices.set_gpu(2, 0, 1);
        assert_eq!((devices.gpu(1, 0), devices.gpu(2, 0)), (None, Some(1)));
    }
}
