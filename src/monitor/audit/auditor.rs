//! What the auditor knows: its client of the driver, when it looked, and what it doubts. The looking is in
//! [`rounds`](crate::monitor::audit::rounds).

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crate::ledger::Process;
use crate::monitor::audit::alias_audit::Names;
use crate::monitor::audit::deaths::Deaths;
use crate::monitor::audit::escaped_fds::Abroad;
use crate::monitor::audit::heirs::Lingering;
use crate::monitor::audit::holdings::Doubts;
use crate::monitor::audit::occasion::Occasion;
use crate::monitor::audit::rest::Rest;
use crate::monitor::audit::unanswered::Told;
use crate::monitor::driver::monitor_client::MonitorClient;
use crate::monitor::worker::shutdown::Ending;

/// How soon it's asked again for calls that would be refused.
const PATIENCE: Duration = Duration::from_millis(4);

/// The same where there is much to be asked.
const LONGEST_PATIENCE: Duration = Duration::from_millis(100);

/// How often clients are asked for, where nobody died and nothing is refused.
const STOCK: Duration = Duration::from_secs(2);

/// When an audit was.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Audited {
    pub(crate) occasion: Occasion,
    pub(crate) began: Instant,
    pub(crate) ended: Instant,
}

impl Audited {
    /// How long it's too soon for another: most of the time the driver is left alone.
    pub(crate) fn wait(self) -> Duration {
        let took = self.ended.saturating_duration_since(self.began);
        PATIENCE.max((took * 4).min(LONGEST_PATIENCE)).saturating_sub(self.ended.elapsed())
    }
}

/// The auditor's own.
#[derive(Debug)]
pub(crate) struct Auditor {
    pub(crate) deaths: Deaths,
    pub(crate) own: Mutex<Option<Arc<MonitorClient>>>,
    /// One audit at a time, and when the last one was.
    pub(crate) last: Mutex<Option<Audited>>,
    pub(crate) killed: Mutex<BTreeSet<Process>>,
    pub(crate) doubts: Doubts,
    pub(crate) names: Names,
    /// When clients were asked for.
    stock: Mutex<Option<Instant>>,
    pub(crate) abroad: Abroad,
    pub(crate) rest: Mutex<Rest>,
    pub(crate) lingering: Lingering,
    pub(crate) ending: Ending,
    /// What the log was told of lately that audits can't see.
    pub(crate) told: Told,
}

impl Auditor {
    pub(crate) fn new() -> Self {
        Auditor {
            deaths: Deaths::default(),
            own: Mutex::new(None),
            last: Mutex::new(None),
            killed: Mutex::new(BTreeSet::new()),
            doubts: Doubts::default(),
            names: Names::default(),
            stock: Mutex::new(None),
            abroad: Abroad::default(),
            rest: Mutex::new(Rest::new(0, Instant::now())),
            lingering: Lingering::default(),
            ending: Ending::default(),
            told: Told::default(),
        }
    }

    /// Something is due sooner than it thought.
    pub(crate) fn wake(&self) {
        self.deaths.ring();
    }

    /// When the last audit was, where none is underway.
    pub(crate) fn try_last(&self) -> Option<MutexGuard<'_, Option<Audited>>> {
        match self.last.try_lock() {
            Ok(last) => Some(last),
            Err(TryLockError::Poisoned(last)) => Some(last.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Whether clients are to be asked for; they are, then.
    pub(crate) fn is_stock_due(&self) -> bool {
        let mut last = self.stock.lock().unwrap_or_else(PoisonError::into_inner);
        let due = last.is_none_or(|last| last.elapsed() > STOCK);
        if due {
            *last = Some(Instant::now());
        }
        due
    }

    /// Our client of the driver, where it's open.
    pub(crate) fn own_at_hand(&self) -> Option<Arc<MonitorClient>> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Our client of the driver, and whoever else wants it waits.
    pub(crate) fn lock_own(&self) -> MutexGuard<'_, Option<Arc<MonitorClient>>> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
