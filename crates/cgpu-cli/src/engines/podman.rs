//! podman: the runtimes of `containers.conf`, as they are read and as setup edits them. Pure.

use toml::{Table, Value};
use toml_edit::{Array, Item, Value as EditedValue};

use super::NamedRuntime;
use super::installation::Installation;
use super::named_runtime::named;
use super::runtime_name::{NAME, RUNTIME, is_ours};
use super::runtime_syntax::{Layout, RuntimeSyntax};
use super::toml_style::Style;
use super::toml_tables::{child, get_mut, insert, set};
use super::toml_values::{last_named, last_value, parse, parse_all, table_at};

pub(super) const INSTALLATION: Installation = Installation {
    name: "podman",
    programs: &["podman"],
    vendor_file: Some("/usr/share/containers/containers.conf"),
    main_file: "/etc/containers/containers.conf",
    directories: &["/usr/share/containers/containers.conf.d", "/etc/containers/containers.conf.d"],
    drop_in: Some("/etc/containers/containers.conf.d/99-cgpu.conf"),
    ..Installation::NONE
};

/// Our runtimes in podman's `containers.conf`, or in a file of its directories.
pub(crate) fn runtimes(text: &str) -> Result<Vec<NamedRuntime>, String> {
    let table = parse(text)?;
    let all = table_at(&table, &["engine", "runtimes"]);
    let ours = all.into_iter().flatten().filter_map(|(name, paths)| {
        paths.as_array()?.iter().filter_map(Value::as_str).find_map(|path| named(name, path))
    });
    let default = table_at(&table, &["engine"]).and_then(|engine| engine.get("runtime")?.as_str());
    Ok(ours.chain(default.and_then(|path| named("default", path))).collect())
}

/// Names and paths of podman's default runtime, by preference: podman tries crun first.
pub(super) fn default_programs<'a>(texts: impl Iterator<Item = &'a str>) -> Vec<String> {
    let files = parse_all(texts);
    let configured = last_named(&files, &["engine"], "runtime").map(str::to_owned);
    let names =
        configured.map_or_else(|| vec!["crun".to_owned(), "runc".to_owned()], |name| vec![name]);
    let paths = |name: &String| -> Vec<String> {
        let paths = last_value(&files, &["engine", "runtimes", name]).and_then(Value::as_array);
        let paths = paths.into_iter().flatten().filter_map(Value::as_str);
        paths.map(str::to_owned).chain([name.clone()]).collect()
    };
    names.iter().flat_map(paths).collect()
}

/// podman knows a runtime's capabilities by its name: these keys list the runtimes that report
/// errors as JSON, and those that can do without cgroups. The lists are podman's own.
const LISTS: [(&str, &[&str]); 2] = [
    ("runtime_supports_json", &["crun", "runc", "kata", "runsc", "youki", "krun"]),
    ("runtime_supports_nocgroups", &["crun", "krun"]),
];

/// podman's lists of capabilities, as its files have them, or podman itself; that of runtimes
/// that need no cgroups only if crun is the runtime below ours.
pub(super) fn lists<'a>(texts: impl Iterator<Item = &'a str>, over_crun: bool) -> Table {
    let files = parse_all(texts);
    let keys = LISTS.iter().filter(|(key, _)| over_crun || !key.ends_with("nocgroups"));
    let lists = keys.map(|(key, own)| {
        let configured = last_value(&files, &["engine", key]).and_then(Value::as_array).cloned();
        let own = || own.iter().map(|name| Value::from(*name)).collect();
        ((*key).to_owned(), Value::Array(configured.unwrap_or_else(own)))
    });
    lists.collect()
}

/// Our runtime as podman may call it: by what its file calls it, or by its program.
const CALLED: [&str; 2] = [NAME, RUNTIME];

/// The tables of `containers.conf` that have our runtime.
pub(super) fn layout() -> Layout {
    Layout { section: vec!["engine"], part_keys: 1, default: "runtime", syntax: &Syntax }
}

#[derive(Debug)]
struct Syntax;

impl RuntimeSyntax for Syntax {
    fn program<'a>(&self, runtime: &'a Value) -> Option<&'a str> {
        let paths = runtime.as_array()?.iter().filter_map(Value::as_str);
        paths.clone().find(|path| is_ours(path)).or_else(|| paths.clone().next())
    }

    fn entry(&self, program: &str, _model: &Table) -> Item {
        Item::Value(Array::from_iter([program]).into())
    }

    fn repoint(&self, entry: &mut Item, program: &str, _model: &Table) {
        let paths = entry.as_array_mut();
        let is_of_ours = |path: &&mut EditedValue| path.as_str().is_some_and(is_ours);
        if let Some(value) = paths.and_then(|paths| paths.iter_mut().find(is_of_ours)) {
            set(value, program);
        }
    }

    fn entries_are_values(&self) -> bool {
        true
    }

    fn list(&self, section: &mut Item, model: &Table, style: &Style) {
        if let Some(table) = section.as_table_mut()
            && table.is_implicit()
            && LISTS.iter().any(|(key, _)| model.contains_key(*key))
        {
            table.set_implicit(false);
            style.head(table);
        }
        for (key, _) in LISTS {
            let Some(wanted) = model.get(key).and_then(Value::as_array) else { continue };
            match child(section, key).and_then(Item::as_array_mut) {
                Some(names) => {
                    for ours in CALLED {
                        if !names.iter().any(|name| name.as_str() == Some(ours)) {
                            names.insert(0, ours);
                        }
                    }
                }
                None => {
                    let names = wanted.iter().filter_map(Value::as_str).chain(CALLED);
                    insert(section, key, Item::Value(Array::from_iter(names).into()), style);
                }
            }
        }
    }

    /// A list that equals podman's own is removed.
    fn unlist(&self, section: &mut Item) {
        for (key, own) in LISTS {
            let Some(names) = child(section, key).and_then(Item::as_array_mut) else { continue };
            let before = names.len();
            names.retain(|name| !name.as_str().is_some_and(|name| CALLED.contains(&name)));
            let names: Vec<&str> = names.iter().filter_map(EditedValue::as_str).collect();
            if before != names.len()
                && names == own
                && let Some(table) = section.as_table_like_mut()
            {
                table.remove(key);
            }
        }
    }

    fn unlist_plain(&self, section: &mut Table) {
        for (key, own) in LISTS {
            let Some(names) = get_mut(section, key).and_then(Value::as_array_mut) else {
                continue;
            };
            names.retain(|name| !name.as_str().is_some_and(|name| CALLED.contains(&name)));
            if names.iter().filter_map(Value::as_str).eq(own.iter().copied()) {
                section.retain(|other, _| !other.eq_ignore_ascii_case(key));
            }
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
    fn runtimes_are_found_by_lists_of_paths() {
        let text =
            "[engine.runtimes]\ncgpu = [\"/usr/bin/cgpu-runtime\"]\nrunc = [\"/usr/bin/runc\"]\n";
        assert_eq!(runtimes(text), ours("cgpu", None));
        assert_eq!(
            runtimes("[engine]\nruntime = \"/usr/bin/cgpu-runtime\"\n"),
            ours("default", None)
        );
        assert_eq!(runtimes("[engine]\nruntimes = 3\n"), Ok(Vec::new()));
    }

    #[test]
    fn lists_of_capabilities_name_ours() {
        let model = "runtime_supports_json = [\"crun\", \"runc\", \"kata\", \"runsc\", \"youki\", \"krun\"]\n";
        let requested =
            ChangeRequest::Add { program: PROGRAM, default: false, model, merged: false };
        for text in [
            "",
            "[engine]\nevents_logger = \"file\"\n",
            "[engine]\nruntime_supports_json = [\"crun\", {append=true}]\n",
        ] {
            let new = add(Format::Podman, text, requested);
            let top: toml::Table = new.parse().unwrap();
            let names = top["engine"]["runtime_supports_json"].as_array().unwrap();
            for name in ["cgpu", "cgpu-runtime", "crun"] {
                assert!(names.contains(&name.into()), "{new}");
            }
            assert!(!new.contains("nocgroups"));
            assert_eq!(add(Format::Podman, &new, requested), new);
            assert_eq!(remove(Format::Podman, &new, Some(text)), text);
        }
    }

    #[test]
    fn runtime_and_default_are_in_their_tables() {
        let new = add(Format::Podman, HEADER, DEFAULT);
        assert_eq!(
            new,
            format!(
                "{HEADER}\n[engine]\nruntime = \"cgpu\"\n\n\
                 [engine.runtimes]\ncgpu = [\"/usr/bin/cgpu-runtime\"]\n"
            )
        );
        assert!(is_bare(Format::Podman, &remove(Format::Podman, &new, None)));
        let own = "[engine]\n# which one\nruntime = \"crun\"\n\n[engine.runtimes]\n# none yet\n\n[network]\na = 1\n";
        let new = add(Format::Podman, own, DEFAULT);
        assert_eq!(remove(Format::Podman, &new, Some(own)), own);
        let remarks = "# nothing here yet\n\n# [engine]\n";
        let new = add(Format::Podman, remarks, DEFAULT);
        assert!(new.starts_with(remarks), "{new}");
        assert_eq!(remove(Format::Podman, &new, Some(remarks)), remarks);
        assert_eq!(remove(Format::Podman, remarks, None), remarks);
        let moved =
            add(Format::Podman, "[engine.runtimes]\ncgpu = [\"/opt/cgpu-runtime\"] # here\n", ADD);
        assert_eq!(moved, "[engine.runtimes]\ncgpu = [\"/usr/bin/cgpu-runtime\"] # here\n");
    }
}
