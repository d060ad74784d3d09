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
    pub(crate) fn set_gpu(&mut self, client: u32, handle: u32, gpu: usize) {
        if self.0.len() >= MOST_DEVICES {
            self.0.clear();
        }
        self.0.insert((client, handle), gpu);
    }

    /// Nothing is known of what has that handle.
    pub(crate) fn forget(&mut self, client: u32, handle: u32) {
        self.0.remove(&(client, handle));
    }

    /// A client begins or is over: none of its devices is known.
    pub(crate) fn forget_client(&mut self, client: u32) {
        self.0.retain(|(of, _), _| *of != client);
    }

    /// Something of a client was freed, and the ledger knows it: devices that it doesn't have any
    /// more are to be asked for again.
    pub(crate) fn forget_freed(&mut self, ledger: &Ledger, client: u32) {
        let stays = |handle| ledger.contains(Client(client), Handle(handle));
        self.0.retain(|(of, handle), _| *of != client || stays(*handle));
    }

    /// None is known any more.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{Bounds, Entry};

    #[test]
    fn a_device_is_of_its_gpu_until_it_or_its_client_is_freed() {
        let mut devices = Devices::default();
        for (client, handle, gpu) in [(1, 10, 0), (1, 11, 1), (2, 10, 1)] {
            devices.set_gpu(client, handle, gpu);
        }
        let all =
            |devices: &Devices| [(1, 10), (1, 11), (2, 10)].map(|(of, at)| devices.gpu(of, at));
        assert_eq!(all(&devices), [Some(0), Some(1), Some(1)]);
        devices.set_gpu(1, 10, 1);
        devices.forget(2, 10);
        assert_eq!(all(&devices), [Some(1), Some(1), None]);
        // Of what was freed, what the ledger has still is there.
        let mut ledger = Ledger::new(&[1], Bounds { objects: 9, holds: 9, stakes: 9 });
        let (client, parent, handle) = (Client(1), Handle(1), Handle(11));
        ledger.replay(Entry::Note { client, parent, handle });
        devices.forget_freed(&ledger, 1);
        assert_eq!(all(&devices), [None, Some(1), None]);
        devices.forget_client(1);
        assert_eq!(all(&devices), [None; 3]);
    }

    #[test]
    fn more_than_can_be_known_are_asked_for_again() {
        let mut devices = Devices::default();
        let most = u32::try_from(MOST_DEVICES).unwrap();
        (0..most).for_each(|handle| devices.set_gpu(1, handle, 0));
        assert_eq!(devices.gpu(1, 0), Some(0));
        devices.set_gpu(2, 0, 1);
        assert_eq!((devices.gpu(1, 0), devices.gpu(2, 0)), (None, Some(1)));
    }
}
