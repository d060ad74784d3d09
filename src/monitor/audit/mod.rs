//! The audit: asks the driver and the kernel what the container has, compares the answers with the books, and acts.

mod client_users;
mod dead_clients;
mod escape_search;
mod history;
mod holdings;
mod judge;
mod kept_exports;
mod left_clients;
mod look;
mod managed_ranges;
mod mapped_memory;
mod mappings;
mod memory_owners;
mod prune;

pub(crate) use kept_exports::KeptExports;
pub(crate) use look::Audit;
pub(crate) use mappings::Mappings;
