//! Memory in files: what a program exports to a descriptor, for another to import.
//!
//! The driver keeps the memory while the file is open, wherever its descriptor went, and
//! nothing tells when it's closed. So we keep it open, too: by that an import is known for
//! what it is. When no object names the memory any more, and nobody of the container is
//! found with the file, it is taken back: the driver frees what the file has, also where a
//! descriptor of it is hidden. So it is when the container is gone.
//!
//! What each place of a file keeps is entered before the driver puts it there, and taken out
//! after it was cleared: a worker that is killed in between leaves the next one too much in
//! the books, never too little. So what an export is to replace is cleared first; should the
//! driver then refuse the new, the place stays empty, where the driver alone would leave what
//! was there.
//!
//! A handle must name the same in the driver as in the books, or small memory would be
//! entered and large exported. So frees wait for exports, and these for frees; where a free
//! waited too long, for an export that hangs, what was exported is taken out again.
//!
//! Memory of the host is entered when it's exported, as memory of 0 bytes: nothing else tells
//! who names it. That it's the host's, the driver is asked each time.
#![allow(unsafe_code, reason = "kcmp has no safe interface in our crates")]

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::libc;

use super::Shared;
use super::books::{BOUNDS, Books};
use super::device::{self, Device, Failure, Rm};
use super::execute::nth_handle;
use super::listener::Reply;
use super::serve::{Case, Made, Over};
use crate::gate::settings::NodeKind;
use crate::gate::wire::Notice;
use crate::ledger::{Client, Entry, Handle, Hold, LedgerError};
use crate::rm::export::{self, Does, Places};
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use crate::rm::number::*;
use crate::rm::{Answer, Command, Layout, Meaning};

/// Files at most: each is a descriptor of ours and one of the keeper's.
const MOST: usize = 4096;

/// How often files are looked for that nobody has any more, and how often one must not have
/// been found: a descriptor may be on its way from one process to another.
const SWEEP: Duration = Duration::from_secs(1);
const MISSES: u32 = 3;

/// How long a call waits for others to be done with its file, or with what they free, and how
/// often it looks.
const PATIENCE: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_micros(50);

/// How long a free waits for exports. One that hangs holds up no more than that.
const FREE_PATIENCE: Duration = Duration::from_millis(100);

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
    /// Calls that import from it now.
    imports: u32,
    /// Whether a call changes now what is in it.
    changes: bool,
}

/// A file that a call is at work on; others wait for its end.
#[derive(Debug)]
struct Claim<'a> {
    exports: &'a Exports,
    number: u64,
    file: Arc<Device>,
    changes: bool,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        if let Some(export) = self.exports.files().get_mut(&self.number) {
            match self.changes {
                true => export.changes = false,
                false => export.imports = export.imports.saturating_sub(1),
            }
        }
    }
}

/// Why a file is not to be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Denied {
    /// Nothing was exported to it.
    Unknown,
    /// There are as many as can be kept.
    Full,
    /// Another call doesn't end.
    Busy,
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
        let export = Export { file, misses: 0, imports: 0, changes: false };
        self.files().insert(number, export);
    }

    /// Waits for its turn with an open file, to change what is in it or to import from it.
    /// One that isn't known becomes so, where a number for it is given.
    fn claim(
        &self,
        file: &Arc<Device>,
        changes: bool,
        number: impl Fn() -> Option<u64>,
    ) -> Result<(Claim<'_>, bool), Denied> {
        let own = std::process::id();
        let since = Instant::now();
        loop {
            let mut files = self.files();
            let same =
                |export: &Export| is_same((own, file.descriptor()), &export.file) == Some(true);
            let known = files.iter().find(|(_, export)| same(export)).map(|(number, _)| *number);
            let is_new = known.is_none();
            let number = match known {
                Some(number) => number,
                None if files.len() >= MOST => return Err(Denied::Full),
                None => number().ok_or(Denied::Unknown)?,
            };
            let export = files.entry(number).or_insert_with(|| Export {
                file: Arc::clone(file),
                misses: 0,
                imports: 0,
                changes: false,
            });
            if !export.changes && (!changes || export.imports == 0) {
                match changes {
                    true => export.changes = true,
                    false => export.imports += 1,
                }
                let file = Arc::clone(&export.file);
                return Ok((Claim { exports: self, number, file, changes }, is_new));
            }
            drop(files);
            if since.elapsed() > PATIENCE {
                return Err(Denied::Busy);
            }
            std::thread::sleep(LOOK);
        }
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

/// An export or an import that is to be made.
#[derive(Debug, Clone, Copy)]
struct Control<'a> {
    command: &'a Command,
    head: &'static Layout,
    /// Of its parameters.
    layout: &'static Layout,
    does: Does,
    client: u32,
    /// Where the caller has the parameters.
    params: u64,
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
        let Some(layout) = export::layout(&self.shared.release, does, self.desk.params.len())
        else {
            return Err(self.status_over(head, NV_ERR_INVALID_PARAM_STRUCT));
        };
        let descriptor = export::descriptor(layout, &self.desk.params);
        let file = descriptor.and_then(|descriptor| {
            let file = self.target.as_ref()?.duplicate(descriptor).ok()?;
            let file = Device::of(&self.shared.settings.nodes, file).ok()?;
            (file.kind == NodeKind::Control).then_some(file)
        });
        let (Some(descriptor), Some(file)) = (descriptor, file) else {
            return Err(self.status_over(head, NV_ERR_INVALID_PARAMETER));
        };
        self.settle()?;
        export::set_descriptor(layout, &mut self.desk.params, file.descriptor());
        let control = Control { command, head, layout, does, client, params };
        let done = match (does, export::places(layout, &self.desk.params)) {
            (Does::Tell, _) => self.make_control(command, head, params).map(|done| (done, vec![])),
            (_, None) => Err(self.status_over(head, NV_ERR_INVALID_PARAMETER)),
            (Does::Export | Does::ExportList, Some(places)) => {
                self.export(control, &places, &Arc::new(file)).map(|done| (done, vec![]))
            }
            (_, Some(places)) => self.import(control, &places, &Arc::new(file)),
        };
        export::set_descriptor(layout, &mut self.desk.params, descriptor);
        let (done, made) = done?;
        self.give_back(params, done);
        Ok(self.executed(made))
    }

    fn status_over(&mut self, head: &'static Layout, status: u32) -> Over {
        self.answer(Answer::Status(status), Some(head))
    }

    fn denied(&mut self, head: &'static Layout, denied: Denied) -> Over {
        let (what, status) = match denied {
            Denied::Unknown => {
                ("an import of what this container didn't export", NV_ERR_INVALID_PARAMETER)
            }
            Denied::Full => {
                ("more exports than can be kept account of", NV_ERR_INSUFFICIENT_RESOURCES)
            }
            Denied::Busy => {
                ("an export or import that would wait for others too long", NV_ERR_BUSY_RETRY)
            }
        };
        self.log(what);
        self.status_over(head, status)
    }

    fn export(
        &mut self,
        control: Control<'_>,
        places: &Places,
        file: &Arc<Device>,
    ) -> Result<bool, Over> {
        let (shared, head) = (self.shared, control.head);
        let number = || Some(shared.memory.next_hold());
        let claimed = shared.exports.claim(file, true, number);
        let (claim, is_new) = claimed.map_err(|denied| self.denied(head, denied))?;
        let (_, was_known) = self.slot.executed();
        // The worker before had come to tell of it.
        let mine = self.again && !was_known;
        // One object is put into a file once; a list goes into what others of ours began.
        let begun = match control.does {
            Does::Export => !is_new && !mine,
            _ => is_new && self.is_in_use(control.client, file),
        };
        let done = match begun {
            true => Err(self.status_over(head, NV_ERR_STATE_IN_USE)),
            false => {
                if !self.again {
                    self.slot.executing(0, !is_new);
                }
                self.export_to(control, places, &claim, is_new)
            }
        };
        if is_new && !matches!(done, Ok(true)) {
            shared.forget_export(claim.number);
        }
        done
    }

    /// Whether anybody has exported to that file.
    fn is_in_use(&self, client: u32, file: &Device) -> bool {
        let params = export::ask(&self.shared.release, file.descriptor());
        let Some(mut params) = params else { return false };
        let command = NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO;
        self.rm().is_ok_and(|rm| rm.control(client, client, command, &mut params).is_ok())
    }

    fn export_to(
        &mut self,
        control: Control<'_>,
        places: &Places,
        claim: &Claim<'_>,
        is_new: bool,
    ) -> Result<bool, Over> {
        let head = control.head;
        let process = self.target()?.process;
        self.books().shares(control.client, process);
        if is_new {
            // Before there is anything in it, so that no worker to come misses one.
            let notice = Notice::Exported { number: claim.number };
            if self.shared.keeper.tell_with(notice, Some(claim.file.as_fd())).is_err() {
                return Err(self.status_over(head, NV_ERR_INSUFFICIENT_RESOURCES));
            }
        }
        self.books().begin_export();
        let done = self.export_in_turn(control, places, claim);
        self.books().end_export();
        done
    }

    /// Exports while nothing is freed.
    fn export_in_turn(
        &mut self,
        control: Control<'_>,
        places: &Places,
        claim: &Claim<'_>,
    ) -> Result<bool, Over> {
        let (head, of) = (control.head, Client(control.client));
        let since = Instant::now();
        while since.elapsed() <= PATIENCE {
            let Some(still) = self.books().still() else {
                std::thread::sleep(LOOK);
                continue;
            };
            let of_the_host = self.of_the_host(control, places)?;
            if !self.shared.clear(claim, |place| places.has(place)) {
                return Err(self.status_over(head, NV_ERR_INSUFFICIENT_RESOURCES));
            }
            let mut books = self.books();
            if books.still() != Some(still) {
                continue;
            }
            let held = hold_all(&mut books, (of, places), claim.number, &of_the_host);
            drop(books);
            if let Err(error) = held {
                self.log(&format!("an export: {error}"));
                let status = match error {
                    LedgerError::Full => NV_ERR_INSUFFICIENT_RESOURCES,
                    _ => NV_ERR_NOT_SUPPORTED,
                };
                return Err(self.status_over(head, status));
            }
            let done = self.put_in(control, places, claim);
            if !matches!(done, Ok(true)) {
                self.shared.release(claim.number, |place| places.has(place));
                return done;
            }
            if self.books().still() == Some(still) {
                return done;
            }
            // What it was may be something else by now.
            if !self.shared.clear(claim, |place| places.has(place)) {
                break;
            }
        }
        Err(self.denied(head, Denied::Busy))
    }

    /// Has the driver put objects into a file.
    fn put_in(
        &mut self,
        control: Control<'_>,
        places: &Places,
        claim: &Claim<'_>,
    ) -> Result<bool, Over> {
        let Control { command, head, does, client, params, .. } = control;
        let done = self.make_control(command, head, params)?;
        let status = self.status(head);
        if does != Does::Export || status != NV_ERR_STATE_IN_USE || !self.again {
            return Ok(done);
        }
        // The worker before had it there, and we have cleared it.
        let object = places.objects.first().copied().unwrap_or_default();
        let mut list = export::one(claim.file.descriptor(), object);
        let command = NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD;
        let status = match self.rm()?.control(client, client, command, &mut list) {
            Ok(()) => NV_OK,
            Err(Failure::Status(status)) => status,
            Err(Failure::Errno(errno)) => return Err(Reply::Errno(errno as i32)),
        };
        self.patch(head, Meaning::Status, status.into());
        Ok(status == NV_OK)
    }

    /// The objects that aren't known to be memory of a GPU: all are the host's.
    ///
    /// # Errors
    ///
    /// Where one isn't, and so may be memory that nobody has counted.
    fn of_the_host(&mut self, control: Control<'_>, places: &Places) -> Result<Vec<Handle>, Over> {
        let of = Client(control.client);
        let mut unknown: Vec<Handle> = Vec::new();
        let books = self.books();
        for object in places.named().map(|(_, object)| Handle(object)) {
            if books.ledger.bytes_of(of, object).is_none_or(|bytes| bytes == 0) {
                unknown.push(object);
            }
        }
        drop(books);
        unknown.sort_unstable();
        unknown.dedup();
        let release = &self.shared.release;
        let rm = self.rm()?;
        let is_not = |object: &&Handle| {
            let Some(mut params) = export::ask_where(release, object.0) else { return true };
            let command = NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE;
            let asked = rm.control(of.0, of.0, command, &mut params);
            asked.is_err() || !export::is_of_the_host(release, &params)
        };
        let Some(stranger) = unknown.iter().find(is_not) else { return Ok(unknown) };
        self.log(&format!("an export of {:#x}, which is in no books", stranger.0));
        Err(self.status_over(control.head, NV_ERR_NOT_SUPPORTED))
    }

    fn import(
        &mut self,
        control: Control<'_>,
        places: &Places,
        file: &Arc<Device>,
    ) -> Result<(bool, Vec<Made>), Over> {
        let Control { command, head, layout, client, params, .. } = control;
        let claimed = self.shared.exports.claim(file, false, || None);
        let (claim, _) = claimed.map_err(|denied| self.denied(head, denied))?;
        let parent = places.parent;
        let hold = |place: u32| Hold::Export { file: claim.number, index: place };
        let process = self.target()?.process;
        let mut books = self.books();
        books.shares(client, process);
        let room = BOUNDS.objects.saturating_sub(books.ledger.size().objects);
        // Where nothing is, nothing is made.
        let wanted: Vec<(usize, u32)> = (places.objects.iter().copied().enumerate())
            .zip(places.first..)
            .filter(|(_, place)| books.ledger.held_by(hold(*place)).is_some())
            .map(|(wanted, _)| wanted)
            .collect();
        drop(books);
        if wanted.len() > room {
            self.log("more objects than can be kept account of");
            return Err(self.status_over(head, NV_ERR_INSUFFICIENT_RESOURCES));
        }
        let unchosen = wanted.iter().filter(|(_, object)| *object == 0).count();
        let (before, was_there) = self.slot.executed();
        let first = match self.again && before != 0 {
            true => before,
            false => self.next_handles(u32::try_from(unchosen).unwrap_or(u32::MAX)),
        };
        let mut chosen = (0..).map(|number| nth_handle(first, number));
        let mut objects = vec![0; places.objects.len()];
        for (at, object) in wanted {
            if let Some(place) = objects.get_mut(at) {
                *place = if object == 0 { chosen.next().unwrap_or_default() } else { object };
            }
        }
        let asked = objects.iter().copied().filter(|object| *object != 0);
        let known = {
            let books = self.books();
            asked.clone().any(|object| books.ledger.contains(Client(client), Handle(object)))
        };
        // The worker before may have made them, and even entered some.
        if self.again && !was_there {
            asked.for_each(|object| self.unmake(client, parent, object));
        }
        export::set_objects(layout, &mut self.desk.params, &objects);
        self.slot.executing(first, if self.again { was_there } else { known });
        self.books().begin();
        let done = self.make_control(command, head, params);
        let mut made = Vec::new();
        let mut books = self.books();
        if matches!(done, Ok(true)) {
            let after = export::places(layout, &self.desk.params);
            objects = after.map(|after| after.objects).unwrap_or_default();
            for (at, (object, place)) in objects.iter_mut().zip(places.first..).enumerate() {
                if !export::is_imported(layout, &self.desk.params, at) {
                    *object = places.objects.get(at).copied().unwrap_or_default();
                    continue;
                }
                let (client, parent) = (Client(client), Handle(parent));
                let handle = Handle(*object);
                books.enter(Entry::Adopt { hold: hold(place), client, parent, handle });
                made.push(Made { client: client.0, parent: parent.0, handle: handle.0 });
            }
        } else {
            objects.clone_from(&places.objects);
        }
        books.end();
        drop(books);
        export::set_objects(layout, &mut self.desk.params, &objects);
        done.map(|done| (done, made))
    }
}

/// Enters what is exported, and before that the memory of the host among it.
///
/// # Errors
///
/// Where that isn't there any more, or can't be remembered: then nothing is entered.
fn hold_all(
    books: &mut Books,
    (of, places): (Client, &Places),
    file: u64,
    of_the_host: &[Handle],
) -> Result<(), LedgerError> {
    let size = books.ledger.size();
    let new = |handle: &&Handle| books.ledger.bytes_of(of, **handle).is_none();
    let new: Vec<Handle> = of_the_host.iter().filter(new).copied().collect();
    let holds = places.named().count();
    if size.objects + new.len() > BOUNDS.objects || size.holds + holds > BOUNDS.holds {
        return Err(LedgerError::Full);
    }
    let parent = Handle(places.parent);
    let parent = if books.ledger.contains(of, parent) { parent } else { Handle(of.0) };
    let unknown = places.named().map(|(_, object)| Handle(object)).find(|handle| {
        books.ledger.bytes_of(of, *handle).is_none() && !of_the_host.contains(handle)
    });
    if let Some(handle) = unknown {
        return Err(LedgerError::NoSuchObject { client: of, handle });
    }
    for handle in new {
        books.enter(Entry::Commit { gpu: 0, bytes: 0, client: of, parent, handle });
    }
    for (index, object) in places.named() {
        let hold = Hold::Export { file, index };
        books.enter(Entry::Hold { hold, client: of, handle: Handle(object) });
    }
    Ok(())
}

impl Shared {
    /// A free may go into the driver, once no export is there.
    pub(super) fn begin_free(&self) {
        let since = Instant::now();
        loop {
            let mut books = self.books.lock().unwrap_or_else(PoisonError::into_inner);
            if books.exports_none() || since.elapsed() > FREE_PATIENCE {
                return books.begin_free();
            }
            drop(books);
            std::thread::sleep(LOOK);
        }
    }

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
            Entry::Held { hold: hold @ Hold::Export { file, .. }, .. } => {
                (!files.contains_key(&file)).then_some(hold)
            }
            _ => None,
        };
        let lost: Vec<Hold> = books.ledger.entries().filter_map(lost).collect();
        lost.into_iter().for_each(|hold| books.enter(Entry::Release { hold }));
    }

    /// Nothing is in those places of a file any more; they are told.
    fn release(&self, file: u64, is_one: impl Fn(u32) -> bool) {
        let mut books = self.books.lock().unwrap_or_else(PoisonError::into_inner);
        let places: Vec<u32> = books.ledger.exported(file).filter(|at| is_one(*at)).collect();
        for index in places {
            books.enter(Entry::Release { hold: Hold::Export { file, index } });
        }
    }

    /// Nothing is in that file any more.
    fn forget_export(&self, number: u64) {
        self.exports.files().remove(&number);
        self.release(number, |_| true);
        // Else it is told that the worker is gone in a moment.
        let _ = self.keeper.tell(Notice::TakenBack { number });
    }

    /// Has the driver free what is in those places of a file, whoever has it open. Whether it
    /// did; where it didn't, its memory stays charged.
    fn clear(&self, claim: &Claim<'_>, is_one: impl Fn(u32) -> bool) -> bool {
        let places: Vec<u32> = {
            let books = self.books.lock().unwrap_or_else(PoisonError::into_inner);
            books.ledger.exported(claim.number).filter(|at| is_one(*at)).collect()
        };
        if places.is_empty() {
            return true;
        }
        let Some(own) = self.auditor.own(self) else { return false };
        let rm = Rm { release: &self.release, device: &own.control };
        for (first, count) in export::clearings(&places) {
            let mut params = export::clear(claim.file.descriptor(), first, count);
            let command = NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD;
            match rm.control(own.client, own.client, command, &mut params) {
                // That is: nobody ever exported to it.
                Ok(()) | Err(Failure::Status(NV_ERR_INVALID_PARAMETER)) => {}
                Err(error) => {
                    if self.calm.allows() {
                        tracing::warn!(?error, "an export can't be taken back: it stays charged");
                    }
                    return false;
                }
            }
        }
        self.release(claim.number, |place| places.contains(&place));
        true
    }

    /// Takes all back: the container is gone.
    pub(super) fn take_all_back(&self) {
        let files: Vec<(u64, Arc<Device>)> = {
            let files = self.exports.files();
            files.iter().map(|(number, export)| (*number, Arc::clone(&export.file))).collect()
        };
        for (number, file) in files {
            // Who is still at work on it, is for nobody any more.
            let claim = Claim { exports: &self.exports, number, file, changes: true };
            if self.clear(&claim, |_| true) {
                self.forget_export(number);
            }
        }
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
            let files = self.exports.files();
            let files = files.iter().filter(|(number, _)| is_unnamed(&books, **number));
            files.map(|(number, export)| (*number, Arc::clone(&export.file))).collect()
        };
        if unnamed.is_empty() {
            return;
        }
        let open = self.open_files();
        for (number, file) in unnamed {
            let found = open.iter().any(|place| is_same(*place, &file) != Some(false));
            let mut files = self.exports.files();
            let Some(export) = files.get_mut(&number) else { continue };
            // Who calls has it open.
            let used = found || export.changes || export.imports > 0;
            export.misses = if used { 0 } else { export.misses + 1 };
            if export.misses < MISSES {
                continue;
            }
            export.changes = true;
            drop(files);
            self.take_back(&Claim { exports: &self.exports, number, file, changes: true });
        }
    }

    /// Takes what no object names out of a file, and forgets one that has nothing.
    fn take_back(&self, claim: &Claim<'_>) {
        let number = claim.number;
        let unnamed: Vec<u32> = {
            let books = self.books.lock().unwrap_or_else(PoisonError::into_inner);
            unnamed(&books, number).collect()
        };
        let done = self.clear(claim, |place| unnamed.contains(&place));
        let books = self.books.lock().unwrap_or_else(PoisonError::into_inner);
        let is_empty = books.ledger.exported(number).next().is_none();
        drop(books);
        if done && is_empty {
            self.forget_export(number);
        }
    }

    /// Descriptors of the driver's that the container's processes have.
    fn open_files(&self) -> Vec<(u32, i32)> {
        let mut open = Vec::new();
        for pid in self.inhabitants() {
            let dir = format!("/proc/{pid}/fd");
            for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
                let number = entry.file_name().to_str().and_then(|number| number.parse().ok());
                if let Some(number) = number
                    && device::kind_at(&self.settings.nodes, &entry.path())
                        == Some(NodeKind::Control)
                {
                    open.push((pid, number));
                }
            }
        }
        open
    }
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
