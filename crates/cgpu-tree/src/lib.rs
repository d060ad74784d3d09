//! `cgpu-tree`: GPUs and the containers that share them as a tree of files, laid out as the procfs tree of
//! Alibaba's kernel module is, for the scripts that know that.
//!
//! Owns the layout, what each file says, and what a write to it does. Must not know how a change is
//! made: see [`cgpu::host::Host`]. A crate of its own, so that no runtime links FUSE.

mod containers;
mod files;
mod host;
mod mount;
mod mount_point;
mod node;
mod numbers;
mod write_request;

pub use mount::{Args, run};
