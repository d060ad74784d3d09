//! A simulated NVIDIA driver, served by FUSE.
//!
//! Behaves as the driver does at its ioctl boundary, so that isolation is tested for real
//! without hardware: files that stand for `nvidiactl`, `nvidiaN` and `nvidia-uvm`, clients
//! and objects, memory with real exhaustion, process lists. Written from NVIDIA's published
//! headers and sources (open-gpu-kernel-modules), and independent of cgpu's library, which
//! it checks. Must run as root. What it simplifies is said where it does.
//!
//! Under the directory: `dev/` and `proc/driver/nvidia/` as the driver's, `inventory.json`
//! for cgpu, `sim/state` to look, and `sim/faults` to disturb.

pub mod abi;
pub mod bytes;
mod caller;
mod control;
mod debug;
mod driver;
mod escape;
mod export;
mod fault;
mod heap;
mod in_memory;
mod object;
mod peak;
mod program;
pub mod runlist;
mod schedule;
mod shared;
mod spec;
mod state;
mod switches;
mod tree;
mod uvm;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fuser::{BackgroundSession, Config, MountOption, SessionACL};

pub use fault::{Action, CallFault, Fault, FaultError, Kind, Lies};
pub use in_memory::{FindFile, InMemory, Node};
pub use program::Program;
pub use schedule::Doorbell;
pub use spec::{GpuSpec, SimOptions, SizeError, size_bytes};
pub use state::{ClientState, FileState, GpuState, ObjectState, State, UvmState};

use object::Nodes;
use shared::Shared;
use spec::Gpu;
use tree::Tree;

/// How many calls are served at once, in addition to those that a fault holds.
const THREADS: usize = 8;

/// A running simulation; unmounted when dropped.
#[derive(Debug)]
pub struct Sim {
    dir: PathBuf,
    sim: Arc<Shared>,
    session: Option<BackgroundSession>,
}

impl Sim {
    /// Mounts a simulation over a directory.
    ///
    /// # Errors
    ///
    /// Where it can't be mounted: it needs root and `/dev/fuse`.
    pub fn start(options: SimOptions) -> io::Result<Self> {
        let gpus = (0_u8..).zip(options.gpus).map(|(index, spec)| Gpu::new(index, spec)).collect();
        let sim = Arc::new(Shared::new(options.driver, gpus));
        let tree = Tree::new(Arc::clone(&sim));
        let (gpu_inodes, notifier) = (tree.gpu_inodes(), Arc::clone(&tree.notifier));
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("cgpu-sim".to_owned())];
        config.acl = SessionACL::All;
        config.n_threads = Some(THREADS);
        let session = fuser::spawn_mount(tree, &options.dir, &config)?;
        notifier.get_or_init(|| session.notifier());
        sim.set_nodes(Nodes { device: fs::metadata(&options.dir)?.dev(), gpus: gpu_inodes });
        Ok(Sim { dir: options.dir, sim, session: Some(session) })
    }

    /// Where it is mounted.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What it holds now.
    #[must_use]
    pub fn state(&self) -> State {
        State::of(&self.sim)
    }

    /// Bytes of a GPU in use, by its index. Takes no longer however much there is of everything:
    /// a reader that polls every few milliseconds must not hold up the calls that it watches.
    #[must_use]
    pub fn used_bytes(&self, gpu: usize) -> u64 {
        self.sim.driver().used_bytes(gpu)
    }

    /// The most bytes of a GPU that were in use since that was forgotten, by its index.
    #[must_use]
    pub fn peak_bytes(&self, gpu: usize) -> u64 {
        self.sim.driver().peak_bytes(gpu)
    }

    /// From now on a GPU's peak is what is in use now.
    pub fn forget_peaks(&self) {
        self.sim.driver().forget_peaks();
    }

    /// The most bytes that the clients of a cgroup's processes had at once, since this was asked
    /// last: by cgroup and index of the GPU, of those that have made or duplicated memory since.
    #[must_use]
    pub fn take_cgroup_peaks(&self) -> HashMap<(String, usize), u64> {
        self.sim.driver().cgroup_peaks.take()
    }

    /// Puts a fault in, or takes all back.
    pub fn fault(&self, fault: Fault) {
        self.sim.add(fault);
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        // A process that hangs would hold the mount.
        self.sim.add(Fault::Clear);
        // Busy files stay with the processes that have them, and are served while this process lives;
        // the tree goes from the directory. Without users the threads end now.
        let _ = nix::mount::umount2(&self.dir, nix::mount::MntFlags::MNT_DETACH);
        drop(self.session.take());
    }
}
