//! The simulated driver, from real processes through a real mount. Needs root.

#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../../tests/support/patience.rs"]
mod patience;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cgpu_sim::{GpuSpec, Sim, SimOptions, State};
use patience::timeout;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const TOTAL_BYTES: u64 = 1024 * MIB;

/// A simulation of two GPUs, and a place for files.
struct Host {
    sim: Sim,
    scratch: TempDir,
    // After the simulation: it is mounted there.
    _mount: TempDir,
}

/// What a program said.
struct ProgramOutput {
    lines: Vec<String>,
    success: bool,
}

/// A program that runs, and ends with its test.
struct Program(Option<Child>);

impl Program {
    fn id(&self) -> u32 {
        self.0.as_ref().unwrap().id()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Not waited for: it may hang in a call that ends with the simulation.
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
        }
    }
}

impl ProgramOutput {
    fn has(&self, line: &str) -> bool {
        self.lines.iter().any(|said| said == line)
    }

    #[track_caller]
    fn must(&self, line: &str) {
        assert!(self.has(line), "no \"{line}\" in {:#?}", self.lines);
    }

    /// The number after `key=` in the last line that has one.
    #[track_caller]
    fn number(&self, key: &str) -> u64 {
        let key = format!("{key}=");
        let words = self.lines.iter().rev().flat_map(|line| line.split_whitespace());
        let value = words.filter_map(|word| word.strip_prefix(&key)).next();
        let value = value.unwrap_or_else(|| panic!("no {key} in {:#?}", self.lines));
        value.parse().unwrap()
    }
}

impl Host {
    fn new() -> Self {
        Self::with_driver("535.161.08")
    }

    fn with_driver(driver: &str) -> Self {
        Self::with(driver, &[TOTAL_BYTES, TOTAL_BYTES])
    }

    /// With GPUs of these sizes in bytes.
    fn with(driver: &str, gpus: &[u64]) -> Self {
        let (mount, scratch) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let options = SimOptions {
            dir: mount.path().to_owned(),
            gpus: gpus
                .iter()
                .map(|bytes| GpuSpec { memory_bytes: *bytes, reserved_bytes: 0 })
                .collect(),
            driver: driver.parse().unwrap(),
        };
        let sim = Sim::start(options).expect("these tests run as root and need /dev/fuse");
        Host { sim, scratch, _mount: mount }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    fn command(&self, before: &[&str], arguments: &[&str]) -> Command {
        let program = env!("CARGO_BIN_EXE_rmtool");
        let dev = self.sim.dir().join("dev");
        let dev = dev.to_str().unwrap();
        let all: Vec<&str> = [before, &[program, "--dev", dev], arguments].concat();
        let mut command = Command::new(all[0]);
        command.args(&all[1..]).stdin(Stdio::null()).stdout(Stdio::piped());
        command
    }

    fn start(&self, arguments: &[&str]) -> Program {
        Program(Some(self.command(&[], arguments).spawn().unwrap()))
    }

    /// Runs the script's lines to the end.
    fn run(&self, lines: &[&str]) -> ProgramOutput {
        self.finish(self.start(&[&["run"], lines].concat()))
    }

    fn attack(&self, words: &[&str]) -> ProgramOutput {
        self.finish(self.start(&[&["attack"], words].concat()))
    }

    fn finish(&self, mut program: Program) -> ProgramOutput {
        let mut child = program.0.take().unwrap();
        let deadline = Instant::now() + timeout();
        while child.try_wait().unwrap().is_none() {
            if Instant::now() > deadline {
                // A process that hangs in a call can't be killed before it is released.
                self.sim.fault("clear".parse().unwrap());
                program.0 = Some(child);
                panic!("it takes longer than {:?}", timeout());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let output = child.wait_with_output().unwrap();
        let lines = String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect();
        ProgramOutput { lines, success: output.status.success() }
    }

    #[track_caller]
    fn until(&self, what: &str, holds: impl Fn(&State) -> bool) {
        let deadline = Instant::now() + timeout();
        while !holds(&self.sim.state()) {
            assert!(Instant::now() < deadline, "{what}: {:#?}", self.sim.state());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    #[track_caller]
    fn until_used(&self, bytes: u64) {
        self.until(&format!("{bytes} bytes in use"), |state| state.gpus[0].used_bytes == bytes);
    }

    fn fault(&self, line: &str) {
        self.sim.fault(line.parse().unwrap());
    }

    /// A line that waits for [`Host::go`].
    fn wait(&self, name: &str) -> String {
        format!("wait {}", self.path(name).display())
    }

    fn go(&self, name: &str) {
        fs::write(self.path(name), "").unwrap();
    }
}

#[test]
fn memory_is_exhausted_and_comes_back() {
    let host = Host::new();
    let said = host.run(&[
        "start",
        "alloc 1000MiB as a",
        "alloc 25MiB as b",
        "alloc 24MiB as c",
        "free a",
        "alloc 1000MiB as d",
    ]);
    said.must("alloc a ok bytes=1048576000");
    said.must("alloc b status=0x51");
    said.must("alloc c ok bytes=25165824");
    said.must("alloc d ok bytes=1048576000");
    assert!(!said.success);
    host.until_used(0);
    assert_eq!(host.finish(host.start(&["fill"])).number("got_bytes"), TOTAL_BYTES);
}

#[test]
fn the_other_gpu_has_its_own_memory() {
    let host = Host::new();
    let go = host.wait("go");
    let one = host.start(&["run", "start", "alloc 1024MiB as a", &go]);
    host.until_used(TOTAL_BYTES);
    let other = host.finish(host.start(&["--gpu", "1", "run", "start", "alloc 1024MiB as a"]));
    other.must("alloc a ok bytes=1073741824");
    host.go("go");
    assert!(host.finish(one).success);
}

#[test]
fn freeing_a_parent_frees_everything_below_it() {
    let host = Host::new();
    for end in ["free-device", "free-client", "close"] {
        let go = host.wait(end);
        let child = host.start(&["run", "start", "alloc 100MiB as a", "heap 50MiB as b", end, &go]);
        host.until("the end is reached", |state| {
            state.calls.contains_key("heap") && state.gpus[0].used_bytes == 0
        });
        host.go(end);
        assert!(host.finish(child).success, "{end}");
    }
}

#[test]
fn memory_lives_until_the_last_descriptor_is_closed() {
    let host = Host::new();
    let (go, end) = (host.wait("go"), host.wait("end"));
    let child = host.start(&[
        "run",
        "start",
        "alloc 100MiB as a",
        "fork {",
        &go,
        "}",
        "close",
        "print closed",
        &end,
    ]);
    host.until_used(100 * MIB);
    // The parent has closed, the child has it still.
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(host.sim.state().gpus[0].used_bytes, 100 * MIB);
    host.go("go");
    host.until_used(0);
    host.go("end");
    host.finish(child).must("print closed".trim_start_matches("print "));
}

#[test]
fn a_killed_process_leaves_nothing() {
    let host = Host::new();
    let child = host.start(&["hold", "300MiB"]);
    host.until_used(300 * MIB);
    drop(child);
    host.until("nothing is left", |state| {
        state.gpus[0].used_bytes == 0 && state.open_files == 0 && state.clients.is_empty()
    });
}

#[test]
fn duplicates_keep_memory() {
    let host = Host::new();
    let said = host.run(&[
        "start",
        "alloc 100MiB as a",
        "dup a as b",
        "pid-bytes self",
        "free a",
        "info",
        "free b",
        "info",
    ]);
    assert!(said.success, "{:#?}", said.lines);
    said.must("pid-bytes ok private=0 owned=104857600 duped=104857600");
    said.must("fb-info ok total_mib=1024 free_mib=924 used_mib=100");
    said.must("fb-info ok total_mib=1024 free_mib=1024 used_mib=0");
}

#[test]
fn a_mapping_by_uvm_keeps_memory() {
    let host = Host::new();
    let said = host.run(&[
        "start",
        "uvm-init",
        "alloc 100MiB as a",
        "uvm-map a",
        "free a",
        "info",
        "uvm-unmap a",
        "info",
    ]);
    assert!(said.success, "{:#?}", said.lines);
    said.must("fb-info ok total_mib=1024 free_mib=924 used_mib=100");
    said.must("fb-info ok total_mib=1024 free_mib=1024 used_mib=0");

    let go = host.wait("go");
    let child = host.start(&[
        "run",
        "start",
        "uvm-init",
        "alloc 100MiB as a",
        "uvm-map a",
        "close",
        &go,
        "close-uvm",
        "sleep 0.3",
    ]);
    host.until("it is an orphan", |state| state.gpus[0].orphan_bytes == 100 * MIB);
    host.go("go");
    host.until_used(0);
    assert!(host.finish(child).success);
}

#[test]
fn an_exported_file_keeps_memory() {
    let host = Host::new();
    let said = host.run(&[
        "start",
        "alloc 100MiB as a",
        "export a",
        "free a",
        "info",
        "import as b",
        "close-export",
        "sleep 0.3",
        "info",
        "free b",
        "info",
    ]);
    assert!(said.success, "{:#?}", said.lines);
    let used = |mib: u64| {
        said.lines
            .iter()
            .filter(|line| {
                line.starts_with("fb-info ") && line.ends_with(&format!("used_mib={mib}"))
            })
            .count()
    };
    assert_eq!((used(100), used(0)), (2, 1), "{:#?}", said.lines);
}

#[test]
fn each_gpu_has_own_size_and_fills_alone() {
    let sizes = [1024, 256, 4096].map(|mib| mib * MIB);
    let host = Host::with("535.161.08", &sizes);
    let on =
        |gpu: usize, words: &[&str]| host.start(&[&["--gpu", &gpu.to_string()], words].concat());
    let used = || host.sim.state().gpus.iter().map(|gpu| gpu.used_bytes).collect::<Vec<_>>();
    let end = host.wait("end");
    let mut full = Vec::new();
    for (gpu, size) in sizes.into_iter().enumerate() {
        let before = used();
        // Every way reports its size, and all of it can be had, and no more.
        let filled = host.finish(on(gpu, &["fill"]));
        assert_eq!(filled.number("got_bytes"), size, "GPU {gpu}");
        assert!(filled.lines.iter().any(|line| line.contains("status=0x51")), "{:?}", filled.lines);
        let (all, mib) = (format!("alloc {size} as a"), size / MIB);
        let reported =
            host.finish(on(gpu, &["run", "start", "info", "alloc27", &all, "alloc 64KiB as b"]));
        for way in ["fb-info", "fb-info-v2", "heap-info"] {
            reported.must(&format!("{way} ok total_mib={mib} free_mib={mib} used_mib=0"));
        }
        reported.must(&format!("alloc27 ok total={size}"));
        reported.must(&format!("alloc a ok bytes={size}"));
        reported.must("alloc b status=0x51");
        // Full it stays, and those that come after have theirs all the same.
        host.until("it is free again", |_| used() == before);
        full.push(on(gpu, &["run", "start", &all, &end]));
        let wanted: Vec<u64> =
            sizes.iter().enumerate().map(|(at, size)| if at > gpu { 0 } else { *size }).collect();
        host.until("it is full", |_| used() == wanted);
    }
    let state = host.sim.state();
    for (gpu, size) in state.gpus.iter().zip(sizes) {
        assert_eq!((gpu.total_bytes, gpu.free_bytes, gpu.peak_bytes), (size, 0, size));
    }
    host.go("end");
    full.into_iter().for_each(|program| assert!(host.finish(program).success));
    host.until("all are empty", |_| used() == [0, 0, 0]);
}

#[test]
fn all_ways_to_ask_agree() {
    let host = Host::new();
    let said = host.run(&["start", "alloc 10MiB as a", "info", "alloc27"]);
    for way in ["fb-info", "fb-info-v2", "heap-info"] {
        said.must(&format!("{way} ok total_mib=1024 free_mib=1014 used_mib=10"));
    }
    said.must("alloc27 ok total=1073741824");
}

#[test]
fn managed_memory_counts_by_page_until_file_closes() {
    let host = Host::new();
    let go = host.wait("go");
    let child = host.start(&["run", "start", "uvm-init 1", "managed 64KiB", &go]);
    host.until("it is touched", |state| state.gpus[0].managed_bytes == 64 << 10);
    let state = host.sim.state();
    assert_eq!(state.gpus[0].used_bytes, 64 << 10);
    let uvm = state.files.iter().find_map(|file| file.uvm.clone()).unwrap();
    assert!(uvm.hmm_disabled);
    host.go("go");
    assert!(host.finish(child).success);
    host.until_used(0);
    // One address again and again: nothing stays in a cache.
    for round in ["first", "second"] {
        let go = host.wait(round);
        let child =
            host.start(&["run", "start", "uvm-init", "managed 64KiB at 0x300000000000", &go]);
        host.until_used(64 << 10);
        host.go(round);
        assert!(host.finish(child).success);
        host.until_used(0);
    }
    assert_eq!(host.attack(&["managed", "1MiB"]).number("got_bytes"), MIB);
    assert_eq!(host.attack(&["managed-nofixed", "1MiB"]).number("got_bytes"), MIB);
    host.until_used(0);
}

#[test]
fn uvm_wants_to_be_initialised_once() {
    let host = Host::new();
    let said = host.run(&[
        "start",
        "uvm-call 73",
        "uvm-init 0",
        "uvm-init 0",
        "uvm-init 1",
        "uvm-call 99",
    ]);
    said.must("uvm-call 73 status=0x16");
    said.must("uvm-call 99 errno=22");
    assert_eq!(said.lines.iter().filter(|line| *line == "uvm-init ok").count(), 2);
    said.must("uvm-init status=0x1f");
}

#[test]
fn a_client_works_through_its_own_file_alone() {
    let host = Host::new();
    let said = host.run(&["start", "other-file 1MiB", "alloc 1MiB as a"]);
    said.must("other-file status=0x23");
    said.must("alloc a ok bytes=1048576");
}

#[test]
fn a_device_needs_its_node_open() {
    let host = Host::new();
    host.run(&["open", "client", "device 1"]).must("device status=0x1b");
    host.run(&["open", "client", "device 7"]).must("device status=0x22");
    host.run(&["open", "client", "device 0"]).must("device ok");
}

#[test]
fn nonsense_is_refused_as_the_driver_does() {
    let host = Host::new();
    let said = host.run(&[
        "start",
        "raw 0x2b 47",
        "raw 0x2b 64",
        "raw 0x7f 16",
        "raw 0x27 56",
        "object 0x50",
        "object 0xc2d5",
        "raw 0x4a 184",
    ]);
    for line in [
        "raw 0x2b errno=22",
        "raw 0x7f errno=22",
        "raw 0x27 errno=22",
        "object 0x50 status=0x22",
        "object 0xc2d5 ok",
        "raw 0x4a ok",
    ] {
        said.must(line);
    }
    let said = host.attack(&["hostile-sizes", "512MiB"]);
    said.must("alloc 0 status=0x1f");
    said.must("alloc 18446744073709551615 status=0x51");
    let said = host.attack(&["bad-pointers"]);
    said.must("params kernel status=0x1e");
    said.must("params crossing status=0x1e");
    said.must("params null status=0x1f");
    assert_eq!(said.number("got_bytes"), MIB + 4096);
    host.until_used(0);
}

#[test]
fn controls_follow_addresses_and_answer() {
    let said = Host::new().run(&["start", "controls"]);
    for line in [
        "version ok [\"535.161.08\", \"sim\", \"cgpu-sim\"]",
        "classes ok [2080, a06c, c56f, c6c0]",
        "gr ok [6, 8, 10]",
        "bus ok [14]",
        "firmware ok 4294905615",
    ] {
        said.must(line);
    }
    let said = Host::new().attack(&["control-params"]);
    for line in [
        "no parameters: status=0x1f",
        "a small struct: status=0x1f",
        "no list: status=0x1f",
        "an empty list: status=0x1f",
        "a list at nowhere: status=0x1e",
        "a list in its parameters: ok",
        "a stranger: status=0x56",
        "then: ok",
    ] {
        said.must(line);
    }
}

#[test]
fn process_ids_follow_the_callers_namespace() {
    let host = Host::new();
    let go = host.wait("go");
    let outside = host.start(&["run", "start", "alloc 10MiB as a", &go]);
    host.until_used(10 * MIB);
    let lines = ["run", "start", "alloc 20MiB as a", "pids", "pid-bytes self", &go];
    // It ends its child with itself.
    let before = ["unshare", "--pid", "--fork", "--kill-child"];
    let inside = Program(Some(host.command(&before, &lines).spawn().unwrap()));
    host.until_used(30 * MIB);
    let inner = host
        .sim
        .state()
        .clients
        .iter()
        .map(|client| client.process)
        .find(|pid| *pid != outside.id())
        .unwrap();
    let said = host.run(&[
        "start",
        "pids",
        &format!("pid-bytes {inner}"),
        &format!("pid-bytes {}", outside.id()),
    ]);
    let pids = said.lines.iter().find(|line| line.starts_with("pids ok")).unwrap();
    assert!(
        pids.contains(&inner.to_string()) && pids.contains(&outside.id().to_string()),
        "{pids}"
    );
    said.must("pid-bytes ok private=20971520 owned=0 duped=0");
    said.must("pid-bytes ok private=10485760 owned=0 duped=0");
    host.go("go");
    host.finish(outside);
    let said = host.finish(inside);
    // There it is number 1, and all alone.
    said.must("pids ok pids=[1]");
    said.must("pid-bytes ok private=20971520 owned=0 duped=0");
}

/// What of the first GPU is in use, as each `info` of a script reports.
fn used_mib(said: &ProgramOutput) -> Vec<u64> {
    let reported = said.lines.iter().filter(|line| line.starts_with("fb-info "));
    reported.filter_map(|line| line.rsplit_once("used_mib=")?.1.parse().ok()).collect()
}

/// A list goes into places of a file, and frees what these had.
#[test]
fn exported_list_replaces_former_contents_of_its_places() {
    let host = Host::new();
    let said = host.run(&[
        "start",
        "alloc 100MiB as a",
        "alloc 50MiB as b",
        "system 8MiB as h",
        "export-list 600 0 a b",
        "export-list 600 2 h - a",
        "export-info",
        "free a",
        "free b",
        "info",
        "import-list 0 as x y z w v",
        "free x",
        // What b was is there by y alone, and what a was by the last place and v.
        "export-list 1 0 - -",
        "info",
        "free y",
        "info",
        "free v",
        "export-list 9 4 z",
        "info",
        "import-list 4 as u",
        "import-list 598 as t s",
        "import-list-over 3 z",
        "close-export",
        "sleep 0.3",
        "info",
    ]);
    assert!(said.success, "{:#?}", said.lines);
    said.must("export-info ok places=600 metadata=cgpu");
    said.must("import-list ok kinds=[1, 1, 2, 0, 1]");
    said.must("import-list ok kinds=[2]");
    said.must("import-list ok kinds=[0, 0]");
    said.must("import-list-over ok kinds=[0] kept=true");
    assert_eq!(used_mib(&said), [150, 150, 100, 0, 0], "{:#?}", said.lines);
}

#[test]
fn list_export_and_import_are_all_or_nothing() {
    let host = Host::new();
    let said = host.run(&[
        "start",
        "alloc 100MiB as a",
        "alloc 50MiB as b",
        // No places, then more than there are.
        "export-list 0 0 a",
        "export-list 2 1 a b",
        "export-list 2 0 a b",
        "export-list 2 1 b a",
        "import-list 1 as x y",
        // The second handle is taken, and what was named before it is freed.
        "alloc 10MiB as c",
        "import-list-over 0 c b",
        "export a",
        "export-list 1 0 b",
        "free a",
        "free b",
        "info",
    ]);
    said.must("export-list status=0x3b");
    said.must("import-list status=0x5b");
    said.must("import-list-over status=0x19");
    let failed = said.lines.iter().filter(|line| line.contains("export-list status=0x5b")).count();
    assert_eq!(failed, 2, "{:#?}", said.lines);
    // The first file went when its descriptor did: `export` opened another.
    assert_eq!(used_mib(&said), [60], "{:#?}", said.lines);
}

#[test]
fn each_driver_release_accepts_only_its_structs() {
    for driver in ["470.57.02", "525.60.13", "535.161.08", "550.54.14", "570.86.15", "580.65.06"] {
        let host = Host::with_driver(driver);
        let said = host.run(&[
            "start",
            "uvm-init",
            "alloc 10MiB as a",
            "heap 5MiB as b",
            "uvm-map a",
            "dup a as c",
            "export a",
            "info",
            "pids",
            "uvm-unmap a",
            "os-descriptor 8KiB",
        ]);
        assert!(said.success, "{driver}: {:#?}", said.lines);
        said.must("fb-info-v2 ok total_mib=1024 free_mib=1009 used_mib=15");
        // A struct of another release is not understood.
        let other = if driver < "535" { "535.161.08" } else { "525.60.13" };
        let wrong = host.finish(host.start(&["--driver", other, "run", "start"]));
        wrong.must("start errno=22");
        let version =
            fs::read_to_string(host.sim.dir().join("proc/driver/nvidia/version")).unwrap();
        assert!(version.contains(&format!("Kernel Module  {driver}  ")), "{version}");
    }
}

#[test]
fn a_call_inside_a_call_is_unwrapped_once() {
    let host = Host::new();
    assert_eq!(host.attack(&["xfer", "100MiB"]).number("got_bytes"), 100 * MIB);
    let nested = host.attack(&["xfer-nested", "100MiB"]);
    assert_eq!(nested.number("got_bytes"), 0);
    nested.must("xfer-nested rc=-1 errno=22 bytes=0");
}

#[test]
fn type_direction_and_upper_bits_are_ignored() {
    let host = Host::new();
    assert_eq!(host.attack(&["type-byte", "10MiB"]).number("got_bytes"), 160 * MIB);
    assert_eq!(host.attack(&["upper-garbage", "10MiB"]).number("got_bytes"), 10 * MIB);
    assert_eq!(host.attack(&["int80", "10MiB"]).number("got_bytes"), 10 * MIB);
}

#[test]
fn a_hanging_call_holds_up_its_caller_alone() {
    let host = Host::new();
    host.fault("alloc:0x40 hang");
    let held: Vec<Program> =
        (0..20).map(|_| host.start(&["run", "start", "alloc 10MiB as a"])).collect();
    host.until("they hang", |state| state.hanging == 20);
    assert!(host.run(&["start", "info", "heap 1MiB as b", "pids"]).success);
    host.fault("clear");
    for child in held {
        host.finish(child).must("alloc a ok bytes=10485760");
    }
}

#[test]
fn faults_do_what_they_say() {
    let host = Host::new();
    let path = host.sim.dir().join("sim/faults");
    let run = |fault: &str, lines: &[&str]| {
        fs::write(&path, format!("clear\n{fault}\n")).unwrap();
        host.run(lines)
    };
    run("alloc:0x40 status 0x1a", &["start", "alloc 1MiB as a"]).must("alloc a status=0x1a");
    run("heap errno 5", &["start", "heap 1MiB as a"]).must("heap a errno=5");
    let said = run("alloc:0x40 errno 4 times 1", &["start", "alloc 1MiB as a", "alloc 1MiB as b"]);
    said.must("alloc a errno=4");
    said.must("alloc b ok bytes=1048576");
    run("round 2MiB", &["start", "alloc 1MiB as a"]).must("alloc a ok bytes=2097152");
    let start = Instant::now();
    run("dup delay 300", &["start", "alloc 1MiB as a", "dup a as b"]).must("dup b ok");
    assert!(start.elapsed() >= Duration::from_millis(300));
    run("fb-info 0x16 2048", &["start", "info"])
        .must("fb-info ok total_mib=1024 free_mib=2 used_mib=1022");
    assert!(fs::write(&path, "no such fault").is_err());

    let go = host.wait("go");
    fs::write(&path, "clear\nfree lose\n").unwrap();
    let child = host.start(&["run", "start", "alloc 10MiB as a", "free a", &go]);
    host.until("it is lost", |state| state.gpus[0].lost_bytes == 10 * MIB);
    host.go("go");
    host.finish(child).must("free a ok");
    host.until_used(0);
}

#[test]
fn attacks_succeed_without_a_monitor() {
    let host = Host::new();
    let huge = 4096 * MIB;
    // The GPU is smaller than what they ask for, so they are tried on a larger one.
    drop(host);
    let mount = TempDir::new().unwrap();
    let options = SimOptions {
        dir: mount.path().to_owned(),
        gpus: vec![GpuSpec { memory_bytes: 4 * huge, reserved_bytes: 0 }],
        driver: "535.161.08".parse().unwrap(),
    };
    let host =
        Host { sim: Sim::start(options).unwrap(), scratch: TempDir::new().unwrap(), _mount: mount };
    for attack in [
        "race-size",
        "race-pointer",
        "class-in-client",
        "ptrace-sibling",
        "dup-free",
        "map-free",
        "vfork-exec",
    ] {
        // A race may be lost, all the more on a busy machine; what matters is that it can be won.
        let won = (0..30).any(|_| {
            let got = host.attack(&[attack]).number("got_bytes");
            host.until_used(0);
            got >= huge
        });
        assert!(won, "{attack}");
    }
    for words in [&["swap-control"][..], &["swap-control", "xfer"]] {
        let won = (0..30).any(|_| {
            let got = host.attack(words).number("got_bytes");
            host.until_used(0);
            got >= 200 * MIB
        });
        assert!(won, "{words:?}");
    }
    assert!((0..30).any(|_| host.attack(&["dup2-ioctl"]).number("got_bytes") > 0));
    assert_eq!(host.attack(&["barrier16", "1GiB"]).number("got_bytes"), 16 << 30);
    assert_eq!(host.attack(&["barrier16", "2GiB"]).number("successes"), 8);
}

#[test]
fn bookkeeping_survives_rough_treatment() {
    let host = Host::new();
    for attack in ["interrupt", "signal-storm", "sigstop-self"] {
        let said = host.attack(&[attack, "200"]);
        assert!(said.number("got_bytes") > 0, "{attack}: {:#?}", said.lines);
        host.until_used(0);
    }
    assert_eq!(host.attack(&["handle-reuse", "100"]).number("odd"), 0);
    // Nothing that they gave back, or that went with them, is missing.
    for words in [
        &["kill-during-alloc", "20"][..],
        &["handle-reuse", "100"],
        &["clients", "500"],
        &["close-range"],
        &["parent-free", "500"],
        &["interrupt", "200"],
    ] {
        let said = host.attack(words);
        assert_eq!(said.number("got_bytes"), TOTAL_BYTES, "{words:?}: {:#?}", said.lines);
    }
    host.until("nothing is left", |state| {
        state.gpus[0].used_bytes == 0 && state.clients.is_empty()
    });
}

#[test]
fn a_descriptor_works_in_another_process() {
    let host = Host::new();
    let socket = host.path("socket");
    let socket = socket.to_str().unwrap();
    let sender = host.start(&["attack", "send-fd", socket]);
    let receiver = host.start(&["attack", "recv-fd", socket, "1"]);
    host.until_used(TOTAL_BYTES);
    let state = host.sim.state();
    // It is the sender's client still.
    assert_eq!(state.clients.len(), 1);
    assert_eq!(state.clients[0].process, sender.id());
    host.finish(sender);
    assert_eq!(host.finish(receiver).number("got_bytes"), TOTAL_BYTES);
    host.until_used(0);
}

#[test]
fn simulator_program_serves_until_terminated() {
    use std::io::{BufRead as _, BufReader};
    let mount = TempDir::new().unwrap();
    let dir = mount.path().to_str().unwrap();
    let mut sim = Command::new(env!("CARGO_BIN_EXE_cgpu-sim"))
        .args([
            "--dir",
            dir,
            "--gpu",
            "16130MiB",
            "--gpu",
            "24268MiB",
            "--driver",
            "550.54.14",
            "--fault",
            "alloc:0x40 status 0x1a",
        ])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(sim.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    let inventory = fs::read_to_string(mount.path().join("inventory.json")).unwrap();
    let inventory: serde_json::Value = serde_json::from_str(&inventory).unwrap();
    assert_eq!(
        (&inventory[0]["memory_mib"], &inventory[1]["memory_mib"]),
        (&16130.into(), &24268.into())
    );
    let state = fs::read_to_string(mount.path().join("sim/state")).unwrap();
    let state: State = serde_json::from_str(&state).unwrap();
    assert_eq!(state.faults, ["alloc:0x40 status 0x1a"]);
    let pid = nix::unistd::Pid::from_raw(i32::try_from(sim.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    assert!(sim.wait().unwrap().success());
    assert!(!mount.path().join("dev").exists());
}

#[test]
fn separate_simulator_is_observed_and_disturbed_through_files() {
    let mount = TempDir::new().unwrap();
    let options = SimOptions {
        dir: mount.path().to_owned(),
        gpus: vec![GpuSpec { memory_bytes: TOTAL_BYTES, reserved_bytes: 0 }],
        driver: "570.86.15".parse().unwrap(),
    };
    let program = Path::new(env!("CARGO_BIN_EXE_cgpu-sim"));
    let sim = cgpu_sim::Program::start(program, &options).unwrap();
    sim.fault(&"free lose".parse().unwrap()).unwrap();
    let state = sim.state().unwrap();
    assert_eq!((state.driver.as_str(), state.gpus[0].free_bytes), ("570.86.15", TOTAL_BYTES));
    assert_eq!(state.faults, ["free lose"]);
    drop(sim);
    assert!(!mount.path().join("sim").exists());
    let nowhere = SimOptions { dir: "/proc/none".into(), ..options };
    assert!(cgpu_sim::Program::start(program, &nowhere).is_err());
}
