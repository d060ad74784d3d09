//! Whose turn it is, of several programs that must not do something at once: which has one of the cluster's leases:
//! [`Turn`].

use anyhow::{Context, Result};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use kube_lease_manager::{DurationSeconds, LeaseManagerBuilder};
use tokio::sync::watch;

use crate::cluster::in_time;

/// How long before its end a lease is renewed.
const GRACE_SECONDS: DurationSeconds = 20;

/// A lease that one of several programs has at a time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Turn<'a> {
    /// Its name.
    pub(crate) lease: &'a str,
    pub(crate) namespace: &'a str,
    /// How long it holds if it isn't renewed.
    pub(crate) seconds: DurationSeconds,
}

impl Turn<'_> {
    /// Waits for the lease; what is returned says whether `identity` has it. The lease is given up once no receiver
    /// polls it any more.
    ///
    /// # Errors
    ///
    /// If there is no such lease, and none can be made.
    pub(crate) async fn stand(
        self,
        client: Client,
        identity: &str,
    ) -> Result<(watch::Receiver<bool>, impl Future<Output = ()>)> {
        let Turn { lease, namespace, seconds } = self;
        let manager = LeaseManagerBuilder::new(client, lease)
            .with_namespace(namespace)
            .with_identity(identity)
            .with_duration(seconds)
            .with_grace(GRACE_SECONDS)
            .build()
            .await
            .with_context(|| format!("lease {namespace}/{lease} can't be made"))?;
        let (has, task) = manager.watch().await;
        Ok((has, async move {
            let _ = task.await; // it has reported what failed
        }))
    }
    /// The lease's holder by the API server's word, whether it has ended or not.
    ///
    /// # Errors
    ///
    /// If it can't be asked, or there is no such lease.
    pub(crate) async fn holder(self, client: &Client) -> Result<Option<String>> {
        let leases = Api::<Lease>::namespaced(client.clone(), self.namespace);
        let lease = in_time(async { Ok(leases.get(self.lease).await?) }).await;
        let lease = lease.with_context(|| format!("cannot read who has lease {}", self.lease))?;
        Ok(lease.spec.and_then(|spec| spec.holder_identity))
    }
}
