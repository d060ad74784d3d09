//! Reads a call to `nvidiactl` or `nvidiaN`, unwraps it, and has it judged by its bytes.
//!
//! That is done before anybody looks whose descriptor it is, which some calls don't need:
//! see [`Passed::asks_no_descriptor`](crate::monitor::calls::policy::Passed::asks_no_descriptor). What is read is the caller's if it still waits.

use crate::monitor::caller::listener::Reply;
use crate::monitor::caller::scratch::Copy;
use crate::monitor::calls::alloc::{allocate, allocate_memory};
use crate::monitor::calls::case::{Case, Over, write_log};
use crate::monitor::calls::control::control;
use crate::monitor::calls::duplicate::duplicate;
use crate::monitor::calls::free::free;
use crate::monitor::calls::groups::enter_passing_channel;
use crate::monitor::calls::policy::{self, Passed, Verdict};
use crate::monitor::calls::vid_heap::heap;
use crate::monitor::log::limit::Topic;
use crate::rm::number::{NV_ERR_INSERT_DUPLICATE_NAME, NV_ERR_STATE_IN_USE};
use crate::rm::{self, Answer, Call, Command, Decoded, Refusal, refuse};

/// An escape as it was read, whoever it is meant for.
#[derive(Debug)]
pub(crate) struct ReadEscape {
    pub(crate) command: Command,
    pub(crate) address: u64,
    pub(crate) decoded: Decoded,
    pub(crate) verdict: Verdict,
    /// Whether another call wrapped it.
    pub(crate) wrapped: bool,
}

/// Why an escape isn't known.
#[derive(Debug)]
pub(crate) enum Unread {
    Memory(Reply),
    Refused(Refusal),
}

impl ReadEscape {
    /// Why it continues, where this is so whatever its descriptor is.
    pub(crate) fn passes(&self) -> Option<Passed> {
        match self.verdict {
            Verdict::Continue(passed) if !self.wrapped && passed.asks_no_descriptor() => {
                Some(passed)
            }
            _ => None,
        }
    }
}

/// What the driver says of an object that is made already, and of one that is exported. What it says
/// of a free, many calls are told.
const DONE_ALREADY: [u32; 2] = [NV_ERR_INSERT_DUPLICATE_NAME, NV_ERR_STATE_IN_USE];

/// Reads an escape and what it wraps, and judges it by that alone.
pub(crate) fn read_escape(
    case: &mut Case<'_>,
    request: u64,
    argument: u64,
) -> Result<ReadEscape, Unread> {
    let release = &case.parts.state.release;
    let mut command = Command::of_ioctl(request);
    let mut address = argument;
    case.read_struct(address, command.size()).map_err(Unread::Memory)?;
    let mut decoded = rm::decode(release, command, &case.scratch.bytes).map_err(Unread::Refused)?;
    let mut wrapped = false;
    if let Call::Wrapped { command: inner, address: at } = decoded.call {
        (command, address, wrapped) = (inner, at, true);
        case.read_struct(address, command.size()).map_err(Unread::Memory)?;
        decoded = rm::decode(release, command, &case.scratch.bytes).map_err(Unread::Refused)?;
    }
    let verdict = policy::judge(release, &decoded.call);
    Ok(ReadEscape { command, address, decoded, verdict, wrapped })
}

/// Deals with one whose descriptor is the driver's.
pub(crate) fn answer_escape(
    case: &mut Case<'_>,
    escape: Result<ReadEscape, Unread>,
) -> Result<Reply, Over> {
    let escape = escape.map_err(|unread| match unread {
        Unread::Memory(over) => over,
        Unread::Refused(refusal) => case.refused(&refusal),
    })?;
    let ReadEscape { command, address, decoded, verdict, wrapped } = escape;
    case.write_back(0, address, Copy::Struct);
    case.effects.status_layout = decoded.layout.map(|head| (head, &DONE_ALREADY[..]));
    case.effects.command = command;
    match verdict {
        // Nothing is done, and whether it still waits is asked before it's told.
        Verdict::Refuse(answer) => {
            log_once(case, &decoded.call);
            Err(case.answer(answer))
        }
        // What continues is unwrapped anew by the driver, and could be any call by then, also
        // a control. Nobody wraps what fits a request.
        Verdict::Continue(_) if wrapped => Err(case.answer(Answer::Errno(refuse::EINVAL))),
        Verdict::Continue(passed) => {
            case.still_waits()?;
            if let (Passed::Client, Call::Alloc(alloc)) = (passed, &decoded.call) {
                case.books().devices.forget_client(alloc.object.handle);
            }
            if let Call::Alloc(alloc) = &decoded.call {
                enter_passing_channel(case, alloc)?;
            }
            Ok(case.continued(passed))
        }
        Verdict::Execute => execute(case, &decoded),
    }
}

/// Each asks whether the caller still waits when it has read all it needs.
fn execute(case: &mut Case<'_>, decoded: &Decoded) -> Result<Reply, Over> {
    if decoded.layout.is_none() {
        return execute_plain(case);
    }
    match decoded.call {
        Call::Alloc(alloc) => allocate(case, &alloc),
        Call::AllocMemory { object, .. } => allocate_memory(case, object),
        Call::VidHeap { client, parent, function } => heap(case, client, parent, function),
        Call::Free(object) => free(case, object.client, object.handle),
        Call::Dup { object, source_client, source, .. } => {
            duplicate(case, object, (source_client, source))
        }
        Call::Control { .. } => control(case, &decoded.call),
        // None of these is the monitor's to make (`policy::judge`).
        Call::AllocObject { .. }
        | Call::ExportDmabuf { .. }
        | Call::RegisterFd { .. }
        | Call::OsEvent { .. }
        | Call::MapMemory { .. }
        | Call::Wrapped { .. }
        | Call::Other { .. } => Err(case.answer(Answer::Errno(refuse::EINVAL))),
    }
}

/// A call that takes, frees and shows no memory, whose struct has nothing of the caller's.
fn execute_plain(case: &mut Case<'_>) -> Result<Reply, Over> {
    case.still_waits()?;
    case.call()?;
    Ok(case.executed(None))
}

/// The log says once of each control and each class that it was refused, and of what isn't known
/// what a report needs.
fn log_once(case: &Case<'_>, call: &Call) {
    let Some(refusal) = policy::refusal(&case.parts.state.release, call) else { return };
    let (topic, size) = match *call {
        Call::Control { command, params_size, .. } => (Topic::Control(command), Some(params_size)),
        Call::Alloc(alloc) => (Topic::Class(alloc.class), alloc.params_size),
        Call::AllocMemory { class, .. } | Call::AllocObject { class, .. } => {
            (Topic::Class(class), None)
        }
        _ => return,
    };
    if !case.parts.state.log.limit.take_first_line(topic) {
        return;
    }
    let size = size.map_or_else(|| "no size".to_owned(), |size| format!("{size} bytes"));
    match refusal.is_unknown() {
        true => write_log(case, &format!("{refusal} ({size}, by {})", program_name(case))),
        false => write_log(case, &refusal.to_string()),
    }
}

/// The name of the caller's program, which is of its own choice.
fn program_name(case: &Case<'_>) -> String {
    let pid = case.target.as_ref().map_or(case.tid(), |target| target.pid);
    let name = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    match case.is_valid() && !name.is_empty() {
        true => String::from_utf8_lossy(&name).trim_end().escape_debug().to_string(),
        false => "a program that is gone".to_owned(),
    }
}
