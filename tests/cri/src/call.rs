//! One unary gRPC call, from JSON to JSON.

use anyhow::Context;
use http::uri::PathAndQuery;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tonic::client::Grpc;
use tonic::transport::Endpoint;
use tonic_prost::ProstCodec;

use crate::patience::timeout;

/// A call that is about to be made.
pub(crate) struct Call<'a> {
    /// The runtime's socket, an absolute path.
    pub(crate) socket: &'a str,
    /// The request as JSON.
    pub(crate) request: &'a str,
}

impl Call<'_> {
    /// Calls `method` of the runtime service and returns the response as JSON.
    ///
    /// # Errors
    ///
    /// Where the request isn't one, the socket doesn't answer, or the runtime refuses.
    pub(crate) fn unary<Request, Response>(&self, method: &str) -> anyhow::Result<String>
    where
        Request: prost::Message + Default + DeserializeOwned + 'static,
        Response: prost::Message + Default + Serialize + 'static,
    {
        let request: Request = serde_json::from_str(self.request)
            .with_context(|| format!("this is no {method} request"))?;
        let path: PathAndQuery = format!("/runtime.v1.RuntimeService/{method}")
            .parse()
            .context("the method has no valid name")?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("no event loop")?;
        let response: Response = runtime.block_on(async {
            let endpoint =
                Endpoint::from_shared(format!("unix://{}", self.socket))?.timeout(timeout());
            let channel = endpoint
                .connect()
                .await
                .with_context(|| format!("{} can't be connected to", self.socket))?;
            let mut client = Grpc::new(channel);
            client.ready().await.context("the connection was lost")?;
            let answer =
                client.unary(tonic::Request::new(request), path, ProstCodec::default()).await;
            answer
                .map(tonic::Response::into_inner)
                .map_err(|status| anyhow::anyhow!("{method}: {}", status.message()))
        })?;
        Ok(serde_json::to_string(&response)?)
    }
}
