//! Which GPUs the kubelet gave to which pods: [`pod_gpus`]. Pure.
//!
//! The runtime's records report a container that came through cgpu. A pod with another runtime that has a GPU of
//! NVIDIA's device plugin is known to the kubelet alone.

use std::collections::BTreeMap;

use cgpu_kubelet::api::ListPodResourcesResponse;

/// What a pod's container was given of a GPU, by a device plugin whose devices are named by UUID.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PodGpu {
    pub(crate) namespace: String,
    pub(crate) pod: String,
    pub(crate) container: String,
    /// As `nvidia.com/gpu`.
    pub(crate) resource: String,
    /// The GPU's UUID, or a MIG device's.
    pub(crate) uuid: String,
    /// How many devices of the resource: more than one if a plugin makes several of a GPU.
    pub(crate) devices: u64,
}

/// Which GPUs and MIG devices the containers of this node were given, by what the kubelet reports. Units of
/// memory, whose ids are no UUIDs, are not among them: the runtime's records say more of those.
pub(crate) fn pod_gpus(reported: &ListPodResourcesResponse) -> Vec<PodGpu> {
    let mut counts = BTreeMap::new();
    for pod in &reported.pod_resources {
        for container in &pod.containers {
            for some in &container.devices {
                for uuid in some.device_ids.iter().filter_map(|id| uuid(id)) {
                    let given = PodGpu {
                        namespace: pod.namespace.clone(),
                        pod: pod.name.clone(),
                        container: container.name.clone(),
                        resource: some.resource_name.clone(),
                        uuid: uuid.to_owned(),
                        devices: 0,
                    };
                    *counts.entry(given).or_default() += 1;
                }
            }
        }
    }
    counts.into_iter().map(|(given, devices)| PodGpu { devices, ..given }).collect()
}

/// The UUID in a device's id: NVIDIA's plugin adds `::` and a number if it shares a GPU by time
/// (`internal/rm/devices.go` of k8s-device-plugin, `AnnotatedID`).
fn uuid(id: &str) -> Option<&str> {
    let uuid = id.split_once("::").map_or(id, |(uuid, _)| uuid);
    ["GPU-", "MIG-"].iter().any(|kind| uuid.starts_with(kind)).then_some(uuid)
}

#[cfg(test)]
mod tests {
    use cgpu_kubelet::api::{ContainerDevices, ContainerResources, PodResources};

    use super::*;

    fn reported(devices: &[(&str, &[&str])]) -> ListPodResourcesResponse {
        let devices = devices.iter().map(|(resource, ids)| ContainerDevices {
            resource_name: (*resource).to_owned(),
            device_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
        });
        let container = ContainerResources { name: "main".into(), devices: devices.collect() };
        let pod = PodResources {
            name: "train-0".into(),
            namespace: "team".into(),
            containers: vec![container],
        };
        ListPodResourcesResponse { pod_resources: vec![pod] }
    }

    fn found(devices: &[(&str, &[&str])]) -> Vec<(String, String, u64)> {
        let given = pod_gpus(&reported(devices)).into_iter();
        given.map(|given| (given.resource, given.uuid, given.devices)).collect()
    }

    /// GPUs are identified by UUID, and a pod's shares of a GPU's time are counted.
    #[test]
    fn gpus_are_keyed_by_uuid_and_replicas_counted() {
        let found = found(&[
            ("nvidia.com/gpu", &["GPU-b::0", "GPU-b::1", "GPU-a"]),
            ("nvidia.com/mig-1g.10gb", &["MIG-c"]),
            // The kubelet reports one resource more than once, by NUMA node.
            ("nvidia.com/gpu", &["GPU-a::2"]),
        ]);
        let wanted = [
            ("nvidia.com/gpu", "GPU-a", 2),
            ("nvidia.com/gpu", "GPU-b", 2),
            ("nvidia.com/mig-1g.10gb", "MIG-c", 1),
        ];
        assert_eq!(found, wanted.map(|(name, uuid, n)| (name.to_owned(), uuid.to_owned(), n)));
    }

    #[test]
    fn what_is_no_gpu_is_left_out() {
        assert_eq!(
            found(&[("aliyun.com/gpu-mem", &["c09d-2z"]), ("example.com/nic", &["eth1", ""])]),
            []
        );
        assert_eq!(pod_gpus(&ListPodResourcesResponse::default()), []);
    }

    #[test]
    fn a_container_is_named() {
        let given = &pod_gpus(&reported(&[("nvidia.com/gpu", &["GPU-a"])]))[0];
        assert_eq!(
            (&*given.namespace, &*given.pod, &*given.container),
            ("team", "train-0", "main")
        );
    }
}
