//! Hostile programs: each tries to hold more than it may, or to break who watches.
//!
//! Each prints what happened and, last, `got_bytes=`: what it holds at the end by its own
//! account, which is what the driver wrote back for each allocation it didn't free. It
//! ends with exit code 0 where it could be played; whether it won is for the test to say.

mod entries;
mod hiding;
mod lifetimes;
mod limits;
mod races;
mod signals;

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::bail;
use cgpu_sim::bytes::Fields;

use crate::rm::{Place, Rm};

/// How many times a race is run.
const ROUNDS: u32 = 2000;

/// What honest allocations of these programs ask for, and what forbidden ones do.
const SMALL_BYTES: u64 = 64 << 10;
const HUGE_BYTES: u64 = 4 << 30;

type Attack = fn(&Place, &[String]) -> anyhow::Result<u64>;

const ATTACKS: &[(&str, Attack)] = &[
    ("race-size", races::size),
    ("race-class", races::class),
    ("race-pointer", races::pointer),
    ("dup2-ioctl", races::dup2_ioctl),
    ("dup2-mmap", races::dup2_mmap),
    ("dup2-range", races::dup2_range),
    ("dup2-heir", races::dup2_heir),
    ("name-race", races::names),
    ("dup2-maker", races::dup2_maker),
    ("remap", races::remap),
    ("class-in-client", races::class_in_client),
    ("swap-control", races::swap_control),
    ("parent-free", races::parent_free),
    ("managed", limits::managed),
    ("managed-nofixed", limits::managed_without_fixed),
    ("barrier16", limits::barrier),
    ("clients", limits::clients),
    ("handle-reuse", limits::handle_reuse),
    ("hostile-sizes", limits::hostile_sizes),
    ("bad-pointers", limits::bad_pointers),
    ("control-params", limits::control_params),
    ("interrupt", signals::interrupt),
    ("signal-storm", signals::storm),
    ("sigstop-self", signals::stop_self),
    ("kill-during-alloc", signals::kill_during_alloc),
    ("ptrace-sibling", signals::ptrace_sibling),
    ("xfer", entries::xfer),
    ("xfer-nested", entries::xfer_nested),
    ("type-byte", entries::type_byte),
    ("int80", entries::int80),
    ("upper-garbage", entries::upper_garbage),
    ("io-uring", entries::io_uring),
    ("dup-free", lifetimes::dup_free),
    ("map-free", lifetimes::map_free),
    ("map-hide", lifetimes::map_hide),
    ("send-fd", lifetimes::send_fd),
    ("export-free", lifetimes::export_free),
    ("export-reuse", lifetimes::export_reuse),
    ("send-open", lifetimes::send_open),
    ("recv-fd", lifetimes::recv_fd),
    ("hide-dup", hiding::by_duplicates),
    ("hide-map", hiding::by_mapping),
    ("hide-slack", hiding::in_slack),
    ("hide-fabric", hiding::behind_the_fabric),
    ("hide-under", hiding::under_little),
    ("hide-heir", hiding::by_death),
    ("hide-behind", hiding::behind_the_dead),
    ("vfork-exec", lifetimes::vfork_exec),
    ("inherited", lifetimes::inherited),
    ("close-range", lifetimes::close_range),
];

/// Plays one, or lists them.
pub(crate) fn run(place: &Place, name: Option<&str>, arguments: &[String]) -> anyhow::Result<bool> {
    let Some(name) = name else {
        ATTACKS.iter().for_each(|(name, _)| println!("{name}"));
        return Ok(true);
    };
    let Some((_, attack)) = ATTACKS.iter().find(|(known, _)| *known == name) else {
        bail!("no attack \"{name}\"; `rmtool attack` lists them");
    };
    let got = attack(place, arguments)?;
    println!("got_bytes={got}");
    Ok(true)
}

/// Memory that two threads use at once.
#[derive(Debug, Clone, Copy)]
struct Shared {
    at: *mut u8,
    bytes: usize,
}

// SAFETY: all access is volatile and by copies, and the memory is never given back.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    fn new(bytes: Vec<u8>) -> Self {
        let bytes: &'static mut [u8] = Box::leak(bytes.into_boxed_slice());
        Shared { at: bytes.as_mut_ptr(), bytes: bytes.len() }
    }

    fn address(self) -> u64 {
        self.at.addr() as u64
    }

    fn set<T>(self, offset: usize, value: T) {
        assert!(offset + size_of::<T>() <= self.bytes);
        // SAFETY: within the leaked memory, as asserted; it may be unaligned.
        unsafe { self.at.add(offset).cast::<T>().write_unaligned(value) };
    }

    fn copy(self) -> Vec<u8> {
        // SAFETY: the leaked memory has so many bytes; each is read once.
        (0..self.bytes).map(|at| unsafe { self.at.add(at).read_volatile() }).collect()
    }

    fn u32(self, offset: usize) -> u32 {
        self.copy().u32_at(offset)
    }

    fn u64(self, offset: usize) -> u64 {
        self.copy().u64_at(offset)
    }

    /// An ioctl on this memory.
    fn ioctl(self, fd: i32, command: u64) -> i64 {
        // SAFETY: the memory is as long as the command's size says, by its makers below.
        unsafe { libc::syscall(libc::SYS_ioctl, fd, command, self.at) }
    }
}

/// Runs `work` while another thread does `disturb` again and again, and did it once.
fn against<T>(disturb: impl Fn() + Send, work: impl FnOnce() -> T) -> T {
    let (begun, over) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (begun, over) = (&begun, &over);
        scope.spawn(move || {
            while !over.load(Ordering::Relaxed) {
                disturb();
                begun.store(true, Ordering::Relaxed);
            }
        });
        while !begun.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        let done = work();
        over.store(true, Ordering::Relaxed);
        done
    })
}

/// An NVOS64 that asks for memory, and its parameters.
fn request(rm: &Rm, bytes: u64) -> (Shared, Shared) {
    let params = Shared::new(rm.memory_params(bytes));
    let class = cgpu_sim::abi::NV01_MEMORY_LOCAL_USER;
    let call = Shared::new(rm.nvos64(rm.device, 0, class, params.address(), params.bytes));
    (call, params)
}

/// A number among the arguments.
fn argument(arguments: &[String], at: usize, otherwise: u64) -> anyhow::Result<u64> {
    arguments.get(at).map_or(Ok(otherwise), |text| Ok(cgpu_sim::size_bytes(text)?))
}
