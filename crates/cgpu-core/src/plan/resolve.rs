//! Which GPUs of the host a request means, and the quota on each: [`resolve`].
//!
//! Knows the request, the host's GPUs and the rules. Must not know what other containers hold: that is admission.
//! Invariants of a plan made here: each GPU stands in it once; a quota is at least 1 MiB, a multiple of 1 MiB, and at
//! most the GPU's total; the weight is at most `max_inst`.

mod choice;
mod error;
mod quota_bytes;

pub use error::ResolveError;

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;

use super::{
    Candidate, Caveats, Kind, Plan, PlannedGpu, PlannedMig, Proposal, ShareAsked, WeightAsked,
};
use crate::gpu::Inventory;
use crate::request::{On, Outcome, Quota, Request, RequestError, Spelling, WeightValue};
use crate::units::mib_to_bytes;
use choice::{Chosen, Purpose};

/// What `request` comes to on the GPUs of `inventory`, on a host with at most `max_inst`
/// containers a GPU.
///
/// # Errors
///
/// If the request names what isn't there, contradicts itself, or asks for what a GPU can't give.
pub fn resolve(
    request: &Request,
    inventory: &Inventory,
    backend: Kind,
    max_inst: u32,
) -> Result<Proposal, ResolveError> {
    let quotas = &request.quotas;
    let weight = weight(quotas, max_inst)?;
    let mut caveats = Caveats {
        quota_by: quota_by(quotas),
        unenforced_by: request.unenforced_by.clone(),
        reaches_past: request.reaches.ways.iter().map(ToString::to_string).collect(),
        shares: request.shares.clone(),
    };
    let is_high = |quota: &Quota| quota.shares.high_priority.is_some();
    let high_priority = !quotas.is_empty() && quotas.iter().all(is_high);
    let rest = |caveats| Plan { backend, gpus: Vec::new(), weight: 1, high_priority, caveats };
    if request.is_files_alone() {
        return Ok(Proposal::new(rest(caveats), Vec::new(), weight, Vec::new()));
    }
    if let Outcome::Quota(On::Chosen) | Outcome::Whole(On::Chosen) = request.outcome {
        let (places, unusable) = places(request, inventory)?;
        return Ok(Proposal::new(rest(caveats), places, weight, unusable));
    }
    // The host's default applies to GPUs, and leaves MIG devices as they are.
    let is_default = quotas.iter().all(|quota| quota.spelling == Spelling::HostDefault);
    let purpose = match quotas.first().filter(|_| !is_default) {
        Some(quota) => Purpose::Shared { memory: &quota.memory, may_mix: request.may_mix },
        None => Purpose::Whole,
    };
    let choice = choice::choose(request, inventory, purpose)?;
    for quota in quotas.iter().filter(|_| !is_default) {
        quota_bytes::check_length(quota, choice.shared_in_order_of(quota.source))?;
    }

    let planned = |chosen: &Chosen<'_>| {
        // The place of the GPU in the order of the quota's source.
        let nth = |quota: &Quota| match quota.spelling {
            Spelling::HostDefault => chosen.mig.is_none().then_some(0),
            _ => choice.shared_in_order_of(quota.source).iter().position(|other| other == chosen),
        };
        candidate(request, *chosen, nth)
    };
    let candidates = choice.gpus.iter().map(planned).collect::<Result<Vec<_>, ResolveError>>()?;
    let gpus = || candidates.iter().map(|candidate| &candidate.gpu);
    // A node may have said that it opens a MIG device, of a GPU that isn't in MIG mode.
    if let Some(rule) = request.has_mig_alone
        && let Some(gpu) = gpus().find(|gpu| gpu.mig.is_none())
    {
        let by = format!("{} (GPU {})", request.brought_by, gpu.index);
        return Err(RequestError::QuotaRequiredOfBrought { by, rule }.into());
    }
    let is_whole = |gpu: &PlannedGpu| gpu.memory_limit_bytes.is_none();
    if gpus().all(is_whole) {
        caveats.quota_by = None;
    }
    let is_mixed = !is_default && gpus().any(is_whole);
    if let Some(listing) = request.selections.listing_variable().filter(|_| is_mixed) {
        caveats.unenforced_by = Some(listing.setting.to_string());
    }
    let places = candidates.into_iter().map(|candidate| vec![candidate]).collect();
    Ok(Proposal::new(rest(caveats), places, weight, Vec::new()))
}

/// The GPUs that can be chosen for each that a container wants, and the others, each with why it can't be.
fn places(
    request: &Request,
    inventory: &Inventory,
) -> Result<(Vec<Vec<Candidate>>, Vec<String>), ResolveError> {
    let mut counting = request.selections.counting();
    if let (Some((one, count)), Some((other, others))) = (counting.next(), counting.next())
        && count != others
    {
        let (one, other) = (one.clone(), other.clone());
        return Err(ResolveError::DifferentCounts { one, other });
    }
    let count = request.count().unwrap_or(1);
    let (usable, mut unusable) = choice::choosable(request, count, inventory)?;
    for quota in &request.quotas {
        quota_bytes::check_count(quota, count as usize)?;
    }
    let mut places = Vec::new();
    for nth in 0..count as usize {
        let mut candidates = Vec::new();
        let mut unfit = None;
        for chosen in &usable {
            let why = match candidate(request, *chosen, |_| Some(nth)) {
                Ok(candidate) => {
                    candidates.push(candidate);
                    continue;
                }
                Err(ResolveError::MoreThanGpu { gpu, total_mib, .. }) => {
                    format!("{gpu} has {total_mib} MiB in all")
                }
                Err(error) => unfit.get_or_insert(error).to_string(),
            };
            // Another GPU may do.
            if !unusable.contains(&why) {
                unusable.push(why);
            }
        }
        match unfit {
            Some(error) if candidates.is_empty() => return Err(error),
            _ => places.push(candidates),
        }
    }
    Ok((places, unusable))
}

/// `chosen` with the smallest quota on it, and none if the container's use of it is unlimited; `nth` is its place in
/// the order of a quota's source.
fn candidate(
    request: &Request,
    Chosen { gpu, mig }: Chosen<'_>,
    nth: impl Fn(&Quota) -> Option<usize>,
) -> Result<Candidate, ResolveError> {
    let mut smallest: Option<(u64, &Quota)> = None;
    let mut is_cut = false;
    for quota in &request.quotas {
        let Some(nth) = nth(quota) else { continue };
        is_cut |= quota_bytes::is_cut(quota, nth, gpu);
        if request.doubts_measure {
            quota_bytes::check_measure(quota, gpu)?;
        }
        let bytes = quota_bytes::limit_bytes(quota, nth, gpu)?;
        if smallest.is_none_or(|(other, _)| bytes < other) {
            smallest = Some((bytes, quota));
        }
    }
    let of_mig = mig.and_then(|mig| mib_to_bytes(mig.memory_mib));
    let planned = PlannedGpu {
        index: gpu.index,
        uuid: gpu.uuid.clone(),
        minor: gpu.minor,
        memory_total_bytes: of_mig.unwrap_or(gpu.memory_bytes),
        // NVML's value is the GPU's.
        memory_reserved_bytes: if mig.is_some() { 0 } else { gpu.reserved_bytes },
        memory_limit_bytes: smallest.map(|(bytes, _)| bytes),
        mig: mig.map(|mig| PlannedMig {
            index: mig.index,
            uuid: mig.uuid.clone(),
            instances: mig.instances(),
        }),
    };
    let quota_by = smallest.map(|(_, quota)| quota.memory.to_string());
    Ok(Candidate { gpu: planned, quota_by, is_cut })
}

/// The settings that ask for quotas.
fn quota_by(quotas: &[Quota]) -> Option<String> {
    let settings: Vec<String> = quotas.iter().map(|quota| quota.memory.to_string()).collect();
    (!settings.is_empty()).then(|| settings.join(", "))
}

/// The smallest weight asked for, where a quota that says nothing asks for 1.
fn weight(quotas: &[Quota], max_inst: u32) -> Result<WeightAsked, ResolveError> {
    let mut smallest = WeightAsked { number: None, share: None };
    for quota in quotas {
        let weights = &quota.shares.weights;
        if weights.is_empty() {
            smallest.number = Some(1);
        }
        for weight in weights {
            match weight.value {
                WeightValue::Number(value) => {
                    let value = u32::try_from(value).ok().filter(|&value| value <= max_inst);
                    let setting = || weight.setting.clone();
                    let value = value.ok_or_else(|| ResolveError::WeightTooHigh {
                        setting: setting(),
                        max_inst,
                    })?;
                    smallest.number = Some(smallest.number.map_or(value, |other| other.min(value)));
                }
                WeightValue::Share(hundredths) => {
                    let is_less =
                        smallest.share.as_ref().is_none_or(|share| hundredths < share.hundredths);
                    if is_less {
                        let setting = weight.setting.to_string();
                        smallest.share = Some(ShareAsked { hundredths, setting });
                    }
                }
            }
        }
    }
    Ok(smallest)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use std::collections::BTreeMap;

    use super::*;
    use crate::gpu::{Gpu, GpuState, MigDevice};
    use crate::plan::{Limits, Placement, Refusal};
    use crate::request::{
        self, Brought, BroughtGpu, BundleFacts, DefaultMemory, EntryPoint, MigInstance, Profile,
        Reaches, Rules, Trust, decide, testing,
    };
    use crate::units::{MIB, bytes_to_mib};

    const MAX_INST: u32 = 20;
    const OPEN: Rules<'_> = testing::RULES;
    const EXCLUSIVE: Rules<'_> = Rules { exclusive: true, ..OPEN };
    const QUOTAS_ONLY: Rules<'_> = Rules { require_quota: true, ..OPEN };
    const STRICT: Rules<'_> = Rules { profile: Profile::Strict, ..OPEN };

    /// One UUID each for eight GPUs; the last two begin alike.
    const UUIDS: [&str; 8] =
        ["GPU-a0", "GPU-b1", "GPU-c2", "GPU-d3", "GPU-e4", "GPU-f5", "GPU-66", "GPU-667"];

    fn gpu(index: u32, memory_mib: u64) -> Gpu {
        Gpu {
            index,
            uuid: UUIDS[index as usize].to_owned(),
            minor: 7 - index,
            bus_id: String::new(),
            name: String::new(),
            memory_bytes: memory_mib * MIB,
            reserved_bytes: 0,
            state: GpuState::Ok,
            mig_enabled: false,
            mig_devices: Vec::new(),
        }
    }

    fn host(memories_mib: &[u64]) -> Inventory {
        let gpus = (0..).zip(memories_mib).map(|(index, &mib)| gpu(index, mib)).collect();
        Inventory::new(gpus).unwrap()
    }

    /// Four GPUs of 15000 MiB, where 1 of 15 is 1000 MiB.
    fn four() -> Inventory {
        host(&[15000; 4])
    }

    /// GPU 0 is sound, GPU 1 lost, GPU 2 in MIG mode.
    fn ailing() -> Inventory {
        let lost = Gpu { state: GpuState::Lost, ..gpu(1, 15000) };
        let mig = Gpu { mig_enabled: true, ..gpu(2, 15000) };
        Inventory::new(vec![gpu(0, 15000), lost, mig]).unwrap()
    }

    /// What is decided of a bundle in few words: settings by the short names of [`SHORT`], and what was
    /// brought by `+node=0`, `+mig=0`, `+cdi=nvidia.com/gpu=0`, `+rule=0`, `+rule=*`, `+every` and `+hook`,
    /// NVIDIA's.
    fn decided(words: &[&str], rules: &Rules<'_>) -> Result<Option<Request>, String> {
        said(words, |said| {
            let decision = decide(said, rules).map_err(|error| error.to_string())?;
            Ok(decision.request().cloned())
        })
    }

    /// Lets `ask` have what the bundle of these words says.
    fn said<T>(words: &[&str], ask: impl FnOnce(&BundleFacts<'_>) -> T) -> T {
        let mut env = Vec::new();
        let mut annotations = Vec::new();
        let mut brought = Brought::default();
        for word in words {
            let (short, value) = word.split_once('=').unwrap_or((word, ""));
            match short {
                "+node" => {
                    brought.gpus.push(BroughtGpu::node(value.parse().unwrap(), "/dev/nvidiaN"))
                }
                "+cdi" => brought.gpus.extend(BroughtGpu::of_annotation("cdi.k8s.io/x", value)),
                "+rule" => brought.allowed.push(BroughtGpu::rule(value.parse().ok())),
                "+hook" => brought.nvidia_hook = true,
                "+mig" => brought
                    .mig
                    .push(MigInstance { gpu_minor: value.parse().unwrap(), instances: (1, 0) }),
                "+every" => brought.everything = Some("every device"),
                "+sandbox" => annotations.extend([
                    ("io.kubernetes.cri.container-type", "sandbox"),
                    ("io.kubernetes.cri.sandbox-id", "0123abcd"),
                    ("io.kubernetes.cri.sandbox-name", "web-0"),
                    ("io.kubernetes.cri.sandbox-namespace", "default"),
                ]),
                _ => {
                    let (_, name) = SHORT.iter().find(|(other, _)| *other == short).unwrap();
                    match short.starts_with('@') {
                        true => annotations.push((*name, value)),
                        false => env.push(format!("{name}={value}")),
                    }
                }
            }
        }
        let env: Vec<&str> = env.iter().map(String::as_str).collect();
        ask(&BundleFacts {
            env: &env,
            annotations: &annotations,
            id: Some("0123abcd"),
            brought: &brought,
            is_privileged: brought.everything.is_some(),
            reaches: &Reaches::default,
            entry: EntryPoint::Runtime,
            grant: None,
        })
    }

    /// What a bundle comes to; `None` if it is none of ours.
    fn outcome(
        words: &[&str],
        inventory: &Inventory,
        rules: &Rules<'_>,
    ) -> Result<Option<Plan>, String> {
        let Some(request) = decided(words, rules)? else { return Ok(None) };
        let proposal = resolve(&request, inventory, Kind::Gate, MAX_INST);
        let proposal = proposal.map_err(|error| error.to_string())?;
        on_empty_host(&proposal).map(Some).map_err(|error| error.to_string())
    }

    /// The plan if no container holds anything.
    fn on_empty_host(proposal: &Proposal) -> Result<Plan, Refusal> {
        proposal.place(&[], &LIMITS, Placement::Binpack)
    }

    /// Nothing of them is in the way of an empty host.
    const LIMITS: Limits = Limits {
        overcommit: 1.0,
        max_inst: MAX_INST,
        max_inst_of: BTreeMap::new(),
        policy: 1,
        policy_of: BTreeMap::new(),
        bounds_weights: true,
        exclusive: false,
    };

    fn plan_of(words: &[&str], inventory: &Inventory, rules: &Rules<'_>) -> Plan {
        match outcome(words, inventory, rules) {
            Ok(Some(plan)) => plan,
            other => panic!("{words:?}: {other:?}"),
        }
    }

    const SHORT: [(&str, &str); 21] = [
        ("memory", "CGPU_MEMORY"),
        ("gpus", "CGPU_GPUS"),
        ("limit", "NVIDIA_GPU_MEMORY_LIMIT"),
        ("cweight", "CGPU_WEIGHT"),
        ("@memory", "cgpu/memory"),
        ("@cgpus", "cgpu/gpus"),
        ("mem", "ALIYUN_COM_GPU_MEM_CONTAINER"),
        ("dev", "ALIYUN_COM_GPU_MEM_DEV"),
        ("unit", "ALIYUN_COM_GPU_MEM_UNIT"),
        ("weight", "ALIYUN_COM_GPU_SCHD_WEIGHT"),
        ("prio", "ALIYUN_COM_GPU_HIGH_PRIO"),
        ("aliyun", "ALIYUN_COM_GPU_VISIBLE_DEVICES"),
        ("nvidia", "NVIDIA_VISIBLE_DEVICES"),
        ("@mem", "aliyun.com/gpu-mem-container"),
        ("@dev", "aliyun.com/gpu-mem-dev"),
        ("@weight", "aliyun.com/gpu-schd-weight"),
        ("@prio", "aliyun.com/gpu-high-prio"),
        ("@gpus", "aliyun.com/gpu-visible-devices"),
        ("disable", "CGPU_DISABLE"),
        ("swarm", "DOCKER_RESOURCE_GPU"),
        ("cuda", "CUDA_VERSION"),
    ];

    /// Index and quota in MiB of each GPU of the plan.
    fn limits(plan: &Plan) -> Vec<(u32, Option<u64>)> {
        plan.gpus.iter().map(|g| (g.index, g.memory_limit_bytes.map(bytes_to_mib))).collect()
    }

    fn planned(words: &[&str], inventory: &Inventory) -> Vec<(u32, Option<u64>)> {
        limits(&plan_of(words, inventory, &OPEN))
    }

    fn refused_under(rules: &Rules<'_>, words: &[&str], inventory: &Inventory) -> String {
        match outcome(words, inventory, rules) {
            Err(error) => error,
            other => panic!("{words:?} should be refused, and is {other:?}"),
        }
    }

    fn refused(words: &[&str], inventory: &Inventory) -> String {
        refused_under(&OPEN, words, inventory)
    }

    /// The GPUs chosen where every GPU of [`four`] is shared under 3 of 15.
    fn chosen(words: &[&str]) -> Vec<u32> {
        let words = [&["mem=3", "dev=15"], words].concat();
        planned(&words, &four()).into_iter().map(|(index, _)| index).collect()
    }

    #[test]
    fn a_plan_says_all_that_inspect_shows() {
        let words = ["mem=4", "dev=15", "nvidia=1", "weight=2", "prio=1"];
        let plan = plan_of(&words, &host(&[1, 16130]), &OPEN);
        let gpu = PlannedGpu {
            index: 1,
            uuid: "GPU-b1".to_owned(),
            minor: 6,
            memory_total_bytes: 16130 * MIB,
            memory_reserved_bytes: 0,
            memory_limit_bytes: Some(4301 * MIB),
            mig: None,
        };
        assert_eq!(
            plan,
            Plan {
                backend: Kind::Gate,
                gpus: vec![gpu],
                weight: 2,
                high_priority: true,
                caveats: Caveats {
                    quota_by: Some("ALIYUN_COM_GPU_MEM_CONTAINER=4".to_owned()),
                    ..Caveats::default()
                }
            }
        );
    }

    #[test]
    fn the_quota_is_the_published_ratio() {
        for (total_mib, mem, dev, limit_mib) in [
            (16130, 2, 15, 2150),
            (16130, 4, 15, 4301),
            (15109, 6, 15, 6043),
            (15079, 3, 14, 3231),
            (16130, 15, 15, 16130),
            (16130, 4301, 16130, 4301),
        ] {
            let words = [format!("mem={mem}"), format!("dev={dev}")];
            let words = words.each_ref().map(String::as_str);
            assert_eq!(planned(&words, &host(&[total_mib])), [(0, Some(limit_mib))]);
        }
    }

    #[test]
    fn quota_is_a_ratio_of_each_gpus_memory() {
        assert_eq!(
            planned(&["mem=3", "dev=15"], &host(&[15000, 30000])),
            [(0, Some(3000)), (1, Some(6000))]
        );
    }

    /// Memory lists apply to GPUs as the interface says: the last value is also that of all GPUs
    /// after it.
    #[test]
    fn memory_lists_apply_to_gpus_as_documented() {
        for (memory, mib) in [
            ("mem=3", [3000, 3000, 3000, 3000]),
            ("mem=3,1", [3000, 1000, 1000, 1000]),
            ("mem=3,4,5,6", [3000, 4000, 5000, 6000]),
        ] {
            let expected: Vec<_> = (0..).zip(mib.map(Some)).collect();
            assert_eq!(planned(&[memory, "dev=15"], &four()), expected);
        }
    }

    /// A neutral quota is on one GPU with enough memory left, or on the GPUs that are named.
    #[test]
    fn neutral_quota_takes_fitting_or_named_gpus() {
        // GPU 1 is the smallest on which it fits.
        let host = || host(&[16_000, 8_000, 24_000, 3_000]);
        for (words, expected) in [
            (&["memory=4GiB"][..], &[(1, 4096)][..]),
            // The images of CUDA say so.
            (&["memory=4GiB", "nvidia=all"], &[(1, 4096)]),
            (&["memory=4GiB", "gpus=2"], &[(1, 4096), (0, 4096)]),
            (&["memory=4GiB", "gpus=count=2", "nvidia=all"], &[(1, 4096), (0, 4096)]),
            (&["memory=9GiB,2GiB", "gpus=2"], &[(0, 9216), (3, 2048)]),
            (&["memory=25%", "gpus=device=2,0"], &[(2, 6000), (0, 4000)]),
            (&["memory=1GiB", "gpus=all"], &[(0, 1024), (1, 1024), (2, 1024), (3, 1024)]),
            (&["memory=1GiB", "nvidia=2"], &[(2, 1024)]),
            (&["memory=1GiB", "aliyun=0,1"], &[(0, 1024), (1, 1024)]),
            (&["memory=1GiB", "@cgpus=device=3"], &[(3, 1024)]),
            (&["@mem=1", "@cgpus=device=3", "gpus=1", "nvidia=none"], &[(3, 1024)]),
            (&["memory=1GiB", "+node=5"], &[(2, 1024)]),
            (&["memory=1GiB", "gpus=1", "+node=5"], &[(2, 1024)]),
            (&["memory=1GiB", "gpus=1", "nvidia=2"], &[(2, 1024)]),
            (&["memory=1GiB", "gpus=device=2", "nvidia=GPU-c2"], &[(2, 1024)]),
            (&["@memory=1GiB"], &[(3, 1024)]),
            (&["limit=1024", "nvidia=all"], &[(0, 1024), (1, 1024), (2, 1024), (3, 1024)]),
            (&["limit=1024"], &[(3, 1024)]),
            (&["limit=9999", "nvidia=1"], &[(1, 8000)]),
            // The smallest holds on each GPU; Alibaba's names mean every GPU.
            (&["memory=2GiB", "mem=1", "dev=2"], &[(0, 2048), (1, 2048), (2, 2048), (3, 1500)]),
        ] {
            let expected: Vec<_> = expected.iter().map(|&(gpu, mib)| (gpu, Some(mib))).collect();
            assert_eq!(planned(words, &host()), expected, "{words:?}");
        }
        for (words, expected) in [
            (
                &["memory=1GiB", "gpus=4", "@cgpus=1"][..],
                "CGPU_GPUS=4 and cgpu/gpus=1 ask for different numbers of GPUs; let them agree, or leave one \
                 out",
            ),
            (
                &["memory=30GiB"],
                "no GPU with enough memory for CGPU_MEMORY=30GiB is left: GPU 0 (GPU-a0) has 16000 MiB in all; GPU 1 \
                 (GPU-b1) has 8000 MiB in all; GPU 2 (GPU-c2) has 24000 MiB in all; GPU 3 (GPU-d3) has 3000 \
                 MiB in all; ask for less, or stop containers (`cgpu ps` shows them)",
            ),
            (
                &["memory=4GiB", "gpus=device=3"],
                "CGPU_MEMORY=4GiB is more than can be had of GPU 3 (GPU-d3), 3000 MiB; ask for less, or for \
                 per cent as 100%",
            ),
            (
                &["memory=1GiB", "gpus=2", "nvidia=0"],
                "CGPU_GPUS=2 asks for another number of GPUs than there are by NVIDIA_VISIBLE_DEVICES=0: GPU \
                 0 (GPU-a0); let them agree, or leave one out",
            ),
            (
                &["memory=1GiB", "gpus=2", "+node=5"],
                "CGPU_GPUS=2 asks for another number of GPUs than there are by node /dev/nvidiaN: GPU 2 \
                 (GPU-c2); let them agree, or leave one out",
            ),
            (
                &["memory=1GiB", "gpus=device=1", "nvidia=0"],
                "NVIDIA_VISIBLE_DEVICES=0 and CGPU_GPUS=device=1 name different GPUs; name the same, or leave \
                 one of them out",
            ),
            (
                &["memory=1GiB", "gpus=5"],
                "5 GPUs are asked for (CGPU_GPUS=5), and this host can give 4: GPU 0 (GPU-a0), GPU 1 \
                 (GPU-b1), GPU 2 (GPU-c2), GPU 3 (GPU-d3)",
            ),
            (
                &["memory=1GiB,1GiB"],
                "CGPU_MEMORY=1GiB,1GiB has 2 values, more than the GPUs that are chosen (1); write one value for \
                 each, or say how many GPUs: CGPU_GPUS=2",
            ),
            (
                &["memory=1GiB", "gpus=0,1"],
                "CGPU_GPUS=0,1 is no choice of GPUs; write how many as 1, all, none, or names as device=0,1 or \
                 device=GPU-… (cgpu gpus shows them)",
            ),
        ] {
            assert_eq!(refused(words, &host()), expected, "{words:?}");
        }
        let by = |words: &[&str]| plan_of(words, &host(), &OPEN).caveats.quota_by.unwrap();
        assert_eq!(by(&["memory=4GiB"]), "CGPU_MEMORY=4GiB");
        assert_eq!(by(&["memory=4GiB", "limit=2048"]), "NVIDIA_GPU_MEMORY_LIMIT=2048");
        let both = by(&["memory=2GiB", "mem=1", "dev=2"]);
        assert_eq!(both, "CGPU_MEMORY=2GiB, ALIYUN_COM_GPU_MEM_CONTAINER=1");
    }

    /// A GPU that can give all of a size is chosen before one that can't.
    #[test]
    fn gpu_with_all_requested_memory_is_preferred() {
        let sizes = host(&[16_000, 8_000, 24_000, 3_000]);
        for words in [&["limit=20000"][..], &["mem=20", "gpus=1"]] {
            let limits = planned(words, &sizes);
            assert_eq!(limits.len(), 1);
            assert_eq!(limits[0].0, 2, "{words:?}");
        }
        let host_default = Rules { default_memory: DefaultMemory::Mib(20_000), ..OPEN };
        assert_eq!(limits(&plan_of(&["gpus=1"], &sizes, &host_default)), [(2, Some(20_000))]);
        // What the driver reserves can't be had.
        let mut gpus = sizes.gpus().to_vec();
        gpus[0].reserved_bytes = 512 * MIB;
        let keeping = Inventory::new(gpus).unwrap();
        assert_eq!(planned(&["memory=15900MiB"], &keeping), [(2, Some(15_900))]);
        assert_eq!(planned(&["memory=100%", "gpus=device=0"], &keeping), [(0, Some(15_488))]);
        assert_eq!(planned(&["memory=25%", "gpus=device=0"], &keeping), [(0, Some(3_872))]);
        assert!(refused(&["memory=15900MiB", "gpus=device=0"], &keeping).starts_with(
            "CGPU_MEMORY=15900MiB is more than can be had of GPU 0 (GPU-a0), 15488 MiB"
        ));
        // The documents' ratio is of all the GPU's memory.
        assert_eq!(planned(&["mem=15", "dev=15", "nvidia=0"], &keeping), [(0, Some(16_000))]);
        // One that doesn't do keeps none from another.
        let strict = ["mem=9", "dev=16", "gpus=1"];
        let plan = plan_of(&strict, &host(&[16_000, 24_000]), &STRICT);
        assert_eq!(limits(&plan), [(0, Some(9_000))]);
        assert!(outcome(&strict, &host(&[24_000]), &STRICT).is_err());
        // The amounts are in the order of the neutral choice.
        let order = ["memory=8GiB,1GiB", "gpus=device=0,1", "aliyun=1,0"];
        assert_eq!(planned(&order, &host(&[16_000, 16_000])), [(0, Some(8192)), (1, Some(1024))]);
    }

    /// The host's default quota is of GPUs that are named, and of no MIG device.
    #[test]
    fn host_default_skips_mig_and_unnamed_gpus() {
        let rules = Rules { default_memory: DefaultMemory::Mib(1_000), ..OPEN };
        let of = |words: &[&str], inventory: &Inventory| {
            outcome(words, inventory, &rules).unwrap().map(|plan| plan.to_string())
        };
        let shown = |text: &str| Some(text.to_owned());
        assert_eq!(of(&["nvidia=2,0"], &four()), shown("GPU 2 1000 MiB, GPU 0 1000 MiB"));
        assert_eq!(of(&["+node=5"], &four()), shown("GPU 2 1000 MiB"));
        assert_eq!(
            of(&["nvidia=0,1", "aliyun=1"], &four()),
            shown("GPU 0 1000 MiB, GPU 1 1000 MiB")
        );
        assert_eq!(of(&["mem=0", "nvidia=0"], &four()), shown("GPU 0 whole"));
        assert_eq!(of(&["disable=true", "nvidia=0"], &four()), shown("GPU 0 whole"));
        for nothing in [&["+rule=6"][..], &["+rule=*"], &["+every"], &["nvidia=void"], &[]] {
            let before = outcome(nothing, &four(), &OPEN).unwrap().map(|plan| plan.to_string());
            assert_eq!(of(nothing, &four()), before, "{nothing:?}");
        }
        assert_eq!(of(&["nvidia=1:0"], &with_mig()), shown("GPU 1:0 whole"));
        let mixed = of(&["nvidia=all"], &with_mig()).unwrap();
        assert!(mixed.contains("GPU 0 1000 MiB") && mixed.contains("GPU 1:0 whole"), "{mixed}");
        let shares = ["nvidia=0", "weight=4", "prio=1"];
        let plan = plan_of(&shares, &four(), &rules);
        assert_eq!((plan.weight, plan.high_priority), (4, true));
        assert_eq!(plan.caveats.quota_by.as_deref(), Some("admission.default_memory=1000MiB"));
        let unreadable = Rules { default_memory: DefaultMemory::Unreadable, ..OPEN };
        assert!(outcome(&["nvidia=0"], &four(), &unreadable).is_err());
        assert!(outcome(&["nvidia=0", "memory=1GiB"], &four(), &unreadable).is_ok());
        assert!(outcome(&["+node=5", "nvidia=void", "mem=0"], &four(), &unreadable).is_ok());
    }

    #[test]
    fn whole_gpus_are_chosen_by_number_too() {
        let words = |plan: Plan| (plan.to_string(), plan.caveats.quota_by);
        let two = plan_of(&["gpus=2"], &host(&[16_000, 8_000, 24_000]), &OPEN);
        assert_eq!(words(two), ("GPU 1 whole, GPU 0 whole".to_owned(), None));
        let one = plan_of(&["gpus=1", "nvidia=all"], &ailing(), &OPEN);
        assert_eq!(one.to_string(), "GPU 0 whole");
        assert!(
            refused(&["gpus=2"], &ailing())
                .contains("can give 1: GPU 0 (GPU-a0), GPU 1 (GPU-b1) is lost")
        );
        assert!(decided(&["gpus=1"], &QUOTAS_ONLY).is_err());
        assert!(decided(&["gpus=none"], &OPEN).unwrap().is_none());
    }

    #[test]
    fn nth_value_belongs_to_nth_requested_gpu() {
        assert_eq!(
            planned(&["mem=3,4,5", "dev=15", "nvidia=2,0,GPU-b1"], &four()),
            [(2, Some(3000)), (0, Some(4000)), (1, Some(5000))]
        );
    }

    #[test]
    fn gpu_named_twice_counts_once_at_first_position() {
        assert_eq!(
            planned(&["mem=3,4", "dev=15", "nvidia=1,gpu-B1,01,0,1"], &four()),
            [(1, Some(3000)), (0, Some(4000))]
        );
    }

    /// A memory list that is longer than the list of GPUs under its quota is refused.
    #[test]
    fn refuses_memory_list_longer_than_quota_gpus() {
        assert_eq!(
            refused(&["mem=3,4,5", "dev=15", "nvidia=1,GPU-b1,0"], &four()),
            "ALIYUN_COM_GPU_MEM_CONTAINER=3,4,5 has 3 values for 2 GPUs under a quota \
             (GPU 1 (GPU-b1), GPU 0 (GPU-a0)); write one value for each, or fewer"
        );
        assert_eq!(
            refused(&["mem=3,4", "dev=15", "aliyun=2", "nvidia=0,2"], &four()),
            "ALIYUN_COM_GPU_MEM_CONTAINER=3,4 has 2 values for 1 GPU under a quota \
             (GPU 2 (GPU-c2)); write one value for each, or fewer"
        );
    }

    /// Memory without a total is absolute, and at most the GPU's.
    #[test]
    fn memory_without_total_is_absolute_and_capped() {
        assert_eq!(planned(&["mem=3"], &host(&[16130])), [(0, Some(3072))]);
        assert_eq!(planned(&["mem=16"], &host(&[16130])), [(0, Some(16130))]);
        assert_eq!(planned(&["mem=3", "unit=128MiB"], &host(&[16130])), [(0, Some(384))]);
        assert_eq!(planned(&["mem=300", "unit=MiB"], &host(&[16130])), [(0, Some(300))]);
        let most = "18446744073709551615";
        let words = [format!("mem={most}"), format!("unit={most}MiB")];
        let words = words.each_ref().map(String::as_str);
        assert_eq!(planned(&words, &host(&[16130])), [(0, Some(16130))]);
    }

    #[test]
    fn refuses_a_quota_of_less_than_a_mib() {
        assert_eq!(
            refused(&["mem=1", "dev=20000"], &host(&[16130])),
            "ALIYUN_COM_GPU_MEM_CONTAINER=1 comes to 0 MiB of GPU 0 (GPU-a0); ask for more"
        );
    }

    /// Aliyun's selection has precedence over NVIDIA's, and both default to all GPUs.
    #[test]
    fn aliyun_selection_precedes_nvidia_and_defaults_to_all() {
        assert_eq!(chosen(&[]), [0, 1, 2, 3]);
        assert_eq!(chosen(&["nvidia=all"]), [0, 1, 2, 3]);
        assert_eq!(chosen(&["nvidia=2,0"]), [2, 0]);
        assert_eq!(chosen(&["aliyun=2,0"]), [2, 0]);
        assert_eq!(chosen(&["aliyun=all"]), [0, 1, 2, 3]);
        for beside in ["nvidia=all", "nvidia=none", "nvidia=void", "nvidia="] {
            assert_eq!(chosen(&["aliyun=3,1", beside]), [3, 1], "{beside}");
        }
        assert_eq!(chosen(&["aliyun=", "nvidia=1"]), [1]);
        assert_eq!(chosen(&["aliyun=2,0", "nvidia=0,2"]), [2, 0]);
        assert_eq!(chosen(&["aliyun=all", "nvidia=3,2,1,0"]), [0, 1, 2, 3]);
    }

    /// In mixed mode, the GPUs that NVIDIA's variable names next to the shared ones are unlimited.
    #[test]
    fn mixed_mode_leaves_nvidias_other_gpus_unlimited() {
        assert_eq!(
            planned(&["mem=3", "dev=15", "aliyun=2", "nvidia=0,1,2"], &four()),
            [(0, None), (1, None), (2, Some(3000))]
        );
        assert_eq!(
            planned(&["mem=3,4", "dev=15", "aliyun=3,0", "nvidia=GPU-a0,1,GPU-d3"], &four()),
            [(0, Some(4000)), (1, None), (3, Some(3000))]
        );
    }

    /// Mixed mode takes no GPU out of the quota of annotations.
    #[test]
    fn mixed_mode_lifts_no_quota_of_annotations() {
        let mixed = ["@dev=15", "aliyun=2", "nvidia=0,1,2"];
        for (words, limits) in [
            (&["@mem=3"][..], [(0, Some(3000)), (1, Some(3000)), (2, Some(3000))]),
            (&["@mem=5,4,3", "@gpus=2,1,0"], [(0, Some(3000)), (1, Some(4000)), (2, Some(5000))]),
            (&["@mem=3", "mem=1", "dev=15"], [(0, Some(3000)), (1, Some(3000)), (2, Some(1000))]),
        ] {
            assert_eq!(planned(&[&mixed, words].concat(), &four()), limits, "{words:?}");
        }
    }

    /// An NVIDIA list that lacks a GPU to share is refused.
    #[test]
    fn refuses_nvidia_list_without_a_shared_gpu() {
        assert_eq!(
            refused(&["mem=3", "dev=15", "aliyun=2", "nvidia=0,1"], &four()),
            "ALIYUN_COM_GPU_VISIBLE_DEVICES=2 means GPU 2 (GPU-c2), which \
             NVIDIA_VISIBLE_DEVICES=0,1 lacks; name it in both, \
             or leave NVIDIA_VISIBLE_DEVICES out"
        );
    }

    /// The annotation selects the GPUs if the variables leave that open.
    #[test]
    fn annotation_selects_gpus_if_variables_do_not() {
        assert_eq!(chosen(&["@gpus=2,1"]), [2, 1]);
        assert_eq!(chosen(&["@gpus=2,1", "nvidia=all"]), [2, 1]);
        assert_eq!(chosen(&["@gpus=2,1", "aliyun=all"]), [2, 1]);
        assert_eq!(chosen(&["@gpus=all"]), [0, 1, 2, 3]);
        assert_eq!(chosen(&["@gpus=all", "nvidia=1"]), [1]);
        assert_eq!(chosen(&["@gpus=", "nvidia=1"]), [1]);
        assert_eq!(
            planned(&["mem=3,4", "dev=15", "@gpus=2,1"], &four()),
            [(2, Some(3000)), (1, Some(4000))]
        );
    }

    #[test]
    fn annotation_must_agree_with_gpus_of_variables() {
        assert_eq!(chosen(&["@gpus=GPU-b1,2", "nvidia=2,1"]), [2, 1]);
        assert_eq!(
            planned(&["mem=3", "dev=15", "@gpus=2,1,0", "aliyun=2", "nvidia=0,1,2"], &four()),
            [(0, None), (1, None), (2, Some(3000))]
        );
        for (words, variable) in [
            (&["@gpus=1", "nvidia=2,1"][..], "NVIDIA_VISIBLE_DEVICES=2,1"),
            (&["@gpus=1", "nvidia=0"], "NVIDIA_VISIBLE_DEVICES=0"),
            (&["@gpus=1", "aliyun=0", "nvidia=all"], "ALIYUN_COM_GPU_VISIBLE_DEVICES=0"),
            (&["@gpus=1", "aliyun=1", "nvidia=0,1"], "NVIDIA_VISIBLE_DEVICES=0,1"),
        ] {
            let words = [&["mem=3", "dev=15"], words].concat();
            assert_eq!(
                refused(&words, &four()),
                format!(
                    "aliyun.com/gpu-visible-devices=1 and {variable} name different GPUs; \
                     name the same, or leave one of them out"
                )
            );
        }
        assert_eq!(
            refused(&["mem=3", "dev=15", "@gpus=none", "nvidia=0"], &four()),
            "aliyun.com/gpu-visible-devices=none selects no GPU, NVIDIA_VISIBLE_DEVICES=0 does; \
             let them agree, or leave one of them out"
        );
    }

    /// A quota does not end if one setting selects no GPU and another setting gets GPUs from other
    /// tools.
    #[test]
    fn contradictory_empty_selection_under_quota_is_refused() {
        for (words, nothing) in [
            (&["@mem=3", "aliyun=none", "nvidia=all"][..], "ALIYUN_COM_GPU_VISIBLE_DEVICES=none"),
            (&["mem=3", "@gpus=void", "nvidia=all"], "aliyun.com/gpu-visible-devices=void"),
        ] {
            assert_eq!(
                refused(words, &four()),
                format!(
                    "{nothing} selects no GPU, NVIDIA_VISIBLE_DEVICES=all does; \
                     let them agree, or leave one of them out"
                )
            );
        }
    }

    #[test]
    fn without_trust_in_variables_only_annotations_choose() {
        let env = ["NVIDIA_VISIBLE_DEVICES=0", "ALIYUN_COM_GPU_MEM_CONTAINER=1"];
        let trust = Trust { env: false, annotations: true };
        let rules = Rules { trust, ..OPEN };
        let resolved = |annotations: &[(&'static str, &'static str)]| {
            let decision = testing::decided(&env, annotations, &rules).unwrap();
            let request = decision.request().unwrap();
            let proposal = resolve(request, &host(&[16130, 16130]), Kind::Gate, MAX_INST).unwrap();
            limits(&on_empty_host(&proposal).unwrap())
        };
        let memory = ("aliyun.com/gpu-mem-container", "2");
        assert_eq!(resolved(&[memory]), [(0, Some(2048)), (1, Some(2048))]);
        assert_eq!(resolved(&[memory, ("aliyun.com/gpu-visible-devices", "1")]), [(1, Some(2048))]);
    }

    /// Of two quotas the smaller applies on each GPU, each quota in its own source's order.
    #[test]
    fn smaller_of_two_quotas_applies_per_gpu() {
        assert_eq!(
            planned(&["mem=3", "dev=15", "@mem=4,2", "@dev=15", "nvidia=1,0"], &four()),
            [(1, Some(3000)), (0, Some(2000))]
        );
        let words = ["mem=3,9", "dev=15", "@mem=4,2", "@dev=15", "nvidia=1,0", "@gpus=0,1"];
        assert_eq!(planned(&words, &four()), [(1, Some(2000)), (0, Some(4000))]);
        assert_eq!(
            refused(&["mem=3", "dev=15", "@mem=4,2", "@dev=15", "nvidia=1"], &four()),
            "aliyun.com/gpu-mem-container=4,2 has 2 values for 1 GPU under a quota \
             (GPU 1 (GPU-b1)); write one value for each, or fewer"
        );
    }

    /// Of two sources' weights the smaller applies, and high priority needs both sources.
    #[test]
    fn smaller_weight_applies_and_priority_needs_both_sources() {
        for (words, weight, high_priority) in [
            (&["mem=1", "weight=5", "prio=1"][..], 5, true),
            (&["mem=1"], 1, false),
            (&["mem=1", "@mem=1", "weight=5", "@weight=3", "prio=1", "@prio=1"], 3, true),
            (&["mem=1", "@mem=1", "weight=5", "prio=1", "@prio=0"], 1, false),
            (&["mem=1", "@mem=0", "weight=5", "@weight=3", "prio=1", "@prio=0"], 5, true),
            // Annotations without a quota complete what variables leave open.
            (&["mem=1", "@weight=3", "@prio=1"], 3, true),
            (&["mem=1", "weight=1", "prio=0", "@weight=3"], 1, false),
        ] {
            let plan = plan_of(words, &four(), &OPEN);
            assert_eq!((plan.weight, plan.high_priority), (weight, high_priority), "{words:?}");
        }
    }

    #[test]
    fn refuses_a_weight_above_max_inst() {
        assert_eq!(plan_of(&["mem=1", "weight=20"], &four(), &OPEN).weight, 20);
        for weight in ["21", "4294967297"] {
            assert_eq!(
                refused(&["mem=1", &format!("weight={weight}")], &four()),
                format!(
                    "ALIYUN_COM_GPU_SCHD_WEIGHT={weight} is out of range; \
                     write a weight of 1 to 20 (max_inst of this host)"
                )
            );
        }
        assert_eq!(
            refused(&["mem=1", "@mem=1", "@weight=21"], &four()),
            "aliyun.com/gpu-schd-weight=21 is out of range; \
             write a weight of 1 to 20 (max_inst of this host)"
        );
    }

    #[test]
    fn refuses_a_gpu_that_is_not_there() {
        for item in ["9", "4294967296", "GPU-a00", "GPU-ä"] {
            assert_eq!(
                refused(&["mem=3", &format!("nvidia=0,{item}")], &host(&[1000, 1000])),
                format!(
                    "NVIDIA_VISIBLE_DEVICES={}: this host has no GPU {}; it has \
                     GPU 0 (GPU-a0), GPU 1 (GPU-b1) (cgpu gpus shows them)",
                    request::Quoted(&format!("0,{item}")),
                    request::Quoted(item),
                )
            );
        }
        assert_eq!(
            refused(&["mem=3", "nvidia=0"], &host(&[])),
            "NVIDIA_VISIBLE_DEVICES=0: this host has no GPU 0; it has none (cgpu gpus shows them)"
        );
    }

    #[test]
    fn a_uuid_that_no_gpu_has_was_replaced() {
        let uuid = "GPU-c09d11f5-0000-4000-8000-00000000abcd";
        let expected = |what: &str| {
            format!(
                "NVIDIA_VISIBLE_DEVICES={uuid}: {what}; it has GPU 0 (GPU-a0) (cgpu gpus shows them); \
                 create the container again with the UUID or the index of one of them"
            )
        };
        assert_eq!(
            refused(&["mem=3", &format!("nvidia={uuid}")], &host(&[1000])),
            expected(&format!(
                "this host has no GPU {uuid}: it was replaced or removed, or is another host's"
            ))
        );
        let had = ResolveError::GoneGpu {
            said: format!("NVIDIA_VISIBLE_DEVICES={uuid}"),
            item: uuid.to_owned(),
            known: vec!["GPU 0 (GPU-a0)".to_owned()],
            had_before: true,
        };
        assert_eq!(
            had.to_string(),
            expected(&format!(
                "this container had GPU {uuid} before, which this host no longer has: it was replaced \
                 or removed"
            ))
        );
        for other in
            ["GPU-c09d11f5-0000-4000-8000-00000000abc", "GPU-x09d11f5-0000-4000-8000-00000000abcd"]
        {
            let reported = refused(&["mem=3", &format!("nvidia={other}")], &host(&[1000]));
            assert!(reported.ends_with("(cgpu gpus shows them)"), "{reported}");
        }
    }

    #[test]
    fn uuid_prefix_must_name_exactly_one_gpu() {
        let eight = host(&[15000; 8]);
        let index = |name: &str| planned(&["mem=3", &format!("nvidia={name}")], &eight)[0].0;
        assert_eq!(index("GPU-a"), 0);
        assert_eq!(index("gpu-E4"), 4);
        assert_eq!(index("GPU-66"), 6, "a full UUID is that GPU");
        assert_eq!(index("GPU-667"), 7);
        assert_eq!(
            refused(&["mem=3", "nvidia=GPU-6"], &eight),
            "NVIDIA_VISIBLE_DEVICES=GPU-6: GPU-6 can mean GPU 6 (GPU-66), GPU 7 (GPU-667); \
             write more of the UUID"
        );
    }

    #[test]
    fn all_means_the_gpus_that_can_be_given() {
        assert_eq!(planned(&["mem=3"], &ailing()), [(0, Some(3072))]);
        assert_eq!(planned(&["mem=3", "nvidia=all"], &ailing()), [(0, Some(3072))]);
        let none = Inventory::new(ailing().gpus()[1..].to_vec()).unwrap();
        assert_eq!(
            refused(&["mem=3", "nvidia=all"], &none),
            "this host has no GPU to give: GPU 1 (GPU-b1) is lost, GPU 2 (GPU-c2) is in MIG mode \
             (cgpu gpus shows them)"
        );
        assert_eq!(
            refused(&["mem=3"], &host(&[])),
            "this host has no GPU to give: none was found (cgpu gpus --refresh looks again)"
        );
    }

    #[test]
    fn refuses_lost_gpu_and_gpu_in_mig_mode() {
        assert_eq!(
            refused(&["mem=3", "aliyun=1"], &ailing()),
            "ALIYUN_COM_GPU_VISIBLE_DEVICES=1: GPU 1 (GPU-b1) is lost, it fell off the bus; \
             name another GPU (cgpu gpus shows them), or restart the host"
        );
        assert_eq!(
            refused(&["mem=3", "nvidia=0,2"], &ailing()),
            "NVIDIA_VISIBLE_DEVICES=0,2: GPU 2 (GPU-c2) is in MIG mode and can be used through \
             its MIG devices only; name another GPU (cgpu gpus shows them), \
             or switch the mode off (nvidia-smi -mig 0)"
        );
    }

    #[test]
    fn refuses_a_mig_device_under_a_quota() {
        for name in ["MIG-5c1b", "MIG-GPU-a0/1/0", "0:1"] {
            assert_eq!(
                refused(&["mem=3", &format!("nvidia={name}")], &four()),
                format!(
                    "NVIDIA_VISIBLE_DEVICES={name}: MIG device {name} can't be under the quota of \
                     ALIYUN_COM_GPU_MEM_CONTAINER=3, it has memory of its own; \
                     name whole GPUs (cgpu gpus shows them), or ask for no quota"
                )
            );
        }
    }

    #[test]
    fn refuses_what_is_no_list_of_gpus() {
        assert_eq!(
            refused(&["mem=3", "nvidia=0,,1"], &four()),
            "NVIDIA_VISIBLE_DEVICES=0,,1: \"\" is no name of a GPU; write indices as 0,1 \
             or UUIDs as GPU-… (cgpu gpus shows them)"
        );
        assert_eq!(
            refused(&["mem=3", "aliyun=\u{fffd}"], &four()),
            "ALIYUN_COM_GPU_VISIBLE_DEVICES=\"\\u{fffd}\" is no text: \
             it has control characters, or bytes that are not UTF-8; \
                     write it anew in plain characters"
        );
    }

    /// If `exclusive` is configured, containers without a quota are planned on exclusive GPUs.
    #[test]
    fn exclusive_rule_gives_unlimited_containers_exclusive_gpus() {
        for (words, gpus) in [
            (&["nvidia=all"][..], vec![0, 1, 2, 3]),
            (&["nvidia=3,1"], vec![3, 1]),
            (&["aliyun=3", "nvidia=all"], vec![3]),
            (&["aliyun=3", "nvidia=0,3"], vec![0, 3]),
            (&["mem=0", "weight=x", "nvidia=1"], vec![1]),
            (&["nvidia=all", "@gpus=2"], vec![2]),
        ] {
            let plan = plan_of(words, &four(), &EXCLUSIVE);
            let expected: Vec<_> = gpus.into_iter().map(|index| (index, None)).collect();
            assert_eq!(limits(&plan), expected, "{words:?}");
            assert_eq!((plan.weight, plan.high_priority), (1, false));
        }
    }

    /// GPU 0 without MIG; GPU 1 with two devices; GPU 2 lost with one.
    fn with_mig() -> Inventory {
        let device = |index, uuid: &str, instances: Option<(u32, u32)>| MigDevice {
            index,
            uuid: uuid.to_owned(),
            memory_mib: 4864,
            gpu_instance: instances.map(|(gpu, _)| gpu),
            compute_instance: instances.map(|(_, compute)| compute),
        };
        let with = |gpu: Gpu, mig_devices| Gpu { mig_enabled: true, mig_devices, ..gpu };
        let devices = vec![device(0, "MIG-5c1b", Some((1, 0))), device(3, "MIG-GPU-b1/7/0", None)];
        let lost = Gpu { state: GpuState::Lost, ..gpu(2, 15000) };
        Inventory::new(vec![
            gpu(0, 15000),
            with(gpu(1, 15000), devices),
            with(lost, vec![device(0, "MIG-lost", None)]),
        ])
        .unwrap()
    }

    /// MIG devices are given without a limit, by all of their names.
    #[test]
    fn mig_devices_are_given_unlimited_by_any_name() {
        for (words, given) in [
            (&["nvidia=MIG-5c1b"][..], &["1:0 MIG-5c1b"][..]),
            (&["nvidia=mig-5C1B,1:0"], &["1:0 MIG-5c1b"]),
            (&["nvidia=1:3"], &["1:3 MIG-GPU-b1/7/0"]),
            (&["nvidia=MIG-GPU-b1/7/0"], &["1:3 MIG-GPU-b1/7/0"]),
            (&["nvidia=MIG-GPU-b1/1/0"], &["1:0 MIG-5c1b"]),
            (&["nvidia=1:3,0,1:0"], &["1:3 MIG-GPU-b1/7/0", "0 GPU-a0", "1:0 MIG-5c1b"]),
            (&["nvidia=mig-all"], &["1:0 MIG-5c1b", "1:3 MIG-GPU-b1/7/0"]),
            (&["nvidia=all"], &["0 GPU-a0", "1:0 MIG-5c1b", "1:3 MIG-GPU-b1/7/0"]),
            (&["@gpus=1:0"], &["1:0 MIG-5c1b"]),
            (&["nvidia=all", "@gpus=1:0"], &["1:0 MIG-5c1b"]),
            (&["aliyun=1:0", "nvidia=all"], &["1:0 MIG-5c1b"]),
        ] {
            for rules in [OPEN, EXCLUSIVE] {
                let plan = plan_of(words, &with_mig(), &rules);
                let name = |gpu: &PlannedGpu| format!("{} {}", gpu.given_index(), gpu.given_uuid());
                assert_eq!(plan.gpus.iter().map(name).collect::<Vec<_>>(), given, "{words:?}");
                assert!(plan.is_whole());
            }
        }
        let plan = plan_of(&["nvidia=1:0"], &with_mig(), &OPEN);
        let PlannedGpu { index, ref uuid, minor, memory_total_bytes, ref mig, .. } = plan.gpus[0];
        assert_eq!((index, uuid.as_str(), minor), (1, "GPU-b1", 6));
        assert_eq!(memory_total_bytes, 4864 * MIB);
        assert_eq!(mig.as_ref().unwrap().instances, Some((1, 0)));
        assert_eq!(plan.to_string(), "GPU 1:0 whole");
    }

    /// A MIG device that does not exist is refused with a list of those that do.
    #[test]
    fn missing_mig_device_refusal_lists_existing_ones() {
        let known = "1:0 (MIG-5c1b), 1:3 (MIG-GPU-b1/7/0), 2:0 (MIG-lost) (cgpu gpus shows them)";
        for name in ["MIG-5c1c", "MIG-5c", "1:1", "0:0", "MIG-GPU-b1/1/1", "MIG-GPU-a0/1/0"] {
            assert_eq!(
                refused_under(&OPEN, &[&format!("nvidia=0,{name}")], &with_mig()),
                format!(
                    "NVIDIA_VISIBLE_DEVICES=0,{name}: this host has no MIG device {name}; there \
                     are: {known}"
                )
            );
        }
        assert_eq!(
            refused_under(&OPEN, &["nvidia=mig-all"], &four()),
            "NVIDIA_VISIBLE_DEVICES=mig-all: this host has no MIG device mig-all; there are: none \
             (`nvidia-smi mig -cgi PROFILE -C` makes some, `cgpu gpus --refresh` looks again)"
        );
        assert_eq!(
            refused_under(&OPEN, &["nvidia=1"], &with_mig()),
            format!(
                "NVIDIA_VISIBLE_DEVICES=1: GPU 1 (GPU-b1) is in MIG mode and can be used through \
                 its MIG devices only; name some of them: {known}"
            )
        );
        let lost = refused_under(&OPEN, &["nvidia=2:0"], &with_mig());
        assert!(lost.contains("GPU 2 (GPU-c2) is lost"), "{lost}");
    }

    /// A MIG device is a part with memory of its own.
    #[test]
    fn require_quota_is_met_by_mig_devices_alone() {
        for rules in [QUOTAS_ONLY, STRICT] {
            assert_eq!(plan_of(&["nvidia=1:0"], &with_mig(), &rules).gpus.len(), 1);
            for words in [&["nvidia=1:0,0"][..], &["nvidia=all"], &["aliyun=1:0", "nvidia=0,1:0"]] {
                let error = refused_under(&rules, words, &with_mig());
                assert!(error.contains("without a quota"), "{error}");
            }
        }
    }

    #[test]
    fn require_quota_refuses_gpus_without_one() {
        assert_eq!(
            refused_under(&QUOTAS_ONLY, &["nvidia=all"], &four()),
            "NVIDIA_VISIBLE_DEVICES=all asks for GPUs without a quota, which this host refuses \
             (require_quota); ask for a part with ALIYUN_COM_GPU_MEM_CONTAINER and \
             ALIYUN_COM_GPU_MEM_DEV, or take the GPUs away with NVIDIA_VISIBLE_DEVICES=void"
        );
        assert_eq!(
            refused_under(&QUOTAS_ONLY, &["+node=1"], &four()),
            "this host refuses GPUs without a quota (require_quota), and this container gets some by \
             node /dev/nvidiaN; ask for a part with ALIYUN_COM_GPU_MEM_CONTAINER and \
             ALIYUN_COM_GPU_MEM_DEV, or start it without them"
        );
        for rules in [QUOTAS_ONLY, STRICT] {
            assert_eq!(
                refused_under(&rules, &["mem=3", "aliyun=2", "nvidia=0,2"], &four()),
                "NVIDIA_VISIBLE_DEVICES=0,2 asks for GPU 0 (GPU-a0) without a quota beside those with \
                 one, which is refused in Kubernetes and on hosts with require_quota, profile = \
                 \"strict\" or accept_nvidia_visible_devices_envvar_when_unprivileged = false; name \
                 it in ALIYUN_COM_GPU_VISIBLE_DEVICES=2 too, or take it out"
            );
            assert_eq!(
                refused_under(&rules, &["mem=3", "aliyun=none", "nvidia=all"], &four()),
                "ALIYUN_COM_GPU_VISIBLE_DEVICES=none selects no GPU, NVIDIA_VISIBLE_DEVICES=all does; \
                 let them agree, or leave one of them out"
            );
            assert_eq!(
                limits(&plan_of(&["mem=3", "nvidia=0"], &four(), &rules)),
                [(0, Some(3072))]
            );
        }
    }

    /// GPUs that the engine brought are identified by minor number and by name.
    #[test]
    fn engine_gpus_are_identified_by_minor_and_name() {
        // Minor numbers count down, indices up.
        assert_eq!(planned(&["+node=7", "+node=5", "+node=7"], &four()), [(0, None), (2, None)]);
        assert_eq!(planned(&["mem=3", "dev=15", "+node=6"], &four()), [(1, Some(3000))]);
        let by_name = ["+cdi=nvidia.com/gpu=2,nvidia.com/gpu=GPU-a0"];
        assert_eq!(planned(&by_name, &four()), [(2, None), (0, None)]);
        // The engine has turned the name into a node, or NVIDIA's runtime brings more by it.
        let beside_a_node = |cdi| planned(&[cdi, "+node=7"], &four());
        assert_eq!(beside_a_node("+cdi=nvidia.com/gpu=0"), [(0, None)]);
        assert_eq!(beside_a_node("+cdi=nvidia.com/gpu=2"), [(0, None), (2, None)]);
        assert_eq!(beside_a_node("+cdi=k8s.gpu.nvidia.com/claim=mine-0"), [(0, None)]);
        assert_eq!(planned(&["+rule=4"], &four()), [(3, None)]);
        assert_eq!(planned(&["+rule=*"], &four()).len(), 4);
        assert_eq!(
            refused(&["mem=3", "+node=9"], &host(&[15000])),
            "node /dev/nvidiaN: this host has no such GPU; it has GPU 0 (GPU-a0) (cgpu gpus shows them)"
        );
        assert_eq!(
            refused(&["mem=3", "+cdi=nvidia.com/gpu=mine"], &host(&[15000])),
            "the annotation cdi.k8s.io/x: this host has no such GPU; it has GPU 0 (GPU-a0) \
             (cgpu gpus shows them)"
        );
        let lost = refused(&["mem=3", "+node=6"], &ailing());
        assert!(lost.starts_with("node /dev/nvidiaN: GPU 1 (GPU-b1) is lost"), "{lost}");
    }

    /// GPUs that the engine brought are refused under a quota if they differ from the named ones.
    #[test]
    fn engine_gpus_differing_from_named_are_refused() {
        let quota = ["mem=3", "dev=15"];
        for (words, limits) in [
            (&["nvidia=1", "+node=6"][..], vec![(1, Some(3000))]),
            (&["aliyun=1,0", "+node=6", "+node=7"], vec![(1, Some(3000)), (0, Some(3000))]),
            (&["@gpus=1", "+node=6"], vec![(1, Some(3000))]),
            // A mixed container's, all of them.
            (&["aliyun=1", "nvidia=0,1", "+node=6", "+node=7"], vec![(0, None), (1, Some(3000))]),
        ] {
            assert_eq!(planned(&[&quota, words].concat(), &four()), limits, "{words:?}");
        }
        for words in [
            &["nvidia=0", "+node=6"][..],
            &["nvidia=0,1", "+node=6"],
            &["nvidia=1", "+node=6", "+node=7"],
            &["@gpus=0", "+node=6"],
        ] {
            let error = refused(&[&quota, words].concat(), &four());
            assert!(error.contains("and the engine brought GPU 1 (GPU-b1)"), "{error}");
        }
        assert_eq!(
            refused(&["mem=3", "nvidia=0", "+node=6"], &four()),
            "NVIDIA_VISIBLE_DEVICES=0 means GPU 0 (GPU-a0), and the engine brought GPU 1 (GPU-b1) \
             (node /dev/nvidiaN); name the same, or leave one of them out"
        );
    }

    /// A GPU in MIG mode that the engine brought counts by the MIG devices that came with it.
    #[test]
    fn engine_gpu_in_mig_mode_counts_by_devices() {
        // GPU 1 has the minor number 6.
        let mut request = decided(&["+node=6"], &OPEN).unwrap().unwrap();
        let plan = |request: &Request| {
            let proposal = resolve(request, &with_mig(), Kind::None, MAX_INST).unwrap();
            on_empty_host(&proposal).unwrap()
        };
        assert_eq!(plan(&request).gpus, []);
        request.mig = vec![request::MigInstance { gpu_minor: 6, instances: (1, 0) }];
        assert_eq!(plan(&request).to_string(), "GPU 1:0 whole");
        let error = refused(&["mem=3", "+node=6"], &with_mig());
        assert!(error.starts_with("node /dev/nvidiaN: GPU 1 (GPU-b1) is in MIG mode"), "{error}");
    }

    #[test]
    fn swarms_choice_agrees_with_the_others() {
        let swarms = ["DOCKER_RESOURCE_*".to_owned()];
        let rules = Rules { resource_variables: &swarms, ..OPEN };
        let limits = |words: &[&str]| limits(&plan_of(words, &four(), &rules));
        assert_eq!(limits(&["mem=3", "dev=15", "swarm=GPU-b1", "nvidia=all"]), [(1, Some(3000))]);
        assert_eq!(limits(&["swarm=GPU-b1,GPU-a0"]), [(1, None), (0, None)]);
        assert_eq!(limits(&["mem=3", "dev=15", "swarm=GPU-b1", "aliyun=1"]), [(1, Some(3000))]);
        assert_eq!(
            refused_under(&rules, &["mem=3", "swarm=GPU-b1", "nvidia=0"], &four()),
            "NVIDIA_VISIBLE_DEVICES=0 and DOCKER_RESOURCE_GPU=GPU-b1 name different GPUs; name the \
             same, or leave one of them out"
        );
        assert_eq!(limits(&["mem=3", "dev=15", "swarm=GPU-b1", "nvidia=1"]), [(1, Some(3000))]);
        assert_eq!(limits(&["mem=3", "dev=15", "swarm=GPU-b1", "aliyun=all"]), [(1, Some(3000))]);
        assert_eq!(
            refused_under(&rules, &["mem=3", "swarm=GPU-b1", "aliyun=0"], &four()),
            "ALIYUN_COM_GPU_VISIBLE_DEVICES=0 and DOCKER_RESOURCE_GPU=GPU-b1 name different GPUs; \
             name the same, or leave one of them out"
        );
    }

    /// What a bundle comes to, in a line.
    fn line(words: &[&str], rules: &Rules<'_>) -> String {
        let request = match decided(words, rules) {
            Ok(Some(request)) => request,
            Ok(None) => return "untouched".to_owned(),
            Err(_) => return "refused".to_owned(),
        };
        let Ok(proposal) = resolve(&request, &four(), Kind::Gate, MAX_INST) else {
            return "refused".to_owned();
        };
        let plan = on_empty_host(&proposal).unwrap();
        let as_brought = if request.is_as_brought() { ", as brought" } else { "" };
        let unenforced = if plan.caveats.unenforced_by.is_some() { ", unenforced" } else { "" };
        format!("{plan}{as_brought}{unenforced}")
    }

    /// One bundle for each row of the table, and what comes of it on four GPUs of 15000 MiB under `open`
    /// and `strict`. The GPU with index 2 has the minor number 5.
    const CASES: &[(&[&str], &str, &str)] = &[
        (&["mem=3", "dev=15", "nvidia=2", "+node=5"], "GPU 2 3000 MiB", "GPU 2 3000 MiB"),
        (&["mem=3", "dev=15", "nvidia=2", "+node=6"], "refused", "refused"),
        (&["mem=3", "dev=15", "nvidia=2"], "GPU 2 3000 MiB", "GPU 2 3000 MiB"),
        (&["mem=3", "dev=15", "nvidia=2", "+every"], "GPU 2 3000 MiB", "GPU 2 3000 MiB"),
        (&["mem=3", "dev=15", "nvidia=2", "+rule=*"], "GPU 2 3000 MiB", "GPU 2 3000 MiB"),
        (
            &["mem=3", "dev=15", "nvidia=2", "+cdi=nvidia.com/gpu=all"],
            "GPU 2 3000 MiB",
            "GPU 2 3000 MiB",
        ),
        (
            &["mem=3", "dev=15", "nvidia=void", "+cdi=nvidia.com/gpu=2"],
            "GPU 2 3000 MiB",
            "GPU 2 3000 MiB",
        ),
        (&["mem=3", "dev=15", "nvidia=void", "+node=5"], "GPU 2 3000 MiB", "GPU 2 3000 MiB"),
        (&["mem=3", "dev=15", "nvidia=none", "+node=5"], "GPU 2 3000 MiB", "GPU 2 3000 MiB"),
        (&["mem=3", "dev=15", "nvidia=", "+node=5"], "GPU 2 3000 MiB", "GPU 2 3000 MiB"),
        (&["@mem=3", "@dev=15", "nvidia=void", "+node=5"], "GPU 2 3000 MiB", "GPU 2 3000 MiB"),
        (&["mem=3", "dev=15", "+node=5"], "GPU 2 3000 MiB", "GPU 2 3000 MiB"),
        (&["mem=3", "dev=15", "nvidia=all", "+node=5"], "GPU 2 3000 MiB", "GPU 2 3000 MiB"),
        (
            &["mem=3", "dev=15"],
            "GPU 0 3000 MiB, GPU 1 3000 MiB, GPU 2 3000 MiB, GPU 3 3000 MiB",
            "GPU 0 3000 MiB, GPU 1 3000 MiB, GPU 2 3000 MiB, GPU 3 3000 MiB",
        ),
        (&["memory=2000MiB"], "GPU 0 2000 MiB", "GPU 0 2000 MiB"),
        (&["memory=2000MiB", "nvidia=all", "+every"], "GPU 0 2000 MiB", "GPU 0 2000 MiB"),
        (&["memory=2000MiB", "gpus=1", "+node=5"], "GPU 2 2000 MiB", "GPU 2 2000 MiB"),
        (
            &["memory=2GiB", "gpus=2", "disable=true"],
            "GPU 0 whole, GPU 1 whole, unenforced",
            "refused",
        ),
        (&["memory=0", "gpus=1", "+node=5"], "GPU 2 whole, unenforced", "refused"),
        (&["gpus=2"], "GPU 0 whole, GPU 1 whole", "refused"),
        (&["gpus=1", "+node=5"], "GPU 2 whole", "refused"),
        (&["mem=3", "dev=15", "nvidia=void", "+every"], "refused", "refused"),
        (&["mem=3", "dev=15", "nvidia=void", "+rule=*"], "refused", "refused"),
        (&["mem=3", "dev=15", "nvidia=void"], "untouched", "untouched"),
        (&["mem=3", "dev=15", "disable=true", "nvidia=2"], "GPU 2 whole, unenforced", "refused"),
        (&["mem=0", "nvidia=2"], "GPU 2 whole, unenforced", "refused"),
        (&["mem=", "nvidia=2"], "GPU 2 whole, unenforced", "refused"),
        (&["mem=0", "nvidia=2", "+node=6"], "GPU 2 whole, GPU 1 whole, unenforced", "refused"),
        (&["mem=0", "nvidia=all", "+node=6"], "GPU 1 whole, unenforced", "refused"),
        (
            &["mem=3", "disable=true", "nvidia=all"],
            "GPU 0 whole, GPU 1 whole, GPU 2 whole, GPU 3 whole, unenforced",
            "refused",
        ),
        (
            &["mem=3", "disable=true", "nvidia=void", "+node=6"],
            "GPU 1 whole, as brought, unenforced",
            "refused",
        ),
        (
            &["mem=3", "disable=true", "+every"],
            "GPU 0 whole, GPU 1 whole, GPU 2 whole, GPU 3 whole, as brought, unenforced",
            "refused",
        ),
        (&["mem=3", "disable=true"], "untouched", "untouched"),
        (&["mem=3", "disable=true", "nvidia=none"], "no GPU", "no GPU"),
        (&["nvidia=2"], "GPU 2 whole", "refused"),
        (&["nvidia=2", "+node=6"], "GPU 2 whole, GPU 1 whole", "refused"),
        (&["nvidia=all", "+node=6"], "GPU 1 whole", "refused"),
        (&["nvidia=all"], "GPU 0 whole, GPU 1 whole, GPU 2 whole, GPU 3 whole", "refused"),
        (&["nvidia=void", "+node=6"], "GPU 1 whole, as brought", "refused"),
        (&["+node=6"], "GPU 1 whole, as brought", "refused"),
        (&["+rule=6"], "GPU 1 whole, as brought", "refused"),
        (&["nvidia=void", "+node=6", "+mig=6"], "GPU 1 whole, as brought", "refused"),
        (
            &["cuda=9.0", "+hook"],
            "GPU 0 whole, GPU 1 whole, GPU 2 whole, GPU 3 whole, as brought",
            "refused",
        ),
        (&["cuda=9.0"], "untouched", "untouched"),
        (&["mem=3", "dev=15", "aliyun=void", "cuda=9.0", "+hook"], "refused", "refused"),
        (&["nvidia=none"], "no GPU", "no GPU"),
        (&["nvidia=none", "+every"], "no GPU", "no GPU"),
        (&["nvidia=void"], "untouched", "untouched"),
        (&["+every"], "untouched", "untouched"),
        (&[], "untouched", "untouched"),
        (&["+sandbox", "@mem=3"], "untouched", "untouched"),
        (&["+sandbox", "@mem=3", "+every"], "untouched", "untouched"),
        (&["+sandbox", "@mem=3", "+node=6"], "refused", "refused"),
        (&["+sandbox", "@mem=3", "nvidia=all"], "refused", "refused"),
    ];

    /// Bundles whose variables don't count.
    const UNTRUSTED_CASES: &[(&[&str], &str)] = &[
        (&["mem=3", "@gpus=1"], "refused"),
        (&["mem=3", "+node=6"], "refused"),
        (&["mem=3", "+every"], "refused"),
        (&["mem=3", "nvidia=0"], "untouched"),
        // NVIDIA's hook trusts them.
        (&["mem=3", "nvidia=0", "+hook"], "refused"),
        (&["nvidia=0", "+hook"], "GPU 0 whole, as brought"),
        (&["@mem=3", "@dev=15", "@gpus=void", "nvidia=0", "+hook"], "refused"),
        (&["@mem=3", "@dev=15", "@gpus=1", "nvidia=0", "+hook"], "GPU 1 3000 MiB"),
        (&["mem=3", "@mem=4", "@dev=15", "+node=6"], "GPU 1 4000 MiB"),
        (&["mem=0", "+node=6"], "GPU 1 whole, as brought"),
        (&["mem=3", "disable=true", "+node=6"], "refused"),
    ];

    #[test]
    fn the_table_is_what_becomes_of_bundles() {
        let mut seen = vec![false; request::decision_table::ROWS.len()];
        let mut note = |words: &[&str], rules: &Rules<'_>| {
            if let Some(row) = said(words, |said| testing::row(said, rules)) {
                seen[row] = true;
            }
        };
        for (words, open, strict) in CASES {
            assert_eq!(line(words, &OPEN), *open, "{words:?}");
            assert_eq!(line(words, &STRICT), *strict, "{words:?} under strict");
            note(words, &OPEN);
        }
        let trust = Trust { env: false, annotations: true };
        let rules = Rules { trust, ..OPEN };
        for (words, expected) in UNTRUSTED_CASES {
            assert_eq!(line(words, &rules), *expected, "{words:?}");
            note(words, &rules);
        }
        let unseen: Vec<_> = (0..seen.len()).filter(|row| !seen[*row]).collect();
        assert_eq!(unseen, [0; 0], "rows without a case");
    }

    #[test]
    fn under_strict_an_image_makes_no_amount_larger() {
        for (words, expected) in [
            // A user's 3, and what an image adds.
            (&["mem=3", "nvidia=0"][..], "GPU 0 3072 MiB"),
            (&["mem=3", "nvidia=0", "dev=3"], "refused"),
            (&["mem=3", "nvidia=0", "dev=13"], "refused"),
            (&["mem=3", "nvidia=0", "dev=14"], "GPU 0 3214 MiB"),
            (&["mem=3", "nvidia=0", "unit=65536MiB"], "refused"),
            (&["mem=3", "nvidia=0", "unit=1024MiB"], "GPU 0 3072 MiB"),
            (&["mem=3000", "nvidia=0", "unit=MiB", "dev=3000"], "refused"),
            (&["mem=3000", "nvidia=0", "unit=MiB", "dev=15000"], "GPU 0 3000 MiB"),
            (&["mem=3000", "nvidia=0", "dev=15000"], "GPU 0 3000 MiB"),
            (&["@mem=3", "nvidia=0", "@dev=3"], "refused"),
        ] {
            assert_eq!(line(words, &STRICT), expected, "{words:?}");
        }
        assert_eq!(line(&["mem=3", "nvidia=0", "dev=3"], &OPEN), "GPU 0 15000 MiB");
        let reported = refused_under(&STRICT, &["mem=3", "nvidia=0", "dev=3"], &four());
        assert!(reported.contains("less than 14"), "{reported}");
    }

    /// A GPU that a node calls a MIG device does not bypass the rules.
    #[test]
    fn gpu_labelled_mig_does_not_bypass_the_rules() {
        let words = ["nvidia=void", "+node=6", "+mig=6"];
        for rules in [&STRICT, &QUOTAS_ONLY] {
            let request = decided(&words, rules).unwrap().unwrap();
            // Which GPUs are in MIG mode is not known before they are inspected.
            assert!(request.is_as_brought() && !request.may_be_unregistered());
            let reported =
                resolve(&request, &four(), Kind::Gate, MAX_INST).unwrap_err().to_string();
            assert!(reported.contains("node /dev/nvidiaN (GPU 1)"), "{reported}");
        }
        assert!(decided(&words, &OPEN).unwrap().unwrap().may_be_unregistered());
        let lifted = ["mem=0", "nvidia=void", "+node=6"];
        assert!(!decided(&lifted, &OPEN).unwrap().unwrap().may_be_unregistered());
    }

    fn list() -> impl Strategy<Value = Vec<u64>> {
        proptest::collection::vec(1..=u64::MAX, 1..=4)
    }

    fn words(prefix: &str, amounts: &[u64], dev: Option<u64>) -> Vec<String> {
        let amounts: Vec<String> = amounts.iter().map(u64::to_string).collect();
        let mut words = vec![format!("{prefix}mem={}", amounts.join(","))];
        words.extend(dev.map(|dev| format!("{prefix}dev={dev}")));
        words
    }

    fn try_plan(words: &[String], inventory: &Inventory) -> Result<Plan, ResolveError> {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let request = match decided(&words, &OPEN) {
            Ok(request) => request.expect("it asks for a quota"),
            // A contradiction is reported before the host's GPUs are inspected.
            Err(_) => {
                let memory = request::Setting { name: "x".into(), value: String::new() };
                return Err(ResolveError::NoMemory { memory, gpu: String::new() });
            }
        };
        let proposal = resolve(&request, inventory, Kind::Gate, MAX_INST)?;
        Ok(on_empty_host(&proposal).expect("no container holds anything"))
    }

    /// What an image can say, in the short names of [`SHORT`] without a word for none.
    fn variables() -> impl Strategy<Value = Vec<String>> {
        let one_of = |short: &'static str, values: &'static [&'static str]| {
            let word = proptest::sample::select(values).prop_map(move |v| format!("{short}={v}"));
            proptest::option::of(word)
        };
        let gpus: &[&str] = &[
            "all", "none", "void", "", "0", "2", "1,0", "0,1,2", "0,1,2,3", "GPU-a0", "0:0",
            "MIG-x",
        ];
        let words = (
            one_of("mem", &["0", "1,0", "", "1", "2,3"]),
            one_of("dev", &["", "15"]),
            one_of("aliyun", gpus),
            one_of("nvidia", gpus),
            one_of("weight", &["", "1", "20"]),
        );
        words.prop_map(|(a, b, c, d, e)| [a, b, c, d, e].into_iter().flatten().collect())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        /// Nothing that an image says lifts what the annotations limit: the container is
        /// refused, or every GPU of it has a quota, or it gets no GPU from any source.
        #[test]
        fn no_variable_lifts_the_annotations_quota(
            variables in variables(),
            gpus in proptest::option::of(proptest::sample::select(&["0", "2,0", "all", "void"][..])),
        ) {
            let mut words = variables.clone();
            words.extend(["@mem=3".to_owned(), "@dev=15".to_owned()]);
            words.extend(gpus.map(|gpus| format!("@gpus={gpus}")));
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            match outcome(&words, &four(), &OPEN) {
                Ok(Some(plan)) => {
                    let limits = limits(&plan);
                    prop_assert!(limits.iter().all(|(_, limit)| limit.is_some_and(|mib| mib <= 3000)));
                }
                Ok(None) => {
                    let names = |word: &&&str| {
                        let value = word.split_once('=').map(|(_, value)| value);
                        ["aliyun", "nvidia"].iter().any(|short| word.starts_with(short))
                            && !matches!(value, Some("none" | "void" | ""))
                    };
                    prop_assert_eq!(words.iter().find(names), None);
                }
                Err(_) => {}
            }
        }
    }

    proptest! {
        /// A quota is a multiple of 1 MiB, from 1 MiB to the GPU's total.
        #[test]
        fn quota_is_1_mib_up_to_the_total(
            amounts in list(),
            dev in proptest::option::of(Just(u64::MAX)),
            total_mib in 1..=u64::MAX / MIB,
        ) {
            match try_plan(&words("", &amounts, dev), &host(&[total_mib; 4])) {
                Ok(plan) => for gpu in plan.gpus {
                    let limit_bytes = gpu.memory_limit_bytes.unwrap();
                    prop_assert!((MIB..=gpu.memory_total_bytes).contains(&limit_bytes));
                    prop_assert_eq!(limit_bytes % MIB, 0);
                },
                Err(error) => {
                    let is_zero = matches!(error, ResolveError::NoMemory { .. });
                    prop_assert!(is_zero, "{}", error);
                }
            }
        }

        #[test]
        fn the_last_value_repeats(amounts in proptest::collection::vec(1..=15_u64, 1..=4)) {
            let mut whole = amounts.clone();
            whole.resize(4, amounts[amounts.len() - 1]);
            let inventory = host(&[15000, 16130, 40000, 81559]);
            let plan = |amounts: &[u64]| {
                let plan = try_plan(&words("", amounts, Some(15)), &inventory).unwrap();
                // The settings differ.
                Plan { caveats: Caveats::default(), ..plan }
            };
            prop_assert_eq!(plan(&amounts), plan(&whole));
        }

        #[test]
        fn two_quotas_come_to_the_smaller_of_each(
            by_env in proptest::collection::vec(1..=15_u64, 1..=4),
            by_annotation in proptest::collection::vec(1..=30_u64, 1..=4),
        ) {
            let inventory = host(&[15000, 16130, 40000, 81559]);
            let (env, annotation) =
                (words("", &by_env, Some(15)), words("@", &by_annotation, Some(30)));
            let limits = |words: &[String]| limits(&try_plan(words, &inventory).unwrap());
            let smaller: Vec<_> =
                limits(&env).into_iter().zip(limits(&annotation)).map(|(a, b)| a.min(b)).collect();
            prop_assert_eq!(limits(&[env, annotation].concat()), smaller);
        }

        #[test]
        fn a_gpu_stands_in_a_plan_once(
            aliyun in proptest::collection::vec((0..8_u32, any::<bool>()), 0..6),
            nvidia in proptest::collection::vec((0..8_u32, any::<bool>()), 0..9),
            annotation in proptest::collection::vec((0..8_u32, any::<bool>()), 0..3),
        ) {
            let named = |short: &str, list: &[(u32, bool)]| {
                let names: Vec<String> = list
                    .iter()
                    .map(|&(index, by_uuid)| match by_uuid {
                        true => UUIDS[index as usize].to_owned(),
                        false => index.to_string(),
                    })
                    .collect();
                format!("{short}={}", names.join(","))
            };
            let mut words = words("", &[3], Some(15));
            words.extend([named("aliyun", &aliyun), named("@gpus", &annotation)]);
            if !nvidia.is_empty() {
                words.push(named("nvidia", &nvidia));
            }
            if let Ok(plan) = try_plan(&words, &host(&[15000; 8])) {
                let mut indices: Vec<u32> = plan.gpus.iter().map(|gpu| gpu.index).collect();
                indices.sort_unstable();
                indices.dedup();
                prop_assert_eq!(indices.len(), plan.gpus.len());
                prop_assert!(plan.gpus.iter().any(|gpu| gpu.memory_limit_bytes.is_some()));
            }
        }

        #[test]
        fn hostile_names_of_gpus_never_panic(aliyun: String, nvidia: String, annotation: String) {
            let words = [format!("aliyun={aliyun}"), format!("nvidia=.{nvidia}"),
                format!("@gpus={annotation}"), "mem=3".to_owned()];
            if let Err(error) = try_plan(&words, &host(&[15000; 8])) {
                prop_assert!(!error.to_string().contains(char::is_control));
            }
        }
    }
}
