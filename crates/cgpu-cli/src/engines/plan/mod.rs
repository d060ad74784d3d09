//! Plans what `cgpu setup` does to one engine's files: which file is edited, and how.
//!
//! Reads the files and decides; writes nothing. Everything that can be refused is refused
//! here, before the first file is touched.

use std::path::{Path, PathBuf};

use thiserror::Error;

use super::config_file::{self, Original, ReadError};
use super::config_text::{self, EditError, Format, HEADER, Said, Wish};
use super::containerd::{File, Reading, Release, imports, merged_config, runtimes};
use super::distributions::{self, k0s, template};
use super::file_change::{Backup, Change, read_backup};
use super::host_tree::Tree;
use super::runtime_below::{self, Over};
use super::toml_values;
use super::{Kind, crio, docker, installation, podman};

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

/// Why nothing is planned.
#[derive(Debug, Error)]
pub enum PlanError {
    /// A file isn't to be edited as it is.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A file's text isn't to be edited as it is.
    #[error("{} {source}", path.display())]
    Edit {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: EditError,
    },
    /// Our runtime isn't installed.
    #[error("{} isn't there or can't be executed; install cgpu, or name it with --runtime", path.display())]
    NoRuntime {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The path of our runtime can't be written into a configuration.
    #[error("{} is no absolute path in UTF-8; name the runtime by such a path", path.display())]
    OddRuntime {
        /// That path.
        path: PathBuf,
    },
    /// The file is another program's, which writes it anew.
    #[error("{} is written by {by} at each of its starts; use `cgpu setup {by}`", path.display())]
    Generated {
        /// The file.
        path: PathBuf,
        /// The program.
        by: String,
    },
    /// It is what such a program makes the file from.
    #[error("{} is a template; use `cgpu setup k3s` or `cgpu setup rke2`", path.display())]
    Template {
        /// The file.
        path: PathBuf,
    },
    /// A distribution of Kubernetes hasn't written its file yet.
    #[error("{} isn't there: {by} writes it when it starts; start it once, then run this again", path.display())]
    NotStarted {
        /// The file.
        path: PathBuf,
        /// The distribution.
        by: &'static str,
    },
    /// A template can't name a default runtime.
    #[error(
        "the default runtime of {by} isn't named in {}, which adds to what {by} writes; put \
         `default-runtime: cgpu` into /etc/rancher/{by}/config.yaml and run this without --default",
        template.display()
    )]
    DefaultOfTemplate {
        /// The template.
        template: PathBuf,
        /// The distribution.
        by: &'static str,
    },
    /// Another file has the last word on the default runtime.
    #[error("{} makes {name} the default runtime and is read after {}; change it there first", path.display(), target.display())]
    Overruled {
        /// The file that has it.
        path: PathBuf,
        /// The runtime that it names.
        name: String,
        /// The file that setup would have edited.
        target: PathBuf,
    },
}

/// A file of the engine that is there.
struct Known {
    path: PathBuf,
    format: Format,
    original: Original,
    said: Said,
}

/// The engine's files as they are.
struct Before {
    main: PathBuf,
    files: Vec<Known>,
    /// Of containerd: how they are read, and what they come to.
    reading: Reading,
    effective: toml::Table,
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

/// The files that the engine reads, whether they are there or not; `also` among them.
fn paths(tree: &Tree, request: &Request, also: Option<&Path>) -> Vec<PathBuf> {
    match (&request.file, request.kind) {
        (None, kind) => installation::files(tree, kind, request.release, also),
        (Some(file), kind) if kind.is_containerd() => {
            imports::files(tree, file, request.release, also)
        }
        (Some(file), _) => vec![file.clone()],
    }
}

/// The files that are there, read and understood.
fn before(tree: &Tree, request: &Request) -> Result<Before, PlanError> {
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
    let said: Vec<Option<i64>> = files.iter().map(|file| file.said).collect();
    let reading = Reading::of(request.release, &said);
    let versions = merged_config::versions(&files, reading);
    let effective = merged_config::effective(&files, reading);
    let mut known = Vec::new();
    for (position, (path, original)) in read.into_iter().enumerate() {
        let format = match request.kind {
            Kind::Docker => Format::Docker,
            Kind::Crio => Format::Crio,
            Kind::Podman => Format::Podman,
            _ => Format::Containerd { version: versions[position], reading },
        };
        let said =
            config_text::read(format, &original.text).map_err(|why| edit_error(&path, why))?;
        known.push(Known { path, format, original, said });
    }
    Ok(Before { main, files: known, reading, effective })
}

/// Refuses a file that is written anew at the next start of its program.
fn refuse_generated(path: &Path, text: &str) -> Result<(), PlanError> {
    if distributions::is_template(text) {
        return Err(PlanError::Template { path: path.to_owned() });
    }
    match distributions::generated_by(text) {
        None => Ok(()),
        Some(by) => Err(PlanError::Generated { path: path.to_owned(), by: by.to_owned() }),
    }
}

/// Whether a file may be edited: a distribution's own files are replaced by its updates, and
/// what lies in /run is made by somebody at each start.
fn is_editable(kind: Kind, path: &Path) -> bool {
    let generated =
        matches!(kind, Kind::K3s | Kind::Rke2) && path == Path::new(kind.installation().main_file);
    !path.starts_with("/usr") && !path.starts_with("/run") && !generated
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

/// The change of one file that has our runtime then.
fn into_file(
    tree: &Tree,
    path: PathBuf,
    format: Format,
    file: Option<Known>,
    wish: Wish<'_>,
) -> Result<Option<Change>, PlanError> {
    let start = match (&file, format) {
        (Some(file), _) => file.original.text.clone(),
        (None, Format::Docker) => String::new(),
        (None, Format::Containerd { version, .. }) => format!("{HEADER}version = {version}\n"),
        (None, _) => HEADER.to_owned(),
    };
    let after = config_text::edit(format, &start, wish)
        .map_err(|source| PlanError::Edit { path: path.clone(), source })?;
    if file.as_ref().is_some_and(|file| file.original.text == after) {
        return Ok(None);
    }
    let at = tree.at(&path);
    let backup = match &file {
        Some(file) if is_backed_up(file, &at) => Backup::Keep,
        _ => Backup::Make,
    };
    let before = file.map(|file| file.original);
    writable(&at, &path, before.as_ref())?;
    Ok(Some(Change { at, path, before, after: Some(after), backup }))
}

/// The change of a template that has our runtime then.
fn into_template(
    tree: &Tree,
    path: PathBuf,
    format: Format,
    wish: Wish<'_>,
) -> Result<Option<Change>, PlanError> {
    let edit_error = |source| PlanError::Edit { path: path.clone(), source };
    let at = tree.at(&path);
    let before = config_file::read(&at, &path)?;
    let block = config_text::edit(format, "", wish).map_err(edit_error)?;
    let text = before.as_ref().map(|before| before.text.as_str());
    let after = template::add(text, &block).map_err(edit_error)?;
    if text == Some(after.as_str()) {
        return Ok(None);
    }
    let backup = match text.is_some_and(template::is_in) {
        true => Backup::Keep,
        false => Backup::Make,
    };
    writable(&at, &path, before.as_ref())?;
    Ok(Some(Change { at, path, before, after: Some(after), backup }))
}

/// Whether the backup beside a file is its text before setup first edited it.
fn is_backed_up(file: &Known, at: &Path) -> bool {
    let Some(former) = read_backup(at) else { return false };
    let Ok(former) = config_text::read(file.format, &former) else { return false };
    // One beside a file without our runtime is older than that. Where another default runtime was
    // named since, that is what --remove has to restore.
    file.said.runtime && (file.said.is_default() || file.said.default == former.default)
}

/// What ours is to be like, as TOML: the engine's default runtime; of podman, the lists that
/// say what runtimes can do.
fn model(kind: Kind, before: &Before, over_crun: bool) -> String {
    let texts = before.files.iter().map(|file| file.original.text.as_str());
    match kind {
        Kind::Docker => String::new(),
        Kind::Crio => crio::model(texts).to_string(),
        Kind::Podman => podman::lists(texts, over_crun).to_string(),
        _ => runtimes::model(&before.effective).to_string(),
    }
}

/// The runtime that makes the engine's containers now, where that is known.
fn lower_of(tree: &Tree, request: &Request, before: &Before) -> Option<PathBuf> {
    let mut texts = before.files.iter().map(|file| file.original.text.as_str());
    let words = match request.kind {
        Kind::Docker => docker::default_program(texts.next_back()?).into_iter().collect(),
        Kind::Crio => crio::default_program(texts),
        Kind::Podman => podman::default_programs(texts),
        _ => runtimes::program(&runtimes::model(&before.effective))
            .map(str::to_owned)
            .into_iter()
            .collect(),
    };
    words.iter().find_map(|word| tree.program(word))
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

/// What is to be edited.
enum Target {
    /// A file of the engine's format.
    File(PathBuf, Format),
    /// What a distribution of Kubernetes makes such a file from; the format is that file's.
    Template(PathBuf, Format),
}

/// What is to be edited: the file that has our runtime; else ours in the engine's directory; else
/// the one whose section counts, of containerd's; else the engine's own.
fn target(request: &Request, before: &Before) -> Target {
    let kind = request.kind;
    let editable = |file: &&Known| is_editable(kind, &file.path);
    if let Some(file) = before.files.iter().filter(editable).rfind(|file| file.said.runtime) {
        return Target::File(file.path.clone(), file.format);
    }
    let main = before.files.iter().find(|file| file.path == before.main);
    if !kind.is_containerd() {
        let format = match kind {
            Kind::Docker => Format::Docker,
            Kind::Crio => Format::Crio,
            _ => Format::Podman,
        };
        let drop_in = kind.installation().drop_in.filter(|_| request.file.is_none());
        return Target::File(drop_in.map_or(before.main.clone(), PathBuf::from), format);
    }
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
    match kind {
        Kind::K0s if request.file.is_none() && k0s::is_managed(text) => {
            let version =
                if request.release.is_some_and(|release| release.major < 2) { 2 } else { 3 };
            return Target::File(k0s::drop_in(), Format::Containerd { version, reading });
        }
        Kind::K3s | Kind::Rke2 => {
            let third = matches!(format, Format::Containerd { version: 3.., .. });
            let name = if third { "config-v3.toml.tmpl" } else { "config.toml.tmpl" };
            return Target::Template(before.main.with_file_name(name), format);
        }
        _ => {}
    }
    // containerd 1 takes this part of the last file that has it.
    let mut sections = before.files.iter().filter(editable).filter(|file| file.said.section);
    if let (false, Some(file)) = (reading.merges(), sections.next_back()) {
        return Target::File(file.path.clone(), file.format);
    }
    Target::File(imported.unwrap_or_else(|| before.main.clone()), format)
}

fn remove(tree: &Tree, request: &Request, before: Before) -> Result<Plan, PlanError> {
    let told = before.files.iter().rev().find_map(|file| file.said.program.as_deref());
    let program = told.map(PathBuf::from);
    let mut changes = Vec::new();
    for file in before.files.into_iter().filter(|file| is_editable(request.kind, &file.path)) {
        let at = tree.at(&file.path);
        let edit_error = |source| PlanError::Edit { path: file.path.clone(), source };
        let former = read_backup(&at);
        let wish = Wish::Remove { former: former.as_deref() };
        let text = &file.original.text;
        let after = config_text::edit(file.format, text, wish).map_err(edit_error)?;
        if after == *text {
            continue;
        }
        // A file that setup made goes as a whole: nothing is in it, and nothing was.
        let is_remark = |line: &str| line.starts_with('#') && line != HEADER.trim_end();
        let remarks = text.lines().map(str::trim).any(is_remark);
        let bare = config_text::is_bare(file.format, &after) && !remarks;
        let made = bare
            && former.as_ref().is_none_or(|former| {
                let emptied = config_text::edit(file.format, former, Wish::Remove { former: None });
                let ours = config_text::read(file.format, former).is_ok_and(|said| said.runtime);
                ours && emptied.is_ok_and(|emptied| config_text::is_bare(file.format, &emptied))
            });
        let backup = match &former {
            Some(former) if *former == after => Backup::Drop,
            Some(_) => Backup::Keep,
            None => Backup::Make,
        };
        writable(&at, &file.path, Some(&file.original))?;
        changes.push(Change {
            at,
            path: file.path,
            before: Some(file.original),
            after: (!made).then_some(after),
            backup: if made { Backup::Drop } else { backup },
        });
    }
    if matches!(request.kind, Kind::K3s | Kind::Rke2) {
        for name in ["config.toml.tmpl", "config-v3.toml.tmpl"] {
            changes.extend(out_of_template(tree, before.main.with_file_name(name))?);
        }
    }
    Ok(Plan { main: before.main, changes, program, over: None, notes: Vec::new() })
}

/// The change of a template that has nothing of ours then.
fn out_of_template(tree: &Tree, path: PathBuf) -> Result<Option<Change>, PlanError> {
    let at = tree.at(&path);
    let Some(before) = config_file::read(&at, &path)? else { return Ok(None) };
    if !template::is_in(&before.text) {
        return Ok(None);
    }
    let after = template::remove(&before.text);
    let former = read_backup(&at);
    let backup = match (&former, &after) {
        (_, None) => Backup::Drop,
        (Some(former), Some(after)) if former == after => Backup::Drop,
        (Some(_), _) => Backup::Keep,
        (None, _) => Backup::Make,
    };
    writable(&at, &path, Some(&before))?;
    Ok(Some(Change { at, path, before: Some(before), after, backup }))
}

fn writable(at: &Path, path: &Path, before: Option<&Original>) -> Result<(), PlanError> {
    Ok(config_file::check(at, path, before)?)
}

#[cfg(test)]
mod tests;
