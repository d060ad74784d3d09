//! Which GPUs are shown: [`chosen`]. Pure.

use cgpu_cli::view::{GpuView, Snapshot};
use thiserror::Error;

/// Why GPUs can't be chosen.
#[derive(Debug, Error, PartialEq, Eq)]
pub(crate) enum ChooseError {
    /// No GPU has that name.
    #[error(
        "this host has no GPU {word}; `cgpu-smi -L` lists indices and UUIDs, `cgpu gpus` PCI \
         addresses, too"
    )]
    NoGpu {
        /// What was asked for.
        word: String,
    },
}

/// What `snapshot` has of the GPUs that `words` name (indices, UUIDs, PCI addresses), in its order;
/// of all where there are none. Containers that have none of them are left out.
///
/// # Errors
///
/// Where a word names no GPU.
pub(crate) fn chosen(mut snapshot: Snapshot, words: &[String]) -> Result<Snapshot, ChooseError> {
    if words.is_empty() {
        return Ok(snapshot);
    }
    let missing = words.iter().find(|word| !snapshot.gpus.iter().any(|gpu| is_named(gpu, word)));
    if let Some(word) = missing {
        return Err(ChooseError::NoGpu { word: word.escape_debug().to_string() });
    }
    snapshot.gpus.retain(|gpu| words.iter().any(|word| is_named(gpu, word)));
    let gpus = &snapshot.gpus;
    let is_shown = |uuid: &str| gpus.iter().any(|gpu| gpu.uuid == uuid);
    for container in &mut snapshot.containers {
        container.shares.retain(|share| is_shown(&share.gpu.uuid));
    }
    snapshot.containers.retain(|container| !container.shares.is_empty());
    Ok(snapshot)
}

fn is_named(gpu: &GpuView, word: &str) -> bool {
    // `nvidia-smi` writes the domain with eight digits.
    let bus_id = word.strip_prefix("0000").filter(|rest| rest.starts_with("0000:")).unwrap_or(word);
    word.parse() == Ok(gpu.index) || word == gpu.uuid || bus_id.eq_ignore_ascii_case(&gpu.bus_id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sheet::fixture;

    /// GPUs are chosen by index, UUID and address, and the containers on them are chosen with them.
    #[test]
    fn gpus_are_chosen_by_index_uuid_or_address() {
        let all = || fixture::host(2, 1);
        let of = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            let chosen = chosen(all(), &words)?;
            Ok(chosen.gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>())
        };
        assert_eq!(of(&[]), Ok(vec![0, 1]));
        assert_eq!(of(&["1"]), Ok(vec![1]));
        assert_eq!(of(&["1", "GPU-0"]), Ok(vec![0, 1]));
        assert_eq!(of(&["0000:08:00.0"]), Ok(vec![1]));
        assert_eq!(of(&["00000000:07:00.0"]), Ok(vec![0]));
        assert_eq!(of(&["1", "7\n"]), Err(ChooseError::NoGpu { word: "7\\n".into() }));
        let second = chosen(all(), &["1".into()]).unwrap();
        assert_eq!(second.containers.len(), 1);
        assert!(second.containers[0].shares.iter().all(|share| share.gpu.index == 1));
    }
}
