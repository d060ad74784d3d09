//! One question: what becomes of a bundle, by all that it says of GPUs and by the host's rules: [`decide`].
//!
//! Owns the order: the bundle is [read](super::read), its facts find their row in the
//! [table](super::decision_table), and then the host's other rules refuse what the row would allow. Pure. Must
//! not know which GPUs there are: which GPU a name or a node means is `plan`'s matter.

use alloc::borrow::{Cow, ToOwned};
use alloc::boxed::Box;
use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;

use super::brought_gpus::{self, Brought, BroughtGpu, BroughtName, Extent};
use super::decision_table::{self, Because, Named, On, Outcome, Quota};
use super::grant::Grant;
use super::near_miss::NearMiss;
use super::quota as asked;
use super::reach::Reaches;
use super::setting_names::NAMES;
use super::ungranted::{Ungranted, stripped};
use super::{
    DefaultMemory, NVIDIA_VISIBLE_DEVICES, Off, Request, RequestError, Rules, Setting, cri, read,
    shares, variable,
};

/// The key of the configuration that gives a quota if none is asked for, as messages have it.
const DEFAULT_MEMORY: &str = "admission.default_memory";

/// All that a bundle says of GPUs.
#[derive(Clone, Copy)]
pub struct BundleFacts<'a> {
    /// The items of `process.env`, as `NAME=value`.
    pub env: &'a [&'a str],
    /// The annotations.
    pub annotations: &'a [(&'a str, &'a str)],
    /// The container's id; `None` if it isn't known yet.
    pub id: Option<&'a str>,
    /// What others brought.
    pub brought: &'a Brought,
    /// Whether NVIDIA's toolkit would call the container privileged: every device, or CAP_SYS_ADMIN.
    pub is_privileged: bool,
    /// How the container bypasses the enforcement. It is asked only if that matters: the answer takes a check of the
    /// host's files.
    pub reaches: &'a dyn Fn() -> Reaches,
    /// Who asks.
    pub entry: EntryPoint,
    /// What Kubernetes has given the container: then nothing else that the bundle says counts.
    pub grant: Option<&'a Grant>,
}

impl fmt::Debug for BundleFacts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BundleFacts { env, annotations, id, brought, is_privileged, reaches: _, entry, grant } =
            self;
        f.debug_struct("Said")
            .field("env", env)
            .field("annotations", annotations)
            .field("id", id)
            .field("brought", brought)
            .field("is_privileged", is_privileged)
            .field("entry", entry)
            .field("grant", grant)
            .finish_non_exhaustive()
    }
}

/// Who asks what becomes of a bundle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryPoint {
    /// The OCI runtime, before the container is created.
    Runtime,
    /// podman's precreate hook: another runtime reads the bundle afterwards.
    PrecreateHook,
    /// A hook that is called when the bundle was read already.
    LateHook,
}

/// What becomes of a bundle that isn't refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// What becomes of it.
    pub verdict: Verdict,
    /// Settings of it that nearly mean something.
    pub near_misses: Vec<NearMiss>,
}

/// What becomes of a bundle that isn't refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is started as the bare runtime would start it; why, as a sentence.
    NotOurs(String),
    /// It is planned, registered and, if needed, edited.
    Ours(Box<Request>),
}

impl Decision {
    /// The request, unless the bundle is none of ours.
    #[must_use]
    pub fn request(&self) -> Option<&Request> {
        match &self.verdict {
            Verdict::Ours(request) => Some(request),
            Verdict::NotOurs(_) => None,
        }
    }
}

/// What becomes of the bundle that says `said`.
///
/// # Errors
///
/// If it asks for what can't be meant, or for what `rules` refuse.
pub fn decide(said: &BundleFacts<'_>, rules: &Rules<'_>) -> Result<Decision, RequestError> {
    let Some(grant) = said.grant else {
        let is_pods = rules.ungranted != Ungranted::AsAsked && cri::is_container(said);
        return if is_pods { without_grant(said, rules) } else { by_settings(said, rules) };
    };
    let granted = grant.annotations();
    // Of what the bundle says the engine's own marks stay.
    let is_ours = |name: &str| NAMES.iter().any(|ours| ours.annotation == name);
    let marks = said.annotations.iter().filter(|(name, _)| !is_ours(name)).copied();
    let granted = granted.iter().map(|(name, value)| (*name, value.as_str()));
    let annotations: Vec<(&str, &str)> = marks.chain(granted).collect();
    let by_grant = BundleFacts { env: &[], annotations: &annotations, grant: None, ..*said };
    let overruled = grant.overruled(said.env, said.annotations, rules).into_iter();
    let overruled =
        overruled.map(|setting| NearMiss::Overruled { setting, resource: grant.resource.clone() });
    let mut decision = by_settings(&by_grant, &grant.rules(rules))?;
    if let Verdict::Ours(request) = &mut decision.verdict {
        request.shares.clone_from(&grant.shares);
    }
    Ok(Decision { near_misses: overruled.collect(), ..decision })
}

/// The same for a pod's container that Kubernetes has given nothing.
fn without_grant(said: &BundleFacts<'_>, rules: &Rules<'_>) -> Result<Decision, RequestError> {
    let texts = (said.env, said.annotations);
    let bare = stripped(texts, rules, false);
    let named = by_settings(said, rules);
    let none = by_settings(
        &BundleFacts { env: &bare.env, annotations: &bare.annotations, ..*said },
        rules,
    )?;
    // What others brought is theirs to answer for.
    let asks_nothing = matches!(&named, Ok(named) if named.verdict == none.verdict)
        || matches!(&named, Ok(Decision { verdict: Verdict::NotOurs(_), .. }));
    let Some(setting) = bare.first.filter(|_| !asks_nothing) else { return named };
    // NVIDIA's hook reads the bundle itself.
    if rules.ungranted == Ungranted::Refuse
        || (rules.ungranted == Ungranted::None && said.brought.nvidia_hook)
    {
        return Err(RequestError::Ungranted { setting });
    }
    if rules.ungranted == Ungranted::Whole {
        let whole = stripped(texts, rules, true);
        return by_settings(
            &BundleFacts { env: &whole.env, annotations: &whole.annotations, ..*said },
            &Rules { default_memory: DefaultMemory::Whole, ..*rules },
        );
    }
    Ok(Decision { near_misses: vec![NearMiss::Ungranted { setting }], ..none })
}

/// The same by what the bundle says itself.
fn by_settings(said: &BundleFacts<'_>, rules: &Rules<'_>) -> Result<Decision, RequestError> {
    let (mut request, mut near_misses) = read(said, rules)?;
    let mut brought = Cow::Borrowed(said.brought);
    // Where we don't tell NVIDIA's hook or runtime which GPUs, it brings what it reads.
    if brought.nvidia_hook
        && matches!(
            outcome(&request, said, rules),
            Outcome::NotOurs | Outcome::FilesAlone | Outcome::AsBrought
        )
    {
        let brought = brought.to_mut();
        // To a quota on no GPU they are no choice.
        let into = match request.quotas.is_empty() {
            true => &mut brought.gpus,
            false => &mut brought.allowed,
        };
        into.extend(by_nvidias_hook(said, rules));
    }
    let said = &BundleFacts { brought: &brought, ..*said };
    if request.takes_default(said) {
        match rules.default_memory {
            DefaultMemory::Whole => {}
            DefaultMemory::Mib(mib) => {
                let shares = shares(said, rules)?;
                request.quotas.push(asked::Quota::of_host(DEFAULT_MEMORY, mib, shares));
            }
            DefaultMemory::Unreadable => return Err(RequestError::DefaultUnreadable),
        }
    }
    if !request.quotas.is_empty() {
        // A quota by another source, or by the host, is one.
        near_misses.retain(|near| !matches!(near, NearMiss::RequestAlone { .. }));
    }
    let (quota, named, brought) = facts(&request, said);
    let must_be_held = rules.refuses_no_quota() || rules.exclusive;
    if request.contradicts_itself() && (quota == Quota::Asked || must_be_held) {
        return Err(request.contradiction());
    }
    let row = decision_table::find(quota, named, brought);
    if rules.is_strict()
        && !matches!(row.open, Outcome::NotOurs | Outcome::FilesAlone)
        && let Some(near) = near_misses.iter().find(|near| near.is_refused_by_strict())
    {
        return Err(RequestError::NearMiss { near: near.clone() });
    }
    // An image can switch the user's own quota off, and leave the larger one of a pod's annotation.
    if rules.is_strict()
        && quota == Quota::Asked
        && let Some(setting) = request.disabling()
        && let Some(left) = request.quotas.first()
    {
        let (setting, memory) = (setting.clone(), left.memory.clone());
        return Err(RequestError::OneIsLifted { setting, memory });
    }
    let outcome = match outcome(&request, said, rules) {
        Outcome::Refused(because) => return Err(refusal(&request, said, because, rules)),
        // MIG devices have memory of their own, which no quota has to divide.
        Outcome::Whole(_) | Outcome::AsBrought
            if rules.require_quota && !request.is_mig_only(said.brought) =>
        {
            return Err(refusal(&request, said, Because::NoQuota, rules));
        }
        outcome => outcome,
    };
    let is_unenforced = matches!(quota, Quota::Lifted | Quota::Zero);
    if matches!(outcome, Outcome::NotOurs | Outcome::FilesAlone) && rules.refuses_privileged {
        let reaches = (said.reaches)();
        if !reaches.ways.is_empty() {
            return Err(RequestError::Privileged { ways: reaches.listed() });
        }
    }
    if outcome == Outcome::NotOurs {
        let verdict = Verdict::NotOurs(request.why_not_ours(rules));
        return Ok(Decision { verdict, near_misses });
    }
    request.outcome = outcome;
    request.may_mix =
        rules.whole_beside_quota && !rules.refuses_no_quota() && !cri::is_container(said);
    if is_unenforced && outcome != Outcome::FilesAlone {
        request.unenforced_by = request.lifting().map(ToString::to_string);
    }
    request.brought = match outcome {
        Outcome::Quota(On::Both | On::Brought) => said.brought.chosen(),
        Outcome::Whole(On::Either | On::Brought) | Outcome::AsBrought => said.brought.usable(),
        _ => Vec::new(),
    };
    if outcome == Outcome::AsBrought && request.brought.is_empty() {
        request.brought.push(BroughtName::All);
    }
    if rules.refuses_no_quota() && quota != Quota::Asked && outcome != Outcome::FilesAlone {
        request.has_mig_alone = Some(rule(rules));
    }
    request.brought_by = said.brought.by();
    request.mig.clone_from(&said.brought.mig);
    check(&mut request, said, rules)?;
    Ok(Decision { verdict: Verdict::Ours(Box::new(request)), near_misses })
}

/// What the table and the rules of unlimited GPUs make of a bundle.
fn outcome(request: &Request, said: &BundleFacts<'_>, rules: &Rules<'_>) -> Outcome {
    let (quota, named, brought) = facts(request, said);
    let row = decision_table::find(quota, named, brought);
    let outcome = if rules.is_strict() { row.strict } else { row.open };
    request.narrowed(outcome, said.brought, rules)
}

/// What NVIDIA's hook or runtime brings by the container's variables, whomever the host trusts.
fn by_nvidias_hook(said: &BundleFacts<'_>, rules: &Rules<'_>) -> Vec<BroughtGpu> {
    let by = |setting: &Setting| brought_gpus::by_nvidias_hook(&setting.value, setting);
    // Where its `swarm-resource` names them, it takes the numbers that Swarm only counts by for indices.
    let resources = said.env.iter().filter_map(|item| item.split_once('='));
    let resources = resources.filter(|(name, _)| rules.is_resource_variable(name));
    let setting = |(name, value): (&str, &str)| Setting {
        name: name.to_owned().into(),
        value: value.to_owned(),
    };
    let mut gpus: Vec<_> = resources.map(setting).flat_map(|setting| by(&setting)).collect();
    gpus.extend(match variable(said.env, NVIDIA_VISIBLE_DEVICES) {
        Some(setting) => by(&setting),
        // Images of CUDA before 10 have every GPU (NVIDIA's toolkit, "legacy images").
        None => {
            let is_set =
                |name| variable(said.env, name).filter(|setting| !setting.value.is_empty());
            let of_old = is_set("CUDA_VERSION").filter(|_| is_set("NVIDIA_REQUIRE_CUDA").is_none());
            of_old.map_or_else(Vec::new, |setting| brought_gpus::by_nvidias_hook("all", &setting))
        }
    });
    gpus
}

/// The columns of the table for a bundle.
pub(super) fn facts(request: &Request, said: &BundleFacts<'_>) -> (Quota, Named, Extent) {
    let (quota, named) = (request.quota_asked(), request.named());
    let brought = match quota {
        Quota::Asked => said.brought.choice(),
        Quota::Unasked => said.brought.extent(),
        Quota::Lifted | Quota::Zero | Quota::Untrusted | Quota::Sandbox => {
            said.brought.extent_of_memory()
        }
    };
    (quota, named, brought)
}

/// Refuses what the table allows and other rules don't.
fn check(
    request: &mut Request,
    said: &BundleFacts<'_>,
    rules: &Rules<'_>,
) -> Result<(), RequestError> {
    if request.outcome == Outcome::FilesAlone {
        return Ok(());
    }
    let memory = request.quotas.first().map(|quota| quota.memory.clone());
    // What a container has is settled when a hook is called that can't change its bundle.
    if said.entry == EntryPoint::LateHook
        && let Outcome::Quota(On::Chosen) | Outcome::Whole(On::Chosen) = request.outcome
    {
        let counting = request.selections.counting().next().map(|(setting, _)| setting.clone());
        let setting = counting
            .or(memory)
            .unwrap_or_else(|| Setting { name: "CGPU_GPUS".into(), value: String::new() });
        return Err(RequestError::ChoiceByHook { setting });
    }
    if said.entry == EntryPoint::PrecreateHook
        && let Some(memory) = memory.clone().filter(|_| rules.is_gate)
    {
        return Err(RequestError::GateByPrecreateHook { memory });
    }
    let reaches = (said.reaches)();
    if let Some(memory) = memory.clone().filter(|_| rules.is_gate && reaches.host_pids) {
        return Err(RequestError::HostPids { memory });
    }
    if rules.is_strict() {
        if let Some(setting) =
            request.quotas.iter().find_map(super::quota::Quota::share_by_variable)
        {
            return Err(RequestError::ShareByVariable { setting });
        }
        if !reaches.ways.is_empty() {
            let ways = reaches.listed();
            return Err(match memory {
                Some(memory) => RequestError::ReachesPast { memory, ways },
                None => RequestError::WholeReachesPast { ways },
            });
        }
    }
    request.reaches = reaches;
    Ok(())
}

/// The rule of the host that refuses GPUs without a quota, as a message has it.
fn rule(rules: &Rules<'_>) -> &'static str {
    if rules.is_strict() { "profile = \"strict\"" } else { "require_quota" }
}

/// The refusal of a row of the table, or of a rule that refuses as one does.
fn refusal(
    request: &Request,
    said: &BundleFacts<'_>,
    because: Because,
    rules: &Rules<'_>,
) -> RequestError {
    let naming = request.selections.naming().map(|naming| naming.setting.clone());
    let by = naming.as_ref().map_or_else(|| said.brought.by(), ToString::to_string);
    let rule = rule(rules);
    let memory = request.off.iter().find_map(Off::memory);
    let nothing = request.selections.nothing().map(|nothing| nothing.setting.to_string());
    match (because, memory, request.quotas.first(), nothing, naming) {
        (Because::Untrusted, Some((memory, key)), ..) => {
            RequestError::Untrusted { memory: memory.clone(), key, by }
        }
        (Because::Sandbox, Some((memory, _)), ..) => {
            RequestError::Sandbox { memory: memory.clone(), by }
        }
        (Because::NoGpuNamed, _, Some(quota), Some(nothing), _) => {
            RequestError::NoGpuNamed { memory: quota.memory.clone(), nothing, brought: by }
        }
        (.., naming) => match (request.lifting().cloned(), naming) {
            (Some(setting), _) => RequestError::Lifted { setting, by, rule },
            (None, Some(selection)) => RequestError::QuotaRequired { selection, rule },
            (None, None) => RequestError::QuotaRequiredOfBrought { by, rule },
        },
    }
}
