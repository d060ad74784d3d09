//! The service of an engine: its unit, its restart, or the sentence that asks the user for one.
//!
//! dockerd, which is reloaded and not restarted, has [`docker::reload`]. Must not know the files.

use std::io;
use std::path::Path;
use std::process::Command;

use thiserror::Error;

use super::{Kind, docker};

/// Why an engine isn't restarted.
#[derive(Debug, Error)]
pub enum RestartError {
    #[error("`{command}` can't be run: {source}; the configuration is written: restart the engine")]
    Spawn {
        command: String,
        #[source]
        source: io::Error,
    },
    #[error(
        "`{command}` failed: {stderr}; the configuration is written: see what the engine says of it"
    )]
    Failed { command: String, stderr: String },
}

/// What was done to the engine's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuntimeChange {
    /// The runtime was added.
    Added,
    /// The runtime was taken out.
    Removed,
}

/// What starts the daemons of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Init {
    Systemd,
    Other,
}

impl Init {
    /// That of this machine.
    #[must_use]
    pub fn here() -> Self {
        match Path::new("/run/systemd/system").is_dir() {
            true => Init::Systemd,
            false => Init::Other,
        }
    }
}

/// The engine's unit; `None` if the engine reads its files at every container start.
#[must_use]
pub fn unit(kind: Kind) -> Option<&'static str> {
    match kind.installation().units {
        [] => None,
        [unit] => Some(unit),
        units => Some(present(units)),
    }
}

/// The first of some units that this machine has; the first of all if it has none.
fn present(units: &[&'static str]) -> &'static str {
    let directories =
        ["/etc/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system"];
    let is_there = |unit: &&&'static str| {
        directories
            .iter()
            .any(|directory| Path::new(directory).join(format!("{unit}.service")).exists())
    };
    units.iter().find(is_there).copied().unwrap_or(units[0])
}

/// What applies a change, and what that does to containers: the rest of a sentence.
#[must_use]
pub fn next_step(kind: Kind, done: RuntimeChange, init: Init) -> Option<String> {
    let unit = unit(kind)?;
    Some(match (kind, init) {
        (Kind::Docker, _) => docker::reload::next_step(done, init),
        (_, Init::Systemd) => {
            format!("`systemctl restart {unit}`, so that {unit} reads it; containers run on")
        }
        (_, Init::Other) => {
            format!("restart {unit} as you started it, so that it reads it; containers run on")
        }
    })
}

/// Restarts the unit of an engine whose containers outlive it.
///
/// # Errors
///
/// If systemctl can't be run, or fails.
pub fn restart(unit: &str) -> Result<(), RestartError> {
    systemctl("restart", unit)
}

pub(super) fn systemctl(verb: &str, unit: &str) -> Result<(), RestartError> {
    let command = format!("systemctl {verb} {unit}");
    let output = Command::new("systemctl").args([verb, unit]).output();
    let output =
        output.map_err(|source| RestartError::Spawn { command: command.clone(), source })?;
    match output.status.success() {
        true => Ok(()),
        false => {
            let stderr = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
            Err(RestartError::Failed { command, stderr })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removal_from_docker_never_asks_for_reload() {
        for init in [Init::Systemd, Init::Other] {
            let removed = next_step(Kind::Docker, RuntimeChange::Removed, init).unwrap();
            assert!(!removed.contains("systemctl reload") && !removed.contains("HUP"), "{removed}");
            assert!(removed.contains("stop with it unless live-restore is on"), "{removed}");
            assert_eq!(next_step(Kind::Podman, RuntimeChange::Removed, init), None);
        }
        let restart = next_step(Kind::Docker, RuntimeChange::Removed, Init::Systemd).unwrap();
        assert!(restart.starts_with("`systemctl restart docker`, so that"), "{restart}");
    }

    #[test]
    fn without_systemd_no_sentence_names_systemctl() {
        for kind in [Kind::Docker, Kind::Containerd, Kind::Crio] {
            for done in [RuntimeChange::Added, RuntimeChange::Removed] {
                let step = next_step(kind, done, Init::Other).unwrap();
                assert!(!step.contains("systemctl"), "{step}");
            }
        }
    }
}
