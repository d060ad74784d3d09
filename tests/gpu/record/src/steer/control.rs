//! One control: its bytes, who asks, and what the driver answers.
//!
//! The driver takes privilege from the thread that calls it, so each call is a thread's of its own,
//! which gives up what its caller is said to lack. One that doesn't come back is left behind.
#![allow(unsafe_code, reason = "the driver's ioctl")]

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use caps::{CapSet, Capability, CapsHashSet};
use nix::libc;
use nvrm::channel::{MOST_CHANNELS, ask_disable};
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use nvrm::number::*;
use serde::Serialize;

/// `NV_ESC_RM_CONTROL` with its `NVOS54_PARAMETERS`.
const REQUEST: u64 = 0xc020_462a;
const NVOS54_BYTES: usize = 32;

/// Where samples begin in `NV2080_CTRL_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2_PARAMS`.
pub(crate) const SAMPLES_AT: usize = 16;

/// `NV2080_CTRL_SET_CTXSW_PREEMPTION_MODE_COMPUTE_*` (ctrl2080gr.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// A kernel is waited for.
    Wfi = 0,
    /// A block of a kernel's threads is.
    Cta = 1,
    /// Nothing is.
    Cilp = 2,
}

/// How long an answer is waited for.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The same once one didn't come.
const IMPATIENCE: Duration = Duration::from_millis(500);

/// Who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) enum Who {
    /// We, with all that root has here.
    #[serde(rename = "root")]
    Root,
    /// One with a single capability.
    #[serde(rename = "CAP_SYS_NICE alone")]
    Nice,
    /// One without any.
    #[serde(rename = "no capability")]
    Unprivileged,
}

impl Who {
    pub(crate) const ALL: [Who; 3] = [Who::Root, Who::Nice, Who::Unprivileged];

    /// Makes the calling thread that.
    fn become_so(self) -> Result<(), caps::errors::CapsError> {
        let retained = match self {
            Who::Root => return Ok(()),
            Who::Nice => CapsHashSet::from([Capability::CAP_SYS_NICE]),
            Who::Unprivileged => CapsHashSet::new(),
        };
        caps::clear(None, CapSet::Ambient)?;
        for set in [CapSet::Effective, CapSet::Permitted] {
            caps::set(None, set, &retained)?;
        }
        caps::clear(None, CapSet::Inheritable)
    }
}

/// What to ask.
#[derive(Debug, Clone)]
pub(crate) struct Control {
    pub(crate) name: &'static str,
    pub(crate) number: u32,
    pub(crate) params: Vec<u8>,
    /// What it asks for, to be read.
    pub(crate) asked: String,
}

impl Control {
    fn new(name: &'static str, number: u32, params: Vec<u8>, asked: String) -> Self {
        Control { name, number, params, asked }
    }

    /// `NVA06C_CTRL_TIMESLICE_PARAMS`: timesliceUs.
    pub(crate) fn get_slice() -> Self {
        Self::new("GET_TIMESLICE", NVA06C_CTRL_CMD_GET_TIMESLICE, vec![0; 8], String::new())
    }

    pub(crate) fn set_slice(slice_us: u64) -> Self {
        let params = slice_us.to_le_bytes().to_vec();
        let asked = format!("{slice_us} us");
        Self::new("SET_TIMESLICE", NVA06C_CTRL_CMD_SET_TIMESLICE, params, asked)
    }

    /// `NVA06C_CTRL_INTERLEAVE_LEVEL_PARAMS`: tsgInterleaveLevel.
    pub(crate) fn get_interleave() -> Self {
        let number = NVA06C_CTRL_CMD_GET_INTERLEAVE_LEVEL;
        Self::new("GET_INTERLEAVE_LEVEL", number, vec![0; 4], String::new())
    }

    pub(crate) fn set_interleave(level: u32) -> Self {
        let params = level.to_le_bytes().to_vec();
        let number = NVA06C_CTRL_CMD_SET_INTERLEAVE_LEVEL;
        Self::new("SET_INTERLEAVE_LEVEL", number, params, format!("level {level}"))
    }

    /// `NVA06C_CTRL_PREEMPT_PARAMS`: bWait, bManualTimeout, timeoutUs at 4.
    pub(crate) fn preempt() -> Self {
        let params = vec![1, 0, 0, 0, 0, 0, 0, 0];
        Self::new("PREEMPT", NVA06C_CTRL_CMD_PREEMPT, params, "and wait".to_owned())
    }

    /// `NVA06F_CTRL_GPFIFO_SCHEDULE_PARAMS`: bEnable, bSkipSubmit, bSkipEnable (the latter since 575).
    pub(crate) fn schedule() -> Self {
        let number = NVA06C_CTRL_CMD_GPFIFO_SCHEDULE;
        Self::new("GPFIFO_SCHEDULE", number, vec![1, 0, 0], "enable".to_owned())
    }

    /// `NVA06F_CTRL_RESTART_RUNLIST_PARAMS`: bForceRestart, bBypassWait.
    pub(crate) fn restart() -> Self {
        let asked = "force, and wait".to_owned();
        Self::new("RESTART_RUNLIST", NVA06F_CTRL_CMD_RESTART_RUNLIST, vec![1, 0], asked)
    }

    /// `NV2080_CTRL_GR_SET_CTXSW_PREEMPTION_MODE_PARAMS` (ctrl2080gr.h): flags (1: the compute mode is
    /// set), hChannel (a group does), gfxpPreemptMode, cilpPreemptMode, a route of 16 bytes.
    pub(crate) fn set_mode(group: u32, mode: Mode) -> Self {
        let mut params = vec![0; 32];
        let words = [(0, 1), (4, group), (12, mode as u32)];
        for (at, word) in words {
            params[at..at + 4].copy_from_slice(&u32::to_le_bytes(word));
        }
        let number = NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE;
        Self::new("SET_CTXSW_PREEMPTION_MODE", number, params, format!("{mode:?}"))
    }

    /// `NV2080_CTRL_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2_PARAMS` of this size: type 1 is the
    /// utilization of engines, bufSize at 4.
    pub(crate) fn samples(size: usize) -> Self {
        let mut params = vec![0; size];
        params[0] = 1;
        let buffer = u32::try_from(size - SAMPLES_AT).unwrap_or(0);
        params[4..8].copy_from_slice(&buffer.to_le_bytes());
        let number = NV2080_CTRL_CMD_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2;
        Self::new("PERFMON_UTIL_SAMPLES_V2", number, params, format!("{size} bytes"))
    }

    /// No more than [`MOST_CHANNELS`].
    pub(crate) fn disable(disable: bool, client: u32, channels: &[u32]) -> Self {
        let channels: Vec<(u32, u32)> =
            channels.iter().take(MOST_CHANNELS).map(|channel| (client, *channel)).collect();
        let verb = if disable { "disable" } else { "enable" };
        let asked = format!("{verb} {} channels", channels.len());
        let params = ask_disable(disable, &channels);
        Self::new("FIFO_DISABLE_CHANNELS", NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS, params, asked)
    }
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    /// The driver answered: `NV_STATUS`.
    Status(String),
    /// The call failed.
    Errno(String),
    /// It didn't come back.
    Hung(bool),
    /// It wasn't made, and why.
    NotTried(String),
}

/// An answer.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) outcome: Outcome,
    pub(crate) took: Duration,
    /// The parameters as the driver left them.
    pub(crate) params: Vec<u8>,
}

impl Answer {
    pub(crate) fn not_tried(why: &str) -> Self {
        let outcome = Outcome::NotTried(why.to_owned());
        Answer { outcome, took: Duration::ZERO, params: Vec::new() }
    }

    pub(crate) fn is_ok(&self) -> bool {
        self.outcome == Outcome::Status(status_text(NV_OK))
    }

    /// The number at the beginning of its parameters, where the driver said that all is well.
    pub(crate) fn number(&self) -> Option<u64> {
        let bytes = self.params.iter().take(8).enumerate();
        let number = bytes.fold(0, |sum, (at, byte)| sum | u64::from(*byte) << (8 * at));
        self.is_ok().then_some(number)
    }
}

fn status_text(status: u32) -> String {
    format!("{status:#x}")
}

/// Asks an object, through a file that its client belongs to.
pub(crate) fn ask(
    file: &Arc<OwnedFd>,
    client: u32,
    object: u32,
    control: &Control,
    who: Who,
    patient: bool,
) -> Answer {
    let (file, number, params) = (Arc::clone(file), control.number, control.params.clone());
    let (answers, answer) = mpsc::channel();
    std::thread::spawn(move || {
        let done = match who.become_so() {
            Ok(()) => call(&file, client, object, number, params),
            Err(error) => Answer::not_tried(&error.to_string()),
        };
        let _ = answers.send(done);
    });
    let timeout = if patient { TIMEOUT } else { IMPATIENCE };
    let hung = Answer { outcome: Outcome::Hung(true), took: timeout, params: Vec::new() };
    answer.recv_timeout(timeout).unwrap_or(hung)
}

fn call(file: &OwnedFd, client: u32, object: u32, number: u32, mut params: Vec<u8>) -> Answer {
    let mut nvos54 = [0; NVOS54_BYTES];
    let mut put = |at: usize, bytes: &[u8]| nvos54[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &client.to_le_bytes());
    put(4, &object.to_le_bytes());
    put(8, &number.to_le_bytes());
    put(16, &(params.as_mut_ptr().addr() as u64).to_le_bytes());
    put(24, &u32::try_from(params.len()).unwrap_or(0).to_le_bytes());
    let begun = Instant::now();
    // SAFETY: `nvos54` has the bytes that the request says, and the driver writes no more; its
    // pointer is to `params`, with their length next to it, and both outlive the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), REQUEST, nvos54.as_mut_ptr()) };
    let took = begun.elapsed();
    let outcome = if result == 0 {
        let [.., a, b, c, d] = nvos54;
        Outcome::Status(status_text(u32::from_le_bytes([a, b, c, d])))
    } else {
        Outcome::Errno(nix::errno::Errno::last().to_string())
    };
    Answer { outcome, took, params }
}
