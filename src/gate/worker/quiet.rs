//! What the driver says, asked at a moment of which the books know all.
//!
//! The driver rounds up what it gives a call, and shows it before the call is back. Then it has
//! more than anybody asked for, which is what memory taken past the monitor looks like, too. So
//! where it shows more, nobody begins to allocate until those who do are done, and it's asked
//! again. What isn't done in time is no shield: see [`Shared::is_certain`].
//!
//! And where it has less than the books, that can be a call underway, too: then it's asked at such
//! a moment the next time, and for a call that would be refused from the first, or siblings whose
//! calls never stop would keep all that was given back from being learnt. Knows no verdicts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::books::Books;
use super::memory::Slot;
use super::own::Own;
use super::target::process_id;
use super::unanswered::Amount;
use super::{OpenBooks, Shared};
use crate::gate::audit::Named;
use crate::ledger::Process;
use crate::rm::about::Held;

/// How long an audit waits for calls.
const PAUSE: Duration = Duration::from_millis(100);

/// How long a pause holds for those who want to begin: the driver may keep the audit for ever.
const MOST: Duration = Duration::from_millis(250);

/// Time between two looks.
const LOOK: Duration = Duration::from_micros(200);

/// How long it may look as if there were more than was asked for, while a call isn't done; and how
/// long at most, where calls that are done meanwhile were given more.
pub(super) const DOUBT: Duration = Duration::from_millis(400);
const MOST_DOUBT: Duration = Duration::from_millis(800);

/// Numbers of processes that are dead.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    /// Of processes that are forgotten: nobody has them.
    pub(super) former: BTreeSet<u32>,
    /// Processes that are known, and whose numbers others have by now: what the driver shows there is
    /// those'.
    pub(super) lost: BTreeSet<Process>,
}

impl Numbers {
    /// Those under which the driver shows what is the container's.
    fn asked_for(&self, books: &Books) -> BTreeSet<u32> {
        let processes = books.processes.difference(&self.lost);
        let pids = processes.map(|process| process_id(*process).pid.cast_unsigned());
        // Somebody may have a client of those who are dead.
        pids.chain(self.former.iter().copied()).collect()
    }
}

/// What the driver said of a GPU, and how the books were then.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) held: Vec<Held>,
    /// What of the container's is ours by its stakes, in bytes.
    pub(super) own_bytes: u64,
    pub(super) generation: u64,
    pub(super) underway: usize,
    /// Nobody was given something that isn't in the books.
    is_quiet: bool,
    /// The names that there were, where any show that aren't their makers'.
    pub(super) named: Option<Named>,
}

/// GPUs that seem to have more than was asked for: since when, and since when that isn't explained.
#[derive(Debug, Default)]
pub(super) struct Doubts(Mutex<BTreeMap<usize, (Instant, Instant)>>);

impl Doubts {
    fn all(&self) -> MutexGuard<'_, BTreeMap<usize, (Instant, Instant)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A call that is done was given more than it asked for, which may have been that. What seems so
    /// by now may be another's.
    pub(super) fn explain(&self, gpu: usize) {
        if let Some((_, since)) = self.all().get_mut(&gpu) {
            *since = Instant::now();
        }
    }

    /// Whether it has seemed so for too long.
    fn last(&self, gpu: usize) -> bool {
        let now = Instant::now();
        let (first, since) = *self.all().entry(gpu).or_insert((now, now));
        since.elapsed() > DOUBT || first.elapsed() > MOST_DOUBT
    }

    /// It doesn't any more.
    pub(super) fn dispel(&self, gpu: usize) {
        self.all().remove(&gpu);
    }
}

/// While it is there nobody begins to allocate.
#[derive(Debug)]
pub(super) struct Pause<'a> {
    shared: &'a Shared,
}

impl Drop for Pause<'_> {
    fn drop(&mut self) {
        self.shared.books().pauses -= 1;
    }
}

impl Shared {
    /// The books, where nobody waits for all calls to be done that change what is charged, or for
    /// one who goes on with what he had begun.
    pub(super) fn books_to_begin(&self, slot: Slot<'_>) -> OpenBooks<'_> {
        loop {
            let books = self.books();
            let is_over = || books.paused_until.is_none_or(|until| until < Instant::now());
            if books.pauses == 0 || books.goes_on(slot) || is_over() {
                return books;
            }
            drop(books);
            std::thread::sleep(LOOK);
        }
    }

    /// What the driver says of the container's processes, and those before them; what is to be kept
    /// until that is dealt with. `until` is how long this audit waits at most, once it does.
    pub(super) fn ask(
        &self,
        own: &Own,
        gpu: usize,
        numbers: &Numbers,
        until: &mut Option<Instant>,
    ) -> Option<(Found, Option<Pause<'_>>)> {
        let found = self.ask_once(own, gpu, numbers)?;
        if !self.may_be_rounded(gpu, &found) {
            return Some((found, None));
        }
        let is_pending =
            |books: &Books| books.ledger.expected(gpu).is_some_and(|is| is.pending_bytes > 0);
        // Those that hang are no shield, and aren't waited for each time.
        let pause = self.pause(until, |books| is_pending(books) && books.is_moving());
        let is_quiet = !is_pending(&self.books());
        let found = self.ask_once(own, gpu, numbers)?;
        Some((Found { is_quiet, ..found }, Some(pause)))
    }

    /// Lets nobody begin, and waits for those who did.
    pub(super) fn stand_still(&self, until: &mut Option<Instant>) -> Pause<'_> {
        self.pause(until, Books::is_moving)
    }

    /// Lets nobody begin, and waits while the books are `moving`, but once for calls that hang.
    fn pause(&self, until: &mut Option<Instant>, moving: impl Fn(&Books) -> bool) -> Pause<'_> {
        let now = Instant::now();
        let until = *until.get_or_insert(now + PAUSE);
        let mut books = self.books();
        if books.pauses == 0 {
            books.paused_until = Some(now + MOST);
        }
        books.pauses += 1;
        drop(books);
        let pause = Pause { shared: self };
        loop {
            let mut books = self.books();
            if !moving(&books) {
                break;
            }
            if Instant::now() >= until {
                books.wait_no_more();
                break;
            }
            drop(books);
            std::thread::sleep(LOOK);
        }
        pause
    }

    fn ask_once(&self, own: &Own, gpu: usize, numbers: &Numbers) -> Option<Found> {
        // All of one moment: a process that came and took memory after the list was made, and
        // before the generation was looked at, would be missing in the driver's figure, and
        // what it holds be taken for given back.
        let (generation, underway, pids, named, was_paused) = {
            let mut books = self.books();
            books.ledger.watch();
            let named = self.auditor.names.show().then(|| books.named(gpu));
            let was_paused = books.is_paused();
            let pids = numbers.asked_for(&books);
            // Ours first: memory becomes ours, and never somebody else's again.
            let ours = books.ledger.has_stakes().then(std::process::id);
            let pids: Vec<u32> = ours.into_iter().chain(pids).collect();
            (books.generation, books.underway, pids, named, was_paused)
        };
        let held = own.held(&self.release, gpu, &pids);
        let held = self.answered(gpu, Amount::Held, held)?;
        let (ours, held): (Vec<Held>, Vec<Held>) =
            held.into_iter().partition(|held| held.pid == std::process::id());
        let own_bytes = ours.iter().fold(0_u64, |sum, held| sum.saturating_add(held.made_bytes));
        let books = self.books();
        let is_still = books.generation == generation || was_paused && books.is_paused();
        let named = named.map(|named| Named { is_still: named.is_still && is_still, ..named });
        drop(books);
        Some(Found { held, own_bytes, generation, underway, is_quiet: true, named })
    }

    /// Whether the driver shows more than was asked for, and there are calls that it may have
    /// given that, or were.
    fn may_be_rounded(&self, gpu: usize, found: &Found) -> bool {
        let held = found.held.iter();
        let made = held.fold(0_u64, |sum, held| sum.saturating_add(held.made_bytes));
        let books = self.books();
        let expected = books.ledger.expected(gpu);
        expected.is_some_and(|is| {
            let moved = is.pending_bytes > 0 || books.generation != found.generation;
            let is_more =
                made > is.peak_bytes || made.saturating_add(found.own_bytes) > is.most_bytes;
            is_more && moved
        })
    }

    /// Whether there is more than was asked for, as it seems. Where a call isn't done, that has to last.
    pub(super) fn is_certain(&self, gpu: usize, found: &Found) -> bool {
        if found.is_quiet {
            return true;
        }
        self.auditor.doubts.last(gpu)
    }
}
