//! Files of UVM's that have GPUs, ranges, or memory mapped by them.
//!
//! UVM keeps what it maps until it's unmapped or its file is closed, whoever has that by then:
//! it may have been inherited, sent, or hidden in a socket's queue. Nothing tells when a file
//! is closed, and nothing but a file in hand tells it from others. So, as with exports, we keep
//! each open from its initialization on, or the first call that gives it any of these. When nobody
//! of the container is found with one, its GPUs are unregistered, which ends what it maps also where
//! a descriptor is hidden, and it is let go; so they are when its maker is over. What is mapped where is the ledger's business, and which ranges it has the
//! books'.

use std::cmp::Ordering;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering as AtomicOrdering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use super::Shared;
use super::buffer::Buffer;
use super::device::Device;
use super::target::{compared, has_file};
use crate::gate::settings::NodeKind;
use crate::gate::wire::Notice;
use crate::rm::number::{NV_ERR_ILLEGAL_ACTION, NV_ERR_INVALID_DEVICE, NV_OK, UVM_UNREGISTER_GPU};
use crate::rm::{Key, Layout, Meaning, uvm};

/// Files at most: each is a descriptor of ours and one of the keeper's.
pub(super) const MOST: usize = 1024;

/// How often files are looked for that are no more where they were.
const SWEEP: Duration = Duration::from_secs(1);

/// What looking may cost: so many times as long as it took it isn't done again.
const REST: u32 = 4;

/// How long a call that would be refused waits for that at most.
const PATIENCE: Duration = Duration::from_millis(200);

/// How many ranges of files times files there may be: for each range that is mapped, all other
/// files are asked whether it's theirs.
pub(super) const MOST_QUESTIONS: usize = 1 << 19;

/// How often a file must not have been found: who had it may have forked, and ended, while
/// processes were looked at.
const LOOKS: usize = 2;

/// The bit that tells their numbers from those of exports, among the files that are kept.
const KIND: u64 = 1 << 63;

/// Whether a file that the keeper has is one of these.
pub(super) fn is_number(number: u64) -> bool {
    number & KIND != 0
}

/// Why files are looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Occasion {
    /// It's time to.
    Tick,
    /// A process died.
    Death,
    /// What is gone would make room.
    Refusal,
}

/// The files.
#[derive(Debug, Default)]
pub(super) struct Mapped {
    /// In the kernel's order of files.
    files: Mutex<Vec<Arc<Mapping>>>,
    looks: Mutex<Looks>,
}

/// When files are looked for.
#[derive(Debug, Default)]
struct Looks {
    /// Not sooner, whatever happens.
    soonest: Option<Instant>,
    /// At a tick.
    next: Option<Instant>,
    /// Whether a process died since.
    died: bool,
}

/// A file of UVM's that is kept.
#[derive(Debug)]
pub(super) struct Mapping {
    pub(super) number: u32,
    pub(super) device: Device,
    /// Who was last seen to have it: process and descriptor.
    seen: Mutex<(u32, i32)>,
    /// It was let go: who finds it has to have it kept again.
    let_go: AtomicBool,
    /// It had managed memory past the monitor, or its maker is over, and gets no GPU.
    condemned: AtomicBool,
    /// And has none any more.
    ended: AtomicBool,
}

impl Mapping {
    fn new(number: u32, device: Device, seen: (u32, i32)) -> Self {
        let [let_go, condemned, ended] = [false; 3].map(AtomicBool::new);
        Mapping { number, device, seen: Mutex::new(seen), let_go, condemned, ended }
    }

    pub(super) fn has_ended(&self) {
        self.ended.store(true, AtomicOrdering::Relaxed);
    }

    pub(super) fn is_ended(&self) -> bool {
        self.ended.load(AtomicOrdering::Relaxed)
    }

    pub(super) fn condemn(&self) {
        self.condemned.store(true, AtomicOrdering::Relaxed);
    }

    pub(super) fn is_condemned(&self) -> bool {
        self.condemned.load(AtomicOrdering::Relaxed)
    }

    pub(super) fn is_let_go(&self) -> bool {
        self.let_go.load(AtomicOrdering::Relaxed)
    }

    /// Whether a process has it by that descriptor; `None` where that can't be told.
    fn is_at(&self, place: (u32, i32)) -> Option<bool> {
        has_file(place, &self.device)
    }
}

impl Mapped {
    fn files(&self) -> MutexGuard<'_, Vec<Arc<Mapping>>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file that `device` is, where it is kept.
    pub(super) fn find(&self, device: &Device) -> Option<Arc<Mapping>> {
        let files = self.files();
        let at = place(&files, device)?.ok()?;
        files.get(at).cloned()
    }

    pub(super) fn all(&self) -> Vec<Arc<Mapping>> {
        self.files().clone()
    }
}

/// Where among the files it is, or would be; `None` where that can't be told.
fn place(files: &[Arc<Mapping>], device: &Device) -> Option<Result<usize, usize>> {
    let own = std::process::id();
    let mut known = true;
    let found = files.binary_search_by(|file| {
        let order = compared((own, file.device.descriptor()), (own, device.descriptor()));
        order.unwrap_or_else(|_| {
            known = false;
            Ordering::Equal
        })
    });
    known.then_some(found)
}

impl Shared {
    /// The file that `device` is, kept from now on; `seen` has it. `None` where there are too
    /// many, or none can be told from another.
    pub(super) fn keep_mapped(&self, device: &Device, seen: (u32, i32)) -> Option<Arc<Mapping>> {
        if self.mapped.files().len() >= MOST {
            self.sweep_mapped(Occasion::Refusal);
        }
        if let Some(file) = self.mapped.find(device) {
            return Some(file);
        }
        let copy = device.as_fd().try_clone_to_owned().ok()?;
        let copy = Device::of(&self.settings.nodes, copy).ok()?;
        let (known, ranges) = {
            let books = self.books();
            (books.ledger.files(), books.ranges_of_files())
        };
        let mut files = self.mapped.files();
        let at = match place(&files, device)? {
            Ok(at) => return files.get(at).cloned(),
            Err(_) if files.len() >= MOST => return None,
            Err(at) => at,
        };
        if (files.len() + 1) * ranges > MOST_QUESTIONS {
            return None;
        }
        let is_free = |number: &u32| {
            !known.contains(number) && files.iter().all(|file| file.number != *number)
        };
        let number = std::iter::repeat_with(|| self.memory.next_file()).find(is_free)?;
        // Before anything is mapped by it, so that no worker to come misses one.
        let notice = Notice::Exported { number: KIND | u64::from(number) };
        self.keeper.tell_with(notice, Some(copy.as_fd())).ok()?;
        let file = Arc::new(Mapping::new(number, copy, seen));
        files.insert(at, Arc::clone(&file));
        Some(file)
    }

    /// Whether the files may have one more range.
    pub(super) fn has_room_for_range(&self) -> bool {
        let files = self.mapped.files().len();
        files * (self.books().ranges_of_files() + 1) <= MOST_QUESTIONS
    }

    /// A worker before had it.
    pub(super) fn was_mapped(&self, number: u64, file: OwnedFd) {
        let Ok(device) = Device::of(&self.settings.nodes, file) else { return };
        let Ok(number) = u32::try_from(number & !KIND) else { return };
        let mut files = self.mapped.files();
        if let Some(Err(at)) = place(&files, &device) {
            files.insert(at, Arc::new(Mapping::new(number, device, (0, 0))));
        }
    }

    /// Ends what is mapped by files that nobody of the container has open any more, and lets go
    /// of them.
    pub(super) fn sweep_mapped(&self, occasion: Occasion) {
        let files = self.mapped.all();
        if files.is_empty() {
            return;
        }
        // One looks at a time, and what it finds is known to who waited.
        let looks = match occasion {
            Occasion::Refusal => self.mapped.looks.lock().map_err(PoisonError::into_inner),
            Occasion::Tick | Occasion::Death => match self.mapped.looks.try_lock() {
                Ok(looks) => Ok(looks),
                Err(TryLockError::Poisoned(poisoned)) => Err(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => return,
            },
        };
        let mut looks = looks.unwrap_or_else(|looks| looks);
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
            let Some(open) = self.open_files(NodeKind::Uvm) else {
                missed.clear();
                break;
            };
            missed.retain(|file| {
                let found = open.iter().find(|place| file.is_at(**place) != Some(false));
                if let Some(found) = found {
                    *file.seen.lock().unwrap_or_else(PoisonError::into_inner) = *found;
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
    fn is_doubtful(&self, file: &Mapping) -> bool {
        let seen = *file.seen.lock().unwrap_or_else(PoisonError::into_inner);
        file.is_at(seen) != Some(true)
    }

    fn forget(&self, file: &Mapping) {
        file.let_go.store(true, AtomicOrdering::Relaxed);
        self.mapped.files().retain(|kept| kept.number != file.number);
        // Else it is told that the worker is gone in a moment.
        let _ = self.keeper.tell(Notice::TakenBack { number: KIND | u64::from(file.number) });
    }

    /// Has UVM end all that is mapped by a file, whoever has it open. `None` where a call hangs on the lane.
    pub(super) fn unregister_all(&self, file: &Mapping) -> Option<()> {
        let _lane = self.lane.enter_soon()?;
        if file.is_let_go() {
            return Some(());
        }
        let ended = self.unregister_gpus(&file.device);
        if !ended {
            if self.calm.allows() {
                tracing::warn!("a file of nvidia-uvm can't be ended: its memory stays charged");
            }
            return Some(());
        }
        self.books().close_file(file.number);
        self.forget(file);
        Some(())
    }

    /// Unregisters each GPU, whether it was registered or not. `false` where that can't be done.
    pub(super) fn unregister_gpus(&self, device: &Device) -> bool {
        // It maps nothing by a GPU that isn't registered, and nothing where it wasn't initialized.
        let is_ended =
            |status| matches!(status, Some(NV_OK | NV_ERR_INVALID_DEVICE | NV_ERR_ILLEGAL_ACTION));
        // Of each, whatever becomes of another.
        self.uuids.iter().filter(|uuid| !is_ended(self.unregister(device, uuid))).count() == 0
    }

    pub(super) fn unregister(&self, device: &Device, uuid: &[u8; 16]) -> Option<u32> {
        let layout: &Layout = self.release.layouts(Key::Uvm(UVM_UNREGISTER_GPU)).first()?;
        let mut bytes = Buffer::zeroed(layout.size());
        if !uvm::set_uuid(layout, &mut bytes, *uuid) {
            return None;
        }
        device.call_uvm(&self.release, UVM_UNREGISTER_GPU, &mut bytes).ok()?;
        layout.view(&bytes)?.u32(Meaning::Status)
    }

    /// Ends what is mapped by files of those who are gone.
    pub(super) fn unregister_each(&self, files: &[Arc<Mapping>]) {
        let _ = files.iter().try_for_each(|file| self.unregister_all(file));
    }
}
