//! The driver's life: it serves once the engine is as it has to be, and keeps the node's slice and the claims' records as
//! GPUs, the API server and the kubelet change.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cgpu::host::{Host, require_root};
use cgpu_core::request::Grant;
use cgpu_host::grants::Claims;
use cgpu_host::inventory::{Settings, driver_version};
use cgpu_kubelet::Engine;
use cgpu_kubelet::dra_plugin_server::DRAPluginServer;
use cgpu_kubelet::dra_resource_health_server::DRAResourceHealthServer;
use cgpu_kubelet::plugin_registration::registration_server::RegistrationServer;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::Client;
use kube::runtime::watcher::{self, watcher};
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Mutex, Notify, watch};
use tokio::time::sleep;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};
use tonic::transport::Server;
use tracing::{info, warn};

use super::api::Api;
use super::args::DraArgs;
use super::cdi::CdiFiles;
use super::devices::{NodeGpu, devices};
use super::driver::Driver;
use super::registration::Registrar;
use super::slice::{Owner, Written};
use crate::authority::KubeletConnection;
use crate::cluster::TIMEOUT;
use crate::complaint::Complaint;
use crate::engine_check::RUNTIME;
use crate::health::Health;
use crate::lifecycle::{inventory, node_name};
use crate::server::client;

/// How often it is checked what GPUs there are, and whether the engine is as it has to be while it isn't.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// How often it is checked for which pods the claims are reserved.
const PODS_INTERVAL: Duration = Duration::from_secs(5);

/// How soon a question to the API server is asked again that failed.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// How long a watch may report nothing: the API server ends it after the 290 seconds that it is asked for.
const WATCH_TIMEOUT: Duration = Duration::from_secs(330);

const NO_SERVER: &str =
    "no API server is known: give a pod's service account, $KUBECONFIG or --kubeconfig";

/// The longest name of a driver (`DriverNameMaxLength`).
const LONGEST_NAME: usize = 63;

/// Serves until a signal ends it.
///
/// # Errors
///
/// If it can't begin.
pub fn run(args: &DraArgs) -> Result<()> {
    require_root()?;
    let host = Host::load(args.config.as_deref().map(AsRef::as_ref))?;
    cgpu_host::log::init(args.log.as_deref().unwrap_or(&host.config.log));
    require_name(&args.driver_name)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(live(args, &host))
}

async fn live(args: &DraArgs, host: &Host) -> Result<()> {
    let mut ends = signal(SignalKind::terminate())?;
    let mut interrupts = signal(SignalKind::interrupt())?;
    let kubeconfig = args.kubeconfig.as_deref();
    let asking = client(kubeconfig, TIMEOUT).await?.context(NO_SERVER)?;
    let watching = client(kubeconfig, WATCH_TIMEOUT).await?.context(NO_SERVER)?;
    let node = node_name(args.node_name.as_deref())?;
    let settings = host.inventory_settings();
    let mut health = Health::open(&args.kernel_log);
    let driver = Driver {
        name: args.driver_name.clone(),
        node: node.clone(),
        most_weight: host.config.admission.max_inst,
        api: Api::new(asking),
        claims: Claims::at(&host.config.kubernetes.grants),
        cdi: CdiFiles {
            directory: args.cdi_dir.clone(),
            driver: args.driver_name.clone(),
            hook: args.hook.clone(),
            config: args.config.as_deref().map(std::path::absolute).transpose()?,
        },
        gpus: watch::Sender::new(look(&settings, host, &mut health).await?),
        preparing: Arc::new(Mutex::new(())),
    };
    // `cgpu doctor` sees by it that there is a driver.
    driver.claims.make_directory()?;
    let kept = async {
        tokio::join!(
            keep_looking(&settings, host, &mut health, &driver),
            keep_published(watching, &driver, host),
            keep_pods(&driver),
            serve(args, &driver),
        )
        .3
    };
    let served = tokio::select! {
        _ = ends.recv() => Ok(()),
        _ = interrupts.recv() => Ok(()),
        served = kept => served,
    };
    for socket in sockets(args) {
        let _ = fs::remove_file(socket); // it may not be there yet
    }
    served
}

/// Where the driver registers, and where it answers.
fn sockets(args: &DraArgs) -> [PathBuf; 2] {
    let name = &args.driver_name;
    [
        args.registry_dir.join(format!("{name}-reg.sock")),
        args.plugins_dir.join(name).join("dra.sock"),
    ]
}

/// Waits until the engine is as it has to be, and then serves the kubelet.
async fn serve(args: &DraArgs, driver: &Driver) -> Result<()> {
    if let Some(socket) = &args.engine_socket {
        let (engine, mut complaint) = (Engine::new(socket.clone()), Complaint::default());
        while let Some(lack) = lack(&engine, &args.cdi_dir).await {
            complaint
                .report(format!("{lack}; until then the driver doesn't register with the kubelet"));
            sleep(POLL_INTERVAL).await;
        }
    }
    let [registration, endpoint] = sockets(args);
    let answers = listen(&endpoint)?;
    let served = Server::builder()
        .add_service(DRAPluginServer::new(driver.clone()))
        .add_service(DRAResourceHealthServer::new(driver.clone()))
        .serve_with_incoming(answers);
    let registrar = Registrar { driver: driver.name.clone(), endpoint };
    // It answers before the kubelet knows of it.
    let known = Server::builder()
        .add_service(RegistrationServer::new(registrar))
        .serve_with_incoming(listen(&registration)?);
    tokio::try_join!(served, known).context("the driver's sockets can't be served")?;
    Ok(())
}

/// Why the engine doesn't make containers with claims as it has to, if it doesn't.
async fn lack(engine: &Engine, cdi_dir: &Path) -> Option<String> {
    let found = async {
        let runtimes = engine.runtimes().await?.lack(RUNTIME, false);
        Ok(match runtimes {
            Some(lack) => Some(lack),
            None => engine.cdi().await?.lack(cdi_dir),
        })
    };
    match found.await {
        Ok(lack) => lack,
        Err(error) => {
            let error: anyhow::Error = error;
            Some(format!("{error:#}"))
        }
    }
}

/// The kubelet's connections to a socket at `path`.
fn listen(
    path: &Path,
) -> Result<impl Stream<Item = io::Result<KubeletConnection<UnixStream>>> + use<>> {
    let directory = path.parent().unwrap_or(path);
    fs::create_dir_all(directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot remove {}", path.display()));
        }
        _ => {}
    }
    let listener =
        UnixListener::bind(path).with_context(|| format!("cannot listen at {}", path.display()))?;
    Ok(UnixListenerStream::new(listener).map(|stream| stream.map(KubeletConnection::new)))
}

/// The GPUs as they are now.
async fn look(settings: &Settings, host: &Host, health: &mut Health) -> Result<Vec<NodeGpu>> {
    health.listen();
    let found = inventory(settings).await?;
    let given: BTreeMap<String, String> = host
        .grants()
        .all()?
        .iter()
        .flat_map(|grant| grant.gpus.iter().map(|gpu| (gpu.uuid.clone(), holder(grant))))
        .collect();
    let node_gpu = |gpu: &cgpu_core::gpu::Gpu| NodeGpu {
        xid: health.xid(&gpu.bus_id),
        given_by_plugin: given.get(&gpu.uuid).cloned(),
        gpu: gpu.clone(),
    };
    Ok(found.gpus().iter().map(node_gpu).collect())
}

fn holder(grant: &Grant) -> String {
    let pod = grant.holder.as_ref().or(grant.candidates.first());
    pod.map_or_else(|| "a pod".to_owned(), ToString::to_string)
}

/// Takes in each second what the GPUs are, until it is dropped.
async fn keep_looking(settings: &Settings, host: &Host, health: &mut Health, driver: &Driver) {
    let mut complaint = Complaint::default();
    loop {
        sleep(POLL_INTERVAL).await;
        match look(settings, host, health).await {
            Ok(found) => {
                driver.gpus.send_if_modified(|known| {
                    let is_new = *known != found;
                    report_changes(known, &found);
                    *known = found;
                    is_new
                });
            }
            Err(error) => complaint.report(format!("the GPUs can't be looked at: {error:#}")),
        }
    }
}

/// Says in the log which GPUs aren't offered to claims any more, and which are again.
fn report_changes(known: &[NodeGpu], found: &[NodeGpu]) {
    for gpu in found {
        let (index, uuid) = (gpu.gpu.index, &gpu.gpu.uuid);
        let before = known.iter().find(|other| other.gpu.uuid == *uuid);
        let given = |gpu: &NodeGpu| gpu.given_by_plugin.clone();
        match (before.and_then(given), given(gpu)) {
            (None, Some(pod)) => warn!(
                index,
                uuid,
                "the device plugin has given some of it to {pod}: it isn't published for claims, since a GPU is given out \
                 in one way"
            ),
            (Some(_), None) => {
                info!(index, uuid, "no pod has any of it by the device plugin: it is published");
            }
            _ => {}
        }
        match (before.and_then(NodeGpu::fault), gpu.fault()) {
            (None, Some(fault)) => warn!(index, uuid, "{fault}"),
            (Some(_), None) => info!(index, uuid, "it can be used again"),
            _ => {}
        }
    }
}

/// Keeps the node's slice as the GPUs are, until it is dropped.
async fn keep_published(client: Client, driver: &Driver, host: &Host) {
    let mut complaint = Complaint::default();
    let changed = Notify::new();
    let mut gpus = driver.gpus.subscribe();
    let published = async {
        let mut published = Published::default();
        loop {
            let found = gpus.borrow_and_update().clone();
            let done = publish(driver, host, &found, &mut published).await;
            let pause = match done {
                Ok(()) => Duration::MAX,
                Err(error) => {
                    complaint.report(format!("the GPUs aren't published: {error:#}"));
                    RETRY_INTERVAL
                }
            };
            tokio::select! {
                _ = gpus.changed() => {}
                () = changed.notified() => {}
                () = sleep(pause) => {}
            }
        }
    };
    tokio::join!(published, watch_slices(client, driver, &changed));
}

/// What is known of what was published.
#[derive(Debug, Default)]
struct Published {
    node_uid: Option<String>,
    written: Option<Written>,
    /// Whether the API server has dropped taints: it is known once it was given one.
    drops_taints: bool,
}

async fn publish(
    driver: &Driver,
    host: &Host,
    gpus: &[NodeGpu],
    published: &mut Published,
) -> Result<()> {
    let node_uid = match &published.node_uid {
        Some(uid) => uid.clone(),
        None => published.node_uid.insert(driver.api.node_uid(&driver.node).await?).clone(),
    };
    let owner = Owner { driver: driver.name.clone(), node: driver.node.clone(), node_uid };
    let version = driver_version(&host.config.driver.proc_root);
    loop {
        // Without taints, a GPU that can't be used is left out.
        let taints = !published.drops_taints;
        let wanted = devices(gpus, &driver.name, version.as_deref(), taints);
        let now = driver.api.publish(&owner, &wanted, published.written.as_ref()).await?;
        let dropped = now.as_ref().map(Written::dropped).unwrap_or_default();
        if published.written != now {
            report_dropped(&dropped);
        }
        published.written = now;
        if !taints || !dropped.contains(&"taints") {
            return Ok(());
        }
        published.drops_taints = true;
    }
}

/// Says in the log what the API server dropped, and what that means.
fn report_dropped(dropped: &[&str]) {
    if dropped.contains(&"allowMultipleAllocations") || dropped.contains(&"requestPolicy") {
        warn!(
            "the API server dropped {}: each GPU is one claim's as a whole; to share them, Kubernetes 1.36 is needed, or the \
             feature gate DRAConsumableCapacity on API server, scheduler and kubelet",
            dropped.join(" and ")
        );
    }
    if dropped.contains(&"taints") {
        warn!(
            "the API server dropped taints (feature gate DRADeviceTaints): a GPU that can't be used is left out of the slice"
        );
    }
}

/// Notifies of every change of the node's slices, until it is dropped: the kubelet removes them if the driver is gone
/// for half a minute.
async fn watch_slices(client: Client, driver: &Driver, changed: &Notify) {
    let own = format!("spec.driver={},spec.nodeName={}", driver.name, driver.node);
    let slices = kube::Api::<ResourceSlice>::all(client);
    let events = watcher(slices, watcher::Config::default().fields(&own));
    let mut events = std::pin::pin!(events);
    let mut complaint = Complaint::default();
    while let Some(event) = events.next().await {
        match event {
            Ok(_) => changed.notify_one(),
            Err(error) => {
                complaint.report(format!("the node's slices can't be watched: {error}"));
                sleep(RETRY_INTERVAL).await;
            }
        }
    }
}

/// Takes in for which pods the claims are reserved, until it is dropped.
async fn keep_pods(driver: &Driver) {
    let mut complaint = Complaint::default();
    loop {
        let begun = Instant::now();
        if let Err(error) = driver.refresh_pods().await {
            complaint.report(format!("for which pods claims are reserved isn't known: {error:#}"));
        }
        sleep(PODS_INTERVAL.saturating_sub(begun.elapsed())).await;
    }
}

/// Makes sure that a driver can be called so.
fn require_name(name: &str) -> Result<()> {
    let is_label = |label: &str| {
        let is_inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        !label.is_empty()
            && label.chars().all(is_inner)
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    ensure!(
        name.len() <= LONGEST_NAME && name.split('.').all(is_label),
        "--driver-name={name} is no domain name of at most {LONGEST_NAME} characters; as gpu.example.com, in small letters"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_names_are_domain_names() {
        for name in ["gpu.cgpu.io", "gpu", "a-1.b2"] {
            require_name(name).unwrap();
        }
        for name in ["", "GPU.io", "-a.io", "a-.io", "a..b", "a/b", &"a".repeat(64)] {
            let error = require_name(name).unwrap_err().to_string();
            assert!(error.contains("no domain name"), "{error}");
        }
    }
}
