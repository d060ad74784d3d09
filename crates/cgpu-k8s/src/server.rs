//! Which server is asked: the [`api_server`], as a node's [`Connection`] to it, an [`extender`].

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use axum::http::Uri;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use cgpu_http::tls::rustls::pki_types::CertificateDer;
use cgpu_http::tls::rustls::pki_types::pem::PemObject;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tracing::warn;

/// Where kubelets have their own credentials: of kubeadm, of the clouds' images, of k3s, RKE2, k0s and MicroK8s.
const KUBELETS: &[&str] = &[
    "/etc/kubernetes/kubelet.conf",
    "/var/lib/kubelet/kubeconfig",
    "/var/lib/rancher/k3s/agent/kubelet.kubeconfig",
    "/var/lib/rancher/rke2/agent/kubelet.kubeconfig",
    "/var/lib/k0s/kubelet.conf",
    "/var/snap/microk8s/current/credentials/kubelet.config",
];

/// The credentials of this node's kubelet, if it has them at one of [`KUBELETS`].
pub(crate) fn kubelets_own() -> Option<PathBuf> {
    KUBELETS.iter().map(PathBuf::from).find(|path| path.is_file())
}

use crate::certificate::Pem;
use crate::identity::{Identity, identity_behind};

/// The DNS name that the certificate of each replica of the extender has, whatever its address.
pub(crate) const EXTENDER: &str = "cgpu-scheduler-extender";

/// The API server that `kubeconfig` names, else the one whose service account this is, else the one of
/// `$KUBECONFIG`; `None` if there is none of these.
///
/// # Errors
///
/// If it is named, and can't be read.
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

/// How long it takes until renewed credentials are tried again that could not be used.
const AGAIN: Duration = Duration::from_secs(60);

/// Files that a connection is made with, each with what says whether it is still the same.
type Files = Vec<(PathBuf, Option<Identity>)>;

/// The API server as a long-lived program asks it: by a new client if the credentials have been renewed. A kubelet's
/// certificate is, months before it ends.
pub(crate) struct Connection {
    kubeconfig: PathBuf,
    files: Files,
    client: Client,
    timeout: Duration,
    /// When renewed credentials could not be used.
    failed: Option<Instant>,
}

impl Connection {
    /// The API server that a kubeconfig names, each question to which takes `timeout` at most.
    ///
    /// # Errors
    ///
    /// If it can't be read.
    pub(crate) async fn open(kubeconfig: PathBuf, timeout: Duration) -> Result<Self> {
        let files = files(&kubeconfig);
        let client = client(Some(&kubeconfig), timeout).await?;
        let client =
            client.with_context(|| format!("{} names no API server", kubeconfig.display()))?;
        Ok(Connection { kubeconfig, files, client, timeout, failed: None })
    }

    /// The client that asks. If renewed credentials can't be used, it asks with the old ones, and they are retried.
    pub(crate) async fn client(&mut self) -> Client {
        let is_due = self.failed.is_none_or(|failed| failed.elapsed() > AGAIN);
        if is_due && self.files.iter().any(|(path, known)| identity_behind(path) != *known) {
            let now = files(&self.kubeconfig);
            match client(Some(&self.kubeconfig), self.timeout).await {
                Ok(client) => {
                    self.client = client.unwrap_or_else(|| self.client.clone());
                    self.files = now;
                    self.failed = None;
                }
                Err(error) => {
                    warn!("the renewed credentials can't be used: {error:#}");
                    self.failed = Some(Instant::now());
                }
            }
        }
        self.client.clone()
    }
}

/// The files of a kubeconfig, itself among them.
fn files(kubeconfig: &Path) -> Files {
    let mut paths = vec![kubeconfig.to_owned()];
    if let Ok(read) = Kubeconfig::read_from(kubeconfig) {
        let users = read.auth_infos.into_iter().filter_map(|named| named.auth_info);
        let of_user = users.flat_map(|user| [user.client_certificate, user.client_key]);
        let clusters = read.clusters.into_iter().filter_map(|named| named.cluster);
        let of_cluster = clusters.map(|cluster| cluster.certificate_authority);
        paths.extend(of_user.chain(of_cluster).flatten().map(PathBuf::from));
    }
    paths.into_iter().map(|path| (path.clone(), identity_behind(&path))).collect()
}

/// A client of the API server that [`api_server`] finds, each question to which takes `timeout` at most.
///
/// # Errors
///
/// If it is named, and can't be read.
pub(crate) async fn client(kubeconfig: Option<&Path>, timeout: Duration) -> Result<Option<Client>> {
    let Some(mut config) = api_server(kubeconfig).await? else { return Ok(None) };
    config.connect_timeout = Some(timeout);
    config.read_timeout = Some(timeout);
    // Without TLS no certificate is needed. Else kube looks for the host's, which may have none.
    if config.cluster_url.scheme_str() == Some("http") {
        config.root_cert = Some(Vec::new());
    }
    Ok(Some(Client::try_from(config).context("the API server can't be asked")?))
}

/// The extender at that address, which is asked by TLS with the certificate of `pem`, and has one of its CA.
///
/// # Errors
///
/// If the CA's certificates can't be parsed.
pub(crate) fn extender(address: Uri, pem: Option<&Pem>) -> Result<Config> {
    let is_plain = address.scheme_str() == Some("http");
    let mut config = Config::new(address);
    // Without TLS no certificate is needed. Else kube looks for the host's, and the image of cgpu has none.
    config.root_cert = is_plain.then(Vec::new);
    // Else kube asks again for minutes what is answered in words by 503.
    config.default_retry = false;
    if let Some(pem) = pem {
        let roots = CertificateDer::pem_slice_iter(&pem.ca);
        let roots: Result<Vec<_>, _> = roots.map(|root| root.map(|root| root.to_vec())).collect();
        config.root_cert = Some(roots.context("the CA's certificates can't be parsed")?);
        config.tls_server_name = Some(EXTENDER.to_owned());
        config.auth_info.client_certificate_data = Some(STANDARD.encode(&pem.certificate));
        config.auth_info.client_key_data = Some(STANDARD.encode(&pem.key).into());
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn renewed_credentials_are_seen_behind_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("one.pem"), "one").unwrap();
        fs::write(at("two.pem"), "two").unwrap();
        std::os::unix::fs::symlink(at("one.pem"), at("current.pem")).unwrap();
        let text = serde_json::json!({
            "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1", "certificate-authority": at("ca.crt")}}],
            // As kubelets have it: relative to the file, too.
            "users": [{"name": "u", "user": {"client-certificate": "current.pem", "client-key": at("current.pem")}}],
        });
        fs::write(at("kubelet.conf"), text.to_string()).unwrap();
        let known = files(&at("kubelet.conf"));
        let paths: Vec<&PathBuf> = known.iter().map(|(path, _)| path).collect();
        let expected = ["kubelet.conf", "current.pem", "current.pem", "ca.crt"].map(at);
        assert_eq!(paths, expected.iter().collect::<Vec<_>>());
        let is_same = || known.iter().all(|(path, known)| identity_behind(path) == *known);
        assert!(is_same());
        fs::remove_file(at("current.pem")).unwrap();
        std::os::unix::fs::symlink(at("two.pem"), at("current.pem")).unwrap();
        assert!(!is_same());
    }

    #[test]
    fn certificates_are_looked_for_with_tls_alone() {
        let is_searched_for =
            |address: &str| extender(address.parse().unwrap(), None).unwrap().root_cert.is_none();
        assert!(!is_searched_for("http://10.0.0.1:12345"));
        assert!(is_searched_for("https://10.0.0.1:12345"));
    }
}
