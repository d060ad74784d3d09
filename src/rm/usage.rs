//! Who was on a GPU: the driver's samples, five a second, each of one process.
//!
//! `NV2080_CTRL_CMD_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2` (ctrl2080perf.h). On an H100 they reach back 14
//! seconds; anybody is answered.

use super::control::processes::{SAMPLE_PID, SAMPLES};

/// Where samples begin, after type, bufSize, count and tracker.
const FIRST: usize = 16;

/// `NV2080_CTRL_GPUMON_SAMPLE_TYPE_PERFMON_UTIL`.
const TYPE_UTILIZATION: u8 = 1;

/// A sample's time, before what it says of engines: memory first, then the graphics engine.
const TIME_BYTES: usize = 8;

/// `NV2080_GPUMON_PID_INVALID`.
const NO_PROCESS: u32 = u32::MAX;

/// How often the driver looks who is on a GPU, in microseconds: an H100's 72 samples are of 14.2 seconds.
const PERIOD_US: u64 = 200_000;

/// The furthest that a sample's clock is from this host's where they are the same, in microseconds.
const DAY_US: u64 = 86_400_000_000;

/// Who was on the graphics engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// When, in microseconds of the driver's clock.
    pub time_us: u64,
    /// The process, as the host numbers it; `None` where nobody was.
    pub pid: Option<u32>,
}

/// Parameters of each size that drivers have had, the newest first.
pub fn questions() -> impl Iterator<Item = Vec<u8>> {
    SAMPLES.iter().rev().map(|(bytes, ..)| {
        let mut params = vec![0; *bytes];
        let buffer = u32::try_from(bytes - FIRST).unwrap_or(0).to_le_bytes();
        if let [kind, _, _, _, a, b, c, d, ..] = params.as_mut_slice() {
            *kind = TYPE_UTILIZATION;
            [*a, *b, *c, *d] = buffer;
        }
        params
    })
}

/// How often the driver has looked since the oldest of these samples, `now_us` microseconds after 1970. It may
/// leave out what it saw of a GPU that nobody was on.
///
/// NVML says of its samples that their time is the processor's, which is taken for 1970's where it is
/// of about now; of any other clock nothing is known but what lies between samples.
#[must_use]
pub fn looks(samples: &[Sample], now_us: u64) -> usize {
    let times = || samples.iter().map(|sample| sample.time_us);
    let (Some(first), Some(last)) = (times().min(), times().max()) else { return 0 };
    let until = if now_us.abs_diff(last) < DAY_US { now_us.max(last) } else { last };
    let looks = usize::try_from((until - first) / PERIOD_US + 1).unwrap_or(usize::MAX);
    looks.max(samples.len())
}

/// The samples of an answer, in no order; those that never were are left out.
#[must_use]
pub fn answered(params: &[u8]) -> Vec<Sample> {
    let Some((_, sample, engine)) = SAMPLES.iter().find(|(bytes, ..)| *bytes == params.len())
    else {
        return Vec::new();
    };
    let rest = params.get(FIRST..).unwrap_or_default();
    let samples = rest.chunks_exact(*sample).filter_map(|sample| {
        let time_us = u64::from_le_bytes(*sample.first_chunk()?);
        let pid = sample.get(TIME_BYTES + engine + SAMPLE_PID..)?;
        let pid = u32::from_le_bytes(*pid.first_chunk()?);
        let pid = Some(pid).filter(|pid| ![0, NO_PROCESS].contains(pid));
        (time_us > 0).then_some(Sample { time_us, pid })
    });
    samples.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_at_a_gpu_that_nobody_was_on_count_too() {
        let sample = |time_us| Sample { time_us, pid: Some(1) };
        let second = 1_000_000;
        let now = 1_800_000_000 * second;
        let dense: Vec<Sample> = (0..72).map(|n| sample(now - n * 197_000)).collect();
        assert_eq!(looks(&dense, now), 72);
        assert_eq!(looks(&dense, now + 100_000), 72);
        // Nobody was on it since, or in between.
        assert_eq!(looks(&dense, now + 10 * second), 120);
        assert_eq!(looks(&[sample(now), sample(now - 2 * second)], now), 11);
        // A clock of its own, that began with the machine.
        assert_eq!(looks(&[sample(9 * second), sample(8 * second)], now), 6);
        assert_eq!(looks(&[sample(now + second)], now), 1, "a clock that runs ahead");
        assert_eq!(looks(&[], now), 0);
    }

    /// As an H100's driver, 580.159.04, was seen to answer: six engines of 128 bytes.
    #[test]
    fn the_process_of_each_sample_is_read_in_every_size() {
        for params in questions() {
            let (_, sample, engine) =
                SAMPLES.iter().find(|(bytes, ..)| *bytes == params.len()).unwrap();
            let mut answer = params.clone();
            let mut put =
                |at: usize, bytes: &[u8]| answer[at..at + bytes.len()].copy_from_slice(bytes);
            for (number, pid) in [(0, 500_u32), (1, NO_PROCESS), (2, 501)] {
                let at = FIRST + number * sample;
                put(at, &(7 + number as u64).to_le_bytes());
                put(at + 8 + 8, &9_u32.to_le_bytes());
                put(at + 8 + engine + 8, &pid.to_le_bytes());
            }
            let pids: Vec<_> = answered(&answer).iter().map(|sample| sample.pid).collect();
            assert_eq!(pids, [Some(500), None, Some(501)], "{} bytes", params.len());
            assert_eq!((params[0], answered(&params)), (1, Vec::new()));
        }
        assert_eq!(answered(&[1; 100]), []);
    }
}
