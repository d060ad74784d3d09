//! Calls that initialize a file of UVM's: one at a time, and each with its maker.

use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use crate::monitor::caller::listener::Reply;
use crate::monitor::calls::case::{Case, Over};
use crate::monitor::calls::policy::Passed;
use crate::monitor::calls::uvm_file::{ask, kept};
use crate::monitor::journal::layout::Maker;
use crate::monitor::state::makers::Initialization;
use crate::monitor::uvm::address_spaces::{image, is_randomized};
use crate::rm::number::{NV_ERR_BUSY_RETRY, NV_ERR_NO_MEMORY, NV_ERR_NOT_SUPPORTED};
use crate::rm::{Answer, uvm};

/// How long a call waits for another one that isn't over.
const PATIENCE: Duration = Duration::from_secs(1);

/// How often it looks.
const LOOK: Duration = Duration::from_millis(1);

/// HMM is off in what the caller is about to ask; where a GPU is registered is looked again.
pub(crate) fn initialize(case: &mut Case<'_>, address: u64, flags: u64) -> Result<Reply, Over> {
    let process = case.target()?.process;
    let file = kept(case)?;
    if let Some(patch) = uvm::without_hmm(case.head(), flags) {
        let _ = patch.apply(&mut case.scratch.bytes);
    }
    if is_initialized(case)? {
        return initialize_again(case);
    }
    let Some(image) = image(process).filter(|_| is_randomized(process)) else {
        case.log("a program that can't be told from the next: its addresses aren't random");
        return Err(case.answer(Answer::Status(NV_ERR_NOT_SUPPORTED)));
    };
    let place = case.device()?.place;
    if !case.books().note_node(place) {
        case.log("more nodes of nvidia-uvm than can be kept account of");
        return Err(case.answer(Answer::Status(NV_ERR_NO_MEMORY)));
    }
    case.target()?.write(&[Some((address, &case.scratch.bytes))])?;
    let turn = turn_to_initialize(case)?;
    // Nobody else can do it now.
    if is_initialized(case)? {
        return initialize_again(case);
    }
    // Or it was a stranger's program.
    case.still_waits()?;
    let maker = Maker { process, image };
    let (tid, id) = (case.target()?.tid, case.notice.id);
    let underway = Initialization { file: file.number, tid: tid.cast_unsigned(), maker, id };
    case.parts.uvm.begin_initialization(underway);
    drop(turn);
    case.effects.initializes = true;
    Ok(case.continued(Passed::UvmBind))
}

/// Again it binds nothing, whoever asks: it says whether the flags are the same.
fn initialize_again(case: &mut Case<'_>) -> Result<Reply, Over> {
    ask(case)?;
    Ok(case.executed(None))
}

/// Whether the call's file was initialized.
pub(crate) fn is_initialized(case: &mut Case<'_>) -> Result<bool, Over> {
    let known = case.parts.uvm.is_initialized(case.device()?);
    known.ok_or_else(|| case.answer(Answer::Status(NV_ERR_BUSY_RETRY)))
}

/// Waits until nobody else initializes a file. Who keeps others waiting for long has a call of its
/// own that doesn't end, or runs on without another, in this container.
fn turn_to_initialize<'a>(case: &mut Case<'a>) -> Result<MutexGuard<'a, ()>, Over> {
    let parts = case.parts;
    let mut since = (None, Instant::now());
    loop {
        let turn = parts.uvm.init_turn.try_lock();
        let underway = case.books().makers.underway();
        if let (Some(turn), None) = (turn, underway) {
            return Ok(turn);
        }
        if underway.is_some_and(|underway| parts.uvm.settle_initialization(underway, false)) {
            continue;
        }
        case.still_waits()?;
        if since.0 != underway {
            since = (underway, Instant::now());
        }
        if since.1.elapsed() >= PATIENCE {
            case.log("a file of nvidia-uvm, while another's initialization isn't over");
            return Err(case.answer(Answer::Status(NV_ERR_BUSY_RETRY)));
        }
        std::thread::sleep(LOOK);
    }
}

/// Settles the initialization that the thread's call before was let go for: that call is over.
pub(crate) fn settle_earlier_initialization(case: &Case<'_>) {
    let underway = case.books().makers.underway();
    let is_of_thread = |of: &Initialization| of.tid.cast_signed() == case.tid();
    // The thread waits in this one since, or this one is no more, and tells nothing.
    if let Some(underway) = underway.filter(is_of_thread).filter(|_| case.is_valid()) {
        case.parts.uvm.settle_initialization(underway, true);
    }
}

/// Enters that the call didn't go on after all.
pub(crate) fn cancel_initialization(case: &Case<'_>) {
    let underway = case.books().makers.underway();
    let is_this = |of: &Initialization| of.id == case.notice.id;
    if let Some(underway) = underway.filter(is_this).filter(|_| case.effects.initializes) {
        case.parts.uvm.enter_settled(underway, false);
    }
}
