//! A JSON text with only what changed written again. Pure.
//!
//! Parsing and writing a whole document would lose the white space, the escapes
//! (Go writes `<` as `\u003c`) and the spelling of some numbers (`1e3`). Here every
//! member and element that stayed the same keeps its text to the byte.

use std::fmt;

use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

/// The text of `after`, made from `text`, which is the text of `before`.
pub(super) fn splice(text: &str, before: &Value, after: &Value) -> String {
    if before == after {
        return text.to_owned();
    }
    match (before, after) {
        (Value::Object(old), Value::Object(new)) => {
            let Some(members) = members(text) else { return after.to_string() };
            if old.keys().any(|key| !new.contains_key(key)) {
                return after.to_string();
            }
            let mut out = String::with_capacity(text.len() + 256);
            let mut copied = 0;
            for (key, raw) in &members {
                let start = raw.as_ptr().addr() - text.as_ptr().addr();
                out.push_str(&text[copied..start]);
                match (old.get(key), new.get(key)) {
                    (Some(old), Some(new)) => out.push_str(&splice(raw, old, new)),
                    // Only in an object whose key was given twice, and not the last time.
                    _ => out.push_str(raw),
                }
                copied = start + raw.len();
            }
            // The text behind the last member is white space and the closing brace.
            let end = if members.is_empty() { text.rfind('}').unwrap_or(0) } else { copied };
            out.push_str(&text[copied..end]);
            let mut first = members.is_empty();
            for (key, value) in new.iter().filter(|(key, _)| !old.contains_key(*key)) {
                if !std::mem::take(&mut first) {
                    out.push(',');
                }
                out.push_str(&format!("{}:{value}", Value::from(key.as_str())));
            }
            out.push_str(&text[end..]);
            out
        }
        (Value::Array(old), Value::Array(new)) => {
            let Some(elements) = elements(text) else { return after.to_string() };
            let mut unused = old.iter().zip(elements).peekable();
            let texts: Vec<String> = new
                .iter()
                .map(|value| {
                    // Edits drop elements, change them or append: the order stays.
                    let mut rest = unused.clone();
                    match rest.find(|(old, _)| *old == value) {
                        Some((_, raw)) => {
                            unused = rest;
                            raw.to_owned()
                        }
                        None => value.to_string(),
                    }
                })
                .collect();
            format!("[{}]", texts.join(","))
        }
        _ => after.to_string(),
    }
}

/// The members of an object with their texts, which are parts of `text`.
fn members(text: &str) -> Option<Vec<(String, &str)>> {
    struct Members;
    impl<'de> Visitor<'de> for Members {
        type Value = Vec<(String, &'de str)>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut members = Vec::new();
            while let Some((key, raw)) = map.next_entry::<String, &RawValue>()? {
                members.push((key, raw.get()));
            }
            Ok(members)
        }
    }
    serde_json::Deserializer::from_str(text).deserialize_map(Members).ok()
}

/// The texts of the elements of an array.
fn elements(text: &str) -> Option<Vec<&str>> {
    struct Elements;
    impl<'de> Visitor<'de> for Elements {
        type Value = Vec<&'de str>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an array")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            let mut elements = Vec::new();
            while let Some(raw) = list.next_element::<&RawValue>()? {
                elements.push(raw.get());
            }
            Ok(elements)
        }
    }
    serde_json::Deserializer::from_str(text).deserialize_seq(Elements).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn spliced(text: &str, edit: impl FnOnce(&mut Value)) -> String {
        let before: Value = serde_json::from_str(text).unwrap();
        let mut after = before.clone();
        edit(&mut after);
        let out = splice(text, &before, &after);
        assert_eq!(serde_json::from_str::<Value>(&out).unwrap(), after, "{out}");
        out
    }

    #[test]
    fn everything_but_the_change_keeps_its_text() {
        let text = "{ \"n\": [1.50, 1e3, 1E-2,\n 18446744073709551616],\n\t\"a\": {\"env\": [\"\\u003cx\\u003e\", \"b\"], \"z\": -0.0} }\n";
        let out = spliced(text, |value| {
            value["a"]["env"].as_array_mut().unwrap().push("new".into());
        });
        assert_eq!(
            out,
            "{ \"n\": [1.50, 1e3, 1E-2,\n 18446744073709551616],\n\t\"a\": {\"env\": [\"\\u003cx\\u003e\",\"b\",\"new\"], \"z\": -0.0} }\n"
        );
    }

    #[test]
    fn new_members_are_appended_even_to_empty_objects() {
        assert_eq!(spliced("{ }", |value| value["a"] = 1.into()), "{ \"a\":1}");
        assert_eq!(
            spliced("{\"x\": {} }", |value| {
                value["a\""] = 1.into();
                value["b"] = 2.into();
            }),
            "{\"x\": {},\"a\\\"\":1,\"b\":2 }"
        );
    }

    #[test]
    fn dropped_and_changed_elements_leave_the_others_alone() {
        let out = spliced("[ 1e1, 2e1, 3e1, 2e1 ]", |value| {
            value.as_array_mut().unwrap().remove(0);
            value[1] = 7.into();
        });
        assert_eq!(out, "[2e1,7,2e1]");
    }

    #[test]
    fn a_key_given_twice_breaks_nothing() {
        let out = spliced(r#"{"a":{"x":1},"a":{"b":2,"c":[]}}"#, |value| {
            value["a"]["c"].as_array_mut().unwrap().push(1.into());
        });
        assert!(out.contains(r#""c":[1]"#), "{out}");
    }

    fn json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            "[a-c\"\\\\<é]{0,3}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                proptest::collection::vec(("[a-c\"]{0,2}", inner), 0..4)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_change_comes_out_as_meant(before in json(), after in json(), pretty: bool) {
            let text = if pretty {
                serde_json::to_string_pretty(&before).unwrap()
            } else {
                before.to_string()
            };
            let out = splice(&text, &before, &after);
            prop_assert_eq!(serde_json::from_str::<Value>(&out).unwrap(), after);
        }
    }
}
