//! The state of the container: its settings, its books, and the figures that others read of both.

use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use crate::gate::figures::Figures;
use crate::gate::launch::MonitorDir;
use crate::gate::settings::Settings;
use crate::gate::wire::End;
use crate::monitor::journal::{Count, JournalMap};
use crate::monitor::lock::Lock;
use crate::monitor::log::ContainerLog;
use crate::monitor::state::books::Books;
use crate::monitor::state::rest::{Pace, Rest};
use crate::monitor::state::self_ranges;
use crate::rm::release::Standing;
use crate::rm::{Release, about};

/// The container's settings, books and figures.
#[derive(Debug)]
pub(crate) struct ContainerState {
    pub(crate) settings: Arc<Settings>,
    pub(crate) release: Release,
    /// UUIDs of the container's GPUs, in the container's order.
    pub(crate) uuids: Vec<about::Uuid>,
    /// The worker's own memory and its surroundings, as first and last addresses.
    pub(crate) own_ranges: Vec<(u64, u64)>,
    pub(crate) journal: &'static JournalMap,
    pub(crate) log: ContainerLog,
    books: Lock<Books>,
    /// The figures that others read: of the books, and of the counted calls.
    pub(crate) figures: Figures,
    rest: Lock<Rest>,
    end: Lock<End>,
}

/// The [`Books`], locked. A holder that has changed them updates the figures' mark before another thread gets them.
#[derive(Debug)]
pub(crate) struct OpenBooks<'a> {
    books: MutexGuard<'a, Books>,
    figures: &'a Figures,
    changed: bool,
}

impl Deref for OpenBooks<'_> {
    type Target = Books;

    fn deref(&self) -> &Books {
        &self.books
    }
}

impl DerefMut for OpenBooks<'_> {
    fn deref_mut(&mut self) -> &mut Books {
        self.changed = true;
        &mut self.books
    }
}

impl Drop for OpenBooks<'_> {
    fn drop(&mut self) {
        if self.changed {
            self.figures.set_mark(self.books.ledger.mark());
        }
    }
}

impl ContainerState {
    /// Makes the state from the settings and the journal. Fails where the settings name an impossible driver or GPU, or
    /// the journal can't be mapped.
    pub(crate) fn open(settings: Settings, journal: &File) -> io::Result<Self> {
        let version = settings.driver.parse().map_err(io::Error::other)?;
        let release = Release::of(version).map_err(io::Error::other)?;
        if release.standing() != Standing::Checked {
            // `cgpu doctor` reports this once for the host.
            tracing::debug!(driver = %version, "the driver's structs: {}", release.standing());
        }
        let uuids = settings.gpus.iter().map(|gpu| {
            about::uuid(&gpu.uuid).ok_or_else(|| io::Error::other("a GPU's UUID is none"))
        });
        let uuids = uuids.collect::<io::Result<_>>()?;
        // The journal stays mapped until the process ends: threads that hang in the driver use slots of it.
        let journal: &'static JournalMap = Box::leak(Box::new(JournalMap::map(journal)?));
        let books = Books::open(journal, &settings.gpus, &settings.nodes);
        let figures = Figures::create(&MonitorDir::at(&settings.place).figures());
        let figures = figures.or_else(|error| {
            // The directory of a container that has ended is gone, and nobody reads its figures.
            if error.kind() != io::ErrorKind::NotFound {
                tracing::warn!(%error, "those who look at this container have to wake its monitor");
            }
            Figures::without_file()
        })?;
        let settings = Arc::new(settings);
        Ok(ContainerState {
            log: ContainerLog::new(Arc::clone(&settings), journal),
            settings,
            release,
            uuids,
            own_ranges: self_ranges::ranges(&std::fs::read_to_string("/proc/self/maps")?),
            journal,
            books: Lock::new(books),
            figures,
            rest: Lock::new(Rest::new(0, Instant::now())),
            end: Lock::default(),
        })
    }

    /// The place of the GPU with this UUID in the container's order; `None` where the container has no such GPU.
    pub(crate) fn gpu_of(&self, uuid: &about::Uuid) -> Option<usize> {
        self.uuids.iter().position(|of| of == uuid)
    }

    /// Opens the books. Other threads wait until they are dropped.
    pub(crate) fn books(&self) -> OpenBooks<'_> {
        let books = self.books.lock();
        OpenBooks { books, figures: &self.figures, changed: false }
    }

    /// How far the container's end has come.
    pub(crate) fn end(&self) -> End {
        self.end.lock().clone()
    }

    /// Sets how far the container's end has come. `true` where that is something new.
    pub(crate) fn set_end(&self, end: End) -> bool {
        let mut now = self.end.lock();
        let is_new = *now != end;
        *now = end;
        drop(now);
        if is_new {
            self.figures.change();
        }
        is_new
    }

    /// Counts a call: what became of it, and how long it took.
    pub(crate) fn count(&self, became: Count, took: Duration) {
        self.journal.add_duration(took);
        self.journal.count(became);
        self.figures.change();
    }

    /// Counts a process that was killed.
    pub(crate) fn count_killed(&self) {
        self.journal.count(Count::Killed);
        self.figures.change();
    }

    /// Whether the container has called nothing for a while.
    pub(crate) fn is_at_rest(&self, now: Instant) -> bool {
        self.rest(now).is_at_rest(now)
    }

    /// How often the container is to be looked at; `was_used`: whether any of its processes has used the driver.
    pub(crate) fn pace(&self, was_used: bool, now: Instant) -> Pace {
        self.rest(now).pace(was_used, now)
    }

    fn rest(&self, now: Instant) -> MutexGuard<'_, Rest> {
        let mut rest = self.rest.lock();
        rest.note(self.journal.calls().received(), now);
        rest
    }
}
