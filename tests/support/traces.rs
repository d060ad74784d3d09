//! Finding and removing everything that carries a scratch's name.
//!
//! Engines daemonise, re-parent and leave shims behind, so the tree of processes can't be trusted
//! to find what a test started. The name can: it is in the environment (`CGPU_TEST_SCRATCH`), on
//! command lines (roots and sockets), in cgroups, in paths of open files, and in the source of a
//! container's root mount. A process with any of these, and all its descendants, belongs to the
//! scratch. Nothing else is ever killed, and never ourselves or an ancestor of ours.
//!
//! One thing lies elsewhere: containerd's shims bind their sockets in `/run/containerd/s` whatever
//! one configures. A shim that is killed leaves the file, so the sockets of the doomed are noted
//! first and removed last.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::cgroup;
use super::wait_until;

/// The environment variable that every process of a scratch inherits; its value is the directory.
pub const VARIABLE: &str = "CGPU_TEST_SCRATCH";

/// Where containerd's shims bind, whatever its configuration says (`socketRoot` in
/// `runtime/v2/shim/util_unix.go`).
const SHIM_SOCKETS: &str = "/run/containerd/s/";

/// How long cleaning may take before it gives up and says what is left.
const CLEANING: Duration = Duration::from_secs(60);

/// What exists of a scratch outside the contents of its directory.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Traces {
    /// Living processes, as `pid command line`.
    pub processes: Vec<String>,
    /// Mounts at or below the directory, outermost first.
    pub mounts: Vec<PathBuf>,
    /// Cgroups in any hierarchy, children first.
    pub cgroups: Vec<PathBuf>,
}

impl Traces {
    /// What there is of the scratch at `directory` right now.
    pub fn of(directory: &Path) -> Self {
        let name = name_of(directory);
        Self {
            processes: processes(&name).iter().map(|&pid| describe(pid)).collect(),
            mounts: mounts_below(directory),
            cgroups: cgroup::trees(&name),
        }
    }

    /// Whether nothing was found.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Traces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for process in &self.processes {
            writeln!(f, "process {process}")?;
        }
        for mount in &self.mounts {
            writeln!(f, "mount {}", mount.display())?;
        }
        for cgroup in &self.cgroups {
            writeln!(f, "cgroup {}", cgroup.display())?;
        }
        Ok(())
    }
}

/// Kills, unmounts and removes everything of the scratch at `directory`, then the directory itself.
///
/// Returns what resisted, and keeps the directory for its sake.
pub(super) fn clean(directory: &Path) -> Traces {
    let name = name_of(directory);
    let mut sockets = BTreeSet::new();
    cgroup::thaw(&name);
    // A killed process takes a while to end, and one that is stuck in the kernel a long one.
    wait_until(CLEANING, || {
        let doomed = stopped(&name);
        sockets.extend(shim_sockets(&doomed));
        for &pid in doomed.iter().chain(&cgroup::members(&name)) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        doomed.is_empty()
    });
    wait_until(CLEANING, || {
        let mounts = mounts_below(directory);
        for point in mounts.iter().rev() {
            let _ = umount2(point, MntFlags::MNT_DETACH);
        }
        mounts.is_empty()
    });
    // A cgroup is busy until the last task in it is reaped.
    wait_until(CLEANING, || {
        cgroup::remove(&name);
        cgroup::trees(&name).is_empty()
    });
    for socket in sockets {
        let _ = fs::remove_file(socket);
    }
    let left = Traces::of(directory);
    // What resisted is found by the directory's name: as long as there's something, the next scan
    // needs it. And with a mount left, removing the directory could remove what is mounted there.
    if left.is_empty() {
        let _ = fs::remove_dir_all(directory);
    }
    left
}

/// One line of `/proc/self/mountinfo`.
#[derive(Debug)]
pub(super) struct Mount {
    /// Where it is mounted.
    pub(super) point: PathBuf,
    /// The file system's type.
    pub(super) kind: String,
}

/// The mounts of this process, outermost first.
pub(super) fn mounts() -> Vec<Mount> {
    let table = fs::read_to_string("/proc/self/mountinfo").expect("/proc is mounted");
    let parse = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let point = unescape(left.split(' ').nth(4)?);
        Some(Mount { point, kind: right.split(' ').next()?.to_owned() })
    };
    table.lines().filter_map(parse).collect()
}

fn mounts_below(directory: &Path) -> Vec<PathBuf> {
    mounts()
        .into_iter()
        .map(|mount| mount.point)
        .filter(|point| point.starts_with(directory))
        .collect()
}

/// The kernel writes blanks in paths as three octal digits.
fn unescape(path: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let octal = (first == b'\\')
            .then(|| tail.get(..3))
            .flatten()
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(octal.unwrap_or(first));
        rest = if octal.is_some() { &tail[3..] } else { tail };
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// The directory's own name is the mark: unique, and the same in paths, cgroups and environments.
fn name_of(directory: &Path) -> String {
    directory.file_name().expect("a scratch has a name").to_string_lossy().into_owned()
}

/// The processes that carry `name` and all their descendants, without us and our ancestors.
fn processes(name: &str) -> Vec<i32> {
    let parents: BTreeMap<i32, i32> = living().collect();
    let own = std::process::id().cast_signed();
    let ancestors: BTreeSet<i32> = lineage(own, &parents).collect();
    // What another thread of ours has just forked still has our descriptors, the locks on all
    // scratches among them, and is about to become a program of another scratch.
    let unborn = |pid: i32| parents[&pid] == own && executable(pid) == executable(own);
    let marked: BTreeSet<i32> = parents
        .keys()
        .copied()
        .filter(|pid| !ancestors.contains(pid) && !unborn(*pid) && carries(*pid, name))
        .collect();
    let belongs = |pid: i32| lineage(pid, &parents).any(|ancestor| marked.contains(&ancestor));
    parents.keys().copied().filter(|&pid| !ancestors.contains(&pid) && belongs(pid)).collect()
}

/// The same, and none of them runs: what ran on would start others while it is killed, and a child may be known by its
/// parent alone.
fn stopped(name: &str) -> BTreeSet<i32> {
    let mut stopped = BTreeSet::new();
    loop {
        // Who has been sent the signal forks no more.
        let new: Vec<i32> =
            processes(name).into_iter().filter(|pid| !stopped.contains(pid)).collect();
        if new.is_empty() {
            return stopped;
        }
        for pid in new {
            let _ = kill(Pid::from_raw(pid), Signal::SIGSTOP);
            stopped.insert(pid);
        }
    }
}

/// `pid`, its parent, its parent's parent…
fn lineage(pid: i32, parents: &BTreeMap<i32, i32>) -> impl Iterator<Item = i32> {
    std::iter::successors(Some(pid), |pid| parents.get(pid).copied()).take_while(|&pid| pid > 0)
}

/// Every process that isn't a zombie, with its parent.
fn living() -> impl Iterator<Item = (i32, i32)> {
    let entries = fs::read_dir("/proc").expect("/proc is mounted");
    entries.flatten().filter_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        // The name in parentheses may hold anything, parentheses too: the fields begin after the
        // last one.
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        let state = fields.next()?;
        let parent = fields.next()?.parse().ok()?;
        (state != "Z" && state != "X").then_some((pid, parent))
    })
}

fn executable(pid: i32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/exe")).ok()
}

fn carries(pid: i32, name: &str) -> bool {
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let within = |file: &str| fs::read(proc.join(file)).is_ok_and(|bytes| contains(&bytes, name));
    let leads = |link: PathBuf| {
        fs::read_link(link)
            .is_ok_and(|target| contains(target.into_os_string().as_encoded_bytes(), name))
    };
    // Not by the directory itself: that's the scratch's lock, which a child that another test just
    // forked has open until it executes its program.
    let is_lock = |link: &Path| fs::read_link(link).is_ok_and(|target| target.ends_with(name));
    let opens = || {
        fs::read_dir(proc.join("fd")).is_ok_and(|entries| {
            entries.flatten().any(|entry| !is_lock(&entry.path()) && leads(entry.path()))
        })
    };
    within("cmdline")
        || within("environ")
        || within("cgroup")
        || ["cwd", "exe", "root"].iter().any(|link| leads(proc.join(link)))
        || roots_in(&proc, name)
        || opens()
}

/// Whether the root mount of the process comes from the scratch. Its other mounts say nothing:
/// every process that shares our mount namespace, or copied it, sees what is mounted in the scratch.
fn roots_in(proc: &Path, name: &str) -> bool {
    let table = fs::read_to_string(proc.join("mountinfo")).unwrap_or_default();
    table.lines().any(|line| line.split(' ').nth(4) == Some("/") && contains(line.as_bytes(), name))
}

fn contains(bytes: &[u8], name: &str) -> bool {
    bytes.windows(name.len()).any(|window| window == name.as_bytes())
}

fn describe(pid: i32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    format!("{pid} {}", String::from_utf8_lossy(&line).replace('\0', " ").trim_end())
}

/// The files in [`SHIM_SOCKETS`] that these processes have bound.
fn shim_sockets(pids: &BTreeSet<i32>) -> BTreeSet<PathBuf> {
    let table = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let paths: BTreeMap<&str, &str> = table
        .lines()
        .filter_map(|line| {
            let mut fields = line.split_ascii_whitespace().skip(6);
            Some((fields.next()?, fields.next()?))
        })
        .filter(|(_, path)| path.starts_with(SHIM_SOCKETS))
        .collect();
    let mut found = BTreeSet::new();
    for pid in pids {
        let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        for target in entries.flatten().filter_map(|entry| fs::read_link(entry.path()).ok()) {
            let target = target.to_string_lossy().into_owned();
            let inode = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']'));
            if let Some(path) = inode.and_then(|inode| paths.get(inode)) {
                found.insert(PathBuf::from(path));
            }
        }
    }
    found
}
