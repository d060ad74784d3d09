//! How a bundle is known that our container creation has edited: by the hooks that we put
//! there. Pure.

use std::path::Path;

use serde_json::Value;

/// The hook's program.
pub const PROGRAM: &str = "cgpu-hook";

/// The hook's argument for a container with unlimited GPUs: nothing is enforced on it.
pub const WHOLE: &str = "--whole";

/// Whether one of `hooks`, as a bundle or a runtime's state has them, was put there by a container
/// creation of ours: it names the container that it is called for.
#[must_use]
pub fn are_ours(hooks: &Value) -> bool {
    are_reported(hooks, |args| !args.is_empty())
}

/// Whether one of `hooks` was put there by the creation of a container with an enforced quota.
#[must_use]
pub fn hold(hooks: &Value) -> bool {
    are_reported(hooks, |args| !args.iter().any(|arg| arg == WHOLE))
}

/// Whether one of `hooks` is ours, names the container that it is called for, and has such
/// arguments.
fn are_reported(hooks: &Value, have: impl Fn(&[Value]) -> bool) -> bool {
    let stages = hooks.as_object().into_iter().flat_map(|stages| stages.values());
    stages.filter_map(Value::as_array).flatten().any(|call| {
        let program = call["path"].as_str().and_then(|path| Path::new(path).file_name());
        let args = call["args"].as_array().map_or(&[][..], Vec::as_slice);
        let reported = args.iter().any(|arg| arg == "--id" || arg == "--reservation");
        reported && have(args) && program.is_some_and(|name| name == PROGRAM)
    })
}
