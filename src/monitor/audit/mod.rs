//! What the driver and the kernel have of the container: asked for, judged, acted on.

pub(crate) mod escape_search;
pub(crate) mod heir_check;
pub(crate) mod heirs;
pub(crate) mod holdings;
pub(crate) mod judge;
pub(crate) mod kept_exports;
pub(crate) mod look;
pub(crate) mod managed_ranges;
pub(crate) mod mappings;
pub(crate) mod memory;
pub(crate) mod prune;
pub(crate) mod suspects;
