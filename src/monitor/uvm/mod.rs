//! The files of `nvidia-uvm`: their makers, what they map, and in which address spaces.

mod address_spaces;
mod file_calls;
mod file_makers;
mod files;
mod kept_files;
mod ranges;
mod vma_list;

pub(crate) use address_spaces::{
    AddressSpace, MAPPING_DELAY, current_maps, image_hash, is_randomized,
};
pub(crate) use file_calls::{has_flags, was_initialized};
#[cfg(test)]
pub(crate) use files::SweepTimes;
pub(crate) use files::{MOST_QUESTIONS, UvmFile};
pub(crate) use kept_files::Uvm;
pub(crate) use ranges::{PAGE_BYTES, Ranges};
pub(crate) use vma_list::{Listed, possibly_managed};
