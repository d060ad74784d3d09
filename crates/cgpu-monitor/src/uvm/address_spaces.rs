//! The address spaces in which mappings were asked for, and the kernel's lists of their mappings.
//!
//! A list is opened when a mapping is asked for. It stays the list of that address space when the process executes
//! another program while other processes share the address space. When the thread ends through which the list was
//! opened, the kernel doesn't list the mappings any more.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::libc;

use crate::state::Mapped;
use crate::sync::{Lock, Notifier};
use cgpu_core::ledger::Process;
use cgpu_host::process::{ProcessId, of_any_thread};

/// How long a mapping that was asked for may still not be made.
pub(crate) const MAPPING_DELAY: Duration = Duration::from_secs(2);

/// Pauses between checks of an address space: while a mapping was asked for lately, and while one was asked for since
/// the last check.
const RECENT_PAUSE: Duration = Duration::from_millis(100);
const NEW_PAUSE: Duration = Duration::from_millis(20);

/// The constants of 64-bit FNV-1a. A snapshot has the hashes, for later versions.
const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0100_0000_01b3;

/// The most address spaces. Each has a descriptor.
const MOST_SPACES: usize = 4096;

/// An address space that a process had when it asked for a mapping.
#[derive(Debug)]
pub(crate) struct AddressSpace {
    pub(crate) process: Process,
    /// `/proc/TID/maps`, which reads empty when no process has the address space any more.
    maps: Lock<File>,
    /// The [`image_hash`] of the program that asked for the mapping.
    image: Option<u64>,
    state: Lock<CheckState>,
}

#[derive(Debug)]
struct CheckState {
    /// When a mapping was asked for last, and whether the address space wasn't checked since.
    asked: Instant,
    is_new: bool,
    /// When the address space was checked last, and its mappings then.
    checked: Option<Instant>,
    last: Option<Vec<Mapped>>,
    /// Whether the end of its process was noted.
    is_end_noted: bool,
}

impl AddressSpace {
    /// Opens the list of a thread's address space, which is to be checked.
    fn open(process: Process, tid: i32) -> io::Result<Self> {
        // The list of the process's first thread stays readable longest. Of a first thread that has ended it is empty.
        let first = File::open(format!("/proc/{}/maps", process.pid()));
        let first = first.ok().filter(|maps| maps.read_at(&mut [0], 0).is_ok_and(|read| read > 0));
        let maps = first.map_or_else(|| File::open(format!("/proc/{tid}/maps")), Ok)?;
        let state = CheckState {
            asked: Instant::now(),
            is_new: true,
            checked: None,
            last: None,
            is_end_noted: false,
        };
        let (maps, state) = (Lock::new(maps), Lock::new(state));
        Ok(AddressSpace { process, maps, image: image_hash(process), state })
    }

    fn is_new(&self) -> bool {
        self.state.lock().is_new
    }

    /// Notes that the address space is about to be checked.
    pub(crate) fn mark_checked(&self) {
        let mut state = self.state.lock();
        (state.is_new, state.checked) = (false, Some(Instant::now()));
    }

    /// Notes the mappings that a check found.
    pub(crate) fn set_mappings(&self, mappings: Vec<Mapped>) {
        self.state.lock().last = Some(mappings);
    }

    /// The mappings at the last check; `None` if there was no check, or a mapping was asked for since.
    pub(crate) fn last_mappings(&self) -> Option<Vec<Mapped>> {
        let state = self.state.lock();
        state.last.clone().filter(|_| !state.is_new)
    }

    /// Whether its process has exited. Says `true` once, and `false` from then on.
    pub(crate) fn take_process_ended(&self) -> bool {
        let has_ended = !ProcessId::from(self.process).alive();
        let mut state = self.state.lock();
        has_ended && !std::mem::replace(&mut state.is_end_noted, has_ended)
    }

    /// Whether the address space is to be checked now: a mapping that was asked for may not have been made yet.
    fn is_fresh(&self) -> bool {
        let state = self.state.lock();
        let pause = if state.is_new { NEW_PAUSE } else { RECENT_PAUSE };
        let is_due = state.checked.is_none_or(|checked| checked.elapsed() > pause);
        is_due && (state.is_new || state.asked.elapsed() < MAPPING_DELAY)
    }

    /// The kernel's list of its mappings; empty where no process has the address space any more. Fails where the kernel
    /// doesn't list them: the thread has ended through which the list was opened.
    pub(crate) fn read_maps(&self) -> io::Result<String> {
        let mut maps = self.maps.lock();
        let mut text = Vec::new();
        maps.rewind()?;
        maps.read_to_end(&mut text)?;
        // The names of files in the list may have any bytes.
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

/// The kernel's list of the mappings that a process has now; `None` where the kernel lists none.
pub(crate) fn current_maps(process: Process) -> Option<String> {
    of_any_thread(process.pid().cast_signed(), |tid| {
        let text = fs::read(format!("/proc/{tid}/maps")).ok().filter(|text| !text.is_empty())?;
        Some(String::from_utf8_lossy(&text).into_owned())
    })
}

/// A hash that distinguishes a process's program from the next one that the process executes: of where the kernel laid
/// the program out. The kernel puts stack, heap and its own page each at a random address (`randomize_va_space`), and
/// the process can't claim other addresses (`PR_SET_MM` is refused). `None` if the addresses can't be read.
pub(crate) fn image_hash(process: Process) -> Option<u64> {
    of_any_thread(process.pid().cast_signed(), |tid| {
        let stat = procfs::process::Process::new(tid).and_then(|of| of.stat()).ok()?;
        let places = [stat.startstack, stat.start_brk.unwrap_or(0)];
        let auxiliary = fs::read(format!("/proc/{tid}/auxv")).ok();
        let auxiliary = auxiliary.filter(|bytes| !bytes.is_empty() && stat.startstack != 0)?;
        let places = places.into_iter().flat_map(u64::to_le_bytes);
        Some(
            places
                .chain(auxiliary)
                .fold(FNV_OFFSET, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(FNV_PRIME)),
        )
    })
}

/// Whether the kernel lays a process's programs out at random. Otherwise [`image_hash`] is the same for all.
pub(crate) fn is_randomized(process: Process) -> bool {
    let of_all = fs::read_to_string("/proc/sys/kernel/randomize_va_space");
    let personality = of_any_thread(process.pid().cast_signed(), |tid| {
        let text = fs::read_to_string(format!("/proc/{tid}/personality")).ok()?;
        u32::from_str_radix(text.trim_end(), 16).ok()
    });
    of_all.is_ok_and(|text| text.trim_end() != "0")
        && personality.is_some_and(|bits| bits & libc::ADDR_NO_RANDOMIZE.cast_unsigned() == 0)
}

/// The address spaces in which mappings were asked for.
#[derive(Debug, Default)]
pub(crate) struct AddressSpaces {
    /// Wakes the thread that checks mappings.
    notifier: Notifier,
    all: Lock<Vec<Arc<AddressSpace>>>,
    /// Whether all address spaces are to be checked, and when they were checked last.
    is_due: AtomicBool,
    checked: Lock<Option<Instant>>,
    /// When managed ranges were asked for, by process and first address.
    pub(crate) asked_ranges: Lock<BTreeMap<(Process, u64), Instant>>,
}

impl AddressSpaces {
    pub(crate) fn all(&self) -> Vec<Arc<AddressSpace>> {
        self.all.lock().clone()
    }

    /// Whether there is any address space to check.
    pub(crate) fn has_any(&self) -> bool {
        !self.all.lock().is_empty()
    }

    /// The address spaces to be checked now: a mapping was asked for lately.
    pub(crate) fn fresh(&self) -> Vec<Arc<AddressSpace>> {
        let mut all = self.all();
        all.retain(|space| space.is_fresh());
        all
    }

    /// Waits to be woken.
    pub(crate) fn wait(&self) {
        self.notifier.wait(None);
    }

    /// Whether all address spaces are to be checked now: [`Self::check_all`] asked for it, or `pause` has elapsed. If
    /// `true`, they count as checked.
    pub(crate) fn take_due(&self, pause: Duration) -> bool {
        let is_due = self.is_due.swap(false, Ordering::Relaxed);
        let mut checked = self.checked.lock();
        let due = is_due || checked.is_none_or(|checked| checked.elapsed() >= pause);
        if due {
            *checked = Some(Instant::now());
        }
        due
    }

    /// Wakes the thread that checks mappings: a check may be scheduled.
    pub(crate) fn wake(&self) {
        self.notifier.wake();
    }

    /// Has the thread check all address spaces.
    pub(crate) fn check_all(&self) {
        self.is_due.store(true, Ordering::Relaxed);
        self.wake();
    }

    /// Watches the address space in which a thread is about to map something. Fails where the list can't be opened, or
    /// too many address spaces are watched.
    pub(crate) fn watch(&self, process: Process, tid: i32) -> io::Result<()> {
        let now = image_hash(process);
        let all = self.all.lock();
        let known = all.iter().find(|of| of.process == process && now.is_some() && of.image == now);
        if let Some(known) = known {
            let mut state = known.state.lock();
            (state.asked, state.is_new) = (Instant::now(), true);
            return Ok(());
        }
        if all.len() >= MOST_SPACES {
            self.check_all();
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        drop(all);
        let space = Arc::new(AddressSpace::open(process, tid)?);
        self.all.lock().push(space);
        Ok(())
    }

    /// Watches the address space that a process has now. It may be the old one, opened through another thread.
    pub(crate) fn reopen(&self, process: Process) {
        if let Ok(space) = AddressSpace::open(process, process.pid().cast_signed()) {
            space.mark_checked();
            self.all.lock().push(Arc::new(space));
        }
    }

    pub(crate) fn has_new(&self) -> bool {
        self.all.lock().iter().any(|space| space.is_new())
    }

    pub(crate) fn forget(&self, space: &Arc<AddressSpace>) {
        self.all.lock().retain(|of| !Arc::ptr_eq(of, space));
    }

    pub(crate) fn of_process(&self, process: Process) -> Vec<Arc<AddressSpace>> {
        self.all.lock().iter().filter(|of| of.process == process).cloned().collect()
    }

    /// Notes that a managed range was charged and is about to be mapped.
    pub(crate) fn note_asked(&self, process: Process, base: u64) {
        self.asked_ranges.lock().insert((process, base), Instant::now());
    }

    /// When a managed range was asked for last; `None` where that isn't known.
    pub(crate) fn asked_for_at(&self, process: Process, base: u64) -> Option<Instant> {
        self.asked_ranges.lock().get(&(process, base)).copied()
    }
}
