//! What this host's kernel and runtime can do for the gate.
//!
//! What a runtime says of itself is asked once and kept, for as long as its file is the
//! same: a process more would cost a create as much as all the rest.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use thiserror::Error;

/// The first kernel whose notifications are whole: `pidfd_getfd` came with 5.6, and a
/// listener without anybody behind it hangs up since 5.9.
const OLDEST_KERNEL: (u32, u32) = (5, 9);

/// Where the kernel says what filters may do.
const ACTIONS: &str = "/proc/sys/kernel/seccomp/actions_avail";

/// Where it says its version.
const RELEASE: &str = "/proc/sys/kernel/osrelease";

/// What a runtime can do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ability {
    /// It knows `SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV`.
    pub(super) wait_killable: bool,
}

/// Why the gate can't be used here.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum AbilityError {
    /// An old kernel.
    #[error(
        "the gate needs Linux {}.{}, this is {found}; boot a newer one, or set [isolation] backend \
         = \"none\" in the configuration to share GPUs without isolation",
        OLDEST_KERNEL.0, OLDEST_KERNEL.1
    )]
    Kernel {
        /// Its version.
        found: String,
    },
    /// A kernel without seccomp's notifications.
    #[error(
        "the gate needs seccomp's user notification, which this kernel doesn't have ({ACTIONS}: \
         {found}); boot one with CONFIG_SECCOMP_FILTER, or set [isolation] backend = \"none\" in \
         the configuration to share GPUs without isolation"
    )]
    NoNotification {
        /// What it has.
        found: String,
    },
    /// A runtime without it.
    #[error(
        "the gate needs a runtime that knows linux.seccomp.listenerPath, which {} does not; \
         install runc 1.1 or crun 1.0, built with seccomp, or newer",
        runtime.display()
    )]
    Runtime {
        /// Its file.
        runtime: PathBuf,
    },
}

/// Sees that the kernel has what the gate needs.
pub(super) fn of_host() -> Result<(), AbilityError> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    check_kernel(read(RELEASE).trim(), read(ACTIONS).trim())
}

fn check_kernel(release: &str, actions: &str) -> Result<(), AbilityError> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    if let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next())
        && (major, minor) < OLDEST_KERNEL
    {
        return Err(AbilityError::Kernel { found: release.to_owned() });
    }
    match actions.split_whitespace().any(|action| action == "user_notif") {
        true => Ok(()),
        false => {
            let found = if actions.is_empty() { "missing" } else { actions };
            Err(AbilityError::NoNotification { found: found.to_owned() })
        }
    }
}

/// A runtime's file, and what it said.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Known {
    path: PathBuf,
    device: u64,
    inode: u64,
    size: u64,
    changed_ns: i128,
    /// `None` where it can't at all.
    ability: Option<Ability>,
}

impl Known {
    fn look(path: &Path, ability: Option<Ability>) -> io::Result<Self> {
        let meta = fs::metadata(path)?;
        Ok(Known {
            path: path.to_owned(),
            device: meta.dev(),
            inode: meta.ino(),
            size: meta.size(),
            changed_ns: i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec()),
            ability,
        })
    }
}

/// What `runtime` can do, from what is kept in `state_dir` or by asking it.
pub(super) fn of_runtime(runtime: &Path, state_dir: &Path) -> Result<Ability, AbilityError> {
    let refusal = || AbilityError::Runtime { runtime: runtime.to_owned() };
    let file = state_dir.join("runtime.json");
    let kept = fs::read(&file).ok();
    let kept = kept.and_then(|text| serde_json::from_slice::<Known>(&text).ok());
    if let Some(kept) = kept
        && Known::look(runtime, kept.ability).is_ok_and(|now| now == kept)
    {
        return kept.ability.ok_or_else(refusal);
    }
    let ability = asked(runtime);
    // Where it can't be kept, the next one asks again.
    if let Ok(known) = Known::look(runtime, ability)
        && let Ok(text) = serde_json::to_vec(&known)
    {
        let _ = DirBuilder::new().recursive(true).mode(0o700).create(state_dir);
        let temporary = state_dir.join(format!("runtime.json.{}", std::process::id()));
        let _ = fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, &file));
    }
    ability.ok_or_else(refusal)
}

fn asked(runtime: &Path) -> Option<Ability> {
    let output = |word| {
        let mut command = Command::new(runtime);
        let output = command.arg(word).stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
        output.status.success().then_some(output.stdout)
    };
    if let Some(features) = output("features")
        && let Some(told) = by_features(&features)
    {
        return told;
    }
    by_version(&String::from_utf8_lossy(&output("--version")?))
}

/// By what `features` prints (`runtime-spec/features.md`); the outer `None` where that says
/// nothing of seccomp.
fn by_features(text: &[u8]) -> Option<Option<Ability>> {
    let features: Value = serde_json::from_slice(text).ok()?;
    let seccomp = features.pointer("/linux/seccomp")?;
    let has = |list: &str, word: &str| {
        seccomp.get(list).and_then(Value::as_array).is_some_and(|all| all.iter().any(|a| a == word))
    };
    let able =
        seccomp.get("enabled") == Some(&Value::Bool(true)) && has("actions", "SCMP_ACT_NOTIFY");
    let flag = "SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV";
    Some(able.then(|| Ability { wait_killable: has("supportedFlags", flag) }))
}

/// By the first line of `--version`: runc knows listeners since 1.1.0, and no crun below 1.0 was
/// looked at.
fn by_version(text: &str) -> Option<Ability> {
    let mut words = text.lines().next()?.split_whitespace();
    let (name, version) = (words.next()?, words.nth(1)?);
    let mut numbers = version.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    let found = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    let oldest = match name {
        "runc" => (1, 1),
        "crun" => (1, 0),
        _ => return None,
    };
    let built = name != "crun" || text.contains("+SECCOMP");
    (found >= oldest && built).then(Ability::default)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_judged_by_its_version_and_its_actions() {
        let all = "kill_process kill_thread trap errno user_notif trace log allow";
        for good in ["5.9.0", "5.10.0-28-amd64", "6.18.44-fc", "10.0", "strange"] {
            assert_eq!(check_kernel(good, all), Ok(()), "{good}");
        }
        for old in ["5.8.18", "4.19.0-26-amd64"] {
            assert_eq!(check_kernel(old, all), Err(AbilityError::Kernel { found: old.into() }));
        }
        let found = |found: &str| Err(AbilityError::NoNotification { found: found.into() });
        assert_eq!(check_kernel("6.1", "trap errno"), found("trap errno"));
        assert_eq!(check_kernel("6.1", ""), found("missing"));
    }

    #[test]
    fn a_runtime_is_judged_by_what_it_says_of_itself() {
        let features = |actions: &str, flags: &str, enabled: bool| {
            format!(
                r#"{{"linux": {{"seccomp": {{"enabled": {enabled}, "actions": [{actions}], "supportedFlags": [{flags}]}}}}}}"#
            )
        };
        let notify = r#""SCMP_ACT_ALLOW", "SCMP_ACT_NOTIFY""#;
        let flag = r#""SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV""#;
        let able = |wait_killable| Some(Some(Ability { wait_killable }));
        let told = |text: String| by_features(text.as_bytes());
        assert_eq!(told(features(notify, flag, true)), able(true));
        assert_eq!(told(features(notify, "", true)), able(false));
        assert_eq!(told(features(notify, flag, false)), Some(None));
        assert_eq!(told(features(r#""SCMP_ACT_ALLOW""#, "", true)), Some(None));
        assert_eq!(told("{}".into()), None);
        assert_eq!(told("unknown command".into()), None);
    }

    #[test]
    fn a_runtime_that_says_nothing_is_judged_by_its_version() {
        let able = Some(Ability::default());
        assert_eq!(by_version("runc version 1.1.5+ds1\ncommit: 1\n"), able);
        assert_eq!(by_version("runc version 1.0.3\n"), None);
        assert_eq!(by_version("crun version 1.8.1\n+SYSTEMD +SELINUX +SECCOMP +EBPF\n"), able);
        assert_eq!(by_version("crun version 1.8.1\n+SYSTEMD\n"), None);
        assert_eq!(by_version("youki version 0.3.0\n"), None);
        assert_eq!(by_version(""), None);
    }

    #[test]
    fn a_runtime_is_asked_again_when_its_file_has_changed() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = dir.path().join("runc");
        let says = |version: &str| {
            use std::os::unix::fs::PermissionsExt;
            let script = format!("#!/bin/sh\n[ $1 = --version ] && echo runc version {version}\n");
            let next = dir.path().join("next");
            fs::write(&next, script).unwrap();
            fs::set_permissions(&next, fs::Permissions::from_mode(0o755)).unwrap();
            fs::rename(&next, &runtime).unwrap();
        };
        says("1.1.9");
        assert_eq!(of_runtime(&runtime, dir.path()), Ok(Ability::default()));
        assert!(dir.path().join("runtime.json").exists());
        says("1.0.0");
        let refusal = of_runtime(&runtime, dir.path()).unwrap_err().to_string();
        assert!(refusal.contains("install runc 1.1 or crun 1.0"), "{refusal}");
        assert_eq!(of_runtime(&runtime, dir.path()).unwrap_err().to_string(), refusal);
    }
}
