//! The OCI runtime.

pub mod argv;
