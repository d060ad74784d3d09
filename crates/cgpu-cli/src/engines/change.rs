//! Plans what `cgpu setup` does to one engine's files: which file is edited, and how.
//!
//! Reads the files and decides; writes nothing. Everything that can be refused is refused
//! here, before the first file is touched.

use std::path::{Path, PathBuf};

use similar::TextDiff;
use thiserror::Error;

use super::containerd::{self, File, Reading, Release};
use super::edit::{self, EditError, Format, HEADER, Said, Wish, template};
use super::files::Tree;
use super::lower::{self, Over};
use super::original::{self, Original, ReadError, backup_of};
use super::{Kind, dialect, places};

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

/// One file as it is, and as it is to be.
#[derive(Debug)]
pub struct Change {
    /// The file, as the host names it.
    pub path: PathBuf,
    /// Where we reach it.
    pub(super) at: PathBuf,
    /// The file as it was read; `None` where there is none.
    pub(super) before: Option<Original>,
    /// Its new text; `None` where the file goes.
    pub after: Option<String>,
    /// What becomes of the text before.
    pub backup: Backup,
}

/// What becomes of the backup beside a file: the text before setup first edited it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backup {
    /// The text before is written there.
    Make,
    /// There is one, which stays.
    Keep,
    /// It goes: the file is what it says again.
    Drop,
}

impl Change {
    /// The change that takes this one back, once it is made.
    ///
    /// # Errors
    ///
    /// Where the file can't be read.
    pub fn reverse(&self) -> Result<Change, ReadError> {
        Ok(Change {
            path: self.path.clone(),
            at: self.at.clone(),
            before: original::read(&self.at, &self.path)?,
            after: self.before.as_ref().map(|before| before.text.clone()),
            backup: match self.backup {
                Backup::Keep => Backup::Keep,
                Backup::Make | Backup::Drop => Backup::Drop,
            },
        })
    }

    /// The difference, as `diff -u` shows it.
    #[must_use]
    pub fn diff(&self) -> String {
        let path = self.path.display().to_string();
        let before = self.before.as_ref().map_or("", |before| before.text.as_str());
        let after = self.after.as_deref().unwrap_or_default();
        let name = |there: bool| if there { path.as_str() } else { "/dev/null" };
        let names = (name(self.before.is_some()), name(self.after.is_some()));
        TextDiff::from_lines(before, after)
            .unified_diff()
            .context_radius(3)
            .header(names.0, names.1)
            .to_string()
    }

    /// Where the backup is, where there is one after the change.
    #[must_use]
    pub fn backup(&self) -> Option<PathBuf> {
        let there = match self.backup {
            Backup::Make => self.before.is_some(),
            Backup::Keep => backup_of(&self.at).exists(),
            Backup::Drop => false,
        };
        there.then(|| backup_of(&self.path))
    }
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
        Kind::Containerd => places::cri_disabled_by(&tree, &paths(&tree, request, None)),
        _ => None,
    }
}

/// The files that the engine reads, whether they are there or not; `also` among them.
fn paths(tree: &Tree, request: &Request, also: Option<&Path>) -> Vec<PathBuf> {
    match (&request.file, request.kind) {
        (None, kind) => places::files(tree, kind, request.release, also),
        (Some(file), kind) if kind.is_containerd() => {
            places::containerd(tree, file, request.release, also)
        }
        (Some(file), _) => vec![file.clone()],
    }
}

/// The files that are there, read and understood.
fn before(tree: &Tree, request: &Request) -> Result<Before, PlanError> {
    let main = request.file.clone().unwrap_or_else(|| places::main(request.kind).into());
    let mut read = Vec::new();
    for path in paths(tree, request, None) {
        let Some(original) = original::read(&tree.at(&path), &path)? else { continue };
        if request.kind == Kind::Containerd {
            refuse_generated(&path, &original.text)?;
        }
        read.push((path, original));
    }
    let edit_error = |path: &Path, source| PlanError::Edit { path: path.to_owned(), source };
    let mut tables = Vec::new();
    if request.kind.is_containerd() {
        for (path, original) in &read {
            let text = dialect::with_values(request.kind, &original.text);
            let syntax = |why| edit_error(path, EditError::Syntax { why });
            tables.push(dialect::table(&text).map_err(syntax)?);
        }
    }
    let files: Vec<File<'_>> = tables.iter().map(File::of).collect();
    let said: Vec<Option<i64>> = files.iter().map(|file| file.said).collect();
    let reading = Reading::of(request.release, &said);
    let versions = containerd::versions(&files, reading);
    let effective = containerd::effective(&files, reading);
    let mut known = Vec::new();
    for (position, (path, original)) in read.into_iter().enumerate() {
        let format = match request.kind {
            Kind::Docker => Format::Docker,
            Kind::Crio => Format::Crio,
            Kind::Podman => Format::Podman,
            _ => Format::Containerd { version: versions[position], reading },
        };
        let said = edit::read(format, &original.text).map_err(|why| edit_error(&path, why))?;
        known.push(Known { path, format, original, said });
    }
    Ok(Before { main, files: known, reading, effective })
}

/// Refuses a file that is written anew at the next start of its program.
fn refuse_generated(path: &Path, text: &str) -> Result<(), PlanError> {
    if dialect::is_template(text) {
        return Err(PlanError::Template { path: path.to_owned() });
    }
    match dialect::generated_by(text) {
        None => Ok(()),
        Some(by) => Err(PlanError::Generated { path: path.to_owned(), by: by.to_owned() }),
    }
}

/// Whether a file may be edited: a distribution's own files are replaced by its updates, and
/// what lies in /run is made by somebody at each start.
fn is_editable(kind: Kind, path: &Path) -> bool {
    let generated = matches!(kind, Kind::K3s | Kind::Rke2) && path == Path::new(places::main(kind));
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
    let (told, over) = match told.map(Path::new).filter(|told| lower::is_link(told, program)) {
        // What it stands over was seen before it was made the default one.
        Some(told) if lower::below(tree, told).is_some() => (told.to_owned(), None),
        _ => {
            let chosen = ["runc", "crun"].iter().find_map(|name| tree.program(name));
            let lower = lower_of(tree, request, &before);
            let over = Over::new(program, lower.as_deref(), chosen.as_deref());
            (over.as_ref().map_or_else(|| program.to_owned(), Over::path), over)
        }
    };
    let over_crun = match &over {
        Some(over) => Some(over.lower().to_owned()),
        None => lower::below(tree, &told),
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
    let after = edit::edit(format, &start, wish)
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
    let before = original::read(&at, &path)?;
    let block = edit::edit(format, "", wish).map_err(edit_error)?;
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
    let Some(former) = original::read_backup(at) else { return false };
    let Ok(former) = edit::read(file.format, &former) else { return false };
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
        Kind::Crio => dialect::crio_model(texts).to_string(),
        Kind::Podman => dialect::podman_lists(texts, over_crun).to_string(),
        _ => containerd::model(&before.effective).to_string(),
    }
}

/// The runtime that makes the engine's containers now, where that is known.
fn lower_of(tree: &Tree, request: &Request, before: &Before) -> Option<PathBuf> {
    let mut texts = before.files.iter().map(|file| file.original.text.as_str());
    let words = match request.kind {
        Kind::Docker => dialect::docker_default(texts.next_back()?).into_iter().collect(),
        Kind::Crio => dialect::crio_default(texts),
        Kind::Podman => dialect::podman_default(texts),
        _ => containerd::program(&containerd::model(&before.effective))
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
        let drop_in = places::drop_in(kind).filter(|_| request.file.is_none());
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
    let imported = places::imported_drop_in(&before.main, text, request.release);
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
        Kind::K0s if request.file.is_none() && dialect::is_managed_by_k0s(text) => {
            let version =
                if request.release.is_some_and(|release| release.major < 2) { 2 } else { 3 };
            return Target::File(places::k0s_drop_in(), Format::Containerd { version, reading });
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
        let former = original::read_backup(&at);
        let wish = Wish::Remove { former: former.as_deref() };
        let text = &file.original.text;
        let after = edit::edit(file.format, text, wish).map_err(edit_error)?;
        if after == *text {
            continue;
        }
        // A file that setup made goes as a whole: nothing is in it, and nothing was.
        let is_remark = |line: &str| line.starts_with('#') && line != HEADER.trim_end();
        let remarks = text.lines().map(str::trim).any(is_remark);
        let bare = edit::is_bare(file.format, &after) && !remarks;
        let made = bare
            && former.as_ref().is_none_or(|former| {
                let emptied = edit::edit(file.format, former, Wish::Remove { former: None });
                let ours = edit::read(file.format, former).is_ok_and(|said| said.runtime);
                ours && emptied.is_ok_and(|emptied| edit::is_bare(file.format, &emptied))
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
    let Some(before) = original::read(&at, &path)? else { return Ok(None) };
    if !template::is_in(&before.text) {
        return Ok(None);
    }
    let after = template::remove(&before.text);
    let former = original::read_backup(&at);
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
    Ok(original::check(at, path, before)?)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;
    use crate::engines::write::{WriteError, write};

    const PROGRAM: &str = "/usr/bin/cgpu-runtime";
    const CRI: &str = "[plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/x\"\n";

    /// A host of files, with our runtime.
    struct Host(tempfile::TempDir, Option<Release>);

    impl Host {
        fn new() -> Self {
            let host = Host(tempfile::tempdir().unwrap(), None);
            host.file(PROGRAM, "");
            fs::set_permissions(host.at(PROGRAM), fs::Permissions::from_mode(0o755)).unwrap();
            host
        }

        fn at(&self, path: &str) -> PathBuf {
            self.0.path().join(path.strip_prefix('/').unwrap())
        }

        fn file(&self, path: &str, text: &str) {
            fs::create_dir_all(self.at(path).parent().unwrap()).unwrap();
            fs::write(self.at(path), text).unwrap();
        }

        fn text(&self, path: &str) -> String {
            fs::read_to_string(self.at(path)).unwrap()
        }

        fn plan(&self, kind: Kind, aim: Aim) -> Result<Vec<Change>, PlanError> {
            let root = self.0.path().to_owned();
            Ok(plan(&Request { kind, root, file: None, release: self.1, aim })?.changes)
        }

        /// Makes the changes, and says which files they were.
        fn run(&self, kind: Kind, aim: Aim) -> Vec<String> {
            let changes = self.plan(kind, aim).unwrap();
            changes.iter().for_each(|change| write(change).unwrap());
            changes.iter().map(|change| change.path.display().to_string()).collect()
        }

        fn refusal(&self, kind: Kind) -> String {
            self.plan(kind, add(true)).unwrap_err().to_string()
        }
    }

    fn add(default: bool) -> Aim {
        Aim::Add { program: PROGRAM.into(), default }
    }

    #[test]
    fn containerd_is_edited_where_its_plugin_is_configured() {
        let main = "/etc/containerd/config.toml";
        let imports = "version = 2\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n";
        let drop_in = "/etc/containerd/conf.d/99-cgpu.toml";
        let other = "/etc/containerd/conf.d/50-cri.toml";
        for (files, target) in [
            (&[][..], main),
            (&[(main, "version = 2\n")], main),
            // A containerd before 2.0 would forget the section of the file that imports ours.
            (&[(main, &format!("{imports}{CRI}"))], main),
            (&[(main, imports)], drop_in),
            (&[(main, imports), (other, CRI)], other),
            (&[(main, &format!("{imports}{CRI}")), (other, CRI)], other),
        ] {
            let host = Host::new();
            files.iter().for_each(|(path, text)| host.file(path, text));
            assert_eq!(host.run(Kind::Containerd, add(true)), [target], "{files:?}");
            assert!(host.plan(Kind::Containerd, add(true)).unwrap().is_empty());
            let version = dialect::said_version_of(&host.text(target));
            assert!(version == Some(2) || target == other, "{version:?}");
            assert_eq!(host.run(Kind::Containerd, Aim::Remove), [target]);
            for (path, text) in files {
                assert_eq!(host.text(path), *text);
                assert!(!backup_of(&host.at(path)).exists(), "it has nothing to tell");
            }
            let is_given = files.iter().any(|(path, _)| *path == target);
            assert_eq!(host.at(target).exists(), is_given, "what setup made is gone: {target}");
        }
    }

    #[test]
    fn what_has_directories_for_it_gets_a_file_that_has_the_last_word() {
        for (kind, drop_in, early, late, key) in [
            (
                Kind::Crio,
                "/etc/crio/crio.conf.d/99-cgpu.conf",
                "/etc/crio/crio.conf.d/10-crio.conf",
                "/etc/crio/crio.conf.d/zz.conf",
                "[crio.runtime]\ndefault_runtime = \"crun\"\n",
            ),
            (
                Kind::Podman,
                "/etc/containers/containers.conf.d/99-cgpu.conf",
                "/etc/containers/containers.conf",
                "/etc/containers/containers.conf.d/zz.conf",
                "[engine]\nruntime = \"crun\"\n",
            ),
        ] {
            let host = Host::new();
            host.file(early, key);
            assert_eq!(host.run(kind, add(false)), [drop_in]);
            assert_eq!(host.run(kind, add(true)), [drop_in]);
            assert!(host.plan(kind, add(true)).unwrap().is_empty());
            assert_eq!(host.run(kind, Aim::Remove), [drop_in]);
            let left = fs::read_to_string(host.at(drop_in));
            assert!(left.is_err() && !backup_of(&host.at(drop_in)).exists(), "{kind:?} {left:?}");
            assert_eq!(host.text(early), key);
            host.file(late, key);
            let refusal = format!(
                "{late} makes crun the default runtime and is read after {drop_in}; change it \
                 there first"
            );
            assert_eq!(host.refusal(kind), refusal);
            assert!(!host.at(drop_in).exists());
            assert_eq!(host.run(kind, add(false)), [drop_in], "the runtime alone is no matter");
            host.run(kind, Aim::Remove);
            // One that has our runtime already, by hand.
            fs::rename(host.at(late), host.at(early)).unwrap();
        }
    }

    #[test]
    fn a_file_that_is_not_what_it_seems_is_refused_and_stays() {
        let daemon = "/etc/docker/daemon.json";
        let host = Host::new();
        let refused = |words: &str| {
            let refusal = host.refusal(Kind::Docker);
            assert_eq!(refusal, format!("{daemon} {words}"));
            let beside = fs::read_dir(host.at("/etc/docker")).unwrap().count();
            assert_eq!(beside, 1, "nothing is left beside it: {words}");
        };
        host.file(daemon, "{\"a\": }");
        refused("can't be read: expected value at line 1 column 7; correct it first");
        host.file(daemon, r#"{"runtimes": {"cgpu": {"path": "/opt/x"}}}"#);
        refused(
            "has a runtime `cgpu` that runs /opt/x, not cgpu-runtime; rename or remove it first",
        );
        fs::write(host.at(daemon), b"{\"a\": \"\xff\"}").unwrap();
        refused("is no text in UTF-8; correct it first");
        host.file(daemon, "{}");
        fs::set_permissions(host.at(daemon), fs::Permissions::from_mode(0o444)).unwrap();
        refused("is read-only (mode 0444); `chmod u+w` it if it may be edited");
        fs::remove_file(host.at(daemon)).unwrap();
        host.file("/srv/daemon.json", "{}");
        symlink("/srv/daemon.json", host.at(daemon)).unwrap();
        refused(
            "is a link to /srv/daemon.json; links aren't followed: name that file with --file, \
             if it is to be edited",
        );
        fs::remove_file(host.at(daemon)).unwrap();
        fs::hard_link(host.at("/srv/daemon.json"), host.at(daemon)).unwrap();
        refused("is one of 2 names of its file; replace it with a copy of its own first");
        fs::remove_file(host.at(daemon)).unwrap();
        nix::unistd::mkfifo(&host.at(daemon), nix::sys::stat::Mode::S_IRWXU).unwrap();
        refused("is no regular file; remove it, or name the engine's file with --file");
        fs::remove_file(host.at(daemon)).unwrap();
        fs::remove_file(host.at(PROGRAM)).unwrap();
        assert_eq!(
            host.refusal(Kind::Docker),
            "/usr/bin/cgpu-runtime isn't there or can't be executed; install cgpu, or name it \
             with --runtime"
        );
    }

    #[test]
    fn a_file_that_changes_meanwhile_is_left_as_it_is() {
        let daemon = "/etc/docker/daemon.json";
        let host = Host::new();
        for (before, now) in [(Some("{}"), "{ }"), (None, "{}")] {
            match before {
                Some(text) => host.file(daemon, text),
                None => fs::remove_file(host.at(daemon)).unwrap(),
            }
            let changes = host.plan(Kind::Docker, add(false)).unwrap();
            host.file(daemon, now);
            let refused = write(&changes[0]);
            assert!(matches!(refused, Err(WriteError::Changed { .. })), "{refused:?}");
            assert_eq!(host.text(daemon), now);
            assert!(!backup_of(&host.at(daemon)).exists());
        }
    }

    #[test]
    fn the_former_default_comes_back_over_several_edits_and_the_mode_stays() {
        let daemon = "/etc/docker/daemon.json";
        let host = Host::new();
        let text = "{\"default-runtime\": \"crun\", \"debug\": true}\n";
        host.file(daemon, text);
        fs::set_permissions(host.at(daemon), fs::Permissions::from_mode(0o640)).unwrap();
        let backup = backup_of(&host.at(daemon));
        host.run(Kind::Docker, add(false));
        assert_eq!(fs::read_to_string(&backup).unwrap(), text);
        host.run(Kind::Docker, add(true));
        host.file("/opt/cgpu-runtime", "");
        fs::set_permissions(host.at("/opt/cgpu-runtime"), fs::Permissions::from_mode(0o755))
            .unwrap();
        host.run(Kind::Docker, Aim::Add { program: "/opt/cgpu-runtime".into(), default: false });
        assert_eq!(fs::read_to_string(&backup).unwrap(), text, "it is the first one");
        assert!(host.text(daemon).contains("/opt/cgpu-runtime"));
        host.run(Kind::Docker, Aim::Remove);
        assert_eq!(host.text(daemon), text);
        assert!(!backup.exists(), "the file is what it said");
        let mode = fs::metadata(host.at(daemon)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o640);
        assert_eq!(host.run(Kind::Docker, Aim::Remove), [""; 0]);
    }

    const RKE2: &str = "/var/lib/rancher/rke2/agent/etc/containerd";

    fn generated(by: &str, rest: &str) -> String {
        format!("# File generated by {by}. DO NOT EDIT. Use config.toml.tmpl instead.\n{rest}")
    }

    #[test]
    fn what_k3s_and_rke2_generate_is_left_alone_and_what_it_is_made_from_is_edited() {
        let runc = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\n\
                    runtime_type = 'io.containerd.runc.v2'\noptions = {SystemdCgroup = true}\n";
        let third = |imports: &str| generated("rke2", &format!("version = 3\n{imports}{runc}"));
        let second = generated(
            "k3s",
            "version = 2\n[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc]\n\
             runtime_type = 'io.containerd.runc.v2'\n",
        );
        let imports = format!("imports = ['{RKE2}/config-v3.toml.d/*.toml']\n");
        for (kind, text, target) in [
            (Kind::K3s, second, "config.toml.tmpl"),
            (Kind::Rke2, third(""), "config-v3.toml.tmpl"),
            (Kind::Rke2, third(&imports), "config-v3.toml.d/99-cgpu.toml"),
        ] {
            let host = Host::new();
            let main = places::main(kind);
            assert_eq!(
                host.plan(kind, add(false)).unwrap_err().to_string(),
                format!(
                    "{main} isn't there: {} writes it when it starts; start it once, then run this \
                     again",
                    kind.name()
                )
            );
            host.file(main, &text);
            let target = Path::new(main).with_file_name(target).display().to_string();
            assert_eq!(host.run(kind, add(false)), [&*target]);
            assert!(host.plan(kind, add(false)).unwrap().is_empty());
            let written = host.text(&target);
            assert!(written.contains("BinaryName = \"/usr/bin/cgpu-runtime\""), "{written}");
            assert!(!written.contains("runtimes.runc"), "it would be there twice: {written}");
            assert_eq!(written.contains("SystemdCgroup = true"), kind == Kind::Rke2, "{written}");
            let by_default = host.plan(kind, add(true));
            match target.ends_with("tmpl") {
                true => {
                    assert!(by_default.unwrap_err().to_string().contains("`default-runtime: cgpu`"))
                }
                false => assert_eq!(by_default.unwrap().len(), 1),
            }
            assert_eq!(host.run(kind, Aim::Remove), [&*target]);
            assert!(!host.at(&target).exists());
            assert_eq!(host.text(main), text);
            // By its path it is refused, and who may be asked is named.
            let root = host.0.path().to_owned();
            let file = Some(PathBuf::from(main));
            let request =
                Request { kind: Kind::Containerd, root, file, release: None, aim: add(false) };
            let refused = plan(&request).unwrap_err().to_string();
            let words = format!("at each of its starts; use `cgpu setup {}`", kind.name());
            assert!(refused.ends_with(&words), "{refused}");
        }
    }

    #[test]
    fn somebodys_template_keeps_what_it_says() {
        let host = Host::new();
        host.file(places::main(Kind::K3s), &generated("k3s", "version = 3\n"));
        let template = Path::new(places::main(Kind::K3s)).with_file_name("config-v3.toml.tmpl");
        let template = template.to_str().unwrap();
        let own = "{{ template \"base\" . }}\n# mine\n[debug]\n  level = \"info\"\n";
        host.file(template, own);
        assert_eq!(host.run(Kind::K3s, add(false)), [template]);
        assert!(host.text(template).starts_with(own));
        assert_eq!(host.run(Kind::K3s, Aim::Remove), [template]);
        assert_eq!(host.text(template), own);
        assert!(!backup_of(&host.at(template)).exists());
    }

    #[test]
    fn microk8s_and_k0s_are_edited_where_they_look() {
        let template = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\n  \
                        default_runtime_name = \"${RUNTIME}\"\n  \
                        [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n    \
                        runtime_type = \"${RUNTIME_TYPE}\"\n    \
                        [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc.options]\n      \
                        SystemdCgroup = true\n";
        let host = Host::new();
        let main = places::main(Kind::MicroK8s);
        host.file(main, template);
        assert_eq!(host.run(Kind::MicroK8s, add(true)), [main]);
        let written = host.text(main);
        assert_eq!(written.matches("SystemdCgroup = true").count(), 2, "{written}");
        assert_eq!(host.run(Kind::MicroK8s, Aim::Remove), [main]);
        assert_eq!(host.text(main), template);

        for (release, managed, target) in [
            (None, true, "/etc/k0s/containerd.d/99-cgpu.toml"),
            (Some(Release { major: 1, minor: 7 }), true, "/etc/k0s/containerd.d/99-cgpu.toml"),
            (None, false, "/etc/k0s/containerd.toml"),
        ] {
            let mut host = Host::new();
            host.1 = release;
            let header = if managed { "# k0s_managed=true\n" } else { "# mine\n" };
            host.file(places::main(Kind::K0s), &format!("{header}version = 3\n"));
            assert_eq!(host.run(Kind::K0s, add(false)), [target]);
            let version = dialect::said_version_of(&host.text(target));
            assert_eq!(version, Some(if release.is_some() { 2 } else { 3 }));
            assert!(host.plan(Kind::K0s, add(false)).unwrap().is_empty());
            assert_eq!(host.run(Kind::K0s, Aim::Remove), [target]);
        }
    }

    #[test]
    fn removing_touches_no_file_that_says_nothing_of_ours() {
        let host = Host::new();
        for (kind, path, text) in [
            (Kind::Podman, "/usr/share/containers/containers.conf", "# many\n[engine]\n# words\n"),
            (Kind::Podman, "/etc/containers/containers.conf", "[engine]\n# my note\n"),
            (Kind::Crio, "/etc/crio/crio.conf", "[crio.runtime.runtimes]\n"),
            (
                Kind::Containerd,
                "/etc/containerd/config.toml",
                "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\n\
                 runtime_type = 'io.containerd.runc.v2'\n",
            ),
        ] {
            host.file(path, text);
            assert!(host.plan(kind, Aim::Remove).unwrap().is_empty(), "{path}");
            host.run(kind, add(false));
            host.run(kind, Aim::Remove);
            assert_eq!(host.text(path), text);
        }
    }

    #[test]
    fn ours_stands_over_the_runtime_that_made_the_containers_before() {
        let cases = [
            (
                Kind::Docker,
                "/etc/docker/daemon.json",
                "{\"default-runtime\": \"small\", \"runtimes\": {\"small\": {\"path\": \
                 \"/usr/bin/crun\"}}}",
            ),
            (
                Kind::Docker,
                "/etc/docker/daemon.json",
                "{\"default-runtime\": \"small\", \"runtimes\": {\"small\": {\"runtimeType\": \
                 \"io.containerd.runc.v2\", \"options\": {\"BinaryName\": \"/usr/bin/crun\"}}}}",
            ),
            (Kind::Containerd, "/etc/containerd/config.toml", DEFAULT_CRUN),
            (
                Kind::Crio,
                "/etc/crio/crio.conf.d/10-crio.conf",
                "[crio.runtime]\ndefault_runtime = \"crun\"\n[crio.runtime.runtimes.crun]\n\
                 runtime_path = \"/usr/bin/crun\"\n",
            ),
            (Kind::Podman, "/etc/containers/containers.conf", "[engine]\n"),
        ];
        for (kind, path, text) in cases {
            let host = Host::new();
            for program in ["/usr/bin/runc", "/usr/bin/crun"] {
                host.file(program, "x");
                fs::set_permissions(host.at(program), fs::Permissions::from_mode(0o755)).unwrap();
            }
            host.file(path, text);
            let told = |aim| {
                let root = host.0.path().to_owned();
                let request = Request { kind, root, file: None, release: None, aim };
                let planned = plan(&request).unwrap();
                if let Some(over) = &planned.over {
                    over.make(host.0.path()).unwrap();
                }
                planned.changes.iter().for_each(|change| write(change).unwrap());
                planned.program.unwrap().display().to_string()
            };
            let over = "/usr/libexec/cgpu/over-crun/cgpu-runtime";
            // As the default one it hides what it stands over, which stays.
            for default in [false, true, true] {
                assert_eq!(told(add(default)), over, "{kind:?}");
            }
            assert_eq!(told(Aim::Remove), over, "so that its links can go");
            assert_eq!(host.text(path), text);
        }
    }

    const DEFAULT_CRUN: &str = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\n\
        default_runtime_name = \"crun\"\n\
        [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.crun]\n\
        runtime_type = \"io.containerd.runc.v2\"\n\
        options = { BinaryName = \"crun\" }\n";

    #[test]
    fn the_backup_is_the_first_text_until_the_file_has_nothing_of_ours() {
        let daemon = "/etc/docker/daemon.json";
        let host = Host::new();
        let backup = backup_of(&host.at(daemon));
        let first = "{\"default-runtime\": \"crun\"}\n";
        host.file(daemon, first);
        host.run(Kind::Docker, add(true));
        host.file(daemon, &host.text(daemon).replacen('{', "{\"debug\": true, ", 1));
        host.run(Kind::Docker, Aim::Remove);
        assert!(host.text(daemon).contains("debug"), "what came later stays");
        assert_eq!(fs::read_to_string(&backup).unwrap(), first, "and so does the first text");
        // The next setup begins with what is there then.
        let second = "{\"default-runtime\": \"runc\"}\n";
        host.file(daemon, second);
        host.run(Kind::Docker, add(false));
        assert_eq!(fs::read_to_string(&backup).unwrap(), second);
        // Somebody names another default: nobody else can tell it any more.
        host.file(daemon, &host.text(daemon).replace("\"runc\"", "\"crun\""));
        host.run(Kind::Docker, add(true));
        host.run(Kind::Docker, Aim::Remove);
        assert!(host.text(daemon).contains("\"crun\""), "{}", host.text(daemon));
    }
}
