//! What is known of the container, most of which outlives a worker.

pub(crate) mod books;
pub(crate) mod channels;
pub(crate) mod container_state;
pub(crate) mod devices;
pub(crate) mod due;
pub(crate) mod export_files;
pub(crate) mod groups;
pub mod journal;
pub(crate) mod journal_map;
pub(crate) mod kept_file;
pub(crate) mod space;
pub(crate) mod space_ranges;
