//! From the bytes of a file to a [`Specification`] that is one, or a sentence that says why not.
//!
//! Owns the two forms, YAML and JSON, and their limits. A file is root's, but a container creation must
//! not hang on one that is broken: what YAML's references and nesting can make of a short text is
//! bounded by the parser's budget. Must not know files. Pure.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

use super::spec::Specification;
use super::validation::{self, Invalid};

/// How a specification is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// `.yaml`
    Yaml,
    /// `.json`
    Json,
}

/// Why bytes are no specification.
#[derive(Debug, Error)]
pub enum ParseError {
    /// They are no YAML, or have a field that isn't known or is of another type.
    #[error("{}", yaml_text(problem))]
    Yaml {
        /// Where and why; all of it is in the message.
        problem: Box<serde_saphyr::Error>,
    },
    /// The same of JSON.
    #[error("{problem}")]
    Json {
        /// Where and why; all of it is in the message.
        problem: serde_json::Error,
    },
    /// What they say can't be meant.
    #[error(transparent)]
    Invalid(#[from] Invalid),
}

/// Most characters of what a parser says: it may quote the file.
const WORDS_MAX: usize = 300;

/// A parser's words on one line, as they end in docker's output.
fn yaml_text(error: &serde_saphyr::Error) -> String {
    let text = error.to_string();
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.trim_start_matches("error: ").chars().take(WORDS_MAX).collect()
}

/// The specification in `bytes`.
///
/// # Errors
///
/// Where there is none.
pub fn parse(bytes: &[u8], form: Form) -> Result<Specification, ParseError> {
    let spec: Specification = read(bytes, form)?;
    validation::validate(&spec)?;
    Ok(spec)
}

/// The kind of what is in `bytes`, which may be of a version to come or wrong elsewhere.
#[must_use]
pub fn kind(bytes: &[u8], form: Form) -> Option<String> {
    #[derive(Deserialize)]
    struct Only {
        kind: String,
    }
    read::<Only>(bytes, form).ok().map(|only| only.kind)
}

fn read<T: DeserializeOwned>(bytes: &[u8], form: Form) -> Result<T, ParseError> {
    match form {
        Form::Json => serde_json::from_slice(bytes).map_err(|problem| ParseError::Json { problem }),
        Form::Yaml => {
            // `fileMode: 0666` is octal for the reference implementation.
            let options =
                serde_saphyr::options! { with_snippet: false, legacy_octal_numbers: true };
            serde_saphyr::from_slice_with_options(bytes, options)
                .map_err(|problem| ParseError::Yaml { problem: Box::new(problem) })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::cdi::fixture::{MINIMAL, text};

    fn refusal(text: &str) -> String {
        parse(text.as_bytes(), Form::Yaml).unwrap_err().to_string()
    }

    /// `MINIMAL` with `to` in the place of `from`.
    fn with(from: &str, to: &str) -> String {
        assert!(MINIMAL.contains(from), "{from}");
        MINIMAL.replace(from, to)
    }

    #[test]
    fn a_specification_of_eight_gpus_is_read_whole() {
        let spec = parse(text("eight-gpus.yaml").as_bytes(), Form::Yaml).unwrap();
        assert_eq!((spec.kind.as_str(), spec.devices.len()), ("nvidia.com/gpu", 17));
        let node = &spec.devices[0].container_edits.device_nodes[0];
        assert_eq!((node.path.as_str(), node.major, node.minor), ("/dev/nvidia3", 195, 3));
        assert_eq!(node.file_mode, Some(0o666));
        assert_eq!(spec.container_edits.mounts.len(), 60);
        assert_eq!(spec.container_edits.hooks[3].args[1], "disable-device-node-modification");
    }

    #[test]
    fn specification_round_trips_through_json() {
        for name in ["eight-gpus.yaml", "mig.yaml", "hooks.yaml"] {
            let spec = parse(text(name).as_bytes(), Form::Yaml).unwrap();
            let json = serde_json::to_vec(&spec).unwrap();
            assert_eq!(parse(&json, Form::Json).unwrap(), spec, "{name}");
            // A JSON text is a YAML text.
            assert_eq!(parse(&json, Form::Yaml).unwrap(), spec, "{name}");
        }
        assert_eq!(parse(text("one-gpu.json").as_bytes(), Form::Json).unwrap().devices.len(), 2);
    }

    #[test]
    fn an_unknown_field_is_named_with_its_place() {
        let unknown = refusal(&text("unknown-field.yaml"));
        assert!(
            unknown.starts_with("unknown field `deviceNode`, expected one of env,"),
            "{unknown}"
        );
        assert!(unknown.ends_with(" at line 8, column 9"), "{unknown}");
        let json = br#"{"cdiVersion":"0.5.0","kind":"a/b","devices":[{"title":"0"}]}"#;
        let unknown = parse(json, Form::Json).unwrap_err().to_string();
        assert!(unknown.starts_with("unknown field `title`, expected one of `name`"), "{unknown}");
    }

    #[test]
    fn invalid_field_is_reported_with_the_reason() {
        for (from, to, error) in [
            ("0.5.0", "2.0.0", "cdiVersion \"2.0.0\" is not a version of CDI up to 1.1.0"),
            (
                "0.5.0",
                "0.4.0",
                "cdiVersion 0.4.0 is too old for what it uses: it must be at least 0.5.0",
            ),
            (
                "kind: nvidia.com/gpu",
                "kind: gpu",
                "kind \"gpu\" is not VENDOR/CLASS, both of letters, digits, '-', '_' and '.'",
            ),
            (
                "kind: nvidia.com/gpu",
                "kind: 1a/gpu",
                "kind \"1a/gpu\" is not VENDOR/CLASS, both of letters, digits, '-', '_' and '.'",
            ),
            (
                "\"0\"",
                "\"0:\"",
                "\"0:\" is not a device's name: letters, digits, and between them '-', '_', '.', ':'",
            ),
            ("{deviceNodes: [{path: /dev/nvidia0}]}", "{}", "device \"0\" has no containerEdits"),
            (
                "/dev/nvidia0",
                "dev/nvidia0",
                "device \"0\": deviceNodes.path \"dev/nvidia0\" is not an absolute path",
            ),
            (
                "path: /dev/nvidia0",
                "path: /x, type: x",
                "device \"0\": deviceNodes.type \"x\" is not b, c, u or p",
            ),
            (
                "path: /dev/nvidia0",
                "path: /x, permissions: rx",
                "device \"0\": deviceNodes.permissions \"rx\" is not of r, w and m, nor none",
            ),
            ("env: [A=b]", "env: [=b]", "containerEdits: env \"=b\" is not NAME=VALUE"),
            (
                "env: [A=b]",
                "mounts: [{hostPath: /x}]",
                "containerEdits: mounts.containerPath \"\" is not an absolute path",
            ),
            (
                "env: [A=b]",
                "hooks: [{hookName: x, path: /x}]",
                "containerEdits: hooks.hookName \"x\" is not a hook of OCI",
            ),
            (
                "env: [A=b]",
                "hooks: [{hookName: poststop, path: x}]",
                "containerEdits: hooks.path \"x\" is not an absolute path",
            ),
            (
                "env: [A=b]",
                "hooks: [{hookName: poststop, path: /x, timeout: 0}]",
                "containerEdits: hooks.timeout \"/x\" is called with no time at all",
            ),
            (
                "env: [A=b]",
                "netDevices: [{hostInterfaceName: a}]",
                "cdiVersion 0.5.0 is too old for what it uses: it must be at least 1.1.0",
            ),
        ] {
            assert_eq!(refusal(&with(from, to)), error);
        }
        let twice = format!("{MINIMAL}  - {{name: \"0\", containerEdits: {{env: [A=b]}}}}\n");
        assert_eq!(refusal(&twice), "device \"0\" is defined twice");
        assert_eq!(refusal("cdiVersion: 0.5.0\nkind: a/b\n"), "devices is empty");
    }

    #[test]
    fn null_is_nothing_and_numbers_may_be_names() {
        let text = with("env: [A=b]", "").replace("\"0\"", "0").replace("0.5.0", "v0.5.0");
        let spec = parse(text.as_bytes(), Form::Yaml).unwrap();
        assert_eq!(spec.devices[0].name, "0");
        assert!(spec.container_edits.is_empty());
        let octal = with("path: /dev/nvidia0", "path: /x, fileMode: 0666");
        let spec = parse(octal.as_bytes(), Form::Yaml).unwrap();
        assert_eq!(spec.devices[0].container_edits.device_nodes[0].file_mode, Some(0o666));
    }

    #[test]
    fn kind_is_found_in_otherwise_invalid_text() {
        assert_eq!(kind(b"kind: a/b\nwhat: {ever: 1}\n", Form::Yaml).as_deref(), Some("a/b"));
        assert_eq!(kind(br#"{"cdiVersion":"9","kind":"a/b"}"#, Form::Json).as_deref(), Some("a/b"));
        assert_eq!(kind(b"kind: [", Form::Yaml), None);
    }

    /// A short text that expands or nests without end is refused soon.
    #[test]
    fn expanding_or_deeply_nested_text_is_refused_soon() {
        let list = ["x=yyyyyyyy"; 10_000].join(", ");
        let device = |at: usize| format!("  - {{name: d{at}, containerEdits: {{env: *e}}}}\n");
        let bomb = format!(
            "cdiVersion: 0.5.0\nkind: a/b\ncontainerEdits: {{env: &e [{list}]}}\ndevices:\n{}",
            (0..20_000).map(device).collect::<String>()
        );
        // By the processor's time, which other processes take no part of.
        let spent = || {
            let clock = nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID;
            Duration::from(nix::time::clock_gettime(clock).unwrap())
        };
        let begun = spent();
        for text in [
            bomb,
            format!("kind: {}", "[".repeat(1_000_000)),
            format!("what: {}\nkind: x", "[".repeat(1_000_000)),
            format!("what: {}\nkind: x", "{a: ".repeat(300_000)),
            format!("what: {}", "- ".repeat(300_000)),
        ] {
            assert!(parse(text.as_bytes(), Form::Yaml).is_err());
            assert_eq!(kind(text.as_bytes(), Form::Yaml), None);
            assert!(parse(text.as_bytes(), Form::Json).is_err());
        }
        assert!(spent() - begun < Duration::from_secs(20), "{:?}", spent() - begun);
    }

    #[test]
    fn a_text_cut_anywhere_or_changed_breaks_nothing() {
        let text = text("hooks.yaml");
        for end in 0..text.len() {
            let _ = parse(&text.as_bytes()[..end], Form::Yaml);
        }
    }

    proptest! {
        #[test]
        fn no_bytes_break_the_reader(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            for form in [Form::Yaml, Form::Json] {
                let _ = (parse(&bytes, form), kind(&bytes, form));
            }
        }

        #[test]
        fn no_yaml_breaks_the_reader(text in "[-a-z0-9:,.&*!|>'\"\\[\\]{}# \n\t%@?~=/]{0,200}") {
            let words = refusal_of(&text);
            prop_assert!(!words.contains('\n') && words.chars().count() <= 400, "{}", words);
        }

        #[test]
        fn a_changed_byte_breaks_nothing(at in 0_usize..1000, byte in any::<u8>()) {
            let mut bytes = text("hooks.yaml").into_bytes();
            let at = at % bytes.len();
            bytes[at] = byte;
            if let Ok(spec) = parse(&bytes, Form::Yaml) {
                prop_assert!(!spec.devices.is_empty());
            }
        }
    }

    fn refusal_of(text: &str) -> String {
        parse(text.as_bytes(), Form::Yaml).map_or_else(|error| error.to_string(), |_| String::new())
    }
}
