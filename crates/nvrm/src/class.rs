//! Which classes take video memory.
//!
//! Taken from `resource_list.h` (which class is what, and which caller may make it) and the
//! constructors it names, of 515.43.04 to 595.45.04. A class is looked up in
//! [`CLASSES`] and [`ENGINES`]; what isn't there isn't made. What the driver takes for
//! itself (contexts, channels, page tables) is asked for by no class and not known here.

mod engines;

pub use engines::ENGINES;

#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use super::number::*;
use super::refuse::Refusal;
use super::release::Release;

/// What making an object of a class does to video memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// It takes as much as is asked for, rounded up by the driver.
    Takes,
    /// It keeps memory of another object alive.
    KeepsAlive,
    /// It takes memory that no process's driver usage has.
    Hidden,
    /// It takes memory of the host, or none.
    Nothing,
    /// It takes none either, and no workload was seen that makes it.
    Unneeded,
    /// It takes what a GPU has once, or shows or changes what others do with it; the driver lets
    /// anybody make it.
    Shared,
    /// It reaches past all accounting; the driver lets root or the kernel alone make it.
    Privileged,
    /// It is not known.
    Unknown,
}

/// A class and its use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassUse {
    /// The class.
    pub class: u32,
    /// What it does.
    pub does: Use,
    /// Why we think so.
    pub why: &'static str,
}

const fn class(class: u32, does: Use, why: &'static str) -> ClassUse {
    ClassUse { class, does, why }
}

/// The driver's default (`NVreg_RestrictProfilingToAdminUsers`) leaves those to administrators.
const PROFILER: &str = "counters of the whole GPU, for profilers";

/// The classes that are judged one by one, sorted: all up to 0xff that `resource_list.h` has had, and
/// above those what workloads were seen to make and what reaches others. What workloads make is what
/// gVisor's nvproxy lets them for compute, utility, video and graphics, and what was recorded.
pub static CLASSES: &[ClassUse] = &[
    class(NV01_ROOT, Use::Nothing, "a client"),
    class(NV01_ROOT_NON_PRIV, Use::Nothing, "a client"),
    class(NV01_CONTEXT_DMA, Use::KeepsAlive, "hMemory"),
    class(NV01_TIMER, Use::Unneeded, "a timer"),
    class(NV01_EVENT, Use::Unneeded, "an event; programs have NV01_EVENT_OS_EVENT"),
    class(FABRIC_MANAGER_SESSION, Use::Unneeded, "the fabric manager's"),
    class(NV0020_GPU_MANAGEMENT, Use::Unneeded, "management of GPUs"),
    class(NV01_MEMORY_SYSTEM, Use::Nothing, "sysmemConstruct refuses LOCATION_VIDMEM"),
    class(NV01_MEMORY_LOCAL_PRIVILEGED, Use::Unneeded, "regmemConstruct: the GPU's registers"),
    class(NV01_MEMORY_LOCAL_USER, Use::Takes, "vidmemConstruct"),
    class(NV01_ROOT_CLIENT, Use::Nothing, "a client"),
    class(NV_MEMORY_EXTENDED_USER, Use::Hidden, "egmmemConstruct: no _checkVidmemClassValidity"),
    class(NV_CE_UTILS, Use::Privileged, "channels of the kernel's"),
    class(NV0060_SYNC_GPU_BOOST, Use::Shared, "clocks of GPUs"),
    class(NV01_MEMORY_VIRTUAL, Use::Nothing, "addresses only"),
    class(NV01_MEMORY_SYSTEM_OS_DESCRIPTOR, Use::Nothing, "the caller's own memory"),
    class(NV04_DISPLAY_COMMON, Use::Nothing, "a display"),
    class(NV01_MEMORY_FRAMEBUFFER_CONSOLE, Use::Privileged, "the console's; for the kernel"),
    class(NV01_EVENT_KERNEL_CALLBACK, Use::Privileged, "an event of the kernel's"),
    class(NV01_EVENT_OS_EVENT, Use::Nothing, "an event"),
    class(NV01_EVENT_KERNEL_CALLBACK_EX, Use::Privileged, "an event of the kernel's"),
    class(NV01_DEVICE_0, Use::Nothing, "a device"),
    class(NV01_MEMORY_LIST_SYSTEM, Use::Privileged, "pages by number"),
    class(NV01_MEMORY_LIST_FBMEM, Use::Privileged, "pages by number"),
    class(NV01_MEMORY_LIST_OBJECT, Use::Privileged, "pages by number"),
    class(NV01_MEMORY_HW_RESOURCES, Use::Unknown, "hwresConstruct: tags, of memory of either kind"),
    class(NV01_MEMORY_LOCAL_PHYSICAL, Use::Privileged, "all of the memory"),
    class(NV01_MEMORY_SYNCPOINT, Use::Unneeded, "a Tegra's semaphores"),
    class(NV_SEMAPHORE_SURFACE, Use::Nothing, "semsurfConstruct: keeps memory of the host alone"),
    class(NV40_DEBUG_BUFFER, Use::Unneeded, "nv_debug_dump.c: memory of the host"),
    class(RM_USER_SHARED_DATA, Use::Nothing, "gpu_user_shared_data.c: memory of the host"),
    class(NV_MEMORY_EXPORT, Use::KeepsAlive, "duplicates what is exported"),
    class(NV_IMEX_SESSION, Use::Unneeded, "a session of another node's memory"),
    class(NV01_MEMORY_FLA, Use::KeepsAlive, "hExportHandle"),
    class(
        NV_MEMORY_FABRIC,
        Use::KeepsAlive,
        "duplicates map.hVidMem for itself, where no figure shows it",
    ),
    class(NV_MEMORY_FABRIC_IMPORT_V2, Use::KeepsAlive, "memory exported elsewhere"),
    class(NV_MEMORY_FABRIC_IMPORTED_REF, Use::KeepsAlive, "memory exported elsewhere"),
    class(NV_MEMORY_MULTICAST_FABRIC, Use::KeepsAlive, "memory attached to it later"),
    class(NV_MEMORY_MAPPER, Use::KeepsAlive, "memory mapped by it"),
    class(NV20_SUBDEVICE_0, Use::Nothing, "a device"),
    class(0x2081, Use::Nothing, "NV2081_BINAPI: questions to the firmware"),
    class(0x2082, Use::Privileged, "NV2082_BINAPI_PRIVILEGED"),
    class(0x208f, Use::Nothing, "NV20_SUBDEVICE_DIAG: diagnostics of a subdevice"),
    class(0x503b, Use::Nothing, "NV50_P2P: two GPUs' peer mappings"),
    class(0x503c, Use::Nothing, "NV50_THIRD_PARTY_P2P, whose registrations are answered by us"),
    class(NV50_MEMORY_VIRTUAL, Use::Nothing, "addresses only"),
    class(0x83de, Use::Nothing, "GT200_DEBUGGER: of a context whose owner gave the right"),
    class(0x900e, Use::Nothing, "MPS_COMPUTE: a mark"),
    class(0x9067, Use::Nothing, "FERMI_CONTEXT_SHARE_A: a channel group's"),
    class(0x9072, Use::Nothing, "GF100_DISP_SW: a channel's"),
    class(0x9096, Use::Nothing, "GF100_ZBC_CLEAR: the table of clear colours, to read"),
    class(0x90cc, Use::Privileged, PROFILER),
    class(NV_EVENT_BUFFER, Use::Shared, "fecs_event_list.c: whatever the same user's clients do"),
    class(NV01_MEMORY_DEVICELESS, Use::Unneeded, "memory of the host"),
    class(0x90e6, Use::Nothing, "GF100_SUBDEVICE_MASTER: interrupt masks, to read"),
    class(0x90e7, Use::Nothing, "GF100_SUBDEVICE_INFOROM: the board's, to read"),
    class(FERMI_VASPACE_A, Use::Nothing, "addresses only"),
    class(KEPLER_CHANNEL_GROUP_A, Use::Nothing, "a channel group"),
    class(0xa0bc, Use::Nothing, "NVENC_SW_SESSION: figures of an encoder"),
    class(MAXWELL_FAULT_BUFFER_A, Use::Privileged, "a GPU has one, which is nvidia-uvm's"),
    class(0xb0cc, Use::Privileged, PROFILER),
    class(0xb1cc, Use::Privileged, PROFILER),
    class(0xb2cc, Use::Privileged, PROFILER),
    class(GP100_UVM_SW, Use::Privileged, "nvidia-uvm's"),
    class(ACCESS_COUNTER_NOTIFY_BUFFER, Use::Shared, "accesscntrConstruct: nvidia-uvm needs it"),
    class(MMU_FAULT_BUFFER, Use::Privileged, "a GPU has one, which is nvidia-uvm's"),
    class(UVM_CHANNEL_RETAINER, Use::Privileged, "nvidia-uvm's"),
    class(0xc639, Use::Nothing, "AMPERE_SMC_CONFIG_SESSION: whether there are partitions"),
    class(0xc640, Use::Nothing, "AMPERE_SMC_MONITOR_SESSION: the same, to look"),
    class(
        MMU_VIDMEM_ACCESS_BIT_BUFFER,
        Use::Shared,
        "which memory is used, whichever process has it",
    ),
    class(HOPPER_MMU_VIDMEM_ACCESS_BIT_BUFFER, Use::Shared, "as the one before"),
    class(0xcb33, Use::Nothing, "NV_CONFIDENTIAL_COMPUTE: questions"),
    class(0xcbca, Use::Privileged, PROFILER),
];

/// What making an object of that class does.
#[must_use]
pub fn class_use(class: u32) -> ClassUse {
    let listed = CLASSES.binary_search_by_key(&class, |listed| listed.class).ok();
    if let Some(listed) = listed.and_then(|at| CLASSES.get(at)) {
        return *listed;
    }
    match ENGINES.binary_search(&class) {
        Ok(_) => ClassUse { class, does: Use::Nothing, why: "an engine or a channel" },
        Err(_) => ClassUse { class, does: Use::Unknown, why: "not known" },
    }
}

/// Why no object of that class is made.
#[must_use]
pub fn refusal(release: &Release, class: u32) -> Refusal {
    let (driver, ClassUse { does, why, .. }) = (release.version(), class_use(class));
    let status = match does {
        Use::Unknown => return Refusal::UnknownClass { driver, class },
        // As the driver answers a caller that isn't root.
        Use::Privileged => NV_ERR_INSUFFICIENT_PERMISSIONS,
        _ => NV_ERR_NOT_SUPPORTED,
    };
    Refusal::Class { driver, class, status, why }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_sorted() {
        assert!(CLASSES.windows(2).all(|pair| pair[0].class < pair[1].class));
    }

    #[test]
    fn what_no_workload_makes_is_not_made() {
        for class in [0x04, 0x05, 0x3f, 0xdb, 0x90ce] {
            assert_eq!(class_use(class).does, Use::Unneeded, "{class:#x}");
        }
        for class in [0x60, 0x90cd, 0xc365, 0xc763] {
            assert_eq!(class_use(class).does, Use::Shared, "{class:#x}");
        }
        // A display, a class of partitions, and whatever a later GPU brings.
        for class in [0xc770, 0xc637, 0xd997, 0x1_c7c0, u32::MAX] {
            assert_eq!(class_use(class).does, Use::Unknown, "{class:#x}");
        }
    }

    #[test]
    fn gpu_memory_is_distinguished_from_host_memory() {
        assert_eq!(class_use(0x40).does, Use::Takes);
        assert_eq!(class_use(0x42).does, Use::Hidden);
        for class in [0x3e, 0x70, 0x71, 0xde, 0x50a0, 0xc7c0, 0xa06c] {
            assert_eq!(class_use(class).does, Use::Nothing, "{class:#x}");
        }
        for class in [0x3a, 0x43, 0xb1, 0xf7, 0xfa, 0xff] {
            assert_eq!(class_use(class).does, Use::Unknown, "{class:#x}");
        }
        assert_eq!(class_use(0xf8).does, Use::KeepsAlive);
    }
}
