//! What outlives a worker: the journal, which is memory that the keeper holds, and the numbers of calls, files and
//! processes in it.

pub(crate) mod call_id;
pub(crate) mod kept_file;
pub mod layout;
pub(crate) mod map;
pub(crate) mod process_number;
