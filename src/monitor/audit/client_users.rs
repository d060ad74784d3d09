//! Which processes were seen with which client, and which dead processes still have memory.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::ledger::{Client, Process};
use crate::monitor::lock::Lock;
use crate::monitor::state::{Books, NO_CLIENT};
use crate::process::ProcessId;

/// The pids of dead processes under which the driver shows memory, and since when.
#[derive(Debug, Default)]
pub(crate) struct LingeringPids(Lock<BTreeMap<u32, Instant>>);

impl LingeringPids {
    /// Notes that the driver shows memory under `pids`, and under no others. Returns since how long, for each pid.
    pub(crate) fn note(&self, pids: &BTreeSet<u32>, now: Instant) -> Vec<(u32, Duration)> {
        let mut all = self.0.lock();
        all.retain(|pid, _| pids.contains(pid));
        let since = pids.iter().map(|pid| (*pid, *all.entry(*pid).or_insert(now)));
        since.map(|(pid, since)| (pid, now.saturating_duration_since(since))).collect()
    }
}

/// The clients and the processes that were seen with them. A process is in several pairs where it used several clients.
pub(crate) fn client_users(books: &Books) -> impl Iterator<Item = (Client, Process)> {
    books.ledger.holders().filter(|(client, _)| *client != NO_CLIENT)
}

/// The living processes that were seen with a client which the process with that pid, dead or alive, was seen with.
pub(crate) fn users_of_clients_by(books: &Books, pid: u32) -> BTreeSet<Process> {
    let has_pid = |process: Process| process.pid() == pid;
    let clients = client_users(books).filter(|(_, process)| has_pid(*process));
    let clients: BTreeSet<Client> = clients.map(|(client, _)| client).collect();
    let users = client_users(books).filter(|(client, _)| clients.contains(client));
    users.map(|(_, process)| process).filter(|process| ProcessId::from(*process).alive()).collect()
}

/// The living processes that called.
pub(crate) fn living_callers(books: &Books) -> BTreeSet<Process> {
    let processes = books.processes.iter().copied();
    processes.filter(|process| ProcessId::from(*process).alive()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lingers_is_known_from_when_it_was_seen_first_until_it_is_gone() {
        let lingering = LingeringPids::default();
        let begin = Instant::now();
        let saw = |pids: &[u32], ms| {
            let pids = pids.iter().copied().collect();
            lingering.note(&pids, begin + Duration::from_millis(ms))
        };
        let ms = Duration::from_millis;
        assert_eq!(saw(&[7], 0), [(7, ms(0))]);
        assert_eq!(saw(&[7, 9], 300), [(7, ms(300)), (9, ms(0))]);
        assert_eq!(saw(&[9], 400), [(9, ms(100))]);
        assert_eq!(saw(&[7, 9], 500), [(7, ms(0)), (9, ms(200))], "another had the number");
    }
}
