//! Files of the corpus, written and read.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Most bytes of a file, compressed.
pub const MAX_FILE_BYTES: u64 = 2 << 20;

/// What the end of a file may take.
const TAIL_BYTES: u64 = 4096;

/// Bytes, written as hexadecimal digits.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Bytes(pub Vec<u8>);

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        serializer.serialize_str(&text)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let pairs = text.as_bytes().chunks(2).map(|pair| {
            std::str::from_utf8(pair).ok().and_then(|pair| u8::from_str_radix(pair, 16).ok())
        });
        let bytes: Option<Vec<u8>> = pairs.collect();
        bytes.map(Bytes).ok_or_else(|| serde::de::Error::custom("no hexadecimal digits"))
    }
}

/// Bytes at one place, before a call and after it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copies {
    /// As the caller left them.
    pub before: Bytes,
    /// As the driver left them; nothing where they are the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<Bytes>,
}

impl Copies {
    /// What was there after the call.
    #[must_use]
    pub fn after(&self) -> &[u8] {
        self.after.as_ref().map_or(&self.before.0, |after| &after.0)
    }
}

/// An ioctl of one of the driver's files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// The file: `nvidiactl`, `nvidia0`, `nvidia-uvm`.
    pub node: String,
    /// The process, counted from 0.
    pub process: u32,
    /// The lower half of the ioctl's second argument.
    pub request: u32,
    /// What the system call returned: 0, or less the error's number.
    pub result: i64,
    /// Its struct.
    pub bytes: Copies,
    /// The struct of the call that it wraps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wrapped: Option<Copies>,
    /// The parameters that the struct points at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub params: Option<Copies>,
    /// The arrays that the parameters point at.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pieces: Vec<Copies>,
}

/// An mmap of one of the driver's files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Map {
    pub node: String,
    /// The process, counted from 0.
    pub process: u32,
    /// Bytes.
    pub length: u64,
    /// `PROT_*`.
    pub protection: u64,
    /// `MAP_*`.
    pub flags: u64,
    /// Where in the file; an address where it equals one.
    pub offset: u64,
    /// The address, or less the error's number.
    pub result: i64,
}

/// A line of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Line {
    Head {
        /// The driver's version.
        driver: String,
        /// What was run.
        program: Vec<String>,
    },
    Call(Box<Call>),
    Map(Map),
    Tail {
        /// Calls and mappings that were seen.
        seen: u64,
        /// Those of them that were like ones before, and were left out.
        repeated: u64,
        /// Those that were left out since the file was full.
        cut_off: u64,
    },
}

/// Writes a file that doesn't grow too large.
#[derive(Debug)]
pub struct Writer {
    encoder: GzEncoder<File>,
    unflushed_bytes: u64,
    full: bool,
}

impl Writer {
    /// Begins a file.
    ///
    /// # Errors
    ///
    /// Where it can't be made.
    pub fn create(path: &Path, head: &Line) -> io::Result<Self> {
        let encoder = GzEncoder::new(File::create(path)?, Compression::best());
        let mut writer = Writer { encoder, unflushed_bytes: 0, full: false };
        writer.put(head)?;
        Ok(writer)
    }

    fn put(&mut self, line: &Line) -> io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        self.unflushed_bytes += text.len() as u64;
        self.encoder.write_all(&text)
    }

    fn written_bytes(&self) -> io::Result<u64> {
        Ok(self.encoder.get_ref().metadata()?.len())
    }

    /// Adds a line, and returns whether it fitted.
    ///
    /// # Errors
    ///
    /// If the file can't be written.
    pub fn add(&mut self, line: &Line) -> io::Result<bool> {
        if self.full {
            return Ok(false);
        }
        // What the compressor still holds has no size; it's asked for now and then.
        if self.unflushed_bytes > MAX_FILE_BYTES / 8 {
            self.encoder.flush()?;
            self.unflushed_bytes = 0;
        }
        let most_bytes = MAX_FILE_BYTES - TAIL_BYTES - MAX_FILE_BYTES / 4;
        self.full = self.written_bytes()? >= most_bytes;
        if !self.full {
            self.put(line)?;
        }
        Ok(!self.full)
    }

    /// Ends the file; its bytes.
    ///
    /// # Errors
    ///
    /// Where it can't be written.
    pub fn finish(mut self, tail: &Line) -> io::Result<u64> {
        self.put(tail)?;
        Ok(self.encoder.finish()?.metadata()?.len())
    }
}

/// The lines of a file.
///
/// # Errors
///
/// Where it can't be read, or a line isn't known.
pub fn read(path: &Path) -> io::Result<Vec<Line>> {
    let lines = BufReader::new(GzDecoder::new(File::open(path)?)).lines();
    lines.map(|line| Ok(serde_json::from_str(&line?)?)).collect()
}
