//! Accepting connections and serving HTTP over them, for the internal server and the public one. Owns every connection
//! from its first byte on: how long it may say nothing, its TLS, its windows and pings, and its end. One that goes
//! wrong ends alone, be it by a panic, which is logged; a failure to accept is waited out.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::tls::Tls;

/// How connections are treated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcceptConfig {
    /// Whether HTTP/1 is spoken beside HTTP/2.
    pub http1: bool,
    /// Time for TLS and a connection's first bytes behind it, and for a request's header over HTTP/1.
    pub greeting: Duration,
    /// HTTP/2 flow-control window of a stream, in bytes.
    pub stream_window: u32,
    /// HTTP/2 flow-control window of a connection, in bytes.
    pub connection_window: u32,
    /// Largest HTTP/2 frame that is accepted, in bytes; 16 KiB to 16 MiB - 1. `None`: the protocol's default.
    pub max_frame: Option<u32>,
    /// Bytes of the header block of a request over HTTP/2. `None`: the library's default.
    pub header_limit: Option<u32>,
    /// Calls that one HTTP/2 connection may have open.
    pub max_streams: u32,
    /// An HTTP/2 connection is pinged when it has been silent for so long.
    pub ping_interval: Duration,
    /// An unanswered ping ends an HTTP/2 connection after so long.
    pub ping_timeout: Duration,
    /// After a failure to accept, most likely for want of file descriptors, some connections get this time to end.
    pub after_failure: Duration,
}

impl AcceptConfig {
    fn builder(&self) -> Builder<TokioExecutor> {
        let mut builder = Builder::new(TokioExecutor::new());
        if self.http1 {
            builder.http1().timer(TokioTimer::new()).header_read_timeout(self.greeting);
        } else {
            builder = builder.http2_only();
        }
        let mut http2 = builder.http2();
        http2
            .timer(TokioTimer::new())
            .initial_stream_window_size(self.stream_window)
            .initial_connection_window_size(self.connection_window)
            .max_frame_size(self.max_frame)
            .max_concurrent_streams(self.max_streams)
            .keep_alive_interval(self.ping_interval)
            .keep_alive_timeout(self.ping_timeout);
        if let Some(limit) = self.header_limit {
            http2.max_header_list_size(limit);
        }
        builder
    }
}

/// Accept connections on `listener` and serve `routes` over them until `shutdown`; then the listener closes, idle
/// connections end, and those that are still open are returned: they end with their last call, or when the set is
/// dropped.
pub async fn accept(
    listener: TcpListener,
    tls: Option<Tls>,
    routes: Router,
    config: AcceptConfig,
    shutdown: CancellationToken,
) -> JoinSet<()> {
    let (builder, after_failure) = (Arc::new(config.builder()), config.after_failure);
    let serving = Serving { routes, builder, tls, greeting: config.greeting, shutdown };
    let mut open = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = serving.shutdown.cancelled() => return open,
            Some(ended) = open.join_next(), if !open.is_empty() => note_end(ended),
            accepted = listener.accept() => match accepted {
                Ok((stream, caller)) => {
                    open.spawn(serving.clone().connection(stream, caller));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    sleep(after_failure).await;
                }
            },
        }
    }
}

/// A connection has ended. One that went wrong has said so itself, unless it panicked.
pub(crate) fn note_end(ended: Result<(), JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "a connection ended with a panic");
    }
}

/// What all connections of a listener share.
#[derive(Clone)]
struct Serving {
    routes: Router,
    builder: Arc<Builder<TokioExecutor>>,
    tls: Option<Tls>,
    greeting: Duration,
    shutdown: CancellationToken,
}

/// A connection that may be served.
enum Begun {
    Plain(TcpStream),
    Secured(Box<tokio_rustls::server::TlsStream<TcpStream>>),
}

impl Serving {
    async fn connection(self, stream: TcpStream, caller: SocketAddr) {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%caller, %error, "cannot switch off delayed sending");
        }
        let begun = tokio::select! {
            begun = timeout(self.greeting, self.begin(stream)) => begun,
            () = self.shutdown.cancelled() => return,
        };
        match begun {
            Err(_) => tracing::debug!(%caller, "a connection said nothing"),
            Ok(Err(error)) if self.tls.is_some() => tracing::warn!(%caller, %error, "a connection was refused"),
            Ok(Err(error)) => tracing::debug!(%caller, %error, "a connection ended before it began"),
            Ok(Ok(Begun::Plain(stream))) => self.calls(stream, caller).await,
            Ok(Ok(Begun::Secured(stream))) => self.calls(stream, caller).await,
        }
    }

    async fn begin(&self, stream: TcpStream) -> io::Result<Begun> {
        match &self.tls {
            None => greeted(&stream).await.map(|()| Begun::Plain(stream)),
            Some(tls) => {
                let mut stream = tls.acceptor().accept(stream).await?;
                // The handshake alone asks for nothing: the first bytes are waited for, and stay there to be read.
                stream.fill_buf().await?;
                Ok(Begun::Secured(Box::new(stream)))
            }
        }
    }

    async fn calls(self, stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static, caller: SocketAddr) {
        let service = TowerToHyperService::new(self.routes);
        let mut connection = std::pin::pin!(self.builder.serve_connection(TokioIo::new(stream), service));
        let result = tokio::select! {
            result = connection.as_mut() => result,
            () = self.shutdown.cancelled() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = result {
            tracing::debug!(%caller, %error, "a connection ended");
        }
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
