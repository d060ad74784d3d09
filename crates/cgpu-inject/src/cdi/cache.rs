//! What was last read of the specifications, kept in a file.
//!
//! `{"version":1,"listings":[…],"sources":[…]}`, 0600, replaced as a whole. It holds as long as
//! the directories list the same files with the same sizes, times and inodes. A cache is never
//! worth an error when it is read: missing, damaged or outgrown, it is simply not there.

use std::fs::{DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::dirs::{Listing, Source};
use cgpu_host::atomic_file::replace;

const VERSION: u32 = 1;

/// Most bytes read of the cache.
const FILE_BYTES_MAX: u64 = 64 << 20;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CachedListing {
    version: u32,
    listings: Vec<Listing>,
    sources: Vec<Source>,
}

#[derive(Serialize)]
struct Written<'a> {
    version: u32,
    listings: &'a [Listing],
    sources: &'a [Source],
}

/// Why the cache can't be written.
#[derive(Debug, Error)]
#[error("can't write {}; the specifications are read anew by every create", path.display())]
pub(super) struct CacheError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// What was read when the directories listed `now`.
pub(super) fn read(path: &Path, now: &[Listing]) -> Option<Vec<Source>> {
    let mut text = Vec::new();
    File::open(path).ok()?.take(FILE_BYTES_MAX).read_to_end(&mut text).ok()?;
    let cache: CachedListing = serde_json::from_slice(&text).ok()?;
    (cache.version == VERSION && cache.listings == now).then_some(cache.sources)
}

/// Keeps `sources`, read when the directories listed `listings`.
///
/// # Errors
///
/// Where it can't be written; then the cache is what it was.
pub(super) fn write(
    path: &Path,
    listings: &[Listing],
    sources: &[Source],
) -> Result<(), CacheError> {
    let written = (|| {
        if let Some(directory) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        }
        replace(path, &serde_json::to_vec(&Written { version: VERSION, listings, sources })?, 0o600)
    })();
    written.map_err(|source| CacheError { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::cdi::dirs::{self, list};
    use crate::cdi::fixture::text;

    struct Place {
        directory: tempfile::TempDir,
        cache: PathBuf,
    }

    fn place() -> Place {
        let directory = tempfile::tempdir().unwrap();
        for name in ["eight-gpus.yaml", "one-gpu.json", "unknown-field.yaml"] {
            fs::create_dir_all(directory.path().join("cdi")).unwrap();
            fs::write(directory.path().join("cdi").join(name), text(name)).unwrap();
        }
        let cache = directory.path().join("state/cdi.json");
        Place { directory, cache }
    }

    impl Place {
        fn listings(&self) -> Vec<Listing> {
            list(&[self.directory.path().join("cdi")])
        }
    }

    #[test]
    fn cache_returns_written_data_until_files_change() {
        let place = place();
        let listings = place.listings();
        assert_eq!(read(&place.cache, &listings), None);
        let sources = dirs::read(&listings);
        write(&place.cache, &listings, &sources).unwrap();
        assert_eq!(read(&place.cache, &place.listings()), Some(sources));
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&place.cache), 0o600);
        assert_eq!(mode(place.cache.parent().unwrap()), 0o700);
        assert_eq!(fs::read_dir(place.cache.parent().unwrap()).unwrap().count(), 1);
        fs::remove_file(place.directory.path().join("cdi/one-gpu.json")).unwrap();
        assert_eq!(read(&place.cache, &place.listings()), None);
    }

    #[test]
    fn a_damaged_cache_counts_as_missing() {
        let place = place();
        let listings = place.listings();
        write(&place.cache, &listings, &dirs::read(&listings)).unwrap();
        let good = fs::read(&place.cache).unwrap();
        for end in (0..good.len()).step_by(97) {
            fs::write(&place.cache, &good[..end]).unwrap();
            assert_eq!(read(&place.cache, &listings), None, "cut at byte {end}");
        }
        let other = String::from_utf8(good).unwrap().replacen("\"version\":1", "\"version\":2", 1);
        fs::write(&place.cache, other).unwrap();
        assert_eq!(read(&place.cache, &listings), None);
    }

    #[test]
    fn one_that_cannot_be_written_is_named() {
        let path = Path::new("/proc/nowhere/cdi.json");
        let error = write(path, &[], &[]).unwrap_err().to_string();
        assert!(error.starts_with("can't write /proc/nowhere/cdi.json; "), "{error}");
    }
}
