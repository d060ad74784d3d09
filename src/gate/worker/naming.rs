//! Names of objects, which must say the same to the driver and in the books.
//!
//! A call names an object by a handle, and its caller's other threads may free what has that and make
//! something else of it, while the call waits in the driver. What is charged would be another's, then.
//! Calls that change what has a name are known while they're in the driver, and those that depend on
//! it notice.

use std::time::Instant;

use super::Shared;
use super::exported::{LOOK, PATIENCE};
use super::memory::Slot;
use crate::ledger::{Client, Handle};

/// Objects that a call names until it's entered in the books.
#[derive(Debug)]
#[must_use = "it counts until it's ended"]
pub(super) struct Name {
    number: u64,
    client: Client,
    /// Handles of what it makes.
    makes: Vec<Handle>,
    /// How many frees there had been, and no other was underway, when it left a handle to the driver.
    frees: Option<Option<u64>>,
}

impl Shared {
    /// A call in `slot` names objects of a client, and makes some, once nobody makes or frees them.
    pub(super) fn begin_name(
        &self,
        slot: Slot<'_>,
        client: u32,
        objects: &[u32],
        makes: &[u32],
    ) -> Name {
        let number = self.memory.next_hold();
        let client = Client(client);
        let are_named = |handle: &Handle| handle.0 != 0 && handle.0 != client.0;
        let handles = |of: &[u32]| of.iter().copied().map(Handle).filter(are_named).collect();
        let makes: Vec<Handle> = handles(makes);
        let all: Vec<Handle> = [handles(objects), makes.clone()].concat();
        // What the worker before did for this call is undone by this call itself.
        let before = slot.executed();
        let spares = (Client(before.client), Handle(before.handle));
        {
            let mut books = self.books();
            books.begin_naming(number, client, all, spares);
            if !makes.is_empty() {
                books.is_making(number);
            }
        }
        let since = Instant::now();
        loop {
            let mut books = self.books();
            if books.may_be_named(number, since.elapsed() > PATIENCE) {
                makes.iter().for_each(|handle| books.begin_make(number, client, *handle));
                return Name { number, client, makes, frees: None };
            }
            drop(books);
            std::thread::sleep(LOOK);
        }
    }

    pub(super) fn end_name(&self, name: &Name) {
        let mut books = self.books();
        name.makes.iter().for_each(|handle| books.end_make(name.number, name.client, *handle));
        books.end_naming(name.number);
    }

    /// The call makes an object of a handle that it chose since; of any, where that is 0.
    pub(super) fn makes_also(&self, name: &mut Name, handle: u32) {
        let mut books = self.books();
        if handle == 0 {
            name.frees = Some(books.frees(name.client));
        } else if !name.makes.contains(&Handle(handle)) {
            name.makes.push(Handle(handle));
            books.makes_also(name.number, name.client, Handle(handle));
        }
    }

    /// What was made is entered. Whether it may stay, where it `is_good` otherwise: it may be something
    /// else already where it was freed, or what it hangs below, before its maker knew of it. What may
    /// not is about to be freed, for all who wait for it: [`Shared::unmake_begun`] goes on.
    pub(super) fn end_making(&self, name: &Name, made: &[u32], is_good: bool) -> bool {
        let mut books = self.books();
        let is_moved = books.is_moved(name.number);
        // Of a handle that nobody knew nobody could be told.
        let is_blind =
            name.frees.is_some_and(|frees| frees.is_none() || books.frees(name.client) != frees);
        let stays = is_good && !is_blind && !books.is_touched(name.number);
        for handle in made.iter().copied().map(Handle) {
            match stays {
                true => books.was_made(name.number, name.client, handle),
                false => books.begin_free(name.client, handle),
            }
        }
        drop(books);
        self.end_name(name);
        if stays && is_moved {
            made.iter().for_each(|handle| self.forget_if_gone(name.client.0, *handle));
        }
        stays
    }

    /// Whether a named object was that memory all the time, which somebody holds on to.
    pub(super) fn has_stayed(&self, name: &Name, handle: u32, charge: Option<u64>) -> bool {
        let since = Instant::now();
        let mut is_moved = false;
        loop {
            let mut books = self.books();
            is_moved |= books.is_moved(name.number);
            if books.is_touched(name.number) || since.elapsed() > PATIENCE {
                return false;
            }
            if !is_moved {
                return true;
            }
            // What was freed since is entered: what has the handle then had it all the time.
            if books.stays(name.number) {
                return books.ledger.charge_of(name.client, Handle(handle)) == charge;
            }
            drop(books);
            std::thread::sleep(LOOK);
        }
    }
}
