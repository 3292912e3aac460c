//! Certificates made on the spot. Owns the key of an authority, which is gone with it. What can go wrong: no room on
//! disk; that fails the test.

use std::fs;
use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};

/// An authority that signs members' certificates.
#[derive(Debug)]
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

/// What a member needs for mutual TLS, each a PEM file.
#[derive(Clone, Debug)]
pub struct Files {
    /// The authority's certificate.
    pub ca: PathBuf,
    /// The member's certificate.
    pub cert: PathBuf,
    /// The key of the member's certificate.
    pub key: PathBuf,
}

impl Authority {
    /// An authority with a key of its own.
    #[expect(clippy::new_without_default, reason = "no two are alike")]
    pub fn new() -> Authority {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).expect("signs").pem();
        Authority { issuer: Issuer::new(params, key), pem }
    }

    /// Its own certificate.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// Make a certificate for `name` and write all that goes with it into `folder`, in place of what an earlier call has
    /// written there.
    ///
    /// # Panics
    /// If there is no room for it.
    pub fn issue(&self, folder: &Path, name: &str) -> Files {
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(vec![name.to_owned()]).expect("parameters");
        let cert = params.signed_by(&key, &self.issuer).expect("signs").pem();
        let write = |file: &str, pem: &str| {
            let path = folder.join(file);
            fs::write(&path, pem).expect("room on disk");
            path
        };
        Files {
            ca: write("ca.pem", &self.pem),
            cert: write("cert.pem", &cert),
            key: write("key.pem", &key.serialize_pem()),
        }
    }
}
