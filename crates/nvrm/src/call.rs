//! What a call to `/dev/nvidiactl` or `/dev/nvidiaN` asks for.
//!
//! [`Command`] is the ioctl's number, [`decode`] the copy of its struct. The driver dispatches by number (bits 0 to 7)
//! and size (bits 16 to 29) of the low 32 bits, and so do we: type byte, direction and upper half are never read
//! (`nv.c`, `nvidia_ioctl`). Every call is known with its exact size or refused; nothing is guessed. Whether what is
//! asked for is granted is not known here.

use super::class::{Use, class_use};
use super::layout::{Layout, Meaning, View};
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use super::number::*;
use super::refuse::{CallName, Refusal};
use super::release::{Key, Release};

/// Most bytes of a wrapped call: `NV_ABSOLUTE_MAX_IOCTL_SIZE` of `nv.h`.
pub const MAX_WRAPPED_BYTES: usize = 16384;

/// The bit of `NVOS32_PARAMETERS`' attr2 that asks for `NV_MEMORY_EXTENDED_USER`:
/// `NVOS32_ATTR2_USE_EGM`, 24:24, from 550.40.07 to 590; unused in other releases.
const NVOS32_ATTR2_USE_EGM: u32 = 1 << 24;

/// Where memory lies: `NVOS32_ATTR_LOCATION`, 26:25 of attr.
const NVOS32_ATTR_LOCATION_SHIFT: u32 = 25;
const NVOS32_ATTR_LOCATION_MASK: u32 = 0x3;

/// Number and size of a call, as far as the driver reads them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Command {
    number: u32,
    size: usize,
}

/// A call that is understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decoded {
    /// What it asks for.
    pub call: Call,
    /// Its struct, to write a status into; `None` of calls whose struct isn't read.
    pub layout: Option<&'static Layout>,
}

/// What a call asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// `NV_ESC_RM_ALLOC`: make an object of a class, by parameters elsewhere.
    Alloc(Alloc),
    /// `NV_ESC_RM_ALLOC_MEMORY`: make a memory object.
    ///
    /// Of class `NV01_MEMORY_LOCAL_USER` it takes no video memory: it is a privileged
    /// view of all of it or, for others, a dummy; but its limit comes back as the GPU's
    /// total less one (`rmapi_deprecated_allocmemory.c`, `_rmAllocMemoryLocalUser`).
    AllocMemory {
        /// The object to be.
        object: Object,
        /// Its class.
        class: u32,
    },
    /// `NV_ESC_RM_ALLOC_OBJECT`: make an object of a class without parameters.
    AllocObject {
        /// Its class.
        class: u32,
    },
    /// `NV_ESC_RM_VID_HEAP_CONTROL`: one of its functions.
    VidHeap {
        /// The client.
        client: u32,
        /// The device.
        parent: u32,
        /// The function.
        function: VidHeap,
    },
    /// `NV_ESC_RM_FREE`: free an object with all below it.
    Free(Object),
    /// `NV_ESC_RM_DUP_OBJECT`: make another handle of an object, maybe another client's.
    Dup {
        /// The handle to be.
        object: Object,
        /// Client of the object there is.
        source_client: u32,
        /// The object there is.
        source: u32,
    },
    /// `NV_ESC_RM_CONTROL`: a command to an object, by parameters elsewhere.
    Control {
        /// The client.
        client: u32,
        /// The object.
        object: u32,
        /// The command.
        command: u32,
        /// Address of the parameters.
        params: u64,
        /// Their size; where the driver knows the command it insists on its own.
        params_size: u32,
        /// `NVOS54_FLAGS_*`.
        flags: u32,
    },
    /// `NV_ESC_EXPORT_TO_DMABUF_FD`: make a file that keeps memory alive.
    ExportDmabuf,
    /// `NV_ESC_IOCTL_XFER_CMD`: another call, whose struct is elsewhere.
    Wrapped {
        /// The call; to be decoded by [`decode`] with its own copy.
        command: Command,
        /// Address of its struct.
        address: u64,
    },
    /// A call whose struct has a layout, and that takes, frees and shows no memory by itself, such as
    /// `NV_ESC_REGISTER_FD` and `NV_ESC_RM_MAP_MEMORY`. No filter traps it, so only the wrapper brings it here.
    Untrapped,
    /// A call that takes, frees and shows no memory, and whose struct isn't read.
    Other,
}

/// An object: made, freed or duplicated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Object {
    /// Its client.
    pub client: u32,
    /// The object above.
    pub parent: u32,
    /// Itself; 0 of one to be made lets the driver choose.
    pub handle: u32,
}

/// An allocation by class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alloc {
    /// The object to be.
    pub object: Object,
    /// Its class; clients are made as `NV01_ROOT_CLIENT` whatever was asked
    /// (`escape.c`, `RmIoctl`).
    pub class: u32,
    /// What making an object of the class does.
    pub does: Use,
    /// Address of its parameters, or 0.
    pub params: u64,
    /// What the caller says their size is. The driver copies as many as the class has and doesn't check
    /// (`param_copy.c`, `rmapiParamsCopyInit`); 0 is common.
    pub params_size: Option<u32>,
    /// Address of the rights that are asked for, an `RS_ACCESS_MASK` of four bytes, or 0;
    /// the process that makes the call for the caller has to put a copy or 0 in its place.
    pub rights: u64,
}

/// A function of `NV_ESC_RM_VID_HEAP_CONTROL`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VidHeap {
    /// `ALLOC_SIZE`, `ALLOC_SIZE_RANGE`, `ALLOC_TILED_PITCH_HEIGHT`.
    Alloc {
        /// Handle of the memory to be; 0 lets the driver choose.
        handle: u32,
        /// The class it will be of.
        class: u32,
        /// What making an object of the class does.
        does: Use,
        /// Bytes asked for.
        size_bytes: u64,
        /// The function's own layout: where the driver writes handle and limit.
        layout: &'static Layout,
    },
    /// `ALLOC_OS_DESCRIPTOR`: the caller's own memory.
    OsDescriptor,
    /// `HW_ALLOC`: compression resources, class `NV01_MEMORY_HW_RESOURCES`.
    HwAlloc,
    /// `FREE` and `HW_FREE`.
    Free {
        /// Handle of what is freed.
        handle: u32,
    },
    /// `INFO`: total and free memory, in bytes.
    Info {
        /// The function's own layout: where the driver writes them.
        layout: &'static Layout,
    },
    /// A function that neither takes, frees nor shows memory.
    Other,
}

impl Command {
    /// The command of an ioctl, from its request.
    #[must_use]
    pub fn of_ioctl(request: u32) -> Self {
        let [number, _type, size_low, size_high] = request.to_le_bytes();
        let size = u16::from_le_bytes([size_low, size_high]) & 0x3fff;
        Self { number: u32::from(number), size: usize::from(size) }
    }

    /// Its number.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Bytes of its struct: so many are to be copied for [`decode`].
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }
}

/// Calls whose struct isn't read, since they take, free and show no memory: number, and
/// the sizes at which they are let pass.
///
/// `CARD_INFO` and `ATTACH_GPUS_TO_FD` take lists of any length. `CARD_INFO` shows each
/// GPU's BAR, not its memory.
const PLAIN: &[(u32, &[usize])] = &[
    (NV_ESC_CARD_INFO, &[]),
    (NV_ESC_STATUS_CODE, &[12]),
    (NV_ESC_CHECK_VERSION_STR, &[72]),
    (NV_ESC_ATTACH_GPUS_TO_FD, &[]),
    (NV_ESC_SYS_PARAMS, &[8]),
    (NV_ESC_NUMA_INFO, &[552, 560]),
    (NV_ESC_WAIT_OPEN_COMPLETE, &[8]),
];

/// What the copy `bytes` of the struct of `command` asks of a driver of `release`.
///
/// # Errors
///
/// Where it isn't known to the byte: see [`Refusal`].
pub fn decode(release: &Release, command: Command, bytes: &[u8]) -> Result<Decoded, Refusal> {
    let reader = Reader { release, call: CallName(Key::Escape(command.number)) };
    if bytes.len() != command.size {
        return Err(Refusal::Copied {
            driver: release.version(),
            call: reader.call,
            stated: command.size,
            copied: bytes.len(),
        });
    }
    if release.layouts(reader.call.0).is_empty() {
        return reader.plain(command);
    }
    let view = reader.view(reader.call.0, bytes)?;
    let call = match command.number {
        NV_ESC_RM_ALLOC => reader.alloc(view)?,
        NV_ESC_RM_ALLOC_MEMORY => Call::AllocMemory {
            object: reader.object(view)?,
            class: reader.word(view, Meaning::Class)?,
        },
        NV_ESC_RM_ALLOC_OBJECT => Call::AllocObject { class: reader.word(view, Meaning::Class)? },
        NV_ESC_RM_VID_HEAP_CONTROL => reader.vid_heap(view, bytes)?,
        NV_ESC_RM_FREE => Call::Free(reader.object(view)?),
        NV_ESC_RM_DUP_OBJECT => Call::Dup {
            object: reader.object(view)?,
            source_client: reader.word(view, Meaning::SourceClient)?,
            source: reader.word(view, Meaning::SourceHandle)?,
        },
        NV_ESC_RM_CONTROL => reader.control(view)?,
        NV_ESC_EXPORT_TO_DMABUF_FD => Call::ExportDmabuf,
        NV_ESC_IOCTL_XFER_CMD => reader.wrapped(view)?,
        _ => Call::Untrapped,
    };
    Ok(Decoded { call, layout: Some(view.layout()) })
}

/// Reads fields, and knows of what, for refusals.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a> {
    pub(super) release: &'a Release,
    pub(super) call: CallName,
}

impl Reader<'_> {
    /// `bytes` as the struct of `key` of their size.
    pub(super) fn view(self, key: Key, bytes: &[u8]) -> Result<View<'_>, Refusal> {
        let layout = self.release.layout(key, bytes.len());
        layout.and_then(|layout| layout.view(bytes)).ok_or_else(|| Refusal::UnknownSize {
            driver: self.release.version(),
            call: CallName(key),
            stated: bytes.len(),
            known: self.release.layouts(key).iter().map(Layout::size).collect(),
        })
    }

    /// A field that the table has wherever this is called.
    pub(super) fn long(self, view: View<'_>, meaning: Meaning) -> Result<u64, Refusal> {
        view.u64(meaning).ok_or_else(|| self.table(meaning))
    }

    /// The same, of four bytes.
    pub(super) fn word(self, view: View<'_>, meaning: Meaning) -> Result<u32, Refusal> {
        view.u32(meaning).ok_or_else(|| self.table(meaning))
    }

    /// A file descriptor of the caller.
    pub(super) fn descriptor(self, view: View<'_>) -> Result<i32, Refusal> {
        self.word(view, Meaning::Descriptor).map(u32::cast_signed)
    }

    pub(super) fn table(self, meaning: Meaning) -> Refusal {
        Refusal::Table { driver: self.release.version(), call: self.call, meaning }
    }

    fn object(self, view: View<'_>) -> Result<Object, Refusal> {
        Ok(Object {
            client: self.word(view, Meaning::Client)?,
            parent: self.word(view, Meaning::Parent)?,
            handle: self.word(view, Meaning::Handle)?,
        })
    }

    /// A call without a layout: of those let pass, or refused.
    fn plain(self, command: Command) -> Result<Decoded, Refusal> {
        let driver = self.release.version();
        let Some((_, sizes)) = PLAIN.iter().find(|(number, _)| *number == command.number) else {
            return Err(Refusal::UnknownCall { driver, call: self.call, size: command.size });
        };
        if !sizes.is_empty() && !sizes.contains(&command.size) {
            return Err(Refusal::UnknownSize {
                driver,
                call: self.call,
                stated: command.size,
                known: sizes.to_vec(),
            });
        }
        Ok(Decoded { call: Call::Other, layout: None })
    }

    fn alloc(self, view: View<'_>) -> Result<Call, Refusal> {
        // entry_points.c, _nv04AllocWithAccessSecInfo(): with this flag the parameters
        // are a FINN message, in which sizes lie elsewhere.
        self.refuse_serialized(view, NVOS64_FLAGS_FINN_SERIALIZED)?;
        let class = self.word(view, Meaning::Class)?;
        Ok(Call::Alloc(Alloc {
            object: self.object(view)?,
            class,
            does: class_use(class).does,
            params: self.long(view, Meaning::Params)?,
            params_size: view.u32(Meaning::ParamsSize),
            rights: view.u64(Meaning::Rights).unwrap_or(0),
        }))
    }

    fn control(self, view: View<'_>) -> Result<Call, Refusal> {
        self.refuse_serialized(view, NVOS54_FLAGS_FINN_SERIALIZED)?;
        Ok(Call::Control {
            client: self.word(view, Meaning::Client)?,
            object: self.word(view, Meaning::Handle)?,
            command: self.word(view, Meaning::Command)?,
            params: self.long(view, Meaning::Params)?,
            params_size: self.word(view, Meaning::ParamsSize)?,
            flags: self.word(view, Meaning::Flags)?,
        })
    }

    fn refuse_serialized(self, view: View<'_>, flag: u32) -> Result<(), Refusal> {
        if view.u32(Meaning::Flags).unwrap_or(0) & flag == 0 {
            return Ok(());
        }
        Err(Refusal::Serialized { driver: self.release.version(), call: self.call })
    }

    fn wrapped(self, view: View<'_>) -> Result<Call, Refusal> {
        // The driver takes all bits of the wrapped number (nv.c: `arg_cmd = ioc_xfer.cmd`), so one beyond a byte is no
        // call.
        let number = self.word(view, Meaning::Command)?;
        let stated = self.word(view, Meaning::CommandSize)?;
        let size = usize::try_from(stated).unwrap_or(usize::MAX);
        let inner = CallName(Key::Escape(number));
        let driver = self.release.version();
        if number == NV_ESC_IOCTL_XFER_CMD {
            return Err(Refusal::Nested { driver, call: self.call });
        }
        if size > MAX_WRAPPED_BYTES {
            return Err(Refusal::UnknownCall { driver, call: inner, size });
        }
        let command = Command { number, size };
        Ok(Call::Wrapped { command, address: self.long(view, Meaning::Params)? })
    }

    fn vid_heap(self, head: View<'_>, bytes: &[u8]) -> Result<Call, Refusal> {
        let function = self.word(head, Meaning::Function)?;
        let key = Key::VidHeap(function);
        if self.release.layouts(key).is_empty() {
            return Err(Refusal::UnknownCall {
                driver: self.release.version(),
                call: CallName(key),
                size: bytes.len(),
            });
        }
        let view = self.view(key, bytes)?;
        let function = match function {
            NVOS32_FUNCTION_ALLOC_SIZE
            | NVOS32_FUNCTION_ALLOC_SIZE_RANGE
            | NVOS32_FUNCTION_ALLOC_TILED_PITCH_HEIGHT => self.vid_heap_alloc(view)?,
            NVOS32_FUNCTION_ALLOC_OS_DESCRIPTOR => VidHeap::OsDescriptor,
            NVOS32_FUNCTION_HW_ALLOC => VidHeap::HwAlloc,
            NVOS32_FUNCTION_FREE | NVOS32_FUNCTION_HW_FREE => {
                VidHeap::Free { handle: self.word(view, Meaning::Handle)? }
            }
            NVOS32_FUNCTION_INFO => VidHeap::Info { layout: view.layout() },
            _ => VidHeap::Other,
        };
        Ok(Call::VidHeap {
            client: self.word(head, Meaning::Client)?,
            parent: self.word(head, Meaning::Parent)?,
            function,
        })
    }

    /// As `rmapi_deprecated_vidheapctrl.c`, `_rmVidHeapControlAllocCommon` has it.
    fn vid_heap_alloc(self, view: View<'_>) -> Result<VidHeap, Refusal> {
        let flags = self.word(view, Meaning::Flags)?;
        let attributes = self.word(view, Meaning::Attributes)?;
        let location = (attributes >> NVOS32_ATTR_LOCATION_SHIFT) & NVOS32_ATTR_LOCATION_MASK;
        let class = if flags & NVOS32_ALLOC_FLAGS_VIRTUAL != 0 {
            NV50_MEMORY_VIRTUAL
        } else if self.word(view, Meaning::Attributes2)? & NVOS32_ATTR2_USE_EGM != 0 {
            NV_MEMORY_EXTENDED_USER
        } else if location == NVOS32_ATTR_LOCATION_VIDMEM {
            NV01_MEMORY_LOCAL_USER
        } else {
            NV01_MEMORY_SYSTEM
        };
        let handle = if flags & NVOS32_ALLOC_FLAGS_MEMORY_HANDLE_PROVIDED == 0 {
            0
        } else {
            self.word(view, Meaning::Handle)?
        };
        // The driver puts height × pitch in the place of a tiled surface's size.
        let size_bytes = match (view.u32(Meaning::Height), view.u32(Meaning::Pitch)) {
            (Some(height), Some(pitch)) => u64::from(height) * u64::from(pitch),
            _ => self.long(view, Meaning::Size)?,
        };
        let does = class_use(class).does;
        Ok(VidHeap::Alloc { handle, class, does, size_bytes, layout: view.layout() })
    }
}
