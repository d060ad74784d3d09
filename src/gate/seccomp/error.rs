//! Errors of [`merge`](super::merge).

use thiserror::Error;

/// Why a section can't have the monitor's listener.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SectionError {
    /// The section has another listener.
    #[error(
        "linux.seccomp.listenerPath is {path}, and a container can have one listener: the quota's; \
         choose a seccomp profile without a listener"
    )]
    OtherListener {
        /// The other listener's path.
        path: String,
    },
    /// A rule notifies another listener of a call.
    #[error(
        "{field} is SCMP_ACT_NOTIFY, and a container can have one listener: the quota's; choose a \
         seccomp profile that notifies nobody"
    )]
    Notifies {
        /// The field with the action.
        field: String,
    },
    /// A field is not what the specification says.
    #[error("{field} is not {expected}; correct the seccomp profile")]
    Misshapen {
        /// The field.
        field: String,
        /// What the field should be.
        expected: &'static str,
    },
    /// A rule that can't be kept beside the monitor's rules.
    #[error(
        "{field} compares argument {argument} of {name} in a way that can't be joined with a \
         quota's rules; compare it with SCMP_CMP_EQ or SCMP_CMP_MASKED_EQ and a mask of 32 bits \
         in the seccomp profile"
    )]
    Inexpressible {
        /// The rule's field.
        field: String,
        /// The system call.
        name: &'static str,
        /// The argument's number, from 0.
        argument: usize,
    },
    /// A rule that means something else for 32-bit programs.
    #[error(
        "{field} compares only upper halves of arguments of {name}, which is no comparison for \
         32-bit programs; compare lower halves too in the seccomp profile"
    )]
    UpperOnly {
        /// The rule's field.
        field: String,
        /// The system call.
        name: &'static str,
    },
}
