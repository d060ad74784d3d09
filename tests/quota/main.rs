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
mod attacks;
mod brought_gpus;
mod claims;
mod divisible;
mod engines;
mod events;
mod exports;
mod faults;
mod filter_ahead;
mod hangs;
mod idle;
mod inherited_clients;
mod kills;
mod leaks;
mod lifecycle;
mod metrics;
mod neighbours;
mod neutral;
mod orphaned;
mod privilege;
mod quotas;
mod settings;
mod shares;
mod sockets;
mod status_views;
mod tree;
mod unknown_driver;
