//! The keeper's socket: what it orders, and what it's told.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::Shutdown;

use crate::gate::passing::{self, Wait};
use crate::gate::wire::{Notice, Order};
use crate::monitor::caller::listener::Listener;

/// The longest order, in bytes.
const MOST_BYTES: usize = 4096;

/// The keeper.
#[derive(Debug)]
pub(crate) struct KeeperSocket {
    socket: OwnedFd,
}

/// What it said.
#[derive(Debug)]
pub(crate) enum Heard {
    Listener(Listener),
    Export(u64, OwnedFd),
    Connection(OwnedFd),
    Begin,
    Drain,
    /// It is gone.
    Gone,
    /// Nothing that is understood.
    Nothing,
}

impl KeeperSocket {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        KeeperSocket { socket }
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Waits for an order.
    ///
    /// # Errors
    ///
    /// Where the socket is broken.
    pub(crate) fn hear(&self) -> io::Result<Heard> {
        let mut bytes = [0; MOST_BYTES];
        let (length, descriptor) = match passing::receive(&self.socket, &mut bytes, Wait::Always) {
            Err(Errno::INTR) => return Ok(Heard::Nothing),
            Err(Errno::CONNRESET) => return Ok(Heard::Gone),
            received => received?,
        };
        if length == 0 {
            return Ok(Heard::Gone);
        }
        let order = serde_json::from_slice(bytes.get(..length).unwrap_or_default());
        Ok(match (order, descriptor) {
            (Ok(Order::Listener { number }), Some(descriptor)) => {
                Heard::Listener(Listener::new(number, descriptor))
            }
            (Ok(Order::Export { number }), Some(file)) => Heard::Export(number, file),
            (Ok(Order::Control), Some(descriptor)) => Heard::Connection(descriptor),
            (Ok(Order::Begin), _) => Heard::Begin,
            (Ok(Order::Drain), _) => Heard::Drain,
            _ => Heard::Nothing,
        })
    }

    /// Whoever waits for an order hears that the keeper is gone, after what it has said until now.
    pub(crate) fn hear_no_more(&self) {
        // Where that fails it is gone.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Read);
    }

    /// Tells it something.
    ///
    /// # Errors
    ///
    /// Where it can't be told.
    pub(crate) fn tell(&self, notice: Notice) -> io::Result<()> {
        self.tell_with(notice, None)
    }

    /// Tells it something, and gives it a descriptor.
    ///
    /// # Errors
    ///
    /// Where it can't be told.
    pub(crate) fn tell_with(
        &self,
        notice: Notice,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        let text = serde_json::to_vec(&notice)?;
        Ok(passing::send(&self.socket, &text, descriptor, Wait::Always)?)
    }
}
