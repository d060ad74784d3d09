//! The driver's calls as an application makes them.
//!
//! A thin layer: each function fills one struct and makes one call. Errors are the call's
//! errno or the struct's status, nothing is retried or interpreted.

use std::fmt;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use cgpu_sim::Doorbell;
use cgpu_sim::abi::*;
use cgpu_sim::bytes::Fields;
use nix::sys::uio::{pread, pwrite};

/// Why a call failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fail {
    Errno(i32),
    Status(u32),
}

impl fmt::Display for Fail {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fail::Errno(errno) => write!(formatter, "errno={errno}"),
            Fail::Status(status) => write!(formatter, "status={status:#x}"),
        }
    }
}

impl std::error::Error for Fail {}

/// `_IOWR('F', number, size)`.
pub(crate) fn command(number: u32, size: usize) -> u64 {
    let size = u64::try_from(size).unwrap_or(0);
    0xc000_4600 | u64::from(number) | size << 16
}

/// Space for what a later driver's structs have more than those of the release that is spoken to.
pub(crate) const NEW_FIELDS_BYTES: usize = 256;

/// How often each call is made once more, with its struct as it came back.
pub(crate) static REPEATS: AtomicU32 = AtomicU32::new(0);

/// ioctl(2) with everything given.
pub(crate) fn raw_ioctl(fd: RawFd, command: u64, bytes: &mut [u8]) -> Result<(), Fail> {
    let mut rc = 0;
    for _ in 0..1 + REPEATS.load(Ordering::Relaxed) {
        // SAFETY: `bytes` is as long as the command's size says, or is meant to be a lie that
        // the driver must withstand; nothing else of ours is reached by its address.
        rc = unsafe { libc::syscall(libc::SYS_ioctl, fd, command, bytes.as_mut_ptr()) };
        if rc < 0 {
            break;
        }
    }
    if rc >= 0 { Ok(()) } else { Err(errno()) }
}

/// The last errno.
pub(crate) fn errno() -> Fail {
    Fail::Errno(io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

/// A call and its struct's status.
pub(crate) fn call(fd: RawFd, number: u32, bytes: &mut [u8], status_at: usize) -> Result<(), Fail> {
    raw_ioctl(fd, command(number, bytes.len()), bytes)?;
    status(bytes.u32_at(status_at))
}

pub(crate) fn status(status: u32) -> Result<(), Fail> {
    if status == NV_OK { Ok(()) } else { Err(Fail::Status(status)) }
}

/// Where the devices are and how they are spoken to.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) dev: PathBuf,
    pub(crate) gpu: u32,
    pub(crate) driver: Option<Version>,
    /// What may be had, if that is known.
    pub(crate) quota: Option<u64>,
    /// Whether a container that has more is killed.
    pub(crate) is_held: bool,
}

/// A client with a device and a subdevice.
#[derive(Debug)]
pub(crate) struct Rm {
    pub(crate) abi: Abi,
    pub(crate) ctl: OwnedFd,
    pub(crate) gpu: OwnedFd,
    pub(crate) client: u32,
    pub(crate) device: u32,
    pub(crate) subdevice: u32,
    next: AtomicU32,
}

pub(crate) fn open(dev: &Path, name: &str) -> Result<OwnedFd, Fail> {
    let file = OpenOptions::new().read(true).write(true).open(dev.join(name));
    let errno = |error: io::Error| Fail::Errno(error.raw_os_error().unwrap_or(0));
    file.map(OwnedFd::from).map_err(errno)
}

/// A file whose pages the kernel doesn't keep: it's read again each time.
pub(crate) fn open_unread(place: &Place) -> Result<OwnedFd, Fail> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_DIRECT);
    let file = options.open(place.dev.join(format!("nvidia{}", place.gpu)));
    let errno = |error: io::Error| Fail::Errno(error.raw_os_error().unwrap_or(0));
    file.map(OwnedFd::from).map_err(errno)
}

/// The version that the driver says it has: NV_RM_API_VERSION_CMD_QUERY.
pub(crate) fn version(ctl: RawFd) -> Option<Version> {
    let mut bytes = [0; 72];
    bytes.set_u32(0, u32::from(b'2'));
    raw_ioctl(ctl, command(NV_ESC_CHECK_VERSION_STR, 72), &mut bytes).ok()?;
    let text = bytes[8..].split(|byte| *byte == 0).next()?;
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// Whose memory it is, by the caller's own account: anything but 0 and the driver's own.
const OWNER: u32 = 0x6370_6775;

impl Rm {
    /// Opens the nodes; no client yet.
    pub(crate) fn open(place: &Place) -> Result<Self, Fail> {
        let ctl = open(&place.dev, "nvidiactl")?;
        let gpu = open(&place.dev, &format!("nvidia{}", place.gpu))?;
        let fallback = || "535.161.08".parse().expect("it is a version");
        let version = place.driver.clone().or_else(|| version(ctl.as_raw_fd()));
        let abi = Abi::of(&version.unwrap_or_else(fallback));
        let next = AtomicU32::new(0xa000_0001);
        Ok(Rm { abi, ctl, gpu, client: 0, device: 0, subdevice: 0, next })
    }

    /// By nodes that somebody else opened; no client yet.
    pub(crate) fn through(abi: Abi, ctl: OwnedFd, gpu: OwnedFd) -> Self {
        let next = AtomicU32::new(0xb000_0001);
        Rm { abi, ctl, gpu, client: 0, device: 0, subdevice: 0, next }
    }

    /// Opens the nodes and makes client, device and subdevice.
    pub(crate) fn start(place: &Place) -> Result<Self, Fail> {
        let mut rm = Self::open(place)?;
        rm.make_client()?;
        rm.make_device(place.gpu)?;
        rm.make_subdevice()?;
        Ok(rm)
    }

    /// Opens the nodes and makes a client and a device of those names.
    pub(crate) fn anew(place: &Place, client: u32, device: u32) -> Result<Self, Fail> {
        let mut rm = Self::open(place)?;
        let mut bytes = rm.nvos64(0, client, NV01_ROOT_CLIENT, 0, 0);
        bytes.set_u32(0, 0);
        call(rm.ctl(), NV_ESC_RM_ALLOC, &mut bytes, rm.abi.nvos64_status)?;
        rm.client = client;
        let mut params = [0; 56];
        params.set_u32(0, place.gpu);
        rm.device = rm.alloc_object(rm.ctl(), client, device, NV01_DEVICE_0, &mut params)?;
        Ok(rm)
    }

    /// Opens another GPU and makes its device in the place of the first's, which stays.
    pub(crate) fn move_to(&mut self, place: &Place, gpu: u32) -> Result<(), Fail> {
        self.gpu = open(&place.dev, &format!("nvidia{gpu}"))?;
        self.make_device(gpu)?;
        self.make_subdevice()
    }

    /// A group of an engine, with a channel, that is scheduled.
    pub(crate) fn compute(&self, engine: u32) -> Result<u32, Fail> {
        self.compute_by(KEPLER_CHANNEL_GROUP_A, engine)
    }

    /// The same; the group's class is called so in the call.
    pub(crate) fn compute_by(&self, class: u32, engine: u32) -> Result<u32, Fail> {
        let mut params = [0; 20];
        params.set_u32(12, engine);
        let ctl = self.ctl();
        let group = self.alloc_object(ctl, self.device, self.handle(), class, &mut params)?;
        self.alloc_object(ctl, group, self.handle(), AMPERE_CHANNEL_GPFIFO_A, &mut [])?;
        self.schedule(group, NVA06C_CTRL_CMD_GPFIFO_SCHEDULE)?;
        Ok(group)
    }

    /// A channel of an engine outside a group, that is scheduled; its class is called so in the call.
    pub(crate) fn channel_by(&self, class: u32, engine: u32) -> Result<u32, Fail> {
        let mut params = [0; 368];
        // NV_CHANNEL_ALLOC_PARAMS.engineType
        params.set_u32(128, engine);
        let channel =
            self.alloc_object(self.ctl(), self.device, self.handle(), class, &mut params)?;
        self.schedule(channel, NVA06F_CTRL_CMD_GPFIFO_SCHEDULE)?;
        Ok(channel)
    }

    /// A channel of that client's, under that name.
    pub(crate) fn channel_named(&self, client: u32, device: u32, handle: u32) -> Result<(), Fail> {
        let mut bytes = self.nvos64(device, handle, AMPERE_CHANNEL_GPFIFO_A, 0, 0);
        bytes.set_u32(0, client);
        call(self.ctl(), NV_ESC_RM_ALLOC, &mut bytes, self.abi.nvos64_status)
    }

    fn schedule(&self, object: u32, control: u32) -> Result<(), Fail> {
        let mut schedule = [1, 0, 0];
        self.control(object, control, &mut schedule[..self.abi.schedule_bytes])
    }

    /// How a group's kernels are preempted: 0 WFI, 1 CTA, 2 CILP.
    pub(crate) fn set_compute_mode(&self, group: u32, mode: u32) -> Result<(), Fail> {
        let mut params = [0; 32];
        params.set_u32(0, 1);
        params.set_u32(4, group);
        params.set_u32(12, mode);
        self.control(self.subdevice, NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE, &mut params)
    }

    /// Rings the doorbell for a group: so many kernels of that length.
    pub(crate) fn ring(&self, group: u32, count: u64, kernel_ns: u64) -> Result<(), Fail> {
        self.ring_by(&self.gpu, group, count, kernel_ns)
    }

    fn ring_by(&self, file: &OwnedFd, group: u32, count: u64, kernel_ns: u64) -> Result<(), Fail> {
        let doorbell = Doorbell { client: self.client, group, kernel_ns, count, until: 0 };
        let written = pwrite(file, &doorbell.bytes(), 0);
        written.map(|_| ()).map_err(|errno| Fail::Errno(errno as i32))
    }

    /// How many of a group's kernels have ended, asked by a file of the GPU's that was
    /// [opened](open_unread) for it.
    pub(crate) fn kernels_ended(&self, file: &OwnedFd, group: u32) -> Result<u64, Fail> {
        self.ring_by(file, group, 0, 0)?;
        let mut reported = [0; 16];
        pread(file, &mut reported, 0).map_err(|errno| Fail::Errno(errno as i32))?;
        Ok(reported.u64_at(0))
    }

    pub(crate) fn ctl(&self) -> RawFd {
        self.ctl.as_raw_fd()
    }

    /// A handle that wasn't used.
    pub(crate) fn handle(&self) -> u32 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Handles are given out from that number on.
    pub(crate) fn skip_to(&self, handle: u32) {
        self.next.store(handle, Ordering::Relaxed);
    }

    /// An NVOS64 of this release.
    pub(crate) fn nvos64(
        &self,
        parent: u32,
        handle: u32,
        class: u32,
        params: u64,
        params_bytes: usize,
    ) -> Vec<u8> {
        let mut bytes = vec![0; self.abi.nvos64_bytes];
        bytes.set_u32(0, self.client);
        bytes.set_u32(4, parent);
        bytes.set_u32(8, handle);
        bytes.set_u32(12, class);
        bytes.set_u64(16, params);
        if self.abi.nvos64_bytes == 48 {
            bytes.set_u32(32, u32::try_from(params_bytes).unwrap_or(0));
        }
        bytes
    }

    /// Makes an object with parameters.
    pub(crate) fn alloc_object(
        &self,
        fd: RawFd,
        parent: u32,
        handle: u32,
        class: u32,
        params: &mut [u8],
    ) -> Result<u32, Fail> {
        // A later driver's program has all of its struct.
        let mut space = [0; 1024];
        let whole = space.get_mut(..params.len() + NEW_FIELDS_BYTES).expect("structs are short");
        whole[..params.len()].copy_from_slice(params);
        let address = if params.is_empty() { 0 } else { whole.as_mut_ptr().addr() as u64 };
        let mut bytes = self.nvos64(parent, handle, class, address, params.len());
        let made = call(fd, NV_ESC_RM_ALLOC, &mut bytes, self.abi.nvos64_status);
        params.copy_from_slice(&whole[..params.len()]);
        made?;
        Ok(bytes.u32_at(8))
    }

    pub(crate) fn make_client(&mut self) -> Result<(), Fail> {
        self.client = self.new_client()?;
        Ok(())
    }

    /// Another client of the same file.
    pub(crate) fn new_client(&self) -> Result<u32, Fail> {
        let mut bytes = self.nvos64(0, 0, NV01_ROOT_CLIENT, 0, 0);
        bytes.set_u32(0, 0);
        call(self.ctl(), NV_ESC_RM_ALLOC, &mut bytes, self.abi.nvos64_status)?;
        Ok(bytes.u32_at(8))
    }

    pub(crate) fn make_device(&mut self, instance: u32) -> Result<(), Fail> {
        let mut params = [0; 56];
        params.set_u32(0, instance);
        self.device =
            self.alloc_object(self.ctl(), self.client, self.handle(), NV01_DEVICE_0, &mut params)?;
        Ok(())
    }

    pub(crate) fn make_subdevice(&mut self) -> Result<(), Fail> {
        let mut params = [0; 4];
        self.subdevice = self.alloc_object(
            self.ctl(),
            self.device,
            self.handle(),
            NV20_SUBDEVICE_0,
            &mut params,
        )?;
        Ok(())
    }

    /// The parameters of an allocation of video memory, in 4 KiB pages.
    pub(crate) fn memory_params(&self, bytes: u64) -> Vec<u8> {
        let mut params = vec![0; self.abi.memory_params_bytes];
        params.set_u32(0, 0x6370_6775);
        params.set_u32(24, 1 << NVOS32_ATTR_PAGE_SIZE_SHIFT);
        params.set_u64(64, bytes);
        params
    }

    /// Takes video memory: its handle, and the bytes that were given.
    pub(crate) fn alloc(&self, bytes: u64) -> Result<(u32, u64), Fail> {
        self.alloc_as(self.ctl(), self.handle(), NV01_MEMORY_LOCAL_USER, bytes)
    }

    pub(crate) fn alloc_as(
        &self,
        fd: RawFd,
        handle: u32,
        class: u32,
        bytes: u64,
    ) -> Result<(u32, u64), Fail> {
        let mut params = self.memory_params(bytes);
        let handle = self.alloc_object(fd, self.device, handle, class, &mut params)?;
        Ok((handle, params.u64_at(88).wrapping_add(1)))
    }

    /// `NV_ESC_RM_ALLOC_MEMORY`: the limit that comes back.
    pub(crate) fn alloc27(
        &self,
        class: u32,
        flags: u32,
        address: u64,
        limit: u64,
    ) -> Result<u64, Fail> {
        // A call of the GPU's own node; which control file it belongs to is registered once.
        let mut register = [0; 4];
        register.set_u32(0, u32::try_from(self.ctl()).unwrap_or(u32::MAX));
        let _ = raw_ioctl(self.gpu.as_raw_fd(), command(NV_ESC_REGISTER_FD, 4), &mut register);
        let mut bytes = [0; 56];
        bytes.set_u32(0, self.client);
        bytes.set_u32(4, self.device);
        bytes.set_u32(8, self.handle());
        bytes.set_u32(12, class);
        bytes.set_u32(16, flags);
        bytes.set_u64(24, address);
        bytes.set_u64(32, limit);
        call(self.gpu.as_raw_fd(), NV_ESC_RM_ALLOC_MEMORY, &mut bytes, 40)?;
        Ok(bytes.u64_at(32))
    }

    /// `NV_ESC_EXPORT_TO_DMABUF_FD`, of one object.
    pub(crate) fn dmabuf(&self, memory: u32) -> Result<(), Fail> {
        let (size, status_at) = self.abi.export_dmabuf;
        let mut bytes = vec![0; size];
        bytes.set_u32(0, u32::MAX);
        bytes.set_u32(4, self.client);
        bytes.set_u32(8, 1);
        bytes.set_u32(12, 1);
        // `handles`, since 570 behind `mappingType`.
        bytes.set_u32(if size == 2600 { 32 } else { 36 }, memory);
        call(self.gpu.as_raw_fd(), NV_ESC_EXPORT_TO_DMABUF_FD, &mut bytes, status_at)
    }

    fn nvos32(&self, function: u32) -> [u8; NVOS32_PARAMETERS_BYTES] {
        let mut bytes = [0; NVOS32_PARAMETERS_BYTES];
        bytes.set_u32(0, self.client);
        bytes.set_u32(4, self.device);
        bytes.set_u32(8, function);
        bytes
    }

    /// Takes video memory by `NV_ESC_RM_VID_HEAP_CONTROL`.
    pub(crate) fn heap(&self, size: u64) -> Result<(u32, u64), Fail> {
        let mut bytes = self.nvos32(NVOS32_FUNCTION_ALLOC_SIZE);
        bytes.set_u32(40, OWNER);
        bytes.set_u32(44, self.handle());
        bytes.set_u32(52, NVOS32_ALLOC_FLAGS_MEMORY_HANDLE_PROVIDED);
        bytes.set_u32(56, 1 << NVOS32_ATTR_PAGE_SIZE_SHIFT);
        bytes.set_u64(88, size);
        call(self.ctl(), NV_ESC_RM_VID_HEAP_CONTROL, &mut bytes, 20)?;
        Ok((bytes.u32_at(44), bytes.u64_at(112).wrapping_add(1)))
    }

    /// Three allocations with one struct, never set again; the driver chooses handles.
    pub(crate) fn heaps(&self, size: u64) -> Result<Vec<u32>, Fail> {
        let mut bytes = self.nvos32(NVOS32_FUNCTION_ALLOC_SIZE);
        bytes.set_u32(40, OWNER);
        bytes.set_u32(56, 1 << NVOS32_ATTR_PAGE_SIZE_SHIFT);
        bytes.set_u64(88, size);
        let mut list = Vec::new();
        for _ in 0..3 {
            call(self.ctl(), NV_ESC_RM_VID_HEAP_CONTROL, &mut bytes, 20)?;
            list.push(bytes.u32_at(44));
        }
        Ok(list)
    }

    /// Total and free bytes by NVOS32's INFO.
    pub(crate) fn heap_info(&self) -> Result<(u64, u64), Fail> {
        let mut bytes = self.nvos32(NVOS32_FUNCTION_INFO);
        call(self.ctl(), NV_ESC_RM_VID_HEAP_CONTROL, &mut bytes, 20)?;
        Ok((bytes.u64_at(24), bytes.u64_at(32)))
    }

    /// Frees the client by another file than its own.
    pub(crate) fn free_client_by(&self, fd: RawFd) -> Result<(), Fail> {
        let mut bytes = [0; 16];
        bytes.set_u32(0, self.client);
        bytes.set_u32(8, self.client);
        call(fd, NV_ESC_RM_FREE, &mut bytes, 12)
    }

    pub(crate) fn free(&self, parent: u32, handle: u32) -> Result<(), Fail> {
        let mut bytes = [0; 16];
        bytes.set_u32(0, self.client);
        bytes.set_u32(4, parent);
        bytes.set_u32(8, handle);
        call(self.ctl(), NV_ESC_RM_FREE, &mut bytes, 12)
    }

    /// Another handle of memory, in `client` under `parent`.
    pub(crate) fn dup(
        &self,
        client: u32,
        parent: u32,
        from_client: u32,
        source: u32,
    ) -> Result<u32, Fail> {
        self.dup_as(self.handle(), client, parent, from_client, source)
    }

    /// The same with a handle of one's choice.
    pub(crate) fn dup_as(
        &self,
        handle: u32,
        client: u32,
        parent: u32,
        from_client: u32,
        source: u32,
    ) -> Result<u32, Fail> {
        let mut bytes = [0; 28];
        bytes.set_u32(0, client);
        bytes.set_u32(4, parent);
        bytes.set_u32(8, handle);
        bytes.set_u32(12, from_client);
        bytes.set_u32(16, source);
        call(self.ctl(), NV_ESC_RM_DUP_OBJECT, &mut bytes, 24)?;
        Ok(bytes.u32_at(8))
    }

    pub(crate) fn control(&self, object: u32, command: u32, params: &mut [u8]) -> Result<(), Fail> {
        let mut bytes = [0; 32];
        bytes.set_u32(0, self.client);
        bytes.set_u32(4, object);
        bytes.set_u32(8, command);
        bytes.set_u64(16, params.as_mut_ptr().addr() as u64);
        bytes.set_u32(24, u32::try_from(params.len()).unwrap_or(0));
        call(self.ctl(), NV_ESC_RM_CONTROL, &mut bytes, 28)
    }

    /// Writes bytes that differ from place to place into memory, reads the same back, and reports how
    /// many are as they were written.
    pub(crate) fn debug(&self, memory: u32, offset: u64, bytes: usize) -> Result<String, Fail> {
        let device = self.device;
        let debugger =
            self.alloc_object(self.ctl(), device, self.handle(), GT200_DEBUGGER, &mut [])?;
        let pattern = |at: usize| u8::try_from((at * 7 + at / 251) % 251).unwrap_or(0);
        let mut written: Vec<u8> = (0..bytes).map(pattern).collect();
        let mut read = vec![0xff; bytes];
        let access = |command, buffer: &mut [u8]| {
            let mut params = [0; 24];
            params.set_u32(0, memory);
            params.set_u32(4, u32::try_from(bytes).unwrap_or(u32::MAX));
            params.set_u64(8, offset);
            params.set_u64(16, buffer.as_mut_ptr().addr() as u64);
            let before = params;
            let done = self.control(debugger, command, &mut params);
            assert_eq!(params, before, "nothing of it is the driver's to change");
            done
        };
        let wrote = access(NV83DE_CTRL_CMD_DEBUG_WRITE_MEMORY, &mut written);
        let done = wrote.and_then(|()| access(NV83DE_CTRL_CMD_DEBUG_READ_MEMORY, &mut read));
        self.free(device, debugger)?;
        done?;
        Ok(format!("same={}", read.iter().zip(&written).filter(|(a, b)| a == b).count()))
    }

    /// The driver's version, branch and title, by three addresses.
    pub(crate) fn build_version(&self) -> Result<[String; 3], Fail> {
        let mut texts = [[0_u8; 64]; 3];
        let mut params = [0; 40];
        params.set_u32(0, 64);
        for (at, text) in texts.iter_mut().enumerate() {
            params.set_u64(8 + 8 * at, text.as_mut_ptr().addr() as u64);
        }
        self.control(self.client, NV0000_CTRL_CMD_SYSTEM_GET_BUILD_VERSION, &mut params)?;
        Ok(texts.map(|text| String::from_utf8_lossy(&text).trim_end_matches('\0').to_owned()))
    }

    /// The classes of the device: asked how many, then which.
    pub(crate) fn classes(&self) -> Result<Vec<u32>, Fail> {
        let mut params = [0; 16];
        self.control(self.device, NV0080_CTRL_CMD_GPU_GET_CLASSLIST, &mut params)?;
        let mut list = vec![0; 4 * params.u32_at(0) as usize];
        params.set_u64(8, list.as_mut_ptr().addr() as u64);
        self.control(self.device, NV0080_CTRL_CMD_GPU_GET_CLASSLIST, &mut params)?;
        Ok(list.chunks_exact(4).map(|class| class.u32_at(0)).collect())
    }

    /// Data by index, of a control with one list.
    pub(crate) fn information(&self, command: u32, indices: &[u32]) -> Result<Vec<u32>, Fail> {
        let mut list = fb_list(indices);
        let mut params = [0; 32];
        params.set_u32(0, u32::try_from(indices.len()).unwrap_or(0));
        params.set_u64(8, list.as_mut_ptr().addr() as u64);
        let size = if command == NV2080_CTRL_CMD_GR_GET_INFO { 32 } else { 16 };
        self.control(self.subdevice, command, &mut params[..size])?;
        Ok(list.chunks_exact(8).map(|entry| entry.u32_at(4)).collect())
    }

    /// What the firmware makes of a number.
    pub(crate) fn firmware(&self, number: u32) -> Result<u32, Fail> {
        let mut params = [0; 16];
        params.set_u32(0, number);
        self.control(self.subdevice, FIRMWARE_CTRL_CMD, &mut params)?;
        Ok(params.u32_at(4))
    }

    /// KiB by index, by the list that is elsewhere.
    pub(crate) fn fb_info(&self, indices: &[u32]) -> Result<Vec<u32>, Fail> {
        let mut list = fb_list(indices);
        let mut params = [0; 16];
        params.set_u32(0, u32::try_from(indices.len()).unwrap_or(0));
        params.set_u64(8, list.as_mut_ptr().addr() as u64);
        self.control(self.subdevice, NV2080_CTRL_CMD_FB_GET_INFO, &mut params)?;
        Ok(list.chunks_exact(8).map(|entry| entry.u32_at(4)).collect())
    }

    /// KiB by index, by the list that is inline.
    pub(crate) fn fb_info_v2(&self, indices: &[u32]) -> Result<Vec<u32>, Fail> {
        let mut params = vec![0; 4 + 8 * self.abi.fb_info_max_list];
        params.set_u32(0, u32::try_from(indices.len()).unwrap_or(0));
        let list = fb_list(indices);
        params[4..4 + list.len()].copy_from_slice(&list);
        self.control(self.subdevice, NV2080_CTRL_CMD_FB_GET_INFO_V2, &mut params)?;
        Ok(params[4..4 + list.len()].chunks_exact(8).map(|entry| entry.u32_at(4)).collect())
    }

    /// Processes with a subdevice, or with an object of another class on a channel.
    pub(crate) fn pids(&self, class: u32) -> Result<Vec<u32>, Fail> {
        let mut params = vec![0; 12 + 4 * NV2080_CTRL_GPU_GET_PIDS_MAX_COUNT];
        params.set_u32(4, class);
        self.control(self.subdevice, NV2080_CTRL_CMD_GPU_GET_PIDS, &mut params)?;
        let count = params.u32_at(8) as usize;
        Ok(params[12..].chunks_exact(4).take(count).map(|pid| pid.u32_at(0)).collect())
    }

    /// Private, shared and owned, shared and duplicated bytes of a process.
    pub(crate) fn pid_bytes(&self, pid: u32) -> Result<[u64; 3], Fail> {
        let mut params = vec![0; 8 + 72 * NV2080_CTRL_GPU_GET_PID_INFO_MAX_COUNT as usize];
        params.set_u32(0, 1);
        params.set_u32(8, pid);
        self.control(self.subdevice, NV2080_CTRL_CMD_GPU_GET_PID_INFO, &mut params)?;
        status(params.u32_at(16))?;
        Ok([24, 32, 40].map(|at| params.u64_at(at)))
    }

    /// Puts memory into a file, which keeps it.
    pub(crate) fn export(&self, memory: u32, file: RawFd) -> Result<(), Fail> {
        let mut params = [0; 24];
        params.set_u32(0, 1);
        params.set_u32(4, self.device);
        params.set_u32(8, self.device);
        params.set_u32(12, memory);
        params.set_u32(16, u32::try_from(file).unwrap_or(u32::MAX));
        self.control(self.client, NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD, &mut params)
    }

    /// A handle of the memory that a file keeps.
    pub(crate) fn import(&self, file: RawFd) -> Result<u32, Fail> {
        let mut params = [0; 20];
        params.set_u32(0, u32::try_from(file).unwrap_or(u32::MAX));
        params.set_u32(4, 1);
        params.set_u32(8, self.device);
        params.set_u32(12, self.device);
        params.set_u32(16, self.handle());
        self.control(self.client, NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD, &mut params)?;
        Ok(params.u32_at(16))
    }

    /// Puts a list of objects into a file, from its place `first` on; one that has none gets
    /// `places` of them. 0 is no object.
    pub(crate) fn export_list(
        &self,
        file: RawFd,
        places: u16,
        first: u16,
        objects: &[u32],
    ) -> Result<(), Fail> {
        let mut params = [0; 2128];
        params.set_u32(0, u32::try_from(file).unwrap_or(u32::MAX));
        params.set_u32(4, self.device);
        params[8..10].copy_from_slice(&places.to_le_bytes());
        params[10..14].copy_from_slice(b"cgpu");
        for (object, place) in objects.iter().zip(params[76..2124].chunks_exact_mut(4)) {
            place.set_u32(0, *object);
        }
        let count = u16::try_from(objects.len()).unwrap_or(u16::MAX);
        params[2124..2126].copy_from_slice(&count.to_le_bytes());
        params[2126..].copy_from_slice(&first.to_le_bytes());
        self.control(self.client, NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD, &mut params)
    }

    /// Handles of what is in a file from its place `first` on, and of what kind each is; where
    /// `handles` are 0 the driver chooses them.
    pub(crate) fn import_list(
        &self,
        file: RawFd,
        first: u16,
        handles: &[u32],
    ) -> Result<Vec<(u32, u8)>, Fail> {
        let mut params = [0; 652];
        params.set_u32(0, u32::try_from(file).unwrap_or(u32::MAX));
        params.set_u32(4, self.device);
        for (handle, place) in handles.iter().zip(params[8..520].chunks_exact_mut(4)) {
            place.set_u32(0, *handle);
        }
        let count = u16::try_from(handles.len()).unwrap_or(u16::MAX);
        params[648..650].copy_from_slice(&count.to_le_bytes());
        params[650..].copy_from_slice(&first.to_le_bytes());
        self.control(self.client, NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECTS_FROM_FD, &mut params)?;
        let made = params[8..520].chunks_exact(4).zip(&params[520..648]).take(handles.len());
        Ok(made.map(|(handle, kind)| (handle.u32_at(0), *kind)).collect())
    }

    /// Places of a file, and what the first exporter wrote to that.
    pub(crate) fn export_info(&self, file: RawFd) -> Result<(u16, [u8; 4]), Fail> {
        let (bytes, at) = self.abi.export_info;
        let mut params = vec![0; bytes];
        params.set_u32(0, u32::try_from(file).unwrap_or(u32::MAX));
        let command = NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO;
        self.control(self.client, command, &mut params)?;
        let [low, high, metadata @ ..]: [u8; 6] = params[at..at + 6].try_into().expect("6 bytes");
        Ok((u16::from_le_bytes([low, high]), metadata))
    }

    /// The GPU's UUID.
    pub(crate) fn uuid(&self) -> Result<[u8; 16], Fail> {
        let mut params = [0; 268];
        params.set_u32(4, 2);
        self.control(self.subdevice, NV2080_CTRL_CMD_GPU_GET_GID_INFO, &mut params)?;
        Ok(params[12..28].try_into().expect("it is 16 bytes"))
    }
}

fn fb_list(indices: &[u32]) -> Vec<u8> {
    let mut list = vec![0; 8 * indices.len()];
    list.chunks_exact_mut(8).zip(indices).for_each(|(entry, index)| entry.set_u32(0, *index));
    list
}
