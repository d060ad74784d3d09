//! The worker's end: the result with which the program ends.

use std::io;
use std::sync::Arc;

use crate::monitor::keeper_socket::KeeperSocket;
use crate::monitor::lock::Lock;

/// Ends the worker.
#[derive(Debug)]
pub(crate) struct WorkerEnd {
    keeper: Arc<KeeperSocket>,
    /// The result, once the worker is to end.
    result: Lock<Option<io::Result<()>>>,
}

impl WorkerEnd {
    pub(crate) fn new(keeper: Arc<KeeperSocket>) -> Self {
        WorkerEnd { keeper, result: Lock::new(None) }
    }

    /// Has the first thread end the worker. Of several results the first one counts.
    pub(crate) fn finish(&self, result: io::Result<()>) {
        self.result.lock().get_or_insert(result);
        self.keeper.shut_down_reading();
    }

    /// Takes the result, once the worker is to end.
    pub(crate) fn take_result(&self) -> Option<io::Result<()>> {
        self.result.lock().take()
    }
}
