//! Has an engine read its files again, or says who is to do that.
//!
//! Owns the commands and the sentences about them. dockerd, which is reloaded and not
//! restarted, has its own module beside this one. Must not know what the files say.

use std::io;
use std::path::Path;
use std::process::Command;

use thiserror::Error;

use super::{Kind, docker};

/// Why an engine isn't restarted.
#[derive(Debug, Error)]
pub enum RestartError {
    /// systemctl can't be run.
    #[error("`{command}` can't be run: {source}; the configuration is written: restart the engine")]
    Spawn {
        /// The command.
        command: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// systemctl says no.
    #[error(
        "`{command}` failed: {said}; the configuration is written: see what the engine says of it"
    )]
    Failed {
        /// The command.
        command: String,
        /// What it said.
        said: String,
    },
}

/// What was done to the engine's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Done {
    /// The runtime was added.
    Added,
    /// The runtime was taken out.
    Removed,
}

/// Who starts the daemons of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Init {
    /// systemd.
    Systemd,
    /// Somebody else.
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

/// The engine's unit; `None` where the engine reads its files at every start of a container.
#[must_use]
pub fn unit(kind: Kind) -> Option<&'static str> {
    match kind.installation().units {
        [] => None,
        [unit] => Some(unit),
        units => Some(present(units)),
    }
}

/// The first of some units that this machine has; one of them where it has none.
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

/// What brings a change into force, and what that does to containers: the rest of a sentence.
#[must_use]
pub fn next_step(kind: Kind, done: Done, init: Init) -> Option<String> {
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
/// Where systemctl can't be run, or fails.
pub fn restart(unit: &str) -> Result<(), RestartError> {
    systemctl("restart", unit)
}

/// `systemctl VERB UNIT`.
pub(super) fn systemctl(verb: &str, unit: &str) -> Result<(), RestartError> {
    let command = format!("systemctl {verb} {unit}");
    let output = Command::new("systemctl").args([verb, unit]).output();
    let output =
        output.map_err(|source| RestartError::Spawn { command: command.clone(), source })?;
    match output.status.success() {
        true => Ok(()),
        false => {
            let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
            Err(RestartError::Failed { command, said })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_takes_cgpu_out_of_docker_is_never_told_to_reload() {
        for init in [Init::Systemd, Init::Other] {
            let removed = next_step(Kind::Docker, Done::Removed, init).unwrap();
            assert!(!removed.contains("systemctl reload") && !removed.contains("HUP"), "{removed}");
            assert!(removed.contains("stop with it unless live-restore is on"), "{removed}");
            assert_eq!(next_step(Kind::Podman, Done::Removed, init), None);
        }
        let restart = next_step(Kind::Docker, Done::Removed, Init::Systemd).unwrap();
        assert!(restart.starts_with("`systemctl restart docker`, so that"), "{restart}");
    }

    #[test]
    fn without_systemd_nobody_is_told_of_systemctl() {
        for kind in [Kind::Docker, Kind::Containerd, Kind::Crio] {
            for done in [Done::Added, Done::Removed] {
                let step = next_step(kind, done, Init::Other).unwrap();
                assert!(!step.contains("systemctl"), "{step}");
            }
        }
    }
}
