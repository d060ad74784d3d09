//! The monitor's client of the driver: opened when it is needed, and closed when no process is left to ask the driver
//! about.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use crate::driver::monitor_client::{MonitorClient, Presence};
use crate::driver::unanswered_calls::{Amount, Unanswered};
use crate::node::Failure;
use crate::shared::Monitor;

/// The monitor's client; `None` if it is not open.
pub(crate) fn client_if_open(monitor: &Monitor) -> Option<Arc<MonitorClient>> {
    monitor.client.lock().clone()
}

/// The monitor's client, opened if it is not open yet. `None` if the driver makes no client.
pub(crate) fn own_client(monitor: &Monitor) -> Option<Arc<MonitorClient>> {
    let mut own = monitor.client.lock();
    let Monitor { settings, release, uuids, .. } = monitor;
    if own.is_none() {
        match MonitorClient::open(&settings.nodes, release, uuids) {
            Ok(opened) => {
                for gpu in opened.missing().filter_map(|gpu| settings.gpus.get(gpu)) {
                    warn_unanswered(monitor, &Unanswered::NoGpu { index: gpu.index });
                }
                *own = Some(Arc::new(opened));
            }
            Err(unanswered) => warn_unanswered(monitor, &unanswered),
        }
    }
    own.clone()
}

/// Whether another client has the object `handle`; `None` if the driver can't say.
pub(crate) fn presence(monitor: &Monitor, client: u32, handle: u32) -> Option<Presence> {
    let own = own_client(monitor).filter(|own| own.can_report())?;
    Some(own.presence(client, handle))
}

/// Closes the monitor's client if no process is left to ask the driver about, and the ledger has no pin. `are_watched`:
/// whether outside processes may have the container's descriptors.
pub(crate) fn close_client_if_unused(monitor: &Monitor, are_watched: bool) {
    let mut own = monitor.client.lock();
    // A thread that has the client may be about to enter a pin. The lock keeps others from getting the client.
    if own.as_ref().is_none_or(|own| Arc::strong_count(own) > 1) {
        return;
    }
    let state = monitor.state();
    let is_needed = !state.processes.is_empty() || state.ledger.has_pins();
    drop(state);
    if !is_needed && !are_watched {
        *own = None;
    }
}

/// Goes on with a client from before an update. Fails if the driver no longer answers it.
pub(crate) fn resume_client(monitor: &Monitor, client: MonitorClient) -> io::Result<()> {
    let known = client.gpus.iter().position(Option::is_some);
    if let Some(gpu) = known {
        let refused = |failure: Failure| {
            io::Error::other(format!(
                "the driver doesn't answer the monitor's client any more: {failure}"
            ))
        };
        client.free_bytes(gpu).map_err(refused)?;
    }
    *monitor.client.lock() = Some(Arc::new(client));
    Ok(())
}

/// The bytes of all the container's GPUs that each process has, without processes that have none; and the bytes in use
/// that these processes have not made, less a constant. `None` if the driver does not answer.
pub(crate) fn driver_usage_of(
    monitor: &Monitor,
    pids: &[u32],
) -> Option<(BTreeMap<u32, u64>, i128)> {
    let own = own_client(monitor)?;
    let mut usage = BTreeMap::new();
    let mut unexplained = 0;
    for gpu in 0..monitor.uuids.len() {
        let free = own.free_bytes(gpu);
        unexplained -= i128::from(answered(monitor, gpu, Amount::Free, free)?);
        let held = own.held(gpu, pids);
        for held in answered(monitor, gpu, Amount::Held, held)? {
            let bytes = held.bytes();
            unexplained -= i128::from(held.made_bytes);
            if bytes > 0 {
                *usage.entry(held.pid).or_insert(0) += bytes;
            }
        }
    }
    Some((usage, unexplained))
}

/// The driver's answer about a GPU. If the driver gave none, the log says so, and the result is `None`.
pub(crate) fn answered<T>(
    monitor: &Monitor,
    gpu: usize,
    amount: Amount,
    answer: Result<T, Failure>,
) -> Option<T> {
    let failed = |failure: Failure| {
        let index = monitor.settings.gpus.get(gpu).map_or(0, |gpu| gpu.index);
        warn_unanswered(monitor, &Unanswered::Amount { amount, index, reason: Some(failure) });
    };
    answer.map_err(failed).ok()
}

/// Logs that an audit can't see what the driver has.
fn warn_unanswered(monitor: &Monitor, why: &Unanswered) {
    if monitor.warned.take_due(why, Instant::now()) {
        let container = monitor.settings.short_id.as_str();
        let driver = monitor.settings.driver.as_str();
        tracing::warn!(container, driver, "an audit can't see what the driver has: {why}");
    }
}
