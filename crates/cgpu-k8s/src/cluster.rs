//! What is asked of the API server and of the kubelet about this node's pods, and what is written there:
//! [`Cluster`].

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, ListParams, Patch, PatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::json;
use tokio::net::UnixStream;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

use crate::InspectArgs;
use crate::api::{ListPodResourcesRequest, ListPodResourcesResponse};
use crate::inspect::{cluster_use, details, table};
use crate::pod_resources_lister_client::PodResourcesListerClient;

/// How long a question may take API server or kubelet: the kubelet waits for us meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);

/// The cluster as this node sees it.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
    node: String,
    pod_resources: PathBuf,
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
    pub async fn find(
        kubeconfig: Option<&Path>,
        node: String,
        pod_resources: PathBuf,
    ) -> Result<Option<Self>> {
        let config = named(kubeconfig).await?;
        let Some(mut config) = config else { return Ok(None) };
        config.connect_timeout = Some(PATIENCE);
        config.read_timeout = Some(PATIENCE);
        let client = Client::try_from(config).context("the API server can't be asked")?;
        Ok(Some(Cluster { client, node, pod_resources }))
    }

    /// The pods that are this node's, as they are now: no cache of the API server answers.
    ///
    /// # Errors
    ///
    /// Where it can't be asked, or refuses.
    pub async fn pods(&self) -> Result<Vec<Pod>> {
        let of_node = format!("spec.nodeName={}", self.node);
        let asked = Api::<Pod>::all(self.client.clone());
        let list = async { Ok(asked.list(&ListParams::default().fields(&of_node)).await?.items) };
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
        in_time(patched).await.context("node's labels and annotations can't be written")?;
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
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let patch = Patch::Merge(
            json!({"metadata": {"uid": pod.metadata.uid, "annotations": annotations}}),
        );
        let asked = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let patched = async { Ok(asked.patch(name, &PatchParams::default(), &patch).await?) };
        in_time(patched)
            .await
            .with_context(|| format!("pod {namespace}/{name} can't be annotated"))?;
        Ok(())
    }

    /// Which devices the containers of this node have, as the kubelet knows it.
    ///
    /// # Errors
    ///
    /// Where it can't be asked.
    pub async fn held(&self) -> Result<ListPodResourcesResponse> {
        let asked = async {
            let channel = kubelet(&self.pod_resources).await?;
            let mut client = PodResourcesListerClient::new(channel);
            Ok(client.list(ListPodResourcesRequest {}).await?.into_inner())
        };
        in_time(asked).await.with_context(|| {
            format!("the kubelet does not tell at {} who has what", self.pod_resources.display())
        })
    }
}

/// A channel to a socket of the kubelet's.
///
/// # Errors
///
/// Where nobody listens.
pub async fn kubelet(socket: &Path) -> Result<Channel> {
    let socket = socket.to_owned();
    let connect = service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { io::Result::Ok(TokioIo::new(UnixStream::connect(socket).await?)) }
    });
    let endpoint = Endpoint::from_static("http://kubelet").timeout(PATIENCE);
    endpoint.connect_with_connector(connect).await.context("cannot connect")
}

async fn in_time<T>(asked: impl Future<Output = Result<T>>) -> Result<T> {
    timeout(PATIENCE, asked).await.context("no answer in time")?
}

/// The API server that `kubeconfig` names, else the one whose service account this is, else the one of
/// `$KUBECONFIG`; `None` where there is none of these.
async fn named(kubeconfig: Option<&Path>) -> Result<Option<Config>> {
    let config = match kubeconfig {
        Some(file) => {
            let read = Kubeconfig::read_from(file)
                .with_context(|| format!("cannot read {}", file.display()))?;
            let options = KubeConfigOptions::default();
            Some(Config::from_custom_kubeconfig(read, &options).await.with_context(|| {
                format!("{} names no API server that can be asked", file.display())
            })?)
        }
        None if std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() => {
            Some(Config::incluster().context("the pod's service account can't be used")?)
        }
        None if std::env::var_os("KUBECONFIG").is_some() => {
            let options = KubeConfigOptions::default();
            Some(Config::from_kubeconfig(&options).await.context("$KUBECONFIG can't be used")?)
        }
        None => None,
    };
    Ok(config)
}

/// Prints who has what in a cluster.
///
/// # Errors
///
/// Where the API server can't be asked or refuses, or has no node of that name with units.
pub fn inspect_cluster(args: &InspectArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let used = runtime.block_on(async {
        let config = match named(args.kubeconfig.as_deref()).await? {
            Some(config) => config,
            None => Config::infer().await.context("no cluster is known; name a --kubeconfig")?,
        };
        let client = Client::try_from(config).context("the API server can't be asked")?;
        let all = ListParams::default();
        // Who is on no node has nothing.
        let placed = ListParams::default().fields("spec.nodeName!=");
        let nodes = Api::<Node>::all(client.clone());
        let pods = Api::<Pod>::all(client);
        let nodes = nodes.list(&all).await.context("the API server does not tell its nodes")?;
        let pods = pods.list(&placed).await.context("the API server does not tell its pods")?;
        let only = args.node.as_deref();
        anyhow::Ok(cluster_use(&nodes.items, &pods.items, &args.resource, only))
    })?;
    if let (Some(node), true) = (&args.node, used.nodes.is_empty()) {
        bail!(
            "the cluster has no node {node:?} with {}; `kubectl get nodes` lists all",
            args.resource
        );
    }
    let text = match (&*args.output, args.details) {
        ("json", _) => serde_json::to_string_pretty(&used)? + "\n",
        (_, true) => details(&used),
        (_, false) => table(&used),
    };
    std::io::stdout().write_all(text.as_bytes()).context("cannot write")
}
