//! Who was on a GPU: the driver's samples, five a second, each of one process.
//!
//! `NV2080_CTRL_CMD_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2` (ctrl2080perf.h). On an H100 they reach back 14
//! seconds, those of an idle GPU among them; a process that rests is named in them, too, with no
//! utilisation. Any caller is answered (`tests/gpu/results`, 2026-11-27).

use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;

use super::control::processes::{SAMPLE_PID, SAMPLES};

/// Where samples begin, after type, bufSize, count and tracker.
const FIRST: usize = 16;

/// `NV2080_CTRL_GPUMON_SAMPLE_TYPE_PERFMON_UTIL`.
const TYPE_UTILIZATION: u8 = 1;

/// A sample's time, in nanoseconds, before what it says of engines: memory first, then the graphics engine. An
/// engine's part begins with its utilisation.
const TIME_BYTES: usize = 8;

/// `NV2080_GPUMON_PID_INVALID`.
const NO_PROCESS: u32 = u32::MAX;

/// All of the time, in what [`Sample::busy`] and [`parts`] count in.
pub const ALL_OF_IT: u32 = 10_000;

/// Who was on the graphics engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// The process, as the host numbers it; `None` if there was none.
    pub pid: Option<u32>,
    /// For how many ten-thousandths of the sample's time the engine was at work.
    pub busy: u32,
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

/// For how many ten-thousandths of the time of all samples each process was at work.
#[must_use]
pub fn parts(samples: &[Sample]) -> BTreeMap<u32, u32> {
    let mut parts: BTreeMap<u32, u64> = BTreeMap::new();
    for (pid, busy) in samples.iter().filter_map(|sample| Some((sample.pid?, sample.busy))) {
        *parts.entry(pid).or_default() += u64::from(busy);
    }
    let part = |(pid, busy): (u32, u64)| {
        (pid, u32::try_from(busy / samples.len() as u64).unwrap_or(ALL_OF_IT))
    };
    parts.into_iter().map(part).collect()
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
        let time_ns = u64::from_le_bytes(*sample.first_chunk()?);
        let graphics = sample.get(TIME_BYTES + engine..)?;
        let word = |at: usize| Some(u32::from_le_bytes(*graphics.get(at..)?.first_chunk()?));
        let pid = word(SAMPLE_PID).filter(|pid| ![0, NO_PROCESS].contains(pid));
        let busy = word(0)?.min(ALL_OF_IT);
        (time_ns > 0).then_some(Sample { pid, busy })
    });
    samples.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process has the part of all samples in which it was busy.
    #[test]
    fn process_share_is_its_busy_part_of_samples() {
        let sample = |pid, busy| Sample { pid, busy };
        let samples =
            [sample(Some(1), 10_000), sample(Some(1), 5000), sample(Some(2), 0), sample(None, 0)];
        assert_eq!(parts(&samples), [(1, 3750), (2, 0)].into());
        assert_eq!(parts(&[]), [].into());
    }

    /// As an H100's driver, 580.159.04, was seen to answer: six engines of 128 bytes.
    #[test]
    fn each_samples_process_is_read_in_every_size() {
        for params in questions() {
            let (_, sample, engine) =
                SAMPLES.iter().find(|(bytes, ..)| *bytes == params.len()).unwrap();
            let mut answer = params.clone();
            let mut put =
                |at: usize, bytes: &[u8]| answer[at..at + bytes.len()].copy_from_slice(bytes);
            for (number, pid) in [(0, 400_u32), (1, NO_PROCESS), (2, 501)] {
                let at = FIRST + number * sample;
                put(at, &(7 + number as u64).to_le_bytes());
                put(at + 8 + 8, &9_u32.to_le_bytes());
                put(at + 8 + engine, &(if pid == NO_PROCESS { 0 } else { 20 * pid }).to_le_bytes());
                put(at + 8 + engine + 8, &pid.to_le_bytes());
            }
            let reported: Vec<_> =
                answered(&answer).iter().map(|sample| (sample.pid, sample.busy)).collect();
            let expected = [(Some(400), 8000), (None, 0), (Some(501), 10_000)];
            assert_eq!(reported, expected, "{} bytes", params.len());
            assert_eq!((params[0], answered(&params)), (1, Vec::new()));
        }
        assert_eq!(answered(&[1; 100]), []);
    }
}
