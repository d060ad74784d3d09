//! The extender's answers to what a real kube-scheduler asked (tests/scheduler).

#![allow(clippy::unwrap_used, reason = "a test that can't go on may panic")]

use cgpu_k8s::extender::fleet::{Fleet, FleetRules};
use cgpu_k8s::extender::protocol::{BindArgs, FilterArgs, filter, inspection};
use cgpu_k8s::placement::Placement;
use cgpu_k8s::pod_request::AskRules;
use k8s_openapi::api::core::v1::Node;
use serde_json::{Value, json};

const NAMES: &str = include_str!("scheduler/filter-names.json");
const OBJECTS: &str = include_str!("scheduler/filter-objects.json");
const BIND: &str = include_str!("scheduler/bind.json");

fn fleet(gpus: &Value) -> Fleet {
    let devices = json!({"unit": "GiB", "gpus": gpus}).to_string();
    let node: Node = serde_json::from_value(json!({
        "metadata": {"name": "node1", "annotations": {"cgpu.devices": devices}},
        "status": {"capacity": {"aliyun.com/gpu-mem": "1"}},
    }))
    .unwrap();
    let rules =
        FleetRules { asks: AskRules::default(), placement: Placement::Binpack, most_pods: 20 };
    let mut fleet = Fleet::new(rules);
    fleet.set_node(&node);
    fleet
}

fn answer(fleet: &Fleet, question: &str) -> Value {
    let args: FilterArgs = serde_json::from_str(question).unwrap();
    serde_json::to_value(filter(fleet, args)).unwrap()
}

#[test]
fn nodes_are_answered_as_they_were_asked_for() {
    // Four GPUs with 2 units each; one GPU with 6.
    let fits = fleet(&json!({"0": 2, "1": 2, "2": 2, "3": 6}));
    let by_name = answer(&fits, NAMES);
    assert_eq!(by_name["NodeNames"], json!(["node1"]));
    assert_eq!(by_name["FailedNodes"], json!({}));
    assert!(by_name.get("Nodes").is_none() && by_name.get("Error").is_none(), "{by_name}");
    let by_object = answer(&fits, OBJECTS);
    let asked: Value = serde_json::from_str(OBJECTS).unwrap();
    assert_eq!(by_object["Nodes"]["items"], asked["Nodes"]["items"], "as they came");
    assert!(by_object.get("NodeNames").is_none());

    let taken = fleet(&json!({"0": 2, "1": 2, "2": 2, "3": 1}));
    let by_name = answer(&taken, NAMES);
    let why = "no 4 GPUs have 2 GiB of memory each";
    assert_eq!(by_name["NodeNames"], json!([]));
    assert_eq!(by_name["FailedNodes"], json!({"node1": why}));
    assert_eq!(by_name["FailedAndUnresolvableNodes"], json!({"node1": why}));
    let by_object = answer(&taken, OBJECTS);
    assert_eq!(by_object["Nodes"]["items"], json!([]));
    assert_eq!(by_object["FailedNodes"], json!({"node1": "no GPU has 6 GiB of memory"}));
}

/// A pod that asks for no GPU can be on any node, and a request that names no nodes gets an error.
#[test]
fn pod_without_gpus_passes_filter_on_every_node() {
    let fleet = fleet(&json!({"0": 2}));
    let result = answer(&fleet, r#"{"Pod": {"metadata": {"name": "p"}}, "NodeNames": ["a", "b"]}"#);
    assert_eq!(result["NodeNames"], json!(["a", "b"]));
    let result = answer(&fleet, r#"{"Pod": {"metadata": {"name": "p"}}}"#);
    assert!(result["Error"].as_str().unwrap().contains("nothing to choose"), "{result}");
    // Names of the API's own JSON, should a scheduler use them.
    let result = answer(&fleet, r#"{"pod": {"metadata": {"name": "p"}}, "nodenames": ["a"]}"#);
    assert_eq!(result["NodeNames"], json!(["a"]));
    assert!(serde_json::from_str::<FilterArgs>("{}").is_err());
}

#[test]
fn a_binding_is_read() {
    let args: BindArgs = serde_json::from_str(BIND).unwrap();
    assert_eq!((&*args.pod_name, &*args.pod_namespace), ("binpack-1-0", "default"));
    assert_eq!((args.pod_uid.len(), &*args.node), (36, "node1"));
}

#[test]
fn inspect_lists_nodes_like_the_original() {
    let reported =
        serde_json::to_value(inspection(&fleet(&json!({"0": 2, "3": 6})), None)).unwrap();
    let gpu = |id, total| json!({"id": id, "totalGPU": total, "usedGPU": 0, "pods": []});
    let node = json!({
        "name": "node1", "totalGPU": 8, "usedGPU": 0, "devs": [gpu(0, 2), gpu(3, 6)],
    });
    assert_eq!(reported, json!({"nodes": [node]}));
    let none = serde_json::to_value(inspection(&fleet(&json!({"0": 2})), Some("m"))).unwrap();
    assert_eq!(none["nodes"], json!([]));
    assert!(none["error"].as_str().unwrap().contains("no node m"), "{none}");
}
