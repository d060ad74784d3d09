//! How a container can bypass the enforcement of quotas: [`Reach`].
//!
//! One list for the log, events, `cgpu inspect`, `cgpu ps` and the profile `strict`. Pure: the host's files and
//! namespaces are inspected elsewhere.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use super::setting::Quoted;

/// Capabilities by which a process reaches past the enforcement, wherever it runs.
///
/// `SYS_ADMIN` mounts and enters namespaces. `SYS_MODULE`, `SYS_RAWIO`, `BPF` and `PERFMON` reach the
/// kernel's memory or programs. `DAC_READ_SEARCH` opens files of the host by handle
/// (`open_by_handle_at(2)`), state and sockets of cgpu among them.
pub const CAPABILITIES: [&str; 6] = [
    "CAP_SYS_ADMIN",
    "CAP_SYS_MODULE",
    "CAP_SYS_RAWIO",
    "CAP_BPF",
    "CAP_PERFMON",
    "CAP_DAC_READ_SEARCH",
];

/// Capabilities that reach processes of the host, the monitor among them, if the container is in the
/// host's pid namespace.
pub const HOST_PID_CAPABILITIES: [&str; 2] = ["CAP_SYS_PTRACE", "CAP_KILL"];

/// One way past the enforcement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reach {
    /// It may use every device of the host.
    EveryDevice,
    /// It has this capability.
    Capability(String),
    /// It has this capability in the host's pid namespace.
    HostPid(String),
    /// It has this part of the host mounted.
    Mount {
        /// What is mounted, a path of the host.
        source: String,
        /// What that brings in.
        brings: String,
    },
}

impl fmt::Display for Reach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reach::EveryDevice => f.write_str("every device of the host"),
            Reach::Capability(name) => f.write_str(name),
            Reach::HostPid(name) => write!(f, "{name} in the host's pid namespace"),
            Reach::Mount { source, brings } => {
                write!(f, "a mount of {} ({brings})", Quoted(source))
            }
        }
    }
}

/// How a container reaches past the enforcement.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reaches {
    /// Each way.
    pub ways: Vec<Reach>,
    /// Whether the container is in the host's pid namespace, with whatever capabilities.
    pub host_pids: bool,
}

impl Reaches {
    /// The ways as a sentence has them: `CAP_SYS_ADMIN, every device of the host`.
    #[must_use]
    pub fn listed(&self) -> String {
        const MOST: usize = 4;
        let mut shown: Vec<String> = self.ways.iter().take(MOST).map(Reach::to_string).collect();
        if self.ways.len() > MOST {
            shown.push(format!("and {} more", self.ways.len() - MOST));
        }
        shown.join(", ")
    }
}
