//! Answers questions about the container's state, changes quotas, and takes orders to update: one line each way.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::daemon::peer;
use crate::daemon::status::StatusWriter;
use crate::daemon::update::Requests;
use crate::driver::client_if_open;
use crate::gate::settings::Settings;
use crate::gate::wire::{Answer, LastSeen, Question};
use crate::log::described;
use crate::shared::Monitor;
use cgpu_core::ledger::{Entry, LedgerError};
use cgpu_host::events::{Event, Kind};
use nvrm::usage;

/// The longest question, in bytes.
const MOST_BYTES: u64 = 4096;

/// How long a connection may be silent before it is closed.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Answers the questions of a connection until it ends. One that asks for an update is put into `updates`.
pub(crate) fn answer_questions(
    monitor: &Monitor,
    writer: &StatusWriter,
    updates: &Requests,
    connection: OwnedFd,
) {
    let mut stream = UnixStream::from(connection);
    if !peer::may_ask(&stream) {
        return;
    }
    let timeouts = stream.set_read_timeout(Some(TIMEOUT));
    if timeouts.and(stream.set_write_timeout(Some(TIMEOUT))).is_err() {
        return;
    }
    let Ok(reader) = stream.try_clone() else { return };
    let mut reader = BufReader::with_capacity(512, reader);
    let mut line = Vec::new();
    let Settings { state_dir, started_in, .. } = &*monitor.settings;
    loop {
        line.clear();
        match reader.by_ref().take(MOST_BYTES).read_until(b'\n', &mut line) {
            Ok(read) if read > 0 => {}
            Ok(_) | Err(_) => return,
        }
        let _at_work = monitor.work.begin();
        let answer = match serde_json::from_slice(&line) {
            Ok(Question::Update) => match peer::may_change(&stream, (state_dir, started_in)) {
                Ok(_) => return updates.put(stream),
                Err(reason) => Answer::Refused { reason },
            },
            Ok(Question::Status) => Answer::Status(Box::new(writer.status())),
            Ok(Question::LastSeen { uuid }) => last_seen(monitor, &uuid),
            Ok(Question::Limit { uuid, limit_bytes }) => {
                match peer::may_change(&stream, (state_dir, started_in)) {
                    Ok(pid) => {
                        let answer = change_limit(monitor, &uuid, limit_bytes, pid);
                        // The sender reads the status next.
                        writer.write_now();
                        answer
                    }
                    Err(reason) => Answer::Refused { reason },
                }
            }
            Err(error) => Answer::Refused { reason: format!("not a question: {error}") },
        };
        let Ok(mut text) = serde_json::to_vec(&answer) else { return };
        text.push(b'\n');
        if stream.write_all(&text).is_err() {
            return;
        }
    }
}

/// The processes that used a GPU lately, if the monitor's client of the driver is open: a question opens none.
fn last_seen(monitor: &Monitor, uuid: &str) -> Answer {
    let gpu = monitor.settings.gpus.iter().position(|gpu| gpu.uuid == uuid);
    let samples = gpu.zip(client_if_open(monitor));
    let samples = samples.map(|(gpu, own)| own.samples(gpu));
    match samples.filter(|samples| !samples.is_empty()) {
        Some(samples) => Answer::LastSeen(LastSeen { of_processes: usage::parts(&samples) }),
        None => Answer::Refused { reason: format!("who uses the GPU {uuid} is not known here") },
    }
}

/// Changes a quota for the process `pid`, but never to less than what is in use, and reports the change.
fn change_limit(monitor: &Monitor, uuid: &str, limit_bytes: u64, pid: i32) -> Answer {
    let gpu = monitor.settings.gpus.iter().position(|gpu| gpu.uuid == uuid);
    let Some(gpu) = gpu else {
        return Answer::Refused { reason: format!("the container has no GPU {uuid}") };
    };
    let mut state = monitor.state();
    let Some(usage) = state.ledger.usage(gpu) else {
        return Answer::Refused { reason: LedgerError::NoSuchGpu { gpu }.to_string() };
    };
    if limit_bytes < usage.used_bytes {
        let reason = LedgerError::InUse { limit_bytes, usage }.to_string();
        return Answer::InUse { reason };
    }
    state.enter(Entry::Limit { gpu, limit_bytes });
    drop(state);
    let event = Event {
        gpu: monitor.settings.gpus.get(gpu).map(|gpu| gpu.index),
        gpu_uuid: Some(uuid.to_owned()),
        former_quota_bytes: Some(usage.limit_bytes),
        quota_bytes: Some(limit_bytes),
        ..Event::new(Kind::Resized)
    };
    monitor.log.report_changed(described(event, pid));
    Answer::Done
}
