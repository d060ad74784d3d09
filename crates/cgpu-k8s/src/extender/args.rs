//! The command line: [`ExtenderArgs`].

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Parser;

use crate::place::Placement;

/// Tells Kubernetes' scheduler which nodes have a GPU with the room, and decides which GPU a pod gets.
#[derive(Debug, Parser)]
#[command(name = "cgpu-scheduler-extender", version)]
pub struct ExtenderArgs {
    /// Where the scheduler asks.
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:12345")]
    pub listen: SocketAddr,
    /// How the API server is reached [default: the pod's service account, $KUBECONFIG].
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// What pods ask for.
    #[arg(long, value_name = "NAME", default_value = "aliyun.com/gpu-mem")]
    pub resource: String,
    /// The GPU that is preferred where the node's label doesn't say it: binpack or spread.
    #[arg(long, value_name = "WAY", default_value = "binpack")]
    pub placement: Placement,
    /// How many pods a GPU may have where the node's label doesn't say it.
    #[arg(long, value_name = "COUNT", default_value_t = 20)]
    pub most_pods: u32,
    /// Serve without asking whether another replica does: for one that is alone.
    #[arg(long)]
    pub alone: bool,
    /// The namespace of the lease that says which replica serves.
    #[arg(long, value_name = "NAMESPACE", default_value = "kube-system")]
    pub lease_namespace: String,
}
