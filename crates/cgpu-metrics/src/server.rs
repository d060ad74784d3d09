//! Prints the metrics once, or serves them to any client.

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
use cgpu::host::Host;
use cgpu_cli::view::{Driver, Processes, collect};
use cgpu_host::events::Store;
use cgpu_http::{Bounds, answer};
use cgpu_kubelet::Kubelet;
use tokio::net::{TcpListener, UnixListener};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::spawn_blocking;

use crate::args::{Address, Args};
use crate::creation_counter::Counter;
use crate::exposition::{HostSample, text};
use crate::pods::{PodGpu, pod_gpus};

/// How long the last result is reported again: a client that asks often keeps no monitor busy.
const FRESH: Duration = Duration::from_millis(100);

/// What OpenMetrics' text is called (the specification, section "Protocol Negotiation").
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Bounds on what one client may take: an answer more than the driver may take to report its state.
pub(crate) const BOUNDS: Bounds = Bounds {
    connections: 16,
    header: Duration::from_secs(2),
    answer: Duration::from_secs(10),
    header_bytes: 16 << 10,
    keeps_alive: false,
};

/// How many wait for metrics at once; the other connections are for probes, which ask for nothing that takes time.
const MOST_SCRAPES: usize = 8;

/// What polls the host, and the last result.
struct Eyes {
    host: Host,
    driver: Option<Driver>,
    creates: Counter,
    node: Option<String>,
    pod_resources: PathBuf,
    reported: Option<(Instant, Arc<str>)>,
}

impl Eyes {
    /// What there is to report. Waits: call it on another thread than the runtime's own.
    fn poll(&mut self) -> Result<Arc<str>> {
        if let Some((found, text)) = &self.reported
            && found.elapsed() < FRESH
        {
            return Ok(Arc::clone(text));
        }
        let mut snapshot =
            collect(&self.host.chosen_again(), Processes::Numbered, self.driver.as_mut())?;
        let (creates, unread) = self.creates.count();
        snapshot.gaps.extend(unread.map(|error| format!("cannot read the events: {error}")));
        let given = self.given_to_pods().unwrap_or_else(|error| {
            snapshot.gaps.push(format!("{error:#}"));
            Vec::new()
        });
        let node = self.node.clone();
        let text: Arc<str> = text(HostSample { snapshot, node, creates, given })?.into();
        self.reported = Some((Instant::now(), Arc::clone(&text)));
        Ok(text)
    }

    /// What the kubelet gave to pods; nothing if there is no kubelet.
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
/// If the host can't be polled, or the address is of no use.
pub fn run(args: &Args) -> Result<()> {
    let host = Host::load(args.config.as_deref().map(AsRef::as_ref))?;
    let driver = (!args.no_nvml).then(|| Driver::new(host.config.driver.root.clone()));
    let creates = Counter::new(Store::of(&host.config.state_dir))
        .context("cannot read the events; run this as root")?;
    let node = args.node(std::env::var("NODE_NAME").ok());
    let pod_resources = args.pod_resources.clone();
    let eyes = Mutex::new(Eyes { host, driver, creates, node, pod_resources, reported: None });
    // If a poll panicked, its parts are intact all the same: each replaces what it has by what it found at once.
    let poll = move || eyes.lock().unwrap_or_else(PoisonError::into_inner).poll();
    let asked = Asked::new(poll);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // What is wrong from the beginning is reported before the first request.
    let first = runtime.block_on(asked.poll(None))?;
    if args.once {
        return Ok(io::stdout().write_all(first.as_bytes())?);
    }
    runtime.block_on(serve(asked, &args.listen))
}

/// What is asked for metrics.
#[derive(Clone)]
pub(crate) struct Asked {
    poll: Arc<dyn Fn() -> Result<Arc<str>> + Send + Sync>,
    scrapes: Arc<Semaphore>,
}

impl Asked {
    pub(crate) fn new(poll: impl Fn() -> Result<Arc<str>> + Send + Sync + 'static) -> Self {
        Asked { poll: Arc::new(poll), scrapes: Arc::new(Semaphore::new(MOST_SCRAPES)) }
    }

    /// What is found, by a thread that may wait. It has its `place` until it is done, however it ends: the client
    /// may have gone long before, and would ask for one thread after the other.
    async fn poll(&self, place: Option<OwnedSemaphorePermit>) -> Result<Arc<str>> {
        let poll = Arc::clone(&self.poll);
        let found = spawn_blocking(move || {
            let _place = place;
            poll()
        });
        found.await.context("what reads this host panicked; the next scrape begins anew")?
    }
}

pub(crate) fn router(asked: Asked) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/", get(|| async { "cgpu-metrics: see /metrics\n" }))
        .with_state(asked)
}

async fn serve(asked: Asked, address: &Address) -> Result<()> {
    let router = router(asked);
    match address {
        Address::Net(address) => {
            let listener = TcpListener::bind(address).await.with_context(|| {
                format!("cannot listen at {address}; choose another by --listen")
            })?;
            listens(&format!("http://{}/metrics", listener.local_addr()?));
            Ok(answer(listener, router, BOUNDS).await?)
        }
        Address::Unix(path) => {
            remove_stale_socket(path)?;
            let listener = UnixListener::bind(path).with_context(|| {
                format!("cannot listen at {}; choose another path by --listen", path.display())
            })?;
            listens(&path.display().to_string());
            Ok(answer(listener, router, BOUNDS).await?)
        }
    }
}

/// Reports the address, for a caller that lets the host choose a port.
fn listens(place: &str) {
    // There may be no reader.
    let _ = writeln!(io::stdout(), "listening at {place}");
}

/// Removes the socket of a server that has exited.
fn remove_stale_socket(path: &Path) -> Result<()> {
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

async fn metrics(State(asked): State<Asked>) -> Response {
    let Ok(place) = Arc::clone(&asked.scrapes).try_acquire_owned() else {
        let words = "too many ask at once; ask again soon\n";
        return (StatusCode::SERVICE_UNAVAILABLE, words).into_response();
    };
    match asked.poll(Some(place)).await {
        Ok(text) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text.to_string()).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error:#}\n")).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};

    use axum::body::to_bytes;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;

    fn now<T>(test: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        // What waits for ever fails.
        let test = async { tokio::time::timeout(Duration::from_secs(60), test).await.unwrap() };
        runtime.block_on(test)
    }

    async fn scraped(asked: &Asked) -> (u16, String) {
        let response = metrics(State(asked.clone())).await;
        let status = response.status().as_u16();
        let body = to_bytes(response.into_body(), 1 << 20).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    async fn over_tcp(asked: Asked, path: &str) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        tokio::spawn(answer(listener, router(asked), BOUNDS));
        let question = format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n");
        stream.write_all(question.as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    }

    /// A reader that reports each beginning and then waits for a word.
    fn waiting() -> (Asked, Receiver<()>, Sender<()>) {
        let ((began, begun), (word, words)) = (channel(), channel());
        let words = Mutex::new(words);
        let asked = Asked::new(move || {
            began.send(()).unwrap();
            let _ = words.lock().unwrap().recv();
            Ok("all\n".into())
        });
        (asked, begun, word)
    }

    /// A reader that panics retains no place among the scrapes, and blocks no later scrape.
    #[test]
    fn panicking_reader_blocks_no_later_scrape() {
        let is_broken = Arc::new(AtomicBool::new(true));
        let (breaks, state) = (Arc::clone(&is_broken), Mutex::new(()));
        let asked = Asked::new(move || {
            // As `run` does, so that it is poisoned.
            let _eyes = state.lock().unwrap_or_else(PoisonError::into_inner);
            assert!(!breaks.load(Ordering::Relaxed), "a figure that cannot be");
            Ok("all\n".into())
        });
        now(async {
            for _ in 0..=2 * MOST_SCRAPES {
                let words = "what reads this host panicked; the next scrape begins anew";
                let (status, text) = scraped(&asked).await;
                assert!(status == 500 && text.starts_with(words), "{status} {text}");
            }
            assert_eq!(asked.scrapes.available_permits(), MOST_SCRAPES);
            is_broken.store(false, Ordering::Relaxed);
            assert_eq!(scraped(&asked).await, (200, "all\n".to_owned()));
        });
    }

    /// A scrape that was given up retains its place until its reader has finished.
    #[test]
    fn cancelled_scrape_holds_its_place_until_reading_ends() {
        now(async {
            let (asked, begun, word) = waiting();
            for _ in 0..MOST_SCRAPES {
                let scrape = tokio::spawn(metrics(State(asked.clone())));
                tokio::task::yield_now().await;
                begun.recv().unwrap();
                // It is answered no more, as after the time that an answer may take.
                scrape.abort();
                assert!(scrape.await.unwrap_err().is_cancelled());
            }
            assert_eq!(scraped(&asked).await.0, 503, "no thread more than those that wait");
            // A probe asks for no place.
            let probed = over_tcp(asked.clone(), "/").await;
            assert!(probed.contains(" 200 ") && probed.ends_with("see /metrics\n"), "{probed}");
            drop(word);
            let all = u32::try_from(MOST_SCRAPES).unwrap();
            drop(asked.scrapes.acquire_many(all).await.unwrap());
            assert_eq!(scraped(&asked).await, (200, "all\n".to_owned()));
        });
    }

    #[test]
    fn the_bounds_are_those_that_are_documented() {
        assert_eq!(
            (BOUNDS.connections, BOUNDS.header.as_secs(), BOUNDS.answer.as_secs()),
            (16, 2, 10)
        );
        let words =
            "16 clients are connected at once, each has 2 s to ask, and is answered within ten";
        assert!(include_str!("../../../docs/operations.md").contains(words));
    }
}
