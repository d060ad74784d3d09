//! What keeper and worker say to each other, and what others ask a monitor.
//!
//! Keeper and worker: one JSON text a packet over a pair of `SOCK_SEQPACKET` sockets, with
//! at most one descriptor beside it. Others (`cgpu ps`, `cgpu set`, other monitors): one JSON text and a
//! newline each way over the control socket, a stream. Pure: the words alone.

use serde::{Deserialize, Serialize};

/// The keeper to its worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Serve this listener; its descriptor comes along. A worker that takes another's place
    /// gets all there are before anything else.
    Listener {
        /// Its number, never used again.
        number: u64,
    },
    /// Memory was exported to this file, which comes along; before all else, as listeners.
    Export {
        /// Its number, by which the ledger holds the memory.
        number: u64,
    },
    /// Answer this control connection; it comes along.
    Control,
    /// All that the worker before had has been handed over: begin.
    Begin,
    /// Finish what you have begun, take nothing more, and exit with 0.
    Drain,
}

/// The worker to its keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Notice {
    /// It serves.
    Ready,
    /// Nobody is left behind that listener.
    Gone {
        /// Its number.
        number: u64,
    },
    /// Memory is exported to this file, which comes along: to be kept for the next worker.
    Exported {
        /// Its number.
        number: u64,
    },
    /// It isn't any more.
    TakenBack {
        /// Its number.
        number: u64,
    },
}

/// What is asked over the control socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Question {
    /// How things stand.
    Status,
    /// Change the quota of the GPU with that UUID.
    Limit {
        /// `GPU-` and a UUID.
        uuid: String,
        /// The quota in bytes.
        limit_bytes: u64,
    },
    /// Another monitor wonders at memory that the driver shows under the number of a process of its
    /// container: whether a process of yours had the number, who is dead, and left it to others.
    Left {
        /// `GPU-` and a UUID.
        uuid: String,
        /// The number, as the host has it.
        number: u32,
        /// How much it wonders at, in bytes.
        bytes: u64,
    },
}

/// What is answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// How things stand.
    Status(Status),
    /// It was done.
    Done,
    /// So much of it was left there.
    Left {
        /// In bytes.
        bytes: u64,
    },
    /// It was not, for this reason.
    Refused {
        /// A sentence.
        reason: String,
    },
}

/// How things stand with a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The version of the program that serves.
    pub version: String,
    /// The worker's pid.
    pub worker_pid: u32,
    /// Its GPUs, in its order.
    pub gpus: Vec<GpuStatus>,
    /// Calls received, by what became of them.
    pub calls: Calls,
    /// Processes that hold a client of the driver, those with most memory first: at most
    /// [`MOST_PROCESSES_TOLD`].
    #[serde(default)]
    pub processes: Vec<ProcessStatus>,
    /// How many processes hold a client of the driver.
    #[serde(default)]
    pub process_count: usize,
}

/// The most processes that a [`Status`] tells of.
pub const MOST_PROCESSES_TOLD: usize = 256;

/// What a process of a container has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessStatus {
    /// Its number, as the host has it.
    pub pid: i32,
    /// Memory of its clients, in bytes: one figure for each GPU, in the container's order. What the
    /// driver takes by itself for a context is in none.
    pub used_bytes: Vec<u64>,
}

/// How things stand with a GPU of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuStatus {
    /// The driver's index.
    pub index: u32,
    /// `GPU-` and a UUID.
    pub uuid: String,
    /// The quota in bytes.
    pub limit_bytes: u64,
    /// What counts against it, in bytes.
    pub used_bytes: u64,
}

/// Calls since the monitor began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calls {
    /// Let continue.
    pub continued: u64,
    /// Executed by the monitor.
    pub executed: u64,
    /// Refused for the quota.
    pub over_quota: u64,
    /// Refused for any other reason.
    pub refused: u64,
    /// Processes killed, for what they had taken past the monitor.
    pub killed: u64,
}
