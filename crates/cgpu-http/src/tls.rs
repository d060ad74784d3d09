//! Answers by TLS: [`answer_tls`].
//!
//! A handshake is within the bounds of everything else. A client needs no certificate here: what one without may ask is
//! the router's to say, by the request's [`Client`]. One whose certificate the settings refuse gets no connection. Must
//! not know where certificates are from.

use std::io;
use std::sync::Arc;

use axum::Router;
use axum::serve::Listener;
use tokio_rustls::TlsAcceptor;
pub use tokio_rustls::rustls;

use crate::{Bounds, Client, serve};

/// Answers all clients that connect by TLS, until it is dropped. Each handshake has the `settings` of its moment.
///
/// # Errors
///
/// Never: a client that can't be answered loses its connection.
pub async fn answer_tls<L: Listener>(
    listener: L,
    router: Router,
    bounds: Bounds,
    settings: impl Fn() -> Arc<rustls::ServerConfig> + Clone + Send + 'static,
) -> io::Result<()> {
    serve(listener, router, bounds, move |stream| {
        let settings = settings.clone();
        async move {
            let stream = TlsAcceptor::from(settings()).accept(stream).await?;
            let client = match stream.get_ref().1.peer_certificates() {
                Some(_) => Client::Certified,
                None => Client::Anonymous,
            };
            Ok((stream, client))
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use super::rustls::server::WebPkiClientVerifier;
    use super::rustls::{ClientConfig, RootCertStore, ServerConfig};
    use super::*;
    use crate::tests::BOUNDS;
    use axum::Extension;
    use axum::routing::get;
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    use std::net::SocketAddr;
    use std::time::Duration;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};
    use tokio_rustls::TlsConnector;

    type Ca = CertifiedIssuer<'static, KeyPair>;

    fn ca() -> Ca {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
    }

    fn roots(ca: &Ca) -> Arc<RootCertStore> {
        let mut roots = RootCertStore::empty();
        roots.add(ca.der().clone()).unwrap();
        Arc::new(roots)
    }

    fn signed(ca: &Ca) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(["server".to_owned()]).unwrap();
        (vec![params.signed_by(&key, ca).unwrap().der().clone()], key.into())
    }

    async fn served(ca: &Ca, bounds: Bounds) -> SocketAddr {
        let clients = WebPkiClientVerifier::builder(roots(ca)).allow_unauthenticated();
        let (chain, key) = signed(ca);
        let settings = ServerConfig::builder()
            .with_client_cert_verifier(clients.build().unwrap())
            .with_single_cert(chain, key);
        let settings = Arc::new(settings.unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let says = |Extension(client): Extension<Client>| async move { format!("{client:?}") };
        let router = Router::new().route("/", get(says));
        tokio::spawn(answer_tls(listener, router, bounds, move || Arc::clone(&settings)));
        address
    }

    /// What a client is answered that trusts `ca`, and has a certificate of `of`.
    async fn answered(address: SocketAddr, ca: &Ca, of: Option<&Ca>) -> io::Result<String> {
        let config = ClientConfig::builder().with_root_certificates(roots(ca));
        let config = match of.map(signed) {
            Some((chain, key)) => config.with_client_auth_cert(chain, key).unwrap(),
            None => config.with_no_client_auth(),
        };
        let stream = TcpStream::connect(address).await.unwrap();
        let connector = TlsConnector::from(Arc::new(config));
        let mut stream = connector.connect("server".try_into().unwrap(), stream).await?;
        stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await?;
        Ok(text)
    }

    fn now<T>(test: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test)
    }

    #[test]
    fn a_request_says_what_its_client_has_shown() {
        now(async {
            let (ca, other) = (ca(), self::ca());
            let address = served(&ca, BOUNDS).await;
            assert!(answered(address, &ca, Some(&ca)).await.unwrap().ends_with("Certified"));
            assert!(answered(address, &ca, None).await.unwrap().ends_with("Anonymous"));
            answered(address, &ca, Some(&other)).await.unwrap_err();
            answered(address, &other, None).await.unwrap_err();
        });
    }

    #[test]
    fn silent_handshake_yields_to_a_requesting_client() {
        now(async {
            let ca = ca();
            let address = served(&ca, BOUNDS).await;
            let mut silent = Vec::new();
            for _ in 0..10 {
                silent.push(TcpStream::connect(address).await.unwrap());
            }
            for _ in 0..5 {
                assert!(answered(address, &ca, Some(&ca)).await.unwrap().ends_with("Certified"));
            }
            // The first had to go.
            assert_eq!(silent.remove(0).read(&mut [0]).await.unwrap_or_default(), 0);
        });
    }

    #[test]
    fn no_handshake_takes_for_ever() {
        now(async {
            let bounds = Bounds { header: Duration::from_millis(20), ..BOUNDS };
            let address = served(&ca(), bounds).await;
            let mut silent = TcpStream::connect(address).await.unwrap();
            assert_eq!(silent.read(&mut [0]).await.unwrap_or_default(), 0);
        });
    }

    #[test]
    fn words_without_tls_are_not_answered() {
        now(async {
            let address = served(&ca(), BOUNDS).await;
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await; // an end without a word is one, too
            assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
        });
    }
}
