//! The listening side: binds the HTTP and gRPC addresses, serves connections, and drains them at shutdown. Owns the limits
//! of connections; what is said over them is in [`crate::http`] and [`crate::grpc`]. Binding is the only step that can
//! fail; a connection that goes wrong ends alone.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hypic_cluster::{AcceptConfig, accept};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::api::Engine;
use crate::auth::ApiKeys;
use crate::running::Shared;
use crate::{grpc, http};

/// How the front listens and what it permits.
#[derive(Clone, Debug)]
pub struct FrontConfig {
    /// Address for HTTP; port 0 takes a free one.
    pub http: SocketAddr,
    /// Address for gRPC; `None`: no gRPC.
    pub grpc: Option<SocketAddr>,
    /// Who may ask; `None`: everyone.
    pub api_keys: Option<ApiKeys>,
    /// What clients may take up.
    pub limits: FrontLimits,
}

impl Default for FrontConfig {
    fn default() -> Self {
        FrontConfig {
            http: SocketAddr::from(([127, 0, 0, 1], 8080)),
            grpc: Some(SocketAddr::from(([127, 0, 0, 1], 50051))),
            api_keys: None,
            limits: FrontLimits::default(),
        }
    }
}

/// What clients may take up: bytes, connections and time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FrontLimits {
    /// Bytes of an HTTP request body, and of a gRPC request message.
    pub body_limit: usize,
    /// Bytes of the header block of a request over HTTP/2.
    pub header_limit: u32,
    /// Time in which a client must have sent the first bytes of a connection, a request's header over HTTP/1, and then
    /// the next piece of its body.
    #[serde(with = "humantime_serde")]
    pub read_timeout: Duration,
    /// A streamed answer says something at least this often, be it a comment.
    #[serde(with = "humantime_serde")]
    pub stream_keep_alive: Duration,
    /// Longest time that an answer may take; shortens deadlines of requests. Zero: no limit.
    #[serde(with = "humantime_serde")]
    pub max_duration: Duration,
    /// HTTP/2 flow-control window of a stream, in bytes.
    pub stream_window: u32,
    /// HTTP/2 flow-control window of a connection, in bytes.
    pub connection_window: u32,
    /// Calls that one HTTP/2 connection may have open.
    pub max_streams: u32,
    /// An HTTP/2 connection is pinged when it has been silent for so long.
    #[serde(with = "humantime_serde")]
    pub ping_interval: Duration,
    /// An unanswered ping ends an HTTP/2 connection after so long.
    #[serde(with = "humantime_serde")]
    pub ping_timeout: Duration,
    /// After a failure to accept a connection, some of those there are get this time to end.
    #[serde(with = "humantime_serde")]
    pub accept_pause: Duration,
    /// Time for clients to read the end of their answers once the grace of a shutdown is over.
    #[serde(with = "humantime_serde")]
    pub abort_timeout: Duration,
}

impl Default for FrontLimits {
    fn default() -> Self {
        FrontLimits {
            body_limit: 64 << 20,
            header_limit: 64 << 10,
            read_timeout: Duration::from_secs(30),
            stream_keep_alive: Duration::from_secs(10),
            max_duration: Duration::from_secs(3600),
            stream_window: 16 << 20,
            connection_window: 64 << 20,
            max_streams: 1024,
            ping_interval: Duration::from_secs(60),
            ping_timeout: Duration::from_secs(20),
            accept_pause: Duration::from_millis(100),
            abort_timeout: Duration::from_secs(1),
        }
    }
}

impl FrontLimits {
    fn accept(&self, http1: bool) -> AcceptConfig {
        AcceptConfig {
            http1,
            greeting: self.read_timeout,
            stream_window: self.stream_window,
            connection_window: self.connection_window,
            max_frame: None,
            header_limit: Some(self.header_limit),
            max_streams: self.max_streams,
            ping_interval: self.ping_interval,
            ping_timeout: self.ping_timeout,
            after_failure: self.accept_pause,
        }
    }
}

/// An address that cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address} for {protocol}: {reason}; {}", fix(.reason))]
pub struct BindError {
    /// The address.
    pub address: SocketAddr,
    /// `HTTP` or `gRPC`.
    pub protocol: &'static str,
    /// What the system says.
    pub reason: io::Error,
}

fn fix(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another program has that port: stop it, or choose another port (0 takes a free one)"
        }
        io::ErrorKind::PermissionDenied => "ports below 1024 need privileges: choose a higher one",
        io::ErrorKind::AddrNotAvailable => "no interface of this machine has that address: try 127.0.0.1 or 0.0.0.0",
        _ => "choose another address",
    }
}

/// Listeners that are bound and not yet served: connections wait.
#[derive(Debug)]
pub struct Front {
    config: FrontConfig,
    http: Bound,
    grpc: Option<Bound>,
}

#[derive(Debug)]
struct Bound {
    listener: TcpListener,
    address: SocketAddr,
}

/// Bind the addresses of `config`.
///
/// # Errors
/// If one cannot be bound; the other is released.
pub async fn bind(config: FrontConfig) -> Result<Front, BindError> {
    let http = listen(config.http, "HTTP").await?;
    let grpc = match config.grpc {
        Some(address) => Some(listen(address, "gRPC").await?),
        None => None,
    };
    Ok(Front { config, http, grpc })
}

async fn listen(address: SocketAddr, protocol: &'static str) -> Result<Bound, BindError> {
    let failed = |reason| BindError { address, protocol, reason };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok(Bound { listener, address })
}

impl Front {
    /// Where HTTP is served.
    pub fn http_address(&self) -> SocketAddr {
        self.http.address
    }

    /// Where gRPC is served.
    pub fn grpc_address(&self) -> Option<SocketAddr> {
        self.grpc.as_ref().map(|bound| bound.address)
    }

    /// Serve until `shutdown`; then drain: no new connections or requests, idle connections close, and running
    /// answers may finish within `grace`. After that they end with an error, and what is still open is cut.
    pub async fn serve<E: Engine>(self, engine: Arc<E>, shutdown: CancellationToken, grace: Duration) {
        let Front { config, http, grpc } = self;
        let _open = crate::stats::observe_open();
        let shared = Arc::new(Shared {
            engine,
            drain: shutdown,
            abort: CancellationToken::new(),
            max_duration: Some(config.limits.max_duration).filter(|limit| !limit.is_zero()),
        });
        let http_routes = http::routes(&config, shared.clone());
        let mut listeners = vec![(http.listener, http_routes, config.limits.accept(true))];
        let mut background = JoinSet::new();
        if let Some(grpc) = grpc {
            let (routes, health) = grpc::routes(&config, shared.clone());
            background.spawn(health);
            listeners.push((grpc.listener, routes, config.limits.accept(false)));
        }
        let mut accepting = JoinSet::new();
        for (listener, routes, connections) in listeners {
            accepting.spawn(accept(listener, None, routes, connections, shared.drain.clone()));
        }
        shared.drain.cancelled().await;
        tracing::info!(grace_s = grace.as_secs_f64(), "draining");
        let mut open = JoinSet::new();
        while let Some(accepted) = accepting.join_next().await {
            match accepted {
                Ok(mut connections) => {
                    open.spawn(async move { finished(&mut connections).await });
                }
                Err(error) => tracing::error!(%error, "a listener failed"),
            }
        }
        if timeout(grace, finished(&mut open)).await.is_ok() {
            return;
        }
        tracing::warn!("grace is over, running answers are aborted");
        shared.abort.cancel();
        // Dropping the sets cuts the connections that are left.
        let _ = timeout(config.limits.abort_timeout, finished(&mut open)).await;
    }
}

async fn finished<T: 'static>(tasks: &mut JoinSet<T>) {
    while tasks.join_next().await.is_some() {}
}
