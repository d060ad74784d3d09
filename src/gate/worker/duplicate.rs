//! Duplicates: calls that give memory another name.
//!
//! What is named is held from before the driver is asked until the name is entered, so that no free
//! ends its charge meanwhile; and what was named has to be what the books say, at the end, too.

use super::books::BOUNDS;
use super::execute::Making;
use super::listener::Reply;
use super::serve::{Case, Made, Over};
use crate::ledger::{Client, Entry, Handle, Hold, LedgerError};
use crate::rm::call::Object;
use crate::rm::number::{NV_ERR_INSUFFICIENT_RESOURCES, NV_ERR_NOT_SUPPORTED};
use crate::rm::{Answer, Command, Layout};

impl Case<'_> {
    pub(super) fn duplicate(
        &mut self,
        command: &Command,
        layout: &'static Layout,
        object: Object,
        source: (u32, u32),
    ) -> Result<Reply, Over> {
        self.only_once()?;
        let making = Making { object, handle: layout, head: layout };
        let group = self.room_for_name(source, layout)?;
        let made = self.named(command, making, source)?;
        if let (Some(group), Some(made)) = (&group, made) {
            group.made(object, made.handle);
        }
        Ok(self.executed(made))
    }

    /// Makes an object that keeps the memory of `source` alive; in figures it shows where it hangs.
    fn named(
        &mut self,
        command: &Command,
        making: Making,
        source: (u32, u32),
    ) -> Result<Option<Made>, Over> {
        let Making { object, head, .. } = making;
        let (shared, slot, process) = (self.shared, self.slot, self.target()?.process);
        self.learn_above(object.client, object.parent);
        let of = shared.begin_name(slot, source.0, &[source.1], &[]);
        let mut name = shared.begin_name(slot, object.client, &[object.parent], &[object.handle]);
        let hold = Hold::Underway(self.shared.memory.next_hold());
        let mut books = self.shared.books_to_begin(self.slot);
        books.shares(object.client, process);
        books.shares(source.0, process);
        let (client, handle) = (Client(source.0), Handle(source.1));
        let charge = books.ledger.charge_of(client, handle);
        let memory = books.ledger.memory_of(client, handle);
        let gpu = memory.filter(|(_, bytes)| *bytes > 0).map(|(gpu, _)| gpu);
        let held = books.ledger.hold(hold, client, handle);
        let room = books.ledger.size().objects < BOUNDS.objects;
        if held == Err(LedgerError::Full) || !room {
            books.ledger.release(hold);
            drop(books);
            [of, name].iter().for_each(|name| shared.end_name(name));
            self.log("more objects or mappings than can be kept account of");
            return Err(self.answer(Answer::Status(NV_ERR_INSUFFICIENT_RESOURCES), Some(head)));
        }
        books.ledger.release(hold);
        if held.is_ok() {
            books.enter(Entry::Hold { hold, client, handle });
        }
        books.begin();
        drop(books);
        // What it hangs below is the same from here on, or that is known.
        let shown = self.shown_below(object.client, object.parent, gpu);
        let made = self.make(command, making, Some(&mut name));
        // Looked at once it's made, and can't become another.
        let taken = |made: u32| {
            held.is_err() && self.rm().is_ok_and(|rm| rm.is_gpu_memory(object.client, made))
        };
        if let Ok(Some(made)) = made
            && taken(made)
        {
            self.unmake(object.client, object.parent, made);
            self.books().end();
            [of, name].iter().for_each(|name| shared.end_name(name));
            self.log("memory to be duplicated that was taken past the monitor");
            return Err(self.answer(Answer::Status(NV_ERR_NOT_SUPPORTED), Some(head)));
        }
        let made_of = matches!((made, held), (Ok(Some(_)), Ok(())));
        let device = self.device.as_ref().filter(|_| made_of);
        let stake = device.and_then(|device| shared.stake_behind(device, source, (shown, gpu)));
        let has_stayed = held.is_err() || shared.has_stayed(&of, source.1, charge);
        shared.end_name(&of);
        let mut books = self.books();
        if let (Ok(Some(made)), Ok(())) = (made, held) {
            let (client, parent) = (Client(object.client), Handle(object.parent));
            books.enter(Entry::Adopt { hold, client, parent, handle: Handle(made), shown });
        }
        if held.is_ok() {
            books.enter(Entry::Release { hold });
        }
        books.end();
        drop(books);
        let name_made = (object.client, made.ok().flatten().unwrap_or_default());
        shared.stake_name(name_made, stake);
        let handles: Vec<u32> = made.ok().flatten().into_iter().collect();
        let stays = shared.end_making(&name, &handles, has_stayed);
        let made = made.map_err(|errno| Reply::Errno(errno as i32))?;
        if let Some(handle) = made.filter(|_| !stays) {
            self.unmake_begun(Made { client: object.client, parent: object.parent, handle });
            return Err(self.was_freed_meanwhile(head));
        }
        Ok(made.map(|handle| Made { client: object.client, parent: object.parent, handle }))
    }
}
