//! Whose memory the driver shows: which process is charged for it, and which processes are to be killed where memory
//! was taken past the monitor.

use std::collections::{BTreeMap, BTreeSet};

use crate::ledger::{Client, Process};
use crate::monitor::audit::client_users::{living_callers, users_of_clients_by};
use crate::monitor::state::Books;
use crate::rm::about::Held;

/// The pid under which the driver shows most beyond what its process is charged for. A client's charges count for the
/// first process that was seen with the client, which is mostly its maker.
pub(crate) fn least_charged(books: &Books, gpu: usize, held: &[Held]) -> Option<u32> {
    let charges = books.ledger.charged_by_client(gpu);
    let mut owners: BTreeMap<Client, Process> = BTreeMap::new();
    for (client, process) in books.ledger.holders() {
        owners.entry(client).or_insert(process);
    }
    let charged_bytes = |pid: u32| {
        let of_pid = charges
            .iter()
            .filter(|(client, _)| owners.get(client).is_some_and(|of| of.pid() == pid));
        of_pid.fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes))
    };
    let excess = |held: &&Held| held.made_bytes.saturating_sub(charged_bytes(held.pid));
    held.iter().max_by_key(excess).map(|held| held.pid)
}

/// The processes to kill for the memory that the driver shows under `pid`: the caller with that pid; where it is dead,
/// the living processes that were seen with one of its clients; where there are none, all living callers.
pub(crate) fn processes_to_kill(books: &Books, pid: u32) -> BTreeSet<Process> {
    let callers = living_callers(books);
    let of_pid = |process: &&Process| process.pid() == pid;
    if let Some(named) = callers.iter().find(of_pid) {
        return [*named].into();
    }
    let users = users_of_clients_by(books, pid);
    if users.is_empty() { callers } else { users }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{Entry, Handle};
    use crate::monitor::state::books_of;
    use crate::process::ProcessId;

    /// A dead process: no process has its pid.
    fn dead(start_ticks: u64) -> Process {
        Process::from(ProcessId { pid: 0x3f_fff0, start_ticks })
    }

    fn alive() -> [Process; 2] {
        let of = |pid: i32| Process::from(ProcessId::of(pid).expect("it lives"));
        [
            of(std::process::id().cast_signed()),
            of(std::os::unix::process::parent_id().cast_signed()),
        ]
    }

    fn held(process: Process) -> Held {
        Held { pid: process.pid(), made_bytes: 9, duplicated_bytes: 0 }
    }

    #[test]
    fn a_client_is_charged_to_who_used_it_first() {
        let mut books = books_of(vec![]);
        let [maker, user] = alive();
        books.note_user(1, maker);
        books.note_user(1, user);
        books.note_user(2, user);
        for (client, bytes) in [(1, 4), (2, 1)] {
            let (client, parent, handle) = (Client(client), Handle(client), Handle(7));
            books.enter(Entry::Commit { gpu: 0, bytes, client, parent, handle });
        }
        // Each is shown with 9 bytes. 4 of the maker's are charged, and 1 of the user's.
        let [maker, user, dead] = [maker, user, dead(1)].map(held);
        assert_eq!(least_charged(&books, 0, &[maker, user, dead]), Some(dead.pid));
        assert_eq!(least_charged(&books, 0, &[maker, user]), Some(user.pid));
        assert_eq!(least_charged(&books, 0, &[user, maker]), Some(user.pid));
        assert_eq!(least_charged(&books, 0, &[]), None);
    }

    #[test]
    fn who_is_shown_is_killed_or_who_has_a_dead_ones_client_or_all() {
        let mut books = books_of(vec![]);
        let ([first, second], gone) = (alive(), dead(1));
        for process in [first, second, gone] {
            assert!(books.note_process(process));
        }
        let of = |books: &Books, process: Process| processes_to_kill(books, process.pid());
        assert_eq!(of(&books, first), [first].into());
        assert_eq!(of(&books, gone), [first, second].into(), "nobody was seen with a client of it");
        books.note_user(5, gone);
        books.note_user(5, second);
        assert_eq!(of(&books, gone), [second].into());
        assert_eq!(
            of(&books, Process::from(ProcessId { pid: 2, start_ticks: 0 })),
            [first, second].into()
        );
    }
}
