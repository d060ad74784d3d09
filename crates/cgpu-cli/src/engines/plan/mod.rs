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
use super::config_text::Wish;
use super::containerd::{Release, imports};
use super::distributions::template;
use super::file_change::Change;
use super::host_tree::Tree;
use super::runtime_below::{self, Over};
pub use error::PlanError;
use file_edits::{into_file, into_template, out_of_file, out_of_template};
use parsed_files::{Before, Known, before, paths};
use present_runtime::{lower_of, model};
use target::{Target, is_editable, target};

/// What is asked for.
#[derive(Debug, Clone)]
pub struct Request {
    /// Which engine.
    pub kind: Kind,
    /// Where the host's file system is: `/`, or where it is mounted.
    pub root: PathBuf,
    /// The engine's own file, where it isn't where it usually is. No other file is edited then
    /// but those that it imports.
    pub file: Option<PathBuf>,
    /// The release of its containerd, where that is known.
    pub release: Option<Release>,
    /// What is to be done.
    pub aim: Aim,
}

/// What is to be changed.
#[derive(Debug)]
pub struct Plan {
    /// The engine's main file, which leads to all others.
    pub main: PathBuf,
    /// The files; none where all is as it should be.
    pub changes: Vec<Change>,
    /// What the engine is told to run, where it is told; where it was, if it is to forget us.
    pub program: Option<PathBuf>,
    /// The links to be made for that.
    pub over: Option<Over>,
    /// What whoever asks should know: sentences.
    pub notes: Vec<String>,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Aim {
    /// The engine gets to know the runtime.
    Add {
        /// Our runtime, as the host names it.
        program: PathBuf,
        /// Whether it becomes the engine's default runtime.
        default: bool,
    },
    /// It forgets the runtime.
    Remove,
}

/// What is to be changed.
///
/// # Errors
///
/// Where the engine's files are not understood, not ours to edit, or would overrule us.
pub fn plan(request: &Request) -> Result<Plan, PlanError> {
    let tree = Tree::new(&request.root, None);
    let before = before(&tree, request)?;
    match &request.aim {
        Aim::Add { program, default } => add(&tree, request, before, program, *default),
        Aim::Remove => remove(&tree, request, before),
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
    mut before: Before,
    program: &Path,
    default: bool,
) -> Result<Plan, PlanError> {
    let odd = || PlanError::OddRuntime { path: program.to_owned() };
    program.to_str().filter(|_| program.is_absolute()).ok_or_else(odd)?;
    if !tree.is_executable(program) {
        return Err(PlanError::NoRuntime { path: program.to_owned() });
    }
    if Kind::DISTRIBUTIONS.contains(&request.kind) && before.files.is_empty() {
        let path = before.main;
        return Err(PlanError::NotStarted { path, by: request.kind.name() });
    }
    let told = before.files.iter().rev().find_map(|file| file.said.program.as_deref());
    let (told, over) =
        match told.map(Path::new).filter(|told| runtime_below::is_link(told, program)) {
            // What it stands over was seen before it was made the default one.
            Some(told) if runtime_below::below(tree, told).is_some() => (told.to_owned(), None),
            _ => {
                let chosen = ["runc", "crun"].iter().find_map(|name| tree.program(name));
                let lower = lower_of(tree, request, &before);
                let over = Over::new(program, lower.as_deref(), chosen.as_deref());
                (over.as_ref().map_or_else(|| program.to_owned(), Over::path), over)
            }
        };
    let over_crun = match &over {
        Some(over) => Some(over.lower().to_owned()),
        None => runtime_below::below(tree, &told),
    };
    let over_crun = over_crun.is_some_and(|lower| lower.ends_with("crun"));
    let text = told.to_str().ok_or_else(odd)?.to_owned();
    let model = model(request.kind, &before, over_crun);
    let target = target(request, &before);
    let mut notes = Vec::new();
    let change = match target {
        Target::Template(path, format) => {
            if default {
                return Err(PlanError::DefaultOfTemplate {
                    template: path,
                    by: request.kind.name(),
                });
            }
            let wish = Wish::Add { program: &text, default: false, model: &model, beside: true };
            into_template(tree, path, format, wish)?
        }
        Target::File(path, format) => {
            let place = before.files.iter().position(|file| file.path == path);
            if default && let Some((file, name)) = overruling(tree, request, &before, &path) {
                return Err(PlanError::Overruled { path: file, name, target: path });
            }
            if place.is_some()
                && path != before.main
                && request.kind.is_containerd()
                && !is_own(&path)
            {
                notes.push(format!(
                    "{} isn't cgpu's own, and this containerd reads the runtimes of no other file: \
                     whoever writes it anew takes cgpu out; run this again then",
                    path.display()
                ));
            }
            let original = place.map(|place| before.files.swap_remove(place));
            let beside = before.reading.merges();
            let wish = Wish::Add { program: &text, default, model: &model, beside };
            into_file(tree, path, format, original, wish)?
        }
    };
    let changes = change.into_iter().collect();
    Ok(Plan { main: before.main, changes, program: Some(told), over, notes })
}

fn is_own(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().contains("cgpu"))
}

/// The file that is read after the one at `path` and makes something else the default.
fn overruling(
    tree: &Tree,
    request: &Request,
    before: &Before,
    path: &Path,
) -> Option<(PathBuf, String)> {
    let order = match request.kind.is_containerd() {
        true => paths(tree, request, Some(path)),
        false => before.files.iter().map(|file| file.path.clone()).collect(),
    };
    let place = order.iter().position(|file| file == path);
    let after = |file: &&Known| match place {
        Some(place) => order.iter().position(|other| *other == file.path) > Some(place),
        // It isn't there yet: of one directory's files the names decide.
        None => file.path.parent() == path.parent() && file.path.as_path() > path,
    };
    let others = before.files.iter().filter(after);
    let mut named = others.filter_map(|file| Some((file, file.said.default.clone()?)));
    let (file, name) = named.next_back()?;
    (!file.said.is_default()).then(|| (file.path.clone(), name))
}

fn remove(tree: &Tree, request: &Request, before: Before) -> Result<Plan, PlanError> {
    let told = before.files.iter().rev().find_map(|file| file.said.program.as_deref());
    let program = told.map(PathBuf::from);
    let mut changes = Vec::new();
    for file in before.files.into_iter().filter(|file| is_editable(request.kind, &file.path)) {
        changes.extend(out_of_file(tree, file)?);
    }
    if matches!(request.kind, Kind::K3s | Kind::Rke2) {
        for name in template::NAMES {
            changes.extend(out_of_template(tree, before.main.with_file_name(name))?);
        }
    }
    Ok(Plan { main: before.main, changes, program, over: None, notes: Vec::new() })
}

#[cfg(test)]
mod tests;
