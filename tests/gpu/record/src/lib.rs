//! Recorded driver calls: what a file of the corpus holds.
//!
//! A file is gzipped JSON lines: a [`Line::Head`], a [`Line::Call`] or [`Line::Map`] for each call, and a
//! [`Line::Tail`]. Bytes are hexadecimal. Addresses were renamed and names hidden before they were written
//! ([`scrub`]).

pub mod corpus;

pub mod scrub;
