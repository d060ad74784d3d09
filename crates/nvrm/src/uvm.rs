//! What a call to `/dev/nvidia-uvm` asks for.
//!
//! UVM takes all low 32 bits of the ioctl for its number and knows the size of each struct itself
//! (`uvm.c`, `uvm_ioctl`): nothing states it. So the driver's release alone says how many bytes are
//! to be copied, [`params_size`], and an unknown number is refused. Managed memory is made by mmap,
//! not here; what calls here do is map memory that the RM gave, and announce ranges that are no
//! managed memory.

use alloc::vec::Vec;

use super::call::Reader;
use super::layout::{Layout, Meaning, Patch, View};
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use super::number::*;
use super::refuse::{CallName, Refusal};
use super::release::{Key, Release};
use super::structs;

/// A call that is understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decoded {
    /// What it asks for.
    pub call: Call,
    /// Its struct, to write a status into; `None` of calls whose struct isn't read.
    pub layout: Option<&'static Layout>,
}

/// A range of addresses of the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// The first address.
    pub base: u64,
    /// Its bytes.
    pub length: u64,
}

/// A file of the RM's, and the client in it: how UVM finds RM objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// The caller's descriptor of `/dev/nvidiactl`.
    pub descriptor: i32,
    /// The client.
    pub client: u32,
    /// The object of that client.
    pub handle: u32,
}

/// What a call asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// `UVM_INITIALIZE`.
    Initialize {
        /// `UVM_INIT_FLAGS_*`.
        flags: u64,
    },
    /// `UVM_REGISTER_GPU`.
    RegisterGpu {
        /// The caller's descriptor of `/dev/nvidiactl`, by which a MIG partition is found; below 0 where there is none.
        descriptor: i32,
    },
    /// `UVM_UNREGISTER_GPU`: ends what the GPU maps.
    UnregisterGpu {
        /// The GPU.
        uuid: [u8; 16],
    },
    /// `UVM_UNREGISTER_GPU_VASPACE`: ends what the GPU maps.
    UnregisterVaSpace {
        /// The GPU.
        uuid: [u8; 16],
    },
    /// `UVM_MAP_EXTERNAL_ALLOCATION`: makes a kernel's duplicate of memory, for each GPU of
    /// [`mapping_gpus`].
    MapExternal {
        /// Where it is mapped.
        range: Range,
        /// The memory.
        memory: Source,
    },
    /// `UVM_ALLOC_DEVICE_P2P`: announces a range, and keeps memory alive.
    AllocDeviceP2p {
        /// The range.
        range: Range,
        /// The memory.
        memory: Source,
    },
    /// `UVM_ALLOC_SEMAPHORE_POOL`: announces a range of the driver's own memory.
    AllocSemaphorePool(Range),
    /// `UVM_UNMAP_EXTERNAL`.
    UnmapExternal {
        /// What is unmapped.
        range: Range,
        /// The GPU that it is unmapped from.
        uuid: [u8; 16],
    },
    /// `UVM_FREE`: frees a range with its maps.
    Free {
        /// Its first address.
        base: u64,
        /// Its bytes, where the driver asks for them.
        length: Option<u64>,
    },
    /// A call that takes, frees and keeps alive no memory by itself. Nothing of it is read.
    Other,
}

/// Calls whose struct isn't read: they act on ranges that exist.
///
/// Those that move managed memory do nothing where there is none, given that
/// `UVM_INITIALIZE` had [`UVM_INIT_FLAGS_DISABLE_HMM`]. The tools' calls (56 to 64, 67,
/// 76, 77), which read and write other processes, and the test calls are not among them.
const PLAIN: &[u32] = &[
    UVM_DEINITIALIZE,
    UVM_CREATE_RANGE_GROUP,
    UVM_DESTROY_RANGE_GROUP,
    UVM_UNREGISTER_CHANNEL,
    UVM_ENABLE_PEER_ACCESS,
    UVM_DISABLE_PEER_ACCESS,
    UVM_SET_RANGE_GROUP,
    UVM_PAGEABLE_MEM_ACCESS,
    UVM_PREVENT_MIGRATION_RANGE_GROUPS,
    UVM_ALLOW_MIGRATION_RANGE_GROUPS,
    UVM_SET_PREFERRED_LOCATION,
    UVM_UNSET_PREFERRED_LOCATION,
    UVM_ENABLE_READ_DUPLICATION,
    UVM_SET_ACCESSED_BY,
    UVM_UNSET_ACCESSED_BY,
    UVM_MIGRATE,
    UVM_MIGRATE_RANGE_GROUP,
    UVM_PAGEABLE_MEM_ACCESS_ON_GPU,
    UVM_POPULATE_PAGEABLE,
    UVM_MAP_EXTERNAL_SPARSE,
    UVM_DISCARD,
];

/// Bytes of the struct of a call; 0 where it isn't read.
///
/// # Errors
///
/// Where the call isn't known.
pub fn params_size(release: &Release, number: u32) -> Result<usize, Refusal> {
    let key = Key::Uvm(number);
    match release.layouts(key).first() {
        Some(layout) => Ok(layout.size()),
        None if PLAIN.contains(&number) => Ok(0),
        None => {
            Err(Refusal::UnknownCall { driver: release.version(), call: CallName(key), size: 0 })
        }
    }
}

/// What the copy `bytes`, of [`params_size`], asks of a driver of `release`.
///
/// # Errors
///
/// Where the call isn't known, or `bytes` are not as many as its struct has.
pub fn decode(release: &Release, number: u32, bytes: &[u8]) -> Result<Decoded, Refusal> {
    let key = Key::Uvm(number);
    let reader = Reader { release, call: CallName(key) };
    let size = params_size(release, number)?;
    if bytes.len() != size {
        return Err(Refusal::Copied {
            driver: release.version(),
            call: reader.call,
            stated: size,
            copied: bytes.len(),
        });
    }
    if release.layouts(key).is_empty() {
        return Ok(Decoded { call: Call::Other, layout: None });
    }
    let view = reader.view(key, bytes)?;
    let call = match number {
        UVM_INITIALIZE => Call::Initialize { flags: reader.long(view, Meaning::Flags)? },
        UVM_REGISTER_GPU => Call::RegisterGpu { descriptor: reader.descriptor(view)? },
        UVM_UNREGISTER_GPU => Call::UnregisterGpu { uuid: reader.uuid(view)? },
        UVM_UNREGISTER_GPU_VASPACE => Call::UnregisterVaSpace { uuid: reader.uuid(view)? },
        UVM_MAP_EXTERNAL_ALLOCATION => {
            Call::MapExternal { range: reader.range(view)?, memory: reader.source(view)? }
        }
        UVM_ALLOC_DEVICE_P2P => {
            Call::AllocDeviceP2p { range: reader.range(view)?, memory: reader.source(view)? }
        }
        UVM_ALLOC_SEMAPHORE_POOL => Call::AllocSemaphorePool(reader.range(view)?),
        UVM_UNMAP_EXTERNAL => {
            Call::UnmapExternal { range: reader.range(view)?, uuid: reader.uuid(view)? }
        }
        UVM_FREE => Call::Free {
            base: reader.long(view, Meaning::Base)?,
            length: view.u64(Meaning::Length),
        },
        _ => Call::Other,
    };
    Ok(Decoded { call, layout: Some(view.layout()) })
}

/// What to write into the struct of an `UVM_INITIALIZE` so that memory of the host can't
/// migrate to the GPU by itself.
#[must_use]
pub fn without_hmm(layout: &Layout, flags: u64) -> Option<Patch> {
    layout.patch(Meaning::Flags, flags | u64::from(UVM_INIT_FLAGS_DISABLE_HMM))
}

/// The GPUs that an `UVM_MAP_EXTERNAL_ALLOCATION` is for, as often as they are named; `None` of a
/// struct that names none, or more than its array can hold, as the driver refuses it.
#[must_use]
pub fn mapping_gpus(layout: &'static Layout, bytes: &[u8]) -> Option<Vec<[u8; 16]>> {
    let view = layout.view(bytes)?;
    let (list, count) = (view.bytes(Meaning::List)?, view.u64(Meaning::Count)?);
    let entries = list.chunks_exact(structs::MAPPING_ATTRIBUTES_BYTES);
    let count = usize::try_from(count).ok().filter(|count| (1..=entries.len()).contains(count))?;
    entries.take(count).map(|entry| entry.first_chunk().copied()).collect()
}

/// Puts the GPU of that UUID into a struct. `false` where that has no place for it.
#[must_use]
pub fn set_uuid(layout: &Layout, bytes: &mut [u8], uuid: [u8; 16]) -> bool {
    let field = layout.field(Meaning::Uuid).filter(|field| field.width == uuid.len());
    let place = field.and_then(|field| bytes.get_mut(field.offset..field.offset + uuid.len()));
    place.map(|place| place.copy_from_slice(&uuid)).is_some()
}

impl Reader<'_> {
    fn range(self, view: View<'_>) -> Result<Range, Refusal> {
        Ok(Range {
            base: self.long(view, Meaning::Base)?,
            length: self.long(view, Meaning::Length)?,
        })
    }

    fn source(self, view: View<'_>) -> Result<Source, Refusal> {
        Ok(Source {
            descriptor: self.descriptor(view)?,
            client: self.word(view, Meaning::Client)?,
            handle: self.word(view, Meaning::Handle)?,
        })
    }

    fn uuid(self, view: View<'_>) -> Result<[u8; 16], Refusal> {
        let bytes = view.bytes(Meaning::Uuid).and_then(|bytes| bytes.try_into().ok());
        bytes.ok_or_else(|| self.table(Meaning::Uuid))
    }
}
