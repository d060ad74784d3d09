//! Whether the driver sets time slices, by which computing time is shared: drivers of virtual GPUs refuse.
//!
//! It's asked once for each GPU, version and boot, when somebody asks for a share that needs slices.
//! What it said is remembered in a file. Nobody who asks for no share waits for that.

use std::collections::BTreeMap;
use std::fs;

use serde::{Deserialize, Serialize};

use super::{Gate, GateError};
use crate::gate::settings::{self, Node, NodeKind};
use crate::monitor::worker::slice_refused;
use crate::process::boot_id;
use crate::replace::replace;

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
    /// Where it doesn't: what it said. Where it makes no channel group for us, nothing is known, and
    /// monitors tell what becomes of it.
    pub(super) fn see_that_slices_are_set(
        &self,
        nodes: &[Node],
        gpus: &[settings::Gpu],
    ) -> Result<(), GateError> {
        let release = self.release()?;
        let path = self.state_dir.join(TRIED);
        let (driver, boot) = (release.version().to_string(), boot_id(&self.proc_root));
        let known = fs::read(&path).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let mut known = known
            .filter(|known: &Tried| known.driver == driver && known.boot == boot)
            .unwrap_or(Tried { driver, boot, gpus: BTreeMap::new() });
        for gpu in gpus {
            if !known.gpus.contains_key(&gpu.uuid) {
                let Some(refused) = slice_refused(nodes, &release, gpu) else { continue };
                known.gpus.insert(gpu.uuid.clone(), refused);
                // Where it can't be remembered the next one asks again.
                let text = serde_json::to_vec(&known).unwrap_or_default();
                let _ = replace(&path, &text, 0o600);
            }
            if let Some(Some(why)) = known.gpus.get(&gpu.uuid) {
                let (index, why) = (gpu.index, why.clone());
                return Err(GateError::Slices { index, why, version: release.version() });
            }
        }
        Ok(())
    }

    /// The nodes of the driver, of these GPUs.
    pub(super) fn nodes(&self, gpus: &[settings::Gpu]) -> Result<Vec<Node>, GateError> {
        let dev = self.driver_root.join("dev");
        let mut nodes = vec![
            super::node(NodeKind::Control, dev.join("nvidiactl"))?,
            super::node(NodeKind::Uvm, dev.join("nvidia-uvm"))?,
        ];
        for (at, gpu) in gpus.iter().enumerate() {
            nodes.push(super::node(NodeKind::Gpu(at), dev.join(format!("nvidia{}", gpu.minor)))?);
        }
        Ok(nodes)
    }
}
