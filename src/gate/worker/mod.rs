//! The worker: answers the driver calls of one container.

use std::io;

/// The keeper's socket.
pub const KEEPER_FD: i32 = 3;
/// The settings.
pub const SETTINGS_FD: i32 = 4;
/// Bytes of the memory that outlives a worker; what isn't used takes none.
pub const JOURNAL_BYTES: u64 = 8 << 20;

/// The memory that outlives a worker.
pub const JOURNAL_FD: i32 = 5;

/// Answers calls until the keeper says that it is enough.
///
/// # Errors
///
/// Where it can't begin, or can't go on.
pub fn main() -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
