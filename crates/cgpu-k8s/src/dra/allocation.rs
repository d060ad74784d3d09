//! What a claim was allocated, as a record of this node: [`record`]. Pure.

use std::collections::BTreeMap;

use cgpu_core::request::claim::{CLAIM_FORMAT, Claim, ClaimedGpu, Share};
use cgpu_core::units::MIB;
use cgpu_host::grants::{Given, GrantError};
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use thiserror::Error;

use super::devices::{CORES, MEMORY, NodeGpu, amount};
use crate::environment::weight;

/// What this node's claims are judged by.
#[derive(Debug, Clone, Copy)]
pub(super) struct NodeRules<'a> {
    pub(super) driver: &'a str,
    /// The node, which is the pool of its devices.
    pub(super) node: &'a str,
    pub(super) gpus: &'a [NodeGpu],
    /// The largest weight of a container.
    pub(super) most_weight: u32,
}

/// Why a claim isn't prepared; what `kubectl describe pod` shows.
#[derive(Debug, Error)]
pub(super) enum PrepareError {
    /// Another claim of its name, or none.
    #[error(
        "claim {claim} with UID {uid} is gone: delete the pod, so that its controller makes another"
    )]
    Gone { claim: String, uid: String },
    #[error("claim {claim} isn't allocated")]
    Unallocated { claim: String },
    #[error("claim {claim} is allocated on {pool}, and this is {node}")]
    OtherNode { claim: String, pool: String, node: String },
    /// Access to a device that others have.
    #[error(
        "request {request} of claim {claim} asks for adminAccess, and no GPU of cgpu's can be had past its quotas: take it out"
    )]
    Admin { claim: String, request: String },
    /// A device that isn't there.
    #[error(
        "claim {claim} is allocated {device}, and this node has no such GPU any more: delete the pod and its claim, so that \
         both are made again"
    )]
    NoGpu { claim: String, device: String },
    #[error("claim {claim} is allocated GPU {index} ({uuid}), and {fault}")]
    Fault { claim: String, index: u32, uuid: String, fault: String },
    /// MIG was switched on after it was allocated.
    #[error(
        "claim {claim} is allocated GPU {index} ({uuid}), which is in MIG mode and is used by its MIG devices alone: switch \
         MIG off, or delete the pod and its claim"
    )]
    Mig { claim: String, index: u32, uuid: String },
    /// The device plugin was faster.
    #[error(
        "claim {claim} is allocated GPU {index} ({uuid}), of which the device plugin has given {resource} to {pod}: a GPU is \
         given out by claims or by the device plugin, not by both; move that pod away, or stop the device plugin on this node"
    )]
    GivenByPlugin { claim: String, index: u32, uuid: String, resource: String, pod: String },
    #[error(
        "request {request} of claim {claim} consumes {text:?} of {capacity}, which is no amount"
    )]
    NoAmount { claim: String, request: String, capacity: String, text: String },
    /// More than the scheduler may give.
    #[error(
        "claim {claim} consumes {asked_mib} MiB of GPU {index} ({uuid}), which has {left_mib} MiB of {total_mib} MiB left: \
         {others}; delete the pod and its claim, so that it is allocated again"
    )]
    TooMuch {
        claim: String,
        index: u32,
        uuid: String,
        asked_mib: u64,
        left_mib: u64,
        total_mib: u64,
        /// Who has the rest.
        others: String,
    },
    #[error(transparent)]
    Records(#[from] GrantError),
    /// Any file or question that failed.
    #[error("{0}")]
    Failed(String),
}

/// The record of `claim`, as it is allocated on this node next to what is given already. A share that is in its old record
/// keeps its token; others get one of `token`.
///
/// # Errors
///
/// If it isn't allocated here, or what it is allocated can't be had.
pub(super) fn record(
    claim: &ResourceClaim,
    rules: &NodeRules<'_>,
    given: &Given,
    mut token: impl FnMut() -> String,
) -> Result<Claim, PrepareError> {
    let meta = &claim.metadata;
    let (namespace, name) =
        (meta.namespace.clone().unwrap_or_default(), meta.name.clone().unwrap_or_default());
    let (title, uid) = (format!("{namespace}/{name}"), meta.uid.clone().unwrap_or_default());
    let status = claim.status.as_ref();
    let allocation = status
        .and_then(|status| status.allocation.as_ref())
        .ok_or_else(|| PrepareError::Unallocated { claim: title.clone() })?;
    let results =
        allocation.devices.iter().filter_map(|devices| devices.results.as_ref()).flatten();
    let mut requests: BTreeMap<String, (Vec<ClaimedGpu>, u32)> = BTreeMap::new();
    for result in results.filter(|result| result.driver == rules.driver) {
        let (gpu, cores) = claimed(&title, result, rules)?;
        // Of a list of alternatives one was chosen: containers name the list.
        let request = result.request.split('/').next().unwrap_or_default();
        let entry = requests.entry(request.to_owned()).or_default();
        entry.0.push(gpu);
        entry.1 = entry.1.max(cores);
    }
    let old = given.claims.iter().find(|other| other.uid == uid);
    let shares = requests.into_iter().map(|(request, (gpus, cores))| {
        let known = old.and_then(|old| old.share(&request)).filter(|share| share.gpus == gpus);
        let token = known.map_or_else(&mut token, |share| share.token.clone());
        Share { request, token, gpus, weight: weight(cores, 1, rules.most_weight) }
    });
    let reserved = status.and_then(|status| status.reserved_for.as_ref());
    let pods = reserved.into_iter().flatten().filter(|user| user.resource == "pods");
    let record = Claim {
        format: CLAIM_FORMAT,
        namespace,
        name,
        uid,
        pods: pods.map(|user| user.uid.clone()).collect(),
        of_one_pod: meta
            .owner_references
            .iter()
            .flatten()
            .any(|owner| owner.kind == "Pod" && owner.controller == Some(true)),
        shares: shares.collect(),
    };
    require_left(&record, rules, given)?;
    Ok(record)
}

/// What one result gives, and how many per cent of the computing time.
fn claimed(
    claim: &str,
    result: &DeviceRequestAllocationResult,
    rules: &NodeRules<'_>,
) -> Result<(ClaimedGpu, u32), PrepareError> {
    let (claim, request) = (claim.to_owned(), result.request.clone());
    if result.pool != rules.node {
        let (pool, node) = (result.pool.clone(), rules.node.to_owned());
        return Err(PrepareError::OtherNode { claim, pool, node });
    }
    if result.admin_access == Some(true) {
        return Err(PrepareError::Admin { claim, request });
    }
    let Some(node_gpu) = rules.gpus.iter().find(|gpu| gpu.device_name() == result.device) else {
        return Err(PrepareError::NoGpu { claim, device: result.device.clone() });
    };
    let (index, uuid) = (node_gpu.gpu.index, node_gpu.gpu.uuid.clone());
    if let Some(fault) = node_gpu.fault() {
        return Err(PrepareError::Fault { claim, index, uuid, fault });
    }
    if node_gpu.gpu.mig_enabled {
        return Err(PrepareError::Mig { claim, index, uuid });
    }
    let consumed = |capacity: &str| -> Result<Option<u64>, PrepareError> {
        let all = result.consumed_capacity.as_ref();
        let qualified = format!("{}/{capacity}", rules.driver);
        let Some(quantity) = all.and_then(|all| all.get(capacity).or_else(|| all.get(&qualified)))
        else {
            return Ok(None);
        };
        let Quantity(text) = quantity;
        let unread = || PrepareError::NoAmount {
            claim: claim.clone(),
            request: request.clone(),
            capacity: capacity.to_owned(),
            text: text.chars().take(32).collect(),
        };
        amount(quantity).map(Some).ok_or_else(unread)
    };
    let total = node_gpu.divisible_mib() * MIB;
    // A device that the API server doesn't divide is a claim's as a whole.
    let bytes = consumed(MEMORY)?.unwrap_or(total);
    let cores = consumed(CORES)?.unwrap_or_default();
    let gpu = ClaimedGpu {
        uuid,
        bytes,
        whole: bytes >= total,
        pool: result.pool.clone(),
        device: result.device.clone(),
        share_id: result.share_id.clone(),
    };
    Ok((gpu, u32::try_from(cores).unwrap_or(u32::MAX)))
}

/// Sees that each GPU of `record` has as much left: two schedulers, or a status that somebody wrote, may exceed it.
fn require_left(record: &Claim, rules: &NodeRules<'_>, given: &Given) -> Result<(), PrepareError> {
    let gpus_of = |claim: &Claim| -> Vec<ClaimedGpu> {
        claim.shares.iter().flat_map(|share| share.gpus.clone()).collect()
    };
    let own = gpus_of(record);
    for node_gpu in rules.gpus {
        let (index, uuid) = (node_gpu.gpu.index, &node_gpu.gpu.uuid);
        let on_it = |gpus: &[ClaimedGpu]| -> u64 {
            let bytes = gpus.iter().filter(|gpu| gpu.uuid == *uuid).map(|gpu| gpu.bytes);
            bytes.fold(0, u64::saturating_add)
        };
        let asked = on_it(&own);
        if asked == 0 {
            continue;
        }
        let plugins =
            given.grants.iter().find(|grant| grant.gpus.iter().any(|gpu| gpu.uuid == *uuid));
        if let Some(grant) = plugins {
            let pod = grant.holder.as_ref().or(grant.candidates.first());
            return Err(PrepareError::GivenByPlugin {
                claim: record.title(),
                index,
                uuid: uuid.clone(),
                resource: grant.resource.clone(),
                pod: pod.map_or_else(|| "a pod".to_owned(), ToString::to_string),
            });
        }
        let others: Vec<(String, u64)> = given
            .claims
            .iter()
            .filter(|other| other.uid != record.uid)
            .map(|other| (other.title(), on_it(&gpus_of(other))))
            .filter(|(_, bytes)| *bytes > 0)
            .collect();
        let held = others.iter().map(|(_, bytes)| *bytes).fold(0, u64::saturating_add);
        let total = node_gpu.divisible_mib() * MIB;
        if asked > total.saturating_sub(held) {
            let list =
                others.iter().map(|(title, bytes)| format!("{title} has {} MiB", bytes / MIB));
            let list = list.collect::<Vec<_>>().join(", ");
            return Err(PrepareError::TooMuch {
                claim: record.title(),
                index,
                uuid: uuid.clone(),
                asked_mib: asked / MIB,
                left_mib: total.saturating_sub(held) / MIB,
                total_mib: total / MIB,
                others: if list.is_empty() { "no other claim has any".to_owned() } else { list },
            });
        }
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use cgpu_core::gpu::GpuState;
    use cgpu_core::request::Grant;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::super::devices::tests::{DRIVER, node_gpu};
    use super::*;

    const NODE: &str = "n1";

    /// A claim with these results of the allocator, as `(request, GPU, consumed)`.
    pub(crate) fn allocated(
        gpus: &[NodeGpu],
        uid: &str,
        results: &[(&str, usize, Value)],
    ) -> ResourceClaim {
        let result = |(request, at, consumed): &(&str, usize, Value)| {
            json!({
                "request": request, "driver": DRIVER, "pool": NODE, "device": gpus[*at].device_name(),
                "shareID": "a671734a-e8e5-11e4-8fde-42010af09327", "consumedCapacity": consumed,
            })
        };
        let results: Vec<Value> = results.iter().map(result).collect();
        serde_json::from_value(json!({
            "metadata": {"namespace": "team", "name": format!("c-{uid}"), "uid": uid},
            "spec": {},
            "status": {
                "allocation": {"devices": {"results": results}},
                "reservedFor": [{"resource": "pods", "name": "p", "uid": "pod-1"}],
            },
        }))
        .unwrap()
    }

    fn gpus() -> Vec<NodeGpu> {
        vec![node_gpu(0, "aaa", 16_000), node_gpu(1, "bbb", 24_000)]
    }

    fn nothing() -> Given {
        Given { claims: Vec::new(), grants: Vec::new() }
    }

    fn judged(
        claim: &ResourceClaim,
        gpus: &[NodeGpu],
        given: &Given,
    ) -> Result<Claim, PrepareError> {
        let rules = NodeRules { driver: DRIVER, node: NODE, gpus, most_weight: 20 };
        let mut tokens = (100 * given.claims.len()..).map(|at| format!("{at:032x}"));
        record(claim, &rules, given, || tokens.next().unwrap())
    }

    #[test]
    fn a_claim_is_recorded_as_it_was_allocated() {
        let gpus = gpus();
        let results = [
            ("small", 0, json!({"memory": "4Gi", "cores": "0"})),
            ("any/big", 1, json!({"gpu.cgpu.io/memory": "24000Mi", "gpu.cgpu.io/cores": "50"})),
            ("any/big", 0, json!({"memory": "1Mi"})),
        ];
        let mut claim = allocated(&gpus, "u1", &results);
        let others =
            json!({"request": "nic", "driver": "net.example.com", "pool": "x", "device": "y"});
        let allocation = claim.status.as_mut().unwrap().allocation.as_mut().unwrap();
        let list = allocation.devices.as_mut().unwrap().results.as_mut().unwrap();
        list.push(serde_json::from_value(others).unwrap());
        let found = judged(&claim, &gpus, &nothing()).unwrap();
        let shares: Vec<_> = found
            .shares
            .iter()
            .map(|share| {
                let gpus =
                    share.gpus.iter().map(|gpu| (gpu.bytes / MIB, gpu.whole)).collect::<Vec<_>>();
                (share.request.as_str(), gpus, share.weight)
            })
            .collect();
        assert_eq!(
            shares,
            [
                ("any", vec![(24_000, true), (1, false)], Some(10)),
                ("small", vec![(4096, false)], None),
            ]
        );
        assert_eq!(
            (found.pods.as_slice(), found.title().as_str()),
            (&["pod-1".to_owned()][..], "team/c-u1")
        );
        // Asked again, the answer is the same; another allocation has another token.
        let given = Given { claims: vec![found.clone()], ..nothing() };
        assert_eq!(judged(&claim, &gpus, &given).unwrap(), found);
        let other = allocated(&gpus, "u1", &[("small", 0, json!({"memory": "5Gi"}))]);
        let changed = judged(&other, &gpus, &given).unwrap();
        assert_ne!(changed.share("small").unwrap().token, found.share("small").unwrap().token);
    }

    #[test]
    fn a_device_that_is_not_divided_is_whole() {
        let gpus = gpus();
        let found = judged(&allocated(&gpus, "u1", &[("a", 0, Value::Null)]), &gpus, &nothing());
        let gpu = found.unwrap().shares[0].gpus[0].clone();
        assert_eq!((gpu.bytes / MIB, gpu.whole), (16_000, true));
    }

    #[test]
    fn what_cannot_be_had_is_refused_in_words() {
        let good = gpus();
        let one = |consumed| allocated(&good, "u1", &[("a", 0, consumed)]);
        let plain = one(json!({"memory": "4Gi"}));
        let said = |claim: &ResourceClaim, gpus: &[NodeGpu], given: &Given| {
            judged(claim, gpus, given).unwrap_err().to_string()
        };
        let edited = |edit: fn(&mut ResourceClaim)| {
            let mut claim = plain.clone();
            edit(&mut claim);
            said(&claim, &good, &nothing())
        };
        fn result(claim: &mut ResourceClaim) -> &mut DeviceRequestAllocationResult {
            let allocation = claim.status.as_mut().unwrap().allocation.as_mut().unwrap();
            &mut allocation.devices.as_mut().unwrap().results.as_mut().unwrap()[0]
        }
        let mut lost = good.clone();
        lost[0].gpu.state = GpuState::Lost;
        let broken = [NodeGpu { xid: Some(79), ..good[0].clone() }];
        let mut mig = good.clone();
        mig[0].gpu.mig_enabled = true;
        let grant: Grant = serde_json::from_value(json!({
            "format": 1, "token": "", "resource": "aliyun.com/gpu-mem", "devices": [], "unenforced": false,
            "gpus": [{"uuid": good[0].gpu.uuid, "bytes": 1}], "candidates": [], "variables": {},
            "holder": {"namespace": "default", "pod": "p", "uid": "u", "container": "main"},
        }))
        .unwrap();
        let other = judged(
            &allocated(&good, "u0", &[("a", 0, json!({"memory": "12000Mi"}))]),
            &good,
            &nothing(),
        );
        let held = Given { claims: vec![other.unwrap()], ..nothing() };
        for (reported, parts) in [
            (edited(|claim| claim.status = None), &["claim team/c-u1 isn't allocated"][..]),
            (
                edited(|claim| result(claim).pool = "n2".to_owned()),
                &["allocated on n2", "this is n1"],
            ),
            (
                edited(|claim| result(claim).admin_access = Some(true)),
                &["request a of", "adminAccess"],
            ),
            (edited(|claim| result(claim).device = "gpu-x".to_owned()), &["gpu-x", "no such GPU"]),
            (said(&plain, &lost, &nothing()), &["GPU 0 (GPU-", "can't reach it"]),
            (said(&plain, &broken, &nothing()), &["GPU 0", "Xid 79"]),
            (said(&plain, &mig, &nothing()), &["GPU 0", "MIG mode"]),
            (said(&one(json!({"memory": "much"})), &good, &nothing()), &["\"much\" of memory"]),
            (
                said(&one(json!({"memory": "16001Mi"})), &good, &nothing()),
                &["16001 MiB", "no other claim"],
            ),
            (
                said(&plain, &good, &held),
                &["4096 MiB", "4000 MiB of 16000 MiB left: team/c-u0 has 12000 MiB"],
            ),
            (
                said(&plain, &good, &Given { grants: vec![grant], ..nothing() }),
                &[
                    "aliyun.com/gpu-mem to container main of pod default/p",
                    "by the device plugin, not by both",
                ],
            ),
        ] {
            for part in parts {
                assert!(reported.contains(part), "{reported}");
            }
        }
    }

    proptest! {
        /// Whatever claims come and go in whatever order: never more is given of a GPU than it has, and each has
        /// exactly what it consumes.
        #[test]
        fn never_more_is_given_than_a_gpu_has(
            moves in proptest::collection::vec((0_u8..6, 0_usize..2, 1_u64..20_000, any::<bool>()), 1..40),
        ) {
            let gpus = gpus();
            let mut given = nothing();
            for (uid, at, mib, comes) in moves {
                let uid = format!("u{uid}");
                given.claims.retain(|claim| comes || claim.uid != uid);
                if !comes {
                    continue;
                }
                let claim = allocated(&gpus, &uid, &[("a", at, json!({"memory": format!("{mib}Mi")}))]);
                let held = |claims: &[Claim], but: &str| -> u64 {
                    let others = claims.iter().filter(|claim| claim.uid != but);
                    let on_it = others.flat_map(|claim| &claim.shares).flat_map(|share| &share.gpus);
                    on_it.filter(|gpu| gpu.uuid == gpus[at].gpu.uuid).map(|gpu| gpu.bytes / MIB).sum()
                };
                let fits = held(&given.claims, &uid) + mib <= gpus[at].divisible_mib();
                match judged(&claim, &gpus, &given) {
                    Ok(record) => {
                        prop_assert!(fits);
                        prop_assert_eq!(record.shares[0].gpus[0].bytes / MIB, mib);
                        given.claims.retain(|claim| claim.uid != uid);
                        given.claims.push(record);
                    }
                    Err(error) => prop_assert!(!fits, "{error}"),
                }
                prop_assert!(held(&given.claims, "") <= gpus[at].divisible_mib());
            }
        }
    }
}
