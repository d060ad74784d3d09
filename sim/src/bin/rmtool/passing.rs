//! One descriptor from one process to another, over a socket.

use std::io::ErrorKind::{ConnectionRefused, NotFound};
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use anyhow::Context as _;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

/// Sends a file to the process that connects first.
pub(crate) fn offer(path: &str, file: &OwnedFd) -> anyhow::Result<()> {
    let listener = UnixListener::bind(path)?;
    let (stream, _) = listener.accept()?;
    let (part, files) = ([IoSlice::new(b"x")], [file.as_raw_fd()]);
    let beside = [ControlMessage::ScmRights(&files)];
    sendmsg::<()>(stream.as_raw_fd(), &part, &beside, MsgFlags::empty(), None)?;
    Ok(())
}

/// Sends a file into a socket that is never read: as long as both ends are there, it is, too.
pub(crate) fn keep(file: RawFd) -> anyhow::Result<(UnixStream, UnixStream)> {
    let ends = UnixStream::pair()?;
    let (part, files) = ([IoSlice::new(b"x")], [file]);
    let beside = [ControlMessage::ScmRights(&files)];
    sendmsg::<()>(ends.0.as_raw_fd(), &part, &beside, MsgFlags::empty(), None)?;
    Ok(ends)
}

/// Connects to the process that listens at a path, which appears before the process does.
pub(crate) fn connect(path: &str) -> anyhow::Result<UnixStream> {
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => return Ok(stream),
            Err(error) if [NotFound, ConnectionRefused].contains(&error.kind()) => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => return Err(error).context(format!("can't connect to {path}")),
        }
    }
}

/// Waits for an offer and takes it.
pub(crate) fn fetch(path: &str) -> anyhow::Result<OwnedFd> {
    let stream = connect(path)?;
    let mut part = [0; 1];
    let mut space = nix::cmsg_space!([RawFd; 1]);
    let mut parts = [IoSliceMut::new(&mut part)];
    let message =
        recvmsg::<()>(stream.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::empty())?;
    let files = message.cmsgs()?.find_map(|part| match part {
        ControlMessageOwned::ScmRights(files) => <[RawFd; 1]>::try_from(files).ok(),
        _ => None,
    });
    let [file] = files.context("no descriptor came")?;
    // SAFETY: the kernel just put it into our table, and nothing else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(file) })
}
