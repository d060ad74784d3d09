//! The sums of one GPU: what is charged, pending, missed and gone.

use super::{LedgerError, Usage};

/// What counts against one quota. All in bytes.
#[derive(Debug, Default)]
pub(super) struct Account {
    pub(super) limit: u64,
    /// Charges that the ledger has.
    pub(super) charged: u64,
    /// Reservations on their way through the driver.
    pub(super) pending: u64,
    /// What the driver had and no charge, when it was asked last.
    pub(super) missed: u64,
    /// Bytes that charges counted and the driver did not have when it was asked last: frees that nobody
    /// told us of. Which charges they are isn't known. So the next charges that end use up this number
    /// first, and what counts doesn't fall below what is used.
    pub(super) gone: u64,
    /// What charges have that the driver shows in no process's figure: nothing but
    /// mappings and exports keeps it.
    pub(super) hidden: u64,
    /// The most that the driver could have shown since [`Account::watch`].
    pub(super) peak: u64,
    /// The most that was charged or on its way since then.
    pub(super) most: u64,
    /// How often the driver was asked. Charges made since then are true.
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

    /// What was reserved before, whatever the limit is now.
    pub(super) fn reserve_again(&mut self, bytes: u64) {
        self.pending = self.pending.saturating_add(bytes);
        self.update_peaks();
    }

    pub(super) fn cancel(&mut self, bytes: u64) {
        self.pending = self.pending.saturating_sub(bytes);
    }

    pub(super) fn charge(&mut self, bytes: u64) {
        self.charged = self.charged.saturating_add(bytes);
        self.update_peaks();
    }

    /// The driver shows so many hidden bytes again, or their charge ends.
    pub(super) fn show(&mut self, bytes: u64) {
        self.hidden = self.hidden.saturating_sub(bytes);
        self.update_peaks();
    }

    /// The driver shows so many bytes of a charge no more.
    pub(super) fn hide(&mut self, bytes: u64) {
        self.hidden = self.hidden.saturating_add(bytes);
    }

    /// What the driver should show at most: what is charged and not hidden, and all that
    /// is on its way.
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

    /// A charge made in `epoch` ends.
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
