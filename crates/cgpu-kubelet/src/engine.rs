//! What is asked of a node's engine: [`Engine`].

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use tokio::time::timeout;
use tonic::Code;

use crate::api::{StatusRequest, StatusResponse, VersionRequest, VersionResponse};
use crate::generated::cri::runtime_service_client::RuntimeServiceClient;
use crate::generated::older_cri::runtime_service_client::RuntimeServiceClient as OlderClient;
use crate::kubelet::connect;

/// How long an engine may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A question for all that an engine reports of itself.
const VERBOSE: StatusRequest = StatusRequest { verbose: true };

/// The first release of containerd that puts the CDI devices of a container's configuration into it.
const CDI_SINCE: (u32, u32, u32) = (1, 7, 2);

const OLD: &str = "it is older than 1.7.2";

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
            let answer = match RuntimeServiceClient::new(channel.clone()).status(VERBOSE).await {
                Err(status) if status.code() == Code::Unimplemented => {
                    match OlderClient::new(channel).status(VERBOSE).await {
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
        self.in_time(asked).await
    }

    /// Which CDI files it reads: the running engine, whatever its configuration says by now.
    ///
    /// # Errors
    ///
    /// If it can't be asked.
    pub async fn cdi(&self) -> Result<Cdi> {
        let asked = async {
            let channel = connect(&self.socket).await?;
            let status = match RuntimeServiceClient::new(channel.clone()).status(VERBOSE).await {
                Err(status) if status.code() == Code::Unimplemented => {
                    // Only releases before CDI serve the older API alone.
                    return Ok(Cdi::Dropped(OLD));
                }
                answer => answer?.into_inner(),
            };
            let mut client = RuntimeServiceClient::new(channel);
            let version = client.version(VersionRequest {}).await?.into_inner();
            anyhow::Ok(Cdi::of(&status, &version))
        };
        self.in_time(asked).await
    }

    /// The answer, or why there is none, in a sentence.
    async fn in_time<T>(&self, asked: impl Future<Output = Result<T>>) -> Result<T> {
        let answer = match timeout(TIMEOUT, asked).await {
            Ok(answer) => answer,
            Err(late) => Err(late.into()),
        };
        answer.with_context(|| {
            format!("the engine does not report its state at {}", self.socket.display())
        })
    }
}

/// What an engine does with the CDI devices of a container, as far as it reports that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cdi {
    /// It reads files in these directories.
    Reads(BTreeSet<PathBuf>),
    /// It drops them in silence; why, as a clause.
    Dropped(&'static str),
    /// It doesn't say.
    Unknown,
}

impl Cdi {
    /// By an engine's answers: containerd reports its configuration.
    #[must_use]
    pub fn of(answer: &StatusResponse, version: &VersionResponse) -> Self {
        let config = configuration(answer);
        if !config["containerd"].is_object() {
            return Cdi::Unknown;
        }
        if version.runtime_name == "containerd"
            && numbers(&version.runtime_version).is_some_and(|version| version < CDI_SINCE)
        {
            return Cdi::Dropped(OLD);
        }
        let directories = config["cdiSpecDirs"].as_array().map(|all| {
            all.iter().filter_map(Value::as_str).map(PathBuf::from).collect::<BTreeSet<_>>()
        });
        match (config["enableCDI"].as_bool(), directories) {
            (Some(false), _) => Cdi::Dropped("its enable_cdi is false"),
            // A release that has no switch any more reads them always.
            (_, Some(directories)) => Cdi::Reads(directories),
            (_, None) => Cdi::Dropped(OLD),
        }
    }

    /// Why a container wouldn't get the CDI devices of files in `directory`, if it wouldn't.
    #[must_use]
    pub fn lack(&self, directory: &Path) -> Option<String> {
        match self {
            Cdi::Reads(directories) if directories.is_empty() => Some(
                "the running engine reads no directory with CDI files: set cdi_spec_dirs"
                    .to_owned(),
            ),
            Cdi::Reads(directories) if !directories.iter().any(|one| is_same(one, directory)) => {
                let list = directories.iter().map(|path| path.display().to_string());
                Some(format!(
                    "the running engine reads CDI files in {}, and not in {}",
                    list.collect::<Vec<_>>().join(", "),
                    directory.display()
                ))
            }
            Cdi::Dropped(why) => Some(format!(
                "the running engine drops CDI devices in silence: {why}; containerd has them from 1.7.2 on, with enable_cdi = true"
            )),
            Cdi::Reads(_) | Cdi::Unknown => None,
        }
    }
}

/// The first numbers of a version: `v1.7.24~ds1` has 1, 7 and 24.
fn numbers(version: &str) -> Option<(u32, u32, u32)> {
    let plain = version.trim_start_matches('v');
    let mut parts = plain.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().ok());
    Some((parts.next()??, parts.next()??, parts.next()??))
}

/// Whether they are one directory: `/var/run` is a link to `/run`.
fn is_same(one: &Path, other: &Path) -> bool {
    let plain = |path: &Path| match path.strip_prefix("/var/run") {
        Ok(rest) => Path::new("/run").join(rest),
        Err(_) => path.to_owned(),
    };
    plain(one) == plain(other)
}

/// The configuration that containerd reports; null of an engine that reports none.
fn configuration(answer: &StatusResponse) -> Value {
    let text = answer.info.get("config");
    text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

impl Runtimes {
    /// By an engine's answer: its list of handlers (Kubernetes 1.30 and later), and containerd's configuration, which
    /// it reports to a client that asks for everything.
    #[must_use]
    pub fn of(answer: &StatusResponse) -> Self {
        let config = configuration(answer);
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

    /// The configurations of containerd 1.6, 1.7 (as it comes and with CDI), 2.1, and a later one, shortened.
    #[test]
    fn engines_that_drop_cdi_devices_are_known() {
        let of = |config: Option<&str>, version: &str| {
            let version = VersionResponse {
                runtime_name: "containerd".to_owned(),
                runtime_version: version.to_owned(),
            };
            Cdi::of(&answer(config, &["cgpu"]), &version).lack(Path::new("/var/run/cdi"))
        };
        let directories = r#""cdiSpecDirs":["/etc/cdi","/run/cdi"]"#;
        for (rest, part) in [
            (String::new(), Some("older than 1.7.2")),
            (format!(r#","enableCDI":false,{directories}"#), Some("enable_cdi is false")),
            (format!(r#","enableCDI":true,{directories}"#), None),
            (format!(",{directories}"), None),
            (
                r#","enableCDI":true,"cdiSpecDirs":["/opt/cdi"]"#.to_owned(),
                Some("in /opt/cdi, and not in"),
            ),
            (r#","enableCDI":true,"cdiSpecDirs":[]"#.to_owned(), Some("set cdi_spec_dirs")),
        ] {
            let config = format!(r#"{{"containerd":{{"runtimes":{{}}}}{rest}}}"#);
            let lack = of(Some(&config), "1.7.24~ds1");
            match part {
                None => assert_eq!(lack, None, "{rest}"),
                Some(part) => {
                    assert!(lack.as_ref().is_some_and(|lack| lack.contains(part)), "{lack:?}")
                }
            }
        }
        let enabled = format!(r#"{{"containerd":{{}},"enableCDI":true,{directories}}}"#);
        assert!(of(Some(&enabled), "1.7.1").is_some_and(|lack| lack.contains(OLD)));
        assert_eq!(of(Some(&enabled), "2.1.9"), None);
        for other in [None, Some("[crio]"), Some("7")] {
            assert_eq!(of(other, "1.30.1"), None, "{other:?}");
        }
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
