//! What the driver says in the kernel's log of GPUs that are broken: [`Broken`]. Pure.
//!
//! An Xid is the driver's number of a fault (<https://docs.nvidia.com/deploy/xid-errors/>). Most are a program's.

use std::collections::BTreeMap;

use thiserror::Error;

/// The Xids after which a GPU can't be used before it is reset, its node is restarted, or it is replaced, whatever
/// runs on it: 48 uncorrectable memory error, 62 internal processor halted, 64 a row of memory couldn't be
/// remapped, 79 fallen off the bus, 95 uncontained memory error, 119 and 120 the GPU's system processor doesn't
/// answer or failed, 140 unrecovered memory error ("Analyzing Xid Errors with the Xid Catalog").
pub const BROKEN: [u32; 8] = [48, 62, 64, 79, 95, 119, 120, 140];

/// The Xid by which newer drivers say what a GPU needs: `… changed from 0x1 (GPU Reset Required) to 0x0 (None)`.
const RECOVERY: u32 = 154;

/// How the driver's module, the open one or not, begins its first line.
const LOADED: &str = "NVRM: loading NVIDIA UNIX";

/// Where a GPU is: PCI domain, bus and device.
type Bus = (u32, u32, u32);

/// The GPUs that are broken, by where they are, with the Xid that said so.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Broken(BTreeMap<Bus, u32>);

/// What a line of the log has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Verdict {
    #[error("Xid {0}: it is broken until it has been reset")]
    Broken(u32),
    /// The driver says that it needs nothing any more.
    #[error("the driver says that it needs no reset any more")]
    Mended,
}

impl Broken {
    /// Takes in a line of the kernel's log; returns where the GPU is and what has changed, if that is so.
    ///
    /// A driver that is loaded has reset its GPUs.
    pub fn hear(&mut self, line: &str) -> Option<(String, Verdict)> {
        if line.contains(LOADED) {
            self.0.clear();
        }
        let (place, code, rest) = parse(line)?;
        let bus = bus(place)?;
        let is_mended = code == RECOVERY && rest.contains("to 0x0 ");
        let is_broken = BROKEN.contains(&code) || (code == RECOVERY && !is_mended);
        let verdict = if is_mended && self.0.remove(&bus).is_some() {
            Verdict::Mended
        } else if is_broken && self.0.insert(bus, code).is_none() {
            Verdict::Broken(code)
        } else {
            return None;
        };
        Some((place.to_owned(), verdict))
    }

    /// The Xid of the GPU at that place, as `0000:3b:00.0`, if it is broken.
    #[must_use]
    pub fn xid(&self, bus_id: &str) -> Option<u32> {
        self.0.get(&bus(bus_id)?).copied()
    }
}

/// `NVRM: Xid (PCI:0000:3b:00): 79, pid=1, …`: where, which, and what follows.
fn parse(line: &str) -> Option<(&str, u32, &str)> {
    let (_, rest) = line.split_once("NVRM: Xid (")?;
    let (place, rest) = rest.split_once("): ")?;
    let (code, rest) = rest.split_once(',').unwrap_or((rest, ""));
    Some((place.strip_prefix("PCI:").unwrap_or(place), code.trim().parse().ok()?, rest))
}

/// `0000:3b:00`, with a function behind it or not.
fn bus(place: &str) -> Option<Bus> {
    let hex = |digits: &str| u32::from_str_radix(digits, 16).ok();
    let mut parts = place.split([':', '.']);
    Some((hex(parts.next()?)?, hex(parts.next()?)?, hex(parts.next()?)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xid_distinguishes_broken_gpu_from_broken_program() {
        let mut broken = Broken::default();
        for line in [
            "NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, Ch 00000008, intr 10000000",
            "NVRM: Xid (PCI:0000:3b:00): 43, pid=7, name=python, Ch 00000008",
            "NVRM: Xid (nowhere): 79, x",
            "NVRM: Xid (PCI:0000:3b:00): many",
            "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
            "",
        ] {
            assert_eq!(broken.hear(line), None, "{line}");
        }
        let line = "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, name=x, GPU has fallen off the bus.";
        assert_eq!(broken.hear(line), Some(("0000:3b:00".into(), Verdict::Broken(79))));
        assert_eq!(broken.hear(line), None, "once");
        // Old drivers leave the word PCI out; NVML writes eight digits of the domain.
        let old = "NVRM: Xid (0001:af:00): 48, An uncorrectable double bit error";
        assert_eq!(broken.hear(old), Some(("0001:af:00".into(), Verdict::Broken(48))));
        assert_eq!(broken.xid("00000000:3B:00.0"), Some(79));
        assert_eq!(broken.xid("0001:af:00.0"), Some(48));
        assert_eq!((broken.xid("0000:3c:00.0"), broken.xid("")), (None, None));
        broken.hear("NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.65.06");
        assert_eq!(broken, Broken::default());
    }

    #[test]
    fn a_newer_driver_says_what_a_gpu_needs() {
        let mut broken = Broken::default();
        let line = |from: &str, to: &str| {
            format!(
                "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from {from} to {to}"
            )
        };
        let (none, reset) = ("0x0 (None)", "0x1 (GPU Reset Required)");
        let reported = broken.hear(&line(none, reset)).map(|reported| reported.1);
        assert_eq!(reported, Some(Verdict::Broken(154)));
        assert_eq!(
            broken.hear(&line(reset, none)).map(|reported| reported.1),
            Some(Verdict::Mended)
        );
        assert_eq!(broken, Broken::default());
        assert_eq!(broken.hear(&line(reset, none)), None);
    }
}
