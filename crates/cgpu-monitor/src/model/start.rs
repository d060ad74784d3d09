//! The start of a monitor in the model.

use std::path::{Path, PathBuf};

use super::{DRIVER, ModelDriver};
use crate::gate::settings::{Gpu, Managed, Settings};
use cgpu_host::process::ProcessId;

/// The settings of a container whose GPUs have these bytes and quotas.
pub(crate) fn settings(driver: &ModelDriver, gpus: &[(u64, u64)], place: &Path) -> Settings {
    let known = driver.sim.state().gpus;
    let gpu = |(minor, (_, limit_bytes)): (u32, &(u64, u64))| Gpu {
        index: minor,
        uuid: known[minor as usize].uuid.clone(),
        minor,
        limit_bytes: *limit_bytes,
    };
    Settings {
        id: "model".into(),
        short_id: "model_______".into(),
        name: None,
        root: String::new(),
        state_dir: PathBuf::new(),
        bundle: "/nowhere".into(),
        place: place.to_owned(),
        driver: DRIVER.into(),
        managed: Managed::Refuse,
        channel_groups: 256,
        gpus: (0..).zip(gpus).map(gpu).collect(),
        nodes: driver.nodes(),
        config: None,
        processor_limit: None,
        processor_shares: None,
        started_in: String::new(),
        launcher: ProcessId::own().expect("/proc is mounted"),
        state_file: None,
        spares_host: false,
        interruptible: true,
        log: String::new(),
    }
}
