//! Decides what becomes of a call. Pure: a decision is given the decoded call, what was found out about the call, the
//! books and the container's rules. It returns a verdict, what is to be entered, or why the call is refused. How calls
//! are read, made, entered and answered is not known here, but in [`calls`](crate::monitor::calls).
//!
//! | decided by | what | file |
//! |---|---|---|
//! | the bytes of the call alone | executed, refused, or continues | [`verdict`] |
//! | the books and the rules | memory: how much is charged, on which GPU, and whether the quota has room | [`memory`] |
//! | | channel groups and channels: whether there is room | [`channels`] |
//! | | names of memory: duplicates, exports, imports | [`names`] |
//! | | what nvidia-uvm maps, and managed memory | [`mappings`] |
//!
//! [`Denial`] has every reason to refuse a call, with the words for the log and the answer for the caller.

mod channels;
mod denial;
mod mappings;
mod memory;
mod names;
mod verdict;

pub(crate) use channels::{room_for_channel, room_for_group, room_outside_groups};
pub(crate) use denial::Denial;
pub(crate) use mappings::{managed_entries, mapped_memory, plan_map, uvm_flags};
pub(crate) use memory::{charge, memory_asked, reserve, semaphore_surface, within_quota};
pub(crate) use names::{export_entries, plan_import, room_for_name, unknown_objects};
pub(crate) use verdict::refusal;
pub use verdict::{Continued, Verdict, judge, judge_uvm};
