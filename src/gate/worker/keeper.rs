//! The keeper's socket: what it orders, and what it's told.
#![allow(unsafe_code, reason = "descriptors that are inherited or come over a socket are numbers")]

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, UnixAddr, recvmsg, send};

use super::listener::Listener;
use crate::gate::wire::{Notice, Order};

/// The longest order, in bytes.
const MOST_BYTES: usize = 4096;

/// The keeper.
#[derive(Debug)]
pub(super) struct Keeper {
    socket: OwnedFd,
}

/// What it said.
#[derive(Debug)]
pub(super) enum Heard {
    Listener(Listener),
    Connection(OwnedFd),
    Begin,
    Drain,
    /// It is gone.
    Gone,
    /// Nothing that is understood.
    Nothing,
}

/// A descriptor that was there when the program began.
///
/// # Errors
///
/// Where it wasn't.
pub(super) fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: called once for each number, before anything else opens descriptors, so
    // nobody else owns it.
    let descriptor = unsafe { OwnedFd::from_raw_fd(number) };
    if let Err(error) = fcntl(&descriptor, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)) {
        std::mem::forget(descriptor);
        return Err(error.into());
    }
    Ok(descriptor)
}

impl Keeper {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Keeper { socket }
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Waits for an order.
    ///
    /// # Errors
    ///
    /// Where the socket is broken.
    pub(super) fn hear(&self) -> io::Result<Heard> {
        let mut bytes = [0; MOST_BYTES];
        let mut space = nix::cmsg_space!([RawFd; 4]);
        let mut into = [IoSliceMut::new(&mut bytes)];
        let message = recvmsg::<UnixAddr>(
            self.socket.as_raw_fd(),
            &mut into,
            Some(&mut space),
            MsgFlags::MSG_CMSG_CLOEXEC,
        );
        let message = match message {
            Err(Errno::EINTR) => return Ok(Heard::Nothing),
            Err(Errno::ECONNRESET) => return Ok(Heard::Gone),
            message => message?,
        };
        let mut received = Vec::new();
        for control in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(descriptors) = control {
                for descriptor in descriptors {
                    // SAFETY: `recvmsg` has just made it, and nobody else has it.
                    received.push(unsafe { OwnedFd::from_raw_fd(descriptor) });
                }
            }
        }
        let length = message.bytes;
        if length == 0 {
            return Ok(Heard::Gone);
        }
        let order = serde_json::from_slice(bytes.get(..length).unwrap_or_default());
        Ok(match (order, received.pop()) {
            (Ok(Order::Listener { number }), Some(descriptor)) => {
                Heard::Listener(Listener::new(number, descriptor))
            }
            (Ok(Order::Control), Some(descriptor)) => Heard::Connection(descriptor),
            (Ok(Order::Begin), _) => Heard::Begin,
            (Ok(Order::Drain), _) => Heard::Drain,
            _ => Heard::Nothing,
        })
    }

    /// Tells it something.
    ///
    /// # Errors
    ///
    /// Where it can't be told.
    pub(super) fn tell(&self, notice: Notice) -> io::Result<()> {
        let text = serde_json::to_vec(&notice)?;
        send(self.socket.as_raw_fd(), &text, MsgFlags::MSG_NOSIGNAL)?;
        Ok(())
    }
}
