//! The keeper: holds what must not be lost, and sees that a worker is there.

use std::io;

/// Keeps a container's monitor until the container is gone.
///
/// # Errors
///
/// Where it can't begin.
pub fn main() -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
