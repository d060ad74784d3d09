//! Calls whose callers a signal interrupts: entered only if the kernel is older than Linux 5.19, and lacks
//! `SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV`. There any signal ends a caller's wait, and the kernel makes the call
//! again, or reports the interruption to the program, which mostly makes the call again.
//!
//! - **The reply is unclaimed.** It is retained. If the thread makes the same call next, it is given the retained
//!   reply. If the thread makes another call, or ends, what the first call made is freed. A thread has one such reply
//!   at most. A device file that is retained here keeps its client alive, so few replies are retained.
//! - **The monitor isn't done with the first call when the second one comes.** The driver can't have two calls of a
//!   thread at once: a thread is back before it calls again. So the second call waits for the first one.
//! - **The reply was sent, and is lost:** the kernel checks for signals before it checks for the reply
//!   (`seccomp_do_user_notification`, `wait_for_completion_interruptible` and then the lock). Of 5,000 signals that
//!   come in the middle of a call, about one does that. The caller then makes the call again, with the answer in its
//!   memory, and is recognised by that.
//!
//! A program that repeats a call by itself deceives only itself.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hasher};
use std::sync::{Condvar, PoisonError};
use std::time::Duration;

use crate::caller::listeners::Reply;
use crate::node::Device;
use crate::snapshot::RetainedReply;
use crate::sync::Lock;
use cgpu_host::process::ProcessId;
use nvrm::call::Object;

/// How many replies are retained.
const MOST_RETAINED: usize = 32;

/// Of how many threads the last answer is known.
const MOST_ANSWERED: usize = 256;

/// How often a call that waits checks whether its caller still does.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A hash of a call: its registers, and its struct and parameters as they were at some time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fingerprint(u64);

impl Fingerprint {
    /// The hash of a call's registers, its struct, and the parameters that the struct points at.
    pub(crate) fn of(registers: Registers, bytes: &[u8], params: &[u8]) -> Self {
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(registers.0);
        hasher.write_u64(registers.1);
        hasher.write(bytes);
        hasher.write(params);
        Fingerprint(hasher.finish())
    }
}

/// The registers of a call: descriptor and request in one word, and the argument.
pub(crate) type Registers = (u64, u64);

/// A call that was made, and whose caller didn't wait for the reply.
#[derive(Debug)]
pub(crate) struct UnclaimedCall {
    pub(crate) thread: ProcessId,
    /// The call as it was read, and as it was answered: the caller's memory has one or the other.
    pub(crate) seen: [Fingerprint; 2],
    /// What is to be written to the caller's memory: addresses and bytes.
    pub(crate) output: Vec<(u64, Vec<u8>)>,
    pub(crate) reply: Reply,
    /// Whether the driver had done the call.
    pub(crate) is_ok: bool,
    /// The file that the call was made through.
    pub(crate) device: Option<Device>,
    /// The objects that the call made, to be freed if the reply stays unclaimed.
    pub(crate) made: Vec<Object>,
}

/// What is known of calls that may have been interrupted.
#[derive(Debug, Default)]
pub(crate) struct Interrupted {
    served: Lock<Served>,
    /// A thread has left [`Self::served`].
    left: Condvar,
    unclaimed: Lock<VecDeque<UnclaimedCall>>,
    /// Each thread's last call as its memory had it when the call was answered, if the driver had done the call.
    answered: Lock<HashMap<ProcessId, Fingerprint>>,
}

/// The threads of which a call is served.
#[derive(Debug, Default)]
struct Served {
    threads: HashSet<ProcessId>,
    /// How many calls wait for an earlier one.
    waiting: usize,
}

/// What is retained for the thread of a call.
#[derive(Debug)]
pub(crate) enum Match {
    Nothing,
    Same(UnclaimedCall),
    /// Another call, which is to be undone first.
    Undo(UnclaimedCall),
}

impl Interrupted {
    /// Begins a call of `thread`, once none of its calls is served, as long as `waits` says that it is worth it. `true`
    /// if it is begun; [`Self::leave`] ends it.
    ///
    /// If the caller still waits after that, the call is the thread's last one, and no other is served: an earlier one
    /// that comes later finds that its caller is gone.
    pub(crate) fn enter(&self, thread: ProcessId, waits: impl Fn() -> bool) -> bool {
        let mut served = self.served.lock();
        while !served.threads.insert(thread) {
            if !waits() {
                return false;
            }
            served.waiting += 1;
            let waited = self.left.wait_timeout(served, POLL_INTERVAL);
            (served, _) = waited.unwrap_or_else(PoisonError::into_inner);
            served.waiting -= 1;
        }
        true
    }

    /// Ends the call of `thread` that is served.
    pub(crate) fn leave(&self, thread: ProcessId) {
        let mut served = self.served.lock();
        served.threads.remove(&thread);
        if served.waiting > 0 {
            self.left.notify_all();
        }
    }

    /// Retains a call. Returns the oldest call, to be undone, if too many are retained.
    pub(crate) fn keep(&self, call: UnclaimedCall) -> Option<UnclaimedCall> {
        let mut all = self.unclaimed.lock();
        all.push_back(call);
        if all.len() > MOST_RETAINED { all.pop_front() } else { None }
    }

    /// Takes out the call that is retained for `thread`, whose next call is `read`.
    pub(crate) fn take(&self, thread: ProcessId, read: Fingerprint) -> Match {
        match self.remove(|retained| retained.thread == thread) {
            None => Match::Nothing,
            Some(retained) if retained.seen.contains(&read) => Match::Same(retained),
            Some(retained) => Match::Undo(retained),
        }
    }

    /// Takes out a call whose thread has ended.
    pub(crate) fn take_of_ended(&self, lives: impl Fn(ProcessId) -> bool) -> Option<UnclaimedCall> {
        self.remove(|retained| !lives(retained.thread))
    }

    fn remove(&self, matches: impl Fn(&UnclaimedCall) -> bool) -> Option<UnclaimedCall> {
        let mut all = self.unclaimed.lock();
        let at = all.iter().position(matches)?;
        all.remove(at)
    }

    /// Whether no call is retained.
    pub(crate) fn is_empty(&self) -> bool {
        self.unclaimed.lock().is_empty()
    }

    /// Remembers a call that the driver has done, just before the thread is answered.
    pub(crate) fn set_answered(&self, thread: ProcessId, answered: Fingerprint) {
        let mut all = self.answered.lock();
        if all.len() >= MOST_ANSWERED {
            all.clear();
        }
        all.insert(thread, answered);
    }

    /// Takes the call that the thread was answered last, so that no later call finds it.
    pub(crate) fn take_answered(&self, thread: ProcessId) -> Option<Fingerprint> {
        self.answered.lock().remove(&thread)
    }

    /// What a snapshot has of them: the calls that are retained, and the last answers.
    pub(crate) fn records(&self) -> (Vec<RetainedReply>, Vec<(ProcessId, u64)>) {
        let retained = self.unclaimed.lock();
        let record = |call: &UnclaimedCall| RetainedReply {
            thread: call.thread,
            seen: call.seen.map(|seen| seen.0),
            output: call.output.clone(),
            reply: call.reply.parts(),
            is_ok: call.is_ok,
            made: call.made.iter().map(|of| (of.client, of.parent, of.handle)).collect(),
            file: call.device.as_ref().map(Device::descriptor),
        };
        let answered = self.answered.lock();
        let answered = answered.iter().map(|(thread, answered)| (*thread, answered.0));
        (retained.iter().map(record).collect(), answered.collect())
    }

    /// Retains a call that a snapshot has, with the file of its descriptor.
    pub(crate) fn resume(&self, reply: RetainedReply, device: Option<Device>) {
        let RetainedReply { thread, seen, output, reply, is_ok, made, .. } = reply;
        let object = |(client, parent, handle)| Object { client, parent, handle };
        self.unclaimed.lock().push_back(UnclaimedCall {
            thread,
            seen: seen.map(Fingerprint),
            output,
            reply: Reply::of(reply),
            is_ok,
            device,
            made: made.into_iter().map(object).collect(),
        });
    }

    /// Remembers the last answers that a snapshot has.
    pub(crate) fn resume_answered(&self, answered: Vec<(ProcessId, u64)>) {
        let answered = answered.into_iter().map(|(thread, hash)| (thread, Fingerprint(hash)));
        self.answered.lock().extend(answered);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const READ: &[u8] = &[3];
    const ANSWERED: &[u8] = &[9];

    fn seen(bytes: &[u8]) -> Fingerprint {
        Fingerprint::of((7, 2), bytes, &[])
    }

    fn thread(pid: i32) -> ProcessId {
        ProcessId { pid, start_ticks: 5 }
    }

    fn call(pid: i32) -> UnclaimedCall {
        UnclaimedCall {
            thread: thread(pid),
            seen: [seen(READ), seen(ANSWERED)],
            output: vec![],
            reply: Reply::Done,
            is_ok: true,
            device: None,
            made: vec![Object { client: 5, parent: 5, handle: 6 }],
        }
    }

    #[test]
    fn call_is_identified_by_registers_and_read_bytes() {
        let read = Fingerprint::of((7, 2), &[1, 2], &[]);
        assert_eq!(read, Fingerprint::of((7, 2), &[1], &[2]), "read at once, or in two parts");
        assert_ne!(read, Fingerprint::of((7, 2), &[1], &[3]));
        assert_ne!(read, Fingerprint::of((7, 3), &[1], &[2]));
    }

    #[test]
    fn call_waits_only_for_its_threads_earlier_call() {
        let calls = Interrupted::default();
        let later = ProcessId { pid: 7, start_ticks: 6 };
        for first in [thread(7), thread(8), later] {
            assert!(calls.enter(first, || unreachable!("nothing of it is served")));
        }
        assert!(!calls.enter(thread(7), || false), "its caller is gone");
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| {
                let came = calls.enter(thread(7), || true);
                (came, is_done.load(Ordering::SeqCst))
            });
            while calls.served.lock().waiting == 0 {
                std::thread::yield_now();
            }
            calls.leave(thread(8));
            is_done.store(true, Ordering::SeqCst);
            calls.leave(thread(7));
            assert_eq!(waits.join().unwrap(), (true, true));
        });
        calls.leave(thread(7));
        calls.leave(later);
        assert!(calls.served.lock().threads.is_empty());
    }

    /// The same call of the same thread finds what was done, once; another call of the thread has
    /// it undone.
    #[test]
    fn threads_repeated_call_finds_its_result_once() {
        let calls = Interrupted::default();
        assert!(calls.keep(call(7)).is_none());
        for other in [thread(8), ProcessId { pid: 7, start_ticks: 6 }] {
            assert!(matches!(calls.take(other, seen(READ)), Match::Nothing));
        }
        assert!(matches!(calls.take(thread(7), seen(READ)), Match::Same(_)));
        assert!(matches!(calls.take(thread(7), seen(READ)), Match::Nothing));
        assert!(calls.keep(call(7)).is_none());
        assert!(matches!(calls.take(thread(7), seen(ANSWERED)), Match::Same(_)));
        assert!(calls.keep(call(7)).is_none());
        assert!(matches!(calls.take(thread(7), seen(&[4])), Match::Undo(_)));
    }

    /// A thread's last answer is found once, and answers are retained of a bounded number of
    /// threads.
    #[test]
    fn threads_last_answer_is_found_once() {
        let calls = Interrupted::default();
        calls.set_answered(thread(7), seen(READ));
        calls.set_answered(thread(7), seen(ANSWERED));
        assert_eq!(calls.take_answered(thread(8)), None);
        assert_eq!(calls.take_answered(thread(7)), Some(seen(ANSWERED)));
        assert_eq!(calls.take_answered(thread(7)), None);
        for pid in 1..=1000 {
            calls.set_answered(thread(pid), seen(READ));
        }
        assert!(calls.answered.lock().len() <= MOST_ANSWERED);
        assert_eq!(calls.take_answered(thread(1000)), Some(seen(READ)));
    }

    #[test]
    fn all_is_found_after_an_update() {
        let calls = Interrupted::default();
        for reply in [Reply::Done, Reply::Continue, Reply::Errno(4)] {
            calls.keep(UnclaimedCall { reply, output: vec![(9, vec![1])], ..call(7) });
        }
        calls.set_answered(thread(8), seen(ANSWERED));
        let (retained, answered) = calls.records();
        let next = Interrupted::default();
        retained.into_iter().for_each(|record| next.resume(record, None));
        next.resume_answered(answered);
        assert_eq!(next.records(), calls.records());
        assert!(matches!(next.take(thread(7), seen(READ)), Match::Same(_)));
        assert_eq!(next.take_answered(thread(8)), Some(seen(ANSWERED)));
    }

    #[test]
    fn retained_calls_stay_bounded_and_forget_exited_threads() {
        let calls = Interrupted::default();
        for tid in 1..=i32::try_from(MOST_RETAINED).unwrap() {
            assert!(calls.keep(call(tid)).is_none());
        }
        let oldest = calls.keep(call(99));
        assert_eq!(oldest.map(|retained| retained.thread), Some(thread(1)));
        assert!(calls.take_of_ended(|_| true).is_none());
        let left = calls.take_of_ended(|of| of != thread(5));
        assert_eq!(left.map(|retained| retained.thread), Some(thread(5)));
        let left = std::iter::from_fn(|| calls.take_of_ended(|_| false)).count();
        assert_eq!((left, calls.is_empty()), (MOST_RETAINED - 1, true));
    }
}
