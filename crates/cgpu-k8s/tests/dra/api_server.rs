//! An API server as far as a DRA driver asks it: it keeps claims and slices, refuses writes of an old version, reports to
//! watchers what changes, and can drop fields as one does whose feature gates are off.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::Json;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path as Of, State};
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::sync::broadcast;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::BroadcastStream;

/// What it keeps.
#[derive(Default)]
struct Kept {
    /// By name.
    slices: BTreeMap<String, Value>,
    /// By namespace and name.
    claims: BTreeMap<(String, String), Value>,
    version: u64,
    /// Fields of devices that it drops.
    dropped: BTreeSet<&'static str>,
    /// How many writes are refused because somebody else was faster.
    conflicts: usize,
    /// Writes of slices that succeeded.
    writes: usize,
    is_down: bool,
    /// How often each claim was asked for, by name.
    asked: BTreeMap<String, usize>,
}

#[derive(Clone)]
pub struct ApiServer {
    kept: Arc<Mutex<Kept>>,
    events: broadcast::Sender<Value>,
}

impl ApiServer {
    /// One that is served at an address of its own, and a kubeconfig for it in `directory`.
    pub fn start(runtime: &Runtime, directory: &Path) -> Self {
        let server = ApiServer { kept: Arc::default(), events: broadcast::Sender::new(64) };
        let slices = "/apis/resource.k8s.io/v1/resourceslices";
        let router = Router::new()
            .route("/api/v1/nodes/{name}", get(node))
            .route(
                "/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}",
                get(claim),
            )
            .route(slices, get(list).post(create))
            .route(&format!("{slices}/{{name}}"), axum::routing::put(replace).delete(remove))
            .with_state(server.clone());
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async move { axum::serve(listener, router).await });
        let config = json!({
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{address}")}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        });
        std::fs::write(directory.join("kubeconfig"), config.to_string()).unwrap();
        server
    }

    /// Has a claim, in the place of one of its name.
    pub fn set_claim(&self, claim: &Value) {
        let text = |field: &str| claim["metadata"][field].as_str().unwrap().to_owned();
        self.kept.lock().unwrap().claims.insert((text("namespace"), text("name")), claim.clone());
    }

    pub fn remove_claim(&self, namespace: &str, name: &str) {
        self.kept.lock().unwrap().claims.remove(&(namespace.to_owned(), name.to_owned()));
    }

    pub fn drop_fields(&self, fields: &[&'static str]) {
        self.kept.lock().unwrap().dropped = fields.iter().copied().collect();
    }

    /// Refuses so many writes.
    pub fn refuse_writes(&self, conflicts: usize) {
        self.kept.lock().unwrap().conflicts = conflicts;
    }

    /// Answers nothing from now on, or again.
    pub fn set_down(&self, is_down: bool) {
        self.kept.lock().unwrap().is_down = is_down;
    }

    /// How often the claim of that name was asked for.
    pub fn asked(&self, name: &str) -> usize {
        self.kept.lock().unwrap().asked.get(name).copied().unwrap_or_default()
    }

    pub fn slices(&self) -> Vec<Value> {
        self.kept.lock().unwrap().slices.values().cloned().collect()
    }

    pub fn writes(&self) -> usize {
        self.kept.lock().unwrap().writes
    }

    /// Removes all slices, as the kubelet does of a driver that is gone.
    pub fn remove_slices(&self) {
        let slices = std::mem::take(&mut self.kept.lock().unwrap().slices);
        for slice in slices.into_values() {
            let _ = self.events.send(json!({"type": "DELETED", "object": slice}));
        }
    }

    fn is_down(&self) -> bool {
        self.kept.lock().unwrap().is_down
    }

    /// Keeps a slice under its name, if it is written by the version that it has.
    fn write(&self, body: &Bytes, of: Option<&str>) -> Response {
        let Ok(mut slice) = serde_json::from_slice::<Value>(body) else {
            return refused(StatusCode::BAD_REQUEST, "no JSON");
        };
        let mut kept = self.kept.lock().unwrap();
        let name = slice["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let known =
            kept.slices.get(&name).map(|known| known["metadata"]["resourceVersion"].clone());
        let is_conflict = match of {
            Some(_) => known.as_ref() != Some(&slice["metadata"]["resourceVersion"]),
            None => known.is_some(),
        };
        if kept.conflicts > 0 {
            kept.conflicts -= 1;
            return refused(StatusCode::CONFLICT, "the object has been modified");
        }
        if is_conflict {
            return refused(StatusCode::CONFLICT, "the object has been modified");
        }
        kept.version += 1;
        kept.writes += 1;
        slice["metadata"]["resourceVersion"] = json!(kept.version.to_string());
        let dropped = kept.dropped.clone();
        for device in slice["spec"]["devices"].as_array_mut().into_iter().flatten() {
            for field in &dropped {
                device.as_object_mut().unwrap().remove(*field);
                for (_, capacity) in device["capacity"].as_object_mut().into_iter().flatten() {
                    capacity.as_object_mut().unwrap().remove(*field);
                }
            }
        }
        kept.slices.insert(name, slice.clone());
        let kind = if of.is_some() { "MODIFIED" } else { "ADDED" };
        let _ = self.events.send(json!({"type": kind, "object": slice}));
        Json(slice).into_response()
    }
}

fn refused(code: StatusCode, message: &str) -> Response {
    let reason = match code {
        StatusCode::NOT_FOUND => "NotFound",
        StatusCode::CONFLICT => "Conflict",
        _ => "",
    };
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "reason": reason, "code": code.as_u16(),
    });
    (code, Json(status)).into_response()
}

async fn node(State(server): State<ApiServer>, Of(name): Of<String>) -> Response {
    if server.is_down() {
        return refused(StatusCode::SERVICE_UNAVAILABLE, "down");
    }
    Json(json!({"kind": "Node", "apiVersion": "v1", "metadata": {"name": name, "uid": "node-uid"}}))
        .into_response()
}

async fn claim(
    State(server): State<ApiServer>,
    Of((namespace, name)): Of<(String, String)>,
) -> Response {
    if server.is_down() {
        return refused(StatusCode::SERVICE_UNAVAILABLE, "down");
    }
    let mut kept = server.kept.lock().unwrap();
    *kept.asked.entry(name.clone()).or_default() += 1;
    match kept.claims.get(&(namespace, name)) {
        Some(claim) => Json(claim.clone()).into_response(),
        None => refused(StatusCode::NOT_FOUND, "not found"),
    }
}

/// The list, or what changes from now on.
async fn list(State(server): State<ApiServer>, uri: Uri) -> Response {
    if server.is_down() {
        return refused(StatusCode::SERVICE_UNAVAILABLE, "down");
    }
    let query = uri.query().unwrap_or_default();
    assert!(query.contains("spec.nodeName"), "a driver asks for its own slices: {query}");
    if query.contains("watch=true") {
        let events = BroadcastStream::new(server.events.subscribe());
        let lines =
            events.filter_map(|event| Some(Ok::<_, Infallible>(format!("{}\n", event.ok()?))));
        return Response::new(Body::from_stream(lines));
    }
    let kept = server.kept.lock().unwrap();
    let items: Vec<&Value> = kept.slices.values().collect();
    Json(json!({
        "kind": "ResourceSliceList", "apiVersion": "resource.k8s.io/v1",
        "metadata": {"resourceVersion": kept.version.to_string()}, "items": items,
    }))
    .into_response()
}

async fn create(State(server): State<ApiServer>, body: Bytes) -> Response {
    server.write(&body, None)
}

async fn replace(State(server): State<ApiServer>, Of(name): Of<String>, body: Bytes) -> Response {
    server.write(&body, Some(&name))
}

async fn remove(State(server): State<ApiServer>, Of(name): Of<String>) -> Response {
    match server.kept.lock().unwrap().slices.remove(&name) {
        Some(slice) => Json(slice).into_response(),
        None => refused(StatusCode::NOT_FOUND, "not found"),
    }
}
