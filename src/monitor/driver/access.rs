//! Our client of the driver: opened when it is needed, kept where something is made by it that outlives this
//! worker, and closed when nobody is left to be asked for.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use crate::monitor::driver::monitor_client::{MonitorClient, Presence};
use crate::monitor::driver::unanswered::{Amount, Told, Unanswered};
use crate::monitor::journal::kept_file::KeptFile;
use crate::monitor::keeper_socket::KeeperSocket;
use crate::monitor::lock::Lock;
use crate::monitor::node::device::Failure;
use crate::monitor::state::container_state::ContainerState;

/// Our way to the driver.
#[derive(Debug)]
pub(crate) struct DriverAccess {
    state: Arc<ContainerState>,
    keeper: Arc<KeeperSocket>,
    own: Lock<Option<Arc<MonitorClient>>>,
    /// What the log was told of lately that the driver doesn't answer.
    told: Told,
}

impl DriverAccess {
    pub(crate) fn new(state: Arc<ContainerState>, keeper: Arc<KeeperSocket>) -> Self {
        DriverAccess { state, keeper, own: Lock::new(None), told: Told::default() }
    }

    /// Our client, where it's open.
    pub(crate) fn at_hand(&self) -> Option<Arc<MonitorClient>> {
        self.own.lock().clone()
    }

    /// Our client of the driver, opened where it isn't yet.
    pub(crate) fn own_client(&self) -> Option<Arc<MonitorClient>> {
        let mut own = self.own.lock();
        let ContainerState { settings, release, uuids, .. } = &*self.state;
        if own.is_none() {
            match MonitorClient::open(&settings.nodes, release, uuids) {
                Ok(opened) => {
                    for gpu in opened.missing().filter_map(|gpu| settings.gpus.get(gpu)) {
                        self.warn_blind(&Unanswered::NoGpu { index: gpu.index });
                    }
                    *own = Some(Arc::new(opened));
                }
                Err(unanswered) => self.warn_blind(&unanswered),
            }
        }
        own.clone()
    }

    /// Whether something of another client's is there; `None` where the driver can't tell.
    pub(crate) fn presence(&self, client: u32, handle: u32) -> Option<Presence> {
        let own = self.own_client().filter(|own| own.can_tell())?;
        Some(own.presence(client, handle))
    }

    /// Our client of the driver, to make by it what outlives this worker: the keeper has its files from
    /// then on.
    pub(crate) fn kept_client(&self) -> Option<Arc<MonitorClient>> {
        let own = self.own_client()?;
        own.is_kept.call_once(|| self.bequeath(&own));
        Some(own)
    }

    fn bequeath(&self, own: &MonitorClient) {
        for (place, file) in (0..).zip(own.files()) {
            let kept = KeptFile::Client { client: own.client, place };
            // Else it is told that the worker is gone in a moment.
            let _ = self.keeper.tell_with(kept.keep(), Some(file));
        }
    }

    /// Closes our client of the driver, where nobody is left to be asked for: no process of the container's,
    /// and none that may have its descriptors.
    pub(crate) fn let_go(&self, are_watched: bool) {
        let mut own = self.own.lock();
        // Who has it may be about to enter a stake; nobody else can get it until this is over.
        if own.as_ref().is_none_or(|own| Arc::strong_count(own) > 1) {
            return;
        }
        let books = self.state.books();
        let is_needed = !books.processes.is_empty() || books.ledger.has_stakes();
        drop(books);
        if !is_needed && !are_watched {
            own.take().iter().for_each(|own| self.disown(own));
        }
    }

    /// We close it, and the keeper shall, where it has it.
    pub(crate) fn disown(&self, own: &MonitorClient) {
        if !own.is_kept.is_completed() {
            return;
        }
        (0..).zip(own.files()).for_each(|(place, _)| {
            let kept = KeptFile::Client { client: own.client, place };
            let _ = self.keeper.tell(kept.let_go());
        });
    }

    /// Bytes that processes have of the container's GPUs, where any, and what is in use beyond
    /// that, but for a constant.
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

    /// What the driver answered of a GPU; where it didn't, the log says so.
    pub(crate) fn answered<T>(
        &self,
        gpu: usize,
        amount: Amount,
        answer: Result<T, Failure>,
    ) -> Option<T> {
        let failed = |failure: Failure| {
            let index = self.state.settings.gpus.get(gpu).map_or(0, |gpu| gpu.index);
            self.warn_blind(&Unanswered::Amount { amount, index, reason: Some(failure) });
        };
        answer.map_err(failed).ok()
    }

    /// The log says that an audit can't look.
    fn warn_blind(&self, why: &Unanswered) {
        if self.told.is_due(why, Instant::now()) {
            let container = self.state.settings.short_id.as_str();
            let driver = self.state.settings.driver.as_str();
            tracing::warn!(container, driver, "an audit can't see what the driver has: {why}");
        }
    }
}
