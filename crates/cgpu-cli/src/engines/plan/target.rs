//! Which file of an engine gets our runtime. Pure.

use std::path::{Path, PathBuf};

use super::Request;
use super::parsed_files::{Before, Known};
use crate::engines::Kind;
use crate::engines::config_text::Format;
use crate::engines::containerd::{Reading, imports};
use crate::engines::distributions::{k0s, template};

/// What is to be edited.
pub(super) enum Target {
    /// A file of the engine's format.
    File(PathBuf, Format),
    /// What a distribution of Kubernetes makes such a file from; the format is that file's.
    Template(PathBuf, Format),
}

/// What is to be edited: the file that has our runtime; else ours in the engine's directory; else
/// the one whose section counts, of containerd's; else the engine's own.
pub(super) fn target(request: &Request, before: &Before) -> Target {
    let kind = request.kind;
    let editable = |file: &&Known| is_editable(kind, &file.path);
    if let Some(file) = before.files.iter().filter(editable).rfind(|file| file.said.runtime) {
        return Target::File(file.path.clone(), file.format);
    }
    match kind {
        Kind::Docker => own_target(request, before, Format::Docker),
        Kind::Crio => own_target(request, before, Format::Crio),
        Kind::Podman => own_target(request, before, Format::Podman),
        _ => containerd_target(request, before),
    }
}

/// Ours in the engine's directory, else the engine's own file.
fn own_target(request: &Request, before: &Before, format: Format) -> Target {
    let drop_in = request.kind.installation().drop_in.filter(|_| request.file.is_none());
    Target::File(drop_in.map_or(before.main.clone(), PathBuf::from), format)
}

/// Ours among the imported files if containerd merges them, else the file whose section counts.
fn containerd_target(request: &Request, before: &Before) -> Target {
    let kind = request.kind;
    let main = before.files.iter().find(|file| file.path == before.main);
    let reading = before.reading;
    // Every containerd reads version 2; from 2.0 on it warns of it.
    let newest = if reading.merges() { 3 } else { 2 };
    let format = match main {
        Some(main) => main.format,
        None => Format::Containerd { version: newest, reading },
    };
    let text = main.map_or("", |main| main.original.text.as_str());
    let imported = imports::imported_drop_in(&before.main, text, request.release);
    let imported = imported.filter(|path| is_editable(kind, path));
    if let (true, Some(drop_in)) = (reading.merges(), &imported) {
        // The last version that is said decides how all files are read: it stays what it was.
        let format = match reading {
            Reading::Two { older } => {
                Format::Containerd { version: if older { 2 } else { 3 }, reading }
            }
            _ => format,
        };
        return Target::File(drop_in.clone(), format);
    }
    if let Some(target) = distribution_target(request, before, text, format) {
        return target;
    }
    // containerd 1 takes this part of the last file that has it.
    let mut sections = before
        .files
        .iter()
        .filter(|file| is_editable(kind, &file.path))
        .filter(|file| file.said.section);
    if let (false, Some(file)) = (reading.merges(), sections.next_back()) {
        return Target::File(file.path.clone(), file.format);
    }
    Target::File(imported.unwrap_or_else(|| before.main.clone()), format)
}

/// What k0s merges, or the template from which k3s and RKE2 make their file; `text` is that of
/// the main file.
fn distribution_target(
    request: &Request,
    before: &Before,
    text: &str,
    format: Format,
) -> Option<Target> {
    match (request.kind, format) {
        (Kind::K0s, _) if request.file.is_none() && k0s::is_managed(text) => {
            let version = k0s::drop_in_version(request.release);
            let format = Format::Containerd { version, reading: before.reading };
            Some(Target::File(k0s::drop_in(), format))
        }
        (Kind::K3s | Kind::Rke2, Format::Containerd { version, .. }) => {
            let path = before.main.with_file_name(template::name(version));
            Some(Target::Template(path, format))
        }
        _ => None,
    }
}

/// Whether a file may be edited: a distribution's own files are replaced by its updates, and
/// what lies in /run is made by somebody at each start.
pub(super) fn is_editable(kind: Kind, path: &Path) -> bool {
    let generated =
        matches!(kind, Kind::K3s | Kind::Rke2) && path == Path::new(kind.installation().main_file);
    !path.starts_with("/usr") && !path.starts_with("/run") && !generated
}
