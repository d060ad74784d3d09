//! Collects what a host shows: registry, monitors, inventory, `/proc`, and NVIDIA's driver where asked to.
//!
//! Owns asking each once. Whatever doesn't answer leaves a gap, and the rest is shown. Changes
//! nothing.

use std::collections::HashMap;
use std::fs;
use std::panic::resume_unwind;
use std::thread;
use std::time::Duration;

use super::assembly::{ObservedContainer, ObservedHost};
use super::{Driver, DriverUsage, Snapshot};
use cgpu::admission::Admission;
use cgpu::backend::gate::note_held;
use cgpu::backend::{BackendError, Observed};
use cgpu::container_names;
use cgpu::host::Host;
use cgpu_core::gpu::Gpu;
use cgpu_core::plan::{GpuRules, Kind};
use cgpu_host::inventory;
use cgpu_host::process::age_s;
use cgpu_host::registry::share::{self, Share};
use cgpu_host::registry::{Record, RegistryError};

/// How long NVIDIA's driver may take. It opens each GPU when it is asked first, which takes a second
/// or more where nothing keeps them open.
const DRIVER_TIMEOUT: Duration = Duration::from_secs(5);

/// Whether processes are shown by their names, too, which are read one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Processes {
    /// By number and name.
    Named,
    /// By number alone.
    Numbered,
}

/// What is on this host now. Without `driver` nothing is asked of NVIDIA's.
///
/// # Errors
///
/// Where the registry can't be read: then nothing is known of any container.
pub fn collect(
    host: &Host,
    processes: Processes,
    driver: Option<&mut Driver>,
) -> Result<Snapshot, RegistryError> {
    let (records, unreadable) = host.check_registry()?.check_each()?;
    collect_records(host, records, &unreadable, processes, driver)
}

/// The same of these containers alone; why others can't be read is a gap.
///
/// # Errors
///
/// As [`collect`].
pub fn collect_records(
    host: &Host,
    records: Vec<Record>,
    unreadable: &[RegistryError],
    processes: Processes,
    driver: Option<&mut Driver>,
) -> Result<Snapshot, RegistryError> {
    let mut gaps: Vec<String> = unreadable.iter().map(ToString::to_string).collect();
    // Monitors answer while names are read.
    let (asked, names) = thread::scope(|scope| {
        let asked = scope.spawn(|| observed(host, &records));
        let mut files = container_names::Files::default();
        let names: Vec<_> = records.iter().map(|record| files.name(record)).collect();
        (asked.join(), names)
    });
    let (mut observed, unasked) = asked.unwrap_or_else(|panic| resume_unwind(panic));
    gaps.extend(unasked);
    let containers: Vec<ObservedContainer> = records
        .into_iter()
        .zip(names)
        .map(|(record, name)| {
            let observed = observed.remove(&record.short_id);
            let answers = observed.as_ref().is_some_and(|one| one.instances.is_some());
            let condition = match answers {
                true => Admission::of(host).condition_where(&record, || true),
                false => Admission::of(host).condition(&record),
            };
            let age_s = record.holder.process().map(age_s);
            ObservedContainer { condition, name, age_s, observed, record }
        })
        .collect();
    let driver = match driver {
        Some(driver) => driver.usage(DRIVER_TIMEOUT),
        None => DriverUsage::default(),
    };
    gaps.extend(driver.gap.clone());
    let gpus = known_gpus(host, &mut gaps);
    let rules = rules(host, &gpus, &containers, &mut gaps);
    let shares = compute_shares(host, &rules);
    let owners = owners(&containers, &driver);
    let process_names = match processes {
        Processes::Named => process_names(&containers, &owners),
        Processes::Numbered => HashMap::new(),
    };
    let found = ObservedHost {
        hostname: read_line("/proc/sys/kernel/hostname").unwrap_or_default(),
        driver_version: driver_version(host),
        gpus,
        rules,
        shares,
        containers,
        driver,
        owners,
        process_names,
        gaps,
    };
    Ok(found.assemble())
}

/// How computing time is shared, by GPU, if containers share it.
fn compute_shares(host: &Host, rules: &HashMap<String, GpuRules>) -> HashMap<String, Share> {
    let state_dir = &host.config.state_dir;
    let share = |uuid: &String| Some((uuid.clone(), share::read(state_dir, uuid).ok()??));
    rules.keys().filter_map(share).collect()
}

/// What its backend sees of the container of `record`, and nothing else: `None` if no backend
/// enforces anything on it.
///
/// # Errors
///
/// If the backend can't be asked.
pub fn observe(host: &Host, record: &Record) -> Result<Option<Observed>, BackendError> {
    let isolation = host.isolation(record.plan.backend);
    Ok(isolation.list(Some(&[&record.short_id]))?.pop())
}

/// What the backends see of these containers, by short id, and why others can't be asked. Only
/// backends that have a container are.
fn observed(host: &Host, records: &[Record]) -> (HashMap<String, Observed>, Vec<String>) {
    let mut observed = HashMap::new();
    let mut gaps = Vec::new();
    let has = |kind: &Kind| records.iter().any(|record| record.plan.backend == *kind);
    for kind in [Kind::Gate, Kind::Km].into_iter().filter(has) {
        let held = records.iter().filter(|record| record.plan.backend == kind);
        let short_ids: Vec<&str> = held.map(|record| &*record.short_id).collect();
        match host.isolation(kind).list(Some(&short_ids)) {
            Ok(list) => observed.extend(list.into_iter().map(|one| (one.short_id.clone(), one))),
            Err(error) => gaps.push(error.to_string()),
        }
    }
    let gpus = records.iter().flat_map(|record| &record.plan.gpus);
    let gpus = gpus.map(|gpu| (gpu.index, gpu.uuid.clone())).collect();
    note_held(&host.config.state_dir, &gpus, &mut observed);
    (observed, gaps)
}

/// The rules of each GPU that is known, or that a container has, by UUID.
fn rules(
    host: &Host,
    gpus: &[Gpu],
    containers: &[ObservedContainer],
    gaps: &mut Vec<String>,
) -> HashMap<String, GpuRules> {
    let known = gpus.iter().map(|gpu| (gpu.index, &gpu.uuid));
    let planned = containers.iter().flat_map(|container| &container.record.plan.gpus);
    let planned = planned.map(|gpu| (gpu.index, &gpu.uuid));
    let mut rules = HashMap::new();
    let Ok(registry) = host.check_registry() else { return rules };
    for (index, uuid) in known.chain(planned) {
        if rules.contains_key(uuid) {
            continue;
        }
        match Admission::of(host).gpu_rules(&registry, index, uuid) {
            Ok(found) => drop(rules.insert(uuid.clone(), found)),
            // It is the same for all.
            Err(error) => {
                gaps.push(error.to_string());
                break;
            }
        }
    }
    rules
}

/// The GPUs as far as they are known without asking the driver.
fn known_gpus(host: &Host, gaps: &mut Vec<String>) -> Vec<Gpu> {
    match inventory::cached(&host.inventory_settings()) {
        Ok(Some(inventory)) => inventory.gpus().to_vec(),
        Ok(None) => {
            gaps.push(
                "the GPUs of this host are not known yet; `cgpu gpus --refresh` asks the driver"
                    .to_owned(),
            );
            Vec::new()
        }
        Err(error) => {
            gaps.push(error.to_string());
            Vec::new()
        }
    }
}

fn driver_version(host: &Host) -> Option<String> {
    cgpu_host::inventory::driver_version(&host.config.driver.proc_root)
}

/// The first line of a small file.
fn read_line(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()?.lines().next().map(str::to_owned)
}

/// Whose the processes are that the driver reports: each one's container, by short id. A process
/// belongs to the container whose first process's cgroup it is in.
fn owners(containers: &[ObservedContainer], driver: &DriverUsage) -> HashMap<i32, String> {
    let processes = driver.gpus.iter().flat_map(|gpu| &gpu.processes);
    let cgroups: Vec<(i32, String)> =
        processes.filter_map(|process| Some((process.pid, cgroups(process.pid)?))).collect();
    if cgroups.is_empty() {
        return HashMap::new();
    }
    let firsts: Vec<(&str, String)> = containers
        .iter()
        .filter_map(|container| {
            let first = container.record.holder.init()?;
            Some((container.record.short_id.as_str(), self::cgroups(first.pid)?))
        })
        .collect();
    let owner = |its: &str| firsts.iter().find(|(_, first)| is_within(its, first));
    cgroups.into_iter().filter_map(|(pid, its)| Some((pid, owner(&its)?.0.to_owned()))).collect()
}

fn cgroups(pid: i32) -> Option<String> {
    fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()
}

/// Whether a process with these `/proc/PID/cgroup` is in the cgroup, or below it, of a container
/// whose first process has those of `first`. A container has a cgroup of its own in some hierarchy:
/// what is in the root of all is in none.
fn is_within(its: &str, first: &str) -> bool {
    let split = |line: &str| -> Option<(String, String)> {
        let (hierarchy, path) = line.rsplit_once(':')?;
        Some((hierarchy.to_owned(), path.to_owned()))
    };
    let its: HashMap<String, String> = its.lines().filter_map(split).collect();
    let mut own = first.lines().filter_map(split).filter(|(_, path)| path != "/").peekable();
    own.peek().is_some()
        && own.all(|(hierarchy, path)| {
            its.get(&hierarchy).is_some_and(|its| {
                its.strip_prefix(&path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            })
        })
}

/// What the processes of these containers are called, by their numbers.
fn process_names(
    containers: &[ObservedContainer],
    owners: &HashMap<i32, String>,
) -> HashMap<i32, String> {
    let observed = containers.iter().filter_map(|container| container.observed.as_ref());
    let instances = observed.filter_map(|observed| observed.instances.as_ref()).flatten();
    let pids = instances.flat_map(|instance| &instance.processes).map(|(pid, _)| *pid);
    pids.chain(owners.keys().copied())
        .filter_map(|pid| Some((pid, read_line(&format!("/proc/{pid}/comm"))?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process is within the container whose cgroup it is in, or in a cgroup below that.
    #[test]
    fn process_belongs_to_the_container_of_its_cgroup() {
        let first = "0::/system.slice/docker-3f2a.scope\n";
        for (its, expected) in [
            ("0::/system.slice/docker-3f2a.scope\n", true),
            ("0::/system.slice/docker-3f2a.scope/child\n", true),
            ("0::/system.slice/docker-3f2ab.scope\n", false),
            ("0::/system.slice\n", false),
            ("0::/\n", false),
            ("", false),
        ] {
            assert_eq!(is_within(its, first), expected, "{its}");
        }
        // Of two hierarchies in all that the container has of its own.
        let first = "2:devices:/docker/3f2a\n1:name=systemd:/docker/3f2a\n0::/\n";
        assert!(is_within("2:devices:/docker/3f2a/x\n1:name=systemd:/docker/3f2a\n0::/\n", first));
        assert!(!is_within("2:devices:/docker/3f2a\n1:name=systemd:/other\n0::/\n", first));
        assert!(!is_within("0::/\n", "0::/\n"), "everybody is in the root");
    }
}
