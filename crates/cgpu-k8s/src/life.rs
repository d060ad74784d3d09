//! The plugin's life beside the kubelet's: makes itself known, and sees whether the kubelet is still the
//! same, and the GPUs.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use cgpu::host::{Host, require_root};
use cgpu::inventory::{Settings, cached, refresh};
use cgpu_kubelet::api::{DevicePluginOptions, MOST_ASKED_BYTES, RegisterRequest, VERSION};
use cgpu_kubelet::device_plugin_server::{DevicePlugin, DevicePluginServer};
use cgpu_kubelet::registration_client::RegistrationClient;
use cgpu_kubelet::{Kubelet, connect};
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
use crate::cluster::Cluster;
use crate::health::Health;
use crate::plugin::{Plugin, PluginRules};
use crate::record::keep_record;
use crate::units::{SharedGpu, Unit, shared};
use crate::whole::WholePlugin;

/// The names of our sockets: of shared GPUs, and of GPUs as a whole.
const SHARED_SOCKET: &str = "cgpu-gpu-mem.sock";
const WHOLE_SOCKET: &str = "cgpu-gpu-whole.sock";

/// The kubelet's.
const KUBELET: &str = "kubelet.sock";

/// How often it is seen whether the kubelet began anew, and what GPUs there are.
const LOOK: Duration = Duration::from_secs(1);

/// Serves until told to end.
///
/// # Errors
///
/// Where it can't begin.
pub fn run(args: &Args) -> Result<()> {
    require_root()?;
    let host = Host::load(args.config.as_deref().map(AsRef::as_ref))?;
    cgpu::log::init(&host.config.log);
    let settings = host.inventory_settings();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(live(args, settings, host.config.admission.max_inst))
}

async fn live(args: &Args, settings: Settings, most_weight: u32) -> Result<()> {
    let mut ends = signal(SignalKind::terminate())?;
    let mut interrupts = signal(SignalKind::interrupt())?;
    let mut renewals = signal(SignalKind::hangup())?;
    let rules = PluginRules {
        resource: args.resource.clone(),
        whole_resource: args.whole_resource.clone(),
        unit: args.memory_unit,
        placement: args.placement,
        disable_isolation: args.disable_isolation,
        most_weight,
    };
    let kubeconfig = args.kubeconfig.as_deref();
    let cluster = Cluster::find(kubeconfig, node_name(args)?).await?;
    let kubelet = Kubelet::new(args.pod_resources.clone());
    let gpus = learn(&settings, rules.unit).await?;
    let mut health = Health::open(&args.kernel_log);
    let plugin = Plugin::new(health.judged(gpus), rules, cluster.clone(), kubelet);
    tokio::spawn(keep_looking(plugin.clone()));
    match cluster {
        Some(cluster) => {
            tokio::spawn(keep_record(cluster, plugin.clone(), settings.proc_root.clone()));
        }
        None => warn!(
            "no API server is known (--kubeconfig): pods get one GPU whatever their label \
             aliyun.com/gpu-count says, and labels of the node say nothing"
        ),
    }
    loop {
        tokio::select! {
            _ = ends.recv() => break,
            _ = interrupts.recv() => break,
            served = serve(args, &settings, &plugin, &mut health, &mut renewals) => served?,
        }
    }
    for socket in [SHARED_SOCKET, WHOLE_SOCKET] {
        let _ = fs::remove_file(args.plugin_dir.join(socket)); // the kubelet may have
    }
    Ok(())
}

/// Asks the kubelet each second who has what, until it is dropped.
async fn keep_looking(plugin: Plugin) {
    let mut complaint = Complaint::default();
    loop {
        if let Err(error) = plugin.look().await {
            complaint.tell(format!("{error:#}; until then no GPU can be a container's as a whole"));
        }
        sleep(LOOK).await;
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

/// Serves one kubelet, until another takes its place: makes itself known to it, again where a hangup
/// asks for that, and tells it of the GPUs.
async fn serve(
    args: &Args,
    settings: &Settings,
    plugin: &Plugin,
    health: &mut Health,
    renewals: &mut Signal,
) -> Result<()> {
    let kubelet = args.plugin_dir.join(KUBELET);
    let mut complaint = Complaint::default();
    if identity(&kubelet).is_none() {
        info!(socket = %kubelet.display(), "there is no kubelet yet");
    }
    let known = loop {
        match identity(&kubelet) {
            Some(known) => break known,
            None => sleep(LOOK).await,
        }
    };
    let directory = &args.plugin_dir;
    let (resource, whole) = (&args.resource, &args.whole_resource);
    let options = plugin.options();
    let mut endpoints =
        vec![Endpoint::open(directory, SHARED_SOCKET, resource, options, plugin.clone())?];
    if !whole.is_empty() {
        let (options, plugin) = (DevicePluginOptions::default(), WholePlugin(plugin.clone()));
        endpoints.push(Endpoint::open(directory, WHOLE_SOCKET, whole, options, plugin)?);
    }
    let mut is_registered = false;
    while identity(&kubelet) == Some(known) && endpoints.iter().all(Endpoint::is_ours) {
        if !is_registered {
            match register(&kubelet, &endpoints).await {
                Ok(()) => is_registered = true,
                Err(error) => complaint.tell(format!("the kubelet does not take us: {error:#}")),
            }
        }
        tokio::select! {
            _ = renewals.recv() => {
                is_registered = false;
                health.forgive();
            }
            () = sleep(LOOK) => {}
        }
        health.listen();
        match learn(settings, args.memory_unit).await {
            Ok(gpus) => plugin.set(health.judged(gpus)),
            Err(error) => complaint.tell(format!("the GPUs can't be looked at: {error:#}")),
        }
    }
    info!("the kubelet has begun anew");
    // The kubelet that is gone may have streams open, which don't end by themselves.
    endpoints.iter().for_each(|endpoint| endpoint.server.abort());
    Ok(())
}

/// The node's name in the cluster: the kubelet takes the host's, in small letters, where it is told no
/// other.
fn node_name(args: &Args) -> Result<String> {
    if let Some(name) = &args.node_name {
        return Ok(name.clone());
    }
    if let Ok(name) = std::env::var("NODE_NAME") {
        return Ok(name);
    }
    let name =
        fs::read_to_string("/proc/sys/kernel/hostname").context("cannot read the host's name")?;
    Ok(name.trim().to_lowercase())
}

/// What was complained of last: the same is not told each second.
#[derive(Debug, Default)]
pub(crate) struct Complaint(String);

impl Complaint {
    pub(crate) fn tell(&mut self, what: String) {
        if self.0 != what {
            warn!("{what}");
            self.0 = what;
        }
    }
}

/// The GPUs as they are known, or as the driver tells them where they aren't; then they are.
async fn learn(settings: &Settings, unit: Unit) -> Result<Vec<SharedGpu>> {
    let settings = settings.clone();
    let found = spawn_blocking(move || match cached(&settings)? {
        Some(inventory) => anyhow::Ok(inventory),
        None => Ok(refresh(&settings)?.reserving(settings.reserve_mib)),
    });
    Ok(shared(found.await??.gpus(), unit)?)
}

/// Which file it is.
type Identity = (u64, u64, i64, i64);

/// `None` where there is no file.
fn identity(path: &Path) -> Option<Identity> {
    let meta = fs::symlink_metadata(path).ok()?;
    Some((meta.dev(), meta.ino(), meta.ctime(), meta.ctime_nsec()))
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
