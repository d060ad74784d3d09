//! The files that memory was exported to, each kept open by the monitor. [`retained_exports`](crate::audit) says how
//! their memory is freed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use crate::caller::has_file;
use crate::node::Device;
use crate::sync::Lock;

/// The most files that are retained. Each takes a descriptor.
const MOST_EXPORTS: usize = 4096;

/// The retained files, by number, and when they were last scanned for.
#[derive(Debug, Default)]
pub(crate) struct Exports {
    pub(crate) files: Lock<BTreeMap<u64, Export>>,
    pub(crate) scanned: Lock<Option<Instant>>,
}

#[derive(Debug)]
pub(crate) struct Export {
    pub(crate) file: Arc<Device>,
    /// How many scans in a row found no process of the container with the file.
    pub(crate) misses: u32,
}

/// A retained file, and its number.
#[derive(Debug)]
pub(crate) struct Exported {
    pub(crate) number: u64,
    pub(crate) file: Arc<Device>,
}

/// Why [`Exports::find_or_keep`] returns no file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Denied {
    /// The file is not retained: nothing was exported to it.
    Unknown,
    /// [`MOST_EXPORTS`] files are retained already.
    Full,
}

impl Exports {
    pub(crate) fn has_any(&self) -> bool {
        !self.files.lock().is_empty()
    }

    pub(crate) fn keep(&self, number: u64, file: Arc<Device>) {
        self.files.lock().insert(number, Export { file, misses: 0 });
    }

    /// The retained file that `file` is, and whether it is retained only from now on. A file that is not retained yet
    /// is retained under `number`, if a number is given.
    pub(crate) fn find_or_keep(
        &self,
        file: &Arc<Device>,
        number: Option<u64>,
    ) -> Result<(Exported, bool), Denied> {
        let own = std::process::id();
        let mut files = self.files.lock();
        let same = |export: &Export| has_file((own, file.descriptor()), &export.file) == Some(true);
        if let Some((number, export)) = files.iter().find(|(_, export)| same(export)) {
            return Ok((Exported { number: *number, file: Arc::clone(&export.file) }, false));
        }
        let number = number.ok_or(Denied::Unknown)?;
        if files.len() >= MOST_EXPORTS {
            return Err(Denied::Full);
        }
        files.insert(number, Export { file: Arc::clone(file), misses: 0 });
        Ok((Exported { number, file: Arc::clone(file) }, true))
    }
}
