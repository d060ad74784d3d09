//! Serves one driver call, from its receipt to its reply, in this order:
//! 1. A thread of [`threads`](crate::calls::threads) receives the notification.
//! 2. [`serve`] decodes the system call from its registers.
//! 3. [`ioctl`] passes requests through that only look like the driver's. [`read_escape`] copies the struct of a call
//!    to `nvidiactl` or `nvidiaN` (an escape, `NV_ESC_…`), unwraps it, and has [`decide`](crate::decide) judge the call
//!    by these bytes. The descriptor's file is not checked yet: some calls don't need it
//!    ([`Continued::needs_no_descriptor`]). What was read is the caller's if the caller still waits.
//! 4. [`identify`] duplicates the descriptor, finds out which driver file it is, and notes the calling process.
//! 5. [`answer_escape`] refuses the call, passes it through, or has the function for its kind make it, such as
//!    [`allocate`]. [`serve_uvm`] copies and judges calls to `nvidia-uvm` itself. [`serve_map`] charges managed memory,
//!    and passes the mapping through.
//! 6. To be proxied, a call waits for the RM lock if it makes, names or frees objects. [`decide`](crate::decide)
//!    determines from the state what is charged or entered, or why the call is refused. The driver is called on the
//!    copies, and the state gets the result.
//! 7. [`finish`], while the caller waits, writes the results to the caller's memory and replies.
//!
//! If signals interrupt calls, a call first waits for its thread's earlier call, and the results are retained if the
//! caller doesn't take the reply.

use std::sync::atomic::Ordering;

use nix::errno::Errno;

use crate::caller::{Copy, Reply};
use crate::calls::alloc::{allocate, allocate_memory, free, serve_heap};
use crate::calls::control::control;
use crate::calls::duplicate::duplicate;
use crate::calls::groups::enter_passing_channel;
use crate::case::{
    Case, EarlyReply, caller_error, continue_other_call, identify, ignore_runtime,
    keep_if_unclaimed, note_caller, remember_answer, write_log,
};
use crate::decide::{self, Continued, RefusalReason, Verdict};
use crate::gate::settings::NodeKind;
use crate::gate::syscall::{self, Syscall};
use crate::gate::traps;
use crate::log::Topic;
use crate::snapshot::Count;
use crate::uvm::{cancel_initialization, end_earlier_initialization, serve_map, serve_uvm};
use nvrm::number::{NV_ERR_INSERT_DUPLICATE_NAME, NV_ERR_STATE_IN_USE, NV_OK};
use nvrm::{Answer, Call, Command, Decoded, Refusal, refuse};

pub(crate) fn serve(case: &mut Case<'_>) {
    if case.monitor.uvm_files.may_be_in_progress.load(Ordering::SeqCst) {
        end_earlier_initialization(case);
    }
    let data = case.notice.data;
    let reply = match syscall::decode(data.arch, data.nr, &data.args) {
        Some(Syscall::Ioctl { descriptor, request, argument }) => {
            ioctl(case, descriptor, request, argument)
        }
        Some(Syscall::Map { descriptor, length, shared, offset }) => {
            serve_map(case, descriptor, length, shared, offset)
        }
        None => {
            if case.monitor.log.limit.take_line() {
                tracing::warn!(number = data.nr, "an unexpected system call");
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
        case.is_begun = true;
        case.effects.counted = Count::Executed;
    }
    let is_ok = match &case.retry.retained {
        Some(retained) => retained.is_ok,
        None => was_done || reply == Reply::Done && has_succeeded(case),
    };
    // If signals interrupt calls, an earlier call of the thread may have written to that memory since it was read.
    if case.monitor.interrupted.is_none() {
        case.effects.writes.drop_unchanged(case.scratch);
    }
    // The call is counted before the reply: the caller may ask for the figure next.
    case.monitor.count(case.effects.counted, case.came.elapsed());
    let writes = case.retry.retained.is_some() || !case.effects.writes.is_empty();
    let mut taken = false;
    if !writes && case.effects.made.is_empty() || case.is_valid() {
        // The driver fails with the same error, and what it did stays done, too.
        if write_output(case).is_err() {
            reply = Reply::Errno(Errno::EFAULT as i32);
        }
        if let (Some(calls), true) = (&case.monitor.interrupted, is_ok) {
            remember_answer(case, calls);
        }
        taken = case.listener.send(case.notice.id, reply.parts());
    }
    if !taken {
        cancel_initialization(case);
    }
    if let Some(calls) = &case.monitor.interrupted {
        keep_if_unclaimed(case, calls, taken, (reply, is_ok));
    }
    case.scratch.shrink();
}

/// Writes the output to the caller's memory: this call's, or the retained output of the same call made earlier.
fn write_output(case: &Case<'_>) -> Result<(), Errno> {
    let Some(target) = &case.target else { return Ok(()) };
    match &case.retry.retained {
        Some(retained) => retained
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
    // The filter also traps requests of a size that no known release has. Those of other files are passed through.
    if !traps::is_decided_by_monitor(request) {
        refuse_grown(case, descriptor, request)?;
        return Ok(continue_other_call(case));
    }
    // The struct is read before the descriptor is checked: some calls are passed through whatever their descriptor is,
    // and a check of it would prove nothing.
    let mut escape = None;
    if traps::is_escape(request) {
        let target = case.monitor.targets.probable(case.tid());
        case.target = Some(target.map_err(|errno| caller_error(case, errno))?);
        ignore_runtime(case)?;
        let read = read_escape(case, request, argument);
        if let Some(passed) = read.as_ref().ok().and_then(ReadEscape::passes) {
            let target = case.monitor.targets.get(case.tid());
            case.target = Some(target.map_err(|errno| caller_error(case, errno))?);
            ignore_runtime(case)?;
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

/// Refuses an escape whose struct has grown in a newer driver. `Ok` if its descriptor is no file of the resource
/// manager: it is passed through. A program that swaps the descriptor could as well have used a request of another
/// type.
fn refuse_grown(case: &mut Case<'_>, descriptor: i32, request: u32) -> Result<(), EarlyReply> {
    let is_driver_file = identify(case, descriptor).is_ok()
        && matches!(case.device()?.kind, NodeKind::Control | NodeKind::Gpu(_));
    if !is_driver_file {
        return Ok(());
    }
    let command = Command::of_ioctl(request);
    match nvrm::decode(&case.monitor.release, command, &vec![0; command.size()]) {
        Err(refusal) => Err(case.deny(&refusal.into())),
        Ok(_) => Err(case.answer(Answer::Errno(refuse::EINVAL))),
    }
}

/// An escape as it was read, whichever file it is made on.
#[derive(Debug)]
pub(crate) struct ReadEscape {
    command: Command,
    address: u64,
    decoded: Decoded,
    verdict: Verdict,
    /// Whether another call wrapped this one.
    wrapped: bool,
}

/// Why an escape isn't read.
#[derive(Debug)]
pub(crate) enum Unread {
    Memory(Reply),
    Refused(Refusal),
}

impl ReadEscape {
    /// Why the call is passed through whichever file its descriptor is; `None` if it isn't.
    pub(crate) fn passes(&self) -> Option<Continued> {
        match self.verdict {
            Verdict::Continue(passed) if !self.wrapped && passed.needs_no_descriptor() => {
                Some(passed)
            }
            _ => None,
        }
    }
}

/// The statuses of an object that is made already, and of one that is exported already. The status of one that is freed
/// already isn't here: the driver says the same to many calls.
const DONE_ALREADY: [u32; 2] = [NV_ERR_INSERT_DUPLICATE_NAME, NV_ERR_STATE_IN_USE];

/// Reads an escape and the call that it wraps, and judges the call by its bytes alone.
fn read_escape(case: &mut Case<'_>, request: u32, argument: u64) -> Result<ReadEscape, Unread> {
    let release = &case.monitor.release;
    let mut command = Command::of_ioctl(request);
    let mut address = argument;
    case.read_struct(address, command.size()).map_err(Unread::Memory)?;
    let mut decoded =
        nvrm::decode(release, command, &case.scratch.bytes).map_err(Unread::Refused)?;
    let mut wrapped = false;
    if let Call::Wrapped { command: inner, address: at } = decoded.call {
        (command, address, wrapped) = (inner, at, true);
        case.read_struct(address, command.size()).map_err(Unread::Memory)?;
        decoded = nvrm::decode(release, command, &case.scratch.bytes).map_err(Unread::Refused)?;
    }
    let verdict = decide::judge(release, &decoded.call);
    Ok(ReadEscape { command, address, decoded, verdict, wrapped })
}

/// Answers an escape on a file of the driver.
fn answer_escape(
    case: &mut Case<'_>,
    escape: Result<ReadEscape, Unread>,
) -> Result<Reply, EarlyReply> {
    let escape = escape.map_err(|unread| match unread {
        Unread::Memory(over) => over,
        Unread::Refused(refusal) => case.deny(&RefusalReason::Tables(refusal)),
    })?;
    let ReadEscape { command, address, decoded, verdict, wrapped } = escape;
    case.write_back(0, address, Copy::Struct);
    case.effects.status_layout = decoded.layout.map(|head| (head, &DONE_ALREADY[..]));
    case.effects.command = command;
    match verdict {
        // Nothing is done. Whether the caller still waits is asked before the reply.
        Verdict::Refuse(answer) => {
            log_once(case, &decoded.call);
            Err(case.answer(answer))
        }
        // A call that is passed through is unwrapped again by the driver, and may be any other call by then, even a
        // control. No program wraps a call whose size fits a request.
        Verdict::Continue(_) if wrapped => Err(case.answer(Answer::Errno(refuse::EINVAL))),
        Verdict::Continue(passed) => {
            case.still_waits()?;
            if let (Continued::Client, Call::Alloc(alloc)) = (passed, &decoded.call) {
                case.state().devices.forget_client(alloc.object.handle);
            }
            if let Call::Alloc(alloc) = &decoded.call {
                enter_passing_channel(case, alloc)?;
            }
            Ok(case.continued(passed))
        }
        Verdict::Execute => execute(case, &decoded),
    }
}

/// Proxies a call by its kind. Each kind asks whether the caller still waits when all that it needs is read.
fn execute(case: &mut Case<'_>, decoded: &Decoded) -> Result<Reply, EarlyReply> {
    match decoded.call {
        Call::Alloc(alloc) => allocate(case, &alloc),
        Call::AllocMemory { object, .. } => allocate_memory(case, object),
        Call::VidHeap { client, parent, function } => serve_heap(case, client, parent, function),
        Call::Free(object) => free(case, object.client, object.handle),
        Call::Dup { object, source_client, source } => {
            duplicate(case, object, (source_client, source))
        }
        Call::Control { .. } => control(case, &decoded.call),
        Call::Other => execute_plain(case),
        // None of these is the monitor's to make (`decide::judge`).
        Call::AllocObject { .. } | Call::ExportDmabuf | Call::Untrapped | Call::Wrapped { .. } => {
            Err(case.answer(Answer::Errno(refuse::EINVAL)))
        }
    }
}

/// Makes a call that takes, frees and shows no memory, and whose struct has no address or descriptor of the caller's.
fn execute_plain(case: &mut Case<'_>) -> Result<Reply, EarlyReply> {
    case.still_waits()?;
    case.call()?;
    Ok(case.executed(None))
}

/// Logs once for each control and each class that it was refused. For an unknown one, the line has what a report needs.
fn log_once(case: &Case<'_>, call: &Call) {
    let Some(refusal) = decide::refusal(&case.monitor.release, call) else { return };
    let (topic, size) = match *call {
        Call::Control { command, params_size, .. } => (Topic::Control(command), Some(params_size)),
        Call::Alloc(alloc) => (Topic::Class(alloc.class), alloc.params_size),
        Call::AllocMemory { class, .. } | Call::AllocObject { class, .. } => {
            (Topic::Class(class), None)
        }
        _ => return,
    };
    if !case.monitor.log.limit.take_first_line(topic) {
        return;
    }
    let size = size.map_or_else(|| "no size".to_owned(), |size| format!("{size} bytes"));
    match refusal.is_unknown() {
        true => write_log(case, &format!("{refusal} ({size}, by {})", program_name(case))),
        false => write_log(case, &refusal.to_string()),
    }
}

/// The name of the caller's program. The program can choose any name.
fn program_name(case: &Case<'_>) -> String {
    let pid = case.target.as_ref().map_or(case.tid(), |target| target.pid);
    let name = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    match case.is_valid() && !name.is_empty() {
        true => String::from_utf8_lossy(&name).trim_end().escape_debug().to_string(),
        false => "a program that is gone".to_owned(),
    }
}
