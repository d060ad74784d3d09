//! A container's status in the file `status` of its monitor's directory, so that reading it does not wake the monitor.
//!
//! The monitor replaces the file after a change, at most four times a second. So a status is at most 250 ms old, unless
//! the monitor has no time to run. The file names the process that wrote it: the status of a monitor that has exited or
//! is stopped is not returned.

use std::borrow::Cow;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::wire::Status;
use cgpu_host::process::ProcessId;

/// The file's content, as JSON.
#[derive(Debug, Serialize, Deserialize)]
struct Content<'a> {
    writer: ProcessId,
    status: Cow<'a, Status>,
}

/// The file's bytes, if the process `writer` writes `status`.
///
/// # Errors
///
/// If the status can't be JSON.
pub(crate) fn encode(writer: ProcessId, status: &Status) -> serde_json::Result<Vec<u8>> {
    serde_json::to_vec(&Content { writer, status: Cow::Borrowed(status) })
}

/// Replaces the file at `path` in one step. One thread at a time may call this.
///
/// # Errors
///
/// If the file can't be made or replaced: its directory is removed when the container has exited.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(bytes)?;
    fs::rename(new, path)
}

/// The status in the file at `path`; `None` if there is none, or its writer has exited or is stopped.
#[must_use]
pub fn read(path: &Path) -> Option<Status> {
    let content: Content<'_> = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    content.writer.runs().then(|| content.status.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cgpu_core::calls::{Calls, Durations};

    fn status() -> Status {
        Status {
            version: "0.1.0".into(),
            pid: 7,
            gpus: Vec::new(),
            calls: Calls::default(),
            durations: Durations::default(),
            updates: 1,
            processes: Vec::new(),
            process_count: 0,
            end: None,
        }
    }

    #[test]
    fn a_status_is_read_while_its_writer_runs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("status");
        assert_eq!(read(&path), None);
        let own = ProcessId::own().unwrap();
        replace(&path, &encode(own, &status()).unwrap()).unwrap();
        assert_eq!(read(&path), Some(status()));
        let other = ProcessId { start_ticks: own.start_ticks - 1, ..own };
        replace(&path, &encode(other, &status()).unwrap()).unwrap();
        assert_eq!(read(&path), None, "another process had that pid");
        for bytes in [&b""[..], b"{}", b"[1"] {
            replace(&path, bytes).unwrap();
            assert_eq!(read(&path), None);
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
    }
}
