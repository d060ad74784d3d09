//! Frees the clients that a container left in descriptors of the host's programs.
//!
//! A client lives as long as the file through which it was made. Where a program of the host has a descriptor of that
//! file, the client outlives the container, with its memory, and the program isn't killed for it
//! ([`HolderFacts`](crate::monitor::processes::HolderFacts)). But the driver frees a client for whoever asks through the
//! client's file (`rmclientValidate` compares the file, not the process), so the monitor asks through a duplicate of
//! the program's descriptor. The program keeps a file without a client.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::gate::settings::NodeKind;
use crate::ledger::{Client, Entry, Handle};
use crate::monitor::audit::client_users::client_users;
use crate::monitor::caller::PIDFD_THREAD;
use crate::monitor::driver::{DriverAccess, Presence};
use crate::monitor::node::{Device, Rm};
use crate::monitor::processes::{Processes, mounts_of};

/// Frees the container's clients whose files the process `pid` has. The container has ended: no call of it makes a
/// client meanwhile.
pub(crate) fn free_left_clients(processes: &Processes, driver: &DriverAccess, pid: u32) {
    let left: BTreeSet<Client> =
        client_users(&processes.state.books()).map(|(client, _)| client).collect();
    if left.is_empty() {
        return;
    }
    for file in control_files(processes, pid) {
        let rm = Rm { release: &processes.state.release, device: &file };
        for client in &left {
            // Fails where the client was made through another file.
            let _ = rm.free(client.0, client.0, client.0);
        }
    }
    for client in left {
        if driver.presence(client.0, client.0) == Some(Presence::NoClient) {
            let mut books = processes.state.books();
            books.enter(Entry::Free { client, handle: Handle(client.0) });
            books.devices.forget_client(client.0);
        }
    }
}

/// Whether the driver still has a client of a container that has ended: then somebody has the client's file, or it lies
/// in a socket.
pub(crate) fn has_left_clients(processes: &Processes, driver: &DriverAccess) -> bool {
    let all: BTreeSet<Client> =
        client_users(&processes.state.books()).map(|(client, _)| client).collect();
    let is_there = |client: Client| {
        driver.presence(client.0, client.0).is_some_and(|found| found != Presence::NoClient)
    };
    all.into_iter().any(is_there)
}

/// Duplicates of the container's control files that a process has.
fn control_files(processes: &Processes, pid: u32) -> Vec<Device> {
    let Some(own_mounts) = mounts_of(pid.cast_signed()) else { return Vec::new() };
    let open = processes.open_files_of(pid, NodeKind::Control).unwrap_or_default();
    let files = open.into_iter().filter_map(|(tid, descriptor)| {
        let file = duplicate(pid, tid, descriptor)?;
        // The process may have put another file in its place: what counts is the duplicate.
        let device = Device::of(&processes.state.settings.nodes, file)?;
        let mount = device.mount?;
        let is_left = device.kind == NodeKind::Control
            && !own_mounts.contains(&mount)
            && processes.origins.has_file(mount, device.place.0);
        is_left.then_some(device)
    });
    files.collect()
}

/// A duplicate of a descriptor of the thread `tid` of the process `pid`.
fn duplicate(pid: u32, tid: u32, descriptor: i32) -> Option<OwnedFd> {
    let flags = if pid == tid { PidfdFlags::empty() } else { PIDFD_THREAD };
    let pidfd = pidfd_open(Pid::from_raw(tid.cast_signed())?, flags).ok()?;
    pidfd_getfd(pidfd, descriptor, PidfdGetfdFlags::empty()).ok()
}
