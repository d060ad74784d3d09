//! Units of memory as devices: what is reported to the kubelet of each GPU. Pure.
//!
//! A device's id is the beginning of its GPU's UUID and the unit's number, in base 36:
//! `c09d-2z`. It says which GPU it is of whatever its index becomes, and is short: the kubelet takes
//! all devices in one message of a bounded size.

use std::fmt;
use std::str::FromStr;

use cgpu_core::gpu::{Gpu, GpuState};
use thiserror::Error;

/// The most bytes of a message that the kubelet takes: what gRPC's Go library takes if nothing else
/// is said (`defaultClientMaxReceiveMessageSize` of `google.golang.org/grpc`), and the kubelet says
/// nothing else (`pkg/kubelet/cm/devicemanager/plugin/v1beta1/client.go`).
pub const MOST_MESSAGE_BYTES: usize = 4 << 20;

/// What a device takes in a message in addition to its id: two tags and two lengths, `Healthy`, and
/// tag and length of the message. An unhealthy one takes two more.
const DEVICE_BYTES: usize = 2 + 2 + 2 + "Unhealthy".len();

/// The fewest characters of a UUID in an id.
const LEAST_PREFIX: usize = 3;

/// How much memory a unit is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    GiB,
    MiB,
}

impl Unit {
    /// In bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Unit::GiB => 1 << 30,
            Unit::MiB => 1 << 20,
        }
    }

    /// As `ALIYUN_COM_GPU_MEM_UNIT` has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Unit::GiB => "GiB",
            Unit::MiB => "MiB",
        }
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Unit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.to_ascii_lowercase().as_str() {
            "gib" => Ok(Unit::GiB),
            "mib" => Ok(Unit::MiB),
            _ => Err("a unit of memory is GiB or MiB".to_owned()),
        }
    }
}

/// Why the GPUs can't be reported to the kubelet.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum UnitError {
    /// Too many units for the kubelet.
    #[error(
        "the GPUs of this node are {units} units of 1 {unit}, and the kubelet takes {most} at most in \
         its one message; count in GiB: --memory-unit=GiB"
    )]
    TooMany {
        /// How many there are.
        units: u64,
        /// Of which size.
        unit: Unit,
        /// How many the kubelet takes.
        most: usize,
    },
    /// An invalid UUID.
    #[error(
        "GPU {index} has UUID {uuid:?} in the inventory, which is none; correct it there, or have \
         `cgpu gpus --refresh` ask the driver"
    )]
    Uuid { index: u32, uuid: String },
}

/// A GPU whose memory is given out in units.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedGpu {
    /// The driver's index.
    pub index: u32,
    /// `GPU-` and a UUID.
    pub uuid: String,
    /// Units of its memory that can be given out: those that the driver doesn't reserve.
    pub units: u32,
    /// Whole units of all its memory, of which one is so many parts: `ALIYUN_COM_GPU_MEM_DEV`.
    pub whole_units: u32,
    /// Whether it can be given out now.
    pub healthy: bool,
    /// Its model, as the driver names it.
    pub model: String,
    /// Its memory in MiB.
    pub memory_mib: u64,
    /// Where it is: PCI domain, bus, device and function.
    pub bus_id: String,
    prefix: String,
}

impl SharedGpu {
    /// The id of its unit of that number.
    #[must_use]
    pub fn id(&self, number: u32) -> String {
        format!("{}-{}", self.prefix, base36(number))
    }

    /// The ids of all its units.
    pub fn ids(&self) -> impl Iterator<Item = String> {
        (0..self.units).map(|number| self.id(number))
    }
}

/// The GPUs of a node, each with its own memory. One with MIG on isn't among them: it is used by its
/// parts.
///
/// # Errors
///
/// If they can't be reported to the kubelet.
pub fn shared(gpus: &[Gpu], unit: Unit) -> Result<Vec<SharedGpu>, UnitError> {
    let gpus: Vec<&Gpu> = gpus.iter().filter(|gpu| !gpu.mig_enabled).collect();
    let digits = |gpu: &Gpu| -> Result<String, UnitError> {
        let error = || UnitError::Uuid { index: gpu.index, uuid: gpu.uuid.clone() };
        let digits = gpu.uuid.strip_prefix("GPU-").ok_or_else(error)?.replace('-', "");
        let is_one = digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        if is_one { Ok(digits.to_ascii_lowercase()) } else { Err(error()) }
    };
    let digits: Vec<String> = gpus.iter().map(|gpu| digits(gpu)).collect::<Result<_, _>>()?;
    // As few as distinguish each from the others.
    let common = |one: &str, other: &str| {
        one.bytes().zip(other.bytes()).take_while(|(one, other)| one == other).count()
    };
    let alike = digits
        .iter()
        .enumerate()
        .flat_map(|(at, one)| digits.iter().take(at).map(move |other| common(one, other) + 1));
    let length = alike.max().unwrap_or_default().clamp(LEAST_PREFIX, 32);
    let shared: Vec<SharedGpu> = gpus
        .iter()
        .zip(digits)
        .map(|(gpu, digits)| SharedGpu {
            index: gpu.index,
            uuid: gpu.uuid.clone(),
            units: units(gpu, unit),
            whole_units: whole_units(gpu, unit),
            healthy: gpu.state == GpuState::Ok,
            model: gpu.name.clone(),
            memory_mib: gpu.memory_bytes >> 20,
            bus_id: gpu.bus_id.clone(),
            prefix: digits[..length].to_owned(),
        })
        .collect();
    let units: u64 = shared.iter().map(|gpu| u64::from(gpu.units)).sum();
    let largest = shared.iter().map(|gpu| gpu.units).max().unwrap_or_default();
    let most = MOST_MESSAGE_BYTES / (DEVICE_BYTES + length + 1 + base36(largest).len());
    if units > most as u64 {
        return Err(UnitError::TooMany { units, unit, most });
    }
    Ok(shared)
}

fn whole_units(gpu: &Gpu, unit: Unit) -> u32 {
    u32::try_from(gpu.memory_bytes / unit.bytes()).unwrap_or(u32::MAX)
}

/// Units that can be given out, each of which is that part of the GPU's memory.
fn units(gpu: &Gpu, unit: Unit) -> u32 {
    let divisible = u128::from(gpu.memory_bytes.saturating_sub(gpu.reserved_bytes));
    let units = u128::from(whole_units(gpu, unit)) * divisible;
    let units = units.checked_div(gpu.memory_bytes.into()).unwrap_or_default();
    u32::try_from(units).unwrap_or(u32::MAX)
}

/// Which of `gpus` the device of that id is of.
#[must_use]
pub fn gpu_of<'a>(gpus: &'a [SharedGpu], id: &str) -> Option<&'a SharedGpu> {
    let (prefix, number) = id.split_once('-')?;
    let number = u32::from_str_radix(number, 36).ok()?;
    let gpu = gpus.iter().find(|gpu| gpu.prefix == prefix)?;
    (number < gpu.units && gpu.id(number) == id).then_some(gpu)
}

fn base36(mut number: u32) -> String {
    let mut digits = Vec::new();
    loop {
        digits.push(char::from_digit(number % 36, 36).unwrap_or_default());
        number /= 36;
        if number == 0 {
            return digits.iter().rev().collect();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use cgpu_kubelet::api::{Device, ListAndWatchResponse, UNHEALTHY};
    use proptest::prelude::*;
    use prost::Message;

    /// A GPU of that index, whose UUID begins so.
    pub(crate) fn gpu(index: u32, begin: &str, memory_bytes: u64) -> Gpu {
        let rest = "0f11a565-1f83-903c-a65a-7ba138af0000";
        let uuid = format!("GPU-{begin}{}", &rest[begin.len()..]);
        Gpu {
            index,
            uuid,
            minor: index,
            bus_id: String::new(),
            name: String::new(),
            memory_bytes,
            reserved_bytes: 0,
            state: GpuState::Ok,
            mig_enabled: false,
            mig_devices: Vec::new(),
        }
    }

    /// Each GPU has as many units as its own memory.
    #[test]
    fn each_gpu_has_units_of_its_own_memory() {
        let mut lost = gpu(2, "ccc", 80 << 30);
        lost.state = GpuState::Lost;
        let mut mig = gpu(3, "ddd", 80 << 30);
        mig.mig_enabled = true;
        let gpus = [gpu(0, "aaa", 16_130 << 20), gpu(1, "bbb", 24 << 30), lost, mig];
        let found = shared(&gpus, Unit::GiB).unwrap();
        let units: Vec<_> = found.iter().map(|gpu| (gpu.index, gpu.units, gpu.healthy)).collect();
        assert_eq!(units, [(0, 15, true), (1, 24, true), (2, 80, false)]);
        assert_eq!(found[0].id(0), "aaa-0");
        assert_eq!(found[1].ids().last().unwrap(), "bbb-n");
        assert_eq!(shared(&gpus[..1], Unit::MiB).unwrap()[0].units, 16_130);
        // 14 parts of 15 are 15,054 MiB, and all of them more than the driver leaves.
        let keeping = Gpu { reserved_bytes: 512 << 20, ..gpus[0].clone() };
        let found = shared(&[keeping], Unit::GiB).unwrap();
        assert_eq!((found[0].units, found[0].whole_units), (14, 15));
    }

    /// A unit's ID says which GPU the unit is of, and no other text does.
    #[test]
    fn only_valid_unit_ids_identify_a_gpu() {
        let gpus = [gpu(0, "c09d1", 16 << 30), gpu(1, "c09d2", 24 << 30)];
        let found = shared(&gpus, Unit::GiB).unwrap();
        assert_eq!(found[0].id(12), "c09d1-c", "as many characters as tell one from the other");
        for gpu in &found {
            for id in gpu.ids() {
                assert_eq!(gpu_of(&found, &id), Some(gpu), "{id}");
            }
        }
        for id in ["", "c09d1", "c09d1-g", "c09d1-0c", "c09d1-+1", "c09d-1", "c09d1-c-", "c09d1-C"]
        {
            assert_eq!(gpu_of(&found, id), None, "{id}");
        }
    }

    /// More units than the kubelet would take are refused in words.
    #[test]
    fn more_units_than_kubelet_takes_are_refused() {
        let many = |memory_bytes| {
            (0..8).map(|at| gpu(at, &format!("{at}aa"), memory_bytes)).collect::<Vec<_>>()
        };
        let h200 = many(141 << 30);
        assert_eq!(shared(&h200, Unit::GiB).unwrap().len(), 8);
        let error = shared(&h200, Unit::MiB).unwrap_err().to_string();
        assert!(error.contains("1155072 units of 1 MiB") && error.contains("--memory-unit=GiB"));
        // Eight of 22 GiB, as many inference hosts have them, fit.
        let found = shared(&many(22 << 30), Unit::MiB).unwrap();
        let device = |id| Device { id, health: UNHEALTHY.to_owned() };
        let devices = found.iter().flat_map(SharedGpu::ids).map(device).collect();
        let bytes = ListAndWatchResponse { devices }.encoded_len();
        assert!(bytes <= MOST_MESSAGE_BYTES, "{bytes}");
    }

    #[test]
    fn invalid_uuid_is_reported() {
        let mut strange = gpu(0, "aaa", 1 << 30);
        strange.uuid = "GPU-x".into();
        let error = shared(&[strange], Unit::GiB).unwrap_err();
        assert!(error.to_string().contains("GPU 0 has UUID \"GPU-x\""), "{error}");
    }

    proptest! {
        #[test]
        fn numbers_are_read_as_they_are_written(number: u32) {
            prop_assert_eq!(u32::from_str_radix(&base36(number), 36).unwrap(), number);
        }

        #[test]
        fn no_id_breaks_it(id: String) {
            let _ = gpu_of(&shared(&[gpu(0, "aaa", 1 << 30)], Unit::MiB).unwrap(), &id);
        }
    }
}
