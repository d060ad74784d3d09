//! The verbs of `cgpu`, a file each: parse and print only.

pub mod gpus;
