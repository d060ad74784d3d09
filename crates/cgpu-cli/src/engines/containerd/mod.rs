//! What the files of a containerd's configuration come to, as that release reads them. Pure.
//!
//! Owns which part of which file counts, whose word is the last, and how containerd compares
//! keys. Must not know where the files are: `super::places` finds them.
//!
//! By containerd's sources (`cmd/containerd/server/config`, `plugins/cri/runtime`):
//!
//! | release | a file's part | of several files |
//! |---|---|---|
//! | 1.x | `cri` in version 1, `io.containerd.grpc.v1.cri` in version 2 | that of the last file |
//! | 2.0 to 2.2 | `io.containerd.cri.v1.runtime`; the older two as well, but only where the last file that says a version of 2 or 3 says 2 | merged |
//! | 2.3 on | all of them, each file by its own version | merged |

pub(crate) mod cri_table;

use std::path::Path;

use toml::{Table, Value};

use super::runtime_name::{NAME, is_ours};
use super::toml_values::get;

/// containerd's CRI plugin by the version of the configuration.
pub(crate) const CRI: [(i64, &str); 3] =
    [(1, "cri"), (2, "io.containerd.grpc.v1.cri"), (3, "io.containerd.cri.v1.runtime")];

/// The newest version of a configuration that is known.
pub(crate) const NEWEST: i64 = 4;

/// The annotations that we read, as containerd is told of them.
pub(crate) const ANNOTATIONS: [&str; 2] = ["aliyun.com/*", "cgpu/*"];

/// The keys of a runtime and around it that we compare. containerd takes them in any case.
const KEYS: [&str; 13] = [
    "BinaryName",
    "SystemdCgroup",
    "base_runtime_spec",
    "container_annotations",
    "containerd",
    "default_runtime",
    "default_runtime_name",
    "options",
    "pod_annotations",
    "runtime_path",
    "runtime_type",
    "runtimes",
    "snapshotter",
];

/// What a runtime that pods get calls runc's shim.
const RUNC_SHIM: &str = "io.containerd.runc.";

/// A release of containerd: they differ in how they read their files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release {
    /// The first number.
    pub major: u32,
    /// The second number.
    pub minor: u32,
}

impl Release {
    /// That of a containerd whose `--version` begins with `line`.
    pub(crate) fn of(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let _ = words.next().filter(|word| *word == "containerd")?;
        words.find_map(|word| {
            let mut numbers = word.strip_prefix('v').unwrap_or(word).split('.');
            let major = numbers.next()?.parse().ok()?;
            let minor = numbers.next()?.parse().ok()?;
            Some(Release { major, minor })
        })
    }
}

/// How files are read: by a release that is known, or by the one that the main file's version
/// lets one expect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reading {
    /// containerd 1.x.
    One,
    /// containerd 2.0 to 2.2.
    Two {
        /// Whether the parts of older versions are read.
        older: bool,
    },
    /// containerd 2.3 and later.
    Later,
    /// Nobody knows: version 2 and older are read by all of them.
    Unknown,
}

impl Reading {
    /// That of `release`, else of whoever reads a main file of such a version. `said` are the
    /// versions that the files say, in the order of reading.
    pub(crate) fn of(release: Option<Release>, said: &[Option<i64>]) -> Self {
        let last = said.iter().rev().find_map(|said| said.filter(|said| *said >= 2));
        let two = Reading::Two { older: last == Some(2) };
        match (release, said.first().copied().flatten()) {
            (Some(Release { major: ..2, .. }), _) => Reading::One,
            (Some(Release { major: 2, minor: ..3 }), _) | (None, Some(3)) => two,
            (Some(_), _) | (None, Some(4..)) => Reading::Later,
            (None, _) => Reading::Unknown,
        }
    }

    /// Whether what files say is merged, and not the last one's word all that counts.
    pub(crate) fn merges(self) -> bool {
        matches!(self, Reading::Two { .. } | Reading::Later)
    }

    /// The plugins whose tables are read of a file of this version, the last word last.
    pub(crate) fn plugins(self, version: i64) -> &'static [(i64, &'static str)] {
        match (self, version) {
            (Reading::Two { older: false }, _) | (_, 3..) => &CRI[2..],
            (Reading::Two { .. } | Reading::Later, 2) => &CRI[1..],
            (Reading::Two { .. } | Reading::Later, _) => &CRI,
            (Reading::One | Reading::Unknown, 2) => &CRI[1..2],
            (Reading::One | Reading::Unknown, _) => &CRI[..1],
        }
    }

    /// The plugins whose tables have to say something for this release to read it of a file of
    /// this version: several where nobody knows which it is.
    pub(crate) fn written(self, version: i64) -> &'static [(i64, &'static str)] {
        match (self, version) {
            (Reading::Two { older: false }, _) | (_, 3..) => &CRI[2..],
            (_, 2) => &CRI[1..2],
            (Reading::One, _) => &CRI[..1],
            (Reading::Two { older: true } | Reading::Later, _) => &CRI[2..],
            // No release minds the other one's.
            (Reading::Unknown, _) => UNVERSIONED,
        }
    }
}

/// What a file of version 1 has to say for every release.
const UNVERSIONED: &[(i64, &str)] = &[CRI[0], CRI[2]];

/// All plugins that may have our runtime, whoever reads them.
pub(crate) fn plugins() -> impl Iterator<Item = &'static str> {
    CRI.iter().map(|(_, plugin)| *plugin)
}

/// A file of a configuration, in the order of reading.
#[derive(Debug, Clone, Copy)]
pub(crate) struct File<'a> {
    /// The version that it says.
    pub(crate) said: Option<i64>,
    /// What it says.
    pub(crate) table: &'a Table,
}

impl<'a> File<'a> {
    /// The file that says this.
    pub(crate) fn of(table: &'a Table) -> Self {
        File { said: table.get("version").and_then(Value::as_integer), table }
    }
}

/// The version by which each file is read: containerd 1 gives those that say none that of the
/// main file, containerd 2 the first.
pub(crate) fn versions(files: &[File<'_>], reading: Reading) -> Vec<i64> {
    let main = files.first().and_then(|file| file.said).unwrap_or(1);
    let unsaid = if reading.merges() { 1 } else { main };
    files.iter().map(|file| file.said.unwrap_or(unsaid)).collect()
}

/// What all files come to: the table that has the runtimes and the default one's name, its
/// keys spelled as containerd's documents spell them.
pub(crate) fn effective(files: &[File<'_>], reading: Reading) -> Table {
    let versions = versions(files, reading);
    let sections = files.iter().zip(versions).flat_map(|(file, version)| {
        let plugins = reading.plugins(version).iter();
        plugins.filter_map(|(_, plugin)| section(file.table, plugin))
    });
    match reading {
        Reading::Two { .. } | Reading::Later => sections.fold(Table::new(), merge),
        Reading::One => sections.last().unwrap_or_default(),
        // The last file's word is the last for both kinds; what it leaves out may count.
        Reading::Unknown => sections.fold(Table::new(), |old, new| match model_of(&new) {
            Some(_) => new,
            None => merge(old, new),
        }),
    }
}

/// Whether containerd gives pods the devices that a device plugin or a claim names by CDI (`enable_cdi`). `None` where
/// it has no such setting, or nobody knows its release.
pub(crate) fn gives_cdi_devices(
    files: &[File<'_>],
    reading: Reading,
    release: Option<Release>,
) -> Option<bool> {
    // Off in 1.7, and on from 2.0 (`DefaultConfig` of containerd's `pkg/cri/config`, `internal/cri/config`).
    let unsaid = match release {
        Some(Release { major: 1, minor }) => (minor >= 7).then_some(false)?,
        Some(_) => true,
        None => reading.merges().then_some(true)?,
    };
    let parts = files.iter().zip(versions(files, reading)).flat_map(|(file, version)| {
        let plugins = reading.plugins(version).iter();
        plugins.filter_map(|(_, plugin)| file.table.get("plugins")?.get(plugin)?.as_table())
    });
    let mut said = parts.map(|part| get(part, "enable_cdi").and_then(Value::as_bool));
    // containerd 1 takes the whole of the last file.
    let said = if reading.merges() { said.flatten().last() } else { said.next_back().flatten() };
    Some(said.unwrap_or(unsaid))
}

/// What one file says to a plugin of ours and other runtimes, in the documents' spelling.
pub(crate) fn section(table: &Table, plugin: &str) -> Option<Table> {
    let plugin = table.get("plugins")?.as_table()?.get(plugin)?.as_table()?;
    let section = canonical(plugin).remove("containerd")?;
    let mut section = canonical(section.as_table()?);
    if let Some(Value::Table(runtimes)) = section.get_mut("runtimes") {
        // The keys of this one are names.
        for (_, runtime) in runtimes.iter_mut() {
            spell(runtime);
        }
    }
    if let Some(runtime) = section.get_mut("default_runtime") {
        spell(runtime);
    }
    Some(section)
}

fn spell(runtime: &mut Value) {
    let Value::Table(table) = runtime else { return };
    let mut spelled = canonical(table);
    if let Some(Value::Table(options)) = spelled.get_mut("options") {
        *options = canonical(options);
    }
    *table = spelled;
}

/// A table whose keys are spelled as containerd's documents spell them. Of several spellings
/// of one key the last one in the order of bytes counts, as containerd 2 has it.
fn canonical(table: &Table) -> Table {
    let mut keys: Vec<&String> = table.keys().collect();
    keys.sort();
    let mut spelled = Table::new();
    for key in keys {
        let name = KEYS.iter().find(|name| name.eq_ignore_ascii_case(key));
        spelled.insert(name.map_or(key.as_str(), |name| name).to_owned(), table[key].clone());
    }
    spelled
}

/// A key that a table has in two spellings.
pub(crate) fn spelled_twice(table: &Table) -> Option<&str> {
    table.keys().map(String::as_str).find(|key| {
        let same = |other: &&String| other.eq_ignore_ascii_case(key);
        table.keys().filter(same).count() > 1
    })
}

/// The runtime that ours is to be like: the default one, else runc. Empty where none is named
/// whose shim is runc's: another shim has other options.
pub(crate) fn model(effective: &Table) -> Table {
    model_of(effective).cloned().unwrap_or_default()
}

fn model_of(section: &Table) -> Option<&Table> {
    let runtimes = table_of(section, "runtimes");
    let named = |name: &str| runtimes?.get(name)?.as_table();
    let default = section.get("default_runtime_name").and_then(Value::as_str);
    let candidates = [default.and_then(named), table_of(section, "default_runtime"), named("runc")];
    let usable = |runtime: &&Table| {
        let shim = runtime.get("runtime_type").and_then(Value::as_str);
        shim.is_some_and(|shim| shim.starts_with(RUNC_SHIM))
            && !program(runtime).is_some_and(is_ours)
    };
    candidates.into_iter().flatten().find(usable)
}

/// The program that a runtime's shim is told to run.
pub(crate) fn program(runtime: &Table) -> Option<&str> {
    table_of(runtime, "options")?.get("BinaryName")?.as_str().filter(|name| !name.is_empty())
}

/// Whether a runtime leaves its cgroups to systemd, as the kubelet has to do then too.
pub(crate) fn has_systemd_cgroup(runtime: &Table) -> bool {
    let options = table_of(runtime, "options");
    options.and_then(|options| options.get("SystemdCgroup")?.as_bool()).unwrap_or_default()
}

/// The snapshotter that a runtime names for its own containers.
pub(crate) fn snapshotter(runtime: &Table) -> Option<&str> {
    runtime.get("snapshotter").and_then(Value::as_str).filter(|name| !name.is_empty())
}

/// Whether a runtime gets all of our annotations.
pub(crate) fn passes_ours(runtime: &Table) -> bool {
    let patterns = runtime.get("pod_annotations").and_then(Value::as_array);
    let mut patterns = patterns.into_iter().flatten().filter_map(Value::as_str);
    ANNOTATIONS.iter().all(|ours| patterns.clone().any(|pattern| passes(pattern, ours)))
        && patterns.next().is_some()
}

/// Whether a pattern of annotations lets `ours` through, which is one of [`ANNOTATIONS`].
pub(crate) fn passes(pattern: &str, ours: &str) -> bool {
    let wide = ours.strip_suffix("/*").and_then(|domain| pattern.strip_prefix(domain));
    pattern == "*" || pattern == ours || wide == Some("*")
}

/// What is wrong between what was to be written and what containerd makes of its files, which
/// `dumped` says; a sentence's end.
pub(crate) fn amiss(dumped: &Table, program: &Path, default: bool) -> Option<String> {
    let sections = plugins().filter_map(|plugin| section(dumped, plugin));
    let Some(section) = sections.reduce(merge) else {
        return Some("it has no part for Kubernetes".to_owned());
    };
    let runtime = table_of(&section, "runtimes").and_then(|all| table_of(all, NAME));
    let Some(runtime) = runtime else { return Some("it has no runtime cgpu".to_owned()) };
    let runs = self::program(runtime).unwrap_or("runc");
    if Path::new(runs) != program {
        return Some(format!("its runtime cgpu runs {runs}"));
    }
    if !passes_ours(runtime) {
        return Some("its runtime cgpu gets no annotations of pods".to_owned());
    }
    let model = model(&section);
    if !model.is_empty() && has_systemd_cgroup(&model) != has_systemd_cgroup(runtime) {
        return Some("its runtime cgpu has another SystemdCgroup than the others".to_owned());
    }
    if !model.is_empty() && snapshotter(&model) != snapshotter(runtime) {
        return Some("its runtime cgpu has another snapshotter than the others".to_owned());
    }
    let named = section.get("default_runtime_name").and_then(Value::as_str).unwrap_or_default();
    (default && named != NAME).then(|| format!("its default runtime is {named}"))
}

fn table_of<'a>(table: &'a Table, key: &str) -> Option<&'a Table> {
    table.get(key)?.as_table()
}

/// `old` with what `new` says: tables are merged, anything else is replaced.
fn merge(mut old: Table, new: Table) -> Table {
    for (key, value) in new {
        let value = match (old.remove(&key), value) {
            (Some(Value::Table(old)), Value::Table(new)) => Value::Table(merge(old, new)),
            (_, value) => value,
        };
        old.insert(key, value);
    }
    old
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(release: Option<Release>, texts: &[String]) -> Table {
        let tables: Vec<Table> = texts.iter().map(|text| text.parse().unwrap()).collect();
        let files: Vec<File<'_>> = tables.iter().map(File::of).collect();
        let said: Vec<_> = files.iter().map(|file| file.said).collect();
        effective(&files, Reading::of(release, &said))
    }

    #[test]
    fn a_release_is_what_containerd_calls_itself() {
        for (line, release) in [
            (
                "containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+b1",
                Some((1, 6)),
            ),
            ("containerd github.com/containerd/containerd/v2 2.1.9~ds1 x", Some((2, 1))),
            (
                "containerd containerd.io 1.7.27 05044ec0a9a75232cad458027ca83437aae3f4da",
                Some((1, 7)),
            ),
            ("containerd github.com/k3s-io/containerd v2.0.5-k3s1 x", Some((2, 0))),
            ("runc version 1.1.5", None),
            ("containerd", None),
        ] {
            let release = release.map(|(major, minor)| Release { major, minor });
            assert_eq!(Release::of(line), release, "{line}");
        }
    }

    #[test]
    fn ours_is_to_be_like_the_default_runtime_or_runc() {
        let section =
            |plugin: &str, rest: &str| rest.replace('@', &format!("plugins.'{plugin}'.containerd"));
        let default = "[@]\ndefault_runtime_name = 'nvidia'\n";
        let nvidia = "[@.runtimes.nvidia]\nruntime_type = 'io.containerd.runc.v2'\n\
                      options = {BinaryName = '/usr/bin/nvidia-container-runtime'}\n";
        // As kubespray spells them.
        let runc = "[@.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n\
                    options = {systemdCgroup = true, binaryName = '/usr/local/bin/runc'}\n";
        let kata = "[@]\ndefault_runtime_name = 'kata'\n\
                    [@.runtimes.kata]\nruntime_type = 'io.containerd.kata.v2'\n";
        let ours = "[@]\ndefault_runtime_name = 'cgpu'\n\
                    [@.runtimes.cgpu]\nruntime_type = 'io.containerd.runc.v2'\n\
                    options = {BinaryName = '/usr/bin/cgpu-runtime'}\n";
        let is_runc = |model: &Table| {
            has_systemd_cgroup(model) && program(model) == Some("/usr/local/bin/runc")
        };
        for (version, plugin) in CRI {
            let model = |files: &[&str]| {
                let head = format!("version = {version}\n");
                let texts = files.iter().map(|text| format!("{head}{}", section(plugin, text)));
                model(&of(None, &texts.collect::<Vec<_>>()))
            };
            assert!(model(&[]).is_empty());
            let named = model(&[&format!("{default}{nvidia}{runc}")]);
            assert!(!named.is_empty() && !is_runc(&named), "the default one's: {named}");
            for without in [runc.to_owned(), format!("{kata}{runc}"), format!("{ours}{runc}")] {
                assert!(is_runc(&model(&[&without])), "{without}");
            }
            // What an earlier file says counts where a later one says nothing of it.
            assert!(is_runc(&model(&[runc, "[@.runtimes.other]\nruntime_type = 'x'\n"])));
            assert!(!is_runc(&model(&[runc, &runc.replace("true", "false")])));
        }
        // containerd 1 takes the whole of the last file, containerd 2 merges.
        let two = [
            format!("version = 2\n{}", section(CRI[1].1, runc)),
            format!("version = 2\n{}", section(CRI[1].1, "[@.runtimes.runc]\nsnapshotter = 'x'\n")),
        ];
        assert!(model(&of(Some(Release { major: 1, minor: 7 }), &two)).is_empty());
        for minor in [0, 3] {
            let merged = model(&of(Some(Release { major: 2, minor }), &two));
            assert!(is_runc(&merged) && merged["snapshotter"].as_str() == Some("x"));
        }
    }

    #[test]
    fn devices_by_cdi_are_given_by_the_last_word_or_the_release() {
        let files = |plugin: &str, said: [Option<bool>; 2]| {
            let text = |said: Option<bool>| {
                let said = said.map(|said| format!("Enable_CDI = {said}")).unwrap_or_default();
                format!("version = 2\n[plugins.'{plugin}']\n{said}\n")
            };
            said.map(|said| text(said).parse::<Table>().unwrap())
        };
        let release = |major, minor| Some(Release { major, minor });
        for (release, said, given) in [
            (release(1, 6), [Some(true), Some(true)], None),
            (release(1, 7), [None, None], Some(false)),
            (release(1, 7), [None, Some(true)], Some(true)),
            // The last file is all that counts.
            (release(1, 7), [Some(true), None], Some(false)),
            (release(2, 1), [None, None], Some(true)),
            (release(2, 1), [Some(false), None], Some(false)),
            (release(2, 3), [Some(false), Some(true)], Some(true)),
            (None, [None, None], None),
        ] {
            let tables = files(CRI[1].1, said);
            let files: Vec<File<'_>> = tables.iter().map(File::of).collect();
            let reading = Reading::of(release, &[Some(2), Some(2)]);
            assert_eq!(gives_cdi_devices(&files, reading, release), given, "{release:?} {said:?}");
        }
    }

    #[test]
    fn a_dump_is_held_against_what_was_to_be_written() {
        let ours = Path::new("/usr/bin/cgpu-runtime");
        let dump = |default: &str, runtime: &str| -> Table {
            format!(
                "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd]\n\
                 default_runtime_name = '{default}'\n\
                 [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\n\
                 runtime_type = 'io.containerd.runc.v2'\noptions = {{SystemdCgroup = true}}\n\
                 [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.cgpu]\n{runtime}"
            )
            .parse()
            .unwrap()
        };
        let fine = "pod_annotations = ['aliyun.com/*', 'cgpu/*']\n\
                    options = {BinaryName = '/usr/bin/cgpu-runtime', SystemdCgroup = true}\n";
        let said = |dumped: &Table, default| amiss(dumped, ours, default).unwrap_or_default();
        assert_eq!(said(&dump("cgpu", fine), true), "");
        assert_eq!(said(&dump("runc", fine), false), "");
        assert_eq!(said(&dump("runc", fine), true), "its default runtime is runc");
        let twice = fine.replace("{Binary", "{binaryName = '/usr/bin/runc', Binary");
        assert_eq!(said(&dump("runc", &twice), false), "its runtime cgpu runs /usr/bin/runc");
        assert_eq!(said(&dump("runc", "options = {}\n"), false), "its runtime cgpu runs runc");
        let deaf = fine.replace("'aliyun.com/*', ", "");
        assert_eq!(
            said(&dump("runc", &deaf), false),
            "its runtime cgpu gets no annotations of pods"
        );
        let other = fine.replace("Cgroup = true", "Cgroup = false");
        assert!(said(&dump("runc", &other), false).contains("another SystemdCgroup"));
        let unpacked = fine.replace("pod_", "snapshotter = 'nydus'\npod_");
        let said_of_it = said(&dump("runc", &unpacked), false);
        assert_eq!(said_of_it, "its runtime cgpu has another snapshotter than the others");
        assert_eq!(said(&Table::new(), false), "it has no part for Kubernetes");
    }
}
