//! Takes over what the worker before had of the driver's, see
//! [`client_handover`](crate::monitor::driver::client_handover).

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use crate::ledger::{Before, Entry};
use crate::monitor::driver::client_handover::Stake;
use crate::monitor::driver::monitor_client::{MonitorClient, handle_of, known, of_client};
use crate::monitor::driver::stakes::Stakes;
use crate::monitor::journal::kept_file::KeptFile;
use crate::monitor::node::device::Device;
use crate::monitor::thread::spawn;

/// How long the driver may be at one of the former worker's stakes, while calls and audits wait for ours
/// in their places.
const PATIENCE: Duration = Duration::from_secs(1);

/// Stakes whose successors are entered at once: who gives the rest up loses no more than are on their way.
const AT_ONCE: usize = 64;

impl Stakes {
    /// A worker before had it.
    pub(crate) fn take_over_client_file(&self, client: u32, place: u8, file: OwnedFd) {
        self.former_clients.files.lock().entry(client).or_default().insert(place, file);
    }

    /// Puts stakes of ours in the places of those that workers before had, and ends their clients. Tells
    /// after each that it goes on.
    pub(crate) fn take_over_all(&self, stakes: &[Stake], goes_on: impl Fn()) {
        // Of some nobody kept the files: a worker that couldn't tell the keeper, say.
        let mut clients: BTreeSet<u32> = stakes.iter().map(Stake::client).collect();
        clients.extend(self.former_clients.files.lock().keys());
        for client in clients {
            let stakes: Vec<Stake> =
                stakes.iter().filter(|of| of.client() == client).copied().collect();
            self.take_over_from(client, &stakes, &goes_on);
        }
    }

    /// The driver hangs: what it hasn't come to is given up.
    pub(crate) fn give_up_former_clients(&self, stakes: &[Stake]) {
        let mut books = self.state.books();
        self.former_clients.is_given_up.store(true, Ordering::Release);
        let clients: BTreeSet<u32> = stakes.iter().map(Stake::client).collect();
        clients.into_iter().for_each(|client| books.loosen(client));
    }

    fn take_over_from(&self, client: u32, stakes: &[Stake], goes_on: &impl Fn()) {
        let files = self.former_clients.files.lock();
        let control = files.get(&client).and_then(|files| files.values().next());
        let control = control.and_then(|control| control.try_clone().ok());
        drop(files);
        let control =
            control.and_then(|control| Device::of(&self.state.settings.nodes, control).ok());
        let former =
            control.map(|control| MonitorClient::former(control, client, &self.state.release));
        if let Some(former) = &former {
            stakes.chunks(AT_ONCE).for_each(|stakes| self.hand_over(former, stakes, goes_on));
        }
        self.state.books().loosen(client);
        if let Some(former) = former {
            former.end();
        }
        let (first, last) = of_client(client);
        self.state.books().enter(Entry::LoseStakes { first, last });
        let files = self.former_clients.files.lock().remove(&client).unwrap_or_default();
        for place in files.into_keys() {
            let _ = self.keeper.tell(KeptFile::Client { client, place }.let_go());
        }
    }

    /// Makes successors, and puts them in the places of those that they are of.
    fn hand_over(&self, former: &MonitorClient, stakes: &[Stake], goes_on: impl Fn()) {
        let successor = |stake| {
            let successor = self.successor(former, stake);
            goes_on();
            successor
        };
        let successors: Vec<_> = stakes.iter().map(successor).collect();
        let mut books = self.state.books();
        let is_given_up = self.former_clients.is_given_up();
        let mut needless = Vec::new();
        for (stake, (own, successor)) in
            stakes.iter().zip(successors).filter_map(|(stake, successor)| Some((stake, successor?)))
        {
            if is_given_up {
                needless.push((own, successor));
                continue;
            }
            books.enter(Entry::Stake { before: stake.before, own: known(&own, successor) });
        }
        drop(books);
        for (own, successor) in needless {
            own.give_back(successor);
        }
    }

    /// A duplicate of ours of one that a worker before had, and still needs to be.
    fn successor(
        &self,
        former: &MonitorClient,
        stake: &Stake,
    ) -> Option<(Arc<MonitorClient>, u32)> {
        let handle = handle_of(former, stake.own)?;
        if matches!(stake.before, Before::Nothing { .. }) || self.former_clients.is_given_up() {
            return None;
        }
        let rm = former.rm();
        let own = self.driver.kept_client()?;
        let successor = own.borrow(&rm, (former.client, handle), Some(stake.gpu)).ok()?;
        Some((own, successor))
    }

    /// Sees to the stakes of workers before, while nobody calls and nobody is audited: they are in the
    /// figures of nobody who is asked for. By a thread that the driver may keep.
    pub(crate) fn take_over(self: &Arc<Self>) -> io::Result<()> {
        let stakes = Arc::new(self.state.books().stakes());
        if stakes.is_empty() && self.former_clients.is_empty() {
            return Ok(());
        }
        let (progress, heard) = std::sync::mpsc::channel::<()>();
        let (own, all) = (Arc::clone(self), Arc::clone(&stakes));
        spawn("stakes", move || own.take_over_all(&all, || _ = progress.send(())))?;
        loop {
            match heard.recv_timeout(PATIENCE) {
                Ok(()) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {
                    tracing::warn!("the driver hangs over what a worker before had");
                    self.give_up_former_clients(&stakes);
                    return Ok(());
                }
            }
        }
    }
}
