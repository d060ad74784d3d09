//! What a pod asks for of a node's GPUs: [`PodAsk`], and what it can't have: [`AskRules::refused`]. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The label or annotation of a pod that says on how many GPUs its memory is.
pub const GPU_COUNT: &str = "aliyun.com/gpu-count";

/// The resource that is units of memory, by the name that it has unless the plugin is given another.
pub const MEMORY: &str = "aliyun.com/gpu-mem";

/// The resource that is exclusive GPUs, by the name that it has unless the plugin is given another.
pub const WHOLE: &str = "aliyun.com/gpu-whole";

/// The resource that is percent of a GPU's compute (ACK's); 100 is a GPU's all.
pub const CORE_PERCENTAGE: &str = "aliyun.com/gpu-core.percentage";

/// What a pod asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodAsk {
    /// Those of its containers that ask for memory, in the order in which the kubelet serves them.
    pub containers: Vec<ContainerAsk>,
    /// On how many GPUs the memory of each is, or why that can't be.
    pub gpus: Result<u32, String>,
}

/// What a container asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerAsk {
    /// Its name in the pod.
    pub name: String,
    /// Units of memory in all.
    pub units: u32,
    /// Percent of compute in all; 0 if it doesn't ask for any.
    pub percent: u32,
    /// Whether it ends before the others begin: an init container that isn't a sidecar.
    pub is_init: bool,
}

impl PodAsk {
    /// What `pod` asks for of `resource`.
    #[must_use]
    pub fn of(pod: &Pod, resource: &str) -> Self {
        let Some(spec) = &pod.spec else {
            return PodAsk { containers: Vec::new(), gpus: Ok(1) };
        };
        let ask = |container: &Container, is_init| ContainerAsk {
            name: container.name.clone(),
            units: limit(container, resource),
            percent: limit(container, CORE_PERCENTAGE),
            is_init,
        };
        let is_sidecar = |container: &Container| {
            container.restart_policy.as_deref().is_some_and(|policy| policy == "Always")
        };
        let first = spec.init_containers.iter().flatten();
        let first = first.map(|container| ask(container, !is_sidecar(container)));
        let others = spec.containers.iter().map(|container| ask(container, false));
        let containers: Vec<_> = first.chain(others).filter(|ask| ask.units > 0).collect();
        let gpus = if containers.is_empty() { Ok(1) } else { gpu_count(pod) };
        PodAsk { containers, gpus }
    }

    /// Whether it asks for nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.containers.is_empty()
    }

    /// Units that its containers have side by side, on all GPUs together.
    #[must_use]
    pub fn units(&self) -> u32 {
        let beside = self.containers.iter().filter(|ask| !ask.is_init);
        beside.map(|ask| ask.units).fold(0, u32::saturating_add)
    }

    /// How many more than [`PodAsk::units`] it holds for an init container that asks for more than all others, together
    /// with the sidecars that stand before it: the kubelet retains them as long as the pod is there. As Kubernetes
    /// counts what a pod requests (KEP-753).
    #[must_use]
    pub fn surplus(&self) -> u32 {
        let (mut sidecars, mut most) = (0_u32, 0);
        for ask in &self.containers {
            let beside = sidecars.saturating_add(ask.units);
            match ask.is_init {
                true => most = beside.max(most),
                false => sidecars = beside,
            }
        }
        most.saturating_sub(self.units())
    }
}

/// What pods of a cluster ask for, and whose containers are made by cgpu.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AskRules {
    /// The resource that is units of memory.
    pub memory: String,
    /// The resource that is exclusive GPUs; empty if it is another plugin's.
    pub whole: String,
    /// The RuntimeClasses whose containers are made by cgpu.
    pub runtime_classes: Vec<String>,
    /// Whether cgpu makes the containers of pods that name no RuntimeClass.
    pub is_default: bool,
}

impl Default for AskRules {
    /// The names that resources have unless configured otherwise, if cgpu is the default runtime.
    fn default() -> Self {
        AskRules {
            memory: MEMORY.to_owned(),
            whole: WHOLE.to_owned(),
            runtime_classes: vec!["cgpu".to_owned()],
            is_default: true,
        }
    }
}

impl AskRules {
    /// What `pod` asks for of memory, or why it can't have that.
    #[must_use]
    pub fn ask(&self, pod: &Pod) -> PodAsk {
        let ask = PodAsk::of(pod, &self.memory);
        let gpus = self.refused(pod).map_or(ask.gpus, Err);
        PodAsk { gpus, ..ask }
    }

    /// Why `pod` can have no GPU, whatever is free: no plugin could give it what it asks for, or nothing would enforce
    /// that.
    #[must_use]
    pub fn refused(&self, pod: &Pod) -> Option<String> {
        let spec = pod.spec.as_ref()?;
        let refused = |container| self.refused_container(container);
        if let Some(why) = containers(pod).find_map(refused) {
            return Some(why);
        }
        let asks = |container: &Container| {
            limit(container, &self.memory) > 0 || self.whole_of(container) > 0
        };
        if !containers(pod).any(asks) {
            return self.asked_elsewhere(pod);
        }
        let class = spec.runtime_class_name.as_deref().filter(|class| !class.is_empty());
        match class {
            Some(class) if !self.runtime_classes.iter().any(|ours| ours == class) => Some(format!(
                "runtimeClassName {class} isn't cgpu's, and nothing would hold the pod to what it asks for; write \
                 runtimeClassName: {}, or none, or tell cgpu that this class runs it (--runtime-class; runtimeClass.ours of \
                 the chart)",
                self.runtime_classes.first().map_or("cgpu", String::as_str),
            )),
            None if !self.is_default => Some(format!(
                "the pod has no runtimeClassName, and cgpu isn't the nodes' default runtime, so nothing would hold the pod to \
                 what it asks for; write runtimeClassName: {}, or make cgpu the default (node.setup.default of the chart)",
                self.runtime_classes.first().map_or("cgpu", String::as_str),
            )),
            _ => None,
        }
    }

    fn whole_of(&self, container: &Container) -> u32 {
        if self.whole.is_empty() { 0 } else { limit(container, &self.whole) }
    }

    fn refused_container(&self, container: &Container) -> Option<String> {
        let (name, memory, whole) = (&container.name, &self.memory, &self.whole);
        let is_whole = self.whole_of(container) > 0;
        let said = |resource: &str| said(container, resource);
        for resource in [memory, whole].into_iter().filter(|resource| !resource.is_empty()) {
            let Some(text) = said(resource).filter(|text| is_size(text)) else { continue };
            return Some(format!(
                "container {name} asks for {resource}: {text}, and that is counted in units and not in bytes: write how many, \
                 as {resource}: {}",
                text.trim_end_matches(|c: char| c.is_ascii_alphabetic()),
            ));
        }
        if is_whole && limit(container, memory) > 0 {
            return Some(format!(
                "container {name} asks for {memory} and for {whole}, and gets a part of a GPU or a whole one; take one of \
                 both out"
            ));
        }
        // A capacity of nodes, of which the kubelet would give some.
        if limit(container, GPU_COUNT) > 0 {
            return Some(format!(
                "container {name} asks for {GPU_COUNT} as a limit; it is a label of the pod: take it out of the limits, and \
                 write the label"
            ));
        }
        let percent = limit(container, CORE_PERCENTAGE);
        (percent > 0 && !is_whole && said(memory).is_none()).then(|| {
            format!(
                "container {name} asks for {percent} percent of compute ({CORE_PERCENTAGE}) and for no memory, and gets no GPU; \
                 add {memory} to its limits"
            )
        })
    }

    /// Why a pod gets nothing that asks by an annotation or label where a limit belongs.
    fn asked_elsewhere(&self, pod: &Pod) -> Option<String> {
        let names = [&*self.memory, &*self.whole, CORE_PERCENTAGE];
        let named = |words: &Option<BTreeMap<String, String>>, what| {
            let has = |name: &&&str| words.as_ref().is_some_and(|words| words.contains_key(**name));
            names.iter().find(has).map(|name| {
                format!(
                    "{name} is {what} of the pod and no limit of a container, and the pod gets no GPU; write it into \
                     resources.limits of the container that is to have it"
                )
            })
        };
        named(&pod.metadata.annotations, "an annotation")
            .or_else(|| named(&pod.metadata.labels, "a label"))
    }

    /// Whether the kubelet asks for memory or GPUs for `pod`, once it is on a node.
    #[must_use]
    pub fn is_given(&self, pod: &Pod) -> bool {
        containers(pod).any(|container| {
            said(container, &self.memory).or_else(|| said(container, &self.whole)).is_some()
        })
    }

    /// Whether a scheduler asks us about `pod`: it asks for a resource of ours, and for no amount that no node has.
    #[must_use]
    pub fn is_asked_for(&self, pod: &Pod) -> bool {
        let names = [&*self.memory, &*self.whole, CORE_PERCENTAGE, GPU_COUNT];
        let texts = containers(pod).flat_map(|container| names.map(|name| said(container, name)));
        let mut texts = texts.flatten().peekable();
        texts.peek().is_some() && !texts.any(is_size)
    }
}

/// A pod's containers in the order in which the kubelet serves them.
fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    let first = pod.spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
    first.chain(pod.spec.iter().flat_map(|spec| &spec.containers))
}

/// What a container's limit of `resource` is, as it was written.
fn said<'a>(container: &'a Container, resource: &str) -> Option<&'a str> {
    let limits = container.resources.as_ref()?.limits.as_ref()?;
    limits.get(resource).map(|quantity| quantity.0.trim()).filter(|text| *text != "0")
}

/// Whether a quantity has a suffix by which people write bytes. The API server writes thousands as `k` itself, and
/// millions as `M`.
fn is_size(text: &str) -> bool {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    matches!(&text[digits..], "Ki" | "Mi" | "Gi" | "Ti" | "Pi" | "Ei" | "G" | "T" | "P" | "E")
}

/// How many of `resource` a container asks for.
fn limit(container: &Container, resource: &str) -> u32 {
    let limits = container.resources.as_ref().and_then(|resources| resources.limits.as_ref());
    limits.and_then(|limits| limits.get(resource)).and_then(whole).unwrap_or_default()
}

/// A quantity as a whole number; the API server writes 2000 as `2k`. `None` if it isn't one, or is too large.
#[must_use]
pub fn whole(quantity: &Quantity) -> Option<u32> {
    let text = quantity.0.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits);
    let factor: u64 = match suffix {
        "" => 1,
        "k" | "e3" | "E3" => 1000,
        "M" | "e6" | "E6" => 1_000_000,
        "G" | "e9" | "E9" => 1_000_000_000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        _ => return None,
    };
    u32::try_from(number.parse::<u64>().ok()?.checked_mul(factor)?).ok()
}

/// On how many GPUs the memory of a pod's containers is.
fn gpu_count(pod: &Pod) -> Result<u32, String> {
    let of = |words: &Option<BTreeMap<String, String>>| words.as_ref()?.get(GPU_COUNT).cloned();
    match of(&pod.metadata.labels).or_else(|| of(&pod.metadata.annotations)) {
        None => Ok(1),
        Some(text) => match text.parse() {
            Ok(count) if count > 0 => Ok(count),
            _ => Err(format!("{GPU_COUNT} is {text:?}; a number of GPUs is 1 or more")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn ask(spec: &Value) -> PodAsk {
        let pod = serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec}));
        PodAsk::of(&pod.unwrap(), "aliyun.com/gpu-mem")
    }

    fn container(name: &str, units: &str) -> Value {
        json!({"name": name, "resources": {"limits": {"aliyun.com/gpu-mem": units}}})
    }

    #[test]
    fn quantities_are_whole_numbers_however_they_are_written() {
        let reported = |text: &str| whole(&Quantity(text.to_owned()));
        for (text, number) in [("7", 7), ("2k", 2000), ("3803", 3803), ("1Ki", 1024), ("1e3", 1000)]
        {
            assert_eq!(reported(text), Some(number), "{text}");
        }
        for text in ["", "-1", "1.5", "7m", "5G", "many", "k"] {
            assert_eq!(reported(text), None, "{text}");
        }
    }

    /// An init container's units are the other containers' afterwards, and a sidecar's are not.
    #[test]
    fn init_container_units_are_reused_unlike_a_sidecars() {
        let mut sidecar = container("side", "2");
        sidecar["restartPolicy"] = json!("Always");
        let reported = ask(&json!({
            "initContainers": [container("first", "9"), sidecar],
            "containers": [container("a", "3"), {"name": "none"}, container("b", "1")],
        }));
        let names: Vec<_> =
            reported.containers.iter().map(|ask| (&*ask.name, ask.is_init)).collect();
        assert_eq!(names, [("first", true), ("side", false), ("a", false), ("b", false)]);
        assert_eq!((reported.units(), reported.surplus()), (6, 3));
        let mut sidecar = container("side", "2");
        sidecar["restartPolicy"] = json!("Always");
        let before = ask(&json!({
            "initContainers": [sidecar, container("first", "9")], "containers": [container("a", "3")],
        }));
        assert_eq!((before.units(), before.surplus()), (5, 6), "11 as Kubernetes takes them");
        let less = ask(&json!({
            "initContainers": [container("first", "2")], "containers": [container("a", "3")],
        }));
        assert_eq!((less.units(), less.surplus()), (3, 0));
        assert!(ask(&json!({"containers": [{"name": "none"}]})).is_empty());
    }

    fn rules(is_default: bool) -> AskRules {
        let runtime_classes = vec!["cgpu".to_owned(), "ours".to_owned()];
        AskRules { runtime_classes, is_default, ..AskRules::default() }
    }

    fn pod(spec: &Value, annotations: &Value) -> Pod {
        let metadata = json!({"name": "p", "annotations": annotations});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
    }

    fn limits(limits: &Value) -> Value {
        json!({"containers": [{"name": "a", "resources": {"limits": limits}}]})
    }

    /// Limits that no container could get are refused in words that say what to change.
    #[test]
    fn impossible_requests_are_refused_with_the_reason() {
        for (asked, words, is_asked_for) in [
            (
                json!({"aliyun.com/gpu-mem": "4", "aliyun.com/gpu-whole": "1"}),
                "container a asks for aliyun.com/gpu-mem and for aliyun.com/gpu-whole, and gets a part of a GPU or a whole one; \
                 take one of both out",
                true,
            ),
            (
                json!({"aliyun.com/gpu-mem": "8", "aliyun.com/gpu-count": "2"}),
                "container a asks for aliyun.com/gpu-count as a limit; it is a label of the pod: take it out of the limits, and \
                 write the label",
                true,
            ),
            (
                json!({"aliyun.com/gpu-core.percentage": "30"}),
                "container a asks for 30 percent of compute (aliyun.com/gpu-core.percentage) and for no memory, and gets no \
                 GPU; add aliyun.com/gpu-mem to its limits",
                true,
            ),
            (
                json!({"aliyun.com/gpu-mem": "8Gi"}),
                "container a asks for aliyun.com/gpu-mem: 8Gi, and that is counted in units and not in bytes: write how many, \
                 as aliyun.com/gpu-mem: 8",
                false,
            ),
            (
                json!({"aliyun.com/gpu-mem": "10G", "aliyun.com/gpu-core.percentage": "30"}),
                "container a asks for aliyun.com/gpu-mem: 10G, and that is counted in units and not in bytes: write how many, \
                 as aliyun.com/gpu-mem: 10",
                false,
            ),
        ] {
            let pod = pod(&limits(&asked), &json!({}));
            for is_default in [true, false] {
                assert_eq!(rules(is_default).refused(&pod).as_deref(), Some(words));
                assert_eq!(rules(is_default).ask(&pod).gpus.unwrap_err(), words);
                assert_eq!(rules(is_default).is_asked_for(&pod), is_asked_for, "{asked}");
            }
        }
        // Two containers may each have one of both.
        let mut apart = limits(&json!({"aliyun.com/gpu-mem": "4"}));
        let other = json!({"name": "b", "resources": {"limits": {"aliyun.com/gpu-whole": "1", "aliyun.com/gpu-core.percentage": "9"}}});
        apart["containers"].as_array_mut().unwrap().push(other);
        assert_eq!(rules(true).ask(&pod(&apart, &json!({}))).gpus, Ok(1));
        // What another plugin gives out is that one's.
        let others = AskRules { whole: String::new(), ..rules(true) };
        let both = json!({"aliyun.com/gpu-mem": "4", "aliyun.com/gpu-whole": "1"});
        assert_eq!(others.refused(&pod(&limits(&both), &json!({}))), None);
    }

    proptest! {
        /// Against the algorithm as KEP-753 has it.
        #[test]
        fn a_pod_holds_as_much_as_kubernetes_counts(
            first in proptest::collection::vec((0..9_u32, any::<bool>()), 0..6),
            others in proptest::collection::vec(0..9_u32, 1..4),
        ) {
            let named = |(at, (units, is_sidecar)): (usize, &(u32, bool))| {
                let mut made = container(&format!("i{at}"), &units.to_string());
                if *is_sidecar {
                    made["restartPolicy"] = json!("Always");
                }
                made
            };
            let containers: Vec<Value> =
                others.iter().enumerate().map(|(at, units)| container(&format!("c{at}"), &units.to_string())).collect();
            let reported = ask(&json!({
                "initContainers": first.iter().enumerate().map(named).collect::<Vec<_>>(),
                "containers": containers,
            }));
            let (mut restartable, mut peak) = (0, 0);
            for (units, is_sidecar) in first {
                if is_sidecar {
                    restartable += units;
                    peak = peak.max(restartable);
                } else {
                    peak = peak.max(restartable + units);
                }
            }
            let steady = restartable + others.iter().sum::<u32>();
            prop_assert_eq!(reported.units() + reported.surplus(), steady.max(peak));
        }
    }

    /// An annotation instead of a limit asks for nothing, and is reported.
    #[test]
    fn annotation_instead_of_a_limit_is_reported() {
        let words = json!({"aliyun.com/gpu-mem": "3"});
        let plain = json!({"containers": [{"name": "a"}]});
        let asked = pod(&plain, &words);
        let why = rules(true).refused(&asked).unwrap();
        assert!(
            why.starts_with(
                "aliyun.com/gpu-mem is an annotation of the pod and no limit of a container"
            ),
            "{why}"
        );
        assert!(!rules(true).is_asked_for(&asked));
        assert_eq!(rules(true).refused(&pod(&plain, &json!({}))), None);
        // Next to a limit it says nothing.
        let both = pod(&limits(&json!({"aliyun.com/gpu-mem": "3"})), &words);
        assert_eq!(rules(true).refused(&both), None);
        assert!(rules(true).is_asked_for(&both));
    }

    /// A pod whose containers another runtime creates gets none of cgpu's resources.
    #[test]
    fn pods_of_other_runtime_classes_are_refused() {
        let asks = [json!({"aliyun.com/gpu-mem": "4"}), json!({"aliyun.com/gpu-whole": "1"})];
        let of = |class: Option<&str>, asked: &Value, is_default| {
            let mut spec = limits(asked);
            spec["runtimeClassName"] = json!(class);
            rules(is_default).refused(&pod(&spec, &json!({})))
        };
        for asked in &asks {
            for (class, is_default) in
                [(Some("cgpu"), true), (Some("ours"), false), (None, true), (Some("cgpu"), false)]
            {
                assert_eq!(of(class, asked, is_default), None, "{class:?} {is_default}");
            }
            for class in ["nvidia", "gvisor", "kata-qemu"] {
                let why = of(Some(class), asked, true).unwrap();
                assert!(
                    why.starts_with(&format!("runtimeClassName {class} isn't cgpu's")),
                    "{why}"
                );
                assert!(
                    why.contains("runtimeClassName: cgpu") && why.contains("runtimeClass.ours")
                );
            }
            let why = of(None, asked, false).unwrap();
            assert!(why.contains("runtimeClassName: cgpu") && why.contains("node.setup.default"));
        }
        // A pod that asks for nothing of ours is none of our business.
        assert_eq!(of(Some("nvidia"), &json!({"nvidia.com/gpu": "1"}), true), None);
    }
}
