//! The driver's structs as far as they are read: one [`Layout`] each.
//!
//! A name that ends in a size or a release is a struct that changed; which release has
//! which one is said in `release.rs`, and nowhere else. Headers: `nvos.h` for
//! `NVOS*` and `NV_MEMORY_*`, `nv-ioctl.h` and `nv-unix-nvos-params-wrappers.h` for
//! `nv_ioctl_*`, `uvm_ioctl.h` and `uvm_linux_ioctl.h` for `UVM_*`, else the class's or
//! control's own. Sizes and offsets are those of the 64-bit driver; 32-bit callers use
//! the same ones, as pointers are `NvP64` and aligned to eight.

use super::layout::Meaning::{
    Attributes, Attributes2, Base, Class, Client, Command, CommandSize, Count, Descriptor, Device,
    Flags, FreeMemory, Function, Handle, Height, Kind, LargestFree, Length, Limit, List, Offset,
    Params, ParamsSize, Parent, Pitch, Rights, Size, SourceClient, SourceHandle, Status,
    TotalMemory, Uuid,
};
use super::layout::{Field, Layout, Meaning};

const fn f1(meaning: Meaning, name: &'static str, offset: usize) -> Field {
    Field { meaning, name, offset, width: 1 }
}

const fn f2(meaning: Meaning, name: &'static str, offset: usize) -> Field {
    Field { meaning, name, offset, width: 2 }
}

const fn f4(meaning: Meaning, name: &'static str, offset: usize) -> Field {
    Field { meaning, name, offset, width: 4 }
}

const fn f8(meaning: Meaning, name: &'static str, offset: usize) -> Field {
    Field { meaning, name, offset, width: 8 }
}

const fn uuid(name: &'static str, offset: usize) -> Field {
    Field { meaning: Uuid, name, offset, width: 16 }
}

const fn list(name: &'static str, offset: usize, width: usize) -> Field {
    Field { meaning: List, name, offset, width }
}

pub(super) const FREE: &[Layout] = &[Layout::new(
    "NVOS00_PARAMETERS",
    16,
    &[
        f4(Client, "hRoot", 0),
        f4(Parent, "hObjectParent", 4),
        f4(Handle, "hObjectOld", 8),
        f4(Status, "status", 12),
    ],
)];

pub(super) const ALLOC_MEMORY: &[Layout] = &[Layout::new(
    "nv_ioctl_nvos02_parameters_with_fd",
    56,
    &[
        f4(Client, "params.hRoot", 0),
        f4(Parent, "params.hObjectParent", 4),
        f4(Handle, "params.hObjectNew", 8),
        f4(Class, "params.hClass", 12),
        f8(Params, "params.pMemory", 24),
        f8(Limit, "params.limit", 32),
        f4(Status, "params.status", 40),
        f4(Descriptor, "fd", 48),
    ],
)];

pub(super) const ALLOC_OBJECT: &[Layout] = &[Layout::new(
    "NVOS05_PARAMETERS",
    20,
    &[
        f4(Client, "hRoot", 0),
        f4(Parent, "hObjectParent", 4),
        f4(Handle, "hObjectNew", 8),
        f4(Class, "hClass", 12),
        f4(Status, "status", 16),
    ],
)];

// The first five fields of NVOS21 and NVOS64 lie alike in all releases: escape.c asserts
// it of both.
const NVOS21_WITHOUT_SIZE: Layout = Layout::new(
    "NVOS21_PARAMETERS",
    32,
    &[
        f4(Client, "hRoot", 0),
        f4(Parent, "hObjectParent", 4),
        f4(Handle, "hObjectNew", 8),
        f4(Class, "hClass", 12),
        f8(Params, "pAllocParms", 16),
        f4(Status, "status", 24),
    ],
);

pub(super) const ALLOC_515: &[Layout] = &[
    NVOS21_WITHOUT_SIZE,
    Layout::new(
        "NVOS64_PARAMETERS",
        40,
        &[
            f4(Client, "hRoot", 0),
            f4(Parent, "hObjectParent", 4),
            f4(Handle, "hObjectNew", 8),
            f4(Class, "hClass", 12),
            f8(Params, "pAllocParms", 16),
            f8(Rights, "pRightsRequested", 24),
            f4(Status, "status", 32),
        ],
    ),
];

pub(super) const ALLOC_525: &[Layout] = &[
    NVOS21_WITHOUT_SIZE,
    Layout::new(
        "NVOS64_PARAMETERS",
        40,
        &[
            f4(Client, "hRoot", 0),
            f4(Parent, "hObjectParent", 4),
            f4(Handle, "hObjectNew", 8),
            f4(Class, "hClass", 12),
            f8(Params, "pAllocParms", 16),
            f8(Rights, "pRightsRequested", 24),
            f4(Flags, "flags", 32),
            f4(Status, "status", 36),
        ],
    ),
];

pub(super) const ALLOC_535: &[Layout] = &[
    Layout::new(
        "NVOS21_PARAMETERS",
        32,
        &[
            f4(Client, "hRoot", 0),
            f4(Parent, "hObjectParent", 4),
            f4(Handle, "hObjectNew", 8),
            f4(Class, "hClass", 12),
            f8(Params, "pAllocParms", 16),
            f4(ParamsSize, "paramsSize", 24),
            f4(Status, "status", 28),
        ],
    ),
    Layout::new(
        "NVOS64_PARAMETERS",
        48,
        &[
            f4(Client, "hRoot", 0),
            f4(Parent, "hObjectParent", 4),
            f4(Handle, "hObjectNew", 8),
            f4(Class, "hClass", 12),
            f8(Params, "pAllocParms", 16),
            f8(Rights, "pRightsRequested", 24),
            f4(ParamsSize, "paramsSize", 32),
            f4(Flags, "flags", 36),
            f4(Status, "status", 40),
        ],
    ),
];

pub(super) const CONTROL: &[Layout] = &[Layout::new(
    "NVOS54_PARAMETERS",
    32,
    &[
        f4(Client, "hClient", 0),
        f4(Handle, "hObject", 4),
        f4(Command, "cmd", 8),
        f4(Flags, "flags", 12),
        f8(Params, "params", 16),
        f4(ParamsSize, "paramsSize", 24),
        f4(Status, "status", 28),
    ],
)];

pub(super) const DUP_OBJECT: &[Layout] = &[Layout::new(
    "NVOS55_PARAMETERS",
    28,
    &[
        f4(Client, "hClient", 0),
        f4(Parent, "hParent", 4),
        f4(Handle, "hObject", 8),
        f4(SourceClient, "hClientSrc", 12),
        f4(SourceHandle, "hObjectSrc", 16),
        f4(Status, "status", 24),
    ],
)];

pub(super) const SHARE: &[Layout] = &[Layout::new(
    "NVOS57_PARAMETERS",
    24,
    &[f4(Client, "hClient", 0), f4(Handle, "hObject", 4), f4(Status, "status", 20)],
)];

pub(super) const VID_HEAP: &[Layout] = &[Layout::new(
    "NVOS32_PARAMETERS",
    184,
    &[
        f4(Client, "hRoot", 0),
        f4(Parent, "hObjectParent", 4),
        f4(Function, "function", 8),
        f4(Status, "status", 20),
        f8(TotalMemory, "total", 24),
        f8(FreeMemory, "free", 32),
    ],
)];

pub(super) const VID_HEAP_ALLOC_SIZE: &[Layout] = &[Layout::new(
    "NVOS32_PARAMETERS",
    184,
    &[
        f4(Handle, "data.AllocSize.hMemory", 44),
        f4(Flags, "data.AllocSize.flags", 52),
        f4(Attributes, "data.AllocSize.attr", 56),
        f8(Size, "data.AllocSize.size", 88),
        f8(Limit, "data.AllocSize.limit", 112),
        f4(Attributes2, "data.AllocSize.attr2", 144),
    ],
)];

pub(super) const VID_HEAP_ALLOC_TILED: &[Layout] = &[Layout::new(
    "NVOS32_PARAMETERS",
    184,
    &[
        f4(Handle, "data.AllocTiledPitchHeight.hMemory", 44),
        f4(Flags, "data.AllocTiledPitchHeight.flags", 52),
        f4(Height, "data.AllocTiledPitchHeight.height", 56),
        f4(Pitch, "data.AllocTiledPitchHeight.pitch", 60),
        f4(Attributes, "data.AllocTiledPitchHeight.attr", 64),
        f8(Size, "data.AllocTiledPitchHeight.size", 88),
        f8(Limit, "data.AllocTiledPitchHeight.limit", 112),
        f4(Attributes2, "data.AllocTiledPitchHeight.attr2", 144),
    ],
)];

pub(super) const VID_HEAP_ALLOC_RANGE: &[Layout] = &[Layout::new(
    "NVOS32_PARAMETERS",
    184,
    &[
        f4(Handle, "data.AllocSizeRange.hMemory", 44),
        f4(Flags, "data.AllocSizeRange.flags", 52),
        f4(Attributes, "data.AllocSizeRange.attr", 56),
        f8(Size, "data.AllocSizeRange.size", 80),
        f8(Limit, "data.AllocSizeRange.limit", 104),
        f4(Attributes2, "data.AllocSizeRange.attr2", 136),
    ],
)];

pub(super) const VID_HEAP_FREE: &[Layout] =
    &[Layout::new("NVOS32_PARAMETERS", 184, &[f4(Handle, "data.Free.hMemory", 44)])];

pub(super) const VID_HEAP_INFO: &[Layout] = &[Layout::new(
    "NVOS32_PARAMETERS",
    184,
    &[
        f8(TotalMemory, "total", 24),
        f8(FreeMemory, "free", 32),
        f8(LargestFree, "data.Info.size", 56),
    ],
)];

pub(super) const VID_HEAP_HW_FREE: &[Layout] =
    &[Layout::new("NVOS32_PARAMETERS", 184, &[f4(Handle, "data.HwFree.hResourceHandle", 40)])];

/// Functions of which nothing but the function is read.
pub(super) const VID_HEAP_OTHER: &[Layout] = &[Layout::new("NVOS32_PARAMETERS", 184, &[])];

pub(super) const XFER: &[Layout] = &[Layout::new(
    "nv_ioctl_xfer_t",
    16,
    &[f4(Command, "cmd", 0), f4(CommandSize, "size", 4), f8(Params, "ptr", 8)],
)];

pub(super) const EXPORT_TO_DMABUF_515: &[Layout] =
    &[Layout::new("nv_ioctl_export_to_dma_buf_fd_t", 2600, &[f4(Status, "status", 2592)])];

pub(super) const EXPORT_TO_DMABUF_570: &[Layout] =
    &[Layout::new("nv_ioctl_export_to_dma_buf_fd_t", 2608, &[f4(Status, "status", 2600)])];

pub(super) const REGISTER_FD: &[Layout] = &[Layout::new("nv_ioctl_register_fd_t", 4, &[])];

pub(super) const ALLOC_OS_EVENT: &[Layout] =
    &[Layout::new("nv_ioctl_alloc_os_event_t", 16, &[f4(Status, "Status", 12)])];

pub(super) const FREE_OS_EVENT: &[Layout] =
    &[Layout::new("nv_ioctl_free_os_event_t", 16, &[f4(Status, "Status", 12)])];

pub(super) const IDLE_CHANNELS: &[Layout] =
    &[Layout::new("NVOS30_PARAMETERS", 56, &[f4(Status, "status", 48)])];

pub(super) const MAP_MEMORY: &[Layout] =
    &[Layout::new("nv_ioctl_nvos33_parameters_with_fd", 56, &[f4(Status, "params.status", 40)])];

pub(super) const UNMAP_MEMORY: &[Layout] =
    &[Layout::new("NVOS34_PARAMETERS", 32, &[f4(Status, "status", 24)])];

pub(super) const ALLOC_CONTEXT_DMA2: &[Layout] =
    &[Layout::new("NVOS39_PARAMETERS", 56, &[f4(Status, "status", 48)])];

pub(super) const MAP_MEMORY_DMA_515: &[Layout] =
    &[Layout::new("NVOS46_PARAMETERS", 56, &[f4(Status, "status", 48)])];

pub(super) const MAP_MEMORY_DMA_580: &[Layout] =
    &[Layout::new("NVOS46_PARAMETERS", 64, &[f4(Status, "status", 56)])];

pub(super) const UNMAP_MEMORY_DMA_515: &[Layout] =
    &[Layout::new("NVOS47_PARAMETERS", 40, &[f4(Status, "status", 32)])];

pub(super) const UNMAP_MEMORY_DMA_550: &[Layout] =
    &[Layout::new("NVOS47_PARAMETERS", 48, &[f4(Status, "status", 40)])];

pub(super) const BIND_CONTEXT_DMA: &[Layout] =
    &[Layout::new("NVOS49_PARAMETERS", 16, &[f4(Status, "status", 12)])];

pub(super) const UPDATE_DEVICE_MAPPING_INFO: &[Layout] =
    &[Layout::new("NVOS56_PARAMETERS", 40, &[f4(Status, "status", 32)])];

/// Fields of `NV_MEMORY_ALLOCATION_PARAMS`, which lie alike in all releases.
const MEMORY_FIELDS: &[Field] = &[f8(Size, "size", 64), f8(Limit, "limit", 88)];

pub(super) const MEMORY_120: &[Layout] =
    &[Layout::new("NV_MEMORY_ALLOCATION_PARAMS", 120, MEMORY_FIELDS)];

pub(super) const MEMORY_128: &[Layout] =
    &[Layout::new("NV_MEMORY_ALLOCATION_PARAMS", 128, MEMORY_FIELDS)];

pub(super) const DEVICE: &[Layout] =
    &[Layout::new("NV0080_ALLOC_PARAMETERS", 56, &[f4(Device, "deviceId", 0)])];

pub(super) const SUBDEVICE: &[Layout] =
    &[Layout::new("NV2080_ALLOC_PARAMETERS", 4, &[f4(Device, "subDeviceId", 0)])];

pub(super) const CHANNEL_GROUP: &[Layout] =
    &[Layout::new("NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS", 20, &[f4(Kind, "engineType", 12)])];

pub(super) const SEMAPHORE_SURFACE: &[Layout] = &[Layout::new(
    "NV_SEMAPHORE_SURFACE_ALLOC_PARAMETERS",
    16,
    &[f4(SourceHandle, "hSemaphoreMem", 0), f4(Handle, "hMaxSubmittedMem", 4)],
)];

pub(super) const FB_INFO: &[Layout] = &[Layout::new(
    "NV2080_CTRL_FB_GET_INFO_PARAMS",
    16,
    &[f4(Count, "fbInfoListSize", 0), f8(List, "fbInfoList", 8)],
)];

/// `NV2080_CTRL_FB_GET_INFO_V2_PARAMS`: a count, then so many entries of eight bytes.
const fn fb_info_v2(entries: usize) -> Layout {
    // A constant's field list can't be made from a number, so the list's width is left
    // at its first entry; its true length follows from the struct's size.
    const FIELDS: &[Field] = &[
        f4(Count, "fbInfoListSize", 0),
        Field { meaning: List, name: "fbInfoList[0]", offset: 4, width: 8 },
    ];
    Layout::new("NV2080_CTRL_FB_GET_INFO_V2_PARAMS", 4 + 8 * entries, FIELDS)
}

pub(super) const FB_INFO_V2_54: &[Layout] = &[fb_info_v2(54)];
pub(super) const FB_INFO_V2_55: &[Layout] = &[fb_info_v2(55)];
pub(super) const FB_INFO_V2_57: &[Layout] = &[fb_info_v2(57)];
pub(super) const FB_INFO_V2_128: &[Layout] = &[fb_info_v2(128)];

pub(super) const EXPORT_OBJECT: &[Layout] = &[Layout::new(
    "NV0000_CTRL_OS_UNIX_EXPORT_OBJECT_TO_FD_PARAMS",
    24,
    &[
        f4(Function, "object.type", 0),
        f4(Parent, "object.data.rmObject.hParent", 8),
        f4(Handle, "object.data.rmObject.hObject", 12),
        f4(Descriptor, "fd", 16),
    ],
)];

pub(super) const IMPORT_OBJECT: &[Layout] = &[Layout::new(
    "NV0000_CTRL_OS_UNIX_IMPORT_OBJECT_FROM_FD_PARAMS",
    20,
    &[
        f4(Descriptor, "fd", 0),
        f4(Function, "object.type", 4),
        f4(Parent, "object.data.rmObject.hParent", 12),
        f4(Handle, "object.data.rmObject.hObject", 16),
    ],
)];

pub(super) const EXPORT_OBJECTS: &[Layout] = &[Layout::new(
    "NV0000_CTRL_OS_UNIX_EXPORT_OBJECTS_TO_FD_PARAMS",
    2128,
    &[
        f4(Descriptor, "fd", 0),
        f4(Parent, "hDevice", 4),
        Field { meaning: List, name: "objects", offset: 76, width: 2048 },
        f2(Count, "numObjects", 2124),
        f2(Offset, "index", 2126),
    ],
)];

pub(super) const IMPORT_OBJECTS: &[Layout] = &[Layout::new(
    "NV0000_CTRL_OS_UNIX_IMPORT_OBJECTS_FROM_FD_PARAMS",
    652,
    &[
        f4(Descriptor, "fd", 0),
        f4(Parent, "hParent", 4),
        Field { meaning: List, name: "objects", offset: 8, width: 512 },
        Field { meaning: Kind, name: "objectTypes", offset: 520, width: 128 },
        f2(Count, "numObjects", 648),
        f2(Offset, "index", 650),
    ],
)];

pub(super) const EXPORT_INFO_76: &[Layout] = &[Layout::new(
    "NV0000_CTRL_OS_UNIX_GET_EXPORT_OBJECT_INFO_PARAMS",
    76,
    &[f4(Descriptor, "fd", 0)],
)];

pub(super) const EXPORT_INFO_80: &[Layout] = &[Layout::new(
    "NV0000_CTRL_OS_UNIX_GET_EXPORT_OBJECT_INFO_PARAMS",
    80,
    &[f4(Descriptor, "fd", 0)],
)];

pub(super) const ADDRESS_SPACE: &[Layout] = &[Layout::new(
    "NV0000_CTRL_CLIENT_GET_ADDR_SPACE_TYPE_PARAMS",
    12,
    &[f4(Handle, "hObject", 0), f4(Flags, "mapFlags", 4), f4(Kind, "addrSpaceType", 8)],
)];

pub(super) const TIMESLICE: &[Layout] =
    &[Layout::new("NVA06C_CTRL_TIMESLICE_PARAMS", 8, &[f8(Length, "timesliceUs", 0)])];

pub(super) const DISABLE_CHANNELS: &[Layout] = &[Layout::new(
    "NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS",
    536,
    &[f1(Flags, "bDisable", 0), f4(Count, "numChannels", 4)],
)];

pub(super) const UVM_INITIALIZE: &[Layout] = &[Layout::new(
    "UVM_INITIALIZE_PARAMS",
    16,
    &[f8(Flags, "flags", 0), f4(Status, "rmStatus", 8)],
)];

pub(super) const UVM_MM_INITIALIZE: &[Layout] =
    &[Layout::new("UVM_MM_INITIALIZE_PARAMS", 8, &[f4(Status, "rmStatus", 4)])];

pub(super) const UVM_REGISTER_GPU: &[Layout] = &[Layout::new(
    "UVM_REGISTER_GPU_PARAMS",
    40,
    &[f4(Descriptor, "rmCtrlFd", 24), f4(Status, "rmStatus", 36)],
)];

pub(super) const UVM_UNREGISTER_GPU: &[Layout] = &[Layout::new(
    "UVM_UNREGISTER_GPU_PARAMS",
    20,
    &[uuid("gpu_uuid", 0), f4(Status, "rmStatus", 16)],
)];

pub(super) const UVM_REGISTER_GPU_VASPACE: &[Layout] =
    &[Layout::new("UVM_REGISTER_GPU_VASPACE_PARAMS", 32, &[f4(Status, "rmStatus", 28)])];

pub(super) const UVM_REGISTER_CHANNEL: &[Layout] =
    &[Layout::new("UVM_REGISTER_CHANNEL_PARAMS", 56, &[f4(Status, "rmStatus", 48)])];

pub(super) const UVM_UNREGISTER_GPU_VASPACE: &[Layout] = &[Layout::new(
    "UVM_UNREGISTER_GPU_VASPACE_PARAMS",
    20,
    &[uuid("gpuUuid", 0), f4(Status, "rmStatus", 16)],
)];

/// `UvmGpuMappingAttributes` (uvm_types.h): it begins with the UUID.
pub(super) const MAPPING_ATTRIBUTES_BYTES: usize = 36;

// perGpuAttributes has UVM_MAX_GPUS entries: 32 of them, then 256.
pub(super) const UVM_MAP_EXTERNAL_32: &[Layout] = &[Layout::new(
    "UVM_MAP_EXTERNAL_ALLOCATION_PARAMS",
    1200,
    &[
        f8(Base, "base", 0),
        f8(Length, "length", 8),
        list("perGpuAttributes", 24, 32 * MAPPING_ATTRIBUTES_BYTES),
        f8(Count, "gpuAttributesCount", 1176),
        f4(Descriptor, "rmCtrlFd", 1184),
        f4(Client, "hClient", 1188),
        f4(Handle, "hMemory", 1192),
        f4(Status, "rmStatus", 1196),
    ],
)];

pub(super) const UVM_MAP_EXTERNAL_256: &[Layout] = &[Layout::new(
    "UVM_MAP_EXTERNAL_ALLOCATION_PARAMS",
    9264,
    &[
        f8(Base, "base", 0),
        f8(Length, "length", 8),
        list("perGpuAttributes", 24, 256 * MAPPING_ATTRIBUTES_BYTES),
        f8(Count, "gpuAttributesCount", 9240),
        f4(Descriptor, "rmCtrlFd", 9248),
        f4(Client, "hClient", 9252),
        f4(Handle, "hMemory", 9256),
        f4(Status, "rmStatus", 9260),
    ],
)];

pub(super) const UVM_SEMAPHORE_POOL_32: &[Layout] = &[Layout::new(
    "UVM_ALLOC_SEMAPHORE_POOL_PARAMS",
    1184,
    &[f8(Base, "base", 0), f8(Length, "length", 8), f4(Status, "rmStatus", 1176)],
)];

pub(super) const UVM_SEMAPHORE_POOL_256: &[Layout] = &[Layout::new(
    "UVM_ALLOC_SEMAPHORE_POOL_PARAMS",
    9248,
    &[f8(Base, "base", 0), f8(Length, "length", 8), f4(Status, "rmStatus", 9240)],
)];

pub(super) const UVM_FREE_24: &[Layout] = &[Layout::new(
    "UVM_FREE_PARAMS",
    24,
    &[f8(Base, "base", 0), f8(Length, "length", 8), f4(Status, "rmStatus", 16)],
)];

pub(super) const UVM_FREE_16: &[Layout] =
    &[Layout::new("UVM_FREE_PARAMS", 16, &[f8(Base, "base", 0), f4(Status, "rmStatus", 8)])];

pub(super) const UVM_UNMAP_EXTERNAL: &[Layout] = &[Layout::new(
    "UVM_UNMAP_EXTERNAL_PARAMS",
    40,
    &[
        f8(Base, "base", 0),
        f8(Length, "length", 8),
        uuid("gpuUuid", 16),
        f4(Status, "rmStatus", 32),
    ],
)];

pub(super) const UVM_CREATE_EXTERNAL_RANGE: &[Layout] = &[Layout::new(
    "UVM_CREATE_EXTERNAL_RANGE_PARAMS",
    24,
    &[f8(Base, "base", 0), f8(Length, "length", 8), f4(Status, "rmStatus", 16)],
)];

pub(super) const UVM_VALIDATE_VA_RANGE: &[Layout] = &[Layout::new(
    "UVM_VALIDATE_VA_RANGE_PARAMS",
    24,
    &[f8(Base, "base", 0), f8(Length, "length", 8), f4(Status, "rmStatus", 16)],
)];

pub(super) const UVM_DISABLE_READ_DUPLICATION: &[Layout] = &[Layout::new(
    "UVM_DISABLE_READ_DUPLICATION_PARAMS",
    24,
    &[f8(Base, "requestedBase", 0), f8(Length, "length", 8), f4(Status, "rmStatus", 16)],
)];

pub(super) const UVM_CLEAN_UP_ZOMBIE_RESOURCES: &[Layout] =
    &[Layout::new("UVM_CLEAN_UP_ZOMBIE_RESOURCES_PARAMS", 4, &[f4(Status, "rmStatus", 0)])];

pub(super) const UVM_MAP_DYNAMIC_PARALLELISM_REGION: &[Layout] =
    &[Layout::new("UVM_MAP_DYNAMIC_PARALLELISM_REGION_PARAMS", 40, &[f4(Status, "rmStatus", 32)])];

pub(super) const UVM_ALLOC_DEVICE_P2P: &[Layout] = &[Layout::new(
    "UVM_ALLOC_DEVICE_P2P_PARAMS",
    56,
    &[
        f8(Base, "base", 0),
        f8(Length, "length", 8),
        f4(Descriptor, "rmCtrlFd", 40),
        f4(Client, "hClient", 44),
        f4(Handle, "hMemory", 48),
        f4(Status, "rmStatus", 52),
    ],
)];
