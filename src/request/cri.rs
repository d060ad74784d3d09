//! What Kubernetes' engines mark containers with: [`is_sandbox`], [`is_container`].
//!
//! A mark alone proves nothing, for podman before 4.6 copies annotations from an image's manifest. All marks of
//! one engine together do, the sandbox's id among them: an image can't know the id that its container
//! will get.

use super::Said;

/// The marks of one engine.
struct Marks {
    /// `sandbox` or `container`.
    kind: &'static str,
    /// The id of the pod's sandbox.
    sandbox_id: &'static str,
    /// What else each of its containers has.
    more: [&'static str; 2],
}

/// containerd (`pkg/cri/annotations`) and CRI-O (`pkg/annotations`).
const ENGINES: [Marks; 2] = [
    Marks {
        kind: "io.kubernetes.cri.container-type",
        sandbox_id: "io.kubernetes.cri.sandbox-id",
        more: ["io.kubernetes.cri.sandbox-name", "io.kubernetes.cri.sandbox-namespace"],
    },
    Marks {
        kind: "io.kubernetes.cri-o.ContainerType",
        sandbox_id: "io.kubernetes.cri-o.SandboxID",
        more: ["io.kubernetes.pod.name", "io.kubernetes.pod.namespace"],
    },
];

/// The annotation by which an engine marks a sandbox, if the bundle is a pod's sandbox.
pub(super) fn is_sandbox(said: &Said<'_>) -> Option<&'static str> {
    let id = said.id?;
    marked(said, "sandbox")
        .find(|marks| value(said, marks.sandbox_id) == Some(id))
        .map(|of| of.kind)
}

/// Whether the bundle is a container of a pod, and not its sandbox.
pub(super) fn is_container(said: &Said<'_>) -> bool {
    marked(said, "container").next().is_some()
}

fn marked<'a>(said: &'a Said<'_>, kind: &'a str) -> impl Iterator<Item = &'static Marks> + 'a {
    let has = |key| value(said, key).is_some_and(|value| !value.is_empty());
    ENGINES.iter().filter(move |marks| {
        value(said, marks.kind) == Some(kind)
            && has(marks.sandbox_id)
            && marks.more.iter().all(|key| has(key))
    })
}

fn value<'a>(said: &Said<'a>, key: &str) -> Option<&'a str> {
    said.annotations.iter().rfind(|(name, _)| *name == key).map(|(_, value)| *value)
}
