//! No isolation at all: visibility and environment only.
//!
//! For frameworks that limit themselves ("sharing without isolation"). It is chosen by
//! name only, never as a substitute for a backend that can't be used. Invariant: it
//! promises nothing, so it has nothing to do, to list or to undo.

use serde_json::Value;
use thiserror::Error;

use super::{BackendError, Isolation, Observed, Tenant};
use cgpu_core::plan::Change;
use cgpu_inject::bundle::Edits;

/// The backend that enforces nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Unisolated;

/// What can't be had without isolation.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum NoneError {
    /// A change of what isn't enforced.
    #[error(
        "backend none enforces nothing, so {what} of {id} can't be changed; \
         create the container anew with backend gate or km"
    )]
    Unenforced {
        id: String,
        /// What was to be changed.
        what: &'static str,
    },
}

impl Isolation for Unisolated {
    fn usable(&self) -> Result<(), BackendError> {
        Ok(())
    }

    fn edit(&self, _profile: Option<&Value>, _edits: &mut Edits) -> Result<(), BackendError> {
        Ok(())
    }

    fn activate(&self, _tenant: Tenant<'_>) -> Result<(), BackendError> {
        Ok(())
    }

    fn deactivate(&self, _short_id: &str) -> Result<(), BackendError> {
        Ok(())
    }

    fn list(&self, _short_ids: Option<&[&str]>) -> Result<Vec<Observed>, BackendError> {
        Ok(Vec::new())
    }

    fn set(&self, tenant: Tenant<'_>, change: Change) -> Result<(), BackendError> {
        let what = match change {
            Change::MemoryLimit { .. } => "the memory quota",
            Change::Weight(_) => "the weight",
            Change::HighPriority(_) => "the priority",
        };
        Err(NoneError::Unenforced { id: tenant.id.to_owned(), what }.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cgpu_core::plan::{Kind, Plan};

    fn plan() -> Plan {
        Plan {
            backend: Kind::None,
            gpus: Vec::new(),
            weight: 1,
            high_priority: false,
            caveats: cgpu_core::plan::Caveats::default(),
        }
    }

    #[test]
    fn promises_nothing_and_is_usable_everywhere() {
        let plan = plan();
        let tenant = Tenant { id: "demo", short_id: "demo00000000", plan: &plan };
        assert_eq!(Kind::None.holds(), "nothing");
        Unisolated.usable().unwrap();
        Unisolated.activate(tenant).unwrap();
        assert_eq!(Unisolated.list(None).unwrap(), []);
        Unisolated.deactivate("demo00000000").unwrap();
        Unisolated.deactivate("demo00000000").unwrap();
    }

    #[test]
    fn refuses_a_change_it_would_not_enforce() {
        let plan = plan();
        let tenant = Tenant { id: "demo", short_id: "demo00000000", plan: &plan };
        let refusal = |change| Unisolated.set(tenant, change).unwrap_err().to_string();
        assert_eq!(
            refusal(Change::MemoryLimit { gpu_index: 0, bytes: 1 << 30 }),
            "backend none enforces nothing, so the memory quota of demo can't be changed; \
             create the container anew with backend gate or km"
        );
        assert!(refusal(Change::Weight(2)).contains("so the weight of demo can't"));
        assert!(refusal(Change::HighPriority(true)).contains("so the priority of demo can't"));
    }
}
