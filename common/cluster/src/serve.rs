//! The internal server: its services, and the end of its connections. Which addresses may be listened on without TLS is
//! checked here too; nothing else can be refused.

use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::accept::{AcceptConfig, accept, note_end};
use crate::dialer::ConnectionConfig;
use crate::tls::Tls;

/// How the internal server treats connections.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServerConfig {
    /// What both ends share. `connect_timeout` is also the time for a caller's first bytes.
    pub connection: ConnectionConfig,
}

impl ServerConfig {
    fn accept(&self) -> AcceptConfig {
        let connection = &self.connection;
        AcceptConfig {
            http1: false,
            greeting: connection.connect_timeout,
            stream_window: connection.stream_window,
            connection_window: connection.connection_window,
            max_frame: Some(connection.max_frame),
            header_limit: None,
            max_streams: connection.max_streams,
            ping_interval: connection.ping_interval,
            ping_timeout: connection.ping_timeout,
            after_failure: connection.accept_pause,
        }
    }
}

/// An address that must not be listened on as things are.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "internal services on {0} would be open to everyone: configure TLS files (ca, cert, key), listen on a loopback \
     address such as 127.0.0.1, or allow it with --insecure"
)]
pub struct ExposureError(pub SocketAddr);

/// Whether internal services may listen on `address`: with TLS anywhere, without it on loopback only, unless
/// `insecure`.
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
/// `grace`, and what is left is cut. Heartbeats must end by themselves (see
/// [`NodeStatus::new`](crate::NodeStatus::new)), or they use up the grace.
pub async fn serve_internal(
    listener: TcpListener,
    tls: Option<Tls>,
    routes: Routes,
    config: ServerConfig,
    shutdown: CancellationToken,
    grace: Duration,
) {
    let routes = routes.prepare().into_axum_router();
    let mut open = accept(listener, tls, routes, config.accept(), shutdown).await;
    let finished = async {
        while let Some(ended) = open.join_next().await {
            note_end(ended);
        }
    };
    if timeout(grace, finished).await.is_err() {
        tracing::warn!(grace_s = grace.as_secs_f64(), connections = open.len(), "internal connections are cut");
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
