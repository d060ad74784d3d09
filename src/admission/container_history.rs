//! What events say of a container's past, for a refusal: that it had a GPU which the host no longer has.

use super::AdmissionError;
use crate::admission::Admission;
use cgpu_core::plan::ResolveError;
use cgpu_host::events::{Event, Follower, Kind, Store};
use cgpu_host::registry::Key;

impl Admission<'_> {
    /// `error` of the container of `key`, called `name`, which says so if the container had the missing GPU.
    #[must_use]
    pub fn with_past(
        &self,
        error: AdmissionError,
        key: &Key,
        name: Option<&str>,
    ) -> AdmissionError {
        let AdmissionError::Resolve(ResolveError::GoneGpu { said, item, known, .. }) = error else {
            return error;
        };
        let events = Follower::new(Store::of(&self.host.config.state_dir))
            .and_then(|mut events| events.read())
            .unwrap_or_default();
        let had_before = had(&events, (&key.id, name), &item);
        ResolveError::GoneGpu { said, item, known, had_before }.into()
    }
}

/// Whether the container of that id, or of that name, was created with the GPU `uuid`.
fn had(events: &[Event], (id, name): (&str, Option<&str>), uuid: &str) -> bool {
    let is_it =
        |event: &&Event| event.id == id || (name.is_some() && event.name.as_deref() == name);
    let mut created = events.iter().filter(is_it).filter(|event| event.kind == Kind::Created);
    created.any(|event| event.gpus.iter().any(|gpu| gpu.uuid.eq_ignore_ascii_case(uuid)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cgpu_host::events::Share;

    #[test]
    fn a_container_had_what_it_was_created_with() {
        let event = |kind, id: &str, name, uuid: &str| {
            let share = Share { index: 0, uuid: uuid.to_owned(), quota_bytes: None };
            Event { gpus: vec![share], ..Event::new(kind).of(id, name, "/run/runc") }
        };
        let events = [
            event(Kind::Created, "one", Some("trainer"), "GPU-a"),
            event(Kind::Refused, "two", None, "GPU-b"),
        ];
        for (who, uuid, expected) in [
            (("one", None), "GPU-a", true),
            (("one", None), "gpu-A", true),
            (("one", None), "GPU-b", false),
            (("other", Some("trainer")), "GPU-a", true),
            (("other", None), "GPU-a", false),
            (("two", None), "GPU-b", false),
        ] {
            assert_eq!(had(&events, who, uuid), expected, "{who:?} {uuid}");
        }
    }
}
