//! The name of our runtime in configurations, and of its program.

use std::ffi::OsStr;
use std::path::Path;

/// The runtime's name in an engine's configuration.
pub const NAME: &str = "cgpu";

pub(crate) const RUNTIME: &str = "cgpu-runtime";

/// Whether a program is our runtime: by its name.
pub(crate) fn is_ours(program: &str) -> bool {
    Path::new(program).file_name() == Some(OsStr::new(RUNTIME))
}

/// Whether a default runtime is ours; podman may name a program.
pub(crate) fn is_ours_by_default(value: &str) -> bool {
    value == NAME || is_ours(value)
}
