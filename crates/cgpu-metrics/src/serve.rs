//! Prints the metrics once, or serves them to whoever asks.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use cgpu::admission::Host;
use cgpu::view::{Driver, Processes};
use tokio::net::{TcpListener, UnixListener};
use tokio::task::spawn_blocking;

use crate::args::{Address, Args};
use crate::exposition::text;

/// How long what was found is told again: who asks often keeps no monitor busy.
const FRESH: Duration = Duration::from_millis(100);

/// What OpenMetrics' text is called (the specification, section "Protocol Negotiation").
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Who looks, and what was found last.
struct Eyes {
    host: Host,
    driver: Option<Driver>,
    told: Option<(Instant, Arc<str>)>,
}

impl Eyes {
    fn look(&mut self) -> Result<Arc<str>> {
        if let Some((found, text)) = &self.told
            && found.elapsed() < FRESH
        {
            return Ok(Arc::clone(text));
        }
        let snapshot = self.host.look(Processes::Numbered, self.driver.as_mut())?;
        let text: Arc<str> = text(snapshot)?.into();
        self.told = Some((Instant::now(), Arc::clone(&text)));
        Ok(text)
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
    let mut eyes = Eyes { host, driver, told: None };
    // What is wrong from the beginning is said before anybody asks.
    let first = eyes.look()?;
    if args.once {
        return Ok(io::stdout().write_all(first.as_bytes())?);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serve(eyes, &args.listen))
}

async fn serve(eyes: Eyes, address: &Address) -> Result<()> {
    let router = Router::new()
        .route("/metrics", get(metrics))
        .route("/", get(|| async { "cgpu-metrics: see /metrics\n" }))
        .with_state(Arc::new(Mutex::new(eyes)));
    match address {
        Address::Net(address) => {
            let listener = TcpListener::bind(address).await.with_context(|| {
                format!("cannot listen at {address}; choose another by --listen")
            })?;
            listens(&format!("http://{}/metrics", listener.local_addr()?));
            Ok(axum::serve(listener, router).await?)
        }
        Address::Unix(path) => {
            make_room(path)?;
            let listener = UnixListener::bind(path).with_context(|| {
                format!("cannot listen at {}; choose another path by --listen", path.display())
            })?;
            listens(&path.display().to_string());
            Ok(axum::serve(listener, router).await?)
        }
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
    let looked = spawn_blocking(move || eyes.lock().unwrap_or_else(PoisonError::into_inner).look());
    match looked.await {
        Ok(Ok(text)) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], text.to_string()).into_response(),
        Ok(Err(error)) => {
            (StatusCode::INTERNAL_SERVER_ERROR, format!("{error:#}\n")).into_response()
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}
