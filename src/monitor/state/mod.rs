//! What the monitor knows of the container. Most of it outlives a worker.

pub(crate) mod books;
pub(crate) mod channels;
pub(crate) mod container_state;
pub(crate) mod devices;
pub(crate) mod due;
pub(crate) mod groups;
pub(crate) mod lane;
pub(crate) mod makers;
pub(crate) mod occasion;
pub(crate) mod rest;
pub(crate) mod self_ranges;
pub(crate) mod space;
pub(crate) mod space_ranges;
