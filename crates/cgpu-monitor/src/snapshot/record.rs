//! The changes of what a monitor knows of its container. The records that recreate the same state are in the
//! [`Snapshot`](super::Snapshot). A process has a number in them ([`Process`]). Pure.

use serde::{Deserialize, Serialize};

use cgpu_core::ledger::{Entry, Process};

/// A change of the state: [`ContainerState::write`](crate::state::ContainerState::write) applies it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Record {
    /// A change of the ledger.
    Ledger(Entry),
    /// A space has a new range of addresses.
    AddRange {
        /// The space, by [`Space::number`](crate::state::Space).
        space: u64,
        /// The first address.
        base: u64,
        /// The length in bytes.
        length: u64,
    },
    /// A file that is a UVM node.
    Node {
        /// `st_dev`.
        device: u64,
        /// `st_ino`.
        inode: u64,
    },
    /// A range from [`AddRange`](Self::AddRange) was removed.
    RemoveRange {
        space: u64,
        /// The first address.
        base: u64,
    },
    /// A call that may initialize a UVM file is passed through. No other such call is in progress.
    Initialize {
        file: u32,
        /// The thread that makes the call.
        tid: u32,
        /// The process to whose memory the call binds the file.
        creator: Creator,
    },
    /// The call of [`Initialize`](Self::Initialize) has finished, or is known to have initialized the file.
    Initialized {
        /// Whether the file was initialized.
        done: bool,
    },
    /// A UVM file is bound to one memory, and has had a GPU.
    Bound { file: u32 },
    /// A channel group, or a channel outside groups, was made, or its call is passed through.
    Group {
        /// The GPU's number in the container's order.
        gpu: usize,
        client: u32,
        /// The handle of the object above it.
        parent: u32,
        handle: u32,
        /// Whether the driver is known to have made it. Otherwise its call was only passed through.
        certain: bool,
        /// How the group is reached; `None` for a channel.
        reach: Option<Reach>,
    },
    /// A channel that computes was made, or is about to be made.
    Channel {
        /// The GPU's number in the container's order.
        gpu: usize,
        client: u32,
        /// The handle of the object above it.
        parent: u32,
        handle: u32,
        /// The process that made the channel.
        process: Process,
    },
    /// A channel group or a channel was freed.
    Ungroup { client: u32, handle: u32 },
}

/// The process that made a channel group, and how the group is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Reach {
    /// The process that made the group.
    pub process: Process,
    /// The process's descriptor on which the group was made.
    pub descriptor: i32,
    /// The engine that the program asked for, `NV2080_ENGINE_TYPE_*`. With 0 the driver chooses.
    pub engine: u32,
}

/// The process that initializes a UVM file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Creator {
    pub process: Process,
    /// A number that distinguishes the program that the process executes from a later program of the same process.
    pub image: u64,
}
