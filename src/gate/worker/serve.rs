//! One call: read, decided, made or not, answered.
//!
//! A [`Case`] has all that one call needs, and is done when [`Case::serve`] returns.
//! What the caller gets back is written only while it waits: what was done for one
//! that doesn't is stashed. All of it is one call's way from its beginning to its end, and so
//! in one place though it is long.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use nix::errno::Errno;
use nix::libc::seccomp_notif;

use super::Shared;
use super::books::{Books, MANAGED};
use super::desk::{Copy, Desk};
use super::device::Device;
use super::escape::Asked;
use super::listener::{CallerGone, Listener, Reply};
use super::memory::{Count, Slot};
use super::stash::{Doubtful, Found, Outcome};
use super::target::Target;
use crate::gate::policy::{self, Pass, Passed, Verdict};
use crate::gate::settings::{Managed, NodeKind};
use crate::gate::syscall::{self, Syscall};
use crate::gate::traps;
use crate::ledger::{Client, Entry, Handle, Hold};
use crate::rm::{self, Answer, Layout, Refusal, control, refuse};

/// Copies that go back at most: the struct, its parameters, and what those point at.
const MOST_WRITES: usize = 2 + control::MAX_PIECES;

/// Nobody waits for the answer, and nothing was done.
const INTERRUPTED: Over = Reply::Errno(Errno::EINTR as i32);

/// What a call asks for, by its words: descriptor and request, and argument.
pub(super) fn asked(notice: &seccomp_notif) -> (u64, u64) {
    let [descriptor, request, argument, ..] = notice.data.args;
    (request & 0xffff_ffff | descriptor << 32, argument)
}

/// An object of the driver's that a call made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Made {
    pub(super) client: u32,
    pub(super) parent: u32,
    pub(super) handle: u32,
}

/// A call.
#[derive(Debug)]
pub(super) struct Case<'a> {
    pub(super) shared: &'a Shared,
    pub(super) desk: &'a mut Desk,
    pub(super) slot: Slot<'a>,
    pub(super) listener: &'a Listener,
    notice: seccomp_notif,
    /// A worker before asked the driver already, and didn't live to see the answer.
    pub(super) again: bool,
    pub(super) target: Option<Arc<Target>>,
    pub(super) device: Option<Device>,
    /// Where the copies belong.
    writes: [Option<(u64, Copy)>; MOST_WRITES],
    made: Vec<Made>,
    /// Whether it must not be done twice.
    once: bool,
    /// Whether later calls of the thread wait for it.
    queued: bool,
    /// Whether the caller may have other than what was read, by an earlier call's answer.
    may_differ: bool,
    /// What was done already, of which the caller is told now.
    done: Option<Outcome>,
    counted: Count,
}

/// Why a call is over before it was made.
pub(super) type Over = Reply;

impl<'a> Case<'a> {
    pub(super) fn new(
        shared: &'a Shared,
        desk: &'a mut Desk,
        slot: Slot<'a>,
        listener: &'a Listener,
        notice: seccomp_notif,
        again: bool,
    ) -> Self {
        desk.begin();
        Case {
            shared,
            desk,
            slot,
            listener,
            notice,
            again,
            target: None,
            device: None,
            writes: [None; MOST_WRITES],
            made: Vec::new(),
            once: false,
            queued: false,
            may_differ: false,
            done: None,
            counted: Count::Refused,
        }
    }

    pub(super) fn books(&self) -> MutexGuard<'a, Books> {
        self.shared.books()
    }

    /// The descriptor that it was made by.
    pub(super) fn descriptor(&self) -> i32 {
        let [descriptor, ..] = self.notice.data.args;
        rm::uvm::number(descriptor).cast_signed()
    }

    fn tid(&self) -> i32 {
        self.notice.pid.cast_signed()
    }

    pub(super) fn target(&self) -> Result<&Target, Over> {
        self.target.as_deref().ok_or(Reply::Errno(Errno::ESRCH as i32))
    }

    pub(super) fn device(&self) -> Result<&Device, Over> {
        self.device.as_ref().ok_or(Reply::Errno(Errno::EBADF as i32))
    }

    pub(super) fn is_valid(&self) -> bool {
        self.listener.is_valid(self.notice.id)
    }

    /// Deals with it.
    pub(super) fn serve(mut self) {
        let data = self.notice.data;
        let reply = match syscall::of(data.arch, data.nr, &data.args) {
            Some(Syscall::Ioctl { descriptor, request, argument }) => {
                self.ioctl(descriptor, request, argument)
            }
            Some(Syscall::Map { descriptor, length, shared, offset }) => {
                self.map(descriptor, length, shared, offset)
            }
            None => {
                if self.shared.calm.allows() {
                    tracing::warn!(number = data.nr, "a system call that nobody asked for");
                }
                Err(Reply::Errno(Errno::ENOSYS as i32))
            }
        };
        self.finish(reply.unwrap_or_else(|over| over));
    }

    /// Writes back, and replies; stashes what was done for a caller that doesn't wait.
    fn finish(mut self, reply: Reply) {
        let done = self.done.take();
        let mut taken = false;
        let mut reply = reply;
        for write in &mut self.writes {
            write.take_if(|(_, copy)| !self.may_differ && self.desk.is_as_read(*copy));
        }
        let writes = done.is_some() || !self.writes.iter().all(Option::is_none);
        // What was made is to be found by the next worker if nobody takes it.
        if !writes && self.made.is_empty() || self.is_valid() {
            // As the driver: what was done stays done.
            if self.write(done.as_ref()).is_err() {
                reply = Reply::Errno(Errno::EFAULT as i32);
            }
            let parts = reply.parts();
            self.slot.decided(parts.0, parts.1, parts.2);
            taken = self.listener.send(self.notice.id, parts) != Err(CallerGone);
        }
        self.shared.memory.count(self.counted);
        if !taken {
            if let Some(target) = &self.target {
                target.was_late.store(true, Ordering::Release);
            }
            match done {
                Some(done) => self.keep(done),
                // Who stopped waiting before the driver was asked is answered when it asks again.
                None if self.once && reply != INTERRUPTED => self.stash(reply),
                // Nothing is to be undone, whatever the slot says.
                None => self.slot.forget(self.notice.id),
            }
        }
        if self.queued {
            self.shared.turns.leave(self.slot.number());
        }
        self.desk.tidy();
    }

    /// Writes what is to go back, of this call or of the one that was made in its place.
    fn write(&self, done: Option<&Outcome>) -> Result<(), Errno> {
        let Some(target) = &self.target else { return Ok(()) };
        let Some(done) = done else {
            let copies = |(address, copy)| (address, self.desk.copy(copy));
            return target.write(&self.writes.map(|write| write.map(copies)));
        };
        let mut output = done.output.iter();
        output.try_for_each(|(address, bytes)| target.write(&[Some((*address, bytes))]))
    }

    fn stash(&mut self, reply: Reply) {
        let Some(thread) = self.target.as_ref().map(|target| target.thread) else { return };
        let output = self.writes.into_iter().flatten();
        let output =
            output.map(|(address, copy)| (address, self.desk.copy(copy).to_vec())).collect();
        let told = self.writes.iter().flatten().any(|(_, copy)| *copy == Copy::Params);
        let params = if told { &self.desk.params[..] } else { self.desk.params_read() };
        let after = [&self.desk.bytes[..], params].concat();
        let made = std::mem::take(&mut self.made);
        // What is kept keeps a client alive, so it is only where it's needed.
        let device = self.device.take().filter(|_| !made.is_empty());
        let outcome = Outcome {
            thread,
            asked: self.asked(),
            input: self.desk.input.clone(),
            after,
            output,
            reply,
            device,
            made,
            mark: (0, 0),
            since: Instant::now(),
        };
        self.keep(outcome);
    }

    /// The answer waits for the thread to make the call again.
    fn keep(&mut self, outcome: Outcome) {
        let mark = (self.slot.number(), self.notice.id);
        if outcome.made.is_empty() {
            // The next worker has nothing to undo.
            self.slot.forget(self.notice.id);
        }
        let outcome = Outcome { mark, since: Instant::now(), ..outcome };
        if let Some(oldest) = self.shared.stash.keep(outcome) {
            self.shared.undo(oldest);
        }
        self.shared.auditor.wake();
    }

    fn asked(&self) -> (u64, u64) {
        asked(&self.notice)
    }

    /// All is read: whether the caller still waits, and the call wasn't made already, for the
    /// same thread, and not taken.
    ///
    /// Who asks whether it still waits does so behind all calls that came before. So of two of
    /// one thread, the later waits for the earlier, or this finds its caller gone.
    pub(super) fn only_once(&mut self) -> Result<(), Over> {
        let thread = self.target()?.thread;
        self.slot.is_of(thread);
        let (turns, slot) = (&self.shared.turns, self.slot.number());
        turns.queue(slot, thread);
        self.queued = true;
        self.still_waits()?;
        if !turns.wait(slot, thread, || self.is_valid()) {
            return Err(INTERRUPTED);
        }
        self.once = true;
        // The one before may have answered after this one was read.
        self.may_differ = self.target()?.was_late.swap(false, Ordering::AcqRel);
        self.desk.remember();
        if let Some(call) = self.shared.stash.doubted(thread, self.asked()) {
            let Doubtful { object: (client, handle), was_there, .. } = call;
            self.again = true;
            self.slot.executing(client, handle, was_there);
        }
        match self.shared.stash.take(thread, self.asked(), &self.desk.input) {
            Found::Nothing => Ok(()),
            Found::Other(outcome) => {
                self.shared.undo(outcome);
                Ok(())
            }
            Found::Same(outcome) => {
                self.shared.unmark(&outcome);
                if let Some(made) = outcome.made.first() {
                    self.slot.executing(made.client, made.handle, false);
                }
                // What was read is no answer.
                self.write_nothing();
                self.counted = Count::Executed;
                let reply = outcome.reply;
                self.done = Some(outcome);
                Err(reply)
            }
        }
    }

    /// What was read is of the caller, if it still waits.
    pub(super) fn still_waits(&self) -> Result<(), Over> {
        if self.is_valid() { Ok(()) } else { Err(INTERRUPTED) }
    }

    /// Finds out which of the driver's files a descriptor is.
    fn open(&mut self, descriptor: i32) -> Result<(), Over> {
        let duplicate = self.shared.targets.duplicate(self.tid(), descriptor);
        let (target, file) = duplicate.map_err(|errno| self.out_of_reach(errno))?;
        self.target = Some(target);
        self.leave_the_runtime_alone()?;
        let device = Device::of(&self.shared.settings.nodes, file);
        // A terminal's, a disk's: not ours to make, and could be another by the time it
        // continues.
        let device = device.map_err(|_| Reply::Errno(Errno::ENOTTY as i32))?;
        self.shared.opened(&device);
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
    fn see(&self) -> Result<(), Over> {
        let process = self.target()?.process;
        if self.books().processes.contains(&process) {
            return Ok(());
        }
        // Or it could be a stranger who has the number of a thread that is gone.
        self.still_waits()?;
        if self.books().saw(process) {
            // Its death is to be waited for, whatever it calls.
            self.shared.auditor.wake();
            return Ok(());
        }
        self.log("more processes than can be kept account of");
        Err(Reply::Errno(Errno::ENOMEM as i32))
    }

    fn ioctl(&mut self, descriptor: i32, request: u64, argument: u64) -> Result<Reply, Over> {
        // The filter is coarser than we are. Who the descriptor belongs to is no question:
        // the request can't change any more, and is none that takes memory.
        if !traps::is_one(rm::uvm::number(request)) {
            return Ok(Reply::Continue);
        }
        // Read before it's known whose it is: what continues whatever its descriptor is, is
        // let go without a look at it, which would prove nothing.
        let mut asked = None;
        if traps::is_escape(rm::uvm::number(request)) {
            let target = self.shared.targets.probable(self.tid());
            self.target = Some(target.map_err(|errno| self.out_of_reach(errno))?);
            self.leave_the_runtime_alone()?;
            let read = self.read_escape(request, argument);
            if let Some(pass) = read.as_ref().ok().and_then(Asked::passes) {
                let target = self.shared.targets.get(self.tid());
                self.target = Some(target.map_err(|errno| self.out_of_reach(errno))?);
                self.leave_the_runtime_alone()?;
                self.see()?;
                return Ok(self.continued(pass));
            }
            asked = Some(read);
        }
        self.open(descriptor)?;
        match (self.device()?.kind, asked) {
            (NodeKind::Control | NodeKind::Gpu(_), asked) => {
                let asked = asked.unwrap_or_else(|| self.read_escape(request, argument));
                self.resource_manager(asked)
            }
            (NodeKind::Uvm, _) => self.uvm(request, argument),
            (NodeKind::Other, _) => Err(Reply::Errno(Errno::ENOTTY as i32)),
        }
    }

    /// Copies the call's struct from the caller.
    pub(super) fn read_struct(&mut self, address: u64, size: usize) -> Result<(), Over> {
        let target = self.target.as_ref().ok_or(Reply::Errno(Errno::ESRCH as i32))?;
        let read = self.desk.read_struct(target, address, size);
        read.map_err(|errno| Reply::Errno(errno as i32))
    }

    /// Copies what it points at.
    pub(super) fn read_params(&mut self, address: u64, size: usize) -> Result<(), Over> {
        let target = self.target.as_ref().ok_or(Reply::Errno(Errno::ESRCH as i32))?;
        let read = self.desk.read_params(target, address, size);
        read.map_err(|errno| Reply::Errno(errno as i32))
    }

    /// Copies what that points at to a place in the list: where it begins, and its bytes.
    pub(super) fn read_piece(&mut self, address: u64, place: (usize, usize)) -> Result<(), Over> {
        let target = self.target.as_ref().ok_or(Reply::Errno(Errno::ESRCH as i32))?;
        let read = self.desk.read_piece(target, address, place);
        read.map_err(|errno| Reply::Errno(errno as i32))
    }

    /// Copies go back, in this order.
    pub(super) fn write_back(&mut self, place: usize, address: u64, copy: Copy) {
        if let Some(write) = self.writes.get_mut(place) {
            *write = Some((address, copy));
        }
    }

    /// Nothing goes back.
    pub(super) fn write_nothing(&mut self) {
        self.writes = [None; MOST_WRITES];
    }

    pub(super) fn continued(&mut self, pass: &Pass) -> Reply {
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
            self.shared.auditor.wake();
        }
    }

    pub(super) fn executed(&mut self, made: impl IntoIterator<Item = Made>) -> Reply {
        self.made.extend(made);
        self.counted = Count::Executed;
        Reply::Done
    }

    /// Refused, for the quota.
    pub(super) fn over_quota(&mut self, layout: Option<&Layout>) -> Over {
        let reply = self.answer(refuse::OVER_QUOTA, layout);
        self.counted = Count::OverQuota;
        reply
    }

    /// Refused, as the driver would.
    pub(super) fn answer(&mut self, answer: Answer, layout: Option<&Layout>) -> Over {
        self.counted = Count::Refused;
        self.once = false;
        let errno = match answer {
            Answer::Errno(errno) => errno,
            Answer::Status(status) => {
                let patch = layout.and_then(|layout| refuse::status(layout, status));
                match patch.is_some_and(|patch| patch.apply(&mut self.desk.bytes)) {
                    true => {
                        self.writes.iter_mut().skip(1).for_each(|write| *write = None);
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
    pub(super) fn pretended(&mut self, layout: &Layout) -> Over {
        let answered = self.answer(Answer::Status(rm::number::NV_OK), Some(layout));
        self.counted = Count::Executed;
        answered
    }

    /// Refused, for what isn't known; the log says what.
    pub(super) fn refused(&mut self, refusal: &Refusal, layout: Option<&Layout>) -> Over {
        self.log(&refusal.to_string());
        self.answer(refusal.answer(), layout)
    }

    pub(super) fn log(&self, what: &str) {
        if self.shared.calm.allows() {
            let pid = self.target.as_ref().map_or(self.tid(), |target| target.pid);
            tracing::warn!(container = %self.shared.settings.short_id, pid, "refused: {what}");
        }
    }

    /// A shared mapping with an offset. Only UVM's can be managed memory; which file it
    /// will be of, another thread can still change, so mappings are looked at afterwards.
    fn map(
        &mut self,
        descriptor: i32,
        length: u64,
        shared: bool,
        offset: u64,
    ) -> Result<Reply, Over> {
        let is_uvm = match self.open(descriptor) {
            Ok(()) => self.device()?.kind == NodeKind::Uvm,
            Err(Reply::Errno(errno)) if errno == Errno::ENOTTY as i32 => false,
            Err(over) => return Err(over),
        };
        let process = self.target()?.process;
        if is_uvm && shared {
            self.map_uvm(process.0, offset, length)?;
        }
        let mut books = self.books();
        if books.saw(process) {
            books.mappers.insert(process, 0);
        }
        drop(books);
        match policy::pass(Passed::Mapping) {
            Verdict::Continue(pass) => Ok(self.continued(pass)),
            Verdict::Execute | Verdict::Refuse(_) => Err(Reply::Errno(Errno::EINVAL as i32)),
        }
    }

    /// Whether a mapping of UVM's may be: where it was announced, or is charged as managed.
    fn map_uvm(&mut self, space: u64, base: u64, length: u64) -> Result<(), Over> {
        let place = self.device()?.place;
        let mut books = self.books();
        // uvm_mmap gives -EINVAL for what it doesn't like, and CUDA takes ENOMEM for what it
        // is: no memory of that kind to be had.
        let refused = Err(Reply::Errno(Errno::ENOMEM as i32));
        if !books.saw_node(place) {
            return refused;
        }
        let announced = books.range(space, base);
        let end = base.checked_add(length);
        let within = announced.zip(end).is_some_and(|((from, bytes), end)| end - from <= bytes);
        if within {
            return Ok(());
        }
        if self.shared.settings.managed == Managed::Refuse {
            return refused;
        }
        let bytes = length.checked_next_multiple_of(4096).unwrap_or(u64::MAX);
        let gpus = self.shared.settings.gpus.len();
        let mut reservations = Vec::new();
        for gpu in 0..gpus {
            match books.ledger.reserve(gpu, bytes) {
                Ok(reservation) => reservations.push(reservation),
                Err(_) => break,
            }
        }
        let enough = reservations.len() == gpus
            && base & MANAGED == 0
            && books.announce(space | MANAGED, base, bytes);
        reservations.into_iter().for_each(|reservation| books.ledger.cancel(reservation));
        if !enough {
            self.counted = Count::OverQuota;
            return refused;
        }
        for gpu in 0..gpus {
            let (client, parent, handle) = (Client(u32::MAX), Handle(u32::MAX), Handle(0));
            let hold = Hold::Mapping { space: space | MANAGED, base: base | gpu as u64 };
            books.enter(Entry::Commit { gpu, bytes, client, parent, handle });
            books.enter(Entry::Hold { hold, client, handle });
            books.enter(Entry::Free { client, handle });
        }
        Ok(())
    }
}
