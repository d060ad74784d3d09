//! The files of the module's procfs tree: the only place of this backend that does I/O.
//!
//! Must not know what is reserved for a container. Invariants: a read is bounded and
//! trimmed; a control word is one write(2) of exactly 13 bytes; a number counts as
//! written when it was read back.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::error::KmError;

/// Bytes of an id as the module keeps it.
const SHORT_ID_BYTES: usize = 12;

/// The highest GPU that `inst_ctl` can name: it takes one digit, and at most 8 GPUs.
const LAST_GPU: u32 = 7;

/// The longest file that is read.
const READ_LIMIT_BYTES: u64 = 64 << 10;

/// The module's procfs tree.
#[derive(Debug, Clone)]
pub(super) struct Tree {
    root: PathBuf,
}

/// A file of the tree that holds a number.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cell<'a> {
    pub(super) gpu: u32,
    /// The instance; `None` for a file of the GPU itself.
    pub(super) short_id: Option<&'a str>,
    pub(super) name: &'static str,
}

impl Tree {
    pub(super) fn new(root: PathBuf) -> Self {
        Tree { root }
    }

    /// Where it is.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// That the module is loaded.
    pub(super) fn loaded(&self) -> Result<(), KmError> {
        for path in [self.root.clone(), self.control()] {
            if !exists(&path)? {
                return Err(KmError::NotLoaded { missing: path });
            }
        }
        Ok(())
    }

    /// The GPUs that have a directory, by index.
    pub(super) fn gpus(&self) -> Result<Vec<u32>, KmError> {
        let names = directories(&self.root)?;
        // `01` is no index: the control node could not name it.
        let mut gpus: Vec<u32> = names
            .iter()
            .filter_map(|name| name.parse().ok().filter(|n: &u32| n.to_string() == *name))
            .collect();
        gpus.sort_unstable();
        Ok(gpus)
    }

    /// The instances on a GPU, by name.
    pub(super) fn instances(&self, gpu: u32) -> Result<Vec<String>, KmError> {
        let mut names = directories(&self.root.join(gpu.to_string()))?;
        names.retain(|name| name.len() == SHORT_ID_BYTES);
        names.sort_unstable();
        Ok(names)
    }

    /// Whether a GPU has this instance.
    pub(super) fn has(&self, gpu: u32, short_id: &str) -> Result<bool, KmError> {
        exists(&self.instance(gpu, short_id))
    }

    /// The GPUs that have this instance.
    pub(super) fn gpus_with(&self, short_id: &str) -> Result<Vec<u32>, KmError> {
        let mut with = Vec::new();
        for gpu in self.gpus()? {
            if self.has(gpu, short_id)? {
                with.push(gpu);
            }
        }
        Ok(with)
    }

    /// Makes an instance.
    pub(super) fn create(&self, gpu: u32, short_id: &str) -> Result<(), KmError> {
        let digit = control_digit(gpu)?;
        check_short_id(short_id)?;
        let word = format!("{digit}{short_id}");
        match self.command(&word) {
            Ok(()) => {}
            Err(source) if is(&source, Errno::NOSPC) => {
                return Err(KmError::NoSlot {
                    gpu,
                    max_inst: self.number(Cell { gpu, short_id: None, name: "max_inst" }).ok(),
                    holders: self.instances(gpu).unwrap_or_default(),
                    source,
                });
            }
            Err(source) if is(&source, Errno::INVAL) => {
                return Err(KmError::CreateRefused { gpu, short_id: short_id.to_owned(), source });
            }
            Err(source) => {
                return Err(KmError::Write { path: self.control(), written: word, source });
            }
        }
        if !self.has(gpu, short_id)? {
            return Err(KmError::NotMade { gpu, short_id: short_id.to_owned() });
        }
        // What `id` holds differs between versions: the id, or an instance number.
        read(&self.instance(gpu, short_id).join("id"))?;
        Ok(())
    }

    /// Removes an instance from every GPU; succeeds where none has it.
    pub(super) fn destroy(&self, short_id: &str) -> Result<(), KmError> {
        check_short_id(short_id)?;
        if !exists(&self.root)? {
            // The module was unloaded, and took its instances along.
            return Ok(());
        }
        let word = format!("-{short_id}");
        let written = self.command(&word);
        let gpus = self.gpus_with(short_id)?;
        match written {
            _ if gpus.is_empty() => Ok(()),
            Ok(()) => Err(KmError::NotGone { short_id: short_id.to_owned(), gpus }),
            Err(source) => Err(KmError::Write { path: self.control(), written: word, source }),
        }
    }

    /// The number a file holds.
    pub(super) fn number(&self, cell: Cell<'_>) -> Result<u64, KmError> {
        let path = self.path(cell);
        let text = read(&path)?;
        match text.parse() {
            Ok(number) => Ok(number),
            Err(_) => Err(KmError::NotNumber { path, text: text.chars().take(64).collect() }),
        }
    }

    /// Writes a number and reads it back.
    pub(super) fn put(&self, cell: Cell<'_>, wanted: u64) -> Result<(), KmError> {
        let path = self.path(cell);
        let written = wanted.to_string();
        if let Err(source) = write_once(&path, written.as_bytes()) {
            return Err(KmError::Write { path, written, source });
        }
        // The module's writers report success for a value that they did not take.
        let found = self.number(cell)?;
        if found == wanted {
            Ok(())
        } else {
            Err(KmError::NotTaken { gpu: cell.gpu, name: cell.name, found, wanted })
        }
    }

    /// Writes a number where the file holds another one, and reads it back.
    pub(super) fn ensure(&self, cell: Cell<'_>, wanted: u64) -> Result<(), KmError> {
        if self.number(cell)? == wanted { Ok(()) } else { self.put(cell, wanted) }
    }

    /// The text of an instance's `meminfo`; `None` where it is longer than we read.
    pub(super) fn meminfo(&self, gpu: u32, short_id: &str) -> Result<Option<String>, KmError> {
        match read(&self.instance(gpu, short_id).join("meminfo")) {
            Ok(text) => Ok(Some(text)),
            Err(KmError::TooLong { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn command(&self, word: &str) -> io::Result<()> {
        debug_assert_eq!(word.len(), SHORT_ID_BYTES + 1);
        write_once(&self.control(), word.as_bytes())
    }

    fn control(&self) -> PathBuf {
        self.root.join("inst_ctl")
    }

    fn instance(&self, gpu: u32, short_id: &str) -> PathBuf {
        self.root.join(gpu.to_string()).join(short_id)
    }

    fn path(&self, cell: Cell<'_>) -> PathBuf {
        let mut path = self.root.join(cell.gpu.to_string());
        path.extend(cell.short_id);
        path.join(cell.name)
    }
}

/// The GPU as the control node takes it.
pub(super) fn control_digit(gpu: u32) -> Result<u32, KmError> {
    if gpu <= LAST_GPU { Ok(gpu) } else { Err(KmError::GpuBeyond { gpu }) }
}

/// That an id can be an instance's name; it becomes a part of paths.
pub(super) fn check_short_id(short_id: &str) -> Result<(), KmError> {
    let fits = short_id.len() == SHORT_ID_BYTES
        && short_id.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/');
    if fits { Ok(()) } else { Err(KmError::ShortId { short_id: short_id.to_owned() }) }
}

fn exists(path: &Path) -> Result<bool, KmError> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(source) => Err(KmError::Read { path: path.to_owned(), source }),
    }
}

fn directories(path: &Path) -> Result<Vec<String>, KmError> {
    let failed = |source| KmError::Read { path: path.to_owned(), source };
    let mut names = Vec::new();
    for entry in fs::read_dir(path).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if let Some(name) = entry.file_name().to_str()
            && entry.file_type().map_err(failed)?.is_dir()
        {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

fn read(path: &Path) -> Result<String, KmError> {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(READ_LIMIT_BYTES + 1).read_to_end(&mut bytes))
        .map_err(|source| KmError::Read { path: path.to_owned(), source })?;
    // A `usize` is at most 64 bits wide here, so nothing is lost.
    if bytes.len() as u64 > READ_LIMIT_BYTES {
        return Err(KmError::TooLong { path: path.to_owned(), limit_bytes: READ_LIMIT_BYTES });
    }
    Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// One write(2): the module takes each as a value or command of its own, so a second
/// one with "the rest" would be another command.
fn write_once(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).open(path)?;
    let taken = loop {
        match file.write(bytes) {
            // Nothing was taken yet.
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            other => break other?,
        }
    };
    if taken == bytes.len() {
        Ok(())
    } else {
        Err(io::Error::new(
            ErrorKind::WriteZero,
            format!("{taken} of {} bytes were taken", bytes.len()),
        ))
    }
}

fn is(error: &io::Error, errno: Errno) -> bool {
    Errno::from_io_error(error) == Some(errno)
}
