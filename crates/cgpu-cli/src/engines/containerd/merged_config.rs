//! The merged result of a containerd's files, as that release reads them. Pure.
//!
//! Owns which part of which file counts, which file has precedence, and how containerd compares
//! keys. Must not know where the files are: [`super::imports`] finds them.

use toml::{Table, Value};

use super::release::{Reading, Release};
use super::runtimes::model_of;
use crate::engines::toml_values::get;

/// A file of a configuration, in the order of reading.
#[derive(Debug, Clone, Copy)]
pub(crate) struct File<'a> {
    /// The version that it declares.
    pub(crate) version: Option<i64>,
    pub(crate) table: &'a Table,
}

impl<'a> File<'a> {
    pub(crate) fn of(table: &'a Table) -> Self {
        File { version: table.get("version").and_then(Value::as_integer), table }
    }
}

/// The version by which each file is read: containerd 1 gives files that declare none that of
/// the main file, containerd 2 the first.
pub(crate) fn versions(files: &[File<'_>], reading: Reading) -> Vec<i64> {
    let main = files.first().and_then(|file| file.version).unwrap_or(1);
    let undeclared = if reading.merges() { 1 } else { main };
    files.iter().map(|file| file.version.unwrap_or(undeclared)).collect()
}

/// The merged table that has the runtimes and the default one's name, its keys spelled as
/// containerd's documents spell them.
pub(crate) fn effective(files: &[File<'_>], reading: Reading) -> Table {
    let versions = versions(files, reading);
    let sections = files.iter().zip(versions).flat_map(|(file, version)| {
        let plugins = reading.plugins(version).iter();
        plugins.filter_map(|(_, plugin)| section(file.table, plugin))
    });
    match reading {
        Reading::Two { .. } | Reading::Later => sections.fold(Table::new(), merge),
        Reading::One => sections.last().unwrap_or_default(),
        // The last file has precedence for both kinds; what it leaves out may count.
        Reading::Unknown => sections.fold(Table::new(), |old, new| match model_of(&new) {
            Some(_) => new,
            None => merge(old, new),
        }),
    }
}

/// Whether containerd gives pods the devices that a device plugin or a claim names by CDI (`enable_cdi`). `None` if
/// it has no such setting, or its release is unknown.
pub(crate) fn gives_cdi_devices(
    files: &[File<'_>],
    reading: Reading,
    release: Option<Release>,
) -> Option<bool> {
    // Off in 1.7, and on from 2.0 (`DefaultConfig` of containerd's `pkg/cri/config`, `internal/cri/config`).
    let default = match release {
        Some(Release { major: 1, minor }) => (minor >= 7).then_some(false)?,
        Some(_) => true,
        None => reading.merges().then_some(true)?,
    };
    let parts = files.iter().zip(versions(files, reading)).flat_map(|(file, version)| {
        let plugins = reading.plugins(version).iter();
        plugins.filter_map(|(_, plugin)| file.table.get("plugins")?.get(plugin)?.as_table())
    });
    let mut set = parts.map(|part| get(part, "enable_cdi").and_then(Value::as_bool));
    // containerd 1 takes the whole of the last file.
    let set = if reading.merges() { set.flatten().last() } else { set.next_back().flatten() };
    Some(set.unwrap_or(default))
}

/// The runtimes that one file configures for a plugin, in the documents' spelling.
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

/// `old` with the values of `new`: tables are merged, anything else is replaced.
pub(super) fn merge(mut old: Table, new: Table) -> Table {
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
    use crate::engines::containerd::release::CRI;

    // containerd gives CDI devices by the last file that has the setting, else by its release's default.
    #[test]
    fn cdi_devices_depend_on_last_setting_or_release() {
        let files = |plugin: &str, set: [Option<bool>; 2]| {
            let text = |set: Option<bool>| {
                let set = set.map(|set| format!("Enable_CDI = {set}")).unwrap_or_default();
                format!("version = 2\n[plugins.'{plugin}']\n{set}\n")
            };
            set.map(|set| text(set).parse::<Table>().unwrap())
        };
        let release = |major, minor| Some(Release { major, minor });
        for (release, set, given) in [
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
            let tables = files(CRI[1].1, set);
            let files: Vec<File<'_>> = tables.iter().map(File::of).collect();
            let reading = Reading::of(release, &[Some(2), Some(2)]);
            assert_eq!(gives_cdi_devices(&files, reading, release), given, "{release:?} {set:?}");
        }
    }
}
