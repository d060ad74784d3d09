//! Serves one driver call, from its receipt to its reply, in this order:
//! 1. A thread of [`threads`](crate::monitor::calls::threads) receives the notification.
//! 2. [`serve`] decodes the system call from its registers.
//! 3. [`ioctl`] lets requests continue that only look like the driver's. [`read_escape`] copies the struct of a call to
//!    `nvidiactl` or `nvidiaN`, and has [`decide`](crate::monitor::decide) judge the call by these bytes.
//! 4. [`identify`] duplicates the descriptor, finds out which driver file it is, and notes the calling process.
//! 5. [`answer_escape`] refuses, continues or executes the call, as it was judged. [`serve_uvm`] copies and judges
//!    calls to `nvidia-uvm` itself. [`serve_map`] charges managed memory, and continues the mapping.
//! 6. To be executed, a call waits for its thread's earlier call where signals interrupt calls, and for the lane where
//!    it makes, names or frees objects. [`decide`](crate::monitor::decide) says by the books what is charged or
//!    entered, or why the call is refused. The driver is called on the copies, and the books get the result.
//! 7. [`finish`], while the caller waits, writes the results to the caller's memory and replies.
//!    Where signals interrupt calls, and the caller doesn't take the reply, the results are kept
//!    ([`retry`](crate::monitor::calls::case::retry)).

use nix::errno::Errno;

use crate::gate::settings::NodeKind;
use crate::gate::syscall::{self, Syscall};
use crate::gate::traps;
use crate::monitor::caller::Reply;
use crate::monitor::calls::case::retry::{end, remember_answer};
use crate::monitor::calls::case::{Case, EarlyReply, continue_other_call};
use crate::monitor::calls::escape::{ReadEscape, answer_escape, read_escape};
use crate::monitor::calls::identify::{caller_error, identify, note_caller, spare_runtime};
use crate::monitor::calls::initialize::{cancel_initialization, end_earlier_initialization};
use crate::monitor::calls::mmap::serve_map;
use crate::monitor::calls::uvm::serve_uvm;
use crate::monitor::snapshot::Count;
use crate::rm::number::NV_OK;
use crate::rm::{self, Answer, Command, refuse};

pub(crate) fn serve(case: &mut Case<'_>) {
    end_earlier_initialization(case);
    let data = case.notice.data;
    let reply = match syscall::decode(data.arch, data.nr, &data.args) {
        Some(Syscall::Ioctl { descriptor, request, argument }) => {
            ioctl(case, descriptor, request, argument)
        }
        Some(Syscall::Map { descriptor, length, shared, offset }) => {
            serve_map(case, descriptor, length, shared, offset)
        }
        None => {
            if case.parts.state.log.limit.take_line() {
                tracing::warn!(number = data.nr, "a system call that nobody asked for");
            }
            Err(Errno::ENOSYS.into())
        }
    };
    finish(case, reply.unwrap_or_else(|over| over));
}

fn finish(case: &mut Case<'_>, mut reply: Reply) {
    let was_done = reply == Reply::Done && case.retry.repeats && case.was_done_already();
    if was_done {
        case.write_nothing();
        case.retry.is_begun = true;
        case.effects.counted = Count::Executed;
    }
    let is_ok = match &case.retry.kept {
        Some(outcome) => outcome.is_ok,
        None => was_done || reply == Reply::Done && has_succeeded(case),
    };
    // Where signals interrupt calls, an earlier call of the thread may have written to that memory since it was read.
    if case.parts.callers.interrupted.is_none() {
        case.effects.writes.drop_unchanged(case.scratch);
    }
    // The call is counted before the reply: the caller may ask for the figure next.
    case.parts.state.count(case.effects.counted, case.came.elapsed());
    let writes = case.retry.kept.is_some() || !case.effects.writes.is_empty();
    let mut taken = false;
    if !writes && case.effects.made.is_empty() || case.is_valid() {
        // The driver fails with the same error, and what it did stays done, too.
        if write_output(case).is_err() {
            reply = Reply::Errno(Errno::EFAULT as i32);
        }
        if is_ok {
            remember_answer(case);
        }
        taken = case.listener.send(case.notice.id, reply.parts());
    }
    if !taken {
        cancel_initialization(case);
    }
    end(case, taken, (reply, is_ok));
    case.scratch.shrink();
}

/// Writes the output to the caller's memory: this call's, or the kept output of the same call made earlier.
fn write_output(case: &Case<'_>) -> Result<(), Errno> {
    let Some(target) = &case.target else { return Ok(()) };
    match &case.retry.kept {
        Some(kept) => kept
            .output
            .iter()
            .try_for_each(|(address, bytes)| target.write(&[Some((*address, bytes))])),
        None => case.effects.writes.write(target, case.scratch),
    }
}

fn has_succeeded(case: &Case<'_>) -> bool {
    case.effects.status_layout.is_some() && case.status() == NV_OK
}

fn ioctl(
    case: &mut Case<'_>,
    descriptor: i32,
    request: u32,
    argument: u64,
) -> Result<Reply, EarlyReply> {
    // The filter also traps requests of a size that no known release has. Those of other files continue.
    if !traps::is_decided_by_monitor(request) {
        refuse_grown(case, descriptor, request)?;
        return Ok(continue_other_call(case));
    }
    // The struct is read before the descriptor is looked at: some calls continue whatever their descriptor is, and a
    // look at it would prove nothing.
    let mut escape = None;
    if traps::is_escape(request) {
        let target = case.parts.callers.targets.probable(case.tid());
        case.target = Some(target.map_err(|errno| caller_error(case, errno))?);
        spare_runtime(case)?;
        let read = read_escape(case, request, argument);
        if let Some(passed) = read.as_ref().ok().and_then(ReadEscape::passes) {
            let target = case.parts.callers.targets.get(case.tid());
            case.target = Some(target.map_err(|errno| caller_error(case, errno))?);
            spare_runtime(case)?;
            note_caller(case)?;
            return Ok(case.continued(passed));
        }
        escape = Some(read);
    }
    identify(case, descriptor)?;
    match (case.device()?.kind, escape) {
        (NodeKind::Control | NodeKind::Gpu(_), escape) => {
            let escape = escape.unwrap_or_else(|| read_escape(case, request, argument));
            answer_escape(case, escape)
        }
        (NodeKind::Uvm, _) => serve_uvm(case, request, argument),
        (NodeKind::Other, _) => Err(Errno::ENOTTY.into()),
    }
}

/// Refuses an escape whose struct has grown in a newer driver. `Ok` where its descriptor is no file of the resource
/// manager's: it continues. A program that swaps the descriptor could as well have used a request of another type.
fn refuse_grown(case: &mut Case<'_>, descriptor: i32, request: u32) -> Result<(), EarlyReply> {
    let is_driver_file = identify(case, descriptor).is_ok()
        && matches!(case.device()?.kind, NodeKind::Control | NodeKind::Gpu(_));
    if !is_driver_file {
        return Ok(());
    }
    let command = Command::of_ioctl(request);
    match rm::decode(&case.parts.state.release, command, &vec![0; command.size()]) {
        Err(refusal) => Err(case.deny(&refusal.into())),
        Ok(_) => Err(case.answer(Answer::Errno(refuse::EINVAL))),
    }
}
