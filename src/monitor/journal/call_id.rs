//! How a call is recognized when its thread makes it again, and by the next worker. This file knows no files and no
//! callers.

use std::hash::{DefaultHasher, Hasher};

use crate::ledger::Process;
use crate::process::ProcessId;

/// The monitor chooses handles from here on where the caller leaves the choice to the driver. So what a call made is
/// known even if the worker dies before the driver's answer. The driver's own handles begin with 0xcaf.
const HANDLES: u32 = 0xcb90_0000;
const HANDLES_MASK: u32 = 0xf_ffff;

/// The handle that comes `number` places after `first`, for handles that are chosen together.
pub(crate) fn nth_handle(first: u32, number: u32) -> u32 {
    HANDLES | first.wrapping_add(number) & HANDLES_MASK
}

/// A hash of a call: its registers, and its struct and parameters as they were at some time. A caller whose two calls
/// have the same hash deceives only itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fingerprint(u64);

impl Fingerprint {
    /// The hash of a call's registers, its struct, and the parameters that the struct points at.
    pub(crate) fn of(registers: Registers, bytes: &[u8], params: &[u8]) -> Self {
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(registers.0);
        hasher.write_u64(registers.1);
        hasher.write(bytes);
        hasher.write(params);
        Fingerprint(hasher.finish())
    }
}

/// The registers of a call: descriptor and request in one word, and the argument.
pub(crate) type Registers = (u64, u64);

/// The object that a call is to make or to free.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CallObject {
    pub(crate) client: u32,
    /// The object's handle; 0 where the call makes and frees none.
    pub(crate) handle: u32,
    /// How many more objects are made. Their handles follow `handle`.
    pub(crate) more: u32,
    /// Whether the object existed before the call. Then undoing the call must not free it.
    pub(crate) was_there: bool,
}

impl CallObject {
    /// A single object.
    pub(crate) fn one(client: u32, handle: u32, was_there: bool) -> Self {
        CallObject { client, handle, more: 0, was_there }
    }

    /// The handles of all objects of the call.
    pub(crate) fn handles(self) -> impl Iterator<Item = u32> {
        std::iter::once(self.handle)
            .chain((1..=self.more).map(move |at| nth_handle(self.handle, at)))
    }
}

/// A call for which the driver was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Trace {
    pub(crate) thread: ProcessId,
    pub(crate) process: Process,
    pub(crate) registers: Registers,
    pub(crate) object: CallObject,
}

impl Trace {
    /// The descriptor on which the call was made.
    pub(crate) fn descriptor(&self) -> i32 {
        let [_, _, _, _, a, b, c, d] = self.registers.0.to_le_bytes();
        i32::from_le_bytes([a, b, c, d])
    }

    /// Whether the call may have made an object, which has to be freed where no caller takes the reply.
    pub(crate) fn may_have_made(&self) -> bool {
        self.object.handle != 0 && !self.object.was_there
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn trace(tid: i32) -> Trace {
        Trace {
            thread: ProcessId { pid: tid, start_ticks: 5 },
            process: Process(77),
            registers: (0x0000_0007_c020_462b, 2),
            object: CallObject::one(5, 6, false),
        }
    }

    #[test]
    fn a_call_is_known_by_its_registers_and_by_what_was_read() {
        let one = trace(1);
        assert_eq!(one.descriptor(), 7);
        let read = Fingerprint::of(one.registers, &[1, 2], &[]);
        assert_eq!(
            read,
            Fingerprint::of(one.registers, &[1], &[2]),
            "read at once, or in two parts"
        );
        assert_ne!(read, Fingerprint::of(one.registers, &[1], &[3]));
        assert_ne!(read, Fingerprint::of((one.registers.0, 3), &[1], &[2]));
    }

    #[test]
    fn what_was_there_is_not_undone() {
        assert!(trace(1).may_have_made());
        for object in [CallObject::one(5, 6, true), CallObject::one(5, 0, false)] {
            assert!(!Trace { object, ..trace(1) }.may_have_made());
        }
    }

    #[test]
    fn handles_follow_the_first() {
        assert_eq!(CallObject::one(1, 77, false).handles().collect::<Vec<_>>(), [77]);
        let first = nth_handle(u32::MAX, 0);
        let several = CallObject { more: 2, ..CallObject::one(1, first, false) };
        let wanted = [first, nth_handle(first, 1), nth_handle(first, 2)];
        assert_eq!(several.handles().collect::<Vec<_>>(), wanted);
        assert_eq!(wanted[1], nth_handle(0, 0), "they begin anew");
    }
}
