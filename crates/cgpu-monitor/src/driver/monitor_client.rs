//! The monitor's own client of the driver.
//!
//! By this client the monitor asks what processes hold, which only a subdevice reports, and duplicates memory that is
//! to be mapped or exported. The client keeps the GPUs awake, so it is opened only when it is needed, on the host's
//! nodes. It stays open while the container has a process or a pin, and while another process may have the container's
//! descriptors, which may have gone anywhere.

use std::fs::OpenOptions;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use crate::driver::unanswered_calls::Unanswered;
use crate::gate::settings::{Node, NodeKind};
use crate::node::{Device, Failure, Rm};
use nvrm::about::{self, Held};
use nvrm::channel::ask_disable;
use nvrm::number::{
    NV_ERR_INVALID_ARGUMENT, NV_ERR_INVALID_CLIENT, NV_ERR_INVALID_OBJECT_HANDLE,
    NV_ERR_OBJECT_NOT_FOUND, NV_ESC_RM_DUP_OBJECT, NV_ESC_RM_SHARE, NV2080_CTRL_CMD_FB_GET_INFO_V2,
    NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS, NV2080_CTRL_CMD_GPU_GET_PID_INFO,
    NV2080_CTRL_CMD_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2,
};
use nvrm::usage::{self, Sample};
use nvrm::{Meaning, Release, fbinfo};

/// Devices that a driver can have: `NV_MAX_DEVICES`.
const MOST_DEVICES: u32 = 32;

/// Whether another client has an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Presence {
    /// The object is there, or the driver doesn't say.
    There,
    /// The client is there, and has no such object.
    NoObject,
    /// There is no such client.
    NoClient,
}

#[derive(Debug)]
pub(crate) struct MonitorClient {
    pub(crate) release: Release,
    pub(crate) control: Device,
    pub(crate) client: u32,
    /// The handles of device and subdevice, by the container's GPUs. `None` if the driver reports no such GPU.
    pub(crate) gpus: Vec<Option<(u32, u32)>>,
    /// The one of [`fbinfo::sizes`] that the driver takes, once it is known.
    list_size: OnceLock<usize>,
    /// Open files of the GPUs' nodes: without them the driver opens no device.
    gpu_files: Vec<OwnedFd>,
}

impl MonitorClient {
    /// Opens a client, with a device and a subdevice for each GPU of `uuids` that the driver reports. Fails if the
    /// control node can't be opened, or the driver makes no client.
    pub(crate) fn open(
        nodes: &[Node],
        release: &Release,
        uuids: &[about::Uuid],
    ) -> Result<Self, Unanswered> {
        let open = |kind: &dyn Fn(NodeKind) -> bool| {
            let found = nodes.iter().filter(|node| kind(node.kind)).filter_map(|node| {
                OpenOptions::new().read(true).write(true).open(&node.path).ok().map(OwnedFd::from)
            });
            found.collect::<Vec<OwnedFd>>()
        };
        let control = open(&|kind| kind == NodeKind::Control).pop().ok_or(Unanswered::NoNode)?;
        let control = Device::of(nodes, control).ok_or(Unanswered::NoNode)?;
        let gpu_files = open(&|kind| matches!(kind, NodeKind::Gpu(_)));
        let rm = Rm { release, device: &control };
        let refused = |failure: Failure| Unanswered::NoClient { reason: failure };
        let client = rm.make_client().map_err(refused)?;
        let mut gpus = vec![None; uuids.len()];
        for number in 0..MOST_DEVICES {
            if gpus.iter().all(Option::is_some) {
                break;
            }
            let Ok(device) = rm.open_gpu(client, number) else { continue };
            let found = rm
                .make_subdevice(client, device)
                .and_then(|subdevice| rm.uuid(client, subdevice).map(|uuid| (subdevice, uuid)));
            let gpu = found.ok().and_then(|(subdevice, uuid)| {
                let gpu = uuids.iter().position(|of| *of == uuid)?;
                Some((gpu, subdevice))
            });
            match gpu {
                Some((gpu, subdevice)) => {
                    if let Some(place) = gpus.get_mut(gpu) {
                        *place = Some((device, subdevice));
                    }
                }
                None => drop(rm.free(client, client, device)),
            }
        }
        Ok(Self::of((control, client), (gpus, gpu_files), release))
    }

    /// The container's GPUs that this client has no subdevice of: the driver can't be asked about them.
    pub(crate) fn missing(&self) -> impl Iterator<Item = usize> {
        self.gpus.iter().enumerate().filter(|(_, gpu)| gpu.is_none()).map(|(gpu, _)| gpu)
    }

    /// A client that is open already: its file and handle, and for the container's GPUs the handles of device and
    /// subdevice, with the open nodes.
    pub(crate) fn of(
        (control, client): (Device, u32),
        (gpus, gpu_files): (Vec<Option<(u32, u32)>>, Vec<OwnedFd>),
        release: &Release,
    ) -> Self {
        let list_size = OnceLock::new();
        MonitorClient { release: release.clone(), control, client, gpus, list_size, gpu_files }
    }

    /// The driver, to make calls through this client's file.
    pub(crate) fn rm(&self) -> Rm<'_> {
        Rm { release: &self.release, device: &self.control }
    }

    /// The open nodes of GPUs.
    pub(crate) fn gpu_files(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.gpu_files.iter().map(AsFd::as_fd)
    }

    /// Frees the client and all its objects.
    pub(crate) fn end(&self) {
        // If this fails, the client ends when its file is closed.
        let _ = self.rm().free(self.client, self.client, self.client);
    }

    /// What the processes `pids` hold on a GPU.
    ///
    /// The driver is asked by pid: its own list has only processes with a subdevice, and a process can have memory
    /// without a subdevice.
    pub(crate) fn held(&self, gpu: usize, pids: &[u32]) -> Result<Vec<Held>, Failure> {
        let Some(Some((_, subdevice))) = self.gpus.get(gpu) else { return Ok(Vec::new()) };
        let mut held = Vec::with_capacity(pids.len());
        for pids in pids.chunks(about::PID_INFO_MAX) {
            let mut params = about::ask_held(pids);
            self.rm().control(
                self.client,
                *subdevice,
                NV2080_CTRL_CMD_GPU_GET_PID_INFO,
                &mut params,
            )?;
            held.extend(about::answered_held(&params));
        }
        Ok(held)
    }

    /// The free memory of a GPU, in bytes.
    pub(crate) fn free_bytes(&self, gpu: usize) -> Result<u64, Failure> {
        let Some(Some((_, subdevice))) = self.gpus.get(gpu) else { return Ok(0) };
        let ask = |size| {
            let mut params = fbinfo::ask_free(size);
            self.rm().control(
                self.client,
                *subdevice,
                NV2080_CTRL_CMD_FB_GET_INFO_V2,
                &mut params,
            )?;
            fbinfo::answered_free(&params).ok_or(Failure::Errno(nix::errno::Errno::EINVAL))
        };
        if let Some(size) = self.list_size.get() {
            return ask(*size);
        }
        // The driver answers a list of another size than its own with this status (`_rmapiRmControl`, control.c).
        let mut answer = Err(Failure::Status(NV_ERR_INVALID_ARGUMENT));
        for size in fbinfo::sizes(&self.release) {
            answer = ask(size);
            if answer != Err(Failure::Status(NV_ERR_INVALID_ARGUMENT)) {
                let _ = self.list_size.set(size);
                break;
            }
        }
        answer
    }

    /// Which processes used a GPU lately. Empty if the driver doesn't say.
    pub(crate) fn samples(&self, gpu: usize) -> Vec<Sample> {
        let Some(Some((_, subdevice))) = self.gpus.get(gpu) else { return Vec::new() };
        for mut params in usage::questions() {
            let command = NV2080_CTRL_CMD_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2;
            if self.rm().control(self.client, *subdevice, command, &mut params).is_ok() {
                return usage::answered(&params);
            }
        }
        Vec::new()
    }

    /// Disables channels of any clients on a GPU, or enables them: all or none. `channels` are no more than
    /// [`MOST_CHANNELS`](nvrm::channel::MOST_CHANNELS).
    pub(crate) fn set_channels(
        &self,
        gpu: usize,
        disable: bool,
        channels: &[(u32, u32)],
    ) -> Result<(), Failure> {
        let subdevice = self.gpus.get(gpu).copied().flatten().map(|(_, subdevice)| subdevice);
        let subdevice = subdevice.ok_or(Failure::Errno(nix::errno::Errno::ENODEV))?;
        let command = NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS;
        self.rm().control(self.client, subdevice, command, &mut ask_disable(disable, channels))
    }

    /// Duplicates another client's object into this client, and returns the duplicate's handle. The duplicate goes
    /// below the device of `gpu`, if given: the driver would take any device, and attribute the memory to the wrong
    /// GPU.
    pub(crate) fn duplicate_from(
        &self,
        source_rm: &Rm<'_>,
        (client, handle): (u32, u32),
        gpu: Option<usize>,
    ) -> Result<u32, Failure> {
        share(source_rm, client, handle, self.client, COMPOSE)?;
        let mut duplicate = Err(Failure::Errno(nix::errno::Errno::ENODEV));
        let gpus = match gpu {
            Some(gpu) => self.gpus.get(gpu..=gpu),
            None => Some(self.gpus.as_slice()),
        };
        // An object below a subdevice can only be duplicated below a subdevice (`memCopyConstruct_IMPL`, mem.c).
        let parents = gpus.unwrap_or_default().iter().flatten();
        for parent in parents.flat_map(|(device, subdevice)| [*device, *subdevice]) {
            duplicate = self.duplicate(parent, client, handle);
            if duplicate.is_ok() {
                break;
            }
        }
        let _ = share(source_rm, client, handle, self.client, COMPOSE | REVOKE);
        duplicate
    }

    /// Duplicates an object of this client below the device of a GPU. `None` if the driver refuses.
    pub(crate) fn duplicate_own(&self, gpu: usize, handle: u32) -> Option<u32> {
        let (device, _) = self.gpus.get(gpu).copied().flatten()?;
        self.duplicate(device, self.client, handle).ok()
    }

    fn duplicate(&self, device: u32, client: u32, handle: u32) -> Result<u32, Failure> {
        self.rm().call_for(
            NV_ESC_RM_DUP_OBJECT,
            &[
                (Meaning::Client, self.client.into()),
                (Meaning::Parent, device.into()),
                (Meaning::SourceClient, client.into()),
                (Meaning::SourceHandle, handle.into()),
            ],
            Meaning::Handle,
        )
    }

    /// Whether there is a client `client`, of whatever process, and whether it has an object `handle`. `handle` may be
    /// the client's own.
    ///
    /// The monitor infers this from the error for a duplicate that the driver refuses: the driver searches for the
    /// client first, then for the object, and checks last whose they are (`serverCopyResource`, rs_server.c, and
    /// `clientGetResourceRef`, rs_client.c, of 515.43.04 and 595.45.04). A client itself is never duplicated.
    pub(crate) fn presence(&self, client: u32, handle: u32) -> Presence {
        let Some((device, _)) = self.gpus.iter().flatten().next() else { return Presence::There };
        match self.duplicate(*device, client, handle) {
            Ok(duplicate) => {
                self.free_duplicate(duplicate);
                Presence::There
            }
            Err(Failure::Status(NV_ERR_INVALID_CLIENT | NV_ERR_INVALID_OBJECT_HANDLE)) => {
                Presence::NoClient
            }
            Err(Failure::Status(NV_ERR_OBJECT_NOT_FOUND)) => Presence::NoObject,
            Err(_) => Presence::There,
        }
    }

    /// Whether [`presence`](Self::presence) can be believed: the driver gives the same errors if this client's own
    /// objects are gone, after a reset, say.
    pub(crate) fn can_report(&self) -> bool {
        let first = self.gpus.iter().flatten().next();
        first.is_some_and(|(_, subdevice)| self.rm().uuid(self.client, *subdevice).is_ok())
    }

    /// Frees a duplicate. `true` if the duplicate is gone.
    pub(crate) fn free_duplicate(&self, handle: u32) -> bool {
        matches!(
            self.rm().free(self.client, self.client, handle),
            Ok(()) | Err(Failure::Status(NV_ERR_OBJECT_NOT_FOUND))
        )
    }
}

/// `RS_SHARE_ACTION_FLAG_*` (`rs_access.h`).
const REVOKE: u8 = 1;
const COMPOSE: u8 = 4;

/// `RS_SHARE_TYPE_CLIENT`, and the bit of `RS_ACCESS_DUP_OBJECT`.
const TO_CLIENT: u16 = 3;
const MAY_DUPLICATE: u32 = 1;

/// Lets the client `target` duplicate an object, or takes that right back (`NV_ESC_RM_SHARE`). The policy lies at
/// byte 8 of the call's struct: target, mask, type, action.
fn share(rm: &Rm<'_>, client: u32, handle: u32, target: u32, action: u8) -> Result<(), Failure> {
    let policy = u64::from(target) | u64::from(MAY_DUPLICATE) << 32;
    let kind = u32::from(TO_CLIENT) | u32::from(action) << 16;
    rm.call_with_policy(NV_ESC_RM_SHARE, client, handle, policy, kind)
}

/// The number by which the ledger knows an object of the monitor's client: client and handle.
pub(crate) fn pin_of(own: &MonitorClient, handle: u32) -> u64 {
    u64::from(own.client) << 32 | u64::from(handle)
}

/// The handle of the pin with that number; `None` if the pin is another client's.
pub(crate) fn handle_of(own: &MonitorClient, pin: u64) -> Option<u32> {
    let handle = u32::try_from(pin & u64::from(u32::MAX)).ok()?;
    (pin_of(own, handle) == pin).then_some(handle)
}
