//! The monitor's client of the driver: opened when it is needed, and closed when no process is left to ask the driver
//! about.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use crate::monitor::driver::monitor_client::{MonitorClient, Presence};
use crate::monitor::driver::unanswered::{Amount, Unanswered, WarningTimes};
use crate::monitor::lock::Lock;
use crate::monitor::node::Failure;
use crate::monitor::state::ContainerState;

/// The monitor's access to the driver.
#[derive(Debug)]
pub(crate) struct DriverAccess {
    pub(crate) state: Arc<ContainerState>,
    own: Lock<Option<Arc<MonitorClient>>>,
    /// When the log was last told what the driver does not answer.
    warned: WarningTimes,
}

impl DriverAccess {
    pub(crate) fn new(state: Arc<ContainerState>) -> Self {
        DriverAccess { state, own: Lock::new(None), warned: WarningTimes::default() }
    }

    /// The monitor's client; `None` where it is not open.
    pub(crate) fn client_if_open(&self) -> Option<Arc<MonitorClient>> {
        self.own.lock().clone()
    }

    /// The monitor's client, opened where it is not open yet. `None` where the driver makes no client.
    pub(crate) fn own_client(&self) -> Option<Arc<MonitorClient>> {
        let mut own = self.own.lock();
        let ContainerState { settings, release, uuids, .. } = &*self.state;
        if own.is_none() {
            match MonitorClient::open(&settings.nodes, release, uuids) {
                Ok(opened) => {
                    for gpu in opened.missing().filter_map(|gpu| settings.gpus.get(gpu)) {
                        self.warn_unanswered(&Unanswered::NoGpu { index: gpu.index });
                    }
                    *own = Some(Arc::new(opened));
                }
                Err(unanswered) => self.warn_unanswered(&unanswered),
            }
        }
        own.clone()
    }

    /// Whether another client has the object `handle`; `None` where the driver can't tell.
    pub(crate) fn presence(&self, client: u32, handle: u32) -> Option<Presence> {
        let own = self.own_client().filter(|own| own.can_tell())?;
        Some(own.presence(client, handle))
    }

    /// Closes the monitor's client where no process is left to ask the driver about, and the ledger has no stake.
    /// `are_watched`: whether outside processes may have the container's descriptors.
    pub(crate) fn close_if_unused(&self, are_watched: bool) {
        let mut own = self.own.lock();
        // A thread that has the client may be about to enter a stake. The lock keeps others from getting the client.
        if own.as_ref().is_none_or(|own| Arc::strong_count(own) > 1) {
            return;
        }
        let books = self.state.books();
        let is_needed = !books.processes.is_empty() || books.ledger.has_stakes();
        drop(books);
        if !is_needed && !are_watched {
            *own = None;
        }
    }

    /// Goes on with a client from before an update. Fails if the driver no longer answers it.
    pub(crate) fn resume(&self, client: MonitorClient) -> io::Result<()> {
        let known = client.gpus.iter().position(Option::is_some);
        if let Some(gpu) = known {
            let refused = |failure: Failure| {
                io::Error::other(format!(
                    "the driver doesn't answer the monitor's client any more: {failure}"
                ))
            };
            client.free_bytes(gpu).map_err(refused)?;
        }
        *self.own.lock() = Some(Arc::new(client));
        Ok(())
    }

    /// The bytes of all the container's GPUs that each process has, without processes that have none; and the bytes in
    /// use that these processes have not made, less a constant. `None` where the driver does not answer.
    pub(crate) fn figures(&self, pids: &[u32]) -> Option<(BTreeMap<u32, u64>, i128)> {
        let own = self.own_client()?;
        let mut figures = BTreeMap::new();
        let mut unexplained = 0;
        for gpu in 0..self.state.uuids.len() {
            let free = own.free_bytes(gpu);
            unexplained -= i128::from(self.answered(gpu, Amount::Free, free)?);
            let held = own.held(gpu, pids);
            for held in self.answered(gpu, Amount::Held, held)? {
                let bytes = held.bytes();
                unexplained -= i128::from(held.made_bytes);
                if bytes > 0 {
                    *figures.entry(held.pid).or_insert(0) += bytes;
                }
            }
        }
        Some((figures, unexplained))
    }

    /// The driver's answer about a GPU. Where the driver gave none, the log says so, and the result is `None`.
    pub(crate) fn answered<T>(
        &self,
        gpu: usize,
        amount: Amount,
        answer: Result<T, Failure>,
    ) -> Option<T> {
        let failed = |failure: Failure| {
            let index = self.state.settings.gpus.get(gpu).map_or(0, |gpu| gpu.index);
            self.warn_unanswered(&Unanswered::Amount { amount, index, reason: Some(failure) });
        };
        answer.map_err(failed).ok()
    }

    /// Tells the log that an audit can't see what the driver has.
    fn warn_unanswered(&self, why: &Unanswered) {
        if self.warned.take_due(why, Instant::now()) {
            let container = self.state.settings.short_id.as_str();
            let driver = self.state.settings.driver.as_str();
            tracing::warn!(container, driver, "an audit can't see what the driver has: {why}");
        }
    }
}
