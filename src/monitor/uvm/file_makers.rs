//! Initialized files of nvidia-uvm: each ends with its maker, the process that initialized it.
//!
//! Managed memory is freed with the address space in which it is mapped. That address space lives as long as a file
//! that `UVM_MM_INITIALIZE` made, and that file may have been given to other processes. Then no process lists the
//! mappings. So a file is ended with its maker, whichever process has it open. [`Uvm`](crate::monitor::uvm::Uvm) ends
//! it.

use std::sync::Arc;

use crate::ledger::Process;
use crate::monitor::journal::{Maker, Record};
use crate::monitor::state::ContainerState;
use crate::monitor::uvm::address_spaces::image_hash;
use crate::monitor::uvm::files::{UvmFile, UvmFiles};
use crate::process::ProcessId;

/// The makers of files.
#[derive(Debug)]
pub(crate) struct FileMakers {
    state: Arc<ContainerState>,
    files: Arc<UvmFiles>,
}

impl FileMakers {
    pub(crate) fn new(state: Arc<ContainerState>, files: Arc<UvmFiles>) -> Self {
        FileMakers { state, files }
    }

    /// Binds a file to its maker, with which it ends, before the file gets a GPU. `false` where it may get none.
    pub(crate) fn bind_to_maker(&self, file: &UvmFile) -> bool {
        let is_bound = self.state.books().makers.is_bound(file.number);
        if !is_bound {
            self.state.books().write(Record::Bound { file: file.number });
        }
        !self.is_orphaned(file)
    }

    /// Whether the file's maker isn't known, is over, or has executed another program.
    pub(crate) fn is_orphaned(&self, file: &UvmFile) -> bool {
        let maker = self.state.books().makers.of(file.number);
        maker.is_none_or(|Maker { process, image: then }| {
            let has_executed = || image_hash(process).is_some_and(|now| now != then);
            !ProcessId::from(process).alive() || has_executed()
        })
    }

    /// Whether a process is the maker of files that are orphaned and not ended yet.
    pub(crate) fn has_orphaned_files(&self, process: Process) -> bool {
        let files = self.files.all();
        let is_made_by_process = |file: &&Arc<UvmFile>| {
            let bound =
                self.state.books().makers.bound_to(process).any(|number| number == file.number);
            bound && !file.is_ended()
        };
        files.iter().filter(is_made_by_process).any(|file| self.is_orphaned(file))
    }
}
