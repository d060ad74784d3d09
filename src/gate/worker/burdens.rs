//! What the driver shows under a process's number that is another's.
//!
//! The driver tells memory by the numbers of those who made it (`NV2080_CTRL_CMD_GPU_GET_PID_INFO`).
//! Who is dead, and whose client others keep open, still has what is below it, and the kernel gives
//! his number to the next one: in another container, that would pay for it, or be killed. So what is
//! under a number is asked for when a process is seen that has it, before it has anything, and is
//! left out from then on. It may become less, when it's freed, which shows where the driver
//! seems to have less than what it is asked for and has; it doesn't become more here: for that, the other
//! monitors are asked each time ([`siblings`](super::siblings)). Knows no driver.

use std::collections::BTreeMap;

use crate::gate::journal::Record;
use crate::rm::about::Held;

/// Numbers and GPUs that are known; of more, what is another's counts.
pub(super) const MOST: usize = 1024;

/// By number and GPU.
#[derive(Debug, Default)]
pub(super) struct Burdens(BTreeMap<(u32, usize), Held>);

impl Burdens {
    /// Whether it can be known of that number and GPU.
    pub(super) fn has_room(&self, gpu: usize, held: &Held) -> bool {
        self.0.len() < MOST || self.0.contains_key(&(held.pid, gpu))
    }

    /// So much is another's, as the journal has it; nothing is none.
    pub(super) fn replay(&mut self, gpu: usize, held: Held) {
        match held.bytes() {
            0 => _ = self.0.remove(&(held.pid, gpu)),
            _ => _ = self.0.insert((held.pid, gpu), held),
        }
    }

    /// What makes them from nothing.
    pub(super) fn records(&self) -> impl Iterator<Item = Record> {
        self.0.iter().map(|((_, gpu), held)| Record::Burden { gpu: *gpu, held: *held })
    }

    /// GPUs of which something under that number is another's.
    pub(super) fn of(&self, pid: u32) -> impl Iterator<Item = usize> {
        self.0.range((pid, 0)..=(pid, usize::MAX)).map(|((_, gpu), _)| *gpu)
    }

    /// What is another's under that number.
    pub(super) fn known(&self, gpu: usize, pid: u32) -> Held {
        self.0.get(&(pid, gpu)).copied().unwrap_or(Held { pid, ..Held::default() })
    }

    /// Leaves out of a figure what is another's.
    pub(super) fn leave_out(&self, gpu: usize, held: Held) -> Held {
        let Some(burden) = self.0.get(&(held.pid, gpu)) else { return held };
        Held {
            pid: held.pid,
            made_bytes: held.made_bytes.saturating_sub(burden.made_bytes),
            duplicated_bytes: held.duplicated_bytes.saturating_sub(burden.duplicated_bytes),
        }
    }

    /// What is another's when `bytes` of a GPU aren't there any more that seemed to be: of those
    /// numbers, the first ones first.
    pub(super) fn relieved(&self, gpu: usize, pids: &[u32], bytes: u64) -> Vec<Held> {
        let mut left = bytes;
        let mut less = |of: u64| {
            let gone = of.min(left);
            left -= gone;
            of - gone
        };
        let known = pids.iter().filter_map(|pid| self.0.get(&(*pid, gpu)));
        let all = known.map(|burden| Held {
            pid: burden.pid,
            made_bytes: less(burden.made_bytes),
            duplicated_bytes: less(burden.duplicated_bytes),
        });
        all.filter(|held| self.0.get(&(held.pid, gpu)) != Some(held)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(pid: u32, made_bytes: u64, duplicated_bytes: u64) -> Held {
        Held { pid, made_bytes, duplicated_bytes }
    }

    fn burdens(all: &[(usize, Held)]) -> Burdens {
        let mut burdens = Burdens::default();
        all.iter().for_each(|(gpu, held)| burdens.replay(*gpu, *held));
        burdens
    }

    #[test]
    fn what_is_another_s_is_left_out_of_the_figure_of_its_number_and_gpu() {
        let burdens = burdens(&[(0, held(7, 20, 5))]);
        assert_eq!(burdens.leave_out(0, held(7, 120, 6)), held(7, 100, 1));
        assert_eq!(burdens.leave_out(0, held(7, 10, 0)), held(7, 0, 0), "it has become less");
        assert_eq!(burdens.leave_out(1, held(7, 120, 6)), held(7, 120, 6));
        assert_eq!(burdens.leave_out(0, held(8, 120, 6)), held(8, 120, 6));
        assert_eq!(burdens.of(7).collect::<Vec<_>>(), [0]);
        assert_eq!(burdens.of(8).count(), 0);
    }

    #[test]
    fn what_is_not_there_any_more_is_taken_off() {
        let mut burdens = burdens(&[(0, held(7, 20, 5)), (0, held(9, 20, 0)), (1, held(7, 4, 0))]);
        assert_eq!(burdens.relieved(0, &[7, 8, 9], 22), [held(7, 0, 3)]);
        assert_eq!(burdens.relieved(0, &[7, 9], 30), [held(7, 0, 0), held(9, 15, 0)]);
        assert_eq!(burdens.relieved(0, &[8], 30), []);
        assert_eq!(burdens.relieved(0, &[7, 9], 0), []);
        burdens.replay(0, held(7, 0, 0));
        assert_eq!(burdens.relieved(0, &[7, 9], 5), [held(9, 15, 0)]);
        assert_eq!(burdens.records().count(), 2);
    }

    #[test]
    fn they_are_bounded() {
        let all: Vec<_> = (0..MOST).map(|pid| (0, held(pid.try_into().unwrap(), 1, 0))).collect();
        let burdens = burdens(&all);
        assert!(!burdens.has_room(0, &held(u32::MAX, 1, 0)));
        assert!(burdens.has_room(0, &held(3, 1, 0)));
        assert!(!burdens.has_room(1, &held(3, 1, 0)));
    }
}
