//! Driver calls of programs: what a file of recorded ones holds, how programs are followed, and what
//! of theirs can be scheduled.
//!
//! A file is gzipped JSON lines: a [`Line::Head`](corpus::Line), a `Call` or `Map` for each call, and a
//! `Tail`. Bytes are hexadecimal. Addresses were renamed and names hidden before they were written
//! ([`scrub`]).

pub mod corpus;

pub mod scrub;

pub mod follow;

pub mod objects;
