//! The worker's end of the keeper's socket: receives orders, and sends notices.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::Shutdown;

use crate::gate::passing::{self, Wait};
use crate::gate::wire::{Notice, Order};
use crate::monitor::caller::Listener;
use crate::monitor::journal::KeptFile;

/// The longest order, in bytes.
const MOST_BYTES: usize = 4096;

/// The socket to the keeper.
#[derive(Debug)]
pub(crate) struct KeeperSocket {
    socket: OwnedFd,
}

/// A message of the keeper.
#[derive(Debug)]
pub(crate) enum KeeperMessage {
    Listener(Listener),
    Kept(KeptFile, OwnedFd),
    Connection(OwnedFd),
    Begin,
    Drain,
    /// The keeper has closed its end of the socket.
    Gone,
    /// An order that the worker does not understand, or an interrupted wait.
    Nothing,
}

impl KeeperSocket {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        KeeperSocket { socket }
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Waits for an order. Fails where the socket is broken.
    pub(crate) fn receive(&self) -> io::Result<KeeperMessage> {
        let mut bytes = [0; MOST_BYTES];
        let (length, descriptor) = match passing::receive(&self.socket, &mut bytes, Wait::Always) {
            Err(Errno::INTR) => return Ok(KeeperMessage::Nothing),
            Err(Errno::CONNRESET) => return Ok(KeeperMessage::Gone),
            received => received?,
        };
        if length == 0 {
            return Ok(KeeperMessage::Gone);
        }
        let order = serde_json::from_slice(bytes.get(..length).unwrap_or_default());
        Ok(match (order, descriptor) {
            (Ok(Order::Listener { number }), Some(descriptor)) => {
                KeeperMessage::Listener(Listener::new(number, descriptor))
            }
            (Ok(Order::Kept { number }), Some(file)) => {
                KeeperMessage::Kept(KeptFile::of(number), file)
            }
            (Ok(Order::Control), Some(descriptor)) => KeeperMessage::Connection(descriptor),
            (Ok(Order::Begin), _) => KeeperMessage::Begin,
            (Ok(Order::Drain), _) => KeeperMessage::Drain,
            _ => KeeperMessage::Nothing,
        })
    }

    /// Lets a thread that waits for an order receive [`KeeperMessage::Gone`], after the orders that have been sent.
    pub(crate) fn shut_down_reading(&self) {
        // Where this fails, the keeper is gone.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Read);
    }

    /// Sends the keeper a notice. Fails where the notice can't be sent.
    pub(crate) fn tell(&self, notice: Notice) -> io::Result<()> {
        self.tell_with(notice, None)
    }

    /// Sends the keeper a notice with a descriptor. Fails where the notice can't be sent.
    pub(crate) fn tell_with(
        &self,
        notice: Notice,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        let text = serde_json::to_vec(&notice)?;
        Ok(passing::send(&self.socket, &text, descriptor, Wait::Always)?)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    /// A worker's socket, and the keeper's end of it.
    fn pair() -> (KeeperSocket, OwnedFd) {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let (worker, keeper) = socketpair(family, kind, SocketFlags::CLOEXEC, None).unwrap();
        (KeeperSocket::new(worker), keeper)
    }

    #[test]
    fn orders_are_heard_with_what_belongs_to_them_and_nothing_else_is() {
        let (socket, keeper) = pair();
        let null = File::open("/dev/null").unwrap();
        let send = |text: &[u8], file: Option<&File>| {
            passing::send(&keeper, text, file.map(File::as_fd), Wait::Never).unwrap();
        };
        let order = |order: &Order| serde_json::to_vec(order).unwrap();
        send(&order(&Order::Listener { number: 3 }), Some(&null));
        send(&order(&Order::Kept { number: 4 }), Some(&null));
        send(&order(&Order::Control), Some(&null));
        // An order that lacks its file is not understood.
        send(&order(&Order::Kept { number: 5 }), None);
        send(b"no order", None);
        send(&order(&Order::Begin), None);
        send(&order(&Order::Drain), None);
        assert!(matches!(socket.receive(), Ok(KeeperMessage::Listener(of)) if of.number() == 3));
        assert!(matches!(socket.receive(), Ok(KeeperMessage::Kept(KeptFile::Export(4), _))));
        assert!(matches!(socket.receive(), Ok(KeeperMessage::Connection(_))));
        assert!(matches!(socket.receive(), Ok(KeeperMessage::Nothing)));
        assert!(matches!(socket.receive(), Ok(KeeperMessage::Nothing)));
        assert!(matches!(socket.receive(), Ok(KeeperMessage::Begin)));
        assert!(matches!(socket.receive(), Ok(KeeperMessage::Drain)));
        drop(keeper);
        assert!(matches!(socket.receive(), Ok(KeeperMessage::Gone)));
        assert!(socket.tell(Notice::Ready).is_err());
    }

    #[test]
    fn who_is_to_hear_no_more_hears_what_was_said_before() {
        let (socket, keeper) = pair();
        let begin = serde_json::to_vec(&Order::Begin).unwrap();
        passing::send(&keeper, &begin, None, Wait::Never).unwrap();
        socket.shut_down_reading();
        assert!(matches!(socket.receive(), Ok(KeeperMessage::Begin)));
        assert!(matches!(socket.receive(), Ok(KeeperMessage::Gone)));
    }
}
