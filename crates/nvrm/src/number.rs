//! The driver's numbers: calls, classes, controls, functions, flags, statuses.
//!
//! Spelt as upstream spells them and grouped by the header they come from, so that a
//! search in the driver's source finds them. Each was compared, by compiling it, with
//! the headers of all releases of `NVIDIA/open-gpu-kernel-modules` from 515.43.04 to
//! 595.45.04; the test of the headers does it again for any source it is given.

/// Constants of one header, and the list of them that tests compare with it.
macro_rules! upstream {
    ($($header:literal: $($name:ident = $value:expr;)*)*) => {
        $($(
            #[doc = concat!("`", stringify!($name), "` of `", $header, "`.")]
            pub const $name: u32 = $value;
        )*)*

        /// All of them: header, name, value.
        #[cfg(test)]
        pub(super) const ALL: &[(&str, &str, u32)] =
            &[$($(($header, stringify!($name), $value),)*)*];
    };
}

upstream! {
    "nv_escape.h":
        NV_ESC_RM_ALLOC_MEMORY = 0x27;
        NV_ESC_RM_ALLOC_OBJECT = 0x28;
        NV_ESC_RM_FREE = 0x29;
        NV_ESC_RM_CONTROL = 0x2a;
        NV_ESC_RM_ALLOC = 0x2b;
        NV_ESC_RM_DUP_OBJECT = 0x34;
        NV_ESC_RM_SHARE = 0x35;
        NV_ESC_RM_IDLE_CHANNELS = 0x41;
        NV_ESC_RM_VID_HEAP_CONTROL = 0x4a;
        NV_ESC_RM_MAP_MEMORY = 0x4e;
        NV_ESC_RM_UNMAP_MEMORY = 0x4f;
        NV_ESC_RM_ALLOC_CONTEXT_DMA2 = 0x54;
        NV_ESC_RM_MAP_MEMORY_DMA = 0x57;
        NV_ESC_RM_UNMAP_MEMORY_DMA = 0x58;
        NV_ESC_RM_BIND_CONTEXT_DMA = 0x59;
        NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO = 0x5e;

    "nv-ioctl-numbers.h":
        NV_ESC_CARD_INFO = 200;
        NV_ESC_REGISTER_FD = 201;
        NV_ESC_ALLOC_OS_EVENT = 206;
        NV_ESC_FREE_OS_EVENT = 207;
        NV_ESC_STATUS_CODE = 209;
        NV_ESC_CHECK_VERSION_STR = 210;
        NV_ESC_IOCTL_XFER_CMD = 211;
        NV_ESC_ATTACH_GPUS_TO_FD = 212;
        NV_ESC_SYS_PARAMS = 214;
        NV_ESC_EXPORT_TO_DMABUF_FD = 217;
        NV_ESC_WAIT_OPEN_COMPLETE = 218;

    "nv-ioctl-numa.h":
        NV_ESC_NUMA_INFO = 215;

    "nvstatuscodes.h":
        NV_OK = 0;
        NV_ERR_BUSY_RETRY = 0x03;
        NV_ERR_INSERT_DUPLICATE_NAME = 0x19;
        NV_ERR_INSUFFICIENT_RESOURCES = 0x1a;
        NV_ERR_INSUFFICIENT_PERMISSIONS = 0x1b;
        NV_ERR_INVALID_ADDRESS = 0x1e;
        NV_ERR_INVALID_ARGUMENT = 0x1f;
        NV_ERR_INVALID_CLASS = 0x22;
        NV_ERR_INVALID_CLIENT = 0x23;
        NV_ERR_INVALID_DEVICE = 0x26;
        NV_ERR_ILLEGAL_ACTION = 0x16;
        NV_ERR_INVALID_OBJECT_HANDLE = 0x33;
        NV_ERR_INVALID_OBJECT_PARENT = 0x36;
        NV_ERR_INVALID_PARAM_STRUCT = 0x3a;
        NV_ERR_INVALID_PARAMETER = 0x3b;
        NV_ERR_NO_MEMORY = 0x51;
        NV_ERR_NOT_SUPPORTED = 0x56;
        NV_ERR_OUT_OF_RANGE = 0x5b;
        NV_ERR_STATE_IN_USE = 0x63;
        NV_ERR_UVM_ADDRESS_IN_USE = 0x68;
        NV_ERR_OBJECT_NOT_FOUND = 0x57;

    "class/cl0000.h":
        NV01_ROOT = 0;
    "class/cl0001.h":
        NV01_ROOT_NON_PRIV = 1;
    "class/cl0002.h":
        NV01_CONTEXT_DMA = 2;
    "class/cl0004.h":
        NV01_TIMER = 4;
    "class/cl0005.h":
        NV01_EVENT = 5;
    "class/cl000f.h":
        FABRIC_MANAGER_SESSION = 0x0f;
    "class/cl0020.h":
        NV0020_GPU_MANAGEMENT = 0x20;
    "class/cl003e.h":
        NV01_MEMORY_SYSTEM = 0x3e;
    "class/cl003f.h":
        NV01_MEMORY_LOCAL_PRIVILEGED = 0x3f;
    "class/cl0040.h":
        NV01_MEMORY_LOCAL_USER = 0x40;
    "class/cl0041.h":
        NV01_ROOT_CLIENT = 0x41;
    "class/cl0042.h":
        NV_MEMORY_EXTENDED_USER = 0x42;
    "class/cl0050.h":
        NV_CE_UTILS = 0x50;
    "class/cl0060.h":
        NV0060_SYNC_GPU_BOOST = 0x60;
    "class/cl0070.h":
        NV01_MEMORY_VIRTUAL = 0x70;
    "class/cl0071.h":
        NV01_MEMORY_SYSTEM_OS_DESCRIPTOR = 0x71;
    "class/cl0073.h":
        NV04_DISPLAY_COMMON = 0x73;
    "class/cl0076.h":
        NV01_MEMORY_FRAMEBUFFER_CONSOLE = 0x76;
    "class/cl0080.h":
        NV01_DEVICE_0 = 0x80;
    "class/cl84a0.h":
        NV01_MEMORY_LIST_SYSTEM = 0x81;
        NV01_MEMORY_LIST_FBMEM = 0x82;
        NV01_MEMORY_LIST_OBJECT = 0x83;
    "class/cl00b1.h":
        NV01_MEMORY_HW_RESOURCES = 0xb1;
    "class/cl00c2.h":
        NV01_MEMORY_LOCAL_PHYSICAL = 0xc2;
    "class/cl00c3.h":
        NV01_MEMORY_SYNCPOINT = 0xc3;
    "class/cl00da.h":
        NV_SEMAPHORE_SURFACE = 0xda;
    "class/cl00db.h":
        NV40_DEBUG_BUFFER = 0xdb;
    "class/cl00de.h":
        RM_USER_SHARED_DATA = 0xde;
    "class/cl00e0.h":
        NV_MEMORY_EXPORT = 0xe0;
    "class/cl00f1.h":
        NV_IMEX_SESSION = 0xf1;
    "class/cl00f3.h":
        NV01_MEMORY_FLA = 0xf3;
    "class/cl00f8.h":
        NV_MEMORY_FABRIC = 0xf8;
    "class/cl00f9.h":
        NV_MEMORY_FABRIC_IMPORT_V2 = 0xf9;
    "class/cl00fb.h":
        NV_MEMORY_FABRIC_IMPORTED_REF = 0xfb;
    "class/cl00fd.h":
        NV_MEMORY_MULTICAST_FABRIC = 0xfd;
    "class/cl00fe.h":
        NV_MEMORY_MAPPER = 0xfe;
    "class/cl2080.h":
        NV20_SUBDEVICE_0 = 0x2080;
    "class/cl50a0.h":
        NV50_MEMORY_VIRTUAL = 0x50a0;
    "class/cl90cd.h":
        NV_EVENT_BUFFER = 0x90cd;
    "class/cl90ce.h":
        NV01_MEMORY_DEVICELESS = 0x90ce;
    "class/cl90f1.h":
        FERMI_VASPACE_A = 0x90f1;
    "class/cla06c.h":
        KEPLER_CHANNEL_GROUP_A = 0xa06c;

    "class/clb069.h":
        MAXWELL_FAULT_BUFFER_A = 0xb069;
    "class/clc076.h":
        GP100_UVM_SW = 0xc076;
    "class/clc365.h":
        ACCESS_COUNTER_NOTIFY_BUFFER = 0xc365;
    "class/clc369.h":
        MMU_FAULT_BUFFER = 0xc369;
    "class/clc574.h":
        UVM_CHANNEL_RETAINER = 0xc574;
    "class/clc763.h":
        MMU_VIDMEM_ACCESS_BIT_BUFFER = 0xc763;
    "class/clc863.h":
        HOPPER_MMU_VIDMEM_ACCESS_BIT_BUFFER = 0xc863;
    "nvos.h":
        NV01_EVENT_KERNEL_CALLBACK = 0x78;
        NV01_EVENT_OS_EVENT = 0x79;
        NV01_EVENT_KERNEL_CALLBACK_EX = 0x7e;
        NVOS32_FUNCTION_ALLOC_SIZE = 2;
        NVOS32_FUNCTION_FREE = 3;
        NVOS32_FUNCTION_INFO = 5;
        NVOS32_FUNCTION_ALLOC_TILED_PITCH_HEIGHT = 6;
        NVOS32_FUNCTION_ALLOC_SIZE_RANGE = 14;
        NVOS32_FUNCTION_REACQUIRE_COMPR = 15;
        NVOS32_FUNCTION_RELEASE_COMPR = 16;
        NVOS32_FUNCTION_GET_MEM_ALIGNMENT = 18;
        NVOS32_FUNCTION_HW_ALLOC = 19;
        NVOS32_FUNCTION_HW_FREE = 20;
        NVOS32_FUNCTION_ALLOC_OS_DESCRIPTOR = 27;
        NVOS32_ALLOC_FLAGS_MEMORY_HANDLE_PROVIDED = 0x4000;
        NVOS32_ALLOC_FLAGS_VIRTUAL = 0x8_0000;
        NVOS32_ATTR_LOCATION_VIDMEM = 0;
        NVOS54_FLAGS_IRQL_RAISED = 1;
        NVOS54_FLAGS_LOCK_BYPASS = 2;
        // Both since 525.47.04.
        NVOS54_FLAGS_FINN_SERIALIZED = 4;
        NVOS64_FLAGS_FINN_SERIALIZED = 1;

    "ctrl/ctrl0000/ctrl0000unix.h":
        NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO = 0x3d08;
        NV0000_CTRL_CMD_OS_UNIX_CREATE_EXPORT_OBJECT_FD = 0x3d0a;
        NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD = 0x3d05;
        NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD = 0x3d06;
        NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD = 0x3d0b;
        NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECTS_FROM_FD = 0x3d0c;
        NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_TYPE_NONE = 0;
    "ctrl/ctrl00e0.h":
        NV00E0_CTRL_CMD_EXPORT_MEM = 0xe0_0101;
        NV00E0_CTRL_CMD_IMPORT_MEM = 0xe0_0102;
    "ctrl/ctrl00f8.h":
        NV00F8_CTRL_CMD_ATTACH_MEM = 0xf8_0103;
    "ctrl/ctrl00fd.h":
        NV00FD_CTRL_CMD_ATTACH_GPU = 0xfd_0104;
        NV00FD_CTRL_CMD_ATTACH_MEM = 0xfd_0102;
    "ctrl/ctrl503c.h":
        NV503C_CTRL_CMD_REGISTER_VIDMEM = 0x503c_0104;
        NV503C_CTRL_CMD_UNREGISTER_VIDMEM = 0x503c_0105;
    "ctrl/ctrl2080/ctrl2080gpu.h":
        NV2080_CTRL_CMD_GPU_GET_INFO = 0x2080_0101;
        NV2080_CTRL_CMD_GPU_EXEC_REG_OPS = 0x2080_0122;
        NV2080_CTRL_CMD_GPU_GET_ENGINES = 0x2080_0123;
        NV2080_CTRL_CMD_GPU_GET_ENGINE_CLASSLIST = 0x2080_0124;
        NV2080_CTRL_GPU_GET_NVENC_SW_SESSION_INFO = 0x2080_016e;
        NV2080_CTRL_GPU_GET_NVENC_SW_SESSION_INFO_V2 = 0x2080_01af;
        NV2080_CTRL_GPU_GET_NVFBC_SW_SESSION_INFO = 0x2080_017c;
        NV2080_CTRL_CMD_GPU_GET_GID_INFO = 0x2080_014a;
        NV2080_CTRL_CMD_GPU_GET_PIDS = 0x2080_018d;
        NV2080_CTRL_CMD_GPU_GET_PID_INFO = 0x2080_018e;
    "ctrl/ctrl2080/ctrl2080event.h":
        NV2080_CTRL_CMD_EVENT_VIDEO_BIND_EVTBUF = 0x2080_0309;
    "ctrl/ctrl2080/ctrl2080fifo.h":
        NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS = 0x2080_110b;
    "ctrl/ctrl2080/ctrl2080fb.h":
        NV2080_CTRL_CMD_FB_GET_INFO = 0x2080_1301;
        NV2080_CTRL_CMD_FB_GET_INFO_V2 = 0x2080_1303;
        NV2080_CTRL_FB_INFO_INDEX_RAM_SIZE = 0x07;
        NV2080_CTRL_FB_INFO_INDEX_TOTAL_RAM_SIZE = 0x08;
        NV2080_CTRL_FB_INFO_INDEX_HEAP_SIZE = 0x09;
        NV2080_CTRL_FB_INFO_INDEX_MAPPABLE_HEAP_SIZE = 0x0a;
        NV2080_CTRL_FB_INFO_INDEX_LARGEST_FREE_REGION_SIZE_KB = 0x12;
        NV2080_CTRL_FB_INFO_INDEX_HEAP_FREE = 0x16;
        NV2080_CTRL_FB_INFO_INDEX_USABLE_RAM_SIZE = 0x20;
    "ctrl/ctrla06c.h":
        NVA06C_CTRL_CMD_GPFIFO_SCHEDULE = 0xa06c_0101;
        NVA06C_CTRL_CMD_SET_TIMESLICE = 0xa06c_0103;
        NVA06C_CTRL_CMD_GET_TIMESLICE = 0xa06c_0104;
        NVA06C_CTRL_CMD_PREEMPT = 0xa06c_0105;
        NVA06C_CTRL_CMD_SET_INTERLEAVE_LEVEL = 0xa06c_0107;
        NVA06C_CTRL_CMD_GET_INTERLEAVE_LEVEL = 0xa06c_0108;
    "ctrl/ctrla06f/ctrla06fgpfifo.h":
        NVA06F_CTRL_CMD_GPFIFO_SCHEDULE = 0xa06f_0103;
        NVA06F_CTRL_CMD_RESTART_RUNLIST = 0xa06f_0111;
    "ctrl/ctrl0000/ctrl0000client.h":
        NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE = 0xd01;
        NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO = 0xd02;
        NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE_SYSMEM = 1;
        NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE_VIDMEM = 2;
        NV0000_CTRL_CMD_CLIENT_SUBSCRIBE_TO_IMEX_CHANNEL = 0xd08;
    "ctrl/ctrl0000/ctrl0000gpu.h":
        NV0000_CTRL_CMD_GPU_GET_ID_INFO = 0x202;
    "ctrl/ctrl0000/ctrl0000gpuacct.h":
        NV0000_CTRL_CMD_GPUACCT_GET_PROC_ACCOUNTING_INFO = 0xb03;
        NV0000_CTRL_CMD_GPUACCT_GET_ACCOUNTING_PIDS = 0xb04;
    "ctrl/ctrl0000/ctrl0000nvd.h":
        NV0000_CTRL_CMD_NVD_GET_RCERR_RPT = 0x607;
    "ctrl/ctrl0000/ctrl0000system.h":
        NV0000_CTRL_CMD_SYSTEM_GET_BUILD_VERSION = 0x101;
        NV0000_CTRL_CMD_SYSTEM_GET_P2P_CAPS = 0x127;
    "ctrl/ctrl0041.h":
        NV0041_CTRL_CMD_GET_SURFACE_INFO = 0x41_0110;
    "ctrl/ctrl0080/ctrl0080bsp.h":
        NV0080_CTRL_CMD_BSP_GET_CAPS = 0x80_1c01;
    "ctrl/ctrl0080/ctrl0080fb.h":
        NV0080_CTRL_CMD_FB_GET_CAPS = 0x80_1301;
    "ctrl/ctrl0080/ctrl0080fifo.h":
        NV0080_CTRL_CMD_FIFO_GET_CAPS = 0x80_1701;
        NV0080_CTRL_CMD_FIFO_GET_CHANNELLIST = 0x80_170d;
    "ctrl/ctrl0080/ctrl0080gpu.h":
        NV0080_CTRL_CMD_GPU_GET_CLASSLIST = 0x80_0201;
        NV0080_CTRL_CMD_GPU_FIND_SUBDEVICE_HANDLE = 0x80_0293;
    "ctrl/ctrl0080/ctrl0080gr.h":
        NV0080_CTRL_CMD_GR_GET_CAPS = 0x80_1102;
        NV0080_CTRL_CMD_GR_GET_INFO = 0x80_1104;
    "ctrl/ctrl0080/ctrl0080host.h":
        NV0080_CTRL_CMD_HOST_GET_CAPS = 0x80_1401;
    "ctrl/ctrl0080/ctrl0080msenc.h":
        NV0080_CTRL_CMD_MSENC_GET_CAPS = 0x80_1b01;
    "ctrl/ctrl00da.h":
        NV_SEMAPHORE_SURFACE_CTRL_CMD_REF_MEMORY = 0xda_0001;
        NV_SEMAPHORE_SURFACE_CTRL_CMD_REGISTER_WAITER = 0xda_0003;
        NV_SEMAPHORE_SURFACE_CTRL_CMD_UNREGISTER_WAITER = 0xda_0005;
    "ctrl/ctrl00fe.h":
        NV00FE_CTRL_CMD_SUBMIT_OPERATIONS = 0xfe_0101;
    "ctrl/ctrl5080.h":
        NV5080_CTRL_CMD_DEFERRED_API = 0x5080_0101;
        NV5080_CTRL_CMD_DEFERRED_API_V2 = 0x5080_0103;
    "ctrl/ctrl2080/ctrl2080bios.h":
        NV2080_CTRL_CMD_BIOS_GET_INFO = 0x2080_0802;
    "ctrl/ctrl2080/ctrl2080gr.h":
        NV2080_CTRL_CMD_GR_GET_INFO = 0x2080_1201;
        NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE = 0x2080_1210;
        NV2080_CTRL_CMD_GR_FECS_BIND_EVTBUF_FOR_UID = 0x2080_1231;
        NV2080_CTRL_CMD_GR_FECS_BIND_EVTBUF_FOR_UID_V2 = 0x2080_1238;
    "ctrl/ctrl2080/ctrl2080bus.h":
        NV2080_CTRL_CMD_BUS_GET_INFO = 0x2080_1802;
    "ctrl/ctrl2080/ctrl2080perf.h":
        NV2080_CTRL_CMD_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2 = 0x2080_2096;
        NV2080_CTRL_CMD_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES = 0x2080_a083;
    "ctrl/ctrl2080/ctrl2080ce.h":
        NV2080_CTRL_CMD_CE_GET_CAPS = 0x2080_2a01;
    "ctrl/ctrl83de/ctrl83dedebug.h":
        NV83DE_CTRL_CMD_DEBUG_READ_MEMORY = 0x83de_0315;
        NV83DE_CTRL_CMD_DEBUG_WRITE_MEMORY = 0x83de_0316;
    "ctrl/ctrl90cc/ctrl90cchwpm.h":
        NV90CC_CTRL_CMD_HWPM_GET_RESERVATION_INFO = 0x90cc_0103;
    "ctrl/ctrla0bc.h":
        NVA0BC_CTRL_CMD_NVENC_SW_SESSION_UPDATE_INFO = 0xa0bc_0101;

    "uvm_ioctl.h":
        UVM_CREATE_RANGE_GROUP = 23;
        UVM_DESTROY_RANGE_GROUP = 24;
        UVM_REGISTER_GPU_VASPACE = 25;
        UVM_UNREGISTER_GPU_VASPACE = 26;
        UVM_REGISTER_CHANNEL = 27;
        UVM_UNREGISTER_CHANNEL = 28;
        UVM_ENABLE_PEER_ACCESS = 29;
        UVM_DISABLE_PEER_ACCESS = 30;
        UVM_SET_RANGE_GROUP = 31;
        UVM_MAP_EXTERNAL_ALLOCATION = 33;
        UVM_FREE = 34;
        UVM_REGISTER_GPU = 37;
        UVM_UNREGISTER_GPU = 38;
        UVM_PAGEABLE_MEM_ACCESS = 39;
        UVM_PREVENT_MIGRATION_RANGE_GROUPS = 40;
        UVM_ALLOW_MIGRATION_RANGE_GROUPS = 41;
        UVM_SET_PREFERRED_LOCATION = 42;
        UVM_UNSET_PREFERRED_LOCATION = 43;
        UVM_ENABLE_READ_DUPLICATION = 44;
        UVM_DISABLE_READ_DUPLICATION = 45;
        UVM_SET_ACCESSED_BY = 46;
        UVM_UNSET_ACCESSED_BY = 47;
        UVM_MIGRATE = 51;
        UVM_MIGRATE_RANGE_GROUP = 53;
        UVM_MAP_DYNAMIC_PARALLELISM_REGION = 65;
        UVM_UNMAP_EXTERNAL = 66;
        UVM_ALLOC_SEMAPHORE_POOL = 68;
        UVM_CLEAN_UP_ZOMBIE_RESOURCES = 69;
        UVM_PAGEABLE_MEM_ACCESS_ON_GPU = 70;
        UVM_POPULATE_PAGEABLE = 71;
        UVM_VALIDATE_VA_RANGE = 72;
        UVM_CREATE_EXTERNAL_RANGE = 73;
        UVM_MAP_EXTERNAL_SPARSE = 74;
        UVM_MM_INITIALIZE = 75;
        UVM_ALLOC_DEVICE_P2P = 78;
        UVM_DISCARD = 80;
    "uvm_linux_ioctl.h":
        UVM_INITIALIZE = 0x3000_0001;
        UVM_DEINITIALIZE = 0x3000_0002;
    "uvm_types.h":
        UVM_INIT_FLAGS_DISABLE_HMM = 1;
        UVM_INIT_FLAGS_MULTI_PROCESS_SHARING_MODE = 2;
}
