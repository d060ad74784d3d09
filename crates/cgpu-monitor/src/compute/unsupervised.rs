//! Containers whose monitors have exited: no monitor brings them onto their GPUs or takes them off any more. Another
//! monitor takes their turns.
//!
//! The monitors of a GPU whose time is divided by turns form a ring, ordered by short id, once their containers have
//! called the driver. Each monitor writes a file with its container's channels, and watches the next monitor in the
//! ring that has such a file and lives. It takes the turns of the containers in between whose monitors have exited;
//! those whose state can't be determined are checked again later.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::ops::Bound;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use crate::compute::last_turn::LastTurn;
use crate::gate::launch::MonitorDir;
use crate::state::ChannelName;
use cgpu_core::sched::Span;
use cgpu_host::atomic_file::replace;
use cgpu_host::process::ProcessId;
use cgpu_host::registry::share::Turns;

/// A container whose monitor has exited, on one GPU.
#[derive(Debug, Default)]
pub(crate) struct Unsupervised {
    pub(crate) channels: Vec<ChannelName>,
    pub(crate) spans: Vec<Span>,
    pub(crate) last: LastTurn,
}

/// The unsupervised containers of a GPU whose turns this monitor takes, and the monitor that it watches.
#[derive(Debug, Default)]
pub(crate) struct UnsupervisedContainers {
    /// The turns of all containers on the GPU, at the last check.
    pub(crate) turns: Option<Turns>,
    /// The unsupervised containers by short id.
    pub(crate) all: BTreeMap<String, Unsupervised>,
    /// A pidfd of the watched monitor.
    pub(crate) watched: Option<Arc<OwnedFd>>,
    /// When to check for unsupervised containers again, by [`now_us`](crate::compute::last_turn::now_us).
    pub(crate) poll_us: Option<u64>,
}

/// What is known of a container's monitor.
pub(crate) enum NeighbourState {
    Alive(ProcessId),
    Gone,
    /// The monitor's container takes no turns yet, or is about to go.
    Unknown,
}

impl NeighbourState {
    /// What is known of the monitor at `place`, whose container may have turns on the GPU with that UUID.
    pub(crate) fn of(place: &MonitorDir, uuid: &str) -> Self {
        match place.process() {
            Ok(Some(monitor)) if place.channels(uuid).exists() => NeighbourState::Alive(monitor),
            Ok(None) if place.process_file().exists() => NeighbourState::Gone,
            _ => NeighbourState::Unknown,
        }
    }
}

/// All members of the ring but `own`, beginning behind it.
pub(crate) fn rest_of_ring<'a, T>(
    own: &'a str,
    all: &'a BTreeMap<String, T>,
) -> impl Iterator<Item = (&'a str, &'a T)> {
    let behind = all.range::<str, _>((Bound::Excluded(own), Bound::Unbounded));
    let before = all.range::<str, _>((Bound::Unbounded, Bound::Excluded(own)));
    behind.chain(before).map(|(name, of)| (name.as_str(), of))
}

/// Writes which channels this monitor's container has on a GPU.
pub(crate) fn write_channels(place: &Path, uuid: &str, channels: &[ChannelName]) -> io::Result<()> {
    replace(&MonitorDir::at(place).channels(uuid), &serde_json::to_vec(channels)?, 0o600)
}

/// The channels that the monitor at `place` wrote last; empty if it never wrote any.
pub(crate) fn read_channels(place: &MonitorDir, uuid: &str) -> io::Result<Vec<ChannelName>> {
    match fs::read(place.channels(uuid)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        bytes => Ok(serde_json::from_slice(&bytes?)?),
    }
}

impl UnsupervisedContainers {
    /// Has the next turn check for unsupervised containers, because the watched monitor has exited.
    pub(crate) fn poll_now(&mut self) {
        self.poll_us = Some(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_begins_behind_its_owner() {
        let all: BTreeMap<String, ()> =
            ["a", "c", "e"].map(|name| (name.to_owned(), ())).into_iter().collect();
        let names = |own| rest_of_ring(own, &all).map(|(name, ())| name).collect::<Vec<_>>();
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
