//! `cgpu-metrics`: serves what GPUs and the containers that share them use, in OpenMetrics' text form.
//!
//! Owns names, labels and units of the metrics, and how often a client may ask. Must not know where
//! values come from: see [`cgpu_cli::view`]. A crate of its own, so that no runtime links an HTTP server.

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
