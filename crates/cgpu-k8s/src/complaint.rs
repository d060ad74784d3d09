//! Warnings that come again and again, logged once.

use tracing::warn;

/// The last warning of something that is tried again and again: the same warning isn't logged each time.
#[derive(Debug, Default)]
pub(crate) struct Complaint(String);

impl Complaint {
    pub(crate) fn report(&mut self, what: String) {
        if self.0 != what {
            warn!("{what}");
            self.0 = what;
        }
    }
}
