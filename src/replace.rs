//! Files that readers see as they were or as they will be, never in between.
//!
//! Owns writing beside a file and renaming. Must not know what is written.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Makes `bytes` the content of the file at `path`, with the permissions `mode`.
///
/// # Errors
///
/// Where it can't be written; then it is what it was.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(name);
    // What a killed process of our number left behind would make `create_new` fail.
    match fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let written = (|| {
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(mode).open(&temporary)?;
        file.write_all(bytes)?;
        fs::rename(&temporary, path)
    })();
    if written.is_err() {
        // The first error is the one to tell.
        let _ = fs::remove_file(&temporary);
    }
    written
}
