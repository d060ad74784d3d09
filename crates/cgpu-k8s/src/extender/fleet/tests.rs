use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::annotations::{ASSUME_TIME, words};

const MEM: &str = "aliyun.com/gpu-mem";

fn fleet(placement: Placement) -> Fleet {
    Fleet::new(FleetRules { asks: AskRules::default(), placement, most_pods: 20 })
}

fn node(name: &str, gpus: &[u32]) -> Node {
    let by_index: BTreeMap<usize, u32> = gpus.iter().copied().enumerate().collect();
    let devices = json!({"unit": "GiB", "gpus": by_index}).to_string();
    let units: u32 = gpus.iter().sum();
    serde_json::from_value(json!({
        "metadata": {"name": name, "annotations": {"cgpu.devices": devices}},
        "status": {"capacity": {MEM: units.to_string()}},
    }))
    .unwrap()
}

fn pod(uid: &str, units: u32, gpus: u32, owner: &Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {
            "name": uid, "namespace": "default", "uid": uid, "ownerReferences": owner,
            "labels": {"aliyun.com/gpu-count": gpus.to_string()},
        },
        "spec": {"containers": [{"name": "c", "resources": {"limits": {MEM: units.to_string()}}}]},
    }))
    .unwrap()
}

/// The pod as the API server has it once it is bound with that reservation.
fn bound(mut pod: Pod, node: &str, reservation: &Reservation) -> Pod {
    let mut words = words(&reservation.choice.memory, reservation.gpu_units, false);
    words.insert(ASSUME_TIME.to_owned(), "1".to_owned());
    pod.metadata.annotations = Some(words);
    pod.spec.as_mut().unwrap().node_name = Some(node.to_owned());
    pod
}

fn seeker(pod: &Pod) -> Seeker {
    Seeker::of(pod, &AskRules::default())
}

fn gpus(reservation: &Reservation) -> Vec<u32> {
    sum(&reservation.choice.memory).into_keys().collect()
}

fn used(fleet: &Fleet, name: &str) -> Vec<u32> {
    fleet.view(name).unwrap().1.iter().map(|gpu| gpu.used).collect()
}

/// Units that are reserved for a pod are taken until the pod is gone, and are counted once.
#[test]
fn reserved_units_count_once_until_the_pod_ends() {
    let mut fleet = fleet(Placement::Binpack);
    fleet.set_node(&node("n", &[16, 24]));
    let first = pod("a", 10, 1, &json!([]));
    let reservation = fleet.reservation(&seeker(&first), "n").unwrap();
    assert_eq!((gpus(&reservation), reservation.gpu_units), (vec![0], 16));
    assert_eq!(used(&fleet, "n"), [10, 0]);
    // Again, as after an answer that was lost: its own units aren't in its way.
    let again = fleet.reservation(&seeker(&first), "n").unwrap();
    assert_eq!((gpus(&again), used(&fleet, "n")), (vec![0], vec![10, 0]));
    fleet.set_pod(&first);
    assert_eq!(used(&fleet, "n"), [10, 0], "what is on no node yet keeps its promise");
    let first = bound(first, "n", &again);
    fleet.set_pod(&first);
    fleet.forget("a");
    assert_eq!(used(&fleet, "n"), [10, 0], "what the API server has is no promise");
    let two = pod("b", 12, 2, &json!([]));
    assert_eq!(gpus(&fleet.reservation(&seeker(&two), "n").unwrap()), [0, 1]);
    assert_eq!(used(&fleet, "n"), [16, 6]);
    let why = fleet.can_have(&seeker(&pod("c", 19, 1, &json!([]))), "n").unwrap_err();
    assert_eq!(why.to_string(), "no GPU has 19 GiB free");
    fleet.forget("b");
    fleet.can_have(&seeker(&pod("c", 19, 1, &json!([]))), "n").unwrap();
    let mut ended = first;
    ended.status = Some(serde_json::from_value(json!({"phase": "Succeeded"})).unwrap());
    fleet.set_pod(&ended);
    assert_eq!(used(&fleet, "n"), [0, 0]);
    assert!(fleet.taken.is_empty() && fleet.pods.is_empty());
}

/// What a node reports of its own pods is to be written on them, and nothing else is.
#[test]
fn nodes_report_is_written_on_its_own_pods() {
    let mut fleet = fleet(Placement::Binpack);
    let given = |uids: &[&str]| -> Node {
        let what = json!({"units": 16, "containers": {"c": {"1": 6}}});
        let given: BTreeMap<&str, Value> = uids.iter().map(|uid| (*uid, what.clone())).collect();
        let mut node = node("n", &[16, 16]);
        let text = json!(given).to_string();
        node.metadata.annotations.as_mut().unwrap().insert("cgpu.pods".to_owned(), text);
        node
    };
    let on = |node: &str, uid: &str| {
        let mut pod = pod(uid, 6, 1, &json!([]));
        pod.spec.as_mut().unwrap().node_name = Some(node.to_owned());
        pod
    };
    fleet.set_pod(&on("n", "a"));
    fleet.set_pod(&on("other", "b"));
    assert_eq!(fleet.take_unwritten(), [], "no node has said anything");
    fleet.set_node(&given(&["a", "b", "gone"]));
    let reported = fleet.take_unwritten();
    let names: Vec<_> =
        reported.iter().map(|(pod, _)| (&*pod.uid, &*pod.name, &*pod.node)).collect();
    assert_eq!(names, [("a", "a", "n")], "of another node's pod it has no say");
    let words = reported[0].1.words();
    assert_eq!(
        (&*words["ALIYUN_COM_GPU_MEM_IDX"], &*words["ALIYUN_COM_GPU_MEM_ASSIGNED"]),
        ("1", "true")
    );
    assert_eq!(fleet.take_unwritten(), [], "nothing has changed since");
    let mut written = on("n", "a");
    written.metadata.annotations = Some(words.clone());
    fleet.set_pod(&written);
    fleet.set_node(&given(&["a"]));
    assert_eq!(fleet.take_unwritten(), [], "it is there");
    // Another program writes something else over it.
    let idx = "ALIYUN_COM_GPU_MEM_IDX".to_owned();
    written.metadata.annotations.as_mut().unwrap().insert(idx, "0".to_owned());
    fleet.set_pod(&written);
    assert_eq!(fleet.take_unwritten()[0].1.words(), words);
    fleet.remove_pod("a");
    fleet.set_node(&given(&["a"]));
    assert_eq!(fleet.take_unwritten(), []);
}

/// A pod whose GPU is written nowhere may be on any GPU of its node.
#[test]
fn pod_without_a_recorded_gpu_counts_on_any() {
    let mut fleet = fleet(Placement::Binpack);
    fleet.set_node(&node("n", &[16, 16]));
    let mut elsewhere = pod("a", 6, 1, &json!([]));
    elsewhere.spec.as_mut().unwrap().node_name = Some("n".into());
    fleet.set_pod(&elsewhere);
    let of = |units| seeker(&pod("b", units, 1, &json!([])));
    fleet.can_have(&of(10), "n").unwrap();
    fleet.can_have(&of(11), "n").unwrap_err();
    let words = [("ALIYUN_COM_GPU_MEM_IDX".to_owned(), "1".to_owned())];
    elsewhere.metadata.annotations = Some(words.into());
    fleet.set_pod(&elsewhere);
    assert_eq!(gpus(&fleet.reservation(&of(11), "n").unwrap()), [0]);
}

#[test]
fn pod_authors_annotations_hide_no_used_units() {
    let mut fleet = fleet(Placement::Binpack);
    fleet.set_node(&node("n", &[16, 16]));
    let mut placed = pod("a", 6, 1, &json!([]));
    placed.spec.as_mut().unwrap().node_name = Some("n".into());
    let of = |units| seeker(&pod("b", units, 1, &json!([])));
    for (name, value) in [
        ("ALIYUN_COM_GPU_MEM_IDX", "7"),
        ("ALIYUN_COM_GPU_MEM_IDX", "0,1"),
        ("scheduler.framework.gpushare.allocation", r#"{"main":{"1":1}}"#),
        ("scheduler.framework.gpushare.allocation", r#"{"main":{"1":16}}"#),
        ("scheduler.framework.gpushare.allocation", r#"{"other":{"1":6}}"#),
        ("scheduler.framework.gpushare.allocation", r#"{"main":{"9":6}}"#),
        ("scheduler.framework.gpushare.allocation", "{}"),
    ] {
        placed.metadata.annotations = Some([(name.to_owned(), value.to_owned())].into());
        fleet.set_pod(&placed);
        // It may be on either GPU.
        fleet.can_have(&of(10), "n").unwrap();
        fleet.can_have(&of(11), "n").expect_err(value);
        // Its own units are never in its own way.
        let itself = seeker(&placed);
        fleet.can_have(&itself, "n").unwrap();
    }
    fleet.remove_pod("a");
    assert!(fleet.taken.is_empty());
}

/// A pod whose GPU is gone has nothing of the GPU in its place.
#[test]
fn pod_of_a_lost_gpu_charges_no_replacement() {
    let mut fleet = fleet(Placement::Binpack);
    let mut reported = node("n", &[16]);
    fleet.set_node(&reported);
    let held = pod("a", 10, 1, &json!([]));
    let reservation = fleet.reservation(&seeker(&held), "n").unwrap();
    fleet.set_pod(&bound(held, "n", &reservation));
    let next = seeker(&pod("b", 12, 1, &json!([])));
    fleet.can_have(&next, "n").unwrap_err();
    assert!(fleet.lost().is_empty());
    let words =
        json!({"unit": "GiB", "gpus": {"0": 16}, "lost": {"a": "team/a", "unknown": "team/whole"}})
            .to_string();
    reported.metadata.annotations = Some([("cgpu.devices".to_owned(), words)].into());
    fleet.set_node(&reported);
    let lost: Vec<_> = fleet.lost().into_iter().map(|pod| pod.uid).collect();
    assert_eq!(lost, ["a", "unknown"], "one that has a GPU as a whole too");
    assert_eq!(used(&fleet, "n"), [0]);
    fleet.reservation(&next, "n").unwrap();
    assert_eq!(used(&fleet, "n"), [12]);
    fleet.remove_pod("a");
    assert_eq!(used(&fleet, "n"), [12]);
}

#[test]
fn node_labels_and_closed_gpus_are_followed() {
    let mut fleet = fleet(Placement::Binpack);
    let mut reported = node("n", &[8, 16, 24]);
    let owner =
        json!([{"uid": "set", "controller": true, "apiVersion": "v1", "kind": "X", "name": "x"}]);
    let of = |uid: &str| seeker(&pod(uid, 4, 1, &owner));
    fleet.set_node(&reported);
    assert_eq!(gpus(&fleet.reservation(&of("a"), "n").unwrap()), [0]);
    let labels = [("ack.node.gpu.placement", "spread"), ("ack.node.gpu.max-pod", "1")];
    let labels = labels.map(|(name, value)| (name.to_owned(), value.to_owned()));
    reported.metadata.labels = Some(labels.into());
    fleet.set_node(&reported);
    assert_eq!(gpus(&fleet.reservation(&of("b"), "n").unwrap()), [2], "the emptiest");
    assert_eq!(gpus(&fleet.reservation(&of("c"), "n").unwrap()), [1], "without a sibling");
    let why = fleet.can_have(&of("d"), "n").unwrap_err();
    assert_eq!(why.to_string(), "no GPU has 4 GiB free, with fewer than 1 pods");
    fleet.remove_pod("a");
    fleet.can_have(&of("d"), "n").unwrap();
    let closed = json!({"unit": "GiB", "gpus": {"0": 8, "1": 16, "2": 24}, "closed": [0, 1, 2]});
    let words = [("cgpu.devices".to_owned(), closed.to_string())];
    reported.metadata.annotations = Some(words.into());
    fleet.set_node(&reported);
    // It may open again.
    let why = fleet.can_have(&of("d"), "n").unwrap_err();
    assert_eq!((why.to_string(), why.is_for_ever()), ("no GPU has 4 GiB free".into(), false));
    fleet.remove_node("n");
    assert_eq!(fleet.can_have(&of("d"), "n"), Err(NotEnoughMemory::NoGpus));
}

#[test]
fn pod_annotations_cannot_overflow_any_sum() {
    let mut fleet = fleet(Placement::Binpack);
    fleet.set_node(&node("n", &[16]));
    for uid in 0..1000 {
        let mut greedy = pod(&uid.to_string(), 1, 1, &json!([]));
        let most = json!({"c": {"0": u32::MAX}, "d": {"0": u32::MAX, "7": u32::MAX}}).to_string();
        let words = [("scheduler.framework.gpushare.allocation".to_owned(), most)];
        greedy.metadata.annotations = Some(words.into());
        greedy.spec.as_mut().unwrap().node_name = Some("n".into());
        fleet.set_pod(&greedy);
    }
    fleet.can_have(&seeker(&pod("x", 1, 1, &json!([]))), "n").unwrap_err();
    (0..1000).for_each(|uid| fleet.remove_pod(&uid.to_string()));
    fleet.can_have(&seeker(&pod("x", 16, 1, &json!([]))), "n").unwrap();
}

/// What happens in a cluster.
#[derive(Debug, Clone)]
enum Step {
    /// A pod is made that asks for so much.
    Make { units: u32, gpus: u32 },
    /// The scheduler binds a pod that is on no node.
    Bind { pick: usize, node: usize, outcome: Outcome },
    /// A pod is deleted, or ends.
    End { pick: usize, is_deleted: bool },
    /// The watch reports so many changes that we don't know yet.
    Hear { count: usize },
    /// The watch breaks, and all is listed again.
    List,
    /// The extender begins again.
    Restart,
}

/// What the API server does with a binding, and says of it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Outcome {
    Bound,
    Refused,
    /// It binds and the answer is lost.
    BoundInSilence,
    /// It doesn't, and no caller hears of that.
    LostInSilence,
}

fn step() -> impl Strategy<Value = Step> {
    let outcome = prop_oneof![
        6 => Just(Outcome::Bound),
        1 => Just(Outcome::Refused),
        1 => Just(Outcome::BoundInSilence),
        1 => Just(Outcome::LostInSilence),
    ];
    prop_oneof![
        5 => (1_u32..13, 1_u32..3).prop_map(|(each, gpus)| Step::Make { units: each * gpus, gpus }),
        8 => (0_usize..64, 0_usize..2, outcome)
            .prop_map(|(pick, node, outcome)| Step::Bind { pick, node, outcome }),
        3 => (0_usize..64, any::<bool>()).prop_map(|(pick, is_deleted)| Step::End { pick, is_deleted }),
        3 => (0_usize..6).prop_map(|count| Step::Hear { count }),
        1 => Just(Step::List),
        1 => Just(Step::Restart),
    ]
}

const NODES: [(&str, &[u32]); 2] = [("m", &[16, 16, 24]), ("n", &[8, 24])];

/// The API server, with what its watch has yet to report.
#[derive(Debug, Default)]
struct Server {
    pods: BTreeMap<String, Pod>,
    unreported: std::collections::VecDeque<(String, Option<Pod>)>,
}

impl Server {
    fn set(&mut self, pod: Pod) {
        let uid = pod.metadata.uid.clone().unwrap();
        self.unreported.push_back((uid.clone(), Some(pod.clone())));
        self.pods.insert(uid, pod);
    }

    fn delete(&mut self, uid: &str) {
        self.pods.remove(uid);
        self.unreported.push_back((uid.to_owned(), None));
    }

    fn list(&mut self, fleet: &mut Fleet) {
        NODES.iter().for_each(|(name, gpus)| fleet.set_node(&node(name, gpus)));
        let before = fleet.reservations();
        self.unreported.clear();
        self.pods.values().for_each(|pod| fleet.set_pod(pod));
        fleet.retain_pods(&self.pods.keys().cloned().collect(), before);
    }

    /// Units of each GPU by what is written on the pods that are there.
    fn used(&self) -> BTreeMap<(String, u32), u32> {
        let mut used = BTreeMap::new();
        for pod in self.pods.values() {
            let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
            let Some(node) = pod.spec.as_ref().unwrap().node_name.clone() else { continue };
            if phase == Some("Succeeded") {
                continue;
            }
            let annotations = pod.metadata.annotations.as_ref().unwrap();
            let shares = shares(annotations, &PodAsk::of(pod, MEM)).unwrap();
            for (gpu, units) in sum(&shares) {
                *used.entry((node.clone(), gpu)).or_default() += units;
            }
        }
        used
    }
}

/// Runs the steps; whatever the order, no GPU has more than it has.
fn play(steps: Vec<Step>, placement: Placement) -> Result<(), TestCaseError> {
    let (mut server, mut fleet) = (Server::default(), fleet(placement));
    server.list(&mut fleet);
    let pick = |pods: Vec<&Pod>, pick: usize| -> Option<Pod> {
        (!pods.is_empty()).then(|| pods[pick % pods.len()].clone())
    };
    for (at, step) in steps.into_iter().enumerate() {
        match step {
            Step::Make { units, gpus } => {
                server.set(pod(&format!("pod{at}"), units, gpus, &json!([])));
            }
            Step::Bind { pick: which, node, outcome } => {
                let is_free = |pod: &&Pod| pod.spec.as_ref().unwrap().node_name.is_none();
                let free = server.pods.values().filter(is_free).collect();
                let Some(pod) = pick(free, which) else { continue };
                let (name, seeker) = (NODES[node].0, seeker(&pod));
                let could = fleet.can_have(&seeker, name);
                let reserved = fleet.reservation(&seeker, name);
                prop_assert_eq!(could.is_ok(), reserved.is_ok(), "filter and bind differ");
                let Ok(reservation) = reserved else { continue };
                prop_assert_eq!(
                    gpus(&reservation).len(),
                    seeker.ask.gpus.clone().unwrap() as usize
                );
                match outcome {
                    Outcome::Bound | Outcome::BoundInSilence => {
                        server.set(bound(pod, name, &reservation));
                    }
                    Outcome::Refused => fleet.forget(&seeker.uid),
                    Outcome::LostInSilence => {}
                }
            }
            Step::End { pick: which, is_deleted } => {
                let Some(mut pod) = pick(server.pods.values().collect(), which) else { continue };
                let uid = pod.metadata.uid.clone().unwrap();
                match is_deleted {
                    true => server.delete(&uid),
                    false if pod.spec.as_ref().unwrap().node_name.is_some() => {
                        pod.status =
                            Some(serde_json::from_value(json!({"phase": "Succeeded"})).unwrap());
                        server.set(pod);
                    }
                    false => {}
                }
            }
            Step::Hear { count } => {
                for _ in 0..count {
                    match server.unreported.pop_front() {
                        Some((_, Some(pod))) => fleet.set_pod(&pod),
                        Some((uid, None)) => fleet.remove_pod(&uid),
                        None => {}
                    }
                }
            }
            Step::List => server.list(&mut fleet),
            Step::Restart => {
                fleet = self::fleet(placement);
                server.list(&mut fleet);
            }
        }
        for ((name, gpu), units) in server.used() {
            let total = NODES.iter().find(|node| node.0 == name).unwrap().1[gpu as usize];
            prop_assert!(units <= total, "{units} of {total} on GPU {gpu} of {name}");
        }
    }
    // Once all is known, it is what the API server has; nothing is left behind.
    while let Some((uid, pod)) = server.unreported.pop_front() {
        match pod {
            Some(pod) => fleet.set_pod(&pod),
            None => fleet.remove_pod(&uid),
        }
    }
    let free: Vec<String> = server.pods.keys().cloned().collect();
    free.iter().for_each(|uid| fleet.forget(uid));
    for (name, _) in NODES {
        for gpu in fleet.view(name).unwrap().1 {
            let known = server.used().remove(&(name.to_owned(), gpu.index)).unwrap_or_default();
            prop_assert_eq!(gpu.used, known, "GPU {} of {}", gpu.index, name);
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn no_gpu_is_promised_twice(
        steps in proptest::collection::vec(step(), 1..80),
        is_spread in any::<bool>(),
    ) {
        play(steps, if is_spread { Placement::Spread } else { Placement::Binpack })?;
    }
}
