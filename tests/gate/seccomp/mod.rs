//! The filter under real runtimes: the same calls, by every entry that the kernel has, under each profile alone and
//! with the filter that the process put on which became the runtime.
//!
//! A trapped call that the profile permits returns the listener's mark, every other call what it returned before. The
//! filter for aarch64, which isn't here, is interpreted.

#![allow(clippy::unwrap_used, reason = "a test that can't go on may panic")]
#![allow(unsafe_code, reason = "a child goes behind the filter before it becomes a runtime")]

mod filter;
mod listener;

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::support::{Bundle, Outcome, Runtime, Scratch, run_with_timeout, timeout};
use cgpu_monitor::gate::entry::enter;
use cgpu_monitor::gate::filter::{Machine, program};
use cgpu_monitor::gate::{is_decided_by_monitor, may_have_grown};
use filter::{Call, Filter, Verdict};
use listener::{Listener, MARK};
use serde_json::{Value, json};

/// Calls that it is for: some numbers with their sizes, and two of UVM's.
const CALLS: &[u64] = &[
    0x0038_0027,
    0x0010_0029,
    0x0020_002a,
    0x0020_002b,
    0x0030_002b,
    0x001c_0034,
    0x00b8_004a,
    0x0010_00d3,
    0x0a28_00d9,
    0x3000_0001,
    33,
];

/// Where a kernel is entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entry {
    X86_64,
    I386,
    X32,
}

const ENTRIES: [Entry; 3] = [Entry::X86_64, Entry::I386, Entry::X32];

impl Entry {
    /// As the probe takes it, with the number of `ioctl`.
    fn ioctl(self) -> (char, u32) {
        match self {
            Self::X86_64 => ('w', 16),
            Self::I386 => ('n', 54),
            Self::X32 => ('x', 514),
        }
    }

    /// The ways to `mmap`: i386 has two.
    fn mmap(self) -> &'static [(char, u32)] {
        match self {
            Self::X86_64 => &[('w', 9)],
            Self::I386 => &[('n', 90), ('n', 192)],
            Self::X32 => &[('x', 9)],
        }
    }
}

/// What must come of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expectation {
    /// The listener's mark, where the profile permitted it.
    Trapped,
    /// As without us.
    Same,
    /// Refused for want of arguments that could be checked.
    Blind,
    /// Refused as by a kernel that lets no process map the lowest addresses.
    Denied,
}

/// A call for the probe.
#[derive(Debug, Clone)]
struct Try {
    text: String,
    expected: Expectation,
}

fn attempt((entry, number): (char, u32), args: [u64; 6], expected: Expectation) -> Try {
    let args = args.map(|arg| format!(":{arg:x}")).concat();
    Try { text: format!("{entry}:{number:x}{args}"), expected }
}

/// Whether the filter brings an ioctl with this request to the listener; the kernel reads its lower half.
fn is_trapped(request: u64) -> bool {
    let request = u32::try_from(request & 0xffff_ffff).unwrap();
    is_decided_by_monitor(request) || may_have_grown(request)
}

/// Trapped requests with every type and direction, garbage above, neighbours by each bit, and
/// what terminals and sockets use.
fn requests() -> Vec<u64> {
    let mut requests = vec![0x5401, 0x5402, 0x5410, 0x5412, 0x5413, 0x5421, 0x541b, 0x8004_5430];
    for &plain in CALLS {
        let nvidia = plain | 0xc000_4600;
        requests.extend([plain, nvidia, plain | 0xff00, plain | 0x8000_0000]);
        requests.extend([nvidia | 0xdead_beef << 32, plain | 1 << 63, plain | 1 << 32]);
        requests.extend((0..32).map(|bit| nvidia ^ 1 << bit));
        // As a later release may have the struct: larger by a field or two, or twice as large.
        let size = plain >> 16 & 0x3fff;
        let grown = [size + 8, size + 16, size * 2].map(|size| (size & 0x3fff) << 16);
        requests.extend(grown.map(|size| nvidia & !0x3fff_0000 | size));
    }
    // Any others, the same in every run.
    let mut state = 1u64;
    requests.extend((0..64).map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state >> 16
    }));
    requests
}

/// Whether a mapping is a file's, shared, and at the address 0, which is its offset.
fn is_at_the_beginning(entry: Entry, flags: u64, address: u64, offset: u64) -> bool {
    let offset = if entry == Entry::I386 { offset & 0xffff_ffff } else { offset };
    flags & 1 == 1 && flags & 0x10_0010 != 0 && (address, offset) == (0, 0)
}

fn tries() -> Vec<Try> {
    const CLOSED: u64 = u64::MAX;
    let mut tries = Vec::new();
    for entry in ENTRIES {
        for request in requests() {
            let expected =
                if is_trapped(request) { Expectation::Trapped } else { Expectation::Same };
            tries.push(attempt(entry.ioctl(), [CLOSED, request, 0, 0, 0, 0], expected));
        }
        for &way in entry.mmap() {
            for flags in [0u64, 1, 2, 3, 0x11, 0x12, 0x13, 0x21, 0x22, 5, 0x8003, 1 << 40 | 1] {
                let places = [0u64, 0x1000, 0x7fff_f000, 1 << 32, 1 << 40];
                for (address, offset) in
                    places.map(|offset| (0, offset)).into_iter().chain([(0x10_0000, 0)])
                {
                    let expected = match entry {
                        Entry::I386 if way.1 == 90 => Expectation::Blind,
                        // Of no file.
                        _ if flags & 0x20 != 0 => Expectation::Same,
                        _ if is_at_the_beginning(entry, flags, address, offset) => {
                            Expectation::Denied
                        }
                        // Its registers have 32 bits.
                        Entry::I386 if flags & 1 == 1 && offset & 0xffff_ffff != 0 => {
                            Expectation::Trapped
                        }
                        Entry::X86_64 | Entry::X32 if flags & 1 == 1 && offset != 0 => {
                            Expectation::Trapped
                        }
                        _ => Expectation::Same,
                    };
                    tries.push(attempt(way, [address, 4096, 3, flags, CLOSED, offset], expected));
                }
            }
        }
    }
    tries
}

/// The probe, compiled once.
fn probe() -> &'static Path {
    static PROBE: OnceLock<PathBuf> = OnceLock::new();
    PROBE.get_or_init(|| {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let probe = directory.join(format!("seccomp-probe-{}", std::process::id()));
        let compiled = Command::new("cc")
            .args(["-static", "-O1", "-Wall", "-Wextra", "-Werror", "-o"])
            .arg(&probe)
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gate/seccomp/probe.c"))
            .status()
            .expect("these tests need a C compiler by the name of cc");
        assert!(compiled.success(), "tests/gate/seccomp/probe.c does not compile");
        let known = directory.join("seccomp-probe");
        fs::rename(probe, &known).expect("the target directory can be written");
        known
    })
}

fn fixture(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/seccomp").join(name);
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Docker's profile with other rules for `ioctl`.
fn dockers_but(rules: &[Value]) -> Value {
    let mut section = fixture("docker.json");
    let entries = section["syscalls"].as_array_mut().unwrap();
    for entry in entries.iter_mut() {
        entry["names"].as_array_mut().unwrap().retain(|name| name != "ioctl");
    }
    for (action, args) in rules.iter().map(|rule| (&rule[0], &rule[1])) {
        entries.push(json!({"names": ["ioctl"], "action": action, "args": args}));
    }
    section
}

fn on_request(op: &str, value: u64, second: u64) -> Value {
    json!([{"index": 1, "value": value, "valueTwo": second, "op": op}])
}

/// One profile of each kind.
fn profiles() -> Vec<(&'static str, Value)> {
    let all = json!(["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"]);
    let tiocsti = on_request("SCMP_CMP_MASKED_EQ", 0xffff_ffff, 0x5412);
    let mut killing = dockers_but(&[
        json!(["SCMP_ACT_ALLOW", on_request("SCMP_CMP_EQ", 0x5401, 0)]),
        json!(["SCMP_ACT_ALLOW", on_request("SCMP_CMP_EQ", 0xc030_462b, 0)]),
    ]);
    killing["defaultAction"] = json!("SCMP_ACT_KILL_PROCESS");
    vec![
        ("none", Value::Null),
        ("dockers", fixture("docker.json")),
        ("containerds", fixture("containerd.json")),
        (
            "conditional",
            dockers_but(&[json!(["SCMP_ACT_ALLOW", on_request("SCMP_CMP_NE", 0x5412, 0)])]),
        ),
        (
            "conditional2",
            dockers_but(&[
                json!(["SCMP_ACT_ALLOW", on_request("SCMP_CMP_MASKED_EQ", 0xff00, 0x5400)]),
                json!(["SCMP_ACT_ALLOW", on_request("SCMP_CMP_MASKED_EQ", 0xff00, 0x4600)]),
                json!(["SCMP_ACT_ERRNO", on_request("SCMP_CMP_EQ", 0x5402, 0)]),
            ]),
        ),
        (
            "allowing",
            json!({"defaultAction": "SCMP_ACT_ALLOW", "architectures": all, "syscalls": [
                {"names": ["ioctl"], "action": "SCMP_ACT_ERRNO", "args": tiocsti},
                {"names": ["ioctl"], "action": "SCMP_ACT_ERRNO",
                 "args": on_request("SCMP_CMP_EQ", 0xc020_462b, 0)},
                {"names": ["mmap", "mmap2"], "action": "SCMP_ACT_ERRNO", "args": [
                    {"index": 2, "value": 6, "valueTwo": 6, "op": "SCMP_CMP_MASKED_EQ"}]},
            ]}),
        ),
        (
            "logging",
            json!({"defaultAction": "SCMP_ACT_LOG", "architectures": all, "syscalls": [
                {"names": ["getpid"], "action": "SCMP_ACT_ALLOW"}]}),
        ),
        ("tracing", dockers_but(&[json!(["SCMP_ACT_TRACE", []])])),
        ("killing", killing),
        ("denying", dockers_but(&[])),
    ]
}

/// A container whose process is the probe.
fn bundle(scratch: &Scratch, id: &str, section: &Value, words: &[&str]) -> Bundle {
    let bundle = scratch.bundle(id, |config| {
        config["process"]["args"] = json!([&["/probe"], words].concat());
        config["process"]["env"] = json!(["PATH=/bin"]);
        config["linux"]["seccomp"] = section.clone();
    });
    scratch.copy_program(probe(), &bundle.rootfs().join("probe"));
    bundle
}

fn results(runtime: &Runtime<'_>, bundle: &Bundle) -> Vec<String> {
    lines(&runtime.run(bundle))
}

fn lines(outcome: &Outcome) -> Vec<String> {
    outcome.clone().ok().stdout.lines().map(str::to_owned).collect()
}

/// The same by a runtime that is behind the filter.
fn results_behind(runtime: &Runtime<'_>, bundle: &Bundle, listener: &Listener) -> Vec<String> {
    let path = listener.path().to_owned();
    let mut command = runtime.command();
    command.arg("run").arg("--bundle").arg(&bundle.directory).arg(&bundle.id);
    // SAFETY: the child has one thread, and the allocator is as it was left between two calls of
    // it: glibc sees to that in fork.
    unsafe { command.pre_exec(move || enter(&path).map_err(std::io::Error::other)) };
    lines(&run_with_timeout(&mut command, timeout()))
}

/// Every profile under one runtime.
#[track_caller]
fn check(scratch: &Scratch, runtime: &Runtime<'_>) {
    let listener = Listener::new(scratch.path().join("gate.sock"));
    let tries = tries();
    let words: Vec<&str> =
        std::iter::once("call").chain(tries.iter().map(|one| one.text.as_str())).collect();
    let refused = ["1", "signal 31"];
    let mark = MARK.to_string();
    let mut wrong = Vec::new();
    for (kind, section) in profiles() {
        let before = results(runtime, &bundle(scratch, &format!("{kind}-a"), &section, &words));
        let behind = bundle(scratch, &format!("{kind}-b"), &section, &words);
        let after = results_behind(runtime, &behind, &listener);
        assert_eq!((before.len(), after.len()), (tries.len(), tries.len()), "{kind}");
        let mut counts = [0; 2];
        for ((one, before), after) in tries.iter().zip(&before).zip(&after) {
            let good = match one.expected {
                Expectation::Same => after == before,
                _ if refused.contains(&before.as_str()) => after == before,
                Expectation::Trapped => *after == mark,
                Expectation::Blind => after == "12",
                Expectation::Denied => after == "1",
            };
            counts[usize::from(*after == mark)] += 1;
            if !good {
                wrong.push(format!("{kind} {one:?}: {before} → {after}"));
            }
        }
        println!("{kind}: {} calls as before, {} trapped", counts[0], counts[1]);
    }
    assert!(
        wrong.is_empty(),
        "{} wrong:\n{}",
        wrong.len(),
        wrong[..wrong.len().min(40)].join("\n")
    );
}

/// If runc is behind the filter, its containers are behind the filter too.
#[test]
fn runc_passes_the_filter_on_to_containers() {
    let scratch = Scratch::new();
    check(&scratch, &scratch.runc());
}

/// If crun is behind the filter, its containers are behind the filter too.
#[test]
fn crun_passes_the_filter_on_to_containers() {
    let scratch = Scratch::new();
    check(&scratch, &scratch.crun());
}

/// Every machine has the same calls trapped, in 64 and in 32 bits.
#[test]
fn same_calls_trap_in_64_and_32_bits() {
    const X32: u32 = 1 << 30;
    let wide =
        [(0xc000_003e, 16, 9), (0xc000_003e, X32 | 514, X32 | 9), (0xc000_003e, X32 | 16, X32 | 9)];
    let x86 = (Machine::X86_64, wide.to_vec(), (0x4000_0003, 54, 192));
    let arm = (Machine::Aarch64, vec![(0xc000_00b7, 29, 222)], (0x4000_0028, 54, 192));
    for (machine, wide, narrow) in [x86, arm] {
        let filter = Filter::of(&program(machine));
        let run = |architecture, number, args| filter.run(Call { architecture, number, args });
        for (architecture, ioctl, mmap) in wide.into_iter().chain([narrow]) {
            let is_narrow = architecture == narrow.0;
            for request in requests() {
                let expected = if is_trapped(request) { Verdict::Notify } else { Verdict::Allow };
                let args = [1, request, 0, 0, 0, 0];
                assert_eq!(run(architecture, ioctl, args), expected, "{machine:?} {request:#x}");
                // Not a call of any other number.
                assert_eq!(run(architecture, 1000, args), Verdict::Allow);
            }
            for flags in (0..64).chain([0x10_0001, 0x10_0002, 0x10_0021]) {
                for (address, offset) in
                    [(0, 0), (0, 0x1000), (0, 1 << 32), (0xfff, 0), (0x1000, 0), (1 << 32, 0)]
                {
                    // The kernel clears what 32-bit programs don't have.
                    let clear = |word: u64| if is_narrow { word & 0xffff_ffff } else { word };
                    let (address, offset) = (clear(address), clear(offset));
                    let is_file = flags & 0x21 == 1;
                    let is_first = flags & 0x10_0010 != 0 && address < 0x1000;
                    let expected = match (is_file, offset) {
                        (true, 0) if is_first => Verdict::Errno(1),
                        (true, 1..) => Verdict::Notify,
                        _ => Verdict::Allow,
                    };
                    let args = [address, 4096, 3, flags, 5, offset];
                    assert_eq!(run(architecture, mmap, args), expected, "{machine:?} {args:x?}");
                }
            }
        }
        // Unknown entries have no calls at all.
        assert_eq!(run(1, 16, [0; 6]), Verdict::Errno(38));
    }
    let i386 = Call { architecture: 0x4000_0003, number: 90, args: [0; 6] };
    assert_eq!(Filter::of(&program(Machine::X86_64)).run(i386), Verdict::Errno(12));
}

/// `prctl(PR_SET_MM)` and `personality(ADDR_NO_RANDOMIZE)` would make two programs of a process look alike.
#[test]
fn the_filter_answers_some_calls_itself() {
    const X32: u32 = 1 << 30;
    const UPPER: u64 = 0xdead_beef_0000_0000;
    let entries = [
        (Machine::X86_64, 0xc000_003e, [157, 135, 216]),
        (Machine::X86_64, 0xc000_003e, [X32 | 157, X32 | 135, X32 | 216]),
        (Machine::X86_64, 0x4000_0003, [172, 136, 257]),
        (Machine::Aarch64, 0xc000_00b7, [167, 92, 234]),
        (Machine::Aarch64, 0x4000_0028, [172, 136, 253]),
    ];
    for (machine, architecture, [prctl, personality, remap_file_pages]) in entries {
        let filter = Filter::of(&program(machine));
        let run = |number, first: u64| {
            filter.run(Call { architecture, number, args: [first | UPPER, 0, 0, 0, 0, 0] })
        };
        assert_eq!(run(prctl, 35), Verdict::Errno(22), "{machine:?} {architecture:x}");
        assert_eq!(run(prctl, 36), Verdict::Allow, "{machine:?} {architecture:x}");
        assert_eq!(run(personality, 0x0004_0008), Verdict::Errno(1), "{machine:?}");
        for permitted in [0, 8, 0xffff_ffff] {
            assert_eq!(run(personality, permitted), Verdict::Allow, "{machine:?} {permitted:x}");
        }
        assert_eq!(run(remap_file_pages, 0), Verdict::Errno(38), "{machine:?} {architecture:x}");
    }
}
