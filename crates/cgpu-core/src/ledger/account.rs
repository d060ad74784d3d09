//! The sums of one GPU: what is charged, pending, missed and gone; and what the driver is expected to show of it, with
//! which an audit compares the driver usage.

use super::{Ledger, LedgerError, Usage};

/// The sums of one GPU that count against its quota. All of them but `epoch` are bytes.
#[derive(Debug, Default)]
pub(super) struct Account {
    pub(super) limit: u64,
    /// The sum of all charges.
    pub(super) charged: u64,
    /// The sum of all reservations: their calls are in the driver.
    pub(super) pending: u64,
    /// What the driver showed beyond all charges when it was asked last.
    pub(super) missed: u64,
    /// What the charges had beyond the driver usage when the driver was asked last: memory that was freed without the
    /// monitor's knowledge. The ledger doesn't know which charges had it. So the next charges that end reduce this
    /// number first, and what counts doesn't fall below what is in use.
    pub(super) gone: u64,
    /// What charges have that the driver attributes to no process of the container, because only mappings, exports and
    /// pins keep the memory alive. (The monitor's driver usage includes what is pinned.)
    pub(super) hidden: u64,
    /// The most that the driver usage could have been since [`Account::watch`].
    pub(super) peak: u64,
    /// The most that was charged or reserved since [`Account::watch`], hidden or not.
    pub(super) most: u64,
    /// How often the driver was asked. `gone` has nothing of charges that were made since the last time.
    pub(super) epoch: u64,
}

impl Account {
    fn used(&self) -> u64 {
        let held = self.charged.saturating_sub(self.gone);
        held.saturating_add(self.pending).saturating_add(self.missed)
    }

    pub(super) fn usage(&self) -> Usage {
        Usage { limit_bytes: self.limit, used_bytes: self.used() }
    }

    pub(super) fn reserve(&mut self, bytes: u64) -> Result<(), LedgerError> {
        let usage = self.usage();
        if bytes > usage.free_bytes() {
            return Err(LedgerError::OverQuota { asked_bytes: bytes, usage });
        }
        self.pending += bytes;
        self.update_peaks();
        Ok(())
    }

    pub(super) fn cancel(&mut self, bytes: u64) {
        self.pending = self.pending.saturating_sub(bytes);
    }

    pub(super) fn charge(&mut self, bytes: u64) {
        self.charged = self.charged.saturating_add(bytes);
        self.update_peaks();
    }

    /// Counts `bytes` as hidden no more: a process's driver usage has them again, or their charge ends.
    pub(super) fn show(&mut self, bytes: u64) {
        self.hidden = self.hidden.saturating_sub(bytes);
        self.update_peaks();
    }

    /// Counts `bytes` of a charge as hidden: no process's driver usage has them any more.
    pub(super) fn hide(&mut self, bytes: u64) {
        self.hidden = self.hidden.saturating_add(bytes);
    }

    /// The most that the driver usage should be: what is charged and not hidden, and all that is reserved.
    fn visible(&self) -> u64 {
        self.charged.saturating_sub(self.hidden).saturating_add(self.pending)
    }

    fn update_peaks(&mut self) {
        self.peak = self.peak.max(self.visible());
        self.most = self.most.max(self.charged.saturating_add(self.pending));
    }

    pub(super) fn watch(&mut self) {
        self.peak = self.visible();
        self.most = self.charged.saturating_add(self.pending);
    }

    /// Ends a charge that was made in `epoch`.
    pub(super) fn end(&mut self, bytes: u64, epoch: u64) {
        self.charged = self.charged.saturating_sub(bytes);
        if epoch < self.epoch {
            self.gone = self.gone.saturating_sub(bytes);
        }
        self.gone = self.gone.min(self.charged);
    }

    pub(super) fn reconcile(&mut self, driver: u64) {
        self.missed = driver.saturating_sub(self.charged);
        self.gone = self.charged.saturating_sub(driver);
        self.epoch += 1;
    }
}

/// What the driver is expected to show of one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// The most bytes that the driver usage could have shown as made (not duplicated) since [`Ledger::watch`].
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
    /// Forgets the highest sums so far: [`Expected::peak_bytes`] and [`Expected::most_bytes`] begin again.
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
