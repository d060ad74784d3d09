//! What the pods of this node ask for, and what they have: which of them the kubelet asks for, and what
//! is written on them. Pure.
//!
//! The kubelet doesn't say whose devices it asks for. What a container has is known from the kubelet
//! itself (its pod-resources API); of the containers that have nothing yet, those that ask for as
//! many units are meant. Pods that ask for the same on as many GPUs are the same to us.

use std::collections::{BTreeMap, BTreeSet};

use cgpu_kubelet::api::ListPodResourcesResponse;
use k8s_openapi::api::core::v1::Pod;

use crate::ask::{ContainerAsk, GPU_COUNT, PodAsk};
use crate::place::parts;
use crate::units::{SharedGpu, Unit};
use crate::written::{ASSUME_TIME, ByContainer, ByGpu, Words, shares, sum, words};

/// A container of this node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodContainer {
    /// Its pod's namespace.
    pub namespace: String,
    /// Its pod.
    pub pod: String,
    /// Its name in the pod.
    pub container: String,
}

/// The ids of the units that containers have.
pub type Holdings = BTreeMap<PodContainer, BTreeSet<String>>;

/// What a container asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wish {
    /// Who asks.
    pub of: PodContainer,
    /// Units of memory in all.
    pub units: u32,
    /// On how many GPUs, or why that can't be.
    pub gpus: Result<u32, String>,
    /// Percent of compute in all; 0 where it doesn't ask for any.
    pub percent: u32,
    /// How many units all containers of the pod ask for together.
    pub pod_units: u32,
    /// Whether it is one that runs before the others, and of which the kubelet doesn't tell what it has.
    pub is_init: bool,
    /// The units of each GPU that a scheduler has decided on; empty where none has.
    pub decided: ByGpu,
}

impl Wish {
    /// Whether it is for the memory of so many GPUs.
    #[must_use]
    pub fn is_on(&self, gpus: usize) -> bool {
        self.gpus.as_ref().is_ok_and(|count| *count as usize == gpus)
    }
}

/// What the containers of these pods ask for of `resource`, those of the pod first that came to the node first:
/// when a scheduler decided, or when it was made where none did. The kubelet asks before a pod runs: one that
/// runs, has ended, or is to end asks for nothing.
#[must_use]
pub fn wishes(pods: &[Pod], resource: &str, unit: Unit) -> Vec<Wish> {
    let mut waiting: Vec<&Pod> = pods.iter().filter(|pod| is_waiting(pod)).collect();
    waiting.sort_by_key(|pod| (came(pod), &pod.metadata.name));
    waiting.into_iter().flat_map(|pod| of_pod(pod, resource, unit)).collect()
}

/// In nanoseconds since 1970.
fn came(pod: &Pod) -> i128 {
    let annotations = pod.metadata.annotations.as_ref();
    let decided = annotations.and_then(|words| words.get(ASSUME_TIME)?.parse().ok());
    let made = || pod.metadata.creation_timestamp.as_ref().map(|time| time.0.as_nanosecond());
    decided.or_else(made).unwrap_or_default()
}

fn is_waiting(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    pod.metadata.deletion_timestamp.is_none() && matches!(phase, None | Some("Pending"))
}

fn of_pod(pod: &Pod, resource: &str, unit: Unit) -> Vec<Wish> {
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
    let wish = |container: &ContainerAsk| {
        let units = container.units;
        let of = PodContainer {
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            pod: pod.metadata.name.clone().unwrap_or_default(),
            container: container.name.clone(),
        };
        let gpus = ask.gpus.clone().and_then(|gpus| match units.is_multiple_of(gpus) {
            true => Ok(gpus),
            false => Err(indivisible(units, gpus, unit)),
        });
        Wish {
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
    ask.containers.iter().map(wish).collect()
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
pub fn holdings(told: &ListPodResourcesResponse, resource: &str) -> Holdings {
    let mut held = Holdings::new();
    for pod in &told.pod_resources {
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

/// Who can be meant by a request for so many units: the containers that ask for them and have none, those
/// of the oldest pod first.
#[must_use]
pub fn candidates<'a>(wishes: &'a [Wish], held: &Holdings, units: usize) -> Vec<&'a Wish> {
    // A pod's init containers get theirs before the others.
    let has_begun = |wish: &Wish| {
        let of_pod =
            |of: &PodContainer| (&of.namespace, &of.pod) == (&wish.of.namespace, &wish.of.pod);
        wish.is_init && held.keys().any(of_pod)
    };
    let is_meant = |wish: &&Wish| {
        wish.units as usize == units && !held.contains_key(&wish.of) && !has_begun(wish)
    };
    wishes.iter().filter(is_meant).collect()
}

/// Units of each GPU that a scheduler decided on for containers that have none yet, but for `wish`.
#[must_use]
pub fn reserved(wishes: &[Wish], held: &Holdings, but: &Wish) -> ByGpu {
    let mut reserved = ByGpu::new();
    let is_other =
        |wish: &&Wish| wish.of != but.of && !wish.is_init && !held.contains_key(&wish.of);
    for (index, units) in wishes.iter().filter(is_other).flat_map(|wish| &wish.decided) {
        *reserved.entry(*index).or_default() += units;
    }
    reserved
}

/// Why whoever has just these units must not start with them, if it must not: they are of `gpus` GPUs, and
/// its pod asks for another number.
#[must_use]
pub fn mistaken(wishes: &[Wish], held: &Holdings, ids: &[String], gpus: usize) -> Option<String> {
    let ids: BTreeSet<String> = ids.iter().cloned().collect();
    let (of, _) = held.iter().find(|(_, held)| **held == ids)?;
    let wish = wishes.iter().find(|wish| wish.of == *of && !wish.is_on(gpus))?;
    let count = wish.gpus.as_ref().ok()?;
    Some(format!(
        "{}/{} asks for its memory on {count} GPUs and got it on {gpus}: another pod asked for as much at \
         the same moment; delete the pod, and it is given anew",
        of.namespace, of.pod
    ))
}

/// What is written on the pods that have units, by namespace and pod.
#[must_use]
pub fn annotations(held: &Holdings, gpus: &[SharedGpu]) -> BTreeMap<(String, String), Words> {
    let mut pods: BTreeMap<(String, String), ByContainer> = BTreeMap::new();
    for (of, ids) in held {
        // Units of a GPU that is gone say nothing of another.
        let Ok(parts) = parts(gpus, ids) else { continue };
        let shares = parts.into_iter().map(|(gpu, units)| (gpu.index, units)).collect();
        let pod = pods.entry((of.namespace.clone(), of.pod.clone())).or_default();
        pod.insert(of.container.clone(), shares);
    }
    let written = pods.into_iter().map(|(pod, containers)| {
        let indices = sum(&containers);
        let first = gpus.iter().find(|gpu| indices.contains_key(&gpu.index));
        (pod, words(&containers, first.map_or(0, |gpu| gpu.whole_units), true))
    });
    written.collect()
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

    fn asked(pods: &[Pod]) -> Vec<Wish> {
        wishes(pods, "aliyun.com/gpu-mem", Unit::GiB)
    }

    fn named(pod: &str, container: &str) -> PodContainer {
        PodContainer { namespace: "default".into(), pod: pod.into(), container: container.into() }
    }

    #[test]
    fn each_container_asks_for_its_own_on_as_many_gpus_as_its_pod_says() {
        let four = json!({"aliyun.com/gpu-count": "4"});
        let mut old = pod("old", 1, &four, &["8", "4"]);
        let wishes = asked(&[pod("new", 2, &json!({}), &["6"]), old.clone()]);
        let told: Vec<_> = wishes
            .iter()
            .map(|wish| (&*wish.of.pod, &*wish.of.container, wish.units, wish.gpus.clone()))
            .collect();
        assert_eq!(
            told,
            [("old", "c0", 8, Ok(4)), ("old", "c1", 4, Ok(4)), ("new", "c0", 6, Ok(1))]
        );
        assert_eq!(wishes[0].pod_units, 12);
        // As an annotation, where no label says it.
        old.metadata.annotations = old.metadata.labels.take();
        assert_eq!(asked(&[old.clone()])[0].gpus, Ok(4));
        old.metadata.deletion_timestamp = old.metadata.creation_timestamp.clone();
        assert!(asked(&[old]).is_empty());
    }

    #[test]
    fn what_no_gpus_can_give_is_told_in_words() {
        let told = |count: &str, units| {
            let pods = [pod("p", 1, &json!({"aliyun.com/gpu-count": count}), &[units])];
            asked(&pods)[0].gpus.clone().unwrap_err()
        };
        let error = told("4", "7");
        assert!(error.contains("7 GiB") && error.contains("ask for a multiple of 4"), "{error}");
        for count in ["0", "-1", "four", ""] {
            let error = told(count, "8");
            assert!(error.contains(&format!("is {count:?}")), "{error}");
        }
    }

    #[test]
    fn who_has_units_is_not_meant_again() {
        let wishes = asked(&[
            pod("a", 1, &json!({}), &["6", "6"]),
            pod("b", 2, &json!({"aliyun.com/gpu-count": "2"}), &["6"]),
        ]);
        let held = BTreeMap::from([(named("a", "c0"), BTreeSet::from(["aaa-0".to_owned()]))]);
        let meant: Vec<_> = candidates(&wishes, &held, 6).into_iter().map(|w| &w.of).collect();
        assert_eq!(meant, [&named("a", "c1"), &named("b", "c0")]);
        assert!(candidates(&wishes, &held, 5).is_empty());
    }

    #[test]
    fn who_got_what_was_chosen_for_another_does_not_start() {
        let two = json!({"aliyun.com/gpu-count": "2"});
        let wishes = asked(&[pod("a", 1, &json!({}), &["2"]), pod("b", 2, &two, &["2"])]);
        let ids = |ids: [&str; 2]| ids.map(str::to_owned);
        let (of_one, of_two) = (ids(["aaa-0", "aaa-1"]), ids(["aaa-2", "bbb-2"]));
        let has = |a: &[String; 2], b: &[String; 2]| {
            Holdings::from([
                (named("a", "c0"), a.iter().cloned().collect()),
                (named("b", "c0"), b.iter().cloned().collect()),
            ])
        };
        let right = has(&of_one, &of_two);
        assert_eq!(mistaken(&wishes, &right, &of_one, 1), None);
        assert_eq!(mistaken(&wishes, &right, &of_two, 2), None);
        let swapped = has(&of_two, &of_one);
        let told = mistaken(&wishes, &swapped, &of_one, 1).unwrap();
        assert!(told.contains("default/b asks for its memory on 2 GPUs and got it on 1"), "{told}");
        let told = mistaken(&wishes, &swapped, &of_two, 2).unwrap();
        assert!(told.contains("default/a asks for its memory on 1 GPUs and got it on 2"), "{told}");
        // Of whom nothing is known, nothing is said.
        assert_eq!(mistaken(&wishes, &swapped, &ids(["ccc-0", "ccc-1"]), 1), None);
        assert_eq!(mistaken(&[], &swapped, &of_one, 1), None);
    }

    #[test]
    fn an_init_container_is_meant_until_another_of_its_pod_has_units() {
        let mut pod = pod("a", 1, &json!({}), &["6", "6"]);
        let spec = pod.spec.as_mut().unwrap();
        spec.init_containers = Some(vec![spec.containers.remove(0)]);
        let wishes = asked(&[pod.clone()]);
        let meant = |held: &_| candidates(&wishes, held, 6).len();
        assert_eq!(meant(&BTreeMap::new()), 2);
        assert_eq!(meant(&[(named("a", "c1"), BTreeSet::from(["aaa-0".to_owned()]))].into()), 0);
        let running = json!({"phase": "Running"});
        pod.status = Some(serde_json::from_value(running).unwrap());
        assert!(asked(&[pod]).is_empty());
    }

    #[test]
    fn a_pod_is_told_of_what_it_has() {
        let gpus = [gpu(0, "aaa", 16 << 30), gpu(1, "bbb", 16 << 30), gpu(2, "ccc", 24 << 30)];
        let gpus = shared(&gpus, Unit::GiB).unwrap();
        let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<BTreeSet<_>>();
        let held = BTreeMap::from([
            (named("a", "x"), ids(&["bbb-0", "aaa-1", "bbb-2", "aaa-3"])),
            (named("a", "y"), ids(&["bbb-5"])),
            (named("gone", "x"), ids(&["ddd-0"])),
        ]);
        let written = annotations(&held, &gpus);
        assert_eq!(written.len(), 1);
        let a = &written[&("default".to_owned(), "a".to_owned())];
        assert_eq!(a["ALIYUN_COM_GPU_MEM_IDX"], "0,1");
        assert_eq!(a["ALIYUN_COM_GPU_MEM_POD"], "5");
        assert_eq!(a["ALIYUN_COM_GPU_MEM_DEV"], "16");
        assert_eq!(a["ALIYUN_COM_GPU_MEM_ASSIGNED"], "true");
        let allocation = &a["scheduler.framework.gpushare.allocation"];
        assert_eq!(allocation, r#"{"x":{"0":2,"1":2},"y":{"1":1}}"#);
    }
}
