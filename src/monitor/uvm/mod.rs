//! The files of `nvidia-uvm`: their makers, what they map, and in which address spaces.

pub(crate) mod address_spaces;
pub(crate) mod files;
pub(crate) mod initialize;
pub(crate) mod kept_files;
pub(crate) mod ranges;
pub(crate) mod vma_list;
