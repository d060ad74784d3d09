//! What replicas of the extender serve by TLS with, and ask one another with: [`Certificates`].
//!
//! Owns when the files are read. A certificate that was renewed is taken up without a restart: a connection that begins
//! finds out whether the files have changed. Files of no use change nothing but the log. A replica is server and client
//! with the same certificate, so that it is proved before it is used that the other replicas will take it as both.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use cgpu_http::tls::rustls::client::WebPkiServerVerifier;
use cgpu_http::tls::rustls::client::danger::ServerCertVerifier;
use cgpu_http::tls::rustls::crypto::ring::default_provider;
use cgpu_http::tls::rustls::pki_types::{ServerName, UnixTime};
use cgpu_http::tls::rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use cgpu_http::tls::rustls::{self, ServerConfig};
use tracing::{info, warn};

use crate::certificate::{CertificateFiles, Pem};
use crate::server::EXTENDER;

/// How old the last check of the files may be. A Secret takes a minute to become a pod's files.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// What was in the files when they were last of use.
pub(crate) struct Credentials {
    /// What a connection is served with.
    pub(crate) server: Arc<ServerConfig>,
    /// What another replica is asked with.
    pub(crate) pem: Pem,
}

impl Credentials {
    fn load(files: &CertificateFiles, pem: Pem) -> Result<Self> {
        let (chain, roots) = (files.chain(&pem)?, Arc::new(files.roots(&pem)?));
        let provider = Arc::new(default_provider());
        let clients =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
                .allow_unauthenticated()
                .build()?;
        let servers =
            WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider)).build()?;
        let is_taken = || -> Result<(), rustls::Error> {
            let (own, between) = chain.split_first().expect("a chain has a certificate");
            let (now, name) = (UnixTime::now(), ServerName::try_from(EXTENDER));
            let name = name.expect("it is a DNS name");
            clients.verify_client_cert(own, between, now)?;
            servers.verify_server_cert(own, between, &name, &[], now).map(|_| ())
        };
        is_taken().with_context(|| {
            format!(
                "{} can't be a replica's certificate, which the CA in {} has to have signed, for the DNS name \
                 {EXTENDER}, with the usages server auth and client auth",
                files.certificate.display(),
                files.ca.display()
            )
        })?;
        let key = files.private_key(&pem)?;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(clients)
            .with_single_cert(chain, key)
            .with_context(|| {
                let (key, certificate) = (files.key.display(), files.certificate.display());
                format!("{key} is not the key of the certificate in {certificate}")
            })?;
        // Each connection proves again which client it is.
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        server.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Credentials { server: Arc::new(server), pem })
    }
}

/// The files, and what they had last.
pub(crate) struct Certificates {
    files: CertificateFiles,
    state: Mutex<State>,
}

struct State {
    credentials: Arc<Credentials>,
    checked: Instant,
    /// Why the files are of no use since, as it was logged.
    refused: Option<String>,
}

/// What a check of the files has found, if it is to be logged.
#[derive(Debug, PartialEq, Eq)]
enum Renewal {
    Taken,
    Refused(String),
}

impl State {
    fn check(&mut self, files: &CertificateFiles) -> Option<Renewal> {
        let found = files.read().and_then(|pem| match pem == self.credentials.pem {
            true => Ok(None),
            false => Credentials::load(files, pem).map(Some),
        });
        match found {
            Ok(renewed) => {
                self.refused = None;
                self.credentials = Arc::new(renewed?);
                Some(Renewal::Taken)
            }
            Err(error) => {
                let why = format!("{error:#}");
                let is_known = self.refused.replace(why.clone()).is_some_and(|known| known == why);
                (!is_known).then_some(Renewal::Refused(why))
            }
        }
    }
}

impl Certificates {
    /// Reads the files.
    ///
    /// # Errors
    ///
    /// If they are of no use.
    pub(crate) fn load(files: CertificateFiles, now: Instant) -> Result<Self> {
        let credentials = Arc::new(Credentials::load(&files, files.read()?)?);
        let state = State { credentials, checked: now, refused: None };
        Ok(Certificates { files, state: Mutex::new(state) })
    }

    /// What the files have, or had when they were last of use.
    pub(crate) fn current(&self, now: Instant) -> Arc<Credentials> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if now.saturating_duration_since(state.checked) >= CHECK_INTERVAL {
            state.checked = now;
            match state.check(&self.files) {
                Some(Renewal::Taken) => info!("a renewed certificate is used from now on"),
                Some(Renewal::Refused(error)) => {
                    warn!(error, "a renewed certificate can't be used, and the one before stays");
                }
                None => {}
            }
        }
        Arc::clone(&state.credentials)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use rcgen::{
        BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa,
        KeyPair,
    };
    use std::fs;
    use tempfile::TempDir;

    pub(crate) const AS_BOTH: &[ExtendedKeyUsagePurpose] =
        &[ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    pub(crate) const AS_CLIENT: &[ExtendedKeyUsagePurpose] = &[ExtendedKeyUsagePurpose::ClientAuth];

    /// A CA that a test makes.
    pub(crate) struct Ca(CertifiedIssuer<'static, KeyPair>);

    impl Ca {
        pub(crate) fn new() -> Self {
            let mut params = CertificateParams::new(Vec::new()).unwrap();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            let key = KeyPair::generate().unwrap();
            Ca(CertifiedIssuer::self_signed(params, key).unwrap())
        }

        /// A new certificate of this CA's, for that DNS name.
        pub(crate) fn signed(&self, name: &str, usages: &[ExtendedKeyUsagePurpose]) -> Pem {
            let key = KeyPair::generate().unwrap();
            let mut params = CertificateParams::new([name.to_owned()]).unwrap();
            params.extended_key_usages = usages.to_vec();
            Pem {
                certificate: params.signed_by(&key, &self.0).unwrap().pem().into(),
                key: key.serialize_pem().into(),
                ca: self.0.pem().into(),
            }
        }

        pub(crate) fn replica(&self) -> Pem {
            self.signed(EXTENDER, AS_BOTH)
        }
    }

    /// Files as a Secret has them.
    pub(crate) struct Secret(TempDir);

    impl Secret {
        pub(crate) fn new(pem: &Pem) -> Self {
            let secret = Secret(TempDir::new().unwrap());
            secret.write(pem);
            secret
        }

        pub(crate) fn write(&self, pem: &Pem) {
            let files = self.files();
            fs::write(files.certificate, &pem.certificate).unwrap();
            fs::write(files.key, &pem.key).unwrap();
            fs::write(files.ca, &pem.ca).unwrap();
        }

        pub(crate) fn files(&self) -> CertificateFiles {
            let file = |name| self.0.path().join(name);
            CertificateFiles {
                certificate: file("tls.crt"),
                key: file("tls.key"),
                ca: file("ca.crt"),
            }
        }

        pub(crate) fn load(&self) -> Result<Certificates> {
            Certificates::load(self.files(), Instant::now())
        }
    }

    /// What `certificates` have once they check the files again.
    fn next(certificates: &Certificates) -> Arc<Credentials> {
        let checked = certificates.state.lock().unwrap().checked;
        certificates.current(checked + CHECK_INTERVAL)
    }

    #[test]
    fn a_renewed_certificate_is_used_after_the_interval() {
        let ca = Ca::new();
        let (first, second) = (ca.replica(), ca.replica());
        let secret = Secret::new(&first);
        let now = Instant::now();
        let certificates = Certificates::load(secret.files(), now).unwrap();
        secret.write(&second);
        let soon = CHECK_INTERVAL.checked_sub(Duration::from_nanos(1)).unwrap();
        assert!(certificates.current(now + soon).pem == first);
        let taken = certificates.current(now + CHECK_INTERVAL);
        assert!(taken.pem == second);
        assert!(Arc::ptr_eq(&next(&certificates).server, &taken.server), "nothing has changed");
        // Another CA as well.
        let other = Ca::new().replica();
        secret.write(&other);
        assert!(next(&certificates).pem == other);
    }

    #[test]
    fn a_broken_renewal_changes_nothing() {
        let ca = Ca::new();
        let (first, second) = (ca.replica(), ca.replica());
        let secret = Secret::new(&first);
        let certificates = secret.load().unwrap();
        for broken in [
            Pem { key: second.key.clone(), ..first.clone() },
            Pem { certificate: b"x".to_vec(), ..first.clone() },
            Pem { ca: Ca::new().replica().ca, ..first.clone() },
        ] {
            secret.write(&broken);
            assert!(next(&certificates).pem == first);
        }
        fs::remove_file(secret.files().certificate).unwrap();
        assert!(next(&certificates).pem == first);
        secret.write(&second);
        assert!(next(&certificates).pem == second);
    }

    #[test]
    fn a_broken_renewal_is_logged_once() {
        let ca = Ca::new();
        let (first, second) = (ca.replica(), ca.replica());
        let secret = Secret::new(&first);
        let certificates = secret.load().unwrap();
        let check = || certificates.state.lock().unwrap().check(&certificates.files);
        assert_eq!(check(), None);
        secret.write(&Pem { key: second.key.clone(), ..first.clone() });
        let Some(Renewal::Refused(why)) = check() else { panic!("another key") };
        assert!(why.contains("is not the key of the certificate in"), "{why}");
        assert_eq!(check(), None);
        fs::remove_file(secret.files().key).unwrap();
        let Some(Renewal::Refused(why)) = check() else { panic!("no key") };
        assert!(why.contains("cannot read"), "{why}");
        assert_eq!(check(), None);
        secret.write(&second);
        assert_eq!((check(), check()), (Some(Renewal::Taken), None));
        // The same again is logged again, once it was mended.
        fs::remove_file(secret.files().key).unwrap();
        assert!(matches!(check(), Some(Renewal::Refused(_))));
        secret.write(&second);
        assert_eq!(check(), None);
        fs::remove_file(secret.files().key).unwrap();
        assert!(matches!(check(), Some(Renewal::Refused(_))));
    }

    #[test]
    fn files_of_no_use_are_refused_in_words() {
        let (ca, other) = (Ca::new(), Ca::new().replica());
        let good = ca.replica();
        let bytes = |text: &str| text.as_bytes().to_vec();
        let with = |change: fn(&mut Pem, &Pem)| {
            let mut pem = good.clone();
            change(&mut pem, &other);
            pem
        };
        let another_ca = with(|pem, other| pem.ca = other.ca.clone());
        let needs =
            "for the DNS name cgpu-scheduler-extender, with the usages server auth and client auth";
        for (pem, words) in [
            (Pem { certificate: bytes("x"), ..good.clone() }, "tls.crt has no certificate in PEM"),
            (Pem { key: bytes("x"), ..good.clone() }, "tls.key has no private key in PEM"),
            (Pem { ca: Vec::new(), ..good.clone() }, "ca.crt has no certificate in PEM"),
            (
                with(|pem, other| pem.key = other.key.clone()),
                "is not the key of the certificate in",
            ),
            (another_ca, needs),
            (ca.signed("another", AS_BOTH), needs),
            (ca.signed(EXTENDER, AS_CLIENT), needs),
            (ca.signed(EXTENDER, &AS_BOTH[..1]), needs),
        ] {
            let error = Secret::new(&pem).load().err().unwrap();
            let error = format!("{error:#}");
            assert!(error.contains(words), "{error}");
        }
        let secret = Secret::new(&good);
        fs::remove_file(secret.files().ca).unwrap();
        let error = format!("{:#}", secret.load().err().unwrap());
        assert!(error.starts_with("cannot read ") && error.contains("ca.crt: No such"), "{error}");
    }
}
