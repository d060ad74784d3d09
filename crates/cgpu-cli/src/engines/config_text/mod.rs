//! Edits the text of an engine's configuration: adds the runtime `cgpu`, or removes it. Pure:
//! text in, text out.
//!
//! Owns what `cgpu setup` writes. Everything else in the text stays as it is, to the byte:
//! order, comments, spaces. A text that can't be parsed, or whose runtime `cgpu` runs
//! another program, is refused. Each edit is checked before it is handed out: without what
//! is ours, the new text means what the old one means.

use thiserror::Error;

use super::containerd::{Reading, cri_table};
use super::docker::daemon_json;
pub use super::runtime_name::NAME;
use super::runtime_name::is_ours_by_default;
use super::runtime_syntax::Layout;
use super::toml_tables;
use super::{crio, podman};

/// The first line of a file that setup makes, if the format has comments.
pub const HEADER: &str = "# Made by `cgpu setup`; `cgpu setup … --remove` takes it away.\n";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// docker's `daemon.json`.
    Docker,
    /// containerd's `config.toml`.
    Containerd {
        /// Of the file, or of the one that imports it: 1 to 4.
        version: i64,
        reading: Reading,
    },
    /// CRI-O's `crio.conf`.
    Crio,
    /// podman's `containers.conf`.
    Podman,
}

/// The requested change of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeRequest<'a> {
    /// The engine has our runtime.
    Add {
        program: &'a str,
        /// Whether containers that name no runtime get it.
        default: bool,
        /// Of containerd and CRI-O: the table of the runtime that ours is to be like, as TOML; an
        /// empty text if there is none.
        model: &'a str,
        /// Of containerd: whether other files' runtimes are merged with this one's, so that only ours
        /// is to be named here.
        merged: bool,
    },
    /// It has it no longer.
    Remove {
        /// The text before setup's last edit, whose default runtime is restored if the
        /// default is ours now.
        former: Option<&'a str>,
    },
}

/// Why a text isn't edited.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum EditError {
    #[error("can't be read: {why}; correct it first")]
    Syntax { why: String },
    /// A key holds another kind of value than the engine expects.
    #[error("has no table at {key}; correct it first")]
    NotATable {
        /// The key, with its parents.
        key: String,
    },
    /// Readers differ in which of the two counts.
    #[error("has {key} twice; remove one of them first")]
    Twice { key: String },
    #[error(
        "has a runtime `cgpu` that runs {program}, not cgpu-runtime; rename or remove it first"
    )]
    Taken { program: String },
    #[error("has version {version}, and setup knows versions 1 to 4; add the runtime manually")]
    Version { version: i64 },
    /// The edit would change something else, or not do what it should.
    #[error("is written in a way that setup can't edit safely; make the change manually")]
    Unsafe,
}

/// What a text has of our runtime.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParsedConfig {
    /// Whether it has the runtime `cgpu`, and it is ours.
    pub runtime: bool,
    /// The program of that runtime.
    pub program: Option<String>,
    /// The default runtime that it names.
    pub default: Option<String>,
    /// Whether it configures the part of the engine that has the runtimes: of an imported
    /// file and its importer, containerd 1 reads that part of one only.
    pub section: bool,
}

impl ParsedConfig {
    /// Whether the default runtime is ours.
    #[must_use]
    pub fn is_default(&self) -> bool {
        self.default.as_deref().is_some_and(is_ours_by_default)
    }
}

/// What `text` has of our runtime.
///
/// # Errors
///
/// If it can't be parsed, or has a runtime `cgpu` that isn't ours.
pub fn read(format: Format, text: &str) -> Result<ParsedConfig, EditError> {
    match format {
        Format::Docker => daemon_json::read(text),
        _ => toml_tables::read_all(&layouts(format)?, text),
    }
}

/// `text` with the requested change; the same text if it needs none. An empty text is an
/// empty file, or none.
///
/// # Errors
///
/// If it can't be parsed, has a runtime `cgpu` that isn't ours, or can't be edited
/// without changing more.
pub fn edit(format: Format, text: &str, requested: ChangeRequest<'_>) -> Result<String, EditError> {
    read(format, text)?;
    let edited = match (format, requested) {
        (Format::Docker, _) => daemon_json::edit(text, requested)?,
        (_, ChangeRequest::Add { .. }) => in_each(&layouts(format)?, text, requested)?,
        // Sections of other versions are not read by containerd, but may be ours as well.
        (_, ChangeRequest::Remove { .. }) => in_each(&all_layouts(format)?, text, requested)?,
    };
    let is_done = |parsed: &ParsedConfig| match requested {
        ChangeRequest::Add { default, .. } => parsed.runtime && (!default || parsed.is_default()),
        ChangeRequest::Remove { .. } => !parsed.runtime && !parsed.is_default(),
    };
    let parsed: Result<Vec<ParsedConfig>, EditError> = match format {
        Format::Docker => daemon_json::read(&edited).map(|parsed| vec![parsed]),
        _ => layouts(format)?.iter().map(|layout| toml_tables::read(layout, &edited)).collect(),
    };
    let done = parsed.map_err(|_| EditError::Unsafe)?.iter().all(is_done);
    match done {
        true => Ok(edited),
        false => Err(EditError::Unsafe),
    }
}

/// The places in which an engine reads our runtime: all of them name it. docker's are JSON.
fn layouts(format: Format) -> Result<Vec<Layout>, EditError> {
    Ok(match format {
        Format::Containerd { version, reading } => cri_table::layouts(version, reading)?,
        Format::Crio => vec![crio::layout()],
        Format::Podman => vec![podman::layout()],
        Format::Docker => Vec::new(),
    })
}

/// All places that may have our runtime, whether the engine reads them or not.
fn all_layouts(format: Format) -> Result<Vec<Layout>, EditError> {
    match format {
        Format::Containerd { .. } => Ok(cri_table::all_layouts()),
        _ => layouts(format),
    }
}

fn in_each(
    layouts: &[Layout],
    text: &str,
    requested: ChangeRequest<'_>,
) -> Result<String, EditError> {
    layouts.iter().try_fold(text.to_owned(), |text, layout| {
        // A section that has nothing of ours is left alone.
        let is_ours = || {
            toml_tables::read(layout, &text)
                .is_ok_and(|parsed| parsed.runtime || parsed.is_default())
        };
        match requested {
            ChangeRequest::Remove { .. } if !is_ours() => Ok(text),
            _ => toml_tables::edit(layout, &text, requested),
        }
    })
}

/// Whether a text configures nothing: it has no key but containerd's version.
#[must_use]
pub fn is_bare(format: Format, text: &str) -> bool {
    match format {
        Format::Docker => daemon_json::is_bare(text),
        _ => toml_tables::is_bare(text),
    }
}

/// Whether a former default can be restored: `configured` has the file's runtimes.
pub(super) fn is_restorable(default: &str, configured: impl Fn(&str) -> bool) -> bool {
    // Engines have these without configuration; the reader of a template fills in its variables.
    ["runc", "crun", "io.containerd.runc.v2"].contains(&default)
        || default.starts_with("${")
        || configured(default)
}

/// A parser's message without its line ends.
pub(super) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// New lines end as the old ones do.
pub(super) fn with_line_ends_of(old: &str, new: String) -> String {
    let lines = old.matches('\n').count();
    match lines > 0 && old.matches("\r\n").count() == lines {
        true => new.replace("\r\n", "\n").replace('\n', "\r\n"),
        false => new,
    }
}

#[cfg(test)]
pub(super) mod fixtures;
#[cfg(test)]
mod tests;
