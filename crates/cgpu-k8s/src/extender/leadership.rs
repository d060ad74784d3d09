//! Which of several replicas serves: the one that has the lease: [`Leadership`].

use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::api::Api;

use crate::lease::Turn;

/// The lease's name.
const LEASE: &str = "cgpu-scheduler-extender";

/// How long a lease holds. A binding takes three calls of five seconds at most.
const LEASE_SECONDS: u64 = 30;

/// The turn of the replica that serves, in that namespace.
pub(crate) fn turn(namespace: &str) -> Turn<'_> {
    Turn { lease: LEASE, namespace, seconds: LEASE_SECONDS }
}

/// What this replica knows of which replica serves.
pub(crate) enum Leadership {
    /// There is no other.
    Alone,
    /// The replica that has the lease serves.
    ByLease {
        /// The leases of its namespace.
        leases: Box<Api<Lease>>,
        /// This replica's name in it: where it listens, if that is known.
        identity: String,
    },
}

impl Leadership {
    /// By the lease in that namespace.
    pub(crate) fn by_lease(client: Client, namespace: &str, identity: String) -> Self {
        Leadership::ByLease { leases: Box::new(Api::namespaced(client, namespace)), identity }
    }

    /// Makes sure that this replica serves, and for so long yet. The API server is asked: between two
    /// renewals the lease may have become another's.
    pub(crate) async fn require(&self, timeout: Duration) -> Result<()> {
        let Leadership::ByLease { leases, identity } = self else { return Ok(()) };
        let holder = holder(leases, timeout, 3 * timeout).await?;
        ensure!(
            holder.as_ref() == Some(identity),
            "another replica of cgpu-scheduler-extender has the lease, or no replica has it; try again"
        );
        Ok(())
    }

    /// Where the replica listens that has the lease, if it is another one and says that.
    pub(crate) async fn leader(&self, timeout: Duration) -> Result<Option<SocketAddr>> {
        let Leadership::ByLease { leases, identity } = self else { return Ok(None) };
        let holder = holder(leases, timeout, Duration::ZERO).await?;
        Ok(holder.filter(|holder| holder != identity).and_then(|holder| holder.parse().ok()))
    }
}

/// The replica that has the lease, for so long yet.
async fn holder(
    leases: &Api<Lease>,
    timeout: Duration,
    needed: Duration,
) -> Result<Option<String>> {
    let asked = tokio::time::timeout(timeout, leases.get(LEASE));
    let lease = asked.await.context("the API server does not tell who has the lease")?;
    let spec = lease.context("who has the lease can't be read")?.spec.unwrap_or_default();
    let seconds = spec.lease_duration_seconds.unwrap_or_default();
    let renewed = spec.renew_time.map(|time| time.0).unwrap_or_default();
    Ok(spec.holder_identity.filter(|_| lasts(renewed, seconds, needed, Timestamp::now())))
}

/// Whether a lease that was renewed then lasts for so long from now.
fn lasts(renewed: Timestamp, seconds: i32, needed: Duration, now: Timestamp) -> bool {
    let (renewed, now) = (SystemTime::from(renewed), SystemTime::from(now));
    let end = renewed + Duration::from_secs(u64::try_from(seconds).unwrap_or_default());
    end.duration_since(now).is_ok_and(|left| left >= needed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_lasts_until_its_end() {
        let at = |second: i64| Timestamp::new(1_000_000 + second, 0).unwrap();
        let lasts = |needed, now| lasts(at(0), 30, Duration::from_secs(needed), at(now));
        assert!(lasts(15, 0) && lasts(15, 15));
        assert!(!lasts(15, 16) && !lasts(0, 31));
    }
}
