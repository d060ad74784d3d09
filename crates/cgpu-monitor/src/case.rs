//! One driver call in progress in the monitor: what was read of the call, what goes back, and its result.
//!
//! [`serve`](crate::calls) takes a [`Case`] from the notification to the reply. An `NV_ESC_RM_ALLOC`,
//! say, is copied from the caller's memory and judged by its bytes. Then [`identify`] finds the file of its descriptor,
//! and [`alloc`](crate::calls) has the driver make the call on the copies, after [`begin_under_rm_lock`]. Each kind
//! of call has a file such as `alloc.rs`. [`Effects`] has the result: the copies that are written to the caller's
//! memory before the reply, the objects that were made, and as what the call is counted.

mod retry;

pub(crate) use retry::{has_unclaimed, keep_if_unclaimed, remember_answer, undo_unclaimed};

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use nix::errno::Errno;
use nix::libc::seccomp_notif;

use crate::caller::{Copy, Listener, Registers, Reply, Scratch, Target, WriteBack};
use crate::case::retry::Retry;
use crate::compute::forget_freed_groups;
use crate::decide::{Continued, RefusalReason};
use crate::log::{RefusedAllocation, Refuser};
use crate::node::{Device, Failure, Rm};
use crate::shared::{Monitor, OpenState};
use crate::snapshot::Count;
use crate::state::UnderRmLock;
use cgpu_core::ledger::{Client, Entry, Handle, Usage};
use nvrm::call::Object;
use nvrm::number::{NV_ERR_OBJECT_NOT_FOUND, NV_OK};
use nvrm::{Answer, Command, Layout, Meaning, refuse};

/// The reply to a caller that doesn't wait any more. Nothing was done.
const INTERRUPTED: EarlyReply = Reply::Errno(Errno::EINTR as i32);

/// A driver call in progress in the monitor.
#[derive(Debug)]
pub(crate) struct Case<'a> {
    pub(crate) monitor: &'a Monitor,
    pub(crate) scratch: &'a mut Scratch,
    pub(crate) listener: &'a Listener,
    pub(crate) notice: seccomp_notif,
    /// When the monitor began with the call.
    pub(crate) came: Instant,
    pub(crate) target: Option<Arc<Target>>,
    pub(crate) device: Option<Device>,
    /// Whether the call is made whether or not its caller still waits: it must not be done twice.
    pub(crate) is_begun: bool,
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
    /// Whether the call may initialize a UVM file once it is passed through.
    pub(crate) initializes: bool,
}

/// The reply that ends a call early: functions of a case return it as their error.
pub(crate) type EarlyReply = Reply;

impl<'a> Case<'a> {
    pub(crate) fn new(
        monitor: &'a Monitor,
        scratch: &'a mut Scratch,
        listener: &'a Listener,
        notice: seccomp_notif,
    ) -> Self {
        scratch.begin();
        Case {
            monitor,
            scratch,
            listener,
            notice,
            came: Instant::now(),
            target: None,
            device: None,
            is_begun: false,
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

    pub(crate) fn state(&self) -> OpenState<'a> {
        self.monitor.state()
    }

    pub(crate) fn tid(&self) -> i32 {
        self.notice.pid.cast_signed()
    }

    pub(crate) fn registers(&self) -> Registers {
        let [descriptor, request, argument, ..] = self.notice.data.args;
        (request & 0xffff_ffff | descriptor << 32, argument)
    }

    /// The descriptor on which the caller made the call.
    pub(crate) fn descriptor(&self) -> i32 {
        let [descriptor, ..] = self.notice.data.args;
        nvrm::low_word(descriptor).cast_signed()
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
        Ok(Rm { release: &self.monitor.release, device: self.device()? })
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
        self.is_begun = false;
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

    /// The decision's value; refuses the call if the decision is a refusal.
    pub(crate) fn or_deny<T>(
        &mut self,
        decision: Result<T, impl Into<RefusalReason>>,
    ) -> Result<T, EarlyReply> {
        decision.map_err(|refusal_reason| self.deny(&refusal_reason.into()))
    }

    /// Refuses a call, and reports why: by an event if the quota has too little memory left, otherwise by a line of the
    /// log.
    pub(crate) fn deny(&mut self, refusal_reason: &RefusalReason) -> EarlyReply {
        if let RefusalReason::OverQuota { gpu, asked_bytes, usage } = *refusal_reason {
            report_refused(self, Refuser::Quota, gpu, asked_bytes, usage);
            let reply = self.answer(refusal_reason.answer());
            self.effects.counted = Count::OverQuota;
            return reply;
        }
        if refusal_reason.is_news() {
            self.log(&refusal_reason.to_string());
        }
        self.answer(refusal_reason.answer())
    }

    pub(crate) fn executed(&mut self, made: impl IntoIterator<Item = Object>) -> Reply {
        self.effects.made.extend(made);
        self.effects.counted = Count::Executed;
        Reply::Done
    }

    pub(crate) fn continued(&mut self, passed: Continued) -> Reply {
        self.write_nothing();
        self.effects.counted = Count::Continued;
        if passed.has_to_be_audited() && self.state().due.schedule(Instant::now()) {
            self.monitor.audit_wait.wake();
        }
        Reply::Continue
    }

    pub(crate) fn log(&self, what: &str) {
        if self.monitor.log.limit.take_line() {
            write_log(self, what);
        }
    }
}

/// Begins a call that is read completely, after the earlier calls of its thread. The call ends here if its caller
/// doesn't wait any more, or if a reply is retained that the caller didn't take.
pub(crate) fn begin(case: &mut Case<'_>) -> Result<(), EarlyReply> {
    wait_for_earlier_call(case)?;
    note_begun(case, None)
}

/// Begins a call that makes, names or frees objects, as [`begin`] does, and takes the RM lock for it.
pub(crate) fn begin_under_rm_lock<'a>(case: &mut Case<'a>) -> Result<UnderRmLock<'a>, EarlyReply> {
    wait_for_earlier_call(case)?;
    take_rm_lock(case)
}

/// Waits for the earlier call of the same thread, where signals interrupt calls. Otherwise a thread that has left a
/// call to the monitor is dead, and makes no other call: all that is left to do is to see that the caller still waits.
pub(crate) fn wait_for_earlier_call(case: &mut Case<'_>) -> Result<(), EarlyReply> {
    if let Some(calls) = &case.monitor.interrupted {
        retry::wait_for_earlier_call(case, calls)?;
    }
    case.still_waits()
}

/// Begins a call after [`wait_for_earlier_call`], as soon as it holds the RM lock.
pub(crate) fn take_rm_lock<'a>(case: &mut Case<'a>) -> Result<UnderRmLock<'a>, EarlyReply> {
    let rm_lock = match case.monitor.rm_lock.try_enter() {
        Some(rm_lock) => rm_lock,
        // It is made though its caller may be gone, and undone then.
        None if case.is_begun => case.monitor.rm_lock.enter(),
        None => {
            let rm_lock =
                case.monitor.rm_lock.enter_while(|| case.is_valid()).ok_or(INTERRUPTED)?;
            case.still_waits()?;
            rm_lock
        }
    };
    if !case.is_begun {
        note_begun(case, Some(&rm_lock))?;
    }
    Ok(rm_lock)
}

/// Notes that the call is begun: from here on it is made, whether or not its caller still waits.
fn note_begun(case: &mut Case<'_>, rm_lock: Option<&UnderRmLock<'_>>) -> Result<(), EarlyReply> {
    case.is_begun = true;
    case.scratch.remember();
    match &case.monitor.interrupted {
        Some(calls) => retry::take_retained_reply(case, calls, rm_lock),
        None => Ok(()),
    }
}

/// Frees an object that a call made, and that no program is to have. An object that can't be freed stays charged.
pub(crate) fn unmake_object(monitor: &Monitor, _: &UnderRmLock<'_>, device: &Device, made: Object) {
    let Object { client, parent, handle } = made;
    let freed = Rm { release: &monitor.release, device }.free(client, parent, handle);
    if let Ok(()) | Err(Failure::Status(NV_ERR_OBJECT_NOT_FOUND)) = freed {
        monitor.state().enter(Entry::Free { client: Client(client), handle: Handle(handle) });
        forget_freed_groups(monitor, client, handle);
    }
}

/// Reports an allocation that was refused.
pub(crate) fn report_refused(
    case: &Case<'_>,
    by: Refuser,
    gpu: usize,
    asked_bytes: u64,
    usage: Usage,
) {
    let process = case.target.as_ref().map(|target| target.process);
    let refused = RefusedAllocation { by, process, gpu, asked_bytes, usage };
    case.monitor.log.report_refused_allocation(refused);
}

/// Passes through a call that is not the driver's.
pub(crate) fn continue_other_call(case: &mut Case<'_>) -> Reply {
    case.effects.counted = Count::Continued;
    Reply::Continue
}

/// Answers a call as if the driver had made it.
pub(crate) fn faked_success(case: &mut Case<'_>) -> EarlyReply {
    let answered = case.answer(Answer::Status(nvrm::number::NV_OK));
    case.effects.counted = Count::Executed;
    answered
}

/// Writes a line about a call that is refused. The limit of the log has allowed the line.
pub(crate) fn write_log(case: &Case<'_>, what: &str) {
    let pid = case.target.as_ref().map_or(case.tid(), |target| target.pid);
    tracing::info!(container = %case.monitor.settings.short_id, pid, "refused: {what}");
}

/// Finds out which driver file a descriptor is, and notes the calling process. `ENOTTY` for any other file.
pub(crate) fn identify(case: &mut Case<'_>, descriptor: i32) -> Result<(), EarlyReply> {
    let probable = case.target.take();
    let duplicate = case.monitor.targets.duplicate(case.tid(), descriptor, probable);
    let (target, file) = duplicate.map_err(|errno| caller_error(case, errno))?;
    case.target = Some(target);
    ignore_runtime(case)?;
    let device = Device::of(&case.monitor.settings.nodes, file);
    // The call of a terminal or a disk is not the monitor's to make, and it may not be passed through: its descriptor
    // could be another file by then.
    let device = device.ok_or(Reply::Errno(Errno::ENOTTY as i32))?;
    let Monitor { settings, provenances, last_mount, .. } = case.monitor;
    if let Some(mount) = device.mount.filter(|now| last_mount.swap(*now, Ordering::Relaxed) != *now)
    {
        provenances.note_mount(mount, device.place.0, settings);
    }
    case.device = Some(device);
    note_caller(case)
}

/// The reply for a caller that has exited or can't be inspected. If it can't be inspected, the log says so.
pub(crate) fn caller_error(case: &Case<'_>, errno: Errno) -> EarlyReply {
    if matches!(errno, Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM) {
        case.log(&format!("a call of a process that can't be looked at: {}", errno.desc()));
    }
    Reply::Errno(errno as i32)
}

/// Passes the call through if the runtime or one of its hooks makes it on the host: it is none of the container's.
pub(crate) fn ignore_runtime(case: &Case<'_>) -> Result<(), EarlyReply> {
    match &case.target {
        Some(target) if target.is_of_runtime => Err(Reply::Continue),
        _ => Ok(()),
    }
}

/// Enters the calling process in the state, if it isn't known yet.
pub(crate) fn note_caller(case: &mut Case<'_>) -> Result<(), EarlyReply> {
    let target = case.target()?;
    if target.is_noted.load(Ordering::Relaxed) {
        return Ok(());
    }
    if !case.state().processes.contains(&target.process) {
        // The calling thread may be gone, and its tid may belong to another process by now.
        case.still_waits()?;
        if !case.state().note_process(target.process) {
            return Err(case.deny(&RefusalReason::ProcessesFull));
        }
        // The audit's thread is to wait for the process's death, whatever the process calls.
        case.monitor.audit_wait.wake();
    }
    target.is_noted.store(true, Ordering::Relaxed);
    Ok(())
}

/// Notes that the calling process uses a client.
pub(crate) fn note_user(case: &Case<'_>, client: u32) -> Result<(), EarlyReply> {
    let process = case.target()?.process;
    let mut state = case.state();
    // Usually the user is known already. State that is borrowed to be changed computes the ledger's mark again when it
    // is dropped, which takes time.
    if !state.ledger.holds_client(Client(client), process) {
        state.note_user(client, process);
    }
    Ok(())
}
