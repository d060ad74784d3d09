//! `cgpu set`: a running container under the vendor's module gets more, less, or is
//! refused, and the registry and the module's tree say the same.

#![allow(clippy::unwrap_used, reason = "a test that can't go on may panic")]

use crate::host::{Host, TOTAL_MIB};
use crate::km_standin::{Fault, StandIn};

/// Two containers of half the GPU and a quarter, under the module.
fn two_containers() -> (StandIn, Host) {
    let standin = StandIn::mount(&[0]);
    let mut host = Host::new();
    host.use_km(standin.path());
    for (id, mib) in [("first", TOTAL_MIB / 2), ("second", TOTAL_MIB / 4)] {
        host.runtime().create(&host.asking(id, mib)).ok();
    }
    (standin, host)
}

fn memsize(standin: &StandIn, id: &str) -> String {
    let path = standin.path().join(format!("0/{id:_<12}/memsize"));
    std::fs::read_to_string(path).unwrap().trim().to_owned()
}

/// Memory, weight and priority change in the module and in the registry.
#[test]
fn set_changes_both_the_module_and_the_registry() {
    let (standin, host) = two_containers();
    let mib = TOTAL_MIB / 2;
    let said = host.cgpu(&["set", "sec", "--memory", &mib.to_string()]).ok();
    assert_eq!(said.text(), format!("sec: GPU 0 {mib} MiB, weight 1, priority normal"));
    assert_eq!(memsize(&standin, "second"), (mib << 20).to_string());
    assert_eq!(host.limits_mib("second"), [mib]);
    let words = ["set", "second", "--weight", "3", "--high-priority", "true"];
    assert!(host.cgpu(&words).ok().text().ends_with("weight 3, priority high"));
    let read = |name: &str| {
        let path = standin.path().join("0/second______").join(name);
        std::fs::read_to_string(path).unwrap().trim().to_owned()
    };
    assert_eq!((read("weight"), read("highprio")), ("3".to_owned(), "1".to_owned()));
    // The weight counts from now on: 1 + 3 of 20.
    let refused = host.cgpu(&["set", "first", "--weight", "18"]).exits(1);
    assert!(refused.stderr.contains("has weight 17 of 20 left, this container asks for 18"));
    host.check_registry();
}

/// A GPU of the module is set in the module and read from there.
#[test]
fn module_gpu_settings_are_written_and_read_there() {
    let (standin, host) = two_containers();
    let said = host.cgpu(&["set", "gpu", "0", "policy=3", "prio_ratio=30"]).ok();
    assert_eq!(said.text(), "GPU 0: policy=3 max_inst=20 prio_ratio=30");
    let read = |name: &str| {
        std::fs::read_to_string(standin.path().join("0").join(name)).unwrap().trim().to_owned()
    };
    assert_eq!((read("policy"), read("prio_ratio")), ("3".to_owned(), "30".to_owned()));
    // A value that is written there, as scripts of the original do, is believed.
    std::fs::write(standin.path().join("0/policy"), "4").unwrap();
    assert_eq!(host.cgpu(&["get", "gpu", "0", "policy"]).ok().stdout, "4\n");
    let refused = host.cgpu(&["set", "gpu", "0", "max_inst=1"]).exits(1);
    assert!(refused.stderr.contains("GPU 0 has 2 containers with a quota"), "{refused}");
    // The module says that it took it, and didn't.
    standin.fail(Fault::IgnoresWrite { gpu: 0, name: "policy" });
    let refused = host.cgpu(&["set", "gpu", "0", "policy=2"]).exits(1);
    assert!(refused.stderr.contains("policy of GPU 0"), "{refused}");
    assert_eq!(host.cgpu(&["get", "gpu", "0", "policy"]).ok().stdout, "4\n");
}

/// More memory than is left is refused, and changes nothing.
#[test]
fn quota_above_what_is_left_changes_nothing() {
    let (standin, host) = two_containers();
    let refused = host.cgpu(&["set", "second", "--memory", "8001"]).exits(1);
    assert_eq!(
        refused.stderr,
        "cgpu: GPU 0 (GPU-a) has 8000 MiB of 16000 MiB left, this container asks for 8001 MiB; \
         held by first: 8000 MiB; ask for less, or stop one of them\n"
    );
    assert_eq!(memsize(&standin, "second"), (4000u64 << 20).to_string());
    assert_eq!(host.limits_mib("second"), [4000]);
    // What it gives back, another can have.
    host.cgpu(&["set", "first", "--memory", "1000"]).ok();
    host.cgpu(&["set", "second", "--memory", "15000"]).ok();
    assert_eq!(host.promised_mib(), TOTAL_MIB);
}

#[test]
fn failed_module_change_leaves_the_reservation_unchanged() {
    let (standin, host) = two_containers();
    standin.fail(Fault::IgnoresWrite { gpu: 0, name: "memsize" });
    let refused = host.cgpu(&["set", "second", "--memory", "5000"]).exits(1);
    assert!(refused.stderr.contains("memsize of GPU 0"), "{refused}");
    assert_eq!(host.limits_mib("second"), [4000]);
    host.check_registry();
}

#[test]
fn what_cannot_be_meant_is_refused_by_name() {
    let (_standin, host) = two_containers();
    for (words, sentence) in [
        (&["set", "third", "--weight", "2"][..], "no registered container is \"third\""),
        (&["set", "", "--weight", "2"], "no registered container is \"\""),
        (&["set", "first"], "nothing to change; write `cgpu set container first memory=4GiB`"),
        (&["set", "first", "--memory", "0"], "a quota of 0 MiB is not possible"),
        (&["set", "first", "--memory", "17592186044416"], "MiB is not possible"),
        (&["set", "first", "--gpu", "3", "--memory", "1"], "has no GPU 3; it has 0"),
        (&["set", "first", "--weight", "21"], "a weight of 21 is not possible; it is 1 to 20"),
    ] {
        let refused = host.cgpu(words).exits(1);
        assert!(refused.stderr.starts_with("cgpu: "), "{refused}");
        assert!(refused.stderr.contains(sentence), "{words:?}: {refused}");
    }
    host.runtime().create(&host.asking("fir-tree", 1)).ok();
    let refused = host.cgpu(&["set", "fir", "--weight", "2"]).exits(1);
    assert!(refused.stderr.contains("2 registered containers are \"fir\"; give more of the id"));
}

#[test]
fn without_isolation_there_is_nothing_to_change() {
    let host = Host::new();
    host.runtime().create(&host.asking("plain", 4000)).ok();
    let refused = host.cgpu(&["set", "plain", "--memory", "5000"]).exits(1);
    assert!(refused.stderr.contains("backend none enforces nothing"), "{refused}");
    assert_eq!(host.limits_mib("plain"), [4000]);
}
