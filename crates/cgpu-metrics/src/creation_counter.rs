//! Container creations, counted by their events: [`Counter`].

use std::io;

use cgpu_host::events::{Event, Follower, Store};

use crate::creations::Creates;

/// A reader of events, and what it has counted.
#[derive(Debug)]
struct Counted {
    events: Follower,
    creates: Creates,
}

/// Counts container creations as their events come.
#[derive(Debug)]
pub(crate) struct Counter {
    store: Store,
    /// `None` after a read that didn't come back.
    counted: Option<Counted>,
}

impl Counter {
    /// From the first retained event on.
    ///
    /// # Errors
    ///
    /// If a file is there and can't be opened.
    pub(crate) fn new(store: Store) -> io::Result<Self> {
        let counted = Some(Counted::new(&store)?);
        Ok(Counter { store, counted })
    }

    /// The container creations until now; if the events can't be read, those counted before, and why.
    pub(crate) fn count(&mut self) -> (Creates, Option<io::Error>) {
        self.count_by(Follower::read)
    }

    fn count_by(
        &mut self,
        read: impl FnOnce(&mut Follower) -> io::Result<Vec<Event>>,
    ) -> (Creates, Option<io::Error>) {
        // It is not here while it is read: if that panics, what was half counted is dropped, and the next read
        // counts from the first event on.
        let mut counted = match self.counted.take().map_or_else(|| Counted::new(&self.store), Ok) {
            Ok(counted) => counted,
            Err(error) => return (Creates::default(), Some(error)),
        };
        let failed = read(&mut counted.events).map(|events| counted.creates.count(&events)).err();
        let creates = counted.creates.clone();
        self.counted = Some(counted);
        (creates, failed)
    }
}

impl Counted {
    fn new(store: &Store) -> io::Result<Self> {
        Ok(Counted { events: Follower::new(store.clone())?, creates: Creates::default() })
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use cgpu_host::events::Kind;

    use super::*;

    #[test]
    fn events_of_a_panicked_read_are_counted_once() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::of(dir.path());
        let append = || store.append(&Event::new(Kind::Created)).unwrap();
        let mut counter = Counter::new(store.clone()).unwrap();
        append();
        assert_eq!(counter.count().0.admitted, 1);
        append();
        let panics = catch_unwind(AssertUnwindSafe(|| {
            // The event is read, and not counted any more.
            counter.count_by(|events| panic!("{:?}", events.read()))
        }));
        assert!(panics.is_err());
        append();
        for _ in 0..2 {
            let (creates, failed) = counter.count();
            assert!(creates.admitted == 3 && failed.is_none(), "{creates:?} {failed:?}");
        }
    }

    #[test]
    fn counts_stay_while_events_cannot_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::of(dir.path());
        let mut counter = Counter::new(store.clone()).unwrap();
        store.append(&Event::new(Kind::Created)).unwrap();
        assert_eq!(counter.count().0.admitted, 1);
        let (creates, failed) = counter.count_by(|_| Err(io::ErrorKind::NotADirectory.into()));
        assert!(creates.admitted == 1 && failed.is_some());
        assert_eq!(counter.count().0.admitted, 1);
    }
}
