//! A [`Snapshot`] as OpenMetrics' text: [`text`]. Pure.
//!
//! What isn't known has no series, and a container that is gone has none either: all series are
//! recreated from each snapshot. Labels of GPUs are dcgm-exporter's; a container's name that has three
//! parts is Kubernetes' namespace, pod and container.

use core::time::Duration;
use std::fmt;

use cgpu_cli::view::{ContainerView, GpuView, ShareView, Snapshot};
use cgpu_core::calls::{Calls, DURATIONS_US};
use cgpu_core::plan::PlannedMig;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

use crate::creations::Creates;
use crate::pods::PodGpu;

/// A label and its value.
type Label = (&'static str, String);

/// A metric of `T`.
struct Metric<T> {
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    kind: MetricType,
    value: fn(&T) -> Option<f64>,
}

/// What was found of a host.
#[derive(Debug)]
pub(crate) struct HostSample {
    pub(crate) snapshot: Snapshot,
    /// The node's name in the cluster, which kube-state-metrics' series have as `node`.
    pub(crate) node: Option<String>,
    /// The container creations that were counted.
    pub(crate) creates: Creates,
    /// What the kubelet gave to pods.
    pub(crate) given: Vec<PodGpu>,
}

/// What was found, as Prometheus reads it.
///
/// # Errors
///
/// If it can't be written as text.
pub(crate) fn text(found: HostSample) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(found));
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

impl Collector for HostSample {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let HostSample { snapshot, given, .. } = self;
        let host = Metric::<Snapshot> {
            name: "cgpu_unseen",
            help: "Parts of the host that could not be looked at",
            unit: None,
            kind: MetricType::Gauge,
            value: |snapshot| count(snapshot.gaps.len()),
        };
        family(&mut encoder, &host, [(self.host_labels(), snapshot)].iter())?;
        self.info(&mut encoder)?;
        self.counted_creates(&mut encoder)?;
        let gpus: Vec<_> = snapshot.gpus.iter().map(|gpu| (self.gpu_labels(gpu), gpu)).collect();
        for metric in gpu_metrics() {
            family(&mut encoder, &metric, gpus.iter())?;
        }
        let containers: Vec<_> = snapshot
            .containers
            .iter()
            .map(|container| ([own_labels(container), self.host_labels()].concat(), container))
            .collect();
        for metric in container_metrics() {
            family(&mut encoder, &metric, containers.iter())?;
        }
        states(&mut encoder, &containers)?;
        calls(&mut encoder, &containers)?;
        durations(&mut encoder, &containers)?;
        let parts: Vec<_> = snapshot
            .containers
            .iter()
            .flat_map(|container| {
                container.shares.iter().map(move |share| {
                    let gpu = snapshot.gpus.iter().find(|gpu| gpu.uuid == share.gpu.uuid);
                    let mut all =
                        gpu.map_or_else(|| self.host_labels(), |gpu| self.gpu_labels(gpu));
                    all.extend(own_labels(container));
                    // Of one GPU a container can have several.
                    all.extend(share.gpu.mig.iter().flat_map(mig_labels));
                    (all, share)
                })
            })
            .collect();
        for metric in part_metrics() {
            family(&mut encoder, &metric, parts.iter())?;
        }
        let given: Vec<_> = given.iter().map(|given| (self.given_labels(given), given)).collect();
        let metric = Metric::<PodGpu> {
            name: "cgpu_pod_gpu_devices",
            help: "Devices on the GPU that the kubelet gave to the pod: 1 where it has the whole GPU",
            unit: None,
            kind: GAUGE,
            value: |given| number(given.devices),
        };
        family(&mut encoder, &metric, given.iter())
    }
}

impl HostSample {
    /// The versions of the cgpu that polls, and of the driver.
    fn info(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let metric = Metric::<Snapshot> {
            name: "cgpu_versions",
            help: "1; its labels are the versions of cgpu and of NVIDIA's driver",
            unit: None,
            kind: MetricType::Gauge,
            value: |_| Some(1.0),
        };
        let mut labels = self.host_labels();
        labels.extend([
            ("cgpu", self.snapshot.cgpu_version.clone()),
            ("driver", self.snapshot.driver_version.clone().unwrap_or_default()),
        ]);
        family(encoder, &metric, [(labels, &self.snapshot)].iter())
    }

    /// How many containers got what they asked for, and how many didn't.
    fn counted_creates(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let counter = |name, help| Metric::<u64> {
            name,
            help,
            unit: None,
            kind: MetricType::Counter,
            value: |count| number(*count),
        };
        let host = self.host_labels();
        let admitted = counter("cgpu_creates_admitted", "Containers that got what they asked for");
        family(encoder, &admitted, [(host.clone(), &self.creates.admitted)].iter())?;
        let refused =
            counter("cgpu_creates_refused", "Containers that were not made, by what kept them");
        let by_cause = self.creates.refused.iter().map(|(cause, count)| {
            ([host.clone(), vec![("cause", cause.name().to_owned())]].concat(), count)
        });
        family(encoder, &refused, by_cause.collect::<Vec<_>>().iter())
    }

    /// The machine's name, and the node's that it is in a cluster: they may differ.
    fn host_labels(&self) -> Vec<Label> {
        let host = ("Hostname", written(&self.snapshot.hostname));
        let node = self.node.as_ref().map(|name| ("node", written(name)));
        [host].into_iter().chain(node).collect()
    }

    fn gpu_labels(&self, gpu: &GpuView) -> Vec<Label> {
        let mut labels = vec![
            ("gpu", gpu.index.to_string()),
            ("UUID", written(&gpu.uuid)),
            ("pci_bus_id", bus_id(&gpu.bus_id)),
            ("device", format!("nvidia{}", gpu.index)),
            ("modelName", written(&gpu.name)),
        ];
        labels.extend(self.host_labels());
        labels
    }

    /// The labels of the GPU, and of the pod that has it. Of a MIG device, or a GPU that this host no longer has,
    /// only the UUID is known.
    fn given_labels(&self, given: &PodGpu) -> Vec<Label> {
        let gpu = self.snapshot.gpus.iter().find(|gpu| gpu.uuid == given.uuid);
        let alone = || [vec![("UUID", written(&given.uuid))], self.host_labels()].concat();
        let mut labels = gpu.map_or_else(alone, |gpu| self.gpu_labels(gpu));
        let pod = [
            ("namespace", &given.namespace),
            ("pod", &given.pod),
            ("container", &given.container),
            ("resource", &given.resource),
        ];
        labels.extend(pod.map(|(name, value)| (name, written(value))));
        labels
    }
}

/// One metric of all that have it; no word of it if none has.
fn family<'a, T: 'a>(
    encoder: &mut DescriptorEncoder<'_>,
    metric: &Metric<T>,
    all: impl Iterator<Item = &'a (Vec<Label>, &'a T)>,
) -> fmt::Result {
    let known = all.filter_map(|(labels, of)| Some((labels, (metric.value)(of)?)));
    // What is no number is not known.
    let known: Vec<_> = known.filter(|(_, value)| value.is_finite()).collect();
    if known.is_empty() {
        return Ok(());
    }
    let unit = metric.unit.as_ref();
    let mut family = encoder.encode_descriptor(metric.name, metric.help, unit, metric.kind)?;
    for (labels, value) in known {
        let series = family.encode_family(labels)?;
        match metric.kind {
            MetricType::Counter => ConstCounter::new(value).encode(series)?,
            _ => ConstGauge::new(value).encode(series)?,
        }
    }
    Ok(())
}

/// Whether containers' quotas are enforced, by which backend, and the containers' states.
fn states(
    encoder: &mut DescriptorEncoder<'_>,
    containers: &[(Vec<Label>, &ContainerView)],
) -> fmt::Result {
    let labelled = |name: &'static str, value: fn(&ContainerView) -> String| {
        let all = containers.iter().map(|(labels, container)| {
            let own = (name, value(container));
            (labels.iter().cloned().chain([own]).collect::<Vec<_>>(), *container)
        });
        all.collect::<Vec<_>>()
    };
    let enforced = Metric::<ContainerView> {
        name: "cgpu_container_enforced",
        help: "1 while somebody who answers holds the container to its quota",
        unit: None,
        kind: GAUGE,
        value: |container| flag(container.enforced),
    };
    let by_backend = labelled("backend", |container| container.backend.to_string());
    family(encoder, &enforced, by_backend.iter())?;
    let state = Metric::<ContainerView> {
        name: "cgpu_container_state",
        help: "1; its labels are how the container has its GPUs, and how it stands",
        unit: None,
        kind: GAUGE,
        value: |_| Some(1.0),
    };
    let mut by_state = labelled("state", |container| container.state.name().to_owned());
    for (labels, container) in &mut by_state {
        labels.push(("mode", container.mode.name().to_owned()));
    }
    family(encoder, &state, by_state.iter())
}

/// The driver calls of containers, by what became of them.
fn calls(
    encoder: &mut DescriptorEncoder<'_>,
    containers: &[(Vec<Label>, &ContainerView)],
) -> fmt::Result {
    type Count = fn(&Calls) -> u64;
    let verdicts: [(&str, Count); 4] = [
        ("continued", |calls| calls.continued),
        ("executed", |calls| calls.executed),
        ("over_quota", |calls| calls.over_quota),
        ("refused", |calls| calls.refused),
    ];
    let counted =
        containers.iter().filter_map(|(labels, container)| Some((labels, container.calls?)));
    let counted: Vec<_> = counted.collect();
    if counted.is_empty() {
        return Ok(());
    }
    let mut family = encoder.encode_descriptor(
        "cgpu_container_driver_calls",
        "Driver calls that came to the container's monitor, by what became of them",
        None,
        MetricType::Counter,
    )?;
    for (labels, calls) in counted {
        for (verdict, count) in verdicts {
            let mut labels = labels.clone();
            labels.push(("verdict", verdict.to_owned()));
            ConstCounter::new(count(&calls)).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

/// How long the driver calls of containers took.
fn durations(
    encoder: &mut DescriptorEncoder<'_>,
    containers: &[(Vec<Label>, &ContainerView)],
) -> fmt::Result {
    // The counts are the monitor's word. If their sum is no number, as no count can be, they say nothing.
    let timed = containers.iter().filter_map(|(labels, of)| {
        let durations = of.durations?;
        let count =
            durations.counts.iter().try_fold(0, |sum: u64, count| sum.checked_add(*count))?;
        Some((labels, durations, count))
    });
    let timed: Vec<_> = timed.collect();
    if timed.is_empty() {
        return Ok(());
    }
    let mut family = encoder.encode_descriptor(
        "cgpu_container_driver_call_duration",
        "Time from a driver call to the monitor's reply, the driver's part included",
        Some(&Unit::Seconds),
        MetricType::Histogram,
    )?;
    for (labels, durations, count) in timed {
        let bounds = DURATIONS_US.iter().map(|us| seconds(Duration::from_micros(*us)));
        let buckets: Vec<_> = bounds.chain([f64::INFINITY]).zip(durations.counts).collect();
        let sum = seconds(Duration::from_nanos(durations.sum_ns));
        let mut series = family.encode_family(labels)?;
        series.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
    }
    Ok(())
}

/// What names a container, wherever it is.
fn own_labels(container: &ContainerView) -> Vec<Label> {
    let name = container.name.as_deref().unwrap_or(&container.short_id);
    let parts: Vec<&str> = name.split('/').collect();
    let (namespace, pod, name) = match parts.as_slice() {
        [namespace, pod, container] => (*namespace, *pod, *container),
        _ => ("", "", name),
    };
    vec![
        ("namespace", written(namespace)),
        ("pod", written(pod)),
        ("container", written(name)),
        ("container_id", written(&container.short_id)),
    ]
}

/// Which part of a GPU it is: NVML's index, and the GPU instance as dcgm-exporter has it.
fn mig_labels(mig: &PlannedMig) -> Vec<Label> {
    let instance = mig.instances.map(|(gpu, _)| ("GPU_I_ID", gpu.to_string()));
    [("mig", mig.index.to_string())].into_iter().chain(instance).collect()
}

/// A PCI address as NVML writes it, and so dcgm-exporter: a domain of eight digits, capitals.
fn bus_id(kernels: &str) -> String {
    match kernels.split_once(':') {
        Some((domain, rest)) => written(&format!("{domain:0>8}:{rest}").to_uppercase()),
        None => String::new(),
    }
}

/// The most characters of a label's value: Prometheus retains each for weeks.
const MOST_SIGNS: usize = 256;

/// A label's value: names are chosen by a container's creator. What the format needs escaped is the
/// encoder's business.
fn written(text: &str) -> String {
    text.chars().take(MOST_SIGNS).map(|sign| if sign.is_control() { '_' } else { sign }).collect()
}

fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}

/// Numbers of MiB and calls are exact in 53 bits.
#[allow(clippy::cast_precision_loss, reason = "no host has 2⁵³ bytes of GPU memory")]
fn number(number: u64) -> Option<f64> {
    Some(number as f64)
}

fn count(count: usize) -> Option<f64> {
    number(u64::try_from(count).ok()?)
}

fn ratio(percent: u32) -> f64 {
    f64::from(percent) / 100.0
}

fn flag(is_so: bool) -> Option<f64> {
    Some(f64::from(u8::from(is_so)))
}

const GAUGE: MetricType = MetricType::Gauge;

macro_rules! metrics {
    ($($name:literal $help:literal, $kind:expr, $unit:expr, $value:expr;)*) => {
        vec![$(Metric { name: $name, help: $help, unit: $unit, kind: $kind, value: $value }),*]
    };
}

fn gpu_metrics() -> Vec<Metric<GpuView>> {
    metrics! {
        "cgpu_gpu_memory_total" "Memory of the GPU", GAUGE, Some(Unit::Bytes),
            |gpu| number(gpu.memory_total_bytes);
        "cgpu_gpu_memory_promised" "Sum of the quotas on the GPU", GAUGE, Some(Unit::Bytes),
            |gpu| number(gpu.memory_promised_bytes);
        "cgpu_gpu_memory_used" "Memory of the GPU in use", GAUGE, Some(Unit::Bytes),
            |gpu| number(gpu.memory_used_bytes?);
        "cgpu_gpu_utilization" "Time in which something ran on the GPU", GAUGE, Some(Unit::Other("ratio".to_owned())),
            |gpu| Some(ratio(gpu.utilization_percent?));
        "cgpu_gpu_temperature" "Temperature of the GPU", GAUGE, Some(Unit::Celsius),
            |gpu| Some(f64::from(gpu.temperature_celsius?));
        "cgpu_gpu_power_watts" "Power that the GPU takes", GAUGE, None, |gpu| gpu.power_watts;
        "cgpu_gpu_power_limit_watts" "The most power that the GPU may take", GAUGE, None,
            |gpu| gpu.power_limit_watts;
        "cgpu_gpu_shared_containers" "Containers with a quota on the GPU", GAUGE, None,
            |gpu| Some(f64::from(gpu.shared_containers));
        "cgpu_gpu_other_containers" "Containers without a quota on the GPU", GAUGE, None,
            |gpu| Some(f64::from(gpu.other_containers));
        "cgpu_gpu_max_containers" "The most containers with a quota", GAUGE, None,
            |gpu| Some(f64::from(gpu.max_inst?));
        "cgpu_gpu_free_weight" "Compute weight that no container has", GAUGE, None,
            |gpu| Some(f64::from(gpu.free_weight?));
        "cgpu_gpu_policy" "How computing time is shared, 0 to 5; 5 is the driver's own", GAUGE, None,
            |gpu| Some(f64::from(gpu.policy?));
        "cgpu_gpu_lost" "1 where the driver has lost the GPU", GAUGE, None, |gpu| flag(gpu.lost);
    }
}

fn container_metrics() -> Vec<Metric<ContainerView>> {
    metrics! {
        "cgpu_container_age" "Time since the container's first process began", GAUGE,
            Some(Unit::Seconds), |container| number(container.age_s?);
        "cgpu_container_processes" "Processes of the container that use the driver", GAUGE, None,
            |container| count(container.process_count?);
        "cgpu_container_weight" "Compute weight that was asked for", GAUGE, None,
            |container| Some(f64::from(container.weight));
        "cgpu_container_high_priority" "1 where high priority was asked for", GAUGE, None,
            |container| flag(container.high_priority);
        "cgpu_container_allocations_refused" "Allocations refused for the container's quota",
            MetricType::Counter, None, |container| number(container.calls?.over_quota);
        "cgpu_container_monitor_updates" "Times that the container's monitor was updated",
            MetricType::Counter, None, |container| number(container.monitor_updates?);
        "cgpu_container_processes_killed" "Processes killed for memory taken past the monitor",
            MetricType::Counter, None, |container| number(container.calls?.killed);
    }
}

fn part_metrics() -> Vec<Metric<ShareView>> {
    metrics! {
        "cgpu_container_memory_quota" "The most memory that the container may use on the GPU", GAUGE,
            Some(Unit::Bytes), |share| number(share.gpu.memory_limit_bytes?);
        "cgpu_container_memory_used" "Memory that the container uses on the GPU", GAUGE,
            Some(Unit::Bytes), |share| number(share.memory_used_bytes?);
        "cgpu_container_utilization" "Time in which something of the container ran on the GPU",
            GAUGE, Some(Unit::Other("ratio".to_owned())), |share| Some(ratio(share.utilization_percent?));
        "cgpu_container_compute_share" "Part of the GPU's computing time that is the container's while all have work",
            GAUGE, Some(Unit::Other("ratio".to_owned())), |share| share.compute_share;
        "cgpu_container_compute_held" "Part of the GPU's computing time that the container had lately",
            GAUGE, Some(Unit::Other("ratio".to_owned())), |share| share.compute_held;
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use cgpu_cli::view::{Mode, State};
    use cgpu_core::calls::Durations;
    use cgpu_core::plan::{Caveats, Kind, PlannedGpu};
    use cgpu_core::units::MIB;
    use cgpu_host::events::Cause;

    use super::*;

    pub(crate) fn snapshot() -> Snapshot {
        let gpu = GpuView {
            index: 0,
            uuid: "GPU-a".into(),
            bus_id: "0000:af:00.0".into(),
            name: "Tesla V100".into(),
            lost: false,
            memory_total_bytes: 16_000 * MIB,
            memory_reserved_bytes: 0,
            memory_promised_bytes: 2_000 * MIB,
            memory_used_bytes: Some(300 * MIB),
            utilization_percent: Some(42),
            temperature_celsius: None,
            power_watts: Some(211.5),
            power_limit_watts: None,
            policy: Some(5),
            max_inst: Some(20),
            prio_ratio: Some(80),
            shared_containers: 1,
            other_containers: 0,
            free_weight: Some(19),
        };
        let share = ShareView {
            gpu: PlannedGpu {
                index: 0,
                uuid: "GPU-a".into(),
                minor: 0,
                memory_total_bytes: 16_000 * MIB,
                memory_reserved_bytes: 0,
                memory_limit_bytes: Some(2_000 * MIB),
                mig: None,
            },
            memory_used_bytes: Some(300 * MIB),
            memory_enforced_bytes: Some(2_000 * MIB),
            utilization_percent: None,
            compute_share: Some(0.25),
            compute_held: Some(0.5),
        };
        let container = ContainerView {
            id: "3f2a".into(),
            short_id: "3f2a________".into(),
            name: Some("default/web-0/main".into()),
            root: "/run/runc".into(),
            backend: Kind::Gate,
            mode: Mode::Shared,
            state: State::Active,
            enforced: true,
            pid: Some(7),
            age_s: Some(65),
            weight: 1,
            high_priority: false,
            shares: vec![share],
            processes: Vec::new(),
            process_count: Some(2),
            calls: Some(Calls { executed: 12, over_quota: 3, ..Calls::default() }),
            durations: Some(Durations {
                counts: [0, 9, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2],
                sum_ns: 2_500_000_000,
            }),
            monitor_updates: Some(2),
            leaked_to: Vec::new(),
            caveats: Caveats::default(),
        };
        Snapshot {
            cgpu_version: "0.1.0".into(),
            hostname: "node".into(),
            driver_version: Some("580.95.05".into()),
            gpus: vec![gpu],
            containers: vec![container],
            gaps: vec!["a record".into()],
        }
    }

    const CONTAINER: &str = "namespace=\"default\",pod=\"web-0\",container=\"main\",\
                             container_id=\"3f2a________\"";

    fn written_text(snapshot: Snapshot) -> String {
        let refused = BTreeMap::from([(Cause::Memory, 2), (Cause::Request, 1)]);
        let creates = Creates { admitted: 5, refused };
        text(HostSample { snapshot, node: None, creates, given: Vec::new() }).unwrap()
    }

    #[test]
    fn figures_have_their_labels_and_base_units() {
        let text = written_text(snapshot());
        let gpu = "gpu=\"0\",UUID=\"GPU-a\",pci_bus_id=\"00000000:AF:00.0\",device=\"nvidia0\",\
                   modelName=\"Tesla V100\",Hostname=\"node\"";
        for line in [
            format!("cgpu_gpu_memory_total_bytes{{{gpu}}} 16777216000.0"),
            format!("cgpu_gpu_utilization_ratio{{{gpu}}} 0.42"),
            format!("cgpu_gpu_power_watts{{{gpu}}} 211.5"),
            format!("cgpu_container_memory_used_bytes{{{gpu},{CONTAINER}}} 314572800.0"),
            format!("cgpu_container_memory_quota_bytes{{{gpu},{CONTAINER}}} 2097152000.0"),
            format!("cgpu_container_compute_share_ratio{{{gpu},{CONTAINER}}} 0.25"),
            format!("cgpu_container_compute_held_ratio{{{gpu},{CONTAINER}}} 0.5"),
            format!("cgpu_container_age_seconds{{{CONTAINER},Hostname=\"node\"}} 65.0"),
            format!(
                "cgpu_container_allocations_refused_total{{{CONTAINER},Hostname=\"node\"}} 3.0"
            ),
            format!(
                "cgpu_container_enforced{{{CONTAINER},Hostname=\"node\",backend=\"gate\"}} 1.0"
            ),
            format!(
                "cgpu_container_driver_calls_total{{{CONTAINER},Hostname=\"node\",\
                 verdict=\"executed\"}} 12"
            ),
            "cgpu_unseen{Hostname=\"node\"} 1.0".to_owned(),
            "cgpu_creates_admitted_total{Hostname=\"node\"} 5.0".to_owned(),
            "cgpu_creates_refused_total{Hostname=\"node\",cause=\"memory\"} 2.0".to_owned(),
            "cgpu_creates_refused_total{Hostname=\"node\",cause=\"request\"} 1.0".to_owned(),
            format!("cgpu_container_monitor_updates_total{{{CONTAINER},Hostname=\"node\"}} 2.0"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn unknown_values_and_gone_containers_have_no_series() {
        let mut host = snapshot();
        let known = written_text(host.clone());
        for name in ["temperature", "power_limit", "container_utilization"] {
            assert!(!known.contains(name), "{name}");
        }
        host.containers[0].enforced = false;
        host.containers[0].calls = None;
        host.containers[0].shares[0].memory_used_bytes = None;
        let silent = written_text(host.clone());
        assert!(silent.contains("backend=\"gate\"} 0.0"));
        assert!(!silent.contains("cgpu_container_memory_used") && !silent.contains("driver_calls"));
        host.containers.clear();
        assert!(!written_text(host).contains("cgpu_container"));
    }

    #[test]
    fn a_name_breaks_no_line_and_no_label() {
        let mut host = snapshot();
        host.containers[0].name = Some("a\"} 1\nevil{x=\"\\\u{1b}[2J".into());
        let text = written_text(host);
        assert!(text.contains(r#"container="a\"} 1_evil{x=\"\\_[2J""#), "{text}");
        assert!(!text.lines().any(|line| line.starts_with("evil")));
    }

    #[test]
    fn durations_are_a_histogram_whose_buckets_add_up() {
        let text = written_text(snapshot());
        let labels = format!("{CONTAINER},Hostname=\"node\"");
        let name = "cgpu_container_driver_call_duration_seconds";
        for (bound, count) in
            [("0.000005", 0), ("0.00001", 9), ("0.00002", 12), ("1.0", 12), ("+Inf", 14)]
        {
            let line = format!("{name}_bucket{{le=\"{bound}\",{labels}}} {count}");
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        for line in [format!("{name}_sum{{{labels}}} 2.5"), format!("{name}_count{{{labels}}} 14")]
        {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }

    /// A part of a GPU is distinguished from the others by its labels, and long names are cut.
    #[test]
    fn mig_instances_are_distinguished_and_long_names_cut() {
        let mut host = snapshot();
        host.containers[0].shares[0].gpu.mig =
            Some(PlannedMig { index: 1, uuid: "MIG-b".into(), instances: Some((7, 0)) });
        host.containers[0].name = Some("x".repeat(5000));
        let text = written_text(host);
        assert!(text.contains("mig=\"1\",GPU_I_ID=\"7\""), "{text}");
        assert!(text.contains(&format!("container=\"{}\"", "x".repeat(MOST_SIGNS))));
    }

    #[test]
    fn every_series_names_the_node_once() {
        let given = vec![PodGpu {
            namespace: "team".into(),
            pod: "train-0".into(),
            container: "main".into(),
            resource: "nvidia.com/gpu".into(),
            uuid: "GPU-gone".into(),
            devices: 1,
        }];
        let mut host = snapshot();
        // A share of a GPU that this host no longer has.
        let shares = &mut host.containers[0].shares;
        shares.push(shares[0].clone());
        shares[1].gpu.uuid = "GPU-gone".into();
        let (node, creates) = (Some("node-1".to_owned()), Creates::default());
        let text = text(HostSample { snapshot: host, node, creates, given }).unwrap();
        let series: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert!(series.len() > 40, "{text}");
        for line in series {
            for label in ["Hostname=\"node\"", "node=\"node-1\""] {
                assert_eq!(line.matches(label).count(), 1, "{label} in {line}");
            }
        }
    }

    #[test]
    fn figures_that_no_count_can_reach_break_nothing() {
        let mut host = snapshot();
        let container = &mut host.containers[0];
        container.durations = Some(Durations { counts: [u64::MAX; 13], sum_ns: u64::MAX });
        container.calls = Some(Calls {
            continued: u64::MAX,
            executed: u64::MAX,
            over_quota: u64::MAX,
            refused: u64::MAX,
            killed: u64::MAX,
        });
        container.monitor_updates = None;
        container.shares[0].compute_held = Some(f64::NAN);
        container.shares[0].compute_share = Some(f64::INFINITY);
        host.gpus[0].memory_promised_bytes = u64::MAX;
        let odd = written_text(host);
        for absent in ["call_duration", "compute_held", "compute_share", "monitor_updates", "NaN"] {
            assert!(!odd.contains(absent), "{absent}\n{odd}");
        }
        assert!(odd.contains("verdict=\"executed\"} 18446744073709551615\n"), "{odd}");
        assert!(odd.contains("cgpu_container_weight") && odd.ends_with("# EOF\n"), "{odd}");
    }

    /// A pod that the kubelet gave a GPU is named with the GPU's labels.
    #[test]
    fn pod_given_a_gpu_carries_the_gpus_labels() {
        let given = |uuid: &str| PodGpu {
            namespace: "team".into(),
            pod: "train-0".into(),
            container: "main".into(),
            resource: "nvidia.com/gpu".into(),
            uuid: uuid.into(),
            devices: 1,
        };
        let given = vec![given("GPU-a"), given("MIG-\"c")];
        let creates = Creates::default();
        let text = text(HostSample { snapshot: snapshot(), node: None, creates, given }).unwrap();
        let pod =
            r#"namespace="team",pod="train-0",container="main",resource="nvidia.com/gpu"} 1.0"#;
        for labels in [
            "gpu=\"0\",UUID=\"GPU-a\",pci_bus_id=\"00000000:AF:00.0\",device=\"nvidia0\",\
             modelName=\"Tesla V100\",Hostname=\"node\"",
            r#"UUID="MIG-\"c",Hostname="node""#,
        ] {
            let line = format!("cgpu_pod_gpu_devices{{{labels},{pod}");
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        assert!(!written_text(snapshot()).contains("cgpu_pod"));
    }
}
