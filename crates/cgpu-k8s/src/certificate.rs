//! A certificate, its key, and the CA of the other side, as files: [`CertificateFiles`], and their content: [`Pem`].
//!
//! Must not know what is served or asked with them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use cgpu_http::tls::rustls::RootCertStore;
use cgpu_http::tls::rustls::pki_types::pem::PemObject;
use cgpu_http::tls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Where they are.
#[derive(Debug, Clone)]
pub(crate) struct CertificateFiles {
    /// The certificate, with those between it and its CA.
    pub(crate) certificate: PathBuf,
    /// Its private key.
    pub(crate) key: PathBuf,
    /// The certificates of the CA that has to have signed the other side's.
    pub(crate) ca: PathBuf,
}

/// What is in the files.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Pem {
    pub(crate) certificate: Vec<u8>,
    pub(crate) key: Vec<u8>,
    pub(crate) ca: Vec<u8>,
}

impl CertificateFiles {
    /// Reads all three, and parses none.
    pub(crate) fn read(&self) -> Result<Pem> {
        let read =
            |file: &Path| fs::read(file).with_context(|| format!("cannot read {}", file.display()));
        Ok(Pem {
            certificate: read(&self.certificate)?,
            key: read(&self.key)?,
            ca: read(&self.ca)?,
        })
    }

    /// The certificate first, then those between it and its CA.
    pub(crate) fn chain(&self, pem: &Pem) -> Result<Vec<CertificateDer<'static>>> {
        certificates(&self.certificate, &pem.certificate)
    }

    pub(crate) fn private_key(&self, pem: &Pem) -> Result<PrivateKeyDer<'static>> {
        PrivateKeyDer::from_pem_slice(&pem.key)
            .with_context(|| format!("{} has no private key in PEM", self.key.display()))
    }

    /// The certificates of the CA.
    pub(crate) fn roots(&self, pem: &Pem) -> Result<RootCertStore> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&self.ca, &pem.ca)? {
            roots.add(certificate).with_context(|| {
                format!("{} has a certificate that is no CA's", self.ca.display())
            })?;
        }
        Ok(roots)
    }
}

fn certificates(file: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>> {
    let parsed: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = parsed.with_context(|| format!("{} is no PEM", file.display()))?;
    ensure!(!found.is_empty(), "{} has no certificate in PEM", file.display());
    Ok(found)
}
