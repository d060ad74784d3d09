//! What the driver asks of the API server: claims by name, and its own slices of this node: [`Api`].

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, ResourceClaim, ResourceSlice};
use kube::Client;
use kube::api::{DeleteParams, ListParams, PostParams};
use tracing::info;

use super::slice::{Owner, Step, Written, step};
use crate::cluster::{Refused, in_time};

/// The most writes until the slices are as they should be: each that is wrong is one.
const MOST_STEPS: usize = 32;

/// The API server, as the driver asks it.
#[derive(Clone)]
pub(crate) struct Api(Client);

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Api")
    }
}

impl Api {
    pub(crate) fn new(client: Client) -> Self {
        Api(client)
    }

    /// The claim of that name; `None` if there is none.
    pub(crate) async fn claim(&self, namespace: &str, name: &str) -> Result<Option<ResourceClaim>> {
        let asked = kube::Api::<ResourceClaim>::namespaced(self.0.clone(), namespace);
        in_time(async { Ok(asked.get_opt(name).await?) })
            .await
            .context("the API server does not tell the claim")
    }

    /// The UID of the node of that name.
    pub(crate) async fn node_uid(&self, node: &str) -> Result<String> {
        let asked = kube::Api::<Node>::all(self.0.clone());
        let found = in_time(async { Ok(asked.get(node).await?) }).await;
        let found = found.with_context(|| format!("the API server does not tell node {node}"))?;
        found.metadata.uid.context("the node has no UID")
    }

    /// Makes the slices of `owner` list `devices`. Returns what the API server made of them, if something was written.
    pub(crate) async fn publish(
        &self,
        owner: &Owner,
        devices: &[Device],
        written: Option<&Written>,
    ) -> Result<Option<Written>> {
        let slices = kube::Api::<ResourceSlice>::all(self.0.clone());
        let own = ListParams::default()
            .fields(&format!("spec.driver={},spec.nodeName={}", owner.driver, owner.node));
        let mut last = written.cloned();
        for _ in 0..MOST_STEPS {
            let listed = in_time(async { Ok(slices.list(&own).await?.items) })
                .await
                .context("the API server does not tell this node's slices")?;
            let stored = match step(owner, &listed, devices, last.as_ref()) {
                Step::Nothing => return Ok(last),
                Step::Create(slice) => {
                    in_time(async { Ok(slices.create(&PostParams::default(), &slice).await?) })
                        .await
                }
                Step::Replace(slice) => {
                    let name = slice.metadata.name.clone().unwrap_or_default();
                    let how = PostParams::default();
                    in_time(async { Ok(slices.replace(&name, &how, &slice).await?) }).await
                }
                Step::Delete(name) => {
                    let how = DeleteParams::default();
                    let gone = in_time(async {
                        slices.delete(&name, &how).await?;
                        Ok(())
                    });
                    match gone.await {
                        // Another was faster.
                        Err(error) if code(&error) != Some(404) => {
                            return Err(error.context("a slice of no use can't be removed"));
                        }
                        _ => continue,
                    }
                }
            };
            match stored {
                Ok(stored) => {
                    let generation = stored.spec.pool.generation;
                    info!(devices = devices.len(), generation, "the node's slice is written");
                    last = Some(Written {
                        wanted: devices.to_vec(),
                        stored: stored.spec.devices.unwrap_or_default(),
                    });
                }
                // Somebody else has written it meanwhile: it is read again.
                Err(error) if matches!(code(&error), Some(404 | 409)) => {}
                Err(error) => return Err(error.context("the node's slice can't be written")),
            }
        }
        anyhow::bail!("the node's slices are changed by somebody else as fast as they are written")
    }
}

/// HTTP's status, if the API server refused.
fn code(error: &anyhow::Error) -> Option<u16> {
    error.downcast_ref::<Refused>().map(|refused| refused.code)
}
