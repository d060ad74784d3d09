//! What is asked of the API server about this node and its pods, and what is written there: [`Cluster`].

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Client;
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::json;
use tokio::time::timeout;

use crate::server::api_server;

/// How long a question may take API server or kubelet: the kubelet waits for us meanwhile.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// The cluster as this node sees it.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
    node: String,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").field("node", &self.node).finish_non_exhaustive()
    }
}

impl Cluster {
    /// The cluster that `kubeconfig` names, else the one whose service account this is, else the one of
    /// `$KUBECONFIG`; `None` where there is none of these. Nothing is asked yet.
    ///
    /// # Errors
    ///
    /// Where it is named, and can't be read.
    pub async fn find(kubeconfig: Option<&Path>, node: String) -> Result<Option<Self>> {
        let config = api_server(kubeconfig).await?;
        let Some(mut config) = config else { return Ok(None) };
        config.connect_timeout = Some(PATIENCE);
        config.read_timeout = Some(PATIENCE);
        let client = Client::try_from(config).context("the API server can't be asked")?;
        Ok(Some(Cluster { client, node }))
    }

    /// The pods that are this node's, as the API server has them at hand, which is cheap for it, and may be
    /// a moment old.
    ///
    /// # Errors
    ///
    /// Where it can't be asked, or refuses.
    pub async fn pods(&self) -> Result<Vec<Pod>> {
        self.pods_by(ListParams::default().match_any()).await
    }

    /// The same, as they are now: the API server reads all pods of the cluster for that.
    ///
    /// # Errors
    ///
    /// Where it can't be asked, or refuses.
    pub async fn latest_pods(&self) -> Result<Vec<Pod>> {
        self.pods_by(ListParams::default()).await
    }

    async fn pods_by(&self, how: ListParams) -> Result<Vec<Pod>> {
        let how = how.fields(&format!("spec.nodeName={}", self.node));
        let asked = Api::<Pod>::all(self.client.clone());
        let list = async { Ok(asked.list(&how).await?.items) };
        in_time(list).await.context("the API server does not tell this node's pods")
    }

    /// The node.
    ///
    /// # Errors
    ///
    /// Where it can't be asked, or refuses.
    pub async fn node(&self) -> Result<Node> {
        let asked = Api::<Node>::all(self.client.clone());
        let node = async { Ok(asked.get(&self.node).await?) };
        in_time(node)
            .await
            .with_context(|| format!("the API server does not tell node {}", self.node))
    }

    /// Writes labels and annotations of the node.
    ///
    /// # Errors
    ///
    /// Where it can't be asked, or refuses.
    pub async fn describe_node(
        &self,
        labels: &BTreeMap<String, String>,
        annotations: &BTreeMap<String, String>,
    ) -> Result<()> {
        let metadata = json!({"labels": labels, "annotations": annotations});
        let patch = Patch::Merge(json!({"metadata": metadata}));
        let asked = Api::<Node>::all(self.client.clone());
        let patched = async { Ok(asked.patch(&self.node, &PatchParams::default(), &patch).await?) };
        in_time(patched).await.context("the node's labels and annotations can't be written")?;
        Ok(())
    }

    /// Writes how many of `resource` the node has.
    ///
    /// # Errors
    ///
    /// Where it can't be asked, or refuses.
    pub async fn set_capacity(&self, resource: &str, count: usize) -> Result<()> {
        let amount = json!({resource: count.to_string()});
        let patch = Patch::Merge(json!({"status": {"capacity": amount, "allocatable": amount}}));
        let asked = Api::<Node>::all(self.client.clone());
        let patched =
            async { Ok(asked.patch_status(&self.node, &PatchParams::default(), &patch).await?) };
        in_time(patched).await.context("the node's capacity can't be written")?;
        Ok(())
    }

    /// Writes annotations of a pod: of the one with that uid, and no other of its name.
    ///
    /// # Errors
    ///
    /// Where it can't be asked, or refuses.
    pub async fn annotate(&self, pod: &Pod, annotations: &BTreeMap<String, String>) -> Result<()> {
        annotate(&self.client, pod, annotations).await
    }
}

/// Writes annotations of a pod: of the one with that uid, and no other of its name.
pub(crate) async fn annotate(
    client: &Client,
    pod: &Pod,
    annotations: &BTreeMap<String, String>,
) -> Result<()> {
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let patch =
        Patch::Merge(json!({"metadata": {"uid": pod.metadata.uid, "annotations": annotations}}));
    let asked = Api::<Pod>::namespaced(client.clone(), namespace);
    let patched = async { Ok(asked.patch(name, &PatchParams::default(), &patch).await?) };
    in_time(patched).await.with_context(|| format!("pod {namespace}/{name} can't be annotated"))?;
    Ok(())
}

/// What is asked, if the answer comes within [`PATIENCE`].
pub(crate) async fn in_time<T>(asked: impl Future<Output = Result<T>>) -> Result<T> {
    timeout(PATIENCE, asked).await.context("no answer in time")?
}
