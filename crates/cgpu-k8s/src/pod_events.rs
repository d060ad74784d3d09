//! What is reported to pods by events of theirs: that no plugin gives what they ask for, that a setting counts for
//! nothing, that their GPU is gone.
//!
//! An event bears a name made of its pod and its words, so that the same is reported once, by whichever program.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};
use std::time::Duration;

use anyhow::{Context, Result};
use cgpu_host::events::{Event as Happened, Follower, Kind, Store};
use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::api::{Api, PostParams};
use tokio::time::sleep;

use crate::cluster::{Cluster, in_time};
use crate::complaint::Complaint;
use crate::plugin::Plugin;
use crate::pod_request::AskRules;
use crate::pods::{lost, named};

/// Why a pod gets nothing, in a word.
pub(crate) const REFUSED: &str = "CgpuRefused";

/// What the runtime warns of, in a word.
const WARNED: &str = "CgpuWarning";

/// That a GPU is gone, in a word.
const LOST: &str = "CgpuGpuGone";

/// How often it is checked what there is to report.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// After how many polls the pods are checked.
const CHECKS: u32 = 5;

/// How often, one after another, a pod's GPU has to be gone then: a driver that is loaded again has none for a moment.
const TIMES_GONE: u32 = 3;

/// How old an event of the runtime's may be that a plugin finds at its start.
const OLDEST: Duration = Duration::from_secs(600);

/// Most characters of a message (`NoteLengthLimit` of Kubernetes' validation, in bytes).
const MOST_MESSAGE: usize = 1000;

/// The component that reports.
#[derive(Debug, Clone)]
pub(crate) struct By {
    component: &'static str,
    node: Option<String>,
}

impl By {
    pub(crate) fn extender() -> Self {
        By { component: "cgpu-scheduler-extender", node: None }
    }

    fn plugin(node: &str) -> Self {
        By { component: "cgpu-device-plugin", node: Some(node.to_owned()) }
    }
}

/// A warning to a pod. The same words of the same pod make the same name.
pub(crate) fn warning(pod: &Pod, reason: &str, message: &str, by: &By) -> Event {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let (name, uid) = (text(&pod.metadata.name), text(&pod.metadata.uid));
    let mut hasher = DefaultHasher::new();
    (&uid, reason, message).hash(&mut hasher);
    // A name may have 253 characters, and a pod's has as many.
    let stem: String = name.chars().take(200).collect();
    let stem = stem.trim_end_matches(['.', '-']);
    let now = Time(Timestamp::now());
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{stem}.{:016x}", hasher.finish())),
            namespace: pod.metadata.namespace.clone(),
            ..ObjectMeta::default()
        },
        involved_object: ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(name),
            namespace: pod.metadata.namespace.clone(),
            uid: Some(uid),
            ..ObjectReference::default()
        },
        type_: Some("Warning".to_owned()),
        reason: Some(reason.to_owned()),
        message: Some(message.chars().take(MOST_MESSAGE).collect()),
        source: Some(EventSource {
            component: Some(by.component.to_owned()),
            host: by.node.clone(),
        }),
        count: Some(1),
        first_timestamp: Some(now.clone()),
        last_timestamp: Some(now),
        ..Event::default()
    }
}

/// Writes an event, unless it is there already.
pub(crate) async fn report_to_pod(client: &Client, event: &Event) -> Result<()> {
    let namespace = event.metadata.namespace.as_deref().unwrap_or_default();
    let events = Api::<Event>::namespaced(client.clone(), namespace);
    let made = async {
        match events.create(&PostParams::default(), event).await {
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            made => Ok(made.map(drop)?),
        }
    };
    in_time(made).await.context("an event can't be written")
}

/// Reports to the pods of this node what concerns them, until it is dropped.
pub(crate) async fn keep_reporting(cluster: Cluster, plugin: Plugin, store: Store) {
    let by = By::plugin(cluster.node_name());
    let mut complaint = Complaint::default();
    let mut follower = None;
    let mut waiting: Vec<Happened> = Vec::new();
    let mut reported = BTreeSet::new();
    let mut gone: BTreeMap<String, u32> = BTreeMap::new();
    for check in 0_u32.. {
        if check > 0 {
            sleep(POLL_INTERVAL).await;
        }
        match heard(&mut follower, &store) {
            Ok(events) => waiting.extend(events),
            Err(error) => {
                complaint.report(format!("cannot report to pods what is in {store:?}: {error}"))
            }
        }
        if waiting.is_empty() && !check.is_multiple_of(CHECKS) {
            continue;
        }
        let pods = match cluster.pods().await {
            Ok(pods) => pods,
            Err(error) => {
                complaint.report(format!("cannot report to pods what concerns them: {error:#}"));
                continue;
            }
        };
        let mut events = of_runtime(&waiting, &pods, &by);
        waiting.clear();
        if check.is_multiple_of(CHECKS) {
            events.extend(of_asks(&pods, &plugin.rules().asks, &by));
            events.extend(of_lost(&plugin, &pods, &mut gone, &by));
        }
        reported.retain(|(uid, _)| pods.iter().any(|pod| pod.metadata.uid.as_ref() == Some(uid)));
        for event in events {
            let key = (
                event.involved_object.uid.clone().unwrap_or_default(),
                event.metadata.name.clone().unwrap_or_default(),
            );
            if reported.contains(&key) {
                continue;
            }
            match cluster.report(&event).await {
                Ok(()) => drop(reported.insert(key)),
                Err(error) => complaint.report(format!("{}: {error:#}", key.1)),
            }
        }
    }
}

/// What the runtime warned of since it was asked last; at first of what isn't long ago.
fn heard(follower: &mut Option<Follower>, store: &Store) -> std::io::Result<Vec<Happened>> {
    let follower = match follower {
        Some(follower) => follower,
        none => none.insert(Follower::new(store.clone())?),
    };
    let since = u128::try_from(Timestamp::now().as_microsecond()).unwrap_or_default();
    let since = since.saturating_sub(OLDEST.as_micros());
    let is_new = |event: &Happened| event.kind == Kind::Warned && u128::from(event.at_us) >= since;
    Ok(follower.read()?.into_iter().filter(is_new).collect())
}

/// The warnings that are of containers of these pods. The runtime calls those `NAMESPACE/POD/CONTAINER`.
fn of_runtime(happened: &[Happened], pods: &[Pod], by: &By) -> Vec<Event> {
    let of = |event: &Happened| {
        let mut names = event.name.as_deref()?.split('/');
        let (namespace, name, container) = (names.next()?, names.next()?, names.next()?);
        let pod = named(pods, namespace, name)?;
        let reason = event.reason.as_deref()?;
        Some(warning(pod, WARNED, &format!("container {container}: {reason}"), by))
    };
    happened.iter().filter_map(of).collect()
}

/// What is reported to pods that ask for nothing which the kubelet would ask us for.
fn of_asks(pods: &[Pod], asks: &AskRules, by: &By) -> Vec<Event> {
    let of = |pod: &Pod| {
        let ended = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        let has_ended = matches!(ended, Some("Succeeded" | "Failed"));
        let why = (!has_ended && !asks.is_given(pod)).then(|| asks.refused(pod)).flatten()?;
        Some(warning(pod, REFUSED, &why, by))
    };
    pods.iter().filter_map(of).collect()
}

/// What is reported to pods whose GPU is gone, which the plugin learns of too. `gone` has, by UID, how often that was
/// so.
fn of_lost(plugin: &Plugin, pods: &[Pod], gone: &mut BTreeMap<String, u32>, by: &By) -> Vec<Event> {
    let Some(held) = plugin.held() else { return Vec::new() };
    let lost = lost(&held, &plugin.gpus(), &plugin.rules().asks, pods);
    let uid = |pod: &Pod| pod.metadata.uid.clone().unwrap_or_default();
    *gone = lost
        .iter()
        .map(|(pod, ..)| (uid(pod), gone.get(&uid(pod)).copied().unwrap_or_default() + 1))
        .collect();
    let is_gone = |pod: &Pod| gone.get(&uid(pod)).is_some_and(|times| *times >= TIMES_GONE);
    let full_name = |pod: &Pod| {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        format!("{}/{}", text(&pod.metadata.namespace), text(&pod.metadata.name))
    };
    let gone_now = lost.iter().map(|(pod, ..)| *pod).filter(|pod| is_gone(pod));
    plugin.set_lost(gone_now.map(|pod| (uid(pod), full_name(pod))).collect());
    let event = |(pod, container, device): &(&Pod, String, String)| {
        let message = format!(
            "container {container} was given something of a GPU that is no longer on this node ({device}); delete the pod, \
             so that its controller makes another"
        );
        warning(pod, LOST, &message, by)
    };
    lost.iter().filter(|(pod, ..)| is_gone(pod)).map(event).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(name: &str, limits: &Value) -> Pod {
        let container = json!({"name": "main", "resources": {"limits": limits}});
        let metadata = json!({"name": name, "namespace": "team", "uid": format!("uid-{name}")});
        serde_json::from_value(json!({"metadata": metadata, "spec": {"containers": [container]}}))
            .unwrap()
    }

    fn by() -> By {
        By::plugin("node1")
    }

    /// The same words to the same pod are one event.
    #[test]
    fn repeated_warning_to_a_pod_is_one_event() {
        let (one, long) = (pod("one", &json!({})), pod(&"x.".repeat(126), &json!({})));
        let name = |pod: &Pod, words| warning(pod, WARNED, words, &by()).metadata.name.unwrap();
        assert_eq!(name(&one, "a"), name(&one, "a"));
        assert_ne!(name(&one, "a"), name(&one, "b"));
        assert_ne!(name(&one, "a"), name(&pod("two", &json!({})), "a"));
        assert!(name(&one, "a").starts_with("one."));
        assert!(name(&long, "a").len() < 253 && !name(&long, "a").contains(".."));
        let event = warning(&one, WARNED, &"y".repeat(5000), &by());
        assert_eq!(event.message.unwrap().len(), MOST_MESSAGE);
        assert_eq!(event.involved_object.uid.as_deref(), Some("uid-one"));
    }

    #[test]
    fn runtime_warnings_reach_the_containers_pod() {
        let pods = [pod("one", &json!({})), pod("two", &json!({}))];
        let happened = |name: Option<&str>| {
            Happened::new(Kind::Warned).of("1", name, "/run").because("x counts for nothing")
        };
        let all = [Some("team/two/main"), Some("team/three/main"), Some("two"), None].map(happened);
        let reported = of_runtime(&all, &pods, &by());
        let reported: Vec<_> = reported
            .iter()
            .map(|event| (event.involved_object.name.as_deref(), event.message.as_deref()))
            .collect();
        assert_eq!(reported, [(Some("two"), Some("container main: x counts for nothing"))]);
    }

    /// A pod whose limits make the kubelet ask no plugin gets a warning.
    #[test]
    fn pods_the_kubelet_never_asks_for_are_warned() {
        let pods = [
            pod("percent", &json!({"aliyun.com/gpu-core.percentage": "30"})),
            // The kubelet asks for that, and gets the reason then.
            pod("counted", &json!({"aliyun.com/gpu-mem": "3", "aliyun.com/gpu-count": "1"})),
            pod("plain", &json!({"aliyun.com/gpu-mem": "3"})),
            pod("none", &json!({})),
        ];
        let reported = of_asks(&pods, &AskRules::default(), &by());
        let reported: Vec<_> =
            reported.iter().map(|event| event.involved_object.name.as_deref().unwrap()).collect();
        assert_eq!(reported, ["percent"]);
    }
}
