//! The monitor's threads: small stacks, and names.

use std::io;

/// Bytes of a thread's stack.
const STACK_BYTES: usize = 128 << 10;

/// Starts a thread that nobody waits for: it may hang in the driver. Fails where the kernel starts no thread.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(STACK_BYTES);
    thread.spawn(work).map(drop)
}
