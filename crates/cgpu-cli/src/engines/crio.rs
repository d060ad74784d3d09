//! CRI-O: the runtimes of `crio.conf`, as they are read and as setup edits them. Pure.

use toml::{Table, Value};
use toml_edit::{Item, Table as EditedTable};

use super::NamedRuntime;
use super::installation::Installation;
use super::named_runtime::named;
use super::runtime_syntax::{Layout, RuntimeSyntax};
use super::toml_tables::{child, copy, set, text};
use super::toml_values::{get, last_named, last_value, parse, parse_all, table_at};

pub(super) const INSTALLATION: Installation = Installation {
    name: "cri-o",
    programs: &["crio"],
    main_file: "/etc/crio/crio.conf",
    directories: &["/etc/crio/crio.conf.d"],
    drop_in: Some("/etc/crio/crio.conf.d/99-cgpu.conf"),
    units: &["crio"],
    ..Installation::NONE
};

/// Our runtimes in CRI-O's `crio.conf`, or in a file of its directory.
pub(crate) fn runtimes(text: &str) -> Result<Vec<NamedRuntime>, String> {
    let table = parse(text)?;
    let all = table_at(&table, &["crio", "runtime", "runtimes"]);
    let ours = all.into_iter().flatten().filter_map(|(name, runtime)| {
        named(name, runtime.get("runtime_path").and_then(Value::as_str)?)
    });
    Ok(ours.collect())
}

/// The table that has CRI-O's runtimes.
const SECTION: [&str; 2] = ["crio", "runtime"];

/// The name or path of CRI-O's default runtime; none if CRI-O itself decides.
pub(super) fn default_program<'a>(texts: impl Iterator<Item = &'a str>) -> Vec<String> {
    let files = parse_all(texts);
    let Some(name) = last_named(&files, &SECTION, "default_runtime") else { return Vec::new() };
    let path = last_value(&files, &["crio", "runtime", "runtimes", name, "runtime_path"]);
    let path = path.and_then(Value::as_str).filter(|path| !path.is_empty());
    vec![path.unwrap_or(name).to_owned()]
}

/// The table of CRI-O's default runtime, but for its program; empty if CRI-O itself decides,
/// or if it isn't called as runc is.
pub(super) fn model<'a>(texts: impl Iterator<Item = &'a str>) -> Table {
    let files = parse_all(texts);
    let named = || {
        let name = last_named(&files, &SECTION, "default_runtime")?;
        let model = last_value(&files, &["crio", "runtime", "runtimes", name])?.as_table()?;
        let kind = model.get("runtime_type").and_then(Value::as_str).unwrap_or_default();
        ["", "oci"].contains(&kind).then(|| model.clone())
    };
    named().unwrap_or_default()
}

/// The tables of `crio.conf` that have our runtime.
pub(super) fn layout() -> Layout {
    Layout { section: SECTION.into(), part_keys: 2, default: "default_runtime", syntax: &Syntax }
}

#[derive(Debug)]
struct Syntax;

impl RuntimeSyntax for Syntax {
    fn program<'a>(&self, runtime: &'a Value) -> Option<&'a str> {
        get(runtime.as_table()?, "runtime_path")?.as_str()
    }

    fn entry(&self, program: &str, model: &Table) -> Item {
        let mut table = EditedTable::new();
        table.insert("runtime_path", text(program));
        copy(model, &mut table, &["runtime_path"]);
        if !table.contains_key("runtime_type") {
            table.insert("runtime_type", text("oci"));
        }
        Item::Table(table)
    }

    fn repoint(&self, entry: &mut Item, program: &str, _model: &Table) {
        if let Some(value) = child(entry, "runtime_path").and_then(Item::as_value_mut) {
            set(value, program);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::config_text::fixtures::*;
    use crate::engines::config_text::{ChangeRequest, Format, HEADER, is_bare};
    use crate::engines::named_runtime::tests::ours;

    #[test]
    fn runtimes_are_found_by_their_paths() {
        let text = "[crio.runtime.runtimes.gpu]\nruntime_path = \"/usr/bin/cgpu-runtime\"\n\
                    [crio.runtime.runtimes.runc]\nruntime_path = \"/usr/bin/runc\"\n";
        assert_eq!(runtimes(text), ours("gpu", None));
    }

    #[test]
    fn handler_is_like_its_model() {
        let model = "runtime_path = \"/usr/libexec/crio/crun\"\nruntime_root = \"/run/crun\"\n\
                     monitor_path = \"/usr/libexec/crio/conmon\"\nmonitor_env = [\"A=b\"]\n\
                     allowed_annotations = [\"io.containers.trace-syscall\"]\n\
                     privileged_without_host_devices = true\n";
        let requested =
            ChangeRequest::Add { program: PROGRAM, default: false, model, merged: false };
        let new = add(Format::Crio, "", requested);
        let top: toml::Table = new.parse().unwrap();
        let ours = top["crio"]["runtime"]["runtimes"]["cgpu"].as_table().unwrap();
        let mut expected: toml::Table = model.parse().unwrap();
        expected["runtime_path"] = PROGRAM.into();
        expected.insert("runtime_type".into(), "oci".into());
        assert_eq!(*ours, expected);
        assert_eq!(remove(Format::Crio, &new, None), "");
    }

    #[test]
    fn runtime_and_default_are_in_one_table() {
        let new = add(Format::Crio, HEADER, DEFAULT);
        assert_eq!(
            new,
            format!(
                "{HEADER}\n[crio.runtime]\ndefault_runtime = \"cgpu\"\n\n\
                 [crio.runtime.runtimes.cgpu]\nruntime_path = \"/usr/bin/cgpu-runtime\"\n\
                 runtime_type = \"oci\"\n"
            )
        );
        assert!(is_bare(Format::Crio, &remove(Format::Crio, &new, None)));
    }
}
