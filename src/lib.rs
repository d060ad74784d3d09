//! cgpu: an OCI runtime that lets containers share GPUs, with quotas that hold.
//!
//! The modules stand in reading order, which is the way of one container. The first
//! ones are pure (no files, no clock, no process); the later ones are the edges that
//! call them. Arrows go downwards only: `cli`, `runtime`, `hook` → `backend` →
//! `registry`, `bundle`, `inject` → the pure core.

pub mod units;

pub mod processor;

pub mod request;

pub mod gpu;

pub mod inventory;

pub mod plan;

pub mod sched;

pub mod ledger;

pub mod calls;

pub mod config;

pub mod process;

pub mod failpoint;

pub mod replace;

pub mod grants;

pub mod bundle;

pub mod inject;

pub mod registry;

pub mod names;

pub mod events;

pub mod gate;

pub mod monitor;

pub mod backend;

pub mod host;

pub mod admission;

pub mod view;

pub mod log;

pub mod report;

pub mod runtime;

pub mod hook;

pub mod engines;

pub mod doctor;

pub mod cli;
