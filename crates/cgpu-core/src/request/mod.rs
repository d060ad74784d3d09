//! What a container asks for, read from its variables and annotations: [`Request`].
//!
//! Knows variables, lists, units and the trust policy. Must not know files or the GPUs of the host: which GPU a name
//! means is `plan`'s matter. Each trusted source is read on its own, variables of `process.env` and annotations, under
//! neutral names and those of Alibaba Cloud cGPU ([`setting_names::NAMES`]), and NVIDIA's limit. If several ask for a quota, all
//! are retained and the smallest applies on each GPU.
//!
//! [`decide()`] is the one question: what becomes of a bundle, by its settings and by what others
//! [brought_gpus](Brought) into it.

pub mod amount;
pub mod brought_gpus;
pub mod claim;
mod cri;
mod decision;
pub mod decision_table;
mod error;
pub mod grant;
mod near_miss;
mod quota;
pub mod reach;
mod selection;
mod setting;
pub mod setting_names;
mod ungranted;

pub use brought_gpus::{Brought, BroughtGpu, BroughtName, MigInstance};
pub use decision::{BundleFacts, Decision, EntryPoint, Verdict, decide};
pub use error::RequestError;
pub use grant::Grant;
pub use near_miss::NearMiss;
pub use reach::{Reach, Reaches};
pub use setting::{Quoted, Setting};
pub use ungranted::Ungranted;

pub(crate) use amount::{GIB, Measure};
pub(crate) use decision_table::{On, Outcome};
pub(crate) use quota::{Quota, Source, Spelling, WeightValue};
pub(crate) use selection::{Extent, GpuName, Selection};

use alloc::borrow::{Cow, ToOwned};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use decision_table::{Because, Named};
use quota::{Ask, Off};
use setting_names::{
    GPUS, NVIDIA_MEMORY_LIMIT, NVIDIA_VISIBLE_DEVICES, Name, SET_ASIDE, VISIBLE_DEVICES,
};

/// How the device plugin's value begins if the scheduler found no GPU.
const NO_GPU_FOUND: &str = "no-gpu-has-";

/// Who may ask for GPUs: the configuration's `trust_env` and `trust_annotations`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trust {
    /// `process.env` counts (image and user's variables can't be distinguished there).
    pub env: bool,
    /// The bundle's annotations count.
    pub annotations: bool,
}

/// Whether settings that an image can carry may lift or widen a quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// They may, as the documents of the original product say; each is reported.
    Open,
    /// They are refused.
    Strict,
}

/// What a host gives of each GPU to a container that names GPUs and asks for no quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DefaultMemory {
    /// Unlimited use of the GPUs.
    Whole,
    /// So many MiB, at least 1.
    Mib(u64),
    /// It can't be read what was set.
    Unreadable,
}

impl DefaultMemory {
    /// `mib` of each GPU; 0 is unlimited use of the GPU.
    #[must_use]
    pub fn of_mib(mib: u64) -> Self {
        if mib == 0 { DefaultMemory::Whole } else { DefaultMemory::Mib(mib) }
    }
}

/// What the configuration says of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules<'a> {
    /// Which sources count.
    pub trust: Trust,
    /// `[admission] profile`.
    pub profile: Profile,
    /// Containers without a quota get unlimited use of the GPUs that they name.
    pub whole: bool,
    /// Variables and annotations of an unprivileged container may ask for unlimited GPUs, next to a quota too.
    pub whole_beside_quota: bool,
    /// Unlimited GPUs and shared ones exclude each other.
    pub exclusive: bool,
    /// GPUs without a quota are refused.
    pub require_quota: bool,
    /// Containers that name no GPU and reach past the enforcement are refused.
    pub refuses_privileged: bool,
    /// Variables that choose GPUs by UUID, as Swarm's do; one may end in `*`.
    pub resource_variables: &'a [String],
    /// What containers get that name GPUs and ask for no quota.
    pub default_memory: DefaultMemory,
    /// Quotas are enforced by the gate.
    pub is_gate: bool,
    /// What pods' containers get that name GPUs and have no grant.
    pub ungranted: Ungranted,
}

impl Rules<'_> {
    fn is_strict(&self) -> bool {
        self.profile == Profile::Strict
    }

    fn refuses_no_quota(&self) -> bool {
        self.require_quota || self.is_strict()
    }

    /// Whether containers with GPUs and without a quota matter to other containers or are refused.
    fn must_hold_whole(&self) -> bool {
        self.exclusive || self.refuses_no_quota()
    }

    /// Whether the host takes the variable `name` for a choice of GPUs, as Swarm's.
    pub fn is_resource_variable(&self, name: &str) -> bool {
        self.resource_variables.iter().any(|pattern| match pattern.strip_suffix('*') {
            Some(prefix) => name.starts_with(prefix),
            None => name == pattern,
        })
    }
}

/// What a container asks for, of the sources that are trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// One of each source and way in which it asks.
    pub(crate) quotas: Vec<Quota>,
    /// Why sources without a quota have none.
    off: Vec<Off>,
    /// The GPUs it names.
    pub(crate) selections: Selections,
    trust: Trust,
    /// What becomes of it.
    pub(crate) outcome: Outcome,
    /// The brought GPUs that are its own.
    pub(crate) brought: Vec<BroughtName>,
    /// How they came, as a message has it.
    pub(crate) brought_by: String,
    /// The MIG devices among them.
    pub(crate) mig: Vec<MigInstance>,
    /// The rule of the host that allows it MIG devices alone, which need no quota.
    pub(crate) has_mig_alone: Option<&'static str>,
    /// Whether what an image may have set must not make its amounts of memory larger.
    pub(crate) doubts_measure: bool,
    /// Whether it may have GPUs without a quota next to those with one.
    pub(crate) may_mix: bool,
    /// The setting that lifts its quota.
    pub(crate) unenforced_by: Option<String>,
    /// How it reaches past the enforcement.
    pub(crate) reaches: Reaches,
    /// The shares of claims that it asks by, as [`Grant::shares`].
    pub(crate) shares: Vec<String>,
}

/// The GPUs a container names, by each source.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Selections {
    /// `CGPU_GPUS`; empty counts as absent. Others that list GPUs have to mean the same.
    pub(crate) neutral: Option<Selection>,
    /// `ALIYUN_COM_GPU_VISIBLE_DEVICES`; empty counts as absent.
    pub(crate) aliyun: Option<Selection>,
    /// A variable of a resource (Swarm's `DOCKER_RESOURCE_*`) with UUIDs. NVIDIA's variable doesn't count next to it,
    /// as in NVIDIA's toolkit, unless it lists GPUs: then both have to mean the same.
    pub(crate) resource: Option<Selection>,
    /// `NVIDIA_VISIBLE_DEVICES`; empty is no GPU.
    pub(crate) nvidia: Option<Selection>,
    /// The annotation; empty counts as absent.
    pub(crate) annotation: Option<Selection>,
}

/// Reads what a bundle asks for, as far as its sources are trusted, and the settings of it that nearly
/// mean something. If a variable is given twice the last counts, as in runc.
///
/// # Errors
///
/// If a quota is asked for that can't be meant, or the scheduler reports through the variables that it
/// found no GPU.
fn read(
    said: &BundleFacts<'_>,
    rules: &Rules<'_>,
) -> Result<(Request, Vec<NearMiss>), RequestError> {
    let trust = rules.trust;
    let sandbox = cri::is_sandbox(said);
    let of_env = |name: &'static str| variable(said.env, name);
    let of_annotations = |name: &'static str| annotation(said.annotations, name);
    let in_env = |name| of_env(name).filter(|_| trust.env);
    // A pod's annotations mean its containers, and not its sandbox.
    let in_annotations =
        |name| of_annotations(name).filter(|_| trust.annotations && sandbox.is_none());

    let nvidia = in_env(NVIDIA_VISIBLE_DEVICES);
    if let Some(setting) = &nvidia
        && setting.value.trim_start().starts_with(NO_GPU_FOUND)
    {
        return Err(RequestError::NoGpuFound { setting: setting.clone() });
    }

    let mut quotas = Vec::new();
    let mut off = Vec::new();
    let mut near_misses = Vec::new();
    let mut sort = |ask| match ask {
        Ask::Quota(quota) => quotas.push(quota),
        Ask::Off(reason) => off.push(reason),
    };
    let nvidias_limit = || {
        let aside = SET_ASIDE.iter().filter(|(name, _)| *name == NVIDIA_MEMORY_LIMIT);
        let mut names = [NVIDIA_MEMORY_LIMIT].into_iter().chain(aside.map(|(_, aside)| *aside));
        names.find_map(of_env)
    };
    let by_variable = |name: Name| of_env(name.variable);
    let by_annotation = |name: Name| of_annotations(name.annotation);
    if trust.env {
        quota::read(Source::Env, by_variable, nvidias_limit())?.into_iter().for_each(&mut sort);
        let settings = said.env.iter().filter_map(|item| item.split_once('='));
        near_misses.extend(near_miss::find(Source::Env, settings, by_variable));
    } else if let Some(memory) = quota::memory_asked(by_variable, nvidias_limit()) {
        sort(Ask::Off(Off::Untrusted("trust_env", Some(memory))));
    }
    if let Some(mark) = sandbox {
        let mark = Setting { name: mark.into(), value: "sandbox".to_owned() };
        sort(Ask::Off(Off::Sandbox(mark, quota::memory_asked(by_annotation, None))));
    } else if trust.annotations {
        quota::read(Source::Annotations, by_annotation, None)?.into_iter().for_each(&mut sort);
        let settings = said.annotations.iter().copied();
        near_misses.extend(near_miss::find(Source::Annotations, settings, by_annotation));
    } else if let Some(memory) = quota::memory_asked(by_annotation, None) {
        sort(Ask::Off(Off::Untrusted("trust_annotations", Some(memory))));
    }

    if trust.annotations
        && sandbox.is_none()
        && quotas.iter().all(|quota| quota.source == Source::Env)
    {
        quotas.iter_mut().try_for_each(|quota| quota.complete_shares(by_annotation))?;
    }

    let unless_empty = |setting: &Setting| setting.text() != Ok("");
    let resource = resource(said.env, rules).filter(|_| trust.env);
    let by_mounts = |setting: &Setting| setting.value == brought_gpus::DEVICE_MOUNTS;
    let counts = |nvidia: &Selection| resource.is_none() || nvidia.extent() == Extent::List;
    let nvidia = nvidia.filter(|setting| !by_mounts(setting)).map(Selection::new).filter(counts);
    let annotation = [
        in_annotations(GPUS.annotation).filter(unless_empty).map(Selection::in_dockers_grammar),
        in_annotations(VISIBLE_DEVICES.annotation).filter(unless_empty).map(Selection::new),
    ];
    if let [Some(one), Some(other)] = &annotation
        && !one.is_same(other)
    {
        let (one, other) = (one.setting.clone(), other.setting.clone());
        return Err(RequestError::TwoChoices { one, other });
    }
    let mut selections = Selections {
        neutral: in_env(GPUS.variable).filter(unless_empty).map(Selection::in_dockers_grammar),
        aliyun: in_env(VISIBLE_DEVICES.variable).filter(unless_empty).map(Selection::new),
        resource,
        nvidia,
        annotation: annotation.into_iter().flatten().next(),
    };
    let accepts = rules.whole_beside_quota || said.is_privileged || said.brought.nvidia_hook;
    if quotas.is_empty() && !accepts {
        selections.forget_gpus();
    }
    let request = Request {
        quotas,
        off,
        selections,
        trust,
        outcome: Outcome::NotOurs,
        brought: Vec::new(),
        brought_by: String::new(),
        mig: Vec::new(),
        has_mig_alone: None,
        doubts_measure: rules.is_strict(),
        may_mix: true,
        unenforced_by: None,
        reaches: Reaches::default(),
        shares: Vec::new(),
    };
    Ok((request, near_misses))
}

/// What a container asks for of computing time that has the host's default quota.
fn shares(said: &BundleFacts<'_>, rules: &Rules<'_>) -> Result<quota::Shares, RequestError> {
    let Trust { env, annotations } = rules.trust;
    let by_variable = |name: Name| variable(said.env, name.variable).filter(|_| env);
    let by_annotation = |name: Name| annotation(said.annotations, name.annotation);
    let shares = quota::Shares::read(by_variable)?;
    match annotations && cri::is_sandbox(said).is_none() {
        true => shares.completed(by_annotation),
        false => Ok(shares),
    }
}

/// The value of the last variable of that name; one without `=` unsets the name.
fn variable(env: &[&str], name: &'static str) -> Option<Setting> {
    let last = env.iter().rfind(|item| item.split('=').next() == Some(name))?;
    let (_, value) = last.split_once('=')?;
    Some(Setting { name: name.into(), value: value.to_owned() })
}

fn annotation(annotations: &[(&str, &str)], name: &'static str) -> Option<Setting> {
    let (_, value) = annotations.iter().rfind(|(key, _)| *key == name)?;
    Some(Setting { name: name.into(), value: (*value).to_owned() })
}

/// The GPUs that variables of resources choose: those with UUIDs alone. Swarm writes numbers for what it
/// only counts.
fn resource(env: &[&str], rules: &Rules<'_>) -> Option<Selection> {
    let is_uuid = |item: &str| match GpuName::parse(item.trim()) {
        Some(GpuName::Uuid(_)) => true,
        Some(GpuName::Mig(name)) => !name.contains(':'),
        _ => false,
    };
    let items = env.iter().filter_map(|item| item.split_once('='));
    let chosen = items
        .filter(|(name, value)| rules.is_resource_variable(name) && value.split(',').all(is_uuid));
    let mut found: Option<Setting> = None;
    for (name, value) in chosen {
        match &mut found {
            Some(setting) => setting.value = format!("{},{value}", setting.value),
            None => {
                let name = Cow::Owned(name.to_owned());
                found = Some(Setting { name, value: value.to_owned() });
            }
        }
    }
    found.map(Selection::new)
}

impl Request {
    /// What is asked for by way of a quota.
    fn quota_asked(&self) -> decision_table::Quota {
        let is = |of: fn(&Off) -> bool| self.off.iter().any(of);
        if !self.quotas.is_empty() {
            decision_table::Quota::Asked
        } else if is(|off| matches!(off, Off::Disabled(_, Some(_)))) {
            decision_table::Quota::Lifted
        } else if is(|off| matches!(off, Off::Untrusted(_, Some(_)))) {
            decision_table::Quota::Untrusted
        } else if is(|off| matches!(off, Off::Sandbox(_, Some(_)))) {
            decision_table::Quota::Sandbox
        } else if is(|off| matches!(off, Off::Zero(_) | Off::Empty(_))) {
            decision_table::Quota::Zero
        } else {
            decision_table::Quota::Unasked
        }
    }

    /// Whether it has GPUs and nothing of it speaks of memory, so that the host's default is what it gets.
    fn takes_default(&self, said: &BundleFacts<'_>) -> bool {
        let is_silent = |off: &Off| matches!(off, Off::NotSet(_) | Off::Empty(_));
        let has_gpus = matches!(self.named(), Named::All | Named::Counted | Named::Listed)
            || said.brought.choice() == brought_gpus::Extent::Gpus;
        self.quotas.is_empty()
            && self.off.iter().all(is_silent)
            && has_gpus
            && !self.is_mig_only(said.brought)
    }

    /// The setting that switches a quota off, whether or not another source asks for one.
    fn disabling(&self) -> Option<&Setting> {
        self.off.iter().find_map(|off| match off {
            Off::Disabled(setting, Some(_)) => Some(setting),
            _ => None,
        })
    }

    /// The setting that lifts its quota, or that asks for none.
    fn lifting(&self) -> Option<&Setting> {
        if !self.quotas.is_empty() {
            return None;
        }
        let lifted = self.disabling();
        let zero = || {
            self.off.iter().find_map(|off| match off {
                Off::Zero(setting) | Off::Empty(setting) => Some(setting),
                _ => None,
            })
        };
        lifted.or_else(zero)
    }

    /// Which GPUs are named.
    fn named(&self) -> Named {
        if self.contradicts_itself() {
            return Named::NoGpu;
        }
        let is_counted = self.selections.nothing().is_none() && self.count().is_some();
        match self.selections.naming() {
            Some(_) if self.selections.is_listed() => Named::Listed,
            _ if is_counted => Named::Counted,
            Some(_) => Named::All,
            None if self.wants_files_alone() => Named::Files,
            None if self.selections.nothing().is_some() => Named::NoGpu,
            None => Named::Unsaid,
        }
    }

    /// How many GPUs cgpu is to choose for it, if it lists none and none were brought: what it says, or one
    /// for a quota by the neutral names where nothing says which. `all` of NVIDIA's variable says nothing:
    /// the images of CUDA have it.
    pub(crate) fn count(&self) -> Option<u32> {
        if let Some(count) = self.selections.count() {
            return Some(count);
        }
        let is = |spelling| self.quotas.iter().any(|quota| quota.spelling == spelling);
        if self.quotas.is_empty() || is(Spelling::Aliyun) || is(Spelling::HostDefault) {
            return None;
        }
        let says = |selection: &Option<Selection>| {
            selection.as_ref().is_some_and(|selection| selection.extent() != Extent::Nothing)
        };
        let Selections { neutral, aliyun, resource, nvidia, annotation } = &self.selections;
        let is_said = [neutral, aliyun, resource, annotation].into_iter().any(says)
            || (says(nvidia) && !is(Spelling::Neutral));
        (!is_said).then_some(1)
    }

    /// Whether a setting that decides says no GPU, and a variable names some.
    fn contradicts_itself(&self) -> bool {
        self.selections.nothing().is_some() && self.selections.naming_variable().is_some()
    }

    fn contradiction(&self) -> RequestError {
        let setting = |selection: Option<&Selection>| {
            let found = selection.map(|selection| selection.setting.clone());
            found.unwrap_or(Setting { name: NVIDIA_VISIBLE_DEVICES.into(), value: String::new() })
        };
        RequestError::NothingAndSomething {
            nothing: setting(self.selections.nothing()),
            naming: setting(self.selections.naming_variable()),
        }
    }

    /// What is left of an outcome if cgpu gives no unlimited GPUs here, or if NVIDIA's toolkit alone knows what is
    /// meant.
    fn narrowed(&self, outcome: Outcome, brought: &Brought, rules: &Rules<'_>) -> Outcome {
        // A quota that is asked for, and lifted, isn't forgotten where the GPUs have come already.
        let has_some = match self.quota_asked() {
            decision_table::Quota::Unasked => !brought.usable().is_empty(),
            _ => brought.extent_of_memory() != brought_gpus::Extent::Nothing,
        };
        let as_brought = if has_some { Outcome::AsBrought } else { Outcome::NotOurs };
        match outcome {
            Outcome::FilesAlone if !rules.whole => Outcome::NotOurs,
            Outcome::Whole(_) if !rules.whole && !rules.must_hold_whole() => as_brought,
            Outcome::Whole(_) if !rules.whole && self.selections.only_mig().is_some() => as_brought,
            Outcome::Whole(_) | Outcome::FilesAlone
                if !rules.must_hold_whole() && self.selections.of_nvidias_toolkit().is_some() =>
            {
                as_brought
            }
            Outcome::Refused(Because::NoQuota) if self.is_mig_only(brought) => {
                match self.selections.naming() {
                    Some(_) => self.narrowed(Outcome::Whole(On::Either), brought, rules),
                    None => as_brought,
                }
            }
            outcome => outcome,
        }
    }

    /// Whether all of its GPUs are MIG devices, as far as that is known without the host's GPUs.
    fn is_mig_only(&self, brought: &Brought) -> bool {
        let is_mig = |gpu: &BroughtName| match gpu {
            BroughtName::Minor(minor) => brought.mig.iter().any(|mig| mig.gpu_minor == *minor),
            BroughtName::Named(name) => matches!(GpuName::parse(name), Some(GpuName::Mig(_))),
            BroughtName::All => false,
        };
        let usable = brought.usable();
        let has_some = !usable.is_empty() || self.selections.naming().is_some();
        has_some
            && brought.everything.is_none()
            && usable.iter().all(is_mig)
            && self.selections.is_mig_only()
    }

    /// Why the bundle is none of ours.
    fn why_not_ours(&self, rules: &Rules<'_>) -> String {
        let naming = self.selections.naming_variable().is_some();
        if self.quotas.is_empty() && rules.whole && !rules.must_hold_whole() {
            let nothing = self.selections.nothing().filter(|_| naming);
            if let Some(nothing) = nothing {
                return format!("{} selects no GPU", nothing.setting);
            }
            if let Some(foreign) = self.selections.of_nvidias_toolkit() {
                return format!("{} is for NVIDIA's toolkit", foreign.setting);
            }
        }
        if !self.quotas.is_empty()
            && let Some(nothing) = self.selections.nothing()
        {
            return format!("{} selects no GPU", nothing.setting);
        }
        if let Some(mig) = self.selections.only_mig()
            && rules.must_hold_whole()
        {
            return format!(
                "{} names MIG devices, and MIG devices have memory of their own",
                mig.setting
            );
        }
        match (rules.whole || rules.must_hold_whole()) && self.trust.env && !naming {
            true => format!("{}, and no variable names a GPU", self.why_no_quota()),
            false => self.why_no_quota(),
        }
    }

    /// Whether NVIDIA's variable alone says which GPUs: a program that reads it finds its own word.
    #[must_use]
    pub fn is_nvidias_alone(&self) -> bool {
        let Selections { neutral, aliyun, resource, nvidia, annotation } = &self.selections;
        let others = [neutral, aliyun, resource, annotation];
        others.into_iter().all(Option::is_none) && nvidia.is_some()
    }

    /// Whether it has no quota and says `none`: NVIDIA's word for the driver's files and no GPU.
    fn wants_files_alone(&self) -> bool {
        let is_none = |selection: &Selection| selection.setting.text() == Ok("none");
        self.selections.naming_variable().is_none()
            && self.selections.nvidia.as_ref().is_some_and(is_none)
    }

    /// Whether it gets the driver's files and no GPU.
    #[must_use]
    pub fn is_files_alone(&self) -> bool {
        self.outcome == Outcome::FilesAlone
    }

    /// Whether it has what others brought, and its bundle stays as it is.
    #[must_use]
    pub fn is_as_brought(&self) -> bool {
        self.outcome == Outcome::AsBrought
    }

    /// Whether it may start where it can't be registered: it has what others brought, no quota is lifted,
    /// and no rule of the host hangs on which GPUs it has.
    #[must_use]
    pub fn may_be_unregistered(&self) -> bool {
        self.is_as_brought() && self.unenforced_by.is_none() && self.has_mig_alone.is_none()
    }

    /// Whether `CGPU_DISABLE` has switched a quota off, so that the variables stay as they were given.
    #[must_use]
    pub fn is_disabled(&self) -> bool {
        self.quotas.is_empty() && self.off.iter().any(|off| matches!(off, Off::Disabled(..)))
    }

    /// The setting by which it asks for GPUs, or for the driver's files alone, without a quota.
    #[must_use]
    pub fn wants_driver_by(&self) -> Option<&Setting> {
        let files_alone = self.selections.nvidia.as_ref().filter(|_| self.is_files_alone());
        let selection = self.selections.naming().or(files_alone);
        selection.filter(|_| self.quotas.is_empty()).map(|selection| &selection.setting)
    }

    /// Whether it asks for a part of a GPU, which has to be enforced.
    #[must_use]
    pub fn has_quota(&self) -> bool {
        !self.quotas.is_empty()
    }

    /// Why no source has a quota: a setting says more than one that is missing.
    fn why_no_quota(&self) -> String {
        let set = self.off.iter().filter(|off| !matches!(off, Off::NotSet(_)));
        let reasons: Vec<String> = set.map(Off::to_string).collect();
        if !reasons.is_empty() {
            return reasons.join(" and ");
        }
        match (self.off.first(), self.trust.env) {
            (Some(off), true) => off.to_string(),
            (Some(off), false) => format!("{off} (trust_env is false)"),
            (None, _) => "neither variables nor annotations are trusted \
                          (trust_env and trust_annotations are false)"
                .to_owned(),
        }
    }
}

impl Selections {
    /// The variable that decides if there are several.
    fn deciding_variable(&self) -> Option<&Selection> {
        self.variables().next()
    }

    /// A variable by which the container gets GPUs, from us or from others.
    pub(crate) fn naming_variable(&self) -> Option<&Selection> {
        self.variables().find(|selection| selection.extent() != Extent::Nothing)
    }

    /// What names GPUs: a variable, or, if none does, the annotation.
    pub(crate) fn naming(&self) -> Option<&Selection> {
        let annotation = self.annotation.as_ref().filter(|_| self.is_by_annotation());
        self.naming_variable().or(annotation)
    }

    /// Whether GPUs are named one by one.
    fn is_listed(&self) -> bool {
        self.listing().is_some()
    }

    /// What names GPUs one by one: a variable, or, if none does and the one that decides doesn't say no GPU, the
    /// annotation.
    pub(crate) fn listing(&self) -> Option<&Selection> {
        let listing = |selection: &&Selection| selection.extent() == Extent::List;
        let annotation = self.annotation.as_ref().filter(listing);
        self.listing_variable().or(annotation.filter(|_| self.nothing().is_none()))
    }

    /// NVIDIA's variable, if it says what its toolkit alone understands: a CDI device that is no GPU,
    /// say.
    fn of_nvidias_toolkit(&self) -> Option<&Selection> {
        // `MIG-GPU-…/1/0` is a MIG device.
        let is_mig = |item: &str| item.trim().get(..4).is_some_and(|head| head == "MIG-");
        let foreign = |item: &str| item.contains('=') || (item.contains('/') && !is_mig(item));
        self.nvidia.as_ref().filter(|nvidia| {
            nvidia.setting.value.split(',').any(foreign) && nvidia.names().is_err()
        })
    }

    /// Whether the annotation names GPUs, and no variable says otherwise.
    fn is_by_annotation(&self) -> bool {
        let naming = |selection: &Selection| selection.extent() != Extent::Nothing;
        self.annotation.as_ref().is_some_and(naming) && self.variables().all(naming)
    }

    /// A variable that lists GPUs one by one; NVIDIA's first, whose list is the longer.
    pub(crate) fn listing_variable(&self) -> Option<&Selection> {
        let listing = |selection: &&Selection| selection.extent() == Extent::List;
        let by_length = [&self.nvidia, &self.aliyun, &self.resource, &self.neutral];
        by_length.into_iter().flatten().find(listing)
    }

    /// The number of GPUs that a setting asks for: the variable's, or the annotation's.
    fn count(&self) -> Option<u32> {
        self.counting().next().map(|(_, count)| count)
    }

    /// The settings that say how many, and how many.
    pub(crate) fn counting(&self) -> impl Iterator<Item = (&Setting, u32)> {
        [&self.neutral, &self.annotation].into_iter().flatten().filter_map(|selection| {
            match selection.extent() {
                Extent::Count(count) => Some((&selection.setting, count)),
                _ => None,
            }
        })
    }

    /// The selection by which no GPU is left: the variables' word, or, if they list none, the
    /// annotation's.
    pub(crate) fn nothing(&self) -> Option<&Selection> {
        let nothing = |selection: &&Selection| selection.extent() == Extent::Nothing;
        let annotation = self.annotation.as_ref().filter(|_| self.listing_variable().is_none());
        self.deciding_variable().filter(nothing).or(annotation.filter(nothing))
    }

    /// A variable that names MIG devices, if no variable names anything else.
    fn only_mig(&self) -> Option<&Selection> {
        let mut naming = self.variables().filter(|s| s.extent() != Extent::Nothing);
        if naming.clone().all(Selection::is_mig_only) { naming.next() } else { None }
    }

    /// Whether nothing but MIG devices is named.
    fn is_mig_only(&self) -> bool {
        let naming = |selection: &&Selection| selection.extent() != Extent::Nothing;
        self.variables().chain(&self.annotation).filter(naming).all(Selection::is_mig_only)
    }

    /// Takes out what names GPUs: an image may have set it. What says no GPU stays.
    fn forget_gpus(&mut self) {
        let names = |selection: &Selection| selection.extent() != Extent::Nothing;
        if self.variables().chain(&self.annotation).all(names) {
            *self = Selections::default();
        }
    }

    fn variables(&self) -> impl Iterator<Item = &Selection> + Clone {
        [&self.neutral, &self.aliyun, &self.resource, &self.nvidia].into_iter().flatten()
    }
}

/// What tests of requests share.
#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// The rules of the default configuration.
    pub(crate) const RULES: Rules<'_> = Rules {
        trust: Trust { env: true, annotations: true },
        profile: Profile::Open,
        whole: true,
        whole_beside_quota: true,
        exclusive: false,
        require_quota: false,
        refuses_privileged: false,
        resource_variables: &[],
        default_memory: DefaultMemory::Whole,
        is_gate: true,
        ungranted: Ungranted::AsAsked,
    };

    /// containerd's marks of a pod's container.
    pub(crate) const MARKS: [(&str, &str); 6] = [
        ("io.kubernetes.cri.container-type", "container"),
        ("io.kubernetes.cri.sandbox-id", "77"),
        ("io.kubernetes.cri.sandbox-name", "web-0"),
        ("io.kubernetes.cri.sandbox-namespace", "default"),
        ("io.kubernetes.cri.sandbox-uid", "0b6e"),
        ("io.kubernetes.cri.container-name", "main"),
    ];

    /// The row of the table that a bundle finds, counted from 0.
    pub(crate) fn row(said: &BundleFacts<'_>, rules: &Rules<'_>) -> Option<usize> {
        let (request, _) = read(said, rules).ok()?;
        let (quota, named, brought) = decision::facts(&request, said);
        let found = decision_table::find(quota, named, brought);
        decision_table::ROWS.iter().position(|row| std::ptr::eq(row, found))
    }

    /// What becomes of an unprivileged bundle with these settings, into which nothing was brought.
    pub(crate) fn decided(
        env: &[&str],
        annotations: &[(&str, &str)],
        rules: &Rules<'_>,
    ) -> Result<Decision, RequestError> {
        decided_with(None, env, annotations, rules)
    }

    /// What becomes of the same with a grant.
    pub(crate) fn decided_by(
        grant: &Grant,
        env: &[&str],
        annotations: &[(&str, &str)],
        rules: &Rules<'_>,
    ) -> Result<Decision, RequestError> {
        decided_with(Some(grant), env, annotations, rules)
    }

    fn decided_with(
        grant: Option<&Grant>,
        env: &[&str],
        annotations: &[(&str, &str)],
        rules: &Rules<'_>,
    ) -> Result<Decision, RequestError> {
        let brought = Brought::default();
        decide(
            &BundleFacts {
                env,
                annotations,
                id: Some("0123abcd"),
                brought: &brought,
                is_privileged: false,
                reaches: &Reaches::default,
                entry: EntryPoint::Runtime,
                grant,
            },
            rules,
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::quota::Weight;
    use super::setting_names::NAMES;
    use super::*;

    /// Rules under which cgpu gives no unlimited GPUs.
    const PLAIN: Rules<'_> = Rules { whole: false, ..testing::RULES };
    const EXCLUSIVE: Rules<'_> = Rules { exclusive: true, ..PLAIN };
    const QUOTAS_ONLY: Rules<'_> = Rules { require_quota: true, ..PLAIN };

    const MEM: &str = "ALIYUN_COM_GPU_MEM_CONTAINER";
    const DEV: &str = "ALIYUN_COM_GPU_MEM_DEV";

    /// What becomes of the variables `env`, each as `NAME=value`.
    fn from_env(env: &[&str]) -> Result<Decision, RequestError> {
        testing::decided(env, &[], &PLAIN)
    }

    /// What becomes of them under `rules`: why they are none of ours, or `None`.
    fn not_ours(env: &[&str], rules: &Rules<'_>) -> Result<Option<String>, RequestError> {
        let decision = testing::decided(env, &[], rules)?;
        Ok(match decision.verdict {
            Verdict::NotOurs(reason) => Some(reason),
            Verdict::Ours(_) => None,
        })
    }

    /// What a memory list asks for of a GPU of 15.
    fn from_memory(memory: &str) -> Result<Decision, RequestError> {
        from_env(&[&format!("{MEM}={memory}"), "ALIYUN_COM_GPU_MEM_DEV=15"])
    }

    /// What variables ask for next to a quota of 3 of 15.
    fn beside_quota(env: &[&str]) -> Result<Decision, RequestError> {
        let mut all = vec!["ALIYUN_COM_GPU_MEM_CONTAINER=3", "ALIYUN_COM_GPU_MEM_DEV=15"];
        all.extend(env);
        from_env(&all)
    }

    fn sentence(result: Result<Decision, RequestError>) -> String {
        result.expect_err("this request should be refused").to_string()
    }

    fn reason(decision: &Decision) -> String {
        match &decision.verdict {
            Verdict::NotOurs(reason) => reason.clone(),
            Verdict::Ours(request) => panic!("this should be none of ours: {request:?}"),
        }
    }

    fn only_quota(decision: &Decision) -> &Quota {
        match &decision.request().expect("it is ours").quotas[..] {
            [quota] => quota,
            quotas => panic!("one quota expected, not {quotas:?}"),
        }
    }

    /// containerd's marks of a pod's container or sandbox.
    fn marks<'a>(kind: &'a str, sandbox_id: &'a str) -> [(&'a str, &'a str); 4] {
        [
            ("io.kubernetes.cri.container-type", kind),
            ("io.kubernetes.cri.sandbox-id", sandbox_id),
            ("io.kubernetes.cri.sandbox-name", "web-0"),
            ("io.kubernetes.cri.sandbox-namespace", "default"),
        ]
    }

    /// The same by CRI-O.
    fn marks_of_crio<'a>(kind: &'a str, sandbox_id: &'a str) -> [(&'a str, &'a str); 4] {
        [
            ("io.kubernetes.cri-o.ContainerType", kind),
            ("io.kubernetes.cri-o.SandboxID", sandbox_id),
            ("io.kubernetes.pod.name", "web-0"),
            ("io.kubernetes.pod.namespace", "default"),
        ]
    }

    /// The id that [`testing::decided`] gives.
    const ID: &str = "0123abcd";

    #[test]
    fn pod_annotations_request_nothing_in_the_sandbox() {
        let asks = [("aliyun.com/gpu-mem-container", "6"), ("aliyun.com/gpu-visible-devices", "0")];
        for (marks, is_sandbox) in [
            (marks("sandbox", ID), true),
            (marks_of_crio("sandbox", ID), true),
            (marks("container", ID), false),
            (marks("sandbox", "another"), false),
            (marks_of_crio("container", "another"), false),
        ] {
            let annotations = [&marks[..], &asks].concat();
            for env in [true, false] {
                let trust = Trust { env, annotations: true };
                for rules in [PLAIN, EXCLUSIVE, QUOTAS_ONLY, testing::RULES] {
                    let rules = Rules { trust, ..rules };
                    let decision = testing::decided(&["PATH=/bin"], &annotations, &rules).unwrap();
                    assert_eq!(decision.request().is_none(), is_sandbox, "{marks:?} {decision:?}");
                }
            }
        }
    }

    /// podman before 4.6 copies annotations from an image's manifest: each mark but the id can be an image's.
    #[test]
    fn no_mark_alone_makes_a_sandbox() {
        let quota =
            [("aliyun.com/gpu-mem-container", "3"), ("aliyun.com/gpu-visible-devices", "0")];
        let all = marks("sandbox", ID);
        for left_out in 0..all.len() {
            let mut marks = all.to_vec();
            marks.remove(left_out);
            let annotations = [&quota[..], &marks].concat();
            let decision = testing::decided(&[], &annotations, &PLAIN).unwrap();
            assert_eq!(only_quota(&decision).amounts, [3], "{marks:?}");
        }
    }

    /// A container that calls itself a sandbox is not exempt from the rules.
    #[test]
    fn sandbox_mark_alone_exempts_no_container() {
        let annotations = [("io.kubernetes.cri.container-type", "sandbox")];
        let decided = |env: &[&str], rules| testing::decided(env, &annotations, rules);
        let named = ["NVIDIA_VISIBLE_DEVICES=all"];
        assert!(decided(&named, &EXCLUSIVE).unwrap().request().is_some());
        assert!(decided(&named, &QUOTAS_ONLY).is_err());
        let quota = ["ALIYUN_COM_GPU_MEM_CONTAINER=3", "ALIYUN_COM_GPU_MEM_DEV=15"];
        assert_eq!(only_quota(&decided(&quota, &PLAIN).unwrap()).amounts, [3]);
    }

    /// A sandbox that has GPUs is refused if its pod has a quota.
    #[test]
    fn sandbox_with_gpus_under_pod_quota_is_refused() {
        let annotations =
            [&marks("sandbox", ID)[..], &[("aliyun.com/gpu-mem-container", "3")]].concat();
        let error = testing::decided(&["NVIDIA_VISIBLE_DEVICES=0"], &annotations, &testing::RULES);
        assert_eq!(
            error.unwrap_err().to_string(),
            "this is the sandbox of a pod with aliyun.com/gpu-mem-container=3, and it has GPUs by \
             NVIDIA_VISIBLE_DEVICES=0: a sandbox uses none, and its pod's quota does not count in \
             it; take the GPUs out of the sandbox"
        );
    }

    #[test]
    fn a_pods_containers_have_no_mixed_mode() {
        let env = ["ALIYUN_COM_GPU_MEM_CONTAINER=3", "NVIDIA_VISIBLE_DEVICES=0,1"];
        let may_mix = |annotations: &[(&str, &str)]| {
            testing::decided(&env, annotations, &testing::RULES).unwrap().request().unwrap().may_mix
        };
        assert!(may_mix(&[]));
        assert!(!may_mix(&marks("container", "another")));
        assert!(!may_mix(&marks_of_crio("container", "another")));
    }

    #[test]
    fn reads_the_memory_lists_of_the_interface() {
        for (memory, amounts) in [
            ("3", vec![3]),
            ("3,1", vec![3, 1]),
            ("3,4,5,6", vec![3, 4, 5, 6]),
            (" 3 ,  1 ", vec![3, 1]),
            ("003", vec![3]),
        ] {
            let request = from_memory(memory).unwrap();
            assert_eq!(only_quota(&request).amounts, amounts, "{memory:?}");
            assert_eq!(only_quota(&request).measure, Measure::Parts(15));
        }
    }

    #[test]
    fn absent_empty_or_zero_memory_disables_cgpu() {
        let unset = from_env(&["PATH=/bin", "ALIYUN_COM_GPU_MEM_DEV=15"]).unwrap();
        assert_eq!(reason(&unset), "ALIYUN_COM_GPU_MEM_CONTAINER is not set");
        for (memory, expected) in [
            ("", "ALIYUN_COM_GPU_MEM_CONTAINER is empty"),
            ("  ", "ALIYUN_COM_GPU_MEM_CONTAINER is empty"),
            ("0", "ALIYUN_COM_GPU_MEM_CONTAINER=0"),
            ("00", "ALIYUN_COM_GPU_MEM_CONTAINER=00"),
            ("1,0,0", "ALIYUN_COM_GPU_MEM_CONTAINER=1,0,0 contains a zero"),
            ("0,16", "ALIYUN_COM_GPU_MEM_CONTAINER=0,16 contains a zero"),
        ] {
            assert_eq!(reason(&from_memory(memory).unwrap()), expected);
        }
    }

    #[test]
    fn refuses_malformed_memory_list_even_with_a_zero() {
        for (memory, item) in [
            ("-1", "-1"),
            ("3.5", "3.5"),
            ("+3", "+3"),
            ("3,,4", "\"\""),
            ("3,", "\"\""),
            (",", "\"\""),
            ("3 4", "\"3 4\""),
            ("99999999999999999999", "99999999999999999999"),
            ("0x3", "0x3"),
            ("３", "\"\\u{ff13}\""),
            ("٣", "\"\\u{663}\""),
            ("0,x", "x"),
            ("x,0", "x"),
        ] {
            let setting = Setting { name: MEM.into(), value: memory.to_owned() };
            assert_eq!(
                sentence(from_memory(memory)),
                format!(
                    "{setting}: {item} is no whole number below 2^64; \
                     write digits only, or a comma list of such numbers, one for each GPU"
                )
            );
        }
    }

    #[test]
    fn refuses_value_that_is_not_plain_text() {
        for (value, quoted) in
            [("3\n", "3\\n"), ("\u{fffd}", "\\u{fffd}"), ("\x1b[0m", "\\u{1b}[0m")]
        {
            assert_eq!(
                sentence(from_memory(value)),
                format!(
                    "ALIYUN_COM_GPU_MEM_CONTAINER=\"{quoted}\" is no text: \
                     it has control characters, or bytes that are not UTF-8; \
                     write it anew in plain characters"
                )
            );
        }
    }

    #[test]
    fn refuses_total_that_is_no_positive_integer() {
        for total in ["0", "15,15", "15GiB", "-15", "99999999999999999999", "x"] {
            let env = ["ALIYUN_COM_GPU_MEM_CONTAINER=3", &format!("{DEV}={total}")];
            assert_eq!(
                sentence(from_env(&env)),
                format!(
                    "ALIYUN_COM_GPU_MEM_DEV={total} is not one whole number from 1; write the \
                     memory of each GPU, digits only, in the unit of ALIYUN_COM_GPU_MEM_CONTAINER"
                )
            );
        }
    }

    #[test]
    fn refuses_more_than_the_whole_gpu() {
        assert_eq!(
            sentence(from_memory("3,16")),
            "ALIYUN_COM_GPU_MEM_CONTAINER=3,16 asks for 16, more than the whole GPU \
             (ALIYUN_COM_GPU_MEM_DEV=15); lower the one or correct the other"
        );
        assert!(from_memory("15").is_ok());
    }

    #[test]
    fn memory_without_total_uses_gib_or_given_unit() {
        let measure = |env: &[&str]| only_quota(&from_env(env).unwrap()).measure;
        let gib = Measure::UnitBytes(1 << 30);
        assert_eq!(measure(&["ALIYUN_COM_GPU_MEM_CONTAINER=3"]), gib);
        assert_eq!(measure(&["ALIYUN_COM_GPU_MEM_CONTAINER=3", "ALIYUN_COM_GPU_MEM_DEV= "]), gib);
        for (unit, bytes) in [
            ("", 1 << 30),
            ("GiB", 1 << 30),
            ("GB", 1 << 30),
            ("g", 1 << 30),
            ("Gi", 1 << 30),
            ("MiB", 1 << 20),
            ("mb", 1 << 20),
            ("M", 1 << 20),
            ("MI", 1 << 20),
            (" 128MiB ", 128 << 20),
            ("128mib", 128 << 20),
            ("18446744073709551615MiB", u128::from(u64::MAX) << 20),
        ] {
            let unit = format!("ALIYUN_COM_GPU_MEM_UNIT={unit}");
            let found = measure(&["ALIYUN_COM_GPU_MEM_CONTAINER=3", &unit]);
            assert_eq!(found, Measure::UnitBytes(bytes), "{unit}");
        }
    }

    #[test]
    fn unknown_unit_is_refused_only_if_needed() {
        for unit in ["TiB", "0MiB", "-1MiB", "1.5MiB", "128", "128GiB"] {
            let unit = format!("ALIYUN_COM_GPU_MEM_UNIT={unit}");
            assert_eq!(
                sentence(from_env(&["ALIYUN_COM_GPU_MEM_CONTAINER=3", &unit])),
                format!(
                    "{unit} is no known unit; write GiB, MiB or a number of MiB as 128MiB, \
                     or set ALIYUN_COM_GPU_MEM_DEV"
                )
            );
            assert_eq!(only_quota(&beside_quota(&[&unit]).unwrap()).measure, Measure::Parts(15));
        }
        assert!(beside_quota(&["ALIYUN_COM_GPU_MEM_UNIT=\u{fffd}"]).is_ok());
    }

    /// A weight is a whole number from 1, and unset by default.
    #[test]
    fn weight_is_a_positive_integer_without_a_default() {
        let weight = |env: &[&str]| {
            let request = beside_quota(env).unwrap();
            match only_quota(&request).shares.weights[..] {
                [] => None,
                [Weight { value: WeightValue::Number(value), .. }] => Some(value),
                ref weights => panic!("{weights:?}"),
            }
        };
        assert_eq!(weight(&[]), None);
        assert_eq!(weight(&["ALIYUN_COM_GPU_SCHD_WEIGHT= "]), None);
        assert_eq!(weight(&["ALIYUN_COM_GPU_SCHD_WEIGHT=1"]), Some(1));
        assert_eq!(weight(&["ALIYUN_COM_GPU_SCHD_WEIGHT= 20 "]), Some(20));
        for value in ["0", "-1", "1.5", "1,2", "99999999999999999999", "heavy"] {
            let setting = format!("ALIYUN_COM_GPU_SCHD_WEIGHT={value}");
            assert_eq!(
                sentence(beside_quota(&[&setting])),
                format!(
                    "{setting} is no whole number from 1; write the compute weight, digits only"
                )
            );
        }
    }

    #[test]
    fn a_high_priority_is_0_or_1() {
        let high =
            |env: &[&str]| only_quota(&beside_quota(env).unwrap()).shares.high_priority.is_some();
        assert!(!high(&[]));
        assert!(!high(&["ALIYUN_COM_GPU_HIGH_PRIO="]));
        assert!(!high(&["ALIYUN_COM_GPU_HIGH_PRIO=0"]));
        assert!(high(&["ALIYUN_COM_GPU_HIGH_PRIO=1"]));
        assert_eq!(
            sentence(beside_quota(&["ALIYUN_COM_GPU_HIGH_PRIO=yes"])),
            "ALIYUN_COM_GPU_HIGH_PRIO=yes is neither 0 nor 1; write 1 for high priority"
        );
    }

    #[test]
    fn cgpu_disable_takes_true_or_1_ignoring_case() {
        for value in ["true", "TRUE", "True", "1", " 1 "] {
            let setting = Setting { name: "CGPU_DISABLE".into(), value: value.to_owned() };
            let request = beside_quota(&[&format!("CGPU_DISABLE={value}")]).unwrap();
            assert_eq!(reason(&request), setting.to_string());
        }
        for value in ["false", "False", "0", "", " "] {
            let request = beside_quota(&[&format!("CGPU_DISABLE={value}")]).unwrap();
            assert_eq!(only_quota(&request).amounts, [3]);
        }
        assert_eq!(
            sentence(beside_quota(&["CGPU_DISABLE=yes"])),
            "CGPU_DISABLE=yes is neither yes nor no; write true or 1, false or 0"
        );
    }

    /// If a source is off, nothing else of its quota is read.
    #[test]
    fn settings_of_a_disabled_source_are_not_read() {
        let junk = [
            "ALIYUN_COM_GPU_MEM_DEV=x",
            "ALIYUN_COM_GPU_MEM_UNIT=x",
            "ALIYUN_COM_GPU_SCHD_WEIGHT=x",
            "ALIYUN_COM_GPU_HIGH_PRIO=x",
            "ALIYUN_COM_GPU_VISIBLE_DEVICES=\u{fffd}",
            "NVIDIA_VISIBLE_DEVICES=\x07,,",
        ];
        for off in [
            &["PATH=/bin"][..],
            &["ALIYUN_COM_GPU_MEM_CONTAINER="],
            &["ALIYUN_COM_GPU_MEM_CONTAINER=1,0"],
            &["CGPU_DISABLE=true", "ALIYUN_COM_GPU_MEM_CONTAINER=x"],
        ] {
            let decision = from_env(&[off, &junk[..]].concat()).unwrap();
            assert!(decision.request().is_none(), "{off:?}");
        }
    }

    /// The scheduler's failure is reported in its own words, whatever else is set.
    #[test]
    fn scheduler_failure_is_reported_before_other_settings() {
        let failed = "NVIDIA_VISIBLE_DEVICES=no-gpu-has-6GiB-to-run";
        let expected = "the scheduler found no GPU for this container: \
                        NVIDIA_VISIBLE_DEVICES=no-gpu-has-6GiB-to-run; free GPU memory on this \
                        node or ask for less (ALIYUN_COM_GPU_MEM_CONTAINER)";
        assert_eq!(sentence(from_env(&[failed, "ALIYUN_COM_GPU_MEM_IDX=-1"])), expected);
        assert_eq!(sentence(from_env(&[failed, "CGPU_DISABLE=true"])), expected);
        assert_eq!(sentence(beside_quota(&[failed])), expected);

        let untrusted = Trust { env: false, annotations: true };
        let rules = Rules { trust: untrusted, ..PLAIN };
        assert!(testing::decided(&[failed], &[], &rules).is_ok());
    }

    #[test]
    fn the_neutral_names_say_sizes_and_per_cent() {
        let read = |env: &[&str]| {
            let decision = from_env(env).unwrap();
            let quota = only_quota(&decision);
            assert_eq!(quota.spelling, Spelling::Neutral);
            (quota.amounts.clone(), quota.measure)
        };
        let mib = Measure::UnitBytes(1 << 20);
        assert_eq!(read(&["CGPU_MEMORY=4GiB"]), (vec![4096], mib));
        assert_eq!(read(&["CGPU_MEMORY= 4g,512m "]), (vec![4096, 512], mib));
        assert_eq!(read(&["CGPU_MEMORY=25%"]), (vec![2500], Measure::Parts(10_000)));
        for (value, expected) in [
            (
                "4",
                "CGPU_MEMORY=4: 4 has no unit; write 4GiB or 4MiB, or per cent of a GPU's memory as 25%",
            ),
            (
                "4x",
                "CGPU_MEMORY=4x: 4x is no amount of memory; write a size as 4GiB or 4096MiB, or per cent \
                 of a GPU's memory as 25%; a comma list has one for each GPU",
            ),
            ("120%", "CGPU_MEMORY=120% is more than a whole GPU; write 100% or less"),
            (
                "1g,5%",
                "CGPU_MEMORY=1g,5% has sizes and per cent side by side; write all of them the one way",
            ),
            (
                "1k",
                "CGPU_MEMORY=1k: 1k is less than can be held; write 1MiB or more, or 0.01% or more",
            ),
        ] {
            assert_eq!(sentence(from_env(&[&format!("CGPU_MEMORY={value}")])), expected);
        }
        for zero in ["0", "0GiB", "0%", "4GiB,0m"] {
            let memory = format!("CGPU_MEMORY={zero}");
            let reason = reason(&from_env(&[&memory]).unwrap());
            assert!(reason.starts_with(&memory), "{reason}");
        }
        let annotations =
            [("cgpu/memory", "2GiB"), ("cgpu/weight", "3"), ("cgpu/priority", "high")];
        let decision = testing::decided(&[], &annotations, &PLAIN).unwrap();
        let quota = only_quota(&decision);
        assert_eq!((quota.source, &quota.amounts[..]), (Source::Annotations, &[2048][..]));
        assert_eq!(quota.shares.weights[0].value, WeightValue::Number(3));
        assert!(quota.shares.high_priority.is_some());
    }

    #[test]
    fn weight_accepts_percentage_and_priority_accepts_words() {
        let shares = |env: &[&str]| {
            let all = [&["CGPU_MEMORY=1GiB"], env].concat();
            from_env(&all).map(|decision| only_quota(&decision).shares.clone())
        };
        let weights = |env: &[&str]| {
            let shares = shares(env).unwrap();
            shares.weights.iter().map(|weight| weight.value).collect::<Vec<_>>()
        };
        assert_eq!(weights(&["CGPU_WEIGHT=25%"]), [WeightValue::Share(2500)]);
        assert_eq!(
            weights(&["CGPU_WEIGHT=4", "ALIYUN_COM_GPU_SCHD_WEIGHT=2"]),
            [WeightValue::Number(4), WeightValue::Number(2)]
        );
        for (env, is_high) in [
            (&["CGPU_PRIORITY=high"][..], true),
            (&["CGPU_PRIORITY=HIGH", "ALIYUN_COM_GPU_HIGH_PRIO=0"], true),
            (&["CGPU_PRIORITY=normal", "ALIYUN_COM_GPU_HIGH_PRIO=1"], false),
            (&["CGPU_PRIORITY=", "ALIYUN_COM_GPU_HIGH_PRIO=1"], true),
        ] {
            assert_eq!(shares(env).unwrap().high_priority.is_some(), is_high, "{env:?}");
        }
        let refused = |item: &str| shares(&[item]).unwrap_err().to_string();
        assert_eq!(
            refused("CGPU_PRIORITY=1"),
            "CGPU_PRIORITY=1 is neither high nor normal; write one of these"
        );
        for value in ["0%", "101%", "x%"] {
            let expected = format!(
                "CGPU_WEIGHT={value} is no part of a GPU's computing time; write 0.01% to 100%, or a weight \
                 as 2"
            );
            assert_eq!(refused(&format!("CGPU_WEIGHT={value}")), expected);
        }
    }

    /// NVIDIA's memory limit is a quota, and its memory request is none.
    #[test]
    fn nvidia_limit_sets_a_quota_and_request_none() {
        let decision = from_env(&["NVIDIA_GPU_MEMORY_LIMIT=4096"]).unwrap();
        let quota = only_quota(&decision);
        assert_eq!((quota.spelling, &quota.amounts[..]), (Spelling::Nvidia, &[4096][..]));
        // As we leave it in a bundle.
        let aside = from_env(&["CGPU_NVIDIA_GPU_MEMORY_LIMIT=4096"]).unwrap();
        assert_eq!(only_quota(&aside).amounts, [4096]);
        assert_eq!(
            sentence(from_env(&["NVIDIA_GPU_MEMORY_LIMIT=4GiB"])),
            "NVIDIA_GPU_MEMORY_LIMIT=4GiB is no whole number of MiB; write digits only, as NVIDIA's \
             toolkit has it"
        );
        let request = ["NVIDIA_GPU_MEMORY_REQUEST=4096", "NVIDIA_VISIBLE_DEVICES=0"];
        assert!(not_ours(&request, &PLAIN).unwrap().is_some());
        assert!(not_ours(&request, &QUOTAS_ONLY).is_err());
    }

    #[test]
    fn of_several_ways_all_count() {
        let env =
            ["CGPU_MEMORY=4GiB", "ALIYUN_COM_GPU_MEM_CONTAINER=3", "NVIDIA_GPU_MEMORY_LIMIT=2048"];
        let annotations = [("cgpu/memory", "1GiB")];
        let decision = testing::decided(&env, &annotations, &PLAIN).unwrap();
        let quotas = &decision.request().unwrap().quotas;
        let spellings: Vec<_> = quotas.iter().map(|quota| (quota.spelling, quota.source)).collect();
        assert_eq!(
            spellings,
            [
                (Spelling::Neutral, Source::Env),
                (Spelling::Aliyun, Source::Env),
                (Spelling::Nvidia, Source::Env),
                (Spelling::Neutral, Source::Annotations),
            ]
        );
        // One of them that is off leaves the others.
        let decision = from_env(&["CGPU_MEMORY=", "ALIYUN_COM_GPU_MEM_CONTAINER=3"]).unwrap();
        assert_eq!(only_quota(&decision).spelling, Spelling::Aliyun);
        let off = ["CGPU_MEMORY=4GiB", "CGPU_DISABLE=true"];
        assert_eq!(reason(&from_env(&off).unwrap()), "CGPU_DISABLE=true");
        let twice = [("cgpu/gpus", "device=0"), ("aliyun.com/gpu-visible-devices", "1")];
        assert_eq!(
            sentence(testing::decided(&env, &twice, &PLAIN)),
            "cgpu/gpus=device=0 and aliyun.com/gpu-visible-devices=1 both choose GPUs; leave one of them \
             out"
        );
        let twice = [("cgpu/gpus", "device=0"), ("aliyun.com/gpu-visible-devices", "0")];
        assert!(testing::decided(&env, &twice, &PLAIN).is_ok());
    }

    #[test]
    fn names_match_exactly_and_no_prefix() {
        let request = from_env(&[
            "CGPU0_PRIORITY=1",
            "CGPU_COUNT=x",
            "CGPU_DISABLE_ALL=true",
            "ALIYUN_COM_GPU_MEM_CONTAINER_2=x",
            "XALIYUN_COM_GPU_MEM_CONTAINER=x",
            "aliyun_com_gpu_mem_container=x",
            "ALIYUN_COM_GPU_MEM_IDX=-1",
            "ALIYUN_COM_GPU_MEM_POD=x",
            "ALIYUN_COM_GPU_MEM_ASSIGNED=x",
            "=",
            "",
        ])
        .unwrap();
        assert_eq!(reason(&request), "ALIYUN_COM_GPU_MEM_CONTAINER is not set");
    }

    #[test]
    fn of_a_variable_given_twice_the_last_counts() {
        let request =
            from_env(&["ALIYUN_COM_GPU_MEM_CONTAINER=x", "ALIYUN_COM_GPU_MEM_CONTAINER=4"]);
        assert_eq!(only_quota(&request.unwrap()).amounts, [4]);
        let request = from_env(&["ALIYUN_COM_GPU_MEM_CONTAINER=4", "ALIYUN_COM_GPU_MEM_CONTAINER"]);
        assert_eq!(reason(&request.unwrap()), "ALIYUN_COM_GPU_MEM_CONTAINER is not set");
        let request = from_env(&["ALIYUN_COM_GPU_MEM_CONTAINER", "ALIYUN_COM_GPU_MEM_CONTAINER=4"]);
        assert_eq!(only_quota(&request.unwrap()).amounts, [4]);
    }

    #[test]
    fn an_annotation_says_what_its_variable_says() {
        let annotations = [
            ("aliyun.com/gpu-mem-container", "512,256"),
            ("aliyun.com/gpu-mem-unit", "MiB"),
            ("aliyun.com/gpu-visible-devices", "1,0"),
            ("aliyun.com/gpu-schd-weight", "2"),
            ("aliyun.com/gpu-high-prio", "1"),
            ("aliyun.com/cgpu-disable", "false"),
        ];
        let decision = testing::decided(&[], &annotations, &PLAIN).unwrap();
        let quota = only_quota(&decision);
        assert_eq!(quota.source, Source::Annotations);
        assert_eq!(quota.amounts, [512, 256]);
        assert_eq!(quota.measure, Measure::UnitBytes(1 << 20));
        assert_eq!(quota.shares.weights[0].value, WeightValue::Number(2));
        assert!(quota.shares.high_priority.is_some());
        assert!(decision.request().unwrap().selections.annotation.is_some());

        let refused = |name, value| {
            let annotations = [("aliyun.com/gpu-mem-container", "3"), (name, value)];
            sentence(testing::decided(&[], &annotations, &PLAIN))
        };
        assert_eq!(
            refused("aliyun.com/gpu-mem-dev", "2"),
            "aliyun.com/gpu-mem-container=3 asks for 3, more than the whole GPU \
             (aliyun.com/gpu-mem-dev=2); lower the one or correct the other"
        );
        assert_eq!(
            refused("aliyun.com/gpu-mem-unit", "TiB"),
            "aliyun.com/gpu-mem-unit=TiB is no known unit; write GiB, MiB or a number of MiB \
             as 128MiB, or set aliyun.com/gpu-mem-dev"
        );
    }

    #[test]
    fn only_trusted_sources_are_read() {
        let env = ["ALIYUN_COM_GPU_MEM_CONTAINER=x", "NVIDIA_VISIBLE_DEVICES=0"];
        let annotations =
            [("aliyun.com/gpu-mem-container", "y"), ("aliyun.com/gpu-visible-devices", "0")];
        let reads = |env_trusted, annotations_trusted| {
            let trust = Trust { env: env_trusted, annotations: annotations_trusted };
            testing::decided(&env, &annotations, &Rules { trust, ..PLAIN })
        };
        assert!(sentence(reads(true, false)).starts_with("ALIYUN_COM_GPU_MEM_CONTAINER=x"));
        assert!(sentence(reads(false, true)).starts_with("aliyun.com/gpu-mem-container=y"));

        let neither = Trust { env: false, annotations: false };
        for rules in [PLAIN, EXCLUSIVE, QUOTAS_ONLY] {
            let rules = Rules { trust: neither, ..rules };
            assert_eq!(
                reason(&testing::decided(&env, &annotations, &rules).unwrap()),
                "ALIYUN_COM_GPU_MEM_CONTAINER=x doesn't count (trust_env is false) and \
                 aliyun.com/gpu-mem-container=y doesn't count (trust_annotations is false)"
            );
            assert_eq!(
                reason(&testing::decided(&["NVIDIA_VISIBLE_DEVICES=0"], &[], &rules).unwrap()),
                "neither variables nor annotations are trusted \
                 (trust_env and trust_annotations are false)"
            );
        }
        let trust = Trust { env: false, annotations: true };
        let rules = Rules { trust, ..PLAIN };
        assert_eq!(
            reason(&testing::decided(&["NVIDIA_VISIBLE_DEVICES=0"], &[], &rules).unwrap()),
            "aliyun.com/gpu-mem-container is not set (trust_env is false)"
        );
    }

    /// A quota of an untrusted source is not ignored if the container has GPUs: the container is
    /// refused.
    #[test]
    fn untrusted_quota_with_gpus_is_refused() {
        let env = ["ALIYUN_COM_GPU_MEM_CONTAINER=3"];
        let annotations = [("aliyun.com/gpu-visible-devices", "0")];
        let trust = Trust { env: false, annotations: true };
        let rules = Rules { trust, ..testing::RULES };
        assert_eq!(
            sentence(testing::decided(&env, &annotations, &rules)),
            "ALIYUN_COM_GPU_MEM_CONTAINER=3 asks for a quota and doesn't count on this host (trust_env = \
             false), and this container gets GPUs by aliyun.com/gpu-visible-devices=0; ask for the \
             quota by a source that counts, or take it out"
        );
        assert!(testing::decided(&env, &[], &rules).unwrap().request().is_none());
        // A trusted quota is enough.
        let quota = [("aliyun.com/gpu-mem-container", "2")];
        assert_eq!(only_quota(&testing::decided(&env, &quota, &rules).unwrap()).amounts, [2]);
    }

    #[test]
    fn disabled_source_leaves_the_other_sources_quota() {
        let quota = ["ALIYUN_COM_GPU_MEM_CONTAINER=3", "ALIYUN_COM_GPU_MEM_DEV=15"];
        for annotation in
            [("aliyun.com/cgpu-disable", "true"), ("aliyun.com/gpu-mem-container", "0"), ("x", "y")]
        {
            let decision = testing::decided(&quota, &[annotation], &PLAIN).unwrap();
            assert_eq!(only_quota(&decision).source, Source::Env);
        }
        let quota = [("aliyun.com/gpu-mem-container", "3")];
        for variable in ["CGPU_DISABLE=true", "ALIYUN_COM_GPU_MEM_CONTAINER=0", "PATH=/"] {
            let decision = testing::decided(&[variable], &quota, &PLAIN).unwrap();
            assert_eq!(only_quota(&decision).source, Source::Annotations);
        }
        let zero = [("aliyun.com/gpu-mem-container", "0")];
        let decision = testing::decided(&["CGPU_DISABLE=1"], &zero, &PLAIN).unwrap();
        assert_eq!(reason(&decision), "CGPU_DISABLE=1 and aliyun.com/gpu-mem-container=0");
    }

    /// A container with a quota and without a GPU is none of cgpu's, and is passed through.
    #[test]
    fn quota_without_a_gpu_is_passed_through() {
        let selecting = |env: &[&str], annotation: &str| {
            let mut all = vec!["ALIYUN_COM_GPU_MEM_CONTAINER=3"];
            all.extend(env);
            let annotations = [("aliyun.com/gpu-visible-devices", annotation)];
            match testing::decided(&all, &annotations, &PLAIN) {
                Ok(Decision { verdict: Verdict::NotOurs(reason), .. }) => Some(reason),
                _ => None,
            }
        };
        for (env, annotation, expected) in [
            (&["NVIDIA_VISIBLE_DEVICES=none"][..], "", Some("NVIDIA_VISIBLE_DEVICES=none")),
            (&["NVIDIA_VISIBLE_DEVICES=void"], "", Some("NVIDIA_VISIBLE_DEVICES=void")),
            (&["NVIDIA_VISIBLE_DEVICES="], "", Some("NVIDIA_VISIBLE_DEVICES=\"\"")),
            (&["NVIDIA_VISIBLE_DEVICES=void"], "0", Some("NVIDIA_VISIBLE_DEVICES=void")),
            (
                &["ALIYUN_COM_GPU_VISIBLE_DEVICES=none"],
                "",
                Some("ALIYUN_COM_GPU_VISIBLE_DEVICES=none"),
            ),
            (&[], "none", Some("aliyun.com/gpu-visible-devices=none")),
            // These would get their GPUs from NVIDIA's toolkit, without a quota.
            (&["ALIYUN_COM_GPU_VISIBLE_DEVICES=none", "NVIDIA_VISIBLE_DEVICES=all"], "", None),
            (&["NVIDIA_VISIBLE_DEVICES=all"], "void", None),
            (&["NVIDIA_VISIBLE_DEVICES=0"], "void", None),
            (&["ALIYUN_COM_GPU_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=void"], "", None),
            (&["ALIYUN_COM_GPU_VISIBLE_DEVICES= ", "NVIDIA_VISIBLE_DEVICES=0"], "", None),
            (&["NVIDIA_VISIBLE_DEVICES=all"], "", None),
            (&[], " ", None),
            (&["ALIYUN_COM_GPU_VISIBLE_DEVICES=\n", "NVIDIA_VISIBLE_DEVICES=void"], "", None),
        ] {
            let expected = expected.map(|setting| format!("{setting} selects no GPU"));
            assert_eq!(selecting(env, annotation), expected, "{env:?} {annotation:?}");
        }
    }

    /// GPUs without a quota matter only if the rules say so.
    #[test]
    fn gpus_without_quota_matter_only_under_some_rules() {
        for (env, held) in [
            (&["NVIDIA_VISIBLE_DEVICES=all"][..], true),
            (&["NVIDIA_VISIBLE_DEVICES=0"], true),
            (&["NVIDIA_VISIBLE_DEVICES=\u{fffd}"], true),
            (&["ALIYUN_COM_GPU_VISIBLE_DEVICES=0"], true),
            (&["CGPU_DISABLE=true", "NVIDIA_VISIBLE_DEVICES=0"], true),
            (&["ALIYUN_COM_GPU_VISIBLE_DEVICES=none", "NVIDIA_VISIBLE_DEVICES=0"], true),
            (&["NVIDIA_VISIBLE_DEVICES=0,MIG-1"], true),
            (&["ALIYUN_COM_GPU_VISIBLE_DEVICES=MIG-1", "NVIDIA_VISIBLE_DEVICES=all"], true),
            (&["NVIDIA_VISIBLE_DEVICES=MIG-1,0:1"], false),
            (&["NVIDIA_VISIBLE_DEVICES=void"], false),
            (&["NVIDIA_VISIBLE_DEVICES="], false),
            (&["NVIDIA_VISIBLE_DEVICES"], false),
            (&["ALIYUN_COM_GPU_VISIBLE_DEVICES="], false),
            (&["ALIYUN_COM_GPU_MEM_CONTAINER=0"], false),
        ] {
            assert!(not_ours(env, &PLAIN).unwrap().is_some(), "{env:?}");
            let exclusive = not_ours(env, &EXCLUSIVE);
            assert_eq!(!matches!(exclusive, Ok(Some(_))), held, "{env:?} {exclusive:?}");
            assert_eq!(not_ours(env, &QUOTAS_ONLY).is_err(), held, "{env:?}");
        }
        assert_eq!(
            not_ours(&["NVIDIA_VISIBLE_DEVICES=MIG-1"], &EXCLUSIVE).unwrap().unwrap(),
            "NVIDIA_VISIBLE_DEVICES=MIG-1 names MIG devices, \
             and MIG devices have memory of their own"
        );
        assert_eq!(
            not_ours(&["PATH=/"], &QUOTAS_ONLY).unwrap().unwrap(),
            "ALIYUN_COM_GPU_MEM_CONTAINER is not set, and no variable names a GPU"
        );
        let quota =
            beside_quota(&["ALIYUN_COM_GPU_VISIBLE_DEVICES=none", "NVIDIA_VISIBLE_DEVICES=all"]);
        assert_eq!(
            sentence(quota),
            "ALIYUN_COM_GPU_VISIBLE_DEVICES=none selects no GPU, NVIDIA_VISIBLE_DEVICES=all does; \
             let them agree, or leave one of them out"
        );
    }

    #[test]
    fn swarms_variables_choose_gpus_by_uuid() {
        let swarms = ["DOCKER_RESOURCE_*".to_owned()];
        let rules = Rules { resource_variables: &swarms, ..testing::RULES };
        let resource = |env: &[&str], rules: &Rules| {
            let all = [&["ALIYUN_COM_GPU_MEM_CONTAINER=3"], env].concat();
            let decision = testing::decided(&all, &[], rules).unwrap();
            let selections = decision.request().unwrap().selections.clone();
            let resource = selections.resource.map(|selection| selection.setting.to_string());
            (resource, selections.nvidia.is_some())
        };
        let of_swarm = Some("DOCKER_RESOURCE_GPU=GPU-a,GPU-b".to_owned());
        let env = ["DOCKER_RESOURCE_GPU=GPU-a,GPU-b", "NVIDIA_VISIBLE_DEVICES=all"];
        assert_eq!(resource(&env, &rules), (of_swarm.clone(), false));
        let two = ["DOCKER_RESOURCE_NVIDIA-GPU=GPU-a", "DOCKER_RESOURCE_X=GPU-b"];
        assert_eq!(resource(&two, &rules).0.unwrap(), "DOCKER_RESOURCE_NVIDIA-GPU=GPU-a,GPU-b");
        // What Swarm only counts is no GPU's index.
        let counted = ["DOCKER_RESOURCE_SSD=1", "NVIDIA_VISIBLE_DEVICES=0"];
        assert_eq!(resource(&counted, &rules), (None, true));
        assert_eq!(resource(&env, &testing::RULES), (None, true));
        let gpus = ["DOCKER_RESOURCE_GPU".to_owned()];
        let exact = Rules { resource_variables: &gpus, ..rules };
        assert_eq!(resource(&env, &exact).0, of_swarm);
        assert_eq!(resource(&two, &exact).0, None);
    }

    /// Variables and annotations of an image ask for no unlimited GPUs if they are not accepted.
    #[test]
    fn unaccepted_image_settings_request_no_unlimited_gpus() {
        let rules = Rules { whole_beside_quota: false, ..testing::RULES };
        let annotation = [("aliyun.com/gpu-visible-devices", "0")];
        for (env, annotations) in [
            (&["NVIDIA_VISIBLE_DEVICES=all"][..], &[][..]),
            (&["ALIYUN_COM_GPU_VISIBLE_DEVICES=0"], &[]),
            (&[], &annotation[..]),
            (&["NVIDIA_VISIBLE_DEVICES=all"], &annotation[..]),
        ] {
            let decision = testing::decided(env, annotations, &rules).unwrap();
            assert!(decision.request().is_none(), "{decision:?}");
            assert!(
                testing::decided(env, annotations, &testing::RULES).unwrap().request().is_some()
            );
        }
        let quota = ["ALIYUN_COM_GPU_MEM_CONTAINER=3", "NVIDIA_VISIBLE_DEVICES=0"];
        assert!(testing::decided(&quota, &[], &rules).unwrap().request().is_some());
    }

    /// Text that is often nearly right.
    fn value() -> impl Strategy<Value = String> {
        prop_oneof![
            any::<String>(),
            "[0-9, ]{0,12}",
            "(0|1|3|15|true|false|all|none|void|GPU-a|MIG-1|128MiB|GiB|\u{fffd}|\n){0,3}",
        ]
    }

    proptest! {
        #[test]
        fn read_and_its_refusals_never_panic(
            env in proptest::collection::vec((0..NAMES.len() + 2, value()), 0..12),
            annotations in proptest::collection::vec((0..NAMES.len() + 1, value()), 0..12),
            env_trusted: bool,
            annotations_trusted: bool,
        ) {
            let env: Vec<String> = env
                .into_iter()
                .map(|(at, value)| match NAMES.get(at) {
                    Some(name) => format!("{}={value}", name.variable),
                    None if at == NAMES.len() => format!("{NVIDIA_VISIBLE_DEVICES}={value}"),
                    None => value,
                })
                .collect();
            let annotations: Vec<(&str, &str)> = annotations
                .iter()
                .map(|(at, value)| (NAMES.get(*at).map_or("", |n| n.annotation), value.as_str()))
                .collect();
            let env: Vec<&str> = env.iter().map(String::as_str).collect();
            let trust = Trust { env: env_trusted, annotations: annotations_trusted };
            for rules in [PLAIN, EXCLUSIVE, QUOTAS_ONLY, testing::RULES] {
                for profile in [Profile::Open, Profile::Strict] {
                    let rules = Rules { trust, profile, ..rules };
                    let text = match testing::decided(&env, &annotations, &rules) {
                        Ok(decision) => {
                            let near = decision.near_misses.iter().map(ToString::to_string);
                            let reason = match &decision.verdict {
                                Verdict::NotOurs(reason) => Some(reason.clone()),
                                Verdict::Ours(_) => None,
                            };
                            near.chain(reason).collect()
                        }
                        Err(error) => error.to_string(),
                    };
                    prop_assert!(!text.contains(char::is_control));
                    prop_assert!(text.len() < 6000);
                }
            }
        }
    }
}
