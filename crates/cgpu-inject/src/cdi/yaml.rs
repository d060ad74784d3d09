//! A specification as YAML that YAML 1.1 and 1.2 parsers read alike: engines have the former.
//!
//! Owns the layout: a line per string, however long it is. serde-saphyr owns the quoting. Pure.

use serde_saphyr::{SerializeError, ser_options, to_fmt_writer_with_options};

use super::spec::Specification;

/// `spec` as a document.
///
/// It takes a specification and no JSON value: serde_json's numbers of any precision are maps to
/// other writers.
///
/// # Errors
///
/// Those of the writer; no specification is known to cause one.
pub fn document(spec: &Specification) -> Result<String, SerializeError> {
    let options = ser_options! { compact_list_indent: false, prefer_block_scalars: false };
    let mut text = String::from("---\n");
    to_fmt_writer_with_options(&mut text, spec, options)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;
    use crate::cdi::spec::{Device, Edits, Hook, Node};

    /// A specification with `name` wherever a name can be any text, and `text` elsewhere.
    fn with(name: &str, text: &str) -> Specification {
        let text = || text.to_owned();
        let edits = Edits {
            env: vec![text(), text()],
            device_nodes: vec![Node { path: text(), minor: 255, ..Node::default() }],
            hooks: vec![Hook { args: vec![text()], timeout: Some(-1), ..Hook::default() }],
            additional_gids: vec![44],
            ..Edits::default()
        };
        let annotations = [(name.to_owned(), text()), (String::new(), text())];
        Specification {
            cdi_version: text(),
            annotations: annotations.into(),
            devices: vec![
                Device { name: text(), container_edits: edits.clone(), ..Device::default() },
                Device::default(),
            ],
            container_edits: edits,
            ..Specification::default()
        }
    }

    /// Reads it as a specification, and as what a reader without types finds.
    fn assert_read_back(name: &str, text: &str) {
        let spec = with(name, text);
        let document = document(&spec).unwrap();
        let typed: Specification = serde_saphyr::from_str(&document).unwrap();
        assert_eq!(typed, spec, "{document}");
        let untyped: Value = serde_saphyr::from_str(&document).unwrap();
        assert_eq!(untyped, serde_json::to_value(&spec).unwrap(), "{document}");
        let options = serde_saphyr::options! { legacy_octal_numbers: true };
        let octal: Value = serde_saphyr::from_str_with_options(&document, options).unwrap();
        assert_eq!(octal, untyped, "{document}");
    }

    /// A string that YAML 1.1 or 1.2 takes for anything else is quoted, and so is one with an
    /// indicator of the syntax.
    #[test]
    fn ambiguous_strings_are_quoted() {
        let typed = "~ null Null y N yes No on OFF true False 0 01 0666 0o7 0b1 0x1F 1_000 -1 +1 1.0 \
                     1. .5 1e3 -1E+3 0.5.0 .inf -.Inf .NaN 1:30 190:20:30.15 2001-01-01 \
                     2001-12-14t21:59:43.10-05:00 << =";
        let syntax = "-|- a|?|? a|:|: a|a: b|a:|# a|a # b| a|a |---|...|--- a|!|!!str a|&a|*a|>-|%a|\
                      @a|`a|'a'|\"a\"|{a: b}|[a]|,a|a\nb|a\n|\n|\n a|\r\n|\ta|a\0|a\u{85}b|\u{2028}|\
                      \u{feff}a";
        for text in typed.split(' ').chain(syntax.split('|')).chain(["", "|"]) {
            assert_read_back(text, text);
            let document = document(&with(text, text)).unwrap();
            let quoted = document.lines().nth(1).unwrap().strip_prefix("cdiVersion: ").unwrap();
            assert!(quoted.starts_with(['"', '\'']), "{quoted}");
        }
    }

    /// A string takes one line, and is plain where it can be.
    #[test]
    fn long_strings_are_not_folded() {
        let long = "long ".repeat(40) + "path";
        for text in ["/usr/lib/libcuda.so.1", "GPU-0a", "a#b", "-a", "a\\nb", "é \u{1f600}", &long]
        {
            assert_read_back(text, text);
            let document = document(&with(text, text)).unwrap();
            assert_eq!(document.lines().nth(1), Some(&*format!("cdiVersion: {text}")));
        }
    }

    proptest! {
        /// Any text, in any place.
        #[test]
        fn every_string_is_read_back_the_same(name in any::<String>(), text in any::<String>()) {
            assert_read_back(&name, &text);
        }

        /// Short texts of the characters that numbers, dates and words have.
        #[test]
        fn every_word_is_read_back_as_a_string(text in "[-+.:/_=~!0-9a-zA-Z]{0,6}") {
            assert_read_back(&text, &text);
        }
    }
}
