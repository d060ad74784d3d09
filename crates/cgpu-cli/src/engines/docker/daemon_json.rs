//! docker's `daemon.json`: edited in its syntax tree, so that formatting stays. Pure.

use jsonc_parser::ParseOptions;
use jsonc_parser::cst::{CstInputValue, CstObject, CstRootNode};
use serde_json::{Map, Value};

use super::program as program_of;
use crate::engines::config_text::{
    ChangeRequest, EditError, ParsedConfig, is_restorable, with_line_ends_of,
};
use crate::engines::runtime_name::{NAME, is_ours, is_ours_by_default};

const RUNTIMES: &str = "runtimes";

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

pub(in crate::engines) fn read(text: &str) -> Result<ParsedConfig, EditError> {
    let object = object(text)?;
    let ours = runtimes(&object)?.and_then(|runtimes| runtimes.get(NAME));
    let program = ours.map(|runtime| {
        let named = program_of(runtime);
        let program = named.or_else(|| runtime.get("runtimeType").and_then(Value::as_str));
        program.unwrap_or("no program").to_owned()
    });
    if let Some(program) = program.as_ref().filter(|program| !is_ours(program)) {
        return Err(EditError::Taken { program: program.clone() });
    }
    let default = object.get(DEFAULT).and_then(Value::as_str).map(str::to_owned);
    let section = object.contains_key(RUNTIMES);
    Ok(ParsedConfig { runtime: ours.is_some(), program, default, section })
}

pub(in crate::engines) fn is_bare(text: &str) -> bool {
    object(text).is_ok_and(|object| object.is_empty())
}

/// The addresses on which dockerd listens, by its file.
///
/// # Errors
///
/// If it can't be parsed.
pub fn hosts(text: &str) -> Result<Vec<String>, EditError> {
    let object = object(text)?;
    let hosts = object.get("hosts").and_then(Value::as_array).into_iter().flatten();
    Ok(hosts.filter_map(Value::as_str).map(str::to_owned).collect())
}

/// The configuration that a running dockerd has applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunningConfig {
    pub default: String,
    /// The names of its runtimes.
    pub runtimes: Vec<String>,
}

/// The text that dockerd has to read once before `text`, if a reload of `text` alone would leave our
/// runtime in place or make dockerd panic; `None` if `text` suffices.
///
/// A reload changes only what the text names: see [`super::reload`].
///
/// # Errors
///
/// If it can't be parsed.
pub fn reload_text(text: &str, running: &RunningConfig) -> Result<Option<String>, EditError> {
    let config = object(text)?;
    let listed = runtimes(&config)?;
    let knows = |name: &String| {
        name == "runc"
            || name.starts_with("io.containerd.")
            || listed.is_none_or(|runtimes| runtimes.contains_key(name))
    };
    let ours = is_ours_by_default(&running.default);
    let default = !config.contains_key(DEFAULT) && (ours || !knows(&running.default));
    let list = listed.is_none() && running.runtimes.iter().any(|name| name == NAME);
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

/// Whether dockerd has applied `text`, as to our runtime.
///
/// # Errors
///
/// If it can't be parsed.
pub fn is_applied(text: &str, running: &RunningConfig) -> Result<bool, EditError> {
    let config = read(text)?;
    let runtime = running.runtimes.iter().any(|name| name == NAME);
    let default = match &config.default {
        Some(default) => *default == running.default,
        None => !is_ours_by_default(&running.default),
    };
    Ok(runtime == config.runtime && default)
}

/// Whether neither dockerd nor `text` has our runtime.
///
/// # Errors
///
/// If it can't be parsed.
pub fn lacks_runtime(text: &str, running: &RunningConfig) -> Result<bool, EditError> {
    Ok(!read(text)?.runtime && is_applied(text, running)?)
}

pub(in crate::engines) fn edit(
    text: &str,
    requested: ChangeRequest<'_>,
) -> Result<String, EditError> {
    let before = object(text)?;
    let parsed = if text.trim().is_empty() { "{}\n" } else { text };
    let root = CstRootNode::parse(parsed, &STRICT).map_err(syntax)?;
    let object = root.object_value().ok_or_else(|| no_table("its top"))?;
    once(&object, &[RUNTIMES, DEFAULT])?;
    if let Some(runtimes) = object.object_value(RUNTIMES) {
        once(&runtimes, &[NAME])?;
    }
    match requested {
        ChangeRequest::Add { program, default, .. } => add(&object, program, default)?,
        ChangeRequest::Remove { former } => remove(&object, former),
    }
    let edited = root.to_string();
    // Without an edit an empty file stays as it is.
    if edited == parsed {
        return Ok(text.to_owned());
    }
    let edited = with_line_ends_of(text, edited);
    if let ChangeRequest::Remove { former: Some(former) } = requested
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

/// Sets `key` to `value`; leaves the text alone if it has that value.
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
    if text_of(object, DEFAULT).as_deref().is_some_and(is_ours_by_default) {
        let is_configured = |name: &str| {
            object.object_value(RUNTIMES).is_some_and(|runtimes| runtimes.get(name).is_some())
        };
        let before = former.get(DEFAULT).and_then(Value::as_str);
        let before =
            before.filter(|name| !is_ours_by_default(name) && is_restorable(name, is_configured));
        match (before, object.get(DEFAULT)) {
            (Some(before), _) => set(object, DEFAULT, before),
            (None, Some(property)) => property.remove(),
            (None, None) => {}
        }
    }
    // An empty list that existed before stays; one that had only ours was made for it.
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

/// Whether a text has the same values, in the same order.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::config_text::fixtures::{ADD, DAEMON, DEFAULT, PROGRAM, add, remove};
    use crate::engines::config_text::{Format, edit, read};

    #[test]
    fn runtime_is_written_in_the_files_style() {
        let plain = "{\n  \"runtimes\": {\n    \"cgpu\": {\n      \"path\": \"/usr/bin/cgpu-runtime\"\n    }\n  }\n}\n";
        for empty in ["", "\n", "{}\n"] {
            assert_eq!(add(Format::Docker, empty, ADD), plain, "{empty:?}");
        }
        let new = add(Format::Docker, DAEMON, DEFAULT);
        assert!(new.contains("\"default-runtime\": \"cgpu\",\n\t\"runtimes\""), "{new}");
        assert!(new.contains("\"runtimeArgs\": []},\n\t\t\"cgpu\": {\n\t\t\t\"path\""), "{new}");
        assert!(new.ends_with("\t\"debug\": 1e0\n}\n"), "{new}");
        assert_eq!(add(Format::Docker, &new, DEFAULT), new, "a second time changes nothing");
        assert_eq!(add(Format::Docker, &new, ADD), new, "nor does one without --default");
        assert_eq!(remove(Format::Docker, &new, Some(DAEMON)), DAEMON);
        let edited = remove(Format::Docker, &new.replace("1e0", "2"), Some(DAEMON));
        assert_eq!(edited, DAEMON.replace("1e0", "2"), "what came later stays");
        let edited = remove(Format::Docker, &new, None);
        assert!(!edited.contains("default-runtime"), "no backup has the former one: {edited}");
        let gone = DAEMON.replace("\"crun\": {\"path\"", "\"other\": {\"path\"");
        let new = add(Format::Docker, &gone, DEFAULT).replace("\"default-runtime\": \"crun\"", "");
        let restored = remove(Format::Docker, &new, Some(&gone.replace("\"crun\"", "\"absent\"")));
        assert!(!restored.contains("absent"), "dockerd wouldn't start: {restored}");
    }

    // A reload alone would leave our runtime, or make dockerd panic: the text for it names everything.
    #[test]
    fn reload_text_names_what_dockerd_would_retain() {
        let running = |default: &str, runtimes: &[&str]| RunningConfig {
            default: default.into(),
            runtimes: runtimes.iter().map(|name| (*name).to_owned()).collect(),
        };
        let nvidia = r#"{"runtimes":{"nvidia":{"path":"/x"}}}"#;
        let ours = running("cgpu", &["runc", "nvidia", "cgpu"]);
        for (text, running, expected) in [
            (
                nvidia,
                &ours,
                Some(r#"{"runtimes":{"nvidia":{"path":"/x"}},"default-runtime":"runc"}"#),
            ),
            ("", &ours, Some(r#"{"runtimes":{},"default-runtime":"runc"}"#)),
            (
                "{\"debug\":true}",
                &ours,
                Some(r#"{"debug":true,"runtimes":{},"default-runtime":"runc"}"#),
            ),
            (r#"{"runtimes":{},"default-runtime":"runc"}"#, &ours, None),
            // Another default that was removed makes dockerd panic as well.
            (
                r#"{"runtimes":{}}"#,
                &running("nvidia", &["nvidia"]),
                Some(r#"{"runtimes":{},"default-runtime":"runc"}"#),
            ),
            // It may come by a flag, which the file must not name too.
            (nvidia, &running("nvidia", &["runc", "nvidia"]), None),
            ("{}", &running("nvidia", &["runc", "nvidia"]), None),
            ("", &running("runc", &["runc", "cgpu"]), Some(r#"{"runtimes":{}}"#)),
            ("", &running("io.containerd.runc.v2", &["runc"]), None),
        ] {
            let reload_text = reload_text(text, running).unwrap();
            let plain = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
            assert_eq!(reload_text.as_deref().map(plain), expected.map(plain), "{text}");
        }
        let has = |text: &str, running: &RunningConfig| is_applied(text, running).unwrap();
        assert!(!has(nvidia, &ours));
        assert!(has(nvidia, &running("runc", &["runc", "nvidia"])));
        assert!(lacks_runtime(nvidia, &running("runc", &["runc", "nvidia"])).unwrap());
        let with = add(Format::Docker, "{}", DEFAULT);
        assert!(has(&with, &ours) && !has(&with, &running("runc", &["runc", "cgpu"])));
        assert!(!lacks_runtime(&with, &ours).unwrap());
    }

    #[test]
    fn arguments_stay_and_the_path_changes() {
        let old = r#"{"runtimes":{"cgpu":{"path":"/opt/cgpu-runtime","runtimeArgs":["--x"]}}}"#;
        let new = add(Format::Docker, old, ADD);
        assert_eq!(new, old.replace("/opt/", "/usr/bin/"));
    }

    #[test]
    fn runtime_may_be_named_by_binary_name() {
        let text = "{\"runtimes\": {\"cgpu\": {\"runtimeType\": \"io.containerd.runc.v2\", \"options\": \
                    {\"BinaryName\": \"/opt/cgpu-runtime\", \"SystemdCgroup\": true}}}}\n";
        let config = read(Format::Docker, text).unwrap();
        assert_eq!((config.runtime, config.program.as_deref()), (true, Some("/opt/cgpu-runtime")));
        let expected = text.replace("/opt/cgpu-runtime", PROGRAM);
        assert_eq!(add(Format::Docker, text, ADD), expected);
        let other = text.replace("/opt/cgpu-runtime", "/usr/bin/runc");
        let taken = EditError::Taken { program: "/usr/bin/runc".into() };
        assert_eq!(edit(Format::Docker, &other, ADD), Err(taken));
    }
}
