//! What outlives a worker: the memory that the keeper holds for it, and the numbers by which calls, files and
//! processes are known there.

pub(crate) mod call_id;
pub(crate) mod kept_file;
pub mod layout;
pub(crate) mod map;
pub(crate) mod process_number;
