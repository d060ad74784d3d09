//! Gathers the facts of one host.
//!
//! Owns where it is and how its configuration is found. What each part of it looks like
//! is known by the modules next to this one.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use super::driver::device_root;
use super::facts::Facts;
use super::{driver, engines, host, own};
use crate::engines::host_tree::Tree;
use cgpu::host::Host;
use cgpu_host::config::{self, Config};
use cgpu_host::grants::Claims;

/// Where a host is.
#[derive(Debug, Clone)]
pub struct Roots {
    /// Its file system: `/`, or where another host's is mounted.
    pub root: PathBuf,
    /// The configuration that a flag names.
    pub config: Option<PathBuf>,
    /// The configuration that `CGPU_CONFIG` names.
    pub config_variable: Option<OsString>,
    /// `PATH`.
    pub search: Option<OsString>,
}

/// The facts of the host at `roots`. A configuration that can't be used is one of them; then
/// the rest is as the defaults have it.
#[must_use]
pub fn inspect(roots: &Roots) -> Facts {
    let tree = Tree::new(&roots.root, roots.search.as_deref());
    let (config, reported) = configuration(roots, &tree);
    let reached = Host::new(reached(&tree, &config), None);
    Facts {
        driver: driver::inspect(&tree, &config),
        isolation: host::inspect(&tree, &reached),
        runtimes: host::runtimes(&tree, &config.runtime.candidates),
        engines: engines::inspect(&tree),
        hooks: engines::hooks(&tree),
        toolkit: engines::toolkit(&tree),
        claims: claims(&tree, &config),
        own: own::inspect(&reached, reported, config.state_dir.clone(), &tree.at(&config.log)),
    }
}

/// The directory of claims' records.
fn claims(tree: &Tree, config: &Config) -> Option<PathBuf> {
    let directory = Claims::at(&config.kubernetes.grants).directory().to_owned();
    tree.at(&directory).is_dir().then_some(directory)
}

/// The configuration, and its file or what is wrong with it.
fn configuration(roots: &Roots, tree: &Tree) -> (Config, Result<Option<PathBuf>, String>) {
    let flag = roots.config.as_deref().map(Path::as_os_str);
    let variable = roots.config_variable.as_deref().filter(|path| !path.is_empty());
    // Another host's is where it has it, unless it is named.
    let other = tree.at(config::DEFAULT_PATH);
    let named = flag.or(variable);
    let explicit = match named {
        None if !tree.is_own() && other.exists() => Some(other.as_os_str()),
        None => None,
        named => named,
    };
    let loaded = match (explicit, tree.is_own()) {
        (None, false) => return (Config::default(), Ok(None)),
        (explicit, _) => config::load(explicit, None::<&OsStr>),
    };
    match loaded {
        Ok(loaded) => (loaded.config, Ok(loaded.path.map(|path| tree.named(&path)))),
        Err(error) => {
            let state_dir = config::state_dir(explicit, None).ok();
            let defaults = Config::default();
            let state_dir = state_dir.unwrap_or_else(|| defaults.state_dir.clone());
            (Config { state_dir, ..defaults }, Err(error.to_string()))
        }
    }
}

/// The configuration with the paths by which we reach what it names.
fn reached(tree: &Tree, config: &Config) -> Config {
    let mut reached = config.clone();
    reached.driver.dev_root = device_root(tree, config);
    for path in [
        &mut reached.state_dir,
        &mut reached.driver.root,
        &mut reached.driver.dev_root,
        &mut reached.driver.proc_root,
        &mut reached.isolation.km_root,
    ] {
        *path = tree.at(&*path);
    }
    reached
}
