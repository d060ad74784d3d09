//! journald as a place for the log: each line is a datagram to its socket, in its native protocol.
//!
//! No process waits for journald: if it has stopped and its queue is full, a line is lost. MESSAGE is
//! what the log's file would have; each field stands next to it as `CGPU_FIELD`.

use std::fmt::Debug;
use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::layer::Context;

use super::fields::Fields;

/// Where journald listens.
pub(super) const SOCKET: &str = "/run/systemd/journal/socket";

/// Most bytes of a field.
const MOST_BYTES: usize = 4096;

/// Sends lines to journald.
#[derive(Debug)]
pub(super) struct Journald {
    socket: UnixDatagram,
    path: PathBuf,
    fields: Fields,
}

impl Journald {
    /// By the socket at `path`; lines have the form that `fields` gives them.
    ///
    /// # Errors
    ///
    /// If no socket can be made. Whether a process listens shows with each line.
    pub(super) fn new(path: impl Into<PathBuf>, fields: Fields) -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        Ok(Journald { socket, path: path.into(), fields })
    }
}

impl<S: Subscriber> Layer<S> for Journald {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut message = String::new();
        if self.fields.format_fields(Writer::new(&mut message), event).is_err() {
            return;
        }
        let mut found = Found::default();
        event.record(&mut found);
        if let Some(id) = self.fields.id().filter(|_| !found.has("id")) {
            found.0.push(("id".into(), id.into()));
        }
        // If this fails, there is no place left to report it.
        let bytes = datagram(*event.metadata().level(), &message, &found.0);
        let _ = self.socket.send_to(&bytes, &self.path);
    }
}

/// The fields of an event, but for its message.
#[derive(Debug, Default)]
struct Found(Vec<(String, String)>);

impl Found {
    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(found, _)| found == name)
    }

    fn add(&mut self, field: &Field, value: String) {
        if field.name() != "message" {
            self.0.push((field.name().to_owned(), value));
        }
    }
}

impl Visit for Found {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.add(field, format!("{value:?}"));
    }
}

/// A datagram of journald's native protocol (systemd's "Native Journal Protocol"). Pure.
fn datagram(level: Level, message: &str, fields: &[(String, String)]) -> Vec<u8> {
    // As syslog(3) numbers them.
    let priority = match level {
        Level::ERROR => "3",
        Level::WARN => "4",
        Level::INFO => "6",
        Level::DEBUG | Level::TRACE => "7",
    };
    let mut bytes = Vec::new();
    for (name, value) in
        [("MESSAGE", message), ("PRIORITY", priority), ("SYSLOG_IDENTIFIER", "cgpu")]
    {
        add(&mut bytes, name, value);
    }
    for (name, value) in fields {
        let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' };
        add(&mut bytes, &format!("CGPU_{}", name.chars().map(plain).collect::<String>()), value);
    }
    bytes
}

fn add(bytes: &mut Vec<u8>, name: &str, value: &str) {
    let value = value.get(..value.floor_char_boundary(MOST_BYTES)).unwrap_or_default();
    bytes.extend_from_slice(name.as_bytes());
    if value.contains('\n') {
        bytes.push(b'\n');
        bytes.extend_from_slice(&(value.len() as u64).to_le_bytes());
    } else {
        bytes.push(b'=');
    }
    bytes.extend_from_slice(value.as_bytes());
    bytes.push(b'\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::prelude::*;

    /// A value of several lines adds no field of its own.
    #[test]
    fn multiline_value_adds_no_field() {
        let fields = [("driver_files".to_owned(), "a\nPRIORITY=0".to_owned())];
        let bytes = datagram(Level::WARN, "what happened", &fields);
        let text =
            b"MESSAGE=what happened\nPRIORITY=4\nSYSLOG_IDENTIFIER=cgpu\nCGPU_DRIVER_FILES\n";
        let expected = [&text[..], &12_u64.to_le_bytes(), b"a\nPRIORITY=0\n"].concat();
        assert_eq!(bytes, expected);
    }

    /// Each line is a datagram with its fields, and no writer waits for the reader.
    #[test]
    fn each_line_is_a_datagram_without_blocking() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let reader = UnixDatagram::bind(&path).unwrap();
        let journald = Journald::new(&path, Fields::of(Some("3f2a"))).unwrap();
        let subscriber = tracing_subscriber::registry().with(journald);
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(pid = 7, "refused: {}", "x");
            // The queue is full after a few, and no process reads.
            for _ in 0..10_000 {
                tracing::warn!(id = "other", "killed");
            }
        });
        let mut bytes = [0; 1000];
        let mut text = || {
            let count = reader.recv(&mut bytes).unwrap();
            String::from_utf8(bytes[..count].to_vec()).unwrap()
        };
        assert_eq!(
            text(),
            "MESSAGE=refused: x pid=7 id=\"3f2a\"\nPRIORITY=6\nSYSLOG_IDENTIFIER=cgpu\nCGPU_PID=7\n\
             CGPU_ID=3f2a\n"
        );
        let other = text();
        assert!(other.starts_with("MESSAGE=killed id=\"other\"\nPRIORITY=4\n"), "{other}");
        assert!(other.ends_with("\nCGPU_ID=other\n"), "{other}");
    }
}
