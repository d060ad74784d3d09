//! The objects of all clients as trees: what hangs below what, and which charge each names.

use std::collections::{BTreeMap, BTreeSet};

use super::{ChargeId, Client, Handle, Shown};

#[derive(Debug, Default)]
pub(super) struct Objects {
    all: BTreeMap<(Client, Handle), Entered>,
    /// Of the last one; one comes again after four thousand million others.
    serial: u32,
    /// Client, parent, child.
    children: BTreeSet<(Client, Handle, Handle)>,
    /// How many show elsewhere than where their memory is.
    elsewhere: usize,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Object {
    pub(super) parent: Handle,
    pub(super) charge: Option<ChargeId>,
    /// Where that shows.
    pub(super) shown: Shown,
}

/// An object, and which of all that were entered.
#[derive(Debug, Clone, Copy)]
struct Entered {
    object: Object,
    serial: u32,
}

/// What an object named that is gone: which memory, and which of all objects it was.
#[derive(Debug, Clone, Copy)]
pub(super) struct RemovedName {
    pub(super) id: ChargeId,
    pub(super) serial: u32,
}

const LOWEST: Handle = Handle(0);
const HIGHEST: Handle = Handle(u32::MAX);

impl Objects {
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn contains(&self, client: Client, handle: Handle) -> bool {
        self.all.contains_key(&(client, handle))
    }

    pub(super) fn charge(&self, client: Client, handle: Handle) -> Option<ChargeId> {
        self.all.get(&(client, handle)).and_then(|entered| entered.object.charge)
    }

    pub(super) fn shown(&self, client: Client, handle: Handle) -> Shown {
        self.all.get(&(client, handle)).map_or(Shown::Here, |entered| entered.object.shown)
    }

    pub(super) fn serial(&self, client: Client, handle: Handle) -> Option<u32> {
        self.all.get(&(client, handle)).map(|entered| entered.serial)
    }

    pub(super) fn has_elsewhere(&self) -> bool {
        self.elsewhere > 0
    }

    /// Client, handle and the rest of all.
    pub(super) fn iter(&self) -> impl Iterator<Item = (Client, Handle, &Object)> {
        self.all.iter().map(|((client, handle), entered)| (*client, *handle, &entered.object))
    }

    /// Those that name memory: its charge, and the client, the handle and the serial.
    pub(super) fn names(&self) -> impl Iterator<Item = (ChargeId, (Client, Handle, u32))> {
        let named = |entered: &Entered| Some((entered.object.charge?, entered.serial));
        self.all.iter().filter_map(move |((client, handle), entered)| {
            named(entered).map(|(charge, serial)| (charge, (*client, *handle, serial)))
        })
    }

    /// Enters an object whose handle is free.
    pub(super) fn insert(&mut self, client: Client, handle: Handle, object: Object) {
        self.serial = self.serial.wrapping_add(1);
        self.all.insert((client, handle), Entered { object, serial: self.serial });
        self.children.insert((client, object.parent, handle));
        self.elsewhere += usize::from(object.shown != Shown::Here);
    }

    /// Takes an object and all below it out; what they named.
    pub(super) fn remove_tree(&mut self, client: Client, handle: Handle) -> Vec<RemovedName> {
        let mut names = Vec::new();
        let mut left = vec![handle];
        // Each is taken out before its children are looked for: a cycle, which the driver
        // never makes, ends too.
        while let Some(handle) = left.pop() {
            // Nobody may have told of it, and of what hangs below.
            if let Some(Entered { object, serial }) = self.all.remove(&(client, handle)) {
                self.children.remove(&(client, object.parent, handle));
                self.elsewhere -= usize::from(object.shown != Shown::Here);
                names.extend(object.charge.map(|id| RemovedName { id, serial }));
            }
            let below = self.children.range((client, handle, LOWEST)..=(client, handle, HIGHEST));
            left.extend(below.map(|(_, _, child)| *child));
        }
        names
    }

    /// The same of all objects of a client.
    pub(super) fn remove_client(&mut self, client: Client) -> Vec<RemovedName> {
        let range = (client, LOWEST)..=(client, HIGHEST);
        let handles: Vec<Handle> = self.all.range(range).map(|((_, handle), _)| *handle).collect();
        handles.into_iter().flat_map(|handle| self.remove_tree(client, handle)).collect()
    }
}
