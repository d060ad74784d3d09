//! The audit: asks the driver and the kernel what the container has, compares the answers with the books, and acts.

pub(crate) mod client_users;
pub(crate) mod dead_clients;
pub(crate) mod escape_search;
pub(crate) mod history;
pub(crate) mod holdings;
pub(crate) mod judge;
pub(crate) mod kept_exports;
pub(crate) mod look;
pub(crate) mod managed_ranges;
pub(crate) mod mappings;
pub(crate) mod memory_owners;
pub(crate) mod prune;
