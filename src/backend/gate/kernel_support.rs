//! What this host's kernel can do for the gate. A runtime needs no ability of its own.

use std::fs;

use thiserror::Error;

/// The first kernel whose notifications are whole: `pidfd_getfd` came with 5.6, and a
/// listener without a process behind it hangs up since 5.9.
const OLDEST_KERNEL: (u32, u32) = (5, 9);

/// Where the kernel says what filters may do.
const ACTIONS: &str = "/proc/sys/kernel/seccomp/actions_avail";

/// Where it says its version.
const RELEASE: &str = "/proc/sys/kernel/osrelease";

/// Where it says whether programs are laid out by chance (`sysctl/kernel.rst`).
const RANDOMIZATION: &str = "/proc/sys/kernel/randomize_va_space";

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
    /// A host whose programs can't be distinguished.
    #[error(
        "the gate distinguishes programs by where the kernel laid them out, and here all lie at the \
         same place ({RANDOMIZATION}: 0); set kernel.randomize_va_space = 2, or set [isolation] \
         backend = \"none\" in the configuration to share GPUs without isolation"
    )]
    Alike,
}

/// Sees that the kernel has what the gate needs.
pub(super) fn of_host() -> Result<(), AbilityError> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    check_kernel(read(RELEASE).trim(), read(ACTIONS).trim(), read(RANDOMIZATION).trim())
}

/// Sees that a kernel of version `release` whose filters may do `actions`, and whose
/// `randomize_va_space` is `randomization`, has what the gate needs. Pure.
///
/// # Errors
///
/// What it hasn't.
pub fn check_kernel(release: &str, actions: &str, randomization: &str) -> Result<(), AbilityError> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    if let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next())
        && (major, minor) < OLDEST_KERNEL
    {
        return Err(AbilityError::Kernel { found: release.to_owned() });
    }
    match actions.split_whitespace().any(|action| action == "user_notif") {
        true if randomization == "0" => Err(AbilityError::Alike),
        true => Ok(()),
        false => {
            let found = if actions.is_empty() { "missing" } else { actions };
            Err(AbilityError::NoNotification { found: found.to_owned() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_is_judged_by_version_and_seccomp_actions() {
        let all = "kill_process kill_thread trap errno user_notif trace log allow";
        for good in ["5.9.0", "5.10.0-28-amd64", "6.18.44-fc", "10.0", "strange"] {
            assert_eq!(check_kernel(good, all, "2"), Ok(()), "{good}");
        }
        for old in ["5.8.18", "4.19.0-26-amd64"] {
            assert_eq!(
                check_kernel(old, all, "2"),
                Err(AbilityError::Kernel { found: old.into() })
            );
        }
        let found = |found: &str| Err(AbilityError::NoNotification { found: found.into() });
        assert_eq!(check_kernel("6.1", "trap errno", "2"), found("trap errno"));
        assert_eq!(check_kernel("6.1", "", "2"), found("missing"));
        assert_eq!(check_kernel("6.1", all, "1"), Ok(()));
        assert_eq!(check_kernel("6.1", all, "0"), Err(AbilityError::Alike));
    }
}
