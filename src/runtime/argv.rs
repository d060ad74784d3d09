//! The command line of runc and crun: what of it concerns us.
//!
//! Pure. `create`, `run` and `restore` name a bundle that we may edit, `exec` a container that
//! we may have isolated, `checkpoint` one that couldn't be restored; every other command, and
//! everything that can't be parsed, is the real runtime's alone. Facts: the
//! flags of runc 1.1–1.3 (urfave/cli on Go's `flag`: one or two dashes, `-b=X`, flags
//! after the id) and of crun 1.8–1.28 (argp on `getopt_long`: `-bX`, bundled short
//! flags, unambiguous abbreviations of long ones). Where the two read a word
//! differently, [`Dialect`] decides.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Whose reading of a command line counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// runc, and what imitates it.
    Runc,
    /// crun.
    Crun,
}

impl Dialect {
    /// The dialect of the runtime whose file is `path`.
    #[must_use]
    pub fn of(path: &Path) -> Self {
        let name = path.file_name().unwrap_or_default().as_bytes();
        if name.windows(4).any(|part| part == b"crun") { Dialect::Crun } else { Dialect::Runc }
    }

    /// Where the runtime keeps its containers if `--root` doesn't say.
    #[must_use]
    pub fn default_root(self) -> &'static Path {
        Path::new(match self {
            Dialect::Runc => "/run/runc",
            Dialect::Crun => "/run/crun",
        })
    }
}

/// The file in which the runtime whose program is `program` keeps the state of the
/// container `id` below `root`; `None` of one that we don't know.
///
/// A name that merely looks like theirs is not enough: were there no such file, the
/// container would seem never to have been made.
#[must_use]
pub fn state_file(program: &Path, root: &Path, id: &str) -> Option<PathBuf> {
    let name = match program.file_name()?.to_str()? {
        "runc" => "state.json",
        "crun" => "status",
        _ => return None,
    };
    Some(root.join(id).join(name))
}

/// All files in which a runtime may keep the state of the container `id` below `root`: that of the
/// runtimes that we know by name, and for another program all that we know of.
#[must_use]
pub fn state_files(program: &Path, root: &Path, id: &str) -> Vec<PathBuf> {
    match state_file(program, root, id) {
        Some(file) => vec![file],
        None => ["state.json", "status"].map(|name| root.join(id).join(name)).into(),
    }
}

/// The file of `--log` as `given` to a runtime that reads it from `directory`; `None` if it is none.
///
/// crun takes `file:PATH`, `journald:ID` and `syslog:ID` as well, and no other word before a colon
/// (`get_log_type` in `src/libcrun/error.c`).
#[must_use]
pub fn log_file(dialect: Dialect, given: &Path, directory: &Path) -> Option<PathBuf> {
    let bytes = given.as_os_str().as_bytes();
    let file = match dialect {
        Dialect::Runc => given,
        Dialect::Crun => match bytes.strip_prefix(b"file:") {
            Some(file) => Path::new(OsStr::from_bytes(file)),
            None if bytes.contains(&b':') => return None,
            None => given,
        },
    };
    Some(directory.join(file)).filter(|_| !file.as_os_str().is_empty())
}

/// Our own flag, taken out before the real runtime sees the command line.
const OWN_FLAG: &str = "cgpu-config";

/// A command line without our own flags.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandLine {
    /// The file of `--cgpu-config`.
    pub config: Option<OsString>,
    /// What the real runtime gets, without the program's name.
    pub args: Vec<OsString>,
}

/// Takes `--cgpu-config FILE` and `--cgpu-config=FILE` out of the global flags of
/// `args` (without the program's name). The last one counts; one without a file is left
/// for the real runtime to refuse.
#[must_use]
pub fn take_own_flags(args: Vec<OsString>) -> CommandLine {
    let mut taken = CommandLine { config: None, args: Vec::with_capacity(args.len()) };
    let mut words = args.into_iter();
    while let Some(word) = words.next() {
        match global(&word) {
            GlobalWord::Own(Some(value)) => taken.config = Some(value),
            GlobalWord::Own(None) => match words.next() {
                Some(value) => taken.config = Some(value),
                None => taken.args.push(word),
            },
            GlobalWord::Flag { takes_next: true, .. } => {
                taken.args.push(word);
                taken.args.extend(words.next());
            }
            GlobalWord::Flag { .. } => taken.args.push(word),
            GlobalWord::Command => {
                taken.args.push(word);
                taken.args.extend(words.by_ref());
            }
        }
    }
    taken
}

/// What a command line is to us.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// The real runtime's alone.
    PassThrough,
    /// A container is made from a bundle.
    Create(Create),
    /// A process is started in a container.
    Exec(Exec),
    /// A container's state is saved.
    Checkpoint(Checkpoint),
}

/// `exec`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exec {
    /// `--root`, as given.
    pub root: Option<PathBuf>,
    /// The container's id; more than one where a flag that we don't know may have claimed
    /// the first.
    pub ids: Vec<OsString>,
    /// `--process`, as given: the file that describes the process.
    pub process: Option<PathBuf>,
    /// `--log`, as given.
    pub log: Option<PathBuf>,
    /// Whether `--log-format` is `json`.
    pub log_json: bool,
}

/// `checkpoint`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    /// `--root`, as given.
    pub root: Option<PathBuf>,
    /// What may be the container's id.
    pub ids: Vec<OsString>,
    /// Whether the container runs on: `--leave-running`, `--pre-dump`.
    pub leaves_running: bool,
    /// `--log`, as given.
    pub log: Option<PathBuf>,
    /// Whether `--log-format` is `json`.
    pub log_json: bool,
}

/// How a container is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// To be started later, as engines do.
    Create,
    /// And started at once.
    Run,
    /// From a checkpoint.
    Restore,
}

/// `create`, `run` or `restore`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Create {
    /// Which of them.
    pub verb: Verb,
    /// `--root`, as given.
    pub root: Option<PathBuf>,
    /// `--log`, as given.
    pub log: Option<PathBuf>,
    /// Whether `--log-format` is `json`.
    pub log_json: bool,
    /// `--bundle`, as given; `None` means the working directory.
    pub bundle: Option<PathBuf>,
    /// crun's `--config`: the file that stands for `config.json`, as given.
    pub config_file: Option<PathBuf>,
    /// The container's id; `None` where the words don't tell it.
    pub id: Option<OsString>,
    /// Whether every word is one that we know, where we know it: then the runtime reads
    /// the same bundle and the same id, or refuses.
    pub certain: bool,
}

/// Global flags with a value, of runc and crun.
const GLOBAL_VALUES: &[&str] =
    &["root", "log", "log-format", "log-level", "criu", "rootless", "cgroup-manager"];

/// Global flags without one.
const GLOBAL_SWITCHES: &[&str] = &["debug", "systemd-cgroup", "help", "h", "version", "v", "V"];

/// The commands of runc and crun.
const COMMANDS: &[&str] = &[
    "create",
    "run",
    "restore",
    "start",
    "state",
    "kill",
    "delete",
    "exec",
    "ps",
    "list",
    "events",
    "update",
    "pause",
    "resume",
    "checkpoint",
    "spec",
    "features",
    "init",
    "mounts",
    "help",
];

/// Flags with a value of the three commands that we read.
const COMMAND_VALUES: &[&str] = &[
    "bundle",
    "config",
    "console-socket",
    "pidfd-socket",
    "pid-file",
    "preserve-fds",
    "image-path",
    "work-path",
    "parent-path",
    "manage-cgroups-mode",
    "empty-ns",
    "status-fd",
    "lsm-profile",
    "lsm-mount-context",
    "network-lock",
];

/// Flags without one.
const COMMAND_SWITCHES: &[&str] = &[
    "no-pivot",
    "no-new-keyring",
    "no-subreaper",
    "detach",
    "keep",
    "tcp-established",
    "ext-unix-sk",
    "shell-job",
    "file-locks",
    "auto-dedup",
    "lazy-pages",
    "tcp-close",
    "skip-in-flight",
    "link-remap",
    "help",
    "usage",
    "version",
];

/// Flags with a value of `exec`, long and short.
const EXEC_VALUES: &[&str] = &[
    "console-socket",
    "pidfd-socket",
    "cwd",
    "env",
    "user",
    "additional-gids",
    "process",
    "pid-file",
    "process-label",
    "apparmor",
    "cap",
    "preserve-fds",
    "cgroup",
];
const EXEC_SHORT_VALUES: &[u8] = b"eugpc";

/// Flags without one.
const EXEC_SWITCHES: &[&str] =
    &["tty", "detach", "no-new-privs", "ignore-paused", "help", "usage", "version"];
const EXEC_SHORT_SWITCHES: &[u8] = b"tdh?V";

/// By these flags of `checkpoint` the container runs on.
const LEAVE_RUNNING: &[&str] = &["leave-running", "pre-dump"];

/// Flags with a value of `checkpoint`.
const CHECKPOINT_VALUES: &[&str] = &[
    "image-path",
    "work-path",
    "parent-path",
    "status-fd",
    "page-server",
    "manage-cgroups-mode",
    "empty-ns",
    "network-lock",
];

/// crun's flags of `checkpoint` (`src/checkpoint.c`; it may be built without `parent-path` and `pre-dump`): what
/// an abbreviation stands for.
const CRUN_CHECKPOINT: &[&str] = &[
    "image-path",
    "work-path",
    "leave-running",
    "tcp-established",
    "ext-unix-sk",
    "shell-job",
    "file-locks",
    "network-lock",
    "parent-path",
    "pre-dump",
    "manage-cgroups-mode",
    "help",
    "usage",
    "version",
];

enum GlobalWord {
    /// Our own flag, with its value if that is in the same word.
    Own(Option<OsString>),
    /// Another flag.
    Flag { name: String, value: Option<OsString>, takes_next: bool, known: bool },
    /// No flag.
    Command,
}

/// Splits `--name=value`, `-name=value`, `--name`, `-name`.
fn split_flag(word: &OsStr) -> Option<(String, Option<OsString>)> {
    let bytes = word.as_bytes();
    let body = bytes.strip_prefix(b"--").or_else(|| bytes.strip_prefix(b"-"))?;
    if body.is_empty() {
        return None;
    }
    let (name, value) = match body.iter().position(|&byte| byte == b'=') {
        Some(at) => (&body[..at], Some(OsString::from_vec(body[at + 1..].to_vec()))),
        None => (body, None),
    };
    Some((String::from_utf8_lossy(name).into_owned(), value))
}

fn global(word: &OsStr) -> GlobalWord {
    match split_flag(word) {
        Some((name, value)) if name == OWN_FLAG => GlobalWord::Own(value),
        Some((name, value)) => {
            let valued = GLOBAL_VALUES.contains(&name.as_str());
            let known = valued || GLOBAL_SWITCHES.contains(&name.as_str());
            GlobalWord::Flag { takes_next: valued && value.is_none(), name, value, known }
        }
        None => GlobalWord::Command,
    }
}

/// What `args` (without the program's name and our own flags) are to us.
#[must_use]
pub fn parse(args: &[OsString], dialect: Dialect) -> Command {
    let mut create = Create {
        verb: Verb::Create,
        root: None,
        log: None,
        log_json: false,
        bundle: None,
        config_file: None,
        id: None,
        certain: true,
    };
    let mut words = args.iter();
    let mut after_unknown = false;
    let verb = loop {
        let Some(word) = words.next() else { return Command::PassThrough };
        let GlobalWord::Flag { name, value, takes_next, known } = global(word) else {
            // `--` ends the flags; what follows is the command.
            if word == "--" {
                continue;
            }
            // A word behind a flag that we don't know may be its value.
            if after_unknown && !COMMANDS.iter().any(|command| word == *command) {
                after_unknown = false;
                continue;
            }
            break word;
        };
        after_unknown = !known && value.is_none();
        create.certain &= known;
        let value = if takes_next { words.next().cloned() } else { value };
        match (name.as_str(), value) {
            ("root", Some(value)) => create.root = Some(value.into()),
            ("log", Some(value)) => create.log = Some(value.into()),
            ("log-format", Some(value)) => create.log_json = value == "json",
            // These print and end.
            ("help" | "h" | "version" | "v" | "V", value) if !is_off(value.as_deref()) => {
                return Command::PassThrough;
            }
            _ => {}
        }
    };
    let rest: Vec<&OsStr> = words.map(OsString::as_os_str).collect();
    if verb == "exec" {
        let (ids, process) = exec_words(&rest, dialect);
        let Create { root, log, log_json, .. } = create;
        return Command::Exec(Exec { root, ids, process, log, log_json });
    }
    if verb == "checkpoint" {
        let Create { root, log, log_json, .. } = create;
        let words = checkpoint_words(&rest, dialect);
        return words.map_or(Command::PassThrough, |(ids, leaves_running)| {
            Command::Checkpoint(Checkpoint { root, ids, leaves_running, log, log_json })
        });
    }
    create.verb = match verb.to_str() {
        Some("create") => Verb::Create,
        Some("run") => Verb::Run,
        Some("restore") => Verb::Restore,
        _ => return Command::PassThrough,
    };
    let read = match dialect {
        Dialect::Runc => read_go(&rest, &mut create),
        Dialect::Crun => read_getopt(&rest, &mut create),
    };
    match read {
        // Both take exactly one id. What they refuse they refuse in their own words.
        Some(positionals) => match positionals.words.len() {
            0 => Command::PassThrough,
            2.. if create.certain => Command::PassThrough,
            _ => {
                create.id = positionals.id();
                Command::Create(create)
            }
        },
        None => Command::PassThrough,
    }
}

/// What may be the container's id among the words of an `exec`: the first that is no flag
/// and no value of one, and all before it that a flag may or may not have claimed. Both
/// runtimes take what follows for the command. Then the file of `--process`, as engines write
/// it.
fn exec_words(words: &[&OsStr], dialect: Dialect) -> (Vec<OsString>, Option<PathBuf>) {
    let mut ids = Vec::new();
    let mut process = None;
    let mut words = words.iter();
    while let Some(word) = words.next() {
        if let Some((name, value)) = split_flag(word)
            && matches!(name.as_str(), "process" | "p")
        {
            let value = value.or_else(|| words.next().map(|word| (*word).to_owned()));
            process = value.map(PathBuf::from);
            continue;
        }
        let claims = match exec_flag(word, dialect) {
            _ if *word == "--" => Claims::Nothing,
            None => {
                ids.push((*word).to_owned());
                break;
            }
            Some(claims) => claims,
        };
        match claims {
            Claims::Nothing => {}
            Claims::Next => drop(words.next()),
            // If it isn't a value, it is the id.
            Claims::Perhaps => ids.extend(words.next().map(|word| (*word).to_owned())),
        }
    }
    (ids, process)
}

/// What may be the container's id among the words of a `checkpoint`, and whether the container runs on.
/// `None` if the command only prints its help.
///
/// runc takes flags after the id as well; crun stops at the first word that isn't a flag (`ARGP_IN_ORDER`).
fn checkpoint_words(words: &[&OsStr], dialect: Dialect) -> Option<(Vec<OsString>, bool)> {
    let mut ids = Vec::new();
    // The last one of a name counts.
    let mut leaves_running = [false; LEAVE_RUNNING.len()];
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let Some((name, value)) = split_flag(word) else {
            let ends_flags = *word == "--";
            ids.extend((!ends_flags).then(|| (*word).to_owned()));
            if ends_flags || dialect == Dialect::Crun {
                ids.extend(words.by_ref().map(|word| (*word).to_owned()));
            }
            continue;
        };
        let name = match (dialect, word.as_bytes()) {
            (Dialect::Runc, _) => name.as_str(),
            (Dialect::Crun, [b'-', b'-', ..]) => {
                only(CRUN_CHECKPOINT.iter().copied(), &name).unwrap_or_default()
            }
            (Dialect::Crun, [b'-', b'?' | b'V', ..]) => "help",
            (Dialect::Crun, _) => "",
        };
        if matches!(name, "help" | "h" | "usage" | "version") && !is_off(value.as_deref()) {
            return None;
        }
        if let Some(at) = LEAVE_RUNNING.iter().position(|switch| *switch == name) {
            leaves_running[at] = !is_off(value.as_deref());
        } else if CHECKPOINT_VALUES.contains(&name) && value.is_none() {
            words.next();
        }
    }
    Some((ids, leaves_running.contains(&true)))
}

/// What a flag does with the next word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Claims {
    Nothing,
    Next,
    Perhaps,
}

/// What `word` claims, if it is a flag of `exec`.
fn exec_flag(word: &OsStr, dialect: Dialect) -> Option<Claims> {
    let (name, value) = split_flag(word)?;
    let bytes = word.as_bytes();
    if dialect == Dialect::Crun && !bytes.starts_with(b"--") {
        // Several short ones may share a word, and the last may have its value in it.
        for (at, short) in bytes.iter().enumerate().skip(1) {
            if EXEC_SHORT_VALUES.contains(short) {
                let glued = at + 1 < bytes.len();
                return Some(if glued { Claims::Nothing } else { Claims::Next });
            }
            if !EXEC_SHORT_SWITCHES.contains(short) {
                return Some(Claims::Perhaps);
            }
        }
        return Some(Claims::Nothing);
    }
    if value.is_some() {
        return Some(Claims::Nothing);
    }
    let name = name.as_str();
    let short = |list: &[u8]| matches!(name.as_bytes(), [short] if list.contains(short));
    // crun takes any beginning of a name that is no other's.
    let long = |list: &[&str]| match dialect {
        Dialect::Runc => list.contains(&name),
        Dialect::Crun => list.iter().any(|long| long.starts_with(name)),
    };
    Some(match (long(EXEC_VALUES), long(EXEC_SWITCHES)) {
        (true, false) => Claims::Next,
        (false, true) => Claims::Nothing,
        (true, true) => Claims::Perhaps,
        (false, false) if short(EXEC_SHORT_VALUES) => Claims::Next,
        (false, false) if short(EXEC_SHORT_SWITCHES) => Claims::Nothing,
        (false, false) => Claims::Perhaps,
    })
}

/// Whether `value` switches a switch off, in the words of Go's `strconv.ParseBool`.
fn is_off(value: Option<&OsStr>) -> bool {
    let off = ["0", "f", "F", "false", "FALSE", "False"];
    value.is_some_and(|value| off.iter().any(|word| value == *word))
}

/// The words of a command that are no flags.
#[derive(Default)]
struct Positionals {
    /// Each with whether it stands behind a flag that we don't know.
    words: Vec<(OsString, bool)>,
}

impl Positionals {
    /// The id: the one word there is, or the one that no unknown flag can claim.
    fn id(&self) -> Option<OsString> {
        let single = |words: Vec<&(OsString, bool)>| match words.as_slice() {
            [(word, _)] => Some(word.clone()),
            _ => None,
        };
        single(self.words.iter().collect())
            .or_else(|| single(self.words.iter().filter(|(_, claimed)| !claimed).collect()))
    }
}

fn set(create: &mut Create, name: &str, value: Option<&OsStr>) {
    match (name, value) {
        ("bundle" | "b", Some(value)) => create.bundle = Some(value.into()),
        ("config" | "f", Some(value)) => create.config_file = Some(value.into()),
        _ => {}
    }
}

/// Reads a command's words as Go's `flag` does, after urfave/cli has moved the flags to
/// the front. `None` where the command only prints its help.
///
/// Moving them means that `id --pid-file`, and what stands before a `--`, can give a flag
/// another value than the next word: such a line is not certain.
fn read_go(words: &[&OsStr], create: &mut Create) -> Option<Positionals> {
    let mut positionals = Positionals::default();
    let mut words = words.iter();
    let mut after_unknown = false;
    while let Some(word) = words.next() {
        if *word == "--" {
            positionals.words.extend(words.by_ref().map(|word| ((*word).into(), false)));
            break;
        }
        let Some((name, value)) = split_flag(word) else {
            positionals.words.push(((*word).into(), after_unknown));
            after_unknown = false;
            continue;
        };
        let name = name.as_str();
        if matches!(name, "help" | "h") && !is_off(value.as_deref()) {
            return None;
        }
        let switch = COMMAND_SWITCHES.contains(&name) || matches!(name, "d" | "h");
        let valued = (COMMAND_VALUES.contains(&name) || name == "b") && name != "config";
        after_unknown = !switch && !valued && value.is_none();
        create.certain &= switch || valued;
        if valued {
            let value = value.as_deref().or_else(|| {
                let next = words.next().copied();
                create.certain &= next.is_some_and(|next| next != "--");
                next
            });
            // runc takes an empty bundle for none, crun for a path.
            if matches!(name, "bundle" | "b") && value.is_some_and(OsStr::is_empty) {
                create.bundle = None;
            } else {
                set(create, name, value);
            }
        }
    }
    Some(positionals)
}

/// Reads a command's words as `getopt_long` does.
fn read_getopt(words: &[&OsStr], create: &mut Create) -> Option<Positionals> {
    let mut positionals = Positionals::default();
    let mut words = words.iter();
    let mut after_unknown = false;
    while let Some(word) = words.next() {
        let bytes = word.as_bytes();
        if *word == "--" {
            positionals.words.extend(words.by_ref().map(|word| ((*word).into(), false)));
            break;
        }
        if bytes.starts_with(b"--") {
            let (name, value) = split_flag(word)?;
            let long = unabbreviated(&name);
            if matches!(long, Some("help" | "usage" | "version")) {
                return None;
            }
            let valued = long.is_some_and(|long| COMMAND_VALUES.contains(&long));
            after_unknown = long.is_none() && value.is_none();
            create.certain &= long.is_some();
            if let (Some(long), true) = (long, valued) {
                let value = value.as_deref().or_else(|| words.next().copied());
                set(create, long, value);
            }
        } else if bytes.len() > 1 && bytes[0] == b'-' {
            after_unknown = false;
            for (at, short) in bytes.iter().enumerate().skip(1) {
                match short {
                    b'b' | b'f' => {
                        let glued = &bytes[at + 1..];
                        let value = if glued.is_empty() {
                            words.next().copied()
                        } else {
                            Some(OsStr::from_bytes(glued))
                        };
                        set(create, if *short == b'b' { "b" } else { "f" }, value);
                        break;
                    }
                    b'd' => {}
                    b'?' | b'h' | b'V' => return None,
                    _ => {
                        after_unknown = true;
                        create.certain = false;
                    }
                }
            }
        } else {
            positionals.words.push(((*word).into(), after_unknown));
            after_unknown = false;
        }
    }
    Some(positionals)
}

/// The long flag that `name` is, or is the one abbreviation of.
fn unabbreviated(name: &str) -> Option<&'static str> {
    only(COMMAND_VALUES.iter().chain(COMMAND_SWITCHES).copied(), name)
}

/// The flag of `known` that `name` is, or is the one abbreviation of.
fn only(known: impl Iterator<Item = &'static str> + Clone, name: &str) -> Option<&'static str> {
    let exact = known.clone().find(|long| *long == name);
    exact.or_else(|| {
        let mut matching = known.filter(|long| long.starts_with(name));
        matching.next().filter(|_| matching.next().is_none())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    fn created(line: &str, dialect: Dialect) -> Create {
        match parse(&words(line), dialect) {
            Command::Create(create) => create,
            other => panic!("{line} is no create: {other:?}"),
        }
    }

    /// The state file of a container is known by the exact name of its runtime only: runc or crun.
    #[test]
    fn state_file_requires_the_exact_runtime_name() {
        let of = |program: &str| state_file(Path::new(program), Path::new("/r"), "a");
        assert_eq!(of("/usr/sbin/runc"), Some("/r/a/state.json".into()));
        assert_eq!(of("/usr/bin/crun"), Some("/r/a/status".into()));
        for other in ["/opt/runc-wrapper", "/opt/crun.real", "/usr/bin/youki", "/"] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    #[test]
    fn log_path_matches_what_the_runtime_would_write() {
        for (given, of_runc, of_crun) in [
            ("/l/log", Some("/l/log"), Some("/l/log")),
            ("log", Some("/b/log"), Some("/b/log")),
            ("file:/l/log", Some("/b/file:/l/log"), Some("/l/log")),
            ("file:log", Some("/b/file:log"), Some("/b/log")),
            ("file:/l/a:b", Some("/b/file:/l/a:b"), Some("/l/a:b")),
            ("journald:id", Some("/b/journald:id"), None),
            ("syslog:", Some("/b/syslog:"), None),
            ("/l/a:b", Some("/l/a:b"), None),
            ("file:", Some("/b/file:"), None),
            ("", None, None),
        ] {
            for (dialect, file) in [(Dialect::Runc, of_runc), (Dialect::Crun, of_crun)] {
                let found = log_file(dialect, Path::new(given), Path::new("/b"));
                assert_eq!(found.as_deref(), file.map(Path::new), "{given} {dialect:?}");
            }
        }
    }

    fn bundle_and_id(line: &str, dialect: Dialect) -> (String, String) {
        let create = created(line, dialect);
        let text = |value: Option<OsString>| {
            value.map_or("-".to_owned(), |value| value.to_string_lossy().into_owned())
        };
        (text(create.bundle.map(PathBuf::into_os_string)), text(create.id))
    }

    #[test]
    fn every_form_of_bundle_is_read() {
        use Dialect::{Crun, Runc};
        for (line, dialects) in [
            ("create --bundle B id", &[Runc, Crun][..]),
            ("create --bundle=B id", &[Runc, Crun]),
            ("create -b B id", &[Runc, Crun]),
            ("create --b B id", &[Runc, Crun]),
            ("create id --bundle B", &[Runc, Crun]),
            ("create id -b B", &[Runc, Crun]),
            ("run --bundle A --bundle B id", &[Runc, Crun]),
            ("run -b A -d -b B id", &[Runc, Crun]),
            ("run -b A -d --bundle B id", &[Crun]),
            ("restore --image-path /i --bundle B id", &[Runc, Crun]),
            ("create --bundle B -- id", &[Runc, Crun]),
            ("create --pid-file P --console-socket S --bundle B id", &[Runc, Crun]),
            ("create -b=B id", &[Runc]),
            ("create -bundle B id", &[Runc]),
            ("create -bundle=B id", &[Runc]),
            ("create --b=B id", &[Runc, Crun]),
            ("create -bB id", &[Crun]),
            ("create -dbB id", &[Crun]),
            ("create --bund B id", &[Crun]),
            ("create --bun=B id", &[Crun]),
        ] {
            for dialect in dialects {
                let expected = ("B".to_owned(), "id".to_owned());
                assert_eq!(bundle_and_id(line, *dialect), expected, "{line} {dialect:?}");
            }
        }
    }

    #[test]
    fn global_flags_and_their_values_are_no_command() {
        let line = "--root /r --log L --log-format json --systemd-cgroup --rootless=false \
                    create --bundle B --pid-file P id";
        let create = created(line, Dialect::Runc);
        assert_eq!(create.root.as_deref(), Some(Path::new("/r")));
        assert_eq!(create.log.as_deref(), Some(Path::new("L")));
        assert!(create.log_json);
        assert_eq!(create.id.as_deref(), Some(OsStr::new("id")));
        for line in ["-root=/r create id", "--root=/r create id", "-root /r create id"] {
            assert_eq!(created(line, Dialect::Runc).root.as_deref(), Some(Path::new("/r")));
        }
        let create = created("--cgroup-manager cgroupfs --log-level debug run id", Dialect::Crun);
        assert_eq!(create.id.as_deref(), Some(OsStr::new("id")));
    }

    /// A command line that only resembles a container creation is passed through to the runtime.
    #[test]
    fn lookalikes_of_create_pass_through() {
        for line in [
            "",
            "--version",
            "-v",
            "features",
            "state create",
            "--root create start id",
            "--log create delete --force run",
            "kill create 9",
            "create --help",
            "run -h",
            "--help create",
            "unknown create",
            "--root",
        ] {
            assert_eq!(parse(&words(line), Dialect::Runc), Command::PassThrough, "{line}");
        }
    }

    #[test]
    fn a_container_may_be_called_create() {
        assert_eq!(bundle_and_id("create create", Dialect::Runc), ("-".into(), "create".into()));
        assert_eq!(bundle_and_id("run -b B run", Dialect::Crun), ("B".into(), "run".into()));
    }

    #[test]
    fn an_unknown_flag_never_hides_a_create() {
        assert_eq!(
            bundle_and_id("--new value create -b B id", Dialect::Runc),
            ("B".into(), "id".into())
        );
        assert_eq!(bundle_and_id("--new create -b B id", Dialect::Runc), ("B".into(), "id".into()));
        assert_eq!(
            bundle_and_id("create --new value -b B id", Dialect::Runc),
            ("B".into(), "id".into())
        );
        assert_eq!(
            bundle_and_id("create --new one two three", Dialect::Runc),
            ("-".into(), "-".into())
        );
    }

    #[test]
    fn a_switch_that_is_off_hides_no_create() {
        for line in [
            "--help=false run -b B id",
            "--version=0 run -b B id",
            "-h=F -v=False run -b B id",
            "run -b B -h=0 id",
            "run --help=false --bundle=B id",
        ] {
            assert_eq!(bundle_and_id(line, Dialect::Runc), ("B".into(), "id".into()), "{line}");
        }
        for line in ["--help=true run -b B id", "run -h=1 -b B id", "--version=x run id"] {
            assert_eq!(parse(&words(line), Dialect::Runc), Command::PassThrough, "{line}");
        }
    }

    #[test]
    fn exec_container_is_first_word_unclaimed_by_flags() {
        use Dialect::{Crun, Runc};
        let ids = |line: &str, dialect| match parse(&words(line), dialect) {
            Command::Exec(exec) => exec
                .ids
                .iter()
                .map(|id| id.to_str().unwrap().to_owned())
                .collect::<Vec<_>>()
                .join(" "),
            other => panic!("{line}: {other:?}"),
        };
        for (line, wanted) in [
            ("exec id create --bundle B", "id"),
            ("--root /r exec --process /p --detach --pid-file /f id", "id"),
            ("exec -t -u 0 -e A=b --cwd / id sh -c x", "id"),
            ("exec --tty --env=A=b --cap CAP_X id -e B", "id"),
            ("exec -- id sh", "id"),
            ("exec --new value id sh", "value id"),
            ("exec --new=value id sh", "id"),
            ("exec --new id sh", "id sh"),
            ("exec", ""),
            ("exec --process", ""),
        ] {
            for dialect in [Runc, Crun] {
                assert_eq!(ids(line, dialect), wanted, "{line} {dialect:?}");
            }
        }
        assert_eq!(ids("exec -tdu 0 id sh", Crun), "id");
        assert_eq!(ids("exec -eA=b -tp/p id", Crun), "id");
        assert_eq!(ids("exec --proc /p id", Crun), "id");
        assert_eq!(ids("exec --proc /p id", Runc), "/p id");
        assert_eq!(ids("exec -tty -env A=b id", Runc), "id");
        match parse(&words("--root /r --log /l --log-format json exec id"), Runc) {
            Command::Exec(exec) => {
                assert_eq!(exec.root.as_deref(), Some(Path::new("/r")));
                assert_eq!((exec.log.as_deref(), exec.log_json), (Some(Path::new("/l")), true));
            }
            other => panic!("{other:?}"),
        }
        for line in ["exec --process /p -d id", "exec -d -p /p id", "exec --process=/p id"] {
            for dialect in [Runc, Crun] {
                let Command::Exec(exec) = parse(&words(line), dialect) else { panic!("{line}") };
                assert_eq!(exec.process.as_deref(), Some(Path::new("/p")), "{line}");
                assert_eq!(exec.ids, ["id"], "{line}");
            }
        }
    }

    /// The ids of a checkpoint, and whether its container runs on.
    fn checkpointed(line: &str, dialect: Dialect) -> (String, bool) {
        match parse(&words(line), dialect) {
            Command::Checkpoint(checkpoint) => {
                let ids = checkpoint.ids.iter().map(|id| id.to_str().unwrap());
                (ids.collect::<Vec<_>>().join(" "), checkpoint.leaves_running)
            }
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn checkpoint_ends_container_unless_flagged_to_leave_running() {
        use Dialect::{Crun, Runc};
        for (line, leaves_running, dialects) in [
            ("checkpoint id", false, &[Runc, Crun][..]),
            (
                "checkpoint --image-path /i --work-path=/w --tcp-established id",
                false,
                &[Runc, Crun],
            ),
            ("checkpoint --image-path --leave-running id", false, &[Runc, Crun]),
            ("checkpoint --network-lock --pre-dump id", false, &[Crun]),
            ("checkpoint --leave-running id", true, &[Runc, Crun]),
            ("checkpoint --image-path /i --leave-running --work-path /w id", true, &[Runc, Crun]),
            ("checkpoint --parent-path p --pre-dump id", true, &[Runc, Crun]),
            ("checkpoint --leave-running -- id", true, &[Runc, Crun]),
            ("checkpoint -leave-running id", true, &[Runc]),
            ("checkpoint --leave-running=true id", true, &[Runc]),
            ("checkpoint -pre-dump=1 id", true, &[Runc]),
            ("checkpoint --leave-running=false id", false, &[Runc]),
            ("checkpoint --leave-running -leave-running=F id", false, &[Runc]),
            ("checkpoint --leave-running=0 --leave-running id", true, &[Runc]),
            ("checkpoint --leave-running=false --pre-dump id", true, &[Runc]),
            ("checkpoint id --leave-running", true, &[Runc]),
            ("checkpoint --lea id", false, &[Runc]),
            // Of one dash crun makes short flags, and has none of these letters.
            ("checkpoint -leave-running id", false, &[Crun]),
            ("checkpoint --l id", true, &[Crun]),
            ("checkpoint --leave --im /i id", true, &[Crun]),
            ("checkpoint --pr id", true, &[Crun]),
            ("checkpoint --p id", false, &[Crun]),
        ] {
            for dialect in dialects {
                let expected = ("id".to_owned(), leaves_running);
                assert_eq!(checkpointed(line, *dialect), expected, "{line} {dialect:?}");
            }
        }
        // crun reads no flag after the id.
        let after = ("id --leave-running".to_owned(), false);
        assert_eq!(checkpointed("checkpoint id --leave-running", Crun), after);
        // A word behind a flag that we don't know may be its value.
        for dialect in [Runc, Crun] {
            assert_eq!(checkpointed("checkpoint --new a id", dialect), ("a id".to_owned(), false));
        }
        for (line, dialects) in [
            ("checkpoint --help id", &[Runc, Crun][..]),
            ("checkpoint -h id", &[Runc]),
            ("checkpoint -? id", &[Crun]),
            ("checkpoint -V", &[Crun]),
            ("checkpoint --usage id", &[Crun]),
        ] {
            for dialect in dialects {
                assert_eq!(parse(&words(line), *dialect), Command::PassThrough, "{line}");
            }
        }
        let line = "--root /r --log /l --log-format json checkpoint id";
        let Command::Checkpoint(read) = parse(&words(line), Runc) else { panic!("{line}") };
        assert_eq!(read.root.as_deref(), Some(Path::new("/r")));
        assert_eq!((read.log.as_deref(), read.log_json), (Some(Path::new("/l")), true));
    }

    /// A command line with no id, or with several, is left to the runtime to refuse.
    #[test]
    fn missing_or_surplus_id_passes_through_to_runtime() {
        for line in ["run", "run -b B", "create -b B id more", "run -- id -b B", "run -b"] {
            for dialect in [Dialect::Runc, Dialect::Crun] {
                assert_eq!(parse(&words(line), dialect), Command::PassThrough, "{line}");
            }
        }
    }

    #[test]
    fn what_runc_could_read_otherwise_is_no_certainty() {
        // urfave/cli makes of the first two: --pid-file id, bundle A and id "more".
        for line in ["run -b A id more --pid-file", "run id more -b", "run id -b -- B"] {
            assert!(!created(line, Dialect::Runc).certain, "{line}");
        }
        assert!(!created("--new run id", Dialect::Runc).certain);
        assert!(!created("run --new id", Dialect::Crun).certain);
        assert!(!created("run -x id", Dialect::Crun).certain);
        assert!(created("--root /r --debug run --no-pivot -b B id", Dialect::Runc).certain);
    }

    /// An empty --bundle is no bundle in runc, and a path in crun.
    #[test]
    fn empty_bundle_differs_between_runc_and_crun() {
        assert_eq!(bundle_and_id("run -b= id", Dialect::Runc), ("-".into(), "id".into()));
        assert_eq!(bundle_and_id("run -b A --b= id", Dialect::Runc), ("-".into(), "id".into()));
        assert_eq!(bundle_and_id("run --bundle= id", Dialect::Crun), ("".into(), "id".into()));
    }

    #[test]
    fn crun_names_another_config_file() {
        for line in ["run -f c.json -b B id", "run --config=c.json -b B id", "run -fc.json id"] {
            let create = created(line, Dialect::Crun);
            assert_eq!(create.config_file.as_deref(), Some(Path::new("c.json")), "{line}");
        }
        assert_eq!(
            bundle_and_id("create -bundle id", Dialect::Crun),
            ("undle".into(), "id".into())
        );
    }

    #[test]
    fn own_flag_is_removed_from_global_flags_only() {
        for line in [
            "--cgpu-config /c --root /r create --bundle B id",
            "--root /r --cgpu-config=/c create --bundle B id",
            "--cgpu-config /x --root /r --cgpu-config /c create --bundle B id",
        ] {
            let taken = take_own_flags(words(line));
            assert_eq!(taken.config.as_deref(), Some(OsStr::new("/c")), "{line}");
            assert_eq!(taken.args, words("--root /r create --bundle B id"), "{line}");
        }
        let line = "--root --cgpu-config exec id --cgpu-config /c";
        assert_eq!(take_own_flags(words(line)), CommandLine { config: None, args: words(line) });
        let line = "--cgpu-config";
        assert_eq!(take_own_flags(words(line)), CommandLine { config: None, args: words(line) });
    }

    proptest::proptest! {
        #[test]
        fn no_command_line_breaks_the_reader(
            line in proptest::collection::vec("(-{0,2}(b|bundle|f|root|x|create|run|id)?=?.{0,3})", 0..8)
        ) {
            let args: Vec<OsString> = line.into_iter().map(OsString::from).collect();
            let taken = take_own_flags(args);
            for dialect in [Dialect::Runc, Dialect::Crun] {
                let _ = parse(&taken.args, dialect);
            }
        }
    }
}
