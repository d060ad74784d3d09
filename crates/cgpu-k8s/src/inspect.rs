//! `kubectl inspect gpushare`: which pods have what of which GPU in a cluster, from nodes and pods as the
//! API server has them. Pure.

mod claims;

use std::collections::BTreeMap;

use cgpu_cli::commands::table::{aligned, printable};
use k8s_openapi::api::core::v1::{Node, Pod};
use serde::Serialize;

use crate::annotations::{shares, sum};
use crate::extender::protocol::Inspection;
use crate::node::{Given, GivenByUid, Lost, given_of, gpus_of};
use crate::pod_request::PodAsk;

pub use claims::{ClaimUse, claim_use, claims_table};

/// The line below the table, as the user guide of gpushare prints it.
const LINE: usize = 87;

/// A cluster's shared GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ClusterUse {
    /// Its nodes that have some, by name.
    pub nodes: Vec<NodeUse>,
    /// Units that pods have or are to get.
    pub allocated: u32,
    /// All units.
    pub total: u32,
    /// What claims have, which aren't counted in units.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<ClaimUse>,
}

/// A node's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NodeUse {
    pub name: String,
    /// Its address in the cluster.
    pub address: String,
    /// What a unit is: `GiB` or `MiB`.
    pub unit: &'static str,
    /// By the GPU's index.
    pub gpus: BTreeMap<u32, GpuUse>,
    /// Units of pods that are on the node and have no GPU yet.
    pub pending: u32,
    /// By namespace and name.
    pub pods: Vec<PodUse>,
}

/// A GPU's units.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct GpuUse {
    /// How many pods have.
    pub allocated: u32,
    /// All.
    pub total: u32,
}

/// What a pod has.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct PodUse {
    pub namespace: String,
    pub name: String,
    /// Units, by the GPU's index.
    pub gpus: BTreeMap<u32, u32>,
    /// Units that it is to get and that no GPU is written down for.
    pub pending: u32,
}

impl NodeUse {
    fn total(&self) -> u32 {
        self.gpus.values().map(|gpu| gpu.total).sum()
    }

    fn allocated(&self) -> u32 {
        self.pending + self.gpus.values().map(|gpu| gpu.allocated).sum::<u32>()
    }
}

/// What of `resource` the nodes have and the pods hold; of the node `only` alone, if that is given. A pod whose GPU is
/// gone, by its node's word, holds nothing.
#[must_use]
pub fn cluster_use(nodes: &[Node], pods: &[Pod], resource: &str, only: Option<&str>) -> ClusterUse {
    let named = |node: &&Node| only.is_none_or(|only| node.metadata.name.as_deref() == Some(only));
    let reported = nodes.iter().filter(named).filter_map(|node| gpus_of(node, resource));
    let lost: Lost = reported.flat_map(|reported| reported.lost).collect();
    let name = |node: &Node| node.metadata.name.clone().unwrap_or_default();
    let given: BTreeMap<String, GivenByUid> =
        nodes.iter().filter(named).map(|node| (name(node), given_of(node))).collect();
    let mut nodes: Vec<NodeUse> =
        nodes.iter().filter(named).filter_map(|node| of_node(node, resource)).collect();
    nodes.sort_by(|one, other| one.name.cmp(&other.name));
    let is_lost = |pod: &Pod| pod.metadata.uid.as_ref().is_some_and(|uid| lost.contains_key(uid));
    for pod in pods.iter().filter(|pod| !is_lost(pod)) {
        let on = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
        let node = nodes.iter_mut().find(|node| Some(&*node.name) == on);
        let Some(node) = node else { continue };
        let given = given.get(&node.name);
        let given = given.and_then(|given| given.get(pod.metadata.uid.as_deref()?));
        let Some(held) = of_pod(pod, resource, given) else { continue };
        for (index, units) in &held.gpus {
            node.gpus.entry(*index).or_default().allocated += units;
        }
        node.pending += held.pending;
        node.pods.push(held);
    }
    for node in &mut nodes {
        node.pods.sort();
    }
    let allocated = nodes.iter().map(NodeUse::allocated).sum();
    let total = nodes.iter().map(NodeUse::total).sum();
    ClusterUse { nodes, allocated, total, claims: Vec::new() }
}

/// The same, as the extender reports it; the nodes report their addresses and what a unit is.
#[must_use]
pub fn inspected_use(
    nodes: &[Node],
    reported: &Inspection,
    resource: &str,
    only: Option<&str>,
) -> ClusterUse {
    let mut used = cluster_use(nodes, &[], resource, only);
    for node in &mut used.nodes {
        let Some(reported) = reported.nodes.iter().find(|reported| reported.name == node.name)
        else {
            continue;
        };
        let mut pods: BTreeMap<(&str, &str), BTreeMap<u32, u32>> = BTreeMap::new();
        for gpu in &reported.gpus {
            node.gpus.insert(gpu.id, GpuUse { allocated: gpu.used, total: gpu.total });
            for pod in &gpu.pods {
                pods.entry((&pod.namespace, &pod.name)).or_default().insert(gpu.id, pod.used);
            }
        }
        let pod = |((namespace, name), gpus): ((&str, &str), BTreeMap<u32, u32>)| PodUse {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            gpus,
            pending: 0,
        };
        node.pods = pods.into_iter().map(pod).collect();
    }
    used.allocated = used.nodes.iter().map(NodeUse::allocated).sum();
    used.total = used.nodes.iter().map(NodeUse::total).sum();
    used
}

/// A node that has units.
fn of_node(node: &Node, resource: &str) -> Option<NodeUse> {
    let reported = gpus_of(node, resource)?;
    let status = node.status.as_ref()?;
    let addresses = status.addresses.iter().flatten();
    let address = addresses.into_iter().find(|address| address.type_ == "InternalIP");
    Some(NodeUse {
        name: node.metadata.name.clone().unwrap_or_default(),
        address: address.map(|address| address.address.clone()).unwrap_or_default(),
        unit: reported.unit.name(),
        gpus: reported
            .gpus
            .into_iter()
            .map(|(index, total)| (index, GpuUse { allocated: 0, total }))
            .collect(),
        pending: 0,
        pods: Vec::new(),
    })
}

/// What a pod has that asks for units and hasn't ended: by what is written on it, else by what its node says.
fn of_pod(pod: &Pod, resource: &str, given: Option<&Given>) -> Option<PodUse> {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return None;
    }
    let ask = PodAsk::of(pod, resource);
    let asked = ask.units();
    if asked == 0 {
        return None;
    }
    let annotations = pod.metadata.annotations.clone().unwrap_or_default();
    let written = shares(&annotations, &ask);
    let reported = || given.and_then(|given| shares(&given.words(), &ask));
    let gpus = written.or_else(reported).map(|shares| sum(&shares)).unwrap_or_default();
    Some(PodUse {
        namespace: pod.metadata.namespace.clone().unwrap_or_default(),
        name: pod.metadata.name.clone().unwrap_or_default(),
        pending: if gpus.is_empty() { asked } else { 0 },
        gpus,
    })
}

fn percent(allocated: u32, total: u32) -> u64 {
    u64::from(allocated) * 100 / u64::from(total.max(1))
}

/// The table of the user guide: a node a line, and the cluster's sum.
#[must_use]
pub fn table(used: &ClusterUse) -> String {
    let most = used.nodes.iter().filter_map(|node| node.gpus.keys().last()).max();
    let columns = most.map_or(0, |most| most + 1);
    let unit = used.nodes.first().map_or("GiB", |node| node.unit);
    let has_pending = used.nodes.iter().any(|node| node.pending > 0);
    let mut rows = vec![vec!["NAME".to_owned(), "IPADDRESS".to_owned()]];
    rows[0].extend((0..columns).map(|index| format!("GPU{index}(Allocated {unit}/Total {unit})")));
    if has_pending {
        rows[0].push("PENDING(Allocated)".to_owned());
    }
    rows[0].push("GPU Memory".to_owned());
    for node in &used.nodes {
        let mut row = vec![printable(&node.name), printable(&node.address)];
        row.extend((0..columns).map(|index| match node.gpus.get(&index) {
            Some(gpu) => format!("{}/{}", gpu.allocated, gpu.total),
            None => String::new(),
        }));
        if has_pending {
            row.push(if node.pending > 0 { node.pending.to_string() } else { String::new() });
        }
        row.push(format!("{}/{}", node.allocated(), node.total()));
        rows.push(row);
    }
    format!("{}{}\n{}", aligned(&rows, &[]), "-".repeat(LINE), total(used))
}

/// Each node with its pods.
#[must_use]
pub fn details(used: &ClusterUse) -> String {
    let mut text = String::new();
    for node in &used.nodes {
        let (name, address) = (printable(&node.name), printable(&node.address));
        text += &format!("NAME:       {name}\nIPADDRESS:  {address}\n\n");
        let mut rows = vec![vec!["NAME".to_owned(), "NAMESPACE".to_owned()]];
        rows[0].extend(node.gpus.keys().map(|index| format!("GPU{index}(Allocated)")));
        let has_pending = node.pending > 0;
        if has_pending {
            rows[0].push("Pending(Allocated)".to_owned());
        }
        for pod in &node.pods {
            let mut row = vec![printable(&pod.name), printable(&pod.namespace)];
            let of = |index| pod.gpus.get(index).copied().unwrap_or_default().to_string();
            row.extend(node.gpus.keys().map(of));
            if has_pending {
                row.push(pod.pending.to_string());
            }
            rows.push(row);
        }
        let (allocated, total) = (node.allocated(), node.total());
        text += &aligned(&rows, &[]);
        text += &format!("Allocated :  {allocated} ({}%)\n", percent(allocated, total));
        text += &format!("Total :      {total}\n{}\n", "-".repeat(LINE));
    }
    text + &total(used)
}

fn total(used: &ClusterUse) -> String {
    let ClusterUse { allocated, total, .. } = used;
    let percent = percent(*allocated, *total);
    format!("Allocated/Total GPU Memory In Cluster:\n{allocated}/{total} ({percent}%)\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const MEM: &str = "aliyun.com/gpu-mem";

    fn node(name: &str, address: &str, units: u32, annotations: &Value) -> Node {
        serde_json::from_value(json!({
            "metadata": {"name": name, "annotations": annotations},
            "status": {
                "capacity": {MEM: units.to_string(), "aliyun.com/gpu-count": "1"},
                "addresses": [{"type": "Hostname", "address": name}, {"type": "InternalIP", "address": address}],
            },
        }))
        .unwrap()
    }

    fn pod(name: &str, node: &str, units: u32, annotations: &Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "default", "annotations": annotations},
            "spec": {
                "nodeName": node,
                "containers": [{"name": "c", "resources": {"limits": {MEM: units.to_string()}}}],
            },
            "status": {"phase": "Running"},
        }))
        .unwrap()
    }

    /// The table of the user guide is printed as the guide has it.
    #[test]
    fn table_matches_the_user_guides() {
        let nodes = [
            node("i-2ze0gl97vw3", "192.168.0.71", 7606, &json!({})),
            node("i-2ze0gl97vw1", "192.168.0.72", 7606, &json!({})),
            node("i-2ze0gl97vw2", "192.168.0.73", 7606, &json!({})),
        ];
        let first = json!({"ALIYUN_COM_GPU_MEM_IDX": "0"});
        let pods = [
            pod("a", "i-2ze0gl97vw1", 3803, &first),
            pod("b", "i-2ze0gl97vw1", 3803, &first),
            pod("c", "i-2ze0gl97vw2", 3803, &first),
            pod("d", "i-2ze0gl97vw3", 7606, &first),
        ];
        // The guide's rows aren't sorted by anything; by name its last two are the same.
        let reported = table(&cluster_use(&nodes, &pods, MEM, None));
        assert_eq!(
            reported,
            "\
NAME           IPADDRESS     GPU0(Allocated MiB/Total MiB)  GPU Memory
i-2ze0gl97vw1  192.168.0.72  7606/7606                      7606/7606
i-2ze0gl97vw2  192.168.0.73  3803/7606                      3803/7606
i-2ze0gl97vw3  192.168.0.71  7606/7606                      7606/7606
---------------------------------------------------------------------------------------
Allocated/Total GPU Memory In Cluster:
19015/22818 (83%)
"
        );
        let one = cluster_use(&nodes, &pods, MEM, Some("i-2ze0gl97vw2"));
        assert_eq!((one.nodes.len(), one.allocated, one.total), (1, 3803, 7606));
    }

    /// What is not written on a pod is counted as its node reports it, unless that is more than the
    /// pod asks for.
    #[test]
    fn pod_without_annotations_counts_as_its_node_reports() {
        let given = r#"{"uid-a":{"units":15,"containers":{"c":{"2":6}}},"uid-b":{"units":15,"containers":{"c":{"0":99}}}}"#;
        let words =
            json!({"cgpu.devices": r#"{"unit":"GiB","gpus":{"0":15,"2":24}}"#, "cgpu.pods": given});
        let nodes = [node("n", "10.0.0.1", 39, &words)];
        let with_uid = |mut pod: Pod, uid: &str| {
            pod.metadata.uid = Some(uid.to_owned());
            pod
        };
        let pods = [
            with_uid(pod("a", "n", 6, &json!({})), "uid-a"),
            with_uid(pod("b", "n", 3, &json!({})), "uid-b"),
        ];
        let used = &cluster_use(&nodes, &pods, MEM, None).nodes[0];
        assert_eq!(used.pods[0].gpus, [(2, 6)].into());
        assert_eq!(
            (used.pods[1].pending, used.pending),
            (3, 3),
            "more than it asks for counts for nothing"
        );
    }

    /// GPUs of several sizes, pods on several GPUs and pods without a GPU are counted correctly.
    #[test]
    fn mixed_gpu_sizes_and_pods_are_counted_correctly() {
        let sizes = json!({"cgpu.devices": r#"{"unit":"GiB","gpus":{"0":15,"2":24}}"#});
        let nodes = [node("n", "10.0.0.1", 39, &sizes), node("none", "10.0.0.2", 0, &json!({}))];
        let allocation = r#"{"c":{"0":3,"2":3}}"#;
        let on_two = |mut pod: Pod| {
            pod.metadata.labels = Some([("aliyun.com/gpu-count".into(), "2".into())].into());
            pod
        };
        let mut ended = pod("ended", "n", 9, &json!({"ALIYUN_COM_GPU_MEM_IDX": "0"}));
        ended.status.as_mut().unwrap().phase = Some("Failed".into());
        let pods = [
            on_two(pod(
                "two",
                "n",
                6,
                &json!({"scheduler.framework.gpushare.allocation": allocation}),
            )),
            on_two(pod("old", "n", 4, &json!({"ALIYUN_COM_GPU_MEM_IDX": "0,2"}))),
            pod("late", "n", 3, &json!({"ALIYUN_COM_GPU_MEM_IDX": "-1"})),
            pod("elsewhere", "m", 3, &json!({})),
            pod("none", "n", 0, &json!({})),
            ended,
        ];
        let used = cluster_use(&nodes, &pods, MEM, None);
        assert_eq!(
            table(&used),
            format!(
                "\
NAME  IPADDRESS  GPU0(Allocated GiB/Total GiB)  GPU1(Allocated GiB/Total GiB)  GPU2(Allocated GiB/Total GiB)  PENDING(Allocated)  GPU Memory
n     10.0.0.1   5/15                                                          5/24                           3                   13/39
{}
Allocated/Total GPU Memory In Cluster:
13/39 (33%)
",
                "-".repeat(LINE)
            )
        );
        let reported = details(&used);
        for line in [
            "NAME:       n",
            "NAME  NAMESPACE  GPU0(Allocated)  GPU2(Allocated)  Pending(Allocated)",
            "late  default    0                0                3",
            "two   default    3                3                0",
            "Allocated :  13 (33%)",
            "Total :      39",
        ] {
            assert!(reported.contains(&format!("{line}\n")), "{line}:\n{reported}");
        }
        assert!(!reported.contains("ended") && !reported.contains("elsewhere"));
        let json = serde_json::to_value(&used).unwrap();
        assert_eq!(json["nodes"][0]["gpus"]["2"], json!({"allocated": 5, "total": 24}));
        assert_eq!(json["nodes"][0]["pods"][2]["gpus"], json!({"0": 3, "2": 3}));
    }

    #[test]
    fn extenders_report_prints_like_the_pods_annotations() {
        let nodes = [node("n", "10.0.0.1", 30, &json!({})), node("m", "10.0.0.2", 30, &json!({}))];
        let pod = json!({"name": "p", "namespace": "default", "usedGPU": 4});
        let gpu = json!({"id": 0, "totalGPU": 30, "usedGPU": 4, "pods": [pod]});
        let reported =
            json!({"nodes": [{"name": "n", "totalGPU": 30, "usedGPU": 4, "devs": [gpu]}]});
        let reported: Inspection = serde_json::from_value(reported).unwrap();
        let used = inspected_use(&nodes, &reported, MEM, None);
        assert_eq!((used.nodes.len(), used.allocated, used.total), (2, 4, 60));
        let annotated = self::pod("p", "n", 4, &json!({"ALIYUN_COM_GPU_MEM_IDX": "0"}));
        assert_eq!(used, cluster_use(&nodes, &[annotated], MEM, None));
        assert_eq!(inspected_use(&nodes, &reported, MEM, Some("m")).total, 30);
    }

    #[test]
    fn cluster_without_shared_gpus_has_an_empty_table() {
        let used = cluster_use(&[], &[], MEM, None);
        assert!(table(&used).ends_with("0/0 (0%)\n") && details(&used).ends_with("0/0 (0%)\n"));
    }
}
