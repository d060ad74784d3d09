//! Decides on other handles of memory: duplicates, places in a file that memory is exported to, and objects that are
//! imported from a file.

use crate::decide::refusal_reason::RefusalReason;
use crate::state::BOUNDS;
use cgpu_core::ledger::{Attribution, Client, Entry, Handle, Hold, Ledger, LedgerError};
use nvrm::call::Object;
use nvrm::export::{Does, Places};
use nvrm::number::NV_ERR_STATE_IN_USE;

/// The monitor chooses handles from here on if the caller leaves the choice to the driver. The driver's own begin with
/// 0xcaf.
const HANDLES: u32 = 0xcb90_0000;
const HANDLES_MASK: u32 = 0xf_ffff;

/// The handle that comes `number` places after `first`, for handles that are chosen together.
pub(crate) fn nth_handle(first: u32, number: u32) -> u32 {
    HANDLES | first.wrapping_add(number) & HANDLES_MASK
}

/// Decides on another handle of an object, by a duplicate: it is refused if no more objects can be known.
pub(crate) fn capacity_for_handle(ledger: &Ledger) -> Result<(), RefusalReason> {
    match ledger.size().objects < BOUNDS.objects {
        true => Ok(()),
        false => Err(RefusalReason::Full("objects")),
    }
}

/// The objects in `places` that aren't known to be memory of a GPU: each has to be memory of the host to be exported.
pub(crate) fn unknown_objects(ledger: &Ledger, client: Client, places: &Places) -> Vec<Handle> {
    let named = places.named().map(|(_, object)| Handle(object));
    let is_unknown =
        |object: &Handle| ledger.bytes_of(client, *object).is_none_or(|bytes| bytes == 0);
    let mut unknown: Vec<Handle> = named.filter(is_unknown).collect();
    unknown.sort_unstable();
    unknown.dedup();
    unknown
}

/// What is entered before objects are exported to the places of a file: first the objects that are memory of the host
/// and aren't known, then what each place holds. The export is refused if an object isn't known any more, or there is
/// no capacity left.
pub(crate) fn export_entries(
    ledger: &Ledger,
    (client, places): (Client, &Places),
    file: u64,
    of_the_host: &[Handle],
) -> Result<Vec<Entry>, RefusalReason> {
    let size = ledger.size();
    let is_new = |handle: &&Handle| ledger.bytes_of(client, **handle).is_none();
    let new: Vec<Handle> = of_the_host.iter().filter(is_new).copied().collect();
    let holds = places.named().count();
    if size.objects + new.len() > BOUNDS.objects || size.holds + holds > BOUNDS.holds {
        return Err(RefusalReason::Export(LedgerError::Full));
    }
    let parent = Handle(places.parent);
    let parent = if ledger.contains(client, parent) { parent } else { Handle(client.0) };
    let unknown = places
        .named()
        .map(|(_, object)| Handle(object))
        .find(|handle| ledger.bytes_of(client, *handle).is_none() && !of_the_host.contains(handle));
    if let Some(handle) = unknown {
        return Err(RefusalReason::Export(LedgerError::NoSuchObject { client, handle }));
    }
    let commit = |handle| Entry::Commit { gpu: 0, bytes: 0, client, parent, handle };
    let hold = |(index, object)| Entry::Hold {
        hold: Hold::Export { file, index },
        client,
        handle: Handle(object),
    };
    Ok(new.into_iter().map(commit).chain(places.named().map(hold)).collect())
}

/// Decides whether a control may export to a file; the driver, too, refuses a file that is in use. A single object goes
/// into a file once. A list may go into a file that earlier exports of this container began, so only of a new file the
/// driver is asked whether it is in use (`is_in_use`).
pub(crate) fn may_export(
    does: Does,
    is_new: bool,
    is_in_use: impl FnOnce() -> bool,
) -> Result<(), RefusalReason> {
    let is_taken = match does {
        Does::Export => !is_new,
        _ => is_new && is_in_use(),
    };
    if is_taken { Err(RefusalReason::AsDriver(NV_ERR_STATE_IN_USE)) } else { Ok(()) }
}

/// The objects that an import makes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ImportPlan {
    /// The GPU whose memory is in the places.
    pub(crate) gpu: Option<usize>,
    /// For each place the handle that the caller chose, or 0 if the monitor chooses; `None` if nothing is in the place,
    /// and no object is made.
    wanted: Vec<Option<u32>>,
}

/// Plans an import from the places of a file. It is refused if there is no capacity for so many objects.
pub(crate) fn plan_import(
    ledger: &Ledger,
    file: u64,
    places: &Places,
) -> Result<ImportPlan, RefusalReason> {
    let held = |index| ledger.memory_held_by(Hold::Export { file, index });
    let found: Vec<_> =
        (places.first..).zip(&places.objects).map(|(at, of)| (held(at), *of)).collect();
    // All memory in a file is of one GPU.
    let of_gpu = found.iter().rev().find_map(|(memory, _)| memory.filter(|(_, bytes)| *bytes > 0));
    let gpu = of_gpu.map(|(gpu, _)| gpu);
    let wanted: Vec<Option<u32>> =
        found.into_iter().map(|(memory, object)| memory.map(|_| object)).collect();
    match wanted.iter().flatten().count() > BOUNDS.objects.saturating_sub(ledger.size().objects) {
        true => Err(RefusalReason::Full("objects")),
        false => Ok(ImportPlan { gpu, wanted }),
    }
}

impl ImportPlan {
    /// How many handles the monitor chooses.
    pub(crate) fn unchosen_handles(&self) -> u32 {
        let unchosen = self.wanted.iter().flatten().filter(|object| **object == 0).count();
        u32::try_from(unchosen).unwrap_or(u32::MAX)
    }

    /// The handle for each place; 0 if no object is made. The monitor chooses handles from `first` on.
    pub(crate) fn handles(&self, first: u32) -> Vec<u32> {
        let mut chosen = (0..).map(|number| nth_handle(first, number));
        let mut handle = |object: &Option<u32>| match object {
            Some(0) => chosen.next().unwrap_or_default(),
            object => object.unwrap_or_default(),
        };
        self.wanted.iter().map(&mut handle).collect()
    }
}

/// What an import has made.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Imported {
    pub(crate) entries: Vec<Entry>,
    pub(crate) made: Vec<Object>,
    /// The handles that are reported to the caller, by place.
    pub(crate) handles: Vec<u32>,
}

/// What the driver has made for an import from `file` below an object of `client`. `handles` are those that the driver
/// gave, by place. If the driver made no object in a place (`is_imported`), the caller gets the handle that it asked
/// for.
pub(crate) fn imported(
    (file, client, shown): (u64, u32, Attribution),
    places: &Places,
    mut handles: Vec<u32>,
    is_imported: impl Fn(usize) -> bool,
) -> Imported {
    let (mut entries, mut made) = (Vec::new(), Vec::new());
    let Places { parent, .. } = *places;
    for (at, (handle, index)) in handles.iter_mut().zip(places.first..).enumerate() {
        if !is_imported(at) {
            *handle = places.objects.get(at).copied().unwrap_or_default();
            continue;
        }
        entries.push(Entry::Import {
            hold: Hold::Export { file, index },
            client: Client(client),
            parent: Handle(parent),
            handle: Handle(*handle),
            shown,
        });
        made.push(Object { client, parent, handle: *handle });
    }
    Imported { entries, made, handles }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OF: Client = Client(1);
    const FILE: u64 = 7;

    fn places(objects: &[u32]) -> Places {
        Places { parent: 2, first: 3, objects: objects.to_vec() }
    }

    /// A ledger with memory of 4 bytes as object 10.
    fn ledger() -> Ledger {
        let mut ledger = Ledger::new(&[9], BOUNDS);
        let (parent, handle) = (Handle(2), Handle(10));
        ledger.replay(Entry::Commit { gpu: 0, bytes: 4, client: OF, parent, handle });
        ledger
    }

    fn export(
        ledger: &mut Ledger,
        objects: &[u32],
        of_the_host: &[Handle],
    ) -> Result<(), RefusalReason> {
        let entries = export_entries(ledger, (OF, &places(objects)), FILE, of_the_host)?;
        entries.into_iter().for_each(|entry| ledger.replay(entry));
        Ok(())
    }

    /// An exported object is held in its place of the file, and memory of the host is charged with
    /// no bytes.
    #[test]
    fn exported_objects_are_held_and_host_memory_uncharged() {
        let mut ledger = ledger();
        assert_eq!(unknown_objects(&ledger, OF, &places(&[10, 0, 11, 11])), [Handle(11)]);
        // A place without an object is left out.
        export(&mut ledger, &[10, 0, 11], &[Handle(11)]).unwrap();
        assert_eq!(ledger.exported(FILE).collect::<Vec<_>>(), [3, 5]);
        assert_eq!(ledger.bytes_of(OF, Handle(11)), Some(0));
        assert_eq!(unknown_objects(&ledger, OF, &places(&[11])), [Handle(11)], "asked each time");
        for handle in [10, 11].map(Handle) {
            ledger.replay(Entry::Free { client: OF, handle });
        }
        assert_eq!(ledger.usage(0).unwrap().used_bytes, 4, "the file keeps it");
        ledger.replay(Entry::Release { hold: Hold::Export { file: FILE, index: 3 } });
        assert_eq!(ledger.usage(0).unwrap().used_bytes, 0);
    }

    #[test]
    fn export_with_an_unknown_object_holds_nothing() {
        let mut ledger = ledger();
        let done = export(&mut ledger, &[10, 12, 11], &[Handle(11)]);
        let unknown = LedgerError::NoSuchObject { client: OF, handle: Handle(12) };
        assert_eq!(done, Err(RefusalReason::Export(unknown)));
        assert!(ledger.exported(FILE).next().is_none() && !ledger.contains(OF, Handle(11)));
    }

    /// An import creates an object for each place that holds memory.
    #[test]
    fn import_creates_an_object_per_occupied_place() {
        let mut ledger = ledger();
        export(&mut ledger, &[10, 0, 10], &[]).unwrap();
        let plan = plan_import(&ledger, FILE, &places(&[0, 0, 0, 0])).unwrap();
        assert_eq!((plan.gpu, plan.unchosen_handles()), (Some(0), 2));
        let first = nth_handle(5, 0);
        assert_eq!(plan.handles(5), [first, 0, nth_handle(5, 1), 0]);
        let empty = Places { first: 9, ..places(&[0, 6]) };
        let plan = plan_import(&ledger, FILE, &empty).unwrap();
        assert_eq!((plan.gpu, plan.handles(5)), (None, vec![0, 0]));
    }

    /// An import enters the objects that the driver created, and returns the caller's own handles
    /// elsewhere.
    #[test]
    fn import_enters_only_objects_the_driver_created() {
        let mut ledger = ledger();
        export(&mut ledger, &[10, 0, 10], &[]).unwrap();
        let asked = places(&[21, 5, 0]);
        let of = (FILE, 1, Attribution::Here);
        let result = imported(of, &asked, vec![21, 0, 33], |at| at != 1);
        assert_eq!(result.handles, [21, 5, 33]);
        let made: Vec<u32> = result.made.iter().map(|object| object.handle).collect();
        assert_eq!(made, [21, 33]);
        result.entries.into_iter().for_each(|entry| ledger.replay(entry));
        assert_eq!([21, 5, 33].map(|at| ledger.bytes_of(OF, Handle(at))), [Some(4), None, Some(4)]);
        assert_eq!(ledger.usage(0).unwrap().used_bytes, 4, "it is charged once");
    }

    /// A file is exported to once, and a list may go to a file to which this container exports
    /// already.
    #[test]
    fn only_lists_may_extend_an_earlier_export() {
        let single = |is_new| may_export(Does::Export, is_new, || true).is_ok();
        assert!(single(true) && !single(false));
        let list = |is_new, is_in_use| may_export(Does::ExportList, is_new, || is_in_use).is_ok();
        assert!(list(true, false) && list(false, true) && !list(true, true));
    }

    /// No further handle of memory is created that the state has no space for.
    #[test]
    fn handle_beyond_the_state_bounds_is_refused() {
        let mut ledger = ledger();
        export(&mut ledger, &[10], &[]).unwrap();
        assert_eq!(capacity_for_handle(&ledger), Ok(()));
        for handle in 0..u32::try_from(BOUNDS.objects).unwrap() {
            ledger.note(OF, Handle(2), Handle(100 + handle));
        }
        assert_eq!(capacity_for_handle(&ledger), Err(RefusalReason::Full("objects")));
        let plan = plan_import(&ledger, FILE, &places(&[0]));
        assert_eq!(plan, Err(RefusalReason::Full("objects")));
        let full = Err(RefusalReason::Export(LedgerError::Full));
        assert_eq!(export(&mut ledger, &[11], &[Handle(11)]), full);
    }
}
