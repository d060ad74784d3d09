//! The driver as a CDI specification on this host describes it (Container Device Interface).
//!
//! Owns specifications: reading them ([`dirs`], [`parser`], retained by a cache), finding a GPU's device
//! in them ([`choose()`]), what of them reaches a container ([`merger`]), reporting what is stale
//! ([`stale()`]), and writing one ([`generator`]). Must not know quotas or the caller. Invariants: no
//! node of a GPU that wasn't asked for is ever in the edits; nothing is left out in silence.

mod cache;
pub mod device_choice;
pub mod dirs;
pub mod generator;
mod listing;
pub mod merger;
mod node_kind;
pub mod parser;
pub mod spec;
pub mod staleness;
pub mod validation;
pub mod yaml;

#[cfg(test)]
mod fixture;

use std::fmt;
use std::path::{Path, PathBuf};

use thiserror::Error;
use tracing::warn;

use crate::bundle::Edits;
use cgpu_core::plan::PlannedGpu;
use device_choice::{ChoiceError, Devices, choose, common};
use dirs::{Content, DIRECTORIES, KIND, Source};
use merger::{Collected, LeftOut, Unsupported};
use spec::Specification;
use staleness::{Stale, lookup};

pub use listing::{DeviceState, State};
pub use staleness::HostFacts;

/// A GPU, or a MIG device of it, that a container is to have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// The GPU's index.
    pub index: u32,
    pub uuid: String,
    /// Minor number of its node.
    pub minor: u32,
    /// The MIG device; `None` for the GPU itself.
    pub mig: Option<WantedMig>,
}

/// A MIG device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedMig {
    /// Its index within its GPU.
    pub index: u32,
    pub uuid: String,
}

impl From<&PlannedGpu> for Wanted {
    fn from(gpu: &PlannedGpu) -> Self {
        let mig = gpu.mig.as_ref();
        Wanted {
            index: gpu.index,
            uuid: gpu.uuid.clone(),
            minor: gpu.minor,
            mig: mig.map(|mig| WantedMig { index: mig.index, uuid: mig.uuid.clone() }),
        }
    }
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.mig {
            None => write!(f, "GPU {} ({})", self.index, self.uuid),
            Some(mig) => write!(f, "MIG device {}:{} ({})", self.index, mig.index, mig.uuid),
        }
    }
}

/// What specifications give a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CdiEdits {
    /// What changes in its bundle; `withheld` and `hooks` are for others to fill.
    pub edits: Edits,
    /// The devices that it is by, in the order of the GPUs' files.
    pub devices: Vec<String>,
    /// Their files.
    pub files: Vec<PathBuf>,
    /// What of them it doesn't get.
    pub left_out: Vec<LeftOut>,
}

/// Why specifications don't give what is wanted.
#[derive(Debug, Error)]
pub enum CdiError {
    /// There is none: for a caller that accepts nothing else, since [`Specifications::edits_for`] says `None`.
    #[error(
        "no CDI specification of {KIND} in {}; {}", listed(directories), remedy(&[])
    )]
    NoSpecification {
        /// Where they were searched for.
        directories: Vec<PathBuf>,
    },
    /// No device is it, or one that isn't to be had.
    #[error("{source}{}; {}", unusable.as_deref().unwrap_or_default(), remedy(files))]
    NotFound {
        /// What is missing.
        source: Box<ChoiceError>,
        /// A file that can't be used and might have had it, as a clause of a sentence.
        unusable: Option<String>,
        /// Those that should have it.
        files: Vec<PathBuf>,
    },
    /// Two files say what a device is.
    #[error(transparent)]
    Conflict(ChoiceError),
    /// There are files, and none can be used.
    #[error("{}: {why}; {}", file.display(), remedy(std::slice::from_ref(file)))]
    Unusable {
        /// The first of them.
        file: PathBuf,
        /// Why it can't.
        why: String,
    },
    /// We can't do what a specification asks for.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// What a specification says is no longer so.
    #[error("{first}{}; {}", more_text(*more), remedy(&[first.file().to_owned()]))]
    Stale {
        /// What explains most.
        first: Stale,
        /// How much else is no longer so.
        more: usize,
    },
}

fn listed(directories: &[PathBuf]) -> String {
    let names: Vec<_> = directories.iter().map(|path| path.display().to_string()).collect();
    names.join(" or ")
}

/// How a specification is written.
fn remedy(files: &[PathBuf]) -> String {
    let default = Path::new(DIRECTORIES[0]).join("nvidia.yaml");
    let again = if files.is_empty() { "write one" } else { "write it again" };
    let file = files.first().unwrap_or(&default).display();
    format!(
        "{again}: `cgpu cdi generate --output {file}` or `nvidia-ctk cdi generate --output={file}`"
    )
}

fn more_text(more: usize) -> String {
    if more == 0 { String::new() } else { format!(" (and {more} more of the kind)") }
}

/// The specifications of a host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Specifications {
    sources: Vec<Source>,
}

impl Specifications {
    /// Those in `directories`, the last of which has precedence: as `cache` has them, or read and
    /// then kept there. Never an error: what can't be read matters where it is needed.
    #[must_use]
    pub fn load(directories: &[PathBuf], cache: Option<&Path>) -> Self {
        let listings = dirs::list(directories);
        // Where there are none, there is nothing to keep.
        let cache = cache.filter(|_| listings.iter().any(|listing| !listing.files.is_empty()));
        if let Some(sources) = cache.and_then(|path| cache::read(path, &listings)) {
            return Self { sources };
        }
        let sources = dirs::read(&listings);
        if let Some(path) = cache
            && let Err(error) = cache::write(path, &listings, &sources)
        {
            let error: &dyn std::error::Error = &error;
            warn!(error, "CDI specifications are not kept");
        }
        Self { sources }
    }

    /// One alone, as if read from `file`.
    #[must_use]
    pub fn of(file: PathBuf, specification: Specification) -> Self {
        let content = Content::Specification(Box::new(specification));
        Self { sources: vec![Source { file, precedence: 0, content }] }
    }

    /// The directories that engines read.
    #[must_use]
    pub fn directories() -> Vec<PathBuf> {
        DIRECTORIES.map(PathBuf::from).to_vec()
    }

    /// The edits for a container that is to have all of `wanted`, the files alone where that is
    /// nothing; `None` where no specification is about NVIDIA's GPUs, nor a file that might be.
    ///
    /// # Errors
    ///
    /// Where there are some that don't have one of them, are stale, or ask for what we can't do.
    pub fn edits_for(
        &self,
        wanted: &[Wanted],
        host: &HostFacts,
    ) -> Result<Option<CdiEdits>, CdiError> {
        let devices = Devices::of(&self.sources);
        if devices.is_empty() {
            return match self.unusable().next() {
                None => Ok(None),
                Some((file, why)) => {
                    Err(CdiError::Unusable { file: file.to_owned(), why: why.to_owned() })
                }
            };
        }
        let parts = match wanted {
            [] => common(&devices),
            _ => choose(&devices, wanted).map_err(|source| self.not_found(source))?,
        };
        let gpus = wanted.iter().map(|wanted| i64::from(wanted.minor));
        let collected = Collected::of(&parts, gpus)?;
        let seen = lookup(&collected, host).map_err(stale)?;
        let (edits, left_out) = collected.edits(&seen);
        let names = parts.iter().flat_map(|part| &part.devices);
        Ok(Some(CdiEdits {
            edits,
            devices: names.map(|device| format!("{KIND}={}", device.name)).collect(),
            files: parts.iter().map(|part| part.file.to_owned()).collect(),
            left_out,
        }))
    }

    /// The files that can't be used, each with the reason.
    pub fn unusable(&self) -> impl Iterator<Item = (&Path, &str)> {
        self.sources.iter().filter_map(|source| match &source.content {
            Content::Unusable(why) => Some((source.file.as_path(), why.as_str())),
            Content::Specification(_) => None,
        })
    }

    fn not_found(&self, source: ChoiceError) -> CdiError {
        let files = match &source {
            ChoiceError::Missing { files, .. } => files.clone(),
            ChoiceError::Another { file, .. } => vec![file.clone()],
            ChoiceError::Conflict { .. } => return CdiError::Conflict(source),
        };
        let clause =
            |(file, why): (&Path, &str)| format!("; {} can't be used: {why}", file.display());
        let source = Box::new(source);
        CdiError::NotFound { source, unusable: self.unusable().next().map(clause), files }
    }
}

/// What is reported of several things that are no longer so.
fn stale(mut found: Vec<Stale>) -> CdiError {
    let more = found.len().saturating_sub(1);
    CdiError::Stale { first: found.swap_remove(0), more }
}

#[cfg(test)]
mod tests;
