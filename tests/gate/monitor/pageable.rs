//! Memory of the host, which UVM would bring to the GPU by itself (HMM) where no quota sees it.

use serde_json::Value;

use crate::monitor::host::{Monitor, script, until};

/// Files of nvidia-uvm that are initialized, as the driver has them.
fn initialized(monitor: &Monitor) -> Vec<Value> {
    let state = monitor.sim.state();
    let files = state["files"].as_array().unwrap().iter().map(|file| file["uvm"].clone());
    files.filter(|uvm| !uvm.is_null()).collect()
}

/// A UVM file has no HMM, whatever its program asked for.
#[test]
fn uvm_file_has_no_hmm_under_any_flags() {
    let monitor = Monitor::new();
    for flags in ["", "0", "1"] {
        let lines = format!("start\nuvm-init {flags}\nuvm-register");
        let program = monitor.halfway(&lines, &format!("uvm-init {flags}"));
        let files = initialized(&monitor);
        assert_eq!(files.len(), 1, "flags {flags:?}: {files:?}");
        assert_eq!((&files[0]["hmm_disabled"], &files[0]["gpus"]), (&true.into(), &1.into()));
        let said = program.go_on();
        assert_eq!(said.text.matches("uvm-init ok").count(), 2, "{}", said.text);
        // The monitor has its file for a moment yet.
        until("the file is let go", || initialized(&monitor).is_empty());
    }
    assert_eq!(monitor.status().calls.killed, 0);
}

/// A call that binds a file to its caller's memory continues, so another thread can take the flag out
/// after it was put in.
#[test]
fn uvm_file_with_hmm_gets_no_gpu() {
    let monitor = Monitor::new();
    let program = monitor.halfway("start\nuvm-init-racing", "uvm-register\nprint lives");
    // Of races that were lost the monitor may have files yet.
    let files = initialized(&monitor);
    let with_hmm: Vec<_> = files.iter().filter(|uvm| uvm["hmm_disabled"] == false).collect();
    assert_eq!(with_hmm.len(), 1, "{files:?}");
    assert_eq!(with_hmm[0]["gpus"], 0);
    let said = program.go_on();
    said.must("uvm-init-racing ok won=true");
    assert!(!said.text.contains("uvm-register") && !said.text.contains("lives"), "{}", said.text);
    let registered = || monitor.sim.state()["calls"]["uvm:0x25"].as_u64();
    assert_eq!((registered(), monitor.status().calls.killed), (None, 1), "the driver wasn't asked");
    let said = monitor.run(&script("start\nuvm-init\nuvm-register"));
    assert!(said.success, "{}", said.text);
    assert_eq!((registered(), monitor.status().calls.killed), (Some(1), 1));
}
