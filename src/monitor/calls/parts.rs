//! The parts of a worker that calls and audits have to do with. Each has its own state, and knows those above
//! it in the list.

use std::io;
use std::sync::Arc;

use crate::monitor::audit::kept_exports::KeptExports;
use crate::monitor::audit::look::Audit;
use crate::monitor::audit::mappings::Mappings;
use crate::monitor::caller::audit_wait::AuditWait;
use crate::monitor::caller::target::Targets;
use crate::monitor::calls::callers::Callers;
use crate::monitor::calls::left_calls::is_left;
use crate::monitor::compute::slices::Slices;
use crate::monitor::compute::turns::Turns;
use crate::monitor::driver::access::DriverAccess;
use crate::monitor::driver::stakes::Stakes;
use crate::monitor::keeper_socket::KeeperSocket;
use crate::monitor::processes::container_processes::Processes;
use crate::monitor::state::container_state::ContainerState;
use crate::monitor::state::lane::Lane;
use crate::monitor::uvm::kept_files::Uvm;

/// All parts.
#[derive(Debug)]
pub(crate) struct Parts {
    /// Settings, books, figures and log of the container.
    pub(crate) state: Arc<ContainerState>,
    /// Calls that make, name or free objects, one after another.
    pub(crate) lane: Arc<Lane>,
    /// Our client of the driver.
    pub(crate) driver: Arc<DriverAccess>,
    /// Threads that call, and what was done for those that didn't take it.
    pub(crate) callers: Callers,
    /// The container's processes, and ending them.
    pub(crate) processes: Arc<Processes>,
    /// Duplicates of ours that keep figures true.
    pub(crate) stakes: Arc<Stakes>,
    /// Files that memory was exported to.
    pub(crate) exports: Arc<KeptExports>,
    /// Files of UVM's.
    pub(crate) uvm: Arc<Uvm>,
    /// What is mapped of them.
    pub(crate) mappings: Arc<Mappings>,
    /// Shares of computing time: slices.
    pub(crate) slices: Arc<Slices>,
    /// The same: turns.
    pub(crate) turns: Arc<Turns>,
    /// What the driver says that the container has.
    pub(crate) audit: Audit,
}

impl Parts {
    /// The parts of a worker of that container.
    ///
    /// # Errors
    ///
    /// Where callers can't be looked at.
    pub(crate) fn new(state: ContainerState, keeper: &Arc<KeeperSocket>) -> io::Result<Self> {
        let (state, audit_wait) = (Arc::new(state), Arc::new(AuditWait::default()));
        let keeper = || Arc::clone(keeper);
        let lane = Arc::new(Lane::open(state.journal, is_left));
        let driver = Arc::new(DriverAccess::new(Arc::clone(&state), keeper()));
        let targets = Arc::new(Targets::new(state.settings.spares_host)?);
        let callers = Callers::new(
            Arc::clone(&state),
            Arc::clone(&driver),
            Arc::clone(&lane),
            Arc::clone(&targets),
        );
        let processes = Arc::new(Processes::new(Arc::clone(&state), Arc::clone(&driver)));
        let stakes = Arc::new(Stakes::new(
            Arc::clone(&driver),
            Arc::clone(&state),
            keeper(),
            Arc::clone(&lane),
            Arc::clone(&audit_wait),
        ));
        let exports = Arc::new(KeptExports::new(
            Arc::clone(&stakes),
            Arc::clone(&processes),
            Arc::clone(&lane),
            keeper(),
        ));
        let uvm = Arc::new(Uvm::new(Arc::clone(&processes), Arc::clone(&lane), keeper()));
        let mappings =
            Arc::new(Mappings::new(Arc::clone(&processes), Arc::clone(&lane), Arc::clone(&uvm)));
        let slices =
            Arc::new(Slices::new(Arc::clone(&driver), Arc::clone(&state), Arc::clone(&targets)));
        let turns = Arc::new(Turns::new(Arc::clone(&slices)));
        let audit = Audit::new(
            Arc::clone(&stakes),
            Arc::clone(&lane),
            Arc::clone(&mappings),
            Arc::clone(&exports),
            Arc::clone(&slices),
            Arc::clone(&processes),
            audit_wait,
        );
        Ok(Parts {
            state,
            lane,
            driver,
            callers,
            processes,
            stakes,
            exports,
            uvm,
            mappings,
            slices,
            turns,
            audit,
        })
    }
}
