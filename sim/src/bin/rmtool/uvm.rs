//! Calls to `nvidia-uvm`, and mappings of it.

use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use cgpu_sim::abi::*;
use cgpu_sim::bytes::Fields;

use crate::rm::{Fail, NEW_FIELDS_BYTES, Place, Rm, errno, open, raw_ioctl, status};

/// Of what bytes a call's status is before it.
pub(crate) static STALE: AtomicU8 = AtomicU8::new(0);

/// A file of `nvidia-uvm`.
#[derive(Debug)]
pub(crate) struct Uvm {
    fd: OwnedFd,
    abi: Abi,
    dev: PathBuf,
    /// The file that keeps the process's memory for it.
    mm: OnceLock<OwnedFd>,
}

impl Uvm {
    pub(crate) fn open(place: &Place, abi: Abi) -> Result<Self, Fail> {
        let fd = open(&place.dev, "nvidia-uvm")?;
        Ok(Uvm { fd, abi, dev: place.dev.clone(), mm: OnceLock::new() })
    }

    /// The file behind a descriptor that somebody else opened, and left to us.
    pub(crate) fn of(place: &Place, number: RawFd, abi: Abi) -> Self {
        // SAFETY: it's open, and has no other owner.
        let fd = unsafe { OwnedFd::from_raw_fd(number) };
        Uvm { fd, abi, dev: place.dev.clone(), mm: OnceLock::new() }
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Another descriptor of it.
    pub(crate) fn another(&self) -> std::io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    /// A call of that number; the status ends the struct.
    pub(crate) fn call(&self, number: u32, fill: impl FnOnce(&mut [u8])) -> Result<(), Fail> {
        self.call_by(self.fd(), number, fill)
    }

    fn call_by(&self, file: RawFd, number: u32, fill: impl FnOnce(&mut [u8])) -> Result<(), Fail> {
        let (size, status_at) = self.abi.uvm(number).ok_or(Fail::Errno(libc::EINVAL))?;
        // A later driver's program has all of its struct.
        let mut params = vec![0; size + NEW_FIELDS_BYTES];
        fill(&mut params[..size]);
        params[status_at..status_at + 4].fill(STALE.load(Ordering::Relaxed));
        raw_ioctl(file, u64::from(number), &mut params)?;
        status(params.u32_at(status_at))
    }

    /// Another file keeps the process's memory for this one, as CUDA has it: where the kernel can
    /// give pageable memory to a GPU, none is registered without. Files that processes share, and
    /// drivers before it, have no use for that.
    pub(crate) fn keep_memory(&self) -> Result<(), Fail> {
        if self.mm.get().is_none() {
            let mm = open(&self.dev, "nvidia-uvm")?;
            let fd = u32::try_from(self.fd()).unwrap_or(u32::MAX);
            let done = self.call_by(mm.as_raw_fd(), UVM_MM_INITIALIZE, |params| {
                params.set_u32(0, fd);
            });
            if done.is_ok() {
                let _ = self.mm.set(mm);
            }
        }
        Ok(())
    }

    pub(crate) fn initialize(&self, flags: u64) -> Result<(), Fail> {
        self.call(UVM_INITIALIZE, |params| params.set_u64(0, flags))
    }

    /// Initializes it without a flag, which another thread sees to in the middle of the call; whether
    /// the driver took it so.
    pub(crate) fn initialize_racing(&self) -> Result<bool, Fail> {
        // `UVM_INITIALIZE_PARAMS`: flags, and the status.
        let params = [const { AtomicU64::new(0) }; 2];
        let over = AtomicBool::new(false);
        let rc = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    params[0].store(0, Ordering::Relaxed);
                }
            });
            let number = u64::from(UVM_INITIALIZE);
            // SAFETY: the struct is so long, and all access to it is atomic.
            let rc = unsafe { libc::syscall(libc::SYS_ioctl, self.fd(), number, params.as_ptr()) };
            over.store(true, Ordering::Relaxed);
            rc
        });
        if rc < 0 {
            return Err(errno());
        }
        let low_half = params[1].load(Ordering::Relaxed) & u64::from(u32::MAX);
        status(u32::try_from(low_half).unwrap_or(u32::MAX))?;
        // Other flags than it has are refused.
        Ok(self.initialize(UVM_INIT_FLAGS_DISABLE_HMM).is_err())
    }

    /// Registers the GPU and a virtual address space of it.
    pub(crate) fn register(&self, rm: &Rm) -> Result<[u8; 16], Fail> {
        let uuid = rm.uuid()?;
        self.keep_memory()?;
        let fd = u32::try_from(rm.ctl()).unwrap_or(u32::MAX);
        self.call(UVM_REGISTER_GPU, |params| {
            params[..16].copy_from_slice(&uuid);
            params.set_u32(24, fd);
            params.set_u32(28, rm.client);
        })?;
        let mut params = vec![0; rm.abi.vaspace_params_bytes];
        // NV_VASPACE_ALLOCATION_FLAGS_IS_EXTERNALLY_OWNED: UVM takes no other (nv_gpu_ops.c).
        params.set_u32(4, 1 << 3);
        let vaspace =
            rm.alloc_object(rm.ctl(), rm.device, rm.handle(), FERMI_VASPACE_A, &mut params)?;
        self.call(UVM_REGISTER_GPU_VASPACE, |params| {
            params[..16].copy_from_slice(&uuid);
            params.set_u32(16, fd);
            params.set_u32(20, rm.client);
            params.set_u32(24, vaspace);
        })?;
        Ok(uuid)
    }

    pub(crate) fn external_range(&self, base: u64, bytes: u64) -> Result<(), Fail> {
        self.call(UVM_CREATE_EXTERNAL_RANGE, |params| {
            params.set_u64(0, base);
            params.set_u64(8, bytes);
        })
    }

    /// Asks for a range for peers, with an invalid descriptor.
    pub(crate) fn p2p_of_nothing(&self, base: u64, bytes: u64) -> Result<(), Fail> {
        self.call(UVM_ALLOC_DEVICE_P2P, |params| {
            params.set_u64(0, base);
            params.set_u64(8, bytes);
            params.set_u32(40, u32::MAX);
        })
    }

    /// Makes a pool of semaphores.
    pub(crate) fn pool(&self, base: u64, bytes: u64) -> Result<(), Fail> {
        self.call(UVM_ALLOC_SEMAPHORE_POOL, |params| {
            params.set_u64(0, base);
            params.set_u64(8, bytes);
        })
    }

    pub(crate) fn map_external(
        &self,
        rm: &Rm,
        uuid: [u8; 16],
        base: u64,
        bytes: u64,
        memory: u32,
    ) -> Result<(), Fail> {
        self.map_for(rm, &[uuid], base, bytes, memory)
    }

    /// Maps memory for several GPUs at once.
    pub(crate) fn map_for(
        &self,
        rm: &Rm,
        uuids: &[[u8; 16]],
        base: u64,
        bytes: u64,
        memory: u32,
    ) -> Result<(), Fail> {
        let tail = self.abi.uvm_map_external_tail();
        self.call(UVM_MAP_EXTERNAL_ALLOCATION, |params| {
            params.set_u64(0, base);
            params.set_u64(8, bytes);
            for (at, uuid) in uuids.iter().enumerate() {
                let at = 24 + at * UVM_GPU_MAPPING_ATTRIBUTES_BYTES;
                params[at..at + 16].copy_from_slice(uuid);
            }
            params.set_u64(tail, uuids.len() as u64);
            params.set_u32(tail + 8, u32::try_from(rm.ctl()).unwrap_or(u32::MAX));
            params.set_u32(tail + 12, rm.client);
            params.set_u32(tail + 16, memory);
        })
    }

    pub(crate) fn unmap_external(&self, uuid: [u8; 16], base: u64, bytes: u64) -> Result<(), Fail> {
        self.call(UVM_UNMAP_EXTERNAL, |params| {
            params.set_u64(0, base);
            params.set_u64(8, bytes);
            params[16..32].copy_from_slice(&uuid);
        })
    }

    /// Frees a range, with what is mapped there.
    pub(crate) fn free_range(&self, base: u64, bytes: u64) -> Result<(), Fail> {
        self.call(UVM_FREE, |params| {
            params.set_u64(0, base);
            if self.abi.uvm_free_status == 16 {
                params.set_u64(8, bytes);
            }
        })
    }

    /// Ends what a GPU maps, by a call whose struct begins with its UUID.
    pub(crate) fn unregister(&self, number: u32, uuid: [u8; 16]) -> Result<(), Fail> {
        self.call(number, |params| params[..16].copy_from_slice(&uuid))
    }

    /// Maps managed memory: shared, with an offset that equals the address. `fixed` asks
    /// for the address, else it is a hint.
    pub(crate) fn managed(&self, bytes: usize, fixed: bool) -> Result<Managed, Fail> {
        // Somewhere that is free: reserved and given back.
        // SAFETY: a new anonymous mapping at an address of the kernel's choice.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(errno());
        }
        if !fixed {
            // SAFETY: the mapping just made, which nothing refers to.
            unsafe { libc::munmap(at, bytes) };
        }
        self.managed_at(at, bytes, fixed)
    }

    /// The same at an address where nothing of ours is.
    pub(crate) fn managed_at(
        &self,
        at: *mut libc::c_void,
        bytes: usize,
        fixed: bool,
    ) -> Result<Managed, Fail> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | if fixed { libc::MAP_FIXED } else { 0 };
        // The library's function makes no system call where the offset is odd.
        // SAFETY: nothing of ours is there, by the callers.
        let mapped = unsafe {
            libc::syscall(libc::SYS_mmap, at, bytes, protection, flags, self.fd(), at.addr())
        };
        if mapped == -1 {
            return Err(errno());
        }
        let mapped = at.with_addr(usize::try_from(mapped).unwrap_or(0));
        Ok(Managed { at: mapped.cast(), bytes, equal: mapped == at })
    }
}

/// A mapping of `nvidia-uvm`.
#[derive(Debug)]
pub(crate) struct Managed {
    at: *mut u8,
    bytes: usize,
    /// Whether its offset equals its address.
    pub(crate) equal: bool,
}

impl Managed {
    /// Touches each page; the bytes that are committed by it.
    pub(crate) fn touch(&self) -> u64 {
        for offset in (0..self.bytes).step_by(4096) {
            // SAFETY: within the mapping, which lives as long as the process.
            unsafe { self.at.add(offset).write_volatile(1) };
        }
        self.bytes as u64
    }
}
