//! The tree as FUSE asks for it: the kernel's questions, and the host's answers.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::sync::atomic::{AtomicBool, Ordering};
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

/// For how long the kernel may believe what it was told: not at all, so that reads are live.
const TTL: Duration = Duration::ZERO;

/// More than a file has, in bytes.
const BLOCK: u32 = 4096;

/// The tree.
#[derive(Debug)]
pub(crate) struct Tree {
    shown: Shown,
    inodes: Mutex<Inodes>,
    /// Whether the log has that somebody else than the host's root wrote.
    told: AtomicBool,
}

/// The numbers of nodes. A node that was told of once keeps its number: there are as many as
/// containers that were looked at.
#[derive(Debug)]
struct Inodes {
    numbers: HashMap<Node, u64>,
    nodes: Vec<Node>,
}

impl Tree {
    pub(crate) fn new(shown: Shown) -> Self {
        let numbers = HashMap::from([(Node::Root, INodeNo::ROOT.0)]);
        Tree {
            shown,
            inodes: Mutex::new(Inodes { numbers, nodes: vec![Node::Root] }),
            told: AtomicBool::new(false),
        }
    }

    fn inodes(&self) -> MutexGuard<'_, Inodes> {
        self.inodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn number(&self, node: &Node) -> INodeNo {
        let mut inodes = self.inodes();
        if let Some(number) = inodes.numbers.get(node) {
            return INodeNo(*number);
        }
        inodes.nodes.push(node.clone());
        let number = inodes.nodes.len() as u64;
        inodes.numbers.insert(node.clone(), number);
        INodeNo(number)
    }

    /// The node of that number, while it is there.
    fn node(&self, number: INodeNo) -> Result<Node, Errno> {
        let at = usize::try_from(number.0 - 1).map_err(|_| Errno::ENOENT)?;
        let node = self.inodes().nodes.get(at).cloned().ok_or(Errno::ENOENT)?;
        if self.shown.exists(&node) { Ok(node) } else { Err(Errno::ENOENT) }
    }

    fn children(&self, node: &Node) -> Vec<(String, Node)> {
        node.children(&self.shown.gpus(), |gpu| self.shown.containers(gpu))
    }

    fn attributes(&self, node: &Node) -> FileAttr {
        let mode = node.mode();
        let never = SystemTime::UNIX_EPOCH;
        FileAttr {
            ino: self.number(node),
            // As in sysfs: a read tells how much there is, and `sendfile` reads nothing of an empty
            // file.
            size: if mode.is_some() { u64::from(BLOCK) } else { 0 },
            blocks: 0,
            atime: never,
            mtime: never,
            ctime: never,
            crtime: never,
            kind: if mode.is_some() { FileType::RegularFile } else { FileType::Directory },
            perm: mode.unwrap_or(0o555),
            nlink: if mode.is_some() { 1 } else { 2 },
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: BLOCK,
            flags: 0,
        }
    }
}

impl Filesystem for Tree {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let children = self.node(parent).map(|node| self.children(&node)).unwrap_or_default();
        match children.into_iter().find(|(child, _)| OsStr::new(child) == name) {
            Some((_, node)) => reply.entry(&TTL, &self.attributes(&node), Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.node(ino) {
            Ok(node) => reply.attr(&TTL, &self.attributes(&node)),
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
        match self.node(ino) {
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
        match self.node(ino).and_then(|node| self.shown.read(&node)) {
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
            if !self.told.swap(true, Ordering::Relaxed) {
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
        let node = match self.node(ino) {
            Ok(node) => node,
            Err(errno) => return reply.error(errno),
        };
        let mut entries = vec![(".".to_owned(), node.clone()), ("..".to_owned(), Node::Root)];
        entries.extend(self.children(&node));
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        for (position, (name, node)) in entries.into_iter().enumerate().skip(start) {
            let attributes = self.attributes(&node);
            if reply.add(attributes.ino, position as u64 + 1, attributes.kind, name) {
                break;
            }
        }
        reply.ok();
    }
}
