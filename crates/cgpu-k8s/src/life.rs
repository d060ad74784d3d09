//! The plugin's life beside the kubelet's: makes itself known, and sees whether the kubelet is still the
//! same, and the GPUs.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use cgpu::admission::{Host, require_root};
use cgpu::inventory::{Settings, cached, probe};
use hyper_util::rt::TokioIo;
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Endpoint, Server, Uri};
use tower::service_fn;
use tracing::{info, warn};

use crate::Args;
use crate::api::{MOST_ASKED_BYTES, RegisterRequest, VERSION};
use crate::authority::Connection;
use crate::device_plugin_server::DevicePluginServer;
use crate::plugin::{Plugin, Rules, options};
use crate::registration_client::RegistrationClient;
use crate::units::{Shared, Unit, shared};

/// The name of our socket.
const SOCKET: &str = "cgpu-gpu-mem.sock";

/// The kubelet's.
const KUBELET: &str = "kubelet.sock";

/// How often it is seen whether the kubelet began anew, and what GPUs there are.
const LOOK: Duration = Duration::from_secs(1);

/// How long a question of ours may take the kubelet.
const PATIENCE: Duration = Duration::from_secs(10);

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
    runtime.block_on(live(args, settings))
}

/// What ended a life beside one kubelet.
enum Ended {
    /// We are told to end.
    Told,
    /// The kubelet began anew, or we are told to begin anew.
    Anew,
}

async fn live(args: &Args, settings: Settings) -> Result<()> {
    let mut ends = signal(SignalKind::terminate())?;
    let mut interrupts = signal(SignalKind::interrupt())?;
    let mut renewals = signal(SignalKind::hangup())?;
    let rules = Rules {
        unit: args.memory_unit,
        placement: args.placement,
        disable_isolation: args.disable_isolation,
    };
    let plugin = Plugin::new(learn(&settings, rules.unit).await?, rules);
    loop {
        let ended = tokio::select! {
            _ = ends.recv() => Ended::Told,
            _ = interrupts.recv() => Ended::Told,
            ended = serve(args, &settings, &plugin, &mut renewals) => ended?,
        };
        if matches!(ended, Ended::Told) {
            let _ = fs::remove_file(args.plugin_dir.join(SOCKET)); // the kubelet may have
            return Ok(());
        }
    }
}

/// Serves one kubelet: makes itself known to it, and sees whether it is still the same.
async fn serve(
    args: &Args,
    settings: &Settings,
    plugin: &Plugin,
    renewals: &mut Signal,
) -> Result<Ended> {
    let socket = args.plugin_dir.join(SOCKET);
    let kubelet = args.plugin_dir.join(KUBELET);
    let mut waits = false;
    while identity(&kubelet).is_none() {
        if !std::mem::replace(&mut waits, true) {
            info!(socket = %kubelet.display(), "there is no kubelet yet");
        }
        sleep(LOOK).await;
    }
    let known = identity(&kubelet);
    match fs::remove_file(&socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot remove {}", socket.display()));
        }
        _ => {}
    }
    let listener = UnixListener::bind(&socket)
        .with_context(|| format!("cannot listen at {}", socket.display()))?;
    let own = identity(&socket);
    let service =
        DevicePluginServer::new(plugin.clone()).max_decoding_message_size(MOST_ASKED_BYTES);
    let (end, ends) = oneshot::channel::<()>();
    let server = tokio::spawn(Server::builder().add_service(service).serve_with_incoming_shutdown(
        UnixListenerStream::new(listener).map(|stream| stream.map(Connection::new)),
        async { drop(ends.await) },
    ));
    let mut is_registered = false;
    loop {
        if !is_registered {
            match register(&kubelet, &args.resource).await {
                Ok(()) => {
                    info!(resource = args.resource, "the kubelet knows of the GPUs");
                    is_registered = true;
                }
                Err(error) => warn!(error = format!("{error:#}"), "the kubelet does not take us"),
            }
        }
        tokio::select! {
            _ = renewals.recv() => break,
            () = sleep(LOOK) => {}
        }
        if identity(&kubelet) != known || identity(&socket) != own {
            info!("the kubelet has begun anew");
            break;
        }
        match learn(settings, args.memory_unit).await {
            Ok(gpus) => plugin.set(gpus),
            Err(error) => warn!(error = format!("{error:#}"), "the GPUs can't be looked at"),
        }
    }
    let _ = end.send(());
    // Streams that the kubelet has open don't end by themselves.
    server.abort();
    Ok(Ended::Anew)
}

/// The GPUs as they are known, or as the driver tells them where they aren't.
async fn learn(settings: &Settings, unit: Unit) -> Result<Vec<Shared>> {
    let settings = settings.clone();
    let found = spawn_blocking(move || match cached(&settings)? {
        Some(inventory) => anyhow::Ok(inventory),
        None => Ok(probe(&settings)?),
    });
    Ok(shared(found.await??.gpus(), unit)?)
}

/// Which file it is; `None` where there is none.
fn identity(path: &Path) -> Option<(u64, u64, i64, i64)> {
    let meta = fs::symlink_metadata(path).ok()?;
    Some((meta.dev(), meta.ino(), meta.ctime(), meta.ctime_nsec()))
}

/// Makes the plugin known to the kubelet.
async fn register(kubelet: &Path, resource: &str) -> Result<()> {
    let socket = kubelet.to_owned();
    let connect = service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { io::Result::Ok(TokioIo::new(UnixStream::connect(socket).await?)) }
    });
    let endpoint = Endpoint::from_static("http://kubelet").timeout(PATIENCE);
    let channel = endpoint.connect_with_connector(connect).await.context("cannot connect")?;
    let request = RegisterRequest {
        version: VERSION.to_owned(),
        endpoint: SOCKET.to_owned(),
        resource_name: resource.to_owned(),
        options: Some(options()),
    };
    RegistrationClient::new(channel).register(request).await?;
    Ok(())
}
