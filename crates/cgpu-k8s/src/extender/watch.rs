//! Tells the fleet what the API server has of nodes and pods, for as long as this replica serves.

use std::collections::HashSet;
use std::fmt::Debug;
use std::pin::pin;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tracing::{debug, info};

use super::bind::Binder;
use super::fleet::{Fleet, FleetRules};
use crate::life::Complaint;

/// What was heard, of either kind.
enum Heard {
    Node(Box<Event<Node>>),
    Pod(Box<Event<Pod>>),
}

/// Lists and watches all nodes and pods, and serves once both lists are whole. Until it is dropped.
pub(crate) async fn follow(client: Client, binder: Arc<Binder>, rules: FleetRules) {
    // Bounded: what comes faster than it is taken in waits in the connection.
    let (heard, mut inbox) = mpsc::channel(1000);
    let nodes = listen(Api::<Node>::all(client.clone()), heard.clone(), |event| {
        Heard::Node(Box::new(event))
    });
    let pods = listen(Api::<Pod>::all(client), heard, |event| Heard::Pod(Box::new(event)));
    let take_in = async {
        let mut fleet = Some(Fleet::new(rules));
        let (mut has_nodes, mut has_pods) = (None, None);
        let (mut nodes, mut pods) = (Listed::default(), Listed::default());
        while let Some(heard) = inbox.recv().await {
            let tell = |fleet: &mut Fleet| match heard {
                Heard::Node(event) => {
                    tell_node(fleet, *event, &mut nodes).then(|| has_nodes = Some(()))
                }
                Heard::Pod(event) => {
                    tell_pod(fleet, *event, &mut pods).then(|| has_pods = Some(()))
                }
            };
            match &mut fleet {
                Some(fleet) => tell(fleet),
                None => binder.with_fleet(tell).unwrap_or_default(),
            };
            if has_nodes.and(has_pods).is_some() && fleet.is_some() {
                info!("all nodes and pods are known; serving");
                binder.set_fleet(fleet.take());
            }
        }
    };
    tokio::join!(nodes, pods, take_in);
}

/// What a list had until now.
#[derive(Debug, Default)]
struct Listed {
    names: HashSet<String>,
    promises_before: u64,
}

/// Returns whether a list has become whole.
fn tell_node(fleet: &mut Fleet, event: Event<Node>, listed: &mut Listed) -> bool {
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

/// Returns whether a list has become whole.
fn tell_pod(fleet: &mut Fleet, event: Event<Pod>, listed: &mut Listed) -> bool {
    match event {
        Event::Init => {
            listed.names.clear();
            listed.promises_before = fleet.promises();
        }
        Event::InitApply(pod) => {
            listed.names.extend(pod.metadata.uid.clone());
            fleet.set_pod(&pod);
        }
        Event::InitDone => {
            fleet.retain_pods(&std::mem::take(&mut listed.names), listed.promises_before);
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
            Err(error) => complaint.tell(format!("the API server can't be watched: {error}")),
        }
    }
    debug!("a watch has ended");
}
