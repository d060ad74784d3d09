//! A stand-in for the vendor's module: its procfs tree, served by FUSE.
//!
//! Behaves as the module does at its files, so that the `km` backend is tested against
//! writes that are refused, or report success and do nothing. Other test programs use
//! it by `#[path = "standin/km.rs"] mod km_standin;`; other processes see the mount like
//! any other directory. It must not know the backend. Invariants: nothing is cached by
//! the kernel, so that what one write makes the next look-up finds; the mount goes with
//! the value, also when a test panics.

// Every test program that includes this file uses another part of it.
#![allow(dead_code)]

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite, Request, SessionACL, TimeOrNow,
    WriteFlags,
};

/// Files and their permissions, which are the original's: everyone may write.
const ROOT_FILES: &[(&str, u16)] = &[
    ("version", 0o444),
    ("inst_ctl", 0o222),
    ("default_memsize", 0o666),
    ("upgrade", 0o666),
    ("major", 0o444),
];
const GPU_FILES: &[(&str, u16)] =
    &[("policy", 0o666), ("max_inst", 0o666), ("free_weight", 0o444), ("prio_ratio", 0o666)];
const INSTANCE_FILES: &[(&str, u16)] = &[
    ("id", 0o444),
    ("memsize", 0o666),
    ("meminfo", 0o444),
    ("weight", 0o666),
    ("highprio", 0o666),
];

/// A mounted tree; unmounted when dropped.
#[derive(Debug)]
pub(crate) struct StandIn {
    module: Arc<Mutex<Module>>,
    session: Option<BackgroundSession>,
    // After the session: the directory goes when nothing is mounted on it any more.
    directory: tempfile::TempDir,
}

/// A way in which the module fails, until [`StandIn::heal`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Writes to this file of the GPU or of its instances report success and do nothing.
    IgnoresWrite { gpu: u32, name: &'static str },
    /// As `IgnoresWrite`, after this many more writes that take.
    IgnoresWriteAfter { gpu: u32, name: &'static str, writes: u32 },
    /// No instance can be made on the GPU: ENOSPC.
    NoSlot { gpu: u32 },
    /// Making an instance on the GPU reports success and makes nothing.
    MakesNothing { gpu: u32 },
    /// Destroying reports success and leaves everything.
    DestroysNothing,
    /// Destroying fails with EIO.
    DestroyFails,
    /// Just before a write to the file at this path takes, someone else makes an instance.
    Arrives { path: String, gpu: u32, short_id: String },
    /// Reading the file at this path of the tree fails with EIO.
    ReadFails { path: String },
    /// The file at this path of the tree reads so.
    Reads { path: String, text: String },
}

impl StandIn {
    /// A tree with these GPUs, each with policy 1 and 20 slots.
    ///
    /// # Panics
    ///
    /// Where it can't be mounted; says what is missing.
    pub(crate) fn mount(gpus: &[u32]) -> StandIn {
        assert!(
            Path::new("/dev/fuse").exists(),
            "the stand-in for the kernel module needs FUSE, and /dev/fuse does not exist: \
             `modprobe fuse`, or give the machine the device"
        );
        let directory = tempfile::Builder::new()
            .prefix("cgpu-km-standin-")
            .tempdir()
            .expect("the temporary directory can be written");
        let module = Arc::new(Mutex::new(Module::new(gpus)));
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName("cgpu_km".to_owned()),
            MountOption::NoDev,
            MountOption::NoSuid,
            MountOption::NoExec,
        ];
        config.acl = SessionACL::All;
        let session = fuser::spawn_mount(Tree(Arc::clone(&module)), directory.path(), &config);
        let session = session.unwrap_or_else(|error| {
            panic!(
                "the stand-in for the kernel module could not be mounted on {}, which needs root \
                 (CAP_SYS_ADMIN): {error}",
                directory.path().display()
            )
        });
        StandIn { module, session: Some(session), directory }
    }

    /// Where the tree is.
    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Makes the module fail so from now on.
    pub(crate) fn fail(&self, fault: Fault) {
        self.module().faults.push(fault);
    }

    /// Ends all faults.
    pub(crate) fn heal(&self) {
        self.module().faults.clear();
    }

    /// The version it shows; in 0.8.x `id` is an instance number.
    pub(crate) fn set_version(&self, version: &str) {
        self.module().version = version.to_owned();
    }

    /// Sets a number of a GPU without a write: `policy`, `max_inst` or `prio_ratio`.
    pub(crate) fn set_gpu(&self, gpu: u32, name: &str, value: u64) {
        let mut module = self.module();
        let gpu = module.gpus.get_mut(&gpu).expect("the stand-in has this GPU");
        *gpu.number_mut(name).expect("a GPU has this number") = value;
    }

    /// Makes an instance as the module does, without a write.
    pub(crate) fn plant(&self, gpu: u32, short_id: &str) {
        self.module().make(gpu, short_id);
    }

    /// Sets a number of an instance without a write: `memsize`, `weight` or `highprio`.
    pub(crate) fn set_instance(&self, gpu: u32, short_id: &str, name: &str, value: u64) {
        let mut module = self.module();
        let instance = module.instance_mut(gpu, short_id).expect("the stand-in has it");
        *instance.number_mut(name).expect("an instance has this number") = value;
    }

    /// Lets a process of an instance hold memory.
    pub(crate) fn use_memory(&self, gpu: u32, short_id: &str, pid: u32, bytes: u64) {
        let mut module = self.module();
        let instance = module.instance_mut(gpu, short_id).expect("the stand-in has it");
        instance.processes.push((pid, bytes));
    }

    /// The instances on a GPU, by name.
    pub(crate) fn instances(&self, gpu: u32) -> Vec<String> {
        self.module().gpus[&gpu].instances.keys().cloned().collect()
    }

    /// A number of a GPU.
    pub(crate) fn gpu(&self, gpu: u32, name: &str) -> u64 {
        let mut module = self.module();
        let gpu = module.gpus.get_mut(&gpu).expect("the stand-in has this GPU");
        *gpu.number_mut(name).expect("a GPU has this number")
    }

    /// A number of an instance.
    pub(crate) fn instance(&self, gpu: u32, short_id: &str, name: &str) -> u64 {
        let mut module = self.module();
        let instance = module.instance_mut(gpu, short_id).expect("the stand-in has it");
        *instance.number_mut(name).expect("an instance has this number")
    }

    /// Every write(2) so far: the path in the tree, and the bytes.
    pub(crate) fn writes(&self) -> Vec<(String, String)> {
        self.module().writes.clone()
    }

    fn module(&self) -> MutexGuard<'_, Module> {
        lock(&self.module)
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        let Some(session) = self.session.take() else { return };
        if let Err(error) = session.umount_and_join() {
            // A test left a file of the tree open: detach, and let the last close end it.
            let detached = nix::mount::umount2(self.path(), nix::mount::MntFlags::MNT_DETACH);
            eprintln!("the stand-in was busy ({error}), detached: {detached:?}");
        }
    }
}

/// A poisoned lock is a test that failed; its tree must still be unmounted.
fn lock(module: &Mutex<Module>) -> MutexGuard<'_, Module> {
    module.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The module's state.
#[derive(Debug)]
struct Module {
    version: String,
    default_memsize: u64,
    gpus: BTreeMap<u32, Gpu>,
    made: u64,
    faults: Vec<Fault>,
    writes: Vec<(String, String)>,
    inodes: HashMap<Node, u64>,
    nodes: Vec<Node>,
}

#[derive(Debug)]
struct Gpu {
    policy: u64,
    max_inst: u64,
    prio_ratio: u64,
    instances: BTreeMap<String, Instance>,
}

#[derive(Debug)]
struct Instance {
    /// Which one this is since the module was loaded; a name can come again.
    number: u64,
    memsize: u64,
    weight: u64,
    highprio: u64,
    processes: Vec<(u32, u64)>,
}

/// Something that has an inode.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Node {
    Root,
    RootFile(&'static str),
    Gpu(u32),
    GpuFile(u32, &'static str),
    Instance(u32, String, u64),
    InstanceFile(u32, String, u64, &'static str),
}

impl Gpu {
    fn free_weight(&self) -> u64 {
        self.max_inst.saturating_sub(self.instances.values().map(|it| it.weight).sum())
    }

    fn number_mut(&mut self, name: &str) -> Option<&mut u64> {
        match name {
            "policy" => Some(&mut self.policy),
            "max_inst" => Some(&mut self.max_inst),
            "prio_ratio" => Some(&mut self.prio_ratio),
            _ => None,
        }
    }
}

impl Instance {
    fn meminfo(&self) -> String {
        let used: u64 = self.processes.iter().map(|(_, bytes)| bytes).sum();
        let mut text = format!("Free: {}\n", self.memsize.saturating_sub(used));
        for (pid, bytes) in &self.processes {
            text += &format!("PID: {pid} Mem: {bytes}\n");
        }
        text
    }

    fn number_mut(&mut self, name: &str) -> Option<&mut u64> {
        match name {
            "memsize" => Some(&mut self.memsize),
            "weight" => Some(&mut self.weight),
            "highprio" => Some(&mut self.highprio),
            _ => None,
        }
    }
}

impl Module {
    fn new(gpus: &[u32]) -> Module {
        let gpu =
            || Gpu { policy: 1, max_inst: 20, prio_ratio: 80, instances: BTreeMap::default() };
        Module {
            version: "1.5.8".to_owned(),
            default_memsize: 1 << 30,
            gpus: gpus.iter().map(|index| (*index, gpu())).collect(),
            made: 0,
            faults: Vec::new(),
            writes: Vec::new(),
            inodes: HashMap::from([(Node::Root, INodeNo::ROOT.0)]),
            nodes: vec![Node::Root],
        }
    }

    fn instance_mut(&mut self, gpu: u32, short_id: &str) -> Option<&mut Instance> {
        self.gpus.get_mut(&gpu)?.instances.get_mut(short_id)
    }

    fn make(&mut self, gpu: u32, short_id: &str) {
        self.made += 1;
        let fresh = Instance {
            number: self.made,
            memsize: self.default_memsize,
            weight: 1,
            highprio: 0,
            processes: Vec::new(),
        };
        let gpu = self.gpus.get_mut(&gpu).expect("the stand-in has this GPU");
        // A name that is there already keeps what it was.
        gpu.instances.entry(short_id.to_owned()).or_insert(fresh);
    }

    /// A write to `inst_ctl`: a digit and an id creates, `-` and an id destroys.
    fn control(&mut self, word: &[u8]) -> Result<(), Errno> {
        let Ok(word) = std::str::from_utf8(word) else { return Err(Errno::EINVAL) };
        if word.len() != 13 || !word.is_char_boundary(1) {
            return Err(Errno::EINVAL);
        }
        let (command, short_id) = word.split_at(1);
        if command == "-" {
            if self.faults.contains(&Fault::DestroyFails) {
                return Err(Errno::EIO);
            }
            if !self.faults.contains(&Fault::DestroysNothing) {
                for gpu in self.gpus.values_mut() {
                    gpu.instances.remove(short_id);
                }
            }
            return Ok(());
        }
        let index = command.parse().map_err(|_| Errno::EINVAL)?;
        let gpu = self.gpus.get(&index).ok_or(Errno::EINVAL)?;
        let full = gpu.instances.len() as u64 >= gpu.max_inst;
        if full || self.faults.contains(&Fault::NoSlot { gpu: index }) {
            return Err(Errno::ENOSPC);
        }
        if !self.faults.contains(&Fault::MakesNothing { gpu: index }) {
            self.make(index, short_id);
        }
        Ok(())
    }

    /// Whether this write reports success and does nothing.
    fn ignores(&mut self, gpu: u32, name: &'static str) -> bool {
        self.faults.iter_mut().any(|fault| match fault {
            Fault::IgnoresWrite { gpu: g, name: n } => (*g, *n) == (gpu, name),
            Fault::IgnoresWriteAfter { gpu: g, name: n, writes } if (*g, *n) == (gpu, name) => {
                let ignored = *writes == 0;
                *writes = writes.saturating_sub(1);
                ignored
            }
            _ => false,
        })
    }

    fn write(&mut self, node: &Node, bytes: &[u8]) -> Result<(), Errno> {
        let here = self.path(node);
        for fault in self.faults.clone() {
            match fault {
                Fault::Arrives { path, gpu, short_id } if path == here => self.make(gpu, &short_id),
                _ => {}
            }
        }
        self.writes.push((here, String::from_utf8_lossy(bytes).into_owned()));
        let number = std::str::from_utf8(bytes).ok().and_then(|text| text.trim().parse().ok());
        match node {
            Node::RootFile("inst_ctl") => self.control(bytes),
            Node::RootFile("default_memsize") => {
                self.default_memsize = number.unwrap_or(self.default_memsize);
                Ok(())
            }
            Node::RootFile("upgrade") => Ok(()),
            Node::GpuFile(index, name) => {
                let ignored = self.ignores(*index, name);
                let gpu = self.gpus.get_mut(index).ok_or(Errno::ENOENT)?;
                let cell = gpu.number_mut(name).ok_or(Errno::EACCES)?;
                // What is out of range does not take, and is not refused either.
                let range = match *name {
                    "policy" => 0..=5,
                    "max_inst" => 1..=25,
                    _ => 20..=99,
                };
                if let Some(value) = number.filter(|value| range.contains(value) && !ignored) {
                    *cell = value;
                }
                Ok(())
            }
            Node::InstanceFile(index, short_id, _, name) => {
                let ignored = self.ignores(*index, name);
                let gpu = self.gpus.get_mut(index).ok_or(Errno::ENOENT)?;
                let free_weight = gpu.free_weight();
                let instance = gpu.instances.get_mut(short_id).ok_or(Errno::ENOENT)?;
                let range = match *name {
                    "weight" => 1..=instance.weight + free_weight,
                    "highprio" => 0..=1,
                    _ => 1..=u64::MAX,
                };
                let cell = instance.number_mut(name).ok_or(Errno::EACCES)?;
                if let Some(value) = number.filter(|value| range.contains(value) && !ignored) {
                    *cell = value;
                }
                Ok(())
            }
            Node::RootFile(_) => Err(Errno::EACCES),
            Node::Root | Node::Gpu(_) | Node::Instance(..) => Err(Errno::EISDIR),
        }
    }

    fn read(&self, node: &Node) -> Result<String, Errno> {
        let here = self.path(node);
        for fault in &self.faults {
            match fault {
                Fault::ReadFails { path } if *path == here => return Err(Errno::EIO),
                Fault::Reads { path, text } if *path == here => return Ok(text.clone()),
                _ => {}
            }
        }
        let text = match node {
            Node::RootFile("version") => self.version.clone(),
            Node::RootFile("default_memsize") => self.default_memsize.to_string(),
            Node::RootFile("upgrade") => "0".to_owned(),
            Node::RootFile("major") => "508".to_owned(),
            Node::GpuFile(index, name) => {
                let gpu = self.gpus.get(index).ok_or(Errno::ENOENT)?;
                match *name {
                    "policy" => gpu.policy,
                    "max_inst" => gpu.max_inst,
                    "prio_ratio" => gpu.prio_ratio,
                    _ => gpu.free_weight(),
                }
                .to_string()
            }
            Node::InstanceFile(index, short_id, _, name) => {
                let gpu = self.gpus.get(index).ok_or(Errno::ENOENT)?;
                let instance = gpu.instances.get(short_id).ok_or(Errno::ENOENT)?;
                match *name {
                    "memsize" => instance.memsize.to_string(),
                    "weight" => instance.weight.to_string(),
                    "highprio" => instance.highprio.to_string(),
                    "meminfo" => return Ok(instance.meminfo()),
                    _ if self.version.starts_with("0.8.") => instance.number.to_string(),
                    _ => short_id.clone(),
                }
            }
            Node::RootFile(_) => return Err(Errno::EACCES),
            Node::Root | Node::Gpu(_) | Node::Instance(..) => return Err(Errno::EISDIR),
        };
        Ok(text + "\n")
    }

    fn exists(&self, node: &Node) -> bool {
        match node {
            Node::Root | Node::RootFile(_) => true,
            Node::Gpu(index) | Node::GpuFile(index, _) => self.gpus.contains_key(index),
            Node::Instance(index, short_id, number)
            | Node::InstanceFile(index, short_id, number, _) => self
                .gpus
                .get(index)
                .and_then(|gpu| gpu.instances.get(short_id))
                .is_some_and(|instance| instance.number == *number),
        }
    }

    fn children(&self, node: &Node) -> Vec<(String, Node)> {
        match node {
            Node::Root => {
                let files = ROOT_FILES.iter().map(|(n, _)| ((*n).to_owned(), Node::RootFile(n)));
                let gpus = self.gpus.keys().map(|index| (index.to_string(), Node::Gpu(*index)));
                files.chain(gpus).collect()
            }
            Node::Gpu(index) => {
                let Some(gpu) = self.gpus.get(index) else { return Vec::new() };
                let files =
                    GPU_FILES.iter().map(|(n, _)| ((*n).to_owned(), Node::GpuFile(*index, n)));
                let instances = gpu.instances.iter().map(|(short_id, instance)| {
                    let node = Node::Instance(*index, short_id.clone(), instance.number);
                    (short_id.clone(), node)
                });
                files.chain(instances).collect()
            }
            Node::Instance(index, short_id, number) => {
                let file = |name| Node::InstanceFile(*index, short_id.clone(), *number, name);
                INSTANCE_FILES.iter().map(|(name, _)| ((*name).to_owned(), file(name))).collect()
            }
            Node::RootFile(_) | Node::GpuFile(..) | Node::InstanceFile(..) => Vec::new(),
        }
    }

    fn path(&self, node: &Node) -> String {
        match node {
            Node::Root => String::new(),
            Node::RootFile(name) => (*name).to_owned(),
            Node::Gpu(index) => index.to_string(),
            Node::GpuFile(index, name) => format!("{index}/{name}"),
            Node::Instance(index, short_id, _) => format!("{index}/{short_id}"),
            Node::InstanceFile(index, short_id, _, name) => format!("{index}/{short_id}/{name}"),
        }
    }

    fn inode(&mut self, node: &Node) -> INodeNo {
        if let Some(inode) = self.inodes.get(node) {
            return INodeNo(*inode);
        }
        self.nodes.push(node.clone());
        let inode = self.nodes.len() as u64;
        self.inodes.insert(node.clone(), inode);
        INodeNo(inode)
    }

    fn node(&self, inode: INodeNo) -> Result<Node, Errno> {
        let index = usize::try_from(inode.0 - 1).map_err(|_| Errno::ENOENT)?;
        let node = self.nodes.get(index).ok_or(Errno::ENOENT)?;
        if self.exists(node) { Ok(node.clone()) } else { Err(Errno::ENOENT) }
    }

    fn attributes(&mut self, node: &Node) -> FileAttr {
        let files = match node {
            Node::Root | Node::Gpu(_) | Node::Instance(..) => None,
            Node::RootFile(name) => Some((name, ROOT_FILES)),
            Node::GpuFile(_, name) => Some((name, GPU_FILES)),
            Node::InstanceFile(_, _, _, name) => Some((name, INSTANCE_FILES)),
        };
        let perm = files.map(|(name, files)| {
            files.iter().find(|(n, _)| n == name).expect("nodes are made from these lists").1
        });
        let never = SystemTime::UNIX_EPOCH;
        FileAttr {
            ino: self.inode(node),
            // As in procfs; reading goes by what read(2) returns.
            size: 0,
            blocks: 0,
            atime: never,
            mtime: never,
            ctime: never,
            crtime: never,
            kind: if perm.is_some() { FileType::RegularFile } else { FileType::Directory },
            perm: perm.unwrap_or(0o555),
            nlink: if perm.is_some() { 1 } else { 2 },
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

/// The module's state as files.
#[derive(Debug)]
struct Tree(Arc<Mutex<Module>>);

/// For how long the kernel may cache what it was answered.
const TTL: Duration = Duration::ZERO;

// Each is the kernel's question and the module's answer; `fuser` gives the signatures.
impl Filesystem for Tree {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let mut module = lock(&self.0);
        let children = module.node(parent).map(|node| module.children(&node)).unwrap_or_default();
        match children.into_iter().find(|(child, _)| OsStr::new(child) == name) {
            Some((_, node)) => reply.entry(&TTL, &module.attributes(&node), Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let mut module = lock(&self.0);
        match module.node(ino) {
            Ok(node) => reply.attr(&TTL, &module.attributes(&node)),
            Err(errno) => reply.error(errno),
        }
    }

    // A shell's `>` truncates first; procfs takes that and does nothing.
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

    fn open(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match lock(&self.0).node(ino) {
            Ok(_) => reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO),
            Err(errno) => reply.error(errno),
        }
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let module = lock(&self.0);
        match module.node(ino).and_then(|node| module.read(&node)) {
            Ok(text) => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX).min(text.len());
                let end = start.saturating_add(size as usize).min(text.len());
                reply.data(&text.as_bytes()[start..end]);
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        _offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut module = lock(&self.0);
        let written = module.node(ino).and_then(|node| module.write(&node, data));
        match (written, u32::try_from(data.len())) {
            (Ok(()), Ok(size)) => reply.written(size),
            (Ok(()), Err(_)) => reply.error(Errno::EINVAL),
            (Err(errno), _) => reply.error(errno),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn readdir(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let mut module = lock(&self.0);
        let node = match module.node(ino) {
            Ok(node) => node,
            Err(errno) => return reply.error(errno),
        };
        let mut entries = vec![(".".to_owned(), node.clone()), ("..".to_owned(), Node::Root)];
        entries.extend(module.children(&node));
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        for (position, (name, node)) in entries.into_iter().enumerate().skip(start) {
            let attributes = module.attributes(&node);
            if reply.add(attributes.ino, position as u64 + 1, attributes.kind, name) {
                break;
            }
        }
        reply.ok();
    }
}
