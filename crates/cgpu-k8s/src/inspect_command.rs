//! `kubectl inspect gpushare` together with the API server: [`inspect_cluster`].

use std::io::Write;

use anyhow::{Context, Result, bail, ensure};
use axum::http::{Request, Uri};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{Api, ListParams};
use kube::{Client, Config};

use crate::InspectArgs;
use crate::certificate::CertificateFiles;
use crate::extender::protocol::Inspection;
use crate::inspect::{
    ClaimUse, ClusterUse, claim_use, claims_table, cluster_use, details, inspected_use, table,
};
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
        let claims = claims(&client, args).await?;
        if let Some(extender) = &args.extender {
            let reported = ask_extender(extender, args.files()).await?;
            let only = args.node.as_deref();
            let used = inspected_use(&nodes.items, &reported, &args.resource, only);
            return Ok(ClusterUse { claims, ..used });
        }
        let pods = Api::<Pod>::all(client);
        let pods = pods.list(&placed).await.context("the API server does not tell its pods")?;
        let only = args.node.as_deref();
        let used = cluster_use(&nodes.items, &pods.items, &args.resource, only);
        anyhow::Ok(ClusterUse { claims, ..used })
    })?;
    if let (Some(node), true) = (&args.node, used.nodes.is_empty() && used.claims.is_empty()) {
        bail!(
            "the cluster has no node {node:?} with {}; `kubectl get nodes` lists all",
            args.resource
        );
    }
    let text = match (&*args.output, args.details) {
        ("json", _) => serde_json::to_string_pretty(&used)? + "\n",
        (_, true) => details(&used) + &claims_table(&used.claims),
        (_, false) => table(&used) + &claims_table(&used.claims),
    };
    std::io::stdout().write_all(text.as_bytes()).context("cannot write")
}

/// What claims have. A cluster without that API has none.
async fn claims(client: &Client, args: &InspectArgs) -> Result<Vec<ClaimUse>> {
    let all = ListParams::default();
    let claims = Api::<ResourceClaim>::all(client.clone()).list(&all).await;
    let claims = match claims {
        Err(kube::Error::Api(status)) if [403, 404].contains(&status.code) => return Ok(Vec::new()),
        claims => claims.context("the API server does not tell its claims")?,
    };
    let own = ListParams::default().fields(&format!("spec.driver={}", args.driver_name));
    let slices = Api::<ResourceSlice>::all(client.clone()).list(&own).await;
    let slices = slices.context("the API server does not tell its slices")?;
    let only = args.node.as_deref();
    Ok(claim_use(&claims.items, &slices.items, &args.driver_name, only))
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
