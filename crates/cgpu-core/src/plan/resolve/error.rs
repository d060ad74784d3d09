//! Why no state of this host meets a request: [`ResolveError`].

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use thiserror::Error;

use crate::gpu::{Gpu, MigDevice};
use crate::request::{Quoted, RequestError, Setting};

/// Why a request can't be met by any state of this host.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ResolveError {
    /// The names of GPUs can't be read.
    #[error(transparent)]
    Selection {
        /// What is wrong with them.
        #[from]
        source: RequestError,
    },
    /// The container has a quota on some of its GPUs only, and may not.
    #[error(
        "{nvidia} asks for {gpu} without a quota beside those with one, which is refused in \
         Kubernetes and on hosts with require_quota, profile = \"strict\" or \
         accept_nvidia_visible_devices_envvar_when_unprivileged = false; \
         name it in {aliyun} too, or take it out"
    )]
    WholeGpuRefused {
        /// What asks for unlimited use of it.
        nvidia: Setting,
        /// The GPU.
        gpu: String,
        /// What names the GPUs under a quota.
        aliyun: String,
    },
    /// A number that is no GPU's index, or a UUID that is no GPU's.
    #[error(
        "{said}: this host has no GPU {}; it has {} (cgpu gpus shows them)",
        Quoted(.item),
        listed(.known)
    )]
    UnknownGpu {
        /// What names it, or how it came.
        said: String,
        /// The name.
        item: String,
        /// The GPUs there are.
        known: Vec<String>,
    },
    /// The UUID of no GPU of this host.
    #[error(
        "{said}: {}; it has {} (cgpu gpus shows them); create the container again with the UUID or \
         the index of one of them",
        gone(.item, *.had_before),
        listed(.known)
    )]
    GoneGpu {
        /// What names it, or how it came.
        said: String,
        /// The UUID.
        item: String,
        /// The GPUs there are.
        known: Vec<String>,
        /// Whether the container is known to have had it.
        had_before: bool,
    },
    /// The beginning of more than one UUID.
    #[error(
        "{said}: {} can mean {}; write more of the UUID",
        Quoted(.item),
        listed(.candidates)
    )]
    AmbiguousGpu {
        /// What names it, or how it came.
        said: String,
        /// The name.
        item: String,
        /// The GPUs it can mean.
        candidates: Vec<String>,
    },
    /// The GPU can't be reached.
    #[error(
        "{said}: {gpu} is lost, it fell off the bus; \
         name another GPU (cgpu gpus shows them), or restart the host"
    )]
    LostGpu {
        /// What names it, or how it came.
        said: String,
        /// The GPU.
        gpu: String,
    },
    /// The GPU can be used through its MIG devices only.
    #[error(
        "{said}: {gpu} is in MIG mode and can be used through its MIG devices only; \
         name another GPU (cgpu gpus shows them), or switch the mode off (nvidia-smi -mig 0)"
    )]
    MigModeGpu {
        /// What names it, or how it came.
        said: String,
        /// The GPU.
        gpu: String,
    },
    /// A MIG device is to be shared.
    #[error(
        "{said}: MIG device {} can't be under the quota of {memory}, it has memory of its own; \
         name whole GPUs (cgpu gpus shows them), or ask for no quota",
        Quoted(.item)
    )]
    MigUnderQuota {
        /// What names it, or how it came.
        said: String,
        /// The MIG device.
        item: String,
        /// What asks for the quota.
        memory: Setting,
    },
    /// Unlimited use of the GPU is asked for, and it can be used through its MIG devices only.
    #[error(
        "{said}: {gpu} is in MIG mode and can be used through its MIG devices only; name \
         some of them: {}",
        mig_listed(.known)
    )]
    MigModeWholeGpu {
        /// What names it, or how it came.
        said: String,
        /// The GPU.
        gpu: String,
        /// The MIG devices of the host.
        known: Vec<String>,
    },
    /// No MIG device has that name.
    #[error("{said}: this host has no MIG device {}; there are: {}", Quoted(.item), mig_listed(.known))]
    UnknownMig {
        /// What names it, or how it came.
        said: String,
        /// The name.
        item: String,
        /// The MIG devices of the host.
        known: Vec<String>,
    },
    /// All GPUs are asked for, and none can be given.
    #[error("this host has no GPU to give: {}", unusable(.found))]
    NoUsableGpu {
        /// The GPUs there are, each with what is wrong with it.
        found: Vec<String>,
    },
    /// `NVIDIA_VISIBLE_DEVICES` lacks a GPU that is to be shared.
    #[error(
        "{aliyun} means {gpu}, which {nvidia} lacks; \
         name it in both, or leave NVIDIA_VISIBLE_DEVICES out"
    )]
    Contradiction {
        /// What names the GPUs to share.
        aliyun: Setting,
        /// The GPU.
        gpu: String,
        /// What lacks it.
        nvidia: String,
    },
    /// A GPU that was brought is none that the host knows.
    #[error(
        "{said}: this host has no such GPU; it has {} (cgpu gpus shows them)",
        listed(.known)
    )]
    UnknownBrought {
        /// How it came.
        said: String,
        /// The GPUs there are.
        known: Vec<String>,
    },
    /// The GPUs that were brought are not those that are named.
    #[error(
        "{naming} means {named}, and the engine brought {brought}; name the same, or leave \
         one of them out"
    )]
    BroughtDiffer {
        /// What names GPUs.
        naming: Setting,
        /// The named GPUs.
        named: String,
        /// The brought GPUs, and how they came.
        brought: String,
    },
    /// Two variables list different GPUs.
    #[error("{one} and {other} name different GPUs; name the same, or leave one of them out")]
    DifferentVariables {
        /// One.
        one: Setting,
        /// The other.
        other: Setting,
    },
    /// Variables and annotation name different GPUs.
    #[error(
        "{annotation} and {variable} name different GPUs; name the same, or leave one of them out"
    )]
    DifferentGpus {
        /// The annotation.
        annotation: Setting,
        /// The variable.
        variable: Setting,
    },
    /// The memory list is longer than the list of GPUs.
    #[error(
        "{memory} has {amounts} values for {} ({}); write one value for each, or fewer",
        counted(.gpus),
        listed(.gpus)
    )]
    TooManyAmounts {
        /// What was said.
        memory: Setting,
        /// How many values it has.
        amounts: usize,
        /// The GPUs under the quota.
        gpus: Vec<String>,
    },
    /// The memory list is longer than the number of GPUs that are asked for.
    #[error(
        "{memory} has {amounts} values, more than the GPUs that are chosen ({count}); write one value for each, or say \
         how many GPUs: CGPU_GPUS={amounts}"
    )]
    MoreAmountsThanGpus {
        /// What was said.
        memory: Setting,
        /// How many values it has.
        amounts: usize,
        /// How many GPUs are asked for.
        count: usize,
    },
    /// More is asked for than a GPU has.
    #[error(
        "{memory} is more than can be had of {gpu}, {total_mib} MiB; ask for less, or for per cent as 100%"
    )]
    MoreThanGpu {
        /// What was said.
        memory: Setting,
        /// The GPU.
        gpu: String,
        /// What can be had of it in MiB.
        total_mib: u64,
    },
    /// Another number of GPUs is asked for than is named, or was brought.
    #[error(
        "{count} asks for another number of GPUs than there are by {by}: {found}; let them agree, or leave one out"
    )]
    CountDiffers {
        /// What says how many.
        count: Setting,
        /// What names them, or how they came.
        by: String,
        /// Those that it means.
        found: String,
    },
    /// Two settings ask for different numbers of GPUs.
    #[error(
        "{one} and {other} ask for different numbers of GPUs; let them agree, or leave one out"
    )]
    DifferentCounts {
        /// One.
        one: Setting,
        /// The other.
        other: Setting,
    },
    /// More GPUs are asked for than the host can give.
    #[error("{count} GPUs are asked for ({by}), and this host can give {found}: {}", listed(.known))]
    TooFewGpus {
        /// How many are asked for.
        count: u32,
        /// What asks for them.
        by: String,
        /// How many can be given.
        found: usize,
        /// The host's GPUs, each with what is wrong with it, if anything is.
        known: Vec<String>,
    },
    /// A total that is less than the GPU, under `strict`.
    #[error(
        "{memory} is said to be a part of {parts}, which is less than {whole}, the memory of {gpu} in \
         that unit, and an image may have said so: this host refuses that (profile = \"strict\"); set \
         the GPU's memory to {whole} or more, and the unit if it isn't GiB"
    )]
    SmallTotal {
        /// What was said.
        memory: Setting,
        /// The total that was said.
        parts: u64,
        /// The GPU's memory in the unit, rounded down.
        whole: u64,
        /// The GPU.
        gpu: String,
    },
    /// A unit above GiB, under `strict`.
    #[error(
        "{memory} is given a unit above GiB, which an image may have said: this host refuses that \
         (profile = \"strict\"); use GiB or less"
    )]
    LargeUnit {
        /// What was said.
        memory: Setting,
    },
    /// The quota comes to less than a MiB.
    #[error("{memory} comes to 0 MiB of {gpu}; ask for more")]
    NoMemory {
        /// What was said.
        memory: Setting,
        /// The GPU.
        gpu: String,
    },
    /// More slices than a GPU has.
    #[error("{setting} is out of range; write a weight of 1 to {max_inst} (max_inst of this host)")]
    WeightTooHigh {
        /// What was said.
        setting: Setting,
        /// The most that can be had.
        max_inst: u32,
    },
}

/// A GPU as messages name it: index and UUID.
pub(super) fn label(gpu: &Gpu) -> String {
    format!("GPU {} ({})", gpu.index, Quoted(&gpu.uuid))
}

/// A MIG device as messages name it: indices and UUID.
pub(super) fn mig_label(gpu: &Gpu, mig: &MigDevice) -> String {
    format!("{}:{} ({})", gpu.index, mig.index, Quoted(&mig.uuid))
}

fn mig_listed(items: &[String]) -> String {
    match items.is_empty() {
        true => {
            "none (`nvidia-smi mig -cgi PROFILE -C` makes some, `cgpu gpus --refresh` looks again)"
                .to_owned()
        }
        false => format!("{} (cgpu gpus shows them)", items.join(", ")),
    }
}

fn gone(item: &str, had_before: bool) -> String {
    let item = Quoted(item);
    match had_before {
        true => format!(
            "this container had GPU {item} before, which this host no longer has: it was replaced or \
             removed"
        ),
        false => {
            format!("this host has no GPU {item}: it was replaced or removed, or is another host's")
        }
    }
}

pub(super) fn listed(items: &[String]) -> String {
    if items.is_empty() { "none".to_owned() } else { items.join(", ") }
}

fn unusable(found: &[String]) -> String {
    if found.is_empty() {
        "none was found (cgpu gpus --refresh looks again)".to_owned()
    } else {
        format!("{} (cgpu gpus shows them)", found.join(", "))
    }
}

fn counted(gpus: &[String]) -> String {
    match gpus.len() {
        1 => "1 GPU under a quota".to_owned(),
        n => format!("{n} GPUs under a quota"),
    }
}
