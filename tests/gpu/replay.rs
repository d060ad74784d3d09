//! Driver calls of real programs, replayed: every call, class, control and size in `corpus` is decided
//! on, each by something that was written down for it, and the ledger keeps account of all of them.
//!
//! What nothing was written down for would be refused, or pass unseen, and the program would meet that
//! first. A new recording that shows such a call fails here, with a list.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use cgpu_core::ledger::{
    Attribution, Bounds, Client, Entry, Handle, Ledger, LedgerError, Span, Tree,
};
use cgpu_monitor::decide::{Verdict, judge, judge_uvm};
use cgpu_monitor::gate::is_decided_by_monitor;
use cgpu_record::corpus::{self, Line, MAX_FILE_BYTES, Map};
use nvrm::class::{Use, class_use};
use nvrm::control::{ControlKind, Pieces, check, known, processes};
use nvrm::memory;
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use nvrm::number::*;
use nvrm::{Command, Meaning, Release, control, fbinfo, uvm};

/// Calls that are not trapped, and why nothing has to be seen of them. Those of `nvrm::number` that are
/// trapped at their known sizes are not among them.
pub(crate) const UNTRAPPED: &[(u32, &str)] = &[
    (NV_ESC_RM_SHARE, "lends an object, whose memory is charged to its owner"),
    (NV_ESC_RM_IDLE_CHANNELS, "waits"),
    (NV_ESC_RM_MAP_MEMORY, "shows memory that there is"),
    (NV_ESC_RM_UNMAP_MEMORY, "as its map"),
    (NV_ESC_RM_ALLOC_CONTEXT_DMA2, "a context for memory that there is, freed with it"),
    (NV_ESC_RM_MAP_MEMORY_DMA, "addresses of memory that there is"),
    (NV_ESC_RM_UNMAP_MEMORY_DMA, "as its map"),
    (NV_ESC_RM_BIND_CONTEXT_DMA, "ties a context to a channel"),
    (NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO, "reports where a mapping is"),
    (NV_ESC_CARD_INFO, "lists GPUs and their addresses"),
    (NV_ESC_REGISTER_FD, "ties two files of the caller's"),
    (NV_ESC_ALLOC_OS_EVENT, "an event"),
    (NV_ESC_FREE_OS_EVENT, "an event"),
    (NV_ESC_STATUS_CODE, "reports a status"),
    (NV_ESC_CHECK_VERSION_STR, "compares versions"),
    (NV_ESC_ATTACH_GPUS_TO_FD, "keeps GPUs awake"),
    (NV_ESC_SYS_PARAMS, "reports the size of a block of memory"),
    (NV_ESC_NUMA_INFO, "reports the host's memory"),
    (NV_ESC_WAIT_OPEN_COMPLETE, "waits"),
];

/// Nothing is managed memory where a mapping of nvidia-uvm has no offset.
const MAP_SHARED: u64 = 1;

/// The decision on a call, in words; or what is undecided about it.
type Decision = Result<String, String>;

fn decide_class(release: &Release, class: u32, params: Option<&[u8]>) -> Decision {
    let found = class_use(class);
    let stated = params.and_then(|params| u32::try_from(params.len()).ok());
    match found.does {
        Use::Unknown => return Err(format!("class {class:#x} is not known")),
        Use::Takes => {
            let decoded = memory::decode(release, class, params.unwrap_or_default());
            decoded.map_err(|refusal| refusal.to_string())?;
        }
        Use::KeepsAlive
        | Use::Hidden
        | Use::Shared
        | Use::Unneeded
        | Use::Nothing
        | Use::Privileged => {
            memory::params_size(release, class, stated).map_err(|refusal| refusal.to_string())?;
        }
    }
    Ok(format!("class {class:#x}: {}", found.why))
}

/// A control by its number, its flags, and the size of its parameters.
fn decide_control(release: &Release, command: u32, flags: u32, params: &[u8]) -> Decision {
    let known_as = match known(command) {
        Some(ControlKind::Refused(why)) => {
            return Ok(format!("control {command:#x}: refused, {why}"));
        }
        _ => check(release, command, flags).map_err(|refusal| refusal.to_string())?,
    };
    let wrong_size = || Err(format!("control {command:#x} of {} bytes", params.len()));
    match known_as {
        // Without parameters the driver says what it says to that.
        _ if params.is_empty() => {}
        ControlKind::Nested if Pieces::of(command, params).is_err() => return wrong_size(),
        ControlKind::Memory if fbinfo::list(release, command, params).is_err() => {
            return wrong_size();
        }
        ControlKind::Processes if !processes::is_size(command, params.len()) => {
            return wrong_size();
        }
        ControlKind::Exports(does)
            if nvrm::export::layout(release, does, params.len()).is_none() =>
        {
            return wrong_size();
        }
        _ if params.len() > control::MAX_PARAMS_BYTES => return wrong_size(),
        _ => {}
    }
    Ok(format!("control {command:#x}: {known_as:?}"))
}

/// A call to `nvidiactl` or `nvidiaN`.
fn decide(release: &Release, call: &corpus::Call) -> Decision {
    let command = Command::of_ioctl(call.request);
    let named = format!("escape {} of {} bytes", command.number(), command.size());
    let decoded = nvrm::decode(release, command, &call.bytes.before.0);
    let mut decoded = decoded.map_err(|refusal| format!("{named}: {refusal}"))?;
    if !is_decided_by_monitor(call.request) {
        let found = UNTRAPPED.iter().find(|(number, _)| *number == command.number());
        let (_, why) =
            found.ok_or_else(|| format!("{named} is not trapped: UNTRAPPED lacks its reason"))?;
        return Ok(format!("{named}: not trapped, {why}"));
    }
    if let nvrm::Call::Wrapped { command, .. } = decoded.call {
        let inner =
            call.wrapped.as_ref().ok_or_else(|| format!("{named}: what it wraps was not read"))?;
        decoded = nvrm::decode(release, command, &inner.before.0)
            .map_err(|refusal| format!("{named}: {refusal}"))?;
    }
    let params = call.params.as_ref().map(|params| params.before.0.as_slice());
    let what = match decoded.call {
        nvrm::Call::Control { command, flags, .. } => {
            decide_control(release, command, flags, params.unwrap_or_default())
        }
        nvrm::Call::Alloc(alloc) => decide_class(release, alloc.class, params),
        nvrm::Call::AllocMemory { class, .. } | nvrm::Call::AllocObject { class, .. } => {
            match class_use(class).does {
                Use::Unknown => Err(format!("class {class:#x} is not known")),
                _ => Ok(format!("class {class:#x}")),
            }
        }
        _ => Ok(named.clone()),
    }?;
    Ok(match judge(release, &decoded.call) {
        Verdict::Execute => format!("{what}: executed"),
        Verdict::Continue(passed) => format!("{what}: continues, as {passed:?}"),
        Verdict::Refuse(answer) => format!("{what}: refused with {answer:?}"),
    })
}

/// A call to `nvidia-uvm`.
fn decide_uvm(release: &Release, call: &corpus::Call) -> Decision {
    let number = call.request;
    let named = format!("uvm {number:#x}");
    uvm::params_size(release, number).map_err(|refusal| format!("{named}: {refusal}"))?;
    let decoded = uvm::decode(release, number, &call.bytes.before.0);
    let decoded = decoded.map_err(|refusal| format!("{named}: {refusal}"))?;
    Ok(match (is_decided_by_monitor(call.request), judge_uvm(&decoded.call)) {
        (false, Verdict::Continue(passed)) => format!("{named}: not trapped, {passed:?}"),
        (false, verdict) => {
            return Err(format!("{named} is not trapped, and should be: {verdict:?}"));
        }
        (true, verdict) => format!("{named}: {verdict:?}"),
    })
}

/// An account of one container whose only GPU the recorded program used.
struct Account {
    release: Release,
    ledger: Ledger,
    peak_bytes: u64,
    refused: u64,
    clients: BTreeSet<u32>,
    /// Those that memory was mapped for.
    gpus: Vec<[u8; 16]>,
}

impl Account {
    fn new(release: &Release, quota_bytes: u64) -> Self {
        let bounds = Bounds { objects: 1 << 16, holds: 1 << 16, pins: 1 << 16 };
        let ledger = Ledger::new(&[quota_bytes], bounds);
        Account {
            release: release.clone(),
            ledger,
            peak_bytes: 0,
            refused: 0,
            clients: BTreeSet::new(),
            gpus: Vec::new(),
        }
    }

    fn used_bytes(&self) -> u64 {
        self.ledger.usage(0).expect("there is one GPU").used_bytes
    }

    /// Enters what a call did that the driver made.
    fn enter(&mut self, call: &corpus::Call) {
        if call.result != 0 {
            return;
        }
        match call.node.starts_with("nvidia-uvm") {
            true => self.enter_uvm(call),
            false => self.enter_escape(call),
        }
        self.peak_bytes = self.peak_bytes.max(self.used_bytes());
    }

    fn enter_escape(&mut self, call: &corpus::Call) {
        let mut command = Command::of_ioctl(call.request);
        let mut copies = &call.bytes;
        let Ok(mut before) = nvrm::decode(&self.release, command, &copies.before.0) else { return };
        if let (nvrm::Call::Wrapped { command: inner, .. }, Some(wrapped)) =
            (before.call, &call.wrapped)
        {
            (command, copies) = (inner, wrapped);
            let Ok(decoded) = nvrm::decode(&self.release, command, &copies.before.0) else {
                return;
            };
            before = decoded;
        }
        let status =
            before.layout.and_then(|layout| layout.view(copies.after())?.u32(Meaning::Status));
        let Ok(after) = nvrm::decode(&self.release, command, copies.after()) else { return };
        if status != Some(NV_OK) {
            return;
        }
        match (before.call, after.call) {
            (nvrm::Call::Alloc(asked), nvrm::Call::Alloc(made)) => self.made(&asked, &made, call),
            (
                nvrm::Call::VidHeap { client, parent, function },
                nvrm::Call::VidHeap { function: done, .. },
            ) => {
                let client = Client(client);
                if let nvrm::call::VidHeap::Free { handle } = function {
                    self.ledger.free(client, Handle(handle));
                }
                if let nvrm::call::VidHeap::Alloc { class, size_bytes, layout, .. } = function
                    && let nvrm::call::VidHeap::Alloc { handle, .. } = done
                    && class_use(class).does == Use::Takes
                {
                    let given = memory::given_bytes(layout, copies.after());
                    self.take(given.unwrap_or(size_bytes), client, Handle(parent), Handle(handle));
                }
            }
            (nvrm::Call::Free(object), _) if object.handle == object.client => {
                self.clients.remove(&object.client);
                self.ledger.close(Client(object.client));
            }
            (nvrm::Call::Free(object), _) => {
                self.ledger.free(Client(object.client), Handle(object.handle))
            }
            (nvrm::Call::Dup { source_client, source, .. }, nvrm::Call::Dup { object, .. }) => {
                let source = (Client(source_client), Handle(source));
                let (client, parent) = (Client(object.client), Handle(object.parent));
                self.ledger.duplicate(
                    source,
                    client,
                    parent,
                    Handle(object.handle),
                    Attribution::Here,
                );
            }
            _ => {}
        }
    }

    fn made(&mut self, asked: &nvrm::call::Alloc, made: &nvrm::call::Alloc, call: &corpus::Call) {
        let (client, parent, handle) = (made.object.client, made.object.parent, made.object.handle);
        if [NV01_ROOT, NV01_ROOT_NON_PRIV, NV01_ROOT_CLIENT].contains(&asked.class) {
            self.clients.insert(handle);
            return;
        }
        let (client, parent, handle) = (Client(client), Handle(parent), Handle(handle));
        let params = call.params.as_ref();
        let memory = params
            .and_then(|params| memory::decode(&self.release, asked.class, &params.before.0).ok());
        match (class_use(asked.class).does, memory, params) {
            (Use::Takes, Some(memory), Some(params)) => {
                let given =
                    memory::given_bytes(memory.layout, params.after()).unwrap_or(memory.size_bytes);
                self.take(given, client, parent, handle);
            }
            _ => self.ledger.note(client, parent, handle),
        }
    }

    fn take(&mut self, bytes: u64, client: Client, parent: Handle, handle: Handle) {
        match self.ledger.reserve(0, bytes) {
            Ok(reservation) => {
                self.ledger.cancel(reservation);
                self.ledger.replay(Entry::Commit { gpu: 0, bytes, client, parent, handle });
            }
            Err(LedgerError::OverQuota { .. }) => self.refused += 1,
            Err(error) => panic!("{error}"),
        }
    }

    fn enter_uvm(&mut self, call: &corpus::Call) {
        let number = call.request;
        let Ok(decoded) = uvm::decode(&self.release, number, &call.bytes.before.0) else { return };
        // A program has one file of it.
        let file = call.process;
        match decoded.call {
            uvm::Call::MapExternal { range, memory } => {
                let layout = decoded.layout.expect("it is read");
                let gpus = uvm::mapping_gpus(layout, &call.bytes.before.0).unwrap_or_default();
                let span = Span::of(range.base, range.length);
                let (client, handle) = (Client(memory.client), Handle(memory.handle));
                // Of what a test's quota refused there is nothing to hold.
                let charge = self.ledger.charge_of(client, handle);
                for uuid in gpus {
                    let tree = self.tree(file, uuid);
                    if let (Some(charge), Some(span)) = (charge, span) {
                        self.ledger.map_alone(tree, span, charge);
                    }
                }
            }
            uvm::Call::UnmapExternal { range, uuid } => {
                let tree = self.tree(file, uuid);
                let span = Span::of(range.base, range.length);
                span.into_iter().for_each(|span| self.ledger.unmap(tree, span));
            }
            uvm::Call::UnregisterGpu { uuid } | uvm::Call::UnregisterVaSpace { uuid } => {
                let tree = self.tree(file, uuid);
                self.ledger.unmap(tree, Span::ALL);
            }
            uvm::Call::Free { base, length } => {
                let pieces: Vec<(Tree, Span)> =
                    self.ledger.ranges(file).map(|(tree, span, _)| (tree, span)).collect();
                let freed = length.and_then(|length| Span::of(base, length));
                for (tree, span) in pieces {
                    // Without a length what begins there is all that is known to be of it.
                    let own = (span.first == base).then_some(span);
                    freed.or(own).into_iter().for_each(|freed| self.ledger.unmap(tree, freed));
                }
            }
            _ => {}
        }
    }

    fn tree(&mut self, file: u32, uuid: [u8; 16]) -> Tree {
        let known = self.gpus.iter().position(|gpu| *gpu == uuid);
        let gpu = known.unwrap_or_else(|| {
            self.gpus.push(uuid);
            self.gpus.len() - 1
        });
        Tree { file, gpu: gpu.try_into().expect("there are few") }
    }

    /// The program has ended: its mappings are gone, and its clients.
    fn end(&mut self, processes: u32) {
        (0..processes).for_each(|file| self.ledger.close_file(file));
        for client in std::mem::take(&mut self.clients) {
            self.ledger.close(Client(client));
        }
    }
}

struct Recording {
    name: String,
    release: Release,
    lines: Vec<Line>,
}

impl Recording {
    fn read(path: &Path) -> Self {
        let name = path.file_name().expect("a file has a name").to_string_lossy().into_owned();
        let size = path.metadata().expect("it is there").len();
        assert!(size <= MAX_FILE_BYTES, "{name} has {size} bytes");
        let lines = corpus::read(path).unwrap_or_else(|error| panic!("{name}: {error}"));
        let Some(Line::Head { driver, .. }) = lines.first() else { panic!("{name} has no head") };
        assert!(matches!(lines.last(), Some(Line::Tail { .. })), "{name} was cut off");
        let release = driver
            .parse()
            .map(Release::of)
            .expect("a version")
            .expect("a driver that is supported");
        Recording { name, release, lines }
    }

    fn calls(&self) -> impl Iterator<Item = &corpus::Call> {
        self.lines
            .iter()
            .filter_map(|line| if let Line::Call(call) = line { Some(&**call) } else { None })
    }

    fn maps(&self) -> impl Iterator<Item = &Map> {
        self.lines
            .iter()
            .filter_map(|line| if let Line::Map(map) = line { Some(map) } else { None })
    }

    /// What is undecided, and how often it's met.
    fn undecided(&self) -> BTreeMap<String, u32> {
        let mut undecided = BTreeMap::new();
        for call in self.calls() {
            let decision = match call.node.as_str() {
                "nvidia-uvm" => decide_uvm(&self.release, call),
                node if node == "nvidiactl"
                    || node.trim_start_matches("nvidia").parse::<u32>().is_ok() =>
                {
                    decide(&self.release, call)
                }
                node => Err(format!("the file {node} is none that a container gets")),
            };
            if let Err(what) = decision {
                *undecided.entry(what).or_insert(0) += 1;
            }
        }
        // Of files of UVM, what is shared and has an offset is managed memory or was announced; which
        // of the two, the monitor knows. A private one is no memory of a GPU's.
        for map in self.maps().filter(|map| map.node == "nvidia-uvm" && map.offset != 0) {
            if map.flags & MAP_SHARED == 0 && map.result >= 0 {
                *undecided.entry("a private mapping of nvidia-uvm".to_owned()).or_insert(0) += 1;
            }
        }
        undecided
    }

    fn account(&self, quota_bytes: u64) -> Account {
        let mut account = Account::new(&self.release, quota_bytes);
        self.calls().for_each(|call| account.enter(call));
        account
    }

    fn processes(&self) -> u32 {
        let maps = self.maps().map(|map| map.process);
        self.calls().map(|call| call.process).chain(maps).max().map_or(0, |last| last + 1)
    }
}

fn recordings() -> Vec<Recording> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu/corpus");
    let entries = std::fs::read_dir(&directory).expect("there is a corpus");
    let mut files: Vec<PathBuf> =
        entries.map(|entry| entry.expect("it can be read").path()).collect();
    files.retain(|file| file.to_string_lossy().ends_with(".jsonl.gz"));
    files.sort();
    assert!(!files.is_empty(), "{} is empty", directory.display());
    files.iter().map(|file| Recording::read(file)).collect()
}

#[test]
fn every_recorded_call_is_decided_on() {
    let mut all = String::new();
    for recording in recordings() {
        for (what, times) in recording.undecided() {
            all += &format!("{}: {times} times {what}\n", recording.name);
        }
    }
    assert!(all.is_empty(), "undecided:\n{all}");
}

/// A program that works without us doesn't meet a refusal in what it was recorded to call.
#[test]
fn no_recorded_call_is_refused() {
    let mut refused = BTreeSet::new();
    for recording in recordings() {
        for call in recording.calls().filter(|call| !call.node.starts_with("nvidia-uvm")) {
            let decision = decide(&recording.release, call).unwrap_or_else(|what| what);
            if decision.contains("refused") {
                refused.insert(decision);
            }
        }
    }
    assert!(refused.is_empty(), "{refused:#?}");
}

/// The ledger follows every recording and is empty after it.
#[test]
fn ledger_follows_recordings_and_ends_empty() {
    for recording in recordings() {
        let mut free = recording.account(u64::MAX / 2);
        assert_eq!(free.refused, 0, "{}", recording.name);
        let peak_bytes = free.peak_bytes;
        free.end(recording.processes());
        assert_eq!(free.used_bytes(), 0, "{}: something stayed charged", recording.name);
        let fitting = recording.account(peak_bytes);
        assert_eq!((fitting.refused, fitting.peak_bytes), (0, peak_bytes), "{}", recording.name);
        if peak_bytes > 0 {
            let short = recording.account(peak_bytes - 1);
            assert!(short.refused > 0 && short.peak_bytes < peak_bytes, "{}", recording.name);
        }
    }
}

#[test]
fn undecided_call_is_reported() {
    let release = Release::of("535.161.08".parse().expect("a version")).expect("it is supported");
    let call = |node: &str, request: u32, bytes: Vec<u8>, params: Option<Vec<u8>>| {
        let copies = |bytes| corpus::Copies { before: corpus::Bytes(bytes), after: None };
        corpus::Call {
            node: node.to_owned(),
            process: 0,
            request,
            result: 0,
            bytes: copies(bytes),
            wrapped: None,
            params: params.map(copies),
            pieces: Vec::new(),
        }
    };
    let reported = |call: corpus::Call| {
        let head = Line::Head { driver: "535.161.08".to_owned(), program: Vec::new() };
        let lines = vec![head, Line::Call(Box::new(call))];
        let recording = Recording { name: "made up".to_owned(), release: release.clone(), lines };
        recording.undecided().into_keys().next().unwrap_or_default()
    };
    let control = |command: u32, params_size: u32| {
        let words = [1, 2, command, 0, 0x1000, 0, params_size, 0];
        words.into_iter().flat_map(u32::to_le_bytes).collect::<Vec<u8>>()
    };
    assert_eq!(
        reported(call("nvidiactl", 0xc020_462a, control(0x2080_014a, 268), Some(vec![0; 268]))),
        ""
    );
    let unknown =
        reported(call("nvidiactl", 0xc020_462a, control(0xdead_0001, 8), Some(vec![0; 8])));
    assert!(unknown.contains("0xdead0001"), "{unknown}");
    // NV0080_CTRL_CMD_GPU_GET_CLASSLIST has 16 bytes.
    let short = reported(call("nvidiactl", 0xc020_462a, control(0x80_0201, 8), Some(vec![0; 8])));
    assert_eq!(short, "control 0x800201 of 8 bytes");
    let class = |class: u32| {
        [1, 2, 3, class, 0, 0, 0, 0, 0, 0, 0, 0].into_iter().flat_map(u32::to_le_bytes).collect()
    };
    assert_eq!(
        reported(call("nvidiactl", 0xc030_462b, class(0xb1), None)),
        "class 0xb1 is not known"
    );
    let size = reported(call("nvidiactl", 0xc040_462b, vec![0; 64], None));
    assert!(size.starts_with("escape 43 of 64 bytes"), "{size}");
    assert!(
        reported(call("nvidiactl", 0xc008_46fa, vec![0; 8], None))
            .starts_with("escape 250 of 8 bytes")
    );
    assert!(reported(call("nvidia-uvm", 4711, Vec::new(), None)).starts_with("uvm 0x1267"));
    assert!(reported(call("nvidia-modeset", 1, Vec::new(), None)).contains("nvidia-modeset"));
}
