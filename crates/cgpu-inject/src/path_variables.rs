//! `LD_LIBRARY_PATH` and `PATH` of a container: how they name the directory that the driver's files are mounted at. Pure.

use super::tree;

/// The variables that name the directory, and what of it; one that isn't there is made where a
/// program can do without it.
const VARIABLES: &[(&str, &str, bool)] =
    &[("LD_LIBRARY_PATH", tree::LIBRARIES, true), ("PATH", tree::PROGRAMS, false)];

/// What becomes of the variables of a process (`NAME=value`; of a name given twice the last
/// counts) in a container that has the directory at `place`: those that change.
#[must_use]
pub fn variables(env: &[impl AsRef<str>], place: &str) -> Vec<(String, String)> {
    let value = |name: &str| {
        let mut items = env.iter().rev().filter_map(|item| item.as_ref().split_once('='));
        items.find(|(there, _)| *there == name).map(|(_, value)| value)
    };
    let mut changed = Vec::new();
    for (name, directory, is_made) in VARIABLES {
        let directory = format!("{place}/{directory}");
        let value = match value(name).filter(|value| !value.is_empty()) {
            Some(value) if value.split(':').any(|part| part.trim_end_matches('/') == directory) => {
                continue;
            }
            // After all of the image's own: what it has there it has for a reason.
            Some(value) => format!("{value}:{directory}"),
            None if *is_made => directory,
            None => continue,
        };
        changed.push(((*name).to_owned(), value));
    }
    changed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
    }

    /// PATH and LD_LIBRARY_PATH name the mounted directory after all that the image names.
    #[test]
    fn path_variables_list_our_directory_after_the_images() {
        for (env, wanted) in [
            (&[][..], &[("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64")][..]),
            (&["LD_LIBRARY_PATH="], &[("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64")]),
            (
                &["LD_LIBRARY_PATH=/x", "PATH=/bin", "LD_LIBRARY_PATH=/y"],
                &[
                    ("LD_LIBRARY_PATH", "/y:/usr/local/nvidia/lib64"),
                    ("PATH", "/bin:/usr/local/nvidia/bin"),
                ],
            ),
            (&["PATH=/usr/local/nvidia/bin/:/bin", "LD_LIBRARY_PATH=/usr/local/nvidia/lib64"], &[]),
        ] {
            assert_eq!(variables(env, tree::PLACES[0]), pairs(wanted), "{env:?}");
        }
    }
}
