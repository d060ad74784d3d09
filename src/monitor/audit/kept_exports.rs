//! Files that memory was exported to, kept and taken back.
//!
//! The driver keeps the memory while the file is open, wherever its descriptor went, and
//! nothing tells when it's closed. So we keep it open, too: by that an import is known for
//! what it is. When no object names the memory any more, and nobody of the container is
//! found with the file, it is taken back: the driver frees what the file has, also where a
//! descriptor of it is hidden. So it is when the container is gone. What is put into a file, and taken
//! out of it, is so on the [lane](crate::monitor::state::lane).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::gate::settings::NodeKind;
use crate::ledger::{Entry, Hold};
use crate::monitor::caller::target::has_file;
use crate::monitor::driver::access::DriverAccess;
use crate::monitor::driver::export_files::{Exported, Exports};
use crate::monitor::driver::stakes::Stakes;
use crate::monitor::journal::kept_file::KeptFile;
use crate::monitor::keeper_socket::KeeperSocket;
use crate::monitor::node::device::{Device, Failure};
use crate::monitor::processes::container_processes::Processes;
use crate::monitor::state::books::Books;
use crate::monitor::state::container_state::ContainerState;
use crate::monitor::state::lane::{Lane, OnLane};
use crate::rm::export;
use crate::rm::number::{NV_ERR_INVALID_PARAMETER, NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD};

/// How often files are looked for that nobody has any more, and how often one must not have
/// been found: a descriptor may be on its way from one process to another.
const SWEEP: Duration = Duration::from_secs(1);

const MISSES: u32 = 3;

/// How often for a call that would be refused otherwise.
const HURRY: Duration = Duration::from_millis(300);

/// Files that memory was exported to, which the worker and the keeper have open.
#[derive(Debug)]
pub(crate) struct KeptExports {
    state: Arc<ContainerState>,
    driver: Arc<DriverAccess>,
    stakes: Arc<Stakes>,
    processes: Arc<Processes>,
    lane: Arc<Lane>,
    keeper: Arc<KeeperSocket>,
    pub(crate) all: Exports,
}

impl KeptExports {
    pub(crate) fn new(
        stakes: Arc<Stakes>,
        processes: Arc<Processes>,
        lane: Arc<Lane>,
        keeper: Arc<KeeperSocket>,
    ) -> Self {
        let (state, driver) = (Arc::clone(&stakes.state), Arc::clone(&stakes.driver));
        KeptExports { state, driver, stakes, processes, lane, keeper, all: Exports::default() }
    }

    /// Has the keeper keep a file, before there is anything in it: so no worker to come misses one.
    ///
    /// # Errors
    ///
    /// Where the keeper can't be told.
    pub(crate) fn hand_to_keeper(&self, exported: &Exported) -> io::Result<()> {
        let kept = KeptFile::Export(exported.number);
        self.keeper.tell_with(kept.keep(), Some(exported.file.as_fd()))
    }

    /// A worker before had it.
    pub(crate) fn take_over_export(&self, number: u64, file: OwnedFd) {
        if let Some(file) = Device::of(&self.state.settings.nodes, file) {
            self.all.keep(number, Arc::new(file));
        }
    }

    /// Holds whose file nobody has: the worker before had not come to ask the driver.
    pub(crate) fn forget_what_was_never_exported(&self) {
        let mut books = self.state.books();
        let files = self.all.files.lock();
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
    pub(crate) fn forget_places(&self, file: u64, is_one: impl Fn(u32) -> bool) {
        let mut books = self.state.books();
        let places: Vec<u32> = books.ledger.exported(file).filter(|at| is_one(*at)).collect();
        for index in places {
            books.enter(Entry::Release { hold: Hold::Export { file, index } });
        }
    }

    /// Nothing is in that file any more.
    pub(crate) fn forget_export(&self, number: u64) {
        self.all.files.lock().remove(&number);
        self.forget_places(number, |_| true);
        // Else it is told that the worker is gone in a moment.
        let _ = self.keeper.tell(KeptFile::Export(number).let_go());
    }

    /// Has the driver free what is in those places of a file, whoever has it open. Whether it
    /// did; where it didn't, its memory stays charged.
    pub(crate) fn clear(&self, exported: &Exported, is_one: impl Fn(u32) -> bool) -> bool {
        let places: Vec<u32> = {
            let books = self.state.books();
            books.ledger.exported(exported.number).filter(|at| is_one(*at)).collect()
        };
        if places.is_empty() {
            return true;
        }
        let Some(own) = self.driver.own_client() else { return false };
        let rm = own.rm();
        for (first, count) in export::clearings(&places) {
            let mut params = export::clear(exported.file.descriptor(), first, count);
            let command = NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD;
            match rm.control(own.client, own.client, command, &mut params) {
                // That is: nobody ever exported to it.
                Ok(()) | Err(Failure::Status(NV_ERR_INVALID_PARAMETER)) => {}
                Err(error) => {
                    if self.state.log.limit.take_line() {
                        tracing::warn!(?error, "an export can't be taken back: it stays charged");
                    }
                    return false;
                }
            }
        }
        self.forget_places(exported.number, |place| places.contains(&place));
        true
    }

    /// Takes all back: the container is gone.
    pub(crate) fn take_all_back(&self) {
        let files: Vec<(u64, Arc<Device>)> = {
            let files = self.all.files.lock();
            files.iter().map(|(number, export)| (*number, Arc::clone(&export.file))).collect()
        };
        // A call that hangs on it is for nobody any more.
        let _lane = self.lane.enter_for_monitor();
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
            let books = self.state.books();
            let files = self.all.files.lock();
            let files = files.iter().filter(|(number, _)| is_unnamed(&books, **number));
            files.map(|(number, export)| (*number, Arc::clone(&export.file))).collect()
        };
        if unnamed.is_empty() {
            return false;
        }
        {
            let mut swept = self.all.swept.lock();
            if swept.is_some_and(|swept| swept.elapsed() < pause) {
                return true;
            }
            *swept = Some(Instant::now());
        }
        let Some(open) = self.processes.open_files(NodeKind::Control) else { return false };
        let mut missed = false;
        for (number, file) in unnamed {
            let found = open.iter().any(|place| has_file(*place, &file) != Some(false));
            let mut files = self.all.files.lock();
            let Some(export) = files.get_mut(&number) else { continue };
            export.misses = if found { 0 } else { export.misses + 1 };
            if export.misses < MISSES {
                missed |= !found;
                continue;
            }
            drop(files);
            let Some(lane) = self.lane.enter_for_monitor() else { break };
            self.take_back(&lane, &Exported { number, file });
        }
        missed
    }

    /// Takes what no object names out of a file, and forgets one that has nothing.
    fn take_back(&self, lane: &OnLane<'_>, exported: &Exported) {
        let number = exported.number;
        let unnamed: Vec<u32> = {
            let books = self.state.books();
            unnamed(&books, number).collect()
        };
        let done = self.clear(exported, |place| unnamed.contains(&place));
        let books = self.state.books();
        let is_empty = books.ledger.exported(number).next().is_none();
        drop(books);
        if done && is_empty {
            self.forget_export(number);
        }
        self.stakes.free_stakes(lane);
    }
}

/// The places of a file whose memory no object names any more.
fn unnamed(books: &Books, file: u64) -> impl Iterator<Item = u32> {
    let is_last = move |index: &u32| books.ledger.is_unnamed(Hold::Export { file, index: *index });
    books.ledger.exported(file).filter(is_last)
}

/// Whether a file has nothing, or something that no object names any more.
fn is_unnamed(books: &Books, file: u64) -> bool {
    books.ledger.exported(file).next().is_none() || unnamed(books, file).next().is_some()
}
