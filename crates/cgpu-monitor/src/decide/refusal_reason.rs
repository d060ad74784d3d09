//! Why a call is refused: the words for the log, and the answer for the caller.
//!
//! The driver itself gives this answer for a similar reason, so that programs understand it. If the tables of
//! [`rm`](nvrm) don't know a call, or don't allow it, they give the reason: a [`Refusal`].
//!
//! # To add a reason
//!
//! 1. A kind of [`RefusalReason`]: its `#[error]` is the line of the log. [`RefusalReason::answer`]: the status or
//!    error for the program, and a row of the test.
//! 2. The decision: a function of this module that returns it, with its test. A bound on something that is counted
//!    stands next to what counts it in [`state`](crate::state), or is a setting.
//! 3. The file of the call, in [`calls`](crate::calls): `case.or_deny(decision)?`.

use thiserror::Error;

use cgpu_core::ledger::{LedgerError, Usage};
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use nvrm::number::*;
use nvrm::refuse::{ENOMEM, EPERM, OVER_QUOTA};
use nvrm::{Answer, Refusal};

/// Why a call is refused.
#[derive(Debug, Error, PartialEq, Eq)]
pub(crate) enum RefusalReason {
    /// The tables don't know the call, or don't allow it.
    #[error(transparent)]
    Tables(#[from] Refusal),
    /// The driver would refuse the call, too, with this status.
    #[error("status {0:#x}, as the driver does")]
    AsDriver(u32),
    /// The call asks for `asked_bytes` on the GPU at place `gpu` in the container's order, when `usage` was in use.
    #[error("{asked_bytes} bytes on GPU number {gpu}, {} left", usage.free_bytes())]
    OverQuota { gpu: usize, asked_bytes: u64, usage: Usage },
    /// The ledger can't enter what is asked for.
    #[error(transparent)]
    Ledger(LedgerError),
    #[error("memory below {parent:#x} of client {client:#x}, which is no GPU's")]
    NoGpu { client: u32, parent: u32 },
    #[error("memory below an object that was freed, or recreated, meanwhile")]
    ParentGone,
    #[error("control {control:#x} of a client that isn't the caller's")]
    ForeignClient { control: u32 },
    /// The state has as many of something as it can; the text says of what.
    #[error("more {0} than can be kept account of")]
    Full(&'static str),
    #[error("more processes than can be kept account of")]
    ProcessesFull,
    /// Memory was taken untracked; the text says what is now to be done with it.
    #[error("memory to be {0} that was taken past the monitor")]
    PastMonitor(&'static str),
    #[error("an export: {0}")]
    Export(LedgerError),
    #[error("an export of {handle:#x}, which the monitor has no record of")]
    UnknownExport { handle: u32 },
    #[error("an import of what this container didn't export")]
    ForeignImport,
    #[error("a channel group more than {most} on a GPU: [isolation] channel_groups is their bound")]
    GroupsOfGpuFull { most: u32 },
    #[error("a channel group more than {most} of a container")]
    GroupsFull { most: usize },
    #[error("a channel more than can be known is refused")]
    ChannelsFull,
    #[error(
        "a channel more than {most} that compute outside groups is refused: its time can't be \
         divided"
    )]
    OutsideGroupsFull { most: usize },
    #[error("managed memory: managed_memory = \"refuse\" is configured")]
    Managed,
    #[error("managed memory where the process, or one that has its memory, has some")]
    ManagedTwice,
    #[error("a mapping of a process that can't be watched")]
    Unwatched,
    #[error("a program that can't be distinguished from the next: its addresses aren't random")]
    NotRandom,
    #[error("more nodes of nvidia-uvm than can be kept account of")]
    UvmNodesFull,
    #[error("a file of nvidia-uvm, while another's initialization isn't over")]
    UvmBusy,
    #[error("a file of nvidia-uvm for several processes, where managed memory is charged")]
    UvmShared,
    #[error("nvidia-uvm was initialized with HMM all the same")]
    UvmWithHmm,
    #[error("a file of nvidia-uvm whose creator has exited, or is unknown")]
    UvmOrphaned,
    #[error("a file of nvidia-uvm that had managed memory, or whose creator has exited")]
    UvmRefused,
}

impl RefusalReason {
    /// What is reported to the caller.
    pub(crate) fn answer(&self) -> Answer {
        let status = match self {
            Self::Tables(refusal) => return refusal.answer(),
            Self::OverQuota { .. } => return OVER_QUOTA,
            Self::ProcessesFull | Self::Unwatched | Self::ManagedTwice => {
                return Answer::Errno(ENOMEM);
            }
            // CUDA reports EPERM as CUDA_ERROR_NOT_PERMITTED. No errno makes it report CUDA_ERROR_OUT_OF_MEMORY: ENOMEM
            // is an unknown error to CUDA.
            Self::Managed => return Answer::Errno(EPERM),
            Self::AsDriver(status) => *status,
            Self::Ledger(_) | Self::UvmNodesFull => NV_ERR_NO_MEMORY,
            Self::NoGpu { .. } => NV_ERR_INVALID_OBJECT_PARENT,
            Self::ParentGone => NV_ERR_OBJECT_NOT_FOUND,
            Self::ForeignClient { .. } => NV_ERR_INSUFFICIENT_PERMISSIONS,
            Self::Full(_)
            | Self::Export(LedgerError::Full)
            | Self::GroupsOfGpuFull { .. }
            | Self::GroupsFull { .. }
            | Self::ChannelsFull
            | Self::OutsideGroupsFull { .. } => NV_ERR_INSUFFICIENT_RESOURCES,
            Self::PastMonitor(_)
            | Self::Export(_)
            | Self::UnknownExport { .. }
            | Self::NotRandom => NV_ERR_NOT_SUPPORTED,
            Self::ForeignImport => NV_ERR_INVALID_PARAMETER,
            Self::UvmBusy => NV_ERR_BUSY_RETRY,
            Self::UvmShared | Self::UvmWithHmm | Self::UvmOrphaned => NV_ERR_INVALID_ARGUMENT,
            Self::UvmRefused => NV_ERR_INVALID_DEVICE,
        };
        Answer::Status(status)
    }

    /// What is reported to the caller of a mapping: `mmap` fails with this error.
    pub(crate) fn errno_of_map(&self) -> i32 {
        match self.answer() {
            Answer::Errno(errno) => errno,
            Answer::Status(_) => ENOMEM,
        }
    }

    /// Whether it is logged. What the driver itself would refuse is no news.
    pub(crate) fn is_news(&self) -> bool {
        !matches!(self, Self::AsDriver(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const USAGE: Usage = Usage { limit_bytes: 10, used_bytes: 4 };

    /// Memory over the quota is refused as memory that the GPU does not have.
    #[test]
    fn over_quota_refusal_reads_as_out_of_memory() {
        let over = RefusalReason::OverQuota { gpu: 1, asked_bytes: 7, usage: USAGE };
        assert_eq!(over.answer(), Answer::Status(NV_ERR_NO_MEMORY));
        assert_eq!(over.errno_of_map(), ENOMEM);
        assert_eq!(over.to_string(), "7 bytes on GPU number 1, 6 left");
    }

    /// Each reason for a refusal has the driver's answer for a similar reason.
    #[test]
    fn each_refusal_uses_the_drivers_similar_status() {
        let (client, handle, parent, most) = (1, 2, 3, 4);
        let unknown = LedgerError::NoSuchGpu { gpu: 3 };
        for (refusal_reason, status) in [
            (RefusalReason::AsDriver(7), 7),
            (RefusalReason::Ledger(LedgerError::Full), NV_ERR_NO_MEMORY),
            (RefusalReason::NoGpu { client, parent }, NV_ERR_INVALID_OBJECT_PARENT),
            (RefusalReason::ParentGone, NV_ERR_OBJECT_NOT_FOUND),
            (RefusalReason::ForeignClient { control: 5 }, NV_ERR_INSUFFICIENT_PERMISSIONS),
            (RefusalReason::Full("exports"), NV_ERR_INSUFFICIENT_RESOURCES),
            (RefusalReason::Export(LedgerError::Full), NV_ERR_INSUFFICIENT_RESOURCES),
            (RefusalReason::Export(unknown), NV_ERR_NOT_SUPPORTED),
            (RefusalReason::PastMonitor("mapped"), NV_ERR_NOT_SUPPORTED),
            (RefusalReason::UnknownExport { handle }, NV_ERR_NOT_SUPPORTED),
            (RefusalReason::ForeignImport, NV_ERR_INVALID_PARAMETER),
            (RefusalReason::GroupsOfGpuFull { most }, NV_ERR_INSUFFICIENT_RESOURCES),
            (RefusalReason::ChannelsFull, NV_ERR_INSUFFICIENT_RESOURCES),
            (RefusalReason::NotRandom, NV_ERR_NOT_SUPPORTED),
            (RefusalReason::UvmNodesFull, NV_ERR_NO_MEMORY),
            (RefusalReason::UvmBusy, NV_ERR_BUSY_RETRY),
            (RefusalReason::UvmShared, NV_ERR_INVALID_ARGUMENT),
            (RefusalReason::UvmOrphaned, NV_ERR_INVALID_ARGUMENT),
            (RefusalReason::UvmRefused, NV_ERR_INVALID_DEVICE),
        ] {
            assert_eq!(refusal_reason.answer(), Answer::Status(status), "{refusal_reason}");
        }
        assert_eq!(RefusalReason::ProcessesFull.answer(), Answer::Errno(ENOMEM));
    }

    /// The errno distinguishes a mapping that is refused by configuration from one without memory.
    #[test]
    fn mapping_refused_by_configuration_has_its_own_errno() {
        assert_eq!(RefusalReason::Managed.errno_of_map(), EPERM);
        for refusal_reason in
            [RefusalReason::ManagedTwice, RefusalReason::Unwatched, RefusalReason::Full("ranges")]
        {
            assert_eq!(refusal_reason.errno_of_map(), ENOMEM, "{refusal_reason}");
        }
    }

    #[test]
    fn what_the_driver_refuses_is_no_news() {
        assert!(!RefusalReason::AsDriver(NV_ERR_INVALID_ARGUMENT).is_news());
        assert!(RefusalReason::ParentGone.is_news());
    }
}
