//! Controls on an object of a program, through a descriptor of that program: the driver takes such a control only
//! through the client's own file, and a file that the monitor kept open would keep the client's memory.

use std::fs;
use std::path::PathBuf;

use crate::gate::settings::{Node, NodeKind};
use crate::monitor::caller::{Targets, threads_by_fd_table};
use crate::monitor::compute::shares::set_slice;
use crate::monitor::node::{Device, Failure, Rm, kind_at};
use crate::monitor::state::{ContainerState, DueSlice};

/// How much of a process is searched whose descriptor names another file by now: a program has one or two files of
/// `nvidiactl`, and all its threads have the same.
const MOST_THREADS: usize = 4;
const MOST_DESCRIPTORS: usize = 4096;
const MOST_FILES: usize = 16;

/// Sets a slice through the descriptor that its group was made by or, where `all` is set, through another one of
/// the same process. `None` where no descriptor leads to the group's client.
pub(crate) fn set_via_program(
    state: &ContainerState,
    targets: &Targets,
    due: &DueSlice,
    all: bool,
) -> Option<Result<(), Failure>> {
    let pid = due.reach.process.pid().cast_signed();
    let through = |tid: i32, descriptor: i32| {
        let (target, file) = targets.duplicate(tid, descriptor, None).ok()?;
        // The pid may belong to another process by now.
        if target.process != due.reach.process {
            return None;
        }
        let device = Device::of(&state.settings.nodes, file)?;
        let is_control = device.kind == NodeKind::Control;
        let rm = Rm { release: &state.release, device: &device };
        is_control.then(|| set_slice(rm, due))
    };
    // Where that fails, the descriptor may name another file by now.
    if let Some(Ok(())) = through(pid, due.reach.descriptor) {
        return Some(Ok(()));
    }
    let mut last = None;
    let threads = if all { threads_by_fd_table(pid.cast_unsigned()) } else { Vec::new() };
    for tid in threads.into_iter().map(u32::cast_signed).take(MOST_THREADS) {
        for descriptor in control_files(&state.settings.nodes, tid) {
            match through(tid, descriptor) {
                Some(Ok(())) => return Some(Ok(())),
                other => last = other.or(last),
            }
        }
    }
    last
}

/// The first descriptors of `nvidiactl` that a thread has.
fn control_files(nodes: &[Node], tid: i32) -> Vec<i32> {
    let listed = fs::read_dir(format!("/proc/{tid}/fd")).into_iter().flatten().flatten();
    let listed = listed.take(MOST_DESCRIPTORS);
    let is_control = |path: &PathBuf| kind_at(nodes, path) == Some(NodeKind::Control);
    let paths = listed.map(|entry| entry.path()).filter(is_control);
    let numbers = paths.filter_map(|path| path.file_name()?.to_str()?.parse().ok());
    numbers.take(MOST_FILES).collect()
}
