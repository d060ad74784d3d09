//! The runtime that creates an engine's containers now: ours is to be like it, and to run it.

use std::path::PathBuf;

use super::Request;
use super::parsed_files::ParsedFiles;
use crate::engines::containerd::runtimes;
use crate::engines::host_tree::Tree;
use crate::engines::{Kind, crio, docker, podman};

/// The table that ours is to be like, as TOML: the engine's default runtime; of podman, its lists
/// of capabilities.
pub(super) fn model(kind: Kind, parsed: &ParsedFiles, over_crun: bool) -> String {
    let texts = parsed.files.iter().map(|file| file.original.text.as_str());
    match kind {
        Kind::Docker => String::new(),
        Kind::Crio => crio::model(texts).to_string(),
        Kind::Podman => podman::lists(texts, over_crun).to_string(),
        _ => runtimes::model(&parsed.effective).to_string(),
    }
}

/// The runtime that creates the engine's containers now, if known.
pub(super) fn lower_of(tree: &Tree, request: &Request, parsed: &ParsedFiles) -> Option<PathBuf> {
    let mut texts = parsed.files.iter().map(|file| file.original.text.as_str());
    let words = match request.kind {
        Kind::Docker => docker::default_program(texts.next_back()?).into_iter().collect(),
        Kind::Crio => crio::default_program(texts),
        Kind::Podman => podman::default_programs(texts),
        _ => runtimes::program(&runtimes::model(&parsed.effective))
            .map(str::to_owned)
            .into_iter()
            .collect(),
    };
    words.iter().find_map(|word| tree.program(word))
}
