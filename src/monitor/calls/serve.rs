//! One call: read, decided, made or not, answered.
//!
//! A [`Case`] has all that one call needs, and is done when [`serve`] returns.
//! What the caller gets back is written only while it waits: what was done for one
//! that doesn't is kept ([`retry`](crate::monitor::calls::case::retry)). All of it is one call's way from its beginning to its end.

use nix::errno::Errno;

use crate::gate::settings::NodeKind;
use crate::gate::syscall::{self, Syscall};
use crate::gate::traps;
use crate::monitor::caller::listener::Reply;
use crate::monitor::calls::case::retry::{keep, remember_answer};
use crate::monitor::calls::case::{Case, Over, continue_other_call};
use crate::monitor::calls::escape::{ReadEscape, answer_escape, read_escape};
use crate::monitor::calls::initialize::{cancel_initialization, settle_earlier_initialization};
use crate::monitor::calls::mmap::map;
use crate::monitor::calls::open::{leave_the_runtime_alone, open, out_of_reach, see};
use crate::monitor::calls::uvm::uvm;
use crate::monitor::journal::map::Count;
use crate::rm::number::NV_OK;
use crate::rm::{self, Answer, Command, refuse};

/// Deals with it.
pub(crate) fn serve(case: &mut Case<'_>) {
    settle_earlier_initialization(case);
    let data = case.notice.data;
    let reply = match syscall::decode(data.arch, data.nr, &data.args) {
        Some(Syscall::Ioctl { descriptor, request, argument }) => {
            ioctl(case, descriptor, request, argument)
        }
        Some(Syscall::Map { descriptor, length, shared, offset }) => {
            map(case, descriptor, length, shared, offset)
        }
        Some(call @ (Syscall::Prctl { .. } | Syscall::Personality { .. })) => {
            Ok(call.refusal().map_or_else(|| continue_other_call(case), Reply::Errno))
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

/// Writes back, and replies; keeps what was done for a caller that doesn't wait.
fn finish(case: &mut Case<'_>, mut reply: Reply) {
    // Its caller's memory may keep us.
    case.lane = None;
    let was_done = reply == Reply::Done && case.retry.repeats && case.was_done_already();
    if was_done {
        case.write_nothing();
        case.retry.is_begun = true;
        case.effects.counted = Count::Executed;
    }
    let is_ok = match case.retry.outcome() {
        Some(outcome) => outcome.is_ok,
        None => was_done || reply == Reply::Done && is_ok(case),
    };
    let object = case.slot.call_object();
    let interruptible = case.parts.state.settings.interruptible;
    // An earlier call of the thread may have written there since.
    if !interruptible {
        case.effects.writes.drop_unchanged(case.scratch);
    }
    // Before the caller goes on, who may ask for the figure.
    case.parts.state.count(case.effects.counted, case.came.elapsed());
    let writes = case.retry.kept.is_some() || !case.effects.writes.is_empty();
    let mut taken = false;
    // What was made is to be found by the next worker if nobody takes it.
    if !writes && case.effects.made.is_empty() || case.is_valid() {
        // As the driver: what was done stays done.
        if write(case).is_err() {
            reply = Reply::Errno(Errno::EFAULT as i32);
        }
        if interruptible && is_ok {
            remember_answer(case);
        }
        let parts = reply.parts();
        case.slot.set_decided(parts);
        taken = case.listener.send(case.notice.id, parts);
    }
    if !taken {
        cancel_initialization(case);
        keep(case, (reply, is_ok), object);
        // What is kept has from now on what is to be undone. Another thread may have cleared the slot
        // already, which may have another call by now.
        case.slot.forget(case.notice.id);
    }
    if case.retry.is_queued {
        case.parts.callers.thread_order.leave(case.slot.number());
    }
    case.scratch.shrink();
}

/// Writes what is to go back, of this call or of the one that was made in its place.
fn write(case: &Case<'_>) -> Result<(), Errno> {
    let Some(target) = &case.target else { return Ok(()) };
    match case.retry.outcome() {
        Some(outcome) => outcome
            .output
            .iter()
            .try_for_each(|(address, bytes)| target.write(&[Some((*address, bytes))])),
        None => case.effects.writes.write(target, case.scratch),
    }
}

/// Whether the driver has done it, as far as it says.
fn is_ok(case: &Case<'_>) -> bool {
    case.effects.status_layout.is_some() && case.status() == NV_OK
}

fn ioctl(case: &mut Case<'_>, descriptor: i32, request: u64, argument: u64) -> Result<Reply, Over> {
    // The filter is coarser than we are. Who the descriptor belongs to is no question:
    // the request can't change any more, and is none that takes memory.
    if !traps::is_driver_call(rm::low_word(request)) {
        if traps::may_have_grown(rm::low_word(request)) {
            refuse_grown(case, descriptor, request)?;
        }
        return Ok(continue_other_call(case));
    }
    // Read before it's known whose it is: what continues whatever its descriptor is, is
    // let go without a look at it, which would prove nothing.
    let mut escape = None;
    if traps::is_escape(rm::low_word(request)) {
        let target = case.parts.callers.targets.probable(case.tid());
        case.target = Some(target.map_err(|errno| out_of_reach(case, errno))?);
        leave_the_runtime_alone(case)?;
        let read = read_escape(case, request, argument);
        if let Some(passed) = read.as_ref().ok().and_then(ReadEscape::passes) {
            let target = case.parts.callers.targets.get(case.tid());
            case.target = Some(target.map_err(|errno| out_of_reach(case, errno))?);
            leave_the_runtime_alone(case)?;
            see(case)?;
            return Ok(case.continued(passed));
        }
        escape = Some(read);
    }
    open(case, descriptor)?;
    match (case.device()?.kind, escape) {
        (NodeKind::Control | NodeKind::Gpu(_), escape) => {
            let escape = escape.unwrap_or_else(|| read_escape(case, request, argument));
            answer_escape(case, escape)
        }
        (NodeKind::Uvm, _) => uvm(case, request, argument),
        (NodeKind::Other, _) => Err(Errno::ENOTTY.into()),
    }
}

/// A newer driver's call whose struct has grown is refused; of no file of the driver's it's
/// nobody's business, and whoever swaps the descriptor could as well have asked by another type.
fn refuse_grown(case: &mut Case<'_>, descriptor: i32, request: u64) -> Result<(), Over> {
    let is_drivers = open(case, descriptor).is_ok()
        && matches!(case.device()?.kind, NodeKind::Control | NodeKind::Gpu(_));
    if !is_drivers {
        return Ok(());
    }
    let command = Command::of_ioctl(request);
    match rm::decode(&case.parts.state.release, command, &vec![0; command.size()]) {
        Err(refusal) => Err(case.refused(&refusal)),
        Ok(_) => Err(case.answer(Answer::Errno(refuse::EINVAL))),
    }
}
