//! The gate's monitor, against the simulated driver: real programs under a real filter.
//! Needs root, `/dev/fuse`, and the workspace's programs (`cargo build --workspace --bins`).

#![allow(clippy::unwrap_used, reason = "tests")]

mod filter;
mod host;

/// What an application sees.
mod quota;

/// What controls say.
mod controls;

/// Programs that cheat.
mod attacks;

/// Drivers whose structs have grown.
mod grown;

/// Channel groups, and what they take next to quotas.
mod groups;

/// Shares of computing time: slices of channel groups.
mod neighbours;
mod shares;

/// Memory that shows in another GPU's driver usage.
mod across;

/// Updates at random, callers that are interrupted, drivers that hang.
mod faults;

/// Callers that are interrupted in the middle of a call.
mod interrupted;

/// Ranges of UVM's files, and managed memory.
mod ranges;

/// Memory of the host that UVM could bring to the GPU.
mod pageable;

/// Ids of threads that are used again.
mod reused;

/// Which threads a monitor has, and a host that has none left.
mod threads;

/// What a call costs, and how large a monitor is.
mod cost;

/// What is gone without a call that says so.
mod missed;

/// Updates in the middle of calls.
mod updated;

/// Monitors that are killed.
mod closed;

/// Calls that are made twice and are refused, and what may not be believed of that.
mod repeated;
