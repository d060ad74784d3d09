//! The tree as FUSE asks for it: the kernel's questions, and the host's answers.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry,
    ReplyOpen, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use tracing::warn;

use crate::host::{Caller, Shown};
use crate::node::Node;
use crate::numbers::NodeNumbers;

/// For how long the kernel may believe that what is there for good is there.
const LONG: Duration = Duration::from_secs(1);

/// The number in a list of what wasn't reported to the kernel (`FUSE_UNKNOWN_INO` of `fs/fuse/fuse_i.h`).
const UNKNOWN: u64 = 0xffff_ffff;

/// More than a file has, in bytes.
const BLOCK: u32 = 4096;

#[derive(Debug)]
pub(crate) struct Tree {
    shown: Shown,
    numbers: Mutex<NodeNumbers>,
    /// What open files say, by their handles: as it was when its beginning was read.
    texts: Mutex<HashMap<u64, String>>,
    handles: AtomicU64,
    /// Whether the log has that a user other than the host's root wrote.
    reported: AtomicBool,
}

impl Tree {
    pub(crate) fn new(shown: Shown) -> Self {
        Tree {
            shown,
            numbers: Mutex::default(),
            texts: Mutex::default(),
            handles: AtomicU64::new(0),
            reported: AtomicBool::new(false),
        }
    }

    fn numbers(&self) -> MutexGuard<'_, NodeNumbers> {
        self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn texts(&self) -> MutexGuard<'_, HashMap<u64, String>> {
        self.texts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The node of that number, which may be gone.
    fn known(&self, number: INodeNo) -> Result<Node, Errno> {
        self.numbers().node(number.0).cloned().ok_or(Errno::ENOENT)
    }

    /// The node of that number, while it is there.
    fn node(&self, number: INodeNo) -> Result<Node, Errno> {
        let node = self.known(number)?;
        if self.shown.exists(&node) { Ok(node) } else { Err(Errno::ENOENT) }
    }

    fn children(&self, node: &Node) -> Vec<(String, Node)> {
        node.children(&self.shown.gpus(), |gpu| self.shown.containers(gpu))
    }
}

fn attributes(number: u64, node: &Node) -> FileAttr {
    let mode = node.mode();
    let never = SystemTime::UNIX_EPOCH;
    FileAttr {
        ino: INodeNo(number),
        // As in sysfs: a read reports how much there is, and `sendfile` reads nothing of an empty
        // file.
        size: if mode.is_some() { u64::from(BLOCK) } else { 0 },
        blocks: 0,
        atime: never,
        mtime: never,
        ctime: never,
        crtime: never,
        kind: kind(node),
        perm: mode.unwrap_or(0o555),
        nlink: if mode.is_some() { 1 } else { 2 },
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: BLOCK,
        flags: 0,
    }
}

/// For how long the kernel may believe that the node is there. A container's directory is asked for
/// each time, and so what is in it goes with it; the root is, so that a process that checks whether
/// the tree is served gets an answer.
fn ttl(node: &Node) -> Duration {
    if matches!(node, Node::Root | Node::Container(..)) { Duration::ZERO } else { LONG }
}

fn kind(node: &Node) -> FileType {
    if node.mode().is_some() { FileType::RegularFile } else { FileType::Directory }
}

impl Filesystem for Tree {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let child = self.known(parent).ok().and_then(|parent| parent.child(name.to_str()?));
        // The kernel has just asked for the container that a file is of.
        let is_there =
            |child: &Node| matches!(child, Node::ContainerFile(..)) || self.shown.exists(child);
        match child.filter(is_there) {
            Some(node) => {
                let number = self.numbers().count(&node);
                reply.entry(&ttl(&node), &attributes(number, &node), Generation(0));
            }
            None => reply.error(Errno::ENOENT),
        }
    }

    fn forget(&self, _: &Request, ino: INodeNo, times: u64) {
        self.numbers().forget(ino.0, times);
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.node(ino) {
            Ok(node) => reply.attr(&ttl(&node), &attributes(ino.0, &node)),
            Err(errno) => reply.error(errno),
        }
    }

    // A shell's `>` truncates first; that changes nothing. Modes and owners stay what they are.
    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
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
        if mode.is_some() || uid.is_some() || gid.is_some() {
            return reply.error(Errno::EPERM);
        }
        self.getattr(request, ino, fh, reply);
    }

    fn open(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        // What it says is found when it's read, and whether it is there still.
        match self.known(ino) {
            Ok(_) => {
                let handle = self.handles.fetch_add(1, Ordering::Relaxed);
                reply.opened(FileHandle(handle), FopenFlags::FOPEN_DIRECT_IO);
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let begun = self.texts().get(&handle.0).filter(|_| offset > 0).cloned();
        let text = match begun {
            Some(text) => Ok(text),
            None => self.known(ino).and_then(|node| self.shown.read(&node)),
        };
        match text {
            Ok(text) => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX).min(text.len());
                let end = start.saturating_add(size as usize).min(text.len());
                reply.data(&text.as_bytes()[start..end]);
                self.texts().insert(handle.0, text);
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.texts().remove(&handle.0);
        reply.ok();
    }

    fn write(
        &self,
        request: &Request,
        ino: INodeNo,
        _: FileHandle,
        _offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let caller = Caller { pid: request.pid(), uid: request.uid() };
        if !caller.is_hosts_root() {
            // Once: a container can try as often as it likes.
            if !self.reported.swap(true, Ordering::Relaxed) {
                warn!(
                    pid = caller.pid,
                    "writes to the tree are refused to all but the host's root"
                );
            }
            return reply.error(Errno::EPERM);
        }
        let written = self.node(ino).and_then(|node| self.shown.write(&node, data));
        match (written, u32::try_from(data.len())) {
            (Ok(()), Ok(size)) => reply.written(size),
            (Ok(()), Err(_)) => reply.error(Errno::EINVAL),
            (Err(errno), _) => reply.error(errno),
        }
    }

    // The kernel asks once, and never again.
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn readdir(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let node = match self.node(ino) {
            Ok(node) => node,
            Err(errno) => return reply.error(errno),
        };
        let mut entries = vec![(".".to_owned(), node.clone()), ("..".to_owned(), Node::Root)];
        entries.extend(self.children(&node));
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        for (position, (name, node)) in entries.into_iter().enumerate().skip(start) {
            // Of what it lists the kernel wants some number; it looks up what it then asks for.
            let number = self.numbers().number(&node).unwrap_or(UNKNOWN);
            if reply.add(INodeNo(number), position as u64 + 1, kind(&node), name) {
                break;
            }
        }
        reply.ok();
    }
}
