//! The plugin's life next to the kubelet's: makes itself known, and sees whether the kubelet is still
//! the same, and the GPUs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cgpu::host::{Host, require_root};
use cgpu_cli::nvml::refresh;
use cgpu_core::gpu::Inventory;
use cgpu_core::request::Grant;
use cgpu_host::events::Store;
use cgpu_host::inventory::{Settings, cached};
use cgpu_kubelet::api::{DevicePluginOptions, MOST_ASKED_BYTES, RegisterRequest, VERSION};
use cgpu_kubelet::device_plugin_server::{DevicePlugin, DevicePluginServer};
use cgpu_kubelet::registration_client::RegistrationClient;
use cgpu_kubelet::{Engine, Kubelet, connect};
use tokio::net::UnixListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::sleep;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tracing::{info, warn};

use crate::Args;
use crate::authority::KubeletConnection;
use crate::cluster::{Cluster, TIMEOUT};
use crate::complaint::Complaint;
use crate::directory::Directory;
use crate::engine_check::RUNTIME;
use crate::exclusive::WholePlugin;
use crate::grant::keep_grants;
use crate::health::Health;
use crate::identity::{Identity, identity};
use crate::node_record::keep_record;
use crate::plugin::{Plugin, PluginRules};
use crate::pod_events::keep_reporting;
use crate::pods::holdings;
use crate::server::client;
use crate::units::{SharedGpu, Unit, shared};

/// The names of our sockets: of shared GPUs, and of exclusive GPUs.
const SHARED_SOCKET: &str = "cgpu-gpu-mem.sock";
const WHOLE_SOCKET: &str = "cgpu-gpu-whole.sock";

/// The kubelet's.
const KUBELET: &str = "kubelet.sock";

/// How often it is checked what GPUs there are, and at the latest whether the kubelet began again.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// How often the engine is asked that has said yes.
const SELDOM: Duration = Duration::from_secs(10);

/// How soon the plugin reports again to a kubelet that didn't listen yet; twice as long each time.
const SOON: Duration = Duration::from_millis(50);

/// Serves until a signal ends it.
///
/// # Errors
///
/// If it can't begin.
pub fn run(args: &Args) -> Result<()> {
    require_root()?;
    let host = Host::load(args.config.as_deref().map(AsRef::as_ref))?;
    cgpu_host::log::init(args.log.as_deref().unwrap_or(&host.config.log));
    let settings = host.inventory_settings();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(live(args, settings, &host))
}

async fn live(args: &Args, settings: Settings, host: &Host) -> Result<()> {
    let grants = host.grants();
    let mut ends = signal(SignalKind::terminate())?;
    let mut interrupts = signal(SignalKind::interrupt())?;
    let mut renewals = signal(SignalKind::hangup())?;
    let rules = PluginRules {
        asks: args.asks.rules(),
        unit: args.memory_unit,
        placement: args.placement,
        disable_isolation: args.disable_isolation,
        most_weight: host.config.admission.max_inst,
    };
    let kubeconfig = args.kubeconfig.as_deref();
    let cluster = Cluster::find(kubeconfig, node_name(args.node_name.as_deref())?).await?;
    let kubelet = Kubelet::new(args.pod_resources.clone());
    let gpus = learn(&settings, rules.unit).await?;
    let held = kubelet.held().await.map(|held| holdings(&held, &rules.asks.memory));
    if held.is_ok_and(|held| !held.is_empty()) {
        require_unit(&grants.all()?, rules.unit)?;
    }
    let mut health = Health::open(&args.kernel_log);
    let gpus = health.judged(gpus);
    let plugin = Plugin::new(gpus, (rules, grants.clone()), cluster.clone(), kubelet);
    tokio::spawn(keep_looking(plugin.clone()));
    if let Some(socket) = &args.engine_socket {
        let (engine, mut complaint) = (Engine::new(socket.clone()), Complaint::default());
        plugin.set_served(false);
        ask_engine(&engine, &plugin, &mut complaint).await;
        tokio::spawn(keep_asking(engine, plugin.clone(), complaint));
    }
    let annotator = match args.write_pod_annotations {
        true => Some(client(None, TIMEOUT).await?.context(
            "--write-pod-annotations needs who may: a pod's service account, or $KUBECONFIG",
        )?),
        false => None,
    };
    match cluster {
        Some(cluster) => {
            tokio::spawn(keep_grants(cluster.clone(), plugin.clone(), grants));
            let store = Store::of(&host.config.state_dir);
            tokio::spawn(keep_reporting(cluster.clone(), plugin.clone(), store));
            let proc_root = settings.proc_root.clone();
            tokio::spawn(keep_record(cluster, plugin.clone(), proc_root, annotator));
        }
        None => warn!(
            "no API server is known: the kubelet's own kubeconfig is at none of the usual places (--kubeconfig; \
             node.kubeletConfig of the chart). Pods get one GPU whatever their label aliyun.com/gpu-count says, and labels \
             of the node say nothing"
        ),
    }
    // A kubelet that begins takes all sockets away, and makes its own.
    let arrivals = Directory::watch(&args.plugin_dir);
    loop {
        tokio::select! {
            _ = ends.recv() => break,
            _ = interrupts.recv() => break,
            served = serve(args, &settings, &plugin, &mut health, (&mut renewals, &arrivals)) => served?,
        }
    }
    for socket in [SHARED_SOCKET, WHOLE_SOCKET] {
        let _ = fs::remove_file(args.plugin_dir.join(socket)); // the kubelet may have
    }
    Ok(())
}

/// Makes sure that no pod has units of another size: the kubelet retains the devices that it gave, and would take them
/// for as many of the new units.
fn require_unit(grants: &[Grant], unit: Unit) -> Result<()> {
    let of = |grant: &Grant| grant.variables.get("ALIYUN_COM_GPU_MEM_UNIT").cloned();
    let mut others = grants.iter().filter_map(|grant| Some((of(grant)?, grant)));
    if let Some((had, grant)) = others.find(|(had, _)| had.parse() != Ok(unit)) {
        let whose = grant.holder.as_ref().or(grant.candidates.first());
        let whose = whose.map_or_else(|| "a pod".to_owned(), ToString::to_string);
        bail!(
            "{whose} has units of {had}, and this plugin gives out units of {unit}: start it with --memory-unit {had} (the \
             chart's memoryUnit), or take all pods with GPU memory from the node first (kubectl drain)"
        );
    }
    Ok(())
}

/// Asks the kubelet each second which containers have what, until it is dropped.
async fn keep_looking(plugin: Plugin) {
    let mut complaint = Complaint::default();
    loop {
        if let Err(error) = plugin.check().await {
            complaint
                .report(format!("{error:#}; until then no GPU can be a container's as a whole"));
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Asks the engine whether it makes containers by cgpu. As long as it can't be asked, it is as it was.
async fn ask_engine(engine: &Engine, plugin: &Plugin, complaint: &mut Complaint) -> bool {
    let runtimes = match engine.runtimes().await {
        Ok(runtimes) => runtimes,
        Err(error) => {
            complaint.report(format!("{error:#}; whether it makes containers by cgpu isn't known"));
            return false;
        }
    };
    let lack = runtimes.lack(RUNTIME, plugin.rules().asks.is_default);
    if let Some(lack) = &lack {
        complaint.report(format!("{lack}: restart it; until then no GPU is given out"));
    }
    plugin.set_served(lack.is_none());
    lack.is_none()
}

/// Asks it again and again, until it is dropped: often, until it does.
async fn keep_asking(engine: Engine, plugin: Plugin, mut complaint: Complaint) {
    let mut does = false;
    loop {
        sleep(if does { SELDOM } else { POLL_INTERVAL }).await;
        does = ask_engine(&engine, &plugin, &mut complaint).await;
    }
}

/// One of our sockets, with what answers there.
struct Endpoint {
    name: &'static str,
    resource: String,
    options: DevicePluginOptions,
    path: PathBuf,
    identity: Option<Identity>,
    server: JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Endpoint {
    fn open<T: DevicePlugin>(
        directory: &Path,
        name: &'static str,
        resource: &str,
        options: DevicePluginOptions,
        plugin: T,
    ) -> Result<Self> {
        let path = directory.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", path.display()));
            }
            _ => {}
        }
        let listener = UnixListener::bind(&path)
            .with_context(|| format!("cannot listen at {}", path.display()))?;
        let identity = identity(&path);
        let service = DevicePluginServer::new(plugin).max_decoding_message_size(MOST_ASKED_BYTES);
        let incoming =
            UnixListenerStream::new(listener).map(|stream| stream.map(KubeletConnection::new));
        let served = Server::builder().add_service(service).serve_with_incoming(incoming);
        let resource = resource.to_owned();
        Ok(Endpoint { name, resource, options, path, identity, server: tokio::spawn(served) })
    }

    fn is_ours(&self) -> bool {
        identity(&self.path) == self.identity
    }
}

/// Serves one kubelet, until another takes its place: makes itself known to it, again if a hangup
/// asks for that, and reports the GPUs to it.
async fn serve(
    args: &Args,
    settings: &Settings,
    plugin: &Plugin,
    health: &mut Health,
    (renewals, arrivals): (&mut Signal, &Directory),
) -> Result<()> {
    let kubelet = args.plugin_dir.join(KUBELET);
    let mut complaint = Complaint::default();
    if identity(&kubelet).is_none() {
        info!(socket = %kubelet.display(), "there is no kubelet yet");
    }
    let known = loop {
        match identity(&kubelet) {
            Some(known) => break known,
            None => arrivals.changed(POLL_INTERVAL).await,
        }
    };
    let directory = &args.plugin_dir;
    let (resource, whole) = (&args.asks.resource, &args.asks.whole_resource);
    let options = plugin.options();
    let mut endpoints =
        vec![Endpoint::open(directory, SHARED_SOCKET, resource, options, plugin.clone())?];
    if !whole.is_empty() {
        let (options, plugin) = (DevicePluginOptions::default(), WholePlugin(plugin.clone()));
        endpoints.push(Endpoint::open(directory, WHOLE_SOCKET, whole, options, plugin)?);
    }
    let (mut is_registered, mut pause) = (false, SOON);
    let mut checked: Option<Instant> = None;
    while identity(&kubelet) == Some(known) && endpoints.iter().all(Endpoint::is_ours) {
        if !is_registered {
            match register(&kubelet, &endpoints).await {
                Ok(()) => is_registered = true,
                Err(error) => {
                    pause = POLL_INTERVAL.min(2 * pause);
                    complaint.report(format!("the kubelet does not take us: {error:#}"));
                }
            }
        }
        tokio::select! {
            _ = renewals.recv() => {
                is_registered = false;
                health.forgive();
            }
            () = arrivals.changed(if is_registered { POLL_INTERVAL } else { pause }) => {}
        }
        if checked.is_some_and(|checked| checked.elapsed() < POLL_INTERVAL) {
            continue;
        }
        checked = Some(Instant::now());
        health.listen();
        match learn(settings, args.memory_unit).await {
            Ok(gpus) => plugin.set(health.judged(gpus)),
            Err(error) => complaint.report(format!("the GPUs can't be looked at: {error:#}")),
        }
    }
    info!("the kubelet has begun anew");
    // The kubelet that is gone may have streams open, which don't end by themselves.
    endpoints.iter().for_each(|endpoint| endpoint.server.abort());
    Ok(())
}

/// The node's name in the cluster: the kubelet takes the host's, in small letters, if it is given no
/// other.
pub(crate) fn node_name(said: Option<&str>) -> Result<String> {
    if let Some(name) = said {
        return Ok(name.to_owned());
    }
    if let Ok(name) = std::env::var("NODE_NAME") {
        return Ok(name);
    }
    let name =
        fs::read_to_string("/proc/sys/kernel/hostname").context("cannot read the host's name")?;
    Ok(name.trim().to_lowercase())
}

/// The GPUs as they are known, or if they aren't, as the driver reports them; then they are.
async fn learn(settings: &Settings, unit: Unit) -> Result<Vec<SharedGpu>> {
    Ok(shared(inventory(settings).await?.gpus(), unit)?)
}

/// The same, as the inventory has them.
pub(crate) async fn inventory(settings: &Settings) -> Result<Inventory> {
    let settings = settings.clone();
    let found = spawn_blocking(move || match cached(&settings)? {
        Some(inventory) => anyhow::Ok(inventory),
        None => Ok(refresh(&settings)?.reserving(settings.reserve_mib)),
    });
    found.await?
}

/// Makes the plugin known to the kubelet, at each of its sockets.
async fn register(kubelet: &Path, endpoints: &[Endpoint]) -> Result<()> {
    let mut client = RegistrationClient::new(connect(kubelet).await?);
    for endpoint in endpoints {
        let request = RegisterRequest {
            version: VERSION.to_owned(),
            endpoint: endpoint.name.to_owned(),
            resource_name: endpoint.resource.clone(),
            options: Some(endpoint.options.clone()),
        };
        client.register(request).await?;
        info!(resource = endpoint.resource, "the kubelet knows of the GPUs");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Units of another size that pods still have are reported with both ways out: the old unit, or
    /// a drained node.
    #[test]
    fn units_of_another_size_are_refused_with_remedies() {
        let grant: Grant = serde_json::from_value(serde_json::json!({
            "format": 1, "token": "", "resource": "aliyun.com/gpu-mem", "devices": [], "gpus": [], "unenforced": false,
            "candidates": [], "variables": {"ALIYUN_COM_GPU_MEM_UNIT": "GiB"},
            "holder": {"namespace": "default", "pod": "p", "uid": "u", "container": "main"},
        }))
        .unwrap();
        let whole = Grant { variables: [].into(), ..grant.clone() };
        let grants = [whole, grant];
        require_unit(&grants, Unit::GiB).unwrap();
        let reported = require_unit(&grants, Unit::MiB).unwrap_err().to_string();
        for part in [
            "container main of pod default/p has units of GiB",
            "--memory-unit GiB",
            "kubectl drain",
        ] {
            assert!(reported.contains(part), "{reported}");
        }
    }
}
