//! A process that outlives the test binary long enough to clean up after it.
//!
//! Statics aren't dropped, a panic while panicking aborts, and a test run may be killed. Rust's
//! destructors cover none of these, and a parent-death signal is no substitute: it fires when the
//! *thread* that spawned the child ends, and every test is a thread. So the first [`watch`] starts
//! a second process that reads our pipe. It gets the path of every scratch ([`watch`]) and of every
//! one that is gone ([`forget`]); at end of file it cleans what is left. The kernel closes the pipe
//! however we end, and no other process holds it: the descriptor closes on exec.
//!
//! The process is this very binary, asked to run the one ignored "test" below, so there's nothing
//! else to build and it can't be of another version. It is in a process group of its own: an
//! interrupt typed at the terminal spares it.
//!
//! If the warden is killed too, the next run finds the scratch by its broken lock
//! ([`scan`]).

use std::fs::{self, File};
use std::io::{BufRead, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use super::traces;

/// Set for the warden alone, so that `cargo test -- --ignored` doesn't wait for a pipe.
const VARIABLE: &str = "CGPU_TEST_WARDEN";

/// A directory younger than this may not have been locked by its creator yet.
const YOUNG: Duration = Duration::from_secs(60);

static WARDEN: LazyLock<Mutex<Child>> = LazyLock::new(|| Mutex::new(start()));

/// From now on the scratch at `directory` is cleaned when this process ends.
pub(super) fn watch(directory: &Path) {
    report("watch", directory);
}

/// The scratch at `directory` has been cleaned.
pub(super) fn forget(directory: &Path) {
    report("forget", directory);
}

/// Cleans scratches in `parent`, named with `prefix`, whose creators are dead: no process holds the
/// lock on the directory.
pub(super) fn scan(parent: &Path, prefix: &str) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let old = entry
            .metadata()
            .and_then(|data| data.modified())
            .is_ok_and(|time| time.elapsed().is_ok_and(|age| age > YOUNG));
        let abandoned =
            || File::open(entry.path()).is_ok_and(|directory| directory.try_lock().is_ok());
        if entry.file_name().to_string_lossy().starts_with(prefix) && old && abandoned() {
            traces::clean(&entry.path());
        }
    }
}

fn start() -> Child {
    let test = module_path!().split_once("::").map_or("", |(_, path)| path).to_owned()
        + "::cleans_up_after_its_parent";
    let mut command = Command::new("/proc/self/exe");
    command
        .args(["--exact", &test, "--ignored", "--nocapture"])
        .env(VARIABLE, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::null());
    command.process_group(0).spawn().expect("this test binary can be run a second time")
}

fn report(word: &str, directory: &Path) {
    // A test that panicked in here has written a whole line or none.
    let mut warden = WARDEN.lock().unwrap_or_else(PoisonError::into_inner);
    let pipe = warden.stdin.as_mut().expect("the warden was given a pipe");
    writeln!(pipe, "{word} {}", directory.display()).expect("the warden reads until we end");
}

#[test]
#[ignore = "not a test: the harness runs this as a process of its own, to clean up after the tests"]
fn cleans_up_after_its_parent() {
    if is_asked_for() {
        serve();
    }
}

/// Whether this process is to be a warden: a program without the test harness asks first of all.
pub fn is_asked_for() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// Cleans up when the process that started this one has ended.
pub fn serve() {
    let mut watched: Vec<PathBuf> = Vec::new();
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        match line.split_once(' ') {
            Some(("watch", directory)) => watched.push(directory.into()),
            Some(("forget", directory)) => watched.retain(|other| other != Path::new(directory)),
            _ => panic!("the warden can't parse `{line}`"),
        }
    }
    for directory in watched {
        let left = traces::clean(&directory);
        if !left.is_empty() {
            eprintln!("could not clean up {}:\n{left}", directory.display());
        }
    }
}
