//! Inventory files: the GPUs as an administrator, or `cgpu gpus --format json`, wrote
//! them.
//!
//! Owns reading and explaining what is wrong with one. Must not know the caller, nor
//! whether a driver is there. Everything in a file is checked before any of it is used.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};
use thiserror::Error;

use cgpu_core::gpu::{Gpu, GpuState, Inventory, InventoryError};

/// Most bytes read of an inventory file; a GPU takes about 200.
pub(super) const FILE_BYTES_MAX: u64 = 1 << 20;

/// Why a file gave no inventory.
#[derive(Debug, Error)]
pub enum FileError {
    /// It can't be read.
    #[error(
        "can't read the inventory file {}; correct path under [inventory], or write the file \
         with `cgpu gpus --format json`",
        path.display()
    )]
    Unreadable {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// It is longer than any inventory.
    #[error(
        "the inventory file {} has more than {FILE_BYTES_MAX} bytes; correct path under \
         [inventory]",
        path.display()
    )]
    TooLong { path: PathBuf },
    /// It is no JSON, or no list.
    #[error(
        "the inventory file {} is not a JSON list of GPUs; `cgpu gpus --format json` shows the \
         form",
        path.display()
    )]
    NotAList {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    /// One of its entries is no GPU.
    #[error(
        "the inventory file {}, entry {number}{}: not a GPU; correct it, `cgpu gpus --format \
         json` shows the form",
        path.display(),
        field.as_ref().map(|field| format!(", field {field}")).unwrap_or_default()
    )]
    BadEntry {
        path: PathBuf,
        /// Which entry, the first being 1.
        number: usize,
        /// Which field, where one alone is wrong.
        field: Option<String>,
        #[source]
        source: serde_json::Error,
    },
    /// Two entries say they are one GPU.
    #[error("the inventory file {} lists a GPU twice; correct it", path.display())]
    Contradiction {
        path: PathBuf,
        /// Which.
        #[source]
        source: InventoryError,
    },
    /// Two entries name one device node.
    #[error(
        "the inventory file {}: GPU {first} and GPU {second} both have minor {minor}, which is \
         /dev/nvidia{minor}; correct \"minor\", which is the index where it is left out",
        path.display()
    )]
    SharedMinor {
        path: PathBuf,
        /// Index of one.
        first: u32,
        /// Index of the other.
        second: u32,
        minor: u32,
    },
}

/// The inventory that the file at `path` holds.
///
/// # Errors
///
/// Where it can't be read, or isn't one.
pub fn load(path: &Path) -> Result<Inventory, FileError> {
    let unreadable = |source| FileError::Unreadable { path: path.to_owned(), source };
    let file = File::open(path).map_err(unreadable)?;
    let mut text = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut text).map_err(unreadable)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(FileError::TooLong { path: path.to_owned() });
    }
    parse(path, &text)
}

/// The inventory that `text` holds; `path` is for messages.
fn parse(path: &Path, text: &[u8]) -> Result<Inventory, FileError> {
    let gpus: Vec<Gpu> = serde_json::from_slice(text).map_err(|e| explain(path, text, e))?;
    // Two quotas on one device node would reserve the same memory twice.
    for (at, gpu) in gpus.iter().enumerate() {
        let twin = gpus[..at].iter().find(|other| {
            other.minor == gpu.minor
                && other.index != gpu.index
                && (other.state, gpu.state) == (GpuState::Ok, GpuState::Ok)
        });
        if let Some(twin) = twin {
            return Err(FileError::SharedMinor {
                path: path.to_owned(),
                first: twin.index,
                second: gpu.index,
                minor: gpu.minor,
            });
        }
    }
    Inventory::new(gpus)
        .map_err(|source| FileError::Contradiction { path: path.to_owned(), source })
}

/// Which entry and field `source` is about: serde says neither.
fn explain(path: &Path, text: &[u8], source: serde_json::Error) -> FileError {
    let path = path.to_owned();
    let Ok(entries) = serde_json::from_slice::<Vec<Value>>(text) else {
        return FileError::NotAList { path, source };
    };
    match entries.iter().position(|entry| Gpu::deserialize(entry).is_err()) {
        Some(at) => {
            let field = wrong_field(&entries[at]);
            FileError::BadEntry { path, number: at + 1, field, source }
        }
        // Valid as a value but not as text: a field given twice.
        None => FileError::NotAList { path, source },
    }
}

/// The field of `entry` that makes an otherwise sound GPU unsound.
fn wrong_field(entry: &Value) -> Option<String> {
    let is_wrong = |field: &str, value: &Value| {
        // Lost, so that no memory is sound too: whether it is depends on two fields.
        let mut sound = json!({"index": 0, "uuid": "GPU-0", "memory_mib": 1, "state": "lost"});
        sound[field] = value.clone();
        Gpu::deserialize(&sound).is_err()
    };
    let mut fields = entry.as_object()?.iter();
    fields.find(|(field, value)| is_wrong(field, value)).map(|(field, _)| field.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::fixture::sentence;

    const TWO: &str = r#"[
        {"index":1,"uuid":"GPU-b","minor":4,"bus_id":"0000:00:08.0","name":"A10","memory_mib":22731},
        {"index":0,"uuid":"GPU-a","minor":0,"bus_id":"0000:00:07.0","name":"Tesla V100-SXM2-16GB","memory_mib":16130}
    ]"#;

    fn refusal(text: &str) -> String {
        sentence(&parse(Path::new("/etc/gpus.json"), text.as_bytes()).unwrap_err())
    }

    #[test]
    fn reads_what_the_documentation_shows() {
        let inventory = parse(Path::new("gpus.json"), TWO.as_bytes()).unwrap();
        assert_eq!(inventory.gpus()[0].name, "Tesla V100-SXM2-16GB");
        assert_eq!(inventory.gpus()[1].minor, 4);
        assert_eq!(inventory.gpus()[1].memory_bytes, 22731 << 20);
    }

    #[test]
    fn minor_defaults_to_the_index() {
        let text = r#"[{"index":3,"uuid":"GPU-a","memory_mib":1}]"#;
        assert_eq!(parse(Path::new("gpus.json"), text.as_bytes()).unwrap().gpus()[0].minor, 3);
    }

    /// A missing inventory file is named with the key to correct.
    #[test]
    fn missing_file_error_names_the_key() {
        let error = load(Path::new("/nonexistent/gpus.json")).unwrap_err();
        assert_eq!(
            sentence(&error),
            "can't read the inventory file /nonexistent/gpus.json; correct path under \
             [inventory], or write the file with `cgpu gpus --format json`: No such file or \
             directory (os error 2)"
        );
    }

    #[test]
    fn invalid_json_is_refused_with_its_position() {
        assert_eq!(
            refusal("[{\n,"),
            "the inventory file /etc/gpus.json is not a JSON list of GPUs; `cgpu gpus --format \
             json` shows the form: key must be a string at line 2 column 1"
        );
        assert!(refusal("").ends_with("EOF while parsing a value at line 1 column 0"));
        assert!(refusal(r#"{"index":0}"#).contains("is not a JSON list of GPUs"));
    }

    #[test]
    fn invalid_entry_is_refused_with_number_and_field() {
        let cases = [
            (r#""memory_mib":16130}"#, r#""memory_mib":"16 GB"}"#, "entry 2, field memory_mib:"),
            (r#""memory_mib":16130}"#, r#""memory_mib":-1}"#, "entry 2, field memory_mib:"),
            (r#""memory_mib":16130}"#, r#""memory_mib":1.5}"#, "entry 2, field memory_mib:"),
            (r#""memory_mib":16130}"#, r#""memory":16130}"#, "entry 2, field memory:"),
            (r#""minor":4"#, r#""minor":4294967296"#, "entry 1, field minor:"),
            (r#""uuid":"GPU-a""#, r#""uuid":"a""#, "entry 2, field uuid:"),
            (r#""uuid":"GPU-a","#, "", "entry 2: not a GPU"),
        ];
        for (from, to, place) in cases {
            let refusal = refusal(&TWO.replace(from, to));
            assert!(refusal.contains(place), "{refusal}");
        }
        assert_eq!(
            refusal(&TWO.replace(r#""uuid":"GPU-a""#, r#""uuid":"a""#)),
            "the inventory file /etc/gpus.json, entry 2, field uuid: not a GPU; correct it, `cgpu \
             gpus --format json` shows the form: GPU 0: UUID \"a\" is not GPU- and a UUID at line \
             4 column 5"
        );
    }

    #[test]
    fn lost_gpu_is_not_blamed_for_missing_memory() {
        let refusal = refusal(r#"[{"index":0,"state":"lost","memory_mib":0}]"#);
        assert!(refusal.contains("entry 1: not a GPU"), "{refusal}");
        assert!(refusal.contains("missing field `uuid`"), "{refusal}");
    }

    #[test]
    fn memory_beyond_what_bytes_can_count_is_refused() {
        let refusal = refusal(&TWO.replace("16130", "18446744073709551615"));
        assert!(refusal.contains("GPU 0: 18446744073709551615 MiB of memory"), "{refusal}");
    }

    #[test]
    fn a_gpu_listed_twice_is_refused() {
        assert!(refusal(&TWO.replace("GPU-a", "GPU-b")).ends_with("two GPUs have UUID GPU-b"));
        assert!(
            refusal(&TWO.replace(r#""index":1"#, r#""index":0"#))
                .ends_with("two GPUs have index 0")
        );
        assert_eq!(
            refusal(&TWO.replace(r#""minor":4"#, r#""minor":0"#)),
            "the inventory file /etc/gpus.json: GPU 1 and GPU 0 both have minor 0, which is \
             /dev/nvidia0; correct \"minor\", which is the index where it is left out"
        );
    }

    #[test]
    fn a_file_without_end_is_refused() {
        let error = load(Path::new("/dev/zero")).unwrap_err();
        assert!(error.to_string().contains("has more than 1048576 bytes"), "{error}");
    }
}
