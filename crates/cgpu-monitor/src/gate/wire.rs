//! The messages between a monitor and the programs that ask it (`cgpu ps`, `cgpu set`): one JSON text and a newline
//! each way over the control socket, a stream. Pure: only the messages are here.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use cgpu_core::calls::{Calls, Durations};
use cgpu_core::sched::Period;
use nvrm::usage::ALL_OF_IT;

/// What a program asks over the control socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Question {
    /// The container's status.
    Status,
    /// Which processes, of any container, used the GPU with this UUID lately.
    LastSeen {
        /// `GPU-` and a UUID.
        uuid: String,
    },
    /// Change the container's quota on the GPU with this UUID.
    Limit {
        /// `GPU-` and a UUID.
        uuid: String,
        /// The quota in bytes.
        limit_bytes: u64,
    },
    /// Have another program go on in the monitor's process: see [`upgrade`](super::upgrade).
    Update,
}

/// What a command sends with the descriptor of the program that is to go on.
pub const PROGRAM_SENT: &[u8] = b"{}";

/// What the monitor answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The container's status.
    Status(Box<Status>),
    /// Which processes used the GPU lately.
    LastSeen(LastSeen),
    /// The change was made.
    Done,
    /// The monitor has stopped, and what it knows is in the file that comes with this answer. It waits for the program.
    Snapshot,
    /// The change was not made: more memory is in use than the new quota allows.
    InUse {
        /// A sentence.
        reason: String,
    },
    /// The change was not made, for this reason.
    Refused {
        /// A sentence.
        reason: String,
    },
}

/// The status of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The version of the program that serves.
    pub version: String,
    pub pid: u32,
    /// The container's GPUs, in the container's order.
    pub gpus: Vec<GpuStatus>,
    /// How many calls the monitor received, by their outcome.
    pub calls: Calls,
    /// How long the calls took.
    #[serde(default)]
    pub durations: Durations,
    /// How often the monitor's program was replaced by an update.
    #[serde(default)]
    pub updates: u64,
    /// Processes that hold a client of the driver, those with most memory first: at most [`MOST_PROCESSES_REPORTED`].
    #[serde(default)]
    pub processes: Vec<ProcessStatus>,
    /// How many processes hold a client of the driver.
    #[serde(default)]
    pub process_count: usize,
    /// How far the container's end has come; `None` where a monitor of an earlier version doesn't tell.
    #[serde(default)]
    pub end: Option<End>,
}

/// How far a container's end has come.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// Processes of the container live.
    #[default]
    NotYet,
    /// They have ended, and the monitor searches for programs outside that have the container's descriptors.
    Searching,
    /// It has searched, and found these programs of the host, which it doesn't kill. While there is one, the monitor
    /// stays.
    Over {
        /// The programs.
        holders: Vec<Holder>,
    },
}

/// A program of the host that has a descriptor of a container's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The pid on the host.
    pub pid: i32,
    /// The name that the kernel has for it; empty where it isn't known.
    pub program: String,
}

/// Which processes used a GPU lately, by the driver's samples, as far back as the samples go (14 seconds on an H100).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastSeen {
    /// By the process's pid on the host: the ten-thousandths of that time in which the process was at work.
    pub of_processes: BTreeMap<u32, u32>,
}

impl LastSeen {
    /// The part of that time in which one of these processes was at work, from 0 to 1.
    #[must_use]
    pub fn part_of(&self, pids: impl Iterator<Item = u32>) -> f64 {
        let busy = pids
            .filter_map(|pid| self.of_processes.get(&pid))
            .fold(0, |sum: u32, part| sum.saturating_add(*part));
        f64::from(busy.min(ALL_OF_IT)) / f64::from(ALL_OF_IT)
    }
}

/// The most processes that a [`Status`] reports.
pub const MOST_PROCESSES_REPORTED: usize = 256;

/// The GPU memory of a process of the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessStatus {
    /// The process's pid on the host.
    pub pid: i32,
    /// Memory of the process's clients in bytes, for each GPU in the container's order. Memory that the driver takes
    /// by itself for a context is not counted.
    pub used_bytes: Vec<u64>,
}

/// The status of one GPU of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuStatus {
    /// The driver's index of the GPU.
    pub index: u32,
    /// `GPU-` and a UUID.
    pub uuid: String,
    /// The quota in bytes.
    pub limit_bytes: u64,
    /// The memory that counts against the quota, in bytes.
    pub used_bytes: u64,
    /// The container's time on the GPU in one period of all containers; `None` if no slices are set. For a container
    /// that has called nothing, the period is as of the last time that a client asked.
    #[serde(default)]
    pub round: Option<Period>,
    /// Why the last slice could not be set; `None` where it was set.
    #[serde(default)]
    pub share_refused: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The usage that was seen last gives the part of the time that processes had, and never more
    /// than all of it.
    #[test]
    fn last_seen_usage_yields_the_processes_share() {
        let last_seen = LastSeen { of_processes: [(10, 2500), (11, 1250), (99, 9000)].into() };
        assert!((last_seen.part_of([10, 11].into_iter()) - 0.375).abs() < 1e-9);
        assert!(last_seen.part_of([12].into_iter()).abs() < 1e-9);
        assert!((last_seen.part_of([10, 99].into_iter()) - 1.0).abs() < 1e-9, "not more than all");
    }

    #[test]
    fn older_versions_status_has_no_durations() {
        let text = r#"{"version":"0","pid":1,"gpus":[],"calls":{"continued":1,"executed":0,
            "over_quota":0,"refused":0,"killed":0}}"#;
        let status: Status = serde_json::from_str(text).unwrap();
        assert_eq!((status.durations, status.updates), (Durations::default(), 0));
        assert_eq!(status.end, None);
    }
}
