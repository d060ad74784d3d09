//! The command line: [`ExtenderArgs`].

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Parser;

use crate::args::AskArgs;
use crate::certificate::CertificateFiles;
use crate::placement::Placement;

/// Reports to Kubernetes' scheduler which nodes have a GPU with the capacity, and decides which GPU a pod gets.
#[derive(Debug, Parser)]
#[command(name = "cgpu-scheduler-extender", version)]
pub struct ExtenderArgs {
    /// Where the scheduler asks.
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:12345")]
    pub listen: SocketAddr,
    /// Serve by TLS.
    #[command(flatten)]
    pub tls: TlsArgs,
    /// How the API server is reached [default: the pod's service account, $KUBECONFIG].
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// What pods ask for.
    #[command(flatten)]
    pub asks: AskArgs,
    /// Evict pods that have something of a GPU which is no longer on their node: their controllers make others.
    #[arg(long)]
    pub evict_lost: bool,
    /// The GPU that is preferred if the node's label doesn't say it: binpack or spread.
    #[arg(long, value_name = "WAY", default_value = "binpack")]
    pub placement: Placement,
    /// How many pods a GPU may have if the node's label doesn't say it.
    #[arg(long, value_name = "COUNT", default_value_t = 20)]
    pub most_pods: u32,
    /// Serve without asking whether another replica does: for one that is alone.
    #[arg(long)]
    pub alone: bool,
    /// The namespace of the lease that says which replica serves.
    #[arg(long, value_name = "NAMESPACE", default_value = "kube-system")]
    pub lease_namespace: String,
}

/// What is served by TLS with: all three, or none.
#[derive(Debug, clap::Args)]
pub struct TlsArgs {
    /// Serve by TLS with that certificate (PEM), and ask other replicas with it.
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "client_ca"])]
    pub tls_cert: Option<PathBuf>,
    /// The certificate's key (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// The CA that has to have signed the certificate of the scheduler and of each replica (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub client_ca: Option<PathBuf>,
}

impl TlsArgs {
    /// The files, if there are to be any.
    pub(crate) fn files(&self) -> Option<CertificateFiles> {
        let (certificate, key, ca) = (&self.tls_cert, &self.tls_key, &self.client_ca);
        Some(CertificateFiles {
            certificate: certificate.clone()?,
            key: key.clone()?,
            ca: ca.clone()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tls_needs_all_three_files() {
        let of = |options: &[&str]| {
            let words = ["x"].iter().chain(options);
            ExtenderArgs::try_parse_from(words).map(|args| args.tls.files().is_some())
        };
        assert!(!of(&[]).unwrap());
        assert!(of(&["--tls-cert=a", "--tls-key=b", "--client-ca=c"]).unwrap());
        for some in [
            &["--tls-cert=a"] as &[&str],
            &["--tls-key=b"],
            &["--client-ca=c"],
            &["--tls-cert=a", "--tls-key=b"],
            &["--tls-key=b", "--client-ca=c"],
        ] {
            let error = of(some).unwrap_err().to_string();
            assert!(error.contains("required arguments were not provided"), "{error}");
        }
    }
}
