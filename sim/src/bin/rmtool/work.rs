//! What honest programs do: show, fill, hold, and how long calls take.

use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use cgpu_sim::abi::*;
use nix::sys::signal::{SigSet, Signal};

use crate::rm::{Fail, Place, Rm, command, open_unread, raw_ioctl};

/// What CUDA calls when it starts, in number.
const STARTUP_CALLS: u32 = 2000;

/// Least and most bytes that are asked for at once when filling.
const CHUNK_BYTES: (u64, u64) = (4 << 10, 256 << 20);

/// Allocates until nothing is left; the bytes.
pub(crate) fn fill(rm: &Rm, most: u64) -> (u64, Option<Fail>) {
    let (least, mut chunk) = CHUNK_BYTES;
    let mut got = 0;
    let mut why = None;
    while chunk >= least && got < most {
        match rm.alloc(chunk.min(most - got)) {
            Ok((_, bytes)) => got += bytes,
            Err(fail) => {
                why = Some(fail);
                chunk /= 2;
            }
        }
    }
    (got, why)
}

fn wait_for_end() {
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    let _ = signals.thread_block();
    let _ = std::io::stdout().flush();
    let _ = signals.wait();
}

/// What the GPU seems to be, and how much of it can be had.
pub(crate) fn demo(place: &Place, most: u64, hold: bool) -> anyhow::Result<bool> {
    let rm = Rm::start(place)?;
    let indices = [NV2080_CTRL_FB_INFO_INDEX_HEAP_SIZE, NV2080_CTRL_FB_INFO_INDEX_HEAP_FREE];
    let info = rm.fb_info_v2(&indices)?;
    println!("GPU {}: {} MiB total, {} MiB free", place.gpu, info[0] >> 10, info[1] >> 10);
    let mut got = 0;
    while got < most {
        match rm.alloc((256 << 20).min(most - got)) {
            Ok((_, bytes)) => got += bytes,
            Err(fail) => {
                println!("refused: {fail}");
                break;
            }
        }
    }
    println!("allocated {} MiB of {} MiB asked for", got >> 20, most >> 20);
    if hold {
        wait_for_end();
    }
    Ok(true)
}

/// Holds so many bytes until it is ended.
pub(crate) fn hold(place: &Place, bytes: u64) -> anyhow::Result<bool> {
    let rm = Rm::start(place)?;
    let (_, got) = rm.alloc(bytes)?;
    println!("holding got_bytes={got}");
    wait_for_end();
    Ok(true)
}

/// `NV2080_ENGINE_TYPE_GRAPHICS`, and the first that copies.
const GRAPHICS: u32 = 1;
const COPY: u32 = 9;

/// What CUDA asks for, in its order: once the group is scheduled.
fn set_mode_and_slice(rm: &Rm, group: u32) -> Result<(), Fail> {
    const CILP: u32 = 2;
    rm.set_compute_mode(group, CILP)?;
    let mut slice_us = 2048_u64.to_le_bytes();
    rm.control(group, NVA06C_CTRL_CMD_SET_TIMESLICE, &mut slice_us)
}

/// Makes the groups of a CUDA context, as it was recorded on an H100, and frees them: four with 20 channels, of
/// which one computes.
fn make_context(rm: &Rm) -> Result<(), Fail> {
    let mut groups = Vec::new();
    for (engine, channels) in [(GRAPHICS, 8), (COPY, 4), (COPY + 1, 4), (COPY + 2, 4)] {
        let group = rm.compute(engine)?;
        for _ in 1..channels {
            let (ctl, class) = (rm.ctl(), AMPERE_CHANNEL_GPFIFO_A);
            rm.alloc_object(ctl, group, rm.handle(), class, &mut [])?;
        }
        groups.push(group);
    }
    set_mode_and_slice(rm, groups[0])?;
    groups.into_iter().try_for_each(|group| rm.free(rm.device, group))
}

/// A kernel of those that [`spin`] has the GPU compute.
const KERNEL: Duration = Duration::from_micros(500);

/// Keeps the GPU busy for so long, and reports how many kernels it did.
pub(crate) fn spin(place: &Place, seconds: f64) -> anyhow::Result<bool> {
    let rm = Rm::start(place)?;
    let group = rm.compute(GRAPHICS)?;
    set_mode_and_slice(&rm, group)?;
    let file = open_unread(place)?;
    rm.ring(group, 1 << 40, u64::try_from(KERNEL.as_nanos())?)?;
    let begun = Instant::now();
    std::thread::sleep(Duration::from_secs_f64(seconds));
    let ended = rm.kernels_ended(&file, group)?;
    let per_s = ended as f64 / begun.elapsed().as_secs_f64();
    println!("{per_s:.0} kernels a second");
    Ok(true)
}

pub(crate) fn fill_and_print(place: &Place) -> anyhow::Result<bool> {
    let rm = Rm::start(place)?;
    let (got, why) = fill(&rm, u64::MAX);
    println!("got_bytes={got} {}", why.map_or_else(String::new, |why| why.to_string()));
    Ok(true)
}

/// The times of so many rounds, in order.
fn times(rounds: u32, mut round: impl FnMut() -> Result<(), Fail>) -> Result<Vec<Duration>, Fail> {
    let mut times = Vec::new();
    for _ in 0..rounds {
        let start = Instant::now();
        round()?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(times)
}

/// That of so many hundredths.
fn percentile_ns(times: &[Duration], hundredths: usize) -> u128 {
    times.get(times.len() * hundredths / 100).map_or(0, Duration::as_nanos)
}

fn median_ns(rounds: u32, round: impl FnMut() -> Result<(), Fail>) -> Result<u128, Fail> {
    Ok(percentile_ns(&times(rounds, round)?, 50))
}

/// Kinds of calls, by what the gate does with them.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub(crate) enum Call {
    /// A driver's number on what is none of its files; the driver is not asked.
    Refused,
    /// One that the monitor makes.
    Executed,
}

/// Median and 99th percentile of calls of a kind, as JSON.
pub(crate) fn bench_one(place: &Place, rounds: u32, call: Call) -> anyhow::Result<bool> {
    let (pipe, _other) = nix::unistd::pipe()?;
    let on_pipe = || {
        let _ = raw_ioctl(pipe.as_raw_fd(), command(NV_ESC_RM_CONTROL, 32), &mut [0; 32]);
        Ok(())
    };
    let times = match call {
        Call::Refused => times(rounds, on_pipe),
        Call::Executed => {
            let rm = Rm::start(place)?;
            let indices = [NV2080_CTRL_FB_INFO_INDEX_HEAP_FREE];
            times(rounds, || rm.fb_info_v2(&indices).map(|_| ()))
        }
    }?;
    let result = serde_json::json!({
        "rounds": rounds,
        "p50_ns": u64::try_from(percentile_ns(&times, 50))?,
        "p99_ns": u64::try_from(percentile_ns(&times, 99))?,
    });
    println!("{result}");
    Ok(true)
}

/// Median times of calls, as JSON.
pub(crate) fn bench(place: &Place, rounds: u32) -> anyhow::Result<bool> {
    let rm = Rm::start(place)?;
    let (pipe, _other) = nix::unistd::pipe()?;
    let untrapped = median_ns(rounds, || raw_ioctl(pipe.as_raw_fd(), libc::FIONREAD, &mut [0; 4]))?;
    let empty =
        median_ns(rounds, || raw_ioctl(rm.ctl(), command(NV_ESC_SYS_PARAMS, 8), &mut [0; 8]))?;
    let control =
        median_ns(rounds, || rm.fb_info_v2(&[NV2080_CTRL_FB_INFO_INDEX_HEAP_FREE]).map(|_| ()))?;
    let memory = median_ns(rounds, || {
        let (handle, _) = rm.alloc(1 << 20)?;
        rm.free(rm.device, handle)
    })?;
    // A driver's ioctl number on a file that isn't the driver's, and a control that only reports.
    let foreign = median_ns(rounds, || {
        let _ = raw_ioctl(pipe.as_raw_fd(), command(NV_ESC_RM_CONTROL, 32), &mut [0; 32]);
        Ok(())
    })?;
    let reported = median_ns(rounds, || rm.uuid().map(|_| ()))?;
    let start = Instant::now();
    for round in 0..STARTUP_CALLS {
        match round % 20 {
            0 => drop(rm.fb_info_v2(&[NV2080_CTRL_FB_INFO_INDEX_HEAP_FREE])?),
            1 => {
                let (handle, _) = rm.alloc(1 << 20)?;
                rm.free(rm.device, handle)?;
            }
            2 => {}
            _ => drop(rm.uuid()?),
        }
    }
    let startup = start.elapsed();
    let contexts = median_ns(rounds.div_ceil(20), || make_context(&rm))?;
    let group = rm.compute(GRAPHICS)?;
    let launch = median_ns(rounds, || rm.ring(group, 0, 0))?;
    let result = serde_json::json!({
        "rounds": rounds,
        "fionread_ns": u64::try_from(untrapped)?,
        "empty_ns": u64::try_from(empty)?,
        "control_ns": u64::try_from(control)?,
        "alloc_free_ns": u64::try_from(memory)?,
        "foreign_ns": u64::try_from(foreign)?,
        "reported_ns": u64::try_from(reported)?,
        "startup_ns": u64::try_from(startup.as_nanos())?,
        "context_ns": u64::try_from(contexts)?,
        "launch_ns": u64::try_from(launch)?,
    });
    println!("{result}");
    Ok(true)
}

/// Processes that fill at once: what they got together.
pub(crate) fn storm(place: &Place, processes: u32) -> anyhow::Result<bool> {
    let got = crate::processes::together(processes, |_| {
        let rm = Rm::start(place).ok();
        (rm.as_ref().map_or(0, |rm| fill(rm, u64::MAX).0), rm)
    })?;
    println!("got_bytes={} each={got:?}", got.iter().sum::<u64>());
    Ok(true)
}
