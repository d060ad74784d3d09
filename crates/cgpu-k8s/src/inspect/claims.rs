//! What claims have of which GPU, from claims and slices as the API server has them. Pure.

use std::collections::BTreeMap;

use cgpu_cli::commands::table::{aligned, printable};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use serde::Serialize;

use crate::dra::{MEMORY, amount};

/// What a claim has of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct ClaimUse {
    pub node: String,
    /// The GPU's UUID, or its device's name if its slice is gone.
    pub gpu: String,
    pub namespace: String,
    pub name: String,
    /// The pods that it is reserved for.
    pub pods: Vec<String>,
    /// Memory in MiB that it consumes; all, if it is 0 and `total_mib` isn't.
    pub memory_mib: u64,
    /// All memory of the GPU in MiB that claims can consume; 0 if its slice is gone.
    pub total_mib: u64,
}

/// What the claims have of the devices of `driver`; of the node `only` alone, if that is given. A claim that is allocated and
/// that no pod has any more counts, too: its memory isn't free.
#[must_use]
pub fn claim_use(
    claims: &[ResourceClaim],
    slices: &[ResourceSlice],
    driver: &str,
    only: Option<&str>,
) -> Vec<ClaimUse> {
    let own = slices.iter().filter(|slice| slice.spec.driver == driver);
    let devices: BTreeMap<(&str, &str), (String, u64)> = own
        .flat_map(|slice| {
            slice.spec.devices.iter().flatten().map(|device| {
                let attributes = device.attributes.as_ref();
                let uuid = attributes.and_then(|all| all.get("uuid")?.string.clone());
                let memory =
                    device.capacity.as_ref().and_then(|all| amount(&all.get(MEMORY)?.value));
                let key = (slice.spec.pool.name.as_str(), device.name.as_str());
                (key, (uuid.unwrap_or_default(), memory.unwrap_or_default() >> 20))
            })
        })
        .collect();
    let mut used = Vec::new();
    for claim in claims {
        let Some(status) = &claim.status else { continue };
        let allocated =
            status.allocation.iter().filter_map(|allocation| allocation.devices.as_ref());
        let results = allocated.flat_map(|devices| devices.results.iter().flatten());
        let reserved = status.reserved_for.iter().flatten().filter(|user| user.resource == "pods");
        let pods: Vec<String> = reserved.map(|user| user.name.clone()).collect();
        for result in results.filter(|result| result.driver == driver) {
            if only.is_some_and(|only| only != result.pool) {
                continue;
            }
            let qualified = format!("{driver}/{MEMORY}");
            let consumed = result.consumed_capacity.as_ref();
            let consumed = consumed.and_then(|all| all.get(MEMORY).or_else(|| all.get(&qualified)));
            let known = devices.get(&(result.pool.as_str(), result.device.as_str()));
            let total_mib = known.map_or(0, |(_, mib)| *mib);
            used.push(ClaimUse {
                node: result.pool.clone(),
                gpu: known.map_or_else(|| result.device.clone(), |(uuid, _)| uuid.clone()),
                namespace: claim.metadata.namespace.clone().unwrap_or_default(),
                name: claim.metadata.name.clone().unwrap_or_default(),
                pods: pods.clone(),
                // A device that isn't divided is consumed as a whole.
                memory_mib: consumed.and_then(amount).map_or(total_mib, |bytes| bytes >> 20),
                total_mib,
            });
        }
    }
    used.sort();
    used
}

/// A line for each; nothing, if there is none.
#[must_use]
pub fn claims_table(used: &[ClaimUse]) -> String {
    if used.is_empty() {
        return String::new();
    }
    let heads = ["NODE", "GPU", "CLAIM", "PODS", "GPU Memory(MiB)"].map(str::to_owned);
    let row = |claim: &ClaimUse| {
        let title = format!("{}/{}", claim.namespace, claim.name);
        let pods = claim.pods.iter().map(|pod| printable(pod)).collect::<Vec<_>>().join(",");
        let memory = format!("{}/{}", claim.memory_mib, claim.total_mib);
        vec![printable(&claim.node), printable(&claim.gpu), printable(&title), pods, memory]
    };
    let rows: Vec<Vec<String>> = [heads.to_vec()].into_iter().chain(used.iter().map(row)).collect();
    format!("\nBy claims:\n{}", aligned(&rows, &[]))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const DRIVER: &str = "gpu.cgpu.io";

    fn claim(name: &str, driver: &str, consumed: &Value) -> ResourceClaim {
        let result = json!({
            "request": "gpu", "driver": driver, "pool": "n1", "device": "gpu-a", "consumedCapacity": consumed,
        });
        serde_json::from_value(json!({
            "metadata": {"namespace": "team", "name": name},
            "spec": {},
            "status": {
                "allocation": {"devices": {"results": [result]}},
                "reservedFor": [{"resource": "pods", "name": format!("pod-of-{name}"), "uid": "u"}],
            },
        }))
        .unwrap()
    }

    #[test]
    fn claims_are_listed_by_node_and_gpu() {
        let slice: ResourceSlice = serde_json::from_value(json!({
            "metadata": {"name": "n1"},
            "spec": {
                "driver": DRIVER, "nodeName": "n1",
                "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
                "devices": [{
                    "name": "gpu-a", "attributes": {"uuid": {"string": "GPU-A"}},
                    "capacity": {"memory": {"value": "16000Mi"}},
                }],
            },
        }))
        .unwrap();
        let claims = [
            claim("b", DRIVER, &json!({"memory": "6Gi"})),
            claim("a", DRIVER, &Value::Null),
            claim("other", "gpu.nvidia.com", &Value::Null),
        ];
        let used = claim_use(&claims, std::slice::from_ref(&slice), DRIVER, None);
        assert_eq!(
            claims_table(&used),
            "
By claims:
NODE  GPU    CLAIM   PODS      GPU Memory(MiB)
n1    GPU-A  team/a  pod-of-a  16000/16000
n1    GPU-A  team/b  pod-of-b  6144/16000
"
        );
        assert_eq!(claim_use(&claims, &[slice], DRIVER, Some("n2")), []);
        let gone = claim_use(&claims, &[], DRIVER, None);
        assert_eq!(
            (gone[1].gpu.as_str(), gone[1].memory_mib, gone[1].total_mib),
            ("gpu-a", 6144, 0)
        );
        assert_eq!(claims_table(&[]), "");
    }
}
