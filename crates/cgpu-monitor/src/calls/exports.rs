//! Memory in files: a program exports memory to a descriptor, and another program imports it.
//!
//! For an export the monitor retains a new file, clears the places that the export is to fill, and enters what each
//! place will hold. Then the driver exports, and the monitor puts its pins. A place is entered before the driver fills
//! it, and taken out of the state after the driver has cleared it: the state has too much in between, never too little.
//! If the driver refuses the export, a place that was cleared stays empty, whereas the driver alone would leave the
//! old memory in it. Memory of the host is entered when it is exported, as memory of 0 bytes: nothing else says which
//! objects name it. The driver is asked each time whether memory is the host's.
//!
//! An import makes objects that name the memory. [`import`] searches for the file among the retained ones, chooses the
//! handles that the caller left open, has the objects made, and enters them.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::audit::{clear_export, forget_export, forget_places};
use crate::caller::Reply;
use crate::calls::charge::{next_handles, shown_below};
use crate::calls::copied_control::{begin_control, make_control, write_params_back};
use crate::case::{Case, EarlyReply, begin_under_rm_lock, note_user};
use crate::decide::{
    Imported, RefusalReason, export_entries, imported, may_export, plan_import, unknown_objects,
};
use crate::driver::{Denied, Exported, free_pins, pin_behind_export, pin_export, pin_handle};
use crate::gate::settings::NodeKind;
use crate::node::Device;
use crate::state::UnderRmLock;
use cgpu_core::ledger::{Client, Handle, Hold};
use nvrm::call::Object;
use nvrm::export::{self, Does, Places};
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use nvrm::number::*;
use nvrm::{Answer, Layout};

/// Makes a control on the file of the caller's descriptor, by the monitor's own descriptor of the same file.
pub(crate) fn export_or_import(
    case: &mut Case<'_>,
    does: Does,
    client: u32,
    params: u64,
) -> Result<Reply, EarlyReply> {
    let Some(layout) = export::layout(&case.monitor.release, does, case.scratch.params.len())
    else {
        return Err(case.answer(Answer::Status(NV_ERR_INVALID_PARAM_STRUCT)));
    };
    let descriptor = export::descriptor(layout, &case.scratch.params);
    let file = descriptor.and_then(|descriptor| {
        let file = case.target.as_ref()?.duplicate(descriptor).ok()?;
        let file = Device::of(&case.monitor.settings.nodes, file)?;
        (file.kind == NodeKind::Control).then_some(file)
    });
    let (Some(descriptor), Some(file)) = (descriptor, file) else {
        return Err(case.answer(Answer::Status(NV_ERR_INVALID_PARAMETER)));
    };
    let rm_lock = match does {
        Does::Report => begin_control(case).map(|()| None),
        _ => begin_under_rm_lock(case).map(Some),
    }?;
    export::set_descriptor(layout, &mut case.scratch.params, file.descriptor());
    let control = FileControl { layout, does, client, params };
    let done = match (&rm_lock, export::places(layout, &case.scratch.params)) {
        (None, _) => make_control(case, params).map(|done| (done, vec![])),
        (_, None) => Err(case.answer(Answer::Status(NV_ERR_INVALID_PARAMETER))),
        (Some(rm_lock), Some(places)) if matches!(does, Does::Export | Does::ExportList) => {
            export(case, rm_lock, control, &places, &Arc::new(file)).map(|done| (done, vec![]))
        }
        (Some(rm_lock), Some(places)) => import(case, rm_lock, control, &places, &Arc::new(file)),
    };
    drop(rm_lock);
    export::set_descriptor(layout, &mut case.scratch.params, descriptor);
    let (done, made) = done?;
    write_params_back(case, params, done);
    Ok(case.executed(made))
}

/// Exports objects to `file`. `true` if the driver has put all of them there.
fn export(
    case: &mut Case<'_>,
    rm_lock: &UnderRmLock<'_>,
    control: FileControl,
    places: &Places,
    file: &Arc<Device>,
) -> Result<bool, EarlyReply> {
    let monitor = case.monitor;
    let found = monitor.exports.find_or_keep(file, Some(monitor.counters.next_export()));
    let (exported, is_new) = found.map_err(|why| refuse_file(case, why))?;
    let is_in_use = || is_in_use(case, control.client, file);
    let decision = may_export(control.does, is_new, is_in_use);
    let done = case.or_deny(decision).and_then(|()| export_to(case, control, places, &exported));
    if is_new && !matches!(done, Ok(true)) && clear_export(monitor, &exported, |_| true) {
        forget_export(monitor, exported.number);
    }
    free_pins(monitor, rm_lock);
    done
}

/// Whether any process has exported to the file, as the driver says.
fn is_in_use(case: &Case<'_>, client: u32, file: &Device) -> bool {
    let params = export::ask(&case.monitor.release, file.descriptor());
    let Some(mut params) = params else { return false };
    let command = NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO;
    case.rm().is_ok_and(|rm| rm.control(client, client, command, &mut params).is_ok())
}

/// Clears the places of a retained file, enters what they will hold, and has the driver export. `true` if done.
fn export_to(
    case: &mut Case<'_>,
    control: FileControl,
    places: &Places,
    exported: &Exported,
) -> Result<bool, EarlyReply> {
    let (monitor, client) = (case.monitor, Client(control.client));
    note_user(case, control.client)?;
    let of_the_host = find_host_objects(case, control, places)?;
    if !clear_export(monitor, exported, |place| places.has(place)) {
        return Err(case.answer(Answer::Status(NV_ERR_INSUFFICIENT_RESOURCES)));
    }
    let decision = {
        let mut state = case.state();
        let entries =
            export_entries(&state.ledger, (client, places), exported.number, &of_the_host);
        entries.map(|entries| entries.into_iter().for_each(|entry| state.enter(entry)))
    };
    case.or_deny(decision)?;
    let done = make_control(case, control.params);
    if !matches!(done, Ok(true)) {
        forget_places(monitor, exported.number, |place| places.has(place));
        return done;
    }
    if are_as_charged(case, client, places) && pin_all(case, client, places, exported) {
        return done;
    }
    clear_export(monitor, exported, |place| places.has(place));
    Err(case.deny(&RefusalReason::PastMonitor("exported")))
}

/// The objects that aren't known to be memory of a GPU: all of them are memory of the host. Fails if one of them isn't
/// the host's, and so may be untracked memory.
fn find_host_objects(
    case: &mut Case<'_>,
    control: FileControl,
    places: &Places,
) -> Result<Vec<Handle>, EarlyReply> {
    let client = Client(control.client);
    let unknown = unknown_objects(&case.state().ledger, client, places);
    let release = &case.monitor.release;
    let rm = case.rm()?;
    let is_foreign = |object: &&Handle| {
        let Some(mut params) = export::ask_where(release, object.0) else { return true };
        let command = NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE;
        let asked = rm.control(client.0, client.0, command, &mut params);
        asked.is_err() || !export::is_of_the_host(release, &params)
    };
    let Some(foreign) = unknown.iter().find(is_foreign) else { return Ok(unknown) };
    let handle = foreign.0;
    Err(case.deny(&RefusalReason::UnknownExport { handle }))
}

/// Whether no object that was exported has more memory than is charged for it.
fn are_as_charged(case: &Case<'_>, client: Client, places: &Places) -> bool {
    let Ok(rm) = case.rm() else { return false };
    let objects = places.named().map(|(_, object)| object).collect::<BTreeSet<u32>>();
    objects.into_iter().all(|object| {
        let memory = case.state().ledger.memory_of(client, Handle(object));
        memory.is_none_or(|(_, bytes)| bytes == 0 || !rm.is_larger_than(client.0, object, bytes))
    })
}

/// Puts a pin before each export of a GPU's memory, right behind the object that was exported. `true` if each export
/// has its pin.
fn pin_all(case: &Case<'_>, client: Client, places: &Places, exported: &Exported) -> bool {
    let Ok(device) = case.device() else { return false };
    places.named().all(|(index, object)| {
        let memory = case.state().ledger.memory_of(client, Handle(object));
        let Some((gpu, _)) = memory.filter(|(_, bytes)| *bytes > 0) else { return true };
        let hold = Hold::Export { file: exported.number, index };
        pin_export(case.monitor, device, hold, (client.0, object), gpu)
    })
}

/// An export or an import that is to be made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FileControl {
    pub(crate) layout: &'static Layout,
    pub(crate) does: Does,
    pub(crate) client: u32,
    /// The address of the parameters in the caller's memory.
    pub(crate) params: u64,
}

fn refuse_file(case: &mut Case<'_>, why: Denied) -> EarlyReply {
    case.deny(&match why {
        Denied::Unknown => RefusalReason::ForeignImport,
        Denied::Full => RefusalReason::Full("exports"),
    })
}

/// Has the driver make objects that name the memory in `places` of a file, and enters the objects. Returns whether the
/// driver did, and which objects it made.
pub(crate) fn import(
    case: &mut Case<'_>,
    rm_lock: &UnderRmLock<'_>,
    control: FileControl,
    places: &Places,
    file: &Arc<Device>,
) -> Result<(bool, Vec<Object>), EarlyReply> {
    let FileControl { layout, client, params, .. } = control;
    let found = case.monitor.exports.find_or_keep(file, None);
    let (exported, _) = found.map_err(|why| refuse_file(case, why))?;
    let parent = places.parent;
    let hold = |place: u32| Hold::Export { file: exported.number, index: place };
    note_user(case, client)?;
    let plan = plan_import(&case.state().ledger, exported.number, places);
    let plan = case.or_deny(plan)?;
    let first = next_handles(case, plan.unchosen_handles());
    let objects = plan.handles(first);
    export::set_objects(layout, &mut case.scratch.params, &objects);
    let gpu = plan.gpu;
    let shown = shown_below(case, rm_lock, client, parent, gpu);
    let done = make_control(case, params);
    let done_well = matches!(done, Ok(true));
    let pins: Vec<(u32, Option<u32>)> = (places.first..)
        .take(if done_well { places.objects.len() } else { 0 })
        .map(|place| (place, pin_behind_export(case.monitor, hold(place), (shown, gpu))))
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
    let mut state = case.state();
    entries.into_iter().for_each(|entry| state.enter(entry));
    drop(state);
    for (place, pin) in pins {
        let at = (place - places.first) as usize;
        let object = objects.get(at).copied().unwrap_or_default();
        pin_handle(case.monitor, (client, object), pin);
    }
    export::set_objects(layout, &mut case.scratch.params, &objects);
    done.map(|done| (done, made))
}
