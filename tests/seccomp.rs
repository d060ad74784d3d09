//! The filter under real runtimes: the same calls, by every entry that the kernel has, with the
//! profile as it was and with ours, by both ways there are: merged into the section, and put
//! on by whoever becomes the runtime.
//!
//! What is trapped comes back with the listener's mark where it was permitted before, and
//! everything else as it did before. A machine that isn't here, aarch64, has its filter made
//! by the same libseccomp and run by hand.

#![allow(clippy::unwrap_used, reason = "a test that can't go on may panic")]
#![allow(unsafe_code, reason = "a child goes behind the filter before it becomes a runtime")]

#[path = "seccomp/filter.rs"]
mod filter;
#[path = "seccomp/listener.rs"]
mod listener;
mod support;

use std::collections::HashMap;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use cgpu::gate::enter::enter;
use cgpu::gate::filter::{Machine, program};
use cgpu::gate::seccomp::{ListenerPath as Told, merge};
use cgpu::gate::{TRAPS, is_decided_by_monitor, may_have_grown};
use filter::{Call, Filter, Verdict};
use listener::{Listener, MARK};
use proptest::prelude::*;
use proptest::sample;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};
use support::{Bundle, Outcome, PATIENCE, Runtime, Scratch, run_with_timeout};

/// How a container comes behind the filter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Its section has the calls.
    Merged,
    /// Whoever became its runtime had put it on.
    Ahead,
}

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
    /// Refused for want of arguments that could be looked at.
    Blind,
    /// Refused as by a kernel that lets nobody have the beginning of all memory.
    Denied,
}

/// A call for the probe.
#[derive(Debug, Clone)]
struct Try {
    text: String,
    /// The same without what the kernel doesn't read: a request has 32 bits.
    clean: String,
    expected: Expectation,
}

fn attempt((entry, number): (char, u32), args: [u64; 6], expected: Expectation) -> Try {
    let text = |args: [u64; 6]| {
        let args = args.map(|arg| format!(":{arg:x}")).concat();
        format!("{entry}:{number:x}{args}")
    };
    let mut clean = args;
    clean[1] &= 0xffff_ffff;
    Try { text: text(args), clean: text(clean), expected }
}

impl Way {
    fn traps(self, request: u64) -> bool {
        match self {
            Self::Merged => {
                let low = u32::try_from(request & 0xffff_ffff).unwrap();
                is_trapped(request) || is_decided_by_monitor(low) || may_have_grown(low)
            }
            Self::Ahead => {
                let request = u32::try_from(request & 0xffff_ffff).unwrap();
                is_decided_by_monitor(request) || may_have_grown(request)
            }
        }
    }
}

/// Whether a section brings it to the listener.
fn is_trapped(request: u64) -> bool {
    TRAPS.iter().any(|&(mask, value)| request & u64::from(mask) == u64::from(value))
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

fn tries(by: Way) -> Vec<Try> {
    const NOBODY: u64 = u64::MAX;
    let mut tries = Vec::new();
    for entry in ENTRIES {
        for request in requests() {
            let expected = if by.traps(request) { Expectation::Trapped } else { Expectation::Same };
            tries.push(attempt(entry.ioctl(), [NOBODY, request, 0, 0, 0, 0], expected));
        }
        for &way in entry.mmap() {
            for flags in [0u64, 1, 2, 3, 0x11, 0x12, 0x13, 0x21, 0x22, 5, 0x8003, 1 << 40 | 1] {
                let places = [0u64, 0x1000, 0x7fff_f000, 1 << 32, 1 << 40];
                for (address, offset) in
                    places.map(|offset| (0, offset)).into_iter().chain([(0x10_0000, 0)])
                {
                    let expected = match entry {
                        Entry::X32 if by == Way::Merged => Expectation::Blind,
                        Entry::I386 if way.1 == 90 => Expectation::Blind,
                        // Of no file.
                        _ if by == Way::Ahead && flags & 0x20 != 0 => Expectation::Same,
                        _ if by == Way::Ahead
                            && is_at_the_beginning(entry, flags, address, offset) =>
                        {
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
                    tries.push(attempt(way, [address, 4096, 3, flags, NOBODY, offset], expected));
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
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/seccomp/probe.c"))
            .status()
            .expect("these tests need a C compiler by the name of cc");
        assert!(compiled.success(), "tests/seccomp/probe.c does not compile");
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

fn merged(section: &Value, listener: &Listener) -> Value {
    let told = Told { path: listener.path().to_str().unwrap(), metadata: "key" };
    merge(Some(section), Machine::X86_64, &told).unwrap()
}

fn results(runtime: &Runtime<'_>, bundle: &Bundle) -> Vec<String> {
    lines(&runtime.run(bundle))
}

fn lines(outcome: &Outcome) -> Vec<String> {
    outcome.clone().ok().stdout.lines().map(str::to_owned).collect()
}

/// The same by a runtime that has gone behind the filter.
fn results_ahead(runtime: &Runtime<'_>, bundle: &Bundle, listener: &Listener) -> Vec<String> {
    let path = listener.path().to_owned();
    let mut command = runtime.command();
    command.arg("run").arg("--bundle").arg(&bundle.directory).arg(&bundle.id);
    // SAFETY: the child has one thread, and the allocator is as it was left between two calls of
    // it: glibc sees to that in fork.
    unsafe { command.pre_exec(move || enter(&path).map_err(std::io::Error::other)) };
    lines(&run_with_timeout(&mut command, PATIENCE))
}

/// Every profile under one runtime.
#[track_caller]
fn check(scratch: &Scratch, runtime: &Runtime<'_>, by: Way) {
    let listener = Listener::new(scratch.path().join("gate.sock"));
    let tries = tries(by);
    let words: Vec<&str> =
        std::iter::once("call").chain(tries.iter().map(|one| one.text.as_str())).collect();
    let refused = ["1", "signal 31"];
    let mark = MARK.to_string();
    let mut wrong = Vec::new();
    for (kind, section) in profiles() {
        let before = results(runtime, &bundle(scratch, &format!("{kind}-a"), &section, &words));
        let id = format!("{kind}-b");
        let after = match by {
            Way::Merged => {
                results(runtime, &bundle(scratch, &id, &merged(&section, &listener), &words))
            }
            Way::Ahead => {
                results_ahead(runtime, &bundle(scratch, &id, &section, &words), &listener)
            }
        };
        assert_eq!((before.len(), after.len()), (tries.len(), tries.len()), "{kind}");
        let mut counts = [0; 2];
        let known: HashMap<&str, &str> = tries
            .iter()
            .map(|one| one.text.as_str())
            .zip(before.iter().map(String::as_str))
            .collect();
        for ((one, before), after) in tries.iter().zip(&before).zip(&after) {
            // A section is rewritten to mean what the kernel reads; beside ours it stays.
            let clean = match by {
                Way::Merged => known.get(one.clean.as_str()).copied().unwrap_or(before),
                Way::Ahead => before,
            };
            let good = match one.expected {
                Expectation::Same => after == before || after == clean,
                _ if refused.contains(&clean) => after == clean,
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
    let greetings = listener.greetings();
    assert!(!greetings.is_empty());
    if by == Way::Merged {
        assert!(greetings.iter().all(|greeting| greeting["metadata"] == "key"), "{greetings:?}");
    }
}

#[test]
fn runc_notifies_of_what_is_trapped_and_leaves_the_rest() {
    let scratch = Scratch::new();
    check(&scratch, &scratch.runc(), Way::Merged);
}

#[test]
fn crun_notifies_of_what_is_trapped_and_leaves_the_rest() {
    let scratch = Scratch::new();
    check(&scratch, &scratch.crun(), Way::Merged);
}

#[test]
fn runc_behind_the_filter_has_its_containers_behind_it() {
    let scratch = Scratch::new();
    check(&scratch, &scratch.runc(), Way::Ahead);
}

#[test]
fn crun_behind_the_filter_has_its_containers_behind_it() {
    let scratch = Scratch::new();
    check(&scratch, &scratch.crun(), Way::Ahead);
}

#[test]
fn every_machine_has_the_same_calls_trapped_in_64_and_in_32_bits() {
    const X32: u32 = 1 << 30;
    let wide =
        [(0xc000_003e, 16, 9), (0xc000_003e, X32 | 514, X32 | 9), (0xc000_003e, X32 | 16, X32 | 9)];
    let x86 = (Machine::X86_64, wide.to_vec(), (0x4000_0003, 54, 192));
    let arm = (Machine::Aarch64, vec![(0xc000_00b7, 29, 222)], (0x4000_0028, 54, 192));
    for (machine, wide, narrow) in [x86, arm] {
        let filter = Filter::of(&program(machine));
        let run = |architecture, number, args| filter.run(Call { architecture, number, args }).0;
        for (architecture, ioctl, mmap) in wide.into_iter().chain([narrow]) {
            let is_narrow = architecture == narrow.0;
            for request in requests() {
                let expected =
                    if Way::Ahead.traps(request) { Verdict::Notify } else { Verdict::Allow };
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
        // Entries that nobody knows have no calls at all.
        assert_eq!(run(1, 16, [0; 6]), Verdict::Errno(38));
    }
    let i386 = Call { architecture: 0x4000_0003, number: 90, args: [0; 6] };
    assert_eq!(Filter::of(&program(Machine::X86_64)).run(i386).0, Verdict::Errno(12));
}

/// The filter that crun has libseccomp make of a section.
fn filter(scratch: &Scratch, id: &str, section: &Value) -> Filter {
    let crun = scratch.crun();
    let mut section = section.clone();
    if let Some(section) = section.as_object_mut() {
        // A filter is made all the same, and nobody has to listen.
        section.remove("listenerPath");
        section.remove("listenerMetadata");
    }
    let bundle = scratch.bundle(id, |config| config["linux"]["seccomp"] = section);
    crun.create(&bundle).ok();
    let bytes = fs::read(crun.root().join(id).join("seccomp.bpf")).unwrap();
    crun.delete(&bundle).ok();
    Filter::parse(&bytes)
}

#[test]
fn aarch64_traps_the_same_calls_in_64_and_in_32_bits() {
    const WIDE: (u32, u32, u32) = (0xc000_00b7, 29, 222);
    const NARROW: (u32, u32, u32) = (0x4000_0028, 54, 192);
    let scratch = Scratch::new();
    let listener = Listener::new(scratch.path().join("gate.sock"));
    let told = Told { path: listener.path().to_str().unwrap(), metadata: "" };
    let mut docker = fixture("docker.json");
    docker["architectures"] = json!(["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"]);
    for (id, section) in [("none", Value::Null), ("docker", docker)] {
        let section = merge(Some(&section), Machine::Aarch64, &told).unwrap();
        let filter = filter(&scratch, id, &section);
        for (architecture, ioctl, mmap) in [WIDE, NARROW] {
            let is_wide = architecture == WIDE.0;
            for request in requests() {
                let call = Call { architecture, number: ioctl, args: [1, request, 0, 0, 0, 0] };
                let expected = if is_trapped(request) { Verdict::Notify } else { Verdict::Allow };
                assert_eq!(filter.run(call).0, expected, "{id} {call:x?}");
            }
            for flags in 0..64 {
                for offset in [0, 0x1000, 1 << 32] {
                    let args = [0, 4096, 3, flags, 5, offset];
                    let offset = if is_wide { offset } else { offset & 0xffff_ffff };
                    let trapped = flags & 1 == 1 && offset != 0;
                    let expected = if trapped { Verdict::Notify } else { Verdict::Allow };
                    let call = Call { architecture, number: mmap, args };
                    assert_eq!(filter.run(call).0, expected, "{id} {call:x?}");
                }
            }
        }
    }
}

#[test]
#[ignore = "prints what it costs; asserts nothing"]
fn costs() {
    let scratch = Scratch::new();
    let listener = Listener::new(scratch.path().join("gate.sock"));
    for (id, section) in [("none", Value::Null), ("docker", fixture("docker.json"))] {
        let after = merged(&section, &listener);
        for (name, section) in [("before", &section), ("after", &after)] {
            let id = format!("{id}-{name}");
            let times =
                results(&scratch.runc(), &bundle(&scratch, &id, section, &["cost", "1000000"]));
            print!("{id}: read ioctl mmap in ns: {times:?}");
            if !section.is_null() {
                let filter = filter(&scratch, &format!("{id}-f"), section);
                let steps =
                    |number, args| filter.run(Call { architecture: 0xc000_003e, number, args }).1;
                print!(
                    "; {} instructions, of which a read takes {}, TCGETS {}, a private mmap {}",
                    filter.len(),
                    steps(0, [0; 6]),
                    steps(16, [0, 0x5401, 0, 0, 0, 0]),
                    steps(9, [0, 4096, 0, 2, 0, 0]),
                );
            }
            println!();
        }
    }
}

/// Random rules on `ioctl` and `mmap` beside what a container needs to start.
fn sections() -> impl Strategy<Value = Value> {
    let request = prop_oneof![
        sample::select(requests()),
        sample::select(vec![0x5401u64, 0x5412, 0x5421, 0xc030_462b, 0xc020_462a]),
    ];
    let test = |index: u64, value: BoxedStrategy<u64>| {
        let op = sample::select(vec!["EQ", "EQ", "NE", "MASKED_EQ", "MASKED_EQ"]);
        let mask = sample::select(vec![0xffu64, 0xff00, 0xffff_ffff, 1, 6, 0x3fff_00ff]);
        (op, value, mask).prop_map(move |(op, value, mask)| {
            let (first, second) = if op == "MASKED_EQ" { (mask, value & mask) } else { (value, 0) };
            json!({"index": index, "value": first, "valueTwo": second,
                   "op": format!("SCMP_CMP_{op}")})
        })
    };
    let small = || (0..4u64).boxed();
    let conditions = prop_oneof![
        4 => test(1, request.boxed()).prop_map(|one| json!([one])),
        1 => test(0, small()).prop_map(|one| json!([one])),
        1 => (test(0, small()), test(2, small())).prop_map(|(one, two)| json!([one, two])),
        1 => Just(json!([])),
    ];
    let action = sample::select(vec!["ALLOW", "ALLOW", "ERRNO", "LOG", "KILL"]);
    let rule = (sample::select(vec!["ioctl", "ioctl", "mmap"]), action, conditions).prop_map(
        |(name, action, args)| {
            json!({"names": [name], "action": format!("SCMP_ACT_{action}"), "args": args})
        },
    );
    let default = sample::select(vec!["ALLOW", "ALLOW", "ERRNO", "KILL", "LOG"]);
    (default, proptest::collection::vec(rule, 0..4)).prop_map(|(default, rules)| {
        json!({
            "defaultAction": format!("SCMP_ACT_{default}"),
            "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
            "syscalls": rules,
        })
    })
}

/// Whether the call takes place.
fn passes(verdict: Verdict) -> bool {
    const LOG: u32 = 0x7ffc_0000;
    matches!(verdict, Verdict::Allow | Verdict::Other(LOG))
}

/// Calls of both kinds through every entry, and whether they are trapped.
fn calls() -> Vec<(Call, bool)> {
    const X86_64: u32 = 0xc000_003e;
    const I386: u32 = 0x4000_0003;
    let mut calls = Vec::new();
    for (descriptor, third) in (0..4).flat_map(|one| (0..3).map(move |two| (one, two))) {
        for request in requests() {
            let args = [descriptor, request, third, 0, 0, 0];
            for (architecture, number) in [(X86_64, 16), (I386, 54), (X86_64, 514 | 1 << 30)] {
                calls.push((Call { architecture, number, args }, is_trapped(request)));
            }
        }
        for flags in 0..4 {
            for offset in [0, 0x1000, 0xffff_f000] {
                let args = [descriptor, 2, third, flags, 0, offset];
                for (architecture, number) in [(X86_64, 9), (I386, 192)] {
                    let trapped = flags & 1 == 1 && offset != 0;
                    calls.push((Call { architecture, number, args }, trapped));
                }
            }
        }
    }
    calls
}

#[test]
fn whatever_rules_a_section_has_nothing_trapped_takes_place_unseen() {
    let scratch = Scratch::new();
    let calls = calls();
    let told = Told { path: "", metadata: "" };
    let mut runner = TestRunner::deterministic();
    let (mut rounds, mut lost, mut changed) = (0, 0, 0);
    while rounds < 40 {
        let section = sections().new_tree(&mut runner).unwrap().current();
        // What can't be kept is refused, and that is tested elsewhere.
        let Ok(after) = merge(Some(&section), Machine::X86_64, &told) else { continue };
        rounds += 1;
        let before = filter(&scratch, &format!("before-{rounds}"), &section);
        let filter = filter(&scratch, &format!("after-{rounds}"), &after);
        for &(call, trapped) in &calls {
            let (was, now) = (before.run(call).0, filter.run(call).0);
            assert!(!(trapped && passes(now)), "{call:x?}: {was:?} → {now:?}\n{section}\n{after}");
            if trapped {
                lost += u32::from(passes(was) && now != Verdict::Notify);
            } else {
                assert_ne!(now, Verdict::Notify, "{call:x?}\n{section}\n{after}");
                changed += u32::from(was != now);
            }
        }
    }
    println!(
        "{} calls in each of {rounds} sections: none passed unseen, {lost} were denied",
        calls.len()
    );
    println!(
        "though permitted before, {changed} untrapped ones changed (garbage above a request, sections that contradict themselves)"
    );
}
