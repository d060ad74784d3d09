//! NVIDIA's runtime: where it is, and whether it would start the same runtime as we do.

use std::fs;
use std::path::Path;

use super::RuntimeError;
use super::real::{self, Real};
use cgpu_host::config::Driver;

/// Its own configuration.
const CONFIG: &str = "/etc/nvidia-container-runtime/config.toml";

/// NVIDIA's runtime.
///
/// # Errors
///
/// Where it isn't there.
pub fn runtime(driver: &Driver) -> Result<Real, RuntimeError> {
    let name = driver.nvidia_runtime.clone();
    let path = std::env::var_os("PATH");
    let found = real::find(std::slice::from_ref(&name), path.as_deref());
    found.map_err(|_| RuntimeError::NoNvidia { name })
}

/// Whether it can make a container that `real` starts, and is asked about, later: it's installed,
/// and what it becomes is `real`.
#[must_use]
pub fn makes(driver: &Driver, real: &Real) -> bool {
    if runtime(driver).is_err() {
        return false;
    }
    let text = fs::read_to_string(CONFIG).unwrap_or_default();
    let path = std::env::var_os("PATH");
    let becomes = real::find(&runtimes(&text), path.as_deref());
    becomes.is_ok_and(|becomes| is_same(&becomes.file, &real.file))
}

fn is_same(one: &Path, other: &Path) -> bool {
    let file = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    file(one) == file(other)
}

/// The low-level runtimes that NVIDIA's tries one after the other, by its configuration
/// (nvidia-container-toolkit, `internal/config/config.go`, `GetDefault`). Pure.
fn runtimes(config: &str) -> Vec<String> {
    let table: toml::Table = config.parse().unwrap_or_default();
    let named = table
        .get("nvidia-container-runtime")
        .and_then(|section| section.get("runtimes"))
        .and_then(toml::Value::as_array);
    match named {
        Some(names) => names.iter().filter_map(|name| Some(name.as_str()?.to_owned())).collect(),
        None => ["docker-runc", "runc", "crun"].map(str::to_owned).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn its_own_runtimes_are_those_of_its_configuration() {
        assert_eq!(runtimes(""), ["docker-runc", "runc", "crun"]);
        assert_eq!(runtimes("no toml ["), ["docker-runc", "runc", "crun"]);
        let text = "[nvidia-container-runtime]\nruntimes = [\"crun\", \"/usr/bin/runc\"]\n";
        assert_eq!(runtimes(text), ["crun", "/usr/bin/runc"]);
    }
}
