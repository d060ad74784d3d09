//! Controls that report processes: what of it a container gets to see, and under which pids.
//!
//! A program that makes them for a container is answered as the host sees it: all processes, by the
//! host's pids. So pids that are asked for are translated before, and what comes back after; what
//! isn't the container's is removed. Which is whose isn't known here.

#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use crate::number::*;

/// The pid of no process: beyond `PID_MAX_LIMIT`.
pub const FOREIGN_PID: u32 = 0x7fff_ffff;

/// `NV2080_GPUMON_PID_INVALID`.
const NO_PROCESS: u32 = u32::MAX;

/// `NV2080_CTRL_GPU_GET_PIDS_PARAMS`: how many at 8, pids from 12 on.
const PIDS: (usize, usize) = (8, 12);

/// Bytes of that: `NV2080_CTRL_GPU_GET_PIDS_MAX_COUNT` pids of four bytes.
const PIDS_BYTES: usize = 12 + 4 * 950;

/// `NV2080_CTRL_GPU_GET_PID_INFO_PARAMS`: how many at 0, entries of 72 bytes from 8 on, which
/// begin with a pid.
const INFO: (usize, usize, usize) = (0, 8, 72);

/// `NV2080_CTRL_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2_PARAMS`, by its size: bytes of a
/// sample, and of what it says of an engine, from 8 on. Samples begin at 16.
pub(crate) const SAMPLES: &[(usize, usize, usize)] = &[
    // 515: 100 samples of 4 engines.
    (47216, 472, 116),
    // 525: 72.
    (34000, 472, 116),
    // 550: 6 engines.
    (50704, 704, 116),
    // 570: pOsPidInfo.
    (55888, 776, 128),
];

/// Where an engine's part of a sample has pid, pid within that and name, and its kernel's
/// address, in those that have one.
pub(crate) const SAMPLE_PID: usize = 8;
const SAMPLE_SUB: usize = 12;
const SAMPLE_NAME: core::ops::Range<usize> = 16..116;
const SAMPLE_KERNEL: core::ops::Range<usize> = 120..128;

/// Whether it is one of these.
#[must_use]
pub fn is_one(command: u32) -> bool {
    matches!(
        command,
        NV2080_CTRL_CMD_GPU_GET_PIDS
            | NV2080_CTRL_CMD_GPU_GET_PID_INFO
            | NV2080_CTRL_CMD_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2
    )
}

/// Whether parameters have a size that is known; others would go out as they are.
#[must_use]
pub fn is_size(command: u32, size: usize) -> bool {
    match command {
        NV2080_CTRL_CMD_GPU_GET_PIDS => size == PIDS_BYTES,
        NV2080_CTRL_CMD_GPU_GET_PID_INFO => size == crate::about::PID_INFO_BYTES,
        _ => SAMPLES.iter().any(|(of, ..)| *of == size),
    }
}

/// Puts the pids that we know in the place of those that are asked for.
pub fn ask(command: u32, params: &mut [u8], to_ours: impl Fn(u32) -> Option<u32>) {
    if command != NV2080_CTRL_CMD_GPU_GET_PID_INFO {
        return;
    }
    let (_, first, stride) = INFO;
    let count = entries(params);
    for entry in params.get_mut(first..).unwrap_or_default().chunks_exact_mut(stride).take(count) {
        match get(entry, 0) {
            // The driver says what it says to that.
            0 => {}
            pid => set(entry, 0, to_ours(pid).unwrap_or(FOREIGN_PID)),
        }
    }
}

/// Puts what the container may see in the place of an answer; `asked` are the parameters as
/// the caller had them.
pub fn show(command: u32, params: &mut [u8], asked: &[u8], to_theirs: impl Fn(u32) -> Option<u32>) {
    match command {
        NV2080_CTRL_CMD_GPU_GET_PIDS => show_pids(params, to_theirs),
        NV2080_CTRL_CMD_GPU_GET_PID_INFO => {
            let (_, first, stride) = INFO;
            let all = params.get_mut(first..).unwrap_or_default().chunks_exact_mut(stride);
            let asked = asked.get(first..).unwrap_or_default().chunks_exact(stride);
            all.zip(asked).for_each(|(entry, asked)| set(entry, 0, get(asked, 0)));
        }
        _ => show_samples(params, to_theirs),
    }
}

fn entries(params: &[u8]) -> usize {
    usize::try_from(get(params, INFO.0)).unwrap_or(usize::MAX)
}

/// The container's, close together.
fn show_pids(params: &mut [u8], to_theirs: impl Fn(u32) -> Option<u32>) {
    let (count_at, first) = PIDS;
    let count = usize::try_from(get(params, count_at)).unwrap_or(usize::MAX);
    let Some(list) = params.get_mut(first..) else { return };
    let mut shown = 0;
    for at in 0..count.min(list.len() / 4) {
        let pid = to_theirs(get(list, 4 * at));
        set(list, 4 * at, 0);
        if let Some(pid) = pid {
            set(list, 4 * shown, pid);
            shown += 1;
        }
    }
    // Whatever lies behind, the driver didn't say.
    list.get_mut(4 * shown..).unwrap_or_default().fill(0);
    set(params, count_at, u32::try_from(shown).unwrap_or(0));
}

fn show_samples(params: &mut [u8], to_theirs: impl Fn(u32) -> Option<u32>) {
    let Some((_, sample, engine)) = SAMPLES.iter().find(|(size, ..)| *size == params.len()) else {
        params.fill(0);
        return;
    };
    let samples = params.get_mut(16..).unwrap_or_default().chunks_exact_mut(*sample);
    let engines = samples
        .flat_map(|sample| sample.get_mut(8..).unwrap_or_default().chunks_exact_mut(*engine));
    for part in engines {
        let pid = match get(part, SAMPLE_PID) {
            NO_PROCESS => None,
            pid => to_theirs(pid),
        };
        set(part, SAMPLE_PID, pid.unwrap_or(NO_PROCESS));
        if pid.is_none() {
            set(part, SAMPLE_SUB, NO_PROCESS);
            part.get_mut(SAMPLE_NAME).unwrap_or_default().fill(0);
        }
        part.get_mut(SAMPLE_KERNEL).unwrap_or_default().fill(0);
    }
}

fn get(bytes: &[u8], offset: usize) -> u32 {
    let field = bytes.get(offset..).and_then(<[u8]>::first_chunk);
    field.map_or(0, |field| u32::from_le_bytes(*field))
}

fn set(bytes: &mut [u8], offset: usize, value: u32) {
    if let Some(field) = bytes.get_mut(offset..offset + 4) {
        field.copy_from_slice(&value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::about::PID_INFO_BYTES;

    /// Ours are 100 and more, theirs from 1 on; of 105 they know nothing.
    fn to_theirs(pid: u32) -> Option<u32> {
        (100..105).contains(&pid).then(|| pid - 99)
    }

    /// Pids of others are removed, and the rest move up.
    #[test]
    fn foreign_pids_are_removed_and_gaps_closed() {
        let mut params = vec![0xee; PIDS_BYTES];
        set(&mut params, 8, 5);
        for (at, pid) in [100, 7, 105, 104, 102].into_iter().enumerate() {
            set(&mut params, 12 + 4 * at, pid);
        }
        show(NV2080_CTRL_CMD_GPU_GET_PIDS, &mut params, &[], to_theirs);
        let shown: Vec<u32> = (0..5).map(|at| get(&params, 12 + 4 * at)).collect();
        assert_eq!((get(&params, 8), shown), (3, vec![1, 5, 3, 0, 0]));
        assert!(params[32..].iter().all(|byte| *byte == 0));
        set(&mut params, 8, u32::MAX);
        show(NV2080_CTRL_CMD_GPU_GET_PIDS, &mut params, &[], Some);
        assert_eq!(get(&params, 8), 950);
    }

    /// Pids in a query are translated for the driver, and come back as they were asked.
    #[test]
    fn queried_pids_are_translated_and_returned_unchanged() {
        let mut params = vec![0; PID_INFO_BYTES];
        set(&mut params, 0, 3);
        for (at, pid) in [1, 50, 0].into_iter().enumerate() {
            set(&mut params, 8 + 72 * at, pid);
        }
        let asked = params.clone();
        ask(NV2080_CTRL_CMD_GPU_GET_PID_INFO, &mut params, |pid| (pid < 10).then(|| pid + 99));
        let ours: Vec<u32> = (0..3).map(|at| get(&params, 8 + 72 * at)).collect();
        assert_eq!(ours, [100, FOREIGN_PID, 0]);
        set(&mut params, 16, 0x57);
        show(NV2080_CTRL_CMD_GPU_GET_PID_INFO, &mut params, &asked, to_theirs);
        set(&mut params, 16, 0);
        assert_eq!(params, asked);
    }

    #[test]
    fn samples_name_no_other_process_or_kernel_address() {
        for (size, sample, engine) in SAMPLES.iter().copied() {
            assert_eq!((size - 16) % sample, 0);
            assert_eq!((sample - 8) % engine, 0);
            let mut params = vec![0xaa; size];
            for at in (16..size).step_by(sample) {
                for part in (at + 8..at + sample).step_by(engine) {
                    set(&mut params, part + 8, if part == at + 8 { 101 } else { 7 });
                }
            }
            show(
                NV2080_CTRL_CMD_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2,
                &mut params,
                &[],
                to_theirs,
            );
            for at in (16..size).step_by(sample) {
                assert_eq!(get(&params, at + 16), 2);
                assert_eq!(get(&params, at + 24), 0xaaaa_aaaa);
                assert_eq!(get(&params, at + 8 + engine + 8), NO_PROCESS);
                assert_eq!(get(&params, at + 8 + engine + 16), 0);
                assert_eq!(get(&params, at + 8), 0xaaaa_aaaa);
            }
        }
        assert!(!is_size(NV2080_CTRL_CMD_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2, 100));
    }
}
