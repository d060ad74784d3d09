//! What containerd itself makes of its files: `containerd config dump`.

use std::path::Path;
use std::time::Duration;

use thiserror::Error;
use toml::Table;

use super::child_output::{said, version_of};
use super::containerd::{Release, amiss};

/// How long it may take; some hundredths of a second are usual.
const LIMIT: Duration = Duration::from_secs(30);

/// Most bytes of a dump; some thousands are usual.
const BYTES_MAX: u64 = 1 << 20;

/// Why a containerd's word isn't known.
#[derive(Debug, Error)]
pub enum DumpError {
    /// It can't be asked.
    #[error("`{program} --config {file} config dump` says nothing: {why}")]
    Silent {
        /// The program.
        program: String,
        /// Its main file.
        file: String,
        /// Why.
        why: String,
    },
    /// It makes something else of the files.
    #[error(
        "containerd makes something else of {file}: by `{program} config dump` {amiss}; all files \
         are as they were"
    )]
    Amiss {
        /// The program.
        program: String,
        /// Its main file.
        file: String,
        /// What is wrong: the rest of a sentence.
        amiss: String,
    },
}

/// The release of the containerd at `program`, by its own word.
#[must_use]
pub fn release(program: &Path) -> Option<Release> {
    Release::of(&version_of(program).ok()?)
}

/// Whether the containerd at `program` starts with its file at `main` and runs our runtime by
/// the path `runtime`; as its default one, where that is asked for.
///
/// # Errors
///
/// Where it can't be asked, or says something else.
pub fn check(program: &Path, main: &Path, runtime: &Path, default: bool) -> Result<(), DumpError> {
    let file = main.display().to_string();
    let program_name = program.display().to_string();
    let silent =
        |why: String| DumpError::Silent { program: program_name.clone(), file: file.clone(), why };
    let words = ["--config", &file, "config", "dump"];
    let printed = said(program, &words, BYTES_MAX, LIMIT).map_err(silent)?;
    let dumped: Table = String::from_utf8_lossy(&printed)
        .parse()
        .map_err(|error: toml::de::Error| silent(error.message().to_owned()))?;
    match amiss(&dumped, runtime, default) {
        None => Ok(()),
        Some(amiss) => Err(DumpError::Amiss { program: program_name, file, amiss }),
    }
}
