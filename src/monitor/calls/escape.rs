//! Escapes (`NV_ESC_…`): the calls to `nvidiactl` and `nvidiaN`.
//!
//! [`read_escape`] copies a call's struct, unwraps the call, and judges the call by its bytes. The descriptor's file is
//! not looked at yet: some calls don't need it ([`Continued::needs_no_descriptor`]). What was read is the caller's if
//! the caller still waits. [`answer_escape`] then refuses the call, lets it continue, or has the function for its kind
//! make it, such as [`allocate`].

use crate::monitor::caller::{Copy, Reply};
use crate::monitor::calls::alloc::{allocate, allocate_memory};
use crate::monitor::calls::case::{Case, EarlyReply, write_log};
use crate::monitor::calls::control::control;
use crate::monitor::calls::duplicate::duplicate;
use crate::monitor::calls::free::free;
use crate::monitor::calls::groups::enter_passing_channel;
use crate::monitor::calls::vid_heap::serve_heap;
use crate::monitor::decide::{self, Continued, Denial, Verdict};
use crate::monitor::log::Topic;
use crate::rm::number::{NV_ERR_INSERT_DUPLICATE_NAME, NV_ERR_STATE_IN_USE};
use crate::rm::{self, Answer, Call, Command, Decoded, Refusal, refuse};

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
    /// Why the call continues whichever file its descriptor is; `None` where it doesn't.
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
pub(crate) fn read_escape(
    case: &mut Case<'_>,
    request: u32,
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
    let verdict = decide::judge(release, &decoded.call);
    Ok(ReadEscape { command, address, decoded, verdict, wrapped })
}

/// Answers an escape on a file of the driver.
pub(crate) fn answer_escape(
    case: &mut Case<'_>,
    escape: Result<ReadEscape, Unread>,
) -> Result<Reply, EarlyReply> {
    let escape = escape.map_err(|unread| match unread {
        Unread::Memory(over) => over,
        Unread::Refused(refusal) => case.deny(&Denial::Tables(refusal)),
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
        // A call that continues is unwrapped anew by the driver, and may be any other call by then, even a control. No
        // program wraps a call whose size fits a request.
        Verdict::Continue(_) if wrapped => Err(case.answer(Answer::Errno(refuse::EINVAL))),
        Verdict::Continue(passed) => {
            case.still_waits()?;
            if let (Continued::Client, Call::Alloc(alloc)) = (passed, &decoded.call) {
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

/// Executes a call by its kind. Each kind asks whether the caller still waits when all that it needs is read.
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

/// Tells the log once for each control and each class that it was refused. For an unknown one, the line has what a
/// report needs.
fn log_once(case: &Case<'_>, call: &Call) {
    let Some(refusal) = decide::refusal(&case.parts.state.release, call) else { return };
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

/// The name of the caller's program. The program can choose any name.
fn program_name(case: &Case<'_>) -> String {
    let pid = case.target.as_ref().map_or(case.tid(), |target| target.pid);
    let name = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    match case.is_valid() && !name.is_empty() {
        true => String::from_utf8_lossy(&name).trim_end().escape_debug().to_string(),
        false => "a program that is gone".to_owned(),
    }
}
