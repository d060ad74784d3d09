//! The driver's samples of who was on the GPU.

use serde::Serialize;

use crate::control::{Control, SAMPLES_AT, Who};
use crate::desk::Desk;

/// Bytes of the parameters, of a sample, and engines that it reports: 570, 550, 525, 515.
const SIZES: [(usize, usize, usize); 4] =
    [(55888, 776, 6), (50704, 704, 6), (34000, 472, 4), (47216, 472, 4)];

/// What the driver answered.
#[derive(Debug, Serialize)]
pub(crate) struct ReportedSamples {
    phase: &'static str,
    who: Who,
    bytes: usize,
    count: u32,
    tracker: u32,
    /// Of the graphics engine: time in microseconds, a hundredth of a percent, process.
    graphics: Vec<(u64, u32, u32)>,
}

impl Desk {
    /// Asks for the driver's samples of the GPU's processes, with each size that drivers have, until
    /// one is right.
    pub(crate) fn take_samples(&mut self, who: Who) -> bool {
        let Some(asker) = self.computing(0).into_iter().next() else { return false };
        let Some(subdevice) = asker.group.subdevice else { return false };
        for (bytes, sample, engines) in SIZES {
            let control = Control::samples(bytes);
            let answer = self.ask(0, &asker, subdevice, &control, who);
            if !answer.is_ok() {
                continue;
            }
            let word = |at: usize| {
                let field = answer.params.get(at..).and_then(|rest| rest.first_chunk());
                field.map_or(0, |bytes| u32::from_le_bytes(*bytes))
            };
            // It begins with a time, then each engine has as much.
            let engine = (sample - 8) / engines;
            let starts = (SAMPLES_AT..bytes).step_by(sample);
            let graphics = starts.map(|at| {
                let time_us = u64::from(word(at)) | u64::from(word(at + 4)) << 32;
                (time_us, word(at + 8 + engine), word(at + 8 + engine + 8))
            });
            let graphics = graphics.filter(|(time_us, ..)| *time_us > 0).collect();
            let (count, tracker) = (word(8), word(12));
            self.samples.push(ReportedSamples {
                phase: self.phase,
                who,
                bytes,
                count,
                tracker,
                graphics,
            });
            return true;
        }
        false
    }
}
