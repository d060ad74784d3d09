//! Updates: another program goes on with this process, its descriptors and what the monitor knows.
//!
//! A command asks for the update, and gets the [`Snapshot`] in a sealed file. It has the new program read it, and hands
//! that program over as a descriptor. The monitor executes it, and it goes on where this one was: no call is received
//! or served meanwhile, and those that wait are received afterwards. If anything fails before, this program goes on.

use std::convert::Infallible;
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use nix::fcntl::AtFlags;
use nix::unistd::execveat;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::Errno;

use crate::driver::client_if_open;
use crate::gate::fd_passing::{self, Wait};
use crate::gate::inherited::{PROGRAM, occupy_program, put_program, set_close_on_exec};
use crate::gate::wire::{Answer, PROGRAM_SENT};
use crate::shared::Monitor;
use crate::snapshot::{ClientDescriptors, FileNumbers, Snapshot};
use crate::sync::{ChangeFlag, Lock};

/// How long calls, and what else asks the driver, may take to finish. What takes longer hangs in the driver.
pub(super) const PAUSE: Duration = Duration::from_secs(5);

/// How long the command may take to have the new program read the snapshot.
const CHECK: Duration = Duration::from_secs(10);

/// The new program's argument, before the number of the snapshot's descriptor.
pub(super) const RESUME: &str = "resume";

/// Connections that ask for an update.
#[derive(Debug)]
pub(crate) struct Requests {
    next: Lock<Option<UnixStream>>,
    /// Wakes the first thread.
    wake: Arc<ChangeFlag>,
}

impl Requests {
    pub(crate) fn new(wake: Arc<ChangeFlag>) -> Self {
        Requests { next: Lock::default(), wake }
    }

    /// Has the first thread update the monitor. One that waits already is closed.
    pub(crate) fn put(&self, stream: UnixStream) {
        *self.next.lock() = Some(stream);
        self.wake.set();
    }

    pub(crate) fn take(&self) -> Option<UnixStream> {
        self.next.lock().take()
    }
}

/// Answers a connection. If it is closed, no process waits for the answer.
pub(super) fn answer(stream: &UnixStream, answer: &Answer) {
    if let Ok(mut text) = serde_json::to_vec(answer) {
        text.push(b'\n');
        let _ = { stream }.write_all(&text);
    }
}

/// The descriptors of what the monitor retains.
pub(crate) fn retained_descriptors(monitor: &Monitor, into: FileNumbers) -> FileNumbers {
    let exports = monitor.exports.files.lock();
    let exports = exports.iter().map(|(number, export)| (*number, export.file.descriptor()));
    let files = monitor.uvm_files.all();
    let uvm_files = files.iter().map(|file| (file.number, file.device.descriptor()));
    let client = client_if_open(monitor).map(|own| ClientDescriptors {
        client: own.client,
        control: own.control.descriptor(),
        gpu_files: own.gpu_files().map(|file| file.as_raw_fd()).collect(),
        gpus: own.gpus.clone(),
    });
    FileNumbers { exports: exports.collect(), uvm_files: uvm_files.collect(), client, ..into }
}

/// Hands the process over to the program that the command on `stream` sends.
///
/// # Errors
///
/// If this program goes on: why.
pub(super) fn hand_over(stream: &UnixStream, snapshot: &Snapshot) -> io::Result<Infallible> {
    let file = sealed(&snapshot.encode().map_err(io::Error::other)?)?;
    let mut text = serde_json::to_vec(&Answer::Snapshot)?;
    text.push(b'\n');
    stream.set_read_timeout(Some(CHECK))?;
    fd_passing::send(stream, &text, Some(file.as_fd()), Wait::Always)?;
    let program = receive_program(stream)?;
    put_program(&program)?;
    drop(program);
    let failed = execute(&file, snapshot);
    // This program goes on, and with it the descriptors.
    let _ = snapshot.descriptors().try_for_each(|number| set_close_on_exec(number, true));
    occupy_program()?;
    failed
}

/// A file with these bytes that can't be changed any more.
fn sealed(bytes: &[u8]) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(memfd_create("cgpu-snapshot", flags)?);
    file.write_all(bytes)?;
    let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    fcntl_add_seals(&file, seals)?;
    Ok(file)
}

fn receive_program(stream: &UnixStream) -> io::Result<OwnedFd> {
    let mut buffer = [0; PROGRAM_SENT.len()];
    match fd_passing::receive(stream, &mut buffer, Wait::Always) {
        Ok((1.., Some(program))) => Ok(program),
        Ok(_) => Err(io::Error::other("the new program can't go on with this container")),
        Err(Errno::AGAIN) => Err(io::Error::other("the new program was not ready in time")),
        Err(errno) => Err(errno.into()),
    }
}

fn execute(file: &File, snapshot: &Snapshot) -> io::Result<Infallible> {
    let number = file.as_raw_fd();
    for number in snapshot.descriptors().chain([number]) {
        set_close_on_exec(number, false)?;
    }
    let words = ["cgpu-monitor", RESUME, &number.to_string()].map(CString::new);
    let words: Vec<CString> = words.into_iter().collect::<Result<_, _>>()?;
    let environment: [CString; 0] = [];
    // SAFETY: `put_program` has put it there, and nothing closes it.
    #[allow(unsafe_code, reason = "the filter of the monitor permits this number alone")]
    let program = unsafe { BorrowedFd::borrow_raw(PROGRAM) };
    Ok(execveat(program, c"", &words, &environment, AtFlags::AT_EMPTY_PATH)?)
}

/// The snapshot in a file, from its beginning.
pub(super) fn read_snapshot(file: &mut File) -> io::Result<Snapshot> {
    let mut bytes = Vec::new();
    io::Seek::rewind(file)?;
    file.read_to_end(&mut bytes)?;
    Snapshot::decode(&bytes).map_err(io::Error::other)
}
