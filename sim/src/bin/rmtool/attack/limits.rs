//! Asking for what is too much, too often, or nonsense.

use std::num::NonZeroUsize;
use std::ptr::NonNull;

use anyhow::{Context as _, ensure};
use cgpu_sim::abi::*;
use cgpu_sim::bytes::Fields;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

use super::{STAY, argument, fill_exactly, fill_quota, persist, reached, reached_times};
use crate::processes::together;
use crate::rm::{Fail, Place, Rm, command, raw_ioctl};
use crate::uvm::Uvm;

const PAGE_BYTES: u64 = 4096;

/// Managed memory next to a full quota, at an address that is asked for.
pub(super) fn managed(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    map_managed(place, arguments, true)
}

/// The same without MAP_FIXED: a hint that comes true.
pub(super) fn managed_without_fixed(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    map_managed(place, arguments, false)
}

fn map_managed(place: &Place, arguments: &[String], fixed: bool) -> anyhow::Result<u64> {
    let bytes = usize::try_from(argument(arguments, 0, 8 << 20)?)?;
    let rm = Rm::start(place)?;
    let uvm = Uvm::open(place, rm.abi)?;
    println!("uvm-init {:?} {:?}", uvm.initialize(0), uvm.register(&rm).map(drop));
    fill_quota(&rm, place);
    let mut got = 0;
    // A hint may come to nothing.
    persist(|| match uvm.managed(bytes, fixed) {
        Ok(managed) if managed.equal => {
            println!("mapped equal=true");
            reached();
            got = managed.touch();
            std::thread::sleep(STAY);
            true
        }
        Ok(_) => false,
        Err(fail) => {
            println!("mmap {fail}");
            // As a process that may have none is refused.
            reached_times(u64::from(fail == Fail::Errno(libc::EPERM)));
            true
        }
    });
    Ok(got)
}

/// Sixteen processes ask for the last bytes at once.
pub(super) fn barrier(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let bytes = argument(arguments, 0, 256 << 20)?;
    let got = together(16, |_| {
        let rm = Rm::start(place).ok();
        (rm.as_ref().and_then(|rm| rm.alloc(bytes).ok()).map_or(0, |(_, bytes)| bytes), rm)
    })?;
    let successes = got.iter().filter(|got| **got != 0).count();
    println!("successes={successes}");
    reached_times(successes as u64);
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
    reached_times(made);
    fill_exactly(&rm, 0)
}

/// One handle for memory after memory, twice what there is of it in all, and frees of what
/// isn't there.
pub(super) fn handle_reuse(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let handle = rm.handle();
    let (total, _) = rm.heap_info()?;
    let mut odd = 0;
    for round in 0..argument(arguments, 0, 200)? {
        // More than half: if both were given, or the second free gave back as much as the first,
        // it would be too much.
        let bytes = total / 16 * (9 + round % 7);
        let first = rm.alloc_as(rm.ctl(), handle, NV01_MEMORY_LOCAL_USER, bytes);
        let again = rm.alloc_as(rm.ctl(), handle, NV01_MEMORY_LOCAL_USER, bytes);
        odd += u32::from(first.is_err()) + u32::from(again.is_ok());
        odd += u32::from(rm.free(rm.device, handle).is_err());
        odd += u32::from(rm.free(rm.device, handle).is_ok());
        reached();
    }
    println!("odd={odd}");
    fill_exactly(&rm, 0)
}

/// Sizes at the edges, each of a client that has nothing else; with an argument, all there is
/// to be had, exactly that and one byte more. The most that it had at once.
pub(super) fn hostile_sizes(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    const PART: u64 = 1 << 20;
    let most = argument(arguments, 0, 2 * PART)?;
    let odd = [0, 1, 4097, 1 << 63, u64::MAX, u64::MAX - 4095, u64::MAX - 65536];
    let edges = [(0, most), (0, most + 1), (PART, most - PART), (PART, most - PART + 1)];
    let mut got = 0;
    for (before, size) in odd.map(|size| (0, size)).into_iter().chain(edges) {
        for how in ["alloc", "heap"] {
            let rm = Rm::start(place)?;
            if before > 0 {
                rm.alloc(before)?;
            }
            let made = if how == "alloc" { rm.alloc(size) } else { rm.heap(size) };
            match made {
                Ok((_, bytes)) => {
                    println!("{how} {size} bytes={bytes}");
                    got = got.max(before + bytes);
                }
                Err(fail) => println!("{how} {size} {fail}"),
            }
            let is_exact = before + size == most;
            ensure!(!is_exact || made.is_ok(), "{how}: the last of {most} bytes can't be had");
            reached_times(u64::from(is_exact));
            rm.free_client_by(rm.ctl())?;
        }
    }
    Ok(got)
}

/// The first address that no process has: `TASK_SIZE_MAX` of arch/x86/include/asm/page_64_types.h.
const END_OF_MEMORY: usize = 0x7fff_ffff_f000;

/// A new mapping of pages, at that address or, where it's 0, one of the kernel's choice.
fn pages(at: usize, count: usize) -> anyhow::Result<usize> {
    let length = NonZeroUsize::new(4096 * count).context("no pages")?;
    let both = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    let fixed = if at == 0 { MapFlags::empty() } else { MapFlags::MAP_FIXED_NOREPLACE };
    // SAFETY: a new mapping, in the place of none.
    let mapped = unsafe {
        mmap_anonymous(NonZeroUsize::new(at), length, both, MapFlags::MAP_PRIVATE | fixed)
    }?;
    Ok(mapped.as_ptr().expose_provenance())
}

/// Where a part of this process that the kernel put there begins.
fn part(name: &str) -> u64 {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let line =
        maps.lines().find(|line| line.ends_with(name)).and_then(|line| line.split('-').next());
    line.and_then(|address| u64::from_str_radix(address, 16).ok()).unwrap_or(0)
}

/// Structs and parameters where none can be.
pub(super) fn bad_pointers(place: &Place, _: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let edge = pages(0, 2)? + 4096;
    // SAFETY: the second page of that mapping, which nothing refers to.
    unsafe {
        mprotect(
            NonNull::new(std::ptr::with_exposed_provenance_mut(edge)).context("0")?,
            4096,
            ProtFlags::PROT_NONE,
        )
    }?;
    let end = pages(0, 2)? + 4096;
    // SAFETY: as above.
    unsafe {
        munmap(NonNull::new(std::ptr::with_exposed_provenance_mut(end)).context("0")?, 4096)
    }?;
    let last = pages(END_OF_MEMORY - 4096, 1)? as u64;
    let (edge, end) = (edge as u64, end as u64);
    let addresses = [
        ("null", 0),
        ("unmapped", 0x1000),
        ("inaccessible", edge),
        ("crossing", edge - 16),
        ("ending", end - 16),
        ("vdso", part("[vdso]")),
        ("vvar", part("[vvar]")),
        ("in the last page", last),
        ("at the end of memory", last + 4096 - 16),
        ("after memory", last + 4096),
        ("kernel", 0xffff_8880_0000_0000),
        ("noncanonical", 0x8000_0000_0000_0000),
        ("last", u64::MAX - 8),
    ];
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
        let wrapped = raw_ioctl(rm.ctl(), command(NV_ESC_IOCTL_XFER_CMD, 16), &mut wrapped);
        println!("wrapped {name} {wrapped:?}");
        // Zeroes are no lie; nor is what the kernel wrote into pages of its own a call.
        let is_readable = ["in the last page", "vdso", "vvar"].contains(&name);
        ensure!(is_readable || done.is_err() && rc < 0 && wrapped.is_err(), "{name} is a place");
        reached();
    }
    // A whole one at the very end is like any other.
    let mut params = rm.memory_params(PAGE_BYTES);
    let bytes = rm.nvos64(
        rm.device,
        0,
        NV01_MEMORY_LOCAL_USER,
        params.as_mut_ptr().addr() as u64,
        params.len(),
    );
    let at = usize::try_from(last)? + 4096 - bytes.len();
    let at = std::ptr::with_exposed_provenance_mut::<u8>(at);
    // SAFETY: the end of the page that was mapped there.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
    // SAFETY: as above; it's as long as the command says.
    let rc = unsafe {
        libc::syscall(libc::SYS_ioctl, rm.ctl(), command(NV_ESC_RM_ALLOC, bytes.len()), at)
    };
    ensure!(rc == 0 && params.u64_at(88) + 1 == PAGE_BYTES, "at the very end: {rc}");
    reached();
    // It still works for a process that asks well.
    let (_, bytes) = rm.alloc(1 << 20)?;
    ensure!(bytes == 1 << 20, "{bytes} bytes instead of a MiB");
    Ok(bytes + PAGE_BYTES)
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
        ensure!(bytes.u64_at(16) == *address, "{name} brought an address of another's");
        reached();
    }
    rm.uuid()?;
    println!("then: ok");
    Ok(0)
}
