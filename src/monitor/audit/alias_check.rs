//! Compares the names of memory that the driver shows with those that are known.

use std::time::Instant;

use crate::monitor::audit::look::Audit;
use crate::monitor::audit::occasion::Depth;
use crate::monitor::driver::monitor_client::MonitorClient;

impl Audit {
    /// Asks for names: one that is gone makes room for one that nobody asked for.
    pub(crate) fn ask_for_names(&self, own: &MonitorClient) {
        let names = &self.memory.names;
        if !names.are_due() {
            return;
        }
        let (several, before) = {
            let books = self.state.books();
            (books.ledger.names_of_several(), books.ledger.size().objects)
        };
        self.strike_out(own, &names.in_turn(None, several), Depth::Objects);
        let mut books = self.state.books();
        if books.ledger.size().objects < before {
            books.due.schedule(Instant::now());
            drop(books);
            self.deaths.ring();
        }
    }
}
