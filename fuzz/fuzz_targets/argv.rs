//! No command line breaks the reader, and what isn't ours reaches the real runtime whole.
#![no_main]

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use cgpu::runtime::argv::{Dialect, parse, take_own_flags};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let args: Vec<OsString> =
        data.split(|byte| *byte == 0).map(|word| OsString::from_vec(word.to_vec())).collect();
    let ours = args.iter().any(|word| word.to_string_lossy().contains("cgpu-config"));
    let taken = take_own_flags(args.clone());
    assert!(ours || taken.args == args);
    for dialect in [Dialect::Runc, Dialect::Crun] {
        let _ = parse(&taken.args, dialect);
    }
});
