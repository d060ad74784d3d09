//! Which API server is asked: [`api_server`].

use std::path::Path;

use anyhow::{Context, Result};
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
