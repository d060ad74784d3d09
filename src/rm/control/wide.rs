//! Controls that change a GPU, or the machine, for all who use it.
//!
//! Their parameters are numbers, and NVIDIA's headers let anybody make them
//! (`RMCTRL_FLAGS_NON_PRIVILEGED`); what a container is told and what it takes is no matter of theirs.
//! None of the programs whose calls were recorded asks for any of them (`tests/gpu/corpus`).

/// In order.
#[rustfmt::skip]
pub(super) static WIDE: &[u32] = &[
    0x0000_0281, // GPU_DISABLE_NVLINK_INIT
    0x2080_0112, // GPU_SET_POWER
    0x2080_0155, // GPU_SET_ILLUM
    0x2080_016f, // GPU_SET_FABRIC_BASE_ADDR
    0x2080_0174, // GPU_SET_PARTITIONS
    0x2080_0199, // GPU_SET_EGM_GPA_FABRIC_BASE_ADDR
    0x2080_01aa, // GPU_UNMARK_DEVICE_FOR_RESET
    0x2080_01ac, // GPU_MARK_DEVICE_FOR_DRAIN_AND_RESET
    0x2080_01ad, // GPU_UNMARK_DEVICE_FOR_DRAIN_AND_RESET
    0x2080_0602, // I2C_WRITE_BUFFER
    0x2080_0604, // I2C_WRITE_REG
    0x2080_1115, // FIFO_RUNLIST_SET_SCHED_POLICY
    // Takes channels off the GPU, whoever's they are.
    0x2080_111a, // FIFO_DISABLE_CHANNELS_FOR_KEY_ROTATION
    0x2080_1709, // MC_SET_HOSTCLK_SLOWDOWN_STATUS
    0x2080_1806, // BUS_SET_HWBC_UPSTREAM_PCIE_SPEED
    0x2080_1818, // BUS_SET_PCIE_LTR_LATENCY
    0x2080_1826, // BUS_SET_EOM_PARAMETERS
    0x2080_1832, // BUS_SET_C2C_LPWR_STATE_VOTE
    0x2080_1836, // BUS_SET_C2C_LPWR_IDLE_THRESHOLD
    0x2080_205b, // PERF_SET_POWERSTATE
    0x2080_206f, // PERF_RATED_TDP_SET_CONTROL
    0x2080_2092, // PERF_SET_AUX_POWER_STATE
    0x2080_4102, // HSHUB_SET_EC_THROTTLE_MODE
];

#[cfg(test)]
mod tests {
    use super::super::flat::FLAT;
    use super::super::{Known, known};
    use super::*;

    #[test]
    fn each_would_be_made_otherwise() {
        assert!(WIDE.is_sorted());
        for command in WIDE {
            assert!(FLAT.binary_search(command).is_ok(), "{command:#x}");
            assert!(matches!(known(*command), Some(Known::Refused(_))), "{command:#x}");
        }
    }
}
