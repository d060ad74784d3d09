//! cgpu: an OCI runtime that lets containers share GPUs, with quotas that hold.
//!
//! The modules stand in reading order, which is the way of one container. They are the edges around what
//! [`cgpu_core`] decides: they read files, clock and processes, and do what was decided. Arrows go downwards only: `cli`,
//! `runtime`, `hook` → `backend` → `registry`, `bundle`, `inject` → `cgpu_core`.

pub mod names;

pub mod backend;

pub mod host;

pub mod admission;

pub mod nvml;

pub mod view;

pub mod runtime;

pub mod hook;

pub mod engines;

pub mod doctor;

pub mod cli;
