//! Hostile programs: each tries to hold more than it may, or to break the monitor.
//!
//! Each prints what happened, `reached=`: how often it got as far as what it is about, and,
//! last, `got_bytes=`: what it holds at the end by its own account, which is what the driver
//! wrote back for each allocation it didn't free. It ends with exit code 0 if it could be
//! played, and what must be so under any monitor or none was so; whether it won is for the test to say.

mod entries;
mod hiding;
mod lifetimes;
mod limits;
mod races;
mod ring;
mod signals;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use cgpu_sim::bytes::Fields;

use crate::rm::{Place, Rm};
use crate::work;

/// How many times a race is run.
const ROUNDS: u32 = 2000;

/// What honest allocations of these programs ask for, and what forbidden ones do.
const SMALL_BYTES: u64 = 64 << 10;
const HUGE_BYTES: u64 = 4 << 30;

/// For so long a race that is always lost is run again.
const TIMEOUT: Duration = Duration::from_secs(10);

/// For so long what was won is held: longer than it may be.
const STAY: Duration = Duration::from_secs(3);

/// The same on a busy machine, if the monitor is to find it.
const GENEROUS: Duration = Duration::from_secs(60);

/// How often the attack got as far as what it is about.
static REACHED: AtomicU64 = AtomicU64::new(0);

type Attack = fn(&Place, &[String]) -> anyhow::Result<u64>;

const ATTACKS: &[(&str, Attack)] = &[
    ("race-size", races::size),
    ("race-class", races::class),
    ("race-pointer", races::pointer),
    ("dup2-ioctl", races::dup2_ioctl),
    ("dup2-mmap", races::dup2_mmap),
    ("dup2-range", races::dup2_range),
    ("dup2-inherited", races::dup2_inherited),
    ("name-race", races::names),
    ("dup2-maker", races::dup2_creator),
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
    ("io-uring", ring::io_uring),
    ("dup-free", lifetimes::dup_free),
    ("map-free", lifetimes::map_free),
    ("map-hide", lifetimes::map_hide),
    ("send-fd", lifetimes::send_fd),
    ("export-free", lifetimes::export_free),
    ("export-reuse", lifetimes::export_reuse),
    ("send-open", lifetimes::send_open),
    ("recv-fd", lifetimes::recv_fd),
    ("hold-fd", lifetimes::hold_fd),
    ("send-bus", lifetimes::send_bus),
    ("hide-dup", hiding::by_duplicates),
    ("hide-map", hiding::by_mapping),
    ("hide-slack", hiding::in_slack),
    ("hide-fabric", hiding::behind_the_fabric),
    ("hide-under", hiding::under_little),
    ("hide-inherited", hiding::by_death),
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
    println!("reached={}", REACHED.load(Ordering::Relaxed));
    println!("got_bytes={got}");
    Ok(true)
}

/// It got so far once more. The first time is reported at once: the process may be killed for it.
fn reached() {
    reached_times(1);
}

fn reached_times(times: u64) {
    if times > 0 && REACHED.fetch_add(times, Ordering::Relaxed) == 0 {
        println!("reached=1");
    }
}

/// Tries again and again, until it's done or [`TIMEOUT`] has passed.
fn persist(mut attempt: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !attempt() && begun.elapsed() < TIMEOUT {}
}

/// Takes what may be had, so that whatever is had in addition is too much; the bytes.
fn fill_quota(rm: &Rm, place: &Place) -> u64 {
    work::fill(rm, place.quota.unwrap_or(u64::MAX)).0
}

/// Takes what is left next to so much that this program has. Together it must be what the GPU
/// shows: if memory was charged twice, or to no process, something would lack.
fn fill_exactly(rm: &Rm, got: u64) -> anyhow::Result<u64> {
    let (total, _) = rm.heap_info()?;
    let all = got + work::fill(rm, u64::MAX).0;
    ensure!(all == total, "all that can be had is {all} of {total} bytes");
    Ok(all)
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

/// Reports to the test, by the file `ready`, that it waits, and returns once the test has made `go`.
fn something_happens(arguments: &[String]) -> anyhow::Result<()> {
    if let [_, ready, go] = arguments {
        std::fs::write(ready, "")?;
        while !std::path::Path::new(go).exists() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    Ok(())
}
