//! Whether the driver sets time slices, by which computing time is shared: drivers of virtual GPUs refuse.
//!
//! It's asked when a container asks for a share that needs slices, once for each GPU, version and boot: that it sets
//! them, or has no such thing, is remembered in a file. What it refuses for another reason it may do later. A
//! container that asks for no share doesn't wait for that.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Gate, GateError};
use cgpu_host::atomic_file::replace;
use cgpu_host::process::boot_id;
use cgpu_monitor::daemon::{Failure, try_slice};
use cgpu_monitor::gate::settings::{self, Node};
use nvrm::Release;
use nvrm::number::NV_ERR_NOT_SUPPORTED;

/// The file in the state's directory.
const TRIED: &str = "slices-tried";

/// What the driver said, of one version and in one boot.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Tried {
    driver: String,
    boot: String,
    /// By UUID: why it sets none; `None` where it does.
    gpus: BTreeMap<String, Option<String>>,
}

impl Gate {
    /// Sees that the driver sets slices on these GPUs.
    ///
    /// # Errors
    ///
    /// Where it doesn't: what it said. Where nothing is known, monitors tell what becomes of it.
    pub(super) fn see_that_slices_are_set(
        &self,
        release: &Release,
        nodes: &[Node],
        gpus: &[settings::Gpu],
    ) -> Result<(), GateError> {
        let path = self.state_dir.join(TRIED);
        let (driver, boot) = (release.version().to_string(), boot_id(&self.proc_root));
        let known = fs::read(&path).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let mut known = known
            .filter(|known: &Tried| known.driver == driver && known.boot == boot)
            .unwrap_or(Tried { driver, boot, gpus: BTreeMap::new() });
        for gpu in gpus {
            let refused = match known.gpus.get(&gpu.uuid) {
                Some(refused) => refused.clone(),
                None => match try_slice(nodes, release, gpu) {
                    None | Some(Err(Failure::Errno(_))) => continue,
                    Some(Ok(())) => known.remember(&path, gpu, None),
                    Some(Err(failure @ Failure::Status(status))) => {
                        let why = format!("SET_TIMESLICE: {failure}");
                        match status {
                            // Until there is another driver.
                            NV_ERR_NOT_SUPPORTED => known.remember(&path, gpu, Some(why)),
                            _ => Some(why),
                        }
                    }
                },
            };
            if let Some(why) = refused {
                let (index, version) = (gpu.index, release.version());
                return Err(GateError::Slices { index, why, version });
            }
        }
        Ok(())
    }
}

impl Tried {
    /// Where it can't be remembered the next one asks again.
    fn remember(
        &mut self,
        path: &Path,
        gpu: &settings::Gpu,
        refused: Option<String>,
    ) -> Option<String> {
        self.gpus.insert(gpu.uuid.clone(), refused.clone());
        let _ = replace(path, &serde_json::to_vec(self).unwrap_or_default(), 0o600);
        refused
    }
}
