use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const BOUNDS: Bounds = Bounds { objects: 1000, holds: 100, pins: 100 };
const A: Client = Client(0xc1d0_0001);
const B: Client = Client(0xc1d0_0002);

fn ledger(limit: u64) -> Ledger {
    Ledger::new(&[limit], BOUNDS)
}

fn root(client: Client) -> Handle {
    Handle(client.0)
}

/// Charges what was reserved: the driver gave it.
fn commit(
    ledger: &mut Ledger,
    reservation: Reservation,
    client: Client,
    parent: Handle,
    handle: Handle,
) {
    let Reservation { gpu, bytes } = reservation;
    ledger.cancel(Reservation { gpu, bytes });
    ledger.replay(Entry::Commit { gpu, bytes, client, parent, handle });
}

fn allocate(ledger: &mut Ledger, client: Client, handle: u32, bytes: u64) {
    let reservation = ledger.reserve(0, bytes).unwrap();
    commit(ledger, reservation, client, root(client), Handle(handle));
}

fn used(ledger: &Ledger) -> u64 {
    ledger.usage(0).unwrap().used_bytes
}

#[test]
fn the_last_byte_is_given_once() {
    let mut ledger = ledger(100);
    let first = ledger.reserve(0, 60).unwrap();
    let error = ledger.reserve(0, 41).unwrap_err();
    assert_eq!(error.to_string(), "41 bytes asked for, 40 of 100 left");
    let second = ledger.reserve(0, 40).unwrap();
    assert!(ledger.reserve(0, 1).is_err());
    ledger.cancel(first);
    commit(&mut ledger, second, A, root(A), Handle(1));
    assert_eq!(used(&ledger), 40);
    assert!(ledger.reserve(0, u64::MAX).is_err());
    assert_eq!(ledger.reserve(1, 1), Err(LedgerError::NoSuchGpu { gpu: 1 }));
}

#[test]
fn duplicate_retains_charge_and_is_not_charged_again() {
    let mut ledger = ledger(100);
    allocate(&mut ledger, A, 1, 70);
    ledger.duplicate((A, Handle(1)), B, root(B), Handle(9), Attribution::Here);
    assert_eq!(used(&ledger), 70);
    ledger.free(A, Handle(1));
    assert_eq!(used(&ledger), 70, "the duplicate keeps it");
    ledger.close(B);
    assert_eq!(used(&ledger), 0);
}

#[test]
fn mapping_and_export_retain_freed_memory() {
    let mut ledger = ledger(100);
    allocate(&mut ledger, A, 1, 70);
    ledger.hold(Hold::Mapping { space: 1, base: 0x1000 }, A, Handle(1));
    ledger.hold(Hold::Export { file: 5, index: 0 }, A, Handle(1));
    ledger.free(A, Handle(1));
    assert_eq!(used(&ledger), 70);
    ledger.release_space(1);
    assert_eq!(used(&ledger), 70);
    ledger.release(Hold::Export { file: 5, index: 0 });
    ledger.release(Hold::Export { file: 5, index: 0 });
    assert_eq!((used(&ledger), ledger.size().holds), (0, 0));
    ledger.hold(Hold::Export { file: 6, index: 0 }, A, Handle(1));
    assert_eq!(ledger.size().holds, 0, "there is no such object");
}

/// Objects below a parent retain their charges if the parent itself is recorded after them.
#[test]
fn child_objects_remain_if_parent_is_recorded_late() {
    let mut ledger = ledger(100);
    let (device, low) = (Handle(9), Handle(3));
    for (handle, bytes) in [(low, 40), (Handle(12), 30)] {
        let reservation = ledger.reserve(0, bytes).unwrap();
        commit(&mut ledger, reservation, A, device, handle);
    }
    ledger.note(A, root(A), device);
    assert_eq!(used(&ledger), 70);
    // In the copy's entries, the device comes between the two objects.
    let mut copy = copied(&ledger, 1);
    assert!(copy.entries().eq(ledger.entries()));
    assert_eq!((used(&copy), copy.contains(A, low)), (70, true));
    // The handle was known, so it is another object now.
    copy.note(A, root(A), device);
    assert_eq!((used(&copy), copy.contains(A, low)), (0, false));
    ledger.free(A, device);
    assert_eq!(used(&ledger), 0);
}

#[test]
fn each_name_shows_where_it_hangs() {
    let mut ledger = Ledger::new(&[100, 100], BOUNDS);
    let named =
        |ledger: &Ledger| [0, 1].map(|gpu| ledger.charged_by_client(gpu).values().sum::<u64>());
    allocate(&mut ledger, A, 1, 40);
    allocate(&mut ledger, A, 2, 7);
    ledger.duplicate((A, Handle(1)), B, root(B), Handle(3), Attribution::Here);
    assert_eq!(named(&ledger), [87, 0]);
    ledger.duplicate((A, Handle(1)), B, root(B), Handle(4), Attribution::On(1));
    assert_eq!(named(&ledger), [87, 40]);
    assert_eq!(ledger.charged_by_client(1).into_iter().collect::<Vec<_>>(), [(B, 40)]);
    let copy = copied(&ledger, 2);
    assert!(copy.entries().eq(ledger.entries()));
    assert_eq!(named(&copy), [87, 40]);
    let before = ledger.serial_of(A, Handle(2));
    ledger.duplicate((A, Handle(1)), A, root(A), Handle(2), Attribution::Here);
    assert_ne!(ledger.serial_of(A, Handle(2)), before, "another of the same handle");
    let again = ledger.serial_of(A, Handle(2));
    ledger.duplicate((A, Handle(1)), A, root(A), Handle(2), Attribution::Here);
    assert_ne!(ledger.serial_of(A, Handle(2)), again, "and of the same memory");
    ledger.free(A, Handle(2));
    allocate(&mut ledger, A, 2, 7);
    assert_eq!(ledger.shown(B, Handle(4)), Attribution::On(1));
    ledger.free(A, Handle(1));
    assert!(ledger.has_names_elsewhere() && copy.has_names_elsewhere());
    ledger.close(B);
    assert!(!ledger.has_names_elsewhere());
    assert_eq!(named(&ledger), [7, 0]);
    assert_eq!(ledger.memory_of(A, Handle(2)), Some((0, 7)));
}

/// Each index of an export file retains memory of its own.
#[test]
fn each_export_index_retains_its_own_memory() {
    let mut ledger = ledger(100);
    let place = |index| Hold::Export { file: 5, index };
    allocate(&mut ledger, A, 1, 70);
    allocate(&mut ledger, A, 2, 20);
    ledger.hold(Hold::Export { file: 4, index: 9 }, A, Handle(1));
    ledger.hold(place(0), A, Handle(1));
    ledger.hold(place(512), A, Handle(2));
    ledger.free(A, Handle(2));
    assert_eq!(ledger.exported(5).collect::<Vec<_>>(), [0, 512]);
    assert_eq!([0, 512].map(|index| ledger.is_unnamed(place(index))), [false, true]);
    ledger.hold(place(512), A, Handle(1));
    assert_eq!(used(&ledger), 70, "what is replaced ends");
    ledger.import(place(512), B, root(B), Handle(7), Attribution::Here);
    ledger.free(A, Handle(1));
    [place(0), place(512)].into_iter().for_each(|hold| ledger.release(hold));
    assert_eq!((used(&ledger), ledger.exported(5).count()), (70, 0), "it has a name");
    ledger.free(B, Handle(7));
    assert_eq!(used(&ledger), 70, "it is in the other file");
    ledger.release(Hold::Export { file: 4, index: 9 });
    assert_eq!(used(&ledger), 0);
}

/// Memory of the host has handles and holds, and counts nothing.
#[test]
fn host_memory_is_tracked_and_not_counted() {
    let mut ledger = ledger(100);
    let (hold, name) = (Hold::Export { file: 5, index: 0 }, Handle(7));
    allocate(&mut ledger, A, 1, 100);
    ledger.note(A, root(A), Handle(2));
    ledger.replay(Entry::Commit {
        gpu: 0,
        bytes: 0,
        client: A,
        parent: Handle(2),
        handle: Handle(3),
    });
    let bytes = |handle| ledger.bytes_of(A, Handle(handle));
    assert_eq!([1, 2, 3, 4].map(bytes), [Some(100), None, Some(0), None]);
    ledger.hold(hold, A, Handle(3));
    ledger.import(hold, B, root(B), name, Attribution::Here);
    ledger.free(A, Handle(2));
    assert!(!ledger.is_unnamed(hold), "the import names it");
    ledger.reconcile(0, 100);
    let copy = copied(&ledger, 1);
    assert!(copy.entries().eq(ledger.entries()));
    ledger.free(B, name);
    assert!(ledger.is_unnamed(hold));
    ledger.release(hold);
    assert_eq!((used(&ledger), ledger.charges.len()), (100, 1));
    ledger.free(A, Handle(1));
    assert_eq!(used(&ledger), 0);
}

/// Clients of exited processes that have nothing that counts are reported.
#[test]
fn uncharged_clients_of_exited_processes_are_reported() {
    let mut ledger = ledger(100);
    let c = Client(0xc1d0_0003);
    for (client, process) in [(A, 1), (B, 1), (c, 1), (c, 2)] {
        ledger.add_holder(client, Process(process));
    }
    allocate(&mut ledger, A, 1, 10);
    allocate(&mut ledger, B, 1, 0);
    assert_eq!(ledger.uncharged_orphans(), []);
    ledger.remove_process(Process(1));
    assert_eq!((ledger.orphans(), ledger.uncharged_orphans()), (vec![A, B], vec![B]));
}

#[test]
fn a_parent_takes_all_below_it_along() {
    let mut ledger = ledger(100);
    ledger.note(A, root(A), Handle(1));
    ledger.note(A, Handle(1), Handle(2));
    let reservation = ledger.reserve(0, 10).unwrap();
    commit(&mut ledger, reservation, A, Handle(2), Handle(3));
    allocate(&mut ledger, A, 4, 5);
    ledger.free(A, Handle(1));
    assert_eq!((used(&ledger), ledger.size().objects), (5, 1));
    ledger.free(A, root(A));
    assert_eq!((used(&ledger), ledger.size().objects), (0, 0));
}

#[test]
fn reused_handle_means_a_missed_free() {
    let mut ledger = ledger(100);
    allocate(&mut ledger, A, 1, 40);
    allocate(&mut ledger, A, 1, 30);
    assert_eq!((used(&ledger), ledger.size().objects), (30, 1));
}

/// A client lives as long as any process that was observed with it.
#[test]
fn client_is_orphaned_once_all_its_processes_exit() {
    let mut ledger = ledger(100);
    ledger.add_holder(A, Process(1));
    ledger.add_holder(A, Process(2));
    ledger.add_holder(A, Process(2));
    allocate(&mut ledger, A, 1, 40);
    ledger.remove_process(Process(1));
    assert_eq!(ledger.orphans(), [], "the other got the descriptor by fork or over a socket");
    ledger.remove_process(Process(2));
    assert_eq!(ledger.orphans(), [A]);
    assert_eq!(used(&ledger), 40, "one that was never seen may have it");
    ledger.close(A);
    assert_eq!(used(&ledger), 0);
}

#[test]
fn quota_below_usage_grants_nothing_until_enough_freed() {
    let mut ledger = ledger(100);
    allocate(&mut ledger, A, 1, 60);
    ledger.replay(Entry::Limit { gpu: 0, limit_bytes: 50 });
    let usage = ledger.usage(0).unwrap();
    assert_eq!((usage.used_bytes, usage.free_bytes()), (60, 0));
    let error = LedgerError::InUse { limit_bytes: 50, usage }.to_string();
    assert_eq!(error, "60 bytes are in use, more than the new quota of 50");
    assert!(ledger.reserve(0, 1).is_err());
    ledger.free(A, Handle(1));
    assert!(ledger.reserve(0, 50).is_ok());
}

/// A missed free refuses no allocation once the driver usage was read.
#[test]
fn missed_free_refuses_no_call_after_reconcile() {
    let mut ledger = ledger(100);
    allocate(&mut ledger, A, 1, 60);
    allocate(&mut ledger, A, 2, 40);
    assert!(ledger.reserve(0, 10).is_err());
    ledger.reconcile(0, 40);
    assert_eq!(ledger.usage(0).unwrap().used_bytes, 40);
    // The ledger takes whichever of the two is freed now for the one that was gone.
    ledger.free(A, Handle(2));
    assert_eq!(used(&ledger), 40);
    ledger.reconcile(0, 0);
    assert_eq!(ledger.usage(0).unwrap().used_bytes, 0);
    allocate(&mut ledger, A, 3, 100);
    ledger.free(A, Handle(3));
    assert_eq!(used(&ledger), 0, "what was made since is true");
}

#[test]
fn missed_charge_counts_while_driver_reports_it() {
    let mut ledger = ledger(100);
    allocate(&mut ledger, A, 1, 30);
    ledger.reconcile(0, 80);
    assert_eq!(ledger.usage(0).unwrap().used_bytes, 80);
    assert!(ledger.reserve(0, 21).is_err());
    ledger.reconcile(0, 30);
    assert_eq!(ledger.usage(0).unwrap().used_bytes, 30);
}

/// What a container can make the ledger retain is bounded: objects and holds.
#[test]
fn ledger_entries_of_a_container_are_bounded() {
    let mut ledger = Ledger::new(&[100], Bounds { objects: 2, holds: 1, pins: 0 });
    allocate(&mut ledger, A, 1, 1);
    ledger.note(A, root(A), Handle(2));
    assert_eq!(ledger.reserve(0, 1), Err(LedgerError::Full));
    ledger.note(A, root(A), Handle(3));
    assert_eq!(ledger.size().objects, 2);
    ledger.hold(Hold::Export { file: 1, index: 0 }, A, Handle(1));
    ledger.hold(Hold::Export { file: 1, index: 0 }, A, Handle(1));
    assert_eq!(ledger.size().holds, 1);
    ledger.free(A, Handle(1));
    ledger.release(Hold::Export { file: 1, index: 0 });
    assert_eq!(used(&ledger), 0);
}

/// A step of a container.
#[derive(Debug, Clone)]
enum Step {
    Allocate {
        gpu: usize,
        client: u32,
        parent: u32,
        handle: u32,
        bytes: u64,
        denied: bool,
    },
    Note {
        client: u32,
        parent: u32,
        handle: u32,
    },
    Duplicate {
        from: (u32, u32),
        to: (u32, u32),
    },
    Hold {
        client: u32,
        handle: u32,
        hold: u8,
    },
    Release {
        hold: u8,
    },
    /// An object is made of the memory in a file.
    Import {
        client: u32,
        handle: u32,
        hold: u8,
    },
    /// Memory of the host is taken. It counts nothing.
    Host {
        client: u32,
        handle: u32,
    },
    Free {
        client: u32,
        handle: u32,
    },
    Close {
        client: u32,
    },
    /// Memory is mapped in some of a tree's eight pages.
    Map {
        client: u32,
        handle: u32,
        tree: u8,
        pages: (u64, u64),
        works: bool,
    },
    Unmap {
        tree: u8,
        pages: (u64, u64),
    },
    CloseFile {
        file: u32,
    },
    /// A process has a client's file: it opened the file, or was given it.
    Share {
        client: u32,
        process: u64,
    },
    /// A process begins that has all that another process has.
    Fork {
        from: u64,
        to: u64,
    },
    /// A process ends, and what it alone had.
    Die {
        process: u64,
    },
    /// An administrator changes a quota.
    Limit {
        gpu: usize,
        bytes: u64,
    },
    /// A step that isn't reported to the ledger.
    Unseen(Box<Step>),
    Reconcile,
}

/// The first and the last page.
fn pages() -> impl Strategy<Value = (u64, u64)> {
    (0u64..8, 0u64..8).prop_map(|(one, other)| (one.min(other), one.max(other)))
}

/// One of four trees: two files, each with two GPUs.
fn tree(number: u8) -> Tree {
    Tree { file: u32::from(number / 2), gpu: u16::from(number % 2) }
}

fn span((first, last): (u64, u64)) -> Span {
    Span::of(first * 4096, (last - first + 1) * 4096).unwrap()
}

/// Quotas of the GPUs at the beginning, in bytes.
const QUOTAS: [u64; 2] = [100, 70];

fn step() -> impl Strategy<Value = Step> {
    let gpu = || 0..QUOTAS.len();
    let process = || 1u64..5;
    let client = || 1u32..4;
    let handle = || 10u32..18;
    let parent = || prop_oneof![Just(0u32), 10u32..18];
    let seen = prop_oneof![
        6 => (gpu(), client(), parent(), handle(), 0u64..60, any::<bool>()).prop_map(
            |(gpu, client, parent, handle, bytes, denied)| Step::Allocate { gpu, client, parent, handle, bytes, denied: denied && bytes % 3 == 0 }
        ),
        1 => (client(), parent(), handle()).prop_map(|(client, parent, handle)| Step::Note { client, parent, handle }),
        2 => ((client(), handle()), (client(), handle())).prop_map(|(from, to)| Step::Duplicate { from, to }),
        2 => (client(), handle(), 0u8..7).prop_map(|(client, handle, hold)| Step::Hold { client, handle, hold }),
        1 => (0u8..7).prop_map(|hold| Step::Release { hold }),
        1 => (client(), handle(), 0u8..4).prop_map(|(client, handle, hold)| Step::Import { client, handle, hold }),
        1 => (client(), handle()).prop_map(|(client, handle)| Step::Host { client, handle }),
        3 => (client(), handle()).prop_map(|(client, handle)| Step::Free { client, handle }),
        1 => client().prop_map(|client| Step::Close { client }),
        3 => (client(), handle(), 0u8..4, pages(), any::<bool>()).prop_map(|(client, handle, tree, pages, works)| {
            Step::Map { client, handle, tree, pages, works }
        }),
        2 => (0u8..4, pages()).prop_map(|(tree, pages)| Step::Unmap { tree, pages }),
        1 => (0u32..2).prop_map(|file| Step::CloseFile { file }),
        2 => (client(), process()).prop_map(|(client, process)| Step::Share { client, process }),
        1 => (process(), process()).prop_map(|(from, to)| Step::Fork { from, to }),
        1 => process().prop_map(|process| Step::Die { process }),
        1 => (gpu(), 0u64..150).prop_map(|(gpu, bytes)| Step::Limit { gpu, bytes }),
    ];
    prop_oneof![8 => seen, 1 => Just(Step::Reconcile)]
}

/// What isn't reported to the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Misses {
    Nothing,
    /// Ends, and other holders of clients: too much counts.
    Ends,
    /// Beginnings, too: too little may count.
    All,
}

/// The driver, as simple as it can be: objects name memory, memory lives while it is named, and a client lives while
/// any process has its file.
#[derive(Debug)]
struct Model {
    misses: Misses,
    limits: [u64; QUOTAS.len()],
    objects: BTreeMap<(u32, u32), (u32, Option<usize>)>,
    holds: BTreeMap<u8, usize>,
    /// The memory that is mapped, by tree and page.
    mapped: BTreeMap<(u8, u64), usize>,
    /// The processes that have a client's file, for clients that were seen with any process.
    holders: BTreeMap<u32, BTreeSet<u64>>,
    /// GPU and bytes of each memory.
    sizes: Vec<(usize, u64)>,
}

impl Model {
    fn new(misses: Misses) -> Self {
        Model {
            misses,
            limits: QUOTAS,
            objects: BTreeMap::new(),
            holds: BTreeMap::new(),
            mapped: BTreeMap::new(),
            holders: BTreeMap::new(),
            sizes: Vec::new(),
        }
    }

    /// The bytes that live on each GPU.
    fn live_bytes(&self) -> [u64; QUOTAS.len()] {
        let objects = self.objects.values().filter_map(|(_, memory)| *memory);
        let retained = self.holds.values().chain(self.mapped.values()).copied();
        let mut live = vec![false; self.sizes.len()];
        objects.chain(retained).for_each(|memory| live[memory] = true);
        let mut bytes = [0; QUOTAS.len()];
        let sizes = self.sizes.iter().zip(live).filter(|(_, live)| *live);
        sizes.for_each(|((gpu, size), _)| bytes[*gpu] += size);
        bytes
    }

    fn has_client(&self, client: u32) -> bool {
        self.holders.contains_key(&client) || self.objects.keys().any(|(of, _)| *of == client)
    }

    fn close(&mut self, client: u32) {
        self.objects.retain(|(owner, _), _| *owner != client);
        self.holders.remove(&client);
    }

    /// Checks that the ledger counts what lives, as far as the ledger can know it.
    #[track_caller]
    fn is_counted(&self, ledger: &Ledger) {
        for (gpu, live_bytes) in self.live_bytes().into_iter().enumerate() {
            let Usage { limit_bytes, used_bytes } = ledger.usage(gpu).unwrap();
            assert_eq!(limit_bytes, self.limits[gpu]);
            match self.misses {
                Misses::Nothing => assert_eq!(used_bytes, live_bytes, "of GPU {gpu}"),
                Misses::Ends => assert!(used_bytes >= live_bytes, "{live_bytes} on GPU {gpu}"),
                Misses::All => {}
            }
        }
    }

    fn free(&mut self, client: u32, handle: u32) {
        if self.objects.remove(&(client, handle)).is_none() {
            return;
        }
        let children: Vec<u32> = self
            .objects
            .iter()
            .filter(|((owner, _), (parent, _))| *owner == client && *parent == handle)
            .map(|((_, child), _)| *child)
            .collect();
        children.into_iter().for_each(|child| self.free(client, child));
    }

    /// The places of files whose memory no object names.
    fn unnamed(&self) -> Vec<u8> {
        let is_named = |memory| self.objects.values().any(|(_, named)| *named == Some(memory));
        let unnamed = self.holds.iter().filter(|(hold, memory)| **hold < 4 && !is_named(**memory));
        unnamed.map(|(hold, _)| *hold).collect()
    }

    /// Whether the driver would make a new object there.
    fn takes(&self, client: u32, parent: u32, handle: u32) -> bool {
        !self.objects.contains_key(&(client, handle))
            && parent != handle
            && (parent == 0 || self.objects.contains_key(&(client, parent)))
    }
}

fn hold(number: u8) -> Hold {
    match number {
        0..4 => Hold::Export { file: u64::from(number / 2), index: u32::from(number % 2) },
        _ => Hold::Mapping { space: u64::from(number), base: 7 },
    }
}

/// Plays `step` in the driver's model, and in the ledger where `seen`.
fn play(ledger: &mut Ledger, model: &mut Model, step: &Step, seen: bool) {
    let top = |client: u32, parent: u32| Handle(if parent == 0 { client } else { parent });
    match *step {
        Step::Allocate { gpu, client, parent, handle, bytes, denied } => {
            if !model.takes(client, parent, handle) {
                return;
            }
            if seen {
                let live_bytes = model.live_bytes()[gpu];
                let fits = bytes <= model.limits[gpu].saturating_sub(live_bytes);
                let reserved = ledger.reserve(gpu, bytes);
                match model.misses {
                    Misses::Nothing => assert_eq!(reserved.is_ok(), fits, "{reserved:?}"),
                    Misses::Ends => assert!(fits || reserved.is_err(), "past the quota"),
                    Misses::All => {}
                }
                // The driver is asked before the refusal, so the refusal is right.
                let reserved = reserved.or_else(|_| {
                    ledger.reconcile(gpu, live_bytes);
                    let again = ledger.reserve(gpu, bytes);
                    assert_eq!(again.is_ok(), fits, "{again:?} of {live_bytes} live");
                    again
                });
                let Ok(reservation) = reserved else { return };
                if denied {
                    return ledger.cancel(reservation);
                }
                commit(ledger, reservation, Client(client), top(client, parent), Handle(handle));
            }
            model.sizes.push((gpu, bytes));
            model.objects.insert((client, handle), (parent, Some(model.sizes.len() - 1)));
        }
        Step::Note { client, parent, handle } => {
            if model.takes(client, parent, handle) {
                model.objects.insert((client, handle), (parent, None));
                ledger.note(Client(client), top(client, parent), Handle(handle));
            }
        }
        Step::Duplicate { from, to } => {
            if let Some((_, memory)) = model.objects.get(&from).copied()
                && model.takes(to.0, 0, to.1)
            {
                model.objects.insert(to, (0, memory));
                let from = (Client(from.0), Handle(from.1));
                let (client, parent) = (Client(to.0), top(to.0, 0));
                ledger.duplicate(from, client, parent, Handle(to.1), Attribution::Here);
            }
        }
        Step::Hold { client, handle, hold: number } => {
            let memory = model.objects.get(&(client, handle)).and_then(|(_, memory)| *memory);
            if let Some(memory) = memory {
                model.holds.insert(number, memory);
                ledger.hold(hold(number), Client(client), Handle(handle));
            }
        }
        Step::Import { client, handle, hold: number } => {
            if let Some(memory) = model.holds.get(&number).copied()
                && model.takes(client, 0, handle)
            {
                model.objects.insert((client, handle), (0, Some(memory)));
                let (client, parent) = (Client(client), top(client, 0));
                ledger.import(hold(number), client, parent, Handle(handle), Attribution::Here);
            }
        }
        Step::Host { client, handle } => {
            if model.takes(client, 0, handle) {
                model.sizes.push((0, 0));
                model.objects.insert((client, handle), (0, Some(model.sizes.len() - 1)));
                let (client, parent) = (Client(client), top(client, 0));
                let handle = Handle(handle);
                ledger.replay(Entry::Commit { gpu: 0, bytes: 0, client, parent, handle });
            }
        }
        Step::Release { hold: number } => {
            model.holds.remove(&number);
            match hold(number) {
                Hold::Mapping { space, .. } => ledger.release_space(space),
                other => ledger.release(other),
            }
        }
        Step::Free { client, handle } => {
            model.free(client, handle);
            if seen {
                ledger.free(Client(client), Handle(handle));
            }
        }
        Step::Close { client } => {
            model.close(client);
            if seen {
                ledger.close(Client(client));
            }
        }
        Step::Map { client, handle, tree: number, pages, works } => {
            let memory = model.objects.get(&(client, handle)).and_then(|(_, memory)| *memory);
            let charge = ledger.charge_of(Client(client), Handle(handle));
            let (Some(memory), Some(charge)) = (memory, charge) else { return };
            let (tree, span) = (tree(number), span(pages));
            let is_there = ledger.is_mapped(tree, span.first, charge);
            if works {
                let pages = (pages.0..=pages.1).map(|page| ((number, page), memory));
                model.mapped.extend(pages);
                ledger.map(tree, span, charge);
                ledger.map_alone(tree, span, charge);
            } else if !is_there {
                ledger.map(tree, span, charge);
                ledger.unmap_range(tree, span.first, charge);
            }
        }
        Step::Unmap { tree: number, pages } => {
            let (first, last) = pages;
            model.mapped.retain(|(of, page), _| *of != number || !(first..=last).contains(page));
            ledger.unmap(tree(number), span(pages));
        }
        Step::CloseFile { file } => {
            model.mapped.retain(|(number, _), _| tree(*number).file != file);
            ledger.close_file(file);
        }
        Step::Unseen(ref step) => play(ledger, model, step, false),
        Step::Share { client, process } => {
            model.holders.entry(client).or_default().insert(process);
            if seen {
                ledger.add_holder(Client(client), Process(process));
            }
        }
        Step::Fork { from, to } => {
            let had = model.holders.iter().filter(|(_, holders)| holders.contains(&from));
            let had: Vec<u32> = had.map(|(client, _)| *client).collect();
            for client in had {
                play(ledger, model, &Step::Share { client, process: to }, seen);
            }
        }
        Step::Die { process } => {
            let mut closed = Vec::new();
            for (client, holders) in &mut model.holders {
                if holders.remove(&process) && holders.is_empty() {
                    closed.push(*client);
                }
            }
            closed.into_iter().for_each(|client| model.close(client));
            if seen {
                ledger.remove_process(Process(process));
                // A process that was never seen may hold them: the driver reports it.
                for client in ledger.orphans() {
                    if !model.has_client(client.0) {
                        ledger.close(client);
                    }
                }
            }
        }
        Step::Limit { gpu, bytes } => {
            ledger.replay(Entry::Limit { gpu, limit_bytes: bytes });
            model.limits[gpu] = bytes;
        }
        Step::Reconcile => {
            for (gpu, live_bytes) in model.live_bytes().into_iter().enumerate() {
                ledger.reconcile(gpu, live_bytes);
                assert_eq!(ledger.usage(gpu).unwrap().used_bytes, live_bytes);
            }
        }
    }
}

fn finish(ledger: &mut Ledger, model: &mut Model) {
    for client in 1..4 {
        play(ledger, model, &Step::Close { client }, true);
    }
    for hold in 0..7 {
        play(ledger, model, &Step::Release { hold }, true);
    }
    for file in 0..2 {
        play(ledger, model, &Step::CloseFile { file }, true);
    }
}

/// A mapped range retains all its memory on either side of the part that was unmapped.
#[test]
fn split_mapped_range_retains_all_its_memory() {
    let mut ledger = ledger(100);
    allocate(&mut ledger, A, 1, 70);
    let charge = ledger.charge_of(A, Handle(1)).unwrap();
    ledger.map_alone(tree(0), span((0, 7)), charge);
    ledger.free(A, Handle(1));
    assert_eq!((used(&ledger), ledger.size().holds), (70, 1));
    ledger.unmap(tree(0), span((3, 4)));
    assert_eq!((used(&ledger), ledger.size().holds), (70, 2));
    // These belong to another GPU and another file.
    ledger.unmap(tree(1), Span::ALL);
    ledger.close_file(1);
    assert_eq!(used(&ledger), 70);
    ledger.unmap(tree(0), span((0, 2)));
    assert_eq!((used(&ledger), ledger.size().holds), (70, 1));
    ledger.unmap(tree(0), span((0, 7)));
    assert_eq!((used(&ledger), ledger.size().holds), (0, 0));
}

#[test]
fn addresses_that_end_before_they_begin_are_none() {
    let mut ledger = ledger(100);
    allocate(&mut ledger, A, 1, 4);
    let (tree, charge) = (tree(0), ledger.charge_of(A, Handle(1)).unwrap());
    let [whole, inverted] = [(1, 9), (9, 1)].map(|(first, last)| Span { first, last });
    ledger.replay(Entry::Map { tree, span: whole, charge });
    let before: Vec<Entry> = ledger.entries().collect();
    ledger.replay(Entry::Map { tree, span: inverted, charge });
    ledger.replay(Entry::MapAlone { tree, span: inverted, charge });
    ledger.replay(Entry::Unmap { tree, span: inverted });
    assert_eq!(ledger.entries().collect::<Vec<_>>(), before);
}

/// A mapping that may exist counts next to the existing one until the driver has answered.
#[test]
fn uncertain_mapping_counts_next_to_existing_one() {
    let mut ledger = ledger(100);
    allocate(&mut ledger, A, 1, 40);
    allocate(&mut ledger, A, 2, 50);
    let [one, two] = [1, 2].map(|handle| ledger.charge_of(A, Handle(handle)).unwrap());
    ledger.map_alone(tree(0), span((0, 7)), one);
    ledger.map(tree(0), span((2, 3)), two);
    ledger.free(A, Handle(1));
    ledger.free(A, Handle(2));
    assert_eq!(used(&ledger), 90);
    let mut failed = copied(&ledger, 1);
    failed.unmap_range(tree(0), span((2, 3)).first, two);
    assert_eq!(used(&failed), 40);
    // The mapping was made again.
    ledger.map_alone(tree(0), span((0, 7)), two);
    assert_eq!((used(&ledger), ledger.size().holds), (50, 1));
}

/// No more mapped ranges than the bound are retained, and rather too much memory than too little is
/// held.
#[test]
fn mapped_ranges_are_bounded_and_rather_overcounted() {
    let mut ledger = Ledger::new(&[100], Bounds { objects: 10, holds: 2, pins: 0 });
    allocate(&mut ledger, A, 1, 70);
    let charge = ledger.charge_of(A, Handle(1)).unwrap();
    ledger.map_alone(tree(0), span((0, 7)), charge);
    ledger.free(A, Handle(1));
    for page in [1, 3, 5] {
        ledger.unmap(tree(0), span((page, page)));
    }
    assert_eq!((used(&ledger), ledger.size().holds), (70, 2));
    ledger.unmap(tree(0), span((0, 7)));
    assert_eq!((used(&ledger), ledger.size().holds), (0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(700))]

    /// A ledger to which everything is reported is exact, and no call passes the quota.
    #[test]
    fn what_is_counted_is_what_is_live(steps in proptest::collection::vec(step(), 0..80)) {
        let (mut ledger, mut model) = (Ledger::new(&QUOTAS, BOUNDS), Model::new(Misses::Nothing));
        for step in &steps {
            play(&mut ledger, &mut model, step, true);
            model.is_counted(&ledger);
            let unnamed = (0..4).filter(|number| ledger.is_unnamed(hold(*number)));
            prop_assert_eq!(unnamed.collect::<Vec<_>>(), model.unnamed());
            let places = (0..2).map(|file| ledger.exported(file).count()).sum::<usize>();
            prop_assert_eq!(places, model.holds.range(..4).count());
            let holders = ledger.holders().map(|(client, process)| (client.0, process.0));
            let has = model.holders.iter().flat_map(|(of, all)| all.iter().map(|one| (*of, *one)));
            prop_assert!(holders.collect::<BTreeSet<_>>().into_iter().eq(has));
        }
        finish(&mut ledger, &mut model);
        model.is_counted(&ledger);
        prop_assert_eq!((ledger.size().objects, ledger.size().holds), (0, 0));
        prop_assert!(ledger.charges.is_empty() && ledger.holders.is_empty());
    }

    /// If ends and some processes aren't reported to the ledger, it counts too much, never too little. Asking the
    /// driver corrects it, and in the end nothing is left.
    #[test]
    fn missed_ends_never_let_anybody_past_the_quota(
        steps in proptest::collection::vec((step(), any::<bool>()), 0..80)
    ) {
        let (mut ledger, mut model) = (Ledger::new(&QUOTAS, BOUNDS), Model::new(Misses::Ends));
        for (step, seen) in steps {
            let lossy = matches!(
                step,
                Step::Free { .. } | Step::Close { .. } | Step::Die { .. } | Step::Share { .. }
                    | Step::Fork { .. }
            );
            let step = if lossy && !seen { Step::Unseen(Box::new(step)) } else { step };
            play(&mut ledger, &mut model, &step, true);
            model.is_counted(&ledger);
        }
        finish(&mut ledger, &mut model);
        play(&mut ledger, &mut model, &Step::Reconcile, true);
        prop_assert_eq!([0, 1].map(|gpu| ledger.usage(gpu).unwrap().used_bytes), [0, 0]);
    }

    /// Some memory isn't reported to the ledger either. When the driver was asked, the ledger knows it, and no call
    /// gets memory that is taken already.
    #[test]
    fn missed_memory_counts_after_reconcile_and_never_lasts(
        steps in proptest::collection::vec((step(), any::<bool>()), 0..80)
    ) {
        let (mut ledger, mut model) = (Ledger::new(&QUOTAS, BOUNDS), Model::new(Misses::All));
        for (step, seen) in steps {
            let lossy = matches!(
                step,
                Step::Allocate { .. } | Step::Free { .. } | Step::Close { .. } | Step::Die { .. }
                    | Step::Share { .. } | Step::Fork { .. }
            );
            let is_asked = matches!(step, Step::Reconcile);
            let step = if lossy && !seen { Step::Unseen(Box::new(step)) } else { step };
            play(&mut ledger, &mut model, &step, true);
            for (gpu, live_bytes) in model.live_bytes().into_iter().enumerate().filter(|_| is_asked) {
                let left = model.limits[gpu].saturating_sub(live_bytes);
                prop_assert!(ledger.reserve(gpu, left + 1).is_err());
                let all = ledger.reserve(gpu, left);
                prop_assert!(all.is_ok());
                ledger.cancel(all.unwrap());
            }
        }
        finish(&mut ledger, &mut model);
        play(&mut ledger, &mut model, &Step::Reconcile, true);
        prop_assert_eq!([0, 1].map(|gpu| ledger.usage(gpu).unwrap().used_bytes), [0, 0]);
    }
}

/// A ledger that is made from another one's entries.
fn copied(ledger: &Ledger, gpus: usize) -> Ledger {
    let mut copy = Ledger::new(&vec![0; gpus], ledger.bounds);
    ledger.entries().for_each(|entry| copy.replay(entry));
    copy
}

/// Another version may have written the snapshot.
#[test]
fn charge_id_is_a_number_in_a_snapshot() {
    let charge = ChargeId(300);
    let (hold, before) = (Hold::Export { file: 1, index: 2 }, PinPlace::Mappings { charge });
    let (tree, span) = (Tree { file: 1, gpu: 2 }, Span { first: 3, last: 4 });
    let (client, parent, handle) = (Client(7), Handle(8), Handle(9));
    let shown = Attribution::Here;
    let entries: [(Entry, &[u8]); 6] = [
        (Entry::NextCharge { id: charge }, &[13, 0xac, 2]),
        (Entry::Charge { id: charge, gpu: 1, bytes: 70, epoch: 5 }, &[14, 0xac, 2, 1, 70, 5]),
        (
            Entry::Object { client, parent, handle, charge: Some(charge), shown },
            &[15, 7, 8, 9, 1, 0xac, 2, 0],
        ),
        (Entry::Held { hold, charge }, &[16, 1, 1, 2, 0xac, 2]),
        (Entry::Map { tree, span, charge }, &[17, 1, 2, 3, 4, 0xac, 2]),
        (Entry::Pin { before, number: 6 }, &[22, 0, 0xac, 2, 6]),
    ];
    for (entry, bytes) in entries {
        assert_eq!(postcard::to_allocvec(&entry).unwrap(), bytes, "{entry:?}");
    }
}

#[test]
fn what_only_a_mapping_keeps_is_hidden() {
    let mut ledger = ledger(100);
    allocate(&mut ledger, A, 1, 70);
    let expected = |ledger: &Ledger| ledger.expected(0).unwrap();
    ledger.hold(Hold::Mapping { space: 1, base: 0 }, A, Handle(1));
    assert_eq!((used(&ledger), expected(&ledger).hidden_bytes), (70, 0));
    ledger.free(A, Handle(1));
    assert_eq!((used(&ledger), expected(&ledger).hidden_bytes), (70, 70));
    ledger.watch();
    assert_eq!(expected(&ledger).peak_bytes, 0);
    ledger.release_space(1);
    assert_eq!((used(&ledger), expected(&ledger).hidden_bytes), (0, 0));
    assert_eq!(expected(&ledger).peak_bytes, 0);
}

#[test]
fn importing_names_what_an_export_holds() {
    let mut ledger = ledger(100);
    allocate(&mut ledger, A, 1, 70);
    let export = Hold::Export { file: 1, index: 0 };
    ledger.hold(export, A, Handle(1));
    ledger.free(A, Handle(1));
    ledger.import(export, B, root(B), Handle(9), Attribution::Here);
    ledger.release(export);
    assert_eq!((used(&ledger), ledger.expected(0).unwrap().hidden_bytes), (70, 0));
    ledger.free(B, Handle(9));
    assert_eq!(used(&ledger), 0);
}

proptest! {
    #[test]
    fn ledger_rebuilt_from_its_entries_is_equal(
        steps in proptest::collection::vec((0..18_u8, 1..6_u32, 1..6_u32, 1..40_u64), 0..60),
    ) {
        let mut ledger = Ledger::new(&[100, 200], BOUNDS);
        for (own, (kind, handle, other, bytes)) in (1_u64..).zip(steps) {
            let hold = match handle {
                1 => Hold::Export { file: 1, index: other },
                _ => Hold::Mapping { space: 1, base: u64::from(other) },
            };
            let process = Process(u64::from(other));
            match kind {
                0 | 1 => {
                    let gpu = usize::from(kind);
                    if let Ok(reservation) = ledger.reserve(gpu, bytes) {
                        commit(&mut ledger, reservation, A, root(A), Handle(handle));
                    }
                }
                2 => {
                    let shown = [Attribution::Here, Attribution::On(1)][usize::from(bytes > 30)];
                    ledger.duplicate((A, Handle(handle)), B, root(B), Handle(other), shown);
                }
                3 => ledger.hold(hold, A, Handle(handle)),
                4 => ledger.free(A, Handle(handle)),
                5 => ledger.release(hold),
                6 => ledger.add_holder(A, process),
                7 | 8 => {
                    let tree = tree(u8::try_from(other % 4).unwrap());
                    let span = span((bytes % 8, 8));
                    match ledger.charge_of(A, Handle(handle)) {
                        Some(charge) if kind == 7 => ledger.map(tree, span, charge),
                        Some(charge) => ledger.map_alone(tree, span, charge),
                        None => ledger.unmap(tree, span),
                    }
                }
                9 => ledger.unmap(tree(1), span((u64::from(handle), u64::from(handle)))),
                10 => {
                    let shown = [Attribution::Here, Attribution::On(1)][usize::from(bytes > 30)];
                    ledger.import(hold, B, root(B), Handle(other), shown);
                }
                11 => ledger.free(B, Handle(other)),
                12..15 => {
                    let charge = ledger.charge_of(A, Handle(handle));
                    let (client, handle) = (B, Handle(other));
                    let before = [
                        charge.map(|charge| PinPlace::Mappings { charge }),
                        Some(PinPlace::Export { hold }),
                        Some(PinPlace::Name { client, handle }),
                    ];
                    if let Some(before) = before[(bytes % 3) as usize] {
                        ledger.pin(before, own);
                    }
                }
                15 => {
                    for own in ledger.loose_pins().into_iter().take(1) {
                        ledger.unpin(own);
                    }
                }
                16 => ledger.unpin(own.saturating_sub(bytes)),
                _ => ledger.reconcile(0, bytes),
            }
        }
        // Each pin stands somewhere or is loose, and counts once in its charge.
        let counted: u32 = ledger.charges.values().map(|charge| charge.pins).sum();
        let size = ledger.size().pins;
        prop_assert_eq!((ledger.pins().count(), counted as usize), (size, size));
        let mut copy = copied(&ledger, 2);
        for gpu in 0..2 {
            prop_assert_eq!(copy.usage(gpu), ledger.usage(gpu));
            let (ours, theirs) = (copy.expected(gpu).unwrap(), ledger.expected(gpu).unwrap());
            prop_assert_eq!(ours.hidden_bytes, theirs.hidden_bytes);
        }
        prop_assert_eq!(copy.has_pins(), ledger.has_pins());
        prop_assert!(copy.entries().eq(ledger.entries()));
        // Both go on alike: the next charge has the same id in both.
        for ledger in [&mut ledger, &mut copy] {
            let (client, parent, handle) = (A, root(A), Handle(9));
            ledger.replay(Entry::Commit { gpu: 0, bytes: 1, client, parent, handle });
        }
        prop_assert_eq!(copy.charge_of(A, Handle(9)), ledger.charge_of(A, Handle(9)));
        prop_assert!(copy.entries().eq(ledger.entries()));
        // In the end nothing is left of either.
        for ledger in [&mut ledger, &mut copy] {
            [A, B].into_iter().for_each(|client| ledger.close(client));
            (1..6).for_each(|base| ledger.release(Hold::Mapping { space: 1, base }));
            (1..6).for_each(|index| ledger.release(Hold::Export { file: 1, index }));
            (0..4).for_each(|at| ledger.unmap(tree(at), Span::ALL));
        }
        prop_assert!(copy.entries().eq(ledger.entries()));
        for ledger in [&mut ledger, &mut copy] {
            ledger.entries().collect::<Vec<_>>().into_iter().for_each(|entry| {
                if let Entry::Pin { before, number: own } = entry {
                    assert!(matches!(before, PinPlace::Loose { .. }), "{before:?}");
                    ledger.unpin(own);
                }
            });
            prop_assert!(ledger.charges.is_empty());
            prop_assert!(!ledger.has_pins() && ledger.size().pins == 0);
        }
    }
}

/// Puts a pin there, if that is possible. Returns whether it was.
fn pinned(ledger: &mut Ledger, before: PinPlace, own: u64) -> bool {
    let may = ledger.may_pin(before);
    if may {
        ledger.pin(before, own);
        assert_eq!(ledger.pin_at(before), Some(own));
    }
    may
}

/// A pin becomes loose if nothing is left behind it, and its memory counts until the pin is
/// removed.
#[test]
fn pin_becomes_loose_if_unused_and_counts_on() {
    let mut ledger = ledger(100);
    allocate(&mut ledger, A, 1, 70);
    let charge = ledger.charge_of(A, Handle(1)).unwrap();
    let (tree, export) = (Tree { file: 1, gpu: 0 }, Hold::Export { file: 5, index: 0 });
    assert!(!pinned(&mut ledger, PinPlace::Export { hold: export }, 90), "nothing was exported");
    ledger.map(tree, Span::ALL, charge);
    ledger.hold(export, A, Handle(1));
    let mappings = PinPlace::Mappings { charge };
    assert!(pinned(&mut ledger, mappings, 91) && !pinned(&mut ledger, mappings, 92));
    assert!(pinned(&mut ledger, PinPlace::Export { hold: export }, 93));
    assert_eq!((ledger.loose_pins(), ledger.pin_at(mappings)), (vec![], Some(91)));
    ledger.pin(mappings, 94);
    assert_eq!((ledger.loose_pins(), ledger.pin_at(mappings)), (vec![], Some(94)));
    ledger.free(A, Handle(1));
    ledger.release(export);
    assert_eq!(ledger.loose_pins(), [93]);
    ledger.unmap(tree, Span::ALL);
    assert_eq!((ledger.loose_pins(), ledger.pin_at(mappings)), (vec![93, 94], None));
    assert_eq!(used(&ledger), 70, "the driver has it still");
    let copy = copied(&ledger, 1);
    assert_eq!((used(&copy), copy.loose_pins()), (70, vec![93, 94]));
    for own in [93, 93, 91, 94] {
        assert!(ledger.has_pins());
        ledger.unpin(own);
    }
    assert_eq!((used(&ledger), ledger.has_pins()), (0, false));
    assert!(!pinned(&mut ledger, mappings, 95), "of what is gone");
}

/// An export in the place of another has a pin of its own.
#[test]
fn replacing_export_has_a_pin_of_its_own() {
    let mut ledger = ledger(100);
    let export = Hold::Export { file: 5, index: 0 };
    for handle in [1, 2] {
        allocate(&mut ledger, A, handle, 30);
        ledger.hold(export, A, Handle(handle));
        assert!(pinned(&mut ledger, PinPlace::Export { hold: export }, 90 + u64::from(handle)));
    }
    assert_eq!(ledger.loose_pins(), [91]);
    ledger.unpin(91);
    ledger.free(A, Handle(1));
    assert_eq!(used(&ledger), 30);
    // Another export keeps the memory alive. The pin of this one doesn't stand before it.
    ledger.hold(Hold::Export { file: 6, index: 0 }, A, Handle(2));
    ledger.release(export);
    assert_eq!(ledger.loose_pins(), [92]);
}

#[test]
fn handle_attributed_to_another_gpu_has_own_pin() {
    let mut ledger = Ledger::new(&[100, 100], BOUNDS);
    allocate(&mut ledger, A, 1, 30);
    let peaks =
        |ledger: &Ledger| [0, 1].map(|gpu| ledger.expected(gpu).map(|is| is.peak_bytes).unwrap());
    let tree = Tree { file: 1, gpu: 0 };
    let charge = ledger.charge_of(A, Handle(1)).unwrap();
    for (handle, shown) in [(2, Attribution::On(1)), (4, Attribution::Here)] {
        ledger.duplicate((A, Handle(1)), B, root(B), Handle(handle), shown);
        assert_eq!(peaks(&ledger), [30, if handle == 2 { 30 } else { 0 }]);
        let before = PinPlace::Name { client: B, handle: Handle(handle) };
        assert_eq!(pinned(&mut ledger, before, u64::from(handle)), shown != Attribution::Here);
    }
    // Mappings have nothing to do with the pins of handles.
    ledger.map(tree, Span::ALL, charge);
    assert!(pinned(&mut ledger, PinPlace::Mappings { charge }, 9));
    ledger.unmap(tree, Span::ALL);
    assert_eq!(ledger.loose_pins(), [9]);
    ledger.free(A, Handle(1));
    ledger.free(B, Handle(2));
    assert_eq!(ledger.loose_pins(), [2, 9]);
    ledger.close(B);
    assert_eq!((ledger.loose_pins(), used(&ledger)), (vec![2, 9], 30));
    [2, 9].into_iter().for_each(|own| ledger.unpin(own));
    assert_eq!((used(&ledger), ledger.has_pins()), (0, false));
}

/// A pin with nothing behind it that is recorded twice is one pin.
#[test]
fn loose_pin_recorded_twice_is_one() {
    let mut ledger = ledger(100);
    allocate(&mut ledger, A, 1, 70);
    let nothing = PinPlace::Loose { charge: ledger.charge_of(A, Handle(1)).unwrap() };
    (0..2).for_each(|_| ledger.pin(nothing, 9));
    assert_eq!((ledger.loose_pins(), ledger.size().pins), (vec![9], 1));
    ledger.unpin(9);
    ledger.free(A, Handle(1));
    assert_eq!((used(&ledger), ledger.has_pins(), ledger.size().pins), (0, false, 0));
}

#[test]
fn pins_are_bounded_over_all_memory_together() {
    let bounds = Bounds { pins: 2, ..BOUNDS };
    let mut ledger = Ledger::new(&[100], bounds);
    for handle in [1, 2, 3] {
        allocate(&mut ledger, A, handle, 10);
        let charge = ledger.charge_of(A, Handle(handle)).unwrap();
        ledger.map(tree(0), span((u64::from(handle), u64::from(handle))), charge);
        let may = pinned(&mut ledger, PinPlace::Mappings { charge }, u64::from(handle));
        assert_eq!(may, handle < 3);
    }
    ledger.unmap(tree(0), Span::ALL);
    assert_eq!(ledger.loose_pins(), [1, 2]);
    [1, 2].into_iter().for_each(|own| ledger.unpin(own));
    assert_eq!(ledger.size().pins, 0);
}
