//! Controls that reach beyond a container though NVIDIA's headers let anybody make them
//! (`RMCTRL_FLAGS_NON_PRIVILEGED`), and how.
//!
//! Their parameters could be handled. None of the programs whose calls were recorded asks for any of
//! them (`tests/gpu/corpus`).

const ALL: &str = "changes the GPU for all who use it";
const CLIENTS: &str = "reaches channels of whichever client it names";
const TURNS: &str = "takes others' turns on the GPU";
const OTHERS: &str = "shows what others do on the GPU";
const LINK: &str = "measures the link of all who use the GPU";
const BUS: &str = "a transaction on a bus of the board's";
/// Which the driver's default (`NVreg_RestrictProfilingToAdminUsers`) leaves to administrators.
const COUNTERS: &str = "counters of the whole GPU, for profilers";

/// In order.
#[rustfmt::skip]
pub(super) static WITHHELD: &[(u32, &str)] = &[
    (0x0000_012d, ALL), // SYSTEM_GPS_CALL_ACPI
    (0x0000_0138, ALL), // VGPU_SET_VGPU_VERSION
    (0x0000_013d, OTHERS), // SYSTEM_GET_CLIENT_DATABASE_INFO
    (0x0000_0143, ALL), // SYSTEM_PFM_REQ_HNDLR_CALL_ACPI
    (0x0000_0281, ALL), // GPU_DISABLE_NVLINK_INIT
    (0x0080_0297, ALL), // GPU_SET_VGPU_HETEROGENEOUS_MODE
    (0x0080_170f, ALL), // FIFO_SET_CHANNEL_PROPERTIES
    (0x0080_200a, ALL), // INTERNAL_MEMSYS_SET_ZBC_REFERENCED
    (0x00da_0002, CLIENTS), // BIND_CHANNEL, whose client is at 0 up to 555.58.02
    (0x2080_0112, ALL), // GPU_SET_POWER
    (0x2080_0122, CLIENTS), // GPU_EXEC_REG_OPS
    (0x2080_0155, ALL), // GPU_SET_ILLUM
    (0x2080_016f, ALL), // GPU_SET_FABRIC_BASE_ADDR
    (0x2080_0174, ALL), // GPU_SET_PARTITIONS
    (0x2080_0199, ALL), // GPU_SET_EGM_GPA_FABRIC_BASE_ADDR
    (0x2080_01a6, CLIENTS), // GPU_MIGRATABLE_OPS
    (0x2080_01aa, ALL), // GPU_UNMARK_DEVICE_FOR_RESET
    (0x2080_01ac, ALL), // GPU_MARK_DEVICE_FOR_DRAIN_AND_RESET
    (0x2080_01ad, ALL), // GPU_UNMARK_DEVICE_FOR_DRAIN_AND_RESET
    (0x2080_0601, BUS), // I2C_READ_BUFFER
    (0x2080_0602, ALL), // I2C_WRITE_BUFFER
    (0x2080_0603, BUS), // I2C_READ_REG
    (0x2080_0604, ALL), // I2C_WRITE_REG
    (0x2080_0a69, ALL), // INTERNAL_MEMSYS_SET_ZBC_REFERENCED
    (0x2080_1103, CLIENTS), // FIFO_BIND_ENGINES
    (0x2080_110b, TURNS), // FIFO_DISABLE_CHANNELS, which enables those that are off, too
    (0x2080_110e, OTHERS), // FIFO_OBJSCHED_SW_GET_LOG
    (0x2080_1115, ALL), // FIFO_RUNLIST_SET_SCHED_POLICY
    (0x2080_111a, CLIENTS), // FIFO_DISABLE_CHANNELS_FOR_KEY_ROTATION
    (0x2080_111c, CLIENTS), // FIFO_ROTATE_KEYS
    (0x2080_1121, ALL), // FIFO_OBJSCHED_SET_STATE
    (0x2080_1205, CLIENTS), // GR_CTXSW_ZCULL_MODE
    (0x2080_1207, COUNTERS), // GR_CTXSW_PM_MODE
    (0x2080_1209, CLIENTS), // GR_CTXSW_PM_BIND
    (0x2080_120e, COUNTERS), // GR_CTXSW_SMPC_MODE
    (0x2080_1211, CLIENTS), // GR_CTXSW_PREEMPTION_BIND
    (0x2080_1212, COUNTERS), // GR_PC_SAMPLING_MODE
    (0x2080_121c, OTHERS), // GR_GET_CURRENT_RESIDENT_CHANNEL
    (0x2080_123a, CLIENTS), // GR_CTXSW_SETUP_BIND
    (0x2080_130e, ALL), // FB_FLUSH_GPU_CACHE
    (0x2080_1709, ALL), // MC_SET_HOSTCLK_SLOWDOWN_STATUS
    (0x2080_1806, ALL), // BUS_SET_HWBC_UPSTREAM_PCIE_SPEED
    (0x2080_1814, ALL), // BUS_CLEAR_PEX_COUNTERS
    (0x2080_1815, ALL), // BUS_FREEZE_PEX_COUNTERS
    (0x2080_1818, ALL), // BUS_SET_PCIE_LTR_LATENCY
    (0x2080_1820, ALL), // BUS_CLEAR_PEX_UTIL_COUNTERS
    (0x2080_1824, ALL), // BUS_CONTROL_PUBLIC_ASPM_BITS
    (0x2080_1826, ALL), // BUS_SET_EOM_PARAMETERS
    (0x2080_1827, LINK), // BUS_GET_UPHY_DLN_CFG_SPACE
    (0x2080_1828, LINK), // BUS_GET_EOM_STATUS
    (0x2080_1832, ALL), // BUS_SET_C2C_LPWR_STATE_VOTE
    (0x2080_1836, ALL), // BUS_SET_C2C_LPWR_IDLE_THRESHOLD
    (0x2080_205b, ALL), // PERF_SET_POWERSTATE
    (0x2080_206f, ALL), // PERF_RATED_TDP_SET_CONTROL
    (0x2080_2092, ALL), // PERF_SET_AUX_POWER_STATE
    (0x2080_2213, OTHERS), // RC_GET_ERROR_V2
    (0x2080_2502, CLIENTS), // DMA_INVALIDATE_TLB
    (0x2080_4102, ALL), // HSHUB_SET_EC_THROTTLE_MODE
    (0x208f_0506, ALL), // FB_CTRL_GPU_CACHE
    (0x208f_0703, ALL), // BIF_CONFIG_REG_WRITE
    (0x208f_1102, ALL), // GPU_SET_RAM_SVOP_VALUES
    (0x208f_1903, OTHERS), // UCODE_INSTRUMENTATION_GET_DATA
    (0x503c_0106, CLIENTS), // REGISTER_PID
    (0x9096_0101, ALL), // SET_ZBC_COLOR_CLEAR
    (0x9096_0102, ALL), // SET_ZBC_DEPTH_CLEAR
    (0x9096_0104, ALL), // SET_ZBC_CLEAR_TABLE
    (0x9096_0105, ALL), // SET_ZBC_STENCIL_CLEAR
    (0x90cc_0101, COUNTERS), // HWPM_RESERVE
    (0x90cc_0102, COUNTERS), // HWPM_RELEASE
    (0x90cc_0301, COUNTERS), // POWER_REQUEST_FEATURES
    (0x90cc_0302, COUNTERS), // POWER_RELEASE_FEATURES
    (0xa06c_0105, TURNS), // PREEMPT
    (0xa06c_0107, TURNS), // SET_INTERLEAVE_LEVEL
    (0xa06c_0110, TURNS), // MAKE_REALTIME
    (0xa06f_0109, TURNS), // SET_INTERLEAVE_LEVEL
    (0xa06f_0111, ALL), // RESTART_RUNLIST
    (0xb0cc_0101, COUNTERS), // RESERVE_HWPM_LEGACY
    (0xb0cc_0102, COUNTERS), // RELEASE_HWPM_LEGACY
    (0xb0cc_0103, COUNTERS), // RESERVE_PM_AREA_SMPC
    (0xb0cc_0104, COUNTERS), // RELEASE_PM_AREA_SMPC
    (0xb0cc_0105, COUNTERS), // ALLOC_PMA_STREAM
    (0xb0cc_0106, COUNTERS), // FREE_PMA_STREAM
    (0xb0cc_0107, COUNTERS), // BIND_PM_RESOURCES
    (0xb0cc_0108, COUNTERS), // UNBIND_PM_RESOURCES
    (0xb0cc_0109, COUNTERS), // PMA_STREAM_UPDATE_GET_PUT
    (0xb0cc_010a, COUNTERS), // EXEC_REG_OPS
    (0xb0cc_010b, COUNTERS), // RESERVE_PM_AREA_PC_SAMPLER
    (0xb0cc_010c, COUNTERS), // RELEASE_PM_AREA_PC_SAMPLER
    (0xb0cc_010d, COUNTERS), // GET_TOTAL_HS_CREDITS
    (0xb0cc_010e, COUNTERS), // SET_HS_CREDITS
    (0xb0cc_010f, COUNTERS), // GET_HS_CREDITS
    (0xb0cc_0113, COUNTERS), // RESERVE_HES
    (0xb0cc_0114, COUNTERS), // RELEASE_HES
    (0xb0cc_0115, COUNTERS), // GET_CHIPLET_HS_CREDIT_POOL
    (0xb0cc_0116, COUNTERS), // GET_HS_CREDITS_MAPPING
    (0xb0cc_0117, COUNTERS), // DISABLE_DYNAMIC_MMA_BOOST
    (0xb0cc_0118, COUNTERS), // GET_DYNAMIC_MMA_BOOST_STATUS
    (0xb0cc_0119, COUNTERS), // RESERVE_CCU_PROF
    (0xb0cc_011a, COUNTERS), // RELEASE_CCU_PROF
    (0xb0cc_0201, COUNTERS), // INTERNAL_QUIESCE_PMA_CHANNEL
    (0xb0cc_0203, COUNTERS), // INTERNAL_PERMISSIONS_INIT
    (0xb0cc_0301, COUNTERS), // POWER_REQUEST_FEATURES
    (0xb0cc_0302, COUNTERS), // POWER_RELEASE_FEATURES
    (0xcbca_0101, COUNTERS), // SUBSCRIBE
    (0xcbca_0102, COUNTERS), // UNSUBSCRIBE
    (0xcbca_0103, COUNTERS), // SET_STREAM_STATE
    (0xcbca_0104, COUNTERS), // GET_STREAM_STATE
];

/// Why a control is withheld.
pub(super) fn why(command: u32) -> Option<&'static str> {
    let found = WITHHELD.binary_search_by_key(&command, |(withheld, _)| *withheld).ok()?;
    WITHHELD.get(found).map(|(_, why)| *why)
}

#[cfg(test)]
mod tests {
    use super::super::flat::FLAT;
    use super::super::{ControlKind, NESTED, known};
    use super::*;

    #[test]
    fn each_would_be_made_otherwise() {
        assert!(WITHHELD.is_sorted_by_key(|(command, _)| *command));
        for (command, why) in WITHHELD {
            let is_nested = NESTED.iter().any(|nested| nested.command == *command);
            assert!(is_nested || FLAT.binary_search(command).is_ok(), "{command:#x}");
            assert_eq!(known(*command), Some(ControlKind::Refused(why)), "{command:#x}");
        }
    }
}
