//! Why a request can't be meant: [`RequestError`], in sentences that end in a remedy.

use alloc::string::String;

use thiserror::Error;

use super::near_miss::NearMiss;
use super::setting::{Quoted, Setting};
use super::setting_names::{MEM_CONTAINER, MEM_DEV, VISIBLE_DEVICES};

/// Why a request can't be meant, on whatever host.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RequestError {
    /// Control characters, or bytes that were no UTF-8.
    #[error(
        "{setting} is no text: it has control characters, or bytes that are not UTF-8; \
         write it anew in plain characters"
    )]
    NotText {
        /// What was said.
        setting: Setting,
    },
    /// The scheduler says in this way that it failed.
    #[error(
        "the scheduler found no GPU for this container: {setting}; \
         free GPU memory on this node or ask for less ({})",
        MEM_CONTAINER.variable
    )]
    NoGpuFound {
        /// What was said.
        setting: Setting,
    },
    /// `CGPU_DISABLE` is neither of its words.
    #[error("{setting} is neither yes nor no; write true or 1, false or 0")]
    BadSwitch {
        /// What was said.
        setting: Setting,
    },
    /// An item of the memory list is no number.
    #[error(
        "{setting}: {} is no whole number below 2^64; \
         write digits only, or a comma list of such numbers, one for each GPU",
        Quoted(.item)
    )]
    BadMemory {
        /// What was said.
        setting: Setting,
        /// The item that is no number.
        item: String,
    },
    /// An amount has no unit.
    #[error(
        "{setting}: {} has no unit; write {item}GiB or {item}MiB, or per cent of a GPU's memory as 25%",
        Quoted(.item)
    )]
    BareAmount {
        /// What was said.
        setting: Setting,
        /// The amount, digits and a point.
        item: String,
    },
    /// An item of a list of sizes is none.
    #[error(
        "{setting}: {} is no amount of memory; write a size as 4GiB or 4096MiB, or per cent of a GPU's \
         memory as 25%; a comma list has one for each GPU",
        Quoted(.item)
    )]
    BadAmount {
        /// What was said.
        setting: Setting,
        /// The item.
        item: String,
    },
    /// An amount is next to nothing.
    #[error("{setting}: {} is less than can be held; write 1MiB or more, or 0.01% or more", Quoted(.item))]
    SmallAmount {
        /// What was said.
        setting: Setting,
        /// The item.
        item: String,
    },
    /// More than 100 per cent.
    #[error("{setting} is more than a whole GPU; write 100% or less")]
    MoreThanAll {
        /// What was said.
        setting: Setting,
    },
    /// Sizes and per cent in one list.
    #[error("{setting} has sizes and per cent side by side; write all of them the one way")]
    MixedAmounts {
        /// What was said.
        setting: Setting,
    },
    /// NVIDIA's limit is no number.
    #[error("{setting} is no whole number of MiB; write digits only, as NVIDIA's toolkit has it")]
    BadNvidiaLimit {
        /// What was said.
        setting: Setting,
    },
    /// A part of the computing time can't be meant.
    #[error(
        "{setting} is no part of a GPU's computing time; write 0.01% to 100%, or a weight as 2"
    )]
    BadShare {
        /// What was said.
        setting: Setting,
    },
    /// A priority is neither of its words.
    #[error("{setting} is neither high nor normal; write one of these")]
    BadPriorityWord {
        /// What was said.
        setting: Setting,
    },
    /// A choice of GPUs by docker's grammar can't be read.
    #[error(
        "{setting} is no choice of GPUs; write how many as 1, all, none, or names as device=0,1 or \
         device=GPU-… (cgpu gpus shows them)"
    )]
    BadGpus {
        /// What was said.
        setting: Setting,
    },
    /// A hook is to choose GPUs, and can give none.
    #[error(
        "{setting} leaves it to cgpu which GPUs this container has, and a hook alone can't give it one; name them \
         (CGPU_GPUS=device=0), or start it by cgpu-runtime"
    )]
    ChoiceByHook {
        /// What leaves it open.
        setting: Setting,
    },
    /// The host's default can't be read.
    #[error(
        "this container names GPUs and asks for no quota, and what this host gives it can't be read; see \
         `cgpu get host`, and set it anew: `cgpu set host default_memory=4GiB`, or 0 for whole GPUs"
    )]
    DefaultUnreadable,
    /// Two annotations choose GPUs.
    #[error("{one} and {other} both choose GPUs; leave one of them out")]
    TwoChoices {
        /// The one.
        one: Setting,
        /// The other.
        other: Setting,
    },
    /// The GPU's total is no number.
    #[error(
        "{setting} is not one whole number from 1; write the memory of each GPU, digits only, \
         in the unit of {memory}"
    )]
    BadTotal {
        /// What was said.
        setting: Setting,
        /// Name of the memory list.
        memory: &'static str,
    },
    /// More is asked for than a GPU has.
    #[error(
        "{memory} asks for {amount}, more than the whole GPU ({total}); \
         lower the one or correct the other"
    )]
    MoreThanTotal {
        /// What was said of the container.
        memory: Setting,
        /// The largest item of it.
        amount: u64,
        /// What was said of the GPU.
        total: Setting,
    },
    /// The unit is needed, and unknown.
    #[error(
        "{setting} is no known unit; write GiB, MiB or a number of MiB as 128MiB, or set {total}"
    )]
    BadUnit {
        /// What was said.
        setting: Setting,
        /// Name of the GPU's total, next to which no unit is needed.
        total: &'static str,
    },
    /// The weight is no number, or zero.
    #[error("{setting} is no whole number from 1; write the compute weight, digits only")]
    BadWeight {
        /// What was said.
        setting: Setting,
    },
    /// The priority is neither of its two.
    #[error("{setting} is neither 0 nor 1; write 1 for high priority")]
    BadPriority {
        /// What was said.
        setting: Setting,
    },
    /// An item of a list of GPUs names none.
    #[error(
        "{setting}: {} is no name of a GPU; write indices as 0,1 or UUIDs as GPU-… \
         (cgpu gpus shows them)",
        Quoted(.item)
    )]
    BadGpuName {
        /// What was said.
        setting: Setting,
        /// The item.
        item: String,
    },
    /// GPUs are named, and no quota.
    #[error(
        "{selection} asks for GPUs without a quota, which this host refuses ({rule}); ask for a part \
         with {} and {}, or take the GPUs away with NVIDIA_VISIBLE_DEVICES=void",
        MEM_CONTAINER.variable,
        MEM_DEV.variable
    )]
    QuotaRequired {
        /// What asks for GPUs.
        selection: Setting,
        /// The rule of the configuration.
        rule: &'static str,
    },
    /// GPUs were brought, and no quota is asked for.
    #[error(
        "this host refuses GPUs without a quota ({rule}), and this container gets some by {by}; ask \
         for a part with {} and {}, or start it without them",
        MEM_CONTAINER.variable,
        MEM_DEV.variable
    )]
    QuotaRequiredOfBrought {
        /// How the GPUs came.
        by: String,
        /// The rule of the configuration.
        rule: &'static str,
    },
    /// A setting lifts the quota of a container that has GPUs.
    #[error(
        "{setting} would let this container have its GPUs ({by}) without a quota, which this host \
         refuses ({rule}); take it out, or, if its image sets it, start it with CGPU_DISABLE=false or \
         an amount of memory"
    )]
    Lifted {
        /// The setting.
        setting: Setting,
        /// How it has GPUs.
        by: String,
        /// The rule of the configuration.
        rule: &'static str,
    },
    /// A pod's container names GPUs that Kubernetes didn't give.
    #[error(
        "{setting} names GPUs, and Kubernetes has given this container none, which this node refuses \
         (kubernetes.ungranted); ask for aliyun.com/gpu-mem or aliyun.com/gpu-whole in its limits, or \
         start it with NVIDIA_VISIBLE_DEVICES=void"
    )]
    Ungranted {
        /// The setting.
        setting: Setting,
    },
    /// A setting switches one of two quotas off.
    #[error(
        "{setting} switches one of this container's quotas off and leaves {memory}, which this host \
         refuses (profile = \"strict\"); take it out, or, if its image sets it, start it with \
         CGPU_DISABLE=false"
    )]
    OneIsLifted {
        /// The setting.
        setting: Setting,
        /// The other quota.
        memory: Setting,
    },
    /// A quota on no GPU, and all of them at hand.
    #[error(
        "{memory} asks for a quota, {nothing} names no GPU, and {brought} lets this container use GPUs \
         without it; start it without {brought}, or name its GPUs with {}",
        VISIBLE_DEVICES.variable
    )]
    NoGpuNamed {
        /// What asks for the quota.
        memory: Setting,
        /// What says no GPU.
        nothing: String,
        /// What was brought.
        brought: String,
    },
    /// A quota that doesn't count, and GPUs.
    #[error(
        "{memory} asks for a quota and doesn't count on this host ({key} = false), and this container \
         gets GPUs by {by}; ask for the quota by a source that counts, or take it out"
    )]
    Untrusted {
        /// What asks for the quota.
        memory: Setting,
        /// The key of the configuration.
        key: &'static str,
        /// How it has GPUs.
        by: String,
    },
    /// A sandbox of a pod with a quota has GPUs.
    #[error(
        "this is the sandbox of a pod with {memory}, and it has GPUs by {by}: a sandbox uses none, and \
         its pod's quota does not count in it; take the GPUs out of the sandbox"
    )]
    Sandbox {
        /// What asks for the pod's quota.
        memory: Setting,
        /// How it has GPUs.
        by: String,
    },
    /// One source names GPUs, another says that there are none.
    #[error("{nothing} selects no GPU, {naming} does; let them agree, or leave one of them out")]
    NothingAndSomething {
        /// What selects none.
        nothing: Setting,
        /// What selects some.
        naming: Setting,
    },
    /// A quota in the host's pid namespace.
    #[error(
        "{memory} asks for a quota, and this container is in the host's pid namespace: its processes \
         could reach the monitor that enforces the quota; start it without --pid=host (Kubernetes: \
         hostPID), or without the quota"
    )]
    HostPids {
        /// What asks for the quota.
        memory: Setting,
    },
    /// A weight or a priority by a variable, under `strict`.
    #[error(
        "{setting}: a weight above 1 or high priority counts by an annotation only on this host \
         (profile = \"strict\"), since an image may have set the variable; use the annotation \
         aliyun.com/gpu-schd-weight or aliyun.com/gpu-high-prio, or take the variable out"
    )]
    ShareByVariable {
        /// What asks for it.
        setting: Setting,
    },
    /// A near miss, under `strict`.
    #[error("{near} (this host refuses such settings: profile = \"strict\")")]
    NearMiss {
        /// The near miss.
        near: NearMiss,
    },
    /// A container with a quota reaches past the enforcement, under `strict`.
    #[error(
        "{memory} asks for a quota, and this container can reach past its enforcement: {ways}; this \
         host refuses that (profile = \"strict\"): start it without these"
    )]
    ReachesPast {
        /// What asks for the quota.
        memory: Setting,
        /// How.
        ways: String,
    },
    /// A container with GPUs reaches past the enforcement, under `strict`.
    #[error(
        "this container has GPUs and can reach past the enforcement of others' quotas: {ways}; this \
         host refuses that (profile = \"strict\"): start it without these, or without GPUs"
    )]
    WholeReachesPast {
        /// How.
        ways: String,
    },
    /// A container without GPUs reaches past the enforcement, and the configuration refuses that.
    #[error(
        "this container can reach past the enforcement of others' quotas: {ways}; this host refuses \
         that (privileged = \"refuse\"): start it without these"
    )]
    Privileged {
        /// How.
        ways: String,
    },
    /// A quota that the gate would enforce, by podman's precreate hook.
    #[error(
        "{memory} asks for a quota, and podman's precreate hook can't enforce it, because it doesn't \
         start the container; make cgpu-runtime the runtime (podman --runtime cgpu, or runtime = \
         \"cgpu\" under [engine] in containers.conf; `cgpu setup podman` registers it)"
    )]
    GateByPrecreateHook {
        /// What asks for the quota.
        memory: Setting,
    },
}
