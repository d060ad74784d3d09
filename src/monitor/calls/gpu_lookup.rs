//! Which GPU a device or subdevice of the caller's is of: by what is known, or by asking the driver
//! for its UUID.

use crate::gate::settings::NodeKind;
use crate::ledger::{Client, Handle, Shown};
use crate::monitor::calls::lane::OnLane;
use crate::monitor::calls::serve::Case;
use crate::rm::about::Uuid;

/// What a device or subdevice says of its GPU.
#[derive(Debug, Clone, Copy)]
struct OfGpu {
    uuid: Uuid,
    is_device: bool,
}

impl Case<'_> {
    /// The container's GPU that a device or subdevice is of, by its UUID; for a call that isn't on the
    /// lane, where nothing is remembered: what has that handle may be another object soon.
    pub(crate) fn gpu(&mut self, client: u32, handle: u32) -> Option<usize> {
        self.known_gpu(client, handle).or_else(|| self.gpu_of_own(client, handle))
    }

    /// The same, and proof that the client is the caller's: the driver answers through its file alone.
    pub(crate) fn gpu_of_own(&mut self, client: u32, handle: u32) -> Option<usize> {
        let known = self.books().gpu(client, handle);
        if known.is_some() {
            return known;
        }
        if let Some(asked) = self.ask_what_is_there(client, handle) {
            return self.parts.state.uuids.iter().position(|of| *of == asked.uuid);
        }
        let lane = self.enter_lane();
        self.ask_for_gpu_of(&lane, client, handle)
    }

    /// The same as [`gpu`](Self::gpu), for one that is.
    pub(crate) fn gpu_on(&self, lane: &OnLane<'_>, client: u32, handle: u32) -> Option<usize> {
        self.known_gpu(client, handle).or_else(|| self.ask_for_gpu_of(lane, client, handle))
    }

    fn known_gpu(&self, client: u32, handle: u32) -> Option<usize> {
        self.books().gpu(client, handle).or(match self.device.as_ref()?.kind {
            NodeKind::Gpu(gpu) => Some(gpu),
            _ => None,
        })
    }

    /// The GPU of a subdevice that was just made.
    pub(crate) fn made_of_gpu(&self, _: &OnLane<'_>, client: u32, handle: u32) -> Option<usize> {
        let uuid = self.rm().ok()?.uuid(client, handle).ok()?;
        self.parts.state.uuids.iter().position(|of| *of == uuid)
    }

    /// Asks the driver, whichever file that is through, and remembers what it says.
    fn ask_for_gpu_of(&self, lane: &OnLane<'_>, client: u32, handle: u32) -> Option<usize> {
        let asked = self.ask_for_gpu(lane, client, handle)?;
        let gpu = self.parts.state.uuids.iter().position(|of| *of == asked.uuid)?;
        let mut books = self.books();
        books.learn(client, handle, gpu);
        if asked.is_device && !books.ledger.contains(Client(client), Handle(handle)) {
            books.note(client, client, handle);
        }
        Some(gpu)
    }

    /// Where another name of memory of a GPU shows, which hangs below `parent`.
    pub(crate) fn shown_below(
        &self,
        lane: &OnLane<'_>,
        client: u32,
        parent: u32,
        of: Option<usize>,
    ) -> Shown {
        let Some(of) = of.filter(|_| self.parts.state.uuids.len() > 1) else { return Shown::Here };
        let known = self.books().gpu(client, parent);
        let gpu = known.or_else(|| self.ask_for_gpu_of(lane, client, parent));
        match gpu.map(|gpu| (gpu, u16::try_from(gpu))) {
            Some((gpu, Ok(number))) if gpu != of => Shown::On(number),
            _ => Shown::Here,
        }
    }

    /// Asks the subdevice for its UUID that a device has, or that it is.
    fn ask_what_is_there(&self, client: u32, handle: u32) -> Option<OfGpu> {
        let rm = self.rm().ok()?;
        if let Ok(subdevice) = rm.find_subdevice(client, handle) {
            let uuid = rm.uuid(client, subdevice).ok()?;
            return Some(OfGpu { uuid, is_device: true });
        }
        rm.uuid(client, handle).ok().map(|uuid| OfGpu { uuid, is_device: false })
    }

    /// The same, or one that is made for that.
    fn ask_for_gpu(&self, _: &OnLane<'_>, client: u32, handle: u32) -> Option<OfGpu> {
        if let Some(asked) = self.ask_what_is_there(client, handle) {
            return Some(asked);
        }
        let rm = self.rm().ok()?;
        let subdevice = rm.subdevice(client, handle).ok()?;
        let uuid = rm.uuid(client, subdevice);
        let _ = rm.free(client, handle, subdevice);
        uuid.ok().map(|uuid| OfGpu { uuid, is_device: true })
    }
}
