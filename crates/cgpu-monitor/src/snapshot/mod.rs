//! What a monitor hands to the program that goes on in its process after an update: a [`Snapshot`], as bytes. Pure.
//!
//! The monitor writes it between two calls, and executes the new program, which keeps the process's descriptors. The
//! snapshot names them by number.

mod counters;
mod record;

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub(crate) use counters::{Count, CounterValues, Counters, LeftOut};
pub(crate) use record::{Creator, Reach, Record};

use crate::gate::settings::Settings;
use cgpu_host::process::ProcessId;

/// The first bytes of a snapshot.
const MAGIC: [u8; 8] = *b"cgpusnap";

/// The number of the format: of [`Snapshot`], of all that it holds, and of what its numbers mean. Whatever changes one
/// of them changes this number. A program of another format is not executed.
const FORMAT: u32 = 3;

/// A descriptor's number.
pub(crate) type Descriptor = i32;

/// What a monitor knows and holds between two calls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Snapshot {
    /// The version of the program that wrote it.
    pub(crate) version: String,
    pub(crate) settings: Settings,
    /// How often the monitor's program was replaced, this time included.
    pub(crate) updates: u64,
    /// The records that recreate the state.
    pub(crate) records: Vec<Record>,
    pub(crate) counters: CounterValues,
    /// Replies that wait for their threads.
    pub(crate) replies: Vec<RetainedReply>,
    /// Threads, and the fingerprints of their last calls as they were answered, where signals interrupt callers.
    pub(crate) answered: Vec<(ProcessId, u64)>,
    pub(crate) descriptors: FileNumbers,
    /// The launcher; `None` if it has exited.
    pub(crate) launcher: Option<ProcessId>,
    /// Whether a listener has ever come.
    pub(crate) had_listener: bool,
    pub(crate) next_listener: u64,
}

/// The descriptors that the new program goes on with.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileNumbers {
    /// The socket on which runtimes connect.
    pub(crate) entry: Descriptor,
    /// The socket for questions.
    pub(crate) control: Descriptor,
    /// The connection of the command that asked for the update.
    pub(crate) asker: Descriptor,
    /// Connections of runtimes.
    pub(crate) runtimes: Vec<Descriptor>,
    /// The seccomp listeners, each with its number.
    pub(crate) listeners: Vec<(u64, Descriptor)>,
    /// Files that memory was exported to, each with its number.
    pub(crate) exports: Vec<(u64, Descriptor)>,
    /// Files of nvidia-uvm, each with its number.
    pub(crate) uvm_files: Vec<(u32, Descriptor)>,
    /// The monitor's client of the driver, if it is open.
    pub(crate) client: Option<ClientDescriptors>,
}

/// The reply to a call whose caller a signal has interrupted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RetainedReply {
    /// The thread that made the call.
    pub(crate) thread: ProcessId,
    /// The fingerprints of the call as it was read, and as it was answered.
    pub(crate) seen: [u64; 2],
    /// What is to be written to the caller's memory: addresses and bytes.
    pub(crate) output: Vec<(u64, Vec<u8>)>,
    /// Error and flags of the reply.
    pub(crate) reply: (i32, u32),
    /// Whether the driver had done the call.
    pub(crate) is_ok: bool,
    /// Client, parent and handle of the objects that the call made.
    pub(crate) made: Vec<(u32, u32, u32)>,
    /// The file by which they are freed, if there are any.
    pub(crate) file: Option<Descriptor>,
}

/// The monitor's client of the driver.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ClientDescriptors {
    /// Its handle.
    pub(crate) client: u32,
    /// Its file.
    pub(crate) control: Descriptor,
    /// The open nodes of GPUs.
    pub(crate) gpu_files: Vec<Descriptor>,
    /// The handles of device and subdevice, by the container's GPUs.
    pub(crate) gpus: Vec<Option<(u32, u32)>>,
}

/// Why a program can't go on with a snapshot.
#[derive(Debug, Error)]
pub(crate) enum SnapshotError {
    /// The bytes are no snapshot.
    #[error("this is no snapshot of a monitor")]
    NoSnapshot,
    /// A program of another format wrote it.
    #[error("the snapshot has format {found}, and this version's is {FORMAT}")]
    OtherFormat {
        /// Its format.
        found: u32,
    },
    /// The format is this one's, and the content isn't.
    #[error("the snapshot is damaged: {source}")]
    Damaged {
        /// What can't be read.
        #[source]
        source: postcard::Error,
    },
}

impl Snapshot {
    /// All descriptors that it names.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = Descriptor> {
        let of = &self.descriptors;
        let client = of.client.iter();
        let client = client.flat_map(|of| std::iter::once(&of.control).chain(&of.gpu_files));
        [of.entry, of.control, of.asker]
            .into_iter()
            .chain(of.runtimes.iter().copied())
            .chain(of.listeners.iter().map(|(_, descriptor)| *descriptor))
            .chain(of.exports.iter().map(|(_, descriptor)| *descriptor))
            .chain(of.uvm_files.iter().map(|(_, descriptor)| *descriptor))
            .chain(client.copied())
            .chain(self.replies.iter().filter_map(|reply| reply.file))
    }

    /// The snapshot as bytes.
    ///
    /// # Errors
    ///
    /// If it can't be encoded.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, SnapshotError> {
        let content = postcard::to_allocvec(self);
        let content = content.map_err(|source| SnapshotError::Damaged { source })?;
        Ok([&MAGIC[..], &FORMAT.to_le_bytes(), &content].concat())
    }

    /// The snapshot that the bytes are.
    ///
    /// # Errors
    ///
    /// If they are none of this version's.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, SnapshotError> {
        let rest = bytes.strip_prefix(&MAGIC[..]).ok_or(SnapshotError::NoSnapshot)?;
        let (format, content) = rest.split_first_chunk().ok_or(SnapshotError::NoSnapshot)?;
        match u32::from_le_bytes(*format) {
            FORMAT => {}
            found => return Err(SnapshotError::OtherFormat { found }),
        }
        postcard::from_bytes(content).map_err(|source| SnapshotError::Damaged { source })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::gate::settings::Managed;
    use cgpu_core::ledger::{Client, Entry, Handle};

    fn snapshot() -> Snapshot {
        let settings = Settings {
            id: "test".into(),
            short_id: "test00000000".into(),
            name: Some("a name".into()),
            root: "/run/runc".into(),
            state_dir: "/run/cgpu".into(),
            bundle: "/bundle".into(),
            place: "/run/cgpu/gate/test00000000".into(),
            driver: "535.161.08".into(),
            managed: Managed::Refuse,
            channel_groups: 256,
            gpus: vec![],
            nodes: vec![],
            config: None,
            processor_limit: None,
            processor_shares: None,
            started_in: String::new(),
            launcher: ProcessId { pid: 1, start_ticks: 2 },
            state_file: None,
            spares_host: true,
            interruptible: false,
            log: String::new(),
        };
        let free = Entry::Free { client: Client(1), handle: Handle(u32::MAX) };
        Snapshot {
            version: "0.1.0".into(),
            settings,
            updates: 3,
            records: vec![Record::Ledger(free), Record::Bound { file: 7 }],
            counters: CounterValues::default(),
            replies: vec![RetainedReply {
                thread: ProcessId { pid: 8, start_ticks: 9 },
                seen: [1, u64::MAX],
                output: vec![(0x1000, vec![1, 2])],
                reply: (-4, 0),
                is_ok: true,
                made: vec![(1, 2, 3)],
                file: Some(16),
            }],
            answered: vec![(ProcessId { pid: 8, start_ticks: 9 }, 4)],
            descriptors: FileNumbers {
                entry: 3,
                control: 4,
                asker: 9,
                runtimes: vec![10],
                listeners: vec![(0, 11)],
                exports: vec![(5, 12)],
                uvm_files: vec![(6, 13)],
                client: Some(ClientDescriptors {
                    client: 0xc1d0_0001,
                    control: 14,
                    gpu_files: vec![15],
                    gpus: vec![None, Some((1, 2))],
                }),
            },
            launcher: None,
            had_listener: true,
            next_listener: 1,
        }
    }

    #[test]
    fn it_is_read_as_it_was_written() {
        let written = snapshot();
        let read = Snapshot::decode(&written.encode().unwrap()).unwrap();
        assert_eq!(read, written);
        assert_eq!(read.descriptors().collect::<Vec<_>>(), [3, 4, 9, 10, 11, 12, 13, 14, 15, 16]);
    }

    /// A snapshot of another format, and bytes that are no snapshot, are refused in words.
    #[test]
    fn other_snapshot_formats_and_bytes_are_refused() {
        let mut bytes = snapshot().encode().unwrap();
        let refused = |bytes: &[u8]| Snapshot::decode(bytes).unwrap_err().to_string();
        assert!(refused(&bytes[..bytes.len() - 1]).starts_with("the snapshot is damaged"));
        bytes[8] += 1;
        assert_eq!(refused(&bytes), "the snapshot has format 4, and this version's is 3");
        assert_eq!(refused(b"#!/bin/sh"), "this is no snapshot of a monitor");
    }

    /// What the bytes of a snapshot are made by, without comments and tests.
    const SOURCES: [&str; 6] = [
        include_str!("mod.rs"),
        include_str!("record.rs"),
        include_str!("counters.rs"),
        include_str!("../../../cgpu-core/src/ledger/entry.rs"),
        include_str!("../../../cgpu-core/src/ledger/process.rs"),
        include_str!("../gate/settings.rs"),
    ];

    /// The bytes name no fields: a program of another layout would read nonsense, and notice nothing. If this fails,
    /// and something was added, removed, moved or means something else now, raise [`FORMAT`]. In any case put the new
    /// number here.
    #[test]
    fn whatever_changes_the_format_changes_its_number() {
        let code = SOURCES.map(|text| text.split("#[cfg(test)]\nmod tests").next().unwrap_or(text));
        let lines = code.iter().flat_map(|code| code.lines()).map(str::trim);
        let bytes = lines.filter(|line| !line.starts_with("//")).flat_map(str::bytes);
        // FNV-1a.
        let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        let hash = bytes.fold(0xcbf2_9ce4_8422_2325, step);
        assert_eq!((FORMAT, hash), (3, 0x1b20_5a94_fc76_1ec4), "{hash:#x}");
    }

    proptest! {
        #[test]
        fn no_bytes_are_too_much(bytes in any::<Vec<u8>>()) {
            let _ = Snapshot::decode(&[&MAGIC[..], &FORMAT.to_le_bytes(), &bytes].concat());
        }
    }
}
