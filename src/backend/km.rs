//! The vendor's kernel module, through its procfs tree.
//!
//! Knows in which order a container's instances are made, checked and removed. Must not
//! know other backends, nor who is registered: the caller sees to it that a short id
//! belongs to one container, and that no two activations use the same one at once.
//! Invariants: everything is validated before anything is made; a value counts as
//! written when it was read back; what fails leaves nothing behind, or says what.
//!
//! Nothing is locked here. The tree is visible inside of containers, so that a lock on
//! it could be held by one for ever. Activations that race for slots and weights are
//! separated by the module itself (ENOSPC) and by reading back.

mod error;
mod meminfo;
mod tree;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde_json::Value;

pub use error::{KmError, NotUndone};

use super::{BackendError, Instance, Isolation, Observed, Tenant};
use cgpu_core::plan::{Change, GpuChange, GpuRules};
use cgpu_inject::bundle::Edits;
use tree::{Cell, Tree, check_short_id, control_digit};

/// The policy that goes by weights; `m : n` of `max_inst` portions.
const POLICY_WEIGHTED: u64 = 2;

/// The policy where a weight is a hard ceiling: weight / `max_inst` of the GPU.
const POLICY_FIXED: u64 = 3;

/// The vendor's kernel module.
#[derive(Debug, Clone)]
pub struct Km {
    tree: Tree,
}

/// A GPU on which a container has a memory quota.
#[derive(Debug, Clone, Copy)]
struct Quota {
    gpu: u32,
    limit_bytes: u64,
}

impl Km {
    /// The module whose procfs tree is at `tree`.
    #[must_use]
    pub fn new(tree: PathBuf) -> Self {
        Km { tree: Tree::new(tree) }
    }

    /// The rules of the GPU `index`; `None` if the module doesn't report them.
    pub(super) fn gpu_rules(&self, index: u32) -> Option<GpuRules> {
        let read = |name| {
            let number = self.tree.number(Cell { gpu: index, short_id: None, name }).ok()?;
            u32::try_from(number).ok()
        };
        let (policy, max_inst) = (read("policy")?, read("max_inst")?);
        Some(GpuRules { policy, max_inst, prio_ratio: read("prio_ratio")? })
    }

    /// Changes the rules of the GPU `index`.
    ///
    /// # Errors
    ///
    /// If the change was not applied.
    pub(super) fn set_gpu(&self, index: u32, change: GpuChange) -> Result<(), KmError> {
        self.tree.loaded()?;
        let (name, value) = match change {
            GpuChange::Policy(policy) => ("policy", policy),
            GpuChange::MaxInst(max_inst) => ("max_inst", max_inst),
            GpuChange::PrioRatio(prio_ratio) => ("prio_ratio", prio_ratio),
        };
        self.tree.put(Cell { gpu: index, short_id: None, name }, u64::from(value))
    }

    /// Makes what was validated, GPU by GPU in the container's order; policies come
    /// last, because they are the GPU's and not the container's.
    fn build(
        &self,
        tenant: Tenant<'_>,
        quotas: &[Quota],
        journal: &mut Journal<'_>,
    ) -> Result<(), KmError> {
        for quota in quotas {
            let cell = |name| Cell { gpu: quota.gpu, short_id: Some(tenant.short_id), name };
            self.tree.create(quota.gpu, tenant.short_id)?;
            self.tree.put(cell("memsize"), quota.limit_bytes)?;
            self.tree.ensure(cell("weight"), tenant.plan.weight.into())?;
            self.tree.ensure(cell("highprio"), tenant.plan.high_priority.into())?;
        }
        if tenant.plan.weight > 1 {
            for quota in quotas {
                self.select_policy(quota.gpu, tenant.short_id, tenant.plan.weight, journal)?;
            }
        }
        Ok(())
    }

    /// Removes what an earlier container of the same short id left behind.
    fn clear_leftover(&self, short_id: &str) -> Result<(), KmError> {
        let gpus = self.tree.gpus_with(short_id)?;
        if gpus.is_empty() {
            return Ok(());
        }
        tracing::info!(
            container = short_id,
            ?gpus,
            "the module still holds an instance of this name, which belongs to no registered \
             container; it is destroyed"
        );
        self.tree.destroy(short_id)
    }

    /// That a GPU can give `wanted` more weight than `held`.
    fn check_weight(&self, gpu: u32, held: u64, wanted: u32) -> Result<(), KmError> {
        let free = self.tree.number(Cell { gpu, short_id: None, name: "free_weight" })?;
        let free = free.saturating_add(held);
        if free >= u64::from(wanted) {
            return Ok(());
        }
        let holders = self.tree.instances(gpu)?;
        Err(KmError::NoWeight { gpu, free, wanted, holders })
    }

    /// Makes weights count on a GPU, if no container there expects another policy.
    fn select_policy(
        &self,
        gpu: u32,
        short_id: &str,
        weight: u32,
        journal: &mut Journal<'_>,
    ) -> Result<(), KmError> {
        let cell = Cell { gpu, short_id: None, name: "policy" };
        let policy = self.tree.number(cell)?;
        if policy == POLICY_WEIGHTED {
            return Ok(());
        }
        let others = self.others(gpu, short_id)?;
        if others.is_empty() {
            journal.put(cell, POLICY_WEIGHTED)?;
            tracing::info!(
                container = short_id,
                gpu,
                weight,
                before = policy,
                "a weight above 1 selects policy {POLICY_WEIGHTED} for the whole GPU"
            );
        } else {
            let effect =
                if policy == POLICY_FIXED { "is a fixed ceiling" } else { "has no effect" };
            tracing::warn!(
                "weight {weight} of {short_id} {effect} on GPU {gpu}: its policy is {policy}, not \
                 {POLICY_WEIGHTED}, and stays so while {} is there",
                others.join(", ")
            );
        }
        Ok(())
    }

    /// The instances on a GPU next to this one.
    fn others(&self, gpu: u32, short_id: &str) -> Result<Vec<String>, KmError> {
        let mut names = self.tree.instances(gpu)?;
        names.retain(|name| name != short_id);
        Ok(names)
    }

    /// Undoes what the journal knows of, and gives `first` the failures of that.
    fn undo(&self, journal: Journal<'_>, first: KmError) -> KmError {
        let mut failures = Vec::new();
        if journal.makes_instances {
            failures.extend(self.tree.destroy(journal.short_id).err());
        }
        for (cell, before) in journal.before.into_iter().rev() {
            failures.extend(self.restore(journal.short_id, cell, before).err());
        }
        first.and_undo(failures)
    }

    fn restore(&self, short_id: &str, cell: Cell<'_>, before: u64) -> Result<(), KmError> {
        // Who came since found the policy we had set, and may count on it.
        let of_gpu = cell.short_id.is_none();
        if of_gpu && !self.others(cell.gpu, short_id)?.is_empty() {
            return Ok(());
        }
        self.tree.ensure(cell, before)
    }

    fn change<'a>(
        &self,
        tenant: Tenant<'a>,
        change: Change,
        journal: &mut Journal<'a>,
    ) -> Result<(), KmError> {
        self.tree.loaded()?;
        check_short_id(tenant.short_id)?;
        match change {
            Change::MemoryLimit { gpu_index, bytes } => {
                self.change_memory(tenant.short_id, Quota { gpu: gpu_index, limit_bytes: bytes })
            }
            Change::Weight(weight) => self.change_weight(tenant, weight, journal),
            Change::HighPriority(high) => {
                for gpu in self.held_gpus(tenant)? {
                    let short_id = Some(tenant.short_id);
                    journal.put(Cell { gpu, short_id, name: "highprio" }, high.into())?;
                }
                Ok(())
            }
        }
    }

    fn change_memory(&self, short_id: &str, quota: Quota) -> Result<(), KmError> {
        let Quota { gpu, limit_bytes: wanted_bytes } = quota;
        check_quota(quota)?;
        self.check_held(gpu, short_id)?;
        let cell = Cell { gpu, short_id: Some(short_id), name: "memsize" };
        let now = self.describe(gpu, short_id)?;
        match now.memory_used_bytes {
            Some(used_bytes)
                if used_bytes > wanted_bytes && wanted_bytes < now.memory_limit_bytes =>
            {
                let short_id = short_id.to_owned();
                Err(KmError::InUse { gpu, short_id, used_bytes, wanted_bytes })
            }
            _ => self.tree.put(cell, wanted_bytes),
        }
    }

    fn change_weight<'a>(
        &self,
        tenant: Tenant<'a>,
        weight: u32,
        journal: &mut Journal<'a>,
    ) -> Result<(), KmError> {
        let gpus = self.held_gpus(tenant)?;
        let cell = |gpu| Cell { gpu, short_id: Some(tenant.short_id), name: "weight" };
        for gpu in &gpus {
            self.check_weight(*gpu, self.tree.number(cell(*gpu))?, weight)?;
        }
        for gpu in &gpus {
            journal.put(cell(*gpu), weight.into())?;
        }
        if weight > 1 {
            for gpu in &gpus {
                self.select_policy(*gpu, tenant.short_id, weight, journal)?;
            }
        }
        Ok(())
    }

    /// The GPUs on which a container has its quota, each checked to be there.
    fn held_gpus(&self, tenant: Tenant<'_>) -> Result<Vec<u32>, KmError> {
        let gpus: Vec<u32> = quotas(tenant).map(|quota| quota.gpu).collect();
        if gpus.is_empty() {
            return Err(KmError::NoQuota { short_id: tenant.short_id.to_owned() });
        }
        for gpu in &gpus {
            self.check_held(*gpu, tenant.short_id)?;
        }
        Ok(gpus)
    }

    fn check_held(&self, gpu: u32, short_id: &str) -> Result<(), KmError> {
        if self.tree.has(gpu, short_id)? {
            return Ok(());
        }
        Err(KmError::NoInstance { gpu, short_id: short_id.to_owned() })
    }

    /// What the module says of one instance.
    fn describe(&self, gpu_index: u32, short_id: &str) -> Result<Instance, KmError> {
        let cell = Cell { gpu: gpu_index, short_id: Some(short_id), name: "memsize" };
        let memory_limit_bytes = self.tree.number(cell)?;
        let text = self.tree.meminfo(gpu_index, short_id)?;
        let found = text.and_then(|text| meminfo::read(&text, memory_limit_bytes));
        Ok(Instance {
            gpu_index,
            memory_limit_bytes,
            memory_used_bytes: found.as_ref().map(|found| found.bytes),
            processes: found.map(|found| found.processes).unwrap_or_default(),
            compute_held: None,
            share_refused: None,
        })
    }
}

impl Isolation for Km {
    fn usable(&self) -> Result<(), BackendError> {
        Ok(self.tree.loaded()?)
    }

    /// The tree is writable for everyone, and procfs is the same in every container: one
    /// could raise its own quota.
    fn edit(&self, _profile: Option<&Value>, edits: &mut Edits) -> Result<(), BackendError> {
        edits.masked.push(self.tree.root().to_string_lossy().into_owned());
        Ok(())
    }

    fn activate(&self, tenant: Tenant<'_>) -> Result<(), BackendError> {
        let quotas: Vec<Quota> = quotas(tenant).collect();
        if quotas.is_empty() {
            return Ok(());
        }
        self.tree.loaded()?;
        check_short_id(tenant.short_id)?;
        let present = self.tree.gpus()?;
        for quota in &quotas {
            control_digit(quota.gpu)?;
            check_quota(*quota)?;
            if !present.contains(&quota.gpu) {
                return Err(KmError::NoGpu { gpu: quota.gpu, present }.into());
            }
        }
        // Before the weights are checked, because it holds some of them.
        self.clear_leftover(tenant.short_id)?;
        for quota in &quotas {
            self.check_weight(quota.gpu, 0, tenant.plan.weight)?;
        }

        let mut journal = Journal::new(&self.tree, tenant.short_id);
        journal.makes_instances = true;
        let built = self.build(tenant, &quotas, &mut journal);
        Ok(built.map_err(|first| self.undo(journal, first))?)
    }

    fn deactivate(&self, short_id: &str) -> Result<(), BackendError> {
        Ok(self.tree.destroy(short_id)?)
    }

    fn list(&self, short_ids: Option<&[&str]>) -> Result<Vec<Observed>, BackendError> {
        let is_wanted = |id: &str| short_ids.is_none_or(|wanted| wanted.contains(&id));
        self.tree.loaded()?;
        let mut found: BTreeMap<String, Vec<Instance>> = BTreeMap::new();
        for gpu in self.tree.gpus()? {
            for short_id in self.tree.instances(gpu)?.into_iter().filter(|id| is_wanted(id)) {
                match self.describe(gpu, &short_id) {
                    Ok(instance) => found.entry(short_id).or_default().push(instance),
                    // It ended between its name being read and its files.
                    Err(_) if !self.tree.has(gpu, &short_id)? => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        let observed = found.into_iter().map(|(short_id, instances)| {
            let pids = instances.iter().flat_map(|instance| &instance.processes);
            let pids: BTreeSet<i32> = pids.map(|(pid, _)| *pid).collect();
            Observed {
                short_id,
                instances: Some(instances),
                process_count: Some(pids.len()),
                ..Observed::default()
            }
        });
        Ok(observed.collect())
    }

    fn set(&self, tenant: Tenant<'_>, change: Change) -> Result<(), BackendError> {
        let mut journal = Journal::new(&self.tree, tenant.short_id);
        let changed = self.change(tenant, change, &mut journal);
        Ok(changed.map_err(|first| self.undo(journal, first))?)
    }
}

/// What has to be undone where a later step fails.
#[derive(Debug)]
struct Journal<'a> {
    tree: &'a Tree,
    short_id: &'a str,
    /// The container's instances were made here, and go as a whole.
    makes_instances: bool,
    /// Other values written, and what they were.
    before: Vec<(Cell<'a>, u64)>,
}

impl<'a> Journal<'a> {
    fn new(tree: &'a Tree, short_id: &'a str) -> Self {
        Journal { tree, short_id, makes_instances: false, before: Vec::new() }
    }

    fn put(&mut self, cell: Cell<'a>, wanted: u64) -> Result<(), KmError> {
        let before = self.tree.number(cell)?;
        if before == wanted {
            return Ok(());
        }
        self.before.push((cell, before));
        self.tree.put(cell, wanted)
    }
}

/// The GPUs of a container that are under a quota, in its order; it has the others as
/// a whole, which the module has no part in.
fn quotas(tenant: Tenant<'_>) -> impl Iterator<Item = Quota> {
    tenant.plan.gpus.iter().filter_map(|gpu| {
        gpu.memory_limit_bytes.map(|limit_bytes| Quota { gpu: gpu.index, limit_bytes })
    })
}

fn check_quota(quota: Quota) -> Result<(), KmError> {
    if quota.limit_bytes == 0 { Err(KmError::EmptyQuota { gpu: quota.gpu }) } else { Ok(()) }
}
