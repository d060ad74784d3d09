//! The extender's life: listens at once, takes part in the election, and serves while it has the lease.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use kube::Client;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tracing::info;

use super::args::ExtenderArgs;
use super::bind::Binder;
use super::fleet::FleetRules;
use super::lead::{Leadership, stand};
use super::serve::router;
use super::watch::follow;
use crate::server::api_server;

/// How long a replica that ends waits for bindings that it has begun.
const LAST_BINDINGS: Duration = Duration::from_secs(15);

/// How long a replica that ends waits until its lease is given up.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Serves until told to end.
///
/// # Errors
///
/// Where it can't begin.
pub fn run(args: &ExtenderArgs) -> Result<()> {
    cgpu::log::init("stderr");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(live(args))
}

async fn live(args: &ExtenderArgs) -> Result<()> {
    let mut ends = signal(SignalKind::terminate())?;
    let mut interrupts = signal(SignalKind::interrupt())?;
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
        resource: args.resource.clone(),
        placement: args.placement,
        most_pods: args.most_pods,
    };
    info!(address = %args.listen, identity, "listening");
    let served = axum::serve(listener, router(binder.clone()));
    let lead = async {
        if args.alone {
            follow(client, binder, rules).await;
            return Ok(());
        }
        let namespace = &args.lease_namespace;
        let (leads, ended) = stand(client.clone(), namespace, &identity).await?;
        let lease = leads.clone();
        tokio::select! {
            result = keep_serving(client, binder.clone(), rules, leads) => result?,
            _ = ends.recv() => {}
            _ = interrupts.recv() => {}
        }
        binder.set_fleet(None);
        // Who has the lease next lists what is bound by then.
        let _ = tokio::time::timeout(LAST_BINDINGS, binder.finish()).await;
        // Nobody looks at the election any more: the lease is given up.
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
    client: Client,
    binder: Arc<Binder>,
    rules: FleetRules,
    mut leads: watch::Receiver<bool>,
) -> Result<()> {
    loop {
        leads.wait_for(|leads| *leads).await.context("the election has ended")?;
        info!("this replica has the lease");
        tokio::select! {
            () = follow(client.clone(), binder.clone(), rules.clone()) => {}
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
