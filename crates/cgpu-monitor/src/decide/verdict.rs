//! Decides how a driver call is handled: it is proxied, refused, or passed through.
//!
//! Pure: [`judge`] and [`judge_uvm`] know only the decoded call. Most calls are proxied, on a duplicate of the
//! descriptor and on copies of the arguments. When a call is passed through, the kernel reads it again from memory that
//! the caller's other threads can write, and uses a descriptor that these threads can replace. So what the monitor
//! checked proves nothing, and [`Continued`] names every kind of call that may be passed through: why the kind needs
//! the caller, and what would show that it was another call in the end. The number of a call lies in a register. So an
//! allocation can't become a control, but it can become an allocation of a class that keeps other memory alive
//! ([`Use::KeepsAlive`]), which the driver usage may not show. This file does not know how calls are proxied.

use nvrm::class::{self, Use, class_use};
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use nvrm::number::*;
use nvrm::{Answer, Call, Key, Refusal, Release, call, control, uvm};

/// How a call is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The monitor makes the call.
    Execute,
    /// The call is not made, and gets this answer.
    Refuse(Answer),
    /// The kernel makes the call as the caller asked for it.
    Continue(Continued),
}

/// The kinds of calls that may be passed through: what each needs of the caller, so that the monitor can't proxy it,
/// and what would show that it was another call. "The figure" is the driver usage of the process, 5 ms and 200 ms
/// later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Continued {
    /// Makes a client. It belongs to the caller's process, where the driver counts its memory. Shown by the figure.
    Client,
    /// Makes a device: the driver checks whether the caller's process has the GPU's node open. Shown by the UUID of its
    /// GPU, which a subdevice of the monitor's reports before memory is made below the device; and by the figure.
    Device,
    /// Describes the caller's own memory by its addresses. Shown by the figure.
    OsDescriptor,
    /// Makes an event with the caller's descriptor. Shown by the figure.
    Event,
    /// Makes an object of a class above 0xff, such as an engine, a channel or an address space. Its parameters are not
    /// known, and have addresses and handles. Shown by the figure.
    Engine,
    /// Makes an object of a class below 0x100 that takes no memory. Its parameters are not known. Shown by the figure.
    Object,
    /// Makes memory of the host by `NV_ESC_RM_ALLOC_MEMORY`, of the caller's descriptor or addresses. Nothing has to
    /// show another call: a call of this number gets no memory of a GPU.
    HostMemory,
    /// Binds the caller's address space to an nvidia-uvm file. Other flags show before a GPU is registered: the monitor
    /// initializes the file again with the same flags.
    UvmBind,
    /// Works on ranges and GPUs of an nvidia-uvm file, in the caller's address space. Shown by the mappings of the
    /// process, and by the driver usage at the next tick.
    UvmOther,
    /// Maps a file in the caller's address space. Shown by the process's mappings, 5 ms and 200 ms later.
    Mapping,
}

impl Continued {
    /// Whether such a call could have taken memory, so that an audit has to ask the driver.
    #[must_use]
    pub fn has_to_be_audited(self) -> bool {
        !matches!(self, Self::HostMemory | Self::UvmBind | Self::UvmOther)
    }

    /// Whether the monitor does nothing about such a call, and so needn't know which file its descriptor is. A call of
    /// this number on another file is not the monitor's business.
    #[must_use]
    pub fn needs_no_descriptor(self) -> bool {
        matches!(self, Self::HostMemory)
    }
}

const UNSUPPORTED: Verdict = Verdict::Refuse(Answer::Status(NV_ERR_NOT_SUPPORTED));

/// Decides on a call to `nvidiactl` or `nvidiaN`, after unwrapping.
#[must_use]
pub fn judge(release: &Release, call: &Call) -> Verdict {
    match *call {
        Call::Alloc(alloc) => judge_class(release, alloc.class, alloc.does),
        Call::AllocMemory { class, .. } => match (class, class_use(class).does) {
            (NV01_MEMORY_LOCAL_USER, _) => Verdict::Execute,
            (_, Use::Nothing) => Verdict::Continue(Continued::HostMemory),
            _ => refuse_class(release, class),
        },
        // Without parameters no memory can be asked for.
        Call::AllocObject { class } => match class_use(class).does {
            Use::Nothing => {
                Verdict::Continue(if class > 0xff { Continued::Engine } else { Continued::Object })
            }
            _ => refuse_class(release, class),
        },
        Call::VidHeap { function, .. } => match function {
            call::VidHeap::Alloc { class, does, .. } => match does {
                Use::Takes | Use::Nothing => Verdict::Execute,
                _ => refuse_class(release, class),
            },
            call::VidHeap::OsDescriptor => Verdict::Continue(Continued::OsDescriptor),
            call::VidHeap::HwAlloc => UNSUPPORTED,
            call::VidHeap::Free { .. } | call::VidHeap::Info { .. } | call::VidHeap::Other => {
                Verdict::Execute
            }
        },
        Call::Free(_) | Call::Dup { .. } => Verdict::Execute,
        // No control is passed through: it could be any other control by the time that the kernel makes it, also a
        // control that keeps memory alive where no driver usage shows it.
        Call::Control { command, flags, .. } => match control::check(release, command, flags) {
            Ok(_) => Verdict::Execute,
            Err(refusal) => Verdict::Refuse(refusal.answer()),
        },
        // As a dma-buf, memory would outlive its charge in any other driver, and nothing reports when it is freed.
        Call::ExportDmabuf => UNSUPPORTED,
        // These calls are not trapped. They come here only in the wrapper, in which no program needs them.
        Call::Untrapped => Verdict::Refuse(Answer::Errno(nvrm::refuse::EINVAL)),
        Call::Other => Verdict::Execute,
        Call::Wrapped { .. } => Verdict::Refuse(Answer::Errno(nvrm::refuse::EINVAL)),
    }
}

/// Decides on an allocation by its class.
fn judge_class(release: &Release, class: u32, does: Use) -> Verdict {
    match class {
        NV01_ROOT | NV01_ROOT_NON_PRIV | NV01_ROOT_CLIENT => {
            return Verdict::Continue(Continued::Client);
        }
        NV01_DEVICE_0 => return Verdict::Continue(Continued::Device),
        NV01_MEMORY_SYSTEM_OS_DESCRIPTOR => return Verdict::Continue(Continued::OsDescriptor),
        NV01_EVENT_OS_EVENT => return Verdict::Continue(Continued::Event),
        // The driver frees the object with its memory (context_dma.c makes it a dependant).
        NV01_CONTEXT_DMA => return Verdict::Continue(Continued::Object),
        _ => {}
    }
    match does {
        Use::Takes => Verdict::Execute,
        Use::Nothing if !release.layouts(Key::Class(class)).is_empty() => Verdict::Execute,
        Use::Nothing => {
            Verdict::Continue(if class > 0xff { Continued::Engine } else { Continued::Object })
        }
        _ => refuse_class(release, class),
    }
}

fn refuse_class(release: &Release, class: u32) -> Verdict {
    Verdict::Refuse(class::refusal(release, class).answer())
}

/// Why a control, or an object of a class, is refused. `None` for all other calls.
#[must_use]
pub(crate) fn refusal(release: &Release, call: &Call) -> Option<Refusal> {
    match *call {
        Call::Control { command, flags, .. } => control::check(release, command, flags).err(),
        Call::Alloc(call::Alloc { class, .. })
        | Call::AllocMemory { class, .. }
        | Call::AllocObject { class }
        | Call::VidHeap { function: call::VidHeap::Alloc { class, .. }, .. } => {
            Some(class::refusal(release, class))
        }
        _ => None,
    }
}

/// Decides on a call to `nvidia-uvm`.
#[must_use]
pub fn judge_uvm(call: &uvm::Call) -> Verdict {
    match call {
        uvm::Call::Initialize { .. } => Verdict::Continue(Continued::UvmBind),
        uvm::Call::Other => Verdict::Continue(Continued::UvmOther),
        uvm::Call::RegisterGpu { .. }
        | uvm::Call::MapExternal { .. }
        | uvm::Call::AllocDeviceP2p { .. }
        | uvm::Call::AllocSemaphorePool(_)
        | uvm::Call::UnregisterGpu { .. }
        | uvm::Call::UnregisterVaSpace { .. }
        | uvm::Call::UnmapExternal { .. }
        | uvm::Call::Free { .. } => Verdict::Execute,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvrm::call::{Alloc, Object};

    fn release() -> Release {
        Release::of("535.161.08".parse().unwrap()).unwrap()
    }

    fn of_class(class: u32) -> Verdict {
        let object = Object { client: 1, parent: 2, handle: 3 };
        let does = class_use(class).does;
        let alloc = Alloc { object, class, does, params: 0, params_size: None, rights: 0 };
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

    /// No object that keeps memory alive is created, except of one class.
    ///
    /// An object of such a class keeps alive the memory that is imported, attached, mapped or exported by it.
    #[test]
    fn objects_retaining_memory_are_refused_but_one() {
        let keeping: Vec<u32> = class::CLASSES
            .iter()
            .filter(|of| of.does == Use::KeepsAlive)
            .map(|of| of.class)
            .collect();
        assert!(keeping.len() > 5 && keeping.contains(&NV_MEMORY_MULTICAST_FABRIC));
        for class in keeping {
            let verdict = match class {
                // The driver frees the object with its memory.
                NV01_CONTEXT_DMA => Verdict::Continue(Continued::Object),
                _ => UNSUPPORTED,
            };
            assert_eq!(of_class(class), verdict, "{class:#x}");
            // No call of another number makes an object of such a class.
            let object = Object { client: 1, parent: 2, handle: 3 };
            let memory = Call::AllocMemory { object, class };
            for call in [memory, Call::AllocObject { class }] {
                assert_eq!(judge(&release(), &call), UNSUPPORTED, "{class:#x}: {call:?}");
            }
        }
    }

    /// Memory is made no file that other drivers take.
    #[test]
    fn memory_export_as_dmabuf_is_refused() {
        assert_eq!(judge(&release(), &Call::ExportDmabuf), UNSUPPORTED);
    }

    /// An object that is allocated by class is passed through as its kind, or proxied.
    #[test]
    fn allocation_verdict_follows_the_objects_class() {
        assert_eq!(of_class(0xc7c0), Verdict::Continue(Continued::Engine));
        assert_eq!(of_class(0x41), Verdict::Continue(Continued::Client));
        assert_eq!(of_class(0x2080), Verdict::Execute);
    }

    /// A call that is passed through without a check needs no descriptor and no audit; other
    /// objects need the descriptor.
    #[test]
    fn unchecked_calls_need_no_descriptor_or_audit() {
        assert!(
            Continued::HostMemory.needs_no_descriptor()
                && !Continued::HostMemory.has_to_be_audited()
        );
        for class in [0x41, 0x80, 0xc7c0] {
            assert!(
                matches!(of_class(class), Verdict::Continue(kind) if !kind.needs_no_descriptor())
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
