//! Memory that outlives what was charged for it, and descriptors that travel.

use std::ffi::CString;
use std::io::{BufRead as _, BufReader, IoSlice, IoSliceMut, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use cgpu_sim::abi::*;
use cgpu_sim::bytes::Fields;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use nix::sys::wait::WaitStatus;

use super::{GENEROUS, SMALL_BYTES, against, argument, fill_quota, reached, reached_times};
use crate::passing::connect;
use crate::rm::{Place, Rm, call, open};
use crate::uvm::Uvm;
use crate::work::fill;

const CHUNK_BYTES: u64 = 64 << 20;

/// Most rounds, where nothing refuses.
const ROUNDS: u32 = 4096;

/// Most files that memory is exported to.
const EXPORTS: u32 = 32;

/// Duplicates memory and frees the original, again and again.
pub(super) fn dup_free(place: &Place, _: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let mut got = 0;
    for _ in 0..ROUNDS {
        let Ok((handle, bytes)) = rm.alloc(CHUNK_BYTES) else { break };
        let copy = rm.dup(rm.client, rm.device, rm.client, handle);
        let freed = rm.free(rm.device, handle);
        reached_times(u64::from(copy.is_ok() && freed.is_ok()));
        if copy.is_ok() || freed.is_err() {
            got += bytes;
        } else {
            println!("dup {copy:?}");
            break;
        }
    }
    Ok(got)
}

/// Maps memory by UVM and frees it, again and again.
pub(super) fn map_free(place: &Place, _: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let uvm = Uvm::open(place, rm.abi)?;
    uvm.initialize(0)?;
    let uuid = uvm.register(&rm)?;
    let mut got = 0;
    for round in 0..u64::from(ROUNDS) {
        let Ok((handle, bytes)) = rm.alloc(CHUNK_BYTES) else { break };
        let base = 0x10_0000_0000 + round * bytes.next_power_of_two();
        let mapped = uvm
            .external_range(base, bytes)
            .and_then(|()| uvm.map_external(&rm, uuid, base, bytes, handle));
        let freed = rm.free(rm.device, handle);
        reached_times(u64::from(mapped.is_ok() && freed.is_ok()));
        if mapped.is_ok() || freed.is_err() {
            got += bytes;
        } else {
            println!("map {mapped:?}");
            break;
        }
    }
    Ok(got)
}

/// Where `map-hide` maps, and how much.
const HIDE_BASE: u64 = 0x10_0000_0000;
const HIDE_BYTES: u64 = 400 << 20;
const PAGE_BYTES: u64 = 4096;

/// A UVM file with the GPU registered, and a range of [`HIDE_BYTES`].
fn ranged(place: &Place, rm: &Rm) -> anyhow::Result<(Uvm, [u8; 16])> {
    let uvm = Uvm::open(place, rm.abi)?;
    uvm.initialize(0)?;
    let uuid = uvm.register(rm)?;
    uvm.external_range(HIDE_BASE, HIDE_BYTES)?;
    Ok((uvm, uuid))
}

/// Maps memory by UVM and frees it, then has the mapping look as if it had ended, again and
/// again: by a mapping of a page at its address, in another file (`file`), over its beginning
/// (`over`) or by another GPU (`gpu`), by an unmap of its first page (`page`), by the end of
/// the process while another has the file (`fork`), and by hiding that in a socket (`socket`).
pub(super) fn map_hide(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let how = arguments.first().map_or("", String::as_str);
    let rm = Rm::start(place)?;
    let (from, _to) = UnixStream::pair()?;
    let mut files = Vec::new();
    for _ in 0..6 {
        if how == "fork" {
            let uvm = Uvm::open(place, rm.abi)?;
            // SAFETY: there is one thread, so that the child may do what this process could.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let done = map_and_free(place, &uvm);
                println!("child {done:?}");
                // SAFETY: ends this process at once; what the parent shares stays its own.
                unsafe { libc::_exit(i32::from(done.is_err())) };
            }
            let status = nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(child), None)?;
            reached_times(u64::from(matches!(status, WaitStatus::Exited(_, 0))));
            files.push(uvm);
            std::thread::sleep(Duration::from_millis(600));
            continue;
        }
        let (uvm, uuid) = ranged(place, &rm)?;
        let Ok((handle, _)) = rm.alloc(HIDE_BYTES) else { break };
        uvm.map_external(&rm, uuid, HIDE_BASE, HIDE_BYTES, handle)?;
        rm.free(rm.device, handle)?;
        let page = |rm: &Rm, uvm: &Uvm, uuid: [u8; 16]| -> anyhow::Result<()> {
            let (handle, bytes) = rm.alloc(PAGE_BYTES)?;
            uvm.map_external(rm, uuid, HIDE_BASE, bytes, handle)?;
            rm.free(rm.device, handle)?;
            Ok(())
        };
        match how {
            "file" => {
                let (other, uuid) = ranged(place, &rm)?;
                page(&rm, &other, uuid)?;
                files.push(other);
            }
            "over" => page(&rm, &uvm, uuid)?,
            "gpu" => {
                let place = Place { gpu: place.gpu + 1, ..place.clone() };
                let other = Rm::start(&place)?;
                let uuid = uvm.register(&other)?;
                page(&other, &uvm, uuid)?;
            }
            "page" => uvm.unmap_external(uuid, HIDE_BASE, PAGE_BYTES)?,
            "socket" => {
                let part = [IoSlice::new(b"x")];
                let fds = [uvm.fd()];
                let beside = [ControlMessage::ScmRights(&fds)];
                sendmsg::<()>(from.as_raw_fd(), &part, &beside, MsgFlags::empty(), None)?;
                drop(uvm);
                reached();
                std::thread::sleep(Duration::from_millis(300));
                continue;
            }
            _ => ensure!(false, "map-hide file, over, gpu, page, fork or socket"),
        }
        reached();
        files.push(uvm);
    }
    // What is hidden only the driver knows.
    let (total, free) = rm.heap_info()?;
    Ok(total - free)
}

/// Takes memory by a client of this process, maps it and frees it.
fn map_and_free(place: &Place, uvm: &Uvm) -> anyhow::Result<()> {
    let rm = Rm::start(place)?;
    uvm.initialize(0)?;
    let uuid = uvm.register(&rm)?;
    uvm.external_range(HIDE_BASE, HIDE_BYTES)?;
    let (handle, _) = rm.alloc(HIDE_BYTES)?;
    uvm.map_external(&rm, uuid, HIDE_BASE, HIDE_BYTES, handle)?;
    rm.free(rm.device, handle)?;
    Ok(())
}

/// Exports memory to a file and frees it, again and again; with `close`, closes the file, too,
/// and with `socket`, sends it into a socket before, which is never read.
pub(super) fn export_free(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let how = arguments.first().map_or("", String::as_str);
    let rm = Rm::start(place)?;
    let (from, _to) = UnixStream::pair()?;
    let mut got = 0;
    let mut files = Vec::new();
    for _ in 0..EXPORTS {
        let Ok((handle, bytes)) = rm.alloc(CHUNK_BYTES) else { break };
        let file = open(&place.dev, "nvidiactl")?;
        let exported = rm.export(handle, file.as_raw_fd());
        if how == "socket" {
            let part = [IoSlice::new(b"x")];
            let fds = [file.as_raw_fd()];
            let beside = [ControlMessage::ScmRights(&fds)];
            sendmsg::<()>(from.as_raw_fd(), &part, &beside, MsgFlags::empty(), None)?;
        }
        let freed = rm.free(rm.device, handle);
        if how.is_empty() {
            files.push(file);
        }
        reached_times(u64::from(exported.is_ok() && freed.is_ok()));
        if exported.is_ok() || freed.is_err() {
            // What no process has open is freed in a while; how much there is at once of it, the
            // driver knows.
            got = if how.is_empty() { got + bytes } else { got.max(bytes) };
        } else {
            println!("export {exported:?}");
            break;
        }
    }
    Ok(got)
}

/// Exports a handle of little memory while another thread makes it one of much; with `list`,
/// as a list of one.
pub(super) fn export_reuse(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    const BYTES: u64 = 200 << 20;
    const FILES: usize = 4;
    let is_list = arguments.first().is_some_and(|word| word == "list");
    let rm = Rm::start(place)?;
    let handle = rm.handle();
    let make = |bytes| {
        let made = rm.alloc_as(rm.ctl(), handle, NV01_MEMORY_LOCAL_USER, bytes);
        made.is_ok()
    };
    let (mut files, mut done) = (Vec::new(), 0);
    for _ in 0..FILES {
        let file = open(&place.dev, "nvidiactl")?;
        let swap = || {
            let _ = rm.free(rm.device, handle);
            if !make(BYTES) {
                make(SMALL_BYTES);
            }
            let _ = rm.free(rm.device, handle);
            make(SMALL_BYTES);
        };
        against(swap, || {
            for _ in 0..ROUNDS / 64 {
                let exported = match is_list {
                    true => rm.export_list(file.as_raw_fd(), 1, 0, &[handle]),
                    false => rm.export(handle, file.as_raw_fd()),
                };
                done += u64::from(exported.is_ok());
            }
        });
        let _ = rm.free(rm.device, handle);
        files.push(file);
    }
    println!("exports={done}");
    std::io::stdout().flush()?;
    reached_times(done);
    // What is in the files is all there is; the rest is there for honest allocations.
    Ok(fill_quota(&rm, place))
}

/// Opens the driver, makes a client, and sends the descriptors over the socket; keeps
/// nothing. With `recv-fd` at the other end. With a second argument `stay`, lives until it's killed.
pub(super) fn send_fd(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let path = arguments.first().context("send-fd PATH [stay]")?;
    let rm = Rm::start(place)?;
    let got = send(path, [rm.ctl(), rm.gpu.as_raw_fd()], [rm.client, rm.device])?;
    while arguments.get(1).is_some_and(|word| word == "stay") {
        std::thread::sleep(Duration::from_secs(1000));
    }
    Ok(got)
}

/// Opens the driver and sends the descriptors, and never calls it.
pub(super) fn send_open(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let path = arguments.first().context("send-open PATH")?;
    let (control, gpu) =
        (open(&place.dev, "nvidiactl")?, open(&place.dev, &format!("nvidia{}", place.gpu))?);
    send(path, [control.as_raw_fd(), gpu.as_raw_fd()], [0, 0])
}

/// Sends descriptors and handles to the process that connects.
fn send(path: &str, fds: [RawFd; 2], [client, device]: [u32; 2]) -> anyhow::Result<u64> {
    let _ = std::fs::remove_file(path);
    let listener = UnixListener::bind(path)?;
    println!("listening");
    std::io::stdout().flush()?;
    let (stream, _) = listener.accept()?;
    let mut handles = [0; 8];
    handles.set_u32(0, client);
    handles.set_u32(4, device);
    let handles = [IoSlice::new(&handles)];
    sendmsg::<()>(
        stream.as_raw_fd(),
        &handles,
        &[ControlMessage::ScmRights(&fds)],
        MsgFlags::empty(),
        None,
    )?;
    reached();
    Ok(0)
}

/// Receives descriptors and allocates through them; with a second argument, holds them for
/// so many seconds; with `own-client` after that, by a client of its own; with `inherited`, by one
/// whose creator has exited.
pub(super) fn recv_fd(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let mut rm = received(place, arguments.first().context("recv-fd PATH")?)?;
    let how = arguments.get(2).map_or("", String::as_str);
    if ["own-client", "inherited"].contains(&how) {
        rm.make_client()?;
        rm.make_device(place.gpu)?;
    }
    if how == "inherited" {
        // SAFETY: there is one thread, so that the child may do what this process could.
        if unsafe { libc::fork() } != 0 {
            return Ok(0);
        }
        std::thread::sleep(Duration::from_millis(700));
    }
    let got = fill_through(&rm.abi, &rm.ctl, rm.client, rm.device);
    reached_times(u64::from(got > 0));
    println!("got_bytes={got} so far");
    std::io::stdout().flush()?;
    // For so many seconds, or until a file is there.
    match arguments.get(1).filter(|word| word.starts_with('/')) {
        Some(path) => {
            while !Path::new(path).exists() {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        None => std::thread::sleep(Duration::from_secs(argument(arguments, 1, 0)?)),
    }
    Ok(got)
}

/// The first message on a bus, "Message Bus Messages" of the specification.
fn hello() -> Vec<u8> {
    let fields = [
        (1, b'o', "/org/freedesktop/DBus"),
        (2, b's', "org.freedesktop.DBus"),
        (3, b's', "Hello"),
        (6, b's', "org.freedesktop.DBus"),
    ];
    let length = |bytes: usize| u32::try_from(bytes).expect("it is short");
    let pad = |bytes: &mut Vec<u8>| bytes.resize(bytes.len().next_multiple_of(8), 0);
    let mut header = Vec::new();
    for (code, kind, text) in fields {
        pad(&mut header);
        header.extend([code, 1, kind, 0]);
        header.extend(length(text.len()).to_le_bytes());
        header.extend(text.bytes().chain([0]));
    }
    // Little endian, a method call, no flags, version 1; no body; serial 1.
    let mut message = b"l\x01\0\x01\0\0\0\0\x01\0\0\0".to_vec();
    message.extend(length(header.len()).to_le_bytes());
    message.extend(header);
    pad(&mut message);
    message
}

/// The driver by the descriptors that come from a socket, with the client of the process that sent them.
fn received(place: &Place, path: &str) -> anyhow::Result<Rm> {
    let stream = connect(path)?;
    let mut handles = [0; 8];
    let mut space = nix::cmsg_space!([RawFd; 2]);
    let fds = {
        let mut parts = [IoSliceMut::new(&mut handles)];
        let message =
            recvmsg::<()>(stream.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::empty())?;
        message.cmsgs()?.find_map(|part| match part {
            ControlMessageOwned::ScmRights(fds) => <[RawFd; 2]>::try_from(fds).ok(),
            _ => None,
        })
    };
    let fds = fds.context("no descriptors came")?;
    // SAFETY: the kernel just put them into our table, and nothing else has them.
    let [fd, gpu] = fds.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    let abi = abi_of(place, &fd)?;
    let mut rm = Rm::through(abi, fd, gpu);
    (rm.client, rm.device) = (handles.u32_at(0), handles.u32_at(4));
    Ok(rm)
}

/// Receives descriptors and holds them unused until a file is there; then allocates through them, with a
/// third argument `own-client` by a client of its own. Then makes that file with `.tried` behind its name, and holds
/// them until the first is gone.
pub(super) fn hold_fd(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let [path, go, how @ ..] = arguments else { bail!("hold-fd PATH FILE [own-client]") };
    let mut rm = received(place, path)?;
    println!("holding");
    std::io::stdout().flush()?;
    let wait = |there: bool| {
        while Path::new(go).exists() != there {
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    wait(true);
    reached();
    if how.first().is_some_and(|how| how == "own-client") {
        rm.make_client()?;
        rm.make_device(place.gpu)?;
    }
    let got = fill_through(&rm.abi, &rm.ctl, rm.client, rm.device);
    println!("got_bytes={got} so far");
    std::io::stdout().flush()?;
    std::fs::write(format!("{go}.tried"), "")?;
    wait(false);
    Ok(got)
}

/// Opens the driver and sends the descriptors to a message bus at that socket: as the beginning of a message whose
/// rest never comes, so that the bus keeps them. Lives until it's killed.
pub(super) fn send_bus(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let path = arguments.first().context("send-bus PATH")?;
    let rm = Rm::start(place)?;
    let mut stream = connect(path)?;
    // D-Bus Specification, "Authentication Protocol": user 0, in hexadecimal of its decimal digits.
    stream.write_all(b"\0AUTH EXTERNAL 30\r\nNEGOTIATE_UNIX_FD\r\n")?;
    let mut answers = BufReader::new(stream.try_clone()?);
    for expected in ["OK", "AGREE_UNIX_FD"] {
        let mut line = String::new();
        answers.read_line(&mut line)?;
        ensure!(line.starts_with(expected), "the bus says {line:?}");
    }
    stream.write_all(b"BEGIN\r\n")?;
    // The answer shows that it reads messages now, with their descriptors.
    stream.write_all(&hello())?;
    ensure!(answers.read(&mut [0; 1])? == 1, "the bus hangs up");
    // "Message Format": little endian, a method call, version 1, a body of 8 bytes, serial 2.
    let head = [IoSlice::new(b"l\x01\0\x01\x08\0\0\0\x02\0\0\0")];
    let fds = [rm.ctl(), rm.gpu.as_raw_fd()];
    let beside = [ControlMessage::ScmRights(&fds)];
    sendmsg::<()>(stream.as_raw_fd(), &head, &beside, MsgFlags::empty(), None)?;
    reached();
    println!("sent");
    std::io::stdout().flush()?;
    loop {
        std::thread::sleep(Duration::from_secs(1000));
    }
}

/// The structs of the driver behind a descriptor.
fn abi_of(place: &Place, fd: &OwnedFd) -> anyhow::Result<Abi> {
    let version = place.driver.clone().or_else(|| crate::rm::version(fd.as_raw_fd()));
    Ok(Abi::of(&version.context("the driver doesn't tell its version")?))
}

/// Allocates through a descriptor with another's client until refused.
fn fill_through(abi: &Abi, fd: &OwnedFd, client: u32, device: u32) -> u64 {
    let mut got = 0;
    loop {
        let mut params = vec![0; abi.memory_params_bytes];
        params.set_u64(64, CHUNK_BYTES);
        let mut bytes = vec![0; abi.nvos64_bytes];
        bytes.set_u32(0, client);
        bytes.set_u32(4, device);
        bytes.set_u32(12, NV01_MEMORY_LOCAL_USER);
        bytes.set_u64(16, params.as_mut_ptr().addr() as u64);
        match call(fd.as_raw_fd(), NV_ESC_RM_ALLOC, &mut bytes, abi.nvos64_status) {
            Ok(()) => got += params.u64_at(88).wrapping_add(1),
            Err(fail) => {
                println!("refused: {fail}");
                return got;
            }
        }
    }
}

/// What a child by vfork needs to become another program.
struct Becomes {
    program: CString,
    /// With a null at the end.
    words: Vec<*const libc::c_char>,
}

extern "C" fn become_it(what: *mut libc::c_void) -> libc::c_int {
    // SAFETY: the parent waits, so that it is there until we have become another.
    let what = unsafe { &*what.cast::<Becomes>() };
    // SAFETY: strings that end, in a list that ends.
    unsafe { libc::execv(what.program.as_ptr(), what.words.as_ptr()) };
    127
}

/// Has a child by vfork that becomes another program, which allocates through what it
/// inherits.
pub(super) fn vfork_exec(place: &Place, _: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    nix::fcntl::fcntl(&rm.ctl, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty()))?;
    let words = [
        "rmtool".to_owned(),
        "attack".to_owned(),
        "inherited".to_owned(),
        rm.ctl().to_string(),
        rm.client.to_string(),
        rm.device.to_string(),
    ];
    let words = words.into_iter().map(CString::new).collect::<Result<Vec<_>, _>>()?;
    let mut pointers: Vec<_> = words.iter().map(|word| word.as_ptr()).collect();
    pointers.push(std::ptr::null());
    let what = Becomes { program: CString::new("/proc/self/exe")?, words: pointers };
    let mut stack = vec![0_u128; 4096];
    std::io::stdout().flush()?;
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the child has a stack of its own in our memory, only execs, and ends where it can't;
    // until then this thread, the only one, stands still, so `what`, `words` and `stack` outlive it.
    let child = unsafe {
        let what = (&raw const what).cast_mut().cast();
        libc::clone(become_it, stack.as_mut_ptr_range().end.cast(), flags, what)
    };
    let status = nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(child), None)?;
    println!("child {status:?}");
    // It is gone, and what it took is this client's: only the driver can say how much.
    let (total, free) = rm.heap_info()?;
    let is_done = matches!(status, WaitStatus::Exited(_, 0));
    reached_times(u64::from(is_done && total > free));
    Ok(total - free)
}

/// What `vfork-exec` becomes: allocates through that descriptor, client and device.
pub(super) fn inherited(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    ensure!(arguments.len() == 3, "inherited FD CLIENT DEVICE");
    let fd: RawFd = arguments[0].parse()?;
    // SAFETY: it was inherited for this, and nothing else here has it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let abi = abi_of(place, &fd)?;
    Ok(fill_through(&abi, &fd, arguments[1].parse()?, arguments[2].parse()?))
}

/// Fills, closes everything at once, and fills again.
pub(super) fn close_range(place: &Place, _: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let (first, _) = fill(&rm, u64::MAX);
    std::mem::forget(rm);
    // SAFETY: nothing but what was just forgotten has a descriptor above 2.
    let rc = unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) };
    println!("first={first} close_range={rc}");
    drop(open(&place.dev, "nvidiactl")?);
    let rm = Rm::start(place)?;
    // A simulated driver learns of it a moment later.
    let closed = Instant::now();
    let (mut second, _) = fill(&rm, u64::MAX);
    while second < first && closed.elapsed() < GENEROUS {
        std::thread::sleep(Duration::from_millis(20));
        second += fill(&rm, u64::MAX).0;
    }
    println!("second={second}");
    ensure!(rc == 0 && first == second, "after that it isn't as before");
    reached();
    Ok(second)
}
