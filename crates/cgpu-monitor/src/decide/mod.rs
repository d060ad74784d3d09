//! Decides how a call is handled: it is proxied, refused, or passed through, and what is entered for it.
//!
//! A decision is a function of the decoded call, of what was found out about the call, of the state, and of the
//! container's rules. It reads no file and no clock. A question to the driver that is needed only sometimes is given to
//! it as a function. How calls are read, made, entered and answered is in [`calls`](crate::calls) and
//! [`uvm`](crate::uvm).
//!
//! | decides by | what | file |
//! |---|---|---|
//! | the bytes of the call alone | proxied, refused, or passed through | [`verdict`] |
//! | the state and the rules | memory: how much is charged, on which GPU, and whether it fits the quota | [`memory`] |
//! | | channel groups and channels: whether there is capacity | [`channels`] |
//! | | handles of memory: duplicates, exports, imports | [`handles`] |
//! | | what nvidia-uvm maps, and managed memory | [`mappings`] |
//!
//! A [`RefusalReason`] says why a call is refused, with the words for the log and the answer for the caller. If the
//! driver would refuse a call, too, for its shape, the files of these modules give the driver's answer themselves.

mod channels;
mod handles;
mod mappings;
mod memory;
mod refusal_reason;
mod verdict;

pub(crate) use channels::{capacity_for_channel, capacity_for_group, capacity_outside_groups};
pub(crate) use handles::{
    Imported, capacity_for_handle, export_entries, imported, may_export, nth_handle, plan_import,
    unknown_objects,
};
pub(crate) use mappings::{
    NO_GPU, chargeable_mapping, freed_spans, managed_records, plan_map, uvm_flags,
};
pub(crate) use memory::{
    charged_bytes, is_within_quota, memory_asked, reserve_within_quota, semaphore_surface,
    shown_memory,
};
pub(crate) use refusal_reason::RefusalReason;
pub(crate) use verdict::refusal;
pub use verdict::{Continued, Verdict, judge, judge_uvm};
