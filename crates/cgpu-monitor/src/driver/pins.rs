//! Makes and frees pins: duplicates by the monitor's client that stand before exports, mappings and handles.
//! [`ledger`](cgpu_core::ledger) says why. A mapping or an export before which no pin can be put is refused.

use crate::driver::access::{client_if_open, own_client};
use crate::driver::monitor_client::{MonitorClient, handle_of, pin_of};
use crate::node::{Device, Rm};
use crate::shared::Monitor;
use crate::state::{ContainerState, UnderRmLock};
use cgpu_core::ledger::{Attribution, ChargeId, Client, Entry, Handle, Hold, PinPlace};

/// Enters a pin. `false` if one stands before `before` already, nothing needs one, or there are too many pins.
fn enter_pin(state: &mut ContainerState, before: PinPlace, number: u64) -> bool {
    let may = state.ledger.may_pin(before);
    if may {
        state.enter(Entry::Pin { before, number });
    }
    may
}

/// The handle of the pin that stands before all mappings of a charge's memory. The memory is to be mapped from that
/// handle. A first pin is `fresh`, a duplicate that the caller has just made; otherwise `fresh` is freed. `None` if no
/// pin can stand: the memory is gone, or there are too many pins.
pub(crate) fn pin_mappings(
    monitor: &Monitor,
    own: &MonitorClient,
    charge: ChargeId,
    fresh: u32,
) -> Option<u32> {
    let before = PinPlace::Mappings { charge };
    let mut state = monitor.state();
    if enter_pin(&mut state, before, pin_of(own, fresh)) {
        return Some(fresh);
    }
    let pin = state.ledger.pin_at(before);
    drop(state);
    own.free_duplicate(fresh);
    handle_of(own, pin?)
}

/// Puts a pin before the export `hold`: a duplicate that the driver lists right behind the exported object. `false` if
/// none could be put.
pub(crate) fn pin_export(
    monitor: &Monitor,
    device: &Device,
    hold: Hold,
    object: (u32, u32),
    gpu: usize,
) -> bool {
    let Some(own) = own_client(monitor) else { return false };
    let source_rm = Rm { release: &monitor.release, device };
    let Ok(fresh) = own.duplicate_from(&source_rm, object, Some(gpu)) else { return false };
    let before = PinPlace::Export { hold };
    let is_pinned = enter_pin(&mut monitor.state(), before, pin_of(&own, fresh));
    if !is_pinned {
        own.free_duplicate(fresh);
    }
    is_pinned
}

/// Makes a pin for an object that was duplicated from `source` and is attributed to another GPU than its memory's.
/// [`pin_handle`] enters the pin. `None` if the object needs no pin, or can't have one: `source` is another file's,
/// say.
pub(crate) fn pin_behind(
    monitor: &Monitor,
    device: &Device,
    source: (u32, u32),
    (shown, gpu): (Attribution, Option<usize>),
) -> Option<u32> {
    let gpu = gpu.filter(|_| shown != Attribution::Here)?;
    let source_rm = Rm { release: &monitor.release, device };
    own_client(monitor)?.duplicate_from(&source_rm, source, Some(gpu)).ok()
}

/// Like [`pin_behind`], for an object that was imported: duplicates the pin of the export `hold`.
pub(crate) fn pin_behind_export(
    monitor: &Monitor,
    hold: Hold,
    (shown, gpu): (Attribution, Option<usize>),
) -> Option<u32> {
    let gpu = gpu.filter(|_| shown != Attribution::Here)?;
    let own = own_client(monitor)?;
    let pin = monitor.state().ledger.pin_at(PinPlace::Export { hold })?;
    own.duplicate_own(gpu, handle_of(&own, pin)?)
}

/// Enters the pin `fresh` of an object, if one was made. Frees `fresh` if it can't be entered.
pub(crate) fn pin_handle(monitor: &Monitor, (client, handle): (u32, u32), fresh: Option<u32>) {
    let (Some(fresh), Some(own)) = (fresh, client_if_open(monitor)) else { return };
    let (client, handle) = (Client(client), Handle(handle));
    let before = PinPlace::Name { client, handle };
    let is_pinned = enter_pin(&mut monitor.state(), before, pin_of(&own, fresh));
    if !is_pinned {
        own.free_duplicate(fresh);
    }
}

/// Frees the pins that stand before nothing any more. Memory that nothing else keeps is freed with its pin.
pub(crate) fn free_pins(monitor: &Monitor, _: &UnderRmLock<'_>) {
    let loose = monitor.state().ledger.loose_pins();
    if loose.is_empty() {
        return;
    }
    let own = client_if_open(monitor);
    let mut has_freed = false;
    for pin in loose {
        let object = own.as_ref().and_then(|own| Some((own, handle_of(own, pin)?)));
        // A pin that can't be freed keeps its memory, and counts. The next call of this function tries again.
        if object.is_none_or(|(own, handle)| own.free_duplicate(handle)) {
            has_freed = true;
            monitor.state().enter(Entry::RemovePin { number: pin });
        }
    }
    if has_freed {
        // The audit closes the monitor's client if this pin was the last reason to keep it.
        monitor.audit_wait.wake();
    }
}

/// Frees loose pins for a caller that doesn't hold the RM lock. Does nothing if a call hangs while it holds the RM
/// lock.
pub(crate) fn free_pins_soon(monitor: &Monitor) {
    if !monitor.state().ledger.loose_pins().is_empty()
        && let Some(rm_lock) = monitor.rm_lock.enter_for_monitor()
    {
        free_pins(monitor, &rm_lock);
    }
}
