//! The least that any seccomp listener costs here: a call is received, its struct read, and it
//! is refused. What the gate costs can't be less, on whatever machine this runs.
#![allow(unsafe_code, reason = "seccomp's ioctls have no safe interface in our crates")]

use std::io::{IoSliceMut, Write, pipe};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cgpu_monitor::gate::entry::LISTENER_TAKEN;
use nix::libc::{self, seccomp_notif, seccomp_notif_resp};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

/// Says to this program that it is the caller, and where the listener goes; without a path it
/// goes nowhere, and there is no filter.
const CALLER: &str = "CGPU_BENCH_CALLER";
const CALLS: usize = 5000;

/// `SECCOMP_IOCTL_NOTIF_SET_FLAGS` and `SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP`, as the gate has it.
const SET_FLAGS: libc::Ioctl = 0x4008_2104;
const SYNC_WAKE_UP: u64 = 1;

nix::ioctl_readwrite!(control, b'F', 0x2a, [u64; 4]);

/// What is done before a call is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Check {
    Nothing,
    Struct,
}

/// If this is the caller: calls, prints the median in nanoseconds, and true.
pub(crate) fn was_the_caller() -> bool {
    let Some(socket) = std::env::var_os(CALLER) else { return false };
    if !socket.is_empty() {
        cgpu_monitor::gate::entry::enter(Path::new(&socket)).expect("the filter is put on");
    }
    let (pipe, _other) = pipe().expect("a pipe can be made");
    let mut times: Vec<u128> = Vec::new();
    for _ in 0..CALLS {
        let mut call = [0; 4];
        let begun = Instant::now();
        // SAFETY: the struct is as long as the request says.
        let refused = unsafe { control(pipe.as_raw_fd(), &raw mut call) };
        times.push(begun.elapsed().as_nanos());
        refused.expect_err("a pipe knows no such request");
    }
    times.sort_unstable();
    println!("{}", times[CALLS / 2]);
    true
}

/// A refused call without a filter, and with a listener that does as little as `check` says.
/// So many threads wait for the call.
pub(crate) fn least(work: &Path, check: Check, waiting: usize) -> (Duration, Duration) {
    let caller = |socket: &Path| {
        let mut command = Command::new(std::env::current_exe().expect("/proc is mounted"));
        command.env(CALLER, socket).stdin(Stdio::null()).stdout(Stdio::piped());
        command.spawn().expect("this program can be started")
    };
    let said = |caller: std::process::Child| {
        let output = caller.wait_with_output().expect("it ends");
        let text = String::from_utf8(output.stdout).expect("it prints a number");
        Duration::from_nanos(text.trim().parse().expect("it prints a number"))
    };
    let bare = said(caller(Path::new("")));
    let socket = work.join("least");
    let listener = UnixListener::bind(&socket).expect("a socket can be made");
    let child = caller(&socket);
    let (mut stream, _) = listener.accept().expect("the caller comes");
    let mut bytes = [0; 16];
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let mut control_buffer = nix::cmsg_space!([i32; 1]);
    let message = recvmsg::<()>(
        stream.as_raw_fd(),
        &mut parts,
        Some(&mut control_buffer),
        MsgFlags::MSG_CMSG_CLOEXEC,
    );
    let message = message.expect("the listener comes");
    let Some(ControlMessageOwned::ScmRights(given)) =
        message.cmsgs().expect("all of it fits").next()
    else {
        panic!("there is a descriptor");
    };
    let [given] = given[..] else { panic!("there is one") };
    // SAFETY: the kernel has just made it for us.
    let notifications = Arc::new(unsafe { OwnedFd::from_raw_fd(given) });
    for _ in 0..waiting {
        let notifications = Arc::clone(&notifications);
        std::thread::spawn(move || refuse_all(&notifications, check));
    }
    stream.write_all(LISTENER_TAKEN).expect("the caller waits for that");
    let with = said(child);
    std::fs::remove_file(socket).expect("it is there");
    (bare, with)
}

fn refuse_all(listener: &OwnedFd, check: Check) {
    let listener = listener.as_raw_fd();
    // SAFETY: takes numbers only. Kernels before 6.6 refuse it, and are slower.
    unsafe { libc::ioctl(listener, SET_FLAGS, SYNC_WAKE_UP) };
    loop {
        // SAFETY: any bytes are a notification, and the kernel wants zeroes.
        let mut notice: seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: writes a `seccomp_notif`.
        let received =
            unsafe { libc::ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut notice) };
        if received != 0 {
            // The caller has exited. Before Linux 6.11 the kernel doesn't report it, and the thread waits on.
            return;
        }
        if check == Check::Struct {
            let mut call = [0; 32];
            let base = usize::try_from(notice.data.args[2]).expect("it is an address");
            let from = [RemoteIoVec { base, len: call.len() }];
            let caller = Pid::from_raw(notice.pid.cast_signed());
            process_vm_readv(caller, &mut [IoSliceMut::new(&mut call)], &from)
                .expect("the caller's memory can be read");
        }
        let error = -libc::ENOTTY;
        let mut reply = seccomp_notif_resp { id: notice.id, val: 0, error, flags: 0 };
        // SAFETY: reads a `seccomp_notif_resp`.
        let sent = unsafe { libc::ioctl(listener, libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut reply) };
        assert_eq!(sent, 0, "the caller waits");
    }
}
