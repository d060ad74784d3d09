//! What is answered by HTTP: [`router`].

use std::sync::Arc;

use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use tracing::{info, warn};

use super::bind::Binder;
use super::protocol::{
    BindArgs, BindResult, FilterArgs, FilterResult, Inspection, filter, inspection,
};

/// The most bytes of a question: the scheduler may send the objects of all nodes.
const MOST_ASKED_BYTES: usize = 256 << 20;

/// What is answered where.
pub(crate) fn router(binder: Arc<Binder>) -> Router {
    Router::new()
        .route("/gpushare-scheduler/filter", post(answer_filter))
        .route("/gpushare-scheduler/bind", post(answer_bind))
        .route("/gpushare-scheduler/inspect", get(answer_inspect))
        .route("/gpushare-scheduler/inspect/{node}", get(answer_inspect_node))
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

/// Whether it is this replica that serves: a Service sends to those that are ready.
async fn answer_readiness(State(binder): State<Arc<Binder>>) -> Response {
    match binder.with_fleet(|_| ()) {
        Ok(()) => "ok".into_response(),
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()).into_response(),
    }
}
