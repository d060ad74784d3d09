//! Memory that is exported to a descriptor.

use std::fs;
use std::io::IoSlice;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

use cgpu_sim::ClientState;
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::unistd::Pid;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde_json::json;

use crate::gated::{Gated, MIB, RMTOOL, got_bytes};
use crate::host::{ask, names};
use crate::support::{Bundle, eventually};

/// A container with 1000 MiB that sleeps, with a directory that the host shares.
struct Shared {
    gated: Gated,
    bundle: Bundle,
    dir: PathBuf,
}

impl Shared {
    fn new() -> Self {
        Self::on(Gated::new())
    }

    fn on(gated: Gated) -> Self {
        let dir = gated.host.scratch.directory("shared");
        let bundle = gated.bundle_with("app", |config| {
            ask(config, 1000);
            config["process"]["args"] = json!(["sleep", "1000"]);
            config["mounts"].as_array_mut().expect("mounts are a list").push(json!({
                "destination": "/shared", "type": "bind", "source": dir, "options": ["bind", "rw"],
            }));
        });
        let runtime = gated.host.runtime();
        runtime.create(&bundle).ok();
        runtime.start(&bundle).ok();
        Shared { gated, bundle, dir }
    }

    /// Starts a script whose parts wait for [`go`](Self::go), each for its own.
    fn script(&self, parts: &[&[&str]]) -> Child {
        self.script_as("", parts)
    }

    /// The same beside others, by a name of its own.
    fn script_as(&self, who: &str, parts: &[&[&str]]) -> Child {
        let mut lines: Vec<String> = vec!["run".into(), "start".into()];
        for (number, part) in parts.iter().enumerate() {
            lines.extend(part.iter().map(|line| (*line).to_owned()));
            lines.push(format!("touch /shared/done{who}{number}"));
            lines.push(format!("wait /shared/go{who}{number}"));
        }
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        self.gated.start(&self.bundle, &lines)
    }

    #[track_caller]
    fn done(&self, part: usize) {
        self.done_as("", part);
    }

    #[track_caller]
    fn done_as(&self, who: &str, part: usize) {
        let path = self.dir.join(format!("done{who}{part}"));
        let done = eventually(|| path.exists());
        assert!(done, "part {who}{part}\n{}", self.gated.host.log());
    }

    fn go(&self, part: usize) {
        self.go_as("", part);
    }

    fn go_as(&self, who: &str, part: usize) {
        fs::write(self.dir.join(format!("go{who}{part}")), "").expect("it is ours");
    }

    /// That monitor and driver agree.
    #[track_caller]
    fn uses(&self, mib: u64) {
        let both = || (self.gated.accounted_bytes("app"), self.gated.used_bytes(0));
        let wanted = (mib * MIB, mib * MIB);
        eventually(|| both() == wanted);
        assert_eq!(both(), wanted, "{}", self.gated.host.log());
    }

    fn end(self) {
        self.gated.host.runtime().delete(&self.bundle).ok();
        self.gated.soon_is_empty();
    }
}

#[track_caller]
fn says(child: Child) -> String {
    let output = child.wait_with_output().expect("it can be waited for");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Exported memory counts once, until no handle and no open file refers to it.
#[test]
fn exported_memory_counts_once_until_last_reference_ends() {
    let shared = Shared::new();
    let child = shared.script(&[
        &["alloc 300MiB as a", "export a"],
        &["import as b"],
        &["free a"],
        &["free b"],
        &["close-export"],
        &["alloc 1000MiB as c", "free c"],
    ]);
    // Exported, imported, and freed where it was made: the import has it still; freed there,
    // the file has.
    for part in 0..3 {
        shared.done(part);
        shared.uses(300);
        shared.go(part);
    }
    shared.done(3);
    // Longer than a search for the processes that have the file takes.
    std::thread::sleep(Duration::from_secs(4));
    shared.uses(300);
    shared.go(3);
    shared.done(4);
    shared.uses(0);
    shared.go(4);
    shared.done(5);
    shared.go(5);
    let said = says(child);
    for line in ["export a ok", "import b ok", "free b ok", "alloc c ok"] {
        assert!(said.contains(line), "no {line:?} in {said}");
    }
    shared.end();
}

/// Memory in an export file that is open stays, counts, and can be imported.
#[test]
fn memory_in_an_open_export_file_stays_charged() {
    let shared = Shared::new();
    let child = shared.script(&[&["alloc 300MiB as a", "export a", "free a"], &["import as b"]]);
    shared.done(0);
    // The monitor searches for it several times.
    std::thread::sleep(Duration::from_secs(5));
    shared.uses(300);
    let filled = shared.gated.exec(&shared.bundle, &["fill"]).ok();
    assert_eq!(got_bytes(&filled), 700 * MIB, "{filled}");
    shared.go(0);
    shared.done(1);
    shared.uses(300);
    shared.go(1);
    assert!(says(child).contains("import b ok"));
    shared.uses(0);
    shared.end();
}

#[test]
fn an_updated_monitor_knows_what_was_exported() {
    let shared = Shared::new();
    let child = shared.script(&[
        &["alloc 300MiB as a", "export a", "free a"],
        &["import as b"],
        &["free b"],
    ]);
    shared.done(0);
    shared.gated.update();
    shared.go(0);
    shared.done(1);
    shared.uses(300);
    shared.go(1);
    shared.done(2);
    shared.uses(300);
    shared.go(2);
    assert!(says(child).contains("import b ok"));
    shared.uses(0);
    shared.end();
}

/// A socket of the host with the file in its queue that `exporter` opened last: no process's
/// descriptor table has it.
fn hidden(exporter: u32) -> [UnixStream; 2] {
    let open = format!("/proc/{exporter}/fd");
    // It may still close the file by which it reported.
    let is_drivers = |name: &&String| {
        let file = std::fs::read_link(Path::new(&open).join(name));
        file.is_ok_and(|file| file.ends_with("nvidiactl"))
    };
    let numbers = names(Path::new(&open));
    let last = numbers.iter().filter(is_drivers).filter_map(|name| name.parse().ok()).max();
    let last = last.expect("it has files");
    let pid = rustix::process::Pid::from_raw(exporter.cast_signed()).expect("it has a pid");
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("it lives");
    let file = pidfd_getfd(&pidfd, last, PidfdGetfdFlags::empty()).expect("it is there");
    let (from, to) = UnixStream::pair().expect("sockets can be made");
    let (part, files) = ([IoSlice::new(b"x")], [file.as_raw_fd()]);
    let beside = [ControlMessage::ScmRights(&files)];
    sendmsg::<()>(from.as_raw_fd(), &part, &beside, MsgFlags::empty(), None).expect("it is sent");
    [from, to]
}

#[test]
fn removed_container_leaves_no_memory_in_hidden_file() {
    let shared = Shared::new();
    let child = shared.script(&[&["alloc 300MiB as a", "export a", "free a"]]);
    shared.done(0);
    let files = shared.gated.sim.state().files;
    let exporter = files.iter().max_by_key(|file| file.file).expect("files are open").process;
    let hidden = hidden(exporter);
    shared.gated.host.runtime().delete(&shared.bundle).ok();
    let _ = says(child);
    let empty = || shared.gated.used_bytes(0) == 0;
    assert!(eventually(empty), "{}", shared.gated.host.log());
    drop(hidden);
    shared.gated.soon_is_empty();
}

/// Objects that open files of the driver's have.
fn exported(gated: &Gated) -> usize {
    gated.sim.state().files.iter().map(|file| file.exported).sum()
}

/// Who passes a descriptor on need not call the driver.
#[test]
fn export_open_in_uninvolved_process_can_be_imported() {
    let shared = Shared::new();
    let lines = [
        "run",
        "start",
        "alloc 100MiB as a",
        "export a",
        "fork {",
        "quiet",
        // A process that retained the client, too, would be killed with its creator.
        "close",
        "offer-export /shared/socket",
        "sleep 3",
        "}",
        "exit",
    ];
    shared.gated.exec(&shared.bundle, &lines).ok();
    // No process that made a call is left.
    std::thread::sleep(Duration::from_millis(1500));
    shared.uses(100);
    let lines = ["run", "start", "fetch-export /shared/socket", "import as b", "free b"];
    let said = shared.gated.exec(&shared.bundle, &lines).ok();
    assert!(said.stdout.contains("import b ok"), "{said}");
    shared.uses(0);
    shared.gated.fills(&shared.bundle, 1000);
}

/// A list of objects counts once, wherever it is, until no handle and no file refers to it.
#[test]
fn object_list_counts_once_until_last_reference_ends() {
    for crun in [false, true] {
        let mut gated = Gated::new();
        if crun {
            gated.over_crun();
        }
        let shared = Shared::on(gated);
        let child = shared.script(&[
            &["alloc 300MiB as a", "alloc 200MiB as b", "export-list 1000 0 a b"],
            &["export-list 1000 998 b a", "import-list 0 as c d", "import-list 997 as e f g"],
            &["free a", "free b", "free c", "free d"],
            &["free f", "free g"],
            &["import-list 0 as c", "export-list 1000 998 - -"],
            &["export-list 1000 0 - -"],
            &["free c", "alloc 1000MiB as h", "free h", "export-info"],
        ]);
        // Twice in the file, twice imported, freed where it was made, and named no more.
        for part in 0..5 {
            shared.done(part);
            shared.uses(500);
            assert_eq!(exported(&shared.gated), if part == 0 { 2 } else { [4, 2][part / 4] });
            if part == 3 {
                // Longer than a search for the process that has the file takes; that process is there.
                std::thread::sleep(Duration::from_secs(5));
                shared.uses(500);
            }
            shared.go(part);
        }
        shared.done(5);
        shared.uses(300);
        shared.go(5);
        shared.done(6);
        shared.uses(0);
        shared.go(6);
        let said = says(child);
        for line in [
            "import-list ok kinds=[0, 1, 1]",
            "alloc h ok bytes=1048576000",
            "export-info ok places=1000 metadata=cgpu",
        ] {
            assert!(said.contains(line), "no {line:?} in {said}");
        }
        assert!(!said.contains("status="), "{said}");
        shared.end();
    }
}

#[test]
fn what_is_replaced_in_a_file_is_freed() {
    let shared = Shared::new();
    let child = shared.script(&[
        &["alloc 300MiB as a", "alloc 100MiB as b", "export-list 4 1 a a"],
        &["free a", "export-list 4 2 b -"],
        &["export-list 4 0 b b"],
        // Refused entirely: there is no fifth place, and what is there stays.
        &["export-list 4 4 b", "free b", "import-list 0 as c d e"],
        &["alloc 900MiB as x", "close-export"],
    ]);
    for (part, mib) in [(0, 400), (1, 400), (2, 100), (3, 100)] {
        shared.done(part);
        shared.uses(mib);
        shared.go(part);
    }
    shared.done(4);
    shared.uses(1000);
    shared.go(4);
    let said = says(child);
    assert_eq!(said.matches("status=").count(), 1, "{said}");
    assert!(said.contains("export-list status=0x5b"), "{said}");
    assert!(said.contains("import-list ok kinds=[1, 1, 1]"), "{said}");
    shared.end();
}

/// A place of an export file that no process can reach is freed, though another place of the file
/// has a handle.
#[test]
fn unreachable_place_is_freed_though_another_is_used() {
    let shared = Shared::new();
    let child = shared.script(&[
        &["alloc 300MiB as a", "alloc 100MiB as b", "export-list 2 0 a b"],
        &["free a"],
        &["close-export"],
        &["free b"],
    ]);
    for (part, mib) in [(0, 400), (1, 400), (2, 100)] {
        shared.done(part);
        shared.uses(mib);
        shared.go(part);
    }
    shared.done(3);
    shared.uses(0);
    shared.go(3);
    says(child);
    shared.end();
}

#[test]
fn imported_memory_outlives_its_killed_exporter() {
    let shared = Shared::new();
    let exporter = shared.script_as(
        "a",
        &[
            &["alloc 300MiB as a", "system 8MiB as h", "export-list 2 0 a h"],
            &["offer-export /shared/file"],
        ],
    );
    shared.done_as("a", 0);
    let clients = shared.gated.sim.state().clients;
    // The monitor has a duplicate.
    let monitor = shared.gated.monitor("app_________");
    let has = |client: &&ClientState| {
        let is_monitor = client.process.cast_signed() == monitor.as_raw();
        !is_monitor && client.objects.iter().any(|object| object.bytes == 300 * MIB)
    };
    let creator = clients.iter().find(has).expect("it has the memory").process.cast_signed();
    let creator = Pid::from_raw(creator);
    shared.go_as("a", 0);
    let importer = shared.script_as(
        "b",
        &[&["fetch-export /shared/file", "import-list 0 as c d", "close-export"], &["free c"]],
    );
    shared.done_as("b", 0);
    shared.uses(300);
    kill(creator, Signal::SIGKILL).expect("it is there");
    says(exporter);
    // No process has the file any more: the importer has handles of what it had.
    std::thread::sleep(Duration::from_secs(5));
    shared.uses(300);
    let filled = shared.gated.exec(&shared.bundle, &["fill"]).ok();
    assert_eq!(got_bytes(&filled), 700 * MIB, "{filled}");
    shared.go_as("b", 0);
    shared.done_as("b", 1);
    shared.uses(0);
    shared.go_as("b", 1);
    says(importer);
    shared.uses(0);
    let empty = || exported(&shared.gated) == 0;
    assert!(eventually(empty), "{}", shared.gated.host.log());
    shared.end();
}

#[test]
fn updated_monitor_tracks_each_place_of_export_file() {
    let shared = Shared::new();
    let child = shared.script(&[
        &["alloc 300MiB as a", "alloc 100MiB as b", "system 8MiB as h"],
        &["export-list 9 3 b a h", "free a", "free b", "free h"],
        &["import-list 2 as w x y z", "export-list 9 3 - -"],
        &["free x"],
        &["free y"],
    ]);
    for (part, mib) in [(0, 400), (1, 400), (2, 400), (3, 300)] {
        shared.done(part);
        shared.uses(mib);
        shared.gated.update();
        shared.go(part);
    }
    shared.done(4);
    shared.uses(0);
    shared.go(4);
    let said = says(child);
    assert!(said.contains("import-list ok kinds=[0, 1, 1, 2]"), "{said}");
    assert!(!said.contains("status="), "{said}");
    let empty = || exported(&shared.gated) == 0;
    assert!(eventually(empty), "{}", shared.gated.host.log());
    shared.end();
}

#[test]
fn list_in_hidden_file_is_freed_with_container() {
    let shared = Shared::new();
    let child = shared.script(&[&[
        "alloc 300MiB as a",
        "system 8MiB as h",
        // Further apart than one control clears.
        "export-list 65535 0 a h",
        "export-list 65535 65534 a",
        "free a",
    ]]);
    shared.done(0);
    shared.uses(300);
    assert_eq!(exported(&shared.gated), 3);
    let files = shared.gated.sim.state().files;
    let exporter = files.iter().find(|file| file.exported > 0).expect("it is there").process;
    let hidden = hidden(exporter);
    shared.gated.host.runtime().delete(&shared.bundle).ok();
    let _ = says(child);
    let empty = || (shared.gated.used_bytes(0), exported(&shared.gated)) == (0, 0);
    assert!(eventually(empty), "{}", shared.gated.host.log());
    drop(hidden);
    shared.gated.soon_is_empty();
}

#[test]
fn host_memory_is_exported_and_never_charged() {
    for crun in [false, true] {
        let mut gated = Gated::new();
        if crun {
            gated.over_crun();
        }
        let shared = Shared::on(gated);
        let child = shared.script(&[
            &["system 64MiB as h", "alloc 1000MiB as a", "export h", "import as i", "import as j"],
            // Once more in its own place, by another name.
            &["free h", "free i", "export-list 3 0 j"],
            &["import as k", "free j", "free k"],
            &["close-export"],
        ]);
        for part in 0..3 {
            shared.done(part);
            shared.uses(1000);
            assert_eq!(exported(&shared.gated), 1, "part {part}");
            shared.go(part);
        }
        shared.done(3);
        let empty = || exported(&shared.gated) == 0;
        assert!(eventually(empty), "{}", shared.gated.host.log());
        shared.uses(1000);
        shared.go(3);
        let said = says(child);
        for line in ["export h ok", "import i ok", "import j ok", "import k ok"] {
            assert!(said.contains(line), "no {line:?} in {said}");
        }
        shared.end();
    }
}

#[test]
fn updates_under_exports_lose_nothing() {
    let shared = Shared::new();
    let round = [
        "alloc 90MiB as a",
        "alloc 80MiB as b",
        "system 1MiB as h",
        "export-list 700 600 a h",
        "import-list 599 as v w x",
        "free a",
        "export-list 700 601 b",
        "free h",
        "import-list 600 as y z",
        "free b",
        "free w",
        "free x",
        "free y",
        "export-list 700 600 -",
        "free z",
        "export-list 700 601 -",
        "close-export",
        "alloc 70MiB as c",
        "export c",
        "free c",
        "import as d",
        "export-list 1 0 -",
        "close-export",
        "free d",
    ];
    let rounds = 300;
    let script: Vec<&str> = round.into_iter().cycle().take(round.len() * rounds).collect();
    let child = shared.script(&[&script]);
    let mut wait_us = 300;
    let mut updates = 0;
    while !shared.dir.join("done0").exists() && updates < 30 {
        std::thread::sleep(Duration::from_micros(wait_us));
        wait_us = wait_us * 7919 % 20011;
        shared.gated.update();
        updates += 1;
        let used = shared.gated.used_bytes(0);
        assert!(used <= 1000 * MIB, "{used}");
    }
    shared.done(0);
    shared.uses(0);
    shared.go(0);
    let said = says(child);
    assert!(updates > 0, "the script was over before an update");
    assert!(!said.contains("status=") && !said.contains("errno="), "{updates}: {said}");
    let kinds = ["kinds=[0, 1, 2]", "kinds=[1, 1]"];
    assert_eq!(kinds.map(|kinds| said.matches(kinds).count()), [rounds; 2], "{said}");
    shared.end();
}

/// An object that is no memory, or that is untracked, is not exported.
#[test]
fn objects_without_tracked_memory_are_not_exported() {
    let shared = Shared::new();
    let child = shared.script(&[&[
        "alloc 100MiB as a",
        "export-list 3 0 device",
        "export-list 3 0 a device",
        "export-list 3 0 a",
        "import-list 0 as b",
        "export-list 3 0 -",
    ]]);
    shared.done(0);
    shared.uses(100);
    assert_eq!(exported(&shared.gated), 0);
    shared.go(0);
    let said = says(child);
    assert_eq!(said.matches("export-list status=0x56").count(), 2, "{said}");
    assert_eq!(said.matches("export-list ok").count(), 2, "{said}");
    assert!(said.contains("import-list ok kinds=[1]"), "{said}");
    shared.end();
}

/// Another container can neither import from an export file nor put anything into it.
#[test]
fn another_container_cannot_import_or_export_through_file() {
    let shared = Shared::new();
    let child = shared.script(&[
        &["alloc 300MiB as a", "system 8MiB as h", "export-list 4 0 a h"],
        &["offer-export /shared/file"],
        &["import-list 0 as c d"],
    ]);
    shared.done(0);
    shared.go(0);
    let other = shared.gated.bundle_with("other", |config| {
        ask(config, 1000);
        let words = [
            RMTOOL,
            "run",
            "start",
            "alloc 100MiB as x",
            "fetch-export /shared/file",
            "import-list 0 as y z",
            "import as y",
            "export-list 4 2 x",
            "export-list 4 0 x",
        ];
        config["process"]["args"] = json!(words);
        config["mounts"].as_array_mut().expect("mounts are a list").push(json!({
            "destination": "/shared", "type": "bind", "source": shared.dir,
            "options": ["bind", "rw"],
        }));
    });
    let runtime = shared.gated.host.runtime();
    let outcome = runtime.run(&other);
    let _ = runtime.delete(&other); // `run` has done it, unless it failed
    let said = outcome.stdout;
    assert!(said.contains("fetch-export ok"), "{said}");
    assert!(said.contains("import-list status=0x3b"), "{said}");
    assert!(said.contains("import y status=0x3b"), "{said}");
    assert_eq!(said.matches("export-list status=0x63").count(), 2, "{said}");
    shared.done(1);
    shared.uses(300);
    assert_eq!(exported(&shared.gated), 2);
    shared.go(1);
    shared.done(2);
    shared.go(2);
    assert!(says(child).contains("import-list ok kinds=[1, 2]"));
    shared.end();
}

#[test]
fn exports_without_end_stay_within_the_quota() {
    let gated = Gated::new();
    for how in ["", "close", "socket"] {
        gated.sim.forget_peaks();
        let words: Vec<&str> =
            [RMTOOL, "attack", "export-free", how].into_iter().filter(|w| !w.is_empty()).collect();
        let reported = gated.run(&format!("a{how}"), 500, &words);
        let peak = gated.sim.peak_bytes(0);
        assert!(peak <= 500 * MIB, "{how}: {peak}: {reported}");
        assert!(peak >= 448 * MIB, "{how}: nothing was exported: {reported}");
        gated.soon_is_empty();
    }
}
