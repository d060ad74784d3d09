//! The tables of containerd's configuration that have its runtimes for Kubernetes, as setup edits
//! them. Pure.

use toml::{Table as Plain, Value as PlainValue};
use toml_edit::{Array, Item, Table};

use super::release::{CRI, NEWEST, Reading};
use super::runtimes::{ANNOTATIONS, passes};
use crate::engines::config_text::EditError;
use crate::engines::runtime_syntax::{BuiltIn, Layout, RuntimeSyntax};
use crate::engines::toml_style::first_key_indent;
use crate::engines::toml_tables::{below_mut, child, copy, set, spelled, text};
use crate::engines::toml_values::get;

/// The tables in which a containerd of this reading finds our runtime: all of them name it.
pub(in crate::engines) fn layouts(
    version: i64,
    reading: Reading,
) -> Result<Vec<Layout>, EditError> {
    match version {
        1..=NEWEST => {
            Ok(reading.written(version).iter().map(|(_, plugin)| layout(plugin)).collect())
        }
        version => Err(EditError::Version { version }),
    }
}

/// All tables that may have our runtime, whether containerd reads them or not.
pub(in crate::engines) fn all_layouts() -> Vec<Layout> {
    CRI.iter().map(|(_, plugin)| layout(plugin)).collect()
}

fn layout(plugin: &'static str) -> Layout {
    Layout {
        section: vec!["plugins", plugin, "containerd"],
        part_keys: 2,
        default: "default_runtime_name",
        syntax: &Syntax,
    }
}

/// The runtime that containerd has without a file. containerd 1 drops it, though it is its default,
/// if a file names another.
const BUILT_IN: BuiltIn = BuiltIn { name: "runc", runtime_type: "io.containerd.runc.v2" };

#[derive(Debug)]
struct Syntax;

impl RuntimeSyntax for Syntax {
    fn program<'a>(&self, runtime: &'a PlainValue) -> Option<&'a str> {
        let options = get(runtime.as_table()?, "options").and_then(PlainValue::as_table);
        let binary = options.and_then(|options| get(options, "BinaryName"));
        binary.or_else(|| get(runtime.as_table()?, "runtime_type"))?.as_str()
    }

    fn entry(&self, program: &str, model: &Plain) -> Item {
        let mut table = Table::new();
        table.insert("runtime_type", text(BUILT_IN.runtime_type));
        copy(model, &mut table, &["options", PASSED]);
        let passed = model.get(PASSED).and_then(PlainValue::as_array);
        let passed: Vec<&str> =
            passed.into_iter().flatten().filter_map(PlainValue::as_str).collect();
        let is_missing = |ours: &&str| !passed.iter().any(|other| passes(other, ours));
        let ours: Vec<&str> = ANNOTATIONS.into_iter().filter(is_missing).collect();
        let passed = Array::from_iter(passed.iter().copied().chain(ours));
        table.insert(PASSED, Item::Value(passed.into()));
        let mut options = Table::new();
        if let Some(model) = model.get("options").and_then(PlainValue::as_table) {
            copy(model, &mut options, &["BinaryName"]);
        }
        options.insert("BinaryName", text(program));
        table.insert("options", Item::Table(options));
        Item::Table(table)
    }

    fn repoint(&self, entry: &mut Item, program: &str, model: &Plain) {
        if let Some(options) = child(entry, "options").and_then(Item::as_table_like_mut) {
            keep_one(options, "BinaryName", program);
        }
        let binary = below_mut(entry, &["options", "BinaryName"]).and_then(Item::as_value_mut);
        if let Some(value) = binary {
            set(value, program);
        }
        adopt_cgroups(entry, model);
    }

    fn built_in(&self) -> Option<BuiltIn> {
        Some(BUILT_IN)
    }
}

/// The annotations of a pod that containerd passes on to its runtime.
const PASSED: &str = "pod_annotations";

/// Gives an entry without a cgroup driver that of `model`: the kubelet doesn't find the cgroups of
/// pods whose entry was written before setup copied it.
fn adopt_cgroups(entry: &mut Item, model: &Plain) {
    const KEY: &str = "SystemdCgroup";
    let wanted = model.get("options").and_then(|options| options.get(KEY)?.as_bool());
    let Some(options) = child(entry, "options") else { return };
    let Some(true) = wanted else { return };
    let Some(table) = options.as_table_like_mut() else { return };
    if spelled(table, KEY).is_some() {
        return;
    }
    let indent = options.as_table().and_then(first_key_indent);
    let Some(table) = options.as_table_like_mut() else { return };
    table.insert(KEY, Item::Value(true.into()));
    if let (Some(indent), Some(mut key)) = (indent, table.key_mut(KEY)) {
        key.leaf_decor_mut().set_prefix(indent);
    }
}

/// Leaves one of several spellings of `key`, with `value`.
fn keep_one(table: &mut dyn toml_edit::TableLike, key: &str, value: &str) {
    let means = |other: &str| other.eq_ignore_ascii_case(key);
    let keys: Vec<String> = table.iter().map(|(key, _)| key.to_owned()).collect();
    let keys: Vec<String> = keys.into_iter().filter(|other| means(other)).collect();
    if keys.len() < 2 {
        return;
    }
    for other in &keys {
        if other != key {
            table.remove(other);
        }
    }
    if !table.contains_key(key) {
        table.insert(key, text(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::config_text::fixtures::*;
    use crate::engines::config_text::{ChangeRequest, Format, edit};

    #[test]
    fn handler_is_in_the_table_of_its_version() {
        for (format, plugin) in [
            (V1, "cri"),
            (V2, "\"io.containerd.grpc.v1.cri\""),
            (V3, "\"io.containerd.cri.v1.runtime\""),
        ] {
            let new = add(format, "", DEFAULT);
            let expected = format!(
                "[plugins.{plugin}.containerd]\ndefault_runtime_name = \"cgpu\"\n\n\
                 [plugins.{plugin}.containerd.runtimes.runc]\n\
                 runtime_type = \"io.containerd.runc.v2\"\n\n\
                 [plugins.{plugin}.containerd.runtimes.cgpu]\n\
                 runtime_type = \"io.containerd.runc.v2\"\npod_annotations = [\"aliyun.com/*\", \"cgpu/*\"]\n\n\
                 [plugins.{plugin}.containerd.runtimes.cgpu.options]\n\
                 BinaryName = \"/usr/bin/cgpu-runtime\"\n"
            );
            assert_eq!(new.trim_start(), expected);
            assert_eq!(add(format, &new, DEFAULT), new);
            assert_eq!(remove(format, &new, None), "");
        }
        assert_eq!(
            edit(Format::Containerd { version: 5, reading: Reading::Later }, "", ADD),
            Err(EditError::Version { version: 5 })
        );
    }

    #[test]
    fn handler_is_like_its_model_except_its_program() {
        let model = r#"
            runtime_type = "io.containerd.runc.v2"
            runtime_path = ""
            privileged_without_host_devices = true
            pod_annotations = ["a.io/*"]
            container_annotations = []
            snapshotter = "nydus"
            cni_max_conf_num = 2
            [options]
            BinaryName = "/usr/bin/nvidia-container-runtime"
            Root = ""
            SystemdCgroup = true
            ShimCgroup = "/x"
        "#;
        let requested =
            ChangeRequest::Add { program: PROGRAM, default: false, model, merged: false };
        for format in [V1, V2, V3] {
            let new = add(format, "", requested);
            let top: toml::Table = new.parse().unwrap();
            let Format::Containerd { version, reading } = format else { unreachable!() };
            let [(_, plugin)] = reading.written(version) else { unreachable!() };
            let ours =
                top["plugins"][*plugin]["containerd"]["runtimes"]["cgpu"].as_table().unwrap();
            let mut expected: toml::Table = model.parse().unwrap();
            expected.remove("runtime_path");
            expected.remove("container_annotations");
            expected["pod_annotations"] = vec!["a.io/*", "aliyun.com/*", "cgpu/*"].into();
            expected["options"].as_table_mut().unwrap().remove("Root");
            expected["options"]["BinaryName"] = PROGRAM.into();
            assert_eq!(*ours, expected);
            assert_eq!(add(format, &new, requested), new);
            assert_eq!(remove(format, &new, None), "");
            // An entry that setup wrote before it copied anything.
            let old = add(format, "", ADD);
            let mended = add(format, &old, requested);
            assert_eq!(added(&old, &mended), ["SystemdCgroup = true"]);
            let own = old.replace("BinaryName", "SystemdCgroup = false\nBinaryName");
            assert_eq!(add(format, &own, requested), own, "what somebody wrote stays");
        }
        let all = model.replace("a.io/*", "*");
        let new = add(
            V2,
            "",
            ChangeRequest::Add { program: PROGRAM, default: false, model: &all, merged: false },
        );
        assert!(new.contains("pod_annotations = [\"*\"]"), "{new}");
    }

    /// As kubespray writes it: keys in lower camel, which containerd takes as well.
    #[test]
    fn keys_are_taken_in_any_case() {
        let kubespray = "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\".containerd]\n\
            Default_Runtime_Name = \"runc\"\n\
            [plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.runc.options]\n\
            binaryName = \"/usr/local/bin/runc\"\nsystemdCgroup = true\n";
        let new = add(V3, kubespray, DEFAULT);
        assert_eq!(new.matches("BinaryName").count(), 1, "{new}");
        assert!(new.contains("Default_Runtime_Name = \"cgpu\""), "{new}");
        assert!(!new.contains("default_runtime_name"), "{new}");
        assert_eq!(remove(V3, &new, Some(kubespray)), kubespray);
        // What an earlier setup left: two spellings, of which the last one counted.
        let ours = "BinaryName = \"/usr/bin/cgpu-runtime\"";
        let twice = new.replace(ours, &format!("binaryName = \"/usr/local/bin/runc\"\n{ours}"));
        assert_ne!(twice, new);
        assert_eq!(add(V3, &twice, DEFAULT), new);
        let alone = new.replace(ours, "binaryname = \"/opt/cgpu-runtime\"");
        assert_eq!(
            add(V3, &alone, DEFAULT),
            new.replace("BinaryName = \"/usr/bin/cgpu", "binaryname = \"/usr/bin/cgpu")
        );
        let two = format!("{kubespray}[plugins.\"io.containerd.cri.v1.runtime\".Containerd]\n");
        assert!(matches!(edit(V3, &two, ADD), Err(EditError::Twice { .. })));
    }

    /// The release isn't known: containerd 1 reads one part, containerd 2 another.
    #[test]
    fn file_without_version_serves_every_release() {
        let dockers = "disabled_plugins = [\"cri\"]\n#root = \"/x\"\n";
        for (reading, plugins) in [
            (Reading::Unknown, &["cri", "\"io.containerd.cri.v1.runtime\""][..]),
            (Reading::One, &["cri"]),
            (Reading::Two { older: false }, &["\"io.containerd.cri.v1.runtime\""]),
        ] {
            let format = Format::Containerd { version: 1, reading };
            let new = add(format, dockers, DEFAULT);
            for plugin in ["cri", "\"io.containerd.cri.v1.runtime\""] {
                let header = format!("[plugins.{plugin}.containerd.runtimes.cgpu]");
                assert_eq!(new.contains(&header), plugins.contains(&plugin), "{new}");
            }
            assert_eq!(add(format, &new, DEFAULT), new);
            assert_eq!(remove(format, &new, None), dockers);
        }
    }

    #[test]
    fn debians_file_only_grows_and_shrinks_back() {
        for requested in [ADD, DEFAULT] {
            let new = add(V2, DEBIAN, requested);
            let lines = added(DEBIAN, &new);
            assert!(
                lines.iter().filter(|line| !line.is_empty()).all(|line| line.starts_with("    "))
            );
            assert!(
                new.contains(
                    "\n    [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.cgpu]\n"
                ),
                "{new}"
            );
            assert_eq!(add(V2, &new, requested), new);
            assert_eq!(remove(V2, &new, Some(DEBIAN)), DEBIAN);
            assert_eq!(remove(V2, &new, None), DEBIAN);
        }
        // containerd 1 would have no runc any more, and its CRI would not start.
        assert!(add(V2, DEBIAN, ADD).contains("runtimes.runc]\n"));
        assert!(!add(V3, OWN, ADD).contains("runtimes.runc]\n"), "its runtimes are the user's");
    }

    // Comments and order stay, and removal restores the former default.
    #[test]
    fn comments_stay_and_default_is_restored() {
        let new = add(V3, OWN, DEFAULT);
        assert!(new.contains("default_runtime_name = \"cgpu\" # not runc\n"), "{new}");
        assert_eq!(added(&OWN.replace("'crun' #", "\"cgpu\" #"), &new).len(), 7, "{new}");
        assert_eq!(remove(V3, &new, Some(OWN)), OWN);
        let restored = remove(V3, &new, None);
        assert_eq!(restored, OWN.replace("default_runtime_name = 'crun' # not runc\n", ""));
        let other = new.replace("\"cgpu\" #", "'crun' #");
        assert_eq!(remove(V3, &other, None), OWN, "a default that isn't ours stays");
    }

    // Removal takes the table headers that setup wrote, and leaves the user's.
    #[test]
    fn only_headers_of_setup_are_removed() {
        let runtime = "[plugins.cri.containerd.runtimes.runc]\nruntime_type = 'x'\n";
        let with_header = format!("[plugins.cri.containerd]\n\n{runtime}");
        for own in [runtime, &with_header] {
            let new = add(V1, own, DEFAULT);
            assert!(new.contains("[plugins.cri.containerd]\n"));
            assert_eq!(remove(V1, &new, Some(own)), *own);
            let later = new.replace("runtimes.runc]\n", "runtimes.runc]\nsnapshotter = 'y'\n");
            let expected = own.replace("runtimes.runc]\n", "runtimes.runc]\nsnapshotter = 'y'\n");
            assert_eq!(remove(V1, &later, Some(own)), expected, "what came later stays");
        }
        let remark = add(V1, runtime, DEFAULT)
            .replace("[plugins.cri.containerd]", "# ours\n[plugins.cri.containerd]");
        assert!(remove(V1, &remark, Some(runtime)).contains("# ours\n[plugins.cri.containerd]"));
    }

    #[test]
    fn inline_and_dotted_tables_stay_so() {
        let inline =
            "plugins.cri.containerd = { runtimes = { runc = { runtime_type = \"x\" } } }\n";
        let new = add(V1, inline, DEFAULT);
        assert_eq!(new.lines().count(), 1, "{new}");
        assert_eq!(remove(V1, &new, Some(inline)), inline);
        let dotted = "[plugins]\ncri.containerd.runtimes.runc.runtime_type = \"x\"\n";
        match edit(V1, dotted, DEFAULT) {
            Ok(new) => assert_eq!(remove(V1, &new, Some(dotted)), dotted),
            Err(error) => assert_eq!(error, EditError::Unsafe),
        }
    }

    #[test]
    fn sections_of_other_versions_are_removed_too() {
        let both = format!("{}{}", add(V3, "version = 3\n", ADD), add(V2, "", ADD));
        assert_eq!(remove(V3, &both, None), "version = 3\n");
    }
}
