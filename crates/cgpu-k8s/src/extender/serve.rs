//! What is answered by HTTP: [`router`].

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::body::to_bytes;
use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, Path, Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use tracing::{info, warn};

use super::bind::{Binder, NotServing};
use super::protocol::{
    BindArgs, BindResult, FilterArgs, FilterResult, Inspection, filter, inspection,
};
use crate::server::extender;

/// The most bytes of a question: the scheduler may send the objects of all nodes.
const MOST_ASKED_BYTES: usize = 256 << 20;

/// How long another replica may take to answer: it asks the API server four times at most.
const LEADER_PATIENCE: Duration = Duration::from_secs(20);

/// What is answered where.
pub(crate) fn router(binder: Arc<Binder>) -> Router {
    let answered_by_leader = Router::new()
        .route("/gpushare-scheduler/filter", post(answer_filter))
        .route("/gpushare-scheduler/bind", post(answer_bind))
        .route("/gpushare-scheduler/inspect", get(answer_inspect))
        .route("/gpushare-scheduler/inspect/{node}", get(answer_inspect_node))
        .route_layer(from_fn_with_state(Arc::clone(&binder), hand_to_leader));
    Router::new()
        .merge(answered_by_leader)
        .route("/version", get(|| async { env!("CARGO_PKG_VERSION") }))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(answer_readiness))
        .layer(DefaultBodyLimit::max(MOST_ASKED_BYTES))
        .with_state(binder)
}

async fn answer_filter(
    State(binder): State<Arc<Binder>>,
    args: Result<Json<FilterArgs>, JsonRejection>,
) -> Response {
    let result = match args {
        Err(error) => {
            let error = format!("this is no question of a scheduler's: {}", error.body_text());
            FilterResult { error, ..FilterResult::default() }
        }
        Ok(Json(args)) => match binder.with_fleet(|fleet| filter(fleet, args)) {
            Ok(result) => result,
            Err(error) => FilterResult { error: error.to_string(), ..FilterResult::default() },
        },
    };
    Json(result).into_response()
}

async fn answer_bind(
    State(binder): State<Arc<Binder>>,
    args: Result<Json<BindArgs>, JsonRejection>,
) -> Response {
    let error = match args {
        Err(error) => format!("this is no binding of a scheduler's: {}", error.body_text()),
        Ok(Json(args)) => {
            let pod = format!("{}/{}", args.pod_namespace, args.pod_name);
            match binder.bind(&args).await {
                Ok(gpus) => {
                    info!(pod, node = args.node, gpus, "bound");
                    String::new()
                }
                Err(error) => {
                    let error = format!("{error:#}");
                    warn!(pod, node = args.node, error, "not bound");
                    error
                }
            }
        }
    };
    Json(BindResult { error }).into_response()
}

async fn answer_inspect(State(binder): State<Arc<Binder>>) -> Response {
    inspected(&binder, None)
}

async fn answer_inspect_node(
    State(binder): State<Arc<Binder>>,
    Path(node): Path<String>,
) -> Response {
    inspected(&binder, Some(&node))
}

fn inspected(binder: &Binder, only: Option<&str>) -> Response {
    match binder.with_fleet(|fleet| inspection(fleet, only)) {
        Ok(inspection) => Json(inspection).into_response(),
        Err(error) => {
            let inspection = Inspection { error: error.to_string(), ..Inspection::default() };
            (StatusCode::SERVICE_UNAVAILABLE, Json(inspection)).into_response()
        }
    }
}

/// Whether this replica answers, itself or by the one that has the lease.
async fn answer_readiness(State(binder): State<Arc<Binder>>) -> Response {
    let is_ready = binder.is_serving() || matches!(binder.leader().await, Ok(Some(_)));
    match is_ready {
        true => "ok".into_response(),
        false => (StatusCode::SERVICE_UNAVAILABLE, NotServing.to_string()).into_response(),
    }
}

/// Marks a question that another replica has handed on: it goes no further.
const HANDED_ON: &str = "cgpu-handed-on";

/// Has the replica answer that serves, where it is another one.
async fn hand_to_leader(
    State(binder): State<Arc<Binder>>,
    request: Request,
    next: Next,
) -> Response {
    if binder.is_serving() || request.headers().contains_key(HANDED_ON) {
        return next.run(request).await;
    }
    let leader = match binder.leader().await {
        Ok(Some(leader)) => leader,
        // What answers says that nobody serves.
        Ok(None) => return next.run(request).await,
        Err(error) => return unavailable(&error),
    };
    match ask(leader, request).await {
        Ok(answer) => ([(CONTENT_TYPE, "application/json")], answer).into_response(),
        Err(error) => unavailable(&error),
    }
}

fn unavailable(error: &anyhow::Error) -> Response {
    let error = format!("{error:#}");
    warn!(error, "a question can't be handed on");
    (StatusCode::SERVICE_UNAVAILABLE, error).into_response()
}

/// Asks the replica that listens there the same.
async fn ask(leader: SocketAddr, request: Request) -> Result<String> {
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, MOST_ASKED_BYTES).await.context("the question is too long")?;
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    let mut config = extender(format!("http://{leader}").parse()?);
    config.connect_timeout = Some(LEADER_PATIENCE);
    config.read_timeout = Some(LEADER_PATIENCE);
    let client = kube::Client::try_from(config).context("the other replica can't be asked")?;
    let question = axum::http::Request::builder()
        .method(parts.method)
        .uri(path)
        .header(CONTENT_TYPE, "application/json")
        .header(HANDED_ON, "1")
        .body(body.to_vec())?;
    client
        .request_text(question)
        .await
        .with_context(|| format!("the replica at {leader} has the lease, and does not answer"))
}
