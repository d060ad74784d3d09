//! What a container asks for, read from its variables and annotations: [`Request`].
//!
//! Knows variables, lists, units and the trust policy. Must not know files or the GPUs
//! of the host: which GPU a name means is `plan`'s matter.

use thiserror::Error;

/// Who may ask for GPUs: the configuration's `trust_env` and `trust_annotations`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trust {
    /// `process.env` counts (image and user's variables can't be told apart there).
    pub env: bool,
    /// The bundle's annotations count.
    pub annotations: bool,
}

/// What a container asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {}

/// Why a request can't be meant.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RequestError {}
