//! Plans what `cgpu setup` does to one engine's files: which file is edited, and how.
//!
//! Reads the files and decides; writes nothing. Everything that can be refused is refused
//! here, before the first file is touched.

mod error;
mod file_edits;
mod parsed_files;
mod present_runtime;
mod target;

use std::path::{Path, PathBuf};

use super::Kind;
use super::config_text::ChangeRequest;
use super::containerd::{Release, imports};
use super::distributions::template;
use super::file_change::Change;
use super::host_tree::Tree;
use super::runtime_below::{self, RuntimeLinks};
pub use error::PlanError;
use file_edits::{into_file, into_template, out_of_file, out_of_template};
use parsed_files::{ParsedFile, ParsedFiles, parse_files, paths};
use present_runtime::{lower_of, model};
use target::{Target, is_editable, target};

/// What is asked for.
#[derive(Debug, Clone)]
pub struct Request {
    pub kind: Kind,
    /// The host's root directory: `/`, or its mount point.
    pub root: PathBuf,
    /// The engine's main file, if it isn't the usual one. Only it and its imports are edited then.
    pub file: Option<PathBuf>,
    /// The release of its containerd, if known.
    pub release: Option<Release>,
    pub action: Action,
}

/// The changes that a request needs.
#[derive(Debug)]
pub struct Plan {
    /// The engine's main file, which leads to all others.
    pub main: PathBuf,
    /// Empty if the engine is configured as requested.
    pub changes: Vec<Change>,
    /// The path of our runtime that the engine's configuration has then; the one it had, on removal.
    pub program: Option<PathBuf>,
    /// The links to be made for that path.
    pub links: Option<RuntimeLinks>,
    /// Sentences for the user.
    pub notes: Vec<String>,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Adds our runtime to the engine's configuration.
    Add {
        /// Our runtime, as the host names it.
        program: PathBuf,
        /// Whether it becomes the engine's default runtime.
        default: bool,
    },
    /// Removes our runtime from it.
    Remove,
}

/// Plans what is requested.
///
/// # Errors
///
/// If the engine's files can't be parsed, may not be edited, or would overrule us.
pub fn plan(request: &Request) -> Result<Plan, PlanError> {
    let tree = Tree::new(&request.root, None);
    let parsed = parse_files(&tree, request)?;
    match &request.action {
        Action::Add { program, default } => add(&tree, request, parsed, program, *default),
        Action::Remove => remove(&tree, request, parsed),
    }
}

/// The file by which Kubernetes can't use this containerd, whatever is planned.
#[must_use]
pub fn cri_disabled_by(request: &Request) -> Option<PathBuf> {
    let tree = Tree::new(&request.root, None);
    match request.kind {
        Kind::Containerd => imports::cri_disabled_by(&tree, &paths(&tree, request, None)),
        _ => None,
    }
}

fn add(
    tree: &Tree,
    request: &Request,
    mut parsed: ParsedFiles,
    program: &Path,
    default: bool,
) -> Result<Plan, PlanError> {
    let invalid = || PlanError::InvalidRuntimePath { path: program.to_owned() };
    program.to_str().filter(|_| program.is_absolute()).ok_or_else(invalid)?;
    if !tree.is_executable(program) {
        return Err(PlanError::NoRuntime { path: program.to_owned() });
    }
    if Kind::DISTRIBUTIONS.contains(&request.kind) && parsed.files.is_empty() {
        let path = parsed.main;
        return Err(PlanError::NotStarted { path, by: request.kind.name() });
    }
    let registered = parsed.files.iter().rev().find_map(|file| file.config.program.as_deref());
    let (registered, links) = match registered
        .map(Path::new)
        .filter(|registered| runtime_below::is_link(registered, program))
    {
        // The runtime below was chosen before ours was the default one.
        Some(registered) if runtime_below::below(tree, registered).is_some() => {
            (registered.to_owned(), None)
        }
        _ => {
            let chosen = ["runc", "crun"].iter().find_map(|name| tree.program(name));
            let lower = lower_of(tree, request, &parsed);
            let links = RuntimeLinks::new(program, lower.as_deref(), chosen.as_deref());
            (links.as_ref().map_or_else(|| program.to_owned(), RuntimeLinks::path), links)
        }
    };
    let over_crun = match &links {
        Some(links) => Some(links.lower().to_owned()),
        None => runtime_below::below(tree, &registered),
    };
    let over_crun = over_crun.is_some_and(|lower| lower.ends_with("crun"));
    let text = registered.to_str().ok_or_else(invalid)?.to_owned();
    let model = model(request.kind, &parsed, over_crun);
    let target = target(request, &parsed);
    let mut notes = Vec::new();
    let change = match target {
        Target::Template(path, format) => {
            if default {
                return Err(PlanError::DefaultOfTemplate {
                    template: path,
                    by: request.kind.name(),
                });
            }
            let requested =
                ChangeRequest::Add { program: &text, default: false, model: &model, merged: true };
            into_template(tree, path, format, requested)?
        }
        Target::File(path, format) => {
            let place = parsed.files.iter().position(|file| file.path == path);
            if default && let Some((file, name)) = overruling(tree, request, &parsed, &path) {
                return Err(PlanError::Overruled { path: file, name, target: path });
            }
            if place.is_some()
                && path != parsed.main
                && request.kind.is_containerd()
                && !is_own(&path)
            {
                notes.push(format!(
                    "{} isn't cgpu's own, and this containerd reads the runtimes of no other file: \
                     rewriting it removes cgpu; run this again then",
                    path.display()
                ));
            }
            let original = place.map(|place| parsed.files.swap_remove(place));
            let merged = parsed.reading.merges();
            let requested = ChangeRequest::Add { program: &text, default, model: &model, merged };
            into_file(tree, path, format, original, requested)?
        }
    };
    let changes = change.into_iter().collect();
    Ok(Plan { main: parsed.main, changes, program: Some(registered), links, notes })
}

fn is_own(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().contains("cgpu"))
}

/// The file that is read after the one at `path` and names another default runtime.
fn overruling(
    tree: &Tree,
    request: &Request,
    parsed: &ParsedFiles,
    path: &Path,
) -> Option<(PathBuf, String)> {
    let order = match request.kind.is_containerd() {
        true => paths(tree, request, Some(path)),
        false => parsed.files.iter().map(|file| file.path.clone()).collect(),
    };
    let place = order.iter().position(|file| file == path);
    let after = |file: &&ParsedFile| match place {
        Some(place) => order.iter().position(|other| *other == file.path) > Some(place),
        // It isn't there yet: of one directory's files the names decide.
        None => file.path.parent() == path.parent() && file.path.as_path() > path,
    };
    let others = parsed.files.iter().filter(after);
    let mut named = others.filter_map(|file| Some((file, file.config.default.clone()?)));
    let (file, name) = named.next_back()?;
    (!file.config.is_default()).then(|| (file.path.clone(), name))
}

fn remove(tree: &Tree, request: &Request, parsed: ParsedFiles) -> Result<Plan, PlanError> {
    let registered = parsed.files.iter().rev().find_map(|file| file.config.program.as_deref());
    let program = registered.map(PathBuf::from);
    let mut changes = Vec::new();
    for file in parsed.files.into_iter().filter(|file| is_editable(request.kind, &file.path)) {
        changes.extend(out_of_file(tree, file)?);
    }
    if matches!(request.kind, Kind::K3s | Kind::Rke2) {
        for name in template::NAMES {
            changes.extend(out_of_template(tree, parsed.main.with_file_name(name))?);
        }
    }
    Ok(Plan { main: parsed.main, changes, program, links: None, notes: Vec::new() })
}

#[cfg(test)]
mod tests;
