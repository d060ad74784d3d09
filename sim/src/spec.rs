//! What is simulated: the GPUs and the driver's version.

use std::path::PathBuf;
use std::str::FromStr;

use crate::abi::Version;

/// What to simulate, and where.
#[derive(Debug, Clone)]
pub struct SimOptions {
    /// The directory to mount over; it must exist.
    pub dir: PathBuf,
    /// The GPUs, in order of index.
    pub gpus: Vec<GpuSpec>,
    /// The driver.
    pub driver: Version,
}

/// A GPU: its memory, as `16130MiB`, and what the driver keeps of that, as `16130MiB-512MiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuSpec {
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Bytes of that which the driver gives to no client.
    pub reserved_bytes: u64,
}

/// Why a text is no size.
#[derive(Debug, thiserror::Error)]
#[error("\"{text}\" is no size; write it as 16130MiB")]
pub struct SizeError {
    text: String,
}

/// Bytes of a size as `100MiB`, `64KiB`, `2GiB`, `4096` or `0x1000`.
///
/// # Errors
///
/// Where it is written otherwise or exceeds 64 bits.
pub fn size_bytes(text: &str) -> Result<u64, SizeError> {
    let error = || SizeError { text: text.to_owned() };
    let units = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1), ("", 1)];
    let (number, unit) = units
        .into_iter()
        .find_map(|(suffix, bytes)| Some((text.strip_suffix(suffix)?, bytes)))
        .ok_or_else(error)?;
    let number: u64 = match number.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16),
        None => number.parse(),
    }
    .map_err(|_| error())?;
    number.checked_mul(unit).ok_or_else(error)
}

impl FromStr for GpuSpec {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (memory, reserved) = text.split_once('-').unwrap_or((text, "0"));
        Ok(GpuSpec { memory_bytes: size_bytes(memory)?, reserved_bytes: size_bytes(reserved)? })
    }
}

/// A simulated GPU.
#[derive(Debug, Clone)]
pub(crate) struct Gpu {
    pub(crate) memory_bytes: u64,
    pub(crate) reserved_bytes: u64,
    pub(crate) minor: u32,
    /// PCI bus; domain and function are 0, the device is too.
    pub(crate) bus: u8,
    pub(crate) uuid: [u8; 16],
}

/// What the model is called.
pub(crate) const MODEL: &str = "Simulated GPU";

impl Gpu {
    pub(crate) fn new(index: u8, spec: GpuSpec) -> Self {
        let mut uuid = *b"cgpu-sim\x40\x00\x80\x00\x00\x00\x00\x00";
        uuid[15] = index;
        let GpuSpec { memory_bytes, reserved_bytes } = spec;
        Gpu { memory_bytes, reserved_bytes, minor: u32::from(index), bus: 7 + index, uuid }
    }

    /// `gpuId`: the driver makes it of the bus address.
    pub(crate) fn id(&self) -> u32 {
        u32::from(self.bus) << 8
    }

    /// As `/proc` writes it.
    pub(crate) fn bus_id(&self) -> String {
        format!("0000:{:02x}:00.0", self.bus)
    }

    /// As NVML writes it.
    pub(crate) fn uuid_text(&self) -> String {
        let mut text = "GPU-".to_owned();
        for (at, byte) in self.uuid.iter().enumerate() {
            if matches!(at, 4 | 6 | 8 | 10) {
                text.push('-');
            }
            text.push_str(&format!("{byte:02x}"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_units() {
        assert_eq!(size_bytes("16130MiB").unwrap(), 16130 << 20);
        assert_eq!(size_bytes("0x10").unwrap(), 16);
        for wrong in ["", "MiB", "1.5GiB", "99999999999999GiB", "5MB"] {
            assert!(size_bytes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_uuid_reads_as_nvml_writes_it() {
        let gpu = Gpu::new(1, GpuSpec { memory_bytes: 1, reserved_bytes: 0 });
        assert_eq!(gpu.uuid_text(), "GPU-63677075-2d73-696d-4000-800000000001");
    }
}
