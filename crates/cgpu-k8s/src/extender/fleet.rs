//! The GPUs of all nodes and which pods have what of them: [`Fleet`]. Pure: its input is what the API server
//! has, and what was reserved meanwhile.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::annotations::{ByGpu, Words, digest, shares, sum};
use crate::node::{Given, GivenByUid, NodeGpus, given_of, gpus_of, most_pods_of, placement_of};
use crate::placement::Placement;
use crate::pod_request::{AskRules, PodAsk};
use crate::units::Unit;

use super::choice::{ALL_PERCENT, Capacity, Choice, NotEnoughMemory, choose};
use super::preemption::{Free, Holder, completed, victims};

/// The most units (or percent) that a pod counts for on one GPU, whatever is written on it: 2 TiB in MiB, and no
/// sum over a node's pods overflows.
const MOST_UNITS: u32 = 1 << 21;

/// How pods are placed if a node's labels don't say it.
#[derive(Debug, Clone)]
pub struct FleetRules {
    /// What pods ask for.
    pub asks: AskRules,
    /// Which GPU is preferred.
    pub placement: Placement,
    /// How many pods a GPU may have.
    pub most_pods: u32,
}

/// A pod that wants a place.
#[derive(Debug, Clone)]
pub struct Seeker {
    pub uid: String,
    pub namespace: String,
    pub name: String,
    pub ask: PodAsk,
    /// Its creator, by UID: a ReplicaSet, a StatefulSet, a Job.
    pub workload: Option<String>,
    /// How important it is, and what it takes in addition to GPUs.
    weight: Weight,
}

/// All nodes and pods, as far as they have to do with shared GPUs.
#[derive(Debug)]
pub struct Fleet {
    rules: FleetRules,
    nodes: HashMap<String, FleetNode>,
    /// What is taken of nodes, which may be there sooner or longer than the node.
    taken: HashMap<String, Taken>,
    pods: HashMap<String, Held>,
    /// UIDs of pods on which something else may be written than their node says that they have.
    unwritten: BTreeSet<String>,
    /// How many reservations there were.
    reservations: u64,
}

#[derive(Debug)]
struct FleetNode {
    gpus: NodeGpus,
    given: GivenByUid,
    placement: Option<Placement>,
    most_pods: Option<u32>,
}

/// What pods have of one node.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Taken {
    gpus: BTreeMap<u32, TakenGpu>,
    /// Units of pods that have no GPU written down.
    unknown: u32,
    pods: HashSet<String>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct TakenGpu {
    units: u32,
    percent: u32,
    pods: u32,
}

/// What a pod has, or has reserved.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Held {
    node: Box<str>,
    namespace: Box<str>,
    name: Box<str>,
    /// GPU, units, percent.
    gpus: Box<[(u32, u32, u32)]>,
    unknown: u32,
    workload: Option<Box<str>>,
    weight: Weight,
    /// What is written on it of what it has, in short.
    written: u64,
    /// The reservation's number, if the API server hasn't reported the pod on its node yet.
    reservation: Option<u64>,
}

/// How much it weighs that a pod goes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Weight {
    priority: i32,
    /// Requests, in thousandths of a processor.
    cpu_milli: u64,
    /// Requests, in bytes.
    memory_bytes: u64,
}

/// What a pod has of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodPart {
    pub namespace: String,
    pub name: String,
    pub units: u32,
}

/// A pod by all its names, on a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodName {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub node: String,
}

/// A GPU of a node, for a reader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuView {
    pub index: u32,
    /// Its units.
    pub total: u32,
    /// Units that pods have.
    pub used: u32,
    /// These pods.
    pub pods: Vec<PodPart>,
}

/// Where a pod is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reservation {
    /// What it gets.
    pub choice: Choice,
    /// Units of the first of its GPUs.
    pub gpu_units: u32,
}

impl Fleet {
    /// A fleet of no node.
    #[must_use]
    pub fn new(rules: FleetRules) -> Self {
        Fleet {
            rules,
            nodes: HashMap::new(),
            taken: HashMap::new(),
            pods: HashMap::new(),
            unwritten: BTreeSet::new(),
            reservations: 0,
        }
    }

    /// What pods ask for.
    #[must_use]
    pub fn asks(&self) -> &AskRules {
        &self.rules.asks
    }

    /// Takes over what the API server has of a node.
    pub fn set_node(&mut self, node: &Node) {
        let Some(name) = &node.metadata.name else { return };
        let Some(gpus) = gpus_of(node, &self.rules.asks.memory) else {
            self.nodes.remove(name);
            return;
        };
        let none = Words::new();
        let labels = node.metadata.labels.as_ref().unwrap_or(&none);
        let (placement, most_pods) = (placement_of(labels), most_pods_of(labels));
        let given = given_of(node);
        let is_here = |uid: &&String| self.pods.get(*uid).is_some_and(|held| *held.node == **name);
        self.unwritten.extend(given.keys().filter(is_here).cloned());
        self.nodes.insert(name.clone(), FleetNode { gpus, given, placement, most_pods });
    }

    /// Forgets a node. What its pods have stays known until they are gone.
    pub fn remove_node(&mut self, name: &str) {
        self.nodes.remove(name);
    }

    /// Forgets all nodes but these: what is left after all were listed.
    pub fn retain_nodes(&mut self, names: &HashSet<String>) {
        self.nodes.retain(|name, _| names.contains(name));
    }

    /// Takes over what the API server has of a pod.
    pub fn set_pod(&mut self, pod: &Pod) {
        let Some(uid) = &pod.metadata.uid else { return };
        let ask = PodAsk::of(pod, &self.rules.asks.memory);
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        if ask.is_empty() || matches!(phase, Some("Succeeded" | "Failed")) {
            self.remove_pod(uid);
            return;
        }
        // A pod that is on no node yet may have a reservation.
        let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) else { return };
        let none = Words::new();
        let annotations = pod.metadata.annotations.as_ref().unwrap_or(&none);
        let memory = shares(annotations, &ask);
        let percent = memory.iter().flatten().flat_map(|(name, of_gpus)| {
            let asked = ask.containers.iter().find(|ask| ask.name == *name);
            let asked = asked.map_or(0, |ask| ask.percent);
            let count = u32::try_from(of_gpus.len()).unwrap_or(u32::MAX).max(1);
            of_gpus.keys().map(move |index| (*index, asked.div_ceil(count)))
        });
        let mut by_percent = ByGpu::new();
        for (index, percent) in percent {
            let of_gpu = by_percent.entry(index).or_default();
            *of_gpu = of_gpu.saturating_add(percent);
        }
        let (unknown, memory) = match &memory {
            Some(shares) => (0, sum(shares)),
            None => (ask.units().saturating_add(ask.surplus()).min(MOST_UNITS), ByGpu::new()),
        };
        let count = u32::try_from(memory.len()).unwrap_or(u32::MAX).max(1);
        let surplus = memory.keys().map(|index| (*index, ask.surplus() / count)).collect();
        let held = Held {
            node: node.into(),
            namespace: pod.metadata.namespace.clone().unwrap_or_default().into(),
            name: pod.metadata.name.clone().unwrap_or_default().into(),
            gpus: joined(&memory, &by_percent, &surplus),
            unknown,
            workload: workload(pod).map(Into::into),
            weight: Weight::of(pod),
            written: digest(annotations),
            reservation: None,
        };
        self.hold(uid, held);
        self.unwritten.insert(uid.clone());
    }

    /// Forgets a pod.
    pub fn remove_pod(&mut self, uid: &str) {
        let Some(held) = self.pods.remove(uid) else { return };
        let Some(taken) = self.taken.get_mut(&*held.node) else { return };
        for (index, units, percent) in &held.gpus {
            let Some(gpu) = taken.gpus.get_mut(index) else { continue };
            gpu.units -= units;
            gpu.percent -= percent;
            gpu.pods -= 1;
            if gpu.pods == 0 {
                taken.gpus.remove(index);
            }
        }
        taken.unknown -= held.unknown;
        taken.pods.remove(uid);
        if taken.pods.is_empty() {
            self.taken.remove(&*held.node);
        }
    }

    /// How many reservations there were: what [`Fleet::retain_pods`] gets of the beginning of a list.
    #[must_use]
    pub fn reservations(&self) -> u64 {
        self.reservations
    }

    /// Forgets all pods but these: what is left after all were listed. What was reserved since the list began
    /// may be of a pod that the list doesn't have, and stays.
    pub fn retain_pods(&mut self, uids: &HashSet<String>, reservations_before: u64) {
        let is_gone = |(uid, held): &(&String, &Held)| {
            !uids.contains(*uid)
                && held.reservation.is_none_or(|reservation| reservation <= reservations_before)
        };
        let gone: Vec<String> =
            self.pods.iter().filter(is_gone).map(|(uid, _)| uid.clone()).collect();
        gone.iter().for_each(|uid| self.remove_pod(uid));
    }

    fn hold(&mut self, uid: &str, held: Held) {
        if self.pods.get(uid) == Some(&held) {
            return;
        }
        self.remove_pod(uid);
        let taken = self.taken.entry(held.node.to_string()).or_default();
        for (index, units, percent) in &held.gpus {
            let gpu = taken.gpus.entry(*index).or_default();
            gpu.units += units;
            gpu.percent += percent;
            gpu.pods += 1;
        }
        taken.unknown += held.unknown;
        taken.pods.insert(uid.to_owned());
        self.pods.insert(uid.to_owned(), held);
    }

    /// Whether a pod can be on that node.
    ///
    /// # Errors
    ///
    /// Why not.
    pub fn can_have(&self, seeker: &Seeker, node: &str) -> Result<(), NotEnoughMemory> {
        self.choice(seeker, node, false).map(|_| ())
    }

    /// Gives a pod a place on that node, until the API server reports it there or it is gone. Another reservation
    /// of the same pod is void then.
    ///
    /// # Errors
    ///
    /// Why there is none; then nothing has changed.
    pub fn reservation(
        &mut self,
        seeker: &Seeker,
        node: &str,
    ) -> Result<Reservation, NotEnoughMemory> {
        let choice = self.choice(seeker, node, true)?;
        let memory = sum(&choice.memory);
        let of_node = self.nodes.get(node).map(|node| &node.gpus.gpus);
        let first = of_node.and_then(|gpus| memory.keys().find_map(|index| gpus.get(index)));
        let gpu_units = first.copied().unwrap_or_default();
        self.reservations += 1;
        let held = Held {
            node: node.into(),
            namespace: seeker.namespace.as_str().into(),
            name: seeker.name.as_str().into(),
            gpus: joined(&memory, &sum(&choice.percent), &choice.surplus),
            unknown: 0,
            workload: seeker.workload.as_deref().map(Into::into),
            weight: seeker.weight,
            written: 0,
            reservation: Some(self.reservations),
        };
        self.hold(&seeker.uid, held);
        Ok(Reservation { choice, gpu_units })
    }

    /// Releases a reservation that certainly came to nothing.
    pub fn forget(&mut self, uid: &str) {
        if self.pods.get(uid).is_some_and(|held| held.reservation.is_some()) {
            self.remove_pod(uid);
        }
    }

    fn choice(
        &self,
        seeker: &Seeker,
        name: &str,
        for_good: bool,
    ) -> Result<Choice, NotEnoughMemory> {
        let node = self.nodes.get(name).ok_or(NotEnoughMemory::NoGpus)?;
        let placement = node.placement.unwrap_or(self.rules.placement);
        let siblings = match (for_good, placement) {
            (true, Placement::Spread) => self.siblings(seeker, name),
            _ => ByGpu::new(),
        };
        let capacities = self.capacities(seeker, name, node, &siblings, &BTreeSet::new());
        let most_pods = node.most_pods.unwrap_or(self.rules.most_pods);
        choose(&capacities, &seeker.ask, node.gpus.unit, placement, most_pods)
    }

    /// Which pods of a node have to go so that `seeker` fits there, in place of those that the scheduler `proposed`, by
    /// UID; `None` if no end of less important pods frees enough.
    #[must_use]
    pub fn victims(
        &self,
        seeker: &Seeker,
        name: &str,
        proposed: &[String],
    ) -> Option<BTreeSet<String>> {
        let node = self.nodes.get(name)?;
        let most_pods = node.most_pods.unwrap_or(self.rules.most_pods);
        let capacities =
            |gone: &BTreeSet<String>| self.capacities(seeker, name, node, &ByGpu::new(), gone);
        let fits = |gone: &BTreeSet<String>| {
            let placement = node.placement.unwrap_or(self.rules.placement);
            choose(&capacities(gone), &seeker.ask, node.gpus.unit, placement, most_pods).is_ok()
        };
        let free = |capacity: Capacity| Free {
            index: capacity.index,
            total: if node.gpus.closed.contains(&capacity.index) { 0 } else { capacity.total },
            units: capacity.free,
            percent: capacity.free_percent,
            pods: most_pods.saturating_sub(capacity.pods),
        };
        let free: Vec<Free> = capacities(&BTreeSet::new()).into_iter().map(free).collect();
        let of_node = self.taken.get(name).into_iter().flat_map(|taken| &taken.pods);
        let holder = |(uid, held): (&String, &Held)| Holder {
            uid: uid.clone(),
            priority: held.weight.priority,
            gpus: held
                .gpus
                .iter()
                .map(|(index, units, percent)| (*index, (*units, *percent)))
                .collect(),
            cpu_milli: held.weight.cpu_milli,
            memory_bytes: held.weight.memory_bytes,
        };
        let others =
            of_node.filter(|uid| **uid != seeker.uid && !node.gpus.lost.contains_key(*uid));
        let holders: Vec<Holder> =
            others.filter_map(|uid| Some(holder((uid, self.pods.get(uid)?)))).collect();
        let gone = seeker.ask.need().and_then(|need| {
            let gone = victims(&free, &holders, seeker.weight.priority, need)?;
            Some(completed(gone, proposed, &holders))
        });
        let as_proposed = || proposed.iter().cloned().collect::<BTreeSet<String>>();
        gone.filter(&fits).or_else(|| Some(as_proposed()).filter(&fits))
    }

    /// What is free of a node's GPUs for `seeker` once the pods `gone` are.
    fn capacities(
        &self,
        seeker: &Seeker,
        name: &str,
        node: &FleetNode,
        siblings: &ByGpu,
        gone: &BTreeSet<String>,
    ) -> Vec<Capacity> {
        let none = Taken::default();
        let taken = self.taken.get(name).unwrap_or(&none);
        // What was reserved for the pod before is its own; a lost pod has nothing of the GPUs that are there.
        let is_here = |held: &&Held| &*held.node == name;
        let uids =
            gone.iter().chain([&seeker.uid]).chain(node.gpus.lost.keys()).collect::<BTreeSet<_>>();
        let not_here: Vec<&Held> =
            uids.into_iter().filter_map(|uid| self.pods.get(uid)).filter(is_here).collect();
        // A GPU that the node doesn't have was written by another program than this.
        let is_foreign = |index: &u32| !node.gpus.gpus.contains_key(index);
        let sum = |units: &mut dyn Iterator<Item = u32>| units.fold(0, u32::saturating_add);
        let all = taken.gpus.iter().filter(|(index, _)| is_foreign(index));
        let foreign = sum(&mut all.map(|(_, of_gpu)| of_gpu.units));
        let parts = not_here.iter().flat_map(|held| &held.gpus).filter(|part| is_foreign(&part.0));
        let foreign = foreign.saturating_sub(sum(&mut parts.map(|part| part.1)));
        let unknown = taken.unknown - sum(&mut not_here.iter().map(|held| held.unknown));
        let unknown = unknown.saturating_add(foreign);
        let capacity = |(index, total): (&u32, &u32)| {
            let mut of_gpu = taken.gpus.get(index).copied().unwrap_or_default();
            for (_, units, percent) in
                not_here.iter().flat_map(|held| &held.gpus).filter(|part| part.0 == *index)
            {
                of_gpu.units -= units;
                of_gpu.percent -= percent;
                of_gpu.pods -= 1;
            }
            // Units of an unknown GPU may be this one's.
            let free = total.saturating_sub(of_gpu.units.saturating_add(unknown));
            Capacity {
                index: *index,
                total: *total,
                free: if node.gpus.closed.contains(index) { 0 } else { free },
                free_percent: ALL_PERCENT.saturating_sub(of_gpu.percent),
                pods: of_gpu.pods,
                siblings: siblings.get(index).copied().unwrap_or_default(),
            }
        };
        node.gpus.gpus.iter().map(capacity).collect()
    }

    /// How many pods of the same workload are on each GPU of a node.
    fn siblings(&self, seeker: &Seeker, node: &str) -> ByGpu {
        let mut siblings = ByGpu::new();
        let Some(workload) = &seeker.workload else { return siblings };
        let uids = self.taken.get(node).into_iter().flat_map(|taken| &taken.pods);
        let others = uids.filter(|uid| **uid != seeker.uid).filter_map(|uid| self.pods.get(uid));
        for held in others.filter(|held| held.workload.as_deref() == Some(workload)) {
            for (index, ..) in &held.gpus {
                *siblings.entry(*index).or_default() += 1;
            }
        }
        siblings
    }

    /// The pods that have something of a GPU which is gone, by their nodes' word.
    #[must_use]
    pub fn lost(&self) -> Vec<PodName> {
        let all = self
            .nodes
            .iter()
            .flat_map(|(node, of)| of.gpus.lost.iter().map(move |pod| (node, pod)));
        let name = |(node, (uid, pod)): (&String, (&String, &String))| {
            let (namespace, name) = pod.split_once('/')?;
            let [namespace, name, node] = [namespace, name, node].map(str::to_owned);
            Some(PodName { namespace, name, uid: uid.clone(), node })
        };
        let mut lost: Vec<PodName> = all.filter_map(name).collect();
        lost.sort();
        lost
    }

    /// The pods on which something else is written than their node says that they have, and what it says; each is
    /// reported again once its node or the pod itself has changed. A node has a say in its own pods, and in no others.
    pub fn take_unwritten(&mut self) -> Vec<(PodName, Given)> {
        let reported = |uid: String| {
            let held = self.pods.get(&uid)?;
            let given = self.nodes.get(&*held.node)?.given.get(&uid)?;
            let [namespace, name, node] =
                [&held.namespace, &held.name, &held.node].map(ToString::to_string);
            let pod = PodName { namespace, name, uid, node };
            (held.written != digest(&given.words())).then(|| (pod, given.clone()))
        };
        std::mem::take(&mut self.unwritten).into_iter().filter_map(reported).collect()
    }

    /// The names of all nodes, sorted.
    #[must_use]
    pub fn node_names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.nodes.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    /// A node's unit and GPUs, with the pods that have something of each.
    #[must_use]
    pub fn view(&self, name: &str) -> Option<(Unit, Vec<GpuView>)> {
        let node = self.nodes.get(name)?;
        let mut views: BTreeMap<u32, GpuView> = BTreeMap::new();
        for (index, total) in &node.gpus.gpus {
            let view = GpuView { index: *index, total: *total, used: 0, pods: Vec::new() };
            views.insert(*index, view);
        }
        let uids = self.taken.get(name).into_iter().flat_map(|taken| &taken.pods);
        let here = uids.filter(|uid| !node.gpus.lost.contains_key(*uid));
        for held in here.filter_map(|uid| self.pods.get(uid)) {
            for (index, units, _) in &held.gpus {
                let Some(view) = views.get_mut(index) else { continue };
                view.used += units;
                let (namespace, name) = (held.namespace.to_string(), held.name.to_string());
                view.pods.push(PodPart { namespace, name, units: *units });
            }
        }
        views.values_mut().for_each(|view| view.pods.sort());
        Some((node.gpus.unit, views.into_values().collect()))
    }
}

impl Seeker {
    /// What a pod wants.
    #[must_use]
    pub fn of(pod: &Pod, asks: &AskRules) -> Self {
        Seeker {
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            name: pod.metadata.name.clone().unwrap_or_default(),
            ask: asks.ask(pod),
            workload: workload(pod),
            weight: Weight::of(pod),
        }
    }
}

impl Weight {
    fn of(pod: &Pod) -> Self {
        let spec = pod.spec.as_ref();
        let requests = || {
            let containers = spec.into_iter().flat_map(|spec| &spec.containers);
            containers.filter_map(|container| container.resources.as_ref()?.requests.as_ref())
        };
        let sum = |name: &str, factor: f64| {
            let amounts = requests().filter_map(|requests| amount(requests.get(name)?));
            // No pod asks for as much as a float can't represent.
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates")]
            {
                (amounts.sum::<f64>() * factor) as u64
            }
        };
        Weight {
            priority: spec.and_then(|spec| spec.priority).unwrap_or_default(),
            cpu_milli: sum("cpu", 1000.0),
            memory_bytes: sum("memory", 1.0),
        }
    }
}

/// A quantity as a number; `None` if it isn't one.
fn amount(quantity: &Quantity) -> Option<f64> {
    let text = quantity.0.trim();
    let end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let factor = match suffix {
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        "" => 1.0,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "Ki" => 1024.0,
        "Mi" => 1_048_576.0,
        "Gi" => 1_073_741_824.0,
        "Ti" => 1_099_511_627_776.0,
        _ => return text.parse().ok(),
    };
    Some(number.parse::<f64>().ok()? * factor)
}

/// GPU, units, percent.
fn joined(memory: &ByGpu, percent: &ByGpu, surplus: &ByGpu) -> Box<[(u32, u32, u32)]> {
    let of = |by_gpu: &ByGpu, index: &u32| by_gpu.get(index).copied().unwrap_or_default();
    let join = |(index, units): (&u32, &u32)| {
        let units = units.saturating_add(of(surplus, index));
        (*index, units.min(MOST_UNITS), of(percent, index).min(MOST_UNITS))
    };
    memory.iter().map(join).collect()
}

/// The UID of a pod's controller.
fn workload(pod: &Pod) -> Option<String> {
    let mut owners = pod.metadata.owner_references.iter().flatten();
    owners.find(|owner| owner.controller == Some(true)).map(|owner| owner.uid.clone())
}

#[cfg(test)]
mod tests;
