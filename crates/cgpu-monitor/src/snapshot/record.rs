//! The changes of what a monitor knows of its container. The records that make the same books from nothing are in the
//! [`Snapshot`](super::Snapshot). A process has a number in them ([`Process`]). Pure.

use serde::{Deserialize, Serialize};

use cgpu_core::ledger::{Entry, Process};

/// A change of the books: [`ContainerState::write`](crate::state::ContainerState::write) applies it.
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
    /// A file that is a node of UVM's.
    Node {
        /// `st_dev`.
        device: u64,
        /// `st_ino`.
        inode: u64,
    },
    /// A range from [`AddRange`](Self::AddRange) is gone.
    RemoveRange {
        /// The space.
        space: u64,
        /// The first address.
        base: u64,
    },
    /// A call that may initialize a file of UVM's is continued. No other such call is underway.
    Initialize {
        /// The file's number.
        file: u32,
        /// The thread that makes the call.
        tid: u32,
        /// The process to whose memory the call binds the file.
        creator: Creator,
    },
    /// The call of [`Initialize`](Self::Initialize) is over, or is known to have initialized the file.
    Initialized {
        /// Whether the file was initialized.
        done: bool,
    },
    /// A file of UVM's is bound to one memory, and has had a GPU.
    Bound {
        /// The file's number.
        file: u32,
    },
    /// A channel group, or a channel outside groups, was made, or its call is continued.
    Group {
        /// The GPU's number in the container's order.
        gpu: usize,
        /// The client.
        client: u32,
        /// The handle of the object above it.
        parent: u32,
        /// Its handle.
        handle: u32,
        /// Whether the driver is known to have made it. Otherwise its call was only continued.
        certain: bool,
        /// How the group is reached; `None` for a channel.
        reach: Option<Reach>,
    },
    /// A channel that computes was made, or is about to be made.
    Channel {
        /// The GPU's number in the container's order.
        gpu: usize,
        /// The client.
        client: u32,
        /// The handle of the object above it.
        parent: u32,
        /// Its handle.
        handle: u32,
        /// The process that made the channel.
        process: Process,
    },
    /// A channel group or a channel is gone.
    Ungroup {
        /// The client.
        client: u32,
        /// Its handle.
        handle: u32,
    },
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

/// The process that initializes a file of UVM's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Creator {
    /// The process.
    pub process: Process,
    /// A number that tells the program that the process executes from a later program of the same process.
    pub image: u64,
}
