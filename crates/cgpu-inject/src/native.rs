//! The driver's files without anybody's help: found on this host, mounted in the container.
//!
//! Owns the order: what the container asks for, what the host has, what the image looks for.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use tracing::warn;

use crate::bundle::{Bundle, Edits};
use cgpu_core::gpu::Inventory;
use cgpu_core::plan::Plan;
use cgpu_host::config::Config;
use nvrm::Version;

use super::driver::DriverFile;
use super::driver_search::{self, FindError};
use super::layers::Layers;
use super::mounts::{MountPoint, Obstacle};
use super::root::Root;
use super::{
    InjectError, Purpose, catalogue, driver_cache, mounts, path_variables, tree, userland,
};

/// The version of the kernel's module; `None` where none is loaded.
#[must_use]
pub fn kernel_version(proc_root: &Path) -> Option<Version> {
    let banner = fs::read_to_string(proc_root.join("driver/nvidia/version")).ok()?;
    Version::in_banner(&banner)
}

/// The edits that give the container of `bundle` the files of this host's driver, as many as
/// it asks for.
///
/// # Errors
///
/// Where there is no driver, or its files can't be mounted.
pub fn edits(
    config: &Config,
    plan: &Plan,
    inventory: &Inventory,
    bundle: &Bundle,
    kernel: Option<Version>,
    purpose: Purpose,
) -> Result<Edits, InjectError> {
    let env = bundle.env()?;
    let asked = env.iter().rev().filter_map(|item| item.split_once('='));
    let asked = { asked }.find(|(name, _)| *name == catalogue::VARIABLE).map(|(_, value)| value);
    let wanted = catalogue::capabilities(asked)?;

    let driver_root = &config.driver.root;
    let root = Root::open(driver_root)
        .map_err(|source| FindError::NoRoot { root: driver_root.clone(), source })?;
    let kernel = kernel.map(|version| version.to_string());
    let known = driver_cache::driver(&root, kernel.as_deref(), &config.state_dir, purpose)?;
    let tree = match purpose {
        Purpose::Create => tree::prepare(&config.state_dir, &known, &wanted)?,
        Purpose::Unregistered => None,
        // As if it were there: what can be mounted where is the same.
        Purpose::Inspect => Some(tree::home(&config.state_dir)),
    };

    let sockets = driver_search::sockets(&root);
    let given = |file: &&DriverFile| file.capabilities.iter().any(|by| wanted.contains(by));
    let files: Vec<&DriverFile> =
        known.driver.files_for(&wanted).chain(sockets.iter().filter(given)).collect();
    // If an image can't be inspected, nothing is known of it but its variables.
    let image = bundle.rootfs().and_then(|path| Root::open(&path).ok());
    let linkers = image.as_ref().map(userland::linkers).unwrap_or_default();
    let layers =
        image.map(|image| Layers::new(image, bundle.mounts(), &tree::home(&config.state_dir)));
    let obstacle = |path: &str, point: MountPoint<'_>| layers.as_ref()?.obstacle(path, point);
    let placed = mounts::mounts(tree.as_deref(), &files, &linkers, obstacle)?;
    if purpose != Purpose::Inspect {
        warn_of(&placed.left_out);
    }
    Ok(Edits {
        env: placed.directory.map_or_else(Vec::new, |place| path_variables::variables(&env, place)),
        mounts: placed.mounts,
        masked: others(&config.driver.proc_root, plan, inventory),
        ..Edits::default()
    })
}

/// Reports what of the driver a container does without, once for each cause.
fn warn_of(left_out: &[(Obstacle, String)]) {
    let mut by_cause: BTreeMap<&Obstacle, Vec<&str>> = BTreeMap::new();
    for (obstacle, path) in left_out {
        by_cause.entry(obstacle).or_default().push(path);
    }
    for (obstacle, paths) in by_cause {
        let (paths, remedy) = (paths.join(" "), obstacle.remedy());
        warn!(paths, "files of the driver are left out: {obstacle}; {remedy}");
    }
}

/// What the kernel reports of GPUs that the container doesn't have, by paths of its own `/proc`.
pub(super) fn others(proc_root: &Path, plan: &Plan, inventory: &Inventory) -> Vec<String> {
    inventory
        .gpus()
        .iter()
        .filter(|gpu| plan.gpus.iter().all(|given| given.uuid != gpu.uuid))
        .map(|gpu| format!("driver/nvidia/gpus/{}", gpu.bus_id.to_ascii_lowercase()))
        .filter(|path| !path.ends_with('/') && proc_root.join(path).is_dir())
        .map(|path| format!("/proc/{path}"))
        .collect()
}
