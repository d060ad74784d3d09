use cgpu_monitor::gate::wire::{Answer, Question};
use nvrm::class::Use;
use nvrm::number::NV01_CONTEXT_DMA;

use crate::monitor::host::{
    MIB, Monitor, ProgramOutput, QUOTA, TOTAL, path, program, script, until, wait,
};

/// A program sees the quota as the memory of its GPU, and gets no more.
#[test]
fn program_sees_quota_as_gpu_memory_and_limit() {
    let monitor = Monitor::new();
    let said = monitor.run(&["demo", "2048MiB"]);
    said.must("1024 MiB total, 1024 MiB free");
    said.must("allocated 1024 MiB of 2048 MiB asked for");
    monitor.wait_for(0);
    assert_eq!(monitor.sim.used(0), 0);
}

/// A program that fills its GPU gets the quota to the page, and then the status for no memory.
#[test]
fn program_fills_exact_quota_then_gets_no_memory() {
    let monitor = Monitor::new();
    let said = monitor.run(&["fill"]);
    assert_eq!(said.number("got_bytes"), QUOTA, "{}", said.text);
    said.must("status=0x51");
    assert!(monitor.status().calls.over_quota > 0);
}

/// Libraries of CUDA's forward compatibility are of a later branch than the driver, and state the
/// size that parameters have there, which the driver doesn't check.
#[test]
fn program_built_for_another_driver_gets_the_quota() {
    let monitor = Monitor::new();
    let said = monitor.run(&["--driver", "550.54.14", "fill"]);
    assert_eq!(said.number("got_bytes"), QUOTA, "{}", said.text);
}

/// What shows memory has grown with three branches, and may have with one that isn't known.
#[test]
fn driver_newer_than_known_shows_the_quota() {
    let monitor = Monitor::of_driver("900.10.01");
    let said = monitor.run(&["demo", "2048MiB"]);
    said.must("1024 MiB total, 1024 MiB free");
    said.must("allocated 1024 MiB of 2048 MiB asked for");
    monitor.wait_for(0);
}

#[test]
fn memory_freed_in_any_way_is_available_again() {
    let monitor = Monitor::new();
    let script = "start\nalloc 1000MiB as a\nalloc 100MiB as b\nfree a\nheap 1000MiB as c\n\
                  free-device\ndevice 0\nsubdevice\nalloc 1024MiB as d\nfree-client\nclose\n\
                  start\nalloc 1024MiB as e\ninfo";
    let lines: Vec<&str> = std::iter::once("run").chain(script.lines()).collect();
    let said = monitor.run(&lines);
    assert_eq!(said.text.matches("status=0x51").count(), 1, "{}", said.text);
    said.must("e ok");
    monitor.wait_for(0);
}

/// A process that has the host's mounts is left alone until it has others.
#[test]
fn process_in_host_mount_namespace_is_left_alone() {
    let monitor = Monitor::of_hooks();
    let said = monitor.run(&["fill"]);
    assert_eq!(said.number("got_bytes"), TOTAL, "{}", said.text);
    assert_eq!(monitor.used(), 0);
    // As a runtime becomes the container.
    let mut command = std::process::Command::new("unshare");
    command.args(["--mount", "--"]).arg(program("rmtool"));
    command.args(["--dev"]).arg(monitor.sim.dev()).arg("fill");
    let said = wait(monitor.spawn_as(&mut command));
    let text = String::from_utf8_lossy(&said.stdout);
    assert!(text.contains(&format!("got_bytes={QUOTA} ")), "{said:?}");
    monitor.wait_for(0);
}

#[test]
fn two_processes_share_the_quota() {
    let monitor = Monitor::new();
    let holder = monitor.spawn(&["hold", "700MiB"]);
    monitor.wait_for(700 * MIB);
    let said = monitor.run(&["fill"]);
    assert_eq!(said.number("got_bytes"), 324 * MIB);
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(holder.id().try_into().unwrap()),
        nix::sys::signal::Signal::SIGKILL,
    )
    .unwrap();
    wait(holder);
    assert_eq!(monitor.run(&["fill"]).number("got_bytes"), QUOTA);
}

#[test]
fn a_storm_of_processes_gets_exactly_the_quota() {
    let monitor = Monitor::new();
    let said = monitor.run(&["storm", "16"]);
    assert_eq!(said.number("got_bytes"), QUOTA, "{}", said.text);
    monitor.wait_for(0);
}

/// Admission is one decision, whichever threads ask for it and whichever of the monitor's answer.
#[test]
fn sixteen_concurrent_threads_get_only_what_is_left() {
    let monitor = Monitor::new();
    let page = 64 << 10;
    for (size, fitting) in [(page, 1), (MIB, 5), (MIB, 16)] {
        let rounds = format!("at-once 16 {size}\n").repeat(60);
        let taken = QUOTA - fitting * size;
        let said = monitor.run(&script(&format!("start\nalloc {taken} as a\n{rounds}")));
        let exact = format!("at-once ok given={fitting} refused={}\n", 16 - fitting);
        assert_eq!(said.text.matches(&exact).count(), 60, "{}", said.text);
        monitor.wait_for(0);
    }
    let peak = monitor.sim.state()["gpus"][0]["peak_bytes"].clone();
    assert_eq!((peak, monitor.status().calls.killed), (QUOTA.into(), 0));
}

#[test]
fn used_quota_can_change_but_not_below_usage() {
    let monitor = Monitor::new();
    let uuid = monitor.sim.uuid(0);
    let limit = |bytes: u64| Question::Limit { uuid: uuid.clone(), limit_bytes: bytes };
    let mut holder = monitor.spawn(&["hold", "700MiB"]);
    monitor.wait_for(700 * MIB);
    let refused = monitor.ask(&limit(600 * MIB));
    assert!(matches!(&refused, Answer::InUse { reason } if reason.contains("in use")));
    assert_eq!(monitor.ask(&limit(800 * MIB)), Answer::Done);
    assert_eq!(monitor.run(&["fill"]).number("got_bytes"), 100 * MIB);
    assert!(matches!(
        monitor.ask(&Question::Limit { uuid: "GPU-0".into(), limit_bytes: 1 }),
        Answer::Refused { .. }
    ));
    holder.kill().unwrap();
    wait(holder);
}

/// No driver usage has it, and none would show what is taken next to it.
#[test]
fn memory_that_no_figure_shows_is_refused() {
    let monitor = Monitor::new();
    let said = monitor.run(&["run", "start", "extended 8MiB as a", "alloc 8MiB as b"]);
    said.must("a status=0x56");
    assert_eq!((monitor.status().calls.refused, monitor.sim.used(0)), (1, 0), "{}", said.text);
}

#[test]
fn a_missed_free_never_refuses_for_long() {
    let monitor = Monitor::new();
    let script = "start\nalloc 1024MiB as a\nclose\nstart\nalloc 1024MiB as b";
    let lines: Vec<&str> = std::iter::once("run").chain(script.lines()).collect();
    let said = monitor.run(&lines);
    assert!(said.success, "{}", said.text);
}

/// Though the driver was asked a moment ago, for another call that was refused.
#[test]
fn missed_free_after_a_refusal_refuses_nothing() {
    let monitor = Monitor::new();
    let dir = tempfile::tempdir().unwrap();
    for round in 0..10 {
        let (gone, go) = (dir.path().join(format!("gone{round}")), dir.path().join("go"));
        let load = format!(
            "start\nalloc 1000MiB as a\nalloc 1000MiB as b\nclose\ntouch {}\nwait {}\nstart\n\
             alloc 1000MiB as c",
            gone.display(),
            go.display()
        );
        let lines: Vec<&str> = std::iter::once("run").chain(load.lines()).collect();
        let child = monitor.spawn(&lines);
        while !gone.exists() || monitor.sim.used(0) != 0 {
            std::thread::yield_now();
        }
        std::fs::write(&go, "").unwrap();
        let said = ProgramOutput::of(&wait(child));
        said.must("b status=0x51");
        said.must("c ok");
        std::fs::remove_file(go).unwrap();
    }
}

#[test]
fn managed_memory_is_refused() {
    let monitor = Monitor::new();
    let said = monitor.run(&["run", "start", "uvm-init", "managed 64MiB"]);
    assert!(!said.success, "{}", said.text);
    assert_eq!(monitor.sim.state()["gpus"][0]["managed_bytes"], 0);
}

/// Memory that is mapped stays charged if its handle is freed.
#[test]
fn mapped_memory_stays_charged_without_its_handle() {
    let monitor = Monitor::new();
    let script = "start\nuvm-init\nalloc 1000MiB as a\nuvm-map a\nfree a\nalloc 100MiB as b\n\
                  uvm-unmap a\nalloc 1000MiB as c";
    let lines: Vec<&str> = std::iter::once("run").chain(script.lines()).collect();
    let said = monitor.run(&lines);
    assert_eq!(said.text.matches("status=0x51").count(), 1, "{}", said.text);
    said.must("c ok");
}

/// Runs a script, in which `refused` allocations find no memory, and nothing else fails.
#[track_caller]
fn scripted(monitor: &Monitor, script: &str, refused: usize) {
    let lines: Vec<&str> = std::iter::once("run").chain(script.lines()).collect();
    let said = monitor.run(&lines);
    let failed = said.text.matches("status=").count() + said.text.matches("errno=").count();
    let no_memory = said.text.matches("status=0x51").count();
    assert_eq!((no_memory, failed), (refused, refused), "{}", said.text);
    monitor.wait_for(0);
    assert_eq!(monitor.sim.used(0), 0);
    assert_eq!(monitor.status().calls.killed, 0);
}

const PIECES: &str = "start\nuvm-init\nuvm-range 0x1000000000 1000MiB\n\
                      alloc 400MiB as a\nalloc 600MiB as b\n\
                      uvm-map a at 0x1000000000\nuvm-map b at 0x1019000000\nfree a\nfree b\n";

/// Memory in several mapped ranges is given back by one unmap of all of them.
#[test]
fn one_unmap_releases_all_its_mapped_ranges() {
    let script =
        format!("{PIECES}alloc 100MiB as c\nuvm-cut 0x1000000000 1000MiB\nalloc 1000MiB as d");
    scripted(&Monitor::new(), &script, 1);
}

/// Memory in several mapped ranges is given back range by range.
#[test]
fn mapped_ranges_are_released_one_by_one() {
    let script = format!(
        "{PIECES}uvm-cut 0x1000000000 400MiB\nalloc 420MiB as c\nalloc 100MiB as d\n\
         uvm-cut 0x1019000000 600MiB\nalloc 600MiB as e"
    );
    scripted(&Monitor::new(), &script, 1);
}

/// Memory in several mapped ranges is given back with the UVM range that they are in.
#[test]
fn freeing_a_uvm_range_releases_its_mapped_ranges() {
    let script =
        format!("{PIECES}alloc 100MiB as c\nuvm-free 0x1000000000 1000MiB\nalloc 1000MiB as d");
    scripted(&Monitor::new(), &script, 1);
}

/// What is left of a mapping on either side of an unmapped part retains all its memory.
#[test]
fn rest_of_a_mapping_retains_all_its_memory() {
    let script = "start\nuvm-init\nuvm-range 0x1000000000 1000MiB\nalloc 1000MiB as a\n\
                  uvm-map a at 0x1000000000\nfree a\nuvm-cut 0x1000100000 998MiB\nalloc 100MiB as b\n\
                  uvm-cut 0x1000000000 1MiB\nalloc 100MiB as c\nuvm-cut 0x103e700000 1MiB\n\
                  alloc 1000MiB as d";
    scripted(&Monitor::new(), script, 2);
}

/// A mapping in the place of another releases the memory that the other retained.
#[test]
fn replacing_mapping_releases_memory_of_the_former() {
    let script = "start\nuvm-init\nuvm-range 0x1000000000 700MiB\nalloc 500MiB as a\n\
                  uvm-map a at 0x1000000000\nfree a\nalloc 500MiB as b\n\
                  uvm-map b at 0x1000000000\nfree b\nalloc 520MiB as c\nfree c\nalloc 530MiB as d";
    scripted(&Monitor::new(), script, 1);
}

#[test]
fn failed_mapping_leaves_existing_mapping_charged() {
    let script = "start\nuvm-init\nuvm-range 0x1000000000 1000MiB\nalloc 1000MiB as a\n\
                  uvm-map a at 0x1000000000\nfree a\n";
    let monitor = Monitor::new();
    let script =
        format!("{script}alloc 10MiB as b\nuvm-map b at 0x103e000000\nfree b\nalloc 100MiB as c");
    let lines: Vec<&str> = std::iter::once("run").chain(script.lines()).collect();
    let said = monitor.run(&lines);
    said.must("uvm-map b status=0x1e").must("c status=0x51");
}

#[test]
fn closed_uvm_file_releases_its_mappings() {
    let script = "start\nuvm-init\nalloc 1000MiB as a\nuvm-map a\nfree a\nclose-uvm\n\
                  alloc 1000MiB as b\nfree b\nuvm-init\nalloc 1000MiB as c\nuvm-map c\nfree c";
    scripted(&Monitor::new(), script, 0);
}

/// Unregistering a GPU or its address space gives back the memory that was mapped there.
#[test]
fn unregistering_gpu_or_vaspace_releases_mappings() {
    for what in ["gpu", "vaspace"] {
        let script = format!(
            "start\nuvm-init\nalloc 1000MiB as a\nuvm-map a\nfree a\nuvm-unregister {what}\n\
             alloc 1000MiB as b"
        );
        scripted(&Monitor::new(), &script, 0);
    }
}

/// What a UVM file maps counts until the last process has closed the file.
#[test]
fn uvm_mapping_counts_until_last_close_of_file() {
    let place = tempfile::tempdir().unwrap();
    let [asked, go] = ["asked", "go"].map(|name| path(&place, name));
    let script = format!(
        "start\nuvm-init\nalloc 1000MiB as a\nuvm-map a\nfree a\n\
         fork {{\ninfo\ntouch {asked}\nwait {go}\n}}\n\
         wait {asked}\nclose-uvm\nalloc 100MiB as b\ntouch {go}\njoin\nalloc 1000MiB as c"
    );
    scripted(&Monitor::new(), &script, 1);
}

/// Processes that come one after the other find the memory available that the one before had
/// mapped.
#[test]
fn memory_mapped_by_exited_process_is_available_again() {
    let monitor = Monitor::new();
    for _ in 0..5 {
        let said =
            monitor.run(&["run", "start", "uvm-init", "alloc 1000MiB as a", "uvm-map a", "free a"]);
        assert!(said.success, "{}", said.text);
    }
    monitor.wait_for(0);
    assert_eq!(monitor.sim.used(0), 0);
}

/// The driver duplicates it below a subdevice alone.
#[test]
fn subdevice_memory_maps_exports_and_leaves_nothing() {
    let monitor = Monitor::new();
    let lines = "start\nuvm-init\nalloc-below-subdevice 600MiB as a\nuvm-map a\nexport a\n\
                 free a\nalloc 500MiB as b\nclose-export\nuvm-unmap a\nalloc 500MiB as b";
    let said = monitor.run(&script(lines));
    said.must("uvm-map a ok").must("export a ok").must("alloc b status=0x51\n");
    said.must("alloc b ok");
    monitor.wait_for(0);
    until("the driver has nothing", || monitor.sim.used(0) == 0);
}

/// `NV_ESC_RM_ALLOC_MEMORY` of video memory asks for none, and reports how much there is.
#[test]
fn legacy_allocation_call_only_reports_the_quota() {
    let monitor = Monitor::new();
    let total = format!("alloc27 ok total={QUOTA}\n");
    let lines = "start\nalloc 1000MiB as a\nalloc27\nalloc27\nalloc 24MiB as b\nalloc27";
    let program = monitor.halfway(lines, "alloc 1MiB as c");
    assert_eq!((monitor.used(), monitor.sim.used(0)), (QUOTA, QUOTA));
    let said = program.go_on();
    assert_eq!(said.text.matches(&total).count(), 3, "{}", said.text);
    said.must("alloc c status=0x51\n");
    // Nor is what reaches memory, or keeps it alive, by another class made.
    let classes = [("0x82", "0x1b"), ("0x83", "0x1b"), ("0xf9", "0x56"), ("0xfd", "0x56")];
    let lines: String = classes.map(|(class, _)| format!("alloc27 {class}\n")).concat();
    let said = monitor.run(&script(&format!("start\n{lines}")));
    for (class, status) in classes {
        said.must(&format!("alloc27 {class} status={status}\n"));
        let asked = &monitor.sim.state()["calls"];
        assert!(asked[format!("alloc-memory:{class}")].is_null(), "{class}: {asked}");
    }
    assert_eq!(monitor.sim.state()["calls"]["alloc-memory:0x40"], 3);
    monitor.wait_for(0);
}

/// What it names would live as long as it does, and no charge with it.
#[test]
fn memory_retaining_objects_are_refused_before_the_driver() {
    let monitor = Monitor::new();
    let keeping = nvrm::class::CLASSES.iter().filter(|of| of.does == Use::KeepsAlive);
    let classes = keeping.map(|of| of.class);
    // A context DMA ends with its memory.
    let classes: Vec<u32> = classes.filter(|class| *class != NV01_CONTEXT_DMA).collect();
    assert!(classes.len() > 5, "{classes:x?}");
    let lines: String = classes.iter().map(|class| format!("object {class:#x}\n")).collect();
    let said = monitor.run(&script(&format!("start\nalloc 10MiB as a\n{lines}dmabuf a")));
    for class in &classes {
        said.must(&format!("object {class:#x} status=0x56\n"));
    }
    said.must("dmabuf a status=0x56\n");
    let asked = monitor.sim.state()["calls"].clone();
    assert_eq!(asked["alloc:0x40"], 1, "it is reported: {asked}");
    let kinds = classes.iter().map(|class| format!("alloc:{class:#x}"));
    for kind in kinds.chain(["other:0xd9".to_owned()]) {
        assert!(asked[&kind].is_null(), "{kind}: {asked}");
    }
    monitor.wait_for(0);
}
