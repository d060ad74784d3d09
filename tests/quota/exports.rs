//! Memory that is exported to a descriptor.

use std::fs;
use std::io::IoSlice;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde_json::json;

use crate::gated::{Gated, MIB, RMTOOL, got_bytes};
use crate::host::{ask, names};
use crate::support::{Bundle, wait_until};

const SOON: Duration = Duration::from_secs(8);

/// A container with 1000 MiB that sleeps, with a directory that the host shares.
struct Shared {
    gated: Gated,
    bundle: Bundle,
    dir: PathBuf,
}

impl Shared {
    fn new() -> Self {
        let gated = Gated::new();
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
        let mut lines: Vec<String> = vec!["run".into(), "start".into()];
        for (number, part) in parts.iter().enumerate() {
            lines.extend(part.iter().map(|line| (*line).to_owned()));
            lines.push(format!("touch /shared/done{number}"));
            lines.push(format!("wait /shared/go{number}"));
        }
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        self.gated.start(&self.bundle, &lines)
    }

    #[track_caller]
    fn done(&self, part: usize) {
        let path = self.dir.join(format!("done{part}"));
        assert!(wait_until(SOON, || path.exists()), "part {part}\n{}", self.gated.host.log());
    }

    fn go(&self, part: usize) {
        fs::write(self.dir.join(format!("go{part}")), "").expect("it is ours");
    }

    /// That monitor and driver agree.
    #[track_caller]
    fn uses(&self, mib: u64) {
        let both = || (self.gated.accounted_bytes("app"), self.gated.used_bytes(0));
        let wanted = (mib * MIB, mib * MIB);
        wait_until(SOON, || both() == wanted);
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

#[test]
fn what_is_exported_counts_once_until_nobody_has_it() {
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
    for part in 0..4 {
        shared.done(part);
        shared.uses(300);
        shared.go(part);
    }
    // Longer than it takes to look for whoever has it.
    std::thread::sleep(Duration::from_secs(4));
    if !shared.dir.join("done4").exists() {
        shared.uses(300);
    }
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

#[test]
fn what_is_in_a_file_that_is_open_stays() {
    let shared = Shared::new();
    let child = shared.script(&[&["alloc 300MiB as a", "export a", "free a"], &["import as b"]]);
    shared.done(0);
    // Looked for several times.
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
fn a_new_worker_knows_what_was_exported() {
    let shared = Shared::new();
    let child = shared.script(&[
        &["alloc 300MiB as a", "export a", "free a"],
        &["import as b"],
        &["free b"],
    ]);
    shared.done(0);
    let (_, worker) = shared.gated.monitor("app_________");
    kill(worker, Signal::SIGKILL).expect("it is there");
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

/// A socket of the host's with the file in its queue that `exporter` opened last: nobody's
/// table has it.
fn hidden(exporter: u32) -> [UnixStream; 2] {
    let numbers = names(Path::new(&format!("/proc/{exporter}/fd")));
    let last = numbers.iter().filter_map(|name| name.parse().ok()).max().expect("it has files");
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
fn a_container_that_is_gone_leaves_nothing_in_a_file_that_is_hidden() {
    let shared = Shared::new();
    let child = shared.script(&[&["alloc 300MiB as a", "export a", "free a"]]);
    shared.done(0);
    let files = shared.gated.sim.state().files;
    let exporter = files.iter().max_by_key(|file| file.file).expect("files are open").process;
    let hidden = hidden(exporter);
    shared.gated.host.runtime().delete(&shared.bundle).ok();
    let _ = says(child);
    let empty = || shared.gated.used_bytes(0) == 0;
    assert!(wait_until(SOON, empty), "{}", shared.gated.host.log());
    drop(hidden);
    shared.gated.soon_is_empty();
}

#[test]
fn exports_without_end_stay_within_the_quota() {
    let gated = Gated::new();
    for how in ["", "close", "socket"] {
        gated.sim.forget_peaks();
        let words: Vec<&str> =
            [RMTOOL, "attack", "export-free", how].into_iter().filter(|w| !w.is_empty()).collect();
        let told = gated.run(&format!("a{how}"), 500, &words);
        let peak = gated.sim.state().gpus[0].peak_bytes;
        assert!(peak <= 500 * MIB, "{how}: {peak}: {told}");
        assert!(peak >= 448 * MIB, "{how}: nothing was exported: {told}");
        gated.soon_is_empty();
    }
}
