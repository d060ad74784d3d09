//! Which GPUs of the host the selections of a container mean: [`choose`].
//!
//! Knows names and GPUs. Must not know amounts of memory. Variables decide first
//! (`ALIYUN_COM_GPU_VISIBLE_DEVICES` before NVIDIA's, which many images bake in as
//! `all`), then the annotation narrows what they left open or agrees with what they
//! list. Invariant: no list in a [`Choice`] has a GPU twice.

use super::ResolveError;
use super::error::label;
use crate::inventory::{Gpu, GpuState, Inventory};
use crate::request::{Extent, GpuName, Selection, Selections, Setting, Source};

/// What GPUs are chosen for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Purpose<'a> {
    /// A quota; in mixed mode the container has other GPUs as a whole beside.
    Shared {
        /// What asks for it.
        memory: &'a Setting,
        /// Whether GPUs without a quota are refused.
        require_quota: bool,
    },
    /// All GPUs are the container's as a whole.
    Whole,
}

/// A container's GPUs.
#[derive(Debug)]
pub(super) struct Choice<'a> {
    /// All of them, in the plan's order.
    pub(super) gpus: Vec<&'a Gpu>,
    /// Those under a quota of the variables, in their order.
    shared_by_env: Vec<&'a Gpu>,
    /// Those under a quota of the annotations, in their order.
    shared_by_annotation: Vec<&'a Gpu>,
}

impl<'a> Choice<'a> {
    /// The GPUs under a quota, in the order in which that source names them.
    pub(super) fn shared_in_order_of(&self, source: Source) -> &[&'a Gpu] {
        match source {
            Source::Env => &self.shared_by_env,
            Source::Annotations => &self.shared_by_annotation,
        }
    }
}

/// The GPUs that `selections` mean, which select at least one.
pub(super) fn choose<'a>(
    selections: &Selections,
    inventory: &'a Inventory,
    purpose: Purpose<'_>,
) -> Result<Choice<'a>, ResolveError> {
    let host = Host { inventory, purpose };
    let annotation = selections.annotation.as_ref();
    if let (Some(nothing), Some(naming)) = (selections.nothing(), selections.naming_variable()) {
        return Err(nothing_and_something(nothing, naming));
    }
    let Some(variable) = selections.listing_variable() else {
        // The variables leave it open.
        let gpus = match annotation {
            Some(selection) => host.find(selection)?,
            None => host.all()?,
        };
        return Ok(Choice {
            shared_by_env: gpus.clone(),
            shared_by_annotation: gpus.clone(),
            gpus,
        });
    };

    let (gpus, shared) = host.find_by_variables(selections)?;
    // Mixed mode is the variables' own: what they leave out of their quota is not out of
    // another's.
    let shared_by_annotation = match annotation {
        Some(selection) if selection.extent() == Extent::Nothing => {
            return Err(nothing_and_something(selection, variable));
        }
        Some(selection) if selection.extent() == Extent::List => {
            let named = host.find(selection)?;
            if named.len() != gpus.len() || named.iter().any(|gpu| !has(&gpus, gpu)) {
                return Err(ResolveError::DifferentGpus {
                    annotation: selection.setting.clone(),
                    variable: variable.setting.clone(),
                });
            }
            named
        }
        _ => gpus.clone(),
    };
    Ok(Choice { gpus, shared_by_env: shared, shared_by_annotation })
}

/// The host as one request sees it.
#[derive(Debug, Clone, Copy)]
struct Host<'a, 'p> {
    inventory: &'a Inventory,
    purpose: Purpose<'p>,
}

impl<'a> Host<'a, '_> {
    /// The GPUs that the variables mean, and those of them that are to be shared.
    fn find_by_variables(
        &self,
        selections: &Selections,
    ) -> Result<(Vec<&'a Gpu>, Vec<&'a Gpu>), ResolveError> {
        let (aliyun, nvidia) = (selections.aliyun.as_ref(), selections.nvidia.as_ref());
        let shared = match aliyun.or(nvidia) {
            Some(selection) => self.find(selection)?,
            None => self.all()?,
        };
        let (Some(aliyun), Some(nvidia)) = (aliyun, nvidia) else {
            return Ok((shared.clone(), shared));
        };
        if nvidia.extent() != Extent::List {
            return Ok((shared.clone(), shared));
        }
        let gpus = self.find(nvidia)?;
        if let Some(gpu) = shared.iter().find(|gpu| !has(&gpus, gpu)) {
            return Err(ResolveError::Contradiction {
                aliyun: aliyun.setting.clone(),
                gpu: label(gpu),
                nvidia: nvidia.setting.clone(),
            });
        }
        match gpus.iter().find(|gpu| !has(&shared, gpu)) {
            None => Ok((shared.clone(), shared)),
            Some(whole) if matches!(self.purpose, Purpose::Shared { require_quota: true, .. }) => {
                Err(ResolveError::WholeGpuRefused {
                    nvidia: nvidia.setting.clone(),
                    gpu: label(whole),
                    aliyun: aliyun.setting.clone(),
                })
            }
            Some(_) => Ok((gpus, shared)),
        }
    }

    /// The GPUs that a selection means, each at its first place.
    fn find(&self, selection: &Selection) -> Result<Vec<&'a Gpu>, ResolveError> {
        match selection.extent() {
            Extent::All => return self.all(),
            Extent::Nothing => return Ok(Vec::new()),
            Extent::List => {}
        }
        let mut gpus = Vec::new();
        for name in selection.names()? {
            let gpu = self.find_one(&selection.setting, name)?;
            if !has(&gpus, gpu) {
                gpus.push(gpu);
            }
        }
        Ok(gpus)
    }

    /// The GPU of that name, if it can be given.
    fn find_one(&self, setting: &Setting, name: GpuName<'_>) -> Result<&'a Gpu, ResolveError> {
        let gpu = match name {
            // An index beyond u32 is no GPU's.
            GpuName::Index(digits) => {
                digits.parse().ok().and_then(|index| self.inventory.by_index(index))
            }
            GpuName::Uuid(prefix) => self.find_by_uuid(setting, prefix)?,
            GpuName::Mig(device) => return Err(self.mig_refused(setting, device)),
        };
        let setting = setting.clone();
        match gpu {
            None => Err(ResolveError::UnknownGpu {
                setting,
                item: name.as_str().to_owned(),
                known: self.inventory.gpus().iter().map(label).collect(),
            }),
            Some(gpu) if gpu.state == GpuState::Lost => {
                Err(ResolveError::LostGpu { setting, gpu: label(gpu) })
            }
            Some(gpu) if gpu.mig_enabled => {
                Err(ResolveError::MigModeGpu { setting, gpu: label(gpu) })
            }
            Some(gpu) => Ok(gpu),
        }
    }

    /// The GPU whose UUID is `prefix`, or else the only one whose UUID begins with it.
    fn find_by_uuid(
        &self,
        setting: &Setting,
        prefix: &str,
    ) -> Result<Option<&'a Gpu>, ResolveError> {
        let gpus = self.inventory.gpus();
        if let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid.eq_ignore_ascii_case(prefix)) {
            return Ok(Some(gpu));
        }
        let begins = |gpu: &&Gpu| {
            let head = gpu.uuid.get(..prefix.len());
            head.is_some_and(|head| head.eq_ignore_ascii_case(prefix))
        };
        match gpus.iter().filter(begins).collect::<Vec<_>>()[..] {
            [] => Ok(None),
            [gpu] => Ok(Some(gpu)),
            ref candidates => Err(ResolveError::AmbiguousGpu {
                setting: setting.clone(),
                item: prefix.to_owned(),
                candidates: candidates.iter().map(|gpu| label(gpu)).collect(),
            }),
        }
    }

    /// All GPUs of the host that can be given.
    fn all(&self) -> Result<Vec<&'a Gpu>, ResolveError> {
        let can_be_given = |gpu: &&Gpu| gpu.state == GpuState::Ok && !gpu.mig_enabled;
        let gpus: Vec<_> = self.inventory.gpus().iter().filter(can_be_given).collect();
        if !gpus.is_empty() {
            return Ok(gpus);
        }
        let why = |gpu: &Gpu| match gpu.state {
            GpuState::Lost => format!("{} is lost", label(gpu)),
            GpuState::Ok => format!("{} is in MIG mode", label(gpu)),
        };
        Err(ResolveError::NoUsableGpu { found: self.inventory.gpus().iter().map(why).collect() })
    }

    fn mig_refused(&self, setting: &Setting, device: &str) -> ResolveError {
        let (setting, item) = (setting.clone(), device.to_owned());
        match self.purpose {
            Purpose::Shared { memory, .. } => {
                ResolveError::MigUnderQuota { setting, item, memory: memory.clone() }
            }
            Purpose::Whole => ResolveError::MixedMig { setting, item },
        }
    }
}

fn has(gpus: &[&Gpu], gpu: &Gpu) -> bool {
    gpus.iter().any(|other| other.index == gpu.index)
}

fn nothing_and_something(nothing: &Selection, naming: &Selection) -> ResolveError {
    ResolveError::NothingAndSomething {
        nothing: nothing.setting.clone(),
        naming: naming.setting.clone(),
    }
}
