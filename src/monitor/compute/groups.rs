//! Channel groups and channels that calls make, and free: entered, and bounded in their number.

use crate::monitor::calls::lane::OnLane;
use crate::monitor::calls::serve::{Case, Over};
use crate::monitor::driver::monitor_client::Presence;
use crate::monitor::state::books::Books;
use crate::monitor::state::groups::{ENGINE_GRAPHICS, Group, computes};
use crate::monitor::state::journal::{Reach, Record};
use crate::monitor::worker::Shared;
use crate::rm::call::{Alloc, Object};
use crate::rm::number::{KEPLER_CHANNEL_GROUP_A, NV_ERR_INSUFFICIENT_RESOURCES};
use crate::rm::{Answer, Layout};

/// What the classes of all channels end in, and no other class above these: `GF100_CHANNEL_GPFIFO`
/// 0x906f, and so on.
const ANY_CHANNEL: u32 = 0x6f;
const HIGHEST_OBJECT: u32 = 0xff;

impl Case<'_> {
    /// The GPU of a group that is to be made, where one is: it has room for that.
    pub(crate) fn room_for_group(
        &mut self,
        lane: &OnLane<'_>,
        alloc: &Alloc,
        layout: &'static Layout,
    ) -> Result<Option<usize>, Over> {
        if alloc.class != KEPLER_CHANNEL_GROUP_A {
            return Ok(None);
        }
        // One that the worker before had made for this call doesn't count.
        self.start_over(lane, alloc.object);
        let Object { client, parent, .. } = alloc.object;
        match self.only_gpu().or_else(|| self.gpu_on(lane, client, parent)) {
            Some(gpu) => self.room_on(gpu, layout).map(Some),
            None => Err(self.on_no_gpu(alloc.object, layout)),
        }
    }

    /// The same, for a name of one that there is: it keeps the group when that is freed.
    pub(crate) fn room_for_name(
        &mut self,
        (client, handle): (u32, u32),
        layout: &'static Layout,
    ) -> Result<Option<usize>, Over> {
        let gpu = self.books().groups.gpu(client, handle);
        gpu.map(|gpu| self.room_on(gpu, layout)).transpose()
    }

    /// A channel that is let go on outside a group is entered as one, made or not. Whose handle the
    /// driver chooses is known by none, and counts until its client ends.
    pub(crate) fn passes_channel(
        &mut self,
        alloc: &Alloc,
        layout: Option<&'static Layout>,
    ) -> Result<(), Over> {
        let Alloc { object, class, .. } = *alloc;
        let is_channel = class > HIGHEST_OBJECT && class & 0xff == ANY_CHANNEL;
        let Some(layout) = layout.filter(|_| is_channel) else { return Ok(()) };
        let of = self.books().groups.engine(object.client, object.parent);
        if let Some((gpu, engine)) = of {
            return match computes(engine) {
                true => self.passes_computing_channel(gpu, object, layout),
                false => Ok(()),
            };
        }
        // One below a group that a worker before knew nothing of isn't on its own.
        let gpu = self.only_gpu().or_else(|| self.gpu(object.client, object.parent));
        let Some(gpu) = gpu else { return Ok(()) };
        let handle = match object.handle {
            0 => self.next_handles(1),
            handle => handle,
        };
        let group = group(gpu, object, handle, false, None);
        self.with_room_on(gpu, layout, |books| books.write(group))?;
        self.passes_computing_channel(gpu, object, layout)
    }

    /// A channel that computes is let go on.
    fn passes_computing_channel(
        &mut self,
        gpu: usize,
        object: Object,
        layout: &'static Layout,
    ) -> Result<(), Over> {
        let Object { client, parent, handle } = object;
        let process = self.target()?.process;
        let has_room = {
            let mut books = self.books();
            let has_room = books.channels.has_room();
            if handle != 0 && has_room {
                books.write(Record::Channel { gpu, client, parent, handle, process });
            }
            has_room
        };
        if has_room {
            return Ok(());
        }
        self.log("a channel more than can be known is refused");
        Err(self.answer(Answer::Status(NV_ERR_INSUFFICIENT_RESOURCES), Some(layout)))
    }

    pub(crate) fn only_gpu(&self) -> Option<usize> {
        (self.shared.uuids.len() == 1).then_some(0)
    }

    /// A group was made.
    pub(crate) fn enter_group(&self, gpu: usize, object: Object, handle: u32, engine: u32) {
        let reach = self.reach(engine);
        self.books().write(group(gpu, object, handle, true, reach));
        self.shared.shares.wake();
    }

    /// Another name of a group was made: it outlives the first, and counts as one more.
    pub(crate) fn enter_name_of_group(
        &self,
        gpu: usize,
        object: Object,
        handle: u32,
        source: (u32, u32),
    ) {
        let of = self.books().groups.named(source).and_then(Group::reach);
        let reach = of.and_then(|of| self.reach(of.engine));
        self.books().write(group(gpu, object, handle, true, reach));
        self.shared.shares.wake();
    }

    /// A group that nobody was seen to make is about to run: it counts from now on as one that
    /// computes.
    pub(crate) fn enter_unseen_group(
        &mut self,
        gpu: usize,
        object: Object,
        layout: &'static Layout,
    ) -> Result<(), Over> {
        let record = group(gpu, object, object.handle, true, self.reach(ENGINE_GRAPHICS));
        self.with_room_on(gpu, layout, |books| books.write(record))?;
        self.shared.shares.wake();
        Ok(())
    }

    /// How an object that this call makes is reached.
    fn reach(&self, engine: u32) -> Option<Reach> {
        let process = self.target().ok()?.process;
        Some(Reach { process, descriptor: self.descriptor(), engine })
    }

    /// The GPU, where it has room for one more group.
    fn room_on(&mut self, gpu: usize, layout: &'static Layout) -> Result<usize, Over> {
        self.with_room_on(gpu, layout, |_| ()).map(|()| gpu)
    }

    /// Enters what takes room for one more group on a GPU, where there is some.
    fn with_room_on(
        &mut self,
        gpu: usize,
        layout: &'static Layout,
        enter: impl Fn(&mut Books),
    ) -> Result<(), Over> {
        let shared = self.shared;
        let most = shared.settings.channel_groups;
        for attempt in 0..2 {
            if attempt > 0 {
                shared.forget_gone_groups(gpu);
            }
            let mut books = shared.books();
            if books.groups.count(gpu) < usize::try_from(most).unwrap_or(usize::MAX) {
                enter(&mut books);
                return Ok(());
            }
        }
        self.log(&format!(
            "a channel group more than {most} on a GPU: [isolation] channel_groups is their bound"
        ));
        Err(self.answer(Answer::Status(NV_ERR_INSUFFICIENT_RESOURCES), Some(layout)))
    }
}

fn group(gpu: usize, object: Object, handle: u32, certain: bool, reach: Option<Reach>) -> Record {
    let Object { client, parent, .. } = object;
    Record::Group { gpu, client, parent, handle, certain, reach }
}

impl Shared {
    /// An object was freed.
    pub(crate) fn freed_groups(&self, client: u32, handle: u32) {
        let mut books = self.books();
        let groups = books.groups.freed(client, handle);
        let channels = books.channels.freed(client, handle, &groups);
        for (client, handle) in channels {
            books.write(Record::Ungroup { client, handle });
        }
        for (client, handle) in groups {
            books.write(Record::Ungroup { client, handle });
            self.shares.wake();
        }
    }

    /// Forgets those that the driver doesn't have any more.
    fn forget_gone_groups(&self, gpu: usize) {
        let own = self.own_client();
        let Some(own) = own.filter(|own| own.can_tell(&self.release)) else { return };
        let known = self.books().groups.on(gpu);
        for ((client, handle), group) in known {
            let is_gone = match own.presence(&self.release, client, handle) {
                Presence::There => false,
                Presence::NoClient => true,
                // One that was let go on may be on its way.
                Presence::NoObject => group.certain,
            };
            let mut books = self.books();
            // Another thread may have made it anew.
            if is_gone && books.groups.named((client, handle)) == Some(group) {
                books.write(Record::Ungroup { client, handle });
            }
        }
    }
}
