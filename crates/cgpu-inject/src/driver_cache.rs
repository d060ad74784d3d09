//! The driver that was last found, retained in a file, so that a container creation needs no search.
//!
//! `STATE_DIR/driver.cache`, 0600: the driver's root, the kernel's version, what was watched and
//! what was found; that there is none is retained as well. It holds while all that was watched
//! (directories, the dynamic linker's cache, and paths where nothing was) is as it was. A cache is
//! never worth an error when it is read: missing, damaged, of another version, it is simply not
//! there. Every container creation reads it, so it is in a form (postcard) that needs no parsing;
//! `cgpu inspect` and `cgpu doctor` report what is found.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use tracing::warn;

use super::Purpose;
use super::driver::Driver;
use super::driver_search::{self, FindError};
use super::root::{Root, Watched};
use cgpu_host::atomic_file::replace;

const FILE_NAME: &str = "driver.cache";
/// What the file begins with; the form doesn't describe itself.
const MAGIC: &[u8] = b"cgpu-driver 3\n";
/// A driver has some hundred files.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// How many bytes are allocated at once.
const FILE_BYTES_USUAL: usize = 32 << 10;

/// What comes before what was found, an `Option<CachedDriver>`.
#[derive(Serialize, Deserialize)]
struct Asked {
    root: PathBuf,
    kernel: Option<String>,
    watched: Watched,
}

/// A driver, and what distinguishes it from another of the same version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CachedDriver {
    pub driver: Driver,
    /// Changes with any of its files.
    pub identity: String,
}

/// The driver below `root`, of the version of the kernel's module where that is known: by the
/// cache in `state_dir` where it holds, else by a search, whose result is then kept.
///
/// # Errors
///
/// Where there is none, or only of other versions.
pub fn driver(
    root: &Root,
    kernel: Option<&str>,
    state_dir: &Path,
    purpose: Purpose,
) -> Result<CachedDriver, FindError> {
    let file = state_dir.join(FILE_NAME);
    let nothing = || FindError::Nothing { root: root.path().to_owned() };
    if let Some(found) = read(&file, root, kernel) {
        return found.ok_or_else(nothing);
    }
    let begun = SystemTime::now();
    let found = match driver_search::driver(root, kernel) {
        Ok(driver) => Some(CachedDriver { identity: identity(&driver), driver }),
        Err(FindError::Nothing { .. }) => None,
        Err(error) => return Err(error),
    };
    // What has just changed may change again without a trace.
    if purpose == Purpose::Create
        && let Some(watched) = root.watched(begun)
        && let Err(error) = write(&file, root, kernel, watched, found.as_ref())
    {
        let file = file.display();
        warn!(%file, %error, "the driver is searched for again next time");
    }
    found.ok_or_else(nothing)
}

fn read(file: &Path, root: &Root, kernel: Option<&str>) -> Option<Option<CachedDriver>> {
    let mut text = Vec::with_capacity(FILE_BYTES_USUAL);
    File::open(file).ok()?.take(FILE_BYTES_MAX).read_to_end(&mut text).ok()?;
    let (asked, found) = postcard::take_from_bytes::<Asked>(text.strip_prefix(MAGIC)?).ok()?;
    let of_this = asked.root == root.path() && asked.kernel.as_deref() == kernel;
    match of_this && root.is_as(&asked.watched) {
        true => postcard::from_bytes(found).ok(),
        false => None,
    }
}

fn write(
    file: &Path,
    root: &Root,
    kernel: Option<&str>,
    watched: Watched,
    found: Option<&CachedDriver>,
) -> io::Result<()> {
    let asked = Asked { root: root.path().to_owned(), kernel: kernel.map(str::to_owned), watched };
    let text = postcard::to_extend(&asked, MAGIC.to_vec())
        .and_then(|text| postcard::to_extend(&found, text))
        .map_err(io::Error::other)?;
    fs::create_dir_all(file.parent().unwrap_or(Path::new("/")))?;
    replace(file, &text, 0o600)
}

/// A name for just these files, of letters that any path may have.
fn identity(driver: &Driver) -> String {
    let mut hasher = DefaultHasher::new();
    driver.version.hash(&mut hasher);
    for file in &driver.files {
        (&file.source, &file.path).hash(&mut hasher);
        let of_it = fs::metadata(&file.source)
            .map(|meta| (meta.dev(), meta.ino(), meta.mtime(), meta.mtime_nsec(), meta.len()));
        of_it.ok().hash(&mut hasher);
    }
    format!("{}-{:016x}", driver.version, hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Until what was changed before counts as settled.
    fn settle() {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }

    fn root() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("usr/bin")).unwrap();
        fs::create_dir_all(dir.path().join("usr/lib64")).unwrap();
        // A library of this machine: the test's own program is one for all that is looked at.
        let library = dir.path().join("usr/lib64/libcuda.so.535.1");
        fs::copy(std::env::current_exe().unwrap(), library).unwrap();
        fs::write(dir.path().join("usr/bin/nvidia-smi"), "").unwrap();
        settle();
        dir
    }

    #[test]
    fn driver_is_searched_again_only_after_a_change() {
        let (host, state) = (root(), tempfile::tempdir().unwrap());
        let file = state.path().join(FILE_NAME);
        let root = || Root::open(host.path()).unwrap();
        driver(&root(), Some("535.1"), state.path(), Purpose::Inspect).unwrap();
        assert!(!file.exists(), "who only looks keeps nothing");
        let ask = |kernel| driver(&root(), kernel, state.path(), Purpose::Create);
        let first = ask(Some("535.1")).unwrap();
        assert_eq!(first.driver.version, "535.1");
        assert_eq!(first.driver.files.len(), 2, "{first:?}");
        let retained = fs::metadata(&file).unwrap();
        assert_eq!(retained.mode() & 0o777, 0o600);
        assert_eq!(ask(Some("535.1")).unwrap(), first);
        assert_eq!(fs::metadata(&file).unwrap().ino(), retained.ino(), "it was searched again");

        // An update brings a library more.
        let more = host.path().join("usr/lib64/libnvidia-ml.so.535.1");
        fs::copy(std::env::current_exe().unwrap(), more).unwrap();
        // What isn't settled is kept with other times a moment later.
        settle();
        let second = ask(Some("535.1")).unwrap();
        assert_eq!(second.driver.files.len(), 3);
        assert_ne!(second.identity, first.identity);

        assert!(matches!(ask(Some("550.1")), Err(FindError::Differs { .. })));
        let retained = fs::read(&file).unwrap();
        let newer = [&b"cgpu-driver 4\n"[..], &retained[MAGIC.len()..]].concat();
        for damaged in
            [&b"{"[..], &newer, &retained[..retained.len() / 2], &retained[..retained.len() - 1]]
        {
            fs::write(&file, damaged).unwrap();
            assert_eq!(ask(Some("535.1")).unwrap(), second, "a damaged file is no file");
            assert_eq!(fs::read(&file).unwrap(), retained);
        }
    }

    #[test]
    fn missing_driver_is_cached_until_one_appears() {
        let (host, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        settle();
        let root = || Root::open(host.path()).unwrap();
        let ask = || driver(&root(), None, state.path(), Purpose::Create);
        for _ in 0..2 {
            let error = ask().unwrap_err().to_string();
            assert!(error.starts_with("no driver libraries below /"), "{error}");
            assert!(state.path().join(FILE_NAME).exists());
        }
        fs::create_dir_all(host.path().join("usr/lib64")).unwrap();
        let library = host.path().join("usr/lib64/libcuda.so.535.1");
        fs::copy(std::env::current_exe().unwrap(), library).unwrap();
        assert_eq!(ask().unwrap().driver.version, "535.1");
    }

    #[test]
    fn driver_is_found_without_a_writable_cache() {
        let host = root();
        let state = host.path().join("usr/bin/nvidia-smi");
        let root = Root::open(host.path()).unwrap();
        let known = driver(&root, None, &state, Purpose::Create).unwrap();
        assert_eq!(known.driver.version, "535.1");
    }
}
