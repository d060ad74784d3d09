//! The registered containers: records on disk, one lock, what is stale.
//!
//! On disk, under `state_dir` (root's, 0700):
//!
//! ```text
//! lock               held (flock) by the process that changes anything
//! containers/NAME    a record a container, as JSON; the truth
//! index              what admission needs of all records; derived, see `index`
//! shares/UUID        what containers have of a GPU's computing time; derived, see `share`
//! ```
//!
//! Crash-safe at any instruction: a record appears and disappears in one step, and the
//! index is dropped before the records change and written after, so that one that
//! exists is true. Removing a record needs no space on the disk. Must not know what a
//! backend does: the collector of stale records ends their isolation first.

mod error;
mod gpu_settings;
mod host_settings;
mod index;
mod lifecycle;
pub mod notice;
mod process_facts;
mod record;
pub mod share;

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::geteuid;
use rustix::time::{ClockId, clock_gettime};

pub use error::RegistryError;
pub use gpu_settings::GpuSettings;
pub use host_settings::HostSettings;
pub use index::Stamp;
pub use record::{Holder, Key, Record, short_id};

use crate::failpoint::failpoint;
use crate::process::{ProcessId, boot_time_s};
use cgpu_core::plan::Holding;
use error::failed;
use index::{Entry, Life};
use process_facts::World;

/// How long to wait for the lock; a container creation holds it for less than a millisecond.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// How many processes a quick check compares by their start time, too.
const CLOSE_CHECKS: usize = 4;

/// What lies in a state directory in addition to what is known by parts of its name.
const OWN_NAMES: &[&str] = &[
    "containers",
    "driver",
    "driver-answered",
    "slices-tried",
    "driver.lock",
    "events",
    "events.1",
    "gate",
    "gpus",
    "host",
    "index",
    "km",
    "lock",
    "next",
    "shares",
];

/// The registry's directory.
#[derive(Debug)]
pub struct Registry {
    dir: PathBuf,
    boot_id: String,
}

/// The registry while no other process can change it.
#[derive(Debug)]
pub struct Locked<'a> {
    registry: &'a Registry,
    entries: Vec<Entry>,
    _lock: File,
}

/// How closely to check for stale records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StaleCheck {
    /// Every pid, and the start times of a few: what a container creation can afford.
    Quick,
    /// Everything: before a refusal, and for `cgpu gc`.
    Close,
}

impl Registry {
    /// The registry in `dir`, which is made if it is missing.
    ///
    /// # Errors
    ///
    /// Where the directory can't be made, or isn't ours alone.
    pub fn open(dir: &Path, boot_id: String) -> Result<Self, RegistryError> {
        secure_dir(dir)?;
        let registry = Registry { dir: dir.to_owned(), boot_id };
        secure_dir(&registry.containers())?;
        secure_dir(&share::dir(dir))?;
        Ok(registry)
    }

    /// The registry in `dir` for readers: nothing is made or changed, and one
    /// that isn't there is empty.
    ///
    /// # Errors
    ///
    /// If a container creation would not trust the directory either.
    pub fn open_read_only(dir: &Path, boot_id: String) -> Result<Self, RegistryError> {
        let registry = Registry { dir: dir.to_owned(), boot_id };
        for dir in [dir, &registry.containers()] {
            match fs::symlink_metadata(dir) {
                Ok(meta) => trusted(dir, &meta)?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(failed("cannot read", dir)(source)),
            }
        }
        Ok(registry)
    }

    /// The boot that the registry is in.
    #[must_use]
    pub fn boot_id(&self) -> &str {
        &self.boot_id
    }

    fn containers(&self) -> PathBuf {
        self.dir.join("containers")
    }

    fn index_path(&self) -> PathBuf {
        self.dir.join("index")
    }

    /// Waits for the lock.
    ///
    /// # Errors
    ///
    /// Where it can't be had in time, or the records can't be read.
    pub fn lock(&self) -> Result<Locked<'_>, RegistryError> {
        let path = self.dir.join("lock");
        let lock = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(&path)
            .map_err(failed("cannot open", &path))?;
        let deadline = Instant::now() + LOCK_TIMEOUT;
        let mut pause = Duration::from_micros(100);
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::Error(source)) => {
                    return Err(failed("cannot lock", &path)(source));
                }
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => {
                    return Err(RegistryError::Locked { path });
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(pause),
            }
            pause = (pause * 2).min(Duration::from_millis(2));
        }
        failpoint("registry-locked");
        let indexed = fs::read_to_string(self.index_path())
            .ok()
            .and_then(|text| index::read(&text, &self.stamp().ok()?));
        let entries = match indexed {
            Some(entries) => entries,
            None => self.records()?.iter().map(|record| Entry::of(record, &self.boot_id)).collect(),
        };
        Ok(Locked { registry: self, entries, _lock: lock })
    }

    /// When a record was made, changed or removed last, and in which boot.
    ///
    /// # Errors
    ///
    /// If the directory can't be inspected.
    pub fn stamp(&self) -> Result<Stamp, RegistryError> {
        let path = self.containers();
        let meta = fs::metadata(&path).map_err(failed("cannot read", &path))?;
        let changed_ns = i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec());
        Ok(Stamp { boot_id: self.boot_id.clone(), changed_ns })
    }

    /// Every record, stale ones too, in the order of their files' names.
    ///
    /// # Errors
    ///
    /// Where the directory or a record can't be read: what can't be read may hold memory.
    pub fn records(&self) -> Result<Vec<Record>, RegistryError> {
        let read = self.names()?.into_iter().map(|name| self.record(&name));
        read.filter_map(Result::transpose).collect()
    }

    /// The names of the records' files, in order.
    fn names(&self) -> Result<Vec<OsString>, RegistryError> {
        let dir = self.containers();
        let mut names = Vec::new();
        let entries = match fs::read_dir(&dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed("cannot list", &dir))?,
        };
        for entry in entries {
            names.push(entry.map_err(failed("cannot list", &dir))?.file_name());
        }
        names.sort();
        Ok(names)
    }

    /// Every record of a container that isn't gone, and why each of the others can't be read: for
    /// commands that show what there is.
    ///
    /// # Errors
    ///
    /// Where the directory can't be read.
    pub fn check_each(&self) -> Result<(Vec<Record>, Vec<RegistryError>), RegistryError> {
        let (mut living, mut unreadable) = (Vec::new(), Vec::new());
        for name in self.names()? {
            let record = self.record(&name).transpose();
            let found = record.map(|record| record.and_then(|record| self.if_living(record)));
            match found {
                Some(Ok(Some(record))) => living.push(record),
                Some(Ok(None)) | None => {}
                Some(Err(error)) => unreadable.push(error),
            }
        }
        Ok((living, unreadable))
    }

    /// The record of `key` as it is now.
    ///
    /// # Errors
    ///
    /// Where it can't be read.
    pub fn find(&self, key: &Key) -> Result<Option<Record>, RegistryError> {
        self.record(key.file_name().as_ref())
    }

    /// The record in the file `name`; `None` where it is gone.
    fn record(&self, name: &OsStr) -> Result<Option<Record>, RegistryError> {
        let path = self.containers().join(name);
        match fs::read(&path) {
            Ok(bytes) => match serde_json::from_slice(&bytes) {
                Ok(record) => Ok(Some(lifecycle::seen(record, &mut World))),
                Err(source) => Err(RegistryError::Damaged { path, source }),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(failed("cannot read", &path)(source)),
        }
    }

    /// Every record of a container that isn't gone, for readers without the lock.
    ///
    /// # Errors
    ///
    /// As [`records`](Self::records).
    pub fn living(&self) -> Result<Vec<Record>, RegistryError> {
        let living = self.records()?.into_iter().map(|record| self.if_living(record));
        living.filter_map(Result::transpose).collect()
    }

    /// `record` as it is now; `None` where its container is gone.
    fn if_living(&self, mut record: Record) -> Result<Option<Record>, RegistryError> {
        while self.is_stale(&record) {
            // A process that has the lock may have handed it on to another holder.
            match self.find(&record.key)? {
                Some(now) if now != record => record = now,
                _ => return Ok(None),
            }
        }
        Ok(Some(record))
    }

    /// Whether nothing keeps `record` alive any more. The caller has the lock, so that no other process
    /// hands the record on to another holder; without, see [`living`](Self::living).
    #[must_use]
    pub fn is_stale(&self, record: &Record) -> bool {
        lifecycle::has_ended(record, &self.boot_id, &mut World)
    }

    /// As [`is_stale`](Self::is_stale), for what `but` holds no longer, though it lives.
    #[must_use]
    pub fn is_stale_but_for(&self, record: &Record, but: i32) -> bool {
        lifecycle::has_ended(record, &self.boot_id, &mut process_facts::Without(but))
    }
}

impl Locked<'_> {
    /// The records that `is_meant` says by short id and by what they hold; the others aren't read.
    ///
    /// # Errors
    ///
    /// Where one of them can't be read.
    pub fn records_where(
        &self,
        is_meant: impl Fn(&str, &Holding) -> bool,
    ) -> Result<Vec<Record>, RegistryError> {
        let meant = self.entries.iter().filter(|entry| is_meant(&entry.short_id, &entry.holding));
        let read = meant.map(|entry| self.registry.record(entry.file.as_ref()));
        read.filter_map(Result::transpose).collect()
    }

    #[must_use]
    pub fn registry(&self) -> &Registry {
        self.registry
    }

    /// What every registered container holds.
    pub fn holdings(&self) -> impl Iterator<Item = &Holding> + Clone {
        self.entries.iter().map(|entry| &entry.holding)
    }

    /// What they hold but for the one of `key`.
    pub fn holdings_but(&self, key: &Key) -> impl Iterator<Item = &Holding> + Clone {
        let file = key.file_name();
        let others = self.entries.iter().filter(move |entry| entry.file != file);
        others.map(|entry| &entry.holding)
    }

    /// Whether a record has that short id.
    #[must_use]
    pub fn has_short_id(&self, short_id: &str) -> bool {
        self.entries.iter().any(|entry| entry.short_id == short_id)
    }

    /// The record of `key`.
    ///
    /// # Errors
    ///
    /// Where it can't be read.
    pub fn find(&self, key: &Key) -> Result<Option<Record>, RegistryError> {
        self.registry.find(key)
    }

    /// The record of the container `id` with that bundle, whatever its root.
    ///
    /// # Errors
    ///
    /// Where a record can't be read.
    pub fn find_by_bundle(&self, bundle: &Path, id: &str) -> Result<Option<Record>, RegistryError> {
        for entry in self.entries.iter().filter(|entry| entry.holding.id == id) {
            match self.registry.record(entry.file.as_ref())? {
                Some(record) if record.bundle == bundle => return Ok(Some(record)),
                _ => {}
            }
        }
        Ok(None)
    }

    /// The record of the container that has ended and whose monitor `process` is.
    ///
    /// # Errors
    ///
    /// Where it can't be read.
    pub fn find_leaked(&self, process: ProcessId) -> Result<Option<Record>, RegistryError> {
        let its = self.entries.iter().filter(|entry| entry.life == Life::Process(process));
        for entry in its {
            let record = self.registry.record(entry.file.as_ref())?;
            if let Some(record) = record.filter(Record::is_leaked) {
                return Ok(Some(record));
            }
        }
        Ok(None)
    }

    /// Sees to it that containers whose runtime has ended are known by their own process:
    /// to look that up costs a file each.
    ///
    /// # Errors
    ///
    /// Where a record can't be read or written.
    pub fn settle(&mut self) -> Result<(), RegistryError> {
        let over = |entry: &&Entry| match &entry.life {
            Life::Launched { by, .. } => !by.alive(),
            _ => false,
        };
        let files: Vec<String> =
            self.entries.iter().filter(over).map(|entry| entry.file.clone()).collect();
        for file in files {
            if let Some(record) = self.registry.record(file.as_ref())?
                && matches!(record.holder, Holder::Active { .. })
            {
                self.put(&record)?;
            }
        }
        Ok(())
    }

    /// The records that nothing keeps alive any more.
    ///
    /// # Errors
    ///
    /// Where one of them can't be read.
    pub fn stale(&self, check: StaleCheck) -> Result<Vec<Record>, RegistryError> {
        let now_s = boot_time_s();
        let count = self.entries.len();
        // Which ones get the closer check changes from one container creation to the next.
        let first = match count {
            0 => 0,
            count => {
                let time = clock_gettime(ClockId::Monotonic);
                usize::try_from(time.tv_nsec / 1000).unwrap_or(0) % count
            }
        };
        let mut stale = Vec::new();
        for (at, entry) in self.entries.iter().enumerate() {
            let close = check == StaleCheck::Close || (at + count - first) % count < CLOSE_CHECKS;
            let suspect = match &entry.life {
                Life::Process(process) if close => !process.alive(),
                Life::Process(process) | Life::Launched { by: process, .. } => !process.pid_taken(),
                Life::Until(seconds, by) => {
                    let has_ended = |by: &ProcessId| match close {
                        true => !by.alive(),
                        false => !by.pid_taken(),
                    };
                    now_s > *seconds || by.as_ref().is_some_and(has_ended)
                }
                Life::Bundle => close,
                Life::Over => true,
            };
            if (suspect || check == StaleCheck::Close)
                && let Some(record) = self.registry.record(entry.file.as_ref())?
                && self.registry.is_stale(&record)
            {
                stale.push(record);
            }
        }
        Ok(stale)
    }

    /// Forgets what the index has of records that are there no more: they were removed manually
    /// while another process had the lock, which wrote the index after that.
    ///
    /// # Errors
    ///
    /// Where the index can't be dropped.
    pub fn forget_missing(&mut self) -> Result<(), RegistryError> {
        let containers = self.registry.containers();
        let is_missing = |entry: &Entry| {
            let meta = fs::symlink_metadata(containers.join(&entry.file));
            meta.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
        };
        if self.entries.iter().any(is_missing) {
            self.drop_index()?;
            self.entries.retain(|entry| !is_missing(entry));
            self.write_index();
        }
        Ok(())
    }

    /// Adds `record`, or puts it in the place of the one with its key.
    ///
    /// # Errors
    ///
    /// Where it can't be written; then nothing has changed.
    pub fn put(&mut self, record: &Record) -> Result<(), RegistryError> {
        self.drop_index()?;
        let path = self.registry.containers().join(record.key.file_name());
        // A bundle's path may be no UTF-8, and JSON has no other.
        let bytes = serde_json::to_vec_pretty(record)
            .map_err(|error| failed("cannot write", &path)(error.into()))?;
        self.registry.write_file(&path, &bytes, "record-written")?;
        failpoint("record-linked");
        let entry = Entry::of(record, &self.registry.boot_id);
        match self.entries.iter_mut().find(|old| old.file == entry.file) {
            Some(old) => *old = entry,
            None => self.entries.push(entry),
        }
        self.write_index();
        Ok(())
    }

    /// Removes the record of `key`; says whether there was one.
    ///
    /// # Errors
    ///
    /// Where it can't be removed.
    pub fn remove(&mut self, key: &Key) -> Result<bool, RegistryError> {
        let name = key.file_name();
        let path = self.registry.containers().join(&name);
        self.drop_index()?;
        let removed = match fs::remove_file(&path) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::NotFound => false,
            Err(source) => return Err(failed("cannot remove", &path)(source)),
        };
        failpoint("record-removed");
        self.entries.retain(|entry| entry.file != name);
        self.write_index();
        Ok(removed)
    }

    /// From here until the index is written again, the records speak for themselves.
    fn drop_index(&self) -> Result<(), RegistryError> {
        let path = self.registry.index_path();
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(failed("cannot remove", &path)(source))
            }
            _ => {
                failpoint("index-dropped");
                Ok(())
            }
        }
    }

    fn write_index(&self) {
        let Ok(stamp) = self.registry.stamp() else { return };
        let text = index::write(&stamp, &self.entries);
        // Without an index the next one reads the records: slower, and as right.
        let path = self.registry.index_path();
        let _ = self.registry.write_file(&path, text.as_bytes(), "index-written");
    }
}

impl Registry {
    /// Writes a file in one step.
    fn write_file(&self, path: &Path, bytes: &[u8], place: &str) -> Result<(), RegistryError> {
        // Only the holder of the lock writes, so that one name is enough, and what a
        // crash leaves there the next one overwrites.
        let temporary = self.dir.join("next");
        let write = || -> io::Result<()> {
            let mut options = OpenOptions::new();
            let mut file =
                options.write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
            file.write_all(bytes)?;
            failpoint(place);
            fs::rename(&temporary, path)
        };
        write().map_err(|source| {
            // The first error is the one to tell.
            let _ = fs::remove_file(&temporary);
            failed("cannot write", path)(source)
        })
    }
}

/// Makes `dir` with mode 0700, or sees that it is a directory of ours alone.
fn secure_dir(dir: &Path) -> Result<(), RegistryError> {
    match DirBuilder::new().recursive(true).mode(0o700).create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(failed("cannot make", dir)(error));
        }
        _ => {}
    }
    let meta = fs::symlink_metadata(dir).map_err(failed("cannot read", dir))?;
    trusted(dir, &meta)?;
    if meta.mode() & 0o077 != 0 {
        // `state_dir = "/run"` must not close /run to everybody else.
        for entry in fs::read_dir(dir).map_err(failed("cannot list", dir))? {
            let name = entry.map_err(failed("cannot list", dir))?.file_name();
            let name = name.to_string_lossy();
            // What is written is next to it, under a name that contains its own.
            let ours = [".json", "driver.cache"].iter().any(|of| name.contains(of));
            let ours = ours || OWN_NAMES.contains(&&*name);
            if !ours {
                return Err(RegistryError::Shared { path: dir.to_owned(), found: name.into() });
            }
        }
        fs::set_permissions(dir, Permissions::from_mode(0o700))
            .map_err(failed("cannot close", dir))?;
    }
    Ok(())
}

/// Checks that no other user can have put anything into `dir`.
fn trusted(dir: &Path, meta: &fs::Metadata) -> Result<(), RegistryError> {
    let untrusted = |reason| RegistryError::Untrusted { path: dir.to_owned(), reason };
    if meta.uid() == 0 && !geteuid().is_root() {
        return Err(RegistryError::NotRoot { path: dir.to_owned() });
    }
    if !meta.is_dir() {
        return Err(untrusted("it is no directory"));
    }
    if meta.uid() != geteuid().as_raw() {
        return Err(untrusted("it belongs to somebody else"));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
