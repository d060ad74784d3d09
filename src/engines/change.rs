//! Plans what `cgpu setup` does to one engine's files: which file is edited, and how.
//!
//! Reads the files and decides; writes nothing. Everything that can be refused is refused
//! here, before the first file is touched.

use std::path::{Path, PathBuf};

use similar::TextDiff;
use thiserror::Error;

use super::edit::{self, EditError, Format, HEADER, Said, Wish};
use super::files::Tree;
use super::original::{self, Original, ReadError, backup_of};
use super::{Kind, Seen, dialect, places};

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
    /// What is to be done.
    pub aim: Aim,
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
    #[error(
        "{} is written by {by} at each of its starts; add the handler to {} by hand \
         (docs/engines.md, k3s and RKE2), and restart {by}",
        path.display(),
        template.display()
    )]
    Generated {
        /// The file.
        path: PathBuf,
        /// The program.
        by: String,
        /// What it is made from.
        template: PathBuf,
    },
    /// It is what such a program makes the file from.
    #[error("{} is a template, which setup can't edit; add the handler by hand (docs/engines.md, k3s and RKE2)", path.display())]
    Template {
        /// The file.
        path: PathBuf,
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

/// What is to be changed; nothing where all is as it should be.
///
/// # Errors
///
/// Where the engine's files are not understood, not ours to edit, or would overrule us.
pub fn plan(request: &Request) -> Result<Vec<Change>, PlanError> {
    let tree = Tree::new(&request.root, None);
    let known = known(&tree, request)?;
    match &request.aim {
        Aim::Add { program, default } => add(&tree, request, known, program, *default),
        Aim::Remove => remove(&tree, known),
    }
}

/// The file by which Kubernetes can't use this containerd, whatever is planned.
#[must_use]
pub fn cri_disabled_by(request: &Request) -> Option<PathBuf> {
    let tree = Tree::new(&request.root, None);
    match request.kind {
        Kind::Containerd => places::cri_disabled_by(&tree, &paths(&tree, request)),
        _ => None,
    }
}

/// The files that the engine reads, whether they are there or not.
fn paths(tree: &Tree, request: &Request) -> Vec<PathBuf> {
    match (&request.file, request.kind) {
        (None, kind) => places::files(tree, kind),
        (Some(file), Kind::Containerd) => places::containerd(tree, file),
        (Some(file), _) => vec![file.clone()],
    }
}

/// The files that are there, read and understood.
fn known(tree: &Tree, request: &Request) -> Result<Vec<Known>, PlanError> {
    let mut inherited = 1;
    let mut known: Vec<Known> = Vec::new();
    for (position, path) in paths(tree, request).into_iter().enumerate() {
        let Some(original) = original::read(&tree.at(&path), &path)? else { continue };
        if request.kind == Kind::Containerd {
            refuse_generated(&path, &original.text)?;
        }
        let format = match request.kind {
            Kind::Docker => Format::Docker,
            Kind::Crio => Format::Crio,
            Kind::Podman => Format::Podman,
            Kind::Containerd => {
                let version = dialect::said_version_of(&original.text).unwrap_or(inherited);
                if position == 0 {
                    inherited = version;
                }
                Format::Containerd { version }
            }
        };
        let said = edit::read(format, &original.text)
            .map_err(|source| PlanError::Edit { path: path.clone(), source })?;
        known.push(Known { path, format, original, said });
    }
    Ok(known)
}

/// Refuses a file that is written anew at the next start of its program.
fn refuse_generated(path: &Path, text: &str) -> Result<(), PlanError> {
    if dialect::is_template(text) {
        return Err(PlanError::Template { path: path.to_owned() });
    }
    let Some(by) = dialect::generated_by(text) else { return Ok(()) };
    // containerd 2 came with a template of its own.
    let name = match dialect::version(text) {
        ..=2 => "config.toml.tmpl",
        _ => "config-v3.toml.tmpl",
    };
    let template = path.with_file_name(name);
    Err(PlanError::Generated { path: path.to_owned(), by: by.to_owned(), template })
}

/// Refuses to make a file that nobody reads, where k3s or RKE2 bring the only containerd.
fn refuse_unread(tree: &Tree, request: &Request, known: &[Known]) -> Result<(), PlanError> {
    if request.kind != Kind::Containerd || request.file.is_some() || !known.is_empty() {
        return Ok(());
    }
    for path in places::GENERATED {
        if let Seen::Found(text) = tree.read(path) {
            refuse_generated(Path::new(path), &text)?;
        }
    }
    Ok(())
}

fn add(
    tree: &Tree,
    request: &Request,
    mut known: Vec<Known>,
    program: &Path,
    default: bool,
) -> Result<Vec<Change>, PlanError> {
    let odd = || PlanError::OddRuntime { path: program.to_owned() };
    let text = program.to_str().filter(|_| program.is_absolute()).ok_or_else(odd)?;
    if !tree.is_executable(program) {
        return Err(PlanError::NoRuntime { path: program.to_owned() });
    }
    refuse_unread(tree, request, &known)?;
    let (path, format) = target(request, &known);
    let place = known.iter().position(|file| file.path == path);
    let before = place.map(|place| known[place].original.text.clone());
    let start = match (&before, format) {
        (Some(text), _) => text.clone(),
        (None, Format::Docker) => String::new(),
        (None, Format::Containerd { version }) => format!("{HEADER}version = {version}\n"),
        (None, _) => HEADER.to_owned(),
    };
    let model = match request.kind {
        Kind::Containerd => model(&known),
        _ => String::new(),
    };
    let after = edit::edit(format, &start, Wish::Add { program: text, default, model: &model })
        .map_err(|source| PlanError::Edit { path: path.clone(), source })?;
    if default && let Some((file, name)) = overruling(&known, place, &path) {
        return Err(PlanError::Overruled { path: file, name, target: path });
    }
    if before.as_ref() == Some(&after) {
        return Ok(Vec::new());
    }
    let original = place.map(|place| known.swap_remove(place));
    let at = tree.at(&path);
    let backup = match &original {
        Some(file) if is_backed_up(file, &at) => Backup::Keep,
        _ => Backup::Make,
    };
    let before = original.map(|file| file.original);
    writable(&at, &path, before.as_ref())?;
    Ok(vec![Change { at, path, before, after: Some(after), backup }])
}

/// Whether the backup beside a file is its text before setup first edited it.
fn is_backed_up(file: &Known, at: &Path) -> bool {
    let Some(former) = original::read_backup(at) else { return false };
    let Ok(former) = edit::read(file.format, &former) else { return false };
    // One beside a file without our runtime is older than that. Where another default runtime was
    // named since, that is what --remove has to restore.
    file.said.runtime && (file.said.is_default() || file.said.default == former.default)
}

/// The runtime of containerd that ours is to be like, as TOML.
fn model(known: &[Known]) -> String {
    let texts = known.iter().map(|file| match file.format {
        Format::Containerd { version } => (version, file.original.text.as_str()),
        _ => (0, ""),
    });
    dialect::model(&texts.collect::<Vec<_>>()).to_string()
}

/// The file that is read after the one at `path` and makes something else the default.
fn overruling(known: &[Known], place: Option<usize>, path: &Path) -> Option<(PathBuf, String)> {
    let after = |(position, file): &(usize, &Known)| match place {
        Some(place) => *position > place,
        // It isn't there yet: of one directory's files the names decide.
        None => file.path.parent() == path.parent() && file.path.as_path() > path,
    };
    let others = known.iter().enumerate().filter(after);
    let mut named = others.filter_map(|(_, file)| Some((file, file.said.default.clone()?)));
    let (file, name) = named.next_back()?;
    (!file.said.is_default()).then(|| (file.path.clone(), name))
}

/// The file that is to be edited: the one that has our runtime; else the one whose section
/// counts, of containerd's; else ours in the engine's directory; else the engine's own.
fn target(request: &Request, known: &[Known]) -> (PathBuf, Format) {
    // A distribution's own files are replaced by its updates.
    let editable = |file: &&Known| !file.path.starts_with("/usr");
    if let Some(file) = known.iter().filter(editable).rfind(|file| file.said.runtime) {
        return (file.path.clone(), file.format);
    }
    let own = request.file.clone().unwrap_or_else(|| places::main(request.kind).into());
    let main = known.iter().find(|file| file.path == own);
    match request.kind {
        Kind::Docker => (own, Format::Docker),
        Kind::Containerd => {
            if let Some(file) = known.iter().rfind(|file| file.said.section) {
                return (file.path.clone(), file.format);
            }
            // Every containerd reads version 2.
            let format = main.map_or(Format::Containerd { version: 2 }, |file| file.format);
            let drop_in = places::drop_in(request.kind).map(PathBuf::from);
            let imported = |path: &PathBuf| {
                main.is_some_and(|main| places::imports(&own, &main.original.text, path))
            };
            (drop_in.filter(imported).unwrap_or(own), format)
        }
        kind => {
            let format = if kind == Kind::Crio { Format::Crio } else { Format::Podman };
            match (places::drop_in(kind), &request.file) {
                (Some(drop_in), None) => (drop_in.into(), format),
                _ => (own, format),
            }
        }
    }
}

fn remove(tree: &Tree, known: Vec<Known>) -> Result<Vec<Change>, PlanError> {
    let mut changes = Vec::new();
    for file in known {
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
        let bare = edit::is_bare(file.format, &after);
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
    Ok(changes)
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
    struct Host(tempfile::TempDir);

    impl Host {
        fn new() -> Self {
            let host = Host(tempfile::tempdir().unwrap());
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
            plan(&Request { kind, root: self.0.path().to_owned(), file: None, aim })
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
        let imports = "version = 2\nimports = [\"conf.d/*.toml\"]\n";
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
            assert!(!host.at(drop_in).exists() && !backup_of(&host.at(drop_in)).exists());
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
    #[test]
    fn what_k3s_and_rke2_generate_is_refused_and_their_template_is_named() {
        let refused = |host: &Host, file: Option<&str>| {
            let root = host.0.path().to_owned();
            let file = file.map(PathBuf::from);
            let request = Request { kind: Kind::Containerd, root, file, aim: add(true) };
            plan(&request).unwrap_err().to_string()
        };
        for (path, by, version, template) in [
            (places::GENERATED[0], "k3s", 2, "config.toml.tmpl"),
            (places::GENERATED[1], "rke2", 3, "config-v3.toml.tmpl"),
        ] {
            let host = Host::new();
            let text = format!(
                "# File generated by {by}. DO NOT EDIT. Use config.toml.tmpl instead.\n\
                 version = {version}\n"
            );
            host.file(path, &text);
            let template = Path::new(path).with_file_name(template).display().to_string();
            let refusal = format!(
                "{path} is written by {by} at each of its starts; add the handler to {template} by \
                 hand (docs/engines.md, k3s and RKE2), and restart {by}"
            );
            assert_eq!(refused(&host, None), refusal);
            assert_eq!(refused(&host, Some(path)), refusal);
            assert!(host.plan(Kind::Containerd, Aim::Remove).unwrap().is_empty());
            host.file(&template, "{{ template \"base\" . }}\n");
            assert!(refused(&host, Some(&template)).contains("is a template, which setup can't"));
            // A containerd of its own is edited all the same.
            host.file("/etc/containerd/config.toml", "version = 2\n");
            assert_eq!(host.run(Kind::Containerd, add(true)), ["/etc/containerd/config.toml"]);
            assert_eq!(host.text(path), text);
        }
    }

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
