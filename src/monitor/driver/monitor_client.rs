//! The monitor's own client of the driver.
//!
//! Asks what processes hold, which only a subdevice tells, and borrows memory that is to be
//! mapped. Opened when it's needed, on the host's nodes, and kept while the container lives,
//! whose descriptors may have gone anywhere by then: it keeps the GPUs awake.

use std::fs::OpenOptions;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Once, OnceLock};

use crate::gate::settings::{Gpu, Node, NodeKind};
use crate::monitor::driver::unanswered::{Amount, Unanswered};
use crate::monitor::node::device::{Device, Failure, Rm};
use crate::rm::about::{self, Held};
use crate::rm::channel::ENGINE_GRAPHICS;
use crate::rm::channel::ask_disable;
use crate::rm::number::{
    KEPLER_CHANNEL_GROUP_A, NV_ERR_INVALID_ARGUMENT, NV_ERR_INVALID_CLIENT,
    NV_ERR_INVALID_OBJECT_HANDLE, NV_ERR_OBJECT_NOT_FOUND, NV_ESC_RM_DUP_OBJECT, NV_ESC_RM_SHARE,
    NV2080_CTRL_CMD_FB_GET_INFO_V2, NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS,
    NV2080_CTRL_CMD_GPU_GET_PID_INFO, NV2080_CTRL_CMD_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2,
    NVA06C_CTRL_CMD_SET_TIMESLICE,
};
use crate::rm::usage::{self, Sample};
use crate::rm::{Key, Meaning, Release, fbinfo};

/// Devices that a driver can have: `NV_MAX_DEVICES`.
const MOST_DEVICES: u32 = 32;

/// `NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS` (`nvos.h`): where its engine is.
const GROUP_ENGINE: usize = 12;

/// A slice that is tried, in microseconds: one that programs ask for themselves.
const TRIED_SLICE_US: u64 = 2048;

/// Whether something of another client's is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Presence {
    /// It is, as far as can be told.
    There,
    /// There is the client, and no such object.
    NoObject,
    /// There is no such client.
    NoClient,
}

/// Asks the driver once what audits will ask it, of those `gpus`.
///
/// # Errors
///
/// What it doesn't answer. A UUID that is none is none of its GPUs'.
pub fn examine(nodes: &[Node], release: &Release, gpus: &[Gpu]) -> Result<(), Unanswered> {
    let uuids: Vec<about::Uuid> =
        gpus.iter().map(|gpu| about::uuid(&gpu.uuid).unwrap_or_default()).collect();
    let own = MonitorClient::open(nodes, release, &uuids)?;
    let missing = own.missing().filter_map(|gpu| gpus.get(gpu)).next();
    let answered = match missing {
        Some(gpu) => Err(Unanswered::NoGpu { index: gpu.index }),
        None => gpus.iter().enumerate().try_for_each(|(at, gpu)| own.answers(at, gpu)),
    };
    own.end();
    answered
}

/// Has the driver set a slice on a channel group without channels, of a client that goes with it: what came of
/// that. `None` where it makes no channel group for us.
#[must_use]
pub fn try_slice(nodes: &[Node], release: &Release, gpu: &Gpu) -> Option<Result<(), Failure>> {
    let uuid = about::uuid(&gpu.uuid).unwrap_or_default();
    let own = MonitorClient::open(nodes, release, &[uuid]).ok()?;
    let tried = own.try_slice();
    own.end();
    tried
}

/// Our client.
#[derive(Debug)]
pub(crate) struct MonitorClient {
    release: Release,
    pub(crate) control: Device,
    pub(crate) client: u32,
    /// By the container's GPU: device and subdevice.
    gpus: Vec<Option<(u32, u32)>>,
    /// Which of [`fbinfo::sizes`] is the driver's, once that is known.
    list_size: OnceLock<usize>,
    /// They let the devices be opened.
    gpu_files: Vec<OwnedFd>,
    /// Done once the keeper has its files.
    pub(crate) is_kept: Once,
}

impl MonitorClient {
    /// Opens it.
    ///
    /// # Errors
    ///
    /// Where the driver isn't there, or makes no client.
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
        Ok(MonitorClient { gpus, gpu_files, ..Self::former(control, client, release) })
    }

    /// GPUs of the container that it has no subdevice of: nothing can be asked of them.
    pub(crate) fn missing(&self) -> impl Iterator<Item = usize> {
        self.gpus.iter().enumerate().filter(|(_, gpu)| gpu.is_none()).map(|(gpu, _)| gpu)
    }

    /// One without GPUs: that of a worker before, to be ended.
    pub(crate) fn former(control: Device, client: u32, release: &Release) -> Self {
        MonitorClient {
            release: release.clone(),
            control,
            client,
            gpus: Vec::new(),
            list_size: OnceLock::new(),
            gpu_files: Vec::new(),
            is_kept: Once::new(),
        }
    }

    /// It, to be asked.
    pub(crate) fn rm(&self) -> Rm<'_> {
        Rm { release: &self.release, device: &self.control }
    }

    /// Its files, that of the client first.
    pub(crate) fn files(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::once(self.control.as_fd()).chain(self.gpu_files.iter().map(OwnedFd::as_fd))
    }

    /// Frees the client, with all that it has.
    pub(crate) fn end(&self) {
        // Or it ends when its file is closed.
        let _ = self.rm().free(self.client, self.client, self.client);
    }

    /// Sets a slice on a group of its own on its first GPU. `None` where the driver makes none.
    fn try_slice(&self) -> Option<Result<(), Failure>> {
        let (device, _) = (*self.gpus.first()?)?;
        let layout = self.release.layouts(Key::Class(KEPLER_CHANNEL_GROUP_A)).first()?;
        let mut params = vec![0; layout.size()];
        params
            .get_mut(GROUP_ENGINE..GROUP_ENGINE + 4)?
            .copy_from_slice(&ENGINE_GRAPHICS.to_le_bytes());
        let group =
            self.rm().allocate(self.client, device, 0, KEPLER_CHANNEL_GROUP_A, &mut params).ok()?;
        let slice = &mut TRIED_SLICE_US.to_le_bytes();
        let tried = self.rm().control(self.client, group, NVA06C_CTRL_CMD_SET_TIMESLICE, slice);
        let _ = self.rm().free(self.client, device, group);
        Some(tried)
    }

    /// Whether it's told of a GPU what this process holds, which is known to have a client, and
    /// what is free.
    fn answers(&self, at: usize, gpu: &Gpu) -> Result<(), Unanswered> {
        let unanswered =
            |amount, reason| Err(Unanswered::Amount { amount, index: gpu.index, reason });
        let ours = std::process::id();
        match self.held(at, &[ours]) {
            Ok(held) if held.iter().any(|held| held.pid == ours) => {}
            Ok(_) => return unanswered(Amount::Held, None),
            Err(failure) => return unanswered(Amount::Held, Some(failure)),
        }
        match self.free_bytes(at) {
            Ok(0) => unanswered(Amount::Free, None),
            Ok(_) => Ok(()),
            Err(failure) => unanswered(Amount::Free, Some(failure)),
        }
    }

    /// What processes hold on a GPU.
    ///
    /// Asked by pid and not by the driver's own list: that has only processes with a
    /// subdevice, which memory can do without.
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

    /// What is free of a GPU, in bytes.
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
        // What it says to another size than its own (`_rmapiRmControl`, control.c).
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

    /// Who was on a GPU lately; nothing where the driver doesn't tell.
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

    /// Takes channels of whichever clients, no more than
    /// [`MOST_CHANNELS`](crate::rm::channel::MOST_CHANNELS), off a GPU, or back onto it: all or none.
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

    /// Duplicates an object of another client into ours, and tells its handle. Below the device of
    /// that GPU, if it's known: the driver would below any, and it would be in another's figure.
    pub(crate) fn borrow(
        &self,
        theirs: &Rm<'_>,
        (client, handle): (u32, u32),
        gpu: Option<usize>,
    ) -> Result<u32, Failure> {
        share(theirs, client, handle, self.client, COMPOSE)?;
        let mut duplicate = Err(Failure::Errno(nix::errno::Errno::ENODEV));
        let gpus = match gpu {
            Some(gpu) => self.gpus.get(gpu..=gpu),
            None => Some(self.gpus.as_slice()),
        };
        // What is below a subdevice is duplicated below one (`memCopyConstruct_IMPL`, mem.c).
        let parents = gpus.unwrap_or_default().iter().flatten();
        for parent in parents.flat_map(|(device, subdevice)| [*device, *subdevice]) {
            duplicate = self.duplicate(parent, client, handle);
            if duplicate.is_ok() {
                break;
            }
        }
        let _ = share(theirs, client, handle, self.client, COMPOSE | REVOKE);
        duplicate
    }

    /// Duplicates an object of ours below the device of a GPU.
    pub(crate) fn again(&self, gpu: usize, handle: u32) -> Option<u32> {
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

    /// Whether there is such a client, whoever's it is, and whether it has an object of that handle,
    /// which may be its own.
    ///
    /// Told by what the driver says to a duplicate that it doesn't give: it looks for the client
    /// first, then for the object, and asks last whose they are (`serverCopyResource`,
    /// rs_server.c, and `clientGetResourceRef`, rs_client.c, of 515.43.04 and 595.45.04). A client
    /// itself is never duplicated.
    pub(crate) fn presence(&self, client: u32, handle: u32) -> Presence {
        let Some((device, _)) = self.gpus.iter().flatten().next() else { return Presence::There };
        match self.duplicate(*device, client, handle) {
            Ok(duplicate) => {
                self.give_back(duplicate);
                Presence::There
            }
            Err(Failure::Status(NV_ERR_INVALID_CLIENT | NV_ERR_INVALID_OBJECT_HANDLE)) => {
                Presence::NoClient
            }
            Err(Failure::Status(NV_ERR_OBJECT_NOT_FOUND)) => Presence::NoObject,
            Err(_) => Presence::There,
        }
    }

    /// Whether [`presence`](Self::presence) tells anything: what the driver says where our own objects
    /// are gone, after a reset say, is the same.
    pub(crate) fn can_tell(&self) -> bool {
        let ours = self.gpus.iter().flatten().next();
        ours.is_some_and(|(_, subdevice)| self.rm().uuid(self.client, *subdevice).is_ok())
    }

    /// Frees what was borrowed. Whether it's gone.
    pub(crate) fn give_back(&self, handle: u32) -> bool {
        matches!(
            self.rm().free(self.client, self.client, handle),
            Ok(()) | Err(Failure::Status(NV_ERR_OBJECT_NOT_FOUND))
        )
    }
}

/// `RS_SHARE_ACTION_FLAG_*` of `rs_access.h`.
const REVOKE: u8 = 1;
const COMPOSE: u8 = 4;

/// `RS_SHARE_TYPE_CLIENT`, and `RS_ACCESS_DUP_OBJECT`'s bit.
const TO_CLIENT: u16 = 3;
const MAY_DUPLICATE: u32 = 1;

/// Lets a client duplicate an object, or not any more: `NV_ESC_RM_SHARE`. Its policy lies at
/// 8: target, mask, type, action.
fn share(rm: &Rm<'_>, client: u32, handle: u32, target: u32, action: u8) -> Result<(), Failure> {
    let policy = u64::from(target) | u64::from(MAY_DUPLICATE) << 32;
    let kind = u32::from(TO_CLIENT) | u32::from(action) << 16;
    rm.call_with_policy(NV_ESC_RM_SHARE, client, handle, policy, kind)
}

/// An object of ours as the ledger knows it.
pub(crate) fn known(own: &MonitorClient, handle: u32) -> u64 {
    u64::from(own.client) << 32 | u64::from(handle)
}

/// Its handle, if it's of this client of ours.
pub(crate) fn handle_of(own: &MonitorClient, stake: u64) -> Option<u32> {
    let handle = u32::try_from(stake & u64::from(u32::MAX)).ok()?;
    (known(own, handle) == stake).then_some(handle)
}

/// All that are of a client of ours, first and last.
pub(crate) fn of_client(client: u32) -> (u64, u64) {
    let first = u64::from(client) << 32;
    (first, first | u64::from(u32::MAX))
}
