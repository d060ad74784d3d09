//! Which events a word means, and what their containers are called. Pure.
//!
//! A word means what it means to `cgpu ps`: an id; else a name; else the last part of a name, as of a
//! container in a pod; else the beginning of ids. Names are those that were known when the event was
//! written, so a container is found by its name after it is gone, too. What follows from an event that
//! is meant is meant as well: all events of the same id.

use std::collections::{BTreeMap, BTreeSet};

use super::{Event, Kind};

/// How a word means a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Id,
    Name,
    LastPart,
    Prefix,
}

const WAYS: [Way; 4] = [Way::Id, Way::Name, Way::LastPart, Way::Prefix];

impl Way {
    fn fits(self, word: &str, event: &Event) -> bool {
        let name = event.name.as_deref();
        match self {
            Way::Id => event.id == word,
            Way::Name => name == Some(word),
            Way::LastPart => name.is_some_and(|name| name.rsplit('/').next() == Some(word)),
            Way::Prefix => event.id.starts_with(word),
        }
    }
}

/// What of a stream of events is shown.
#[derive(Debug)]
pub struct Filter {
    word: Option<String>,
    way: Option<Way>,
    ids: BTreeSet<String>,
}

impl Filter {
    /// All that `word` means among `events`, and later; `None`: everything. `registered` is the id of
    /// the container that has this name now.
    #[must_use]
    pub fn new(word: Option<&str>, registered: Option<&str>, events: &[Event]) -> Self {
        let mut filter = Filter { word: word.map(str::to_owned), way: None, ids: BTreeSet::new() };
        let Some(word) = word.filter(|word| !word.is_empty()) else { return filter };
        filter.ids.extend(registered.map(str::to_owned));
        filter.way = WAYS.into_iter().find(|way| events.iter().any(|event| way.fits(word, event)));
        let way = filter.way;
        let fits = |event: &&Event| way.is_some_and(|way| way.fits(word, event));
        filter.ids.extend(events.iter().filter(fits).map(|event| event.id.clone()));
        for event in events {
            filter.learn(event);
        }
        filter
    }

    /// One that was registered under another id is the same container.
    fn learn(&mut self, event: &Event) {
        let Some(former) = event.former_id.as_ref().filter(|_| event.kind == Kind::Named) else {
            return;
        };
        if self.ids.contains(&event.id) || self.ids.contains(former) {
            self.ids.extend([event.id.clone(), former.clone()]);
        }
    }

    /// The ids that are meant.
    pub fn ids(&self) -> impl Iterator<Item = &str> {
        self.ids.iter().map(String::as_str)
    }

    /// Whether anything is meant so far.
    #[must_use]
    pub fn has_any(&self) -> bool {
        self.word.is_none() || !self.ids.is_empty()
    }

    /// Whether `event` is meant.
    pub fn takes(&mut self, event: &Event) -> bool {
        let Some(word) = &self.word else { return true };
        if word.is_empty() {
            return false;
        }
        let ways = self.way.map_or(WAYS.to_vec(), |way| vec![way]);
        if let Some(way) = ways.into_iter().find(|way| way.fits(word, event)) {
            self.way = Some(way);
            self.ids.insert(event.id.clone());
        }
        self.learn(event);
        self.ids.contains(&event.id)
    }
}

/// The containers' names, as far as events reported them.
#[derive(Debug, Default)]
pub struct Names(BTreeMap<String, String>);

impl Names {
    /// What the container of `event` is called: by that event, or by one before.
    pub fn of(&mut self, event: &Event) -> Option<String> {
        if let Some(name) = &event.name {
            self.0.insert(event.id.clone(), name.clone());
        }
        if let Some(name) = event.former_id.as_ref().and_then(|former| self.0.get(former)).cloned()
        {
            self.0.entry(event.id.clone()).or_insert(name);
        }
        match event.kind {
            // The id may be another's next.
            Kind::Removed => self.0.remove(&event.id),
            _ => self.0.get(&event.id).cloned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(id: &str, name: Option<&str>) -> Event {
        Event::new(Kind::Created).of(id, name, "/run/runc")
    }

    fn shown(word: &str, events: &[Event]) -> Vec<usize> {
        let mut filter = Filter::new(Some(word), None, events);
        (0..events.len()).filter(|at| filter.takes(&events[*at])).collect()
    }

    /// A word matches an id, a name, the last part of a name or the beginning of ids.
    #[test]
    fn word_matches_id_name_last_part_or_prefix() {
        let events = [
            event("3f2a", Some("web")),
            event("3f2a", None),
            event("4b00", Some("default/pod/main")),
            event("web", None),
            event("3f2b", Some("db")),
            event("5c00", Some("db")),
        ];
        for (word, expected) in [
            // A container whose name is another's id gets none of the other's events.
            ("web", &[3][..]),
            ("3f2a", &[0, 1]),
            ("3f2", &[0, 1, 4]),
            ("main", &[2]),
            ("default/pod/main", &[2]),
            // One after the other.
            ("db", &[4, 5]),
            ("pod", &[]),
            ("", &[]),
        ] {
            assert_eq!(shown(word, &events), expected, "{word}");
        }
        let mut all = Filter::new(None, None, &events);
        assert!(events.iter().all(|event| all.takes(event)));
    }

    /// Events that come later are matched as those that were there before.
    #[test]
    fn later_events_match_as_earlier_ones_did() {
        let mut filter = Filter::new(Some("web"), None, &[]);
        assert!(!filter.has_any() && !filter.takes(&event("1", Some("db"))));
        assert!(filter.takes(&event("2", Some("web"))) && filter.takes(&event("2", None)));
        assert!(!filter.takes(&event("web", None)), "it was a name before");
        let mut filter = Filter::new(Some("www"), Some("7"), &[event("7", Some("web"))]);
        assert!(filter.takes(&event("7", None)), "it was renamed since");
    }

    /// A container that was announced is the one that was created.
    #[test]
    fn announced_container_matches_the_created_one() {
        let announced = event("12-34", Some("web"));
        let mut named = event("3f2a", None);
        named.kind = Kind::Named;
        named.former_id = Some("12-34".into());
        let events = [announced, named, event("3f2a", None), event("9", None)];
        for word in ["web", "3f2a", "3f"] {
            assert_eq!(shown(word, &events), [0, 1, 2], "{word}");
        }
        let mut names = Names::default();
        let reported: Vec<_> = events.iter().map(|event| names.of(event)).collect();
        let web = Some("web".to_owned());
        assert_eq!(reported, [web.clone(), web.clone(), web, None]);
    }
}
