//! Ranges of files of UVM's, made and freed.

use std::cell::Cell;
use std::collections::BTreeSet;

use crate::ledger::{Span, Tree};
use crate::monitor::caller::listener::Reply;
use crate::monitor::calls::case::{Case, Over};
use crate::monitor::calls::uvm_file::{
    ask, gpu_of, on_lane_for_uvm, on_lane_with_file, refuse_condemned,
};
use crate::monitor::state::lane::OnLane;
use crate::monitor::state::space::Space;
use crate::monitor::uvm::files::UvmFile;
use crate::monitor::uvm::ranges::{PAGE_BYTES, Ranges};
use crate::rm::number::{NV_ERR_INSUFFICIENT_RESOURCES, NV_ERR_INVALID_ADDRESS, NV_OK};
use crate::rm::uvm::Range;
use crate::rm::{Answer, Meaning};

/// The place of what is kept by a file alone, among its GPUs.
pub(crate) const NO_GPU: u16 = u16::MAX;

/// What the driver takes for a range: whole pages (`uvm_api_range_invalid_4k`).
fn pages(range: Range) -> Option<Span> {
    let is_whole = (range.base | range.length).is_multiple_of(PAGE_BYTES);
    Span::of(range.base, range.length).filter(|_| is_whole)
}

/// Has the driver make a range, and remembers it before its caller hears of it.
pub(crate) fn make_range(
    case: &mut Case<'_>,
    range: Range,
    make: impl FnOnce(&mut Case<'_>, &OnLane<'_>, u32) -> Result<Reply, Over>,
) -> Result<Reply, Over> {
    on_lane_with_file(case, |case, lane, UvmFile { number: file, .. }| {
        let file = *file;
        let space = Space::File(file);
        let room = case.parts.uvm.has_room_for_range();
        if !room || !case.books().ranges.has_room_for(space, range.base, range.length) {
            case.log("more ranges than can be kept account of");
            return Err(case.answer(Answer::Status(NV_ERR_INSUFFICIENT_RESOURCES)));
        }
        let known = case.books().ranges.range(space, range.base);
        let known = known == Some((range.base, range.length));
        let ranges = Ranges::of(&case.parts.state.release, case.device()?);
        if case.asked_before && !known && ranges.is_external(range.base) == Some(false) {
            // The worker before may have made it: once more from the start.
            ranges.free(range);
        }
        let done = make(case, lane, file)?;
        if case.asked_before && known && case.was_done_already() {
            case.patch(Meaning::Status, NV_OK.into());
        }
        if case.status() == NV_OK {
            case.books().add_range(space, range.base, range.length);
        }
        Ok(done)
    })
}

/// Ranges of a file that aren't there any more are forgotten.
pub(crate) fn withdraw_gone(case: &Case<'_>, file: u32) {
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

/// The pages of a range.
pub(crate) fn span(case: &mut Case<'_>, range: Range) -> Result<Span, Over> {
    let span = pages(range);
    span.ok_or_else(|| case.answer(Answer::Status(NV_ERR_INVALID_ADDRESS)))
}

/// Asks for what ends mappings, and enters what it ended if it was done: by the call, or by the
/// worker before, as `was_done` tells.
pub(crate) fn end_mappings(
    case: &mut Case<'_>,
    was_done: impl FnOnce(&Case<'_>, Option<u32>) -> bool,
    enter: impl FnOnce(&Case<'_>, u32),
) -> Result<Reply, Over> {
    let lane = on_lane_for_uvm(case)?;
    let file = case.parts.uvm.files.find(case.device()?);
    file.iter().try_for_each(|file| refuse_condemned(case, file))?;
    let known = file.map(|file| file.number);
    ask(case)?;
    if case.asked_before && case.was_done_already() && was_done(case, known) {
        case.patch(Meaning::Status, NV_OK.into());
    }
    // What a larger struct says in our status's place isn't its status.
    let is_done = case.status() == NV_OK && !case.scratch.bytes.was_exceeded();
    if let Some(file) = known.filter(|_| is_done) {
        enter(case, file);
    }
    case.parts.stakes.free_stakes(&lane);
    drop(lane);
    Ok(case.executed(None))
}

/// A GPU's mappings end within a range.
pub(crate) fn unmap(case: &mut Case<'_>, uuid: [u8; 16], range: Range) -> Result<Reply, Over> {
    end_mappings(
        case,
        |_, _| false,
        |case, file| {
            if let (Some(gpu), Some(span)) = (gpu_of(case, uuid), pages(range)) {
                case.books().unmap(Tree { file, gpu }, span);
            }
        },
    )
}

/// A range ends that begins at `base`, with all that is mapped there.
pub(crate) fn free_range(
    case: &mut Case<'_>,
    base: u64,
    length: Option<u64>,
) -> Result<Reply, Over> {
    let is_freed = Cell::new(false);
    end_mappings(
        case,
        |case, file| {
            is_freed.set(was_freed(case, file, base, length));
            is_freed.get()
        },
        |case, file| {
            // Of one that the worker before had freed, whatever its length was said to be,
            // what is still there stays.
            enter_freed(case, file, base, length.filter(|_| !is_freed.get()));
            case.books().remove_range(Space::File(file), base);
        },
    )
}

/// Enters that a range is freed, which has that length where it's known.
fn enter_freed(case: &Case<'_>, file: u32, base: u64, length: Option<u64>) {
    let pieces: Vec<(Tree, Span)> = {
        let books = case.books();
        let pieces = books.ledger.pieces(file).map(|(tree, span, _)| (tree, span));
        pieces.filter(|(_, span)| span.last >= base).collect()
    };
    let own = Tree { file, gpu: NO_GPU };
    let of_range = pieces.iter().find(|(tree, span)| *tree == own && span.first == base);
    if let Some((tree, span)) = of_range {
        return case.books().unmap(*tree, *span);
    }
    // The driver frees no range of which this isn't the length.
    let known = length.map(|length| Span::of(base, length));
    let ended = known.unwrap_or_else(|| ended_from(case, base, &pieces));
    if let Some(ended) = ended {
        let trees: BTreeSet<Tree> = pieces.iter().map(|(tree, _)| *tree).collect();
        let mut books = case.books();
        for tree in trees.into_iter().filter(|tree| *tree != own) {
            books.unmap(tree, ended);
        }
    }
}

/// Whether a range that the driver doesn't know is one that the worker before had it free: one
/// that it had made with that length, or none that begins there any more.
fn was_freed(case: &Case<'_>, file: Option<u32>, base: u64, length: Option<u64>) -> bool {
    let made = file.and_then(|file| case.books().ranges.range(Space::File(file), base));
    match made.filter(|(first, _)| *first == base) {
        Some((_, bytes)) => length.is_none_or(|length| length == bytes),
        None => is_in_range(case, base) == Some(false),
    }
}

/// How far a range went that began at `base` and is freed, as far as there are pieces of
/// it: the first one behind that is still in a range ends it.
fn ended_from(case: &Case<'_>, base: u64, pieces: &[(Tree, Span)]) -> Option<Span> {
    let inside = pieces.iter().filter(|(tree, span)| tree.gpu != NO_GPU && span.first >= base);
    let mut spans: Vec<Span> = inside.map(|(_, span)| *span).collect();
    spans.sort_unstable_by_key(|span| (span.first, span.last));
    let mut last: Option<u64> = None;
    let mut probed = None;
    for span in spans {
        // A piece may go beyond the range that it's in, where the driver refused that.
        if probed != Some(span.first) && is_in_range(case, span.first)? {
            last = last.map(|last| last.min(span.first - 1));
            break;
        }
        probed = Some(span.first);
        last = last.max(Some(span.last));
    }
    last.map(|last| Span { first: base, last })
}

fn is_in_range(case: &Case<'_>, address: u64) -> Option<bool> {
    Ranges::of(&case.parts.state.release, case.device().ok()?).is_external(address)
}
