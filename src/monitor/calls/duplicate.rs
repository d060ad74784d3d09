//! Duplicates: calls that give memory another name.

use crate::ledger::{Client, Entry, Handle};
use crate::monitor::caller::listener::Reply;
use crate::monitor::calls::alloc::ToMake;
use crate::monitor::calls::lane::OnLane;
use crate::monitor::calls::serve::{Case, Over};
use crate::monitor::state::books::BOUNDS;
use crate::rm::call::Object;
use crate::rm::number::{NV_ERR_INSUFFICIENT_RESOURCES, NV_ERR_NOT_SUPPORTED};
use crate::rm::{Answer, Command, Layout};

impl Case<'_> {
    pub(crate) fn duplicate(
        &mut self,
        command: &Command,
        layout: &'static Layout,
        object: Object,
        source: (u32, u32),
    ) -> Result<Reply, Over> {
        let lane = self.begin_on_lane()?;
        let making = ToMake { object, handle: layout, head: layout };
        let group = self.room_for_name(source, layout)?;
        let made = self.name(&lane, command, making, source)?;
        if let (Some(gpu), Some(made)) = (group, made) {
            self.enter_name_of_group(gpu, object, made.handle, source);
        }
        drop(lane);
        Ok(self.executed(made))
    }

    /// Makes an object that keeps the memory of `source` alive; in figures it shows where it hangs.
    fn name(
        &mut self,
        lane: &OnLane<'_>,
        command: &Command,
        making: ToMake,
        source: (u32, u32),
    ) -> Result<Option<Object>, Over> {
        let ToMake { object, head, .. } = making;
        let process = self.target()?.process;
        self.start_over(lane, object);
        let mut books = self.books();
        books.shares(object.client, process);
        books.shares(source.0, process);
        let named = (Client(source.0), Handle(source.1));
        let memory = books.ledger.memory_of(named.0, named.1);
        let gpu = memory.filter(|(_, bytes)| *bytes > 0).map(|(gpu, _)| gpu);
        let is_known = books.ledger.contains(named.0, named.1);
        drop(books);
        // That may have an object remembered, too.
        let shown = self.shown_below(lane, object.client, object.parent, gpu);
        if self.books().ledger.size().objects >= BOUNDS.objects {
            self.log("more objects or mappings than can be kept account of");
            return Err(self.answer(Answer::Status(NV_ERR_INSUFFICIENT_RESOURCES), Some(head)));
        }
        let made = self.make(command, making).map_err(|errno| Reply::Errno(errno as i32))?;
        let Some(made) = made else { return Ok(None) };
        let (client, parent, handle) = (Client(object.client), Handle(object.parent), Handle(made));
        if is_known {
            let device = self.device.as_ref();
            let stake = device
                .and_then(|device| self.parts.stakes.stake_behind(device, source, (shown, gpu)));
            let entry = Entry::Duplicate { source: named, client, parent, handle, shown };
            self.books().enter(entry);
            self.parts.stakes.stake_name((client.0, made), stake);
        } else if self.rm()?.is_gpu_memory(object.client, made) {
            self.unmake(lane, object.client, object.parent, made);
            self.log("memory to be duplicated that was taken past the monitor");
            return Err(self.answer(Answer::Status(NV_ERR_NOT_SUPPORTED), Some(head)));
        }
        Ok(Some(Object { client: object.client, parent: object.parent, handle: made }))
    }
}
