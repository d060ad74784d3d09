//! The container that a runtime has made, by the runtime's own state of it.
//!
//! A hook that says "it exists" would cost a create as much as all the rest; the file in
//! which runc and crun keep the first process says the same, for nothing.

use super::record::{Holder, Record};
use crate::process;

/// `record` with the container's process as its holder, where that is there.
pub(super) fn seen(record: Record) -> Record {
    let Holder::Launched { state_file, .. } = &record.holder else { return record };
    match process::first_of(state_file) {
        Some(init) => Record { holder: Holder::Active { init: Some(init) }, ..record },
        None => record,
    }
}
