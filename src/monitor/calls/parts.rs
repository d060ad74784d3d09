//! The parts of a monitor that calls and audits work with. Each part has its own state, and knows only parts above it in
//! the list.

use std::io;
use std::sync::Arc;

use crate::monitor::audit::{Audit, KeptExports, Mappings};
use crate::monitor::caller::{AuditWait, Targets};
use crate::monitor::calls::callers::Callers;
use crate::monitor::compute::{Slices, Turns};
use crate::monitor::driver::{DriverAccess, Stakes};
use crate::monitor::processes::Processes;
use crate::monitor::state::{ContainerState, Lane};
use crate::monitor::uvm::Uvm;

/// All parts of a monitor.
#[derive(Debug)]
pub(crate) struct Parts {
    /// Settings, books, figures and log of the container.
    pub(crate) state: Arc<ContainerState>,
    /// Orders the calls that make, name or free objects one after another.
    pub(crate) lane: Arc<Lane>,
    /// The monitor's client of the driver.
    pub(crate) driver: Arc<DriverAccess>,
    /// Slices of channel groups, for the shares of computing time.
    pub(crate) slices: Arc<Slices>,
    /// The threads that call, and the replies that they did not take.
    pub(crate) callers: Callers,
    /// The container's processes, and killing them.
    pub(crate) processes: Arc<Processes>,
    /// The duplicates of the monitor's client that keep the driver's figures true.
    pub(crate) stakes: Arc<Stakes>,
    /// The files that memory was exported to.
    pub(crate) exports: Arc<KeptExports>,
    /// The files of nvidia-uvm.
    pub(crate) uvm: Arc<Uvm>,
    /// The mappings of nvidia-uvm.
    pub(crate) mappings: Arc<Mappings>,
    /// Turns on a GPU, for the shares of computing time.
    pub(crate) turns: Arc<Turns>,
    /// Compares the driver's figures with the books, and searches for outside processes that have descriptors.
    pub(crate) audit: Audit,
}

impl Parts {
    /// Makes the parts of a monitor. `state` is the container's. Fails if the host's mount namespace can't be found
    /// out ([`Targets::new`]), or the monitor can have no further descriptors.
    pub(crate) fn new(state: ContainerState) -> io::Result<Self> {
        let (state, audit_wait) = (Arc::new(state), Arc::new(AuditWait::new()?));
        let lane = Arc::new(Lane::default());
        let driver = Arc::new(DriverAccess::new(Arc::clone(&state)));
        let targets = Arc::new(Targets::new(state.settings.spares_host)?);
        let slices =
            Arc::new(Slices::new(Arc::clone(&driver), Arc::clone(&state), Arc::clone(&targets)));
        let callers =
            Callers::new(Arc::clone(&state), Arc::clone(&lane), Arc::clone(&slices), targets);
        let processes = Arc::new(Processes::new(Arc::clone(&state)));
        let stakes = Arc::new(Stakes::new(
            Arc::clone(&driver),
            Arc::clone(&state),
            Arc::clone(&lane),
            Arc::clone(&audit_wait),
        ));
        let exports = Arc::new(KeptExports::new(
            Arc::clone(&stakes),
            Arc::clone(&processes),
            Arc::clone(&lane),
        ));
        let uvm = Arc::new(Uvm::new(Arc::clone(&processes), Arc::clone(&lane)));
        let mappings =
            Arc::new(Mappings::new(Arc::clone(&processes), Arc::clone(&lane), Arc::clone(&uvm)));
        let turns = Arc::new(Turns::new(Arc::clone(&slices)));
        let audit = Audit::new(
            Arc::clone(&stakes),
            Arc::clone(&lane),
            (Arc::clone(&uvm), Arc::clone(&mappings.managed)),
            Arc::clone(&exports),
            Arc::clone(&slices),
            Arc::clone(&processes),
            audit_wait,
        );
        Ok(Parts {
            state,
            lane,
            driver,
            slices,
            callers,
            processes,
            stakes,
            exports,
            uvm,
            mappings,
            turns,
            audit,
        })
    }
}
