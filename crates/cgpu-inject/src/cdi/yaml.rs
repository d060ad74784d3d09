//! A JSON value as YAML that YAML 1.1 and 1.2 parsers read alike.
//!
//! Owns layout and quoting. Every string that could be read as anything else is quoted, and then
//! in the escapes that JSON and YAML share; what isn't ASCII is always escaped. Must not know what
//! the value says. Pure.

use std::fmt::Write;

use serde_json::Value;

/// Words that some YAML takes for a truth value or for nothing; they begin with a letter, as a
/// plain string may.
const WORDS: [&str; 9] = ["y", "n", "yes", "no", "on", "off", "true", "false", "null"];

/// `value` as a document.
#[must_use]
pub fn document(value: &Value) -> String {
    let mut text = String::from("---\n");
    block(value, 0, &mut text);
    text
}

/// Lines of `value`, each after `indent` spaces.
fn block(value: &Value, indent: usize, text: &mut String) {
    let space = " ".repeat(indent);
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (name, value) in map {
                text.push_str(&space);
                text.push_str(&string(name));
                text.push(':');
                member(value, indent + 2, text);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for item in items {
                // The item's first line has the dash in the place of its last two spaces.
                let mut lines = String::new();
                block(item, indent + 2, &mut lines);
                let _ = write!(text, "{space}- {}", &lines[indent + 2..]);
            }
        }
        scalar => {
            let _ = writeln!(text, "{space}{}", inline(scalar));
        }
    }
}

/// What stands behind a name and its colon.
fn member(value: &Value, indent: usize, text: &mut String) {
    let nested = match value {
        Value::Object(map) => !map.is_empty(),
        Value::Array(items) => !items.is_empty(),
        _ => false,
    };
    if nested {
        text.push('\n');
        block(value, indent, text);
    } else {
        let _ = writeln!(text, " {}", inline(value));
    }
}

/// What takes one line.
fn inline(value: &Value) -> String {
    match value {
        Value::String(text) => string(text),
        Value::Array(_) => "[]".to_owned(),
        Value::Object(_) => "{}".to_owned(),
        other => other.to_string(),
    }
}

fn string(text: &str) -> String {
    let begins = text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '/');
    let plain = |at: char| at.is_ascii_alphanumeric() || "/_.=+-".contains(at);
    let word = WORDS.iter().any(|word| word.eq_ignore_ascii_case(text));
    if begins && text.chars().all(plain) && !word {
        return text.to_owned();
    }
    let mut quoted = String::from("\"");
    for at in text.chars() {
        match at {
            '"' | '\\' => quoted.extend(['\\', at]),
            ' '..='~' => quoted.push(at),
            _ if u32::from(at) > 0xffff => {
                let _ = write!(quoted, "\\U{:08x}", u32::from(at));
            }
            _ => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(at));
            }
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn lists_and_maps_are_laid_out_as_blocks() {
        let value = json!({
            "a": "0.5.0", "b": [{"c": "/dev/nvidia0", "d": 438}, {"e": []}, "yes", [1, "x y"]],
            "f": {}, "g": {"h": "No", "i": "a: b", "j": "A=b"},
        });
        let expected = "---\na: \"0.5.0\"\nb:\n  - c: /dev/nvidia0\n    d: 438\n  - e: []\n  - \"yes\"\n  \
                        - - 1\n    - \"x y\"\nf: {}\ng:\n  h: \"No\"\n  i: \"a: b\"\n  j: A=b\n";
        assert_eq!(document(&value), expected);
    }

    proptest! {
        #[test]
        fn every_string_is_read_back_the_same(name in "\\PC{0,10}", text in any::<String>()) {
            let value = json!({"a": [{name: text.clone()}], "b": text});
            let read: Value = serde_saphyr::from_str(&document(&value)).unwrap();
            prop_assert_eq!(read, value);
        }

        #[test]
        fn every_word_is_read_back_as_a_string(text in "[-+.:/_=~!0-9a-zA-Z]{0,6}") {
            let value = json!({"a": [text]});
            let read: Value = serde_saphyr::from_str(&document(&value)).unwrap();
            prop_assert_eq!(read, value);
        }
    }
}
