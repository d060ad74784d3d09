//! `cgpu-node-setup` as a container of the DaemonSet runs it: in a mount namespace of its own, next to the node's
//! first process. Needs root.

#![allow(clippy::unwrap_used, reason = "a test that can't go on may panic")]

use std::process::Command;

/// What `cgpu-node-setup WORDS` prints on a node of its own, and says, in a container with another network.
fn on_a_node(words: &[&str]) -> (String, String) {
    let mut command = Command::new("unshare");
    // The shell is the first process of that node, and waits.
    command.args(["--pid", "--fork", "--mount", "--mount-proc"]);
    command.args(["sh", "-c", "unshare --mount --net \"$@\"; exit", "sh"]);
    command.arg(env!("CARGO_BIN_EXE_cgpu-node-setup")).args(words);
    let output = command.env_remove("KUBERNETES_SERVICE_HOST").output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

/// What `enter OPTIONS` runs sees of its capabilities, and what is said instead.
fn enters(options: &[&str]) -> (String, String) {
    on_a_node(&[&["enter"], options, &["--", "sh", "-c", "grep ^Cap /proc/self/status"]].concat())
}

/// A program of the node's runs in the node's network if --network says so, and only then.
#[test]
fn node_program_joins_its_network_if_requested() {
    let node = std::fs::read_link("/proc/self/ns/net").unwrap();
    let network = |options: &[&str]| {
        on_a_node(&[&["enter"], options, &["--", "readlink", "/proc/self/ns/net"]].concat()).0
    };
    assert_eq!(network(&["--network"]).trim(), node.to_str().unwrap());
    let own = network(&[]);
    assert!(own.starts_with("net:") && own.trim() != node.to_str().unwrap(), "{own}");
}

#[test]
fn unanswering_engine_is_reported_as_not_ready() {
    let (printed, reported) = on_a_node(&["ready", "--engine-socket", "/nowhere/containerd.sock"]);
    assert_eq!(printed, "");
    let words = "the engine does not report its state at /proc/1/root/nowhere/containerd.sock";
    assert!(reported.contains(words), "{reported}");
}

/// A set of a status file.
fn set(status: &str, name: &str) -> u64 {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .unwrap_or_else(|| panic!("{status}"));
    u64::from_str_radix(line.trim_start_matches(':').trim(), 16).unwrap()
}

#[test]
fn node_program_retains_only_the_named_capabilities() {
    let (all, reported) = enters(&[]);
    assert_ne!(set(&all, "CapEff") & 1 << 21, 0, "CAP_SYS_ADMIN without the option: {reported}");
    // CAP_SYS_PTRACE is 19, CAP_SYSLOG 34.
    for (names, retained) in [("SYS_PTRACE,CAP_SYSLOG", 1_u64 << 19 | 1 << 34), ("SYSLOG", 1 << 34)]
    {
        let (status, reported) = enters(&["--keep", names]);
        for name in ["CapEff", "CapPrm", "CapBnd"] {
            assert_eq!(set(&status, name), retained, "{names}: {name}: {status}{reported}");
        }
        assert_eq!((set(&status, "CapInh"), set(&status, "CapAmb")), (0, 0), "{status}");
    }
    let (status, reported) = enters(&["--keep", "SYS_EVERYTHING"]);
    assert_eq!(status, "");
    assert!(reported.contains("SYS_EVERYTHING is no capability"), "{reported}");
}
