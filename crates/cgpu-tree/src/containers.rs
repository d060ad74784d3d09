//! The registered containers, read again only after a change.
//!
//! A walk through the tree asks for them at each step; the stamp of the registry says whether they
//! are still the same.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use cgpu::host::Host;
use cgpu_host::registry::{Record, Registry, RegistryError, Stamp};

/// Records, in the order of their files' names.
pub(crate) type Records = Arc<[Record]>;

/// The records that were read last.
#[derive(Debug, Default)]
pub(crate) struct Registered {
    last: Mutex<Option<Last>>,
}

/// Records, the registry that they are of, and the stamp that it had then.
#[derive(Debug)]
struct Last {
    registry: Registry,
    stamp: Stamp,
    records: Records,
}

impl Registered {
    /// The containers that are registered now. One whose record can't be read is left out: `cgpu ps`
    /// names it.
    ///
    /// # Errors
    ///
    /// Where the registry can't be read.
    pub(crate) fn now(&self, host: &Host) -> Result<Records, RegistryError> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Last { registry, stamp, records }) = &*last
            && registry.stamp().is_ok_and(|now| now == *stamp)
        {
            return Ok(Arc::clone(records));
        }
        let registry = host.check_registry()?;
        // Both before the records are read: what changes after has another stamp, and is read the
        // next time.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let stamp = registry.stamp().ok();
        let records: Records = registry.check_each()?.0.into();
        let now_ns = i128::try_from(now.as_nanos()).unwrap_or(i128::MAX);
        let settled = stamp.filter(|stamp| stamp.is_settled(now_ns));
        *last = settled.map(|stamp| Last { registry, stamp, records: Arc::clone(&records) });
        Ok(records)
    }
}
