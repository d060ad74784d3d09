//! Calls to `nvidiactl` and `nvidiaN`: from a struct's bytes to the driver and back.
//!
//! As `nvidia_ioctl` (nv.c) and `RmIoctl` (escape.c) do: by number and size alone, type
//! byte and direction are never looked at; a wrong size or an unknown number is EINVAL;
//! what goes wrong later is in the struct's status, and the call returns 0.

use std::cell::Cell;
use std::time::Duration;

use libc::{EFAULT, EINVAL};

use crate::abi::*;
use crate::bytes::Fields;
use crate::caller::Caller;
use crate::control;
use crate::fault::{Action, Kind};
use crate::heap;
use crate::object::{Allocation, Asker, File, Status, Wanted, is_memory};
use crate::shared::Shared;
use crate::tree::Device;

/// An errno.
pub(crate) type Errno = i32;

/// A call, and all that it needs.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    pub(crate) sim: &'a Shared,
    pub(crate) caller: Caller,
    /// The node that the file was opened by.
    pub(crate) device: Device,
    pub(crate) file: File,
    /// How much later it's answered than it's executed.
    pub(crate) late: Cell<Duration>,
}

/// What a call's fault leaves to do.
pub(crate) enum Met {
    /// What it would do anyway.
    Nothing,
    Status(Status),
    /// Report success without freeing.
    Lose,
    /// Take it for one of another class.
    Swap(u32),
}

impl Call<'_> {
    /// Counts a call, and does to it what a fault says.
    pub(crate) fn meet(&self, kind: Kind, what: u32) -> Result<Met, Errno> {
        self.sim.count(kind, what);
        match self.sim.meet(kind, what) {
            None | Some(Action::Delay { .. } | Action::Hang) => Ok(Met::Nothing),
            Some(Action::Late { ms }) => {
                self.late.set(Duration::from_millis(ms));
                Ok(Met::Nothing)
            }
            Some(Action::Status(status)) => Ok(Met::Status(status)),
            Some(Action::Errno(errno)) => Err(errno),
            Some(Action::Lose) => Ok(Met::Lose),
            Some(Action::Swap { class }) => Ok(Met::Swap(class)),
        }
    }

    /// Who asks: by the file, or the control file registered for it.
    pub(crate) fn asker(&self) -> Asker<'_> {
        let registered = self.sim.driver().registered.get(&self.file).copied();
        Asker {
            caller: self.caller,
            file: registered.unwrap_or(self.file),
            nodes: self.sim.nodes(),
        }
    }

    /// A copy of the caller's parameters.
    pub(crate) fn copy_in(&self, address: u64, len: usize) -> Result<Vec<u8>, Status> {
        let mut bytes = vec![0; len];
        self.caller.read(address, &mut bytes).ok_or(NV_ERR_INVALID_ADDRESS)?;
        Ok(bytes)
    }

    /// The file behind one of the caller's descriptors: `nv_get_file_private`.
    pub(crate) fn descriptor(&self, fd: u32) -> Option<File> {
        match self.sim.find_file() {
            Some(find) => find(self.caller.tid(), fd),
            None => self.caller.open_file(self.sim.nodes().device, i32::try_from(fd).ok()?),
        }
    }

    /// What a struct has grown by is answered there.
    pub(crate) fn answer_in_new_fields(&self, params: &mut [u8], size: usize) {
        params.get_mut(size..).unwrap_or_default().fill(0xa5);
    }

    fn is_control(&self) -> bool {
        self.device == Device::Control
    }
}

/// `nvidia_ioctl`.
pub(crate) fn ioctl(call: &Call<'_>, number: u32, bytes: &mut [u8]) -> Result<(), Errno> {
    if number != NV_ESC_IOCTL_XFER_CMD {
        return dispatch(call, number, bytes);
    }
    if bytes.len() != 16 {
        return Err(EINVAL);
    }
    let (inner, size, address) = (bytes.u32_at(0), bytes.u32_at(4) as usize, bytes.u64_at(8));
    if size > NV_ABSOLUTE_MAX_IOCTL_SIZE {
        return Err(EINVAL);
    }
    let mut copy = vec![0; size];
    call.caller.read(address, &mut copy).ok_or(EFAULT)?;
    // A second wrapper inside is a number like any other, and unknown.
    let done =
        if inner == NV_ESC_IOCTL_XFER_CMD { Err(EINVAL) } else { dispatch(call, inner, &mut copy) };
    if done != Err(EFAULT) {
        call.caller.write(address, &copy).ok_or(EFAULT)?;
    }
    done
}

pub(crate) fn status_of<T>(result: Result<T, Status>) -> Status {
    result.err().unwrap_or(NV_OK)
}

fn dispatch(call: &Call<'_>, number: u32, bytes: &mut [u8]) -> Result<(), Errno> {
    let abi = &call.sim.abi;
    let control_only = !matches!(
        number,
        NV_ESC_RM_ALLOC
            | NV_ESC_RM_ALLOC_MEMORY
            | NV_ESC_RM_I2C_ACCESS
            | NV_ESC_RM_GET_EVENT_DATA
            | NV_ESC_ALLOC_OS_EVENT
            | NV_ESC_FREE_OS_EVENT
            | NV_ESC_REGISTER_FD
            | NV_ESC_EXPORT_TO_DMABUF_FD
    );
    if control_only && !call.is_control() {
        return Err(EINVAL);
    }
    let sized = |expected: usize| if bytes.len() == expected { Ok(()) } else { Err(EINVAL) };
    match number {
        NV_ESC_RM_ALLOC => {
            let status_at = match bytes.len() {
                32 => abi.nvos21_status,
                len if len == abi.nvos64_bytes => abi.nvos64_status,
                _ => return Err(EINVAL),
            };
            allocate(call, bytes, status_at)
        }
        NV_ESC_RM_ALLOC_MEMORY => {
            sized(56)?;
            if call.is_control() {
                return Err(EINVAL);
            }
            heap::allocate_memory(call, bytes)
        }
        NV_ESC_RM_ALLOC_OBJECT => {
            sized(20)?;
            let met = call.meet(Kind::Other, number)?;
            let status = match met {
                Met::Status(status) => status,
                _ => status_of(make(call, bytes, &mut None)),
            };
            bytes.set_u32(16, status);
            Ok(())
        }
        NV_ESC_RM_FREE => {
            sized(16)?;
            let (client, handle) = (bytes.u32_at(0), bytes.u32_at(8));
            let met = call.meet(Kind::Free, handle)?;
            let status = free(call, client, handle, &met);
            bytes.set_u32(12, status);
            Ok(())
        }
        NV_ESC_RM_CONTROL => {
            sized(32)?;
            let met = call.meet(Kind::Control, bytes.u32_at(8))?;
            let status = match met {
                Met::Status(status) => status,
                _ => status_of(control::control(call, bytes)),
            };
            bytes.set_u32(28, status);
            Ok(())
        }
        NV_ESC_RM_VID_HEAP_CONTROL => {
            sized(NVOS32_PARAMETERS_BYTES)?;
            let met = call.meet(Kind::Heap, bytes.u32_at(8))?;
            let status = match met {
                Met::Status(status) => status,
                met => status_of(heap::control(call, bytes, &met)),
            };
            bytes.set_u32(20, status);
            Ok(())
        }
        NV_ESC_RM_DUP_OBJECT => {
            sized(28)?;
            let met = call.meet(Kind::Dup, 0)?;
            let status = match met {
                Met::Status(status) => status,
                _ => status_of(duplicate(call, bytes)),
            };
            bytes.set_u32(24, status);
            Ok(())
        }
        _ => other(call, number, bytes),
    }
}

/// The rarer calls.
fn other(call: &Call<'_>, number: u32, bytes: &mut [u8]) -> Result<(), Errno> {
    let abi = &call.sim.abi;
    let forced = match call.meet(Kind::Other, number)? {
        Met::Status(status) => Some(status),
        _ => None,
    };
    let sized = |expected: usize| if bytes.len() == expected { Ok(()) } else { Err(EINVAL) };
    // Those of which nothing matters here but the client: where it is, and the status.
    let plain = match number {
        NV_ESC_RM_SHARE => Some((24, 20)),
        NV_ESC_RM_IDLE_CHANNELS => Some((56, 48)),
        NV_ESC_RM_MAP_MEMORY => Some((56, 40)),
        NV_ESC_RM_UNMAP_MEMORY => Some((32, 24)),
        NV_ESC_RM_ALLOC_CONTEXT_DMA2 => Some((56, 48)),
        NV_ESC_RM_MAP_MEMORY_DMA => Some(abi.nvos46),
        NV_ESC_RM_UNMAP_MEMORY_DMA => Some(abi.nvos47),
        NV_ESC_RM_BIND_CONTEXT_DMA => Some((16, 12)),
        NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO => Some((40, 32)),
        _ => None,
    };
    if let Some((size, status_at)) = plain {
        sized(size)?;
        let status = forced.unwrap_or_else(|| status_of(simple(call, number, bytes)));
        bytes.set_u32(status_at, status);
        return Ok(());
    }
    match number {
        NV_ESC_CARD_INFO => {
            let driver = call.sim.driver();
            for (entry, gpu) in bytes.chunks_exact_mut(72).zip(&driver.gpus) {
                entry.fill(0);
                entry.set_u32(0, 1);
                // pci_info: domain, bus, slot, function; vendor and device.
                if let Some(bus) = entry.get_mut(8) {
                    *bus = gpu.bus;
                }
                entry.set_u32(12, 0x10de | 0x1db1 << 16);
                entry.set_u32(16, gpu.id());
                entry.set_u64(48, gpu.memory_bytes);
                entry.set_u32(56, gpu.minor);
            }
            Ok(())
        }
        NV_ESC_REGISTER_FD => {
            sized(4)?;
            let control = call.descriptor(bytes.u32_at(0)).ok_or(EINVAL)?;
            if call.sim.device_of(control) != Some(Device::Control) {
                return Err(EINVAL);
            }
            let mut driver = call.sim.driver();
            if driver.registered.contains_key(&call.file) {
                return Err(EINVAL);
            }
            driver.registered.insert(call.file, control);
            Ok(())
        }
        NV_ESC_ALLOC_OS_EVENT | NV_ESC_FREE_OS_EVENT => {
            sized(16)?;
            let (client, fd) = (bytes.u32_at(0), bytes.u32_at(8));
            let mut driver = call.sim.driver();
            let had =
                driver.events.iter().any(|(owner, number, _)| (*owner, *number) == (client, fd));
            let status = match (number, had) {
                // allocate_os_event (osapi.c): one event a descriptor.
                (NV_ESC_ALLOC_OS_EVENT, true) => NV_ERR_INSUFFICIENT_RESOURCES,
                (NV_ESC_ALLOC_OS_EVENT, false) => {
                    driver.events.push((client, fd, call.file));
                    NV_OK
                }
                (_, false) => NV_ERR_INVALID_ARGUMENT,
                (_, true) => {
                    driver.events.retain(|(owner, number, _)| (*owner, *number) != (client, fd));
                    NV_OK
                }
            };
            bytes.set_u32(12, forced.unwrap_or(status));
            Ok(())
        }
        NV_ESC_CHECK_VERSION_STR => {
            sized(72)?;
            let version = call.sim.version.to_string();
            let given = bytes.get(8..).unwrap_or_default();
            let given = given.split(|byte| *byte == 0).next().unwrap_or_default();
            // NV_RM_API_VERSION_CMD_QUERY, else the version must be ours.
            let recognized = bytes.u32_at(0) == u32::from(b'2') || given == version.as_bytes();
            bytes.set_u32(4, u32::from(recognized));
            if let Some(text) = bytes.get_mut(8..) {
                text.fill(0);
                text.iter_mut().zip(version.bytes()).for_each(|(to, from)| *to = from);
            }
            if recognized { Ok(()) } else { Err(EINVAL) }
        }
        NV_ESC_SYS_PARAMS => sized(8),
        NV_ESC_EXPORT_TO_DMABUF_FD => {
            sized(abi.export_dmabuf.0)?;
            if call.is_control() {
                return Err(EINVAL);
            }
            bytes.set_u32(abi.export_dmabuf.1, forced.unwrap_or(NV_ERR_NOT_SUPPORTED));
            Ok(())
        }
        NV_ESC_RM_GET_EVENT_DATA => {
            sized(16)?;
            bytes.set_u32(12, forced.unwrap_or(NV_ERR_OBJECT_NOT_FOUND));
            Ok(())
        }
        _ => Err(EINVAL),
    }
}

fn simple(call: &Call<'_>, number: u32, bytes: &mut [u8]) -> Result<(), Status> {
    let asker = call.asker();
    // NVOS33: the mapping is for a descriptor of the caller's (rm_create_mmap_context).
    if number == NV_ESC_RM_MAP_MEMORY {
        call.descriptor(bytes.u32_at(48)).ok_or(NV_ERR_INVALID_ARGUMENT)?;
    }
    let mut driver = call.sim.driver();
    let client = bytes.u32_at(0);
    let entry = driver.client(client, asker.file, NV_ERR_INVALID_OBJECT_HANDLE)?;
    if matches!(number, NV_ESC_RM_MAP_MEMORY | NV_ESC_RM_UNMAP_MEMORY) {
        let memory = entry.objects.get(&bytes.u32_at(8)).ok_or(NV_ERR_OBJECT_NOT_FOUND)?;
        if !is_memory(memory.class) {
            return Err(NV_ERR_INVALID_OBJECT);
        }
    }
    if number == NV_ESC_RM_SHARE {
        // RS_SHARE_POLICY: type at 16, action at 18; 1 revokes.
        let policy = bytes.u32_at(16);
        let shares = policy & 0xffff != 0 && policy >> 16 & 1 == 0;
        let client = driver.clients.get_mut(&client).ok_or(NV_ERR_INVALID_CLIENT)?;
        let object = client.objects.get_mut(&bytes.u32_at(4)).ok_or(NV_ERR_OBJECT_NOT_FOUND)?;
        object.shared = shares;
    }
    Ok(())
}

fn free(call: &Call<'_>, client: u32, handle: u32, met: &Met) -> Status {
    if let Met::Status(status) = met {
        return *status;
    }
    let file = call.asker().file;
    status_of(call.sim.driver().free(file, client, handle, matches!(met, Met::Lose)))
}

fn allocate(call: &Call<'_>, bytes: &mut [u8], status_at: usize) -> Result<(), Errno> {
    let class = bytes.u32_at(12);
    let address = bytes.u64_at(16);
    let is_client = matches!(class, NV01_ROOT | NV01_ROOT_NON_PRIV | NV01_ROOT_CLIENT);
    let is_event = matches!(
        class,
        NV01_EVENT
            | NV01_EVENT_OS_EVENT
            | NV01_EVENT_KERNEL_CALLBACK
            | NV01_EVENT_KERNEL_CALLBACK_EX
    );
    if !is_event && !call.is_control() {
        return Err(EINVAL);
    }
    let status = match call.meet(Kind::Alloc, class)? {
        Met::Status(status) => status,
        Met::Swap(class) => {
            bytes.set_u32(12, class);
            status_of(with_params(call, bytes, class, address))
        }
        _ if is_client => {
            // User space always gets the _CLIENT class (escape.c).
            bytes.set_u32(12, NV01_ROOT_CLIENT);
            let made = call.sim.driver().make_client(&call.own_asker(), bytes.u32_at(8));
            match made {
                Ok(handle) => {
                    bytes.set_u32(8, handle);
                    NV_OK
                }
                Err(status) => status,
            }
        }
        _ => status_of(with_params(call, bytes, class, address)),
    };
    bytes.set_u32(status_at, status);
    Ok(())
}

impl Call<'_> {
    /// [`Call::asker`] for clients, which belong to the file they are made through.
    fn own_asker(&self) -> Asker<'_> {
        Asker { caller: self.caller, file: self.file, nodes: self.sim.nodes() }
    }
}

/// Copies the class's parameters in, makes the object, and copies them out. The size that
/// the caller states is not looked at (`rmapiParamsCopyInit`, param_copy.c).
fn with_params(call: &Call<'_>, bytes: &mut [u8], class: u32, address: u64) -> Result<(), Status> {
    let Some((size, required)) = class_params(&call.sim.abi, class) else {
        return make(call, bytes, &mut None);
    };
    if address == 0 {
        return if required { Err(NV_ERR_INVALID_ARGUMENT) } else { make(call, bytes, &mut None) };
    }
    let grown = call.sim.driver().lies.grown_bytes;
    let mut params = Some(call.copy_in(address, size + grown)?);
    make(call, bytes, &mut params)?;
    let mut params = params.unwrap_or_default();
    call.answer_in_new_fields(&mut params, size);
    call.caller.write(address, &params).ok_or(NV_ERR_INVALID_ADDRESS)
}

/// Bytes of a class's parameters, and whether they must be there (`resource_list.h`).
fn class_params(abi: &Abi, class: u32) -> Option<(usize, bool)> {
    Some(match class {
        NV01_DEVICE_0 => (56, false),
        NV20_SUBDEVICE_0 => (4, false),
        NV01_MEMORY_LOCAL_USER
        | NV_MEMORY_EXTENDED_USER
        | NV01_MEMORY_SYSTEM
        | NV50_MEMORY_VIRTUAL
        | NV01_MEMORY_DEVICELESS => (abi.memory_params_bytes, true),
        NV01_MEMORY_VIRTUAL => (24, true),
        NV_MEMORY_FABRIC => (abi.fabric_params.0, true),
        NV01_MEMORY_SYSTEM_OS_DESCRIPTOR => (40, true),
        NV01_EVENT
        | NV01_EVENT_OS_EVENT
        | NV01_EVENT_KERNEL_CALLBACK
        | NV01_EVENT_KERNEL_CALLBACK_EX => (24, true),
        FERMI_VASPACE_A => (abi.vaspace_params_bytes, true),
        KEPLER_CHANNEL_GROUP_A => (20, true),
        NV_SEMAPHORE_SURFACE => (16, true),
        NV_EVENT_BUFFER => (72, true),
        _ => return None,
    })
}

/// Bytes of a page, by `NVOS32_ATTR_PAGE_SIZE` (`memmgrDeterminePageSize`, roughly).
pub(crate) fn page_bytes(attributes: u32) -> u64 {
    match attributes >> NVOS32_ATTR_PAGE_SIZE_SHIFT & 3 {
        1 => 4 << 10,
        3 => 2 << 20,
        _ => 64 << 10,
    }
}

/// Makes an object of the class at offset 12, for NVOS21, NVOS64 and NVOS05.
fn make(call: &Call<'_>, bytes: &mut [u8], params: &mut Option<Vec<u8>>) -> Result<(), Status> {
    let asked = Allocation {
        client: bytes.u32_at(0),
        parent: bytes.u32_at(4),
        handle: bytes.u32_at(8),
        class: bytes.u32_at(12),
    };
    let mut wanted = Wanted::default();
    if let Some(params) = params {
        match asked.class {
            NV01_DEVICE_0 | NV20_SUBDEVICE_0 => wanted.instance = params.u32_at(0),
            NV_MEMORY_FABRIC => wanted.source = params.u32_at(call.sim.abi.fabric_params.1),
            NV01_MEMORY_LOCAL_USER | NV_MEMORY_EXTENDED_USER => {
                let (flags, attributes) = (params.u32_at(8), params.u32_at(24));
                let elsewhere = attributes >> NVOS32_ATTR_LOCATION_SHIFT & 3 != 0;
                if flags & NVOS32_ALLOC_FLAGS_VIRTUAL != 0
                    || elsewhere && asked.class == NV01_MEMORY_LOCAL_USER
                {
                    return Err(NV_ERR_INVALID_ARGUMENT);
                }
                wanted.bytes = params.u64_at(64);
                wanted.page_bytes = page_bytes(attributes);
            }
            // sysmemConstruct: not video memory.
            NV01_MEMORY_SYSTEM if params.u32_at(24) >> NVOS32_ATTR_LOCATION_SHIFT & 3 == 0 => {
                return Err(NV_ERR_INVALID_ARGUMENT);
            }
            NV01_MEMORY_SYSTEM_OS_DESCRIPTOR => {
                heap::check_os_descriptor(call, params.u64_at(16), params.u64_at(24))?;
            }
            // `semsurfConstruct_IMPL` (sem_surf.c): memory of the host.
            NV_SEMAPHORE_SURFACE => {
                let driver = call.sim.driver();
                let client = driver.clients.get(&asked.client).ok_or(NV_ERR_INVALID_CLIENT)?;
                let memory =
                    client.objects.get(&params.u32_at(0)).ok_or(NV_ERR_OBJECT_NOT_FOUND)?;
                if memory.class != NV01_MEMORY_SYSTEM {
                    return Err(NV_ERR_INVALID_PARAMETER);
                }
            }
            NV01_EVENT_OS_EVENT => {
                // osUserHandleToKernelPtr (osapi.c): `data` is a descriptor that an event
                // was made for.
                let fd = params.u32_at(16);
                let driver = call.sim.driver();
                let known = driver
                    .events
                    .iter()
                    .any(|(client, number, _)| (*client, *number) == (asked.client, fd));
                if !known {
                    return Err(NV_ERR_INVALID_ARGUMENT);
                }
            }
            _ => {}
        }
    }
    let asker = call.asker();
    let made = call.sim.driver().allocate(&asker, asked, wanted)?;
    bytes.set_u32(8, made.handle);
    if let Some(params) = params
        && let bytes @ 1.. = match asked.class {
            NV01_MEMORY_LOCAL_USER | NV_MEMORY_EXTENDED_USER => made.bytes,
            // sysmemConstruct_IMPL: the limit is that of what was asked for.
            NV01_MEMORY_SYSTEM => wanted.bytes,
            _ => 0,
        }
    {
        params.set_u64(64, bytes);
        params.set_u64(80, made.offset);
        params.set_u64(88, bytes - 1);
    }
    Ok(())
}

fn duplicate(call: &Call<'_>, bytes: &mut [u8]) -> Result<(), Status> {
    let asked = Allocation {
        client: bytes.u32_at(0),
        parent: bytes.u32_at(4),
        handle: bytes.u32_at(8),
        class: 0,
    };
    let asker = call.asker();
    let (source_client, source) = (bytes.u32_at(12), bytes.u32_at(16));
    let handle = call.sim.driver().duplicate(&asker, asked, source_client, source)?;
    bytes.set_u32(8, handle);
    Ok(())
}
