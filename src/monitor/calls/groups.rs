//! Calls that make channel groups and channels: entered, and bounded in their number.

use crate::monitor::calls::lane::OnLane;
use crate::monitor::calls::serve::{Case, Over};
use crate::monitor::state::books::Books;
use crate::monitor::state::groups::{ENGINE_GRAPHICS, Group, computes};
use crate::monitor::state::journal::{Reach, Record};
use crate::rm::call::{Alloc, Object};
use crate::rm::number::{KEPLER_CHANNEL_GROUP_A, NV_ERR_INSUFFICIENT_RESOURCES};
use crate::rm::{Answer, Layout};

/// What the classes of all channels end in, and no other class above these: `GF100_CHANNEL_GPFIFO`
/// 0x906f, and so on.
const ANY_CHANNEL: u32 = 0x6f;
const HIGHEST_OBJECT: u32 = 0xff;

/// Channels that compute outside groups, of a container on a GPU: each has the driver's slice.
const MOST_OUTSIDE_GROUPS: usize = 4;

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
        let own = self.gpu_of_own(object.client, object.parent);
        let Some(gpu) = own.or_else(|| self.only_gpu()) else { return Ok(()) };
        let handle = match object.handle {
            0 => self.next_handles(1),
            handle => handle,
        };
        let group = group(gpu, object, handle, false, None);
        self.with_room_on(gpu, layout, |books| books.write(group))?;
        // One that may have another's name would take that other off the GPU.
        if own.is_none() || !computes(self.engine_of_channel(alloc)) {
            return Ok(());
        }
        self.room_outside_groups(gpu, layout)?;
        self.passes_computing_channel(gpu, object, layout)
    }

    /// The engine of a channel that is to be made outside a group: `NV_CHANNEL_ALLOC_PARAMS.engineType`
    /// (alloc_channel.h, alike in nvos.h before). Its program can change it until the driver reads it.
    fn engine_of_channel(&self, alloc: &Alloc) -> u32 {
        const ENGINE_TYPE: u64 = 128;
        let mut engine = [0; 4];
        let address = alloc.params.checked_add(ENGINE_TYPE).filter(|_| alloc.params != 0);
        let target = self.target().ok();
        let read = address.zip(target).map(|(address, target)| target.read(address, &mut engine));
        read.and_then(Result::ok).map_or(0, |()| u32::from_le_bytes(engine))
    }

    /// Whether the container may have one more channel that computes outside a group: where its slices
    /// are set it has few, for none can be set of these.
    pub(crate) fn room_outside_groups(
        &mut self,
        gpu: usize,
        layout: &'static Layout,
    ) -> Result<(), Over> {
        let parts = self.parts;
        let is_bounded = parts.slices.shares.round(gpu).is_some_and(|round| !round.each);
        for attempt in 0..2 {
            if attempt > 0 {
                parts.slices.forget_gone_groups(gpu);
            }
            if !is_bounded || parts.state.books().outside_groups(gpu).len() < MOST_OUTSIDE_GROUPS {
                return Ok(());
            }
        }
        self.log(&format!(
            "a channel more than {MOST_OUTSIDE_GROUPS} that compute outside groups is refused: \
             its time can't be divided"
        ));
        Err(self.answer(Answer::Status(NV_ERR_INSUFFICIENT_RESOURCES), Some(layout)))
    }

    /// A channel that nobody was seen to make is scheduled by itself: it counts as one outside a group.
    pub(crate) fn enter_unseen_channel(&mut self, (client, handle): (u32, u32)) {
        let Some(gpu) = self.gpu_of_unseen(client, handle) else { return };
        let Ok(process) = self.target().map(|target| target.process) else { return };
        let channel = Record::Channel { gpu, client, parent: 0, handle, process };
        let mut books = self.books();
        if books.channels.has_room() {
            books.write(channel);
        }
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
        (self.parts.state.uuids.len() == 1).then_some(0)
    }

    /// A group was made.
    pub(crate) fn enter_group(&self, gpu: usize, object: Object, handle: u32, engine: u32) {
        let reach = self.reach(engine);
        self.books().write(group(gpu, object, handle, true, reach));
        self.parts.slices.shares.wake();
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
        self.parts.slices.shares.wake();
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
        self.parts.slices.shares.wake();
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
        let parts = self.parts;
        let most = parts.state.settings.channel_groups;
        for attempt in 0..2 {
            if attempt > 0 {
                parts.slices.forget_gone_groups(gpu);
            }
            let mut books = parts.state.books();
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
