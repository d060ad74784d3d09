//! Facts of cgpu itself: its programs, its configuration, its state.
//!
//! Owns looking at them without making or changing anything. Must not judge.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::facts::{Divisible, Observed, Own, Records, Unstarted};
use super::sentence;
use cgpu::admission::Admission;
use cgpu::admission::{Condition, UNSTARTED_S, deletion};
use cgpu::host::{Host, require_root};
use cgpu_core::gpu::Gpu;
use cgpu_core::units::bytes_to_mib;
use cgpu_host::events::{Follower, Kind, Store, plain};
use cgpu_host::inventory;
use cgpu_host::log::Sink;

/// Our programs.
const PROGRAMS: [&str; 4] = ["cgpu", "cgpu-runtime", "cgpu-hook", "cgpu-monitor"];

/// The most warnings of bundles that are shown, and the most characters of one.
const MOST_WARNINGS: usize = 3;
const MOST_WARNING: usize = 300;

/// `host`'s own matters, whose paths are as we reach them; `config` is what became of its
/// configuration, `state_dir` how the host calls that directory, `log` how we reach its log.
pub(super) fn inspect(
    host: &Host,
    config: Result<Option<PathBuf>, String>,
    state_dir: PathBuf,
    log: &Path,
) -> Own {
    let own = std::env::current_exe().unwrap_or_default();
    let directory = own.parent().map(PathBuf::from).unwrap_or_default();
    let missing = PROGRAMS.into_iter().filter(|program| !directory.join(program).is_file());
    let state = match fs::symlink_metadata(&host.config.state_dir) {
        Ok(meta) => Observed::Present(meta.permissions().mode() & 0o7777),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Observed::Absent,
        Err(error) => Observed::Unreadable(error.to_string()),
    };
    Own {
        root: require_root().is_ok(),
        missing: missing.collect(),
        directory,
        config,
        state_dir,
        state,
        log_open: log_open(&host.config.log, log),
        log: host.config.log.clone().into(),
        records: records(host),
        warned: latest_reasons(&host.config.state_dir, Kind::Warned),
        short: latest_reasons(&host.config.state_dir, Kind::AllocationRefused),
        divisible: divisible(host),
    }
}

/// What quotas share of each GPU that the cache knows.
fn divisible(host: &Host) -> Vec<Divisible> {
    let known = inventory::cached(&host.inventory_settings()).ok().flatten().unwrap_or_default();
    let of = |gpu: &Gpu| Divisible {
        index: gpu.index,
        total_mib: bytes_to_mib(gpu.memory_bytes),
        reserved_mib: bytes_to_mib(gpu.reserved_bytes),
    };
    known.gpus().iter().map(of).collect()
}

/// The latest events of that kind which have a reason, among those that are kept: `CONTAINER: REASON`.
fn latest_reasons(state_dir: &Path, kind: Kind) -> Result<Vec<String>, String> {
    let mut follower = Follower::new(Store::of(state_dir)).map_err(|error| error.to_string())?;
    let mut found: Vec<String> = Vec::new();
    for event in follower.read().map_err(|error| error.to_string())? {
        let Some(reason) = event.reason.filter(|_| event.kind == kind) else { continue };
        let name = event.name.unwrap_or(event.id);
        let warning = plain(&format!("{name}: {reason}"), MOST_WARNING);
        found.retain(|other| *other != warning);
        found.push(warning);
    }
    Ok(found.split_off(found.len().saturating_sub(MOST_WARNINGS)))
}

/// Whether lines arrive where the configuration's `log` says; `reached` is how we reach it, if it is a file.
fn log_open(log: &str, reached: &Path) -> Result<(), String> {
    match Sink::of(log) {
        Sink::None | Sink::Stderr => Ok(()),
        Sink::File(_) => cgpu_host::log::is_writable(reached),
        Sink::Journald => cgpu_host::log::reach_journald().map_err(|error| error.to_string()),
    }
}

fn records(host: &Host) -> Result<Records, String> {
    let registry = host.check_registry().map_err(|error| sentence(&error))?;
    let records = registry.records().map_err(|error| sentence(&error))?;
    let living = registry.living().map_err(|error| sentence(&error))?;
    let stale = records.len().saturating_sub(living.len());
    let mut found = Records { total: records.len(), stale, ..Records::default() };
    for record in living {
        let id = record.key.id.clone();
        match Admission::of(host).condition(&record) {
            Condition::Closed => found.closed.push(id),
            Condition::Created { age_s } if age_s >= UNSTARTED_S => {
                found.unstarted.push(Unstarted { id, age_s, deletion: deletion(&record.key) });
            }
            _ => {}
        }
    }
    for orphan in Admission::of(host).orphans().map_err(|error| sentence(&error))? {
        match orphan.monitor {
            Some(_) => found.unregistered.push(orphan.short_id),
            None => found.leftovers += 1,
        }
    }
    Ok(found)
}
