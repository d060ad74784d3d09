//! Where the figures come from: this host, or root's service.

use anyhow::Result;
use cgpu::host::Host;
use cgpu_cli::view::{Driver, Processes, Snapshot, collect};
use cgpu_host::registry::RegistryError;

use crate::gpu_choice::chosen;
use crate::socket;

/// Collects what is shown.
#[derive(Debug)]
pub(crate) struct Collector {
    pub(crate) host: Host,
    pub(crate) driver: Option<Driver>,
    pub(crate) processes: Processes,
    /// The GPUs that are shown; all if there are none.
    pub(crate) ids: Vec<String>,
}

impl Collector {
    /// What this host shows now; for a user who isn't root, what root's service says of it.
    ///
    /// # Errors
    ///
    /// If the host can't be read, or has no such GPU.
    pub(crate) fn collect(&mut self) -> Result<Snapshot> {
        let found = match collect(&self.host.chosen_again(), self.processes, self.driver.as_mut()) {
            Err(RegistryError::NotRoot { .. }) => socket::ask(&self.host.config.view.socket)?,
            found => found?,
        };
        Ok(chosen(found, &self.ids)?)
    }

    /// The same without asking NVIDIA's driver, which may take long.
    ///
    /// # Errors
    ///
    /// As [`collect`](Self::collect).
    pub(crate) fn collect_without_driver(&mut self) -> Result<Snapshot> {
        let driver = self.driver.take();
        let found = self.collect();
        self.driver = driver;
        found
    }
}
