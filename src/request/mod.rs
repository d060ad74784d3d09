//! What a container asks for, read from its variables and annotations: [`Request`].
//!
//! Knows variables, lists, units and the trust policy. Must not know files or the GPUs
//! of the host: which GPU a name means is `plan`'s matter. Each trusted source is read
//! on its own, the variables of `process.env` under the names that users of Alibaba
//! Cloud cGPU know, the annotations under these ([`name::NAMES`]):
//! `aliyun.com/gpu-mem-container`, `aliyun.com/gpu-mem-dev`, `aliyun.com/gpu-mem-unit`,
//! `aliyun.com/gpu-visible-devices`, `aliyun.com/gpu-schd-weight`,
//! `aliyun.com/gpu-high-prio`, `aliyun.com/cgpu-disable`. Where both ask for a quota,
//! both are kept and the smaller holds on each GPU.

mod error;
pub mod name;
mod quota;
mod selection;
mod setting;

pub use error::RequestError;
pub use setting::Setting;

pub(crate) use quota::{Measure, Quota, Source};
pub(crate) use selection::{Extent, GpuName, Selection};
pub(crate) use setting::Quoted;

use crate::plan::Rules;
use name::{NVIDIA_VISIBLE_DEVICES, Name, VISIBLE_DEVICES};
use quota::{Ask, Off};

/// How the device plugin's value begins where the scheduler found no GPU.
const NO_GPU_FOUND: &str = "no-gpu-has-";

/// Who may ask for GPUs: the configuration's `trust_env` and `trust_annotations`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trust {
    /// `process.env` counts (image and user's variables can't be told apart there).
    pub env: bool,
    /// The bundle's annotations count.
    pub annotations: bool,
}

/// What a container asks for, of the sources that are trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// At most one of each source.
    pub(crate) quotas: Vec<Quota>,
    /// Why the trusted sources without a quota have none.
    off: Vec<Off>,
    /// The GPUs it names.
    pub(crate) selections: Selections,
    trust: Trust,
}

/// The GPUs a container names, each source's word kept apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Selections {
    /// `ALIYUN_COM_GPU_VISIBLE_DEVICES`; empty counts as absent.
    pub(crate) aliyun: Option<Selection>,
    /// `NVIDIA_VISIBLE_DEVICES`; empty is no GPU.
    pub(crate) nvidia: Option<Selection>,
    /// The annotation; empty counts as absent.
    pub(crate) annotation: Option<Selection>,
}

/// Reads what a container asks for from `env` (`NAME=value`; of a name given twice the
/// last counts, as in runc) and `annotations`, as far as `trust` goes.
///
/// # Errors
///
/// Where a quota is asked for that can't be meant, or the scheduler reports through the
/// variables that it found no GPU.
pub fn read<'a>(
    env: &[impl AsRef<str>],
    annotations: impl IntoIterator<Item = (&'a str, &'a str)>,
    trust: Trust,
) -> Result<Request, RequestError> {
    let annotations: Vec<_> = annotations.into_iter().collect();
    let in_env = |name| variable(env, name).filter(|_| trust.env);
    let in_annotations = |name| annotation(&annotations, name).filter(|_| trust.annotations);

    let nvidia = in_env(NVIDIA_VISIBLE_DEVICES);
    if let Some(setting) = &nvidia
        && setting.value.trim_start().starts_with(NO_GPU_FOUND)
    {
        return Err(RequestError::NoGpuFound { setting: setting.clone() });
    }

    let mut quotas = Vec::new();
    let mut off = Vec::new();
    let mut sort = |ask| match ask {
        Ask::Quota(quota) => quotas.push(quota),
        Ask::Off(reason) => off.push(reason),
    };
    if trust.env {
        sort(quota::read(Source::Env, |name: Name| in_env(name.variable))?);
    }
    if trust.annotations {
        sort(quota::read(Source::Annotations, |name: Name| in_annotations(name.annotation))?);
    }

    let selection = |setting| Selection { setting };
    let unless_empty = |setting: &Setting| !setting.value.trim().is_empty();
    let selections = Selections {
        aliyun: in_env(VISIBLE_DEVICES.variable).filter(unless_empty).map(selection),
        nvidia: nvidia.map(selection),
        annotation: in_annotations(VISIBLE_DEVICES.annotation).filter(unless_empty).map(selection),
    };
    Ok(Request { quotas, off, selections, trust })
}

/// What the last item of that name says; one without `=` unsets the name.
fn variable(env: &[impl AsRef<str>], name: &'static str) -> Option<Setting> {
    let mut items = env.iter().map(|item| item.as_ref());
    let last = items.rfind(|item| item.split('=').next() == Some(name))?;
    let (_, value) = last.split_once('=')?;
    Some(Setting { name, value: value.to_owned() })
}

fn annotation(annotations: &[(&str, &str)], name: &'static str) -> Option<Setting> {
    let (_, value) = annotations.iter().rfind(|(key, _)| *key == name)?;
    Some(Setting { name, value: (*value).to_owned() })
}

impl Request {
    /// Why there will be no plan, or `None` where `plan::resolve` makes one or refuses.
    ///
    /// Decided without the host's GPUs, so that a container that asks for nothing costs
    /// nothing and can't fail. Under `exclusive` or `require_quota` a container that
    /// names GPUs in its variables is never out of reach, whatever else it says.
    #[must_use]
    pub fn not_in_effect(&self, rules: &Rules) -> Option<String> {
        let whole_gpus_matter = rules.exclusive || rules.require_quota;
        let held = whole_gpus_matter && self.selections.naming_variable().is_some();
        if !self.quotas.is_empty() {
            let nothing = self.selections.nothing().filter(|_| !held)?;
            Some(format!("{} selects no GPU", nothing.setting))
        } else if let Some(mig) = self.selections.only_mig().filter(|_| held) {
            Some(format!(
                "{} names MIG devices, and MIG devices have memory of their own",
                mig.setting
            ))
        } else if held {
            None
        } else if whole_gpus_matter && self.trust.env {
            Some(format!("{}, and no variable names a GPU", self.why_no_quota()))
        } else {
            Some(self.why_no_quota())
        }
    }

    /// Why no source has a quota: what is set tells more than what isn't.
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
    /// The variable that decides where it speaks for itself.
    fn deciding_variable(&self) -> Option<&Selection> {
        self.aliyun.as_ref().or(self.nvidia.as_ref())
    }

    /// A variable by which the container gets GPUs, from us or from others.
    pub(crate) fn naming_variable(&self) -> Option<&Selection> {
        self.variables().find(|selection| selection.extent() != Extent::Nothing)
    }

    /// A variable that lists GPUs one by one; NVIDIA's first, whose list is the longer.
    pub(crate) fn listing_variable(&self) -> Option<&Selection> {
        let listing = |selection: &&Selection| selection.extent() == Extent::List;
        self.nvidia.as_ref().filter(listing).or(self.aliyun.as_ref().filter(listing))
    }

    /// The selection by which no GPU is left: the variables' word, or, where they list
    /// none, the annotation's.
    pub(crate) fn nothing(&self) -> Option<&Selection> {
        let nothing = |selection: &&Selection| selection.extent() == Extent::Nothing;
        let annotation = self.annotation.as_ref().filter(|_| self.listing_variable().is_none());
        self.deciding_variable().filter(nothing).or(annotation.filter(nothing))
    }

    /// A variable that names MIG devices, where no variable names anything else.
    fn only_mig(&self) -> Option<&Selection> {
        let mut naming = self.variables().filter(|s| s.extent() != Extent::Nothing);
        if naming.clone().all(Selection::is_mig_only) { naming.next() } else { None }
    }

    fn variables(&self) -> impl Iterator<Item = &Selection> + Clone {
        [&self.aliyun, &self.nvidia].into_iter().flatten()
    }
}
