//! What Kubernetes' scheduler and `kubectl inspect gpushare` say by HTTP, and are answered
//! (`k8s.io/kube-scheduler/extender/v1/types.go`, whose names have no JSON names of their own; the answer of
//! `inspect` is gpushare-scheduler-extender's). Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::fleet::{Fleet, Seeker};

/// `ExtenderArgs`: a pod, and the nodes that are left for it.
#[derive(Debug, Deserialize)]
pub struct FilterArgs {
    #[serde(rename = "Pod", alias = "pod")]
    pub pod: Pod,
    /// The nodes as objects, if the scheduler's configuration doesn't say `nodeCacheCapable`.
    #[serde(default, rename = "Nodes", alias = "nodes")]
    pub nodes: Option<NodeObjects>,
    /// The names of the nodes, if it does.
    #[serde(default, rename = "NodeNames", alias = "nodenames")]
    pub node_names: Option<Vec<String>>,
}

/// A `NodeList`; the nodes are given back as they came.
#[derive(Debug, Default, Deserialize, Serialize)]
pub struct NodeObjects {
    #[serde(default)]
    metadata: BTreeMap<String, serde_json::Value>,
    #[serde(default)]
    items: Vec<Box<RawValue>>,
}

/// As much of a node as is needed to give it back.
#[derive(Debug, Deserialize)]
struct NamedNode {
    metadata: NodeName,
}

#[derive(Debug, Deserialize)]
struct NodeName {
    name: String,
}

/// `ExtenderFilterResult`.
#[derive(Debug, Default, Serialize)]
pub struct FilterResult {
    /// The nodes that do, if objects came.
    #[serde(rename = "Nodes", skip_serializing_if = "Option::is_none")]
    pub nodes: Option<NodeObjects>,
    /// Their names, if names came.
    #[serde(rename = "NodeNames", skip_serializing_if = "Option::is_none")]
    pub node_names: Option<Vec<String>>,
    /// The others, and why. Schedulers before 1.21 read these alone.
    #[serde(rename = "FailedNodes")]
    pub failed: BTreeMap<String, String>,
    /// Those of them that stay so whichever pods go.
    #[serde(rename = "FailedAndUnresolvableNodes")]
    pub failed_for_ever: BTreeMap<String, String>,
    /// Why nothing can be reported.
    #[serde(rename = "Error", skip_serializing_if = "String::is_empty")]
    pub error: String,
}

/// `ExtenderPreemptionArgs`: a pod that fits nowhere, and the pods of nodes that would end for it.
#[derive(Debug, Deserialize)]
pub struct PreemptArgs {
    #[serde(rename = "Pod", alias = "pod")]
    pub pod: Pod,
    /// By node, the pods as objects, if the scheduler's configuration doesn't say `nodeCacheCapable`.
    #[serde(default, rename = "NodeNameToVictims", alias = "nodeNameToVictims")]
    pub victims: Option<BTreeMap<String, Victims<Pod>>>,
    /// By node, their UIDs, if it does.
    #[serde(default, rename = "NodeNameToMetaVictims", alias = "nodeNameToMetaVictims")]
    pub meta_victims: Option<BTreeMap<String, Victims<MetaPod>>>,
}

/// The pods of a node that go.
#[derive(Debug, Deserialize, Serialize)]
pub struct Victims<T> {
    #[serde(rename = "Pods", alias = "pods", default = "Vec::new")]
    pub pods: Vec<T>,
    /// How many disruption budgets that breaks.
    #[serde(default, rename = "NumPDBViolations", alias = "numPDBViolations")]
    pub broken_budgets: i64,
}

/// A pod by its UID.
#[derive(Debug, Deserialize, Serialize)]
pub struct MetaPod {
    #[serde(rename = "UID", alias = "uid")]
    pub uid: String,
}

/// `ExtenderPreemptionResult`.
#[derive(Debug, Default, Serialize)]
pub struct PreemptResult {
    /// By node, the pods that go; nodes that aren't there are no way.
    #[serde(rename = "NodeNameToMetaVictims")]
    pub victims: BTreeMap<String, Victims<MetaPod>>,
}

/// `ExtenderBindingArgs`.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct BindArgs {
    #[serde(alias = "podName")]
    pub pod_name: String,
    #[serde(alias = "podNamespace")]
    pub pod_namespace: String,
    #[serde(rename = "PodUID", alias = "podUID")]
    pub pod_uid: String,
    #[serde(alias = "node")]
    pub node: String,
}

/// `ExtenderBindingResult`.
#[derive(Debug, Default, Serialize)]
pub struct BindResult {
    /// Why the pod isn't bound; empty if it is.
    #[serde(rename = "Error")]
    pub error: String,
}

/// Which of the nodes have the capacity for the pod.
#[must_use]
pub fn filter(fleet: &Fleet, args: FilterArgs) -> FilterResult {
    let seeker = Seeker::of(&args.pod, fleet.asks());
    let mut result = FilterResult::default();
    let mut fits = |name: &str| {
        if seeker.ask.is_empty() && seeker.ask.gpus.is_ok() {
            return true;
        }
        let Err(why) = fleet.can_have(&seeker, name) else { return true };
        if why.is_for_ever() {
            result.failed_for_ever.insert(name.to_owned(), why.to_string());
        }
        result.failed.insert(name.to_owned(), why.to_string());
        false
    };
    if let Some(names) = args.node_names {
        result.node_names = Some(names.into_iter().filter(|name| fits(name)).collect());
    } else if let Some(mut nodes) = args.nodes {
        nodes.items.retain(|item| {
            let node = serde_json::from_str::<NamedNode>(item.get());
            node.is_ok_and(|node| fits(&node.metadata.name))
        });
        result.nodes = Some(nodes);
    } else {
        result.error = "neither nodes nor nodenames: there is nothing to choose of".to_owned();
    }
    result
}

/// Which pods end for one that fits nowhere: of each node those whose end gives it its GPUs.
#[must_use]
pub fn preempt(fleet: &Fleet, args: PreemptArgs) -> PreemptResult {
    let seeker = Seeker::of(&args.pod, fleet.asks());
    let by_uid = |victims: Victims<Pod>| Victims {
        pods: victims
            .pods
            .into_iter()
            .filter_map(|pod| Some(MetaPod { uid: pod.metadata.uid? }))
            .collect(),
        broken_budgets: victims.broken_budgets,
    };
    let objects = args.victims.unwrap_or_default().into_iter();
    let objects = objects.map(|(node, victims)| (node, by_uid(victims)));
    let proposed = objects.chain(args.meta_victims.unwrap_or_default());
    let answer = |(node, proposed): (String, Victims<MetaPod>)| {
        if seeker.ask.is_empty() {
            return Some((node, proposed));
        }
        let uids: Vec<String> = proposed.pods.into_iter().map(|pod| pod.uid).collect();
        let gone = fleet.victims(&seeker, &node, &uids)?;
        let pods = gone.into_iter().map(|uid| MetaPod { uid }).collect();
        Some((node, Victims { pods, broken_budgets: proposed.broken_budgets }))
    };
    PreemptResult { victims: proposed.filter_map(answer).collect() }
}

/// What `inspect` reports.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inspection {
    #[serde(default)]
    pub nodes: Vec<InspectedNode>,
    /// Why there are none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub error: String,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InspectedNode {
    pub name: String,
    /// Its units.
    #[serde(rename = "totalGPU")]
    pub total: u32,
    /// Units that pods have.
    #[serde(rename = "usedGPU")]
    pub used: u32,
    #[serde(rename = "devs")]
    pub gpus: Vec<InspectedGpu>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InspectedGpu {
    /// Its index.
    pub id: u32,
    /// Its units.
    #[serde(rename = "totalGPU")]
    pub total: u32,
    /// Units that pods have.
    #[serde(rename = "usedGPU")]
    pub used: u32,
    /// These pods.
    #[serde(default)]
    pub pods: Vec<InspectedPod>,
}

/// What a pod has of a GPU.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InspectedPod {
    pub name: String,
    pub namespace: String,
    /// Units.
    #[serde(rename = "usedGPU")]
    pub used: u32,
}

/// Which pods have what, of all nodes or of one.
#[must_use]
pub fn inspection(fleet: &Fleet, only: Option<&str>) -> Inspection {
    let names = match only {
        Some(name) => vec![name],
        None => fleet.node_names(),
    };
    let node = |name: &str| {
        let (_, gpus) = fleet.view(name)?;
        let pods = |gpu: &super::fleet::GpuView| {
            let pod = |pod: &super::fleet::PodPart| InspectedPod {
                name: pod.name.clone(),
                namespace: pod.namespace.clone(),
                used: pod.units,
            };
            gpu.pods.iter().map(pod).collect()
        };
        let inspected = gpus.iter().map(|gpu| InspectedGpu {
            id: gpu.index,
            total: gpu.total,
            used: gpu.used,
            pods: pods(gpu),
        });
        Some(InspectedNode {
            name: name.to_owned(),
            total: gpus.iter().map(|gpu| gpu.total).sum(),
            used: gpus.iter().map(|gpu| gpu.used).sum(),
            gpus: inspected.collect(),
        })
    };
    let nodes: Vec<InspectedNode> = names.into_iter().filter_map(node).collect();
    let error = match only {
        Some(name) if nodes.is_empty() => {
            format!("there is no node {name} with {}", fleet.asks().memory)
        }
        _ => String::new(),
    };
    Inspection { nodes, error }
}
