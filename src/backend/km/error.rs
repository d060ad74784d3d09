//! What can go wrong with the vendor's module, in sentences a user can act on.
//!
//! Sizes are in MiB where a person compares them, in bytes where they are what was
//! written to the module. The errno is the `source`; the sentence does not repeat it.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;

use thiserror::Error;

use cgpu_core::units::{MIB, bytes_to_mib};

/// What went wrong with the module.
#[derive(Debug, Error)]
pub enum KmError {
    /// The tree or its control node is not there.
    #[error(
        "the vendor's module is not loaded: {} does not exist; load it by `modprobe cgpu_procfs` \
         and `modprobe cgpu_km`, or configure another backend", .missing.display()
    )]
    NotLoaded {
        /// What is missing.
        missing: PathBuf,
    },

    /// A short id the control node can't take.
    #[error(
        "{short_id:?} can't name an instance of the module; it takes 12 printable ASCII \
         characters without a slash"
    )]
    ShortId {
        /// The id as it came.
        short_id: String,
    },

    /// A GPU the control node can't name.
    #[error(
        "GPU {gpu} is beyond the module, whose control node takes GPUs 0 to 7; \
         give the container another GPU, or configure another backend"
    )]
    GpuBeyond {
        /// Index of the GPU.
        gpu: u32,
    },

    /// A GPU the module does not know.
    #[error(
        "GPU {gpu} is unknown to the module, which has {}; give the container another GPU, \
         or load the module anew", list("GPU", .present)
    )]
    NoGpu {
        /// Index of the GPU.
        gpu: u32,
        /// The GPUs it has.
        present: Vec<u32>,
    },

    /// A quota of no bytes, which the module might read as no quota.
    #[error("the quota on GPU {gpu} is 0 bytes; ask for 1 MiB at least")]
    EmptyQuota {
        /// Index of the GPU.
        gpu: u32,
    },

    /// The GPU's weights are given out.
    #[error(
        "GPU {gpu} has a weight of {free} left, {}; this container asks for {wanted}: \
         lower ALIYUN_COM_GPU_SCHD_WEIGHT, or stop one of them",
        held_by(.holders)
    )]
    NoWeight {
        /// Index of the GPU.
        gpu: u32,
        /// What can be given.
        free: u64,
        /// What was asked for.
        wanted: u32,
        /// The instances on the GPU.
        holders: Vec<String>,
    },

    /// The GPU holds as many containers as it may.
    #[error(
        "GPU {gpu} has no free slot (max_inst {}), {}; stop one of them, or take another GPU",
        .max_inst.map_or_else(|| "unknown".to_owned(), |n| n.to_string()), held_by(.holders)
    )]
    NoSlot {
        /// Index of the GPU.
        gpu: u32,
        /// The GPU's `max_inst`, where it could be read.
        max_inst: Option<u64>,
        /// The instances on the GPU.
        holders: Vec<String>,
        /// ENOSPC.
        source: io::Error,
    },

    /// The module does not understand the control word.
    #[error(
        "the module refuses to make instance {short_id} on GPU {gpu} as invalid; see the kernel \
         log, and whether cgpu knows this version of the module"
    )]
    CreateRefused {
        /// Index of the GPU.
        gpu: u32,
        /// The instance.
        short_id: String,
        /// EINVAL.
        source: io::Error,
    },

    /// A create that made nothing.
    #[error(
        "the module reported success, but made no instance {short_id} on GPU {gpu}; \
         see the kernel log"
    )]
    NotMade {
        /// Index of the GPU.
        gpu: u32,
        /// The instance.
        short_id: String,
    },

    /// A destroy that left something.
    #[error(
        "the module reported success, but instance {short_id} is still on {}; \
         see the kernel log", list("GPU", .gpus)
    )]
    NotGone {
        /// The instance.
        short_id: String,
        /// Where it still is.
        gpus: Vec<u32>,
    },

    /// A write that did not take.
    #[error(
        "the module reported success, but {name} of GPU {gpu} is {found}, not {wanted}; \
         see the kernel log"
    )]
    NotTaken {
        /// Index of the GPU.
        gpu: u32,
        /// The file.
        name: &'static str,
        /// What it reads.
        found: u64,
        /// What was written.
        wanted: u64,
    },

    /// A change to a container the module does not hold on that GPU.
    #[error(
        "the module has no instance {short_id} on GPU {gpu}; the container has ended, or has \
         no quota there"
    )]
    NoInstance {
        /// Index of the GPU.
        gpu: u32,
        /// The instance.
        short_id: String,
    },

    /// A change to a container that has its GPUs as a whole.
    #[error(
        "{short_id} has no GPU under a quota, so its weight and priority can't be changed; \
         create it anew with a quota"
    )]
    NoQuota { short_id: String },

    /// A quota below what is in use.
    #[error(
        "{short_id} uses {} MiB of GPU {gpu}, more than the {} MiB it is to have; \
         free memory in the container first", .used_bytes.div_ceil(MIB), bytes_to_mib(*.wanted_bytes)
    )]
    InUse {
        /// Index of the GPU.
        gpu: u32,
        /// The instance.
        short_id: String,
        /// What its processes hold.
        used_bytes: u64,
        /// The quota asked for.
        wanted_bytes: u64,
    },

    /// A file that should hold a number.
    #[error(
        "{} reads {text:?} where a number was expected; see whether cgpu knows this version \
         of the module", .path.display()
    )]
    NotNumber {
        path: PathBuf,
        /// Its start.
        text: String,
    },

    /// A file longer than any of the module's.
    #[error("{} is longer than {limit_bytes} bytes; this is not the module's", .path.display())]
    TooLong {
        path: PathBuf,
        /// How much is read at most.
        limit_bytes: u64,
    },

    /// A file or directory of the tree that can't be read.
    #[error("can't read {} of the vendor's module", .path.display())]
    Read { path: PathBuf, source: io::Error },

    /// A file of the tree that can't be written.
    #[error("can't write {written:?} to {} of the vendor's module", .path.display())]
    Write {
        path: PathBuf,
        /// What was to be written.
        written: String,
        source: io::Error,
    },

    /// A failure whose traces could not be removed either.
    #[error(transparent)]
    NotUndone(Box<NotUndone>),
}

impl KmError {
    /// This error, with what went wrong when its traces were removed.
    pub(super) fn and_undo(self, failures: Vec<KmError>) -> KmError {
        if failures.is_empty() {
            return self;
        }
        KmError::NotUndone(Box::new(NotUndone { first: self, failures }))
    }

    /// The errno at the bottom, where there is one.
    pub fn errno(&self) -> Option<i32> {
        let mut source = self.source();
        while let Some(error) = source {
            if let Some(io) = error.downcast_ref::<io::Error>() {
                return io.raw_os_error();
            }
            source = error.source();
        }
        None
    }
}

/// An error that could not be undone; it reads and has the source of the first one.
#[derive(Debug)]
pub struct NotUndone {
    /// What went wrong first.
    pub first: KmError,
    /// What went wrong in undoing it; never empty.
    pub failures: Vec<KmError>,
}

impl fmt::Display for NotUndone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; and it could not be undone: ", self.first)?;
        for (n, failure) in self.failures.iter().enumerate() {
            if n > 0 {
                f.write_str("; ")?;
            }
            // Only the first error's source is reachable through `source`.
            write!(f, "{failure}")?;
            if let Some(source) = failure.source() {
                write!(f, " ({source})")?;
            }
        }
        Ok(())
    }
}

impl Error for NotUndone {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.first.source()
    }
}

fn held_by(holders: &[String]) -> String {
    if holders.is_empty() {
        "held by no instance that the module shows".to_owned()
    } else {
        format!("held by {}", holders.join(", "))
    }
}

fn list(noun: &str, gpus: &[u32]) -> String {
    let indices: Vec<String> = gpus.iter().map(u32::to_string).collect();
    match indices.as_slice() {
        [] => format!("no {noun}"),
        [one] => format!("{noun} {one}"),
        many => format!("{noun}s {}", many.join(", ")),
    }
}
