//! Memory in files: what a program exports to a descriptor, for another to import.
//!
//! The driver keeps the memory while the file is open, wherever its descriptor went, and
//! nothing tells when it's closed. So we keep it open, too: by that an import is known for
//! what it is. When no object names the memory any more, and nobody of the container is
//! found with the file, it is taken back: the driver frees what the file has, also where a
//! descriptor of it is hidden. So it is when the container is gone.
#![allow(unsafe_code, reason = "kcmp has no safe interface in our crates")]

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::libc;

use super::Shared;
use super::books::BOUNDS;
use super::device::{self, Device, Rm};
use super::listener::Reply;
use super::serve::{Case, Made, Over};
use crate::gate::settings::NodeKind;
use crate::gate::wire::Notice;
use crate::ledger::{Client, Entry, Handle, Hold, LedgerError};
use crate::rm::export::{self, Does};
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use crate::rm::number::*;
use crate::rm::{Answer, Command, Layout, Meaning};

/// Files at most: each is a descriptor of ours and one of the keeper's.
const MOST: usize = 4096;

/// How often files are looked for that nobody has any more, and how often one must not have
/// been found: a descriptor may be on its way from one process to another.
const SWEEP: Duration = Duration::from_secs(1);
const MISSES: u32 = 3;

/// Files that memory was exported to.
#[derive(Debug, Default)]
pub(super) struct Exports {
    files: Mutex<BTreeMap<u64, Export>>,
    swept: Mutex<Option<Instant>>,
}

#[derive(Debug)]
struct Export {
    file: Arc<Device>,
    /// How often it was not found in a row.
    misses: u32,
}

impl Exports {
    fn files(&self) -> MutexGuard<'_, BTreeMap<u64, Export>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is something to look for.
    pub(super) fn are_none(&self) -> bool {
        self.files().is_empty()
    }

    fn keep(&self, number: u64, file: Arc<Device>) {
        self.files().insert(number, Export { file, misses: 0 });
    }

    /// The number of an open file.
    fn number(&self, file: &Device) -> Option<u64> {
        let own = std::process::id();
        let files = self.files();
        let same = |export: &Export| is_same((own, file.descriptor()), &export.file) == Some(true);
        files.iter().find(|(_, export)| same(export)).map(|(number, _)| *number)
    }
}

/// Whether a process has the file by that descriptor; `None` where that can't be told.
fn is_same((pid, descriptor): (u32, i32), file: &Device) -> Option<bool> {
    /// `KCMP_FILE` of `linux/kcmp.h`.
    const FILE: u32 = 0;
    let own = std::process::id();
    // SAFETY: takes numbers only.
    let compared =
        unsafe { libc::syscall(libc::SYS_kcmp, own, pid, FILE, file.descriptor(), descriptor) };
    (compared >= 0).then_some(compared == 0)
}

impl Case<'_> {
    /// A control of a caller's descriptor, made on ours of the same file.
    pub(super) fn export_or_import(
        &mut self,
        (command, head): (&Command, &'static Layout),
        does: Does,
        client: u32,
        params: u64,
    ) -> Result<Reply, Over> {
        let layout = export::layout(&self.shared.release, does, self.desk.params.len());
        if layout.is_none() && does != Does::Tell {
            return Err(self.answer(Answer::Status(NV_ERR_INVALID_PARAM_STRUCT), Some(head)));
        }
        let descriptor = export::descriptor(layout, &self.desk.params);
        let file = descriptor.and_then(|descriptor| {
            let file = self.target.as_ref()?.duplicate(descriptor).ok()?;
            let file = Device::of(&self.shared.settings.nodes, file).ok()?;
            (file.kind == NodeKind::Control).then_some(file)
        });
        let (Some(descriptor), Some(file)) = (descriptor, file) else {
            return Err(self.answer(Answer::Status(NV_ERR_INVALID_PARAMETER), Some(head)));
        };
        self.settle()?;
        export::set_descriptor(layout, &mut self.desk.params, file.descriptor());
        let place = (command, head);
        let done = match (does, layout) {
            (Does::Export, Some(layout)) => {
                self.export(place, layout, client, params, Arc::new(file))
            }
            (Does::Import, Some(layout)) => self.import(place, layout, client, params, &file),
            _ => self.make_control(command, head, params).map(|done| (done, None)),
        };
        export::set_descriptor(layout, &mut self.desk.params, descriptor);
        let (done, made) = done?;
        self.give_back(params, done);
        Ok(self.executed(made))
    }

    fn param(&self, layout: &'static Layout, meaning: Meaning) -> u32 {
        let view = layout.view(&self.desk.params);
        view.and_then(|view| view.u32(meaning)).unwrap_or_default()
    }

    fn set_handle(&mut self, layout: &Layout, handle: u32) {
        if let Some(patch) = layout.patch(Meaning::Handle, handle.into()) {
            let _ = patch.apply(&mut self.desk.params);
        }
    }

    fn export(
        &mut self,
        (command, head): (&Command, &'static Layout),
        layout: &'static Layout,
        client: u32,
        params: u64,
        file: Arc<Device>,
    ) -> Result<(bool, Option<Made>), Over> {
        let (of, handle) = (Client(client), Handle(self.param(layout, Meaning::Handle)));
        if self.shared.exports.number(&file).is_some() {
            return Err(self.answer(Answer::Status(NV_ERR_STATE_IN_USE), Some(head)));
        }
        let number = self.shared.memory.next_hold();
        let hold = Hold::Export(number);
        let mut books = self.books();
        let held = match self.shared.exports.files().len() {
            MOST.. => Err(LedgerError::Full),
            _ => books.ledger.hold(hold, of, handle),
        };
        books.ledger.release(hold);
        if held.is_ok() {
            books.enter(Entry::Hold { hold, client: of, handle });
        }
        drop(books);
        if let Err(error) = held {
            // What isn't in the books may be memory all the same.
            self.log(&format!("an export of {:#x}: {error}", handle.0));
            let status = match error {
                LedgerError::Full => NV_ERR_INSUFFICIENT_RESOURCES,
                _ => NV_ERR_NOT_SUPPORTED,
            };
            return Err(self.answer(Answer::Status(status), Some(head)));
        }
        // Before there is anything in it, so that no worker to come misses one.
        self.shared.exports.keep(number, Arc::clone(&file));
        let told = self.shared.keeper.tell_with(Notice::Exported { number }, Some(file.as_fd()));
        let done = match told {
            Ok(()) => self.make_control(command, head, params),
            Err(_) => Err(self.answer(Answer::Status(NV_ERR_INSUFFICIENT_RESOURCES), Some(head))),
        };
        if !matches!(done, Ok(true)) {
            self.shared.forget_export(number);
        }
        done.map(|done| (done, None))
    }

    fn import(
        &mut self,
        (command, head): (&Command, &'static Layout),
        layout: &'static Layout,
        client: u32,
        params: u64,
        file: &Device,
    ) -> Result<(bool, Option<Made>), Over> {
        let Some(number) = self.shared.exports.number(file) else {
            self.log("an import of what this container didn't export");
            return Err(self.answer(Answer::Status(NV_ERR_INVALID_PARAMETER), Some(head)));
        };
        let hold = Hold::Export(number);
        let asked = self.param(layout, Meaning::Handle);
        let parent = self.param(layout, Meaning::Parent);
        let process = self.target()?.process;
        let mut books = self.books();
        books.shares(client, process);
        if books.ledger.size().objects >= BOUNDS.objects {
            drop(books);
            self.log("more objects than can be kept account of");
            return Err(self.answer(Answer::Status(NV_ERR_INSUFFICIENT_RESOURCES), Some(head)));
        }
        drop(books);
        let (before, was_there) = self.slot.executed();
        let handle = match (asked, self.again) {
            (0, true) if before != 0 => before,
            (0, _) => self.next_handle(),
            _ => asked,
        };
        let known = self.books().ledger.contains(Client(client), Handle(handle));
        // The worker before may have made it, and even entered it.
        if self.again && !was_there {
            self.unmake(client, parent, handle);
        }
        self.set_handle(layout, handle);
        self.slot.executing(handle, if self.again { was_there } else { known });
        let mut books = self.books();
        books.begin();
        drop(books);
        let done = self.make_control(command, head, params);
        let made = self.param(layout, Meaning::Handle);
        let mut books = self.books();
        if matches!(done, Ok(true)) {
            let (client, parent, handle) = (Client(client), Handle(parent), Handle(made));
            books.enter(Entry::Adopt { hold, client, parent, handle });
        }
        books.end();
        drop(books);
        if !matches!(done, Ok(true)) {
            self.set_handle(layout, asked);
        }
        let made = Made { client, parent, handle: made };
        done.map(|done| (done, done.then_some(made)))
    }
}

impl Shared {
    /// A worker before had it.
    pub(super) fn was_exported(&self, number: u64, file: OwnedFd) {
        if let Ok(file) = Device::of(&self.settings.nodes, file) {
            self.exports.keep(number, Arc::new(file));
        }
    }

    /// Holds whose file nobody has: the worker before had not come to ask the driver.
    pub(super) fn forget_what_was_never_exported(&self) {
        let mut books = self.books.lock().unwrap_or_else(PoisonError::into_inner);
        let files = self.exports.files();
        let lost = |entry| match entry {
            Entry::Held { hold: hold @ Hold::Export(number), .. } => {
                (!files.contains_key(&number)).then_some(hold)
            }
            _ => None,
        };
        let lost: Vec<Hold> = books.ledger.entries().filter_map(lost).collect();
        lost.into_iter().for_each(|hold| books.enter(Entry::Release { hold }));
    }

    /// Nothing is in that file any more.
    fn forget_export(&self, number: u64) {
        self.exports.files().remove(&number);
        let mut books = self.books.lock().unwrap_or_else(PoisonError::into_inner);
        books.enter(Entry::Release { hold: Hold::Export(number) });
        drop(books);
        // Else it is told that the worker is gone in a moment.
        let _ = self.keeper.tell(Notice::TakenBack { number });
    }

    /// Has the driver free what is in a file, whoever has it open.
    fn take_back(&self, number: u64, file: &Device) {
        let Some(own) = self.auditor.own(self) else { return };
        let rm = Rm { release: &self.release, device: &own.control };
        let mut params = export::clear(file.descriptor());
        let command = NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD;
        match rm.control(own.client, own.client, command, &mut params) {
            Ok(()) => self.forget_export(number),
            Err(error) if self.calm.allows() => {
                tracing::warn!(?error, "an export can't be taken back: its memory stays charged");
            }
            Err(_) => {}
        }
    }

    /// Takes all back: the container is gone.
    pub(super) fn take_all_back(&self) {
        let files: Vec<(u64, Arc<Device>)> = {
            let files = self.exports.files();
            files.iter().map(|(number, export)| (*number, Arc::clone(&export.file))).collect()
        };
        files.iter().for_each(|(number, file)| self.take_back(*number, file));
    }

    /// Takes back what nobody names or has open any more, if it's time to look for that.
    pub(super) fn sweep_exports(&self) {
        {
            let mut swept = self.exports.swept.lock().unwrap_or_else(PoisonError::into_inner);
            if swept.is_some_and(|swept| swept.elapsed() < SWEEP) || self.exports.are_none() {
                return;
            }
            *swept = Some(Instant::now());
        }
        let unnamed: Vec<(u64, Arc<Device>)> = {
            let books = self.books.lock().unwrap_or_else(PoisonError::into_inner);
            let unnamed = |number| books.ledger.is_last_but_for_holds(Hold::Export(number));
            let files = self.exports.files();
            let files = files.iter().filter(|(number, _)| unnamed(**number));
            files.map(|(number, export)| (*number, Arc::clone(&export.file))).collect()
        };
        if unnamed.is_empty() {
            return;
        }
        let open = self.open_files(NodeKind::Control);
        for (number, file) in unnamed {
            let found = open.iter().any(|place| is_same(*place, &file) != Some(false));
            let mut files = self.exports.files();
            let Some(export) = files.get_mut(&number) else { continue };
            export.misses = if found { 0 } else { export.misses + 1 };
            let over = export.misses >= MISSES;
            drop(files);
            if over {
                self.take_back(number, &file);
            }
        }
    }

    /// Descriptors of that kind of node that the container's processes have.
    pub(super) fn open_files(&self, kind: NodeKind) -> Vec<(u32, i32)> {
        let mut open = Vec::new();
        for pid in self.inhabitants() {
            let dir = format!("/proc/{pid}/fd");
            for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
                let number = entry.file_name().to_str().and_then(|number| number.parse().ok());
                if let Some(number) = number
                    && device::kind_at(&self.settings.nodes, &entry.path()) == Some(kind)
                {
                    open.push((pid, number));
                }
            }
        }
        open
    }
}
