//! Why a section can't have the monitor's calls in it.

use thiserror::Error;

/// Why a section can't have our listener.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SectionError {
    /// Somebody else listens.
    #[error(
        "linux.seccomp.listenerPath is {path}, and a container can have one listener: the quota's; \
         choose a seccomp profile without a listener"
    )]
    OtherListener {
        /// The other listener.
        path: String,
    },
    /// Calls that somebody else wants to be told of.
    #[error(
        "{field} is SCMP_ACT_NOTIFY, and a container can have one listener: the quota's; choose a \
         seccomp profile that notifies nobody"
    )]
    Notifies {
        /// Where it says so.
        field: String,
    },
    /// Not what the specification says.
    #[error("{field} is not {expected}; correct the seccomp profile")]
    Misshapen {
        /// What is wrong.
        field: String,
        /// What it should be.
        expected: &'static str,
    },
    /// A rule that can't be kept beside ours.
    #[error(
        "{field} compares argument {argument} of {name} in a way that can't be joined with a \
         quota's rules; compare it with SCMP_CMP_EQ or SCMP_CMP_MASKED_EQ and a mask of 32 bits \
         in the seccomp profile"
    )]
    Inexpressible {
        /// The rule.
        field: String,
        /// The system call.
        name: &'static str,
        /// Its argument, from 0.
        argument: usize,
    },
    /// A rule that says something else to 32-bit programs.
    #[error(
        "{field} compares only upper halves of arguments of {name}, which is no comparison for \
         32-bit programs; compare lower halves too in the seccomp profile"
    )]
    UpperOnly {
        /// The rule.
        field: String,
        /// The system call.
        name: &'static str,
    },
}
