//! `kubectl inspect gpushare` together with the API server: [`inspect_cluster`].

use std::io::Write;

use anyhow::{Context, Result, bail, ensure};
use axum::http::{Request, Uri};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, ListParams};
use kube::{Client, Config};

use crate::InspectArgs;
use crate::certificate::CertificateFiles;
use crate::extender::protocol::Inspection;
use crate::inspect::{cluster_use, details, inspected_use, table};
use crate::server::{api_server, extender};

/// Prints which pods have what in a cluster.
///
/// # Errors
///
/// If the API server can't be asked or refuses, or has no node of that name with units.
pub fn inspect_cluster(args: &InspectArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let used = runtime.block_on(async {
        let config = match api_server(args.kubeconfig.as_deref()).await? {
            Some(config) => config,
            None => Config::infer().await.context("no cluster is known; name a --kubeconfig")?,
        };
        let client = Client::try_from(config).context("the API server can't be asked")?;
        let all = ListParams::default();
        // A pod that is on no node has nothing.
        let placed = ListParams::default().fields("spec.nodeName!=");
        let nodes = Api::<Node>::all(client.clone());
        let nodes = nodes.list(&all).await.context("the API server does not tell its nodes")?;
        if let Some(extender) = &args.extender {
            let reported = ask_extender(extender, args.files()).await?;
            return Ok(inspected_use(
                &nodes.items,
                &reported,
                &args.resource,
                args.node.as_deref(),
            ));
        }
        let pods = Api::<Pod>::all(client);
        let pods = pods.list(&placed).await.context("the API server does not tell its pods")?;
        let only = args.node.as_deref();
        anyhow::Ok(cluster_use(&nodes.items, &pods.items, &args.resource, only))
    })?;
    if let (Some(node), true) = (&args.node, used.nodes.is_empty()) {
        bail!(
            "the cluster has no node {node:?} with {}; `kubectl get nodes` lists all",
            args.resource
        );
    }
    let text = match (&*args.output, args.details) {
        ("json", _) => serde_json::to_string_pretty(&used)? + "\n",
        (_, true) => details(&used),
        (_, false) => table(&used),
    };
    std::io::stdout().write_all(text.as_bytes()).context("cannot write")
}

/// What the extender at that address reports.
async fn ask_extender(address: &str, files: Option<CertificateFiles>) -> Result<Inspection> {
    let uri: Uri = address.parse().with_context(|| format!("{address} is no address"))?;
    let is_tls = uri.scheme_str() == Some("https");
    ensure!(is_tls || files.is_none(), "--extender-ca needs an address that begins with https://");
    let pem = files.map(|files| files.read()).transpose()?;
    let config = extender(uri, pem.as_ref())?;
    let client = Client::try_from(config).context("the extender can't be asked")?;
    let question = Request::get("/gpushare-scheduler/inspect").body(Vec::new())?;
    let reported: Inspection =
        client.request(question).await.with_context(|| format!("{address} does not tell it"))?;
    ensure!(reported.error.is_empty(), "the extender at {address} says: {}", reported.error);
    Ok(reported)
}
