//! How each engine says which runtimes it has: finds ours among them. Pure.
//!
//! Owns the keys of their configurations. Must not know where the files are, nor judge.
//! A text that has none of these keys names no runtime; one that is no JSON or TOML is
//! told so in one line. A runtime is ours by its program's name.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;
use toml::{Table, Value};

use super::Flaw;

/// Our runtime.
pub(crate) const RUNTIME: &str = "cgpu-runtime";

/// Our hook.
const HOOK: &str = "cgpu-hook";

/// containerd's CRI plugin by the version of the configuration, which is older or newer.
const CRI: [(i64, &str); 3] =
    [(1, "cri"), (2, "io.containerd.grpc.v1.cri"), (3, "io.containerd.cri.v1.runtime")];

/// The annotations that we read, as containerd is told of them.
pub(crate) const ANNOTATIONS: [&str; 2] = ["aliyun.com/*", "cgpu/*"];

/// containerd's CRI plugin in a configuration of that version; `None` for one that isn't known.
pub(crate) fn cri(version: i64) -> Option<&'static str> {
    CRI.iter().find(|(of, _)| *of == version).map(|(_, plugin)| *plugin)
}

/// A runtime of ours in an engine's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Named {
    /// What the engine calls it.
    pub(crate) name: String,
    /// Its program.
    pub(crate) program: PathBuf,
    /// What is wrong with it.
    pub(crate) flaw: Option<Flaw>,
}

fn is(program: &str, name: &str) -> bool {
    Path::new(program).file_name() == Some(OsStr::new(name))
}

fn named(name: &str, program: &str) -> Option<Named> {
    is(program, RUNTIME).then(|| Named {
        name: name.to_owned(),
        program: program.into(),
        flaw: None,
    })
}

fn toml(text: &str) -> Result<Table, String> {
    text.parse().map_err(|error: toml::de::Error| one_line(error.message()))
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The table at `path`; an empty one where there is none.
fn below<'a>(table: &'a Table, path: &[&str]) -> Option<&'a Table> {
    path.iter().try_fold(table, |table, key| table.get(*key)?.as_table())
}

/// `/etc/docker/daemon.json`.
pub(crate) fn docker(text: &str) -> Result<Vec<Named>, String> {
    // dockerd takes an empty file for an empty object.
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    let json: Json = serde_json::from_str(text).map_err(|error| one_line(&error.to_string()))?;
    let runtimes = json.get("runtimes").and_then(Json::as_object);
    let ours = runtimes
        .into_iter()
        .flatten()
        .filter_map(|(name, runtime)| named(name, runtime.get("path").and_then(Json::as_str)?));
    Ok(ours.collect())
}

/// The version that containerd's `config.toml` is written in; without a word it is the first.
pub(crate) fn version(text: &str) -> i64 {
    toml(text).ok().as_ref().and_then(said_version).unwrap_or(1)
}

/// The version that `text` says, where it does.
pub(crate) fn said_version_of(text: &str) -> Option<i64> {
    said_version(&toml(text).ok()?)
}

fn said_version(table: &Table) -> Option<i64> {
    table.get("version")?.as_integer()
}

/// What a runtime that pods get calls runc's shim.
const RUNC_SHIM: &str = "io.containerd.runc.";

/// The runtime that ours is to be like: the default one of containerd's files, else runc. They
/// are given in the order in which they are read, each with its version. Empty where none is
/// named whose shim is runc's: another shim has other options.
pub(crate) fn model(files: &[(i64, &str)]) -> Table {
    let sections = files.iter().filter_map(|(version, text)| {
        let plugin = cri(*version)?;
        below(&toml(text).ok()?, &["plugins", plugin, "containerd"]).cloned()
    });
    // containerd 2 merges what its files say. containerd 1, which reads no version 3, takes this
    // part of the last file that has it; containerd 2 may be reading version 2, so that the
    // files before are asked too.
    let merged = files.first().is_some_and(|(version, _)| *version >= 3);
    let sections: Vec<Table> = match merged {
        true => vec![sections.fold(Table::new(), merge)],
        false => sections.collect(),
    };
    sections.iter().rev().find_map(model_of).cloned().unwrap_or_default()
}

/// The runtime of one section that ours is to be like.
fn model_of(section: &Table) -> Option<&Table> {
    let runtimes = below(section, &["runtimes"]);
    let named = |name: &str| runtimes?.get(name)?.as_table();
    let default = section.get("default_runtime_name").and_then(Value::as_str);
    let candidates = [default.and_then(named), below(section, &["default_runtime"]), named("runc")];
    let usable = |runtime: &&Table| {
        let shim = runtime.get("runtime_type").and_then(Value::as_str);
        let program = below(runtime, &["options"]).and_then(|options| options.get("BinaryName"));
        let ours = program.and_then(Value::as_str).is_some_and(|program| is(program, RUNTIME));
        shim.is_some_and(|shim| shim.starts_with(RUNC_SHIM)) && !ours
    };
    candidates.into_iter().flatten().find(usable)
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

/// Whether a runtime leaves its cgroups to systemd, as the kubelet has to do then too.
fn has_systemd_cgroup(runtime: &Table) -> bool {
    let options = below(runtime, &["options"]);
    options.and_then(|options| options.get("SystemdCgroup")?.as_bool()).unwrap_or_default()
}

/// containerd's `config.toml`, or a file that it imports, which mostly leaves the version to
/// the file that imports it: `inherited`. Ours should be like `model`.
pub(crate) fn containerd(text: &str, inherited: i64, model: &Table) -> Result<Vec<Named>, String> {
    let table = toml(text)?;
    let file = said_version(&table).unwrap_or(inherited);
    let mut ours = Vec::new();
    for (section, plugin) in CRI {
        let runtimes = below(&table, &["plugins", plugin, "containerd", "runtimes"]);
        for (name, runtime) in runtimes.into_iter().flatten() {
            let Some(runtime) = runtime.as_table() else { continue };
            let program = below(runtime, &["options"])
                .and_then(|options| options.get("BinaryName"))
                .and_then(Value::as_str);
            let Some(found) = program.and_then(|program| named(name, program)) else { continue };
            let annotations = runtime.get("pod_annotations").and_then(Value::as_array);
            let passed = annotations.into_iter().flatten().filter_map(Value::as_str);
            let passed =
                ANNOTATIONS.iter().all(|ours| passed.clone().any(|pattern| passes(pattern, ours)));
            let systemd = has_systemd_cgroup(model);
            // Without a model nobody knows what runc has.
            let cgroups = model.is_empty() || systemd == has_systemd_cgroup(runtime);
            // A newer containerd takes files of older versions, with their own sections.
            let flaw = match (file == section, cgroups, passed) {
                (false, ..) => Some(Flaw::OtherVersion { file, section }),
                (true, false, _) => Some(Flaw::OtherCgroups { systemd }),
                (true, true, false) => Some(Flaw::NoAnnotations),
                (true, true, true) => None,
            };
            ours.push(Named { flaw, ..found });
        }
    }
    Ok(ours)
}

/// Whether a pattern of annotations lets `ours` through, which is one of [`ANNOTATIONS`].
pub(crate) fn passes(pattern: &str, ours: &str) -> bool {
    let wide = ours.strip_suffix("/*").and_then(|domain| pattern.strip_prefix(domain));
    pattern == "*" || pattern == ours || wide == Some("*")
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
    toml(text).is_err() && text.contains("{{") && text.contains("}}")
}

/// Whether a file of containerd switches off the plugin by which Kubernetes talks to it.
pub(crate) fn disables_cri(text: &str) -> bool {
    let table = toml(text).unwrap_or_default();
    let disabled = table.get("disabled_plugins").and_then(Value::as_array);
    let mut disabled = disabled.into_iter().flatten().filter_map(Value::as_str);
    disabled.any(|plugin| CRI.iter().any(|(_, cri)| *cri == plugin))
}

/// The files that a containerd configuration imports, as patterns.
pub(crate) fn imports(text: &str) -> Vec<String> {
    let table = toml(text).unwrap_or_default();
    let imports = table.get("imports").and_then(Value::as_array);
    imports.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// CRI-O's `crio.conf`, or a file beside it.
pub(crate) fn crio(text: &str) -> Result<Vec<Named>, String> {
    let table = toml(text)?;
    let runtimes = below(&table, &["crio", "runtime", "runtimes"]);
    let ours = runtimes.into_iter().flatten().filter_map(|(name, runtime)| {
        named(name, runtime.get("runtime_path").and_then(Value::as_str)?)
    });
    Ok(ours.collect())
}

/// podman's `containers.conf`, or a file beside it.
pub(crate) fn podman(text: &str) -> Result<Vec<Named>, String> {
    let table = toml(text)?;
    let runtimes = below(&table, &["engine", "runtimes"]);
    let ours = runtimes.into_iter().flatten().filter_map(|(name, paths)| {
        paths.as_array()?.iter().filter_map(Value::as_str).find_map(|path| named(name, path))
    });
    let default = below(&table, &["engine"]).and_then(|engine| engine.get("runtime")?.as_str());
    Ok(ours.chain(default.and_then(|path| named("default", path))).collect())
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
    use proptest::prelude::*;

    fn none() -> Table {
        Table::new()
    }

    fn ours(name: &str, flaw: Option<Flaw>) -> Result<Vec<Named>, String> {
        Ok(vec![Named { name: name.into(), program: "/usr/bin/cgpu-runtime".into(), flaw }])
    }

    #[test]
    fn docker_names_runtimes_by_their_paths() {
        let shipped = include_str!("../../packaging/daemon.json");
        assert_eq!(docker(shipped), ours("cgpu", None));
        for other in [
            "",
            "{}",
            "[]",
            "null",
            r#"{"runtimes":[1]}"#,
            r#"{"runtimes":{"a":{"path":"/usr/bin/runc"},"b":{"path":7},"c":{"runtimeType":"x"}}}"#,
        ] {
            assert_eq!(docker(other), Ok(Vec::new()), "{other}");
        }
        assert!(docker("{,}").unwrap_err().starts_with("key must be a string at line 1"));
    }

    #[test]
    fn containerd_names_them_by_the_version_of_its_file() {
        let shipped = format!("version = 2\n{}", include_str!("../../packaging/containerd.toml"));
        assert_eq!(containerd(&shipped, 1, &none()), ours("cgpu", None));
        let third = shipped.replace("io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime");
        let other = |file, section| Some(Flaw::OtherVersion { file, section });
        assert_eq!(containerd(&third, 1, &none()), ours("cgpu", other(2, 3)));
        assert_eq!(
            containerd(&third.replace("version = 2", "version = 3"), 1, &none()),
            ours("cgpu", None)
        );
        assert_eq!(
            containerd(&shipped.replace("version = 2", "version = 3"), 1, &none()),
            ours("cgpu", other(3, 2))
        );
        assert_eq!(
            containerd(&shipped.replace("version = 2", ""), 1, &none()),
            ours("cgpu", other(1, 2))
        );
        let silent = shipped.replace("pod_annotations", "container_annotations");
        assert_eq!(containerd(&silent, 1, &none()), ours("cgpu", Some(Flaw::NoAnnotations)));
        let imported = shipped.replace("version = 2", "");
        assert_eq!(containerd(&imported, version("version = 2"), &none()), ours("cgpu", None));
        assert_eq!((version(""), version("version = 3"), version("=")), (1, 3, 1));
        assert_eq!(containerd("version = 2\n", 1, &none()), Ok(Vec::new()));
        assert!(containerd("version = ", 1, &none()).is_err());
        assert_eq!(
            imports("imports = [\"/etc/containerd/conf.d/*.toml\", 7]"),
            ["/etc/containerd/conf.d/*.toml"]
        );
        assert!(imports("imports = 3").is_empty() && imports("[[").is_empty());
    }

    #[test]
    fn crio_and_podman_name_them_in_their_tables() {
        let text = "[crio.runtime.runtimes.gpu]\nruntime_path = \"/usr/bin/cgpu-runtime\"\n\
                    [crio.runtime.runtimes.runc]\nruntime_path = \"/usr/bin/runc\"\n";
        assert_eq!(crio(text), ours("gpu", None));
        let text =
            "[engine.runtimes]\ncgpu = [\"/usr/bin/cgpu-runtime\"]\nrunc = [\"/usr/bin/runc\"]\n";
        assert_eq!(podman(text), ours("cgpu", None));
        assert_eq!(
            podman("[engine]\nruntime = \"/usr/bin/cgpu-runtime\"\n"),
            ours("default", None)
        );
        assert_eq!(podman("[engine]\nruntimes = 3\n"), Ok(Vec::new()));
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
    fn ours_is_to_be_like_the_default_runtime_or_runc() {
        let section =
            |plugin: &str, rest: &str| rest.replace('@', &format!("plugins.'{plugin}'.containerd"));
        let default = "[@]\ndefault_runtime_name = 'nvidia'\n";
        let nvidia = "[@.runtimes.nvidia]\nruntime_type = 'io.containerd.runc.v2'\n\
                      options = {BinaryName = '/usr/bin/nvidia-container-runtime'}\n";
        let runc = "[@.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n\
                    options = {SystemdCgroup = true}\n";
        let kata = "[@]\ndefault_runtime_name = 'kata'\n\
                    [@.runtimes.kata]\nruntime_type = 'io.containerd.kata.v2'\n";
        let ours = "[@]\ndefault_runtime_name = 'cgpu'\n\
                    [@.runtimes.cgpu]\nruntime_type = 'io.containerd.runc.v2'\n\
                    options = {BinaryName = '/usr/bin/cgpu-runtime'}\n";
        let is_runc = |model: &Table| has_systemd_cgroup(model);
        for (version, plugin) in CRI {
            let text = |rest: &str| section(plugin, rest);
            let of = |files: &[String]| {
                let files: Vec<_> = files.iter().map(|file| (version, file.as_str())).collect();
                model(&files)
            };
            assert!(
                of(&[]).is_empty()
                    && of(&[text(default), text(nvidia)]).is_empty() == (version < 3)
            );
            let named = of(&[text(&format!("{default}{nvidia}{runc}"))]);
            assert!(!named.is_empty() && !is_runc(&named), "the default one's: {named}");
            for without in [runc.to_owned(), format!("{kata}{runc}"), format!("{ours}{runc}")] {
                assert!(is_runc(&of(&[text(&without)])), "{without}");
            }
            // What an earlier file says counts where a later one says nothing of it.
            assert!(is_runc(&of(&[text(runc), text("[@.runtimes.other]\nruntime_type = 'x'\n")])));
            let later = text(&runc.replace("true", "false"));
            assert!(!is_runc(&of(&[text(runc), later])));
        }
        let parts = [
            (3, section(CRI[2].1, runc)),
            (3, section(CRI[2].1, "[@.runtimes.runc]\nsnapshotter = 'nydus'\n")),
        ];
        let parts: Vec<_> = parts.iter().map(|(version, text)| (*version, text.as_str())).collect();
        let merged = model(&parts);
        assert!(is_runc(&merged) && merged["snapshotter"].as_str() == Some("nydus"));

        let shipped = format!("version = 2\n{}", include_str!("../../packaging/containerd.toml"));
        let other = containerd(&shipped, 1, &merged).unwrap();
        assert_eq!(other[0].flaw, Some(Flaw::OtherCgroups { systemd: true }));
        let same = shipped.replace("BinaryName", "SystemdCgroup = true\nBinaryName");
        assert_eq!(containerd(&same, 1, &merged).unwrap()[0].flaw, None);
    }

    #[test]
    fn hooks_are_ours_by_their_program() {
        let shipped = include_str!("../../hooks/cgpu-poststop.json");
        let stages = vec!["poststop".to_owned()];
        assert_eq!(hook(shipped), Ok(Some(("/usr/bin/cgpu-hook".into(), stages))));
        assert_eq!(hook(r#"{"hook":{"path":"/usr/bin/oci-umount"}}"#), Ok(None));
        assert!(hook("{").is_err());
    }

    proptest! {
        #[test]
        fn no_text_breaks_a_reader(text in ".{0,200}") {
            let _ = (docker(&text), containerd(&text, 2, &none()), crio(&text), podman(&text), hook(&text));
            let _ = imports(&text);
        }
    }
}
