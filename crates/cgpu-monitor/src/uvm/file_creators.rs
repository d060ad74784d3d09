//! Initialized files of nvidia-uvm: each ends with its creator, the process that initialized it.
//!
//! Managed memory is freed with the address space in which it is mapped. That address space lives as long as a file
//! that `UVM_MM_INITIALIZE` made, and that file may have been given to other processes. Then no process lists the
//! mappings. So a file is ended with its creator, whichever process has it open
//! ([`retained_files`](crate::uvm::retained_files)).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;

use crate::shared::Monitor;
use crate::snapshot::{Creator, Record};
use crate::state::Initialization;
use crate::uvm::address_spaces::image_hash;
use crate::uvm::files::UvmFile;
use crate::uvm::queries::was_initialized;
use cgpu_core::ledger::Process;
use cgpu_host::process::ProcessId;
use nvrm::low_word;
use nvrm::number::UVM_INITIALIZE;

/// The initialization that is in progress. Opens the state only if there may be one: every call asks this.
pub(crate) fn in_progress(monitor: &Monitor) -> Option<Initialization> {
    let may_be = monitor.uvm_files.may_be_in_progress.load(Ordering::SeqCst);
    may_be.then(|| monitor.state().creators.in_progress()).flatten()
}

/// Enters that a call which may initialize a file is about to be passed through.
pub(crate) fn begin_initialization(monitor: &Monitor, in_progress: Initialization) {
    let mut state = monitor.state();
    monitor.uvm_files.may_be_in_progress.store(true, Ordering::SeqCst);
    let Initialization { file, tid, creator, id } = in_progress;
    state.write(Record::Initialize { file, tid, creator });
    state.creators.set_notification(id);
}

/// Ends the initialization `in_progress` if it has initialized its file or its call has finished: the caller knows that
/// (`has_ended`), or it is checked. `true` if the initialization is not in progress any more.
pub(crate) fn try_end_initialization(
    monitor: &Monitor,
    in_progress: Initialization,
    has_ended: bool,
) -> bool {
    // This is checked first: if the call has finished now, it has initialized the file already or never will.
    let has_ended = has_ended || self::has_ended(&in_progress);
    let files = monitor.uvm_files.all();
    let file = files.iter().find(|file| file.number == in_progress.file);
    let is_done = match file.map(|file| was_initialized(&monitor.release, &file.device)) {
        Some(Some(done)) => done,
        // The file is not retained any more: no process has it open, and it gets no GPU.
        None => false,
        Some(None) => return false,
    };
    if is_done || has_ended {
        end_initialization(monitor, in_progress, is_done);
    }
    is_done || has_ended
}

/// Enters that the initialization `in_progress` has finished, and whether it initialized the file (`done`).
pub(crate) fn end_initialization(monitor: &Monitor, in_progress: Initialization, done: bool) {
    let mut state = monitor.state();
    // Another thread may have entered this already.
    if state.creators.in_progress() == Some(in_progress) {
        state.write(Record::Initialized { done });
        monitor.uvm_files.may_be_in_progress.store(false, Ordering::SeqCst);
    }
}

/// Binds a file to its creator, with which it ends, before the file gets a GPU. `false` if it may get none.
pub(crate) fn bind_to_creator(monitor: &Monitor, file: &UvmFile) -> bool {
    let in_progress = in_progress(monitor);
    if let Some(in_progress) = in_progress.filter(|in_progress| in_progress.file == file.number) {
        try_end_initialization(monitor, in_progress, false);
    }
    let is_bound = monitor.state().creators.is_bound(file.number);
    if !is_bound {
        monitor.state().write(Record::Bound { file: file.number });
    }
    !is_orphaned(monitor, file)
}

/// Whether the file's creator isn't known, has exited, or has executed another program.
pub(crate) fn is_orphaned(monitor: &Monitor, file: &UvmFile) -> bool {
    let creator = monitor.state().creators.of(file.number);
    creator.is_none_or(|Creator { process, image: then }| {
        let has_executed = || image_hash(process).is_some_and(|now| now != then);
        !ProcessId::from(process).alive() || has_executed()
    })
}

/// Whether a process is the creator of files that are orphaned and not ended yet.
pub(crate) fn has_orphaned_files(monitor: &Monitor, process: Process) -> bool {
    let files = monitor.uvm_files.all();
    let is_made_by_process = |file: &&Arc<UvmFile>| {
        let bound = monitor.state().creators.bound_to(process).any(|number| number == file.number);
        bound && !file.is_ended()
    };
    files.iter().filter(is_made_by_process).any(|file| is_orphaned(monitor, file))
}

/// Whether the call of an initialization is neither in the driver any more nor pending before it.
///
/// `/proc` shows in which system call a thread waits, with its arguments (`fs/proc/base.c`, `proc_pid_syscall`). A
/// thread that runs may be anywhere.
fn has_ended(in_progress: &Initialization) -> bool {
    let Initialization { tid, creator: Creator { process, .. }, .. } = in_progress;
    let process = ProcessId::from(*process);
    let path = format!("/proc/{}/task/{tid}/syscall", process.pid);
    match std::fs::read_to_string(path) {
        Ok(text) => text != "running\n" && !is_init_call(&text),
        Err(error) => {
            let is_gone = matches!(Errno::from_io_error(&error), Some(Errno::NOENT | Errno::SRCH));
            is_gone || !process.alive()
        }
    }
}

/// Whether a thread waits in a call that may initialize a file. `text` is what `/proc` shows of the thread: the system
/// call's number and its arguments, of which the second one is the request.
fn is_init_call(text: &str) -> bool {
    let request = text.split(' ').nth(2).and_then(|word| word.strip_prefix("0x"));
    let request = request.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    let is_call = !text.starts_with("-1 ");
    is_call && request.is_none_or(|request| low_word(request) == UVM_INITIALIZE)
}
