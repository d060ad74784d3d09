//! Imports: makes objects that name the memory which another program exported to a file. [`import`] looks for the file
//! among the kept ones, chooses the handles that the caller left open, has the objects made, and enters them.

use std::sync::Arc;

use crate::ledger::Hold;
use crate::monitor::calls::case::{Case, EarlyReply};
use crate::monitor::calls::charge::next_handles;
use crate::monitor::calls::gpu_lookup::shown_below;
use crate::monitor::calls::identify::note_user;
use crate::monitor::calls::make_control::make_control;
use crate::monitor::decide::{Denial, Imported, imported, plan_import};
use crate::monitor::driver::Denied;
use crate::monitor::node::Device;
use crate::monitor::state::OnLane;
use crate::rm::Layout;
use crate::rm::call::Object;
use crate::rm::export::{self, Does, Places};

/// An export or an import that is to be made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FileControl {
    /// The layout of the control's parameters.
    pub(crate) layout: &'static Layout,
    pub(crate) does: Does,
    pub(crate) client: u32,
    /// The address of the parameters in the caller's memory.
    pub(crate) params: u64,
}

pub(crate) fn refuse_file(case: &mut Case<'_>, why: Denied) -> EarlyReply {
    case.deny(&match why {
        Denied::Unknown => Denial::ForeignImport,
        Denied::Full => Denial::Full("exports"),
    })
}

/// Has the driver make objects that name the memory in `places` of a file, and enters the objects. Returns whether the
/// driver did, and which objects it made.
pub(crate) fn import(
    case: &mut Case<'_>,
    lane: &OnLane<'_>,
    control: FileControl,
    places: &Places,
    file: &Arc<Device>,
) -> Result<(bool, Vec<Object>), EarlyReply> {
    let FileControl { layout, client, params, .. } = control;
    let found = case.parts.exports.all.find_or_keep(file, None);
    let (exported, _) = found.map_err(|why| refuse_file(case, why))?;
    let parent = places.parent;
    let hold = |place: u32| Hold::Export { file: exported.number, index: place };
    note_user(case, client)?;
    let plan = plan_import(&case.books().ledger, exported.number, places);
    let plan = case.or_deny(plan)?;
    let first = next_handles(case, plan.unchosen_handles());
    let objects = plan.handles(first);
    export::set_objects(layout, &mut case.scratch.params, &objects);
    let gpu = plan.gpu;
    let shown = shown_below(case, lane, client, parent, gpu);
    let done = make_control(case, params);
    let done_well = matches!(done, Ok(true));
    let stakes: Vec<(u32, Option<u32>)> = (places.first..)
        .take(if done_well { places.objects.len() } else { 0 })
        .map(|place| (place, case.parts.stakes.stake_behind_export(hold(place), (shown, gpu))))
        .collect();
    let result = match done_well {
        true => {
            let params = &case.scratch.params;
            let handles = export::places(layout, params).map(|after| after.objects);
            let is_imported = |at| export::is_imported(layout, params, at);
            let of = (exported.number, client, shown);
            imported(of, places, handles.unwrap_or_default(), is_imported)
        }
        false => Imported { handles: places.objects.clone(), ..Imported::default() },
    };
    let Imported { entries, made, handles: objects } = result;
    let mut books = case.books();
    entries.into_iter().for_each(|entry| books.enter(entry));
    drop(books);
    for (place, stake) in stakes {
        let at = (place - places.first) as usize;
        let object = objects.get(at).copied().unwrap_or_default();
        case.parts.stakes.stake_name((client, object), stake);
    }
    export::set_objects(layout, &mut case.scratch.params, &objects);
    done.map(|done| (done, made))
}
