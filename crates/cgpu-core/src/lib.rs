//! What cgpu decides: requests, plans, shares of computing time, and what a container has of its GPUs.
//!
//! Decisions are functions of what they are given. The crate has no standard library (`no_std`), so the compiler holds that
//! it reads no file, clock or process; the crates above read these, and do what was decided. The modules stand in reading
//! order, and each uses those above it alone.

#![cfg_attr(not(test), no_std)]
#![warn(missing_docs)]

extern crate alloc;

pub mod units;

pub mod processor;

pub mod request;

pub mod gpu;

pub mod plan;

pub mod sched;

pub mod ledger;

pub mod calls;
