//! Files of UVM's that are initialized, and end with who did that.
//!
//! Managed memory ends with the memory that it's mapped in, and that lives as long as a file that
//! `UVM_MM_INITIALIZE` made, which may have been given to others. Then no process shows what is mapped
//! there. So a file is ended with its maker, whoever has it open.

use std::sync::Arc;

use nix::errno::Errno;

use crate::ledger::Process;
use crate::monitor::journal::layout::{Maker, Record};
use crate::monitor::journal::process_number::process_id;
use crate::monitor::node::device::Device;
use crate::monitor::state::makers::Initialization;
use crate::monitor::uvm::address_spaces::image;
use crate::monitor::uvm::files::UvmFile;
use crate::monitor::uvm::kept_files::Uvm;
use crate::monitor::uvm::ranges::uvm_status;
use crate::rm::number::{NV_ERR_ILLEGAL_ACTION, NV_OK, UVM_INITIALIZE};
use crate::rm::{Layout, Meaning, uvm};

impl Uvm {
    pub(crate) fn begin_initialization(&self, underway: Initialization) {
        let mut books = self.state.books();
        let Initialization { file, tid, maker, id } = underway;
        books.write(Record::Initialize { file, tid, maker });
        books.makers.set_notification(id);
    }

    /// Enters who made a file, where what is underway did; it's known to be over, or that is looked
    /// for. Whether it isn't underway any more.
    pub(crate) fn settle_initialization(&self, underway: Initialization, is_over: bool) -> bool {
        // First: what is over then has been done, or never will be.
        let is_over = is_over || self::is_over(&underway);
        let files = self.files.all();
        let file = files.iter().find(|file| file.number == underway.file);
        let is_done = match file.map(|file| self.is_initialized(&file.device)) {
            Some(Some(done)) => done,
            // A file that nobody has open gets no GPU.
            None => false,
            Some(None) => return false,
        };
        if is_done || is_over {
            self.enter_settled(underway, is_done);
        }
        is_done || is_over
    }

    /// Enters that what is underway is over, and whether it made the file.
    pub(crate) fn enter_settled(&self, underway: Initialization, done: bool) {
        let mut books = self.state.books();
        // Another thread may have seen it, too.
        if books.makers.underway() == Some(underway) {
            books.write(Record::Initialized { done });
        }
    }

    /// A file is about to have a GPU: binds it to its maker, with whom it ends. Whether it may have one.
    pub(crate) fn bind_to_maker(&self, file: &UvmFile) -> bool {
        let underway = self.state.books().makers.underway();
        if let Some(underway) = underway.filter(|underway| underway.file == file.number) {
            self.settle_initialization(underway, false);
        }
        let is_bound = self.state.books().makers.is_bound(file.number);
        if !is_bound {
            self.state.books().write(Record::Bound { file: file.number });
        }
        !self.is_orphaned(file)
    }

    /// Whether nobody is known to have made it, or who did is over, or has executed another program.
    pub(crate) fn is_orphaned(&self, file: &UvmFile) -> bool {
        let maker = self.state.books().makers.of(file.number);
        maker.is_none_or(|Maker { process, image: then }| {
            let has_executed = || image(process).is_some_and(|now| now != then);
            !process_id(process).alive() || has_executed()
        })
    }

    /// Ends files of processes that are over, whoever has them open.
    ///
    /// Who has the file itself can bring managed memory to a GPU still, and has no use for it otherwise:
    /// it's bound to one memory. Files that processes share are bound to none, and keep none.
    pub(crate) fn end_orphaned_files(&self) {
        for file in self.files.all() {
            let is_bound = self.state.books().makers.is_bound(file.number);
            if is_bound && self.is_orphaned(&file) {
                // It stays so, and gets no GPU any more.
                file.condemn();
                let _ = self.unregister_all(&file);
            }
        }
    }

    /// Whether a process that was the maker of files is over, or another program, and they aren't ended.
    pub(crate) fn has_orphans(&self, process: Process) -> bool {
        let files = self.files.all();
        let is_theirs = |file: &&Arc<UvmFile>| {
            let bound =
                self.state.books().makers.bound_to(process).any(|number| number == file.number);
            bound && !file.is_ended()
        };
        files.iter().filter(is_theirs).any(|file| self.is_orphaned(file))
    }

    /// Whether a file was initialized, as far as it can be told. That must not be asked by initializing
    /// it: it would be bound to our memory.
    pub(crate) fn is_initialized(&self, device: &Device) -> Option<bool> {
        self.unregister(device, &[0; 16]).map(|status| status != NV_ERR_ILLEGAL_ACTION)
    }

    /// Whether an initialized file has these flags.
    pub(crate) fn has_flags(&self, device: &Device, flags: u64) -> bool {
        let fill = |layout: &Layout, bytes: &mut [u8]| {
            layout.patch(Meaning::Flags, flags).is_some_and(|patch| patch.apply(bytes))
        };
        uvm_status(&self.state.release, device, UVM_INITIALIZE, fill) == Some(NV_OK)
    }
}

/// Whether a call isn't in the driver any more, nor on its way there.
///
/// A thread that waits in a system call shows it, with its arguments (`fs/proc/base.c`,
/// `proc_pid_syscall`); one that runs may be anywhere.
fn is_over(underway: &Initialization) -> bool {
    let Initialization { tid, maker: Maker { process, .. }, .. } = underway;
    let process = process_id(*process);
    let path = format!("/proc/{}/task/{tid}/syscall", process.pid);
    match std::fs::read_to_string(path) {
        Ok(text) => text != "running\n" && !is_initialize(&text),
        Err(error) => {
            let is_gone = matches!(
                error.raw_os_error().map(Errno::from_raw),
                Some(Errno::ENOENT | Errno::ESRCH)
            );
            is_gone || !process.alive()
        }
    }
}

/// Whether a thread waits in a call that may initialize a file, by what `/proc` shows of it: the number
/// and the arguments, of which the second is the request.
fn is_initialize(text: &str) -> bool {
    let request = text.split(' ').nth(2).and_then(|word| word.strip_prefix("0x"));
    let request = request.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    let is_call = !text.starts_with("-1 ");
    is_call && request.is_none_or(|request| uvm::number(request) == UVM_INITIALIZE)
}
