//! Our own log: what was given, taken back and noticed, for the host's administrator.
//!
//! Errors of a create don't come here but to the engine; see `report`. The
//! file is opened when the first program that has something to do starts; a log that
//! can't be opened stops nothing.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Mutex;

use tracing_subscriber::fmt::time::SystemTime;

/// Sends events to the file `path` from now on; nowhere where `path` is empty.
pub fn init(path: &str) {
    if path.is_empty() {
        return;
    }
    let Ok(file) = OpenOptions::new().append(true).create(true).mode(0o640).open(path) else {
        return;
    };
    let subscriber = tracing_subscriber::fmt()
        .with_writer(Mutex::new(file))
        .with_ansi(false)
        .with_target(false)
        .with_timer(SystemTime)
        .finish();
    // Only a second call could fail, and then the first one's file is as good.
    let _ = tracing::subscriber::set_global_default(subscriber);
}
