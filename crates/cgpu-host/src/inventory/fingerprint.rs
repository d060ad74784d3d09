//! What distinguishes one state of the driver from another without asking NVML.
//!
//! Owns reading `/proc`: boot, driver version, the GPUs bound to the driver, the MIG
//! instances. Must not know what a cache does with it. Every read is bounded.
//!
//! A GPU that no process has opened yet may not know its UUID, and one whose power can't be
//! raised prints nothing at all (kernel-open/nvidia/nv-procfs.c,
//! `nv_procfs_read_gpu_info`); so what is unknown agrees with everything, or a host
//! without persistence mode would ask NVML on every container creation. Reading that file
//! wakes a GPU that is suspended, which takes long, but only laptops suspend theirs.
//!
//! MIG instances can be distinguished by their numbers only: one destroyed and recreated
//! with another size under the same number looks the same.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::bus_id;

/// Most bytes read of one file of `/proc`.
const READ_BYTES_MAX: u64 = 16 << 10;

/// Most entries read of one directory of `/proc`; the driver holds 32 GPUs
/// (`NV_MAX_DEVICES`) and a GPU 8 instances.
const ENTRIES_MAX: usize = 256;

/// The state of the driver that an inventory was read in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fingerprint {
    boot_id: String,
    driver: String,
    gpus: Vec<KernelGpu>,
    mig: Vec<String>,
}

/// A GPU as the kernel module lists it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelGpu {
    /// PCI address as `domain:bus:device.function`.
    pub bus_id: String,
    /// `GPU-` and a UUID; `None` where the kernel doesn't know it (yet).
    pub uuid: Option<String>,
    /// Minor number of `/dev/nvidiaN`.
    pub minor: Option<u32>,
    /// Kept from use by the module's `NVreg_ExcludedGpus`; NVML doesn't count it.
    pub excluded: Option<bool>,
}

/// Why the driver's state can't be determined.
#[derive(Debug, Error)]
pub enum FingerprintError {
    /// There is no driver.
    #[error(
        "no NVIDIA driver on this host: {} does not exist; load the nvidia kernel module, or list \
         the GPUs in a file with source = \"file\" under [inventory]",
        path.display()
    )]
    NoDriver {
        /// The driver's version file.
        path: PathBuf,
    },
    /// A file that must be there can't be read.
    #[error("can't read {}, which reports the state of the NVIDIA driver", path.display())]
    Unreadable {
        /// The file or directory.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl Fingerprint {
    /// The driver's state now.
    ///
    /// # Errors
    ///
    /// Where there is no driver, or `/proc` can't be read.
    pub fn read(proc_root: &Path) -> Result<Self, FingerprintError> {
        let driver = proc_root.join("driver/nvidia");
        let version = read_version(&driver.join("version"))?;
        let boot_id = proc_root.join("sys/kernel/random/boot_id");
        Ok(Fingerprint {
            boot_id: read_bounded(&boot_id)
                .map_err(|source| FingerprintError::Unreadable { path: boot_id, source })?
                .trim()
                .to_owned(),
            driver: version,
            gpus: read_gpus(&driver.join("gpus"))?,
            mig: read_mig(&driver.join("capabilities"))?,
        })
    }

    /// Whether an inventory read in state `self` holds in state `now`.
    #[must_use]
    pub fn holds_in(&self, now: &Fingerprint) -> bool {
        self.boot_id == now.boot_id
            && self.driver == now.driver
            && self.mig == now.mig
            && self.gpus.len() == now.gpus.len()
            && self.gpus.iter().zip(&now.gpus).all(|(then, now)| then.agrees_with(now))
    }

    /// The GPUs bound to the driver, by bus id.
    #[must_use]
    pub fn gpus(&self) -> &[KernelGpu] {
        &self.gpus
    }

    /// Whether the GPU of that node has MIG instances.
    #[must_use]
    pub fn has_mig(&self, minor: u32) -> bool {
        let prefix = format!("gpu{minor}/");
        self.mig.iter().any(|instance| instance.starts_with(&prefix))
    }
}

impl KernelGpu {
    fn agrees_with(&self, other: &KernelGpu) -> bool {
        self.bus_id == other.bus_id
            && agree(self.uuid.as_deref(), other.uuid.as_deref())
            && agree(self.minor, other.minor)
            && agree(self.excluded, other.excluded)
    }

    /// The GPU at `bus_id` whose `information` file reads `text`.
    fn parse(bus_id: &str, text: &str) -> Self {
        let value = |key: &str| {
            text.lines().find_map(|line| {
                let (name, value) = line.split_once(':')?;
                (name.trim() == key).then(|| value.trim())
            })
        };
        // Unknown, the driver prints the UUID's digits as question marks.
        let known = |uuid: &&str| uuid.starts_with("GPU-") && !uuid.contains('?');
        KernelGpu {
            bus_id: bus_id::normalise(bus_id),
            uuid: value("GPU UUID").filter(known).map(str::to_owned),
            minor: value("Device Minor").and_then(|minor| minor.parse().ok()),
            excluded: value("GPU Excluded").map(|excluded| excluded == "Yes"),
        }
    }
}

/// Whether two answers don't contradict each other: what is unknown agrees with all.
fn agree<T: PartialEq>(one: Option<T>, other: Option<T>) -> bool {
    one.is_none() || other.is_none() || one == other
}

/// The line that names the kernel module's version.
fn read_version(path: &Path) -> Result<String, FingerprintError> {
    match read_bounded(path) {
        Ok(text) => Ok(text.lines().next().unwrap_or_default().trim().to_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(FingerprintError::NoDriver { path: path.to_owned() })
        }
        Err(source) => Err(FingerprintError::Unreadable { path: path.to_owned(), source }),
    }
}

fn read_gpus(path: &Path) -> Result<Vec<KernelGpu>, FingerprintError> {
    let mut gpus: Vec<KernelGpu> = names_in(path)?
        .iter()
        .map(|bus_id| {
            // A GPU that is just being removed can't be read: it is unknown, not an error.
            let text = read_bounded(&path.join(bus_id).join("information"));
            KernelGpu::parse(bus_id, &text.unwrap_or_default())
        })
        .collect();
    gpus.sort_by(|a, b| a.bus_id.cmp(&b.bus_id));
    Ok(gpus)
}

/// The MIG instances, as `gpuMINOR/giN` and `gpuMINOR/giN/ciM`.
///
/// Not the directories above them: the driver makes those when a GPU is first opened
/// (`osRmCapRegisterGpu`), whether it has instances or not.
fn read_mig(capabilities: &Path) -> Result<Vec<String>, FingerprintError> {
    let mut instances = Vec::new();
    for gpu in numbered(capabilities, "gpu")? {
        let mig = capabilities.join(&gpu).join("mig");
        for gi in numbered(&mig, "gi")? {
            instances.push(format!("{gpu}/{gi}"));
            for ci in numbered(&mig.join(&gi), "ci")? {
                instances.push(format!("{gpu}/{gi}/{ci}"));
            }
        }
    }
    instances.sort_unstable();
    Ok(instances)
}

/// The entries of `directory` that are `prefix` and a number.
fn numbered(directory: &Path, prefix: &str) -> Result<Vec<String>, FingerprintError> {
    let mut names = names_in(directory)?;
    names.retain(|name| {
        name.strip_prefix(prefix).is_some_and(|number| number.parse::<u32>().is_ok())
    });
    Ok(names)
}

/// The names in `directory`; none where it doesn't exist.
fn names_in(directory: &Path) -> Result<Vec<String>, FingerprintError> {
    let unreadable = |source| FingerprintError::Unreadable { path: directory.to_owned(), source };
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(unreadable(source)),
    };
    let mut names = Vec::new();
    for entry in entries.take(ENTRIES_MAX) {
        names.push(entry.map_err(unreadable)?.file_name().to_string_lossy().into_owned());
    }
    Ok(names)
}

fn read_bounded(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(READ_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::fixture::Proc;

    fn read(proc: &Proc) -> Fingerprint {
        Fingerprint::read(proc.root()).unwrap()
    }

    #[test]
    fn reads_gpus_as_the_driver_prints_them() {
        let proc = Proc::with_driver();
        proc.gpu("0000:AF:00.0", "GPU-b", 0);
        proc.gpu("0000:00:07.0", "GPU-a", 4);
        let gpus = read(&proc).gpus;
        assert_eq!(gpus.len(), 2);
        assert_eq!((&*gpus[0].bus_id, gpus[0].minor), ("0000:00:07.0", Some(4)));
        assert_eq!((&*gpus[1].bus_id, gpus[1].uuid.as_deref()), ("0000:af:00.0", Some("GPU-b")));
        assert_eq!(gpus[1].excluded, Some(false));
    }

    #[test]
    fn missing_driver_error_says_what_to_load() {
        let proc = Proc::without_driver();
        let error = Fingerprint::read(proc.root()).unwrap_err().to_string();
        let path = proc.root().join("driver/nvidia/version");
        assert_eq!(
            error,
            format!(
                "no NVIDIA driver on this host: {} does not exist; load the nvidia kernel module, \
                 or list the GPUs in a file with source = \"file\" under [inventory]",
                path.display()
            )
        );
    }

    #[test]
    fn holds_while_nothing_changes() {
        let proc = Proc::with_driver();
        proc.gpu("0000:00:07.0", "GPU-a", 0);
        proc.mig("gpu0/mig/gi1/ci0");
        let then = read(&proc);
        assert!(then.holds_in(&read(&proc)));
        let text = serde_json::to_string(&then).unwrap();
        assert_eq!(serde_json::from_str::<Fingerprint>(&text).unwrap(), then);
    }

    #[test]
    fn each_change_of_the_driver_ends_it() {
        type Change = fn(&Proc);
        let changes: [(&str, Change); 9] = [
            ("boot", |p| p.write("sys/kernel/random/boot_id", "other\n")),
            ("driver", |p| p.write("driver/nvidia/version", "NVRM version: 550.54.14\n")),
            ("a GPU more", |p| p.gpu("0000:00:08.0", "GPU-b", 1)),
            ("a GPU less", |p| p.remove("driver/nvidia/gpus/0000:00:07.0")),
            ("another UUID", |p| p.gpu("0000:00:07.0", "GPU-z", 0)),
            ("another minor", |p| p.gpu("0000:00:07.0", "GPU-a", 1)),
            ("a GPU instance more", |p| p.mig("gpu0/mig/gi2")),
            ("a compute instance less", |p| {
                p.remove("driver/nvidia/capabilities/gpu0/mig/gi1/ci0")
            }),
            ("no instances", |p| p.remove("driver/nvidia/capabilities/gpu0/mig/gi1")),
        ];
        for (what, change) in changes {
            let proc = Proc::with_driver();
            proc.gpu("0000:00:07.0", "GPU-a", 0);
            proc.mig("gpu0/mig/gi1/ci0");
            let then = read(&proc);
            change(&proc);
            assert!(!then.holds_in(&read(&proc)), "{what}");
        }
    }

    #[test]
    fn a_gpu_that_falls_asleep_changes_nothing() {
        let proc = Proc::with_driver();
        proc.gpu("0000:00:07.0", "GPU-a", 0);
        let awake = read(&proc);
        proc.gpu("0000:00:07.0", "GPU-????????-????-????-????-????????????", 0);
        let unopened = read(&proc);
        assert_eq!(unopened.gpus[0].uuid, None);
        proc.write("driver/nvidia/gpus/0000:00:07.0/information", "");
        let asleep = read(&proc);
        assert!(awake.holds_in(&unopened) && awake.holds_in(&asleep) && asleep.holds_in(&awake));
    }

    /// A GPU that is opened for the first time does not change the fingerprint.
    #[test]
    fn first_open_of_gpu_leaves_fingerprint_valid() {
        let proc = Proc::with_driver();
        proc.gpu("0000:00:07.0", "GPU-a", 0);
        let then = read(&proc);
        proc.mig("mig/config");
        proc.mig("gpu0/mig/config");
        assert!(then.holds_in(&read(&proc)));
    }

    #[test]
    fn a_file_without_end_is_read_in_part() {
        let proc = Proc::with_driver();
        proc.link("driver/nvidia/gpus/0000:00:07.0/information", "/dev/zero");
        assert_eq!(read(&proc).gpus[0].uuid, None);
    }
}
