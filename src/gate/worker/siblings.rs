//! What the driver shows under a process's number that is another container's, by what its monitor
//! says.
//!
//! What one who is dead left to others is shown under his number, whoever has it by now, and may
//! become more: they have his client. What was there when a process was seen first is known
//! ([`burdens`](super::burdens)); what comes later looks like memory that was taken past us. So
//! before it's held against anybody, the other monitors are asked, each time: nothing of it is kept,
//! or it would be there for who takes more when it's freed. Each monitor writes down which numbers its dead
//! had, so that only those are asked who can know; and says how much is its container's there at
//! least, whatever the other numbers of its dead show that others have.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::unistd::getppid;

use super::Shared;
use super::abroad::MOST_FORMER;
use super::own::Own;
use super::quiet::{Found, Numbers};
use super::target::process_id;
use super::unanswered::Amount;
use crate::gate::audit::{Unshown, least_under};
use crate::gate::client::ask_all;
use crate::gate::launch::Place;
use crate::gate::wire::{Answer, Question};
use crate::ledger::Process;
use crate::replace::replace;

/// How long an audit waits for other monitors, all together: who took memory past us is to be killed
/// in a second.
const PATIENCE: Duration = Duration::from_millis(300);

/// How often they are asked before it's held against somebody: what is on its way through the driver
/// is nobody's yet.
pub(super) const TRIES: u32 = 3;

/// The longest file of numbers that is read, in bytes.
const MOST_BYTES: u64 = 1 << 20;

/// Numbers of our dead that others have now; of more, nobody is told anything.
const MOST_TAKEN: usize = 64;

/// What we told other monitors of, and tell.
#[derive(Debug, Default)]
pub(super) struct Siblings {
    /// The numbers that are written down.
    written: Mutex<BTreeSet<u32>>,
    /// One is told at a time: it takes calls of the driver's, which may hang.
    telling: Mutex<()>,
}

/// When an audit has waited enough for other monitors.
#[derive(Debug, Default)]
pub(super) struct Waited(Option<Instant>);

impl Waited {
    fn left(&mut self) -> Duration {
        let until = *self.0.get_or_insert_with(|| Instant::now() + PATIENCE);
        until.saturating_duration_since(Instant::now())
    }
}

/// The numbers in a file of them, one a line.
fn numbers(file: &Path) -> BTreeSet<u32> {
    // Nobody has died there yet, or nobody is there.
    let is_short = fs::metadata(file).is_ok_and(|meta| meta.len() <= MOST_BYTES);
    let text = is_short.then(|| fs::read_to_string(file).ok()).flatten().unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

/// The other monitors' directories, and the numbers that their dead had.
fn siblings(own: &Place) -> impl Iterator<Item = (PathBuf, BTreeSet<u32>)> {
    let all = own.dir().parent().and_then(|all| fs::read_dir(all).ok());
    let others = all.into_iter().flatten().flatten().map(|entry| entry.path());
    let others = others.filter(|dir| dir != own.dir());
    others.map(|dir| (dir.clone(), numbers(&Place::at(&dir).former())))
}

impl Shared {
    fn own_place(&self) -> Option<Place> {
        let dir = &self.settings.place;
        (!dir.as_os_str().is_empty()).then(|| Place::at(dir))
    }

    /// The numbers that a worker before wrote down.
    pub(super) fn recall_the_dead(&self) {
        let Some(place) = self.own_place() else { return };
        let numbers = numbers(&place.former());
        numbers.iter().for_each(|number| self.auditor.abroad.had(*number));
        *self.siblings.written.lock().unwrap_or_else(PoisonError::into_inner) = numbers;
    }

    /// Writes down which numbers our dead had, where somebody is left who may have their clients.
    pub(super) fn write_down_the_dead(&self, dead: &[Process]) {
        let Some(place) = self.own_place() else { return };
        let known = dead.iter().map(|process| process_id(*process).pid.cast_unsigned());
        let all: BTreeSet<u32> = known.chain(self.auditor.abroad.all_former()).collect();
        let mut written = self.siblings.written.lock().unwrap_or_else(PoisonError::into_inner);
        let is_over = self.auditor.ending.is_under_way() || self.books().processes.is_empty();
        // The directory is another's by now where our keeper's isn't there.
        let is_ours = || {
            let keeper = place.keeper().ok().flatten();
            keeper.is_some_and(|keeper| keeper.pid == getppid().as_raw())
        };
        if all == *written || is_over || !is_ours() {
            return;
        }
        let lines: Vec<String> = all.iter().map(|number| format!("{number}\n")).collect();
        match replace(&place.former(), lines.concat().as_bytes(), 0o600) {
            Ok(()) => *written = all,
            Err(error) if self.calm.allows() => {
                tracing::warn!(%error, "other monitors can't be told which numbers our dead had");
            }
            Err(_) => {}
        }
    }

    /// What other monitors say is theirs under numbers of ours, by number, in bytes, where we wonder at
    /// so many of a GPU beside what they have `told`. `None` where nobody can know.
    pub(super) fn others_have(
        &self,
        gpu: usize,
        told: &BTreeMap<u32, u64>,
        (found, wondered): (&Found, u64),
        waited: &mut Waited,
    ) -> Option<BTreeMap<u32, u64>> {
        let place = self.own_place()?;
        let pids: BTreeSet<u32> = found.held.iter().map(|held| held.pid).collect();
        let uuid = &self.settings.gpus.get(gpu)?.uuid;
        let mut asked = Vec::new();
        for (sibling, numbers) in siblings(&place) {
            for pid in numbers.intersection(&pids).copied() {
                // What was there when it began is left out already, mostly of the same container.
                let known = self.books().burdens.known(gpu, pid).made_bytes;
                let told = told.get(&pid).copied().unwrap_or(0);
                let bytes = known.saturating_add(told).saturating_add(wondered);
                let question = Question::Left { uuid: uuid.clone(), number: pid, bytes };
                asked.push((pid, (known, bytes), Place::at(&sibling).control(), question));
            }
        }
        let patience = waited.left();
        if asked.is_empty() || patience.is_zero() {
            return None;
        }
        let questions: Vec<_> =
            asked.iter().map(|(_, _, socket, question)| (&**socket, question)).collect();
        let answers = ask_all(&questions, patience);
        let mut theirs = BTreeMap::new();
        for ((pid, (known, most), ..), answer) in asked.iter().zip(answers) {
            if let Some(Answer::Left { bytes }) = answer {
                let all: &mut u64 = theirs.entry(*pid).or_default();
                *all = all.saturating_add(bytes.min(*most).saturating_sub(*known));
            }
        }
        Some(theirs)
    }

    /// How much of a GPU is ours at least under the number of one of our dead, of so many bytes that
    /// another monitor wonders at.
    pub(super) fn left_under(&self, uuid: &str, number: u32, wondered: u64) -> u64 {
        let Ok(_telling) = self.siblings.telling.try_lock() else { return 0 };
        let Some(gpu) = self.settings.gpus.iter().position(|gpu| gpu.uuid == uuid) else {
            return 0;
        };
        let processes = self.books().processes.clone();
        let is_dead = |process: &Process| !process_id(*process).alive();
        let dead: Vec<Process> = processes.into_iter().filter(is_dead).collect();
        let numbers = self.numbers_of(&dead);
        let former = self.auditor.abroad.all_former();
        // What those had who are forgotten for others shows nowhere that we know.
        if former.len() >= MOST_FORMER {
            return 0;
        }
        let taken = former.into_iter().filter(|pid| !numbers.former.contains(pid));
        let taken: BTreeSet<u32> = taken.chain(numbers.lost.iter().copied()).collect();
        if taken.len() > MOST_TAKEN || !taken.contains(&number) || self.is_home(number) {
            return 0;
        }
        let Some(own) = self.auditor.own_soon(self) else { return 0 };
        self.least_under(&own, gpu, number, (&numbers, &taken))
            .map_or(0, |least| least.min(wondered))
    }

    fn least_under(
        &self,
        own: &Own,
        gpu: usize,
        number: u32,
        (numbers, taken): (&Numbers, &BTreeSet<u32>),
    ) -> Option<u64> {
        // What is on its way would be there and not there.
        let _still = self.stand_still(&mut None);
        let ours = numbers.asked_for(&self.books());
        let own_pid = std::process::id();
        let all: BTreeSet<u32> = ours.iter().chain(taken).copied().chain([own_pid]).collect();
        let held = own.held(&self.release, gpu, &all.into_iter().collect::<Vec<_>>());
        let held = self.answered(gpu, Amount::Held, held)?;
        let books = self.books();
        if books.is_moving() {
            return None;
        }
        let mut figures = Unshown::default();
        for held in held {
            match held.pid {
                pid if pid == own_pid => figures.own_bytes = held.made_bytes,
                pid if pid == number => figures.there_bytes = held.made_bytes,
                pid if ours.contains(&pid) => {
                    let made = books.burdens.leave_out(gpu, held).made_bytes;
                    figures.made_bytes = figures.made_bytes.saturating_add(made);
                }
                _ => {
                    figures.elsewhere_bytes =
                        figures.elsewhere_bytes.saturating_add(held.made_bytes)
                }
            }
        }
        Some(least_under(&figures, &books.ledger.expected(gpu)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_file_of_numbers_has_none() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("former");
        assert_eq!(numbers(&file), BTreeSet::new());
        fs::write(&file, "7\n-3\n\nnobody\n4294967296\n12").unwrap();
        assert_eq!(numbers(&file), [7, 12].into());
        fs::write(&file, "7\n".repeat(1 << 20)).unwrap();
        assert_eq!(numbers(&file), BTreeSet::new());
    }
}
