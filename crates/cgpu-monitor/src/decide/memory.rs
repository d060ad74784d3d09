//! Decides on memory: how much is asked for, on which GPU it is charged, and whether it fits the quota.

use crate::decide::refusal_reason::RefusalReason;
use cgpu_core::ledger::{Client, Handle, Ledger, LedgerError, Reservation, Usage};
use nvrm::class::Use;
use nvrm::fbinfo::MemoryAmounts;
use nvrm::memory::{self, Memory};
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use nvrm::number::*;
use nvrm::{Key, Meaning, Release};

/// The bytes of a page: memory is charged in whole pages.
const PAGE_BYTES: u64 = 4096;

/// The memory that an object of a class takes, as its parameters say; `None` if such objects take none. The object is
/// refused if its class takes memory, and the parameters are missing or can't be read.
pub(crate) fn memory_asked(
    release: &Release,
    (class, does): (u32, Use),
    params: Option<&[u8]>,
) -> Result<Option<Memory>, RefusalReason> {
    match (does, params) {
        (Use::Takes, None) => Err(RefusalReason::AsDriver(NV_ERR_INVALID_ARGUMENT)),
        (Use::Takes, Some(params)) => Ok(Some(memory::decode(release, class, params)?)),
        _ => Ok(None),
    }
}

/// What is charged for `asked_bytes` of memory: whole pages.
pub(crate) fn charged_bytes(asked_bytes: u64) -> u64 {
    asked_bytes.checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX)
}

/// Reserves `bytes` on a GPU in the ledger. They are refused if they don't fit the quota, or the ledger has no space
/// for one more object.
pub(crate) fn reserve_within_quota(
    ledger: &mut Ledger,
    gpu: usize,
    bytes: u64,
) -> Result<Reservation, RefusalReason> {
    ledger.reserve(gpu, bytes).map_err(|error| match error {
        LedgerError::OverQuota { asked_bytes, usage } => {
            RefusalReason::OverQuota { gpu, asked_bytes, usage }
        }
        error => RefusalReason::Ledger(error),
    })
}

/// Whether no more of a GPU's memory is in use than the quota allows: the driver rounds up what it gives, maybe beyond
/// the quota.
pub(crate) fn is_within_quota(ledger: &Ledger, gpu: usize) -> bool {
    ledger.usage(gpu).is_some_and(|usage| usage.used_bytes <= usage.limit_bytes)
}

/// The memory that a program is shown: the quota, and not what the GPU has. 0 bytes if the quota isn't known.
pub(crate) fn shown_memory(usage: Option<Usage>) -> MemoryAmounts {
    MemoryAmounts {
        total_bytes: usage.map_or(0, |usage| usage.limit_bytes),
        free_bytes: usage.map_or(0, Usage::free_bytes),
    }
}

/// Decides on a surface of semaphores: it is refused in memory of a GPU, because the surface would retain that memory,
/// and it would be attributed to no process. The driver refuses this, too: the memory has to be the host's
/// (`semsurfConstruct_IMPL`, sem_surf.c, from 535.43.02 to 595.45.04).
pub(crate) fn semaphore_surface(
    release: &Release,
    ledger: &Ledger,
    client: u32,
    params: &[u8],
) -> Result<(), RefusalReason> {
    let layout = release.layouts(Key::Class(NV_SEMAPHORE_SURFACE)).first();
    let view = layout.and_then(|layout| layout.view(params));
    let named = [Meaning::SourceHandle, Meaning::Handle];
    let mut handles = named.into_iter().filter_map(|of| view.and_then(|view| view.u32(of)));
    let is_of_gpu =
        |handle| ledger.bytes_of(Client(client), Handle(handle)).is_some_and(|bytes| bytes > 0);
    match handles.any(is_of_gpu) {
        true => Err(RefusalReason::AsDriver(NV_ERR_INVALID_PARAMETER)),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cgpu_core::ledger::{Bounds, Entry};

    const BOUNDS: Bounds = Bounds { objects: 2, holds: 2, pins: 2 };

    fn release() -> Release {
        Release::of("535.161.08".parse().unwrap()).unwrap()
    }

    /// Enters memory of `bytes` as the object `handle`.
    fn commit(ledger: &mut Ledger, handle: u32, bytes: u64) {
        let (client, parent, handle) = (Client(1), Handle(2), Handle(handle));
        ledger.replay(Entry::Commit { gpu: 0, bytes, client, parent, handle });
    }

    const TAKES: (u32, Use) = (NV01_MEMORY_LOCAL_USER, Use::Takes);

    #[test]
    fn memory_is_asked_for_by_parameters_alone() {
        let asked = memory_asked(&release(), TAKES, None);
        assert_eq!(asked, Err(RefusalReason::AsDriver(NV_ERR_INVALID_ARGUMENT)));
        let size = memory::params_size(&release(), NV01_MEMORY_LOCAL_USER, None);
        let size = size.unwrap().unwrap();
        let asked = memory_asked(&release(), TAKES, Some(&vec![0; size]));
        assert_eq!(asked.unwrap().map(|memory| memory.size_bytes), Some(0));
        let short = memory_asked(&release(), TAKES, Some(&[]));
        assert!(matches!(short, Err(RefusalReason::Tables(_))), "{short:?}");
        assert_eq!(memory_asked(&release(), (NV20_SUBDEVICE_0, Use::Nothing), None), Ok(None));
    }

    #[test]
    fn whole_pages_are_charged() {
        for (asked, charged) in
            [(0, 0), (1, 4096), (4096, 4096), (4097, 8192), (u64::MAX, u64::MAX)]
        {
            assert_eq!(charged_bytes(asked), charged, "{asked}");
        }
    }

    #[test]
    fn quotas_last_byte_is_given_once() {
        let mut ledger = Ledger::new(&[10], BOUNDS);
        let reservation = reserve_within_quota(&mut ledger, 0, 10).unwrap();
        let usage = Usage { limit_bytes: 10, used_bytes: 10 };
        let over = RefusalReason::OverQuota { gpu: 0, asked_bytes: 1, usage };
        assert_eq!(reserve_within_quota(&mut ledger, 0, 1), Err(over));
        ledger.cancel(reservation);
        commit(&mut ledger, 3, 12);
        assert!(!is_within_quota(&ledger, 0), "the driver rounded up");
        ledger.free(Client(1), Handle(3));
        assert!(is_within_quota(&ledger, 0));
        assert!(!is_within_quota(&ledger, 1), "the container has one GPU");
    }

    #[test]
    fn a_program_is_shown_its_quota() {
        let shown = shown_memory(Some(Usage { limit_bytes: 10, used_bytes: 4 }));
        assert_eq!((shown.total_bytes, shown.free_bytes), (10, 6));
        let over = shown_memory(Some(Usage { limit_bytes: 3, used_bytes: 4 }));
        assert_eq!((over.total_bytes, over.free_bytes), (3, 0));
        let unknown = shown_memory(None);
        assert_eq!((unknown.total_bytes, unknown.free_bytes), (0, 0));
    }

    #[test]
    fn full_ledger_grants_no_memory() {
        let mut ledger = Ledger::new(&[10], BOUNDS);
        (0..2).for_each(|handle| commit(&mut ledger, handle, 1));
        assert_eq!(
            reserve_within_quota(&mut ledger, 0, 1),
            Err(RefusalReason::Ledger(LedgerError::Full))
        );
    }

    #[test]
    fn semaphore_surface_must_use_host_memory() {
        let mut ledger = Ledger::new(&[10], BOUNDS);
        commit(&mut ledger, 0, 1);
        let bytes = memory::params_size(&release(), NV_SEMAPHORE_SURFACE, None).unwrap().unwrap();
        // All handles in these parameters are 0.
        let over_gpu = semaphore_surface(&release(), &ledger, 1, &vec![0; bytes]);
        assert_eq!(over_gpu, Err(RefusalReason::AsDriver(NV_ERR_INVALID_PARAMETER)));
        commit(&mut ledger, 0, 0);
        assert_eq!(semaphore_surface(&release(), &ledger, 1, &vec![0; bytes]), Ok(()));
    }
}
