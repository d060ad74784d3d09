//! The driver's files and GPUs: what containers of many images get (`files`, `driver_files`, `cdi`), and how a host's GPUs are
//! learnt (`inventory`, `refresh`).

#[path = "../host/mod.rs"]
mod host;
#[path = "../standin/nvml.rs"]
mod nvml_standin;
#[path = "../support/mod.rs"]
mod support;

mod cdi;
mod driver_files;
mod files;
mod inventory;
mod refresh;
