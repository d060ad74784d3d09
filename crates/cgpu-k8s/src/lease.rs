//! Whose turn it is, of several who must not do something at once: who has a lease of the cluster's: [`Turn`].

use anyhow::{Context, Result};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use kube_lease_manager::{DurationSeconds, LeaseManagerBuilder};
use tokio::sync::watch;

use crate::cluster::in_time;

/// How long before its end a lease is renewed.
const GRACE_SECONDS: DurationSeconds = 20;

/// A lease that one of several has at a time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Turn<'a> {
    /// Its name.
    pub(crate) lease: &'a str,
    /// Its namespace.
    pub(crate) namespace: &'a str,
    /// How long it holds where nobody renews it.
    pub(crate) seconds: DurationSeconds,
}

impl Turn<'_> {
    /// Waits for the lease; what is returned says whether `identity` has it. It is given up once nobody looks any more.
    ///
    /// # Errors
    ///
    /// Where there is no such lease, and none can be made.
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
            let _ = task.await; // it has told what failed
        }))
    }
    /// Who has the lease by the API server's word, whether it has ended or not.
    ///
    /// # Errors
    ///
    /// Where it can't be asked, or there is no such lease.
    pub(crate) async fn holder(self, client: &Client) -> Result<Option<String>> {
        let leases = Api::<Lease>::namespaced(client.clone(), self.namespace);
        let lease = in_time(async { Ok(leases.get(self.lease).await?) }).await;
        let lease = lease.with_context(|| format!("who has lease {} can't be told", self.lease))?;
        Ok(lease.spec.and_then(|spec| spec.holder_identity))
    }
}
