//! The driver's files, served by FUSE.
//!
//! Regular files whose ioctl is real: FUSE copies the struct as far as the number says
//! size and direction, and hands over number, open file and calling thread. Inode numbers
//! are fixed. Invariants: a call that a fault may hold up gets a thread of its own; the
//! kernel never reads ahead, so a page that is read was touched.
//!
//! What FUSE can't do: numbers that the kernel takes for itself on regular files (1 and 2
//! without size, `FIBMAP` and `FIGETBSZ`, which UVM doesn't use on Linux; some of types
//! 0x66, 0x58 and 0x94). What differs: a file is released soon after its last descriptor
//! is closed, not before close(2) returns; all files of `nvidia-uvm` share one page cache,
//! so of a page that two processes touch at one address only the first touch is seen.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, IoctlFlags, KernelConfig, LockOwner, Notifier, OpenFlags, ReplyAttr, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyOpen, ReplyWrite, Request, TimeOrNow,
    WriteFlags,
};

use crate::caller::{Caller, WHO_IS, is_ours};
use crate::escape::{self, Call};
use crate::fault::Fault;
use crate::schedule::Doorbell;
use crate::shared::{Shared, lock};
use crate::spec::{Gpu, MODEL};
use crate::state::State;
use crate::uvm;

/// A device file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Device {
    Control,
    Gpu(u32),
    Uvm,
    UvmTools,
}

impl Device {
    pub(crate) fn name(self) -> String {
        match self {
            Device::Control => "nvidiactl".to_owned(),
            Device::Gpu(minor) => format!("nvidia{minor}"),
            Device::Uvm => "nvidia-uvm".to_owned(),
            Device::UvmTools => "nvidia-uvm-tools".to_owned(),
        }
    }
}

/// What a node is.
#[derive(Debug, Clone)]
enum Content {
    Directory,
    Device(Device),
    Text(String),
    State,
    Faults,
}

/// A node; its inode number is its place and one.
#[derive(Debug)]
struct Node {
    parent: u64,
    name: String,
    content: Content,
}

/// For how long the kernel may rely on an answer: nothing changes.
const TTL: Duration = Duration::from_secs(3600);

/// Bytes of a device file: more than any address, since UVM's mappings lie at offsets that
/// equal their addresses, and a page past the end can't be touched.
const DEVICE_BYTES: u64 = 1 << 47;

/// Least file handle of a text.
const TEXT_HANDLES: u64 = 1 << 62;

/// The files.
#[derive(Debug)]
pub(crate) struct Tree {
    sim: Arc<Shared>,
    nodes: Vec<Node>,
    /// The state as each open file of it was read from its beginning: it changes between two reads.
    states: Mutex<HashMap<u64, String>>,
    opened: AtomicU64,
    pub(crate) notifier: Arc<OnceLock<Notifier>>,
}

fn version_text(version: &str) -> String {
    format!(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Thu Jan  1 00:00:00 UTC 1970\n\
         GCC version:  gcc version 12.2.0 (simulated)\n"
    )
}

fn information_text(gpu: &Gpu) -> String {
    // `nv_procfs_read_gpu_info` (nv-procfs.c).
    format!(
        "Model: \t\t {MODEL}\nIRQ:   \t\t 11\nGPU UUID: \t {}\nVideo BIOS: \t 88.00.4f.00.09\n\
         Bus Type: \t PCIe\nDMA Size: \t 47 bits\nDMA Mask: \t 0x7fffffffffff\n\
         Bus Location: \t {}\nDevice Minor: \t {}\nGPU Excluded:\t No\n",
        gpu.uuid_text(),
        gpu.bus_id(),
        gpu.minor
    )
}

fn inventory_text(gpus: &[Gpu]) -> String {
    let gpus: Vec<_> = gpus
        .iter()
        .map(|gpu| {
            serde_json::json!({
                "index": gpu.minor,
                "uuid": gpu.uuid_text(),
                "minor": gpu.minor,
                "bus_id": gpu.bus_id(),
                "name": MODEL,
                "memory_mib": gpu.memory_bytes >> 20,
                "memory_reserved_mib": gpu.reserved_bytes >> 20,
            })
        })
        .collect();
    serde_json::Value::from(gpus).to_string() + "\n"
}

impl Tree {
    pub(crate) fn new(sim: Arc<Shared>) -> Self {
        let mut tree = Tree {
            sim: Arc::clone(&sim),
            nodes: Vec::new(),
            states: Mutex::default(),
            opened: AtomicU64::new(0),
            notifier: Arc::default(),
        };
        let gpus = sim.driver().gpus.clone();
        let directory = || Content::Directory;
        let text = Content::Text;
        tree.add(1, "", directory());
        let dev = tree.add(1, "dev", directory());
        let devices = [Device::Control, Device::Uvm, Device::UvmTools];
        for device in devices.into_iter().chain(gpus.iter().map(|gpu| Device::Gpu(gpu.minor))) {
            tree.add(dev, &device.name(), Content::Device(device));
        }
        let proc = tree.add(1, "proc", directory());
        let driver = tree.add(proc, "driver", directory());
        let nvidia = tree.add(driver, "nvidia", directory());
        tree.add(nvidia, "version", text(version_text(&sim.version.to_string())));
        let by_bus = tree.add(nvidia, "gpus", directory());
        for gpu in &gpus {
            let gpu_dir = tree.add(by_bus, &gpu.bus_id(), directory());
            tree.add(gpu_dir, "information", text(information_text(gpu)));
        }
        tree.add(1, "inventory.json", text(inventory_text(&gpus)));
        let control = tree.add(1, "sim", directory());
        tree.add(control, "state", Content::State);
        tree.add(control, "faults", Content::Faults);
        tree
    }

    fn add(&mut self, parent: u64, name: &str, content: Content) -> u64 {
        self.nodes.push(Node { parent, name: name.to_owned(), content });
        self.nodes.len() as u64
    }

    fn node(&self, ino: INodeNo) -> Result<&Node, Errno> {
        let at = usize::try_from(ino.0).ok().and_then(|ino| ino.checked_sub(1));
        at.and_then(|at| self.nodes.get(at)).ok_or(Errno::ENOENT)
    }

    /// Inode numbers of the GPUs' nodes, by minor.
    pub(crate) fn gpu_inodes(&self) -> Vec<u64> {
        let device = |node: &Node| matches!(node.content, Content::Device(Device::Gpu(_)));
        let places = self.nodes.iter().zip(1..).filter(|(node, _)| device(node));
        places.map(|(_, ino)| ino).collect()
    }

    fn attributes(&self, ino: INodeNo) -> Result<FileAttr, Errno> {
        let content = &self.node(ino)?.content;
        let never = SystemTime::UNIX_EPOCH;
        Ok(FileAttr {
            ino,
            size: if matches!(content, Content::Device(_)) { DEVICE_BYTES } else { 0 },
            blocks: 0,
            atime: never,
            mtime: never,
            ctime: never,
            crtime: never,
            kind: match content {
                Content::Directory => FileType::Directory,
                _ => FileType::RegularFile,
            },
            perm: match content {
                Content::Directory => 0o755,
                Content::Device(_) => 0o666,
                Content::Text(_) | Content::State => 0o444,
                Content::Faults => 0o644,
            },
            nlink: if matches!(content, Content::Directory) { 2 } else { 1 },
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

/// A call as FUSE hands it over.
struct Ioctl {
    caller: Caller,
    device: Device,
    file: u64,
    cmd: u32,
    in_data: Vec<u8>,
    out_size: usize,
}

impl Ioctl {
    /// Executes it: the result and what is copied out.
    fn execute(self, sim: &Shared) -> Result<(i32, Vec<u8>), Errno> {
        let (caller, device, file) = (self.caller, self.device, self.file);
        let call = Call { sim, caller, device, file, late: Cell::default() };
        let answer = self.answer(&call);
        std::thread::sleep(call.late.get());
        answer
    }

    fn answer(self, call: &Call<'_>) -> Result<(i32, Vec<u8>), Errno> {
        let argument = || self.caller.ioctl_argument(self.cmd).ok_or(Errno::EIO);
        if matches!(self.device, Device::Uvm | Device::UvmTools) {
            let done = uvm::ioctl(call, self.cmd, argument()?);
            return done.map(|()| (0, Vec::new())).map_err(Errno::from_i32);
        }
        // The driver reads and writes the whole struct, whatever the direction bits say;
        // FUSE heeds them.
        let (number, size) = (self.cmd & 0xff, self.cmd as usize >> 16 & 0x3fff);
        let mut bytes = self.in_data;
        if bytes.len() != size {
            bytes = vec![0; size];
            self.caller.read(argument()?, &mut bytes).ok_or(Errno::EFAULT)?;
        }
        let result = match escape::ioctl(call, number, &mut bytes) {
            Ok(()) => 0,
            Err(libc::EFAULT) => return Err(Errno::EFAULT),
            // Other failures copy out too (nv.c).
            Err(errno) => -errno,
        };
        if self.out_size < size {
            self.caller.write(argument()?, &bytes).ok_or(Errno::EFAULT)?;
            bytes.clear();
        }
        Ok((result, bytes))
    }
}

fn answer(reply: ReplyIoctl, done: Result<(i32, Vec<u8>), Errno>) {
    match done {
        Ok((result, bytes)) => reply.ioctl(result, &bytes),
        Err(errno) => reply.error(errno),
    }
}

// Each is the kernel's question and our answer; `fuser` gives the signatures.
impl Filesystem for Tree {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Less than a page: none.
        let _ = config.set_max_readahead(1);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.nodes.iter().zip(1..).find(|(node, ino)| {
            node.parent == parent.0 && *ino != 1 && OsStr::new(&node.name) == name
        });
        match found.map(|(_, ino)| self.attributes(INodeNo(ino))) {
            Some(Ok(attributes)) => reply.entry(&TTL, &attributes, Generation(0)),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.attributes(ino) {
            Ok(attributes) => reply.attr(&TTL, &attributes),
            Err(errno) => reply.error(errno),
        }
    }

    // A shell's `>` truncates first, and engines change owners of nodes.
    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        _size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        self.getattr(request, ino, fh, reply);
    }

    fn open(&self, request: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match self.node(ino).map(|node| &node.content) {
            Ok(Content::Device(device)) => {
                let file = self.sim.open(*device, Caller::new(request.pid()).process());
                let flags = FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH;
                reply.opened(FileHandle(file), flags);
            }
            Ok(_) => {
                let opened = self.opened.fetch_add(1, Ordering::Relaxed);
                reply.opened(FileHandle(TEXT_HANDLES | opened), FopenFlags::FOPEN_DIRECT_IO);
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn release(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        reply.ok();
        if fh.0 & TEXT_HANDLES != 0 {
            lock(&self.states).remove(&fh.0);
            return;
        }
        // Pages that stay cached would be touched unseen the next time. The kernel may have
        // to ask us about them, so another thread notifies it.
        match (self.sim.managed_pages(fh.0), self.notifier.get()) {
            (Some((from, to)), Some(notifier)) => {
                let (notifier, sim) = (notifier.clone(), Arc::clone(&self.sim));
                std::thread::spawn(move || {
                    let from = i64::try_from(from).unwrap_or(0);
                    let len = i64::try_from(to).unwrap_or(i64::MAX).saturating_sub(from);
                    let _ = notifier.inval_inode(ino, from, len);
                    sim.close(fh.0);
                });
            }
            _ => self.sim.close(fh.0),
        }
    }

    fn read(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let text = match self.node(ino).map(|node| &node.content) {
            Ok(Content::Device(device)) => {
                if *device == Device::Uvm {
                    let process = Caller::new(request.pid()).process();
                    self.sim.driver().touch(fh.0, process, offset, u64::from(size));
                }
                let reported = self.sim.driver().answer_doorbell(fh.0).filter(|_| offset == 0);
                return match reported {
                    Some(reported) => {
                        reply.data(reported.get(..size as usize).unwrap_or(&reported))
                    }
                    None => reply.data(&vec![0; size as usize]),
                };
            }
            Ok(Content::Text(text)) => text.clone(),
            Ok(Content::State) => {
                let now = || {
                    let state = State::of(&self.sim);
                    serde_json::to_string_pretty(&state).unwrap_or_default() + "\n"
                };
                let mut states = lock(&self.states);
                if offset == 0 {
                    states.insert(fh.0, now());
                }
                states.get(&fh.0).cloned().unwrap_or_default()
            }
            Ok(Content::Faults) => {
                self.sim.faults().into_iter().map(|fault| fault + "\n").collect::<String>()
            }
            Ok(Content::Directory) => return reply.error(Errno::EISDIR),
            Err(errno) => return reply.error(errno),
        };
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(text.len());
        let end = start.saturating_add(size as usize).min(text.len());
        reply.data(text.as_bytes().get(start..end).unwrap_or_default());
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.node(ino).map(|node| &node.content) {
            // A doorbell, or a mapping's page that is written back.
            Ok(Content::Device(device)) => {
                if let (Device::Gpu(gpu), Some(doorbell)) = (device, Doorbell::of(data))
                    && self.sim.driver().ring(fh.0, *gpu as usize, doorbell).is_err()
                {
                    return reply.error(Errno::EINVAL);
                }
            }
            Ok(Content::Faults) => {
                let lines = std::str::from_utf8(data).unwrap_or("?").lines().map(str::trim);
                let faults: Result<Vec<Fault>, _> =
                    lines.filter(|line| !line.is_empty()).map(str::parse).collect();
                match faults {
                    Ok(faults) => faults.into_iter().for_each(|fault| self.sim.add(fault)),
                    Err(_) => return reply.error(Errno::EINVAL),
                }
            }
            Ok(_) => return reply.error(Errno::EACCES),
            Err(errno) => return reply.error(errno),
        }
        match u32::try_from(data.len()) {
            Ok(size) => reply.written(size),
            Err(_) => reply.error(Errno::EINVAL),
        }
    }

    fn ioctl(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _: IoctlFlags,
        cmd: u32,
        in_data: &[u8],
        out_size: u32,
        reply: ReplyIoctl,
    ) {
        let Ok(Content::Device(device)) = self.node(ino).map(|node| &node.content) else {
            return reply.error(Errno::ENOTTY);
        };
        let caller = Caller::new(request.pid());
        if cmd == WHO_IS && is_ours(in_data) {
            return reply.ioctl(0, &fh.0.to_le_bytes());
        }
        let call = Ioctl {
            caller,
            device: *device,
            file: fh.0,
            cmd,
            in_data: in_data.to_vec(),
            out_size: out_size as usize,
        };
        if self.sim.is_faulty() {
            let sim = Arc::clone(&self.sim);
            std::thread::spawn(move || answer(reply, call.execute(&sim)));
        } else {
            answer(reply, call.execute(&self.sim));
        }
    }

    fn readdir(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let parent = match self.node(ino) {
            Ok(node) => node.parent,
            Err(errno) => return reply.error(errno),
        };
        let dots = [(".".to_owned(), ino.0), ("..".to_owned(), parent)];
        let children =
            self.nodes.iter().zip(1..).filter(|(node, at)| node.parent == ino.0 && *at != 1);
        let entries = dots.into_iter().chain(children.map(|(node, at)| (node.name.clone(), at)));
        for (position, (name, at)) in entries
            .zip(1_u64..)
            .map(|(e, p)| (p, e))
            .skip(usize::try_from(offset).unwrap_or(usize::MAX))
        {
            let kind = self.attributes(INodeNo(at)).map_or(FileType::RegularFile, |a| a.kind);
            if reply.add(INodeNo(at), position, kind, name) {
                break;
            }
        }
        reply.ok();
    }
}
