//! The process at the other end of a socket of the monitor: [`may_ask`], [`may_change`].
//!
//! The sockets lie in a directory of root's, which a container may still reach: by a mount of the host's `/run`, say,
//! if its root is the host's by its number. So a change needs a process of the host: of the monitor's own user and of
//! its pid and user namespaces. Mounts may be its own, as those of a service with `PrivateTmp` are; then it must not be
//! a registered container's, which has an exclusive GPU perhaps and was given the host's pids. A container with a quota
//! is never in the host's pid namespace.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Once;

use nix::sys::socket::{getsockopt, sockopt};
use rustix::process::geteuid;
use tracing::warn;

use crate::processes::{Provenance, home_of, mount_namespace};
use cgpu_host::process::{ProcessId, is_running};
use cgpu_host::registry::Registry;

/// Whether the process that connected `socket` may read what the monitor knows: it is the monitor's user.
pub(crate) fn may_ask(socket: &impl AsFd) -> bool {
    let own = geteuid().as_raw();
    getsockopt(socket, sockopt::PeerCredentials).is_ok_and(|peer| peer.uid() == own)
}

/// Whether the process that connected `socket` may change what the monitor enforces, or have it serve
/// another process: its pid. `state_dir` has the registry; empty for none. The log says once if one may not: it can
/// ask as often as it likes.
///
/// # Errors
///
/// Why not.
pub(crate) fn may_change(
    socket: &impl AsFd,
    (state_dir, started_in): (&Path, &str),
) -> Result<i32, String> {
    static REPORTED: Once = Once::new();
    judge(socket, (state_dir, started_in)).inspect_err(|reason| {
        REPORTED.call_once(|| {
            warn!(reason, "refused: only root of the host may change what a monitor enforces");
        });
    })
}

fn judge(socket: &impl AsFd, (state_dir, started_in): (&Path, &str)) -> Result<i32, String> {
    let unknown = |error: io::Error| format!("it can't be known who asks: {error}");
    let peer =
        getsockopt(socket, sockopt::PeerCredentials).map_err(|errno| unknown(errno.into()))?;
    if peer.uid() != geteuid().as_raw() {
        return Err(format!("user {} asks, and only root may", peer.uid()));
    }
    // A process in a pid namespace next to or above ours has no number here: 0, which rustix's `UCred` can't hold.
    let pid = peer.pid();
    if pid <= 0 {
        return Err("who asks is in another pid namespace".to_owned());
    }
    // Since Linux 6.5. Before, a number could be another process's by now: it is checked twice.
    let pidfd = getsockopt(socket, sockopt::PeerPidfd).ok();
    let before = ProcessId::of(pid);
    for namespace in ["pid", "user"] {
        let of = |process: &str| fs::read_link(format!("/proc/{process}/ns/{namespace}"));
        if of(&pid.to_string()).map_err(unknown)? != of("self").map_err(unknown)? {
            return Err(format!("who asks (pid {pid}) is in another {namespace} namespace"));
        }
    }
    if let Some(id) = container_of(pid, (state_dir, started_in))? {
        return Err(format!("who asks (pid {pid}) is a process of the container {id}"));
    }
    let is_same = before.is_some() && before == ProcessId::of(pid);
    match is_same && pidfd.is_none_or(|pidfd| is_running(&pidfd)) {
        true => Ok(pid),
        false => Err(format!("who asked (pid {pid}) has ended")),
    }
}

/// The registered container that a process is of, by its mounts or its cgroup. One with the monitor's own mounts is the
/// host's.
fn container_of(
    pid: i32,
    (state_dir, started_in): (&Path, &str),
) -> Result<Option<String>, String> {
    let ended = || format!("who asked (pid {pid}) has ended");
    let (device, namespace) = mount_namespace(pid).ok_or_else(ended)?;
    let own = mount_namespace(std::process::id().cast_signed());
    if Some((device, namespace)) == own || state_dir.as_os_str().is_empty() {
        return Ok(None);
    }
    let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).map_err(|_| ended())?;
    let records = Registry::open_read_only(state_dir, String::new()).and_then(|all| all.records());
    let records = records.map_err(|error| format!("it can't be known who asks: {error}"))?;
    let is_its = |init: ProcessId| {
        let mut provenance = Provenance::default();
        let (namespace_of_init, cgroup_of_init) = home_of(init.pid, started_in);
        provenance.add_process(namespace_of_init, cgroup_of_init.as_deref());
        provenance.has_process(namespace, &cgroup)
    };
    let inits = records.into_iter().filter_map(|record| Some((record.holder.init()?, record)));
    let found = inits.filter(|(init, _)| init.alive()).find(|(init, _)| is_its(*init));
    Ok(found.map(|(_, record)| record.key.id))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A process of the same user and namespaces may query and change settings, and an unknown peer
    /// may not.
    #[test]
    fn same_user_and_namespaces_may_query_and_change() {
        let (here, _there) = UnixStream::pair().unwrap();
        assert!(may_ask(&here));
        let own = std::process::id().cast_signed();
        assert_eq!(may_change(&here, (Path::new(""), "")), Ok(own));
        let no_peer = fs::File::open("/dev/null").unwrap();
        assert!(!may_ask(&no_peer));
        assert!(
            may_change(&no_peer, (Path::new(""), ""))
                .unwrap_err()
                .contains("it can't be known who asks")
        );
    }
}
