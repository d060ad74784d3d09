use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::monitor::host::{Monitor, ProgramOutput, QUOTA, path, until, wait};

/// How long the driver may have more than the quota. The promise is a second, which a busy machine
/// can make longer; `make bench` measures.
const MOST_MS_OVER: u64 = 10_000;

/// Runs an attack, and watches that the driver never has more than the quota, but for a short time.
fn attack(name: &str) -> (ProgramOutput, Monitor) {
    let (said, monitor, _) = watched(name, Monitor::new());
    (said, monitor)
}

/// The same, on a driver as it's given. The most that it ever had given, too, as far as was seen.
pub(crate) fn watched(name: &str, monitor: Monitor) -> (ProgramOutput, Monitor, u64) {
    let most = AtomicU64::new(0);
    let over = AtomicU64::new(0);
    let done = AtomicBool::new(false);
    // Also where an attack fails: who watches would go on for ever, and the test with it.
    struct Done<'a>(&'a AtomicBool);
    impl Drop for Done<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let said = std::thread::scope(|scope| {
        let _done = Done(&done);
        scope.spawn(|| {
            let mut since: Option<Instant> = None;
            while !done.load(Ordering::Relaxed) {
                let used = monitor.sim.used(0);
                most.fetch_max(used, Ordering::Relaxed);
                if used > QUOTA {
                    let since = since.get_or_insert_with(Instant::now);
                    over.fetch_max(
                        since.elapsed().as_millis().try_into().unwrap(),
                        Ordering::Relaxed,
                    );
                } else {
                    since = None;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let words: Vec<&str> = name.split(' ').collect();
        let at = words.iter().take_while(|word| word.starts_with("--")).count();
        let words = [&words[..at], &["attack"], &words[at..]].concat();
        ProgramOutput::of(&wait(monitor.spawn(&words)))
    });
    let over = over.load(Ordering::Relaxed);
    assert!(over < MOST_MS_OVER, "{name}: over the quota for {over} ms: {}", said.text);
    assert!(monitor.is_alive());
    // It got to its point, and is ended for nothing else.
    let is_killed = monitor.status().calls.killed > 0;
    let is_reached = said
        .text
        .split_whitespace()
        .any(|word| word.starts_with("reached=") && word != "reached=0");
    assert!(is_killed || said.success && is_reached, "{name}: {}", said.text);
    println!("{name}: {} over {over} ms, {:?}", said.text.trim(), monitor.status().calls);
    monitor.wait_for(0);
    until(&said.text, || monitor.sim.used(0) == 0);
    (said, monitor, most.into_inner())
}

macro_rules! attacks {
    ($($test:ident = $name:literal;)*) => {
        $(#[test]
        fn $test() {
            attack($name);
        })*
    };
}

attacks! {
    a_size_changed_between_check_and_use = "race-size";
    a_class_changed_between_check_and_use = "race-class";
    a_pointer_changed_between_check_and_use = "race-pointer";
    a_descriptor_replaced_under_an_ioctl = "dup2-ioctl";
    a_descriptor_replaced_under_an_mmap = "dup2-mmap";
    a_file_replaced_under_an_mmap_of_a_pool = "dup2-range";
    the_same_by_one_who_shares_the_memory_and_is_gone = "dup2-inherited";
    the_same_where_the_first_thread_has_ended = "--headless dup2-range";
    memory_in_the_place_of_a_client = "class-in-client";
    an_export_in_the_place_of_a_control = "swap-control";
    memory_freed_by_its_parent_at_once = "parent-free";
    managed_memory = "managed";
    managed_memory_without_a_fixed_address = "managed-nofixed";
    sixteen_processes_at_a_barrier = "barrier16";
    ten_thousand_clients = "clients";
    handles_used_again = "handle-reuse";
    sizes_that_overflow = "hostile-sizes 1024MiB";
    pointers_to_nowhere = "bad-pointers";
    parameters_that_lie = "control-params";
    an_allocation_that_is_interrupted = "interrupt";
    a_storm_of_signals = "signal-storm";
    a_caller_that_stops_itself = "sigstop-self";
    a_caller_that_is_killed = "kill-during-alloc";
    a_sibling_that_is_traced = "ptrace-sibling";
    calls_in_a_wrapper = "xfer";
    wrappers_in_a_wrapper = "xfer-nested";
    a_type_that_is_not_the_drivers = "type-byte";
    the_entry_for_32_bits = "int80";
    garbage_in_the_upper_half = "upper-garbage";
    io_uring = "io-uring";
    a_duplicate_that_outlives_the_original = "dup-free";
    a_mapping_that_outlives_the_original = "map-free";
    duplicates_of_what_was_taken = "hide-dup";
    a_mapping_of_what_was_taken = "hide-map";
    memory_beside_names_of_others = "hide-slack";
    memory_beside_names_and_a_mapping = "hide-slack mapped";
    memory_beside_a_name_and_an_export = "hide-slack export";
    memory_beside_names_that_are_never_made = "hide-slack busy";
    memory_beside_names_that_are_gone = "hide-slack closed";
    memory_beside_names_that_go_at_once = "hide-slack closing";
    memory_under_recreated_handles = "hide-slack anew";
    memory_behind_an_object_of_the_fabrics = "hide-fabric";
    much_exported_under_the_name_of_little = "hide-under export";
    much_mapped_under_the_name_of_little = "hide-under map";
    clients_of_the_dead = "hide-inherited";
    memory_behind_the_dead = "hide-behind";
    a_vfork_and_an_exec = "vfork-exec";
    everything_closed_at_once = "close-range";
}

/// Whatever has the handle when the driver reads it.
#[test]
fn little_memory_that_becomes_much_under_its_name() {
    for slow in ["alloc:0x40 late 1", "free late 1", "dup delay 1"] {
        let monitor = Monitor::new();
        monitor.sim.fault(slow);
        let (said, _, most) = watched("name-race", monitor);
        assert!(most <= QUOTA, "{slow}: {} MiB: {}", most >> 20, said.text);
        assert!(!said.text.contains("exports=0\n"), "{slow}: {}", said.text);
    }
}

/// The process that asked for it lives, and the one that did it has exited.
#[test]
fn a_file_that_another_initialized_has_no_gpu() {
    let said = attack("dup2-maker").0;
    said.must("registered=0\n");
    assert!(!said.text.contains("won=0 "), "{}", said.text);
}

/// No process can map a mapping again: remap_file_pages fails with ENOSYS.
#[test]
fn remapping_of_a_mapping_is_refused() {
    attack("remap").0.must("remap errno=38\n");
}

/// Its monitor ends, and the next has its state, when the memory is next to what retains it.
fn beside_what_a_monitor_before_had(words: &[&str], end: impl Fn(&Monitor)) {
    let monitor = Monitor::new();
    let dir = tempfile::tempdir().unwrap();
    let [ready, go] = ["ready", "go"].map(|name| path(&dir, name));
    let words = [&["--held", "attack"], words, &[&ready, &go]].concat();
    let mut child = monitor.spawn(&words);
    until("it is ready", || Path::new(&ready).exists());
    end(&monitor);
    std::fs::write(&go, "").unwrap();
    let mut since: Option<Instant> = None;
    while child.try_wait().unwrap().is_none() {
        let exceeds = monitor.sim.used(0) > QUOTA;
        since = exceeds.then(|| since.unwrap_or_else(Instant::now));
        let over = since.map_or(Duration::ZERO, |since| since.elapsed());
        assert!(over < Duration::from_millis(MOST_MS_OVER), "{words:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
    let said = ProgramOutput::of(&wait(child));
    assert_eq!(monitor.status().calls.killed, 1, "{words:?}: {}", said.text);
    monitor.sim.fault("clear");
    monitor.wait_for(0);
    until("the driver has it all", || monitor.sim.used(0) == 0);
}

const BESIDE: &[&[&str]] = &[
    &["hide-slack", "export"],
    &["hide-slack", "mapped"],
    &["hide-slack", "remapped"],
    &["hide-slack", "closing"],
    &["hide-slack", "anew"],
];

/// Memory hidden next to what the monitor had before an update is found after the update, and its
/// holder killed.
#[test]
fn hidden_memory_is_found_after_an_update() {
    for words in BESIDE {
        beside_what_a_monitor_before_had(words, Monitor::update);
    }
}

/// So it is handed on and on, also where one has done nothing else.
#[test]
fn memory_beside_what_a_monitor_had_long_before() {
    beside_what_a_monitor_before_had(&["hide-slack", "anew"], |monitor| {
        (0..5).for_each(|_| monitor.update());
    });
}
