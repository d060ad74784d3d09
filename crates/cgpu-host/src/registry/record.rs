//! One registered container: [`Record`], and the name of its file. Pure.

use std::path::PathBuf;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use serde::{Deserialize, Serialize};

use crate::process::ProcessId;
use cgpu_core::plan::{Holding, LEAKED_MARK, Plan};

/// What distinguishes containers: an id is unique within its runtime's root only.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Key {
    /// The runtime's root without links; for a hook called alone, the bundle.
    pub root: String,
    pub id: String,
}

/// A container and what is reserved for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    #[serde(flatten)]
    pub key: Key,
    /// The bundle's directory without links; empty where it isn't known yet.
    pub bundle: PathBuf,
    /// 12 ASCII characters, unique among the records.
    pub short_id: String,
    /// The boot in which the processes below ran.
    pub boot_id: String,
    /// What keeps the reservation alive.
    pub holder: Holder,
    /// What is reserved.
    pub plan: Plan,
}

/// What keeps a reservation alive; when it ends, the record is stale.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "state")]
pub enum Holder {
    /// The runtime that is making the container; it keeps its pid when it becomes the
    /// real runtime.
    Reserved {
        /// The runtime.
        by: ProcessId,
    },
    /// The runtime that is making the container, and after it the process that its own
    /// state of the container names: nothing else reports to us that the container exists.
    Launched {
        /// The runtime.
        by: ProcessId,
        /// The file of its state, made while the container is.
        state_file: PathBuf,
    },
    /// No process yet: podman's `precreate` exits before the container is made.
    Announced {
        /// Seconds since boot after which no process will come for it.
        until_boot_s: u64,
        /// The engine's process that makes the container, if it is known: no process comes after its exit.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        by: Option<ProcessId>,
    },
    /// The monitor of a container that has ended: a program of the host has a way to its memory, so the quota stays
    /// reserved, under the key of [`Key::leaked`].
    Leaked {
        /// The monitor, which ends when that program has no way any more.
        monitor: ProcessId,
    },
    /// The container's first process.
    Active {
        /// The process; `None` where the engine didn't tell, then the bundle counts.
        init: Option<ProcessId>,
    },
}

impl Holder {
    /// The container's first process, where it is known: not the runtime that makes it, nor its monitor.
    #[must_use]
    pub fn init(&self) -> Option<ProcessId> {
        match self {
            Holder::Active { init } => *init,
            Holder::Reserved { .. }
            | Holder::Launched { .. }
            | Holder::Announced { .. }
            | Holder::Leaked { .. } => None,
        }
    }

    /// The process that must live.
    #[must_use]
    pub fn process(&self) -> Option<ProcessId> {
        match self {
            Holder::Reserved { by } | Holder::Launched { by, .. } => Some(*by),
            Holder::Leaked { monitor } => Some(*monitor),
            Holder::Announced { .. } => None,
            Holder::Active { init } => *init,
        }
    }
}

/// Bytes that stay as they are in a file name.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'+');

/// The longest name without its ending; file systems allow 255 bytes.
const LONGEST_NAME: usize = 240;

pub(super) fn encoded(text: &str) -> String {
    utf8_percent_encode(text, PLAIN).to_string()
}

pub(super) fn decoded(text: &str) -> Option<String> {
    if !text.contains('%') {
        return Some(text.to_owned());
    }
    percent_decode_str(text).decode_utf8().ok().map(Into::into)
}

impl Record {
    /// What it holds, as admission counts it.
    #[must_use]
    pub fn holding(&self) -> Holding {
        let gpus = self.plan.gpus.iter();
        // One that has ended computes nothing.
        let holds_shares = self.plan.backend.holds_shares() && !self.is_leaked();
        Holding {
            id: self.key.id.clone(),
            gpus: gpus.map(|gpu| (gpu.given_uuid().to_owned(), gpu.memory_limit_bytes)).collect(),
            weight: if holds_shares { self.plan.weight } else { 0 },
            high_priority: holds_shares && self.plan.high_priority,
        }
    }

    /// Whether the container has ended, and its quota alone is left.
    #[must_use]
    pub fn is_leaked(&self) -> bool {
        matches!(self.holder, Holder::Leaked { .. })
    }

    /// The container's id, as its engine had it.
    #[must_use]
    pub fn container_id(&self) -> &str {
        let id = &self.key.id;
        let leaked = self.is_leaked().then(|| id.rsplit_once(LEAKED_MARK)).flatten();
        leaked.map_or(id, |(id, _)| id)
    }
}

impl Key {
    /// The key under which the quota of a container that has ended stays reserved: its engine may use the id again.
    #[must_use]
    pub fn leaked(&self, short_id: &str) -> Self {
        Key { root: self.root.clone(), id: format!("{}{LEAKED_MARK}{short_id}", self.id) }
    }

    /// The name of the record's file: root and id, percent-encoded so that neither can
    /// name another directory; where that is too long, a hash of both.
    #[must_use]
    pub fn file_name(&self) -> String {
        let name = format!("{},{}", encoded(&self.root), encoded(&self.id));
        if name.len() <= LONGEST_NAME {
            return format!("{name}.json");
        }
        format!("{:032x}.json", hash(&format!("{}\0{}", self.root, self.id)))
    }
}

/// FNV-1a, 128 bits: the same on every build, unlike the standard library's.
fn hash(text: &str) -> u128 {
    text.bytes().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash: u128, byte| {
        (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    })
}

/// 12 characters for `key` that `taken` does not have: the id's first ones, padded
/// with `_`; where another container has these, a hash.
#[must_use]
pub fn short_id(key: &Key, taken: impl Fn(&str) -> bool) -> String {
    let plain = key.id.chars().map(|c| match c {
        'a'..='z' | 'A'..='Z' | '0'..='9' | '.' | '_' | '-' | '+' => c,
        _ => '_',
    });
    let first: String = plain.chain(std::iter::repeat('_')).take(12).collect();
    // "." and ".." are padded, so that no name can leave its directory.
    std::iter::once(first)
        .chain((0u32..).map(|salt| {
            let hash = hash(&format!("{}\0{}\0{salt}", key.root, key.id));
            format!("{:012x}", hash & 0xffff_ffff_ffff)
        }))
        .find(|name| !taken(name))
        .expect("one of 2³² names is free among at most some thousand containers")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(root: &str, id: &str) -> Key {
        Key { root: root.into(), id: id.into() }
    }

    #[test]
    fn file_names_stay_in_their_directory() {
        assert_eq!(key("/run/runc", "a.b").file_name(), "%2Frun%2Frunc,a.b.json");
        assert_eq!(key("/", "../../etc").file_name(), "%2F,..%2F..%2Fetc.json");
        let long = key("/run", &"x".repeat(500)).file_name();
        assert_eq!(long.len(), 32 + 5);
        assert_ne!(long, key("/run", &"x".repeat(501)).file_name());
    }

    /// Short ids are padded, and an id that collides with another gets a name of its own.
    #[test]
    fn short_ids_are_padded_and_collisions_avoided() {
        assert_eq!(short_id(&key("/r", "demo"), |_| false), "demo________");
        assert_eq!(short_id(&key("/r", &"ab".repeat(32)), |_| false), "abababababab");
        assert_eq!(short_id(&key("/r", "ü/.."), |_| false), "__.._______".to_owned() + "_");
        let other = short_id(&key("/r", "my-container-b"), |name| name == "my-container");
        assert_eq!(other.len(), 12);
        assert_ne!(other, "my-container");
    }

    proptest! {
        #[test]
        fn different_keys_have_different_files(
            a in ("[/a,%.]{0,4}", "[/a,%.]{0,4}"),
            b in ("[/a,%.]{0,4}", "[/a,%.]{0,4}"),
        ) {
            prop_assume!(a != b);
            prop_assert_ne!(key(&a.0, &a.1).file_name(), key(&b.0, &b.1).file_name());
        }

        #[test]
        fn short_ids_are_twelve_plain_characters(id in ".*") {
            let name = short_id(&key("/r", &id), |_| false);
            prop_assert_eq!(name.len(), 12);
            prop_assert!(name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/'));
        }
    }
}
