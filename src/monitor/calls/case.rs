//! One driver call on its way through the monitor: what was read of the call, what goes back, and its result.
//!
//! [`serve`](crate::monitor::calls::serve) takes a [`Case`] from the notification to the reply. An `NV_ESC_RM_ALLOC`,
//! say, is copied from the caller's memory and judged by its bytes ([`escape`](crate::monitor::calls::escape)). Then
//! the file of its descriptor is found, and [`alloc`](crate::monitor::calls::alloc) has the driver make the call on the
//! copies. Each kind of call has a file such as `alloc.rs`. [`Effects`] has the result: the copies that are written to
//! the caller's memory before the reply, the objects that were made, and as what the call is counted.

pub(crate) mod retry;

use std::sync::Arc;
use std::time::Instant;

use nix::errno::Errno;
use nix::libc::seccomp_notif;

use crate::ledger::Usage;
use crate::monitor::caller::{Copy, Listener, Registers, Reply, Scratch, Target, WriteBack};
use crate::monitor::calls::case::retry::Retry;
use crate::monitor::calls::parts::Parts;
use crate::monitor::decide::{Continued, Denial};
use crate::monitor::log::{RefusedAllocation, Refuser};
use crate::monitor::node::{Device, Rm};
use crate::monitor::snapshot::Count;
use crate::monitor::state::OpenBooks;
use crate::rm::call::Object;
use crate::rm::number::NV_OK;
use crate::rm::{self, Answer, Command, Layout, Meaning, refuse};

/// The reply to a caller that doesn't wait any more. Nothing was done.
const INTERRUPTED: EarlyReply = Reply::Errno(Errno::EINTR as i32);

/// A driver call on its way through the monitor.
#[derive(Debug)]
pub(crate) struct Case<'a> {
    pub(crate) parts: &'a Parts,
    pub(crate) scratch: &'a mut Scratch,
    pub(crate) listener: &'a Listener,
    pub(crate) notice: seccomp_notif,
    /// When the monitor began with the call.
    pub(crate) came: Instant,
    pub(crate) target: Option<Arc<Target>>,
    pub(crate) device: Option<Device>,
    pub(crate) retry: Retry,
    pub(crate) effects: Effects,
}

/// The result of a call.
#[derive(Debug)]
pub(crate) struct Effects {
    /// The copies that go back, and their addresses in the caller's memory.
    pub(crate) writes: WriteBack,
    pub(crate) made: Vec<Object>,
    /// The layout of the call's struct, which has the driver's status, and the statuses of a call that was done before.
    pub(crate) status_layout: Option<(&'static Layout, &'static [u32])>,
    /// The command for the driver, unless this is a call to UVM.
    pub(crate) command: Command,
    pub(crate) counted: Count,
    /// Whether the call may initialize a file of UVM's once it continues.
    pub(crate) initializes: bool,
}

/// The reply that ends a call early: functions of a case return it as their error.
pub(crate) type EarlyReply = Reply;

impl<'a> Case<'a> {
    pub(crate) fn new(
        parts: &'a Parts,
        scratch: &'a mut Scratch,
        listener: &'a Listener,
        notice: seccomp_notif,
    ) -> Self {
        scratch.begin();
        Case {
            parts,
            scratch,
            listener,
            notice,
            came: Instant::now(),
            target: None,
            device: None,
            retry: Retry::default(),
            effects: Effects {
                writes: WriteBack::default(),
                made: Vec::new(),
                status_layout: None,
                command: Command::of_ioctl(0),
                counted: Count::Refused,
                initializes: false,
            },
        }
    }

    pub(crate) fn books(&self) -> OpenBooks<'a> {
        self.parts.state.books()
    }

    pub(crate) fn tid(&self) -> i32 {
        self.notice.pid.cast_signed()
    }

    /// The registers of the call.
    pub(crate) fn registers(&self) -> Registers {
        let [descriptor, request, argument, ..] = self.notice.data.args;
        (request & 0xffff_ffff | descriptor << 32, argument)
    }

    /// The descriptor on which the caller made the call.
    pub(crate) fn descriptor(&self) -> i32 {
        let [descriptor, ..] = self.notice.data.args;
        rm::low_word(descriptor).cast_signed()
    }

    pub(crate) fn target(&self) -> Result<&Target, EarlyReply> {
        self.target.as_deref().ok_or(Reply::Errno(Errno::ESRCH as i32))
    }

    pub(crate) fn device(&self) -> Result<&Device, EarlyReply> {
        self.device.as_ref().ok_or(Reply::Errno(Errno::EBADF as i32))
    }

    pub(crate) fn is_valid(&self) -> bool {
        self.listener.is_valid(self.notice.id)
    }

    /// Ends the call where its caller doesn't wait any more: what was read may be another process's memory then.
    pub(crate) fn still_waits(&self) -> Result<(), EarlyReply> {
        if self.is_valid() { Ok(()) } else { Err(INTERRUPTED) }
    }

    pub(crate) fn rm(&self) -> Result<Rm<'_>, EarlyReply> {
        Ok(Rm { release: &self.parts.state.release, device: self.device()? })
    }

    /// Has the driver make the call, on the monitor's copies.
    pub(crate) fn call(&mut self) -> Result<(), EarlyReply> {
        let Some(device) = &self.device else { return Err(Errno::EBADF.into()) };
        Ok(device.call(&self.effects.command, &mut self.scratch.bytes)?)
    }

    /// The layout of the call's struct; [`Layout::UNKNOWN`] where the struct isn't read.
    pub(crate) fn head(&self) -> &'static Layout {
        self.effects.status_layout.map_or(&Layout::UNKNOWN, |(head, _)| head)
    }

    pub(crate) fn patch(&mut self, meaning: Meaning, value: u64) {
        self.scratch.patch(self.head(), meaning, value);
    }

    pub(crate) fn status(&self) -> u32 {
        let view = self.head().view(&self.scratch.bytes);
        view.and_then(|view| view.u32(Meaning::Status)).unwrap_or(NV_OK)
    }

    /// Whether the driver's status says that the call was done before.
    pub(crate) fn was_done_already(&self) -> bool {
        self.effects.status_layout.is_some_and(|(_, already)| already.contains(&self.status()))
    }

    /// Copies the call's struct from the caller's memory.
    pub(crate) fn read_struct(&mut self, address: u64, size: usize) -> Result<(), EarlyReply> {
        let target = self.target.as_ref().ok_or(Errno::ESRCH)?;
        Ok(self.scratch.read_struct(target, address, size)?)
    }

    /// Copies the parameters, which the struct points at.
    pub(crate) fn read_params(&mut self, address: u64, size: usize) -> Result<(), EarlyReply> {
        let target = self.target.as_ref().ok_or(Errno::ESRCH)?;
        Ok(self.scratch.read_params(target, address, size)?)
    }

    /// Copies what the parameters point at to `place` in the list: an offset, and a number of bytes.
    pub(crate) fn read_piece(
        &mut self,
        address: u64,
        place: (usize, usize),
    ) -> Result<(), EarlyReply> {
        let target = self.target.as_ref().ok_or(Errno::ESRCH)?;
        Ok(self.scratch.read_piece(target, address, place)?)
    }

    /// Notes that `copy` goes back to `address`. Copies are written in the order of places; the struct has place 0.
    pub(crate) fn write_back(&mut self, place: usize, address: u64, copy: Copy) {
        self.effects.writes.set(place, address, copy);
    }

    /// Notes that nothing goes back.
    pub(crate) fn write_nothing(&mut self) {
        self.effects.writes = WriteBack::default();
    }

    /// Ends the call as the driver refuses one: by a status in the struct, which alone goes back, or by an error.
    pub(crate) fn answer(&mut self, answer: Answer) -> EarlyReply {
        self.effects.counted = Count::Refused;
        self.retry.is_begun = false;
        let errno = match answer {
            Answer::Errno(errno) => errno,
            Answer::Status(status) => {
                let patch = refuse::status(self.head(), status);
                match patch.is_some_and(|patch| patch.apply(&mut self.scratch.bytes)) {
                    true => {
                        self.effects.writes.keep_struct_alone();
                        return Reply::Done;
                    }
                    false => Errno::EINVAL as i32,
                }
            }
        };
        self.write_nothing();
        Reply::Errno(errno)
    }

    /// What was decided; refuses the call where it was denied.
    pub(crate) fn or_deny<T>(
        &mut self,
        decision: Result<T, impl Into<Denial>>,
    ) -> Result<T, EarlyReply> {
        decision.map_err(|denial| self.deny(&denial.into()))
    }

    /// Refuses a call, and tells why: by an event where the quota has no room, otherwise by a line of the log.
    pub(crate) fn deny(&mut self, denial: &Denial) -> EarlyReply {
        if let Denial::OverQuota { gpu, asked_bytes, usage } = *denial {
            tell_refused(self, Refuser::Quota, gpu, asked_bytes, usage);
            let reply = self.answer(denial.answer());
            self.effects.counted = Count::OverQuota;
            return reply;
        }
        if denial.is_news() {
            self.log(&denial.to_string());
        }
        self.answer(denial.answer())
    }

    pub(crate) fn executed(&mut self, made: impl IntoIterator<Item = Object>) -> Reply {
        self.effects.made.extend(made);
        self.effects.counted = Count::Executed;
        Reply::Done
    }

    pub(crate) fn continued(&mut self, passed: Continued) -> Reply {
        self.write_nothing();
        self.effects.counted = Count::Continued;
        if passed.has_to_be_audited() && self.books().due.schedule(Instant::now()) {
            self.parts.audit.wake();
        }
        Reply::Continue
    }

    pub(crate) fn log(&self, what: &str) {
        if self.parts.state.log.limit.take_line() {
            write_log(self, what);
        }
    }
}

/// Tells of an allocation that was refused.
pub(crate) fn tell_refused(
    case: &Case<'_>,
    by: Refuser,
    gpu: usize,
    asked_bytes: u64,
    usage: Usage,
) {
    let process = case.target.as_ref().map(|target| target.process);
    let refused = RefusedAllocation { by, process, gpu, asked_bytes, usage };
    case.parts.state.log.tell_refused_allocation(refused);
}

/// Lets a call continue that is not the driver's.
pub(crate) fn continue_other_call(case: &mut Case<'_>) -> Reply {
    case.effects.counted = Count::Continued;
    Reply::Continue
}

/// Answers a call as if the driver had made it.
pub(crate) fn pretended(case: &mut Case<'_>) -> EarlyReply {
    let answered = case.answer(Answer::Status(rm::number::NV_OK));
    case.effects.counted = Count::Executed;
    answered
}

/// Writes a line about a call that is refused. The limit of the log has allowed the line.
pub(crate) fn write_log(case: &Case<'_>, what: &str) {
    let pid = case.target.as_ref().map_or(case.tid(), |target| target.pid);
    tracing::info!(container = %case.parts.state.settings.short_id, pid, "refused: {what}");
}
