//! Quotas that hold: real containers on the simulated driver, honest, hostile and killed.

#[path = "../host/mod.rs"]
mod host;

#[path = "../support/mod.rs"]
mod support;

#[path = "../standin/km.rs"]
mod km_standin;

#[path = "../standin/nvml.rs"]
mod nvml_standin;

mod gated;
mod table;

mod activation;
mod ahead;
mod attacks;
mod brought;
mod divisible;
mod engines;
mod events;
mod exports;
mod faults;
mod hangs;
mod heirs;
mod kills;
mod leaks;
mod lifecycle;
mod looks;
mod lost;
mod metrics;
mod neutral;
mod others;
mod privilege;
mod quotas;
mod rest;
mod settings;
mod shares;
mod sockets;
mod tree;
mod unknown;
