//! Mutual TLS between members. Owns the CA, certificate and key files and what is made of them: both ends present a
//! certificate and check the other's against the CA, under one configured name, because members have no stable
//! addresses. Bad files fail at the start; later, bad new files keep the old ones in use and are logged.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::RwLock;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use serde::{Deserialize, Serialize};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Files for mutual TLS, in PEM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsConfig {
    /// Certificates of the authorities that sign members' certificates.
    pub ca: PathBuf,
    /// This member's certificate and its chain. It needs `server_name` as a DNS name.
    pub cert: PathBuf,
    /// The private key of `cert`.
    pub key: PathBuf,
    /// DNS name that every member's certificate has.
    #[serde(default = "TlsConfig::default_server_name")]
    pub server_name: String,
    /// The files are looked at again after so long.
    #[serde(default = "TlsConfig::default_poll", with = "humantime_serde")]
    pub poll: Duration,
}

impl TlsConfig {
    /// These files, with the default name (`hypic`) and the default interval of looks (5 s).
    pub fn new(ca: impl Into<PathBuf>, cert: impl Into<PathBuf>, key: impl Into<PathBuf>) -> TlsConfig {
        TlsConfig {
            ca: ca.into(),
            cert: cert.into(),
            key: key.into(),
            server_name: Self::default_server_name(),
            poll: Self::default_poll(),
        }
    }

    fn default_server_name() -> String {
        "hypic".to_owned()
    }

    fn default_poll() -> Duration {
        Duration::from_secs(5)
    }

    fn files(&self) -> [&Path; 3] {
        [&self.ca, &self.cert, &self.key]
    }
}

/// TLS files that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read TLS file {}: {reason}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        reason: io::Error,
    },
    /// A file does not hold what it should.
    #[error("no {what} in {}: it must be PEM ({reason})", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        what: &'static str,
        /// Why it does not.
        reason: String,
    },
    /// Certificates and key do not go together, or are of an unknown kind.
    #[error("cannot use TLS certificate {} with key {}: {reason}", cert.display(), key.display())]
    Unusable {
        /// The certificate's file.
        cert: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The configured name is no DNS name.
    #[error("tls server_name `{0}` is not a DNS name")]
    ServerName(String),
}

/// Mutual TLS from files that are read again when they change. Cheap to clone; what connections there are keep the
/// certificates that they began with.
#[derive(Clone)]
pub struct Tls(Arc<Shared>);

struct Shared {
    config: TlsConfig,
    server_name: ServerName<'static>,
    current: RwLock<Current>,
}

struct Current {
    stamps: Stamps,
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

/// Modification time and length of each file; `None`: it cannot be looked at.
type Stamps = [Option<(SystemTime, u64)>; 3];

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tls").field(&self.0.config).finish()
    }
}

impl Tls {
    /// Read the files, and look at them again from time to time while a clone of this is alive. Needs a tokio runtime.
    ///
    /// # Errors
    /// If a file is missing or bad, or they do not go together.
    pub fn load(config: TlsConfig) -> Result<Tls, TlsError> {
        let server_name = ServerName::try_from(config.server_name.clone())
            .ok()
            .filter(|name| matches!(name, ServerName::DnsName(_)))
            .ok_or_else(|| TlsError::ServerName(config.server_name.clone()))?;
        let current = RwLock::new(read(&config)?);
        let shared = Arc::new(Shared { config, server_name, current });
        let (poll, watched) = (shared.config.poll, Arc::downgrade(&shared));
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(poll).await;
                let Some(shared) = watched.upgrade() else { return };
                // Files may lie on a network: off the runtime's threads.
                let looked = tokio::task::spawn_blocking(move || shared.reload_if_changed()).await;
                debug_assert!(looked.is_ok(), "reading TLS files does not panic");
            }
        });
        Ok(Tls(shared))
    }

    /// For accepting a connection now.
    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.0.current.read().server.clone())
    }

    /// For making a connection now.
    pub(crate) fn connector(&self) -> TlsConnector {
        TlsConnector::from(self.0.current.read().client.clone())
    }

    /// The name to ask for.
    pub(crate) fn server_name(&self) -> ServerName<'static> {
        self.0.server_name.clone()
    }
}

impl Shared {
    fn reload_if_changed(&self) {
        let stamps = look(&self.config);
        if stamps == self.current.read().stamps {
            return;
        }
        match read(&self.config) {
            Ok(fresh) => {
                *self.current.write() = fresh;
                tracing::info!(cert = %self.config.cert.display(), "tls files changed, new connections use them");
            }
            Err(error) => {
                // Remembered, so that the same bad files are told of once.
                self.current.write().stamps = stamps;
                tracing::error!(%error, "changed tls files are bad, the old ones stay in use");
            }
        }
    }
}

fn look(config: &TlsConfig) -> Stamps {
    config.files().map(|path| {
        let metadata = fs::metadata(path).ok()?;
        Some((metadata.modified().ok()?, metadata.len()))
    })
}

fn read(config: &TlsConfig) -> Result<Current, TlsError> {
    // Looked at first: a change during the reading shows at the next look.
    let stamps = look(config);
    let mut roots = RootCertStore::empty();
    for authority in certificates(&config.ca)? {
        roots.add(authority).map_err(|error| TlsError::Pem {
            path: config.ca.clone(),
            what: "usable CA certificate",
            reason: error.to_string(),
        })?;
    }
    let roots = Arc::new(roots);
    let chain = certificates(&config.cert)?;
    let key_bytes = contents(&config.key)?;
    let key = PrivateKeyDer::from_pem_slice(&key_bytes).map_err(|error| TlsError::Pem {
        path: config.key.clone(),
        what: "private key",
        reason: error.to_string(),
    })?;
    let unusable = |reason: String| TlsError::Unusable { cert: config.cert.clone(), key: config.key.clone(), reason };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
        .build()
        .map_err(|error| unusable(error.to_string()))?;
    let mut server = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable(error.to_string()))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain.clone(), key.clone_key())
        .map_err(|error| unusable(error.to_string()))?;
    let mut client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| unusable(error.to_string()))?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)
        .map_err(|error| unusable(error.to_string()))?;
    server.alpn_protocols = vec![b"h2".to_vec()];
    client.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Current { stamps, server: Arc::new(server), client: Arc::new(client) })
}

fn contents(path: &Path) -> Result<Vec<u8>, TlsError> {
    fs::read(path).map_err(|reason| TlsError::Read { path: path.to_owned(), reason })
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let bad = |reason: String| TlsError::Pem { path: path.to_owned(), what: "certificate", reason };
    let bytes = contents(path)?;
    let found = CertificateDer::pem_slice_iter(&bytes)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| bad(error.to_string()))?;
    if found.is_empty() {
        return Err(bad("it has no such section".to_owned()));
    }
    Ok(found)
}
