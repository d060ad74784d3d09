//! The engines whose configuration is TOML: containerd, CRI-O, podman.
//!
//! Owns where each has its runtimes and its default runtime. New tables are indented as
//! their neighbours are. All three engines take keys in any case, names of runtimes apart.

use toml::{Table as Plain, Value as PlainValue};
use toml_edit::{Array, DocumentMut, InlineTable, Item, Table, Value};

use super::{EditError, Format, NAME, Said, Wish, is_known, is_ours, with_line_ends_of};
use crate::engines::containerd::{ANNOTATIONS, CRI, NEWEST, get, passes};
use crate::engines::dialect::LISTS;
use crate::engines::runtime_name::RUNTIME;

/// Where an engine has its runtimes, and how it describes one.
#[derive(Debug)]
pub(super) struct Layout {
    format: Format,
    /// The table that has both the default runtime and the table of the runtimes.
    section: Vec<&'static str>,
    /// The table of the runtimes, below the section.
    runtimes: &'static str,
    /// The key of the default runtime, below the section.
    default: &'static str,
}

/// The places where an engine looks for our runtime: all of them say it.
pub(super) fn layouts(format: Format) -> Result<Vec<Layout>, EditError> {
    Ok(match format {
        Format::Containerd { version, .. } if !(1..=NEWEST).contains(&version) => {
            return Err(EditError::Version { version });
        }
        Format::Containerd { version, reading } => {
            let written = reading.written(version).iter();
            written.map(|(_, plugin)| of_plugin(format, plugin)).collect()
        }
        Format::Crio => vec![Layout {
            format,
            section: vec!["crio", "runtime"],
            runtimes: "runtimes",
            default: "default_runtime",
        }],
        // The text of docker is JSON and never comes here.
        Format::Podman | Format::Docker => vec![Layout {
            format,
            section: vec!["engine"],
            runtimes: "runtimes",
            default: "runtime",
        }],
    })
}

fn of_plugin(format: Format, plugin: &'static str) -> Layout {
    let section = vec!["plugins", plugin, "containerd"];
    Layout { format, section, runtimes: "runtimes", default: "default_runtime_name" }
}

/// All places where our runtime may be, whether the engine looks there or not.
pub(super) fn everywhere(format: Format) -> Result<Vec<Layout>, EditError> {
    match format {
        Format::Containerd { .. } => {
            Ok(CRI.iter().map(|(_, plugin)| of_plugin(format, plugin)).collect())
        }
        _ => layouts(format),
    }
}

impl Layout {
    /// The part of the engine that files of containerd 1 replace as a whole.
    fn part(&self) -> &[&'static str] {
        match self.format {
            Format::Containerd { .. } => &self.section[..2],
            _ => &self.section,
        }
    }

    fn runtimes_path(&self) -> Vec<&'static str> {
        self.section.iter().copied().chain([self.runtimes]).collect()
    }

    /// The program of a runtime, as the engine is told of it.
    fn program<'a>(&self, runtime: &'a PlainValue) -> Option<&'a str> {
        match self.format {
            Format::Containerd { .. } => {
                let options = get(runtime.as_table()?, "options").and_then(PlainValue::as_table);
                let binary = options.and_then(|options| get(options, "BinaryName"));
                binary.or_else(|| get(runtime.as_table()?, "runtime_type"))?.as_str()
            }
            Format::Crio => get(runtime.as_table()?, "runtime_path")?.as_str(),
            Format::Podman | Format::Docker => {
                let paths = runtime.as_array()?.iter().filter_map(PlainValue::as_str);
                paths.clone().find(|path| is_ours(path)).or_else(|| paths.clone().next())
            }
        }
    }

    /// The runtime as a new entry, which is like `model` but for its program.
    fn entry(&self, program: &str, model: &Plain) -> Item {
        let mut table = Table::new();
        match self.format {
            Format::Containerd { .. } => {
                table.insert("runtime_type", text(BUILT_IN_TYPE));
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
            }
            Format::Crio => {
                table.insert("runtime_path", text(program));
                copy(model, &mut table, &["runtime_path"]);
                if !table.contains_key("runtime_type") {
                    table.insert("runtime_type", text("oci"));
                }
            }
            Format::Podman | Format::Docker => {
                return Item::Value(Array::from_iter([program]).into());
            }
        }
        Item::Table(table)
    }

    /// Has an entry that is ours run `program`; what else it says stays.
    fn repoint(&self, entry: &mut Item, program: &str) {
        let place = match self.format {
            Format::Containerd { .. } => {
                if let Some(options) = child(entry, "options").and_then(Item::as_table_like_mut) {
                    keep_one(options, "BinaryName", program);
                }
                below_mut(entry, &["options", "BinaryName"]).and_then(Item::as_value_mut)
            }
            Format::Crio => child(entry, "runtime_path").and_then(Item::as_value_mut),
            Format::Podman | Format::Docker => entry
                .as_array_mut()
                .and_then(|paths| paths.iter_mut().find(|path| path.as_str().is_some_and(is_ours))),
        };
        if let Some(value) = place {
            set(value, program);
        }
    }
}

/// Our runtime as podman may call it: by what its file calls it, or by its program.
const CALLED: [&str; 2] = [NAME, RUNTIME];

/// Has podman's lists of what runtimes can do name ours, where `model` has them.
fn list(section: &mut Item, model: &Plain, style: &Style) {
    for (key, _) in LISTS {
        let Some(wanted) = model.get(key).and_then(PlainValue::as_array) else { continue };
        match child(section, key).and_then(Item::as_array_mut) {
            Some(names) => {
                for ours in CALLED {
                    if !names.iter().any(|name| name.as_str() == Some(ours)) {
                        names.insert(0, ours);
                    }
                }
            }
            None => {
                let names = wanted.iter().filter_map(PlainValue::as_str).chain(CALLED);
                insert(section, key, Item::Value(Array::from_iter(names).into()), style);
            }
        }
    }
}

/// Takes our runtime out of podman's lists; one that says no more than podman knows goes.
fn unlist(section: &mut Item) {
    for (key, own) in LISTS {
        let Some(names) = child(section, key).and_then(Item::as_array_mut) else { continue };
        let before = names.len();
        names.retain(|name| !name.as_str().is_some_and(|name| CALLED.contains(&name)));
        let names: Vec<&str> = names.iter().filter_map(Value::as_str).collect();
        if before != names.len()
            && names == own
            && let Some(table) = section.as_table_like_mut()
        {
            table.remove(key);
        }
    }
}

/// The annotations of a pod that containerd passes on to its runtime.
const PASSED: &str = "pod_annotations";

/// Has `table` say what `model` does, but for `own`. An empty value says nothing: containerd
/// writes them where it is asked for its defaults.
fn copy(model: &Plain, table: &mut Table, own: &[&str]) {
    for (key, value) in model.iter().filter(|(key, _)| !own.contains(&key.as_str())) {
        let empty = match value {
            PlainValue::String(text) => text.is_empty(),
            PlainValue::Array(values) => values.is_empty(),
            PlainValue::Table(values) => values.is_empty(),
            _ => false,
        };
        // One syntax, two parsers.
        if let (false, Ok(value)) = (empty, value.to_string().parse::<Value>()) {
            table.insert(key, Item::Value(value));
        }
    }
}

/// Has an entry that says nothing of who makes its cgroups say what `model` does: one made before
/// that was copied has pods whose cgroups the kubelet doesn't find.
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

/// Has a table one key that means `key`, where it has it in several spellings.
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

fn text(value: &str) -> Item {
    Item::Value(value.into())
}

/// Has a value say `wanted`, in its place; nothing is touched where it does.
fn set(value: &mut Value, wanted: &str) {
    if value.as_str() != Some(wanted) {
        let decor = value.decor().clone();
        *value = wanted.into();
        *value.decor_mut() = decor;
    }
}

fn plain(text: &str) -> Result<Plain, EditError> {
    text.parse().map_err(|error: toml::de::Error| syntax(error.message()))
}

fn syntax(why: &str) -> EditError {
    EditError::Syntax { why: why.split_whitespace().collect::<Vec<_>>().join(" ") }
}

fn not_a_table(path: &[&str]) -> EditError {
    EditError::NotATable { key: path.join(".") }
}

/// The table at `path`, `None` where there is none.
fn below<'a>(top: &'a Plain, path: &[&str]) -> Result<Option<&'a Plain>, EditError> {
    let mut table = top;
    for (depth, key) in path.iter().enumerate() {
        let means = |other: &&String| other.eq_ignore_ascii_case(key);
        if table.keys().filter(means).count() > 1 {
            return Err(EditError::Twice { key: path[..=depth].join(".") });
        }
        table = match get(table, key) {
            None => return Ok(None),
            Some(PlainValue::Table(inner)) => inner,
            Some(_) => return Err(not_a_table(&path[..=depth])),
        };
    }
    Ok(Some(table))
}

/// What all of `layouts` say together.
pub(super) fn read_all(layouts: &[Layout], text: &str) -> Result<Said, EditError> {
    let mut all = Said::default();
    for layout in layouts {
        let said = read(layout, text)?;
        all.runtime |= said.runtime;
        all.section |= said.section;
        all.default = said.default.or(all.default);
        all.program = said.program.or(all.program);
    }
    Ok(all)
}

pub(super) fn read(layout: &Layout, text: &str) -> Result<Said, EditError> {
    let top = plain(text)?;
    let runtimes = below(&top, &layout.runtimes_path())?;
    let ours = runtimes.and_then(|runtimes| runtimes.get(NAME));
    let program = ours.map(|runtime| layout.program(runtime).unwrap_or("no program").to_owned());
    if let Some(program) = program.as_ref().filter(|program| !is_ours(program)) {
        return Err(EditError::Taken { program: program.clone() });
    }
    let default = below(&top, &layout.section)?.and_then(|section| get(section, layout.default));
    Ok(Said {
        runtime: ours.is_some(),
        program,
        default: default.and_then(PlainValue::as_str).map(str::to_owned),
        section: below(&top, layout.part())?.is_some(),
    })
}

pub(super) fn is_bare(text: &str) -> bool {
    plain(text).is_ok_and(|mut top| {
        top.remove("version");
        prune(&mut top);
        top.is_empty()
    })
}

pub(super) fn edit(layout: &Layout, text: &str, wish: Wish<'_>) -> Result<String, EditError> {
    let mut document: DocumentMut =
        text.parse().map_err(|error: toml_edit::TomlError| syntax(error.message()))?;
    // A file with nothing but lines of comments keeps them before what is added.
    let only_comments = document.as_table().is_empty();
    let remarks = document.trailing().as_str().unwrap_or_default().to_owned();
    if only_comments {
        document.set_trailing("");
    }
    match wish {
        Wish::Add { program, default, model, beside } => {
            add(layout, &mut document, (program, default, beside), &plain(model)?)?;
        }
        Wish::Remove { former } => {
            let former = former.and_then(|text| text.parse().ok()).unwrap_or_default();
            remove(layout, &mut document, &former);
        }
    }
    let mut edited = document.to_string();
    let emptied = document.as_table().is_empty();
    if only_comments && emptied {
        edited = remarks;
    } else if only_comments {
        let gap = if remarks.is_empty() || remarks.ends_with('\n') { "" } else { "\n" };
        let blank = if remarks.trim().is_empty() { "" } else { "\n" };
        edited = format!("{remarks}{gap}{blank}{}", edited.trim_start_matches('\n'));
    } else if emptied {
        edited = leading_comments(text);
    }
    let edited = with_line_ends_of(text, edited);
    let [before, after] =
        [plain(text)?, plain(&edited).map_err(|_| EditError::Unsafe)?].map(|top| rest(layout, top));
    match before == after {
        true => Ok(edited),
        false => Err(EditError::Unsafe),
    }
}

/// The comments at the beginning of a text, which belong to nothing that is taken out.
fn leading_comments(text: &str) -> String {
    let is_comment = |line: &&str| line.trim_start().starts_with('#') || line.trim().is_empty();
    let lines: String = text.split_inclusive('\n').take_while(is_comment).collect();
    match lines.trim_end() {
        "" => String::new(),
        lines => format!("{lines}\n"),
    }
}

fn add(
    layout: &Layout,
    document: &mut DocumentMut,
    (program, default, beside): (&str, bool, bool),
    model: &Plain,
) -> Result<(), EditError> {
    let style = Style::of(layout, document);
    let path = layout.runtimes_path();
    let has_runtimes = below_mut(document.as_item_mut(), &path).is_some();
    let runtimes = opened(document.as_item_mut(), &path)?;
    // podman's runtimes are values of the table, which then needs its header.
    let values = matches!(layout.format, Format::Podman);
    match runtimes.as_table_like_mut().and_then(|table| table.get_mut(NAME)) {
        Some(entry) => {
            layout.repoint(entry, program);
            adopt_cgroups(entry, model);
        }
        None => {
            // containerd 1 forgets its own runc, which is its default, once a runtime is named.
            if matches!(layout.format, Format::Containerd { .. })
                && !beside
                && runtimes.as_table_like().is_some_and(|table| table.is_empty())
            {
                let mut built_in = Table::new();
                built_in.insert("runtime_type", text(BUILT_IN_TYPE));
                insert(runtimes, BUILT_IN, Item::Table(built_in), &style);
            }
            let entry = layout.entry(program, model);
            insert(runtimes, NAME, entry, &style);
            if let Some(table) = runtimes.as_table_mut()
                && values
            {
                table.set_implicit(false);
                if !has_runtimes {
                    style.head(table);
                }
            }
        }
    }
    if values {
        let section = opened(document.as_item_mut(), &layout.section)?;
        if let Some(table) = section.as_table_mut()
            && table.is_implicit()
            && LISTS.iter().any(|(key, _)| model.contains_key(*key))
        {
            table.set_implicit(false);
            style.head(table);
        }
        list(section, model, &style);
    }
    if default {
        let section = opened(document.as_item_mut(), &layout.section)?;
        match child(section, layout.default).and_then(Item::as_value_mut) {
            Some(value) if value.as_str().is_some_and(super::is_ours_by_default) => {}
            Some(value) => set(value, NAME),
            None => {
                if let Some(table) = section.as_table_mut()
                    && table.is_implicit()
                {
                    table.set_implicit(false);
                    style.head(table);
                }
                insert(section, layout.default, text(NAME), &style);
            }
        }
    }
    Ok(())
}

/// The table at `path`, made where it is missing; it is inline below one that is.
fn opened<'a>(top: &'a mut Item, path: &[&str]) -> Result<&'a mut Item, EditError> {
    let mut item = top;
    for (depth, key) in path.iter().enumerate() {
        let inline = item.is_inline_table();
        let table = item.as_table_like_mut().ok_or_else(|| not_a_table(&path[..depth]))?;
        let key = spelled(table, key).unwrap_or_else(|| {
            let mut implicit = Table::new();
            implicit.set_implicit(true);
            let made = match inline {
                true => Item::Value(InlineTable::new().into()),
                false => Item::Table(implicit),
            };
            table.insert(key, made);
            (*key).to_owned()
        });
        item = table.get_mut(&key).ok_or(EditError::Unsafe)?;
    }
    match item.is_table_like() {
        true => Ok(item),
        false => Err(not_a_table(path)),
    }
}

/// Puts an entry at the end of a table: inline, or indented as its neighbours are.
fn insert(table: &mut Item, key: &str, mut entry: Item, style: &Style) {
    let inline = table.is_inline_table();
    if inline {
        if let Item::Table(entry_table) = entry {
            entry = Item::Value(entry_table.into_inline_table().into());
        }
    } else if let Item::Table(made) = &mut entry {
        style.indent(made);
    }
    let is_value = entry.is_value();
    let indent = match table.as_table() {
        Some(table) => first_key_indent(table).unwrap_or_else(|| {
            format!("{}{}", header_indent(table).unwrap_or_default(), style.inner())
        }),
        None => String::new(),
    };
    if let Some(like) = table.as_table_like_mut() {
        like.insert(key, entry);
        if let (true, false, Some(mut key)) = (is_value, inline, like.key_mut(key)) {
            key.leaf_decor_mut().set_prefix(indent);
        }
    }
}

fn below_mut<'a>(top: &'a mut Item, path: &[&str]) -> Option<&'a mut Item> {
    path.iter().try_fold(top, |item, key| child(item, key))
}

/// What a table has at `key`, in whichever case. `Item::get_mut` would make it.
fn child<'a>(item: &'a mut Item, key: &str) -> Option<&'a mut Item> {
    let table = item.as_table_like_mut()?;
    let key = spelled(table, key)?;
    table.get_mut(&key)
}

/// How a table spells `key`, where it has it.
fn spelled(table: &dyn toml_edit::TableLike, key: &str) -> Option<String> {
    if table.contains_key(key) {
        return Some(key.to_owned());
    }
    table
        .iter()
        .map(|(other, _)| other)
        .find(|other| other.eq_ignore_ascii_case(key))
        .map(str::to_owned)
}

fn remove(layout: &Layout, document: &mut DocumentMut, former: &DocumentMut) {
    let path = layout.runtimes_path();
    if let Some(section) = below_mut(document.as_item_mut(), &layout.section) {
        restore(layout, section, former);
        if layout.format == Format::Podman {
            unlist(section);
        }
    }
    take_headers(&path, document, former);
    if let Some(runtimes) = below_mut(document.as_item_mut(), &path)
        && let Some(table) = runtimes.as_table_like_mut()
    {
        table.remove(NAME);
    }
    let former = plain(&former.to_string()).unwrap_or_default();
    let kept = below(&former, &path)
        .ok()
        .flatten()
        .is_some_and(|runtimes| runtimes.contains_key(BUILT_IN) && !runtimes.contains_key(NAME));
    if !kept
        && let Some(table) = below_mut(document.as_item_mut(), &path)
        && table.as_table_like().is_some_and(|table| table.len() == 1)
        && child(table, BUILT_IN).is_some_and(|runtime| is_as_built_in(runtime))
        && let Some(table) = table.as_table_like_mut()
    {
        table.remove(BUILT_IN);
    }
    // Tables that setup made are emptied by now; one that was there before stays. One that has
    // only had ours was made for it.
    let mut had = former;
    if below(&had, &path).ok().flatten().is_some_and(|runtimes| runtimes.contains_key(NAME)) {
        had = rest(layout, had);
    }
    for depth in (1..=path.len()).rev() {
        let path = &path[..depth];
        let (Some((key, parents)), Ok(None)) = (path.split_last(), below(&had, path)) else {
            continue;
        };
        let emptied = below_mut(document.as_item_mut(), path)
            .and_then(|item| item.as_table_like_mut())
            .is_some_and(|table| table.is_empty());
        let parent = below_mut(document.as_item_mut(), parents);
        if let (true, Some(parent)) = (emptied, parent.and_then(Item::as_table_like_mut)) {
            parent.remove(key);
        }
    }
}

/// Takes out the headers of tables that `former` has without one, where nothing stands below
/// them: setup wrote them for what is gone.
fn take_headers(path: &[&str], document: &mut DocumentMut, former: &DocumentMut) {
    for depth in 1..=path.len() {
        let path = &path[..depth];
        let had = path.iter().try_fold(former.as_item(), |item, key| item.get(key));
        let had_none = had.and_then(Item::as_table).is_some_and(Table::is_implicit);
        let table = below_mut(document.as_item_mut(), path).and_then(Item::as_table_mut);
        if let (true, Some(table)) = (had_none, table)
            && table.iter().all(|(_, item)| !item.is_value())
            && table.decor().prefix().and_then(|prefix| prefix.as_str()).is_none_or(is_blank)
        {
            table.set_implicit(true);
        }
    }
}

fn is_blank(text: &str) -> bool {
    text.trim().is_empty()
}

/// Undoes a default runtime that is ours.
fn restore(layout: &Layout, section: &mut Item, former: &DocumentMut) {
    let like =
        |item: &'_ Item, key: &str| -> Option<String> { spelled(item.as_table_like()?, key) };
    let before =
        layout.section.iter().try_fold(former.as_item(), |item, key| item.get(like(item, key)?));
    let before = before.and_then(|section| section.get(like(section, layout.default)?)?.as_value());
    let runtimes = like(section, layout.runtimes).and_then(|key| section.get(key));
    let known = |name: &str| runtimes.and_then(|runtimes| runtimes.get(name)).is_some();
    let before = before.filter(|value| {
        value.as_str().is_some_and(|name| !super::is_ours_by_default(name) && is_known(name, known))
    });
    let Some(key) = like(section, layout.default) else { return };
    let Some(table) = section.as_table_like_mut() else { return };
    let Some(value) = table.get_mut(&key).and_then(Item::as_value_mut) else { return };
    if !value.as_str().is_some_and(super::is_ours_by_default) {
        return;
    }
    match before {
        Some(before) => {
            let decor = value.decor().clone();
            *value = before.clone();
            *value.decor_mut() = decor;
        }
        None => drop(table.remove(&key)),
    }
}

/// What a text says beside what is ours.
fn rest(layout: &Layout, mut top: Plain) -> Plain {
    let mut section = Some(&mut top);
    for key in &layout.section {
        section = section.and_then(|table| get_mut(table, key)?.as_table_mut());
    }
    if let Some(section) = section {
        section.retain(|key, _| !key.eq_ignore_ascii_case(layout.default));
        if layout.format == Format::Podman {
            for (key, own) in LISTS {
                let Some(names) = get_mut(section, key).and_then(PlainValue::as_array_mut) else {
                    continue;
                };
                names.retain(|name| !name.as_str().is_some_and(|name| CALLED.contains(&name)));
                if names.iter().filter_map(PlainValue::as_str).eq(own.iter().copied()) {
                    section.retain(|other, _| !other.eq_ignore_ascii_case(key));
                }
            }
        }
        if let Some(runtimes) = get_mut(section, layout.runtimes).and_then(PlainValue::as_table_mut)
        {
            runtimes.remove(NAME);
            let built_in = runtimes.get(BUILT_IN).and_then(PlainValue::as_table);
            if runtimes.len() == 1 && built_in.is_some_and(|table| *table == plain_built_in()) {
                runtimes.remove(BUILT_IN);
            }
        }
    }
    prune(&mut top);
    top
}

fn get_mut<'a>(table: &'a mut Plain, key: &str) -> Option<&'a mut PlainValue> {
    let other = table.keys().find(|other| other.eq_ignore_ascii_case(key))?.clone();
    let key = if table.contains_key(key) { key.to_owned() } else { other };
    table.get_mut(&key)
}

/// The runtime that containerd knows without being told.
const BUILT_IN: &str = "runc";

/// How it knows that one.
const BUILT_IN_TYPE: &str = "io.containerd.runc.v2";

fn plain_built_in() -> Plain {
    Plain::from_iter([("runtime_type".to_owned(), PlainValue::from(BUILT_IN_TYPE))])
}

/// Whether a runtime says no more than what containerd knows without it.
fn is_as_built_in(runtime: &Item) -> bool {
    let only = runtime.as_table_like().is_some_and(|table| table.len() == 1);
    only && runtime.get("runtime_type").and_then(Item::as_str) == Some(BUILT_IN_TYPE)
}

/// Drops tables without a value.
fn prune(table: &mut Plain) {
    table.retain(|_, value| match value {
        PlainValue::Table(inner) => {
            prune(inner);
            !inner.is_empty()
        }
        _ => true,
    });
}

/// How a document indents the tables of its runtimes.
#[derive(Debug)]
struct Style {
    /// Before the header of a runtime's table.
    header: String,
    /// What a nested table and a table's keys have more than the header of theirs.
    step: String,
}

impl Style {
    fn of(layout: &Layout, document: &DocumentMut) -> Self {
        let path = layout.runtimes_path();
        let mut nearest = Style { header: String::new(), step: String::new() };
        let mut item = document.as_item();
        for key in &path {
            let Some(inner) = item.get(key) else { break };
            item = inner;
            let Some(table) = item.as_table() else { break };
            // The neighbours at the depth where our first table is made.
            let neighbour = table.iter().find_map(|(_, item)| item.as_table());
            let own = header_indent(table);
            if let Some(indent) = neighbour.and_then(header_indent) {
                let step = own.as_deref().and_then(|own| indent.strip_prefix(own));
                nearest.step = step.unwrap_or_default().to_owned();
                nearest.header = indent;
            } else if let Some(own) = own {
                nearest.header = format!("{own}{}", nearest.step);
            }
        }
        nearest
    }

    /// Puts a blank line before a new header.
    fn head(&self, table: &mut Table) {
        table.decor_mut().set_prefix(format!("\n{}", self.header));
    }

    /// Indents a new runtime's table, its keys and its options.
    fn indent(&self, table: &mut Table) {
        self.head(table);
        let keys = format!("{}{}", self.header, self.inner());
        for (mut key, item) in table.iter_mut() {
            match item {
                Item::Table(options) => {
                    options.decor_mut().set_prefix(format!("\n{keys}"));
                    let deeper = format!("{keys}{}", self.inner());
                    for (mut key, _) in options.iter_mut() {
                        key.leaf_decor_mut().set_prefix(deeper.clone());
                    }
                }
                _ => key.leaf_decor_mut().set_prefix(keys.clone()),
            }
        }
    }

    /// A document that isn't indented has keys without indentation.
    fn inner(&self) -> &str {
        match (self.header.is_empty(), self.step.is_empty()) {
            (false, true) => "  ",
            _ => &self.step,
        }
    }
}

/// The spaces before a table's header, where it has one.
fn header_indent(table: &Table) -> Option<String> {
    if table.is_implicit() || table.is_dotted() {
        return None;
    }
    let prefix = table.decor().prefix().and_then(|prefix| prefix.as_str()).unwrap_or_default();
    let line = prefix.rsplit('\n').next().unwrap_or_default();
    Some(line.chars().take_while(|letter| letter.is_whitespace()).collect())
}

fn first_key_indent(table: &Table) -> Option<String> {
    let (key, _) = table.iter().find(|(_, item)| item.is_value())?;
    let prefix = table.key(key)?.leaf_decor().prefix().and_then(|prefix| prefix.as_str())?;
    let line = prefix.rsplit('\n').next().unwrap_or_default();
    Some(line.chars().take_while(|letter| letter.is_whitespace()).collect())
}
