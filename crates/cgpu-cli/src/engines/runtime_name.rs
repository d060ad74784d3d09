//! What our runtime is called.

use std::ffi::OsStr;
use std::path::Path;

/// What an engine calls it.
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
