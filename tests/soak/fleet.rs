//! The containers that were asked for: what each may have, its first process, and what happened to it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use procfs::process::Process;

/// A process; another one that gets its number is another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Life {
    pub(crate) pid: i32,
    start_ticks: u64,
}

impl Life {
    /// The process of that number, where it lives.
    pub(crate) fn of(pid: i32) -> Option<Self> {
        let stat = Process::new(pid).and_then(|process| process.stat()).ok()?;
        let lives = !matches!(stat.state, 'Z' | 'X');
        lives.then_some(Life { pid, start_ticks: stat.starttime })
    }

    pub(crate) fn goes_on(self) -> bool {
        Life::of(self.pid) == Some(self)
    }
}

/// A container, from before it was made to the end of the soak.
#[derive(Debug, Clone)]
pub(crate) struct Member {
    /// Which worker's, by what engine.
    pub(crate) whose: String,
    /// Bytes by index of the GPU.
    pub(crate) quotas: BTreeMap<usize, u64>,
    /// Its first process, from when the engine has said that the container is made.
    pub(crate) first: Option<Life>,
    /// What happened, each with its time.
    pub(crate) events: Vec<String>,
}

impl Member {
    /// For a finding.
    pub(crate) fn story(&self) -> String {
        let quotas: Vec<_> = self
            .quotas
            .iter()
            .map(|(gpu, bytes)| format!("GPU {gpu}: {} MiB", bytes >> 20))
            .collect();
        format!("{}, {}\n    {}", self.whose, quotas.join(", "), self.events.join("\n    "))
    }
}

/// All of them, by the id that cgroups and records have.
#[derive(Debug, Default)]
pub(crate) struct Fleet {
    members: Mutex<BTreeMap<String, Member>>,
    /// What was found already, and isn't reported at each sample.
    marks: Mutex<BTreeSet<String>>,
}

impl Fleet {
    pub(crate) fn all(&self) -> MutexGuard<'_, BTreeMap<String, Member>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, id: &str, whose: String, quotas: BTreeMap<usize, u64>) {
        let member = Member { whose, quotas, first: None, events: Vec::new() };
        self.all().insert(id.to_owned(), member);
    }

    /// What happens to one.
    pub(crate) fn report(&self, id: &str, at_ms: u128, what: &str) {
        if let Some(member) = self.all().get_mut(id) {
            member.events.push(format!("{at_ms} ms: {what}"));
        }
    }

    /// Whether this is found for the first time.
    pub(crate) fn mark(&self, what: &str) -> bool {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner).insert(what.to_owned())
    }

    pub(crate) fn story(&self, id: &str) -> String {
        self.all().get(id).map_or_else(
            || format!("{id} is unknown"),
            |member| format!("{id} of {}", member.story()),
        )
    }

    /// Those that live, with their quotas: all at once, in the moment between two calls of whom
    /// both name.
    pub(crate) fn living(&self) -> BTreeMap<String, BTreeMap<usize, u64>> {
        // A copy: checking processes takes its time.
        let all: Vec<_> = {
            let all = self.all();
            let made = all.iter().filter(|(_, member)| member.first.is_some());
            made.map(|(id, member)| (id.clone(), member.first, member.quotas.clone())).collect()
        };
        let living = all.into_iter().filter(|(_, first, _)| first.is_some_and(Life::goes_on));
        living.map(|(id, _, quotas)| (id, quotas)).collect()
    }

    /// It has ended: its process is no longer checked.
    pub(crate) fn end(&self, id: &str) {
        if let Some(member) = self.all().get_mut(id) {
            member.first = None;
        }
    }
}
