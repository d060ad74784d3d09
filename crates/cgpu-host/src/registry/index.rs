//! What admission needs of every record, in one file. Pure.
//!
//! The records are the truth; the index is derived from them and can be made again at
//! any time. It exists because reading a thousand files takes ten milliseconds, and
//! this takes a tenth of one. A header says which boot and which state of the records'
//! directory it fits; an index that doesn't fit, or that doesn't parse, is no index.
//!
//! ```text
//! cgpu-index 2 BOOT_ID MTIME_NS COUNT
//! FILE \t ID \t SHORT_ID \t PID:START | launched:PID:START:STATE_FILE | until:S | until:S:PID:START | bundle | over \t WEIGHT, with ! of high priority \t UUID=BYTES,UUID=whole
//! ```

use std::fmt::Write;

use super::lifecycle;
use super::record::{Holder, Record, decoded, encoded};
use crate::process::ProcessId;
use cgpu_core::plan::Holding;

/// Which state of the world an index describes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stamp {
    pub(super) boot_id: String,
    /// When the records' directory last changed, in nanoseconds.
    pub(super) changed_ns: i128,
}

impl Stamp {
    /// Whether whatever changes from `now_ns` on shows by another stamp, which a file system's clock of
    /// few ticks a second doesn't say at once. `now_ns` is in nanoseconds since 1970.
    #[must_use]
    pub fn is_settled(&self, now_ns: i128) -> bool {
        const TICKS_NS: i128 = 50_000_000;
        now_ns - self.changed_ns > TICKS_NS
    }
}

/// A record as far as admission and collection need it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) file: String,
    pub(super) short_id: String,
    pub(super) life: Life,
    pub(super) holding: Holding,
    /// All of the above as the index has it: most entries are only copied from one index
    /// to the next.
    line: String,
}

/// How to see whether the record is still needed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Life {
    /// As long as this process lives.
    Process(ProcessId),
    /// As long as this process lives, or the one that the runtime's state then names.
    Launched {
        by: ProcessId,
        /// Percent-encoded.
        state_file: String,
    },
    /// Until this many seconds after boot, and no longer than this process lives.
    Until(u64, Option<ProcessId>),
    /// As long as its bundle is there.
    Bundle,
    /// No longer: it was made in an earlier boot.
    Over,
}

impl Entry {
    pub(super) fn of(record: &Record, boot_id: &str) -> Self {
        let life = match &record.holder {
            _ if lifecycle::is_of_another_boot(record, boot_id) => Life::Over,
            Holder::Launched { by, state_file } => {
                Life::Launched { by: *by, state_file: encoded(&state_file.to_string_lossy()) }
            }
            Holder::Reserved { by: process }
            | Holder::Leaked { monitor: process }
            | Holder::Active { init: Some(process) } => Life::Process(*process),
            Holder::Announced { until_boot_s, by } => Life::Until(*until_boot_s, *by),
            Holder::Active { init: None } => Life::Bundle,
        };
        Entry::new(record.key.file_name(), record.short_id.clone(), life, record.holding())
    }

    fn new(file: String, short_id: String, life: Life, holding: Holding) -> Self {
        let line = line(&file, &short_id, &life, &holding);
        Entry { file, short_id, life, holding, line }
    }
}

pub(super) fn write(stamp: &Stamp, entries: &[Entry]) -> String {
    let Stamp { boot_id, changed_ns } = stamp;
    let mut text =
        String::with_capacity(128 + entries.iter().map(|e| e.line.len() + 1).sum::<usize>());
    // Writing to a String never fails.
    let _ = writeln!(text, "cgpu-index 2 {boot_id} {changed_ns} {}", entries.len());
    for entry in entries {
        text.push_str(&entry.line);
        text.push('\n');
    }
    text
}

/// An entry's line, without its end.
fn line(file: &str, short_id: &str, life: &Life, holding: &Holding) -> String {
    let mut line = format!("{file}\t{}\t{short_id}\t", encoded(&holding.id));
    let _ = match life {
        Life::Process(process) => write!(line, "{}:{}", process.pid, process.start_ticks),
        Life::Launched { by, state_file } => {
            write!(line, "launched:{}:{}:{state_file}", by.pid, by.start_ticks)
        }
        Life::Until(seconds, None) => write!(line, "until:{seconds}"),
        Life::Until(seconds, Some(by)) => {
            write!(line, "until:{seconds}:{}:{}", by.pid, by.start_ticks)
        }
        Life::Bundle => write!(line, "bundle"),
        Life::Over => write!(line, "over"),
    };
    let priority = if holding.high_priority { "!" } else { "" };
    let _ = write!(line, "\t{}{priority}\t", holding.weight);
    for (at, (uuid, limit)) in holding.gpus.iter().enumerate() {
        let comma = if at > 0 { "," } else { "" };
        let _ = match limit {
            Some(bytes) => write!(line, "{comma}{}={bytes}", encoded(uuid)),
            None => write!(line, "{comma}{}=whole", encoded(uuid)),
        };
    }
    line
}

/// The entries of `text`, if it is whole and describes the world of `stamp`.
pub(super) fn read(text: &str, stamp: &Stamp) -> Option<Vec<Entry>> {
    let mut lines = text.strip_suffix('\n')?.split('\n');
    let header = lines.next()?;
    let count = header.rsplit(' ').next()?;
    if header != format!("cgpu-index 2 {} {} {count}", stamp.boot_id, stamp.changed_ns) {
        return None;
    }
    let entries: Vec<Entry> = lines.map(entry).collect::<Option<_>>()?;
    (count.parse() == Ok(entries.len())).then_some(entries)
}

fn entry(text: &str) -> Option<Entry> {
    let mut fields = text.split('\t');
    let mut next = || fields.next();
    let (file, id, short_id, life, weight, gpus) =
        (next()?, next()?, next()?, next()?, next()?, next()?);
    let life = match life.split_once(':') {
        None if life == "bundle" => Life::Bundle,
        None if life == "over" => Life::Over,
        Some(("until", rest)) => match rest.split_once(':') {
            None => Life::Until(rest.parse().ok()?, None),
            Some((seconds, by)) => {
                let (pid, start) = by.split_once(':')?;
                Life::Until(seconds.parse().ok()?, Some(process(pid, start)?))
            }
        },
        Some(("launched", rest)) => {
            let mut words = rest.splitn(3, ':');
            let by = process(words.next()?, words.next()?)?;
            Life::Launched { by, state_file: words.next()?.to_owned() }
        }
        Some((pid, start)) => Life::Process(process(pid, start)?),
        None => return None,
    };
    let gpus = gpus.split(',').filter(|gpu| !gpu.is_empty()).map(|gpu| {
        let (uuid, limit) = gpu.split_once('=')?;
        let limit = if limit == "whole" { None } else { Some(limit.parse().ok()?) };
        Some((decoded(uuid)?, limit))
    });
    let (weight, high_priority) = match weight.strip_suffix('!') {
        Some(weight) => (weight, true),
        None => (weight, false),
    };
    Some(Entry {
        file: file.to_owned(),
        short_id: short_id.to_owned(),
        life,
        holding: Holding {
            id: decoded(id)?,
            gpus: gpus.collect::<Option<_>>()?,
            weight: weight.parse().ok()?,
            high_priority,
        },
        line: text.to_owned(),
    })
}

fn process(pid: &str, start_ticks: &str) -> Option<ProcessId> {
    Some(ProcessId { pid: pid.parse().ok()?, start_ticks: start_ticks.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stamp() -> Stamp {
        Stamp { boot_id: "b-1".into(), changed_ns: 5 }
    }

    fn entries() -> impl Strategy<Value = Vec<Entry>> {
        let life = prop_oneof![
            (any::<i32>(), any::<u64>())
                .prop_map(|(pid, start_ticks)| Life::Process(ProcessId { pid, start_ticks })),
            (any::<u64>(), any::<Option<(i32, u64)>>()).prop_map(|(seconds, by)| {
                let process = |(pid, start_ticks)| ProcessId { pid, start_ticks };
                Life::Until(seconds, by.map(process))
            }),
            (any::<i32>(), any::<u64>(), ".{0,8}").prop_map(|(pid, start_ticks, state_file)| {
                Life::Launched {
                    by: ProcessId { pid, start_ticks },
                    state_file: encoded(&state_file),
                }
            }),
            Just(Life::Bundle),
            Just(Life::Over),
        ];
        let entry = (
            ".{0,8}",
            life,
            any::<(u32, bool)>(),
            proptest::collection::vec((".{0,6}", any::<Option<u64>>()), 0..3),
        );
        proptest::collection::vec(
            entry.prop_map(|(id, life, (weight, high_priority), gpus)| {
                let holding = Holding { id, gpus, weight, high_priority };
                Entry::new(encoded(&holding.id), "x".repeat(12), life, holding)
            }),
            0..6,
        )
    }

    proptest! {
        #[test]
        fn what_was_written_is_read(entries in entries()) {
            prop_assert_eq!(read(&write(&stamp(), &entries), &stamp()), Some(entries));
        }

        #[test]
        fn a_torn_index_is_no_index(entries in entries(), cut in 1usize..200) {
            let text = write(&stamp(), &entries);
            let mut at = text.len().saturating_sub(cut);
            while !text.is_char_boundary(at) { at -= 1 }
            prop_assert_eq!(read(&text[..at], &stamp()), None);
        }

        #[test]
        fn no_text_breaks_the_reader(text in "(cgpu-index 2 b-1 5 [0-3]\n)?([a\t:=,\n]|until|bundle|1){0,40}") {
            let _ = read(&text, &stamp());
        }
    }

    /// An index of another boot, or of an older state of the directory, is invalid.
    #[test]
    fn index_of_another_boot_or_directory_is_invalid() {
        let text = write(&stamp(), &[]);
        assert_eq!(read(&text, &stamp()), Some(vec![]));
        assert_eq!(read(&text, &Stamp { boot_id: "b-2".into(), ..stamp() }), None);
        assert_eq!(read(&text, &Stamp { changed_ns: 6, ..stamp() }), None);
    }
}
