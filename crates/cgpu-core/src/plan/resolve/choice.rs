//! Which GPUs of the host the selections of a container mean: [`choose`].
//!
//! Knows names and GPUs. Must not know amounts of memory. Variables decide first
//! (`ALIYUN_COM_GPU_VISIBLE_DEVICES` before NVIDIA's, which many images bake in as
//! `all`), then the annotation narrows what they left open or agrees with what they
//! list. Whether GPUs that others brought are the choice, or have to agree with it, the request says.
//! Invariant: no list in a [`Choice`] has a GPU twice.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;

use super::ResolveError;
use super::error::{label, listed, mig_label};
use crate::gpu::{Gpu, GpuState, Inventory, MigDevice};
use crate::request::{
    BroughtName, Extent, GpuName, MigInstance, On, Outcome, Request, RequestError, Selection,
    Selections, Setting, Source,
};

/// What GPUs are chosen for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Purpose<'a> {
    /// A quota; in mixed mode the container has other GPUs without a quota next to it.
    Shared {
        /// What asks for it.
        memory: &'a Setting,
        /// Whether the container may have GPUs without a quota next to it.
        may_mix: bool,
    },
    /// The container's use of all its GPUs is unlimited.
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

impl<'a> Choice<'a> {
    /// The same GPUs for each source.
    fn of(gpus: Vec<Chosen<'a>>) -> Self {
        Choice { shared_by_env: gpus.clone(), shared_by_annotation: gpus.clone(), gpus }
    }

    fn labels(gpus: &[Chosen<'_>]) -> String {
        listed(&gpus.iter().map(Chosen::label).collect::<Vec<_>>())
    }
}

/// The GPUs of a container with `request`.
pub(super) fn choose<'a>(
    request: &Request,
    inventory: &'a Inventory,
    purpose: Purpose<'_>,
) -> Result<Choice<'a>, ResolveError> {
    let host = Host { inventory, purpose };
    let selections = &request.selections;
    let choice = choose_said(request, host)?;
    // Under a quota the additional GPUs of mixed mode are not of that number.
    let gpus = if choice.shared_by_env.is_empty() { &choice.gpus } else { &choice.shared_by_env };
    let differs = |(_, count): &(&Setting, u32)| u32::try_from(gpus.len()) != Ok(*count);
    if let Some((count, _)) = selections.counting().find(differs) {
        let listing = selections.listing().map(|selection| selection.setting.to_string());
        let by = listing.unwrap_or_else(|| request.brought_by.clone());
        return Err(ResolveError::CountDiffers {
            count: count.clone(),
            by,
            found: Choice::labels(gpus),
        });
    }
    Ok(choice)
}

/// The GPUs that can be chosen for a container that says how many it wants, and the others, each with why
/// it can't be.
pub(super) fn choosable<'a>(
    request: &Request,
    count: u32,
    inventory: &'a Inventory,
) -> Result<(Vec<Chosen<'a>>, Vec<String>), ResolveError> {
    let unusable = |gpu: &Gpu| match gpu.state {
        GpuState::Lost => Some(format!("{} is lost", label(gpu))),
        GpuState::Ok => gpu.mig_enabled.then(|| format!("{} is in MIG mode", label(gpu))),
    };
    let gpus = inventory.gpus();
    let why: Vec<String> = gpus.iter().filter_map(unusable).collect();
    let usable = gpus.iter().filter(|gpu| unusable(gpu).is_none());
    let usable: Vec<_> = usable.map(|gpu| Chosen { gpu, mig: None }).collect();
    if usable.is_empty() {
        return Err(ResolveError::NoUsableGpu { found: why });
    }
    if usable.len() < count as usize {
        let by = request.selections.counting().next().map(|(setting, _)| setting.to_string());
        let mut known: Vec<String> = usable.iter().map(Chosen::label).collect();
        let found = known.len();
        known.extend(why);
        return Err(ResolveError::TooFewGpus { count, by: by.unwrap_or_default(), found, known });
    }
    Ok((usable, why))
}

/// The GPUs of a container that names some or into which some were brought.
fn choose_said<'a>(request: &Request, host: Host<'a, '_>) -> Result<Choice<'a>, ResolveError> {
    let selections = &request.selections;
    let brought = || host.find_brought(&request.brought, &request.mig, &request.brought_by);
    match request.outcome {
        Outcome::AsBrought | Outcome::Quota(On::Brought) | Outcome::Whole(On::Brought) => {
            Ok(Choice::of(brought()?))
        }
        Outcome::Quota(On::Both | On::Either) => {
            let (named, brought) = (choose_named(selections, host)?, brought()?);
            let is_node = |name: &BroughtName| matches!(name, BroughtName::Minor(_));
            // Names are taken out of the bundle: fewer may be named than they ask for.
            let may_be_fewer = !request.brought.iter().any(is_node);
            let fits = named.gpus.iter().all(|one| brought.contains(one))
                && (may_be_fewer || named.gpus.len() == brought.len());
            match selections.naming() {
                Some(naming) if !fits => Err(ResolveError::BroughtDiffer {
                    naming: naming.setting.clone(),
                    named: Choice::labels(&named.gpus),
                    brought: format!("{} ({})", Choice::labels(&brought), request.brought_by),
                }),
                _ => Ok(named),
            }
        }
        Outcome::Whole(On::Both | On::Either) => {
            let mut gpus = choose_named(selections, host)?.gpus;
            for one in brought()? {
                if !gpus.contains(&one) {
                    gpus.push(one);
                }
            }
            Ok(Choice::of(gpus))
        }
        _ => choose_named(selections, host),
    }
}

/// The GPUs that `selections` mean, which select at least one.
fn choose_named<'a>(
    selections: &Selections,
    host: Host<'a, '_>,
) -> Result<Choice<'a>, ResolveError> {
    let annotation = selections.annotation.as_ref();
    let Some(variable) = selections.listing_variable() else {
        // The variables leave it open.
        let is_counting = |selection: &Selection| matches!(selection.extent(), Extent::Count(_));
        let gpus = match annotation {
            Some(selection) if !is_counting(selection) => host.find(selection)?,
            _ => host.all()?,
        };
        return Ok(Choice::of(gpus));
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
        let listed = |selection: &&Selection| selection.extent() == Extent::List;
        let counts = |selection: &&Selection| !matches!(selection.extent(), Extent::Count(_));
        // Next to these other lists have to mean the same.
        let neutral = selections.neutral.as_ref().filter(counts);
        let resource = neutral.or(selections.resource.as_ref());
        let by_aliyun = aliyun.filter(|aliyun| resource.is_none() || listed(aliyun));
        let chosen = neutral.filter(listed).or(by_aliyun);
        let shared = match chosen.or(resource).or(nvidia) {
            Some(selection) => self.find(selection)?,
            None => self.all()?,
        };
        if let Some(resource) = resource {
            // Their order is that of the one that decides.
            for other in [selections.resource.as_ref(), aliyun, nvidia].into_iter().flatten() {
                let (given, named) = (self.find(resource)?, self.find(other)?);
                let is_same =
                    given.len() == named.len() && given.iter().all(|one| named.contains(one));
                if other.extent() == Extent::List && !is_same {
                    let (one, other) = (other.setting.clone(), resource.setting.clone());
                    return Err(ResolveError::DifferentVariables { one, other });
                }
            }
            return Ok((shared.clone(), shared));
        }
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
                nvidia: nvidia.setting.to_string(),
            });
        }
        match gpus.iter().find(|one| !shared.contains(one)) {
            None => Ok((shared.clone(), shared)),
            Some(whole) if matches!(self.purpose, Purpose::Shared { may_mix: false, .. }) => {
                Err(ResolveError::WholeGpuRefused {
                    nvidia: nvidia.setting.clone(),
                    gpu: whole.label(),
                    aliyun: aliyun.setting.to_string(),
                })
            }
            Some(_) => Ok((gpus, shared)),
        }
    }

    /// The GPUs that a selection means, each at its first place.
    fn find(&self, selection: &Selection) -> Result<Vec<Chosen<'a>>, ResolveError> {
        match selection.extent() {
            // How many of them is checked afterwards.
            Extent::All | Extent::Count(_) => return self.all(),
            Extent::Nothing => return Ok(Vec::new()),
            Extent::List => {}
        }
        let mut chosen = Vec::new();
        for name in selection.names()? {
            add(&mut chosen, self.find_name(&selection.setting.to_string(), name)?);
        }
        Ok(chosen)
    }

    /// The GPUs that were brought, each at its first place. A GPU in MIG mode counts by the MIG devices
    /// that came with it: its own node alone opens none. A name that no GPU has is one of the engine's
    /// specifications where nodes came, too, and they say what it means.
    fn find_brought(
        &self,
        names: &[BroughtName],
        mig: &[MigInstance],
        by: &str,
    ) -> Result<Vec<Chosen<'a>>, ResolveError> {
        let unknown = || ResolveError::UnknownBrought {
            said: by.to_owned(),
            known: self.inventory.gpus().iter().map(label).collect(),
        };
        let has_nodes = names.iter().any(|name| matches!(name, BroughtName::Minor(_)));
        let mut chosen = Vec::new();
        for name in names {
            let found = match name {
                BroughtName::All => self.all()?,
                BroughtName::Named(name) => {
                    let name = GpuName::parse(name).ok_or_else(unknown);
                    let found = name.and_then(|name| self.find_name(by, name));
                    if has_nodes { found.unwrap_or_default() } else { found? }
                }
                BroughtName::Minor(minor) => {
                    let gpu = self.inventory.gpus().iter().find(|gpu| gpu.minor == *minor);
                    let gpu = gpu.ok_or_else(unknown)?;
                    match (gpu.mig_enabled, self.purpose) {
                        (true, Purpose::Whole) => {
                            let is_open = |device: &&MigDevice| {
                                mig.iter().any(|open| {
                                    open.gpu_minor == *minor
                                        && device.instances() == Some(open.instances)
                                })
                            };
                            let open = gpu.mig_devices.iter().filter(is_open);
                            open.map(|mig| Chosen { gpu, mig: Some(mig) }).collect()
                        }
                        _ => vec![Chosen { gpu: self.usable(by, gpu)?, mig: None }],
                    }
                }
            };
            add(&mut chosen, found);
        }
        Ok(chosen)
    }

    fn find_name(&self, said: &str, name: GpuName<'_>) -> Result<Vec<Chosen<'a>>, ResolveError> {
        match name {
            GpuName::Mig(item) => self.find_mig(said, item),
            GpuName::Index(_) | GpuName::Uuid(_) => {
                Ok(vec![Chosen { gpu: self.find_one(said, name)?, mig: None }])
            }
        }
    }

    /// The GPU of that name, if it can be given.
    fn find_one(&self, said: &str, name: GpuName<'_>) -> Result<&'a Gpu, ResolveError> {
        let gpu = match name {
            GpuName::Uuid(prefix) => self.find_by_uuid(said, prefix)?,
            // An index beyond u32 is no GPU's.
            GpuName::Index(text) | GpuName::Mig(text) => {
                text.parse().ok().and_then(|index| self.inventory.by_index(index))
            }
        };
        match gpu {
            None => {
                let (said, item) = (said.to_owned(), name.as_str().to_owned());
                let known = self.inventory.gpus().iter().map(label).collect();
                Err(match is_full_uuid(&item) {
                    true => ResolveError::GoneGpu { said, item, known, had_before: false },
                    false => ResolveError::UnknownGpu { said, item, known },
                })
            }
            Some(gpu) => self.usable(said, gpu),
        }
    }

    /// The GPU, if it can be given.
    fn usable(&self, said: &str, gpu: &'a Gpu) -> Result<&'a Gpu, ResolveError> {
        let said = said.to_owned();
        match self.purpose {
            _ if gpu.state == GpuState::Lost => {
                Err(ResolveError::LostGpu { said, gpu: label(gpu) })
            }
            _ if !gpu.mig_enabled => Ok(gpu),
            Purpose::Shared { .. } => Err(ResolveError::MigModeGpu { said, gpu: label(gpu) }),
            Purpose::Whole => {
                let known = self.known_mig_devices();
                Err(ResolveError::MigModeWholeGpu { said, gpu: label(gpu), known })
            }
        }
    }

    /// The MIG devices that `item` names, if they can be given: one, or all of the host.
    fn find_mig(&self, said: &str, item: &str) -> Result<Vec<Chosen<'a>>, ResolveError> {
        if let Purpose::Shared { memory, .. } = self.purpose {
            let (said, item) = (said.to_owned(), item.to_owned());
            return Err(ResolveError::MigUnderQuota { said, item, memory: memory.clone() });
        }
        let found: Vec<_> = self.mig_devices().filter(|one| one.is_called(item)).collect();
        let lost = found.iter().find(|one| one.gpu.state == GpuState::Lost);
        if let Some(lost) = lost.filter(|_| item != ALL_MIG) {
            return Err(ResolveError::LostGpu { said: said.to_owned(), gpu: label(lost.gpu) });
        }
        let usable = found.into_iter().filter(|one| one.gpu.state == GpuState::Ok);
        match usable.collect::<Vec<_>>() {
            none if none.is_empty() => Err(ResolveError::UnknownMig {
                said: said.to_owned(),
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
    fn find_by_uuid(&self, said: &str, prefix: &str) -> Result<Option<&'a Gpu>, ResolveError> {
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
                said: said.to_owned(),
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

/// Adds GPUs that aren't there yet.
fn add<'a>(chosen: &mut Vec<Chosen<'a>>, found: Vec<Chosen<'a>>) {
    for one in found {
        if !chosen.contains(&one) {
            chosen.push(one);
        }
    }
}

fn nothing_and_something(nothing: &Selection, naming: &Selection) -> ResolveError {
    let (nothing, naming) = (nothing.setting.clone(), naming.setting.clone());
    ResolveError::from(RequestError::NothingAndSomething { nothing, naming })
}

/// Whether a text is a GPU's complete UUID as NVML writes it, and not its beginning.
fn is_full_uuid(text: &str) -> bool {
    let lengths = text.split('-').map(str::len);
    text.get(..4).is_some_and(|kind| kind.eq_ignore_ascii_case("GPU-"))
        && lengths.eq([3, 8, 4, 4, 4, 12])
        && text[4..].bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
}
