//! Event buffers and the context switches that they show.
//!
//! As `fecsAddBindpoint` and `notifyEventBuffers` (fecs_event_list.c): a buffer that is bound for a
//! user gets the records of every client of that effective user, with its pid, whatever container that
//! is in; the records of other users it gets without. The firmware writes a record each time that a
//! channel is switched to; here a buffer shows the clients that have a channel on its GPU at the moment.

use crate::abi::{CHANNEL_CLASSES, NV_ERR_INVALID_ARGUMENT, NV_EVENT_BUFFER};
use crate::driver::Driver;
use crate::object::Status;

impl Driver {
    /// `NV2080_CTRL_CMD_GR_FECS_BIND_EVTBUF_FOR_UID` and its second version.
    pub(crate) fn bind_switches(
        &mut self,
        client: u32,
        buffer: u32,
        gpu: usize,
    ) -> Result<(), Status> {
        let entry = self.clients.get_mut(&client);
        let object = entry.and_then(|entry| entry.objects.get_mut(&buffer));
        let object = object.filter(|object| object.class == NV_EVENT_BUFFER);
        object.ok_or(NV_ERR_INVALID_ARGUMENT)?.switches_of = Some(gpu);
        Ok(())
    }

    /// The processes whose context switches an object of a client shows.
    pub(crate) fn switches(&self, client: u32, handle: u32) -> Vec<u32> {
        let Some(watcher) = self.clients.get(&client) else { return Vec::new() };
        let Some(gpu) = watcher.objects.get(&handle).and_then(|object| object.switches_of) else {
            return Vec::new();
        };
        let of_user = self.clients.values().filter(|client| client.user == watcher.user);
        let switched = of_user.filter(|client| {
            let mut objects = client.objects.values();
            objects.any(|object| object.gpu == Some(gpu) && CHANNEL_CLASSES.contains(&object.class))
        });
        switched.map(|client| client.process).collect()
    }
}
