//! `cgpu`, the command: sets hosts up, shows what containers have of their GPUs, and changes it.
//!
//! What the programs that engines start must not link is here: NVML, editors of engines' configurations, and what is shown. The
//! programs that show or serve it ([`view`]) build on this crate.

pub mod nvml;

pub mod view;

pub mod engines;

pub mod doctor;

pub mod commands;
