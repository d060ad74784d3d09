//! What is asked of a node's engine: [`Engine`].

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use tokio::time::timeout;
use tonic::Code;

use crate::api::{StatusRequest, StatusResponse};
use crate::generated::cri::runtime_service_client::RuntimeServiceClient;
use crate::generated::older_cri::runtime_service_client::RuntimeServiceClient as OlderClient;
use crate::kubelet::connect;

/// How long an engine may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The engine that makes this node's containers for the kubelet.
#[derive(Debug, Clone)]
pub struct Engine {
    socket: PathBuf,
}

/// The runtimes that an engine has, as far as it reports them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Runtimes {
    /// The names by which RuntimeClasses name them; `None` if the engine doesn't report them.
    pub handlers: Option<BTreeSet<String>>,
    /// The one that makes the containers of pods without a class; `None` if the engine doesn't report it.
    pub default: Option<String>,
}

impl Engine {
    /// The one that serves CRI at that socket.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        Engine { socket }
    }

    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Which runtimes it has: the running engine, whatever its configuration says by now.
    ///
    /// # Errors
    ///
    /// If it can't be asked.
    pub async fn runtimes(&self) -> Result<Runtimes> {
        let asked = async {
            let channel = connect(&self.socket).await?;
            let request = StatusRequest { verbose: true };
            let answer = match RuntimeServiceClient::new(channel.clone()).status(request).await {
                Err(status) if status.code() == Code::Unimplemented => {
                    match OlderClient::new(channel).status(request).await {
                        Err(status) if status.code() == Code::Unimplemented => {
                            bail!(
                                "it does not serve CRI: its plugin cri is disabled, or could not be loaded"
                            )
                        }
                        answer => answer,
                    }
                }
                answer => answer,
            };
            anyhow::Ok(Runtimes::of(&answer?.into_inner()))
        };
        let answer = match timeout(TIMEOUT, asked).await {
            Ok(answer) => answer,
            Err(late) => Err(late.into()),
        };
        answer.with_context(|| {
            format!("the engine does not tell its runtimes at {}", self.socket.display())
        })
    }
}

impl Runtimes {
    /// By an engine's answer: its list of handlers (Kubernetes 1.30 and later), and containerd's configuration, which
    /// it reports to a client that asks for everything.
    #[must_use]
    pub fn of(answer: &StatusResponse) -> Self {
        let config: Value = answer
            .info
            .get("config")
            .and_then(|text| serde_json::from_str(text).ok())
            .unwrap_or_default();
        let listed: BTreeSet<String> =
            answer.runtime_handlers.iter().map(|handler| handler.name.clone()).collect();
        let configured = config["containerd"]["runtimes"]
            .as_object()
            .map(|runtimes| runtimes.keys().cloned().collect());
        let default = config["containerd"]["defaultRuntimeName"].as_str().map(str::to_owned);
        Runtimes { handlers: Some(listed).filter(|list| !list.is_empty()).or(configured), default }
    }

    /// Why containers aren't made by the runtime of that name, if they aren't: those of its class, and with
    /// `is_default` those of pods without one.
    #[must_use]
    pub fn lack(&self, handler: &str, is_default: bool) -> Option<String> {
        if self.handlers.as_ref().is_some_and(|handlers| !handlers.contains(handler)) {
            return Some(format!("the running engine has no runtime \"{handler}\""));
        }
        let other = self.default.as_ref().filter(|default| is_default && **default != handler)?;
        Some(format!(
            "pods without a runtimeClassName get the runtime \"{other}\" of the running engine, not \"{handler}\""
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::RuntimeHandler;

    fn answer(config: Option<&str>, handlers: &[&str]) -> StatusResponse {
        let handler = |name: &&str| RuntimeHandler { name: (*name).to_owned() };
        StatusResponse {
            info: config.map(|text| ("config".to_owned(), text.to_owned())).into_iter().collect(),
            runtime_handlers: handlers.iter().map(handler).collect(),
        }
    }

    /// As containerd 1.6 writes it, shortened.
    const CONFIG: &str = r#"{"containerd":{"snapshotter":"overlayfs","defaultRuntimeName":"runc","runtimes":{"cgpu":
        {"runtimeType":"io.containerd.runc.v2"},"runc":{"runtimeType":"io.containerd.runc.v2"}}},"cni":{}}"#;

    #[test]
    fn engine_reports_runtimes_by_list_or_configuration() {
        let by_config = Runtimes::of(&answer(Some(CONFIG), &[]));
        assert_eq!(by_config.handlers, Some(["cgpu", "runc"].map(str::to_owned).into()));
        assert_eq!(by_config.default.as_deref(), Some("runc"));
        assert_eq!(by_config.lack("cgpu", false), None);
        let reported = by_config.lack("cgpu", true).unwrap();
        assert!(reported.contains("get the runtime \"runc\""), "{reported}");
        let by_list = Runtimes::of(&answer(None, &["", "runc"]));
        let reported = by_list.lack("cgpu", false).unwrap();
        assert_eq!(reported, "the running engine has no runtime \"cgpu\"");
        assert_eq!(Runtimes::of(&answer(Some("{"), &["cgpu"])).lack("cgpu", true), None);
    }

    #[test]
    fn silent_engine_is_not_known_to_lack_runtimes() {
        for config in [None, Some("no JSON"), Some("[]"), Some("{\"containerd\":{\"runtimes\":7}}")]
        {
            let runtimes = Runtimes::of(&answer(config, &[]));
            assert_eq!((&runtimes.handlers, runtimes.lack("cgpu", true)), (&None, None));
        }
    }
}
