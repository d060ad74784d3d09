//! Asks the driver once what audits and shares will ask, for commands that check this before a container is created.

use crate::driver::monitor_client::MonitorClient;
use crate::driver::unanswered_calls::{Amount, Unanswered};
use crate::gate::settings::{Gpu, Node};
use crate::node::Failure;
use nvrm::about;
use nvrm::channel::ENGINE_GRAPHICS;
use nvrm::number::{KEPLER_CHANNEL_GROUP_A, NVA06C_CTRL_CMD_SET_TIMESLICE};
use nvrm::{Key, Release};

/// The offset of the engine in `NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS` (`nvos.h`), in bytes.
const GROUP_ENGINE: usize = 12;

/// The slice that [`try_slice`] sets, in microseconds: programs ask for such a slice themselves.
const TRIED_SLICE_US: u64 = 2048;

/// Asks the driver once, for each of `gpus`, what audits will ask.
///
/// # Errors
///
/// The first question that the driver does not answer. A malformed UUID counts as a GPU that the driver does not
/// report.
pub fn examine(nodes: &[Node], release: &Release, gpus: &[Gpu]) -> Result<(), Unanswered> {
    let uuids: Vec<about::Uuid> =
        gpus.iter().map(|gpu| about::uuid(&gpu.uuid).unwrap_or_default()).collect();
    let own = MonitorClient::open(nodes, release, &uuids)?;
    let missing = own.missing().filter_map(|gpu| gpus.get(gpu)).next();
    let answered = match missing {
        Some(gpu) => Err(Unanswered::NoGpu { index: gpu.index }),
        None => gpus.iter().enumerate().try_for_each(|(at, gpu)| check_answers(&own, at, gpu)),
    };
    own.end();
    answered
}

/// Has the driver set a slice on a channel group without channels, and returns the outcome. The group's client is ended
/// afterwards. `None` if the driver makes no channel group.
#[must_use]
pub fn try_slice(nodes: &[Node], release: &Release, gpu: &Gpu) -> Option<Result<(), Failure>> {
    let uuid = about::uuid(&gpu.uuid).unwrap_or_default();
    let own = MonitorClient::open(nodes, release, &[uuid]).ok()?;
    let tried = try_slice_by(&own);
    own.end();
    tried
}

/// Sets a slice on a new channel group on the first GPU. `None` if the driver makes no group.
fn try_slice_by(own: &MonitorClient) -> Option<Result<(), Failure>> {
    let (device, _) = (*own.gpus.first()?)?;
    let layout = own.release.layouts(Key::Class(KEPLER_CHANNEL_GROUP_A)).first()?;
    let mut params = vec![0; layout.size()];
    params.get_mut(GROUP_ENGINE..GROUP_ENGINE + 4)?.copy_from_slice(&ENGINE_GRAPHICS.to_le_bytes());
    let group =
        own.rm().allocate(own.client, device, 0, KEPLER_CHANNEL_GROUP_A, &mut params).ok()?;
    let slice = &mut TRIED_SLICE_US.to_le_bytes();
    let tried = own.rm().control(own.client, group, NVA06C_CTRL_CMD_SET_TIMESLICE, slice);
    let _ = own.rm().free(own.client, device, group);
    Some(tried)
}

/// Checks that the driver reports the free memory of a GPU, and what this process holds there. The driver must list
/// this process, which has a client.
fn check_answers(own: &MonitorClient, at: usize, gpu: &Gpu) -> Result<(), Unanswered> {
    let unanswered = |amount, reason| Err(Unanswered::Amount { amount, index: gpu.index, reason });
    let own_pid = std::process::id();
    match own.held(at, &[own_pid]) {
        Ok(held) if held.iter().any(|held| held.pid == own_pid) => {}
        Ok(_) => return unanswered(Amount::Held, None),
        Err(failure) => return unanswered(Amount::Held, Some(failure)),
    }
    match own.free_bytes(at) {
        Ok(0) => unanswered(Amount::Free, None),
        Ok(_) => Ok(()),
        Err(failure) => unanswered(Amount::Free, Some(failure)),
    }
}
