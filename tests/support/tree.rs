//! Trees of files that are downloaded and made once, and copies of them that cost nothing.
//!
//! `tests/driver-files` makes them below the target directory, where every test binary finds them
//! again. No test writes to them: their files are hard links of each other. A test gets an overlay
//! in its scratch, and whatever it changes goes with the scratch.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::mount::{MsFlags, mount};

use super::{Scratch, run_with_timeout, timeout};

/// How long making one of them may take, downloads and waiting for others included.
const DOWNLOADING: Duration = Duration::from_secs(600);

/// Below the target directory, wherever that is; `CARGO_TARGET_TMPDIR` is a directory in it.
fn directory() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent();
    target.expect("it lies in the target directory").join("driver-files")
}

/// The tree of the item, made now where it isn't there yet.
///
/// # Panics
///
/// With what `tests/driver-files` says, where it can't be made.
#[track_caller]
pub(super) fn made(item: &'static str) -> PathBuf {
    static MADE: Mutex<BTreeMap<&str, PathBuf>> = Mutex::new(BTreeMap::new());
    // One that failed is tried again by the next test, which then fails with the same sentence.
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    let make = || {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/driver-files");
        let mut command = Command::new(script);
        run_with_timeout(command.arg(directory()).arg(item), DOWNLOADING).ok();
        directory().join(item)
    };
    made.entry(item).or_insert_with(make).clone()
}

/// What a file next to the trees says.
pub(super) fn said(file: &str) -> String {
    let path = directory().join(file);
    fs::read_to_string(path).expect("it is made with the tree it describes").trim().to_owned()
}

/// A tree of the scratch's own in its directory `name`, with everything that `tree` has.
pub(super) fn copy(scratch: &Scratch, name: &str, tree: &Path) -> PathBuf {
    let point = scratch.directory(name);
    let upper = scratch.directory(&format!("{name}.upper"));
    let work = scratch.directory(&format!("{name}.work"));
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        tree.display(),
        upper.display(),
        work.display()
    );
    let overlay = Some("overlay");
    if mount(overlay, &point, overlay, MsFlags::empty(), Some(options.as_str())).is_err() {
        // The temporary directory is an overlay itself, or there is no such file system.
        let source = tree.join(".");
        run_with_timeout(scratch.command("cp").arg("-a").arg(source).arg(&point), timeout()).ok();
    }
    point
}
