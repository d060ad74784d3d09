//! What keeper and worker say to each other, and what others ask a monitor.
//!
//! Keeper and worker: one JSON text a packet over a pair of `SOCK_SEQPACKET` sockets, with
//! at most one descriptor beside it. Others (`cgpu ps`, `cgpu set`): one JSON text and a
//! newline each way over the control socket, a stream. Pure: the words alone.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::calls::{Calls, Durations};
use crate::rm::usage::ALL_OF_IT;
use crate::sched::Round;

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
    /// A file that a worker before gave to be kept ([`Notice::Keep`]), which comes along; before all else, as
    /// listeners.
    Kept {
        /// Its number.
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
    /// The container has called the driver.
    Called,
    /// Nobody is left behind that listener.
    Gone {
        /// Its number.
        number: u64,
    },
    /// This file comes along, to be kept for the next worker: memory was exported to it, or it is one of UVM's, or of
    /// the monitor's own client.
    Keep {
        /// Its number.
        number: u64,
    },
    /// It needn't be kept any more.
    LetGo {
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
    /// Who had the GPU with that UUID lately, of whichever container.
    LastSeen {
        /// `GPU-` and a UUID.
        uuid: String,
    },
    /// Change the quota of the GPU with that UUID.
    Limit {
        /// `GPU-` and a UUID.
        uuid: String,
        /// The quota in bytes.
        limit_bytes: u64,
    },
}

/// What is answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// How things stand.
    Status(Box<Status>),
    /// Who had the GPU lately.
    LastSeen(LastSeen),
    /// It was done.
    Done,
    /// It was not: more is in use than the quota would be.
    InUse {
        /// A sentence.
        reason: String,
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
    /// How long these took.
    #[serde(default)]
    pub durations: Durations,
    /// Workers that have begun: one, and one more for each that was replaced.
    #[serde(default)]
    pub workers: u64,
    /// Processes that hold a client of the driver, those with most memory first: at most
    /// [`MOST_PROCESSES_TOLD`].
    #[serde(default)]
    pub processes: Vec<ProcessStatus>,
    /// How many processes hold a client of the driver.
    #[serde(default)]
    pub process_count: usize,
}

/// Who had a GPU lately, by the driver's samples, as far back as these go (14 seconds on an H100).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastSeen {
    /// For how many ten-thousandths of that time a process was at work, by its number, as the host has it.
    pub of_processes: BTreeMap<u32, u32>,
}

impl LastSeen {
    /// The part of that time in which one of these processes was at work, from 0 to 1.
    #[must_use]
    pub fn part_of(&self, pids: impl Iterator<Item = u32>) -> f64 {
        let theirs = pids
            .filter_map(|pid| self.of_processes.get(&pid))
            .fold(0, |sum: u32, part| sum.saturating_add(*part));
        f64::from(theirs.min(ALL_OF_IT)) / f64::from(ALL_OF_IT)
    }
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
    /// What it has of the GPU in one turn of all; `None` where nobody sets slices. Of a container that has
    /// called nothing, as it was when somebody asked.
    #[serde(default)]
    pub round: Option<Round>,
    /// Why the last slice could not be set, where that is so.
    #[serde(default)]
    pub share_refused: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_seen_last_tells_the_part_that_processes_had() {
        let last_seen = LastSeen { of_processes: [(10, 2500), (11, 1250), (99, 9000)].into() };
        assert!((last_seen.part_of([10, 11].into_iter()) - 0.375).abs() < 1e-9);
        assert!(last_seen.part_of([12].into_iter()).abs() < 1e-9);
        assert!((last_seen.part_of([10, 99].into_iter()) - 1.0).abs() < 1e-9, "not more than all");
    }

    #[test]
    fn a_status_of_a_version_before_tells_no_durations() {
        let text = r#"{"version":"0","worker_pid":1,"gpus":[],"calls":{"continued":1,"executed":0,
            "over_quota":0,"refused":0,"killed":0}}"#;
        let status: Status = serde_json::from_str(text).unwrap();
        assert_eq!((status.durations, status.workers), (Durations::default(), 0));
    }
}
