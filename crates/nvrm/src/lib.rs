//! The NVIDIA driver's ioctl ABI: numbers, structs, classes, and which release has which.
//!
//! Bytes in, meaning or a refusal out. It knows nothing of processes, descriptors, quotas or policy, has no standard
//! library by which to reach them (`no_std`), and never panics, whatever bytes it is given. Names of upstream stay in
//! here and are spelt as upstream spells them; ours begin outside.
//!
//! # To add a release
//!
//! 1. Unpack its source (`NVIDIA/open-gpu-kernel-modules`, or the kernel modules' source
//!    of a distribution) and run `NV_SRC=<dir> cargo test -p nvrm`. The test of the
//!    headers compiles them, reads their version from `version.mk`, and compares every
//!    number, size and offset of the row that this version gets.
//! 2. Where all agree, raise the branch's last release in `CHECKED` (`release.rs`), or
//!    add a line to it for a new branch: two lines touched, with the changelog.
//! 3. Where a struct changed, add its new layout to `structs.rs`, and to `RELEASES` a row
//!    at the first release that has it, with a comment that names the header. A change
//!    belongs to the release that made it: bisect over the releases with step 1.
//! 4. Generate `control/flat.rs` again (`fixtures/controls.py`), and read the diff of what
//!    it lists as odd and of `embedded_param_copy.c` and `rmapi_deprecated_control.c`.
//! 5. Read the diff of `resource_list.h` for new classes that are memory (`class.rs`),
//!    of `escape.c`, `nv.c` and `uvm.c` for new calls, and of the constructors that
//!    `class.rs` names.
//!
//! # To add a control
//!
//! Of a container's programs (one that the monitor's own client asks is in `structs.rs`, with a row in `RELEASES`
//! and a method of the monitor's client):
//!
//! 1. Read in the driver's source whom it reaches, and what its parameters point at.
//! 2. `number.rs`: its number, where code names it.
//! 3. `control.rs`: where its parameters have pointers, a row in `NESTED` for each size that releases have. One without
//!    pointers is in `control/flat.rs`, which is made from the headers.
//! 4. `control/served.rs`: the list that says why it is made. Take it out of `control/withheld.rs`. One that names
//!    a client goes into `control/clients.rs`, one that reports processes into `control/processes.rs`.
//! 5. Tests: those of the tables run by themselves. The simulated driver answers it (`sim/src/{abi,control}.rs`),
//!    a program asks it (`rmtool`'s script), and `tests/gate/monitor/controls.rs` compares the answer with a bare
//!    program's.
//!
//! The monitor's code (`src/monitor/calls/control.rs`) knows none of them by name, but for those that it answers
//! otherwise.
//!
//! # To add an escape
//!
//! 1. `number.rs`: its number; `structs.rs` and `release.rs`: the layouts of its struct.
//! 2. `call.rs`: a kind of [`Call`], and how it is read (`decode`). `src/gate/traps.rs`: the filter hands it to the
//!    monitor.
//! 3. `src/monitor/decide/verdict.rs`: what becomes of it, and why. One that the monitor makes has a function in
//!    `src/monitor/calls`, which `execute` of `serve.rs` calls.
//! 4. Tests: the model (`src/monitor/model`), the simulated driver, `rmtool`, and a row in `tests/gate`.

#![cfg_attr(not(test), no_std)]
#![warn(missing_docs)]

extern crate alloc;

mod layout;

pub mod number;

mod structs;

pub mod release;

pub mod refuse;

pub mod class;

pub mod call;

pub mod memory;

pub mod fbinfo;

pub mod control;

pub mod export;

pub mod uvm;

pub mod about;

pub mod usage;

pub mod channel;

#[cfg(test)]
mod tests;

pub use call::{Call, Command, Decoded, decode};
pub use layout::{Field, Layout, Meaning, Patch, View};
pub use refuse::{Answer, Refusal};
pub use release::{Key, Release, ReleaseError, Standing, Version};

/// Major number of `nvidiactl`, `nvidiaN` and `nvidia-modeset`
/// (`Documentation/admin-guide/devices.txt`).
pub const NVIDIA_MAJOR: i64 = 195;

/// The lower half of an argument, which is all that the kernel takes of one of 32 bits.
#[must_use]
pub fn low_word(argument: u64) -> u32 {
    let [a, b, c, d, ..] = argument.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}
