//! A second thread changes what was looked at before it is used.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};
use std::{fs, io};

use anyhow::{Context as _, bail};
use cgpu_sim::abi::*;
use cgpu_sim::bytes::Fields;

use super::{
    GENEROUS, HUGE_BYTES, ROUNDS, SMALL_BYTES, STAY, Shared, against, argument, fill_exactly,
    fill_quota, persist, reached, reached_times, request,
};
use crate::rm::{Fail, Place, Rm, command, errno, open};
use crate::uvm::Uvm;

/// Allocates again and again from shared memory; the bytes, by `limit`. `prepare` resets what is
/// to be raced for. A race is one where some calls are answered as if nothing but the harmless
/// was there, and some as if nothing but the forbidden: the fewer of both have reached it.
fn repeat(
    rm: &Rm,
    rounds: u32,
    call: Shared,
    blocks: &[Shared],
    prepare: impl Fn(),
) -> anyhow::Result<u64> {
    const ENOUGH: u64 = 50;
    let (mut got, mut harmless, mut forbidden, mut round) = (0, 0, 0_u64, 0);
    persist(|| {
        blocks.iter().for_each(|block| block.set(88, 0_u64));
        call.set(8, 0_u32);
        call.set(rm.abi.nvos64_status, 0_u32);
        prepare();
        let rc = call.ioctl(rm.ctl(), command(NV_ESC_RM_ALLOC, rm.abi.nvos64_bytes));
        let status = call.u32(rm.abi.nvos64_status);
        forbidden += u64::from(rc == 0 && status == NV_ERR_NO_MEMORY);
        if rc == 0 && status == NV_OK {
            let limits = blocks.iter().map(|block| block.u64(88)).filter(|limit| *limit != 0);
            let bytes: u64 = limits.map(|limit| limit.wrapping_add(1)).sum();
            got += bytes;
            // Small ones are given back, so that only a won race adds up.
            // So is memory of the host, which counts nothing and shows in no figure.
            let is_hosts = call.u32(12) == NV01_MEMORY_SYSTEM;
            let is_harmless = is_hosts || bytes <= SMALL_BYTES;
            harmless += u64::from(is_harmless);
            forbidden += u64::from(!is_harmless);
            if is_harmless && rm.free(rm.device, call.u32(8)).is_ok() {
                got -= bytes;
            }
        }
        round += 1;
        round >= rounds && harmless.min(forbidden) >= ENOUGH
    });
    println!("rounds={round} harmless={harmless} forbidden={forbidden}");
    reached_times(harmless.min(forbidden));
    Ok(got)
}

/// Keeps what was won beyond what an enforced quota allows: until it has been found, or could have been.
fn stay(place: &Place, won: u64) {
    let is_found = place.is_held && won > 0;
    std::thread::sleep(if is_found { GENEROUS } else { STAY });
}

fn rounds(arguments: &[String]) -> anyhow::Result<u32> {
    Ok(u32::try_from(argument(arguments, 0, u64::from(ROUNDS))?)?)
}

/// The size is small when it is checked, and huge after.
pub(super) fn size(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let rounds = rounds(arguments)?;
    let (call, params) = request(&rm, SMALL_BYTES);
    let flip = || {
        params.set(64, HUGE_BYTES);
        params.set(64, SMALL_BYTES);
    };
    against(flip, || repeat(&rm, rounds, call, &[params], || params.set(64, SMALL_BYTES)))
}

/// The class is system memory when it is checked, and video memory after.
pub(super) fn class(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let rounds = rounds(arguments)?;
    let (call, params) = request(&rm, HUGE_BYTES);
    let system = 1_u32 << NVOS32_ATTR_LOCATION_SHIFT;
    let flip = || {
        call.set(12, NV01_MEMORY_SYSTEM);
        params.set(24, system);
        params.set(24, 0_u32);
        call.set(12, NV01_MEMORY_LOCAL_USER);
    };
    against(flip, || repeat(&rm, rounds, call, &[params], || params.set(64, HUGE_BYTES)))
}

/// The pointer leads to a small size when it is checked, and to a huge one after.
pub(super) fn pointer(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let rounds = rounds(arguments)?;
    let (call, small) = request(&rm, SMALL_BYTES);
    let huge = Shared::new(rm.memory_params(HUGE_BYTES));
    let flip = || {
        call.set(16, huge.address());
        call.set(16, small.address());
    };
    let prepare = || {
        small.set(64, SMALL_BYTES);
        huge.set(64, HUGE_BYTES);
    };
    against(flip, || repeat(&rm, rounds, call, &[small, huge], prepare))
}

/// The class is a client when it is checked, and video memory after: a client is among
/// what has to be made by the process itself.
pub(super) fn class_in_client(place: &Place, _: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let got = super::hiding::take(&rm, HUGE_BYTES).map_or(0, |_| HUGE_BYTES);
    stay(place, got);
    Ok(got)
}

/// A control is none when it is checked, and after exports memory to a file, which keeps it
/// when it's freed. With `xfer`, inside `NV_ESC_IOCTL_XFER_CMD`.
pub(super) fn swap_control(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    const BYTES: u64 = 200 << 20;
    const FILES: usize = 8;
    let rm = Rm::start(place)?;
    let wrapped = arguments.first().is_some_and(|word| word == "xfer");
    let params = Shared::new(vec![0; 24]);
    let mut call = vec![0; 32];
    call.set_u32(0, rm.client);
    call.set_u32(4, rm.client);
    call.set_u64(16, params.address());
    call.set_u32(24, 24);
    let call = Shared::new(call);
    let mut wrapper = vec![0; 16];
    wrapper.set_u32(0, NV_ESC_RM_CONTROL);
    wrapper.set_u32(4, 32);
    wrapper.set_u64(8, call.address());
    let wrapper = Shared::new(wrapper);
    let flip = || {
        call.set(8, NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD);
        call.set(8, 0_u32);
    };
    let mut files = Vec::new();
    let (mut got, mut retained) = (0, 0);
    for _ in 0..FILES {
        let Ok((memory, bytes)) = rm.alloc(BYTES) else { break };
        let file = open(&place.dev, "nvidiactl")?;
        let number = u32::try_from(file.as_raw_fd())?;
        for (at, value) in [1, rm.device, rm.device, memory, number, 0].into_iter().enumerate() {
            params.set(4 * at, value);
        }
        against(flip, || {
            for _ in 0..ROUNDS / 4 {
                if wrapped {
                    wrapper.ioctl(rm.ctl(), command(NV_ESC_IOCTL_XFER_CMD, 16));
                } else {
                    call.ioctl(rm.ctl(), command(NV_ESC_RM_CONTROL, 32));
                }
            }
        });
        let freed = rm.free(rm.device, memory);
        // What the file kept is had again by importing it; if that is refused, no process has it.
        if rm.import(file.as_raw_fd()).is_ok() {
            reached();
            retained += 1;
            got += bytes;
        }
        println!("freed={freed:?}");
        files.push(file);
    }
    println!("files={FILES} kept={retained}");
    Ok(got)
}

fn dup2(from: i32, to: i32) {
    // SAFETY: `to` is a number that is ours to replace, made for this.
    unsafe { libc::dup2(from, to) };
}

/// The descriptor is a plain file when it is checked, and the driver's after.
pub(super) fn dup2_ioctl(place: &Place, _: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let harmless = OwnedFd::from(fs::File::open("/dev/null")?);
    let number = harmless.try_clone()?;
    let (mut got, mut rounds) = (0, 0_u64);
    let target = number.as_raw_fd();
    let flip = || {
        dup2(rm.ctl(), target);
        dup2(harmless.as_raw_fd(), target);
    };
    against(flip, || {
        persist(|| {
            rounds += 1;
            match rm.alloc_as(target, rm.handle(), NV01_MEMORY_LOCAL_USER, 16 << 20) {
                Ok((_, bytes)) => {
                    got += bytes;
                    reached();
                    false
                }
                // Most calls reach the plain file, which is quick.
                Err(fail) => fail == Fail::Status(NV_ERR_NO_MEMORY),
            }
        });
    });
    println!("rounds={rounds}");
    Ok(got)
}

/// Maps shared memory of a descriptor at an address that is its offset, and nothing else is at.
fn map_at(descriptor: i32, at: usize, bytes: usize, flags: i32) -> Option<*mut u8> {
    // SAFETY: an address far from all else, which the callers use for this alone.
    let mapped = unsafe {
        libc::mmap(
            std::ptr::without_provenance_mut(at),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | flags,
            descriptor,
            i64::try_from(at).unwrap_or(0),
        )
    };
    (mapped != libc::MAP_FAILED).then_some(mapped.cast())
}

/// Touches each page of a mapping.
fn touch(mapped: *mut u8, bytes: usize) {
    for page in (0..bytes).step_by(4096) {
        // SAFETY: within a mapping of that many bytes, by the callers.
        unsafe { mapped.add(page).write_volatile(1) };
    }
}

const FAR: usize = 0x7000_0000_0000 / 4;

/// So many wins are enough.
const WINS: u64 = 8;

/// The same with a mapping that makes managed memory.
pub(super) fn dup2_mmap(place: &Place, _: &[String]) -> anyhow::Result<u64> {
    const BYTES: usize = 64 << 10;
    let rm = Rm::start(place)?;
    let uvm = Uvm::open(place, rm.abi)?;
    println!("uvm-init {:?} {:?}", uvm.initialize(0), uvm.register(&rm).map(drop));
    fill_quota(&rm, place);
    let file = tempfile_of(1 << 46)?;
    let number = file.try_clone()?;
    let target = number.as_raw_fd();
    let (mut won, mut round) = (0, 0);
    let flip = || {
        dup2(uvm.fd(), target);
        dup2(file.as_raw_fd(), target);
    };
    against(flip, || {
        persist(|| {
            let at = FAR + round * BYTES;
            round += 1;
            let mapped = map_at(target, at, BYTES, libc::MAP_FIXED_NOREPLACE);
            if let Some(mapped) = mapped.filter(|_| is_uvm(at)) {
                reached();
                touch(mapped, BYTES);
                won += 1;
            }
            won == WINS
        });
    });
    println!("rounds={round} won={won}");
    stay(place, won);
    Ok(won * BYTES as u64)
}

/// The descriptor is a file that has a pool there when it's checked, and after another, for
/// which that is managed memory.
pub(super) fn dup2_range(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    const BYTES: usize = 16 << 10;
    // The kernel would take neighbours for one.
    let at = |round| FAR + 2 * round * BYTES;
    let rm = Rm::start(place)?;
    let rounds = usize::try_from(rounds(arguments)?.min(500))?;
    let files = [Uvm::open(place, rm.abi)?, Uvm::open(place, rm.abi)?];
    for uvm in &files {
        println!("uvm-init {:?} {:?}", uvm.initialize(0), uvm.register(&rm).map(drop));
    }
    let [pool, other] = &files;
    for round in 0..rounds {
        if let Err(fail) = pool.pool(at(round) as u64, BYTES as u64) {
            bail!("no pool: {fail}");
        }
    }
    fill_quota(&rm, place);
    let number = pool.another()?;
    let target = number.as_raw_fd();
    let (mut mapped, mut won, mut round) = (0, 0, 0);
    let flip = || {
        dup2(other.fd(), target);
        dup2(pool.fd(), target);
    };
    // Whether that is managed memory of the other's.
    let is_managed = |at| {
        let call = other.call(UVM_VALIDATE_VA_RANGE, |params| {
            params.set_u64(0, at);
            params.set_u64(8, BYTES as u64);
        });
        call.is_ok()
    };
    against(flip, || {
        persist(|| {
            let at = at(round % rounds);
            round += 1;
            if let Some(memory) = map_at(target, at, BYTES, libc::MAP_FIXED) {
                touch(memory, BYTES);
                mapped += 1;
                if is_managed(at as u64) {
                    reached();
                    won += 1;
                }
            }
            won > 0 && round >= rounds
        });
    });
    println!("rounds={round} mapped={mapped} won={won}");
    std::thread::sleep(STAY);
    Ok(won * BYTES as u64)
}

/// A pool's mapping is moved away, and mapped again where it is by its file alone: there the offset is
/// the address, and the file has no range.
pub(super) fn remap(place: &Place, _: &[String]) -> anyhow::Result<u64> {
    const BYTES: usize = 64 << 10;
    let rm = Rm::start(place)?;
    let uvm = Uvm::open(place, rm.abi)?;
    println!("uvm-init {:?} {:?}", uvm.initialize(0), uvm.register(&rm).map(drop));
    fill_quota(&rm, place);
    if let Err(fail) = uvm.pool(FAR as u64, BYTES as u64) {
        bail!("no pool: {fail}");
    }
    let mut got = 0;
    for round in 1..16 {
        let pool =
            map_at(uvm.fd(), FAR, BYTES, libc::MAP_FIXED).context("the pool isn't mapped")?;
        let at = FAR + 2 * round * BYTES;
        let target = std::ptr::without_provenance_mut::<libc::c_void>(at);
        let moves = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: both are this function's own, and nothing refers to them.
        let moved = unsafe { libc::mremap(pool.cast(), BYTES, BYTES, moves, target) };
        if moved == libc::MAP_FAILED {
            println!("mremap {}", io::Error::last_os_error());
            break;
        }
        // SAFETY: as above.
        let mapped = unsafe {
            let number = libc::SYS_remap_file_pages;
            libc::syscall(number, target, BYTES, 0, at >> 12, 0)
        };
        reached();
        if mapped != 0 {
            println!("remap {}", errno());
            break;
        }
        touch(target.cast(), BYTES);
        got += BYTES as u64;
    }
    println!("got={got}");
    std::thread::sleep(STAY);
    Ok(got)
}

/// The mapping is asked for by a helper that has our memory and descriptors, and ends at once.
pub(super) fn dup2_inherited(place: &Place, _: &[String]) -> anyhow::Result<u64> {
    const BYTES: usize = 64 << 10;
    struct Ask {
        descriptor: i32,
        at: usize,
    }
    extern "C" fn help(ask: *mut libc::c_void) -> libc::c_int {
        // SAFETY: it's there until we have ended.
        let ask = unsafe { &*ask.cast::<Ask>() };
        let _ = map_at(ask.descriptor, ask.at, BYTES, libc::MAP_FIXED_NOREPLACE);
        0
    }
    let rm = Rm::start(place)?;
    let uvm = Uvm::open(place, rm.abi)?;
    println!("uvm-init {:?} {:?}", uvm.initialize(0), uvm.register(&rm).map(drop));
    fill_quota(&rm, place);
    let file = tempfile_of(1 << 46)?;
    let number = file.try_clone()?;
    let descriptor = number.as_raw_fd();
    let (mut got, mut round) = (0, 0);
    let mut stack = vec![0_u128; 16384];
    let flip = || {
        dup2(uvm.fd(), descriptor);
        dup2(file.as_raw_fd(), descriptor);
    };
    against(flip, || {
        persist(|| {
            let ask = Ask { descriptor, at: FAR + 2 * round * BYTES };
            round += 1;
            let flags = libc::CLONE_VM | libc::CLONE_FILES | libc::SIGCHLD;
            let end = stack.as_mut_ptr_range().end.cast();
            // SAFETY: it has a stack of its own, and is waited for before that is used again.
            unsafe {
                let pid = libc::clone(help, end, flags, (&raw const ask).cast_mut().cast());
                libc::waitpid(pid, std::ptr::null_mut(), 0);
            }
            if is_uvm(ask.at) {
                reached();
                touch(std::ptr::with_exposed_provenance_mut(ask.at), BYTES);
                got += BYTES as u64;
            }
            got == WINS * BYTES as u64
        });
    });
    println!("got={got}");
    stay(place, got);
    Ok(got)
}

/// A file is initialized by another process than the one that asked for that: one that lives asks in
/// vain, and the descriptor by which one that ends initializes its own is replaced by that file.
pub(super) fn dup2_creator(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    /// No flag of the driver's.
    const NONE: u64 = 1 << 40;
    /// Files of its own that it tries by.
    const FILES: usize = 60;
    let rm = Rm::start(place)?;
    let (mut won, mut registered) = (0_u64, 0);
    for _ in 0..rounds(arguments)?.min(20) {
        let uvm = Uvm::open(place, rm.abi)?;
        if uvm.initialize(NONE).is_ok() {
            bail!("it has flags that there aren't");
        }
        // SAFETY: without a stack and CLONE_VM it is a fork; this program has one thread here.
        let child = unsafe {
            libc::syscall(libc::SYS_clone, libc::CLONE_FILES | libc::SIGCHLD, 0, 0, 0, 0)
        };
        if child == 0 {
            let made = (0..FILES).any(|_| is_initialized_by_another(place, rm.abi, &uvm));
            let _ = uvm.keep_memory();
            // SAFETY: ends this process at once, and closes nothing of ours.
            unsafe { libc::_exit(i32::from(!made)) }
        }
        let mut status = 0;
        // SAFETY: the kernel writes the status.
        unsafe { libc::waitpid(i32::try_from(child)?, &raw mut status, 0) };
        if status == 0 {
            won += 1;
            registered += u32::from(uvm.register(&rm).is_ok());
        }
    }
    println!("won={won} registered={registered}");
    reached_times(won);
    Ok(u64::from(registered) * HUGE_BYTES)
}

/// One handle is given to little memory and to much, and freed, by threads that race, while others
/// duplicate and export what has it: what is charged little may be much.
pub(super) fn names(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    // Most of what can be had: twice is too much.
    let much_bytes = place.quota.map_or(900 << 20, |quota| quota / 5 * 4);
    let (mut duplicates, mut exports) = (0, 0);
    let (least, mut round, begun) = (rounds(arguments)?.min(12), 0, Instant::now());
    // On a busy machine few get a turn at the right time.
    while round < least || duplicates.min(exports) == 0 && begun.elapsed() < GENEROUS {
        round += 1;
        let (name, other) = (rm.handle(), AtomicU32::new(0));
        let files = [open(&place.dev, "nvidiactl")?, open(&place.dev, "nvidiactl")?];
        let over = AtomicBool::new(false);
        let until = |done: &dyn Fn() -> bool| {
            while !over.load(Ordering::Relaxed) && !done() {
                std::hint::spin_loop();
            }
        };
        let take = |bytes| {
            let _ = rm.alloc_as(rm.ctl(), name, NV01_MEMORY_LOCAL_USER, bytes);
        };
        let duplicate = || {
            let done = rm.dup(rm.client, rm.device, rm.client, name);
            done.map(|handle| other.store(handle, Ordering::Relaxed)).is_ok()
        };
        let never = |call: &dyn Fn()| {
            until(&|| {
                call();
                false
            })
        };
        std::thread::scope(|scope| {
            scope.spawn(|| never(&|| take(SMALL_BYTES)));
            scope.spawn(|| never(&|| take(much_bytes)));
            scope.spawn(|| {
                never(&|| {
                    let _ = rm.free(rm.device, name);
                })
            });
            scope.spawn(|| until(&duplicate));
            scope.spawn(|| until(&|| rm.export(name, files[0].as_raw_fd()).is_ok()));
            std::thread::sleep(Duration::from_millis(40));
            over.store(true, Ordering::Relaxed);
        });
        let other = other.into_inner();
        duplicates += u32::from(rm.export(other, files[1].as_raw_fd()).is_ok());
        let _ = rm.free(rm.device, other);
        let _ = rm.free(rm.device, name);
        exports += u32::from(rm.import(files[0].as_raw_fd()).is_ok());
        // What is left of the quota, which no check of the files sees.
        let rest = rm.alloc(much_bytes);
        std::thread::sleep(Duration::from_millis(10));
        if let Ok((rest, _)) = rest {
            let _ = rm.free(rm.device, rest);
        }
    }
    println!("duplicates={duplicates} exports={exports}");
    reached_times(u64::from(duplicates.min(exports)));
    Ok(0)
}

/// Whether a file was initialized by the descriptor of another one.
fn is_initialized_by_another(place: &Place, abi: Abi, file: &Uvm) -> bool {
    let Ok(own) = Uvm::open(place, abi) else { return false };
    let Ok(copy) = own.another() else { return false };
    let flip = || {
        dup2(file.fd(), own.fd());
        dup2(copy.as_raw_fd(), own.fd());
    };
    let _ = against(flip, || own.initialize(0));
    // Of what wasn't initialized no GPU can be unregistered, not even one that there isn't.
    file.call(UVM_UNREGISTER_GPU, |_| {}) != Err(Fail::Status(NV_ERR_ILLEGAL_ACTION))
}

/// Whether a mapping that begins there is of `nvidia-uvm`.
fn is_uvm(at: usize) -> bool {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().any(|line| line.starts_with(&format!("{at:x}-")) && line.contains("nvidia-uvm"))
}

/// A file of memory, as large as said and empty.
fn tempfile_of(bytes: i64) -> anyhow::Result<OwnedFd> {
    use nix::sys::memfd::{MFdFlags, memfd_create};
    let file = memfd_create(c"harmless", MFdFlags::empty())?;
    nix::unistd::ftruncate(&file, bytes)?;
    Ok(file)
}

/// The device goes while memory is allocated under it.
pub(super) fn parent_free(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let rounds = rounds(arguments)?;
    let device = rm.handle();
    let make =
        |bytes: &mut [u8]| rm.alloc_object(rm.ctl(), rm.client, device, NV01_DEVICE_0, bytes);
    let mut params = [0; 56];
    params.set_u32(0, place.gpu);
    make(&mut params)?;
    let other = open(&place.dev, "nvidiactl")?;
    let mut allocated = 0_u32;
    let disturb = || {
        let _ = rm.free(rm.client, device);
        let mut params = [0; 56];
        params.set_u32(0, place.gpu);
        let _ = make(&mut params);
    };
    against(disturb, || {
        for _ in 0..rounds {
            let mut params = rm.memory_params(64 << 20);
            let handle = rm.handle();
            let class = NV01_MEMORY_LOCAL_USER;
            allocated +=
                u32::from(rm.alloc_object(rm.ctl(), device, handle, class, &mut params).is_ok());
        }
    });
    drop(other);
    // All of it was under the device.
    let freed = rm.free(rm.client, device);
    println!("allocated={allocated} freed={freed:?}");
    if freed.is_err() && freed != Err(crate::rm::Fail::Status(NV_ERR_OBJECT_NOT_FOUND)) {
        println!("errno={}", errno());
    }
    reached_times(u64::from(allocated));
    fill_exactly(&rm, 0)
}
