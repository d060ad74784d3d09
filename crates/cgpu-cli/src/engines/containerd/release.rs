//! The releases of containerd, and how each reads the files of its configuration. Pure.
//!
//! By containerd's sources (`cmd/containerd/server/config`, `plugins/cri/runtime`):
//!
//! | release | a file's part | of several files |
//! |---|---|---|
//! | 1.x | `cri` in version 1, `io.containerd.grpc.v1.cri` in version 2 | that of the last file |
//! | 2.0 to 2.2 | `io.containerd.cri.v1.runtime`; the older two as well, but only if the last file that declares a version of 2 or 3 declares 2 | merged |
//! | 2.3 on | all of them, each file by its own version | merged |

/// containerd's CRI plugin by the version of the configuration.
pub(crate) const CRI: [(i64, &str); 3] =
    [(1, "cri"), (2, "io.containerd.grpc.v1.cri"), (3, "io.containerd.cri.v1.runtime")];

/// The newest known version of a configuration.
pub(crate) const NEWEST: i64 = 4;

/// A release of containerd: they differ in how they read their files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Release {
    pub major: u32,
    pub minor: u32,
}

impl Release {
    /// That of a containerd whose `--version` begins with `line`.
    pub(crate) fn of(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let _ = words.next().filter(|word| *word == "containerd")?;
        words.find_map(|word| {
            let mut numbers = word.strip_prefix('v').unwrap_or(word).split('.');
            let major = numbers.next()?.parse().ok()?;
            let minor = numbers.next()?.parse().ok()?;
            Some(Release { major, minor })
        })
    }
}

/// How files are read: by the known release, or by the release that the main file's version
/// implies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reading {
    /// containerd 1.x.
    One,
    /// containerd 2.0 to 2.2.
    Two {
        /// Whether the parts of older versions are read.
        older: bool,
    },
    /// containerd 2.3 and later.
    Later,
    /// The release is unknown: version 2 and older are read by all of them.
    Unknown,
}

impl Reading {
    /// That of `release`, else of the releases that read a main file of such a version. `declared` are
    /// the files' versions, in the order of reading.
    pub(crate) fn of(release: Option<Release>, declared: &[Option<i64>]) -> Self {
        let last =
            declared.iter().rev().find_map(|version| version.filter(|version| *version >= 2));
        let two = Reading::Two { older: last == Some(2) };
        match (release, declared.first().copied().flatten()) {
            (Some(Release { major: ..2, .. }), _) => Reading::One,
            (Some(Release { major: 2, minor: ..3 }), _) | (None, Some(3)) => two,
            (Some(_), _) | (None, Some(4..)) => Reading::Later,
            (None, _) => Reading::Unknown,
        }
    }

    /// Whether files are merged; if not, only the last one counts.
    pub(crate) fn merges(self) -> bool {
        matches!(self, Reading::Two { .. } | Reading::Later)
    }

    /// The plugins whose tables are read of a file of this version, the one with precedence last.
    pub(crate) fn plugins(self, version: i64) -> &'static [(i64, &'static str)] {
        match (self, version) {
            (Reading::Two { older: false }, _) | (_, 3..) => &CRI[2..],
            (Reading::Two { .. } | Reading::Later, 2) => &CRI[1..],
            (Reading::Two { .. } | Reading::Later, _) => &CRI,
            (Reading::One | Reading::Unknown, 2) => &CRI[1..2],
            (Reading::One | Reading::Unknown, _) => &CRI[..1],
        }
    }

    /// The plugins whose tables have to name a runtime for this release to read it in a file of
    /// this version: several if the release is unknown.
    pub(crate) fn written(self, version: i64) -> &'static [(i64, &'static str)] {
        match (self, version) {
            (Reading::Two { older: false }, _) | (_, 3..) => &CRI[2..],
            (_, 2) => &CRI[1..2],
            (Reading::One, _) => &CRI[..1],
            (Reading::Two { older: true } | Reading::Later, _) => &CRI[2..],
            // Each release ignores the other one's.
            (Reading::Unknown, _) => UNVERSIONED,
        }
    }
}

/// The tables that a file of version 1 needs for every release.
const UNVERSIONED: &[(i64, &str)] = &[CRI[0], CRI[2]];

/// All plugins that may have our runtime, in any release.
pub(crate) fn plugins() -> impl Iterator<Item = &'static str> {
    CRI.iter().map(|(_, plugin)| *plugin)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn release_is_parsed_from_the_version_line() {
        for (line, release) in [
            (
                "containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+b1",
                Some((1, 6)),
            ),
            ("containerd github.com/containerd/containerd/v2 2.1.9~ds1 x", Some((2, 1))),
            (
                "containerd containerd.io 1.7.27 05044ec0a9a75232cad458027ca83437aae3f4da",
                Some((1, 7)),
            ),
            ("containerd github.com/k3s-io/containerd v2.0.5-k3s1 x", Some((2, 0))),
            ("runc version 1.1.5", None),
            ("containerd", None),
        ] {
            let release = release.map(|(major, minor)| Release { major, minor });
            assert_eq!(Release::of(line), release, "{line}");
        }
    }
}
