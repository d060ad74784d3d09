//! Calls that initialize a file of nvidia-uvm: one at a time, so that each file's creator is known.

use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use crate::caller::Reply;
use crate::case::{Case, EarlyReply};
use crate::decide::{Continued, RefusalReason};
use crate::snapshot::Creator;
use crate::state::Initialization;
use crate::uvm::address_spaces::{image_hash, is_randomized};
use crate::uvm::callers_file::{call_uvm, keep_file};
use crate::uvm::file_creators::{
    begin_initialization, end_initialization, in_progress, try_end_initialization,
};
use crate::uvm::queries::was_initialized;
use nvrm::number::NV_ERR_BUSY_RETRY;
use nvrm::{Answer, uvm};

/// How long a call waits while the same other initialization is in progress.
const TIMEOUT: Duration = Duration::from_secs(1);

/// How often a call that waits polls whether the other initialization has finished.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Passes through a call that initializes a file. Sets the flag that turns HMM off in the caller's struct first; the
/// flags are checked again when a GPU is registered, since the caller can change them before the kernel reads them.
pub(crate) fn initialize(
    case: &mut Case<'_>,
    address: u64,
    flags: u64,
) -> Result<Reply, EarlyReply> {
    let process = case.target()?.process;
    let file = keep_file(case)?;
    if let Some(patch) = uvm::without_hmm(case.head(), flags) {
        let _ = patch.apply(&mut case.scratch.bytes);
    }
    if is_initialized(case)? {
        return initialize_again(case);
    }
    let Some(image) = image_hash(process).filter(|_| is_randomized(process)) else {
        return Err(case.deny(&RefusalReason::NotRandom));
    };
    let place = case.device()?.place;
    if !case.state().note_node(place) {
        return Err(case.deny(&RefusalReason::UvmNodesFull));
    }
    case.target()?.write(&[Some((address, &case.scratch.bytes))])?;
    let turn = wait_for_init_turn(case)?;
    // While this call has the turn, no other call can initialize the file.
    if is_initialized(case)? {
        return initialize_again(case);
    }
    // If the caller has exited, the image may be another process's program.
    case.still_waits()?;
    let creator = Creator { process, image };
    let (tid, id) = (case.target()?.tid, case.notice.id);
    let in_progress = Initialization { file: file.number, tid: tid.cast_unsigned(), creator, id };
    begin_initialization(case.monitor, in_progress);
    drop(turn);
    case.effects.initializes = true;
    Ok(case.continued(Continued::UvmBind))
}

/// Initializes an initialized file again. That binds nothing, whichever process calls: the driver only says whether the
/// flags are the same.
fn initialize_again(case: &mut Case<'_>) -> Result<Reply, EarlyReply> {
    call_uvm(case)?;
    Ok(case.executed(None))
}

/// Whether the call's file is initialized. Refuses the call if that can't be determined.
pub(crate) fn is_initialized(case: &mut Case<'_>) -> Result<bool, EarlyReply> {
    let known = was_initialized(&case.monitor.release, case.device()?);
    known.ok_or_else(|| case.answer(Answer::Status(NV_ERR_BUSY_RETRY)))
}

/// Waits until no other call initializes a file. A long wait is the container's own doing: one of its threads has an
/// initialization that does not end, or runs on without another call.
fn wait_for_init_turn<'a>(case: &mut Case<'a>) -> Result<MutexGuard<'a, ()>, EarlyReply> {
    let monitor = case.monitor;
    let mut since = (None, Instant::now());
    loop {
        // The turn is taken before the state is read: a call enters its initialization before it gives the turn back.
        // In the other order, that entry could be missed.
        let turn = monitor.uvm_files.init_turn.try_lock();
        let in_progress = in_progress(case.monitor);
        if let (Some(turn), None) = (turn, in_progress) {
            return Ok(turn);
        }
        if in_progress
            .is_some_and(|in_progress| try_end_initialization(monitor, in_progress, false))
        {
            continue;
        }
        case.still_waits()?;
        if since.0 != in_progress {
            since = (in_progress, Instant::now());
        }
        if since.1.elapsed() >= TIMEOUT {
            return Err(case.deny(&RefusalReason::UvmBusy));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Ends the initialization for which the calling thread's earlier call was passed through: that call has finished.
pub(crate) fn end_earlier_initialization(case: &Case<'_>) {
    let in_progress = in_progress(case.monitor);
    let is_of_thread = |of: &Initialization| of.tid.cast_signed() == case.tid();
    // While this call is valid, its thread waits in it, so the earlier call has finished. Otherwise nothing is known.
    if let Some(in_progress) = in_progress.filter(is_of_thread).filter(|_| case.is_valid()) {
        try_end_initialization(case.monitor, in_progress, true);
    }
}

/// Enters that this call's initialization has finished without effect: the caller did not take the reply, so the call
/// was not passed through.
pub(crate) fn cancel_initialization(case: &Case<'_>) {
    let in_progress = in_progress(case.monitor);
    let is_this = |of: &Initialization| of.id == case.notice.id;
    if let Some(in_progress) = in_progress.filter(is_this).filter(|_| case.effects.initializes) {
        end_initialization(case.monitor, in_progress, false);
    }
}
