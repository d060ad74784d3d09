//! The kinds of calls: what each is, what it is charged, and how it is made.

pub(crate) mod alloc;
pub(crate) mod control;
pub(crate) mod debug;
pub(crate) mod duplicate;
pub(crate) mod export;
pub(crate) mod fb_info;
pub(crate) mod frontend;
pub(crate) mod gpu_lookup;
pub(crate) mod groups;
pub(crate) mod initialize;
pub(crate) mod lane;
pub(crate) mod left_calls;
pub(crate) mod mmap;
pub mod policy;
pub(crate) mod read_escape;
pub(crate) mod recover;
pub(crate) mod serve;
pub(crate) mod steer;
pub(crate) mod threads;
pub(crate) mod uvm;
pub(crate) mod vid_heap;
