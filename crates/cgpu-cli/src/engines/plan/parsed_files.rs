//! The existing files of one engine: read, parsed, and refused if another program writes them.

use std::path::{Path, PathBuf};

use super::{PlanError, Request};
use crate::engines::config_file::{self, Original};
use crate::engines::config_text::{self, EditError, Format, ParsedConfig};
use crate::engines::containerd::{File, Reading, imports, merged_config};
use crate::engines::host_tree::Tree;
use crate::engines::{Kind, distributions, installation, toml_values};

pub(super) struct ParsedFile {
    pub(super) path: PathBuf,
    pub(super) format: Format,
    pub(super) original: Original,
    pub(super) config: ParsedConfig,
}

/// The engine's existing files.
pub(super) struct ParsedFiles {
    pub(super) main: PathBuf,
    pub(super) files: Vec<ParsedFile>,
    /// Of containerd: how they are read, and the merged result.
    pub(super) reading: Reading,
    pub(super) effective: toml::Table,
}

/// Reads and parses the existing files.
pub(super) fn parse_files(tree: &Tree, request: &Request) -> Result<ParsedFiles, PlanError> {
    let main = request.file.clone().unwrap_or_else(|| request.kind.installation().main_file.into());
    let mut read = Vec::new();
    for path in paths(tree, request, None) {
        let Some(original) = config_file::read(&tree.at(&path), &path)? else { continue };
        if request.kind == Kind::Containerd {
            refuse_generated(&path, &original.text)?;
        }
        read.push((path, original));
    }
    let edit_error = |path: &Path, source| PlanError::Edit { path: path.to_owned(), source };
    let mut tables = Vec::new();
    if request.kind.is_containerd() {
        for (path, original) in &read {
            let text = distributions::with_values(request.kind, &original.text);
            let syntax = |why| edit_error(path, EditError::Syntax { why });
            tables.push(toml_values::parse(&text).map_err(syntax)?);
        }
    }
    let files: Vec<File<'_>> = tables.iter().map(File::of).collect();
    let declared: Vec<Option<i64>> = files.iter().map(|file| file.version).collect();
    let reading = Reading::of(request.release, &declared);
    let versions = merged_config::versions(&files, reading);
    let effective = merged_config::effective(&files, reading);
    let mut parsed = Vec::new();
    for (position, (path, original)) in read.into_iter().enumerate() {
        let format = match request.kind {
            Kind::Docker => Format::Docker,
            Kind::Crio => Format::Crio,
            Kind::Podman => Format::Podman,
            _ => Format::Containerd { version: versions[position], reading },
        };
        let config =
            config_text::read(format, &original.text).map_err(|why| edit_error(&path, why))?;
        parsed.push(ParsedFile { path, format, original, config });
    }
    Ok(ParsedFiles { main, files: parsed, reading, effective })
}

/// The files that the engine reads, whether they exist or not; `also` among them.
pub(super) fn paths(tree: &Tree, request: &Request, also: Option<&Path>) -> Vec<PathBuf> {
    match (&request.file, request.kind) {
        (None, kind) => installation::files(tree, kind, request.release, also),
        (Some(file), kind) if kind.is_containerd() => {
            imports::files(tree, file, request.release, also)
        }
        (Some(file), _) => vec![file.clone()],
    }
}

/// Refuses a file that its program rewrites at each start.
fn refuse_generated(path: &Path, text: &str) -> Result<(), PlanError> {
    if distributions::is_template(text) {
        return Err(PlanError::Template { path: path.to_owned() });
    }
    match distributions::generated_by(text) {
        None => Ok(()),
        Some(by) => Err(PlanError::Generated { path: path.to_owned(), by: by.to_owned() }),
    }
}
