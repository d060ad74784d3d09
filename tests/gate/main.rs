//! The monitor and its filter below an engine: hostile and honest programs on the simulated driver (`monitor`), the filter with
//! real runc and crun (`seccomp`), and shares of computing time against a simulated GPU (`compute`).

#[path = "../support/mod.rs"]
mod support;

mod compute;
mod monitor;
mod seccomp;
