//! What is known of the container, most of which outlives a worker.

pub(crate) mod books;
pub(crate) mod call_id;
pub(crate) mod channels;
pub(crate) mod container_state;
pub(crate) mod devices;
pub(crate) mod due;
pub(crate) mod facts;
pub(crate) mod groups;
pub mod journal;
pub(crate) mod journal_map;
pub(crate) mod kept_file;
pub(crate) mod known_names;
pub(crate) mod lane;
pub(crate) mod log_limit;
pub(crate) mod makers;
pub(crate) mod occasion;
pub(crate) mod process_number;
pub(crate) mod rest;
pub(crate) mod self_ranges;
pub(crate) mod space;
pub(crate) mod space_ranges;
pub(crate) mod tell;
