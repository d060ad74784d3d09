//! What a pod's container gets that Kubernetes has given nothing, and that names GPUs all the same: [`Ungranted`].
//! Pure.

use alloc::borrow::ToOwned;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use super::setting_names::{
    DISABLE, GPUS, MEM_CONTAINER, MEM_DEV, MEM_UNIT, MEMORY, NAMES, NVIDIA_MEMORY_LIMIT,
    NVIDIA_MEMORY_REQUEST, NVIDIA_VISIBLE_DEVICES, SET_ASIDE, VISIBLE_DEVICES,
};
use super::{Rules, Setting};

/// What a pod's container gets that has no grant and names GPUs itself, or its image does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ungranted {
    /// What it asks for, as a container of docker's.
    AsAsked,
    /// No GPU. It starts, and that is reported.
    None,
    /// Nothing: it is refused.
    Refuse,
    /// Unlimited use of the GPUs that it names.
    Whole,
}

/// Settings of a bundle, those that name GPUs or memory left out.
#[derive(Debug)]
pub(super) struct Stripped<'a> {
    pub(super) env: Vec<&'a str>,
    pub(super) annotations: Vec<(&'a str, &'a str)>,
    /// The first that is left out.
    pub(super) first: Option<Setting>,
}

/// Variables and annotations without those that ask for memory, and without those that name GPUs unless `keeps_gpus`.
pub(super) fn stripped<'a>(
    (env, annotations): (&[&'a str], &[(&'a str, &'a str)]),
    rules: &Rules<'_>,
    keeps_gpus: bool,
) -> Stripped<'a> {
    let of_memory = [MEMORY, MEM_CONTAINER, MEM_DEV, MEM_UNIT, DISABLE];
    let of_gpus = [GPUS, VISIBLE_DEVICES];
    let is_retained = |name: &super::setting_names::Name| {
        keeps_gpus && (of_gpus.contains(name) || !of_memory.contains(name))
    };
    let others = [NVIDIA_MEMORY_LIMIT, NVIDIA_MEMORY_REQUEST].into_iter();
    let mut others = others.chain(SET_ASIDE.iter().map(|(_, aside)| *aside)).collect::<Vec<_>>();
    if !keeps_gpus {
        others.push(NVIDIA_VISIBLE_DEVICES);
    }
    let asks = |name: &str| {
        let ours = NAMES.iter().find(|ours| ours.variable == name);
        ours.is_some_and(|ours| !is_retained(ours))
            || others.contains(&name)
            || (!keeps_gpus && rules.is_resource_variable(name))
    };
    let is_variable = |item: &&str| asks(item.split('=').next().unwrap_or(item));
    let is_word = |(name, _): &(&str, &str)| {
        NAMES.iter().any(|ours| ours.annotation == *name && !is_retained(ours))
    };
    let says = |(name, value): (&str, &str)| Setting {
        name: name.to_owned().into(),
        value: value.to_owned(),
    };
    let variables = env.iter().copied().filter(is_variable);
    let variables = variables.filter_map(|item| item.split_once('='));
    let words = annotations.iter().copied().filter(is_word);
    let first = variables.chain(words).find(|(_, value)| !value.is_empty()).map(says);
    Stripped {
        env: env.iter().copied().filter(|item| !is_variable(item)).collect(),
        annotations: annotations.iter().copied().filter(|word| !is_word(word)).collect(),
        first,
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{MARKS, RULES, decided};
    use super::super::{RequestError, Rules, Verdict};
    use super::*;

    fn under(ungranted: Ungranted) -> Rules<'static> {
        Rules { ungranted, ..RULES }
    }

    const GREED: [&str; 3] = ["NVIDIA_VISIBLE_DEVICES=0", "CGPU_MEMORY=4GiB", "PATH=/bin"];

    /// A pod without a grant gets what `kubernetes.ungranted` of its node says.
    #[test]
    fn pod_without_grant_follows_the_nodes_rule() {
        let as_asked = decided(&GREED, &MARKS, &under(Ungranted::AsAsked)).unwrap();
        assert!(as_asked.request().is_some_and(super::super::Request::has_quota));
        let none = decided(&GREED, &MARKS, &under(Ungranted::None)).unwrap();
        assert!(matches!(none.verdict, Verdict::NotOurs(_)), "{none:?}");
        let reported: Vec<String> = none.near_misses.iter().map(ToString::to_string).collect();
        let words = "NVIDIA_VISIBLE_DEVICES=0 gives no GPU: Kubernetes has given this container none, and this node gives \
                     none else (kubernetes.ungranted = \"none\"); ask for aliyun.com/gpu-mem or aliyun.com/gpu-whole in its \
                     limits";
        assert_eq!(reported, [words]);
        let refused = decided(&GREED, &MARKS, &under(Ungranted::Refuse)).unwrap_err();
        assert!(matches!(refused, RequestError::Ungranted { .. }), "{refused}");
        let whole = decided(&GREED, &MARKS, &under(Ungranted::Whole)).unwrap();
        assert!(whole.request().is_some_and(|request| !request.has_quota()), "{whole:?}");
    }

    /// A container that names nothing, and one that is of no pod, are treated as before.
    #[test]
    fn ungranted_rule_ignores_requestless_and_podless_containers() {
        for ungranted in [Ungranted::None, Ungranted::Refuse, Ungranted::Whole] {
            let rules = under(ungranted);
            for env in [&["PATH=/bin"][..], &["NVIDIA_VISIBLE_DEVICES=void"], &["CGPU_MEMORY="]] {
                let plain = decided(env, &MARKS, &rules).unwrap();
                assert!(plain.request().is_none(), "{ungranted:?} {env:?}");
                let before = decided(env, &MARKS, &under(Ungranted::AsAsked)).unwrap();
                assert_eq!(plain, before, "{ungranted:?} {env:?}");
            }
            let dockers = decided(&GREED, &[], &rules).unwrap();
            assert!(dockers.request().is_some_and(super::super::Request::has_quota));
        }
    }
}
