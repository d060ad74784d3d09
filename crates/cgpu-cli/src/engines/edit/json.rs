//! docker's `daemon.json`: edited in its syntax tree, so that formatting stays.

use jsonc_parser::ParseOptions;
use jsonc_parser::cst::{CstInputValue, CstObject, CstRootNode};
use serde_json::{Map, Value};

use super::{EditError, InForce, NAME, Said, Wish, is_known, is_ours, with_line_ends_of};
use crate::engines::dialect::docker_program;

/// The key of the runtimes.
const RUNTIMES: &str = "runtimes";

/// The key of the default runtime.
const DEFAULT: &str = "default-runtime";

/// JSON and nothing more: dockerd reads no comments.
const STRICT: ParseOptions = ParseOptions {
    allow_comments: false,
    allow_loose_object_property_names: false,
    allow_trailing_commas: false,
    allow_missing_commas: false,
    allow_single_quoted_strings: false,
    allow_hexadecimal_numbers: false,
    allow_unary_plus_numbers: false,
    allow_bare_decimal_point_numbers: false,
    allow_non_finite_numbers: false,
    allow_extended_string_escapes: false,
};

fn syntax(why: impl std::fmt::Display) -> EditError {
    EditError::Syntax { why: why.to_string() }
}

fn no_table(key: &str) -> EditError {
    EditError::NotATable { key: key.to_owned() }
}

/// The object that `text` is; dockerd takes an empty file for an empty one.
fn object(text: &str) -> Result<Map<String, Value>, EditError> {
    if text.trim().is_empty() {
        return Ok(Map::new());
    }
    match serde_json::from_str(text).map_err(syntax)? {
        Value::Object(object) => Ok(object),
        _ => Err(EditError::Syntax { why: "it is no JSON object".to_owned() }),
    }
}

fn runtimes(object: &Map<String, Value>) -> Result<Option<&Map<String, Value>>, EditError> {
    match object.get(RUNTIMES) {
        None => Ok(None),
        Some(Value::Object(runtimes)) => Ok(Some(runtimes)),
        Some(_) => Err(no_table(RUNTIMES)),
    }
}

pub(super) fn read(text: &str) -> Result<Said, EditError> {
    let object = object(text)?;
    let ours = runtimes(&object)?.and_then(|runtimes| runtimes.get(NAME));
    let program = ours.map(|runtime| {
        let said = docker_program(runtime);
        let program = said.or_else(|| runtime.get("runtimeType").and_then(Value::as_str));
        program.unwrap_or("no program").to_owned()
    });
    if let Some(program) = program.as_ref().filter(|program| !is_ours(program)) {
        return Err(EditError::Taken { program: program.clone() });
    }
    let default = object.get(DEFAULT).and_then(Value::as_str).map(str::to_owned);
    let section = object.contains_key(RUNTIMES);
    Ok(Said { runtime: ours.is_some(), program, default, section })
}

pub(super) fn is_bare(text: &str) -> bool {
    object(text).is_ok_and(|object| object.is_empty())
}

pub(super) fn hosts(text: &str) -> Result<Vec<String>, EditError> {
    let object = object(text)?;
    let hosts = object.get("hosts").and_then(Value::as_array).into_iter().flatten();
    Ok(hosts.filter_map(Value::as_str).map(str::to_owned).collect())
}

/// A reload changes only what the text names: see [`super::spelled_out`].
pub(super) fn spelled_out(text: &str, in_force: &InForce) -> Result<Option<String>, EditError> {
    let said = object(text)?;
    let listed = runtimes(&said)?;
    let knows = |name: &String| {
        name == "runc"
            || name.starts_with("io.containerd.")
            || listed.is_none_or(|runtimes| runtimes.contains_key(name))
    };
    let ours = super::is_ours_by_default(&in_force.default);
    let default = !said.contains_key(DEFAULT) && (ours || !knows(&in_force.default));
    let list = listed.is_none() && in_force.runtimes.iter().any(|name| name == NAME);
    if !default && !list {
        return Ok(None);
    }
    let parsed = if text.trim().is_empty() { "{}\n" } else { text };
    let root = CstRootNode::parse(parsed, &STRICT).map_err(syntax)?;
    let object = root.object_value().ok_or_else(|| no_table("its top"))?;
    if list {
        object.append(RUNTIMES, CstInputValue::Object(Vec::new()));
    }
    if default {
        set(&object, DEFAULT, "runc");
    }
    Ok(Some(root.to_string()))
}

pub(super) fn edit(text: &str, wish: Wish<'_>) -> Result<String, EditError> {
    let before = object(text)?;
    let parsed = if text.trim().is_empty() { "{}\n" } else { text };
    let root = CstRootNode::parse(parsed, &STRICT).map_err(syntax)?;
    let object = root.object_value().ok_or_else(|| no_table("its top"))?;
    once(&object, &[RUNTIMES, DEFAULT])?;
    if let Some(runtimes) = object.object_value(RUNTIMES) {
        once(&runtimes, &[NAME])?;
    }
    match wish {
        Wish::Add { program, default, .. } => add(&object, program, default)?,
        Wish::Remove { former } => remove(&object, former),
    }
    let edited = root.to_string();
    // An edit of nothing leaves an empty file as it is.
    if edited == parsed {
        return Ok(text.to_owned());
    }
    let edited = with_line_ends_of(text, edited);
    if let Wish::Remove { former: Some(former) } = wish
        && self::object(former).is_ok_and(|former| is_same(&former, &edited))
    {
        // Nothing else changed since: spaces and lines as they were.
        return Ok(former.to_owned());
    }
    match without_ours(before) == without_ours(self::object(&edited)?) {
        true => Ok(edited),
        false => Err(EditError::Unsafe),
    }
}

/// Refuses an object that has one of `keys` twice.
fn once(object: &CstObject, keys: &[&str]) -> Result<(), EditError> {
    for key in keys {
        let named = object.properties().into_iter().filter_map(|property| property.decoded_name());
        if named.filter(|name| name == key).count() > 1 {
            return Err(EditError::Twice { key: (*key).to_owned() });
        }
    }
    Ok(())
}

fn add(object: &CstObject, program: &str, default: bool) -> Result<(), EditError> {
    if object.properties().is_empty() {
        object.ensure_multiline();
    }
    let runtimes = object.object_value_or_create(RUNTIMES).ok_or_else(|| no_table(RUNTIMES))?;
    let path = || CstInputValue::String(program.to_owned());
    match runtimes.object_value(NAME) {
        None => {
            let ours = CstInputValue::Object(vec![("path".to_owned(), path())]);
            runtimes.append(NAME, ours);
        }
        Some(ours) => repoint(&ours, program),
    }
    if default {
        set(object, DEFAULT, NAME);
    }
    Ok(())
}

/// Has a runtime that is ours run `program`: by its path, or by the shim's option.
fn repoint(ours: &CstObject, program: &str) {
    let options = ours.object_value("options").filter(|_| ours.get("path").is_none());
    let named = options.as_ref().and_then(|options| {
        let names = options.properties().into_iter().filter_map(|named| named.decoded_name());
        names.into_iter().find(|name| name.eq_ignore_ascii_case("BinaryName"))
    });
    match (options, named) {
        (Some(options), Some(named)) => set(&options, &named, program),
        _ => set(ours, "path", program),
    }
}

/// Has `key` say `value`, and touches nothing where it does.
fn set(object: &CstObject, key: &str, value: &str) {
    let wanted = CstInputValue::String(value.to_owned());
    match object.get(key) {
        None => drop(object.append(key, wanted)),
        Some(property) if text_of(object, key).as_deref() != Some(value) => {
            property.set_value(wanted);
        }
        Some(_) => {}
    }
}

fn text_of(object: &CstObject, key: &str) -> Option<String> {
    object.get(key)?.value()?.as_string_lit()?.decoded_value().ok()
}

fn remove(object: &CstObject, former: Option<&str>) {
    let former = former.and_then(|text| self::object(text).ok()).unwrap_or_default();
    if text_of(object, DEFAULT).as_deref().is_some_and(super::is_ours_by_default) {
        let known = |name: &str| {
            object.object_value(RUNTIMES).is_some_and(|runtimes| runtimes.get(name).is_some())
        };
        let before = former.get(DEFAULT).and_then(Value::as_str);
        let before =
            before.filter(|name| !super::is_ours_by_default(name) && is_known(name, known));
        match (before, object.get(DEFAULT)) {
            (Some(before), _) => set(object, DEFAULT, before),
            (None, Some(property)) => property.remove(),
            (None, None) => {}
        }
    }
    // An empty list that was there before stays; one that has only had ours was made for it.
    let had_runtimes = self::runtimes(&former)
        .ok()
        .flatten()
        .is_some_and(|runtimes| !(runtimes.len() == 1 && runtimes.contains_key(NAME)));
    let Some(runtimes) = object.object_value(RUNTIMES) else { return };
    let Some(ours) = runtimes.get(NAME) else { return };
    ours.remove();
    if runtimes.properties().is_empty()
        && !had_runtimes
        && let Some(emptied) = object.get(RUNTIMES)
    {
        emptied.remove();
    }
}

/// Whether a text says the same, in the same order.
fn is_same(former: &Map<String, Value>, text: &str) -> bool {
    let object = object(text).unwrap_or_default();
    serde_json::to_string(former).ok() == serde_json::to_string(&object).ok()
}

fn without_ours(mut object: Map<String, Value>) -> Map<String, Value> {
    object.shift_remove(DEFAULT);
    if let Some(Value::Object(runtimes)) = object.get_mut(RUNTIMES) {
        runtimes.shift_remove(NAME);
        if runtimes.is_empty() {
            object.shift_remove(RUNTIMES);
        }
    }
    object
}
