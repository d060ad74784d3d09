//! The worker's end: somebody says why, and its first thread ends it.

use std::io;
use std::sync::Arc;

use crate::monitor::keeper_socket::KeeperSocket;
use crate::monitor::lock::Lock;

/// Why the worker ends, once it does.
#[derive(Debug)]
pub(crate) struct Finish {
    keeper: Arc<KeeperSocket>,
    why: Lock<Option<io::Result<()>>>,
}

impl Finish {
    pub(crate) fn new(keeper: Arc<KeeperSocket>) -> Self {
        Finish { keeper, why: Lock::new(None) }
    }

    /// Ends the worker; the first reason is the one.
    pub(crate) fn finish(&self, why: io::Result<()>) {
        self.why.lock().get_or_insert(why);
        self.keeper.hear_no_more();
    }

    /// Why it ends, if it does.
    pub(crate) fn take(&self) -> Option<io::Result<()>> {
        self.why.lock().take()
    }
}
