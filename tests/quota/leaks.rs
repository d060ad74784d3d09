//! Descriptors of a container that programs of the host have: these live on, and the quota outlives the container.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::activation::end_monitor;
use crate::gated::{FIRST_MIB, Gated, MIB, RMTOOL, got_bytes, rmtool};
use crate::host::ask;
use crate::support::{Bundle, Running, eventually, run_with_timeout, start, timeout};

const QUOTA_MIB: u64 = 1000;

/// The key under which the quota of the container `app` stays reserved.
const LEAKED: &str = "app~app_________";

/// A container that has a directory in common with the host, and runs those words of a shell.
struct Giver<'a> {
    gated: &'a Gated,
    shared: PathBuf,
    bundle: Bundle,
}

impl<'a> Giver<'a> {
    #[track_caller]
    fn start(gated: &'a Gated, script: &str) -> Self {
        let shared = gated.host.scratch.directory("shared");
        let bundle = gated.bundle_with("app", |config| {
            ask(config, QUOTA_MIB);
            config["mounts"].as_array_mut().expect("mounts are a list").push(json!({
                "destination": "/shared", "type": "bind", "source": shared, "options": ["bind", "rw"],
            }));
            config["process"]["args"] = json!(["sh", "-c", script]);
        });
        let runtime = gated.host.runtime();
        runtime.create(&bundle).ok();
        runtime.start(&bundle).ok();
        Giver { gated, shared, bundle }
    }

    /// Starts rmtool's attack as a program of the host, on what the container sends.
    fn outside(&self, attack: &[&str]) -> Running {
        let mut command = Command::new(rmtool());
        command.arg("--dev").arg(self.gated.sim.dir().join("dev")).arg("attack");
        let path = |word: &str| match word.strip_prefix("/shared/") {
            Some(name) => self.shared.join(name).into_os_string(),
            None => word.into(),
        };
        start(command.args(attack.iter().map(|word| path(word))))
    }

    /// Waits until a program of the host has the container's descriptors.
    #[track_caller]
    fn soon_leaks_to(&self, pid: Pid) {
        let has = || driver_files(self.gated, pid) > 0;
        assert!(eventually(has), "{pid} has no descriptor of the driver's");
    }

    fn set(&self, name: &str) {
        fs::write(self.shared.join(name), "").expect("a file can be made");
    }

    fn unset(&self, name: &str) {
        fs::remove_file(self.shared.join(name)).expect("it is there");
    }

    #[track_caller]
    fn delete(&self) {
        self.gated.host.runtime().delete(&self.bundle).ok();
    }
}

/// How many files of the simulated driver a process has open.
fn driver_files(gated: &Gated, pid: Pid) -> usize {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let names = ["nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm"];
    let nodes = names.map(|name| fs::metadata(gated.sim.dir().join("dev").join(name)).ok());
    let identity = |meta: &fs::Metadata| (meta.ino(), meta.dev());
    let nodes: Vec<_> = nodes.iter().flatten().map(identity).collect();
    files
        .filter_map(|file| fs::metadata(file.path()).ok())
        .filter(|meta| nodes.contains(&identity(meta)))
        .count()
}

/// That the quota of the container, which is gone, stays reserved for that program, and its id can be used again.
#[track_caller]
fn is_reserved_for(gated: &Gated, pid: Pid, program: &str) {
    let log = gated.host.log();
    assert!(gated.host.registered().contains(LEAKED), "{:?}\n{log}", gated.host.ps());
    let row = gated.host.container(LEAKED);
    assert_eq!(row["state"], "leaked", "{row}");
    // A search of a busy host takes longer than a delete waits.
    let holders = || gated.host.container(LEAKED)["leaked_to"].clone();
    let expected = json!([{"pid": pid.as_raw(), "name": program}]);
    assert!(eventually(|| holders() == expected), "{:?}\n{}", holders(), gated.host.log());
    let shown = gated.host.cgpu(&["ps"]).ok().stdout;
    let note = format!("its quota stays reserved: {program} (process {pid}) has a descriptor");
    assert!(shown.contains(&note), "{shown}");
    let runtime = gated.host.runtime();
    let all = gated.bundle("all", FIRST_MIB, &["true"]);
    let refused = runtime.create(&all).exits(1);
    assert!(refused.stderr.contains(LEAKED), "{refused}");
    let again = gated.run("app", FIRST_MIB - QUOTA_MIB, &[RMTOOL, "fill"]).ok();
    assert_eq!(got_bytes(&again), (FIRST_MIB - QUOTA_MIB) * MIB, "{again}");
    assert_eq!(gated.host.container(LEAKED)["state"], "leaked");
    // The container that would be changed is gone.
    let set = gated.host.cgpu(&["set", LEAKED, "--memory", "900"]).exits(1);
    assert!(set.stderr.contains("no registered container"), "{set}");
}

fn events(gated: &Gated, kind: &str) -> Vec<Value> {
    let reported = gated.host.cgpu(&["events", "--json"]).ok().stdout;
    let all = reported.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    all.filter(|event| event["kind"] == kind).collect()
}

const SEND: &str = "exec /rmtool attack send-fd /shared/s";
const SEND_AND_STAY: &str = "exec /rmtool attack send-fd /shared/s stay";
const SEND_AND_LIVE: &str = "/rmtool attack send-fd /shared/s; exec sleep 1000";

/// A host program that holds a descriptor until the container's end, and allocates then, gets
/// nothing.
#[test]
fn descriptor_held_past_container_end_allocates_nothing() {
    let mut gated = Gated::new();
    for over_crun in [false, true] {
        if over_crun {
            gated.over_crun();
        }
        let giver = Giver::start(&gated, SEND);
        let mut holder = giver.outside(&["hold-fd", "/shared/s", "/shared/go"]);
        giver.soon_leaks_to(holder.pid());
        giver.delete();
        is_reserved_for(&gated, holder.pid(), "rmtool");
        gated.sim.forget_peaks();
        giver.set("go");
        let tried = || giver.shared.join("go.tried").exists();
        assert!(eventually(tried) && !holder.has_ended(), "{}", gated.host.log());
        assert_eq!(gated.host.container(LEAKED)["state"], "leaked");
        giver.unset("go");
        let ended = holder.end(timeout()).ok();
        assert!(ended.has_line("got_bytes=0"), "{ended}");
        giver.unset("go.tried");
        assert_eq!(gated.sim.peak_bytes(0), 0, "{ended}\n{}", gated.host.log());
        gated.soon_is_empty();
        let leaked = events(&gated, "leaked");
        assert_eq!(leaked.len(), 1 + usize::from(over_crun), "{leaked:#?}");
        assert_eq!((&leaked[0]["id"], &leaked[0]["program"]), (&json!("app"), &json!("rmtool")));
        let removed = events(&gated, "removed");
        let last = removed.iter().rfind(|event| event["reason"].is_string()).expect("a reason");
        assert_eq!(last["id"], "app");
        gated.host.whole_gpu_can_be_had("whole");
        gated.soon_is_empty();
    }
}

/// By a client of its own the memory is the program's, and the driver says so.
#[test]
fn descriptor_holder_creating_its_own_client_is_killed() {
    let gated = Gated::new();
    let giver = Giver::start(&gated, SEND);
    let holder = giver.outside(&["hold-fd", "/shared/s", "/shared/go", "own-client"]);
    giver.soon_leaks_to(holder.pid());
    giver.delete();
    is_reserved_for(&gated, holder.pid(), "rmtool");
    giver.set("go");
    let ended = holder.end(timeout());
    assert_eq!(ended.status.code(), None, "{ended}\n{}", gated.host.log());
    assert!(ended.has_line("reached=1"), "it tried: {ended}");
    gated.soon_is_empty();
    assert!(eventually(|| events(&gated, "killed").len() == 1), "{}", gated.host.log());
}

/// What it does with the container's own client is the container's: which gave it away.
#[test]
fn host_allocation_through_container_client_ends_container() {
    let gated = Gated::new();
    let giver = Giver::start(&gated, SEND_AND_LIVE);
    let neighbour = gated.sleeping("neighbour", 100);
    let mut innocent = gated.start(&neighbour, &["hold", "100MiB"]);
    gated.soon_uses(100);
    let mut taker = giver.outside(&["recv-fd", "/shared/s", "1000"]);
    let state = || gated.host.runtime().call(&["state", "app"]).ok().json()["status"].clone();
    assert!(eventually(|| state() == "stopped"), "{}", gated.host.log());
    let reported = || events(&gated, "leaked");
    assert!(eventually(|| !reported().is_empty()));
    let event = reported().remove(0);
    let reason = event["reason"].as_str().unwrap_or_default().to_owned();
    assert!(reason.contains("the container was ended"), "{event}");
    assert_eq!(event["pid"], taker.pid().as_raw());
    // What it took goes with the container's client, and the quota stays.
    gated.soon_uses(100);
    assert!(!taker.has_ended(), "{}", gated.host.log());
    giver.delete();
    let holder = || gated.host.container(LEAKED)["leaked_to"][0]["name"].clone();
    assert!(eventually(|| holder() == "rmtool"), "{:?}", gated.host.ps());
    assert_eq!(innocent.try_wait().expect("a child of ours"), None);
    taker.kill();
    let _ = taker.end(timeout());
    gated.host.runtime().delete(&neighbour).ok();
    let _ = innocent.wait();
    gated.soon_is_empty();
}

/// A host program that takes memory of its own is killed, and the container lives on.
#[test]
fn host_program_with_own_memory_is_killed_alone() {
    let gated = Gated::new();
    let giver = Giver::start(&gated, SEND_AND_LIVE);
    let taker = giver.outside(&["recv-fd", "/shared/s", "1000", "own-client"]);
    let ended = taker.end(timeout());
    assert_eq!(ended.status.code(), None, "{ended}\n{}", gated.host.log());
    gated.soon_uses(0);
    gated.fills(&giver.bundle, QUOTA_MIB);
    giver.delete();
    gated.soon_is_empty();
}

/// `run` is behind the container's filter itself, and so is the hook that it calls: neither waits for an end that comes
/// after them.
#[test]
fn a_run_that_leaks_nothing_leaves_nothing() {
    let gated = Gated::new();
    for _ in 0..3 {
        let filled = gated.run("app", QUOTA_MIB, &[RMTOOL, "fill"]).ok();
        assert_eq!(got_bytes(&filled), QUOTA_MIB * MIB);
        assert_eq!(gated.host.ps(), Vec::<Value>::new(), "{}", gated.host.log());
    }
    gated.soon_is_empty();
}

/// Its descriptors are not monitored any more: the command that notices the loss checks them, and ends the container.
#[test]
fn unsupervised_container_with_outside_allocations_is_ended() {
    for more in [&[][..], &["own-client"]] {
        let gated = Gated::new();
        let giver = Giver::start(&gated, SEND_AND_STAY);
        let mut holder = giver.outside(&[&["hold-fd", "/shared/s", "/shared/go"], more].concat());
        giver.soon_leaks_to(holder.pid());
        end_monitor(&gated);
        giver.set("go");
        let tried = || giver.shared.join("go.tried").exists();
        assert!(eventually(tried) && gated.used_bytes(0) > QUOTA_MIB * MIB, "it takes too little");
        assert_eq!(gated.host.runtime().status(&giver.bundle), "running");
        gated.host.gc();
        let status = || gated.host.runtime().status(&giver.bundle);
        assert!(eventually(|| status() == "stopped"), "{more:?}\n{}", gated.host.log());
        let leaked = events(&gated, "leaked");
        assert_eq!(leaked.len(), 1, "{leaked:#?}");
        assert_eq!(leaked[0]["pid"], holder.pid().as_raw(), "{leaked:#?}");
        assert_eq!(events(&gated, "monitor_lost").len(), 1);
        // It is killed for memory of its own, and lives on with the container's.
        assert!(eventually(|| holder.has_ended() != more.is_empty()), "{more:?}");
        holder.kill();
        let _ = holder.end(timeout());
        giver.delete();
        gated.soon_is_empty();
    }
}

/// Who has a descriptor and takes nothing is no reason to end a container.
#[test]
fn unsupervised_container_with_merely_held_descriptors_survives() {
    let gated = Gated::new();
    let giver = Giver::start(&gated, SEND_AND_STAY);
    let mut holder = giver.outside(&["hold-fd", "/shared/s", "/shared/go"]);
    giver.soon_leaks_to(holder.pid());
    end_monitor(&gated);
    gated.host.gc();
    assert_eq!(events(&gated, "monitor_lost").len(), 1);
    assert_eq!(events(&gated, "leaked"), Vec::<Value>::new());
    assert_eq!(gated.host.runtime().status(&giver.bundle), "running");
    holder.kill();
    let _ = holder.end(timeout());
    giver.delete();
    gated.soon_is_empty();
}

/// The message bus of a host, as its package brings it.
struct Bus(Running);

impl Bus {
    #[track_caller]
    fn start(gated: &Gated, shared: &std::path::Path) -> Self {
        let configuration = format!(
            "<!DOCTYPE busconfig PUBLIC \"-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN\" \
             \"http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd\">\
             <busconfig><type>system</type><listen>unix:path={}</listen><auth>EXTERNAL</auth>\
             <policy context=\"default\"><allow send_destination=\"*\" eavesdrop=\"true\"/>\
             <allow eavesdrop=\"true\"/><allow own=\"*\"/><allow user=\"*\"/></policy></busconfig>",
            shared.join("bus").display()
        );
        let file = gated.host.scratch.file("bus.conf", &configuration);
        let mut command = Command::new("dbus-daemon");
        command.arg("--nofork").arg("--nopidfile").arg("--nosyslog").arg("--config-file").arg(file);
        let bus = start(&mut command);
        assert!(eventually(|| shared.join("bus").exists()), "the bus doesn't listen");
        Bus(bus)
    }

    /// Asks it for its id, as any program of the host may.
    fn answers(shared: &std::path::Path) -> bool {
        const ASK: &str = "import socket, sys\n\
            bus = socket.socket(socket.AF_UNIX)\n\
            bus.settimeout(20)\n\
            bus.connect(sys.argv[1])\n\
            bus.sendall(b'\\0AUTH EXTERNAL 30\\r\\n')\n\
            print(bus.recv(100).decode())\n";
        let mut command = Command::new("python3");
        command.args(["-c", ASK]).arg(shared.join("bus"));
        run_with_timeout(&mut command, timeout()).stdout.starts_with("OK ")
    }
}

impl Drop for Bus {
    fn drop(&mut self) {
        self.0.kill();
    }
}

/// A message bus that was sent a descriptor lives on, and the quota stays reserved.
#[test]
fn message_bus_with_descriptor_survives_quota_stays_reserved() {
    let gated = Gated::new();
    let shared = gated.host.scratch.directory("shared");
    let mut bus = Bus::start(&gated, &shared);
    let giver = Giver::start(&gated, "exec /rmtool attack send-bus /shared/bus");
    giver.soon_leaks_to(bus.0.pid());
    // While the container lives nothing is taken, and nothing happens. The one who sent is another's way to it.
    gated.fills(&giver.bundle, QUOTA_MIB);
    assert!(Bus::answers(&shared));
    // The bus closes what it was sent when its sender hangs up: somebody else has to hold its connection.
    let connection = duplicate_bus_connection(&gated);
    gated.host.runtime().kill(&giver.bundle, "KILL").ok();
    giver.delete();
    is_reserved_for(&gated, bus.0.pid(), "dbus-daemon");
    assert!(!bus.0.has_ended() && Bus::answers(&shared), "{}", gated.host.log());
    drop(connection);
    gated.soon_is_empty();
    assert!(!bus.0.has_ended() && Bus::answers(&shared), "{}", gated.host.log());
}

/// A duplicate of the container's connection to the bus, as of a descriptor that was sent on.
fn duplicate_bus_connection(gated: &Gated) -> std::os::fd::OwnedFd {
    use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
    let state = gated.host.runtime().call(&["state", "app"]).ok().json();
    let init = i32::try_from(state["pid"].as_i64().expect("a pid")).expect("a pid");
    let pid = rustix::process::Pid::from_raw(init).expect("a pid");
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("it lives");
    let mut files = fs::read_dir(format!("/proc/{init}/fd")).expect("it lives").flatten();
    let found = files.find_map(|file| {
        let target = fs::read_link(file.path()).ok()?;
        let is_socket = target.to_str()?.starts_with("socket:");
        is_socket.then(|| file.file_name().to_str()?.parse::<i32>().ok()).flatten()
    });
    let number = found.expect("it is connected");
    pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty()).expect("it is there")
}

/// Two programs, of which one ends: the quota stays for the other.
#[test]
fn quota_is_released_when_last_holder_exits() {
    let gated = Gated::new();
    let giver = Giver::start(
        &gated,
        "/rmtool attack send-fd /shared/s; exec /rmtool attack send-open /shared/t",
    );
    let mut first = giver.outside(&["hold-fd", "/shared/s", "/shared/go"]);
    giver.soon_leaks_to(first.pid());
    let mut second = giver.outside(&["hold-fd", "/shared/t", "/shared/go"]);
    giver.soon_leaks_to(second.pid());
    giver.delete();
    let holders = || {
        let row = gated.host.container(LEAKED);
        row["leaked_to"].as_array().map_or(0, Vec::len)
    };
    assert!(eventually(|| holders() == 2), "{:?}", gated.host.ps());
    kill(first.pid(), Signal::SIGKILL).expect("it lives");
    assert!(eventually(|| first.has_ended() && holders() == 1), "{:?}", gated.host.ps());
    // Longer than the monitor waits if it finds no process.
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(holders(), 1);
    second.kill();
    let _ = second.end(timeout());
    gated.soon_is_empty();
}
