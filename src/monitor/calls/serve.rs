//! One call: read, decided, made or not, answered.
//!
//! A [`Case`] has all that one call needs, and is done when [`Case::serve`] returns.
//! What the caller gets back is written only while it waits: what was done for one
//! that doesn't is kept ([`retry`]). All of it is one call's way from its beginning to its end.

pub(crate) mod retry;
pub(crate) mod write_back;

use std::sync::Arc;
use std::time::Instant;

use nix::errno::Errno;
use nix::libc::seccomp_notif;

use crate::gate::settings::NodeKind;
use crate::gate::syscall::{self, Syscall};
use crate::gate::traps;
use crate::ledger::Usage;
use crate::monitor::caller::listener::{CallerGone, Listener, Reply};
use crate::monitor::caller::scratch::{Copy, Scratch};
use crate::monitor::caller::target::Target;
use crate::monitor::calls::lane::OnLane;
use crate::monitor::calls::policy::Pass;
use crate::monitor::calls::read_escape::ReadEscape;
use crate::monitor::calls::serve::retry::Retry;
use crate::monitor::calls::serve::write_back::WriteBack;
use crate::monitor::driver::device::Device;
use crate::monitor::state::container_state::OpenBooks;
use crate::monitor::state::journal_map::{Count, Slot};
use crate::monitor::worker::facts::Refused;
use crate::monitor::worker::parts::Parts;
use crate::rm::call::Object;
use crate::rm::number::NV_OK;
use crate::rm::{self, Answer, Command, Layout, Refusal, refuse};

/// Nobody waits for the answer, and nothing was done.
const INTERRUPTED: Over = Reply::Errno(Errno::EINTR as i32);

/// A call.
#[derive(Debug)]
pub(crate) struct Case<'a> {
    pub(crate) parts: &'a Parts,
    pub(crate) scratch: &'a mut Scratch,
    pub(crate) slot: Slot<'a>,
    pub(crate) listener: &'a Listener,
    notice: seccomp_notif,
    /// When it came to us.
    pub(crate) came: Instant,
    /// A worker before asked the driver already, and didn't live to see the answer.
    pub(crate) again: bool,
    pub(crate) target: Option<Arc<Target>>,
    pub(crate) device: Option<Device>,
    /// Where the copies belong.
    writes: WriteBack,
    made: Vec<Object>,
    pub(crate) retry: Retry,
    /// Where the driver's status is, and what it is of a call that has been done.
    pub(crate) said: Option<(&'static Layout, &'static [u32])>,
    pub(crate) counted: Count,
    /// Whether it may initialize a file of UVM's when it goes on.
    pub(crate) initializes: bool,
    /// Where the worker before had it on the lane already.
    pub(crate) lane: Option<OnLane<'a>>,
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
        again: bool,
    ) -> Self {
        scratch.begin();
        Case {
            parts,
            scratch,
            slot,
            listener,
            notice,
            came: Instant::now(),
            again,
            target: None,
            device: None,
            writes: WriteBack::default(),
            made: Vec::new(),
            retry: Retry::default(),
            said: None,
            counted: Count::Refused,
            initializes: false,
            lane: None,
        }
    }

    pub(crate) fn books(&self) -> OpenBooks<'a> {
        self.parts.state.books()
    }

    /// The descriptor that it was made by.
    pub(crate) fn descriptor(&self) -> i32 {
        let [descriptor, ..] = self.notice.data.args;
        rm::uvm::number(descriptor).cast_signed()
    }

    pub(crate) fn tid(&self) -> i32 {
        self.notice.pid.cast_signed()
    }

    pub(crate) fn target(&self) -> Result<&Target, Over> {
        self.target.as_deref().ok_or(Reply::Errno(Errno::ESRCH as i32))
    }

    pub(crate) fn device(&self) -> Result<&Device, Over> {
        self.device.as_ref().ok_or(Reply::Errno(Errno::EBADF as i32))
    }

    /// The notification's.
    pub(crate) fn id(&self) -> u64 {
        self.notice.id
    }

    pub(crate) fn is_valid(&self) -> bool {
        self.listener.is_valid(self.notice.id)
    }

    /// Deals with it.
    pub(crate) fn serve(mut self) {
        self.settle_earlier_initialization();
        let data = self.notice.data;
        let reply = match syscall::of(data.arch, data.nr, &data.args) {
            Some(Syscall::Ioctl { descriptor, request, argument }) => {
                self.ioctl(descriptor, request, argument)
            }
            Some(Syscall::Map { descriptor, length, shared, offset }) => {
                self.map(descriptor, length, shared, offset)
            }
            Some(call @ (Syscall::Control { .. } | Syscall::Personality { .. })) => {
                Ok(call.refusal().map_or_else(|| self.passed(), Reply::Errno))
            }
            None => {
                if self.parts.state.log.limit.allows() {
                    tracing::warn!(number = data.nr, "a system call that nobody asked for");
                }
                Err(Reply::Errno(Errno::ENOSYS as i32))
            }
        };
        self.finish(reply.unwrap_or_else(|over| over));
    }

    /// Writes back, and replies; keeps what was done for a caller that doesn't wait.
    fn finish(mut self, mut reply: Reply) {
        // Its caller's memory may keep us.
        self.lane = None;
        let was_done = reply == Reply::Done && self.retry.repeats && self.was_done_already();
        if was_done {
            self.write_nothing();
            self.retry.is_begun = true;
            self.counted = Count::Executed;
        }
        let is_ok = match self.retry.outcome() {
            Some(outcome) => outcome.is_ok,
            None => was_done || reply == Reply::Done && self.is_ok(),
        };
        let object = self.slot.making();
        let interruptible = self.parts.state.settings.interruptible;
        // An earlier call of the thread may have written there since.
        if !interruptible {
            self.writes.drop_unchanged(self.scratch);
        }
        // Before the caller goes on, who may ask for the figure.
        self.parts.state.count(self.counted, self.came.elapsed());
        let writes = self.retry.kept.is_some() || !self.writes.is_empty();
        let mut taken = false;
        // What was made is to be found by the next worker if nobody takes it.
        if !writes && self.made.is_empty() || self.is_valid() {
            // As the driver: what was done stays done.
            if self.write().is_err() {
                reply = Reply::Errno(Errno::EFAULT as i32);
            }
            if interruptible && is_ok {
                self.remember_answer();
            }
            let parts = reply.parts();
            self.slot.set_decided(parts.0, parts.1, parts.2);
            taken = self.listener.send(self.notice.id, parts) != Err(CallerGone);
        }
        if !taken {
            self.cancel_initialization();
            self.keep((reply, is_ok), object);
            // What is kept has from now on what is to be undone. Another thread may have cleared the slot
            // already, which may have another call by now.
            self.slot.forget(self.notice.id);
        }
        if self.retry.is_queued {
            self.parts.callers.thread_order.leave(self.slot.number());
        }
        self.scratch.tidy();
    }

    /// Writes what is to go back, of this call or of the one that was made in its place.
    fn write(&self) -> Result<(), Errno> {
        let Some(target) = &self.target else { return Ok(()) };
        match self.retry.outcome() {
            Some(outcome) => outcome
                .output
                .iter()
                .try_for_each(|(address, bytes)| target.write(&[Some((*address, bytes))])),
            None => self.writes.write(target, self.scratch),
        }
    }

    /// Whether the driver has done it, as far as it says.
    fn is_ok(&self) -> bool {
        self.said.is_some_and(|(head, _)| self.status(head) == NV_OK)
    }

    /// Whether the driver says of the call that it has been done.
    pub(crate) fn was_done_already(&self) -> bool {
        self.said.is_some_and(|(head, already)| already.contains(&self.status(head)))
    }

    /// What was read is of the caller, if it still waits.
    pub(crate) fn still_waits(&self) -> Result<(), Over> {
        if self.is_valid() { Ok(()) } else { Err(INTERRUPTED) }
    }

    /// Finds out which of the driver's files a descriptor is.
    pub(crate) fn open(&mut self, descriptor: i32) -> Result<(), Over> {
        let duplicate = self.parts.callers.targets.duplicate(self.tid(), descriptor);
        let (target, file) = duplicate.map_err(|errno| self.out_of_reach(errno))?;
        self.target = Some(target);
        self.leave_the_runtime_alone()?;
        let device = Device::of(&self.parts.state.settings.nodes, file);
        // A terminal's, a disk's: not ours to make, and could be another by the time it
        // continues.
        let device = device.map_err(|_| Reply::Errno(Errno::ENOTTY as i32))?;
        self.parts.processes.opened(&device);
        self.device = Some(device);
        self.see()
    }

    /// A caller that is gone, or one that we can't look at, which the log says.
    fn out_of_reach(&self, errno: Errno) -> Over {
        if matches!(errno, Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM) {
            self.log(&format!("a call of a process that can't be looked at: {}", errno.desc()));
        }
        Reply::Errno(errno as i32)
    }

    /// What the runtime and its hooks do on the host is none of the container's.
    fn leave_the_runtime_alone(&self) -> Result<(), Over> {
        match &self.target {
            Some(target) if target.is_runtimes => Err(Reply::Continue),
            _ => Ok(()),
        }
    }

    /// Takes note of the process.
    pub(crate) fn see(&self) -> Result<(), Over> {
        let process = self.target()?.process;
        if self.books().processes.contains(&process) {
            return Ok(());
        }
        // Or it could be a stranger who has the number of a thread that is gone.
        self.still_waits()?;
        if self.books().saw(process) {
            // Its death is to be waited for, whatever it calls.
            self.parts.audit.wake();
            return Ok(());
        }
        self.log("more processes than can be kept account of");
        Err(Reply::Errno(Errno::ENOMEM as i32))
    }

    fn ioctl(&mut self, descriptor: i32, request: u64, argument: u64) -> Result<Reply, Over> {
        // The filter is coarser than we are. Who the descriptor belongs to is no question:
        // the request can't change any more, and is none that takes memory.
        if !traps::is_one(rm::uvm::number(request)) {
            if traps::may_have_grown(rm::uvm::number(request)) {
                self.refuse_grown(descriptor, request)?;
            }
            return Ok(self.passed());
        }
        // Read before it's known whose it is: what continues whatever its descriptor is, is
        // let go without a look at it, which would prove nothing.
        let mut escape = None;
        if traps::is_escape(rm::uvm::number(request)) {
            let target = self.parts.callers.targets.probable(self.tid());
            self.target = Some(target.map_err(|errno| self.out_of_reach(errno))?);
            self.leave_the_runtime_alone()?;
            let read = self.read_escape(request, argument);
            if let Some(pass) = read.as_ref().ok().and_then(ReadEscape::passes) {
                let target = self.parts.callers.targets.get(self.tid());
                self.target = Some(target.map_err(|errno| self.out_of_reach(errno))?);
                self.leave_the_runtime_alone()?;
                self.see()?;
                return Ok(self.continued(pass));
            }
            escape = Some(read);
        }
        self.open(descriptor)?;
        match (self.device()?.kind, escape) {
            (NodeKind::Control | NodeKind::Gpu(_), escape) => {
                let escape = escape.unwrap_or_else(|| self.read_escape(request, argument));
                self.resource_manager(escape)
            }
            (NodeKind::Uvm, _) => self.uvm(request, argument),
            (NodeKind::Other, _) => Err(Reply::Errno(Errno::ENOTTY as i32)),
        }
    }

    /// A newer driver's call whose struct has grown is refused; of no file of the driver's it's
    /// nobody's business, and whoever swaps the descriptor could as well have asked by another type.
    fn refuse_grown(&mut self, descriptor: i32, request: u64) -> Result<(), Over> {
        let is_drivers = self.open(descriptor).is_ok()
            && matches!(self.device()?.kind, NodeKind::Control | NodeKind::Gpu(_));
        if !is_drivers {
            return Ok(());
        }
        let command = Command::of_ioctl(request);
        match rm::decode(&self.parts.state.release, command, &vec![0; command.size()]) {
            Err(refusal) => Err(self.refused(&refusal, None)),
            Ok(_) => Err(self.answer(Answer::Errno(refuse::EINVAL), None)),
        }
    }

    /// Copies the call's struct from the caller.
    pub(crate) fn read_struct(&mut self, address: u64, size: usize) -> Result<(), Over> {
        let target = self.target.as_ref().ok_or(Reply::Errno(Errno::ESRCH as i32))?;
        let read = self.scratch.read_struct(target, address, size);
        read.map_err(|errno| Reply::Errno(errno as i32))
    }

    /// Copies what it points at.
    pub(crate) fn read_params(&mut self, address: u64, size: usize) -> Result<(), Over> {
        let target = self.target.as_ref().ok_or(Reply::Errno(Errno::ESRCH as i32))?;
        let read = self.scratch.read_params(target, address, size);
        read.map_err(|errno| Reply::Errno(errno as i32))
    }

    /// Copies what that points at to a place in the list: where it begins, and its bytes.
    pub(crate) fn read_piece(&mut self, address: u64, place: (usize, usize)) -> Result<(), Over> {
        let target = self.target.as_ref().ok_or(Reply::Errno(Errno::ESRCH as i32))?;
        let read = self.scratch.read_piece(target, address, place);
        read.map_err(|errno| Reply::Errno(errno as i32))
    }

    /// A copy goes back, in the order of places.
    pub(crate) fn write_back(&mut self, place: usize, address: u64, copy: Copy) {
        self.writes.set(place, address, copy);
    }

    /// Nothing goes back.
    pub(crate) fn write_nothing(&mut self) {
        self.writes = WriteBack::default();
    }

    /// None of the driver's.
    pub(crate) fn passed(&mut self) -> Reply {
        self.counted = Count::Continued;
        Reply::Continue
    }

    pub(crate) fn continued(&mut self, pass: &Pass) -> Reply {
        self.write_nothing();
        self.counted = Count::Continued;
        if pass.audit {
            self.schedule();
        }
        Reply::Continue
    }

    /// The driver is to be asked soon.
    fn schedule(&self) {
        if self.books().schedule(Instant::now()) {
            self.parts.audit.wake();
        }
    }

    pub(crate) fn executed(&mut self, made: impl IntoIterator<Item = Object>) -> Reply {
        self.made.extend(made);
        self.counted = Count::Executed;
        Reply::Done
    }

    /// Refused, for the quota: so many bytes of the container's GPU of that place in its order, when
    /// that was in use.
    pub(crate) fn over_quota(
        &mut self,
        layout: Option<&Layout>,
        (gpu, asked_bytes): (usize, u64),
        usage: Usage,
    ) -> Over {
        self.tell_over_quota((gpu, asked_bytes), usage);
        let reply = self.answer(refuse::OVER_QUOTA, layout);
        self.counted = Count::OverQuota;
        reply
    }

    /// The event of that.
    pub(crate) fn tell_over_quota(&self, (gpu, asked_bytes): (usize, u64), usage: Usage) {
        let process = self.target.as_ref().map(|target| target.process);
        self.parts.state.log.refused_allocation(Refused { process, gpu, asked_bytes, usage });
    }

    /// Refused, as the driver would.
    pub(crate) fn answer(&mut self, answer: Answer, layout: Option<&Layout>) -> Over {
        self.counted = Count::Refused;
        self.retry.is_begun = false;
        let errno = match answer {
            Answer::Errno(errno) => errno,
            Answer::Status(status) => {
                let patch = layout.and_then(|layout| refuse::status(layout, status));
                match patch.is_some_and(|patch| patch.apply(&mut self.scratch.bytes)) {
                    true => {
                        self.writes.keep_struct_alone();
                        return Reply::Done;
                    }
                    false => Errno::EINVAL as i32,
                }
            }
        };
        self.write_nothing();
        Reply::Errno(errno)
    }

    /// Answered as if it had been made.
    pub(crate) fn pretended(&mut self, layout: &Layout) -> Over {
        let answered = self.answer(Answer::Status(rm::number::NV_OK), Some(layout));
        self.counted = Count::Executed;
        answered
    }

    /// Refused, for what isn't known; the log says what.
    pub(crate) fn refused(&mut self, refusal: &Refusal, layout: Option<&Layout>) -> Over {
        self.log(&refusal.to_string());
        self.answer(refusal.answer(), layout)
    }

    pub(crate) fn log(&self, what: &str) {
        if self.parts.state.log.limit.allows() {
            self.write_log(what);
        }
    }

    /// To whoever was allowed a line.
    pub(crate) fn write_log(&self, what: &str) {
        let pid = self.target.as_ref().map_or(self.tid(), |target| target.pid);
        tracing::info!(container = %self.parts.state.settings.short_id, pid, "refused: {what}");
    }
}
