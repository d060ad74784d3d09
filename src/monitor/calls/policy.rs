//! What becomes of a driver call: executed, refused, or let continue.
//!
//! Pure: [`judge`] and [`judge_uvm`] go by what was decoded and nothing else. Executed is
//! the rule, on a duplicate of the descriptor and on copies. A call that continues is
//! read anew by the kernel from memory that the caller's other threads can write, on a
//! descriptor that they can replace: nothing that was looked at holds. So [`Passed`]
//! names all that may, each with what it needs of the caller and what would find it
//! out if it was another call in the end. The number of a call lies in a register, so an
//! allocation stays one: it can't become a control, but it can become one of a class that
//! keeps other memory alive ([`Use::KeepsAlive`]), which the figures may not show. How
//! things are executed is not known here.

use crate::rm::memory::{self, Use, class_use};
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use crate::rm::number::*;
use crate::rm::{Answer, Call, Key, Refusal, Release, call, control, uvm};

/// What becomes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The monitor makes it.
    Execute,
    /// Nobody makes it.
    Refuse(Answer),
    /// The caller makes it.
    Continue(Passed),
}

/// Calls that may continue: what each kind needs of the caller, so that it can't be executed, and what finds out
/// if one was another call in the end. "The figure" is the driver's for the process, 5 ms and 200 ms later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passed {
    /// A client is made: it belongs to the caller's process, and the driver counts its memory there. The figure.
    Client,
    /// A device is made: the driver looks whether the caller's process has the GPU's node open. Its GPU's UUID, by a
    /// subdevice of ours, before memory is made below it; and the figure.
    Device,
    /// The caller's own memory is described by its addresses. The figure.
    OsDescriptor,
    /// An event is made, with a descriptor of the caller's. The figure.
    Event,
    /// An engine, a channel, an address space or something else above 0xff is made: parameters that are not known,
    /// with addresses and handles in them. The figure.
    Engine,
    /// An object below 0x100 is made, of a class that takes no memory: parameters that are not known. The figure.
    Object,
    /// Memory of the host is made by `NV_ESC_RM_ALLOC_MEMORY`, of a descriptor or addresses of the caller's. Nothing
    /// has to find out: by this number no memory of a GPU is had.
    HostMemory,
    /// An address space is bound to a UVM file: the caller's. The flags, by initializing again with the same, before a
    /// GPU is registered.
    UvmBind,
    /// A UVM call on ranges and GPUs of the file, in the caller's address space. Mappings of the process, and the
    /// driver's figure at the next tick.
    UvmOther,
    /// A file is mapped in the caller's address space. The process's mappings, 5 ms and 200 ms later.
    Mapping,
}

impl Passed {
    /// Whether such a call could have taken memory, so that the driver has to be asked.
    #[must_use]
    pub fn has_to_be_audited(self) -> bool {
        !matches!(self, Self::HostMemory | Self::UvmBind | Self::UvmOther)
    }

    /// Whether nothing is to be done about such a call, so that nobody has to know whose its
    /// descriptor is; another file's call of that number is none of ours.
    #[must_use]
    pub fn asks_no_descriptor(self) -> bool {
        matches!(self, Self::HostMemory)
    }
}

const UNSUPPORTED: Verdict = Verdict::Refuse(Answer::Status(NV_ERR_NOT_SUPPORTED));

/// What becomes of a call to `nvidiactl` or `nvidiaN`, unwrapped.
#[must_use]
pub fn judge(release: &Release, call: &Call) -> Verdict {
    match *call {
        Call::Alloc(alloc) => judge_class(release, alloc.class),
        Call::AllocMemory { class, .. } => match (class, class_use(class).does) {
            (NV01_MEMORY_LOCAL_USER, _) => Verdict::Execute,
            (_, Use::Nothing) => Verdict::Continue(Passed::HostMemory),
            _ => refuse_class(release, class),
        },
        // Without parameters no memory can be asked for.
        Call::AllocObject { class, .. } => match class_use(class).does {
            Use::Nothing => {
                Verdict::Continue(if class > 0xff { Passed::Engine } else { Passed::Object })
            }
            _ => refuse_class(release, class),
        },
        Call::VidHeap { function, .. } => match function {
            call::VidHeap::Alloc { class, .. } => match class_use(class).does {
                Use::Takes | Use::Nothing => Verdict::Execute,
                _ => refuse_class(release, class),
            },
            call::VidHeap::OsDescriptor { .. } => Verdict::Continue(Passed::OsDescriptor),
            call::VidHeap::HwAlloc { .. } => UNSUPPORTED,
            call::VidHeap::Free { .. }
            | call::VidHeap::Info { .. }
            | call::VidHeap::Other { .. } => Verdict::Execute,
        },
        Call::Free(_) | Call::Dup { .. } => Verdict::Execute,
        // Continued it could be any control by the time that it's made, also one that keeps
        // memory alive where no figure shows it. So none continues.
        Call::Control { command, flags, .. } => match control::check(release, command, flags) {
            Ok(_) => Verdict::Execute,
            Err(refusal) => Verdict::Refuse(refusal.answer()),
        },
        // Memory would outlive its charge in any driver, and nothing tells when it ends.
        Call::ExportDmabuf { .. } => UNSUPPORTED,
        // Not trapped; here by the wrapper, which nobody needs for them.
        Call::RegisterFd { .. } | Call::OsEvent { .. } | Call::MapMemory { .. } => {
            Verdict::Refuse(Answer::Errno(crate::rm::refuse::EINVAL))
        }
        Call::Other { .. } => Verdict::Execute,
        Call::Wrapped { .. } => Verdict::Refuse(Answer::Errno(crate::rm::refuse::EINVAL)),
    }
}

/// What becomes of an allocation by class.
fn judge_class(release: &Release, class: u32) -> Verdict {
    match class {
        NV01_ROOT | NV01_ROOT_NON_PRIV | NV01_ROOT_CLIENT => {
            return Verdict::Continue(Passed::Client);
        }
        NV01_DEVICE_0 => return Verdict::Continue(Passed::Device),
        NV01_MEMORY_SYSTEM_OS_DESCRIPTOR => return Verdict::Continue(Passed::OsDescriptor),
        NV01_EVENT_OS_EVENT => return Verdict::Continue(Passed::Event),
        // It is freed with its memory (context_dma.c makes it a dependant).
        NV01_CONTEXT_DMA => return Verdict::Continue(Passed::Object),
        _ => {}
    }
    match class_use(class).does {
        Use::Takes => Verdict::Execute,
        Use::Nothing if !release.layouts(Key::Class(class)).is_empty() => Verdict::Execute,
        Use::Nothing => {
            Verdict::Continue(if class > 0xff { Passed::Engine } else { Passed::Object })
        }
        _ => refuse_class(release, class),
    }
}

fn refuse_class(release: &Release, class: u32) -> Verdict {
    Verdict::Refuse(memory::refusal(release, class).answer())
}

/// Why a control, or an object of a class, that is refused is; `None` of all other calls.
#[must_use]
pub fn refusal(release: &Release, call: &Call) -> Option<Refusal> {
    match *call {
        Call::Control { command, flags, .. } => control::check(release, command, flags).err(),
        Call::Alloc(call::Alloc { class, .. })
        | Call::AllocMemory { class, .. }
        | Call::AllocObject { class, .. }
        | Call::VidHeap { function: call::VidHeap::Alloc { class, .. }, .. } => {
            Some(memory::refusal(release, class))
        }
        _ => None,
    }
}

/// What becomes of a call to `nvidia-uvm`.
#[must_use]
pub fn judge_uvm(call: &uvm::Call) -> Verdict {
    match call {
        uvm::Call::Initialize { .. } => Verdict::Continue(Passed::UvmBind),
        uvm::Call::MmInitialize { .. } | uvm::Call::Other { .. } => {
            Verdict::Continue(Passed::UvmOther)
        }
        uvm::Call::RegisterGpu { .. }
        | uvm::Call::MapExternal { .. }
        | uvm::Call::AllocDeviceP2p { .. }
        | uvm::Call::AllocSemaphorePool(_)
        | uvm::Call::UnregisterGpu { .. }
        | uvm::Call::UnregisterVaSpace { .. }
        | uvm::Call::UnmapExternal { .. }
        | uvm::Call::Free { .. } => Verdict::Execute,
        uvm::Call::RegisterVaSpace { .. }
        | uvm::Call::RegisterChannel { .. }
        | uvm::Call::CreateExternalRange(_)
        | uvm::Call::MapDynamicParallelism(_) => Verdict::Continue(Passed::UvmOther),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rm::call::{Alloc, Object};

    fn release() -> Release {
        Release::of("535.161.08".parse().unwrap()).unwrap()
    }

    fn of_class(class: u32) -> Verdict {
        let object = Object { client: 1, parent: 2, handle: 3 };
        let alloc = Alloc { object, class, params: 0, params_size: None, rights: 0 };
        judge(&release(), &Call::Alloc(alloc))
    }

    #[test]
    fn nothing_that_takes_memory_continues() {
        for class in 0..=0xffff {
            let does = class_use(class).does;
            let verdict = of_class(class);
            match does {
                Use::Takes => assert_eq!(verdict, Verdict::Execute, "{class:#x}"),
                Use::Privileged | Use::Unknown | Use::Hidden | Use::Shared | Use::Unneeded => {
                    assert!(matches!(verdict, Verdict::Refuse(_)), "{class:#x}");
                }
                Use::KeepsAlive if class != NV01_CONTEXT_DMA => {
                    assert!(!matches!(verdict, Verdict::Continue(_)), "{class:#x}");
                }
                Use::KeepsAlive | Use::Nothing => {}
            }
        }
    }

    /// What is imported, attached, mapped or exported by it lives as long as it does.
    #[test]
    fn nothing_that_keeps_memory_alive_is_made_but_for_one() {
        let keeping: Vec<u32> = memory::CLASSES
            .iter()
            .filter(|of| of.does == Use::KeepsAlive)
            .map(|of| of.class)
            .collect();
        assert!(keeping.len() > 5 && keeping.contains(&NV_MEMORY_MULTICAST_FABRIC));
        for class in keeping {
            let verdict = match class {
                // It is freed with its memory.
                NV01_CONTEXT_DMA => Verdict::Continue(Passed::Object),
                _ => UNSUPPORTED,
            };
            assert_eq!(of_class(class), verdict, "{class:#x}");
            // By no other number, whatever it is.
            let object = Object { client: 1, parent: 2, handle: 3 };
            let memory = Call::AllocMemory { object, class, flags: 0, address: 0, limit: 4095 };
            for call in [memory, Call::AllocObject { object, class }] {
                assert_eq!(judge(&release(), &call), UNSUPPORTED, "{class:#x}: {call:?}");
            }
        }
    }

    #[test]
    fn memory_is_made_no_file_that_other_drivers_take() {
        for descriptor in [-1, 5] {
            let call = Call::ExportDmabuf { client: 1, handles: 1, descriptor };
            assert_eq!(judge(&release(), &call), UNSUPPORTED);
        }
    }

    #[test]
    fn what_is_made_by_class_continues_as_its_kind() {
        assert_eq!(of_class(0xc7c0), Verdict::Continue(Passed::Engine));
        assert_eq!(of_class(0x41), Verdict::Continue(Passed::Client));
        assert_eq!(of_class(0x2080), Verdict::Execute);
    }

    #[test]
    fn nobody_is_asked_about_what_continues_without_a_look() {
        assert!(Passed::HostMemory.asks_no_descriptor() && !Passed::HostMemory.has_to_be_audited());
        for class in [0x41, 0x80, 0xc7c0] {
            assert!(
                matches!(of_class(class), Verdict::Continue(passed) if !passed.asks_no_descriptor())
            );
        }
    }

    #[test]
    fn no_control_continues() {
        let judged = |command, flags| {
            let (client, object) = (1, 2);
            let call = Call::Control { client, object, command, params: 1, params_size: 8, flags };
            judge(&release(), &call)
        };
        for command in [0x101, 0x2080_014a, 0x2080_018d, 0x2080_1301, 0x2080_1303, 0x2080_a001] {
            assert_eq!(judged(command, 0), Verdict::Execute, "{command:#x}");
        }
        for command in (0..0xffff).chain(0x2080_0000..0x2080_ffff) {
            assert!(!matches!(judged(command, 0), Verdict::Continue(_)), "{command:#x}");
        }
        for (command, _) in control::REFUSED {
            assert_eq!(judged(*command, 0), UNSUPPORTED);
        }
        assert_eq!(judged(0x2080_014a, 0x10), UNSUPPORTED);
        assert_eq!(judged(0xdead_0001, 0), UNSUPPORTED);
    }
}
