//! k0s: its containerd's file, and the directory whose files k0s merges.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::engines::Observed;
use crate::engines::containerd::Release;
use crate::engines::host_tree::Tree;
use crate::engines::installation::{DROP_IN, Installation};

pub(in crate::engines) const K0S: Installation = Installation {
    name: "k0s",
    programs: &["k0s", "/usr/local/bin/k0s"],
    containerd: Some("/var/lib/k0s/bin/containerd"),
    main_file: "/etc/k0s/containerd.toml",
    socket: Some("/run/k0s/containerd.sock"),
    // k0s polls its directory.
    units: &[],
    ..Installation::NONE
};

/// The directory whose files k0s merges into what its containerd reads.
const DIRECTORY: &str = "/etc/k0s/containerd.d";

/// The file of ours among those that k0s merges.
pub(crate) fn drop_in() -> PathBuf {
    Path::new(DIRECTORY).join(DROP_IN)
}

/// The version of the file of ours: containerd 1 doesn't read the newest one.
pub(crate) fn drop_in_version(release: Option<Release>) -> i64 {
    if release.is_some_and(|release| release.major < 2) { 2 } else { 3 }
}

/// The files that k0s merges, `also` among them; none if its administrator writes what containerd
/// reads.
pub(crate) fn merged_files(tree: &Tree, also: Option<&Path>) -> BTreeSet<PathBuf> {
    let is_managed = match tree.read(K0S.main_file) {
        Observed::Present(text) => is_managed(&text),
        _ => true,
    };
    if !is_managed {
        return BTreeSet::new();
    }
    let dropped = tree.list(DIRECTORY).into_iter().chain(also.map(Path::to_owned));
    dropped.filter(|path| path.extension().is_some_and(|end| end == "toml")).collect()
}

/// Whether k0s, and not its administrator, writes what this file of its containerd imports.
pub(crate) fn is_managed(text: &str) -> bool {
    text.lines().next() == Some("# k0s_managed=true")
}
