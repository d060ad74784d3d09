//! What outlives a worker: the journal, which is memory that the keeper holds, and the numbers of calls, files and
//! processes in it.

mod call_id;
mod kept_file;
mod layout;
mod map;
mod process_number;

#[cfg(test)]
pub(crate) use call_id::tests::trace;
pub(crate) use call_id::{CallObject, Fingerprint, Registers, Trace, nth_handle};
pub(crate) use kept_file::KeptFile;
pub use layout::JOURNAL_BYTES;
pub(crate) use layout::{HALF_BYTES, Maker, RECORD_BYTES, Reach, Record, SLOTS, Stage};
#[cfg(test)]
pub(crate) use layout::{HEAD_BYTES, TRACE_PLACES, read_records};
#[cfg(test)]
pub(crate) use map::tests::new_journal;
pub(crate) use map::{CallReservation, Count, JournalMap, LeftOut, Log, Slot, share_heap};
