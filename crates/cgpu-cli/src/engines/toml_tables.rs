//! Tables of runtimes in TOML: containerd's, CRI-O's and podman's are read and edited here. Pure.
//!
//! Each engine's own module has its [`Layout`] and its `RuntimeSyntax`. Everything else in a
//! document stays as it is. All three engines take keys in any case, except names of runtimes.

use toml::{Table as Plain, Value as PlainValue};
use toml_edit::{DocumentMut, InlineTable, Item, Table, Value};

use super::config_text::{
    ChangeRequest, EditError, ParsedConfig, is_restorable, one_line, with_line_ends_of,
};
use super::runtime_name::{NAME, is_ours, is_ours_by_default};
use super::runtime_syntax::{BuiltIn, Layout, RUNTIMES};
use super::toml_style::{Style, first_key_indent, header_indent};
use super::toml_values::get;

/// Copies `model`'s values into `table`, except those of `own`. Empty values are left out:
/// `containerd config default` writes them.
pub(super) fn copy(model: &Plain, table: &mut Table, own: &[&str]) {
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

pub(super) fn text(value: &str) -> Item {
    Item::Value(value.into())
}

/// Replaces a value by `wanted`; its decoration stays.
pub(super) fn set(value: &mut Value, wanted: &str) {
    if value.as_str() != Some(wanted) {
        let decor = value.decor().clone();
        *value = wanted.into();
        *value.decor_mut() = decor;
    }
}

pub(super) fn plain(text: &str) -> Result<Plain, EditError> {
    text.parse().map_err(|error: toml::de::Error| syntax(error.message()))
}

fn syntax(why: &str) -> EditError {
    EditError::Syntax { why: one_line(why) }
}

fn not_a_table(path: &[&str]) -> EditError {
    EditError::NotATable { key: path.join(".") }
}

/// The table at `path`, if there is one.
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

/// What all of `layouts` have together.
pub(super) fn read_all(layouts: &[Layout], text: &str) -> Result<ParsedConfig, EditError> {
    let mut all = ParsedConfig::default();
    for layout in layouts {
        let parsed = read(layout, text)?;
        all.runtime |= parsed.runtime;
        all.section |= parsed.section;
        all.default = parsed.default.or(all.default);
        all.program = parsed.program.or(all.program);
    }
    Ok(all)
}

pub(super) fn read(layout: &Layout, text: &str) -> Result<ParsedConfig, EditError> {
    let top = plain(text)?;
    let runtimes = below(&top, &layout.runtimes_path())?;
    let ours = runtimes.and_then(|runtimes| runtimes.get(NAME));
    let program =
        ours.map(|runtime| layout.syntax.program(runtime).unwrap_or("no program").to_owned());
    if let Some(program) = program.as_ref().filter(|program| !is_ours(program)) {
        return Err(EditError::Taken { program: program.clone() });
    }
    let default = below(&top, &layout.section)?.and_then(|section| get(section, layout.default));
    Ok(ParsedConfig {
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

pub(super) fn edit(
    layout: &Layout,
    text: &str,
    requested: ChangeRequest<'_>,
) -> Result<String, EditError> {
    let mut document: DocumentMut =
        text.parse().map_err(|error: toml_edit::TomlError| syntax(error.message()))?;
    // A file with nothing but lines of comments keeps them before what is added.
    let only_comments = document.as_table().is_empty();
    let remarks = document.trailing().as_str().unwrap_or_default().to_owned();
    if only_comments {
        document.set_trailing("");
    }
    match requested {
        ChangeRequest::Add { program, default, model, merged } => {
            add(layout, &mut document, (program, default, merged), &plain(model)?)?;
        }
        ChangeRequest::Remove { former } => {
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

/// The comments at the beginning of a text, which belong to nothing that is removed.
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
    (program, default, merged): (&str, bool, bool),
    model: &Plain,
) -> Result<(), EditError> {
    let path = layout.runtimes_path();
    let style = Style::of(&path, document);
    let has_runtimes = below_mut(document.as_item_mut(), &path).is_some();
    let runtimes = opened(document.as_item_mut(), &path)?;
    let values = layout.syntax.entries_are_values();
    match runtimes.as_table_like_mut().and_then(|table| table.get_mut(NAME)) {
        Some(entry) => {
            layout.syntax.repoint(entry, program, model);
        }
        None => {
            if let Some(built_in) = layout.syntax.built_in()
                && !merged
                && runtimes.as_table_like().is_some_and(|table| table.is_empty())
            {
                let mut table = Table::new();
                table.insert("runtime_type", text(built_in.runtime_type));
                insert(runtimes, built_in.name, Item::Table(table), &style);
            }
            let entry = layout.syntax.entry(program, model);
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
    let section = opened(document.as_item_mut(), &layout.section)?;
    layout.syntax.list(section, model, &style);
    if default {
        let section = opened(document.as_item_mut(), &layout.section)?;
        match child(section, layout.default).and_then(Item::as_value_mut) {
            Some(value) if value.as_str().is_some_and(is_ours_by_default) => {}
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

/// The table at `path`, made if missing; it is inline below one that is.
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
pub(super) fn insert(table: &mut Item, key: &str, mut entry: Item, style: &Style) {
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

pub(super) fn below_mut<'a>(top: &'a mut Item, path: &[&str]) -> Option<&'a mut Item> {
    path.iter().try_fold(top, |item, key| child(item, key))
}

/// What a table has at `key`, in whichever case. `Item::get_mut` would make it.
pub(super) fn child<'a>(item: &'a mut Item, key: &str) -> Option<&'a mut Item> {
    let table = item.as_table_like_mut()?;
    let key = spelled(table, key)?;
    table.get_mut(&key)
}

/// How a table spells `key`, if it has it.
pub(super) fn spelled(table: &dyn toml_edit::TableLike, key: &str) -> Option<String> {
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
        layout.syntax.unlist(section);
    }
    take_headers(&path, document, former);
    if let Some(runtimes) = below_mut(document.as_item_mut(), &path)
        && let Some(table) = runtimes.as_table_like_mut()
    {
        table.remove(NAME);
    }
    let former = plain(&former.to_string()).unwrap_or_default();
    if let Some(built_in) = layout.syntax.built_in() {
        remove_built_in(built_in, &path, document, &former);
    }
    // Tables that setup made are empty by now; one that existed before stays. One that had only
    // ours was made for it.
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

/// Removes the engine's own runtime, if it has its default settings and `former` didn't name it:
/// setup wrote it.
fn remove_built_in(built_in: BuiltIn, path: &[&str], document: &mut DocumentMut, former: &Plain) {
    let was_named = below(former, path).ok().flatten().is_some_and(|runtimes| {
        runtimes.contains_key(built_in.name) && !runtimes.contains_key(NAME)
    });
    if !was_named
        && let Some(table) = below_mut(document.as_item_mut(), path)
        && table.as_table_like().is_some_and(|table| table.len() == 1)
        && child(table, built_in.name).is_some_and(|runtime| built_in.is(runtime))
        && let Some(table) = table.as_table_like_mut()
    {
        table.remove(built_in.name);
    }
}

/// Removes the headers of tables that `former` has without one, if no value follows them: setup
/// wrote them for what it removed.
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

/// Restores the former default runtime, if the default is ours.
fn restore(layout: &Layout, section: &mut Item, former: &DocumentMut) {
    let like =
        |item: &'_ Item, key: &str| -> Option<String> { spelled(item.as_table_like()?, key) };
    let before =
        layout.section.iter().try_fold(former.as_item(), |item, key| item.get(like(item, key)?));
    let before = before.and_then(|section| section.get(like(section, layout.default)?)?.as_value());
    let runtimes = like(section, RUNTIMES).and_then(|key| section.get(key));
    let is_configured = |name: &str| runtimes.and_then(|runtimes| runtimes.get(name)).is_some();
    let before = before.filter(|value| {
        value
            .as_str()
            .is_some_and(|name| !is_ours_by_default(name) && is_restorable(name, is_configured))
    });
    let Some(key) = like(section, layout.default) else { return };
    let Some(table) = section.as_table_like_mut() else { return };
    let Some(value) = table.get_mut(&key).and_then(Item::as_value_mut) else { return };
    if !value.as_str().is_some_and(is_ours_by_default) {
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

/// A text's values without ours, for a comparison.
fn rest(layout: &Layout, mut top: Plain) -> Plain {
    let mut section = Some(&mut top);
    for key in &layout.section {
        section = section.and_then(|table| get_mut(table, key)?.as_table_mut());
    }
    if let Some(section) = section {
        section.retain(|key, _| !key.eq_ignore_ascii_case(layout.default));
        layout.syntax.unlist_plain(section);
        if let Some(runtimes) = get_mut(section, RUNTIMES).and_then(PlainValue::as_table_mut) {
            runtimes.remove(NAME);
            if let Some(built_in) = layout.syntax.built_in()
                && runtimes.len() == 1
                && runtimes.get(built_in.name).is_some_and(|table| built_in.is_plain(table))
            {
                runtimes.remove(built_in.name);
            }
        }
    }
    prune(&mut top);
    top
}

pub(super) fn get_mut<'a>(table: &'a mut Plain, key: &str) -> Option<&'a mut PlainValue> {
    let other = table.keys().find(|other| other.eq_ignore_ascii_case(key))?.clone();
    let key = if table.contains_key(key) { key.to_owned() } else { other };
    table.get_mut(&key)
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
