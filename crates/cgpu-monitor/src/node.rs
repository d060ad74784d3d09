//! Files of the driver, and the monitor's own calls on them, with the monitor's own copies.
//!
//! [`Device`] is an open file that is known to be a node of the driver. [`Rm`] makes the resource manager's calls on
//! a device. What is asked, and for whom, is not known here.
//!
//! [`Buffer`] is the memory for a struct that the driver writes to, with spare bytes behind the struct. The driver
//! copies as many bytes as its own struct has. For a call of UVM and the parameters of an allocation, it does not ask
//! for the caller's size (`UVM_ROUTE_CMD_STACK_INIT_CHECK`, uvm_ioctl.h; `rmapiParamsCopyInit`, param_copy.c). So a
//! driver whose struct has grown reads zeroes behind the monitor's struct, and writes its answer there.
#![allow(unsafe_code, reason = "an ioctl is a raw call")]

use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::libc;
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, makedev, statx};
use rustix::path::Arg;

use crate::gate::settings::{Identity, Node, NodeKind};
use crate::gate::syscall;
use nvrm::channel::ANY_CHANNEL;
use nvrm::number::{
    NV_ERR_OBJECT_NOT_FOUND, NV_ERR_OUT_OF_RANGE, NV_ESC_RM_ALLOC, NV_ESC_RM_CONTROL,
    NV_ESC_RM_FREE, NV_OK, NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE,
    NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO, NV01_DEVICE_0, NV01_ROOT_CLIENT, NV20_SUBDEVICE_0,
    NV0041_CTRL_CMD_GET_SURFACE_INFO, NV0080_CTRL_CMD_GPU_FIND_SUBDEVICE_HANDLE,
    NV2080_CTRL_CMD_GPU_GET_GID_INFO,
};
use nvrm::{Command, Key, Layout, Meaning, Release, about, export};

/// Asks a test's driver in memory; `None` where the file does not belong to that driver.
#[cfg(test)]
type AskInMemory = fn(BorrowedFd<'_>, u32, *mut u8) -> Option<Result<(), Errno>>;

/// The test's driver in memory, once a test has set it.
#[cfg(test)]
pub(crate) static IN_MEMORY: std::sync::OnceLock<AskInMemory> = std::sync::OnceLock::new();

/// The spare bytes behind a struct.
const SPARE_BYTES: usize = 256;

/// An open file of the driver.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) kind: NodeKind,
    file: OwnedFd,
    /// `st_dev` and `st_ino` of the node by which the file was opened.
    pub(crate) place: (u64, u64),
    /// The id of the mount on which the file was opened, if the kernel reports it.
    pub(crate) mount: Option<u64>,
}

/// What `statx` says of a file.
struct FileFacts {
    identity: Identity,
    /// `st_dev` and `st_ino`.
    place: (u64, u64),
    /// The id of the file's mount, if the kernel reports it.
    mount: Option<u64>,
}

/// Asks `statx` of a file, without synchronising with a file system that may be slow. `None` where it fails.
fn file_facts(directory: BorrowedFd<'_>, path: impl Arg, flags: AtFlags) -> Option<FileFacts> {
    let wanted = StatxFlags::TYPE | StatxFlags::INO | StatxFlags::MNT_ID;
    let answer = statx(directory, path, flags | AtFlags::STATX_DONT_SYNC, wanted).ok()?;
    let device = makedev(answer.stx_dev_major, answer.stx_dev_minor);
    let number = makedev(answer.stx_rdev_major, answer.stx_rdev_minor);
    let is_device = FileType::from_raw_mode(answer.stx_mode.into()) == FileType::CharacterDevice;
    let file = Identity::File { device, inode: answer.stx_ino };
    let identity = if is_device { Identity::Device(number) } else { file };
    let has_mount = answer.stx_mask & StatxFlags::MNT_ID.bits() != 0;
    let mount = has_mount.then_some(answer.stx_mnt_id);
    Some(FileFacts { identity, place: (device, answer.stx_ino), mount })
}

/// The node that the file is; `None` where it is none.
fn node_of<'a>(nodes: &'a [Node], facts: &FileFacts) -> Option<&'a Node> {
    nodes.iter().find(|node| node.identity == facts.identity)
}

/// The kind of node that the file at `path` is; `None` where it is no node.
pub(crate) fn kind_at(nodes: &[Node], path: &Path) -> Option<NodeKind> {
    node_of(nodes, &file_facts(CWD, path, AtFlags::empty())?).map(|node| node.kind)
}

/// The mount and the file system of the file at `path`, in `/proc/PID/fd`; `None` where it is no node.
pub(crate) fn mount_at(nodes: &[Node], path: &Path) -> Option<(u64, u64)> {
    let facts = file_facts(CWD, path, AtFlags::empty())?;
    node_of(nodes, &facts)?;
    Some((facts.mount?, facts.place.0))
}

/// `st_dev` and `st_ino` of the file at `path`.
pub(crate) fn place_at(path: &Path) -> Option<(u64, u64)> {
    file_facts(CWD, path, AtFlags::empty()).map(|facts| facts.place)
}

impl Device {
    /// The device of an open file; `None` where it is no node.
    pub(crate) fn of(nodes: &[Node], file: OwnedFd) -> Option<Self> {
        let facts = file_facts(file.as_fd(), c"", AtFlags::EMPTY_PATH)?;
        let kind = node_of(nodes, &facts)?.kind;
        Some(Device { kind, file, place: facts.place, mount: facts.mount })
    }

    /// The file, to hand on or to wait for.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The file's descriptor number, as a field of a struct.
    pub(crate) fn descriptor(&self) -> i32 {
        self.file.as_raw_fd()
    }

    /// Makes the call of `command` on the file; `bytes` is the call's struct.
    ///
    /// # Errors
    ///
    /// The error number of the system call, or `EINVAL` where `bytes` has another size than the struct.
    pub(crate) fn call(&self, command: &Command, bytes: &mut [u8]) -> Result<(), Errno> {
        let request = syscall::request(command).ok_or(Errno::EINVAL)?;
        if bytes.len() != command.size() {
            return Err(Errno::EINVAL);
        }
        self.ioctl(request, bytes.as_mut_ptr())
    }

    /// Makes a call of UVM on the file; `bytes` is the call's struct, of a size that the release has.
    ///
    /// # Errors
    ///
    /// The error number of the system call, or `EINVAL` where the release has no such struct.
    pub(crate) fn call_uvm(
        &self,
        release: &Release,
        number: u32,
        bytes: &mut Buffer,
    ) -> Result<(), Errno> {
        release.layout(Key::Uvm(number), bytes.len()).ok_or(Errno::EINVAL)?;
        self.ioctl(number, bytes.pointer())
    }

    fn ioctl(&self, request: u32, bytes: *mut u8) -> Result<(), Errno> {
        #[cfg(test)]
        if let Some(done) = IN_MEMORY.get().and_then(|ask| ask(self.file.as_fd(), request, bytes)) {
            return done;
        }
        // SAFETY: the driver copies the request's struct in and out, and `bytes` has as many bytes: the request
        // states its size (`call`), or the release's layout does, with spare bytes for a struct that has grown
        // (`call_uvm`). Addresses in the struct are the monitor's, or the decoder knows that the driver follows none.
        let done = unsafe { libc::ioctl(self.file.as_raw_fd(), libc::Ioctl::from(request), bytes) };
        Errno::result(done).map(drop)
    }
}

/// Why a call of the resource manager failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    Errno(Errno),
    /// The struct has this status.
    Status(u32),
}

/// The text for a message.
impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::Errno(errno) => f.write_str(errno.desc()),
            Failure::Status(status) => write!(f, "the driver's status {status:#x}"),
        }
    }
}

/// The resource manager, by an open file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rm<'a> {
    pub(crate) release: &'a Release,
    pub(crate) device: &'a Device,
}

impl Rm<'_> {
    /// The smallest struct of a call: for allocations, `NVOS21`.
    fn layout(&self, number: u32) -> Result<&'static Layout, Failure> {
        let layouts = self.release.layouts(Key::Escape(number));
        layouts.first().ok_or(Failure::Errno(Errno::EINVAL))
    }

    fn call(
        &self,
        number: u32,
        fields: &[(Meaning, u64)],
    ) -> Result<([u8; 64], &'static Layout), Failure> {
        self.call_with([0; 64], number, fields)
    }

    /// Makes a call with these fields, and returns the field `answer` of the result.
    pub(crate) fn call_for(
        &self,
        number: u32,
        fields: &[(Meaning, u64)],
        answer: Meaning,
    ) -> Result<u32, Failure> {
        let (bytes, layout) = self.call(number, fields)?;
        let view = bytes.get(..layout.size()).and_then(|bytes| layout.view(bytes));
        let answer = view.and_then(|view| view.u32(answer));
        answer.ok_or(Failure::Errno(Errno::EINVAL))
    }

    /// Makes `NV_ESC_RM_SHARE`, whose policy is a struct and not a number: `NVOS57_PARAMETERS.sharePolicy` at 8.
    pub(crate) fn call_with_policy(
        &self,
        number: u32,
        client: u32,
        handle: u32,
        policy: u64,
        kind: u32,
    ) -> Result<(), Failure> {
        let mut bytes = [0; 64];
        bytes[8..16].copy_from_slice(&policy.to_le_bytes());
        bytes[16..20].copy_from_slice(&kind.to_le_bytes());
        let fields = [(Meaning::Client, client.into()), (Meaning::Handle, handle.into())];
        self.call_with(bytes, number, &fields).map(drop)
    }

    fn call_with(
        &self,
        mut bytes: [u8; 64],
        number: u32,
        fields: &[(Meaning, u64)],
    ) -> Result<([u8; 64], &'static Layout), Failure> {
        let layout = self.layout(number)?;
        for (meaning, value) in fields {
            if let Some(patch) = layout.patch(*meaning, *value) {
                let _ = patch.apply(&mut bytes);
            }
        }
        let size = layout.size();
        let command = Command::of_ioctl(u32::try_from(size).unwrap_or(0) << 16 | number);
        let own = bytes.get_mut(..size).ok_or(Failure::Errno(Errno::EINVAL))?;
        self.device.call(&command, own).map_err(Failure::Errno)?;
        let status = layout.view(own).and_then(|view| view.u32(Meaning::Status));
        match status.unwrap_or(NV_OK) {
            NV_OK => Ok((bytes, layout)),
            status => Err(Failure::Status(status)),
        }
    }

    /// Makes an object, and returns its handle.
    pub(crate) fn allocate(
        &self,
        client: u32,
        parent: u32,
        handle: u32,
        class: u32,
        params: &mut [u8],
    ) -> Result<u32, Failure> {
        let mut params_copy = Buffer::of(params);
        let address = if params.is_empty() { 0 } else { params_copy.address() };
        let made = self.call_for(
            NV_ESC_RM_ALLOC,
            &[
                (Meaning::Client, client.into()),
                (Meaning::Parent, parent.into()),
                (Meaning::Handle, handle.into()),
                (Meaning::Class, class.into()),
                (Meaning::Params, address),
                (Meaning::ParamsSize, params.len() as u64),
            ],
            Meaning::Handle,
        );
        params.copy_from_slice(&params_copy);
        made
    }

    /// Makes a client of the monitor, and returns its handle.
    pub(crate) fn make_client(&self) -> Result<u32, Failure> {
        self.allocate(0, 0, 0, NV01_ROOT_CLIENT, &mut [])
    }

    /// Opens the GPU with the driver's number `number`, and returns the device's handle.
    pub(crate) fn open_gpu(&self, client: u32, number: u32) -> Result<u32, Failure> {
        let size = self.release.layouts(Key::Class(NV01_DEVICE_0)).first().map_or(56, Layout::size);
        let mut params = vec![0; size];
        if let Some(field) = params.get_mut(..4) {
            field.copy_from_slice(&number.to_le_bytes());
        }
        self.allocate(client, client, 0, NV01_DEVICE_0, &mut params)
    }

    /// The handle of the subdevice of a device. A device has at most one for each GPU: `subdeviceConstruct_IMPL`
    /// refuses another.
    pub(crate) fn find_subdevice(&self, client: u32, device: u32) -> Result<u32, Failure> {
        let mut params = [0; about::FIND_SUBDEVICE_BYTES];
        let command = NV0080_CTRL_CMD_GPU_FIND_SUBDEVICE_HANDLE;
        self.control(client, device, command, &mut params)?;
        Ok(about::answered_subdevice(&params))
    }

    /// Makes a subdevice of a device that has none, and returns its handle.
    pub(crate) fn make_subdevice(&self, client: u32, device: u32) -> Result<u32, Failure> {
        self.allocate(client, device, 0, NV20_SUBDEVICE_0, &mut [0; 4])
    }

    /// Frees an object with all objects below it.
    pub(crate) fn free(&self, client: u32, parent: u32, handle: u32) -> Result<(), Failure> {
        let fields = [
            (Meaning::Client, client.into()),
            (Meaning::Parent, parent.into()),
            (Meaning::Handle, handle.into()),
        ];
        self.call(NV_ESC_RM_FREE, &fields).map(drop)
    }

    /// Gives a command to an object, and returns the driver's answer in `params`.
    pub(crate) fn control(
        &self,
        client: u32,
        object: u32,
        command: u32,
        params: &mut [u8],
    ) -> Result<(), Failure> {
        let mut params_copy = Buffer::of(params);
        let fields = [
            (Meaning::Client, client.into()),
            (Meaning::Handle, object.into()),
            (Meaning::Command, command.into()),
            (Meaning::Params, params_copy.address()),
            (Meaning::ParamsSize, params.len() as u64),
        ];
        let done = self.call(NV_ESC_RM_CONTROL, &fields).map(drop);
        params.copy_from_slice(&params_copy);
        done
    }

    /// Whether an object of a client is memory of a GPU. A channel is not, even if its control page is there.
    pub(crate) fn is_gpu_memory(&self, client: u32, handle: u32) -> bool {
        let Some(mut place) = export::ask_where(self.release, handle) else { return false };
        let command = NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE;
        let asked = self.control(client, client, command, &mut place);
        if asked.is_err() || !export::is_of_a_gpu(self.release, &place) {
            return false;
        }
        let mut class = about::ask_class(handle);
        let command = NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO;
        let known = self.control(client, client, command, &mut class).is_ok();
        !(known && about::answered_class(&class) & 0xff == ANY_CHANNEL)
    }

    /// Whether a memory object is larger than `bytes`, or was freed: the handle then names other memory than was
    /// charged. `false` if the driver can't report it, for example because it does not know the control.
    pub(crate) fn is_larger_than(&self, client: u32, handle: u32, bytes: u64) -> bool {
        let mut entry = Buffer::of(&about::ask_size());
        let mut params = about::ask_surface(entry.address());
        match self.control(client, handle, NV0041_CTRL_CMD_GET_SURFACE_INFO, &mut params) {
            Ok(()) => about::answered_size(&entry) > bytes,
            // The driver reports no size from 16 TiB on.
            Err(Failure::Status(status)) => {
                matches!(status, NV_ERR_OBJECT_NOT_FOUND | NV_ERR_OUT_OF_RANGE)
            }
            Err(Failure::Errno(_)) => false,
        }
    }

    /// The UUID of a subdevice's GPU.
    pub(crate) fn uuid(&self, client: u32, subdevice: u32) -> Result<about::Uuid, Failure> {
        let mut params = about::ask_uuid();
        self.control(client, subdevice, NV2080_CTRL_CMD_GPU_GET_GID_INFO, &mut params)?;
        about::answered_uuid(&params).ok_or(Failure::Errno(Errno::EINVAL))
    }
}

/// The bytes of a struct, and spare bytes behind them.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    /// The struct and the spare bytes.
    all: Vec<u8>,
    size: usize,
}

impl Buffer {
    /// A struct of `size` zeroes.
    pub(crate) fn zeroed(size: usize) -> Self {
        let mut buffer = Self::default();
        buffer.reset(size);
        buffer
    }

    /// A copy of a struct.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let mut buffer = Self::zeroed(bytes.len());
        buffer.copy_from_slice(bytes);
        buffer
    }

    /// Makes the buffer a struct of `size` zeroes.
    pub(crate) fn reset(&mut self, size: usize) {
        self.reset_with(size, SPARE_BYTES);
    }

    /// Makes the buffer a list of `size` zeroes. Each entry may be up to twice as large for the driver.
    pub(crate) fn reset_list(&mut self, size: usize) {
        self.reset_with(size, size.max(SPARE_BYTES));
    }

    fn reset_with(&mut self, size: usize, spare: usize) {
        self.all.clear();
        self.all.resize(size + spare, 0);
        self.size = size;
    }

    /// Makes the buffer a struct of no bytes.
    pub(crate) fn clear(&mut self) {
        self.reset(0);
    }

    /// The struct's address, as a field of another struct.
    pub(crate) fn address(&mut self) -> u64 {
        self.pointer().addr() as u64
    }

    /// The first byte of the struct. The spare bytes follow the struct.
    pub(crate) fn pointer(&mut self) -> *mut u8 {
        self.all.as_mut_ptr()
    }

    /// Whether the driver has written into the spare bytes: its struct is larger then.
    pub(crate) fn was_exceeded(&self) -> bool {
        self.all.iter().skip(self.size).any(|byte| *byte != 0)
    }

    /// The bytes that are allocated.
    pub(crate) fn capacity(&self) -> usize {
        self.all.capacity()
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.all.get(..self.size).unwrap_or_default()
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.all.get_mut(..self.size).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes as a driver does whose struct is `by` bytes larger.
    fn write_as_grown(buffer: &mut Buffer, by: usize) {
        let size = buffer.len() + by;
        // Past the struct's end, as the kernel does, which knows only the address.
        buffer.all.get_mut(..size).expect("the spare bytes are part of it").fill(0xa5);
    }

    /// A struct that the driver writes larger stays within the buffer, and is detected.
    #[test]
    fn larger_struct_stays_in_buffer_and_is_detected() {
        for size in [0, 4, 16, 20, 4096] {
            for list in [false, true] {
                let mut buffer = Buffer::zeroed(size);
                if list {
                    buffer.reset_list(size);
                }
                assert!(buffer.len() == size && !buffer.was_exceeded());
                write_as_grown(&mut buffer, 0);
                assert!(!buffer.was_exceeded());
                write_as_grown(&mut buffer, if list { size.max(SPARE_BYTES) } else { SPARE_BYTES });
                assert!(buffer.len() == size && buffer.was_exceeded());
                buffer.reset(size / 2);
                assert!(buffer.iter().all(|byte| *byte == 0) && !buffer.was_exceeded());
            }
        }
        let copy = Buffer::of(&[1, 2, 3]);
        assert!(copy[..] == [1, 2, 3] && !copy.was_exceeded());
        assert!(copy.capacity() >= 3 + SPARE_BYTES);
    }
}
