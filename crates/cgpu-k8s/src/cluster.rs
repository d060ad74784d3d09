//! What is asked of the API server about this node and its pods, and what is written there: [`Cluster`].

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use kube::Client;
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::json;
use thiserror::Error;
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::pod_events::report_to_pod;
use crate::server::{Connection, kubelets_own};

/// How long a question may take API server or kubelet: the kubelet waits for us meanwhile.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);

/// The cluster as this node sees it.
#[derive(Clone)]
pub struct Cluster {
    connection: Arc<Mutex<Connection>>,
    node: String,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").field("node", &self.node).finish_non_exhaustive()
    }
}

impl Cluster {
    /// The cluster that `kubeconfig` names, else the one of the kubelet's own credentials; `None` if there is none of
    /// these. Nothing is asked yet.
    ///
    /// # Errors
    ///
    /// If it is named, and can't be read.
    pub async fn find(kubeconfig: Option<&Path>, node: String) -> Result<Option<Self>> {
        let Some(kubeconfig) = kubeconfig.map(Path::to_owned).or_else(kubelets_own) else {
            return Ok(None);
        };
        let connection = Connection::open(kubeconfig, TIMEOUT).await?;
        Ok(Some(Cluster { connection: Arc::new(Mutex::new(connection)), node }))
    }

    async fn client(&self) -> Client {
        self.connection.lock().await.client().await
    }

    #[must_use]
    pub fn node_name(&self) -> &str {
        &self.node
    }

    /// Writes an event of a pod, unless it is there already.
    ///
    /// # Errors
    ///
    /// If the API server can't be asked, or refuses.
    pub async fn report(&self, event: &Event) -> Result<()> {
        report_to_pod(&self.client().await, event).await
    }

    /// The pods that are this node's, as the API server has them at hand, which is cheap for it, and may be
    /// a moment old.
    ///
    /// # Errors
    ///
    /// If it can't be asked, or refuses.
    pub async fn pods(&self) -> Result<Vec<Pod>> {
        self.pods_by(ListParams::default().match_any()).await
    }

    /// The same, as they are now: the API server reads all pods of the cluster for that.
    ///
    /// # Errors
    ///
    /// If it can't be asked, or refuses.
    pub async fn latest_pods(&self) -> Result<Vec<Pod>> {
        self.pods_by(ListParams::default()).await
    }

    async fn pods_by(&self, how: ListParams) -> Result<Vec<Pod>> {
        let how = how.fields(&format!("spec.nodeName={}", self.node));
        let asked = Api::<Pod>::all(self.client().await);
        let list = async { Ok(asked.list(&how).await?.items) };
        in_time(list).await.context("the API server does not tell this node's pods")
    }

    /// The node.
    ///
    /// # Errors
    ///
    /// If it can't be asked, or refuses.
    pub async fn node(&self) -> Result<Node> {
        let asked = Api::<Node>::all(self.client().await);
        let node = async { Ok(asked.get(&self.node).await?) };
        in_time(node)
            .await
            .with_context(|| format!("the API server does not tell node {}", self.node))
    }

    /// Writes labels and annotations of the node.
    ///
    /// # Errors
    ///
    /// If it can't be asked, or refuses.
    pub async fn describe_node(
        &self,
        labels: &BTreeMap<String, String>,
        annotations: &BTreeMap<String, String>,
    ) -> Result<()> {
        let metadata = json!({"labels": labels, "annotations": annotations});
        let patch = Patch::Merge(json!({"metadata": metadata}));
        let asked = Api::<Node>::all(self.client().await);
        let patched = async { Ok(asked.patch(&self.node, &PatchParams::default(), &patch).await?) };
        in_time(patched).await.context("the node's labels and annotations can't be written")?;
        Ok(())
    }

    /// Writes how many of `resource` the node has.
    ///
    /// # Errors
    ///
    /// If it can't be asked, or refuses.
    pub async fn set_capacity(&self, resource: &str, count: usize) -> Result<()> {
        let amount = json!({resource: count.to_string()});
        let patch = Patch::Merge(json!({"status": {"capacity": amount, "allocatable": amount}}));
        let asked = Api::<Node>::all(self.client().await);
        let patched =
            async { Ok(asked.patch_status(&self.node, &PatchParams::default(), &patch).await?) };
        in_time(patched).await.context("the node's capacity can't be written")?;
        Ok(())
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

/// What is asked, if the answer comes within [`TIMEOUT`]. If there is no answer, or another one, the error says so in a
/// sentence.
pub(crate) async fn in_time<T>(asked: impl Future<Output = Result<T>>) -> Result<T> {
    timeout(TIMEOUT, asked).await.context("no answer in time")?.map_err(in_words)
}

/// That the API server doesn't do what it is asked for, in its own words.
#[derive(Debug, Error)]
#[error("{words}")]
pub(crate) struct Refused {
    /// HTTP's status.
    pub(crate) code: u16,
    words: String,
}

/// The client's error without its names of types.
fn in_words(error: anyhow::Error) -> anyhow::Error {
    match error.downcast::<kube::Error>() {
        Ok(kube::Error::Api(status)) => {
            let texts = [&status.message, &status.reason].into_iter().find(|text| !text.is_empty());
            let words = texts.cloned().unwrap_or_else(|| format!("it answers {}", status.code));
            Refused { code: status.code, words }.into()
        }
        Ok(other) => {
            let mut cause: &dyn std::error::Error = &other;
            while let Some(next) = cause.source() {
                cause = next;
            }
            anyhow!("it can't be reached: {cause}")
        }
        Err(error) => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::Status;

    #[test]
    fn api_server_errors_become_sentences() {
        let words = "pods \"a\" is forbidden: User \"u\" cannot patch resource \"pods\"";
        let status = Status::failure(words, "Forbidden").with_code(403);
        let reported = in_words(kube::Error::Api(Box::new(status)).into());
        assert_eq!(format!("{reported:#}"), words);
        assert_eq!(reported.downcast_ref::<Refused>().unwrap().code, 403);
        let silent = in_words(kube::Error::Api(Box::default()).into());
        assert_eq!(format!("{silent:#}"), "it answers 0");
        let cause = std::io::Error::other("connection refused");
        let reported = in_words(kube::Error::Service(Box::new(cause)).into());
        assert_eq!(format!("{reported:#}"), "it can't be reached: connection refused");
        assert_eq!(format!("{:#}", in_words(anyhow!("other"))), "other");
    }
}
