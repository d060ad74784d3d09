//! Bytes over a Unix socket, with a descriptor beside them (`SCM_RIGHTS`, unix(7)).
//!
//! Who doesn't wait is told [`Errno::AGAIN`] where it would take waiting.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Whether to wait for room, or for something to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Not at all.
    Never,
    /// As long as it takes.
    Always,
}

/// Sends `bytes`, and `descriptor` beside them.
///
/// # Errors
///
/// Where nothing was sent.
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

/// Receives at most as many bytes as `buffer` has, and the last descriptor beside them.
/// No bytes are the end.
///
/// # Errors
///
/// Where nothing was received.
pub(crate) fn receive(
    socket: impl AsFd,
    buffer: &mut [u8],
    wait: Wait,
) -> Result<(usize, Option<OwnedFd>), Errno> {
    // What doesn't fit, the kernel closes.
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
