//! `nvidia-uvm`: its calls, its files and their creators, what the files map, and in which address
//! spaces.

mod address_spaces;
mod callers_file;
mod calls;
mod file_creators;
mod files;
mod initialize;
mod mappings;
mod mmap;
mod queries;
mod range_calls;
mod retained_files;
mod vma_list;

pub(crate) use address_spaces::AddressSpaces;
pub(crate) use calls::serve_uvm;
#[cfg(test)]
pub(crate) use files::ScanTimes;
pub(crate) use files::{UvmFile, UvmFiles};
pub(crate) use initialize::{cancel_initialization, end_earlier_initialization};
pub(crate) use mappings::{audit_mappings_forever, dead_with_mapped_memory};
pub(crate) use mmap::serve_map;
pub(crate) use retained_files::{end_files, resume_file, scan_files};
