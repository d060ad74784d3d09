//! What is answered by HTTP: [`router`].

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use axum::body::to_bytes;
use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, Path, Request, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use cgpu_http::Client;
use tracing::{info, warn};

use super::bind::{Binder, NotServing};
use super::certificates::Certificates;
use super::protocol::{
    BindArgs, BindResult, FilterArgs, FilterResult, Inspection, PreemptArgs, filter, inspection,
    preempt,
};
use crate::server::extender;

/// The most bytes of a question: a pod has two MiB at most, and the names of 5,000 nodes have less than one.
const MOST_ASKED_BYTES: usize = 8 << 20;

/// How long another replica may take to answer: it asks the API server four times at most.
const LEADER_TIMEOUT: Duration = Duration::from_secs(20);

/// What a client without a certificate is answered.
const UNCERTIFIED: &str = "cgpu-scheduler-extender answers this to clients with a certificate that its --client-ca has signed; \
                           give the scheduler one, by tlsConfig.certFile and tlsConfig.keyFile of its extender\n";

/// What is answered where; with `certificates` the scheduler's questions to clients alone that have one, and to all
/// whether this replica is well.
pub(crate) fn router(binder: Arc<Binder>, certificates: Option<Arc<Certificates>>) -> Router {
    let is_by_tls = certificates.is_some();
    let hands_on = (Arc::clone(&binder), certificates);
    let mut answered_by_leader = Router::new()
        .route("/gpushare-scheduler/filter", post(answer_filter))
        .route("/gpushare-scheduler/bind", post(answer_bind))
        .route("/gpushare-scheduler/preempt", post(answer_preempt))
        .route("/gpushare-scheduler/inspect", get(answer_inspect))
        .route("/gpushare-scheduler/inspect/{node}", get(answer_inspect_node))
        .route_layer(from_fn_with_state(hands_on, hand_to_leader));
    if is_by_tls {
        answered_by_leader = answered_by_leader.route_layer(from_fn(require_certificate));
    }
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

async fn answer_preempt(
    State(binder): State<Arc<Binder>>,
    args: Result<Json<PreemptArgs>, JsonRejection>,
) -> Response {
    // The scheduler has no word for an error but the status.
    let args = match args {
        Ok(Json(args)) => args,
        Err(error) => {
            let error = format!("this is no question of a scheduler's: {}", error.body_text());
            return (StatusCode::BAD_REQUEST, error).into_response();
        }
    };
    match binder.with_fleet(|fleet| preempt(fleet, args)) {
        Ok(result) => Json(result).into_response(),
        Err(error) => (StatusCode::SERVICE_UNAVAILABLE, error.to_string()).into_response(),
    }
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

async fn require_certificate(request: Request, next: Next) -> Response {
    match request.extensions().get() {
        Some(Client::Certified) => next.run(request).await,
        _ => (StatusCode::FORBIDDEN, UNCERTIFIED).into_response(),
    }
}

/// Marks a question that another replica has handed on: it goes no further.
const HANDED_ON: &str = "cgpu-handed-on";

/// Has the replica answer that serves, if it is another one.
async fn hand_to_leader(
    State((binder, certificates)): State<(Arc<Binder>, Option<Arc<Certificates>>)>,
    request: Request,
    next: Next,
) -> Response {
    if binder.is_serving() || request.headers().contains_key(HANDED_ON) {
        return next.run(request).await;
    }
    let leader = match binder.leader().await {
        Ok(Some(leader)) => leader,
        // The answer says that no replica serves.
        Ok(None) => return next.run(request).await,
        Err(error) => return unavailable(&error),
    };
    match ask(leader, certificates.as_deref(), request).await {
        Ok(answer) => ([(CONTENT_TYPE, "application/json")], answer).into_response(),
        Err(error) => unavailable(&error),
    }
}

fn unavailable(error: &anyhow::Error) -> Response {
    let error = format!("{error:#}");
    warn!(error, "a question can't be handed on");
    (StatusCode::SERVICE_UNAVAILABLE, error).into_response()
}

/// Asks the replica that listens there the same, in the way in which this one is asked.
async fn ask(
    leader: SocketAddr,
    certificates: Option<&Certificates>,
    request: Request,
) -> Result<String> {
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, MOST_ASKED_BYTES).await.context("the question is too long")?;
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    let credentials = certificates.map(|certificates| certificates.current(Instant::now()));
    let scheme = if credentials.is_some() { "https" } else { "http" };
    let pem = credentials.as_ref().map(|credentials| &credentials.pem);
    let mut config = extender(format!("{scheme}://{leader}").parse()?, pem)?;
    config.connect_timeout = Some(LEADER_TIMEOUT);
    config.read_timeout = Some(LEADER_TIMEOUT);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certificate::Pem;
    use crate::extender::certificates::tests::{AS_BOTH, AS_CLIENT, Ca, Secret};
    use crate::extender::fleet::{Fleet, FleetRules};
    use crate::extender::leadership::Leadership;
    use crate::placement::Placement;
    use crate::pod_request::AskRules;
    use crate::server::EXTENDER;
    use cgpu_http::tls::answer_tls;
    use cgpu_http::{Bounds, answer};
    use k8s_openapi::jiff::Timestamp;
    use kube::client::Body;
    use serde_json::json;
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicU64, Ordering};
    use tokio::net::TcpListener;
    use tower::{ServiceExt, service_fn};

    const LONG: Duration = Duration::from_secs(100_000);

    const BOUNDS: Bounds =
        Bounds { header: LONG, answer: LONG, ..crate::extender::lifecycle::BOUNDS };

    const INSPECT: &str = "/gpushare-scheduler/inspect";

    /// An API server that has nothing but the lease of `holder`.
    fn api_server(holder: Option<SocketAddr>) -> kube::Client {
        let service = service_fn(move |_: axum::http::Request<Body>| async move {
            let lease = json!({
                "metadata": {"name": "cgpu-scheduler-extender"},
                "spec": {
                    "holderIdentity": holder.map(|holder| holder.to_string()),
                    "leaseDurationSeconds": 1_000_000,
                    "renewTime": Timestamp::now().to_string(),
                },
            });
            Ok::<_, Infallible>(axum::http::Response::new(Body::from(
                lease.to_string().into_bytes(),
            )))
        });
        kube::Client::new(service, "default")
    }

    /// The replica that serves.
    fn leader() -> Arc<Binder> {
        let binder = Binder::new(api_server(None), Leadership::Alone);
        let rules =
            FleetRules { asks: AskRules::default(), placement: Placement::Binpack, most_pods: 20 };
        binder.set_fleet(Some(Fleet::new(rules)));
        Arc::new(binder)
    }

    /// A replica that doesn't, if the one at `holder` has the lease.
    fn follower(holder: SocketAddr) -> Arc<Binder> {
        let client = api_server(Some(holder));
        let leadership = Leadership::by_lease(client.clone(), "kube-system", "self".to_owned());
        Arc::new(Binder::new(client, leadership))
    }

    /// A clock that goes on as a test says, in seconds.
    #[derive(Clone, Default)]
    struct Clock(Arc<AtomicU64>);

    impl Clock {
        fn now(&self) -> Instant {
            Instant::now() + Duration::from_secs(self.0.load(Ordering::Acquire))
        }

        fn goes_on(&self) {
            self.0.fetch_add(1000, Ordering::AcqRel);
        }
    }

    async fn served(binder: Arc<Binder>, secret: &Secret, clock: Clock) -> SocketAddr {
        let certificates = Arc::new(secret.load().unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = router(binder, Some(Arc::clone(&certificates)));
        let settings = move || Arc::clone(&certificates.current(clock.now()).server);
        tokio::spawn(answer_tls(listener, router, BOUNDS, settings));
        address
    }

    /// What a client with that certificate is answered.
    async fn asked(address: SocketAddr, pem: &Pem, path: &str) -> Result<String, kube::Error> {
        let config = extender(format!("https://{address}").parse().unwrap(), Some(pem)).unwrap();
        request(config, path).await
    }

    /// What a client without one is answered that knows the CA.
    async fn asked_by_any(
        address: SocketAddr,
        pem: &Pem,
        path: &str,
    ) -> Result<String, kube::Error> {
        let address = format!("https://{address}").parse().unwrap();
        let mut config = extender(address, Some(pem)).unwrap();
        config.auth_info = kube::config::AuthInfo::default();
        request(config, path).await
    }

    async fn request(config: kube::Config, path: &str) -> Result<String, kube::Error> {
        let question = axum::http::Request::get(path).body(Vec::new()).unwrap();
        kube::Client::try_from(config).unwrap().request_text(question).await
    }

    #[track_caller]
    fn assert_no_answer(result: Result<String, kube::Error>) {
        let error = result.unwrap_err();
        assert!(!matches!(error, kube::Error::Api(_)), "an answer: {error}");
    }

    #[tokio::test]
    async fn only_a_client_with_a_certificate_is_answered() {
        let ca = Ca::new();
        let secret = Secret::new(&ca.replica());
        let address = served(leader(), &secret, Clock::default()).await;
        let scheduler = ca.signed("scheduler", AS_CLIENT);
        assert!(asked(address, &scheduler, INSPECT).await.unwrap().contains("nodes"));

        let questions = [INSPECT, "/gpushare-scheduler/inspect/n"];
        for path in questions {
            match asked_by_any(address, &scheduler, path).await.unwrap_err() {
                kube::Error::Api(status) => {
                    assert_eq!(status.code, 403);
                    assert!(status.message.contains("a certificate that its --client-ca"));
                    assert!(status.message.contains("tlsConfig.certFile"), "{}", status.message);
                }
                error => panic!("{path}: {error}"),
            }
        }
        for path in ["/healthz", "/readyz", "/version"] {
            asked_by_any(address, &scheduler, path).await.unwrap();
        }

        let other = Pem { ca: scheduler.ca.clone(), ..Ca::new().signed("scheduler", AS_CLIENT) };
        for path in [INSPECT, "/healthz"] {
            assert_no_answer(asked(address, &other, path).await);
        }
    }

    /// An extender's answer to a scheduler's question.
    async fn reported(binder: Arc<Binder>, path: &str, question: Vec<u8>) -> String {
        let question = axum::http::Request::post(path)
            .header(CONTENT_TYPE, "application/json")
            .body(axum::body::Body::from(question));
        let answer = router(binder, None).oneshot(question.unwrap()).await.unwrap();
        String::from_utf8(to_bytes(answer.into_body(), 1 << 20).await.unwrap().into()).unwrap()
    }

    /// A scheduler's request that is too long is refused in words.
    #[tokio::test]
    async fn oversized_request_is_refused_with_its_reason() {
        let question = |bytes: usize| {
            let mut question = br#"{"NodeNames": [], "Pod": {"metadata": {}}}"#.to_vec();
            question.resize(bytes, b' ');
            question
        };
        let filter = "/gpushare-scheduler/filter";
        let long = reported(leader(), filter, question(MOST_ASKED_BYTES)).await;
        assert!(!long.contains("no question of a scheduler's"), "{long}");
        let longer = reported(leader(), filter, question(MOST_ASKED_BYTES + 1)).await;
        assert!(longer.contains("no question of a scheduler's"), "{longer}");
        assert!(longer.contains("length limit exceeded"), "{longer}");
    }

    #[tokio::test]
    async fn pod_that_asks_for_nothing_is_not_bound() {
        let service = service_fn(|request: axum::http::Request<Body>| async move {
            assert_eq!(request.method(), "GET", "{} is written", request.uri());
            let pod = json!({"metadata": {"name": "p", "uid": "u"}, "spec": {"containers": []}});
            let pod = Body::from(pod.to_string().into_bytes());
            Ok::<_, Infallible>(axum::http::Response::new(pod))
        });
        let client = kube::Client::new(service, "default");
        let binder = Binder::new(client, Leadership::Alone);
        let rules =
            FleetRules { asks: AskRules::default(), placement: Placement::Binpack, most_pods: 20 };
        binder.set_fleet(Some(Fleet::new(rules)));
        let question =
            json!({"PodName": "p", "PodNamespace": "default", "PodUID": "u", "Node": "n"});
        let question = question.to_string().into_bytes();
        let answer = reported(Arc::new(binder), "/gpushare-scheduler/bind", question).await;
        assert!(answer.contains("asks for nothing of cgpu's"), "{answer}");
    }

    #[tokio::test]
    async fn without_tls_all_are_answered() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(answer(listener, router(leader(), None), BOUNDS));
        let config = extender(format!("http://{address}").parse().unwrap(), None).unwrap();
        assert!(request(config, INSPECT).await.unwrap().contains("nodes"));
    }

    #[tokio::test]
    async fn a_replica_asks_the_leader_with_its_certificate() {
        let ca = Ca::new();
        let (first, second) = (Secret::new(&ca.replica()), Secret::new(&ca.replica()));
        let leader = served(leader(), &first, Clock::default()).await;
        let address = served(follower(leader), &second, Clock::default()).await;
        let scheduler = ca.signed("scheduler", AS_CLIENT);
        assert!(asked(address, &scheduler, INSPECT).await.unwrap().contains("nodes"));
        // It lends its certificate to no client without one.
        let error = asked_by_any(address, &scheduler, INSPECT).await.unwrap_err();
        assert!(matches!(&error, kube::Error::Api(status) if status.code == 403), "{error}");
    }

    #[tokio::test]
    async fn a_replica_asks_no_leader_of_another_name() {
        let ca = Ca::new();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let imposter = listener.local_addr().unwrap();
        let pem = ca.signed("imposter", AS_BOTH);
        let settings = Arc::new(
            cgpu_http::tls::rustls::ServerConfig::builder()
                .with_no_client_auth()
                .with_single_cert(
                    Secret::new(&pem).files().chain(&pem).unwrap(),
                    Secret::new(&pem).files().private_key(&pem).unwrap(),
                )
                .unwrap(),
        );
        let router = router(self::leader(), None);
        tokio::spawn(answer_tls(listener, router, BOUNDS, move || Arc::clone(&settings)));
        let secret = Secret::new(&ca.replica());
        let address = served(follower(imposter), &secret, Clock::default()).await;
        let scheduler = ca.signed("scheduler", AS_CLIENT);
        let error = asked(address, &scheduler, INSPECT).await.unwrap_err().to_string();
        assert!(error.contains("has the lease, and does not answer"), "{error}");
        assert!(error.contains(EXTENDER), "{error}");
    }

    #[tokio::test]
    async fn renewed_ca_decides_which_clients_are_answered() {
        let (old, new) = (Ca::new(), Ca::new());
        let secret = Secret::new(&old.replica());
        let clock = Clock::default();
        let address = served(leader(), &secret, clock.clone()).await;
        let [before, after] = [&old, &new].map(|ca| ca.signed("scheduler", AS_CLIENT));
        asked(address, &before, INSPECT).await.unwrap();
        secret.write(&new.replica());
        clock.goes_on();
        asked(address, &after, INSPECT).await.unwrap();
        assert_no_answer(asked(address, &before, INSPECT).await);
        // What can't be used changes nothing.
        secret.write(&old.signed("another", AS_CLIENT));
        clock.goes_on();
        asked(address, &after, INSPECT).await.unwrap();
    }
}
