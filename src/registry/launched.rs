//! The container that a runtime has made, by the runtime's own state of it.
//!
//! A hook that says "it exists" would cost a create as much as all the rest; the file in
//! which runc (`libcontainer/container_linux.go`, `State`) and crun
//! (`src/libcrun/status.c`) keep the first process says the same, for nothing. Knows these
//! two files and nothing else of the runtimes.

use std::fs;

use serde::Deserialize;

use super::record::{Holder, Record};
use crate::process::ProcessId;

/// The first process, as both runtimes write it: runc in `state.json`, crun in `status`.
#[derive(Debug, Deserialize)]
struct State {
    #[serde(alias = "init_process_pid")]
    pid: i32,
    #[serde(rename = "process-start-time", alias = "init_process_start")]
    start_ticks: u64,
}

/// `record` with the container's process as its holder, where that is there.
pub(super) fn seen(record: Record) -> Record {
    let Holder::Launched { state_file, .. } = &record.holder else { return record };
    let state = fs::read(state_file).ok();
    let state = state.and_then(|bytes| serde_json::from_slice::<State>(&bytes).ok());
    let init = state.map(|state| ProcessId { pid: state.pid, start_ticks: state.start_ticks });
    match init.filter(|init| init.alive()) {
        Some(init) => Record { holder: Holder::Active { init: Some(init) }, ..record },
        None => record,
    }
}
