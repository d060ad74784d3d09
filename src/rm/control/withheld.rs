//! Controls that reach beyond a container though NVIDIA's headers let anybody make them
//! (`RMCTRL_FLAGS_NON_PRIVILEGED`), and how.
//!
//! Their parameters could be handled. None of the programs whose calls were recorded asks for any of
//! them (`tests/gpu/corpus`).

const ALL: &str = "changes the GPU for all who use it";
const CLIENTS: &str = "reaches channels of whichever client it names";

/// In order.
#[rustfmt::skip]
pub(super) static WITHHELD: &[(u32, &str)] = &[
    (0x0000_0281, ALL), // GPU_DISABLE_NVLINK_INIT
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
    (0x2080_0602, ALL), // I2C_WRITE_BUFFER
    (0x2080_0604, ALL), // I2C_WRITE_REG
    (0x2080_1103, CLIENTS), // FIFO_BIND_ENGINES
    (0x2080_1115, ALL), // FIFO_RUNLIST_SET_SCHED_POLICY
    (0x2080_111a, CLIENTS), // FIFO_DISABLE_CHANNELS_FOR_KEY_ROTATION
    (0x2080_111c, CLIENTS), // FIFO_ROTATE_KEYS
    (0x2080_1205, CLIENTS), // GR_CTXSW_ZCULL_MODE
    (0x2080_1209, CLIENTS), // GR_CTXSW_PM_BIND
    (0x2080_1211, CLIENTS), // GR_CTXSW_PREEMPTION_BIND
    (0x2080_123a, CLIENTS), // GR_CTXSW_SETUP_BIND
    (0x2080_1709, ALL), // MC_SET_HOSTCLK_SLOWDOWN_STATUS
    (0x2080_1806, ALL), // BUS_SET_HWBC_UPSTREAM_PCIE_SPEED
    (0x2080_1818, ALL), // BUS_SET_PCIE_LTR_LATENCY
    (0x2080_1826, ALL), // BUS_SET_EOM_PARAMETERS
    (0x2080_1832, ALL), // BUS_SET_C2C_LPWR_STATE_VOTE
    (0x2080_1836, ALL), // BUS_SET_C2C_LPWR_IDLE_THRESHOLD
    (0x2080_205b, ALL), // PERF_SET_POWERSTATE
    (0x2080_206f, ALL), // PERF_RATED_TDP_SET_CONTROL
    (0x2080_2092, ALL), // PERF_SET_AUX_POWER_STATE
    (0x2080_2502, CLIENTS), // DMA_INVALIDATE_TLB
    (0x2080_4102, ALL), // HSHUB_SET_EC_THROTTLE_MODE
    (0x503c_0106, CLIENTS), // REGISTER_PID
];

/// Why a control is withheld.
pub(super) fn why(command: u32) -> Option<&'static str> {
    let found = WITHHELD.binary_search_by_key(&command, |(withheld, _)| *withheld).ok()?;
    WITHHELD.get(found).map(|(_, why)| *why)
}

#[cfg(test)]
mod tests {
    use super::super::flat::FLAT;
    use super::super::{Known, NESTED, known};
    use super::*;

    #[test]
    fn each_would_be_made_otherwise() {
        assert!(WITHHELD.is_sorted_by_key(|(command, _)| *command));
        for (command, why) in WITHHELD {
            let is_nested = NESTED.iter().any(|nested| nested.command == *command);
            assert!(is_nested || FLAT.binary_search(command).is_ok(), "{command:#x}");
            assert_eq!(known(*command), Some(Known::Refused(why)), "{command:#x}");
        }
    }
}
