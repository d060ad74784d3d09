//! How a call is refused: why, and what the caller gets.
//!
//! A [`Refusal`] is for our log: it names the driver, the call and the sizes. An
//! [`Answer`] is for the caller, and is the driver's own: where the driver itself would
//! fail the system call it is an error number, else a status in the caller's struct and
//! a return of 0. How often it is logged, and what writes it, is not known here.

use alloc::vec::Vec;
use core::fmt;

use thiserror::Error;

use super::layout::{Layout, Meaning, Patch};
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use super::number::*;
use super::release::{Key, Version};

/// `EINVAL` of Linux: what the driver returns for calls and sizes it doesn't know.
pub const EINVAL: i32 = 22;

/// `EFAULT` of Linux: what the driver returns where the caller's memory can't be read.
pub const EFAULT: i32 = 14;

/// `EPERM` of Linux.
pub const EPERM: i32 = 1;

/// `ENOMEM` of Linux.
pub const ENOMEM: i32 = 12;

/// Why a call isn't understood, and so not made.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Refusal {
    /// Neither we nor, as far as we know, the driver knows the call.
    #[error("driver {driver}: {call} of {size} bytes is not known")]
    UnknownCall {
        /// The driver's version.
        driver: Version,
        /// The call.
        call: CallName,
        /// The size the caller states.
        size: usize,
    },
    /// The struct has another size than this driver's.
    #[error("driver {driver}: {call} of {stated} bytes, known is {}", Sizes(.known))]
    UnknownSize {
        /// The driver's version.
        driver: Version,
        /// The call, class or command.
        call: CallName,
        /// The size the caller states.
        stated: usize,
        /// The sizes this driver has.
        known: Vec<usize>,
    },
    /// Fewer or more bytes were copied than the call is long.
    #[error("driver {driver}: {call} of {stated} bytes, {copied} were copied")]
    Copied {
        /// The driver's version.
        driver: Version,
        /// The call.
        call: CallName,
        /// The size of the call.
        stated: usize,
        /// The bytes there are.
        copied: usize,
    },
    /// A wrapped call is the wrapper again.
    #[error("driver {driver}: {call} within itself; the driver unwraps once")]
    Nested {
        /// The driver's version.
        driver: Version,
        /// The wrapper.
        call: CallName,
    },
    /// Parameters are in FINN's encoding, which hides what we would read.
    #[error("driver {driver}: {call} with serialized parameters, which are not read")]
    Serialized {
        /// The driver's version.
        driver: Version,
        /// The call.
        call: CallName,
    },
    /// A control that isn't known.
    #[error(
        "driver {driver}: control {command:#010x} of class {:#x} is unknown to cgpu: please report",
        .command >> 16
    )]
    UnknownControl {
        /// The driver's version.
        driver: Version,
        /// The control.
        command: u32,
    },
    /// A control that isn't made for any caller.
    #[error("driver {driver}: control {command:#010x}: {why}")]
    Control {
        /// The driver's version.
        driver: Version,
        /// The control.
        command: u32,
        /// Why it isn't.
        why: &'static str,
    },
    /// A class that isn't known.
    #[error("driver {driver}: class {class:#x} is unknown to cgpu: please report")]
    UnknownClass {
        /// The driver's version.
        driver: Version,
        /// The class.
        class: u32,
    },
    /// A class of which no object is made for any caller.
    #[error("driver {driver}: class {class:#x}: {why}")]
    Class {
        /// The driver's version.
        driver: Version,
        /// The class.
        class: u32,
        /// What the driver answers.
        status: u32,
        /// What is known of it.
        why: &'static str,
    },
    /// A layout lacks a field that its decoder needs: a mistake of the table.
    #[error("driver {driver}: {call}: the table has no {meaning:?}")]
    Table {
        /// The driver's version.
        driver: Version,
        /// The call.
        call: CallName,
        /// What it lacks.
        meaning: Meaning,
    },
}

/// A call in words: by its upstream name where it has one here, else by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallName(pub Key);

/// What the caller gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The system call fails with this error number.
    Errno(i32),
    /// The system call succeeds, and the struct says this status.
    Status(u32),
}

/// Sizes in words: `32 or 48`.
struct Sizes<'a>(&'a [usize]);

impl Refusal {
    /// Whether it isn't known, so that it should be reported.
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::UnknownControl { .. } | Self::UnknownClass { .. })
    }

    /// What the driver would answer in our place.
    #[must_use]
    pub fn answer(&self) -> Answer {
        match self {
            // nv.c, nvidia_ioctl(): -EINVAL of unknown numbers and wrong sizes.
            Self::UnknownCall { .. } | Self::Nested { .. } => Answer::Errno(EINVAL),
            Self::UnknownSize { call, .. } => match call.0 {
                Key::Escape(_) | Key::Uvm(_) => Answer::Errno(EINVAL),
                // control.c, _rmapiRmControl(): a stated size that isn't the command's.
                Key::VidHeap(_) | Key::Class(_) | Key::Control(_) => {
                    Answer::Status(NV_ERR_INVALID_PARAM_STRUCT)
                }
            },
            Self::Copied { .. } => Answer::Errno(EFAULT),
            // gpuIsClassSupported: a class that the GPU doesn't have.
            Self::UnknownClass { .. } => Answer::Status(NV_ERR_INVALID_CLASS),
            Self::Class { status, .. } => Answer::Status(*status),
            Self::Serialized { .. }
            | Self::UnknownControl { .. }
            | Self::Control { .. }
            | Self::Table { .. } => Answer::Status(NV_ERR_NOT_SUPPORTED),
        }
    }
}

/// The status of an allocation over the quota: as where the GPU has no memory left.
pub const OVER_QUOTA: Answer = Answer::Status(NV_ERR_NO_MEMORY);

/// What to write into the struct of a call so that it says `status`.
///
/// `None` where the struct has no status; then the system call has to fail.
#[must_use]
pub fn status(layout: &Layout, status: u32) -> Option<Patch> {
    layout.patch(Meaning::Status, u64::from(status))
}

impl fmt::Display for CallName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0 {
            Key::Escape(number) => match number {
                NV_ESC_RM_ALLOC => "NV_ESC_RM_ALLOC",
                NV_ESC_RM_ALLOC_MEMORY => "NV_ESC_RM_ALLOC_MEMORY",
                NV_ESC_RM_ALLOC_OBJECT => "NV_ESC_RM_ALLOC_OBJECT",
                NV_ESC_RM_FREE => "NV_ESC_RM_FREE",
                NV_ESC_RM_CONTROL => "NV_ESC_RM_CONTROL",
                NV_ESC_RM_DUP_OBJECT => "NV_ESC_RM_DUP_OBJECT",
                NV_ESC_RM_VID_HEAP_CONTROL => "NV_ESC_RM_VID_HEAP_CONTROL",
                NV_ESC_IOCTL_XFER_CMD => "NV_ESC_IOCTL_XFER_CMD",
                NV_ESC_EXPORT_TO_DMABUF_FD => "NV_ESC_EXPORT_TO_DMABUF_FD",
                _ => return write!(f, "call {number:#x}"),
            },
            Key::VidHeap(function) => {
                return write!(f, "NV_ESC_RM_VID_HEAP_CONTROL function {function}");
            }
            Key::Class(class) => return write!(f, "class {class:#x}"),
            Key::Control(command) => return write!(f, "control {command:#x}"),
            Key::Uvm(number) => return write!(f, "nvidia-uvm call {number:#x}"),
        };
        f.write_str(name)
    }
}

impl fmt::Display for Sizes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        for (at, size) in self.0.iter().enumerate() {
            write!(f, "{}{size}", if at > 0 { " or " } else { "" })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::release::Release;
    use super::*;

    #[test]
    fn memory_committing_structs_all_carry_a_status() {
        let release = Release::of("535.161.08".parse().unwrap()).unwrap();
        for number in [
            NV_ESC_RM_ALLOC,
            NV_ESC_RM_ALLOC_MEMORY,
            NV_ESC_RM_ALLOC_OBJECT,
            NV_ESC_RM_VID_HEAP_CONTROL,
            NV_ESC_RM_DUP_OBJECT,
            NV_ESC_RM_CONTROL,
            NV_ESC_RM_FREE,
        ] {
            for layout in release.layouts(Key::Escape(number)) {
                let patch = status(layout, NV_ERR_NO_MEMORY).unwrap();
                assert_eq!(patch.bytes(), [0x51, 0, 0, 0]);
            }
        }
    }

    #[test]
    fn wrong_size_refusal_names_driver_call_and_sizes() {
        let refusal = Refusal::UnknownSize {
            driver: "535.161.08".parse().unwrap(),
            call: CallName(Key::Escape(NV_ESC_RM_ALLOC)),
            stated: 44,
            known: vec![32, 48],
        };
        assert_eq!(
            refusal.to_string(),
            "driver 535.161.08: NV_ESC_RM_ALLOC of 44 bytes, known is 32 or 48"
        );
        assert_eq!(refusal.answer(), Answer::Errno(EINVAL));
    }
}
