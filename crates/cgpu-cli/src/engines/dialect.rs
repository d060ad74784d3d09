//! How each engine says which runtimes it has: finds ours among them. Pure.
//!
//! Owns the keys of their configurations. Must not know where the files are, nor judge.
//! A text that has none of these keys names no runtime; one that is no JSON or TOML is
//! told so in one line. A runtime is ours by its program's name.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;
use toml::{Table, Value};

use super::config_text::one_line;
use super::containerd::{self, File, Reading};
use super::named_runtime::named;
use super::runtime_name::is_ours;
use super::toml_values::{get, parse, table_at};
use super::{Flaw, Kind, Named};

/// Our hook.
const HOOK: &str = "cgpu-hook";

fn is(program: &str, name: &str) -> bool {
    Path::new(program).file_name() == Some(OsStr::new(name))
}

/// The version that `text`, of containerd, says.
pub(crate) fn said_version_of(text: &str) -> Option<i64> {
    parse(text).ok()?.get("version")?.as_integer()
}

/// Our runtimes in each of containerd's files, given in the order of reading, with what is
/// wrong with them.
pub(crate) fn containerd(files: &[File<'_>], reading: Reading) -> Vec<Vec<Named>> {
    let effective = containerd::effective(files, reading);
    let model = containerd::model(&effective);
    let versions = containerd::versions(files, reading);
    let all = files.iter().zip(versions).map(|(file, version)| {
        let mut all: Vec<Named> = Vec::new();
        for (section, plugin) in containerd::CRI {
            let found = containerd::section(file.table, plugin).unwrap_or_default();
            let runtimes = table_at(&found, &["runtimes"]).into_iter().flatten();
            for (name, _) in runtimes {
                // Ours by one spelling of the key is ours, though another may count.
                let (spelled, options) = spelled(file.table, plugin, name);
                let named = programs(options).find_map(|program| named(name, program));
                let Some(named) = named else { continue };
                let is_read = reading.plugins(version).iter().any(|(_, read)| *read == plugin);
                let counts = table_at(&effective, &["runtimes", name]).filter(|_| is_read);
                let twice = [spelled, options].into_iter().flatten();
                let twice = { twice }.find_map(containerd::spelled_twice);
                let flaw = match (counts, twice) {
                    (None, _) => Some(Flaw::OtherVersion { file: version, section }),
                    (_, Some(key)) => Some(Flaw::TwoSpellings { key: key.to_owned() }),
                    (Some(counts), None) => flaw_of(counts, &model),
                };
                // A file may say it once for each kind of containerd.
                match all.iter_mut().find(|other| other.name == named.name) {
                    Some(other) => other.flaw = other.flaw.take().and(flaw),
                    None => all.push(Named { flaw, ..named }),
                }
            }
        }
        all
    });
    all.collect()
}

/// What is wrong with a runtime that should be ours, as it comes out; it should be like `model`.
fn flaw_of(runtime: &Table, model: &Table) -> Option<Flaw> {
    let program = containerd::program(runtime).unwrap_or("runc");
    let systemd = containerd::has_systemd_cgroup(model);
    // Without a model nobody knows what runc has.
    let same = model.is_empty() || systemd == containerd::has_systemd_cgroup(runtime);
    let snapshotter = containerd::snapshotter(model);
    let unpacked = model.is_empty() || snapshotter == containerd::snapshotter(runtime);
    if !is_ours(program) {
        Some(Flaw::Overruled { by: program.to_owned() })
    } else if !same {
        Some(Flaw::OtherCgroups { systemd })
    } else if !unpacked {
        Some(Flaw::OtherSnapshotter { name: snapshotter.map(str::to_owned) })
    } else if !containerd::passes_ours(runtime) {
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

/// The text of a distribution's file with the values that it puts into it: MicroK8s names its
/// runtime so.
pub(crate) fn with_values(kind: Kind, text: &str) -> String {
    match kind {
        Kind::MicroK8s => {
            text.replace("${RUNTIME}", "runc").replace("${RUNTIME_TYPE}", "io.containerd.runc.v2")
        }
        _ => text.to_owned(),
    }
}

/// Whether k0s writes what this file of its containerd imports, and not its administrator.
pub(crate) fn is_managed_by_k0s(text: &str) -> bool {
    text.lines().next() == Some("# k0s_managed=true")
}

/// The program that writes a file of containerd at each of its starts, as the file says: k3s,
/// or rke2.
pub(crate) fn generated_by(text: &str) -> Option<&str> {
    let comments = text.lines().take_while(|line| line.trim().is_empty() || line.starts_with('#'));
    let mut said = comments.filter_map(|line| line.split_once("File generated by "));
    let (by, rest) = said.find_map(|(_, said)| said.split_once(". "))?;
    rest.starts_with("DO NOT EDIT").then_some(by)
}

/// Whether a text is a template of such a file.
pub(crate) fn is_template(text: &str) -> bool {
    parse(text).is_err() && text.contains("{{") && text.contains("}}")
}

/// Whether a file of containerd switches off the plugin by which Kubernetes talks to it.
pub(crate) fn disables_cri(text: &str) -> bool {
    let table = parse(text).unwrap_or_default();
    let disabled = table.get("disabled_plugins").and_then(Value::as_array);
    let mut disabled = disabled.into_iter().flatten().filter_map(Value::as_str);
    disabled.any(|plugin| containerd::CRI.iter().any(|(_, cri)| *cri == plugin))
}

/// The files that a containerd configuration imports, as patterns.
pub(crate) fn imports(text: &str) -> Vec<String> {
    let table = parse(text).unwrap_or_default();
    let imports = table.get("imports").and_then(Value::as_array);
    imports.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// A file of a hooks directory: its program and stages, where it is ours.
pub(crate) fn hook(text: &str) -> Result<Option<(PathBuf, Vec<String>)>, String> {
    let json: Json = serde_json::from_str(text).map_err(|error| one_line(&error.to_string()))?;
    let program = json.pointer("/hook/path").and_then(Json::as_str);
    let Some(program) = program.filter(|program| is(program, HOOK)) else { return Ok(None) };
    let stages = json.get("stages").and_then(Json::as_array);
    let stages = stages.into_iter().flatten().filter_map(Json::as_str).map(str::to_owned);
    Ok(Some((program.into(), stages.collect())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::named_runtime::tests::ours;
    use crate::engines::{crio, docker, podman};
    use proptest::prelude::*;

    /// Our runtimes in files of which the first is the main one.
    fn said(release: Option<(u32, u32)>, texts: &[&str]) -> Vec<Vec<Named>> {
        let tables: Vec<Table> = texts.iter().map(|text| parse(text).unwrap()).collect();
        let files: Vec<File<'_>> = tables.iter().map(File::of).collect();
        let versions: Vec<_> = files.iter().map(|file| file.said).collect();
        let release = release.map(|(major, minor)| containerd::Release { major, minor });
        containerd(&files, Reading::of(release, &versions))
    }

    #[test]
    fn containerd_names_them_by_the_version_of_its_file() {
        let shipped =
            format!("version = 2\n{}", include_str!("../../../../packaging/containerd.toml"));
        let third = shipped.replace("io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime");
        let of = |text: &str| said(None, &[text]).remove(0);
        let fine = ours("cgpu", None).unwrap();
        let other =
            |file, section| ours("cgpu", Some(Flaw::OtherVersion { file, section })).unwrap();
        assert_eq!(of(&shipped), fine);
        assert_eq!(of(&third), other(2, 3));
        assert_eq!(of(&third.replace("version = 2", "version = 3")), fine);
        assert_eq!(of(&third.replace("version = 2", "version = 4")), fine);
        assert_eq!(of(&shipped.replace("version = 2", "version = 3")), other(3, 2));
        assert_eq!(of(&shipped.replace("version = 2", "")), other(1, 2));
        let silent = shipped.replace("pod_annotations", "container_annotations");
        assert_eq!(of(&silent), ours("cgpu", Some(Flaw::NoAnnotations)).unwrap());
        assert_eq!(of("version = 2\n"), []);
        // What a file imports is of its version, for containerd 1.
        let imported = shipped.replace("version = 2", "");
        assert_eq!(said(None, &["version = 2\n", &imported])[1], fine);
        // What containerd 2 makes of a file without a version.
        let first =
            shipped.replace("version = 2", "").replace("\"io.containerd.grpc.v1.cri\"", "cri");
        assert_eq!(said(Some((1, 7)), &[&first])[0], fine);
        assert_eq!(said(Some((2, 1)), &[&first])[0], other(1, 1));
        assert_eq!(said(Some((2, 3)), &[&first])[0], fine);
        assert_eq!(said(Some((2, 1)), &[&third.replace("version = 2", "")])[0], fine);
        // A later file of version 3 has the older parts of all files unread there.
        assert_eq!(said(Some((2, 1)), &[&shipped, "version = 3\n"])[0], other(2, 2));
        assert_eq!(said(Some((2, 1)), &["version = 3\n", &shipped])[1], fine);
        assert_eq!(
            imports("imports = [\"/etc/containerd/conf.d/*.toml\", 7]"),
            ["/etc/containerd/conf.d/*.toml"]
        );
        assert!(imports("imports = 3").is_empty() && imports("[[").is_empty());
    }

    #[test]
    fn a_runtime_that_another_file_or_spelling_takes_away_is_none_of_ours() {
        let plugin = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.cgpu";
        let options =
            |key: &str, program: &str| format!("{plugin}.options]\n{key} = '{program}'\n");
        let own = format!(
            "version = 3\n{plugin}]\npod_annotations = ['*']\n{}",
            options("binaryname", "/usr/bin/cgpu-runtime")
        );
        let fine = ours("cgpu", None).unwrap();
        assert_eq!(said(None, &[&own])[0], fine, "keys are taken in any case");
        let later = options("BinaryName", "/usr/bin/runc");
        let by = || Flaw::Overruled { by: "/usr/bin/runc".into() };
        let lost = ours("cgpu", Some(by())).unwrap();
        assert_eq!(said(None, &[&own, &later])[0], lost);
        let twice = format!("{own}BinaryName = '/usr/bin/runc'\n");
        let [named] = &said(None, &[&twice])[0][..] else { panic!("{twice}") };
        assert!(
            matches!(&named.flaw, Some(Flaw::TwoSpellings { key }) if key.len() == 10),
            "{named:?}"
        );
    }

    #[test]
    fn a_generated_file_says_by_whom() {
        let file =
            "# File generated by k3s. DO NOT EDIT. Use config.toml.tmpl instead.\nversion = 3\n";
        assert_eq!(generated_by(file), Some("k3s"));
        assert_eq!(generated_by(&file.replace("k3s", "rke2")), Some("rke2"));
        assert_eq!(generated_by(&format!("\n# ours\n{file}")), Some("k3s"));
        assert_eq!(generated_by(&format!("version = 3\n{file}")), None);
        assert_eq!(generated_by("# File generated by hand. Edit it.\n"), None);
    }

    #[test]
    fn the_plugin_of_kubernetes_is_off_by_any_of_its_names() {
        for (plugins, off) in [
            ("['cri']", true),
            ("['aufs', 'io.containerd.grpc.v1.cri']", true),
            ("['io.containerd.cri.v1.runtime']", true),
            ("['aufs']", false),
            ("'cri'", false),
            ("[", false),
        ] {
            assert_eq!(disables_cri(&format!("disabled_plugins = {plugins}")), off, "{plugins}");
        }
        assert!(!disables_cri("# disabled_plugins = ['cri']"));
    }

    #[test]
    fn hooks_are_ours_by_their_program() {
        let shipped = include_str!("../../../../hooks/cgpu-poststop.json");
        let stages = vec!["poststop".to_owned()];
        assert_eq!(hook(shipped), Ok(Some(("/usr/bin/cgpu-hook".into(), stages))));
        assert_eq!(hook(r#"{"hook":{"path":"/usr/bin/oci-umount"}}"#), Ok(None));
        assert!(hook("{").is_err());
    }

    proptest! {
        #[test]
        fn no_text_breaks_a_reader(text in ".{0,200}") {
            let _ = (docker::runtimes(&text), crio::runtimes(&text), podman::runtimes(&text), hook(&text), imports(&text));
            let _ = (crio::model([text.as_str()].into_iter()), podman::default_programs([text.as_str()].into_iter()));
            if let Ok(table) = parse(&text) {
                for release in [None, Some((1, 7)), Some((2, 1)), Some((2, 3))] {
                    let release = release.map(|(major, minor)| containerd::Release { major, minor });
                    let file = File::of(&table);
                    let _ = containerd(&[file, file], Reading::of(release, &[file.said; 2]));
                }
            }
        }
    }
}
