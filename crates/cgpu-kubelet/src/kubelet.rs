//! What is asked of the kubelet: [`Kubelet`].

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

use crate::api::{ListPodResourcesRequest, ListPodResourcesResponse};
use crate::pod_resources_lister_client::PodResourcesListerClient;

/// How long the kubelet may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The most bytes of its answer that are taken: more than the 4 MiB of gRPC, as all units of a node may be
/// reported, each with its pod.
const MOST_BYTES: usize = 16 << 20;

/// The kubelet of this node, which knows which container has what.
#[derive(Debug, Clone)]
pub struct Kubelet {
    pod_resources: PathBuf,
}

impl Kubelet {
    /// The kubelet that reports this at that socket.
    #[must_use]
    pub fn new(pod_resources: PathBuf) -> Self {
        Kubelet { pod_resources }
    }

    /// Which devices the containers of this node have.
    ///
    /// # Errors
    ///
    /// If it can't be asked.
    pub async fn held(&self) -> Result<ListPodResourcesResponse> {
        let asked = async {
            let channel = connect(&self.pod_resources).await?;
            let mut client =
                PodResourcesListerClient::new(channel).max_decoding_message_size(MOST_BYTES);
            Ok(client.list(ListPodResourcesRequest {}).await?.into_inner())
        };
        let answer: Result<_> = match timeout(TIMEOUT, asked).await {
            Ok(answer) => answer,
            Err(late) => Err(late.into()),
        };
        answer.with_context(|| {
            format!("the kubelet does not tell at {} who has what", self.pod_resources.display())
        })
    }
}

/// A channel to one of the kubelet's sockets.
///
/// # Errors
///
/// If no server listens there.
pub async fn connect(socket: &Path) -> Result<Channel> {
    let socket = socket.to_owned();
    let connect = service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { io::Result::Ok(TokioIo::new(UnixStream::connect(socket).await?)) }
    });
    let endpoint = Endpoint::from_static("http://kubelet").timeout(TIMEOUT);
    endpoint.connect_with_connector(connect).await.context("cannot connect")
}
