//! What the driver is expected to show of a GPU, to be compared with what it shows.

use super::{Ledger, Usage};

/// What the driver is expected to show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// The most that it could have shown as made since [`Ledger::watch`], in bytes.
    pub peak_bytes: u64,
    /// The same with what it shows for no process, in bytes.
    pub most_bytes: u64,
    /// What is charged and the driver shows for no process, in bytes.
    pub hidden_bytes: u64,
    /// What is on its way, in bytes.
    pub pending_bytes: u64,
    /// What is charged, hidden or not, in bytes.
    pub charged_bytes: u64,
    /// What counts.
    pub usage: Usage,
}

impl Ledger {
    /// Starts to watch for the most that the driver could show from now on.
    pub fn watch(&mut self) {
        self.accounts.iter_mut().for_each(super::Account::watch);
    }

    /// How a GPU's figures compare with the driver's.
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
