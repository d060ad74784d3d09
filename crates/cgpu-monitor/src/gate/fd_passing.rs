//! Sends and receives bytes over a Unix socket, together with a descriptor (`SCM_RIGHTS`, unix(7)).
//!
//! With [`Wait::Never`], a call that would have to wait fails with [`Errno::AGAIN`].

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Whether a call waits for buffer space in the socket, or for bytes to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// The call does not wait.
    Never,
    /// The call waits without a limit.
    Always,
}

/// Sends `bytes`, together with `descriptor`. Fails if nothing was sent.
pub(crate) fn send(
    socket: impl AsFd,
    bytes: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
    wait: Wait,
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if let Some(descriptor) = &descriptor {
        beside.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(descriptor)));
    }
    let flags = match wait {
        Wait::Never => SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
        Wait::Always => SendFlags::NOSIGNAL,
    };
    sendmsg(socket, &[IoSlice::new(bytes)], &mut beside, flags)?;
    Ok(())
}

/// Receives at most as many bytes as `buffer` has, and the last descriptor that came with them. 0 bytes mean that the
/// other end is closed. Fails if nothing was received.
pub(crate) fn receive(
    socket: impl AsFd,
    buffer: &mut [u8],
    wait: Wait,
) -> Result<(usize, Option<OwnedFd>), Errno> {
    // The kernel closes descriptors beyond four.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut beside = RecvAncillaryBuffer::new(&mut space);
    let flags = match wait {
        Wait::Never => RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC,
        Wait::Always => RecvFlags::CMSG_CLOEXEC,
    };
    let received = recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut beside, flags)?;
    let descriptor = beside
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => descriptors.last(),
            _ => None,
        })
        .last();
    Ok((received.bytes, descriptor))
}
