//! Making connections. Owns the settings of HTTP/2 that both ends share and the dialling of an address, in plain text
//! or with mutual TLS. A connection that was made and broke stays broken: whoever dials again must ask again who
//! answers.

use std::future::Future;
use std::io;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};

use crate::tls::Tls;

/// Settings of connections between members, at both ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ConnectionConfig {
    /// HTTP/2 flow-control window of a stream, in bytes.
    pub stream_window: u32,
    /// HTTP/2 flow-control window of a connection, in bytes.
    pub connection_window: u32,
    /// Largest HTTP/2 frame that is accepted, in bytes; 16 KiB to 16 MiB - 1.
    pub max_frame: u32,
    /// Calls that one connection may have open, as accepted by its server.
    pub max_streams: u32,
    /// Time for a connection to be made, TLS included.
    #[serde(with = "humantime_serde")]
    pub connect_timeout: Duration,
    /// A connection is pinged when it has been silent for so long, idle ones too.
    #[serde(with = "humantime_serde")]
    pub ping_interval: Duration,
    /// An unanswered ping ends a connection after so long.
    #[serde(with = "humantime_serde")]
    pub ping_timeout: Duration,
    /// After a failure to accept a connection, some of those there are get this time to end.
    #[serde(with = "humantime_serde")]
    pub accept_pause: Duration,
}

impl Default for ConnectionConfig {
    fn default() -> Self {
        ConnectionConfig {
            stream_window: 16 << 20,
            connection_window: 64 << 20,
            max_frame: (1 << 20) + (64 << 10),
            max_streams: 4096,
            connect_timeout: Duration::from_secs(2),
            ping_interval: Duration::from_secs(1),
            ping_timeout: Duration::from_secs(2),
            accept_pause: Duration::from_millis(100),
        }
    }
}

/// An address that could not be connected to.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// It is no HOST:PORT.
    #[error("`{0}` is not HOST:PORT")]
    Address(String),
    /// No connection was made.
    #[error("cannot connect to {address}: {reason}")]
    Connect {
        /// The address.
        address: String,
        /// What happened.
        reason: String,
    },
}

/// Makes connections to members. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Dialer {
    config: ConnectionConfig,
    tls: Option<Tls>,
}

impl Dialer {
    /// Connect in plain text, or with `tls`.
    pub fn new(config: ConnectionConfig, tls: Option<Tls>) -> Dialer {
        Dialer { config, tls }
    }

    /// Connect to HOST:PORT. The channel lives as long as the connection: calls fail from its end on, and it is never
    /// made again behind the caller's back, because somebody else may answer then.
    ///
    /// # Errors
    /// If the address is none, nobody answers in time, or TLS refuses.
    pub async fn connect(&self, address: &str) -> Result<Channel, DialError> {
        let invalid = || DialError::Address(address.to_owned());
        let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty()).ok_or_else(invalid)?.1;
        port.parse::<u16>().map_err(|_| invalid())?;
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|_| invalid())?
            .initial_stream_window_size(self.config.stream_window)
            .initial_connection_window_size(self.config.connection_window)
            .max_frame_size(self.config.max_frame)
            .http2_keep_alive_interval(self.config.ping_interval)
            .keep_alive_timeout(self.config.ping_timeout)
            .keep_alive_while_idle(true);
        let failed = |reason: String| DialError::Connect { address: address.to_owned(), reason };
        let limit = self.config.connect_timeout;
        let stream = timeout(limit, self.open(address))
            .await
            .map_err(|_| failed(format!("no connection within {limit:?}")))?
            .map_err(|error| failed(error.to_string()))?;
        let connector = Once::new(stream);
        let made = timeout(limit, endpoint.connect_with_connector(tower::service_fn(move |_| connector.take()))).await;
        made.map_err(|_| failed(format!("no answer within {limit:?}")))?.map_err(|error| failed(causes(&error)))
    }

    async fn open(&self, address: &str) -> io::Result<Box<dyn Io>> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        match &self.tls {
            None => Ok(Box::new(stream)),
            Some(tls) => Ok(Box::new(tls.connector().connect(tls.server_name(), stream).await?)),
        }
    }
}

trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Hands its connection out once.
struct Once(Mutex<Option<Box<dyn Io>>>);

impl Once {
    fn new(stream: Box<dyn Io>) -> Once {
        Once(Mutex::new(Some(stream)))
    }

    fn take(&self) -> impl Future<Output = io::Result<TokioIo<Box<dyn Io>>>> + Send + use<> {
        let stream = self.0.lock().take();
        async move {
            stream
                .map(TokioIo::new)
                .ok_or_else(|| io::Error::new(io::ErrorKind::NotConnected, "the connection to the member has ended"))
        }
    }
}

/// An error and what it comes from, on one line.
pub(crate) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}
