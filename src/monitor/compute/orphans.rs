//! Containers whose monitors are gone, keeper and worker: nobody brings them onto their GPUs or off them any
//! more. Another monitor takes their turns.
//!
//! The monitors of a GPU whose time is divided by turns stand in a ring, by short id, once their containers
//! have called the driver. Each writes a file with the channels of its container, and watches the next one
//! that has such a file and lives: it takes the turns of those in between that don't.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::ops::Bound;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use crate::gate::launch::MonitorDir;
use crate::monitor::compute::last_turn::LastTurn;
use crate::monitor::state::channels::ChannelName;
use crate::process::ProcessId;
use crate::registry::share::Turns;
use crate::replace::replace;
use crate::sched::Span;

/// A container whose monitor is gone, on one GPU.
#[derive(Debug, Default)]
pub(crate) struct Orphan {
    pub(crate) channels: Vec<ChannelName>,
    pub(crate) spans: Vec<Span>,
    pub(crate) last: LastTurn,
}

/// Those of a GPU that this monitor sees to, and the monitor that it watches.
#[derive(Debug, Default)]
pub(crate) struct Orphans {
    /// Everybody's turns, as they were at the last look.
    pub(crate) turns: Option<Turns>,
    /// By short id.
    pub(crate) all: BTreeMap<String, Orphan>,
    /// A pidfd of that monitor's keeper.
    pub(crate) watched: Option<Arc<OwnedFd>>,
    /// When to look again who is there, by [`now_us`](crate::monitor::compute::last_turn::now_us).
    pub(crate) look_us: Option<u64>,
}

/// What is known of a container's keeper.
pub(crate) enum KeeperIs {
    Alive(ProcessId),
    Gone,
    /// It takes no turns yet, or its container is about to go.
    Unknown,
}

impl KeeperIs {
    /// That of the container whose monitor has that place, on the GPU with that UUID.
    pub(crate) fn of(place: &MonitorDir, uuid: &str) -> Self {
        match place.keeper() {
            Ok(Some(keeper)) if place.channels(uuid).exists() => KeeperIs::Alive(keeper),
            Ok(None) if place.keeper_file().exists() => KeeperIs::Gone,
            _ => KeeperIs::Unknown,
        }
    }
}

/// Those behind `own` in the ring.
pub(crate) fn ring<'a, T>(
    own: &'a str,
    all: &'a BTreeMap<String, T>,
) -> impl Iterator<Item = (&'a str, &'a T)> {
    let behind = all.range::<str, _>((Bound::Excluded(own), Bound::Unbounded));
    let before = all.range::<str, _>((Bound::Unbounded, Bound::Excluded(own)));
    behind.chain(before).map(|(name, of)| (name.as_str(), of))
}

/// Writes which channels of a GPU the container of this monitor has.
pub(crate) fn write_channels(place: &Path, uuid: &str, channels: &[ChannelName]) -> io::Result<()> {
    replace(&MonitorDir::at(place).channels(uuid), &serde_json::to_vec(channels)?, 0o600)
}

/// What the monitor of that place wrote last; none where it never did.
pub(crate) fn read_channels(place: &MonitorDir, uuid: &str) -> io::Result<Vec<ChannelName>> {
    match fs::read(place.channels(uuid)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        bytes => Ok(serde_json::from_slice(&bytes?)?),
    }
}

impl Orphans {
    /// The monitor that is watched has ended.
    pub(crate) fn look_now(&mut self) {
        self.look_us = Some(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_begins_behind_its_owner() {
        let all: BTreeMap<String, ()> =
            ["a", "c", "e"].map(|name| (name.to_owned(), ())).into_iter().collect();
        let names = |own| ring(own, &all).map(|(name, ())| name).collect::<Vec<_>>();
        assert_eq!(names("c"), ["e", "a"]);
        assert_eq!(names("a"), ["c", "e"]);
        assert_eq!(names("e"), ["a", "c"]);
        assert_eq!(names("b"), ["c", "e", "a"], "a container of high priority, or one that is new");
    }

    #[test]
    fn channels_are_read_as_they_were_written() {
        let dir = tempfile::tempdir().unwrap();
        let place = MonitorDir::at(dir.path());
        assert_eq!(read_channels(&place, "GPU-a").unwrap(), []);
        write_channels(dir.path(), "GPU-a", &[(0xc1d0_0001, 0xcaf0_0001), (1, 2)]).unwrap();
        assert_eq!(read_channels(&place, "GPU-a").unwrap(), [(0xc1d0_0001, 0xcaf0_0001), (1, 2)]);
        fs::write(place.channels("GPU-a"), "[[1").unwrap();
        assert!(read_channels(&place, "GPU-a").is_err());
    }
}
