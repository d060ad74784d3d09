//! What a container is given, as a record for the runtime: the creator of a pod or an image can write the variables of
//! the answer to the kubelet, and not the record. And how long a record lives.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::time::Duration;

use anyhow::Result;
use cgpu_core::request::Grant;
use cgpu_core::request::grant::{FORMAT, GrantedGpu, PodContainer as Holder, TOKEN};
use cgpu_host::grants::Grants;
use k8s_openapi::api::core::v1::Pod;
use tokio::time::sleep;
use tracing::info;

use crate::cluster::Cluster;
use crate::complaint::Complaint;
use crate::environment::{ContainerFacts, environment, weight, whole_environment};
use crate::node::said;
use crate::placement::parts;
use crate::plugin::Plugin;
use crate::pods::{PodContainer, holdings, named, of_pod};
use crate::units::{SharedGpu, Unit};

/// How often it is checked which pods are gone.
const POLL_INTERVAL: Duration = Duration::from_secs(5);

/// In how many polls, one after another, a pod has to be gone before the API server is asked what is so now.
const CHECKS: u32 = 2;

/// The memory of each GPU that `parts` are, in bytes: what the variables of [`environment`] come to.
#[must_use]
pub fn memory(parts: &[(&SharedGpu, u32)], unit: Unit) -> Vec<GrantedGpu> {
    let alike = parts.windows(2).all(|pair| pair[0].0.whole_units == pair[1].0.whole_units);
    let mib = |gpu: &SharedGpu, units: u32| match alike {
        true => gpu.memory_mib * u64::from(units) / u64::from(gpu.whole_units.max(1)),
        false => (u64::from(units) * unit.bytes()) >> 20,
    };
    let granted = |(gpu, units): &(&SharedGpu, u32)| GrantedGpu {
        uuid: gpu.uuid.clone(),
        bytes: Some(mib(gpu, *units) << 20),
    };
    parts.iter().map(granted).collect()
}

/// Exclusive GPUs.
#[must_use]
pub fn whole(uuids: &[String]) -> Vec<GrantedGpu> {
    uuids.iter().map(|uuid| GrantedGpu { uuid: uuid.clone(), bytes: None }).collect()
}

/// What is given in addition to the GPUs.
#[derive(Debug, Clone, Default)]
pub struct GrantDetails {
    pub resource: String,
    /// The devices by which the kubelet counts it.
    pub devices: Vec<String>,
    /// The weight in sharing compute.
    pub weight: Option<u32>,
    /// Whether the container's memory quota is not to be enforced.
    pub unenforced: bool,
    /// The containers that can be meant.
    pub candidates: Vec<Holder>,
    /// The container that it is for, if that is known.
    pub holder: Option<Holder>,
}

/// A new grant of `gpus`, by a token that can't be guessed; `variables` get that token.
///
/// # Errors
///
/// If the kernel gives no random bytes.
pub fn new(
    gpus: Vec<GrantedGpu>,
    beside: GrantDetails,
    variables: &mut BTreeMap<String, String>,
) -> io::Result<Grant> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    let token: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    variables.insert(TOKEN.to_owned(), token.clone());
    let GrantDetails { resource, devices, weight, unenforced, candidates, holder } = beside;
    let variables = variables.clone();
    let format = FORMAT;
    Ok(Grant {
        format,
        token,
        resource,
        devices,
        gpus,
        weight,
        unenforced,
        candidates,
        holder,
        variables,
        shares: Vec::new(),
    })
}

/// The containers of `pods` that the kubelet reports to have something, with the uid of their pod. One of another pod
/// of that name, which is gone, isn't among them.
fn holder(pods: &[Pod], of: &PodContainer) -> Option<(Holder, Pod)> {
    let pod = named(pods, &of.namespace, &of.pod)?;
    let holder = Holder {
        namespace: of.namespace.clone(),
        pod: of.pod.clone(),
        uid: pod.metadata.uid.clone()?,
        container: of.container.clone(),
    };
    Some((holder, pod.clone()))
}

/// Writes records for containers that have something and no record: those of a plugin before, whose answers the kubelet
/// doesn't ask for again.
///
/// # Errors
///
/// If API server or kubelet can't be asked, or a record not written.
async fn adopt(cluster: &Cluster, plugin: &Plugin, grants: &Grants) -> Result<()> {
    let Some(held) = plugin.held() else {
        anyhow::bail!("the kubelet has not reported which containers have what")
    };
    let (node, pods) = tokio::try_join!(cluster.node(), cluster.latest_pods())?;
    let (is_free, _) = said(&node.metadata.labels.unwrap_or_default());
    let rules = plugin.rules();
    let gpus = plugin.gpus();
    for (of, ids) in holdings(&held, &rules.asks.memory) {
        let Some((holder, pod)) = holder(&pods, &of) else { continue };
        if grants.find(None, Some(&holder))?.is_some() {
            continue;
        }
        // Units of a GPU that is gone belong to no container.
        let Ok(parts) = parts(&gpus, &ids) else { continue };
        let device_request = of_pod(&pod, &rules.asks.memory, &rules.asks, rules.unit)
            .into_iter()
            .find(|device_request| device_request.of == of);
        let known = ContainerFacts {
            pod_units: device_request.as_ref().map(|device_request| device_request.pod_units),
            weight: device_request.and_then(|device_request| {
                weight(device_request.percent, parts.len(), rules.most_weight)
            }),
            is_free: is_free || rules.disable_isolation,
        };
        let Ok(mut variables) = environment(&parts, rules.unit, &known) else { continue };
        let beside = GrantDetails {
            resource: rules.asks.memory.clone(),
            devices: ids.into_iter().collect(),
            weight: known.weight,
            unenforced: known.is_free,
            candidates: Vec::new(),
            holder: Some(holder.clone()),
        };
        grants.give(&new(memory(&parts, rules.unit), beside, &mut variables)?)?;
        info!(container = %holder, "what it has is recorded");
    }
    for (of, ids) in holdings(&held, &rules.asks.whole) {
        let Some((holder, _)) = holder(&pods, &of) else { continue };
        if grants.find(None, Some(&holder))?.is_some() {
            continue;
        }
        let uuids: Vec<String> = ids.into_iter().collect();
        let beside = GrantDetails {
            resource: rules.asks.whole.clone(),
            devices: uuids.clone(),
            holder: Some(holder.clone()),
            ..GrantDetails::default()
        };
        grants.give(&new(whole(&uuids), beside, &mut whole_environment(&uuids))?)?;
        info!(container = %holder, "what it has is recorded");
    }
    Ok(())
}

/// Whether a grant has pods, by uid, and none of them is among `here`. A grant that may be any pod's has not ended.
fn has_ended(grant: &Grant, here: &BTreeSet<String>) -> bool {
    let mut pods = grant
        .holder
        .iter()
        .chain(grant.candidates.iter().filter(|_| grant.holder.is_none()))
        .peekable();
    pods.peek().is_some() && pods.all(|container| !here.contains(&container.uid))
}

/// Records what running containers have, and ends the records of pods that are gone from this node, until it is
/// dropped.
pub(crate) async fn keep_grants(cluster: Cluster, plugin: Plugin, grants: Grants) {
    let (mut complaint, mut is_adopted) = (Complaint::default(), false);
    // By token, in how many polls the pods were gone.
    let mut gone: BTreeMap<String, u32> = BTreeMap::new();
    loop {
        if !is_adopted {
            match adopt(&cluster, &plugin, &grants).await {
                Ok(()) => is_adopted = true,
                Err(error) => {
                    complaint.report(format!("running pods aren't recorded yet: {error:#}"))
                }
            }
        }
        match end_gone(&cluster, &grants, &mut gone).await {
            Ok(ended) if ended > 0 => info!(ended, "grants of pods that are gone are ended"),
            Ok(_) => {}
            Err(error) => complaint.report(format!("grants of pods that are gone stay: {error:#}")),
        }
        sleep(POLL_INTERVAL).await;
    }
}

async fn end_gone(
    cluster: &Cluster,
    grants: &Grants,
    gone: &mut BTreeMap<String, u32>,
) -> Result<usize> {
    if grants.all()?.is_empty() {
        gone.clear();
        return Ok(0);
    }
    let uids = |pods: Vec<Pod>| -> BTreeSet<String> {
        pods.into_iter().filter_map(|pod| pod.metadata.uid).collect()
    };
    let here = uids(cluster.pods().await?);
    let over = grants.all()?.into_iter().filter(|grant| has_ended(grant, &here));
    let now =
        over.map(|grant| (gone.get(&grant.token).copied().unwrap_or_default() + 1, grant.token));
    *gone = now.map(|(checks, token)| (token, checks)).collect();
    if gone.values().all(|checks| *checks < CHECKS) {
        return Ok(0);
    }
    // What it has at hand may be old: before a record ends it is asked what is so now.
    let here = uids(cluster.latest_pods().await?);
    let ended = grants.end(|grant| gone.contains_key(&grant.token) && has_ended(grant, &here))?;
    Ok(ended.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::shared;
    use crate::units::tests::gpu;

    #[test]
    fn bytes_are_what_the_variables_come_to() {
        let gpus =
            [gpu(0, "aaa", 16130 << 20), gpu(1, "bbb", 16130 << 20), gpu(2, "ccc", 24 << 30)];
        let gpus = shared(&gpus, Unit::GiB).unwrap();
        let mib = |parts: &[(usize, u32)]| {
            let parts: Vec<_> = parts.iter().map(|(at, units)| (&gpus[*at], *units)).collect();
            let granted = memory(&parts, Unit::GiB);
            granted.iter().map(|gpu| gpu.bytes.unwrap() >> 20).collect::<Vec<_>>()
        };
        assert_eq!(mib(&[(0, 6)]), [6452], "6 of 15");
        assert_eq!(mib(&[(0, 2), (1, 2)]), [2150, 2150]);
        assert_eq!(mib(&[(0, 2), (2, 2)]), [2048, 2048], "GPUs of different sizes: so many units");
    }

    #[test]
    fn grant_ends_once_none_of_its_pods_remains() {
        let container = |uid: &str| Holder {
            namespace: "default".to_owned(),
            pod: "p".to_owned(),
            uid: uid.to_owned(),
            container: "main".to_owned(),
        };
        let here: BTreeSet<String> = ["b".to_owned()].into();
        let grant = |candidates: &[&str], holder: Option<&str>| {
            let beside = GrantDetails {
                candidates: candidates.iter().map(|uid| container(uid)).collect(),
                holder: holder.map(container),
                ..GrantDetails::default()
            };
            new(Vec::new(), beside, &mut BTreeMap::new()).unwrap()
        };
        assert!(!has_ended(&grant(&["a", "b"], None), &here));
        assert!(has_ended(&grant(&["a"], None), &here));
        assert!(has_ended(&grant(&["a", "b"], Some("a")), &here), "the other one has its own");
        assert!(!has_ended(&grant(&["a"], Some("b")), &here));
        assert!(!has_ended(&grant(&[], None), &here), "its pod is not known");
        let one = grant(&["a"], None);
        assert!(cgpu_core::request::grant::is_token(&one.token));
        assert_ne!(one.token, grant(&["a"], None).token);
    }
}
