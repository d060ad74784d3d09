//! Files of UVM's that have GPUs, ranges, or memory mapped by them.
//!
//! UVM keeps what it maps until it's unmapped or its file is closed, whoever has that by then:
//! it may have been inherited, sent, or hidden in a socket's queue. Nothing tells when a file
//! is closed, and nothing but a file in hand tells it from others. So, as with exports, we keep
//! each open from its initialization on, or the first call that gives it any of these. When nobody
//! of the container is found with one, its GPUs are unregistered, which ends what it maps also where
//! a descriptor is hidden, and it is let go; so they are when its maker is over. What is mapped where is the ledger's business, and which ranges it has the
//! books'.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering as AtomicOrdering;
use std::time::{Duration, Instant};

use crate::gate::settings::NodeKind;
use crate::monitor::journal::kept_file::KeptFile;
use crate::monitor::keeper_socket::KeeperSocket;
use crate::monitor::lock::Lock;
use crate::monitor::node::device::Device;
use crate::monitor::processes::container_processes::Processes;
use crate::monitor::state::container_state::ContainerState;
use crate::monitor::state::lane::Lane;
use crate::monitor::state::makers::MOST_FILES;
use crate::monitor::state::occasion::Occasion;
use crate::monitor::uvm::files::{MOST_QUESTIONS, UvmFile, UvmFiles, place};
use crate::monitor::uvm::ranges::uvm_status;
use crate::rm::number::{NV_ERR_ILLEGAL_ACTION, NV_ERR_INVALID_DEVICE, NV_OK, UVM_UNREGISTER_GPU};
use crate::rm::uvm;

/// How often files are looked for that are no more where they were.
const SWEEP: Duration = Duration::from_secs(1);

/// What looking may cost: so many times as long as it took it isn't done again.
const REST: u32 = 4;

/// How long a call that would be refused waits for that at most.
const PATIENCE: Duration = Duration::from_millis(200);

/// How often a file must not have been found: who had it may have forked, and ended, while
/// processes were looked at.
const LOOKS: usize = 2;

/// Files of UVM's that the worker and the keeper have open, and their initialization.
#[derive(Debug)]
pub(crate) struct Uvm {
    pub(crate) state: Arc<ContainerState>,
    processes: Arc<Processes>,
    lane: Arc<Lane>,
    keeper: Arc<KeeperSocket>,
    pub(crate) files: UvmFiles,
    /// Held by the call whose turn it is to initialize a file, until that is underway.
    pub(crate) init_turn: Lock<()>,
}

impl Uvm {
    pub(crate) fn new(
        processes: Arc<Processes>,
        lane: Arc<Lane>,
        keeper: Arc<KeeperSocket>,
    ) -> Self {
        let state = Arc::clone(&processes.state);
        let (files, init_turn) = (UvmFiles::default(), Lock::default());
        Uvm { state, processes, lane, keeper, files, init_turn }
    }

    /// The file that `device` is, kept from now on; `seen` has it. `None` where there are too
    /// many, or none can be told from another.
    pub(crate) fn keep(&self, device: &Device, seen: (u32, i32)) -> Option<Arc<UvmFile>> {
        if self.files.files.lock().len() >= MOST_FILES {
            self.sweep(Occasion::Refusal);
        }
        if let Some(file) = self.files.find(device) {
            return Some(file);
        }
        let copy = device.as_fd().try_clone_to_owned().ok()?;
        let copy = Device::of(&self.state.settings.nodes, copy)?;
        let (known, ranges) = {
            let books = self.state.books();
            (books.ledger.files(), books.ranges.of_files())
        };
        let mut files = self.files.files.lock();
        let at = match place(&files, device)? {
            Ok(at) => return files.get(at).cloned(),
            Err(_) if files.len() >= MOST_FILES => return None,
            Err(at) => at,
        };
        if (files.len() + 1) * ranges > MOST_QUESTIONS {
            return None;
        }
        let is_free = |number: &u32| {
            !known.contains(number) && files.iter().all(|file| file.number != *number)
        };
        let number = std::iter::repeat_with(|| self.state.journal.next_file()).find(is_free)?;
        // Before anything is mapped by it, so that no worker to come misses one.
        self.keeper.tell_with(KeptFile::Uvm(number).keep(), Some(copy.as_fd())).ok()?;
        let file = Arc::new(UvmFile::new(number, copy, seen));
        files.insert(at, Arc::clone(&file));
        Some(file)
    }

    /// Whether the files may have one more range.
    pub(crate) fn has_room_for_range(&self) -> bool {
        let files = self.files.files.lock().len();
        files * (self.state.books().ranges.of_files() + 1) <= MOST_QUESTIONS
    }

    /// A worker before had it.
    pub(crate) fn take_over_file(&self, number: u32, file: OwnedFd) {
        let Some(device) = Device::of(&self.state.settings.nodes, file) else { return };
        let mut files = self.files.files.lock();
        if let Some(Err(at)) = place(&files, &device) {
            files.insert(at, Arc::new(UvmFile::new(number, device, (0, 0))));
        }
    }

    /// Ends what is mapped by files that nobody of the container has open any more, and lets go
    /// of them.
    pub(crate) fn sweep(&self, occasion: Occasion) {
        let files = self.files.all();
        if files.is_empty() {
            return;
        }
        // One looks at a time, and what it finds is known to who waited.
        let looks = match occasion {
            Occasion::Refusal => Some(self.files.looks.lock()),
            Occasion::Tick | Occasion::Death => self.files.looks.try_lock(),
        };
        let Some(mut looks) = looks else { return };
        looks.died |= occasion == Occasion::Death;
        let due = match occasion {
            Occasion::Refusal => None,
            Occasion::Tick | Occasion::Death if looks.died => looks.soonest,
            Occasion::Tick | Occasion::Death => looks.next,
        };
        if due.is_some_and(|due| Instant::now() < due) {
            return;
        }
        looks.died = false;
        let mut missed: Vec<_> = files.into_iter().filter(|file| self.is_doubtful(file)).collect();
        if !missed.is_empty() {
            let wait = looks.soonest.map(|at| at.saturating_duration_since(Instant::now()));
            std::thread::sleep(wait.unwrap_or_default().min(PATIENCE));
        }
        let begun = Instant::now();
        for _ in 0..LOOKS {
            if missed.is_empty() {
                break;
            }
            let Some(open) = self.processes.open_files(NodeKind::Uvm) else {
                missed.clear();
                break;
            };
            missed.retain(|file| {
                let found = open.iter().find(|place| file.is_at(**place) != Some(false));
                if let Some(found) = found {
                    *file.seen.lock() = *found;
                }
                found.is_none()
            });
        }
        let (now, rest) = (Instant::now(), begun.elapsed() * REST);
        (looks.soonest, looks.next) = (Some(now + rest), Some(now + SWEEP.max(rest)));
        // Others' refusals are made of what these keep.
        self.unregister_each(&missed);
        drop(looks);
    }

    /// Whether somebody has to be looked for who has it.
    fn is_doubtful(&self, file: &UvmFile) -> bool {
        let seen = *file.seen.lock();
        file.is_at(seen) != Some(true)
    }

    fn forget(&self, file: &UvmFile) {
        file.let_go.store(true, AtomicOrdering::Relaxed);
        self.files.files.lock().retain(|kept| kept.number != file.number);
        // Else it is told that the worker is gone in a moment.
        let _ = self.keeper.tell(KeptFile::Uvm(file.number).let_go());
    }

    /// Has UVM end all that is mapped by a file, whoever has it open. `None` where a call hangs on the lane.
    pub(crate) fn unregister_all(&self, file: &UvmFile) -> Option<()> {
        let _lane = self.lane.enter_for_monitor()?;
        if file.is_let_go() {
            return Some(());
        }
        let ended = self.unregister_gpus(&file.device);
        if !ended {
            if self.state.log.limit.take_line() {
                tracing::warn!("a file of nvidia-uvm can't be ended: its memory stays charged");
            }
            return Some(());
        }
        self.state.books().close_file(file.number);
        self.forget(file);
        Some(())
    }

    /// Unregisters each GPU, whether it was registered or not. `false` where that can't be done.
    pub(crate) fn unregister_gpus(&self, device: &Device) -> bool {
        // It maps nothing by a GPU that isn't registered, and nothing where it wasn't initialized.
        let is_ended =
            |status| matches!(status, Some(NV_OK | NV_ERR_INVALID_DEVICE | NV_ERR_ILLEGAL_ACTION));
        // Of each, whatever becomes of another.
        self.state.uuids.iter().filter(|uuid| !is_ended(self.unregister(device, uuid))).count() == 0
    }

    pub(crate) fn unregister(&self, device: &Device, uuid: &[u8; 16]) -> Option<u32> {
        uvm_status(&self.state.release, device, UVM_UNREGISTER_GPU, |layout, bytes| {
            uvm::set_uuid(layout, bytes, *uuid)
        })
    }

    /// Ends what is mapped by files of those who are gone.
    pub(crate) fn unregister_each(&self, files: &[Arc<UvmFile>]) {
        let _ = files.iter().try_for_each(|file| self.unregister_all(file));
    }
}
