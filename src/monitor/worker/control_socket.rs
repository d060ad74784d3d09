//! Answers questions about the container's state, and changes quotas: one line each way.

use std::cmp::Reverse;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::events::{Event, Kind};
use crate::gate::wire::{
    Answer, GpuStatus, LastSeen, MOST_PROCESSES_TOLD, ProcessStatus, Question, Status,
};
use crate::ledger::{Entry, Ledger, LedgerError, Process};
use crate::monitor::calls::{CallService, Parts};
use crate::monitor::log::described;
use crate::monitor::peer;
use crate::rm::usage;

/// The longest question, in bytes.
const MOST_BYTES: u64 = 4096;

/// How long a connection may be silent before it is closed.
const PATIENCE: Duration = Duration::from_secs(2);

/// Answers the questions of a connection until it ends.
pub(crate) fn answer_questions(parts: &Parts, calls: &CallService, connection: OwnedFd) {
    let mut stream = UnixStream::from(connection);
    if !peer::may_ask(&stream) {
        return;
    }
    let timeouts = stream.set_read_timeout(Some(PATIENCE));
    if timeouts.and(stream.set_write_timeout(Some(PATIENCE))).is_err() {
        return;
    }
    let Ok(reader) = stream.try_clone() else { return };
    let mut reader = BufReader::with_capacity(512, reader);
    let mut line = Vec::new();
    loop {
        line.clear();
        match reader.by_ref().take(MOST_BYTES).read_until(b'\n', &mut line) {
            Ok(read) if read > 0 => {}
            Ok(_) | Err(_) => return,
        }
        let text = match serde_json::from_slice(&line) {
            Ok(Question::Status) => note_status(parts, calls),
            Ok(Question::LastSeen { uuid }) => serde_json::to_vec(&last_seen(parts, &uuid)).ok(),
            Ok(Question::Limit { uuid, limit_bytes }) => {
                let answer = match peer::may_change(&stream, &parts.state.settings.state_dir) {
                    Ok(pid) => change_limit(parts, &uuid, limit_bytes, pid),
                    Err(reason) => Answer::Refused { reason },
                };
                serde_json::to_vec(&answer).ok()
            }
            Err(error) => {
                let reason = format!("not a question: {error}");
                serde_json::to_vec(&Answer::Refused { reason }).ok()
            }
        };
        let Some(mut text) = text else { return };
        text.push(b'\n');
        if stream.write_all(&text).is_err() {
            return;
        }
    }
}

/// The container's state as an answer. The answer is also kept in the figures, for whoever looks next.
pub(crate) fn note_status(parts: &Parts, calls: &CallService) -> Option<Vec<u8>> {
    if !calls.has_threads() {
        // No thread follows the shares before the first call.
        parts.slices.read_shares();
    }
    let changes = parts.state.figures.changes();
    let text = serde_json::to_vec(&Answer::Status(Box::new(status(parts)))).ok()?;
    parts.state.figures.note(changes, &text);
    Some(text)
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

/// The processes that used a GPU lately, where the monitor's client of the driver is open: a question opens none.
fn last_seen(parts: &Parts, uuid: &str) -> Answer {
    let gpu = parts.state.settings.gpus.iter().position(|gpu| gpu.uuid == uuid);
    let samples = gpu.zip(parts.driver.client_if_open());
    let samples = samples.map(|(gpu, own)| own.samples(gpu));
    match samples.filter(|samples| !samples.is_empty()) {
        Some(samples) => Answer::LastSeen(LastSeen { of_processes: usage::parts(&samples) }),
        None => Answer::Refused { reason: format!("who uses the GPU {uuid} is not known here") },
    }
}

fn status(parts: &Parts) -> Status {
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
        worker_pid: std::process::id(),
        gpus,
        calls: parts.state.journal.calls(),
        durations: parts.state.journal.durations(),
        workers: parts.state.journal.workers(),
        processes,
        process_count,
        end: Some(parts.state.end()),
    }
}

/// Changes a quota for the process `pid`, but never to less than what is in use, and tells of it.
fn change_limit(parts: &Parts, uuid: &str, limit_bytes: u64, pid: i32) -> Answer {
    let gpu = parts.state.settings.gpus.iter().position(|gpu| gpu.uuid == uuid);
    let Some(gpu) = gpu else {
        return Answer::Refused { reason: format!("the container has no GPU {uuid}") };
    };
    let mut books = parts.state.books();
    let Some(usage) = books.ledger.usage(gpu) else {
        return Answer::Refused { reason: LedgerError::NoSuchGpu { gpu }.to_string() };
    };
    if limit_bytes < usage.used_bytes {
        let reason = LedgerError::InUse { limit_bytes, usage }.to_string();
        return Answer::InUse { reason };
    }
    books.enter(Entry::Limit { gpu, limit_bytes });
    drop(books);
    let event = Event {
        gpu: parts.state.settings.gpus.get(gpu).map(|gpu| gpu.index),
        gpu_uuid: Some(uuid.to_owned()),
        former_quota_bytes: Some(usage.limit_bytes),
        quota_bytes: Some(limit_bytes),
        ..Event::new(Kind::Resized)
    };
    parts.state.log.tell_changed(described(event, pid));
    Answer::Done
}
