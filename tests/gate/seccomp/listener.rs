//! A monitor that answers every trapped call with one error, by which the tests recognise it.
#![allow(
    unsafe_code,
    reason = "descriptors that come over a socket and the kernel's seccomp ioctls have no safe \
              interface in any crate we use"
)]

use std::io::{IoSliceMut, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use cgpu_monitor::gate::entry::{LISTENER_SENT, LISTENER_TAKEN};
use nix::errno::Errno;
use nix::libc::{seccomp_notif, seccomp_notif_resp};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, UnixAddr, recvmsg};

/// What a trapped call fails with; no call of the probe would otherwise.
pub(crate) const MARK: i32 = Errno::EOWNERDEAD as i32;

nix::ioctl_readwrite!(receive, b'!', 0, seccomp_notif);
nix::ioctl_readwrite!(respond, b'!', 1, seccomp_notif_resp);

/// A socket that runtimes connect to, and threads that answer until the containers are gone.
pub(crate) struct Listener {
    path: PathBuf,
}

impl Listener {
    pub(crate) fn new(path: PathBuf) -> Self {
        let socket = UnixListener::bind(&path).expect("a socket can be made in a scratch");
        std::thread::spawn(move || {
            for stream in socket.incoming().map_while(Result::ok) {
                let listener = take(&stream);
                std::thread::spawn(move || answer(&listener));
            }
        });
        Self { path }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Receives a listener, and reports that it is held.
fn take(mut stream: &UnixStream) -> OwnedFd {
    let mut bytes = [0; LISTENER_SENT.len()];
    let mut space = nix::cmsg_space!([i32; 4]);
    let mut into = [IoSliceMut::new(&mut bytes)];
    let message =
        recvmsg::<UnixAddr>(stream.as_raw_fd(), &mut into, Some(&mut space), MsgFlags::empty())
            .expect("a process that connects sends a message");
    let mut received = Vec::new();
    for control in message.cmsgs().expect("the space is large enough") {
        if let ControlMessageOwned::ScmRights(descriptors) = control {
            for descriptor in descriptors {
                // SAFETY: `recvmsg` has just made this descriptor, and nothing else owns it.
                received.push(unsafe { OwnedFd::from_raw_fd(descriptor) });
            }
        }
    }
    stream.write_all(LISTENER_TAKEN).expect("the sender waits for the answer");
    received.pop().expect("the message has the listener")
}

/// Answers until the last process under the filter is gone.
fn answer(listener: &OwnedFd) {
    loop {
        // SAFETY: `seccomp_notif` is numbers only, for which zero is a value.
        let mut call: seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: `call` is a `seccomp_notif`, zeroed as the kernel demands, and outlives
        // the call; the descriptor is open while `listener` lives.
        match unsafe { receive(listener.as_raw_fd(), &raw mut call) } {
            Ok(_) => {}
            // A signal, or a caller that was killed before we asked about it.
            Err(_) if !has_ended(listener) => continue,
            Err(_) => return,
        }
        let mut response = seccomp_notif_resp { id: call.id, val: 0, error: -MARK, flags: 0 };
        // SAFETY: `response` is a `seccomp_notif_resp` that outlives the call; the
        // descriptor is open while `listener` lives.
        let _ = unsafe { respond(listener.as_raw_fd(), &raw mut response) };
    }
}

/// Whether no process is left that could call: receiving fails at once and for ever then.
fn has_ended(listener: &OwnedFd) -> bool {
    let mut ask = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
    let asked = poll(&mut ask, PollTimeout::ZERO);
    asked.is_err() || ask[0].revents().is_none_or(|said| said.contains(PollFlags::POLLHUP))
}
