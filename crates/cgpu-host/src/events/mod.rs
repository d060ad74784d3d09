//! What happened to containers, one event a fact: made, refused, resized, out of memory, killed,
//! monitor replaced, removed.
//!
//! An [`Event`] is written once, by [`EventSink::report`]: as a line of JSON into a file of bounded size
//! below the state directory ([`Store`]), and as a line of the log ([`crate::log`]). Both are made of
//! the same value, so they never disagree. Must not know what an event is decided by.

mod bucket;
mod cause;
mod event;
mod filter;
mod reader;
mod sink;
mod store;

pub use bucket::Bucket;
pub use cause::Cause;
pub use event::{Event, Kind, MONITOR_KILLED, MOST_LINE_BYTES, Share, WARNINGS, plain};
pub use filter::{Filter, Names};
pub use reader::Follower;
pub use sink::EventSink;
pub use store::{MOST_FILE_BYTES, NAMES, Store};
