//! What the scheduler extender costs in a large cluster: 1,000 nodes of 8 GPUs with 20 pods each, which are
//! 160,000 pods. The questions are as the scheduler sends them; the API server's part isn't in it.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs;
use std::time::{Duration, Instant};

use cgpu_k8s::annotations::words;
use cgpu_k8s::extender::fleet::{Fleet, FleetRules, Seeker};
use cgpu_k8s::extender::protocol::{FilterArgs, filter};
use cgpu_k8s::placement::Placement;
use cgpu_k8s::pod_request::AskRules;
use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::json;

const MEM: &str = "aliyun.com/gpu-mem";
const NODES: u32 = 1000;
const GPUS: u32 = 8;
const PODS_PER_GPU: u32 = 20;
const ROUNDS: usize = 200;

fn node(number: u32) -> Node {
    let gpus: BTreeMap<u32, u32> = (0..GPUS).map(|gpu| (gpu, 80)).collect();
    serde_json::from_value(json!({
        "metadata": {
            "name": name(number),
            "annotations": {"cgpu.devices": json!({"unit": "GiB", "gpus": gpus}).to_string()},
        },
        "status": {"capacity": {MEM: (80 * GPUS).to_string()}},
    }))
    .expect("it is a node")
}

fn name(number: u32) -> String {
    format!("node-{number:04}.rack-7.example.com")
}

fn pod(uid: impl Display, units: u32, on: Option<(u32, u32)>) -> Pod {
    let allocation = on.map(|(_, gpu)| {
        let shares = json!({"main": {gpu.to_string(): units}}).to_string();
        json!({"scheduler.framework.gpushare.allocation": shares})
    });
    serde_json::from_value(json!({
        "metadata": {
            "name": format!("model-server-5d4f8c7b96-{uid}"), "namespace": "inference",
            "uid": format!("7b0c2f6e-1f57-4a4c-9c3a-{uid:>012}"),
            "annotations": allocation,
        },
        "spec": {
            "nodeName": on.map(|(node, _)| name(node)),
            "containers": [{"name": "main", "resources": {"limits": {MEM: units.to_string()}}}],
        },
        "status": {"phase": if on.is_some() { "Running" } else { "Pending" }},
    }))
    .expect("it is a pod")
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn row(what: &str, figure: impl Display, budget: &str) {
    println!("{what:<58} {figure:>12}   budget {budget}");
}

fn resident_mib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("it can be read");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
    line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or_default() >> 10
}

fn main() {
    let rules = FleetRules {
        asks: AskRules::default(),
        placement: Placement::Binpack,
        most_pods: PODS_PER_GPU + 1,
    };
    let mut fleet = Fleet::new(rules);
    (0..NODES).for_each(|number| fleet.set_node(&node(number)));
    for number in 0..NODES * GPUS * PODS_PER_GPU {
        let place = (number / (GPUS * PODS_PER_GPU), number / PODS_PER_GPU % GPUS);
        fleet.set_pod(&pod(number, 3, Some(place)));
    }
    let names: Vec<String> = (0..NODES).map(name).collect();
    // Each GPU has 20 units left: half of the questions fit everywhere, and half nowhere.
    let question = |units| json!({"Pod": pod("new", units, None), "NodeNames": names}).to_string();
    let questions = [question(20), question(21)];
    let filters = (0..ROUNDS).map(|round| {
        let begun = Instant::now();
        let args: FilterArgs = serde_json::from_str(&questions[round % 2]).expect("a question");
        let answer = serde_json::to_string(&filter(&fleet, args)).expect("an answer");
        assert_eq!(answer.contains("no GPU has 21 GiB free"), round % 2 == 1);
        begun.elapsed()
    });
    let filters = median(filters.collect());
    let binds = (0..ROUNDS).map(|round| {
        let seeker = Seeker::of(&pod(format!("new{round}"), 4, None), &AskRules::default());
        let begun = Instant::now();
        let reservation = fleet.reservation(&seeker, &names[round]).expect("it fits");
        assert_eq!(words(&reservation.choice.memory, reservation.gpu_units, false).len(), 5);
        begun.elapsed()
    });
    let binds = median(binds.collect());
    println!(
        "cgpu-scheduler-extender: {NODES} nodes of {GPUS} GPUs, {PODS_PER_GPU} pods on each\n"
    );
    row("filter of all nodes, median", format!("{:.1} ms", filters.as_secs_f64() * 1e3), "20 ms");
    row("bind beside the API's calls, median", format!("{} us", binds.as_micros()), "10 ms");
    row("most memory", format!("{} MiB", resident_mib()), "200 MiB");
}
