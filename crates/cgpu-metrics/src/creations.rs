//! Container creations, counted: [`Creates`]. Pure.

use std::collections::BTreeMap;

use cgpu_host::events::{Cause, Event, Kind};

/// How many containers got what they asked for, and how many were not created, by what prevented
/// it; as far back as events are retained when the count begins.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Creates {
    pub(crate) admitted: u64,
    pub(crate) refused: BTreeMap<Cause, u64>,
}

impl Creates {
    /// Counts what `events` report of container creations.
    pub(crate) fn count(&mut self, events: &[Event]) {
        for event in events {
            match event.kind {
                Kind::Created => self.admitted += 1,
                Kind::Refused => {
                    *self.refused.entry(event.cause.unwrap_or(Cause::Other)).or_default() += 1;
                }
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn creates_are_counted_and_other_events_are_not() {
        let refused = |cause| Event { cause, ..Event::new(Kind::Refused) };
        let mut creates = Creates::default();
        creates.count(&[Event::new(Kind::Created), refused(Some(Cause::Memory))]);
        creates.count(&[Event::new(Kind::Removed), refused(None), refused(Some(Cause::Memory))]);
        let by_cause = BTreeMap::from([(Cause::Memory, 2), (Cause::Other, 1)]);
        assert_eq!(creates, Creates { admitted: 1, refused: by_cause });
    }
}
