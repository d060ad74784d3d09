//! Settings of GPUs: the rules of each now, and how they are changed.

use super::AdmissionError;
use crate::admission::Admission;
use crate::backend;
use cgpu_core::gpu::Gpu;
use cgpu_core::plan::{
    GpuChange, GpuRules, Kind, Limits, Occupancy, POLICY_NATIVE, Plan, PlannedGpu, policy_of,
};
use cgpu_core::sched::Tenant;
use cgpu_host::events::{Event, Kind as EventKind};
use cgpu_host::inventory;
use cgpu_host::registry::{
    GpuSettings, HostSettings, Locked, Registry, RegistryError, StaleCheck, share,
};

impl Admission<'_> {
    /// How much may be reserved on each GPU.
    ///
    /// # Errors
    ///
    /// Where it can't be read what was set of the GPUs.
    pub(super) fn limits(&self, registry: &Registry) -> Result<Limits, RegistryError> {
        let admission = &self.host.config.admission;
        let settings = registry.gpu_settings()?;
        let max_inst_of =
            settings.iter().filter_map(|(uuid, set)| Some((uuid.clone(), set.max_inst?)));
        let policy_of = settings.iter().filter_map(|(uuid, set)| Some((uuid.clone(), set.policy?)));
        Ok(Limits {
            overcommit: admission.overcommit,
            max_inst: admission.max_inst,
            max_inst_of: max_inst_of.collect(),
            policy: self.usual_policy(),
            policy_of: policy_of.collect(),
            bounds_weights: true,
            exclusive: admission.exclusive,
        })
    }

    /// The rules of the GPU with that index and UUID: what its backend says, else what was set, else
    /// the configuration.
    ///
    /// # Errors
    ///
    /// If it can't be read what was set.
    pub fn gpu_rules(
        &self,
        registry: &Registry,
        index: u32,
        uuid: &str,
    ) -> Result<GpuRules, RegistryError> {
        let set = registry.gpu_settings()?.remove(uuid).unwrap_or_default();
        Ok(backend::gpu_rules(self.host.backend, &self.host.config, index).unwrap_or_else(|| {
            let rules = self.rules_of(set, &[]);
            // Who has a weight may have selected another policy.
            let held = share::read(&self.host.config.state_dir, uuid).ok().flatten();
            GpuRules { policy: held.map_or(rules.policy, |held| held.policy), ..rules }
        }))
    }

    /// The policy of GPUs of which none is set: the driver's own, where nothing here holds another.
    fn usual_policy(&self) -> u32 {
        match self.host.backend {
            Kind::Gate => self.host.config.compute.policy,
            Kind::Km | Kind::None => POLICY_NATIVE,
        }
    }

    /// The rules of a GPU of which `set` was set, while these containers are on it.
    fn rules_of(&self, set: GpuSettings, tenants: &[Tenant]) -> GpuRules {
        let compute = &self.host.config.compute;
        let usual = self.usual_policy();
        let has_weight = tenants.iter().any(|tenant| tenant.weight > 1);
        let has_priority = tenants.iter().any(|tenant| tenant.high_priority);
        GpuRules {
            policy: policy_of(set.policy, usual, has_weight, has_priority),
            max_inst: set.max_inst.unwrap_or(self.host.config.admission.max_inst),
            prio_ratio: set.prio_ratio.unwrap_or(compute.prio_ratio),
        }
    }

    /// Notifies monitors of what containers have of the computing time of these GPUs, on which a
    /// container came, changed or went. What can't be written is repeated at the next change.
    pub(super) fn share_out(&self, locked: &Locked<'_>, gpus: &[PlannedGpu]) {
        if self.host.backend != Kind::Gate {
            return;
        }
        let reported = locked.registry().gpu_settings().and_then(|settings| {
            let shared = gpus.iter().filter(|gpu| gpu.memory_limit_bytes.is_some());
            shared.map(|gpu| &gpu.uuid).try_for_each(|uuid| {
                let set = settings.get(uuid).copied().unwrap_or_default();
                locked.share_out(uuid, self.host.config.compute.idle, |tenants| {
                    self.rules_of(set, tenants)
                })
            })
        });
        if let Err(error) = reported {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(error, "computing time is shared as before: monitors can't be notified");
        }
    }

    /// The same of all GPUs that containers have: for monitors that know of no shares yet.
    ///
    /// # Errors
    ///
    /// Where the registry can't be used.
    pub fn share_out_all(&self) -> Result<(), AdmissionError> {
        let registry = self.host.registry()?;
        let locked = registry.lock()?;
        for record in registry.living()? {
            self.share_out(&locked, &record.plan.gpus);
        }
        Ok(())
    }

    /// The weight and the priority of `plan` that nothing holds on one of its GPUs, in words.
    #[must_use]
    pub fn shares_not_held(&self, plan: &Plan) -> Option<String> {
        if !plan.asks_for_shares() {
            return None;
        }
        let registry = self.host.check_registry().ok();
        let settings = registry.and_then(|registry| registry.gpu_settings().ok());
        let policy = |gpu: &PlannedGpu| {
            let held = share::read(&self.host.config.state_dir, &gpu.uuid).ok().flatten();
            held.map_or_else(
                || {
                    let set =
                        settings.as_ref().and_then(|settings| settings.get(&gpu.uuid)?.policy);
                    let usual = self.usual_policy();
                    policy_of(set, usual, plan.weight > 1, plan.high_priority)
                },
                |held| held.policy,
            )
        };
        plan.gpus.iter().find_map(|gpu| plan.shares_not_held(policy(gpu)))
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
        let registry = self.host.registry()?;
        let mut locked = registry.lock()?;
        self.collect_locked(&mut locked, StaleCheck::Close)?;
        let there = Occupancy::of(&gpu.uuid, locked.holdings());
        let rules = self.gpu_rules(&registry, gpu.index, &gpu.uuid)?;
        change.check(gpu.index, rules, there, self.host.backend)?;
        backend::set_gpu(self.host.backend, &self.host.config, &gpu, change)?;
        locked.put_gpu(&gpu.uuid, change)?;
        let set = registry.gpu_settings()?.remove(&gpu.uuid).unwrap_or_default();
        locked.share_out(&gpu.uuid, self.host.config.compute.idle, |tenants| {
            self.rules_of(set, tenants)
        })?;
        self.sink().report(Event {
            gpu: Some(gpu.index),
            gpu_uuid: Some(gpu.uuid),
            setting: Some(change.written()),
            ..Event::new(EventKind::GpuChanged)
        });
        Ok(rules.after(change))
    }

    /// Sets what a container gets of each GPU that names GPUs and asks for no quota, in MiB; 0 is the GPU as a
    /// whole. It applies to containers that are created from now on, and is retained for as long as the registry.
    ///
    /// # Errors
    ///
    /// If that can't be written.
    pub fn set_default_memory(&self, mib: u64) -> Result<(), AdmissionError> {
        let registry = self.host.registry()?;
        let mut locked = registry.lock()?;
        locked.put_host(HostSettings { default_memory_mib: Some(mib) })?;
        let setting = Some(format!("default_memory={mib}MiB"));
        self.sink().report(Event { setting, ..Event::new(EventKind::HostChanged) });
        Ok(())
    }

    /// The GPU that `word` names: an index, a UUID or a PCI address.
    ///
    /// # Errors
    ///
    /// Where there is none, or the GPUs aren't known.
    pub fn gpu_named(&self, word: &str) -> Result<Gpu, AdmissionError> {
        let inventory = inventory::cached(&self.host.inventory_settings())?.unwrap_or_default();
        let named = |gpu: &&Gpu| {
            word.parse() == Ok(gpu.index)
                || word == gpu.uuid
                || word.eq_ignore_ascii_case(&gpu.bus_id)
        };
        let found = inventory.gpus().iter().find(named).cloned();
        found.ok_or_else(|| AdmissionError::NoSuchGpu { word: word.escape_debug().to_string() })
    }
}
