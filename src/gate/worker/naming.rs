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
                return Name { number, client, makes };
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

    /// What was made is entered. Whether it may stay: it may be something else already where it was
    /// freed, or what it hangs below, or another made of that handle, before its maker knew of it.
    pub(super) fn end_making(&self, name: &Name, made: &[u32]) -> bool {
        let (is_moved, is_touched) = {
            let books = self.books();
            (books.is_moved(name.number), books.is_touched(name.number))
        };
        self.end_name(name);
        if is_moved && !is_touched {
            made.iter().for_each(|handle| self.forget_if_gone(name.client.0, *handle));
        }
        !is_touched
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
