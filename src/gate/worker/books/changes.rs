//! Names that calls go by, while other calls change what has them: frees, and makings of an object.
//!
//! Known from before a change goes into the driver until it's back, so that whoever named an object
//! meanwhile notices. What a call does then is not known here.

use super::Books;
use crate::ledger::{Client, Handle, Ledger};

/// Objects that a call names, to the driver and in the books: they may not say the same while another
/// call changes what has that name.
#[derive(Debug)]
pub(super) struct Naming {
    number: u64,
    client: Client,
    objects: Vec<Handle>,
    /// What a worker before was about to change, in the same call.
    spares: (Client, Handle),
    /// Whether it makes one of them: no other call makes that too, unless somebody frees it.
    is_making: bool,
    /// Frees wait for it a while.
    is_export: bool,
    /// One of them was made, or freed, since it was last looked at, or may have been freed with something
    /// that they hang below.
    is_moved: bool,
    /// One of them was itself, or with what they are known to hang below.
    is_touched: bool,
    /// Another call began to make what this one makes: it can, where that was freed.
    is_remade: bool,
}

/// A call that changes what has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Change {
    client: Client,
    handle: Handle,
    /// Who names it that makes it; `None` frees it and what hangs below.
    maker: Option<u64>,
}

impl Books {
    /// How many frees have begun; `None` where one of that client's is on its way.
    pub(in crate::gate::worker) fn frees(&self, client: Client) -> Option<u64> {
        let frees = |change: &Change| change.maker.is_none() && change.client == client;
        (!self.changing.iter().any(frees)).then_some(self.frees)
    }

    /// A free goes into the driver.
    pub(in crate::gate::worker) fn begin_free(&mut self, client: Client, handle: Handle) {
        self.frees += 1;
        self.begin_change(Change { client, handle, maker: None });
    }

    /// It is back.
    pub(in crate::gate::worker) fn end_free(&mut self, client: Client, handle: Handle) {
        self.end_change(Change { client, handle, maker: None });
    }

    /// A call that makes an object of a handle goes into the driver.
    pub(in crate::gate::worker) fn begin_make(
        &mut self,
        number: u64,
        client: Client,
        handle: Handle,
    ) {
        self.begin_change(Change { client, handle, maker: Some(number) });
    }

    /// It is back, and entered.
    pub(in crate::gate::worker) fn end_make(
        &mut self,
        number: u64,
        client: Client,
        handle: Handle,
    ) {
        self.end_change(Change { client, handle, maker: Some(number) });
    }

    fn begin_change(&mut self, change: Change) {
        self.changing.push(change);
        let ledger = &self.ledger;
        for naming in &mut self.naming {
            naming.is_moved |= moves(ledger, naming, change);
            naming.is_touched |= touches(ledger, naming, change);
            naming.is_remade |= remakes(naming, change);
        }
    }

    fn end_change(&mut self, change: Change) {
        if let Some(at) = self.changing.iter().position(|of| *of == change) {
            self.changing.swap_remove(at);
        }
    }

    /// A call names objects from now on, by a number of its own.
    pub(in crate::gate::worker) fn begin_naming(
        &mut self,
        number: u64,
        client: Client,
        objects: Vec<Handle>,
        spares: (Client, Handle),
    ) {
        let [is_making, is_export, is_moved, is_touched, is_remade] = [false; 5];
        let mut naming = Naming {
            number,
            client,
            objects,
            spares,
            is_making,
            is_export,
            is_moved,
            is_touched,
            is_remade,
        };
        naming.is_moved = self.changing.iter().any(|change| moves(&self.ledger, &naming, *change));
        self.naming.push(naming);
    }

    /// The call makes one of them.
    pub(in crate::gate::worker) fn is_making(&mut self, number: u64) {
        let naming = self.naming.iter_mut().find(|naming| naming.number == number);
        naming.into_iter().for_each(|naming| naming.is_making = true);
    }

    /// And another one, of a handle that it chose late.
    pub(in crate::gate::worker) fn makes_also(
        &mut self,
        number: u64,
        client: Client,
        handle: Handle,
    ) {
        let (ledger, changing) = (&self.ledger, &self.changing);
        if let Some(naming) = self.naming.iter_mut().find(|naming| naming.number == number) {
            naming.objects.push(handle);
            naming.is_making = true;
            naming.is_moved |= changing.iter().any(|change| moves(ledger, naming, *change));
            naming.is_touched |= changing.iter().any(|change| touches(ledger, naming, *change));
        }
        self.begin_make(number, client, handle);
    }

    /// The same, of an export, which frees wait for.
    pub(in crate::gate::worker) fn begin_export(
        &mut self,
        number: u64,
        client: Client,
        objects: Vec<Handle>,
    ) {
        self.begin_naming(number, client, objects, (client, Handle(0)));
        if let Some(naming) = self.naming.last_mut() {
            naming.is_export = true;
        }
    }

    pub(in crate::gate::worker) fn end_naming(&mut self, number: u64) {
        self.naming.retain(|naming| naming.number != number);
    }

    /// Whether an object that is to be freed is one that's being exported, or one above it.
    pub(in crate::gate::worker) fn is_exporting(&self, client: Client, handle: Handle) -> bool {
        let free = Change { client, handle, maker: None };
        let mut exports = self.naming.iter().filter(|naming| naming.is_export);
        exports.any(|naming| moves(&self.ledger, naming, free))
    }

    /// Whether the names say what they do until [`Books::is_moved`] says otherwise; they may not
    /// while one of the objects is being made, or freed.
    pub(in crate::gate::worker) fn stays(&mut self, number: u64) -> bool {
        let (ledger, changing) = (&self.ledger, &self.changing);
        let Some(naming) = self.naming.iter_mut().find(|naming| naming.number == number) else {
            return false;
        };
        naming.is_moved = false;
        !changing.iter().any(|change| moves(ledger, naming, *change))
    }

    /// Whether nobody makes or frees one of the objects themselves; or else it was touched, where that
    /// is `waited` for no longer.
    pub(in crate::gate::worker) fn may_be_named(&mut self, number: u64, waited: bool) -> bool {
        let (ledger, changing) = (&self.ledger, &self.changing);
        let Some(naming) = self.naming.iter_mut().find(|naming| naming.number == number) else {
            return true;
        };
        let is_busy = changing.iter().any(|change| touches(ledger, naming, *change));
        naming.is_touched |= is_busy && waited;
        !is_busy || waited
    }

    /// Whether an object began to be made or freed since [`Books::stays`], or may have been freed.
    pub(in crate::gate::worker) fn is_moved(&self, number: u64) -> bool {
        let naming = self.naming.iter().find(|naming| naming.number == number);
        naming.is_none_or(|naming| naming.is_moved)
    }

    /// Whether one was itself made or freed since it was named.
    pub(in crate::gate::worker) fn is_touched(&self, number: u64) -> bool {
        let naming = self.naming.iter().find(|naming| naming.number == number);
        naming.is_none_or(|naming| naming.is_touched || naming.is_remade && naming.is_moved)
    }

    /// An object was made, and stays. Another that the same handle was given was freed, then.
    pub(in crate::gate::worker) fn was_made(
        &mut self,
        number: u64,
        client: Client,
        handle: Handle,
    ) {
        let others = self.naming.iter_mut().filter(|naming| naming.number != number);
        let same = others.filter(|naming| naming.client == client && naming.is_making);
        same.filter(|naming| naming.objects.contains(&handle))
            .for_each(|naming| naming.is_touched = true);
    }
}

/// Whether a name may say something else after a change.
fn moves(ledger: &Ledger, naming: &Naming, change: Change) -> bool {
    let goes = |object: &Handle| match change.maker {
        Some(_) => *object == change.handle,
        None => ledger.is_freed_by(change.client, *object, change.handle),
    };
    is_of_another(naming, change) && naming.objects.iter().any(goes)
}

/// Whether it does: of itself, or of what it's known to hang below.
fn touches(ledger: &Ledger, naming: &Naming, change: Change) -> bool {
    let Change { client, handle, maker } = change;
    let is_freed = |object: &Handle| {
        maker.is_none() && (handle.0 == client.0 || ledger.is_below(client, *object, handle))
    };
    let goes = |object: &Handle| *object == handle || is_freed(object);
    is_of_another(naming, change) && naming.objects.iter().any(goes)
}

/// Whether another call makes what this one makes.
fn remakes(naming: &Naming, Change { client, handle, maker }: Change) -> bool {
    let is_other = maker.is_some_and(|maker| maker != naming.number);
    is_other && naming.is_making && naming.client == client && naming.objects.contains(&handle)
}

/// Whether it isn't the call's own change, of a client that it names something of.
fn is_of_another(naming: &Naming, Change { client, handle, maker }: Change) -> bool {
    let is_own = maker == Some(naming.number)
        || maker.is_some() && naming.is_making
        || maker.is_none() && naming.spares == (client, handle);
    naming.client == client && !is_own
}

#[cfg(test)]
mod tests {
    use super::super::tests::{journal, open};
    use super::*;
    use crate::ledger::Entry;

    #[test]
    fn names_are_moved_by_frees_and_by_makings_and_touched_by_those_of_their_own() {
        let (mut books, _) = open(&journal());
        let (client, root) = (Client(1), Handle(1));
        let [device, memory, other] = [2, 3, 4].map(Handle);
        books.note(client.0, root.0, device.0);
        for handle in [memory, other] {
            books.enter(Entry::Commit { gpu: 0, bytes: 1, client, parent: device, handle });
        }
        let none = (Client(0), Handle(0));
        let mut after = |begin: &dyn Fn(&mut Books), end: &dyn Fn(&mut Books)| {
            books.begin_naming(7, client, vec![memory], none);
            begin(&mut books);
            let found = (books.is_moved(7), books.is_touched(7));
            end(&mut books);
            books.end_naming(7);
            found
        };
        let mut freed = |of, handle| {
            after(&|books| books.begin_free(of, handle), &|books| books.end_free(of, handle))
        };
        assert_eq!(freed(client, other), (false, false));
        assert_eq!(freed(Client(2), memory), (false, false));
        assert_eq!(freed(client, memory), (true, true));
        assert_eq!(freed(client, device), (true, true));
        assert_eq!(freed(client, root), (true, true));
        // All that is above it is known, and this is none of it.
        assert_eq!(freed(client, Handle(9)), (false, false));
        let mut made = |by, handle| {
            after(&|books| books.begin_make(by, client, handle), &|books| {
                books.end_make(by, client, handle)
            })
        };
        assert_eq!(made(8, memory), (true, true));
        assert_eq!(made(8, other), (false, false));
        assert_eq!(made(7, memory), (false, false));
        // What is there already is waited for, where it's of the object itself.
        books.begin_make(8, client, memory);
        books.begin_naming(9, client, vec![memory], none);
        assert!(!books.may_be_named(9, false) && !books.is_touched(9));
        assert!(books.may_be_named(9, true) && books.is_touched(9));
        books.end_make(8, client, memory);
        books.begin_naming(10, client, vec![memory], none);
        assert!(books.may_be_named(10, false) && !books.is_touched(10) && !books.is_moved(10));
        // Who makes it, too, does so only where it was freed: by whom nobody may know.
        let unknown = [5, 6].map(Handle);
        books.begin_naming(11, client, unknown.to_vec(), none);
        books.is_making(11);
        books.begin_make(12, client, unknown[0]);
        assert!(!books.is_touched(11) && !books.is_moved(11));
        books.begin_free(client, Handle(9));
        assert!(books.is_moved(11) && books.is_touched(11));
        books.begin_naming(13, client, unknown.to_vec(), none);
        books.is_making(13);
        books.was_made(13, client, unknown[1]);
        books.was_made(12, Client(2), unknown[1]);
        assert!(!books.is_touched(13));
        books.was_made(12, client, unknown[1]);
        assert!(books.is_touched(13));
    }
}
