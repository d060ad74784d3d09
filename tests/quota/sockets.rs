//! The monitor's sockets: out of a container's reach, and flooded by who can reach them.

use std::collections::BTreeSet;
use std::fs;
use std::io::{IoSlice, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::unistd::Pid;
use serde_json::json;

use crate::gated::{Gated, MIB, got_bytes, monitors, resident_bytes};
use crate::host::ask;
use crate::support::{Bundle, eventually, run_with_timeout, timeout};

/// What identifies a file, wherever it is mounted.
type Identity = (u64, u64);

fn identity(path: &Path) -> Option<Identity> {
    fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

/// Everything in the directory that holds all monitors' sockets, and the directory itself.
fn of_monitors(gated: &Gated) -> BTreeSet<Identity> {
    let mut found = BTreeSet::new();
    let mut left = vec![gated.host.state_dir()];
    while let Some(path) = left.pop() {
        found.extend(identity(&path));
        let entries = fs::read_dir(&path).into_iter().flatten().flatten();
        left.extend(entries.map(|entry| entry.path()));
    }
    found
}

/// What a process of `pid`'s could open by a path: each file of each of its mounts but the
/// kernel's own; by the path of its sight.
fn reachable(pid: i32) -> Vec<(PathBuf, Identity)> {
    let process = procfs::process::Process::new(pid).expect("it lives");
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    let kernels = ["proc", "sysfs", "cgroup", "cgroup2", "mqueue", "devpts"];
    let mut found = Vec::new();
    let mounts = process.mountinfo().expect("its mounts can be read");
    for mount in mounts.into_iter().filter(|mount| !kernels.contains(&mount.fs_type.as_str())) {
        let mut left =
            vec![PathBuf::from(format!("{}{}", root.display(), mount.mount_point.display()))];
        let device = identity(&left[0]).map(|(device, _)| device);
        while let Some(path) = left.pop() {
            let Some(here) = identity(&path).filter(|(on, _)| Some(*on) == device) else {
                continue;
            };
            let is_directory = fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_dir());
            if is_directory {
                let entries = fs::read_dir(&path).into_iter().flatten().flatten();
                left.extend(entries.map(|entry| entry.path()));
            }
            found.push((path, here));
        }
    }
    found
}

/// The inodes of a process' sockets.
fn sockets(pid: Pid) -> BTreeSet<u64> {
    let targets = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let targets = targets.filter_map(|entry| fs::read_link(entry.path()).ok());
    let inode = |target: PathBuf| {
        target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
    };
    targets.filter_map(inode).collect()
}

/// The first process of the container.
fn init(gated: &Gated, bundle: &Bundle) -> i32 {
    let state = gated.host.runtime().call(&["state", &bundle.id]).ok().json();
    state["pid"].as_i64().and_then(|pid| pid.try_into().ok()).expect("it has a process")
}

#[test]
fn containers_cannot_reach_the_monitor_sockets() {
    let gated = Gated::new();
    let sleeps = |config: &mut serde_json::Value| {
        ask(config, 1000);
        config["process"]["args"] = json!(["sleep", "1000"]);
    };
    let own = gated.bundle_with("own", sleeps);
    let of_host = gated.bundle_with("hostnet", |config| {
        sleeps(config);
        let namespaces = config["linux"]["namespaces"].as_array_mut().unwrap();
        namespaces.retain(|namespace| namespace["type"] != "network");
        // With the host's network a sysfs may not be mounted.
        config["mounts"].as_array_mut().unwrap().retain(|mount| mount["type"] != "sysfs");
    });
    // That the walk would find a way that is there.
    let open = gated.bundle_with("open", |config| {
        let directory = gated.host.state_dir();
        config["process"]["args"] = json!(["sleep", "1000"]);
        config["mounts"].as_array_mut().unwrap().push(json!({
            "destination": "/mnt", "type": "bind", "source": directory, "options": ["rbind"],
        }));
    });
    let runtime = gated.host.runtime();
    for bundle in [&own, &of_host, &open] {
        runtime.create(bundle).ok();
        runtime.start(bundle).ok();
        gated.exec(bundle, &["--version"]).ok();
    }
    let ours = of_monitors(&gated);
    let monitors = [gated.monitor("own_________"), gated.monitor("hostnet_____")];
    let hits = |bundle: &Bundle| {
        let mut found = reachable(init(&gated, bundle));
        assert!(found.len() > 30, "it has a root file system: {found:?}");
        found.retain(|(_, here)| ours.contains(here));
        found
    };
    assert!(hits(&open).len() >= ours.len(), "the walk finds what can be reached");
    for bundle in [&own, &of_host] {
        assert_eq!(hits(bundle), [], "{}", bundle.id);
        // Nor is a socket open there that anything could be sent through.
        let inside = Pid::from_raw(init(&gated, bundle));
        assert_eq!(sockets(inside), [].into(), "{}", bundle.id);
        // As the container sees it: a socket's name in the host's table leads nowhere.
        let control = gated.host.state_dir().join("gate");
        let checked = runtime.exec(bundle, &["ls", &control.display().to_string()]);
        assert!(checked.stderr.contains("No such file or directory"), "{checked}");
        let found = runtime.exec(bundle, &["/bin/busybox", "find", "/", "-type", "s"]);
        assert_eq!(found.stdout, "", "{found}");
    }
    // No name that a namespace of the network would be enough for.
    let table = fs::read_to_string("/proc/net/unix").unwrap();
    let bound = table.lines().skip(1).filter_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(6);
        Some((fields.next()?.parse::<u64>().ok()?, fields.next()?.to_owned()))
    });
    let bound: Vec<(u64, String)> = bound.collect();
    let state = gated.host.state_dir().display().to_string();
    for monitor in monitors {
        let has = sockets(monitor);
        let names: Vec<&String> =
            bound.iter().filter(|(inode, _)| has.contains(inode)).map(|(_, name)| name).collect();
        assert!(names.len() >= 2, "listener and control: {names:?}");
        for name in names {
            assert!(name.starts_with(&state), "{name}");
        }
    }
    for bundle in [&own, &of_host, &open] {
        runtime.delete(bundle).ok();
    }
    gated.soon_is_empty();
}

/// Says a line to a socket, and prints the answer.
const SAY_CONNECTED: &str = "import socket, sys\n\
    peer = socket.socket(socket.AF_UNIX)\n\
    peer.settimeout(20)\n\
    peer.connect(sys.argv[1])\n";
const SAY_ON: &str = "try:\n\
    \x20   peer.sendall(sys.argv[2].encode() + b'\\n')\n\
    \x20   print(peer.recv(65536).decode() or 'closed')\n\
    except (ConnectionResetError, BrokenPipeError):\n\
    \x20   print('closed')\n";

/// Root's number isn't enough: a container with a mount of the host's `/run` has it, too.
#[test]
fn only_host_processes_change_what_monitors_enforce() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    let place = gated.host.state_dir().join("gate/app_________");
    let uuid = gated.host.container("app")["gpus"][0]["uuid"].take();
    let more = |mib: u64| json!({"limit": {"uuid": uuid, "limit_bytes": mib * MIB}}).to_string();
    let script = gated.host.scratch.file("say.py", format!("{SAY_CONNECTED}{SAY_ON}"));
    let say = |before: &[&str], socket: &str, line: &str| {
        let mut command = gated.host.scratch.command(before.first().unwrap_or(&"env"));
        command.args(before.iter().skip(1)).arg("python3").arg(&script);
        let reported = run_with_timeout(command.arg(place.join(socket)).arg(line), timeout());
        reported.stdout
    };
    let in_pids = ["unshare", "--pid", "--fork"];
    let in_users = ["unshare", "--user", "--map-root-user"];
    for before in [&in_pids[..], &in_users] {
        let reported = say(before, "control", &more(16_000));
        assert!(
            reported.contains("refused") && reported.contains("namespace"),
            "{before:?}: {reported}"
        );
        // The monitor reports its state to every root.
        assert!(say(before, "control", "\"status\"").contains("\"limit_bytes\""), "{before:?}");
        assert_eq!(say(before, "entry", "").trim(), "closed", "{before:?}");
    }
    let log = gated.host.log();
    assert_eq!(
        log.matches("only root of the host may change").count(),
        1,
        "it is said once: {log}"
    );
    gated.fills(&bundle, 1000);
    // Mounts, names and a network of its own has a service of the host, too.
    let as_a_service = ["unshare", "--mount", "--uts", "--ipc", "--net"];
    assert!(say(&as_a_service, "control", &more(900)).contains("done"));
    gated.fills(&bundle, 900);
    // The status shows what is enforced, that it was not reserved, and which program set it.
    let row = gated.host.container("app");
    assert_eq!(row["gpus"][0]["memory_limit_bytes"], 1000 * MIB);
    assert_eq!(row["gpus"][0]["memory_enforced_bytes"], 900 * MIB);
    let shown = gated.host.cgpu(&["ps"]).ok().stdout;
    assert!(shown.contains("app: its monitor enforces 900 MiB on GPU 0, and 1000 MiB"), "{shown}");
    let changes = || {
        let reported = gated.host.cgpu(&["events", "--json", "app"]).ok().stdout;
        let all =
            reported.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        all.filter(|event| event["kind"] == "resized").collect::<Vec<_>>()
    };
    let reported = changes();
    assert_eq!(reported.len(), 1, "{reported:#?}");
    assert_eq!(
        (&reported[0]["quota_bytes"], &reported[0]["program"]),
        (&json!(900 * MIB), &json!("python3"))
    );
    gated.host.cgpu(&["set", "app", "--memory", "800"]).ok();
    let reported = changes();
    assert_eq!(reported.len(), 2, "a change by us is reported once: {reported:#?}");
    assert_eq!(reported[1]["former_quota_bytes"], 900 * MIB);
    assert!(!gated.host.cgpu(&["ps"]).ok().stdout.contains("enforces"));
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

/// A container with whole GPUs may have the host's pids; it is the host's root by its number then.
#[test]
fn a_container_with_the_hosts_pids_changes_nothing() {
    let gated = Gated::new();
    let app = gated.sleeping("app", 1000);
    let whole = gated.bundle_with("whole", |config| {
        config["process"]["args"] = json!(["sleep", "1000"]);
        config["process"]["env"] = json!(["NVIDIA_VISIBLE_DEVICES=1", "PATH=/bin"]);
        let namespaces = config["linux"]["namespaces"].as_array_mut().unwrap();
        namespaces.retain(|namespace| namespace["type"] != "pid");
    });
    let runtime = gated.host.runtime();
    runtime.create(&whole).ok();
    runtime.start(&whole).ok();
    let place = gated.host.state_dir().join("gate/app_________");
    let uuid = gated.host.container("app")["gpus"][0]["uuid"].take();
    let less = json!({"limit": {"uuid": uuid, "limit_bytes": 900 * MIB}}).to_string();
    // Its root file system has no python: one of the host's enters its mounts when it is connected.
    let script = format!(
        "import ctypes, os\n\
         mounts = os.open('/proc/{}/ns/mnt', os.O_RDONLY)\n\
         assert ctypes.CDLL(None).setns(mounts, 0) == 0\n",
        init(&gated, &whole)
    );
    let script = gated.host.scratch.file("enter.py", format!("{SAY_CONNECTED}{script}{SAY_ON}"));
    let mut command = gated.host.scratch.command("python3");
    command.arg(&script).arg(place.join("control")).arg(&less);
    let reported = run_with_timeout(&mut command, timeout());
    assert!(
        reported.stdout.contains("refused") && reported.stdout.contains("the container whole"),
        "{reported}"
    );
    assert_eq!(gated.host.container("app")["gpus"][0]["memory_enforced_bytes"], 1000 * MIB);
    for bundle in [&app, &whole] {
        runtime.delete(bundle).ok();
    }
    gated.soon_is_empty();
}

/// Sends `bytes` together with a descriptor.
fn send_with(stream: &UnixStream, bytes: &[u8], descriptor: RawFd) {
    let beside = [descriptor];
    let messages = [ControlMessage::ScmRights(&beside)];
    let parts = [IoSlice::new(bytes)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    // It may have hung up: then that was read.
    let _ = sendmsg::<()>(stream.as_raw_fd(), &parts, &messages, flags, None);
}

/// Says what may be said to a socket by who has no business there, and stays connected.
fn flood(socket: &Path, count: usize) -> Vec<UnixStream> {
    // What is closed behind us, and what never is.
    let (pipe, _) = nix::unistd::pipe().expect("a pipe can be made");
    let connect = |at: usize| {
        let mut stream = UnixStream::connect(socket).ok()?;
        stream.set_nonblocking(true).expect("it is a socket");
        let _ = match at % 6 {
            0 => stream.write(b""),
            1 => stream.write(&[0xff; 600]),
            2 => stream.write(b"{\"ociVersion\": \"1.0.2\", \"fds\": [\"seccompFd\"], \"pid\": 1"),
            3 => stream
                .write(b"\"status\"\n{\"limit\": {\"uuid\": \"GPU-\", \"limit_bytes\": -1}}\n"),
            4 => stream.write(b"\n\n\n\n\0\0\0\0"),
            _ => {
                send_with(&stream, b"{}", pipe.as_raw_fd());
                Ok(2)
            }
        };
        Some(stream)
    };
    (0..count).filter_map(connect).collect()
}

/// What a monitor may grow by while it is flooded: its budget is 2 MiB resident, of which
/// it has most when nothing happens, and each of the 256 connections that it holds at most
/// costs it a descriptor and what it was sent, less than a KiB here.
const GROWTH_BYTES: u64 = MIB;

/// A flood of the monitor's sockets stops no call and opens no way round the quota.
#[test]
fn socket_flood_stops_no_call_and_bypasses_nothing() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    let mut holder = gated.start(&bundle, &["hold", "300MiB"]);
    gated.soon_uses(300);
    gated.fills(&bundle, 700);
    let monitor = gated.monitor("app_________");
    let before = resident_bytes(monitor);
    let place = gated.host.state_dir().join("gate/app_________");

    // A program's calls are answered all the while; it's known before anybody pushes in.
    let served = || gated.calls("app_________");
    let known = served();
    let mut calls = gated.start(&bundle, &["bench", "4000"]);
    assert!(eventually(|| served() > known), "{}", gated.host.log());
    for socket in ["entry", "control"] {
        for _ in 0..4 {
            assert!(!flood(&place.join(socket), 300).is_empty());
        }
    }
    let held: Vec<_> =
        ["entry", "control"].iter().flat_map(|name| flood(&place.join(name), 400)).collect();
    assert!(calls.wait().unwrap().success(), "{}", gated.host.log());
    // A connection that asks is answered, once those that ask nothing are given up.
    let reported =
        || gated.host.container("app")["gpus"][0]["memory_used_bytes"] == json!(300 * MIB);
    assert!(eventually(reported), "{:?}", gated.host.ps());
    // An exec that can't be announced has no GPU; none is without the quota.
    let during = gated.exec(&bundle, &["fill"]);
    let got = if during.status.success() { got_bytes(&during) } else { 0 };
    assert!(got <= 700 * MIB, "{during}");
    let resident = resident_bytes(monitor);
    assert!(resident <= before + GROWTH_BYTES, "{before} bytes before, now {resident}");
    drop(held);

    // And as soon as no connection is in the way, the next one has what is left.
    let served = || got_bytes_or_none(&gated, &bundle) == Some(700 * MIB);
    assert!(eventually(served), "{}", gated.host.log());
    assert_eq!(gated.monitor("app_________"), monitor, "it has not ended");
    assert!(holder.try_wait().unwrap().is_none());
    gated.soon_accounts("app", 300);
    gated.host.runtime().delete(&bundle).ok();
    holder.wait().unwrap();
    gated.soon_is_empty();
}

fn got_bytes_or_none(gated: &Gated, bundle: &Bundle) -> Option<u64> {
    let filled = gated.exec(bundle, &["fill"]);
    filled.status.success().then(|| got_bytes(&filled))
}

#[test]
fn what_runtimes_say_is_bounded_for_all_together() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    let monitor = gated.monitor("app_________");
    let before = resident_bytes(monitor);
    let listener = gated.host.state_dir().join("gate/app_________/entry");
    let half = vec![b' '; 8 << 20];
    let mut held = Vec::new();
    for _ in 0..20 {
        let mut stream = UnixStream::connect(&listener).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(5))).unwrap();
        let _ = stream.write_all(&half);
        held.push(stream);
    }
    // They want to say 160 MiB; the monitor takes as much as one runtime with long annotations may say,
    // 4 MiB, and what its allocator has around that.
    let resident = resident_bytes(monitor);
    assert!(resident <= before + (16 << 20), "{before} before, now {resident}");
    drop(held);
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

/// Sends what is no listener where a listener is sent.
#[track_caller]
fn send_wrong(gated: &Gated) {
    let place = gated.host.state_dir().join("gate/app_________");
    let null = fs::File::open("/dev/null").expect("it is there");
    let (end, _other) = UnixStream::pair().expect("sockets can be made");
    for descriptor in [null.as_raw_fd(), end.as_raw_fd()] {
        let stream = UnixStream::connect(place.join("entry")).expect("it listens");
        send_with(&stream, b"{}", descriptor);
    }
}

/// A wrong descriptor in a listener's place keeps no process from the driver.
#[test]
fn wrong_descriptor_as_listener_blocks_no_driver_call() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    send_wrong(&gated);
    gated.fills(&bundle, 1000);
    gated.soon_accounts("app", 0);
    gated.host.runtime().delete(&bundle).ok();
    gated.host.soon_releases_all();
    gated.soon_uses(0);
}

/// A wrong descriptor in a listener's place is nothing that the monitor waits for.
#[test]
fn monitor_does_not_wait_for_wrong_listener_descriptor() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    let monitor = gated.monitor("app_________");
    send_wrong(&gated);
    gated.fills(&bundle, 1000);
    let ticks = || {
        let stat = procfs::process::Process::new(monitor.as_raw()).and_then(|of| of.stat());
        stat.map_or(0, |stat| stat.utime + stat.stime)
    };
    // It has work of its own to do while it searches for what the program left.
    let mut busy = 0;
    let rests = eventually(|| {
        let before = ticks();
        std::thread::sleep(Duration::from_secs(1));
        busy = ticks() - before;
        busy <= 10
    });
    gated.host.runtime().kill(&bundle, "KILL").ok();
    let ended = eventually(|| monitors(&gated.host).is_empty());
    assert!(ended && rests, "it has ended: {ended}, and was busy for {busy} ticks of 100");
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

#[test]
fn oversized_or_endless_query_delays_no_other_query() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    let socket = gated.host.state_dir().join("gate/app_________/control");
    let ask = |question: &[u8]| {
        let mut stream = UnixStream::connect(&socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let _ = stream.write_all(question); // it may have hung up
        let mut answer = vec![0; 100];
        let read = stream.read(&mut answer).unwrap_or(0);
        String::from_utf8_lossy(&answer[..read]).into_owned()
    };
    let _slow = UnixStream::connect(&socket).unwrap();
    // A caller that waits for the slow one does so until its timeout; a busy machine may take as long,
    // though not each time.
    let is_late = |_: &u32| {
        let begun = Instant::now();
        assert!(ask(b"\"status\"\n").starts_with("{\"status\":"));
        begun.elapsed() >= Duration::from_secs(1)
    };
    assert!((0..10).take_while(is_late).count() < 10);
    assert!(ask(&[b'x'; 100_000]).contains("not a question"));
    assert!(ask(b"{\"limit\":{\"uuid\":\"GPU-none\",\"limit_bytes\":1}}\n").contains("no GPU"));
    gated.fills(&bundle, 1000);
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}
