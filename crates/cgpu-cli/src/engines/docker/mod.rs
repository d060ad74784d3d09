//! docker: the runtimes of `daemon.json`, and the program of its default one. Pure.
//!
//! [`daemon_json`] edits that file, and [`reload`] reloads a running dockerd.

pub mod daemon_json;
pub mod reload;

use serde_json::Value as Json;

use super::NamedRuntime;
use super::config_text::one_line;
use super::installation::Installation;
use super::named_runtime::named;
use super::runtime_name::is_ours;

pub(super) const INSTALLATION: Installation = Installation {
    name: "docker",
    programs: &["dockerd", "docker"],
    main_file: "/etc/docker/daemon.json",
    units: &["docker"],
    ..Installation::NONE
};

/// Our runtimes in `/etc/docker/daemon.json`.
pub(crate) fn runtimes(text: &str) -> Result<Vec<NamedRuntime>, String> {
    // dockerd takes an empty file for an empty object.
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    let json: Json = serde_json::from_str(text).map_err(|error| one_line(&error.to_string()))?;
    let all = json.get("runtimes").and_then(Json::as_object);
    let ours =
        all.into_iter().flatten().filter_map(|(name, runtime)| named(name, program(runtime)?));
    Ok(ours.collect())
}

/// The program of docker's default runtime, if `daemon.json` names one that isn't ours.
pub(crate) fn default_program(text: &str) -> Option<String> {
    let json: Json = serde_json::from_str(text).ok()?;
    let default = json.get("default-runtime")?.as_str()?;
    let program = self::program(json.get("runtimes")?.get(default)?)?;
    (!is_ours(program)).then(|| program.to_owned())
}

/// The program of a runtime in `daemon.json`: its path, or the `BinaryName` of runc's shim.
pub(crate) fn program(runtime: &Json) -> Option<&str> {
    let path = runtime.get("path").and_then(Json::as_str).filter(|path| !path.is_empty());
    path.or_else(|| {
        let options = runtime.get("options")?.as_object()?;
        let named = options.iter().find(|(key, _)| key.eq_ignore_ascii_case("BinaryName"));
        named?.1.as_str()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engines::named_runtime::tests::ours;

    #[test]
    fn runtimes_are_found_by_their_paths() {
        let shipped = include_str!("../../../../../packaging/daemon.json");
        assert_eq!(runtimes(shipped), ours("cgpu", None));
        for other in [
            "",
            "{}",
            "[]",
            "null",
            r#"{"runtimes":[1]}"#,
            r#"{"runtimes":{"a":{"path":"/usr/bin/runc"},"b":{"path":7},"c":{"runtimeType":"x"}}}"#,
        ] {
            assert_eq!(runtimes(other), Ok(Vec::new()), "{other}");
        }
        assert!(runtimes("{,}").unwrap_err().starts_with("key must be a string at line 1"));
    }
}
