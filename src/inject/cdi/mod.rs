//! The driver as a CDI specification on this host describes it (Container Device Interface).
//!
//! Owns specifications: reading them, finding the device of a GPU in them, and telling what is
//! stale. Must not know quotas or who asks.

pub mod parse;
pub mod spec;
pub mod validate;

#[cfg(test)]
mod fixture;
