//! What every device of every file is worth: for commands that show it.
//!
//! Owns the states that a device can be in. Must not know how they are shown.

use std::path::{Path, PathBuf};

use super::Specifications;
use super::device_choice::{Devices, Part, Place, places};
use super::dirs::KIND;
use super::merger::Collected;
use super::node_kind::{Nature, nature};
use super::staleness::{HostFacts, lookup};

/// A device of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceState {
    /// `nvidia.com/gpu=0`
    pub name: String,
    pub file: PathBuf,
    /// What it is worth.
    pub state: State,
}

/// What a device is worth.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// A container can have it.
    Ok,
    /// A later directory's file has it, too, and counts.
    Overridden(PathBuf),
    /// Another file of the directory has it, too: neither counts.
    Conflict(PathBuf),
    /// It says what is no longer so.
    Stale(String),
    /// It asks for what we can't do.
    Unsupported(String),
}

impl Specifications {
    /// Every device, in the order of directories, files and entries.
    #[must_use]
    pub fn devices(&self, host: &HostFacts) -> Vec<DeviceState> {
        let devices = Devices::of(&self.sources);
        let state = |place: Place<'_>| {
            let owned = |file: &Path| file.to_owned();
            let name = place.device.name.as_str();
            // Each is there, since it is one of them.
            match devices.get(name) {
                Some(entry) if entry.place.precedence > place.precedence => {
                    State::Overridden(owned(entry.place.file))
                }
                Some(entry) if entry.also.is_some() => {
                    let other = entry.also.filter(|file| *file != place.file);
                    State::Conflict(owned(other.unwrap_or(entry.place.file)))
                }
                _ => stale(place, host),
            }
        };
        places(&self.sources)
            .map(|place| DeviceState {
                name: format!("{KIND}={}", place.device.name),
                file: place.file.to_owned(),
                state: state(place),
            })
            .collect()
    }
}

/// Whether what it says, for a container that has its GPUs, is still so.
fn stale(place: Place<'_>, host: &HostFacts) -> State {
    let gpus = place.device.container_edits.device_nodes.iter().flat_map(|node| {
        match nature(node, None) {
            Nature::Gpu(minors) => minors,
            _ => [].into(),
        }
    });
    let part = Part { file: place.file, spec: place.spec, devices: vec![place.device] };
    match Collected::of(&[part], gpus) {
        Err(unsupported) => State::Unsupported(unsupported.to_string()),
        Ok(collected) => match lookup(&collected, host) {
            Ok(_) => State::Ok,
            Err(found) => State::Stale(super::stale(found).to_string()),
        },
    }
}
