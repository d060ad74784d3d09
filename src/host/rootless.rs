//! Whole GPUs under engines that aren't root's.
//!
//! Nothing is registered and nothing of root's is written: the driver is found each time, and its nodes and files
//! come by bind mounts, since a user can make no node. A user may open the host's nodes without a container as well,
//! so that these GPUs are no more than the host gives anyway. Must not know quotas: they are refused before.

use std::path::Path;

use super::{Host, require_root};
use crate::admission::error::AdmissionError;
use cgpu_core::plan::{Limits, POLICY_NATIVE};
use cgpu_core::request::Request;
use cgpu_host::config::{Inject, Whole};
use cgpu_host::process::{ProcessId, boot_id};
use cgpu_host::registry::{Holder, Key, Record};
use cgpu_inject::Purpose;
use cgpu_inject::bundle::{Bind, Bundle, Edits};

impl Host {
    /// Whether a container of `request` gets its GPUs without being registered: its engine isn't root's, and no
    /// rule of this host makes it matter to others.
    #[must_use]
    pub fn serves_unregistered(&self, request: &Request) -> bool {
        !request.has_quota() && !self.config.admission.exclusive && require_root().is_err()
    }

    /// Gives the container of `bundle` the GPUs of `request`, which [is served so](Self::serves_unregistered);
    /// whether that changed the bundle.
    ///
    /// # Errors
    ///
    /// If a GPU isn't there, or the driver's files can't come as the configuration says.
    pub fn equip_unregistered(
        &self,
        request: &Request,
        bundle: &mut Bundle,
    ) -> Result<bool, AdmissionError> {
        if request.is_as_brought() {
            return Ok(false);
        }
        let mut host = self.clone();
        // NVIDIA's runtime fails for a user unless its own configuration has no-cgroups = true.
        if host.config.driver.whole == Whole::NvidiaRuntime {
            host.config.driver.whole = Whole::Auto;
        }
        host.decide_injection(true, |_| false);
        if host.config.driver.inject == Inject::NvidiaRuntime {
            host.config.driver.inject = Inject::Auto;
        }
        let inventory = host.inventory(request)?;
        let proposal = host.plan(request, &inventory)?;
        let plan = proposal.place(&[], &host.own_limits(), self.config.admission.placement)?;
        let nodes = host.nodes(&plan, &inventory, bundle, Purpose::Unregistered)?;
        let nodes = nodes.bound(&host.driver_nodes())?;
        let injection = host.injection(&plan, &inventory, bundle, Purpose::Unregistered)?;
        let record = Record {
            key: Key { root: String::new(), id: String::new() },
            bundle: bundle.dir().to_owned(),
            short_id: String::new(),
            boot_id: boot_id(Path::new("/proc")),
            holder: Holder::Active { init: ProcessId::own() },
            plan,
        };
        let edits = host.edits((&record, request), bundle, nodes, injection.edits, Vec::new())?;
        Ok(bundle.apply(&without_numbers(edits))?)
    }

    /// The limits for containers that no other container counts against.
    fn own_limits(&self) -> Limits {
        let admission = &self.config.admission;
        Limits {
            overcommit: admission.overcommit,
            max_inst: admission.max_inst,
            max_inst_of: [].into(),
            policy: POLICY_NATIVE,
            policy_of: [].into(),
            bounds_weights: true,
            exclusive: admission.exclusive,
        }
    }
}

/// The same edits with the host's own node in the place of each that would be declared.
fn without_numbers(edits: Edits) -> Edits {
    let bind = |path: String| Bind { source: path.clone(), destination: path };
    let declared = edits.devices.into_iter().map(|device| bind(device.path));
    let binds = edits.binds.into_iter().chain(declared).collect();
    Edits { devices: Vec::new(), binds, ..edits }
}
