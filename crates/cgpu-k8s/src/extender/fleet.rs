//! The GPUs of all nodes and which pods have what of them: [`Fleet`]. Pure: it is told what the API server has,
//! and what was promised meanwhile.

use std::collections::{BTreeMap, HashMap, HashSet};

use k8s_openapi::api::core::v1::{Node, Pod};

use crate::ask::PodAsk;
use crate::node::{NodeGpus, gpus_of, most_pods_of, placement_of};
use crate::place::Placement;
use crate::units::Unit;
use crate::written::{ByContainer, ByGpu, CORE_ALLOCATION, Words, shares, sum};

use super::choose::{ALL_PERCENT, Choice, NoRoom, Room, choose};

/// The most units (or percent) that a pod counts for on one GPU, whatever is written on it: 2 TiB in MiB, and no
/// sum over a node's pods overflows.
const MOST_UNITS: u32 = 1 << 21;

/// How pods are placed where a node's labels don't say it.
#[derive(Debug, Clone)]
pub struct FleetRules {
    /// What pods ask for.
    pub resource: String,
    /// Which GPU is preferred.
    pub placement: Placement,
    /// How many pods a GPU may have.
    pub most_pods: u32,
}

/// A pod that wants a place.
#[derive(Debug, Clone)]
pub struct Seeker {
    /// Its UID.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// What it asks for.
    pub ask: PodAsk,
    /// Who made it, by UID: a ReplicaSet, a StatefulSet, a Job.
    pub workload: Option<String>,
}

/// All nodes and pods, as far as they have to do with shared GPUs.
#[derive(Debug)]
pub struct Fleet {
    rules: FleetRules,
    nodes: HashMap<String, FleetNode>,
    /// What is taken of nodes, which may be there sooner or longer than the node.
    taken: HashMap<String, Taken>,
    pods: HashMap<String, Held>,
    /// How many promises there were.
    promises: u64,
}

#[derive(Debug)]
struct FleetNode {
    gpus: NodeGpus,
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

/// What a pod has, or is promised.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Held {
    node: Box<str>,
    namespace: Box<str>,
    name: Box<str>,
    /// GPU, units, percent.
    gpus: Box<[(u32, u32, u32)]>,
    unknown: u32,
    workload: Option<Box<str>>,
    /// The number of the promise, where the API server hasn't told of the pod on its node yet.
    promise: Option<u64>,
}

/// What a pod has of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodPart {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Units.
    pub units: u32,
}

/// A GPU of a node, to be looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuView {
    /// Its index.
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
pub struct Promise {
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
            promises: 0,
        }
    }

    /// What pods ask for.
    #[must_use]
    pub fn resource(&self) -> &str {
        &self.rules.resource
    }

    /// Takes over what the API server has of a node.
    pub fn set_node(&mut self, node: &Node) {
        let Some(name) = &node.metadata.name else { return };
        let Some(gpus) = gpus_of(node, &self.rules.resource) else {
            self.nodes.remove(name);
            return;
        };
        let none = Words::new();
        let labels = node.metadata.labels.as_ref().unwrap_or(&none);
        let (placement, most_pods) = (placement_of(labels), most_pods_of(labels));
        self.nodes.insert(name.clone(), FleetNode { gpus, placement, most_pods });
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
        let ask = PodAsk::of(pod, &self.rules.resource);
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        if ask.is_empty() || matches!(phase, Some("Succeeded" | "Failed")) {
            self.remove_pod(uid);
            return;
        }
        // One that is on no node yet may have been promised something.
        let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) else { return };
        let none = Words::new();
        let annotations = pod.metadata.annotations.as_ref().unwrap_or(&none);
        let memory = shares(annotations, &ask);
        let percent = annotations.get(CORE_ALLOCATION);
        let percent = percent.and_then(|text| serde_json::from_str::<ByContainer>(text).ok());
        let (unknown, memory) = match memory {
            Some(shares) => (0, sum(&shares)),
            None => (ask.units().saturating_add(ask.surplus()).min(MOST_UNITS), ByGpu::new()),
        };
        let count = u32::try_from(memory.len()).unwrap_or(u32::MAX).max(1);
        let surplus = memory.keys().map(|index| (*index, ask.surplus() / count)).collect();
        let held = Held {
            node: node.into(),
            namespace: pod.metadata.namespace.clone().unwrap_or_default().into(),
            name: pod.metadata.name.clone().unwrap_or_default().into(),
            gpus: joined(
                &memory,
                &percent.map(|shares| sum(&shares)).unwrap_or_default(),
                &surplus,
            ),
            unknown,
            workload: workload(pod).map(Into::into),
            promise: None,
        };
        self.hold(uid, held);
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

    /// How many promises there were: what [`Fleet::retain_pods`] is told of the beginning of a list.
    #[must_use]
    pub fn promises(&self) -> u64 {
        self.promises
    }

    /// Forgets all pods but these: what is left after all were listed. What was promised since the list began
    /// may be of a pod that the list doesn't have, and stays.
    pub fn retain_pods(&mut self, uids: &HashSet<String>, promises_before: u64) {
        let is_gone = |(uid, held): &(&String, &Held)| {
            !uids.contains(*uid) && held.promise.is_none_or(|promise| promise <= promises_before)
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
    pub fn can_have(&self, seeker: &Seeker, node: &str) -> Result<(), NoRoom> {
        self.choice(seeker, node, false).map(|_| ())
    }

    /// Gives a pod a place on that node, until the API server tells of it there or it is gone. Another promise to
    /// the same pod is void then.
    ///
    /// # Errors
    ///
    /// Why there is none; then nothing has changed.
    pub fn promise(&mut self, seeker: &Seeker, node: &str) -> Result<Promise, NoRoom> {
        let choice = self.choice(seeker, node, true)?;
        let memory = sum(&choice.memory);
        let of_node = self.nodes.get(node).map(|node| &node.gpus.gpus);
        let first = of_node.and_then(|gpus| memory.keys().find_map(|index| gpus.get(index)));
        let gpu_units = first.copied().unwrap_or_default();
        self.promises += 1;
        let held = Held {
            node: node.into(),
            namespace: seeker.namespace.as_str().into(),
            name: seeker.name.as_str().into(),
            gpus: joined(&memory, &sum(&choice.percent), &choice.surplus),
            unknown: 0,
            workload: seeker.workload.as_deref().map(Into::into),
            promise: Some(self.promises),
        };
        self.hold(&seeker.uid, held);
        Ok(Promise { choice, gpu_units })
    }

    /// Takes a promise back that certainly came to nothing.
    pub fn forget(&mut self, uid: &str) {
        if self.pods.get(uid).is_some_and(|held| held.promise.is_some()) {
            self.remove_pod(uid);
        }
    }

    fn choice(&self, seeker: &Seeker, name: &str, for_good: bool) -> Result<Choice, NoRoom> {
        let node = self.nodes.get(name).ok_or(NoRoom::NoGpus)?;
        let placement = node.placement.unwrap_or(self.rules.placement);
        let siblings = match (for_good, placement) {
            (true, Placement::Spread) => self.siblings(seeker, name),
            _ => ByGpu::new(),
        };
        let rooms = self.rooms(seeker, name, node, &siblings);
        let most_pods = node.most_pods.unwrap_or(self.rules.most_pods);
        choose(&rooms, &seeker.ask, node.gpus.unit, placement, most_pods)
    }

    fn rooms(&self, seeker: &Seeker, name: &str, node: &FleetNode, siblings: &ByGpu) -> Vec<Room> {
        let none = Taken::default();
        let taken = self.taken.get(name).unwrap_or(&none);
        // What the pod was promised before is its own.
        let own = self.pods.get(&seeker.uid).filter(|held| &*held.node == name);
        let unknown = taken.unknown - own.map_or(0, |held| held.unknown);
        let room = |(index, total): (&u32, &u32)| {
            let mut of_gpu = taken.gpus.get(index).copied().unwrap_or_default();
            for (_, units, percent) in
                own.iter().flat_map(|own| &own.gpus).filter(|own| own.0 == *index)
            {
                of_gpu.units -= units;
                of_gpu.percent -= percent;
                of_gpu.pods -= 1;
            }
            // Units of an unknown GPU may be this one's.
            let free = total.saturating_sub(of_gpu.units.saturating_add(unknown));
            Room {
                index: *index,
                total: *total,
                free: if node.gpus.closed.contains(index) { 0 } else { free },
                free_percent: ALL_PERCENT.saturating_sub(of_gpu.percent),
                pods: of_gpu.pods,
                siblings: siblings.get(index).copied().unwrap_or_default(),
            }
        };
        node.gpus.gpus.iter().map(room).collect()
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
        for held in uids.filter_map(|uid| self.pods.get(uid)) {
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
    pub fn of(pod: &Pod, resource: &str) -> Self {
        Seeker {
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            name: pod.metadata.name.clone().unwrap_or_default(),
            ask: PodAsk::of(pod, resource),
            workload: workload(pod),
        }
    }
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

/// The UID of who controls a pod.
fn workload(pod: &Pod) -> Option<String> {
    let mut owners = pod.metadata.owner_references.iter().flatten();
    owners.find(|owner| owner.controller == Some(true)).map(|owner| owner.uid.clone())
}

#[cfg(test)]
mod tests;
