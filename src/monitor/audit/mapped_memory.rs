//! What the container's processes have mapped of `nvidia-uvm`, as the kernel lists it, and which of that is charged.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use crate::gate::settings::NodeKind;
use crate::ledger::Process;
use crate::monitor::node::{kind_at, place_at};
use crate::monitor::processes::Processes;
use crate::monitor::state::{ContainerState, Mapped, Space};
use crate::monitor::uvm::{Listed, Uvm, current_maps, possibly_managed};
use crate::process::{ProcessId, told};

/// The most mappings of an address space that could be UVM's. No program has as many.
pub(crate) const MOST_MAPPINGS: usize = 4096;

/// What the container's processes have mapped.
#[derive(Debug)]
pub(crate) struct MappedMemory {
    state: Arc<ContainerState>,
    processes: Arc<Processes>,
    uvm: Arc<Uvm>,
}

impl MappedMemory {
    pub(crate) fn new(processes: Arc<Processes>, uvm: Arc<Uvm>) -> Self {
        MappedMemory { state: Arc::clone(&processes.state), processes, uvm }
    }

    /// Watches each process of the container that has mappings which the process isn't charged for.
    pub(crate) fn watch_uncharged_processes(&self) {
        for pid in self.processes.container_pids().into_iter().map(u32::cast_signed) {
            let Some(process) = ProcessId::of(pid).map(Process::from) else { continue };
            let since = Instant::now();
            let mappings = self.mapped_in(process, &current_maps(process).unwrap_or_default());
            let is_known = !self.uvm.spaces.of_process(process).is_empty();
            if !is_known && !self.uncharged(process, &mappings, since).is_empty() {
                let _ = self.uvm.spaces.watch(process, pid);
            }
        }
    }

    /// Those of `mappings` that are no charged managed memory of the process, and were none since `since`, when the
    /// kernel's list began to be read.
    pub(crate) fn uncharged(
        &self,
        process: Process,
        mappings: &[Mapped],
        since: Instant,
    ) -> Vec<Mapped> {
        let books = self.state.books();
        let is_charged =
            |mapped: &Mapped| books.ranges.covered_since(Space::Managed(process), *mapped, since);
        mappings.iter().copied().filter(|mapped| !is_charged(mapped)).collect()
    }

    /// Whether a process has a mapping that overlaps `wanted`, in its address space of now, or in one that it had
    /// when it asked for mappings.
    pub(crate) fn has_mapped(&self, process: Process, wanted: Mapped) -> bool {
        let then = self
            .uvm
            .spaces
            .of_process(process)
            .into_iter()
            .filter_map(|space| space.read_maps().ok());
        then.chain(current_maps(process)).any(|text| {
            self.mapped_in(process, &text).iter().any(|mapped| overlap(*mapped, wanted))
        })
    }

    /// The mappings in the kernel's list that could be managed memory of UVM's nodes.
    pub(crate) fn mapped_in(&self, process: Process, list: &str) -> Vec<Mapped> {
        // Where a process has so many mappings, the rest count as UVM's unasked.
        let is_uvm = |(number, of): &(usize, Listed<'_>)| {
            *number >= MOST_MAPPINGS || self.is_uvm(process, *of)
        };
        let found = possibly_managed(list).enumerate().filter(is_uvm);
        found.map(|(_, of)| of.mapped).collect()
    }

    /// Whether a mapping's file is a node of UVM's: by the device and inode in the list, or by those of the file
    /// itself, whose file system may show other numbers.
    fn is_uvm(&self, process: Process, of: Listed<'_>) -> bool {
        if of.place.is_some_and(|place| self.state.books().is_node(place)) {
            return true;
        }
        let of_file = |tid| {
            let path = PathBuf::from(format!("/proc/{tid}/map_files/{}", of.range));
            match kind_at(&self.state.settings.nodes, &path) {
                Some(kind) => Some(kind == NodeKind::Uvm),
                None => place_at(&path).map(|place| self.state.books().is_node(place)),
            }
        };
        told(process.pid().cast_signed(), of_file).unwrap_or(false)
    }
}

/// Whether two mappings have an address in common.
pub(crate) fn overlap((from, to): Mapped, (first, end): Mapped) -> bool {
    from < end && to > first
}
