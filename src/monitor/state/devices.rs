//! Devices and subdevices of the container's clients, and their GPUs.

use std::collections::HashMap;

use crate::ledger::{Client, Handle, Ledger};

/// The most devices and subdevices whose GPU is known. Above this number all are forgotten, and the driver is asked
/// again.
const MOST_DEVICES: usize = 4096;

/// The container's GPU by client and handle.
#[derive(Debug, Default)]
pub(crate) struct Devices(HashMap<(u32, u32), usize>);

impl Devices {
    /// The GPU of a device or subdevice; `None` where it isn't known.
    pub(crate) fn gpu(&self, client: u32, handle: u32) -> Option<usize> {
        self.0.get(&(client, handle)).copied()
    }

    /// Remembers the GPU of a device or subdevice.
    pub(crate) fn set_gpu(&mut self, client: u32, handle: u32, gpu: usize) {
        if self.0.len() >= MOST_DEVICES {
            self.0.clear();
        }
        self.0.insert((client, handle), gpu);
    }

    /// Forgets the GPU of the object with this handle.
    pub(crate) fn forget(&mut self, client: u32, handle: u32) {
        self.0.remove(&(client, handle));
    }

    /// Forgets all devices of a client that begins or is over.
    pub(crate) fn forget_client(&mut self, client: u32) {
        self.0.retain(|(of, _), _| *of != client);
    }

    /// Forgets those devices of a client that the ledger doesn't have any more. The caller has freed something of the
    /// client in the ledger.
    pub(crate) fn forget_freed(&mut self, ledger: &Ledger, client: u32) {
        let stays = |handle| ledger.contains(Client(client), Handle(handle));
        self.0.retain(|(of, handle), _| *of != client || stays(*handle));
    }

    /// Forgets all devices.
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
        // The device that the ledger has was not freed.
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
