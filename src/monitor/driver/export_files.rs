//! Files that memory was exported to, as they are kept. How they are taken back says
//! [`kept_exports`](crate::monitor::audit::kept_exports).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use crate::monitor::caller::target::has_file;
use crate::monitor::lock::Lock;
use crate::monitor::node::device::Device;

/// Files at most: each is a descriptor of ours and one of the keeper's.
pub(crate) const MOST: usize = 4096;

/// Files that memory was exported to.
#[derive(Debug, Default)]
pub(crate) struct Exports {
    pub(crate) files: Lock<BTreeMap<u64, Export>>,
    pub(crate) swept: Lock<Option<Instant>>,
}

#[derive(Debug)]
pub(crate) struct Export {
    pub(crate) file: Arc<Device>,
    /// How often it was not found in a row.
    pub(crate) misses: u32,
}

/// A file that is kept.
#[derive(Debug)]
pub(crate) struct Exported {
    pub(crate) number: u64,
    pub(crate) file: Arc<Device>,
}

/// Why a file is not to be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Denied {
    /// Nothing was exported to it.
    Unknown,
    /// There are as many as can be kept.
    Full,
}

impl Exports {
    pub(crate) fn has_any(&self) -> bool {
        !self.files.lock().is_empty()
    }

    pub(crate) fn keep(&self, number: u64, file: Arc<Device>) {
        self.files.lock().insert(number, Export { file, misses: 0 });
    }

    /// The open file, as it's kept, and whether it is so from now on: one that isn't known is where there
    /// is a `number` for it.
    pub(crate) fn find(
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
        if files.len() >= MOST {
            return Err(Denied::Full);
        }
        files.insert(number, Export { file: Arc::clone(file), misses: 0 });
        Ok((Exported { number, file: Arc::clone(file) }, true))
    }
}
