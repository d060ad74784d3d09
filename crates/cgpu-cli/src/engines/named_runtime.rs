//! A runtime of ours that a file of an engine's configuration names, and what is wrong with it.

use std::path::PathBuf;

use super::runtime_name::is_ours;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamedRuntime {
    pub(crate) name: String,
    pub(crate) program: PathBuf,
    pub(crate) flaw: Option<Flaw>,
}

/// What is wrong with a runtime's section.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Flaw {
    /// It is in a section of another version of containerd's configuration.
    OtherVersion { file: i64, section: i64 },
    /// Another file, or another spelling of a key, has this runtime run something else.
    Overruled { by: String },
    /// It has a key in two spellings, of which releases take different ones.
    TwoSpellings { key: String },
    /// Its cgroup driver isn't the others'.
    OtherCgroups {
        /// Whether the others' is systemd.
        systemd: bool,
    },
    /// Its snapshotter isn't the others', so existing images may not be unpacked for it.
    OtherSnapshotter {
        /// The others' own one; `None` is that of the whole configuration.
        name: Option<String>,
    },
    /// Our annotations aren't passed on.
    NoAnnotations,
}

/// The runtime `name` of a file, if its `program` is ours.
pub(super) fn named(name: &str, program: &str) -> Option<NamedRuntime> {
    is_ours(program).then(|| NamedRuntime {
        name: name.to_owned(),
        program: program.into(),
        flaw: None,
    })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// What a reader finds of a file that has our runtime alone.
    pub(crate) fn ours(name: &str, flaw: Option<Flaw>) -> Result<Vec<NamedRuntime>, String> {
        Ok(vec![NamedRuntime { name: name.into(), program: "/usr/bin/cgpu-runtime".into(), flaw }])
    }
}
