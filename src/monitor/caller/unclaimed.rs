//! Replies that no caller took, because a signal ended the caller's wait.
//!
//! The kernel makes such a call again, or tells the program, which mostly makes it again. Where the thread makes the
//! same call next, it is given the kept reply. Where the thread makes another call, or ends, what the first call made
//! is freed. A thread has one such reply at most. A device file that is kept here keeps its client alive, so few
//! replies are kept.

use std::collections::VecDeque;

use crate::monitor::caller::fingerprint::Fingerprint;
use crate::monitor::caller::listener::Reply;
use crate::monitor::lock::Lock;
use crate::monitor::node::Device;
use crate::monitor::snapshot::KeptReply;
use crate::process::ProcessId;
use crate::rm::call::Object;

/// How many calls are kept.
const MOST_KEPT: usize = 32;

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
    /// The objects that the call made, to be freed where nobody takes the reply.
    pub(crate) made: Vec<Object>,
}

/// The calls whose reply nobody took.
#[derive(Debug, Default)]
pub(crate) struct Unclaimed {
    kept: Lock<VecDeque<UnclaimedCall>>,
}

/// What is kept for the thread of a call.
#[derive(Debug)]
pub(crate) enum Match {
    Nothing,
    /// The same call.
    Same(UnclaimedCall),
    /// Another call, which is to be undone first.
    Undo(UnclaimedCall),
}

impl Unclaimed {
    /// Keeps a call. Returns the oldest call, to be undone, where too many are kept.
    pub(crate) fn keep(&self, call: UnclaimedCall) -> Option<UnclaimedCall> {
        let mut all = self.kept.lock();
        all.push_back(call);
        if all.len() > MOST_KEPT { all.pop_front() } else { None }
    }

    /// Takes out the call that is kept for `thread`, whose next call is `read`.
    pub(crate) fn take(&self, thread: ProcessId, read: Fingerprint) -> Match {
        match self.remove(|kept| kept.thread == thread) {
            None => Match::Nothing,
            Some(kept) if kept.seen.contains(&read) => Match::Same(kept),
            Some(kept) => Match::Undo(kept),
        }
    }

    /// Takes out a call whose thread has ended.
    pub(crate) fn take_of_ended(&self, lives: impl Fn(ProcessId) -> bool) -> Option<UnclaimedCall> {
        self.remove(|kept| !lives(kept.thread))
    }

    fn remove(&self, matches: impl Fn(&UnclaimedCall) -> bool) -> Option<UnclaimedCall> {
        let mut all = self.kept.lock();
        let at = all.iter().position(matches)?;
        all.remove(at)
    }

    /// What a snapshot has of them.
    pub(crate) fn records(&self) -> Vec<KeptReply> {
        let kept = self.kept.lock();
        let record = |call: &UnclaimedCall| KeptReply {
            thread: call.thread,
            seen: call.seen.map(|seen| seen.0),
            output: call.output.clone(),
            reply: call.reply.parts(),
            is_ok: call.is_ok,
            made: call.made.iter().map(|of| (of.client, of.parent, of.handle)).collect(),
            file: call.device.as_ref().map(Device::descriptor),
        };
        kept.iter().map(record).collect()
    }

    /// Keeps a call that a snapshot has, with the file of its descriptor.
    pub(crate) fn resume(&self, reply: KeptReply, device: Option<Device>) {
        let KeptReply { thread, seen, output, reply, is_ok, made, .. } = reply;
        let object = |(client, parent, handle)| Object { client, parent, handle };
        self.kept.lock().push_back(UnclaimedCall {
            thread,
            seen: seen.map(Fingerprint),
            output,
            reply: Reply::of(reply),
            is_ok,
            device,
            made: made.into_iter().map(object).collect(),
        });
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.kept.lock().is_empty()
    }
}

#[cfg(test)]
mod tests {
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
    fn the_same_call_of_the_same_thread_finds_what_was_done_once() {
        let unclaimed = Unclaimed::default();
        assert!(unclaimed.keep(call(7)).is_none());
        for other in [thread(8), ProcessId { pid: 7, start_ticks: 6 }] {
            assert!(matches!(unclaimed.take(other, seen(READ)), Match::Nothing));
        }
        assert!(matches!(unclaimed.take(thread(7), seen(READ)), Match::Same(_)));
        assert!(matches!(unclaimed.take(thread(7), seen(READ)), Match::Nothing));
        assert!(unclaimed.keep(call(7)).is_none());
        assert!(matches!(unclaimed.take(thread(7), seen(ANSWERED)), Match::Same(_)));
        assert!(unclaimed.keep(call(7)).is_none());
        assert!(matches!(unclaimed.take(thread(7), seen(&[4])), Match::Undo(_)));
    }

    #[test]
    fn it_is_found_after_an_update() {
        let unclaimed = Unclaimed::default();
        for reply in [Reply::Done, Reply::Continue, Reply::Errno(4)] {
            unclaimed.keep(UnclaimedCall { reply, output: vec![(9, vec![1])], ..call(7) });
        }
        let next = Unclaimed::default();
        unclaimed.records().into_iter().for_each(|record| next.resume(record, None));
        assert_eq!(next.records(), unclaimed.records());
        assert!(matches!(next.take(thread(7), seen(READ)), Match::Same(_)));
    }

    #[test]
    fn it_stays_small_and_forgets_threads_that_are_gone() {
        let unclaimed = Unclaimed::default();
        for tid in 1..=i32::try_from(MOST_KEPT).unwrap() {
            assert!(unclaimed.keep(call(tid)).is_none());
        }
        let oldest = unclaimed.keep(call(99));
        assert_eq!(oldest.map(|kept| kept.thread), Some(thread(1)));
        assert!(unclaimed.take_of_ended(|_| true).is_none());
        let left = unclaimed.take_of_ended(|of| of != thread(5));
        assert_eq!(left.map(|kept| kept.thread), Some(thread(5)));
        let left = std::iter::from_fn(|| unclaimed.take_of_ended(|_| false)).count();
        assert_eq!((left, unclaimed.is_empty()), (MOST_KEPT - 1, true));
    }
}
