//! What the driver holds: clients, objects, memory, files of UVM, and what is asked of it.
//!
//! Data alone; who may do what with it is in `driver.rs`.

use std::collections::{BTreeMap, BTreeSet};

use crate::abi::*;
use crate::caller::{Caller, Numbers};
use crate::schedule::Turn;

/// `NV_ERR_*`.
pub(crate) type Status = u32;

/// An open file of ours: FUSE's file handle, which duplicates of a descriptor share.
pub(crate) type File = u64;

/// Who makes a call.
#[derive(Debug)]
pub(crate) struct Asker<'a> {
    /// The thread.
    pub(crate) caller: Caller,
    /// `secInfo.clientOSInfo`: the file it is made through, or the one that is registered
    /// for it.
    pub(crate) file: File,
    /// Device number of our files, and the inode of each GPU's.
    pub(crate) nodes: &'a Nodes,
}

/// Where our files are.
#[derive(Debug, Clone, Default)]
pub(crate) struct Nodes {
    /// `st_dev`.
    pub(crate) device: u64,
    /// `st_ino` of `nvidiaN`, by N.
    pub(crate) gpus: Vec<u64>,
}

#[derive(Debug)]
pub(crate) struct Client {
    /// `pOSInfo`: who may use it.
    pub(crate) file: File,
    /// `ProcID`.
    pub(crate) process: u32,
    /// `pUserInfo`: its effective user.
    pub(crate) user: u32,
    /// The process as its pid namespaces number it.
    pub(crate) numbers: Numbers,
    /// The cgroup of the process; see [`Caller::cgroup`].
    pub(crate) cgroup: String,
    /// By handle.
    pub(crate) objects: BTreeMap<u32, Object>,
    /// Memory that was freed and isn't, by a fault.
    pub(crate) lost: Vec<u64>,
    pub(crate) made: u32,
}

impl Client {
    /// Whether that object is a subdevice.
    pub(crate) fn is_subdevice(&self, handle: u32) -> bool {
        self.objects.get(&handle).is_some_and(|object| object.class == NV20_SUBDEVICE_0)
    }

    /// The subdevice of a device.
    pub(crate) fn subdevice(&self, device: u32) -> Option<u32> {
        let mut all = self.objects.iter();
        let found = all.find(|(_, of)| of.class == NV20_SUBDEVICE_0 && of.parent == device);
        found.map(|(handle, _)| *handle)
    }
}

/// An object of a client.
#[derive(Debug, Clone)]
pub(crate) struct Object {
    /// Handle of its parent: the client's, or another object's.
    pub(crate) parent: u32,
    /// Its class.
    pub(crate) class: u32,
    /// The GPU that it or its ancestor opened. Its memory may be another's.
    pub(crate) gpu: Option<usize>,
    /// The memory it refers to.
    pub(crate) memory: Option<u64>,
    /// Whether `NV_ESC_RM_SHARE` lets any client duplicate it.
    pub(crate) shared: bool,
    /// What the scheduler knows of a channel group or a channel.
    pub(crate) turn: Turn,
    /// The GPU whose context switches an event buffer shows.
    pub(crate) switches_of: Option<usize>,
}

/// What has memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holder {
    /// An object of a client.
    Object(u32, u32),
    /// An object of the kernel's own, for an export or a mapping.
    Kernel,
}

/// Video memory.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) gpu: usize,
    pub(crate) bytes: u64,
    /// All that have it, a duplicate behind what it's of (`dupListItem`, mem.c). The first owns
    /// it: when that is gone, the next (`isMemDescOwner`).
    pub(crate) holders: Vec<Holder>,
}

/// A file of `nvidia-uvm`.
#[derive(Debug, Default)]
pub(crate) struct Uvm {
    /// `UVM_INITIALIZE`'s flags; `None` before.
    pub(crate) flags: Option<u64>,
    /// The process it is bound to.
    pub(crate) process: u32,
    /// Made by `UVM_MM_INITIALIZE`.
    pub(crate) is_mm: bool,
    /// Whether there is such a file for this one.
    pub(crate) has_mm: bool,
    pub(crate) gpus: BTreeSet<[u8; 16]>,
    /// Whether its last GPU was unregistered: what is touched now is the host's memory.
    pub(crate) has_lost: bool,
    pub(crate) vaspaces: BTreeSet<[u8; 16]>,
    /// Bytes and kind by base: external ranges, semaphore pools, P2P.
    pub(crate) ranges: BTreeMap<u64, (u64, Range)>,
    /// Memory mapped into external ranges, by GPU.
    pub(crate) trees: BTreeMap<[u8; 16], Tree>,
    /// Memory that P2P ranges keep, by base.
    pub(crate) p2p: BTreeMap<u64, u64>,
    /// Offsets of pages that were touched outside all ranges, and by which process.
    pub(crate) managed: BTreeMap<u64, u32>,
}

impl Uvm {
    /// The memory of each mapping, as often as it is referred to.
    pub(crate) fn memories(&self) -> impl Iterator<Item = u64> {
        let mapped = self.trees.values().flat_map(|tree| tree.0.values());
        mapped.map(|(_, memory)| *memory).chain(self.p2p.values().copied())
    }
}

/// What one GPU maps (`uvm_ext_gpu_range_tree_t`): by base, bytes and memory. Each refers to
/// all of its memory, also if it is what is left of a larger one.
#[derive(Debug, Default)]
pub(crate) struct Tree(pub(crate) BTreeMap<u64, (u64, u64)>);

/// References to memory that a change of a tree makes, and those that it ends.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(crate) made: Vec<u64>,
    pub(crate) ended: Vec<u64>,
}

impl Tree {
    /// `uvm_unmap_external_in_range`: what reaches beyond is split, and its ends stay.
    pub(crate) fn unmap(&mut self, base: u64, bytes: u64) -> Changes {
        let mut changes = Changes::default();
        let end = base.saturating_add(bytes);
        let touched = self.0.range(..end).rev();
        let touched = touched.take_while(|(at, (bytes, _))| *at + bytes > base);
        for (at, (bytes, memory)) in touched.map(|(at, of)| (*at, *of)).collect::<Vec<_>>() {
            self.0.remove(&at);
            changes.ended.push(memory);
            for (from, to) in [(at, base), (end, at + bytes)] {
                if from < to {
                    self.0.insert(from, (to - from, memory));
                    changes.made.push(memory);
                }
            }
        }
        changes
    }
}

/// What a range of UVM is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Range {
    External,
    SemaphorePool,
    DeviceP2p,
}

/// What an allocation asks for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Allocation {
    pub(crate) client: u32,
    pub(crate) parent: u32,
    /// 0: the driver chooses.
    pub(crate) handle: u32,
    pub(crate) class: u32,
}

/// What it needs beyond.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Wanted {
    /// The device or subdevice.
    pub(crate) instance: u32,
    /// Bytes of memory, and of its pages.
    pub(crate) bytes: u64,
    pub(crate) page_bytes: u64,
    /// The memory that is kept alive.
    pub(crate) source: u32,
}

/// What was made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Made {
    pub(crate) handle: u32,
    /// Bytes taken.
    pub(crate) bytes: u64,
    /// Where they begin, so to say.
    pub(crate) offset: u64,
}

/// A process's number in a pid namespace, if that shows it: `pid_vnr`.
pub(crate) fn number_in(numbers: &Numbers, namespace: u64) -> Option<u32> {
    numbers.iter().find(|(inode, _)| *inode == namespace).map(|(_, number)| *number)
}

/// Classes that are memory of some kind and lie under a device.
pub(crate) fn is_memory(class: u32) -> bool {
    matches!(
        class,
        NV01_MEMORY_SYSTEM
            | NV01_MEMORY_LOCAL_PRIVILEGED
            | NV01_MEMORY_LOCAL_USER
            | NV_MEMORY_EXTENDED_USER
            | NV01_MEMORY_VIRTUAL
            | NV01_MEMORY_SYSTEM_OS_DESCRIPTOR
            | NV01_MEMORY_LIST_SYSTEM
            | NV01_MEMORY_LIST_FBMEM
            | NV01_MEMORY_LIST_OBJECT
            | NV01_MEMORY_LOCAL_PHYSICAL
            | NV_MEMORY_FABRIC
            | NV50_MEMORY_VIRTUAL
    )
}

/// Whether a duplicate of what is of a GPU may hang below what is of another, or of none: memory
/// may below any device (`memCopyConstruct_IMPL`, mem.c; `vidmemCheckCopyPermissions_IMPL` refuses
/// it of MIG alone).
pub(crate) fn may_hang_below(class: u32, of: Option<usize>, below: Option<usize>) -> bool {
    of.is_none() || of == below || is_memory(class) && below.is_some()
}

/// Whether a class up to 0xff exists.
pub(crate) fn is_known_low(class: u32) -> bool {
    is_memory(class)
        || OTHER_LOW_CLASSES.contains(&class)
        || matches!(
            class,
            NV01_DEVICE_0
                | NV_SEMAPHORE_SURFACE
                | NV01_EVENT
                | NV01_EVENT_OS_EVENT
                | NV01_EVENT_KERNEL_CALLBACK
                | NV01_EVENT_KERNEL_CALLBACK_EX
        )
}
