//! The gate's monitor, against the simulated driver: real programs under a real filter.
//! Needs root, `/dev/fuse`, and the workspace's programs (`cargo build --workspace --bins`).

#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "gate/filter.rs"]
mod filter;
#[path = "gate/host.rs"]
mod host;

/// What an application sees.
#[path = "gate/quota.rs"]
mod quota;

/// What controls say.
#[path = "gate/controls.rs"]
mod controls;

/// Programs that cheat.
#[path = "gate/attacks.rs"]
mod attacks;

/// Drivers whose structs have grown.
#[path = "gate/grown.rs"]
mod grown;

/// Channel groups, and what they take beside quotas.
#[path = "gate/groups.rs"]
mod groups;

/// Shares of computing time: slices of channel groups.
#[path = "gate/neighbours.rs"]
mod neighbours;
#[path = "gate/shares.rs"]
mod shares;

/// Memory that shows in another GPU's figures.
#[path = "gate/across.rs"]
mod across;

/// Updates at random, callers that are interrupted, drivers that hang.
#[path = "gate/faults.rs"]
mod faults;

/// Callers that are interrupted in the middle of a call.
#[path = "gate/interrupted.rs"]
mod interrupted;

/// Ranges of UVM's files, and managed memory.
#[path = "gate/ranges.rs"]
mod ranges;

/// Memory of the host that UVM could bring to the GPU.
#[path = "gate/pageable.rs"]
mod pageable;

/// Numbers of threads that are used again.
#[path = "gate/reused.rs"]
mod reused;

/// Which threads a worker has, and a host that has none left.
#[path = "gate/threads.rs"]
mod threads;

/// What a call costs, and how large a monitor is.
#[path = "gate/cost.rs"]
mod cost;

/// What is gone without a call that says so.
#[path = "gate/missed.rs"]
mod missed;

/// Updates in the middle of calls.
#[path = "gate/updated.rs"]
mod updated;

/// Monitors that are killed.
#[path = "gate/closed.rs"]
mod closed;

/// Calls that are made twice and are refused, and what may not be believed of that.
#[path = "gate/repeated.rs"]
mod repeated;
