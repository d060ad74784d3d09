//! Which GPUs of the host the selections of a container mean: [`choose`].
//!
//! Knows names and GPUs. Must not know amounts of memory. Variables decide first
//! (`ALIYUN_COM_GPU_VISIBLE_DEVICES` before NVIDIA's, which many images bake in as
//! `all`), then the annotation narrows what they left open or agrees with what they
//! list. Invariant: no list in a [`Choice`] has a GPU twice.

use super::ResolveError;
use super::error::{label, mig_label};
use crate::gpu::{Gpu, GpuState, Inventory, MigDevice};
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

/// A GPU, or a MIG device of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chosen<'a> {
    /// The GPU.
    pub(super) gpu: &'a Gpu,
    /// Its MIG device; never under a quota.
    pub(super) mig: Option<&'a MigDevice>,
}

/// A container's GPUs.
#[derive(Debug)]
pub(super) struct Choice<'a> {
    /// All of them, in the plan's order.
    pub(super) gpus: Vec<Chosen<'a>>,
    /// Those under a quota of the variables, in their order.
    shared_by_env: Vec<Chosen<'a>>,
    /// Those under a quota of the annotations, in their order.
    shared_by_annotation: Vec<Chosen<'a>>,
}

impl<'a> Choice<'a> {
    /// The GPUs under a quota, in the order in which that source names them.
    pub(super) fn shared_in_order_of(&self, source: Source) -> &[Chosen<'a>] {
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
            if named.len() != gpus.len() || named.iter().any(|one| !gpus.contains(one)) {
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
    ) -> Result<(Vec<Chosen<'a>>, Vec<Chosen<'a>>), ResolveError> {
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
        if let Some(gpu) = shared.iter().find(|one| !gpus.contains(one)) {
            return Err(ResolveError::Contradiction {
                aliyun: aliyun.setting.clone(),
                gpu: gpu.label(),
                nvidia: nvidia.setting.clone(),
            });
        }
        match gpus.iter().find(|one| !shared.contains(one)) {
            None => Ok((shared.clone(), shared)),
            Some(whole) if matches!(self.purpose, Purpose::Shared { require_quota: true, .. }) => {
                Err(ResolveError::WholeGpuRefused {
                    nvidia: nvidia.setting.clone(),
                    gpu: whole.label(),
                    aliyun: aliyun.setting.clone(),
                })
            }
            Some(_) => Ok((gpus, shared)),
        }
    }

    /// The GPUs that a selection means, each at its first place.
    fn find(&self, selection: &Selection) -> Result<Vec<Chosen<'a>>, ResolveError> {
        match selection.extent() {
            Extent::All => return self.all(),
            Extent::Nothing => return Ok(Vec::new()),
            Extent::List => {}
        }
        let mut chosen = Vec::new();
        for name in selection.names()? {
            let found = match name {
                GpuName::Mig(item) => self.find_mig(&selection.setting, item)?,
                GpuName::Index(_) | GpuName::Uuid(_) => {
                    vec![Chosen { gpu: self.find_one(&selection.setting, name)?, mig: None }]
                }
            };
            for one in found {
                if !chosen.contains(&one) {
                    chosen.push(one);
                }
            }
        }
        Ok(chosen)
    }

    /// The GPU of that name, if it can be given.
    fn find_one(&self, setting: &Setting, name: GpuName<'_>) -> Result<&'a Gpu, ResolveError> {
        let gpu = match name {
            GpuName::Uuid(prefix) => self.find_by_uuid(setting, prefix)?,
            // An index beyond u32 is no GPU's.
            GpuName::Index(text) | GpuName::Mig(text) => {
                text.parse().ok().and_then(|index| self.inventory.by_index(index))
            }
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
                let gpu = label(gpu);
                Err(match self.purpose {
                    Purpose::Shared { .. } => ResolveError::MigModeGpu { setting, gpu },
                    Purpose::Whole => {
                        let known = self.known_mig_devices();
                        ResolveError::MigModeWholeGpu { setting, gpu, known }
                    }
                })
            }
            Some(gpu) => Ok(gpu),
        }
    }

    /// The MIG devices that `item` names, if they can be given: one, or all of the host.
    fn find_mig(&self, setting: &Setting, item: &str) -> Result<Vec<Chosen<'a>>, ResolveError> {
        if let Purpose::Shared { memory, .. } = self.purpose {
            let (setting, item) = (setting.clone(), item.to_owned());
            return Err(ResolveError::MigUnderQuota { setting, item, memory: memory.clone() });
        }
        let found: Vec<_> = self.mig_devices().filter(|one| one.is_called(item)).collect();
        let lost = found.iter().find(|one| one.gpu.state == GpuState::Lost);
        if let Some(lost) = lost.filter(|_| item != ALL_MIG) {
            return Err(ResolveError::LostGpu { setting: setting.clone(), gpu: label(lost.gpu) });
        }
        let usable = found.into_iter().filter(|one| one.gpu.state == GpuState::Ok);
        match usable.collect::<Vec<_>>() {
            none if none.is_empty() => Err(ResolveError::UnknownMig {
                setting: setting.clone(),
                item: item.to_owned(),
                known: self.known_mig_devices(),
            }),
            found => Ok(found),
        }
    }

    /// The MIG devices of the host.
    fn mig_devices(&self) -> impl Iterator<Item = Chosen<'a>> + use<'a> {
        let gpus = self.inventory.gpus().iter().filter(|gpu| gpu.mig_enabled);
        gpus.flat_map(|gpu| gpu.mig_devices.iter().map(move |mig| Chosen { gpu, mig: Some(mig) }))
    }

    fn known_mig_devices(&self) -> Vec<String> {
        self.mig_devices().map(|one| one.label()).collect()
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

    /// All GPUs of the host that can be given, and their MIG devices where nothing is shared.
    fn all(&self) -> Result<Vec<Chosen<'a>>, ResolveError> {
        let can_be_given = |gpu: &&Gpu| gpu.state == GpuState::Ok && !gpu.mig_enabled;
        let gpus = self.inventory.gpus().iter().filter(can_be_given);
        let mut chosen: Vec<_> = gpus.map(|gpu| Chosen { gpu, mig: None }).collect();
        if matches!(self.purpose, Purpose::Whole) {
            chosen.extend(self.mig_devices().filter(|one| one.gpu.state == GpuState::Ok));
        }
        if !chosen.is_empty() {
            return Ok(chosen);
        }
        let why = |gpu: &Gpu| match gpu.state {
            GpuState::Lost => format!("{} is lost", label(gpu)),
            GpuState::Ok => format!("{} is in MIG mode", label(gpu)),
        };
        Err(ResolveError::NoUsableGpu { found: self.inventory.gpus().iter().map(why).collect() })
    }
}

/// The name of all MIG devices.
const ALL_MIG: &str = "mig-all";

impl Chosen<'_> {
    /// As messages name it.
    fn label(&self) -> String {
        match self.mig {
            None => label(self.gpu),
            Some(mig) => mig_label(self.gpu, mig),
        }
    }

    /// Whether that is a name of this MIG device: its UUID, `GPU:DEVICE` by their indices, or
    /// `MIG-GPU-…/GPU INSTANCE/COMPUTE INSTANCE` as drivers before 470 have it.
    fn is_called(&self, name: &str) -> bool {
        let Some(mig) = self.mig else { return false };
        if name == ALL_MIG || mig.uuid.eq_ignore_ascii_case(name) {
            return true;
        }
        if let Some((gpu, device)) = name.split_once(':') {
            return (gpu.parse(), device.parse()) == (Ok(self.gpu.index), Ok(mig.index));
        }
        let mut parts = name.splitn(3, '/');
        let gpu = parts.next().and_then(|text| text.get("MIG-".len()..)).unwrap_or_default();
        let mut number = || parts.next().and_then(|text| text.parse().ok());
        let instances = number().zip(number());
        instances.is_some()
            && instances == mig.instances()
            && gpu.eq_ignore_ascii_case(&self.gpu.uuid)
    }
}

fn nothing_and_something(nothing: &Selection, naming: &Selection) -> ResolveError {
    ResolveError::NothingAndSomething {
        nothing: nothing.setting.clone(),
        naming: naming.setting.clone(),
    }
}
