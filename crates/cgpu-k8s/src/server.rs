//! Which server is asked: the [`api_server`], an [`extender`].

use std::path::Path;

use anyhow::{Context, Result};
use axum::http::Uri;
use kube::Config;
use kube::config::{KubeConfigOptions, Kubeconfig};

/// The API server that `kubeconfig` names, else the one whose service account this is, else the one of
/// `$KUBECONFIG`; `None` where there is none of these.
///
/// # Errors
///
/// Where it is named, and can't be read.
pub(crate) async fn api_server(kubeconfig: Option<&Path>) -> Result<Option<Config>> {
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

/// The extender at that address.
pub(crate) fn extender(address: Uri) -> Config {
    let is_plain = address.scheme_str() == Some("http");
    let mut config = Config::new(address);
    // Without TLS no certificate is needed. Else kube looks for the host's, and the image of cgpu has none.
    config.root_cert = is_plain.then(Vec::new);
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_are_looked_for_with_tls_alone() {
        let is_looked_for = |address: &str| extender(address.parse().unwrap()).root_cert.is_none();
        assert!(!is_looked_for("http://10.0.0.1:12345"));
        assert!(is_looked_for("https://10.0.0.1:12345"));
    }
}
