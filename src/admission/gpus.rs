//! Settings of GPUs: what goes for each now, and how that is changed.

use super::{AdmissionError, Host};
use crate::backend;
use crate::events::{Event, Kind as EventKind};
use crate::inventory::{self, Gpu};
use crate::plan::{GpuChange, GpuRules, Limits, Occupancy, POLICY_NATIVE};
use crate::registry::{Look, Registry, RegistryError};

/// What high-priority containers may take where nobody says otherwise, in per cent.
const PRIO_RATIO: u32 = 80;

impl Host {
    /// How much may be promised on each GPU.
    ///
    /// # Errors
    ///
    /// Where it can't be read what was set of the GPUs.
    pub(super) fn limits(&self, registry: &Registry) -> Result<Limits, RegistryError> {
        let admission = &self.config.admission;
        let settings = registry.gpu_settings()?.into_iter();
        let max_inst_of = settings.filter_map(|(uuid, set)| Some((uuid, set.max_inst?)));
        Ok(Limits {
            overcommit: admission.overcommit,
            max_inst: admission.max_inst,
            max_inst_of: max_inst_of.collect(),
            exclusive: admission.exclusive,
        })
    }

    /// What goes for the GPU with that index and UUID: what its backend says, else what was set, else
    /// the configuration.
    ///
    /// # Errors
    ///
    /// Where it can't be read what was set.
    pub fn gpu_rules(
        &self,
        registry: &Registry,
        index: u32,
        uuid: &str,
    ) -> Result<GpuRules, RegistryError> {
        let set = registry.gpu_settings()?.remove(uuid).unwrap_or_default();
        let (kind, _) = backend::choose(&self.config.isolation);
        Ok(self.isolation(kind).gpu_rules(index).unwrap_or(GpuRules {
            policy: set.policy.unwrap_or(POLICY_NATIVE),
            max_inst: set.max_inst.unwrap_or(self.config.admission.max_inst),
            prio_ratio: set.prio_ratio.unwrap_or(PRIO_RATIO),
        }))
    }

    /// Changes the GPU that `word` names: an index, a UUID or a PCI address. In force when it returns,
    /// and kept for as long as the registry.
    ///
    /// # Errors
    ///
    /// Where there is no such GPU, more is on it than would be allowed, or nothing would hold the
    /// change; then it has what it had.
    pub fn set_gpu(&self, word: &str, change: GpuChange) -> Result<GpuRules, AdmissionError> {
        let gpu = self.gpu_named(word)?;
        let registry = self.registry()?;
        let mut locked = registry.lock()?;
        self.collect_locked(&mut locked, Look::Close)?;
        let there = Occupancy::of(&gpu.uuid, locked.holdings());
        let rules = self.gpu_rules(&registry, gpu.index, &gpu.uuid)?;
        let (kind, _) = backend::choose(&self.config.isolation);
        change.check(gpu.index, rules, there, kind)?;
        self.isolation(kind).set_gpu(gpu.index, change)?;
        locked.put_gpu(&gpu.uuid, change)?;
        self.teller().tell(Event {
            gpu: Some(gpu.index),
            gpu_uuid: Some(gpu.uuid),
            setting: Some(change.written()),
            ..Event::new(EventKind::GpuChanged)
        });
        Ok(rules.after(change))
    }

    /// The GPU that `word` names: an index, a UUID or a PCI address.
    ///
    /// # Errors
    ///
    /// Where there is none, or the GPUs aren't known.
    pub fn gpu_named(&self, word: &str) -> Result<Gpu, AdmissionError> {
        let inventory = inventory::cached(&self.inventory_settings())?.unwrap_or_default();
        let named = |gpu: &&Gpu| {
            word.parse() == Ok(gpu.index)
                || word == gpu.uuid
                || word.eq_ignore_ascii_case(&gpu.bus_id)
        };
        let found = inventory.gpus().iter().find(named).cloned();
        found.ok_or_else(|| AdmissionError::NoSuchGpu { word: word.escape_debug().to_string() })
    }
}
