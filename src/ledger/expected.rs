//! What the driver is expected to show of a GPU. An audit compares it with the driver's figures.

use super::{Ledger, Usage};

/// What the driver is expected to show of one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// The most bytes that the figures could have shown as made (not duplicated) since [`Ledger::watch`].
    pub peak_bytes: u64,
    /// The most bytes since [`Ledger::watch`], with those that the driver shows for no process of the container.
    pub most_bytes: u64,
    /// The charged bytes that the driver shows for no process of the container.
    pub hidden_bytes: u64,
    /// The reserved bytes: their calls are in the driver.
    pub pending_bytes: u64,
    /// The charged bytes, hidden or not.
    pub charged_bytes: u64,
    /// The quota, and what counts against it.
    pub usage: Usage,
}

impl Ledger {
    /// Forgets the highest sums so far: [`Expected::peak_bytes`] and [`Expected::most_bytes`] begin anew.
    pub fn watch(&mut self) {
        self.accounts.iter_mut().for_each(super::Account::watch);
    }

    /// What the driver is expected to show of a GPU; `None` where the container has no such GPU.
    #[must_use]
    pub fn expected(&self, gpu: usize) -> Option<Expected> {
        let account = self.accounts.get(gpu)?;
        let foreign_bytes = self.foreign_bytes(gpu);
        Some(Expected {
            peak_bytes: account.peak.saturating_add(foreign_bytes),
            most_bytes: account.most.saturating_add(foreign_bytes),
            hidden_bytes: account.hidden,
            pending_bytes: account.pending,
            charged_bytes: account.charged,
            usage: account.usage(),
        })
    }
}
