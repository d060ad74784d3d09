//! What audits know of those before: when the last one was, and what it doubted. The looking is in
//! [`look`](crate::monitor::audit::look).

use std::time::{Duration, Instant};

use crate::monitor::audit::heirs::Lingering;
use crate::monitor::audit::holdings::Doubts;
use crate::monitor::audit::names::Names;
use crate::monitor::lock::Lock;
use crate::monitor::state::occasion::Occasion;

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

/// When it looked, and what it doubts.
#[derive(Debug, Default)]
pub(crate) struct AuditMemory {
    /// One audit at a time, and when the last one was.
    pub(crate) last: Lock<Option<Audited>>,
    pub(crate) doubts: Doubts,
    pub(crate) names: Names,
    /// When clients were asked for.
    stock: Lock<Option<Instant>>,
    pub(crate) lingering: Lingering,
}

impl AuditMemory {
    /// Whether clients are to be asked for; they are, then.
    pub(crate) fn take_stock_due(&self) -> bool {
        let mut last = self.stock.lock();
        let due = last.is_none_or(|last| last.elapsed() > STOCK);
        if due {
            *last = Some(Instant::now());
        }
        due
    }
}
