//! From a request to a [`Plan`]: which GPUs, how many bytes of each, which weight.
//!
//! Arithmetic and decisions only: requests and inventories come in, plans and errors a
//! user can act on go out. Must not know OCI or files.

mod capacity;
mod gpu_rules;
mod placement;
mod resolve;
mod update;

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use serde::{Deserialize, Serialize};

use crate::units::bytes_to_mib;

pub use capacity::LEAKED_MARK;
pub use capacity::{Holders, Holding, Limits, Refusal, admit, unheld};
pub use gpu_rules::{
    GpuChange, GpuChangeError, GpuRules, Occupancy, POLICY_FIXED, POLICY_NATIVE, POLICY_PREEMPTIVE,
    WEIGHTED, policy_of,
};
pub use placement::{Candidate, Placement, Proposal, ShareAsked, WeightAsked};
pub use resolve::{ResolveError, resolve};
pub use update::{Change, ChangeError};

/// What a container creation gives to a container: the `plan` of `cgpu inspect`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Who enforces it.
    pub backend: Kind,
    /// The container's GPUs, in the order it asked for them.
    pub gpus: Vec<PlannedGpu>,
    /// Compute weight, 1 ..= max_inst.
    pub weight: u32,
    /// Whether it may take up to `prio_ratio` per cent of a GPU while it has work.
    pub high_priority: bool,
    /// What keeps quotas from being enforced on it, or by it on others.
    #[serde(flatten)]
    pub caveats: Caveats,
}

/// Where a container's quota comes from, and what is to be known before it, or that of others next to it, is relied on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Caveats {
    /// The settings that its quotas come from, those that won where several ask.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quota_by: Option<String>,
    /// The setting by which it has GPUs without a quota although one was asked for: it limits itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unenforced_by: Option<String>,
    /// How it reaches past the enforcement, a phrase each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub reaches_past: Vec<String>,
    /// The shares of Kubernetes' claims that it uses, as `claim's UID/request`: no two containers use one at once.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<String>,
}

/// One GPU of a [`Plan`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedGpu {
    /// The driver's index.
    pub index: u32,
    /// `GPU-` and a UUID.
    pub uuid: String,
    /// Minor number of `/dev/nvidiaN`.
    pub minor: u32,
    /// Its memory in bytes.
    pub memory_total_bytes: u64,
    /// What the driver reserves of that in bytes: no container can reserve it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub memory_reserved_bytes: u64,
    /// The quota in bytes, a multiple of 1 MiB; `None` if the container's use of the GPU is unlimited.
    pub memory_limit_bytes: Option<u64>,
    /// The MIG device of it that is given, where it isn't the GPU itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<PlannedMig>,
}

/// A MIG device of a [`PlannedGpu`], whose memory then is the device's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedMig {
    /// NVML's index of it within its GPU.
    pub index: u32,
    /// `MIG-` and a UUID.
    pub uuid: String,
    /// Its instances, GPU's and compute's, where they are known.
    pub instances: Option<(u32, u32)>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's form")]
fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

impl PlannedGpu {
    /// Its memory in bytes but for what the driver reserves.
    #[must_use]
    pub fn divisible_bytes(&self) -> u64 {
        self.memory_total_bytes.saturating_sub(self.memory_reserved_bytes)
    }

    /// The UUID of what is given: the GPU, or the MIG device.
    #[must_use]
    pub fn given_uuid(&self) -> &str {
        self.mig.as_ref().map_or(&self.uuid, |mig| &mig.uuid)
    }

    /// The index of what is given: `0`, or `0:1` of a MIG device.
    #[must_use]
    pub fn given_index(&self) -> String {
        match &self.mig {
            None => self.index.to_string(),
            Some(mig) => format!("{}:{}", self.index, mig.index),
        }
    }
}

/// The isolation backends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The driver's ioctl boundary held by seccomp user notification.
    Gate,
    /// The vendor's kernel module.
    Km,
    /// Visibility and environment only.
    None,
}

impl Kind {
    /// What it holds a container to, as a sentence has it.
    #[must_use]
    pub fn holds(self) -> &'static str {
        match self {
            Kind::Gate | Kind::Km => "memory and compute, changeable while it runs",
            Kind::None => "nothing",
        }
    }

    /// Whether isolation comes with the process that becomes the runtime: a hook can't add it.
    #[must_use]
    pub fn needs_runtime(self) -> bool {
        self == Kind::Gate
    }

    /// Whether isolation is turned on for a container that exists already, and so needs a hook;
    /// otherwise it is on with the bundle, or there is none.
    #[must_use]
    pub fn needs_hook(self) -> bool {
        self == Kind::Km
    }

    /// Whether it holds compute weights and priorities. Where nothing does, they are written down.
    #[must_use]
    pub fn holds_shares(self) -> bool {
        self != Kind::None
    }

    /// Whether weights on a GPU with that policy add up to `max_inst` at most: as slots of the vendor's
    /// module do, and of the gate under policy 3. Its other weights are relative: one more makes all
    /// others smaller.
    #[must_use]
    pub fn bounds_weights(self, policy: u32) -> bool {
        match self {
            Kind::Km => true,
            Kind::Gate => policy == POLICY_FIXED,
            Kind::None => false,
        }
    }
}

impl Plan {
    /// Whether it has a weight or a priority that others need not have.
    #[must_use]
    pub fn asks_for_shares(&self) -> bool {
        self.weight > 1 || self.high_priority
    }

    /// The weight and the priority that were asked for and that nothing holds under that policy, as a
    /// sentence has them: `weight 15, high priority`.
    #[must_use]
    pub fn shares_not_held(&self, policy: u32) -> Option<String> {
        let holds = self.backend.holds_shares();
        let is_left = |held: bool| !(holds && held);
        let weight = self.weight > 1 && is_left(WEIGHTED.contains(&policy));
        let weight = weight.then(|| format!("weight {}", self.weight));
        let priority = self.high_priority && is_left(policy != POLICY_NATIVE);
        let priority = priority.then(|| "high priority".to_owned());
        let asked: Vec<_> = weight.into_iter().chain(priority).collect();
        (!asked.is_empty()).then(|| asked.join(", "))
    }

    /// What its owner has to know of it, a sentence each, as the log, events and `cgpu inspect` have it.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let Caveats { unenforced_by, reaches_past, .. } = &self.caveats;
        let unenforced = unenforced_by.as_ref().map(|setting| match self.is_whole() {
            true => format!("no quota is enforced on this container: {setting}"),
            false => format!("this container has GPUs without a quota too: {setting}"),
        });
        let whose = if self.is_whole() { "others' quotas" } else { "its quota" };
        let reaches = (!reaches_past.is_empty()).then(|| {
            format!(
                "this container can reach past the enforcement of {whose}: {}; start it without \
                 these if quotas have to hold",
                reaches_past.join(", ")
            )
        });
        unenforced.into_iter().chain(reaches).collect()
    }

    /// Whether nothing of it is under a quota.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.gpus.iter().all(|gpu| gpu.memory_limit_bytes.is_none())
    }
}

/// As logs and people read it: `GPU 0 6452 MiB, GPU 1 whole`.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.gpus.is_empty() {
            return f.write_str("no GPU");
        }
        for (at, gpu) in self.gpus.iter().enumerate() {
            let comma = if at > 0 { ", " } else { "" };
            match gpu.memory_limit_bytes {
                Some(bytes) => write!(f, "{comma}GPU {} {} MiB", gpu.index, bytes_to_mib(bytes))?,
                None => write!(f, "{comma}GPU {} whole", gpu.given_index())?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Gate => "gate",
            Kind::Km => "km",
            Kind::None => "none",
        })
    }
}
