//! What a pod asks for of a node's GPUs: [`PodAsk`]. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The label or annotation of a pod that says on how many GPUs its memory is.
pub const GPU_COUNT: &str = "aliyun.com/gpu-count";

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
    /// Percent of compute in all; 0 where it doesn't ask for any.
    pub percent: u32,
    /// Whether it ends before the others begin: an init container that isn't a sidecar.
    pub is_init: bool,
}

impl PodAsk {
    /// What `pod` asks for of `resource`.
    #[must_use]
    pub fn of(pod: &Pod, resource: &str) -> Self {
        let gpus = gpu_count(pod);
        let Some(spec) = &pod.spec else { return PodAsk { containers: Vec::new(), gpus } };
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
        let containers = first.chain(others).filter(|ask| ask.units > 0).collect();
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

    /// How many more than [`PodAsk::units`] it holds for an init container that asks for more than all others:
    /// the kubelet keeps them as long as the pod is there.
    #[must_use]
    pub fn surplus(&self) -> u32 {
        let first = self.containers.iter().filter(|ask| ask.is_init).map(|ask| ask.units);
        first.max().unwrap_or_default().saturating_sub(self.units())
    }
}

/// How many of `resource` a container asks for.
fn limit(container: &Container, resource: &str) -> u32 {
    let limits = container.resources.as_ref().and_then(|resources| resources.limits.as_ref());
    limits.and_then(|limits| limits.get(resource)).and_then(whole).unwrap_or_default()
}

/// A quantity as a whole number; the API server writes 2000 as `2k`. `None` where it is none, or too large.
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
        let told = |text: &str| whole(&Quantity(text.to_owned()));
        for (text, number) in [("7", 7), ("2k", 2000), ("3803", 3803), ("1Ki", 1024), ("1e3", 1000)]
        {
            assert_eq!(told(text), Some(number), "{text}");
        }
        for text in ["", "-1", "1.5", "7m", "5G", "many", "k"] {
            assert_eq!(told(text), None, "{text}");
        }
    }

    #[test]
    fn an_init_container_s_units_are_the_others_afterwards_and_a_sidecar_s_are_not() {
        let mut sidecar = container("side", "2");
        sidecar["restartPolicy"] = json!("Always");
        let told = ask(&json!({
            "initContainers": [container("first", "9"), sidecar],
            "containers": [container("a", "3"), {"name": "none"}, container("b", "1")],
        }));
        let names: Vec<_> = told.containers.iter().map(|ask| (&*ask.name, ask.is_init)).collect();
        assert_eq!(names, [("first", true), ("side", false), ("a", false), ("b", false)]);
        assert_eq!((told.units(), told.surplus()), (6, 3));
        let less = ask(&json!({
            "initContainers": [container("first", "2")], "containers": [container("a", "3")],
        }));
        assert_eq!((less.units(), less.surplus()), (3, 0));
        assert!(ask(&json!({"containers": [{"name": "none"}]})).is_empty());
    }
}
