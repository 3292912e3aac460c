//! The listening side: binds the HTTP and gRPC addresses, serves connections, and drains them at
//! shutdown. Owns connections and their limits; what is said over them is in [`crate::http`] and
//! [`crate::grpc`]. Binding is the only step that can fail; a connection that goes wrong ends alone.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

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
    /// Bytes of an HTTP request body, and of a gRPC request message.
    pub body_limit: usize,
    /// Bytes of the header block of a request over HTTP/2.
    pub header_limit: u32,
    /// Time in which a client must have sent the first bytes of a connection, a request's header over HTTP/1, and then
    /// the next piece of its body.
    pub read_timeout: Duration,
    /// A streamed answer says something at least this often, be it a comment.
    pub stream_keep_alive: Duration,
    /// Longest time that an answer may take; shortens deadlines of requests. `None`: no limit.
    pub max_duration: Option<Duration>,
    /// HTTP/2 flow-control window of a stream, in bytes.
    pub stream_window: u32,
    /// HTTP/2 flow-control window of a connection, in bytes.
    pub connection_window: u32,
    /// Calls that one HTTP/2 connection may have open.
    pub max_streams: u32,
    /// An HTTP/2 connection is pinged when it has been silent for so long.
    pub ping_interval: Duration,
    /// An unanswered ping ends an HTTP/2 connection after so long.
    pub ping_timeout: Duration,
    /// Time for clients to read the end of their answers once the grace of a shutdown is over.
    pub abort_timeout: Duration,
}

impl Default for FrontConfig {
    fn default() -> Self {
        FrontConfig {
            http: SocketAddr::from(([127, 0, 0, 1], 8080)),
            grpc: Some(SocketAddr::from(([127, 0, 0, 1], 50051))),
            api_keys: None,
            body_limit: 64 << 20,
            header_limit: 64 << 10,
            read_timeout: Duration::from_secs(30),
            stream_keep_alive: Duration::from_secs(10),
            max_duration: Some(Duration::from_secs(3600)),
            stream_window: 16 << 20,
            connection_window: 64 << 20,
            max_streams: 1024,
            ping_interval: Duration::from_secs(60),
            ping_timeout: Duration::from_secs(20),
            abort_timeout: Duration::from_secs(1),
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
        let shared = Arc::new(Shared {
            engine,
            drain: shutdown,
            abort: CancellationToken::new(),
            max_duration: config.max_duration,
        });
        let http_routes = http::routes(&config, shared.clone());
        let mut listeners = vec![(http.listener, http_routes, connections(&config))];
        let mut background = JoinSet::new();
        if let Some(grpc) = grpc {
            let (routes, health) = grpc::routes(&config, shared.clone());
            background.spawn(health);
            listeners.push((grpc.listener, routes, connections(&config).http2_only()));
        }
        let mut accepting = JoinSet::new();
        for (listener, routes, builder) in listeners {
            let (builder, greeting, drain) = (Arc::new(builder), config.read_timeout, shared.drain.clone());
            accepting.spawn(accept(listener, Serving { routes, builder, greeting, drain }));
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
        let _ = timeout(config.abort_timeout, finished(&mut open)).await;
    }
}

async fn finished<T: 'static>(tasks: &mut JoinSet<T>) {
    while tasks.join_next().await.is_some() {}
}

fn connections(config: &FrontConfig) -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(config.read_timeout);
    builder
        .http2()
        .timer(TokioTimer::new())
        .initial_stream_window_size(config.stream_window)
        .initial_connection_window_size(config.connection_window)
        .max_header_list_size(config.header_limit)
        .max_concurrent_streams(config.max_streams)
        .keep_alive_interval(config.ping_interval)
        .keep_alive_timeout(config.ping_timeout);
    builder
}

/// What all connections of a listener share.
#[derive(Clone)]
struct Serving {
    routes: Router,
    builder: Arc<Builder<TokioExecutor>>,
    /// Time for a connection's first bytes.
    greeting: Duration,
    drain: CancellationToken,
}

/// Accept until the drain; returns the connections that are still open.
async fn accept(listener: TcpListener, serving: Serving) -> JoinSet<()> {
    /// Out of file descriptors, most likely: let some connections end.
    const AFTER_FAILURE: Duration = Duration::from_millis(100);
    let mut open = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = serving.drain.cancelled() => return open,
            Some(_) = open.join_next(), if !open.is_empty() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    open.spawn(connection(stream, serving.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    sleep(AFTER_FAILURE).await;
                }
            },
        }
    }
}

async fn connection(stream: TcpStream, serving: Serving) {
    let Serving { routes, builder, greeting, drain } = serving;
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot switch off delayed sending");
    }
    let begun = tokio::select! {
        begun = timeout(greeting, greeted(&stream)) => begun,
        () = drain.cancelled() => return,
    };
    if !matches!(begun, Ok(Ok(()))) {
        tracing::debug!("a connection said nothing");
        return;
    }
    let service = TowerToHyperService::new(routes.map_request(|request: Request<_>| request.map(Body::new)));
    let mut connection = std::pin::pin!(builder.serve_connection(TokioIo::new(stream), service));
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = drain.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "connection ended");
    }
}

/// Wait until enough has come to tell which protocol it is, for which the protocols' own limits do not hold yet.
async fn greeted(stream: &TcpStream) -> io::Result<()> {
    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    /// Readiness does not tell one byte from two.
    const BETWEEN_LOOKS: Duration = Duration::from_millis(10);
    let mut first = [0; PREFACE.len()];
    loop {
        let known = stream.peek(&mut first).await?;
        if known == PREFACE.len() || known == 0 || !PREFACE.starts_with(&first[..known]) {
            return Ok(());
        }
        sleep(BETWEEN_LOOKS).await;
    }
}
