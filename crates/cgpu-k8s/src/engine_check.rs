//! Whether a node's engine makes containers by cgpu, by its own word; its restart where it doesn't yet, one node of the
//! cluster after another.
//!
//! What an engine's files say is applied only once it has read them: [`cgpu_kubelet::Engine`] is asked.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use cgpu_kubelet::device_plugin_client::DevicePluginClient;
use cgpu_kubelet::{Engine, api, connect};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

use crate::cluster::TIMEOUT;
use crate::lease::Turn;
use crate::server::client;

/// How RuntimeClasses name our runtime, in the configuration that `cgpu setup` writes.
pub(crate) const RUNTIME: &str = "cgpu";

/// The lease of the node whose engine is being restarted.
const LEASE: &str = "cgpu-engine-restart";

/// How long the lease holds if no node renews it: a node that is gone delays no other for longer. The next node waits
/// at most so long, too.
const LEASE_SECONDS: u64 = 30;

/// How long an engine may take to serve after its restart.
const RESTART: Duration = Duration::from_secs(120);

/// How long an engine may take to answer that is there: it may be starting itself.
const ANSWER: Duration = Duration::from_secs(60);

/// How often it is asked then.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// How long after it was acquired a lease is checked once more.
const SETTLED: Duration = Duration::from_secs(2);

/// How long it takes until a restart that failed is tried again.
const AGAIN: Duration = Duration::from_secs(60);

/// Where an absolute path of the node's is seen whose root directory is seen at `root`.
pub(crate) fn seen_at(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Which engine, and what it is to do.
#[derive(Debug, Clone, clap::Args)]
pub struct EngineArgs {
    /// The engine's CRI socket on the node.
    #[arg(long, value_name = "FILE", default_value = "/run/containerd/containerd.sock")]
    pub engine_socket: PathBuf,
    /// What the engine is called.
    #[arg(long, value_name = "NAME", default_value = "the engine")]
    pub engine: String,
    /// Pods without a RuntimeClass are no concern of cgpu's.
    #[arg(long)]
    pub not_default_runtime: bool,
}

impl EngineArgs {
    /// Why the engine doesn't make containers by cgpu, if it doesn't. `root` is where the node's root directory is
    /// seen.
    async fn lack(&self, root: &Path) -> Result<Option<String>> {
        let runtimes = Engine::new(seen_at(root, &self.engine_socket)).runtimes().await?;
        Ok(runtimes.lack(RUNTIME, !self.not_default_runtime))
    }

    /// The same, asked again for a while if there is no answer.
    async fn patient_lack(&self, root: &Path) -> Result<Option<String>> {
        let begun = Instant::now();
        loop {
            match self.lack(root).await {
                Err(_) if begun.elapsed() < ANSWER => sleep(POLL_INTERVAL).await,
                answer => return answer,
            }
        }
    }
}

/// Makes sure that the engine makes containers by cgpu, and that a device plugin answers at `plugin`.
///
/// # Errors
///
/// Why that isn't so, in the words that `kubectl describe` shows.
pub(crate) async fn require(root: &Path, args: &EngineArgs, plugin: Option<&Path>) -> Result<()> {
    if let Some(lack) = args.lack(root).await? {
        let engine = &args.engine;
        bail!(
            "{lack}: restart {engine} on this node, which has not read its new configuration, or have this DaemonSet restart \
             it (the chart's node.setup.restart)"
        );
    }
    let Some(socket) = plugin else { return Ok(()) };
    let asked = async {
        let channel = connect(&seen_at(root, socket)).await?;
        DevicePluginClient::new(channel).get_device_plugin_options(api::Empty {}).await?;
        anyhow::Ok(())
    };
    let answered = timeout(TIMEOUT, asked).await.context("no answer in time").flatten();
    answered.with_context(|| format!("the device plugin does not answer at {}", socket.display()))
}

/// Makes sure that the engine puts the CDI devices of files in `directory` into containers.
///
/// # Errors
///
/// Why it doesn't, in the words that `kubectl describe` shows.
pub(crate) async fn require_cdi(root: &Path, args: &EngineArgs, directory: &Path) -> Result<()> {
    match Engine::new(seen_at(root, &args.engine_socket)).cdi().await?.lack(directory) {
        Some(lack) => bail!("{lack}; no pod with a claim starts on this node"),
        None => Ok(()),
    }
}

/// Configures the engine by a `cgpu setup` that `enter` runs on the node with more options, and restarts it if it has
/// to be: one node of the cluster at a time, by a lease in `namespace`. Returns once it makes containers by cgpu; until
/// then a failure is retried, and no other node has its turn.
///
/// # Errors
///
/// If the lease can't be asked for.
pub(crate) async fn restart_in_turn(
    root: &Path,
    args: &EngineArgs,
    namespace: &str,
    enter: impl Fn(&[&str]) -> Command,
) -> Result<()> {
    let is_written = run(enter(&["--check"])).await?;
    // An engine that gives no answer is not restarted for that.
    let lack = args.patient_lack(root).await?;
    if is_written && lack.is_none() {
        return Ok(());
    }
    let engine = &args.engine;
    let node = std::env::var("NODE_NAME").context("the environment lacks NODE_NAME")?;
    let client = client(None, TIMEOUT)
        .await?
        .context("the pod has no service account to ask for a lease by")?;
    let turn = Turn { lease: LEASE, namespace, seconds: LEASE_SECONDS };
    let (mut has, ended) = turn.stand(client.clone(), &node).await?;
    match timeout(TIMEOUT, has.wait_for(|has| *has)).await {
        Ok(had) => drop(had.context("the lease can't be had")?),
        Err(_) => println!(
            "another node's {engine} is being restarted; which one says: kubectl -n {namespace} get lease {LEASE}"
        ),
    }
    let mut ends = signal(SignalKind::terminate())?;
    let restarts = async {
        // What is written already and not applied is for the engine to read, whichever program wrote it: once.
        let mut words: &[&str] =
            if lack.is_some() { &["--restart"] } else { &["--restart", "--if-changed"] };
        loop {
            has.wait_for(|has| *has).await.context("the lease can't be had")?;
            // A node that takes a lease over from a node that is gone may not be alone in that.
            sleep(SETTLED).await;
            if turn.holder(&client).await?.as_ref() != Some(&node) {
                continue;
            }
            match restart(root, args, &enter, &mut words).await {
                Ok(()) => return anyhow::Ok(()),
                Err(error) => eprintln!(
                    "cgpu: {error:#}; it is tried again each minute, and no other node's {engine} is restarted meanwhile"
                ),
            }
            sleep(AGAIN).await;
        }
    };
    let done = tokio::select! {
        done = restarts => done,
        _ = ends.recv() => Err(anyhow!("received SIGTERM while {engine} was to be restarted")),
    };
    drop(has);
    let _ = timeout(TIMEOUT, ended).await; // it ends by itself otherwise
    done?;
    println!("{engine} makes containers by cgpu");
    Ok(())
}

/// Configures and restarts the engine with those options, and waits until it makes containers by cgpu. Once a restart
/// has succeeded, `words` are for a change alone.
async fn restart(
    root: &Path,
    args: &EngineArgs,
    enter: &impl Fn(&[&str]) -> Command,
    words: &mut &[&str],
) -> Result<()> {
    let engine = &args.engine;
    ensure!(run(enter(words)).await?, "{engine} can't be configured or restarted");
    *words = &["--restart", "--if-changed"];
    let begun = Instant::now();
    loop {
        let lack = match args.lack(root).await {
            Ok(None) => return Ok(()),
            Ok(Some(lack)) => lack,
            Err(error) => format!("{error:#}"),
        };
        ensure!(begun.elapsed() < RESTART, "{engine} was to be restarted, and {lack}");
        sleep(POLL_INTERVAL).await;
    }
}

/// Whether a program ends well; it says itself what it does.
async fn run(mut command: Command) -> Result<bool> {
    let status = spawn_blocking(move || command.status()).await?;
    Ok(status.context("a program of the node's can't be run")?.success())
}
