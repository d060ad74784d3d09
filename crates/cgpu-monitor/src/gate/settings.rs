//! What a monitor gets when it starts: [`Settings`], as JSON in a file without a name.
//!
//! The program that edits the bundle writes the settings, and the monitor reads them. Settings hold no state of the
//! container: the ledger has it.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use cgpu_core::processor::ProcessorShares;
use cgpu_host::config::MOST_CHANNEL_GROUPS;
use cgpu_host::events::EventSink;
use cgpu_host::process::ProcessId;

/// The largest settings that [`Settings::read`] reads, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// What the monitor of one container needs to know.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    pub id: String,
    pub short_id: String,
    /// The name that the engine gave the container, where the name is known.
    #[serde(default)]
    pub name: Option<String>,
    /// The runtime's root directory; empty where the root is not known.
    #[serde(default)]
    pub root: String,
    /// The state directory, in which events are stored; empty for none.
    #[serde(default)]
    pub state_dir: PathBuf,
    pub bundle: PathBuf,
    /// The monitor's directory, next to those of other monitors; empty for none.
    #[serde(default)]
    pub place: PathBuf,
    /// The driver's version, as `/proc/driver/nvidia/version` has it.
    pub driver: String,
    /// What the monitor does with managed memory.
    pub managed: Managed,
    /// The most channel groups that the container may have on each of its GPUs.
    #[serde(default = "most_channel_groups")]
    pub channel_groups: u32,
    /// The container's GPUs, in the container's order.
    pub gpus: Vec<Gpu>,
    /// The files by which the container reaches the driver.
    pub nodes: Vec<Node>,
    /// The configuration by which the monitor deregisters the container in the end; `None` for the default one.
    #[serde(default)]
    pub config: Option<PathBuf>,
    /// How much of a processor the container's own processes may take, in thousandths; `None` without a limit.
    #[serde(default)]
    pub processor_limit: Option<u64>,
    /// The container's weight of the processor; `None` for the default one.
    #[serde(default)]
    pub processor_shares: Option<ProcessorShares>,
    /// The cgroups in which the monitor was started, as `/proc/PID/cgroup` has them: other programs are there, too.
    #[serde(default)]
    pub started_in: String,
    /// The process that becomes the runtime and makes the container.
    pub launcher: ProcessId,
    /// The runtime's own state file of the container, which names the container's first process; `None` where it is
    /// not known.
    pub state_file: Option<PathBuf>,
    /// Whether the monitor lets calls from the host's own mount namespace pass: where the runtime is behind the gate
    /// with its hooks, and the container has its own mount namespace.
    pub spares_host: bool,
    /// Whether a signal can interrupt a call that is not answered yet: before Linux 5.19.
    #[serde(default = "default_interruptible")]
    pub interruptible: bool,
    /// The log's file; empty for none.
    pub log: String,
}

/// The default of [`Settings::interruptible`], for settings without the field.
fn default_interruptible() -> bool {
    true
}

/// The default of [`Settings::channel_groups`], for settings without the field.
fn most_channel_groups() -> u32 {
    MOST_CHANNEL_GROUPS
}

/// What the monitor does with managed memory, which the driver gives without an allocation call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Managed {
    /// The container gets no managed memory.
    Refuse,
    /// A mapping of managed memory counts in full on every GPU of the container, even if no page is touched.
    Charge,
}

/// A GPU and the container's quota on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// The driver's index of the GPU, for messages.
    pub index: u32,
    /// `GPU-` and a UUID.
    pub uuid: String,
    /// The minor number of `/dev/nvidiaN`.
    pub minor: u32,
    /// The container's quota in bytes; the GPU's memory if the container's use of the GPU is unlimited.
    pub limit_bytes: u64,
}

/// A file by which the container reaches the driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// What the file is for.
    pub kind: NodeKind,
    /// The file's path on the host.
    pub path: PathBuf,
    /// How an open descriptor of the file is recognised.
    pub identity: Identity,
}

/// What a file of the driver is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeKind {
    /// `nvidiactl`.
    Control,
    /// `nvidiaN`, with the GPU's place in the container's order.
    Gpu(usize),
    /// `nvidia-uvm`.
    Uvm,
    /// Any other file of the driver, such as `nvidia-uvm-tools`.
    Other,
}

/// What `fstat` says of an open file, by which the file is recognised as a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Identity {
    /// A character device: its device number, `st_rdev`.
    Device(u64),
    /// Any other file: `st_dev` and `st_ino`.
    File {
        /// The file system's device number.
        device: u64,
        /// The inode number.
        inode: u64,
    },
}

/// Why settings can't be handed over.
#[derive(Debug, Error)]
pub enum SettingsError {
    /// The file can't be read or written.
    #[error("cannot hand settings to the monitor: {source}")]
    File {
        #[from]
        source: io::Error,
    },
    /// The text is not settings.
    #[error("the monitor's settings are not what this version writes: {source}")]
    Content {
        #[from]
        source: serde_json::Error,
    },
}

impl Settings {
    /// The [`EventSink`] that reports events of this container.
    #[must_use]
    pub fn sink(&self) -> EventSink {
        let (id, name) = (self.id.clone(), self.name.clone());
        EventSink::of_container(self.state_dir.clone(), id, name, self.root.clone())
    }

    /// Writes the settings into `file`, which is empty.
    ///
    /// # Errors
    ///
    /// Where `file` can't be written, or a path is not UTF-8.
    pub fn write(&self, mut file: &File) -> Result<(), SettingsError> {
        let text = serde_json::to_vec(self)?;
        file.write_all(&text)?;
        Ok(())
    }

    /// Reads the settings from the beginning of `file`, which other processes may read, too.
    ///
    /// # Errors
    ///
    /// Where `file` can't be read, or holds something else.
    pub fn read(mut file: &File) -> Result<Self, SettingsError> {
        let mut text = Vec::new();
        file.seek(SeekFrom::Start(0))?;
        file.take(MAX_BYTES).read_to_end(&mut text)?;
        Ok(serde_json::from_slice(&text)?)
    }
}
