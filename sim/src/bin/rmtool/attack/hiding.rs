//! Memory that is hidden from the driver's figures: under a process that is dead, or by what keeps
//! it alive when its own name is gone.

use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::time::Duration;

use cgpu_sim::abi::*;
use cgpu_sim::bytes::Fields;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};

use super::{
    GENEROUS, SMALL_BYTES, against, persist, reached, reached_times, request, something_happens,
};
use crate::rm::{Fail, Place, Rm, command};
use crate::uvm::Uvm;

/// What is taken at once: by honest calls, and past the monitor.
const HONEST_BYTES: u64 = 400 << 20;
const TAKEN_BYTES: u64 = 600 << 20;

/// How often.
const TIMES: u64 = 4;

/// For so long the driver usage is checked, or clients of exited processes are forgotten.
const A_WHILE: Duration = Duration::from_millis(700);

/// Keeps what was taken, until it has been found or could have been.
fn keep(place: &Place, taken_bytes: u64) {
    let is_found = place.is_held && taken_bytes > 0;
    std::thread::sleep(if is_found { GENEROUS } else { 3 * A_WHILE });
}

/// Makes a call that continues take memory: its class is a client's when it's checked. The handle,
/// if the race was won.
pub(super) fn take(rm: &Rm, bytes: u64) -> Option<u32> {
    take_as(rm, 0, bytes)
}

/// The same under that handle.
fn take_as(rm: &Rm, handle: u32, bytes: u64) -> Option<u32> {
    let (call, params) = request(rm, bytes);
    let flip = || {
        call.set(12, NV01_ROOT_CLIENT);
        call.set(12, NV01_MEMORY_LOCAL_USER);
    };
    let mut won = None;
    against(flip, || {
        persist(|| {
            params.set(88, 0_u64);
            call.set(8, handle);
            call.set(rm.abi.nvos64_status, 0_u32);
            let rc = call.ioctl(rm.ctl(), command(NV_ESC_RM_ALLOC, rm.abi.nvos64_bytes));
            let made = rc == 0 && call.u32(rm.abi.nvos64_status) == NV_OK;
            if made && params.u64(88) > SMALL_BYTES {
                reached();
                won = Some(call.u32(8));
            }
            won.is_some()
        });
    });
    won
}

/// Takes memory, and hides it; what it could hide.
fn hide(rm: &Rm, hidden: impl Fn(u64, u32) -> bool) -> u64 {
    let mut got = 0;
    for time in 0..TIMES {
        let Some(handle) = take(rm, TAKEN_BYTES) else { break };
        let retained = hidden(time, handle);
        let freed = rm.free(rm.device, handle);
        println!("hidden {retained}, freed {}", freed.is_ok());
        if retained || freed.is_err() {
            got += TAKEN_BYTES;
        }
        std::thread::sleep(A_WHILE);
    }
    got
}

/// Most of the quota, whether that is 1000 MiB or 500.
fn most(rm: &Rm, place: &Place) -> Result<u64, Fail> {
    let is_little = place.quota.is_some_and(|quota| quota < 700 << 20);
    let much = if is_little { HONEST_BYTES } else { 700 << 20 };
    let (handle, bytes) = rm.alloc(much).or_else(|_| rm.alloc(HONEST_BYTES))?;
    rm.free(rm.device, handle)?;
    Ok(bytes)
}

/// Takes as much as the driver usage seems to lack, if what was asked for has two handles next to a file
/// that it was exported to, which owns it. With `export`, one; with `closed`, also next to handles of a
/// client whose file is closed; with `busy`, while it's named again and again, in vain; with `across`,
/// below another GPU's device; with `mapped`, it's mapped and not exported, and with `remapped` it is
/// so once more when something has happened. With `closing` and `anew` other handles go just when that
/// much is taken, the latter under these.
pub(super) fn in_slack(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let mut rm = Rm::start(place)?;
    let name = |rm: &Rm, handle| rm.dup(rm.client, rm.device, rm.client, handle);
    let way = arguments.first().map(String::as_str);
    let all = most(&rm, place)?;
    let honest = match way {
        None | Some("export" | "busy" | "across" | "mapped" | "remapped") => all,
        Some("closed" | "closing" | "anew") => all / 2,
        Some(other) => anyhow::bail!("no way to make slack \"{other}\""),
    };
    let (handle, honest) = rm.alloc(honest)?;
    let file = crate::rm::open(&place.dev, "nvidiactl")?;
    let device = rm.device;
    if way == Some("across") {
        rm.move_to(place, place.gpu + 1)?;
    }
    let another = name(&rm, handle)?;
    if way != Some("export") {
        name(&rm, handle)?;
    }
    // The kernel's object, which no figure shows, is the next to own it.
    let uvm = Uvm::open(place, rm.abi)?;
    let mut mapped = None;
    if let Some("mapped" | "remapped") = way {
        uvm.initialize(0)?;
        let (uuid, base) = (uvm.register(&rm)?, 0x10_0000_0000);
        uvm.external_range(base, 2 * honest)?;
        uvm.map_external(&rm, uuid, base, honest, handle)?;
        mapped = Some((uuid, base + honest));
    } else {
        rm.export(handle, file.as_raw_fd())?;
    }
    rm.free(rm.device, handle)?;
    if way == Some("across") {
        rm.device = device;
        rm.gpu = crate::rm::open(&place.dev, &format!("nvidia{}", place.gpu))?;
    }
    something_happens(arguments)?;
    if let Some((uuid, base)) = mapped.filter(|_| way == Some("remapped")) {
        uvm.map_external(&rm, uuid, base, honest, another)?;
    }
    if way == Some("closed") {
        let other = Rm::start(place)?;
        let (handle, _) = other.alloc(all - honest)?;
        for _ in 0..3 {
            name(&other, handle)?;
        }
    }
    // Has as many handles as are taken, and is gone at once.
    if let Some(way @ ("closing" | "anew")) = way {
        let other = Rm::start(place)?;
        let (handle, half) = other.alloc(all - honest)?;
        let second = name(&other, handle)?;
        let taken = match way {
            "closing" => {
                let taken = take(&rm, 2 * half).map_or(0, |_| 2 * half);
                drop(other);
                taken
            }
            // Under the same names, of clients and of memory, when others' were just asked for.
            _ => {
                let decoy = Rm::start(place)?;
                let (handle_of_decoy, _) = decoy.alloc(SMALL_BYTES)?;
                name(&decoy, handle_of_decoy)?;
                drop(decoy);
                drop(Rm::start(place)?);
                std::thread::sleep(Duration::from_millis(20));
                let (client, device) = (other.client, other.device);
                drop(other);
                // A file is closed a moment after its descriptor.
                let made = || match Rm::anew(place, client, device) {
                    Err(Fail::Status(NV_ERR_INSERT_DUPLICATE_NAME)) => None,
                    made => Some(made),
                };
                let other = std::iter::repeat_with(made).flatten().next();
                let other = other.expect("the one before goes")?;
                let taken = [handle, second].map(|name| take_as(&other, name, half));
                std::mem::forget(other);
                taken.iter().flatten().count() as u64 * half
            }
        };
        keep(place, taken);
        return Ok(honest + taken);
    }
    let taken = || {
        let taken = take(&rm, all).map_or(0, |_| all);
        keep(place, taken);
        taken
    };
    let in_vain = || _ = rm.dup_as(another, rm.client, rm.device, rm.client, another);
    let taken = match way {
        Some("busy") => against(in_vain, || against(in_vain, || against(in_vain, taken))),
        _ => taken(),
    };
    Ok(honest + taken)
}

/// Memory that a fabric object is made of, which is freed, and then the memory: what was made of that
/// object keeps it, attributed to no process. As much is taken bypassing the gate. If the object is
/// refused, there is nothing to hide behind.
pub(super) fn behind_the_fabric(place: &Place, _: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let all = most(&rm, place)?;
    let (handle, honest) = rm.alloc(all)?;
    let fabric = rm.handle();
    let (size, at) = rm.abi.fabric_params;
    let mut params = vec![0; size];
    params.set_u32(at, handle);
    if rm.alloc_object(rm.ctl(), rm.device, fabric, NV_MEMORY_FABRIC, &mut params).is_err() {
        reached();
        return Ok(honest);
    }
    rm.dup(rm.client, rm.device, rm.client, fabric)?;
    rm.free(rm.device, fabric)?;
    rm.free(rm.device, handle)?;
    let taken = take(&rm, all).map_or(0, |_| all);
    keep(place, taken);
    Ok(honest + taken)
}

/// Memory taken bypassing the gate under the handle of little memory that was freed without the monitor's
/// knowing: it was below a subdevice that was made unseen. Then it's mapped, or exported, and its handle
/// freed; and as much is asked for again.
pub(super) fn under_little(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let first = Rm::start(place)?;
    let all = most(&first, place)?;
    let maps = arguments.first().is_some_and(|way| way == "map");
    for _ in 0..TIMES {
        let mut rm = Rm::open(place)?;
        rm.make_client()?;
        let little = gone_unseen(&mut rm, place)?;
        let uvm = Uvm::open(place, rm.abi)?;
        let file = crate::rm::open(&place.dev, "nvidiactl")?;
        let base = 0x10_0000_0000;
        let mut uuid = None;
        if maps {
            uvm.initialize(0)?;
            rm.make_subdevice()?;
            uuid = Some(uvm.register(&rm)?);
            uvm.external_range(base, all)?;
        }
        let Some(handle) = take_as(&rm, little, all) else { continue };
        let retained = match uuid {
            Some(uuid) => uvm.map_external(&rm, uuid, base, all, handle).is_ok(),
            None => rm.export(handle, file.as_raw_fd()).is_ok(),
        };
        let freed = rm.free(rm.device, little).is_ok();
        std::thread::sleep(A_WHILE);
        // If it was charged for what it is, another doesn't fit.
        let more = rm.alloc(all).map_or(0, |(_, bytes)| bytes);
        println!("kept {retained}, freed {freed}, more {}", more > 0);
        if retained && more > 0 {
            keep(place, more);
            return Ok(all + more);
        }
    }
    Ok(0)
}

/// The handle of memory that was freed with a device that it hung below, which no call reported.
fn gone_unseen(rm: &mut Rm, place: &Place) -> anyhow::Result<u32> {
    rm.make_device(place.gpu)?;
    let (device, subdevice, little) = (rm.device, rm.handle(), rm.handle());
    let mut call = vec![0; 20];
    for (at, word) in [rm.client, device, subdevice, NV20_SUBDEVICE_0].into_iter().enumerate() {
        call.set_u32(4 * at, word);
    }
    crate::rm::call(rm.ctl(), NV_ESC_RM_ALLOC_OBJECT, &mut call, 16)?;
    let mut params = rm.memory_params(SMALL_BYTES);
    rm.alloc_object(rm.ctl(), subdevice, little, NV01_MEMORY_LOCAL_USER, &mut params)?;
    rm.free(rm.client, device)?;
    rm.make_device(place.gpu)?;
    Ok(little)
}

/// Two duplicates keep it, and are no process's own in the driver usage.
pub(super) fn by_duplicates(place: &Place, _: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let duplicate = |handle| rm.dup(rm.client, rm.device, rm.client, handle).is_ok();
    let got = hide(&rm, |_, handle| {
        let first = duplicate(handle);
        duplicate(handle) || first
    });
    Ok(got)
}

/// A UVM mapping keeps it, which is in no figure.
pub(super) fn by_mapping(place: &Place, _: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let uvm = Uvm::open(place, rm.abi)?;
    uvm.initialize(0)?;
    let uuid = uvm.register(&rm)?;
    let got = hide(&rm, |time, handle| {
        let base = 0x10_0000_0000 + time * TAKEN_BYTES.next_power_of_two();
        uvm.external_range(base, TAKEN_BYTES)
            .and_then(|()| uvm.map_external(&rm, uuid, base, TAKEN_BYTES, handle))
            .is_ok()
    });
    Ok(got)
}

/// Has a child make a client, and that one's child inherit it; runs `work` in this one when the
/// client's creator has exited. Children stay until `all` have worked, or are killed. The most bytes
/// that one has got, and how many did work.
fn with_inherited_clients(
    place: &Place,
    all: u64,
    before: impl Fn(&Rm) -> anyhow::Result<()>,
    work: impl Fn(&Rm) -> Result<u64, Fail>,
) -> anyhow::Result<(u64, u64)> {
    let (stay, end) = nix::unistd::pipe()?;
    let (mut got, mut worked) = (0, 0);
    for _ in 0..all {
        let (report, answer) = nix::unistd::pipe()?;
        std::io::stdout().flush()?;
        // SAFETY: this program has one thread here.
        let child = match unsafe { fork() }? {
            ForkResult::Parent { child } => child,
            ForkResult::Child => {
                drop((end, report));
                let made = Rm::start(place).map_err(anyhow::Error::from);
                let made = made.and_then(|rm| before(&rm).map(|()| rm));
                // SAFETY: as above.
                let inherits = made.is_ok() && unsafe { fork() }.is_ok_and(|fork| fork.is_child());
                if let (true, Ok(rm)) = (inherits, made) {
                    std::thread::sleep(A_WHILE);
                    if let Ok(got) = work(&rm) {
                        let _ = std::fs::File::from(answer).write_all(&got.to_le_bytes());
                    }
                    let _ = nix::unistd::read(&stay, &mut [0]);
                }
                // SAFETY: ends this process, and nothing of it is to be tidied up.
                unsafe { libc::_exit(0) }
            }
        };
        drop(answer);
        waitpid(child, None)?;
        let mut bytes = [0; 8];
        let reported = std::io::Read::read_exact(&mut std::fs::File::from(report), &mut bytes);
        worked += u64::from(reported.is_ok());
        got = got.max(reported.map_or(0, |()| u64::from_le_bytes(bytes)));
        std::thread::sleep(A_WHILE);
    }
    drop(end);
    while waitpid(Pid::from_raw(-1), None).is_ok() {}
    Ok((got, worked))
}

/// Memory under clients whose creators have exited, and held nothing when they exited.
pub(super) fn by_death(place: &Place, _: &[String]) -> anyhow::Result<u64> {
    let take = |rm: &Rm| match rm.alloc(HONEST_BYTES) {
        Ok((_, bytes)) => Ok(bytes),
        // By a client that lives: it has got there.
        Err(Fail::Status(NV_ERR_NO_MEMORY)) => Ok(0),
        Err(fail) => Err(fail),
    };
    let (got, worked) = with_inherited_clients(place, TIMES, |_| Ok(()), take)?;
    reached_times(worked);
    Ok(got)
}

/// Memory taken bypassing the gate, under a client whose creator has exited and has something still;
/// with `nothing`, hadn't anything.
pub(super) fn behind_the_dead(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let has_some = arguments.first().is_none_or(|word| word != "nothing");
    let before = |rm: &Rm| {
        if has_some {
            rm.alloc(SMALL_BYTES)?;
        }
        Ok(())
    };
    let (got, _) = with_inherited_clients(place, 1, before, |rm| {
        let taken = take(rm, TAKEN_BYTES).map_or(0, |_| TAKEN_BYTES);
        keep(place, taken);
        Ok(taken)
    })?;
    Ok(got)
}
