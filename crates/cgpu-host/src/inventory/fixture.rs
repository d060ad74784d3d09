//! Stand-ins for `/proc` and for messages, for the tests of this module.

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// `error` and its causes, as a program prints them.
pub(super) fn sentence(error: &dyn Error) -> String {
    let mut sentence = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        sentence.push_str(&format!(": {error}"));
        cause = error.source();
    }
    sentence
}

/// A directory that looks like `/proc` with NVIDIA's driver, and space for state.
#[derive(Debug)]
pub(super) struct Proc {
    directory: TempDir,
    root: PathBuf,
}

impl Proc {
    pub(super) fn without_driver() -> Self {
        let directory = TempDir::new().unwrap();
        let root = directory.path().join("proc");
        let proc = Proc { directory, root };
        proc.write("sys/kernel/random/boot_id", "b1946ac9-2492-4d23-8aee-000000000000\n");
        proc
    }

    pub(super) fn with_driver() -> Self {
        let proc = Self::without_driver();
        proc.write(
            "driver/nvidia/version",
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC \
             2023\nGCC version:  gcc version 12.2.0\n",
        );
        proc
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// A directory that doesn't exist yet.
    pub(super) fn state_dir(&self) -> PathBuf {
        self.directory.path().join("run/cgpu")
    }

    /// A file outside `/proc` and state.
    pub(super) fn beside(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(super) fn write(&self, path: &str, text: &str) {
        let path = self.root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    pub(super) fn link(&self, path: &str, target: &str) {
        let path = self.root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(target, path).unwrap();
    }

    pub(super) fn remove(&self, path: &str) {
        fs::remove_dir_all(self.root.join(path)).unwrap();
    }

    /// A GPU as `nv_procfs_read_gpu_info` prints it.
    pub(super) fn gpu(&self, bus_id: &str, uuid: &str, minor: u32) {
        self.write(
            &format!("driver/nvidia/gpus/{bus_id}/information"),
            &format!(
                "Model: \t\t Tesla V100-SXM2-16GB\nIRQ:   \t\t 35\nGPU UUID: \t {uuid}\n\
                 Video BIOS: \t 88.00.4f.00.09\nBus Type: \t PCIe\nDMA Size: \t 47 bits\n\
                 DMA Mask: \t 0x7fffffffffff\nBus Location: \t {bus_id}\n\
                 Device Minor: \t {minor}\nGPU Excluded:\t No\n"
            ),
        );
    }

    /// A directory of the driver's capabilities.
    pub(super) fn mig(&self, path: &str) {
        let path = self.root.join("driver/nvidia/capabilities").join(path);
        fs::create_dir_all(path).unwrap();
    }
}
