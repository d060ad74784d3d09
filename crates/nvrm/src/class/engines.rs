//! Engines and channels by generation of GPUs: classes above 0xff whose making continues.
//!
//! Each new GPU brings some; the kernel's headers of 515.43.04 to 595.45.04 have most, gVisor's nvproxy
//! those of 610, and nouveau's class.h what GPUs of branch 470 decode by. None takes memory that is asked
//! for. A class that isn't in here, nor in [`CLASSES`](super::CLASSES), is refused and reported.

/// In order.
#[rustfmt::skip]
pub static ENGINES: &[u32] = &[
    0x902d, // FERMI_TWOD_A
    0x906f, // GF100_CHANNEL_GPFIFO
    0x9097, // FERMI_A
    0x90b3, // GF100_MSPPP
    0x90b7, // NV90B7_VIDEO_ENCODER
    0x95b1, // GK104_MSVLD
    0x95b2, // GK104_MSPDEC
    0xa040, // KEPLER_INLINE_TO_MEMORY_A
    0xa06f, // KEPLER_CHANNEL_GPFIFO_A
    0xa097, // KEPLER_A
    0xa0b0, // NVA0B0_VIDEO_DECODER
    0xa0b5, // KEPLER_DMA_COPY_A
    0xa0c0, // KEPLER_COMPUTE_A
    0xa140, // KEPLER_INLINE_TO_MEMORY_B
    0xa16f, // KEPLER_CHANNEL_GPFIFO_B
    0xa197, // KEPLER_B
    0xa1c0, // KEPLER_COMPUTE_B
    0xa26f, // KEPLER_CHANNEL_GPFIFO_C
    0xa297, // KEPLER_C
    0xb06f, // MAXWELL_CHANNEL_GPFIFO_A
    0xb097, // MAXWELL_A
    0xb0b0, // NVB0B0_VIDEO_DECODER
    0xb0b5, // MAXWELL_DMA_COPY_A
    0xb0c0, // MAXWELL_COMPUTE_A
    0xb197, // MAXWELL_B
    0xb1c0, // MAXWELL_COMPUTE_B
    0xb4b7, // NVB4B7_VIDEO_ENCODER
    0xb6b0, // NVB6B0_VIDEO_DECODER
    0xb8b0, // NVB8B0_VIDEO_DECODER
    0xb8d1, // NVB8D1_VIDEO_NVJPG
    0xb8fa, // NVB8FA_VIDEO_OFA
    0xc06f, // PASCAL_CHANNEL_GPFIFO_A
    0xc097, // PASCAL_A
    0xc0b5, // PASCAL_DMA_COPY_A
    0xc0b7, // NVC0B7_VIDEO_ENCODER
    0xc0c0, // PASCAL_COMPUTE_A
    0xc197, // PASCAL_B
    0xc1b0, // NVC1B0_VIDEO_DECODER
    0xc1b5, // PASCAL_DMA_COPY_B
    0xc1b7, // NVC1B7_VIDEO_ENCODER
    0xc1c0, // PASCAL_COMPUTE_B
    0xc2b0, // NVC2B0_VIDEO_DECODER
    0xc2b7, // NVC2B7_VIDEO_ENCODER
    0xc361, // VOLTA_USERMODE_A
    0xc36f, // VOLTA_CHANNEL_GPFIFO_A
    0xc397, // VOLTA_A
    0xc3b0, // NVC3B0_VIDEO_DECODER
    0xc3b5, // VOLTA_DMA_COPY_A
    0xc3b7, // NVC3B7_VIDEO_ENCODER
    0xc3c0, // VOLTA_COMPUTE_A
    0xc461, // TURING_USERMODE_A
    0xc46f, // TURING_CHANNEL_GPFIFO_A
    0xc4b0, // NVC4B0_VIDEO_DECODER
    0xc4b7, // NVC4B7_VIDEO_ENCODER
    0xc4c0, // VOLTA_COMPUTE_B
    0xc4d1, // NVC4D1_VIDEO_NVJPG
    0xc561, // AMPERE_USERMODE_A
    0xc56f, // AMPERE_CHANNEL_GPFIFO_A
    0xc597, // TURING_A
    0xc5b5, // TURING_DMA_COPY_A
    0xc5c0, // TURING_COMPUTE_A
    0xc661, // HOPPER_USERMODE_A
    0xc697, // AMPERE_A
    0xc6b0, // NVC6B0_VIDEO_DECODER
    0xc6b5, // AMPERE_DMA_COPY_A
    0xc6c0, // AMPERE_COMPUTE_A
    0xc6fa, // NVC6FA_VIDEO_OFA
    0xc761, // BLACKWELL_USERMODE_A
    0xc797, // AMPERE_B
    0xc7b0, // NVC7B0_VIDEO_DECODER
    0xc7b5, // AMPERE_DMA_COPY_B
    0xc7b7, // NVC7B7_VIDEO_ENCODER
    0xc7c0, // AMPERE_COMPUTE_B
    0xc7fa, // NVC7FA_VIDEO_OFA
    0xc86f, // HOPPER_CHANNEL_GPFIFO_A
    0xc8b5, // HOPPER_DMA_COPY_A
    0xc96f, // BLACKWELL_CHANNEL_GPFIFO_A
    0xc997, // ADA_A
    0xc9b0, // NVC9B0_VIDEO_DECODER
    0xc9b5, // BLACKWELL_DMA_COPY_A
    0xc9b7, // NVC9B7_VIDEO_ENCODER
    0xc9c0, // ADA_COMPUTE_A
    0xc9d1, // NVC9D1_VIDEO_NVJPG
    0xc9fa, // NVC9FA_VIDEO_OFA
    0xca6f, // BLACKWELL_CHANNEL_GPFIFO_B
    0xcab5, // BLACKWELL_DMA_COPY_B
    0xcb97, // HOPPER_A
    0xcba2, // HOPPER_SEC2_WORK_LAUNCH_A
    0xcbc0, // HOPPER_COMPUTE_A
    0xcd40, // BLACKWELL_INLINE_TO_MEMORY_A
    0xcd97, // BLACKWELL_A
    0xcdb0, // NVCDB0_VIDEO_DECODER
    0xcdc0, // BLACKWELL_COMPUTE_A
    0xcdd1, // NVCDD1_VIDEO_NVJPG
    0xcdfa, // NVCDFA_VIDEO_OFA
    0xce97, // BLACKWELL_B
    0xceb0, // NVCEB0_VIDEO_DECODER
    0xceb7, // NVCEB7_VIDEO_ENCODER
    0xcec0, // BLACKWELL_COMPUTE_B
    0xced0, // NVCED0_VIDEO_NVJPG
    0xcefa, // NVCEFA_VIDEO_OFA
    0xcfb0, // NVCFB0_VIDEO_DECODER
    0xcfb7, // NVCFB7_VIDEO_ENCODER
    0xcfd1, // NVCFD1_VIDEO_NVJPG
    0xcffa, // NVCFFA_VIDEO_OFA
    0xd0b7, // NVD0B7_VIDEO_ENCODER
    0xd1b0, // NVD1B0_VIDEO_DECODER
    0xd1b7, // NVD1B7_VIDEO_ENCODER
    0xd1fa, // NVD1FA_VIDEO_OFA
    0xd2b0, // NVD2B0_VIDEO_DECODER
    0xd2d1, // NVD2D1_VIDEO_NVJPG
    0xd2fa, // NVD2FA_VIDEO_OFA
    0xd5b7, // NVD5B7_VIDEO_ENCODER
];

#[cfg(test)]
mod tests {
    use super::super::CLASSES;
    use super::*;

    /// The engines' classes are in order, and the other table has none of them.
    #[test]
    fn engine_classes_are_sorted_and_listed_once() {
        assert!(ENGINES.is_sorted_by(|one, next| one < next) && ENGINES[0] > 0xff);
        assert!(ENGINES.iter().all(|class| CLASSES.iter().all(|listed| listed.class != *class)));
    }
}
