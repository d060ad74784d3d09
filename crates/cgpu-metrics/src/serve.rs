//! Prints the metrics once, or serves them to whoever asks.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::serve::Listener;
use cgpu::events::{Follower, Store};
use cgpu::host::Host;
use cgpu::view::{Driver, Processes};
use cgpu_kubelet::Kubelet;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, UnixListener};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::args::{Address, Args};
use crate::creates::Creates;
use crate::exposition::{Found, text};
use crate::pods::{PodGpu, pod_gpus};

/// How long what was found is told again: who asks often keeps no monitor busy.
const FRESH: Duration = Duration::from_millis(100);

/// What OpenMetrics' text is called (the specification, section "Protocol Negotiation").
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// How many are answered at once; others wait until one has its answer.
const MOST_CONNECTIONS: usize = 16;

/// How long one may take to ask and to be answered: more than the driver may take to say how it is.
const PATIENCE: Duration = Duration::from_secs(10);

/// The most bytes of a question that are kept.
const MOST_ASKED: usize = 16 << 10;

/// Who looks, and what was found last.
struct Eyes {
    host: Host,
    driver: Option<Driver>,
    events: Follower,
    creates: Creates,
    pod_resources: PathBuf,
    told: Option<(Instant, Arc<str>)>,
}

impl Eyes {
    /// What there is to tell. Waits: call it beside the runtime's own thread.
    fn look(&mut self) -> Result<Arc<str>> {
        if let Some((found, text)) = &self.told
            && found.elapsed() < FRESH
        {
            return Ok(Arc::clone(text));
        }
        let mut snapshot =
            self.host.chosen_anew().look(Processes::Numbered, self.driver.as_mut())?;
        match self.events.read() {
            Ok(events) => self.creates.count(&events),
            Err(error) => snapshot.gaps.push(format!("cannot read the events: {error}")),
        }
        let given = self.given_to_pods().unwrap_or_else(|error| {
            snapshot.gaps.push(format!("{error:#}"));
            Vec::new()
        });
        let text: Arc<str> = text(Found { snapshot, creates: self.creates.clone(), given })?.into();
        self.told = Some((Instant::now(), Arc::clone(&text)));
        Ok(text)
    }

    /// What the kubelet gave to pods; nothing where there is no kubelet.
    fn given_to_pods(&self) -> Result<Vec<PodGpu>> {
        if !self.pod_resources.exists() {
            return Ok(Vec::new());
        }
        let kubelet = Kubelet::new(self.pod_resources.clone());
        Ok(pod_gpus(&Handle::current().block_on(kubelet.held())?))
    }
}

/// Does what the command line asks for.
///
/// # Errors
///
/// Where the host can't be looked at, or the address is of no use.
pub fn run(args: &Args) -> Result<()> {
    let host = Host::load(args.config.as_deref().map(AsRef::as_ref))?;
    let driver = (!args.no_nvml).then(|| Driver::new(host.config.driver.root.clone()));
    let events = Follower::new(Store::of(&host.config.state_dir))
        .context("cannot read the events; run this as root")?;
    let pod_resources = args.pod_resources.clone();
    let creates = Creates::default();
    let eyes = Eyes { host, driver, events, creates, pod_resources, told: None };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let eyes = Arc::new(Mutex::new(eyes));
    // What is wrong from the beginning is said before anybody asks.
    let first = runtime.block_on(look(Arc::clone(&eyes)))?;
    if args.once {
        return Ok(io::stdout().write_all(first.as_bytes())?);
    }
    runtime.block_on(serve(eyes, &args.listen))
}

async fn look(eyes: Arc<Mutex<Eyes>>) -> Result<Arc<str>> {
    spawn_blocking(move || eyes.lock().unwrap_or_else(PoisonError::into_inner).look()).await?
}

async fn serve(eyes: Arc<Mutex<Eyes>>, address: &Address) -> Result<()> {
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/", get(|| async { "cgpu-metrics: see /metrics\n" }))
        .with_state(eyes);
    match address {
        Address::Net(address) => {
            let listener = TcpListener::bind(address).await.with_context(|| {
                format!("cannot listen at {address}; choose another by --listen")
            })?;
            listens(&format!("http://{}/metrics", listener.local_addr()?));
            answer_all(listener, router).await
        }
        Address::Unix(path) => {
            make_room(path)?;
            let listener = UnixListener::bind(path).with_context(|| {
                format!("cannot listen at {}; choose another path by --listen", path.display())
            })?;
            listens(&path.display().to_string());
            answer_all(listener, router).await
        }
    }
}

/// Answers all who connect, one question each: who is silent or slow keeps nobody for long.
async fn answer_all<L: Listener>(mut listener: L, router: Router) -> Result<()> {
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        let place = Arc::clone(&places).acquire_owned().await?;
        let (stream, _) = listener.accept().await;
        let service = TowerToHyperService::new(router.clone());
        tokio::spawn(async move {
            let mut protocol = http1::Builder::new();
            protocol.keep_alive(false).max_buf_size(MOST_ASKED);
            let answered = protocol.serve_connection(TokioIo::new(stream), service);
            // What a client breaks is its own affair.
            let _ = timeout(PATIENCE, answered).await;
            drop(place);
        });
    }
}

/// Says where, for whoever lets the host choose a port.
fn listens(place: &str) {
    // Nobody may be there to read it.
    let _ = writeln!(io::stdout(), "listening at {place}");
}

/// Removes the socket of one that has ended.
fn make_room(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Err(_) => Ok(()),
        Ok(meta) if !meta.file_type().is_socket() => {
            bail!(
                "{} is there, and is no socket; remove it, or choose another path",
                path.display()
            )
        }
        Ok(_) if UnixStream::connect(path).is_ok() => {
            bail!("{} is served already; stop that first", path.display())
        }
        Ok(_) => fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display())),
    }
}

async fn metrics(State(eyes): State<Arc<Mutex<Eyes>>>) -> Response {
    match look(eyes).await {
        Ok(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text.to_string()).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error:#}\n")).into_response(),
    }
}
