//! Reports to the fleet what the API server has of nodes and pods, for as long as this replica serves.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Debug;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, EvictParams, Preconditions};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_stream::StreamExt;
use tracing::{debug, info};

use super::bind::Binder;
use super::fleet::{Fleet, FleetRules, PodName};
use crate::annotations::shares;
use crate::cluster::{annotate, in_time};
use crate::complaint::Complaint;
use crate::node::Given;
use crate::pod_events::{By, REFUSED, report_to_pod, warning};
use crate::pod_request::{AskRules, PodAsk};

/// How long an eviction waits for the next one: of what is refused, as by a disruption budget, it is tried again.
const BETWEEN_EVICTIONS: Duration = Duration::from_secs(10);

/// How long a pod waits on which something was just written.
const BETWEEN_WRITES: Duration = Duration::from_secs(10);

/// How often it is checked what there is to write.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// What was heard, of either kind.
enum Heard {
    Node(Box<Event<Node>>),
    Pod(Box<Event<Pod>>),
}

/// What is seen to in addition to the scheduler's questions.
pub(crate) struct SeesTo {
    pub(crate) client: Client,
    /// Whether pods are evicted whose GPU is gone.
    pub(crate) evicts_lost: bool,
}

/// Lists and watches all nodes and pods, and serves once both lists are complete. Until it is dropped.
pub(crate) async fn follow(sees_to: &SeesTo, binder: Arc<Binder>, rules: FleetRules) {
    let client = &sees_to.client;
    let evict = async {
        match sees_to.evicts_lost {
            true => evict_lost(client, &binder).await,
            false => std::future::pending().await,
        }
    };
    let memory = rules.asks.memory.clone();
    let write = write_given(client, &binder, &memory);
    let (reported, mut to_report) = mpsc::channel::<Box<Pod>>(1000);
    let asks = rules.asks.clone();
    let report_to_pods = async {
        let mut complaint = Complaint::default();
        while let Some(pod) = to_report.recv().await {
            let Some(why) = asks.refused(&pod) else { continue };
            let event = warning(&pod, REFUSED, &why, &By::extender());
            if let Err(error) = report_to_pod(client, &event).await {
                complaint.report(format!("cannot report to a pod why it is refused: {error:#}"));
            }
        }
    };
    // Bounded: what comes faster than it is taken in waits in the connection.
    let (heard, mut inbox) = mpsc::channel(1000);
    let nodes = listen(Api::<Node>::all(client.clone()), heard.clone(), |event| {
        Heard::Node(Box::new(event))
    });
    let pods = listen(Api::<Pod>::all(client.clone()), heard, |event| Heard::Pod(Box::new(event)));
    let rules_of_pods = rules.asks.clone();
    let take_in = async {
        let mut fleet = Some(Fleet::new(rules));
        let (mut has_nodes, mut has_pods) = (None, None);
        let (mut nodes, mut pods) = (Listed::default(), Listed::default());
        let mut refused = HashSet::new();
        while let Some(heard) = inbox.recv().await {
            if let Heard::Pod(event) = &heard
                && let Some(pod) = unasked(event, &rules_of_pods, &mut refused)
            {
                // If there are more than it holds they go unreported; no scheduler waits for them.
                let _ = reported.try_send(pod);
            }
            let report = |fleet: &mut Fleet| match heard {
                Heard::Node(event) => {
                    update_node(fleet, *event, &mut nodes).then(|| has_nodes = Some(()))
                }
                Heard::Pod(event) => {
                    update_pod(fleet, *event, &mut pods).then(|| has_pods = Some(()))
                }
            };
            match &mut fleet {
                Some(fleet) => report(fleet),
                None => binder.with_fleet(report).unwrap_or_default(),
            };
            if has_nodes.and(has_pods).is_some() && fleet.is_some() {
                info!("all nodes and pods are known; serving");
                binder.set_fleet(fleet.take());
            }
        }
    };
    tokio::join!(nodes, pods, take_in, report_to_pods, evict, write);
}

/// The pod of `event`, if it asks for what it can't have, no scheduler will ask us about it, and it isn't among those
/// that were `reported` of.
fn unasked(
    event: &Event<Pod>,
    asks: &AskRules,
    reported: &mut HashSet<String>,
) -> Option<Box<Pod>> {
    let pod = match event {
        Event::Apply(pod) | Event::InitApply(pod) => pod,
        Event::Delete(pod) => {
            reported.remove(pod.metadata.uid.as_deref()?);
            return None;
        }
        Event::Init | Event::InitDone => return None,
    };
    let is_placed = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
    // A pod that is on a node gets the report of its node's plugin.
    let is_meant = !is_placed && !asks.is_asked_for(pod) && asks.refused(pod).is_some();
    (is_meant && reported.insert(pod.metadata.uid.clone()?)).then(|| Box::new(pod.clone()))
}

/// Evicts pods that have something of a GPU which is gone, as often as they are seen.
async fn evict_lost(client: &Client, binder: &Binder) {
    let mut complaint = Complaint::default();
    loop {
        for pod in binder.with_fleet(|fleet| fleet.lost()).unwrap_or_default() {
            let pods = Api::<Pod>::namespaced(client.clone(), &pod.namespace);
            let here = in_time(async { Ok(pods.get_opt(&pod.name).await?) }).await;
            if !here.is_ok_and(|here| here.as_ref().is_some_and(|here| is_its(here, &pod))) {
                continue;
            }
            let preconditions = Preconditions { uid: Some(pod.uid), resource_version: None };
            let how =
                DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
            let how = EvictParams { delete_options: Some(how), ..EvictParams::default() };
            let evicted = async { Ok(pods.evict(&pod.name, &how).await?) };
            let pod = format!("{}/{}", pod.namespace, pod.name);
            match in_time(evicted).await {
                Ok(_) => info!(pod, "evicted: its GPU is gone"),
                Err(error) => {
                    complaint.report(format!("{pod}, whose GPU is gone, stays: {error:#}"))
                }
            }
        }
        sleep(BETWEEN_EVICTIONS).await;
    }
}

/// Writes on pods what they have by their nodes' word, until it is dropped.
async fn write_given(client: &Client, binder: &Binder, resource: &str) {
    let mut complaint = Complaint::default();
    let mut waiting: BTreeMap<PodName, Given> = BTreeMap::new();
    // What was written just now: no race is run with a program that takes it away again.
    let mut written: HashMap<String, Instant> = HashMap::new();
    loop {
        waiting.extend(binder.with_fleet(Fleet::take_unwritten).unwrap_or_default());
        written.retain(|_, when| when.elapsed() < BETWEEN_WRITES);
        let due: Vec<PodName> =
            waiting.keys().filter(|pod| !written.contains_key(&pod.uid)).cloned().collect();
        for pod in due {
            let Some(given) = waiting.remove(&pod) else { continue };
            written.insert(pod.uid.clone(), Instant::now());
            let pods = Api::<Pod>::namespaced(client.clone(), &pod.namespace);
            let here = in_time(async { Ok(pods.get_opt(&pod.name).await?) }).await;
            let done = match here {
                Ok(Some(here)) if is_its(&here, &pod) => {
                    // No node gives a pod another amount than it asks for, nor other containers.
                    match shares(&given.words(), &PodAsk::of(&here, resource)) {
                        Some(containers) => {
                            let words = Given { containers, ..given }.words();
                            annotate(client, &here, &words).await
                        }
                        None => Ok(()),
                    }
                }
                Ok(_) => Ok(()),
                Err(error) => Err(error),
            };
            if let Err(error) = done {
                let PodName { namespace, name, .. } = &pod;
                complaint
                    .report(format!("what {namespace}/{name} has isn't written on it: {error:#}"));
                waiting.insert(pod, given);
            }
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Whether a pod that is there is the one that is meant, on that node. A node has a say in its own pods, and in no
/// others.
fn is_its(here: &Pod, pod: &PodName) -> bool {
    let on = here.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
    here.metadata.uid.as_ref() == Some(&pod.uid) && on == Some(&pod.node)
}

/// What a list had until now.
#[derive(Debug, Default)]
struct Listed {
    names: HashSet<String>,
    reservations_before: u64,
}

/// Returns whether a list has become complete.
fn update_node(fleet: &mut Fleet, event: Event<Node>, listed: &mut Listed) -> bool {
    match event {
        Event::Init => listed.names.clear(),
        Event::InitApply(node) => {
            listed.names.extend(node.metadata.name.clone());
            fleet.set_node(&node);
        }
        Event::InitDone => {
            fleet.retain_nodes(&std::mem::take(&mut listed.names));
            return true;
        }
        Event::Apply(node) => fleet.set_node(&node),
        Event::Delete(node) => fleet.remove_node(node.metadata.name.as_deref().unwrap_or_default()),
    }
    false
}

/// Returns whether a list has become complete.
fn update_pod(fleet: &mut Fleet, event: Event<Pod>, listed: &mut Listed) -> bool {
    match event {
        Event::Init => {
            listed.names.clear();
            listed.reservations_before = fleet.reservations();
        }
        Event::InitApply(pod) => {
            listed.names.extend(pod.metadata.uid.clone());
            fleet.set_pod(&pod);
        }
        Event::InitDone => {
            fleet.retain_pods(&std::mem::take(&mut listed.names), listed.reservations_before);
            return true;
        }
        Event::Apply(pod) => fleet.set_pod(&pod),
        Event::Delete(pod) => fleet.remove_pod(pod.metadata.uid.as_deref().unwrap_or_default()),
    }
    false
}

async fn listen<K>(api: Api<K>, heard: mpsc::Sender<Heard>, kind: fn(Event<K>) -> Heard)
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let mut stream = pin!(watcher(api, watcher::Config::default()).default_backoff());
    let mut complaint = Complaint::default();
    while let Some(event) = stream.next().await {
        match event {
            Ok(event) => {
                if heard.send(kind(event)).await.is_err() {
                    return;
                }
            }
            Err(error) => complaint.report(format!("the API server can't be watched: {error}")),
        }
    }
    debug!("a watch has ended");
}
