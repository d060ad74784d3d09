//! Reports the events of one host's containers, or of one container: [`EventSink`].
//!
//! No caller waits for it or fails by it: what can't be written into the file stands in the log,
//! and the other way round.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::{Event, Store};

/// Where events go, and of whom they are where they don't say it themselves.
#[derive(Debug, Clone)]
pub struct EventSink {
    store: Option<Store>,
    id: String,
    name: Option<String>,
    root: String,
}

impl EventSink {
    /// For the containers of a host with that state directory; an empty path is none, and then the
    /// log alone has events.
    #[must_use]
    pub fn of_host(state_dir: &Path) -> Self {
        Self::of_container(state_dir.to_owned(), String::new(), None, String::new())
    }

    /// For that container.
    #[must_use]
    pub fn of_container(
        state_dir: PathBuf,
        id: String,
        name: Option<String>,
        root: String,
    ) -> Self {
        let has_any = !state_dir.as_os_str().is_empty();
        EventSink { store: has_any.then(|| Store::of(&state_dir)), id, name, root }
    }

    /// Writes it down, as of now.
    pub fn report(&self, mut event: Event) {
        if event.id.is_empty() {
            event = event.of(&self.id, self.name.as_deref(), &self.root);
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        event.at_us = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
        if let Some(store) = &self.store {
            // The log has it all the same.
            let _ = store.append(&event);
        }
        log(&event);
    }
}

/// Its line of the log.
fn log(event: &Event) {
    let headline = event.headline();
    let text = tracing::field::display::<String>;
    let is_created = event.kind == super::Kind::Created;
    let gpus = is_created.then(|| text(event.shares()));
    let backend = event.backend.clone().filter(|_| is_created).map(text);
    let quota_by = event.quota_by.clone().filter(|_| is_created);
    let left_out = (event.left_out > 0).then_some(event.left_out);
    let (id, root) = (event.id.as_str(), event.root.as_deref().filter(|_| is_created));
    let Event { name, chosen, driver_files, short_id, gpu, pid, program, former_id, .. } = event;
    let (name, chosen, driver_files) =
        (name.as_deref(), chosen.as_deref(), driver_files.as_deref());
    let (short_id, program) = (short_id.as_deref(), program.as_deref());
    let former_id = former_id.as_deref();
    if event.is_warning() {
        tracing::warn!(id, name, gpu, pid, program, left_out, "{headline}");
    } else {
        tracing::info!(
            id,
            root,
            gpus,
            backend,
            chosen,
            driver_files,
            quota_by,
            short_id,
            former_id,
            name,
            gpu,
            pid,
            program,
            left_out,
            "{headline}"
        );
    }
}
