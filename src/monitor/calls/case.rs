//! One call: what was read of it, what goes back, and what it comes to. Each kind of call has a file of its own
//! beside this one, with functions of a [`Case`].

pub(crate) mod retry;
pub(crate) mod write_back;

use std::sync::Arc;
use std::time::Instant;

use nix::errno::Errno;
use nix::libc::seccomp_notif;

use crate::ledger::Usage;
use crate::monitor::caller::listener::{Listener, Reply};
use crate::monitor::caller::scratch::{Copy, Scratch};
use crate::monitor::caller::target::Target;
use crate::monitor::calls::case::retry::Retry;
use crate::monitor::calls::case::write_back::WriteBack;
use crate::monitor::calls::parts::Parts;
use crate::monitor::calls::policy::Passed;
use crate::monitor::journal::map::{Count, Slot};
use crate::monitor::log::container_log::RefusedAllocation;
use crate::monitor::node::device::{Device, Rm};
use crate::monitor::state::container_state::OpenBooks;
use crate::monitor::state::lane::OnLane;
use crate::rm::call::Object;
use crate::rm::number::NV_OK;
use crate::rm::{self, Answer, Command, Layout, Meaning, Refusal, refuse};

/// Nobody waits for the answer, and nothing was done.
const INTERRUPTED: Over = Reply::Errno(Errno::EINTR as i32);

/// A call.
#[derive(Debug)]
pub(crate) struct Case<'a> {
    pub(crate) parts: &'a Parts,
    pub(crate) scratch: &'a mut Scratch,
    pub(crate) slot: Slot<'a>,
    pub(crate) listener: &'a Listener,
    pub(crate) notice: seccomp_notif,
    /// When it came to us.
    pub(crate) came: Instant,
    /// A worker before asked the driver already, and didn't live to see the answer.
    pub(crate) asked_before: bool,
    pub(crate) target: Option<Arc<Target>>,
    pub(crate) device: Option<Device>,
    pub(crate) retry: Retry,
    pub(crate) effects: Effects,
    /// Where the worker before had it on the lane already.
    pub(crate) lane: Option<OnLane<'a>>,
}

/// What a call comes to.
#[derive(Debug)]
pub(crate) struct Effects {
    /// Where the copies belong.
    pub(crate) writes: WriteBack,
    pub(crate) made: Vec<Object>,
    /// Where the driver's status is, and what it is of a call that has been done.
    pub(crate) status_layout: Option<(&'static Layout, &'static [u32])>,
    /// What the driver is to be asked, where that is no call to UVM.
    pub(crate) command: Command,
    pub(crate) counted: Count,
    /// Whether it may initialize a file of UVM's when it goes on.
    pub(crate) initializes: bool,
}

/// Why a call is over before it was made.
pub(crate) type Over = Reply;

impl<'a> Case<'a> {
    pub(crate) fn new(
        parts: &'a Parts,
        scratch: &'a mut Scratch,
        slot: Slot<'a>,
        listener: &'a Listener,
        notice: seccomp_notif,
        asked_before: bool,
    ) -> Self {
        scratch.begin();
        Case {
            parts,
            scratch,
            slot,
            listener,
            notice,
            came: Instant::now(),
            asked_before,
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
            lane: None,
        }
    }

    pub(crate) fn books(&self) -> OpenBooks<'a> {
        self.parts.state.books()
    }

    pub(crate) fn tid(&self) -> i32 {
        self.notice.pid.cast_signed()
    }

    /// The descriptor that it was made by.
    pub(crate) fn descriptor(&self) -> i32 {
        let [descriptor, ..] = self.notice.data.args;
        rm::low_word(descriptor).cast_signed()
    }

    pub(crate) fn target(&self) -> Result<&Target, Over> {
        self.target.as_deref().ok_or(Reply::Errno(Errno::ESRCH as i32))
    }

    pub(crate) fn device(&self) -> Result<&Device, Over> {
        self.device.as_ref().ok_or(Reply::Errno(Errno::EBADF as i32))
    }

    pub(crate) fn is_valid(&self) -> bool {
        self.listener.is_valid(self.notice.id)
    }

    /// What was read is of the caller, if it still waits.
    pub(crate) fn still_waits(&self) -> Result<(), Over> {
        if self.is_valid() { Ok(()) } else { Err(INTERRUPTED) }
    }

    pub(crate) fn rm(&self) -> Result<Rm<'_>, Over> {
        Ok(Rm { release: &self.parts.state.release, device: self.device()? })
    }

    /// Has the driver make it, on our copies.
    pub(crate) fn call(&mut self) -> Result<(), Over> {
        let Some(device) = &self.device else { return Err(Errno::EBADF.into()) };
        Ok(device.call(&self.effects.command, &mut self.scratch.bytes)?)
    }

    /// The layout of its struct.
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

    /// Whether the driver says of the call that it has been done.
    pub(crate) fn was_done_already(&self) -> bool {
        self.effects.status_layout.is_some_and(|(_, already)| already.contains(&self.status()))
    }

    /// Copies the call's struct from the caller.
    pub(crate) fn read_struct(&mut self, address: u64, size: usize) -> Result<(), Over> {
        let target = self.target.as_ref().ok_or(Errno::ESRCH)?;
        Ok(self.scratch.read_struct(target, address, size)?)
    }

    /// Copies what it points at.
    pub(crate) fn read_params(&mut self, address: u64, size: usize) -> Result<(), Over> {
        let target = self.target.as_ref().ok_or(Errno::ESRCH)?;
        Ok(self.scratch.read_params(target, address, size)?)
    }

    /// Copies what that points at to a place in the list: where it begins, and its bytes.
    pub(crate) fn read_piece(&mut self, address: u64, place: (usize, usize)) -> Result<(), Over> {
        let target = self.target.as_ref().ok_or(Errno::ESRCH)?;
        Ok(self.scratch.read_piece(target, address, place)?)
    }

    /// A copy goes back, in the order of places.
    pub(crate) fn write_back(&mut self, place: usize, address: u64, copy: Copy) {
        self.effects.writes.set(place, address, copy);
    }

    /// Nothing goes back.
    pub(crate) fn write_nothing(&mut self) {
        self.effects.writes = WriteBack::default();
    }

    /// Refused, as the driver would.
    pub(crate) fn answer(&mut self, answer: Answer) -> Over {
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

    /// Refused, for what isn't known; the log says what.
    pub(crate) fn refused(&mut self, refusal: &Refusal) -> Over {
        self.log(&refusal.to_string());
        self.answer(refusal.answer())
    }

    pub(crate) fn executed(&mut self, made: impl IntoIterator<Item = Object>) -> Reply {
        self.effects.made.extend(made);
        self.effects.counted = Count::Executed;
        Reply::Done
    }

    pub(crate) fn continued(&mut self, passed: Passed) -> Reply {
        self.write_nothing();
        self.effects.counted = Count::Continued;
        if passed.has_to_be_audited() && self.books().due.schedule(Instant::now()) {
            self.parts.audit.wake();
        }
        Reply::Continue
    }

    /// Refused, for the quota: so many bytes of the container's GPU of that place in its order, when
    /// that was in use.
    pub(crate) fn over_quota(&mut self, (gpu, asked_bytes): (usize, u64), usage: Usage) -> Over {
        tell_over_quota(self, (gpu, asked_bytes), usage);
        let reply = self.answer(refuse::OVER_QUOTA);
        self.effects.counted = Count::OverQuota;
        reply
    }

    pub(crate) fn log(&self, what: &str) {
        if self.parts.state.log.limit.take_line() {
            write_log(self, what);
        }
    }
}

/// None of the driver's.
pub(crate) fn continue_other_call(case: &mut Case<'_>) -> Reply {
    case.effects.counted = Count::Continued;
    Reply::Continue
}

/// The event of that.
pub(crate) fn tell_over_quota(case: &Case<'_>, (gpu, asked_bytes): (usize, u64), usage: Usage) {
    let process = case.target.as_ref().map(|target| target.process);
    case.parts.state.log.tell_refused_allocation(RefusedAllocation {
        process,
        gpu,
        asked_bytes,
        usage,
    });
}

/// Answered as if it had been made.
pub(crate) fn pretended(case: &mut Case<'_>) -> Over {
    let answered = case.answer(Answer::Status(rm::number::NV_OK));
    case.effects.counted = Count::Executed;
    answered
}

/// To whoever was allowed a line.
pub(crate) fn write_log(case: &Case<'_>, what: &str) {
    let pid = case.target.as_ref().map_or(case.tid(), |target| target.pid);
    tracing::info!(container = %case.parts.state.settings.short_id, pid, "refused: {what}");
}
