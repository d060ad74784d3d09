//! cgpu: an OCI runtime that lets containers share GPUs, with quotas that hold.
//!
//! What the programs that engines start have in common: `cgpu-runtime` ([`runtime`]), `cgpu-hook` ([`hook`]) and `cgpu-monitor`,
//! whose own crate is [`cgpu_monitor`]. The modules stand in reading order: each uses those above it.

pub mod container_names;

pub mod backend;

pub mod host;

pub mod admission;

pub mod runtime;

pub mod hook;
