//! How far the end of the container is.

use std::time::{Duration, Instant};

use crate::monitor::lock::Lock;

/// How often is looked once the container is gone, and how long nothing must be found.
pub(crate) const LAST_LOOK: Duration = Duration::from_millis(25);

/// How far the end is.
#[derive(Debug, Default)]
pub(crate) struct Ending {
    /// Listeners that the keeper still thinks are there.
    pub(crate) listeners: Lock<Vec<u64>>,
    /// Since when nothing is found.
    pub(crate) quiet: Lock<Option<Instant>>,
}

impl Ending {
    /// Whether a container is gone that the keeper isn't told of yet.
    pub(crate) fn is_under_way(&self) -> bool {
        !self.listeners.lock().is_empty()
    }
}
