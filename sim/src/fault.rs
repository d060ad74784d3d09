//! Faults that are put into the driver at run time.
//!
//! One a line, as `alloc:0x40 hang` or `control:0x20801303 status 0x56 times 2`; lines
//! are added to those there are, and `clear` takes all back and releases calls that hang. What a
//! fault says comes before what the driver would do.

use std::fmt;
use std::str::FromStr;

use crate::spec::size_bytes;

/// A kind of call, as faults and counts name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// `NV_ESC_RM_ALLOC`; narrowed by class.
    Alloc,
    /// `NV_ESC_RM_ALLOC_MEMORY`; narrowed by class.
    AllocMemory,
    /// `NV_ESC_RM_VID_HEAP_CONTROL`; narrowed by function.
    Heap,
    /// `NV_ESC_RM_FREE`.
    Free,
    /// `NV_ESC_RM_DUP_OBJECT`.
    Dup,
    /// `NV_ESC_RM_CONTROL`; narrowed by command.
    Control,
    /// A call to `nvidia-uvm`; narrowed by number.
    Uvm,
    /// Any other call; narrowed by number.
    Other,
}

impl Kind {
    pub const ALL: [Kind; 8] = [
        Kind::Alloc,
        Kind::AllocMemory,
        Kind::Heap,
        Kind::Free,
        Kind::Dup,
        Kind::Control,
        Kind::Uvm,
        Kind::Other,
    ];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Kind::Alloc => "alloc",
            Kind::AllocMemory => "alloc-memory",
            Kind::Heap => "heap",
            Kind::Free => "free",
            Kind::Dup => "dup",
            Kind::Control => "control",
            Kind::Uvm => "uvm",
            Kind::Other => "other",
        }
    }
}

/// A line of `sim/faults`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// Takes back all faults and lies, and releases calls that hang.
    Clear,
    /// What a call meets.
    Call(CallFault),
    /// Takes memory in multiples of so many bytes.
    Round {
        /// The multiple.
        bytes: u64,
    },
    /// Structs of UVM calls and parameters of allocations have so many bytes more than in the
    /// release that is simulated, as in one that comes later.
    Grown {
        /// How many; 0 is none.
        bytes: u64,
    },
    /// Takes so much memory for each channel group, which is in no process's figure.
    Group {
        /// How much; 0 is none.
        bytes: u64,
    },
    /// Has these processes in samples of utilisation, in turn.
    Busy {
        /// As the host numbers them; none is an idle GPU.
        pids: Vec<u32>,
    },
    /// Answers an index of `FB_GET_INFO` with this, whatever is true.
    FbInfo {
        /// `NV2080_CTRL_FB_INFO_INDEX_*`.
        index: u32,
        /// What is answered.
        value: u32,
    },
}

/// What a call meets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallFault {
    /// Which calls; `None` is all.
    pub kind: Option<Kind>,
    /// Class, command, function or number; `None` is all of the kind.
    pub what: Option<u32>,
    pub action: Action,
    /// How many calls are left that meet it; `None` is no end.
    pub times: Option<u32>,
}

/// What happens to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// It is executed so much later.
    Delay {
        /// Milliseconds.
        ms: u64,
    },
    /// It is answered so much later than it's executed.
    Late {
        /// Milliseconds.
        ms: u64,
    },
    /// It is executed when faults are cleared.
    Hang,
    /// It fails with an `NV_ERR_*`.
    Status(u32),
    Errno(i32),
    /// A free reports success, and the memory stays in use until its client goes.
    Lose,
    /// The driver reads another class than its caller's struct had before: as if another thread has changed
    /// that since the check.
    Swap {
        /// The class that it reads.
        class: u32,
    },
}

/// What the driver reports wrongly.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lies {
    /// Memory is taken in multiples of this.
    pub round_bytes: u64,
    /// Bytes that structs have grown by.
    pub grown_bytes: usize,
    /// Memory of a channel group's own.
    pub group_bytes: u64,
    /// Processes that samples of utilisation have, in turn.
    pub busy: Vec<u32>,
    /// Answers of `FB_GET_INFO` by index.
    pub fb_info: Vec<(u32, u32)>,
}

/// Why a line is no fault.
#[derive(Debug, thiserror::Error)]
#[error(
    "\"{line}\" is no fault; write it as \"alloc:0x40 hang\", \"free lose times 1\" or \"clear\""
)]
pub struct FaultError {
    line: String,
}

impl CallFault {
    /// Whether a call meets it.
    #[must_use]
    pub fn meets(&self, kind: Kind, what: u32) -> bool {
        self.kind.is_none_or(|of| of == kind) && self.what.is_none_or(|of| of == what)
    }
}

fn number(text: &str) -> Option<u32> {
    u32::try_from(size_bytes(text).ok()?).ok()
}

fn parse(line: &str) -> Option<Fault> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (words, times) = match words.as_slice() {
        [words @ .., "times", times] => (words, Some(number(times)?)),
        words => (words, None),
    };
    let (on, action) = match words {
        ["clear"] => return Some(Fault::Clear),
        ["round", size] => return Some(Fault::Round { bytes: size_bytes(size).ok()? }),
        ["grown", size] => return Some(Fault::Grown { bytes: size_bytes(size).ok()? }),
        ["busy", pids @ ..] => {
            let pids: Option<Vec<u32>> = pids.iter().map(|pid| number(pid)).collect();
            return Some(Fault::Busy { pids: pids? });
        }
        ["group", size] => return Some(Fault::Group { bytes: size_bytes(size).ok()? }),
        ["fb-info", index, value] => {
            return Some(Fault::FbInfo { index: number(index)?, value: number(value)? });
        }
        [on, "delay", ms] => (on, Action::Delay { ms: size_bytes(ms).ok()? }),
        [on, "late", ms] => (on, Action::Late { ms: size_bytes(ms).ok()? }),
        [on, "hang"] => (on, Action::Hang),
        [on, "status", status] => (on, Action::Status(number(status)?)),
        [on, "errno", errno] => (on, Action::Errno(errno.parse().ok()?)),
        [on, "lose"] => (on, Action::Lose),
        [on, "swap", class] => (on, Action::Swap { class: number(class)? }),
        _ => return None,
    };
    let (kind, what) = match on.split_once(':') {
        Some((kind, what)) => (kind, Some(number(what)?)),
        None => (*on, None),
    };
    let kind = match kind {
        "any" => None,
        kind => Some(Kind::ALL.into_iter().find(|known| known.name() == kind)?),
    };
    Some(Fault::Call(CallFault { kind, what, action, times }))
}

impl FromStr for Fault {
    type Err = FaultError;

    fn from_str(line: &str) -> Result<Self, Self::Err> {
        parse(line).ok_or_else(|| FaultError { line: line.to_owned() })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fault = match self {
            Fault::Clear => return formatter.write_str("clear"),
            Fault::Round { bytes } => return write!(formatter, "round {bytes}"),
            Fault::Grown { bytes } => return write!(formatter, "grown {bytes}"),
            Fault::Group { bytes } => return write!(formatter, "group {bytes}"),
            Fault::Busy { pids } => {
                write!(formatter, "busy")?;
                return pids.iter().try_for_each(|pid| write!(formatter, " {pid}"));
            }
            Fault::FbInfo { index, value } => {
                return write!(formatter, "fb-info {index:#x} {value}");
            }
            Fault::Call(fault) => fault,
        };
        formatter.write_str(fault.kind.map_or("any", Kind::name))?;
        if let Some(what) = fault.what {
            write!(formatter, ":{what:#x}")?;
        }
        match fault.action {
            Action::Delay { ms } => write!(formatter, " delay {ms}"),
            Action::Late { ms } => write!(formatter, " late {ms}"),
            Action::Hang => formatter.write_str(" hang"),
            Action::Status(status) => write!(formatter, " status {status:#x}"),
            Action::Errno(errno) => write!(formatter, " errno {errno}"),
            Action::Lose => formatter.write_str(" lose"),
            Action::Swap { class } => write!(formatter, " swap {class:#x}"),
        }?;
        fault.times.map_or(Ok(()), |times| write!(formatter, " times {times}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_written_as_it_is_read() {
        let lines = [
            "clear",
            "round 2097152",
            "grown 200",
            "group 8388608",
            "busy 7 8",
            "fb-info 0x55 7",
            "alloc:0x40 hang",
            "any delay 5",
            "alloc:0x40 late 5 times 1",
            "control:0x20801303 status 0x56 times 2",
            "uvm:0x21 errno 12",
            "free lose",
            "alloc:0x9067 swap 0xa06c times 1",
        ];
        for line in lines {
            assert_eq!(line.parse::<Fault>().unwrap().to_string(), line);
        }
        for wrong in ["", "alloc", "alloc:x hang", "nothing hang", "alloc delay", "free lose times"]
        {
            assert!(wrong.parse::<Fault>().is_err(), "{wrong}");
        }
    }
}
