//! The runtime that makes an engine's containers now: ours is to be like it, and to run it.

use std::path::PathBuf;

use super::Request;
use super::parsed_files::Before;
use crate::engines::containerd::runtimes;
use crate::engines::host_tree::Tree;
use crate::engines::{Kind, crio, docker, podman};

/// What ours is to be like, as TOML: the engine's default runtime; of podman, the lists that
/// say what runtimes can do.
pub(super) fn model(kind: Kind, before: &Before, over_crun: bool) -> String {
    let texts = before.files.iter().map(|file| file.original.text.as_str());
    match kind {
        Kind::Docker => String::new(),
        Kind::Crio => crio::model(texts).to_string(),
        Kind::Podman => podman::lists(texts, over_crun).to_string(),
        _ => runtimes::model(&before.effective).to_string(),
    }
}

/// The runtime that makes the engine's containers now, where that is known.
pub(super) fn lower_of(tree: &Tree, request: &Request, before: &Before) -> Option<PathBuf> {
    let mut texts = before.files.iter().map(|file| file.original.text.as_str());
    let words = match request.kind {
        Kind::Docker => docker::default_program(texts.next_back()?).into_iter().collect(),
        Kind::Crio => crio::default_program(texts),
        Kind::Podman => podman::default_programs(texts),
        _ => runtimes::program(&runtimes::model(&before.effective))
            .map(str::to_owned)
            .into_iter()
            .collect(),
    };
    words.iter().find_map(|word| tree.program(word))
}
