//! Devices and subdevices of the container's clients, and the GPUs that they are of.

use std::collections::HashMap;

use crate::ledger::{Client, Handle, Ledger};

/// Devices and subdevices whose GPU is known; of more, it's asked for again.
const MOST_DEVICES: usize = 4096;

/// By client and handle: the container's GPU.
#[derive(Debug, Default)]
pub(crate) struct Devices(HashMap<(u32, u32), usize>);

impl Devices {
    /// The GPU of a device or subdevice, where it is known.
    pub(crate) fn gpu(&self, client: u32, handle: u32) -> Option<usize> {
        self.0.get(&(client, handle)).copied()
    }

    /// A device or subdevice is of that GPU.
    pub(crate) fn learn(&mut self, client: u32, handle: u32, gpu: usize) {
        if self.0.len() >= MOST_DEVICES {
            self.0.clear();
        }
        self.0.insert((client, handle), gpu);
    }

    /// Nothing is known of what has that handle.
    pub(crate) fn unlearn(&mut self, client: u32, handle: u32) {
        self.0.remove(&(client, handle));
    }

    /// A client begins or is over: none of its devices is known.
    pub(crate) fn unlearn_all(&mut self, client: u32) {
        self.0.retain(|(of, _), _| *of != client);
    }

    /// Something of a client was freed, and the ledger knows it: devices that it doesn't have any
    /// more are to be asked for again.
    pub(crate) fn unlearn_freed(&mut self, ledger: &Ledger, client: u32) {
        let stays = |handle| ledger.contains(Client(client), Handle(handle));
        self.0.retain(|(of, handle), _| *of != client || stays(*handle));
    }

    /// None is known any more.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}
