//! Who was seen with a client whose maker is dead, and since when.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::ledger::{Client, Process};
use crate::monitor::journal::process_number::process_id;
use crate::monitor::lock::Lock;
use crate::monitor::state::books::{Books, NO_CLIENT};

/// Dead processes under whose numbers the driver shows memory, and since when.
#[derive(Debug, Default)]
pub(crate) struct Lingering(Lock<BTreeMap<u32, Instant>>);

impl Lingering {
    /// The driver shows memory under those numbers, and under none of the others. How long it has.
    pub(crate) fn note(&self, numbers: &BTreeSet<u32>, now: Instant) -> Vec<(u32, Duration)> {
        let mut all = self.0.lock();
        all.retain(|number, _| numbers.contains(number));
        let since = numbers.iter().map(|number| (*number, *all.entry(*number).or_insert(now)));
        since.map(|(number, since)| (number, now.saturating_duration_since(since))).collect()
    }
}

/// Which process was seen with which client.
pub(crate) fn seen(books: &Books) -> impl Iterator<Item = (Client, Process)> {
    books.ledger.holders().filter(|(client, _)| *client != NO_CLIENT)
}

/// Those alive who were seen with a client of the process that has or had that number.
pub(crate) fn seen_with(books: &Books, number: u32) -> BTreeSet<Process> {
    let has_number = |process: Process| process_id(process).pid.cast_unsigned() == number;
    let clients = seen(books).filter(|(_, process)| has_number(*process));
    let clients: BTreeSet<Client> = clients.map(|(client, _)| client).collect();
    let with = seen(books).filter(|(client, _)| clients.contains(client));
    with.map(|(_, process)| process).filter(|process| process_id(*process).alive()).collect()
}

/// The processes that called and live.
pub(crate) fn callers(books: &Books) -> BTreeSet<Process> {
    let processes = books.processes.iter().copied();
    processes.filter(|process| process_id(*process).alive()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lingers_is_known_from_when_it_was_seen_first_until_it_is_gone() {
        let lingering = Lingering::default();
        let begin = Instant::now();
        let saw = |numbers: &[u32], ms| {
            let numbers = numbers.iter().copied().collect();
            lingering.note(&numbers, begin + Duration::from_millis(ms))
        };
        let ms = Duration::from_millis;
        assert_eq!(saw(&[7], 0), [(7, ms(0))]);
        assert_eq!(saw(&[7, 9], 300), [(7, ms(300)), (9, ms(0))]);
        assert_eq!(saw(&[9], 400), [(9, ms(100))]);
        assert_eq!(saw(&[7, 9], 500), [(7, ms(0)), (9, ms(200))], "another had the number");
    }
}
