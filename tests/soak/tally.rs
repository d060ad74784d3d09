//! What was done, and what was found.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// What shouldn't be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// A container has more than its quota, or a GPU is reserved twice.
    OverQuota,
    /// A container lives and has no record.
    Lost,
    /// Something is left of containers that are gone.
    Leaked,
    /// The soak couldn't do its part, or met what it can't explain.
    Broken,
}

impl Kind {
    const ALL: [Kind; 4] = [Kind::OverQuota, Kind::Lost, Kind::Leaked, Kind::Broken];

    fn name(self) -> &'static str {
        match self {
            Kind::OverQuota => "over quota",
            Kind::Lost => "lost",
            Kind::Leaked => "leaked",
            Kind::Broken => "broken",
        }
    }
}

/// Counts by group and kind; a group is what the summary has a word for.
type Counts = BTreeMap<&'static str, BTreeMap<&'static str, u64>>;

/// How many unexpected answers are shown.
const MOST_ODDITIES: usize = 20;

/// Of all threads.
#[derive(Debug)]
pub(crate) struct Tally {
    seed: u64,
    begun: Instant,
    counts: Mutex<Counts>,
    findings: Mutex<Vec<(Kind, String)>>,
    oddities: Mutex<Vec<String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Tally {
    pub(crate) fn new(seed: u64, begun: Instant) -> Self {
        let (counts, findings, oddities) = Default::default();
        Tally { seed, begun, counts, findings, oddities }
    }

    /// Milliseconds since the soak began.
    pub(crate) fn now_ms(&self) -> u128 {
        self.begun.elapsed().as_millis()
    }

    /// One more of a kind.
    pub(crate) fn count(&self, group: &'static str, kind: &'static str) {
        *lock(&self.counts).entry(group).or_default().entry(kind).or_default() += 1;
    }

    /// What shouldn't be is there: it's reported at once, and again in the end.
    pub(crate) fn find(&self, kind: Kind, what: String) {
        let what = format!("{} ms, seed {}: {what}", self.now_ms(), self.seed);
        eprintln!("{}: {what}", kind.name().to_uppercase());
        lock(&self.findings).push((kind, what));
    }

    /// An answer that nothing explains, and that no promise is about.
    pub(crate) fn wonder(&self, what: String) {
        let mut oddities = lock(&self.oddities);
        if oddities.len() < MOST_ODDITIES {
            eprintln!("odd: {} ms: {what}", self.now_ms());
            oddities.push(what);
        }
    }

    /// The summary; success where nothing was found.
    pub(crate) fn print(&self) -> ExitCode {
        let findings = lock(&self.findings);
        for (kind, what) in findings.iter() {
            println!("{}: {what}", kind.name());
        }
        let minutes = self.begun.elapsed().as_secs_f64() / 60.0;
        let mut line = format!("soak: seed {}, {minutes:.1} minutes", self.seed);
        for (group, kinds) in lock(&self.counts).iter() {
            let total: u64 = kinds.values().sum();
            let kinds: Vec<_> = kinds.iter().map(|(kind, n)| format!("{n} {kind}")).collect();
            line += &format!("; {total} {group} ({})", kinds.join(", "));
        }
        for kind in Kind::ALL {
            let count = findings.iter().filter(|(found, _)| *found == kind).count();
            line += &format!("; {} {count}", kind.name());
        }
        println!("{line}");
        if findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}
