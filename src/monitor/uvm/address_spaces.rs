//! Address spaces that mappings are asked for in, and their lists of mappings.
//!
//! A list is opened when it's asked for a mapping, and stays that memory's own when who asked has
//! executed something else, and others who share it live on. When the thread has ended by which it
//! was opened, the kernel shows it no more.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::libc;

use crate::ledger::Process;
use crate::monitor::bell::Bell;
use crate::monitor::journal::process_number::process_id;
use crate::monitor::lock::Lock;
use crate::monitor::state::space_ranges::Mapped;
use crate::process::told;

/// How long a mapping may still be on its way after it was asked for.
pub(crate) const ON_ITS_WAY: Duration = Duration::from_secs(2);

/// How soon what was asked for lately is looked for again, and how soon what was asked for since.
const SOON: Duration = Duration::from_millis(100);
const SOONER: Duration = Duration::from_millis(20);

/// FNV-1a's, of 64 bits: what it makes of a program outlives this worker, and its version.
const FNV_OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_PRIME: u64 = 0x0100_0000_01b3;

/// Address spaces at most, each of which is a descriptor.
const MOST_MEMORIES: usize = 4096;

/// A memory that a process had when it asked for a mapping.
#[derive(Debug)]
pub(crate) struct AddressSpace {
    pub(crate) process: Process,
    /// `/proc/TID/maps`, which reads empty when nobody has the memory any more.
    maps: Lock<File>,
    /// The program that it was asked for by.
    image: Option<u64>,
    state: Lock<Looked>,
}

#[derive(Debug)]
struct Looked {
    /// When it was asked for a mapping last, and whether it wasn't looked at since.
    asked: Instant,
    is_new: bool,
    /// When it was looked at, and what was mapped there then.
    looked: Option<Instant>,
    last: Option<Vec<Mapped>>,
    /// Whether its process was seen to be over.
    is_orphaned: bool,
}

impl AddressSpace {
    /// The memory of a thread, to be looked at.
    fn open(process: Process, tid: i32) -> io::Result<Self> {
        // The first thread's stays readable longest; one that has ended has none.
        let first = File::open(format!("/proc/{}/maps", process_id(process).pid));
        let first = first.ok().filter(|maps| maps.read_at(&mut [0], 0).is_ok_and(|read| read > 0));
        let maps = first.map_or_else(|| File::open(format!("/proc/{tid}/maps")), Ok)?;
        let state = Looked {
            asked: Instant::now(),
            is_new: true,
            looked: None,
            last: None,
            is_orphaned: false,
        };
        let (maps, state) = (Lock::new(maps), Lock::new(state));
        Ok(AddressSpace { process, maps, image: image(process), state })
    }

    fn is_new(&self) -> bool {
        self.state.lock().is_new
    }

    /// It is about to be looked at.
    pub(crate) fn mark_looked_at(&self) {
        let mut state = self.state.lock();
        (state.is_new, state.looked) = (false, Some(Instant::now()));
    }

    /// It was looked at, and has these.
    pub(crate) fn set_mappings(&self, mappings: Vec<Mapped>) {
        self.state.lock().last = Some(mappings);
    }

    /// What was mapped there at the last look; `None` where there was none since it was asked for
    /// anything.
    pub(crate) fn last(&self) -> Option<Vec<Mapped>> {
        let state = self.state.lock();
        state.last.clone().filter(|_| !state.is_new)
    }

    /// Whether its process is over; `true` once.
    pub(crate) fn take_orphaned(&self) -> bool {
        let is_over = !process_id(self.process).alive();
        let mut state = self.state.lock();
        is_over && !std::mem::replace(&mut state.is_orphaned, is_over)
    }

    /// Whether it's to be looked at soon: what was asked for may not be mapped yet.
    fn is_fresh(&self) -> bool {
        let state = self.state.lock();
        let pause = if state.is_new { SOONER } else { SOON };
        let is_due = state.looked.is_none_or(|looked| looked.elapsed() > pause);
        is_due && (state.is_new || state.asked.elapsed() < ON_ITS_WAY)
    }

    /// Its mappings, as the kernel lists them; none where nobody has it any more.
    ///
    /// # Errors
    ///
    /// Where they can't be listed: the thread has ended that it was opened by.
    pub(crate) fn text(&self) -> io::Result<String> {
        let mut maps = self.maps.lock();
        let mut text = Vec::new();
        maps.rewind()?;
        maps.read_to_end(&mut text)?;
        // Names are any bytes.
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

/// The mappings of the memory that a process has now.
pub(crate) fn current(process: Process) -> Option<String> {
    told(process_id(process).pid, |tid| {
        let text = fs::read(format!("/proc/{tid}/maps")).ok().filter(|text| !text.is_empty())?;
        Some(String::from_utf8_lossy(&text).into_owned())
    })
}

/// What tells the program that a process has executed from the next, as far as it can be told: where
/// the kernel laid it out. Stack, heap and the kernel's own page are each put somewhere by chance
/// (`randomize_va_space`), and the process can't say that they are elsewhere (`PR_SET_MM` is refused).
pub(crate) fn image(process: Process) -> Option<u64> {
    told(process_id(process).pid, |tid| {
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

/// Whether the kernel lays a process's programs out by chance: without, all are alike.
pub(crate) fn is_randomized(process: Process) -> bool {
    let of_all = fs::read_to_string("/proc/sys/kernel/randomize_va_space");
    let personality = told(process_id(process).pid, |tid| {
        let text = fs::read_to_string(format!("/proc/{tid}/personality")).ok()?;
        u32::from_str_radix(text.trim_end(), 16).ok()
    });
    of_all.is_ok_and(|text| text.trim_end() != "0")
        && personality.is_some_and(|bits| bits & libc::ADDR_NO_RANDOMIZE.cast_unsigned() == 0)
}

/// The memories that mappings were asked for in.
#[derive(Debug, Default)]
pub(crate) struct AddressSpaces {
    /// Of the thread that looks at mappings.
    bell: Bell,
    all: Lock<Vec<Arc<AddressSpace>>>,
    /// Whether all are to be looked at, and when they were.
    is_due: AtomicBool,
    looked: Lock<Option<Instant>>,
    /// When managed ranges were asked for.
    pub(crate) charged: Lock<BTreeMap<(Process, u64), Instant>>,
}

impl AddressSpaces {
    pub(crate) fn all(&self) -> Vec<Arc<AddressSpace>> {
        self.all.lock().clone()
    }

    /// Whether there is anything to look at.
    pub(crate) fn has_any(&self) -> bool {
        !self.all.lock().is_empty()
    }

    /// Those to be looked at soon.
    pub(crate) fn fresh(&self) -> Vec<Arc<AddressSpace>> {
        let mut all = self.all();
        all.retain(|memory| memory.is_fresh());
        all
    }

    /// Waits until somebody rings: then something may be to be looked at.
    pub(crate) fn wait(&self) {
        self.bell.wait(None);
    }

    /// Whether all are to be looked at: they were asked for, or `pause` is over. They are, then.
    pub(crate) fn take_due(&self, pause: Duration) -> bool {
        let is_due = self.is_due.swap(false, Ordering::Relaxed);
        let mut looked = self.looked.lock();
        let due = is_due || looked.is_none_or(|looked| looked.elapsed() >= pause);
        if due {
            *looked = Some(Instant::now());
        }
        due
    }

    /// It may be time to look.
    pub(crate) fn ring(&self) {
        self.bell.ring();
    }

    /// All are to be looked at.
    pub(crate) fn look_at_all(&self) {
        self.is_due.store(true, Ordering::Relaxed);
        self.ring();
    }

    /// A thread is about to map something in its memory.
    ///
    /// # Errors
    ///
    /// Where that can't be watched.
    pub(crate) fn watch(&self, process: Process, tid: i32) -> io::Result<()> {
        let now = image(process);
        let all = self.all.lock();
        let known = all.iter().find(|of| of.process == process && now.is_some() && of.image == now);
        if let Some(known) = known {
            let mut state = known.state.lock();
            (state.asked, state.is_new) = (Instant::now(), true);
            return Ok(());
        }
        if all.len() >= MOST_MEMORIES {
            self.look_at_all();
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        drop(all);
        let memory = Arc::new(AddressSpace::open(process, tid)?);
        self.all.lock().push(memory);
        Ok(())
    }

    /// A process has another memory, or is looked at by another thread.
    pub(crate) fn reopen(&self, process: Process) {
        if let Ok(memory) = AddressSpace::open(process, process_id(process).pid) {
            memory.mark_looked_at();
            self.all.lock().push(Arc::new(memory));
        }
    }

    pub(crate) fn has_new(&self) -> bool {
        self.all.lock().iter().any(|memory| memory.is_new())
    }

    pub(crate) fn forget(&self, memory: &Arc<AddressSpace>) {
        self.all.lock().retain(|of| !Arc::ptr_eq(of, memory));
    }

    pub(crate) fn of(&self, process: Process) -> Vec<Arc<AddressSpace>> {
        self.all.lock().iter().filter(|of| of.process == process).cloned().collect()
    }

    /// A managed range is charged, which is about to be mapped.
    pub(crate) fn note_asked(&self, process: Process, base: u64) {
        self.charged.lock().insert((process, base), Instant::now());
    }

    /// When a managed range was asked for last, where this worker knows.
    pub(crate) fn asked_for_at(&self, process: Process, base: u64) -> Option<Instant> {
        self.charged.lock().get(&(process, base)).copied()
    }
}
