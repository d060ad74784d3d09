//! What the pods of this node ask for, and what they have: which of them the kubelet asks for, and what
//! is written on them. Pure.
//!
//! The kubelet doesn't say whose devices it asks for. What a container has is known from the kubelet
//! itself (its pod-resources API); of the containers that have nothing yet, those that ask for as
//! many units are meant. Pods that ask for the same on as many GPUs are the same to us.

use std::collections::{BTreeMap, BTreeSet};

use cgpu_core::request::grant::{self, Grant};
use cgpu_kubelet::api::ListPodResourcesResponse;
use k8s_openapi::api::core::v1::Pod;

use crate::annotations::{ByContainer, ByGpu, Words, shares, sum};
use crate::node::Given;
use crate::placement::parts;
use crate::pod_request::{AskRules, ContainerAsk, GPU_COUNT, PodAsk};
use crate::units::{SharedGpu, Unit};

/// A container of this node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodContainer {
    pub namespace: String,
    pub pod: String,
    /// Its name in the pod.
    pub container: String,
}

/// The ids of the units that containers have.
pub type Holdings = BTreeMap<PodContainer, BTreeSet<String>>;

/// What a container asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceRequest {
    /// The container that asks.
    pub of: PodContainer,
    /// The UID of its pod.
    pub uid: String,
    /// Units of memory in all.
    pub units: u32,
    /// On how many GPUs, or why that can't be.
    pub gpus: Result<u32, String>,
    /// Why its pod can have nothing, whatever it asks for.
    pub refused: Option<String>,
    /// Percent of compute in all; 0 if it doesn't ask for any.
    pub percent: u32,
    /// How many units all containers of the pod ask for together.
    pub pod_units: u32,
    /// Whether it is one that runs before the others, and of which the kubelet doesn't report what it has.
    pub is_init: bool,
    /// The units of each GPU that a scheduler has decided on; empty if none has.
    pub decided: ByGpu,
}

impl DeviceRequest {
    /// The container by all its names.
    #[must_use]
    pub fn container(&self) -> grant::PodContainer {
        let PodContainer { namespace, pod, container } = self.of.clone();
        grant::PodContainer { namespace, pod, uid: self.uid.clone(), container }
    }

    /// Whether it is for the memory of so many GPUs.
    #[must_use]
    pub fn is_on(&self, gpus: usize) -> bool {
        self.gpus.as_ref().is_ok_and(|count| *count as usize == gpus)
    }
}

/// What the containers of these pods ask for of `resource`, those of the pod first that was made first: the creator
/// of a pod can write when a scheduler decided, and not when it was made. The kubelet asks before a pod runs: one
/// that runs, has ended, or is to end asks for nothing.
#[must_use]
pub fn device_requests(
    pods: &[Pod],
    resource: &str,
    rules: &AskRules,
    unit: Unit,
) -> Vec<DeviceRequest> {
    let made =
        |pod: &Pod| pod.metadata.creation_timestamp.as_ref().map(|time| time.0.as_nanosecond());
    let mut waiting: Vec<&Pod> = pods.iter().filter(|pod| is_waiting(pod)).collect();
    waiting.sort_by_key(|pod| (made(pod), &pod.metadata.name));
    waiting.into_iter().flat_map(|pod| of_pod(pod, resource, rules, unit)).collect()
}

fn is_waiting(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    pod.metadata.deletion_timestamp.is_none() && matches!(phase, None | Some("Pending"))
}

/// What the containers of a pod ask for of `resource`.
#[must_use]
pub fn of_pod(pod: &Pod, resource: &str, rules: &AskRules, unit: Unit) -> Vec<DeviceRequest> {
    let refused = rules.refused(pod);
    let ask = PodAsk::of(pod, resource);
    let none = Words::new();
    let annotations = pod.metadata.annotations.as_ref().unwrap_or(&none);
    let decided = shares(annotations, &ask).unwrap_or_default();
    // The kubelet gives an init container's units to the others afterwards: they are of the same GPUs.
    let of_all = sum(&decided);
    let of_init = |units: u32| -> ByGpu {
        let count = u32::try_from(of_all.len()).unwrap_or(u32::MAX).max(1);
        of_all.keys().map(|index| (*index, units / count)).collect()
    };
    let device_request = |container: &ContainerAsk| {
        let units = container.units;
        let of = PodContainer {
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            pod: pod.metadata.name.clone().unwrap_or_default(),
            container: container.name.clone(),
        };
        let gpus = refused.clone().map_or_else(|| ask.gpus.clone(), Err);
        let gpus = gpus.and_then(|gpus| match units.is_multiple_of(gpus) {
            true => Ok(gpus),
            false => Err(indivisible(units, gpus, unit)),
        });
        DeviceRequest {
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            refused: refused.clone(),
            gpus,
            units,
            percent: container.percent,
            pod_units: ask.units(),
            is_init: container.is_init,
            decided: match container.is_init {
                true => of_init(units),
                false => decided.get(&of.container).cloned().unwrap_or_default(),
            },
            of,
        }
    };
    ask.containers.iter().map(device_request).collect()
}

/// Why so many units can't be on so many GPUs.
#[must_use]
pub fn indivisible(units: u32, gpus: u32, unit: Unit) -> String {
    format!(
        "{units} {unit} can't be given as whole units of {gpus} GPUs ({GPU_COUNT}); ask for a multiple of {gpus}"
    )
}

/// The units that each container has of `resource`.
#[must_use]
pub fn holdings(reported: &ListPodResourcesResponse, resource: &str) -> Holdings {
    let mut held = Holdings::new();
    for pod in &reported.pod_resources {
        for container in &pod.containers {
            let of_it = container.devices.iter().filter(|some| some.resource_name == resource);
            let ids: BTreeSet<String> = of_it.flat_map(|some| some.device_ids.clone()).collect();
            if !ids.is_empty() {
                let of = PodContainer {
                    namespace: pod.namespace.clone(),
                    pod: pod.name.clone(),
                    container: container.name.clone(),
                };
                held.insert(of, ids);
            }
        }
    }
    held
}

/// What can be meant by a request for so many units: the containers that ask for them and have none, those of the
/// oldest pod first. A container that was `answered` already comes after all others: of an init container the kubelet
/// doesn't report what it has.
#[must_use]
pub fn candidates<'a>(
    device_requests: &'a [DeviceRequest],
    held: &Holdings,
    answered: &Answered,
    units: usize,
) -> Vec<&'a DeviceRequest> {
    // A pod's init containers get theirs before the others.
    let has_begun = |device_request: &DeviceRequest| {
        let of_pod = |of: &PodContainer| {
            (&of.namespace, &of.pod) == (&device_request.of.namespace, &device_request.of.pod)
        };
        device_request.is_init && held.keys().any(of_pod)
    };
    let is_meant = |device_request: &&DeviceRequest| {
        device_request.units as usize == units
            && !held.contains_key(&device_request.of)
            && !has_begun(device_request)
    };
    let mut meant: Vec<&DeviceRequest> = device_requests.iter().filter(is_meant).collect();
    meant.sort_by_key(|device_request| {
        answered.0.contains(&(device_request.uid.clone(), device_request.of.container.clone()))
    });
    meant
}

/// The containers that were given something of a resource, as far as records say: by the UID of the pod and by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answered(BTreeSet<(String, String)>);

impl Answered {
    /// By these records: their holders, and of those without a holder yet the likeliest container.
    #[must_use]
    pub fn of(grants: &[Grant], resource: &str) -> Self {
        let of_it = grants.iter().filter(|grant| grant.resource == resource);
        let likeliest =
            of_it.filter_map(|grant| grant.holder.as_ref().or(grant.candidates.first()));
        Answered(likeliest.map(|of| (of.uid.clone(), of.container.clone())).collect())
    }
}

/// Units of each GPU that a scheduler decided on for containers that have none yet, but for `device_request`.
#[must_use]
pub fn reserved(device_requests: &[DeviceRequest], held: &Holdings, but: &DeviceRequest) -> ByGpu {
    let mut reserved = ByGpu::new();
    let is_other = |device_request: &&DeviceRequest| {
        device_request.of != but.of
            && !device_request.is_init
            && !held.contains_key(&device_request.of)
    };
    for (index, units) in
        device_requests.iter().filter(is_other).flat_map(|device_request| &device_request.decided)
    {
        *reserved.entry(*index).or_default() += units;
    }
    reserved
}

/// Why a container that has just these units must not start with them, if it must not: they are of `gpus`
/// GPUs, and its pod asks for another number.
#[must_use]
pub fn mistaken(
    device_requests: &[DeviceRequest],
    held: &Holdings,
    ids: &[String],
    gpus: usize,
) -> Option<String> {
    let ids: BTreeSet<String> = ids.iter().cloned().collect();
    let (of, _) = held.iter().find(|(_, held)| **held == ids)?;
    let device_request = device_requests
        .iter()
        .find(|device_request| device_request.of == *of && !device_request.is_on(gpus))?;
    let count = device_request.gpus.as_ref().ok()?;
    Some(format!(
        "{}/{} asks for its memory on {count} GPUs and got it on {gpus}: another pod asked for as much at \
         the same moment; delete the pod, and it is given anew",
        of.namespace, of.pod
    ))
}

/// The pod of that name.
#[must_use]
pub fn named<'a>(pods: &'a [Pod], namespace: &str, name: &str) -> Option<&'a Pod> {
    pods.iter().find(|pod| {
        pod.metadata.namespace.as_deref() == Some(namespace)
            && pod.metadata.name.as_deref() == Some(name)
    })
}

/// The pods that hold something of a GPU that isn't among `gpus`, with the container and the first such device.
#[must_use]
pub fn lost<'a>(
    reported: &ListPodResourcesResponse,
    gpus: &[SharedGpu],
    rules: &AskRules,
    pods: &'a [Pod],
) -> Vec<(&'a Pod, String, String)> {
    let memory = holdings(reported, &rules.memory).into_iter();
    let memory = memory.filter_map(|(of, ids)| Some((of, parts(gpus, &ids).err()?)));
    let whole = holdings(reported, &rules.whole).into_iter();
    let is_gone = |uuid: &String| gpus.iter().all(|gpu| gpu.uuid != *uuid);
    let whole = whole.filter_map(|(of, ids)| Some((of, ids.into_iter().find(is_gone)?)));
    let pod = |(of, device): (PodContainer, String)| {
        Some((named(pods, &of.namespace, &of.pod)?, of.container, device))
    };
    memory.chain(whole).filter_map(pod).collect()
}

/// What the pods have that have units, by namespace and pod.
#[must_use]
pub fn given(held: &Holdings, gpus: &[SharedGpu]) -> BTreeMap<(String, String), Given> {
    let mut pods: BTreeMap<(String, String), ByContainer> = BTreeMap::new();
    for (of, ids) in held {
        // Units of a GPU that is gone say nothing of another.
        let Ok(parts) = parts(gpus, ids) else { continue };
        let shares = parts.into_iter().map(|(gpu, units)| (gpu.index, units)).collect();
        let pod = pods.entry((of.namespace.clone(), of.pod.clone())).or_default();
        pod.insert(of.container.clone(), shares);
    }
    let given = pods.into_iter().map(|(pod, containers)| {
        let indices = sum(&containers);
        let first = gpus.iter().find(|gpu| indices.contains_key(&gpu.index));
        (pod, Given { units: first.map_or(0, |gpu| gpu.whole_units), containers })
    });
    given.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::shared;
    use crate::units::tests::gpu;
    use serde_json::{Value, json};

    fn pod(name: &str, second: u32, labels: &Value, asked: &[&str]) -> Pod {
        let container = |(at, asked): (usize, &&str)| json!({"name": format!("c{at}"), "resources": {"limits": {"aliyun.com/gpu-mem": asked}}});
        let containers: Vec<Value> = asked.iter().enumerate().map(container).collect();
        serde_json::from_value(json!({
            "metadata": {
                "name": name, "namespace": "default", "labels": labels,
                "creationTimestamp": format!("2026-11-25T12:00:{second:02}Z"),
            },
            "spec": {"containers": containers},
        }))
        .unwrap()
    }

    fn asked(pods: &[Pod]) -> Vec<DeviceRequest> {
        device_requests(pods, "aliyun.com/gpu-mem", &AskRules::default(), Unit::GiB)
    }

    fn named(pod: &str, container: &str) -> PodContainer {
        PodContainer { namespace: "default".into(), pod: pod.into(), container: container.into() }
    }

    /// Each container asks for its own units, on as many GPUs as its pod says.
    #[test]
    fn each_container_uses_its_pods_gpu_count() {
        let four = json!({"aliyun.com/gpu-count": "4"});
        let mut old = pod("old", 1, &four, &["8", "4"]);
        let device_requests = asked(&[pod("new", 2, &json!({}), &["6"]), old.clone()]);
        let reported: Vec<_> = device_requests
            .iter()
            .map(|device_request| {
                (
                    &*device_request.of.pod,
                    &*device_request.of.container,
                    device_request.units,
                    device_request.gpus.clone(),
                )
            })
            .collect();
        assert_eq!(
            reported,
            [("old", "c0", 8, Ok(4)), ("old", "c1", 4, Ok(4)), ("new", "c0", 6, Ok(1))]
        );
        assert_eq!(device_requests[0].pod_units, 12);
        // As an annotation, if no label says it.
        old.metadata.annotations = old.metadata.labels.take();
        assert_eq!(asked(&[old.clone()])[0].gpus, Ok(4));
        old.metadata.deletion_timestamp = old.metadata.creation_timestamp.clone();
        assert!(asked(&[old]).is_empty());
    }

    /// Units or a number of GPUs that no GPUs can give are refused in words.
    #[test]
    fn impossible_gpu_counts_are_refused_with_reason() {
        let reported = |count: &str, units| {
            let pods = [pod("p", 1, &json!({"aliyun.com/gpu-count": count}), &[units])];
            asked(&pods)[0].gpus.clone().unwrap_err()
        };
        let error = reported("4", "7");
        assert!(error.contains("7 GiB") && error.contains("ask for a multiple of 4"), "{error}");
        for count in ["0", "-1", "four", ""] {
            let error = reported(count, "8");
            assert!(error.contains(&format!("is {count:?}")), "{error}");
        }
    }

    #[test]
    fn containers_with_units_are_not_candidates_again() {
        let device_requests = asked(&[
            pod("a", 1, &json!({}), &["6", "6"]),
            pod("b", 2, &json!({"aliyun.com/gpu-count": "2"}), &["6"]),
        ]);
        let held = BTreeMap::from([(named("a", "c0"), BTreeSet::from(["aaa-0".to_owned()]))]);
        let meant: Vec<_> = candidates(&device_requests, &held, &Answered::default(), 6)
            .into_iter()
            .map(|w| &w.of)
            .collect();
        assert_eq!(meant, [&named("a", "c1"), &named("b", "c0")]);
        assert!(candidates(&device_requests, &held, &Answered::default(), 5).is_empty());
    }

    /// A container that got the units that were chosen for another does not start.
    #[test]
    fn container_with_anothers_units_does_not_start() {
        let two = json!({"aliyun.com/gpu-count": "2"});
        let device_requests = asked(&[pod("a", 1, &json!({}), &["2"]), pod("b", 2, &two, &["2"])]);
        let ids = |ids: [&str; 2]| ids.map(str::to_owned);
        let (of_one, of_two) = (ids(["aaa-0", "aaa-1"]), ids(["aaa-2", "bbb-2"]));
        let has = |a: &[String; 2], b: &[String; 2]| {
            Holdings::from([
                (named("a", "c0"), a.iter().cloned().collect()),
                (named("b", "c0"), b.iter().cloned().collect()),
            ])
        };
        let right = has(&of_one, &of_two);
        assert_eq!(mistaken(&device_requests, &right, &of_one, 1), None);
        assert_eq!(mistaken(&device_requests, &right, &of_two, 2), None);
        let swapped = has(&of_two, &of_one);
        let reported = mistaken(&device_requests, &swapped, &of_one, 1).unwrap();
        assert!(
            reported.contains("default/b asks for its memory on 2 GPUs and got it on 1"),
            "{reported}"
        );
        let reported = mistaken(&device_requests, &swapped, &of_two, 2).unwrap();
        assert!(
            reported.contains("default/a asks for its memory on 1 GPUs and got it on 2"),
            "{reported}"
        );
        // Of a container of which nothing is known, nothing is said.
        assert_eq!(mistaken(&device_requests, &swapped, &ids(["ccc-0", "ccc-1"]), 1), None);
        assert_eq!(mistaken(&[], &swapped, &of_one, 1), None);
    }

    /// An init container may be the one that the kubelet asks for until another container of its
    /// pod has units.
    #[test]
    fn init_container_is_candidate_until_siblings_have_units() {
        let mut pod = pod("a", 1, &json!({}), &["6", "6"]);
        let spec = pod.spec.as_mut().unwrap();
        spec.init_containers = Some(vec![spec.containers.remove(0)]);
        let device_requests = asked(&[pod.clone()]);
        let meant = |held: &_| candidates(&device_requests, held, &Answered::default(), 6).len();
        assert_eq!(meant(&BTreeMap::new()), 2);
        assert_eq!(meant(&[(named("a", "c1"), BTreeSet::from(["aaa-0".to_owned()]))].into()), 0);
        let running = json!({"phase": "Running"});
        pod.status = Some(serde_json::from_value(running).unwrap());
        assert!(asked(&[pod]).is_empty());
    }

    /// An init container that was answered and still runs comes after the containers of the next
    /// pods.
    #[test]
    fn answered_init_container_comes_after_the_next_pods() {
        let mut first = pod("a", 1, &json!({}), &["6", "3"]);
        first.metadata.uid = Some("uid-of-a".to_owned());
        let spec = first.spec.as_mut().unwrap();
        spec.init_containers = Some(vec![spec.containers.remove(0)]);
        let device_requests = asked(&[first, pod("b", 2, &json!({}), &["6"])]);
        let meant = |grants: &[Grant]| -> Vec<&str> {
            let answered = Answered::of(grants, "aliyun.com/gpu-mem");
            let meant = candidates(&device_requests, &Holdings::new(), &answered, 6);
            meant.into_iter().map(|device_request| &*device_request.of.pod).collect()
        };
        assert_eq!(meant(&[]), ["a", "b"]);
        let init = device_requests[0].container();
        let grant = |resource: &str, candidates: &[&grant::PodContainer], holder| Grant {
            format: grant::FORMAT,
            token: String::new(),
            resource: resource.to_owned(),
            devices: Vec::new(),
            gpus: Vec::new(),
            weight: None,
            unenforced: false,
            candidates: candidates.iter().copied().cloned().collect(),
            holder,
            variables: BTreeMap::new(),
            shares: Vec::new(),
        };
        let (mem, other) = ("aliyun.com/gpu-mem", device_requests[1].container());
        // It is remembered by its record, before it is made and afterwards; it may still be meant after all.
        assert_eq!(meant(&[grant(mem, &[&init, &other], None)]), ["b", "a"]);
        assert_eq!(meant(&[grant(mem, &[&other, &init], Some(init.clone()))]), ["b", "a"]);
        assert_eq!(meant(&[grant("aliyun.com/gpu-whole", &[&init], None)]), ["a", "b"]);
    }

    /// Annotations are hints: they give a container nothing else than it asks for.
    #[test]
    fn annotations_are_hints_within_the_pods_limits() {
        let decided = |annotations: Value, labels: Value, asked_for: &[&str]| {
            let mut pod = pod("a", 1, &labels, asked_for);
            pod.metadata.annotations = serde_json::from_value(annotations).unwrap();
            asked(&[pod])
                .into_iter()
                .map(|device_request| device_request.decided)
                .collect::<Vec<_>>()
        };
        let one = |annotations, labels| decided(annotations, labels, &["6"]).remove(0);
        let by = |text: &str| json!({"scheduler.framework.gpushare.allocation": text});
        let two = json!({"aliyun.com/gpu-count": "2"});
        let none = ByGpu::new();
        assert_eq!(one(by(r#"{"c0":{"1":6}}"#), json!({})), ByGpu::from([(1, 6)]));
        let both = ByGpu::from([(0, 3), (1, 3)]);
        assert_eq!(one(by(r#"{"c0":{"0":3,"1":3}}"#), two.clone()), both);
        assert_eq!(one(json!({"ALIYUN_COM_GPU_MEM_IDX": "0,1"}), two.clone()), both);
        for text in [
            r#"{"c0":{"1":12}}"#,
            r#"{"c0":{"1":1}}"#,
            r#"{"c0":{"0":3,"1":3}}"#,
            r#"{"c0":{"1":4294967295}}"#,
            r#"{"c1":{"1":6}}"#,
            "{}",
        ] {
            assert_eq!(one(by(text), json!({})), none, "{text}");
        }
        assert_eq!(one(by(r#"{"c0":{"0":4,"1":2}}"#), two), none);
        // One container's says nothing if another's is wrong.
        let half = decided(by(r#"{"c0":{"1":6},"c1":{"1":9}}"#), json!({}), &["6", "3"]);
        assert_eq!(half, [none.clone(), none]);
        // Nor which was first.
        let mut late = pod("late", 9, &json!({}), &["6"]);
        let words = json!({"ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1"});
        late.metadata.annotations = serde_json::from_value(words).unwrap();
        let device_requests = asked(&[late, pod("early", 1, &json!({}), &["6"])]);
        assert_eq!(device_requests[0].of.pod, "early");
    }

    /// A pod is lost if it has something of a GPU that is gone: units of it, or all of it.
    #[test]
    fn pod_holding_a_missing_gpu_is_lost() {
        let gpus = shared(&[gpu(0, "aaa", 16 << 30)], Unit::GiB).unwrap();
        let pods = ["here", "gone", "whole"].map(|name| pod(name, 1, &json!({}), &["6"]));
        let reported = |pod: &str, resource: &str, id: &str| cgpu_kubelet::api::PodResources {
            name: pod.to_owned(),
            namespace: "default".to_owned(),
            containers: vec![cgpu_kubelet::api::ContainerResources {
                name: "c0".to_owned(),
                devices: vec![cgpu_kubelet::api::ContainerDevices {
                    resource_name: resource.to_owned(),
                    device_ids: vec![id.to_owned()],
                }],
            }],
        };
        let (mem, whole) = ("aliyun.com/gpu-mem", "aliyun.com/gpu-whole");
        let held = ListPodResourcesResponse {
            pod_resources: vec![
                reported("here", mem, "aaa-0"),
                reported("gone", mem, "bbb-3"),
                reported("whole", whole, "bbb"),
                reported("deleted", mem, "bbb-4"),
            ],
        };
        let lost = lost(&held, &gpus, &AskRules::default(), &pods);
        let names: Vec<_> = lost
            .iter()
            .map(|(pod, container, device)| {
                (pod.metadata.name.as_deref().unwrap(), &**container, &**device)
            })
            .collect();
        assert_eq!(names, [("gone", "c0", "bbb-3"), ("whole", "c0", "bbb")]);
    }

    /// A pod's annotations state the units that it has, by container and GPU.
    #[test]
    fn pod_annotations_state_its_units() {
        let gpus = [gpu(0, "aaa", 16 << 30), gpu(1, "bbb", 16 << 30), gpu(2, "ccc", 24 << 30)];
        let gpus = shared(&gpus, Unit::GiB).unwrap();
        let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<BTreeSet<_>>();
        let held = BTreeMap::from([
            (named("a", "x"), ids(&["bbb-0", "aaa-1", "bbb-2", "aaa-3"])),
            (named("a", "y"), ids(&["bbb-5"])),
            (named("gone", "x"), ids(&["ddd-0"])),
        ]);
        let given = given(&held, &gpus);
        assert_eq!(given.len(), 1);
        let a = given[&("default".to_owned(), "a".to_owned())].words();
        assert_eq!(a["ALIYUN_COM_GPU_MEM_IDX"], "0,1");
        assert_eq!(a["ALIYUN_COM_GPU_MEM_POD"], "5");
        assert_eq!(a["ALIYUN_COM_GPU_MEM_DEV"], "16");
        assert_eq!(a["ALIYUN_COM_GPU_MEM_ASSIGNED"], "true");
        let allocation = &a["scheduler.framework.gpushare.allocation"];
        assert_eq!(allocation, r#"{"x":{"0":2,"1":2},"y":{"1":1}}"#);
    }
}
