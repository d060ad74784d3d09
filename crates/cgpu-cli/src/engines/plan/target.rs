//! Which file of an engine gets our runtime. Pure.

use std::path::{Path, PathBuf};

use super::Request;
use super::parsed_files::{ParsedFile, ParsedFiles};
use crate::engines::Kind;
use crate::engines::config_text::Format;
use crate::engines::containerd::{Reading, imports};
use crate::engines::distributions::{k0s, template};

pub(super) enum Target {
    /// A file of the engine's format.
    File(PathBuf, Format),
    /// The template of such a file, for a distribution of Kubernetes; the format is that file's.
    Template(PathBuf, Format),
}

/// The file to edit: the file that has our runtime; else ours in the engine's directory; else
/// containerd's file whose section counts; else the engine's own.
pub(super) fn target(request: &Request, parsed: &ParsedFiles) -> Target {
    let kind = request.kind;
    let editable = |file: &&ParsedFile| is_editable(kind, &file.path);
    if let Some(file) = parsed.files.iter().filter(editable).rfind(|file| file.config.runtime) {
        return Target::File(file.path.clone(), file.format);
    }
    match kind {
        Kind::Docker => own_target(request, parsed, Format::Docker),
        Kind::Crio => own_target(request, parsed, Format::Crio),
        Kind::Podman => own_target(request, parsed, Format::Podman),
        _ => containerd_target(request, parsed),
    }
}

/// Ours in the engine's directory, else the engine's own file.
fn own_target(request: &Request, parsed: &ParsedFiles, format: Format) -> Target {
    let drop_in = request.kind.installation().drop_in.filter(|_| request.file.is_none());
    Target::File(drop_in.map_or(parsed.main.clone(), PathBuf::from), format)
}

/// Ours among the imported files if containerd merges them, else the file whose section counts.
fn containerd_target(request: &Request, parsed: &ParsedFiles) -> Target {
    let kind = request.kind;
    let main = parsed.files.iter().find(|file| file.path == parsed.main);
    let reading = parsed.reading;
    // Every containerd reads version 2; from 2.0 on it warns of it.
    let newest = if reading.merges() { 3 } else { 2 };
    let format = match main {
        Some(main) => main.format,
        None => Format::Containerd { version: newest, reading },
    };
    let text = main.map_or("", |main| main.original.text.as_str());
    let imported = imports::imported_drop_in(&parsed.main, text, request.release);
    let imported = imported.filter(|path| is_editable(kind, path));
    if let (true, Some(drop_in)) = (reading.merges(), &imported) {
        // The last declared version decides how all files are read: it must not change.
        let format = match reading {
            Reading::Two { older } => {
                Format::Containerd { version: if older { 2 } else { 3 }, reading }
            }
            _ => format,
        };
        return Target::File(drop_in.clone(), format);
    }
    if let Some(target) = distribution_target(request, parsed, text, format) {
        return target;
    }
    // containerd 1 takes this part of the last file that has it.
    let mut sections = parsed
        .files
        .iter()
        .filter(|file| is_editable(kind, &file.path))
        .filter(|file| file.config.section);
    if let (false, Some(file)) = (reading.merges(), sections.next_back()) {
        return Target::File(file.path.clone(), file.format);
    }
    Target::File(imported.unwrap_or_else(|| parsed.main.clone()), format)
}

/// What k0s merges, or the template from which k3s and RKE2 make their file; `text` is that of
/// the main file.
fn distribution_target(
    request: &Request,
    parsed: &ParsedFiles,
    text: &str,
    format: Format,
) -> Option<Target> {
    match (request.kind, format) {
        (Kind::K0s, _) if request.file.is_none() && k0s::is_managed(text) => {
            let version = k0s::drop_in_version(request.release);
            let format = Format::Containerd { version, reading: parsed.reading };
            Some(Target::File(k0s::drop_in(), format))
        }
        (Kind::K3s | Kind::Rke2, Format::Containerd { version, .. }) => {
            let path = parsed.main.with_file_name(template::name(version));
            Some(Target::Template(path, format))
        }
        _ => None,
    }
}

/// Whether a file may be edited: a distribution's own files are replaced by its updates, and
/// what lies in /run is written at each start.
pub(super) fn is_editable(kind: Kind, path: &Path) -> bool {
    let generated =
        matches!(kind, Kind::K3s | Kind::Rke2) && path == Path::new(kind.installation().main_file);
    !path.starts_with("/usr") && !path.starts_with("/run") && !generated
}
