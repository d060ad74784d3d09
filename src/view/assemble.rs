//! A [`Snapshot`] of what was found: [`Found::assemble`]. Pure.

use std::collections::{BTreeMap, HashMap};

use super::{
    ContainerFigures, DriverFigures, DriverGpu, GpuFigures, Mode, ProcessFigures, ShareFigures,
    Snapshot, State,
};
use crate::admission::Condition;
use crate::backend::Observed;
use crate::inventory::{Gpu, GpuState};
use crate::plan::{GpuRules, Kind, Plan, PlannedGpu};
use crate::registry::Record;

/// What was found on a host.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) hostname: String,
    pub(super) driver_version: Option<String>,
    /// The GPUs; none where they aren't known.
    pub(super) gpus: Vec<Gpu>,
    pub(super) containers: Vec<FoundContainer>,
    /// What the driver itself says.
    pub(super) driver: DriverFigures,
    /// Processes that the driver tells of and no backend, each with its container's short id.
    pub(super) owners: HashMap<i32, String>,
    /// What processes are called.
    pub(super) process_names: HashMap<i32, String>,
    /// What goes for the GPUs, by UUID.
    pub(super) rules: HashMap<String, GpuRules>,
    pub(super) gaps: Vec<String>,
}

/// What was found of a container.
#[derive(Debug)]
pub(super) struct FoundContainer {
    pub(super) record: Record,
    pub(super) condition: Condition,
    pub(super) name: Option<String>,
    pub(super) age_s: Option<u64>,
    /// What its backend sees; `None` where that sees nothing of it.
    pub(super) observed: Option<Observed>,
}

impl Found {
    /// As people look at it.
    pub(super) fn assemble(self) -> Snapshot {
        let containers: Vec<ContainerFigures> =
            self.containers.iter().map(|container| self.container(container)).collect();
        let mut gpus: Vec<GpuFigures> =
            self.known_gpus().values().map(|gpu| self.gpu(gpu, &containers)).collect();
        gpus.sort_by_key(|gpu| gpu.index);
        Snapshot {
            cgpu_version: env!("CARGO_PKG_VERSION").to_owned(),
            hostname: self.hostname,
            driver_version: self.driver_version,
            gpus,
            containers,
            gaps: self.gaps,
        }
    }

    /// The GPUs by UUID: those of the inventory, and those that containers have all the same.
    fn known_gpus(&self) -> BTreeMap<String, Gpu> {
        let mut known = BTreeMap::new();
        for planned in self.containers.iter().flat_map(|found| &found.record.plan.gpus) {
            // The memory is the MIG device's, and no GPU's.
            let memory_bytes = if planned.mig.is_some() { 0 } else { planned.memory_total_bytes };
            let gpu = Gpu {
                index: planned.index,
                uuid: planned.uuid.clone(),
                minor: planned.minor,
                bus_id: String::new(),
                name: String::new(),
                memory_bytes,
                state: GpuState::Ok,
                mig_enabled: false,
                mig_devices: Vec::new(),
            };
            known.insert(planned.uuid.clone(), gpu);
        }
        known.extend(self.gpus.iter().map(|gpu| (gpu.uuid.clone(), gpu.clone())));
        known
    }

    fn gpu(&self, gpu: &Gpu, containers: &[ContainerFigures]) -> GpuFigures {
        let on_it = || {
            containers.iter().filter_map(|container| {
                let share = container.shares.iter().find(|share| share.gpu.uuid == gpu.uuid)?;
                Some((container, share))
            })
        };
        let is_shared = |(container, share): &(&ContainerFigures, &ShareFigures)| {
            container.mode == Mode::Shared && share.gpu.memory_limit_bytes.is_some()
        };
        let shared = on_it().filter(is_shared).count();
        let weights: u32 = on_it().filter(is_shared).map(|(container, _)| container.weight).sum();
        let rules = self.rules.get(&gpu.uuid);
        let driver = self.driver.gpus.iter().find(|figures| figures.uuid == gpu.uuid);
        let in_containers = || on_it().map(|(_, share)| share.memory_used_bytes).sum();
        let promised =
            on_it().filter(is_shared).filter_map(|(_, share)| share.gpu.memory_limit_bytes);
        let told = |figure: fn(&DriverGpu) -> Option<u32>| driver.and_then(figure);
        GpuFigures {
            index: gpu.index,
            uuid: gpu.uuid.clone(),
            bus_id: gpu.bus_id.clone(),
            name: gpu.name.clone(),
            lost: gpu.state == GpuState::Lost,
            memory_total_bytes: gpu.memory_bytes,
            memory_promised_bytes: promised.fold(0, u64::saturating_add),
            memory_used_bytes: driver.and_then(|gpu| gpu.memory_used_bytes).or_else(in_containers),
            utilization_percent: told(|gpu| gpu.utilization_percent),
            temperature_celsius: told(|gpu| gpu.temperature_celsius),
            power_watts: driver.and_then(|gpu| gpu.power_watts),
            power_limit_watts: driver.and_then(|gpu| gpu.power_limit_watts),
            policy: rules.map(|rules| rules.policy),
            max_inst: rules.map(|rules| rules.max_inst),
            prio_ratio: rules.map(|rules| rules.prio_ratio),
            shared_containers: count(shared),
            other_containers: count(on_it().count() - shared),
            free_weight: rules.map(|rules| rules.max_inst.saturating_sub(weights)),
        }
    }

    fn container(&self, found: &FoundContainer) -> ContainerFigures {
        let FoundContainer { record, condition, name, age_s, observed } = found;
        let plan = &record.plan;
        let mode = mode(plan);
        let answers = observed.as_ref().is_some_and(|observed| observed.instances.is_some());
        let is_made = !matches!(condition, Condition::Reserved);
        let state = match condition {
            Condition::Active if mode == Mode::Shared && !answers => State::Silent,
            Condition::Active => State::Active,
            Condition::Reserved => State::Reserved,
            Condition::Created { .. } => State::Created,
            Condition::Closed => State::Closed,
        };
        let (processes, counted) = self.processes(found);
        ContainerFigures {
            id: record.key.id.clone(),
            short_id: record.short_id.clone(),
            name: name.clone(),
            root: record.key.root.clone(),
            backend: plan.backend,
            mode,
            state,
            enforced: mode == Mode::Shared && is_made && answers && state != State::Closed,
            pid: record.holder.process().map(|process| process.pid),
            age_s: *age_s,
            weight: plan.weight,
            high_priority: plan.high_priority,
            shares: plan.gpus.iter().map(|gpu| self.share(gpu, found, &processes)).collect(),
            process_count: counted,
            processes,
            calls: observed.as_ref().and_then(|observed| observed.calls),
        }
    }

    /// What a container has of a GPU: by its backend, else by what the driver says of its processes.
    fn share(
        &self,
        gpu: &PlannedGpu,
        found: &FoundContainer,
        processes: &[ProcessFigures],
    ) -> ShareFigures {
        let instances = found.observed.iter().filter_map(|observed| observed.instances.as_ref());
        let instance = instances.flatten().find(|instance| instance.gpu_index == gpu.index);
        let driver = self.driver.gpus.iter().find(|figures| figures.uuid == gpu.uuid);
        let is_its = |pid: i32| processes.iter().any(|process| process.pid == pid);
        let ours = || driver.into_iter().flat_map(|gpu| &gpu.processes).filter(|p| is_its(p.pid));
        let by_driver = || {
            // A process whose memory the driver doesn't tell leaves the sum unknown.
            let known = driver.filter(|_| gpu.mig.is_none() && gpu.memory_limit_bytes.is_none());
            known.and_then(|_| ours().map(|process| process.memory_used_bytes).sum())
        };
        let utilization = ours().filter_map(|process| process.utilization_percent);
        let is_told = driver.is_some_and(|gpu| gpu.tells_process_utilization);
        ShareFigures {
            gpu: gpu.clone(),
            memory_used_bytes: match instance {
                Some(instance) => instance.memory_used_bytes,
                None => by_driver(),
            },
            utilization_percent: is_told.then(|| utilization.sum::<u32>().min(100)),
        }
    }

    /// The processes of a container, and how many there are; those with most memory first.
    fn processes(&self, found: &FoundContainer) -> (Vec<ProcessFigures>, Option<usize>) {
        let mut memory: BTreeMap<i32, Vec<(u32, u64)>> = BTreeMap::new();
        let observed = found.observed.as_ref();
        let instances = observed.and_then(|observed| observed.instances.as_ref());
        for instance in instances.into_iter().flatten() {
            for (pid, bytes) in &instance.processes {
                memory.entry(*pid).or_default().push((instance.gpu_index, *bytes));
            }
        }
        let mut counted = observed.and_then(|observed| observed.process_count);
        if counted.is_none() && !self.driver.gpus.is_empty() {
            let its = |pid: i32| self.owners.get(&pid) == Some(&found.record.short_id);
            for gpu in &self.driver.gpus {
                for process in gpu.processes.iter().filter(|process| its(process.pid)) {
                    let bytes = process.memory_used_bytes.map(|bytes| (gpu.index, bytes));
                    memory.entry(process.pid).or_default().extend(bytes);
                }
            }
            counted = Some(memory.len());
        }
        let mut processes: Vec<ProcessFigures> = memory
            .into_iter()
            .map(|(pid, memory)| ProcessFigures {
                pid,
                name: self.process_names.get(&pid).cloned(),
                memory,
            })
            .collect();
        let bytes = |process: &ProcessFigures| process.memory.iter().map(|(_, bytes)| bytes).sum();
        processes.sort_by_key(|process| std::cmp::Reverse::<u64>(bytes(process)));
        (processes, counted)
    }
}

/// How a container has its GPUs.
fn mode(plan: &Plan) -> Mode {
    match plan.backend {
        _ if plan.unenforced => Mode::Unenforced,
        _ if plan.is_whole() => Mode::Whole,
        Kind::None => Mode::Unenforced,
        Kind::Gate | Kind::Km => Mode::Shared,
    }
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
