//! What the driver shows under a process's number that is another container's, by what its monitor
//! says.
//!
//! What one who is dead left to others is shown under his number, whoever has it by now, and may
//! become more: they have his client. What was there when a process was seen first is known
//! ([`burdens`](super::burdens)); what comes later looks like memory that was taken past us. So
//! before it's held against anybody, the other monitors are asked. Each writes down which numbers
//! its dead had, so that only those are asked who can know; and says how much of a GPU its
//! container has that shows under none of its own numbers, and of which it has told no other.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Shared;
use super::own::Own;
use super::quiet::{Found, Numbers};
use super::target::process_id;
use crate::gate::client::ask_within;
use crate::gate::journal::Record;
use crate::gate::launch::Place;
use crate::gate::wire::{Answer, Question};
use crate::ledger::Process;
use crate::replace::replace;
use crate::rm::about::Held;

/// How long other monitors may take, all together: their driver calls may hang, and who took memory past us is to
/// be killed in a second.
const PATIENCE: Duration = Duration::from_millis(300);

/// The longest file of numbers that is read, in bytes.
const MOST_BYTES: u64 = 1 << 20;

/// The other monitors, and what they were told.
#[derive(Debug, Default)]
pub(super) struct Siblings {
    /// The numbers that are written down.
    written: Mutex<BTreeSet<u32>>,
    told: Mutex<Told>,
}

/// How much of a GPU others were told that it's ours under a number, in bytes.
#[derive(Debug, Default)]
struct Told(BTreeMap<(usize, u32), u64>);

impl Told {
    /// Of `unshown` bytes of a GPU, which are ours and show under none of our numbers, how many are
    /// under that number, of so many that somebody wonders at: what others were told isn't there.
    fn tell(&mut self, gpu: usize, number: u32, wondered: u64, unshown: u64) -> u64 {
        self.0.remove(&(gpu, number));
        let others = self.0.range((gpu, 0)..=(gpu, u32::MAX)).map(|(_, bytes)| *bytes);
        let others = others.fold(0, u64::saturating_add);
        let bytes = wondered.min(unshown.saturating_sub(others));
        if bytes > 0 {
            self.0.insert((gpu, number), bytes);
        }
        bytes
    }
}

/// The numbers in a file of them, one a line.
fn numbers(file: &Path) -> BTreeSet<u32> {
    // Nobody has died there yet, or nobody is there.
    let is_short = fs::metadata(file).is_ok_and(|meta| meta.len() <= MOST_BYTES);
    let text = is_short.then(|| fs::read_to_string(file).ok()).flatten().unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
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

    /// Writes down which numbers our dead had.
    pub(super) fn write_down_the_dead(&self, dead: &[Process]) {
        let Some(place) = self.own_place() else { return };
        let known = dead.iter().map(|process| process_id(*process).pid.cast_unsigned());
        let all: BTreeSet<u32> = known.chain(self.auditor.abroad.all_former()).collect();
        let mut written = self.siblings.written.lock().unwrap_or_else(PoisonError::into_inner);
        if all == *written {
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

    /// Whether other monitors say that some of `bytes` of a GPU which we wonder at are theirs; then
    /// these are left out from now on.
    pub(super) fn others_have(&self, gpu: usize, found: &Found, bytes: u64) -> bool {
        let Some(place) = self.own_place() else { return false };
        let pids: BTreeSet<u32> = found.held.iter().map(|held| held.pid).collect();
        let mut left = bytes;
        let begun = Instant::now();
        for (sibling, pid) in siblings(&place).into_iter().flat_map(|(sibling, numbers)| {
            let ours: Vec<u32> = numbers.intersection(&pids).copied().collect();
            ours.into_iter().map(move |pid| (sibling.clone(), pid))
        }) {
            let patience = PATIENCE.saturating_sub(begun.elapsed());
            if patience.is_zero() {
                break;
            }
            let known = self.books().burdens.known(gpu, pid);
            let wondered = known.made_bytes.saturating_add(left);
            let uuid = self.settings.gpus.get(gpu).map(|gpu| gpu.uuid.clone()).unwrap_or_default();
            let question = Question::Left { uuid, number: pid, bytes: wondered };
            let answer = ask_within(&Place::at(&sibling).control(), &question, patience);
            let Ok(Answer::Left { bytes: theirs }) = answer else { continue };
            let made_bytes = theirs.min(wondered);
            if made_bytes > known.made_bytes {
                let mut books = self.books();
                let held = Held { made_bytes, ..known };
                if books.burdens.has_room(gpu, &held) {
                    books.write(Record::Burden { gpu, held });
                    left = wondered - made_bytes;
                    tracing::debug!(pid, made_bytes, "what is under that number is another's");
                }
            }
        }
        left < bytes
    }

    /// How much of a GPU is ours under the number of one of our dead, of so many bytes that another
    /// monitor wonders at.
    pub(super) fn left_under(&self, uuid: &str, number: u32, wondered: u64) -> u64 {
        let Some(gpu) = self.settings.gpus.iter().position(|gpu| gpu.uuid == uuid) else {
            return 0;
        };
        let processes = self.books().processes.clone();
        let dead: Vec<Process> =
            processes.into_iter().filter(|process| !process_id(*process).alive()).collect();
        let mut of_dead = dead.iter().map(|process| process_id(*process).pid.cast_unsigned());
        if !of_dead.any(|pid| pid == number) && !self.auditor.abroad.was_ours(number) {
            return 0;
        }
        let numbers = self.numbers_of(&dead);
        let unshown = self.auditor.own(self).and_then(|own| self.unshown(&own, gpu, &numbers));
        let mut told = self.siblings.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.tell(gpu, number, wondered, unshown.unwrap_or(0))
    }

    /// What of a GPU the ledger has, or may get in this moment, and no number of ours shows.
    fn unshown(&self, own: &Own, gpu: usize, numbers: &Numbers) -> Option<u64> {
        let pids: Vec<u32> = numbers.asked_for(&self.books()).into_iter().collect();
        let held = own.held(&self.release, gpu, &pids).ok()?;
        let books = self.books();
        let held = held.into_iter().map(|held| books.burdens.leave_out(gpu, held).made_bytes);
        let shown = held.fold(0_u64, u64::saturating_add);
        let expected = books.ledger.expected(gpu)?;
        let shows = expected.charged_bytes.saturating_sub(expected.hidden_bytes);
        Some(shows.saturating_add(expected.pending_bytes).saturating_sub(shown))
    }
}

/// The other monitors' directories, and the numbers that their dead had.
fn siblings(own: &Place) -> Vec<(PathBuf, BTreeSet<u32>)> {
    let all = own.dir().parent().and_then(|all| fs::read_dir(all).ok());
    let others = all.into_iter().flatten().flatten().map(|entry| entry.path());
    let others = others.filter(|dir| dir != own.dir());
    others.map(|dir| (dir.clone(), numbers(&Place::at(&dir).former()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_byte_is_told_twice() {
        let mut told = Told::default();
        assert_eq!(told.tell(0, 7, 30, 100), 30);
        assert_eq!(told.tell(0, 8, 90, 100), 70);
        // Who asks again knows what it was told.
        assert_eq!(told.tell(0, 7, 60, 100), 30);
        assert_eq!(told.tell(0, 8, 10, 100), 10);
        assert_eq!(told.tell(0, 7, 120, 100), 90);
        assert_eq!(told.tell(0, 9, 1, 100), 0);
        // Each GPU has its own.
        assert_eq!(told.tell(1, 9, 120, 100), 100);
        // There is less.
        assert_eq!(told.tell(0, 8, 10, 50), 0);
        assert_eq!(told.tell(0, 7, 120, 50), 50);
    }

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
