//! Checks what the container's processes have mapped of `nvidia-uvm`, and releases the charges of managed memory that
//! no process has mapped any more.
//!
//! When a mapping call is passed through, another thread can replace the descriptor, and the mapping is of another file
//! than the monitor checked. So the mappings are read from the kernel ([`AddressSpace`]). If the kernel does not list
//! an address space any more, all processes are searched for mappings.
//!
//! The kernel doesn't say which file a mapping is of. But memory is on a GPU only by files that have GPUs, and these
//! files are retained. Each retained file is asked whether it has managed memory at the addresses that are mapped and
//! not charged. A file that has such memory loses its GPUs, and with them the memory, whichever process has it mapped.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::caller::has_file;
use crate::gate::settings::{Managed, NodeKind};
use crate::node::{kind_at, place_at};
use crate::processes::{container_pids, kill_process, open_files_of};
use crate::shared::Monitor;
use crate::state::{Mapped, Space};
use crate::uvm::address_spaces::{AddressSpace, MAPPING_DELAY, current_maps};
use crate::uvm::file_creators::has_orphaned_files;
use crate::uvm::files::{MOST_QUESTIONS, UvmFile};
use crate::uvm::queries::{PAGE_BYTES, Ranges};
use crate::uvm::retained_files::{end_orphaned_files, unregister_gpus};
use crate::uvm::vma_list::{Listed, possibly_managed};
use cgpu_core::ledger::{Entry, Hold, Process};
use cgpu_host::events::Event;
use cgpu_host::process::{ProcessId, of_any_thread};
use nvrm::uvm::Range;

/// How often the address spaces are checked whose processes asked for nothing since. A thread that was prevented from
/// running may map late, and the charges change.
const PAUSE: Duration = Duration::from_millis(500);

/// The most mappings of an address space that could be UVM's. No program has as many.
const MOST_MAPPINGS: usize = 4096;

/// Checks mappings whenever it is woken. This thread alone waits if the driver or the container delays the check.
pub(crate) fn audit_mappings_forever(monitor: &Monitor) {
    // They were watched before an update.
    let processes: Vec<Process> = monitor.state().processes.iter().copied().collect();
    for process in processes {
        let watch = |tid| monitor.spaces.watch(process, tid).ok();
        let _ = of_any_thread(process.pid().cast_signed(), watch);
    }
    loop {
        monitor.spaces.wait();
        let _at_work = monitor.work.begin();
        audit_mappings(monitor);
    }
}

fn audit_mappings(monitor: &Monitor) {
    let is_due = monitor.spaces.take_due(PAUSE);
    if is_due {
        end_orphaned_files(monitor);
    }
    let files = monitor.uvm_files.all();
    check_fresh(monitor, &files);
    if !is_due {
        return;
    }
    let begun = Instant::now();
    if monitor.settings.managed == Managed::Refuse {
        // Managed memory of processes that have ended: under this setting the container may have none.
        files.iter().for_each(|file| Ranges::of(&monitor.release, &file.device).end_zombies());
    }
    for space in monitor.spaces.all() {
        check_at(monitor, &space, &files);
        check_fresh(monitor, &files);
    }
    release_unmapped_ranges(monitor);
    monitor.state().ranges.forget_removed(begun);
}

fn check_fresh(monitor: &Monitor, files: &[Arc<UvmFile>]) {
    monitor.spaces.fresh().iter().for_each(|space| check_at(monitor, space, files));
}

/// Checks the mappings of an address space, and forgets an address space that no process has any more.
fn check_at(monitor: &Monitor, space: &Arc<AddressSpace>, files: &[Arc<UvmFile>]) {
    space.mark_checked();
    let since = Instant::now();
    let (text, now) = (space.read_maps(), current_maps(space.process));
    let is_gone = match &text {
        Ok(text) => text.is_empty(),
        // Other processes may have the address space, and this process may have it by another thread.
        Err(_) => true,
    };
    // The kernel may still list this address space of a process that has ended, while other processes share another
    // address space that the process had.
    if text.is_err() || space.take_process_ended() {
        watch_uncharged_processes(monitor);
    }
    if is_gone {
        monitor.spaces.forget(space);
    }
    let text = text.unwrap_or_default();
    let now = now.filter(|now| *now != text).unwrap_or_default();
    if is_gone && !now.is_empty() {
        monitor.spaces.reopen(space.process);
    }
    // The process may have another address space since it asked, and have left this one to other processes.
    let mut mappings = mapped_in(monitor, space.process, &text);
    mappings.extend(mapped_in(monitor, space.process, &now));
    let uncharged = uncharged(monitor, space.process, &mappings, since);
    space.set_mappings(mappings);
    if uncharged.len() > MOST_MAPPINGS || !unexplained(monitor, &uncharged, since).is_empty() {
        end_unless_gone(monitor, space);
    }
    let addresses: BTreeSet<u64> = uncharged.iter().map(|(from, _)| *from).collect();
    if addresses.len() * files.len() > MOST_QUESTIONS {
        tracing::debug!("more mappings of nvidia-uvm than can be asked about");
        return kill_process(monitor, space.process, Event::killed_past_the_monitor());
    }
    addresses.into_iter().for_each(|at| judge_address(monitor, at, files));
}

/// Those of `uncharged` that lie in no file's range, and that no other process is charged for: another process may
/// share the address space.
fn unexplained(monitor: &Monitor, uncharged: &[Mapped], since: Instant) -> Vec<Mapped> {
    let files = monitor.uvm_files.all();
    let state = monitor.state();
    let is_explained = |mapped: &Mapped| {
        let mut of_files = files.iter().map(|file| Space::File(file.number));
        let mut of_others = state.processes.iter().map(|process| Space::Managed(*process));
        of_files.any(|space| state.ranges.covers(space, *mapped))
            || of_others.any(|space| state.ranges.covers(space, *mapped))
            || state.ranges.covered_by_removed(*mapped, since)
    };
    uncharged.iter().copied().filter(|mapped| !is_explained(mapped)).collect()
}

/// Kills the process of an address space with unexplained mappings, unless these no longer exist: the process may have
/// unmapped them during the check, and its range may have been freed.
fn end_unless_gone(monitor: &Monitor, space: &AddressSpace) {
    let since = Instant::now();
    let texts = [space.read_maps().ok(), current_maps(space.process)];
    let now: Vec<Mapped> =
        texts.iter().flatten().flat_map(|text| mapped_in(monitor, space.process, text)).collect();
    let uncharged = uncharged(monitor, space.process, &now, since);
    if uncharged.len() > MOST_MAPPINGS || !unexplained(monitor, &uncharged, since).is_empty() {
        tracing::debug!(mappings = now.len(), "managed memory past the monitor");
        kill_process(monitor, space.process, Event::killed_past_the_monitor());
    }
}

/// Asks each file for managed memory at an address that is mapped and not charged. As many files may have some as
/// processes are charged for the address: each has memory of its own at the same address.
fn judge_address(monitor: &Monitor, at: u64, files: &[Arc<UvmFile>]) {
    let has = |file: &&Arc<UvmFile>| Ranges::of(&monitor.release, &file.device).probe_managed(at);
    let found: Vec<&Arc<UvmFile>> =
        files.iter().filter(|file| !file.is_ended()).filter(has).collect();
    if found.is_empty() {
        return;
    }
    let charged: Vec<Process> = {
        let state = monitor.state();
        let is_charged = |of: &Process| state.ranges.covers(Space::Managed(*of), (at, at + 1));
        state.processes.iter().copied().filter(is_charged).collect()
    };
    // A process can be charged for a range without having it mapped.
    let has_it = |of: &Process| has_mapped(monitor, *of, (at, at + 1));
    let charged: Vec<Process> = charged.into_iter().filter(has_it).collect();
    if found.len() <= charged.len() {
        return;
    }
    let paid: Vec<(u64, u64)> = {
        let state = monitor.state();
        charged.iter().filter_map(|of| state.ranges.range(Space::Managed(*of), at)).collect()
    };
    for file in found {
        let ranges = Ranges::of(&monitor.release, &file.device);
        let is_paid = paid.iter().any(|(base, length)| {
            ranges.is_whole(Range { base: *base, length: *length }) == Some(true)
        });
        if !is_paid {
            withdraw_gpus(monitor, file, at);
        }
    }
}

/// Takes the GPUs from a file that has managed memory bypassing the gate; it gets no GPU again. Kills each process that
/// has the file and an uncharged mapping at the address `at`.
fn withdraw_gpus(monitor: &Monitor, file: &UvmFile, at: u64) {
    file.deny_gpus();
    if let Some(_rm_lock) = monitor.rm_lock.enter_for_monitor()
        && unregister_gpus(monitor, &file.device)
    {
        file.set_ended();
    }
    if monitor.log.limit.take_line() {
        let container = monitor.settings.short_id.as_str();
        tracing::warn!(
            container,
            "a file of nvidia-uvm has managed memory past the monitor: it loses its GPUs"
        );
    }
    for space in monitor.spaces.all() {
        let last = space.last_mappings().unwrap_or_default();
        let there: Vec<Mapped> =
            last.into_iter().filter(|mapped| overlap(*mapped, (at, at + 1))).collect();
        let open = open_files_of(monitor, space.process.pid(), NodeKind::Uvm);
        let mut open = open.into_iter().flatten();
        if !uncharged(monitor, space.process, &there, Instant::now()).is_empty()
            && open.any(|place| has_file(place, &file.device) == Some(true))
        {
            kill_process(monitor, space.process, Event::killed_past_the_monitor());
        }
    }
}

/// Releases the managed ranges that no process has mapped any more.
fn release_unmapped_ranges(monitor: &Monitor) {
    let processes: Vec<Process> = monitor.state().processes.iter().copied().collect();
    for process in processes {
        let ranges = monitor.state().ranges.of(Space::Managed(process));
        release_if_unmapped(monitor, process, &ranges);
    }
    monitor.spaces.asked_ranges.lock().retain(|_, at| at.elapsed() < 2 * MAPPING_DELAY);
}

/// Releases those of a process's managed ranges `ranges` that no process has mapped, unless they were asked for
/// less than [`MAPPING_DELAY`] ago.
fn release_if_unmapped(monitor: &Monitor, process: Process, ranges: &[(u64, u64)]) {
    for (base, length) in ranges.iter().copied() {
        let at = monitor.spaces.asked_for_at(process, base);
        let is_on_its_way = at.is_some_and(|at| at.elapsed() < MAPPING_DELAY);
        if is_on_its_way || is_mapped_by_any(monitor, process, (base, length)) {
            continue;
        }
        // The kernel lists no mappings of a program that has exited, and the program's files may not have ended yet.
        if has_orphaned_files(monitor, process) {
            return;
        }
        let mut state = monitor.state();
        // The range may have been asked for again meanwhile.
        if monitor.spaces.asked_for_at(process, base) != at {
            continue;
        }
        let space = Space::Managed(process);
        for (at, _) in state.ledger.mappings(space.number(), base, PAGE_BYTES) {
            state.enter(Entry::Release { hold: Hold::Mapping { space: space.number(), base: at } });
        }
        state.remove_range(space, base);
    }
}

/// Releases a process's earlier managed ranges that overlap the range `base`, `length`, and are not mapped any
/// more. `true` where no range overlaps it then.
pub(crate) fn release_overlapping(
    monitor: &Monitor,
    process: Process,
    (base, length): (u64, u64),
) -> bool {
    let wanted = (base, base.saturating_add(length));
    let overlapping = || {
        let mut ranges = monitor.state().ranges.of(Space::Managed(process));
        ranges.retain(|(at, bytes)| overlap(wanted, (*at, at.saturating_add(*bytes))));
        ranges
    };
    let others = overlapping();
    // The process has unmapped these ranges, or it would not ask for their addresses again.
    for (at, _) in &others {
        monitor.spaces.asked_ranges.lock().remove(&(process, *at));
    }
    release_if_unmapped(monitor, process, &others);
    others.is_empty() || overlapping().is_empty()
}

/// Whether a process's managed range is mapped: by the process, or by another process that shares its address space or
/// inherited the mapping. The address spaces of other processes count as they were at the last check.
fn is_mapped_by_any(monitor: &Monitor, process: Process, (base, length): (u64, u64)) -> bool {
    let range = (base, base.saturating_add(length));
    let others = monitor.spaces.all().into_iter().filter(|of| of.process != process);
    has_mapped(monitor, process, range)
        || others.into_iter().any(|space| {
            let now = || mapped_in(monitor, space.process, &space.read_maps().unwrap_or_default());
            let mut last = space.last_mappings().unwrap_or_else(now);
            last.retain(|mapped| overlap(*mapped, range));
            let uncharged = uncharged(monitor, space.process, &last, Instant::now());
            uncharged.iter().any(|mapped| may_be_managed(monitor, *mapped))
        })
}

/// Whether a mapping lies in no file's range, or a file has managed memory at its address all the same.
fn may_be_managed(monitor: &Monitor, mapped: Mapped) -> bool {
    let files = monitor.uvm_files.all();
    let is_of_file = {
        let state = monitor.state();
        files.iter().any(|file| state.ranges.covers(Space::File(file.number), mapped))
    };
    let is_managed =
        |file: &Arc<UvmFile>| Ranges::of(&monitor.release, &file.device).probe_managed(mapped.0);
    !is_of_file || files.iter().any(is_managed)
}

/// The processes in `dead` whose managed memory is still mapped. Where any of them has managed ranges, first
/// watches the processes of the container that have uncharged mappings.
pub(crate) fn dead_with_mapped_memory(monitor: &Monitor, dead: &[Process]) -> BTreeSet<Process> {
    let ranges_of = |process: &Process| monitor.state().ranges.of(Space::Managed(*process));
    let with_ranges: Vec<Process> =
        dead.iter().filter(|of| !ranges_of(of).is_empty()).copied().collect();
    if with_ranges.is_empty() {
        return BTreeSet::new();
    }
    // The kernel may not list a dead process's own mappings any more.
    watch_uncharged_processes(monitor);
    let is_mapped = |process: &Process| {
        ranges_of(process).into_iter().any(|range| is_mapped_by_any(monitor, *process, range))
    };
    with_ranges.into_iter().filter(is_mapped).collect()
}

/// Watches each process of the container that has mappings which the process isn't charged for.
fn watch_uncharged_processes(monitor: &Monitor) {
    for pid in container_pids(monitor).into_iter().map(u32::cast_signed) {
        let Some(process) = ProcessId::of(pid).map(Process::from) else { continue };
        let since = Instant::now();
        let mappings = mapped_in(monitor, process, &current_maps(process).unwrap_or_default());
        let is_known = !monitor.spaces.of_process(process).is_empty();
        if !is_known && !uncharged(monitor, process, &mappings, since).is_empty() {
            let _ = monitor.spaces.watch(process, pid);
        }
    }
}

/// Those of `mappings` that are no charged managed memory of the process, and were none since `since`, when the
/// kernel's list began to be read.
fn uncharged(
    monitor: &Monitor,
    process: Process,
    mappings: &[Mapped],
    since: Instant,
) -> Vec<Mapped> {
    let state = monitor.state();
    let is_charged =
        |mapped: &Mapped| state.ranges.covered_since(Space::Managed(process), *mapped, since);
    mappings.iter().copied().filter(|mapped| !is_charged(mapped)).collect()
}

/// Whether a process has a mapping that overlaps `wanted`, in its address space of now, or in one that it had
/// when it asked for mappings.
fn has_mapped(monitor: &Monitor, process: Process, wanted: Mapped) -> bool {
    let then =
        monitor.spaces.of_process(process).into_iter().filter_map(|space| space.read_maps().ok());
    then.chain(current_maps(process)).any(|text| {
        mapped_in(monitor, process, &text).iter().any(|mapped| overlap(*mapped, wanted))
    })
}

/// The mappings in the kernel's list that could be managed memory of UVM's nodes.
fn mapped_in(monitor: &Monitor, process: Process, list: &str) -> Vec<Mapped> {
    // Where a process has so many mappings, the rest count as UVM's unasked.
    let is_uvm = |(number, of): &(usize, Listed<'_>)| {
        *number >= MOST_MAPPINGS || is_uvm(monitor, process, *of)
    };
    let found = possibly_managed(list).enumerate().filter(is_uvm);
    found.map(|(_, of)| of.mapped).collect()
}

/// Whether a mapping's file is a UVM node: by the device and inode in the list, or by those of the file
/// itself, whose file system may show other numbers.
fn is_uvm(monitor: &Monitor, process: Process, of: Listed<'_>) -> bool {
    if of.place.is_some_and(|place| monitor.state().is_node(place)) {
        return true;
    }
    let of_file = |tid| {
        let path = PathBuf::from(format!("/proc/{tid}/map_files/{}", of.range));
        match kind_at(&monitor.settings.nodes, &path) {
            Some(kind) => Some(kind == NodeKind::Uvm),
            None => place_at(&path).map(|place| monitor.state().is_node(place)),
        }
    };
    of_any_thread(process.pid().cast_signed(), of_file).unwrap_or(false)
}

/// Whether two mappings have an address in common.
fn overlap((from, to): Mapped, (first, end): Mapped) -> bool {
    from < end && to > first
}
