//! The extender's life: listens at once, takes part in the election, and serves while it has the lease.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use cgpu_http::tls::answer_tls;
use cgpu_http::{Bounds, answer};
use kube::Client;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tracing::info;

use super::args::ExtenderArgs;
use super::bind::Binder;
use super::certificates::Certificates;
use super::fleet::FleetRules;
use super::leadership::{Leadership, turn};
use super::server::router;
use super::watcher::{SeesTo, follow};
use crate::server::api_server;

/// How long a replica that ends waits for bindings that it has begun.
const LAST_BINDINGS: Duration = Duration::from_secs(15);

/// How long a replica that ends waits until its lease is given up.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Bounds on what one client may take: a binding asks the API server four times at most, and a scheduler waits 20 s.
pub(super) const BOUNDS: Bounds = Bounds {
    connections: 32,
    header: Duration::from_secs(10),
    answer: Duration::from_secs(20),
    header_bytes: 16 << 10,
    keeps_alive: true,
};

/// Serves until a signal ends it.
///
/// # Errors
///
/// If it can't begin.
pub fn run(args: &ExtenderArgs) -> Result<()> {
    cgpu_host::log::init("stderr");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(live(args))
}

async fn live(args: &ExtenderArgs) -> Result<()> {
    let mut ends = signal(SignalKind::terminate())?;
    let mut interrupts = signal(SignalKind::interrupt())?;
    let load = |files| Certificates::load(files, Instant::now()).map(Arc::new);
    let certificates = args.tls.files().map(load).transpose();
    let certificates =
        certificates.context("--tls-cert, --tls-key and --client-ca can't be used")?;
    let Some(mut config) = api_server(args.kubeconfig.as_deref()).await? else {
        bail!(
            "no API server is known: name a --kubeconfig, or run this in a pod with a service account"
        );
    };
    // A watch is silent for minutes.
    config.connect_timeout = Some(Duration::from_secs(5));
    let client = Client::try_from(config).context("the API server can't be asked")?;
    let listener = TcpListener::bind(args.listen)
        .await
        .with_context(|| format!("cannot listen at {}", args.listen))?;
    let identity = identity(args.listen);
    let leadership = match args.alone {
        true => Leadership::Alone,
        false => Leadership::by_lease(client.clone(), &args.lease_namespace, identity.clone()),
    };
    let binder = Arc::new(Binder::new(client.clone(), leadership));
    let rules = FleetRules {
        asks: args.asks.rules(),
        placement: args.placement,
        most_pods: args.most_pods,
    };
    let is_tls = certificates.is_some();
    info!(address = %args.listen, identity, is_tls, "listening");
    let router = router(binder.clone(), certificates.clone());
    let served = async {
        let Some(certificates) = certificates else {
            return answer(listener, router, BOUNDS).await;
        };
        let settings = move || Arc::clone(&certificates.current(Instant::now()).server);
        answer_tls(listener, router, BOUNDS, settings).await
    };
    let lead = async {
        let sees_to = SeesTo { client: client.clone(), evicts_lost: args.evict_lost };
        if args.alone {
            tokio::select! {
                () = follow(&sees_to, binder, rules) => {}
                _ = ends.recv() => {}
                _ = interrupts.recv() => {}
            }
            return Ok(());
        }
        let namespace = &args.lease_namespace;
        let (leads, ended) = turn(namespace).stand(client.clone(), &identity).await?;
        let lease = leads.clone();
        tokio::select! {
            result = keep_serving(&sees_to, binder.clone(), rules, leads) => result?,
            _ = ends.recv() => {}
            _ = interrupts.recv() => {}
        }
        binder.set_fleet(None);
        // The replica that has the lease next lists what is bound by then.
        let _ = tokio::time::timeout(LAST_BINDINGS, binder.finish()).await;
        // No receiver polls the election any more: the lease is given up.
        drop(lease);
        let _ = tokio::time::timeout(LAST_WORDS, ended).await;
        Ok(())
    };
    tokio::select! {
        result = served => result.context("cannot serve"),
        result = lead => result,
    }
}

/// Serves while this replica leads, each time with what the API server has by then.
async fn keep_serving(
    sees_to: &SeesTo,
    binder: Arc<Binder>,
    rules: FleetRules,
    mut leads: watch::Receiver<bool>,
) -> Result<()> {
    loop {
        leads.wait_for(|leads| *leads).await.context("the election has ended")?;
        info!("this replica has the lease");
        tokio::select! {
            () = follow(sees_to, binder.clone(), rules.clone()) => {}
            lost = async { leads.wait_for(|leads| !leads).await.map(|_| ()) } => {
                lost.context("the election has ended")?;
                info!("another replica has the lease");
            }
        }
        binder.set_fleet(None);
    }
}

/// This replica's name among the others: where they reach it, if that is known.
fn identity(listen: SocketAddr) -> String {
    let own = std::env::var("POD_IP").ok().and_then(|address| address.parse().ok());
    let is_own = |address: &IpAddr| !(address.is_unspecified() || address.is_loopback());
    let named = Some(listen.ip()).filter(is_own);
    match named.or(own.filter(|_| !listen.ip().is_loopback())) {
        Some(address) => SocketAddr::new(address, listen.port()).to_string(),
        None => {
            let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
            format!("{}-{}", host.trim(), std::process::id())
        }
    }
}
