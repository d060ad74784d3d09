//! What a monitor is told when it starts: [`Settings`], as JSON in a file without a name.
//!
//! Written by whoever edits the bundle, read by keeper and worker. Knows no container's
//! state: that is the ledger's.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::events::Teller;
use crate::process::ProcessId;

/// Channel groups that a container has at most on a GPU, where nobody says otherwise: those of 64
/// processes with a CUDA context, which has four.
pub const MOST_CHANNEL_GROUPS: u32 = 256;

/// The largest settings that are read, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// What one container's monitor needs to know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// The container's id; empty where that isn't known yet.
    pub id: String,
    /// Its short id.
    pub short_id: String,
    /// What its engine called it when it was made, where that is known.
    #[serde(default)]
    pub name: Option<String>,
    /// Its runtime's root; empty where that isn't known.
    #[serde(default)]
    pub root: String,
    /// The state directory, where events are kept; empty for none.
    #[serde(default)]
    pub state_dir: PathBuf,
    /// Its bundle; empty where that isn't known yet.
    pub bundle: PathBuf,
    /// The monitor's directory, beside those of others; empty where it has none.
    #[serde(default)]
    pub place: PathBuf,
    /// The driver's version, as `/proc/driver/nvidia/version` has it.
    pub driver: String,
    /// What becomes of managed memory.
    pub managed: Managed,
    /// Channel groups that it has at most on each of its GPUs.
    #[serde(default = "most_channel_groups")]
    pub channel_groups: u32,
    /// Its GPUs, in its order.
    pub gpus: Vec<Gpu>,
    /// The files by which it reaches the driver.
    pub nodes: Vec<Node>,
    /// `cgpu-monitor`, for workers to come; by name, so that an upgrade is found there.
    pub monitor: PathBuf,
    /// The program, with its arguments, that the keeper becomes when the container is gone:
    /// it deregisters.
    pub farewell: Vec<String>,
    /// The runtime that makes the container; `None` where that isn't known.
    pub launcher: Option<ProcessId>,
    /// The runtime's own state of the container, which tells its first process; `None` where
    /// that isn't known.
    pub state_file: Option<PathBuf>,
    /// Whether calls from the host's own mount namespace are none of the container's: the
    /// runtime is behind the gate with its hooks, and the container has mounts of its own.
    pub spares_host: bool,
    /// Whether a signal takes a caller away from a call that isn't answered: before Linux 5.19,
    /// and behind a filter that the runtime put on.
    #[serde(default = "is_interruptible")]
    pub interruptible: bool,
    /// The log's file; empty for none.
    pub log: String,
}

/// Where nobody said so.
fn is_interruptible() -> bool {
    true
}

/// Where nobody said how many.
fn most_channel_groups() -> u32 {
    MOST_CHANNEL_GROUPS
}

/// What becomes of managed memory, which the driver gives without being asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Managed {
    /// There is none.
    Refuse,
    /// All of a mapping counts on every GPU of the container, touched or not.
    Charge,
}

/// A GPU and its quota.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// The driver's index, for messages.
    pub index: u32,
    /// `GPU-` and a UUID.
    pub uuid: String,
    /// Minor number of `/dev/nvidiaN`.
    pub minor: u32,
    /// Its memory in bytes.
    pub total_bytes: u64,
    /// The container's quota in bytes; all of it where the GPU is the container's as a whole.
    pub limit_bytes: u64,
}

/// A file by which the container reaches the driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Which.
    pub kind: NodeKind,
    /// Where it is on the host.
    pub path: PathBuf,
    /// How an open one is known.
    pub identity: Identity,
}

/// What a node is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeKind {
    /// `nvidiactl`.
    Control,
    /// `nvidiaN`: the container's GPU of that place in its order.
    Gpu(usize),
    /// `nvidia-uvm`.
    Uvm,
    /// Another of the driver's, `nvidia-uvm-tools` for one.
    Other,
}

/// How an open file is known to be a node: by what `fstat` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Identity {
    /// A character device: its number, `st_rdev`.
    Device(u64),
    /// Any other file: `st_dev` and `st_ino`.
    File {
        /// The file system.
        device: u64,
        /// The file in it.
        inode: u64,
    },
}

/// Why settings can't be handed over.
#[derive(Debug, Error)]
pub enum SettingsError {
    /// The file.
    #[error("cannot hand settings to the monitor: {source}")]
    File {
        /// Why.
        #[from]
        source: io::Error,
    },
    /// What is in it.
    #[error("the monitor's settings are not what this version writes: {source}")]
    Content {
        /// Why.
        #[from]
        source: serde_json::Error,
    },
}

impl Settings {
    /// Who tells of the container.
    #[must_use]
    pub fn teller(&self) -> Teller {
        let (id, name) = (self.id.clone(), self.name.clone());
        Teller::of_container(self.state_dir.clone(), id, name, self.root.clone())
    }

    /// Writes them into `file`, which is empty.
    ///
    /// # Errors
    ///
    /// Where it can't be written, or a path is no UTF-8.
    pub fn write(&self, mut file: &File) -> Result<(), SettingsError> {
        let text = serde_json::to_vec(self)?;
        file.write_all(&text)?;
        Ok(())
    }

    /// Reads them from the beginning of `file`, which others may read, too.
    ///
    /// # Errors
    ///
    /// Where it can't be read, or holds something else.
    pub fn read(mut file: &File) -> Result<Self, SettingsError> {
        let mut text = Vec::new();
        file.seek(SeekFrom::Start(0))?;
        file.take(MAX_BYTES).read_to_end(&mut text)?;
        Ok(serde_json::from_slice(&text)?)
    }
}
