//! The vendor's kernel module, through its procfs tree.

use thiserror::Error;

/// What went wrong with the module.
#[derive(Debug, Error)]
pub enum KmError {}
