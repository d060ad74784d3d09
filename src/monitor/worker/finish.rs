//! The worker's end: somebody says why, and its first thread ends it.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use crate::monitor::keeper_socket::KeeperSocket;

/// Why the worker ends, once it does.
#[derive(Debug)]
pub(crate) struct Finish {
    keeper: Arc<KeeperSocket>,
    why: Mutex<Option<io::Result<()>>>,
}

impl Finish {
    pub(crate) fn new(keeper: Arc<KeeperSocket>) -> Self {
        Finish { keeper, why: Mutex::new(None) }
    }

    /// Ends the worker; the first reason is the one.
    pub(crate) fn finish(&self, why: io::Result<()>) {
        self.why.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
        self.keeper.hear_no_more();
    }

    /// Why it ends, if it does.
    pub(crate) fn take(&self) -> Option<io::Result<()>> {
        self.why.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
