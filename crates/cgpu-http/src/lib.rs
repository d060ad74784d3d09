//! `cgpu-http`: answers HTTP within bounds, to any client: [`answer`]; with the feature `tls` by TLS, too.
//!
//! So many connections are open at once, each header and each answer takes so long at most. If all places are taken,
//! the next connection takes the place of the one that has been silent longest: no client starves others by being
//! silent. Must not know what is asked.

#[cfg(feature = "tls")]
pub mod tls;

use std::future::ready;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Bounds on what one client may take.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// How many connections are open at once.
    pub connections: usize,
    /// How long a header may take to come, and before it a handshake.
    pub header: Duration,
    /// How long an answer may take to be found, and with it all that is asked.
    pub answer: Duration,
    /// The most bytes of a header, 8192 at least.
    pub header_bytes: usize,
    /// Whether a connection is retained for the next question.
    pub keeps_alive: bool,
}

/// What is known of the client at the other end of a connection; an extension of each of its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Client {
    /// Nothing: it connected without TLS.
    Plain,
    /// Nothing: it connected by TLS, without a certificate.
    Anonymous,
    /// It has a certificate that the server's CA signed.
    Certified,
}

/// A connection that is open.
struct Open {
    task: JoinHandle<()>,
    is_asked: Arc<AtomicBool>,
}

/// All of them, the oldest first.
#[derive(Default)]
struct Places {
    open: Mutex<Vec<Open>>,
    ended: Notify,
}

impl Places {
    fn lock(&self) -> MutexGuard<'_, Vec<Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until one of `most` places is free, or takes it from the connection that has been silent longest.
    async fn evict_slowest(&self, most: usize) {
        loop {
            let ended = self.ended.notified();
            {
                let mut open = self.lock();
                open.retain(|one| !one.task.is_finished());
                if open.len() < most {
                    return;
                }
                let silent = open.iter().position(|one| !one.is_asked.load(Ordering::Acquire));
                if let Some(at) = silent {
                    open.remove(at).task.abort();
                    return;
                }
            }
            ended.await;
        }
    }
}

/// Says that a connection has ended, however it did, when it is dropped.
struct Ends(Arc<Places>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.ended.notify_one();
    }
}

/// Marks a connection as one that asks something, until it is dropped.
struct Asks<'a>(&'a AtomicBool);

impl Drop for Asks<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Answers all clients that connect by `router`, until it is dropped.
///
/// # Errors
///
/// Never: a client that can't be answered is left alone.
pub async fn answer<L: Listener>(listener: L, router: Router, bounds: Bounds) -> io::Result<()> {
    serve(listener, router, bounds, |stream| ready(Ok((stream, Client::Plain)))).await
}

/// Answers all clients that connect, once `handshake` has found out which client it is. It is part of the connection's
/// own task, where it delays no other connection, and the connection counts as silent until it asks something.
async fn serve<L, S, H>(
    mut listener: L,
    router: Router,
    bounds: Bounds,
    handshake: impl Fn(L::Io) -> H,
) -> io::Result<()>
where
    L: Listener,
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    H: Future<Output = io::Result<(S, Client)>> + Send + 'static,
{
    let places = Arc::new(Places::default());
    loop {
        let (stream, _) = listener.accept().await;
        places.evict_slowest(bounds.connections).await;
        let is_asked = Arc::new(AtomicBool::new(false));
        let (mark, ends) = (Arc::clone(&is_asked), Ends(Arc::clone(&places)));
        let (shaken, router) = (handshake(stream), router.clone());
        let task = tokio::spawn(async move {
            let _ends = ends;
            // What a client breaks is its own affair.
            if let Ok(Ok((stream, client))) = timeout(bounds.header, shaken).await {
                let _ = converse(stream, client, router, bounds, mark).await;
            }
        });
        places.lock().push(Open { task, is_asked });
    }
}

/// Answers what is asked on one connection, until it ends; `is_asked` is set while an answer is sought.
async fn converse(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    client: Client,
    router: Router,
    bounds: Bounds,
    is_asked: Arc<AtomicBool>,
) -> hyper::Result<()> {
    let in_time = move |mut request: Request, next: Next| {
        let mark = Arc::clone(&is_asked);
        async move {
            mark.store(true, Ordering::Release);
            let _asks = Asks(&mark);
            request.extensions_mut().insert(client);
            within(bounds.answer, next.run(request)).await
        }
    };
    let service = TowerToHyperService::new(router.layer(from_fn(in_time)));
    let mut protocol = http1::Builder::new();
    protocol
        .timer(TokioTimer::new())
        .header_read_timeout(bounds.header)
        .keep_alive(bounds.keeps_alive)
        .max_buf_size(bounds.header_bytes);
    protocol.serve_connection(TokioIo::new(stream), service).await
}

async fn within(limit: Duration, answer: impl Future<Output = Response>) -> Response {
    match timeout(limit, answer).await {
        Ok(answer) => answer,
        Err(_) => {
            let words = format!("no answer within {} s\n", limit.as_secs_f32());
            (StatusCode::SERVICE_UNAVAILABLE, words).into_response()
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use axum::routing::get;
    use std::net::SocketAddr;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::sync::Semaphore;

    const LONG: Duration = Duration::from_secs(100_000);

    pub(crate) const BOUNDS: Bounds = Bounds {
        connections: 3,
        header: LONG,
        answer: LONG,
        header_bytes: 16 << 10,
        keeps_alive: true,
    };

    async fn served(router: Router, bounds: Bounds) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(answer(listener, router, bounds));
        address
    }

    /// A listener that counts the connections that it accepts.
    struct Counting(TcpListener, Arc<Semaphore>);

    impl Listener for Counting {
        type Io = TcpStream;
        type Addr = SocketAddr;

        async fn accept(&mut self) -> (TcpStream, SocketAddr) {
            let accepted = Listener::accept(&mut self.0).await;
            self.1.add_permits(1);
            accepted
        }

        fn local_addr(&self) -> io::Result<SocketAddr> {
            self.0.local_addr()
        }
    }

    async fn asked(stream: &mut TcpStream, path: &str) {
        let question = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(question.as_bytes()).await.unwrap();
    }

    async fn answered(mut stream: TcpStream) -> String {
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text).await; // an end without a word is one, too
        text
    }

    fn now<T>(test: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        // What waits for ever fails.
        runtime.block_on(async { timeout(Duration::from_secs(60), test).await.unwrap() })
    }

    #[test]
    fn silent_connection_yields_to_a_requesting_one() {
        now(async {
            let address = served(Router::new().route("/", get(|| async { "here" })), BOUNDS).await;
            let mut silent = Vec::new();
            for _ in 0..10 {
                silent.push(TcpStream::connect(address).await.unwrap());
            }
            for _ in 0..5 {
                let mut stream = TcpStream::connect(address).await.unwrap();
                asked(&mut stream, "/").await;
                assert!(answered(stream).await.ends_with("here"));
            }
            assert_eq!(answered(silent.remove(0)).await, "", "the first had to go");
        });
    }

    #[test]
    fn connection_that_awaits_an_answer_is_not_evicted() {
        now(async {
            let gate = Arc::new(Semaphore::new(0));
            let (wait, counted) = (Arc::clone(&gate), Arc::new(Semaphore::new(0)));
            let begun = Arc::clone(&counted);
            let slow = move || async move {
                begun.add_permits(1);
                let _ = wait.acquire().await;
                "late"
            };
            let address = served(Router::new().route("/", get(slow)), BOUNDS).await;
            let mut first = Vec::new();
            for _ in 0..3 {
                let mut stream = TcpStream::connect(address).await.unwrap();
                asked(&mut stream, "/").await;
                first.push(stream);
            }
            counted.acquire_many(3).await.unwrap().forget();
            // It comes when all places are taken by other clients that ask.
            let mut next = TcpStream::connect(address).await.unwrap();
            asked(&mut next, "/").await;
            gate.add_permits(9);
            for stream in first.into_iter().chain([next]) {
                assert!(answered(stream).await.ends_with("late"));
            }
        });
    }

    /// A connection whose answer panics leaves its place to others.
    #[test]
    fn panicking_answer_frees_its_connection() {
        now(async {
            let gate = Arc::new(Semaphore::new(0));
            let (wait, counted) = (Arc::clone(&gate), Arc::new(Semaphore::new(0)));
            let begun = Arc::clone(&counted);
            let panics = move || async move {
                begun.add_permits(1);
                wait.acquire().await.unwrap().forget();
                assert!(wait.is_closed(), "a figure that cannot be");
                "here"
            };
            let router = Router::new().route("/", get(|| async { "here" }));
            let router = router.route("/panics", get(panics));
            let (accepted, listener) =
                (Arc::new(Semaphore::new(0)), TcpListener::bind("127.0.0.1:0").await.unwrap());
            let address = listener.local_addr().unwrap();
            tokio::spawn(answer(Counting(listener, Arc::clone(&accepted)), router, BOUNDS));
            let mut panicking = Vec::new();
            for _ in 0..3 {
                let mut stream = TcpStream::connect(address).await.unwrap();
                asked(&mut stream, "/panics").await;
                panicking.push(stream);
            }
            counted.acquire_many(3).await.unwrap().forget();
            let mut next = TcpStream::connect(address).await.unwrap();
            asked(&mut next, "/").await;
            // Once it is accepted it waits for a place: all are taken by clients that ask.
            accepted.acquire_many(4).await.unwrap().forget();
            gate.add_permits(3);
            assert!(answered(next).await.ends_with("here"));
            for stream in panicking {
                assert_eq!(answered(stream).await, "");
            }
        });
    }

    /// Neither a header nor an answer takes for ever.
    #[test]
    fn header_and_answer_times_are_bounded() {
        now(async {
            let soon = Duration::from_millis(20);
            let pends = || async { std::future::pending::<&str>().await };
            let router = Router::new().route("/", get(pends));
            let address = served(router, Bounds { header: soon, answer: soon, ..BOUNDS }).await;
            let mut half = TcpStream::connect(address).await.unwrap();
            half.write_all(b"GET / HT").await.unwrap();
            assert!(!answered(half).await.contains("200"));
            let mut slow = TcpStream::connect(address).await.unwrap();
            asked(&mut slow, "/").await;
            let reported = answered(slow).await;
            assert!(
                reported.contains("503") && reported.contains("no answer within 0.02 s"),
                "{reported}"
            );
        });
    }
}
