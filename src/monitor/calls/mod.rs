//! Serves calls: [`serve`] has the steps of one call, and each kind of call has a file of its own.

mod alloc;
mod callers;
mod case;
mod charge;
mod control;
mod duplicate;
mod escape;
mod export;
mod fb_info;
mod free;
mod gpu_lookup;
mod groups;
mod identify;
mod import;
mod initialize;
mod make_control;
mod mmap;
mod parts;
mod serve;
mod share_controls;
mod threads;
mod uvm;
mod uvm_file;
mod uvm_maps;
mod uvm_ranges;
mod vid_heap;

#[cfg(test)]
pub(crate) use case::Case;
pub(crate) use parts::Parts;
#[cfg(test)]
pub(crate) use serve::serve;
pub(crate) use threads::{CallService, CallThreads};
