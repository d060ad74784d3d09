//! Stakes, as the driver has them: [`crate::ledger::StakePlace`] tells what they are for.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::ledger::{ChargeId, Client, Entry, Handle, Hold, Shown, StakePlace};
use crate::monitor::caller::audit_wait::AuditWait;
use crate::monitor::driver::access::DriverAccess;
use crate::monitor::driver::monitor_client::{MonitorClient, handle_of, known};
use crate::monitor::keeper_socket::KeeperSocket;
use crate::monitor::lock::Lock;
use crate::monitor::node::device::{Device, Rm};
use crate::monitor::state::books::Books;
use crate::monitor::state::container_state::ContainerState;
use crate::monitor::state::lane::{Lane, OnLane};

/// Enters a stake that stands there. `false` where another stands there, nothing needs one, or there are too many.
fn enter_stake(books: &mut Books, before: StakePlace, own: u64) -> bool {
    let may = books.ledger.may_stake(before);
    if may {
        books.enter(Entry::Stake { before, number: own });
    }
    may
}

/// Our stakes, and those of workers before.
#[derive(Debug)]
pub(crate) struct Stakes {
    pub(crate) state: Arc<ContainerState>,
    pub(crate) driver: Arc<DriverAccess>,
    pub(crate) keeper: Arc<KeeperSocket>,
    lane: Arc<Lane>,
    /// Who looks what the driver has.
    audit_wait: Arc<AuditWait>,
    /// The files of the clients of workers before, by client and place. The first file of each is the client's own.
    pub(crate) former_clients: Lock<BTreeMap<u32, BTreeMap<u8, OwnedFd>>>,
}

impl Stakes {
    pub(crate) fn new(
        driver: Arc<DriverAccess>,
        state: Arc<ContainerState>,
        keeper: Arc<KeeperSocket>,
        lane: Arc<Lane>,
        audit_wait: Arc<AuditWait>,
    ) -> Self {
        Stakes { state, driver, keeper, lane, audit_wait, former_clients: Lock::default() }
    }

    /// The handle of the stake that stands before all mappings of a memory, from which it is to be mapped: `fresh`, a
    /// duplicate that was just made, where there was none. `None` where there can't be one: the memory is gone, or there
    /// are too many stakes.
    pub(crate) fn stake_mappings(
        &self,
        own: &MonitorClient,
        charge: ChargeId,
        fresh: u32,
    ) -> Option<u32> {
        let before = StakePlace::Mappings { charge };
        let mut books = self.state.books();
        if enter_stake(&mut books, before, known(own, fresh)) {
            return Some(fresh);
        }
        let stake = books.ledger.stake_at(before);
        drop(books);
        own.give_back(fresh);
        handle_of(own, stake?)
    }

    /// Puts a stake before an export, right behind what was exported: whether there is one.
    pub(crate) fn stake_export(
        &self,
        device: &Device,
        hold: Hold,
        object: (u32, u32),
        gpu: usize,
    ) -> bool {
        let Some(own) = self.driver.kept_client() else { return false };
        let theirs = Rm { release: &self.state.release, device };
        let Ok(fresh) = own.borrow(&theirs, object, Some(gpu)) else { return false };
        let before = StakePlace::Export { hold };
        let staked = enter_stake(&mut self.state.books(), before, known(&own, fresh));
        if !staked {
            own.give_back(fresh);
        }
        staked
    }

    /// Makes a stake for a name that shows elsewhere than its memory, which was made of `source`, and
    /// isn't entered yet. `None` where it needs none, or can't have it: as the source is another
    /// file's, say.
    pub(crate) fn stake_behind(
        &self,
        device: &Device,
        source: (u32, u32),
        (shown, gpu): (Shown, Option<usize>),
    ) -> Option<u32> {
        let gpu = gpu.filter(|_| shown != Shown::Here)?;
        let theirs = Rm { release: &self.state.release, device };
        self.driver.kept_client()?.borrow(&theirs, source, Some(gpu)).ok()
    }

    /// The same for one that was imported: behind the stake of the export.
    pub(crate) fn stake_behind_export(
        &self,
        hold: Hold,
        (shown, gpu): (Shown, Option<usize>),
    ) -> Option<u32> {
        let gpu = gpu.filter(|_| shown != Shown::Here)?;
        let own = self.driver.kept_client()?;
        let stake = self.state.books().ledger.stake_at(StakePlace::Export { hold })?;
        own.again(gpu, handle_of(&own, stake)?)
    }

    /// It's entered now, if it was made.
    pub(crate) fn stake_name(&self, (client, handle): (u32, u32), fresh: Option<u32>) {
        let (Some(fresh), Some(own)) = (fresh, self.driver.at_hand()) else { return };
        let (client, handle) = (Client(client), Handle(handle));
        let before = StakePlace::Name { client, handle };
        let staked = enter_stake(&mut self.state.books(), before, known(&own, fresh));
        if !staked {
            own.give_back(fresh);
        }
    }

    /// Frees those that stand before nothing any more: what nothing else keeps is gone then.
    pub(crate) fn free_stakes(&self, _: &OnLane<'_>) {
        let loose = self.state.books().ledger.loose_stakes();
        if loose.is_empty() {
            return;
        }
        let own = self.driver.at_hand();
        let mut has_freed = false;
        for stake in loose {
            let ours = own.as_ref().and_then(|own| Some((own, handle_of(own, stake)?)));
            // Else it keeps what it kept, and counts. The next one who looks tries again.
            if ours.is_none_or(|(own, handle)| own.give_back(handle)) {
                has_freed = true;
                self.state.books().enter(Entry::Unstake { number: stake });
            }
        }
        if has_freed {
            // It may have been the last thing that our client was kept for.
            self.audit_wait.ring();
        }
    }

    /// The same, for who isn't on the lane, where it's free.
    pub(crate) fn free_stakes_soon(&self) {
        if !self.state.books().ledger.loose_stakes().is_empty()
            && let Some(lane) = self.lane.enter_for_monitor()
        {
            self.free_stakes(&lane);
        }
    }
}
