//! Files of `nvidia-uvm`: who made them, what is mapped by them, and in whose memory.

pub(crate) mod address_spaces;
pub(crate) mod files;
pub(crate) mod initialize;
pub(crate) mod kept_files;
pub(crate) mod ranges;
pub(crate) mod vma_list;
