//! The container's [`Status`], from the monitor's state.

use std::cmp::Reverse;

use crate::gate::wire::{GpuStatus, MOST_PROCESSES_TOLD, ProcessStatus, Status};
use crate::ledger::{Ledger, Process};
use crate::monitor::calls::Parts;

pub(crate) fn status(parts: &Parts) -> Status {
    let books = parts.state.books();
    let gpus = parts.state.settings.gpus.iter().enumerate().map(|(gpu, settings)| {
        let usage = books.ledger.usage(gpu);
        GpuStatus {
            index: settings.index,
            uuid: settings.uuid.clone(),
            limit_bytes: usage.map_or(0, |usage| usage.limit_bytes),
            used_bytes: usage.map_or(0, |usage| usage.used_bytes),
            round: parts.slices.shares.round(gpu),
            share_refused: parts.slices.shares.failure(gpu),
        }
    });
    let gpus = gpus.collect();
    let mut processes = processes(&books.ledger);
    drop(books);
    let process_count = processes.len();
    processes.truncate(MOST_PROCESSES_TOLD);
    Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        gpus,
        calls: parts.state.counters.calls(),
        durations: parts.state.counters.durations(),
        updates: parts.state.updates,
        processes,
        process_count,
        end: Some(parts.state.end()),
    }
}

/// The processes that hold a client, those with most memory first.
fn processes(ledger: &Ledger) -> Vec<ProcessStatus> {
    let status = |(process, used_bytes): (Process, _)| {
        let pid = process.pid().cast_signed();
        ProcessStatus { pid, used_bytes }
    };
    let mut processes: Vec<ProcessStatus> =
        ledger.used_by_process().into_iter().map(status).collect();
    // The sort is stable: of processes with as much memory, the earlier one stays first.
    processes.sort_by_key(|process| Reverse(process.used_bytes.iter().sum::<u64>()));
    processes
}
