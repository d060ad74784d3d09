use super::*;
use crate::process::ProcessId;
use cgpu_core::plan::{Kind, Plan, PlannedGpu};

const BOOT: &str = "boot-1";

fn registry() -> (tempfile::TempDir, Registry) {
    let dir = tempfile::tempdir().unwrap();
    let registry = Registry::open(&dir.path().join("state"), BOOT.into()).unwrap();
    (dir, registry)
}

fn record(id: &str, holder: Holder) -> Record {
    let gpu = PlannedGpu {
        index: 0,
        uuid: "GPU-a".into(),
        minor: 0,
        memory_total_bytes: 100,
        memory_reserved_bytes: 0,
        memory_limit_bytes: Some(10),
        mig: None,
    };
    Record {
        key: Key { root: "/run/runc".into(), id: id.into() },
        bundle: "/b".into(),
        short_id: format!("{id:_<12}"),
        boot_id: BOOT.into(),
        holder,
        plan: Plan {
            backend: Kind::None,
            gpus: vec![gpu],
            weight: 1,
            high_priority: false,
            caveats: cgpu_core::plan::Caveats::default(),
        },
    }
}

fn alive() -> Holder {
    Holder::Reserved { by: ProcessId::own().unwrap() }
}

fn dead() -> Holder {
    let own = ProcessId::own().unwrap();
    Holder::Active { init: Some(ProcessId { start_ticks: own.start_ticks + 1, ..own }) }
}

fn ids(records: &[Record]) -> Vec<&str> {
    records.iter().map(|record| record.key.id.as_str()).collect()
}

/// A record is found by key and by bundle until it is removed.
#[test]
fn record_is_found_until_it_is_removed() {
    let (_dir, registry) = registry();
    let record = record("a", alive());
    registry.lock().unwrap().put(&record).unwrap();
    let mut locked = registry.lock().unwrap();
    assert_eq!(locked.find(&record.key).unwrap().as_ref(), Some(&record));
    let by_bundle = locked.find_by_bundle(Path::new("/b"), "a").unwrap();
    assert_eq!(by_bundle.as_ref(), Some(&record));
    assert_eq!(locked.find_by_bundle(Path::new("/c"), "a").unwrap(), None);
    assert!(locked.has_short_id("a___________"));
    assert!(locked.remove(&record.key).unwrap());
    assert!(!locked.remove(&record.key).unwrap(), "a second time there is nothing");
    assert_eq!(locked.holdings().count(), 0);
}

#[test]
fn an_index_and_the_records_say_the_same() {
    let (_dir, registry) = registry();
    for id in ["a", "b", "c"] {
        registry.lock().unwrap().put(&record(id, alive())).unwrap();
    }
    let indexed = registry.lock().unwrap().entries.clone();
    fs::remove_file(registry.index_path()).unwrap();
    assert_eq!(registry.lock().unwrap().entries, indexed);
}

#[test]
fn manually_removed_record_holds_nothing() {
    let (_dir, registry) = registry();
    registry.lock().unwrap().put(&record("a", alive())).unwrap();
    // The directory's time must move on for the index to be seen as outgrown.
    std::thread::sleep(Duration::from_millis(20));
    fs::remove_file(registry.containers().join(record("a", alive()).key.file_name())).unwrap();
    assert_eq!(registry.lock().unwrap().holdings().count(), 0);
}

/// A record that is removed manually while another process has the lock holds nothing.
#[test]
fn record_removed_under_anothers_lock_holds_nothing() {
    let (_dir, registry) = registry();
    registry.lock().unwrap().put(&record("a", alive())).unwrap();
    let mut locked = registry.lock().unwrap();
    fs::remove_file(registry.containers().join(record("a", alive()).key.file_name())).unwrap();
    locked.put(&record("b", alive())).unwrap();
    drop(locked);
    let mut locked = registry.lock().unwrap();
    assert_eq!(locked.holdings().count(), 2, "the index was written after that");
    locked.forget_missing().unwrap();
    drop(locked);
    assert_eq!(registry.lock().unwrap().holdings().count(), 1);
}

fn announced(in_s: i64, by: Option<ProcessId>) -> Holder {
    Holder::Announced { until_boot_s: boot_time_s().saturating_add_signed(in_s), by }
}

/// A record is stale if no process, no time and no bundle retains it.
#[test]
fn record_without_process_time_or_bundle_is_stale() {
    let (dir, registry) = registry();
    let bundle = dir.path().join("bundle");
    fs::create_dir(&bundle).unwrap();
    let with_bundle = |id: &str, bundle: &Path| Record {
        bundle: bundle.into(),
        ..record(id, Holder::Active { init: None })
    };
    let mut locked = registry.lock().unwrap();
    for record in [
        record("alive", alive()),
        record("dead", dead()),
        record("announced", announced(60, None)),
        record("announced-by-one-alive", announced(60, alive().process())),
        record("announced-by-one-dead", announced(60, dead().process())),
        record("expired", announced(-1_000_000, alive().process())),
        with_bundle("with-bundle", &bundle),
        with_bundle("no-bundle", Path::new("/nowhere")),
        Record { boot_id: "boot-0".into(), ..record("old-boot", alive()) },
    ] {
        locked.put(&record).unwrap();
    }
    let close = locked.stale(StaleCheck::Close).unwrap();
    let expected = ["dead", "announced-by-one-dead", "expired", "no-bundle", "old-boot"];
    assert_eq!(ids(&close), expected);
}

#[test]
fn quick_check_finds_every_exited_process() {
    let (_dir, registry) = registry();
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let gone = ProcessId { pid: i32::try_from(child.id()).unwrap(), start_ticks: 1 };
    child.wait().unwrap();
    let mut locked = registry.lock().unwrap();
    for n in 0..40 {
        let holder = if n % 2 == 0 { alive() } else { Holder::Reserved { by: gone } };
        locked.put(&record(&n.to_string(), holder)).unwrap();
    }
    assert_eq!(locked.stale(StaleCheck::Quick).unwrap().len(), 20);
}

/// A bundle whose path is not UTF-8 is refused, and causes no crash.
#[test]
fn non_utf8_bundle_path_is_refused() {
    use std::os::unix::ffi::OsStrExt;
    let (_dir, registry) = registry();
    let odd = Path::new(OsStr::from_bytes(b"/b\xff"));
    let record = Record { bundle: odd.into(), ..record("a", alive()) };
    let mut locked = registry.lock().unwrap();
    let error = locked.put(&record).unwrap_err();
    assert!(std::error::Error::source(&error).unwrap().to_string().contains("invalid UTF-8"));
    assert_eq!(locked.holdings().count(), 0);
}

#[test]
fn records_of_an_earlier_boot_hold_nothing() {
    let (_dir, registry) = registry();
    registry.lock().unwrap().put(&record("a", alive())).unwrap();
    let rebooted = Registry::open(&registry.dir, "boot-2".into()).unwrap();
    assert_eq!(ids(&rebooted.lock().unwrap().stale(StaleCheck::Quick).unwrap()), ["a"]);
}

#[test]
fn a_damaged_record_is_named_and_not_overlooked() {
    let (_dir, registry) = registry();
    fs::write(registry.containers().join("x.json"), "{").unwrap();
    let error = registry.lock().unwrap_err().to_string();
    assert!(error.starts_with("record "), "{error}");
    assert!(error.contains("containers/x.json: EOF"), "{error}");
    assert!(error.ends_with("remove it if its container is gone"), "{error}");
}

/// The state directory is closed to other users, and is not a link.
#[test]
fn state_directory_is_private_and_no_link() {
    let (dir, registry) = registry();
    let state = dir.path().join("state");
    assert_eq!(fs::metadata(&state).unwrap().mode() & 0o7777, 0o700);
    fs::set_permissions(&state, Permissions::from_mode(0o755)).unwrap();
    Registry::open(&state, BOOT.into()).unwrap();
    assert_eq!(fs::metadata(&state).unwrap().mode() & 0o7777, 0o700);
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&registry.dir, &link).unwrap();
    let error = Registry::open(&link, BOOT.into()).unwrap_err().to_string();
    assert!(error.contains("link: it is no directory; set state_dir to a directory"), "{error}");
    assert!(!error.contains("remove"), "{error}");
}

#[test]
fn two_at_a_time_wait_for_each_other() {
    let (_dir, registry) = registry();
    std::thread::scope(|scope| {
        for n in 0..20 {
            let registry = &registry;
            scope.spawn(move || {
                let mut locked = registry.lock().unwrap();
                locked.put(&record(&n.to_string(), alive())).unwrap();
            });
        }
    });
    assert_eq!(registry.lock().unwrap().holdings().count(), 20);
    assert_eq!(registry.records().unwrap().len(), 20);
}

/// A record whose runtime has exited, next to the state that it may have left.
fn launched(dir: &Path, id: &str, state: Option<String>) -> Record {
    let state_file = dir.join(format!("{id}.json"));
    if let Some(state) = state {
        fs::write(&state_file, state).unwrap();
    }
    let own = ProcessId::own().unwrap();
    let by = ProcessId { start_ticks: own.start_ticks + 1, ..own };
    record(id, Holder::Launched { by, state_file })
}

fn runc_state(init: ProcessId) -> String {
    format!(
        r#"{{"id": "a", "init_process_pid": {}, "init_process_start": {}, "config": {{"pid": 1}}}}"#,
        init.pid, init.start_ticks
    )
}

/// A container whose runtime has exited is held by the process in its state.
#[test]
fn launched_container_is_held_by_process_in_state() {
    let (dir, registry) = registry();
    let init = ProcessId::own().unwrap();
    let crun = format!(r#"{{"pid": {}, "process-start-time": {}}}"#, init.pid, init.start_ticks);
    for (id, state) in [("runc", runc_state(init)), ("crun", crun)] {
        let record = launched(dir.path(), id, Some(state));
        let mut locked = registry.lock().unwrap();
        locked.put(&record).unwrap();
        let seen = registry.records().unwrap();
        assert_eq!(seen[0].holder, Holder::Active { init: Some(init) }, "{id}: a reader");
        locked.settle().unwrap();
        fs::remove_file(dir.path().join(format!("{id}.json"))).unwrap();
        assert_eq!(locked.find(&record.key).unwrap(), Some(seen[0].clone()), "{id}: written down");
        for check in [StaleCheck::Quick, StaleCheck::Close] {
            assert_eq!(locked.stale(check).unwrap(), [], "{id}");
        }
        assert!(locked.remove(&record.key).unwrap());
    }
}

/// A container that its runtime never created, or that has exited, is stale.
#[test]
fn uncreated_or_exited_container_is_stale() {
    let (dir, registry) = registry();
    let own = ProcessId::own().unwrap();
    let ended = ProcessId { start_ticks: own.start_ticks + 2, ..own };
    let states = [
        ("missing", None),
        ("torn", Some(runc_state(own)[..20].to_owned())),
        ("other", Some("{}".to_owned())),
        ("ended", Some(runc_state(ended))),
    ];
    let mut locked = registry.lock().unwrap();
    for (id, state) in states {
        locked.put(&launched(dir.path(), id, state)).unwrap();
    }
    locked.settle().unwrap();
    // Where the state can't be read, a container may live by it.
    assert_eq!(ids(&locked.stale(StaleCheck::Close).unwrap()), ["missing", "ended"]);
    let living = registry.living().unwrap();
    assert_eq!(ids(&living), ["other", "torn"]);
}

/// A boot that the kernel does not report ends nothing.
#[test]
fn unknown_boot_id_ends_no_record() {
    let (_dir, registry) = registry();
    registry.lock().unwrap().put(&record("a", alive())).unwrap();
    let blind = Registry::open(&registry.dir, String::new()).unwrap();
    assert_eq!(blind.lock().unwrap().stale(StaleCheck::Close).unwrap(), []);
}

/// A container that its runtime is creating is retained and not active.
#[test]
fn container_in_creation_is_retained_and_inactive() {
    let (dir, registry) = registry();
    let by = ProcessId::own().unwrap();
    let made = record("a", Holder::Launched { by, state_file: dir.path().join("none") });
    let mut locked = registry.lock().unwrap();
    locked.put(&made).unwrap();
    locked.settle().unwrap();
    assert_eq!(locked.stale(StaleCheck::Close).unwrap(), []);
    assert_eq!(registry.records().unwrap(), std::slice::from_ref(&made));
    assert_eq!(made.holder.process(), Some(by));
    drop(locked);
    // By the index, too.
    assert_eq!(registry.lock().unwrap().stale(StaleCheck::Close).unwrap(), []);
}

/// A container has the same time windows on all its GPUs, if they are free.
#[test]
fn container_has_same_time_windows_on_all_gpus() {
    use cgpu_core::plan::GpuRules;
    use cgpu_core::sched::Idle;

    let (_dir, registry) = registry();
    let on = |id: &str, uuids: &[&str]| {
        let mut record = record(id, alive());
        record.plan.backend = Kind::Gate;
        let gpu = record.plan.gpus.remove(0);
        record.plan.gpus =
            uuids.iter().map(|uuid| PlannedGpu { uuid: (*uuid).into(), ..gpu.clone() }).collect();
        record
    };
    let share_out = |uuids: &[&str]| {
        let locked = registry.lock().unwrap();
        for uuid in uuids {
            let rules = GpuRules { policy: 3, max_inst: 4, prio_ratio: 80 };
            locked.share_out(uuid, Idle::Yield, |_| rules).unwrap();
        }
    };
    let turns = |uuid: &str, short_id: &str| {
        let share = share::read(&registry.dir, uuid).unwrap().unwrap();
        share.turns(short_id).map(|(_, spans)| spans.to_vec()).unwrap()
    };
    fs::create_dir_all(share::dir(&registry.dir)).unwrap();
    registry.lock().unwrap().put(&on("first", &["GPU-a"])).unwrap();
    registry.lock().unwrap().put(&on("both", &["GPU-a", "GPU-b"])).unwrap();
    share_out(&["GPU-a", "GPU-b"]);
    let both = turns("GPU-a", "both________");
    assert_ne!(turns("GPU-a", "first_______"), both);
    assert_eq!(turns("GPU-b", "both________"), both);
    // A container that is there keeps what it has.
    registry.lock().unwrap().put(&on("alone", &["GPU-b"])).unwrap();
    registry.lock().unwrap().put(&on("comes", &["GPU-b", "GPU-a"])).unwrap();
    share_out(&["GPU-b", "GPU-a"]);
    assert_eq!(
        [turns("GPU-a", "both________"), turns("GPU-b", "both________")],
        [(); 2].map(|()| both.clone())
    );
    let comes = turns("GPU-b", "comes_______");
    assert_eq!(turns("GPU-a", "comes_______"), comes);
}
