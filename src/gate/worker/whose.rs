//! Which GPU a device or subdevice of the caller's is of: by what is known, or by asking the driver
//! for its UUID.

use super::execute::TRIES;
use super::serve::Case;
use crate::gate::settings::NodeKind;
use crate::ledger::{Client, Handle, Shown};
use crate::rm::about::Uuid;

/// What a device or subdevice says of its GPU.
#[derive(Debug, Clone, Copy)]
struct Asked {
    uuid: Uuid,
    is_device: bool,
    /// Whether a subdevice was made for it, and freed.
    has_freed: bool,
}

impl Case<'_> {
    /// The container's GPU that a device or subdevice is of, by its UUID.
    pub(super) fn gpu(&self, client: u32, handle: u32) -> Option<usize> {
        if let Some(gpu) = self.books().gpu(client, handle) {
            return Some(gpu);
        }
        if let NodeKind::Gpu(gpu) = self.device.as_ref()?.kind {
            return Some(gpu);
        }
        self.gpu_above(client, handle)
    }

    /// The same, whichever file it's asked through.
    fn gpu_above(&self, client: u32, handle: u32) -> Option<usize> {
        if let Some(gpu) = self.books().gpu(client, handle) {
            return Some(gpu);
        }
        let mut answer = None;
        for _ in 0..TRIES {
            let before = self.books().frees(Client(client));
            let Some(asked) = self.ask_for_gpu(client, handle) else { continue };
            let gpu = self.shared.uuids.iter().position(|of| *of == asked.uuid)?;
            answer = Some(gpu);
            let mut books = self.books();
            // Else the subdevice may have been another device's by the time that it was asked: what is
            // charged to the wrong GPU then, an audit finds.
            let after = before.map(|frees| frees + u64::from(asked.has_freed));
            if before.is_some() && books.frees(Client(client)) == after {
                books.learn(client, handle, gpu);
                if asked.is_device && !books.ledger.contains(Client(client), Handle(handle)) {
                    books.note(client, client, handle);
                }
                break;
            }
        }
        answer
    }

    /// Has a device's GPU known, where there are several: to ask for it moves names.
    pub(super) fn learn_above(&self, client: u32, parent: u32) {
        if self.shared.uuids.len() > 1 {
            let _ = self.gpu_above(client, parent);
        }
    }

    /// Where another name of memory of a GPU shows, which hangs below `parent`.
    pub(super) fn shown_below(&self, client: u32, parent: u32, of: Option<usize>) -> Shown {
        let Some(of) = of.filter(|_| self.shared.uuids.len() > 1) else { return Shown::Here };
        match self.gpu_above(client, parent).map(|gpu| (gpu, u16::try_from(gpu))) {
            Some((gpu, Ok(number))) if gpu != of => Shown::On(number),
            _ => Shown::Here,
        }
    }

    /// Asks the subdevice for its UUID that a device has, or that it is, or that is made for that.
    fn ask_for_gpu(&self, client: u32, handle: u32) -> Option<Asked> {
        let rm = self.rm().ok()?;
        let asked = |uuid, is_device| Asked { uuid, is_device, has_freed: false };
        if let Ok(subdevice) = rm.find_subdevice(client, handle) {
            return rm.uuid(client, subdevice).ok().map(|uuid| asked(uuid, true));
        }
        if let Ok(uuid) = rm.uuid(client, handle) {
            return Some(asked(uuid, false));
        }
        let subdevice = rm.subdevice(client, handle).ok()?;
        let uuid = rm.uuid(client, subdevice);
        // Another call may have found it.
        let freed = (Client(client), Handle(subdevice));
        self.books().begin_free(freed.0, freed.1);
        let _ = rm.free(client, handle, subdevice);
        self.books().end_free(freed.0, freed.1);
        uuid.ok().map(|uuid| Asked { has_freed: true, ..asked(uuid, true) })
    }
}
