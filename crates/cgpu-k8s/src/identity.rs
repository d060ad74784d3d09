//! Which file it is, and whether it is still the same: [`Identity`].

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Device, inode, and when it was changed last, in seconds and nanoseconds. A file that was renamed into the place of
/// another, or was written, has another one.
pub(crate) type Identity = (u64, u64, i64, i64);

/// That of a file, or of a link; `None` if there is none.
pub(crate) fn identity(path: &Path) -> Option<Identity> {
    fs::symlink_metadata(path).ok().map(of)
}

/// That of what a link leads to; `None` if there is nothing.
pub(crate) fn identity_behind(path: &Path) -> Option<Identity> {
    fs::metadata(path).ok().map(of)
}

fn of(meta: Metadata) -> Identity {
    (meta.dev(), meta.ino(), meta.ctime(), meta.ctime_nsec())
}
