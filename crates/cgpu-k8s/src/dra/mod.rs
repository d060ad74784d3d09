//! `cgpu-dra-driver`: GPUs whose memory many claims share (Dynamic Resource Allocation, Kubernetes 1.34 and later).
//!
//! Owns what the API server is given of a node's GPUs and which of their memory a claim gets. Enforces nothing: a claim's
//! CDI file names a record, and the runtime reads that.

mod allocation;
mod api;
mod args;
mod cdi;
mod devices;
mod driver;
mod lifecycle;
mod registration;
mod slice;

pub use args::DraArgs;
pub(crate) use devices::{MEMORY, amount};
pub use lifecycle::run;
