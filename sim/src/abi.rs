//! The driver's numbers and sizes, as NVIDIA's open kernel modules publish them.
//!
//! Written from the headers, by compiling them and printing sizes and offsets, and
//! independently of the library's own tables: where both agree, each checks the other.
//! Names are upstream's. What differs between releases is in [`Abi`]; releases before 515
//! have no published source and are taken to be like 515.

#![allow(missing_docs, reason = "names are upstream's and documented there")]

use std::fmt;
use std::str::FromStr;

// nv_escape.h, nv-ioctl-numbers.h.
pub const NV_ESC_RM_ALLOC_MEMORY: u32 = 0x27;
pub const NV_ESC_RM_ALLOC_OBJECT: u32 = 0x28;
pub const NV_ESC_RM_FREE: u32 = 0x29;
pub const NV_ESC_RM_CONTROL: u32 = 0x2a;
pub const NV_ESC_RM_ALLOC: u32 = 0x2b;
pub const NV_ESC_RM_DUP_OBJECT: u32 = 0x34;
pub const NV_ESC_RM_SHARE: u32 = 0x35;
pub const NV_ESC_RM_I2C_ACCESS: u32 = 0x39;
pub const NV_ESC_RM_IDLE_CHANNELS: u32 = 0x41;
pub const NV_ESC_RM_VID_HEAP_CONTROL: u32 = 0x4a;
pub const NV_ESC_RM_ACCESS_REGISTRY: u32 = 0x4d;
pub const NV_ESC_RM_MAP_MEMORY: u32 = 0x4e;
pub const NV_ESC_RM_UNMAP_MEMORY: u32 = 0x4f;
pub const NV_ESC_RM_GET_EVENT_DATA: u32 = 0x52;
pub const NV_ESC_RM_ALLOC_CONTEXT_DMA2: u32 = 0x54;
pub const NV_ESC_RM_MAP_MEMORY_DMA: u32 = 0x57;
pub const NV_ESC_RM_UNMAP_MEMORY_DMA: u32 = 0x58;
pub const NV_ESC_RM_BIND_CONTEXT_DMA: u32 = 0x59;
pub const NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO: u32 = 0x5e;
pub const NV_ESC_CARD_INFO: u32 = 200;
pub const NV_ESC_REGISTER_FD: u32 = 201;
pub const NV_ESC_ALLOC_OS_EVENT: u32 = 206;
pub const NV_ESC_FREE_OS_EVENT: u32 = 207;
pub const NV_ESC_STATUS_CODE: u32 = 209;
pub const NV_ESC_CHECK_VERSION_STR: u32 = 210;
pub const NV_ESC_IOCTL_XFER_CMD: u32 = 211;
pub const NV_ESC_SYS_PARAMS: u32 = 214;
pub const NV_ESC_EXPORT_TO_DMABUF_FD: u32 = 217;

/// `nv.h`: most bytes of a struct handed over by `NV_ESC_IOCTL_XFER_CMD`.
pub const NV_ABSOLUTE_MAX_IOCTL_SIZE: usize = 16384;

// nvstatuscodes.h.
pub const NV_OK: u32 = 0x0;
pub const NV_ERR_ILLEGAL_ACTION: u32 = 0x16;
pub const NV_ERR_OUT_OF_RANGE: u32 = 0x5b;
pub const NV_ERR_PAGE_TABLE_NOT_AVAIL: u32 = 0x5d;
pub const NV_ERR_STATE_IN_USE: u32 = 0x63;
pub const NV_ERR_INVALID_PARAMETER: u32 = 0x3b;
pub const NV_ERR_INSERT_DUPLICATE_NAME: u32 = 0x19;
pub const NV_ERR_INSUFFICIENT_RESOURCES: u32 = 0x1a;
pub const NV_ERR_INSUFFICIENT_PERMISSIONS: u32 = 0x1b;
pub const NV_ERR_INVALID_ADDRESS: u32 = 0x1e;
pub const NV_ERR_INVALID_ARGUMENT: u32 = 0x1f;
pub const NV_ERR_INVALID_CHANNEL: u32 = 0x21;
pub const NV_ERR_INVALID_CLASS: u32 = 0x22;
pub const NV_ERR_INVALID_CLIENT: u32 = 0x23;
pub const NV_ERR_INVALID_DEVICE: u32 = 0x26;
pub const NV_ERR_INVALID_FLAGS: u32 = 0x29;
pub const NV_ERR_INVALID_LIMIT: u32 = 0x2e;
pub const NV_ERR_INVALID_OBJECT: u32 = 0x31;
pub const NV_ERR_INVALID_OBJECT_HANDLE: u32 = 0x33;
pub const NV_ERR_INVALID_OBJECT_PARENT: u32 = 0x36;
pub const NV_ERR_INVALID_OWNER: u32 = 0x39;
pub const NV_ERR_INVALID_PARAM_STRUCT: u32 = 0x3a;
pub const NV_ERR_INVALID_POINTER: u32 = 0x3d;
pub const NV_ERR_INVALID_STATE: u32 = 0x40;
pub const NV_ERR_NO_MEMORY: u32 = 0x51;
pub const NV_ERR_NOT_SUPPORTED: u32 = 0x56;
pub const NV_ERR_OBJECT_NOT_FOUND: u32 = 0x57;
pub const NV_ERR_UVM_ADDRESS_IN_USE: u32 = 0x68;

// Classes: class/cl*.h.
pub const NV01_ROOT: u32 = 0x0;
pub const NV01_ROOT_NON_PRIV: u32 = 0x1;
pub const NV01_ROOT_CLIENT: u32 = 0x41;
pub const NV01_EVENT: u32 = 0x5;
pub const NV01_MEMORY_SYSTEM: u32 = 0x3e;
pub const NV01_MEMORY_LOCAL_PRIVILEGED: u32 = 0x3f;
pub const NV01_MEMORY_LOCAL_USER: u32 = 0x40;
pub const NV_MEMORY_EXTENDED_USER: u32 = 0x42;
pub const NV01_MEMORY_VIRTUAL: u32 = 0x70;
pub const NV01_MEMORY_SYSTEM_OS_DESCRIPTOR: u32 = 0x71;
pub const NV01_EVENT_KERNEL_CALLBACK: u32 = 0x78;
pub const NV01_EVENT_OS_EVENT: u32 = 0x79;
pub const NV01_EVENT_KERNEL_CALLBACK_EX: u32 = 0x7e;
pub const NV01_DEVICE_0: u32 = 0x80;
pub const NV01_MEMORY_LIST_SYSTEM: u32 = 0x81;
pub const NV01_MEMORY_LIST_FBMEM: u32 = 0x82;
pub const NV01_MEMORY_LIST_OBJECT: u32 = 0x83;
pub const NV01_MEMORY_LOCAL_PHYSICAL: u32 = 0xc2;
pub const NV01_MEMORY_DEVICELESS: u32 = 0x90ce;
pub const NV_MEMORY_FABRIC: u32 = 0xf8;
pub const NV20_SUBDEVICE_0: u32 = 0x2080;
pub const NV50_MEMORY_VIRTUAL: u32 = 0x50a0;
pub const NV_EVENT_BUFFER: u32 = 0x90cd;
pub const FERMI_VASPACE_A: u32 = 0x90f1;
pub const KEPLER_CHANNEL_GROUP_A: u32 = 0xa06c;
pub const KEPLER_CHANNEL_GPFIFO_A: u32 = 0xa06f;
pub const ACCESS_COUNTER_NOTIFY_BUFFER: u32 = 0xc365;
pub const AMPERE_CHANNEL_GPFIFO_A: u32 = 0xc56f;
pub const AMPERE_COMPUTE_A: u32 = 0xc6c0;
pub const GT200_DEBUGGER: u32 = 0x83de;
pub const NV_SEMAPHORE_SURFACE: u32 = 0xda;
pub const NV83DE_CTRL_CMD_DEBUG_READ_MEMORY: u32 = 0x83de_0315;
pub const NV83DE_CTRL_CMD_DEBUG_WRITE_MEMORY: u32 = 0x83de_0316;

/// Classes up to 0xff that exist, in addition to those above (`resource_list.h`, all releases).
pub const OTHER_LOW_CLASSES: &[u32] = &[
    0x2, 0x4, 0xf, 0x20, 0x52, 0x60, 0x73, 0xb1, 0xc3, 0xdb, 0xde, 0xe0, 0xf1, 0xf3, 0xf9, 0xfb,
    0xfd, 0xfe,
];

/// Channels by generation, from `GF100_CHANNEL_GPFIFO` to `BLACKWELL_CHANNEL_GPFIFO_B`.
pub const CHANNEL_CLASSES: &[u32] =
    &[0x906f, 0xa06f, 0xa16f, 0xb06f, 0xc06f, 0xc36f, 0xc46f, 0xc56f, 0xc86f, 0xc96f, 0xca6f];

// Controls: ctrl/ctrl0000, ctrl/ctrl2080, ctrla06c.h, ctrla06fgpfifo.h.
pub const NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO: u32 = 0xd02;
pub const NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO_INDEX_PARENT: u32 = 1;
pub const NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO_INDEX_CLASSID: u32 = 2;
pub const NV0000_CTRL_CMD_SYSTEM_GET_BUILD_VERSION: u32 = 0x101;
pub const NV0000_CTRL_CMD_GPU_GET_ATTACHED_IDS: u32 = 0x201;
pub const NV0000_CTRL_CMD_GPU_GET_ID_INFO: u32 = 0x202;
pub const NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2: u32 = 0x205;
pub const NV0000_CTRL_CMD_GPU_GET_PROBED_IDS: u32 = 0x214;
pub const NV0000_CTRL_CMD_GPU_ATTACH_IDS: u32 = 0x215;
pub const NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD: u32 = 0x3d05;
pub const NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD: u32 = 0x3d06;
pub const NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO: u32 = 0x3d08;
pub const NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD: u32 = 0x3d0b;
pub const NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECTS_FROM_FD: u32 = 0x3d0c;
pub const NV0041_CTRL_CMD_GET_SURFACE_INFO: u32 = 0x41_0110;
pub const NV0041_CTRL_SURFACE_INFO_INDEX_PHYS_SIZE: u32 = 7;
pub const NV0041_CTRL_SURFACE_INFO_PHYS_SIZE_SCALE_FACTOR: u64 = 0x1000;
pub const NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE: u32 = 0xd01;
pub const NV0080_CTRL_CMD_GPU_FIND_SUBDEVICE_HANDLE: u32 = 0x80_0293;
pub const NV2080_CTRL_CMD_GPU_GET_GID_INFO: u32 = 0x2080_014a;
/// The driver does it for administrators alone (`RMCTRL_FLAGS_PRIVILEGED`).
pub const NV2080_CTRL_CMD_NVLINK_IS_GPU_DEGRADED: u32 = 0x2080_3041;
pub const NV2080_CTRL_CMD_GR_CTXSW_ZCULL_BIND: u32 = 0x2080_1208;
pub const NV2080_CTRL_CMD_GR_FECS_BIND_EVTBUF_FOR_UID: u32 = 0x2080_1231;
pub const NV2080_CTRL_CMD_GR_FECS_BIND_EVTBUF_FOR_UID_V2: u32 = 0x2080_1238;
pub const NV2080_CTRL_CMD_GPU_GET_PIDS: u32 = 0x2080_018d;
pub const NV2080_CTRL_CMD_GPU_GET_PID_INFO: u32 = 0x2080_018e;
pub const NV2080_CTRL_CMD_FB_GET_INFO: u32 = 0x2080_1301;
pub const NV2080_CTRL_CMD_FB_GET_INFO_V2: u32 = 0x2080_1303;
pub const NV2080_CTRL_CMD_BUS_GET_PCI_INFO: u32 = 0x2080_1801;
pub const NV2080_CTRL_CMD_BUS_GET_INFO: u32 = 0x2080_1802;
pub const NV2080_CTRL_CMD_GR_GET_INFO: u32 = 0x2080_1201;
pub const NV0080_CTRL_CMD_GPU_GET_CLASSLIST: u32 = 0x80_0201;
/// One of those that are handed to the firmware; no header names any.
pub const FIRMWARE_CTRL_CMD: u32 = 0x2080_a001;
pub const NVA06C_CTRL_CMD_GPFIFO_SCHEDULE: u32 = 0xa06c_0101;
pub const NVA06C_CTRL_CMD_SET_TIMESLICE: u32 = 0xa06c_0103;
pub const NVA06C_CTRL_CMD_GET_TIMESLICE: u32 = 0xa06c_0104;
pub const NVA06F_CTRL_CMD_GPFIFO_SCHEDULE: u32 = 0xa06f_0103;
pub const NVA06F_CTRL_CMD_RESTART_RUNLIST: u32 = 0xa06f_0111;
pub const NV2080_CTRL_CMD_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2: u32 = 0x2080_2096;
/// ctrl2080gpumon.h.
pub const NV2080_GPUMON_PID_INVALID: u32 = u32::MAX;
pub const NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE: u32 = 0x2080_1210;
pub const NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS: u32 = 0x2080_110b;
pub const NV2080_CTRL_FIFO_DISABLE_CHANNELS_MAX_ENTRIES: u32 = 64;
pub const NV2080_CTRL_GPU_GET_PIDS_MAX_COUNT: usize = 950;
pub const NV2080_CTRL_GPU_GET_PID_INFO_MAX_COUNT: u32 = 200;

// ctrl2080fb.h, in KiB where sizes.
pub const NV2080_CTRL_FB_INFO_INDEX_BAR1_SIZE: u32 = 0x05;
pub const NV2080_CTRL_FB_INFO_INDEX_RAM_SIZE: u32 = 0x07;
pub const NV2080_CTRL_FB_INFO_INDEX_TOTAL_RAM_SIZE: u32 = 0x08;
pub const NV2080_CTRL_FB_INFO_INDEX_HEAP_SIZE: u32 = 0x09;
pub const NV2080_CTRL_FB_INFO_INDEX_MAPPABLE_HEAP_SIZE: u32 = 0x0a;
pub const NV2080_CTRL_FB_INFO_INDEX_BUS_WIDTH: u32 = 0x0b;
pub const NV2080_CTRL_FB_INFO_INDEX_LARGEST_FREE_REGION_SIZE_KB: u32 = 0x12;
pub const NV2080_CTRL_FB_INFO_INDEX_HEAP_FREE: u32 = 0x16;
pub const NV2080_CTRL_FB_INFO_INDEX_USABLE_RAM_SIZE: u32 = 0x20;

// nvos.h, NVOS32.
pub const NVOS32_FUNCTION_ALLOC_SIZE: u32 = 2;
pub const NVOS32_FUNCTION_FREE: u32 = 3;
pub const NVOS32_FUNCTION_INFO: u32 = 5;
pub const NVOS32_FUNCTION_ALLOC_TILED_PITCH_HEIGHT: u32 = 6;
pub const NVOS32_FUNCTION_ALLOC_SIZE_RANGE: u32 = 14;
pub const NVOS32_FUNCTION_ALLOC_OS_DESCRIPTOR: u32 = 27;
pub const NVOS32_PARAMETERS_BYTES: usize = 184;
pub const NVOS32_ALLOC_FLAGS_MEMORY_HANDLE_PROVIDED: u32 = 0x4000;
pub const NVOS32_ALLOC_FLAGS_VIRTUAL: u32 = 0x8_0000;
/// `NVOS32_ATTR_PAGE_SIZE`, 24:23.
pub const NVOS32_ATTR_PAGE_SIZE_SHIFT: u32 = 23;
/// `NVOS32_ATTR_LOCATION`, 26:25; 0 is video memory.
pub const NVOS32_ATTR_LOCATION_SHIFT: u32 = 25;

// uvm_linux_ioctl.h, uvm_ioctl.h.
pub const UVM_INITIALIZE: u32 = 0x3000_0001;
pub const UVM_DEINITIALIZE: u32 = 0x3000_0002;
pub const UVM_REGISTER_GPU_VASPACE: u32 = 25;
pub const UVM_UNREGISTER_GPU_VASPACE: u32 = 26;
pub const UVM_MAP_EXTERNAL_ALLOCATION: u32 = 33;
pub const UVM_FREE: u32 = 34;
pub const UVM_REGISTER_GPU: u32 = 37;
pub const UVM_UNREGISTER_GPU: u32 = 38;
pub const UVM_DISABLE_READ_DUPLICATION: u32 = 45;
pub const UVM_PAGEABLE_MEM_ACCESS: u32 = 39;
pub const UVM_UNMAP_EXTERNAL: u32 = 66;
pub const UVM_ALLOC_SEMAPHORE_POOL: u32 = 68;
pub const UVM_VALIDATE_VA_RANGE: u32 = 72;
pub const UVM_CREATE_EXTERNAL_RANGE: u32 = 73;
pub const UVM_MM_INITIALIZE: u32 = 75;
pub const UVM_ALLOC_DEVICE_P2P: u32 = 78;
pub const UVM_INIT_FLAGS_DISABLE_HMM: u64 = 0x1;
pub const UVM_INIT_FLAGS_MULTI_PROCESS_SHARING_MODE: u64 = 0x2;
pub const UVM_INIT_FLAGS_MASK: u64 = 0x3;
/// Bytes of `UvmGpuMappingAttributes`; the UUID comes first.
pub const UVM_GPU_MAPPING_ATTRIBUTES_BYTES: usize = 36;

/// A driver's version, as `535.161.08`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    text: String,
    parts: [u32; 3],
}

/// Why a text is no version.
#[derive(Debug, thiserror::Error)]
#[error("\"{text}\" is no driver version; write it as 535.161.08")]
pub struct VersionError {
    text: String,
}

impl Version {
    /// Whether this release is that one or later.
    #[must_use]
    pub fn since(&self, major: u32, minor: u32, patch: u32) -> bool {
        self.parts >= [major, minor, patch]
    }
}

impl FromStr for Version {
    type Err = VersionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || VersionError { text: text.to_owned() };
        let mut parts = [0; 3];
        let mut given = 0;
        for (part, field) in text.split('.').enumerate() {
            *parts.get_mut(part).ok_or_else(error)? = field.parse().map_err(|_| error())?;
            given += 1;
        }
        if given < 2 {
            return Err(error());
        }
        Ok(Version { text: text.to_owned(), parts })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.text)
    }
}

/// What differs from release to release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abi {
    /// `NVOS21_PARAMETERS` is 32 bytes in all releases; its `status` moved when
    /// `paramsSize` came in 535.43.02.
    pub nvos21_status: usize,
    /// `NVOS64_PARAMETERS`: 40 bytes before 535.43.02.
    pub nvos64_bytes: usize,
    /// Its `status`; `flags` came in 525.
    pub nvos64_status: usize,
    /// `NVOS46_PARAMETERS` and its `status`.
    pub nvos46: (usize, usize),
    /// `NVOS47_PARAMETERS` and its `status`.
    pub nvos47: (usize, usize),
    /// `NV_MEMORY_ALLOCATION_PARAMS`: `numaNode` came in 545.
    pub memory_params_bytes: usize,
    /// Entries of `NV2080_CTRL_FB_GET_INFO_V2_PARAMS`.
    pub fb_info_max_list: usize,
    /// `NV0000_CTRL_GPU_GET_PROBED_IDS_PARAMS`.
    pub probed_ids_bytes: usize,
    /// Of `NV2080_CTRL_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2_PARAMS`: bytes, those of a sample, and of
    /// an engine in one.
    pub samples: (usize, usize, usize),
    /// `NVA06C_CTRL_GPFIFO_SCHEDULE_PARAMS`: bSkipEnable came with 575 (ctrla06fgpfifo.h).
    pub schedule_bytes: usize,
    /// `NV_VASPACE_ALLOCATION_PARAMETERS`.
    pub vaspace_params_bytes: usize,
    /// `NV00F8_ALLOCATION_PARAMETERS` and its `map.hVidMem`.
    pub fabric_params: (usize, usize),
    /// `nv_ioctl_export_to_dma_buf_fd_t` and its `status`.
    pub export_dmabuf: (usize, usize),
    /// `NV0000_CTRL_OS_UNIX_GET_EXPORT_OBJECT_INFO_PARAMS` and its `maxObjects`.
    pub export_info: (usize, usize),
    /// `UVM_MAX_GPUS`-dependent number of `perGpuAttributes`.
    pub uvm_gpu_attributes: usize,
    /// `UVM_FREE_PARAMS`' `rmStatus`; `length` went in 590.
    pub uvm_free_status: usize,
    /// Whether there is `UVM_MM_INITIALIZE`.
    pub has_uvm_mm: bool,
    /// Whether there is `UVM_ALLOC_DEVICE_P2P`.
    pub has_uvm_p2p: bool,
}

impl Abi {
    /// The sizes of that release.
    #[must_use]
    pub fn of(version: &Version) -> Self {
        let since = |major, minor, patch| version.since(major, minor, patch);
        let pick = |newer: bool, new, old| if newer { new } else { old };
        Abi {
            nvos21_status: if since(535, 43, 2) { 28 } else { 24 },
            nvos64_bytes: if since(535, 43, 2) { 48 } else { 40 },
            nvos64_status: match () {
                () if since(535, 43, 2) => 40,
                () if since(525, 0, 0) => 36,
                () => 32,
            },
            nvos46: pick(since(580, 0, 0), (64, 56), (56, 48)),
            nvos47: pick(since(550, 0, 0), (48, 40), (40, 32)),
            memory_params_bytes: if since(545, 0, 0) { 128 } else { 120 },
            fb_info_max_list: match () {
                // No such driver: one that has grown as they do.
                () if since(900, 0, 0) => 0x83,
                () if since(580, 0, 0) => 0x80,
                () if since(560, 0, 0) => 0x39,
                () if since(545, 0, 0) => 0x37,
                () => 0x36,
            },
            probed_ids_bytes: if since(580, 0, 0) { 384 } else { 256 },
            samples: match () {
                () if since(570, 0, 0) => (55888, 776, 128),
                () if since(550, 0, 0) => (50704, 704, 116),
                () if since(525, 0, 0) => (34000, 472, 116),
                () => (47216, 472, 116),
            },
            schedule_bytes: if since(575, 0, 0) { 3 } else { 2 },
            vaspace_params_bytes: if since(580, 0, 0) { 56 } else { 48 },
            fabric_params: pick(since(535, 43, 2), (48, 40), (40, 32)),
            export_dmabuf: pick(since(570, 0, 0), (2608, 2600), (2600, 2592)),
            export_info: pick(since(545, 0, 0), (80, 12), (76, 8)),
            uvm_gpu_attributes: if since(550, 54, 0) { 256 } else { 32 },
            uvm_free_status: if since(590, 0, 0) { 8 } else { 16 },
            has_uvm_mm: since(535, 0, 0),
            has_uvm_p2p: since(570, 0, 0),
        }
    }

    /// Bytes of `UVM_MAP_EXTERNAL_ALLOCATION_PARAMS`.
    #[must_use]
    pub fn uvm_map_external_bytes(&self) -> usize {
        self.uvm_map_external_tail() + 24
    }

    /// Offset of its `gpuAttributesCount`; then `rmCtrlFd`, `hClient`, `hMemory`, `rmStatus`.
    #[must_use]
    pub fn uvm_map_external_tail(&self) -> usize {
        24 + self.uvm_gpu_attributes * UVM_GPU_MAPPING_ATTRIBUTES_BYTES
    }

    /// The struct of a UVM call: its bytes and the offset of its `rmStatus`, which ends it.
    #[must_use]
    pub fn uvm(&self, number: u32) -> Option<(usize, usize)> {
        let pool = 16 + self.uvm_gpu_attributes * UVM_GPU_MAPPING_ATTRIBUTES_BYTES + 8;
        Some(match number {
            UVM_INITIALIZE => (16, 8),
            UVM_MM_INITIALIZE if self.has_uvm_mm => (8, 4),
            UVM_PAGEABLE_MEM_ACCESS => (8, 4),
            23 | 24 => (16, 8),
            UVM_REGISTER_GPU_VASPACE => (32, 28),
            UVM_UNREGISTER_GPU_VASPACE | UVM_UNREGISTER_GPU | 54 | 55 => (20, 16),
            27 => (56, 48),
            28 => (28, 24),
            29 | 30 => (36, 32),
            31 => (32, 24),
            UVM_MAP_EXTERNAL_ALLOCATION => {
                (self.uvm_map_external_bytes(), self.uvm_map_external_bytes() - 4)
            }
            UVM_FREE => (self.uvm_free_status + 8, self.uvm_free_status),
            UVM_REGISTER_GPU => (40, 36),
            40 | 41 => (272, 264),
            // `preferredCpuNumaNode` fills the padding in later releases; the end moves.
            42 => (40, if self.uvm_gpu_attributes > 32 { 36 } else { 32 }),
            43
            | 44
            | UVM_DISABLE_READ_DUPLICATION
            | UVM_VALIDATE_VA_RANGE
            | UVM_CREATE_EXTERNAL_RANGE => (24, 16),
            46 | 47 | 65 | UVM_UNMAP_EXTERNAL | 74 => (40, 32),
            51 => (80, 72),
            53 => (32, 24),
            67 | 69 => (4, 0),
            UVM_ALLOC_SEMAPHORE_POOL => (pool + 8, pool),
            70 | 71 => (24, 20),
            UVM_ALLOC_DEVICE_P2P if self.has_uvm_p2p => (56, 52),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn abi(text: &str) -> Abi {
        Abi::of(&text.parse().unwrap())
    }

    #[test]
    fn sizes_are_those_the_headers_compile_to() {
        assert_eq!(abi("535.161.08").memory_params_bytes, 120);
        assert_eq!(abi("550.54.14").memory_params_bytes, 128);
        assert_eq!(abi("535.161.08").uvm_map_external_bytes(), 1200);
        assert_eq!(abi("550.54.14").uvm_map_external_bytes(), 9264);
        assert_eq!(abi("550.54.14").uvm(UVM_ALLOC_SEMAPHORE_POOL), Some((9248, 9240)));
        assert_eq!(abi("595.45.04").uvm(UVM_FREE), Some((16, 8)));
        assert_eq!((abi("470.57.02").nvos64_bytes, abi("525.60.13").nvos64_status), (40, 36));
        assert_eq!(4 + 8 * abi("570.86.15").fb_info_max_list, 460);
    }

    #[test]
    fn versions_are_numbers_between_dots() {
        for wrong in ["", "535", "535.x", "1.2.3.4"] {
            assert!(wrong.parse::<Version>().is_err(), "{wrong}");
        }
        assert!("535.161.08".parse::<Version>().unwrap().since(535, 161, 8));
    }
}
