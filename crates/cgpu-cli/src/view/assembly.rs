//! A [`Snapshot`] of what was found: [`ObservedHost::assemble`]. Pure.

use std::collections::{BTreeMap, HashMap};

use super::{
    ContainerView, DriverGpu, DriverUsage, GpuView, Mode, ProcessView, Program, ShareView,
    Snapshot, State,
};
use cgpu::admission::Condition;
use cgpu::backend::Observed;
use cgpu_core::gpu::{Gpu, GpuState};
use cgpu_core::plan::{GpuRules, Kind, Plan, PlannedGpu};
use cgpu_host::registry::Record;
use cgpu_host::registry::share::Share;

/// What was found on a host.
#[derive(Debug)]
pub(super) struct ObservedHost {
    pub(super) hostname: String,
    pub(super) driver_version: Option<String>,
    /// The GPUs; none where they aren't known.
    pub(super) gpus: Vec<Gpu>,
    pub(super) containers: Vec<ObservedContainer>,
    /// What the driver itself says.
    pub(super) driver: DriverUsage,
    /// Processes that the driver reports and no backend, each with its container's short id.
    pub(super) owners: HashMap<i32, String>,
    /// What processes are called.
    pub(super) process_names: HashMap<i32, String>,
    /// The rules of the GPUs, by UUID.
    pub(super) rules: HashMap<String, GpuRules>,
    /// How their computing time is shared, by UUID.
    pub(super) shares: HashMap<String, Share>,
    pub(super) gaps: Vec<String>,
}

/// What was found of a container.
#[derive(Debug)]
pub(super) struct ObservedContainer {
    pub(super) record: Record,
    pub(super) condition: Condition,
    pub(super) name: Option<String>,
    pub(super) age_s: Option<u64>,
    /// What its backend sees; `None` where that sees nothing of it.
    pub(super) observed: Option<Observed>,
}

impl ObservedHost {
    /// As people read it.
    pub(super) fn assemble(self) -> Snapshot {
        let containers: Vec<ContainerView> =
            self.containers.iter().map(|container| self.container(container)).collect();
        let mut gpus: Vec<GpuView> =
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
                reserved_bytes: planned.memory_reserved_bytes,
                state: GpuState::Ok,
                mig_enabled: false,
                mig_devices: Vec::new(),
            };
            known.insert(planned.uuid.clone(), gpu);
        }
        known.extend(self.gpus.iter().map(|gpu| (gpu.uuid.clone(), gpu.clone())));
        known
    }

    fn gpu(&self, gpu: &Gpu, containers: &[ContainerView]) -> GpuView {
        let on_it = || {
            containers.iter().filter_map(|container| {
                let share = container.shares.iter().find(|share| share.gpu.uuid == gpu.uuid)?;
                Some((container, share))
            })
        };
        let is_shared = |(container, share): &(&ContainerView, &ShareView)| {
            container.mode == Mode::Shared && share.gpu.memory_limit_bytes.is_some()
        };
        let shared = on_it().filter(is_shared).count();
        let lives = |(container, _): &(&ContainerView, _)| container.state != State::Leaked;
        let weights =
            on_it().filter(is_shared).filter(lives).map(|(container, _)| container.weight);
        // Sums are of other programs' values, and stop at the largest number.
        let weights = weights.fold(0, u32::saturating_add);
        let rules = self.rules.get(&gpu.uuid);
        let driver = self.driver.gpus.iter().find(|usage| usage.uuid == gpu.uuid);
        let in_containers = || known_sum(on_it().map(|(_, share)| share.memory_used_bytes));
        let reserved =
            on_it().filter(is_shared).filter_map(|(_, share)| share.gpu.memory_limit_bytes);
        let reported = |figure: fn(&DriverGpu) -> Option<u32>| driver.and_then(figure);
        GpuView {
            index: gpu.index,
            uuid: gpu.uuid.clone(),
            bus_id: gpu.bus_id.clone(),
            name: gpu.name.clone(),
            lost: gpu.state == GpuState::Lost,
            memory_total_bytes: gpu.memory_bytes,
            memory_reserved_bytes: gpu.reserved_bytes,
            memory_promised_bytes: reserved.fold(0, u64::saturating_add),
            memory_used_bytes: driver.and_then(|gpu| gpu.memory_used_bytes).or_else(in_containers),
            utilization_percent: reported(|gpu| gpu.utilization_percent),
            temperature_celsius: reported(|gpu| gpu.temperature_celsius),
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

    fn container(&self, found: &ObservedContainer) -> ContainerView {
        let ObservedContainer { record, condition, name, age_s, observed } = found;
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
            Condition::Leaked => State::Leaked,
        };
        let (processes, counted) = self.processes(found);
        ContainerView {
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
            durations: observed.as_ref().and_then(|observed| observed.durations),
            monitor_updates: observed.as_ref().and_then(|observed| observed.monitor_updates),
            leaked_to: observed
                .iter()
                .flat_map(|observed| &observed.leaked_to)
                .map(program)
                .collect(),
            caveats: plan.caveats.clone(),
        }
    }

    /// What a container has of a GPU: by its backend, else by what the driver says of its processes.
    fn share(
        &self,
        gpu: &PlannedGpu,
        found: &ObservedContainer,
        processes: &[ProcessView],
    ) -> ShareView {
        let instances = found.observed.iter().filter_map(|observed| observed.instances.as_ref());
        let instance = instances.flatten().find(|instance| instance.gpu_index == gpu.index);
        let driver = self.driver.gpus.iter().find(|usage| usage.uuid == gpu.uuid);
        let is_its = |pid: i32| processes.iter().any(|process| process.pid == pid);
        let ours = || driver.into_iter().flat_map(|gpu| &gpu.processes).filter(|p| is_its(p.pid));
        let by_driver = || {
            // A process whose memory the driver doesn't tell leaves the sum unknown.
            let known = driver.filter(|_| gpu.mig.is_none() && gpu.memory_limit_bytes.is_none());
            known.and_then(|_| known_sum(ours().map(|process| process.memory_used_bytes)))
        };
        let utilization = ours().filter_map(|process| process.utilization_percent);
        let is_reported = driver.is_some_and(|gpu| gpu.reports_process_utilization);
        ShareView {
            gpu: gpu.clone(),
            memory_used_bytes: match instance {
                Some(instance) => instance.memory_used_bytes,
                None => by_driver(),
            },
            memory_enforced_bytes: instance.map(|instance| instance.memory_limit_bytes),
            utilization_percent: is_reported
                .then(|| utilization.fold(0, u32::saturating_add).min(100)),
            compute_share: self
                .shares
                .get(&gpu.uuid)
                .filter(|_| instance.is_none_or(|instance| instance.share_refused.is_none()))
                .and_then(|share| share.part(&found.record.short_id)),
            compute_held: instance.and_then(|instance| instance.compute_held),
        }
    }

    /// The processes of a container, and how many there are; those with most memory first.
    fn processes(&self, found: &ObservedContainer) -> (Vec<ProcessView>, Option<usize>) {
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
        let mut processes: Vec<ProcessView> = memory
            .into_iter()
            .map(|(pid, memory)| ProcessView {
                pid,
                name: self.process_names.get(&pid).cloned(),
                memory,
            })
            .collect();
        let bytes = |process: &ProcessView| {
            process.memory.iter().map(|(_, bytes)| *bytes).fold(0, u64::saturating_add)
        };
        processes.sort_by_key(|process| std::cmp::Reverse(bytes(process)));
        (processes, counted)
    }
}

/// How a container has its GPUs.
fn mode(plan: &Plan) -> Mode {
    match plan.backend {
        _ if plan.is_whole() && plan.caveats.unenforced_by.is_some() => Mode::Unenforced,
        _ if plan.is_whole() => Mode::Whole,
        Kind::None => Mode::Unenforced,
        Kind::Gate | Kind::Km => Mode::Shared,
    }
}

fn program((pid, name): &(i32, String)) -> Program {
    Program { pid: *pid, name: name.clone() }
}

/// The sum of values; unknown if one is.
fn known_sum(mut usage: impl Iterator<Item = Option<u64>>) -> Option<u64> {
    usage.try_fold(0, |sum: u64, figure| Some(sum.saturating_add(figure?)))
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::view::DriverProcess;
    use cgpu::backend::Instance;
    use cgpu_core::calls::Calls;
    use cgpu_core::units::MIB;
    use cgpu_host::process::ProcessId;
    use cgpu_host::registry::{Holder, Key};

    fn planned(index: u32, limit_mib: Option<u64>) -> PlannedGpu {
        PlannedGpu {
            index,
            uuid: format!("GPU-{index}"),
            minor: index,
            memory_total_bytes: 16_000 * MIB,
            memory_reserved_bytes: 0,
            memory_limit_bytes: limit_mib.map(|mib| mib * MIB),
            mig: None,
        }
    }

    fn container(id: &str, backend: Kind, gpus: Vec<PlannedGpu>) -> ObservedContainer {
        let plan = Plan {
            backend,
            gpus,
            weight: 2,
            high_priority: false,
            caveats: cgpu_core::plan::Caveats::default(),
        };
        let init = Some(ProcessId { pid: 7, start_ticks: 1 });
        ObservedContainer {
            record: Record {
                key: Key { root: "/run/runc".into(), id: id.into() },
                bundle: PathBuf::new(),
                short_id: id.into(),
                boot_id: String::new(),
                holder: Holder::Active { init },
                plan,
            },
            condition: Condition::Active,
            name: None,
            age_s: Some(5),
            observed: None,
        }
    }

    fn observed(id: &str, used_mib: u64, processes: &[(i32, u64)]) -> Option<Observed> {
        Some(Observed {
            short_id: id.into(),
            instances: Some(vec![Instance {
                gpu_index: 0,
                memory_limit_bytes: 1000 * MIB,
                memory_used_bytes: Some(used_mib * MIB),
                processes: processes.iter().map(|(pid, mib)| (*pid, mib * MIB)).collect(),
                compute_held: Some(0.25),
                share_refused: None,
            }]),
            calls: Some(Calls { over_quota: 3, ..Calls::default() }),
            durations: None,
            monitor_updates: None,
            process_count: Some(processes.len()),
            leaked_to: Vec::new(),
        })
    }

    fn found(containers: Vec<ObservedContainer>) -> ObservedHost {
        let rules = GpuRules { policy: 5, max_inst: 20, prio_ratio: 80 };
        ObservedHost {
            hostname: "node".into(),
            driver_version: None,
            gpus: Vec::new(),
            containers,
            driver: DriverUsage::default(),
            owners: HashMap::new(),
            process_names: [(11, "python".to_owned())].into(),
            rules: [("GPU-0".to_owned(), rules)].into(),
            shares: HashMap::new(),
            gaps: Vec::new(),
        }
    }

    fn driver_gpu(processes: Vec<DriverProcess>) -> DriverGpu {
        DriverGpu {
            index: 0,
            uuid: "GPU-0".into(),
            memory_used_bytes: Some(900 * MIB),
            utilization_percent: Some(80),
            reports_process_utilization: true,
            processes,
            ..DriverGpu::default()
        }
    }

    fn process(pid: i32, mib: Option<u64>, percent: Option<u32>) -> DriverProcess {
        let memory_used_bytes = mib.map(|mib| mib * MIB);
        DriverProcess { pid, memory_used_bytes, utilization_percent: percent }
    }

    #[test]
    fn a_gpu_has_the_sums_of_its_containers() {
        let mut one = container("one", Kind::Gate, vec![planned(0, Some(1000))]);
        one.observed = observed("one", 300, &[(10, 100), (11, 200)]);
        let mut other = container("other", Kind::Gate, vec![planned(0, Some(2000))]);
        other.observed = observed("other", 50, &[]);
        let shown = found(vec![one, other]).assemble();
        let gpu = &shown.gpus[0];
        assert_eq!(gpu.memory_promised_bytes, 3000 * MIB);
        assert_eq!(gpu.memory_used_bytes, Some(350 * MIB));
        assert_eq!((gpu.shared_containers, gpu.free_weight), (2, Some(16)));
        let one = &shown.containers[0];
        assert!(one.enforced && one.calls.is_some_and(|calls| calls.over_quota == 3));
        let names: Vec<_> = one.processes.iter().map(|p| (p.pid, p.name.as_deref())).collect();
        assert_eq!(names, [(11, Some("python")), (10, None)], "those with most first");
    }

    /// What is unknown of one container is unknown of the sum, unless the driver reports it.
    #[test]
    fn unknown_container_usage_makes_the_sum_unknown() {
        let silent = || {
            let mut container = container("one", Kind::Gate, vec![planned(0, Some(1000))]);
            let instances = None;
            container.observed =
                observed("one", 0, &[]).map(|observed| Observed { instances, ..observed });
            container
        };
        let mut host = found(vec![silent()]);
        host.rules.clear();
        let shown = host.assemble();
        assert_eq!(shown.gpus[0].memory_used_bytes, None);
        assert_eq!((shown.gpus[0].max_inst, shown.gpus[0].free_weight), (None, None));
        let container = &shown.containers[0];
        assert_eq!((container.state, container.enforced), (State::Silent, false));
        assert_eq!(container.shares[0].memory_used_bytes, None);
        // The driver usage of the GPU is known all the same.
        let mut host = found(vec![silent()]);
        host.driver.gpus = vec![driver_gpu(Vec::new())];
        assert_eq!(host.assemble().gpus[0].memory_used_bytes, Some(900 * MIB));
    }

    #[test]
    fn unlimited_containers_show_driver_usage_of_their_processes() {
        let whole = container("whole", Kind::None, vec![planned(0, None)]);
        let mut shared = container("shared", Kind::Gate, vec![planned(0, Some(1000))]);
        shared.observed = observed("shared", 300, &[(10, 250)]);
        let mut host = found(vec![whole, shared]);
        host.owners = [(20, "whole".to_owned()), (21, "whole".to_owned())].into();
        host.driver.gpus = vec![driver_gpu(vec![
            process(10, Some(260), Some(30)),
            process(20, Some(400), Some(40)),
            process(21, Some(200), None),
            process(99, Some(10), Some(10)),
        ])];
        let shown = host.assemble();
        let [whole, shared] = &shown.containers[..] else { panic!("two containers") };
        assert_eq!((whole.mode, whole.state, whole.enforced), (Mode::Whole, State::Active, false));
        assert_eq!(whole.shares[0].memory_used_bytes, Some(600 * MIB));
        assert_eq!(whole.shares[0].utilization_percent, Some(40));
        assert_eq!(whole.shares[0].compute_held, None, "no monitor reports it");
        assert_eq!(whole.process_count, Some(2));
        // Its monitor counts what the driver does not, and the other way round.
        assert_eq!(shared.shares[0].memory_used_bytes, Some(300 * MIB));
        assert_eq!(shared.shares[0].utilization_percent, Some(30));
        assert_eq!((shown.gpus[0].shared_containers, shown.gpus[0].other_containers), (1, 1));
    }

    /// Extreme values are summed up to the largest number, without an overflow.
    #[test]
    fn extreme_usage_values_saturate_in_sums() {
        let mut shared: Vec<_> =
            ["one", "two"].map(|id| container(id, Kind::Gate, vec![planned(0, Some(1000))])).into();
        for container in &mut shared {
            container.record.plan.weight = u32::MAX;
            container.record.plan.gpus[0].memory_limit_bytes = Some(u64::MAX);
            container.observed = observed(&container.record.short_id, 0, &[(10, 0)]);
            let instances = container.observed.as_mut().and_then(|all| all.instances.as_mut());
            let instance = &mut instances.unwrap()[0];
            instance.memory_used_bytes = Some(u64::MAX);
            instance.processes = vec![(10, u64::MAX), (10, u64::MAX)];
        }
        let shown = found(shared).assemble();
        let gpu = &shown.gpus[0];
        assert_eq!((gpu.memory_promised_bytes, gpu.memory_used_bytes), (u64::MAX, Some(u64::MAX)));
        assert_eq!(gpu.free_weight, Some(0));
        let mut host = found(vec![container("whole", Kind::None, vec![planned(0, None)])]);
        host.owners = [(20, "whole".to_owned()), (21, "whole".to_owned())].into();
        let odd = |pid| DriverProcess {
            memory_used_bytes: Some(u64::MAX),
            utilization_percent: Some(u32::MAX),
            ..process(pid, None, None)
        };
        host.driver.gpus = vec![driver_gpu(vec![odd(20), odd(21)])];
        let share = &host.assemble().containers[0].shares[0];
        assert_eq!(share.memory_used_bytes, Some(u64::MAX));
        assert_eq!(share.utilization_percent, Some(100));
    }

    #[test]
    fn a_container_that_nothing_holds_is_not_enforced() {
        let reported = container("unenforced", Kind::None, vec![planned(0, Some(1000))]);
        let mut disabled = container("disabled", Kind::None, vec![planned(0, None)]);
        disabled.record.plan.caveats.unenforced_by = Some("CGPU_DISABLE=true".into());
        let mut closed = container("closed", Kind::Gate, vec![planned(0, Some(1000))]);
        closed.condition = Condition::Closed;
        let shown = found(vec![reported, disabled, closed]).assemble();
        let modes: Vec<_> = shown.containers.iter().map(|c| (c.mode, c.state)).collect();
        assert_eq!(
            modes,
            [
                (Mode::Unenforced, State::Active),
                (Mode::Unenforced, State::Active),
                (Mode::Shared, State::Closed)
            ]
        );
        assert!(shown.containers.iter().all(|container| !container.enforced));
        assert_eq!(shown.gpus[0].memory_promised_bytes, 1000 * MIB, "of those that are held");
    }
}
