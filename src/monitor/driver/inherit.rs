//! Takes over what the worker before had of the driver's, see
//! [`client_handover`](crate::monitor::driver::client_handover).

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::gate::wire::Notice;
use crate::ledger::{Before, Entry};
use crate::monitor::driver::client_handover::{Stake, client_of, number};
use crate::monitor::driver::device::{Device, Rm};
use crate::monitor::driver::monitor_client::MonitorClient;
use crate::monitor::driver::monitor_client::{handle_of, known, of_client};
use crate::monitor::worker::Shared;

/// Stakes whose heirs are entered at once: who gives the rest up loses no more than are on their way.
const AT_ONCE: usize = 64;

impl Shared {
    /// Those that workers before had: what the books have before anybody is answered.
    pub(crate) fn stakes_of_old(&self) -> Vec<Stake> {
        self.books().stakes()
    }

    /// A worker before had it.
    pub(crate) fn was_own(&self, number: u64, file: OwnedFd) {
        self.heritage.all().entry(client_of(number)).or_default().insert(number, file);
    }

    /// Our client of the driver, to make by it what outlives this worker: the keeper has its files from
    /// then on.
    pub(crate) fn kept_client(&self) -> Option<Arc<MonitorClient>> {
        let own = self.own_client()?;
        own.is_kept.call_once(|| self.bequeath(&own));
        Some(own)
    }

    fn bequeath(&self, own: &MonitorClient) {
        for (place, file) in own.files().enumerate() {
            let notice = Notice::Exported { number: number(own.client, place) };
            // Else it is told that the worker is gone in a moment.
            let _ = self.keeper.tell_with(notice, Some(file));
        }
    }

    /// We close it, and the keeper shall, where it has it.
    pub(crate) fn disown(&self, own: &MonitorClient) {
        if !own.is_kept.is_completed() {
            return;
        }
        (0..own.files().count()).for_each(|place| {
            let _ = self.keeper.tell(Notice::TakenBack { number: number(own.client, place) });
        });
    }

    /// Puts stakes of ours in the places of those that workers before had, and ends their clients. Tells
    /// after each that it goes on.
    pub(crate) fn inherit(&self, stakes: &[Stake], goes_on: impl Fn()) {
        // Of some nobody kept the files: a worker that couldn't tell the keeper, say.
        let mut clients: BTreeSet<u32> = stakes.iter().map(Stake::client).collect();
        clients.extend(self.heritage.all().keys());
        for client in clients {
            let stakes: Vec<Stake> =
                stakes.iter().filter(|of| of.client() == client).copied().collect();
            self.inherit_from(client, &stakes, &goes_on);
        }
    }

    /// The driver hangs: what it hasn't come to is given up.
    pub(crate) fn give_up_heritage(&self, stakes: &[Stake]) {
        let mut books = self.books();
        self.heritage.is_given_up.store(true, Ordering::Release);
        let clients: BTreeSet<u32> = stakes.iter().map(Stake::client).collect();
        clients.into_iter().for_each(|client| books.loosen(client));
    }

    fn inherit_from(&self, client: u32, stakes: &[Stake], goes_on: &impl Fn()) {
        let files = self.heritage.all();
        let control = files.get(&client).and_then(|files| files.values().next());
        let control = control.and_then(|control| control.try_clone().ok());
        drop(files);
        let control = control.and_then(|control| Device::of(&self.settings.nodes, control).ok());
        let former = control.map(|control| MonitorClient::former(control, client));
        if let Some(former) = &former {
            stakes.chunks(AT_ONCE).for_each(|stakes| self.hand_over(former, stakes, goes_on));
        }
        self.books().loosen(client);
        if let Some(former) = former {
            former.end(&self.release);
        }
        let (first, last) = of_client(client);
        self.books().enter(Entry::LoseStakes { first, last });
        let files = self.heritage.all().remove(&client).unwrap_or_default();
        for number in files.into_keys() {
            let _ = self.keeper.tell(Notice::TakenBack { number });
        }
    }

    /// Makes heirs, and puts them in the places of those that they are of.
    fn hand_over(&self, former: &MonitorClient, stakes: &[Stake], goes_on: impl Fn()) {
        let heir = |stake| {
            let heir = self.heir(former, stake);
            goes_on();
            heir
        };
        let heirs: Vec<_> = stakes.iter().map(heir).collect();
        let mut books = self.books();
        let is_given_up = self.heritage.is_given_up();
        let mut needless = Vec::new();
        for (stake, (own, heir)) in
            stakes.iter().zip(heirs).filter_map(|(stake, heir)| Some((stake, heir?)))
        {
            if is_given_up {
                needless.push((own, heir));
                continue;
            }
            books.enter(Entry::Stake { before: stake.before, own: known(&own, heir) });
        }
        drop(books);
        for (own, heir) in needless {
            own.give_back(&self.release, heir);
        }
    }

    /// A duplicate of ours of one that a worker before had, and still needs to be.
    fn heir(&self, former: &MonitorClient, stake: &Stake) -> Option<(Arc<MonitorClient>, u32)> {
        let handle = handle_of(former, stake.own)?;
        if matches!(stake.before, Before::Nothing { .. }) || self.heritage.is_given_up() {
            return None;
        }
        let rm = Rm { release: &self.release, device: &former.control };
        let own = self.kept_client()?;
        let heir = own.borrow(&rm, (former.client, handle), Some(stake.gpu)).ok()?;
        Some((own, heir))
    }
}
