//! Parts of a `config.json`'s value: looked up, made if they are missing, or reported to be of
//! another shape than the OCI runtime specification says. Pure.

use std::borrow::Cow;
use std::path::{Component, Path, PathBuf};

use serde_json::{Map, Value, json};

/// A field that is not what the specification says, and what it should be.
pub(super) type Misshapen = (&'static str, &'static str);

/// The object at `path`, made where it is missing.
pub(super) fn object<'a>(
    value: &'a mut Value,
    path: &[&str],
    field: &'static str,
) -> Result<&'a mut Map<String, Value>, Misshapen> {
    let mut here = value;
    for name in path {
        let map = here.as_object_mut().ok_or((field, "an object"))?;
        here = map.entry(*name).or_insert(Value::Null);
        if here.is_null() {
            *here = json!({});
        }
    }
    here.as_object_mut().ok_or((field, "an object"))
}

/// The list at `path`, made where it is missing.
pub(super) fn list<'a>(
    value: &'a mut Value,
    path: &[&str],
    field: &'static str,
) -> Result<&'a mut Vec<Value>, Misshapen> {
    let (last, parents) = path.split_last().ok_or((field, "a list"))?;
    let item = object(value, parents, field)?.entry(*last).or_insert(Value::Null);
    if item.is_null() {
        *item = json!([]);
    }
    item.as_array_mut().ok_or((field, "a list"))
}

pub(super) fn mounts(config: &mut Value) -> Result<&mut Vec<Value>, Misshapen> {
    list(config, &["mounts"], "mounts")
}

pub(super) fn number(value: &Value, field: &str) -> Option<i64> {
    value.get(field).and_then(Value::as_i64)
}

pub(super) fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value.get(field).and_then(Value::as_str).unwrap_or_default()
}

/// Whether a mount makes a part of the host appear in the container.
pub(super) fn is_bind(mount: &Value) -> bool {
    let options = mount.get("options").and_then(Value::as_array);
    let is_option = |option: &Value| matches!(option.as_str(), Some("bind" | "rbind"));
    text(mount, "type") == "bind" || options.is_some_and(|all| all.iter().any(is_option))
}

/// Whether a mount is read-only by its options: the last of several counts.
pub(super) fn is_read_only(mount: &Value) -> bool {
    let options = mount.get("options").and_then(Value::as_array).into_iter().flatten();
    let mut options = options.filter_map(Value::as_str).rev();
    let last = options.find(|option| matches!(*option, "ro" | "rro" | "rw" | "rrw"));
    last.is_some_and(|option| matches!(option, "ro" | "rro"))
}

/// `path` without `//`, `/./` and `/../`. Links are the host's business.
#[must_use]
pub fn plain(path: &str) -> Cow<'_, str> {
    let usual = |part: &str| !matches!(part, "" | "." | "..");
    if path.strip_prefix('/').is_some_and(|rest| rest.split('/').all(usual)) {
        return Cow::Borrowed(path);
    }
    let mut plain = PathBuf::new();
    for part in Path::new(path).components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            part => plain.push(part),
        }
    }
    Cow::Owned(plain.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_made_plain() {
        for (path, expected) in [
            ("/dev/nvidia0", "/dev/nvidia0"),
            ("/dev//nvidia0", "/dev/nvidia0"),
            ("/dev/./nvidia0/", "/dev/nvidia0"),
            ("/x/../dev/nvidia0", "/dev/nvidia0"),
            ("/../../dev", "/dev"),
            ("/", "/"),
            ("/..", "/"),
        ] {
            assert_eq!(plain(path), expected);
        }
    }
}
