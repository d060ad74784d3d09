//! What cgpu reads and keeps on a host: the configuration, the list of GPUs, the registry of containers, events, the log,
//! and what `/proc` says of processes.
//!
//! The crate knows neither bundles nor drivers: the crates above do. What is decided by it is in [`cgpu_core`].

pub mod config;

pub mod child;

pub mod inventory;

pub mod process;

pub mod failpoint;

pub mod atomic_file;

pub mod grants;

pub mod registry;

pub mod events;

pub mod log;

pub mod report;
