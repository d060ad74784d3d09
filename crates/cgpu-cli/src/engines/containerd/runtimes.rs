//! The runtimes that containerd's files name for Kubernetes: ours with what is wrong with them,
//! and the one that ours is to be like. Pure.

use toml::{Table, Value};

use super::merged_config::{File, effective, section as section_of, spelled_twice, versions};
use super::release::{CRI, Reading};
use crate::engines::named_runtime::{Flaw, NamedRuntime, named};
use crate::engines::runtime_name::is_ours;
use crate::engines::toml_values::{get, table_at};

/// The annotations that we read, as patterns of containerd.
pub(crate) const ANNOTATIONS: [&str; 2] = ["aliyun.com/*", "cgpu/*"];

/// The beginning of the types of runc's shim.
const RUNC_SHIM: &str = "io.containerd.runc.";

/// Our runtimes in each of containerd's files, given in the order of reading, with what is
/// wrong with them.
pub(crate) fn runtimes(files: &[File<'_>], reading: Reading) -> Vec<Vec<NamedRuntime>> {
    let effective = effective(files, reading);
    let model = model(&effective);
    let versions = versions(files, reading);
    let all = files.iter().zip(versions).map(|(file, version)| {
        let mut all: Vec<NamedRuntime> = Vec::new();
        for (section, plugin) in CRI {
            let found = section_of(file.table, plugin).unwrap_or_default();
            let named_here = table_at(&found, &["runtimes"]).into_iter().flatten();
            for (name, _) in named_here {
                // Ours by one spelling of the key is ours, though another may count.
                let (spelled, options) = spelled(file.table, plugin, name);
                let named = programs(options).find_map(|program| named(name, program));
                let Some(named) = named else { continue };
                let is_read = reading.plugins(version).iter().any(|(_, read)| *read == plugin);
                let counts = table_at(&effective, &["runtimes", name]).filter(|_| is_read);
                let twice = [spelled, options].into_iter().flatten();
                let twice = { twice }.find_map(spelled_twice);
                let flaw = match (counts, twice) {
                    (None, _) => Some(Flaw::OtherVersion { file: version, section }),
                    (_, Some(key)) => Some(Flaw::TwoSpellings { key: key.to_owned() }),
                    (Some(counts), None) => flaw_of(counts, &model),
                };
                // A file may name it once for each kind of containerd.
                match all.iter_mut().find(|other| other.name == named.name) {
                    Some(other) => other.flaw = other.flaw.take().and(flaw),
                    None => all.push(NamedRuntime { flaw, ..named }),
                }
            }
        }
        all
    });
    all.collect()
}

/// What is wrong with a runtime that should be ours after merging; it should be like `model`.
fn flaw_of(runtime: &Table, model: &Table) -> Option<Flaw> {
    let program = program(runtime).unwrap_or("runc");
    let systemd = has_systemd_cgroup(model);
    // Without a model runc's settings are unknown.
    let same = model.is_empty() || systemd == has_systemd_cgroup(runtime);
    let expected = snapshotter(model);
    let unpacked = model.is_empty() || expected == snapshotter(runtime);
    if !is_ours(program) {
        Some(Flaw::Overruled { by: program.to_owned() })
    } else if !same {
        Some(Flaw::OtherCgroups { systemd })
    } else if !unpacked {
        Some(Flaw::OtherSnapshotter { name: expected.map(str::to_owned) })
    } else if !passes_ours(runtime) {
        Some(Flaw::NoAnnotations)
    } else {
        None
    }
}

/// A runtime's table and its options, as they are spelled.
fn spelled<'a>(
    table: &'a Table,
    plugin: &str,
    name: &str,
) -> (Option<&'a Table>, Option<&'a Table>) {
    let runtimes = below_in_any_case(table, &["plugins", plugin, "containerd", "runtimes"]);
    let runtime = runtimes.and_then(|all| all.get(name)?.as_table());
    (runtime, runtime.and_then(|runtime| below_in_any_case(runtime, &["options"])))
}

/// The programs of a runtime with these options, by all spellings of the key.
fn programs(options: Option<&Table>) -> impl Iterator<Item = &str> {
    let named = options.into_iter().flatten();
    let named = named.filter(|(key, _)| key.eq_ignore_ascii_case("BinaryName"));
    named.filter_map(|(_, program)| program.as_str())
}

fn below_in_any_case<'a>(table: &'a Table, path: &[&str]) -> Option<&'a Table> {
    path.iter().try_fold(table, |table, key| get(table, key)?.as_table())
}

/// The runtime that ours is to be like: the default one, else runc. Empty if none has runc's shim:
/// another shim has other options.
pub(crate) fn model(effective: &Table) -> Table {
    model_of(effective).cloned().unwrap_or_default()
}

pub(super) fn model_of(section: &Table) -> Option<&Table> {
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

/// The program that a runtime's shim runs (`BinaryName`).
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

pub(super) fn table_of<'a>(table: &'a Table, key: &str) -> Option<&'a Table> {
    table.get(key)?.as_table()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::containerd::imports::imports;
    use crate::engines::containerd::release::Release;
    use crate::engines::named_runtime::tests::ours;
    use crate::engines::toml_values::parse;

    /// Our runtimes in files of which the first is the main one.
    fn runtimes_of(release: Option<(u32, u32)>, texts: &[&str]) -> Vec<Vec<NamedRuntime>> {
        let tables: Vec<Table> = texts.iter().map(|text| parse(text).unwrap()).collect();
        let files: Vec<File<'_>> = tables.iter().map(File::of).collect();
        let versions: Vec<_> = files.iter().map(|file| file.version).collect();
        let release = release.map(|(major, minor)| Release { major, minor });
        runtimes(&files, Reading::of(release, &versions))
    }

    // A runtime of ours counts if its section is that of the file's version, as the release reads it.
    #[test]
    fn runtimes_are_found_by_the_files_version() {
        let shipped =
            format!("version = 2\n{}", include_str!("../../../../../packaging/containerd.toml"));
        let third = shipped.replace("io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime");
        let of = |text: &str| runtimes_of(None, &[text]).remove(0);
        let fine = ours("cgpu", None).unwrap();
        let other =
            |file, section| ours("cgpu", Some(Flaw::OtherVersion { file, section })).unwrap();
        assert_eq!(of(&shipped), fine);
        assert_eq!(of(&third), other(2, 3));
        assert_eq!(of(&third.replace("version = 2", "version = 3")), fine);
        assert_eq!(of(&third.replace("version = 2", "version = 4")), fine);
        assert_eq!(of(&shipped.replace("version = 2", "version = 3")), other(3, 2));
        assert_eq!(of(&shipped.replace("version = 2", "")), other(1, 2));
        let unannotated = shipped.replace("pod_annotations", "container_annotations");
        assert_eq!(of(&unannotated), ours("cgpu", Some(Flaw::NoAnnotations)).unwrap());
        assert_eq!(of("version = 2\n"), []);
        // What a file imports is of its version, for containerd 1.
        let imported = shipped.replace("version = 2", "");
        assert_eq!(runtimes_of(None, &["version = 2\n", &imported])[1], fine);
        // What containerd 2 makes of a file without a version.
        let first =
            shipped.replace("version = 2", "").replace("\"io.containerd.grpc.v1.cri\"", "cri");
        assert_eq!(runtimes_of(Some((1, 7)), &[&first])[0], fine);
        assert_eq!(runtimes_of(Some((2, 1)), &[&first])[0], other(1, 1));
        assert_eq!(runtimes_of(Some((2, 3)), &[&first])[0], fine);
        assert_eq!(runtimes_of(Some((2, 1)), &[&third.replace("version = 2", "")])[0], fine);
        // A later file of version 3 has the older parts of all files unread there.
        assert_eq!(runtimes_of(Some((2, 1)), &[&shipped, "version = 3\n"])[0], other(2, 2));
        assert_eq!(runtimes_of(Some((2, 1)), &["version = 3\n", &shipped])[1], fine);
        assert_eq!(
            imports("imports = [\"/etc/containerd/conf.d/*.toml\", 7]"),
            ["/etc/containerd/conf.d/*.toml"]
        );
        assert!(imports("imports = 3").is_empty() && imports("[[").is_empty());
    }

    // Another file, or another spelling of a key, makes our runtime run another program.
    #[test]
    fn overruled_runtime_is_reported_with_its_flaw() {
        let plugin = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.cgpu";
        let options =
            |key: &str, program: &str| format!("{plugin}.options]\n{key} = '{program}'\n");
        let own = format!(
            "version = 3\n{plugin}]\npod_annotations = ['*']\n{}",
            options("binaryname", "/usr/bin/cgpu-runtime")
        );
        let fine = ours("cgpu", None).unwrap();
        assert_eq!(runtimes_of(None, &[&own])[0], fine, "keys are taken in any case");
        let later = options("BinaryName", "/usr/bin/runc");
        let by = || Flaw::Overruled { by: "/usr/bin/runc".into() };
        let lost = ours("cgpu", Some(by())).unwrap();
        assert_eq!(runtimes_of(None, &[&own, &later])[0], lost);
        let twice = format!("{own}BinaryName = '/usr/bin/runc'\n");
        let [named] = &runtimes_of(None, &[&twice])[0][..] else { panic!("{twice}") };
        assert!(
            matches!(&named.flaw, Some(Flaw::TwoSpellings { key }) if key.len() == 10),
            "{named:?}"
        );
    }

    fn of(release: Option<Release>, texts: &[String]) -> Table {
        let tables: Vec<Table> = texts.iter().map(|text| text.parse().unwrap()).collect();
        let files: Vec<File<'_>> = tables.iter().map(File::of).collect();
        let declared: Vec<_> = files.iter().map(|file| file.version).collect();
        effective(&files, Reading::of(release, &declared))
    }

    #[test]
    fn model_is_the_default_runtime_or_runc() {
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
            // An earlier file's value counts if no later file has one.
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
}
