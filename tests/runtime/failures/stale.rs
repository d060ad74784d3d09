//! Containers that end without any report: power, `kill -9`, a lost hook.

use std::fs;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use crate::host::{Host, TOTAL_MIB, ask, state};
use crate::km_standin::StandIn;
use crate::support::{run_with_timeout, timeout, wait_until};

/// Ends the container that `cgpu ps` shows, and all that the runtime knew of it.
fn end_without_a_word(host: &Host) {
    let pid = i32::try_from(host.ps()[0]["pid"].as_i64().unwrap()).unwrap();
    kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    assert!(wait_until(timeout(), || host.registered().is_empty()), "{pid} does not end");
    fs::remove_dir_all(host.runtime().root()).unwrap();
}

/// A container that ended without a hook gives its memory to the next.
#[test]
fn container_ended_without_hook_frees_its_memory() {
    let standin = StandIn::mount(&[0]);
    let mut host = Host::new();
    host.use_km(standin.path());
    for round in 0..3 {
        host.runtime().create(&host.asking(&format!("lost-{round}"), TOTAL_MIB)).ok();
        end_without_a_word(&host);
        assert_eq!(standin.instances(0).len(), 1, "it is not collected yet");
    }
    host.whole_gpu_can_be_had("next");
    assert_eq!(standin.instances(0), [""; 0]);
}

#[test]
fn gc_reports_each_collected_container_once() {
    let host = Host::new();
    host.runtime().create(&host.asking("lost", TOTAL_MIB)).ok();
    assert_eq!(host.gc(), "", "it lives");
    end_without_a_word(&host);
    assert_eq!(host.gc(), format!("lost of {}\n", host.runtime().root().display()));
    assert_eq!(host.gc(), "");
    assert_eq!(host.records(), [].into());
}

/// A program whose first thread ends, so that the process looks like a zombie, and whose
/// second one lives.
const LEADERLESS: &str = r#"
#include <pthread.h>
#include <unistd.h>
static void *rest(void *none) { for (;;) pause(); return none; }
int main(void) {
    pthread_t thread;
    pthread_create(&thread, 0, rest, 0);
    pthread_exit(0);
}
"#;

#[test]
fn container_whose_first_thread_exited_retains_its_reservation() {
    let standin = StandIn::mount(&[0]);
    let mut host = Host::new();
    host.use_km(standin.path());
    let bundle = host.bundle("leaderless", |config| {
        ask(config, TOTAL_MIB);
        config["process"]["args"] = json!(["/leaderless"]);
    });
    let source = host.scratch.file("leaderless.c", LEADERLESS);
    let mut compile = host.scratch.command("cc");
    compile.args(["-static", "-pthread", "-o"]);
    compile.arg(host.scratch.path().join("template/rootfs/leaderless")).arg(source);
    run_with_timeout(&mut compile, timeout()).ok();
    let runtime = host.runtime();
    runtime.create(&bundle).ok();
    let pid = host.ps()[0]["pid"].as_i64().unwrap();
    runtime.start(&bundle).ok();
    let leader_ended = || fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") Z ");
    assert!(wait_until(timeout(), leader_ended));
    assert_eq!(host.gc(), "");
    assert_eq!(host.registered(), ["leaderless".to_owned()].into());
    let refused = runtime.create(&host.asking("next", 1)).exits(1);
    assert!(refused.stderr.contains("held by leaderless: 16000 MiB"), "{refused}");
    assert_eq!(standin.instances(0), ["leaderless__"], "isolation stays on");
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), Signal::SIGKILL).unwrap();
    assert!(wait_until(timeout(), || host.registered().is_empty()));
}

/// A container that is active by a process that lives, and by what `edit` makes of its
/// record then, must be stale: its memory goes to the next one.
fn is_stale_after(edit: impl FnOnce(&mut serde_json::Value)) {
    let host = Host::new();
    let bundle = host.asking("old", TOTAL_MIB);
    let init = host.sleeper();
    host.hook(&["createRuntime"], state("old", init.pid(), &bundle.directory)).ok();
    let next = host.asking("next", 1);
    let refused = host.runtime().create(&next).exits(1);
    assert!(refused.stderr.contains("held by old: 16000 MiB"), "{refused}");
    host.edit_record("old", edit);
    assert_eq!(host.registered(), [].into());
    host.runtime().create(&next).ok();
    assert_eq!(host.registered(), ["next".to_owned()].into());
    assert_eq!(host.records().len(), 1);
}

#[test]
fn a_pid_that_was_used_again_keeps_nothing() {
    is_stale_after(|record| record["holder"]["init"]["start_ticks"] = json!(1));
}

#[test]
fn nothing_outlives_a_boot() {
    is_stale_after(|record| record["boot_id"] = json!("5d1f0a5e-0000-4000-8000-000000000001"));
}

#[test]
fn a_reservation_whose_runtime_died_keeps_nothing() {
    let host = Host::new();
    let gone = host.sleeper().pid();
    let bundle = host.asking("old", TOTAL_MIB);
    let init = host.sleeper();
    host.hook(&["createRuntime"], state("old", init.pid(), &bundle.directory)).ok();
    host.edit_record("old", |record| {
        record["holder"] = json!({"state": "reserved", "by": {"pid": gone, "start_ticks": 1}});
    });
    host.whole_gpu_can_be_had("next");
}

/// Every command names a damaged record, and it stops no container without a request.
#[test]
fn damaged_record_is_named_and_stops_only_requests() {
    let host = Host::new();
    let bundle = host.asking("whole", 1);
    let runtime = host.runtime();
    runtime.create(&bundle).ok();
    // The directory's time must move on for the index to be seen as outgrown.
    std::thread::sleep(std::time::Duration::from_millis(20));
    let damaged = host.state_dir().join("containers/damaged.json");
    fs::write(&damaged, "{\"id\": \"dama").unwrap();
    let sentence = format!("record {}: EOF while parsing a string", damaged.display());
    let other = host.asking("other", 1);
    let created = runtime.create(&other);
    host.was_reported(created, &other, &[&sentence, "; remove it if its container is gone"]);
    for words in [&["ps"][..], &["gc"], &["inspect", "--bundle", "other"]] {
        let refused = host.cgpu(words).exits(1);
        assert!(refused.stderr.starts_with(&format!("cgpu: {sentence}")), "{refused}");
        assert_eq!(refused.stderr.lines().count(), 1);
    }
    runtime.create(&host.bundle("plain", |_| {})).ok();
    // It ends as ever, and is collected when the record has been seen to.
    runtime.delete(&bundle).ok();
    fs::remove_file(damaged).unwrap();
    assert_eq!(host.registered(), [].into());
    host.whole_gpu_can_be_had("after");
}

#[test]
fn id_in_use_is_refused_and_retains_reservation() {
    let host = Host::new();
    let bundle = host.asking("twice", 4000);
    let runtime = host.runtime();
    runtime.create(&bundle).ok();
    let pid = host.ps()[0]["pid"].clone();
    let again = runtime.create(&bundle).exits(1);
    let sentence = format!("is registered already and has process {pid}; use another id, or");
    assert!(again.stderr.contains(&sentence), "{again}");
    assert_eq!(host.promised_mib(), 4000);
    assert_eq!(host.ps()[0]["pid"], pid);
}

/// A `delete` that is slow to call its hooks: by then the id is free, and in use again.
#[test]
fn late_poststop_hook_spares_next_container_of_id() {
    let standin = StandIn::mount(&[0]);
    let mut host = Host::new();
    host.use_km(standin.path());
    let bundle = host.bundle("again", |config| {
        ask(config, 4000);
        let wait = json!([{"path": "/bin/sleep", "args": ["sleep", "2"]}]);
        config["hooks"]["poststop"] = wait;
    });
    let runtime = host.runtime();
    runtime.create(&bundle).ok();
    let slow = std::thread::scope(|scope| {
        let deleting = scope.spawn(|| runtime.delete(&bundle));
        let gone = || !runtime.root().join("again").exists();
        assert!(wait_until(timeout(), gone));
        runtime.create(&bundle).ok();
        deleting.join().unwrap()
    });
    slow.ok();
    assert_eq!(host.registered(), ["again".to_owned()].into());
    assert_eq!(standin.instances(0), ["again_______"]);
    runtime.delete(&bundle).ok();
    assert_eq!((standin.instances(0).len(), host.records().len()), (0, 0));
}

/// No state can be there: the name is longer than a file's may be.
#[test]
fn container_with_invalid_id_retains_no_reservation() {
    let host = Host::new();
    let bundle = host.asking("long", TOTAL_MIB);
    let bundle = crate::support::Bundle { id: "x".repeat(300), ..bundle };
    host.runtime().create(&bundle).fails();
    host.whole_gpu_can_be_had("after");
    assert_eq!(host.records(), [].into());
}
