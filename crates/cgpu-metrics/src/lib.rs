//! `cgpu-metrics`: serves what GPUs and the containers that share them use, in OpenMetrics' text form.
//!
//! Owns names, labels and units of the metrics, and who may ask how often. Must not know where figures
//! come from: see [`cgpu_cli::view`]. A crate of its own, so that no runtime links an HTTP server.

mod args;
mod creation_counter;
mod creations;
mod exposition;
mod pods;
#[cfg(test)]
mod scrape;
mod server;

pub use args::Args;
pub use server::run;
