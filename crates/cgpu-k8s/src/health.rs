//! Which GPUs the driver calls broken: [`Health`].

use std::path::Path;

use tracing::{info, warn};

use crate::complaint::Complaint;
use crate::kernel_log::KernelLog;
use crate::units::SharedGpu;
use crate::xid::{Broken, Verdict};

/// Which GPUs are broken, by the kernel's log.
#[derive(Debug, Default)]
pub(crate) struct Health {
    log: Option<KernelLog>,
    broken: Broken,
    complaint: Complaint,
}

impl Health {
    /// By the log that is there; if it can't be read, that is reported and all GPUs count as healthy.
    pub(crate) fn open(path: &Path) -> Self {
        let mut health = Health::default();
        match KernelLog::open(path) {
            Ok(log) => health.log = Some(log),
            Err(error) => {
                let path = path.display();
                warn!(
                    "a broken GPU will not be seen: {path} can't be read: {error} (--kernel-log)"
                );
            }
        }
        health.listen();
        health
    }

    /// Takes in what the log has that is new.
    pub(crate) fn listen(&mut self) {
        let Some(log) = &mut self.log else { return };
        let lines = match log.read() {
            Ok(lines) => lines,
            Err(error) => {
                self.complaint.report(format!("the kernel's log can't be read: {error}"));
                return;
            }
        };
        for line in lines {
            match self.broken.hear(&line) {
                Some((gpu, verdict @ Verdict::Broken(_))) => warn!(gpu, "{verdict}"),
                Some((gpu, verdict @ Verdict::Mended)) => info!(gpu, "{verdict}"),
                None => {}
            }
        }
    }

    /// Takes all GPUs for healthy again that the log reported broken until now.
    pub(crate) fn forgive(&mut self) {
        self.listen();
        self.broken = Broken::default();
    }

    /// The Xid of the GPU at that place, if it is broken.
    pub(crate) fn xid(&self, bus_id: &str) -> Option<u32> {
        self.broken.xid(bus_id)
    }

    /// The GPUs, those for lost that are broken.
    pub(crate) fn judged(&self, mut gpus: Vec<SharedGpu>) -> Vec<SharedGpu> {
        gpus.iter_mut().for_each(|gpu| gpu.healthy &= self.broken.xid(&gpu.bus_id).is_none());
        gpus
    }
}
