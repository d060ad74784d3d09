//! What the keeper holds for workers, and the orders by which a worker gets it.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::gate::passing::{self, Wait};
use crate::gate::wire::Order;

/// Control connections that wait for a worker at the same time; further ones are closed.
const MOST_CONNECTIONS: usize = 4096;

/// An order that the worker has not got yet, with the connection that comes with it. Other files are looked up when
/// the order is sent: they are many, and duplicates would be open until then.
type QueuedOrder = (Order, Option<OwnedFd>);

/// Listeners, files that workers gave the keeper, and orders that the worker has not got yet.
#[derive(Debug, Default)]
pub(crate) struct Orders {
    listeners: BTreeMap<u64, OwnedFd>,
    /// By the workers' numbers ([`Notice::Keep`](crate::gate::wire::Notice::Keep)).
    kept_files: BTreeMap<u64, OwnedFd>,
    next_number: u64,
    queue: VecDeque<QueuedOrder>,
    /// The worker's socket had no room for the next order.
    pub(crate) is_socket_full: bool,
}

impl Orders {
    /// The listeners that are served.
    pub(crate) fn listeners(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.listeners.values().map(AsFd::as_fd)
    }

    /// Whether any order waits.
    pub(crate) fn are_waiting(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Whether a worker is to be told to finish.
    pub(crate) fn have_drain(&self) -> bool {
        self.queue.iter().any(|(order, _)| matches!(order, Order::Drain))
    }

    /// Keeps a listener, for this worker and later ones.
    pub(crate) fn add_listener(&mut self, listener: OwnedFd) {
        let number = self.next_number;
        self.next_number += 1;
        self.listeners.insert(number, listener);
        self.queue.push_back((Order::Listener { number }, None));
    }

    /// Lets go of a listener.
    pub(crate) fn remove_listener(&mut self, number: u64) {
        self.listeners.remove(&number);
    }

    /// Keeps a file of a worker, for later ones.
    pub(crate) fn keep_file(&mut self, number: u64, file: OwnedFd) {
        self.kept_files.insert(number, file);
    }

    /// Lets go of a file that was kept.
    pub(crate) fn let_go_of_file(&mut self, number: u64) {
        self.kept_files.remove(&number);
    }

    /// Keeps a control connection until the worker has it. Closes it where too many wait.
    pub(crate) fn add_connection(&mut self, connection: OwnedFd) {
        let is_connection = |(order, _): &&QueuedOrder| matches!(order, Order::Control);
        if self.queue.iter().filter(is_connection).count() < MOST_CONNECTIONS {
            self.queue.push_back((Order::Control, Some(connection)));
        }
    }

    /// Has the worker finish.
    pub(crate) fn add_drain(&mut self) {
        self.queue.push_back((Order::Drain, None));
    }

    /// Begins anew, for a new worker: it gets all listeners and kept files, and then begins.
    pub(crate) fn restart(&mut self) {
        let listeners = self.listeners.keys().map(|number| Order::Listener { number: *number });
        let kept_files = self.kept_files.keys().map(|number| Order::Kept { number: *number });
        let orders = listeners.chain(kept_files).chain([Order::Begin]).map(|order| (order, None));
        let waiting = std::mem::take(&mut self.queue);
        // Old connections stay. Listeners are among the new orders, and other old orders were for the last worker.
        let fresh = waiting.into_iter().filter(|(order, _)| matches!(order, Order::Control));
        self.queue = orders.chain(fresh).collect();
    }

    /// Sends the next order. `false` where none is left, the socket has no room, or there is no worker: then the next
    /// round sends the order, or the next worker gets it.
    pub(crate) fn send_next(&mut self, socket: &OwnedFd) -> bool {
        self.is_socket_full = false;
        let Some((order, connection)) = self.queue.front() else { return false };
        let file = match order {
            Order::Listener { number } => self.listeners.get(number),
            Order::Kept { number } => self.kept_files.get(number),
            Order::Control => connection.as_ref(),
            Order::Begin | Order::Drain => None,
        };
        let is_gone = file.is_none() && !matches!(order, Order::Begin | Order::Drain);
        let text = serde_json::to_vec(order).expect("an order is plain data");
        let file = file.map(AsFd::as_fd);
        if !is_gone && let Err(errno) = passing::send(socket, &text, file, Wait::Never) {
            self.is_socket_full = errno == rustix::io::Errno::AGAIN;
            return false;
        }
        self.queue.pop_front();
        true
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        socketpair(family, kind, SocketFlags::CLOEXEC, None).unwrap()
    }

    fn file() -> OwnedFd {
        std::fs::File::open("/dev/null").unwrap().into()
    }

    /// Sends all orders, and returns what came, each with whether a file came along.
    fn send_all(orders: &mut Orders) -> Vec<(Order, bool)> {
        let (keeper, worker) = pair();
        while orders.send_next(&keeper) {}
        drop(keeper);
        let mut came = Vec::new();
        let mut bytes = [0; 256];
        while let Ok((length @ 1.., file)) = passing::receive(&worker, &mut bytes, Wait::Always) {
            came.push((serde_json::from_slice(&bytes[..length]).unwrap(), file.is_some()));
        }
        came
    }

    #[test]
    fn a_new_worker_gets_all_that_is_held_and_the_connections_that_wait() {
        let mut orders = Orders::default();
        orders.add_listener(file());
        orders.add_listener(file());
        orders.keep_file(7, file());
        orders.keep_file(8, file());
        orders.let_go_of_file(8);
        orders.remove_listener(0);
        orders.add_connection(file());
        orders.add_drain();
        orders.restart();
        let listener = Order::Listener { number: 1 };
        let wanted = [
            (listener, true),
            (Order::Kept { number: 7 }, true),
            (Order::Begin, false),
            (Order::Control, true),
        ];
        assert_eq!(send_all(&mut orders), wanted);
        assert!(!orders.are_waiting());
    }

    #[test]
    fn an_order_whose_file_is_gone_is_left_out() {
        let mut orders = Orders::default();
        orders.add_listener(file());
        orders.remove_listener(0);
        orders.add_drain();
        assert!(orders.have_drain());
        assert_eq!(send_all(&mut orders), [(Order::Drain, false)]);
    }

    #[test]
    fn an_order_waits_until_the_socket_has_room() {
        let (keeper, worker) = pair();
        let mut orders = Orders::default();
        let mut sent = 0;
        while !orders.is_socket_full {
            orders.add_drain();
            sent += usize::from(orders.send_next(&keeper));
        }
        assert!(sent > 0 && orders.are_waiting());
        passing::receive(&worker, &mut [0; 256], Wait::Always).unwrap();
        assert!(orders.send_next(&keeper) && !orders.is_socket_full);
    }
}
