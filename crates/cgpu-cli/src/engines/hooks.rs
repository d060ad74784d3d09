//! The directories of engines' hook files, and the files there that name ours. Pure.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use serde_json::Value as Json;

use super::config_text::one_line;

pub(crate) const DIRECTORIES: [&str; 3] = [
    "/usr/share/containers/oci/hooks.d",
    "/etc/containers/oci/hooks.d",
    "/run/containers/oci/hooks.d",
];

/// Our hook's program.
const PROGRAM: &str = "cgpu-hook";

/// The program and stages of a hook file, if the program is ours.
pub(crate) fn hook(text: &str) -> Result<Option<(PathBuf, Vec<String>)>, String> {
    let json: Json = serde_json::from_str(text).map_err(|error| one_line(&error.to_string()))?;
    let program = json.pointer("/hook/path").and_then(Json::as_str);
    let Some(program) =
        program.filter(|program| Path::new(program).file_name() == Some(OsStr::new(PROGRAM)))
    else {
        return Ok(None);
    };
    let stages = json.get("stages").and_then(Json::as_array);
    let stages = stages.into_iter().flatten().filter_map(Json::as_str).map(str::to_owned);
    Ok(Some((program.into(), stages.collect())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hooks_are_ours_by_their_program() {
        let shipped = include_str!("../../../../hooks/cgpu-poststop.json");
        let stages = vec!["poststop".to_owned()];
        assert_eq!(hook(shipped), Ok(Some(("/usr/bin/cgpu-hook".into(), stages))));
        assert_eq!(hook(r#"{"hook":{"path":"/usr/bin/oci-umount"}}"#), Ok(None));
        assert!(hook("{").is_err());
    }
}
