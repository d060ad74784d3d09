//! A container whose monitor is lost: it is ended if memory is taken by its descriptors in outside processes.
//!
//! The filter makes calls of the container's own processes fail. An outside process that was sent a descriptor has no
//! filter, and no monitor watches it any more. So the first process that notices the loss checks once.

use rustix::process::{Signal, pidfd_send_signal};

use crate::driver::{MonitorClient, Unanswered};
use crate::gate::settings::{Gpu, Node};
use crate::log::described;
use crate::processes::container_processes::{all_pids, is_monitor, is_of_host};
use crate::processes::holder::{Consequence, Evidence, HolderFacts};
use crate::processes::provenance::Provenance;
use crate::processes::provenance_index::{
    cgroups_of, descriptors_of, home_of, mount_namespace, mounts_of,
};
use cgpu_host::events::Event;
use cgpu_host::process::{ProcStatus, ProcessId, pidfd};
use nvrm::{Release, about};

/// Memory beyond the quotas that the driver itself may take for the container's processes, in bytes.
const SLACK_BYTES: u64 = 16 << 20;

/// The container of the process `first`, as far as the kernel shows it.
struct Container {
    first: ProcessId,
    provenance: Provenance,
}

impl Container {
    /// `None` if the process has exited, or has no mounts of its own: the container's files can't be distinguished from
    /// others.
    fn of(first: ProcessId) -> Option<Self> {
        let mut provenance = Provenance::default();
        let mut found = mounts_of(first.pid)?;
        let own = mounts_of(std::process::id().cast_signed())?;
        found.retain(|mount| !own.contains(mount));
        provenance.set_first_process_mounts(found);
        // The engine's helper above it is none of the container's processes.
        let parent = ProcStatus::read(first.pid).ok();
        let parent = parent.and_then(|status| status.field("PPid")?.parse().ok());
        let shared = parent.and_then(cgroups_of).unwrap_or_default();
        let (namespace, cgroup) = home_of(first.pid, &shared);
        provenance.add_process(namespace, cgroup.as_deref());
        // Another process may have had the pid meanwhile.
        (first.alive() && !provenance.is_unknown()).then_some(Container { first, provenance })
    }

    /// Whether a process is the container's. One of which too little can be read counts as the container's.
    fn has(&self, pid: u32) -> bool {
        let Some((_, namespace)) = mount_namespace(pid.cast_signed()) else { return true };
        let cgroup = cgroups_of(pid.cast_signed()).unwrap_or_default();
        pid == self.first.pid.cast_unsigned() || self.provenance.has_process(namespace, &cgroup)
    }

    /// Whether an outside process has a file of the driver's that was opened in the container; and then, whether it
    /// has one of its own, too.
    fn has_given_to(&self, pid: u32, nodes: &[Node]) -> Option<bool> {
        let has_file = |mount, filesystem| self.provenance.has_file(mount, filesystem);
        let found = descriptors_of(pid, nodes, has_file);
        found.of_container.then_some(found.of_own)
    }

    fn end(&self) {
        for pid in all_pids().filter(|pid| *pid > 1) {
            // The pidfd is opened before the process is inspected, so that the signal reaches no other process.
            let Ok(pidfd) = pidfd(pid.cast_signed()) else { continue };
            // Others may be in its cgroups.
            let namespace = mount_namespace(pid.cast_signed());
            let is_inside = namespace.is_some_and(|(_, of)| self.provenance.has_process(of, ""));
            if is_inside || ProcessId::of(pid.cast_signed()) == Some(self.first) {
                let _ = pidfd_send_signal(pidfd, Signal::KILL);
            }
        }
    }
}

/// An outside process that has one of the container's descriptors.
struct Given {
    pid: u32,
    facts: HolderFacts,
}

/// Ends the container whose first process is `first`, if outside processes have its descriptors, and the driver shows
/// memory of one of them, or more of the container's than the quotas of `gpus` allow. Those that [`HolderFacts`]
/// doesn't ignore are killed, too. Returns the event that says so, if the container was ended. `nodes` are the driver's
/// files on the host.
///
/// # Errors
///
/// If the driver can't be asked: nothing is known then.
pub fn end_if_taken(
    first: ProcessId,
    nodes: &[Node],
    release: &Release,
    gpus: &[Gpu],
) -> Result<Option<Event>, Unanswered> {
    let Some(container) = Container::of(first) else { return Ok(None) };
    let (inside, outside): (Vec<u32>, Vec<u32>) = all_pids().partition(|pid| container.has(*pid));
    let given = |pid: u32| {
        let has_own_file = container.has_given_to(pid, nodes)?;
        let is_of_host = is_of_host(pid.cast_signed())?;
        let facts =
            HolderFacts { is_of_host, has_own_file, has_memory: false, container_ended: false };
        (pid != std::process::id() && !is_monitor(pid)).then_some(Given { pid, facts })
    };
    let mut given: Vec<Given> = outside.into_iter().filter_map(given).collect();
    if given.is_empty() {
        return Ok(None);
    }
    let uuids: Vec<about::Uuid> =
        gpus.iter().map(|gpu| about::uuid(&gpu.uuid).unwrap_or_default()).collect();
    let client = MonitorClient::open(nodes, release, &uuids)?;
    let bytes_of = |gpu: usize, pids: &[u32]| -> u64 {
        let held = client.held(gpu, pids).unwrap_or_default();
        held.iter().map(about::Held::bytes).sum()
    };
    for Given { pid, facts } in &mut given {
        facts.has_memory = (0..gpus.len()).any(|gpu| bytes_of(gpu, &[*pid]) > 0);
    }
    let has_ended = gpus
        .iter()
        .enumerate()
        .any(|(at, gpu)| bytes_of(at, &inside) > gpu.limit_bytes.saturating_add(SLACK_BYTES));
    client.end();
    // What one with files of its own has may be by these.
    let takes = |of: &&Given| of.facts.has_memory && !of.facts.has_own_file;
    let taker = given.iter().find(takes).or_else(|| given.first().filter(|_| has_ended));
    let Some(taker) = taker else { return Ok(None) };
    let event = described(Event::ended_for_leak(), taker.pid.cast_signed());
    for Given { pid, facts } in &given {
        let Ok(pidfd) = pidfd(pid.cast_signed()) else { continue };
        let is_to_be_killed = facts.consequence(Evidence::ContainerMemory) == Consequence::Killed;
        // It may be another process by now.
        if is_to_be_killed && container.has_given_to(*pid, nodes).is_some() {
            let _ = pidfd_send_signal(pidfd, Signal::KILL);
        }
    }
    container.end();
    Ok(Some(event))
}
