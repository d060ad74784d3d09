//! The driver's kernel modules, loaded as nvidia-modprobe loads them: by the program that the kernel
//! itself calls for modules.
//!
//! Must not know when that is right: a container's creation loads none.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use thiserror::Error;

use super::device_numbers::Module;

/// Where modprobe looks for the programs that its configuration names (`install` lines).
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// NVIDIA's vendor number on PCI.
const VENDOR: &str = "0x10de";

/// What display controllers' classes begin with: VGA, 3D.
const DISPLAY_CLASS: &str = "0x03";

/// Why a module isn't loaded.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The kernel names no program.
    #[error(
        "the kernel module {module} isn't loaded, and {} names no program that loads it; load it \
         with `modprobe {module}`",
        path.display()
    )]
    NoProgram {
        module: Module,
        /// Where the kernel names it.
        path: PathBuf,
    },
    /// The program can't be run.
    #[error(
        "the kernel module {module} isn't loaded, and {} can't be run: {source}; load it with `modprobe {module}`",
        program.display()
    )]
    Start {
        module: Module,
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The program failed.
    #[error(
        "the kernel module {module} isn't loaded, and `{} {module}` failed ({status}): {said}; \
         install NVIDIA's driver for this kernel, and see `dmesg`",
        program.display()
    )]
    Failed {
        module: Module,
        program: PathBuf,
        status: ExitStatus,
        /// What it printed on standard error.
        said: String,
    },
}

/// Loads `module` by the program that the kernel names below `proc_root`.
///
/// # Errors
///
/// If there is no such program, or it fails.
pub fn load(module: Module, proc_root: &Path) -> Result<(), LoadError> {
    let path = proc_root.join("sys/kernel/modprobe");
    let named = fs::read_to_string(&path).unwrap_or_default();
    let program = match named.trim() {
        "" => return Err(LoadError::NoProgram { module, path }),
        program => PathBuf::from(program),
    };
    let mut command = Command::new(&program);
    command.arg(module.name()).env_clear().env("PATH", PATH).stdin(Stdio::null());
    match command.output() {
        Err(source) => Err(LoadError::Start { module, program, source }),
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ");
            Err(LoadError::Failed { module, program, status: output.status, said })
        }
    }
}

/// Whether an NVIDIA GPU on the PCI bus of `sys` (`/sys`) has no kernel driver yet: not one that
/// nouveau or a virtual machine has.
#[must_use]
pub fn gpu_waits_for_driver(sys: &Path) -> bool {
    let devices = fs::read_dir(sys.join("bus/pci/devices")).into_iter().flatten().flatten();
    devices.map(|device| device.path()).any(|device| {
        let begins = |file: &str, with: &str| {
            fs::read_to_string(device.join(file)).is_ok_and(|text| text.starts_with(with))
        };
        begins("vendor", VENDOR)
            && begins("class", DISPLAY_CLASS)
            && fs::symlink_metadata(device.join("driver")).is_err()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn only_an_unbound_gpu_waits_for_the_driver() {
        for (vendor, class, driver, expected) in [
            ("0x10de", "0x030200", None, true),
            ("0x10de", "0x030000", None, true),
            ("0x10de", "0x040300", None, false),
            ("0x8086", "0x030000", None, false),
            ("0x10de", "0x030200", Some("vfio-pci"), false),
            ("0x10de", "0x030200", Some("nouveau"), false),
        ] {
            let sys = tempfile::tempdir().unwrap();
            assert!(!gpu_waits_for_driver(sys.path()));
            let device = sys.path().join("bus/pci/devices/0000:07:00.0");
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("vendor"), format!("{vendor}\n")).unwrap();
            fs::write(device.join("class"), format!("{class}\n")).unwrap();
            if let Some(driver) = driver {
                symlink(format!("../../drivers/{driver}"), device.join("driver")).unwrap();
            }
            assert_eq!(gpu_waits_for_driver(sys.path()), expected, "{vendor} {class} {driver:?}");
        }
    }

    #[test]
    fn module_is_loaded_by_the_kernels_own_program() {
        let proc = tempfile::tempdir().unwrap();
        let load = |module| load(module, proc.path()).map_err(|error| error.to_string());
        let refused = load(Module::Uvm).unwrap_err();
        assert!(refused.contains("/sys/kernel/modprobe names no program"), "{refused}");
        fs::create_dir_all(proc.path().join("sys/kernel")).unwrap();
        let name = |program: &str| fs::write(proc.path().join("sys/kernel/modprobe"), program);
        name("/nowhere/modprobe\n").unwrap();
        assert!(load(Module::Uvm).unwrap_err().contains("/nowhere/modprobe can't be run: No such"));
        name("/bin/true\n").unwrap();
        assert_eq!(load(Module::Uvm), Ok(()));
        // Says that there is no such file, as modprobe says it of a module.
        name("/bin/cat\n").unwrap();
        let refused = load(Module::Nvidia).unwrap_err();
        assert!(refused.contains("`/bin/cat nvidia` failed (exit status: 1)"), "{refused}");
        assert!(
            refused.contains("No such file or directory; install NVIDIA's driver"),
            "{refused}"
        );
    }
}
