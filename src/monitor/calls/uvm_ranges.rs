//! Calls that make and free ranges of files of nvidia-uvm.

use crate::ledger::{Span, Tree};
use crate::monitor::caller::Reply;
use crate::monitor::calls::case::retry::begin_on_lane_in_turn;
use crate::monitor::calls::case::{Case, EarlyReply};
use crate::monitor::calls::uvm_file::{call_uvm, change_on_lane, gpu_of, refuse_denied};
use crate::monitor::decide::{Denial, freed_spans};
use crate::monitor::state::{OnLane, Space};
use crate::monitor::uvm::{PAGE_BYTES, Ranges, UvmFile};
use crate::rm::Answer;
use crate::rm::number::{NV_ERR_INVALID_ADDRESS, NV_OK};
use crate::rm::uvm::Range;

/// The pages of a range; `None` where they aren't whole, so that the driver refuses the range
/// (`uvm_api_range_invalid_4k`).
fn pages(range: Range) -> Option<Span> {
    let is_whole = (range.base | range.length).is_multiple_of(PAGE_BYTES);
    Span::of(range.base, range.length).filter(|_| is_whole)
}

/// Has the driver make a range, and enters the range before the caller gets the reply.
pub(crate) fn make_range(
    case: &mut Case<'_>,
    range: Range,
    make: impl FnOnce(&mut Case<'_>, &OnLane<'_>, u32) -> Result<Reply, EarlyReply>,
) -> Result<Reply, EarlyReply> {
    change_on_lane(case, |case, lane, UvmFile { number: file, .. }| {
        let file = *file;
        let space = Space::File(file);
        let room = case.parts.uvm.has_room_for_range();
        if !room || !case.books().ranges.has_room_for(space, range.base, range.length) {
            return Err(case.deny(&Denial::Full("ranges")));
        }
        let done = make(case, lane, file)?;
        if case.status() == NV_OK {
            case.books().add_range(space, range.base, range.length);
        }
        Ok(done)
    })
}

/// Forgets the ranges of a file that the driver doesn't have any more.
pub(crate) fn remove_gone_ranges(case: &Case<'_>, file: u32) {
    let Ok(device) = case.device() else { return };
    let known = case.books().ranges.of(Space::File(file));
    for (base, length) in known {
        if Ranges::of(&case.parts.state.release, device).is_whole(Range { base, length })
            == Some(false)
        {
            case.books().remove_range(Space::File(file), base);
        }
    }
}

/// The pages of a range. Refuses the call where they aren't whole.
pub(crate) fn span(case: &mut Case<'_>, range: Range) -> Result<Span, EarlyReply> {
    let span = pages(range);
    span.ok_or_else(|| case.answer(Answer::Status(NV_ERR_INVALID_ADDRESS)))
}

/// Makes a call that ends mappings, and has `enter` enter what ended, where the driver did it. `enter` is told the file.
pub(crate) fn end_mappings(
    case: &mut Case<'_>,
    enter: impl FnOnce(&Case<'_>, u32),
) -> Result<Reply, EarlyReply> {
    let lane = begin_on_lane_in_turn(case)?;
    let file = case.parts.uvm.files.find(case.device()?);
    file.iter().try_for_each(|file| refuse_denied(case, file))?;
    call_uvm(case)?;
    // In a struct that is larger than the known one, what is read as the status isn't the status.
    let is_done = case.status() == NV_OK && !case.scratch.bytes.was_exceeded();
    if let Some(file) = file.filter(|_| is_done) {
        enter(case, file.number);
    }
    case.parts.stakes.free_stakes(&lane);
    drop(lane);
    Ok(case.executed(None))
}

/// Ends a GPU's mappings within a range.
pub(crate) fn unmap(
    case: &mut Case<'_>,
    uuid: [u8; 16],
    range: Range,
) -> Result<Reply, EarlyReply> {
    end_mappings(case, |case, file| {
        if let (Some(gpu), Some(span)) = (gpu_of(case, uuid), pages(range)) {
            case.books().unmap(Tree { file, gpu }, span);
        }
    })
}

/// Frees the range that begins at `base`, and ends all mappings in it.
pub(crate) fn free_range(
    case: &mut Case<'_>,
    base: u64,
    length: Option<u64>,
) -> Result<Reply, EarlyReply> {
    end_mappings(case, |case, file| {
        enter_freed(case, file, base, length);
        case.books().remove_range(Space::File(file), base);
    })
}

/// Enters that the range at `base` is freed. `length` is in bytes; `None` where it isn't known.
fn enter_freed(case: &Case<'_>, file: u32, base: u64, length: Option<u64>) {
    let pieces: Vec<(Tree, Span)> = {
        let books = case.books();
        let pieces = books.ledger.pieces(file).map(|(tree, span, _)| (tree, span));
        pieces.filter(|(_, span)| span.last >= base).collect()
    };
    let freed = freed_spans(file, &pieces, (base, length), |at| is_in_range(case, at));
    let mut books = case.books();
    freed.into_iter().for_each(|(tree, span)| books.unmap(tree, span));
}

fn is_in_range(case: &Case<'_>, address: u64) -> Option<bool> {
    Ranges::of(&case.parts.state.release, case.device().ok()?).is_external(address)
}
