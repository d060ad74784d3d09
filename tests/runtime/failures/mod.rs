//! What goes wrong around a container creation, and what must hold nevertheless: nothing is reserved
//! twice, nothing leaks, no bundle is half written, and the sentence says what to do.
//!
//! `crashes` kills our programs at every place; `bundles`, `configuration` and `runtimes` break
//! what they are given; `stale` takes the containers away behind their back; `crowd` lets
//! a hundred in at once; `stale_checks` has a container come into being during a check for it.
//! Needs root, runc, crun and FUSE.

#![allow(clippy::unwrap_used, reason = "clippy.toml allows it in tests, not in their helpers")]

mod bundles;
mod configuration;
mod crashes;
mod crowd;
mod runtimes;
mod stale;
mod stale_checks;
