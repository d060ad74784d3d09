//! The world as it is: the [`Facts`] of this host.

use std::path::Path;

use super::lifecycle::{Facts, First};
use crate::failpoint::failpoint;
use crate::process::{self, ProcessId, boot_time_s};

/// This host.
pub(super) struct World;

/// This host, but for one process that is taken for gone: it has the record's last word.
pub(super) struct Without(pub(super) i32);

impl Facts for World {
    fn is_alive(&mut self, process: ProcessId) -> bool {
        let alive = process.alive();
        failpoint("holder-asked");
        alive
    }

    fn first(&mut self, state_file: &Path) -> First {
        let first = match process::first_of(state_file) {
            Ok(Some(init)) => First::Alive(init),
            Ok(None) => First::NoProcess,
            Err(_) => First::Unknown,
        };
        failpoint("state-read");
        first
    }

    fn is_past(&mut self, boot_s: u64) -> bool {
        boot_time_s() > boot_s
    }

    fn has_bundle(&mut self, bundle: &Path) -> bool {
        bundle.try_exists().unwrap_or(true)
    }
}

impl Facts for Without {
    fn is_alive(&mut self, process: ProcessId) -> bool {
        process.pid != self.0 && World.is_alive(process)
    }

    fn first(&mut self, state_file: &Path) -> First {
        World.first(state_file)
    }

    fn is_past(&mut self, boot_s: u64) -> bool {
        World.is_past(boot_s)
    }

    fn has_bundle(&mut self, bundle: &Path) -> bool {
        World.has_bundle(bundle)
    }
}
