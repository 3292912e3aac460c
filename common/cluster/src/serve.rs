//! The internal server. Owns accepted connections: accepting, TLS, limits, and their end. A connection that goes wrong
//! ends alone, and a failure to accept is waited out. Which addresses may be listened on without TLS is checked here too.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::dialer::ConnectionConfig;
use crate::tls::Tls;

/// How the internal server treats connections.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServerConfig {
    /// What both ends share. `connect_timeout` is also the time for a caller's first bytes.
    pub connection: ConnectionConfig,
}

/// An address that must not be listened on as things are.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "internal services on {0} would be open to everyone: configure TLS files (ca, cert, key), listen on a loopback \
     address such as 127.0.0.1, or allow it with --insecure"
)]
pub struct ExposureError(pub SocketAddr);

/// Whether internal services may listen on `address`: with TLS anywhere, without it on loopback only, unless `insecure`.
///
/// # Errors
/// If they may not.
pub fn check_exposure(address: SocketAddr, has_tls: bool, insecure: bool) -> Result<(), ExposureError> {
    if has_tls || insecure || address.ip().to_canonical().is_loopback() {
        return Ok(());
    }
    Err(ExposureError(address))
}

/// Serve `routes` on `listener` until `shutdown`; then no new connections or calls, running calls may finish within
/// `grace`, and what is left is cut. Heartbeats must end by themselves (see [`NodeStatus::new`](crate::NodeStatus::new)),
/// or they use up the grace.
pub async fn serve_internal(
    listener: TcpListener,
    tls: Option<Tls>,
    routes: Routes,
    config: ServerConfig,
    shutdown: CancellationToken,
    grace: Duration,
) {
    /// Out of file descriptors, most likely: let some connections end.
    const AFTER_FAILURE: Duration = Duration::from_millis(100);
    let builder = Arc::new(connections(&config.connection));
    let serving =
        Serving { routes: routes.prepare(), builder, tls, greeting: config.connection.connect_timeout, shutdown };
    let mut open = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = serving.shutdown.cancelled() => break,
            Some(_) = open.join_next(), if !open.is_empty() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, caller)) => {
                    open.spawn(connection(stream, caller, serving.clone()));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept an internal connection");
                    sleep(AFTER_FAILURE).await;
                }
            },
        }
    }
    drop(listener);
    let finished = async { while open.join_next().await.is_some() {} };
    if timeout(grace, finished).await.is_err() {
        tracing::warn!(grace_s = grace.as_secs_f64(), connections = open.len(), "internal connections are cut");
    }
}

fn connections(config: &ConnectionConfig) -> Builder<TokioExecutor> {
    let mut builder = Builder::new(TokioExecutor::new()).http2_only();
    builder
        .http2()
        .timer(TokioTimer::new())
        .initial_stream_window_size(config.stream_window)
        .initial_connection_window_size(config.connection_window)
        .max_frame_size(config.max_frame)
        .max_concurrent_streams(config.max_streams)
        .keep_alive_interval(config.ping_interval)
        .keep_alive_timeout(config.ping_timeout);
    builder
}

/// What all connections share.
#[derive(Clone)]
struct Serving {
    routes: Routes,
    builder: Arc<Builder<TokioExecutor>>,
    tls: Option<Tls>,
    /// Time for a caller's first bytes, and for TLS.
    greeting: Duration,
    shutdown: CancellationToken,
}

async fn connection(stream: TcpStream, caller: SocketAddr, serving: Serving) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%caller, %error, "cannot switch off delayed sending");
    }
    let begun = async {
        stream.readable().await?;
        match &serving.tls {
            None => Ok((None, Some(stream))),
            Some(tls) => tls.acceptor().accept(stream).await.map(|secured| (Some(secured), None)),
        }
    };
    let begun = tokio::select! {
        begun = timeout(serving.greeting, begun) => begun,
        () = serving.shutdown.cancelled() => return,
    };
    match begun {
        Err(_) => tracing::debug!(%caller, "an internal connection said nothing"),
        Ok(Err(error)) => tracing::warn!(%caller, %error, "an internal connection was refused"),
        Ok(Ok((Some(secured), _))) => calls(secured, caller, serving).await,
        Ok(Ok((None, Some(plain)))) => calls(plain, caller, serving).await,
        Ok(Ok((None, None))) => debug_assert!(false, "a connection is secured or plain"),
    }
}

async fn calls(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static, caller: SocketAddr, serving: Serving) {
    let service = TowerToHyperService::new(serving.routes);
    let mut connection = std::pin::pin!(serving.builder.serve_connection(TokioIo::new(stream), service));
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = serving.shutdown.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%caller, %error, "an internal connection ended");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_tls_only_loopback_is_served() {
        let address = |text: &str| text.parse::<SocketAddr>().expect("an address");
        for loopback in ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            assert_eq!(check_exposure(address(loopback), false, false), Ok(()), "{loopback}");
        }
        for open in ["0.0.0.0:1", "10.0.0.1:1", "[::]:1", "[::ffff:10.0.0.1]:1"] {
            assert_eq!(check_exposure(address(open), false, false), Err(ExposureError(address(open))));
            assert_eq!(check_exposure(address(open), true, false), Ok(()));
            assert_eq!(check_exposure(address(open), false, true), Ok(()));
        }
    }
}
