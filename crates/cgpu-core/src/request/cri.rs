//! What Kubernetes' engines mark containers with: [`is_sandbox`], [`is_container`], [`PodContainer`].
//!
//! A mark alone proves nothing, for podman before 4.6 copies annotations from an image's manifest. All marks of
//! one engine together do, the sandbox's id among them: an image can't know the id that its container
//! will get.

use alloc::borrow::ToOwned;
use alloc::string::String;
use core::fmt;

use serde::{Deserialize, Serialize};

use super::BundleFacts;

/// A container of a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PodContainer {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The pod's UID, which no other pod ever has.
    pub uid: String,
    /// The container's name in the pod.
    pub container: String,
}

impl PodContainer {
    /// The container whose bundle has these annotations, by the engine's marks; `None` if they mark none.
    #[must_use]
    pub fn of(annotations: &[(&str, &str)]) -> Option<Self> {
        container(annotations)
    }
}

impl fmt::Display for PodContainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PodContainer { namespace, pod, container, .. } = self;
        write!(f, "container {container} of pod {namespace}/{pod}")
    }
}

/// The marks of one engine.
struct Marks {
    /// `sandbox` or `container`.
    kind: &'static str,
    /// The id of the pod's sandbox.
    sandbox_id: &'static str,
    /// What else each of its containers has: the pod's name and namespace.
    more: [&'static str; 2],
    /// The pod's UID, and the container's name in the pod.
    container: [&'static str; 2],
}

/// containerd (`pkg/cri/annotations`) and CRI-O (`pkg/annotations`).
const ENGINES: [Marks; 2] = [
    Marks {
        kind: "io.kubernetes.cri.container-type",
        sandbox_id: "io.kubernetes.cri.sandbox-id",
        more: ["io.kubernetes.cri.sandbox-name", "io.kubernetes.cri.sandbox-namespace"],
        container: ["io.kubernetes.cri.sandbox-uid", "io.kubernetes.cri.container-name"],
    },
    Marks {
        kind: "io.kubernetes.cri-o.ContainerType",
        sandbox_id: "io.kubernetes.cri-o.SandboxID",
        more: ["io.kubernetes.pod.name", "io.kubernetes.pod.namespace"],
        container: ["io.kubernetes.pod.uid", "io.kubernetes.container.name"],
    },
];

/// The annotation by which an engine marks a sandbox, if the bundle is a pod's sandbox.
pub(super) fn is_sandbox(said: &BundleFacts<'_>) -> Option<&'static str> {
    let id = said.id?;
    marked(said.annotations, "sandbox")
        .find(|marks| value(said.annotations, marks.sandbox_id) == Some(id))
        .map(|of| of.kind)
}

/// Whether the bundle is a container of a pod, and not its sandbox.
pub(super) fn is_container(said: &BundleFacts<'_>) -> bool {
    marked(said.annotations, "container").next().is_some()
}

/// Which container of which pod has these annotations.
fn container(annotations: &[(&str, &str)]) -> Option<PodContainer> {
    let marks = marked(annotations, "container").next()?;
    let text = |key| value(annotations, key).filter(|text| !text.is_empty()).map(str::to_owned);
    let ([pod, namespace], [uid, container]) = (marks.more, marks.container);
    Some(PodContainer {
        namespace: text(namespace)?,
        pod: text(pod)?,
        uid: text(uid)?,
        container: text(container)?,
    })
}

fn marked<'a>(
    annotations: &'a [(&'a str, &'a str)],
    kind: &'a str,
) -> impl Iterator<Item = &'static Marks> + 'a {
    let has = |key| value(annotations, key).is_some_and(|value| !value.is_empty());
    ENGINES.iter().filter(move |marks| {
        value(annotations, marks.kind) == Some(kind)
            && has(marks.sandbox_id)
            && marks.more.iter().all(|key| has(key))
    })
}

fn value<'a>(annotations: &[(&'a str, &'a str)], key: &str) -> Option<&'a str> {
    annotations.iter().rfind(|(name, _)| *name == key).map(|(_, value)| *value)
}
