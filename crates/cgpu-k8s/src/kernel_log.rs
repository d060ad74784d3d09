//! Reads the kernel's log: [`KernelLog`].

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::Errno;

/// The most bytes that one read takes: more than a record of `/dev/kmsg` has.
const CHUNK: usize = 16 << 10;

/// The kernel's log, from the first line that is still there.
#[derive(Debug)]
pub(crate) struct KernelLog {
    file: File,
    /// The beginning of a line whose end hasn't come.
    rest: Vec<u8>,
}

impl KernelLog {
    /// `/dev/kmsg`, or a file of its form.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
        Ok(KernelLog { file, rest: Vec::new() })
    }

    /// The messages that have come since.
    pub(crate) fn read(&mut self) -> io::Result<Vec<String>> {
        let mut chunk = [0; CHUNK];
        loop {
            match self.file.read(&mut chunk) {
                Ok(0) => break,
                Ok(count) => self.rest.extend_from_slice(&chunk[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Lines were lost; the next read goes on with those that are there.
                Err(error) if Errno::from_io_error(&error) == Some(Errno::PIPE) => {}
                Err(error) => return Err(error),
            }
        }
        let Some(end) = self.rest.iter().rposition(|byte| *byte == b'\n') else {
            return Ok(Vec::new());
        };
        let whole: Vec<u8> = self.rest.drain(..=end).collect();
        let text = String::from_utf8_lossy(&whole);
        // `PRIORITY,NUMBER,MICROSECONDS,FLAGS;MESSAGE`
        let message = |line: &str| line.split_once(';').map(|(_, message)| message.to_owned());
        Ok(text.lines().filter_map(message).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn lines_come_once_and_whole() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"6,1,10,-;first\n SUBSYSTEM=pci\n4,2,20,-;second; of two\n4,3,").unwrap();
        let mut log = KernelLog::open(file.path()).unwrap();
        assert_eq!(log.read().unwrap(), ["first", "second; of two"]);
        assert!(log.read().unwrap().is_empty());
        file.write_all(b"30,-;third\n").unwrap();
        assert_eq!(log.read().unwrap(), ["third"]);
        assert!(KernelLog::open(Path::new("/nonexistent")).is_err());
    }
}
