//! `cgpu-runtime`: the OCI runtime. Its command line is the real runtime's, plus
//! `--cgpu-config FILE` among the global flags.

#![no_main]
#![allow(
    unsafe_code,
    reason = "the program begins at C's main: Rust's own would first ignore SIGPIPE and open \
              /dev/null on closed descriptors, and the real runtime would inherit both"
)]

use std::ffi::{CStr, OsStr, OsString, c_char, c_int};
use std::os::unix::ffi::OsStrExt;

#[unsafe(no_mangle)]
extern "C" fn main(argc: c_int, argv: *const *const c_char) -> c_int {
    let word = |at| -> OsString {
        // SAFETY: C hands `main` `argc` pointers at `argv`, and `at` is below `argc`.
        let text = unsafe { argv.wrapping_add(at).read() };
        // SAFETY: each of them is a string that ends in NUL and is there until we exit
        // (ISO C, 5.1.2.2.1); nothing in this program writes to it.
        let text = unsafe { CStr::from_ptr(text) };
        OsStr::from_bytes(text.to_bytes()).to_owned()
    };
    let count = usize::try_from(argc).unwrap_or(0);
    // Returns only if the call failed; the reason has been reported to the engine.
    let mut words = (0..count).map(word);
    let called = words.next().unwrap_or_default();
    cgpu::runtime::main(&called, words.collect());
    1
}
