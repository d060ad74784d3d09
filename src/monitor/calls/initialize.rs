//! Calls that initialize a file of nvidia-uvm.
//!
//! A file is bound to the memory of the process that initializes it. The kernel finds that process in the call itself,
//! and reports it nowhere. So each file is granted to the first process that asks, and never to another one.

use crate::monitor::caller::Reply;
use crate::monitor::calls::case::{Case, EarlyReply};
use crate::monitor::calls::uvm_file::{call_uvm, keep_file};
use crate::monitor::decide::{Continued, Denial};
use crate::monitor::journal::Maker;
use crate::monitor::uvm::{image_hash, is_randomized, was_initialized};
use crate::rm::number::NV_ERR_BUSY_RETRY;
use crate::rm::{Answer, uvm};

/// Lets a call that initializes a file continue. Sets the flag that turns HMM off in the caller's struct first; the
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
        // Initializing an initialized file binds nothing, whichever process calls: the driver only compares the flags.
        call_uvm(case)?;
        return Ok(case.executed(None));
    }
    let Some(image) = image_hash(process).filter(|_| is_randomized(process)) else {
        return Err(case.deny(&Denial::NotRandom));
    };
    let place = case.device()?.place;
    if !case.books().note_node(place) {
        return Err(case.deny(&Denial::UvmNodesFull));
    }
    case.target()?.write(&[Some((address, &case.scratch.bytes))])?;
    // If the caller has exited, the image may be another process's program.
    case.still_waits()?;
    if !case.books().grant_file(file.number, Maker { process, image }) {
        return Err(case.deny(&Denial::UvmGranted));
    }
    Ok(case.continued(Continued::UvmBind))
}

/// Whether the call's file is initialized. Refuses the call if that can't be told.
pub(crate) fn is_initialized(case: &mut Case<'_>) -> Result<bool, EarlyReply> {
    let known = was_initialized(&case.parts.state.release, case.device()?);
    known.ok_or_else(|| case.answer(Answer::Status(NV_ERR_BUSY_RETRY)))
}
