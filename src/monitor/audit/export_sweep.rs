//! Files that memory was exported to, kept and taken back.
//!
//! The driver keeps the memory while the file is open, wherever its descriptor went, and
//! nothing tells when it's closed. So we keep it open, too: by that an import is known for
//! what it is. When no object names the memory any more, and nobody of the container is
//! found with the file, it is taken back: the driver frees what the file has, also where a
//! descriptor of it is hidden. So it is when the container is gone. What is put into a file, and taken
//! out of it, is so on the [lane](crate::monitor::calls::lane).

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use nix::libc;

use crate::gate::settings::NodeKind;
use crate::gate::wire::Notice;
use crate::ledger::{Entry, Hold};
use crate::monitor::caller::target::{has_file, with_files};
use crate::monitor::calls::lane::OnLane;
use crate::monitor::driver::device::{self, Device, Failure, Rm};
use crate::monitor::state::books::Books;
use crate::monitor::state::export_files::Exported;
use crate::monitor::worker::Shared;
use crate::rm::export;
use crate::rm::number::{NV_ERR_INVALID_PARAMETER, NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD};

/// How often files are looked for that nobody has any more, and how often one must not have
/// been found: a descriptor may be on its way from one process to another.
const SWEEP: Duration = Duration::from_secs(1);

const MISSES: u32 = 3;

/// How often for a call that would be refused otherwise.
const HURRY: Duration = Duration::from_millis(300);

impl Shared {
    /// A worker before had it.
    pub(crate) fn was_exported(&self, number: u64, file: OwnedFd) {
        if let Ok(file) = Device::of(&self.settings.nodes, file) {
            self.exports.keep(number, Arc::new(file));
        }
    }

    /// Holds whose file nobody has: the worker before had not come to ask the driver.
    pub(crate) fn forget_what_was_never_exported(&self) {
        let mut books = self.books();
        let files = self.exports.files();
        let lost = |entry| match entry {
            Entry::Held { hold: hold @ Hold::Export { file, .. }, .. } => {
                (!files.contains_key(&file)).then_some(hold)
            }
            _ => None,
        };
        let lost: Vec<Hold> = books.ledger.entries().filter_map(lost).collect();
        lost.into_iter().for_each(|hold| books.enter(Entry::Release { hold }));
    }

    /// Nothing is in those places of a file any more; they are told.
    pub(crate) fn release(&self, file: u64, is_one: impl Fn(u32) -> bool) {
        let mut books = self.books();
        let places: Vec<u32> = books.ledger.exported(file).filter(|at| is_one(*at)).collect();
        for index in places {
            books.enter(Entry::Release { hold: Hold::Export { file, index } });
        }
    }

    /// Nothing is in that file any more.
    pub(crate) fn forget_export(&self, number: u64) {
        self.exports.files().remove(&number);
        self.release(number, |_| true);
        // Else it is told that the worker is gone in a moment.
        let _ = self.keeper.tell(Notice::TakenBack { number });
    }

    /// Has the driver free what is in those places of a file, whoever has it open. Whether it
    /// did; where it didn't, its memory stays charged.
    pub(crate) fn clear(&self, exported: &Exported, is_one: impl Fn(u32) -> bool) -> bool {
        let places: Vec<u32> = {
            let books = self.books();
            books.ledger.exported(exported.number).filter(|at| is_one(*at)).collect()
        };
        if places.is_empty() {
            return true;
        }
        let Some(own) = self.own_client() else { return false };
        let rm = Rm { release: &self.release, device: &own.control };
        for (first, count) in export::clearings(&places) {
            let mut params = export::clear(exported.file.descriptor(), first, count);
            let command = NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD;
            match rm.control(own.client, own.client, command, &mut params) {
                // That is: nobody ever exported to it.
                Ok(()) | Err(Failure::Status(NV_ERR_INVALID_PARAMETER)) => {}
                Err(error) => {
                    if self.log_limit.allows() {
                        tracing::warn!(?error, "an export can't be taken back: it stays charged");
                    }
                    return false;
                }
            }
        }
        self.release(exported.number, |place| places.contains(&place));
        true
    }

    /// Takes all back: the container is gone.
    pub(crate) fn take_all_back(&self) {
        let files: Vec<(u64, Arc<Device>)> = {
            let files = self.exports.files();
            files.iter().map(|(number, export)| (*number, Arc::clone(&export.file))).collect()
        };
        // A call that hangs on it is for nobody any more.
        let _lane = self.lane.enter_soon();
        for (number, file) in files {
            if self.clear(&Exported { number, file }, |_| true) {
                self.forget_export(number);
            }
        }
    }

    /// Takes back what nobody names or has open any more, if it's time to look for that.
    pub(crate) fn sweep_exports(&self) {
        self.look_for_exports(SWEEP);
    }

    /// The same sooner, for a call that would be refused: it waits, where there may be such a file.
    pub(crate) fn hurry_exports(&self) {
        for _ in 0..=MISSES {
            if !self.look_for_exports(HURRY) {
                return;
            }
            std::thread::sleep(HURRY);
        }
    }

    /// Looks who has what nobody names any more, unless somebody looked less than `pause` ago.
    /// Whether there may be something to be taken back if that is looked for again.
    fn look_for_exports(&self, pause: Duration) -> bool {
        let unnamed: Vec<(u64, Arc<Device>)> = {
            let books = self.books();
            let files = self.exports.files();
            let files = files.iter().filter(|(number, _)| is_unnamed(&books, **number));
            files.map(|(number, export)| (*number, Arc::clone(&export.file))).collect()
        };
        if unnamed.is_empty() {
            return false;
        }
        {
            let mut swept = self.exports.swept.lock().unwrap_or_else(PoisonError::into_inner);
            if swept.is_some_and(|swept| swept.elapsed() < pause) {
                return true;
            }
            *swept = Some(Instant::now());
        }
        let Some(open) = self.open_files(NodeKind::Control) else { return false };
        let mut missed = false;
        for (number, file) in unnamed {
            let found = open.iter().any(|place| has_file(*place, &file) != Some(false));
            let mut files = self.exports.files();
            let Some(export) = files.get_mut(&number) else { continue };
            export.misses = if found { 0 } else { export.misses + 1 };
            if export.misses < MISSES {
                missed |= !found;
                continue;
            }
            drop(files);
            let Some(lane) = self.lane.enter_soon() else { break };
            self.take_back(&lane, &Exported { number, file });
        }
        missed
    }

    /// Takes what no object names out of a file, and forgets one that has nothing.
    fn take_back(&self, lane: &OnLane<'_>, exported: &Exported) {
        let number = exported.number;
        let unnamed: Vec<u32> = {
            let books = self.books();
            unnamed(&books, number).collect()
        };
        let done = self.clear(exported, |place| unnamed.contains(&place));
        let books = self.books();
        let is_empty = books.ledger.exported(number).next().is_none();
        drop(books);
        if done && is_empty {
            self.forget_export(number);
        }
        self.free_stakes(lane);
    }

    /// Descriptors of that kind of node that the container's processes have, by their threads;
    /// `None` where not all could be looked at, for want of descriptors of our own, say.
    pub(crate) fn open_files(&self, kind: NodeKind) -> Option<Vec<(u32, i32)>> {
        let mut open = Vec::new();
        for pid in self.inhabitants() {
            open.extend(self.open_in(pid, kind)?);
        }
        Some(open)
    }

    /// The same of one process.
    pub(crate) fn open_in(&self, pid: u32, kind: NodeKind) -> Option<Vec<(u32, i32)>> {
        let mut open = Vec::new();
        for tid in with_files(pid) {
            let entries = match fs::read_dir(format!("/proc/{tid}/fd")) {
                Ok(entries) => entries,
                Err(error) if is_gone(&error) => continue,
                Err(_) => return None,
            };
            for entry in entries.flatten() {
                let number = entry.file_name().to_str().and_then(|number| number.parse().ok());
                if let Some(number) = number
                    && device::kind_at(&self.settings.nodes, &entry.path()) == Some(kind)
                {
                    open.push((tid, number));
                }
            }
        }
        Some(open)
    }
}

/// Whether procfs says so of a process that is no more.
fn is_gone(error: &io::Error) -> bool {
    [Some(libc::ENOENT), Some(libc::ESRCH)].contains(&error.raw_os_error())
}

/// The places of a file whose memory no object names any more.
fn unnamed(books: &Books, file: u64) -> impl Iterator<Item = u32> {
    let is_last =
        move |index: &u32| books.ledger.is_last_but_for_holds(Hold::Export { file, index: *index });
    books.ledger.exported(file).filter(is_last)
}

/// Whether a file has nothing, or something that no object names any more.
fn is_unnamed(books: &Books, file: u64) -> bool {
    books.ledger.exported(file).next().is_none() || unnamed(books, file).next().is_some()
}
