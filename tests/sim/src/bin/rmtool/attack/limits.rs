//! Asking for what is too much, too often, or nonsense.

use cgpu_sim::abi::*;
use cgpu_sim::bytes::Fields;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, mprotect};
use std::num::NonZeroUsize;

use super::argument;
use crate::processes::together;
use crate::rm::{Place, Rm, command, raw_ioctl};
use crate::uvm::Uvm;
use crate::work::fill;

/// Managed memory, at an address that is asked for.
pub(super) fn managed(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    map_managed(place, arguments, true)
}

/// The same without MAP_FIXED: a hint that comes true.
pub(super) fn managed_without_fixed(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    map_managed(place, arguments, false)
}

fn map_managed(place: &Place, arguments: &[String], fixed: bool) -> anyhow::Result<u64> {
    let bytes = usize::try_from(argument(arguments, 0, 64 << 20)?)?;
    let rm = Rm::open(place)?;
    let uvm = Uvm::open(place, rm.abi)?;
    println!("uvm-init {:?}", uvm.initialize(0));
    Ok(match uvm.managed(bytes, fixed) {
        Ok(managed) => {
            println!("mapped equal={}", managed.equal);
            if managed.equal { managed.touch() } else { 0 }
        }
        Err(fail) => {
            println!("mmap {fail}");
            0
        }
    })
}

/// Sixteen processes ask for the last bytes at once.
pub(super) fn barrier(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let bytes = argument(arguments, 0, 256 << 20)?;
    let got = together(16, |_| {
        let rm = Rm::start(place).ok();
        (rm.as_ref().and_then(|rm| rm.alloc(bytes).ok()).map_or(0, |(_, bytes)| bytes), rm)
    })?;
    println!("successes={}", got.iter().filter(|got| **got != 0).count());
    Ok(got.iter().sum())
}

/// So many clients.
pub(super) fn clients(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let count = argument(arguments, 0, 10_000)?;
    let rm = Rm::start(place)?;
    let mut made = 0;
    let mut refusal = String::new();
    for _ in 0..count {
        match rm.new_client() {
            Ok(_) => made += 1,
            Err(fail) => refusal = fail.to_string(),
        }
    }
    println!("clients={made} {refusal}");
    Ok(fill(&rm, u64::MAX).0)
}

/// One handle for memory after memory, and frees of what isn't there.
pub(super) fn handle_reuse(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let handle = rm.handle();
    let mut got = 0;
    let mut odd = 0;
    for round in 0..argument(arguments, 0, 500)? {
        let bytes = (round % 7 + 1) << 20;
        let first = rm.alloc_as(rm.ctl(), handle, NV01_MEMORY_LOCAL_USER, bytes);
        let again = rm.alloc_as(rm.ctl(), handle, NV01_MEMORY_LOCAL_USER, bytes);
        odd += u32::from(first.is_ok() && again.is_ok());
        got += first.map_or(0, |(_, bytes)| bytes) + again.map_or(0, |(_, bytes)| bytes);
        if rm.free(rm.device, handle).is_ok() {
            got -= first.or(again).map_or(0, |(_, bytes)| bytes);
        }
        odd += u32::from(rm.free(rm.device, handle).is_ok());
    }
    println!("odd={odd}");
    Ok(got)
}

/// Sizes at the edges; with an argument, exactly that many bytes and one more too.
pub(super) fn hostile_sizes(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let rest = argument(arguments, 0, 1 << 20)?;
    let sizes =
        [0, 1, 4097, 1 << 63, u64::MAX, u64::MAX - 4095, u64::MAX - 65536, rest.saturating_add(1)];
    let mut got = 0;
    for size in sizes.into_iter().chain([rest, 1]) {
        for (how, made) in [("alloc", rm.alloc(size)), ("heap", rm.heap(size))] {
            match made {
                Ok((_, bytes)) => {
                    println!("{how} {size} bytes={bytes}");
                    got += bytes;
                }
                Err(fail) => println!("{how} {size} {fail}"),
            }
        }
    }
    Ok(got)
}

/// Structs and parameters where none can be.
pub(super) fn bad_pointers(place: &Place, _: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let two = NonZeroUsize::new(8192).expect("it isn't zero");
    // SAFETY: a new mapping at an address of the kernel's choice.
    let pages = unsafe {
        mmap_anonymous(
            None,
            two,
            ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
            MapFlags::MAP_PRIVATE,
        )
    }?;
    let pages = pages.cast::<u8>();
    // SAFETY: the second page of the mapping made above.
    let second = unsafe { pages.add(4096) };
    // SAFETY: that page, which nothing refers to.
    unsafe { mprotect(second.cast(), 4096, ProtFlags::PROT_NONE) }?;
    // SAFETY: needs no precondition; 0 where it isn't known.
    let vdso = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) };
    let edge = second.as_ptr().addr() as u64;
    let addresses = [
        ("null", 0),
        ("unmapped", 0x1000),
        ("inaccessible", edge),
        ("crossing", edge - 16),
        ("vdso", vdso),
        ("kernel", 0xffff_8880_0000_0000),
        ("noncanonical", 0x8000_0000_0000_0000),
        ("last", u64::MAX - 8),
    ];
    let mut got = 0;
    for (name, address) in addresses {
        let mut bytes =
            rm.nvos64(rm.device, 0, NV01_MEMORY_LOCAL_USER, address, rm.abi.memory_params_bytes);
        let done = crate::rm::call(rm.ctl(), NV_ESC_RM_ALLOC, &mut bytes, rm.abi.nvos64_status);
        println!(
            "params {name} {}",
            done.map_or_else(|fail| fail.to_string(), |()| "ok".to_owned())
        );
        // SAFETY: the address is a lie that kernel and driver must withstand.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_ioctl,
                rm.ctl(),
                command(NV_ESC_RM_ALLOC, rm.abi.nvos64_bytes),
                address,
            )
        };
        println!("struct {name} rc={rc} {}", crate::rm::errno());
        let mut wrapped = [0; 16];
        wrapped.set_u32(0, NV_ESC_RM_ALLOC);
        wrapped.set_u32(4, u32::try_from(rm.abi.nvos64_bytes)?);
        wrapped.set_u64(8, address);
        println!(
            "wrapped {name} {:?}",
            raw_ioctl(rm.ctl(), command(NV_ESC_IOCTL_XFER_CMD, 16), &mut wrapped)
        );
    }
    // It still works for who asks well.
    got += rm.alloc(1 << 20).map_or(0, |(_, bytes)| bytes);
    Ok(got)
}

/// Parameters of controls that lie of their size, of lists and of where they are. Nothing is
/// had so; what is answered shows that who answers lives.
pub(super) fn control_params(place: &Place, _: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let list = [0_u8; 64];
    let mut params = vec![0_u8; 1 << 21];
    let (here, there) = (params.as_mut_ptr().addr() as u64, list.as_ptr().addr() as u64);
    let classes = NV0080_CTRL_CMD_GPU_GET_CLASSLIST;
    let uuid = NV2080_CTRL_CMD_GPU_GET_GID_INFO;
    let firmware = FIRMWARE_CTRL_CMD;
    // Name, command, address and size of the parameters, count and address of a list.
    let lies: &[(&str, u32, u64, u32, u32, u64)] = &[
        ("no parameters", classes, 0, 16, 0, 0),
        ("no size", classes, here, 0, 4, there),
        ("a small struct", classes, here, 8, 4, there),
        ("a large struct", classes, here, 4096, 4, there),
        ("a huge struct", uuid, here, 1 << 21, 0, 0),
        ("all there is", uuid, here, u32::MAX, 0, 0),
        ("a huge one for the firmware", firmware, here, 1 << 20, 0, 0),
        ("no list", classes, here, 16, 4, 0),
        ("an empty list", classes, here, 16, 0, there),
        ("a huge list", classes, here, 16, u32::MAX, there),
        ("a large list", classes, here, 16, 1 << 20, here),
        ("a list in the kernel", classes, here, 16, 4, 0xffff_8880_0000_0000),
        ("a list at the end", classes, here, 16, 4, u64::MAX - 3),
        ("a list at nowhere", classes, here, 16, 4, 0x1000),
        ("a list in its parameters", classes, here, 16, 4, here),
        ("parameters at nowhere", uuid, 0x1000, 268, 0, 0),
        ("parameters in the kernel", uuid, 0xffff_8880_0000_0000, 268, 0, 0),
        ("a stranger", 0x2080_7f7f, here, 16, 0, 0),
        ("the kernel's alone", 0x2080_0a01, here, 16, 0, 0),
    ];
    for (name, control, address, size, count, list) in lies {
        params.fill(0);
        params.set_u32(0, *count);
        params.set_u64(8, *list);
        let object = if *control == classes { rm.device } else { rm.subdevice };
        let mut bytes = [0; 32];
        bytes.set_u32(0, rm.client);
        bytes.set_u32(4, object);
        bytes.set_u32(8, *control);
        bytes.set_u64(16, *address);
        bytes.set_u32(24, *size);
        let done = crate::rm::call(rm.ctl(), NV_ESC_RM_CONTROL, &mut bytes, 28);
        println!("{name}: {}", done.map_or_else(|fail| fail.to_string(), |()| "ok".to_owned()));
        anyhow::ensure!(bytes.u64_at(16) == *address, "{name} brought an address of another's");
    }
    println!("then: {}", rm.uuid().map_or_else(|fail| fail.to_string(), |_| "ok".to_owned()));
    Ok(0)
}
