//! The container's own seccomp profile, `linux.seccomp` of its bundle: [`check_no_listener`].
//!
//! Pure. The profile stays as it is, next to the gate's filter ([`filter`](super::filter)): the kernel takes the
//! stricter answer of both. A process can have one listener only, and that is the monitor's.

use serde_json::Value;
use thiserror::Error;

/// Why a container with this profile can't have a monitor.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ProfileError {
    /// The profile has a listener.
    #[error(
        "linux.seccomp.listenerPath is {path}, and a container can have one listener: the quota's; \
         choose a seccomp profile without a listener"
    )]
    OtherListener { path: String },
    /// The profile notifies a listener of a call.
    #[error(
        "{field} is SCMP_ACT_NOTIFY, and a container can have one listener: the quota's; choose a \
         seccomp profile without SCMP_ACT_NOTIFY"
    )]
    Notifies {
        /// The field with the action.
        field: String,
    },
    /// The profile is not what the OCI runtime specification says.
    #[error("linux.seccomp is not an object; correct the seccomp profile")]
    Misshapen,
}

/// Checks that `profile`, which may be missing, leaves the one listener to the monitor.
///
/// # Errors
///
/// If the profile has a listener or notifies one, or is no object.
pub fn check_no_listener(profile: Option<&Value>) -> Result<(), ProfileError> {
    let profile = match profile {
        None | Some(Value::Null) => return Ok(()),
        Some(profile) => profile.as_object().ok_or(ProfileError::Misshapen)?,
    };
    let path = profile.get("listenerPath").and_then(Value::as_str);
    if let Some(path) = path.filter(|path| !path.is_empty()) {
        return Err(ProfileError::OtherListener { path: path.to_owned() });
    }
    let notifies = |action: &Value| action == "SCMP_ACT_NOTIFY";
    if profile.get("defaultAction").is_some_and(notifies) {
        return Err(ProfileError::Notifies { field: "linux.seccomp.defaultAction".into() });
    }
    let rules = profile.get("syscalls").and_then(Value::as_array);
    match rules.into_iter().flatten().position(|rule| notifies(&rule["action"])) {
        Some(at) => {
            Err(ProfileError::Notifies { field: format!("linux.seccomp.syscalls[{at}].action") })
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A seccomp profile leaves the one listener to the monitor.
    #[test]
    fn profile_with_another_listener_is_refused() {
        let plain = json!({"defaultAction": "SCMP_ACT_ERRNO", "listenerPath": "", "syscalls": [
            {"names": ["ioctl"], "action": "SCMP_ACT_ALLOW"}]});
        for profile in [None, Some(&Value::Null), Some(&plain)] {
            assert_eq!(check_no_listener(profile), Ok(()));
        }
        let check = |change: &dyn Fn(&mut Value)| {
            let mut profile = plain.clone();
            change(&mut profile);
            check_no_listener(Some(&profile)).unwrap_err()
        };
        assert_eq!(
            check(&|profile| profile["listenerPath"] = json!("/run/other")),
            ProfileError::OtherListener { path: "/run/other".into() }
        );
        let notifies = |field: &str| ProfileError::Notifies { field: field.into() };
        assert_eq!(
            check(&|profile| profile["defaultAction"] = json!("SCMP_ACT_NOTIFY")),
            notifies("linux.seccomp.defaultAction")
        );
        let also = json!({"names": ["mount"], "action": "SCMP_ACT_NOTIFY"});
        assert_eq!(
            check(&|profile| profile["syscalls"].as_array_mut().unwrap().push(also.clone())),
            notifies("linux.seccomp.syscalls[1].action")
        );
        assert_eq!(check(&|profile| *profile = json!([])), ProfileError::Misshapen);
    }
}
